"""The numbers of training loops are recorded, compared with those of another run, and compared between rounds."""

import json
import unittest
from typing import Any

from trees import FolderCase, TreeCase, body

from torch_fsdp_tests.dispatch import numbers

STEP = {"loss": [1, "float32", 1.0], "parameter 0 of group 0": [2, "float32", 4.0]}
# A test that records one step with this checksum of its loss, in the format of a rank.
RECORDS = """
import json
class TestN(unittest.TestCase):
    def test_n(self):
        folder = os.environ["TORCH_FSDP_TESTS_NUMBERS"]
        with open(f"{{folder}}/{{os.getpid()}}.jsonl", "a") as file:
            step = {{"loss": [{loss}, "float32", 1.0]}}
            line = {{"test": "test_n::TestN.test_n", "rank": 0, "at": time.time(), "steps": [step], "limits": {{}}}}
            file.write(json.dumps(line) + chr(10))
"""


class TestComparison(FolderCase):
    """Without it, different numbers could count as equal, or the difference be hard to find."""

    def conclude(self, *lines: dict[str, Any], against: Any = None) -> tuple[list[str], bool]:
        """The conclusion from these lines of ranks, and whether all numbers are equal."""
        defaults = {"test": "t", "rank": 0, "at": 0.0, "steps": [STEP], "limits": {}}
        self.write_json("1.jsonl", "\n".join(json.dumps({**defaults, **line}) for line in lines))
        return numbers.conclude(self.root, None, against)

    def test_first_difference(self):
        other = {**STEP, "parameter 0 of group 0": [3, "float32", 4.5]}
        against = {"t": {"0": [STEP, STEP], "1": [STEP, STEP]}, "u": {"0": [STEP]}}
        lines: list[dict[str, Any]] = [{"steps": [STEP, STEP]}, {"steps": [STEP, other], "rank": 1}]
        differs = "t, rank 1, step 2: parameter 0 of group 0 differs (norm 4.0, now 4.5)"
        expected = ["numbers of 1 test compared, 1 different", differs], False
        self.assertEqual(self.conclude(*lines, against=against), expected)
        self.assertTrue(self.conclude(lines[0], against=against)[1])

    def test_what_is_missing_is_a_difference(self):
        for before, after, says in (
            ([STEP], [{"loss": STEP["loss"]}], "parameter 0 of group 0 is missing in this run"),
            ([{}], [STEP], "loss is missing in the earlier"),
            ([STEP, STEP], [STEP], "t, rank 0: 2 steps before, 1 now"),
        ):
            words, equal = self.conclude({"steps": after}, against={"t": {"0": before}})
            self.assertFalse(equal)
            self.assertIn(says, words[-1])

    def test_a_vendor_may_allow_differences(self):
        other = [{**STEP, "loss": [9, "float32", 1.01]}]
        for limits, equal in (({}, False), ({"float32": 0.02}, True), ({"float32": 0.001}, False)):
            self.assertIs(self.conclude({"steps": other, "limits": limits}, against={"t": {"0": [STEP]}})[1], equal)

    def test_repetitions(self):
        words = "the numbers repeat bit by bit: 2 repetitions of a test in a rank"
        self.assertEqual(self.conclude({}, {"at": 1.0}, {"at": 2.0}), ([words], True))
        actual = self.conclude({}, {"at": 1.0, "steps": [{**STEP, "loss": [9, "float32", 1.0]}]})
        self.assertEqual(actual, (["t, rank 0, step 1: loss differs (norm 1.0, now 1.0)"], False))


class TestCommand(TreeCase):
    """Without it, the options could be lost between the command line and the ranks."""

    def test_options(self):
        file = self.root / "numbers.json"
        self.check({"test_n": RECORDS.format(loss=7)}, ["--record-numbers", file], passed=1, says=["numbers of 1 test"])
        self.assertEqual(numbers.load(file), {"test_n::TestN.test_n": {"0": [{"loss": [7, "float32", 1.0]}]}})
        self.check({}, ["--against-numbers", file], passed=1, says=["1 test compared, none different"])
        self.check({}, ["--record-numbers", file, "--repeat", "2"], passed=1, says=["bit by bit: 1 repetition"])
        says = ["1 test compared, 1 different", "test_n::TestN.test_n, rank 0, step 1: loss differs"]
        self.check({"test_n": RECORDS.format(loss=8)}, ["--against-numbers", file], passed=1, code=1, says=says)

    def test_wrong_files(self):
        self.write({"test_p": body("pass")})
        cases = [(self.root / "gone", "cannot be read: No such file")]
        cases += [(self.write_json("x.json", []), "was not written by --record-numbers")]
        self.check_errors([(["--against-numbers", path], says) for path, says in cases])


if __name__ == "__main__":
    unittest.main()
