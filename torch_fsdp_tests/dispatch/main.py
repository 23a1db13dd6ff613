"""The whole run in one place: options, files, selection, plan, processes, reports, exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_fsdp_tests import extension, installation
from torch_fsdp_tests.dispatch import devices, expectations, listing, options, run_plan, stages, times
from torch_fsdp_tests.dispatch.atomic import naming
from torch_fsdp_tests.dispatch.devices import DeviceSet
from torch_fsdp_tests.dispatch.discover import discover
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.other_ranks import OtherRanks
from torch_fsdp_tests.dispatch.run_plan import RunPlan
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.dispatch.select import Narrowed, UnknownTest, matching, select, without_tests
from torch_fsdp_tests.dispatch.stages import Stage
from torch_fsdp_tests.dispatch.upstream import absent
from torch_fsdp_tests.processes import leaks, system
from torch_fsdp_tests.settings import ConfigurationError
from torch_fsdp_tests.verdict import closing_line, first_few, plural, tally

if TYPE_CHECKING:  # what only a run needs is imported late, so that a plan is fast
    from torch_fsdp_tests.dispatch.console import Console
    from torch_fsdp_tests.dispatch.run_results import Results
    from torch_fsdp_tests.dispatch.runner import Runner
    from torch_fsdp_tests.processes.children import Children


def main(argv: Sequence[str], root: Path) -> ExitStatus:
    """Run the dispatcher and return its exit status. The default test directory is ``test`` in the folder ``root``.

    An extension may let this process work for another dispatcher, or know processes that work for this one.
    """
    system.prepare_streams()
    system.exit_on_signals()
    status, others = ExitStatus.BROKEN, OtherRanks()
    try:
        for each in extension.found().values():
            if (worked := each.take_over(os.environ, root)) is not None:
                return worked
        others = extension.other_ranks(os.environ) or others
        status = _guarded(argv, root, others)
    except ConfigurationError as error:
        _remark(str(error))
        status = ExitStatus.USAGE_ERROR
    except (KeyboardInterrupt, SystemExit) as left:  # a signal, unless the arguments were wrong, or --help was given
        status = ExitStatus(system.exit_status(left) if isinstance(left, SystemExit) else ExitStatus.INTERRUPTED)
        if status.is_from_signal:
            _remark(f"stopped by {system.signal_name(status - 128)} while no test was running")
    finally:
        others.dismiss(status)
    return status


def _guarded(argv: Sequence[str], root: Path, others: OtherRanks) -> ExitStatus:
    try:
        run = options.parse(argv, os.environ, root)
        with contextlib.ExitStack() as stack:
            for feature in () if run.output.is_plan or run.output.list_tests else run.features.values():
                stack.enter_context(feature.running())
            return _checked(run, others)
    except (UnknownTest, expectations.MalformedList, ConfigurationError) as error:
        _remark(str(error))
        return ExitStatus.USAGE_ERROR
    except BrokenPipeError:  # as with "run_test.py --list | head"
        system.drop_stdout()
        return ExitStatus.NOT_READ
    except OSError as error:
        with contextlib.suppress(OSError):
            _remark(f"cannot continue: {error}")
        system.drop_stdout()
        return ExitStatus.BROKEN


def _print(text: str, end: str = "\n") -> None:
    with naming("stdout"):
        print(text, end=end, flush=True)


def _checked(run: RunTests, others: OtherRanks) -> ExitStatus:
    _remark(*run.output.remarks)
    files = discover(run.selection.test_directory)
    device_set = _devices(run, others)
    with _children(run, device_set) as children:
        narrowed = _select(run, files, device_set.type)
        selection = narrowed.tests
        planned = run_plan.make(run, others.world_size, files, narrowed, device_set)
        planned = dataclasses.replace(planned, entries=tuple(_entries(run)))
        _remark(*planned.remarks)
        if not selection and not narrowed.verdict and not narrowed.is_elsewhere:
            nothing = f"none of the selected tests failed when they were last run here on {device_set.type}"
            _remark(nothing if run.selection.failed_only else "nothing is selected")
        elif selection and not planned.jobs:
            shard = f"shard {run.selection.shard} of {run.selection.num_shards}"
            _remark(f"{shard} has nothing to run: there are fewer jobs than shards")
        status = ExitStatus.OK if selection or narrowed.is_elsewhere else ExitStatus.NOTHING_RAN
        if children is None and planned.jobs and run.selection.patterns:
            planned, status = _matching(run, others, planned)
        if children is None and run.output.list_files:
            _print(listing.files_text(planned.jobs, planned.needs), end="\n" if planned.jobs else "")
        elif children is None:
            _print(run_plan.shown(run, planned))
        elif not planned.jobs:
            print(closing_line(tally(())), file=sys.stderr if run.output.list_tests else sys.stdout, flush=True)
        else:
            status = _run(run, others, planned, children)
        if narrowed.verdict:
            (_remark if children is None or run.output.list_tests else _print)(narrowed.verdict)
        return ExitStatus.NOTHING_RAN if status is ExitStatus.OK and narrowed.proves_nothing else status


@contextlib.contextmanager
def _children(run: RunTests, device_set: DeviceSet) -> Iterator[Children | None]:
    """The processes of a run, or None for a plan."""
    if run.output.is_plan:
        yield None
        return
    from torch_fsdp_tests.dispatch import runner
    from torch_fsdp_tests.processes.children import Children

    with Children("run_test-") as children:
        if run.features.narrow and runner.will_fork(
            run, device_set
        ):  # torch is imported while the tests are put in order
            runner.start_forks(run, device_set, children)
        yield children


def _devices(run: RunTests, others: OtherRanks) -> DeviceSet:
    """The devices that may be assigned."""
    device_set = devices.find(run.execution.device, run.execution.devices, os.environ)
    if run.execution.devices is not None and device_set.assignable is None:
        _remark("--devices has no effect on the CPU; use -j to set how many files run at a time")
    if others.world_size is not None:
        return dataclasses.replace(device_set, names=(), variable=None)  # each rank takes one by itself
    if run.execution.jobs is not None and device_set.assignable is not None:
        return device_set.shared()
    if device_set.remark is not None:
        _remark(device_set.remark)
    return device_set


def _select(run: RunTests, files: Mapping[str, Path], device: str) -> Narrowed:
    if (nothing := _nothing_here(run, files)) is not None:
        _remark(nothing)
        return Narrowed([], is_elsewhere=True)
    include, exclude, within = _present(run, files)
    selection = select(files, include, exclude, run.selection.test_directory, within)
    below = set(matching("distributed", [*files]))
    if run.selection.distributed_only:
        selection = [test for test in selection if test.file in below]
    if run.selection.without_distributed:
        selection = [test for test in selection if test.file not in below]
    if run.selection.failed_only:
        from torch_fsdp_tests.dispatch import last_failures

        selection = last_failures.narrow(selection, last_failures.load(run.reports, device))
    for feature in run.features.values():
        if (narrowed := feature.narrow(selection, device)) is not None:
            _remark(*narrowed.remarks)
            return narrowed
    return Narrowed(selection, may_be_cut=True)


def _nothing_here(run: RunTests, files: Mapping[str, Path]) -> str | None:
    """A sentence about a command line that selects only what has no tests here, or None."""
    named = run.selection.include
    if named and len(helpers := without_tests(named, files, run.selection.test_directory)) == len(named):
        return f"no tests are in {first_few(helpers)}"
    return run.selection.elsewhere_in_words


def _present(run: RunTests, files: Mapping[str, Path]) -> list[list[str]]:
    """The names to include, to exclude, and to limit the run to, without those of files that only PyTorch's suite has.

    A remark names these files. Raises :class:`UnknownTest` if no other name is left of one kind that selects.
    """
    named = (run.selection.include, run.selection.exclude, run.selection.within)
    every = [name for names in named for name in names]
    lacking = absent(every, files, run.selection.test_directory)
    helpers = without_tests(every, files, run.selection.test_directory)
    left = [[name for name in names if name not in {*lacking, *helpers}] for names in named]
    if (run.selection.include and not left[0]) or (run.selection.within and not left[2]):
        words = f"none of the named test files of PyTorch is here: {first_few(lacking)}"
        raise UnknownTest(f"{words}; --list shows all files")
    if helpers:
        _remark(f"no tests are in {first_few(helpers)}")
    if lacking:
        _remark(f"these test files of PyTorch are not here: {first_few(lacking)}")
    return left


def _entries(run: RunTests) -> list[expectations.Entry]:
    entries: list[expectations.Entry] = []
    if run.selection.disabled and _is_there(run.selection.disabled):
        entries, remarks = expectations.read_disabled(run.selection.disabled)
        _remark(*remarks)
    if run.selection.slow and _is_there(run.selection.slow):
        entries += expectations.read_slow(run.selection.slow)
    return entries + [entry for path in run.selection.known_failures for entry in expectations.read_own(path)]


def _is_there(path: Path) -> bool:
    """Whether one of upstream's lists exists. Upstream's CI also names files that it could not fetch."""
    if not path.exists():
        _remark(f"{path} does not exist, so it disables no test and marks none as slow")
    return path.exists()


def _matching(run: RunTests, others: OtherRanks, planned: RunPlan) -> tuple[RunPlan, ExitStatus]:
    """The plan without files in which no test matches ``-k``. Only the files themselves know the names of their tests.

    Files that cannot be imported stay, as in a run.
    """
    from torch_fsdp_tests.dispatch.console import Console
    from torch_fsdp_tests.dispatch.runner import Runner

    output = dataclasses.replace(run.output, dry_run=False, list_files=True, list_tests=True)
    lister = dataclasses.replace(run, output=output)
    with _children(lister, planned.device_set) as children:
        assert children is not None
        results = Runner(lister, planned, Console(lister, planned, io.StringIO()).take, others, children).run()
    _remark(*filter(None, [results.unmatched()]))
    left = {file.job.key for file in results.files if file.tests()}
    jobs = [job for job in planned.jobs if job.key in left]
    return dataclasses.replace(planned, jobs=jobs), ExitStatus.OK if jobs else ExitStatus.NOTHING_RAN


def _run(run: RunTests, others: OtherRanks, planned: RunPlan, children: Children) -> ExitStatus:
    from torch_fsdp_tests.dispatch.console import Console
    from torch_fsdp_tests.dispatch.records import Records
    from torch_fsdp_tests.dispatch.runner import Runner

    records = Records(run)
    _check(run, planned)
    others.gather(run, planned.device_set.type)
    console = Console(run, planned)
    _remark(*records.begin())
    # After the last file, while the reports are written, signals only change the exit status: reports must be complete.
    children.note((signal.SIGINT, *system.ending_signals()))

    def tell(stage: Stage) -> None:
        for feature in run.features.values():
            stage = feature.stage(stage)
        records.take(stage)
        console.take(stage)

    runner = Runner(run, planned, tell, others, children)
    before = leaks.paths_below(run.selection.test_directory) if run.selection.is_own else set()
    results = _drive(run, runner, console)
    new = leaks.paths_below(run.selection.test_directory) - before if run.selection.is_own else set()
    results.written = sorted(path for path in new if os.path.dirname(path) not in new)
    if run.output.list_tests:
        return _print_tests(results)
    lines, written = records.write(results, planned, runner.run_with)
    tell(stages.RunEnded(results, lines))
    results.signal = results.signal or next(iter(children.signals), None)
    return results.exit_code() or written


def _drive(run: RunTests, runner: Runner, console: Console) -> Results:
    """Run all jobs, as often as a feature wants it."""
    once = runner.run
    for feature in () if run.output.list_tests else run.features.values():
        once = functools.partial(feature.drive, once, console.say)
    return once()


def _check(run: RunTests, planned: RunPlan) -> None:
    """Raise an error for what would make the run fail later."""
    if run.selection.is_own and (missing := devices.missing_packages()) is not None:
        raise ConfigurationError(missing)
    devices.check(planned.device_set, run.execution.device, run.execution.backend, run.execution.ranks)
    if run.output.save_times is not None:
        times.check(run.output.save_times, os.environ)


def _print_tests(results: Results) -> ExitStatus:
    for file in sorted(results.files, key=lambda file: file.job.key):
        for test in file.tests():
            if not test.outcome.is_bad:
                _print(f"{file.job.part.name}::{test.name.replace('.', '::')}")
    _remark(*(f"unknown test: {words}" for words in results.unknown()), *filter(None, [results.unmatched()]))
    left = [*(file.name for file in results.files if file.stopped_early), *results.not_started]
    if left:
        _remark(f"the tests of {plural(len(left), 'file')} are not listed: {first_few(left)}")
    status = results.exit_code()
    listed = status is ExitStatus.NOTHING_RAN and any(file.tests() for file in results.files)
    return ExitStatus.OK if listed else status


def _remark(*sentences: str) -> None:
    for words in sentences:
        print(f"{installation.program_name()}: {words}", file=sys.stderr, flush=True)
