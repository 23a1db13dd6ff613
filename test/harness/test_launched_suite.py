"""The suite's own command under torchrun, on one machine: its output, reports and leftovers, seen from outside."""

import functools
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from launches import LOST, RANKS_FAIL, ROOT, TORCHRUN, TWO_RANKS, WAITS, WELL, Node, SuiteRun

from torch_fsdp_tests.common_utils import TestCase, find_free_port, run_tests

RANKS = 3
STANDALONE = [*TORCHRUN, "--standalone", "--nproc-per-node", str(RANKS)]
FILE_LIMIT = 40  # seconds for the file that hangs; the files beside it take a few
_begun: list[SuiteRun] = []


def begin(files: Sequence[str], *nodes: Node, arguments: Sequence[str] = ()) -> SuiteRun:
    run = SuiteRun(files, *nodes, arguments=arguments)
    _begun.append(run)
    return run


def tearDownModule():
    for run in _begun:
        run.stop()


@functools.cache
def faults() -> SuiteRun:
    """Each fault of a file, and last the loss of an agent, which ends the run."""
    files = ["ranks_fail", "import_fails", "process_dies", "two_ranks", "well", "agent_dies", "well"]
    return begin(files, Node(STANDALONE)).end()


@functools.cache
def interrupted() -> SuiteRun:
    """A file that hangs until its limit, and one in which the launcher gets Ctrl-C."""
    files = ["import_hangs", "waits", "well"]
    run = begin(files, Node(STANDALONE), arguments=["--timeout", str(FILE_LIMIT)])
    run.wait_for("waits")
    run.signal(signal.SIGINT)
    return run.end()


class TestFaults(TestCase):
    """Without it, a fault of one rank could stop the files after it, or be told without its cause."""

    def test_all_files_run_and_every_verdict_is_reported(self):
        run = faults()
        self.assertEqual(run.outcomes("ranks_fail"), RANKS_FAIL)
        self.assertEqual(run.outcomes("well"), WELL)
        self.assertEqual(run.outcomes("two_ranks"), TWO_RANKS)
        self.assertEqual(run.report["ranks"], RANKS)
        self.assertEqual(list(run.report["hosts"].values()), [f"ranks 0-{RANKS - 1}"])

    def test_file_that_another_rank_cannot_import_ends_with_its_words(self):
        for words in (f"rank {RANKS - 1}", "exit status 1", "not to be had here"):
            self.assertIn(words, faults().reasons("import_fails"))
        self.assertNotIn("passed", faults().outcomes("import_fails").values())

    def test_process_that_dies_is_named_with_its_signal_and_what_it_left(self):
        for words in (f"rank {RANKS - 1}", "SIGKILL", "sleep 1001"):
            self.assertIn(words, faults().reasons("process_dies"))
        self.assertNotIn("passed", faults().outcomes("process_dies").values())

    def test_ranks_that_no_test_wants_do_not_start_the_file(self):
        self.assertEqual(faults().marks, ["0", "1", "fault"])

    def test_loss_of_an_agent_ends_the_run_with_its_name_and_earlier_results(self):
        run = faults()
        self.assertEqual(run.outcomes("agent_dies"), LOST)
        self.assertIn(f"rank {RANKS - 1}", run.report["lost"])
        self.assertEqual(run.report["exit_code"], 3)
        self.assertEqual(len(run.report["not_started"]), 1)
        self.assertNotEqual(run.codes, [0])
        self.assertEqual(run.left, [])

    def test_one_console(self):
        self.assertEqual(faults().text.count("ranks 3, devices not shared"), 1)
        self.assertRegex(faults().text, r"(?m)^\d+ passed, \d+ failed, 0 skipped$")


class TestLimitAndSignal(TestCase):
    """Without it, a file could hang at a rank that nobody watches, or Ctrl-C could lose the results."""

    def test_file_that_hangs_at_another_rank_ends_at_its_limit_with_stacks(self):
        (attempt,) = interrupted().of_file("import_hangs")["attempts"]
        self.assertLess(attempt["ended"] - attempt["began"], FILE_LIMIT + 10)
        self.assertIn("timed out", interrupted().outcomes("import_hangs").values())
        self.assertIn("import_hangs.py", attempt["output"])
        self.assertIn(f"rank {RANKS - 1}", " ".join(attempt["notes"]))

    def test_signal_to_the_launcher_is_reported_by_rank_0(self):
        run = interrupted()
        self.assertEqual(run.report["exit_code"], 128 + signal.SIGINT)
        self.assertEqual(run.outcomes("waits"), WAITS)
        self.assertEqual(len(run.report["not_started"]), 1)
        self.assertEqual(run.left, [])


class TestRefusals(TestCase):
    """Without it, the machines of a launch could run different code, or wait for a rank that has refused to run."""

    def other_checkout(self) -> Path:
        """A copy of this one, in which one file differs and one is missing."""
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        shutil.copy(ROOT / "run_test.py", folder)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "torch_fsdp_tests", folder / "torch_fsdp_tests", ignore=ignore)
        (folder / "test").mkdir()
        with open(folder / "torch_fsdp_tests/processes/host.py", "a") as file:
            file.write("# another line\n")
        (folder / "torch_fsdp_tests/inductor_utils.py").unlink()
        return folder

    def test_another_checkout_is_refused_before_the_first_test(self):
        port = find_free_port()
        node = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1"]
        node += ["--rdzv-backend", "static", "--master-port", str(port)]
        first = Node([*node, "--node-rank", "0"])
        second = Node([*node, "--node-rank", "1"], checkout=self.other_checkout())
        run = begin(["well"], first, second).end()
        for words in (
            "the machines of the launch differ",
            "host.py differs",
            "inductor_utils.py is missing",
            "rank 1: ",
        ):
            self.assertIn(words, run.text)
        self.assertEqual(run.ranks_codes, {0: 2, 1: 2})
        self.assertEqual((run.report, run.left), ({}, []))


if __name__ == "__main__":
    run_tests()
