"""The whole run in one place: options, files, selection, plan, processes, reports, exit status."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_fsdp_tests import installation, settings
from torch_fsdp_tests.dispatch import devices, expectations, listing, options, plan, times
from torch_fsdp_tests.dispatch.atomic import naming
from torch_fsdp_tests.dispatch.devices import DeviceSet
from torch_fsdp_tests.dispatch.discover import discover, source_of
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.plan import Job, TestRun
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.dispatch.select import Narrowed, UnknownTest, matching, select
from torch_fsdp_tests.dispatch.site import LaunchFailure, Site
from torch_fsdp_tests.dispatch.syntax import tests_by_class
from torch_fsdp_tests.dispatch.upstream import absent
from torch_fsdp_tests.processes import host, launcher, leaks
from torch_fsdp_tests.processes.launcher import Launch
from torch_fsdp_tests.settings import ConfigurationError
from torch_fsdp_tests.verdict import closing_line, first_few, plural, tally

if TYPE_CHECKING:  # what only a run needs is imported late, so that a plan is fast
    from torch_fsdp_tests.dispatch.behaviour import Record
    from torch_fsdp_tests.dispatch.compare import Report
    from torch_fsdp_tests.dispatch.results import Results
    from torch_fsdp_tests.processes.children import Children


def main(argv: Sequence[str], root: Path) -> ExitStatus:
    """Run the dispatcher and return its exit status. The default test directory is ``test`` in the folder ``root``.

    If a launcher made this process, rank 0 is the dispatcher, and the other ranks work for it.
    """
    host.prepare_streams()
    host.exit_on_signals()
    try:
        launch = launcher.from_environment(os.environ)
    except launcher.LaunchError as error:
        _remark(str(error))
        return ExitStatus.USAGE_ERROR
    launched = launch is not None and host.can_fork()  # otherwise options.parse() rejects the launch
    if launch is not None and launched and launch.rank > 0:
        from torch_fsdp_tests.dispatch import worker

        return worker.main(launch, root)
    status, site = ExitStatus.BROKEN, Site()
    try:
        if launch is not None and launched:
            site = _workers(launch)
        status = _guarded(argv, root, launch, site)
    except LaunchFailure as error:
        _remark(str(error))
        status = ExitStatus.USAGE_ERROR
    except (KeyboardInterrupt, SystemExit) as left:  # a signal, unless the arguments were wrong, or --help was given
        status = ExitStatus(host.exit_status(left) if isinstance(left, SystemExit) else ExitStatus.INTERRUPTED)
        if status.is_from_signal:
            _remark(f"stopped by {host.signal_name(status - 128)} while no test was running")
    finally:
        site.dismiss(status)
    return status


def _workers(launch: Launch) -> Site:
    """The site with the processes of all other ranks. Raises :class:`LaunchFailure`."""
    from torch_fsdp_tests.dispatch.workers import Workers

    try:
        return Workers(launch)
    except (OSError, RuntimeError) as error:
        raise LaunchFailure(f"the other processes of the launch cannot be reached: {error}") from error


def _guarded(argv: Sequence[str], root: Path, launch: Launch | None, site: Site) -> ExitStatus:
    try:
        run = options.parse(argv, os.environ, root, launch)
        if not run.records_behaviour:
            return _checked(run, site)
        from torch_fsdp_tests.dispatch import comparing  # few runs need it

        with comparing.prepared(run) as prepared:
            return _checked(prepared, site)
    except (UnknownTest, expectations.MalformedList, ConfigurationError) as error:
        _remark(str(error))
        return ExitStatus.USAGE_ERROR
    except BrokenPipeError:  # as with "run_test.py --list | head"
        host.drop_stdout()
        return ExitStatus.NOT_READ
    except OSError as error:
        with contextlib.suppress(OSError):
            _remark(f"cannot continue: {error}")
        host.drop_stdout()
        return ExitStatus.BROKEN


def _print(text: str, end: str = "\n") -> None:
    with naming("stdout"):
        print(text, end=end, flush=True)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """The jobs of this shard in order of start, and the slots on which they run."""

    jobs: list[Job]
    default: plan.Seconds  # assumed for a job of unknown length
    needs: Mapping[str, times.Needs]  # of the selected files
    ranks: int
    device_set: DeviceSet
    slots: Sequence[str]  # the names of what is lent: devices, or places on the CPU


def _checked(run: RunTests, site: Site) -> ExitStatus:
    _remark(*run.remarks)
    files = discover(run.test_directory)
    device_set = _devices(run, site)
    with _children(run, device_set) as children:
        narrowed = _select(run, files, device_set.type)
        selection = narrowed.tests
        entries, earlier = _entries(run), _earlier(run)
        against = _against(run)
        planned = _plan(run, site, files, selection, device_set)
        if not selection and not narrowed.verdict:
            nothing = f"none of the selected tests failed when they were last run here on {device_set.type}"
            _remark(nothing if run.failed_only else "nothing is selected")
        elif selection and not planned.jobs:
            _remark(f"shard {run.shard} of {run.num_shards} has nothing to run: there are fewer jobs than shards")
        status = ExitStatus.OK if selection else ExitStatus.NOTHING_RAN
        if children is None and planned.jobs and run.patterns:
            planned, status = _matching(run, site, planned)
        if children is None and run.list_files:
            _print(listing.files_text(planned.jobs, planned.needs), end="\n" if planned.jobs else "")
        elif children is None:
            _print(_dry_run(run, planned))
        elif not planned.jobs:
            print(closing_line(tally(())), file=sys.stderr if run.list_tests else sys.stdout, flush=True)
        else:
            status = _run(run, site, files, planned, entries, earlier, against, children)
        if narrowed.verdict:
            (_remark if children is None or run.list_tests else _print)(narrowed.verdict)
        return ExitStatus.NOTHING_RAN if status is ExitStatus.OK and narrowed.is_unguarded else status


@contextlib.contextmanager
def _children(run: RunTests, device_set: DeviceSet) -> Iterator[Children | None]:
    """The processes of a run, or None for a plan."""
    if run.dry_run or (run.list_files and not run.list_tests):
        yield None
        return
    from torch_fsdp_tests.dispatch import runner
    from torch_fsdp_tests.processes.children import Children

    with Children("run_test-") as children:
        if run.by_reach and runner.will_fork(run, device_set):  # torch is imported while the tests are put in order
            runner.start_forks(run, device_set, children)
        yield children


def _devices(run: RunTests, site: Site) -> DeviceSet:
    """The devices that may be lent."""
    device_set = devices.find(run.device, run.devices, os.environ)
    if run.devices is not None and device_set.lendable is None:
        _remark("--devices has no effect on the CPU; use -j to set how many files run at a time")
    if site.world_size is not None:
        return dataclasses.replace(device_set, names=(), variable=None)  # each rank takes its LOCAL_RANK's
    if run.jobs is not None and device_set.lendable is not None:
        return device_set.shared()
    if device_set.remark is not None:
        _remark(device_set.remark)
    return device_set


def _select(run: RunTests, files: Mapping[str, Path], device: str) -> Narrowed:
    include, exclude, within = _present(run, files)
    selection = select(files, include, exclude, run.test_directory, within)
    below = set(matching("distributed", [*files]))
    if run.distributed_only:
        selection = [test for test in selection if test.file in below]
    if run.without_distributed:
        selection = [test for test in selection if test.file not in below]
    if run.failed_only:
        from torch_fsdp_tests.dispatch import last_failures

        selection = last_failures.narrow(selection, last_failures.load(run.reports, device))
    if not (run.by_reach or run.completes_map):
        return Narrowed(selection)
    from torch_fsdp_tests.dispatch import reaching

    narrowed = (reaching.narrow if run.by_reach else reaching.unknown)(run, selection, device)
    _remark(*narrowed.remarks)
    return narrowed


def _present(run: RunTests, files: Mapping[str, Path]) -> list[list[str]]:
    """The names to include, to exclude, and to limit the run to, without those of files that only PyTorch's suite has.

    A remark names these files. Raises :class:`UnknownTest` if no other name is left of one kind that selects.
    """
    named = (run.include, run.exclude, run.within)
    lacking = absent([name for names in named for name in names], files, run.test_directory)
    left = [[name for name in names if name not in lacking] for names in named]
    if (run.include and not left[0]) or (run.within and not left[2]):
        words = f"none of the named test files of PyTorch is here: {first_few(lacking)}"
        raise UnknownTest(f"{words}; --list shows all files")
    if lacking:
        _remark(f"these test files of PyTorch are not here: {first_few(lacking)}")
    return left


def _entries(run: RunTests) -> list[expectations.Entry]:
    entries: list[expectations.Entry] = []
    if run.disabled and _is_there(run.disabled):
        entries, remarks = expectations.read_disabled(run.disabled)
        _remark(*remarks)
    if run.slow and _is_there(run.slow):
        entries += expectations.read_slow(run.slow)
    return entries + [entry for path in run.known_failures for entry in expectations.read_own(path)]


def _earlier(run: RunTests) -> Report | None:
    """The report with which this run will be compared."""
    if run.compare is None:
        return None
    from torch_fsdp_tests.dispatch import compare

    return compare.load(run.compare)


def _against(run: RunTests) -> Record | None:
    """The behaviour with which that of this run will be compared."""
    if run.against_behaviour is None:
        return None
    from torch_fsdp_tests.dispatch import behaviour_files

    return behaviour_files.load(run.against_behaviour)


def _is_there(path: Path) -> bool:
    """Whether one of upstream's lists exists. Upstream's CI also names files that it could not fetch."""
    if not path.exists():
        _remark(f"{path} does not exist, so it disables no test and marks none as slow")
    return path.exists()


def _plan(
    run: RunTests, site: Site, files: Mapping[str, Path], selection: list[TestRun], device_set: DeviceSet
) -> _Plan:
    known = times.load(run.test_times, os.environ)
    _remark(*known.remarks)
    ranks = run.ranks or site.world_size or settings.USUAL_RANKS
    jobs_at_a_time = run.jobs or options.default_jobs(ranks) if site.world_size is None else 1
    slots = device_set.names or [f"slot {n + 1}" for n in range(jobs_at_a_time)]
    needs = {test.file: known.needs.get(test.file, times.Needs(ranks, ranks)) for test in selection}
    lent = {name: len(slots) if device_set.is_lent_whole else need.devices for name, need in needs.items()}
    cut = [test.file for test in selection if not test.is_whole and not run.by_reach]
    shards = plan.calculate_shards(
        run.num_shards,
        selection,
        known.files,
        known.classes,
        threshold=math.inf if run.by_reach or run.completes_map else plan.SPLIT_THRESHOLD,
        weights={name: min(need, len(slots)) for name, need in lent.items()} if device_set.lendable else {},
        names={name: tests_by_class(source_of(files[name])) or {} for name in cut},
    )
    parts = shards[run.shard - 1][1]
    default = plan.assumed(parts)
    if run.by_reach:  # the order of the selection matters more than full use of the slots
        jobs = plan.make_jobs(plan.in_order(parts, selection), lent, device_set.lendable)
    else:
        jobs = plan.order(plan.make_jobs(parts, lent, device_set.lendable), len(slots), default)
    return _Plan(jobs, default, needs, ranks, device_set, slots)


def _matching(run: RunTests, site: Site, planned: _Plan) -> tuple[_Plan, ExitStatus]:
    """The plan without files in which no test matches ``-k``. Only the files themselves know the names of their tests.

    Files that cannot be imported stay, as in a run.
    """
    import io

    from torch_fsdp_tests.dispatch.console import Console
    from torch_fsdp_tests.dispatch.runner import Runner

    lister = dataclasses.replace(run, dry_run=False, list_files=True, list_tests=True)
    under_test = devices.under_test(planned.device_set, run, planned.ranks)
    with _children(lister, planned.device_set) as children:
        assert children is not None
        quiet = Console(lister, io.StringIO(), len(planned.jobs), under_test, len(planned.slots))
        runner = Runner(lister, planned.jobs, planned.device_set, planned.slots, (), quiet, site, children)
        results = runner.run()
    _remark(*filter(None, [results.unmatched()]))
    left = {file.job.key for file in results.files if file.tests()}
    jobs = [job for job in planned.jobs if job.key in left]
    return dataclasses.replace(planned, jobs=jobs), ExitStatus.OK if jobs else ExitStatus.NOTHING_RAN


def _dry_run(run: RunTests, planned: _Plan) -> str:
    total = plan.makespan(plan.simulate(planned.jobs, len(planned.slots), planned.default))
    if run.as_json:
        return json.dumps(listing.plan_json(run, planned.jobs, total))
    return listing.plan_text(planned.jobs, total)


def _run(
    run: RunTests,
    site: Site,
    files: Collection[str],
    planned: _Plan,
    entries: Sequence[expectations.Entry],
    earlier: Report | None,
    against: Record | None,
    children: Children,
) -> ExitStatus:
    from torch_fsdp_tests.dispatch import last_failures, report
    from torch_fsdp_tests.dispatch.console import Console
    from torch_fsdp_tests.dispatch.runner import Runner

    if run.is_own and (missing := devices.missing_packages()) is not None:
        raise ConfigurationError(missing)
    device_set = planned.device_set
    devices.check(device_set, run.device, run.backend, run.ranks)
    if run.save_times is not None:
        times.check(run.save_times, os.environ)
    site.gather(run, device_set.type)
    stream = sys.stderr if run.list_tests else sys.stdout
    under_test = devices.under_test(device_set, run, planned.ranks)
    console = Console(run, stream, len(planned.jobs), under_test, len(planned.slots))
    keep = []
    if run.report and not run.list_tests:
        _remark(*report.set_aside(run.report, report.FILE, report.PAGE, report.UNFINISHED))
        keep = [report.Unfinished(run.report).keep]
    # After the last file, while the reports are written, signals only change the exit status: reports must be complete.
    children.note((signal.SIGINT, *host.ending_signals()))
    runner = Runner(run, planned.jobs, device_set, planned.slots, entries, console, site, children, *keep)
    before = leaks.paths_below(run.test_directory) if run.is_own else set()
    results = runner.run_rounds()
    new = leaks.paths_below(run.test_directory) - before if run.is_own else set()
    results.written = sorted(path for path in new if os.path.dirname(path) not in new)
    if run.list_tests:
        return _print_tests(results)
    last_failures.save(run.reports, device_set.type, files, results, results.remarks)
    remarks, all_written = _record(run, results, earlier)
    behaves = ExitStatus.OK
    if run.behaviour is not None:
        from torch_fsdp_tests.dispatch import comparing

        def rerun(other: RunTests, jobs: Sequence[Job]) -> Results:
            children.end_server()  # it has imported torch with the change
            shown = Console(other, stream, len(jobs), under_test, len(planned.slots))
            shown.say(f"\nwithout the change: {plural(len(jobs), 'job')}")
            return Runner(other, jobs, device_set, planned.slots, entries, shown, site, children).run()

        try:
            words, behaves = comparing.conclude(run, results, against, rerun, planned.jobs)
            remarks += words
        except OSError as error:
            remarks.append(f"the behaviour cannot be written: {error}")
            all_written = False
    console.end(results, remarks)
    results.signal = results.signal or next(iter(children.signals), None)
    written = ExitStatus.OK if all_written else ExitStatus.BROKEN
    return results.exit_code() or written or behaves


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


def _record(run: RunTests, results: Results, earlier: Report | None) -> tuple[list[str], bool]:
    """Write the requested reports. Returns remarks, and whether all could be written.

    If something cannot be written, the rest is still written.
    """
    from torch_fsdp_tests.dispatch import compare, junit, reaching, report

    remarks = [
        *results.list_remarks(),
        *results.written_remarks(),
        *(f"unknown test: {words}" for words in results.unknown()),
        *results.remarks,
    ]
    if run.perturb and results.failed and not run.fixes:
        remarks.append(
            "perturbation also shows known defects of torch: repeat with --with-fixes to see what else fails"
        )
    complete = True
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
            complete, words = False, f"{what} cannot be written: {error}"
        if words:
            remarks.append(words)
    if earlier is not None:
        remarks += compare.lines(earlier, report.as_json(results))
    return remarks, complete


def _remark(*sentences: str) -> None:
    for words in sentences:
        print(f"{installation.program_name()}: {words}", file=sys.stderr, flush=True)
