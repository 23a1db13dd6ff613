"""``python -m torch_fsdp_tests.tools.mutants``: its operators, its hook, and the real command over a tiny package."""

import hashlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import types
import unittest.mock
from argparse import Namespace
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.reach import Executed, Reached, ReachMap, build
from torch_fsdp_tests.reach.functions import Statement
from torch_fsdp_tests.reach.functions import digest as digest_of
from torch_fsdp_tests.reach.order import batches, within
from torch_fsdp_tests.reach.reachmap import Module
from trees import CHECKOUT, ENVIRONMENT, FolderCase, TreeCase, alive

from torch_fsdp_tests.processes.children import Children
from torch_fsdp_tests.processes.messages import from_data
from torch_fsdp_tests.tools.mutants import exclusions, hook, mutant, options
from torch_fsdp_tests.tools.mutants import trials as trials_module
from torch_fsdp_tests.tools.mutants.kinds import OPERATORS
from torch_fsdp_tests.tools.mutants.mutant import Tests
from torch_fsdp_tests.tools.mutants.outcomes import MutantOutcome, MutantResult
from torch_fsdp_tests.tools.mutants.sites import RELATED, Mutant, Source
from torch_fsdp_tests.tools.mutants.trials import Trials, Work
from torch_fsdp_tests.verdict import State

Examples = dict[str, list[tuple[str, set[str]] | str]]

# For each operator: code with the possible replacements of the last changed line, and code that it does not change.
EXAMPLES: Examples = {
    "negate": [
        ("if a: pass", {"if not a:"}),
        ("while a < b: pass", {"while not a < b:"}),
        ("x = not a", {"x = a"}),
        ("x = [y for y in z if y]", {"x = [y for y in z if not y]"}),
        "if a == b: pass",  # exchanging the comparison has the same effect
    ],
    "compare": [
        ("x = a < b <= c", {"x = a <= b <= c", "x = a < b < c"}),
        ("x = a is None", {"x = a is not None"}),
        ("x = a in b", {"x = a not in b"}),
    ],
    "boolean": [("x = a and b", {"x = a or b"}), ("x = a or b or c", {"x = a and b and c"})],
    "number": [("x = y[1:]", {"x = y[2:]"}), ("x = 0.5", {"x = 1.5"}), "x = True", "x = '1'"],
    "arithmetic": [("x = a + b", {"x = a - b"}), ("x //= 2", {"x *= 2"}), "x = 'a' + b", "x = 'a%s' % b"],
    "default": [("def f(a=True, *, b=False): pass", {"def f(a=False, *, b=False):", "def f(a=True, *, b=True):"})],
    "flip": [("x = f(a, flag=True)", {"x = f(a, flag=False)"}), "x = 1"],
    "streams": [
        ("stream.wait_stream(a)", {"stream"}),
        ("a.b.synchronize()", {"a.b"}),
        ("_no_dispatch_record_stream(a, b)", {"None"}),
        ("event = a.record_event()", {"event = type(a.record_event())()"}),
        ("x = f(a, non_blocking=b)", {"x = f(a)"}),
        "wait_for_unshard(a)",
    ],
    "call": [("f(a)", {"pass"}), "stream.wait_stream(a)", "x = f(a)", "'text'"],
    "context": [("with f(): g()", {"if True:"}), "with f() as x: g()"],
    "decorator": [("@f(1)\ndef g(): pass", {"@lambda undecorated: undecorated"}), "@property\ndef g(): pass"],
    "assignment": [
        ("x.y = 1", {"pass"}),
        ("x[0] += 1", {"pass"}),
        ("x = 1\nx = 2", {"pass"}),  # the second assignment
        "x = 1",
    ],
    "drop": [("x = f(a, b, c=d)", {"x = f(a, b)", "x = f(a, c=d)"}), "x = f(a)", "x = f(**a)"],
    "exchange": [("x = f(a, b, c)", {"x = f(b, a, c)", "x = f(a, c, b)"}), "x = f(a, a)", "x = isinstance(a, b)"],
    "return": [("def f():\n return a", {"return None"}), "def f():\n return None"],
}

# The same for operators that rewrite more than a token, with the replacements of everything that they change. Of a
# compound statement, this is the header.
REWRITES: Examples = {
    "finally": [
        ("try: f()\nfinally: g()", {"f()\ng()"}),
        ("def c():\n try:\n  yield\n finally: g()", {"yield\ng()"}),
        ("try: f()\nexcept E: h()\nfinally: g()", {"try:\n    f()\nexcept E:\n    h()\ng()"}),
        ("def c():\n try: return f()\n finally: g()", {"result = f()\ng()\nreturn result"}),
        ("def c():\n try: return a\n finally: g()", {"g()\nreturn a"}),
        ("def __exit__(self, kind, *rest): g()", {"if kind is not None:\n    return\ng()"}),
        ("def __exit__(self, *error): g()", {"if error[0] is not None:\n    return\ng()"}),
        "def c():\n try:\n  if a: return b\n  f()\n finally: g()",  # a return would skip the cleanup
        *("try: f()\nexcept E: g()", "def __exit__(self, *error): pass"),
    ],
    "indent": [
        ("for a in b:\n f(a)\n g(a)", {"for a in b:\n    f(a)\ng(a)"}),
        ("if a:\n f()\n x.y = 1", {"if a:\n    f()\nx.y = 1"}),
        ("if a: f()\nelse:\n g()\n h()", {"if a:\n    f()\nelse:\n    g()\nh()"}),
        ("for a in b:\n f(a)\n x[a] = 1", {"for a in b:\n    f(a)\nx[a] = 1"}),
        ("def c():\n for a in b: f(a)\n return a", {"for a in b:\n    f(a)\n    return a"}),
        ("with a: f()\ng()", {"with a:\n    f()\n    g()"}),
        ("b = 0\nif a: f()\nb = 1", {"if a:\n    f()\n    b = 1"}),
        *("if a: raise E\nelse:\n g()\n h()", "for a in b:\n f(a)\n x.y = None"),  # the effect is the same
        *("if a := x.y:\n f(a)\n x.y = None", "with a: f()\nx.y = 1"),  # here as well
        *("if a:\n b = f()\n g(b)", "if a: f()\nb = 1"),  # b might not exist
        "while a:\n f()\n a = g()",  # the loop might not end
        "def c():\n if a: return 1\n f()",  # the statement would never run
        "if a:\n 'text'\nimport b",
    ],
    "first": [
        ("for a in self.b: f(a.c)", {"f(self.b[0].c)"}),
        ("x = [a.c for a in b if a.d]", {"x = [b[0].c for a in b if a.d]", "x = [a.c for a in b if b[0].d]"}),
        ("for i, a in enumerate(b): f(a.c)", {"f(b[0].c)"}),
        ("for a, c in zip(b, d): f(c.e)", {"f(d[0].e)"}),
        ("for k, a in b.items(): f(a.c)", {"f(next(iter(b.values())).c)"}),
        ("for a in m.parameters(): f(a.numel())", {"f(next(iter(m.parameters())).numel())"}),
        "for a in b: a.c()",  # such a call is not repeated
        "for a in f(b): g(a.c)",  # an iterator has no first element
        *("for a in b: a.c = 1", "for a in b: pass\nf(a.c)"),
    ],
    "once": [
        ("class C:\n x = None\n def f(self): self.x = g()", {"if self.x is None:\n    self.x = g()"}),
        ("class C:\n def f(self): self.x = g()", {"if not hasattr(self, 'x'):\n    self.x = g()"}),
        ("x = {}\ndef f(): x[a] = g()", {"x.setdefault(a, g())"}),
        "class C:\n def __init__(self): self.x = g()",  # it is the first time
        "class C:\n x: int\n def f(self): self.x = g()",  # it would never be assigned
        *("class C:\n def f(self): self.x = None", "class C:\n def f(self): self.x = True"),  # the same each time
        "def f():\n x = {}\n x[a] = g()",  # the dictionary does not outlive the call
        *("def f(): tensor.data = g()", "x = []\ndef f(): x[0] = g()"),
    ],
    "key": [
        ("x = {}\nx[a, b] = 1", {"x[b] = 1", "x[a] = 1"}),
        ("key = (a, b, c)", {"key = (b, c)", "key = (a, c)", "key = (a, b)"}),
        ("new_fqn = f'{prefix}.{name}'", {"new_fqn = name", "new_fqn = prefix"}),
        ("name = prefix + name", {"name = prefix"}),  # and not name = name
        ("x = y.get(prefix + k)", {"x = y.get(prefix)", "x = y.get(k)"}),
        ("x = (a, b) in y", {"x = b in y", "x = a in y"}),
        ("x = {(a, b): c for a, b in d}", {"x = {b: c for a, b in d}", "x = {a: c for a, b in d}"}),
        *("x[a, b] = 1", "x = y[i + 1]", "x = f(a, b)"),  # indices and arguments
    ],
    "leave": [
        ("def f():\n for a in g(b):\n  if a: break\n g()", {"return"}),
        ("def f(x):\n y = x\n for a in f(b):\n  if a: continue\n g()\n return y", {"return y"}),
        ("def f():\n for a in b.items(): g()\n h()", {"if not b:\n    return\nfor a in b.items():\n    g()"}),
        ("def f():\n x = g()\n h()\n return x", {"return g()"}),
        *("def f():\n for a in b:\n  if a: continue", "def f():\n for a in f(b):\n  if a: continue\n assert x"),
        "def f():\n for a in f(b):\n  if a: continue\n return x + 1",
        *("def f():\n yield\n for a in b: g()\n h()", "def f():\n for a in b:\n  if a: break\n  yield a\n h()"),
        "def f():\n x = []\n x.append(1)\n return x",
    ],
    "kwargs": [
        ("args, kwargs = f(args, kwargs)", {"_, kwargs = f(args, kwargs)", "args, _ = f(args, kwargs)"}),
        ("args, kwargs = f(args), g(kwargs)", {"kwargs = g(kwargs)", "args = f(args)"}),
        ("def f(*args, **kwargs): g(*new_args, **new_kwargs)", {"g(*args, **new_kwargs)", "g(*new_args, **kwargs)"}),
        ("def f(args): return (new_args, new_kwargs)", {"return (args, new_kwargs)"}),
        *("args, kwargs = f(x)", "def f(b_args): g(a_args)", "def f(args, b_args): g(b_args)"),
        *("def f(args): g(inputs)", "a, b = f(a, b)"),
    ],
    "operand": [
        ("if a and b: pass", {"if b:", "if a:"}),
        ("x = a and b and c", {"x = b and c", "x = a and c", "x = a and b"}),
        ("while not (a or b): pass", {"while not b:", "while not a:"}),
        ("x = a is None or b", {"x = b", "x = a is None"}),
        "x = a or b",  # a default
    ],
    "order": [
        ("f(a)\ng(b)", {"g(b)\nf(a)"}),
        ("import torch\ntorch.f(a)\ntorch.g(b)", {"torch.g(b)\ntorch.f(a)"}),
        ("self._f()\nself.x = 1", {"self.x = 1\nself._f()"}),
        ("x = all_gather(a)\ny = reduce_scatter(b)", {"y = reduce_scatter(b)\nx = all_gather(a)"}),
        *("x = 1\ny = 2", "self.x = 1\nself.y = 2", "f(a)\nself.x = 1", "x = g(a)\ny = h(b)"),  # no other code sees it
        *("a.append(1)\nb.append(2)", "a.copy_(1)\nb.fill_(2)", "'text'\nf(a)", "f(a)\nimport b"),
        *("f(a)\ng(a)", "f(self)\nself.g()"),  # they share a name
    ],
    "alias": [
        ("x = a.clone()", {"x = a"}),
        ("x = a.detach().clone()", {"x = a.detach()", "x = a.clone()"}),
        ("x = copy.deepcopy(a)", {"x = a"}),
        ("x = list(a.b)", {"x = a.b"}),
        ("x = {**a}", {"x = a"}),
        ("x = a[:]", {"x = a"}),
        *("x = [*f(a)]", "x = list(f(a))"),  # the call may return an iterator
        *("x = dict(a, b=1)", "a[:] = b"),
    ],
}

# Code that an operator could change, and why it is not tried.
EXCLUDED = {
    exclusions.MESSAGES: ["raise ValueError(f(a, b))", "x = f(f'{a + b}')", "x = f(stacklevel=1 + 2)"],
    exclusions.LOGGING: [
        *("logger.debug('%s', x)", "warnings.warn('x', stacklevel=2)", "if a == b: warnings.warn('x')"),
        *("with torch.profiler.record_function('x'): pass", "def _warn_once(a):\n return f(a, 1)"),
        "for a in b:\n 'text'\n logger.debug(a)",  # the operator moves a statement
    ],
    exclusions.ASSERTIONS: ["assert a == b", "_p_assert(a == b, 'x')", "if a == b: raise AssertionError('x')"],
    exclusions.TYPES: ["if TYPE_CHECKING: f(a)", "T = TypeVar('T', bound=1)"],
    exclusions.COMPILER: [
        "if torch.compiler.is_compiling(): f(a)",
        "if not torch.compiler.is_compiling(): pass\nelse: f(a)",
    ],
    exclusions.DEVICE: ["self.make_streams(a)", "if a.stream and b: pass", "if a == b: self.make_streams(c)"],
}
TRIED = [
    "if not torch.compiler.is_compiling(): f(a)",
    "with record_function('x'): f(a)",
    "prevent(a)",
    "if a: f(a)",
    "if f(a):\n raise ValueError(1)\nf(a)",
]

PACKAGE = {
    "__init__": "",
    "shard": """
        import time
        from vendor_fsdp import sizes
        def first(rank, world_size):
            if world_size == 1:
                return 0
            return rank * sizes.of_shard(world_size)
        def drain(items):
            while items:
                time.sleep(0.01)
                items.pop()
            return items
        def describe(rank, verbose=False):
            return f"rank {rank}"
        def never():
            return first(0, 1)
        """,
    "sizes": """
        class Options:
            strict: bool = True
        def of_shard(world_size):
            size = 8 // world_size
            if size > 100:
                size = 100
            return size
        def head(size):
            return size // 2
        def tail(size):
            return size - size // 2
        """,
}
TESTS = {
    "test_shard": """
        from vendor_fsdp import shard
        class TestShard(unittest.TestCase):
            def test_first(self): self.assertEqual(shard.first(1, 2), 4)
            def test_drain(self): self.assertEqual(shard.drain([1]), [])
            def test_describe(self): shard.describe(0)
            def test_unfit(self): self.fail("it fails in any case")
        """,
    # Tests that kill a mutant only because the processes that they start have the change: forks and fresh interpreters.
    "test_processes": """
        class TestProcesses(unittest.TestCase):
            def test_fork(self):
                pid = os.fork()
                if pid == 0:
                    from vendor_fsdp import sizes
                    os._exit(sizes.head(8))
                self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 4)
            def test_fresh(self):
                code = "from vendor_fsdp import sizes; print(sizes.tail(8))"
                self.assertEqual(subprocess.check_output([sys.executable, "-c", code]), b"4\\n")
        """,
    "test_options": """
        from vendor_fsdp.sizes import Options
        class TestOptions(unittest.TestCase):
            def test_strict(self): self.assertTrue(Options.strict)
        """,
}
REACHES = {
    "test_shard::TestShard.test_first": ["shard.first", "sizes.of_shard"],
    "test_shard::TestShard.test_drain": ["shard.drain"],
    "test_shard::TestShard.test_describe": ["shard.describe"],
    "test_shard::TestShard.test_unfit": ["shard.describe"],  # it always fails, which proves nothing
    "test_processes::TestProcesses.test_fork": ["sizes.head"],
    "test_processes::TestProcesses.test_fresh": ["sizes.tail"],
    "test_options::TestOptions.test_strict": [],
}


def source(text: str, on_cpu: bool = True) -> Source:
    return Source(textwrap.dedent(text), "module", on_cpu)


def sites(text: str, operator: str) -> list[Mutant]:
    return [site for site in source(text).mutants.values() if site.operator == operator]


def last_difference(before: str, after: str) -> str:
    return [line for line in after.splitlines() if line not in before.splitlines()][-1].strip()


def make_map(reaches: Mapping[str, Sequence[str]]) -> ReachMap:
    executed = {}
    for test, functions in reaches.items():
        file, _, name = test.partition("::")
        executed[file, name] = Executed({f"vendor_fsdp.{each}" for each in functions}, 0.01)
    return build("any", executed)


class TestOperators(unittest.TestCase):
    """Without it, a mutant could change nothing, and the report would say that it survived the tests."""

    def test_each_makes_the_changes_that_it_is_for(self):
        self.assertEqual({*EXAMPLES, *REWRITES}, {operator.name for operator in OPERATORS})
        for operator, examples in (EXAMPLES | REWRITES).items():
            self.assertIsInstance(examples[0], tuple, f"{operator} has no example that it changes")
            for example in examples:
                text, expected = (example, set[str]()) if isinstance(example, str) else example
                with self.subTest(operator, text=text):
                    changes = [site.change for site in sites(text, operator)]
                    shown = {change[1] if operator in REWRITES else last_difference(*change) for change in changes}
                    self.assertEqual(shown, expected)

    def test_every_change_of_the_installed_fsdp_changes_something(self):
        """All mutants change the text of their statement. The bytecode of a sample is compared as well."""
        mutants = list(mutant.all_of([options.PACKAGE], on_cpu=True))
        self.assertGreater(len(mutants), 5000)
        for each in mutants:
            self.assertNotEqual(*each.change, each.id)
        paths = {each.path: each.path.read_bytes() for each in mutants}
        before = {path: meaning(compile(text, path, "exec", dont_inherit=True)) for path, text in paths.items()}
        for each in random.Random(7).sample(mutants, 40):
            with self.subTest(each.id):
                changed = hook.changed_code(paths[each.path], str(each.path), each.id)
                self.assertNotEqual(meaning(changed), before[each.path])

    def test_ids_name_the_function_whose_tests_could_notice(self):
        text = "def f(a):\n if a: g(a, 1)\n def h(): return a\n"
        text += "class C:\n def m(self): self.x = 1\nfor i in y: i.z = 1\n"
        sites_by_id = source(text).mutants
        expected = {"module:f:negate:1", "module:f.<locals>.h:return:1", "module:C.m:assignment:1"}
        self.assertLessEqual(expected | {"module:<module>:assignment:1"}, sites_by_id.keys())
        functions = {sites_by_id[id].function for id in expected}
        self.assertEqual(functions, {"module.f", "module.f.<locals>.h", "module.C.m"})
        for id in sites_by_id:
            with self.subTest(id):  # a process that looks up one mutant must find the same change
                alone = Source(text, "module", True, only=id).mutants[id]
                self.assertEqual(alone.change, sites_by_id[id].change)

    def test_ids_outlive_changes_elsewhere(self):
        text = "def f(a):\n    if a == 1: g(a, 2)\n"
        moved = "import x\n\ndef other(a):\n    return a == 1\n\n" + text
        self.assertLessEqual(source(text).mutants.keys(), source(moved).mutants.keys())

    def test_lines_stay(self):
        """The code of a mutant has no line number that the original function does not have."""
        text = "x = 0\ndef f(a):\n    g(a,\n      1)\n    if a == 1:\n        h(a)\n    return a\n"
        original = compile(text, "m", "exec")
        for id in source(text).mutants:
            with self.subTest(id):
                changed = hook.changed_code(text.encode(), "m", id)
                new = {line for _, _, line in function_code(changed, "f").co_lines() if line}
                old = {line for _, _, line in function_code(original, "f").co_lines() if line}
                self.assertLessEqual(new, old)
                self.assertIn(7, new)

    def test_moved_statements_are_marked_and_shown(self):
        text = "def f(out):\n    for a in 'xy':\n        out(a)\n        out('end')\n"
        (site,) = sites(text, "indent")
        self.assertEqual(site.diff, "      out(a)\n-     out('end')\n+ out('end')")
        seen: list[str] = []
        namespace: dict[str, Any] = {"__mutant_reached__": lambda: seen.append("reached")}
        exec(hook.changed_code(text.encode(), "m", site.id), namespace)
        namespace["f"](seen.append)
        self.assertEqual(seen, ["reached", "x", "y", "end"])

    def test_code_that_no_test_can_judge_is_counted_by_reason(self):
        for reason, texts in EXCLUDED.items():
            for text in texts:
                with self.subTest(text):
                    reasons = {site.excluded for site in source(text).mutants.values()}
                    self.assertEqual(reasons, {reason})
        (site,) = Source("x = y + z", "torch.distributed.checkpoint.logger", True).mutants.values()
        self.assertEqual(site.excluded, exclusions.LOGGING)
        for text in TRIED:
            with self.subTest(text):
                self.assertEqual({site.excluded for site in sites(text, "call")}, {None})

    def test_order_of_streams_is_tried_on_every_device(self):
        """Other code about streams is tried only on a device that has streams."""
        code = "with a.stream(b): b.wait_event(c)"
        on_cpu = {site.operator: site.excluded for site in source(code).mutants.values()}
        self.assertEqual(on_cpu, {"context": exclusions.DEVICE, "streams": None})
        self.assertEqual({site.excluded for site in source(code, on_cpu=False).mutants.values()}, {None})


def meaning(code: types.CodeType) -> object:
    """Everything in a code object that decides on its behaviour, without the marker."""
    constants = tuple(meaning(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts)
    names = tuple(name for name in code.co_names if name != "__mutant_reached__")
    return code.co_code, constants, names, code.co_flags, getattr(code, "co_exceptiontable", b"")


def function_code(code: types.CodeType, name: str) -> types.CodeType:
    return next(each for each in code.co_consts if isinstance(each, types.CodeType) and each.co_name == name)


class TestDraw(unittest.TestCase):
    """Without it, a sample of mutants could leave out FSDP1 or FSDP2, or change entirely when a few mutants do."""

    def mutants(self, count: int, module: str) -> list[Mutant]:
        return list(Source(f"x = [{'1,' * count}]", module, True).mutants.values())

    def test_as_many_of_each_family(self):
        modules = ("fsdp._flat_param", "fsdp._fully_shard._fsdp_param", "torch.distributed.checkpoint.planner")
        mutants = [each for module in modules for each in self.mutants(30, module)]
        sampled = mutant.sample(mutants, 30, seed=1)
        self.assertEqual(Counter(each.family for each in sampled), {"FSDP1": 10, "FSDP2": 10, "related": 10})
        self.assertEqual(sampled, mutant.sample(mutants, 30, seed=1))
        self.assertNotEqual(sampled, mutant.sample(mutants, 30, seed=2))

    def test_related_modules_are_changed_unless_a_package_is_named(self):
        named = {name for package in RELATED for name, _ in mutant.files_of(package)}
        self.assertLessEqual({"torch.nn.utils.clip_grad", "torch.distributed.checkpoint.state_dict"}, named)
        given = [options.parse(["--map", __file__, *more]).packages for more in ([], ["--package", "vendor_fsdp"])]
        self.assertEqual(given, [(options.PACKAGE, *RELATED), ("vendor_fsdp",)])

    def test_few_move_when_mutants_come_and_go(self):
        """With one more mutant in the module, at most one of the sampled ones changes."""
        before, after = ({each.id for each in mutant.sample(self.mutants(n, "m"), 20, 1)} for n in (100, 101))
        self.assertGreaterEqual(len(before & after), 19)


class TestTests(FolderCase):
    """Without it, a mutant could be tried without a test that kills it, or be called equivalent where it is not."""

    def test_a_process_has_few_tests_that_are_close(self):
        tests = [Reached("a", f"T.t{n}", 0.1, n) for n in range(9)]
        tests[1:1] = [Reached("b", "T.x", 0.1, 0)]
        names = [[f"{test.file}.{test.test[2:]}" for test in batch] for batch in batches(tests)]
        expected = [["a.t0", "a.t1", "a.t2", "a.t3"], ["b.x"], ["a.t4", "a.t5", "a.t6", "a.t7"], ["a.t8"]]
        self.assertEqual(names, expected)
        self.assertEqual([len(batch) for batch in batches(tests, 8)], [8, 1, 1])

    def test_the_first_that_fit_and_at_least_one(self):
        tests = [Reached("a", f"T.t{n}", 2.0, n) for n in range(4)]
        self.assertEqual([len(within(budget, tests)) for budget in (1, 2, 5, 6, 100)], [1, 1, 2, 3, 4])
        self.assertEqual(within(1, []), [])

    def test_what_is_equivalent_on_a_host_counts_there_only(self):
        path = self.write_json("equivalent.json", {"mutants": [{"id": "a"}, {"id": "b", "only": "host"}]})
        self.assertEqual([*mutant.equivalents(path, on_cpu=True)], ["a", "b"])
        self.assertEqual([*mutant.equivalents(path, on_cpu=False)], ["a"])

    def test_a_class_without_functions_has_the_tests_that_name_it(self):
        known = make_map({"a::T.t": ["m.f"], "b::T.t": ["m.f"]})
        tests = Tests(known, {"a": "from m import Options", "b": "NoOptions"})
        self.assertEqual([test.file for test in tests.of("vendor_fsdp.m.Options")], ["a"])
        self.assertEqual([test.file for test in tests.of("vendor_fsdp.m.f")], ["a", "b"])
        self.assertEqual(tests.of("vendor_fsdp.m.other"), [])


class TestStatements(TreeCase):
    """Without it, a mutant's tests could never run its statement, or an outdated map could hide those that do."""

    def test_only_tests_that_run_the_statement(self):
        path = self.root / "m.py"
        path.write_text("def f(x):\n    if x:\n        x = x + 1\n    return x\n")
        _, body, last = (Statement("vendor_fsdp.m.f", number, 1, 1) for number in range(3))
        ran = {"a": [last], "b": [body, last], "c": [last]}
        executed = {(name, "T.t"): Executed({"vendor_fsdp.m.f"}, 0.0, its) for name, its in ran.items()}
        source = Source(path.read_bytes(), "vendor_fsdp.m", True, path=path)
        changed = source.mutants["vendor_fsdp.m:f:arithmetic:1"]
        for digest, files in ((digest_of(path.read_bytes()), ["b"]), ("other", ["b", "a", "c"])):
            known = build("2.0", executed, {"vendor_fsdp.m": Module(digest, {}, {})}, [body, last])
            with self.subTest(digest=digest):
                tests = Tests(known, dict.fromkeys("abc", ""))
                self.assertEqual([test.file for test in tests.for_mutant(changed)], files)
                self.assertEqual(tests.has_statement(changed), digest != "other")

    def test_a_statement_that_the_map_does_not_have(self):
        """If none of the first tests runs it, no others are tried."""
        for is_known, is_run, ran in ((False, False, 16), (True, False, 60), (False, True, 60)):
            with self.subTest(is_known=is_known, is_run=is_run):
                tests = unittest.mock.Mock(**{"has_statement.return_value": is_known})
                tests.for_mutant.return_value = [Reached("a", f"T.t{n}", 0.1, n) for n in range(60)]
                given = Namespace(packages=(), budget=math.inf, jobs=1, test_directory=Path())
                trials = Trials(given, "cpu", tests, {})
                trials._children = unittest.mock.Mock(directory=self.root / str(is_run))
                (changed,) = sites("x = not a", "negate")
                trials._reached(changed.id).parent.mkdir(exist_ok=True)
                if is_run:
                    trials._reached(changed.id).touch()
                story = trials._story(changed)
                work = next(story)
                with self.assertRaises(StopIteration) as over:
                    while True:
                        results = [unittest.mock.Mock(outcome=State.PASSED) for _ in work.tests]
                        work = story.send(unittest.mock.Mock(seconds=0.0, tests=results))
                found = over.exception.value
                outcome = MutantOutcome.SURVIVED if is_run else MutantOutcome.NOT_REACHED
                self.assertEqual((found.outcome, found.executed), (outcome, ran))

    def test_a_module_outside_of_the_map_has_the_tests_of_what_uses_it(self):
        texts = {
            "__init__": "",
            "helper": "def _half(x):\n    return x / 2\ndef scale(x):\n    return _half(x)\n",
            "user": "from vendor.helper import scale\ndef train(x):\n    return scale(x)\n",
        }
        write_package(self.root, "vendor", texts)
        entered = {"a": "vendor.user.train", "b": "vendor.user.other", "c": "vendor.user.other"}
        executed = {(file, "T.t"): Executed({name}) for file, name in entered.items()}
        known = build("2.0", executed, {"vendor.user": Module.of(texts["user"].encode(), "vendor.user")})
        path = self.root / "vendor/helper.py"
        mutants = Source(path.read_bytes(), "vendor.helper", True, path=path).mutants
        inner = mutants["vendor.helper:_half:arithmetic:1"]
        tests = Tests(known, {"a": "", "b": "from vendor.helper import scale", "c": "upscale()"})
        self.assertEqual(sorted(test.file for test in tests.for_mutant(inner)), ["a", "b"])


class TestProcesses(unittest.TestCase):
    """Without it, modules that the fork server itself imports could not be changed."""

    def test_a_mutant_is_forked_unless_the_server_needs_its_module(self):
        modules = {"torch.distributed.fsdp.wrap": True, "torch.distributed.checkpoint.utils": True}
        modules |= {"torch.nn.utils.clip_grad": False, "torch.distributed.tensor._api": False}
        given = Namespace(packages=(options.PACKAGE, *RELATED), test_directory=Path(), patience=1.0)
        trials = Trials(given, "cpu", Tests(make_map({}), {}), {})
        trials._children = unittest.mock.Mock(directory=Path())
        for id, may_fork in {"": True, **{f"{module}:f:key:1": forked for module, forked in modules.items()}}.items():
            with self.subTest(id), unittest.mock.patch.object(trials_module, "TestProcess") as process:
                trials._start(Work(id, (Reached("a", "T.t", 1.0, 1),)))
                self.assertEqual(process.return_value.start.call_args.kwargs, {"may_fork": may_fork})

    def test_a_child_that_may_not_fork_is_a_fresh_interpreter(self):
        with tempfile.TemporaryDirectory() as folder, Children("mutants-") as children:
            server = unittest.mock.Mock(ready=True)
            server.fork.side_effect = AssertionError("it was forked")
            children._server = server
            try:
                children.start(["-c", "pass"], [], dict(os.environ), Path(folder), Path(folder), may_fork=False)
            finally:
                children._server = None
            while not children.wait():
                pass


class TestHook(TreeCase):
    """Without it, a trial could change the installed torch, or a mutant that was never made could count as survived."""

    def setUp(self) -> None:
        super().setUp()
        write_package(self.root)

    def run_python(self, code: str, **environment: str) -> str:
        """The output of a new interpreter that finds the package."""
        environment = {**ENVIRONMENT, "PYTHONPATH": f"{self.root}{os.pathsep}{CHECKOUT}", **environment}
        command = [sys.executable, "-c", textwrap.dedent(code)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.strip()

    def test_the_change_is_made_in_memory_and_noted_when_it_runs(self):
        reached = self.root / "reached"
        before = {path: path.read_bytes() for path in self.root.rglob("*.py")}
        output = self.run_python(
            f"""
            from pathlib import Path
            from torch_fsdp_tests.tools.mutants import hook
            hook.install("vendor_fsdp.sizes:of_shard:number:1")
            from vendor_fsdp import sizes
            print(Path({str(reached)!r}).exists(), sizes.of_shard(3), Path({str(reached)!r}).exists())
            """,
            **{hook.REACHED: str(reached)},
        )
        self.assertEqual(output, "False 3 True")  # 9 // 3
        self.assertEqual(before, {path: path.read_bytes() for path in self.root.rglob("*.py")})
        self.assertEqual(self.run_python("from vendor_fsdp import sizes; print(sizes.of_shard(3))"), "2")

    def test_what_was_imported_is_imported_anew_into_the_same_objects(self):
        output = self.run_python(
            """
            import sys, types
            from torch_fsdp_tests.tools.mutants import hook
            import vendor_fsdp.shard
            other = types.ModuleType("other")
            other.options, other.package = vendor_fsdp.sizes.Options, vendor_fsdp  # as modules of torch refer to FSDP
            sys.modules["other"], sizes = other, vendor_fsdp.sizes
            forgotten = hook.forget(["vendor_fsdp"])
            print(sorted(forgotten), hasattr(sizes, "of_shard"))
            hook.install("vendor_fsdp.sizes:of_shard:number:1", forgotten)
            from vendor_fsdp import shard
            print(shard.first(1, 3), shard.sizes is sizes, sizes.__spec__.name, sizes.__file__[-8:])
            """
        )
        names = ["other", "vendor_fsdp", "vendor_fsdp.shard", "vendor_fsdp.sizes"]
        self.assertEqual(output, f"{names} False\n3 True vendor_fsdp.sizes sizes.py")

    def test_it_does_not_come_too_late_in_silence(self):
        reached = self.root / "m.reached"
        output = self.run_python(
            """
            from torch_fsdp_tests.tools.mutants import hook
            import vendor_fsdp.sizes
            try: hook.install("vendor_fsdp.sizes:of_shard:number:1")
            except RuntimeError as error: print(error)
            """,
            **{hook.REACHED: str(reached)},
        )
        self.assertIn(output, reached.with_suffix(hook.BROKEN).read_text())
        self.assertEqual(output, "vendor_fsdp.sizes was imported before it could be changed")


def write_package(root: Path, package: str = "vendor_fsdp", texts: Mapping[str, str] = PACKAGE) -> None:
    (root / package).mkdir()
    for name, text in texts.items():
        (root / package / f"{name}.py").write_text(textwrap.dedent(text))


def selected(ids: Iterable[str], package: str = "vendor_fsdp.") -> list[str]:
    """The options that select these mutants."""
    return [word for id in ids for word in ("--mutant", f"{package}{id}")]


class CommandCase(TreeCase):
    replaces_packages = False

    def setUp(self) -> None:
        super().setUp()
        write_package(self.root)
        self.write(TESTS)
        self.map, self.output = self.root / "map.json", self.root / "out"
        self.map.write_text(make_map(REACHES).as_text())

    def command(self, *arguments: object) -> list[str]:
        command = [sys.executable, *"-m torch_fsdp_tests.tools.mutants --package vendor_fsdp --map".split(), self.map]
        command += ["--test-directory", self.tree, "--output", self.output, *arguments]
        return [*map(str, command)]

    def start(self, *arguments: object, **more: Any) -> subprocess.Popen[str]:
        path = os.pathsep.join([str(self.root), str(CHECKOUT)])
        return super().start(*arguments, **{"limit": 120, "cwd": self.root, **more, "env": {"PYTHONPATH": path}})

    def findings(self) -> dict[str, MutantResult]:
        """The findings of the record, by the id without the package's name."""
        lines = (self.output / "findings.jsonl").read_text().splitlines()[1:]
        findings = [from_data(MutantResult, json.loads(line)) for line in lines]
        self.assertEqual(len(findings), len({finding.id for finding in findings}), "a mutant was tried twice")
        return {finding.id.removeprefix("vendor_fsdp."): finding for finding in findings}

    def check_outcomes(self, expected: Mapping[str, MutantOutcome], *arguments: object) -> dict[str, MutantResult]:
        self.run_command(*selected(expected), *arguments)
        self.assertEqual(self.code, 0, self.out + self.err)
        findings = self.findings()
        self.assertEqual({id: finding.outcome for id, finding in findings.items()}, dict(expected), self.out + self.err)
        return findings


class TestCommand(CommandCase):
    """Without it, the share of killed mutants could be wrong, because a hang or an unfit test is miscounted."""

    def test_what_becomes_of_mutants(self):
        """The patience makes a hang end after seconds. There are too few mutants for a server."""
        change = "- while items:\n+ while not items:"
        drain = textwrap.dedent(PACKAGE["shard"]).partition("def drain")[2].partition("\ndef")[0]
        code = hashlib.sha256(f"def drain{drain}".encode()).hexdigest()[:12]
        entry = {"id": "vendor_fsdp.shard:drain:negate:1", "change": change, "code": code, "why": "an argument"}
        stale = {"id": "vendor_fsdp.shard:first:arithmetic:1", "change": "another", "code": code, "why": "stale"}
        older = {"id": "vendor_fsdp.shard:drain:call:2", "change": "- items.pop()\n+ pass", "code": "0", "why": "stale"}
        equivalent = self.write_json("equivalent.json", {"mutants": [entry, stale, older]})
        test = "test_shard::TestShard.test_"
        killed = {
            "shard:first:arithmetic:1": (f"{test}first", "failed"),
            "shard:drain:call:2": (f"{test}drain", "timed out"),
            "sizes:Options:default:1": ("test_options::TestOptions.test_strict", "failed"),  # at import
            "sizes:head:arithmetic:1": ("test_processes::TestProcesses.test_fork", "failed"),
            "sizes:tail:arithmetic:1": ("test_processes::TestProcesses.test_fresh", "failed"),
        }
        others = {
            "shard:drain:negate:1": MutantOutcome.EQUIVALENT,
            "shard:describe:default:1": MutantOutcome.SURVIVED,
            "shard:first:number:2": MutantOutcome.NOT_REACHED,  # the line never runs
            "shard:never:exchange:1": MutantOutcome.NOT_REACHED,  # no test enters the function
        }
        arguments = ("--equivalent", equivalent, "--patience", 0.12, "-j", 4)
        findings = self.check_outcomes(dict.fromkeys(killed, MutantOutcome.KILLED) | others, *arguments)
        self.assertEqual({id: (findings[id].by, findings[id].how) for id in killed}, killed)
        self.assertEqual(findings["shard:drain:negate:1"].why, "an argument")
        survived = findings["shard:describe:default:1"]
        self.assertEqual(set(survived.tests), {f"{test}describe", f"{test}unfit"})
        self.assertIn("\n    + def describe(rank, verbose=True):", self.out)
        self.assertRegex(self.out, r"(?m)^all +5 +1 +2 +1 +0 +83.3 %$")
        data = json.loads((self.output / "mutants.json").read_text())
        self.assertEqual([data[kind] for kind in ("killed", "survived", "not reached")], [5, 1, 2])
        self.assertEqual(data["share"], 0.8333)

    def test_a_change_that_cannot_be_made_is_undecided(self):
        """The test of the first mutant rewrites the function that the second mutant would change."""
        path = self.root / "vendor_fsdp" / "sizes.py"
        rewrite = f"open({str(path)!r}, 'w').write('def of_shard(world_size): return 4')"
        self.write({"test_rewrite": f"class TestX(unittest.TestCase):\n    def test_x(self): {rewrite}\n"})
        self.map.write_text(make_map({**REACHES, "test_rewrite::TestX.test_x": ["shard.never"]}).as_text())
        rewriting, late = "shard:never:exchange:1", "sizes:of_shard:arithmetic:1"
        findings = self.check_outcomes({rewriting: MutantOutcome.NOT_REACHED, late: MutantOutcome.UNDECIDED}, "-j", 1)
        self.assertIn("has no place for the mutant", findings[late].why)

    def test_a_budget(self):
        """The fast test does not run the statement, and the budget is too small for the slow test."""
        fast = Executed({"vendor_fsdp.shard.first"}, 1.0)
        slow = Executed({"vendor_fsdp.shard.first", "other"}, 30.0)
        tests = {("test_shard", "TestShard.test_drain"): fast, ("test_shard", "TestShard.test_first"): slow}
        self.map.write_text(build("any", tests).as_text())
        id = "shard:first:arithmetic:1"
        findings = self.check_outcomes({id: MutantOutcome.NOT_REACHED}, "--budget", 1)
        self.assertEqual(findings[id].why, "none of the tests runs the statement, of the first 1 of 2")
        self.assertEqual(self.check_outcomes({id: MutantOutcome.KILLED}, "--budget", 40)[id].executed, 2)

    def test_the_list_of_mutants(self):
        out = self.run_command("--list", "--module", "sizes")
        self.assertIn("vendor_fsdp.sizes:of_shard:arithmetic:1  line 5, 1 test\n- size = 8 // world_size\n+", out)
        self.assertNotIn("vendor_fsdp.shard", out)
        self.assertFalse((self.output / "findings.jsonl").exists())
        out = self.run_command("--list", "--kind", "default", "negate")
        kinds = {line.split(":")[2] for line in out.splitlines() if line.startswith("vendor_fsdp.")}
        self.assertEqual(kinds, {"default", "negate"})

    def test_bad_arguments_in_a_sentence(self):
        empty = self.write_json("empty.json", {})
        cases: list[tuple[list[object], str]] = [
            (["--mutant", "vendor_fsdp.sizes:of_shard:number:99"], "vendor_fsdp has no mutant vendor_fsdp.sizes:of_sh"),
            (["--package", "no_such_fsdp"], "there is no package no_such_fsdp"),
            (["--map", empty], "is not a map of what tests reach"),
            (["--map", self.root / "gone"], "gone is not a file that can be read; name another one"),
            (["--equivalent", self.root], "--equivalent: "),
            (["--output", empty / "x"], "empty.json/x cannot be written to"),
            (["--module", "nothing"], "no mutant is selected"),
            (["--sample", "0"], "argument --sample: '0' is not a whole number from 1 to"),
            (["--sample", "3", "--mutant", "x"], "--mutant and --sample cannot be used together"),
            (["--kind", "stream"], "argument --kind: invalid choice: 'stream' (choose from"),
            (["-i", "nowhere"], "unknown test 'nowhere'"),
            (["--budget", "0"], "--budget must be greater than 0"),
        ]
        self.check_errors(cases)


# A test that a model's gradients are not reduced, on two ranks.
OF_TORCH = """
assert "torch" in sys.modules  # this process is a fork of the server
import torch
# Ranks that are not forked would get this path.
assert "TORCH_FSDP_TESTS_MUTANT" not in os.environ or {site!r} in sys.path
from torch.distributed.fsdp import fully_shard
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
class TestSync(FSDPTest):
    world_size = 2
    def test_no_reduction(self):
        model = fully_shard(torch.nn.Linear(2, 2, device=self.device))
        model.set_requires_gradient_sync(False)
        model(torch.ones(1, 2, device=self.device)).sum().backward()
        self.assertIsNone(model.weight.grad)
if __name__ == "__main__": run_tests()  # and not unittest.main
"""


class TestOfTorch(CommandCase):
    """Without it, a mutant of torch's FSDP could be absent in the ranks, and be reported as a survivor."""

    def test_ranks_have_the_change(self):
        """There are enough mutants for a server, which has forgotten the FSDP that PyTorch's compiler imported."""
        function = "torch.distributed.fsdp._fully_shard._fully_shard:FSDPModule.set_requires_gradient_sync"
        self.write({"test_sync": OF_TORCH.format(site=str(hook.SITE))})
        tests = {("test_sync", "TestSync.test_no_reduction"): Executed({function.replace(":", ".")}, 2.0)}
        self.map.write_text(build("any", tests).as_text())
        # The test checks neither the setting for the reduction over replicas nor that submodules get the settings.
        expected = {f"{function}:{kind}": "survived" for kind in ("assignment:2", "default:1", "negate:1")}
        expected[f"{function}:assignment:1"] = "killed"
        where = ["--package", "torch.distributed.fsdp", "--module", "_fully_shard._fully_shard"]
        self.run_command(*where, *selected(expected, ""), "-j", 1, "--patience", 3, limit=900)
        self.assertEqual(self.code, 0, self.out + self.err)
        findings = self.findings()
        self.assertEqual({id: finding.outcome.value for id, finding in findings.items()}, expected, self.out)
        self.assertIn("is not None", findings[f"{function}:assignment:1"].why)


class TestInterrupted(CommandCase):
    """Without it, Ctrl-C could lose hours of findings, or ``--resume`` could mix those of two versions of PyTorch."""

    def test_nothing_is_lost_or_left_and_the_rest_follows(self):
        """The second mutant and a process that it starts wait for minutes. ``--resume`` tries the rest."""
        waits = """
        from vendor_fsdp import sizes
        class TestWaits(unittest.TestCase):
            def test_waits(self):
                if sizes.of_shard(2) != 4 and not os.path.exists({over!r}):
                    code = "import time; time.sleep(600)"
                    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
                    with open({pids!r}, "w") as file: file.write(f"{{os.getpid()}} {{child.pid}}.")
                    time.sleep(600)
                self.assertEqual(sizes.of_shard(2), 4)
        """
        pids, over = self.root / "pids", self.root / "over"
        self.write({"test_hangs": waits.format(pids=str(pids), over=str(over))})
        self.map.write_text(make_map({**REACHES, "test_hangs::TestWaits.test_waits": ["sizes.of_shard"]}).as_text())
        ids = ["shard:describe:default:1", "sizes:of_shard:arithmetic:1", "shard:never:exchange:1"]
        command = [*selected(ids), "-i", "test_hangs", "test_shard", "-j", 1]
        started = self.interrupt(self.start(*command), pids)
        self.assertEqual(self.code, 130, self.err)
        self.assertIn("--resume", self.err)
        self.assertEqual([*self.findings()], ids[:1])
        self.assertEqual([pid for pid in started if alive(pid)], [])
        over.touch()
        with (self.output / "findings.jsonl").open("a") as file:
            file.write('{"id": "cut sho')  # as a kill may leave it
        self.run_command(*command, "--resume")
        self.assertEqual(self.code, 0, self.err)
        self.assertEqual([*self.findings()], ids)

    def test_resume_rejects_findings_of_another_torch(self):
        self.output.mkdir()
        (self.output / "findings.jsonl").write_text('{"torch": "0.1"}\n')
        words = "is about torch '0.1', not"
        self.check_errors([([*selected(["shard:describe:default:1"]), "--resume"], words)])


if __name__ == "__main__":
    unittest.main()
