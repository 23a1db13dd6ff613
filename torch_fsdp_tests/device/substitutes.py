"""What a device without a runtime of its own, such as the CPU, lacks for FSDP1 and for parameter offload.

All substitutes are here, so that no test repeats them. Each one depends on a capability:

- ``device_memory``: FSDP1 looks for the accelerator that it computes on, and rejects a host without one ("FSDP needs a
  non-CPU accelerator device", ``torch.distributed.fsdp._init_utils``). With an explicit ``device_id`` it does not look.
  So a constructor that is called without one gets its rank's ``device_id``. This proves as much as a ``device_id`` in
  each test: sharding, communication and schedule are FSDP's own. What FSDP does without a ``device_id`` is not tested.
- ``device_memory``, again: ``FlatParamHandle.prepare_gradient_for_backward`` drops an offloaded gradient of an earlier
  step, but keeps a gradient to accumulate with. It compares their devices to tell them apart. If the devices are the
  same, FSDP would always accumulate, even into gradients that ``zero_grad`` has released (FULL_SHARD with
  ``use_orig_params=True`` writes them back). So the offloaded gradient is dropped before FSDP looks. If low precision
  gradients are kept, the memory for the next gradient gets the dtype of the parameters again, as in FSDP. This proves
  that the rest of the step is right, but not that FSDP tells the two gradients apart.
- ``pinned_memory``: offloaded parameters are pinned (``_flat_param``, ``_fsdp_param``), which needs an accelerator.
  ``Tensor.pin_memory`` returns a copy, as it does with an accelerator, and ``Tensor.is_pinned`` recognizes its memory.
  This proves what FSDP asks to pin, where it keeps parameters and gradients, and when it asks for copies. It does not
  prove that a copy between host and device is right, because they are the same memory here.
- ``streams``: the end of FSDP1's backward waits for the offload's stream, and ``torch.cpu.Stream`` has no
  ``synchronize``. It gets one that returns at once. This proves nothing about waits: copies on the CPU are synchronous.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.multiprocessing.reductions import StorageWeakRef

from torch_fsdp_tests.device.accelerator import Accelerator
from torch_fsdp_tests.installed_torch import torch_names
from torch_fsdp_tests.installed_torch.torch_names import attribute

_flat_param = torch_names.module("torch.distributed.fsdp._flat_param")
_lock = threading.Lock()
_installed: list[contextlib.ExitStack] = []  # at most one


def install(device: Accelerator) -> None:
    """Install the substitutes that ``device`` needs, if any, for the whole process. Does nothing if called again.

    Meant for a rank, which ends with its test. :func:`uninstall` removes them. Several threads may call it.
    """
    with _lock:
        if not _installed:
            _installed.append(undo := contextlib.ExitStack())
            for capability, substitute in _SUBSTITUTES:
                if not device.has(capability):
                    try:
                        substitute(device, undo)
                    except torch_names.NameIsGone as gone:
                        _skip_fsdp1(gone, undo)


def uninstall() -> None:
    """Restore what :func:`install` replaced. Does nothing if it was not called."""
    with _lock:
        while _installed:
            _installed.pop().close()


def _skip_fsdp1(gone: torch_names.NameIsGone, undo: contextlib.ExitStack) -> None:
    """Skip tests that make an FSDP1 model, because the substitute for it does not work with the installed PyTorch."""

    def skip(*args: Any, **kwargs: Any) -> None:
        raise gone

    undo.enter_context(mock.patch.object(FullyShardedDataParallel, "__init__", skip))


def _give_device_id(device: Accelerator, undo: contextlib.ExitStack) -> None:
    init = FullyShardedDataParallel.__init__
    signature = inspect.signature(init)

    @functools.wraps(init)
    def init_with_device_id(*args: Any, **kwargs: Any) -> None:
        call = signature.bind(*args, **kwargs)
        if call.arguments.get("device_id") is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            call.arguments["device_id"] = device.device(rank)
        init(*call.args, **call.kwargs)

    undo.enter_context(mock.patch.object(FullyShardedDataParallel, "__init__", init_with_device_id))


def _drop_offloaded_gradient(device: Accelerator, undo: contextlib.ExitStack) -> None:
    handle_type = _flat_param.FlatParamHandle
    prepare = attribute(handle_type, "prepare_gradient_for_backward")

    @functools.wraps(prepare)
    def drop_and_prepare(handle: Any) -> None:
        if attribute(handle, "_offload_params") and _has_offloaded_gradient(handle):
            flat_param = handle.flat_param
            flat_param.grad = None
            if attribute(handle, "_keep_low_precision_grads"):
                cpu_grad = attribute(flat_param, "_cpu_grad")
                cpu_grad.data = cpu_grad.to(attribute(flat_param, "_local_shard").dtype)
        prepare(handle)

    undo.enter_context(mock.patch.object(handle_type, "prepare_gradient_for_backward", drop_and_prepare))


def _has_offloaded_gradient(handle: Any) -> bool:
    """Whether ``.grad`` is an earlier step's offloaded gradient. Under ``no_sync`` it is unsharded, on the device."""
    flat_param = handle.flat_param
    if flat_param.grad is None:
        return False
    if attribute(handle, "uses_sharded_strategy"):
        return flat_param.grad.size() == attribute(flat_param, "_local_shard").size()
    return flat_param.grad.data_ptr() == attribute(flat_param, "_cpu_grad").data_ptr()


def _remember_what_is_pinned(device: Accelerator, undo: contextlib.ExitStack) -> None:
    pinned: dict[int, StorageWeakRef] = {}  # by address; no other storage has it while the reference exists

    def is_pinned(self: torch.Tensor, *args: Any, **kwargs: Any) -> bool:
        known = pinned.get(self.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if self.is_pinned():
            return self
        for gone in [address for address, storage in [*pinned.items()] if storage.expired()]:
            pinned.pop(gone, None)
        copy = self.clone()
        storage = StorageWeakRef(copy.untyped_storage())
        pinned[storage.cdata] = storage
        return copy

    undo.enter_context(mock.patch.object(torch.Tensor, "pin_memory", pin_memory))
    undo.enter_context(mock.patch.object(torch.Tensor, "is_pinned", is_pinned))


def _wait_for_nothing(device: Accelerator, undo: contextlib.ExitStack) -> None:
    if not hasattr(torch.cpu.Stream, "synchronize"):
        undo.enter_context(mock.patch.object(torch.cpu.Stream, "synchronize", lambda self: None, create=True))


_SUBSTITUTES: tuple[tuple[str, Callable[[Accelerator, contextlib.ExitStack], None]], ...] = (
    ("device_memory", _give_device_id),
    ("device_memory", _drop_offloaded_gradient),
    ("pinned_memory", _remember_what_is_pinned),
    ("streams", _wait_for_nothing),
)
