"""The threaded process group, compared with gloo on the same data, or with plain arithmetic where gloo raises."""

from __future__ import annotations

import threading
import time
import unittest.mock
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from samples import Processes
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_fsdp_tests.common_distributed.multi_threaded import run_threads
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.ranks.threaded_pg import CallsDiffer, CollectiveTimeout, PeerFailed, ThreadLocalWorld
from torch_fsdp_tests.verdict import RankResult, State

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
COMPLEX = [torch.complex64]
REAL = [*FLOATS, *INTEGERS, torch.bool]
MOVABLE = [*REAL, *COMPLEX]
# The data types that gloo can reduce, found by trying.
REDUCIBLE = {"SUM": MOVABLE, "AVG": [*FLOATS, *COMPLEX], **dict.fromkeys(("PRODUCT", "MIN", "MAX"), REAL)}
REDUCIBLE |= {op: [*INTEGERS, torch.bool] for op in ("BAND", "BOR", "BXOR")}
HOST = torch.device("cpu")  # the CPU is the subject: gloo's tensors live there


def sample(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random data, which differs between ranks, and is the same for a rank in a process and in a thread."""
    source = torch.Generator(HOST).manual_seed(100 + rank)
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex128 if dtype.is_complex else torch.float64
        return torch.randn(*shape, generator=source, dtype=wide).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=source).bool()
    return torch.randint(0, 100, shape, generator=source).to(dtype)


def chunks(tensor: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [chunk.clone() for chunk in tensor.chunk(count)]


def filled(collective: Callable, output: Any, *arguments: Any) -> list[torch.Tensor]:
    """Call a collective. Returns its one or more outputs, or nothing on ranks that have none."""
    collective(output, *arguments)
    return [output] if isinstance(output, torch.Tensor) else output or []


Results = Iterator[tuple[str, list[torch.Tensor]]]


def reduced(rank: int, size: int, dtype: torch.dtype, op: dist.ReduceOp) -> Results:
    """Run each collective that reduces. Yields its name and this rank's results."""
    own, output = partial(sample, rank, dtype), torch.zeros(2, 3, dtype=dtype)
    tensors = [own(3), own(2, 2)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor, op)
    yield "all_reduce coalesced", tensors
    total = filled(dist.reduce, own(7), 1, op)
    yield "reduce", total if rank == 1 else []
    yield "reduce_scatter", filled(dist.reduce_scatter, output.clone(), chunks(own(2 * size, 3), size), op)
    dist.reduce_scatter_tensor(output, own(2 * size, 3), op, async_op=True).wait()
    yield "reduce_scatter_tensor", [output]
    whole = own(2 * size)
    part = whole.chunk(size)[rank]  # the output is a slice of the input, as in FSDP1
    whole = whole.clone() if dist.get_backend() == "gloo" else whole
    yield "reduce_scatter_tensor in place", filled(dist.reduce_scatter_tensor, part, whole, op)
    if not dtype.is_complex:  # funcol passes complex numbers unchanged, and gloo cannot reduce them
        yield "funcol", [funcol.all_reduce(own(4), op.name.lower(), dist.group.WORLD) + 0]


def gathered(rank: int, size: int, dtype: torch.dtype) -> Results:
    """Run each collective that gives ranks the data of others. Yields its name and this rank's results."""
    own, zeros = partial(sample, rank, dtype), partial(torch.zeros, dtype=dtype)
    yield "broadcast", filled(dist.broadcast, own(5), size - 1)
    yield "all_gather", filled(dist.all_gather, [zeros(2, 3) for _ in range(size)], own(2, 3))
    yield "all_gather_into_tensor", filled(dist.all_gather_into_tensor, zeros(size * 2, 3), own(2, 3))
    output = zeros(size * 3)
    part = output.chunk(size)[rank]  # the input is a slice of the output, as in FSDP1 and FSDP2
    part.copy_(own(3))
    yield "all_gather_into_tensor in place", filled(dist.all_gather_into_tensor, output, part)
    outputs = [zeros(size * 2), zeros(size, 3)]
    with dist._coalescing_manager(async_ops=True) as pending:
        dist.all_gather_into_tensor(outputs[0], own(2))
        dist.all_gather_into_tensor(outputs[1], own(1, 3))
    pending.wait()
    yield "all_gather_into_tensor coalesced", outputs
    yield "scatter", filled(dist.scatter, zeros(3), chunks(own(3 * size), size) if rank == 1 else None, 1)


def exchanged(rank: int, size: int, dtype: torch.dtype) -> Results:
    """The same for collectives in which all pairs of ranks exchange data, and for groups of some ranks."""
    own, zeros = partial(sample, rank, dtype), partial(torch.zeros, dtype=dtype)
    yield "all_to_all_single", filled(dist.all_to_all_single, zeros(2 * size, 3), own(2 * size, 3))
    splits = [rank + peer for peer in range(size)]  # rank i sends i + j rows to rank j, and receives as many from it
    rows = sum(splits)
    uneven = filled(dist.all_to_all_single, zeros(rows, 2), own(rows, 2), splits, splits)
    yield "all_to_all_single, uneven", uneven

    # Two groups that are not consecutive halves, so that group ranks and global ranks differ.
    odd, even = dist.new_group([1, 3]), dist.new_group([0, 2])
    group = odd if rank % 2 else even
    (tensor,) = filled(dist.broadcast, own(3), 3 if rank % 2 else 2, group)
    outputs = filled(dist.all_gather, [zeros(3) for _ in range(2)], tensor + tensor, group)
    yield "groups of some ranks", [tensor, *outputs]

    try:
        outputs = [zeros(2, 3) for _ in range(size)]
        yield "all_to_all", filled(dist.all_to_all, outputs, chunks(own(2 * size, 3), size))
    except RuntimeError as error:
        # Before torch 2.13, gloo has no all_to_all, and raises before it sends anything.
        if "does not support alltoall" not in str(error):
            raise


def without_complex(rank: int, size: int, dtype: torch.dtype) -> Results:
    """The same for collectives that gloo lacks for complex numbers. The others view these as pairs of real numbers."""
    outputs = [torch.zeros(3, dtype=dtype) for _ in range(size)] if rank == 2 else None
    dist.gather(sample(rank, dtype, 3), outputs, dst=2)
    yield "gather", outputs or []

    world, tensor = dist.group.WORLD, sample(rank, dtype, size, 2)
    results = [
        funcol.all_gather_tensor(tensor, 1, world),
        funcol.all_to_all_single(tensor, None, None, world),
        funcol.broadcast(tensor, 1, world),
        *funcol.all_gather_into_tensor_coalesced([tensor, tensor[0]], world),
    ]
    yield "funcol", [result.clone() for result in results]


def objects(rank: int, size: int) -> list[Any]:
    """All collectives of pickled objects, in one list."""
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "pad": "x" * rank})
    collected = [None] * size if rank == 3 else None
    dist.gather_object((rank, rank**2), collected, dst=3)
    received = [None]
    dist.scatter_object_list(received, [f"for {peer}" for peer in range(size)] if rank == 2 else None, src=2)
    spread = [f"by {rank}", rank]
    dist.broadcast_object_list(spread, src=1)
    dist.barrier()
    return [everyone, collected, received, spread]


def every_case(rank: int, size: int) -> dict[tuple[Any, ...], list[torch.Tensor]]:
    """All results of one rank, by the name of the case."""
    results: dict[tuple[Any, ...], list[torch.Tensor]] = {}
    for op, dtypes in REDUCIBLE.items():
        for dtype in dtypes:
            for name, tensors in reduced(rank, size, dtype, getattr(dist.ReduceOp, op)):
                results[name, op, dtype] = tensors
    for collectives, dtypes in ((gathered, MOVABLE), (exchanged, MOVABLE), (without_complex, REAL)):
        for dtype in dtypes:
            for name, tensors in collectives(rank, size, dtype):
                results[name, dtype] = tensors
    return results


def in_threads(size: int, body: Callable[[int], Any]) -> list[Any]:
    """Run `body(rank)` in one thread per rank. Returns, by rank, the result or the exception that ended it."""
    outcomes: list[Any] = [None] * size

    def live(rank: int) -> RankResult:
        try:
            outcomes[rank] = body(rank)
        except BaseException as error:
            outcomes[rank] = error
            raise
        return RankResult.report(rank, State.PASSED)

    run_threads(size, live)
    return outcomes


def results_of(size: int, body: Callable[[int], Any]) -> list[Any]:
    """The results of `in_threads`. No rank may fail."""
    outcomes = in_threads(size, body)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, PeerFailed):
            raise outcome
    return outcomes


class ThreadsTestCase(Processes):
    """A rank process runs a test's threads. If a thread hangs, it can be killed with the process."""

    world_size = 1


class TestBesideGloo(ThreadsTestCase):
    """Without it, collectives of ranks in threads could have other results than over gloo.

    Each rank process gets the results of its rank over gloo, and compares them with those in a threaded world.
    """

    world_size = 4

    def gloo(self, body: Callable[[int, int], Any]) -> Any:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size, store=store)
        try:
            return body(self.rank, self.world_size)
        finally:
            dist.destroy_process_group()

    def threaded(self, body: Callable[[int, int], Any]) -> Any:
        return results_of(self.world_size, lambda rank: body(rank, self.world_size))[self.rank]

    def test_every_collective(self):
        of_gloo, of_threads = self.gloo(every_case), self.threaded(every_case)
        self.assertEqual({name for name, *_ in of_threads.keys() - of_gloo.keys()} - {"all_to_all"}, set())
        self.assertGreater(len(of_gloo), 400)
        for key, expected in of_gloo.items():
            for result, wanted in zip(of_threads[key], expected, strict=True):
                self.assertEqual(result.dtype, wanted.dtype)
                if result.dtype == torch.bool:
                    # gloo sums booleans as bytes, and the result is 2. Both mean true.
                    result, wanted = result.view(torch.uint8) != 0, wanted.view(torch.uint8) != 0
                # Sums of four in 16 bits: gloo rounds after each addition, the threaded group once.
                loose = {"atol": 0.05, "rtol": 0.02} if result.dtype in (torch.float16, torch.bfloat16) else {}
                torch.testing.assert_close(result, wanted, msg=lambda text, key=key: f"{key}: {text}", **loose)

    def test_objects(self):
        self.assertEqual(self.gloo(objects), self.threaded(objects))


class TestArithmetic(ThreadsTestCase):
    """Without it, a reduction that gloo does not support, or rounds otherwise, could be wrong."""

    def check_sum(self, values: list[torch.Tensor], ops: list[Any], expected: torch.Tensor) -> None:
        """All-reduce ``values[rank]`` with ``ops[rank]`` on each rank. All ranks must get the expected result."""

        def body(rank):
            tensor = values[rank].clone()
            dist.all_reduce(tensor, ops[rank])
            return tensor

        for tensor in results_of(len(values), body):
            self.assertEqual(tensor, expected)

    def test_avg_of_integers_truncates(self):
        for dtype in (*INTEGERS, torch.int16):
            values = [torch.tensor([rank, 2 * rank + 1], dtype=dtype) for rank in range(3)]
            self.check_sum(values, [dist.ReduceOp.AVG] * 3, torch.tensor([1, 3], dtype=dtype))
        self.check_sum([torch.tensor([0]), torch.tensor([-3])], [dist.ReduceOp.AVG] * 2, torch.tensor([-1]))

    def test_premul_sum_uses_each_ranks_factor(self):
        for factor in (float, lambda value: torch.tensor([float(value)])):
            ops = [dist._make_nccl_premul_sum(factor(10**rank)) for rank in range(3)]
            for dtype in (torch.float32, torch.bfloat16):
                values = [torch.full((2,), rank + 1.0, dtype=dtype) for rank in range(3)]
                self.check_sum(values, ops, torch.tensor([321.0, 321.0]).to(dtype))

    def test_narrow_floats_round_once(self):
        # 256 + 1 is 256 in bfloat16: rounding after each addition would lose all ones.
        values = [torch.tensor([value]).bfloat16() for value in (256.0, *[1.0] * 8)]
        self.check_sum(values, [dist.ReduceOp.SUM] * 9, torch.tensor([264.0]).bfloat16())
        values = [torch.tensor([1.0 + rank]).to(torch.float8_e4m3fn) for rank in range(4)]
        self.check_sum(values, [dist.ReduceOp.SUM] * 4, torch.tensor([10.0]).to(torch.float8_e4m3fn))

    def test_meaningless_reductions_are_refused_by_name(self):
        def body(rank):
            for op, dtype in (
                (dist.ReduceOp.BAND, torch.float32),
                (dist.ReduceOp.AVG, torch.bool),
                (dist._make_nccl_premul_sum(2.0), torch.int64),
            ):
                with self.assertRaisesRegex(ValueError, f"all_reduce on rank {rank}: .*{dtype}"):
                    dist.all_reduce(torch.ones(2, dtype=dtype), op)
            # The errors left the group intact: the ranks can still meet.
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            return tensor.item()

        self.assertEqual(results_of(2, body), [2.0, 2.0])


class TestGroups(ThreadsTestCase):
    """Without it, ranks in threads could use the group or the tables of another rank."""

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
    """Without it, asynchronous work could end too early, block others, or disturb autograd and modes of its rank."""

    def test_async_work_waits_for_the_last_rank(self):
        late, polled = threading.Event(), threading.Barrier(3)

        def body(rank):
            tensor = torch.tensor([rank + 1.0])
            if rank == 2:
                polled.wait()  # the other ranks have polled their work
            work = dist.all_reduce(tensor, async_op=True)
            if rank != 2:
                before = work.is_completed(), tensor.item()
                polled.wait()
            else:
                before = True, 6.0
                late.set()
            work.wait()
            self.assertTrue(work.is_completed() and work.is_success() and late.is_set())
            return before, tensor.item()

        self.assertEqual(results_of(3, body), [((False, 1.0), 6.0), ((False, 2.0), 6.0), ((True, 6.0), 6.0)])

    def test_two_groups_in_opposite_order(self):
        # A backend whose calls block would deadlock here. Those of real backends do not.
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

    def test_autograd_does_not_see_the_write(self):
        def body(rank):
            weight = nn.Parameter(torch.tensor([2.0]))
            saved = weight * 3
            loss = saved * saved
            dist.all_reduce(saved.detach())
            dist.broadcast(weight, 0)
            loss.backward()  # autograd would raise if the write counted as a modification
            return weight.grad.item(), weight._version

        # saved is 12 by now on both ranks: d loss = 2 * 12 * 3.
        self.assertEqual(results_of(2, body), [(72.0, 0)] * 2)

    def test_inference_mode_of_one_rank_is_its_own(self):
        for last in range(2):
            others_arrived = threading.Event()

            def body(rank, last=last, others_arrived=others_arrived):
                with torch.inference_mode(rank == 0):
                    tensors = [torch.ones(2), torch.zeros(4)]
                    if rank == last:
                        others_arrived.wait()
                    works = [
                        dist.all_reduce(tensors[0], async_op=True),
                        dist.group.WORLD._allgather_base(tensors[1], tensors[0].clone()),
                    ]
                    others_arrived.set()
                    for work in works:
                        work.wait()
                return [tensor.tolist() for tensor in tensors]

            outcomes = results_of(2, body)
            self.assertEqual([outcome[0] for outcome in outcomes], [[2.0, 2.0]] * 2)

    def test_dispatch_modes_see_nothing_of_other_ranks(self):
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
    """Without it, a failure or a mismatch of one rank could let the others hang, or blame the wrong rank."""

    def test_a_rank_that_raises_ends_the_wait_of_all(self):
        others_arrived = threading.Barrier(4)

        def body(rank):
            work = None if rank == 2 else dist.barrier(async_op=True)
            others_arrived.wait()
            if work is None:
                raise LookupError("lost my way")
            with self.assertRaises(RuntimeError):  # PeerFailed is no RuntimeError, so it passes through
                work.wait()

        start = time.monotonic()
        outcomes = in_threads(4, body)
        self.assertLess(time.monotonic() - start, 5)
        self.assertIsInstance(outcomes.pop(2), LookupError)
        for outcome in outcomes:
            self.assertIsInstance(outcome, PeerFailed)
            self.assertEqual(outcome.rank, 2)
            self.assertRegex(str(outcome), "rank 2 failed with .*LookupError: lost my way")

    def test_failure_before_the_group_is_made_or_during_a_collective(self):
        init = dist.init_process_group

        def init_at_rank_0(*args, rank, **kwargs):
            if rank == 1:
                raise LookupError("gone")
            init(*args, rank=rank, **kwargs)

        def wait_for_rank_1(rank):
            if rank == 1:
                raise LookupError("gone")
            dist.broadcast(torch.zeros(1), 1)
            return RankResult.report(rank, State.PASSED)

        with unittest.mock.patch.object(dist, "init_process_group", init_at_rank_0):
            before = run_threads(2, wait_for_rank_1)
        for outcomes in (before, run_threads(2, wait_for_rank_1)):
            self.assertEqual([outcome.exception for outcome in outcomes], ["PeerFailed", "LookupError"])
        self.assertEqual(results_of(2, lambda rank: dist.barrier()), [None, None])  # the next world is whole

    def mismatch(self, body: Callable[[int], object], *words: str) -> None:
        """Both ranks catch the mismatch. All of `words` are in both messages."""

        def caught(rank):
            with self.assertRaises(CallsDiffer) as seen:
                body(rank)
            # The ranks can meet again after a mismatch.
            tensor = torch.ones(1)
            dist.all_reduce(tensor)
            return str(seen.exception), tensor.item()

        for message, total in results_of(2, caught):
            self.assertEqual(total, 2)
            for word in words:
                self.assertIn(word, message)

    def test_mismatches_name_rank_and_collective(self):
        dtypes, ops = [torch.float32, torch.float64], [dist.ReduceOp.SUM, dist.ReduceOp.MAX]
        self.mismatch(
            lambda rank: dist.all_reduce(torch.ones(2)) if rank else dist.barrier(),
            *("rank 0 calls barrier()", "rank 1 calls all_reduce(SUM, float32[2])"),
        )
        self.mismatch(lambda rank: dist.all_reduce(torch.ones(2 + rank)), "rank 0", "[2]", "rank 1", "[3]")
        self.mismatch(lambda rank: dist.all_reduce(torch.ones(2, dtype=dtypes[rank])), "float64[2]")
        self.mismatch(lambda rank: dist.all_reduce(torch.ones(2), ops[rank]), "SUM", "MAX")
        self.mismatch(lambda rank: dist.broadcast(torch.ones(2), rank), "root 0", "root 1")
        self.mismatch(
            lambda rank: dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2 + rank)),
            "rank 0 expects float32[2] from rank 1, which sends float32[3]",
        )

    def test_a_mismatch_neither_waits_for_the_third_nor_writes(self):
        # The third rank agrees with one of the first two, whichever arrived first.
        for third in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            ops = [dist.ReduceOp.SUM, dist.ReduceOp.MAX, third]
            both_know, third_may = threading.Barrier(2), threading.Event()

            def body(rank, ops=ops, both_know=both_know, third_may=third_may):
                tensor = torch.tensor([rank + 1.0])
                if rank == 2:
                    third_may.wait()
                with self.assertRaises(CallsDiffer):
                    dist.all_reduce(tensor, ops[rank])
                if rank != 2:
                    both_know.wait()
                    third_may.set()
                dist.barrier()
                return tensor.item()

            self.assertEqual(results_of(3, body), [1.0, 2.0, 3.0])

    def test_wrong_sizes_are_refused_before_anybody_waits(self):
        def body(rank):
            if rank == 0:
                with self.assertRaisesRegex(ValueError, "all_gather_into_tensor on rank 0: .* must be 4, not 3"):
                    dist.all_gather_into_tensor(torch.zeros(3), torch.ones(2))
                with self.assertRaisesRegex(ValueError, "all_to_all_single on rank 0: the sum of the split sizes"):
                    dist.all_to_all_single(torch.zeros(4), torch.ones(4), [1, 1], [1, 1])

        self.assertEqual(results_of(2, body), [None, None])

    def test_a_wait_ends_at_its_limit_and_names_the_absent(self):
        done = threading.Event()

        def body(rank):
            if rank == 1:
                done.wait()
                return
            work = dist.group.WORLD.allreduce([torch.ones(2)])
            try:
                work.wait(timedelta(milliseconds=50))
            finally:
                done.set()

        timeout, absent = in_threads(2, body)
        self.assertIsNone(absent)
        self.assertIsInstance(timeout, CollectiveTimeout)
        self.assertRegex(str(timeout), r"all_reduce.*ranks \[0\] wait for ranks \[1\].* within 0\.05 s")

    def test_all_threads_are_bound_to_one_device(self):
        """Otherwise a DeviceMesh that is made before the device's runtime starts would choose a device by rank."""
        bound = []
        with unittest.mock.patch.object(accelerator.Accelerator, "bind", lambda device, rank: bound.append(rank)):
            run_threads(3, lambda rank: RankResult.report(rank, State.PASSED))
        self.assertEqual(bound, [0, 0, 0])

    def test_rank_fails_if_its_group_cannot_be_destroyed(self):
        def body(rank):
            if rank == 1:
                dist.distributed_c10d._world.pg_map = None
            return RankResult.report(rank, State.PASSED)

        intact, broken = run_threads(2, body)
        self.assertEqual((intact.state, broken.state), (State.PASSED, State.ERROR))
        self.assertIn("destroy_process_group", broken.text)


class TestFakeModes(ThreadsTestCase):
    """Without it, builds of torch with CUDA could crash in the second thread."""

    def test_each_thread_may_enter_one_after_another_has_ended(self):
        """In CUDA builds of torch 2.11 without a GPU, the device guard ends with the thread that entered it first."""

        def body(rank):
            with FakeTensorMode():
                self.assertEqual(torch.ones(rank + 1).shape, (rank + 1,))
            return RankResult.report(rank, State.PASSED)

        for _ in range(3):
            self.assertEqual([outcome.state for outcome in run_threads(2, body)], [State.PASSED, State.PASSED])


if __name__ == "__main__":
    run_tests()
