"""Forwards under ``no_grad`` or ``inference_mode`` do not change the training after them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from torch_fsdp_tests.common_distributed import at_most, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    MLP,
    FSDPTest,
    check_sharded_parity,
)
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import collectives, internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.training import (
    FEW,
    Loop,
    TrainingMixin,
    check_parity,
    shard_each,
    train,
)


class TestFullyShardGradientAccumulation(TrainingMixin, FSDPTest):
    world_size = at_most(4)
    power_of_two_ranks = True

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        reshard_after_forward=[True, False, 2, None],
        without_grad=[torch.no_grad, torch.inference_mode],
        before_step=[True, False],
    )
    def test_eval_between_steps(self, reshard_after_forward, without_grad, before_step):
        """A forward without gradients and a reshard do not change gradients, parameters or collectives."""
        ref_model, model = self._two_mlps(reshard_after_forward)
        counts: list[Counter[str]] = []

        def held() -> list[Any]:
            params = list(model.parameters())
            return [*params, *(param.grad for param in params)]

        def evaluate() -> None:
            inp, before = self._inputs(3, 8), held()
            values = [None if tensor is None else tensor.to_local().clone() for tensor in before]
            with without_grad():
                output, ref_output = model(inp), ref_model(inp)
            self.assertEqual(output, ref_output)
            self.assertFalse(output.requires_grad)
            for module in internals.fsdp_modules(model):
                module.reshard()
            for tensor, old, value in zip(held(), before, values, strict=True):
                self.assertIs(tensor, old)
                if value is not None:
                    self.assertEqual(tensor.to_local(), value, rtol=0, atol=0, may_be="zero")

        def step(each: nn.Module, inp: torch.Tensor) -> torch.Tensor:
            if each is ref_model:
                return train(each, inp)
            if not before_step and (counts or without_grad is torch.no_grad):
                evaluate()
            with collectives.recorded() as calls:
                loss = train(each, inp)
            counts.append(calls.counts())
            if before_step:
                evaluate()
            return loss

        self._check_training(ref_model, model, lambda: self._inputs(2, 8), Loop(step=step))
        self.assertEqual(counts, counts[:1] * 3)

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False, None])
    def test_inference_before_first_step(self, reshard_after_forward):
        """A model may run under ``inference_mode`` before it is trained."""
        ref_model, model = self._two_mlps(reshard_after_forward)
        for _ in range(2):
            with torch.inference_mode():
                self.assertEqual(model(inp := self._inputs(2, 8)), ref_model(inp))
            for module in internals.fsdp_modules(model):
                module.reshard()
            check_sharded_parity(self, ref_model, model)
            with torch.no_grad():
                for param in (*model.parameters(), *ref_model.parameters()):
                    param.mul_(1.5)
        with torch_defect("fsdp2_inference_mode_breaks_training"):
            self._check_training(ref_model, model, lambda: self._inputs(2, 8), Loop(iterations=FEW))

    @skip_if_lt_x_gpu(4)
    @subtests(reshard_after_forward=[True, False, 2, None])
    def test_eval_without_reshard(self, reshard_after_forward):
        """A forward uses updates of the shards since the previous forward, if these were not left unsharded on request.

        ``reshard_after_forward`` documents that parameters then have to be resharded before they are changed.
        """
        _, model = self._two_mlps(reshard_after_forward)
        ref_model, _ = self._two_mlps(reshard_after_forward)
        inp = self._inputs(3, 8)
        outer, inner = list(model[2].parameters()), list(model[0].parameters())

        def outputs() -> tuple[torch.Tensor, torch.Tensor]:
            with torch.no_grad():
                return model(inp), ref_model(inp)

        before, ref_before = outputs()
        self.assertEqual(before, ref_before)
        self._reshard_if_requested(model, reshard_after_forward)
        with torch.no_grad():
            for params, ref in ((outer, ref_model[2]), (inner, ref_model[0])):
                for param, ref_param in zip(params, ref.parameters(), strict=True):
                    param.to_local().mul_(2)
                    ref_param.mul_(2)
        after, ref_after = outputs()
        self.assertNotEqual(ref_after, ref_before)
        with torch_defect("fsdp2_evaluation_leaves_the_root_gathered", when=reshard_after_forward is None):
            self.assertEqual(after, ref_after)
        for module in internals.fsdp_modules(model):
            module.reshard()
        after, ref_after = outputs()
        self.assertEqual(after, ref_after)

    @skip_if_lt_x_gpu(4)
    @subtests(
        what=["step", "zero_grad", "optimizer", "freeze", "average"],
        reshard_after_forward=[True, False, 2, None],
        evaluates=[True, False],
    )
    def test_parameters_after_evaluation_are_those_that_train(self, what, reshard_after_forward, evaluates):
        """Changes of parameters after a forward under ``no_grad`` take effect in the next steps, as without FSDP.

        In the case "average" the forward uses averaged weights, and the trained ones are copied back after it.
        """
        ref_model, model = both = self._two_mlps(reshard_after_forward)
        batches = [self._inputs(2, 8) for _ in range(3)]

        def step(each: nn.Module, optim: torch.optim.Optimizer) -> None:
            if each is ref_model:
                average_gradients(each)
            optim.step()

        for each in both:
            optim = torch.optim.SGD(each.parameters(), lr=0.1)
            train(each, batches[0])
            params = list(each.parameters())
            trained = [param.detach().clone() for param in params]
            if what == "average":
                torch._foreach_mul_([param.detach() for param in params], 0.5)
            if evaluates:
                with torch.no_grad():
                    each(batches[1])
                if each is model:
                    self._reshard_if_requested(model, reshard_after_forward)
            if what == "step":
                step(each, optim)
            elif what == "zero_grad":
                each.zero_grad()
            elif what == "optimizer":
                optim = torch.optim.SGD(each.parameters(), lr=0.1)
            elif what == "average":
                for param, value in zip(params, trained, strict=True):
                    param.detach().copy_(value)
            else:
                each[2].requires_grad_(False)
            for batch in batches[1:]:
                train(each, batch)
                step(each, optim)
        is_left = evaluates and reshard_after_forward is None
        with torch_defect("fsdp2_evaluation_leaves_the_root_gathered", when=is_left):
            check_parity(self, ref_model, model)

    @skip_if_lt_x_gpu(2)
    def test_evaluations_without_reshard(self):
        """After ``set_reshard_after_forward(False)``, only the first of several forwards in eval mode all-gathers."""
        _, model = self._two_mlps(None)
        model.eval().set_reshard_after_forward(False)
        counts: list[int] = []
        for _ in range(3):
            with torch.no_grad(), collectives.recorded() as calls:
                model(self._inputs(3, 8))
            counts.append(calls.counts()["all_gather"])
        self.assertEqual(counts, [3, 0, 0])

    def _reshard_if_requested(self, model: nn.Module, reshard_after_forward: bool | int | None) -> None:
        """Reshard what a forward leaves unsharded, or on a smaller mesh, because the user asked for it."""
        if reshard_after_forward not in (None, True):
            for module in internals.fsdp_modules(model):
                module.reshard()

    def _two_mlps(self, reshard_after_forward: bool | int | None) -> tuple[nn.Module, nn.Module]:
        manual_seed(42)
        model = nn.Sequential(MLP(8), MLP(8), nn.Linear(8, 8))
        ref_model = self._replica(model)
        shard_each([model[0], model[1], model], reshard_after_forward=reshard_after_forward)
        self._seed()
        return ref_model, model


if __name__ == "__main__":
    run_tests()
