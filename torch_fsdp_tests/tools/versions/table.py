"""The reports of all versions side by side: as data, as lines for a terminal, and in Markdown."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch import report
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.extensions.behavior import differences, kept_records
from torch_fsdp_tests.extensions.compare.slower import Test, side_by_side, tests_of
from torch_fsdp_tests.installed_torch.version_ranges import numbers
from torch_fsdp_tests.verdict import State, columns, plural

BEHAVIOR = "behavior.gz"  # the record of a version, in its folder
TITLES = ("torch", "Python", "device", "what was run", "passed", "failed", "skipped", "known defects", "known failures")


@dataclasses.dataclass
class VersionRow:
    """One version: its report, and why it cannot be compared."""

    label: str
    data: Mapping[str, Any]  # as in report.json; empty if there is none
    problem: str = ""

    @property
    def what(self) -> str:
        """What was run, as a user types it."""
        shard = f"--shard {self.data['shard']} {self.data['num_shards']}" if self.data["num_shards"] > 1 else ""
        return " ".join(filter(None, (self.data["selection"], shard))) or "everything"

    def cells(self) -> tuple[str, ...]:
        if not self.data:
            return (self.label, "", "", self.problem, *["0"] * 5)
        hits = sum(test["outcome"] == State.KNOWN_DEFECT.value for _, test in report.tests_in(self.data))
        defects = f"{len(self.data['known_defects'])} ({plural(hits, 'test')})" if hits else "0"
        what = "; ".join(filter(None, (self.what, self.problem)))
        about = (self.data["torch"] or self.label, self.data["python"], self.data["device"] or "", what)
        numbers = (self.data["passed"], self.data["failed"], self.data["skipped"], defects)
        return (*about, *map(str, numbers), str(len(self.data["known_failures"])))


def read(output: Path, problems: Mapping[str, str]) -> list[VersionRow]:
    """The rows of all versions with a report in this folder or with a problem, the oldest torch first."""
    missing = [label for label in problems if not (output / label / report.FILE).exists()]
    rows = [VersionRow(label, {}, problems[label]) for label in missing]
    for path in output.glob(f"*/{report.FILE}"):
        data = json.loads(path.read_text(encoding="utf-8"))
        ended = data["exit_code"] in (ExitStatus.OK, ExitStatus.FAILED, ExitStatus.NOTHING_RAN)
        problem = "" if ended and not data["not_started"] else "did not run to its end"
        rows.append(VersionRow(path.parent.name, data, problems.get(path.parent.name, problem)))
    return sorted(rows, key=lambda row: (numbers(row.data.get("torch") or row.label), row.label))


class Table:
    """The rows, and the tests that only some versions have or execute, of those that ran one selection to its end."""

    def __init__(self, rows: Sequence[VersionRow]) -> None:
        self.rows = rows
        complete = [row for row in rows if row.data and not row.problem]
        self.compared = [row for row in complete if row.what == complete[-1].what]
        self.exists_only = self._only(lambda test: True)
        self.executes_only = self._only(lambda test: State(test["outcome"]).is_executed)

    def _only(self, holds: Callable[[Test], bool]) -> dict[tuple[str, ...], list[str]]:
        """The tests for which ``holds`` is true only on some versions, by these versions, the oldest first."""
        everywhere = tuple(row.label for row in self.compared)
        groups: dict[tuple[str, ...], list[str]] = collections.defaultdict(list)
        for name, results in sorted(side_by_side(*(row.data for row in self.compared)).items()):
            on = tuple(label for label, test in zip(everywhere, results) if test is not None and holds(test))
            groups[on].append("::".join(name))
        partial = groups.keys() - {(), everywhere}
        return {on: groups[on] for on in sorted(partial, key=lambda on: [label not in on for label in everywhere])}

    def lines(self) -> list[str]:
        """The lines for a terminal."""
        lines = columns([TITLES, *(row.cells() for row in self.rows)])
        lines += [f"failed on {row.label}: {name}" for row in self.rows for name, _ in _failures(row)]
        lines += [f"tests that execute only on {_listed(on)}: {len(tests)}" for on, tests in self.executes_only.items()]
        return lines + self._remarks()

    def _remarks(self) -> list[str]:
        others = [row.label for row in self.rows if row not in self.compared]
        commits = {row.data["suite"]["commit"] for row in self.rows if row.data}
        remarks = []
        if others:
            why = "because they ran something else or did not finish"
            remarks.append(f"not compared test by test, {why}: {', '.join(others)}")
        if len(commits) > 1:
            remarks.append("the rows belong to different states of the suite")
        return remarks

    def block(self) -> str:
        """The part for a document: a row for each version, and how many tests execute only on some versions."""
        parts = [_markdown(TITLES, [row.cells() for row in self.rows])]
        if self.executes_only:
            counts = [(_listed(on), str(len(tests))) for on, tests in self.executes_only.items()]
            parts.append(_markdown(("tests that execute only on torch", "tests"), counts))
        return "\n\n".join(parts)

    def page(self) -> str:
        """Everything, in Markdown."""
        parts = ["# The suite over versions of torch", self.block(), *self._remarks()]
        for row in (row for row in self.rows if row.data):
            if failures := [(f"`{name}`", test["outcome"], test["reason"]) for name, test in _failures(row)]:
                parts += [f"## Failed on {row.label}", _markdown(("test", "outcome", "reason"), failures)]
            names = ("tests", "subtests", "kind", "reason")
            if skips := [tuple(str(each[name]) for name in names) for each in row.data["skips"]]:
                parts += [f"## Skipped on {row.label}", _markdown(names, skips)]
        for verb, groups in (("execute", self.executes_only), ("exist", self.exists_only)):
            for on, tests in groups.items():
                parts.append(f"## Tests that {verb} only on {_listed(on)}: {len(tests)}")
                parts.append("\n".join(f"- `{name}`" for name in tests))
        return "\n\n".join(parts) + "\n"


def behavior_lines(output: Path, rows: Sequence[VersionRow]) -> list[str]:
    """What tests do differently on each recorded version than on the one before it."""
    paths = {row.label: output / row.label / BEHAVIOR for row in rows}
    records = [(label, kept_records.load(path)) for label, path in paths.items() if path.exists()]
    lines = []
    for (label, before), (other, after) in itertools.pairwise(records):
        compared = differences.compared(before, after)
        lines.append(f"behavior on {other}, compared with {label} ({plural(len(compared), 'test')}):")
        alike = "nothing differs" if compared else "nothing could be compared"
        lines += differences.lines(differences.differences(before, after)) or [alike]
    return lines


def _failures(row: VersionRow) -> list[tuple[str, Test]]:
    tests = tests_of(row.data).items() if row.data else ()
    return [("::".join(name), test) for name, test in sorted(tests) if State(test["outcome"]).is_bad]


def _listed(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _markdown(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    escaped = [[" ".join(cell.split()).replace("|", "\\|").replace("<", "&lt;") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in (titles, *escaped)]
    return "\n".join([lines[0], "|---" * len(titles) + "|", *lines[1:]])
