"""The session of one test in one rank, and what fills it: a dispatch mode and hooks of torch and unittest.

The hooks do nothing in a rank without a session. A test that compiles is left out, because torch does not compile under
a mode, and one that counts memory by a mode of its own.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import sys
import threading
import time
import unittest
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from torch_fsdp_tests import moments
from torch_fsdp_tests.common_utils import TestCase
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.extensions.behavior.kinds import Kind
from torch_fsdp_tests.extensions.behavior.memory import GRADIENTS, Memory, owners
from torch_fsdp_tests.extensions.behavior.values import cleaned, described, digest, dtype_of, tensors_in
from torch_fsdp_tests.ranks.threaded_pg import ProcessLocalGroup

__unittest = True  # keeps the frames of this module out of the tracebacks that unittest prints

_COLLECTIVES = (
    "all_gather reduce_scatter all_reduce all_to_all broadcast gather scatter reduce send recv barrier".split()
)
_COPIES = "_to_copy copy_ clone _foreach_copy_ split_with_sizes_copy chunk_cat all_gather_copy_in".split()


class Session(moments.Watcher):
    """What one test has done so far in one rank: for each kind the numbers of words, in their order."""

    def __init__(self, with_operators: bool) -> None:
        self.with_operators = with_operators
        self.is_thread = threading.current_thread() is not threading.main_thread()
        self.left_out = ""  # why the test is left out
        self.memory = Memory()
        self.mode = _Mode(self)
        self.events: dict[str, list[int]] = {kind.value: [] for kind in Kind}
        self.words: dict[str, int] = {}
        self.depth = 0  # of forwards and of state_dict() calls
        self.random = torch.Generator().manual_seed(0).get_state()  # of this rank, if it is a thread

    def add(self, kind: Kind, *fields: object) -> None:
        if not self.left_out:
            word = "\t".join(map(str, fields))
            self.events[kind.value].append(self.words.setdefault(word, len(self.words)))

    def collective(self, name: str, inputs: Any, size: object) -> None:
        self.add(Kind.COLLECTIVES, name, *described(tensors_in(inputs)), f"over {size}")
        self.measure(name)

    def measure(self, place: str) -> None:
        # The other threads decide when a collective lets go of its tensors.
        if self.memory.is_used and not self.is_thread and not self.left_out:
            self.add(Kind.MEMORY, place, *(f"{size} bytes of {kind}" for kind, size in self.memory.alive().items()))

    def value(self, name: str, value: Any) -> None:
        self.add(Kind.VALUES, name, *digest(value))

    @contextlib.contextmanager
    def outermost(self) -> Iterator[bool]:
        """Whether no other call of this kind is running in the rank."""
        self.depth += 1
        try:
            yield self.depth == 1
        finally:
            self.depth -= 1

    @contextlib.contextmanager
    def forward(self, module: nn.Module) -> Iterator[None]:
        with self.outermost() as is_outermost:
            yield
        if is_outermost:
            self.measure("end of forward")

    @contextlib.contextmanager
    def backward(self, tensors: Any) -> Iterator[None]:
        if isinstance(tensors, torch.Tensor) and tensors.numel() == 1:
            self.value("loss", tensors)
        yield
        self.measure("end of backward")

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.value("gradients", [param.grad for param in _params(optimizer)])

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        params = _params(optimizer)
        self.value("parameters", params)
        self.value("optimizer states", [optimizer.state.get(param, {}) for param in params])
        self.measure("end of step")

    def compiling(self) -> None:
        self.leave("it compiles")

    def leave(self, why: str) -> None:
        """Leave the test out from now on, without a mode if that is possible."""
        self.left_out = self.left_out or why
        if _get_current_dispatch_mode() is self.mode:
            self.mode.__exit__(None, None, None)
            self.mode.is_active = False


_lock = threading.Lock()


def _randomly(session: Session, former: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function with random numbers of this rank. Threads share a generator, so in turn they would not repeat."""
    with _lock:
        shared = torch.default_generator.get_state()
        torch.default_generator.set_state(session.random)
        try:
            return former(*args, **kwargs)
        finally:
            session.random = torch.default_generator.get_state()
            torch.default_generator.set_state(shared)


class _Current(threading.local):
    """The session of this rank, which may be a thread."""

    session: Session | None = None


_current = _Current()


class _Mode(TorchDispatchMode):
    """It has the session itself, because a backward may run in another thread."""

    is_active = True

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would guard each call against being compiled, which takes more time than the call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented  # and see the operators on local tensors
        session = self._session
        record = _recorder(func)
        if record is not None:
            record(session, args, kwargs or {})
        elif session.with_operators:
            session.add(Kind.OPERATORS, func, *described(tensors_in((args, kwargs))))
        if session.is_thread and torch.Tag.nondeterministic_seeded in func.tags:
            return _randomly(session, func, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@functools.cache
def _recorder(func: Any) -> Callable[[Session, Any, Any], None] | None:
    """What records a call of this operator, or None for one that is recorded only on request."""
    namespace, _, name = func._schema.name.partition("::")
    if "c10d" in namespace and (collective := collective_name(name)):
        names = [argument.name for argument in func._schema.arguments]
        at = next((n for n, each in enumerate(names) if each.startswith("input") or each in ("tensors", "tensor")), 0)
        group = next((n for n, each in enumerate(names) if each in ("process_group", "group_name")), None)
        return functools.partial(_collective, collective, at, group)
    copy = next((each for each in _COPIES if name.startswith(each)), None)
    return None if copy is None else functools.partial(_copy, copy)


def collective_name(name: str) -> str | None:
    """The collective of an operator: the same for each of the operators by which versions of PyTorch call it."""
    bare = name.replace("_", "")
    return next((each for each in _COLLECTIVES if bare.startswith(each.replace("_", ""))), None)


def _collective(name: str, at: int, group: int | None, session: Session, args: Any, kwargs: Any) -> None:
    if not session.is_thread:  # whose groups report their collectives themselves
        size = "?" if group is None or group >= len(args) else _size(args[group])
        session.collective(name, args[at] if at < len(args) else (), size)


def _size(group: Any) -> object:
    if isinstance(group, str):
        return torch.distributed.distributed_c10d._resolve_process_group(group).size()
    return dist.ProcessGroup.unbox(group).size() if isinstance(group, torch.ScriptObject) else "?"


def _copy(name: str, session: Session, args: Any, kwargs: Any) -> None:
    tensors = list(tensors_in((args, kwargs)))
    if not tensors:
        return
    if name == "chunk_cat":
        session.memory.see(GRADIENTS, args[0])
    target = kwargs.get("dtype") or tensors[0].dtype
    source = tensors[-1] if name == "copy_" else tensors[0]
    becomes = str(target).removeprefix("torch.")
    dtypes = dtype_of(source) if dtype_of(source) == becomes else f"{dtype_of(source)} to {becomes}"
    session.add(Kind.COPIES, name, dtypes, described([source])[1])


@contextlib.contextmanager
def recorded(folder: str, test: str, rank: int, with_operators: bool = False) -> Iterator[Session]:
    """Record the block in this rank, and append a line about it to a file of this rank. ``test`` is the test's id."""
    _current.session = session = Session(with_operators)
    session.mode.__enter__()
    try:
        with _patches.used(), moments.watched(session):
            yield session
    except unittest.SkipTest:
        session.leave("it skipped")
        raise
    except BaseException as error:
        session.add(Kind.EXCEPTIONS, type(error).__name__, cleaned(error))
        raise
    finally:
        if session.mode.is_active:
            session.mode.__exit__(None, None, None)
        _current.session = None
        line = {"file": sys.argv[0], "test": test.removeprefix("__main__."), "rank": rank, "at": time.time()}
        line |= {"words": list(session.words), "events": session.events, "left_out": session.left_out}
        line["limits"] = dict(accelerator.current().tolerances)
        path = Path(folder, f"{os.getpid()}-{threading.get_native_id()}.jsonl")
        with open(path, "a", encoding="utf-8", errors="backslashreplace") as file:
            file.write(f"{json.dumps(line)}\n")


def _install(patches: contextlib.ExitStack) -> None:
    """Patch what is of interest beside the moments that all watchers have."""

    def around(owner: Any, name: str, hook: Callable[..., Any]) -> None:
        moments.around(patches, owner, name, lambda: _current.session, hook)

    for owner in owners():
        around(owner, "__init__", _owned)
    around(nn.Module, "state_dict", _state_dict)
    around(torch.optim.Optimizer, "state_dict", _state_dict)
    around(FSDPMemTracker, "__enter__", _track_memory)
    around(TestCase, "assertEqual", _assert_equal)
    around(unittest.case._AssertRaisesContext, "__exit__", _raises)
    around(warnings, "warn", _warn)
    around(ProcessLocalGroup, "_join", _join)
    for owner, name in itertools.product((torch, torch.random), ("manual_seed", "get_rng_state", "set_rng_state")):
        around(owner, name, _seed)


def _owned(session: Session, former: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    former(self, *args, **kwargs)
    session.memory.add(self)


def _params(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _state_dict(session: Session, former: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    with session.outermost() as is_outermost:
        state = former(self, *args, **kwargs)
    if is_outermost:
        owner = type(self).__name__
        for name, value in state.items():
            tensors = list(tensors_in(value))
            session.add(Kind.STATES, f"{owner}.{name}", *described(tensors))
        session.value(f"state_dict of {owner}", state)
    return state


def _assert_equal(session: Session, former: Any, self: Any, x: Any, *args: Any, **kwargs: Any) -> None:
    session.value("assertEqual", x)
    former(self, x, *args, **kwargs)


def _raises(session: Session, former: Any, self: Any, kind: Any, error: Any, trace: Any) -> Any:
    if kind is not None:
        session.add(Kind.EXCEPTIONS, kind.__name__, cleaned(error))
    return former(self, kind, error, trace)


def _warn(
    session: Session, former: Any, message: Any, category: Any = None, stacklevel: int = 1, *args: Any, **kwargs: Any
) -> None:
    session.add(Kind.EXCEPTIONS, "warning", cleaned(message))
    former(message, category, stacklevel + 2, *args, **kwargs)


def _seed(session: Session, former: Any, *args: Any, **kwargs: Any) -> Any:
    return _randomly(session, former, *args, **kwargs) if session.is_thread else former(*args, **kwargs)


def _join(session: Session, former: Any, self: Any, name: str, parts: Any, opts: Any) -> Any:
    if collective := collective_name(name):
        session.collective(collective, [part.ins for part in parts], self.size())
    return former(self, name, parts, opts)


def _track_memory(session: Session, former: Any, *args: Any, **kwargs: Any) -> Any:
    session.leave("it counts memory itself")
    return former(*args, **kwargs)


_patches = moments.WhileUsed(_install)
