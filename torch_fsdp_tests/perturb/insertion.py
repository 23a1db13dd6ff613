"""Where perturbations are inserted.

The places are before each outermost forward of a training loop (so also between microbatches), and before and after
each optimizer step. Nothing is inserted where a test could tell: while a ``mock.patch`` is active, under a
mode of torch (such as ``CommDebugMode``), a profiler, ``torch.compile`` or a transform, inside a backward or a
checkpointed forward, into a model that only some ranks have, and in a test that is declared as unperturbed. A kind that
calls forward leaves out models whose forward a test may watch.

All ranks of a test choose alike: the choice depends on the test's name, the number of earlier insertions, and what is
possible in every rank.
"""

from __future__ import annotations

import contextlib
import functools
import random
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.perturb import is_paused, pause_under_mock
from torch_fsdp_tests.perturb.invariants import Snapshot
from torch_fsdp_tests.perturb.kinds import KINDS, Forwards, InsertionPoint, Kind, Subject, copied

_CLASSES = {FSDPModule: "fsdp2", FSDP: "fsdp1", DDP: "ddp"}


class Session:
    """The perturbations of one test in one rank."""

    def __init__(self, test: str, kinds: Sequence[str]) -> None:
        self._kinds = [KINDS[name] for name in kinds]
        self._test = test
        self._count = 0
        self._is_busy = False
        self._is_running = False  # an outermost forward
        self._roots: weakref.WeakKeyDictionary[nn.Module, Forwards] = weakref.WeakKeyDictionary()
        self.inserted: list[str] = []

    def may_insert(self) -> bool:
        return not (
            self._is_busy
            or is_paused()
            or not torch.is_grad_enabled()
            or torch._C._current_graph_task_id() != -1
            or torch._C._len_torch_dispatch_stack()
            or torch._C._len_torch_function_stack()
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch.autograd._profiler_enabled()
            or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None  # of a checkpoint
            or not dist.is_initialized()
            or dist.get_backend() == "fake"
        )

    def call(self, api: str, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a forward, with what is inserted around it if it is an outermost one."""
        is_recomputed = torch._C._current_graph_task_id() != -1
        if self._is_busy or is_recomputed or self._is_running:
            return forward(*args, **kwargs)
        trains = module.training and self.may_insert()
        root = self._roots.setdefault(module, Forwards(api))
        if trains:
            root.args, root.kwargs = copied((args, kwargs))
            root.has_run = True
            if not root.pending:
                self._insert(InsertionPoint.BEFORE_FORWARD, module)
        self._is_running = True
        try:
            output = forward(*args, **kwargs)
        finally:
            self._is_running = False
        root.calls += 1
        root.pending += trains
        return output

    def after_backward(self) -> None:
        if not self._is_busy:
            for root in self._roots.values():
                root.pending = max(0, root.pending - 1)

    def around_step(self, place: InsertionPoint, optimizer: torch.optim.Optimizer) -> None:
        if not self.may_insert():
            return
        own = {id(param) for group in optimizer.param_groups for param in group["params"]}
        inner = {each for module in self._roots for each in module.modules() if each is not module}
        for module in [module for module in self._roots if module not in inner]:
            if own & {id(param) for param in module.parameters()}:
                self._roots[module].pending = 0
                self._insert(place, module, optimizer)

    def _insert(self, place: InsertionPoint, module: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        number = zlib.crc32(f"{self._test} {place} {self._count}".encode())
        subject = Subject(module, optimizer, place, number, self._roots[module])
        if not subject.spans_the_world():
            return
        self._count += 1  # the same on all ranks, although some have other models
        candidates = [kind for kind in self._kinds if place in kind.places]
        possible = not subject.is_watched() and subject.is_made() and subject.is_idle()
        applies = {kind.name: possible and kind.applies(subject) for kind in candidates}
        agreed = _agree({**applies, "has_states": subject.has_states})
        subject.has_states = agreed["has_states"]
        usable = [kind for kind in candidates if agreed[kind.name]]
        if usable:
            self._run(usable[number % len(usable)], subject)

    def _run(self, kind: Kind, subject: Subject) -> None:
        words = f"{kind.name} {subject.place.value} {subject.forwards.calls + 1} of {type(subject.root).__name__}"
        self._is_busy = True
        numbers = torch.get_rng_state(), random.getstate()
        before = Snapshot(subject)
        try:
            taken = kind.insert(subject)
            before.check(taken, words)
        except Exception as error:
            _note(error, f"inserted: {words}")
            raise
        finally:
            torch.set_rng_state(numbers[0])
            random.setstate(numbers[1])
            self._is_busy = False
        self.inserted.append(words)


def _agree(mine: Mapping[str, bool]) -> dict[str, bool]:
    """Logical AND over all ranks: a rank without a shard of a parameter has no state of it."""
    answers = torch.tensor([*mine.values()], dtype=torch.int32, device=accelerator.current().device(dist.get_rank()))
    dist.all_reduce(answers, dist.ReduceOp.MIN)
    return dict(zip(mine, map(bool, answers.tolist())))


def _note(error: Exception, words: str) -> None:
    if hasattr(error, "add_note"):  # since Python 3.11
        error.add_note(words)


class _Current(threading.local):
    session: Session | None = None


_current = _Current()


@contextlib.contextmanager
def perturbed(test: str, kinds: Sequence[str]) -> Iterator[Session]:
    """Insert these kinds into the training loops of the block, in this rank."""
    _install()
    _current.session = session = Session(test, kinds)
    try:
        yield session
    except Exception as error:
        if session.inserted:
            last = "; ".join(session.inserted[-3:])
            _note(error, f"{len(session.inserted)} perturbations were inserted before, the last of them: {last}")
        raise
    finally:
        _current.session = None


@functools.cache
def _install() -> None:
    """Patch torch once per process. In ranks without a session, nothing changes."""
    for cls, api in _CLASSES.items():
        cls.__call__ = _wrapped(cls, api)
    register_optimizer_step_pre_hook(functools.partial(_around_step, InsertionPoint.BEFORE_STEP))
    register_optimizer_step_post_hook(functools.partial(_around_step, InsertionPoint.AFTER_STEP))
    torch.autograd.backward = _reporting(torch.autograd.backward)
    pause_under_mock()


def _wrapped(cls: Any, api: str) -> Callable[..., Any]:
    def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = super(cls, self).__call__
        session = None if torch.compiler.is_compiling() else _current.session
        return forward(*args, **kwargs) if session is None else session.call(api, self, forward, args, kwargs)

    return __call__


def _around_step(place: InsertionPoint, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _current.session is not None and not torch.compiler.is_compiling():
        _current.session.around_step(place, optimizer)


def _reporting(backward: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(backward)
    def reporting(*args: Any, **kwargs: Any) -> None:
        backward(*args, **kwargs)
        if _current.session is not None and not torch.compiler.is_compiling():
            _current.session.after_backward()

    return reporting
