"""The backend "staged": ranks share any device, because their tensors travel through the host's memory, over gloo.

The backend of a device often rejects two ranks on one device (NCCL: "Duplicate GPU detected"). gloo takes tensors of
some devices, but not in every collective: with torch 2.11 it crashes on a CUDA tensor in the functional collectives of
DTensor, and ``send`` fails ("Bad address"). So this group copies what a rank gives to the host, and lets gloo move it.

``Work.wait`` copies the results to the device, on the stream that is current then. So a result is never there before a
stream or the host has waited for it. Giving an input blocks the host until the current stream has computed it, so a
step does not overlap with its communication.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from torch_fsdp_tests.device.capabilities import STAGED
from torch_fsdp_tests.installed_torch import torch_names

_dispatch = torch_names.module("torch.utils._python_dispatch")


class StagedWork(dist.Work):
    """The handle of a collective that gloo performs. ``wait`` fills the outputs."""

    def __init__(self, work: dist.Work, outputs: list[tuple[Tensor, Tensor]], divisor: int) -> None:
        """``outputs`` are pairs of a tensor of the device and its copy on the host."""
        super().__init__()
        self._work, self._outputs, self._divisor = work, outputs, divisor
        self._lock = threading.Lock()
        self._filled = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until gloo has finished, and fill the outputs on the current streams of their devices."""
        with self._lock:
            if not self._filled:
                self._work.wait(timeout)
                with torch.no_grad(), _dispatch._disable_current_modes():
                    for output, copy in self._outputs:
                        # A backend writes below autograd: neither views nor saved tensors may see it.
                        output.data.copy_(copy.div_(self._divisor) if self._divisor > 1 else copy)
                self._filled = True
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._work.is_completed() and self.wait()

    def is_success(self) -> bool:
        return self._work.is_success()

    def exception(self) -> Any:
        return self._work.exception()

    def _source_rank(self) -> int:
        return self._work._source_rank()

    def result(self) -> list[Tensor]:
        self.wait()
        return [output for output, _ in self._outputs]

    def get_future(self) -> Future:
        """A future that has the outputs already."""
        future: Future = Future()
        future.set_result(self.result())
        return future


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _through_host(name: str, has_outputs: bool = True) -> Callable[..., dist.Work]:
    """The method of a group with this name. Its outputs are the first argument, if it has any."""

    def collective(self: StagedGroup, *args: Any, **options: Any) -> dist.Work:
        copies: dict[int, Tensor] = {}
        with torch.no_grad(), _dispatch._disable_current_modes():
            for tensor in _tensors(args):
                if not _is_on_host(tensor):
                    copies[id(tensor)] = tensor.detach().to("cpu", copy=True)

        def on_host(value: Any) -> Any:
            if isinstance(value, Tensor):
                return copies.get(id(value), value)
            return [on_host(each) for each in value] if isinstance(value, (list, tuple)) else value

        given = [on_host(value) for value in args]
        method = getattr(self.host_group, name)
        if not copies:
            return method(*given, **options)
        # gloo has no mean
        by_mean = [opts for opts in (*given, *options.values()) if getattr(opts, "reduceOp", None) == dist.ReduceOp.AVG]
        for opts in by_mean:
            opts.reduceOp = dist.ReduceOp.SUM
        try:
            work = method(*given, **options)
        finally:
            for opts in by_mean:
                opts.reduceOp = dist.ReduceOp.AVG
        outputs = [(tensor, copies[id(tensor)]) for tensor in _tensors(args[0])] if has_outputs else []
        return StagedWork(work, outputs, self.size() if by_mean else 1)

    return collective


class StagedGroup(dist.ProcessGroup):
    """A group over gloo for tensors of any device. Tensors of the host go to gloo directly."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.host_group = dist.ProcessGroup(store, rank, size)
        device = torch.accelerator.current_accelerator(check_available=True)
        kind = dist.ProcessGroup.BackendType.GLOO
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        # This group also has a backend: torch asks it for the group's name, and for the type of its devices.
        for group, type in ((self.host_group, "cpu"), (self, "cpu" if device is None else device.type)):
            group._set_default_backend(kind)
            group._register_backend(torch.device(type), kind, gloo)

    def getBackendName(self) -> str:
        return STAGED

    def barrier(self, opts: Any = None) -> dist.Work:
        return self.host_group.barrier(dist.BarrierOptions())

    def shutdown(self) -> None:
        self.host_group.shutdown()

    def abort(self) -> None:
        self.host_group.abort()


for _name in dir(dist.ProcessGroup):
    # every collective of the installed torch, under its present names and the former ones
    if not _name.startswith("__") and _name.lstrip("_").startswith(
        ("all", "broadcast", "gather", "recv", "reduce", "scatter", "send")
    ):
        setattr(StagedGroup, _name, _through_host(_name, has_outputs=_name != "send"))


# The group supports every device. A type in this list without a default backend would get this one as its default.
dist.Backend.register_backend(STAGED, StagedGroup, devices=list(dist.Backend.default_device_backend_map))
