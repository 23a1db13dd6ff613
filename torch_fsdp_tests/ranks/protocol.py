"""The messages between the processes of a test, grouped by their sender.

The *processes* of a group are numbered from 0. Each process runs the rank of the same number, or all ranks as threads.
A rank reports its test as a :class:`.RankResult`. Times (``at``) are seconds of ``time.monotonic()`` on
the machine of the test process.
"""

from __future__ import annotations

import dataclasses

from torch_fsdp_tests.verdict import RankResult


@dataclasses.dataclass(frozen=True)
class Task:
    """The task of a group of ranks: one test of a class, or, without a test, the tests that are sent to the group.

    ``state`` is what the ranks adopt first (see :mod:`.inherited`).
    """

    module: str
    qualname: str
    test: str | None
    world_size: int
    state: str


# --- a group to one of its processes ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class RunTest:
    """Run one more test."""

    test: str


@dataclasses.dataclass(frozen=True)
class Continue:
    """All other ranks are at the point where this rank waits for them."""


@dataclasses.dataclass(frozen=True)
class Leave:
    """There are no more tests."""


TO_RANK = (RunTest, Continue, Leave)


@dataclasses.dataclass(frozen=True)
class AskForStacks:
    """Let the ranks of the process write their stacks. It is sent to what started the process."""


@dataclasses.dataclass(frozen=True)
class EndRanks:
    """Kill what is left of the process. It is sent to what started the process."""


Order = RunTest | Continue | Leave | AskForStacks | EndRanks


# --- what happens to the processes of a group -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Leaving:
    """The process of a rank runs no more tests after the one that it reports next."""

    process: int


@dataclasses.dataclass(frozen=True)
class Waits:
    """The rank of a process is at the end of its test, and waits for all others."""

    process: int


@dataclasses.dataclass(frozen=True)
class Raised:
    """The test of a process has raised. Other ranks should not wait for its report, because it may wait for them."""

    process: int


@dataclasses.dataclass(frozen=True)
class Leaked:
    """A test has leaked something in a process. The leak has been cleaned up."""

    process: int
    what: str


@dataclasses.dataclass(frozen=True)
class WroteStacks:
    """A process has written (a part of) its crash output, such as the requested stacks."""

    process: int


@dataclasses.dataclass(frozen=True)
class Started:
    """Processes on this host have started, with these process ids (None for those on other machines)."""

    start: int
    processes: tuple[int, ...]
    host: str
    pids: tuple[int | None, ...]
    at: float


@dataclasses.dataclass(frozen=True)
class Stopped:
    """A process was stopped by a signal."""

    start: int
    process: int


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process has ended with this wait status."""

    start: int
    process: int
    status: int
    at: float


@dataclasses.dataclass(frozen=True)
class Over:
    """Nothing is left of these processes. ``leaks`` are the commands of processes that they started and lost."""

    start: int
    processes: tuple[int, ...]
    leaks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Broken:
    """The harness itself failed, for the given reason."""

    start: int
    why: str


FROM_RANK = (RankResult, Leaving, Waits, Raised, Leaked)
FROM_SERVER = (Started, Stopped, Ended, Over, Broken)
Event = RankResult | Leaving | Waits | Raised | Leaked | WroteStacks | Started | Stopped | Ended | Over | Broken


# --- the test process to its rank server ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Start:
    """Start processes. Each gets two descriptors: its channel, and the pipe for its crash output.

    A single process may have a call (see :mod:`.calls`), whose open files come after those two.
    """

    start: int
    task: Task
    processes: tuple[int, ...]
    file_name: str
    directory: str
    cwd: str
    environment: dict[str, str]
    preparation: str | None  # of fresh interpreters; None to fork the processes
    call: str | None
    descriptors: tuple[int, ...]

    @property
    def files(self) -> tuple[int, ...]:
        """The open files of the call."""
        return self.descriptors[2 * len(self.processes) :]


@dataclasses.dataclass(frozen=True)
class Signal:
    """Send a signal to the processes of a start."""

    start: int
    number: int


@dataclasses.dataclass(frozen=True)
class End:
    """Kill what is left of a start, including processes that its ranks have started and lost."""

    start: int


REQUESTS = (Start, Signal, End)


# --- what a group collects from where its processes are ---------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Remains:
    """The output of a process during its test."""

    process: int
    stacks: str
    output: str


@dataclasses.dataclass(frozen=True)
class Collected:
    """The output of processes, and the commands of processes that they have left running."""

    remains: tuple[Remains, ...] = ()
    leaks: tuple[str, ...] = ()
