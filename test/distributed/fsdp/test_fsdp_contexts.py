"""After an exception inside a context manager of FSDP1, DDP or ``replicate``, training continues correctly."""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint import state_dict as dsd
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import (
    average_gradients,
    data_parallel,
    full_parameters,
    named,
    replicate_in_place,
)
from torch_fsdp_tests.fsdp.seeded import filled, uniform

Context = Callable[[Any], AbstractContextManager[Any]]
Use = Callable[[Any], object]

KINDS: dict[str, dict[str, Any]] = {
    "flat": {"use_orig_params": False},
    "original": {"use_orig_params": True},
    "not sharded": {"use_orig_params": False, "sharding_strategy": ShardingStrategy.NO_SHARD},
}


class OnPurpose(Exception):
    """Raised inside the contexts."""


def fail(*args: Any, **kwargs: Any) -> None:
    raise OnPurpose


def layers() -> nn.Sequential:
    return filled(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), -1.0, 1.0)


def square_loss(model: nn.Module, seed: int) -> torch.Tensor:
    return (model(uniform(2, 3, seed=seed)) - 1).square().sum()


def summoning(**kwargs: Any) -> Context:
    return lambda model: FSDP.summon_full_params(model, **kwargs)


def hooked(hook: str, use: Use) -> Context:
    """A context that calls ``use`` while a hook of the last layer raises ``OnPurpose``."""

    @contextlib.contextmanager
    def context(model: nn.Module) -> Iterator[None]:
        handle = getattr(list(model.modules())[-1], hook)(fail)
        try:
            use(model)
            yield
        finally:
            handle.remove()

    return context


def saving(use: Use) -> Context:
    return hooked("register_state_dict_post_hook", use)


def loading(use: Use) -> Context:
    return hooked("register_load_state_dict_pre_hook", use)


def within(context: Context, use: Use) -> Use:
    def use_within(model: Any) -> None:
        with context(model):
            use(model)

    return use_within


def after(use: Use, context: Context) -> Context:
    """A context that enters ``context`` and calls ``use`` before its body."""

    @contextlib.contextmanager
    def used(model: nn.Module) -> Iterator[None]:
        with context(model):
            use(model)
            yield

    return used


def backward(model: nn.Module) -> None:
    square_loss(model, seed=7).backward()


def sharded(model: Any) -> AbstractContextManager[Any]:
    return FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)


@contextlib.contextmanager
def unsynchronized(model: Any) -> Iterator[None]:
    """Accumulate gradients on each rank, with the API of the model's wrapper."""
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
    else:
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)


def full_values(model: nn.Module) -> dict[str, torch.Tensor]:
    return full_parameters(model) if isinstance(model, FSDP) else dict(named(model))


CONTEXTS: dict[str, Context] = {
    "no_sync": lambda model: model.no_sync(),
    "in forward in no_sync": hooked("register_forward_hook", within(lambda model: model.no_sync(), backward)),
    "in backward in no_sync": hooked("register_full_backward_hook", within(lambda model: model.no_sync(), backward)),
    "summon_full_params": summoning(),
    "summon_full_params, not written back": summoning(writeback=False),
    "summon_full_params of the root": summoning(recurse=False),
    "summon_full_params of the first rank": summoning(rank0_only=True, writeback=False),
    "summon_full_params on the CPU": summoning(offload_to_cpu=True),
    "summon_full_params with gradients": summoning(with_grads=True),
    "a conversion": lambda model: model._apply(fail),
    "a function that is applied": lambda model: model.apply(fail),
    "a full state dict, saving": saving(lambda model: model.state_dict()),
    "a full state dict, loading": loading(lambda model: model.load_state_dict(model.state_dict())),
    "state_dict_type": sharded,
    "state_dict_type, saving": saving(within(sharded, lambda model: model.state_dict())),
    "state_dict_type, loading": loading(within(sharded, lambda model: model.load_state_dict(model.state_dict()))),
    "DSD, saving": saving(dsd.get_model_state_dict),
    "DSD, loading": loading(lambda model: dsd.set_model_state_dict(model, dsd.get_model_state_dict(model))),
}


WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {"DDP": data_parallel, "replicate": replicate_in_place}
# Only for DDP. A module of ``replicate`` is not ``Joinable``.
JOINS: dict[str, Context] = {
    "join": lambda model: model.join(),
    "join, switched off": lambda model: model.join(enable=False),
    "join that raises for all ranks": lambda model: model.join(throw_on_early_termination=True),
    "Join": lambda model: Join([model]),
}
REPLICATED: dict[str, Context] = {
    **JOINS,
    "no_sync": unsynchronized,
    "in forward": hooked("register_forward_hook", backward),
    "in forward in no_sync": hooked("register_forward_hook", within(unsynchronized, backward)),
    "in backward in no_sync": hooked("register_full_backward_hook", within(unsynchronized, backward)),
    "in forward in join": hooked("register_forward_hook", within(lambda model: model.join(), backward)),
    "after a backward in join": after(backward, lambda model: model.join()),
    "after a backward in no_sync": after(backward, unsynchronized),
}


def is_valid(context: str, kind: str, **_: Any) -> bool:
    if context == "summon_full_params on the CPU":  # of other devices, and only of shards
        return kind != "not sharded" and accelerator.current().has("device_memory")
    return context != "summon_full_params with gradients" or kind == "original"


class _ContextsBase(FSDPTest):
    world_size = 2

    def _step(self, plain: nn.Module, model: Any, optims: list[torch.optim.Optimizer], microbatches: int) -> None:
        """Run the microbatches, all but the last of which are not synchronized, then step. Compare with ``plain``."""
        losses: list[list[torch.Tensor]] = []
        for each in (plain, model):
            losses.append([])
            for index in range(microbatches, 0, -1):
                with unsynchronized(each) if each is model and index > 1 else contextlib.nullcontext():
                    losses[-1].append(square_loss(each, seed=2 * index + self.rank))
                    losses[-1][-1].backward()
        self.assertEqual(losses[1], losses[0])
        average_gradients(plain)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        self.assertEqual(full_values(model), named(plain))


class TestContexts(_ContextsBase):
    @skip_if_lt_x_gpu(2)
    @subtests(pairwise=True, valid=is_valid, context=list(CONTEXTS), kind=list(KINDS), first=[True, False])
    def test_exception_in_context(self, context, kind, first):
        """After the exception the model trains. Only then it leaves the state in which the exception left it."""
        plain = layers().to(self.device)
        model: Any = FSDP(copy.deepcopy(plain), **KINDS[kind], auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
        optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
        if not first:
            self._step(plain, model, optims, microbatches=2)
        with self.assertRaises(OnPurpose), CONTEXTS[context](model):
            fail()
        self.assertTrue(gc.isenabled())
        if context.startswith("in "):  # until the end of the next backward
            with self.assertRaisesRegex(ValueError, "expected to be in states"), model.no_sync():
                pass
        for microbatches in (1, 2):
            self._step(plain, model, optims, microbatches)
        left = FSDP.set_state_dict_type(model, StateDictType.FULL_STATE_DICT).state_dict_type
        within_sharded = context.startswith(("state_dict_type", "DSD"))  # which is not undone
        self.assertIs(left, StateDictType.SHARDED_STATE_DICT if within_sharded else StateDictType.FULL_STATE_DICT)
        if context.endswith(("saving", "loading")):  # which has left parameters unsharded
            self.assertRaisesRegex(AssertionError, "_unshard_params_ctx", model.state_dict)
        else:
            self.assertEqual(model.state_dict(), plain.state_dict())

    @skip_if_lt_x_gpu(2)
    @subtests(where=["forward", "backward"])
    def test_no_sync_cannot_begin_inside(self, where):
        """``no_sync()`` raises in a forward or backward that runs, as FSDP1 has set up its reductions by then."""
        model: Any = FSDP(layers().to(self.device), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))

        def begin(*_: object) -> None:
            with model.no_sync():
                pass

        register = "register_forward_hook" if where == "forward" else "register_full_backward_hook"
        getattr(model.module, register)(begin)
        with self.assertRaisesRegex(ValueError, "expected to be in states"):
            square_loss(model, seed=self.rank).backward()


def is_defined(context: str, wrapper: str, **_: Any) -> bool:
    return wrapper == "DDP" or "oin" not in context


class TestContextsOfReplicas(_ContextsBase):
    @skip_if_lt_x_gpu(2)
    @subtests(pairwise=True, valid=is_defined, context=list(REPLICATED), wrapper=list(WRAPPERS), first=[True, False])
    def test_exception_in_context(self, context, wrapper, first):
        """After the exception, which all ranks raise, gradients are synchronized and accumulated as before."""
        plain = layers().to(self.device)
        model = WRAPPERS[wrapper](copy.deepcopy(plain))
        optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
        if not first:
            self._step(plain, model, optims, microbatches=2)
        with self.assertRaises(OnPurpose), REPLICATED[context](model):
            fail()
        model.zero_grad()
        for microbatches in (2, 1):
            self._step(plain, model, optims, microbatches)


if __name__ == "__main__":
    run_tests()
