"""Sixty changes to torch's FSDP that are made like real bugs: how soon a test that ``--reaching`` selects detects each.

The changes are in ``data/changes.diff``. The weights of the order were chosen with those marked as tuning, and say
nothing about the others. Each change is made in a copy of the installed torch, whose other files are links. One test
runs at a time. What counts are the recorded seconds of the tests up to the first that fails, and tests beyond the limit
do not run, so that a busy machine gives the same figures.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_fsdp_tests.dispatch import devices, reaching
from torch_fsdp_tests.dispatch.options import Parser
from torch_fsdp_tests.reach import Reached, ReachMap
from torch_fsdp_tests.reach.diffs import NotADiff, applied
from torch_fsdp_tests.reach.order import within

CHANGES = Path(__file__).parent / "data/changes.diff"
HALVES = ("tuning", "held out")
_HEAD = re.compile(r"^# (?P<id>\S+) \((?P<half>[a-z ]+)\): (?P<what>.+)\n", re.MULTILINE)
_FAILED_TEST = re.compile(r"^  [a-z ]+: (?P<file>\S+)(?: \(\d+ of \d+\))?::(?P<test>\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Edit:
    """One change: what is wrong afterwards, and the diff."""

    id: str
    half: str
    what: str
    diff: str


def read(path: Path) -> list[Edit]:
    """The changes of a file, in their order."""
    text = path.read_text(encoding="utf-8")
    heads = [*_HEAD.finditer(text)]
    ends = [*(head.start() for head in heads[1:]), len(text)]
    return [Edit(head["id"], head["half"], head["what"], text[head.end() : end]) for head, end in zip(heads, ends)]


@contextlib.contextmanager
def _changed(torch: Path, edit: Edit) -> Iterator[tuple[Path, Path]]:
    """A folder with a changed copy of PyTorch, for the front of the path, and a file with the change as a diff."""
    try:
        texts = applied(edit.diff, torch.parent)
    except NotADiff as error:
        raise SystemExit(f"{edit.id} is {error}: torch is {devices.torch_version()}") from error
    with tempfile.TemporaryDirectory(prefix="changed-torch-") as made:
        site = Path(made)
        shutil.copytree(torch, site / torch.name, copy_function=os.symlink)
        for name, text in texts.items():
            (site / name).unlink()
            (site / name).write_text(text, encoding="utf-8")
        diff = site / "change.diff"
        diff.write_text(edit.diff, encoding="utf-8")
        yield site, diff


LONGEST = 600.0  # seconds of one run, on any machine


def _run(site: Path, diff: Path, tests: Sequence[str], *words: str) -> str:
    """The output of ``run_test.py``, which ends at the first failure or after :data:`LONGEST` seconds."""
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "run_test.py", "-i", *tests, "--fail-fast", "--reaching", str(diff), "-j", "1"]
    with tempfile.TemporaryDirectory(prefix="reaching-") as reports:
        started = subprocess.Popen(
            [*command, "--report", reports, *words], env=environment, stdout=subprocess.PIPE, text=True
        )
        try:
            return started.communicate(timeout=LONGEST)[0]
        except subprocess.TimeoutExpired:
            started.terminate()
            return started.communicate()[0]


def until(tests: Sequence[Reached], file: str, test: str) -> float:
    """The recorded seconds of the tests up to the one that failed first."""
    names = [(each.file, each.test) for each in tests]
    return sum(each.seconds for each in tests[: names.index((file, test)) + 1])


def summary(seconds_of: dict[str, list[float | None]]) -> str:
    """A line for each half: how many were detected, the median, and the 90th percentile."""
    lines = ["| changes | detected | median | 90th percentile |", "|---|---|---|---|"]
    for half, values in seconds_of.items():
        if not values:
            continue
        known = sorted(float("inf") if value is None else value for value in values)
        middle, last = statistics.median_low(known), known[min(len(known) - 1, int(0.9 * len(known)))]
        texts = (f"{value:.1f} s" if value < float("inf") else "not detected" for value in (middle, last))
        detected = sum(value is not None for value in values)
        lines.append(f"| {half} | {detected} of {len(values)} | {' | '.join(texts)} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Print a table, one line for each change."""
    parser = Parser(prog="python -m torch_fsdp_tests.tools.benchmarks reaching", description=__doc__)
    words = "only the changes whose ids begin like this, such as F2 or F1-07"
    parser.add_argument("--only", action="append", help=words)
    parser.add_argument("--limit", type=float, default=50.0, help="seconds of tests for one change (default: 50)")
    options = parser.parse_args(argv)
    edits = read(CHANGES)
    for name in options.only or ():
        if not any(edit.id.startswith(name) for edit in edits):
            parser.error(f"no change has an id that begins with {name}")
    torch = devices.torch_folder()
    if torch is None or not Path("run_test.py").exists():
        parser.error("install torch, and run this command in the checkout of the suite")
    known = ReachMap.load(reaching.shipped(devices.torch_version() or "", reaching.SHIPPED))
    by_name = {(test.file, test.test): test for test in known.tests}
    seconds_of: dict[str, list[float | None]] = {half: [] for half in HALVES}
    print("| | change | detected by | seconds of tests | seconds |\n|---|---|---|---|---|", flush=True)
    for edit in edits:
        if options.only and not edit.id.startswith(tuple(options.only)):
            continue
        with _changed(torch, edit) as (site, diff):
            jobs = json.loads(_run(site, diff, ["distributed"], "--dry-run", "--json"))["jobs"]
            names = ((job["file"], test) for job in jobs for test in job["tests"])
            tests = within(options.limit, (by_name[name] for name in names if name in by_name))
            began = time.monotonic()
            failed = _FAILED_TEST.search(_run(site, diff, [f"{each.file}::{each.test}" for each in tests]))
        spent = None if failed is None else until(tests, failed["file"], failed["test"])
        seconds_of[edit.half].append(spent)
        by = "nothing" if failed is None else f"`{failed['test']}`"
        seconds = "" if spent is None else f"{spent:.1f}"
        print(f"| {edit.id} | {edit.what} | {by} | {seconds} | {time.monotonic() - began:.0f} |", flush=True)
    print(f"\n{summary(seconds_of)}")
    return 0
