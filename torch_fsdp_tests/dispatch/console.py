"""The output while files run and at the end: lines in a log, and a status line that is rewritten on a terminal."""

from __future__ import annotations

import collections
import errno
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from torch_fsdp_tests.device import machine
from torch_fsdp_tests.dispatch import devices, stages
from torch_fsdp_tests.dispatch.atomic import naming
from torch_fsdp_tests.dispatch.file_process import TestProcess
from torch_fsdp_tests.dispatch.file_result import Attempt, FileResult
from torch_fsdp_tests.dispatch.repeat import repeat_command
from torch_fsdp_tests.dispatch.run_plan import RunPlan
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.dispatch.stages import Stage
from torch_fsdp_tests.verdict import (
    FILE_ITSELF,
    Scope,
    State,
    TestResult,
    clean,
    closing_line,
    first_few,
    plural,
    seconds,
    skip_rows,
)

GREEN, RED, YELLOW, BLUE = 32, 31, 33, 34  # the color codes of terminals
_COLOURS = {"ok": GREEN, "listed": GREEN, "FAILED": RED, "unknown": RED, "flaky": YELLOW, "skipped": BLUE}
RULE = "=" * 78
THIN_RULE = "-" * 78
REFRESH = 1.0  # seconds between two updates of the status line on a terminal
QUIET = 30.0  # seconds without output after which a log gets a progress line


def wants_colors(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether to use colors: only on a terminal, and unless one of the usual variables forbids it."""
    if environment.get("NO_COLOR") or environment.get("FORCE_COLOR"):
        return not environment.get("NO_COLOR")
    return stream.isatty() and environment.get("TERM") != "dumb"


class Console:
    """Prints to one stream, and flushes each time. On a terminal the last line is a status, rewritten in place."""

    def __init__(self, run: RunTests, planned: RunPlan, stream: TextIO | None = None) -> None:
        self._run, self._total, self._slots = run, len(planned.jobs), len(planned.slots)
        self._stream = stream or (sys.stderr if run.output.list_tests else sys.stdout)
        # What is known at first; the first file with ranks reports the rest.
        self.under_test = devices.under_test(planned.device_set, run, planned.ranks)
        self._done = self._failures = self._tests = 0
        self.is_terminal = self._stream.isatty()
        self._colored = wants_colors(self._stream, os.environ)
        # Seconds between two progress reports: a rewritten line on a terminal, or lines in a log.
        self.refresh = REFRESH if self.is_terminal else QUIET
        self._printed_at = time.monotonic()
        self._status = ""
        self._introduced = False
        self._machine = ""  # the facts about the machine in one line, when a file has reported them
        self._width = len(str(self._total))

    def say(self, text: str = "") -> None:
        if not self._introduced:
            self.introduce()
        self._printed_at = time.monotonic()
        self._clear()
        self._write(f"{text}\n")
        self._redraw()

    def _write(self, text: str) -> None:
        """Write at once. A terminal that is gone does not end the run, because its end is reported by SIGHUP."""
        try:
            with naming("stderr" if self._stream is sys.stderr else "stdout"):
                self._stream.write(text)
                self._stream.flush()
        except OSError as error:
            if error.errno != errno.EIO or not self.is_terminal:
                raise
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def _paint(self, text: str, color: int | None) -> str:
        return f"\x1b[{color}m{text}\x1b[0m" if self._colored and color else text

    def take(self, stage: Stage) -> None:
        """Show a stage of the run."""
        match stage:
            case stages.Began():
                self._done = self._failures = self._tests = 0
                self._learn(self.under_test)  # now, if all of it is known
            case stages.Learned(facts):
                self._learn(facts)
            case stages.FileIsSlow(process, now):
                self._slow(process, now)
            case stages.Progress():
                self._progress(stage)
            case stages.FileEnded(file):
                self._done += 1
                self._tests += sum(result.scope is Scope.TEST for result in file.tests())
                self._failures += file.is_bad
                if stage.is_shown:
                    self._file_done(file, stage.is_new)
            case stages.Said(words):
                self.say(words)
            case stages.RunEnded(results, lines):
                self._end(results, lines)

    def _learn(self, facts: Mapping[str, Any]) -> None:
        """Print the first line when the first file reports what it tests on, and then what the machine is."""
        if not self._introduced and facts.get("backend"):
            names = ("torch", "device", "backend", "ranks", "shared")
            self.under_test |= {name: facts[name] for name in names if facts.get(name) is not None}
            self.introduce()
        if self._introduced and not self._machine and facts.get("machine"):
            self._machine = machine.in_one_line(facts["machine"])
            self.say(self._machine)

    def introduce(self) -> None:
        """Print the first line, with what is known."""
        self._introduced = True
        known = self.under_test
        about = [f"torch {known.get('torch') or 'not installed'}"]
        about += [f"{name} {known[name]}" for name in ("device", "backend", "ranks") if known.get(name)]
        if known.get("shared"):
            about.append("devices shared")
        about += [f"up to {plural(self._slots, 'file')} at a time", plural(devices.cores(), "core")]
        about.append(f"seed {self._run.execution.seed}")
        about += filter(None, (feature.headline() for feature in self._run.features.values()))
        self.say(", ".join(about))

    def _file_done(self, file: FileResult, is_new_failure: bool) -> None:
        """Print one line for each file, and the full output of a file that failed, if it ``is_new_failure``."""
        self._set_status("")  # the status line about this file is outdated
        results = file.tests()
        word = word_for(file)
        place = f"[{self._done:{self._width}d}/{self._total}]"
        if self._run.output.list_tests and word not in _PROBLEMS:
            self.say(f"{place} {_listed(file)}")
            return
        outcome = self._paint(f"{word:7s}", _COLOURS.get(word))
        self.say(f"{place} {outcome} {file.name}  {', '.join(_counted(file))}  {seconds(file.seconds)}")
        if self._run.output.verbose:
            for test in results:
                reason = f": {clean(test.reason)}" if test.reason else ""
                self.say(f"    {test.outcome.value:13s} {test.name}  {seconds(test.seconds)}{reason}")
        notes = dict.fromkeys(note for attempt in file.attempts for note in attempt.notes)
        for note in (*notes, *(note for test in results for note in test.notes)):
            self.say(f"    note: {note}")
        self._show_output(file, is_new_failure)

    def _show_output(self, file: FileResult, is_new_failure: bool) -> None:
        """Print the output of a file that failed or is flaky; of any other file if the run asks for it."""
        if file.is_bad:
            if is_new_failure:
                self._failure(file)
            else:
                self._outcomes(file.tests())
        elif file.is_flaky:
            first = file.attempts[0]
            self._output(first, first.tests, f"output of the first attempt at {file.name}, which failed")
        elif self._run.output.show_output:
            self.say(f"{file.attempts[-1].output.rstrip()}\n")

    def _output(self, attempt: Attempt, tests: Iterable[TestResult], title: str) -> None:
        """Print the full output of a process, and then a line for each of these tests that failed."""
        self.say(f"{THIN_RULE}\n{title}\n{THIN_RULE}\n{attempt.output.rstrip()}\n{THIN_RULE}")
        self._outcomes(tests)

    def _outcomes(self, tests: Iterable[TestResult]) -> None:
        for test in tests:
            if test.outcome.is_bad:
                self.say(f"{test.outcome.value}: {test.name}{f': {clean(test.reason)}' if test.reason else ''}")

    def _failure(self, file: FileResult) -> None:
        on = machine.in_one_line(file.attempts[-1].facts.get("machine", {}))
        self._output(file.attempts[-1], file.tests(), f"output of {file.name}{f', on {on}' if on else ''}")
        left = [test for test in file.tests() if test.outcome is State.NOT_RUN]
        if left:
            self.say(f"tests not reached: {', '.join(test.name for test in left)}")
        self.say(f"to repeat: {repeat_command(self._run, file.job.part.name, self._facts(file))}\n")

    def _facts(self, file: FileResult) -> dict[str, Any]:
        return self.under_test | file.attempts[-1].facts

    def _slow(self, process: TestProcess, now: float) -> None:
        """Report a running file that takes longer than expected."""
        expected = process.job.part.time
        about = f" (expected {seconds(expected)})" if expected else ""
        at = f", now at {process.running}" if process.running else ""
        self.say(f"slow: {process.job.part.name} has run for {seconds(now - process.began)}{about}{at}")

    def _progress(self, stage: stages.Progress) -> None:
        """Rewrite the status line. In a log, print a line instead if nothing was printed for a while."""
        if not self._introduced or (not self.is_terminal and time.monotonic() < self._printed_at + self.refresh):
            return
        running, now, left = stage.running, stage.now, stage.left
        ages = ", ".join(f"{p.job.part.name.rpartition('/')[2]} {seconds(now - p.began)}" for p in running)
        tests = self._tests + sum(result.scope is Scope.TEST for p in running for result in p.results)
        parts = [stage.about] if stage.about else []
        parts += [f"[{self._done}/{self._total}] {plural(tests, 'test')} done", f"{self._failures} failed"]
        if left is not None:
            parts.append(f"about {seconds(left)} left")
        if not self.is_terminal:
            self.say(f"{', '.join(parts)}: {ages}")
            return
        columns = shutil.get_terminal_size().columns or 80  # some terminals say 0, which Python 3.10 passes on
        self._set_status(f"{', '.join(parts)}: {ages}"[: columns - 1])

    def _clear(self) -> None:
        if self._status:
            self._write("\r\x1b[2K")

    def _set_status(self, text: str) -> None:
        self._clear()
        self._status = text
        self._redraw()

    def _redraw(self) -> None:
        if self._status:
            self._write(self._status)

    def _say_skips(self, rows: Sequence[Mapping[str, Any]]) -> None:
        kinds: collections.Counter[str] = collections.Counter()
        for row in rows:
            kinds[row["kind"]] += row["tests"]
        counts = ", ".join(f"{kind}: {count}" for kind, count in kinds.most_common() if count)
        for what, skipped in (("tests", f"skipped ({counts})"), ("subtests", "skipped subtests of tests that ran")):
            reasons = sorted((row for row in rows if row[what]), key=lambda row: -int(row[what]))
            if reasons:
                self.say(f"{skipped}, by reason:")
            for row in reasons:
                self.say(f"  {row[what]:5d}  {next(iter(row['reason'].strip().splitlines()), 'no reason given')}")

    def _end(self, results: Results, remarks: Iterable[str]) -> None:
        """Print everything that follows after all files. The closing line comes last."""
        self._set_status("")
        counts = results.counts()
        self.say()
        self._say_skips(skip_rows(test.skips_to_json() for _, test in results.tests()))
        self._say_failures(results)
        for words in (*_left_out(results, counts[State.NOT_RUN]), *remarks):
            self.say(words)
        for words in (*_fixed_defects(results), *results.unlike_release(), *_proves_too_little(results)):
            self.say(words)
        self.say(_duration(results))
        if known := results.known_defects():
            self.say(f"{plural(len(known), 'known defect')} of torch reproduced (python -m torch_fsdp_tests.defects)")
        if results.signal is not None:
            self.say(self._paint(f"stopped by {signal.Signals(results.signal).name} before all tests had run", YELLOW))
        color = RED if results.failed else YELLOW if results.signal else GREEN if counts[State.PASSED] else BLUE
        self.say(self._paint(closing_line(counts), color))

    def _say_failures(self, results: Results) -> None:
        """Print each failure with its reason and the command that repeats it."""
        bad = [(file, test) for file, test in results.tests() if test.outcome.is_bad]
        if not bad:
            return
        failures = results.failures()
        by_kind = ", ".join(f"{state.value}: {count}" for state, count in failures.items())
        self.say(self._paint("failures:" if failures.keys() == {State.FAILED} else f"failures ({by_kind}):", RED))
        for file, test in bad:
            self.say(f"  {test.outcome.value}: {file.name}{' ' if test.name == FILE_ITSELF else '::'}{test.name}")
            if test.reason:
                self.say(f"    {clean(test.reason)}")
            self.say(f"    {repeat_command(self._run, file.job.part.name, self._facts(file), test)}")


_PROBLEMS = ("unknown", "empty", "FAILED")  # words of :func:`word_for` for a file that has no list of tests


def word_for(file: FileResult) -> str:
    """The outcome of a file in one word: the first that applies."""
    words = {
        "unknown": bool(file.announced.unknown),
        "empty": not file.tests() and not file.was_stopped,
        "FAILED": file.is_bad,
        "stopped": file.was_stopped,
        "flaky": file.is_flaky,
        "ok": any(test.outcome.is_executed and test.scope is Scope.TEST for test in file.tests()),
    }
    return next((word for word, applies in words.items() if applies), "skipped")


def _listed(file: FileResult) -> str:
    if file.stopped_early:
        return f"stopped {file.name}  before its tests were known"
    return f"listed  {file.name}  {plural(sum(test.scope is Scope.TEST for test in file.tests()), 'test')}"


def _counted(file: FileResult) -> list[str]:
    """The number of a file's tests, and the other numbers that are not 0."""
    tests = [test for test in file.tests() if test.scope is Scope.TEST]
    counts = {
        "failed fixture": sum(result.is_fixture for result in file.tests()),
        "skipped": file.count(State.SKIPPED),
        "skipped in part": sum(bool(test.skipped_in_part) for test in tests),
        "known failure": file.count(State.KNOWN_FAILURE),
        "not run": file.count(State.NOT_RUN),
        "attempt": len(file.attempts) if len(file.attempts) > 1 else 0,
    }
    nouns = ("failed fixture", "known failure", "attempt")
    about = [plural(count, name) if name in nouns else f"{count} {name}" for name, count in counts.items() if count]
    return [plural(sum(test.outcome is not State.NOT_RUN for test in tests), "test"), *about]


def _left_out(results: Results, not_run: int) -> Iterator[str]:
    """The tests that need a second look or did not run."""
    for words in results.flaky():
        yield f"flaky (failed, and passed in a later process): {words}"
    if not_run:
        yield f"{plural(not_run, 'test')} not reached"
    if results.not_started:
        yield f"{plural(len(results.not_started), 'file')} not started: {first_few(results.not_started)}"


def _fixed_defects(results: Results) -> Iterator[str]:
    for defect in results.fixed_defects():
        places = f" at {', '.join(defect['places'])}" if defect["places"] else ""
        tests = ", ".join(defect["tests"])
        yield f"fixed in this PyTorch: {defect['id']} ({defect['title']}), as shown by {tests}{places}"


def _proves_too_little(results: Results) -> Iterator[str]:
    """Why a run without a failure shows too little, if so."""
    run = results.run
    if results.files and results.is_left_empty():
        shard = f"shard {run.selection.shard} of {run.selection.num_shards}"
        yield f"{shard} has only parts of files, and none of these parts has a test"
    elif results.files and not results.executed and not results.failed and results.signal is None:
        if (unmatched := results.unmatched()) is not None:
            yield unmatched
        yield f"{RULE}\nNO TEST WAS EXECUTED: this run proves nothing\n{RULE}"
    elif results.executed < (least := run.execution.minimum_executed):
        yield f"too few tests: {results.executed} were executed, but --minimum-executed is {least}"


def _duration(results: Results) -> str:
    serial = seconds(sum(file.seconds for file in results.files))
    return f"{plural(len(results.files), 'file')} in {seconds(results.seconds)} ({serial} of serial time)"
