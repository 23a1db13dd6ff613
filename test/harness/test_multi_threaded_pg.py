"""The threaded process group: compared with gloo on the same data, or with plain arithmetic if gloo cannot do it."""

from __future__ import annotations

import functools
import threading
import time
import unittest
import unittest.mock
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.common_distributed import MultiProcessTestCase, spawn_threads_and_init_comms
from torch_fsdp_tests.common_distributed.multi_threaded import run_threads
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed.multi_threaded_pg import (
    CollectiveTimeout,
    Mismatch,
    PeerFailed,
    ProcessLocalGroup,
    ThreadLocalWorld,
    _create_threaded_pg,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)
from torch_fsdp_tests.ranks import Kind, Outcome, RanksErred, RanksFailed

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
COMPLEX = [torch.complex64]
REAL = [*FLOATS, *INTEGERS, torch.bool]
MOVABLE = [*REAL, *COMPLEX]
# What gloo can reduce, found by trying. It supports AVG for floating point only.
REDUCIBLE = {
    "SUM": MOVABLE,
    "AVG": [*FLOATS, *COMPLEX],
    "PRODUCT": REAL,
    "MIN": REAL,
    "MAX": REAL,
    "BAND": [*INTEGERS, torch.bool],
    "BOR": [*INTEGERS, torch.bool],
    "BXOR": [*INTEGERS, torch.bool],
}
HOST = torch.device("cpu")  # the CPU is the subject: gloo's tensors live there


def sample(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Data of a rank: different for each rank, the same in each process."""
    source = torch.Generator(HOST).manual_seed(100 + rank)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(*shape, generator=source, dtype=wide).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=source).bool()
    return torch.randint(0, 100, shape, generator=source).to(dtype)


def chunks(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [chunk.clone() for chunk in tensor.chunk(count)]


# Each of these runs one collective on one rank, and returns that rank's result.


def all_reduce(rank: int, size: int, dtype: torch.dtype, op: dist.ReduceOp) -> list[torch.Tensor]:
    tensor = sample(rank, dtype, 3, 5)
    dist.all_reduce(tensor, op)
    return [tensor]


def all_reduce_coalesced(rank: int, size: int, dtype: torch.dtype, op: dist.ReduceOp) -> list[torch.Tensor]:
    tensors = [sample(rank, dtype, 3), sample(rank, dtype, 2, 2)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor, op)
    return tensors


def reduce(rank: int, size: int, dtype: torch.dtype, op: dist.ReduceOp) -> list[torch.Tensor]:
    tensor = sample(rank, dtype, 7)
    dist.reduce(tensor, 1, op)
    return [tensor] if rank == 1 else []


def reduce_scatter(rank: int, size: int, dtype: torch.dtype, op: dist.ReduceOp) -> list[torch.Tensor]:
    output = torch.zeros(2, 3, dtype=dtype)
    dist.reduce_scatter(output, chunks(sample(rank, dtype, 2 * size, 3), size), op)
    return [output]


def reduce_scatter_tensor(rank: int, size: int, dtype: torch.dtype, op: dist.ReduceOp) -> list[torch.Tensor]:
    output = torch.zeros(2, 3, dtype=dtype)
    work = dist.reduce_scatter_tensor(output, sample(rank, dtype, 2 * size, 3), op, async_op=True)
    work.wait()
    return [output]


def reduce_scatter_in_place(rank: int, size: int, dtype: torch.dtype, op: dist.ReduceOp) -> list[torch.Tensor]:
    # The output is a slice of the input, as in FSDP1.
    whole = sample(rank, dtype, 2 * size)
    mine = whole.chunk(size)[rank]
    dist.reduce_scatter_tensor(mine, whole.clone() if dist.get_backend() == "gloo" else whole, op)
    return [mine]


def functional_all_reduce(rank: int, size: int, dtype: torch.dtype, op: dist.ReduceOp) -> list[torch.Tensor]:
    return [funcol.all_reduce(sample(rank, dtype, 4), op.name.lower(), dist.group.WORLD) + 0]


REDUCING = [
    all_reduce,
    all_reduce_coalesced,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    reduce_scatter_in_place,
    functional_all_reduce,
]


def broadcast(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    tensor = sample(rank, dtype, 5)
    dist.broadcast(tensor, size - 1)
    return [tensor]


def all_gather(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    outputs = [torch.zeros(2, 3, dtype=dtype) for _ in range(size)]
    dist.all_gather(outputs, sample(rank, dtype, 2, 3))
    return outputs


def all_gather_coalesced(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    outputs = [[torch.zeros(2, dtype=dtype), torch.zeros(3, 1, dtype=dtype)] for _ in range(size)]
    inputs = [sample(rank, dtype, 2), sample(rank, dtype, 3, 1)]
    dist.group.WORLD.allgather_coalesced(outputs, inputs).wait()
    return [tensor for tensors in outputs for tensor in tensors]


def all_gather_into_tensor(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    output = torch.zeros(size * 2, 3, dtype=dtype)
    dist.all_gather_into_tensor(output, sample(rank, dtype, 2, 3))
    return [output]


def all_gather_in_place(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    # The input is a slice of the output, as in FSDP1 and FSDP2.
    output = torch.zeros(size * 3, dtype=dtype)
    mine = output.chunk(size)[rank]
    mine.copy_(sample(rank, dtype, 3))
    dist.all_gather_into_tensor(output, mine)
    return [output]


def all_gather_into_tensor_coalesced(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    outputs = [torch.zeros(size * 2, dtype=dtype), torch.zeros(size, 3, dtype=dtype)]
    with dist._coalescing_manager(async_ops=True) as pending:
        dist.all_gather_into_tensor(outputs[0], sample(rank, dtype, 2))
        dist.all_gather_into_tensor(outputs[1], sample(rank, dtype, 1, 3))
    pending.wait()
    return outputs


def gather(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    outputs = [torch.zeros(3, dtype=dtype) for _ in range(size)] if rank == 2 else None
    dist.gather(sample(rank, dtype, 3), outputs, dst=2)
    return outputs or []


def scatter(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    output = torch.zeros(3, dtype=dtype)
    dist.scatter(output, chunks(sample(rank, dtype, 3 * size), size) if rank == 1 else None, src=1)
    return [output]


def all_to_all(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    outputs = [torch.zeros(2, 3, dtype=dtype) for _ in range(size)]
    dist.all_to_all(outputs, chunks(sample(rank, dtype, 2 * size, 3), size))
    return outputs


def all_to_all_single(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    output = torch.zeros(2 * size, 3, dtype=dtype)
    dist.all_to_all_single(output, sample(rank, dtype, 2 * size, 3))
    return [output]


def all_to_all_single_uneven(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    # Rank i sends i + j rows to rank j, and so receives the same number from it.
    splits = [rank + peer for peer in range(size)]
    output = torch.zeros(sum(splits), 2, dtype=dtype)
    dist.all_to_all_single(output, sample(rank, dtype, sum(splits), 2), splits, splits)
    return [output]


def ring(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    output = torch.zeros(4, dtype=dtype)
    sent = dist.isend(sample(rank, dtype, 4), (rank + 1) % size, tag=7)
    dist.recv(output, (rank - 1) % size, tag=7)
    sent.wait()
    return [output]


def functional(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    group = dist.group.WORLD
    given = sample(rank, dtype, size, 2)
    results = [
        funcol.all_gather_tensor(given, 0, group),
        funcol.all_gather_tensor(given, 1, group),
        funcol.all_to_all_single(given, None, None, group),
        funcol.broadcast(given, 1, group),
        *funcol.all_gather_into_tensor_coalesced([given, given[0]], group),
    ]
    return [result.clone() for result in results]


def sub_groups(rank: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    # Two groups that are not consecutive halves, so that group ranks and global ranks differ.
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    tensor = sample(rank, dtype, 3)
    dist.broadcast(tensor, 3 if rank % 2 else 2, group=odd if rank % 2 else even)
    outputs = [torch.zeros(3, dtype=dtype) for _ in range(2)]
    dist.all_gather(outputs, tensor + tensor, group=odd if rank % 2 else even)
    return [tensor, *outputs]


MOVING = [
    broadcast,
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_in_place,
    all_gather_into_tensor_coalesced,
    gather,
    scatter,
    all_to_all,
    all_to_all_single,
    all_to_all_single_uneven,
    ring,
    functional,
    sub_groups,
]
# torch.distributed's functions pass complex numbers to gloo as pairs of reals. Gloo itself has no complex type.
GLOO_LACKS = {(case, torch.complex64) for case in (gather, all_gather_coalesced, functional)}


def objects(rank: int, size: int) -> list[Any]:
    """All collectives of pickled objects, in one list."""
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "pad": "x" * rank})
    gathered = [None] * size if rank == 3 else None
    dist.gather_object((rank, rank**2), gathered, dst=3)
    received = [None]
    dist.scatter_object_list(received, [f"for {peer}" for peer in range(size)] if rank == 2 else None, src=2)
    told = [f"by {rank}", rank]
    dist.broadcast_object_list(told, src=1)
    dist.barrier()
    return [everyone, gathered, received, told]


def every_case(rank: int, size: int) -> dict[tuple[Any, ...], list[torch.Tensor]]:
    """All results of one rank, by the name of the case."""
    results: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for reduction in REDUCING:
        for name, dtypes in REDUCIBLE.items():
            op = getattr(dist.ReduceOp, name)
            for dtype in dtypes:
                # funcol passes complex numbers unchanged, and gloo cannot reduce them.
                if not (reduction is functional_all_reduce and dtype.is_complex):
                    results[reduction.__name__, name, dtype] = reduction(rank, size, dtype, op)
    for move in MOVING:
        for dtype in MOVABLE:
            if (move, dtype) in GLOO_LACKS:
                continue
            try:
                results[move.__name__, dtype] = move(rank, size, dtype)
            except RuntimeError as error:
                # The gloo of torch before 2.13, which raises before it sends anything.
                if move is not all_to_all or "does not support alltoall" not in str(error):
                    raise
    return results


def in_threads(size: int, body: Callable[[int], Any], *, init: bool = True) -> list[Any]:
    """Run `body(rank)` in one thread per rank. Returns, by rank, the result or the exception that ended it."""
    _install_threaded_pg()
    store = dist.HashStore()
    outcomes: list[Any] = [None] * size

    def run(rank):
        try:
            if init:
                dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
            outcomes[rank] = body(rank)
        except BaseException as error:
            outcomes[rank] = error
            ProcessLocalGroup.exception_handle(error, rank)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        ProcessLocalGroup.reset()
        _uninstall_threaded_pg()
    return outcomes


def results_of(size: int, body: Callable[[int], Any]) -> list[Any]:
    """The results of `in_threads`. No rank may fail."""
    outcomes = in_threads(size, body)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, PeerFailed):
            raise outcome
    return outcomes


class TestBesideGloo(MultiProcessTestCase):
    """Each rank process has gloo's results for its rank. It computes them again in a threaded world, and compares."""

    world_size = 4

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def gloo(self, body: Callable[[int, int], Any]) -> Any:
        dist.init_process_group(
            "gloo", rank=self.rank, world_size=self.world_size, store=dist.FileStore(self.file_name, self.world_size)
        )
        try:
            return body(self.rank, self.world_size)
        finally:
            dist.destroy_process_group()

    def threaded(self, body: Callable[[int, int], Any]) -> Any:
        return results_of(self.world_size, lambda rank: body(rank, self.world_size))[self.rank]

    def test_every_collective(self):
        wanted, found = self.gloo(every_case), self.threaded(every_case)
        lacking = {key for key in found if key not in wanted}
        self.assertEqual({name for name, *_ in lacking} - {"all_to_all"}, set())
        self.assertGreater(len(wanted), 400)
        for key, tensors in wanted.items():
            self.assertEqual(len(found[key]), len(tensors), msg=str(key))
            for mine, gloos in zip(found[key], tensors, strict=True):
                self.assertEqual(mine.dtype, gloos.dtype)
                if mine.dtype == torch.bool:
                    # gloo sums booleans as bytes, and the result is 2. Both mean true.
                    mine, gloos = mine.view(torch.uint8) != 0, gloos.view(torch.uint8) != 0
                # Sums of four in 16 bits: gloo rounds after each addition, the threaded group once.
                loose = {"atol": 0.05, "rtol": 0.02} if mine.dtype in (torch.float16, torch.bfloat16) else {}
                torch.testing.assert_close(mine, gloos, msg=lambda text, key=key: f"{key}: {text}", **loose)

    def test_objects(self):
        self.assertEqual(self.gloo(objects), self.threaded(objects))


class ThreadsTestCase(MultiProcessTestCase):
    """One rank process that runs a test's threads. If a thread hangs, it can be killed with the process."""

    world_size = 1

    def setUp(self):
        super().setUp()
        self._spawn_processes()


class TestArithmetic(ThreadsTestCase):
    """Reductions that gloo does not support."""

    def reduce(self, size: int, make: Callable[..., torch.Tensor], op: Any) -> list[torch.Tensor]:
        def body(rank):
            tensor = make(rank)
            dist.all_reduce(tensor, op(rank) if callable(op) and not hasattr(op, "name") else op)
            return tensor

        return results_of(size, body)

    def test_avg_of_integers_truncates(self):
        for dtype in (*INTEGERS, torch.int16):
            for tensor in self.reduce(
                3, lambda rank, dtype=dtype: torch.tensor([rank, 2 * rank + 1], dtype=dtype), dist.ReduceOp.AVG
            ):
                self.assertEqual(tensor, torch.tensor([1, 3], dtype=dtype))
        for tensor in self.reduce(2, lambda rank: torch.tensor([-3 * rank]), dist.ReduceOp.AVG):
            self.assertEqual(tensor, torch.tensor([-1]))

    def test_premul_sum_uses_each_ranks_factor(self):
        for factor in (float, lambda value: torch.tensor([float(value)])):
            for dtype in (torch.float32, torch.bfloat16):
                outcome = self.reduce(
                    3,
                    lambda rank, dtype=dtype: torch.full((2,), rank + 1.0, dtype=dtype),
                    lambda rank, factor=factor: dist._make_nccl_premul_sum(factor(10**rank)),
                )
                for tensor in outcome:
                    self.assertEqual(tensor, torch.tensor([321.0, 321.0]).to(dtype))

    def test_narrow_floats_round_once(self):
        # 256 + 1 is 256 in bfloat16: rounding after each addition would lose all ones.
        for tensor in self.reduce(
            9, lambda rank: torch.tensor([256.0 if rank == 0 else 1.0]).bfloat16(), dist.ReduceOp.SUM
        ):
            self.assertEqual(tensor, torch.tensor([264.0]).bfloat16())
        for tensor in self.reduce(
            4, lambda rank: torch.tensor([1.0 + rank]).to(torch.float8_e4m3fn), dist.ReduceOp.SUM
        ):
            self.assertEqual(tensor.float(), torch.tensor([10.0]))

    def test_inputs_survive(self):
        def body(rank):
            given = sample(rank, torch.float32, 4)
            kept = [given.clone() for _ in range(3)]
            if rank != 1:
                # gloo may overwrite the tensors of ranks other than the root, so this test is about our group only.
                dist.reduce(kept[0], 1)
            else:
                dist.reduce(given.clone(), 1)
            dist.reduce_scatter_tensor(torch.zeros(2), kept[1])
            dist.reduce_scatter(torch.zeros(2), list(kept[2].chunk(2)))
            for tensor in kept:
                self.assertEqual(tensor, given)

        self.assertEqual(results_of(2, body), [None, None])

    def test_meaningless_reductions_are_refused_by_name(self):
        def body(rank):
            for op, dtype in (
                (dist.ReduceOp.BAND, torch.float32),
                (dist.ReduceOp.AVG, torch.bool),
                (dist._make_nccl_premul_sum(2.0), torch.int64),
            ):
                with self.assertRaisesRegex(ValueError, f"all_reduce on rank {rank}: .*{dtype}"):
                    dist.all_reduce(torch.ones(2, dtype=dtype), op)
            # Nothing was left behind in the group: the ranks can still meet.
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            return tensor.item()

        self.assertEqual(results_of(2, body), [2.0, 2.0])

    def test_uneven_lists(self):
        def body(rank):
            gathered = [torch.zeros(peer + 1) for peer in range(3)]
            dist.all_gather(gathered, torch.full((rank + 1,), float(rank)))
            mine = torch.zeros(rank + 1)
            dist.reduce_scatter(mine, [torch.full((peer + 1,), 10.0 * peer + rank) for peer in range(3)])
            swapped = [torch.zeros(peer + 1) for peer in range(3)]
            dist.all_to_all(swapped, [torch.full((rank + 1,), 10.0 * peer + rank) for peer in range(3)])
            return [tensor.tolist() for tensor in gathered], mine.tolist(), [tensor.tolist() for tensor in swapped]

        for rank, (gathered, mine, swapped) in enumerate(results_of(3, body)):
            self.assertEqual(swapped, [[10.0 * rank + peer] * (peer + 1) for peer in range(3)])
            self.assertEqual(gathered, [[0.0], [1.0, 1.0], [2.0, 2.0, 2.0]])
            self.assertEqual(mine, [30.0 * rank + 3] * (rank + 1))


class TestGroups(ThreadsTestCase):
    def test_mesh_and_fully_shard(self):
        def body(rank):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))  # the CPU is the subject
            source = torch.Generator().manual_seed(0)
            weights = [torch.randn(7, 5, generator=source), torch.randn(3, 7, generator=source)]
            model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Linear(7, 3, bias=False))
            for module, weight in zip(model, weights, strict=True):
                module.weight.data.copy_(weight)
                fully_shard(module, mesh=mesh)
            fully_shard(model, mesh=mesh)
            batch = sample(rank, torch.float32, 4, 5)
            model(batch).square().sum().backward()
            plain = [weight.requires_grad_() for weight in weights]
            total = sum(
                (sample(peer, torch.float32, 4, 5) @ plain[0].T @ plain[1].T).square().sum() for peer in range(4)
            )
            wanted = torch.autograd.grad(total / 4, plain)
            for module, gradient in zip(model, wanted, strict=True):
                torch.testing.assert_close(module.weight.grad.full_tensor(), gradient)
            return [mesh.get_local_rank(dim) for dim in range(2)]

        self.assertEqual(results_of(4, body), [[0, 0], [0, 1], [1, 0], [1, 1]])

    def test_split_group(self):
        def body(rank):
            group = dist.group.WORLD.split_group([2, 0] if rank != 1 else [1])
            tensor = torch.tensor([10.0**rank])
            group.broadcast([tensor], dist.distributed_c10d.BroadcastOptions()).wait()  # from its first rank
            none = dist.group.WORLD.split_group([0, 2])
            return group.rank(), group.size(), tensor.item(), none is None

        self.assertEqual(results_of(3, body), [(1, 2, 100.0, False), (0, 1, 10.0, True), (0, 2, 100.0, False)])

    def test_world_can_be_initialized_again(self):
        def body(rank):
            sums = []
            for _ in range(3):
                tensor = torch.tensor([float(rank)])
                dist.all_reduce(tensor)
                sums.append(tensor.item())
                store = dist.distributed_c10d._get_default_store()
                dist.destroy_process_group()
                dist.init_process_group("threaded", rank=rank, world_size=4, store=store)
            return sums

        self.assertEqual(results_of(4, body), [[6.0] * 3] * 4)

    def test_each_group_has_its_own_token(self):
        # Ranks that make a group again quickly must not meet ranks that still leave the first one.
        store = dist.HashStore()
        tokens = {_create_threaded_pg(store, 0, 1, timedelta(seconds=5))._token for _ in range(3)}
        self.assertEqual(len(tokens), 3)

    def test_tables_belong_to_the_thread(self):
        before = dist.distributed_c10d._world

        def body(rank):
            self.assertIsInstance(dist.distributed_c10d._world, ThreadLocalWorld)
            own = dist.new_group([rank], use_local_synchronization=True)
            return dist.get_rank(), dist.get_process_group_ranks(own), dist.get_backend()

        self.assertEqual(results_of(3, body), [(rank, [rank], "threaded") for rank in range(3)])
        self.assertIs(dist.distributed_c10d._world, before)
        self.assertFalse(dist.is_initialized())
        self.assertTrue(torch._C._is_multithreading_enabled())

    def test_tables_that_a_later_torch_adds_are_there(self):
        def body(rank):
            world = dist.distributed_c10d._world
            world.hooks_of_ranks[rank] = "mine"
            with self.assertRaisesRegex(AttributeError, "unheard_of"):
                world.unheard_of  # noqa: B018
            return world.hooks_of_ranks

        with unittest.mock.patch.object(dist.distributed_c10d._world, "hooks_of_ranks", {5: "c10d's"}, create=True):
            self.assertEqual(results_of(2, body), [{0: "mine"}, {1: "mine"}])


class TestWork(ThreadsTestCase):
    def test_async_work_waits_for_the_last_rank(self):
        late, asked = threading.Event(), threading.Barrier(3)

        def body(rank):
            tensor = torch.tensor([rank + 1.0])
            if rank == 2:
                asked.wait()  # the other ranks have polled their work
            work = dist.all_reduce(tensor, async_op=True)
            if rank != 2:
                before = work.is_completed(), tensor.item()
                asked.wait()
            else:
                before = True, 6.0
                late.set()
            work.wait()
            self.assertTrue(work.is_completed() and work.is_success() and late.is_set())
            return before, tensor.item()

        self.assertEqual(results_of(3, body), [((False, 1.0), 6.0), ((False, 2.0), 6.0), ((True, 6.0), 6.0)])

    def test_two_groups_in_opposite_order(self):
        # A backend that blocks in the call would deadlock here. A real backend does not block.
        def body(rank):
            groups = [dist.new_group(), dist.new_group()]
            tensors = [torch.tensor([1.0]), torch.tensor([10.0])]
            order = [0, 1] if rank else [1, 0]
            works = [dist.all_reduce(tensors[index], group=groups[index], async_op=True) for index in order]
            for work in works:
                work.wait()
            return [tensor.item() for tensor in tensors]

        self.assertEqual(results_of(2, body), [[2.0, 20.0]] * 2)

    def test_future_runs_callbacks_in_its_own_rank(self):
        def body(rank):
            future = dist.all_reduce(torch.tensor([1.0 * rank]), async_op=True).get_future()
            return future.then(lambda done: (dist.get_rank(), done.value()[0].item())).wait()

        self.assertEqual(results_of(3, body), [(rank, 3.0) for rank in range(3)])

    def test_receive_from_any_rank(self):
        def body(rank):
            if rank:
                dist.send(torch.tensor([float(rank)]), 0)
                return None
            seen = {}
            for _ in range(2):
                tensor = torch.zeros(1)
                sender = dist.recv(tensor)
                seen[sender] = tensor.item()
            return seen

        self.assertEqual(results_of(3, body)[0], {1: 1.0, 2: 2.0})

    def test_autograd_does_not_see_the_write(self):
        def body(rank):
            weight = nn.Parameter(torch.tensor([2.0]))
            saved = weight * 3
            loss = saved * saved
            dist.all_reduce(saved.detach())
            dist.broadcast(weight, 0)
            loss.backward()  # autograd would refuse if the write counted as a modification
            return weight.grad.item(), weight._version

        # saved is 12 by now on both ranks: d loss = 2 * 12 * 3.
        self.assertEqual(results_of(2, body), [(72.0, 0)] * 2)

    def test_inference_mode_of_one_rank_is_its_own(self):
        for last in range(2):
            others_came = threading.Event()

            def body(rank, last=last, others_came=others_came):
                with torch.inference_mode(rank == 0):
                    tensors = [torch.ones(2), torch.zeros(4)]
                    if rank == last:
                        others_came.wait()
                    works = [
                        dist.all_reduce(tensors[0], async_op=True),
                        dist.group.WORLD._allgather_base(tensors[1], tensors[0].clone()),
                    ]
                    others_came.set()
                    for work in works:
                        work.wait()
                return [tensor.tolist() for tensor in tensors]

            outcomes = results_of(2, body)
            self.assertEqual([outcome[0] for outcome in outcomes], [[2.0, 2.0]] * 2)

    def test_dispatch_modes_see_nothing_of_other_ranks(self):
        from torch.utils._python_dispatch import TorchDispatchMode

        class Count(TorchDispatchMode):
            seen = 0

            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
                self.seen += 1
                return func(*args, **(kwargs or {}))

        def body(rank):
            tensor = torch.ones(2)
            with Count() as counter:
                dist.all_reduce(tensor)
            return counter.seen, tensor.tolist()

        self.assertEqual(results_of(3, body), [(0, [3.0, 3.0])] * 3)


class TestFailures(ThreadsTestCase):
    def test_a_rank_that_raises_ends_the_wait_of_all(self):
        waiting = threading.Barrier(4)

        def body(rank):
            waiting.wait()
            if rank == 2:
                raise LookupError("lost my way")
            with self.assertRaises(RuntimeError):  # another rank's failure must not satisfy this expectation
                dist.barrier()

        start = time.monotonic()
        outcomes = in_threads(4, body)
        self.assertLess(time.monotonic() - start, 5)
        self.assertIsInstance(outcomes.pop(2), LookupError)
        for outcome in outcomes:
            self.assertIsInstance(outcome, PeerFailed)
            self.assertEqual(outcome.rank, 2)
            self.assertIn("rank 2 failed with LookupError: lost my way", str(outcome))

    def test_a_rank_that_raises_before_its_group_is_made(self):
        def body(rank):
            if rank == 1:
                raise LookupError("no start")
            dist.init_process_group("threaded", rank=rank, world_size=3, store=store)

        store = dist.HashStore()
        outcomes = in_threads(3, body, init=False)
        self.assertEqual([type(outcome) for outcome in outcomes], [PeerFailed, LookupError, PeerFailed])

    def test_a_transfer_ends_with_the_world(self):
        def body(rank):
            if rank == 1:
                raise LookupError("gone")
            dist.recv(torch.zeros(1), 1)

        self.assertEqual([type(outcome) for outcome in in_threads(2, body)], [PeerFailed, LookupError])

    def test_the_next_world_knows_nothing_of_the_last(self):
        def body(rank):
            if rank == 0:
                raise LookupError("once")
            dist.barrier()

        in_threads(2, body)
        self.assertEqual(results_of(2, lambda rank: dist.barrier()), [None, None])

    def mismatch(self, size: int, body: Callable[[int], object], *words: str) -> None:
        """Each rank catches the mismatch itself, and each of `words` is in each message."""

        def caught(rank):
            with self.assertRaises(Mismatch) as seen:
                body(rank)
            # The ranks can meet again after a mismatch.
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            return str(seen.exception), tensor.item()

        for message, total in results_of(size, caught):
            self.assertEqual(total, size)
            for word in words:
                self.assertIn(word, message)

    def test_mismatches_name_rank_and_collective(self):
        two, three = torch.ones(2), torch.ones(3)
        self.mismatch(
            2,
            lambda rank: dist.all_reduce(two.clone()) if rank else dist.barrier(),
            "rank 0 calls barrier()",
            "rank 1 calls all_reduce(SUM, float32[2])",
        )
        self.mismatch(2, lambda rank: dist.all_reduce([two, three][rank].clone()), "rank 0", "[2]", "rank 1", "[3]")
        self.mismatch(2, lambda rank: dist.all_reduce(two.to([torch.float32, torch.float64][rank])), "float64[2]")
        ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
        self.mismatch(2, lambda rank: dist.all_reduce(two.clone(), ops[rank]), "SUM", "MAX")
        self.mismatch(2, lambda rank: dist.broadcast(two.clone(), rank), "root 0", "root 1")
        self.mismatch(
            2,
            lambda rank: dist.all_gather([torch.ones(2), torch.ones(2)], [two, three][rank].clone()),
            "rank 0 expects float32[2] from rank 1, which sends float32[3]",
        )

        def unmatched(rank):
            # A transfer concerns only two ranks, so each of them checks it itself.
            dist.send(two.clone(), 1) if rank == 0 else dist.recv(torch.zeros(3), 0)

        self.mismatch(2, unmatched, "send from rank 0 to rank 1", "float32[3] from rank 0")

    def test_a_mismatch_neither_waits_for_the_third_nor_writes(self):
        # The third rank agrees with one of the first two, whichever came first.
        for third in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, third]
            both_know, third_may = threading.Barrier(2), threading.Event()

            def body(rank, ops=ops, both_know=both_know, third_may=third_may):
                tensor = torch.tensor([rank + 1.0])
                if rank == 2:
                    third_may.wait()
                with self.assertRaises(Mismatch):
                    dist.all_reduce(tensor, ops[rank])
                if rank != 2:
                    both_know.wait()
                    third_may.set()
                dist.barrier()
                return tensor.item()

            self.assertEqual(results_of(3, body), [1.0, 2.0, 3.0])

    def test_wrong_sizes_are_refused_before_anybody_waits(self):
        def body(rank):
            with self.assertRaisesRegex(ValueError, "all_gather_into_tensor on rank 0: .* must be 4, not 3"):
                dist.all_gather_into_tensor(torch.zeros(3), torch.ones(2))
            with self.assertRaisesRegex(ValueError, "all_to_all_single on rank 0: the sum of the split sizes"):
                dist.all_to_all_single(torch.zeros(4), torch.ones(4), [1, 1], [1, 1])

        def rank_0_only(rank):
            return body(rank) if rank == 0 else None

        self.assertEqual(results_of(2, rank_0_only), [None, None])

    def test_a_wait_ends_at_its_limit_and_names_the_absent(self):
        done = threading.Event()

        def body(rank):
            if rank == 1:
                done.wait()
                return
            group = dist.group.WORLD
            work = group.allreduce([torch.ones(2)])
            try:
                work.wait(timedelta(milliseconds=50))
            finally:
                done.set()

        timeout, absent = in_threads(2, body)
        self.assertIsNone(absent)
        self.assertIsInstance(timeout, CollectiveTimeout)
        self.assertRegex(str(timeout), r"all_reduce.*ranks \[0\] wait for ranks \[1\].* within 0\.05 s")

    def test_limits_come_from_the_environment_and_the_group(self):
        def body(rank, timeout):
            dist.init_process_group("threaded", rank=0, world_size=1, store=dist.HashStore(), timeout=timeout)
            return dist.group.WORLD._limit

        with unittest.mock.patch.dict("os.environ", DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="7"):
            for seconds, wanted in ((3, 3.0), (900, 7.0)):
                limited = functools.partial(body, timeout=timedelta(seconds=seconds))
                self.assertEqual(in_threads(1, limited, init=False), [wanted])

    def test_all_threads_are_bound_to_one_device(self):
        """Otherwise a DeviceMesh would choose one by rank, in threads that come before the device's runtime starts."""
        bound = []
        with unittest.mock.patch.object(accelerator.Accelerator, "bind", lambda device, rank: bound.append(rank)):
            run_threads(3, lambda rank: Outcome(rank, Kind.PASSED))
        self.assertEqual(bound, [0, 0, 0])

    def test_rank_fails_if_its_group_cannot_be_destroyed(self):
        def body(rank):
            if rank == 1:
                dist.distributed_c10d._world.pg_map = None
            return Outcome(rank, Kind.PASSED)

        well, unwell = run_threads(2, body)
        self.assertEqual((well.kind, unwell.kind), (Kind.PASSED, Kind.ERROR))
        self.assertIn("destroy_process_group", unwell.text)


class TestFakeModes(ThreadsTestCase):
    def test_each_thread_may_enter_one_after_another_has_ended(self):
        """Without a device, the device guard of torch 2.11's CUDA builds ends with the thread that entered it first."""

        def body(rank):
            with FakeTensorMode():
                self.assertEqual(torch.ones(rank + 1).shape, (rank + 1,))
            return Outcome(rank, Kind.PASSED)

        for _ in range(3):
            self.assertEqual([outcome.kind for outcome in run_threads(2, body)], [Kind.PASSED, Kind.PASSED])


class TestSpawnThreads(TestCase):
    """The decorator for a method of an ordinary test case. Its ranks are threads of this process."""

    def total(self) -> int:
        tensor = torch.ones(1)
        dist.all_reduce(tensor)
        return int(tensor.item())

    @spawn_threads_and_init_comms(world_size=3)
    def test_passes(self):
        self.assertEqual((self.total(), dist.get_world_size()), (3, 3))

    def test_a_number_of_ranks_by_default(self):
        totals = []
        spawn_threads_and_init_comms(lambda case: totals.append(case.total()))(self)
        self.assertEqual(totals, [4] * 4)

    def test_one_fails(self):
        def fails_on_rank_1(case):
            if dist.get_rank() == 1:
                case.fail("on purpose")
            case.total()

        with self.assertRaises(RanksFailed) as caught:
            spawn_threads_and_init_comms(fails_on_rank_1)(self)
        self.assertRegex(
            str(caught.exception), "^rank 1 of 4 raised:(.|\n)*on purpose(.|\n)*ranks 0 and 2-3 of 4 raised"
        )

    def test_skips(self):
        """The test skips only if every rank skips."""
        with self.assertRaisesRegex(unittest.SkipTest, "^not today$"):
            spawn_threads_and_init_comms(lambda case: case.skipTest("not today"))(self)
        with self.assertRaisesRegex(RanksErred, "a skip counts only when every rank skips"):
            spawn_threads_and_init_comms(lambda case: None if dist.get_rank() else case.skipTest("not today"))(self)

    def test_one_hangs(self):
        """The hang is outside of any collective. The test ends in time, and says where the thread is."""
        over = threading.Event()
        self.addCleanup(over.set)

        def here_it_hangs(case):
            if dist.get_rank() == 3:
                over.wait()

        began = time.monotonic()
        with self.assertRaisesRegex(
            RanksErred, "^rank 3 of 4 raised:\nTimeoutError: .* after 1 s(.|\n)*in here_it_hangs"
        ):
            spawn_threads_and_init_comms(here_it_hangs, timeout=1)(self)
        self.assertLess(time.monotonic() - began, 5)


if __name__ == "__main__":
    run_tests()
