"""Sharded state dicts of FSDP1 on a device mesh: their layout, their values, and loading them."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Placement

from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.references import full_parameters
from torch_fsdp_tests.fsdp.sharded_states import (
    ShardedStatesMixin,
    Trained,
    moments,
    parameters_and_moments,
    step_counts,
    train_on_share,
    use_sharded_state_dicts,
)

_HOST = torch.device("cpu")  # the CPU is the subject


def plain_parameters_and_moments(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Like :func:`parameters_and_moments`, for a model without FSDP or in DDP. No communication."""
    params = {name.removeprefix("module."): param for name, param in model.named_parameters()}
    by_name = moments({"state": {name: optim.state[param] for name, param in params.items()}})
    return {**{name: param.detach() for name, param in params.items()}, **by_name}


class DTensorStatesMixin(ShardedStatesMixin):
    """For a ``DTensorTestBase``: training on shares of a batch, and checks of sharded state dicts on any mesh."""

    def _trained(self, model: nn.Module, steps: range, size: int) -> Trained:
        """Train a model for these steps with ``size`` ranks that share the batches. Returns the model and its Adam."""
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        train_on_share(model, optim, steps, self.rank, size)
        return model, optim

    def _check_laid_out(
        self, model: nn.Module, optim: torch.optim.Optimizer, mesh: DeviceMesh, placements: tuple[Placement, ...]
    ) -> None:
        """Sharded state dicts must have a DTensor on this mesh for each of eight parameters and for its two moments."""
        use_sharded_state_dicts(model)
        found = parameters_and_moments(model, optim)
        self.assertEqual(len(found), 8 + 16)
        for name, value in found.items():
            self.assertIs(type(value), DTensor, name)
            self.assertEqual((value.device_mesh, value.placements), (mesh, placements))
        settings = FSDP.get_state_dict_type(model)
        self.assertTrue(settings.state_dict_config._use_dtensor)
        self.assertTrue(settings.optim_state_dict_config._use_dtensor)

    def _check_same_rows(self, on_mesh: Trained, on_groups: Trained, offload_to_cpu: bool) -> list[str]:
        """DTensors must have the rows of the ShardedTensors. Returns the names of those without rows here."""
        empty, found = [], []
        for model, optim in (on_mesh, on_groups):
            use_sharded_state_dicts(model, offload_to_cpu)
            found.append(parameters_and_moments(model, optim))
        dtensors, sharded_tensors = found
        counts, others = (step_counts(FSDP.optim_state_dict(*trained)) for trained in (on_mesh, on_groups))
        self.assertEqual(counts, others)
        self.assertEqual(list(dtensors), list(sharded_tensors))
        for name, dtensor in dtensors.items():
            self.assertEqual(
                (type(dtensor), type(sharded_tensors[name])), (DTensor, internals.sharded_tensors.ShardedTensor)
            )
            local, shards = dtensor.to_local(), sharded_tensors[name].local_shards()
            self.assertEqual(local.device.type, _HOST.type if offload_to_cpu else self.device.type)
            if shards:
                self.assertEqual(local, shards[0].tensor, msg=name, rtol=0, atol=0, exact_device=True)
            else:
                self.assertEqual(local.numel(), 0)
                empty.append(name)
        return empty

    def _check_optim_comes_back(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        """Save the optimizer after one step, and load it after the next one. Only the optimizer's state is restored."""
        saved = FSDP.optim_state_dict(model, optim)
        expected, file, parameters = copy.deepcopy(saved), _written(saved), full_parameters(model)
        train_on_share(model, optim, range(1, 2), self.rank, self.world_size)
        changed = FSDP.optim_state_dict(model, optim)
        self.assertEqual(step_counts(changed), [2] * len(expected["state"]))
        for name, value in moments(expected).items():
            before, after = (each.to(self.device).full_tensor() for each in (value, moments(changed)[name]))
            self.assertNotEqual(after, before, msg=name)

        optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, torch.load(file)))
        actual = FSDP.optim_state_dict(model, optim)
        self._check_same_dtensors(moments(actual), moments(expected))
        self.assertEqual(step_counts(actual), [1] * len(expected["state"]))
        self.assertEqual(actual["param_groups"], expected["param_groups"])
        self.assertNotEqual(full_parameters(model), parameters)  # the parameters were not saved

    def _check_model_comes_back(self, model: nn.Module, optim: torch.optim.Optimizer) -> None:
        """A step after saving changes every parameter. After loading, the model must compute what the saved one did."""
        saved = model.state_dict()
        expected, file, parameters = copy.deepcopy(saved), _written(saved), full_parameters(model)
        source: Any = getattr(model, "module", model)
        probe = source.get_input().to(self.device)
        output = model(probe).detach()
        train_on_share(model, optim, range(1, 2), self.rank, self.world_size)
        for name, param in full_parameters(model).items():
            self.assertNotEqual(param, parameters[name], msg=name)

        model.load_state_dict(torch.load(file))
        self._check_same_dtensors(model.state_dict(), expected)
        self.assertEqual(full_parameters(model), parameters, rtol=0, atol=0)
        self.assertEqual(model(probe).detach(), output, rtol=0, atol=0)


def _written(state: dict[str, Any]) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file
