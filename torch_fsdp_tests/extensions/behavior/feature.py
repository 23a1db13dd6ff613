"""``--record-behavior``, ``--against-behavior`` and ``--compare-behavior``: what a run does about behavior.

A comparison runs the tests with the change and then without it, both in memory: of the two, the installed torch is one,
and a folder has the files in which the other differs. Tests that differ run without the change once more, to see
whether they repeat.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from torch_fsdp_tests.dispatch import keywords
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.plan import Job
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.extension import Conclusion, Feature, Features, Rerun
from torch_fsdp_tests.extensions.behavior import FOLDER_VARIABLE, OPERATORS_VARIABLE, differences, kept_records
from torch_fsdp_tests.extensions.behavior.differences import Difference, Record
from torch_fsdp_tests.installed_torch import diffs, sources
from torch_fsdp_tests.settings import ConfigurationError
from torch_fsdp_tests.verdict import Scope, first_few, plural

_WITH, _WITHOUT = "with", "without"


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the options ask for."""

    record_behavior: Path | None = None
    against_behavior: Path | None = None
    compare_behavior: bool = False
    operators: bool = False
    fail_on_difference: bool = False
    change: tuple[str, ...] = ()  # diffs, perhaps: what selects the tests of a comparison


class Behavior(Feature):
    """Lets ranks record what they do, and compares it."""

    in_tests = True
    _folder: Path  # one that ends with the run

    def __init__(self, asked: Asked, is_repeated: bool) -> None:
        self._asked, self._is_repeated = asked, is_repeated
        self._now, self._side = "now", _WITH
        self._against: Record | None = None

    def problem(self, run: RunTests) -> str | None:
        asked, self._run = self._asked, run
        path = asked.record_behavior
        if path is not None and path.is_dir():
            return f"--record-behavior: {path} is a folder; name a file"
        if asked.compare_behavior and not (asked.change or any(each.changes_torch for each in run.features.values())):
            return "--compare-behavior needs a change: a diff with --reaching, or --with-fixes"
        if asked.compare_behavior and (asked.against_behavior or path):
            return "--compare-behavior cannot be used with --record-behavior or --against-behavior"
        records = asked.record_behavior or asked.against_behavior or asked.compare_behavior
        if asked.operators and not records:
            return "--operators can only be used with --against-behavior, --compare-behavior or --record-behavior"
        if asked.fail_on_difference and not (asked.against_behavior or asked.compare_behavior):
            return "--fail-on-difference can only be used with --against-behavior or --compare-behavior"
        return None

    def needs_own_ranks(self, one_host: bool) -> str | None:
        if self._asked.compare_behavior:
            return "--compare-behavior compares only the ranks that this run starts"
        return None if one_host else "behavior is recorded on one machine"

    def writes(self) -> Mapping[str, Path]:
        path = self._asked.record_behavior
        return {"--record-behavior": path.parent} if path else {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="run_test-") as name:
            self._folder = Path(name)
            if self._asked.compare_behavior and self._asked.change:
                _write_sources(self._asked.change, self._folder)
            yield

    def begin(self) -> Sequence[str]:
        if self._asked.against_behavior is not None:
            self._against = kept_records.load(self._asked.against_behavior)
            if self._asked.operators and not self._against.operators:
                words = f"{self._asked.against_behavior} was recorded without --operators"
                raise ConfigurationError(f"{words}: leave the option out, or record with it")
        return ()

    def environment(self, environment: Mapping[str, str]) -> Mapping[str, str]:
        (self._folder / self._now).mkdir(exist_ok=True)
        variables = {FOLDER_VARIABLE: str(self._folder / self._now)}
        if self._asked.operators:
            variables[OPERATORS_VARIABLE] = "1"
        # The order of a set is no behavior, and differs in each interpreter.
        variables["PYTHONHASHSEED"] = environment.get("PYTHONHASHSEED", "0")
        if (files := self._folder / self._side).exists():
            variables |= sources.environment(files, environment)
        return variables

    def repeating(self, test: str | None) -> Sequence[str]:
        asked = self._asked
        return ["--compare-behavior", "--reaching", *asked.change] if asked.compare_behavior and asked.change else []

    def conclude(self, results: Results, rerun: Rerun, jobs: Sequence[Job]) -> Conclusion:
        """Write and compare what the tests of a run have done."""
        asked, again = self._asked, results
        if asked.record_behavior is not None and not self._is_repeated and not results.is_ended():
            again = rerun(jobs, self._run.features, "a second time: what does not repeat is not compared")
        record = self._collect(self._now, results, again)
        words = kept_records.about(record)
        if asked.record_behavior is not None:
            kept_records.save(asked.record_behavior, record)
            words.append(f"behavior of {plural(len(record.tests), 'test')}: {asked.record_behavior}")
        status = ExitStatus.FAILED if again.failed else ExitStatus.OK
        found: list[Difference] | None = None
        compared = 0
        if (against := self._against) is not None:
            found = differences.differences(against, record, self._missing(results, against, record))
            compared = len(differences.compared(against, record))
        elif asked.compare_behavior and not results.is_ended():
            before, found, failed = self._compared(record, rerun, jobs)
            compared = len(differences.compared(before, record))
            words += _also_failing(results, failed)
        if found is None:
            return Conclusion(words, status)
        differing = len({each.test for each in found})
        words.append(f"behavior of {plural(compared, 'test')} compared, {differing or 'none'} different")
        if found and asked.fail_on_difference:
            status = ExitStatus.FAILED
        elif not compared:
            status = status or ExitStatus.NOTHING_RAN
        return Conclusion(words + differences.lines(found), status)

    def _compared(self, record: Record, rerun: Rerun, jobs: Sequence[Job]) -> tuple[Record, list[Difference], Results]:
        """What the tests do without the change, and what differs."""
        without = copy.copy(self)
        without._now, without._side = "before", _WITHOUT
        # If there is a diff, what else changes torch does so on both sides.
        kept = {n: each for n, each in self._run.features.items() if self._asked.change or not each.changes_torch}
        features = Features({name: without if each is self else each for name, each in kept.items()})
        results = rerun(jobs, features, "without the change")
        before = self._collect("before", results)
        found = differences.differences(before, record)
        again = [*_narrowed(jobs, {each.test for each in found})]
        if again and not results.is_ended():
            rerun(again, features, "without the change")
            before = self._collect("before", results)
            found = differences.differences(before, record)
        return before, found, results

    def _collect(self, folder: str, *runs: Results) -> Record:
        passed = set[str].intersection(*map(_passed, runs))
        facts = runs[0].facts()
        directory = self._run.selection.test_directory
        torch, device = str(facts.get("torch", "")), str(facts.get("device", ""))
        record = kept_records.collect(self._folder / folder, directory, passed, torch, device)
        return dataclasses.replace(record, operators=self._asked.operators)

    def _missing(self, results: Results, against: Record, record: Record) -> list[str]:
        """The tests of an earlier record that this run should have and did not execute."""
        ran = {f"{file.job.part.name}::{test.name}": test for file, test in results.tests()}
        parts = [file.job.part for file in results.files if file.job.part.num_shards == 1 or file.job.part.test.order]
        fits = [keywords.parse(pattern) for pattern in self._run.selection.patterns]
        is_narrowed = self._run.selection.is_narrowed_by_file or self._run.features.narrow

        def is_expected(test: str) -> bool:
            file, _, name = test.partition("::")
            if fits and not any(fit(name) for fit in fits):
                return False
            return not is_narrowed or any(p.name == file and p.test.selected([name]) for p in parts)

        failed = {test for test, result in ran.items() if result.outcome.is_bad}
        there = {*record.tests, *failed}
        return [test for test in against.tests if test not in there and (test in ran or is_expected(test))]


# --- a change of torch ------------------------------------------------------------------------------------------------


def _write_sources(whats: Sequence[str], folder: Path) -> None:
    """Write the files of the side that is not installed. Raises :class:`ConfigurationError`."""
    try:
        root, _ = sources.installed()
        files = [file for what in whats for file in diffs.parse(_text(what))]
    except sources.NotInstalled as error:
        raise ConfigurationError(f"{error}, so no change of it can be compared") from error
    except (diffs.NotADiff, OSError) as error:
        raise ConfigurationError(f"--compare-behavior needs diffs: {error}") from error
    edits = {path: file.hunks for file in files if isinstance(file, diffs.Edited) and (path := _path(file.paths[-1]))}
    if not edits:
        raise ConfigurationError("--compare-behavior: the diff changes no Python file of torch")
    is_installed, texts = other_side(edits, root)
    sources.write(texts, folder / (_WITHOUT if is_installed else _WITH))


def _text(what: str) -> str:
    return diffs.standard_input() if what == "-" else Path(what).read_text("utf-8", errors="surrogateescape")


def _path(path: str) -> str:
    """A path below the folder that holds torch, or an empty text for what is not torch's Python."""
    inside = f"/{path}".rpartition("/torch/")[2]
    return f"torch/{inside}" if f"/{path}" != inside and path.endswith(".py") and "/torch/" in f"/{path}" else ""


def other_side(edits: dict[str, tuple[diffs.Hunk, ...]], root: Path) -> tuple[bool, dict[str, str]]:
    """Whether the installed files below a folder have these edits already, and the texts of the files on the other
    side. Raises :class:`ConfigurationError` if the edits fit neither way.
    """
    made: dict[bool, dict[str, diffs.Patched]] = {False: {}, True: {}}
    for path, hunks in edits.items():
        place = root / path
        lines = place.read_text("utf-8", errors="surrogateescape").split("\n") if place.is_file() else []
        for is_reversed, found in made.items():
            found[path] = diffs.patched(lines, [hunk.reversed() for hunk in hunks] if is_reversed else hunks)
    is_installed = min(made, key=lambda side: _cost(made[side]))
    for path, patched in made[is_installed].items():
        if patched.misfits:
            line = patched.misfits[0].start
            words = f"the hunk at line {line} of {path} fits the installed torch neither with the change nor without it"
            raise ConfigurationError(f"{words}; make the diff against the installed version")
    return is_installed, {path: "\n".join(patched.lines) for path, patched in made[is_installed].items()}


def _cost(made: dict[str, diffs.Patched]) -> tuple[int, int]:
    return sum(len(each.misfits) for each in made.values()), sum(each.distance for each in made.values())


# --- tests and jobs --------------------------------------------------------------------------------------------------


def _narrowed(jobs: Sequence[Job], tests: Collection[str]) -> Iterator[Job]:
    """The jobs with only these tests."""
    for job in jobs:
        test = job.part.test
        inside = [name for file, _, name in (each.partition("::") for each in tests) if file == test.file]
        kept = frozenset(inside[index] for index in test.selected(inside))
        if kept:
            order = tuple(name for name in test.order if name in kept)
            yield dataclasses.replace(
                job, part=dataclasses.replace(job.part, test=dataclasses.replace(test, included=kept, order=order))
            )


def _passed(results: Results) -> set[str]:
    """The tests of a run that were executed and did not fail."""
    return {
        f"{file.job.part.name}::{test.name}"
        for file, test in results.tests()
        if test.scope is Scope.TEST and test.outcome.is_executed and not test.outcome.is_bad
    }


def _also_failing(results: Results, before: Results) -> list[str]:
    bad = [
        {f"{file.job.part.name}::{test.name}" for file, test in side.tests() if test.outcome.is_bad}
        for side in (results, before)
    ]
    kinds = {"also": bad[0] & bad[1], "only": bad[1] - bad[0]}
    return [f"fails {how} without the change: {first_few(sorted(tests))}" for how, tests in kinds.items() if tests]
