"""The dispatcher's side of a run under a launcher: its workers, which are the processes of all other ranks.

If a launcher starts ``run_test.py``, the process of rank 0 is the dispatcher. The processes of the other ranks are
workers (:mod:`.worker`). Files run one after the other. A worker starts its part of a file
when one of the file's tests first needs the worker's rank, so unused ranks cost nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import selectors
import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch_fsdp_tests.device.machine import LIMIT
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.other_ranks import OtherRanks
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.extensions.launch import worker
from torch_fsdp_tests.extensions.launch.hosts import Host, Hosts
from torch_fsdp_tests.extensions.launch.launcher import Launch
from torch_fsdp_tests.extensions.launch.peers import GATHER_LIMIT, Peer, Peers
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.processes.children import Children
from torch_fsdp_tests.processes.messages import Connection, MessageError
from torch_fsdp_tests.settings import ConfigurationError
from torch_fsdp_tests.verdict import death, first_few, ranks_in_words

END_LIMIT = 20.0  # seconds for a worker to end its part of a file
END_DELAY = 6.0  # seconds by which rank 0's part may be seen to end later than parts that end because of it
ANSWER_LIMIT = 60.0  # seconds for a worker to describe its machine
assert worker.PATIENCE < END_LIMIT and LIMIT < ANSWER_LIMIT


@dataclasses.dataclass
class _Part:
    """What is known about one rank's part of the running file."""

    ended: worker.PartEnded | None = None
    ended_at: float = 0.0  # when that was seen
    over: worker.PartOver | None = None


class LaunchFailure(ConfigurationError):
    """The processes of the launch cannot run the suite together. The message says why, in sentences."""


def reach(launch: Launch) -> Workers:
    """The processes of all other ranks. Raises :class:`LaunchFailure`."""
    try:
        return Workers(launch)
    except (OSError, RuntimeError) as error:
        raise LaunchFailure(f"the other processes of the launch cannot be reached: {error}") from error


class Workers(OtherRanks):
    """The processes of all other ranks, in order of rank."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.world_size = launch, launch.world_size
        self.signals: list[int] = []
        self.lost_host = ""  # of the first process that is gone
        self._peers = Peers(launch, worker.ANSWERS)
        self._give_up = time.monotonic() + GATHER_LIMIT
        self._number = 0  # of the running file
        self._order: worker.StartFile | None = None
        self._parts: dict[int, _Part] = {}
        self._gone: set[int] = set()  # the ranks of workers that are gone
        self._end_by: float | None = None  # when all parts must be over
        self._ended_at = 0.0  # when rank 0's part was over
        self._machines: dict[int, dict[str, Any]] = {}  # the facts about each rank's machine

    # --- before the first file ---

    def gather(self, run: RunTests, device: str) -> None:
        self.wait_for_all()
        self._compare(run, device)

    def wait_for_all(self) -> None:
        """Wait for all workers. Raises :class:`LaunchFailure`."""
        absent = self._peers.gather(range(1, self.launch.world_size), self._give_up)
        if absent:
            raise LaunchFailure(f"{ranks_in_words(absent)} of the launch did not connect within {GATHER_LIMIT:g} s")

    def hosts(self) -> Hosts:
        """The hosts, after all workers have connected."""
        ranks_of: dict[str, list[int]] = {socket.gethostname(): [0]}
        for rank, peer in sorted(self._peers.of_rank.items()):
            ranks_of.setdefault(peer.hello.host, []).append(rank)
        return Hosts({name: Host(tuple(ranks), self._machines[ranks[0]]) for name, ranks in ranks_of.items()})

    def watch(self, children: Children) -> None:
        for rank, peer in self._peers.of_rank.items():
            children.watch(peer.connection, functools.partial(self.on_message, rank))

    def _compare(self, run: RunTests, device: str) -> None:
        """Raises :class:`LaunchFailure` if a machine differs from this one in what a run needs."""
        root, test_directory = run.selection.default_directory.parent, run.selection.test_directory
        own = worker.describe(test_directory, device)
        machines = self._ask(worker.Describe(_relative(root, test_directory), device, run.variables(os.environ)))
        self._machines = {rank: machine.facts for rank, machine in {0: own, **machines}.items()}
        differing: dict[str, list[int]] = {}
        for rank, machine in machines.items():
            name = self._peers.of_rank[rank].hello.host
            for what, here, there in (
                ("torch", own.torch, machine.torch),
                ("Python", own.python, machine.python),
                ("the commit", own.commit, machine.commit),
            ):
                if here and there and here != there:
                    words = f"{what} {there} on {name}, and {what} {here} at rank 0 on {socket.gethostname()}"
                    differing.setdefault(words, []).append(rank)
            if files := _differences(machine.suite, own.suite):
                differing.setdefault(f"the suite on {name}: {first_few(files)}", []).append(rank)
        if differing:
            sentences = (f"\n  {ranks_in_words(ranks)}: {words}" for words, ranks in differing.items())
            raise LaunchFailure(f"the machines of the launch differ:{''.join(sentences)}")

    def _ask(self, question: worker.Describe) -> dict[int, worker.Machine]:
        """The answers of all workers, in order of rank."""
        for peer in self._peers.of_rank.values():
            peer.connection.tell(question)
        give_up = time.monotonic() + ANSWER_LIMIT
        answers: dict[int, worker.Machine] = {}
        for rank, peer in sorted(self._peers.of_rank.items()):
            answer = _receive(peer.connection, give_up)
            if answer is None:
                raise LaunchFailure(f"{peer} is gone, or did not answer within {ANSWER_LIMIT:g} s")
            if isinstance(answer, worker.Signalled):
                raise SystemExit(128 + answer.signal)
            answers[rank] = answer
        return answers

    # --- while files run ---

    def begin(self, run: RunTests, name: str, variables: Mapping[str, str]) -> dict[str, str]:
        self._number += 1
        attempt = f"{self.launch.attempt}.{self._number}"
        self._parts, self._end_by = {}, None
        folder = _relative(run.selection.default_directory.parent, run.selection.test_directory)
        self._order = worker.StartFile(self._number, folder, name, run.execution.arguments, attempt, dict(variables))
        return self.launch.variables(attempt)

    def call(self, ranks: Collection[int]) -> None:
        for rank in sorted(set(ranks) - self._parts.keys() - self._gone):
            self._parts[rank] = _Part()
            self._peers.of_rank[rank].connection.tell(self._order)

    def end(self) -> None:
        self._ended_at = time.monotonic()
        self._end_by = self._ended_at + END_LIMIT
        for rank in self._parts.keys() - self._gone:
            self._peers.of_rank[rank].connection.tell(worker.EndFile(self._number))

    @property
    def busy(self) -> list[int]:
        return sorted(rank for rank, part in self._parts.items() if part.over is None and rank not in self._gone)

    def on_message(self, rank: int) -> bool:
        """Process the messages of a worker. Returns False if the worker is gone."""
        peer = self._peers.of_rank[rank]
        try:
            for message in peer.connection.arrived():
                match message:
                    case worker.Signalled():
                        self.signals.append(message.signal)
                    case worker.PartEnded(number=self._number) if rank in self._parts:
                        self._parts[rank] = _Part(message, time.monotonic())
                    case worker.PartOver(number=self._number) if rank in self._parts:
                        self._parts[rank].over = message
        except MessageError as error:
            self._lose(peer, f"sent an invalid message: {error}")
        if peer.connection.closed:
            self._lose(peer, "is gone")
        return rank not in self._gone

    def _lose(self, peer: Peer, how: str) -> None:
        self._gone.add(peer.hello.rank)
        if self.lost is None:
            self.lost, self.lost_process = f"{peer} {how}, so the run ends", str(peer)
            self.lost_host = peer.hello.host

    def due(self) -> float:
        early = [part.ended_at + END_DELAY for part in self._parts.values() if part.ended is not None]
        if self._end_by is None:
            return min(early, default=math.inf)
        return self._end_by if self.busy else math.inf

    def check_time(self) -> str | None:
        """Describe a process that left the file long before that of rank 0. Also records lost workers."""
        now = time.monotonic()
        if self._end_by is not None:
            for rank in self.busy if now >= self._end_by else ():
                self._lose(self._peers.of_rank[rank], f"did not finish its part of the file within {END_LIMIT:g} s")
            return None
        for rank, part in sorted(self._parts.items()):
            if part.ended is not None and now >= part.ended_at + END_DELAY:
                return f"the file's process {self._where(rank)}, which {death(system.how_ended(part.ended.status))}"
        return None

    def _where(self, rank: int) -> str:
        return f"at rank {rank} on {self._peers.of_rank[rank].hello.host}"

    def report(self) -> tuple[list[str], str]:
        notes, output = [], []
        for rank, part in sorted(self._parts.items()):
            over, where = part.over or worker.PartOver(self._number), self._where(rank)
            notes += [f"the process {each} was left running {where}, and was killed" for each in over.leaks]
            if part.ended is None:
                continue
            early = part.ended_at + END_DELAY < self._ended_at
            if over.was_killed:
                notes.append(f"the file's process {where} did not exit within {worker.PATIENCE:g} s, and was killed")
            elif early or os.WIFSIGNALED(part.ended.status):
                notes.append(f"the file's process {where} ended early: it {death(system.how_ended(part.ended.status))}")
            else:
                continue
            output.append(f"--- the file's process {where} printed ---\n{part.ended.output}")
        return notes, "\n".join(output)

    # --- at the end ---

    def dismiss(self, status: ExitStatus) -> None:
        """Waits for workers that have not connected yet, unless the signal that stopped the run ends them as well."""
        if not status.is_from_signal:
            self._peers.gather(range(1, self.launch.world_size), self._give_up)
        self._peers.dismiss(status)


def _receive(connection: Connection, give_up: float) -> Any | None:
    """Return the next message, or None if the connection ends or no message comes in time."""
    with selectors.DefaultSelector() as selector:  # select.select() rejects descriptors above 1023
        selector.register(connection, selectors.EVENT_READ)
        while (left := give_up - time.monotonic()) > 0:
            for message in connection.arrived():
                return message
            if connection.closed:
                return None
            selector.select(left)
    return None


def _differences(theirs: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
    """Describe the files that differ between another machine and this one, in a few words each."""
    missing = [f"{name} is missing" for name in sorted(own.keys() - theirs.keys())]
    changed = [f"{name} differs" for name in sorted(own.keys() & theirs.keys()) if own[name] != theirs[name]]
    return [*missing, *changed, *(f"{name} does not exist at rank 0" for name in sorted(theirs.keys() - own.keys()))]


def _relative(root: Path, test_directory: Path) -> str:
    inside = test_directory.is_relative_to(root)
    return str(test_directory.relative_to(root) if inside else test_directory)
