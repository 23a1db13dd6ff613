"""``run_test.py`` under torchrun on one machine: its output, its reports, and what it leaves on the machine."""

import functools
import re
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "harness"))

from launches import LOST, PROCESS_DIES, RANKS_FAIL, TORCHRUN, WAITS, WELL, Node, SuiteRun

from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

RANKS = 2


def standalone(ranks: int) -> Node:
    return Node([*TORCHRUN, "--standalone", "--nproc-per-node", str(ranks)])


@functools.cache
def begun() -> tuple[SuiteRun, SuiteRun]:
    """A run with each kind of fault, of which the loss of a worker comes last and ends the run. A run that waits."""
    files = ["ranks_fail", "import_fails", "import_hangs", "process_dies", "well", "worker_dies", "well"]
    return SuiteRun(files, standalone(RANKS)), SuiteRun(["waits", "well"], standalone(2))


@functools.cache
def faults() -> SuiteRun:
    interrupted()  # or the test that waits would reach its limit
    return begun()[0].end()


@functools.cache
def interrupted() -> SuiteRun:
    """The run that waits, after its launcher has got Ctrl-C."""
    run = begun()[1]
    run.wait_for("waits")
    run.signal(signal.SIGINT)
    return run.end()


# The places before the first test at which rank 0 waits, and the signals that its launcher gets then.
EARLY = {"join": signal.SIGINT, "describe": signal.SIGTERM}


@functools.cache
def interrupted_early() -> dict[str, SuiteRun]:
    """Runs whose launchers have got a signal before the first test."""
    runs = {}
    for place in EARLY:
        node = Node(standalone(2).launcher, variables={"WAITS_IN": place})
        runs[place] = SuiteRun(["well"], node, script="early.py")
    for place, run in runs.items():
        for rank in range(2):
            run.wait_for(f"rank {rank}")
        run.signal(EARLY[place])
    return {place: run.end() for place, run in runs.items()}


class TestFaults(TestCase):
    """Without it, a fault of one rank could stop the files after it, or be reported without its cause."""

    def test_all_files_run_and_every_verdict_is_reported(self):
        run = faults()
        self.assertEqual(run.outcomes("ranks_fail"), RANKS_FAIL)
        self.assertEqual(run.outcomes("well"), WELL)
        self.assertEqual(run.report["ranks"], RANKS)
        (host,) = run.report["hosts"].values()
        self.assertEqual(host["ranks"], list(range(RANKS)))

    def test_file_that_another_rank_cannot_import_ends_with_its_words(self):
        for words in (f"rank {RANKS - 1}", "exited with code 1", "not to be had here"):
            self.assertIn(words, faults().reasons("import_fails"))
        self.assertNotIn("passed", faults().outcomes("import_fails").values())

    def test_process_that_dies_is_named_with_its_signal_and_what_it_left(self):
        reasons = faults().reasons("process_dies")
        for words in ("SIGKILL", "sleep 1001"):
            self.assertIn(words, reasons)
        words = rf'"reason": "the process of rank {RANKS - 1} [^"]* is gone, so the rest of this file does not run"'
        self.assertEqual(len(re.findall(words, reasons)), 2)
        self.assertEqual(faults().outcomes("process_dies"), PROCESS_DIES)

    def test_process_that_hangs_after_that_of_rank_0_has_died_is_killed_with_its_stacks(self):
        (attempt,) = faults().of_file("import_hangs")["attempts"]
        self.assertIn("in wait_for_the_end", attempt["output"])
        words = rf"the file's process at rank {RANKS - 1} on .* did not exit within 1 s, and was killed"
        self.assertRegex(" ".join(attempt["notes"]), words)
        self.assertNotIn("passed", faults().outcomes("import_hangs").values())

    def test_loss_of_an_agent_ends_the_run_with_its_name_and_earlier_results(self):
        run = faults()
        self.assertEqual(run.outcomes("worker_dies"), LOST)
        self.assertIn(f"rank {RANKS - 1}", run.report["lost"])
        self.assertEqual(run.report["exit_code"], 3)
        self.assertEqual(len(run.report["not_started"]), 1)
        self.assertNotEqual(run.codes, [0])
        self.assertEqual(run.left, [])

    def test_one_console(self):
        self.assertEqual(faults().text.count(f"ranks {RANKS}, up to "), 1)
        self.assertRegex(faults().text, r"(?m)^\d+ passed, \d+ failed, 0 skipped$")


@instantiate_parametrized_tests
class TestSignal(TestCase):
    """Without it, Ctrl-C could lose the results."""

    def test_signal_to_the_launcher_is_reported_by_rank_0(self):
        run = interrupted()
        self.assertEqual(run.report["exit_code"], 128 + signal.SIGINT)
        self.assertEqual(run.outcomes("waits"), WAITS)
        self.assertEqual(len(run.report["not_started"]), 1)
        self.assertEqual(run.left, [])

    @parametrize("place", EARLY)
    def test_before_the_first_test_all_processes_leave_at_once(self, place):
        run = interrupted_early()[place]
        self.assertEqual(run.text.count(f"stopped by {EARLY[place].name} while no test was running"), 1, run.text)
        self.assertNotIn("SIGKILL", run.text)  # torchrun sends it to processes that have not left after 30 s
        self.assertEqual(run.left, [])


if __name__ == "__main__":
    run_tests()
