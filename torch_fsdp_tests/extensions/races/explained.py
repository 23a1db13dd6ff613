"""The races of a test under the race detector, by the known defects that explain them."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable

from torch_fsdp_tests.defects import registry
from torch_fsdp_tests.defects.in_tests import torch_defect
from torch_fsdp_tests.extensions.races import ordering


def explaining(race: ordering.Race) -> str:
    """The id of the known defect that explains a race, or an empty string."""
    for defect in registry.defects():
        if any(fnmatch.fnmatchcase(str(race), f"*{pattern}*") for pattern in defect.races):
            return defect.id
    return ""


def conclude(races: Iterable[ordering.Race]) -> None:
    """Show the known defects that explain races of the running test, and raise ``AssertionError`` with all others."""
    by_defect: dict[str, list[ordering.Race]] = {}
    for race in races:
        by_defect.setdefault(explaining(race), []).append(race)
    for id, found in sorted(by_defect.items(), reverse=True):  # those without a defect come last
        with torch_defect(*filter(None, [id])):
            ordering.conclude(found)
