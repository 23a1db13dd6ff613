"""Records the numbers of training loops: losses, and checksums of gradients, parameters and states at each step.

The hooks of optimizers that perturb a step also record it. Each rank of a test appends a line of JSON to its file in
the folder that :data:`.settings.NUMBERS_VARIABLE` names. The dispatcher reads them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.perturb.invariants import local


def checked(tensor: torch.Tensor) -> list[Any]:
    """The checksum of the bytes of this rank's shard, its dtype, and its norm."""
    here = local(tensor).cpu().contiguous()
    bytes_ = here.flatten().view(torch.uint8).numpy().tobytes() if here.numel() else b""
    wide = here.to(torch.complex128 if here.is_complex() else torch.float64)
    return [zlib.crc32(bytes_), str(here.dtype).removeprefix("torch."), float(torch.linalg.vector_norm(wide))]


class _Steps(threading.local):
    """The steps of the test that runs in this rank. A rank may be a thread."""

    steps: list[dict[str, list[Any]]] | None = None
    loss: torch.Tensor | None = None


_current = _Steps()


@contextlib.contextmanager
def recorded(folder: str, test: str, rank: int) -> Iterator[None]:
    """Record the training loops of the block, in this rank. ``test`` is the id of the test."""
    _install()
    steps: list[dict[str, list[Any]]] = []
    _current.steps = steps
    try:
        yield
    finally:
        _current.steps = _current.loss = None
        name = f"{Path(sys.argv[0]).stem}::{test.removeprefix('__main__.')}"
        line = {"test": name, "rank": rank, "at": time.time(), "steps": steps}
        line["limits"] = dict(accelerator.current().tolerances)
        if steps:
            with open(Path(folder, f"{os.getpid()}-{threading.get_native_id()}.jsonl"), "a", encoding="utf-8") as file:
                file.write(f"{json.dumps(line)}\n")


@functools.cache
def _install() -> None:
    """Register the hooks, once in a process."""
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)
    former = torch.Tensor.backward

    @functools.wraps(former)
    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if _current.steps is not None and self.numel() == 1:
            _current.loss = self.detach()
        former(self, *args, **kwargs)

    torch.Tensor.backward = backward


def _params(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for place, param in enumerate(group["params"]):
            yield f"{place} of group {number}", param


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if _current.steps is None:
        return
    values = {} if _current.loss is None else {"loss": checked(_current.loss)}
    values |= {f"gradient {name}": checked(param.grad) for name, param in _params(optimizer) if param.grad is not None}
    _current.steps.append(values)


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if not _current.steps:
        return
    for name, param in _params(optimizer):
        _current.steps[-1][f"parameter {name}"] = checked(param)
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, torch.Tensor):
                _current.steps[-1][f"{key} {name}"] = checked(value)
