"""The features that the tests belong to, and the table of features in ``report.json``."""

import ast
import functools
import unittest
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch.discover import discover
from torch_fsdp_tests.dispatch.features import API, FEATURES, Feature, features_of, summary, words_of

TESTS = Path(__file__).resolve().parents[1]


@functools.cache
def shipped() -> list[tuple[str, str]]:
    """The file and the name of each test, read from the syntax trees. Inherited tests are left out."""
    return [
        (file.name, f"{node.name}.{inner.name}")
        for file in discover(TESTS)
        for node in ast.parse(file.source()).body
        if isinstance(node, ast.ClassDef)
        for inner in node.body
        if isinstance(inner, ast.FunctionDef) and inner.name.startswith("test_")
    ]


class TestTable(unittest.TestCase):
    """Without it, a new test file could belong to no feature, and the report's table of features would omit it."""

    def test_every_file_is_about_a_feature(self):
        unknown = {file for file, test in shipped() if not features_of(file, test)}
        self.assertEqual(unknown, set())
        told_apart = {file for file, test in shipped() if any(f.group != API for f in features_of(file, test))}
        self.assertEqual(
            {file for file, _ in shipped()} - told_apart, set(), "these are about no more than an interface"
        )

    def test_every_pattern_and_word_is_in_use(self):
        names = [(file, words_of(file, test)) for file, test in shipped()]
        idle = []
        for feature in FEATURES:
            parts = [Feature("", "", "", files=(pattern,)) for pattern in feature.files]
            parts += [Feature("", "", "", words=(word,)) for word in feature.words]
            idle += [f"{feature.name}: {part}" for part in parts if not any(part.has(*name) for name in names)]
        self.assertEqual(idle, [])

    def test_names_are_told_apart(self):
        self.assertEqual(len({feature.name for feature in FEATURES}), len(FEATURES))


class TestSummary(unittest.TestCase):
    """Without it, a report could count a test for the wrong feature, or hide why tests of a feature were skipped."""

    def test_words_of_a_name(self):
        for test, words in {
            "TestFSDP1AndTPMixin.test_it": "_test_a_test_fsdp_1_and_tp_mixin_test_it_",
            "Test2DStates.test_bf16": "_test_a_test_2d_states_test_bf16_",
            "test_alone": "_test_a_test_alone_",
        }.items():
            with self.subTest(test):
                self.assertEqual(words_of("folder/test_a", test), words)

    def test_a_word_is_a_whole_word(self):
        tp = Feature("TP", "", "", words=("tp",))
        told = {"TestTPTraining.test_x": True, "TestX.test_tp_and_dp": True, "TestX.test_http": False}
        self.assertEqual({test: tp.has("f", words_of("f", test)) for test in told}, told)

    def test_counts_and_what_is_missing(self):
        def test(name: str, outcome: str, reason: str = "") -> dict[str, Any]:
            return {"test": f"TestX.test_{name}", "outcome": outcome, "reason": reason, "subtests_skipped": {}}

        tests = [
            test("cpu_offload", "passed") | {"subtests_skipped": {"needs streams": 2}},
            test("offload_again", "timed out", "too long"),
            test("offload_with_tp", "skipped", "needs graphs"),
            test("tp", "known defect"),
            test("tp_listed", "known failure"),
            test("tp_again", "not run"),
            test("other", "failed"),
        ]
        rows = {row["name"]: row for row in summary([{"file": "test_x", "tests": tests}])}
        counts = ("passed", "failed", "skipped", "known_defects", "known_failures", "not_run")
        self.assertEqual(
            {name: [row[count] for count in counts] for name, row in rows.items()},
            {"Offload": [1, 1, 1, 0, 0, 0], "Tensor parallelism": [0, 0, 1, 1, 1, 1]},
        )
        graphs = {"reason": "needs graphs", "tests": 1, "subtests": 0}
        streams = {"reason": "needs streams", "tests": 0, "subtests": 2}
        self.assertEqual(rows["Offload"]["missing"], [graphs, streams])
        self.assertEqual(rows["Tensor parallelism"]["missing"], [graphs])


if __name__ == "__main__":
    unittest.main()
