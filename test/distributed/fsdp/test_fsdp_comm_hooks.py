"""Communication hooks of FSDP1: the default average, the registration of hooks, their arguments and their results."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.common_distributed import requires_capability, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.fsdp1_cases import machines_of
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average, full_parameters
from torch_fsdp_tests.installed_torch import torch_names

default_hooks = torch_names.module("torch.distributed.algorithms._comm_hooks.default_hooks")

STRATEGIES = [ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
NOISE = 1234.0
REGISTERED = "^A communication hook is already registered$"
NOT_ROOT = r"^register_comm_hook can only be called on a root instance\.$"


class Net(nn.Module):
    """Three linear layers from 8 to 4 features. With ``has_wrapping``, the first two are in an FSDP instance, and the
    second is an FSDP instance inside it.
    """

    def __init__(
        self,
        has_wrapping: bool,
        sharding_strategy: ShardingStrategy | None,
        mixed_precision: MixedPrecision | None = None,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        wrap = functools.partial(FSDP, sharding_strategy=sharding_strategy, mixed_precision=mixed_precision)
        layers = [nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)]
        if has_wrapping:
            layers[-1] = wrap(layers[-1])
        self.net = nn.Sequential(*layers)
        if has_wrapping:
            self.net = wrap(self.net)
        self.out = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.net(x)))


class DummyState:
    __slots__ = ["calls", "noise", "process_group"]

    def __init__(self, process_group: dist.ProcessGroup | None = None, noise: float = NOISE) -> None:
        self.process_group = process_group
        self.noise = noise
        self.calls: list[tuple[int, int | None]] = []  # numels of the gradient and of the output, if there is one


class DummyHook:
    """A hook for NO_SHARD and a hook for sharded strategies. Both sum the gradients over the ranks and add noise."""

    def dummy_hook_for_no_shard_fsdp(self, state: DummyState, grad: torch.Tensor) -> None:
        state.calls.append((grad.numel(), None))
        dist.all_reduce(grad, group=state.process_group)
        grad.add_(state.noise)

    def dummy_hook_for_sharded_fsdp(self, state: DummyState, grad: torch.Tensor, output: torch.Tensor) -> None:
        state.calls.append((grad.numel(), output.numel()))
        internals.reduce_scatter()(output, grad, group=state.process_group)
        output.add_(state.noise)

    def for_strategy(self, sharding_strategy: ShardingStrategy) -> Callable[..., None]:
        sharded = sharding_strategy is not ShardingStrategy.NO_SHARD
        return self.dummy_hook_for_sharded_fsdp if sharded else self.dummy_hook_for_no_shard_fsdp


def _grads(model: FSDP) -> list[torch.Tensor]:
    return [flat_param.grad for flat_param in internals.flat_params(model)]


@contextlib.contextmanager
def _memory_in_order() -> Iterator[None]:
    """Replace ``record_stream``, which low precision hooks call, on devices without streams, where it raises.

    The test then checks values, but not the lifetime of memory.
    """
    if accelerator.current().has("streams"):
        yield
    else:
        with mock.patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None):
            yield


class TestCommunicationHooks(FSDPTest):
    def _init_model(
        self, core: nn.Module, sharding_strategy: ShardingStrategy, mixed_precision: MixedPrecision | None = None
    ) -> FSDP:
        return FSDP(core, sharding_strategy=sharding_strategy, mixed_precision=mixed_precision).to(self.device)

    def _get_submodules(self, fsdp_net: FSDP) -> list[FSDP]:
        return [module for module in FSDP.fsdp_modules(fsdp_net) if not module.check_is_root()]

    def _net(
        self,
        sharding_strategy: ShardingStrategy,
        has_wrapping: bool = True,
        mixed_precision: MixedPrecision | None = None,
    ) -> FSDP:
        core = Net(has_wrapping, sharding_strategy, mixed_precision)
        return self._init_model(core, sharding_strategy, mixed_precision)

    def _mine(self, whole: torch.Tensor, sharding_strategy: ShardingStrategy) -> torch.Tensor:
        """This rank's shard of a flattened tensor. FSDP makes equal shards and pads the last ones with zeros."""
        if sharding_strategy is ShardingStrategy.NO_SHARD:
            return whole
        shard = -(-whole.numel() // self.world_size)
        padded = torch.cat([whole, whole.new_zeros(shard * self.world_size - whole.numel())])
        return padded[self.rank * shard : (self.rank + 1) * shard]

    @skip_if_lt_x_gpu(2)
    @parametrize("sharding_strategy", STRATEGIES)
    def test_default_communication_hook_behavior(self, sharding_strategy):
        """Without a hook, each gradient is the mean over the ranks, even with uneven shards."""
        for width in (self.world_size, self.world_size + 1, 1):
            model = self._init_model(nn.Linear(1, width, bias=False).to(self.device), sharding_strategy)
            self.assertEqual([each._comm_hook for each in FSDP.fsdp_modules(model)], [None])
            inputs = torch.tensor([float(self.rank)], device=self.device)
            weights = torch.arange(1.0, width + 1, device=self.device)
            ranks = torch.arange(float(self.world_size), device=self.device)
            # On each rank, the gradient of element j is rank * (j + 1)^(rank + 1).
            expected = torch.stack([rank * weights ** (rank + 1) for rank in ranks]).mean(dim=0)
            for _ in range(4):
                model.zero_grad()
                (model(inputs) * weights ** (self.rank + 1)).sum().backward()
                (grad,) = _grads(model)
                self.assertEqual(grad.flatten(), self._mine(expected, sharding_strategy), may_be="zero")  # padding

    @skip_if_lt_x_gpu(2)
    @parametrize("has_wrapping", [True, False])
    @parametrize("sharding_strategy", STRATEGIES)
    def test_default_communication_hook_initialization(self, has_wrapping, sharding_strategy):
        """Registering a hook on the root sets it and its state on all instances. Only one hook is allowed."""
        model = self._net(sharding_strategy, has_wrapping)
        instances = FSDP.fsdp_modules(model)
        self.assertEqual(len(instances), 3 if has_wrapping else 1)
        self.assertEqual([each._comm_hook for each in instances], [None] * len(instances))
        state, hook = DummyState(), DummyHook().for_strategy(sharding_strategy)
        model.register_comm_hook(state, hook)
        with self.assertRaisesRegex(AssertionError, REGISTERED):
            model.register_comm_hook(state, hook)
        for each in instances:
            self.assertEqual(each._comm_hook, hook)
            self.assertIs(each._comm_hook_state, state)

    @skip_if_lt_x_gpu(2)
    @parametrize("sharding_strategy", STRATEGIES)
    def test_registering_hook_non_root(self, sharding_strategy):
        model = self._net(sharding_strategy)
        model.check_is_root()
        submodules = self._get_submodules(model)
        self.assertEqual(len(submodules), 2)
        with self.assertRaisesRegex(AssertionError, NOT_ROOT):
            submodules[1].register_comm_hook(DummyState(), DummyHook().for_strategy(sharding_strategy))
        self.assertEqual([each._comm_hook for each in FSDP.fsdp_modules(model)], [None] * 3)

    @skip_if_lt_x_gpu(2)
    def test_registering_hook_hybrid_strategy(self):
        """Registering a hook raises under hybrid strategies, even if each replica group has only one rank."""
        for sharding_strategy in internals.hybrid_strategies():
            with machines_of(self.world_size):
                model = FSDP(
                    Net(False, None).to(self.device),
                    auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                    sharding_strategy=sharding_strategy,
                )
            with self.assertRaisesRegex(
                AssertionError, f"Communication hook is not supported for hybrid strategies: {sharding_strategy}"
            ):
                model.register_comm_hook(DummyState(), DummyHook().for_strategy(sharding_strategy))
            self.assertEqual([each._comm_hook for each in FSDP.fsdp_modules(model)], [None] * 4)

    @skip_if_lt_x_gpu(2)
    @parametrize("sharding_strategy", STRATEGIES)
    def test_registering_hook_submodules(self, sharding_strategy):
        """Registering a hook on the root raises if an inner instance already has one."""
        model = self._net(sharding_strategy)
        model.check_is_root()
        hook = DummyHook().for_strategy(sharding_strategy)
        self._get_submodules(model)[1]._comm_hook = hook
        with self.assertRaisesRegex(AssertionError, REGISTERED):
            model.register_comm_hook(DummyState(), hook)

    @skip_if_lt_x_gpu(2)
    @subtests(why=["hybrid root", "hybrid instance", "instance with a hook", "not callable"])
    def test_refused_hook(self, why):
        """If the registration of a hook raises, the instances before the one for which it raises have the new hook."""
        mesh = make_mesh(1, self.world_size)
        hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
        layers = [nn.Linear(2, 2).to(self.device) for _ in range(2)]
        inner = FSDP(layers[1], **(hybrid if why == "hybrid instance" else {}))
        model = FSDP(nn.Sequential(layers[0], inner), **(hybrid if why == "hybrid root" else {}))
        inner._comm_hook = DummyHook().dummy_hook_for_sharded_fsdp if why == "instance with a hook" else None
        hook = "not a hook" if why == "not callable" else DummyHook().dummy_hook_for_sharded_fsdp
        with self.assertRaises((AssertionError, ValueError)):
            model.register_comm_hook(DummyState(), hook)
        expected = [hook if "instance" in why else None, inner._comm_hook]
        self.assertEqual([each._comm_hook for each in FSDP.fsdp_modules(model)], expected)

    def _check_low_precision_hook(
        self, hook: Callable[..., None], dtype: torch.dtype, has_wrapping: bool, sharding_strategy: ShardingStrategy
    ) -> None:
        """Gradients with the hook are bitwise equal to those with ``reduce_dtype``. All reductions use ``dtype``."""
        state = default_hooks.LowPrecisionState(process_group=self.process_group)
        hooked = self._net(sharding_strategy, has_wrapping)
        hooked.register_comm_hook(state, hook)
        mixed = self._net(sharding_strategy, has_wrapping, MixedPrecision(reduce_dtype=dtype))
        instances = len(FSDP.fsdp_modules(hooked))
        optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (hooked, mixed)]
        torch.manual_seed(self.rank)
        for _ in range(2):
            inputs = torch.rand(16, 8, device=self.device)
            before = self._oracle(hooked, inputs, has_wrapping)
            for each, optim in zip((hooked, mixed), optims):
                optim.zero_grad()
                with _memory_in_order(), recorded("reduce_scatter", "all_reduce") as reductions:
                    each(inputs).sum().backward()
                self.assertEqual([call.dtype for call in reductions], [dtype] * instances)
            grads = _grads(hooked)
            self.assertEqual([grad.dtype for grad in grads], [state.parameter_type] * instances)
            self.assertEqual(grads, _grads(mixed), rtol=0, atol=0)
            for grad, (mean, bound) in zip(grads, before, strict=True):
                self._assert_within(grad, mean, bound, dtype, sharding_strategy)
            for optim in optims:
                optim.step()

    def _oracle(self, model: FSDP, inputs: torch.Tensor, has_wrapping: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each FSDP instance, the mean over ranks of the gradient and of its absolute value, in float64."""
        values = [value.double().requires_grad_() for value in full_parameters(model).values()]
        weight0, bias0, weight1, bias1, weight2, bias2 = self._by_layer(values)
        hidden = torch.relu(inputs.double() @ weight0.T + bias0)
        hidden = torch.relu(hidden @ weight1.T + bias1)
        (hidden @ weight2.T + bias2).sum().backward()
        layers = [(weight2, bias2), (weight0, bias0), (weight1, bias1)]  # the root is the outermost instance
        units = layers if has_wrapping else [(weight0, bias0, weight1, bias1, weight2, bias2)]
        result = []
        for unit in units:
            mean = torch.cat([param.grad.flatten() for param in unit])
            bound = mean.abs()
            average([mean, bound])
            result.append((mean, bound))
        return result

    def _by_layer(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        shapes = [tuple(value.shape) for value in values]
        in_order = [(16, 8), (16,), (8, 16), (8,), (4, 8), (4,)]
        self.assertEqual(sorted(shapes), sorted(in_order))
        return [values[shapes.index(shape)] for shape in in_order]

    def _assert_within(
        self,
        grad: torch.Tensor,
        mean: torch.Tensor,
        bound: torch.Tensor,
        dtype: torch.dtype,
        sharding_strategy: ShardingStrategy,
    ) -> None:
        # Each rank rounds its gradient once, and each addition rounds its result, by at most eps times the sum of
        # absolute values. Subnormal float16 values are rounded by at most the smallest normal number.
        info = torch.finfo(dtype)
        allowed = self._mine(bound * info.eps * (self.world_size + 2) + info.tiny, sharding_strategy)
        error = (grad.double() - self._mine(mean, sharding_strategy)).abs()
        self.assertTrue(bool((error <= allowed).all()), msg=f"{error.max()} of {allowed.max()} allowed")

    @requires_capability("fp16_collectives")
    @skip_if_lt_x_gpu(2)
    @parametrize("has_wrapping", [True, False])
    @parametrize("sharding_strategy", STRATEGIES)
    def test_fp16_hook(self, **kwargs):
        self._check_low_precision_hook(default_hooks.fp16_compress_hook, torch.float16, **kwargs)

    @requires_capability("bf16_collectives")
    @skip_if_lt_x_gpu(2)
    @parametrize("has_wrapping", [True, False])
    @parametrize("sharding_strategy", STRATEGIES)
    def test_bf16_hook(self, **kwargs):
        self._check_low_precision_hook(default_hooks.bf16_compress_hook, torch.bfloat16, **kwargs)

    @requires_capability("bf16_collectives")
    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES)
    def test_bf16_hook_and_reduce_dtype(self, sharding_strategy):
        """The hook replaces ``reduce_dtype``: it gets gradients that overflow float16 unchanged."""
        layer = nn.Linear(1, self.world_size, bias=False, device=self.device)
        policy = MixedPrecision(reduce_dtype=torch.float16)
        model = FSDP(layer, sharding_strategy=sharding_strategy, mixed_precision=policy)
        state = default_hooks.LowPrecisionState(process_group=self.process_group)
        model.register_comm_hook(state, default_hooks.bf16_compress_hook)
        with _memory_in_order():
            model(torch.full((1, 1), 2.0**17 * (self.rank + 1), device=self.device)).sum().backward()
        mean = 2.0**17 * (self.world_size + 1) / 2
        self.assertEqual([grad.unique().tolist() for grad in _grads(model)], [[mean]])

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES, has_wrapping=[True, False])
    def test_custom_hook_reduces(self, sharding_strategy, has_wrapping):
        """A hook replaces the reduction. It gets the unsharded gradient of each instance once per backward."""
        plain, hooked = (self._net(sharding_strategy, has_wrapping) for _ in range(2))
        state = DummyState(self.process_group)
        hooked.register_comm_hook(state, DummyHook().for_strategy(sharding_strategy))
        for step in range(2):
            torch.manual_seed(self.rank + self.world_size * step)
            inputs = torch.rand(3, 8, device=self.device)
            for each in (plain, hooked):
                each.zero_grad()
                each(inputs).square().sum().backward()
            # FSDP divides its own sum over the ranks, but not the result of a hook.
            expected = [grad * self.world_size + NOISE for grad in _grads(plain)]
            self.assertEqual(_grads(hooked), expected, rtol=1e-6, atol=1e-3)
            shards = [grad.numel() for grad in expected]
            parts = 1 if sharding_strategy is ShardingStrategy.NO_SHARD else self.world_size
            calls = [(numel * parts, None if parts == 1 else numel) for numel in shards]
            self.assertEqual(sorted(state.calls, key=str), sorted(calls, key=str))
            state.calls.clear()

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES)
    def test_hook_and_no_sync(self, sharding_strategy):
        """A hook does not run in ``no_sync()``. In the next backward it gets the accumulated gradient."""
        plain, hooked = (self._net(sharding_strategy) for _ in range(2))
        state = DummyState(self.process_group, noise=0.0)
        hooked.register_comm_hook(state, DummyHook().for_strategy(sharding_strategy))
        torch.manual_seed(self.rank)
        inputs = torch.rand(3, 8, device=self.device)
        with hooked.no_sync():
            hooked(inputs).sum().backward()
        self.assertEqual(state.calls, [], may_be="empty")
        hooked(inputs).sum().backward()
        self.assertEqual(len(state.calls), 3)
        plain(inputs).sum().backward()
        self.assertEqual(_grads(hooked), [2 * self.world_size * grad for grad in _grads(plain)])

    @skip_if_lt_x_gpu(2)
    def test_hook_that_is_not_callable(self):
        """Registering a hook that is not callable raises. Another hook can be registered afterwards."""
        model = self._net(ShardingStrategy.FULL_SHARD)
        with self.assertRaisesRegex(ValueError, "The communication hook must be callable but got not a hook"):
            model.register_comm_hook(DummyState(), "not a hook")
        model.register_comm_hook(DummyState(), DummyHook().dummy_hook_for_sharded_fsdp)


instantiate_parametrized_tests(TestCommunicationHooks)

if __name__ == "__main__":
    run_tests()
