"""What a test does in a rank is recorded and compared: values, collectives, memory, states, exceptions, copies.

Each rank of a test appends a line of JSON to a file of its own.

- ``session``: that of a test in a rank, and the mode and hooks that fill it;
- ``values``: tensors and other values as a few numbers;
- ``memory``: the unsharded parameters and gradients that are alive;
- ``feature``: what a run does about it; ``kept_records`` and ``differences`` read and compare the lines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch_fsdp_tests.extension import AddOption, Extension, Feature, absolute

if TYPE_CHECKING:
    import unittest

# The folder in which ranks record their behavior, and whether operators belong to it. Only the dispatcher sets them.
FOLDER_VARIABLE = "TORCH_FSDP_TESTS_BEHAVIOR"
OPERATORS_VARIABLE = "TORCH_FSDP_TESTS_OPERATORS"


class _Extension(Extension):
    def add_options(self, group: Callable[[str], AddOption]) -> None:
        add = group("output")
        words = "run twice, and write what each test does: values, collectives, memory, states, exceptions and "
        add("--record-behavior", type=absolute, metavar="FILE", help=f"{words}warnings, copies and casts")
        words = "report what each test does differently from this record of another version, device or run"
        add("--against-behavior", type=absolute, metavar="FILE", help=words)
        words = "with a diff that selects tests, or with fixes: run them without the change and with it, in memory, "
        add("--compare-behavior", action="store_true", help=f"{words}and report what they do differently")
        words = "with one of these: record and compare all other operators as well"
        add("--operators", action="store_true", help=words)
        words = "with one of the last two: fail the run if a test differs"
        add("--fail-on-difference", action="store_true", help=words)

    def implied(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        # What passes is compared also if something fails.
        return {"keep_going": True} if given.get("compare_behavior") and not given.get("fail_fast") else {}

    def feature(self, run: Any, given: Mapping[str, Any], environment: Mapping[str, str]) -> Feature | None:
        names = ("record_behavior", "against_behavior", "compare_behavior", "operators", "fail_on_difference")
        if not given.keys() & {*names}:
            return None
        from torch_fsdp_tests.extensions.behavior.feature import Asked, Behavior

        asked = Asked(**{name: given[name] for name in names if name in given}, change=given.get("reaching", ()))
        return Behavior(asked, is_repeated=bool(given.keys() & {"repeat", "duration"}))

    def around(self, test: unittest.TestCase, rank: int) -> contextlib.AbstractContextManager[Any]:
        from torch_fsdp_tests.extensions.behavior import session

        return session.recorded(os.environ[FOLDER_VARIABLE], test.id(), rank, OPERATORS_VARIABLE in os.environ)


EXTENSION = _Extension()
