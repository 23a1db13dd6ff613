"""The order in which the tests of a change run: by the statements that they run, and by their seconds."""

import random
import unittest
from collections.abc import Collection, Mapping

from torch_fsdp_tests.extensions.reach.functions import Statement
from torch_fsdp_tests.extensions.reach.most_relevant import batches, sort
from torch_fsdp_tests.extensions.reach.reach_map import Executed, Reached, build

FUNCTION, OTHER = "torch.m.unshard", "torch.m.reset"
ALL = [Statement(function, number, 1, 1) for function in (FUNCTION, OTHER) for number in range(3)]


class TestOrder(unittest.TestCase):
    """Without it, the test that detects a change could run after hundreds of others, or be lost."""

    def order(
        self,
        tests: Mapping[str, Collection[Statement]],
        changed: Mapping[str, Collection[int]],
        mentioned: Collection[str] = (),
        **seconds: float,
    ) -> str:
        """The tests in their order. Each enters the functions of the statements that it runs, and takes a second."""
        executed = {
            ("f", f"T.{name}"): Executed([each.function for each in ran], seconds.get(name, 1.0), ran)
            for name, ran in tests.items()
        }
        known = build("any", executed, statements=ALL)
        return "".join(test.test[2:] for test in sort(known, known.tests, changed, mentioned))

    def test_those_that_run_the_changed_statement_come_first(self):
        tests = {"a": ALL[:1], "b": ALL[:2], "c": ALL[1:3]}
        for numbers, expected in (([2], "cba"), ([1], "cba"), ([0], "bac"), ([0, 1], "cab"), ([7], "cab"), ([], "cab")):
            with self.subTest(numbers=numbers):
                self.assertEqual(self.order(tests, {FUNCTION: numbers}), expected)
        self.assertEqual(self.order(tests, {FUNCTION: [0]}, b=30.0), "abc")

    def test_rare_statements_come_before_common_ones(self):
        tests = {"a": ALL[:1], "b": [ALL[0], ALL[1]], "c": ALL[:3], "d": ALL[:2]}
        self.assertEqual(self.order(tests, {FUNCTION: [0]}), "cbda")
        self.assertEqual(self.order(tests, {FUNCTION: [0]}, c=30.0), "bcda")  # but a slow test must tell more

    def test_what_is_new_comes_first(self):
        """Tests that run the same are too much alike. If nothing is new, it begins again."""
        tests = {"a": ALL[:2], "b": ALL[:2], "c": [ALL[0], ALL[2]], "d": ALL[:1]}
        self.assertEqual(self.order(tests, {FUNCTION: [0]}, c=3.0), "acbd")

    def test_statements_of_functions_that_the_changed_lines_mention(self):
        tests = {"a": [ALL[0], *ALL[3:5]], "b": [ALL[0], *ALL[3:6]], "c": [ALL[0], *ALL[3:5]]}
        self.assertEqual(self.order(tests, {FUNCTION: [0]}), "abc")
        self.assertEqual(self.order(tests, {FUNCTION: [0]}, [OTHER]), "bac")

    def test_the_shortest_come_first_among_equals(self):
        tests = dict.fromkeys("abc", ALL[:1])
        self.assertEqual(self.order(tests, {FUNCTION: [0]}, a=3.0, b=1.0, c=2.0), "bca")
        self.assertEqual(self.order(tests, {}, a=3.0, b=1.0, c=2.0), "bca")

    def test_it_has_every_test_once_and_depends_on_nothing_else(self):
        executed = {("f", f"T.{n}"): Executed([FUNCTION], 1.0 + n % 3, ALL[: n % 4]) for n in range(30)}
        known = build("any", executed, statements=ALL)
        found = sort(known, known.tests, {FUNCTION: [1]})
        self.assertEqual(sorted(found), sorted(known.tests))
        self.assertEqual(sort(known, random.Random(1).sample(known.tests, 30), {FUNCTION: [1]}), found)
        self.assertEqual(sort(known, [], {FUNCTION: [1]}), [])

    def test_a_process_has_few_tests_that_are_close(self):
        tests = [Reached("a", f"T.t{n}", 0.1, n) for n in range(9)]
        tests[1:1] = [Reached("b", "T.x", 0.1, 0)]
        names = [[f"{test.file}.{test.test[2:]}" for test in batch] for batch in batches(tests)]
        expected = [["a.t0", "a.t1", "a.t2", "a.t3"], ["b.x"], ["a.t4", "a.t5", "a.t6", "a.t7"], ["a.t8"]]
        self.assertEqual(names, expected)


if __name__ == "__main__":
    unittest.main()
