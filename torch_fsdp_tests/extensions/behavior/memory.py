"""The bytes of unsharded parameters and gradients that FSDP has made and that are still alive.

Storages are seen where FSDP holds them, and gradients also where FSDP2 copies them. Then they are followed by
weak references. So what FSDP lets go of, and something else keeps, still counts.
"""

from __future__ import annotations

import gc
import importlib
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_fsdp_tests.extensions.behavior.values import has_storage, local

# The classes whose objects hold unsharded parameters: of FSDP2 and of FSDP1. A version may lack them.
OWNERS = (
    ("torch.distributed.fsdp._fully_shard._fsdp_param", "FSDPParam"),
    ("torch.distributed.fsdp._flat_param", "FlatParamHandle"),
)
PARAMETERS, GRADIENTS = "parameters", "gradients"
MOMENT = 0.02  # seconds in which a thread of the backend lets go of a gradient that it has sent


def owners() -> Iterator[type]:
    for module, name in OWNERS:
        cls = getattr(importlib.import_module(module), name, None)
        if cls is not None:
            yield cls


class Memory:
    """The storages of one rank."""

    def __init__(self) -> None:
        self.is_used = self._is_new = False  # whether FSDP has made an owner, and one since the last measurement
        self._owners: weakref.WeakSet[Any] = weakref.WeakSet()
        self._seen: dict[int, tuple[StorageWeakRef, str]] = {}
        self._kept: set[int] = set()  # those that something else keeps

    def add(self, owner: Any) -> None:
        self._owners.add(owner)
        self.is_used = self._is_new = True

    def see(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in filter(has_storage, map(local, tensors)):
            storage = tensor.untyped_storage()
            self._seen.setdefault(storage._cdata, (StorageWeakRef(storage), kind))

    def alive(self) -> dict[str, int]:
        """The bytes of each kind. A freed storage that can be allocated again counts as none."""
        if self._is_new:
            gc.collect()  # a test's earlier model may be in cycles
            self._is_new = False
        held = [(kind, local(each)) for owner in list(self._owners) for kind, each in _held(owner)]
        for kind, tensor in held:
            self.see(kind, [tensor])
        self._wait_for_backend({tensor.untyped_storage()._cdata for _, tensor in held if has_storage(tensor)})
        sizes = {PARAMETERS: 0, GRADIENTS: 0}
        for key, (reference, kind) in list(self._seen.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
            if storage is None:
                del self._seen[key]
                self._kept.discard(key)
            else:
                sizes[kind] += storage.nbytes()
        return sizes

    def _wait_for_backend(self, held: set[int]) -> None:
        """Wait once for each gradient that FSDP has let go of."""
        until = time.monotonic() + MOMENT
        gone = {key for key, (_, kind) in self._seen.items() if kind == GRADIENTS} - held - self._kept
        while gone := {key for key in gone if not self._seen[key][0].expired()}:
            if time.monotonic() > until:
                self._kept |= gone
                return
            time.sleep(0.001)


def _held(owner: Any) -> Iterator[tuple[str, torch.Tensor]]:
    flat = getattr(owner, "flat_param", None)
    if flat is None:
        found: list[tuple[str, Any]] = [(PARAMETERS, each) for each in getattr(owner, "all_gather_outputs", ())]
        param = getattr(owner, "_unsharded_param", None)
        found += [(GRADIENTS, getattr(param, "grad", None))]
        found += [(GRADIENTS, getattr(owner, "unsharded_accumulated_grad", None))]
    else:
        found = [(PARAMETERS, getattr(flat, f"{name}param_padded", None)) for name in ("_full_", "_full_prec_full_")]
        whole = getattr(flat, "_unpadded_unsharded_size", None)
        found += [(GRADIENTS, flat.grad)] if flat.grad is not None and flat.grad.shape == whole else []
    return ((kind, each) for kind, each in found if isinstance(each, torch.Tensor))
