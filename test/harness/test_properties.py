"""Properties that hold for all values: of comparisons and of subtests."""

from __future__ import annotations

import itertools
import math
import unittest
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch

from torch_fsdp_tests.common_distributed import MultiProcessTestCase, run_subtests
from torch_fsdp_tests.common_distributed.case import run_in_rank
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.ranks import Kind, Outcome

try:
    from hypothesis import HealthCheck, assume, given, settings
    from hypothesis import strategies as st
except ImportError:  # the file can still be imported, and its tests skip with the reason
    HealthCheck = assume = settings = st = mock.MagicMock()

    def given(*_: object, **__: object) -> Callable[[Callable], Callable]:
        return unittest.skip("hypothesis is not installed: pip install -e .[dev]")


# The same examples in every run, no files on disk, and no time limit.
settings.register_profile(
    "harness",
    max_examples=60,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)
settings.load_profile("harness")

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int32, torch.int64)
# As documented for torch.testing.assert_close: (rtol, atol).
TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}

shapes = st.lists(st.integers(1, 4), max_size=3).map(tuple)
leaves = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.booleans(),
    st.none(),
    st.text(max_size=5),
    st.sampled_from([*FLOATS, torch.Size([1, 2])]),
)
nested = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=8,
)


@st.composite
def tensors(draw: Callable, dtypes: Sequence[torch.dtype] = (*FLOATS, *INTEGERS, torch.bool)) -> torch.Tensor:
    dtype, shape, seed = draw(st.sampled_from(dtypes)), draw(shapes), draw(st.integers(0, 2**31))
    values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed))
    return values.bool() if dtype is torch.bool else values.to(dtype)


def place_in(tensor: torch.Tensor, number: int) -> tuple[int, ...]:
    """The index of an element of a tensor by its number in order."""
    index = []
    for size in reversed(tensor.shape):
        number, rest = divmod(number, size)
        index.append(rest)
    return tuple(reversed(index))


class EqualityTest(TestCase):
    """Without it, ``assertEqual`` could pass for values that nobody has thought of."""

    def message(self, x: object, y: object, **kwargs: Any) -> str:
        with self.assertRaises(AssertionError) as caught:
            self.assertEqual(x, y, **kwargs)
        return str(caught.exception)

    @given(nested, nested)
    def test_symmetric_without_tolerances(self, x, y):
        def equal(a, b):
            try:
                self.assertEqual(a, b, atol=0, rtol=0)
            except (AssertionError, ValueError):
                return False
            return True

        self.assertIs(equal(x, y), equal(y, x))

    @given(tensors(), st.data())
    def test_single_wrong_element_is_reported(self, tensor, data):
        """The message has its index and its difference, even if the tensor is deep inside a container."""
        number = data.draw(st.integers(0, tensor.numel() - 1))
        wrong = tensor.clone()
        if tensor.dtype is torch.bool:
            wrong.view(-1)[number] = ~wrong.view(-1)[number]
            distance = 1
        else:
            distance = data.draw(st.sampled_from([2, 16, 64]))
            wrong.view(-1)[number] += distance
        keys = data.draw(st.lists(st.sampled_from(["weight", "bias", 0, 1]), max_size=3))
        x, y = wrong, tensor
        for key in reversed(keys):
            x, y = {key: x, "same": 1}, {key: y, "same": 1}
        text = self.message(x, y)
        if keys:
            place = "".join(f"[{key!r}]" for key in keys)
            self.assertTrue(text.startswith(f"at {place}: "), text)
        if tensor.dim() == 0 or tensor.dtype is torch.bool:
            return  # for a single value, torch prints both values; for a bool it prints no difference
        self.assertIn(f"{place_in(tensor, number)}", text)
        self.assertRegex(text, rf"Greatest absolute difference: {distance}(\.0)? at index")
        self.assertRegex(text, rf"Mismatched elements: 1 / {tensor.numel()} ")

    @given(st.sampled_from(FLOATS), st.floats(0.01, 100), st.floats(0, 3), st.booleans())
    def test_tolerances_are_torchs(self, dtype, expected, share, negative):
        """A difference below ``atol + rtol * |expected|`` passes, a larger one fails."""
        expected = torch.tensor(-expected if negative else expected, dtype=dtype)
        rtol, atol = TOLERANCES[dtype]
        actual = (expected.double() + share * (atol + rtol * expected.double().abs())).to(dtype)
        off = (actual.double() - expected.double()).abs().item()
        allowed = atol + rtol * expected.double().abs().item()
        assume(not math.isclose(off, allowed, rel_tol=1e-3))
        if off < allowed:
            self.assertEqual(actual, expected)
        else:
            self.message(actual, expected)
            self.assertEqual(actual, expected, atol=2 * off, rtol=0)


def case_in_rank() -> MultiProcessTestCase:
    """A test case as it is in a rank."""

    class Case(MultiProcessTestCase):
        def test_it(self):
            pass

    case = Case("test_it")
    case.rank = 0
    return case


configurations = st.dictionaries(
    st.sampled_from(["a", "b", "c"]), st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True), max_size=3
)


class SubtestsTest(TestCase):
    """Without it, a combination of values could be left out in silence."""

    def run_in_rank(
        self, configuration: dict[str, Sequence[Any]], test_fn: Callable, *args: Any, **kwargs: Any
    ) -> Outcome:
        return run_in_rank(0, lambda: run_subtests(case_in_rank(), configuration, test_fn, *args, **kwargs))

    @given(configurations, st.tuples(st.integers()), st.dictionaries(st.just("d"), st.integers()))
    def test_every_combination_once_in_order(self, configuration, args, kwargs):
        calls = []
        outcome = self.run_in_rank(
            configuration, lambda *given_args, **chosen: calls.append((given_args, chosen)), *args, **kwargs
        )
        combinations = list(itertools.product(*configuration.values()))
        wanted = [(args, {**kwargs, **dict(zip(configuration, values))}) for values in combinations]
        self.assertEqual(calls, wanted)
        self.assertEqual(outcome.subtests, len(combinations))
        self.assertIs(outcome.kind, Kind.PASSED)

    @given(configurations, st.data())
    def test_the_first_failure_ends_it_and_is_named(self, configuration, data):
        combinations = list(itertools.product(*configuration.values()))
        number = data.draw(st.integers(0, len(combinations) - 1))
        calls = []

        def body(**chosen):
            calls.append(chosen)
            self.assertLess(len(calls), number + 1)

        outcome = self.run_in_rank(configuration, body)
        self.assertIs(outcome.kind, Kind.FAILED)
        self.assertEqual(len(calls), number + 1)
        self.assertEqual(outcome.subtests, number)
        words = ", ".join(f"{name}={value}" for name, value in zip(configuration, combinations[number]))
        if words:
            self.assertTrue(outcome.text.startswith(f"in the subtest ({words})\n"), outcome.text)

    @given(configurations, st.data())
    def test_skips_end_only_their_subtest_and_are_counted(self, configuration, data):
        """A test skips if all its subtests skip. It passes if at least one of them ran."""
        combinations = list(itertools.product(*configuration.values()))
        skipping = data.draw(st.sets(st.integers(0, len(combinations) - 1)))
        numbers = itertools.count()

        def body(**_):
            number = next(numbers)
            if number in skipping:
                raise unittest.SkipTest(f"reason {number % 2}")

        outcome = self.run_in_rank(configuration, body)
        self.assertIs(outcome.kind, Kind.SKIPPED if len(skipping) == len(combinations) else Kind.PASSED)
        self.assertEqual(outcome.subtests, len(combinations) - len(skipping))
        self.assertEqual(outcome.skipped_subtests, tuple(f"reason {number % 2}" for number in sorted(skipping)))

    @given(configurations, st.sampled_from(["a", "b", "c"]))
    def test_a_parameter_without_values_is_an_error(self, configuration, name):
        outcome = self.run_in_rank({**configuration, name: []}, mock.Mock(side_effect=AssertionError("called")))
        self.assertIs(outcome.kind, Kind.ERROR)
        self.assertIn(f"no subtest to run: {name} has no values", outcome.text)


if __name__ == "__main__":
    run_tests()
