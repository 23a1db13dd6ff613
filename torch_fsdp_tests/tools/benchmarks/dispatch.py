"""Measures the plan: its makespan compared with the lower bound and with upstream's policy, and the planning time.

Upstream runs distributed files one after the other, whatever number of devices each of them uses.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from torch_fsdp_tests.dispatch import plan, times
from torch_fsdp_tests.dispatch.discover import discover
from torch_fsdp_tests.dispatch.expectations import MalformedList
from torch_fsdp_tests.dispatch.plan import Job, TestRun

ROUNDS = 50  # suites of a kind
DRAWN = (54, 300)  # files: as many as upstream has for FSDP, and about as many as it has below distributed/


def _compare(jobs: Sequence[Job], devices: int) -> tuple[float, float]:
    """Our makespan and upstream's, both as multiples of the lower bound."""
    default = plan.assumed(job.part for job in jobs)
    bound = plan.lower_bound(jobs, devices, default)
    ours = plan.makespan(plan.simulate(plan.order(jobs, devices, default), devices, default))
    return ours / bound, sum(job.part.get_time(default) for job in jobs) / bound


def _random_jobs(draw: random.Random, count: int, devices: int) -> list[Job]:
    """Files as they come: most short, a few long, most on two devices or four."""
    seconds = {f"test_{number:05d}": draw.lognormvariate(3.3, 1.0) for number in range(count)}
    needs = {name: draw.choices((1, 2, 4, 8), (2, 5, 4, 1))[0] for name in seconds}
    return plan.make_jobs(plan.split(map(TestRun, seconds), seconds, {}), needs, devices)


def _recorded_jobs(directory: Path, devices: int, known: times.Times) -> list[Job]:
    """The files of a test directory whose times are known."""
    files = [file for file in discover(directory) if file.name in known.files]
    needs = {file.name: known.needs[file.name].devices for file in files if file.name in known.needs}
    parts = plan.split([TestRun(file.name) for file in files], known.files, known.classes)
    return plan.make_jobs(parts, needs, devices)


def _drawn_jobs(draw: random.Random, recorded: Sequence[Job], count: int) -> list[Job]:
    """A suite of another size whose files last as long, and are as wide, as recorded ones, drawn with repetition."""
    drawn = enumerate(draw.choices(recorded, k=count))
    return [
        dataclasses.replace(job, part=dataclasses.replace(job.part, test=TestRun(f"{job.part.name}_{number}")))
        for number, job in drawn
    ]


def _row(name: str, suites: Sequence[Sequence[Job]], devices: int) -> None:
    pairs = [_compare(jobs, devices) for jobs in suites]
    own, upstream = [ours for ours, _ in pairs], [theirs for _, theirs in pairs]
    print(f"{name:38s} {statistics.median(own):7.3f} {max(own):7.3f} {statistics.median(upstream):20.2f}")


def main(argv: Sequence[str]) -> int:
    """Print a table: multiples of the lower bound, and seconds of planning."""
    parser = argparse.ArgumentParser(prog="python -m torch_fsdp_tests.tools.benchmarks dispatch", description=__doc__)
    add = parser.add_argument
    add("--devices", type=int, default=8, metavar="N", help="number of devices to plan for (default: 8)")
    add("--test-directory", type=Path, default=Path("test"), metavar="DIR", help="where the tests are (default: test)")
    words = "read recorded times from this file; may be repeated"
    add("--test-times", type=Path, action="append", default=[], metavar="FILE", help=words)
    options = parser.parse_args(argv)
    if options.devices < 1:
        parser.error("--devices must be 1 or more")
    if not options.test_directory.is_dir():
        parser.error(f"the test directory {options.test_directory} does not exist; name one with --test-directory")
    try:
        known = times.load(options.test_times, os.environ)
    except MalformedList as error:
        parser.error(str(error))
    for remark in known.remarks:
        print(f"benchmarks: {remark}", file=sys.stderr)
    print(f"makespan on {options.devices} devices, as a multiple of the lower bound (1.00 is perfect)")
    print(f"{'files':38s} {'median':>7s} {'worst':>7s} {'one after the other':>20s}")
    recorded = _recorded_jobs(options.test_directory, options.devices, known)
    if recorded:
        _row(f"{len(recorded)} with recorded times", [recorded], options.devices)
        for count in DRAWN:
            draw = random.Random(count)
            suites = [_drawn_jobs(draw, recorded, count) for _ in range(ROUNDS)]
            _row(f"{count} drawn from these, {ROUNDS} suites", suites, options.devices)
    else:
        print(
            "no file there has a recorded time: run_test.py --save-times DIR records them, and --test-times reads them"
        )
    for count in (54, 200, 1000):
        draw = random.Random(count)
        suites = [_random_jobs(draw, count, options.devices) for _ in range(ROUNDS)]
        _row(f"{count} random, {ROUNDS} suites", suites, options.devices)
    seconds = _planning_seconds(10_000, 256, options.devices)
    print(f"planning 10,000 files onto 256 shards, and ordering each of these: {seconds:.2f} s")
    return 0


def _planning_seconds(files: int, shards: int, devices: int) -> float:
    draw = random.Random(0)
    known = {f"test_{number:05d}": draw.lognormvariate(3.3, 1.0) for number in range(files)}
    needs = {name: draw.choice((1, 2, 4)) for name in known}
    began = time.perf_counter()
    default = statistics.fmean(known.values())
    for _, parts in plan.calculate_shards(shards, list(map(TestRun, known)), known, weights=needs):
        plan.order(plan.make_jobs(parts, needs, devices), devices, default)
    return time.perf_counter() - began
