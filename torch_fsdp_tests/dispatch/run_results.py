"""The sum over all files, and the exit status that follows from it."""

from __future__ import annotations

import collections
import dataclasses
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch_fsdp_tests.dispatch import keywords
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.expectations import Entry
from torch_fsdp_tests.dispatch.file_result import FileResult
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.verdict import Scope, State, TestResult, tally


@dataclasses.dataclass
class Results:
    """The results of a run so far."""

    run: RunTests
    entries: Sequence[Entry] = ()
    files: list[FileResult] = dataclasses.field(default_factory=list)
    not_started: list[str] = dataclasses.field(default_factory=list)  # files that did not start before the end
    seconds: float = 0.0
    signal: int | None = None  # the signal that ended the run
    remarks: list[str] = dataclasses.field(default_factory=list)
    under_test: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # expected, until a file reports the facts
    slots: Sequence[str] = ()
    broken: str | None = None  # why the run could not continue
    written: Sequence[str] = ()  # what the run left in the folder of the suite's tests

    def take(self, file: FileResult) -> None:
        """Add the result of a file."""
        self.files.append(file)

    def is_ended(self) -> bool:
        """Whether nothing more can be run, or nothing was."""
        return self.broken is not None or self.signal is not None or bool(self.unknown()) or not self.executed

    def tests(self) -> Iterator[tuple[FileResult, TestResult]]:
        """The result of each test that counts, with its file."""
        return ((file, test) for file in self.files for test in file.tests())

    def counts(self) -> dict[State, int]:
        """The number of tests that count as each of ``COUNTED``. A failure outside of tests counts as a test."""
        return tally(test.outcome for _, test in self.tests())

    @property
    def failed(self) -> int:
        return self.counts()[State.FAILED]

    def failures(self) -> dict[State, int]:
        """The number of tests by kind of failure, the most frequent first."""
        numbers = collections.Counter(test.outcome for _, test in self.tests() if test.outcome.is_bad)
        return dict(numbers.most_common())

    @property
    def executed(self) -> int:
        return sum(test.outcome.is_executed for _, test in self.tests() if test.scope is Scope.TEST)

    def known_failures(self) -> list[dict[str, Any]]:
        """The tests that failed and are listed as failing, each with the list's reason."""
        failures = []
        for file, test in self.tests():
            if test.outcome is State.KNOWN_FAILURE:
                listed = self.entries[file.announced.known[test.name]].words
                failures.append({"test": f"{file.job.part.name}::{test.name}", "listed": listed})
        return failures

    def known_defects(self) -> list[dict[str, Any]]:
        """The defects of torch that tests have shown, each with the names of those tests."""
        return self._by_defect("known_defects", State.KNOWN_DEFECT)

    def fixed_defects(self) -> list[dict[str, Any]]:
        """The expected defects that did not show, each with the tests that passed and the places in them."""
        return self._by_defect("fixed_defects", State.PASSED, State.KNOWN_DEFECT)

    def _by_defect(self, fact: str, *outcomes: State) -> list[dict[str, Any]]:
        rows: dict[str, dict[str, Any]] = {}
        for file, test in self.tests():
            for defect in test.facts.get(fact, ()) if test.outcome in outcomes else ():
                entry = rows.setdefault(defect["id"], {**defect, "places": [], "tests": []})
                entry["places"] += defect.get("places", ())
                entry["tests"].append(f"{file.job.part.name}::{test.name}")
        return [rows[id] for id in sorted(rows)]

    def unlike_release(self) -> list[str]:
        """How the installed torch differs from the release of its version, as far as tests asked for it."""
        all_facts = [attempt.facts for file in self.files for attempt in file.attempts]
        all_facts += [test.facts for _, test in self.tests()]
        return sorted({difference for facts in all_facts for difference in facts.get("unlike_release", ())})

    def unknown(self) -> list[str]:
        """Names inside files that match nothing."""
        return [f"{file.job.part.name}: {words}" for file in self.files for words in file.announced.unknown]

    def unmatched(self) -> str | None:
        """The remark that no test fits any ``-k``, or None."""
        if (
            not self.run.selection.patterns
            or not self.files
            or any(file.tests() or file.was_stopped for file in self.files)
        ):
            return None
        given = " or ".join(f"-k {shlex.quote(pattern)}" for pattern in self.run.selection.patterns)
        return f"no test matches {given}: {keywords.COMPARED}; --list --tests shows them"

    def flaky(self) -> list[str]:
        return [f"{file.name}::{name}" for file in self.files for name in file.flaky()]

    def is_left_empty(self) -> bool:
        """Whether this shard got only parts of long files, and too few tests were selected to fill them."""
        return self.run.selection.num_shards > 1 and all(not f.tests() and f.announced.selected for f in self.files)

    def facts(self) -> dict[str, Any]:
        """The facts about torch and the device: from the first file that reports each, or else as expected."""
        facts = (attempt.facts for file in self.files for attempt in file.attempts)
        return dict(collections.ChainMap(*facts, dict(self.under_test)))

    def list_remarks(self) -> list[str]:
        """Remarks on entries of the lists that match nothing, or whose test now passes."""
        announced = [attempt.announced for file in self.files for attempt in file.attempts]
        matched = {index for each in announced for index in each.matched or ()}
        remarks = []
        for file, test in self.tests():
            entry = file.announced.known.get(test.name)
            if test.outcome is State.PASSED and entry is not None:
                why = self.entries[entry].words
                remarks.append(f"{file.name}::{test.name} passes, but is listed as failing: {why}")
            elif test.outcome is State.PASSED and self.run.selection.rerun_disabled:
                remarks.append(f"{file.name}::{test.name} is listed as disabled and passes")
        # An entry is stale only if this run knows the tests of all files that it may name.
        silent = {f.job.part.name for f in self.files if all(a.announced.matched is None for a in f.attempts)}
        ran = {file.job.part.name for file in self.files} - silent
        complete = not (
            self.run.selection.is_narrowed_by_file or self.run.features.narrow or silent or self.not_started
        )
        foreign = []
        for index, listed in enumerate(self.entries):
            its_file = listed.test.partition("::")[0].removesuffix(".py")
            if index in matched or not (its_file in ran or complete):
                continue
            if listed.upstreams:
                foreign.append(listed.test.removeprefix("*::"))
            else:
                remarks.append(f"the entry {listed.test} ({listed.words}) matches no test")
        if foreign:
            entries = f"{len(foreign)} {'entries' if len(foreign) > 1 else 'entry'} of the disabled and slow lists"
            remarks.append(f"{entries} {'match' if len(foreign) > 1 else 'matches'} no test here, such as {foreign[0]}")
        return remarks

    def written_remarks(self) -> list[str]:
        """A sentence for each path that the run left in the folder of the tests, with the tests that ran meanwhile."""
        by_path: dict[str, list[str]] = {}
        for file, test in self.tests():
            for path in test.facts.get("written", ()):
                by_path.setdefault(path, []).append(f"{file.job.part.name}::{test.name}")
        words = "was left in the folder of the tests: tests may write only into temporary folders"
        whiles = {path: f", while {' or '.join(tests)} ran" for path, tests in by_path.items()}
        return [f"{path} {words}{whiles.get(path, '')}" for path in self.written]

    def exit_code(self) -> ExitStatus:
        status = self._status()
        for feature in self.run.features.values():
            status = feature.status(status)
        return status

    def _status(self) -> ExitStatus:
        if self.broken is not None:
            return ExitStatus.BROKEN
        if self.signal is not None:
            return ExitStatus(128 + self.signal)  # as shells number it
        if self.failed or (self.run.execution.fail_on_flaky and self.flaky()):
            return ExitStatus.FAILED
        if self.written:
            return ExitStatus.FAILED
        if self.unknown():
            return ExitStatus.USAGE_ERROR
        if not self.executed:
            return ExitStatus.OK if self.is_left_empty() else ExitStatus.NOTHING_RAN
        return ExitStatus.FAILED if self.executed < self.run.execution.minimum_executed else ExitStatus.OK
