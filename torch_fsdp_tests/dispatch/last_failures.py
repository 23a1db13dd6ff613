"""What failed when each test was last run here, for ``--failed``: one file in the folder of reports.

Devices have separate memories, because a test that fails on one device may not even exist on another.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch.atomic import write_text
from torch_fsdp_tests.dispatch.expectations import MalformedList, read_json
from torch_fsdp_tests.dispatch.plan import TestRun
from torch_fsdp_tests.dispatch.result import FileResult
from torch_fsdp_tests.dispatch.results import Results
from torch_fsdp_tests.verdict import Scope, State

FILE = "failed.json"

Failed = dict[str, list[str]]  # names of tests by file; an empty list means the whole file


def load(directory: Path, device: str) -> Failed:
    """The failures on this type of device. Empty if there was no run. Raises :class:`MalformedList`."""
    return _load(directory).get(device, {})


def _load(directory: Path) -> dict[str, Failed]:
    path = directory / FILE
    data: Any = read_json(path) if path.exists() else {}
    if not isinstance(data, dict) or not all(isinstance(files, dict) for files in data.values()):
        raise MalformedList(
            f"{path} does not have the form {{device: {{file: [tests]}}}}: delete it, and run everything"
        )
    return data


def save(directory: Path, device: str, existing: Collection[str], results: Results, remarks: list[str]) -> None:
    """Update the failures on this type of device by a run. ``existing`` are the names of all files that exist."""
    try:
        memory = _load(directory)
    except MalformedList:
        memory = {}
    failed = {name: tests for name, tests in memory.pop(device, {}).items() if name in existing}
    is_narrowed = bool(results.run.patterns) or results.run.rerun_disabled
    parts: dict[str, list[FileResult]] = {}
    for file in results.files:
        parts.setdefault(file.job.part.name, []).append(file)
    for name, its in parts.items():
        left = remembered(failed.pop(name, None), its, is_narrowed)
        if left is not None:
            failed[name] = left
    memory |= {device: failed} if failed else {}
    try:
        write_text(directory / FILE, json.dumps(memory, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        remarks.append(f"--failed will not know about this run: {error}")


def remembered(before: Sequence[str] | None, parts: Sequence[FileResult], is_narrowed: bool) -> list[str] | None:
    """The failures of a file after a run of some parts of it, or None if there are none.

    ``before`` are those before the run. The run says nothing about tests that it did not select. A test that it
    selected and did not find does not exist any more. ``is_narrowed`` is true if not only names selected tests.
    """
    failed, ran = [], set()
    for part in parts:
        for test in part.tests():
            if test.outcome.is_bad and test.scope is not Scope.TEST:
                return []
            if test.outcome.is_bad or (part.is_bad and test.outcome is State.NOT_RUN):
                failed.append(test.name)
            if part.is_bad or test.outcome is not State.NOT_RUN:
                ran.add(test.name)
    is_complete = len(parts) == parts[0].job.part.num_shards and not is_narrowed
    is_complete &= all(part.attempts[-1].matched is not None and not part.was_stopped for part in parts)
    selected = [part.job.part.test for part in parts]
    if before is not None and not before:  # the whole file had failed
        return None if is_complete and selected[0].is_whole and not failed else []
    gone = [name for name in before or () if is_complete and any(part.selected([name]) for part in selected)]
    kept = [name for name in before or () if name not in ran and name not in gone]
    return [*failed, *kept] or None


def narrow(selection: Sequence[TestRun], failed: Mapping[str, list[str]]) -> list[TestRun]:
    """The part of a selection that failed when it was last run."""
    narrowed = []
    for test in selection:
        names = [name for name in failed.get(test.file, ()) if test.selected([name])]
        if names:
            narrowed.append(TestRun(test.file, frozenset(names)))
        elif failed.get(test.file) == []:
            narrowed.append(test)
    return narrowed
