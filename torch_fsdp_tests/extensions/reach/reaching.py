"""Selects tests by what they reach in the installed torch, and records what they reach."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_fsdp_tests.dispatch import devices
from torch_fsdp_tests.dispatch.discover import source_of
from torch_fsdp_tests.dispatch.plan import TestRun
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.dispatch.select import Narrowed, UnknownTest
from torch_fsdp_tests.dispatch.syntax import GENERATED, declared_tests
from torch_fsdp_tests.extensions.reach import most_relevant, recording
from torch_fsdp_tests.extensions.reach.changed_functions import Change, Changes, UnknownChange
from torch_fsdp_tests.extensions.reach.reach_map import MalformedMap, Reached, ReachMap, by_file, declared_as
from torch_fsdp_tests.extensions.reach.recording import Recorder
from torch_fsdp_tests.extensions.reach.selecting import Selected, select
from torch_fsdp_tests.installed_torch.version_ranges import numbers
from torch_fsdp_tests.verdict import Scope, State, events, first_few, plural

if TYPE_CHECKING:
    from torch_fsdp_tests.dispatch.run_results import Results

VARIABLE = "TORCH_FSDP_TESTS_REACH_RECORDS"  # the file to which processes of test files add what their tests execute
SHIPPED = Path(recording.__file__).parent / "data"


@dataclasses.dataclass(frozen=True)
class ReachAsked:
    """What the options ask for."""

    run: RunTests
    reaching: tuple[str, ...] = ()
    changed: bool = False
    map: Path | None = None
    save_map: Path | None = None

    def source(self, file: str) -> str:
        """The text of a test file."""
        return source_of(self.run.selection.test_directory / f"{file}.py")

    @property
    def by_reach(self) -> bool:
        """Whether tests are selected by what they reach."""
        return bool(self.reaching) or self.changed

    @property
    def completes_map(self) -> bool:
        """Whether only the tests that ``map`` does not have are run, so that ``save_map`` gets all."""
        return self.map is not None and self.save_map is not None and not self.by_reach

    @property
    def records(self) -> Path:
        """The file of what tests ran so far, beside the map that will be made of it."""
        assert self.save_map is not None
        return self.save_map.with_name(f"{self.save_map.name}.records")


def narrow(asked: ReachAsked, selection: Sequence[TestRun], device: str) -> Narrowed:
    """The tests of a selection that a change reaches, the most relevant first, and then those that are not in the map.

    Raises :class:`UnknownTest` if that cannot be determined.
    """
    with _as_unknown_test(asked):
        root, version = _installed()
        known = ReachMap.load(asked.map or shipped(version, SHIPPED))
        changes = Changes(known, root)
        found_changes = [changes.find(what) for what in asked.reaching]
        if asked.changed:
            found_changes.append(changes.since_recorded())
    changed = {name: change.statements.get(name, ()) for change in found_changes for name in change.names}
    mentioned = {name for change in found_changes for name in change.mentioned}
    texts = {test.file: asked.source(test.file) for test in selection}
    used = {name for change in found_changes for name in change.used}
    using = [file for file, text in texts.items() if used.intersection(re.findall(r"\w+", text))] if used else []
    names = (name for change in found_changes for name in sorted(change.names))
    chosen = select(names, known, lambda tests: most_relevant.sort(known, tests, changed, mentioned), using)
    tests = keep(selection, chosen.tests)
    unmapped, left_out, skipped = list[TestRun](), list[str](), 0
    if chosen.functions:
        folders = {_folder(test.file) for test in known.tests}
        left_out = [file for file in texts if _folder(file) not in folders and not asked.run.selection.include]
        declared = {file: declared_tests(text) for file, text in texts.items() if file not in left_out}
        would_skip = _is_of(known, version, device) and not asked.run.selection.run_slow
        others = known.unknown(declared, with_skipped=not would_skip)
        skipped = len(known.unknown(declared, with_skipped=True)) - len(others)
        unmapped = [
            dataclasses.replace(each, included=_spelled(each, texts[each.file]), seconds=None)
            for each in keep(selection, others)
        ]
    remarks = [*_remarks(found_changes, chosen, tests, known, version)]
    if unmapped:
        remarks.append(f"{_count(unmapped)} follow, because the map does not know what they reach")
    if skipped:
        remarks.append(f"left out, because they were skipped when the map was recorded: {plural(skipped, 'test')}")
    if left_out:
        without = first_few(dict.fromkeys(map(_folder, left_out)))
        remarks.append(f"left out, because the map has no test of their folders: {without}; -i NAME runs them")
    verdict = _verdict(found_changes, chosen, known, [*texts])
    return Narrowed(tests + unmapped, remarks, verdict, bool(chosen.functions and not chosen.tests), in_order=True)


def unknown(asked: ReachAsked, selection: Sequence[TestRun], device: str) -> Narrowed:
    """The tests of a selection that are not in the map of a run, so that the run can complete the map.

    Raises :class:`UnknownTest` if it is a map of other sources or of another device.
    """
    assert asked.map is not None
    with _as_unknown_test(asked):
        root, version = _installed()
        known = ReachMap.load(asked.map)
        if not _is_of(known, version, device) or Changes(known, root).since_recorded().names:
            words = (
                f"{asked.map} was recorded with torch {known.torch} on {known.device}, and not with what is installed"
            )
            raise UnknownTest(f"{words}: without --map a new one is recorded")
    texts = {test.file: asked.source(test.file) for test in selection}
    declared = {file: declared_tests(text) for file, text in texts.items()}
    names = by_file((test.file, test.test) for test in known.unknown(declared))
    parts = ((part, [name for name in names.get(part.file, ()) if part.selected([name])]) for part in selection)
    tests = [dataclasses.replace(part, order=tuple(inside)) for part, inside in parts if inside]
    # Names in the order would be those of the source, without the device types that the file adds.
    spelled = [dataclasses.replace(each, included=_spelled(each, texts[each.file]), order=()) for each in tests]
    return Narrowed(spelled, [f"{_count(tests)} are not in {asked.map}"])


@contextlib.contextmanager
def _as_unknown_test(asked: ReachAsked) -> Iterator[None]:
    """Raise what is wrong with the arguments as :class:`UnknownTest`."""
    try:
        yield
    except (UnknownChange, MalformedMap) as error:
        raise UnknownTest(str(error)) from error
    except RecursionError as error:
        raise UnknownTest(f"{asked.map or 'the map'} is nested too deeply to be read") from error
    except OSError as error:
        raise UnknownTest(f"{error.filename or 'a file'} cannot be read: {error.strerror or error}") from error


def _installed() -> tuple[Path, str]:
    """The folder and the version of torch."""
    root, version = devices.torch_folder(), devices.torch_version()
    if root is None:
        raise UnknownTest("torch is not installed, so no test can reach its functions")
    return root, version or ""


def keep(selection: Sequence[TestRun], tests: Sequence[Reached]) -> list[TestRun]:
    """Those of the tests that are in the selection, in their order. A file can have several parts."""
    parts = {test.file: test for test in selection}
    kept = set[tuple[str, str]]()
    for file, part in parts.items():
        inside = [test.test for test in tests if test.file == file]
        kept |= {(file, inside[index]) for index in part.selected(inside)}
    narrowed = []
    for batch in most_relevant.batches(test for test in tests if (test.file, test.test) in kept):
        file, names = batch[0].file, tuple(test.test for test in batch)
        seconds = sum(test.seconds for test in batch)
        narrowed.append(TestRun(file, frozenset(names), parts[file].excluded, names, seconds))
    return narrowed


def _is_of(known: ReachMap, version: str, device: str | None = None) -> bool:
    """Whether a map is of this device and of this version of torch, all builds of which have the same FSDP."""
    return known.torch.partition("+")[0] == version.partition("+")[0] and device in (None, known.device)


def _folder(file: str) -> str:
    """The outermost folder of a test file, or an empty string if it is in none. Each extension has a folder."""
    return re.match(r"extensions/[^/]+(?=/)|[^/]+(?=/)|", file)[0]  # type: ignore[index]


def _spelled(part: TestRun, source: str) -> frozenset[str]:
    """The declared tests of a part, with globs for the generated names of classes for each type of device."""
    generated = {*re.findall(r"instantiate_device_type_tests\(\s*(\w+)", source)}
    pairs = [name.partition(".")[::2] for name in part.order]
    names = (cls if test == GENERATED else f"{cls}.{test}" for cls, test in pairs if cls not in generated)
    return frozenset([*names, *(f"{cls}*.{test}*" for cls, test in pairs if cls in generated)])


def _count(tests: Sequence[TestRun]) -> str:
    count, files = sum(len(test.order) for test in tests), len({test.file for test in tests})
    return f"{plural(count, 'test')} in {plural(files, 'file')}"


def _remarks(
    found_changes: Sequence[Change], chosen: Selected, tests: Sequence[TestRun], known: ReachMap, version: str
) -> Iterable[str]:
    if not _is_of(known, version):
        yield f"the map was recorded with torch {known.torch}, but torch {version} is installed"
    for change in found_changes:
        yield from change.remarks
    yield from chosen.remarks
    if chosen.functions:
        if unclear := _unclear(found_changes):
            yield unclear
        reached = chosen.functions - len(chosen.unreached)
        yield f"{_count(tests)} reach {reached} of {plural(chosen.functions, 'function')}"


def _unclear(found_changes: Sequence[Change]) -> str:
    files = [path for change in found_changes for path in change.unknown]
    words = f"cannot tell which tests would detect the change of {first_few(files)}, which the map does not cover"
    return words if files else ""


def _verdict(found_changes: Sequence[Change], chosen: Selected, known: ReachMap, files: Sequence[str]) -> str:
    """Why passing would prove nothing, or an empty string if it would prove something."""
    if chosen.unreached:
        what = plural(len(chosen.unreached), "function")
        return f"no test enters {what} of the change, so nothing guards it: {first_few(chosen.unreached)}"
    if chosen.functions:
        return ""
    if unclear := _unclear(found_changes):
        unknown = [f"/{path}" for change in found_changes for path in change.unknown]
        same = [file for file in files if any(path.endswith(f"/{file}.py") for path in unknown)]
        if same:
            return f"{unclear}; -i {' '.join(same)} runs the tests of the same names here"
        folders = dict.fromkeys(_folder(test.file) for test in known.tests)
        here = [folder for folder in folders if folder and folder in map(_folder, files)]
        return f"{unclear}; {f'-i {shlex.join(here)}' if here else 'a run without --reaching'} runs all of its tests"
    without = [path for change in found_changes for path in change.without_code]
    words = f": only comments, docstrings, layout or permissions differ in {first_few(without)}" if without else ""
    return f"nothing that a test could reach has changed{words}"


def shipped(version: str, folder: Path) -> Path:
    """The map of this version of torch, or of the latest earlier one, or of the first later one."""
    maps = {numbers(path.stem.removeprefix("map-")): path for path in folder.glob("map-*.json")}
    if not maps:
        remedy = "record one with --save-map FILE, and name it with --map"
        raise UnknownChange(f"there is no map of what tests reach: {remedy}")
    earlier = [known for known in maps if known <= numbers(version)]
    return maps[max(earlier) if earlier else min(maps)]


def record(file: str) -> None:
    """Record what the tests of a file run, in this process and in its forks, for :func:`save`."""
    root, _ = _installed()
    recorder = Recorder(root, Path(os.environ[VARIABLE]), file)
    events.watch(recorder.switch)
    recorder.start()


def save(asked: ReachAsked, path: Path, results: Results) -> str:
    """Write the map of a recorded run, and say what is in it. Raises ``OSError``."""
    from torch_fsdp_tests.dispatch.atomic import write_text  # imported late, because a plan records nothing

    root, version = devices.torch_folder(), devices.torch_version()
    if results.not_started or results.signal is not None:
        return "no map was written, because the run did not finish"
    if root is None or version is None:
        return "no map was written, because torch is not installed"
    tests = {(file.job.part.name, test.name): test for file, test in results.tests() if test.scope is Scope.TEST}
    seconds = {key: test.seconds for key, test in tests.items() if test.outcome.is_executed}
    asked.records.touch()  # which no test file does where no test was left to run
    made = recording.make(asked.records, seconds, root, version)
    asked.records.unlink()
    skipped = by_file(key for key, test in tests.items() if test.outcome is State.SKIPPED)
    made = dataclasses.replace(made, device=str(results.facts().get("device", made.device)), skipped=skipped)
    if asked.completes_map and asked.map is not None:
        earlier = ReachMap.load(asked.map)
        declared = functools.cache(lambda file: declared_tests(asked.source(file)))
        gone = [(file, test) for file, test in earlier.keys() if declared_as(test, declared(file)) is None]
        made = earlier.merged(made, gone)
    write_text(path, made.as_text())
    entering = sum(test.breadth > 0 for test in made.tests)
    return f"map: {path}: {plural(len(made.reached), 'function')}, entered by {entering} of {len(made.tests)} tests"
