"""The types of options: each reads a text, or rejects it in a sentence."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from torch_fsdp_tests.dispatch.plan import LONGEST


def whole_number(least: int, most: int) -> Callable[[str], int]:
    """The type of an option: a whole number within these limits."""

    def whole(text: str) -> int:
        if not (text.isdecimal() and len(text) <= len(str(most)) and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from {least} to {most}")
        return int(text)

    return whole


def positive(text: str) -> float:
    """The type of an option: a positive number of seconds."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= LONGEST:
        limits = f"greater than 0 and up to {LONGEST:.0f}"
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number of seconds {limits}")
    return value


def duration(text: str) -> float:
    """The type of an option: a time with units, such as ``8h`` or ``1h30m``."""
    parts = re.fullmatch(r"(?:(\d{1,9}(?:\.\d{1,9})?)h)?(?:(\d{1,9})m)?(?:(\d{1,9})s)?", text)
    amounts = [float(amount or 0) for amount in parts.groups()] if parts else []
    value = sum(amount * unit for amount, unit in zip(amounts, (3600, 60, 1)))
    if not 0 < value <= LONGEST:
        most = f"up to {LONGEST / 3600:.0f}h"
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a time such as 90s, 20m, 8h or 1h30m, {most}")
    return value


def option_type(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function that reads a text, as the type of an option: the message of its ``ValueError`` is shown."""

    def typed(text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return typed
