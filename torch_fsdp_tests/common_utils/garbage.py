"""Finds tensors that only the garbage collector frees."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def check_leaked_tensors(limit: int = 1, matched_type: type | tuple[type, ...] = torch.Tensor) -> Iterator[list[Any]]:
    """Put the tensors that the block leaves in reference cycles into the list that it gets, and warn if there are any.

    The list is filled when the block ends without an exception. ``limit`` is accepted and changes nothing: upstream
    makes this many graphs. Differs from upstream's: the garbage is freed with the list, which has the only reference.
    """
    in_cycles: list[Any] = []
    gc.collect()
    flags, before = gc.get_debug(), len(gc.garbage)
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield in_cycles
        gc.collect()
        in_cycles += [each for each in gc.garbage[before:] if isinstance(each, matched_type)]
    finally:
        gc.set_debug(flags)
        del gc.garbage[before:]
    if in_cycles:
        words = f"{len(in_cycles)} tensors are in reference cycles, so they stay until the garbage is collected"
        warnings.warn(f"{words}: break the cycle", stacklevel=3)
