"""The failures of the last run, for ``--failed``: one file in the folder of reports."""

from __future__ import annotations

import json
from pathlib import Path

from torch_fsdp_tests.dispatch.atomic import write_text
from torch_fsdp_tests.dispatch.expectations import MalformedList, read_json
from torch_fsdp_tests.dispatch.plan import TestRun
from torch_fsdp_tests.dispatch.results import Results
from torch_fsdp_tests.verdict import Scope, State

FILE = "failed.json"

Failed = dict[str, list[str]]  # names of tests by file; an empty list means the whole file


def load(directory: Path) -> Failed:
    """Load the failures of the last run. Empty if there was no last run. Raises :class:`MalformedList`."""
    path = directory / FILE
    if not path.exists():
        return {}
    data = read_json(path)
    if not isinstance(data, dict) or not all(isinstance(names, list) for names in data.values()):
        raise MalformedList(f"{path} does not have the form {{file: [tests]}}: delete it, and run everything")
    return data


def save(directory: Path, results: Results, remarks: list[str]) -> None:
    """Store the failures of a run. Also keep those of earlier runs in files that this run did not run."""
    try:
        failed = load(directory)
    except MalformedList:
        failed = {}
    for file in results.files:
        name = file.job.part.name
        tests = file.tests()
        before = failed.pop(name, [])
        if file.is_bad:
            bad = [test for test in tests if test.outcome.is_bad or test.outcome is State.NOT_RUN]
            failed[name] = [test.name for test in bad] if all(test.scope is Scope.TEST for test in bad) else []
        # A run of some tests says nothing about the others.
        elif left := [test for test in before if test not in {result.name for result in tests}]:
            failed[name] = left
    try:
        write_text(directory / FILE, json.dumps(failed, indent=1, sort_keys=True) + "\n")
    except OSError as error:
        remarks.append(f"--failed will not know about this run: {error}")


def narrow(test: TestRun, names: list[str]) -> TestRun:
    """Return the part of a selected file that failed last time."""
    if not names or test.included:
        return test
    return TestRun(test.file, frozenset(names), test.excluded)
