"""The result of one rank of a test, from its own report to the pages, and the words for it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from torch_fsdp_tests.verdict.states import Phase, SkipKind, State
from torch_fsdp_tests.verdict.words import death, ranks_in_words


@dataclasses.dataclass(frozen=True)
class DefectBlock:
    """A block of a test that must show a known defect of torch, and what happened in it. It may be a whole test."""

    defect: dict[str, Any]  # what a report says about the defect
    place: str = ""  # the line of the block and the parameters of its subtest; empty for a whole test
    raised: str = ""  # the exception that showed the defect; empty if the block passed


def joined(ranks: Iterable[Sequence[DefectBlock]]) -> list[DefectBlock]:
    """The blocks of all ranks as those of one test. A block shows its defect if it does so on at least one rank.

    A rank that enters a block several times in one place has several blocks, which are matched by their order.
    """
    by_place: dict[tuple[str, str, int], DefectBlock] = {}
    for blocks in ranks:
        turns: collections.Counter[tuple[str, str]] = collections.Counter()
        for block in blocks:
            name = block.defect["id"], block.place
            turns[name] += 1
            key = (*name, turns[name])
            if key not in by_place or not by_place[key].raised:
                by_place[key] = block
    return list(by_place.values())


@dataclasses.dataclass(frozen=True)
class Subtest:
    """A subtest that ended in a rank without a failure."""

    words: str  # its message and parameters
    skipped: str | None = None  # the reason, if it skipped
    of_rank: bool = False  # other ranks need not have it

    @property
    def has_run(self) -> bool:
        return self.skipped is None


_OF_ITS_TEST = ("subtests", "kinds", "defect_blocks", "cpu")  # fields that no report has


@dataclasses.dataclass(frozen=True)
class RankResult:
    """The result of one rank of a test.

    The rank makes it (:meth:`report`), its group adds what became of the process, and the judge decides ``state``,
    ``phase``, ``limit``, ``expected_code`` and ``follows``. Before that, ``state`` is what the rank has reported.
    """

    rank: int
    state: State = State.CRASHED  # of a rank that reports nothing, until it is judged
    phase: Phase | None = None  # of what it raised
    reported: str = ""  # the outcome that the rank reported; empty if it reported none
    exception: str = ""  # type of what it raised
    message: str = ""  # the first line of the exception's message, or the reason of a skip
    text: str = ""  # the traceback, or the stacks of a rank that died or was killed
    output: str = ""
    seconds: float = 0.0  # the time of its test, as it reported
    at: float = 0.0  # the second of the test at which its outcome or its end became known
    exit_code: int | None = None
    signal: str | None = None  # name of the signal that ended it, unless the harness sent it
    stopped: bool = False  # it was stopped, by SIGSTOP or the like
    killed: bool = False  # by the harness, because its test was over, so that its end says nothing about the test
    limit: float | None = None  # the time limit in seconds, if the rank reached it
    expected_code: int | None = None  # the expected exit code, if it had another one
    follows: bool = False  # it waited for another rank in vain, so that rank is the cause
    may_follow: bool = False  # its exception or signal may be a consequence of another rank's end
    host: str = ""
    subtests: tuple[Subtest, ...] = ()  # in the order in which they ended
    kinds: dict[str, SkipKind] = dataclasses.field(default_factory=dict)  # of the reasons to skip
    defect_blocks: tuple[DefectBlock, ...] = ()  # in the order in which the rank left them
    cpu: float = 0.0  # seconds of CPU time; 0 if the rank is a thread

    @classmethod
    def report(cls, rank: int, state: State, **more: Any) -> RankResult:
        """What a rank reports about itself."""
        return cls(rank, state, reported=state.value, **more)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in dataclasses.asdict(self).items() if name not in _OF_ITS_TEST}

    @property
    def ran_subtests(self) -> int:
        return sum(each.has_run for each in self.subtests)

    @property
    def skipped_subtests(self) -> list[str]:
        """The reason of each subtest that skipped."""
        return [each.skipped for each in self.subtests if each.skipped is not None]

    @property
    def is_silent(self) -> bool:
        """Whether it reported nothing until the harness killed it."""
        return self.killed and not self.reported

    @property
    def raised(self) -> bool:
        return self.reported in (State.FAILED.value, State.ERROR.value)

    @property
    def shown_text(self) -> str:
        if self.state is State.PASSED:
            return ""
        return self.text or ("no Python stack is available" if self.killed and not self.raised else "")

    def headline(self, plural: bool = False) -> str:
        """What the rank did, in the words after ``rank 1`` or (``plural``) ``ranks 0 and 1``."""
        expected = "" if self.expected_code is None else f"; exit code {self.expected_code} was expected"
        return self._deed("were" if plural else "was", "they" if plural else "it") + expected

    def _deed(self, was: str, it: str) -> str:
        if self.state in (State.PASSED, State.SKIPPED):
            return f"{self.state.value}: {self.message}" if self.message else self.state.value
        if self.raised:
            return "raised"
        report = f"reported that {it} {self.reported} and then " if self.reported else ""
        if self.killed:
            end_state = f"{was} stopped (SIGSTOP or the like)" if self.stopped else f"{was} still running"
            limit = "" if self.limit is None else f" (the limit is {self.limit:g} s)"
            return f"{report}{end_state} after {self.at:.1f} s{limit}, and {was} killed"
        return (
            report + death(self.signal or self.exit_code, was) + ("" if self.reported else " before reporting anything")
        )

    def in_one_line(self, plural: bool = False) -> str:
        """What the rank did, with the first line of its exception."""
        headline = self.headline(plural)
        return f"{headline} {self.exception}: {self.message}".rstrip(": ") if self.raised else headline

    def cause_key(self) -> tuple[bool, bool, bool, bool, float]:
        """The key that sorts causes. Ranks that only waited come last, and before them those that skipped.

        A death without a report precedes any exception, even an earlier one: other ranks may see it first.
        """
        has_reported = bool(self.reported) or self.killed
        return self.state is State.STILL_RUNNING, self.follows, self.state is State.SKIPPED, has_reported, self.at


def by_cause(ranks: Iterable[RankResult]) -> list[RankResult]:
    """The ranks that did not pass, the first cause first."""
    return sorted((rank for rank in ranks if rank.state is not State.PASSED), key=RankResult.cause_key)


def rank_rows(ranks: Sequence[RankResult]) -> list[tuple[str, ...]]:
    """A small table of what each rank did, and when. The titles come first."""
    rows: list[tuple[str, ...]] = [("rank", "state", "at", "what it did", "host")] if ranks else []
    for rank in ranks:
        rows.append((str(rank.rank), rank.state.value, f"{rank.at:.1f} s", rank.in_one_line(), rank.host))
    several_hosts = len({rank.host for rank in ranks}) > 1
    return rows if several_hosts else [row[:-1] for row in rows]


def describe(ranks: Sequence[RankResult], text: str = "") -> str:
    """The reports of a test's ranks, and below them ``text``, from the test process itself."""
    return "\n\n".join(filter(None, [*_paragraphs(ranks), text]))


def _paragraphs(ranks: Sequence[RankResult]) -> Iterable[str]:
    """A paragraph for each group of ranks with the same report, the first cause first, and then their output.

    Every rank is in one of them, also one that passed.
    """
    same: dict[tuple[str, str], list[RankResult]] = {}
    bad = by_cause(ranks)
    for rank in [*bad, *(rank for rank in ranks if rank.state is State.PASSED)]:
        same.setdefault((rank.headline(), rank.shown_text), []).append(rank)
    dead = [rank.rank for rank in bad if rank.state is State.CRASHED and not rank.may_follow]
    for (_, text), alike in same.items():
        who = f"{ranks_in_words([rank.rank for rank in alike])} of {len(ranks)}"
        cause = f" (possibly because {ranks_in_words(dead)} died)" if dead and alike[0].may_follow else ""
        yield f"{who} {alike[0].headline(len(alike) > 1)}{cause}" + (f":\n{text}" if text else "")
    if any(rank.state is State.SKIPPED for rank in bad):
        yield "a skip counts only when every rank skips"
    for rank in bad:
        if rank.output:
            yield f"--- output of rank {rank.rank} ---\n{rank.output}"
