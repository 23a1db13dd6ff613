"""The dispatcher's side of a run under a launcher: the processes of all other ranks, its agents.

Where a launcher starts ``run_test.py``, the process of rank 0 is the dispatcher, as it would be alone, and those of the
other ranks are agents (:mod:`torch_fsdp_tests.dispatch.agent`). Files run one after the other. An agent starts its part
of a file when a test of it first wants the agent's rank, so ranks that no test wants cost nothing.
"""

from __future__ import annotations

import dataclasses
import os
import select
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests import host
from torch_fsdp_tests.dispatch import agent
from torch_fsdp_tests.launcher import Launch
from torch_fsdp_tests.messages import Connection, MessageError
from torch_fsdp_tests.peers import GATHER_LIMIT, Peer, Peers
from torch_fsdp_tests.verdict import ranks_in_words

END_LIMIT = 20.0  # seconds for an agent to end its part of a file
DEATH_NEWS = 2.0  # seconds that the end of rank 0's part of a file may become known after the ends that it caused
ANSWER_LIMIT = 60.0  # seconds for an agent to describe its machine
FEW = 5  # differences that are named
assert agent.PATIENCE < END_LIMIT


class LaunchFailure(RuntimeError):
    """The processes of the launch cannot run the suite together. The message says why, in sentences."""


@dataclasses.dataclass
class _Part:
    """What is known of one rank's part of the file that runs."""

    ended: agent.FileEnded | None = None
    ended_at: float = 0.0  # moment at which that became known


class Agents:
    """All other ranks' processes, in order of rank."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self.lost: str | None = None  # what became of the first process that was found gone, in a sentence
        self.lost_process = ""  # which one that was
        self.signals: list[int] = []  # that agents have been sent
        self._peers = Peers(launch, agent.ANSWERS)
        self._give_up = time.monotonic() + GATHER_LIMIT
        self._number = 0  # of the file that runs
        self._order: agent.StartFile | None = None
        self._parts: dict[int, _Part] = {}
        self._over: dict[int, agent.FileOver] = {}
        self._gone: set[int] = set()  # ranks
        self._end_by: float | None = None  # moment by which all parts must be over
        self._ended_at = 0.0  # moment at which rank 0's part was
        self._answers: dict[int, Any] = {}

    # --- before the first file ---

    def gather(self) -> None:
        """Wait for all. Raises :class:`LaunchFailure`."""
        absent = self._peers.gather(range(1, self.launch.world_size), self._give_up)
        if absent:
            raise LaunchFailure(f"{ranks_in_words(absent)} of the launch did not come within {GATHER_LIMIT:g} s")

    def hosts(self) -> dict[str, str]:
        """The hosts by name, each with its ranks in words."""
        found: dict[str, list[int]] = {socket.gethostname(): [0]}
        for rank, peer in sorted(self._peers.of_rank.items()):
            found.setdefault(peer.hello.host, []).append(rank)
        return {name: ranks_in_words(ranks) for name, ranks in found.items()}

    def check(self, root: Path, test_directory: Path) -> None:
        """Raises :class:`LaunchFailure` where a machine does not have what this one has."""
        relative = _relative(root, test_directory)
        mine = agent.describe(test_directory)
        answers = self._ask(agent.Describe(relative), sorted(self._peers.of_rank))
        differing: dict[tuple[str, str], list[int]] = {}
        suites: dict[tuple[str, str], list[int]] = {}
        for rank, machine in sorted(answers.items()):
            name = self._peers.of_rank[rank].hello.host
            for what, here, there in (
                ("torch", mine.torch, machine.torch),
                ("Python", mine.python, machine.python),
                ("the commit", mine.commit, machine.commit),
            ):
                if here and there and here != there:
                    words = f"{what} {there} on {name}, and {what} {here} at rank 0 on {socket.gethostname()}"
                    differing.setdefault((name, words), []).append(rank)
            if machine.digest != mine.digest:
                suites.setdefault((name, machine.digest), []).append(rank)
        sentences = [f"{ranks_in_words(ranks)}: {words}" for (_, words), ranks in differing.items()]
        if suites:
            compare = agent.Compare(relative, agent.digests(test_directory))
            told = self._ask(compare, [ranks[0] for ranks in suites.values()])
            for (name, _), ranks in suites.items():
                words = told[ranks[0]].words
                more = f" and {len(words) - FEW} more" if len(words) > FEW else ""
                sentences.append(f"{ranks_in_words(ranks)}: the suite on {name}: {', '.join(words[:FEW])}{more}")
        if sentences:
            raise LaunchFailure("the machines of the launch differ:\n  " + "\n  ".join(sentences))

    def _ask(self, question: Any, ranks: Sequence[int]) -> dict[int, Any]:
        for rank in ranks:
            self._peers.of_rank[rank].connection.tell(question)
        give_up = time.monotonic() + ANSWER_LIMIT
        answers: dict[int, Any] = {}
        for rank in ranks:
            peer = self._peers.of_rank[rank]
            answer: Any = None
            while not isinstance(answer, (agent.Machine, agent.Differences)):
                answer = _receive(peer.connection, give_up)
                if answer is None:
                    raise LaunchFailure(f"{peer} is gone, or did not answer within {ANSWER_LIMIT:g} s")
                if isinstance(answer, agent.Signalled):
                    raise KeyboardInterrupt
            answers[rank] = answer
        return answers

    # --- while files run ---

    @property
    def ranks(self) -> list[int]:
        """All but 0."""
        return sorted(self._peers.of_rank)

    def connection(self, rank: int) -> Connection:
        """For a selector: when something may have arrived there, call :meth:`hear`."""
        return self._peers.of_rank[rank].connection

    def begin_file(
        self, root: Path, test_directory: Path, name: str, arguments: tuple[str, ...], wishes: Mapping[str, str]
    ) -> dict[str, str]:
        """Another file begins. Returns the variables by which its process at rank 0 knows the launch."""
        self._number += 1
        attempt = f"{self.launch.attempt}.{self._number}"
        self._parts, self._over, self._end_by = {}, {}, None
        self._order = agent.StartFile(
            self._number, _relative(root, test_directory), name, arguments, attempt, dict(wishes)
        )
        return self.launch.variables(attempt)

    def call(self, ranks: Collection[int]) -> None:
        """Have the file's process started at these ranks, where that has not been done."""
        for rank in sorted(set(ranks) - self._parts.keys() - self._gone):
            self._parts[rank] = _Part()
            self._peers.of_rank[rank].connection.tell(self._order)

    def end_file(self) -> None:
        """Rank 0's part is over: have the others ended."""
        self._ended_at = time.monotonic()
        self._end_by = self._ended_at + END_LIMIT
        for rank in self._parts.keys() - self._gone:
            self._peers.of_rank[rank].connection.tell(agent.EndFile(self._number))

    @property
    def busy(self) -> list[int]:
        """The ranks that have a part of the file, also one that has ended."""
        return sorted(self._parts.keys() - self._over.keys() - self._gone)

    def hear(self, rank: int) -> bool:
        """Take in what an agent has said; False once it is gone."""
        peer = self._peers.of_rank[rank]
        try:
            for message in peer.connection.arrived():
                match message:
                    case agent.Signalled():
                        self.signals.append(message.signal)
                    case agent.FileEnded(number=self._number) if rank in self._parts:
                        self._parts[rank] = _Part(message, time.monotonic())
                    case agent.FileOver(number=self._number):
                        self._over[rank] = message
        except MessageError as error:
            self._lose(peer, f"said something that it should not: {error}")
        if peer.connection.closed:
            self._lose(peer, "is gone")
        return rank not in self._gone

    def _lose(self, peer: Peer, how: str) -> None:
        self._gone.add(peer.hello.rank)
        if self.lost is None:
            self.lost, self.lost_process = f"{peer} {how}, so the run ends", str(peer)

    def due(self) -> float | None:
        """The moment at which :meth:`check_time` has something to do."""
        early = [part.ended_at + DEATH_NEWS for part in self._parts.values() if part.ended is not None]
        if self._end_by is None:
            return min(early, default=None)
        return self._end_by if self.busy else None

    def check_time(self) -> str | None:
        """What ends the file, in words, when another rank's process of it left by itself; lost agents are noted."""
        now = time.monotonic()
        if self._end_by is not None:
            for rank in self.busy if now >= self._end_by else ():
                self._lose(self._peers.of_rank[rank], f"did not end its part of the file within {END_LIMIT:g} s")
            return None
        for rank, part in sorted(self._parts.items()):
            if part.ended is not None and now >= part.ended_at + DEATH_NEWS:
                return f"the file's process at rank {rank} ({self._in_words(rank, part.ended)})"
        return None

    def _in_words(self, rank: int, ended: agent.FileEnded) -> str:
        code = os.waitstatus_to_exitcode(ended.status)
        how = f"exit status {code}" if code >= 0 else host.signal_name(-code)
        return f"{how}, on {self._peers.of_rank[rank].hello.host}"

    def told(self) -> tuple[list[str], str]:
        """After a file: what went wrong in its other parts, in sentences, and what those printed."""
        notes, output = [], []
        for rank, part in sorted(self._parts.items()):
            over = self._over.get(rank)
            name = self._peers.of_rank[rank].hello.host
            leaks = () if over is None else over.leaks
            notes += [f"at rank {rank} on {name} the process {each} was left running and was ended" for each in leaks]
            if part.ended is None:
                continue
            early = part.ended_at + DEATH_NEWS < self._ended_at
            killed = over is not None and over.was_killed
            if killed:
                limit = f"{agent.PATIENCE:g} s"
                notes.append(f"the file's process at rank {rank} on {name} did not leave within {limit} and was killed")
            elif early or os.WIFSIGNALED(part.ended.status):
                notes.append(f"the file's process at rank {rank} left early: {self._in_words(rank, part.ended)}")
            else:
                continue
            output.append(f"--- the file's process at rank {rank} on {name} printed ---\n{part.ended.output}")
        return notes, "\n".join(output)

    # --- at the end ---

    def dismiss(self, status: int) -> None:
        """Let all leave with this status, after this process; those that have not come yet are waited for."""
        self._peers.gather(range(1, self.launch.world_size), self._give_up)
        self._peers.outlive()
        for peer in self._peers.of_rank.values():
            peer.connection.tell(agent.Dismiss(status))


def _receive(connection: Connection, give_up: float) -> Any | None:
    """The next message; None where the connection ends, or none comes in time."""
    while (left := give_up - time.monotonic()) > 0:
        for message in connection.arrived():
            return message
        if connection.closed:
            return None
        select.select([connection], [], [], left)
    return None


def _relative(root: Path, test_directory: Path) -> str:
    inside = test_directory.is_relative_to(root)
    return str(test_directory.relative_to(root) if inside else test_directory)
