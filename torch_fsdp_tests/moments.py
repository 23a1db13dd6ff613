"""Moments of a rank to which what watches a test can subscribe. Torch is patched once for all that watch.

Nothing is patched while nobody watches. A rank may be a thread, so a watcher is told of what its own thread does. What
happens inside operators, collectives among them, is seen by a dispatch mode, which torch itself lets nest.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__unittest = True  # keeps the frames of this module out of the tracebacks that unittest prints


class Watcher:
    """What is told of each moment. Every method may be left out. Compiled code is not seen."""

    def forward(self, module: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """What a call of a module of FSDP happens in."""
        return contextlib.nullcontext()

    def backward(self, tensors: Any) -> contextlib.AbstractContextManager[Any]:
        """What a backward from these tensors happens in."""
        return contextlib.nullcontext()

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to change its parameters."""

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has changed its parameters."""

    def compiling(self) -> None:
        """Something is about to be compiled."""


class _Here(threading.local):  # a rank may be a thread
    watchers: tuple[Watcher, ...] = ()


class WhileUsed:
    """Patches that are in force while at least one thread uses them."""

    def __init__(self, install: Callable[[contextlib.ExitStack], None]) -> None:
        self._install, self._users = install, 0
        self._lock, self._patches = threading.Lock(), contextlib.ExitStack()

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._install(self._patches)
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._patches.close()


@contextlib.contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Tell a watcher what this thread does in the block."""
    with _patches.used():
        before = _here.watchers
        _here.watchers = (*before, watcher)
        try:
            yield
        finally:
            _here.watchers = before


def around(
    patches: contextlib.ExitStack, owner: Any, name: str, here: Callable[[], Any], hook: Callable[..., Any]
) -> None:
    """Call a hook in place of a function, with what ``here()`` returns, the function and its arguments.

    If that is nothing, or the call is compiled, the function is called as usual. If a class inherits the function, it
    is that of the next class in the order of the object's own class.
    """
    own = vars(owner).get(name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not (current := here()):
            return own(*args, **kwargs) if own else getattr(super(owner, args[0]), name)(*args[1:], **kwargs)
        return hook(current, own or getattr(super(owner, args[0]), name).__func__, *args, **kwargs)

    wrapped = functools.wraps(own or getattr(owner, name, wrapper))(wrapper)
    patches.enter_context(mock.patch.object(owner, name, wrapped, create=True))


_here = _Here()


def _watchers() -> tuple[Watcher, ...]:
    return () if torch.compiler.is_compiling() else _here.watchers


def _install(patches: contextlib.ExitStack) -> None:
    for cls in (FSDPModule, FSDP):
        around(patches, cls, "__call__", _watchers, _forward)
    around(patches, torch.autograd, "backward", _watchers, _backward)
    around(patches, torch, "compile", _watchers, _compile)
    if "torch._dynamo" in sys.modules:  # else the test file does not use it
        around(patches, sys.modules["torch._dynamo"], "optimize", _watchers, _compile)
    patches.callback(register_optimizer_step_pre_hook(_before_step).remove)
    patches.callback(register_optimizer_step_post_hook(_after_step).remove)


def _forward(watchers: tuple[Watcher, ...], former: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with contextlib.ExitStack() as stack:
        for watcher in watchers:
            stack.enter_context(watcher.forward(self))
        return former(self, *args, **kwargs)


def _backward(watchers: tuple[Watcher, ...], former: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
    with contextlib.ExitStack() as stack:
        for watcher in watchers:
            stack.enter_context(watcher.backward(tensors))
        former(tensors, *args, **kwargs)


def _compile(watchers: tuple[Watcher, ...], former: Any, *args: Any, **kwargs: Any) -> Any:
    for watcher in watchers:
        watcher.compiling()
    return former(*args, **kwargs)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for watcher in _watchers():
        watcher.before_step(optimizer)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for watcher in _watchers():
        watcher.after_step(optimizer)


_patches = WhileUsed(_install)
