"""Sharded state dicts of FSDP1 on a device mesh: models for them, their contents, and loading."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardedOptimStateDictConfig, ShardedStateDictConfig, StateDictType
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import manual_seed
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase
from torch_fsdp_tests.fsdp.training import backward

Trained = tuple[nn.Module, torch.optim.Optimizer]

PARTS = 4  # parts of a batch, which 1, 2 or 4 ranks share


class FourLayers(nn.Module):
    """Linear layers from 8 to 16, 32, 64 and back to 8 elements, with ReLUs. All instances have the same parameters.

    Every dimension is divisible by 8. The names of the parameters are those of upstream's models for state dicts.
    """

    def __init__(self) -> None:
        super().__init__()
        manual_seed(0)
        self.net1 = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.net2 = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.net3 = nn.Sequential(nn.Linear(32, 64), nn.ReLU())
        self.net4 = nn.Sequential(nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map rows of 8 elements to rows of 8 elements."""
        return self.net4(self.net3(self.net2(self.net1(x))))

    def get_input(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Four rows for :func:`train_on_share`, in host memory."""
        return torch.rand(4, 8, generator=generator)


class SimpleModel(nn.Module):
    """Linear layers ``net1`` to ``net3`` from 5 to 8, 4 and 12 elements, with tanh between. 2 and 4 divide the rows."""

    sizes: tuple[int, ...] = (5, 8, 4, 12)

    def __init__(self) -> None:
        super().__init__()
        for number, (inputs, outputs) in enumerate(itertools.pairwise(self.sizes), 1):
            self.add_module(f"net{number}", nn.Linear(inputs, outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # There is no ReLU here: if it were dead, its layer would not change.
        first, *others = self.children()
        x = first(x)
        for layer in others:
            x = layer(x.tanh())
        return x

    def get_input(self, generator: torch.Generator | None = None) -> torch.Tensor:
        """Four rows for :func:`train_on_share`, in host memory."""
        return torch.rand(4, self.sizes[0], generator=generator)


class SimpleModelUneven(SimpleModel):
    """Layers from 5 to 10, 15 and 5 elements. The rows of some layers are not divisible by 2 or 4."""

    sizes = (5, 10, 15, 5)


def train_on_share(model: nn.Module, optim: torch.optim.Optimizer, steps: range, rank: int = 0, size: int = 1) -> None:
    """Train on this rank's share of a batch of four parts, or with ``size`` 1 on the whole batch.

    A part comes from ``get_input(generator)`` of the model, or of the module that FSDP or DDP holds. It depends on the
    number of the step, so that other steps are a different training. The loss is the sum of the outputs, multiplied by
    ``size`` and divided by four. So the average over the ranks is the gradient of a plain model on the whole batch,
    also if the ranks have different numbers of parts.
    """
    source: Any = getattr(model, "module", model)
    device = next(model.parameters()).device
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        parts = [source.get_input(generator).to(device) for _ in range(PARTS)]
        share = parts[rank * PARTS // size : (rank + 1) * PARTS // size] if size > 1 else parts
        optim.zero_grad()
        losses.append(backward(model(torch.cat(share)).sum().mul(size / PARTS)))
        optim.step()
    check_losses(losses)


def use_sharded_state_dicts(model: nn.Module, offload_to_cpu: bool = False) -> None:
    """Set the type of the model's and its optimizer's state dicts to SHARDED_STATE_DICT."""
    FSDP.set_state_dict_type(
        model,
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu),
        ShardedOptimStateDictConfig(offload_to_cpu),
    )


def sharded_state_dicts(
    model: nn.Module, optim: torch.optim.Optimizer, offload_to_cpu: bool = False, group: dist.ProcessGroup | None = None
) -> dict[str, Any]:
    """Both state dicts, as "model" and "optim", for ``torch.distributed.checkpoint``. A collective.

    ``group`` has all ranks of the model, if it is not the default group.
    """
    use_sharded_state_dicts(model, offload_to_cpu)
    return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optim, group=group)}


def moments(osd: dict[str, Any]) -> dict[str, Any]:
    """The parameter states in an optimizer's state dict without the step counts, by "parameter.state"."""
    return {
        f"{name}.{key}": value for name, state in osd["state"].items() for key, value in state.items() if key != "step"
    }


def step_counts(osd: dict[str, Any]) -> list[float]:
    """The step count of each parameter of an optimizer's state dict."""
    return [float(state["step"]) for state in osd["state"].values()]


def parameters_and_moments(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Both state dicts of an FSDP1 model, without the step counts, in one dict. A collective of its group."""
    return {**model.state_dict(), **moments(FSDP.optim_state_dict(model, optim))}


class ShardedStatesMixin(DTensorTestBase):
    """A test case that takes sharded state dicts."""

    def init_pg(self, *args: Any, **kwargs: Any) -> None:
        # FSDP's functions that set the type of state dicts give a deprecation warning on every call.
        warnings.filterwarnings("ignore", category=FutureWarning)
        super().init_pg(*args, **kwargs)

    def _check_same_dtensors(self, actual: dict[str, Any], expected: dict[str, Any]) -> None:
        """The DTensors must have the same names and the same values, bit for bit, in every shard."""
        self.assertEqual(list(actual), list(expected))
        for name in expected:
            self.assertEqual([type(actual[name]), type(expected[name])], [DTensor, DTensor])
            self.assertEqual(actual[name].placements, expected[name].placements)
            actual_shard, expected_shard = actual[name].to_local(), expected[name].to_local()
            self.assertEqual(actual_shard, expected_shard, msg=name, rtol=0, atol=0, may_be="empty")
