"""The processes of a group on this machine. The rank server starts and ends them."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import selectors
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.processes.leaks import remove_files
from torch_fsdp_tests.processes.messages import Connection
from torch_fsdp_tests.ranks import protocol
from torch_fsdp_tests.ranks.calls import Call
from torch_fsdp_tests.ranks.outcome import TEXT_LIMIT, HarnessError, death_of_server, shorten_stacks
from torch_fsdp_tests.ranks.rank import STACKS_SIGNAL
from torch_fsdp_tests.ranks.server import living_server, preparation, start_method

__unittest = True

_numbers = itertools.count()  # numbers of starts


class _Process:
    """The test process' end of one process: its channel, its crash output, and its output."""

    def __init__(self, channel: socket.socket, crash_output: int, output: Path) -> None:
        self.channel = Connection(channel, protocol.FROM_RANK)
        self.crash_output = crash_output
        self.words = b""
        self.silent = False  # the process and its forks will write no more crash output
        self.output = output
        self.output_start = 0  # bytes of its output that belong to earlier tests

    def read_words(self) -> bool:
        """Read new crash output. Returns whether there was any."""
        before = len(self.words)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.crash_output, 1 << 16):
                self.words += data
            self.silent = True
        return len(self.words) > before


class LocalRanks:
    """A :class:`~torch_fsdp_tests.ranks.group.Transport`: processes on this machine.

    They share a directory, which is made by :meth:`start` and removed by :meth:`collect` with ``close``.
    """

    def __init__(self, file_name: str | None = None) -> None:
        self.selector = selectors.DefaultSelector()
        self._starts: set[int] = set()  # those with a process that is not over
        self._directory = Path(tempfile.gettempdir(), f"torch_fsdp_tests-{secrets.token_urlsafe(6)}")
        self.file_name = file_name or str(self._directory / "rendezvous")
        self._processes: dict[int, _Process] = {}
        self._pids: set[int] = set()

    @property
    def over(self) -> bool:
        """Whether no process exists any more."""
        return not self._starts

    def start(
        self,
        task: protocol.Task,
        processes: Iterable[int],
        environment: Mapping[str, str] | None = None,
        call: Call | None = None,
    ) -> None:
        is_first = not self._processes
        if is_first:
            self._directory.mkdir(mode=0o700)
            (self._directory / "rendezvous").touch()
            self._server = living_server()
        new: dict[int, _Process] = {}
        theirs: list[int] = []
        try:
            for index in processes:
                channel, other = socket.socketpair()
                read, write = os.pipe()
                os.set_blocking(read, False)
                theirs += [other.detach(), write]
                new[index] = self._processes[index] = _Process(channel, read, self._directory / f"output{index}")
            number = next(_numbers)
            self._server.connection.send(
                protocol.Start(
                    start=number,
                    task=task,
                    processes=tuple(new),
                    file_name=self.file_name,
                    directory=str(self._directory),
                    cwd=os.getcwd(),
                    environment=dict(environment_of_ranks() if environment is None else environment),
                    preparation=preparation() if start_method() == "spawn" else None,
                    call=None if call is None else call.text,
                    descriptors=(*theirs, *(() if call is None else call.files)),
                )
            )
        except OSError as error:
            raise HarnessError(self._why_dead()) from error
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._starts.add(number)
        if is_first:
            self.selector.register(self._server.connection, selectors.EVENT_READ)
        for index, process in new.items():
            self.selector.register(process.channel, selectors.EVENT_READ, index)
            self.selector.register(process.crash_output, selectors.EVENT_READ, index)

    def arrived(self) -> list[protocol.Event]:
        """Read the server's messages first: they may report the first death. A rank's own ones precede its death."""
        events: list[protocol.Event] = []
        ready = dict.fromkeys(key.data for key, _ in self.selector.select(0))
        if not self.over:
            events += self._events_of_server()
        for index in self._processes.keys() & ready:
            events += self._events_of(index)
        return events

    def _events_of_server(self) -> Iterable[protocol.Event]:
        for message in self._server.arrived(self._starts):
            if isinstance(message, protocol.Ended):
                yield from self._events_of(message.process)
            elif isinstance(message, protocol.Started):
                self._pids.update(pid for pid in message.pids if pid is not None)
            elif isinstance(message, protocol.Over):
                self._starts.discard(message.start)
            yield message
        if self._server.connection.closed and not self.over:
            start = min(self._starts)
            self._starts.clear()
            yield protocol.Over(start, tuple(self._processes))
            yield protocol.Broken(start, self._why_dead())
        if self.over:
            self._ignore(self._server.connection)

    def _events_of(self, index: int) -> Iterable[protocol.Event]:
        process = self._processes[index]
        if process.read_words():
            yield protocol.WroteStacks(index)
        yield from process.channel.arrived()
        if process.channel.closed:
            self._ignore(process.channel)
        if process.silent:
            self._ignore(process.crash_output)

    def _ignore(self, source: Connection | int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self.selector.unregister(source)

    def send(self, order: protocol.Order, index: int | None = None) -> None:
        if isinstance(order, protocol.AskForStacks):
            for start in self._starts:
                self._server.connection.tell(protocol.Signal(start, STACKS_SIGNAL))
        elif isinstance(order, protocol.EndRanks):
            for start in self._starts:
                self._server.connection.tell(protocol.End(start))
        else:
            for process in self._processes.values() if index is None else [self._processes[index]]:
                if isinstance(order, protocol.RunTest):
                    process.output_start = process.output.stat().st_size if process.output.exists() else 0
                process.channel.tell(order)

    def give_up(self) -> None:
        self._starts.clear()
        self._server.reap_dead()

    def collect(self, close: bool = False) -> protocol.Collected:
        remains = []
        for index, process in self._processes.items():
            process.read_words()
            stacks = shorten_stacks(process.words.decode(errors="backslashreplace"))
            written = process.output.exists()
            output = system.head_and_tail(process.output, TEXT_LIMIT, process.output_start) if written else ""
            remains.append(protocol.Remains(index, stacks, output.strip()))
        leaks = tuple(remove_files(self._directory / "tmp", self._pids))
        if close:
            while self._processes:
                _, process = self._processes.popitem()
                process.channel.close()
                os.close(process.crash_output)
            self.selector.close()
            shutil.rmtree(self._directory, ignore_errors=True)
        return protocol.Collected(tuple(remains), leaks)

    def _why_dead(self) -> str:
        return f"{death_of_server(self._server.reap_dead())}; the next test gets a new one"


def environment_of_ranks() -> dict[str, str]:
    """This process' environment, with the loopback interface for gloo unless another one is set."""
    return {"GLOO_SOCKET_IFNAME": system.loopback_interface(), **accelerator.environment(), **os.environ}
