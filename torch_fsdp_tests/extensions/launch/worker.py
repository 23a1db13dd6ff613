"""The process that a launcher made for a rank other than 0, for the whole run.

It connects to rank 0's dispatcher. When the dispatcher says that a test of a file needs this rank, it starts one
process for the file. That process follows the file's process at rank 0 (:mod:`.launched`). The worker
cleans up after a file and reports how the file ended. It does not select, plan or print anything.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_fsdp_tests import installation
from torch_fsdp_tests.device import machine
from torch_fsdp_tests.dispatch import devices
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.extensions.launch import peers, rank_file
from torch_fsdp_tests.extensions.launch.launcher import Launch
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.processes.children import Child, Children
from torch_fsdp_tests.processes.program_server import Program

PATIENCE = 3.0  # seconds for a file's process to leave by itself, after that of rank 0 is gone
GRACE = 0.5  # seconds for it to write its stacks, before it is killed
OUTPUT_SENT = 1 << 16  # bytes of a process' output that are sent to rank 0; longer output is cut in the middle

# --- messages from rank 0 ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Describe:
    """Describe this machine and its devices. ``test_directory`` is relative to the suite's folder if it lies in it."""

    test_directory: str
    device: str  # the type of the devices
    variables: dict[str, str] = dataclasses.field(default_factory=dict)  # with which test files start


@dataclasses.dataclass(frozen=True)
class StartFile:
    """Start the process of a test file, with these variables added to the worker's own."""

    number: int
    test_directory: str
    name: str
    arguments: tuple[str, ...]
    attempt: str
    environment: dict[str, str]


@dataclasses.dataclass(frozen=True)
class EndFile:
    """The file's process at rank 0 is gone."""

    number: int


ORDERS = (Describe, StartFile, EndFile, peers.Dismiss)

# --- messages from a worker -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Machine:
    """The answer to :class:`Describe`."""

    torch: str
    python: str
    commit: str  # empty if git does not know it
    suite: dict[str, str]  # the digests of its files, by name
    facts: dict[str, Any]  # about the hardware and the libraries, which may differ between machines


@dataclasses.dataclass(frozen=True)
class PartEnded:
    """The file's process has ended, with this wait status and this output."""

    number: int
    status: int
    output: str


@dataclasses.dataclass(frozen=True)
class PartOver:
    """Nothing is left of the file. ``leaks`` are the commands of killed processes, other than the file's own."""

    number: int
    was_killed: bool = False
    leaks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Signalled:
    """This process has received a signal that asks it to leave."""

    signal: int


ANSWERS = (Machine, PartEnded, PartOver, Signalled)

# --- for both sides ---------------------------------------------------------------------------------------------------


def digests(test_directory: Path) -> dict[str, str]:
    """Return the digest of each Python file of the suite, by name."""
    files: dict[str, Path] = {}
    for folder, name in ((installation.PACKAGE, "torch_fsdp_tests"), (test_directory, "test")):
        files |= {f"{name}/{path.relative_to(folder)}": path for path in sorted(folder.rglob("*.py"))}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in files.items() if path.is_file()}


def describe(test_directory: Path, device: str) -> Machine:
    """Return the facts about this machine. All but ``facts`` must be equal on all machines of a run."""
    return Machine(
        torch=devices.torch_version() or "not installed",
        python=platform.python_version(),
        commit=installation.commit() or "",
        suite=digests(test_directory),
        facts=machine.ask(device),
    )


# --- the worker -------------------------------------------------------------------------------------------------------


class Worker:
    """Obeys rank 0's dispatcher. It runs the process of one file at a time."""

    def __init__(self, launch: Launch, root: Path, children: Children) -> None:
        self._launch, self._root, self._children = launch, root, children
        self._environment = {**os.environ, **installation.on_path(os.environ)}
        self._number = 0  # of the file
        self._file: Child | None = None
        self._is_ending = False
        self._status = ExitStatus.BROKEN  # if rank 0 leaves without a message
        handled = (signal.SIGINT, *system.ending_signals())
        for number in handled:  # until rank 0 knows this process, a signal ends it
            signal.signal(number, signal.SIG_DFL)
        self._rank_0, _ = peers.join(launch, ORDERS)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # Closing the children restores SIG_IGN: a launcher ends all processes when it sees the first one leave.
            signal.signal(number, signal.SIG_IGN)
        children.note(handled)
        children.watch(self._rank_0, self._on_message)

    def serve(self) -> ExitStatus:
        """Follow rank 0's orders until it dismisses this worker."""
        while not self._rank_0.closed:
            self._wait()
            while self._children.signals:
                self._rank_0.tell(Signalled(self._children.signals.pop(0)))
        self._end_file()
        while self._file is not None:
            self._wait()
        return self._status

    def _on_message(self) -> bool:
        for order in self._rank_0.arrived():
            match order:
                case Describe():
                    self._prepare(order.variables)
                    self._rank_0.tell(describe(self._root / order.test_directory, order.device))
                case StartFile():
                    self._start(order)
                case EndFile() if self._file is None:
                    self._rank_0.tell(PartOver(order.number))
                case EndFile():
                    self._end_file()
                case peers.Dismiss():
                    self._status = ExitStatus(order.status)
                    self._rank_0.receive()  # until rank 0's process is gone
        return not self._rank_0.closed

    def _prepare(self, variables: Mapping[str, str]) -> None:
        """Start the fork server, with these variables more."""
        self._environment |= variables
        self._children.start_server(["-m", rank_file.__name__, rank_file.SERVE], self._environment, self._root)

    def _start(self, order: StartFile) -> None:
        cwd = self._root / order.test_directory
        self._number, self._is_ending = order.number, False
        program = Program(
            ["-m", rank_file.__name__],
            [str(os.getpid()), str(cwd / f"{order.name}.py"), *order.arguments],
            {**self._environment, **order.environment, **self._launch.variables(order.attempt)},
            cwd,
        )
        self._file = self._children.start(program, self._children.make_directory(), grace=GRACE)

    def _end_file(self) -> None:
        """Give the process a moment to leave. It sees that rank 0 is gone, and ends its rank itself."""
        if self._file is not None and not self._is_ending:
            self._is_ending, self._file.due = True, time.monotonic() + PATIENCE
            self._clean_up()

    def _wait(self) -> None:
        """Wait for messages, and report the end of the file's process."""
        for ended, status in self._children.wait():
            output = system.head_and_tail(ended.output, OUTPUT_SENT)
            self._rank_0.tell(PartEnded(self._number, status, output.strip()))
        self._clean_up()

    def _clean_up(self) -> None:
        """Report what the file's process has left, when that process and rank 0's are both gone."""
        if self._file is not None and self._file.is_gone and self._is_ending:
            file, self._file = self._file, None
            file.kill()
            leaks = self._children.clean_up(file)
            shutil.rmtree(file.directory, ignore_errors=True)
            self._rank_0.tell(PartOver(self._number, file.reached_limit, tuple(leaks)))


def main(launch: Launch, root: Path) -> ExitStatus:
    """Run the worker in the process that the launcher made, and each file's process as a child of it."""
    try:
        with Children("run_test-") as children:
            return Worker(launch, root, children).serve()
    except Exception as error:
        where = f"rank {launch.rank} on {platform.node()}"
        print(f"run_test.py: {where} cannot take part in the run: {error}", file=sys.stderr, flush=True)
        return ExitStatus.BROKEN
