# Owner(s): ["oncall: distributed"]
"""FSDP2's streams wait for each other wherever they share memory. No accelerator is needed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.device.ordering import check_order
from torch_fsdp_tests.fsdp.combinations import pairwise_subtests, subtests
from torch_fsdp_tests.fsdp.training import TrainingMixin, shard_each, train

DIM = 8


def _low_precision(param_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)


class StreamOrderTest(TrainingMixin, FSDPTest):
    def _check_order(
        self,
        step: Callable[[Any, torch.Tensor], object] = train,
        prepare: Callable[[Any], object] = lambda model: None,
        blocks: bool = False,
        **kwargs: Any,
    ) -> None:
        """Shard three layers with these arguments, and check the order of what ``step`` does with an input."""

        def build() -> nn.Sequential:
            manual_seed(42)
            layers = [MLP(DIM) for _ in range(3)]
            model = shard_each([*layers, nn.Sequential(*layers)], **kwargs)
            prepare(model)
            return model

        check_order(self, build, lambda model: step(model, self._inputs(4, DIM)), blocks)


class TestFullyShardStreamOrder(StreamOrderTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @pairwise_subtests(
        reshard_after_forward=[True, False],
        param_dtype=[None, torch.bfloat16],
        prefetch=["implicit", "explicit", "unshard"],
        max_input_buffers=[1, 2],
    )
    def test_training(self, reshard_after_forward, param_dtype, prefetch, max_input_buffers):
        def prepare(model):
            if max_input_buffers > 1 and hasattr(model, "set_reduce_scatter_max_input_buffers"):
                model.set_reduce_scatter_max_input_buffers(max_input_buffers)
            if prefetch == "explicit":
                model[0].set_modules_to_forward_prefetch([model[1], model[2]])
                model[2].set_modules_to_backward_prefetch([model[1], model[0]])

        def step(model, inp):
            handles = [layer.unshard(async_op=True) for layer in model] if prefetch == "unshard" else []
            del handles
            train(model, inp)

        policy = _low_precision(param_dtype)
        self._check_order(step, prepare, reshard_after_forward=reshard_after_forward, mp_policy=policy)

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_backward=[True, False])
    def test_microbatches(self, reshard_after_backward):
        """The last of several backwards reduces the gradients that all of them have accumulated."""

        def step(model, inp):
            for is_last in (False, False, True):
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last or reshard_after_backward)
                train(model, inp)

        self._check_order(step)

    @skip_if_lt_x_gpu(2)
    @subtests(param_dtype=[None, torch.bfloat16], backwards=[1, 3], pin_memory=[True, False])
    def test_offload(self, param_dtype, backwards, pin_memory):
        """The host waits for gradients that are copied to its memory, before it adds to them or takes a step. It waits
        for the copies themselves only if memory is not pinned, or if it adds to gradients.
        """
        policy = CPUOffloadPolicy(pin_memory=pin_memory)

        def step(model, inp):
            for _ in range(backwards):
                train(model, inp)

        blocks = backwards > 1 or not pin_memory
        self._check_order(step, blocks=blocks, offload_policy=policy, mp_policy=_low_precision(param_dtype))

    @skip_if_lt_x_gpu(2)
    def test_evaluation_between_steps(self):
        def step(model, inp):
            with torch.no_grad():
                model(inp)
            train(model, inp)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

        self._check_order(step)

    @skip_if_lt_x_gpu(2)
    def test_one_layer_several_times(self):
        self._check_order(lambda model, inp: train(lambda x: model(model[0](model(x))), inp))

    @skip_if_lt_x_gpu(2)
    def test_all_reduce_hook(self):
        streams = torch.get_device_module(self.device.type)

        def prepare(model):
            for each in (*model, model):
                each.set_all_reduce_hook(lambda grad: grad.mul_(2), stream=streams.Stream())

        self._check_order(prepare=prepare)


class TestFullyShardStreamOrderHSDP(StreamOrderTest):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    @subtests(param_dtype=[None, torch.bfloat16], prefetch=[False, True])
    def test_reshard_after_forward_to_pairs(self, param_dtype, prefetch):
        """Backward gathers copies that forward has made, from two ranks each."""

        def prepare(model):
            if prefetch:
                model[2].set_modules_to_backward_prefetch([model[1], model[0]])

        self._check_order(prepare=prepare, reshard_after_forward=2, mp_policy=_low_precision(param_dtype))

    @skip_if_lt_x_gpu(4)
    @pairwise_subtests(
        reshard_after_forward=[True, False],
        param_dtype=[None, torch.bfloat16],
        microbatches=["one", "unreduced", "reduced in part"],
    )
    def test_training(self, reshard_after_forward, param_dtype, microbatches):
        mesh = init_device_mesh(self.device.type, (2, 2), mesh_dim_names=("replicate", "shard"))

        def step(model, inp):
            if microbatches == "unreduced":
                model.set_requires_gradient_sync(False)
                train(model, inp)
                model.set_requires_gradient_sync(True)
            if microbatches == "reduced in part":
                model.set_requires_all_reduce(False)
                train(model, inp)
                model.set_requires_all_reduce(True)
            train(model, inp)

        policy = _low_precision(param_dtype)
        self._check_order(step, mesh=mesh, reshard_after_forward=reshard_after_forward, mp_policy=policy)


if __name__ == "__main__":
    run_tests()
