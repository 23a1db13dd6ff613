"""The base class of tests of the parameters and modules that ``fully_shard`` creates."""

from __future__ import annotations

import torch
from torch import nn

from torch_fsdp_tests.common_fsdp import FSDPTestMultiThread
from torch_fsdp_tests.fsdp.seeded import uniform


def full_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().full_tensor() for name, param in module.named_parameters()}


class InitTest(FSDPTestMultiThread):
    def _input(self, *shape: int, seed: int | None = None) -> torch.Tensor:
        """Positive numbers that differ by rank, or by seed if one is given."""
        return uniform(*shape, seed=1 + (self.rank if seed is None else seed))

    def _tokens(self, seed: int | None = None) -> torch.Tensor:
        return (8 * self._input(2, 16, seed=seed)).long()

    def _check_same_names_and_values(self, ref_model: nn.Module, model: nn.Module) -> None:
        wholes = full_tensors(model)
        self.assertEqual(list(wholes), [name for name, _ in ref_model.named_parameters()])
        for name, param in ref_model.named_parameters():
            self.assertEqual(wholes[name], param.detach(), msg=name, rtol=0, atol=0)
