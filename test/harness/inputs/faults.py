"""A test file with every fault that test_ranks.py checks. Discovery does not find it.

Each fault is written once, and runs in three kinds of ranks: processes of one test, threads, and processes that stay
for all tests of their class.
"""

import atexit
import ctypes
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import unittest.mock
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy
import torch
import torch.distributed as dist
from meeting import WAIT, ends_together

from torch_fsdp_tests import common_distributed
from torch_fsdp_tests.common_distributed import MultiProcContinuousTest, MultiProcessTestCase, MultiThreadedTestCase
from torch_fsdp_tests.common_fsdp import FSDPTestContinuous, FSDPTestMultiThread
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.device import machine
from torch_fsdp_tests.device.accelerator import Accelerator
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.ranks import RankGroup, group, server

FOREVER = 1000  # seconds
LIMIT = 2  # seconds for a test that uses its whole limit; the limit of other tests is in the environment
SHARED_MEMORY = "/dev/shm"

if os.environ.get("FAULTS_OWN_HANDLER"):
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))


described: list[str] = []  # in this process, and in those that it was forked from
of_host = machine.of_host


def describe_host() -> dict[str, Any]:
    described.append("host")  # with some builds of torch this starts the driver of a device
    return of_host()


machine.of_host = describe_host
bind = Accelerator.bind


def bind_unless_ignored(self: Accelerator, rank: int) -> torch.device:
    if "FAULTS_UNBOUND" in os.environ:
        raise ValueError("no such device")
    return bind(self, rank)


Accelerator.bind = bind_unless_ignored  # type: ignore[method-assign]

if TYPE_CHECKING:
    from torch_fsdp_tests.common_distributed.case import RankTestCase

    class Case(RankTestCase):
        """The methods that the classes below use of the test case that they are mixed into."""

        def connect(self) -> None: ...

else:
    Case = object


class Timed(Case):
    """A test of two ranks, which prints the seconds that it took in the test process."""

    world_size = 2

    def run(self, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
        began = time.monotonic()
        try:
            return super().run(result)
        finally:
            print(f"seconds {type(self).__name__}.{self._testMethodName} {time.monotonic() - began:.2f}", flush=True)

    def connect(self) -> None:
        """Make the process group, if the ranks have none before the test begins."""


class Processes(Timed, MultiProcessTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def connect(self) -> None:
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.world_size)


class Threads(Timed, MultiThreadedTestCase):
    def setUp(self):
        super().setUp()
        self._spawn_threads()


class Staying(Timed, MultiProcContinuousTest):
    @classmethod
    def backend_str(cls) -> str:
        return "gloo"


def only_rank_1(case: Case, fault: Callable[[], object]) -> None:
    """Rank 1 runs the fault after all ranks are connected. The other ranks wait for it in a collective."""
    case.connect()
    if case.rank == 1:
        fault()
    dist.barrier()


def at_rank_1(fault: Callable[[Case], object]) -> Callable[[Case], None]:
    """A test in which rank 1 runs this fault. No report shows its own frame."""
    return lambda case: only_rank_1(case, lambda: fault(case))


def by_rank_1(fault: Callable[[Case], object]) -> Callable[[Case], None]:
    """A test in which rank 1 runs this fault, and the other ranks pass."""

    def test(case: Case) -> None:
        if case.rank == 1:
            fault(case)

    return test


def rank_1_leaves_with(case: Case, fault: Callable[..., object], *arguments: Any) -> None:
    """Rank 1 calls this when its process exits. A rank that stays exits only after its class, and does not call it."""
    if case.rank == 1 and not isinstance(case, Staying):
        atexit.register(fault, *arguments)


def die(number: int) -> None:
    os.kill(os.getpid(), number)


def passes(case: Case) -> None:
    pass


def fails(case: Case) -> None:
    case.fail("the test")


def skips(case: Case) -> None:
    case.skipTest("for a reason")


# --- the faults -------------------------------------------------------------------------------------------------------


class Deaths(Case):
    test_exit = at_rank_1(lambda case: os._exit(3))
    test_sys_exit = at_rank_1(lambda case: sys.exit(5))
    test_sigkill = at_rank_1(lambda case: die(signal.SIGKILL))

    def test_sys_exit_zero(self):
        sys.exit(0)

    def test_sigsegv(self):
        only_rank_1(self, lambda: ctypes.string_at(0))

    def test_sigabrt(self):
        only_rank_1(self, os.abort)

    def test_leaving_a_shared_file(self):
        def fault():
            open(f"{SHARED_MEMORY}/torch_{os.getpid()}_faults", "w").close()
            die(signal.SIGKILL)

        only_rank_1(self, fault)

    @unittest.expectedFailure
    def test_expected_failure_by_crash(self):
        os._exit(3)


class Late(Case):
    """A rank dies after its test. Ranks that stay end when their class is over."""

    test_after_success = by_rank_1(lambda case: atexit.register(os._exit, 3))


class Early(Case):
    """A rank dies before the group exists."""

    def test_before_rendezvous(self):
        if self.rank == 1:
            os._exit(4)
        self.connect()
        dist.barrier()  # a thread is connected before its test begins


class Words(Case):
    test_passes = at_rank_1(lambda case: None)
    test_one_raises = at_rank_1(lambda case: case.fail("the one"))
    test_expected_failure = unittest.expectedFailure(at_rank_1(lambda case: case.fail("as expected")))

    def test_forked_before_the_host_is_described(self):
        self.assertEqual(described, [])

    def test_all_raise_alike(self):
        self.fail("alike")

    async def test_is_async(self):
        self.fail("this does not run")

    @unittest.expectedFailure
    def test_yields(self):
        yield self.fail("this does not run")

    def test_returns(self):
        return self.rank == 5

    def test_all_raise_differently(self):
        raise ValueError(f"rank {self.rank} says so")

    def test_interrupted(self):
        def fault():
            raise KeyboardInterrupt

        only_rank_1(self, fault)

    def test_element(self):
        wrong = torch.zeros(4)
        wrong[2] = self.rank / 2
        self.assertEqual({"weight": wrong}, {"weight": torch.zeros(4)})

    def test_no_pickle(self):
        class Odd(Exception):
            def __reduce__(self):
                raise TypeError("not to be pickled")

            def __str__(self):
                raise TypeError("not to be shown")

        raise Odd

    def test_quiet_no_more(self):
        print("of this test")
        self.fail("so that it is shown")

    def test_quiet(self):
        print("this was not requested")

    def test_shapes(self):
        self.connect()
        dist.all_reduce(torch.ones(1_000 + 100_000 * self.rank))

    def test_subtest(self):
        for number in range(3):
            with self.subTest(number=number):
                self.assertNotEqual(number, 1)

    @unittest.expectedFailure
    def test_expected_failure_and_slow_exit(self):
        if self.rank == 1:
            atexit.register(time.sleep, FOREVER)
            self.fail("as expected")

    @unittest.expectedFailure
    def test_unexpected_success(self):
        pass


class Flood(Case):
    def test_flood(self):
        for _ in range(60_000):
            print("x" * 50)
        os.write(2, b"\xff\xfe\n")
        raise ValueError("m" * 50_000_000)


class Meeting(Case):
    """For ranks that are processes."""

    def test_do_not_interrupt_each_other(self):
        """Ranks have a scheduling policy without which interrupts by network threads cost a sixth of the time."""
        if sys.platform == "linux":
            self.assertNotEqual(os.sched_getscheduler(0), os.SCHED_OTHER)

    def test_groups_end_together(self):
        """Rank 0 finishes at once, and its group stays until rank 1 finishes."""
        self.connect()
        dist.new_group()
        ends_together(self, dist.distributed_c10d._get_default_store())


class Skips(Case):
    test_all = skips
    test_one = by_rank_1(skips)

    def test_stays_for_the_others(self):
        """Rank 0 skips at once, and does not exit before rank 1 also skips."""
        self.connect()
        pids: list = [None, None]
        dist.all_gather_object(pids, os.getpid())
        if self.rank == 1 and sys.platform == "linux":
            with open(os.pidfd_open(pids[0])) as rank_0:
                self.assertEqual(select.select([rank_0], [], [], WAIT)[0], [])
        skips(self)

    def test_all_by_exit_code(self):
        sys.exit(74)

    def test_one_while_another_waits(self):
        if isinstance(self, Staying):
            return  # a rank that stays does not leave when it skips
        self.connect()
        if self.rank == 1:
            skips(self)
        dist.barrier()


class Hangs(Case):
    def test_hang_after_success(self):
        rank_1_leaves_with(self, time.sleep, FOREVER)

    def test_hang_after_a_skip(self):
        rank_1_leaves_with(self, time.sleep, FOREVER)
        skips(self)

    def test_hang_stopped_after_success(self):
        rank_1_leaves_with(self, os.kill, os.getpid(), signal.SIGSTOP)

    def test_hang_in_python(self):
        only_rank_1(self, lambda: time.sleep(FOREVER))

    def test_hang_in_c(self):
        only_rank_1(self, lambda: ctypes.PyDLL(None).sleep(FOREVER))  # PyDLL keeps the GIL

    def test_hang_stopped(self):
        def fault():
            die(signal.SIGSTOP)
            time.sleep(FOREVER)  # if there are several threads, the one that sends the signal may run on for a moment

        only_rank_1(self, fault)

    def test_hang_in_a_collective_of_some(self):
        self.connect()
        if self.rank == 0:
            dist.all_reduce(torch.ones(1))
        elif not isinstance(self, Staying):
            time.sleep(FOREVER)  # the other rank would detect a rank that leaves

    def test_hang_ignoring_sigterm(self):
        ctypes.CDLL(None).signal(signal.SIGTERM, 1)  # SIG_IGN; in Python only the main thread may set a handler
        print("hanging", flush=True)
        time.sleep(FOREVER)


class Fixtures(Case):
    """Failures around the test method: in the test process, and in the ranks."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.addClassCleanup(cls.broken, "class clean-up")

    def setUp(self):
        super().setUp()
        if self._testMethodName == "test_clean_up":
            self.addCleanup(self.broken, "clean-up")
        if self._testMethodName == "test_set_up":
            self.broken("setUp")

    def tearDown(self):
        if self._testMethodName == "test_tear_down":
            self.broken("tearDown")
        super().tearDown()

    @staticmethod
    def broken(place: str) -> None:
        raise ValueError(f"in {place}")

    def test_set_up(self):
        time.sleep(FOREVER)

    test_tear_down = test_clean_up = passes

    def test_clean_up_in_rank(self):
        if self.rank == 1:
            self.addCleanup(print, "never mind")
            self.addCleanup(self.broken, "a rank's clean-up")

    def test_clean_up_in_rank_after_a_failure(self):
        self.addCleanup(print, "cleaned up", flush=True)
        fails(self)

    def test_clean_up_that_skips_after_a_failure(self):
        self.addCleanup(self.skipTest, "in a clean-up")
        self.fail("the test")

    def test_clean_up_that_exits_after_a_failure(self):
        self.addCleanup(sys.exit, 74)  # which means a skip
        self.fail("the test")

    def test_clean_up_that_skips_after_an_exit(self):
        self.addCleanup(self.skipTest, "in a clean-up")
        sys.exit(5)

    def test_clean_up_that_fails_after_a_skip(self):
        self.addCleanup(self.broken, "a rank's clean-up")
        skips(self)

    def test_clean_up_that_fails_after_a_failure(self):
        self.addCleanup(self.broken, "a rank's clean-up")
        self.fail("the test")

    @unittest.expectedFailure
    def test_expected_failure_by_clean_up(self):
        self.addCleanup(self.broken, "a rank's clean-up")


class ClassFixture(Case):
    test_never = passes

    @classmethod
    def setUpClass(cls):
        raise ValueError("in setUpClass")


class Leaks(Case):
    test_a_child = by_rank_1(lambda case: subprocess.Popen(["sleep", "999"], start_new_session=True))
    test_a_thread = by_rank_1(lambda case: threading.Thread(target=time.sleep, args=(FOREVER,), name="left").start())
    test_an_orphan = by_rank_1(lambda case: subprocess.run(["sh", "-c", "sleep 999 >/dev/null 2>&1 &"]))
    test_files = by_rank_1(lambda case: os.mkdir(os.path.join(tempfile.gettempdir(), "left")))

    def test_a_thread_that_fails(self):
        if self.rank == 1:
            thread = threading.Thread(target=Fixtures.broken, args=("a thread",), name="failing")
            thread.start()
            thread.join()

    def test_output_closed(self):
        if self.rank == 1:
            sys.stdout.close()
            sys.stderr.close()

    def test_output_gone(self):
        if self.rank == 1:
            sys.stdout = sys.stderr = None

    def test_output_odd(self):
        if self.rank == 1:
            sys.stdout = unittest.mock.Mock(closed=False)
            sys.stdout.flush.side_effect = ValueError("no flush")

    def test_outputs_after(self):
        print("to be read", flush=True)
        print("to be read", flush=True, file=sys.stderr)

    def test_shared_memory(self):
        from multiprocessing import shared_memory

        if self.rank == 1:
            open(f"{SHARED_MEMORY}/torch_{os.getpid()}_faults", "w").close()
            shared_memory.SharedMemory(create=True, size=1).close()

    def test_settings(self):
        os.environ["LEFT"] = "1"
        torch.set_default_dtype(torch.float64)
        torch.set_num_threads(2)
        torch.use_deterministic_algorithms(True)
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)

    def test_settings_after(self):
        self.assertNotIn("LEFT", os.environ)
        self.assertEqual(torch.ones(1).dtype, torch.float32)
        self.assertEqual(torch.get_num_threads(), 1)
        self.assertFalse(torch.are_deterministic_algorithms_enabled())
        self.assertNotEqual(torch.initial_seed(), 5)
        self.assertNotEqual(random.random(), random.Random(5).random())
        self.assertNotEqual(numpy.random.rand(), numpy.random.RandomState(5).rand())


class Essentials(Case):
    """Behavior that the test cases for FSDP must also have, although they share their code with the others."""

    def test_a_passes(self):
        dist.barrier()
        print(f"pid {os.getpid()}")

    def test_i_clean_up(self):
        self.addCleanup(Fixtures.broken, "a rank's clean-up")

    test_b_passes = test_d_passes = test_g_passes = test_j_passes = test_a_passes
    test_c_raises = Words.test_one_raises
    test_e_dies = Deaths.test_sigkill
    test_f_skips = skips


# --- each of the faults in each kind of ranks -------------------------------------------------------------------------


def define(kind: str, base: type, *faults: type) -> None:
    """Define a class of each of these faults for a kind of ranks, such as ``ProcessWords``."""
    for fault in faults:
        name = f"{kind}{fault.__name__}"
        globals()[name] = type(name, (fault, base), {"__module__": __name__})


define("Process", Processes, Deaths, Late, Early, Words, Meeting, Flood, Skips, Hangs, Fixtures, ClassFixture)
define("Thread", Threads, Deaths, Late, Words, Flood, Skips, Hangs, ClassFixture, Leaks)
define("Staying", Staying, Deaths, Late, Words, Flood, Skips, Hangs, Fixtures, ClassFixture)


# --- faults in processes of one test ----------------------------------------------------------------------------------


class ProcessCodes(Processes):
    """An exit code that a test expects, and one that it tolerates."""

    def setUp(self):
        super().setUp()
        test = getattr(self, self._testMethodName).__wrapped__
        if self._testMethodName == "test_special":
            self.special_return_code_checks[test] = 7
        else:
            self.skip_return_code_checks.append(test)

    def test_special(self):
        os._exit(7)

    test_any = by_rank_1(lambda case: os._exit(7))


class ProcessLeaks(Leaks, Processes):
    destroy_pg_upon_exit = True

    def test_the_group(self):
        self.connect()

    def test_torchs_shared_memory(self):
        torch.multiprocessing.set_sharing_strategy("file_system")
        if self.rank == 1:
            tensor = torch.ones(1).share_memory_()
            for manager in system.children():  # it would remove the file
                os.kill(manager, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL if tensor.is_shared() else 0)


class ProcessGroupLeak(Processes):
    destroy_pg_upon_exit = False

    def test_the_group(self):
        self.connect()


class ProcessNone(MultiProcessTestCase):
    test_none = passes


class ProcessZero(Processes):
    world_size = 0
    test_zero = passes


class ProcessZServer(Processes):
    def test_killed(self):
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(FOREVER)


# --- faults in threads ------------------------------------------------------------------------------------------------


class ThreadEarly(Early, Threads):
    def perThreadSetUp(self):
        if self.rank == 1:
            os._exit(4)
        super().perThreadSetUp()


class ThreadUnbound(Threads):
    test_bind = passes

    def setUp(self):
        with unittest.mock.patch.dict(os.environ, FAULTS_UNBOUND="1"):
            super().setUp()


class ThreadFixtures(Fixtures, Threads):
    test_tear_down_of_a_thread = test_group_that_cannot_be_destroyed = passes
    test_tear_down_that_skips_after_a_failure = fails

    def perThreadSetUp(self):
        super().perThreadSetUp()
        if "set_up_of_a_thread" in self._testMethodName and self.rank == 1:
            self.addCleanup(self.broken, "the clean-up of a set-up")
            self.broken("perThreadSetUp")

    def perThreadTearDown(self):
        super().perThreadTearDown()
        if self._testMethodName == "test_tear_down_of_a_thread" and self.rank == 1:
            self.broken("perThreadTearDown")
        if self._testMethodName == "test_tear_down_that_skips_after_a_failure":
            self.skipTest("in perThreadTearDown")
        if self._testMethodName == "test_group_that_cannot_be_destroyed" and self.rank == 1:
            dist.distributed_c10d._world.pg_map = None

    def test_set_up_of_a_thread(self):
        dist.barrier()

    @unittest.expectedFailure
    def test_expected_failure_by_set_up_of_a_thread(self):
        pass


class ThreadFsdp(Essentials, Timed, FSDPTestMultiThread):
    pass


class ThreadNone(MultiThreadedTestCase):
    test_none = passes


class ThreadZServer(Threads):
    test_killed = ProcessZServer.test_killed


class ThreadHangsLater(Hangs, Threads):
    pass


# --- faults in processes that stay ------------------------------------------------------------------------------------


class StayingEarly(Early, Staying):
    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        if rank == 1:
            os._exit(4)
        super()._init_pg(rank, world_size, rdvz_file)


class StayingMeeting(Meeting, Staying):
    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        super()._init_pg(rank, world_size, rdvz_file)
        if rank == 1:
            time.sleep(0.3)  # it connects later than rank 0
            dist.distributed_c10d._get_default_store().set("connected", "")

    def test_begins_with_all_connected(self):
        self.assertTrue(dist.distributed_c10d._get_default_store().check(["connected"]))


class StayingLeaks(Leaks, Staying):
    test_an_orphan = None  # type: ignore[assignment]  # see StayingOrphan

    def test_groups(self):
        dist.new_group([0, 1])

    def test_groups_after(self):
        """They stay until the class ends, because torch's caches may name them."""
        self.assertEqual(len(dist.distributed_c10d._world.pg_map), 2)

    def test_own_group(self):
        dist.destroy_process_group()

    def test_own_group_after(self):
        dist.barrier()


class StayingOrphan(Staying):
    test_orphan = Leaks.test_an_orphan


class StayingFsdp(Essentials, Timed, FSDPTestContinuous):
    pass


class StayingLater(Staying):
    """A rank dies between two tests. The second test still passes."""

    def tearDown(self):
        super().tearDown()
        group = type(self)._group
        if self._testMethodName == "test_a":
            assert group is not None
            os.kill(self.victim(group), signal.SIGKILL)
            while group.ready():
                time.sleep(0.01)

    def victim(self, group: RankGroup) -> int:
        pid = group.processes[1].pid
        assert pid is not None
        return pid

    def test_a(self):
        dist.barrier()

    test_b = test_a


class StayingStuck(Staying):
    """A rank skips, and its process does not exit after that."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        limit = unittest.mock.patch.object(group, "LEAVE_LIMIT", 0.5)
        limit.start()
        cls.addClassCleanup(limit.stop)

    def test_skips(self):
        if self.rank == 1:
            atexit.register(time.sleep, FOREVER)
        skips(self)


class StayingServer(StayingLater):
    """The rank server dies between two tests."""

    def victim(self, group: RankGroup) -> int:
        assert server._server is not None
        return server._server._pid


class StayingZServer(Staying):
    test_killed = ProcessZServer.test_killed


class StayingHangsLater(Hangs, Staying):
    test_passes = passes


class EveryKind(Processes):
    """For tests that end the test process: ranks of all kinds hang while it waits for those of its own test."""

    def setUp(self):
        super().setUp()
        name = "test_hang_ignoring_sigterm"
        threads, stay = RankGroup(ThreadHangsLater, name, 2, threads=True), RankGroup(StayingHangsLater, None, 2)
        self.addCleanup(threads.close)
        self.addCleanup(stay.close)
        stay.run("test_passes", LIMIT)  # first, ranks wait for each other, which this serves
        stay.begin(name)

    def test_no_end(self):
        Hangs.test_hang_ignoring_sigterm(self)


HANGING = [name for name in vars(Hangs) if name.startswith("test_hang")]
common_distributed.TIMEOUT_OVERRIDE.update(dict.fromkeys(HANGING, LIMIT))

# The base classes must not run as tests themselves.
for base in (Processes, Threads, Staying):
    assert not unittest.defaultTestLoader.getTestCaseNames(base)

if __name__ == "__main__":
    run_tests()
