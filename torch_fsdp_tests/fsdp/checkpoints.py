"""Training that is saved in one layout and continues in another, and the plain run to compare it with.

A layout says how a model is distributed, and over how many of the first ranks: with FSDP1, FSDP2 or tensor parallelism.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_fsdp_tests.common_fsdp.device import rank_device
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase
from torch_fsdp_tests.fsdp.optimizers import fused_on_host
from torch_fsdp_tests.fsdp.references import full
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.sharded_states import SimpleModel, moments, sharded_state_dicts, step_counts, train_on_share


class UnevenLayers(SimpleModel):
    """Layers of 5 x 3 and 3 x 5 with biases. Neither 2 nor 4 divides their rows, and some of 4 ranks have no rows."""

    sizes = (3, 5, 3)


class Layout(NamedTuple):
    """How a model is distributed over ranks. ``apply`` parallelizes a plain model over a mesh of this shape.

    ``names`` names the mesh's last dimensions. Ranks along "tensor", which comes last, share a batch.
    """

    shape: tuple[int, ...]
    apply: Callable[..., nn.Module]
    names: tuple[str, ...] = ("replicate", "shard")

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def dims(self) -> dict[str, int]:
        """The size of each dimension of the mesh."""
        return dict(zip(self.names[-len(self.shape) :], self.shape))

    @property
    def batches(self) -> int:
        """The number of ranks, or groups of ranks, with different batches."""
        return math.prod(size for name, size in self.dims.items() if name != "tensor")

    @property
    def batch_index(self) -> int:
        """The number of this rank's batch."""
        return dist.get_rank() * self.batches // self.size

    def mesh(self) -> DeviceMesh:
        """A mesh of the first ranks. All ranks of the default group must call this."""
        ranks = torch.arange(self.size).view(self.shape)
        return DeviceMesh(accelerator.current().type, ranks, mesh_dim_names=tuple(self.dims))


def _fsdp1(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wrap each child."""
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({type(child) for child in model.children()}),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else ShardingStrategy.FULL_SHARD,
        device_mesh=mesh,
        use_orig_params=True,
    )


def _fsdp2(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Wrap each child."""
    for module in (*model.children(), model):
        fully_shard(module, mesh=mesh)
    return model


def _tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    # A DTensor passes between the layers: a local tensor would not say how many columns the other ranks have.
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    styles = ColwiseParallel(use_local_output=False), RowwiseParallel()
    return parallelize_module(model, mesh, dict(zip(linear, itertools.cycle(styles))))


def before_tensor(mesh: DeviceMesh) -> DeviceMesh:
    """The dimensions of a mesh for data parallelism: all but the last, which is for tensor parallelism."""
    return mesh[(mesh.mesh_dim_names or ())[:-1]]


def _with_tensor_parallel(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    return lambda model, mesh: apply(_tensor_parallel(model, mesh["tensor"]), before_tensor(mesh))


TENSOR = ("replicate", "shard", "tensor")
LAYOUTS = {
    "plain": Layout((1,), lambda model, mesh: model),
    "FSDP1 on 2": Layout((2,), _fsdp1),
    "FSDP1 on 4": Layout((4,), _fsdp1),
    "FSDP1 on 2x2": Layout((2, 2), _fsdp1),
    "FSDP2 on 2": Layout((2,), _fsdp2),
    "FSDP2 on 4": Layout((4,), _fsdp2),
    "FSDP2 on 2x2": Layout((2, 2), _fsdp2),
    "TP on 2": Layout((2,), _tensor_parallel, TENSOR),
    "TP on 4": Layout((4,), _tensor_parallel, TENSOR),
    "FSDP2 and TP on 2x2": Layout((2, 2), _with_tensor_parallel(_fsdp2), TENSOR),
    "FSDP2 and TP on 2x2x2": Layout((2, 2, 2), _with_tensor_parallel(_fsdp2), TENSOR),
}


class SavedRun:
    """A model in a layout, with Adam. It trains on its ranks' shares of the batches, is saved, and is loaded.

    All ranks of the default group must create it. Ranks outside of the layout then have no part of it (``takes_part``).
    """

    def __init__(self, layout: Layout, seed: int = 0, model_class: Callable[[], nn.Module] = UnevenLayers) -> None:
        self.layout, self.mesh = layout, layout.mesh()
        self.group = dist.new_group(list(range(layout.size)))
        self.takes_part = dist.get_rank() < layout.size
        if self.takes_part:
            self.model = layout.apply(filled(model_class().to(rank_device()), seed=seed), self.mesh)
            self.optim = torch.optim.Adam(self.model.parameters(), lr=1e-2, **fused_on_host())

    def train(self, steps: range) -> SavedRun:
        """Train for these steps. Their numbers determine the batches. Returns the run."""
        if self.takes_part:
            train_on_share(self.model, self.optim, steps, self.layout.batch_index, self.layout.batches)
        return self

    def state_dict(self) -> dict[str, Any]:
        """The sharded states as "model" and "optim"."""
        if self._is_fsdp1_of_some_ranks:
            return sharded_state_dicts(self.model, self.optim, group=self.group)
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim}

    @property
    def _is_fsdp1_of_some_ranks(self) -> bool:
        """Whether FSDP's own functions need the group. Before 2.13 ``get_state_dict`` does not pass it."""
        return isinstance(self.model, FSDP) and self.layout.size < dist.get_world_size()

    def full(self) -> dict[str, torch.Tensor]:
        """The full parameters, moments and step counts in host memory. Empty on a rank outside of the layout."""
        if not self.takes_part:
            return {}
        state = self.state_dict()
        tensors = {**state["model"], **moments(state["optim"])}
        values = {name: full(value).detach().cpu().clone() for name, value in tensors.items()}
        return {**values, "steps": torch.tensor(step_counts(state["optim"]))}

    def save(self, path: str, **kwargs: Any) -> None:
        """Save to this directory. The ranks wait for each other."""
        if self.takes_part:
            dcp.save(self.state_dict(), checkpoint_id=path, process_group=self.group, **kwargs)
        dist.barrier()

    def load(self, path: str, **kwargs: Any) -> None:
        """Load a checkpoint that any run saved there, in any layout."""
        if self.takes_part:
            state = self.state_dict()
            dcp.load(state, checkpoint_id=path, process_group=self.group, **kwargs)
            self.set_state_dict(state)

    def set_state_dict(self, state: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` of the same layout has returned."""
        if self._is_fsdp1_of_some_ranks:
            self.model.load_state_dict(state["model"])
            FSDP.optim_state_dict_to_load(self.model, self.optim, state["optim"], load_directly=True, group=self.group)
        else:
            set_state_dict(
                self.model,
                self.optim,
                model_state_dict=state["model"],
                optim_state_dict=state["optim"],
            )


def plain_run(steps: range, seed: int = 0, model_class: type[nn.Module] = UnevenLayers) -> dict[str, torch.Tensor]:
    """The expected result of :meth:`SavedRun.full` after these steps, from a plain model that each rank trains."""
    model = filled(model_class().to(rank_device()), seed=seed)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2, **fused_on_host())
    train_on_share(model, optim, steps)
    params = dict(model.named_parameters())
    state = {"state": {name: optim.state[param] for name, param in params.items()}}
    whole = {**{name: param.detach() for name, param in params.items()}, **moments(state)}
    return {**{name: value.cpu() for name, value in whole.items()}, "steps": torch.tensor(step_counts(state))}


def compiled(layout: Layout) -> Layout:
    """The layout, compiled as far as that is possible without a C++ compiler."""
    return layout._replace(apply=lambda model, mesh: torch.compile(layout.apply(model, mesh), backend="aot_eager"))


def from_first_rank(value: Any) -> Any:
    """The value that the first rank passes. A collective of the default group."""
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


class HostBackendMixin(DTensorTestBase):
    """A test case that also has collectives in host memory, as for saving in a thread."""

    @property
    def backend(self) -> str:
        """The device's own backend, and gloo for the CPU if that is a different backend."""
        return accelerator.current().backend_with_host


class LayoutsMixin(DTensorTestBase):
    """For test cases of four ranks with a temporary directory."""

    temp_dir: str

    def _check_goes_on(self, saved: str, loaded: str, **kwargs: Any) -> None:
        """Training that was saved in one of the :data:`LAYOUTS` continues in another.

        The loaded states replace those of another training, and equal the saved ones bit for bit. Two steps later they
        equal those of a plain run that was never interrupted.
        """
        path = os.path.join(self.temp_dir, f"{saved} to {loaded}")
        source = SavedRun(LAYOUTS[saved]).train(range(2))
        expected = from_first_rank(source.full())
        self.assertEqual(expected, plain_run(range(2)))
        source.save(path, **kwargs)
        run = SavedRun(LAYOUTS[loaded], seed=1).train(range(9, 10))
        self._check_all_differ(run, expected)
        run.load(path, **kwargs)
        if run.takes_part:
            self.assertEqual(run.full(), expected, rtol=0, atol=0)
            self.assertEqual(run.train(range(2, 4)).full(), plain_run(range(4)))

    def _check_all_differ(self, run: SavedRun, expected: dict[str, torch.Tensor]) -> None:
        for name, value in run.full().items():
            self.assertNotEqual(value, expected[name], msg=name)
