"""The stream between a test file's process and the dispatcher: both ends, standard library only.

The dispatcher names an inherited descriptor in an environment variable. The process of the test file takes it
(:func:`attach`) and writes one JSON object a line; what the tests print goes elsewhere and never matters. Without a
stream every function here does nothing, so a test file behaves the same when it is run by hand.

The lines, by their ``event``: ``announced`` (``tests``: ids in the order in which they will run), ``started`` and
``ended`` (one test), ``note`` and ``facts`` (about the running test, or about the file when none runs), ``broken`` (the
file itself failed), ``over`` (the runner came to its end).
"""

from __future__ import annotations

import json
import os
import sys
import time
import unittest
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

__unittest = True  # keeps the frames of this module out of the tracebacks that unittest prints

DESCRIPTOR_VARIABLE = "TORCH_FSDP_TESTS_EVENTS"
PROBED_VARIABLE = "_TORCH_FSDP_TESTS_PROBED"  # what one process recorded as ``probed``, for others

# Outcomes of one test, the worst last: a test whose body passed and whose tearDown raised has erred.
OUTCOMES = ("passed", "expected failure", "skipped", "unexpected success", "failed", "error")

_MODULE_PREFIX = "__main__."

# --- the test file's end ----------------------------------------------------------------------------------------------

_descriptor: int | None = None
_owner = 0  # id of the process that attached; a fork of it must not speak in its name
_running: str | None = None  # id of the test that runs
_file_facts: dict[str, Any] = {}


def attach() -> bool:
    """Take the descriptor that the dispatcher left, so that no process started from here inherits it or its name.

    False when there is none. Raises ``ValueError`` for a variable that names no open descriptor.
    """
    global _descriptor, _owner
    text = os.environ.pop(DESCRIPTOR_VARIABLE, None)
    if text is None:
        return False
    try:
        os.set_inheritable(int(text), False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{DESCRIPTOR_VARIABLE} is {text!r}, which is no open descriptor") from error
    _descriptor, _owner = int(text), os.getpid()
    return True


def attached() -> bool:
    """Whether what this process emits reaches a dispatcher."""
    return _descriptor is not None and os.getpid() == _owner


def detach() -> None:
    """Close this process' copy of the stream, for a process that was forked off the test process. May be repeated."""
    global _descriptor
    os.environ.pop(DESCRIPTOR_VARIABLE, None)
    if _descriptor is not None:
        os.close(_descriptor)
        _descriptor = None


def emit(event: str, **fields: Any) -> None:
    """Write one event. The dispatcher's death is not this process' business: then the stream is closed quietly."""
    if not attached() or _descriptor is None:
        return
    data = json.dumps({"event": event, **fields}, default=str).encode() + b"\n"
    try:
        while data:
            data = data[os.write(_descriptor, data) :]
    except OSError:
        detach()


def note(text: str) -> None:
    """Say something that is no verdict, such as a leak, of the running test or else of the file."""
    emit("note", test=_running, text=text)


def record(**fields: Any) -> None:
    """Attach facts to the running test (ranks, executed subtests) or else to the file (torch, device, backend, ranks).

    Values must be what JSON can carry; anything else is sent as its ``str``. A later fact of the same name wins.
    """
    if _running is None:
        _file_facts.update(fields)
    emit("facts", test=_running, facts=fields)


def file_facts() -> Mapping[str, Any]:
    """The facts recorded so far about the file of this process."""
    return _file_facts


def test_name(test: unittest.TestCase) -> str:
    """``Class.test`` for a test of the file that runs, the full id for one that was imported from elsewhere."""
    return test.id().removeprefix(_MODULE_PREFIX)


def tests_in(suite: Iterable[Any]) -> Iterator[unittest.TestCase]:
    """The test cases of a suite, down through suites of suites, in the order in which they run."""
    for item in suite:
        if isinstance(item, unittest.TestCase):
            yield item
        elif isinstance(item, Iterable):
            yield from tests_in(item)


class Reporting(unittest.TestResult):
    """Mixed in before any result class: sends each test's outcome, and lets that class go on as if alone."""

    announced: Mapping[str, list[str]] = {}  # tests still to come, by class, for a class fixture that skips them all

    def startTest(self, test: unittest.TestCase) -> None:
        global _running
        super().startTest(test)
        _running = test_name(test)
        self._outcome = ""
        self._text: list[str] = []
        self._reason = ""
        self._subtests = 0
        self._subtests_skipped: dict[str, int] = {}  # how many, by reason
        self._began = time.perf_counter()
        emit("started", test=_running)

    def stopTest(self, test: unittest.TestCase) -> None:
        global _running
        seconds = time.perf_counter() - self._began
        if not self._outcome:
            self._conclude()
        emit(
            "ended",
            test=test_name(test),
            outcome=self._outcome,
            seconds=round(seconds, 6),
            reason=self._reason,
            text="\n".join(self._text),
            subtests=self._subtests,
            subtests_skipped=self._subtests_skipped,
        )
        _running = None
        super().stopTest(test)

    def _conclude(self) -> None:
        """An outcome for a test of which unittest reported none: one cut short, or one whose subtests skipped."""
        error = sys.exc_info()[0]
        if error is not None:
            self._take("error", f"cut short by {error.__name__}")
        elif self._subtests_skipped and not self._subtests:
            self._take("skipped")
            self._reason = next(iter(self._subtests_skipped))
        else:
            self._take("passed")

    def _take(self, outcome: str, text: str = "") -> None:
        if not self._outcome or OUTCOMES.index(outcome) > OUTCOMES.index(self._outcome):
            self._outcome = outcome
        if text:
            self._text.append(text)

    def _fixture(self, holder: Any, outcome: str, text: str) -> None:
        """A class or module fixture failed or skipped: unittest calls with a stand-in, outside any test."""
        name = str(holder.id() if hasattr(holder, "id") else holder)
        emit("ended", test=name, outcome=outcome, seconds=0.0, reason=text if outcome == "skipped" else "", text=text)

    def _skip_fixture(self, holder: Any, reason: str) -> None:
        owner = str(holder.id()).partition("(")[2].rstrip(")").removeprefix(_MODULE_PREFIX)
        module_wide = str(holder.id()).startswith("setUpModule")
        for cls, tests in self.announced.items():
            if module_wide or cls == owner:
                for test in tests:
                    emit("ended", test=test, outcome="skipped", seconds=0.0, reason=reason, text="")

    def addSuccess(self, test: unittest.TestCase) -> None:
        super().addSuccess(test)
        self._take("passed")

    def addError(self, test: Any, err: Any) -> None:
        super().addError(test, err)
        text = self._exc_info_to_string(err, test)  # type: ignore[attr-defined]
        if _running is None:
            self._fixture(test, "error", text)
        else:
            self._take("error", text)

    def addFailure(self, test: Any, err: Any) -> None:
        super().addFailure(test, err)
        self._take("failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    def addSkip(self, test: Any, reason: str) -> None:
        if _running is None and isinstance(test, unittest.TestCase) and not hasattr(test, "_subDescription"):
            self.startTest(test)  # Python 3.12.1 and 3.13.0a3 only end a test that is skipped by its decorator
        super().addSkip(test, reason)
        if _running is None:
            self._skip_fixture(test, reason)
        elif hasattr(test, "_subDescription"):
            self._subtests_skipped[reason] = self._subtests_skipped.get(reason, 0) + 1
        else:
            self._take("skipped")
            self._reason = reason

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        super().addExpectedFailure(test, err)
        self._take("expected failure", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    def addUnexpectedSuccess(self, test: Any) -> None:
        super().addUnexpectedSuccess(test)
        self._take("unexpected success")

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        self._subtests += 1
        if err is not None:
            kind = "failed" if issubclass(err[0], test.failureException) else "error"
            described = subtest._subDescription()
            self._take(kind, f"{described}\n{self._exc_info_to_string(err, test)}")  # type: ignore[attr-defined]

    def stopTestRun(self) -> None:
        super().stopTestRun()
        emit("over")


class EventResult(Reporting, unittest.TextTestResult):
    """unittest's own result class, and the events beside it: what ``TextTestRunner.resultclass`` becomes."""


# --- the dispatcher's end ---------------------------------------------------------------------------------------------


class Reader:
    """Turns the bytes of one stream into events. What is no event is kept in ``garbage`` and never raises."""

    def __init__(self) -> None:
        self._rest = b""
        self.garbage: list[bytes] = []

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The events that these bytes complete."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in lines:
            try:
                event = json.loads(line)
                found.append(event | {"event": str(event["event"])})
            except (ValueError, KeyError, TypeError):
                self.garbage.append(line)
        return found
