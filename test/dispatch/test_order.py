"""The order in which the tests of a change run: by their words, their kind, and their seconds."""

import json
import random
import tempfile
import unittest
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch_fsdp_tests.dispatch.reaching import KILLS, SHIPPED, shipped
from torch_fsdp_tests.reach import Executed, ReachMap, build
from torch_fsdp_tests.reach.functions import Statement
from torch_fsdp_tests.reach.order import Edit, Order, kills_in

FUNCTION = "torch.m.unshard_flat_param"


def test_file(**bodies: str) -> str:
    """A file of tests. A body whose name does not begin with ``test`` is a helper."""
    methods = (f"    def {name}(self):\n        {body}\n" for name, body in bodies.items())
    return "class T(TestCase):\n" + "\n".join(methods)


def make_map(tests: Mapping[str, Executed], statements: Iterable[Statement] = ()) -> ReachMap:
    """A map of the tests of one file."""
    return build("any", {("f", name): executed for name, executed in tests.items()}, statements=statements)


class OrderCase(unittest.TestCase):
    def names(
        self,
        source: str,
        *edits: Edit,
        tests: Iterable[str],
        seconds: Mapping[str, float] | None = None,
        also: Mapping[str, Iterable[str]] | None = None,
        kills: Iterable[str] = (),
    ) -> list[str]:
        """The names of the tests in their order. All enter the function, and the functions in ``also``."""
        also, seconds = also or {}, seconds or {}
        entered = {test: Executed([FUNCTION, *also.get(test, ())], seconds.get(test, 1.0)) for test in tests}
        known = make_map({f"T.{test}": executed for test, executed in entered.items()})
        order = Order(known, {"f": source}, {FUNCTION: [("f", f"T.{test}") for test in kills]})
        return [test.test.removeprefix("T.") for test in order.sort(known.tests, edits)]


class TestWords(OrderCase):
    """Without it, a test that is about the changed code could run after many others that only pass through it."""

    def test_of_a_name_before_those_of_a_body_before_none(self):
        source = test_file(test_a="pass", test_b="self.reshard(x)", test_c_reshard="pass")
        tests = ["test_a", "test_b", "test_c_reshard"]
        self.assertEqual(self.names(source, Edit(FUNCTION, "if reshard: return"), tests=tests), tests[::-1])

    def test_which_words_tell_most(self):
        helpers = {"test_a": "self._other()", "test_b": "self._check()", "_check": "x.prefetch = 1", "_other": "pass"}
        rare = dict.fromkeys(("test_a", "test_c", "test_d"), "use(common)") | {"test_b": "use(rare_one)"}
        around = Edit(FUNCTION, "changed", around="def f():\n  around = changed")
        for why, bodies, edit in (
            ("rare ones", rare, Edit(FUNCTION, "rare_one(common)")),
            ("those of helpers count for their callers", helpers, Edit(FUNCTION, "prefetch")),
            ("changed lines", {"test_a": "use(around)", "test_b": "use(changed)"}, around),
            ("the name of the function", {"test_a": "x.gather()", "test_b": "x.unshard()"}, Edit(FUNCTION)),
        ):
            with self.subTest(why):
                tests = [name for name in bodies if name.startswith("test")]
                self.assertEqual(self.names(test_file(**bodies), edit, tests=tests)[0], "test_b")
        source = test_file(test_a="use(offload)", test_a_long="pass")  # generated tests have the words of the method
        tests = ["test_a_long_x_1", "test_a_x_1"]
        self.assertEqual(self.names(source, Edit(FUNCTION, "offload"), tests=tests)[0], "test_a_x_1")

    def test_those_of_all_tests_tell_nothing(self):
        tests = dict.fromkeys(["test_a", "test_b"], Executed([FUNCTION], 1.0))
        source = test_file(test_a="use(common, rare_one)", test_b="use(common)")
        known = make_map({f"T.{name}": each for name, each in tests.items()})
        order = Order(known, {"f": source})
        scores = [order.scores(known.tests, [Edit(FUNCTION, text)]) for text in ("rare_one(common)", "rare_one")]
        self.assertEqual(*scores)


class TestKinds(OrderCase):
    """Without it, slow tests or many variants of one test could delay the first failure after a change."""

    def test_tests_of_errors_come_first_if_an_error_changes(self):
        raises = 'self.assertRaisesRegex(ValueError, "expects a mesh")'
        source = test_file(test_a='run("expects a mesh")', test_b=raises)
        changed = Edit(FUNCTION, "if mesh is None:", messages="expects a mesh of one dimension")
        self.assertEqual(self.names(source, changed, tests=["test_a", "test_b"])[0], "test_b")
        self.assertEqual(self.names(source, Edit(FUNCTION, "if x:"), tests=["test_a", "test_b"])[0], "test_a")

    def test_what_killed_an_earlier_mutant_comes_first(self):
        source = test_file(test_a="pass", test_b="pass")
        for killer in ("test_a", "test_b"):
            actual = self.names(source, Edit(FUNCTION), tests=["test_a", "test_b"], kills=[killer])
            self.assertEqual(actual[0], killer)

    def test_the_specific_come_first_and_then_the_fast(self):
        tests = ["test_a", "test_b", "test_c"]
        also = {"test_a": [f"torch.m.g{n}" for n in range(9)]}
        source = test_file(**dict.fromkeys(tests, "pass"))
        actual = self.names(source, Edit(FUNCTION), tests=tests, also=also, seconds={"test_b": 1.1})
        self.assertEqual(actual, ["test_c", "test_b", "test_a"])

    def test_a_slow_test_must_tell_more(self):
        source = test_file(test_a="use(prefetch, unshard)", test_b="use(prefetch)")
        for slow, first in ((0.01, "test_a"), (1.0, "test_a"), (30.0, "test_b")):
            with self.subTest(slow=slow):
                seconds = {"test_a": slow, "test_b": 0.01}
                actual = self.names(source, Edit(FUNCTION, "prefetch"), tests=seconds, seconds=seconds)
                self.assertEqual(actual[0], first)

    def test_classes_take_turns(self):
        executed = {f"A.test_{number}": Executed([FUNCTION], 1.0) for number in range(9)}
        known = make_map({**executed, "B.test": Executed([FUNCTION, "torch.m.g"], 1.0)})
        found = [test.test for test in Order(known, {}).sort(known.tests, [Edit(FUNCTION)])]
        self.assertIn("B.test", found[1:8])

    def test_variants_wait_for_other_tests(self):
        source = test_file(test_a="use(prefetch)", test_b="use(other)")
        tests = [*(f"test_a_x_{n}" for n in range(5)), "test_b"]
        actual = self.names(source, Edit(FUNCTION, "prefetch"), tests=tests)
        self.assertLess(actual.index("test_b"), 5)
        self.assertGreater(actual.index("test_b"), 0)

    def test_tests_that_run_the_changed_statement_come_first(self):
        one, other = (Statement(FUNCTION, number, 1, 1) for number in range(2))
        executed = {"T.test_a": Executed([FUNCTION], 1.0, [one]), "T.test_b": Executed([FUNCTION], 1.0, [other])}
        known = make_map(executed, [one, other])
        order = Order(known, {"f": test_file(test_a="use(word)", test_b="pass")})
        for number, first in ((1, "T.test_b"), (0, "T.test_a"), (7, "T.test_a")):
            with self.subTest(number=number):
                edit = Edit(FUNCTION, "word", statements=frozenset({number}))
                self.assertEqual(order.sort(known.tests, [edit])[0].test, first)


class TestOrder(OrderCase):
    """Without it, a test could be lost while the tests are ordered, or two runs could have different orders."""

    def test_it_has_every_test_once_and_depends_on_nothing_else(self):
        known = make_map({f"T.test_{n % 7}_{n}": Executed([FUNCTION], 1.0 + n % 3) for n in range(30)})
        order = Order(known, {})
        found = order.sort(known.tests, [Edit(FUNCTION)])
        self.assertEqual(sorted(found), sorted(known.tests))
        shuffled = random.Random(1).sample(known.tests, len(known.tests))
        self.assertEqual(order.sort(shuffled, [Edit(FUNCTION)]), found)
        self.assertEqual(order.sort([], [Edit(FUNCTION)]), [])

    def test_earlier_findings(self):
        with tempfile.TemporaryDirectory() as folder:
            record = Path(folder) / "findings.jsonl"
            self.assertEqual(kills_in(record), {})
            lines = [{"torch": "any"}, {"id": "torch.m:f:negate:1", "by": "a/f::T.t"}, {"id": "torch.m:g:negate:1"}]
            record.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"id": ')
            self.assertEqual(kills_in(record), {"torch.m.f": {("a/f", "T.t")}})
            more = Path(folder) / "more.jsonl"
            more.write_text('{"id": "torch.m:f", "by": "a/f::T.u"}\n')
            self.assertEqual(kills_in(record, more), {"torch.m.f": {("a/f", "T.t"), ("a/f", "T.u")}})

    def test_shipped_findings_are_of_tests_and_functions_of_the_map(self):
        known = ReachMap.load(shipped("2.13.0", SHIPPED))
        tests = {(test.file, test.test) for test in known.tests}
        kills = kills_in(KILLS)
        self.assertGreater(len(kills), 100)
        self.assertEqual({test for found in kills.values() for test in found} - tests, set())
        self.assertEqual([name for name in kills if known.enclosing(name) is None], [])


if __name__ == "__main__":
    unittest.main()
