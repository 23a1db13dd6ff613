"""The verdict on one test, from the judge of its ranks to the reports."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch_fsdp_tests.verdict.of_rank import RankResult, describe
from torch_fsdp_tests.verdict.states import Phase, Scope, SkipKind, State

FILE_ITSELF = "(the file itself)"  # replaces the test if no test is to blame


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of a test, the reason in one line, the phase, and all ranks if it failed."""

    outcome: State
    reason: str = ""  # one line: why it skipped, also in part, failed or was not run
    phase: Phase | None = None
    ranks: tuple[RankResult, ...] = ()

    def __post_init__(self) -> None:
        if self.outcome is State.STILL_RUNNING:
            raise ValueError("a test cannot be 'still running': report this error of the harness")

    @property
    def in_full(self) -> str:
        return describe(self.ranks) or self.reason

    @property
    def is_from_body(self) -> bool:
        """Whether the test's body raised the cause, and no rank died or failed outside its body."""
        in_bodies = all(rank.phase is Phase.BODY for rank in self.ranks if rank.raised and not rank.may_follow)
        died = any(rank.state is State.CRASHED for rank in self.ranks)
        return self.outcome in (State.FAILED, State.ERROR) and self.phase is Phase.BODY and in_bodies and not died


@dataclasses.dataclass(frozen=True)
class TestResult(Verdict):
    """The verdict on one test in one process, and what else is known about it.

    ``name`` is ``Class.test``, or ``Class.fixture`` for a failed fixture.
    """

    __test__ = False

    name: str = ""
    scope: Scope = Scope.TEST
    seconds: float = 0.0
    text: str = ""  # tracebacks, except those of the ranks
    subtests: int = 0  # subtests that ran
    subtests_skipped: dict[str, int] = dataclasses.field(default_factory=dict)  # number of skipped subtests, by reason
    kinds: dict[str, SkipKind] = dataclasses.field(default_factory=dict)  # of the reasons to skip it or its subtests
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def rerun_name(self) -> str | None:
        """What to select to run it again: the test, the class of a fixture, or None for the whole file."""
        return {Scope.TEST: self.name, Scope.CLASS: self.class_name, Scope.FILE: None}[self.scope]

    @property
    def is_fixture(self) -> bool:
        """Whether it is the failure of a fixture of a class or of the file. A fixture that passes has no result."""
        return self.scope is not Scope.TEST and self.name != FILE_ITSELF

    @property
    def class_name(self) -> str:
        """The name of its class. Empty for a module's fixture and for the file itself."""
        return self.name.rpartition(".")[0]

    @property
    def method(self) -> str:
        """The name of the test, or of the fixture that failed in its place."""
        return self.name.rpartition(".")[2]

    @property
    def executed_subtests(self) -> int:
        return max(self.subtests, int(self.facts.get("subtests") or 0))

    @property
    def skipped_subtests(self) -> dict[str, int]:
        """The number of skipped subtests by reason: from the ranks, or else from unittest."""
        return dict(self.facts.get("subtests_skipped") or self.subtests_skipped)

    @property
    def skipped_in_part(self) -> str:
        """What was skipped of a test that ran, in one line. Empty if nothing was."""
        skipped = self.skipped_subtests if self.outcome.is_executed else {}
        number = sum(skipped.values())
        amount = f"{number} of {number + self.executed_subtests} subtests"
        return f"skipped in part, {amount}: {'; '.join(skipped)}" if skipped else ""

    @property
    def skip_kinds(self) -> dict[str, SkipKind]:
        """The kind of each reason to skip the test or subtests of it."""
        kinds = self.kinds | {reason: SkipKind(kind) for reason, kind in self.facts.get("skip_kinds", {}).items()}
        whole = [self.reason] if self.outcome is State.SKIPPED else []
        return {reason: kinds.get(reason, SkipKind.OTHER) for reason in [*whole, *self.skipped_subtests]}

    def skips_to_json(self) -> dict[str, Any]:
        """The fields of ``report.json`` with what was skipped and why."""
        kinds = {reason: kind.value for reason, kind in self.skip_kinds.items()}
        skips = {"subtests_skipped": self.skipped_subtests, "skip_kinds": kinds}
        return {"outcome": self.outcome.value, "reason": self.reason, **skips}

    @property
    def requirements_not_met(self) -> list[str]:
        """Why the test, or subtests of it, could not run here."""
        return [reason for reason, kind in self.skip_kinds.items() if kind.is_requirement]
