"""FSDP in a fake world: one process is one rank of a world of any size, and no data moves.

A rank keeps, sends and calls the same as in a real world, but receives nothing. So these tests do not look at the
values of unsharded parameters or of gradients.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_fsdp_tests.common_distributed import (
    MultiProcessTestCase,
    needs,
)
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest, substitutes
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import MLPModule
from torch_fsdp_tests.distributed.fake_pg import FakeStore
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.shards import chunk_of
from torch_fsdp_tests.fsdp.training import shard_each
from torch_fsdp_tests.installed_torch import torch_facts

BYTES = 4  # bytes of a float32
COLUMNS = 3
PRIME = 61
LARGE = 1024


class TestFakePG(FSDPTest):
    """Each process is one of the ranks of a fake world, so that all of them are tested."""

    fake_pg = True

    @property
    def world_size(self) -> int:
        return 4 if self._testMethodName == "test_fsdp_tp_fake_e2e" else 2

    def test_construct_fsdp(self):
        """Each rank keeps half of the nine elements. The second rank has one element of padding at the end."""
        model = nn.Linear(2, 3).to(self.device)
        whole = torch.cat([param.detach().flatten() for param in model.parameters()])
        flat_param = internals.flat_param_of(FSDP(model))
        self.assertEqual(flat_param.shape, (5,))
        self.assertEqual(internals.padding_of(flat_param), self.rank)
        half = chunk_of(whole, self.rank, 2)
        self.assertEqual(flat_param.detach()[: len(half)], half)

    def test_fsdp_fake_e2e(self):
        """For each parameter, a rank has the elements and gradients that lie in its half of all 22 elements."""
        model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)).to(self.device)
        mine = [[8, 3, 0, 0], [0, 1, 8, 2]][self.rank]
        model = FSDP(model, use_orig_params=True)
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(3):
            with recorded() as calls:
                loss = model(torch.rand(3, 2, device=self.device)).sum()
                self.assertEqual([(call.name, call.numel) for call in calls], [("all_gather", 11)])
                loss.backward()
                self.assertEqual([(call.name, call.numel) for call in calls[1:]], [("reduce_scatter", 22)])
                optim.step()
                self.assertEqual(len(calls), 2)
            for param, size in zip(model.parameters(), mine, strict=True):
                self.assertEqual(param.numel(), size)
                if size:
                    kept = (param.grad, optim.state[param]["exp_avg"], optim.state[param]["exp_avg_sq"])
                    self.assertEqual([each.numel() for each in kept], [size] * 3)
                else:
                    self.assertIsNone(param.grad)
            optim.zero_grad()

    @subtests(plan=["sequence", "pairwise"])
    def test_fsdp_tp_fake_e2e(self, plan):
        """Tensor parallelism halves the layers, and FSDP halves the rest. Both call their collectives in each step."""
        layouts = {"input_layouts": Shard(0)}, {"output_layouts": Shard(0)}
        first, second = layouts if plan == "sequence" else ({}, {})
        # The first layer's input is all-gathered or replicated, and the second layer's output is summed. In backward
        # the gradient of that output is all-gathered or replicated. The input requires no gradient.
        expected = (
            {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 1} if plan == "sequence" else {"all_reduce": 1}
        )
        mesh = init_device_mesh(self.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
        model = MLPModule(self.device)
        whole = {name: param.detach().clone() for name, param in model.named_parameters()}
        layers = {"net1": ColwiseParallel(**first), "net2": RowwiseParallel(**second)}
        # Each rank splits its own parameters. By default the first rank sends its own to all, but a fake world moves no
        # data.
        parallelize_module(model, mesh["tp"], layers, src_data_rank=None)
        dp_rank, tp_rank = divmod(self.rank, 2)
        local = [
            chunk_of(whole["net1.weight"], tp_rank, 2),
            chunk_of(whole["net1.bias"], tp_rank, 2),
            chunk_of(whole["net2.weight"], tp_rank, 2, dim=1),
            whole["net2.bias"],
        ]
        model = FSDP(model, device_mesh=mesh["dp"])
        flat_param = internals.flat_param_of(model)
        mine = chunk_of(torch.cat([each.flatten() for each in local]), dp_rank, 2)
        self.assertEqual(flat_param.detach(), mine)
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(10):
            with CommDebugMode() as of_tp, recorded("all_gather", "reduce_scatter") as of_fsdp:
                model(torch.rand(4, 10, device=self.device)).sum().backward()
            self.assertEqual(
                [(call.name, call.numel) for call in of_fsdp],
                [("all_gather", len(mine)), ("reduce_scatter", 2 * len(mine))],
            )
            for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"):
                count = of_tp.get_comm_counts()[getattr(torch.ops.c10d_functional, name)]
                self.assertEqual(count, expected.get(name, 0), msg=name)
            self.assertEqual(flat_param.grad.shape, mine.shape)
            optim.step()
            optim.zero_grad()


class TestLargeWorlds(MultiProcessTestCase):
    """The shards of each rank of a large world, and the calls that need other ranks.

    One process becomes a rank of one fake world after another.
    """

    world_size = 1

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    @contextlib.contextmanager
    def _as_rank(self, rank: int, *shape: int, names: tuple[str, ...] = (), **kwargs: Any) -> Iterator[DeviceMesh]:
        """In the context, this process is this rank of a fake world. Yields a mesh of all its ranks."""
        substitutes.install(accelerator.current())
        size = math.prod(shape)
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore(), **kwargs)
        try:
            yield init_device_mesh(self.device.type, shape, mesh_dim_names=names or None)
        finally:
            dist.destroy_process_group()

    def _local_shape(self, rows: int, rank: int, shape: tuple[int, ...], tp: bool = False) -> torch.Size:
        """The shape of this rank's shard of a weight. FSDP2 shards over the last mesh dimension, or the first."""
        with self._as_rank(rank, *shape, names=("first", "last")[-len(shape) :]) as mesh:
            with torch.device("meta"):
                model = nn.Linear(COLUMNS, rows, bias=False)
            if tp:
                model = parallelize_module(model, mesh["last"], ColwiseParallel())
                mesh = mesh["first"]
            weight = fully_shard(model, mesh=mesh).weight
            self.assertEqual(weight.shape, (rows, COLUMNS))
            return weight.to_local().shape

    @subtests(rows=[200, PRIME, 5])
    def test_shards_of_all_ranks(self, rows):
        """With a prime number of ranks, each rank has its chunk of the rows, or none. Together they have all rows."""
        actual = [self._local_shape(rows, rank, (PRIME,))[0] for rank in range(PRIME)]
        chunks = torch.arange(rows).chunk(PRIME)
        self.assertEqual(actual, [*map(len, chunks), *[0] * (PRIME - len(chunks))])
        self.assertEqual(sum(actual), rows)

    @subtests(rows=[400, 70, 5])
    def test_shards_with_tensor_parallelism(self, rows):
        """Tensor parallelism shards first, and FSDP2 shards the rest."""
        actual = [self._local_shape(rows, rank, (PRIME, 2), tp=True)[0] for rank in range(2 * PRIME)]
        halves = torch.arange(rows).chunk(2)
        self.assertEqual(actual, [len(chunk_of(half, i, PRIME)) for i in range(PRIME) for half in halves])
        self.assertEqual(sum(actual), rows)

    @subtests(shape=[(LARGE,), (8, 128), (2, 512)])
    def test_shards_of_a_large_world(self, shape):
        """Ranks at the ends of the mesh, and those next to the last rank that has rows, have the expected shards."""
        rows, shards = LARGE + 6, shape[-1]
        each = math.ceil(rows / shards)
        last = math.ceil(rows / each) - 1
        for rank in sorted({0, 1, last - 1, last, min(last + 1, shards - 1), shards - 1, LARGE - 1}):
            expected = chunk_of(torch.empty(rows, COLUMNS, device="meta"), rank % shards, shards).shape
            self.assertEqual(self._local_shape(rows, rank, shape), expected, msg=f"rank {rank}")
        if len(shape) == 1:
            self.assertEqual(expected, (0, COLUMNS))

    @needs(torch_facts.FAKE_COLLECTIVES_CAN_RAISE)
    @subtests(api=["fully_shard", "FSDP"])
    def test_what_needs_no_other_rank(self, api):
        """Construction, sharded states, clearing gradients, resharding and steps need no collective. A forward does."""
        options = FakeProcessGroup.Options()
        options.error_on_collective = True
        model = filled(nn.Sequential(nn.Linear(COLUMNS, 8), nn.Linear(8, COLUMNS)).to(self.device))
        inp = torch.rand(2, COLUMNS, device=self.device)
        with self._as_rank(3, LARGE, pg_options=options) as mesh:
            model = shard_each([*model, model], mesh=mesh) if api == "fully_shard" else FSDP(model, device_mesh=mesh)
            optim = torch.optim.Adam(model.parameters(), lr=1e-2)
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optim.step()
            optim.zero_grad()
            if api == "fully_shard":
                model.load_state_dict(model.state_dict())
                model.reshard()
            with self.assertRaisesRegex(RuntimeError, "error_on_collective"):
                model(inp)

    @subtests(stages=[True, False], reshard_after_forward=[True, False, 2])
    def test_groups_of_a_name_have_the_same_ranks(self, stages, reshard_after_forward):
        """Groups that have one name on several ranks have the same members, also if each stage has its own ranks.

        Ranks rendezvous under the name of their group, so groups of one name with different members would mix.
        """
        meant: dict[str, set[tuple[int, ...]]] = {}
        for rank in range(8):
            with self._as_rank(rank, 2, 4, names=("first", "last")) as mesh:
                layer = nn.Linear(8, 8, device=self.device)
                if stages:
                    mesh = mesh["last"]
                model = fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
                info = internals.group_of(model).post_forward_mesh_info
                for group in (*mesh.get_all_groups(), *(info.mesh.get_all_groups() if info else ())):
                    meant.setdefault(group.group_name, set()).add(tuple(dist.get_process_group_ranks(group)))
        with torch_defect("fsdp2_smaller_mesh_of_some_ranks_hangs", when=stages and reshard_after_forward == 2):
            self.assertEqual({name: len(ranks) for name, ranks in meant.items()}, dict.fromkeys(meant, 1))

    def test_memory_of_a_model_without_memory(self):
        """A model of 34 GB is planned with fake tensors. The peak of a step equals the one calculated by hand."""
        dim, blocks, batch, ranks = 8192, 16, 2, 64
        block, hidden, row = BYTES * 8 * dim * dim, BYTES * batch * 4 * dim, BYTES * batch * dim
        with self._as_rank(5, ranks) as mesh, internals.fake_tensors.FakeTensorMode():
            with torch.device("meta"):
                model = nn.Sequential(*(MLP(dim, bias=False) for _ in range(blocks)))
            shard_each([*model, model], mesh=mesh)
            model.to_empty(device=self.device)
            inp = torch.empty(batch, dim, device=self.device)
            tracker = internals.fsdp2_memory.FSDPMemTracker(model)
            tracker.track_inputs((inp,))
            with tracker:
                model(inp).sum().backward()
            peak = sum(found["Total"] for found in tracker.get_tracker_snapshot("peak").values())
            rest = sum(found["Total"] for found in tracker.get_tracker_snapshot("current").values())
        shard = block // ranks
        self.assertEqual(rest, 2 * blocks * shard + row)
        # Backward through the second block, after all blocks but the first two have reduced: this block has its
        # parameters and gradients, the first block's parameters were prefetched, and the third block's gradients
        # are still being sent. The first two blocks have two activations each, or gradients of activations. Then come
        # the input, the loss, and its gradient.
        sharded, unsharded, activations = (2 * blocks - 2) * shard, 4 * block, 2 * (hidden + row) + row + 2 * BYTES
        self.assertEqual(peak, sharded + unsharded + activations)


if __name__ == "__main__":
    run_tests()
