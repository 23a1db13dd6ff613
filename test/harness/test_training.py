"""The helpers for training tests: ``@subtests``, recorded collectives, and comparisons that can fail."""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import unittest
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from samples import class_with, run
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTestMultiThread, check_sharded_parity
from torch_fsdp_tests.common_fsdp.training import LARGEST_VALUE, moderate_steps
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp import combinations
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.training import TrainingMixin, check_full, check_gradients, check_parity, train


def cases_of(decorate: Any) -> list[dict[str, Any]]:
    """The parameters of the calls of a decorated test."""
    cls, calls = class_with(decorate)
    result = run(cls)
    assert result.wasSuccessful() and result.testsRun == 1
    return calls


class TestSubtests(unittest.TestCase):
    """Without it, a combination could be left out, or the failure of a subtest could be lost."""

    def test_every_combination(self):
        actual = cases_of(subtests(a=[1, 2], b=["x", "y"]))
        self.assertEqual(actual, [{"a": a, "b": b} for a in (1, 2) for b in ("x", "y")])

    def test_values_are_asked_for_late(self):
        values = mock.Mock(return_value=[1, 2])
        decorate = subtests(a=values)
        values.assert_not_called()
        self.assertEqual(cases_of(decorate), [{"a": 1}, {"a": 2}])

    def test_pairwise(self):
        """Each valid pair of values occurs, with fewer cases than combinations."""
        valid = lambda a, b, c: (a, b) != (2, 2)  # noqa: E731
        with mock.patch.object(combinations, "TEST_WITH_SLOW", False):
            found = cases_of(subtests(pairwise=True, valid=valid, a=[0, 1, 2], b=[0, 1, 2], c=[0, 1, 2]))
        self.assertLess(len(found), 27 - 3)
        pairs = {pair for case in found for pair in itertools.combinations(sorted(case.items()), 2)}
        self.assertEqual(len(pairs), 3 * 9 - 1)
        self.assertNotIn((("a", 2), ("b", 2)), pairs)

    def test_a_test_without_valid_combinations_is_an_error(self):
        for pairwise in (False, True):
            body = subtests(pairwise=pairwise, valid=lambda a: a > 2, a=[1, 2])(lambda self, a: None)
            ((_, text),) = run(type("Sample", (unittest.TestCase,), {"test": body})).errors
            self.assertIn("ValueError: no subtest to run", text)

    def test_a_failure_is_the_tests(self):
        body = subtests(a=[1, 2])(lambda self, a: self.assertEqual(a, 1))
        ((test, _),) = run(type("Sample", (unittest.TestCase,), {"test": body})).failures
        self.assertIn("(a=2)", str(test))


class TestModerateSteps(unittest.TestCase):
    """Without it, trainings that explode could be compared, or the check could read memory that FSDP has freed."""

    def test_large_values_are_refused(self):
        for value in (2 * LARGEST_VALUE, math.inf, math.nan):
            with self.subTest(value), self.assertRaisesRegex(AssertionError, "leaves parameters whose largest values"):
                self._step(nn.Parameter(torch.tensor([1.0, value])))

    def test_freed_memory_is_passed_over(self):
        freed = nn.Parameter(torch.ones(2))
        freed.untyped_storage().resize_(0)
        self._step(freed)
        with self.assertRaises(AssertionError):
            self._step(freed, nn.Parameter(torch.tensor([math.inf])))

    def _step(self, *params: nn.Parameter) -> None:
        with moderate_steps():
            torch.optim.SGD(params, lr=1.0).step()


def turned(model: Any) -> nn.Module:
    """The layers of an MLP in reverse order."""
    layers: Any = nn.Module()
    layers.out_proj, layers.in_proj = model.out_proj, model.in_proj
    return layers


# How two models may differ, by words of the failure. Each function changes the plain model or its sharded copy, or else
# returns two other models.
DIFFERENCES: dict[str, Callable[[Any, Any], Any]] = {
    "parameter out_proj.weight": lambda plain, sharded: sharded.out_proj.weight.detach().to_local()[-1].add_(1),
    "gradient out_proj.weight": lambda plain, sharded: sharded.out_proj.weight.grad.to_local()[0].add_(1),
    "gradient out_proj.bias": lambda plain, sharded: setattr(sharded.out_proj.bias, "grad", None),
    "gradient in_proj.bias": lambda plain, sharded: setattr(plain.in_proj.bias, "grad", None),
    "parameter in_proj.weight": lambda plain, sharded: (plain, plain),
    "parameter in_proj.weight is laid out as": lambda plain, sharded: (MLP(3, dim_multiplier=2), sharded),
    "different parameters": lambda plain, sharded: (plain, nn.Sequential(sharded)),
    "'in_proj.weight' != 'out_proj.weight'": lambda plain, sharded: (turned(plain), sharded),
    "nothing was compared": lambda plain, sharded: (nn.Identity(), nn.Identity()),
}


class TestParity(TrainingMixin, FSDPTestMultiThread):
    """Without it, a comparison of parameters could accept a sharded model that differs from its reference."""

    world_size = 2

    def _pair(self) -> tuple[Any, Any]:
        """A plain model and its sharded copy after a step, with the gradients in place."""
        ref_model = filled(MLP(3, self.device))
        model = fully_shard(copy.deepcopy(ref_model))
        for each in (ref_model, model):
            train(each, torch.full((2, 3), 1.0 + self.rank, device=self.device))
        average_gradients(ref_model)
        return ref_model, model

    @skip_if_lt_x_gpu(1)
    def test_same(self):
        ref_model, model = self._pair()
        check_parity(self, ref_model, model)
        check_parity(self, model, model, rtol=0, atol=0)
        check_gradients(self, ref_model, model)
        check_full(self, ref_model, model)
        check_sharded_parity(self, ref_model, nn.Sequential(model), prefixes_to_ignore=("0.",))

    @skip_if_lt_x_gpu(1)
    @subtests(check=[check_parity, check_sharded_parity], words=list(DIFFERENCES))
    def test_other(self, check, words):
        """Any difference fails the comparison."""
        pair = self._pair()
        other = DIFFERENCES[words](*pair)
        with self.assertRaisesRegex(AssertionError, words):
            check(self, *(other if isinstance(other, tuple) else pair))

    @skip_if_lt_x_gpu(1)
    @subtests(check=[check_parity, check_sharded_parity])
    def test_replica_that_drifted_on_one_rank(self, check):
        ref_model, model = self._pair()
        ref_model.out_proj.bias.detach().add_(self.rank)
        with self.assertRaisesRegex(AssertionError, "out_proj.bias") if self.rank else contextlib.nullcontext():
            check(self, ref_model, model)


if __name__ == "__main__":
    run_tests()
