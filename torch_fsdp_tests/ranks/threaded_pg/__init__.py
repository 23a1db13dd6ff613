"""A process group whose ranks are threads of one process, registered with torch.distributed as backend "threaded".

Use it through `MultiThreadedTestCase`, or by hand: `_install_threaded_pg()`, then one thread per rank, each of which
calls `init_process_group("threaded", rank=r, world_size=n, store=a_store_for_all)`, then `_uninstall_threaded_pg()`.
A thread that fails calls `ProcessLocalGroup.exception_handle(error)`, and all others stop at once.

Names are those of upstream's module. As there, the group is a Python subclass of `ProcessGroup`, which torch reaches
through PyProcessGroup.hpp, each thread has its own set of c10d's tables, and there is no `send` and `recv`. Unlike
upstream's, it behaves like a real backend: it has all reduce operations, work is asynchronous until a rank waits, calls
that do not match raise an error, and every wait has a limit.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from torch_fsdp_tests import settings
from torch_fsdp_tests.ranks.threaded_pg.meeting import (
    Appointment,
    Board,
    CollectiveError,
    CollectiveTimeout,
    Meeting,
    PeerFailed,
    ThreadCall,
)
from torch_fsdp_tests.ranks.threaded_pg.operations import BY_NAME, CallsDiffer, Form, Part, Reduction, describe

Tensors = Sequence[Tensor]


class ThreadedWork(dist.Work):
    """The handle of a collective that some rank will complete. `wait` blocks the calling thread, on
    accelerators too, and makes its current stream wait for the result.
    """

    def __init__(self, meeting: Meeting, outputs: Sequence[Tensor], limit: float) -> None:
        super().__init__()
        self._meeting, self._outputs, self._limit = meeting, list(outputs), limit

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the outputs have the result, and return True. A timeout of zero means the group's limit.

        Raises PeerFailed, CallsDiffer, CollectiveError or CollectiveTimeout.
        """
        self._meeting.wait(timeout.total_seconds() or self._limit)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._meeting.opened.is_set()

    def is_success(self) -> bool:
        return self.is_completed() and self._meeting.error is None

    def exception(self) -> BaseException | None:
        return self._meeting.error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> Future:
        """Block, and return a future with the outputs: a callback in the thread of another rank would see that rank."""
        self.wait()
        future: Future = Future()
        future.set_result(self._outputs)
        return future


# Functions that make the methods for collectives. `opts` is an options object, or only a reduce operation.


def _in_place(name: str) -> Callable[..., ThreadedWork]:
    def collective(self: ProcessLocalGroup, tensors: Tensors, opts: Any = dist.ReduceOp.SUM) -> ThreadedWork:
        return self._join(name, [Part([tensor], [tensor]) for tensor in tensors], opts)

    return collective


def _of_lists(name: str) -> Callable[..., ThreadedWork]:
    """A collective whose outputs, or inputs, or both are lists of tensors, perhaps in another list."""

    def flat(tensors: Sequence[Any]) -> list[Tensor]:
        return [tensor for each in tensors for tensor in ([each] if isinstance(each, Tensor) else each)]

    def collective(
        self: ProcessLocalGroup, outputs: Sequence, inputs: Sequence, opts: Any = dist.ReduceOp.SUM
    ) -> ThreadedWork:
        return self._join(name, [Part(flat(inputs), flat(outputs))], opts)

    return collective


def _of_pairs(name: str) -> Callable[..., ThreadedWork]:
    """A collective of one or more pairs, each of an output and its input."""

    def collective(
        self: ProcessLocalGroup, outputs: Tensors, inputs: Tensors, opts: Any = dist.ReduceOp.SUM
    ) -> ThreadedWork:
        pairs = zip(*([each] if isinstance(each, Tensor) else each for each in (inputs, outputs)), strict=True)
        return self._join(name, [Part([input], [output]) for input, output in pairs], opts)

    return collective


class ProcessLocalGroup(dist.ProcessGroup):
    """One rank's view of a group of threads.

    Method names are those that torch.distributed and PyProcessGroup.hpp call; where torch 2.13 renamed one, both
    names lead to the same method. Tensors need not be contiguous.
    """

    _board = Board()

    def __init__(self, rank: int, world_size: int, token: str, limit: float) -> None:
        """`token` is equal on all ranks of the group and on no other group. `limit` bounds every wait, in seconds.

        From here on, backward runs in the thread that calls it: in autograd's threads a hook would not know its rank.
        """
        super().__init__(rank, world_size)
        self._token, self._limit = token, limit
        self._board = type(self)._board  # that of this world, also after a reset
        self._sequence = -1
        self._name = self._desc = ""
        torch.autograd.set_multithreading_enabled(False)

    # Failure and renewal of the world of threads.

    @classmethod
    def exception_handle(cls, exc: BaseException, rank: int | None = None) -> None:
        """Notify all ranks that this one failed with `exc`. Every rank that waits, now or later, raises PeerFailed.

        `rank` is that of the calling thread's default group unless given. Only the first failure counts.
        """
        if rank is None:
            world = c10d._world.default_pg
            rank = None if world is None else world.rank()
        cls._board.fail(rank, exc)

    @classmethod
    def reset(cls) -> None:
        """Start again. Threads that still wait raise, and groups that are made from now on have no failure."""
        board, cls._board = cls._board, Board()
        board.fail(None, "the end of its test")

    # The group's identity, which torch.distributed reads.

    def getBackendName(self) -> str:
        return "threaded"

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_name(self) -> str:
        return self._name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_sequence_number_for_group(self) -> None:
        """Does nothing, because numbers start at 0 in every group."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def __repr__(self) -> str:
        return f"ThreadedPG world_size:{self.size()} rank:{self.rank()}"

    def _join(self, name: str, parts: Sequence[Part], opts: Any) -> ThreadedWork:
        """The only entry for collectives: add this rank's `parts`."""
        collective = BY_NAME[name]
        root = None if collective.root is None else opts.rootRank
        reduction = Reduction.of(getattr(opts, "reduceOp", opts)) if collective.reduces else None
        for part in parts:
            self._check(name, part, root, reduction)
        inputs = [tensor for part in parts for tensor in part.ins]
        agreed = (
            "" if reduction is None else reduction.kind.name,
            "" if root is None else f"root {root}",
            f"{len(parts)} tensors" if len(parts) > 1 else "",
            describe(inputs) if collective.needs_equal_inputs else "",
        )
        self._sequence += 1
        group = f"group {self._name!r}" if self._name else "a group"
        title = f"{group} of {self.size()} ranks"
        call = ThreadCall(name, agreed, parts, root, reduction)
        appointment = Appointment(self._token, self._sequence, self.size(), title)
        meeting = self._board.join(appointment, self.rank(), call)
        timeout = getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if timeout is not None else -1
        limit = min(self._limit, seconds) if seconds > 0 else self._limit
        return ThreadedWork(meeting, [tensor for part in parts for tensor in part.outs], limit)

    def _check(self, name: str, part: Part, root: int | None, reduction: Reduction | None) -> None:
        """Reject at once what is wrong on this rank, whatever the other ranks do."""
        collective = BY_NAME[name]
        for what, form, tensors in (("inputs", collective.ins, part.ins), ("outputs", collective.outs, part.outs)):
            number = 1 if form is not Form.EACH else self.size() if root in (None, self.rank()) else 0
            self._expect(name, f"the number of {what}", len(tensors), number)
        if Form.PIECES in (collective.ins, collective.outs):
            whole, piece = part if collective.ins is Form.PIECES else part[::-1]
            what = "input" if collective.ins is Form.PIECES else "output"
            self._expect(name, f"the elements of an {what}", whole[0].numel(), piece[0].numel() * self.size())
            self._expect(name, f"the type of an {what}", whole[0].dtype, piece[0].dtype)
        reasons = [reduction and reduction.why_invalid(tensor.dtype) for tensor in part.ins]
        if reason := next(filter(None, reasons), None):
            raise ValueError(f"{name} on rank {self.rank()}: {reason}")

    def _expect(self, name: str, what: str, actual: object, expected: object) -> None:
        if actual != expected:
            raise ValueError(f"{name} on rank {self.rank()}: {what} must be {expected}, not {actual}")

    allreduce = allreduce_coalesced = _in_place("all_reduce")
    reduce = _in_place("reduce")
    broadcast = _in_place("broadcast")
    allgather = _of_lists("all_gather")
    gather = _of_lists("gather")
    scatter = _of_lists("scatter")
    reduce_scatter = _of_lists("reduce_scatter")
    alltoall = _of_lists("all_to_all")
    all_gather_single = _of_pairs("all_gather_into_tensor")
    all_gather_single_coalesced = _of_pairs("all_gather_into_tensor_coalesced")
    reduce_scatter_single = _of_pairs("reduce_scatter_tensor")
    reduce_scatter_single_coalesced = _of_pairs("reduce_scatter_tensor_coalesced")

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> ThreadedWork:
        """Split sizes count rows of dimension 0. Without split sizes all parts are equal."""
        parts = Part(self._rows(input, input_split_sizes), self._rows(output, output_split_sizes))
        return self._join("all_to_all_single", [parts], opts)

    def _rows(self, tensor: Tensor, sizes: Sequence[int] | None) -> Tensors:
        name, rows = "all_to_all_single", tensor.shape[0]
        if not sizes:
            self._expect(name, f"the rest of {rows} rows over {self.size()} ranks", rows % self.size(), 0)
            sizes = [rows // self.size()] * self.size()
        self._expect(name, "the number of split sizes", len(sizes), self.size())
        self._expect(name, "the sum of the split sizes", sum(sizes), rows)
        return tensor.detach().split(list(sizes))

    def barrier(self, opts: Any = None) -> ThreadedWork:
        """Move nothing. The effect is that all ranks have arrived."""
        return self._join("barrier", [], opts)

    # The names before torch 2.13, which its PyProcessGroup.hpp and torch.distributed call.

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _create_threaded_pg(prefix_store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> ProcessLocalGroup:
    """What `init_process_group` and `new_group` call in each rank of the group; returns once all have called.

    The threads find each other through their shared store. The first one puts a token there. The token's key counts how
    often the group was made, because a world may be destroyed and made again over the same store.
    """
    generation = (prefix_store.add("arrivals", 1) - 1) // world_size
    token = prefix_store.compare_set(f"token/{generation}", "", uuid.uuid4().hex).decode()
    limit = min(settings.timeout(os.environ), timeout.total_seconds())
    group = ProcessLocalGroup(rank, world_size, token, limit)
    group._join("the creation of the group", [], None).wait()  # as the connection of a real backend does
    return group


class ThreadLocalWorld(threading.local):
    """c10d's tables of groups, one set per thread. It replaces `torch.distributed.distributed_c10d._world`."""

    default_pg: dist.ProcessGroup | None = None
    # c10d's own property works, because it only reads the tables.
    pg_config_info = c10d._World.pg_config_info

    def __init__(self, before: tuple[Any, bool]) -> None:
        self._before = before  # c10d's world and autograd's threading, as they were before the installation

    def __getattr__(self, name: str) -> Any:
        """A table that the installed torch has, such as `pg_map`. Empty at first."""
        if name.startswith("_"):
            raise AttributeError(f"c10d's world has no {name!r}")
        setattr(self, name, type(getattr(self._before[0], name))())
        return self.__dict__[name]


def _install_threaded_pg() -> ThreadLocalWorld:
    """From here on, give every thread its own world. Returns the new `distributed_c10d._world`.

    Also separates c10d's C++ registries of groups and work by thread, which functional collectives use, and keeps
    backward in the calling thread. A second installation replaces the tables, and can still be undone.
    """
    world = c10d._world
    is_installed = isinstance(world, ThreadLocalWorld)
    c10d._world = ThreadLocalWorld(world._before if is_installed else (world, torch._C._is_multithreading_enabled()))
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    torch.autograd.set_multithreading_enabled(False)
    return c10d._world


def _uninstall_threaded_pg() -> None:
    """Undo `_install_threaded_pg`, in the thread that called it. Does nothing when nothing is installed."""
    if isinstance(c10d._world, ThreadLocalWorld):
        c10d._world, multithreading = c10d._world._before
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        torch.autograd.set_multithreading_enabled(multithreading)


# The group supports every device. A type in this list without a default backend would get this one as its default.
dist.Backend.register_backend("threaded", _create_threaded_pg, devices=list(dist.Backend.default_device_backend_map))
