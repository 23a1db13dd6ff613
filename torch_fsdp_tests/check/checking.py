"""Runs the tests of a model, and says in one line what went wrong in each."""

from __future__ import annotations

import dataclasses
import time
import unittest
from collections.abc import Callable
from typing import Any

from torch_fsdp_tests.models import ModelTestCase
from torch_fsdp_tests.models.endings import Ending, ending_of, reason_of
from torch_fsdp_tests.models.explaining import Explanation
from torch_fsdp_tests.verdict import State, Verdict, in_one_line


@dataclasses.dataclass(frozen=True)
class Checked:
    """The result of one configuration of a model."""

    model: str  # the argument that names it
    configuration: str
    ending: Ending
    seconds: float
    reason: str = ""
    text: str = ""  # the tracebacks
    alone: str = ""  # which of its options fail alone, in words
    explained: tuple[Explanation, ...] = ()  # what may be the cause


def check(model: str, case: type[ModelTestCase], show: Callable[[Checked], None]) -> list[Checked]:
    """Train the model in each configuration of the case, and ``show`` each result at once."""
    result = _Result(model, show)
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result.findings


class _Result(unittest.TestResult):
    """Turns the outcomes of tests into findings."""

    def __init__(self, model: str, show: Callable[[Checked], None]) -> None:
        super().__init__()
        self._model, self._show = model, show
        self._began = 0.0
        self.findings: list[Checked] = []

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._began = time.perf_counter()

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        is_limit = isinstance(test, ModelTestCase) and _configuration(test) in test.limits
        self._add(test, Ending.LIMIT if is_limit else Ending.PASSED)

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        super().addSkip(test, reason)
        self._add(test, Ending.SKIPPED, reason)

    def addExpectedFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self._add(test, Ending.KNOWN)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        super().addFailure(test, err)
        self._add_bad(test, err[1])

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        super().addError(test, err)
        self._add_bad(test, err[1])

    def _add_bad(self, test: unittest.TestCase, error: BaseException) -> None:
        verdict = getattr(error, "verdict", None) or Verdict(State.ERROR, in_one_line(error))
        ending, reason = ending_of(verdict.outcome, verdict.ranks), reason_of(verdict.reason, verdict.ranks)
        self._add(test, ending, reason, str(error), getattr(error, "alone", ""), (*getattr(error, "explained", ()),))

    def _add(self, test: unittest.TestCase, ending: Ending, *words: Any) -> None:
        finding = Checked(self._model, _configuration(test), ending, time.perf_counter() - self._began, *words)
        self.findings.append(finding)
        self._show(finding)


def _configuration(test: unittest.TestCase) -> str:
    return test.id().rpartition(".")[2].removeprefix("test_")
