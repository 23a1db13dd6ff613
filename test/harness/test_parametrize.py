"""Parametrization: the tests that a class gets, with their names and arguments, and the combinations of subtests."""

from __future__ import annotations

import enum
import unittest
from collections.abc import Callable, Sequence
from unittest import mock

import torch
from samples import class_with, run, tests_of

from torch_fsdp_tests import common_utils
from torch_fsdp_tests.common_distributed import MultiProcessTestCase, run_subtests
from torch_fsdp_tests.common_distributed.case import run_in_rank
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests, subtest
from torch_fsdp_tests.verdict import RankResult, State


class Color(enum.Enum):
    RED = 1


class NamesTest(TestCase):
    """Without it, a parametrized test could lose a variant, get another one's values, or have an unstable name."""

    def test_names_of_values(self):
        for value, suffix in [
            (1, "a_1"),
            (-1, "a_-1"),
            (True, "a_True"),
            (0.25, "a_0_25"),
            ("x.y", "a_x_y"),
            (torch.bfloat16, "bfloat16"),
            (torch.device("meta"), "meta"),
            (None, "a0"),
            (Color.RED, "a0"),
            (torch.nn.Linear, "a0"),
            (len, "a0"),
            ([1, 2], "a0"),
        ]:
            with self.subTest(value=value):
                made, calls = class_with(parametrize("a", [value]))
                instantiate_parametrized_tests(made)
                self.assertEqual(tests_of(made), [f"test_x_{suffix}"])
                run(made)
                self.assertIs(calls[0]["a"], value)

    def test_stacked_decorators_name_from_top_to_bottom(self):
        made, calls = class_with(parametrize("a", [1, 2]), parametrize("b, c", [(True, None), (False, "z")]))
        instantiate_parametrized_tests(made)
        self.assertEqual(tests_of(made), [f"test_x_a_{a}_b_{b}" for a in (1, 2) for b in ("False_c_z", "True_c0")])
        self.assertTrue(run(made).wasSuccessful())
        expected = [{"a": a, **rest} for a in (1, 2) for rest in ({"b": False, "c": "z"}, {"b": True, "c": None})]
        self.assertEqual(calls, expected)

    def test_subtest_names_and_decorators_touch_one_variant(self):
        skipped = subtest(2, name="two", decorators=[unittest.skip("why")])
        unmet = subtest(3, decorators=[unittest.expectedFailure])
        made, calls = class_with(parametrize("a", [unmet, skipped, 1]))
        instantiate_parametrized_tests(made)
        self.assertEqual(tests_of(made), ["test_x_a_1", "test_x_a_3", "test_x_two"])
        result = run(made)
        self.assertEqual([reason for _, reason in result.skipped], ["why"])
        self.assertEqual(len(result.unexpectedSuccesses), 1)
        self.assertEqual(calls, [{"a": 1}, {"a": 3}])

    def test_names_from_a_function_and_decorators_by_value(self):
        made, calls = class_with(
            common_utils.decorateIf(unittest.skip("five"), lambda arguments: arguments["a"] == 5),
            parametrize("a", [1, 3, 5]),
            parametrize("b", [1], name_fn=lambda b: f"is{b}"),
        )
        instantiate_parametrized_tests(made)
        self.assertEqual(tests_of(made), [f"test_x_a_{a}_is1" for a in (1, 3, 5)])
        self.assertEqual(len(run(made).skipped), 1)
        self.assertEqual([call["a"] for call in calls], [1, 3])

    def test_mistakes(self):
        for decorators, error in [
            ([parametrize("a", [])], ValueError),
            ([parametrize("a,b", [(1, 2, 3)])], RuntimeError),
            ([parametrize("a", [1]), parametrize("a", [2])], RuntimeError),
            ([parametrize("a", ["x.y", "x_y"])], AssertionError),
        ]:
            with self.subTest(error=error), self.assertRaises(error):
                instantiate_parametrized_tests(class_with(*decorators)[0])

    def test_inherited_methods(self):
        generic, calls = class_with(parametrize("a", [1]))
        made = instantiate_parametrized_tests(type("Child", (generic,), {}))
        self.assertEqual(tests_of(made), ["test_x_a_1"])
        again = instantiate_parametrized_tests(type("Grandchild", (made,), {}))
        self.assertEqual(tests_of(again), ["test_x_a_1"])
        self.assertTrue(run(again).wasSuccessful())
        self.assertEqual(calls, [{"a": 1}])


class SubtestsTest(TestCase):
    """Without it, ``run_subtests`` in a rank could leave out a combination of values without an error."""

    VALUES: dict[str, Sequence[int]] = {"a": [1, 2], "b": [3, 4, 5]}

    def in_rank(self, body: Callable[..., object], values: dict[str, Sequence[int]] = VALUES) -> RankResult:
        class Case(MultiProcessTestCase):
            def test_it(self):
                pass

        case = Case("test_it")
        case.rank = 0
        return run_in_rank(0, lambda: run_subtests(case, values, body, "first", d=6))

    def test_every_combination_once_in_order(self):
        calls = []
        outcome = self.in_rank(lambda *given, **chosen: calls.append((given, chosen)))
        self.assertEqual(calls, [(("first",), {"d": 6, "a": a, "b": b}) for a in (1, 2) for b in (3, 4, 5)])
        self.assertEqual((outcome.state, outcome.ran_subtests), (State.PASSED, 6))

    def test_first_failure_ends_the_test_and_is_named(self):
        body = mock.Mock(side_effect=[None, AssertionError("no")])
        outcome = self.in_rank(body)
        self.assertEqual((outcome.state, outcome.ran_subtests, body.call_count), (State.FAILED, 1, 2))
        self.assertTrue(outcome.text.startswith("in the subtest (a=1, b=4)\n"), outcome.text)

    def test_skips_end_only_their_subtest_and_are_counted(self):
        skip = unittest.SkipTest("why")
        some = self.in_rank(mock.Mock(side_effect=[None, skip, None, None, skip, None]))
        self.assertEqual((some.state, some.ran_subtests, some.skipped_subtests), (State.PASSED, 4, ["why", "why"]))
        self.assertIs(self.in_rank(mock.Mock(side_effect=skip)).state, State.SKIPPED)

    def test_parameter_without_values_is_an_error(self):
        outcome = self.in_rank(mock.Mock(), self.VALUES | {"c": []})
        self.assertIs(outcome.state, State.ERROR)
        self.assertIn("no subtest to run: c has no values", outcome.text)


if __name__ == "__main__":
    run_tests()
