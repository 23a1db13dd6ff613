"""A run in rounds. A round is a run of all jobs."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch_fsdp_tests.dispatch import stages
from torch_fsdp_tests.dispatch.file_result import FileResult
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.dispatch.stages import Stage
from torch_fsdp_tests.extension import Conclusion, Feature, Rerun
from torch_fsdp_tests.extensions.rounds.folding import Folded, RoundRecord
from torch_fsdp_tests.verdict import COUNTED, FILE_ITSELF, State, clean, closing_line, plural, seconds


class Rounds(Feature):
    """The rounds so far: every file folded over them, and the records of its tests."""

    _last: Results  # of the last round

    def __init__(self, run: RunTests, repeat: int | None, duration: float | None) -> None:
        self._run, self._repeat, self._duration = run, repeat, duration
        self.number = 0  # of the running round, counted from 1
        self.complete = 0
        self.failed = 0  # rounds in which something failed
        self._files: dict[tuple[str, int], Folded] = {}
        self.records: dict[tuple[str, int], dict[str, RoundRecord]] = collections.defaultdict(dict)
        self._failed_in = 0  # the last round in which something failed
        self._counts: collections.Counter[State] = collections.Counter()  # tests of this round

    def problem(self, run: RunTests) -> str | None:
        asked = {"--list": run.output.list_files, "--dry-run": run.output.dry_run}
        other = next((option for option, is_set in asked.items() if is_set), None)
        if other or run.execution.reruns:
            words = "--repeat and --for cannot be used with"
            return f"{words} {other or '--reruns, which repeats only what failed'}"
        return None

    def drive(self, once: Callable[[], Results], say: Callable[[str], None]) -> Results:
        began = time.monotonic()
        for number in numbers(self._repeat, self._duration, lambda: self.is_over):
            self.number, start = number, time.monotonic()
            self._counts.clear()
            self._last = last = once()
            is_complete = not last.not_started and last.signal is None and last.broken is None
            self.complete += is_complete
            now = time.monotonic()
            say(self._line(now - start, now - began, is_complete))
        left = [name for name in last.not_started if not any(name == file for file, _ in self._files)]
        return dataclasses.replace(last, files=self.files, not_started=left, seconds=time.monotonic() - began)

    @property
    def files(self) -> list[FileResult]:
        """Each file with the worst result of each test."""
        return [folded.result for folded in self._files.values()]

    @property
    def is_over(self) -> bool:
        """Whether no other round begins."""
        return self._last.is_ended() or (bool(self.failed) and not self._run.execution.keep_going)

    def _line(self, took: float, since: float, is_complete: bool) -> str:
        """One line for each round. It took ``took`` seconds, and the first began ``since`` seconds ago."""
        counts = {state: self._counts[state] for state in COUNTED}
        word = "FAILED" if counts[State.FAILED] else "ok" if is_complete else "stopped"
        of = f"/{self._repeat}" if self._repeat else ""
        limit = f" ({seconds(since)} of {seconds(self._duration)})" if self._duration else ""
        number = f"{self.number:{len(of[1:])}d}"
        return f"round {number}{of} {word:7s} {closing_line(counts)}  {seconds(took)}{limit}"

    def stage(self, stage: Stage) -> Stage:
        """Of a round, only failures are shown, and the output only of new ones."""
        match stage:
            case stages.FileEnded(file):
                self._counts.update(result.outcome.counted_as for result in file.tests())
                is_new = self._take(file)
                is_shown = file.is_bad or file.announced.unknown or self._run.output.verbose
                results = dataclasses.replace(stage.results, files=self.files)
                return dataclasses.replace(stage, results=results, is_new=is_new, is_shown=bool(is_shown))
            case stages.Progress():
                return dataclasses.replace(stage, about=f"round {self.number}")
        return stage

    def _take(self, file: FileResult) -> bool:
        """Add the result of a file in this round. Returns whether a test of it failed that had not failed before."""
        key = file.job.key
        records = self.records[key]
        is_new_failure = False
        for test in file.tests():
            record = records.setdefault(test.name, RoundRecord())
            is_new_failure |= test.outcome.is_bad and not record.failed
            record.take(self.number, test)
        if file.is_bad and self._failed_in != self.number:
            self._failed_in, self.failed = self.number, self.failed + 1
        if key in self._files:
            self._files[key].add(self.number, file)
        else:
            self._files[key] = Folded(file)
        return is_new_failure

    def conclude(self, results: Results, rerun: Rerun, jobs: Any) -> Conclusion:
        lines = []
        for file, test in results.tests():
            if test.outcome.is_bad:
                summary = self.records[file.job.key][test.name].summary()
                lines.append(f"{file.name}{' ' if test.name == FILE_ITSELF else '::'}{test.name} {clean(summary)}")
        cut = f", and part of round {self.number}" if self.number > self.complete else ""
        failed = f"; {plural(self.failed, 'round')} failed" if self.failed else ""
        lines.append(f"{plural(self.complete, 'complete round')}{cut}{failed}")
        return Conclusion(lines)

    def add_to_report(self, data: dict[str, Any], results: Results) -> None:
        data["rounds"] = {
            "asked": self._repeat,
            "limit": self._duration,
            "complete": self.complete,
            "failed": self.failed,
        }
        for file in data["files"]:
            for test in file["tests"]:
                record = self.records[file["file"], file["shard_id"]][test["test"]]
                rounds = record.to_json()
                test |= record.rank_times() | {"rounds": rounds}
                test["seconds"] = rounds["seconds"].get("median", test["seconds"])

    def properties(self, results: Results) -> Mapping[str, str]:
        return {"rounds": str(self.complete)}  # each file has the sum of the rounds


def numbers(
    most: int | None, limit: float | None, is_over: Callable[[], bool], clock: Callable[[], float] = time.monotonic
) -> Iterator[int]:
    """The rounds to run, counted from 1: at most ``most``, and none that would end more than ``limit`` seconds after
    the first began, if it takes as long as the longest so far. The first always runs.
    """
    began, longest = clock(), 0.0
    for number in itertools.count(1):
        start = clock()
        yield number
        longest = max(longest, clock() - start)
        in_time = limit is None or clock() + longest <= began + limit
        if number == most or not in_time or is_over():
            return
