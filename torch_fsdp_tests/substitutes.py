"""What a device without a runtime of its own, such as the CPU, lacks for FSDP1 and for parameter offload.

All of it is here, so that no test repeats it, and all of it goes by capability:

- ``device_memory``: FSDP1 looks for the accelerator it computes on and refuses a host without one ("FSDP needs a
  non-CPU accelerator device", ``torch.distributed.fsdp._init_utils``). An explicit ``device_id`` answers that
  question, so a constructor called without one is given that of its rank. Proves as much as a ``device_id`` in each
  test would: sharding, communication and schedule are FSDP's own. What FSDP does without a ``device_id`` is not tested.
- ``device_memory``, again: ``FlatParamHandle.prepare_gradient_for_backward`` tells an offloaded gradient of an
  earlier step, which it drops, from one to accumulate with by their devices. Where those are the same it would
  accumulate, also what ``zero_grad`` had let go of before (FULL_SHARD with the original parameters writes it back).
  So the offloaded gradient is dropped before FSDP looks, and where low precision gradients are kept, the memory for
  the next one gets the dtype of the parameters again, as FSDP gives it. Proves that the rest of the step is right, not
  that FSDP tells the two apart.
- ``pinned_memory``: offloaded parameters are pinned (``_flat_param``, ``_fsdp_param``), which needs an accelerator.
  ``Tensor.pin_memory`` returns the tensor itself. Proves where FSDP keeps parameters and gradients, and when it
  asks for copies; not that memory is pinned, nor that a copy is right, since host and device are the same memory. FSDP1
  under NO_SHARD computes in the very storage that it offloads.
- ``streams``: the end of FSDP1's backward waits for the offload's stream, and ``torch.cpu.Stream`` has no
  ``synchronize``. It gets one that returns at once. Proves nothing about waiting: on the host every copy is done when
  it returns.
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

from torch_fsdp_tests import torch_names
from torch_fsdp_tests.accelerator import Accelerator

_flat_param = torch_names.module("torch.distributed.fsdp._flat_param")
_lock = threading.Lock()
_installed: contextlib.ExitStack | None = None


def install(device: Accelerator) -> None:
    """Install the substitutes that ``device`` needs, for the whole process. Does nothing the second time, or if none is
    needed.

    Meant for a rank, which ends with its test. :func:`uninstall` removes them. Several threads may call it.
    """
    global _installed
    with _lock:
        if _installed is None:
            _installed = contextlib.ExitStack()
            for capability, substitute in _SUBSTITUTES:
                if not device.has(capability):
                    try:
                        substitute(device, _installed)
                    except torch_names.NameIsGone as gone:
                        _refuse_fsdp1(gone, _installed)


def uninstall() -> None:
    """Restore what :func:`install` replaced. Does nothing if it was not called."""
    global _installed
    with _lock:
        if _installed is not None:
            _installed.close()
            _installed = None


def _refuse_fsdp1(gone: torch_names.NameIsGone, undo: contextlib.ExitStack) -> None:
    """Skip tests that make an FSDP1 model, because the substitute for it cannot be made with this torch."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise gone

    undo.enter_context(mock.patch.object(FullyShardedDataParallel, "__init__", refuse))


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
    prepare = torch_names.attribute(handle_type, "prepare_gradient_for_backward")

    @functools.wraps(prepare)
    def drop_and_prepare(handle: Any) -> None:
        if handle._offload_params and _has_offloaded_gradient(handle):
            flat_param = handle.flat_param
            flat_param.grad = None
            if handle._keep_low_precision_grads:
                flat_param._cpu_grad.data = flat_param._cpu_grad.to(flat_param._local_shard.dtype)
        prepare(handle)

    undo.enter_context(mock.patch.object(handle_type, "prepare_gradient_for_backward", drop_and_prepare))


def _has_offloaded_gradient(handle: Any) -> bool:
    """Whether ``.grad`` is an offloaded gradient of an earlier step. Under ``no_sync`` it is on the device, and
    unsharded.
    """
    flat_param = handle.flat_param
    if flat_param.grad is None:
        return False
    if handle.uses_sharded_strategy:
        return flat_param.grad.size() == flat_param._local_shard.size()
    return flat_param.grad.data_ptr() == flat_param._cpu_grad.data_ptr()


def _pin_nothing(device: Accelerator, undo: contextlib.ExitStack) -> None:
    def pin_memory(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    undo.enter_context(mock.patch.object(torch.Tensor, "pin_memory", pin_memory))


def _wait_for_nothing(device: Accelerator, undo: contextlib.ExitStack) -> None:
    if not hasattr(torch.cpu.Stream, "synchronize"):
        undo.enter_context(mock.patch.object(torch.cpu.Stream, "synchronize", lambda self: None, create=True))


_SUBSTITUTES: tuple[tuple[str, Callable[[Accelerator, contextlib.ExitStack], None]], ...] = (
    ("device_memory", _give_device_id),
    ("device_memory", _drop_offloaded_gradient),
    ("pinned_memory", _pin_nothing),
    ("streams", _wait_for_nothing),
)
