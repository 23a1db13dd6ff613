"""The process that a launcher made for a rank other than 0, for the whole run.

It imports torch once and connects to rank 0's dispatcher. When the dispatcher says that a test of a file needs this
rank, it forks one process for the file. That process follows the file's process at rank 0
(:mod:`torch_fsdp_tests.ranks.launched`). The agent cleans up after a file and reports how the file ended. It does
not select, plan or print anything.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import os
import platform
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_fsdp_tests import installation
from torch_fsdp_tests.dispatch import child, devices
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.reaper import Reaper
from torch_fsdp_tests.processes import forkserver, host, peers
from torch_fsdp_tests.processes.launcher import Launch

PATIENCE = 3.0  # seconds for a file's process to leave by itself, after that of rank 0 is gone
OUTPUT_TOLD = 1 << 16  # bytes of a process' output that are sent to rank 0; longer output is cut in the middle

# --- messages from rank 0 ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Describe:
    """Describe this installation. ``test_directory`` is relative to the suite's folder if it lies inside it."""

    test_directory: str


@dataclasses.dataclass(frozen=True)
class Compare:
    """List the files of the suite that differ from those of rank 0. ``digests`` are rank 0's, by name."""

    test_directory: str
    digests: dict[str, str]


@dataclasses.dataclass(frozen=True)
class StartFile:
    """Start the process of a test file, with these variables added to the agent's own."""

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


@dataclasses.dataclass(frozen=True)
class Dismiss:
    """The run is over. Leave with this exit status after rank 0's process is gone."""

    status: int


ORDERS = (Describe, Compare, StartFile, EndFile, Dismiss)

# --- messages from an agent -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Machine:
    """The answer to :class:`Describe`."""

    torch: str
    python: str
    commit: str  # empty if git does not know it
    digest: str  # of all files of the suite


@dataclasses.dataclass(frozen=True)
class Differences:
    """The answer to :class:`Compare`: a short description of each file that differs."""

    words: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class FileEnded:
    """The file's process has ended, with this wait status and this output."""

    number: int
    status: int
    output: str


@dataclasses.dataclass(frozen=True)
class FileOver:
    """Nothing is left of the file. ``leaks`` are the commands of killed processes, other than the file's own."""

    number: int
    was_killed: bool = False
    leaks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Signalled:
    """This process has received a signal that asks it to leave."""

    signal: int


ANSWERS = (Machine, Differences, FileEnded, FileOver, Signalled)

# --- for both sides ---------------------------------------------------------------------------------------------------


def digests(test_directory: Path) -> dict[str, str]:
    """Return the digest of each Python file of the suite, by name."""
    found: dict[str, Path] = {}
    for folder, name in ((installation.PACKAGE, "torch_fsdp_tests"), (test_directory, "test")):
        found |= {f"{name}/{path.relative_to(folder)}": path for path in sorted(folder.rglob("*.py"))}
    return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in found.items() if path.is_file()}


def describe(test_directory: Path) -> Machine:
    """Return the facts about this machine that must be equal on all machines of a run."""
    text = repr(sorted(digests(test_directory).items()))
    return Machine(
        torch=devices.torch_version() or "not installed",
        python=platform.python_version(),
        commit=installation.commit() or "",
        digest=hashlib.sha256(text.encode()).hexdigest(),
    )


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    """Describe the files that differ between this machine and the other, in a few words each."""
    missing = [f"{name} is missing" for name in sorted(theirs.keys() - mine.keys())]
    changed = [f"{name} differs" for name in sorted(mine.keys() & theirs.keys()) if mine[name] != theirs[name]]
    return (*missing, *changed, *(f"{name} does not exist at rank 0" for name in sorted(mine.keys() - theirs.keys())))


# --- the agent --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class _File:
    """The file that this agent currently runs."""

    order: StartFile
    directory: Path
    pid: int
    kill_at: float | None = None
    was_killed: bool = False
    status: int | None = None

    @property
    def output(self) -> Path:
        return self.directory / "output"


class Agent:
    """Obeys rank 0's dispatcher. It runs the process of one file at a time."""

    def __init__(self, launch: Launch, root: Path, directory: Path, reaper: Reaper) -> None:
        self._launch, self._root, self._directory, self._reaper = launch, root, directory, reaper
        self._helpers = {reaper.pid, *host.children()}
        self._file: _File | None = None
        self._signals: list[int] = []
        self._wakeup, self._alarm = os.pipe()
        for descriptor in (self._wakeup, self._alarm):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._alarm, warn_on_full_buffer=False)
        self._handlers = {
            number: signal.signal(number, self._note)
            for number in (signal.SIGCHLD, signal.SIGINT, *host.ending_signals())
        }
        self._rank_0, _ = peers.join(launch, ORDERS)

    def _note(self, number: int, frame: Any) -> None:
        if number != signal.SIGCHLD:
            self._signals.append(number)

    def serve(self) -> ExitStatus | Path:
        """Do what rank 0 says until it lets go. In the process of a file, return the file, which must be run."""
        status = ExitStatus.BROKEN  # if rank 0 leaves without a message
        poll = select.poll()
        for descriptor in (self._rank_0.fileno(), self._wakeup):
            poll.register(descriptor, select.POLLIN)
        while not self._rank_0.closed:
            due = None if self._file is None else self._file.kill_at
            poll.poll(None if due is None else max(0.0, due - time.monotonic()) * 1000)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup, 1 << 12)
            while self._signals:
                self._rank_0.tell(Signalled(self._signals.pop(0)))
            self._look_after_file()
            for order in self._rank_0.arrived():
                if isinstance(order, Dismiss):
                    self._rank_0.receive()  # so that the process of rank 0 leaves first, because its report matters
                    status = ExitStatus(order.status)
                    break
                file = self._obey(order)
                if file is not None:
                    return file
        if self._file is not None:
            self._end_file()
            while self._file is not None:
                time.sleep(0.05)
                self._look_after_file()
        return status

    def _obey(self, order: Any) -> Path | None:
        match order:
            case Describe():
                self._rank_0.tell(describe(self._root / order.test_directory))
            case Compare():
                mine = digests(self._root / order.test_directory)
                self._rank_0.tell(Differences(differences(mine, order.digests)))
            case StartFile():
                return self._start(order)
            case EndFile():
                if self._file is None:
                    self._rank_0.tell(FileOver(order.number))
                else:
                    self._end_file()
        return None

    def _start(self, order: StartFile) -> Path | None:
        directory = Path(tempfile.mkdtemp(prefix="job-", dir=self._directory))
        (directory / "tmp").mkdir()
        test_directory = self._root / order.test_directory
        agent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become(order, directory, test_directory)
            host.die_with_parent(agent)
            return test_directory / f"{order.name}.py"
        self._reaper.tell(pid, there=True)
        self._file = _File(order, directory, pid)
        return None

    def _become(self, order: StartFile, directory: Path, cwd: Path) -> None:
        """Make the child equal to a fresh interpreter with this environment and these files."""
        signal.set_wakeup_fd(-1)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._rank_0.close()
        for descriptor in (self._wakeup, self._alarm):
            os.close(descriptor)
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        for descriptor, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(descriptor, target)
        os.close(nothing)
        os.close(output)
        os.chdir(cwd)
        own = {**installation.on_path(os.environ), "TMPDIR": str(directory / "tmp")}
        os.environ.update({**order.environment, **self._launch.variables(order.attempt), **own})
        tempfile.tempdir = None
        sys.argv = [str(cwd / f"{order.name}.py"), *order.arguments]

    def _end_file(self) -> None:
        """Give the process a moment to leave. It notices that rank 0 is gone, and ends its rank itself."""
        assert self._file is not None
        if self._file.kill_at is None:
            self._file.kill_at = time.monotonic() + PATIENCE
        self._look_after_file()

    def _look_after_file(self) -> None:
        file = self._file
        for pid, status in host.ended_children():
            if file is not None and pid == file.pid:
                file.status = status
                output = host.head_and_tail(file.output, OUTPUT_TOLD) if file.output.exists() else ""
                self._rank_0.tell(FileEnded(file.order.number, status, output.strip()))
        if file is None or file.kill_at is None:
            return
        if file.status is None and not file.was_killed:
            if time.monotonic() < file.kill_at:
                return
            file.was_killed = True
            self._ask_for_stacks(file)
            self._kill_group(file)
            file.kill_at = time.monotonic() + PATIENCE
        if file.status is not None:
            self._file = None
            leaks = self._kill_what_is_left(file)
            shutil.rmtree(file.directory, ignore_errors=True)
            self._reaper.tell(file.pid, there=False)
            self._rank_0.tell(FileOver(file.order.number, file.was_killed, leaks))

    @staticmethod
    def _ask_for_stacks(file: _File) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(file.pid, signal.SIGTERM)
        give_up = time.monotonic() + 0.5
        while not host.has_ended(file.pid) and time.monotonic() < give_up:
            time.sleep(0.02)

    @staticmethod
    def _kill_group(file: _File) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(file.pid, signal.SIGKILL)

    def _kill_what_is_left(self, file: _File) -> tuple[str, ...]:
        """Kill the orphans of the file, which this process has adopted. Name them, except torch's helper processes."""
        self._kill_group(file)
        leaks = []
        give_up = time.monotonic() + PATIENCE
        while (lost := set(host.children()) - self._helpers) and time.monotonic() < give_up:
            for pid in lost:
                command = host.command_of(pid)
                leaks += [command] * (not host.is_servant(command) and not host.has_ended(pid))
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, 0)
        return tuple(leaks)


def main(launch: Launch, root: Path) -> ExitStatus:
    """Run the agent in the process that the launcher made, and each file's process as a child of it."""
    host.adopt_orphans()
    directory = Path(tempfile.mkdtemp(prefix="run_test-"))
    reaper = Reaper(directory)
    try:
        forkserver.preload(importlib.import_module("torch_fsdp_tests.installed_torch.torch_facts").PRELOADED)
        outcome = Agent(launch, root, directory, reaper).serve()
    except Exception as error:
        where = f"rank {launch.rank} on {platform.node()}"
        print(f"run_test.py: {where} cannot take part in the run: {error}", file=sys.stderr, flush=True)
        outcome = ExitStatus.BROKEN
    if isinstance(outcome, Path):
        child.follow(outcome)
        return ExitStatus.OK
    reaper.close()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # a launcher ends all processes when it sees the first one leave
    return outcome
