"""The process of one test file: ``python -m torch_fsdp_tests.dispatch.run_file FILE ORDERS -- ARGUMENTS``.

It runs FILE like ``python FILE ARGUMENTS``, and reports the tests to the dispatcher. This works for files that call
plain ``unittest.main()`` and for files that call our ``run_tests()``. ORDERS is a JSON file of the dispatcher. It says
which tests to leave out, and in what order to run the rest; :class:`Orders` describes it.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import hashlib
import os
import runpy
import signal
import sys
import traceback
import unittest
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from torch_fsdp_tests import extension, installation, settings, world_sizes
from torch_fsdp_tests.dispatch import keywords
from torch_fsdp_tests.dispatch.expectations import Entry, Situation
from torch_fsdp_tests.dispatch.plan import ShardedTest, positions_of
from torch_fsdp_tests.dispatch.runtests import DEFAULT_DIRECTORY, RunTests
from torch_fsdp_tests.processes import foreign, leaks, messages, system
from torch_fsdp_tests.verdict import Reason, SkipKind, events, in_one_line, returned, stream


@dataclasses.dataclass(frozen=True)
class Orders:
    """The dispatcher's orders for one process: what it reads of the run, and its part of the file."""

    dispatcher: int  # the dispatcher's process id
    part: ShardedTest
    test_directory: Path
    arguments: tuple[str, ...] = ()  # for the file
    only: tuple[str, ...] | None = None  # full names, for a rerun
    entries: tuple[Entry, ...] = ()  # from the disabled, slow and known-failure lists
    device: str | None = None  # type of the device under test, as far as the dispatcher knows
    patterns: tuple[str, ...] = ()  # -k
    shuffle_by: int | None = None  # the seed, if the tests are shuffled
    is_own: bool = False  # whether it is a test of the suite
    failed_only: bool = False
    list_only: bool = False
    fail_fast: bool = False
    show_locals: bool = False
    run_slow: bool = False
    skip_fast: bool = False
    rerun_disabled: bool = False

    @classmethod
    def of(
        cls, run: RunTests, part: ShardedTest, only: tuple[str, ...] | None, entries: tuple[Entry, ...], device: str
    ) -> Orders:
        """The orders of this process for a part of a file."""
        selection, execution = run.selection, run.execution
        return cls(
            os.getpid(),
            part,
            selection.test_directory,
            execution.arguments,
            only,
            entries,
            device,
            patterns=selection.patterns,
            shuffle_by=execution.seed if execution.shuffle else None,
            is_own=selection.is_own,
            failed_only=selection.failed_only,
            list_only=run.output.list_tests,
            fail_fast=execution.fail_fast,
            show_locals=execution.show_locals,
            run_slow=selection.run_slow,
            skip_fast=selection.skip_fast,
            rerun_disabled=selection.rerun_disabled,
        )


def select_tests(names: Sequence[str], orders: Orders) -> tuple[list[int], list[str], int]:
    """Return the positions of the tests to run, in order, remarks on names that select nothing, and the number of
    selected tests before the file was cut into parts.
    """
    part = orders.part
    chosen = part.test.selected(names)
    remarks: list[str] = []
    for pattern in sorted(part.test.included.difference(part.test.order)):
        if not orders.failed_only and not positions_of(pattern, names):
            import difflib  # imported late, because few runs have unknown names

            near = difflib.get_close_matches(pattern, [*names, *{name.split(".")[0] for name in names}], n=3)
            nearest = f"; nearest: {', '.join(near)}" if near else ""
            remarks.append(f"{pattern!r} is not a test of this file{nearest}")
    if orders.patterns:
        expressions = [keywords.parse(pattern) for pattern in orders.patterns]
        chosen = {index for index in chosen if any(holds(names[index]) for holds in expressions)}
    selected = len(chosen)
    if part.num_shards > 1 and not part.test.order:
        # By position among the selected tests, so that the parts together are complete, whatever was left out before.
        chosen = {i for place, i in enumerate(sorted(chosen)) if place % part.num_shards == part.shard - 1}
    if orders.only is not None:
        chosen = {index for index in chosen if names[index] in orders.only}
    picked = sorted(chosen)
    if (seed := orders.shuffle_by) is not None:
        picked.sort(key=lambda index: _shuffled(names[index], seed))
    elif part.test.order:
        places = {name: place for place, name in enumerate(part.test.order)}
        picked.sort(key=lambda index: places.get(names[index], len(places)))
    return picked, remarks, selected


def _shuffled(name: str, seed: int) -> tuple[bytes, bytes]:
    """A sort key that depends only on the seed and the name, so subsets keep their order. Classes stay together."""
    digests = (hashlib.sha256(f"{seed}:{part}".encode()).digest() for part in (name.rpartition(".")[0], name))
    return next(digests), next(digests)


class FileRun:
    """Applies the orders to each suite that the file passes to a runner."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.happened = False

    def prepare(self, suite: Any) -> unittest.TestSuite:
        """Announce the tests that will run, and return a suite of them."""
        self.happened = True
        tests = list(events.tests_in([suite]))
        names = [events.test_name(test) for test in tests]
        # Also the ranks of tests that are not picked, which do not report them.
        events.need(max(map(world_sizes.declared, tests), default=0))
        picked, remarks, selected = select_tests(names, self.orders)
        verdicts = self._apply_lists(tests, names, picked)
        if self.orders.rerun_disabled:
            picked = [index for index in picked if names[index] in verdicts["disabled"]]
        for index in picked:
            reason = verdicts["skip"].get(names[index])
            if reason is not None and not self.orders.rerun_disabled:
                # Skip before its fixtures run, as the decorator would.
                setattr(tests[index], tests[index]._testMethodName, unittest.skip(reason)(lambda: None))
        by_class: dict[str, list[str]] = {}
        for index in picked:
            by_class.setdefault(type(tests[index]).__qualname__, []).append(names[index])
        events.Reporting.announced = by_class
        if self.orders.is_own:
            folders = {self.orders.test_directory, Path(sys.argv[0]).parent}
            paths = lambda: set[str]().union(*(leaks.paths_below(folder, depth=1) for folder in folders))  # noqa: E731
            events.Reporting.entries = staticmethod(paths)
        events.Reporting.fail_fast = self.orders.fail_fast
        events.Reporting.forgiven = verdicts["known"].keys()
        if gone := {pattern for pattern in self.orders.part.test.order if not positions_of(pattern, names)}:
            events.note(f"selected, but there is no such test here: {', '.join(sorted(gone))}")
        stream.send(
            stream.Announced(
                tests=tuple(names[index] for index in picked),
                selected=selected,
                unknown=tuple(remarks),
                matched=frozenset(verdicts["matched"]),
                known=verdicts["known"],
            )
        )
        return events.Suite(tests[index] for index in picked)

    def _apply_lists(self, tests: list[unittest.TestCase], names: list[str], picked: list[int]) -> dict[str, Any]:
        """Apply the lists to the selected tests: reasons to skip, known failures, disabled tests, slow tests.

        Also reports which entries name any test of the file, because the others are stale.
        """
        verdicts: dict[str, Any] = {"skip": {}, "known": {}, "disabled": [], "matched": []}
        fast = {index for index in picked if not _is_declared_slow(tests[index])}
        facts = events.file_facts()
        for position, entry in enumerate(self.orders.entries):
            named = {index for index, name in enumerate(names) if entry.names(self.orders.part.name, name)}
            if named:
                verdicts["matched"].append(position)
            for index in sorted(named.intersection(picked)):
                if not entry.applies(Situation.of_process(facts, tests[index], self.orders.device)):
                    continue
                if entry.action == "fail":
                    verdicts["known"][names[index]] = position
                elif entry.action == "disable":
                    verdicts["disabled"].append(names[index])
                    verdicts["skip"][names[index]] = Reason(f"disabled: {entry.words}", SkipKind.LIST)
                else:
                    fast.discard(index)
                    if not self.orders.run_slow:
                        words = f"slow: {entry.words}; PYTORCH_TEST_WITH_SLOW=1 runs it"
                        verdicts["skip"][names[index]] = Reason(words, SkipKind.SLOW)
        if self.orders.skip_fast:
            reason = Reason("fast: PYTORCH_TEST_SKIP_FAST=1 runs only slow tests", SkipKind.SLOW)
            verdicts["skip"] = {names[index]: reason for index in fast} | verdicts["skip"]
        return verdicts


def _is_declared_slow(test: unittest.TestCase) -> bool:
    return getattr(getattr(test, test._testMethodName, None), "slow_test", False)


def install(orders: Orders) -> FileRun:
    """Make every runner of this process obey the orders and report. Works with any result class of the file."""
    run = FileRun(orders)
    returned.check_calls()
    if settings.is_on(settings.STRICT_LEAKS_VARIABLE, os.environ):
        from torch_fsdp_tests import process_state  # imports torch, which not every file needs

        process_state.check_every_test()
    runner: Any = unittest.TextTestRunner
    runner.resultclass = events.EventResult
    original = runner.run

    def run_suite(self: Any, suite: Any) -> Any:
        suite = run.prepare(suite)
        listed = suite.countTestCases() if orders.list_only else 0
        if orders.list_only:
            suite = unittest.TestSuite()
        if not issubclass(self.resultclass, events.Reporting):
            self.resultclass = type("EventResult", (events.Reporting, self.resultclass), {})
        self.verbosity = 2  # the output is shown if something failed, and then names help
        self.tb_locals = self.tb_locals or orders.show_locals
        result = original(self, suite)
        # A program exits with an error if nothing ran, but a listing is meant to run nothing.
        result.testsRun += listed
        return result

    runner.run = run_suite
    return run


def from_file_on(trace: TracebackType | None, file: str) -> TracebackType | None:
    """Return the traceback from the first frame in the test file on, or all of it if the file is not in it."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename != file:
        inner = inner.tb_next
    return inner or trace


def main(argv: Sequence[str]) -> None:
    """Run the file, and exit with the file's exit status."""
    file, orders_path, *arguments = argv
    orders = messages.decode(Path(orders_path).read_bytes(), [Orders])
    system.die_with_parent(orders.dispatcher)
    stream.attach()
    faulthandler.enable()
    # On SIGTERM write the stacks, and then die of the signal.
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    for each in extension.in_tests(os.environ):
        each.start(orders.part.name)
    run = install(orders)
    become(file, arguments[arguments[:1] == ["--"] :], orders.test_directory)
    try:
        runpy.run_path(file, run_name="__main__")
    except SystemExit as left:
        if not run.happened and system.exit_status(left) == 0:
            words = "the file ended before its tests with exit status 0, as if they had passed: to skip them, raise "
            stream.send(stream.FileBroken(f"{words}unittest.SkipTest"))
        raise
    except BaseException as error:
        if events.skips_file(error) and not run.happened:
            events.skip_file(str(error))
            sys.exit(0)
        trace = from_file_on(error.__traceback__, file)
        if isinstance(error, SyntaxError) and trace is error.__traceback__:
            trace = None  # all its frames belong to the machinery that read the file
        text = "".join(traceback.format_exception(type(error), error, trace))
        stream.send(stream.FileBroken(in_one_line(error), text))
        system.flush_outputs()
        print(text, end="", file=sys.stderr, flush=True)
        if isinstance(error, KeyboardInterrupt):
            raise
        sys.exit(1)
    if not run.happened:
        words = "the file ended without running its tests: end it with `if __name__ == '__main__': run_tests()`, which "
        words += "torch_fsdp_tests.common_utils has, or with unittest.main(); `python -m pytest` runs functions of "
        words += "pytest"
        stream.send(stream.FileBroken(words))
        sys.exit(f"{os.path.basename(file)}: {words}")


def become(file: str, arguments: Sequence[str], directory: Path) -> None:
    """Set ``sys.argv`` and ``sys.path`` as ``python FILE ARGUMENTS`` does.

    Files of another test directory also find the packages around it, before those of this checkout, as with pytest.
    """
    sys.argv = [file, *arguments]
    sys.path[0] = os.path.dirname(file)
    if directory.resolve() == installation.ROOT / DEFAULT_DIRECTORY:
        return
    above = directory.parent
    while (above / "__init__.py").is_file():
        above = above.parent
    _add_to_path(above, 1)
    # The folder whose ``test`` they import: the directory may have it, be it, or lie in it.
    around = (folder.parent for folder in (directory, *directory.parents) if folder.name == foreign.PACKAGE)
    root = directory if (directory / foreign.PACKAGE).is_dir() else next(around, None)
    if root is not None:
        _add_to_path(root, len(sys.path))  # at the end: a source tree of an extension would hide the installed one
        foreign.import_tests_from(str(root))


def _add_to_path(folder: Path, place: int) -> None:
    """Let files import from a folder, but not from a source tree of PyTorch, which would hide the installed one."""
    if not (folder / "torch" / "__init__.py").is_file():
        sys.path.insert(place, str(folder))


if __name__ == "__main__":
    main(sys.argv[1:])
