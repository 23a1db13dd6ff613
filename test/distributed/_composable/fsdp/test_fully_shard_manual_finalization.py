"""Manual finalization of FSDP2's backward.

With ``set_manual_backward_finalization(True)`` a backward does not finalize itself. The caller finalizes one or several
backwards with ``finalize_backward``, which reduces the remaining gradients, reshards, and clears the state of the
iteration. The reference is a plain model, whose gradients accumulate over the same backwards and are averaged over the
ranks.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import NO_DEFECT, torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients, full
from torch_fsdp_tests.fsdp.training import (
    FEW,
    Loop,
    TrainingMixin,
    backward,
    check_gradients,
    check_parity,
    loss_of,
    optimizers,
    shard_each,
    take_step,
    train,
)
from torch_fsdp_tests.installed_torch import torch_facts, torch_names

DIM = 8
NUM_MICROBATCHES = 3
# The number of elements in each group's reduce-scatter for ``stack()``, in the order of the backward.
NUMELS = [2 * 3 * DIM * DIM + 3 * DIM + DIM, 2 * 2 * DIM * DIM + 2 * DIM + DIM, DIM * DIM + DIM]
GROUPS = len(NUMELS)

MUST_WAIT = "previous gradient reduction must be waited on before "


def stack() -> nn.Sequential:
    """A linear layer, which belongs to the root's group, and two MLPs of different sizes."""
    return nn.Sequential(nn.Linear(DIM, DIM), MLP(DIM, dim_multiplier=2), MLP(DIM, dim_multiplier=3))


def finalize(model: Any, async_op: bool = False) -> None:
    """Reduce the remaining gradients, and finalize the backward."""
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=async_op)
    if handle is not None:
        handle.wait()


def remembers_forwards(model: nn.Module) -> bool:
    """Whether FSDP still has the post-forward order of this iteration, which finalization clears."""
    return bool(internals.comm_context(model).post_forward_order)


class Forked(nn.Module):
    """A trunk, and a fork of several branches. A forward runs one branch or none."""

    class Fork(nn.ModuleList):
        def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
            return self[branch](x)

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(DIM, DIM)
        self.fork = self.Fork(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x: torch.Tensor, branch: int | None) -> torch.Tensor:
        x = self.trunk(x)
        return x if branch is None else self.fork(x, branch)


class Headed(nn.Module):
    """A body, a norm and a head. The forward skips the head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(DIM, DIM), nn.LayerNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(x))

    def backward_in_chunks(self, x: torch.Tensor, num_chunks: int) -> torch.Tensor:
        """Run the head's forward and backward on each chunk, then the backward of the rest."""
        hidden = self(x)
        leaves = [chunk.clone().requires_grad_() for chunk in hidden.detach().chunk(num_chunks)]
        losses = torch.stack([backward(loss_of(self.head(leaf))) for leaf in leaves])
        hidden.backward(torch.cat([leaf.grad for leaf in leaves if leaf.grad is not None]))
        return losses


@contextlib.contextmanager
def failing_once(owner: Any, name: str, call: int = 1) -> Iterator[None]:
    """Within the context, call number ``call`` of ``owner.name`` raises on all ranks."""
    original = getattr(owner, name)
    calls: list[int] = []

    def fail(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == call:
            raise ZeroDivisionError("on demand")
        return original(*args, **kwargs)

    with torch_names.patched(owner, name, fail):
        yield


class ManualTest(TrainingMixin, FSDPTest):
    """The base class of the test cases in this file."""

    def _models(
        self, make: Callable[[], Any] = stack, wrap: Callable[[Any], list[Any]] | None = None, **kwargs: Any
    ) -> tuple[Any, Any]:
        """A plain model and its sharded copy with manual finalization. Seeds each rank's inputs differently."""
        manual_seed(42)
        plain = make().to(self.device)
        model = self._replica(plain)
        shard_each([*model[1:], model] if wrap is None else wrap(model), **kwargs)
        for root in [model] if isinstance(model, FSDPModule) else model:
            root.set_manual_backward_finalization(True)
        self._seed()
        return plain, model

    def _microbatches(self) -> list[torch.Tensor]:
        return [self._inputs(4, DIM) for _ in range(NUM_MICROBATCHES)]

    def _accumulate(self, *models: nn.Module, num_microbatches: int = NUM_MICROBATCHES) -> None:
        """Run the same microbatches through all models, forward and backward."""
        for microbatch in self._microbatches()[:num_microbatches]:
            for model in models:
                train(model, microbatch)

    def _check_gradients(self, plain: nn.Module, model: nn.Module) -> None:
        """The gradients must equal the plain model's, averaged over the ranks. At least one must exist."""
        average_gradients(plain)
        self.assertTrue(any(param.grad is not None for param in plain.parameters()))
        check_gradients(self, plain, model)

    def _check_trains(self, plain: nn.Module, model: Any) -> None:
        """Further training of both models must agree. FSDP reduces each group once in each step."""

        def step(each: nn.Module, microbatches: list[torch.Tensor]) -> torch.Tensor:
            if each is model:
                model.set_requires_gradient_sync(False)
            losses = torch.stack([train(each, microbatch) for microbatch in microbatches])
            if each is model:
                finalize(model)
            return losses

        self._check_training(plain, model, self._microbatches, Loop(step=step, iterations=FEW))


@needs(torch_facts.HAS_FINALIZE_BACKWARD)
class TestFullyShardManualFinalization(ManualTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        reshard_after_forward=[True, False],
        reshard_after_backward=[True, False],
        offload=[True, False],
        async_op=[True, False],
        is_last_backward=[True, False],
    )
    def test_one_reduction_for_several_backwards(
        self, reshard_after_forward, reshard_after_backward, offload, async_op, is_last_backward
    ):
        """Only finalization reduces, each group once. ``set_is_last_backward`` has no effect."""
        kwargs: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
        plain, model = self._models(reshard_after_forward=reshard_after_forward, **kwargs)
        model.set_is_last_backward(is_last_backward)
        model.set_reshard_after_backward(reshard_after_backward)

        def step(each: nn.Module, microbatches: list[torch.Tensor]) -> torch.Tensor:
            if each is plain:
                return torch.stack([train(plain, microbatch) for microbatch in microbatches])
            model.set_requires_gradient_sync(False)
            with recorded() as calls:
                losses = torch.stack([train(model, microbatch) for microbatch in microbatches])
            # Backward unshards if forward reshards. The next forward unshards if backward reshards.
            first, further = 1 + reshard_after_forward, reshard_after_forward + reshard_after_backward
            gathers = GROUPS * (first + further * (NUM_MICROBATCHES - 1))
            self.assertEqual(calls.counts(), {"all_gather": gathers})
            self.assertTrue(remembers_forwards(model))
            with recorded() as calls:
                finalize(model, async_op)
            self.assertEqual([(call.name, call.numel) for call in calls], [("reduce_scatter", n) for n in NUMELS])
            self.assertFalse(remembers_forwards(model))
            for group in internals.groups_of(model):
                self.assertEqual(group.is_unsharded, not reshard_after_backward)
            for module in internals.fsdp_modules(model):
                module.reshard()  # required before a step if backward has not done it
            return losses

        self._check_training(plain, model, self._microbatches, Loop(step=step))

    @skip_if_lt_x_gpu(2)
    @subtests(pairwise=True, input_requires_grad=[True, False], async_op=[True, False], last_only=[True, False])
    def test_synchronized_backward(self, input_requires_grad, async_op, last_only):
        """With gradient synchronization on, each group reduces in backward, unless its inputs need no gradient.

        If the model's input needs none, this is the root's group, because autograd runs no post-backward for it.
        Finalization reduces the sum of its gradients once.
        """
        plain, model = self._models()
        in_backward = GROUPS if input_requires_grad else GROUPS - 1

        def step(each: nn.Module, microbatches: list[torch.Tensor]) -> torch.Tensor:
            if each is plain:
                return torch.stack([train(plain, microbatch) for microbatch in microbatches])
            losses = []
            for index, microbatch in enumerate(microbatches, 1):
                sync = index == NUM_MICROBATCHES or not last_only
                model.set_requires_gradient_sync(sync)
                with recorded("reduce_scatter") as calls:
                    losses.append(train(model, microbatch.clone().requires_grad_(input_requires_grad)))
                self.assertEqual([call.numel for call in calls], NUMELS[:in_backward] if sync else [], may_be="empty")
            self.assertTrue(remembers_forwards(model))
            with recorded() as calls:
                finalize(model, async_op)
            expected = [("reduce_scatter", numel) for numel in NUMELS[in_backward:]]
            self.assertEqual([(call.name, call.numel) for call in calls], expected, may_be="empty")
            self.assertFalse(remembers_forwards(model))
            return torch.stack(losses)

        self._check_training(plain, model, self._microbatches, Loop(step=step))

    @skip_if_lt_x_gpu(2)
    def test_handle(self):
        """Forward and finalization raise before the wait on the handle. A second wait does not affect later steps."""
        from torch.distributed.fsdp import GradientReductionHandle

        plain, model = self._models()
        handles = []
        for _ in range(2):
            model.set_requires_gradient_sync(False)
            self._accumulate(plain, model)
            model.set_requires_gradient_sync(True)
            with recorded() as calls:
                handles.append(model.finalize_backward(async_op=True))
            self.assertEqual(calls.counts(), {"reduce_scatter": GROUPS})
            self.assertIsInstance(handles[-1], GradientReductionHandle)
            if len(handles) == 2:
                self.assertIsNone(handles[0].wait())
            self.assertTrue(remembers_forwards(model))
            with recorded() as calls:
                with self.assertRaisesRegex(RuntimeError, MUST_WAIT + "forward"):
                    model(self._inputs(4, DIM))
                for async_op in (False, True):
                    with self.assertRaisesRegex(RuntimeError, MUST_WAIT + "finalizing backward again"):
                        model.finalize_backward(async_op=async_op)
                self.assertIsNone(handles[-1].wait())
                self.assertIsNone(handles[-1].wait())
            self.assertEqual(calls, [], may_be="empty")
            self.assertFalse(remembers_forwards(model))
        self._check_gradients(plain, model)

    @skip_if_lt_x_gpu(2)
    def test_handle_is_never_waited_on(self):
        """A reset without a wait drops the gradients. Afterwards the old handle raises, and the model trains."""
        plain, model = self._models()
        model.set_requires_gradient_sync(False)
        self._accumulate(model)
        model.set_requires_gradient_sync(True)
        stale = model.finalize_backward(async_op=True)
        model.reset_iter_state()
        self.assertEqual([param.grad for param in model.parameters()], [None] * len(list(model.parameters())))
        with self.assertRaisesRegex(RuntimeError, "handle was invalidated"):
            stale.wait()
        self._accumulate(plain, model)
        handle = model.finalize_backward(async_op=True)
        with self.assertRaisesRegex(RuntimeError, "handle was invalidated"):
            stale.wait()
        handle.wait()
        self._check_gradients(plain, model)
        plain.zero_grad()
        self._check_trains(plain, model)

    @skip_if_lt_x_gpu(2)
    def test_no_finalization(self):
        """If a step is not finalized, its gradients stay unreduced. The next finalization includes them."""
        plain, model = self._models()
        model.set_requires_gradient_sync(False)
        held = []
        for _ in range(2):
            self._accumulate(plain, model)
            model.zero_grad()  # does not clear unreduced gradients
            self.assertTrue(all(param.grad is None for param in model.parameters()))
            held.append(len(internals.comm_context(model).post_forward_order))
        self.assertEqual(held, [GROUPS * NUM_MICROBATCHES, 2 * GROUPS * NUM_MICROBATCHES])
        with recorded() as calls:
            finalize(model)
        self.assertEqual(calls.counts(), {"reduce_scatter": GROUPS})
        self.assertFalse(remembers_forwards(model))
        self._check_gradients(plain, model)

    @skip_if_lt_x_gpu(2)
    @subtests(async_op=[True, False])
    def test_finalization_without_synchronization(self, async_op):
        """With gradient synchronization off, finalization reduces nothing. A later finalization with synchronization on
        reduces all accumulated gradients.
        """
        plain, model = self._models()
        model.set_requires_gradient_sync(False)
        for _ in range(2):
            self._accumulate(plain, model)
            with recorded() as calls:
                handle = model.finalize_backward(async_op=async_op)
                if async_op:
                    handle.wait()
            self.assertEqual(calls, [], may_be="empty")
            self.assertFalse(remembers_forwards(model))
            self.assertTrue(all(param.grad is None for param in model.parameters()))
        for expected in ({"reduce_scatter": GROUPS}, {}):
            with recorded() as calls:
                finalize(model, async_op)
            self.assertEqual(calls.counts(), expected, may_be="empty")
        self._check_gradients(plain, model)

    @skip_if_lt_x_gpu(2)
    def test_groups_synchronize_apart(self):
        """Gradient synchronization is a setting of each group: one reduces in backward, one in finalization, and one in
        a later finalization.
        """
        plain, model = self._models()
        model.set_requires_gradient_sync(False)
        model[2].set_requires_gradient_sync(True)
        with recorded("reduce_scatter") as calls:
            self._accumulate(plain, model)
        self.assertEqual([call.numel for call in calls], NUMELS[:1] * NUM_MICROBATCHES)
        for module, numel in ((model[1], NUMELS[1]), (model, NUMELS[2])):
            module.set_requires_gradient_sync(True, recurse=False)
            with recorded() as calls:
                model.finalize_backward()
            self.assertEqual([(call.name, call.numel) for call in calls], [("reduce_scatter", numel)])
        self._check_gradients(plain, model)

    @skip_if_lt_x_gpu(2)
    @subtests(sync=[True, False], reshard=[True, False])
    def test_finalization_reshards(self, sync, reshard):
        """Groups that stay unsharded during several backwards are resharded in finalization, if that is enabled.

        Pipeline schedules do this. With gradient synchronization on, all groups reduce in backward.
        """
        plain, model = self._models(reshard_after_forward=False)
        model.set_requires_gradient_sync(sync)
        model.set_reshard_after_backward(False)
        with recorded() as calls:
            for microbatch in self._microbatches():
                train(plain, microbatch)
                train(model, microbatch.requires_grad_())
        expected = Counter(all_gather=GROUPS, reduce_scatter=GROUPS * NUM_MICROBATCHES if sync else 0)
        self.assertEqual(calls.counts(), +expected)
        self.assertTrue(all(group.is_unsharded for group in internals.groups_of(model)))
        model.set_reshard_after_backward(reshard)
        with recorded() as calls:
            finalize(model)
        self.assertEqual(calls.counts(), {} if sync else {"reduce_scatter": GROUPS}, may_be="empty")
        for module in internals.fsdp_modules(model):
            self.assertEqual(internals.group_of(module).is_sharded, reshard)
            module.reshard()
        self._check_gradients(plain, model)

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True, reduce_dtype=[torch.float32, torch.bfloat16], last_only=[True, False], async_op=[True, False]
    )
    def test_mixed_precision(self, reduce_dtype, last_only, async_op):
        """Gradients are accumulated and reduced in ``reduce_dtype``. The plain model computes in ``param_dtype``."""
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype, cast_forward_inputs=True)
        plain, model = self._models(mp_policy=policy)
        low = self._replica(plain).bfloat16()
        for _ in range(2):  # state of the first step would change the second
            model.zero_grad()
            sums = [torch.zeros_like(param, dtype=reduce_dtype) for param in plain.parameters()]
            for index, microbatch in enumerate(self._microbatches(), 1):
                low.zero_grad()
                train(low, microbatch.bfloat16())
                for total, param in zip(sums, low.parameters(), strict=True):
                    total += param.grad
                model.set_requires_gradient_sync(last_only and index == NUM_MICROBATCHES)
                train(model, microbatch)
            with recorded() as calls:
                finalize(model, async_op)
            self.assertEqual([call.dtype for call in calls], [reduce_dtype] * (1 if last_only else GROUPS))
            for param, total in zip(plain.parameters(), sums, strict=True):
                dist.all_reduce(total)  # the order of two summands does not matter
                param.grad = (total / 2).float()
            check_parity(self, plain, model, what=("gradient",), rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    def test_mixed_precision_of_synchronized_backwards(self):
        """Gradients of a group that only finalization reduces are accumulated in ``param_dtype``.

        With synchronization on, FSDP expects to reduce them in the same backward, so it does not cast them.
        """
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        plain, model = self._models(lambda: nn.Sequential(nn.Linear(DIM, DIM)), mp_policy=policy)
        low = self._replica(plain).bfloat16()
        for microbatch in self._microbatches():
            train(low, microbatch.bfloat16())
            train(model, microbatch)
        finalize(model)
        total = low[0].weight.grad.float()
        dist.all_reduce(total)
        self.assertEqual(full(model[0].weight.grad), total / 2, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    @subtests(async_op=[True, False])
    def test_before_the_first_forward(self, async_op):
        """Before the first forward ``finalize_backward`` does nothing, also below the root and in automatic mode."""
        plain, model = self._models()
        for manual in (False, True):
            model.set_manual_backward_finalization(manual)
            for module in internals.fsdp_modules(model):
                with recorded() as calls:
                    handle = module.finalize_backward(async_op=async_op)
                    self.assertEqual(handle is not None, async_op)
                    for _ in range(2):
                        self.assertIsNone(handle.wait() if async_op else None)
                self.assertEqual(calls, [], may_be="empty")
        self._check_trains(plain, model)

    @skip_if_lt_x_gpu(2)
    @subtests(async_op=[True, False])
    def test_backward_of_others(self, async_op):
        """Finalization does nothing after a backward through a model without FSDP parameters."""
        plain, model = self._models()
        model.eval()
        with torch.no_grad():
            hidden = model(self._inputs(4, DIM))
        head = nn.Linear(DIM, 1).to(self.device)
        head(hidden).sum().backward()
        with recorded() as calls:
            finalize(model, async_op)
        self.assertEqual(calls, [], may_be="empty")
        self.assertTrue(all(param.grad is None for param in model.parameters()))
        self._check_trains(plain, model.train())

    @skip_if_lt_x_gpu(2)
    def test_manual_and_automatic_by_turns(self):
        """Finalization may change between manual and automatic from step to step."""
        plain, model = self._models()
        optims = optimizers(plain, model)
        for manual in (True, False, False, True, True):
            model.set_manual_backward_finalization(manual)
            with recorded("reduce_scatter") as calls:
                self._accumulate(plain, model, num_microbatches=1)
            self.assertEqual([call.numel for call in calls], NUMELS[:-1] if manual else NUMELS)
            self.assertEqual(remembers_forwards(model), manual)
            if manual:
                finalize(model)
            self._check_gradients(plain, model)
            take_step(optims)

    # --- Rejected calls ---

    def _check_rejected(self, message: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """The call must raise an error with this message, without any collective."""
        with recorded() as calls, self.assertRaisesRegex(RuntimeError, message):
            function(*args, **kwargs)
        self.assertEqual(calls, [], may_be="empty")

    @skip_if_lt_x_gpu(2)
    @subtests(async_op=[True, False])
    def test_below_the_root(self, async_op):
        """``finalize_backward`` and ``set_manual_backward_finalization`` raise on an FSDP module below the root."""
        plain, model = self._models()
        self._accumulate(plain, model)
        for mlp in model[1:]:
            message = "finalize_backward must be called on the root FSDP module"
            self._check_rejected(message, mlp.finalize_backward, async_op=async_op)
            for enabled in (True, False):
                message = "set_manual_backward_finalization must be called on the root FSDP module"
                self._check_rejected(message, mlp.set_manual_backward_finalization, enabled)
        finalize(model, async_op)
        self._check_gradients(plain, model)

    @skip_if_lt_x_gpu(2)
    def test_set_below_the_root_before_the_first_forward(self):
        """If the setter is called below the root before the first forward, FSDP does not know the root yet. The root's
        first forward raises.
        """
        _, model = self._models()
        model[1].set_manual_backward_finalization(True)
        message = "set_manual_backward_finalization must be called on the root FSDP module"
        self._check_rejected(message, model, self._inputs(4, DIM))

    @skip_if_lt_x_gpu(2)
    @subtests(async_op=[True, False])
    def test_automatic(self, async_op):
        """With automatic finalization ``finalize_backward`` raises and changes no gradients."""
        plain, model = self._models()
        model.set_manual_backward_finalization(False)
        self._accumulate(plain, model)
        message = r"requires manual backward finalization. Call set_manual_backward_finalization\(True\) before forward"
        self._check_rejected(message, model.finalize_backward, async_op=async_op)
        self._check_gradients(plain, model)

    @skip_if_lt_x_gpu(2)
    @subtests(manual=[True, False])
    def test_within_backward(self, manual):
        """During a backward, ``finalize_backward`` raises, and the setter raises if it changes the value."""
        plain, model = self._models()
        model.set_manual_backward_finalization(manual)
        rejected = []

        def call(grad: torch.Tensor) -> None:
            message = "cannot change mode during backward"
            self._check_rejected(message, model.set_manual_backward_finalization, not manual)
            model.set_manual_backward_finalization(manual)
            message = "must be called after backward completes" if manual else "requires manual backward finalization"
            for async_op in (True, False):
                self._check_rejected(message, model.finalize_backward, async_op=async_op)
            rejected.append(1)

        handle = model[1].register_forward_hook(lambda module, args, output: output.register_hook(call) and None)
        self._accumulate(plain, model, num_microbatches=1)
        self.assertEqual(rejected, [1])
        handle.remove()
        if manual:
            finalize(model)
        self._check_gradients(plain, model)

    @skip_if_lt_x_gpu(2)
    @subtests(way_out=["finalize", "reset"])
    def test_change_after_backward(self, way_out):
        """After a backward, the setter raises if it changes the value before finalization or a reset."""
        plain, model = self._models()
        self._accumulate(model)
        message = "cannot change mode after backward starts"
        self._check_rejected(message, model.set_manual_backward_finalization, False)
        model.set_manual_backward_finalization(True)
        if way_out == "finalize":
            finalize(model)
            model.zero_grad()
        else:
            model.reset_iter_state()
        model.set_manual_backward_finalization(False)
        with recorded("reduce_scatter") as calls:
            self._accumulate(plain, model, num_microbatches=1)
        self.assertEqual([call.numel for call in calls], NUMELS)
        self._check_gradients(plain, model)

    # --- Exceptions ---

    @skip_if_lt_x_gpu(2)
    @subtests(sync=[True, False])
    def test_exception_in_backward(self, sync):
        """A backward that raised cannot be finalized. After a reset the step can be repeated."""
        plain, model = self._models()
        model.set_requires_gradient_sync(sync)
        self._accumulate(model, num_microbatches=1)

        def fail(*_: Any) -> None:
            raise ZeroDivisionError("on demand")

        handle = model[1].register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)
        with self.assertRaisesRegex(ZeroDivisionError, "on demand"):
            self._accumulate(model, num_microbatches=1)
        handle.remove()
        self._check_rejected("must be called after backward completes", model.finalize_backward)
        model.reset_iter_state()
        self._check_trains(plain, model)

    @skip_if_lt_x_gpu(2)
    @subtests(async_op=[True, False], call=[1, GROUPS])
    def test_exception_in_reduction(self, async_op, call):
        """If a reduction raises, its gradients are lost. After a reset the step can be repeated."""
        plain, model = self._models()
        model.set_requires_gradient_sync(False)
        self._accumulate(model)
        with (
            failing_once(dist, torch_facts.reduce_scatter_name(), call),
            self.assertRaisesRegex(ZeroDivisionError, "on demand"),
        ):
            finalize(model, async_op)
        model.reset_iter_state()
        self.assertTrue(all(param.grad is None for param in model.parameters()))
        self._check_trains(plain, model)

    @skip_if_lt_x_gpu(2)
    @subtests(async_op=[True, False])
    def test_exception_after_reduction(self, async_op):
        """If finalization raises after the reductions, it can be called again. No gradient is reduced twice."""
        plain, model = self._models()
        model.set_requires_gradient_sync(False)
        self._accumulate(plain, model)
        model.set_requires_gradient_sync(True)
        with recorded() as calls, failing_once(internals.fsdp2_param_group.FSDPParamGroup, "finalize_backward", 2):
            finish = model.finalize_backward(async_op=True).wait if async_op else model.finalize_backward
            with self.assertRaisesRegex(ZeroDivisionError, "on demand"):
                finish()
            self.assertTrue(remembers_forwards(model))
            if async_op:
                with self.assertRaisesRegex(RuntimeError, MUST_WAIT + "forward"):
                    model(self._inputs(4, DIM))
            finish()
        self.assertEqual(calls.counts(), {"reduce_scatter": GROUPS})
        self.assertFalse(remembers_forwards(model))
        self._check_gradients(plain, model)
        plain.zero_grad()
        model.zero_grad()
        self._check_trains(plain, model)

    # --- Other groups, other modules ---

    @skip_if_lt_x_gpu(2)
    @subtests(pairwise=True, zeros_for_unused=[True, False], last_only=[True, False], async_op=[True, False])
    def test_unused_parameters(self, zeros_for_unused, last_only, async_op):
        """Gradients are right if only the first microbatch runs a branch, which may differ by rank.

        If it does, the group needs ``set_reduce_scatter_unused_params``, so that unused parameters have zero gradients.
        """
        plain, model = self._models(Forked, lambda model: [model.fork, model])
        model.fork.set_reduce_scatter_unused_params(zeros_for_unused)
        branch = self.rank if zeros_for_unused else 0
        for index, microbatch in enumerate(self._microbatches()):
            model.set_requires_gradient_sync(last_only and index == NUM_MICROBATCHES - 1)
            for each in (plain, model):
                backward(loss_of(each(microbatch, branch if index == 0 else None)))
        with recorded() as calls:
            finalize(model, async_op)
        trunk = DIM * DIM + DIM
        self.assertEqual([call.numel for call in calls], [trunk * (3 if zeros_for_unused else 1), trunk])
        for param in plain.fork.parameters() if zeros_for_unused else ():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        self._check_gradients(plain, model)

    @skip_if_lt_x_gpu(2)
    @subtests(async_op=[True, False])
    def test_frozen_group(self, async_op):
        """A frozen group gets no gradient and is not reduced."""
        plain, model = self._models()
        for each in (plain, model):
            each[1].requires_grad_(False)
        model.set_requires_gradient_sync(False)
        self._accumulate(plain, model)
        with recorded() as calls:
            finalize(model, async_op)
        self.assertEqual([call.numel for call in calls], [NUMELS[0], NUMELS[2]])
        self._check_gradients(plain, model)

    @skip_if_lt_x_gpu(2)
    def test_group_of_modules_in_chunks(self):
        """The head of ``fully_shard([norm, head])`` runs backward chunk by chunk. Its gradients are reduced once."""
        plain, model = self._models(Headed, lambda model: [[model.norm, model.head], model])

        def step(each: Any, inp: torch.Tensor) -> torch.Tensor:
            if each is model:
                model.set_requires_gradient_sync(False)
            with recorded("reduce_scatter") as calls:
                losses = each.backward_in_chunks(inp, num_chunks=2)
                self.assertEqual(calls, [], may_be="empty")
                if each is model:
                    finalize(model)
            self.assertEqual(len(calls), 2 if each is model else 0)
            return losses

        self._check_training(plain, model, lambda: self._inputs(4, DIM), Loop(step=step))


@needs(torch_facts.HAS_FINALIZE_BACKWARD)
class TestFullyShardManualFinalizationOfSeveralRoots(ManualTest):
    """Two roots that share a communication context."""

    world_size = 2

    def _roots(self) -> tuple[nn.Module, Any]:
        """A plain sequence of two modules, and a sequence of two roots."""
        from torch.distributed.fsdp import share_comm_ctx

        plain, model = self._models(lambda: nn.Sequential(MLP(DIM), MLP(DIM)), list)
        share_comm_ctx(list(model))
        return plain, model

    @skip_if_lt_x_gpu(2)
    def test_one_at_a_time(self):
        """While one root's reduction is pending, the other's forward, finalization and reset are rejected."""
        plain, model = self._roots()
        first, second = model
        for index in range(2):
            self._accumulate(plain[index], model[index])
        second.finalize_backward()
        handle = first.finalize_backward(async_op=True)
        with recorded() as calls:
            with self.assertRaisesRegex(RuntimeError, MUST_WAIT + "forward"):
                second(self._inputs(4, DIM))
            for async_op in (True, False):
                with self.assertRaisesRegex(RuntimeError, "Another gradient reduction sharing this communication"):
                    second.finalize_backward(async_op=async_op)
            with self.assertRaisesRegex(RuntimeError, "cannot reset a gradient reduction owned by another FSDP root"):
                second.reset_iter_state()
        self.assertEqual(calls, [], may_be="empty")
        handle.wait()
        self._accumulate(plain[1], second)
        finalize(second, async_op=True)
        self._check_gradients(plain, model)

    @skip_if_lt_x_gpu(2)
    def test_open_iteration_of_another(self):
        """Asynchronous finalization raises if a root with the same context has run a backward that is not finalized."""
        plain, model = self._roots()
        first, second = model
        for index in range(2):
            self._accumulate(plain[index], model[index])
        with recorded() as calls, self.assertRaisesRegex(RuntimeError, "cannot overlap work from another FSDP root"):
            first.finalize_backward(async_op=True)
        self.assertEqual(calls, [], may_be="empty")
        second.finalize_backward()
        finalize(first, async_op=True)
        self._check_gradients(plain, model)


class TestFullyShardSharedContext(ManualTest):
    world_size = 2

    @needs(torch_facts.CAN_SHARE_COMM_CONTEXT)
    @skip_if_lt_x_gpu(2)
    def test_automatic_end_between_forward_and_backward_of_another(self):
        """One root's backward may end between the forward and the backward of another root with the same context.

        It must not be the last one, because the end of the last one clears the order of forwards of all roots.
        """
        from torch.distributed.fsdp import share_comm_ctx

        manual_seed(42)
        plain = nn.Sequential(MLP(DIM), MLP(DIM)).to(self.device)
        model = self._replica(plain)
        for mlp in model:
            fully_shard(mlp)
        share_comm_ctx(list(model))
        model[0].set_is_last_backward(False)
        self._seed()
        for _ in range(2):  # the first forwards initialize lazily
            inp = self._inputs(4, DIM)
            for mlp in plain:
                loss_of(mlp(inp)).backward()
            first, second = (loss_of(mlp(inp)) for mlp in model)
            first.backward()
            second.backward()
            self._check_gradients(plain, model)


@needs(torch_facts.HAS_FINALIZE_BACKWARD)
class TestFullyShardManualFinalizationHSDP(ManualTest):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
        reshard_after_forward=[True, False],
        offload=[True, False],
        async_op=[True, False],
        last_only=[True, False],
    )
    def test_one_reduction_for_several_backwards(self, reshard_after_forward, offload, async_op, last_only):
        """Each group is reduce-scattered and all-reduced once, in the last backward or in finalization."""
        kwargs: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if offload else {}
        plain, model = self._models(mesh=self._mesh(2, 2), reshard_after_forward=reshard_after_forward, **kwargs)

        def step(each: nn.Module, microbatches: list[torch.Tensor]) -> torch.Tensor:
            losses = []
            with recorded("reduce_scatter", "all_reduce") as calls:
                for index, microbatch in enumerate(microbatches, 1):
                    if each is model:
                        model.set_requires_gradient_sync(last_only and index == NUM_MICROBATCHES)
                    losses.append(train(each, microbatch))
            if each is model:
                in_backward = GROUPS - 1 if last_only else 0
                expected = Counter(reduce_scatter=in_backward, all_reduce=in_backward)
                self.assertEqual(calls.counts(), +expected, may_be="empty")
                with recorded() as calls:
                    finalize(model, async_op)
                expected = Counter(reduce_scatter=GROUPS - in_backward, all_reduce=GROUPS - in_backward)
                self.assertEqual(calls.counts(), expected)
            return torch.stack(losses)

        self._check_training(plain, model, self._microbatches, Loop(step=step, iterations=FEW))

    @skip_if_lt_x_gpu(4)
    @subtests(pairwise=True, which=["root", "mlp", "all"], async_op=[True, False])
    def test_finalization_without_all_reduce(self, which, async_op):
        """Finalization without all-reduce is rejected before any reduction. It works after all-reduce is enabled."""
        plain, model = self._models(mesh=self._mesh(2, 2))
        model.set_requires_gradient_sync(False)
        self._accumulate(plain, model)
        model.set_requires_gradient_sync(True)
        module = model[1] if which == "mlp" else model
        module.set_requires_all_reduce(False, recurse=which == "all")
        name = "1" if which == "mlp" else "<root>"
        message = f"requires all-reduce for parameter group '{name}'. Call set_requires_all_reduce"
        with recorded() as calls, self.assertRaisesRegex(RuntimeError, message):
            model.finalize_backward(async_op=async_op)
        self.assertEqual(calls, [], may_be="empty")
        module.set_requires_all_reduce(True, recurse=which == "all")
        finalize(model, async_op)
        self._check_gradients(plain, model)

    @skip_if_lt_x_gpu(4)
    @subtests(pairwise=True, way_out=["backward", "reset"], async_op=[True, False])
    def test_finalization_after_partial_reduction(self, way_out, async_op):
        """Finalization raises after a backward without all-reduce. Another backward with all-reduce completes the
        reduction, or a reset drops it.
        """
        plain, model = self._models(mesh=self._mesh(2, 2))
        model.set_requires_all_reduce(False)
        self._accumulate(*(plain, model) if way_out == "backward" else (model,), num_microbatches=1)
        model.set_requires_all_reduce(True)
        message = "does not support partial gradient reductions for parameter group '1'. Use automatic"
        with recorded() as calls, self.assertRaisesRegex(RuntimeError, message):
            model.finalize_backward(async_op=async_op)
        self.assertEqual(calls, [], may_be="empty")
        if way_out == "reset":
            model.reset_iter_state()
        with recorded("all_reduce") as calls:
            self._accumulate(plain, model, num_microbatches=1)
            finalize(model, async_op)
        self.assertEqual(calls.counts(), {"all_reduce": GROUPS})
        self._check_gradients(plain, model)


@needs(torch_facts.HAS_FINALIZE_BACKWARD)
class TestFullyShardManualFinalizationSplitBackward(ManualTest):
    world_size = 2

    def _backward_of_input(self, module: nn.Module, inp: torch.Tensor) -> list[dict[str, Any]]:
        """Compute the gradient of the input alone. Returns the argument with which ``stage_backward_weight`` computes
        the gradients of the parameters.
        """
        loss = loss_of(module(inp))
        return internals.pipeline_backward.stage_backward_input([loss], None, [inp], iter(module.parameters()))[1]

    @skip_if_lt_x_gpu(2)
    @subtests(pairwise=True, reduce_dtype=[None, torch.float32], weights_last=[True, False], async_op=[True, False])
    def test_split_backward(self, reduce_dtype, weights_last, async_op):
        """Finalization reduces gradients of parameters that are computed later than those of the inputs."""
        param_dtype = None if reduce_dtype is None else torch.bfloat16
        plain, model = self._models(
            reshard_after_forward=False, mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype)
        )
        low = self._replica(plain).to(param_dtype)
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        later = []
        with recorded("reduce_scatter") as calls:
            for microbatch in self._microbatches():
                ref_inp, inp = (microbatch.to(param_dtype).clone().requires_grad_() for _ in range(2))
                low.zero_grad()
                train(low, ref_inp)
                for param, low_param in zip(plain.parameters(), low.parameters(), strict=True):
                    grad = low_param.grad.float()
                    param.grad = grad if param.grad is None else param.grad + grad
                later.append(self._backward_of_input(model, inp))
                self.assertEqual(inp.grad, ref_inp.grad)
                if not weights_last:
                    internals.pipeline_backward.stage_backward_weight(model.parameters(), later.pop())
            for param_groups in later:
                internals.pipeline_backward.stage_backward_weight(model.parameters(), param_groups)
        self.assertEqual(calls, [], may_be="empty")
        model.set_reshard_after_backward(True)
        with recorded() as calls:
            finalize(model, async_op)
        self.assertEqual([(call.name, call.numel) for call in calls], [("reduce_scatter", n) for n in NUMELS])
        self._check_gradients(plain, model)


@needs(torch_facts.HAS_FINALIZE_BACKWARD)
class TestFullyShardManualFinalizationPipeline(ManualTest):
    """A pipeline of two ranks with two stages each. FSDP2 shards each stage over two ranks."""

    world_size = 4

    @skip_if_lt_x_gpu(4)
    @subtests(schedule=["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"], scale_grads=[False, True])
    def test_schedule(self, schedule, scale_grads):
        """A pipeline schedule finalizes each stage in a step with ``finalize_gradients=True``, and in no other step.

        Only such a step divides by the number of microbatches.
        """
        self._check_schedule(schedule, reshard_after_forward=False, scale_grads=scale_grads)

    @skip_if_lt_x_gpu(4)
    def test_schedule_resharding_after_forward(self):
        """The gradients are right if FSDP2 reshards after forward, which is the default below the root."""
        shows = torch_defect("pipeline_split_backward_loses_gradients")
        self._check_schedule("ScheduleInterleavedZeroBubble", None, shows)

    def _check_schedule(
        self,
        schedule: str,
        reshard_after_forward: bool | None,
        shows: torch_defect = NO_DEFECT,
        scale_grads: bool = False,
    ) -> None:
        """``shows`` is a known defect in the gradients of all stages but the first, and in the number of
        reduce-scatters on the rank of the last stage.
        """
        from torch.distributed import pipelining

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return (output - target).square().mean()

        mesh, num_microbatches = self._mesh(2, 2, names=("pipeline", "data")), 2
        manual_seed(42)
        plain = nn.Sequential(*(stack() for _ in range(4))).to(self.device)
        for param in plain.parameters():
            param.data *= 2  # otherwise the gradients of the first stages are below the tolerance
        rank = mesh.get_local_rank("pipeline")
        indices = [rank, rank + 2] if schedule == "ScheduleInterleavedZeroBubble" else [rank, 3 - rank]
        modules = [self._replica(plain[index]) for index in indices]
        for module in modules:
            shard_each([*module[1:], module], mesh=mesh["data"], reshard_after_forward=reshard_after_forward)
        stages = [
            pipelining.PipelineStage(module, index, 4, self.device, group=mesh.get_group("pipeline"))
            for module, index in zip(modules, indices, strict=True)
        ]
        pipeline = getattr(pipelining, schedule)(stages, num_microbatches, loss_fn=loss_fn, scale_grads=scale_grads)
        self._seed(mesh.get_local_rank("data"))
        for is_end in (True, False, True):
            inp, target = (self._inputs(2 * num_microbatches, DIM) for _ in range(2))
            for ref_inp, ref_target in zip(inp.chunk(num_microbatches), target.chunk(num_microbatches), strict=True):
                loss_fn(plain(ref_inp), ref_target).backward()
            args, kwargs = [inp] if 0 in indices else [], {"target": target} if 3 in indices else {}
            with recorded("reduce_scatter") as calls:
                pipeline.step(*args, finalize_gradients=is_end, **kwargs)
            if is_end:
                average_gradients(plain, mesh.get_group("data"))
                for param in plain.parameters() if scale_grads else ():
                    param.grad /= num_microbatches
                for module, index in zip(modules, indices, strict=True):
                    with shows if index > 0 else NO_DEFECT:
                        check_gradients(self, plain[index], module)
                with shows if 3 in indices else NO_DEFECT:
                    self.assertEqual(len(calls), 2 * GROUPS)
                for module in (plain, *modules) if scale_grads else ():  # what is left would be divided again
                    module.zero_grad()
            else:
                self.assertEqual(len(calls), 0)


if __name__ == "__main__":
    run_tests()
