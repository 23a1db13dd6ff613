#!/usr/bin/env python3
"""Write the figures of a whole run into README.md and docs/benchmarks.md.

python run_test.py --keep-going --reruns 1 --report DIR
python .ci/figures.py DIR/report.json
"""

import collections
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from torch_fsdp_tests.dispatch.atomic import write_text  # noqa: E402
from torch_fsdp_tests.processes import system  # noqa: E402
from torch_fsdp_tests.verdict import SkipKind, closing_line, plural, seconds, tally  # noqa: E402  # noqa: E402

BEGIN, END = "<!-- made by python .ci/figures.py -->", "<!-- end of what python .ci/figures.py made -->"
# What the reasons of these kinds have in common. Other reasons are listed one by one.
COMMON = {
    SkipKind.TORCH: "the feature is newer than this version of PyTorch",
    SkipKind.DEVICE: "the device or its backend lacks something, such as memory of its own, streams or graphs",
    SkipKind.SLOW: "it is slow, for most because of a C++ compiler; `PYTORCH_TEST_WITH_SLOW=1` runs it",
}


def total(report: dict[str, Any]) -> str:
    """The machine and the time of a run, and its last lines."""
    about = f"{plural(report['cores'], 'core')}, torch {report['torch']}, device {report['device']}"
    known = plural(len(report["known_defects"]), "known defect")
    lines = [
        f"{known} of torch reproduced (python -m torch_fsdp_tests.defects)",
        closing_line(tally(test["outcome"] for file in report["files"] for test in file["tests"])),
    ]
    on = datetime.datetime.fromisoformat(report["date"])
    ended = f"On {on.day} {on:%B %Y} it ended after {seconds(report['seconds'])} ({about}) with"
    return "\n".join([ended, "", "```text", *lines, "```"])


def folders(report: dict[str, Any]) -> str:
    """Files, tests, skipped tests and seconds of each folder, and the reasons to skip."""
    found: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for file in report["files"]:
        tests = [test for test in file["tests"] if test["scope"] == "test"]
        skipped = sum(test["outcome"] == "skipped" for test in tests)
        took = sum(attempt["ended"] - attempt["began"] for attempt in file["attempts"])
        folder = found[file["file"].rpartition("/")[0]]
        folder.update(files=file["shard_id"] == 1, tests=len(tests), skipped=skipped, seconds=took)
    rows = [
        (f"`test/{name}`", *(str(round(found[name][column])) for column in ("files", "tests", "skipped", "seconds")))
        for name in sorted(found)
    ]
    reasons = [(str(tests), reason) for reason, tests in _reasons(report).most_common()]
    parts = [_table(("folder", "files", "tests", "skipped", "serial seconds"), rows)]
    return "\n\n".join([*parts, "These tests skip:", _table(("tests", "why"), reasons)])


def _reasons(report: dict[str, Any]) -> collections.Counter[str]:
    counts: collections.Counter[str] = collections.Counter()
    for skip in report["skips"]:
        counts[COMMON.get(SkipKind(skip["kind"]), skip["reason"])] += skip["tests"]
    return +counts


def _table(titles: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (titles, ("---",) * len(titles), *rows))


def write(page: Path, made: str, first: str = BEGIN, last: str = END) -> None:
    """Replace the text between the two marks of a page."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        sys.exit(f"{page} does not have both of the lines {first} and {last}")
    write_text(page, f"{before}{first}\n\n{made}\n\n{last}{after}")


def main(argv: Sequence[str]) -> int:
    """Write the figures of the report that the only argument names. Returns the exit status."""
    if len(argv) != 1:
        sys.exit(f"usage: python {sys.argv[0]} REPORT.JSON")
    read = json.loads(Path(argv[0]).read_text(encoding="utf-8"))
    write(ROOT / "README.md", total(read))
    write(ROOT / "docs" / "benchmarks.md", folders(read))
    return 0


if __name__ == "__main__":
    system.run_command("figures", main)
