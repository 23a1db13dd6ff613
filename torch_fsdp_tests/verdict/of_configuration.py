"""How a model of :mod:`torch_fsdp_tests.models` ended in a configuration, from the outcome of its test."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from torch_fsdp_tests.verdict.of_rank import RankResult, by_cause
from torch_fsdp_tests.verdict.states import State


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
_BY_STATE = {
    State.PASSED: Kind.PASSED,
    State.KNOWN_DEFECT: Kind.KNOWN,
    State.KNOWN_FAILURE: Kind.KNOWN,
    State.SKIPPED: Kind.SKIPPED,
    State.NOT_RUN: Kind.SKIPPED,
    State.TIMED_OUT: Kind.HUNG,
    State.CRASHED: Kind.DIED,
}


def kind_of(outcome: State, ranks: Sequence[RankResult]) -> Kind:
    """The kind of a test in a configuration. Only in ranks is a failed assertion a mismatch."""
    first = next(iter(by_cause(ranks)), None)
    if first is not None and first.exception == "FailsWithoutFSDP":
        return Kind.FAILS_WITHOUT_FSDP
    if first is not None and outcome is State.FAILED:
        return Kind.MISMATCH
    return _BY_STATE.get(outcome, Kind.RAISED)


def reason_of(reason: str, ranks: Sequence[RankResult]) -> str:
    """The sentence of our own exceptions; the last line of DCP's, which has the cause; and else what happened."""
    first = next(iter(by_cause(ranks)), None)
    if first is None:
        return reason
    if first.exception == "CheckpointException":
        return first.text.rstrip().rpartition("\n")[2]
    return first.message if first.exception in ("Mismatch", "FailsWithoutFSDP") else first.in_one_line()
