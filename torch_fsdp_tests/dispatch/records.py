"""What a run writes when it ends."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from torch_fsdp_tests import installation
from torch_fsdp_tests.dispatch import junit, last_failures, report, times
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.run_plan import RunPlan
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.dispatch.stages import FileEnded, Stage
from torch_fsdp_tests.extension import Conclusion, Rerun


class Records:
    """The reports, logs and times that the options of a run ask for, and what its features write."""

    def __init__(self, run: RunTests) -> None:
        self._run = run
        self._unfinished: report.Unfinished | None = None

    def begin(self) -> list[str]:
        """Set the reports of an earlier run aside. Returns remarks. Raises ``ConfigurationError``."""
        folder = self._run.output.report
        if self._run.output.list_tests:
            return []
        remarks = self._run.features.words(lambda feature: feature.begin())
        if folder is None:
            return remarks
        self._unfinished = report.Unfinished(folder)
        return [*report.set_aside(folder, report.FILE, report.UNFINISHED), *remarks]

    def take(self, stage: Stage) -> None:
        """Store what is known so far."""
        if self._unfinished is not None and isinstance(stage, FileEnded):
            self._unfinished.keep(stage.results)

    def write(self, results: Results, planned: RunPlan, rerun: Rerun) -> tuple[list[str], ExitStatus]:
        """Write everything, and return the lines to print and the status that follows from them."""
        run = self._run
        last_failures.save(run.reports, planned.device_set.type, planned.files, results, results.remarks)
        lines = [*results.list_remarks(), *results.written_remarks()]
        lines += [*(f"unknown test: {words}" for words in results.unknown()), *results.remarks]
        status = ExitStatus.OK
        for conclusion in (*_conclusions(run, results, rerun, planned), *_written(run, results)):
            lines += conclusion.lines
            status = status or conclusion.status or ExitStatus.OK
        return lines, status


def _conclusions(run: RunTests, results: Results, rerun: Rerun, planned: RunPlan) -> Iterator[Conclusion]:
    """What the features say. What cannot be written keeps nothing else from being written."""
    for name, feature in run.features.items():
        try:
            yield feature.conclude(results, rerun, planned.jobs)
        except OSError as error:
            yield Conclusion([f"what {name} writes cannot be written: {error}"], ExitStatus.BROKEN)


def _written(run: RunTests, results: Results) -> Iterator[Conclusion]:
    """Write the requested reports, the report of the run last."""
    logs = "the logs" if run.output.logs_by_option else "the logs (because CI is set)"
    short = installation.short_path
    writers: list[tuple[str, Path | None, Callable[[Path], Sequence[str]]]] = [
        (logs, run.reports if run.output.pipe_logs else None, lambda _: [f"logs: {short(report.write_logs(results))}"]),
        ("the JUnit report", run.output.save_xml, lambda folder: _save_xml(folder, results)),
        ("the times", run.output.save_times, lambda folder: _save_times(folder, results)),
        ("the report", run.output.report, lambda folder: report.write(folder, results)),
    ]
    for what, path, write in writers:
        try:
            yield Conclusion(write(path) if path else ())
        except OSError as error:
            yield Conclusion([f"{what} cannot be written: {error}"], ExitStatus.BROKEN)


def _save_xml(folder: Path, results: Results) -> Sequence[str]:
    junit.write(folder, results)
    return ()


def _save_times(folder: Path, results: Results) -> Sequence[str]:
    times.save(folder, *report.measured(results), os.environ)
    return ()
