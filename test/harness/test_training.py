"""Tests of the helpers for training tests: subtests by decorator, recorded collectives, a comparison that can fail."""

from __future__ import annotations

import copy
import itertools
import unittest
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest, FSDPTestMultiThread
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp import collectives, combinations
from torch_fsdp_tests.fsdp.combinations import pairwise_subtests, subtests
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.training import (
    TrainingMixin,
    broadcast_parameters,
    check_full,
    check_gradients,
    check_parity,
    shard_each,
    train,
)


def cases_of(decorate: Any) -> list[dict[str, Any]]:
    """The parameters of the calls of a decorated test."""
    seen: list[dict[str, Any]] = []

    class Sample(unittest.TestCase):
        @decorate
        def test(self, **case: Any) -> None:
            seen.append(case)

    result = Sample("test").run()
    assert result is not None and result.wasSuccessful() and result.testsRun == 1
    return seen


class TestSubtests(unittest.TestCase):
    """Without it, a combination could be left out, or the failure of a subtest could be lost."""

    def test_every_combination(self):
        found = cases_of(subtests(a=[1, 2], b=["x", "y"]))
        self.assertEqual(found, [{"a": a, "b": b} for a in (1, 2) for b in ("x", "y")])

    def test_values_are_asked_for_late(self):
        values = mock.Mock(return_value=[1, 2])
        decorate = subtests(a=values)
        values.assert_not_called()
        self.assertEqual(cases_of(decorate), [{"a": 1}, {"a": 2}])

    def test_pairwise(self):
        """Each valid pair of values occurs, in fewer cases than there are combinations."""
        valid = lambda a, b, c: (a, b) != (2, 2)  # noqa: E731
        with mock.patch.object(combinations, "TEST_WITH_SLOW", False):
            found = cases_of(pairwise_subtests(valid, a=[0, 1, 2], b=[0, 1, 2], c=[0, 1, 2]))
        self.assertLess(len(found), 27 - 3)
        pairs = {pair for case in found for pair in itertools.combinations(sorted(case.items()), 2)}
        self.assertEqual(len(pairs), 3 * 9 - 1)
        self.assertNotIn((("a", 2), ("b", 2)), pairs)

    def test_a_failure_is_the_tests(self):
        class Sample(unittest.TestCase):
            @subtests(a=[1, 2])
            def test(self, a: int) -> None:
                self.assertEqual(a, 1)

        result = Sample("test").run()
        assert result is not None
        self.assertEqual(len(result.failures), 1)
        self.assertIn("(a=2)", str(result.failures[0][0]))


class TestRecordedCollectives(FSDPTest):
    """Without it, tests that count collectives could accept too many or too few of them."""

    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_calls_of_a_step(self):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(self.device)
        shard_each([*model, model])
        with collectives.recorded() as calls:
            train(model, torch.ones(1, 2, device=self.device))
        self.assertEqual(calls.counts(), {"all_gather": 4, "reduce_scatter": 2})
        self.assertEqual([group.size() for group in calls.values("reduce_scatter", "group")], [2, 2])
        self.assertEqual(calls.values("AR", "group"), [])
        train(model, torch.ones(1, 2, device=self.device))
        self.assertEqual(len(calls), 6)  # nothing is recorded after the context


class TestParity(TrainingMixin, FSDPTestMultiThread):
    """Without it, ``check_parity`` could accept a sharded model that differs from its reference."""

    world_size = 2

    def _pair(self) -> tuple[Any, Any]:
        """A plain model and its sharded copy after a step, with the gradients in place."""
        ref_model = broadcast_parameters(MLP(3, self.device))
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

    @skip_if_lt_x_gpu(1)
    @subtests(change=["parameter", "gradient", "no gradient", "names", "plain model", "nothing"])
    def test_other(self, change):
        """Any difference fails the comparison."""
        ref_model, model = self._pair()
        param = model.out_proj.weight
        if change == "parameter":
            param.to_local().detach()[0] += 1
        elif change == "gradient":
            param.grad.to_local()[0] += 1
        elif change == "no gradient":
            param.grad = None
        elif change == "names":
            model = nn.Sequential(model)
        elif change == "plain model":
            model = ref_model
        else:
            ref_model, model = nn.Identity(), nn.Identity()
        with self.assertRaises(AssertionError):
            check_parity(self, ref_model, model)


if __name__ == "__main__":
    run_tests()
