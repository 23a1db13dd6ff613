"""The suite's own command under torchrun, on one machine: its output, reports and leftovers, seen from outside."""

import functools
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from launches import RANKS_FAIL, ROOT, TORCHRUN, WELL, Node, SuiteRun

from torch_fsdp_tests.common_utils import (
    TestCase,
    find_free_port,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

RANKS = 3
STANDALONE = [*TORCHRUN, "--standalone", "--nproc-per-node", str(RANKS)]
FILE_LIMIT = 40  # seconds for the file that hangs; the files beside it take a few
_begun: list[SuiteRun] = []


def begin(files: Sequence[str], *nodes: Node, arguments: Sequence[str] = ()) -> SuiteRun:
    run = SuiteRun(files, *nodes, arguments=arguments)
    _begun.append(run)
    return run


def add_line(file: Path) -> None:
    file.write_text(f"{file.read_text()}# another line\n")


def tearDownModule():
    for run in _begun:
        run.stop()


@functools.cache
def faults() -> SuiteRun:
    return begin(["ranks_fail", "import_fails", "process_dies", "two_ranks", "well"], Node(STANDALONE)).end()


@functools.cache
def hang() -> SuiteRun:
    return begin(["import_hangs", "two_ranks"], Node(STANDALONE), arguments=["--timeout", str(FILE_LIMIT)]).end()


@functools.cache
def loss() -> SuiteRun:
    return begin(["two_ranks", "agent_dies", "well"], Node(STANDALONE)).end()


class TestFaults(TestCase):
    def test_all_files_run_and_every_verdict_is_told(self):
        run = faults()
        self.assertEqual(run.outcomes("ranks_fail"), RANKS_FAIL)
        self.assertEqual(run.outcomes("well"), WELL)
        self.assertEqual(run.outcomes("two_ranks"), {"TestFirstTwo.test_passes": "passed"})
        self.assertEqual(run.report["ranks"], RANKS)
        self.assertEqual(list(run.report["hosts"].values()), [f"ranks 0-{RANKS - 1}"])

    def test_a_file_that_another_rank_cannot_import_ends_with_its_words(self):
        told = faults().reasons("import_fails")
        for words in (f"rank {RANKS - 1}", "exit status 1", "not to be had here"):
            self.assertIn(words, told)
        self.assertNotIn("passed", faults().outcomes("import_fails").values())

    def test_a_process_that_dies_is_named_with_its_signal_and_what_it_left(self):
        told = faults().reasons("process_dies")
        for words in (f"rank {RANKS - 1}", "SIGKILL", "sleep 1001"):
            self.assertIn(words, told)
        self.assertNotIn("passed", faults().outcomes("process_dies").values())

    def test_ranks_that_no_test_wants_do_not_start_the_file(self):
        self.assertEqual(faults().marks, ["0", "1"])

    def test_every_process_leaves_with_the_same_status_and_leaves_nothing(self):
        run = faults()
        self.assertEqual(run.codes, [1])
        self.assertEqual(set(run.ranks_codes.values()), {1})
        self.assertIn(0, run.ranks_codes)
        self.assertEqual(run.left, [])

    def test_one_console(self):
        self.assertEqual(faults().text.count("ranks 3, devices not shared"), 1)
        self.assertRegex(faults().text, r"(?m)^\d+ passed, \d+ failed, 0 skipped$")


class TestHang(TestCase):
    def test_a_file_that_hangs_at_another_rank_ends_at_its_limit_with_stacks(self):
        run = hang()
        file = run.of_file("import_hangs")
        (attempt,) = file["attempts"]
        self.assertLess(attempt["ended"] - attempt["began"], FILE_LIMIT + 10)
        self.assertIn("timed out", run.outcomes("import_hangs").values())
        self.assertIn("import_hangs.py", attempt["output"])
        self.assertIn(f"rank {RANKS - 1}", " ".join(attempt["notes"]))

    def test_the_next_file_runs(self):
        self.assertEqual(hang().outcomes("two_ranks"), {"TestFirstTwo.test_passes": "passed"})
        self.assertEqual((hang().codes, hang().left), ([1], []))


class TestLoss(TestCase):
    def test_the_loss_of_an_agent_ends_the_run_with_its_name_and_what_was_finished(self):
        run = loss()
        self.assertNotEqual(run.codes, [0])
        self.assertEqual(run.outcomes("two_ranks"), {"TestFirstTwo.test_passes": "passed"})
        self.assertNotIn("passed", run.outcomes("agent_dies").values())
        self.assertIn(f"rank {RANKS - 1}", run.report["lost"])
        self.assertEqual(run.report["exit_code"], 3)
        self.assertEqual(run.left, [])


class TestSignals(TestCase):
    @parametrize("number", [signal.SIGINT, signal.SIGHUP], name_fn=lambda number: number.name)
    def test_a_signal_to_the_launcher_is_reported_by_rank_0(self, number):
        run = begin(["two_ranks", "waits", "well"], Node(STANDALONE))
        run.wait_for("waits")
        run.signal(number)
        run.end()
        self.assertEqual(run.report["exit_code"], 128 + number)
        self.assertEqual(run.outcomes("two_ranks"), {"TestFirstTwo.test_passes": "passed"})
        self.assertEqual(run.outcomes("waits"), {"TestRanks.test_1_waits": "not run"})
        self.assertEqual(len(run.report["not_started"]), 1)
        self.assertEqual(run.left, [])


class TestDifferences(TestCase):
    def other_checkout(self, change: Callable[[Path], object]) -> Path:
        folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, folder)
        shutil.copy(ROOT / "run_test.py", folder)
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / "torch_fsdp_tests", folder / "torch_fsdp_tests", ignore=ignore)
        (folder / "test").mkdir()
        change(folder)
        return folder

    @parametrize(
        "change,words",
        [
            (lambda folder: add_line(folder / "torch_fsdp_tests/processes/host.py"), "host.py differs"),
            (lambda folder: (folder / "torch_fsdp_tests/inductor_utils.py").unlink(), "inductor_utils.py is missing"),
        ],
        name_fn=lambda change, words: words.rpartition(" ")[2],
    )
    def test_another_checkout_is_refused_before_the_first_test(self, change, words):
        port = find_free_port()
        node = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", "1"]
        node += ["--rdzv-backend", "static", "--master-port", str(port)]
        first = Node([*node, "--node-rank", "0"])
        second = Node([*node, "--node-rank", "1"], checkout=self.other_checkout(change))
        run = begin(["well"], first, second).end()
        self.assertIn("the machines of the launch differ", run.text)
        self.assertIn(words, run.text)
        self.assertIn("rank 1: ", run.text)
        self.assertEqual(set(run.ranks_codes.values()), {2})
        self.assertEqual(set(run.ranks_codes), {0, 1})
        self.assertEqual(run.report, {})
        self.assertEqual(run.left, [])


class TestRefusals(TestCase):
    @parametrize(
        "arguments,words",
        [(["-j", "2"], "-j 2: under a launcher"), (["-i", "no/such/test"], "no/such/test")],
        name_fn=lambda arguments, words: arguments[0].strip("-"),
    )
    def test_all_processes_leave_with_the_same_status_and_one_sentence(self, arguments, words):
        run = begin(["well"], Node(STANDALONE), arguments=arguments).end()
        self.assertEqual(run.text.count(words), 1)
        self.assertEqual(set(run.ranks_codes.values()), {2})
        self.assertEqual(run.left, [])


instantiate_parametrized_tests(TestSignals)
instantiate_parametrized_tests(TestDifferences)
instantiate_parametrized_tests(TestRefusals)

if __name__ == "__main__":
    run_tests()
