"""276 tests of all kinds of ranks that do nothing. Some record what the test process and its rank server use."""

import gc
import os
import re
import unittest
from pathlib import Path

from torch_fsdp_tests.common_distributed import MultiProcContinuousTest, MultiProcessTestCase, MultiThreadedTestCase
from torch_fsdp_tests.common_distributed.case import RankTestCase
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.ranks import server

MEASURED = (40, 90)  # numbers of the tests that record


def measure(kind: str, number: int) -> None:
    gc.collect()
    assert server._server is not None
    for who, pid in (("test_process", os.getpid()), ("server", server._server._pid)):
        folder = Path("/proc", str(pid))
        status = dict(re.findall(r"^(\w+):\s+(\d+)", (folder / "status").read_text(), re.MULTILINE))
        held = {
            "descriptors": len(list((folder / "fd").iterdir())),
            "threads": int(status["Threads"]),
            "children": sum(len(path.read_text().split()) for path in folder.glob("task/*/children")),
            "kilobytes": int(status["RssAnon"]),
        }
        for what, value in held.items():
            print(kind, who, what, number, value, flush=True)


class Measured(RankTestCase):
    world_size = 1

    def setUp(self):
        number = int(self._testMethodName[-3:])
        if number in MEASURED:
            measure(type(self).__name__, number)
        super().setUp()


class Processes(Measured, MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()


class Threads(Measured, MultiThreadedTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_threads()


class Staying(Measured, MultiProcContinuousTest):
    @classmethod
    def backend_str(cls) -> str:
        return "gloo"


def passes(self: unittest.TestCase) -> None:
    print("a line of output")


for kind in ("Processes", "Threads", "Staying"):
    for number in range(92):
        setattr(globals()[kind], f"test_{number:03}", passes)

if __name__ == "__main__":
    run_tests()
