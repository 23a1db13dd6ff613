"""Where the time of a run went, from the ``report.json`` that ``run_test.py --report DIR`` wrote.

A file's seconds are those before its first test and after its last one (imports), those in which its tests start and
end ranks, those in which ranks run tests, and those of tests without ranks. Its processor time is that of all its
processes. The lower bound of a folder is its processor time divided by the number of cores. Repeated processes and
further rounds do not count.
"""

from __future__ import annotations

import dataclasses
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch.compare import load
from torch_fsdp_tests.dispatch.expectations import MalformedList
from torch_fsdp_tests.dispatch.options import Parser
from torch_fsdp_tests.dispatch.plan import Job, ShardedTest, TestRun, makespan, order, simulate
from torch_fsdp_tests.dispatch.report import FILE

PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
SLOTS = (1, 2, 4, 8, 16)


@dataclasses.dataclass
class Spent:
    """What one file or one folder has spent. Everything is in seconds, except for ``page_faults``."""

    files: float = 0.0
    starts: float = 0.0  # of ranks, and their ends
    ranks: float = 0.0  # the slowest rank of each test
    alone: float = 0.0  # tests without ranks
    bodies: float = 0.0  # processor time of all ranks in their tests
    user: float = 0.0
    system: float = 0.0
    page_faults: int = 0

    @property
    def imports(self) -> float:
        return max(0.0, self.files - self.starts - self.ranks - self.alone)

    @property
    def processor(self) -> float:
        return self.user + self.system

    def __iadd__(self, other: Spent) -> Spent:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self


def spent(file: Mapping[str, Any]) -> Spent:
    """What a file of the report has spent in its first process."""
    attempt = file["attempts"][0]
    total = Spent(files=attempt["ended"] - attempt["began"], **attempt["facts"].get("used", {}))
    for test in file["tests"]:
        if times := test["rank_seconds"]:
            total.ranks += max(times)
            total.starts += max(0.0, test["seconds"] - max(times))
            total.bodies += sum(test["rank_cpu"] or ())
        else:
            total.alone += test["seconds"]
    return total


def folders(files: Iterable[Mapping[str, Any]]) -> dict[str, Spent]:
    """What each folder of tests has spent, and all of them."""
    sums: dict[str, Spent] = defaultdict(Spent)
    for file in files:
        for name in (os.path.dirname(file["file"]) or ".", "all"):
            sums[name] += spent(file)
    return dict(sorted(sums.items(), key=lambda item: -item[1].files))


def efficiency(files: Iterable[Mapping[str, Any]], slots: int) -> tuple[float, float]:
    """Seconds that the files would take on so many slots in the dispatcher's order, and the share of the slots' time in
    which they would run.
    """
    jobs = [Job(ShardedTest(TestRun(file["file"]), 1, 1, spent(file).files), 0, 1) for file in files]
    seconds = makespan(simulate(order(jobs, slots, 0.0), slots, 0.0))
    return seconds, sum(job.part.get_time(0.0) for job in jobs) / (slots * seconds)


def slowest(files: Iterable[Mapping[str, Any]], number: int) -> list[tuple[float, str, int, float]]:
    """The slowest tests: seconds, name, ranks, and the share of the ranks' seconds in which they computed."""
    rows = []
    for file in files:
        for test in file["tests"]:
            seconds, cpu = sum(test["rank_seconds"] or ()), sum(test["rank_cpu"] or ())
            busy = cpu / seconds if seconds else 0.0
            rows.append((test["seconds"], f"{file['file']}::{test['test']}", test["world_size"] or 0, busy))
    return sorted(rows, reverse=True)[:number]


def _table(*rows: Sequence[object]) -> None:
    head, *body = rows
    for row in (head, ["---"] * len(head), *body):
        print("|", " | ".join(f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row), "|")
    print()


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def show(report: Mapping[str, Any], number: int) -> None:
    """Print the tables, in Markdown."""
    files, cores, slots = report["files"], report["cores"], len(report["slots"])
    sums = folders(files)
    whole = sums["all"]
    print(f"{len(files)} files in {report['seconds']:.0f} s on {cores} cores, {slots} slots, torch {report['torch']}")
    print(f"slots without a file: {_share(slots * report['seconds'] - whole.files, slots * report['seconds'])}")
    print(f"cores without work: {_share(cores * report['seconds'] - whole.processor, cores * report['seconds'])}\n")
    head = ("folder", "seconds", "imports", "ranks start and end", "ranks run tests", "tests without ranks")
    _table(head, *((name, of.files, of.imports, of.starts, of.ranks, of.alone) for name, of in sums.items()))
    head = ("folder", "processor seconds", "ranks in their tests", "system", "GiB of touched pages", "lower bound, s")
    rows = []
    for name, of in sums.items():
        shares = (_share(of.bodies, of.processor), _share(of.system, of.processor))
        rows.append((name, of.processor, *shares, of.page_faults * PAGE_SIZE / 2**30, of.processor / cores))
    _table(head, *rows)
    simulated = [(count, *efficiency(files, count)) for count in SLOTS]
    _table(("slots", "seconds", "efficiency"), *((count, took, f"{share:.2f}") for count, took, share in simulated))
    tests = ((took, name, ranks, f"{100 * busy:.0f} %") for took, name, ranks, busy in slowest(files, number))
    _table(("seconds", "test", "ranks", "ranks compute"), *tests)


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="python -m torch_fsdp_tests.tools.benchmarks suite", description=__doc__)
    parser.add_argument("report", type=Path, help=f"a report's folder, or its {FILE}")
    parser.add_argument("--tests", type=int, default=30, metavar="N", help="show the N slowest tests (default: 30)")
    options = parser.parse_args(argv)
    path = options.report / FILE if options.report.is_dir() else options.report
    try:
        report = load(path)
    except MalformedList as error:
        parser.error(str(error))
    if not any("used" in file["attempts"][0]["facts"] for file in report["files"]):
        parser.error(f"{path} has no processor times: run the tests again with --report")
    if options.tests < 0:
        parser.error("--tests must be 0 or more")
    show(report, options.tests)
    return 0
