"""Why tests and subtests were skipped."""

from __future__ import annotations

import collections
import enum
from collections.abc import Iterable, Mapping
from typing import Any

from torch_fsdp_tests.verdict.states import State


class SkipKind(str, enum.Enum):
    """What was missing where a test or a subtest was skipped."""

    DEVICE = "device"  # the device under test lacks something, or there are too few
    TORCH = "torch"  # the installed torch lacks something
    NAME = "name of torch is gone"
    FACT = "fact about torch is unknown"
    LIST = "list"  # a list of tests says so
    SLOW = "slow"
    OTHER = "other"

    @property
    def is_requirement(self) -> bool:
        """Whether the test could not run. Exclusions by a list, or because a test is slow, are not requirements."""
        return self not in (SkipKind.LIST, SkipKind.SLOW)


class Reason(str):
    """The reason of a skip, with its kind. A text without a kind is of the kind ``OTHER``."""

    kind: SkipKind

    def __new__(cls, text: str, kind: SkipKind = SkipKind.OTHER) -> Reason:
        reason = super().__new__(cls, text)
        reason.kind = kind
        return reason

    @classmethod
    def joined(cls, reasons: Iterable[str], kind: SkipKind = SkipKind.OTHER) -> Reason:
        """Several reasons as one, of the kind of the first, or of ``kind`` if that one has none."""
        unique = list(dict.fromkeys(reasons))
        return cls("; ".join(unique), getattr(unique[0], "kind", kind))


def kinds_of(reasons: Iterable[str]) -> dict[str, SkipKind]:
    return {str(reason): getattr(reason, "kind", SkipKind.OTHER) for reason in reasons}


def skip_rows(tests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each reason to skip: its kind, the number of tests that it skipped, and the number of subtests of other tests.
    The most frequent comes first. The tests have the fields of ``report.json``; older ones have no kinds.
    """
    whole: collections.Counter[str] = collections.Counter()
    parts: collections.Counter[str] = collections.Counter()
    kinds: dict[str, str] = {}
    for test in tests:
        kinds |= test.get("skip_kinds", {})
        if test["outcome"] == State.SKIPPED:
            whole[test["reason"]] += 1
        else:
            parts.update(test["subtests_skipped"])
    reasons = sorted({*whole, *parts}, key=lambda reason: (-whole[reason], -parts[reason], reason))
    return [
        {
            "kind": kinds.get(reason, SkipKind.OTHER.value),
            "reason": reason,
            "tests": whole[reason],
            "subtests": parts[reason],
        }
        for reason in reasons
    ]
