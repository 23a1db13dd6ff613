"""After an exception in an iteration and ``reset_iter_state``, a model trains again."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    MixedPrecisionPolicy,
)

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    MLP,
    FSDPTest,
)
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.training import (
    TrainingMixin,
    check_parity,
    loss_of,
    optimizers,
    shard_each,
)
from torch_fsdp_tests.installed_torch import torch_facts

needs_reset = needs(torch_facts.HAS_RESET_ITER_STATE)


class TestFullyShard1DTrainingCompose(TrainingMixin, FSDPTest):
    world_size = 2

    def _mlps(self, **kwargs: Any) -> Any:
        """A sharded model of a linear layer in the root's group and three wrapped MLPs."""
        manual_seed(42)
        model = nn.Sequential(nn.Linear(8, 8), *(MLP(8) for _ in range(3))).to(self.device)
        return shard_each([*model[1:], model], **kwargs)

    def _check_reset(self, model: nn.Module) -> None:
        """After the reset no state of the failed iteration is left."""
        comm = internals.comm_context(model)
        held: tuple[Any, ...] = comm.post_forward_order, comm.reduce_scatter_states, comm.all_gather_state
        self.assertEqual(held, ([], [], None))
        for group in internals.groups_of(model):
            self.assertTrue(group.is_sharded)
            held = internals.pending_gather(group), group._partial_reduce_output, group._all_reduce_state
            self.assertEqual(held, (None, None, None))
            self.assertEqual(internals.forward_positions(group), [], may_be="empty")

    def _check_recovered(self, model: nn.Module, **kwargs: Any) -> None:
        """After the reset no state is left, and the model trains bitwise like a fresh one."""
        self._check_reset(model)
        iteration = internals.iteration_context(model)
        fresh = self._mlps(**kwargs)
        model.zero_grad()
        event = torch.get_device_module(self.device.type).Event()
        event.record()
        model.set_post_optim_event(event)
        model.set_requires_gradient_sync(True)
        optims = optimizers(fresh, model)
        roots: list[Any] = []
        handle = model[-1].register_forward_hook(lambda *_: roots.append(iteration.iter_forward_root))
        for _ in range(3):
            inp = self._inputs(4, 8)
            for each, optim in zip((fresh, model), optims):
                optim.zero_grad()
                loss_of(each(inp)).backward()
            # The root ran as the root of a new forward, also the first time. Otherwise it would not take the event.
            self.assertIs(roots.pop(), internals.state_of(model))
            self.assertIsNone(iteration.post_optim_event)
            check_parity(self, fresh, model, rtol=0, atol=0)
            for optim in optims:
                optim.step()
        handle.remove()
        check_parity(self, fresh, model, rtol=0, atol=0)

    def _break_off(self, model: nn.Module, at: str) -> None:
        """Raise in an iteration of the model, at the same place on all ranks, and reset the model."""

        def fail(*_: Any) -> None:
            raise ZeroDivisionError(at)

        def fail_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(fail)

        mlp = model[2]
        handle = {
            "forward, inside": lambda: mlp.out_proj.register_forward_pre_hook(fail),
            "forward, between": lambda: mlp.register_forward_pre_hook(fail, prepend=True),
            "forward, after": lambda: model[3].register_forward_hook(fail),
            "backward, between": lambda: mlp.register_forward_hook(fail_in_backward, prepend=True),
            "backward, inside": lambda: mlp.in_proj.register_forward_hook(fail_in_backward),
        }[at]()
        with self.assertRaisesRegex(ZeroDivisionError, at):
            loss_of(model(self._inputs(4, 8))).backward()
        handle.remove()
        model.reset_iter_state()

    @needs_reset
    @skip_if_lt_x_gpu(2)
    @subtests(
        at=["forward, inside", "forward, between", "forward, after", "backward, between"],
        reshard_after_forward=[True, False, None],
    )
    def test_reset_iter_state_then_parity(self, at, reshard_after_forward):
        """A reset after an exception in a non-root's forward or in backward clears all state."""
        kwargs = {"reshard_after_forward": reshard_after_forward}
        model = self._mlps(**kwargs)
        self._seed()
        self._break_off(model, at)
        self._check_recovered(model, **kwargs)

    @needs_reset
    @skip_if_lt_x_gpu(2)
    def test_reset_iter_state_drops_unshards(self):
        """A reset waits for pending all-gathers and reshards their parameters."""
        model = self._mlps()
        self._seed()
        self._break_off(model, "forward, inside")
        for module in internals.fsdp_modules(model):
            module.unshard(async_op=True)
        model.reset_iter_state()
        for group in internals.groups_of(model):
            self.assertIsNone(internals.pending_gather(group))
            self.assertTrue(group.is_sharded)
        self._check_recovered(model)

    @needs_reset
    @skip_if_lt_x_gpu(2)
    @subtests(reduce_dtype=[None, torch.float32])
    def test_reset_iter_state_drops_accumulated_gradients(self, reduce_dtype):
        """A reset drops gradients that were accumulated without reduction, as its docstring says."""
        param_dtype = None if reduce_dtype is None else torch.bfloat16
        kwargs = {"mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)}
        model = self._mlps(**kwargs)
        self._seed()
        model.set_requires_gradient_sync(False)
        loss_of(model(self._inputs(4, 8))).backward()
        self._break_off(model, "forward, between")
        self._check_reset(model)
        with torch_defect("fsdp2_reset_keeps_unreduced_gradients"):
            self._check_recovered(model, **kwargs)

    @needs_reset
    @skip_if_lt_x_gpu(2)
    def test_reset_iter_state_drops_gradients_of_broken_backward(self):
        """If backward raises inside a module, a reset drops the gradients that the module already has.

        With the defect they stay on the unsharded parameters, because the exception comes before they are reduced.
        """
        model = self._mlps()
        self._seed()
        self._break_off(model, "backward, inside")
        self._check_reset(model)
        with torch_defect("fsdp2_reset_keeps_unreduced_gradients"):
            self._check_recovered(model)


if __name__ == "__main__":
    run_tests()
