"""The verdict of the rank engine under every fault, seen from outside: outcome, words, time and leftovers.

Each class of ``inputs/faults.py`` is run once through the real command, with a limit of 3 s a test.
"""

import functools
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests, subtest

ROOT = Path(__file__).resolve().parents[2]
FAULTS = Path(__file__).parent / "inputs" / "faults.py"
LIMIT = 3  # seconds a faulty test may take
COMMAND_LIMIT = 120  # seconds for a whole class


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
        self.text = (run.stderr + run.stdout).decode()
        self.outcomes = dict(re.findall(r"^(test_\w+) \(.*?\) \.\.\. (.+)$", self.text, re.MULTILINE))
        sections = self.text.split("=" * 70 + "\n")[1:]
        self.words = {re.match(r"[\w ]+: (\w+)", section).group(1): section for section in sections}


@functools.cache
def faults(cls, **environment):
    """One run for all tests of this file that ask about the same class of faults."""
    return Done(cls, **environment)


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
            ("Deaths", "test_after_success", "ERROR", "rank 1 of 2 reported that it passed and then left with exit code 3"),
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
            ("Server", "test_a_killed", "ERROR", "the rank server was killed by SIGKILL"),
            ("Server", "test_b_after", "ok", ""),
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
        done = faults(cls)
        self.assertEqual(done.outcomes.get(test), outcome, done.text)
        self.assertIn(words, done.words.get(test, ""))

    def test_first_cause_comes_first(self):
        """What the others raise because one died stands below the death."""
        text = faults("Deaths").words["test_sigkill"]
        self.assertLess(text.index("was killed by SIGKILL"), text.index("rank 0 of 2 raised"))

    def test_frames_of_the_harness_stay_out(self):
        text = faults("Words").words["test_all_raise_alike"]
        self.assertNotIn("torch_fsdp_tests/ranks", text)
        self.assertNotIn("torch_fsdp_tests/common_distributed", text)

    def test_long_texts_are_cut_and_counted(self):
        text = faults("Words").words["test_flood"]
        self.assertLess(len(text), 5_000_000)
        self.assertIn("\\xff\\xfe", text)

    def test_output_of_passing_ranks_is_told_only_when_asked_for(self):
        self.assertNotIn("nobody asked", faults("Words").text)
        self.assertIn("nobody asked", Done("Words.test_quiet", TORCH_FSDP_TESTS_SHOW_OUTPUT="1").text)

    @parametrize("cls", ["Deaths", "Hangs", "Threads"])
    def test_time_and_leftovers(self, cls):
        """No fault costs more than its limit and 5 s, and nothing is left behind."""
        done = faults(cls)
        hanging = {"Deaths": 0, "Hangs": 5, "Threads": 1}[cls]
        self.assertLess(done.seconds, 30 + hanging * (LIMIT + 5))
        self.assertEqual(done.left, [])


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
        done = faults("Leaks")
        self.assertEqual(done.outcomes[test], "ok")
        self.assertTrue(re.search(f"leak: .*{test} .*{re.escape(words)}", done.text), done.text)

    @parametrize("test", ["test_group", "test_environment", "test_environment_after"])
    def test_touches_no_other_test(self, test):
        self.assertEqual(faults("Leaks").outcomes[test], "ok")

    def test_strict(self):
        """TORCH_FSDP_TESTS_STRICT_LEAKS makes a leak a failure of the test that left it."""
        done = Done("Leaks.test_file", TORCH_FSDP_TESTS_STRICT_LEAKS="1")
        self.assertEqual(done.outcomes["test_file"], "ERROR", done.text)

    def test_nothing_lives_on(self):
        faults("Leaks")
        commands = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
        self.assertNotIn("sleep 999", commands)


class TestRanksThatStay(TestCase):
    def test_process_ids(self):
        """Two tests have the same ranks; after a skip and after a death there are new ones."""
        text = Done("Stays", TORCH_FSDP_TESTS_SHOW_OUTPUT="1").text
        outputs = {
            test: sorted(re.findall(r"^pid (\d+)$", part, re.MULTILINE))
            for test, part in re.findall(r"^(test_\w_pid)\b.*?\.\.\. (.*?)^ok$", text, re.MULTILINE | re.DOTALL)
        }
        self.assertEqual(set(outputs), {"test_a_pid", "test_b_pid", "test_d_pid", "test_f_pid"}, text)
        # The output of ranks that stay is told as a whole, so a later test repeats what an earlier one printed.
        first, second, third, fourth = (set(outputs[f"test_{letter}_pid"]) for letter in "abdf")
        self.assertEqual(first, second)
        self.assertEqual([len(first), len(third), len(fourth)], [2, 2, 2])
        self.assertFalse(first & third or third & fourth or first & fourth)


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
            while not list(Path(scratch).glob("*/output1")):  # the second rank is there
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
        done = Done("Deaths.test_after_success", **{variable: value})
        self.assertEqual(done.outcomes["test_after_success"], "ERROR")
        self.assertIn(words, done.text)
        self.assertNotIn("of 2", done.text)

    def test_spawned_ranks(self):
        """Where forking is not possible every rank is a fresh interpreter, with the same verdicts."""
        done = Done("-k", "Words.test_one_raises", "-k", "Words.test_quiet", TORCH_FSDP_TESTS_START="spawn",
                    DISTRIBUTED_TESTS_DEFAULT_TIMEOUT="60")  # fmt: skip
        self.assertEqual(done.outcomes, {"test_one_raises": "FAIL", "test_quiet": "ok"}, done.text)


instantiate_parametrized_tests(TestVerdict)
instantiate_parametrized_tests(TestLeaks)
instantiate_parametrized_tests(TestConfiguration)

if __name__ == "__main__":
    run_tests()
