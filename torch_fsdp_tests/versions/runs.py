"""The run of one version: what is stored, and how an interrupted run continues."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch import coverage, report
from torch_fsdp_tests.dispatch.atomic import write_text
from torch_fsdp_tests.dispatch.result import How
from torch_fsdp_tests.verdict import State
from torch_fsdp_tests.versions import facts
from torch_fsdp_tests.versions.environments import Environment
from torch_fsdp_tests.versions.processes import Processes, Say
from torch_fsdp_tests.versions.refusal import CannotBeMade, Refusal
from torch_fsdp_tests.versions.suite import CHECKOUT, Suite

RECORD = "version.json"
FACTS = "facts.json"
LOG = "output.log"
STOPPING = 10.0  # seconds for run_test.py to end its files and to write its report
_NEEDED = ("expecttest", "numpy")  # needed beside torch; without the other packages some tests of the harness skip
_ASK = f"""\
import importlib.util, json, platform
from torch_fsdp_tests.dispatch import devices
lacking = [name for name in {_NEEDED} if importlib.util.find_spec(name) is None]
print(json.dumps([devices.torch_version(), platform.python_version(), lacking]))
"""


@dataclasses.dataclass
class VersionRun:
    """The results of a version: what ran, the files that ended, and the facts of its torch."""

    label: str
    what: str = ""  # was run, in words
    torch: str | None = None
    python: str | None = None
    commit: str = ""
    is_dirty: bool = False
    digest: str = ""  # of the state of the suite
    selected: list[str] = dataclasses.field(default_factory=list)  # names of files
    files: list[dict[str, Any]] = dataclasses.field(default_factory=list)  # as report.json has them
    known_defects: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    device: str | None = None
    seconds: float = 0.0
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_complete: bool = False
    problem: str = ""  # why nothing, or not everything, can be compared


class Folder:
    """The folder of a version's results: a record, and a report for each start."""

    def __init__(self, output: Path, label: str) -> None:
        self.path, self.label = output / label, label

    def record(self) -> dict[str, Any]:
        data = _json(self.path / RECORD)
        return data if isinstance(data, dict) else {}

    def begin(self, key: object, about: Mapping[str, Any], digests: Mapping[str, str]) -> None:
        """Record what will run, and the state of the suite. Keep the results that this state has not changed."""
        record = self.record()
        kept = record.get("parts", {}) if record.get("key") == key else {}
        self._write({"key": key, "about": dict(about), "digests": dict(digests), "parts": kept})
        if not self.read().files:
            self.clear()
            self._write({"key": key, "about": dict(about), "digests": dict(digests), "parts": {}})

    def forget(self, names: Iterable[str]) -> None:
        """Let these files run again."""
        record = self.record()
        for name in names:
            for ran in record["parts"].values():
                ran.pop(name, None)
        self._write(record)

    def clear(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)

    def note_problem(self, words: str) -> None:
        record = self.record() or {"key": None, "about": {}, "digests": {}, "parts": {}}
        record["about"]["problem"] = words
        self._write(record)

    def _write(self, record: Mapping[str, Any]) -> None:
        write_text(self.path / RECORD, json.dumps(record, indent=1) + "\n")

    def parts(self) -> list[Path]:
        """The folders of the reports, in order."""
        return sorted(self.path.glob("part-*"), key=lambda path: int(path.name.removeprefix("part-")))

    def new_part(self) -> Path:
        """The folder of a new report, which belongs to the current state of the files."""
        parts, record = self.parts(), self.record()
        name = f"part-{int(parts[-1].name.removeprefix('part-')) + 1 if parts else 1}"
        record["parts"][name] = record["digests"]
        self._write(record)
        return self.path / name

    def read(self) -> VersionRun:
        """Read the record, and the files that ran to their end and have not changed since."""
        record = self.record()
        run = VersionRun(self.label, **record.get("about", {}))
        is_cut_up = "shard" in (record.get("key") or {}).get("options", ())
        done: dict[str, list[dict[str, Any]]] = {}
        for part in self.parts():
            whole = _json(part / report.FILE)
            data = whole or _json(part / report.UNFINISHED)  # what a killed run had stored so far
            if data is None:
                continue
            run.device = data["device"] or run.device
            run.seconds += data["seconds"]
            run.known_defects += data["known_defects"]
            ran = record["parts"].get(part.name, {})
            # A shard may have only some parts of a file. It ran everything that it should.
            run.is_complete = (
                is_cut_up and bool(whole) and not data["not_started"] and not any(map(_was_stopped, data["files"]))
            )
            for name, files in _by_name(data).items():
                is_current = name in ran and ran[name] == record["digests"].get(name)
                if is_current and (run.is_complete or _came_to_its_end(files)):
                    done[name] = files
        run.files = [file for name in sorted(done) for file in done[name]]
        run.is_complete = bool(run.selected) and (run.is_complete or set(run.selected) <= done.keys())
        run.facts = _json(self.path / FACTS) or {}
        if not run.is_complete and not run.problem:
            run.problem = f"interrupted: {len(done)} of {len(run.selected)} files ended"
        return run


def _json(path: Path) -> Any:
    """The contents of a file, or None if it is missing or incomplete."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _by_name(data: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = {}
    for file in data["files"]:
        found.setdefault(file["file"], []).append(file)
    return found


def _came_to_its_end(parts: list[dict[str, Any]]) -> bool:
    """Whether all parts of a file ran to their end."""
    return len(parts) == parts[0]["num_shards"] and not any(map(_was_stopped, parts))


def _was_stopped(file: Mapping[str, Any]) -> bool:
    return file["attempts"][-1]["ending"]["how"] == How.STOPPED


def _has_failed(file: Mapping[str, Any]) -> bool:
    return any(State(test["outcome"]).is_bad for test in file["tests"])


class Runs:
    """Runs the suite in one environment after the other, and stores the results."""

    def __init__(self, suite: Suite, output: Path, processes: Processes, show: Say) -> None:
        """``show`` takes the output of ``run_test.py``, line by line."""
        self._suite, self._output, self._processes, self._show = suite, output, processes, show

    def run(self, environment: Environment, again: bool, failed: bool, say: Say) -> VersionRun:
        """Run the whole suite, or what is left of it, and return all results. With ``failed``, files with failures run
        again.

        Raises :class:`CannotBeMade` or :class:`Refusal` if the environment cannot be used.
        """
        folder, suite = Folder(self._output, environment.wanted.label), self._suite
        torch, python = self.look(environment)
        key = {**suite.key, "torch": torch, "python": python, "interpreter": environment.python}
        before = folder.read()
        # The files do not say what is left of a shard, so all of it runs.
        if again or (suite.is_cut_up and not before.is_complete):
            folder.clear()
        elif failed and suite.is_cut_up and any(map(_has_failed, before.files)):
            folder.clear()
        about = {"what": suite.words, "selected": list(suite.files), "torch": torch, "python": python}
        state = {"commit": suite.commit, "is_dirty": suite.is_dirty, "digest": suite.digest}
        folder.begin(key, {**about, **state}, suite.digests)
        if failed:
            folder.forget({file["file"] for file in folder.read().files if _has_failed(file)})
        before = folder.read()
        if not before.facts:
            self._ask_facts(environment, folder)
        if before.is_complete:
            say("has been run already in this state of the suite; --again repeats it, and --failed repeats failures")
            return folder.read()
        ended = {file["file"] for file in before.files}
        about_rest = f", continuing after {len(ended)} of {len(suite.files)} files" if ended else ""
        say(f"running {suite.words} with Python {python}{about_rest}")
        last_words = self._start(environment, folder, ended, say)
        run = folder.read()
        if not run.is_complete:
            folder.note_problem(f"{run.problem} ({last_words})")
        return folder.read()

    def look(self, environment: Environment) -> tuple[str, str]:
        """The versions of torch and Python, without an import of torch. Raises the same exceptions as :meth:`run`."""
        wanted, interpreter = environment.wanted, environment.python
        said = self._python(environment, ["-c", _ASK], lambda line: None)
        try:
            torch, python, lacking = json.loads(said.output.splitlines()[-1])
        except (IndexError, ValueError) as error:
            log = self._log(environment)
            raise CannotBeMade(f"the interpreter does not answer: {said.last_words()}", log) from error
        if torch is None:
            raise Refusal(f"{interpreter} has no torch")
        if wanted.torch is not None and not _is(torch, wanted.torch):
            raise Refusal(f"{wanted.label} should be torch {wanted.torch}, but {interpreter} has torch {torch}")
        if lacking:
            raise Refusal(f"{interpreter} lacks {' and '.join(lacking)}, which the tests need")
        return torch, python

    def _ask_facts(self, environment: Environment, folder: Folder) -> None:
        path = folder.path / FACTS
        said = self._python(environment, ["-m", facts.__name__, str(path)], lambda line: None)
        if said.status != 0 or not path.exists():
            raise CannotBeMade(f"the facts of torch cannot be determined: {said.last_words()}", self._log(environment))

    def _log(self, environment: Environment) -> Path:
        return self._output / environment.wanted.label / LOG

    def _python(self, environment: Environment, arguments: list[str], show: Say) -> Any:
        """Run the environment's interpreter with this checkout."""
        log = self._log(environment)
        log.parent.mkdir(parents=True, exist_ok=True)
        variables = {**environment.variables(os.environ), "PYTHONPATH": str(CHECKOUT)}
        return self._processes.run([environment.python, *arguments], variables, log, show, patience=STOPPING)

    def _start(self, environment: Environment, folder: Folder, ended: set[str], say: Say) -> str:
        """Run the files that have not ended yet, and return the last output of ``run_test.py``."""
        part = folder.new_part()
        own = list(self._suite.arguments)
        cut = own.index("--") if "--" in own else len(own)
        without = ["-x", *sorted(ended)] if ended else []
        options = ["--keep-going", "--report", str(part)]
        command = [str(CHECKOUT / "run_test.py"), *own[:cut], *without, *options, *own[cut:]]
        said = self._python(environment, command, self._show)
        if "coverage" in self._suite.options:  # the next version's run would replace it
            with contextlib.suppress(FileNotFoundError):
                shutil.move(self._suite.reports / coverage.RESULT, part / coverage.RESULT)
                say(f"coverage data: {part / coverage.RESULT}")
        return f"run_test.py exited with status {said.status}: {said.last_words()}"


def _is(torch: str, wanted: str) -> bool:
    """Whether a version such as ``2.15.0+cpu`` is the requested ``2.15.0``. A request with a build needs that build."""
    return torch == wanted or torch.partition("+")[0] == wanted
