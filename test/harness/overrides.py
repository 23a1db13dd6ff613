"""Test cases like those of vendors, which override hooks of upstream's harness. This is not a test file."""

import os
import signal
import sys
import threading
from datetime import timedelta
from typing import Any, NoReturn
from unittest import mock

import torch
import torch.distributed as dist
from samples import Processes

from torch_fsdp_tests.common_distributed import (
    TEST_SKIPS,
    TIMEOUT_OVERRIDE,
    DistributedTestBase,
    MultiProcContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    TestSkip,
)
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms

HANG = "test_hangs_in_hooks"
TIMEOUT_OVERRIDE[HANG] = 1  # second
TEST_SKIPS["widget"] = TestSkip(90, "needs a widget")
TEST_SKIPS["multi-gpu-6"] = TestSkip(83, "six of them")
TEST_SKIPS["gadget"] = TestSkip(82, "needs a gadget")  # upstream's code of five devices


def passes(self: Any) -> None:
    pass


class Starts(Processes):
    """Starts the ranks itself, each with its own environment."""

    world_size = count = 2

    def _start_processes(self, proc: Any) -> None:
        self.processes = []
        for rank in range(self.count):
            ours, theirs = torch.multiprocessing.Pipe()
            os.environ["HOOKS_RANK"] = str(rank)
            self.addCleanup(os.environ.pop, "HOOKS_RANK", None)
            arguments = (rank, self._current_test_name(), self.file_name, theirs)
            process = proc(target=self.__class__._run, name=f"process {rank}", args=arguments, kwargs={"more": rank})
            process.start()
            self.pid_to_pipe[process.pid] = ours
            self.processes.append(process)

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, parent_pipe: Any, **kwargs: Any) -> None:
        assert int(os.environ["HOOKS_RANK"]) == kwargs["more"] == rank
        if "before" in test_name:
            raise ValueError("before the test")
        super()._run(rank, test_name, file_name, parent_pipe)

    test_passes = test_before = passes

    def test_raises(self) -> None:
        raise ValueError(f"of rank {self.rank}")

    def test_skips(self) -> None:
        self.skipTest("no")

    def test_exits_for_a_skip(self) -> None:
        sys.exit(TEST_SKIPS["nccl"].exit_code)

    def test_dies(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def hangs(self: Any) -> None:
    if self.rank == 1:
        threading.Event().wait()


setattr(Starts, HANG, hangs)


class Judges(Starts):
    """Checks the ranks itself: records their exit codes and messages, and accepts all of them."""

    seen: Any = None

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        codes = [process.exitcode for process in self.processes]
        sent = [self.pid_to_pipe[process.pid].recv() for process in self.processes if process.exitcode == 10]
        Judges.seen = (fn.__name__, elapsed_time, codes, sent)


class StartsTooFew(Starts):
    count = 1


class StartsOneOfFakes(StartsTooFew):
    """Starts one rank of a world of two, whose other rank is fake."""

    fake_pg = True

    def test_passes(self) -> None:
        dist.init_process_group("fake", rank=self.rank, world_size=self.world_size)
        self.assertEqual(dist.get_world_size(), 2)


class Exits(Processes):
    """Its ranks exit with 0 after their test, or instead of it."""

    world_size: Any = 2
    test_passes = test_fails_after = test_not_run = passes

    @classmethod
    def _run(cls, rank: int, test_name: str, *arguments: Any, **kwargs: Any) -> NoReturn:
        try:
            if "not_run" not in test_name:
                super()._run(rank, test_name, *arguments, **kwargs)
            if "after" in test_name:
                raise ValueError("after the test")
        finally:
            sys.exit(0)

    def test_raises(self) -> None:
        raise ValueError(f"of rank {self.rank}")

    def test_skips(self) -> None:
        self.skipTest("no")

    def test_exits(self) -> None:
        sys.exit(0)

    def test_cleans_up(self) -> None:
        self.addCleanup(sys.exit, 0)


class Meets(Processes):
    """Its ranks meet after their test, even if it failed in one of them."""

    world_size: Any = 2
    destroy_pg_upon_exit: Any = False

    @classmethod
    def _run(cls, rank: int, test_name: str, file_name: str, *arguments: Any, **kwargs: Any) -> None:
        dist.init_process_group("gloo", rank=rank, world_size=2, store=dist.FileStore(file_name, 2))
        try:
            super()._run(rank, test_name, file_name, *arguments, **kwargs)
        finally:
            dist.barrier()
            dist.destroy_process_group()

    def test_fails_in_one(self) -> None:
        self.assertEqual(self.rank, 0)


class SkipsByCode:
    """Exits with the codes of skips that this file has defined or changed, and with upstream's newest."""

    world_size: Any = 2

    def test_own_entry(self) -> None:
        sys.exit(TEST_SKIPS["widget"].exit_code)

    def test_new_words(self) -> None:
        sys.exit(TEST_SKIPS["multi-gpu-6"].exit_code)

    def test_code_of_another_entry(self) -> None:
        sys.exit(TEST_SKIPS["gadget"].exit_code)

    def test_newest_name(self) -> None:
        sys.exit(TEST_SKIPS["multi-device-2"].exit_code)


class ProcessesSkip(SkipsByCode, Processes):
    pass


class StayingSkip(SkipsByCode, MultiProcContinuousTest):
    pass


class Stays(MultiProcContinuousTest):
    """Makes a group of its own, and sets what its ranks inherit."""

    world_size: Any = 2
    timeout: Any = timedelta(seconds=33)

    @classmethod
    def backend_str(cls) -> str:
        return "gloo"

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        os.environ["HOOKS_MARK"] = "7"
        cls.addClassCleanup(os.environ.pop, "HOOKS_MARK")

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        with mock.patch.object(dist, "init_process_group", wraps=dist.init_process_group) as init:
            super()._init_pg(rank, world_size, rdvz_file)
        cls.given = init.call_args.kwargs["timeout"]
        cls.extra = dist.new_group([0, 1])

    def test_passes(self) -> None:
        self.assertEqual((os.environ["HOOKS_MARK"], self.extra.size(), dist.get_backend()), ("7", 2, "gloo"))
        self.assertEqual(self.given, self.timeout)


class _Sets:
    """Its fixtures change the class and the process before ranks start."""

    world_size: Any = 2
    mark = 0
    start: Any
    dtype = torch.float64  # torch's default in the ranks

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()  # type: ignore[misc]
        cls.mark = 7

    def setUp(self: Any) -> None:
        super().setUp()  # type: ignore[misc]
        self.addCleanup(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float64)
        self.start()

    def test_passes(self: Any) -> None:
        self.assertEqual((self.mark, torch.get_default_dtype()), (7, self.dtype))


class SetsSpawned(_Sets, MultiProcessTestCase):
    start = MultiProcessTestCase._spawn_processes
    dtype = torch.float32  # upstream's ranks are fresh interpreters


class SetsForked(_Sets, MultiProcessTestCase):
    start = MultiProcessTestCase._fork_processes


class SetsThreads(_Sets, MultiThreadedTestCase):
    start = MultiThreadedTestCase._spawn_threads


class SetsVariables(MultiProcessTestCase):
    """Sets what torch reads when it is imported."""

    world_size: Any = 1

    def setUp(self) -> None:
        super().setUp()
        threads = {"OMP_NUM_THREADS": "3", "MKL_DYNAMIC": "FALSE"}  # MKL takes no more than there are cores
        variables = mock.patch.dict(os.environ, threads, TORCH_DISTRIBUTED_DEBUG="DETAIL")
        variables.start()
        self.addCleanup(variables.stop)
        self._spawn_processes()

    def test_passes(self) -> None:
        self.assertEqual((dist.get_debug_level(), torch.get_num_threads()), (dist.DebugLevel.DETAIL, 3))


class MakesGroup(DTensorTestBase):
    world_size: Any = 2
    backend: Any = "gloo"

    def init_pg(self, *arguments: Any, **options: Any) -> None:
        self.made = self.backend
        dist.init_process_group(self.backend, store=dist.FileStore(self.file_name, 2), rank=self.rank, world_size=2)

    @with_comms
    def test_passes(self) -> None:
        self.assertEqual((self.made, dist.get_world_size()), ("gloo", 2))


class NamesBackend(DistributedTestBase):
    world_size: Any = 2

    def backend(self, device: Any) -> str:
        self.asked = device
        return "gloo"

    def test_passes(self) -> None:
        self.create_pg("cpu")
        self.assertEqual((self.asked, dist.get_backend()), ("cpu", "gloo"))
