"""Runs the tests of a model, and says in one line what went wrong in each."""

from __future__ import annotations

import dataclasses
import time
import unittest
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch_fsdp_tests.models import ModelTestCase
from torch_fsdp_tests.models.advice import Expected
from torch_fsdp_tests.models.configurations import Configuration
from torch_fsdp_tests.models.endings import Ending, ending_of, reason_of
from torch_fsdp_tests.models.explaining import Explanation
from torch_fsdp_tests.models.survey import Dropped, Survey
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
    without: tuple[str, ...] = ()  # for each option that was dropped, a sentence


def planned(names: Sequence[str], dropped: Mapping[str, Dropped]) -> dict[str, str]:
    """For each configuration, the one that is left without dropped options. It is empty if nothing of it is left."""
    plan = {}
    for name in names:
        configuration = Configuration.parse(name)
        left = configuration.without(*dropped)
        plan[name] = left.name if left.options or not configuration.options else ""
    return plan


def check(
    model: str,
    case: type[ModelTestCase],
    plan: Mapping[str, str],
    found: Survey,
    show: Callable[[Checked], None],
) -> None:
    """Train the model in each configuration of the plan, and ``show`` each result at once."""
    by_left: dict[str, list[str]] = {}
    for name, left in plan.items():
        by_left.setdefault(left, []).append(name)

    def show_all(finding: Checked) -> None:
        for name in by_left[finding.configuration]:
            show(_with_causes(_with_dropped(finding, name, found.dropped), found.expected))

    for _ in by_left.get("", ())[:1]:
        show_all(Checked(model, "", Ending.SKIPPED, 0.0))
    suite = unittest.TestSuite(case(f"test_{left}") for left in by_left if left)
    suite.run(_Result(model, show_all))


def _with_causes(finding: Checked, expected: Sequence[Expected]) -> Checked:
    """A failure of FSDP with what was seen in the model. Then the message of torch is not searched for defects."""
    interface = finding.configuration.partition("_")[0]
    seen = [each for each in expected if interface in each.interfaces]
    if not seen or finding.ending not in (Ending.MISMATCH, Ending.RAISED, Ending.HUNG):
        return finding
    causes = [Explanation("seen in the model", "", f"{each.what}: {each.then}", each.instead) for each in seen]
    limits = [cause for cause in finding.explained if cause.kind == "limit" and cause.advice not in str(causes)]
    return dataclasses.replace(finding, explained=(*causes, *limits))


def _with_dropped(finding: Checked, name: str, dropped: Mapping[str, Dropped]) -> Checked:
    """The finding as that of a configuration with all its options."""
    options = [option for option in Configuration.parse(name).options if option in dropped]
    without = tuple(f"without {option}: {dropped[option].reason}" for option in options)
    ending, reason = finding.ending, finding.reason
    if not finding.configuration:
        is_skip = all(dropped[option].is_skip for option in options)
        ending, reason = Ending.SKIPPED if is_skip else Ending.FAILS_WITHOUT_FSDP, dropped[options[0]].reason
    elif without and ending is Ending.PASSED:
        ending = Ending.PARTLY
    return dataclasses.replace(finding, configuration=name, ending=ending, reason=reason, without=without)


class _Result(unittest.TestResult):
    """Turns the outcomes of tests into findings."""

    def __init__(self, model: str, show: Callable[[Checked], None]) -> None:
        super().__init__()
        self._model, self._show = model, show
        self._began = 0.0

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
        self._show(Checked(self._model, _configuration(test), ending, time.perf_counter() - self._began, *words))


def _configuration(test: unittest.TestCase) -> str:
    return test.id().rpartition(".")[2].removeprefix("test_")
