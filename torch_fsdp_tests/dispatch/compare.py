"""What differs between two reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch.expectations import MalformedList, read_json
from torch_fsdp_tests.verdict import State

SLOWER_BY = 1.5  # times the earlier seconds
SLOWER_AT_LEAST = 1.0  # seconds more; below that machines differ more than tests
Tests = dict[str, dict[str, Any]]  # of a report, by file::Class.test


def load(path: Path) -> Tests:
    """The tests of a ``report.json``. Raises :class:`MalformedList` for what is none."""
    report = read_json(path)
    try:
        tests = tests_of(report)
        for test in tests.values():
            if not State(test["outcome"]) or not isinstance(test["seconds"] + 0.0, float):
                raise TypeError
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedList(f"--compare: {path} is no report.json of run_test.py") from error
    return tests


def tests_of(report: Any) -> Tests:
    return {f"{file['file']}::{test['test']}": test for file in report["files"] for test in file["tests"]}


def lines(before: Tests, after: Tests) -> list[str]:
    """A line for each test that is gone, new, newly skipped, newly failing or slower."""
    kinds = {"gone": sorted(before.keys() - after.keys()), "new": sorted(after.keys() - before.keys())}
    for name in sorted(before.keys() & after.keys()):
        was, now = before[name], after[name]
        earlier, state = State(was["outcome"]), State(now["outcome"])
        if earlier.is_executed and not state.is_executed:
            kinds.setdefault(f"newly {state.value}", []).append(f"{name}: {now['reason']}")
        elif state.is_bad and not earlier.is_bad:
            kinds.setdefault("newly failing", []).append(name)
        elif now["seconds"] > max(was["seconds"] * SLOWER_BY, was["seconds"] + SLOWER_AT_LEAST):
            kinds.setdefault("slower", []).append(f"{name}: {was['seconds']:.1f}s, now {now['seconds']:.1f}s")
    found = [f"{kind}: {name}" for kind, names in sorted(kinds.items()) for name in names]
    return ["compared with the earlier report:", *found] if found else ["nothing differs from the earlier report"]
