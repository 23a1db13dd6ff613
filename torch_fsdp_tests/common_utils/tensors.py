"""Helpers for the lifetime of tensors."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def disable_gc() -> Iterator[None]:
    """Disable the cyclic garbage collector inside the block."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


@contextlib.contextmanager
def check_leaked_tensors(
    limit: int = 1, matched_type: type | tuple[type, ...] = torch.Tensor
) -> Iterator[list[object]]:
    """Find tensors that the block left to the cyclic garbage collector.

    Yields a list that has them after the block, and warns if there are any. ``limit`` exists for compatibility:
    upstream draws that many of them with the package objgraph.
    """
    garbage: list[object] = []
    flags, start = gc.get_debug(), len(gc.garbage)
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield garbage
        gc.collect()
        garbage += (each for each in gc.garbage[start:] if isinstance(each, matched_type))
        if garbage:
            warnings.warn(f"only reference cycles keep {len(garbage)} tensors alive", stacklevel=3)
    finally:
        gc.set_debug(flags)
        del gc.garbage[start:]
