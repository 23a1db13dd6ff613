"""What tests leak, and what remains when their process has ended.

The real command runs the leaks of ``inputs/faults.py`` in all three kinds of ranks, and the tests of
``inputs/many.py`` at the same time.
"""

import functools
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
from pathlib import Path

from runs import INPUTS, LIMIT, Process, Run, leftovers, wait_until

from torch_fsdp_tests.common_distributed import requires
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests, subtest
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.verdict import Reason

FAULTS = INPUTS / "faults.py"
SHARED_MEMORY = Path("/dev/shm")
GONE = 2  # seconds after the end of the test process in which its ranks must disappear
KINDS = ("Process", "Thread", "Staying")
LEAKING = [f"{kind}Leaks" for kind in KINDS]
SHOWN = Path("/proc/self/task").is_dir()
IN_SIGHT = requires(lambda: None if SHOWN else Reason("this system shows no processes in /proc"))
OTHERS = ["ProcessGroupLeak", "StayingOrphan"]
STRICT = [f"{kind}Leaks.test_{test}" for kind in KINDS for test in ("files", "a_thread_that_fails")]


@functools.cache
def started() -> dict[str, Run]:
    return {
        "many": Run(INPUTS / "many.py"),
        "strict": Run(FAULTS, *STRICT, TORCH_FSDP_TESTS_STRICT_LEAKS="1"),
        # Each class runs separately, because a leak that several tests have is reported once, with their number.
        **{cls: Run(FAULTS, cls) for cls in (*LEAKING, *OTHERS)},
    }


def ended(name: str) -> Run:
    return started()[name].end()


@instantiate_parametrized_tests
@IN_SIGHT
class TestLeaks(TestCase):
    """Without it, a leak could change later tests, and no report would show which test left it.

    The leaks of a test are reported with its name and cleaned up. They do not change its verdict.
    """

    @parametrize("cls", LEAKING)
    def test_named(self, cls):
        run, threads = ended(cls), cls.startswith("Thread")
        ranks, both = ("the ranks", "the ranks") if threads else ("rank 1", "ranks 0-1")
        # torch's thread count is per calling thread, so the threads of a rank in a thread end with it
        computing = [] if threads else [("settings", f"left the number of threads at 2 instead of 1 in {both}")]
        for test, words in [
            ("a_child", rf"left the process \d+ \(sleep 999\) running in {ranks}"),
            ("a_thread", f"left the thread 'left' running in {ranks}"),
            ("a_thread_that_fails", f"let the thread 'failing' end with ValueError: in a thread in {ranks}"),
            ("output_closed", rf"\(and 2 more tests\) left sys.stdout or sys.stderr closed or replaced in {ranks}"),
            ("files", "left in the temporary directory: left"),
            ("shared_memory", rf"left in shared memory: psm_\w+ in {ranks}"),
            ("shared_memory", r"left in shared memory: torch_\d+_faults"),
            ("settings", f"left the environment variable LEFT set in {both}"),
            ("settings", f"left the default dtype at torch.float64 instead of torch.float32 in {both}"),
            ("settings", f"left the deterministic-algorithms flags at .* in {both}"),
            *computing,
        ]:
            self.assertEqual(run.outcomes[f"{cls}.test_{test}"], "ok")
            self.assertRegex("\n".join(run.leaks), rf"(?m)^{cls}.test_{test} {words}$")

    @parametrize(
        "words",
        [
            *(rf"{cls}.test_an_orphan left the process \d+ \(sleep 999\) running" for cls in LEAKING[:2]),
            r"StayingOrphan left the process \d+ \(sleep 999\) running",
            r"ProcessGroupLeak.test_the_group left the process group open in ranks 0-1",
            r"ProcessLeaks.test_torchs_shared_memory left in shared memory: torch_\d+_\w+",
            "StayingLeaks.test_groups left 1 process group open in ranks 0-1",
            "StayingLeaks.test_own_group destroyed the process group of the class in ranks 0-1",
        ],
        name_fn=lambda words: "_".join(re.findall(r"\w+", words)[:2]),
    )
    def test_named_by_some_kinds(self, words):
        self.assertRegex("\n".join(ended(words.partition(".")[0].partition(" ")[0]).leaks), rf"(?m)^{words}$")

    @parametrize("cls", LEAKING)
    def test_touch_no_later_test(self, cls):
        """They pass and have no leaks themselves. A group that the harness ends is no leak."""
        of_kind = {"ProcessLeaks": ["the_group"], "StayingLeaks": ["groups_after", "own_group_after"]}
        run = ended(cls)
        for test in ("settings_after", "outputs_after", *of_kind.get(cls, ())):
            self.assertEqual(run.outcomes[f"{cls}.test_{test}"], "ok", run.words.get(f"{cls}.test_{test}"))
            self.assertNotIn(f"{cls}.test_{test}", "\n".join(run.leaks))

    @parametrize("cls", [*LEAKING, *OTHERS])
    def test_change_no_verdict(self, cls):
        """Only a test that dies fails. One that closes its output does not."""
        self.assertEqual({*ended(cls).words} - {"ProcessLeaks.test_torchs_shared_memory"}, set())

    def test_nothing_is_left(self):
        for name in started():
            self.assertEqual(ended(name).left, [])
            self.assertNotIn("ResourceWarning", ended(name).text)
        self.assertEqual([path.name for path in SHARED_MEMORY.glob("torch_*_faults")], [])
        commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        self.assertNotIn("sleep 999", commands)

    def test_strict(self):
        """TORCH_FSDP_TESTS_STRICT_LEAKS makes a leak a failure of the test that left it."""
        self.assertEqual(ended("strict").outcomes, dict.fromkeys(STRICT, "ERROR"), ended("strict").text)


@IN_SIGHT
class TestChildren(TestCase):
    """Without it, a process that a test leaves could be overlooked while the thread that started it ends."""

    def test_processes_are_seen_while_their_forking_thread_ends(self):
        """The kernel then gives the children to another thread. A single reading overlooks them in 30 of 100 cases."""
        for _ in range(100):
            self._look_at_one()

    def _look_at_one(self) -> None:
        forked: queue.SimpleQueue[subprocess.Popen] = queue.SimpleQueue()
        may_end = threading.Event()

        def fork():
            forked.put(subprocess.Popen(["sleep", "60"]))
            may_end.wait(LIMIT)

        thread = threading.Thread(target=fork)
        thread.start()
        with forked.get(timeout=LIMIT) as child:
            looks = []
            may_end.set()
            while Path("/proc/self/task", str(thread.native_id)).exists():
                looks.append(system.children())
            looks.append(system.children())
            child.kill()
        self.assertEqual([look for look in looks if child.pid not in look], [])


@IN_SIGHT
class TestManyTests(TestCase):
    """Without it, a long file could slowly use up memory, file descriptors or threads.

    The first tests of each kind do not count, because they import and cache much.
    """

    def test_nothing_grows(self):
        run = ended("many")
        self.assertEqual(run.code, 0, run.text[-2000:])
        self.assertIn("Ran 276 tests", run.text)
        measured: dict[tuple[str, ...], dict[int, int]] = {}
        for kind, who, what, number, value in re.findall(r"^(\w+) (\w+) (\w+) (\d+) (\d+)$", run.stdout, re.M):
            measured.setdefault((kind, who, what), {})[int(number)] = int(value)
        self.assertEqual(len(measured), 3 * 2 * 4)
        for place, values in measured.items():
            numbers = sorted(values)
            early, late = values[numbers[0]], values[numbers[-1]]
            allowed = 2_000 if place[2] == "kilobytes" else 0
            self.assertLessEqual(late - early, allowed, f"{place}: {values}")


@instantiate_parametrized_tests
class TestEndOfTheTestProcess(TestCase):
    """Without it, a test process that is stopped or killed could leave ranks and files on the machine."""

    def hang(self, number: int, **environment: str) -> tuple[int, str, list[str]]:
        with tempfile.TemporaryDirectory(dir="/tmp") as scratch, tempfile.TemporaryFile() as output:
            variables = {"TMPDIR": scratch, "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT)} | environment
            run = Process(FAULTS, ["-v", "EveryKind"], variables, scratch, output, output)
            try:
                self.assertTrue(wait_until(lambda: self.hanging(scratch) >= 6, LIMIT), "the ranks did not come to hang")
                os.kill(run.pid, number)
                code = run.wait()
                self.assertTrue(wait_until(lambda: not self.relatives(scratch), GONE), self.relatives(scratch))
                output.seek(0)
                return code, output.read().decode(), leftovers(scratch)
            finally:
                run.kill()

    def hanging(self, scratch: str) -> int:
        """The number of ranks that hang."""
        return sum(each.read_text().count("hanging") for each in Path(scratch).glob("*/output?"))

    def relatives(self, scratch: str) -> list[str]:
        """The test process and its descendants. Their working directory is the scratch directory."""
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(process / "cwd") == scratch:
                    pids.append(process.name)
            except OSError:
                continue
        return pids

    @parametrize(
        "number,own_handler,code,words,count",
        [
            subtest((signal.SIGTERM, "", -signal.SIGTERM, "in test_hang_ignoring_sigterm", 6), name="sigterm"),
            subtest((signal.SIGTERM, "1", 7, "in test_hang_ignoring_sigterm", 6), name="sigterm_with_a_handler"),
            subtest((signal.SIGINT, "", -signal.SIGINT, "\nKeyboardInterrupt", 1), name="sigint"),
            subtest((signal.SIGKILL, "", -signal.SIGKILL, "", None), name="sigkill"),
        ],
    )
    def test_signal_while_all_ranks_hang(self, number, own_handler, code, words, count):
        """SIGTERM shows the stacks. A handler of the file then decides how the process ends."""
        ended, text, left = self.hang(number, FAULTS_OWN_HANDLER=own_handler)
        self.assertEqual((ended, left), (code, []))
        if count is not None:
            self.assertEqual(text.count(words), count, text)

    @parametrize("moment", ["Making", "Removing"])
    def test_sigterm_at_any_moment(self, moment):
        """It may arrive right after the folder of a test's ranks was made, or right before it is removed."""
        run = Run(INPUTS / "ended.py", moment).end()
        self.assertEqual(run.code, -signal.SIGTERM)
        self.assertEqual(run.left, [])


if __name__ == "__main__":
    run_tests()
