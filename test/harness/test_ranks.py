"""The verdict of the rank engine under every fault, seen from outside: outcome, words, time and leftovers.

``inputs/faults.py`` is run once through the real command, with a limit of 3 s a test.
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
LIMIT = 3  # seconds a faulty test may take
COMMAND_LIMIT = 300  # seconds for a whole run


def leftovers(folder):
    """What a run has left in its temporary folder, but for the cache that importing torch._dynamo makes there."""
    return [name for name in os.listdir(folder) if not name.startswith("torchinductor")]


class Done:
    """What one run of some faults printed, test by test."""

    def __init__(self, *arguments, **environment):
        with tempfile.TemporaryDirectory() as scratch:
            variables = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT), "TMPDIR": scratch, "PYTHONPATH": str(ROOT)}
            began = time.monotonic()
            run = subprocess.run(
                [sys.executable, str(FAULTS), "-v", *arguments],
                env=os.environ | variables | environment,
                capture_output=True,
                timeout=COMMAND_LIMIT,
            )
            self.seconds = time.monotonic() - began
            self.left = leftovers(scratch)
        self.stdout, self.text = run.stdout.decode(), run.stderr.decode()
        name = r"test_\w+ \((?:__main__\.)?(\w+(?:\.\w+)?)\)"  # with the test's own name before Python 3.11
        lines = re.findall(rf"^{name} \.\.\. (.+)$", self.text, re.MULTILINE)
        self.outcomes = dict(lines)
        sections = self.text.split("=" * 70 + "\n")[1:]
        self.words = {re.match(rf"[A-Z ]+: {name}", section).group(1): section for section in sections}


@functools.cache
def faults():
    """One run of all faults, for all tests of this file."""
    return Done()


def table(cases):
    return parametrize("cls,test,outcome,words", [subtest(case, name=f"{case[0]}_{case[1][5:]}") for case in cases])


class TestVerdict(TestCase):
    @table(
        [
            ("Deaths", "test_exit", "ERROR", "rank 1 of 2 left with exit code 3 before reporting"),
            ("Deaths", "test_sys_exit", "ERROR", "rank 1 of 2 left with exit code 5 before reporting"),
            ("Deaths", "test_sys_exit_zero", "ERROR", "ranks 0-1 of 2 left with exit code 0 before reporting"),
            ("Deaths", "test_sigkill", "ERROR", "rank 1 of 2 was killed by SIGKILL before reporting"),
            ("Deaths", "test_sigsegv", "ERROR", "rank 1 of 2 was killed by SIGSEGV before reporting"),
            ("Deaths", "test_sigabrt", "ERROR", "rank 1 of 2 was killed by SIGABRT before reporting"),
            ("Deaths", "test_before_rendezvous", "ERROR", "rank 1 of 2 left with exit code 4 before reporting"),
            ("Deaths", "test_after_success", "ERROR", "reported that it passed and then left with exit code 3"),
            ("Deaths", "test_expected_failure_by_crash", "ERROR", "left with exit code 3"),
            ("Deaths", "test_special_return_code", "ok", ""),
            ("Words", "test_one_raises", "FAIL", "rank 1 of 2 raised:"),
            ("Words", "test_all_raise_alike", "FAIL", "ranks 0-1 of 2 raised:"),
            ("Words", "test_all_raise_differently", "ERROR", "ValueError: rank 0 says so"),
            ("Words", "test_element", "FAIL", "index (2,)"),
            ("Words", "test_no_pickle", "ERROR", "Odd"),
            ("Words", "test_flood", "ERROR", "bytes left out"),
            ("Words", "test_quiet", "ok", ""),
            ("Words", "test_subtest", "FAIL", "in the subtest (number=1)"),
            ("Words", "test_no_subtest", "ERROR", "no subtest to run: number has no values"),
            ("Words", "test_expected_failure", "expected failure", ""),
            ("Words", "test_unexpected_success", "unexpected success", ""),
            ("Skips", "test_all", "skipped 'for a reason'", ""),
            ("Skips", "test_all_by_exit_code", "skipped 'CUDA is not available'", ""),
            ("Skips", "test_one", "ERROR", "a skip counts only when every rank skips; rank 1 of 2 did"),
            ("Skips", "test_one_while_another_fails", "FAIL", "AssertionError: the other"),
            ("Hangs", "test_in_python", "ERROR", "in test_in_python"),
            ("Hangs", "test_in_c", "ERROR", "in test_in_c"),
            ("Hangs", "test_ignoring_sigterm", "ERROR", "ranks 0-1 of 2 was still running after 3."),
            ("Hangs", "test_stopped", "ERROR", "rank 1 of 2 was stopped (SIGSTOP or the like)"),
            ("Hangs", "test_collective_of_some", "ERROR", "was still running after 3."),
            ("NoRanks", "test_none", "ERROR", "started no rank, so nothing was tested"),
            ("ZeroRanks", "test_zero", "ERROR", "has a world size of 0"),
            ("ZServer", "test_a_killed", "ERROR", "the rank server was killed by SIGKILL"),
            ("ZServer", "test_b_after", "ok", ""),
            ("Threads", "test_passes", "ok", ""),
            ("Threads", "test_one_raises", "ERROR", "rank 1 of 3 raised:"),
            ("Threads", "test_one_leaves", "ERROR", "rank 1 of 3 raised:"),
            ("Threads", "test_dies", "ERROR", "ranks 0-2 of 3 was killed by SIGKILL"),
            ("Threads", "test_all_skip", "skipped 'for a reason'", ""),
            ("Threads", "test_one_skips", "ERROR", "a skip counts only when every rank skips; rank 1 of 3 did"),
            ("Threads", "test_hangs", "ERROR", "rank 1 of 3 was still running after 3."),
            ("ThreadFixtures", "test_fixture", "ERROR", "ValueError: in the fixture"),
            ("Stays", "test_b_pid", "ok", ""),
            ("Stays", "test_c_skip", "skipped 'for a reason'", ""),
            ("Stays", "test_d_pid", "ok", ""),
            ("Stays", "test_e_dies", "ERROR", "rank 1 of 2 left with exit code 3 before reporting"),
            ("Stays", "test_f_pid", "ok", ""),
        ]
    )
    def test_outcome(self, cls, test, outcome, words):
        name = f"{cls}.{test}"
        self.assertEqual(faults().outcomes.get(name), outcome, faults().words.get(name))
        self.assertIn(words, faults().words.get(name, ""))

    def test_first_cause_comes_first(self):
        """What the others raise because one died stands below the death."""
        text = faults().words["Deaths.test_sigkill"]
        self.assertLess(text.index("was killed by SIGKILL"), text.index("rank 0 of 2 raised"))

    def test_frames_of_the_harness_stay_out(self):
        text = faults().words["Words.test_all_raise_alike"]
        self.assertNotIn("torch_fsdp_tests/ranks", text)
        self.assertNotIn("torch_fsdp_tests/common_distributed", text)

    def test_long_texts_are_cut_and_counted(self):
        text = faults().words["Words.test_flood"]
        self.assertLess(len(text), 5_000_000)
        self.assertIn("\\xff\\xfe", text)

    def test_output_of_passing_ranks_is_told_only_when_asked_for(self):
        self.assertNotIn("nobody asked", faults().stdout + faults().text)

    def test_time_and_leftovers(self):
        """Only what hangs takes its limit, at most 5 s more than that, and nothing is left behind."""
        hanging = sum("(the limit is" in words for words in faults().words.values())
        self.assertLess(faults().seconds, 60 + hanging * (LIMIT + 5))
        self.assertEqual(faults().left, [])


class TestLeaks(TestCase):
    @parametrize(
        "test,words",
        [
            ("test_grandchild", "(sleep 999) running"),
            ("test_thread", "left the thread 'left' running in rank 1"),
            ("test_file", "left in the temporary directory: left"),
        ],
        name_fn=lambda test, words: test[5:],
    )
    def test_is_named_and_changes_no_verdict(self, test, words):
        self.assertEqual(faults().outcomes[f"Leaks.{test}"], "ok")
        self.assertRegex(faults().text, f"leak: .*{test} .*{re.escape(words)}")

    @parametrize("test", ["test_group", "test_environment", "test_environment_after"])
    def test_touches_no_other_test(self, test):
        self.assertEqual(faults().outcomes[f"Leaks.{test}"], "ok")

    def test_strict(self):
        """TORCH_FSDP_TESTS_STRICT_LEAKS makes a leak a failure of the test that left it."""
        done = Done("Leaks.test_file", TORCH_FSDP_TESTS_STRICT_LEAKS="1")
        self.assertEqual(done.outcomes["Leaks.test_file"], "ERROR", done.text)

    def test_nothing_lives_on(self):
        faults()
        commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        self.assertNotIn("sleep 999", commands)


class TestRanksThatStay(TestCase):
    def test_process_ids(self):
        """Two tests have the same ranks; after a skip and after a death there are new ones."""
        stdout = Done("Stays", TORCH_FSDP_TESTS_SHOW_OUTPUT="1").stdout
        for rank in (0, 1):
            # The output file of a rank that stays grows, so the last line is the running test's.
            blocks = re.findall(rf"--- output of rank {rank} ---\n((?:pid \d+\n)+)", stdout)
            a, b, c, d, e, f = (block.split()[-1] for block in blocks)
            self.assertEqual([a, b, d], [b, c, e])
            self.assertEqual(len({a, d, f}), 3)


class TestEndOfTheTestProcess(TestCase):
    """However the test process ends, its ranks and its files go with it."""

    def hang(self, number):
        with tempfile.TemporaryDirectory() as scratch:
            run = subprocess.Popen(
                [sys.executable, str(FAULTS), "-v", "Hangs.test_ignoring_sigterm"],
                env=os.environ | {"TMPDIR": scratch, "PYTHONPATH": str(ROOT)},
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            self.addCleanup(run.stderr.close)
            while sum("hanging" in output.read_text() for output in Path(scratch).glob("*/output?")) < 2:
                self.assertIsNone(run.poll())
                time.sleep(0.05)
            os.kill(run.pid, number)
            try:
                text = run.stderr.read()  # ends when nobody holds the other side any more
                code = run.wait(timeout=LIMIT)
                self.wait_until(lambda: not self.relatives(scratch))
                return code, text, leftovers(scratch)
            finally:
                run.kill()

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
        self.assertEqual(text.count("in test_ignoring_sigterm"), 2, text)
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
        done = Done("Deaths.test_after_success", TORCH_FSDP_TESTS_DEVICE="abacus")
        self.assertEqual(done.outcomes["Deaths.test_after_success"], "ERROR")
        self.assertIn("unknown device 'abacus'", done.text)
        self.assertNotIn("of 2", done.text)

    def test_spawned_ranks(self):
        """Where forking is not possible every rank is a fresh interpreter, with the same verdicts."""
        done = Done("-k", "Words.test_one_raises", "-k", "Words.test_quiet", TORCH_FSDP_TESTS_START="spawn",
                    DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="60")  # fmt: skip
        self.assertEqual(done.outcomes, {"Words.test_one_raises": "FAIL", "Words.test_quiet": "ok"}, done.text)


instantiate_parametrized_tests(TestVerdict)
instantiate_parametrized_tests(TestLeaks)
instantiate_parametrized_tests(TestConfiguration)

if __name__ == "__main__":
    run_tests()
