"""A process group whose ranks are threads of one process, registered with torch.distributed as backend "threaded".

Use it through `MultiThreadedTestCase`, or by hand: `_install_threaded_pg()`, then one thread a rank, each of which
calls `init_process_group("threaded", rank=r, world_size=n, store=a_store_for_all)`, then `_uninstall_threaded_pg()`.
A thread that fails calls `ProcessLocalGroup.exception_handle(error)`, and all others stop at once.

The same names as upstream's module, and the same place in torch.distributed: the group is a Python subclass of
`ProcessGroup`, which torch reaches through PyProcessGroup.hpp, and c10d's tables are replaced by one set a thread. What
differs, always in the direction of a real backend: every reduce operation is here; work is asynchronous until somebody
waits; calls that do not match are an error, not a hang or nonsense; every wait ends. As upstream's, the group has no
transfers between two ranks.
"""

from __future__ import annotations

import itertools
import threading
import uuid
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.futures import Future

from torch_fsdp_tests.ranks.threaded_pg import collectives
from torch_fsdp_tests.ranks.threaded_pg.collectives import Column, Mismatch, Part, Reduction, describe
from torch_fsdp_tests.ranks.threaded_pg.meeting import (
    Board,
    Call,
    CollectiveError,
    CollectiveTimeout,
    Meeting,
    PeerFailed,
    default_limit,
)

Lists = Sequence[Sequence[Tensor]]
Work = Callable[..., None]


class ThreadedWork(dist.Work):
    """The handle of a collective that some rank will complete. `wait` blocks the calling thread, on
    accelerators too, and makes its current stream wait for the result.
    """

    def __init__(self, meeting: Meeting, outputs: Sequence[Tensor], limit: float) -> None:
        super().__init__()
        self._meeting, self._outputs, self._limit = meeting, list(outputs), limit

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until the outputs have the result, and return True. A timeout of zero means the group's limit.

        Raises PeerFailed, Mismatch, CollectiveError or CollectiveTimeout.
        """
        self._meeting.wait(timeout.total_seconds() or self._limit)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._meeting.opened.is_set()

    def is_success(self) -> bool:
        return self._meeting.finished and self._meeting.error is None

    def exception(self) -> BaseException | None:
        return self._meeting.error

    def result(self) -> list[Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> Future:
        """Block, and return a future that has the outputs already. If a callback ran in the thread that completes the
        collective, it would see that thread's rank.
        """
        self.wait()
        future: Future = Future()
        future.set_result(self._outputs)
        return future


class ProcessLocalGroup(dist.ProcessGroup):
    """One rank's view of a group of threads.

    Method names are those that torch.distributed and PyProcessGroup.hpp call; where torch 2.13 renamed one, both
    names lead to the same method. Tensors need not be contiguous.
    """

    _board = Board()

    def __init__(self, rank: int, world_size: int, token: str | None = None, limit: float | None = None) -> None:
        """`token` is equal on all ranks of the group and on no other group; without one the rank is alone.

        `limit` bounds every wait, in seconds (`default_limit()` unless given). From here on, backward runs in the
        thread that calls it, on every device: in autograd's own threads a hook would not know its rank.
        """
        super().__init__(rank, world_size)
        if token is None and world_size > 1:
            raise ValueError(f"rank {rank} of {world_size} needs a token that its whole group shares")
        self._rank, self._world_size, self._token = rank, world_size, token or uuid.uuid4().hex
        self._limit = default_limit() if limit is None else limit
        self._channel = type(self)._board.channel(self._token, world_size)
        self._numbers = itertools.count()
        self._sequence = -1
        self._name = self._desc = ""
        torch.autograd.set_multithreading_enabled(False)

    # Failure and renewal of the whole world of threads.

    @classmethod
    def exception_handle(cls, exc: BaseException, rank: int | None = None) -> None:
        """Tell all ranks that this one failed with `exc`. Every rank that waits, now or later, raises PeerFailed.

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

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._world_size

    def getBackendName(self) -> str:
        return "threaded"

    def _set_group_name(self, name: str) -> None:
        self._name = name
        self._channel.name = f"group {name!r} of {self._world_size} ranks"

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
        return f"ThreadedPG world_size:{self._world_size} rank:{self._rank}"

    # The only entry for collectives.

    def _next(self) -> int:
        self._sequence = next(self._numbers)
        return self._sequence

    def _meet(self) -> None:
        """Wait until every rank has made the group, as the connection of a real backend does."""
        call = Call("the creation of the group", (), [Part((), ())], lambda column, extras: None)
        self._channel.join(self._rank, self._next(), call).wait(self._limit)
        self._channel.board.forget(self._token)

    def _join(
        self,
        name: str,
        parts: Sequence[Part],
        work: Work,
        opts: Any,
        *,
        reduces: bool = False,
        root: int | None = None,
        alike: Sequence[Tensor] = (),
    ) -> ThreadedWork:
        """Add this rank's `parts`. `alike` are the tensors whose shapes and types must be the same on all ranks."""
        agreed, reduction = [], None
        if reduces:
            reduction = Reduction.of(getattr(opts, "reduceOp", opts))
            for tensor in (tensor for part in parts for tensor in part.ins):
                reason = reduction.refuses(tensor.dtype)
                if reason:
                    raise ValueError(f"{name} on rank {self._rank}: {reason}")
            agreed.append(reduction.kind.name)
        if root is not None:
            agreed.append(f"root {root}")
            work = partial(work, root=root)
        if len(parts) > 1:
            agreed.append(f"{len(parts)} tensors")
        if alike:
            agreed.append(describe(alike))

        def perform(column: Column, reductions: Sequence[Any]) -> None:
            work(column, reductions) if reduces else work(column)

        call = Call(name, tuple(agreed), parts, perform, reduction)
        meeting = self._channel.join(self._rank, self._next(), call)
        timeout = getattr(opts, "timeout", None)
        seconds = timeout.total_seconds() if timeout is not None else -1
        limit = min(self._limit, seconds) if seconds > 0 else self._limit
        return ThreadedWork(meeting, [tensor for part in parts for tensor in part.outs], limit)

    def _expect(self, name: str, what: str, actual: int, wanted: int) -> None:
        """Refuse at once what is wrong on this rank, whatever the other ranks do."""
        if actual != wanted:
            raise ValueError(f"{name} on rank {self._rank}: {what} must be {wanted}, not {actual}")

    def _expect_lists(self, name: str, what: str, lists: Lists, present: bool = True) -> Sequence[Tensor]:
        """Return the only list in a list of lists. It has one tensor per rank, or is empty if `present` is False."""
        if not present:
            return ()
        self._expect(name, f"the number of {what} lists", len(lists), 1)
        self._expect(name, f"the number of {what} tensors", len(lists[0]), self._world_size)
        return lists[0]

    # Collectives. `opts` defaults to None and not to an options object. What it does not set has the default.

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = dist.ReduceOp.SUM) -> ThreadedWork:
        parts = [Part([tensor], [tensor]) for tensor in tensors]
        return self._join("all_reduce", parts, collectives.all_reduce, opts, reduces=True, alike=tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = dist.ReduceOp.SUM) -> ThreadedWork:
        return self.allreduce(tensors, opts)

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> ThreadedWork:
        parts = [Part([tensor], [tensor]) for tensor in tensors]
        work, root = collectives.reduce, opts.rootRank
        return self._join("reduce", parts, work, opts, reduces=True, root=root, alike=tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> ThreadedWork:
        parts = [Part([tensor], [tensor]) for tensor in tensors]
        return self._join("broadcast", parts, collectives.broadcast, opts, root=opts.rootRank, alike=tensors)

    def allgather(self, output_tensors: Lists, input_tensors: Sequence[Tensor], opts: Any = None) -> ThreadedWork:
        """Inputs may differ in size between ranks. nccl allows this, and gloo does not."""
        outs = self._expect_lists("all_gather", "output", output_tensors)
        self._expect("all_gather", "the number of inputs", len(input_tensors), 1)
        return self._join("all_gather", [Part(input_tensors, outs)], collectives.all_gather, opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> ThreadedWork:
        return self._gather_into("all_gather_into_tensor", [output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> ThreadedWork:
        return self._gather_into("all_gather_into_tensor_coalesced", outputs, inputs, opts)

    def _gather_into(self, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> ThreadedWork:
        for output, input in zip(outputs, inputs, strict=True):
            self._expect(name, "the elements of an output", output.numel(), input.numel() * self._world_size)
            self._expect_dtypes(name, output, input)
        parts = [Part([input], [output]) for output, input in zip(outputs, inputs, strict=True)]
        return self._join(name, parts, collectives.all_gather_into_tensor, opts, alike=inputs)

    def gather(self, output_tensors: Lists, input_tensors: Sequence[Tensor], opts: Any) -> ThreadedWork:
        outs = self._expect_lists("gather", "output", output_tensors, self._rank == opts.rootRank)
        self._expect("gather", "the number of inputs", len(input_tensors), 1)
        return self._join("gather", [Part(input_tensors, outs)], collectives.gather, opts, root=opts.rootRank)

    def scatter(self, output_tensors: Sequence[Tensor], input_tensors: Lists, opts: Any) -> ThreadedWork:
        ins = self._expect_lists("scatter", "input", input_tensors, self._rank == opts.rootRank)
        self._expect("scatter", "the number of outputs", len(output_tensors), 1)
        return self._join("scatter", [Part(ins, output_tensors)], collectives.scatter, opts, root=opts.rootRank)

    def reduce_scatter(
        self, output_tensors: Sequence[Tensor], input_tensors: Lists, opts: Any = dist.ReduceOp.SUM
    ) -> ThreadedWork:
        """Ranks may receive different sizes. nccl allows this, and gloo does not."""
        ins = self._expect_lists("reduce_scatter", "input", input_tensors)
        self._expect("reduce_scatter", "the number of outputs", len(output_tensors), 1)
        parts = [Part(ins, output_tensors)]
        return self._join("reduce_scatter", parts, collectives.reduce_scatter, opts, reduces=True, alike=ins)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = dist.ReduceOp.SUM) -> ThreadedWork:
        return self._scatter_from("reduce_scatter_tensor", [output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = dist.ReduceOp.SUM
    ) -> ThreadedWork:
        return self._scatter_from("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    def _scatter_from(self, name: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any) -> ThreadedWork:
        for output, input in zip(outputs, inputs, strict=True):
            self._expect(name, "the elements of an input", input.numel(), output.numel() * self._world_size)
            self._expect_dtypes(name, output, input)
        parts = [Part([input], [output]) for output, input in zip(outputs, inputs, strict=True)]
        return self._join(name, parts, collectives.reduce_scatter_tensor, opts, reduces=True, alike=inputs)

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> ThreadedWork:
        self._expect("all_to_all", "the number of outputs", len(outputs), self._world_size)
        self._expect("all_to_all", "the number of inputs", len(inputs), self._world_size)
        return self._join("all_to_all", [Part(inputs, outputs)], collectives.all_to_all, opts)

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
        return self._join("all_to_all_single", [parts], collectives.all_to_all, opts)

    def _rows(self, tensor: Tensor, sizes: Sequence[int] | None) -> Sequence[Tensor]:
        name, rows = "all_to_all_single", tensor.shape[0]
        if not sizes:
            self._expect(name, f"the rest of {rows} rows over {self._world_size} ranks", rows % self._world_size, 0)
            sizes = [rows // self._world_size] * self._world_size
        self._expect(name, "the number of split sizes", len(sizes), self._world_size)
        self._expect(name, "the sum of the split sizes", sum(sizes), rows)
        return tensor.detach().split(list(sizes))

    def barrier(self, opts: Any = None) -> ThreadedWork:
        return self._join("barrier", [Part((), ())], collectives.barrier, opts)

    def _expect_dtypes(self, name: str, output: Tensor, input: Tensor) -> None:
        if output.dtype != input.dtype:
            raise ValueError(f"{name} on rank {self._rank}: output {describe([output])} and input {describe([input])}")

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
    group = ProcessLocalGroup(rank, world_size, token, min(default_limit(), timeout.total_seconds()))
    group._meet()
    return group


class ThreadLocalWorld(threading.local):
    """c10d's tables of groups, one set per thread. It replaces `torch.distributed.distributed_c10d._world`.

    `threading.local` runs `__init__` again in every thread that uses it.
    """

    def __init__(self) -> None:
        self.default_pg: dist.ProcessGroup | None = None
        self.pg_map: dict[dist.ProcessGroup, tuple[str, dist.Store | None]] = {}
        self.pg_names: dict[dist.ProcessGroup, str] = {}
        self.pg_group_ranks: dict[dist.ProcessGroup, dict[int, int]] = {}
        self.pg_backend_config: dict[dist.ProcessGroup, str] = {}
        self.group_count = 0
        self.tags_to_pg: dict[str, list[dist.ProcessGroup]] = {}
        self.pg_to_tag: dict[dist.ProcessGroup, str] = {}
        self.pg_coalesce_state: dict[dist.ProcessGroup, list[Any]] = {}
        self.comms: list[Any] = []

    # It is derived from the tables above, so c10d's own implementation works.
    pg_config_info = c10d._World.pg_config_info

    def __getattr__(self, name: str) -> Any:
        """Another table that the installed torch has, such as the flight recorder's hooks in 2.15. Empty at first."""
        if _replaced is None or name.startswith("_"):
            raise AttributeError(f"c10d's world has no {name!r}")
        setattr(self, name, type(getattr(_replaced[0], name))())
        return self.__dict__[name]


_replaced: tuple[Any, bool] | None = None  # c10d's world and autograd's threading, as they were before installation


def _install_threaded_pg() -> ThreadLocalWorld:
    """From here on, give every thread its own world. Returns the new `distributed_c10d._world`.

    Also separates c10d's C++ registries of groups and work by thread, which functional collectives use, and keeps
    backward in the calling thread. A second installation replaces the tables, and can still be undone.
    """
    global _replaced
    if _replaced is None:
        _replaced = c10d._world, torch._C._is_multithreading_enabled()
    c10d._world = ThreadLocalWorld()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    torch.autograd.set_multithreading_enabled(False)
    return c10d._world


def _uninstall_threaded_pg() -> None:
    """Undo `_install_threaded_pg`, in the thread that called it. Does nothing when nothing is installed."""
    global _replaced
    if _replaced is not None:
        c10d._world, multithreading = _replaced
        _replaced = None
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
        torch.autograd.set_multithreading_enabled(multithreading)


# The group supports every device, so this list only has to satisfy torch's table. It names types that have a default
# backend already, because any other type would get this one as its default.
dist.Backend.register_backend("threaded", _create_threaded_pg, devices=list(dist.Backend.default_device_backend_map))
