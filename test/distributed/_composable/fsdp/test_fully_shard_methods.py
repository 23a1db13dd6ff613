"""Public methods of FSDP2, called in unusual states. Afterwards, models train like plain models."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.forward_methods import Generating, GenerationMixin
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.seeded import uniform
from torch_fsdp_tests.fsdp.training import Loop, backward, loss_of, shard_each, train

# Methods and their arguments: settings that do not change the results of training, or that are undone at once.
CALLS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "reshard": [("reshard", {})],
    "unshard": [("unshard", {"async_op": False})],
    "unshard, asynchronous": [("unshard", {"async_op": True})],
    "unshard and reshard": [("unshard", {"async_op": False}), ("reshard", {})],
    "accumulation on and off": [
        ("set_requires_gradient_sync", {"requires_gradient_sync": False}),
        ("set_requires_gradient_sync", {"requires_gradient_sync": True}),
    ],
    "all-reduce off and on": [
        ("set_requires_all_reduce", {"requires_all_reduce": False}),
        ("set_requires_all_reduce", {"requires_all_reduce": True}),
    ],
    "last backward": [
        ("set_is_last_backward", {"is_last_backward": False}),
        ("set_is_last_backward", {"is_last_backward": True}),
    ],
    "resharded after forward": [("set_reshard_after_forward", {"reshard_after_forward": True})],
    "unsharded after forward": [("set_reshard_after_forward", {"reshard_after_forward": False})],
    "resharding after backward off and on": [
        ("set_reshard_after_backward", {"reshard_after_backward": False}),
        ("set_reshard_after_backward", {"reshard_after_backward": True}),
    ],
    "no prefetch in forward": [("set_modules_to_forward_prefetch", {"modules": []})],
    "no prefetch in backward": [("set_modules_to_backward_prefetch", {"modules": []})],
    "divide factor": [("set_gradient_divide_factor", {"factor": 2.0})],
    "sums": [("set_force_sum_reduction_for_comms", {"enable": True})],
    "zeros for unused parameters": [("set_reduce_scatter_unused_params", {"reduce_scatter_unused_params": True})],
    "two input buffers": [("set_reduce_scatter_max_input_buffers", {"max_input_buffers": 2})],
    "storage is kept": [("set_keep_unsharded_storage", {"keep": True})],
    "default collectives": [
        ("set_custom_all_gather", {"comm": internals.fsdp2_collectives.DefaultAllGather()}),
        ("set_custom_reduce_scatter", {"comm": internals.fsdp2_collectives.DefaultReduceScatter()}),
    ],
    "a hook of all-reduce": [("set_all_reduce_hook", {"hook": lambda reduced: None})],
    "divide factor, deprecated": [("set_reduce_scatter_divide_factor", {"factor": 2.0})],
    "a group for reductions on and off": [
        ("set_separate_reduce_scatter_group", {"enable": True}),
        ("set_separate_reduce_scatter_group", {"enable": False}),
    ],
    "unsharding in backward off and on": [
        ("set_unshard_in_backward", {"unshard_in_backward": False}),
        ("set_unshard_in_backward", {"unshard_in_backward": True}),
    ],
    "memory of the process group off": [("set_allocate_memory_from_process_group_for_comm", {"enable": False})],
}
# These need an accelerator or a whole step, and have their own tests.
OTHERS = {
    *("set_post_optim_event", "set_symm_mem_for_comm"),
    *("reset_iter_state", "set_manual_backward_finalization", "finalize_backward"),
}


def evaluate(model: Any, inp: torch.Tensor) -> None:
    with torch.no_grad():
        model(inp)


def fail_in_forward(model: Any, inp: torch.Tensor) -> None:
    def fail(*unused: Any) -> None:
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError), model[-1].out_proj.register_forward_hook(fail):
        model(inp)


def reset(model: Any) -> None:
    model.reset_iter_state()
    assert all(isinstance(param, DTensor) for param in model.parameters())


def recover(model: Any, inp: torch.Tensor) -> None:
    fail_in_forward(model, inp)
    reset(model)


FAILED = "between an exception in forward and the reset"
RECOVERED = "after an exception in forward and a reset"
STATES: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "before the first forward": lambda model, inp: None,
    "after a forward under no_grad": evaluate,
    "after a step": lambda model, inp: (model(inp).sum().backward(), model.zero_grad()),
    FAILED: fail_in_forward,
    RECOVERED: recover,
}


def is_possible(state: str, **_: Any) -> bool:
    return state not in (FAILED, RECOVERED) or hasattr(FSDPModule, "reset_iter_state")


class TestFullyShardMethods(GenerationMixin, FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False, None])
    def test_generation_between_steps(self, reshard_after_forward):
        """Each training step trains on what a registered method has just generated."""

        def wrap(model: Generating) -> Generating:
            shard_each((*model.layers, model), reshard_after_forward=reshard_after_forward)
            register_fsdp_forward_method(model, "generate")
            return model

        self._check_generation(wrap, lambda model, tokens: model.generate(tokens))

    def test_each_public_method_is_called(self):
        public = {name for name in vars(FSDPModule) if not name.startswith("_")}
        called = {name for calls in CALLS.values() for name, _ in calls}
        self.assertEqual(public - called - OTHERS, set(), "give each a row in CALLS", may_be="empty")

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        valid=is_possible,
        call=list(CALLS),
        state=list(STATES),
        of=["root", "submodule"],
        by=["position", "keyword"],
    )
    def test_training_after_call(self, call, state, of, by):
        """If a method is called in the given state before each step, the model trains like a plain model."""
        manual_seed(42)
        plain = nn.Sequential(MLP(4), MLP(4)).to(self.device)
        model = self._replica(plain)
        shard_each((model[-1], model))
        target = model if of == "root" else model[-1]

        def step(each: Any, inp: torch.Tensor) -> torch.Tensor:
            if each is model:
                STATES[state](model, inp)
                for name, kwargs in CALLS[call]:
                    if hasattr(FSDPModule, name):  # older versions lack some
                        method = getattr(target, name)
                        method(**kwargs) if by == "keyword" else method(*kwargs.values())
                if state == FAILED:
                    reset(model)
            return train(each, inp)

        self._check_training(plain, model, lambda: self._inputs(2, 4), Loop(step=step, iterations=2))

    @skip_if_lt_x_gpu(2)
    @subtests(pairwise=True, state=list(STATES)[:3], by=["position", "keyword"])
    def test_forward_method_that_is_registered(self, state, by):
        """A method that is registered in the given state trains like that of a plain model."""
        manual_seed(42)
        plain = MLP(4).to(self.device)
        model = self._replica(plain)
        shard_each([model], reshard_after_forward=True)  # also the root, so that its parameters are sharded now
        STATES[state](model, self._inputs(2, 4))
        for each in (plain, model):
            each.other = lambda inp, each=each: type(each).forward(each, inp)
        if by == "keyword":
            register_fsdp_forward_method(module=model, method_name="other")
        else:
            register_fsdp_forward_method(model, "other")

        def step(each: Any, inp: torch.Tensor) -> torch.Tensor:
            return backward(loss_of(each.other(inp)))

        self._check_training(plain, model, lambda: self._inputs(2, 4), Loop(step=step, iterations=2))

    @skip_if_lt_x_gpu(2)
    @subtests(by=["position", "keyword"])
    def test_inputs_of_registered_method_are_cast(self, by):
        """FSDP casts a float32 input of a registered method to ``param_dtype``."""
        manual_seed(42)
        plain = nn.Linear(4, 4, bias=False, device=self.device)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = fully_shard(copy.deepcopy(plain), mp_policy=policy)
        model.other = lambda inp: nn.Linear.forward(model, inp)
        register_fsdp_forward_method(model, "other")
        inp = uniform(2, 4, seed=self.rank)
        output = model.other(inp=inp) if by == "keyword" else model.other(inp)
        expected = plain.bfloat16()(inp.bfloat16())
        self.assertEqual(output, expected, rtol=0, atol=0)
        for each in (output, expected):
            loss_of(each).backward()
        average_gradients(plain.float())
        self.assertEqual(model.weight.grad.full_tensor(), plain.weight.grad)


if __name__ == "__main__":
    run_tests()
