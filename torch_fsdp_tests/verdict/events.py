"""What unittest does in a test file, as messages to the dispatcher: a result class, notes and facts."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
import types
import unittest
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from torch_fsdp_tests.verdict import (
    FILE_ITSELF,
    VERDICT,
    Phase,
    RankResult,
    Scope,
    State,
    TestResult,
    Verdict,
    in_one_line,
    kinds_of,
    stream,
)

__unittest = True  # keeps the frames of this module out of the tracebacks that unittest prints

PROBED_VARIABLE = "_TORCH_FSDP_TESTS_PROBED"  # passes on what one process recorded as ``probed``

_MODULE_PREFIX = "__main__."

_file_facts: dict[str, Any] = {}
_devices: dict[str | None, int] = {}  # the number that a test, or any test of the file (None), needs


class _Now:
    running: str | None = None  # id of the test that runs
    watcher: Callable[[str | None], object] = staticmethod(lambda test: None)


_now = _Now()


class Skipped(unittest.SkipTest):
    """A skip whose reason has a kind. unittest passes on ``str(error)``, so that is the :class:`.Reason` itself."""

    def __str__(self) -> str:
        reason: str = self.args[0]
        return reason


def skips_file(error: BaseException) -> bool:
    """Whether this exception, raised while a test file is imported, skips the file.

    As for pytest: ``unittest.SkipTest``, ``pytest.importorskip``, and ``pytest.skip`` with ``allow_module_level=True``.
    """
    return isinstance(error, unittest.SkipTest) or getattr(error, "allow_module_level", False) is True


def skip_file(reason: str) -> None:
    """Report that the file is skipped, for this reason."""
    _ended(FILE_ITSELF, Verdict(State.SKIPPED, reason), scope=Scope.FILE)
    stream.send(stream.EventsOver())


def note(text: str) -> None:
    """Add a note, such as a leak, to the running test, or to the file if no test runs."""
    stream.send(stream.Note(_now.running, text))


def record(**fields: Any) -> None:
    """Attach facts to the running test (ranks, executed subtests), or to the file (torch, device, backend, ranks).

    Values that JSON cannot represent are sent as their ``str``. A later fact replaces an earlier one of the same name.
    """
    if _now.running is None:
        _file_facts.update(fields)
    stream.send(stream.Facts(_now.running, json.loads(json.dumps(fields, default=str))))


def need(devices: int) -> None:
    """Record that the running test, or some test of the file, needs this many devices. The most counts."""
    if devices > _devices.get(_now.running, 0):
        _devices[_now.running] = devices
        record(devices=devices)


def file_facts() -> Mapping[str, Any]:
    """The facts recorded so far about the file of this process."""
    return _file_facts


def test_name(test: unittest.TestCase) -> str:
    """``Class.test`` for a test of the running file, or the full id for a test that was imported from elsewhere."""
    return test.id().removeprefix(_MODULE_PREFIX)


def watch(watcher: Callable[[str | None], None]) -> None:
    """Call a function for every test that begins, here and in forked ranks. The end of a test is reported as None."""
    _now.watcher = watcher


def enter(test_id: str | None) -> None:
    """Report the unittest id of the test that this process runs from now on to the function of :func:`watch`."""
    _now.watcher(None if test_id is None else test_id.removeprefix(_MODULE_PREFIX))


def tests_in(suite: Iterable[Any]) -> Iterator[unittest.TestCase]:
    """The test cases of a suite, down through suites of suites, in the order in which they run."""
    for item in suite:
        if isinstance(item, unittest.TestCase):
            yield item
        elif isinstance(item, Iterable):
            yield from tests_in(item)


class Suite(unittest.TestSuite):
    """unittest's suite, which also reports whose fixture failed or skipped."""

    def _createClassOrModuleLevelException(
        self, result: Any, exc: BaseException, method_name: str, parent: str, info: Any = None
    ) -> None:
        # unittest itself passes these two on as one text.
        result.fixture = Fixture(method_name, "" if parent in sys.modules else parent.removeprefix(_MODULE_PREFIX))
        super()._createClassOrModuleLevelException(result, exc, method_name, parent, info)  # type: ignore[misc]


class Fixture(NamedTuple):
    """A fixture of a class, or of the file where ``owner`` is empty."""

    name: str
    owner: str

    @property
    def scope(self) -> Scope:
        return Scope.CLASS if self.owner else Scope.FILE


def _verdict_on(test: Any, error: BaseException, state: State, phase: Phase | None = None) -> Verdict:
    """The verdict for an exception: its own if it has one, else ``state`` with the phase that its traceback shows."""
    verdict = getattr(error, VERDICT, None)
    if isinstance(verdict, Verdict):
        return verdict
    return Verdict(state, in_one_line(error), phase or _phase_of(test, error.__traceback__))


def _phase_of(test: Any, trace: types.TracebackType | None) -> Phase:
    """Whether unittest called the test method or a fixture."""
    calls_body = getattr(type(test), "_callTestMethod", None)
    while trace is not None:
        if trace.tb_frame.f_code is getattr(calls_body, "__code__", None):
            return Phase.BODY
        trace = trace.tb_next
    return Phase.FIXTURE


def _ended(name: str, verdict: Verdict, **more: Any) -> None:
    reasons = [*more.get("subtests_skipped", ()), verdict.reason]
    stream.send(TestResult(**vars(verdict), name=name, kinds=kinds_of(reasons), **more))


class Reporting(unittest.TestResult):
    """A mix-in for any result class. It sends each test's outcome, and does not change what the class does."""

    announced: Mapping[str, list[str]] = {}  # pending tests by class, for a class fixture that skips them all
    fixture = Fixture("", "")  # the last one that failed or skipped
    fail_fast = False  # whether the first failure ends the file
    entries: Callable[[], Collection[str]] = tuple  # the paths where no test may leave a file
    forgiven: Collection[str] = ()  # tests that are listed as failing, so their failure does not count

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begun: set[str] = set()  # the names of tests

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        _now.running = test_name(test)
        self._begun.add(_now.running)
        _devices.pop(_now.running, None)  # of an earlier test with this id
        self._verdict: Verdict | None = None
        self._ranks: tuple[RankResult, ...] = ()
        self._text: list[str] = []
        self._subtests = 0
        self._subtests_skipped: dict[str, int] = {}  # how many, by reason
        self._entries = {*type(self).entries()}
        self._began = time.perf_counter()
        stream.send(stream.TestStarted(_now.running))
        enter(test.id())

    def stopTest(self, test: unittest.TestCase) -> None:
        seconds = time.perf_counter() - self._began
        verdict = self._verdict or self._concluded()
        if written := {*type(self).entries()} - self._entries:
            record(written=sorted(written))
        _ended(
            test_name(test),
            dataclasses.replace(verdict, ranks=self._ranks),
            text="\n".join(self._text),
            seconds=round(seconds, 6),
            subtests=self._subtests,
            subtests_skipped=self._subtests_skipped,
        )
        if verdict.outcome.is_bad and _now.running not in self.forgiven:
            self._stop_if_asked()
        _now.running = None
        enter(None)
        super().stopTest(test)

    def _stop_if_asked(self) -> None:
        if self.fail_fast:
            self.stop()

    def _concluded(self) -> Verdict:
        """The verdict on a test for which unittest reported none: it was interrupted, or its subtests skipped."""
        error = sys.exc_info()[0]
        if error is not None:
            return Verdict(State.ERROR, f"interrupted by {error.__name__}")
        if self._subtests_skipped and not self._subtests:
            return Verdict(State.SKIPPED, next(iter(self._subtests_skipped)))
        return Verdict(State.PASSED)

    def _take(self, verdict: Verdict, text: str = "") -> None:
        """Keep the worst outcome of a test that unittest reports, and all texts that are not in the ranks' reports."""
        if self._verdict is None or verdict.outcome.is_worse_than(self._verdict.outcome):
            self._verdict = verdict
        if verdict.ranks and not self._ranks:
            self._ranks = verdict.ranks
        elif text:
            self._text.append(text)

    def _skip_fixture(self, reason: str) -> None:
        """A fixture that skips before its tests skips them. What a later one raises does not undo their outcomes."""
        for cls, tests in self.announced.items():
            if self.fixture.owner in ("", cls):
                for test in tests:
                    if test not in self._begun:
                        _ended(test, Verdict(State.SKIPPED, reason))

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        hits = [block for block in getattr(test, "_defect_blocks", ()) if block.raised]
        text = "\n".join(f"{block.place} shows {block.defect['id']}: {block.raised}" for block in hits)
        self._take(Verdict(State.KNOWN_DEFECT if hits else State.PASSED), text)

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        text = self._exc_info_to_string(err, test)  # type: ignore[attr-defined]
        if _now.running is None:
            fixture = self.fixture
            name = ".".join(filter(None, fixture[::-1])) or str(test)
            verdict = _verdict_on(test, err[1], State.ERROR, Phase.FIXTURE)
            _ended(name, verdict, text="" if verdict.ranks else text, scope=fixture.scope)
            self._stop_if_asked()
        else:
            self._take(_verdict_on(test, err[1], State.ERROR), text)

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._take(_verdict_on(test, err[1], State.FAILED), self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    def addSkip(self, test: Any, reason: str) -> None:
        if _now.running is None and isinstance(test, unittest.TestCase) and not hasattr(test, "_subDescription"):
            self.startTest(test)  # Python 3.12.1 and 3.13.0a3 end a test that its decorator skips, but never start it
        super().addSkip(test, reason)
        if _now.running is None:
            self._skip_fixture(reason)
        elif hasattr(test, "_subDescription"):
            self._subtests_skipped[reason] = self._subtests_skipped.get(reason, 0) + 1
        else:
            self._take(Verdict(State.SKIPPED, reason))

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        super().addExpectedFailure(test, err)
        state = State.KNOWN_DEFECT if getattr(test, "_known_defects", ()) else State.EXPECTED_FAILURE
        self._take(Verdict(state), self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    def addUnexpectedSuccess(self, test: Any) -> None:
        super().addUnexpectedSuccess(test)
        self._take(Verdict(State.UNEXPECTED_SUCCESS))

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        self._subtests += 1
        if err is not None:
            state = State.FAILED if issubclass(err[0], test.failureException) else State.ERROR
            text = f"{subtest._subDescription()}\n{self._exc_info_to_string(err, test)}"  # type: ignore[attr-defined]
            self._take(dataclasses.replace(_verdict_on(test, err[1], state, Phase.BODY), ranks=()), text)

    def stopTestRun(self) -> None:
        super().stopTestRun()
        stream.send(stream.EventsOver())


class EventResult(Reporting, unittest.TextTestResult):
    """unittest's result class, which also sends events. ``TextTestRunner.resultclass`` is set to it."""
