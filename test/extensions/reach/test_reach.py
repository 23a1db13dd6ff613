"""The functions of a file, the map of what tests reach, and how a change is looked up in the map."""

import ast
import dataclasses
import io
import itertools
import json
import subprocess
import sys
import textwrap
import unittest.mock
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "dispatch"))

from little_torch import API, CORE, modules_of, write_sources
from trees import FolderCase

from torch_fsdp_tests.dispatch.discover import discover, source_of
from torch_fsdp_tests.dispatch.plan import TestRun
from torch_fsdp_tests.dispatch.syntax import declared_tests
from torch_fsdp_tests.extensions.reach import reaching
from torch_fsdp_tests.extensions.reach.changed_functions import Change, Changes, UnknownChange
from torch_fsdp_tests.extensions.reach.functions import Statement, functions_in, module_name, owners, statements_in
from torch_fsdp_tests.extensions.reach.reach_map import (
    Executed,
    MalformedMap,
    Module,
    Reached,
    ReachMap,
    build,
    declared_as,
)
from torch_fsdp_tests.extensions.reach.selecting import select
from torch_fsdp_tests.verdict import first_few

CORE_FILE = "torch/distributed/fsdp/_core.py"
MAX_UNKNOWN = 0.02  # the share of the tests of ``distributed`` that a shipped map may lack

SOURCE = '''\
"""What it is."""
import functools

LIMIT = 3


@functools.cache
def outer(x, y=LIMIT):
    """Words."""

    def inner():
        return x

    return inner() + y  # a comment


class Unit:
    size = 1

    @property
    def width(self):
        return 1

    @width.setter
    def width(self, value):
        pass

    def overload(self): ...


if LIMIT:

    async def rarely():
        return None
'''


def digests(source: str = SOURCE) -> dict[str, str]:
    """The digests of the functions of a module ``m``, by name."""
    return {function.name: function.digest for function in functions_in(source.encode(), "m")}


def differing(before: str, after: str) -> set[str]:
    """The names whose digest changes when the text changes."""
    return {name for name, _ in digests(before).items() ^ digests(after).items()}


class TestFunctions(FolderCase):
    """Without it, a change could count for the wrong function, and the tests of the right one would not run."""

    def test_names_and_lines(self):
        spans = [(f.name, f.first, f.last, f.body) for f in functions_in(SOURCE.encode(), "m")]
        self.assertEqual(
            spans,
            [
                ("m", 1, 35, None),
                ("m.outer", 7, 14, 9),
                ("m.outer.<locals>.inner", 11, 12, 12),
                ("m.Unit", 17, 28, None),
                ("m.Unit.width", 20, 22, 22),
                ("m.Unit.width", 24, 26, 26),
                ("m.Unit.overload", 28, 28, 29),
                ("m.rarely", 33, 34, 34),
            ],
        )

    def test_a_module_is_named_as_import_names_it(self):
        root = self.root / "torch"
        (root / "a").mkdir(parents=True)
        for path, name in {"a/b.py": "torch.a.b", "a/__init__.py": "torch.a", "__init__.py": "torch"}.items():
            (root / path).touch()
            self.assertEqual(module_name(root / path, root), name)

    def test_lines_that_run_only_in_a_function(self):
        owner_of_line = owners(functions_in(SOURCE.encode(), "m"))
        self.assertEqual({line for line, name in owner_of_line.items() if name == "m.outer"}, {9, 10, 11, 13, 14})
        self.assertEqual(owner_of_line[12], "m.outer.<locals>.inner")  # its header, line 11, runs in the outer function
        self.assertEqual({owner_of_line.get(line) for line in (4, 7, 8, 17, 18, 28, 32)}, {None})

    def test_layout_and_words_are_no_change(self):
        for old, new in {
            "# a comment": "# another",
            '"""Words."""': '"""Other words."""',
            '"""What it is."""': '"""What else it is."""',
            "inner() + y": "(inner()\n            + y)",
            "LIMIT = 3": "LIMIT = 0x3",
        }.items():
            with self.subTest(old=old):
                self.assertIn(old, SOURCE)
                self.assertEqual(differing(SOURCE, SOURCE.replace(old, new)), set())

    def test_a_change_is_that_of_the_innermost(self):
        expected = {
            ("return x", "return -x"): {"m.outer.<locals>.inner"},
            ("+ y", "- y"): {"m.outer"},
            ("y=LIMIT", "y=4"): {"m.outer"},
            ("@functools.cache", "@functools.lru_cache"): {"m.outer"},
            ("LIMIT = 3", "LIMIT = 4"): {"m"},
            ("size = 1", "size = 2"): {"m.Unit"},
            ("pass", "value()"): {"m.Unit.width"},
            ("if LIMIT", "if not LIMIT"): {"m"},
            ("rarely", "often"): {"m", "m.rarely", "m.often"},
        }
        self.assertEqual({edit: differing(SOURCE, SOURCE.replace(*edit)) for edit in expected}, expected)

    def test_where_code_stands_counts(self):
        """Indentation, the order of statements, parentheses and declarations also change a digest."""
        for before, after, names in (
            ("def f(x):\n    if x:\n        a()\n        b()\n", "def f(x):\n    if x:\n        a()\n    b()\n", "m.f"),
            ("if x:\n    a()\n    b()\n", "if x:\n    a()\nb()\n", "m"),
            ("if x:\n    a()\n    def f(): pass\n", "if x:\n    a()\ndef f(): pass\n", "m"),
            ("class C:\n    def f(): pass\n    f = g(f)\n", "class C:\n    f = g(f)\n    def f(): pass\n", "m.C"),
            ("def f():\n    x = ((a, b), c)\n", "def f():\n    x = ((a, b, c),)\n", "m.f"),
            ("def f():\n    x = 1\n", "def f():\n    global x\n    x = 1\n", "m.f"),
        ):
            with self.subTest(before=before):
                self.assertEqual(differing(before, after), {names})

    def test_docstrings_count_where_they_are_read(self):
        source = 'def f():\n    """Words."""\n\nprint(f.__doc__)\n'
        self.assertEqual(differing(source, source.replace("Words", "Other words")), {"m.f"})


STATEMENTS = """\
def f(x):
    if (x
        > 1):
        x = (1 +
             2)
        try:
            return x
        finally:
            x = 3

    @cache
    def inner():
        return 1
    class C:
        y = 1
        def g(self): return 2
    return inner
z = 1
@property
def f(x): return x
"""


class TestStatements(FolderCase):
    """Without it, the map could name the wrong tests for a statement, and a change would run those first."""

    def test_numbers_and_lines(self):
        """A second function of the same name continues the numbers."""
        spans: dict[str, list[tuple[int, int, int]]] = {}
        for each in statements_in(ast.parse(STATEMENTS), "m"):
            spans.setdefault(each.function, []).append((each.number, each.first, each.last))
        lines = ((2, 3), (4, 5), (6, 6), (7, 7), (9, 9), (12, 12), (14, 14), (17, 17), (20, 20))
        expected = {"m.f": [(number, *span) for number, span in enumerate(lines)]}
        expected |= {"m.f.<locals>.inner": [(0, 13, 13)], "m.f.<locals>.C.g": [(0, 16, 16)]}
        self.assertEqual(spans, expected)

    def test_the_map_has_their_tests(self):
        known = [Statement("p.f", number, 1, 1) for number in range(5)] + [Statement("p.unknown", 0, 1, 1)]
        ran = {("a", f"T.t{test}"): Executed(["p.f"], test, known[: 2 if test else 4]) for test in range(4)}
        reach_map = build("2.0", ran, statements=known)
        self.assertEqual(reach_map.statements, {"p.f": {2: 1, 3: 1, 4: 0}})
        self.assertEqual([reach_map.running("p.f", number) for number in (0, 3, 4)], [0b1111, 1, 0])
        self.assertEqual(ReachMap.load(self.write_json("map.json", reach_map.as_text())), reach_map)


def a_map() -> ReachMap:
    executed = {
        ("x/test_a", "TestA.test_all"): Executed(["p.m.f", "p.m.C.g", "p.n.h"], 1.0),
        ("x/test_a", "TestA.test_one"): Executed(["p.m.f"], 3.0),
        ("x/test_b", "TestB.test_one"): Executed(["p.m.f"], 2.0),
        ("x/test_b", "TestB.test_other"): Executed(["p.mm.k"], 2.5),
        ("x/test_b", "TestB.test_none"): Executed([], 2.0),
    }
    return build("2.0", executed)


class TestMap(FolderCase):
    """Without it, a map could lose tests when it is saved, or a damaged one could select too few tests."""

    def test_tests_of_a_function_a_class_and_a_module(self):
        all_, one, fast, other = (
            Reached("x/test_a", "TestA.test_all", 1.0, 3),
            Reached("x/test_a", "TestA.test_one", 3.0, 1),
            Reached("x/test_b", "TestB.test_one", 2.0, 1),
            Reached("x/test_b", "TestB.test_other", 2.5, 1),
        )
        # The tests that enter the fewest functions come first, and the fastest of them first.
        expected = {"p.m.f": [fast, one, all_], "p.m": [fast, one, all_], "p": [fast, other, one, all_]}
        expected |= {"p.m.C": [all_], "p.m.C.g": [all_], "p.mm": [other], "p.m.C.other": [], "p.mmm": []}
        self.assertEqual({name: a_map().tests_of(name) for name in expected}, expected)

    def test_what_is_written_is_what_is_read(self):
        made = dataclasses.replace(a_map(), modules={"p.m": Module.of(SOURCE.encode(), "p.m")}, device="foo")
        made = dataclasses.replace(made, skipped={"x/test_a": ["TestA.test_skipped"]})
        read = ReachMap.load(self.write_json("map.json", made.as_text()))
        self.assertEqual(read, made)
        self.assertEqual(read.modules["p.m"].functions["p.m.outer"], digests()["m.outer"])

    def test_what_is_no_map(self):
        good = json.loads(a_map().as_text())
        for bad, words in (
            ("", "is not a map"),
            ("[]", "is not a map"),
            (json.dumps({**good, "format": 2}), "has format 2"),
            (json.dumps({**good, "reached": [9, *good["reached"][1:]]}), "is not a map"),
            (json.dumps({**good, "reached": [1, "x", "y"]}), "is not a map"),
            (json.dumps({**good, "tests": {"a": [["x"]]}}), "is not a map"),
        ):
            with self.subTest(bad=bad[:40]), self.assertRaisesRegex(MalformedMap, f"{words}.*--save-map"):
                ReachMap.load(self.write_json("map.json", bad))


def diff_of(path: str, hunk: str = "@@ -1 +1 @@\n-x\n+y\n") -> str:
    """A diff of one file."""
    return f"--- a/{path}\n+++ b/{path}\n{hunk}"


DECLARED = """\
class Checks:
    def test_shared(self): pass

class TestA(Checks, TestCase):
    def test_all(self): pass
    def test_all_at_once(self): pass
    def helper(self): pass

class Base(TestA):
    def test_base(self): pass

class TestAB(Base[int]):
    def test_more(self): pass

class TestM(ModelTestCase):
    def build(self): pass

class Model(Generic[T], object):
    def test_nothing(self): pass

instantiate_device_type_tests(TestA)
del Base, TestAB
"""
A_TESTS = ["TestA.test_all", "TestA.test_all_at_once", "TestA.test_shared"]
AB_TESTS = [f"TestAB.test_{name}" for name in ("all", "all_at_once", "base", "more", "shared")]


class TestUnknown(FolderCase):
    """Without it, tests that are newer than the map would be left out without a message."""

    def test_what_a_file_declares(self):
        self.assertEqual(declared_tests(DECLARED), [*A_TESTS, *AB_TESTS, "TestM.test"])
        self.assertEqual(declared_tests("def ("), [])

    def test_from_what_a_test_is_made(self):
        for test, stem in {
            "TestA.test_all": "TestA.test_all",
            "TestA.test_all_at": "TestA.test_all",
            "TestA.test_all_at_once_cpu": "TestA.test_all_at_once",
            "TestABCPU.test_all": "TestAB.test_all",
            "TestACPU.test_all": "TestA.test_all",
            "TestA.test_more": None,
            "TestC.test_all": None,
        }.items():
            self.assertEqual(declared_as(test, A_TESTS + AB_TESTS), stem, test)

    def test_what_the_map_does_not_know(self):
        executed = {("f", f"TestACPU.{name}_cpu"): Executed([]) for name in ("test_all", "test_all_at_once_x")}
        skipped = {"f": ["TestAB.test_all"], "gone": ["T.t"]}
        known = dataclasses.replace(build("2.0", executed), skipped=skipped)
        for with_skipped, also in ((False, []), (True, ["TestAB.test_all"])):
            actual = known.unknown({"f": A_TESTS + AB_TESTS, "g": ["TestA.test_all"]}, with_skipped)
            expected = [Reached("f", name, 0.0, 0) for name in ("TestA.test_shared", *also, *AB_TESTS[1:])]
            self.assertEqual(actual, [*expected, Reached("g", "TestA.test_all", 0.0, 0)])

    def test_two_maps_are_one(self):
        statements = [Statement("p.f", number, 1, 1) for number in range(3)] + [Statement("p.g", 0, 1, 1)]
        statements += [Statement("p.k", 0, 1, 1)]
        old = {
            ("a", "T.t1"): Executed(["p.f"], 1.0, statements[:1]),
            ("b", "T.t2"): Executed(["p.f", "p.g"], 2.0, statements),
            ("b", "T.t3"): Executed(["p.k"], 2.0, statements[-1:]),
            ("b", "T.gone"): Executed(["p.h", "p.k"], 1.0),
        }
        new = {("a", "T.t0"): Executed(["p.f"], 3.0, statements[1:2]), ("b", "T.t2"): Executed(["p.g"], 4.0)}
        maps = [build("2.0", tests, statements=statements) for tests in (old, new)]
        modules = [{name: Module.of(SOURCE.encode(), name)} for name in ("p.n", "p.m")]
        skipped: list[dict[str, list[str]]] = [{"a": ["T.t0", "T.t9"], "b": ["T.gone"]}, {"a": ["T.t8"]}]
        before, newer = (
            dataclasses.replace(known, modules=its, skipped=names)
            for known, its, names in zip(maps, modules, skipped, strict=True)
        )
        both = {**old, **new}
        del both["b", "T.gone"]
        expected = build("2.0", both, dict(sorted({**modules[0], **modules[1]}.items())), statements)
        expected = dataclasses.replace(expected, skipped={"a": ["T.t8", "T.t9"]})
        self.assertEqual(before.merged(newer, [("b", "T.gone")]), expected)

    def test_the_map_that_ships_is_up_to_date(self):
        """To refresh it, run the command in docs/changing-fsdp.md."""
        files = discover(Path(__file__).parents[2])
        names = [file for file in files if file.startswith("distributed/")]
        declared = {file: declared_tests(source_of(files[file])) for file in names}
        for path in reaching.SHIPPED.glob("map-*.json"):
            known = ReachMap.load(path)
            unknown = [f"{test.file}::{test.test}" for test in known.unknown(declared)]
            share = len(unknown) / sum(map(len, declared.values()))
            self.assertLessEqual(share, MAX_UNKNOWN, f"{path.name} lacks {first_few(unknown)}: refresh it")


class SourcesCase(FolderCase):
    """A fake torch of small modules, and a map of it: one test shards, and another one takes a step."""

    def setUp(self) -> None:
        super().setUp()
        self.torch, self.core = self.root / "site/torch", self.root / "site" / CORE_FILE
        write_sources(self.root / "site")
        executed = {
            ("test_a", "TestA.test_shard"): Executed([f"{CORE}.shard"], 1.0),
            ("test_a", "TestA.test_step"): Executed([f"{CORE}.shard", f"{CORE}.Unit.step"], 1.0),
            ("test_b", "TestB.test_place"): Executed(["torch.distributed.tensor.used.place"], 1.0),
        }
        self.map = build("9.8.7", executed, modules_of(self.torch))

    def change(self, what: str) -> Change:
        return Changes(self.map, self.torch).find(what)

    def change_of_diff(self, text: str) -> Change:
        return Changes(self.map, self.torch).of_diff(textwrap.dedent(text), "it")

    def other_tree(self, **changed: tuple[str, str]) -> Path:
        write_sources(self.root / "other", **changed)
        return self.root / "other"

    def diff(self, *options: str, reverse: bool = False, **changed: tuple[str, str]) -> str:
        """A file with the ``git diff`` of another tree."""
        trees = [str(self.torch.parent), str(self.other_tree(**changed))]
        command = ["git", "diff", "--no-index", *options, *(reversed(trees) if reverse else trees)]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/")
        return str(self.write_json("some.diff", done.stdout))


class TestChanges(SourcesCase):
    """Without it, ``--reaching`` could misread a diff or a line number, and run the tests of other code."""

    def test_names(self):
        core = {f"{CORE}.{name}" for name in ("shard", "gather", "Unit.step", "Unit.back")}
        modules = (CORE, "torch.distributed.fsdp", "torch/distributed/fsdp", CORE_FILE, "distributed/fsdp/_core.py")
        paths = ("_core.py", str(self.core), str(self.core.parent), f"/elsewhere/{CORE_FILE}")
        for what, names in {
            f"{CORE}.Unit.step": {f"{CORE}.Unit.step"},
            "Unit.step": {f"{CORE}.Unit.step"},
            "torch.distributed.fsdp.shard": {f"{CORE}.shard"},  # as the package exports it
            "torch.distributed.fsdp.Unit.back": {f"{CORE}.Unit.back"},
            f"{CORE}.Unit": {f"{CORE}.Unit.step", f"{CORE}.Unit.back"},
            **dict.fromkeys((*modules, *paths), core),
            "api.py": {API},  # its class has no functions
        }.items():
            with self.subTest(what=what):
                self.assertEqual(self.change(what).names, names)

    def test_lines(self):
        expected = {"7": {"shard"}, "6": {"shard"}, "16": {"Unit"}, "16-19": {"Unit", "Unit.step"}}
        expected["6-12"] = {"shard", "gather"}  # only empty lines are between the functions
        for lines, names in expected.items():
            with self.subTest(lines=lines):
                self.assertEqual(self.change(f"_core.py:{lines}"), Change({f"{CORE}.{name}" for name in names}))
        self.assertEqual(self.change("_core.py:3"), Change({CORE}))
        self.assertEqual(self.change("_core.py:4-5"), Change(without_code=["_core.py:4-5"]))

    def test_lines_of_a_text_are_code(self):
        self.core.write_text(self.core.read_text().replace("return 2", 'return """\n# not a comment\n\n"""'))
        for line in (22, 23):
            self.assertEqual(self.change(f"_core.py:{line}").names, {f"{CORE}.Unit.back"})

    def test_lines_of_another_tree_are_those_of_its_file(self):
        tree = self.other_tree(_core=("import threading", "import threading\n\n\ndef new():\n    pass\n"))
        self.assertEqual(self.change(f"{tree / CORE_FILE}:12").names, {f"{CORE}.shard"})

    def test_a_diff_that_is_applied_or_not(self):
        replaced = ("return shard(self.size)", "return shard(-self.size)")
        added = ("def step(self):", "def step(self):\n        self.size += 1")
        for step, reverse in itertools.product((replaced, added), (False, True)):
            for options in ([], ["-U0"], ["--no-prefix"]):
                with self.subTest(step=step, reverse=reverse, options=options):
                    change = self.change(self.diff(*options, reverse=reverse, _core=step))
                    self.assertEqual(change, Change({f"{CORE}.Unit.step"}))

    def test_what_is_known_about_the_changed_code(self):
        """The order of tests is made from it."""
        mentions = self.diff(_core=("x += LIMIT\n", "x -= gather(LIMIT)\n"))
        for what, statements, mentioned in (
            (mentions, {0}, {f"{CORE}.gather"}),
            ("_core.py:8-8", {1}, set()),
            ("_core.py:19", {0}, {f"{CORE}.shard"}),
            ("shard", set(), set()),
        ):
            change = self.change(what)
            (name,) = change.names
            self.assertEqual((change.statements.get(name, set()), change.mentioned), (statements, mentioned), what)
        for old, new, known in (
            ("size = 1", "size = 2", {0}),
            ("x += LIMIT", "x -= gather(LIMIT)", {0}),
            ("-=", "*=", None),
        ):
            self.core.write_text(self.core.read_text().replace(old, new))  # of another function, of the change, of both
            self.assertEqual(self.change(mentions).statements.get(f"{CORE}.shard"), known, new)

    def test_a_module_outside_of_the_map_stands_for_what_uses_it(self):
        """No test enters the user ``Unit.back``."""
        utils = "def _inner():\n    return 1\n\n\ndef outer():\n    return _inner()\n"
        utils += "\n\nclass More:\n    def f(self):\n        return outer()\n"
        (self.torch / "distributed/_utils.py").write_text(utils)
        self.core.write_text(
            "from torch.distributed._utils import outer as used, other\n\n\n"
            "def shard(x):\n    return used()\n\n\ndef gather(x):\n    return other()\n\n\n"
            "class Unit:\n    def step(self):\n        return torch.distributed.More()\n\n"
            "    def back(self):\n        return used()\n"
        )
        self.map = dataclasses.replace(self.map, modules=modules_of(self.torch))
        hunk = "@@ -1,2 +1,2 @@\n def _inner():\n-    return 1\n+    return 2\n"
        change = self.change_of_diff(diff_of("torch/distributed/_utils.py", hunk))
        users = {f"{CORE}.shard", f"{CORE}.Unit.step"}
        self.assertEqual((change.names, change.used), (users, {"_inner", "outer", "More"}))
        self.assertRegex(change.remarks[0], "not in the map: torch.distributed._utils; the tests of what uses it run")
        selected = select(change.names, self.map, also=["test_b"]).tests
        self.assertEqual({test.test for test in selected}, {"TestA.test_shard", "TestA.test_step", "TestB.test_place"})

    def test_a_diff_in_a_file_that_has_moved_on(self):
        diff = self.diff(_core=("return 2", "return 3"))
        self.core.write_text("# more\n" * 20 + self.core.read_text())
        self.assertEqual(self.change(diff), Change({f"{CORE}.Unit.back"}))

    def test_a_diff_that_does_not_fit_counts_by_its_lines(self):
        diff = self.diff("-U0", _core=("x += LIMIT", "x -= LIMIT"))
        self.core.write_text(self.core.read_text().replace("x += LIMIT", "x *= LIMIT"))
        change = self.change(diff)
        self.assertEqual(change.names, {f"{CORE}.shard"})
        self.assertRegex(change.remarks[0], "do not fit the installed torch/distributed/fsdp/_core.py")

    def test_a_hunk_that_fits_nowhere_counts_for_what_it_names(self):
        hunk = "@@ -{},2 +{},2 @@{}\n {}\n-never\n+ever\n"
        for start, header, line, names in (
            (900, " def back(self):", "x", {f"{CORE}.Unit.back"}),
            (900, "", "    def step(self):", {f"{CORE}.Unit.step"}),
            (900, " class Unit:", "x", {f"{CORE}.Unit"}),
            (900, "", "x", {CORE}),
            (900, " def unknown_name():", "x", {CORE}),
            (6, " def back(self):", "x", {f"{CORE}.shard", f"{CORE}.Unit.back"}),
        ):
            with self.subTest(start=start, header=header, line=line):
                change = self.change_of_diff(diff_of(CORE_FILE, hunk.format(start, start, header, line)))
                self.assertEqual((change.names, change.without_code), (names, []))
                self.assertRegex(change.remarks[0], r"hunks do not fit the installed .*_core.py \(1 of 1\)")

    def test_a_change_that_is_there_already_counts_where_it_is(self):
        """The code before the change is also that of another function, to which the diff fits less well."""
        diff = self.diff("-U0", _core=("    return shard(self.size)\n", "    return 2\n"))
        write_sources(self.torch.parent, _core=("    return shard(self.size)\n", "    return 2\n"))
        other = "\n\nclass Other:\n    def step(self):\n        return shard(self.size)\n"
        self.core.write_text(self.core.read_text() + other)
        self.assertEqual(self.change(diff).names, {f"{CORE}.Unit.step"})

    def test_files_that_move(self):
        git = "diff --git a/{0} b/{1}\nsimilarity index 100%\nrename from {0}\nrename to {1}\n"
        new = "torch/distributed/fsdp/_heart.py"
        rename = git.format(CORE_FILE, new)
        hunk = "@@ -1,2 +1,2 @@\n class Policy:\n-    keep = False\n+    keep = True\n"
        edit = diff_of("torch/distributed/fsdp/api.py", hunk)
        mode = f"diff --git a/{CORE_FILE} b/{CORE_FILE}\nold mode 100644\nnew mode 100755\n"
        for text, change in (
            (rename, Change({CORE})),
            (git.format(new, CORE_FILE), Change({CORE})),  # the installed torch has the new name
            (rename + edit, Change({CORE, f"{API}.Policy"})),
            (git.format("README.md", "README"), Change(unknown=["README.md"])),
            (mode, Change(without_code=[CORE_FILE])),
            (mode + edit, Change({f"{API}.Policy"}, without_code=[CORE_FILE])),
        ):
            with self.subTest(text=text):
                self.assertEqual(self.change_of_diff(text), change)

    def test_what_the_map_cannot_tell(self):
        places = ["torch/csrc/reducer.cpp", "test/distributed/test_x.py", "torch/distributed/_unknown_name.py", "x.md"]
        text = "".join(map(diff_of, places))
        self.assertEqual(self.change_of_diff(text), Change(unknown=places))

    def test_files_of_a_diff_that_come_go_or_lie_outside(self):
        text = """\
            --- /dev/null
            +++ b/torch/distributed/fsdp/_new.py
            @@ -0,0 +1 @@
            +x = 1
            --- a/torch/distributed/fsdp/api.py\t2026-01-01
            +++ /dev/null
            @@ -1,2 +0,0 @@
            -class Policy:
            -    keep = False
            """
        text = diff_of("torch/nn/linear.py") + textwrap.dedent(text)
        change = self.change(str(self.write_json("d.patch", text)))
        self.assertEqual(set(change.names), {"torch.distributed.fsdp._new", API, f"{API}.Policy"})
        self.assertEqual(change.unknown, ["torch/nn/linear.py"])

    def test_standard_input(self):
        text = Path(self.diff(_core=("return 2", "return 3"))).read_bytes()
        empty = Change(remarks=["the diff on standard input is empty"])
        for given, change in ((text + b"\xff", Change({f"{CORE}.Unit.back"})), (b"", empty)):
            with unittest.mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(given))):
                self.assertEqual(self.change("-"), change)

    def test_another_tree(self):
        tree = self.other_tree(_core=("size = 1", "size = 2"), used=("return 1", "return 2"), unused=("1", "2"))
        where = "torch.distributed.tensor"  # no test enters its module ``unused``
        expected = {f"{CORE}.Unit", f"{where}.used.place", f"{where}.unused.other"}
        for place in (tree, tree / "torch", tree / "torch/distributed/fsdp"):
            with self.subTest(place=place):
                change = self.change(str(place))
                self.assertEqual(change.names, expected)
                self.assertRegex(change.remarks[0], "only the Python files of torch/distributed, .* are compared")
        (tree / CORE_FILE).write_text("def (")
        change = self.change(str(tree))
        self.assertIn(CORE, change.names)
        self.assertRegex(change.remarks[1], "torch/distributed/fsdp/_core.py is not valid Python")

    def test_what_has_changed_since_it_was_recorded(self):
        self.assertEqual(Changes(self.map, self.torch).since_recorded(), Change())
        write_sources(self.torch.parent, _core=("x += LIMIT", "x -= LIMIT"), unused=("1", "2"))
        (self.torch / "distributed/fsdp/_new.py").write_text("")
        (self.torch / "distributed/fsdp/api.py").unlink()
        change = Changes(self.map, self.torch).since_recorded()
        self.assertEqual(set(change.names), {f"{CORE}.shard", "torch.distributed.fsdp._new", API})

    def test_what_means_nothing(self):
        no_diff = self.write_json("words", "--\nwords\n")
        for what, words in {
            "torch.distributed.fsdp._cor.shard": r"is not a name in the map.*nearest: .*_core.shard",
            "torch.distributed.fsdp.unknown_name": "is not a name in the map",
            f"{CORE}.unknown_name": "is not a name in the map",
            "nonsense": "is not a name in the map",
            "torch/nn/linear.py": "does not have the file torch/nn/linear.py; it covers torch/distributed/fsdp, ",
            "__init__.py": "can mean torch/distributed/fsdp/__init__.py or torch/distributed/tensor/__init__.py",
            "_core.py:90": "has only the lines 1 to 25, not 90-90",
            "_core.py:9-7": "ends before it begins",
            "": "an empty text names no change",
            "absent.diff": "there is no file absent.diff",
            str(self.root / "absent"): f"there is no file or folder {self.root}/absent",
            f"{CORE}.shrad": rf"is not a name in the map.*nearest: {CORE}.shard",  # of a module that is known
            "Unit.stp": rf"is not a name in the map.*nearest: {CORE}.Unit.step",
            str(no_diff): "words is not a unified diff: make one with git diff",
            str(self.root): "holds no torch/distributed/fsdp to compare with",
        }.items():
            with self.subTest(what=what), self.assertRaisesRegex(UnknownChange, words):
                self.change(what)


class TestSelection(SourcesCase):
    """Without it, a change of code that the map does not know could select no test, and seem to be harmless."""

    def names(self, *changed: str) -> list[str]:
        return [test.test for test in select(changed, self.map).tests]

    def test_those_that_enter_come_before_those_around(self):
        shard, step = "TestA.test_shard", "TestA.test_step"
        for changed, tests in (
            ([f"{CORE}.shard"], [shard, step]),
            ([f"{CORE}.Unit.step"], [step]),
            ([f"{CORE}.Unit"], [step]),  # a statement of the class
            ([CORE], [shard, step]),
            ([CORE, f"{CORE}.Unit.step"], [step, shard]),
            ([f"{API}.Policy"], [shard, step]),  # neither class nor module has functions, but the package has
            ([f"{CORE}.Unit.new"], [step]),
            (["torch.distributed.fsdp._new.f"], [shard, step]),
            ([f"{CORE}.gather"], []),
            (["elsewhere.f"], []),
        ):
            with self.subTest(changed=changed):
                self.assertEqual(self.names(*changed), tests)

    def test_what_is_said(self):
        selection = select([f"{CORE}.shard", f"{CORE}.gather", f"{CORE}.new", "elsewhere.f", f"{CORE}.shard"], self.map)
        self.assertEqual((selection.functions, selection.unreached), (4, (f"{CORE}.gather", "elsewhere.f")))
        self.assertEqual(selection.remarks, (f"not in the map: {CORE}.new; the tests of {CORE} run instead",))

    def test_parts_of_files_in_the_order_of_their_first_test(self):
        names = ["b B.1", "a A.1", "b C.1", "b B.2", "c D.1"]
        wanted = [Reached(file, test, 1.0, 1) for file, test in map(str.split, names)]
        kept = reaching.keep([TestRun("a"), TestRun("b")], wanted)
        parts = [("b", ("B.1", "C.1", "B.2"), 3.0), ("a", ("A.1",), 1.0)]
        self.assertEqual([(run.file, run.order, run.seconds) for run in kept], parts)
        for selected, expected in (
            (TestRun("b", included=frozenset({"B"})), ("B.1", "B.2")),
            (TestRun("b", included=frozenset({"*.1"})), ("B.1", "C.1")),
            (TestRun("b", excluded=frozenset({"B", "C.2"})), ("C.1",)),
        ):
            with self.subTest(selected=selected):
                kept = reaching.keep([selected], wanted)
                self.assertEqual(tuple(name for run in kept for name in run.order), expected)
        self.assertEqual(reaching.keep([TestRun("c", excluded=frozenset({"D"}))], wanted), [])

    def test_the_map_that_fits_a_version(self):
        with self.assertRaisesRegex(UnknownChange, "--save-map"):
            reaching.shipped("2.13.0", self.root)
        for version in ("2.9.1", "2.13.0", "2.15.0"):
            (self.root / f"map-{version}.json").touch()
        expected = {"2.13.0+cpu": "2.13.0", "2.14.1": "2.13.0", "2.10.0": "2.9.1", "2.8.0": "2.9.1", "3.0": "2.15.0"}
        actual = {version: reaching.shipped(version, self.root).stem for version in expected}
        self.assertEqual(actual, {version: f"map-{shipped}" for version, shipped in expected.items()})


if __name__ == "__main__":
    unittest.main()
