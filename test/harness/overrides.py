"""Test cases like those of vendors, which override hooks of upstream's harness. This is not a test file."""

import os
import signal
import sys
import threading
import traceback
import unittest
from typing import Any

import torch
from samples import Processes

from torch_fsdp_tests.common_distributed import TEST_SKIPS, TIMEOUT_OVERRIDE, MultiProcessTestCase

HANG = "test_hangs_in_hooks"
TIMEOUT_OVERRIDE[HANG] = 1  # second
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
