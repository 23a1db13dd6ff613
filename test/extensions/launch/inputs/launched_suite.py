"""The test files of a launched suite. A copy of this file has the tests of its name: ``test_3_well.py`` has those of
``well``. Faults happen at the last rank.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import torch
import torch.distributed as dist

from torch_fsdp_tests.common_distributed import TIMEOUT_OVERRIDE
from torch_fsdp_tests.common_fsdp import FSDPTest, FSDPTestMultiThread
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.device import accelerator

NAME = Path(__file__).stem.split("_", 2)[2]
WORKER, PROCESS = os.getppid(), os.getpid()
LAST = int(os.environ["WORLD_SIZE"]) - 1
IS_LAST_PROCESS = int(os.environ["RANK"]) == LAST
FOREVER = 1000  # seconds
TIMEOUT_OVERRIDE["test_4_hangs"] = 3


def leave_mark(name: str) -> None:
    Path(os.environ["STARTED"], name).touch()


def die_after_mark(name: str) -> None:
    """Look for the mark at short intervals. A thread would keep this process from forking its rank server."""
    mark = Path(os.environ["STARTED"], name)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(PROCESS, signal.SIGKILL if mark.exists() else 0))
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)


def wait_for_the_end() -> None:
    time.sleep(FOREVER)


def total(rank: int) -> int:
    """The sum of one tensor per rank, which shows the number of ranks."""
    tensor = torch.ones(1, device=accelerator.current().device(rank))
    dist.all_reduce(tensor)
    return int(tensor.item())


if NAME == "well":

    class TestFirstTwo(FSDPTest):
        world_size = 2

        def test_sum(self):
            self.assertEqual(total(self.rank), 2)

    class TestAll(FSDPTest):
        def test_sum(self):
            self.assertEqual(total(self.rank), accelerator.current().ranks)

    class TestThreads(FSDPTestMultiThread):
        world_size = 6

        def test_sum(self):
            self.assertEqual(total(self.rank), 6)

    class TestAlone(TestCase):
        def test_passes(self):
            pass


if NAME == "ranks_fail":

    class TestRanks(FSDPTest):
        def test_1_raises(self):
            if self.rank == LAST:
                raise KeyError("only here")
            total(self.rank)

        def test_2_exits(self):
            if self.rank == LAST:
                os._exit(7)
            total(self.rank)

        def test_3_is_killed(self):
            if self.rank == LAST:
                os.kill(os.getpid(), signal.SIGKILL)
            total(self.rank)

        def test_4_hangs(self):
            if self.rank == LAST:
                time.sleep(FOREVER)

        def test_5_passes(self):
            total(self.rank)


if NAME in ("import_fails", "import_hangs"):
    if IS_LAST_PROCESS and NAME == "import_fails":
        raise ImportError("not to be had here")
    if IS_LAST_PROCESS:
        leave_mark("hangs")
        wait_for_the_end()
    if NAME == "import_hangs" and os.environ["RANK"] == "0":
        die_after_mark("hangs")

    class TestNeverBegins(FSDPTest):
        def test_1(self):
            pass

        def test_2(self):
            pass


if NAME == "process_dies":
    if IS_LAST_PROCESS:
        subprocess.Popen(["sleep", "1001"], start_new_session=True)  # it leaks

    class TestProcess(FSDPTest):
        def test_1_raises(self):
            if self.rank == LAST:
                raise KeyError("only here")

        def test_2_dies(self):
            if self.rank == LAST:
                os.kill(PROCESS, signal.SIGKILL)
            time.sleep(FOREVER)

        def test_3_comes_after(self):
            pass


if NAME in ("worker_dies", "link_goes_down"):

    class TestMachine(FSDPTest):
        def test_1_is_lost(self):
            if self.rank == LAST:
                leave_mark("fault")
                if NAME == "worker_dies":
                    os.kill(WORKER, signal.SIGKILL)
                else:
                    subprocess.run(["ip", "link", "set", os.environ["LINK"], "down"], check=True)
            time.sleep(FOREVER)

        def test_2_comes_after(self):
            pass


if NAME == "fails_in_turn":

    class TestTurns(FSDPTest):
        """One test fails at the last rank in each ``EVERY``-th of its runs, and the other one never fails."""

        def test_fails_in_turn(self):
            if self.rank == LAST:
                with open(Path(os.environ["STARTED"], "turns"), "a") as file:
                    file.write("x")
                    turn = file.tell()
                if turn % int(os.environ["EVERY"]) == 0:
                    raise RuntimeError("expected 4 elements, got 3")
            total(self.rank)

        def test_passes(self):
            total(self.rank)


if NAME == "waits":

    class TestWaits(FSDPTest):
        def test_waits(self):
            leave_mark("waits")
            time.sleep(FOREVER)


if __name__ == "__main__":
    run_tests()
