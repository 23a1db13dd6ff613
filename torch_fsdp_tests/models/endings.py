"""How a model ended in a configuration, from the outcome of its test, and its letter in the table. Needs no torch."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from torch_fsdp_tests.verdict.of_rank import RankResult, by_cause
from torch_fsdp_tests.verdict.states import State


class Ending(enum.Enum):
    """How a configuration ended. The value is its letter in the table."""

    PASSED = "."
    PARTLY = "p"
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
    Ending.PASSED: "equals the plain model",
    Ending.PARTLY: "equals it, but an option was dropped",
    Ending.SKIPPED: "skipped",
    Ending.KNOWN: "shows the known defect that the case names",
    Ending.LIMIT: "raises as the case says",
    Ending.MISMATCH: "differs from the plain model",
    Ending.RAISED: "raises",
    Ending.HUNG: "hangs",
    Ending.DIED: "a rank dies",
    Ending.FAILS_WITHOUT_FSDP: "fails without FSDP too",
}
_BY_STATE = {
    State.PASSED: Ending.PASSED,
    State.KNOWN_DEFECT: Ending.KNOWN,
    State.KNOWN_FAILURE: Ending.KNOWN,
    State.SKIPPED: Ending.SKIPPED,
    State.NOT_RUN: Ending.SKIPPED,
    State.TIMED_OUT: Ending.HUNG,
    State.CRASHED: Ending.DIED,
}

_OUR_OWN = ("Mismatch", "FailsWithoutFSDP", "RanksDiffer")  # exceptions whose message is a sentence


def ending_of(outcome: State, ranks: Sequence[RankResult]) -> Ending:
    """How a test of a configuration ended. A failed assertion of torch is an error, and no mismatch."""
    first = next(iter(by_cause(ranks)), None)
    if first is not None and first.exception == "FailsWithoutFSDP":
        return Ending.FAILS_WITHOUT_FSDP
    if first is not None and first.exception == "Mismatch":
        return Ending.MISMATCH
    return _BY_STATE.get(outcome, Ending.RAISED)


def reason_of(reason: str, ranks: Sequence[RankResult]) -> str:
    """The sentence of our own exceptions; the last line of DCP's, which has the cause; and else what happened."""
    first = next(iter(by_cause(ranks)), None)
    if first is None:
        return reason
    if first.exception == "CheckpointException":
        return first.text.rstrip().rpartition("\n")[2]
    return first.message if first.exception in _OUR_OWN else first.in_one_line()
