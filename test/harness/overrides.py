"""Test cases like those of vendors, which override hooks of upstream's harness. This is not a test file."""

import os
import signal
import sys
import threading
import traceback
import unittest
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from samples import Processes, Threads

from torch_fsdp_tests.common_distributed import (
    TEST_SKIPS,
    TIMEOUT_OVERRIDE,
    MultiProcContinuousTest,
    MultiProcessTestCase,
    TestSkip,
)

HANG = "test_hangs_in_hooks"
TIMEOUT_OVERRIDE[HANG] = 1  # second
TEST_SKIPS["widget"] = TestSkip(90, "needs a widget")
TEST_SKIPS["multi-gpu-6"] = TestSkip(83, "six of them")
TEST_SKIPS["gadget"] = TestSkip(82, "needs a gadget")  # upstream's code of five devices
AT_ONCE = 60  # seconds for a rank to answer or to end


def passes(self: Any) -> None:
    pass


def hangs(self: Any) -> None:
    if self.rank == 1:
        threading.Event().wait()


class Listens(Processes):
    """Runs the test itself, as upstream does: with a listener, a traceback through the pipe, and exit codes."""

    world_size: Any = 2

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        receiver, sender = torch.multiprocessing.Pipe(duplex=False)
        listen = MultiProcessTestCase._event_listener
        listener = threading.Thread(target=listen, args=(parent_pipe, receiver, self.rank), daemon=True)
        listener.start()
        try:
            getattr(self, test_name)()
        except unittest.SkipTest:
            sys.exit(TEST_SKIPS["generic"].exit_code)
        except Exception:
            parent_pipe.send(traceback.format_exc())
            sys.exit(MultiProcessTestCase.TEST_ERROR_EXIT_CODE)
        finally:
            sender.send(None)
            listener.join()
            parent_pipe.close()

    test_passes = passes

    def test_skips(self) -> None:
        self.skipTest("no")

    def test_fails(self) -> None:
        self.assertEqual(self.rank, 0, "of rank 1")

    def test_exits(self) -> None:
        os._exit(MultiProcessTestCase.TEST_ERROR_EXIT_CODE)


setattr(Listens, HANG, hangs)


class Wraps(Processes):
    """Gives each rank one more pipe, and talks to the ranks while their test runs."""

    world_size: Any = 2

    def _spawn_processes(self) -> None:
        spawned = torch.multiprocessing.get_context("spawn").Process
        self.pipes = [torch.multiprocessing.Pipe() for _ in range(self.world_size)]
        theirs = iter([pipe for _, pipe in self.pipes])
        self._start_processes(lambda *, args, **kwargs: spawned(args=(next(theirs), *args), **kwargs))

    @classmethod
    def _run(cls, pipe: Any, rank: int, *arguments: Any, **kwargs: Any) -> None:  # type: ignore[override]
        cls.pipe = pipe
        super()._run(rank, *arguments, **kwargs)

    def _join_processes(self, fn: Any) -> None:
        fn()
        super()._join_processes(fn)

    def test_passes(self) -> None:
        if self.rank != self.MAIN_PROCESS_RANK:
            self.pipe.send(self.rank)
            self.assertEqual(self.pipe.recv(), "go on")
            return
        for rank, (pipe, _) in enumerate(self.pipes):
            self.assertTrue(pipe.poll(AT_ONCE))
            self.assertEqual(pipe.recv(), rank)
            self.assertEqual(self.processes[rank].exitcode, None)
            pipe.send("go on")
        for process in self.processes:
            process.join(AT_ONCE)
        self.assertEqual([process.exitcode for process in self.processes], [0, 0])


class WrapsApart(Wraps):
    """Ends its ranks one after the other."""

    def test_passes(self) -> None:
        if self.rank != self.MAIN_PROCESS_RANK:
            self.assertEqual(self.pipe.recv(), "go on")
            return
        for (pipe, _), process in zip(self.pipes, self.processes, strict=True):
            self.assertEqual(process.exitcode, None)
            pipe.send("go on")
            process.join(AT_ONCE)
            self.assertEqual(process.exitcode, 0)


class Starts(Processes):
    """Starts the ranks itself, each with its own environment."""

    world_size = count = 2
    at_fault = "none"

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

    test_passes = passes
    test_before = passes

    def test_raises(self) -> None:
        raise ValueError(f"of rank {self.rank}")

    def test_skips(self) -> None:
        self.skipTest("no")

    def test_exits_for_a_skip(self) -> None:
        sys.exit(TEST_SKIPS["nccl"].exit_code)

    def test_dies(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


setattr(Starts, HANG, hangs)


class Judges(Starts):
    """Checks the ranks itself: records their exit codes and messages, and accepts all of them."""

    seen: Any = None

    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        codes = [process.exitcode for process in self.processes]
        sent = [self.pid_to_pipe[process.pid].recv() for process in self.processes if process.exitcode == 10]
        Judges.seen = (fn.__name__, elapsed_time, codes, sent)


class JudgesMore(Starts):
    def _check_return_codes(self, fn: Any, elapsed_time: float) -> None:
        super()._check_return_codes(fn, elapsed_time)
        self.assertEqual([process.exitcode for process in self.processes], [0, 7])


class StartsTooFew(Starts):
    count = 1


class StartsTooMany(Starts):
    count = 3


class StartsOneOfFakes(StartsTooFew):
    """Starts one rank of a world of two, whose other rank is fake."""

    fake_pg = True

    def test_passes(self) -> None:
        dist.init_process_group("fake", rank=self.rank, world_size=self.world_size)
        self.assertEqual(dist.get_world_size(), 2)

    def test_raises(self) -> None:
        raise ValueError(f"of rank {self.rank}")


class StartsNoneOfFakes(StartsOneOfFakes):
    count = 0


def run_and_exit(test_name: str, run: Callable[[], None]) -> NoReturn:
    """Run a test in a rank, and exit with 0 whatever happens."""
    try:
        if "not_run" not in test_name:
            run()
        if "after" in test_name:
            raise ValueError("after the test")
    finally:
        sys.exit(0)


class Exits:
    """Tests for classes whose ranks exit with 0 after their test, or instead of it."""

    world_size = 2
    rank: int
    test_passes = test_fails_after = test_not_run = passes

    def test_raises(self) -> None:
        raise ValueError(f"of rank {self.rank}")

    def test_skips(self: Any) -> None:
        self.skipTest("no")

    def test_exits(self) -> None:
        sys.exit(0)

    def test_cleans_up(self: Any) -> None:
        self.addCleanup(sys.exit, 0)


class ProcessesExit(Exits, Processes):
    @classmethod
    def _run(cls, rank: int, test_name: str, *arguments: Any, **kwargs: Any) -> None:
        run_and_exit(test_name, lambda: super(ProcessesExit, cls)._run(rank, test_name, *arguments, **kwargs))


class ListenersExit(Exits, Listens):
    """Their own ``run_test`` calls the test."""

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        run_and_exit(test_name, lambda: super(ListenersExit, self).run_test(test_name, parent_pipe))


class ThreadsExit(Exits, Threads):
    @classmethod
    def _run(cls, test_name: str, *arguments: Any, **kwargs: Any) -> None:
        run_and_exit(test_name, lambda: super(ThreadsExit, cls)._run(test_name, *arguments, **kwargs))


class StayingExit(Exits, MultiProcContinuousTest):
    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: Any) -> None:
        run_and_exit(test_id, lambda: super(StayingExit, cls)._run_test_given_id(test_id, **kwargs))


class Retries(Processes):
    """Runs a test again if it fails, and exits with 0."""

    world_size: Any = 2
    runs = 0

    @classmethod
    def _run(cls, *arguments: Any, **kwargs: Any) -> None:
        try:
            super()._run(*arguments, **kwargs)
        except AssertionError:
            super()._run(*arguments, **kwargs)
        sys.exit(0)

    def test_passes(self) -> None:
        Retries.runs += 1
        self.assertEqual(self.runs, 2)

    def test_fails(self) -> None:
        self.fail("again")


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

    world_size = 2

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


class ThreadsSkip(SkipsByCode, Threads):
    pass


class StayingSkip(SkipsByCode, MultiProcContinuousTest):
    pass


class Prepares:
    """A mixin that prepares each rank of a continuous class before its first test."""

    @classmethod
    def _worker_loop(cls: Any, rank: int, *arguments: Any) -> None:
        os.environ["HOOKS_CORE"] = str(rank)
        super()._worker_loop(rank, *arguments)  # type: ignore[misc]


class Staying(MultiProcContinuousTest):
    world_size = 2
    test_passes = passes

    def test_is_prepared(self) -> None:
        self.assertEqual(os.environ["HOOKS_CORE"], str(self.rank))


class Prepared(Prepares, Staying):
    pass


class LoopsItself(Staying):
    """Has a loop like upstream's, and does not call that of its base."""

    @classmethod
    def _worker_loop(cls, rank: int, world_size: int, rdvz_file: str, task_queue: Any, completion_queue: Any) -> None:
        while (test := task_queue.get()) is not None:
            completion_queue.put(test)


class NeverLoops(Staying):
    @classmethod
    def _worker_loop(cls, *arguments: Any) -> None:
        pass
