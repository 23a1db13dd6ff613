"""A test file for test_launched.py. Torchrun runs it, and discovery does not find it."""

import os
import sys
import time
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import FileStore

sys.path.insert(0, str(Path(__file__).parents[3] / "harness" / "inputs"))

from meeting import ends_together

from torch_fsdp_tests.common_distributed import TIMEOUT_OVERRIDE, MultiProcessTestCase, requires
from torch_fsdp_tests.common_fsdp import FSDPTest, FSDPTestContinuous, FSDPTestMultiThread
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.extensions.launch.launched import LaunchedRanks
from torch_fsdp_tests.ranks.local import LocalRanks
from torch_fsdp_tests.ranks.protocol import AskForStacks, EndRanks, Task

RANK = os.environ.get("RANK")  # forked ranks keep that of the process that the launcher made
FOREVER = 1000  # seconds
TIMEOUT_OVERRIDE["test_hangs"] = 3


def total(rank: int) -> int:
    """The sum of one tensor per rank, which shows the number of ranks."""
    tensor = torch.ones(1, device=accelerator.current().device(rank))
    dist.all_reduce(tensor)
    return int(tensor.item())


class TestAll(FSDPTest):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        print("class fixture of TestAll")

    def test_passes(self):
        self.assertEqual(total(self.rank), accelerator.current().ranks)
        place = f"rank {self.rank} of {dist.get_world_size()} at {os.environ['LOCAL_RANK']}"
        print(f"{place}, launcher's variables: {sorted({'RANK', 'WORLD_SIZE', 'MASTER_PORT'} & set(os.environ))}")

    def test_fails(self):
        with self.subTest(stage=7):
            if self.rank == 2:
                self.fail("only here")
            total(self.rank)

    @unittest.expectedFailure
    def test_expected_failure(self):
        if self.rank == 1:
            self.fail("as everybody knows")
        total(self.rank)

    def test_skips(self):
        self.skipTest("not today")

    def test_dies(self):
        if self.rank == 1:
            os._exit(3)
        total(self.rank)

    def test_hangs(self):
        if self.rank == 1:
            time.sleep(FOREVER)

    @requires(lambda: "known before any rank starts")
    def test_asks_first(self):
        pass


class TestHeardLate(FSDPTest):
    """The process of rank 1 detects the death of its rank long after rank 0 has seen the consequences."""

    test_dies = TestAll.test_dies


class TestHeardAtTheLimit(FSDPTest):
    """Rank 0 receives the end of the hanging rank 1 while it asks all ranks for stacks. The others wait for rank 1."""

    test_hangs = TestAll.test_hangs


start, send = LocalRanks.start, LaunchedRanks.send


def start_and_be_late(transport: Any, task: Task, *arguments: Any) -> None:
    start(transport, task, *arguments)
    transport.cls = task.qualname
    if transport.cls == "TestHeardLate" and RANK == "1":
        time.sleep(2)


def send_and_receive_an_end(transport: Any, order: Any, index: int | None = None) -> None:
    send(transport, order, index)
    if isinstance(order, AskForStacks) and transport._here.cls == "TestHeardAtTheLimit":
        rank_1 = transport._workers[0]
        rank_1.connection.tell(EndRanks())
        while rank_1.rank in transport._running:
            transport.selector.select()
            transport._events = transport.arrived()


mock.patch.object(LocalRanks, "start", start_and_be_late).start()
mock.patch.object(LaunchedRanks, "send", send_and_receive_an_end).start()


class TestFewer(MultiProcessTestCase):
    """Ranks that make their own group, over a store class that the file imports by name."""

    world_size = 2

    def setUp(self):
        super().setUp()
        os.environ["SET_BY_RANK_0"] = "yes"
        self.addCleanup(os.environ.pop, "SET_BY_RANK_0")
        self._spawn_processes()

    def connect(self) -> dist.Store:
        store = FileStore(self.file_name, 2)
        self.assertIsInstance(store, dist.PrefixStore)
        dist.init_process_group(accelerator.current().backend, store=store, rank=self.rank, world_size=2)
        return store

    def test_passes(self):
        self.assertEqual(os.environ["SET_BY_RANK_0"], "yes")
        self.connect()
        self.assertEqual(total(self.rank), 2)

    test_passes_again = test_passes

    def test_ends_together(self):
        ends_together(self, self.connect())


class TestMore(FSDPTest):
    world_size = 5

    def test_is_left_out(self):
        self.fail("it has no room")


class TestStaying(FSDPTestContinuous):
    def test_1_begins(self):
        type(self).mine = os.getpid()
        self.assertEqual(total(self.rank), accelerator.current().ranks)

    def test_2_same_ranks(self):
        self.assertEqual(self.mine, os.getpid())
        total(self.rank)

    def test_3_fails(self):
        if self.rank == 1:
            raise KeyError("lost")
        total(self.rank)

    def test_4_new_ranks(self):
        self.assertFalse(hasattr(self, "mine"))
        total(self.rank)

    def test_5_ends_together(self):
        dist.new_group()
        ends_together(self, dist.distributed_c10d._get_default_store())


class TestThreads(FSDPTestMultiThread):
    world_size = 6

    def test_passes(self):
        self.assertEqual(total(self.rank), 6)


class TestAlone(TestCase):
    def test_passes(self):
        print("one process")


if __name__ == "__main__":
    run_tests()
