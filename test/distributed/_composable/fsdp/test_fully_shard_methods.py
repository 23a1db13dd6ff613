"""Public methods of FSDP2 in unusual states: afterwards training equals that of a plain model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.fsdp.combinations import pairwise_subtests
from torch_fsdp_tests.fsdp.training import TrainingMixin, backward, loss_of, shard_each, train

# Settings that do not change what is trained, and settings that are undone at once: a method, and its arguments.
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
}


def evaluate(model: Any, inp: torch.Tensor) -> None:
    with torch.no_grad():
        model(inp)


STATES: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "before the first forward": lambda model, inp: None,
    "after a forward under no_grad": evaluate,
    "after a step": lambda model, inp: (model(inp).sum().backward(), model.zero_grad()),
}


class TestFullyShardMethods(TrainingMixin, FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @pairwise_subtests(call=list(CALLS), state=list(STATES), of=["root", "submodule"], by=["position", "keyword"])
    def test_training_after_call(self, call, state, of, by):
        """A method is called in a state before each step. Training is that of the plain model."""
        manual_seed(42)
        plain = nn.Sequential(MLP(4), MLP(4)).to(self.device)
        model = self._replica(plain)
        shard_each((*model, model))
        target = model if of == "root" else model[0]

        def step(each: Any, inp: torch.Tensor) -> torch.Tensor:
            if each is model:
                STATES[state](model, inp)
                for name, kwargs in CALLS[call]:
                    if hasattr(FSDPModule, name):  # newer versions have more
                        method = getattr(target, name)
                        method(**kwargs) if by == "keyword" else method(*kwargs.values())
            return train(each, inp)

        self._check_training(plain, model, lambda: self._inputs(2, 4), step=step, iterations=2)

    @skip_if_lt_x_gpu(2)
    @pairwise_subtests(state=list(STATES), by=["position", "keyword"])
    def test_forward_method_that_is_registered(self, state, by):
        """A method becomes a forward in each state."""
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

        self._check_training(plain, model, lambda: self._inputs(2, 4), step=step, iterations=2)


if __name__ == "__main__":
    run_tests()
