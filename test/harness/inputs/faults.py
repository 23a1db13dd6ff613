"""A test file that goes wrong in every way that test_ranks.py knows; not one that discovery finds."""

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
import unittest

import torch
import torch.distributed as dist

from torch_fsdp_tests.common_distributed import MultiProcContinuousTest, MultiProcessTestCase, MultiThreadedTestCase
from torch_fsdp_tests.common_utils import run_tests

FOREVER = 1000  # seconds


class TwoRanks(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def connect(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)

    def only_rank_1(self, fault):
        """Rank 1 meets its fault once all are connected; the others wait for it in a collective."""
        self.connect()
        if self.rank == 1:
            fault()
        dist.barrier()


class Deaths(TwoRanks):
    def test_exit(self):
        self.only_rank_1(lambda: os._exit(3))

    def test_sys_exit(self):
        self.only_rank_1(lambda: sys.exit(5))

    def test_sys_exit_zero(self):
        sys.exit(0)

    def test_sigkill(self):
        self.only_rank_1(lambda: os.kill(os.getpid(), signal.SIGKILL))

    def test_sigsegv(self):
        self.only_rank_1(lambda: ctypes.string_at(0))

    def test_sigabrt(self):
        self.only_rank_1(os.abort)

    def test_before_rendezvous(self):
        if self.rank == 1:
            os._exit(4)
        self.connect()

    def test_after_success(self):
        if self.rank == 1:
            atexit.register(os._exit, 3)

    @unittest.expectedFailure
    def test_expected_failure_by_crash(self):
        os._exit(3)

    def test_special_return_code(self):
        os._exit(7)

    def setUp(self):
        super().setUp()
        if self._testMethodName == "test_special_return_code":
            self.special_return_code_checks[self.test_special_return_code.__wrapped__] = 7


class Words(TwoRanks):
    def test_one_raises(self):
        self.only_rank_1(lambda: self.fail("the one"))

    def test_all_raise_alike(self):
        self.fail("alike")

    def test_all_raise_differently(self):
        raise ValueError(f"rank {self.rank} says so")

    def test_element(self):
        wrong = torch.zeros(4)
        wrong[2] = self.rank
        self.assertEqual(wrong, torch.zeros(4))

    def test_no_pickle(self):
        class Odd(Exception):
            def __reduce__(self):
                raise TypeError("not to be pickled")

            def __str__(self):
                raise TypeError("not to be shown")

        raise Odd

    def test_flood(self):
        for _ in range(60_000):
            print("x" * 50)
        os.write(2, b"\xff\xfe\n")
        raise ValueError("m" * 50_000_000)

    def test_quiet(self):
        print("nobody asked for this")

    def test_subtest(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertNotEqual(number, 1)

    def test_no_subtest(self):
        from torch_fsdp_tests.common_distributed import run_subtests

        run_subtests(self, {"number": []}, print)

    @unittest.expectedFailure
    def test_expected_failure(self):
        self.only_rank_1(lambda: self.fail("as expected"))

    @unittest.expectedFailure
    def test_unexpected_success(self):
        pass


class Skips(TwoRanks):
    def test_all(self):
        raise unittest.SkipTest("for a reason")

    def test_all_by_exit_code(self):
        os._exit(74)

    def test_one(self):
        if self.rank == 1:
            raise unittest.SkipTest("for a reason")

    def test_one_while_another_fails(self):
        if self.rank == 1:
            raise unittest.SkipTest("for a reason")
        self.fail("the other")


class Hangs(TwoRanks):
    def test_in_python(self):
        self.only_rank_1(lambda: time.sleep(FOREVER))

    def test_in_c(self):
        self.only_rank_1(lambda: ctypes.PyDLL(None).sleep(FOREVER))  # PyDLL keeps the GIL

    def test_ignoring_sigterm(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("hanging")
        time.sleep(FOREVER)

    def test_stopped(self):
        self.only_rank_1(lambda: os.kill(os.getpid(), signal.SIGSTOP))

    def test_collective_of_some(self):
        self.only_rank_1(lambda: time.sleep(FOREVER) if not dist.barrier() else None)


class Leaks(TwoRanks):
    def test_grandchild(self):
        if self.rank == 1:
            subprocess.Popen(["sleep", "999"], start_new_session=True)

    def test_thread(self):
        if self.rank == 1:
            threading.Thread(target=time.sleep, args=(FOREVER,), name="left").start()

    def test_file(self):
        if self.rank == 1:
            open(os.path.join(os.environ["TMPDIR"], "left"), "w").close()

    def test_group(self):
        self.connect()

    def test_environment(self):
        os.environ["LEFT"] = "1"
        torch.set_default_dtype(torch.float64)

    def test_environment_after(self):
        self.assertNotIn("LEFT", os.environ)
        self.assertEqual(torch.ones(1).dtype, torch.float32)


class NoRanks(MultiProcessTestCase):
    def test_none(self):
        pass


class ZeroRanks(TwoRanks):
    world_size = 0

    def test_zero(self):
        pass


class ZServer(TwoRanks):
    def test_a_killed(self):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(FOREVER)

    def test_b_after(self):
        self.connect()


class Threads(MultiThreadedTestCase):
    world_size = 3

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_passes(self):
        dist.barrier()

    def test_one_raises(self):
        if self.rank == 1:
            raise ValueError("the one")
        dist.barrier()

    def test_one_leaves(self):
        if self.rank == 1:
            sys.exit(5)
        dist.barrier()

    def test_dies(self):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def test_all_skip(self):
        raise unittest.SkipTest("for a reason")

    def test_one_skips(self):
        if self.rank == 1:
            raise unittest.SkipTest("for a reason")

    def test_hangs(self):
        if self.rank == 1:
            time.sleep(FOREVER)


class ThreadFixtures(Threads):
    test_passes = test_one_raises = test_one_leaves = test_dies = test_all_skip = test_one_skips = test_hangs = None

    def perThreadSetUp(self):
        raise ValueError("in the fixture")

    def test_fixture(self):
        pass


class Stays(MultiProcContinuousTest):
    world_size = 2

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_a_pid(self):
        print(f"pid {os.getpid()}")

    def test_b_pid(self):
        print(f"pid {os.getpid()}")
        os.environ["LEFT"] = "1"

    def test_c_skip(self):
        self.assertNotIn("LEFT", os.environ)
        raise unittest.SkipTest("for a reason")

    def test_d_pid(self):
        dist.barrier()
        print(f"pid {os.getpid()}")

    def test_e_dies(self):
        if self.rank == 1:
            os._exit(3)
        dist.barrier()

    def test_f_pid(self):
        dist.barrier()
        print(f"pid {os.getpid()}")


if __name__ == "__main__":
    run_tests()
