"""The whole run on one screen: options, files, selection, plan, processes, reports, exit code."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_fsdp_tests.dispatch import devices, lists, memory, options, plan, times
from torch_fsdp_tests.dispatch.console import Console, plan_text
from torch_fsdp_tests.dispatch.devices import DeviceSet
from torch_fsdp_tests.dispatch.discover import TestFile, discover
from torch_fsdp_tests.dispatch.plan import Job, TestRun
from torch_fsdp_tests.dispatch.pool import DevicePool
from torch_fsdp_tests.dispatch.results import Results
from torch_fsdp_tests.dispatch.runner import Runner
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.dispatch.select import Source, UnknownTest, matching, select

DEFAULT_RANKS = 4  # of a test that states no number; the harness has the same default on the CPU


def main(argv: Sequence[str], checkout: Path) -> int:
    """Run the dispatcher and return its exit code. ``checkout`` is put first on the children's path."""
    run = options.parse(argv, os.environ, checkout)
    try:
        return _main(run, checkout)
    except (UnknownTest, lists.MalformedList) as error:
        return _refuse(str(error))
    except OSError as error:
        with contextlib.suppress(OSError):
            print(f"run_test.py: cannot go on: {error}", file=sys.stderr, flush=True)
        # What is still in stdout's buffer cannot be written either; the interpreter must not try again at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 3


def _main(run: RunTests, checkout: Path) -> int:
    files = {file.name: file for file in discover(run.test_directory)}
    sources: dict[str, str] = {}

    def source(name: str) -> str:
        return sources.setdefault(name, files[name].source())

    selection = _select(run, list(files.values()), source)
    known = times.load(run.test_times, os.environ)
    entries = _entries(run)
    for remark in known.remarks:
        print(f"run_test.py: {remark}", file=sys.stderr, flush=True)
    if not selection:
        print("run_test.py: nothing is selected", file=sys.stderr)
        print("0 passed, 0 failed, 0 skipped", file=sys.stderr if run.as_json else sys.stdout)
        return 5
    device_set = devices.find(run.device, run.devices, os.environ)
    ranks = run.ranks or DEFAULT_RANKS
    needs = {test.file: files[test.file].needs().ranks(ranks) for test in selection}
    pool = DevicePool(device_set.names or [f"slot {n + 1}" for n in range(run.jobs or options.default_jobs(ranks))])
    jobs, default = _plan(run, selection, known, needs, pool, device_set)
    total = plan.makespan(plan.simulate(jobs, pool.size, default))
    if run.list_files and not run.list_tests:
        print(plan_text([(job.part, job.devices) for job in sorted(jobs, key=lambda job: job.key)], None))
        return 0
    if run.dry_run:
        print(
            json.dumps(plan_json(run, jobs, total))
            if run.as_json
            else plan_text([(j.part, j.devices) for j in jobs], total)
        )
        return 0
    if not jobs:
        print(f"shard {run.shard} of {run.num_shards} has no work: there are fewer jobs than shards")
        print("0 passed, 0 failed, 0 skipped")
        return 0
    console = Console(run, sys.stdout, len(jobs))
    paths = {name: file.path for name, file in files.items()}
    if run.list_tests:
        return _list_tests(
            Runner(run, jobs, paths, device_set, pool, entries, Console(run, sys.stderr, len(jobs)), checkout)
        )
    results = Runner(run, jobs, paths, device_set, pool, entries, console, checkout).run()
    remarks = results.list_remarks() + [f"unknown test: {words}" for words in results.unknown()]
    remarks += _record(run, results)
    console.end(results, remarks)
    return results.exit_code()


def _select(run: RunTests, files: Sequence[TestFile], source: Source) -> list[TestRun]:
    selection = select(files, run.include, run.exclude, run.test_directory, source)
    if run.distributed_only:
        below = set(matching("distributed", [file.name for file in files]))
        selection = [test for test in selection if test.file in below]
    if run.failed_only:
        failed = memory.load(run.reports)
        selection = [memory.narrow(test, failed[test.file]) for test in selection if test.file in failed]
    return selection


def _entries(run: RunTests) -> list[lists.Entry]:
    entries = lists.read_disabled(run.disabled) if run.disabled else []
    entries += lists.read_slow(run.slow) if run.slow else []
    return entries + (lists.read_own(run.known_failures) if run.known_failures else [])


def _plan(
    run: RunTests,
    selection: list[TestRun],
    known: times.Times,
    needs: dict[str, int],
    pool: DevicePool,
    device_set: DeviceSet,
) -> tuple[list[Job], plan.Seconds]:
    """The jobs of this shard in order of start, and the seconds that one of unknown length is taken to last."""
    weights = {name: min(need, pool.size) for name, need in needs.items()} if device_set.lendable else {}
    shards = plan.calculate_shards(
        run.num_shards, selection, known.files, known.classes, threshold=run.split_threshold, weights=weights
    )
    parts = shards[run.shard - 1][1]
    default = plan.assumed(parts)
    return plan.order(plan.make_jobs(parts, needs, device_set.lendable), pool.size, default), default


def plan_json(run: RunTests, jobs: Sequence[Job], total: plan.Seconds) -> dict:
    """The plan as data; its shape is in ``data/plan.schema.json``."""
    return {
        "shard": run.shard,
        "num_shards": run.num_shards,
        "jobs": [
            {
                "file": job.part.name,
                "shard_id": job.part.shard,
                "num_shards": job.part.num_shards,
                "devices": job.devices,
                "estimate": job.part.time,
                "tests": sorted(job.part.test.included) or None,
                **({"excluded": sorted(job.part.test.excluded)} if job.part.test.excluded else {}),
            }
            for job in jobs
        ],
        "estimate": round(total, 3),
    }


def _list_tests(runner: Runner) -> int:
    results = runner.run()
    for file in sorted(results.files, key=lambda file: file.job.key):
        for test in file.tests():
            if not test.outcome.is_bad:
                print(f"{file.job.part.name}::{test.name.replace('.', '::')}", flush=True)
    for words in results.unknown():
        print(f"run_test.py: unknown test: {words}", file=sys.stderr)
    code = results.exit_code()
    return 0 if code == 5 and any(file.tests() for file in results.files) else code


def _record(run: RunTests, results: Results) -> list[str]:
    """Write what was asked for, and what ``--failed`` will read. What cannot be written is said, not hidden."""
    from torch_fsdp_tests.dispatch import compare, junit, report

    remarks: list[str] = []
    memory.save(run.reports, results, remarks)
    if run.pipe_logs:
        remarks.append(f"logs: {os.path.relpath(report.write_logs(results))}")
    if run.save_xml is not None:
        junit.write(run.save_xml, results)
    if run.save_times is not None:
        times.save(run.save_times, *report.measured(results), os.environ)
    if run.report is not None:
        report.write(run.report, results)
        remarks.append(f"report: {os.path.relpath(run.report / 'report.html')}")
    if run.compare is not None:
        remarks += compare.lines(lists.read_json(run.compare), report.as_json(results))
    if run.coverage:
        remarks.append("coverage: python -m coverage combine, then python -m coverage report")
    return remarks


def _refuse(message: str) -> int:
    print(f"run_test.py: {message}", file=sys.stderr)
    return 2
