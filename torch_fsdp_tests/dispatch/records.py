"""What a run writes when it ends, and what it is compared with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from torch_fsdp_tests import installation
from torch_fsdp_tests.dispatch import behaviour_files, compare, comparing, junit, last_failures, reaching, report, times
from torch_fsdp_tests.dispatch.comparing import Rerun
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.run_plan import RunPlan
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.settings import ConfigurationError


class Records:
    """The reports, logs, times, map and behaviour that the options of a run ask for."""

    def __init__(self, run: RunTests) -> None:
        """Read what the run will be compared with. Raises ``MalformedList`` if that fails."""
        self._run = run
        self._earlier = compare.load(run.compare) if run.compare else None
        self._against = behaviour_files.load(run.against_behaviour) if run.against_behaviour else None
        if self._against and run.operators and not self._against.operators:
            words = f"{run.against_behaviour} was recorded without --operators"
            raise ConfigurationError(f"{words}: leave the option out, or record with it")
        self.keep: Callable[[Results], None] = lambda results: None  # stores what is known so far

    def begin(self) -> list[str]:
        """Set the reports of an earlier run aside. Returns remarks."""
        if not self._run.report or self._run.list_tests:
            return []
        self.keep = report.Unfinished(self._run.report).keep
        return report.set_aside(self._run.report, report.FILE, report.PAGE, report.UNFINISHED)

    def write(self, results: Results, planned: RunPlan, rerun: Rerun) -> tuple[list[str], ExitStatus]:
        """Write everything, and return remarks and the status that follows from them."""
        run = self._run
        last_failures.save(run.reports, planned.device_set.type, planned.files, results, results.remarks)
        written = list(_write(run, results))
        remarks = [*results.list_remarks(), *results.written_remarks()]
        remarks += [*(f"unknown test: {words}" for words in results.unknown()), *results.remarks]
        remarks += [words for words, _ in written]
        if self._earlier is not None:
            remarks += compare.lines(self._earlier, report.as_json(results))
        status = ExitStatus.BROKEN if any(is_lost for _, is_lost in written) else ExitStatus.OK
        if run.behaviour is not None:
            try:
                words, behaves = comparing.conclude(run, results, self._against, rerun, planned.jobs)
            except OSError as error:
                words, behaves = [f"the behaviour cannot be written: {error}"], ExitStatus.BROKEN
            remarks += words
            status = status or behaves
        return remarks, status


def _write(run: RunTests, results: Results) -> Iterator[tuple[str, bool]]:
    """Write the requested reports. Yields remarks, and whether each is about something that could not be written.

    If something cannot be written, the rest is still written.
    """
    logs = "the logs" if run.logs_by_option else "the logs (because CI is set)"
    short = installation.short_path
    writers: list[tuple[str, Path | None, Callable[[Path], str | None]]] = [
        (logs, run.reports if run.pipe_logs else None, lambda _: f"logs: {short(report.write_logs(results))}"),
        ("the JUnit report", run.save_xml, lambda folder: junit.write(folder, results)),
        ("the times", run.save_times, lambda folder: times.save(folder, *report.measured(results), os.environ)),
        ("the map", run.save_map, lambda path: reaching.save(run, path, results)),
        ("the report", run.report, lambda folder: report.write(folder, results)),
    ]
    for what, path, write in writers:
        try:
            words = write(path) if path else None
        except OSError as error:
            yield f"{what} cannot be written: {error}", True
        else:
            if words:
                yield words, False
