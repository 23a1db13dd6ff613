"""Worlds of up to 1,024 ranks, simulated in one process: shards, groups, collectives, and plans of checkpoints.

A fake process group moves no data, so gathered values are meaningless. What a rank keeps, whom it calls, with what
shapes and in which order is real. If two ranks of a group call different collectives, they would hang.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
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
from torch_fsdp_tests.fsdp.shards import local_of
from torch_fsdp_tests.fsdp.sharded_states import use_sharded_state_dicts
from torch_fsdp_tests.fsdp.training import loss_of, replicate_each, shard_each
from torch_fsdp_tests.installed_torch import torch_facts, torch_names

WIDTH = 3
SMALLER = 4  # ranks of the mesh to which a layout reshards after forward
Box = tuple[slice, ...]


class Net(nn.Module):
    """Its first layer has rows for some ranks only. One layer is frozen, and one is not used."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(WIDTH, rows), nn.Linear(rows, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.net2(self.net1(x).tanh()))


def units(model: Net) -> list[nn.Module]:
    return [model.net1, model.net2, model.frozen]


def fsdp1(model: Net, mesh: DeviceMesh) -> nn.Module:
    ids = set(map(id, units(model)))
    strategy = ShardingStrategy.HYBRID_SHARD if mesh.ndim == 2 else ShardingStrategy.FULL_SHARD
    policy = CustomPolicy(lambda module: id(module) in ids)
    return FSDP(model, sharding_strategy=strategy, auto_wrap_policy=policy, device_mesh=mesh, use_orig_params=True)


def fsdp2(model: Net, mesh: DeviceMesh, **kwargs: Any) -> nn.Module:
    return shard_each([*units(model), model], mesh=mesh, **kwargs)


def with_tp(model: Net, mesh: DeviceMesh) -> nn.Module:
    """Each rank splits its own parameters, because a fake world cannot send those of the first rank."""
    plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan, src_data_rank=None)
    return fsdp2(model, mesh[(mesh.mesh_dim_names or ())[:-1]])


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
FSDP2_LAYOUTS = [name for name in LAYOUTS if not name.startswith("FSDP1")]
WORLDS = [8, 64, 1024]


def rows_in(world: int) -> int:
    """An even number that no layout shares evenly; some ranks have no rows."""
    return 6 if world == 8 else 3 * world // 4 + 2


def sample(world: int) -> list[int]:
    """All ranks of a small world. Of a large one those at the ends, in the middle, and around the last rank with rows."""
    if world == 8:
        return list(range(world))
    last = math.ceil(rows_in(world) / math.ceil(rows_in(world) / world)) - 1
    return sorted({0, 1, 5, world // 2 - 1, world // 2, last - 1, last, last + 1, world - 2, world - 1})


class TestManyRanks(MultiProcessTestCase):
    world_size = 1

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def _as(self, rank: int, layout: str, world: int) -> Any:
        if layout == "replicate":
            skip_unless([torch_facts.REPLICATES_WITHOUT_SHARDS.lacks])
        shape = LAYOUTS[layout].shape(world)
        return as_rank(rank, *shape, names=LAYOUTS[layout].names[-len(shape) :])

    def _model(self, layout: str, world: int, mesh: DeviceMesh) -> Any:
        return LAYOUTS[layout].apply(self._plain(world), mesh)

    def _plain(self, world: int) -> Net:
        return filled(Net(rows_in(world)).to(self.device))

    @subtests(layout=FSDP2_LAYOUTS, world=WORLDS)
    def test_shards(self, layout, world):
        """The shards of all ranks add up to each parameter, as often as there are replicas, and nothing is left out."""
        plain = dict(self._plain(world).named_parameters())
        seen = {name: torch.zeros(param.shape) for name, param in plain.items()}
        for rank in sample(world):
            with self._as(rank, layout, world) as mesh:
                for name, param in self._model(layout, world, mesh).named_parameters():
                    local, box = local_of(param.detach()), box_of(param)
                    self.assertEqual(local, plain[name].detach()[box], f"{name} of rank {rank}", may_be="empty")
                    seen[name][box] += 1
        if world == 8:
            shape = LAYOUTS[layout].shape(world)
            for name, count in seen.items():
                shards = math.prod(shape)
                self.assertEqual(count.unique().numel(), 1, name)
                self.assertEqual(shards % int(count.flatten()[0]), 0, name)
                replicas = {"HSDP": 2, "replicate": 8, "TP and HSDP": 2}.get(layout, 1)
                is_split = "TP" in layout and name in ("net1.weight", "net1.bias", "net2.weight")
                copies = replicas * (2 if "TP" in layout and not is_split else 1)
                self.assertEqual(int(count.flatten()[0]), copies, name)

    @subtests(layout=["FSDP1", "FSDP1 hybrid"], world=WORLDS)
    def test_flat_shards(self, layout, world):
        """A flat parameter has equal chunks. The last ones end in padding."""
        plain = self._plain(world)
        shards = LAYOUTS[layout].shape(world)[-1]
        for rank in sample(world):
            with self._as(rank, layout, world) as mesh:
                model = self._model(layout, world, mesh)
                for name, instance in internals.instances(model).items():
                    if name == "":
                        params: Iterable[nn.Parameter] = plain.unused.parameters()
                    else:
                        params = plain.get_submodule(name).parameters()
                    whole = torch.cat([param.detach().flatten() for param in params])
                    size = math.ceil(len(whole) / shards)
                    start = min(rank % shards * size, len(whole))
                    own = whole[start : start + size]
                    flat_param = internals.flat_param_of(instance)
                    self.assertEqual(flat_param.shape, (size,))
                    self.assertEqual(flat_param.detach()[: len(own)], own, f"{name} of rank {rank}", may_be="empty")
                    self.assertEqual(internals.padding_of(flat_param), size - len(own))

    @subtests(layout=list(LAYOUTS), world=WORLDS)
    def test_groups(self, layout, world):
        """A rank shards over neighbors, apart from tensor parallelism inside, and replicates across them."""
        shape = LAYOUTS[layout].shape(world)
        inner = 2 if "TP" in layout else 1  # ranks that split a layer
        for rank in sample(world):
            grid = torch.arange(world).view(-1, shape[-2] if inner == 2 else shape[-1], inner)
            row, column, tensor = ((grid == rank).nonzero()[0]).tolist()
            with self._as(rank, layout, world) as mesh:
                model = self._model(layout, world, mesh)
                if layout.startswith("FSDP1"):
                    found = {ranks_of(instance.process_group) for instance in internals.instances(model).values()}
                    self.assertEqual(found, {tuple(grid[row, :, tensor].tolist())})
                    continue
                infos = [group.mesh_info for group in internals.groups_of(model)]
                self.assertEqual(len(infos), 4)
                shard = grid[row, :, tensor].tolist()
                replicas = grid[:, column, tensor].tolist()
                if layout == "replicate":
                    self.assertEqual({ranks_of(info.replicate_process_group) for info in infos}, {tuple(range(world))})
                    continue
                self.assertEqual({ranks_of(info.shard_process_group) for info in infos}, {tuple(shard)})
                if "HSDP" in layout:
                    self.assertEqual({ranks_of(info.replicate_process_group) for info in infos}, {tuple(replicas)})
                if layout.endswith("smaller mesh"):
                    first = rank - rank % SMALLER
                    small = [group.post_forward_mesh_info for group in internals.groups_of(model)]
                    self.assertEqual(
                        {ranks_of(info.shard_process_group) for info in small}, {tuple(range(first, first + SMALLER))}
                    )

    @subtests(layout=list(LAYOUTS), world=WORLDS)
    def test_collectives(self, layout, world):
        """All ranks of a group call the same collectives in the same order, whatever rows they have."""
        by_group: dict[tuple[int, ...], dict[int, list[Called]]] = {}
        for rank in sample(world):
            with self._as(rank, layout, world) as mesh:
                calls = self._calls_of_training(layout, world, mesh)
            self.assertGreater(len(calls), 8)
            for ranks in {call.ranks for call in calls}:
                self.assertIn(rank, ranks)
                by_group.setdefault(ranks, {})[rank] = [call for call in calls if call.ranks == ranks]
            counts = {"all calls": len(calls)}
            by_group.setdefault((), {})[rank] = [Called(f"{counts}", (), ())]
        for ranks, lists in by_group.items():
            first, *others = lists.items()
            for rank, calls in others:
                self.assertEqual(calls, first[1], f"ranks {first[0]} and {rank} of {len(ranks)}", may_be="same")
        self.assertTrue(any(len(lists) > 1 for ranks, lists in by_group.items() if ranks))

    def _calls_of_training(self, layout: str, world: int, mesh: DeviceMesh) -> list[Called]:
        """Two steps with clipped gradients, a forward in eval mode, and state dicts."""
        model = self._model(layout, world, mesh)
        with CalledCollectives() as called:
            for step in range(2):
                loss_of(model(uniform(2, WIDTH, seed=step))).backward()
                if isinstance(model, FSDP):
                    model.clip_grad_norm_(1.0)
                elif "TP" not in layout:  # see the defect optimizer_clip_grad_norm_over_two_meshes_raises
                    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                with torch.no_grad():
                    for param in model.parameters():
                        if param.grad is not None and param.numel():
                            local_of(param).sub_(local_of(param.grad))
                        param.grad = None
            with torch.no_grad():
                model.eval()
                model(uniform(2, WIDTH, seed=2))
            if isinstance(model, FSDP):
                use_sharded_state_dicts(model)
                model.state_dict()
            else:
                for value in model.state_dict().values():
                    if isinstance(value, DTensor):
                        value.full_tensor()
        return called.calls

    @subtests(
        pair=[
            ("FSDP2", "HSDP"),
            ("HSDP", "TP and HSDP"),
            ("TP and FSDP2", "FSDP1"),
            ("FSDP1", "TP and FSDP2"),
            ("TP and HSDP", "replicate"),
            ("replicate", "FSDP1 hybrid"),
            ("FSDP1 hybrid", "FSDP2"),
        ],
        worlds=[(8, 8), (8, 4)],
    )
    def test_plans(self, pair, worlds):
        """The plans of all ranks write each element once, and those of other ranks in another layout read each once."""
        saved, loaded = pair
        plans = []
        for rank in range(worlds[0]):
            with self._as(rank, saved, worlds[0]) as mesh:
                planner = dcp.DefaultSavePlanner()
                planner.set_up_planner(self._state_dict(saved, mesh), is_coordinator=rank == 0)
                plans.append(planner.create_local_plan())
        plans, metadata = dcp.DefaultSavePlanner().create_global_plan(plans)
        shapes = {name: param.shape for name, param in self._plain(8).named_parameters()}
        written = {name: torch.zeros(shape) for name, shape in shapes.items()}
        for item in (item for plan in plans for item in plan.items):
            chunk = item.tensor_data.chunk
            written[item.index.fqn][boxed(chunk.offsets, chunk.sizes)] += 1
        self.assertEqual(written, {name: torch.ones(shape) for name, shape in shapes.items()})
        for rank in range(worlds[1]):
            with self._as(rank, loaded, worlds[1]) as mesh:
                state = self._state_dict(loaded, mesh)
                reader = dcp.DefaultLoadPlanner()
                reader.set_up_planner(state, metadata, is_coordinator=rank == 0)
                read = {name: torch.zeros_like(local_of(value)) for name, value in state.items()}
                for item in reader.create_local_plan().items:
                    name = item.dest_index.fqn
                    read[name][boxed(item.dest_offsets, item.lengths)] += 1
                    chunk = metadata.state_dict_metadata[name].chunks[item.storage_index.index]
                    source = [a + b for a, b in zip(chunk.offsets, item.storage_offsets, strict=True)]
                    own = [part.start for part in box_of(state[name])]
                    target = [a + b for a, b in zip(own, item.dest_offsets, strict=True)]
                    self.assertEqual(source, target, f"{name} of rank {rank}", may_be="zero")
                self.assertEqual(read, {name: torch.ones_like(each) for name, each in read.items()}, may_be="empty")

    def _state_dict(self, layout: str, mesh: DeviceMesh) -> dict[str, Any]:
        model = self._model(layout, 8, mesh)
        if isinstance(model, FSDP):
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
