"""What failed when each test was last run here, for ``--failed``: one file in the folder of reports.

Devices have separate memories, because a test that fails on one device may not even exist on another.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch.atomic import write_text
from torch_fsdp_tests.dispatch.expectations import MalformedList, read_json
from torch_fsdp_tests.dispatch.file_result import FileResult
from torch_fsdp_tests.dispatch.plan import TestRun
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.verdict import Scope, State, TestResult

FILE = "failed.json"


@dataclasses.dataclass(frozen=True)
class Failed:
    """The failures of a file: some tests, or the file itself, all of which has to run again then."""

    tests: tuple[str, ...] = ()
    whole: bool = False

    def __bool__(self) -> bool:
        return self.whole or bool(self.tests)

    @classmethod
    def from_json(cls, names: Sequence[str]) -> Failed:
        return cls(tuple(names), whole=not names)

    def to_json(self) -> list[str]:
        """The names of the tests; an empty list is the whole file."""
        return [] if self.whole else list(self.tests)


WHOLE_FILE = Failed(whole=True)


def load(directory: Path, device: str) -> dict[str, Failed]:
    """The failures on this type of device by file. Empty if there was no run. Raises :class:`MalformedList`."""
    return {file: Failed.from_json(names) for file, names in _load(directory).get(device, {}).items()}


def _load(directory: Path) -> dict[str, dict[str, list[str]]]:
    path = directory / FILE
    data: Any = read_json(path) if path.exists() else {}
    if not isinstance(data, dict) or not all(isinstance(files, dict) for files in data.values()):
        form = "{device: {file: [tests]}}"
        raise MalformedList(f"{path} does not have the form {form}: delete it, and run everything")
    return data


def save(directory: Path, device: str, existing: Collection[str], results: Results, remarks: list[str]) -> None:
    """Update the failures on this type of device by a run. ``existing`` are the names of all files that exist."""
    try:
        memory = _load(directory)
    except MalformedList:
        memory = {}
    before = {file: Failed.from_json(names) for file, names in memory.pop(device, {}).items() if file in existing}
    is_narrowed = bool(results.run.selection.patterns) or results.run.selection.rerun_disabled
    parts: dict[str, list[FileResult]] = {}
    for file in results.files:
        parts.setdefault(file.job.part.name, []).append(file)
    after = before | {name: remembered(before.get(name, Failed()), its, is_narrowed) for name, its in parts.items()}
    failed = {name: failures.to_json() for name, failures in after.items() if failures}
    memory |= {device: failed} if failed else {}
    try:
        write_text(directory / FILE, json.dumps(memory, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        remarks.append(f"--failed will not know about this run: {error}")


def remembered(before: Failed, parts: Sequence[FileResult], is_narrowed: bool) -> Failed:
    """The failures of a file after a run of some parts of it.

    ``before`` are those before the run. The run says nothing about tests that it did not select. A test that it
    selected and did not find does not exist any more. ``is_narrowed``: not only names selected tests, but also ``-k``.
    """
    tests = [(part, test) for part in parts for test in part.tests()]
    if any(test.outcome.is_bad and test.scope is not Scope.TEST for _, test in tests):
        return WHOLE_FILE
    failed = [test.name for part, test in tests if test.outcome.is_bad or _was_cut_off(part, test)]
    decided = {test.name for part, test in tests if test.outcome is not State.NOT_RUN or _was_cut_off(part, test)}
    is_complete = len(parts) == parts[0].job.part.num_shards and not is_narrowed
    is_complete &= all(part.announced.matched is not None and not part.was_stopped for part in parts)
    selected = [part.job.part.test for part in parts]
    if before.whole:
        all_passed = is_complete and selected[0].is_whole and not failed
        return Failed() if all_passed else WHOLE_FILE
    if is_complete:
        decided |= {name for name in before.tests if any(part.selected([name]) for part in selected)}
    return Failed((*failed, *(name for name in before.tests if name not in decided)))


def _was_cut_off(part: FileResult, test: TestResult) -> bool:
    """Whether a test did not run because of a failure before it."""
    return part.is_bad and test.outcome is State.NOT_RUN


def narrow(selection: Sequence[TestRun], failed: Mapping[str, Failed]) -> list[TestRun]:
    """The part of a selection that failed when it was last run."""
    narrowed = []
    for test in selection:
        failures = failed.get(test.file, Failed())
        if failures.whole:
            narrowed.append(test)
        elif names := [name for name in failures.tests if test.selected([name])]:
            narrowed.append(TestRun(test.file, frozenset(names)))
    return narrowed
