"""The overhead of a test around its body: this package's harness against torch.testing._internal's, in the same run.

The same source is run under both, only the import prefix differs: ``MultiProcessTestCase`` ranks make a gloo group,
take one ``fully_shard`` step and leave. Runs are paired and take turns, since machines are noisy; a ratio is the median
of the pairs' ratios. Two figures matter and are always both given: seconds per further test, and the whole file with
all imports, a second import of torch in helper processes included.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from torch_fsdp_tests import installation
from torch_fsdp_tests.dispatch.devices import cores
from torch_fsdp_tests.dispatch.options import Parser
from torch_fsdp_tests.processes import system

OURS = "torch_fsdp_tests"
UPSTREAM = "torch.testing._internal"
STAGES = ("start", "rendezvous", "body", "tear-down")
RUN_LIMIT = 1800  # seconds for one run of a file

_SOURCE = """
import os, time
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from {prefix}.common_distributed import MultiProcessTestCase
from {prefix}.common_utils import run_tests

def stamp(stage, rank=-1):
    with open(os.environ["BENCHMARK_STAMPS"], "a") as file:
        file.write(f"{{stage}} {{rank}} {{time.time()}}\\n")

class TestCost(MultiProcessTestCase):
    @property
    def world_size(self):
        return {ranks}

    def setUp(self):
        super().setUp()
        stamp("begin")
        self._spawn_processes()

    def tearDown(self):
        stamp("end")
        super().tearDown()

    def _step(self):
        stamp("entered", self.rank)
        torch.set_num_threads(1)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "{interface}")
        store = dist.FileStore(self.file_name, {ranks})
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size={ranks})
        stamp("connected", self.rank)
        model = torch.nn.Linear(8, 8)
        fully_shard(model)
        model(torch.ones(2, 8)).sum().backward()
        assert model.weight.grad is not None
        stamp("stepped", self.rank)
        dist.barrier()
        dist.destroy_process_group()

for _number in range({tests}):
    setattr(TestCost, f"test_{{_number:02}}", lambda self: self._step())

if __name__ == "__main__":
    run_tests()
"""


class TimedRun:
    """One run of a generated file: its wall time, and the stamps that its tests left."""

    def __init__(self, prefix: str, ranks: int, tests: int) -> None:
        with tempfile.TemporaryDirectory(prefix="torch_fsdp_tests-") as folder:
            file, stamps = Path(folder, "test_cost.py"), Path(folder, "stamps")
            source = _SOURCE.format(prefix=prefix, ranks=ranks, tests=tests, interface=system.loopback_interface())
            file.write_text(source)
            environment = os.environ | {"BENCHMARK_STAMPS": str(stamps), "PYTHONPATH": str(installation.ROOT)}
            before = time.perf_counter()
            command = [sys.executable, str(file)]
            done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=RUN_LIMIT)
            self.seconds = time.perf_counter() - before
            if done.returncode != 0 or f"Ran {tests} test" not in done.stderr:
                raise SystemExit(f"the benchmark's own test failed under {prefix}:\n{done.stdout}{done.stderr}")
            self._stamps = [line.split() for line in stamps.read_text().splitlines()]
        entered = sum(1 for stage, _, _ in self._stamps if stage == "stepped")  # by all ranks of all tests
        if entered != ranks * tests:
            raise SystemExit(f"{prefix} ran {entered} of {ranks * tests} ranks, so its time is meaningless")

    def tests(self) -> list[dict[str, float]]:
        """Seconds of each stage of each test, up to the slowest rank's end of the stage, in order."""
        stages: list[dict[str, float]] = []
        latest: dict[str, float] = {}
        for stage, _, at in self._stamps:
            latest[stage] = float(at)
            if stage == "end":
                edges = [latest[name] for name in ("begin", "entered", "connected", "stepped", "end")]
                stages.append(dict(zip(STAGES, (late - early for early, late in itertools.pairwise(edges)))))
                stages[-1]["test"] = edges[-1] - edges[0]
                latest = {}
        return stages


def _further(run: TimedRun) -> float:
    """Median seconds of a test after the first of its file."""
    return statistics.median(test["test"] for test in run.tests()[1:])


def measure(ranks: int, tests: int, pairs: int) -> dict[str, object]:
    """Run both harnesses in turn and return the medians, the median ratios, and how far the pairs' ratios spread.

    Every other pair begins with the other one, so that a machine that grows slower favors neither.
    """
    runs: dict[str, list[TimedRun]] = {OURS: [], UPSTREAM: []}
    for pair in range(pairs):
        for prefix in (OURS, UPSTREAM) if pair % 2 == 0 else (UPSTREAM, OURS):
            print(f"{ranks} ranks, pair {pair + 1} of {pairs}: {prefix} ...", file=sys.stderr, flush=True)
            runs[prefix].append(TimedRun(prefix, ranks, tests))
    ours, theirs = runs[OURS], runs[UPSTREAM]
    further = [_further(b) / _further(a) for a, b in zip(ours, theirs)]
    file = [b.seconds / a.seconds for a, b in zip(ours, theirs)]
    stages = {
        name: [statistics.median(test[stage] for run in runs for test in run.tests()[1:]) for stage in STAGES]
        for name, runs in (("ours", ours), ("theirs", theirs))
    }
    return {
        "ranks": ranks,
        "further": [statistics.median(map(_further, ours)), statistics.median(map(_further, theirs))],
        "further_ratio": statistics.median(further),
        "further_spread": [min(further), max(further)],
        "file": [statistics.median(run.seconds for run in runs) for runs in (ours, theirs)],
        "file_ratio": statistics.median(file),
        "file_spread": [min(file), max(file)],
        "stages": stages,
    }


def _machine() -> str:
    """What was measured on, in words."""
    versions = f"torch {importlib.metadata.version('torch')}, Python {platform.python_version()}"
    return f"{versions}, {platform.machine()}, {cores()} cores, load {os.getloadavg()[0]:.1f} before"


def _spread(bounds: Sequence[float], digits: int) -> str:
    return f"({bounds[0]:.{digits}f}-{bounds[1]:.{digits}f})"


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog="python -m torch_fsdp_tests.tools.benchmark", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", default=[2, 4, 8], metavar="N", help="world sizes (default: 2 4 8)")
    add("--tests", type=int, default=12, metavar="N", help="tests per file, 2 or more (default: 12)")
    add("--pairs", type=int, default=3, metavar="N", help="pairs of runs (default: 3)")
    add("--json", action="store_true", help="print one JSON object per world size instead of the table")
    options = parser.parse_args(argv)
    if options.tests < 2 or options.pairs < 1 or min(options.ranks) < 1:
        parser.error("--tests must be 2 or more, and --pairs and --ranks 1 or more")
    if not options.json:
        print(f"{_machine()}; {options.tests} tests per file, medians of {options.pairs} pairs (least and most)\n")
        print("| ranks | s per further test: ours | upstream | ratio | s per file: ours | upstream | ratio |")
        print("|---|---|---|---|---|---|---|", flush=True)
    lines: list[str] = []
    for ranks in options.ranks:
        row: dict = measure(ranks, options.tests, options.pairs)
        if options.json:
            print(json.dumps(row), flush=True)
            continue
        (ours, theirs), (file, their_file) = row["further"], row["file"]
        print(
            f"| {ranks} | {ours:.3f} | {theirs:.2f} | {row['further_ratio']:.0f} {_spread(row['further_spread'], 0)} "
            f"| {file:.1f} | {their_file:.1f} | {row['file_ratio']:.1f} {_spread(row['file_spread'], 1)} |",
            flush=True,
        )
        for name, seconds in row["stages"].items():
            cells = " | ".join(f"{value:.3f}" for value in seconds)
            lines.append(f"| {ranks} | {'ours' if name == 'ours' else 'upstream'} | {cells} |")
    if lines:
        print(f"\nwhere the seconds of a further test go:\n\n| ranks | harness | {' | '.join(STAGES)} |")
        print("|---" * (2 + len(STAGES)) + "|", *lines, sep="\n")
    return 0


if __name__ == "__main__":
    system.run_command("benchmark", main)
