"""Small helpers around tensors and their lifetimes."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def disable_gc() -> Iterator[None]:
    """Keep the cyclic garbage collector off inside the block, if it was on."""
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

    Yields a list that afterwards holds them, and warns when there are any. ``limit`` is accepted as upstream's, which
    draws so many of them with the package objgraph; here the list is all there is.
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
            warnings.warn(f"{len(garbage)} tensors are held by reference cycles only", stacklevel=3)
    finally:
        gc.set_debug(flags)
        del gc.garbage[start:]
