"""The features that the tests belong to, and the table of features in ``report.json``."""

import unittest
from pathlib import Path
from typing import Any
from unittest import mock

from torch_fsdp_tests.dispatch import features
from torch_fsdp_tests.dispatch.discover import discover
from torch_fsdp_tests.dispatch.features import FEATURES, declared, features_of, summary
from torch_fsdp_tests.dispatch.syntax import tests_by_class

TESTS = Path(__file__).resolve().parents[1]


class TestDeclarations(unittest.TestCase):
    """Without it, a new test file could belong to no feature, or a declaration could outlive its test."""

    def test_every_file_is_about_a_feature(self):
        """A feature besides its interface: all files of FSDP1 have the feature FSDP1."""
        apis = {feature.name for feature in FEATURES if feature.group == "Interfaces"}
        about = {name.partition("::")[0] for name, its in declared().items() if {*its} - apis}
        files = discover(TESTS)
        self.assertEqual([name for name in files if about.isdisjoint((name, *map(str, Path(name).parents)))], [])

    def test_every_declaration_names_a_folder_file_or_class(self):
        gone = []
        for name in declared():
            file, _, cls = name.partition("::")
            path = TESTS / f"{file}.py"
            classes = tests_by_class(path.read_text()) or {} if cls else {cls: ()}
            if cls not in classes or not (path.exists() or (TESTS / file).is_dir()):
                gone.append(name)
        self.assertEqual(gone, [])

    def test_names_of_features(self):
        names = [feature.name for feature in FEATURES]
        self.assertEqual(len(names), len(set(names)))
        self.assertEqual({name for its in declared().values() for name in its}, set(names))
        self.assertGreater(len({feature.group for feature in FEATURES}), 5)


class TestSummary(unittest.TestCase):
    """Without it, a report could count a test for the wrong feature, or hide why tests of a feature were skipped."""

    def setUp(self) -> None:
        table = """

folder = FSDP1
folder/test_x = Memory
    TestX = Offload
    TestTP = Tensor parallelism
folder/test_y
"""
        path = mock.Mock(read_text=lambda encoding: table)
        declared.cache_clear()
        self.addCleanup(declared.cache_clear)
        patch = mock.patch.object(features, "DECLARED", path)
        patch.start()
        self.addCleanup(patch.stop)

    def test_features_of_a_test(self):
        for (file, test), expected in {
            ("folder/test_x", "TestX.test_it"): ["FSDP1", "Offload", "Memory"],
            ("folder/test_x", "TestXCUDA.test_it_cuda"): ["FSDP1", "Offload", "Memory"],
            ("folder/test_x", "TestXAndMore.test_it"): ["FSDP1", "Memory"],
            ("folder/test_x", "TestTP.test_offload"): ["FSDP1", "Memory", "Tensor parallelism"],
            ("folder/test_y", "TestTP.test_offload"): ["FSDP1"],
            ("folder/below/test_x", "TestTP.test_offload"): ["FSDP1"],
            ("test_x", "TestTP.test_offload"): [],
        }.items():
            with self.subTest(f"{file}::{test}"):
                self.assertEqual([feature.name for feature in features_of(file, test)], expected)

    def test_counts_and_what_is_missing(self):
        def test(name: str, outcome: str, reason: str = "") -> dict[str, Any]:
            kinds = {"needs graphs": "device", "needs streams": "torch"}
            skips = {"reason": reason, "subtests_skipped": {}, "skip_kinds": kinds}
            return {"test": name, "outcome": outcome, **skips}

        tests = [
            test("TestX.test_offload", "passed") | {"subtests_skipped": {"needs streams": 2}},
            test("TestX.test_offload_again", "timed out", "too long"),
            test("TestX.test_offload_with_graphs", "skipped", "needs graphs"),
            test("TestTP.test_a", "known defect"),
            test("TestTP.test_b", "known failure"),
            test("TestTP.test_c", "not run"),
            test("TestTP.test_d", "skipped", "needs graphs"),
            test("TestY.test_other", "failed"),
        ]
        rows = {row["name"]: row for row in summary([{"file": "folder/test_x", "tests": tests}])}
        counts = ("passed", "failed", "skipped", "known_defects", "known_failures", "not_run")
        expected = {name: [1, 2, 2, 1, 1, 1] for name in ("FSDP1", "Memory")}
        expected |= {"Offload": [1, 1, 1, 0, 0, 0], "Tensor parallelism": [0, 0, 1, 1, 1, 1]}
        self.assertEqual({name: [row[count] for count in counts] for name, row in rows.items()}, expected)
        graphs = {"kind": "device", "reason": "needs graphs", "tests": 1, "subtests": 0}
        streams = {"kind": "torch", "reason": "needs streams", "tests": 0, "subtests": 2}
        self.assertEqual(rows["Offload"]["missing"], [graphs, streams])
        self.assertEqual(rows["Tensor parallelism"]["missing"], [graphs])


if __name__ == "__main__":
    unittest.main()
