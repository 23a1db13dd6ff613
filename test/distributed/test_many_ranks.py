"""Worlds of up to 1,024 ranks, simulated in one process: shards, groups, collectives, and plans of checkpoints.

A fake process group moves no data, so gathered values are meaningless. What a rank keeps, whom it calls, with what
shapes and in which order is real. If two ranks of a group call different collectives, they would hang.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_fsdp_tests.common_distributed import MultiProcessTestCase
from torch_fsdp_tests.common_distributed.requirements import skip_unless
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.fake_worlds import Called, CalledCollectives, as_rank
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.sharded_states import use_sharded_state_dicts
from torch_fsdp_tests.fsdp.shards import local_of
from torch_fsdp_tests.fsdp.training import loss_of, replicate_each, shard_each
from torch_fsdp_tests.installed_torch import torch_facts

WIDTH = 3
ROWS = 770  # of the largest layer; 8 and 64 ranks share them unevenly, and of 1,024 ranks the last ones have none
SMALLER = 4  # ranks of the mesh to which a layout reshards after forward
SMALL, LARGE = 8, (64, 1024)  # ranks
TRAINED = (0, 3, 6, 7)  # those of the small world that also train: of both halves, even and odd, and the shorter last
Box = tuple[slice, ...]
Tensors = dict[str, torch.Tensor]


class Net(nn.Module):
    """Not all ranks of a large world have rows of it. One layer is frozen, and one is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(WIDTH, ROWS), nn.Linear(ROWS, WIDTH, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.net2(self.net1(x).tanh()))


def units(model: Net) -> list[nn.Module]:
    return [model.net1, model.net2, model.frozen]


def fsdp1(model: Net, mesh: DeviceMesh, use_orig_params: bool = True) -> nn.Module:
    ids = set(map(id, units(model)))
    strategy = ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else ShardingStrategy.FULL_SHARD
    policy = CustomPolicy(lambda module: id(module) in ids)
    return FSDP(
        model,
        sharding_strategy=strategy,
        auto_wrap_policy=policy,
        device_mesh=mesh,
        use_orig_params=use_orig_params,
    )


def fsdp2(model: Net, mesh: DeviceMesh, **kwargs: Any) -> nn.Module:
    return shard_each([*units(model), model], mesh=mesh, **kwargs)


def with_tp(model: Net, mesh: DeviceMesh) -> nn.Module:
    """Each rank splits its own parameters, because a fake world cannot send those of the first rank."""
    plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    names = tuple(mesh.mesh_dim_names or ())
    parallelize_module(model, mesh[names[-1]], plan, src_data_rank=None)
    return fsdp2(model, mesh[names[:-1]])


class Layout(NamedTuple):
    """How a model is distributed. ``shape`` returns the shape of the mesh of a world of this size."""

    shape: Callable[[int], tuple[int, ...]]
    apply: Callable[[Net, DeviceMesh], nn.Module]
    names: tuple[str, ...] = ("replicate", "shard")


LAYOUTS = {
    "FSDP1": Layout(lambda size: (size,), fsdp1),
    "FSDP1 hybrid": Layout(lambda size: (2, size // 2), fsdp1),
    "FSDP2": Layout(lambda size: (size,), fsdp2),
    "FSDP2 on a smaller mesh": Layout(
        lambda size: (size,), lambda model, mesh: fsdp2(model, mesh, reshard_after_forward=SMALLER)
    ),
    "HSDP": Layout(lambda size: (size // 4, 4), fsdp2),
    "replicate": Layout(
        lambda size: (size,), lambda model, mesh: replicate_each([*units(model), model], mesh=mesh), ("replicate",)
    ),
    "TP and FSDP2": Layout(lambda size: (size // 2, 2), with_tp, ("shard", "tensor")),
    "TP and HSDP": Layout(lambda size: (2, size // 4, 2), with_tp, ("replicate", "shard", "tensor")),
}
NAMES = list(LAYOUTS)
_contexts = itertools.count()


def sample(world: int) -> list[int]:
    """All ranks of a small world. Of a large one the first, the last that has rows, the one after it, and the last."""
    last = math.ceil(ROWS / math.ceil(ROWS / world)) - 1
    return list(range(world)) if world == SMALL else sorted({0, last, min(last + 1, world - 1), world - 1})


class TestManyRanks(MultiProcessTestCase):
    world_size = 1

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _as(self, rank: int, layout: str, world: int) -> Any:
        if layout == "replicate":
            skip_unless([torch_facts.REPLICATES_WITHOUT_SHARDS.lacks])
        shape, names = LAYOUTS[layout].shape(world), LAYOUTS[layout].names
        # Torch keeps by equal meshes what depends on the rank, so no two meshes have the same names.
        context = next(_contexts)
        return as_rank(rank, *shape, names=tuple(f"{name}_{context}" for name in names[-len(shape) :]))

    def _plain(self) -> Net:
        return filled(Net().to(self.device))

    def _model(self, layout: str, mesh: DeviceMesh) -> Any:
        return LAYOUTS[layout].apply(self._plain(), mesh)

    # Each layout, and the one whose checkpoint it loads.
    @subtests(case=list(enumerate(zip([NAMES[-1], *NAMES], NAMES))))
    def test_ranks(self, case):
        """The ranks of a world share a model, call each other, and save and load it, without a gap or a conflict."""
        index, (saved, layout) = case
        metadata = self._saved(saved)
        for world in (SMALL, LARGE[index % 2]):
            self._check_world(layout, world, metadata)

    def _check_world(self, layout: str, world: int, metadata: Any) -> None:
        plain = dict(self._plain().named_parameters())
        seen = {name: torch.zeros(param.shape) for name, param in plain.items()}
        calls: dict[int, list[Called]] = {}
        for rank in sample(world):
            with self._as(rank, layout, world) as mesh:
                model = self._model(layout, mesh)
                self._check_groups(layout, world, rank, model)
                if not isinstance(model, FSDP):
                    self._check_shards(model, plain, seen, rank)
                self._check_reads(model, metadata, rank)
                if world != SMALL or rank in TRAINED:
                    calls[rank] = self._calls_of_training(model, is_small=world == SMALL)
        self._check_calls(calls)
        if world == SMALL and not layout.startswith("FSDP1"):
            self._check_copies(layout, seen)

    def _check_shards(self, model: nn.Module, plain: Mapping[str, torch.Tensor], seen: Tensors, rank: int) -> None:
        """This rank has the values of its part of each parameter."""
        for name, param in model.named_parameters():
            local, box = local_of(param.detach()), box_of(param)
            self.assertEqual(local, plain[name].detach()[box], f"{name} of rank {rank}", may_be="empty")
            seen[name][box] += 1

    def _check_copies(self, layout: str, seen: Tensors) -> None:
        """Together all ranks have each element equally often: once for each replica."""
        for name, count in seen.items():
            is_split = "TP" in layout and name in ("net1.weight", "net1.bias", "net2.weight")
            replicas = {"HSDP": SMALL // SMALLER, "replicate": SMALL, "TP and HSDP": 2}.get(layout, 1)
            copies = replicas * (2 if "TP" in layout and not is_split else 1)
            self.assertEqual(count, torch.full_like(count, copies), name)

    def _check_groups(self, layout: str, world: int, rank: int, model: Any) -> None:
        """A rank shards over neighbors, apart from tensor parallelism inside, and replicates across them."""
        shape = LAYOUTS[layout].shape(world)
        inner = 2 if "TP" in layout else 1  # ranks that split a layer
        grid = torch.arange(world).view(-1, shape[-inner], inner)
        row, column, tensor = (grid == rank).nonzero()[0].tolist()
        shard, replicas = tuple(grid[row, :, tensor].tolist()), tuple(grid[:, column, tensor].tolist())
        if isinstance(model, FSDP):
            found = {ranks_of(instance.process_group) for instance in internals.instances(model).values()}
            self.assertEqual(found, {shard})
            return
        groups = internals.groups_of(model)
        self.assertEqual(len(groups), 4)
        if layout == "replicate":
            self.assertEqual({ranks_of(group.mesh_info.replicate_process_group) for group in groups}, {shard})
            return
        self.assertEqual({ranks_of(group.mesh_info.shard_process_group) for group in groups}, {shard})
        if "HSDP" in layout:
            self.assertEqual({ranks_of(group.mesh_info.replicate_process_group) for group in groups}, {replicas})
        if layout.endswith("smaller mesh"):
            first = rank - rank % SMALLER
            small = {ranks_of(group.post_forward_mesh_info.shard_process_group) for group in groups}
            self.assertEqual(small, {tuple(range(first, first + SMALLER))})

    def _check_calls(self, calls: Mapping[int, list[Called]]) -> None:
        """All ranks of a group call the same collectives of this group, in the same order."""
        numbers = {rank: len(of_rank) for rank, of_rank in calls.items()}
        self.assertEqual(len(set(numbers.values())), 1, f"the ranks call different numbers of collectives: {numbers}")
        self.assertGreater(min(numbers.values()), 1)
        for group in {call.ranks for of_rank in calls.values() for call in of_rank}:
            own = {rank: [call for call in calls[rank] if call.ranks == group] for rank in calls if rank in group}
            first, *others = own
            for rank in others:
                self.assertEqual(own[rank], own[first], f"ranks {first} and {rank} of a group of {len(group)}")

    def _calls_of_training(self, model: Any, is_small: bool) -> list[Called]:
        """Steps with clipped gradients, a forward in eval mode, and a full parameter."""
        with CalledCollectives() as called:
            for step in range(2 if is_small else 1):
                loss_of(model(uniform(2, WIDTH, seed=step))).backward()
                if isinstance(model, FSDP):
                    model.clip_grad_norm_(1.0)
                elif is_small and len({param.device_mesh for param in model.parameters()}) == 1:
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                for param in model.parameters():
                    param.grad = None
            with torch.no_grad():
                model.eval()(uniform(2, WIDTH, seed=2))
            state = model.state_dict()
            if not isinstance(model, FSDP):
                state["net1.weight"].full_tensor()
        return called.calls

    def _saved(self, layout: str) -> Any:
        """The metadata of a checkpoint of the small world. The plans of all ranks write each element once."""
        plans = []
        for rank in range(SMALL):
            with self._as(rank, layout, SMALL) as mesh:
                planner = dcp.DefaultSavePlanner()
                planner.set_up_planner(sharded_state_dict(self._model(layout, mesh)), is_coordinator=rank == 0)
                plans.append(planner.create_local_plan())
        plans, metadata = dcp.DefaultSavePlanner().create_global_plan(plans)
        written = {name: torch.zeros(param.shape) for name, param in self._plain().named_parameters()}
        for item in (item for plan in plans for item in plan.items):
            chunk = item.tensor_data.chunk
            written[item.index.fqn][boxed(chunk.offsets, chunk.sizes)] += 1
        self.assertEqual(written, {name: torch.ones_like(count) for name, count in written.items()}, layout)
        return metadata

    def _check_reads(self, model: nn.Module, metadata: Any, rank: int) -> None:
        """The plan of a load reads each element of this rank once, and from its place in the tensor."""
        state = sharded_state_dict(model)
        planner = dcp.DefaultLoadPlanner()
        planner.set_up_planner(state, metadata, is_coordinator=rank == 0)
        read = {name: torch.zeros_like(local_of(value)) for name, value in state.items()}
        for item in planner.create_local_plan().items:
            name = item.dest_index.fqn
            read[name][boxed(item.dest_offsets, item.lengths)] += 1
            chunk = metadata.state_dict_metadata[name].chunks[item.storage_index.index]
            source = [a + b for a, b in zip(chunk.offsets, item.storage_offsets, strict=True)]
            own = [part.start for part in box_of(state[name])]
            target = [a + b for a, b in zip(own, item.dest_offsets, strict=True)]
            self.assertEqual(source, target, f"{name} of rank {rank}", may_be="zero")
        self.assertEqual(read, {name: torch.ones_like(count) for name, count in read.items()}, may_be="empty")

    @subtests(layout=["FSDP1", "FSDP1 hybrid"], world=[SMALL, LARGE[1]])
    def test_flat_shards(self, layout, world):
        """A flat parameter has equal chunks. The last ones end in padding."""
        plain, shards = self._plain(), LAYOUTS[layout].shape(world)[-1]
        for rank in sample(world):
            with self._as(rank, layout, world) as mesh:
                model = fsdp1(self._plain(), mesh, use_orig_params=False)  # which needs no aligned parameters
                for name, instance in internals.instances(model).items():
                    module = plain.get_submodule(name or "unused")
                    whole = torch.cat([param.detach().flatten() for param in module.parameters()])
                    size = math.ceil(len(whole) / shards)
                    own = whole[rank % shards * size :][:size]
                    flat_param = internals.flat_param_of(instance)
                    self.assertEqual(flat_param.shape, (size,))
                    self.assertEqual(flat_param.detach()[: len(own)], own, f"{name} of rank {rank}", may_be="empty")
                    self.assertEqual(internals.padding_of(flat_param), size - len(own))


def sharded_state_dict(model: nn.Module) -> dict[str, Any]:
    if isinstance(model, FSDP):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            use_sharded_state_dicts(model)
    return model.state_dict()


def ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group))


def boxed(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def box_of(tensor: Any) -> Box:
    """This rank's part of a DTensor. Of another tensor that is all of it."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, offsets = internals.local_shape_and_offsets(tensor.shape, tensor.device_mesh, tensor.placements)
    return boxed(offsets, sizes)


if __name__ == "__main__":
    run_tests()
