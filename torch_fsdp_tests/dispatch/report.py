"""``report.json``, the data of a run, as ``data/report.schema.json`` describes it. Extensions add to it and show it."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import json
import platform
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_fsdp_tests import __version__, extension, installation
from torch_fsdp_tests.dispatch import atomic, devices, features
from torch_fsdp_tests.dispatch.file_result import Attempt, FileResult
from torch_fsdp_tests.dispatch.repeat import repeat_command
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.dispatch.times import Needs
from torch_fsdp_tests.extension import Extension
from torch_fsdp_tests.verdict import State, TestResult, skip_rows

VERSION = 8
FILE = "report.json"
RANK_TIMES = ("rank_seconds", "rank_cpu")  # facts of a test: a number for each rank
UNFINISHED = "report.unfinished.json"  # exists during the run, and remains if the run is killed
PREVIOUS = "previous"  # names the files of the run before, as in report.previous.json
PAUSE_FACTOR = 20  # the pause until the next one, as a multiple of the seconds that writing one took


def tests_in(data: Mapping[str, Any]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Each result in the data of a report, with its file."""
    return ((file, test) for file in data["files"] for test in file["tests"])


def as_json(results: Results) -> dict[str, Any]:
    facts, run, counts = results.facts(), results.run, results.counts()
    files = [_file(results, file) for file in sorted(results.files, key=lambda file: file.job.key)]
    data = {
        "version": VERSION,
        "suite": {"version": __version__, "commit": installation.commit()},
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "host": platform.node(),
        "machine": facts.get("machine") or {},
        "selection": _selection(run),
        "torch": facts.get("torch"),
        "python": platform.python_version(),
        "device": facts.get("device"),
        "backend": facts.get("backend"),
        "ranks": facts.get("ranks"),
        "shared": bool(facts.get("shared", False)),
        "device_count": facts.get("device_count"),
        "capabilities": facts.get("capabilities"),
        "cores": devices.cores(),
        "seed": run.execution.seed,
        "shard": run.selection.shard,
        "num_shards": run.selection.num_shards,
        "seconds": round(results.seconds, 3),
        "slots": list(results.slots),
        "exit_code": results.exit_code(),
        "passed": counts[State.PASSED],
        "failed": counts[State.FAILED],
        "skipped": counts[State.SKIPPED],
        "not_started": results.not_started,
        "known_failures": results.known_failures(),
        "known_defects": results.known_defects(),
        "fixed_defects": results.fixed_defects(),
        "unlike_release": results.unlike_release(),
        "features": features.summary(files),
        "skips": skip_rows(test for file in files for test in file["tests"]),
        "list_remarks": results.list_remarks(),
        **_of_extensions(lambda each: each.in_report),
        "files": files,
    }
    for feature in run.features.values():
        feature.add_to_report(data, results)
    return data


def _of_extensions(ask: Callable[[Extension], Mapping[str, Any]]) -> dict[str, Any]:
    """What the report has of extensions that do not work in this run."""
    return {name: value for each in extension.found().values() for name, value in ask(each).items()}


def _selection(run: RunTests) -> str:
    """The options that selected the tests, as they were given. Empty if all tests were selected."""
    selection = run.selection
    lists = {"-i": selection.include, "-x": selection.exclude, "-k": selection.patterns}
    words = [word for option, values in lists.items() for value in values for word in (option, value)]
    flags = {
        "--distributed-tests": run.selection.distributed_only,
        "--exclude-distributed-tests": run.selection.without_distributed,
    }
    flags |= {"--failed": run.selection.failed_only}
    words += [flag for flag, is_set in flags.items() if is_set]
    return shlex.join([*words, *run.features.words(lambda feature: feature.selecting())])


def _file(results: Results, file: FileResult) -> dict[str, Any]:
    flaky = set(file.flaky())
    return {
        "file": file.job.part.name,
        "shard_id": file.job.part.shard,
        "num_shards": file.job.part.num_shards,
        "estimate": file.job.part.time,
        "failed": file.is_bad,
        "attempts": [_attempt(attempt, file.is_bad or file.is_flaky) for attempt in file.attempts],
        "tests": [_test(results, file, test, test.name in flaky) for test in file.tests()],
    }


def _attempt(attempt: Attempt, with_output: bool) -> dict[str, Any]:
    return {
        "ending": dataclasses.asdict(attempt.ending),
        "began": round(attempt.began, 3),
        "ended": round(attempt.ended, 3),
        "slots": list(attempt.assigned),
        "failed": attempt.is_bad,
        "notes": list(attempt.notes),
        "facts": attempt.facts,
        "output": attempt.output if with_output else "",
    }


def _test(results: Results, file: FileResult, test: TestResult, flaky: bool) -> dict[str, Any]:
    facts, part = file.attempts[-1].facts, file.job.part.name
    return {
        "test": test.name,
        "scope": test.scope.value,
        **test.skips_to_json(),
        "phase": test.phase,
        "flaky": flaky,
        "seconds": test.seconds,
        **_of_extensions(lambda each: each.in_report_of_test),
        "subtests": test.executed_subtests,
        "requirements_not_met": test.requirements_not_met,
        "world_size": test.facts.get("world_size"),
        **{name: test.facts.get(name) or None for name in RANK_TIMES},
        "text": test.text,
        "ranks": [rank.to_json() for rank in test.ranks],
        "notes": list(test.notes),
        "configuration": test.facts.get("configuration"),
        "repeat": repeat_command(results.run, part, facts, test) if test.outcome.is_bad else "",
    }


def measured(results: Results) -> tuple[dict[str, float], dict[str, dict[str, float]], dict[str, Needs]]:
    """Seconds by file and by class, and needs by file, for files that ran completely in one process."""
    files: dict[str, float] = {}
    classes: dict[str, dict[str, float]] = {}
    needs: dict[str, Needs] = {}
    for file in results.files:
        part = file.job.part
        complete = (
            part.test.is_whole and part.num_shards == 1 and not results.run.selection.patterns and not file.is_bad
        )
        if not complete or file.was_stopped:
            continue
        files[part.name] = round(file.attempts[0].seconds, 3)
        by_class = classes.setdefault(part.name, {})
        for test in file.tests():
            if test.outcome is not State.NOT_RUN and test.class_name:
                by_class[test.class_name] = round(by_class.get(test.class_name, 0.0) + test.seconds, 3)
        facts = [file.attempts[0].facts, *(test.facts for test in file.tests())]
        devices = [1, *(each["devices"] for each in facts if "devices" in each)]
        ranks = [test.facts["world_size"] for test in file.tests() if "world_size" in test.facts]
        needs[part.name] = Needs(max(devices + ranks), max(devices))
    return files, classes, needs


def write(folder: Path, results: Results) -> list[str]:
    """Write the report into the folder, let extensions show it, and say where it is. Raises ``OSError``."""
    data = as_json(results)
    others = set_aside(folder, FILE)  # of a run at the same time
    atomic.write_text(folder / FILE, json.dumps(data, indent=1, default=str) + "\n")
    lines = ["; ".join([f"report: {installation.short_path(folder / FILE)}", *others])]
    lines += results.run.features.words(lambda feature: feature.reported(folder, data))
    (folder / UNFINISHED).unlink(missing_ok=True)
    return lines


def set_aside(folder: Path, *names: str) -> list[str]:
    """Rename the reports of another run, so that none is lost or mistaken for that of a killed run. Says so."""
    renamed = []
    for name in names:
        stem, dot, ending = name.rpartition(".")
        renamed.append(atomic.set_aside(folder / name, f"{stem}.{PREVIOUS}{dot}{ending}"))
    kept = [path.name for path in renamed if path is not None]
    return [f"the report of another run is now {' and '.join(kept)}"] * bool(kept)


class Unfinished:
    """Stores the data of the files that have ended so far, so that a killed run does not lose them."""

    def __init__(self, folder: Path) -> None:
        installation.commit()  # asked before the first test runs, so that git does not run at the same time as tests
        self._path = folder / UNFINISHED
        self._next = 0.0

    def keep(self, results: Results) -> None:
        began = time.monotonic()
        if began < self._next:
            return
        with contextlib.suppress(OSError):  # the end of the run will report what cannot be written
            atomic.write_text(self._path, json.dumps(as_json(results), default=str) + "\n")
        ended = time.monotonic()
        self._next = ended + PAUSE_FACTOR * (ended - began)


def write_logs(results: Results) -> Path:
    """Write the output of every process into the folder of reports, and return the path."""
    folder = results.run.reports / "logs"
    for file in results.files:
        for number, attempt in enumerate(file.attempts, 1):
            part = file.job.part
            name = f"{part.name.replace('/', '.')}_{part.shard}.{part.num_shards}_{number}.log"
            atomic.write_text(folder / name, attempt.output)
    return folder
