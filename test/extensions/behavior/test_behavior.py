"""What tests do is recorded, compared with an earlier record, and compared without and with a change."""

import difflib
import gzip
import json
import sys
import unittest
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "dispatch"))

from little_torch import CORE, SOURCES, modules_of, write_sources
from trees import FolderCase, TreeCase

from torch_fsdp_tests.extensions.behavior import differences, feature, kept_records
from torch_fsdp_tests.extensions.behavior.differences import Kind, Record
from torch_fsdp_tests.extensions.reach.reach_map import Executed, build
from torch_fsdp_tests.installed_torch import diffs
from torch_fsdp_tests.settings import ConfigurationError

GATHER, SCATTER = "all_gather\tfloat32\t[48]\tover 4", "reduce_scatter\tfloat32\t[12]\tover 4"


def record(tests: dict[str, list[str]], kind: Kind = Kind.COLLECTIVES, **more: Any) -> Record:
    """The record of these events of tests with one rank."""
    return Record(tests={test: {"0": {kind.value: events}} for test, events in tests.items()}, **more)


def values(norm: float, signed: float, crc: str = "0", dtype: str = "float32") -> list[str]:
    return [f"gradients\t2 {dtype}\t{crc}\t{norm}\t{signed}"]


class TestComparison(unittest.TestCase):
    """Without it, a report could lack what a change changes, or bury it among lines that say the same."""

    def lines(self, before: Record, after: Record, **more: Any) -> list[str]:
        return differences.lines(differences.differences(before, after, **more))

    def test_tests_with_the_same_difference_are_one_line(self):
        was, now = [SCATTER, SCATTER], [SCATTER, GATHER, SCATTER]
        before = record({"a": was, "b": was, "c": was}, torch="2.13")
        words = f"first (number 2): {GATHER} after {SCATTER}, was {SCATTER}"
        words = words.replace("\t[", "[").replace("\t", " ")
        expected = ["collectives: more all_gather: 2 tests"]
        expected += [f"    {test}, rank 0: 3 collectives, was 2; {words}" for test in "ab"]
        self.assertEqual(self.lines(before, record({"a": now, "b": now, "c": was})), expected)

    def test_what_has_changed(self):
        for now, what in (
            ([GATHER], "fewer reduce_scatter"),
            ([GATHER.replace("float32", "bfloat16"), SCATTER], "other dtype of all_gather"),
            ([GATHER, SCATTER.replace("12", "6")], "other size of reduce_scatter"),
            ([GATHER.replace("over 4", "over 2"), SCATTER], "other group of all_gather"),
            ([SCATTER, GATHER], "other order"),
        ):
            (found,) = differences.differences(record({"a": [GATHER, SCATTER]}), record({"a": now}))
            self.assertEqual(found.what, what)

    def test_most_important_first(self):
        sides = [{kind.value: [word * 4] for kind in reversed(Kind)} for word in ("x\t", "y\t")]
        before, after = (Record(operators=True, tests={"a": {"0": events}}) for events in sides)
        kinds = [each.kind for each in differences.differences(before, after, missing=["b"])]
        self.assertEqual(kinds, [None, *Kind])

    def test_a_missing_rank_is_a_difference(self):
        before, after = record({"a": [GATHER]}), record({"a": [GATHER]})
        after.tests["a"]["1"] = {}
        self.assertEqual(self.lines(before, after), ["missing in the earlier run: 1 test", "    a, rank 1"])
        self.assertEqual(self.lines(after, before), ["missing in this run: 1 test", "    a, rank 1"])

    def test_what_does_not_repeat_is_not_compared(self):
        unstable = {"a": [Kind.COLLECTIVES.value]}
        before = record({"a": [GATHER], "b": [GATHER]}, unstable=unstable)
        found = differences.differences(before, record({"a": [SCATTER], "b": [SCATTER]}))
        self.assertEqual([each.test for each in found], ["b"])

    def test_what_no_longer_repeats_is_a_difference(self):
        after = record({"a": [SCATTER]}, unstable={"a": [Kind.COLLECTIVES.value]})
        self.assertEqual([each.test for each in differences.differences(record({"a": [GATHER]}), after)], ["a"])

    def test_what_has_nothing_to_compare_does_not_count(self):
        before = record({"a": [GATHER], "b": [GATHER], "c": []}, unstable={"b": [Kind.COLLECTIVES.value]})
        self.assertEqual(differences.compared(before, record({"a": [], "b": [GATHER], "c": []})), ["a"])
        copies = (record({"a": ["x"]}, Kind.COPIES, device=device) for device in ("cpu", "foo"))
        self.assertEqual(differences.compared(*copies), [])

    def test_a_vendor_may_allow_errors_but_no_other_sign_or_order(self):
        """It allows them for a dtype. Infinite values may be equal."""
        inf, nan = float("inf"), float("nan")
        for was, device, now, differs in (
            (values(4.0, 1.0), "foo", values(4.0002, 1.0001, "1"), False),
            (values(4.0, 1.0), "foo", values(4.0, -1.0, "1"), True),  # another sign, or another order
            (values(4.0, 1.0), "foo", values(4.01, 1.0, "1"), True),
            (values(4.0, 1.0), "foo", values(nan, nan, "1"), True),
            (values(4.0, 1.0), "cpu", values(4.0002, 1.0001, "1"), True),
            (values(4.0, 1.0, dtype="int64"), "foo", values(4.0, 1.0, "1", "int64"), True),
            (values(inf, 1.0), "foo", values(inf, 1.0, "1"), False),
        ):
            before = record({"a": was}, Kind.VALUES, device="cpu")
            after = record({"a": now}, Kind.VALUES, device=device, limits={"float32": 1e-3})
            self.assertIs(bool(differences.differences(before, after)), differs, now)

    def test_operators_are_compared_if_both_have_them(self):
        for has in ((True, True), (True, False), (False, True)):
            before, after = (
                record({"a": [word]}, Kind.OPERATORS, operators=each) for word, each in zip("xy", has, strict=True)
            )
            self.assertEqual(bool(differences.differences(before, after)), all(has))

    def test_devices_may_copy_differently(self):
        before, after = record({"a": ["x"]}, Kind.COPIES, device="cpu"), record({"a": ["y"]}, Kind.COPIES, device="foo")
        self.assertEqual(self.lines(before, after), [])
        self.assertEqual(len(self.lines(before, record({"a": ["y"]}, Kind.COPIES, device="cpu"))), 2)


class TestFiles(FolderCase):
    """Without it, a record could lack events, or hide that they do not repeat."""

    def collect(self, *lines: dict[str, Any], passed: Sequence[str] = ("a/test_x::t",)) -> Record:
        usual = {"file": "/t/a/test_x.py", "test": "t", "rank": 0, "at": 0.0, "left_out": "", "limits": {}}
        usual |= {"words": [GATHER, SCATTER], "events": {Kind.COLLECTIVES.value: [0, 1, 0]}}
        self.write_json("1.jsonl", "\n".join(json.dumps({**usual, **line}) for line in lines))
        return kept_records.collect(self.root, Path("/t"), passed, "2.13", "cpu")

    def test_a_record_is_read_as_it_was_written(self):
        made = self.collect({}, {"rank": 1, "limits": {"float32": 0.1}})
        events = {Kind.COLLECTIVES.value: [GATHER, SCATTER, GATHER]}
        self.assertEqual(made.tests, {"a/test_x::t": {"0": events, "1": events}})
        kept_records.save(self.root / "x.gz", made)
        self.assertEqual(kept_records.load(self.root / "x.gz"), made)

    def test_only_what_passed(self):
        self.assertEqual(self.collect({}, passed=()).tests, {})

    def test_left_out(self):
        made = self.collect({}, {"rank": 1, "left_out": "it compiles"})
        self.assertEqual(made.tests, {})
        self.assertEqual(kept_records.about(made), ["left out, because it compiles: a/test_x::t"])

    def test_a_second_round_shows_what_does_not_repeat(self):
        kind = Kind.COLLECTIVES.value
        self.assertEqual(self.collect({}, {"at": 1.0}).unstable, {})
        made = self.collect({}, {"at": 1.0, "events": {kind: [0]}}, {"at": 2.0, "events": {kind: [1]}})
        self.assertEqual(made.unstable, {"a/test_x::t": [kind]})
        words = f"does not repeat, so not compared: {kind} of a/test_x::t"
        self.assertEqual(kept_records.about(made), [words])


class TestChange(FolderCase):
    """Without it, a comparison could take the change for the installed version, or apply half of it."""

    def other_side(self, installed: str, before: str, after: str) -> tuple[bool, dict[str, str]]:
        (self.root / "x.py").write_text(installed)
        text = "\n".join(difflib.unified_diff(before.split("\n"), after.split("\n"), "a/x.py", "b/x.py", lineterm=""))
        (file,) = diffs.parse(text)
        assert isinstance(file, diffs.Edited)
        return feature.other_side({"x.py": file.hunks}, self.root)

    def test_either_side_may_be_installed(self):
        before, after = "a\nb\nc\n", "a\nB\nc\n"
        self.assertEqual(self.other_side(before, before, after), (False, {"x.py": after}))
        self.assertEqual(self.other_side(after, before, after), (True, {"x.py": before}))

    def test_neither_side_is_installed(self):
        with self.assertRaisesRegex(ConfigurationError, "the hunk at line 1 of x.py fits .* neither"):
            self.other_side("z\n", "a\nb\nc\n", "a\nB\nc\n")


# Tests that record what the fake torch does: a collective of the size that it returns.
RECORDS = """
import json
from torch.distributed.fsdp._core import shard
def record(name):
    line = {"file": sys.argv[0], "test": f"TestN.{name}", "rank": 0, "at": time.time(), "left_out": "", "limits": {}}
    line |= {"words": [f"all_gather\\tfloat32\\t[{shard(1)}]\\tover 2"], "events": {"collectives": [0]}}
    with open(os.environ["TORCH_FSDP_TESTS_BEHAVIOR"] + f"/{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps(line) + chr(10))
class TestN(unittest.TestCase):
    def test_recorded(self): record("test_recorded")
    def test_silent(self): shard(1)
"""
CHANGE = ("x += LIMIT", "x = x - LIMIT")  # of another length: Python takes its cache for files of one second and length
FIRST = r"first \(number 1\): all_gather float32\[0\] over 2, was all_gather float32\[2\] over 2"
DIFFERS = f"test_n::TestN.test_recorded, rank 0: {FIRST}"


class TestCommand(TreeCase):
    """Without it, a change could be compared with itself, or the options be lost between the command line and ranks."""

    def setUp(self) -> None:
        super().setUp()
        write_sources(self.root / "site")
        self.torch: dict[str, Any] = {"env": {"PYTHONPATH": str(self.root / "site")}}
        tests = {("test_n", f"TestN.test_{name}"): Executed([f"{CORE}.shard"]) for name in ("recorded", "silent")}
        known = self.root / "map.json"
        known.write_text(build("9.8.7+x", tests, modules_of(self.root / "site/torch")).as_text())
        path = "torch/distributed/fsdp/_core.py"
        write_sources(self.root / "other", _core=CHANGE)
        was, now = ((self.root / side / path).read_text().split("\n") for side in ("site", "other"))
        text = "\n".join(difflib.unified_diff(was, now, f"a/{path}", f"b/{path}", lineterm=""))
        self.change = ["--map", known, "--reaching", self.write_json("x.diff", text), "--compare-behavior"]
        self.write({"test_n": RECORDS})
        assert path in SOURCES

    def test_a_change_is_compared_whichever_side_is_installed(self):
        says = ["behavior of 1 test compared, 1 different", DIFFERS]
        self.check({}, self.change, passed=2, says=says, **self.torch)
        self.assertIn("collectives: other size of all_gather: 1 test", self.out)
        write_sources(self.root / "site", _core=CHANGE)
        self.check({}, [*self.change, "--fail-on-difference"], passed=2, code=1, says=says, **self.torch)

    def test_nothing_to_compare(self):
        says = ["behavior of 0 tests compared, none different"]
        self.check({}, [*self.change, "-k", "silent"], passed=1, code=5, says=says, **self.torch)

    def test_a_failure_with_the_change(self):
        fails = RECORDS.replace("test_silent(self): shard(1)", "test_silent(self): self.assertEqual(shard(1), 2)")
        says = ["failed: test_n::TestN.test_silent", "--compare-behavior --reaching", DIFFERS]
        self.check({"test_n": fails}, self.change, passed=1, failed=1, says=says, **self.torch)

    def test_another_run(self):
        file = self.root / "x.gz"
        says = ["a second time: what does not repeat is not compared", f"behavior of 1 test: {file}"]
        self.check({}, ["--record-behavior", file], passed=2, says=says, **self.torch)
        against = ["--against-behavior", file, "--fail-on-difference"]
        self.check({}, against, passed=2, says=["1 test compared, none different"], **self.torch)
        self.check_errors([([*against, "--operators"], "was recorded without --operators: leave")], **self.torch)
        says = ["missing in this run: 1 test\n    test_n::TestN.test_recorded\n"]
        silent = RECORDS.replace('record("test_recorded")', "pass")
        self.check({"test_n": silent}, against, passed=2, code=1, says=says, **self.torch)
        # Nothing is compared.
        self.check({}, ["--against-behavior", file], passed=2, code=5, says=says, **self.torch)
        renamed = {"test_n": RECORDS.replace("test_recorded(", "test_other(")}
        for selection, found in (["-i", "test_n::TestN"], True), (["-k", "test_*"], True), (["-k", "silent"], False):
            self.check(renamed, [*against, *selection], passed=2 - (not found), code=1 if found else 5, **self.torch)
            self.assertEqual("missing in this run: 1 test" in self.out, found)

    def test_the_order_of_a_set_is_no_behavior(self):
        ordered = RECORDS.replace("float32", "{''.join({*'abcdefghijkl'})}")
        self.check({"test_n": ordered}, ["--record-behavior", self.root / "x.gz"], passed=2, **self.torch)
        self.assertNotIn("does not repeat, so", self.out)

    def test_a_plan_records_nothing(self):
        out = self.run_command("--record-behavior", self.root / "x.gz", "--list", **self.torch)
        self.assertEqual((self.code, out), (0, "test_n  4 ranks  estimate unknown\n"), self.err)

    def test_refusals(self):
        gone, other = self.root / "gone", self.write_json("x.json", [])
        damaged = self.root / "damaged.gz"
        damaged.write_bytes(gzip.compress(b"1" * 99)[:12] + b"x" * 20)
        misfit = self.write_json("y.diff", self.change_text().replace("x += LIMIT", "x += OTHER"))
        self.check_errors(
            [
                (["--against-behavior", gone], "cannot be read: No such file"),
                (["--against-behavior", damaged], "was not written by --record-behavior"),
                (["--against-behavior", other], "was not written by --record-behavior"),
                (["--compare-behavior"], "--compare-behavior needs a change"),
                (["--fail-on-difference", "--record-behavior", other], "--fail-on-difference can only be used with"),
                (["--operators"], "--operators can only be used with"),
                ([*self.change[:3], misfit, "--compare-behavior"], "fits the installed torch neither"),
                ([*self.change[:3], "Unit.step", "--compare-behavior"], "--compare-behavior needs diffs"),
            ],
            **self.torch,
        )

    def change_text(self) -> str:
        return Path(str(self.change[3])).read_text()


if __name__ == "__main__":
    unittest.main()
