"""States that optimizers keep unlike those of PyTorch: as local tensors, on one rank, or in another dtype."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import NO_DEFECT, torch_defect
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.shards import local_of

LOCAL = torch_defect("dcp_local_optim_states_are_saved_by_one_rank")
DTYPE = torch_defect("optimizer_loaded_states_get_the_parameters_dtype")


def on_owner(index: int, grad: Any) -> dict[str, torch.Tensor]:
    """Each parameter has an owner, which keeps the whole state, as in Dion (microsoft/dion#18)."""
    whole = grad.full_tensor()
    return {"value": whole} if index % dist.get_world_size() == dist.get_rank() else {}


# The state for the index and the gradient of a parameter, and the defect that a load shows.
STATES: dict[str, tuple[Callable[[int, Any], dict[str, Any]], torch_defect]] = {
    "of the parameter's kind": (lambda index, grad: {"value": grad.clone()}, NO_DEFECT),
    "on one rank": (on_owner, NO_DEFECT),
    "the same on all ranks": (lambda index, grad: {"value": grad.full_tensor()}, NO_DEFECT),
    "a number": (lambda index, grad: {"value": 3 + index}, NO_DEFECT),
    "local shards": (lambda index, grad: {"value": grad.to_local().clone()}, LOCAL),
    "float64": (lambda index, grad: {"value": grad.double() / 3}, DTYPE),
    "bfloat16": (lambda index, grad: {"value": grad.bfloat16()}, DTYPE),
    "int8": (lambda index, grad: {"value": grad.to(torch.int8)}, DTYPE),
}


class Keeping(torch.optim.Optimizer):
    """Keeps one of the ``STATES``, and updates nothing."""

    def __init__(self, params: Any, kind: str) -> None:
        super().__init__(params, {"lr": 0.1})
        self._state_of = STATES[kind][0]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for index, param in enumerate(self.param_groups[0]["params"]):
            if param.grad is not None:
                self.state[param].update(self._state_of(index, param.grad))


class TestOptimizerStates(FSDPTest):
    world_size = 2

    def _sharded(self, kind: str) -> tuple[nn.Module, Keeping]:
        model = fully_shard(nn.Linear(4, 4, device=self.device))
        return model, Keeping(model.parameters(), kind)

    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(kind=list(STATES))
    def test_states_are_those_that_were_saved(self, kind):
        """A new optimizer gets the states through DSD and DCP, on the rank and in the dtype that they had."""
        (model, optim), (other, new) = (self._sharded(kind) for _ in range(2))
        (model(torch.ones(1, 4, device=self.device)) * torch.arange(1.0, 5, device=self.device)).sum().backward()
        optim.step()
        path = os.path.join(self.temp_dir, kind)
        dcp.save({"optim": get_optimizer_state_dict(model, optim)}, checkpoint_id=path)
        loaded = {"optim": get_optimizer_state_dict(other, new)}
        dcp.load(loaded, checkpoint_id=path)
        set_optimizer_state_dict(other, new, loaded["optim"])
        actual, expected = (
            [{name: local_of(value) for name, value in each.state[param].items()} for param in of.parameters()]
            for each, of in ((new, other), (optim, model))
        )
        with STATES[kind][1]:
            self.assertEqual(actual, expected)


if __name__ == "__main__":
    run_tests()
