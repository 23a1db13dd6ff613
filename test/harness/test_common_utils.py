"""common_utils: equality, cleanup after tests, run_tests, and smaller functions."""

from __future__ import annotations

import collections
import functools
import gc
import importlib.util
import math
import os
import random
import re
import shutil
import sys
import tempfile
import threading
import types
import unittest
import unittest.mock
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runs import ROOT, Process, outputs

from torch_fsdp_tests import common_utils, installation, settings
from torch_fsdp_tests.common_utils import TestCase, check_leaked_tensors, run_tests, set_rng_seed, vacuous
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.process_state import SavedState, saved_state, watched_threads
from torch_fsdp_tests.settings import SEED_VARIABLE
from torch_fsdp_tests.verdict import stream

as_test_of_fsdp = functools.partial(unittest.mock.patch.object, vacuous, "is_judged", return_value=True)
Point = collections.namedtuple("Point", "x y")


class EqualityTest(TestCase):
    """Without it, ``assertEqual`` could pass for different values, or prove nothing."""

    def failure(self, x: object, y: object, *args: Any, **kwargs: Any) -> str:
        with self.assertRaises(AssertionError) as caught:
            self.assertEqual(x, y, *args, **kwargs)
        return str(caught.exception)

    def test_equal_values_of_every_kind(self):
        linear = torch.nn.Linear(1, 1)
        for x, y in [
            (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")])),
            (torch.tensor([1, 2]), [1, 2]),
            (torch.tensor(3), 3),
            (1.0, 1.0 + 1e-6),
            (2**70, 2**70),
            (np.array([1.0]), torch.tensor([1.0], dtype=torch.float64)),
            ({"a": [torch.ones(2), None]}, collections.OrderedDict(a=(torch.ones(2), None))),
            (Point(1, 2), [1, 2]),
            (torch.Size([2, 3]), (2, 3)),
            ({1, 2}, {2, 1}),
            (torch.float32, torch.float32),
            (torch.nn.Sequential(linear), [linear]),
            (torch.tensor(True), True),
            (torch.ones(2).to_sparse(), torch.ones(2).to_sparse().coalesce()),
        ]:
            with self.subTest(x=x, y=y):
                self.assertEqual(x, y)
                with self.assertRaises(AssertionError):
                    self.assertNotEqual(x, y)

    def test_unequal_values_of_every_kind(self):
        for x, y in [
            (torch.ones(2), torch.ones(3)),
            (torch.ones(1), torch.ones(1, dtype=torch.float64)),
            (torch.ones(1), None),
            (torch.ones(1), "1"),
            (1.0, 1.0 + 1e-4),
            (2**70, 2**70 + 1),
            ("a", b"a"),
            ([1], [1, 1]),
            ({"a": 1}, {"b": 1}),
            ({1}, {2}),
            (True, False),
            (torch.float32, torch.float64),
            (torch.nn.Sequential(torch.nn.ReLU()), torch.nn.Sequential(torch.nn.ReLU())),
        ]:
            with self.subTest(x=x, y=y):
                self.failure(x, y)
                self.assertNotEqual(x, y)

    def test_failure_tells_place_and_distance(self):
        expected = {"layer": [torch.zeros(3), torch.zeros(2, 3)], "step": 1, "tail": torch.zeros(1)}
        actual = {"layer": [torch.zeros(3), torch.zeros(2, 3)], "step": 2, "tail": torch.zeros(1)}
        actual["layer"][1][1, 2] = 0.5
        text = self.failure(actual, expected, "of rank 3")
        self.assertRegex(text, r"^at \['layer'\]\[1\]: Tensor-likes are not close!")
        self.assertRegex(text, r"Greatest absolute difference: 0\.5 at index \(1, 2\)")
        self.assertRegex(text, r"1 more differ: \['step'\]\nof rank 3$")

    def test_failure_shows_what_is_too_much(self):
        text = self.failure({"left": ["a file"]}, {"left": []})
        self.assertEqual(text, "at ['left']: The lengths of the sequences do not match: 1 != 0\n['a file'] is not []")
        self.assertLess(len(self.failure([torch.zeros(10_000)] * 99, ["x" * 10_000])), 2_000)

    def test_failure_counts_the_places_it_does_not_name(self):
        text = self.failure(list(range(9)), list(range(1, 10)))
        self.assertRegex(text, r"8 more differ: (\[\d\](, )?){5} and 3 others$")

    def test_tolerances(self):
        self.failure(torch.tensor(1.0), torch.tensor(1.1))
        self.assertEqual(torch.tensor(1.0), torch.tensor(1.1), atol=0.2, rtol=0)
        self.assertEqual(torch.tensor(1.01, dtype=torch.bfloat16), torch.tensor(1.0, dtype=torch.bfloat16))
        with self.assertRaisesRegex(ValueError, "both atol and rtol"):
            self.assertEqual(torch.tensor(1.0), torch.tensor(1.0), atol=0.2)
        tolerances = {torch.float16: 1e-3, torch.bfloat16: 1.6e-2, torch.float32: 1.3e-6, torch.float64: 1e-7}
        for dtype, rtol in tolerances.items():
            expected = torch.tensor(100.0, dtype=dtype)  # large, so that the absolute tolerance hardly matters
            self.failure((100 * (1 + 2 * rtol)) * torch.ones_like(expected), expected)
            self.assertEqual(100 * (1 + 0.5 * rtol) * torch.ones_like(expected), expected)
        self.precision = 0.2
        self.assertEqual(torch.tensor(1.0), torch.tensor(1.1))
        self.assertEqual(1.0, 1.1, atol=0, rtol=0)
        self.assertEqual(TestCase().precision, 0)

    def test_switches(self):
        self.assertEqual(torch.ones(1), torch.ones(1, dtype=torch.float64), exact_dtype=False)
        self.failure(torch.tensor(float("nan")), torch.tensor(float("nan")), equal_nan=False)
        column = torch.ones(2, 2).t()[:, :1]
        self.assertEqual(column, torch.ones(2, 1))
        self.failure(torch.ones(4, 2).t(), torch.ones(2, 4), exact_stride=True)
        coalesced = torch.ones(2).to_sparse().coalesce()
        scattered = torch.sparse_coo_tensor([[0, 1]], torch.ones(2), (2,), check_invariants=True)
        self.assertEqual(coalesced, scattered)
        self.failure(coalesced, scattered, exact_is_coalesced=True)

    def test_callable_message_and_invalid_comparisons(self):
        self.assertEqual(self.failure(1, 2, msg=lambda text: f"<{text.splitlines()[0]}>"), "<Scalars are not equal!>")
        with self.assertRaises(ValueError):
            self.assertEqual(torch.ones(2), 1)

    def test_comparisons_that_prove_nothing(self):
        """They pass here. In a test of FSDP they fail, unless ``may_be`` says that they are meant."""
        one, inf = torch.ones(2), float("inf")
        for kind, x, y in [
            ("same", one, one),
            ("same", one, one.view(2)),
            ("same", one, one.detach()),
            ("same", {"a": one}, {"a": one}),
            ("same", ours := {"a": 1}, ours),
            ("empty", [], []),
            ("empty", set(), set()),
            ("empty", {"a": {}}, {"a": {}}),
            ("empty", {"a": torch.ones(0)}, {"a": torch.ones(0)}),
            ("zero", [torch.zeros(2), torch.ones(0)], [torch.zeros(2), torch.ones(0)]),
            ("zero", torch.tensor([0, 0]), torch.tensor([0, 0])),
            ("zero", torch.tensor([False]), torch.tensor([False])),
            ("zero", torch.zeros(2).to_sparse(), torch.zeros(2).to_sparse()),
            ("meta", one.to("meta"), one.to("meta")),
            ("small", torch.tensor([1e-6]), torch.tensor([0.0])),
            ("small", [one, torch.tensor([1e-6])], [one + 0, torch.tensor([2e-6])]),
            ("nonfinite", torch.tensor([1.0, inf]), torch.tensor([1.0, inf])),
            ("nonfinite", torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan])),
            ("nonfinite", {"loss": inf}, {"loss": inf}),
        ]:
            with self.subTest(kind=kind, x=x):
                self.assertEqual(x, y)
                with as_test_of_fsdp():
                    self.assertIn(f"may_be={kind!r}", self.failure(x, y))
                    self.assertEqual(x, y, may_be=kind)
                    self.assertEqual(x, y, may_be=tuple(vacuous.KINDS))
                    with self.assertRaises(AssertionError):
                        self.assertNotEqual(x, y)

    def test_comparisons_that_prove_something(self):
        module, one = torch.nn.Linear(1, 1), torch.ones(2)
        with as_test_of_fsdp():
            for x, y in [
                ([torch.zeros(2), one], [torch.zeros(2), one + 0]),
                ({"a": torch.ones(0), "b": one}, {"a": torch.ones(0), "b": one + 0}),
                ({"a": {}, "b": 1}, {"a": {}, "b": 1}),
                (one[:1], one[1:]),
                (torch.tensor([1e-6, 1.0]), torch.tensor([1e-6, 1.0])),
                (torch.tensor(0.0), 0.0),
                (module, module),
                ([0, None, ""], [0, None, ""]),
                (torch.ones(2, dtype=torch.float8_e4m3fn), torch.ones(2, dtype=torch.float8_e4m3fn)),
            ]:
                self.assertEqual(x, y)

    def test_a_list_is_not_cast_to_a_dtype_that_lacks_its_values(self):
        whole, truths = torch.tensor([1, 2]), torch.tensor([True, False])
        for tensor, values in [(whole, [1.5, 2.5]), (truths, [2, 0]), (torch.ones(1), [1 + 2j])]:
            self.assertIn("cannot have the values", self.failure(tensor, values))
            self.assertIn("cannot have the values", self.failure(values, tensor))
        for tensor, values in [
            (whole, [1.0, 2.0]),
            (truths, [1, 0]),
            (torch.tensor([0.1], dtype=torch.float64), [0.1]),
        ]:
            self.assertEqual(tensor, values)

    def test_a_tensor_without_values_equals_none_with_values(self):
        self.assertIn("only one of the tensors has values", self.failure(torch.ones(2), torch.ones(2, device="meta")))

    def test_words_that_name_no_kind_are_refused(self):
        with self.assertRaisesRegex(
            ValueError, "may_be has vacuous, and can only have same, empty, zero, meta, small, nonf"
        ):
            self.assertEqual(1, 1, may_be=("same", "vacuous"))

    def test_only_tests_of_fsdp_are_judged(self):
        self.assertFalse(vacuous.is_judged(type(self)))
        for path, expected in {"test/distributed/checkpoint/test_x.py": True, "test/dispatch/test_x.py": False}.items():
            other = types.ModuleType("other")
            other.__file__ = str(installation.ROOT / path)
            with unittest.mock.patch.dict(sys.modules, other=other):
                self.assertEqual(vacuous.is_judged(type("Other", (TestCase,), {"__module__": "other"})), expected)

    def test_expected_text(self):
        self.assertExpectedInline(torch.Size([2]), """torch.Size([2])""")
        self.assertExpectedInline("# gone\n\nx", """x""", ignore_comments=True, ignore_empty_lines=True)


class StateTest(TestCase):
    """Without it, a setting that a test leaves could change the tests after it."""

    def test_changed_state_is_restored_and_named(self):
        def change():
            os.environ["TORCH_FSDP_TESTS_SCRATCH"] = "1"
            torch.set_default_dtype(torch.float64)
            torch.set_default_device("meta")
            torch.set_num_threads(torch.get_num_threads() + 1)
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.set_grad_enabled(False)
            torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
            torch.overrides.BaseTorchFunctionMode().__enter__()
            os.chdir(tempfile.gettempdir())
            random.random()

        sampled = random.Random()
        sampled.setstate(random.getstate())
        before = SavedState()
        with saved_state() as leaks:
            change()
            self.assertEqual(leaks, [])
        self.assertEqual(before.restore(), [])
        self.assertEqual(random.random(), sampled.random())
        text = "\n".join(leaks)
        words = ["environment variable TORCH_FSDP_TESTS_SCRATCH set", "default dtype", "default device"]
        words += ["function modes", "number of threads", "deterministic-algorithms", "grad mode", "cudnn.benchmark"]
        words += ["working directory"]
        for word in words:
            self.assertIn(word, text)
        self.assertEqual(len(leaks), len(words), text)

    def test_nothing_changed_is_nothing_said(self):
        with saved_state() as leaks, torch.no_grad(), torch.device("meta"):
            torch.rand(1)
            np.random.rand()
        self.assertEqual(leaks, [])

    def test_a_removed_variable_comes_back(self):
        with unittest.mock.patch.dict(os.environ, {"TORCH_FSDP_TESTS_SCRATCH": "kept"}):
            with saved_state() as leaks:
                del os.environ["TORCH_FSDP_TESTS_SCRATCH"]
            self.assertEqual(os.environ["TORCH_FSDP_TESTS_SCRATCH"], "kept")
        self.assertEqual(leaks, ["removed the environment variable TORCH_FSDP_TESTS_SCRATCH"])

    def test_an_exception_that_ends_a_thread_is_named_once(self):
        def fails(name: str) -> None:
            thread = threading.Thread(target=self.fail, args=("no",), name=name)
            thread.start()
            thread.join()

        printed: list[threading.ExceptHookArgs] = []
        with unittest.mock.patch.object(threading, "excepthook", printed.append):
            with watched_threads() as outer:
                with watched_threads() as inner:
                    fails("a")
                fails("b")
            fails("c")
        self.assertEqual((outer, inner), tuple([f"let the thread {n!r} end with AssertionError: no"] for n in "ba"))
        self.assertEqual(len(printed), 3)

    def test_seed(self):
        def samples():
            return random.random(), np.random.rand(), torch.rand(2)

        set_rng_seed(7)
        first = samples()
        with unittest.mock.patch.dict(os.environ, {SEED_VARIABLE: "7"}):
            self.assertEqual(common_utils.SEED, 7)
            set_rng_seed()
        self.assertEqual(samples(), first)
        with unittest.mock.patch.dict(os.environ, {SEED_VARIABLE: "many"}):
            with self.assertRaisesRegex(ValueError, "integer"):
                set_rng_seed()


# The same classes run with run_tests and with unittest.main. Only the base class and the last line differ.
SUITE = """
import os, sys, unittest
{imports}

class Alpha({base}):
    def test_passes(self): pass
    def test_fails(self):
        number = 41
        self.assertEqual("is " + str(number), "is 42")
    def test_errs(self):
        raise RuntimeError("on purpose")
    @unittest.skip("not today")
    def test_skips(self): pass
    @unittest.expectedFailure
    def test_expected(self): self.fail()
    @unittest.expectedFailure
    def test_unexpected(self): pass
    def test_subtests(self):
        for i in range(2):
            with self.subTest(i=i): self.assertTrue(i == 0)

class Beta({base}):
    def test_leaks(self):
        '''A docstring that does not replace the name.'''
        os.environ["TORCH_FSDP_TESTS_SCRATCH"] = "1"
    def test_sees_nothing_of_it(self): self.assertNotIn("TORCH_FSDP_TESTS_SCRATCH", os.environ)

class Empty({base}): pass

if __name__ == "__main__":
    {run}
"""


SEEDED = """
import os, torch
from torch_fsdp_tests.common_utils import TestCase, run_tests

class Seeded(TestCase):
    def test_it(self):
        self.assertEqual(os.environ["{variable}"], "77")
        sampled = torch.rand(1)
        torch.manual_seed(77)
        self.assertEqual(sampled, torch.rand(1))

run_tests()
"""


class RunTestsTest(TestCase):
    """Without it, a file that is run alone could print or end otherwise than with unittest."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        ours = {"imports": "from torch_fsdp_tests.common_utils import TestCase, run_tests", "base": "TestCase"}
        plain = {"imports": "", "base": "unittest.TestCase", "run": "unittest.main()"}
        cls.ours, cls.plain = Path(folder.name, "ours.py"), Path(folder.name, "plain.py")
        cls.ours.write_text(SUITE.format(**ours, run="run_tests()"))
        cls.plain.write_text(SUITE.format(**plain))

    def call(self, file: Path, *arguments: str, **environment: str) -> tuple[int, str]:
        """Run a file like the real command, but if possible in a fork, which need not import torch again."""
        with tempfile.TemporaryFile() as output:
            status = Process(file, arguments, environment, os.getcwd(), output, output).wait()
            output.seek(0)
            return status, output.read().decode().partition("nanobind: leaked")[0]  # by triton, when Python exits

    def rejected(self, *arguments: str, **variables: str) -> tuple[int, str]:
        """Run a command that runs no test in this process, as if no dispatcher ran the file."""
        alone = unittest.mock.patch.object(stream, "attached", lambda: False)
        with alone, unittest.mock.patch.dict(os.environ, variables):
            status, out, err = outputs(run_tests, str(self.ours), *arguments)
        return status, out + err

    def normal(self, text: str) -> str:
        text = re.sub(r"in [\d.]+s", "in Ns", text).replace("plain.py", "ours.py")
        return re.sub(r"line \d+", "line N", text)

    def test_prints_what_unittest_prints(self):
        results = [self.call(file, "-v", "--locals", "Alpha") for file in (self.ours, self.plain)]
        (our_status, our_text), (status, text) = results
        self.assertEqual(our_status, status)
        self.assertEqual(self.normal(our_text), self.normal(text))
        self.assertIn("number = 41", our_text)
        name_and_class = r"test_passes \(__main__\.Alpha(\.test_passes)?\)"  # depends on Python's version
        self.assertRegex(our_text, rf"(?m)^{name_and_class} \.\.\. ok$")

    def test_leaks_are_undone_and_named_after_the_outcomes(self):
        status, text = self.call(self.ours, "-v", "Beta")
        self.assertEqual(status, 0, text)
        self.assertRegex(text, r"(?m)^test_leaks \(__main__\.Beta(\.test_leaks)?\) \.\.\. ok$")
        left = "left the environment variable TORCH_FSDP_TESTS_SCRATCH set"
        self.assertIn(f"... ok\n\nleak: __main__.Beta.test_leaks {left}\n-----", text)
        status, text = self.call(self.ours, "Beta", **{settings.STRICT_LEAKS_VARIABLE: "1"})
        self.assertEqual(status, 1)
        self.assertIn(f"AssertionError: the test {left}", text)
        self.assertIn("FAILED (failures=1)", text)

    def test_statuses_and_options(self):
        call = functools.partial(self.call, self.ours)
        cases: list[tuple[Any, ...]] = [
            (call, ["Empty"], 5, r"^ours.py: nothing ran: there is no test in Empty\n$"),
            (call, ["-k", "absent", "-k", "x*z"], 5, r"^ours.py: nothing ran: no test matches -k absent or -k x\*z\n$"),
            (call, ["-f", "Alpha.test_fails", "Alpha.test_errs"], 1, "Ran 1 test in"),
            (call, ["-k", "passes", "--repeat", "2"], 0, r"(?s)Ran 1 test.*Ran 1 test"),
            (call, ["-k", "fails", "--repeat", "2"], 1, r"^(?s:(?!Ran 1 test).)*Ran 1 test(?s:(?!Ran 1 test).)*$"),
            (self.rejected, ["--repeat", "0"], 2, "less than 1"),
            (self.rejected, ["--save-xml=x"], 2, r"^--save-xml is not an option of a single test file: run_test.*\n$"),
            (self.rejected, ["--seed", "many"], 2, "invalid int value"),
            (call, ["--discover-tests", "Beta"], 0, "^Beta.test_leaks\nBeta.test_sees_nothing_of_it\n$"),
            (self.rejected, ["-h"], 0, r"(?s)--failfast.*--seed N"),
        ]
        for how, arguments, expected, pattern in cases:
            with self.subTest(arguments=arguments):
                status, text = how(*arguments)
                self.assertEqual(status, expected, text)
                self.assertRegex(text, pattern)

    def test_a_file_whose_import_skips(self):
        for raises, status, words in (
            ("import unittest; raise unittest.SkipTest('why')", 0, r"^skips.py: skipped: why\n\nOK \(skipped=1\)\n$"),
            ("import pytest; pytest.importorskip('no_module')", 0, "^skips.py: skipped: could not import 'no_module'"),
            ("import pytest; pytest.skip('no test')", 1, r"^Traceback[^$]*Skipped: no test\n"),
        ):
            if "pytest" in raises and importlib.util.find_spec("pytest") is None:
                continue
            file = self.ours.with_name("skips.py")
            file.write_text(f"from torch_fsdp_tests.common_utils import run_tests\n{raises}\nrun_tests()\n")
            with self.subTest(raises):
                code, text = self.call(file)
                self.assertEqual(code, status, text)
                self.assertRegex(text, words)

    def test_file_of_another_checkout_is_refused(self):
        """Its tests belong to the harness of that checkout. A file outside of any checkout runs."""
        with tempfile.TemporaryDirectory() as name:
            other = Path(name).resolve()
            (other / "torch_fsdp_tests").mkdir()
            (other / "run_test.py").touch()
            (other / "test").mkdir()
            file = other / "test" / "ours.py"
            shutil.copy(self.ours, file)
            status, text = self.call(file, "Beta")
            self.assertEqual(status, 2, text)
            words = f"ours.py: this file belongs to {other}, and torch_fsdp_tests is that of {ROOT}: "
            self.assertRegex(text, rf"^{re.escape(words)}[^\n]*\n$")
            (other / "run_test.py").unlink()  # a folder of tests, but no checkout
            self.assertEqual(self.call(file, "Beta")[0], 0)

    def test_variables_that_make_no_sense(self):
        for variable, value, words in (
            ("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "abc", "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT is 'abc': "),
            (SEED_VARIABLE, "abc", f"{SEED_VARIABLE} is 'abc': give an integer"),
            (accelerator.BACKEND_VARIABLE, "nope", "unknown backend 'nope': "),
            (accelerator.DEVICE_VARIABLE, "nope", "unknown device 'nope': "),
        ):
            with self.subTest(variable):
                status, text = self.rejected("Beta", **{variable: value})
                self.assertEqual(status, 2, text)
                self.assertRegex(text, rf"^ours.py: {words}[^\n]*\n$")

    def call_module(self, *arguments: str) -> str:
        """Run a module as ``python -m`` does, with these arguments after its name."""
        driver = self.ours.with_name("driver.py")
        driver.write_text("import runpy, sys; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)")
        status, text = self.call(driver, *arguments)
        self.assertEqual(status, 0, text)
        return text

    def test_unittest_runs_the_tests_and_names_their_leaks(self):
        text = self.call_module("unittest", "-v", "ours.Beta")
        self.assertRegex(text, r"OK\n+leak: ours\.Beta\.test_leaks left the environment variable")

    @unittest.skipIf(importlib.util.find_spec("pytest") is None, "pytest is not installed")
    def test_pytest_collects_the_tests_and_nothing_else(self):
        text = self.call_module("pytest", "-q", "--co", "-p", "no:cacheprovider", str(self.ours))
        self.assertEqual(len(re.findall(r"ours\.py::\w+::test_", text)), 9, text)
        self.assertNotIn("::run_tests", text)

    @unittest.skipIf(importlib.util.find_spec("pytest") is None, "pytest is not installed")
    def test_pytest_shows_leaks_after_its_summary(self):
        text = self.call_module("pytest", "-q", "-p", "no:cacheprovider", str(self.ours), "-k", "Beta")
        self.assertRegex(text, r"\d passed.*\nleak: \S*Beta\.test_leaks left the environment variable")
        self.assertNotIn("Traceback", text)

    def test_the_seed_reaches_tests_and_environment(self):
        file = self.ours.with_name("seeded.py")
        file.write_text(SEEDED.format(variable=SEED_VARIABLE))
        status, text = self.call(file, "--seed", "77")
        self.assertEqual(status, 0, text)


class SmallThingsTest(TestCase):
    """Without it, a flag such as ``TEST_CUDA`` could be wrong for a device, or a setting could outlive its block."""

    def test_flags_follow_the_device_under_test(self):
        other = accelerator.Accelerator("cuda", "nccl", 2, 2)
        with unittest.mock.patch.object(accelerator, "current", lambda: other):
            self.assertTrue(common_utils.TEST_CUDA)
            self.assertFalse(common_utils.TEST_XPU)
        with self.assertRaises(AttributeError):
            _ = common_utils.TEST_NOTHING

    def test_flags_of_a_build_or_a_ci_follow_the_environment(self):
        code = "from torch_fsdp_tests.common_utils import flags; print(flags.IS_SANDCASTLE, flags.TEST_WITH_ASAN)"
        out, _ = self.run_process_no_exception(code, {**os.environ, "SANDCASTLE": "1", "PYTORCH_TEST_WITH_ASAN": "0"})
        self.assertEqual(out.split(), [b"True", b"False"])

    def test_a_mark_for_the_compiler_changes_nothing(self):
        cls = type("T", (TestCase,), {})
        before = dict(vars(cls))
        self.assertIs(common_utils.unMarkDynamoStrictTest(cls), cls)
        self.assertIs(common_utils.unMarkDynamoStrictTest()(cls), cls)
        self.assertEqual(dict(vars(cls)), before)

    def test_a_connection_is_tried_again(self):
        retry = common_utils.retry_on_connect_failures

        def calls(error: Exception, **options: Any) -> int:
            test = unittest.mock.Mock(__name__="test", side_effect=[error] * 9 + ["done"] + [error] * 9)
            decorated = retry(**options)(test) if options else retry(test)
            try:
                self.assertEqual(decorated("argument", key=1), "done")
            except RuntimeError as raised:
                self.assertIs(raised, error)
            test.assert_called_with("argument", key=1)
            return test.call_count

        in_use, other = RuntimeError("bind: Address already in use"), RuntimeError("shapes differ")
        self.assertEqual([calls(in_use), calls(other)], [10, 1])
        self.assertEqual([calls(in_use, connect_errors="timed out"), calls(other, connect_errors=["shapes"])], [1, 10])
        always = unittest.mock.Mock(__name__="test", side_effect=in_use)
        with self.assertRaises(RuntimeError) as raised:
            retry(always)()
        self.assertEqual((raised.exception, always.call_count), (in_use, 10))

    def test_tensors_in_cycles_are_found(self):
        def cycle(*values: object) -> None:
            kept: list[object] = [*values]
            kept.append(kept)

        before, flags = list(gc.garbage), gc.get_debug()
        with check_leaked_tensors() as garbage, warnings.catch_warnings():
            warnings.simplefilter("error")
            cycle("no tensor")
            self.assertEqual(garbage, [])
        self.assertEqual(garbage, [])
        with self.assertWarnsRegex(UserWarning, "2 tensors are in reference cycles"):
            with check_leaked_tensors() as garbage:
                cycle(torch.ones(1), torch.ones(2))
        self.assertEqual(sorted(tensor.numel() for tensor in garbage), [1, 2])
        with self.assertRaises(ZeroDivisionError), check_leaked_tensors() as garbage:
            cycle(torch.ones(1))
            _ = 1 / 0
        self.assertEqual((garbage, gc.garbage, gc.get_debug()), ([], before, flags))

    def test_warnings_that_torch_gives_once(self):
        for _ in range(2):
            with self.assertWarnsOnceRegex(UserWarning, ".*deprecated"):
                _ = torch.ones(3).T
        self.assertFalse(torch.is_warn_always_enabled())
        for category, regex in ((UserWarning, "of two"), (DeprecationWarning, "first"), (UserWarning, "other")):
            with self.assertRaisesRegex(AssertionError, f"no {category.__name__} matches '{regex}'"):
                with self.assertWarnsOnceRegex(category, regex):
                    warnings.warn("first of two", stacklevel=1)
        with self.assertRaises(AssertionError), self.assertWarnsOnceRegex(UserWarning):
            pass

    def test_an_absent_device_is_no_error_at_import(self):
        with unittest.mock.patch.dict(os.environ, {accelerator.DEVICE_VARIABLE: "nonsense"}):
            self.assertFalse(common_utils.TEST_CUDA)

    def test_host_sleep(self):
        under_test = accelerator.current()
        self.assertGreater(common_utils.get_cycles_per_ms(), 0)
        with unittest.mock.patch("time.sleep") as slept:
            common_utils.device_sleep("cpu", int(3 * common_utils.get_cycles_per_ms("cpu")))  # the CPU is the subject
        slept.assert_called_once_with(0.003)
        if not under_test.is_cpu:
            common_utils.device_sleep(under_test.type, 1)

    def test_swapping_is_put_back_by_the_last_of_several_threads(self):
        """Ranks in threads leave the decorated test one by one. The setting stays until the last one has left."""
        read = torch.__future__.get_swap_module_params_on_conversion
        before = read()
        self.assertEqual(common_utils.wrapSwapTensorsTest(not before)(read)(), not before)
        self.assertEqual(read(), before)
        first, second = common_utils.wrapSwapTensorsTest(not before), common_utils.wrapSwapTensorsTest(not before)
        for rank in (first, second):
            rank.__enter__()
        first.__exit__(None, None, None)
        self.assertEqual(read(), not before)
        second.__exit__(None, None, None)
        self.assertEqual(read(), before)


if __name__ == "__main__":
    run_tests()
