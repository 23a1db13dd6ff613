"""``--repeat`` and ``--for``: the selection runs several times, and the results are folded into one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch_fsdp_tests.extension import AddOption, Extension, Feature

MAX_ROUNDS = 1_000_000


class _Extension(Extension):
    in_report = {"rounds": None}
    in_report_of_test = {"rounds": None}

    def add_options(self, group: Callable[[str], AddOption]) -> None:
        from torch_fsdp_tests.dispatch.option_types import duration, whole_number

        add = group("how they run")
        words = "run the selection N times, with a line for each round, until a test fails; with --keep-going count by "
        add("--repeat", type=whole_number(1, MAX_ROUNDS), metavar="N", help=f"{words}test")
        words = "the same for a time such as 90s, 20m or 8h: no new round if it would overrun"
        add("--for", type=duration, dest="duration", metavar="TIME", help=words)

    def feature(self, run: Any, given: Mapping[str, Any], environment: Mapping[str, str]) -> Feature | None:
        if not given.keys() & {"repeat", "duration"}:
            return None
        from torch_fsdp_tests.extensions.rounds.feature import Rounds

        return Rounds(run, given.get("repeat"), given.get("duration"))


EXTENSION = _Extension()
