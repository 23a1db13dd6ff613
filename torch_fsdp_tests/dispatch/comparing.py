"""``--record-behaviour``, ``--against-behaviour`` and ``--compare-behaviour``: what a run does about behaviour.

A comparison runs the tests with the change and then without it, both in memory: of the two, the installed torch is one,
and a folder has the files in which the other differs. Tests that differ run without the change once more, to see
whether they repeat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from torch_fsdp_tests.dispatch import behaviour, behaviour_files, devices, keywords
from torch_fsdp_tests.dispatch.behaviour import Difference, Record
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.plan import Job
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.reach import changes, diffs
from torch_fsdp_tests.settings import ConfigurationError
from torch_fsdp_tests.verdict import Scope, first_few, plural

_WITH, _WITHOUT = "with", "without"
Rerun = Callable[[RunTests, Sequence[Job]], Results]


@contextlib.contextmanager
def prepared(run: RunTests) -> Iterator[RunTests]:
    """The run with a folder in which ranks record what they do, and in a comparison with the files that differ."""
    if not run.records_behaviour or run.list_tests or run.list_files or run.dry_run:
        yield run
        return
    with tempfile.TemporaryDirectory(prefix="run_test-") as name:
        folder = Path(name)
        (folder / "now").mkdir()
        (folder / "before").mkdir()
        if run.compare_behaviour and run.reaching:
            _write_sources(run.reaching, folder)
        yield dataclasses.replace(run, behaviour=folder / "now", sources=_sources(folder, _WITH))


def _sources(folder: Path, side: str) -> Path | None:
    return folder / side if (folder / side).exists() else None


# --- a change of torch ------------------------------------------------------------------------------------------------


def _write_sources(whats: Sequence[str], folder: Path) -> None:
    """Write the files of the side that is not installed. Raises :class:`ConfigurationError`."""
    root = devices.torch_folder()
    if root is None:
        raise ConfigurationError("torch is not installed, so no change of it can be compared")
    try:
        files = [file for what in whats for file in diffs.parse(_text(what))]
    except (diffs.NotADiff, OSError) as error:
        raise ConfigurationError(f"--compare-behaviour needs diffs: {error}") from error
    edits = {path: file.hunks for file in files if isinstance(file, diffs.Edited) and (path := _path(file.paths[-1]))}
    if not edits:
        raise ConfigurationError("--compare-behaviour: the diff changes no Python file of torch")
    is_installed, texts = other_side(edits, root.parent)
    for path, text in texts.items():
        place = folder / (_WITHOUT if is_installed else _WITH) / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8", errors="surrogateescape")


def _text(what: str) -> str:
    return changes.standard_input() if what == "-" else Path(what).read_text("utf-8", errors="surrogateescape")


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


# --- after the run ----------------------------------------------------------------------------------------------------


def conclude(run: RunTests, results: Results, against: Record | None, rerun: Rerun, jobs: Sequence[Job]) -> Verdict:
    """Write and compare what the tests of a run have done. Raises ``OSError`` if the record cannot be written."""
    assert run.behaviour is not None
    record = _collect(run, results, run.behaviour)
    words = behaviour_files.about(record)
    if run.record_behaviour is not None:
        behaviour_files.save(run.record_behaviour, record)
        words.append(f"behaviour of {plural(len(record.tests), 'test')}: {run.record_behaviour}")
    found: list[Difference] | None = None
    compared = 0
    if against is not None:
        found = behaviour.differences(against, record, _missing(run, results, against, record))
        compared = len(behaviour.compared(against, record))
    elif run.compare_behaviour and not results.is_ended():
        before, found, failed = _compared(run, record, rerun, jobs)
        compared = len(behaviour.compared(before, record))
        words += _also_failing(results, failed)
    if found is None:
        return words, ExitStatus.OK
    differing = len({each.test for each in found})
    words.append(f"behaviour of {plural(compared, 'test')} compared, {differing or 'none'} different")
    return words + behaviour.lines(found), _status(run, compared, found)


Verdict = tuple[list[str], ExitStatus]


def _status(run: RunTests, compared: int, found: Sequence[Difference]) -> ExitStatus:
    if found and run.fail_on_difference:
        return ExitStatus.FAILED
    return ExitStatus.OK if compared else ExitStatus.NOTHING_RAN


def _compared(
    run: RunTests, record: Record, rerun: Rerun, jobs: Sequence[Job]
) -> tuple[Record, list[Difference], Results]:
    """What the tests do without the change, and what differs."""
    assert run.behaviour is not None
    folder = run.behaviour.parent
    fixes = run.fixes if run.reaching else ()  # if there is a diff, fixes are in force on both sides
    sources = _sources(folder, _WITHOUT)
    without = dataclasses.replace(run, fixes=fixes, sources=sources, behaviour=folder / "before", report=None)
    results = rerun(without, jobs)
    before = _collect(without, results, folder / "before")
    found = behaviour.differences(before, record)
    again = [*_narrowed(jobs, {each.test for each in found})]
    if again and not results.is_ended():
        rerun(without, again)
        before = _collect(without, results, folder / "before")
        found = behaviour.differences(before, record)
    return before, found, results


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


def _collect(run: RunTests, results: Results, folder: Path) -> Record:
    passed = {
        f"{file.job.part.name}::{test.name}"
        for file, test in results.tests()
        if test.scope is Scope.TEST and test.outcome.is_executed and not test.outcome.is_bad
    }
    facts = results.facts()
    record = behaviour_files.collect(
        folder, run.test_directory, passed, str(facts.get("torch", "")), str(facts.get("device", ""))
    )
    return dataclasses.replace(record, operators=run.operators)


def _missing(run: RunTests, results: Results, against: Record, record: Record) -> list[str]:
    """The tests of an earlier record that this run should have and did not execute."""
    ran = {f"{file.job.part.name}::{test.name}": test for file, test in results.tests()}
    parts = [file.job.part for file in results.files if file.job.part.num_shards == 1 or file.job.part.test.order]
    fits = [keywords.parse(pattern) for pattern in run.patterns]

    def is_expected(test: str) -> bool:
        file, _, name = test.partition("::")
        if fits and not any(fit(name) for fit in fits):
            return False
        return not run.is_narrowed_by_file or any(p.name == file and p.test.selected([name]) for p in parts)

    failed = {test for test, result in ran.items() if result.outcome.is_bad}
    there = {*record.tests, *failed}
    return [test for test in against.tests if test not in there and (test in ran or is_expected(test))]


def _also_failing(results: Results, before: Results) -> list[str]:
    bad = [
        {f"{file.job.part.name}::{test.name}" for file, test in side.tests() if test.outcome.is_bad}
        for side in (results, before)
    ]
    kinds = {"also": bad[0] & bad[1], "only": bad[1] - bad[0]}
    return [f"fails {how} without the change: {first_few(sorted(tests))}" for how, tests in kinds.items() if tests]
