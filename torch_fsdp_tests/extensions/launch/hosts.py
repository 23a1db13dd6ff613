"""The verdict on each host of a launched run: the results of its ranks, where failures began, and what differs.

A failure that began on one host alone is evidence against that host. A failure that began on all of them is evidence
against the test or PyTorch. A test whose ranks are all on one host is no evidence.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from torch_fsdp_tests.device import machine
from torch_fsdp_tests.extension import PageTable
from torch_fsdp_tests.verdict import RankResult, State, TestResult, by_cause, columns, first_few, plural, ranks_in_words


class HostVerdict(str, enum.Enum):
    """Whether a scheduler should use a host again."""

    OK = "ok"
    SUSPECT = "suspect"  # a failure began on it alone
    LOST = "lost"  # a process of it is gone, or it cannot be reached


class HostResult(str, enum.Enum):
    """The worst result of the ranks of one host in a test."""

    PASSED = "passed"
    SILENT = "silent"  # a rank did not report until it was killed
    FAILED = "failed"  # a rank reported a failure
    CRASHED = "crashed"  # a rank died


@dataclasses.dataclass
class Host:
    """One host: its ranks, the facts about it, and what its ranks have done so far."""

    ranks: tuple[int, ...]
    machine: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tests: dict[HostResult, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(HostResult, 0))
    began: int = 0  # failures that began on this host alone
    seconds: float = 0.0  # of CPU time that its ranks have used
    lost: bool = False

    @property
    def verdict(self) -> HostVerdict:
        return HostVerdict.LOST if self.lost else HostVerdict.SUSPECT if self.began else HostVerdict.OK


class Hosts:
    """All hosts of a launched run, by name. Empty for a run without a launcher."""

    def __init__(self, hosts: Mapping[str, Host] | None = None) -> None:
        self._hosts = dict(hosts or {})
        self._of_rank = {rank: name for name, host in self._hosts.items() for rank in host.ranks}

    def take(self, test: TestResult) -> None:
        """Count the result of a test with ranks."""
        size = test.facts.get("world_size") or 0
        if not self._hosts or not test.outcome.is_executed:
            return
        for number, spent in enumerate(test.facts.get("rank_cpu") or ()):
            if number in self._of_rank:
                self._hosts[self._of_rank[number]].seconds += spent
        did = {self._of_rank[rank]: HostResult.PASSED for rank in range(size) if rank in self._of_rank}
        began = set()
        first = next(iter(by_cause(test.ranks)), None)
        for rank in test.ranks:
            if (name := self._of_rank.get(rank.rank)) is None:
                continue
            did[name] = max(did.get(name, HostResult.PASSED), _result_of(rank), key=list(HostResult).index)
            if first is not None and _went_wrong_by_itself(rank, first):
                began.add(name)
        for name, worst in did.items():
            self._hosts[name].tests[worst] += 1
        if test.outcome.is_bad and len(began) == 1 and len(did) > 1:
            self._hosts[began.pop()].began += 1

    def lose(self, name: str) -> None:
        if name in self._hosts:
            self._hosts[name].lost = True

    def has_suspect(self) -> bool:
        return any(host.verdict is HostVerdict.SUSPECT for host in self._hosts.values())

    def to_json(self) -> dict[str, dict[str, Any]]:
        total = sum(host.seconds for host in self._hosts.values())
        return {
            name: {
                "ranks": list(host.ranks),
                "verdict": host.verdict.value,
                **{did.value: count for did, count in host.tests.items()},
                "began": host.began,
                "share": round(host.seconds / total, 3) if total else None,
                "machine": dict(host.machine),
            }
            for name, host in self._hosts.items()
        }


def _result_of(rank: RankResult) -> HostResult:
    if rank.state in (State.PASSED, State.SKIPPED):
        return HostResult.PASSED
    if rank.is_silent:
        return HostResult.SILENT
    return HostResult.CRASHED if rank.state is State.CRASHED else HostResult.FAILED


def _went_wrong_by_itself(rank: RankResult, first: RankResult) -> bool:
    """Whether the rank failed by itself: it did not only wait for the ``first`` one, or report that this was gone."""
    if rank.state is State.STILL_RUNNING:
        return False
    follows = rank.follows or (rank.may_follow and rank.in_one_line() != first.in_one_line())
    return rank.state.is_bad and not follows


def rows(hosts: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A table of the hosts, the titles first. The hosts are as in ``report.json``."""
    titles = ("host", "ranks", *(did.value for did in HostResult), "began here", "time", "verdict")
    made = [titles]
    for name, host in hosts.items():
        share = "" if host["share"] is None else f"{host['share']:.0%}"
        ranks = ranks_in_words(host["ranks"]).partition(" ")[2]
        counts = (str(host[did.value]) for did in HostResult)
        made.append((name, ranks, *counts, str(host["began"]), share, host["verdict"]))
    return made


def lines(hosts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The table as text, what differs between the hosts, and the suspect and lost ones. Empty for a single host."""
    if len(hosts) < 2:
        return []
    shown = [*columns(rows(hosts)), *differences(hosts)]
    return ["hosts:", *(f"  {words}" for words in shown), *conclusions(hosts)]


def table(data: Mapping[str, Any]) -> PageTable:
    """What a page shows of a ``report.json``."""
    hosts = data["hosts"]
    titles, *shown = rows(hosts)
    about = (
        "The tests with ranks on each host, by what its ranks did. A failure began on a host if only its ranks went "
        "wrong by themselves. Time is the share of the CPU time of all ranks."
    )
    lost = [data["lost"]] if data["lost"] else []
    return PageTable("Hosts", about, titles, shown, [*lost, *conclusions(hosts), *differences(hosts)])


def differences(hosts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each fact in which the hosts differ."""
    facts = machine.differing({name: host["machine"] for name, host in hosts.items()})
    return [f"{title}: {', '.join(_by_text(texts))}" for title, texts in facts.items()]


def _by_text(texts: Mapping[str, str]) -> Iterable[str]:
    names: dict[str, list[str]] = {}
    for name, text in texts.items():
        names.setdefault(text, []).append(name)
    return (f"{text} on {first_few(its, 3)}" for text, its in names.items())


def conclusions(hosts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A sentence for each suspect or lost host."""
    sentences = []
    for name, host in hosts.items():
        if host["verdict"] == HostVerdict.SUSPECT:
            failures = plural(host["began"], "failure")
            sentences.append(f"{name} is suspect: {failures} began there, and none on the other hosts")
        elif host["verdict"] == HostVerdict.LOST:
            sentences.append(f"{name} is lost: a process on it is gone, or it cannot be reached")
    return sentences
