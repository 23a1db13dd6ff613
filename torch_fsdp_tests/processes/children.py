"""The children of a program, in one thread: starts them, waits for their ends, and ends them.

Each child leads a process group. On Linux, what a child leaves running becomes a child of this process, and is reported
and killed. If this process is killed, its :mod:`reaper <torch_fsdp_tests.processes.reaper>` ends what is left.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from torch_fsdp_tests.processes import system
from torch_fsdp_tests.processes.forkserver import start_fresh
from torch_fsdp_tests.processes.leaks import end_leftovers
from torch_fsdp_tests.processes.program_server import Program, ProgramServer
from torch_fsdp_tests.processes.reaper import Reaper
from torch_fsdp_tests.processes.wakeup import Wakeup

TICK = 0.02  # seconds between two checks whether the fork server is ready
LONGEST_SLEEP = 3600.0  # seconds


class Child:
    """A child and its directory. At its time limit it is asked to end; ``grace`` seconds later its group is killed."""

    def __init__(self, pid: int, directory: Path, limit: float, grace: float) -> None:
        self.pid, self.directory, self.grace = pid, directory, grace
        self.due = limit  # the time, as of time.monotonic(), at which it is asked to end, or is killed
        self.reached_limit = False
        self.is_gone = False
        self.used: system.Used | None = None  # known when it is gone
        self._asked_to_end = False

    @property
    def output(self) -> Path:
        return self.directory / "output"

    def ask_to_end(self) -> bool:
        """Send SIGTERM. Returns False if it has been sent before, or the child is gone."""
        if self._asked_to_end or self.is_gone:
            return False
        self._asked_to_end, self.due = True, time.monotonic() + self.grace
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        return True

    def kill(self) -> None:
        """Kill its process group at once."""
        system.kill_group(self.pid)

    def check(self) -> None:
        """At the time limit ask it to end, and after its grace period kill its group."""
        if time.monotonic() < self.due:
            return
        if self._asked_to_end:
            self.kill()
            self.due = math.inf
        else:
            self.reached_limit = self.ask_to_end()


class Children:
    """The children of this process. They share a directory, which :meth:`close` removes."""

    def __init__(self, prefix: str, signals: Iterable[int] = ()) -> None:
        """``signals`` are noted in ``self.signals``, and end :meth:`wait`. :meth:`note` adds more."""
        self.directory = Path(tempfile.mkdtemp(prefix=prefix))
        self._others = set(system.children())  # children of the program that ran in this process before
        self._reaper = Reaper(self.directory)
        self._others.add(self._reaper.pid)
        self.adopts = system.adopt_orphans()
        self._server: ProgramServer | None = None
        self._there: dict[int, Child] = {}
        self._wakeup = Wakeup(signals)
        self.signals, self.note = self._wakeup.signals, self._wakeup.note
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wakeup, selectors.EVENT_READ, lambda: True)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def make_directory(self) -> Path:
        """Make a directory for a child, with a ``tmp`` inside for its temporary files."""
        directory = Path(tempfile.mkdtemp(prefix="job-", dir=self.directory))
        (directory / "tmp").mkdir()
        return directory

    def start(self, program: Program, directory: Path, limit: float = math.inf, grace: float = 0.0) -> Child:
        """Start a program: as a fork of the fork server if that is ready, or else as a fresh interpreter.

        Its output goes to the file ``output`` of its directory. Raises ``OSError`` or ``SubprocessError`` if it cannot
        be started.
        """
        program = program.with_variables(TMPDIR=str(directory / "tmp"))
        pid = None
        with open(directory / "output", "ab") as output:
            if self._server is not None and self._server.ready:
                pid = self._server.fork(program, (output.fileno(), output.fileno()))
            if pid is None:
                kept = program.kept
                pid = start_fresh(
                    [*program.interpreter, *program.arguments],
                    list(kept.values()),
                    {**program.environment, **{name: str(descriptor) for name, descriptor in kept.items()}},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    cwd=program.cwd,
                    start_new_session=True,
                )
        return self._take(Child(pid, directory, limit, grace))

    def _take(self, child: Child) -> Child:
        self._reaper.tell(child.pid, there=True)
        self._there[child.pid] = child
        return child

    def run(self, command: Sequence[str], output: IO[str]) -> int:
        """Run a command to its end, while there is no other child. Returns its exit code, negative for a signal.

        It gets the signals that this process gets, and decides itself how to end.
        """
        process = subprocess.Popen(command, stdout=output, start_new_session=True)
        child = self._take(Child(process.pid, self.directory, math.inf, 0.0))
        handed_on = 0
        while not child.is_gone:
            for number in self.signals[handed_on:]:
                os.kill(child.pid, number)
            handed_on = len(self.signals)
            for _, status in self.wait():
                process.returncode = os.waitstatus_to_exitcode(status)
        self.clean_up(child)
        return int(process.returncode)

    # --- the fork server ---

    @property
    def has_server(self) -> bool:
        return self._server is not None

    @property
    def remarks(self) -> list[str]:
        """Return sentences about what the fork server could not import."""
        return [] if self._server is None else self._server.remarks

    def start_server(self, program: Sequence[str], environment: Mapping[str, str], cwd: Path) -> None:
        """Start this program as the fork server (:func:`.program_server.serve`), which then forks children."""
        self._server = ProgramServer(program, environment, cwd, self.directory)
        self._others.add(self._server.pid)

    def end_server(self) -> None:
        """End the fork server. Another one can be started then."""
        if self._server is None:
            return
        self._server.close()
        if not system.has_ended(self._server.pid):  # while it imports, it does not see that the connection is closed
            system.kill_group(self._server.pid)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._server.pid, 0)
        self._server = None

    def wait_for_server(self) -> None:
        """Wait until the server can fork or is gone, or a signal comes."""
        while self._server is not None and not self._server.ready and not system.has_ended(self._server.pid):
            if self.signals:
                return
            self._sleep(TICK)

    # --- news ---

    def watch(self, source: Any, on_readable: Callable[[], bool]) -> None:
        """Call ``on_readable`` in :meth:`wait` when ``source`` can be read. It returns False if no more will come."""
        self._selector.register(source, selectors.EVENT_READ, on_readable)

    def ignore(self, source: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(source)

    def wait(self, until: float = math.inf) -> list[tuple[Child, int]]:
        """Sleep until there is news or until a time of ``time.monotonic()``, and do what is due.

        Returns the children that have ended, with their wait statuses.
        """
        self._sleep(min([until, *(child.due for child in self._there.values())]) - time.monotonic())
        ended = []
        for pid, status, used in system.ended_children():
            if (child := self._there.pop(pid, None)) is not None:
                child.is_gone, child.used = True, used
                ended.append((child, status))
        for child in self._there.values():
            child.check()
        return ended

    def _sleep(self, seconds: float) -> None:
        for key, _ in self._selector.select(min(max(0.0, seconds), LONGEST_SLEEP)):
            if not key.data():
                self.ignore(key.fileobj)
        self._wakeup.clear()

    # --- ends ---

    def clean_up(self, child: Child) -> list[str]:
        """Kill what a child that has ended left running, also outside of its group. Returns the command lines."""
        leftovers = end_leftovers(self._there.keys() | self._others, child.directory)
        child.kill()
        self._reaper.tell(child.pid, there=False)
        return leftovers

    def end_all(self) -> None:
        """Kill everything that still runs, except the fork server."""
        while self._there:
            pid, child = self._there.popitem()
            child.kill()
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        end_leftovers(self._others)

    def close(self) -> None:
        """End everything, and remove the directory."""
        self.end_all()
        self.end_server()
        self._reaper.close()
        self._selector.close()
        self._wakeup.close()
        shutil.rmtree(self.directory, ignore_errors=True)  # if the reaper was killed
