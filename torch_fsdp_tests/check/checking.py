"""Runs the tests of a model, and says in one line what went wrong in each."""

from __future__ import annotations

import dataclasses
import enum
import time
import unittest
from collections.abc import Callable
from typing import Any

from torch_fsdp_tests.models import ModelTestCase
from torch_fsdp_tests.verdict import RankResult, State, Verdict, by_cause, in_one_line


class Kind(enum.Enum):
    """How a configuration ended. The value is its letter in the table."""

    PASSED = "."
    SKIPPED = "-"
    KNOWN = "k"
    LIMIT = "l"
    MISMATCH = "M"
    RAISED = "E"
    HUNG = "H"
    DIED = "D"
    FAILS_WITHOUT_FSDP = "P"

    @property
    def is_bad(self) -> bool:
        return self.value.isupper()


WORDS = {
    Kind.PASSED: "equals the plain model",
    Kind.SKIPPED: "skipped",
    Kind.KNOWN: "shows the known defect that the case names",
    Kind.LIMIT: "raises as the case says",
    Kind.MISMATCH: "differs from the plain model",
    Kind.RAISED: "raises",
    Kind.HUNG: "hangs",
    Kind.DIED: "a rank dies",
    Kind.FAILS_WITHOUT_FSDP: "raises without FSDP too",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of one configuration of a model."""

    model: str  # the argument that names it
    configuration: str
    kind: Kind
    seconds: float
    reason: str = ""
    text: str = ""  # the tracebacks
    alone: str = ""  # which of its options fail alone, in words


def check(model: str, case: type[ModelTestCase], show: Callable[[Finding], None]) -> list[Finding]:
    """Train the model in each configuration of the case, and ``show`` each result at once."""
    result = _Result(model, show)
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result.findings


class _Result(unittest.TestResult):
    """Turns the outcomes of tests into findings."""

    def __init__(self, model: str, show: Callable[[Finding], None]) -> None:
        super().__init__()
        self._model, self._show = model, show
        self._began = 0.0
        self.findings: list[Finding] = []

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began = time.perf_counter()

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        is_limit = isinstance(test, ModelTestCase) and _configuration(test) in test.limits
        self._add(test, Kind.LIMIT if is_limit else Kind.PASSED)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._add(test, Kind.SKIPPED, reason)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self._add(test, Kind.KNOWN)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._add_bad(test, err[1])

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._add_bad(test, err[1])

    def _add_bad(self, test: unittest.TestCase, error: BaseException) -> None:
        verdict = getattr(error, "verdict", None) or Verdict(State.ERROR, in_one_line(error))
        first = next(iter(by_cause(verdict.ranks)), None)
        kind = Kind.RAISED if first is None else _kind(verdict.outcome, first)
        reason = verdict.reason if first is None else _reason(first)
        self._add(test, kind, reason, str(error), getattr(error, "alone", ""))

    def _add(self, test: unittest.TestCase, kind: Kind, *words: str) -> None:
        finding = Finding(self._model, _configuration(test), kind, time.perf_counter() - self._began, *words)
        self.findings.append(finding)
        self._show(finding)


def _configuration(test: unittest.TestCase) -> str:
    return test.id().rpartition(".")[2].removeprefix("test_")


def _reason(first: RankResult) -> str:
    """The sentence of our own exceptions; the last line of DCP's, which has the cause; and else what happened."""
    if first.exception == "CheckpointException":
        return first.text.rstrip().rpartition("\n")[2]
    return first.message if first.exception in ("Mismatch", "FailsWithoutFSDP") else first.in_one_line()


def _kind(state: State, first: RankResult) -> Kind:
    """The kind of a failure. ``first`` is the rank that caused it."""
    by_state = {State.TIMED_OUT: Kind.HUNG, State.CRASHED: Kind.DIED, State.FAILED: Kind.MISMATCH}
    if first.exception == "FailsWithoutFSDP":
        return Kind.FAILS_WITHOUT_FSDP
    return by_state.get(state, Kind.RAISED)
