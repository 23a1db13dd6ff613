"""What travels from a test file's process to the dispatcher: the types of the messages, and both ends.

The dispatcher passes the number of an inherited descriptor in an environment variable. The process of the test file
takes the descriptor (:func:`attach`) and writes one message per line. What tests print goes elsewhere. Without a
stream every function here does nothing, so a test file behaves the same if it is run by hand.
"""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from torch_fsdp_tests.processes import messages
from torch_fsdp_tests.verdict import Phase, RankResult, Scope, SkipKind, State

DESCRIPTOR_VARIABLE = "TORCH_FSDP_TESTS_EVENTS"
FILE_ITSELF = "(the file itself)"  # replaces the test if no test is to blame


@dataclasses.dataclass(frozen=True)
class TestResult:
    """The result of one test in one process. ``name`` is ``Class.test``, or ``Class.fixture`` for a failed fixture."""

    __test__ = False

    name: str
    outcome: State
    scope: Scope = Scope.TEST
    phase: Phase | None = None
    seconds: float = 0.0
    reason: str = ""  # one line: why it skipped, also in part, failed or was not run
    text: str = ""  # tracebacks, except those of the ranks
    ranks: tuple[RankResult, ...] = ()
    subtests: int = 0  # subtests that ran
    subtests_skipped: dict[str, int] = dataclasses.field(default_factory=dict)  # number of skipped subtests, by reason
    kinds: dict[str, SkipKind] = dataclasses.field(default_factory=dict)  # of the reasons to skip it or its subtests
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.outcome.check_of_test()

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
        reasons = [*[self.reason] * (self.outcome is State.SKIPPED), *self.skipped_subtests]
        return {reason: kinds.get(reason, SkipKind.OTHER) for reason in reasons}

    def skips_to_json(self) -> dict[str, Any]:
        """The fields of ``report.json`` with what was skipped and why."""
        kinds = {reason: kind.value for reason, kind in self.skip_kinds.items()}
        skips = {"subtests_skipped": self.skipped_subtests, "skip_kinds": kinds}
        return {"outcome": self.outcome.value, "reason": self.reason, **skips}

    @property
    def requirements_not_met(self) -> list[str]:
        """Why the test, or subtests of it, could not run here."""
        return [reason for reason, kind in self.skip_kinds.items() if kind.is_requirement]


@dataclasses.dataclass(frozen=True)
class Announced:
    """The tests that will run, in order, and what the lists and the selection say of them."""

    tests: tuple[str, ...]
    selected: int  # number of tests, before the file was cut into parts
    unknown: tuple[str, ...]  # remarks on names that select nothing
    matched: frozenset[int]  # entries of the lists that name a test of the file
    known: dict[str, int]  # tests that are listed as failing, with the entry


@dataclasses.dataclass(frozen=True)
class Started:
    test: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """The end of a test, or a fixture that failed."""

    result: TestResult


@dataclasses.dataclass(frozen=True)
class Note:
    """A note, such as a leak, about a running test, or about the file."""

    test: str | None
    text: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts about a running test, or about the file. A later fact replaces an earlier one of the same name."""

    test: str | None
    facts: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class NeedsRanks:
    """A test needs these ranks of a launch."""

    ranks: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Broken:
    """The file itself failed."""

    reason: str
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Over:
    """A test runner of the file ended."""


Message = Announced | Started | Ended | Note | Facts | NeedsRanks | Broken | Over

# --- the test file's end ----------------------------------------------------------------------------------------------

_descriptor: int | None = None
_owner = 0  # id of the process that attached; its forks must not write to the stream


def attach() -> bool:
    """Take the dispatcher's descriptor, so that no process started from here inherits it or the variable.

    Returns False if there is none. Raises ``ValueError`` if the variable does not name an open descriptor.
    """
    global _descriptor, _owner
    text = os.environ.pop(DESCRIPTOR_VARIABLE, None)
    if text is None:
        return False
    try:
        os.set_inheritable(int(text), False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{DESCRIPTOR_VARIABLE} is {text!r}, which is not an open descriptor") from error
    _descriptor, _owner = int(text), os.getpid()
    return True


def attached() -> bool:
    """Whether what this process sends reaches a dispatcher."""
    return _descriptor is not None and os.getpid() == _owner


def detach() -> None:
    """Close this process' copy of the stream. For a process that was forked from the test process. May be repeated."""
    global _descriptor
    os.environ.pop(DESCRIPTOR_VARIABLE, None)
    if _descriptor is not None:
        os.close(_descriptor)
        _descriptor = None


def send(message: Message) -> None:
    """Send one message. If the dispatcher has died, the stream is closed silently."""
    if not attached() or _descriptor is None:
        return
    data = messages.encode(message) + b"\n"
    try:
        while data:
            data = data[os.write(_descriptor, data) :]
    except OSError:
        detach()


def plain(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts with their ``str`` in place of values that JSON cannot represent."""
    data: dict[str, Any] = json.loads(json.dumps(facts, default=str))
    return data


# --- the dispatcher's end ---------------------------------------------------------------------------------------------


class Reader:
    """Turns the bytes of one stream into messages. Anything else is kept in ``garbage``, and does not raise."""

    def __init__(self) -> None:
        self._rest = b""
        self.garbage: list[bytes] = []

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete with these bytes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        received = []
        for line in lines:
            try:
                received.append(messages.decode(line, Message.__args__))
            except messages.MessageError:
                self.garbage.append(line)
        return received
