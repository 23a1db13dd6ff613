"""What a person sees while files run and at the end: lines in a log, and one that is rewritten on a terminal."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from torch_fsdp_tests.dispatch import devices
from torch_fsdp_tests.dispatch.plan import ShardedTest
from torch_fsdp_tests.dispatch.process import TestProcess
from torch_fsdp_tests.dispatch.result import FILE_ITSELF, FileResult, Outcome, TestResult
from torch_fsdp_tests.dispatch.results import Results
from torch_fsdp_tests.dispatch.runtests import RunTests

RULE = "=" * 78
THIN_RULE = "-" * 78
_DEFAULT_DIRECTORY = "test"


def seconds(value: float) -> str:
    """``4.2s``, ``3m05s``, ``1h02m``: as exact as a reader cares for."""
    if value < 60:
        return f"{value:.1f}s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def repeat_command(run: RunTests, file: str, test: str | None = None) -> str:
    """The command that runs one test, or one file, as it ran here."""
    words = ["python", os.path.relpath(sys.argv[0]) if os.path.exists(sys.argv[0]) else "run_test.py"]
    directory = os.path.relpath(run.test_directory)
    if directory != _DEFAULT_DIRECTORY:
        words += ["--test-directory", directory]
    inside = f"::{test.replace('.', '::')}" if test and "(" not in test else ""
    words += ["-i", f"{file}{inside}"]
    if test or run.shuffle:  # for a whole file the option would also shuffle, which this run did not
        words += ["--seed", str(run.seed)]
    for option, value in (("--device", run.device), ("--backend", run.backend), ("--ranks", run.ranks)):
        if value is not None:
            words += [option, str(value)]
    if run.devices is not None:
        words += ["--devices", ",".join(run.devices)]
    if run.timeout is not None:
        words += ["--timeout", f"{run.timeout:g}"]
    if run.arguments:
        words += ["--", *run.arguments]
    return shlex.join(words)


class Console:
    """Prints to one stream, flushed at once. On a terminal the last line is a status, rewritten in place."""

    def __init__(self, run: RunTests, stream: TextIO, total: int) -> None:
        self._run, self._stream, self._total = run, stream, total
        self._done = self._failures = 0
        self.is_terminal = stream.isatty()
        self._status = ""
        self._header: dict[str, Any] | None = None
        self._held: list[str] = []  # lines that wait for the first one
        self._width = len(str(total))

    def say(self, text: str = "") -> None:
        """Print whole lines."""
        if self._header is None:
            self._held.append(text)
            return
        self._clear()
        print(text, file=self._stream, flush=True)
        self._draw()

    def introduce(self, facts: Mapping[str, Any], device_type: str, slots: int) -> None:
        """The first line. What only a test process can know comes from the first that says so."""
        if self._header is not None:
            return
        self._header = dict(facts)
        torch = facts.get("torch") or devices.torch_version() or "not installed"
        parts = [f"torch {torch}", f"device {facts.get('device') or device_type}"]
        parts += [f"{name} {facts[name]}" for name in ("backend", "ranks") if facts.get(name) is not None]
        if facts.get("shared"):
            parts.append("ranks share devices")
        parts += [plural(slots, "slot"), plural(devices.cores(), "core"), f"seed {self._run.seed}"]
        held, self._held = self._held, []
        for line in [", ".join(parts), *held]:
            self.say(line)

    def file_done(self, file: FileResult) -> None:
        """One line a file, and the whole output of one that failed."""
        self._done += 1
        tests = file.tests()
        skipped = file.count(Outcome.SKIPPED)
        executed = sum(test.outcome.is_executed for test in tests if test.name != FILE_ITSELF)
        word = "FAILED" if file.is_bad else "flaky" if file.is_flaky else "ok" if executed else "skipped"
        if file.was_stopped and not file.is_bad:
            word = "stopped"
        if file.attempts[-1].unknown:
            word = "unknown"
        counted = sum(test.outcome is not Outcome.NOT_RUN for test in tests)
        about = [plural(counted, "test")]
        about += [f"{skipped} skipped"] * bool(skipped)
        about += [f"{file.count(Outcome.NOT_RUN)} not run"] * bool(file.count(Outcome.NOT_RUN))
        about += [plural(len(file.attempts), "attempt")] * (len(file.attempts) > 1)
        place = f"[{self._done:{self._width}d}/{self._total}]"
        self.say(f"{place} {word:7s} {file.name}  {', '.join(about)}  {seconds(file.seconds)}")
        if self._run.verbose:
            for test in tests:
                reason = f": {test.reason}" if test.reason else ""
                self.say(f"    {test.outcome.value:12s} {test.name}  {seconds(test.seconds)}{reason}")
        for note in dict.fromkeys(note for attempt in file.attempts for note in attempt.notes):
            self.say(f"    note: {note}")
        for test in tests:
            for note in test.notes:
                self.say(f"    note: {note}")
        if file.is_bad:
            self._failures += 1
            self._failure(file)
        elif self._run.show_output:
            self.say(f"{file.attempts[-1].output.rstrip()}\n")

    def _failure(self, file: FileResult) -> None:
        last = file.attempts[-1]
        self.say(f"{THIN_RULE}\noutput of {file.name}\n{THIN_RULE}\n{last.output.rstrip()}\n{THIN_RULE}")
        for test in file.tests():
            if test.outcome.is_bad:
                # unittest has printed what a test raised, but not what became of one that never came back.
                raised = "" if test.name in last.output else next(iter(test.text.strip().splitlines()), "")
                why = test.reason or raised
                self.say(f"{test.outcome.value}: {test.name}{f': {why}' if why else ''}")
        left = [test for test in file.tests() if test.outcome is Outcome.NOT_RUN]
        if left:
            self.say(f"tests not reached: {', '.join(test.name for test in left)}")
        self.say(f"to repeat: {repeat_command(self._run, file.job.part.name)}\n")

    def slow(self, process: TestProcess, now: float) -> None:
        """A file that takes longer than expected, named while it runs."""
        expected = process.job.part.time
        about = f" (expected {seconds(expected)})" if expected else ""
        at = f", now at {process.running}" if process.running else ""
        self.say(f"slow: {process.job.part.name} has run for {seconds(now - process.began)}{about}{at}")

    def progress(self, running: Iterable[TestProcess], now: float, left: float | None) -> None:
        """Rewrite the status line; nothing in a log."""
        if not self.is_terminal or self._header is None:
            return
        ages = ", ".join(f"{p.job.part.name.rpartition('/')[2]} {seconds(now - p.began)}" for p in running)
        parts = [f"[{self._done}/{self._total}] {self._failures} failed"]
        if left is not None:
            parts.append(f"about {seconds(left)} left")
        status = f"{', '.join(parts)}: {ages}"[: shutil.get_terminal_size().columns - 1]
        self._clear()
        self._status = status
        self._draw()

    def _clear(self) -> None:
        if self._status:
            self._stream.write("\r\x1b[2K")

    def _draw(self) -> None:
        if self._status:
            self._stream.write(self._status)
            self._stream.flush()

    def _reasons(self, headline: str, reasons: Iterable[tuple[str, int]]) -> None:
        for number, (reason, count) in enumerate(reasons):
            if number == 0:
                self.say(headline)
            self.say(f"  {count:5d}  {next(iter(reason.strip().splitlines()), 'no reason given')}")

    def end(self, results: Results, remarks: Iterable[str]) -> None:
        """Everything that is said once all files are done; the closing line comes last and alone."""
        self.introduce({}, results.device_type, len(results.slots))
        self._clear()
        self._status = ""
        self.say()
        self._reasons("skipped, by reason:", results.skips_by_reason())
        self._reasons("skipped subtests of tests that ran, by reason:", results.skipped_subtests_by_reason())
        bad = [(file, test) for file in results.files for test in file.tests() if test.outcome.is_bad]
        if bad:
            self.say("failed:")
            for file, test in bad:
                self._failed_test(file, test)
        for words in results.flaky():
            self.say(f"flaky (failed, and passed in a later process): {words}")
        not_run = results.count(Outcome.NOT_RUN)
        if not_run:
            self.say(f"{plural(not_run, 'test')} not reached")
        if results.not_started:
            self.say(f"{plural(len(results.not_started), 'file')} not started: {', '.join(results.not_started)}")
        for words in remarks:
            self.say(words)
        if results.files and not results.executed and results.signal is None:
            self.say(f"{RULE}\nNO TEST WAS EXECUTED: this run proves nothing\n{RULE}")
        elif results.executed < results.run.minimum_executed:
            self.say(
                f"too few: {results.executed} tests were executed, --minimum-executed {results.run.minimum_executed}"
            )
        plan = f"{plural(len(results.files), 'file')} in {seconds(results.seconds)}"
        self.say(f"{plan} ({seconds(sum(file.seconds for file in results.files))} one after the other)")
        self.say(f"{results.passed} passed, {results.failed} failed, {results.skipped} skipped")

    def _failed_test(self, file: FileResult, test: TestResult) -> None:
        name = test.name if test.name != FILE_ITSELF else None
        self.say(f"  {file.name}{f'::{name}' if name else ' (the file itself)'}")
        self.say(f"    {repeat_command(self._run, file.job.part.name, name)}")


def plan_text(jobs: Iterable[tuple[ShardedTest, int]], total: float | None) -> str:
    """The plan for people, a line a job in order of start."""
    lines = []
    for part, needed in jobs:
        which = f" ({part.shard} of {part.num_shards})" if part.num_shards > 1 else ""
        about = "unknown" if part.time is None else seconds(part.time)
        inside = f" [{', '.join(sorted(part.test.included))}]" if part.test.included else ""
        lines.append(f"{part.name}{which}{inside}  devices {needed}  estimate {about}")
    if total is not None:
        lines.append(f"{plural(len(lines), 'job')}, estimate {seconds(total)}")
    return "\n".join(lines)
