"""Tests and blocks that show known defects of torch: how the blocks of ranks are joined, and how a run reports them."""

import json
import re
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runs import INPUTS, ROOT, run_beside

from torch_fsdp_tests import settings
from torch_fsdp_tests.common_utils import TestCase, defect_blocks, run_tests
from torch_fsdp_tests.defects import registry, torch_defect
from torch_fsdp_tests.defects.in_tests import KnownDefect
from torch_fsdp_tests.verdict import DefectBlock, joined

# Defects of every version so far.
SHOWN = "fsdp2_extension_gets_one_payload"
OTHER = "fsdp2_uneven_rows_shown_wrong"
KILLS = "fsdp2_unit_without_elements_raises"  # with SIGFPE, on some devices

# A comment beside each test says how it ends.
TEST_FILE = f"""
import os
import signal

import torch.distributed as dist

from torch_fsdp_tests.common_distributed import MultiThreadedTestCase
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.defects import torch_defect


class NotShown:
    def test_not_shown(self):  # passed, if strict unexpected success
        with torch_defect("{SHOWN}"):
            self.assertEqual(1, 1)

    def test_too_few_subtests(self):  # known defect, if strict unexpected success
        for number in range(3):
            with self.subTest(number=number), torch_defect("{SHOWN}"):
                self.assertNotEqual(number, 1)

    def test_race_not_shown(self):  # passed
        with torch_defect("{SHOWN}", sometimes=True):
            self.assertEqual(1, 1)

    @torch_defect("{SHOWN}")
    def test_decorated_passes(self):  # passed, if strict unexpected success
        pass


class ShownOnOneRank:
    def test_shown_on_one_rank(self):  # known defect
        with torch_defect("{SHOWN}"):
            self.assertNotEqual(self.rank, 1)
        dist.barrier()


class Bodies(NotShown):
    def test_shown(self):  # known defect
        with torch_defect("{SHOWN}"):
            self.assertEqual(0.75, 1.5)
        self.assertEqual(1, 1)

    def test_race_shown(self):  # known defect
        with torch_defect("{SHOWN}", sometimes=True):
            self.assertEqual(0.75, 1.5)

    def test_raises_something_else(self):  # error
        with torch_defect("{SHOWN}"):
            raise ValueError("on purpose")

    def test_fails_after_the_block(self):  # failed
        with torch_defect("{SHOWN}"):
            self.assertEqual(0.75, 1.5)
        self.assertEqual("after", "the block")

    def test_shown_where_not_expected(self):  # failed
        with torch_defect("{SHOWN}", when=False):
            self.assertEqual(0.75, 1.5)

    def test_some_subtests(self):  # known defect
        for number in range(3):
            with self.subTest(number=number), torch_defect("{SHOWN}", when=number == 1):
                self.assertNotEqual(number, 1)

    @torch_defect("{OTHER}")
    def test_block_in_a_decorated_test(self):  # known defect
        with torch_defect("{SHOWN}"):
            self.assertEqual(0.75, 1.5)
        self.fail()

    @torch_defect("{SHOWN}")
    def test_decorated_is_shown(self):  # known defect
        self.assertEqual(0.75, 1.5)

    @torch_defect("{SHOWN}")
    def test_decorated_raises_something_else(self):  # error
        raise ValueError("on purpose")

    @torch_defect("{OTHER}", "{SHOWN}")
    def test_decorated_shows_one_of_two(self):  # known defect
        self.assertEqual(0.75, 1.5)


class TestPlain(Bodies, TestCase):
    pass


class OfRanks(Bodies, ShownOnOneRank):
    def test_defect_may_be_shown_by_any_rank(self):  # known defect
        for rank in range(2):
            with torch_defect("{SHOWN}"):
                self.assertNotEqual(self.rank, rank)

    def test_shown_on_another_rank(self):  # failed
        with torch_defect("{SHOWN}", when=self.rank == 0):
            self.assertNotEqual(self.rank, 1)

    def test_rank_that_does_not_show_it_may_fail_after_the_block(self):  # failed
        with torch_defect("{SHOWN}"):
            self.assertNotEqual(self.rank, 1)
        self.assertNotEqual(self.rank, 0)


class TestProcesses(OfRanks, FSDPTest):
    world_size = 2

    @torch_defect("{SHOWN}")
    def test_decorated_crashes(self):  # crashed
        os._exit(7)

    @torch_defect("{KILLS}")
    def test_decorated_dies_as_the_defect_says(self):  # known defect
        os.kill(os.getpid(), signal.SIGFPE)

    @torch_defect("{KILLS}")
    def test_decorated_dies_otherwise(self):  # crashed
        os.kill(os.getpid(), signal.SIGSEGV)


class Threads(MultiThreadedTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()


class TestThreads(OfRanks, Threads):
    pass


class Strict(NotShown):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        os.environ["{settings.STRICT_DEFECTS_VARIABLE}"] = "1"
        cls.addClassCleanup(os.environ.pop, "{settings.STRICT_DEFECTS_VARIABLE}")


class TestStrictPlain(Strict, TestCase):
    pass


class TestStrictProcesses(Strict, ShownOnOneRank, FSDPTest):
    world_size = 2


class TestStrictThreads(Strict, ShownOnOneRank, Threads):
    pass


if __name__ == "__main__":
    run_tests()
"""

OUTCOMES = {
    name: (outcome, strict or outcome)
    for name, outcome, strict in re.findall(r"def (\w+)\(self\):  # ([\w ]+)(?:, if strict (.*))?", TEST_FILE)
}
NOT_SHOWN = {name for name, (outcome, strict) in OUTCOMES.items() if strict != outcome}
COUNTS = {  # of tests in the classes
    "TestPlain": 14,
    "TestProcesses": 21,
    "TestThreads": 18,
    "TestStrictPlain": 4,
    "TestStrictProcesses": 5,
    "TestStrictThreads": 5,
}


class TestInARun(TestCase):
    """Without it, a known defect could fail the run, or hide a failure with another cause, or a fix go undetected."""

    def test_outcomes(self):
        """If a block shows its defect in one rank, the test goes on, and the rest of it must pass. In strict mode, a
        test or a block that shows its defect in no rank fails.
        """
        with tempfile.TemporaryDirectory() as folder:
            tree = Path(folder, "tests")
            tree.mkdir()
            (tree / "test_it.py").write_text(TEST_FILE)
            places = ["--test-directory", tree, "--report", Path(folder, "report"), "--save-xml", Path(folder, "xml")]
            done = run_beside(INPUTS, ROOT / "run_test.py", *places, "--keep-going")
            report = json.loads(Path(folder, "report", "report.json").read_text())
            page = Path(folder, "report", "report.html").read_text()
        tests = {test["test"]: test for file in report["files"] for test in file["tests"]}
        expected = {name: OUTCOMES[name.partition(".")[2]]["Strict" in name] for name in tests}
        self.assertEqual({name: test["outcome"] for name, test in tests.items()}, expected)
        self.assertEqual((done.returncode, Counter(name.partition(".")[0] for name in tests)), (1, COUNTS))
        shown = {defect["id"]: defect["tests"] for defect in report["known_defects"]}
        known = {f"test_it::{test}" for test, state in expected.items() if state == "known defect"}
        of_signal = "test_it::TestProcesses.test_decorated_dies_as_the_defect_says"
        self.assertEqual((sorted(shown[SHOWN]), shown[KILLS]), (sorted(known - {of_signal}), [of_signal]))
        of_both = ("test_block_in_a_decorated_test", "test_decorated_shows_one_of_two")
        self.assertEqual(shown[OTHER], [test for test in shown[SHOWN] if test.endswith(of_both)])
        self.assertIn("3 known defects of torch reproduced (python -m torch_fsdp_tests.defects)\n", done.stdout)
        self.assertIn("Known defects", page)

        (fixed,) = report["fixed_defects"]
        self.assertIn(f"fixed in this PyTorch: {SHOWN} ({registry.defect(SHOWN).title}", done.stdout)
        self.assertEqual({name.rpartition(".")[2] for name in fixed["tests"]}, NOT_SHOWN)
        self.assertEqual(sum(place.endswith(" (number=0)") for place in fixed["places"]), 3)
        self.assertNotIn(" (number=1)", "".join(fixed["places"]))
        words = rf"{SHOWN} did not show at test_it.py:\d+ \(number=0\), test_it.py:\d+ \(number=2\)"
        for kind in ("Plain", "Processes", "Threads"):
            self.assertRegex(tests[f"TestStrict{kind}.test_too_few_subtests"]["reason"], words)


class TestBlocks(TestCase):
    """Without it, a block could hide a failure on a PyTorch version that does not have the defect."""

    def test_without_the_defect_a_block_does_nothing(self):
        absent = next(id for id in registry.ids() if not KnownDefect(id).is_expected())
        with self.assertRaises(AssertionError), torch_defect(absent):
            self.fail()
        self.assertEqual(defect_blocks.current(), [])

    def test_in_a_thread_that_runs_no_test_a_block_does_nothing(self):
        def fail() -> None:
            with torch_defect(SHOWN):
                self.fail()

        with ThreadPoolExecutor() as threads, self.assertRaises(AssertionError):
            threads.submit(fail).result()

    def test_unknown_defect(self):
        with self.assertRaisesRegex(LookupError, "did you mean fsdp2_extension_gets_one_payload"):
            torch_defect("fsdp2_extension_gets_two_payloads")

    def test_joined(self):
        """Blocks of ranks that are in one place are matched by their order."""

        def block(id: str, raised: str, place: str = "here") -> DefectBlock:
            return DefectBlock({"id": id}, place, raised)

        first = [block("a", "x"), block("a", ""), block("b", "")]
        second = [block("b", ""), block("a", ""), block("a", ""), block("a", "", "there")]
        expected = [("a", "here", ""), ("a", "here", "x"), ("a", "there", ""), ("b", "here", "")]
        for ranks in ([first, second], [second, first]):
            blocks = [(each.defect["id"], each.place, each.raised) for each in joined(ranks)]
            self.assertEqual(sorted(blocks), expected)
        self.assertEqual(joined([]), [])


if __name__ == "__main__":
    run_tests()
