"""``--reaching``, ``--changed`` and ``--save-map``: selects tests by what they reach in the installed torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_fsdp_tests.dispatch import devices
from torch_fsdp_tests.dispatch.discover import source_of
from torch_fsdp_tests.dispatch.listing import plural
from torch_fsdp_tests.dispatch.plan import TestRun
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.dispatch.select import UnknownTest
from torch_fsdp_tests.installed_torch.version_ranges import numbers
from torch_fsdp_tests.reach import recording
from torch_fsdp_tests.reach.changes import Change, Changes, UnknownChange
from torch_fsdp_tests.reach.order import Order, batches, noticed_in
from torch_fsdp_tests.reach.reachmap import MalformedMap, Reached, ReachMap
from torch_fsdp_tests.reach.selection import Selection, select
from torch_fsdp_tests.verdict import shown

if TYPE_CHECKING:
    from torch_fsdp_tests.dispatch.results import Results

SHIPPED = Path(recording.__file__).parent / "data"
NOTICED = SHIPPED / "noticed.jsonl"  # which tests noticed earlier changes
MUTANTS = "mutants/findings.jsonl"  # the same, of the user's own mutants, in the folder of reports


def narrow(run: RunTests, selection: Sequence[TestRun]) -> tuple[list[TestRun], list[str]]:
    """The tests of a selection that a change reaches, the most telling first, and remarks.

    Raises :class:`UnknownTest` if that cannot be determined.
    """
    root, version = devices.torch_folder(), devices.torch_version()
    if root is None:
        raise UnknownTest("torch is not installed, so no test can reach its functions")
    try:
        known = ReachMap.load(run.map or shipped(version or "", SHIPPED))
        changes = Changes(known, root)
        found_changes = [changes.find(what) for what in run.reaching]
        if run.changed:
            found_changes.append(changes.since_recorded())
    except (UnknownChange, MalformedMap) as error:
        raise UnknownTest(str(error)) from error
    except RecursionError as error:
        raise UnknownTest(f"{run.map or 'the map'} is nested too deeply to be read") from error
    except OSError as error:
        raise UnknownTest(f"{error.filename or 'a file'} cannot be read: {error.strerror or error}") from error
    edits = [edit for change in found_changes for edit in change.edits]
    texts = {test.file: source_of(run.test_directory / f"{test.file}.py") for test in selection}
    order = Order(known, texts, noticed_in(NOTICED, run.reports / MUTANTS))
    used = {name for change in found_changes for name in change.used}
    using = [file for file, text in texts.items() if used.intersection(re.findall(r"\w+", text))] if used else []
    names = (name for change in found_changes for name in sorted(change.names))
    chosen = select(names, known, lambda tests: order.sort(tests, edits), using)
    tests = keep(selection, chosen.tests)
    unmapped = {test.file for test in selection} - {test.file for test in known.tests}
    return tests, list(_remarks(found_changes, chosen, tests, known, version, unmapped))


def keep(selection: Sequence[TestRun], wanted: Sequence[Reached]) -> list[TestRun]:
    """The wanted tests in the selection, in their order. A file can have several parts."""
    parts = {test.file: test for test in selection}
    kept = set[tuple[str, str]]()
    for file, part in parts.items():
        inside = [test.test for test in wanted if test.file == file]
        kept |= {(file, inside[index]) for index in part.selected(inside)}
    narrowed = []
    for batch in batches(test for test in wanted if (test.file, test.test) in kept):
        file, names = batch[0].file, tuple(test.test for test in batch)
        seconds = sum(test.seconds for test in batch)
        narrowed.append(TestRun(file, frozenset(names), parts[file].excluded, names, seconds))
    return narrowed


def _remarks(
    found_changes: Sequence[Change],
    chosen: Selection,
    tests: Sequence[TestRun],
    known: ReachMap,
    version: str | None,
    unmapped: set[str],
) -> Iterable[str]:
    if known.torch.partition("+")[0] != (version or "").partition("+")[0]:  # all builds of a version have the same FSDP
        yield f"the map was recorded with torch {known.torch}, but torch {version} is installed"
    for change in found_changes:
        yield from change.remarks
    yield from chosen.remarks
    if not chosen.functions:
        yield "nothing that a test could reach has changed"
        return
    if chosen.unreached:
        yield f"no test reaches {plural(len(chosen.unreached), 'function')}: {shown(chosen.unreached)}"
    if unmapped:
        yield f"left out, because the map does not know them: {shown(sorted(unmapped))}"
    count = plural(sum(len(test.order) for test in tests), "test")
    files = plural(len({test.file for test in tests}), "file")
    reached = chosen.functions - len(chosen.unreached)
    yield f"{count} in {files} reach {reached} of {plural(chosen.functions, 'function')}"


def shipped(version: str, folder: Path) -> Path:
    """The map of this version of torch, or of the latest earlier one, or of the first later one."""
    maps = {numbers(path.stem.removeprefix("map-")): path for path in folder.glob("map-*.json")}
    if not maps:
        raise UnknownChange(
            "there is no map of what tests reach: record one with --coverage --save-map FILE, and name it with --map"
        )
    earlier = [known for known in maps if known <= numbers(version)]
    return maps[max(earlier) if earlier else min(maps)]


def save(run: RunTests, path: Path, results: Results) -> str:
    """Write the map of a recorded run, and say what is in it. Raises ``OSError``."""
    from torch_fsdp_tests.dispatch import coverage  # not imported at the top: a plan records nothing
    from torch_fsdp_tests.dispatch.atomic import write_text

    root, version = devices.torch_folder(), devices.torch_version()
    if results.not_started or results.signal is not None:
        return "no map was written, because the run did not finish"
    if root is None or version is None:
        return "no map was written, because torch is not installed"
    tests = [(file.job.part.name, test) for file, test in results.tests()]
    seconds = {(file, test.name): test.seconds for file, test in tests if test.outcome.is_executed}
    made = recording.make(run.reports / coverage.RESULT, seconds, root, version)
    write_text(path, made.as_text())
    entering = sum(test.breadth > 0 for test in made.tests)
    return f"map: {path}: {plural(len(made.reached), 'function')}, entered by {entering} of {len(made.tests)} tests"
