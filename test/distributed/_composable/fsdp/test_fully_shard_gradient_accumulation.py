"""Gradient accumulation over several backwards: of unsharded gradients, before the reduce-scatter, or of sharded
gradients, before the all-reduce.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
    fully_shard,
)

from torch_fsdp_tests.common_distributed import at_most, needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_distributed.requirements import skip_unless
from torch_fsdp_tests.common_fsdp import (
    MLP,
    FSDPTest,
    check_sharded_parity,
)
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients, full
from torch_fsdp_tests.fsdp.toy_models import TwoBranches
from torch_fsdp_tests.fsdp.training import (
    FEW,
    Loop,
    TrainingMixin,
    backward,
    check_parity,
    loss_of,
    optimizers,
    shard_each,
    take_step,
)
from torch_fsdp_tests.installed_torch import torch_facts

needs_reset = needs(torch_facts.HAS_RESET_ITER_STATE)
BRANCHES = {"left": ("left",), "right": ("right",), "both": ("left", "right")}


class TestFullyShardGradientAccumulation(TrainingMixin, FSDPTest):
    world_size = at_most(4)

    @skip_if_lt_x_gpu(2)
    @subtests(param_dtype=[None, torch.bfloat16])
    def test_zero_grad_between_microbatches(self, param_dtype):
        """``zero_grad`` clears the gradients that were accumulated on parameters that stayed unsharded."""
        policy = MixedPrecisionPolicy(param_dtype, reduce_dtype=torch.float32)
        model = fully_shard(nn.Linear(2, 4, bias=False, device=self.device), mp_policy=policy)
        for is_last, value in ((False, 8.0), (True, 1.0)):
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last)
            model.zero_grad()
            model(torch.full((1, 2), value + self.rank, device=self.device)).sum().backward()
        actual, mean = model.weight.grad.full_tensor(), 1 + (self.world_size - 1) / 2
        with torch_defect("fsdp2_zero_grad_keeps_accumulated_gradients", when=param_dtype is not None):
            self.assertEqual(actual, torch.full((4, 2), mean, device=self.device))

    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
        reshard_after_forward=[True, False],
        set_to_none=[True, False],
        dtype=[torch.float32, torch.float64],
    )
    def test_requires_all_reduce_leaves_nothing_behind(self, reshard_after_forward, set_to_none, dtype):
        """Before the all-reduce a parameter has no gradient. After it the group keeps no partial reduction.

        The second and third steps all-reduce only in the last microbatch, the others in every microbatch. FSDP divides
        gradients in float64 before and after the sum. Those in float32 are averaged by the collectives.
        """
        ref_model, model = self._hsdp_mlps(reshard_after_forward, dtype)
        optims = optimizers(ref_model, model)
        for step, once in enumerate((False, True, True, False)):
            for microbatch in range(3):
                is_last = microbatch == 2
                if step == 2 and is_last:
                    model.set_requires_gradient_sync(True)  # this sets both flags
                else:
                    model.set_requires_all_reduce(is_last or not once)
                inp = self._inputs(2, 8, dtype=dtype)
                for each in (ref_model, model):
                    loss_of(each(inp)).backward()
                partial = [group._partial_reduce_output is not None for group in internals.groups_of(model)]
                self.assertEqual(partial, [once and not is_last] * 3)
                if once and not is_last:
                    for param in model.parameters():
                        # The gradient is None, or zeros from zero_grad in the previous step.
                        self.assertTrue(param.grad is None or not full(param.grad).any())
                        self.assertEqual(param.grad is None, set_to_none or step == 0)
            average_gradients(ref_model)
            check_sharded_parity(self, ref_model, model)
            take_step(optims, set_to_none)
        check_sharded_parity(self, ref_model, model)

    @needs_reset
    @skip_if_lt_x_gpu(4)
    def test_reset_iter_state_drops_partial_reductions(self):
        """``reset_iter_state`` drops gradients that were reduce-scattered but not all-reduced."""
        ref_model, model = self._hsdp_mlps(reshard_after_forward=True)
        model.set_requires_all_reduce(False)
        loss_of(model(self._inputs(2, 8))).backward()
        self.assertEqual([group._partial_reduce_output is not None for group in internals.groups_of(model)], [True] * 3)
        model.reset_iter_state()
        self.assertEqual([group._partial_reduce_output for group in internals.groups_of(model)], [None] * 3)
        model.set_requires_all_reduce(True)
        self._check_training(ref_model, model, lambda: self._inputs(2, 8), Loop(iterations=FEW))

    @skip_if_lt_x_gpu(2)
    @subtests(
        microbatches=[("left", "right"), ("left", "both"), ("both", "right"), ("left", "right", "left")],
        reshard_after_forward=[True, False],
    )
    def test_partial_reductions_of_other_parameters(self, microbatches, reshard_after_forward):
        """Gradients are right if microbatches before one all-reduce use different parameters of a group."""
        with torch_defect("fsdp2_partial_reduction_of_unused_group_is_left"):
            self._test_partial_reductions(microbatches, lambda model: [model], reshard_after_forward)

    @skip_if_lt_x_gpu(4)
    @subtests(microbatches=[("both", "right"), ("left", "right")])
    def test_partial_reduction_of_unused_group(self, microbatches):
        """The gradients of a group that the last microbatch does not use are all-reduced with the others."""
        with torch_defect("fsdp2_partial_reduction_of_unused_group_is_left"):
            self._test_partial_reductions(microbatches, lambda model: [model.left, model.right, model])

    @skip_if_lt_x_gpu(4)
    @subtests(
        microbatches=[("both", "right"), ("left", "right"), ("both", "both", "left")],
        reshard_after_forward=[True, False],
        reduce_dtype=[None, torch.float32],
    )
    def test_accumulated_gradients_of_unused_group(self, microbatches, reshard_after_forward, reduce_dtype):
        """The gradients of a group that the first or the last microbatch does not use are reduced with the others."""
        to_shard = lambda model: [model.left, model.right, model]  # noqa: E731
        did_not_run = microbatches[0] != "both" and reduce_dtype is not None
        with torch_defect("fsdp2_accumulation_before_first_use_raises", when=did_not_run):
            self._test_partial_reductions(
                microbatches, to_shard, reshard_after_forward, "set_requires_gradient_sync", reduce_dtype
            )

    def _test_partial_reductions(
        self,
        microbatches: tuple[str, ...],
        to_shard: Callable[[Any], list[nn.Module]],
        reshard_after_forward: bool = True,
        mark_last: str = "set_requires_all_reduce",
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        manual_seed(42)
        ref_model = TwoBranches().to(self.device)
        model = self._replica(ref_model)
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        mesh = self._mesh(2, 2)
        shard_each(to_shard(model), mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)

        def step(each: nn.Module, inputs: list[torch.Tensor]) -> torch.Tensor:
            losses = []
            for index, (inp, used) in enumerate(zip(inputs, microbatches, strict=True), 1):
                if each is model:
                    getattr(model, mark_last)(index == len(microbatches))
                losses.append(backward(loss_of(each(inp, *BRANCHES[used]))))
            return torch.stack(losses)

        next_batch = lambda: self._inputs(len(microbatches), 2, 8).unbind()  # noqa: E731
        self._check_training(ref_model, model, next_batch, Loop(step=step))

    @skip_if_lt_x_gpu(4)
    @subtests(second=["right", "both", "left"], mesh_shape=[(4,), (2, 2)], reshard_after_forward=[True, False])
    def test_parameter_of_a_later_microbatch(self, second, mesh_shape, reshard_after_forward):
        """Under mixed precision gradients are right if the last microbatch is the first to use a parameter. With
        ``set_reduce_scatter_unused_params`` the gradient of a parameter that no microbatch uses is zero.

        Inputs are small integers, which bfloat16 holds exactly. The gradient of a sum does not depend on the weights.
        """
        manual_seed(42)
        ref_model = TwoBranches().to(self.device)
        model = self._replica(ref_model)
        fully_shard(
            model,
            mesh=self._mesh(*mesh_shape),
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            reshard_after_forward=reshard_after_forward,
        )
        if second == "left":
            skip_unless([torch_facts.HAS_REDUCE_SCATTER_OF_UNUSED_PARAMETERS.lacks])
            model.set_reduce_scatter_unused_params(True)
            for param in ref_model.right.parameters():
                param.grad = torch.zeros_like(param)
        self._seed()
        for used, is_last in (("left", False), (second, True)):
            inp = torch.randint(-4, 5, (2, 8), device=self.device).float()
            model.set_requires_gradient_sync(is_last)
            loss = model(inp, *BRANCHES[used]).sum()
            ref_model(inp, *BRANCHES[used]).sum().backward()
            with torch_defect("fsdp2_accumulation_of_later_parameter_raises", when=is_last):
                loss.backward()
                if is_last:
                    average_gradients(ref_model)
                    check_parity(self, ref_model, model, what=("gradient",), rtol=0, atol=0)

    def _hsdp_mlps(self, reshard_after_forward: bool, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
        manual_seed(42)
        model = nn.Sequential(nn.Linear(8, 8), MLP(8), MLP(8)).to(dtype)
        ref_model = self._replica(model)
        shard_each([*model[1:], model], mesh=self._mesh(2, 2), reshard_after_forward=reshard_after_forward)
        self._seed()
        return ref_model, model

    @needs(torch_facts.HAS_REDUCE_SCATTER_OF_UNUSED_PARAMETERS)
    @skip_if_lt_x_gpu(4)
    @subtests(pairwise=True, mesh_shape=[(4,), (2, 2)], reshard_after_forward=[True, False], recurse=[True, False])
    def test_rank_dependent_branches_and_masked_losses(self, mesh_shape, reshard_after_forward, recurse):
        """A rank that skips a branch, or masks its loss to zero, contributes zeros to the mean."""

        class Branches(nn.Module):
            """All branches are in one group. A branch in its own group would be unsharded only on ranks that use it."""

            def __init__(self, trunk: nn.Module) -> None:
                super().__init__()
                self.trunk = trunk
                self.left, self.right, self.unused = (nn.Linear(8, 8) for _ in range(3))

            def forward(self, x: torch.Tensor, outer: str, *inner: str) -> torch.Tensor:
                return getattr(self, outer)(self.trunk(x, *inner))

        manual_seed(42)
        model = Branches(Branches(nn.Linear(8, 8)))
        ref_model = self._replica(model)
        shard_each([model.trunk, model], mesh=self._mesh(*mesh_shape), reshard_after_forward=reshard_after_forward)
        model.set_reduce_scatter_unused_params(True, recurse=recurse)
        # For each step, the branch and the rank whose loss is masked. Without recurse the trunk does not reduce unused
        # parameters, so all ranks must use the same inner branch.
        plan = iter([("left" if self.rank % 2 else "right", 0), ("left" if self.rank == 3 else "right", 1)])

        def step(each: nn.Module, batch: Any) -> torch.Tensor:
            inp, branch, masked = batch
            inner = {"left": "right", "right": "left"}[branch] if recurse else "left"
            loss = loss_of(each(inp, branch, inner))
            backward((0 if self.rank == masked else self.rank + 1) * loss)
            if each is ref_model:
                for name, param in each.named_parameters():
                    if param.grad is None and (recurse or not name.startswith("trunk.")):
                        param.grad = torch.zeros_like(param)
            return loss.detach()

        next_batch = lambda: (self._inputs(2, 8), *next(plan))  # noqa: E731
        self._check_training(
            ref_model,
            model,
            next_batch,
            Loop(step=step, iterations=FEW),
            optims=optimizers(ref_model, model, cls=torch.optim.Adam),
        )


if __name__ == "__main__":
    run_tests()
