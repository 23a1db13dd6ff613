"""The verdict of the rank engine under every fault, seen from outside: outcome, words, time and leftovers.

``inputs/faults.py`` is run through the real command, once for each of the three kinds of ranks, side by side, since
most of the time is spent waiting for limits: 3 s for what hangs, and a minute for what must not come near it.
"""

import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest.mock
from pathlib import Path

from torch_fsdp_tests import accelerator
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests, subtest
from torch_fsdp_tests.ranks import server

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).parent / "inputs" / "faults.py"
MANY = Path(__file__).parent / "inputs" / "many.py"
SHARED_MEMORY = Path("/dev/shm")
HANG_LIMIT = 3  # seconds that a test of faults.py may take when it is one that takes all it is given
LIMIT = 60  # seconds for its other tests
AT_ONCE = 20  # seconds within which they end, also on a machine that has much else to do
COMMAND_LIMIT = 300  # seconds for a whole run

KINDS = ("Process", "Thread", "Staying")


def leftovers(folder):
    """What a run has left in its temporary folder, but for the cache that importing torch._dynamo makes there."""
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor")]


class Run:
    """One run of some faults, begun at once; :meth:`end` waits for it and reads what it printed, test by test."""

    def __init__(self, *arguments, file=FAULTS, **environment):
        # Not within this process' own, for torch makes a socket in there, whose path may have 107 characters.
        self._scratch = tempfile.TemporaryDirectory(dir="/tmp")
        self._outputs = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
        variables = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT), "TMPDIR": self._scratch.name}
        self._process = subprocess.Popen(
            [sys.executable, str(file), "-v", *arguments],
            env=os.environ | variables | {"PYTHONPATH": str(ROOT)} | environment,
            stdout=self._outputs[0],
            stderr=self._outputs[1],
        )

    def end(self):
        try:
            self.code = self._process.wait(timeout=COMMAND_LIMIT)
        finally:
            self._process.kill()
        texts = []
        for output in self._outputs:
            output.seek(0)
            texts.append(output.read().decode(errors="backslashreplace"))
            output.close()
        self.left = leftovers(self._scratch.name)
        self._scratch.cleanup()
        self.stdout, self.text = texts
        name = r"(\w+) \((?:__main__\.)?(\w+)(?:\.\w+)?\)"  # with the test's own name since Python 3.11
        lines = re.findall(rf"^{name} \.\.\. (.+)$", self.text, re.MULTILINE)
        self.outcomes = {f"{cls}.{test}": outcome for test, cls, outcome in lines}
        self.words = {}
        for section in self.text.split("=" * 70 + "\n")[1:]:
            test, cls = re.match(rf"[A-Z ]+: {name}", section).groups()
            self.words[f"{cls}.{test}"] = section
        *parts, _ = re.split(r"^seconds (\S+) (\S+)\n", self.stdout, flags=re.MULTILINE)
        self.printed = dict(zip(parts[1::3], parts[::3]))
        self.seconds = dict(zip(parts[1::3], map(float, parts[2::3])))
        self.leaks = re.findall(r"^leak: (?:__main__\.)?(.+)$", self.text, re.MULTILINE)
        return self


@functools.cache
def started():
    # A pattern of -k is compared with the whole name of a test.
    runs = {kind: Run("-k", f"*.{kind}*") for kind in KINDS[:2]}
    return runs | {"Staying": Run("-k", "*.Staying*", TORCH_FSDP_TESTS_SHOW_OUTPUT="1"), "Many": Run(file=MANY)}


@functools.cache
def faults(kind):
    """One run of all faults that ranks of a kind meet, for all tests of this file."""
    return started()[kind].end()


def for_every_kind(cases):
    """Tests of ``(kind, class, test, outcome, *words)``; a case whose words are a mapping differs by kind.

    In the words ``DEAD`` stands for whom a crash of rank 1 befalls: the threads of a process die together.
    """
    made = []
    for cls, test, outcome, *words in cases:
        for kind in KINDS:
            mine = [each.get(kind) if isinstance(each, dict) else each for each in words]
            if None not in mine:
                dead = ("rank 1 of 2", "was") if kind != "Thread" else ("ranks 0-1 of 2", "were")
                mine = [each.replace("DEAD was", " ".join(dead)).replace("DEAD", dead[0]) for each in mine]
                made.append(subtest((kind, kind + cls, f"test_{test}", outcome, mine), name=f"{kind}{cls}_{test}"))
    return parametrize("kind,cls,test,outcome,words", made)


def only(kinds, words):
    return {kind: words for kind in KINDS if kind[0] in kinds}


class TestVerdict(TestCase):
    @for_every_kind(
        [
            ("Deaths", "exit", "ERROR", "DEAD left with exit code 3 before reporting"),
            ("Deaths", "sys_exit", "ERROR", only("PS", "rank 1 of 2 left with exit code 5 before reporting")),
            ("Deaths", "sys_exit", "ERROR", only("T", "rank 1 of 2 raised:"), "SystemExit: 5"),
            ("Deaths", "sys_exit_zero", "ERROR", only("PS", "ranks 0-1 of 2 left with exit code 0 before reporting")),
            ("Deaths", "sys_exit_zero", "ERROR", only("T", "ranks 0-1 of 2 raised:"), "SystemExit: 0"),
            ("Deaths", "sigkill", "ERROR", "DEAD was killed by SIGKILL before reporting"),
            ("Deaths", "sigsegv", "ERROR", "DEAD was killed by SIGSEGV before reporting", "in test_sigsegv"),
            ("Deaths", "sigabrt", "ERROR", "DEAD was killed by SIGABRT before reporting", "in test_sigabrt"),
            ("Deaths", "before_rendezvous", "ERROR", "DEAD left with exit code 4 before reporting"),
            ("Deaths", "after_success", "ERROR",
             {"Process": "rank 1 of 2 reported that it passed and then left with exit code 3",
              "Thread": "ranks 0-1 of 2 reported that they passed and then left with exit code 3"}),
            ("Deaths", "leaving_a_shared_file", "ERROR", "DEAD was killed by SIGKILL"),
            ("Deaths", "expected_failure_by_crash", "ERROR", "left with exit code 3"),
            ("Deaths", "special_return_code", "ok", only("P", "")),
            ("Words", "one_raises", "FAIL", "rank 1 of 2 raised:", "AssertionError: the one"),
            ("Words", "all_raise_alike", "FAIL", "ranks 0-1 of 2 raised:"),
            ("Words", "all_raise_differently", "ERROR", "ValueError: rank 0 says so", "ValueError: rank 1 says so"),
            ("Words", "element", "FAIL", "rank 1 of 2 raised:", "at ['weight']: ", "difference: 0.5 at index (2,)"),
            ("Words", "no_pickle", "ERROR", "Odd"),
            ("Words", "flood", "ERROR", "bytes left out", "\\xff\\xfe"),
            ("Words", "quiet", "ok"),
            ("Words", "quiet_no_more", "FAIL", "--- output of rank 0 ---\nof this test"),
            ("Words", "shapes", "ERROR", {"Process": "collective mismatch", "Staying": "collective mismatch",
                                          "Thread": "rank 1 calls all_reduce(SUM, float32[101000])"}),
            ("Words", "subtest", "FAIL", "ranks 0-1 of 2 raised:", "in the subtest (number=1)"),
            ("Words", "no_subtest", "ERROR", "no subtest to run: number has no values"),
            ("Words", "expected_failure", "expected failure"),
            ("Words", "unexpected_success", "unexpected success"),
            ("Words", "passes", "ok", only("T", "")),
            ("Skips", "all", "skipped 'for a reason'"),
            ("Skips", "all_by_exit_code", "skipped 'CUDA is not available'"),
            ("Skips", "one", "ERROR", "a skip counts only when every rank skips; rank 1 of 2 did"),
            ("Skips", "one_while_another_fails", "FAIL", "AssertionError: the other", "rank 1 of 2 skipped"),
            ("Hangs", "hang_in_python", "ERROR", "in test_hang_in_python", "still running after 3."),
            ("Hangs", "hang_in_c", "ERROR", "in test_hang_in_c", "still running after 3."),
            ("Hangs", "hang_ignoring_sigterm", "ERROR", "ranks 0-1 of 2 were still running after 3."),
            ("Hangs", "hang_stopped", "ERROR", "DEAD was stopped (SIGSTOP or the like) after 3."),
            ("Hangs", "hang_in_a_collective_of_some", "ERROR", "in test_hang_in_a_collective_of_some"),
            ("Fixtures", "set_up", "ERROR", "ValueError: in setUp"),
            ("Fixtures", "tear_down", "ERROR", "ValueError: in tearDown"),
            ("Fixtures", "clean_up", "ERROR", "ValueError: in clean-up"),
            ("Fixtures", "clean_up_in_rank", "ERROR", "rank 1 of 2 raised:", "ValueError: in a rank's clean-up"),
            ("Fixtures", "clean_up_in_rank_after_a_failure", "FAIL", "AssertionError: the test", "cleaned up"),
            ("Fixtures", "expected_failure_by_clean_up", "ERROR", "ValueError: in a rank's clean-up"),
            ("Fixtures", "set_up_of_a_thread", "ERROR", only("T", "rank 1 of 2 raised:"),
             "ValueError: in perThreadSetUp", "ValueError: in the clean-up of a set-up"),
            ("Fixtures", "tear_down_of_a_thread", "ERROR", only("T", "ValueError: in perThreadTearDown")),
            ("Fixtures", "expected_failure_by_set_up_of_a_thread", "ERROR", only("T", "ValueError: in perThreadSetUp")),
            ("Fsdp", "a_passes", "ok"),
            ("Fsdp", "c_raises", "FAIL", "rank 1 of 2 raised:"),
            ("Fsdp", "d_passes", "ok"),
            ("Fsdp", "e_dies", "ERROR", "DEAD was killed by SIGKILL before reporting"),
            ("Fsdp", "f_skips", "skipped 'for a reason'"),
            ("Fsdp", "g_passes", "ok"),
            ("Fsdp", "hang_in_a_collective_of_some", "ERROR", "in test_hang_in_a_collective_of_some"),
            ("Fsdp", "i_clean_up", "ERROR", "ValueError: in a rank's clean-up"),
            ("Fsdp", "j_passes", "ok"),
            ("None", "none", "ERROR", only("PT", "started no rank, so nothing was tested")),
            ("Zero", "zero", "ERROR", only("P", "has a world size of 0")),
            ("ZServer", "a_killed", "ERROR", only("P", "the rank server was killed by SIGKILL")),
            ("ZServer", "killed", "ERROR", only("TS", "the rank server was killed by SIGKILL")),
            ("ZServer", "b_after", "ok", only("P", "")),
            ("Pids", "b_pid", "ok", only("S", "")),
            ("Pids", "d_pid", "ok", only("S", "")),
            ("Pids", "e_dies", "ERROR", only("S", "rank 1 of 2 left with exit code 3 before reporting")),
            ("Pids", "f_pid", "ok", only("S", "")),
            ("Late", "after_success", "ok", only("S", "")),
            ("Later", "a", "ok", only("S", "")),
            ("Later", "b", "ok", only("S", "")),
            ("Server", "a", "ok", only("S", "")),
            ("Server", "b", "ok", only("S", "")),
        ]
    )  # fmt: skip
    def test_outcome(self, kind, cls, test, outcome, words):
        name = f"{cls}.{test}"
        told = faults(kind).words.get(name, "")
        self.assertEqual(faults(kind).outcomes.get(name), outcome, told)
        for each in words:
            self.assertIn(each, told)

    @parametrize("kind", KINDS)
    def test_class_fixtures(self, kind):
        """One that raises is an error of its own; where it is the first, no test of the class runs."""
        run = faults(kind)
        self.assertEqual(run.outcomes[f"{kind}ClassFixture.setUpClass"], "ERROR")
        self.assertIn("ValueError: in setUpClass", run.words[f"{kind}ClassFixture.setUpClass"])
        self.assertNotIn(f"{kind}ClassFixture.test_never", run.outcomes)
        self.assertIn("ValueError: in class clean-up", run.words[f"{kind}Fixtures.tearDownClass"])

    @parametrize(
        "cls,words",
        [
            ("StayingLate", "test_after_success: rank 1 of 2 reported that it passed and then left with exit code 3"),
            ("StayingLater", "test_a: rank 1 of 2 reported that it passed and then was killed by SIGKILL"),
            ("StayingServer", "test_a: the rank server was killed by SIGKILL"),
        ],
        name_fn=lambda cls, words: cls,
    )
    def test_death_after_success_is_an_error_of_the_class(self, cls, words):
        self.assertEqual(faults("Staying").outcomes[f"{cls}.tearDownClass"], "ERROR")
        self.assertIn(f"after {words}", faults("Staying").words[f"{cls}.tearDownClass"])

    @parametrize("kind", KINDS)
    def test_nothing_else_went_wrong(self, kind):
        """Whatever failed is in the table above or named here."""
        run = faults(kind)
        table = {f"{case.arg_values[1]}.{case.arg_values[2]}" for case in OUTCOMES.arg_values}
        classes = {f"{kind}Fixtures.tearDownClass", f"{kind}ClassFixture.setUpClass"}
        late = {f"Staying{each}.tearDownClass" for each in ("Late", "Later", "Server")} if kind == "Staying" else set()
        leaks = {"ProcessLeaks.test_torchs_shared_memory"}
        self.assertEqual(set(run.words) - table - classes - late - leaks, set())
        for name in (f"{kind}Leaks.test_settings_after", f"{kind}Leaks.test_files"):
            self.assertEqual(run.outcomes[name], "ok")

    @parametrize("kind", KINDS)
    def test_first_cause_comes_first(self, kind):
        """What the others raise because one died or raised stands below that."""
        text = faults(kind).words[f"{kind}Words.test_one_raises"]
        self.assertRegex(text.split("-" * 70)[1].strip(), r"^torch_fsdp_tests.ranks.outcome.RanksFailed: rank 1 ")
        if kind != "Thread":
            text = faults(kind).words[f"{kind}Deaths.test_sigkill"]
            self.assertLess(text.index("was killed by SIGKILL"), text.index("rank 0 of 2 raised"))

    @parametrize("kind", KINDS)
    def test_texts_that_all_ranks_say_are_said_once(self, kind):
        self.assertEqual(faults(kind).words[f"{kind}Words.test_all_raise_alike"].count("AssertionError: alike"), 1)

    @parametrize("kind", KINDS)
    def test_frames_of_the_harness_stay_out(self, kind):
        text = faults(kind).words[f"{kind}Words.test_all_raise_alike"]
        self.assertNotIn("torch_fsdp_tests/ranks", text)
        self.assertNotIn("torch_fsdp_tests/common_distributed", text)

    @parametrize("kind", KINDS)
    def test_long_texts_are_cut_and_counted(self, kind):
        text = faults(kind).words[f"{kind}Words.test_flood"]
        self.assertLess(len(text), 5_000_000)
        self.assertRegex(text, r"\.\.\. 4900\d{4} bytes left out \.\.\.")

    @parametrize("kind", KINDS)
    def test_output_belongs_to_its_test(self, kind):
        """It is told when the test fails, and no other test's is told with it."""
        self.assertNotIn("nobody asked", faults(kind).text)
        if kind != "Staying":  # which was asked
            self.assertNotIn("nobody asked", faults(kind).stdout)

    @parametrize("kind", KINDS)
    def test_time(self, kind):
        """Only what hangs takes its limit, and a little more; a death is seen at once."""
        run = faults(kind)
        late = {
            test: seconds
            for test, seconds in run.seconds.items()
            if seconds > (HANG_LIMIT + 5 if "hang" in test else AT_ONCE) and not test.endswith((".test_b", "b_after"))
        }  # these two wait for a new server, which must import everything
        self.assertEqual(late, {})
        self.assertGreater(len(run.seconds), 40)
        limits = [words for test, words in run.words.items() if "(the limit is" in words and "hang" not in test]
        self.assertEqual(limits, [])

    @parametrize("kind", KINDS)
    def test_nothing_is_left(self, kind):
        run = faults(kind)
        self.assertEqual(run.left, [])
        self.assertEqual([path.name for path in SHARED_MEMORY.glob("faults-*")], [])
        commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        self.assertNotIn("sleep 999", commands)
        self.assertNotIn("ResourceWarning", run.text)


OUTCOMES = TestVerdict.test_outcome.parametrize_fn.__self__


class TestLeaks(TestCase):
    """What a test leaves is named at it, undone, and changes no verdict."""

    @parametrize("kind", KINDS)
    def test_named(self, kind):
        run, ranks = faults(kind), "the ranks" if kind == "Thread" else "rank 1"
        both = "the ranks" if kind == "Thread" else "ranks 0-1"
        for test, words in [
            ("a_child", rf"left the process \d+ \(sleep 999\) running in {ranks}"),
            ("a_thread", f"left the thread 'left' running in {ranks}"),
            ("files", "left in the temporary directory: left"),
            ("shared_memory", rf"left in shared memory: psm_\w+ in {ranks}"),
            ("shared_memory", r"left in shared memory: faults-\d+"),
            ("settings", f"left the environment variable LEFT set in {both}"),
            ("settings", f"left the default dtype at torch.float64 instead of torch.float32 in {both}"),
            ("settings", f"left the deterministic-algorithms flags at .* in {both}"),
        ]:
            with self.subTest(words=words):
                self.assertEqual(run.outcomes[f"{kind}Leaks.test_{test}"], "ok")
                self.assertRegex("\n".join(run.leaks), rf"(?m)^{kind}Leaks.test_{test} {words}$")

    def test_named_by_one_kind(self):
        for kind, words in [
            ("Process", r"ProcessLeaks.test_an_orphan left the process \d+ \(sleep 999\) running"),
            ("Process", r"ProcessGroupLeak.test_the_group left the process group open in ranks 0-1"),
            ("Process", r"ProcessDeaths.test_leaving_a_shared_file left in shared memory: faults-\d+"),
            ("Process", r"ProcessLeaks.test_torchs_shared_memory left in shared memory: torch_\d+_\w+"),
            ("Staying", r"StayingOrphan left the process \d+ \(sleep 999\) running"),
            ("Staying", r"StayingLeaks.test_groups left 1 process group open in ranks 0-1"),
            ("Staying", r"StayingLeaks.test_own_group destroyed the process group of the class in ranks 0-1"),
        ]:
            with self.subTest(words=words):
                self.assertRegex("\n".join(faults(kind).leaks), rf"(?m)^{words}$")

    def test_groups_that_the_harness_ends_are_no_leak(self):
        self.assertNotIn("ProcessLeaks.test_the_group", "\n".join(faults("Process").leaks))

    @parametrize("kind", KINDS)
    def test_passing_tests_leave_nothing(self, kind):
        clean = [leak for leak in faults(kind).leaks if "Leak" not in leak and "Orphan" not in leak]
        self.assertEqual([leak for leak in clean if "test_leaving_a_shared_file" not in leak], [])

    @parametrize("test", ["test_groups_after", "test_own_group_after", "test_settings_after"])
    def test_touches_no_later_test(self, test):
        self.assertEqual(faults("Staying").outcomes[f"StayingLeaks.{test}"], "ok")

    def test_strict(self):
        """TORCH_FSDP_TESTS_STRICT_LEAKS makes a leak a failure of the test that left it."""
        names = [f"{kind}Leaks.test_files" for kind in KINDS]
        run = Run(*names, TORCH_FSDP_TESTS_STRICT_LEAKS="1").end()
        self.assertEqual(run.outcomes, dict.fromkeys(names, "ERROR"), run.text)


class TestRanksThatStay(TestCase):
    def pid(self, test, rank):
        return re.search(rf"--- output of rank {rank} ---\npid (\d+)\n", faults("Staying").printed[test])[1]

    @parametrize("cls,others", [("StayingPids", "df"), ("StayingFsdp", "dgj")], name_fn=lambda cls, others: cls)
    def test_process_ids(self, cls, others):
        """Two tests have the same ranks; after a failure, a death and a skip there are new ones."""
        suffix = "pid" if cls == "StayingPids" else "passes"
        for rank in (0, 1):
            first, second, *later = (self.pid(f"{cls}.test_{letter}_{suffix}", rank) for letter in f"ab{others}")
            self.assertEqual(first, second)
            self.assertEqual(len({first, *later}), 1 + len(others))


class TestManyTests(TestCase):
    """500 tests in one file; the first of each kind are left out, since much is imported and cached by them."""

    def test_nothing_grows(self):
        run = faults("Many")
        self.assertEqual(run.code, 0, run.text[-2000:])
        self.assertIn("Ran 500 tests", run.text)
        measured = {}
        for kind, who, what, number, value in re.findall(r"^(\w+) (\w+) (\w+) (\d+) (\d+)$", run.stdout, re.M):
            measured.setdefault((kind, who, what), {})[int(number)] = int(value)
        self.assertEqual(len(measured), 3 * 2 * 4)
        for place, values in measured.items():
            numbers = sorted(values)
            early, late = values[numbers[0]], values[numbers[-1]]
            allowed = 2_000 if place[2] == "kilobytes" else 0
            self.assertLessEqual(late - early, allowed, f"{place}: {values}")


class TestEndOfTheTestProcess(TestCase):
    """However the test process ends, its ranks and its files go with it."""

    def hang(self, number, **environment):
        with tempfile.TemporaryDirectory() as scratch:
            run = subprocess.Popen(
                [sys.executable, str(FAULTS), "-v", "EveryKind"],
                env=os.environ | {"TMPDIR": scratch, "PYTHONPATH": str(ROOT)} | environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self.addCleanup(run.stderr.close)
            try:
                while sum(output.read_text().count("hanging") for output in Path(scratch).glob("*/output?")) < 6:
                    self.assertIsNone(run.poll())
                    time.sleep(0.05)
                os.kill(run.pid, number)
                text = run.stderr.read()  # ends when nobody holds the other side any more
                code = run.wait(timeout=LIMIT)
                self.wait_until(lambda: not self.relatives(scratch))
                return code, text, leftovers(scratch)
            finally:
                run.kill()
                run.wait()

    def wait_until(self, condition):
        give_up = time.monotonic() + 2
        while not condition():
            self.assertLess(time.monotonic(), give_up)
            time.sleep(0.02)

    def relatives(self, scratch):
        """Processes whose environment names the scratch directory."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if scratch.encode() in (process / "environ").read_bytes() and int(process.name) != os.getpid():
                    found.append(process.name)
            except OSError:
                continue
        return found

    def test_sigterm_shows_stacks(self):
        code, text, left = self.hang(signal.SIGTERM)
        self.assertEqual(code, -signal.SIGTERM)
        self.assertEqual(text.count("in test_hang_ignoring_sigterm"), 6, text)
        self.assertEqual(left, [])

    def test_sigterm_with_a_handler_of_the_file(self):
        """The stacks are shown, and the file's handler decides what comes then."""
        code, text, left = self.hang(signal.SIGTERM, FAULTS_OWN_HANDLER="1")
        self.assertEqual(code, 7)
        self.assertEqual(text.count("in test_hang_ignoring_sigterm"), 6, text)
        self.assertEqual(left, [])

    def test_sigint(self):
        code, text, left = self.hang(signal.SIGINT)
        self.assertEqual(code, -signal.SIGINT)
        self.assertIn("KeyboardInterrupt", text)
        self.assertEqual(left, [])

    def test_sigkill(self):
        code, _, left = self.hang(signal.SIGKILL)
        self.assertEqual(code, -signal.SIGKILL)
        self.assertEqual(left, [])


class TestConfiguration(TestCase):
    """A wish that cannot be met is one sentence, before any rank starts."""

    @parametrize(
        "variable,value,words",
        [
            ("TORCH_FSDP_TESTS_DEVICE", "abacus", "unknown device 'abacus'"),
            ("TORCH_FSDP_TESTS_BACKEND", "fake", "moves no data between processes"),
            ("TORCH_FSDP_TESTS_BACKEND", "abacus", "unknown backend 'abacus'"),
            ("TORCH_FSDP_TESTS_RANKS", "0", "give the number of ranks, 1 or more"),
            ("TORCH_FSDP_TESTS_RANKS", "many", "give the number of ranks, 1 or more"),
            ("TORCH_FSDP_TESTS_START", "sideways", "it can be fork or spawn"),
        ],
        name_fn=lambda variable, value, words: f"{variable.rsplit('_')[-1]}_{value}",
    )
    def test_refused(self, variable, value, words):
        with unittest.mock.patch.dict(os.environ, {variable: value}):
            with self.assertRaisesRegex(accelerator.ConfigurationError, words):
                accelerator.current(), server.start_method()

    def test_is_told_by_the_first_test_with_ranks(self):
        done = Run("ProcessDeaths.test_after_success", TORCH_FSDP_TESTS_DEVICE="abacus").end()
        self.assertEqual(done.outcomes["ProcessDeaths.test_after_success"], "ERROR")
        self.assertIn("unknown device 'abacus'", done.text)
        self.assertNotIn("of 2", done.text)

    def test_spawned_ranks(self):
        """Where forking is not possible every rank is a fresh interpreter, with the same verdicts."""
        names = ["ProcessWords.test_one_raises", "ProcessWords.test_quiet"]
        done = Run(*names, TORCH_FSDP_TESTS_START="spawn").end()
        self.assertEqual(done.outcomes, dict(zip(names, ("FAIL", "ok"))), done.text)


for cls in (TestVerdict, TestLeaks, TestRanksThatStay, TestConfiguration):
    instantiate_parametrized_tests(cls)

if __name__ == "__main__":
    run_tests()
