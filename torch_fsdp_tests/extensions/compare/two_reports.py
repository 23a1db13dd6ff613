"""The differences between two reports, as lines: ``python -m torch_fsdp_tests.extensions.compare BEFORE AFTER``."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.device import machine
from torch_fsdp_tests.dispatch.expectations import MalformedList, read_json
from torch_fsdp_tests.dispatch.options import Parser
from torch_fsdp_tests.dispatch.report import FILE
from torch_fsdp_tests.extensions.compare.slower import (
    Report,
    Test,
    about_pace,
    in_seconds,
    is_longer,
    pace,
    side_by_side,
)
from torch_fsdp_tests.verdict import State, plural

# Kinds of differences, the worst first.
KINDS = (
    "newly failing",
    "newly not run",
    "newly skipped",
    "newly a known failure",
    "newly showing a known defect",
    "gone",
    "slower",
    "newly passing",
    "newly executed",
    "new",
    "faster",
)
_WITH_REASON = ("newly skipped", "newly not run", "newly a known failure")


@dataclasses.dataclass(frozen=True)
class ReportDifference:
    """A test that changed. One of the two results is missing if the test is new or gone."""

    kind: str
    file: str
    name: str
    was: Test | None = None
    now: Test | None = None

    def __str__(self) -> str:
        what = f"{self.kind}: {self.file}::{self.name}"
        if self.was is None or self.now is None:
            return what
        if self.kind in ("slower", "faster"):
            return f"{what}: {in_seconds(self.was)}, now {in_seconds(self.now)}"
        return f"{what}: {self.now['reason']}" if self.kind in _WITH_REASON else what


def load(path: Path) -> dict[str, Any]:
    """Load a ``report.json``, or that of a folder, possibly of an earlier version.

    Raises :class:`MalformedList` for any other file.
    """
    path = path / FILE if path.is_dir() else path
    report = read_json(path)
    try:
        report["version"], lines(report, report)  # all that a comparison reads
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedList(f"{path} is not a report.json of run_test.py") from error
    return report


def files_gone(before: Report, after: Report) -> list[str]:
    """The files that are only in the earlier report. These are many if the later run was of a few files."""
    return sorted({file["file"] for file in before["files"]} - {file["file"] for file in after["files"]})


def differences(before: Report, after: Report) -> list[ReportDifference]:
    """The tests that changed, the worst first. Tests of :func:`files_gone` are left out."""
    gone, general = set(files_gone(before, after)), pace(before, after)
    differing = []
    for (file, name), (was, now) in side_by_side(before, after).items():
        kind = _kind(was, now, general)
        if kind is not None and file not in gone:
            differing.append(ReportDifference(kind, file, name, was, now))
    return sorted(differing, key=lambda each: (KINDS.index(each.kind), each.file, each.name))


def _kind(was: Test | None, now: Test | None, general: float) -> str | None:
    if now is None:
        return "gone"
    if was is None:
        return "newly failing" if State(now["outcome"]).is_bad else "new"
    earlier, state = State(was["outcome"]).counted_as, State(now["outcome"]).counted_as
    if state is not earlier and (state.is_executed or earlier.is_executed):
        match state:
            case State.FAILED:
                return "newly failing"
            case State.KNOWN_FAILURE:
                return "newly a known failure"
            case State.KNOWN_DEFECT if earlier.is_executed:
                return "newly showing a known defect"
            case State.PASSED if earlier.is_executed:
                return "newly passing"
            case _:
                return "newly executed" if state.is_executed else f"newly {state.value}"
    if is_longer(now, was, general):
        return "slower"
    return "faster" if is_longer(was, now, 1 / general) else None


def lines(before: Report, after: Report) -> list[str]:
    """A line for each test that changed. Files that only one of the reports has are counted."""
    added = set(files_gone(after, before))
    changes = [str(each) for each in differences(before, after) if each.kind != "new" or each.file not in added]
    machines = [f"{title}: {was}, now {now}" for title, (was, now) in _machines(before, after).items()]
    changes = [*machines, *about_pace(before, after), *changes]
    for which, files in (("this", sorted(added)), ("the earlier", files_gone(before, after))):
        if files:
            changes.append(f"only in {which} report: {plural(len(files), 'file')}, such as {files[0]}")
    return ["compared with the earlier report:", *changes] if changes else ["nothing differs from the earlier report"]


def _machines(before: Report, after: Report) -> dict[str, tuple[str, str]]:
    """The facts in which the machines of two runs differ: results can depend on them."""
    sides = [report.get("machine") or {} for report in (before, after)]
    if not all(sides):
        return {}
    rows = machine.differing(dict(zip("ab", sides, strict=True)))
    return {title: (row["a"], row["b"]) for title, row in rows.items() if not title.startswith("free")}


def main(arguments: Sequence[str]) -> int:
    """Print the differences between two reports."""
    parser = Parser(
        prog="python -m torch_fsdp_tests.extensions.compare",
        description="Print what differs between the report.json of two runs: tests that newly fail or pass, tests\n"
        "that are new or gone, and tests that became slower or faster. The exit status is 0 even if something differs.",
    )
    parser.add_argument("before", type=Path, metavar="BEFORE", help="the report.json of the earlier run, or its folder")
    parser.add_argument("after", type=Path, metavar="AFTER", help="that of the later run")
    given = parser.parse_args(arguments)
    try:
        before, after = load(given.before), load(given.after)
    except MalformedList as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(before, after)))
    return 0
