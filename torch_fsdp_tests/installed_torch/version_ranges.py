"""Conditions on versions of torch, as in lists of tests and in the registry of defects."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable

_COMPARE = {
    ">=": operator.ge, "<=": operator.le, "==": operator.eq, "!=": operator.ne, ">": operator.gt, "<": operator.lt
}  # fmt: skip
_CONDITION = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)\s*")


def version_fits(version: str, conditions: str) -> bool:
    """Whether ``2.13.0+cpu`` meets ``>=2.10,<2.14``. Raises ``ValueError`` for conditions that cannot be read."""
    have = numbers(version)
    for text in conditions.split(","):
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is not a version condition such as >=2.10")
        limit = numbers(match[2])
        if not _COMPARE[match[1]](have[: len(limit)], limit):
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """``(2, 13, 0)`` for ``2.13.0+cpu``. Empty for a text that does not begin with a number."""
    return tuple(int(part) for part in re.match(r"[\d.]*", version)[0].split(".") if part)  # type: ignore[index]


def dotted(version: Iterable[int]) -> str:
    """The opposite of :func:`numbers`."""
    return ".".join(map(str, version))
