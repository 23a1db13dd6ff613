"""The results of all versions side by side, as data."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_fsdp_tests.verdict import State, tally
from torch_fsdp_tests.versions import facts
from torch_fsdp_tests.versions.facts import Summary
from torch_fsdp_tests.versions.runs import VersionRun

Names = list[str]  # of tests, as file::Class.test


@dataclasses.dataclass
class Row:
    """One version in numbers. Tests that show known defects, and known failures, are counted separately."""

    label: str
    torch: str
    python: str
    device: str
    what: str
    commit: str
    is_dirty: bool
    seconds: float
    passed: int
    failed: int
    skipped: int
    known_defects: int  # tests
    known_failures: int
    not_run: int
    defects: Names  # ids of the registry
    skips: list[dict[str, Any]]  # reason, and the number of tests and subtests that it skipped
    failures: list[dict[str, Any]]  # test, outcome and reason
    problem: str


@dataclasses.dataclass
class Only:
    """Tests that exist, or execute, on the same versions."""

    on: list[str]  # labels
    tests: Names


@dataclasses.dataclass
class Table:
    """The whole table. Versions are compared test by test if they ran the same selection to its end."""

    rows: list[Row]
    compared: list[str]  # labels, the oldest torch first
    executes_only: list[Only]
    exists_only: list[Only]
    facts: Summary
    tests: dict[str, dict[str, dict[str, str]]]  # by name and label: outcome and reason
    remarks: list[str]

    def as_json(self) -> dict[str, Any]:
        return {"version": 1, **dataclasses.asdict(self)}


def make(runs: Sequence[VersionRun], asked: Iterable[str]) -> Table:
    """Make the table of these runs, the oldest torch first. ``asked`` has the names of facts that are in use."""
    runs = sorted(runs, key=lambda run: (facts.numbers(run.torch or run.label), run.label))
    complete = [run for run in runs if run.is_complete]
    what = complete[-1].what if complete else ""
    compared = [run for run in complete if run.what == what]
    by_label = {run.label: _tests(run) for run in compared}
    tests: dict[str, dict[str, dict[str, str]]] = {}
    for label, results in by_label.items():
        for name, test in results.items():
            tests.setdefault(name, {})[label] = {"outcome": test["outcome"], "reason": test["reason"]}
    everywhere = list(by_label)
    executing = {
        name: [label for label, test in on.items() if State(test["outcome"]).is_executed] for name, on in tests.items()
    }
    return Table(
        rows=[_row(run) for run in runs],
        compared=everywhere,
        executes_only=_grouped({name: on for name, on in executing.items() if on}, everywhere),
        exists_only=_grouped({name: list(on) for name, on in tests.items()}, everywhere),
        facts=facts.summarize({run.torch or run.label: run.facts for run in runs if run.facts}, asked),
        tests=dict(sorted(tests.items())),
        remarks=_remarks(runs, compared),
    )


def _tests(run: VersionRun) -> dict[str, Mapping[str, Any]]:
    return {f"{file['file']}::{test['test']}": test for file in run.files for test in file["tests"]}


def _grouped(places: Mapping[str, list[str]], everywhere: list[str]) -> list[Only]:
    """Group tests by their versions. Tests of all versions are left out. The newest versions come last."""
    groups: dict[tuple[str, ...], Names] = collections.defaultdict(list)
    for name in sorted(places):
        if places[name] != everywhere:
            groups[tuple(places[name])].append(name)
    order = sorted(groups, key=lambda on: [label in on for label in everywhere], reverse=True)
    return [Only(list(on), groups[on]) for on in order]


def _row(run: VersionRun) -> Row:
    tests = _tests(run)
    counts = tally(test["outcome"] for test in tests.values())
    bad = [
        {"test": name, "outcome": test["outcome"], "reason": test["reason"]}
        for name, test in sorted(tests.items())
        if State(test["outcome"]).is_bad
    ]
    shown = {defect["id"] for defect in run.known_defects if not tests.keys().isdisjoint(defect["tests"])}
    return Row(
        label=run.label,
        torch=run.torch or run.label,
        python=run.python or "",
        device=run.device or "",
        what=run.what,
        commit=run.commit,
        is_dirty=run.is_dirty,
        seconds=round(run.seconds, 3),
        passed=counts[State.PASSED],
        failed=counts[State.FAILED],
        skipped=counts[State.SKIPPED],
        known_defects=counts[State.KNOWN_DEFECT],
        known_failures=counts[State.KNOWN_FAILURE],
        not_run=counts[State.NOT_RUN],
        defects=sorted(shown),
        skips=_skips(tests.values()),
        failures=bad,
        problem=run.problem,
    )


def _skips(tests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every reason to skip, the most frequent first."""
    whole: collections.Counter[str] = collections.Counter()
    parts: collections.Counter[str] = collections.Counter()
    for test in tests:
        if test["outcome"] == State.SKIPPED.value:
            whole[test["reason"]] += 1
        else:
            parts.update(test["subtests_skipped"])
    reasons = sorted({*whole, *parts}, key=lambda reason: (-whole[reason], -parts[reason], reason))
    return [{"reason": reason, "tests": whole[reason], "subtests": parts[reason]} for reason in reasons]


def _remarks(runs: Sequence[VersionRun], compared: Sequence[VersionRun]) -> list[str]:
    remarks = []
    others = [run.label for run in runs if run not in compared and run.files]
    if compared and others:
        remarks.append(
            f"not compared test by test, because they ran something else or did not finish: {', '.join(others)}"
        )
    if len({run.digest for run in runs if run.files}) > 1:
        remarks.append("the rows belong to different states of the suite")
    return remarks
