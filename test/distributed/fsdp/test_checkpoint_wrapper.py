"""Modules wrapped for activation checkpointing or offloading have the results, names and arguments of plain ones."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests

_SAVED_PREFIX = "_saved_"
GRAD_FN_NEXT_FUNCTIONS = "next_functions"

wrapping = internals.checkpoint_wrapping
Wrapper = Callable[..., nn.Module]


def reentrant(module: nn.Module, **kwargs: Any) -> nn.Module:
    return wrapping.checkpoint_wrapper(module, checkpoint_impl=wrapping.CheckpointImpl.REENTRANT, **kwargs)


def no_reentrant(module: nn.Module, **kwargs: Any) -> nn.Module:
    return wrapping.checkpoint_wrapper(module, checkpoint_impl=wrapping.CheckpointImpl.NO_REENTRANT, **kwargs)


def offload(module: nn.Module) -> nn.Module:
    return wrapping.offload_wrapper(module)


WRAPPERS: dict[str, Wrapper] = {"reentrant": reentrant, "no_reentrant": no_reentrant, "offload": offload}


def kind_of(wrapper: Wrapper) -> type:
    return wrapping.OffloadWrapper if wrapper is offload else wrapping.CheckpointWrapper


class LinearWithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10)
        self.bn = nn.BatchNorm1d(10)
        self.nested_linear = nn.Sequential(nn.Linear(10, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.nested_linear(self.lin(x)))


class ThreeBlocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seq = nn.Sequential(*(LinearWithBatchNorm() for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.seq(x)


class Counting(nn.Module):
    """Two layers with dropout between them. It counts how often its forward starts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 8))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layers(x)


class LiveStorage(TorchDispatchMode):
    """The peak number of bytes held at the same time by tensors that were created in this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        for tensor in internals.pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._live[internals.storage_id(storage)] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out


@contextlib.contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the peak memory: from the allocator's statistics if the device has them."""
    device = accelerator.current()
    if device.has("memory_stats"):
        module = torch.get_device_module(device.type)
        module.reset_peak_memory_stats()
        yield module.max_memory_allocated
    else:
        with LiveStorage() as live:
            yield lambda: live.peak


class CheckpointWrapperTest(TestCase):
    @property
    def device(self) -> torch.device:
        return accelerator.current().device(0)

    def test_load_activation_checkpointed_module(self):
        """The state dict of a wrapped module loads into a plain one, and vice versa."""
        plain = nn.Linear(10, 10, bias=False)
        wrapped = wrapping.checkpoint_wrapper(
            nn.Linear(10, 10, bias=False), checkpoint_fn=checkpoint, use_reentrant=True, preserve_rng_state=False
        )
        self.assertNotEqual(plain.weight, wrapped.weight)
        plain.load_state_dict(copy.deepcopy(wrapped.state_dict()))
        self.assertEqual(list(plain.parameters()), list(wrapped.parameters()), rtol=0, atol=0)
        with torch.no_grad():
            plain.weight.add_(0.5)
        self.assertNotEqual(plain.weight, wrapped.weight)
        wrapped.load_state_dict(copy.deepcopy(plain.state_dict()))
        self.assertEqual(list(plain.parameters()), list(wrapped.parameters()), rtol=0, atol=0)

    def test_checkpoint_wrapper_kwarg_support(self):
        """Keyword arguments arrive as keywords, together with positional ones."""

        class MyModel(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(10, 10)

            def forward(self, a: Any, b: Any, c: Any = None, d: Any = None, **kwargs: Any) -> tuple[Any, ...]:
                self.further = kwargs
                return self.lin(a), self.lin(b), self.lin(c), self.lin(d)

        for name, wrapper in WRAPPERS.items():
            with self.subTest(wrapper=name):
                model = wrapper(MyModel())
                self.assertIs(type(model), kind_of(wrapper))
                # All values differ, so that swapped arguments are detected.
                a, b, c, d, e, f = (torch.full((4, 10), float(i), requires_grad=True) for i in range(6))
                out = model(a, b, c=c, d=d, e=e, f=f)
                self.assertEqual(model.further, {"e": e, "f": f}, may_be="same")
                by_position = model(a, b, c, d)
                self.assertEqual((type(out), len(out)), (tuple, 4))
                self.assertEqual(out, by_position, rtol=0, atol=0)
                self.assertEqual([each.requires_grad for each in out], [each.requires_grad for each in by_position])
                self.assertEqual([each.requires_grad for each in out], [True] * 4)

        class ModelEnforceKwarg(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(10, 10)

            def forward(self, *, a: Any = None, b: Any = None) -> tuple[Any, Any]:
                return self.lin(a), self.lin(b)

        model = reentrant(ModelEnforceKwarg())
        a, b = (torch.full((4, 10), value, requires_grad=True) for value in (1.0, 2.0))
        self.assertEqual(model(b=b, a=a), (model.lin(a), model.lin(b)))

    def test_checkpoint_wrapper_args_kwargs(self):
        """The wrapper passes further keyword arguments to the checkpoint function."""
        entered = 0

        @contextlib.contextmanager
        def ctx_manager() -> Iterator[None]:
            nonlocal entered
            entered += 1
            yield

        def get_ctx_mgrs() -> tuple[Any, Any]:
            return ctx_manager(), ctx_manager()

        wrapped = wrapping.checkpoint_wrapper(
            nn.Linear(1, 1), checkpoint_fn=checkpoint, use_reentrant=False, context_fn=get_ctx_mgrs
        )
        loss = wrapped(torch.randn(2, 1)).sum()
        self.assertEqual(entered, 1)
        loss.backward()
        self.assertEqual(entered, 2)

    @subtests(name=["reentrant", "no_reentrant"])
    def test_preserve_rng_state_is_passed_on(self, name):
        """Without ``preserve_rng_state``, recomputation uses a new dropout mask; gradients differ."""
        plain = Counting()
        wrapped = WRAPPERS[name](copy.deepcopy(plain), preserve_rng_state=False)
        self.assertEqual(self._run(plain)[0], self._run(wrapped)[0], rtol=0, atol=0)
        self.assertNotEqual(self._run(plain)[1], self._run(wrapped)[1])

    def test_checkpoint_wrapper_parity(self):
        """The wrapper uses as much memory as the checkpoint function, and less than a model without checkpoints.

        Without allocator statistics, the test counts live storages. The model is then smaller, with the same ratio of
        activations to parameters.
        """
        width, rows = (256, 10000) if accelerator.current().has("memory_stats") else (16, 625)

        class Block(nn.Sequential):
            def __init__(self) -> None:
                super().__init__(*(nn.Linear(width, width) for _ in range(3)))

        class Model(nn.Module):
            def __init__(self, call: Callable[..., Any] | None, wrapper: Wrapper) -> None:
                super().__init__()
                self.blocks = nn.ModuleList(wrapper(Block()) for _ in range(8))
                self.call = call

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for block in self.blocks:
                    x = block(x) if self.call is None else self.call(block, x)
                return x

        def peak_with(call: Callable[..., Any] | None = None, wrapper: Wrapper = nn.Sequential) -> int:
            model = Model(call, wrapper).to(self.device)
            x = torch.randn(rows, width, device=self.device, requires_grad=True)
            with peak_memory() as peak:
                model(x).sum().backward()
                return peak()

        without = peak_with()
        for use_reentrant, wrapper in ((False, no_reentrant), (True, reentrant)):
            with self.subTest(use_reentrant=use_reentrant):
                functional = peak_with(functools.partial(checkpoint, use_reentrant=use_reentrant))
                self.assertEqual(peak_with(wrapper=wrapper), functional)
                self.assertGreater(functional, 0)
                # Of 24 activations, at most three of one block, their gradients, and the inputs of 8 blocks are alive.
                self.assertLess(functional, without * 3 / 4)

    def test_forward_missing_attributes(self):
        lin = nn.Linear(1, 1)
        inner = nn.Sequential(lin, lin)
        wrapped = wrapping.CheckpointWrapper(inner)
        self.assertIs(wrapped[0], lin)
        inner.foo = "bar"
        self.assertEqual(wrapped.foo, "bar")
        with self.assertRaisesRegex(AttributeError, "no attribute 'baz'"):
            _ = wrapped.baz

    @subtests(name=list(WRAPPERS))
    def test_apply_activation_checkpointing(self, name):
        """All layers chosen by the policy or function are wrapped in place, and the model trains."""
        wrapper = WRAPPERS[name]
        chosen: dict[str, Any] = {"check_fn": lambda module: isinstance(module, nn.Linear)}
        if wrapper is reentrant:
            chosen = {"auto_wrap_policy": ModuleWrapPolicy({nn.Linear})}
        kind = kind_of(wrapper)
        model = ThreeBlocks()
        wrapping.apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, **chosen)
        modules = [type(module) for module in model.modules()]
        self.assertEqual((modules.count(nn.Linear), modules.count(kind)), (6, 6))
        layers = [layer for block in model.seq for layer in (block.lin, block.nested_linear[0])]
        self.assertEqual([type(layer) for layer in layers], [kind] * 6)
        self.assertEqual([type(block.bn) for block in model.seq], [nn.BatchNorm1d] * 3)
        for _ in range(6):
            model.zero_grad()
            loss = model(x=torch.randn(4, 10, requires_grad=True)).sum()
            self.assertTrue(loss.requires_grad)
            loss.backward()
            for layer in layers:
                for param in (layer._checkpoint_wrapped_module.weight, layer._checkpoint_wrapped_module.bias):
                    self.assertTrue(param.requires_grad)
                    self.assertIsNotNone(param.grad)

    @subtests(name=list(WRAPPERS))
    def test_apply_activation_checkpointing_keeps_names(self, name):
        """State dicts have the plain model's keys and load in both directions."""
        wrapper = WRAPPERS[name]
        plain, model = ThreeBlocks(), ThreeBlocks()
        wrapping.apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrapper, check_fn=lambda m: isinstance(m, (nn.Linear, nn.Sequential))
        )
        self.assertGreater(sum(isinstance(m, kind_of(wrapper)) for m in model.modules()), 6)
        self.assertEqual(list(model.state_dict()), list(plain.state_dict()))
        for source, target in ((plain, model), (model, plain)):
            with torch.no_grad():
                for tensor in source.parameters():
                    tensor.add_(0.5)
            target.load_state_dict(copy.deepcopy(source.state_dict()), strict=True)
            self.assertEqual(target.state_dict(), source.state_dict(), rtol=0, atol=0)

    def test_apply_activation_checkpointing_leaves_the_root(self):
        """The root is never wrapped. An argument that is no policy and no function is rejected."""
        for chosen in (
            {},
            {"check_fn": lambda module: True},
            {"auto_wrap_policy": ModuleWrapPolicy({nn.Sequential, nn.Linear})},
            {"auto_wrap_policy": CustomPolicy(lambda module: True)},
        ):
            model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
            wrapping.apply_activation_checkpointing(model, **chosen)
            inner = model[1]._checkpoint_wrapped_module
            actual = [type(module) for module in (model, model[0], model[1], inner, inner[0])]
            kind = wrapping.CheckpointWrapper
            self.assertEqual(actual, [nn.Sequential, kind, kind, nn.Sequential, kind])
        with self.assertRaisesRegex(ValueError, "to be callable or be a pre-defined wrap policy"):
            wrapping.apply_activation_checkpointing(model, auto_wrap_policy={nn.Linear})

    def test_custom_policy_gives_arguments_to_the_wrapper(self):
        """A policy can give each module its own arguments."""
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
        given = {model[0]: {"checkpoint_impl": wrapping.CheckpointImpl.REENTRANT}, model[2]: True}
        policy = CustomPolicy(lambda module: given.get(module, False))
        wrapping.apply_activation_checkpointing(model, auto_wrap_policy=policy)
        kind, impl = wrapping.CheckpointWrapper, wrapping.CheckpointImpl
        self.assertEqual([type(layer) for layer in model], [kind, nn.Linear, kind])
        impls = [layer.checkpoint_impl for layer in (model[0], model[2])]
        self.assertEqual(impls, [impl.REENTRANT, impl.NO_REENTRANT])

    def test_fqn(self):
        """Parameter names match those of the state dict."""
        wrapped = wrapping.checkpoint_wrapper(nn.Linear(10, 10, bias=False))
        names = [name for name, _ in wrapped.named_parameters()]
        self.assertEqual(names, ["weight"])
        self.assertEqual(names, list(wrapped.state_dict()))

    @subtests(name=list(WRAPPERS), arguments=[{}, {"prefix": "model"}, {"remove_duplicate": False}])
    def test_names_in_nested_wrappers(self, name, arguments):
        """``named_parameters()`` has the names of the plain module, also of parameters that layers share."""
        plain, wrap = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), WRAPPERS[name]
        plain[1][1].weight = plain[0].weight
        wrapped = copy.deepcopy(plain)
        for index, layer in enumerate(wrapped[1]):
            wrapped[1][index] = wrap(layer)
        wrapped = wrap(nn.Sequential(wrapped[0], wrap(wrapped[1])))
        actual, expected = ([key for key, _ in each.named_parameters(**arguments)] for each in (wrapped, plain))
        self.assertEqual(actual, expected)

    def test_checkpoint_wrapper_cpu_offload(self):
        """Everything that autograd saves is a copy in host memory.

        The test replaces the unpack hook, which would bring the copy back, by one that returns it unchanged. If the
        device is the CPU, only the memory proves the copy: it must not be that of the saved tensor.
        """
        model = nn.Sequential(*(nn.Linear(10, 10) for _ in range(3))).to(self.device)
        wrapped = offload(model)
        original_init = saved_tensors_hooks.__init__
        saved: list[tuple[torch.Tensor, torch.Tensor]] = []

        def leave_on_host(packed: tuple[torch.device, torch.Tensor]) -> torch.Tensor:
            return packed[1]

        def patched_init(hooks: Any, pack_hook: Callable[..., Any], unpack_hook: Callable[..., Any]) -> None:
            def remembering(tensor: torch.Tensor) -> Any:
                packed = pack_hook(tensor)
                saved.append((tensor, packed[1]))
                return packed

            original_init(hooks, remembering, leave_on_host)

        with mock.patch.object(saved_tensors_hooks, "__init__", patched_init):
            loss = wrapped(torch.randn(3, 10, device=self.device)).sum()

        found: list[torch.Tensor] = []

        def dfs(grad_fn: Any) -> None:
            for attribute in dir(grad_fn):
                if attribute.startswith(_SAVED_PREFIX):
                    value = getattr(grad_fn, attribute)
                    if isinstance(value, torch.Tensor):
                        found.append(value)
            for next_fn, _ in getattr(grad_fn, GRAD_FN_NEXT_FUNCTIONS, ()):
                if next_fn is not None:
                    dfs(next_fn)

        dfs(loss.grad_fn)
        self.assertGreaterEqual(len(found), 3)
        host = torch.device("cpu")  # the CPU is the subject
        self.assertEqual([tensor.device for tensor in found], [host] * len(found))
        self.assertGreaterEqual(len(saved), 3)
        for tensor, packed in saved:
            self.assertEqual(packed.device, host)
            self.assertNotEqual(packed.untyped_storage().data_ptr(), tensor.untyped_storage().data_ptr())
            self.assertEqual(packed, tensor.detach().cpu(), rtol=0, atol=0)

    def _run(self, model: nn.Module) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss of one iteration, and the gradients of the input and of all parameters."""
        model.zero_grad()
        model.to(self.device)
        torch.manual_seed(7)
        x = torch.randn(4, 8, device=self.device, requires_grad=True)
        loss = model(x).square().sum()
        loss.backward()
        return loss.detach(), [x.grad, *(param.grad for param in model.parameters())]

    @subtests(name=list(WRAPPERS))
    def test_same_numbers(self, name):
        """Loss and gradients match the plain model, dropout included.

        With recomputation they match bitwise. Offloaded tensors come back contiguous, even transposed weights, and the
        product with such a weight is summed in another order. So offloading needs the float32 tolerance.
        """
        wrapper = WRAPPERS[name]
        plain = nn.Sequential(Counting(), nn.Tanh(), Counting())
        wrapped = copy.deepcopy(plain)
        wrapping.apply_activation_checkpointing(
            wrapped, checkpoint_wrapper_fn=wrapper, check_fn=lambda module: isinstance(module, Counting)
        )
        optims = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, wrapped)]
        tolerance = None if wrapper is offload else 0
        for _ in range(3):
            expected, actual = self._run(plain), self._run(wrapped)
            self.assertEqual(actual, expected, rtol=tolerance, atol=tolerance)
            self.assertGreater(expected[1][0].abs().sum().item(), 0)
            for optim in optims:
                optim.step()

    @subtests(name=list(WRAPPERS))
    def test_number_of_forwards(self, name):
        """Checkpoints run forward twice per iteration. With offloading, or under ``no_grad``, forward runs once."""
        wrapper = WRAPPERS[name]
        inner = Counting()
        model = wrapper(inner)
        for iteration in (1, 2):
            self._run(model)
            self.assertEqual(inner.calls, iteration * (1 if wrapper is offload else 2))
        inner.calls = 0
        with torch.no_grad():
            model(torch.randn(4, 8, device=self.device))
        self.assertEqual(inner.calls, 1)


if __name__ == "__main__":
    run_tests()
