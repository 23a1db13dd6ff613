# Owner(s): ["oncall: distributed"]
"""FSDP2's streams wait for each other wherever they share memory. No accelerator is needed."""

import contextlib
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.extensions.races.ordering import check_order, recorded, sees_collectives
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.custom_comms import ReusingAllGather, ReusingReduceScatter
from torch_fsdp_tests.fsdp.training import TrainingMixin, shard_each, train
from torch_fsdp_tests.installed_torch import torch_facts

DIM = 8


def _low_precision(param_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)


class Layers(nn.Sequential):
    """Its forward may leave out layers."""

    def forward(self, x: torch.Tensor, used: tuple[int, ...] = (0, 1, 2)) -> torch.Tensor:
        for index in used:
            x = self[index](x)
        return x


def shard_layers(model: Layers, **kwargs: Any) -> Layers:
    return shard_each([*model, model], **kwargs)


def prepare_custom_collectives(model: Any) -> None:
    """Set custom collectives that reuse their buffers, in each layer."""
    for layer in model:
        numel = sum(param.numel() for param in layer.parameters())
        layer.set_custom_all_gather(ReusingAllGather(numel))
        layer.set_custom_reduce_scatter(ReusingReduceScatter(numel))


def prepare_optimizers_in_backward(model: Any, names: str = "") -> None:
    """Step each parameter whose name ends with ``names`` in a hook, as soon as it has its gradient."""

    def take(param: nn.Parameter, optim: torch.optim.Optimizer) -> None:
        optim.step()
        optim.zero_grad()

    for name, param in model.named_parameters():
        if name.endswith(names):
            param.register_post_accumulate_grad_hook(partial(take, optim=torch.optim.SGD([param], lr=1e-2)))


def prepare_kept_last_layer(model: Any) -> None:
    model[2].set_reshard_after_forward(False)
    model[2].set_unshard_in_backward(False)


def prepare_unused_parameters(model: Any) -> None:
    if hasattr(model, "set_reduce_scatter_unused_params"):
        model.set_reduce_scatter_unused_params(True)


def train_after_event(model: Any, inp: torch.Tensor) -> None:
    """The all-gathers of forward wait for the optimizer's event, not for later work of the current stream."""
    streams = torch.get_device_module(inp.device.type)
    model.set_post_optim_event(streams.current_stream().record_event())
    train(model, inp)


def train_several_backwards(model: Any, inp: torch.Tensor) -> None:
    for is_last in (False, False, True):
        model.set_is_last_backward(is_last)
        train(model, inp)


def train_with_states(model: Any, inp: torch.Tensor) -> None:
    train(model, inp)
    for value in model.state_dict().values():
        value.full_tensor() if isinstance(value, DTensor) else value.clone()
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})


def train_unused_prefetch(model: Any, inp: torch.Tensor) -> None:
    """Backward has to wait for an all-gather of parameters that are never used."""
    loss = model(inp, used=(0, 1)).sum()
    model[2].unshard(async_op=True)
    loss.backward()


def train_unsharded_by_hand(model: Any, inp: torch.Tensor) -> None:
    train(model, inp)
    for layer in model:
        layer.unshard()
        layer.in_proj(inp)
        layer.reshard()


def train_after_interruption(model: Any, inp: torch.Tensor) -> None:
    """Train after an exception in forward and a reset, and an exception in backward and a reset."""
    model[0].set_modules_to_forward_prefetch([model[1]])
    model[2].unshard(async_op=True)
    with contextlib.suppress(Interrupted):
        interrupt(model(inp, used=(0,)))
    model.reset_iter_state()
    output = model(inp)
    handle = model[0].register_full_backward_pre_hook(interrupt)
    with contextlib.suppress(Interrupted):
        output.sum().backward()
    handle.remove()
    model.reset_iter_state()
    train(model, inp)


class Interrupted(Exception):
    pass


def interrupt(*args: object) -> None:
    raise Interrupted


def shard_together(model: Layers, **kwargs: Any) -> Layers:
    """The first two layers are one parameter group."""
    return shard_each([[model[0], model[1]], model], **kwargs)


class Scenario(NamedTuple):
    step: Callable[[Any, torch.Tensor], object] = train
    prepare: Callable[[Any], object] = lambda model: None
    shard: Callable[..., Any] = shard_layers


PINNED = {"offload_policy": CPUOffloadPolicy()}
SCENARIOS = {
    "optimizers in backward": Scenario(prepare=prepare_optimizers_in_backward),
    "custom collectives": Scenario(prepare=prepare_custom_collectives),
    "not unsharded in backward": Scenario(prepare=prepare_kept_last_layer),
    "event after the optimizer": Scenario(train_after_event),
    "several backwards": Scenario(train_several_backwards),
    "state dicts": Scenario(train_with_states),
    "unused prefetch": Scenario(train_unused_prefetch),
    "unused layer": Scenario(lambda model, inp: train(partial(model, used=(0, 2)), inp), prepare_unused_parameters),
    "unsharded by hand": Scenario(train_unsharded_by_hand),
    "part of a group": Scenario(lambda model, inp: train(partial(model, used=(0, 2)), inp), shard=shard_together),
}


class StreamOrderTest(TrainingMixin, FSDPTest):
    def _check_order(
        self,
        step: Callable[[Any, torch.Tensor], object] = train,
        prepare: Callable[[Any], object] = lambda model: None,
        host_waits: Collection[str] = (),
        shard: Callable[..., Any] = shard_layers,
        **kwargs: Any,
    ) -> None:
        """Shard three layers with these arguments, and check the order of what ``step`` does with an input."""

        def build() -> Layers:
            manual_seed(42)
            model = shard(Layers(*(MLP(DIM) for _ in range(3))), **kwargs)
            prepare(model)
            return model

        check_order(self, build, lambda model: step(model, self._inputs(4, DIM)), host_waits)


class TestFullyShardStreamOrder(StreamOrderTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
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

        copies = ["copy"] if backwards > 1 or not pin_memory else []
        waits = [*copies, *(["event"] if pin_memory else [])]
        self._check_order(step, host_waits=waits, offload_policy=policy, mp_policy=_low_precision(param_dtype))

    @skip_if_lt_x_gpu(2)
    @subtests(scenario=list(SCENARIOS))
    def test_scenarios(self, scenario):
        case = SCENARIOS[scenario]
        self._check_order(case.step, case.prepare, shard=case.shard)

    @skip_if_lt_x_gpu(2)
    @torch_defect("fsdp2_hooks_read_offloaded_gradients_too_early")
    def test_optimizers_in_backward_with_offload(self):
        self._check_order(prepare=prepare_optimizers_in_backward, host_waits=["copy"], **PINNED)

    @skip_if_lt_x_gpu(2)
    @torch_defect("fsdp2_hooks_read_offloaded_gradients_too_early")
    def test_optimizer_in_backward_of_some_parameters_with_offload(self):
        """Only biases have hooks, so the first parameter of each group has none."""
        prepare = partial(prepare_optimizers_in_backward, names="bias")
        self._check_order(prepare=prepare, host_waits=["copy", "event"], **PINNED)

    @skip_if_lt_x_gpu(2)
    def test_hooks_that_read_offloaded_gradients(self):
        def prepare(model):
            for param in model.parameters():
                param.register_hook(lambda grad: 2 * grad)

        with torch_defect("fsdp2_hooks_of_parameters_do_not_run"):
            self._check_order(prepare=prepare, host_waits=["copy"], **PINNED)

    @skip_if_lt_x_gpu(2)
    @needs(torch_facts.HAS_RESET_ITER_STATE)
    def test_interruptions(self):
        self._check_order(train_after_interruption)

    @skip_if_lt_x_gpu(2)
    def test_evaluation_between_steps(self):
        def step(model, inp):
            with torch.no_grad():
                model(inp)
            train(model, inp)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

        self._check_order(step)

    @skip_if_lt_x_gpu(2)
    @subtests(then=["write", "training step"])
    def test_evaluation_with_offload(self, then):
        """The host waits for copies from its memory before it writes there, itself or in an optimizer's step."""
        model = shard_layers(Layers(*(MLP(DIM) for _ in range(3))), **PINNED)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        with recorded() as recording:
            with torch.no_grad():
                model(self._inputs(4, DIM))
            if then == "write":
                torch._foreach_mul_([param.detach() for param in model.parameters()], 0.5)
            else:
                model.reshard()
                train(model, self._inputs(4, DIM))
                optim.step()
        self.assertGreater(recording.waits, 0)
        with torch_defect("fsdp2_offloaded_parameters_change_while_copied"):
            self.assertEqual(recording.races, [], may_be="empty")

    @skip_if_lt_x_gpu(2)
    def test_several_forwards_before_backwards(self):
        def step(model, inp):
            for loss in [model(inp).sum() for _ in range(2)]:
                loss.backward()

        with torch_defect("fsdp2_unused_gather_is_freed_while_it_runs", when=sees_collectives()):
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
        with torch_defect("fsdp2_input_of_all_reduce_hook_is_freed"):
            self._check_order(prepare=prepare, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


class TestFullyShardStreamOrderHSDP(StreamOrderTest):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    @subtests(param_dtype=[None, torch.bfloat16], prefetch=[False, True])
    def test_reshard_after_forward_to_pairs(self, param_dtype, prefetch):
        """Backward all-gathers over pairs of ranks, from the local shards that the reshard after forward has copied."""

        def prepare(model):
            if prefetch:
                model[2].set_modules_to_backward_prefetch([model[1], model[0]])

        self._check_order(prepare=prepare, reshard_after_forward=2, mp_policy=_low_precision(param_dtype))

    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
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

    @skip_if_lt_x_gpu(4)
    @subtests(case=["several backwards", "offloaded", "two meshes", "tensor parallel"])
    def test_meshes(self, case):
        mesh = init_device_mesh(self.device.type, (2, 2), mesh_dim_names=("outer", "inner"))

        def shard_on_two_meshes(model):
            return shard_each([model[0], model[1]], mesh=mesh) and shard_each([model[2], model])

        def shard_after_tensor_parallel(model):
            plan = {f"{index}.in_proj": ColwiseParallel() for index in range(3)}
            plan |= {f"{index}.out_proj": RowwiseParallel() for index in range(3)}
            parallelize_module(model, mesh["inner"], plan)
            return shard_layers(model, mesh=mesh["outer"])

        match case:
            case "several backwards":
                self._check_order(train_several_backwards, mesh=mesh)
            case "offloaded":
                self._check_order(mesh=mesh, host_waits=["event"], **PINNED)
            case "two meshes":
                self._check_order(shard=shard_on_two_meshes)
            case "tensor parallel":
                self._check_order(shard=shard_after_tensor_parallel)


if __name__ == "__main__":
    run_tests()
