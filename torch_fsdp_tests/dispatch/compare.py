"""The differences between two reports: as lines for a terminal, and as a page with both side by side.

``python -m torch_fsdp_tests.dispatch.compare BEFORE AFTER [PAGE]`` compares two existing reports.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torch_fsdp_tests.device import machine
from torch_fsdp_tests.dispatch import html_report, page
from torch_fsdp_tests.dispatch.atomic import write_text
from torch_fsdp_tests.dispatch.expectations import MalformedList, read_json
from torch_fsdp_tests.dispatch.features import FEATURES, summary
from torch_fsdp_tests.dispatch.listing import plural
from torch_fsdp_tests.dispatch.page import Row, Section
from torch_fsdp_tests.dispatch.report import FILE
from torch_fsdp_tests.dispatch.slower import (
    Report,
    Test,
    about_ranks,
    about_times,
    in_seconds,
    is_longer,
    name_of,
    pace,
    pairs_of,
    rank_times,
    tests_of,
)
from torch_fsdp_tests.processes import host
from torch_fsdp_tests.verdict import State

PAGE = "compare.html"
# Kinds of differences, the worst first, and the class of each.
KINDS = {
    "newly failing": "bad",
    "newly not run": "warn",
    "newly skipped": "warn",
    "newly a known failure": "warn",
    "newly showing a known defect": "warn",
    "gone": "warn",
    "slower": "warn",
    "newly passing": "ok",
    "newly executed": "ok",
    "new": "ok",
    "faster": "ok",
}
_WITH_REASON = ("newly skipped", "newly not run", "newly a known failure")


@dataclasses.dataclass(frozen=True)
class Difference:
    """A test that changed. One of the two results is missing if the test is new or gone."""

    kind: str
    file: str
    name: str
    was: Test | None = None
    now: Test | None = None

    def __str__(self) -> str:
        what = f"{self.kind}: {self.file}::{self.name}"
        if self.was is None or self.now is None:
            return what
        if self.kind in ("slower", "faster"):
            return f"{what}: {in_seconds(self.was)}, now {in_seconds(self.now)}{about_ranks(self.was, self.now)}"
        return f"{what}: {self.now['reason']}" if self.kind in _WITH_REASON else what


def load(path: Path) -> dict[str, Any]:
    """Load a ``report.json``, or that of a folder, possibly of an earlier version.

    Raises :class:`MalformedList` for any other file.
    """
    path = path / FILE if path.is_dir() else path
    report = read_json(path)
    try:
        for test in tests_of(report).values():
            if not State(test["outcome"]) or not isinstance(test["seconds"] + 0.0, float):
                raise TypeError
        html_report.facts(report), html_report.totals(report), html_report.verdict(report), summary(report["files"])
    except (KeyError, TypeError, ValueError) as error:
        raise MalformedList(f"{path} is not a report.json of run_test.py") from error
    return report


def files_gone(before: Report, after: Report) -> list[str]:
    """The files that are only in the earlier report. These are many if the later run was of a few files."""
    return sorted({file["file"] for file in before["files"]} - {file["file"] for file in after["files"]})


def differences(before: Report, after: Report) -> list[Difference]:
    """The tests that changed, the worst first. Tests of :func:`files_gone` are left out."""
    was, now, files = tests_of(before), tests_of(after), set(files_gone(before, after))
    general = pace(before, after)
    differing = [Difference("gone", *name, was[name]) for name in was.keys() - now.keys() if name[0] not in files]
    for name in now.keys() - was.keys():
        fails = State(now[name]["outcome"]).is_bad
        differing.append(Difference("newly failing" if fails else "new", *name, None, now[name]))
    for name in was.keys() & now.keys():
        kind = _kind(was[name], now[name], general)
        if kind is not None:
            differing.append(Difference(kind, *name, was[name], now[name]))
    order = list(KINDS)
    return sorted(differing, key=lambda each: (order.index(each.kind), each.file, each.name))


def _kind(was: Test, now: Test, general: float) -> str | None:
    earlier, state = State(was["outcome"]).counted_as, State(now["outcome"]).counted_as
    if state is not earlier and (state.is_executed or earlier.is_executed):
        match state:
            case State.FAILED:
                return "newly failing"
            case State.KNOWN_FAILURE:
                return "newly a known failure"
            case State.KNOWN_DEFECT if earlier.is_executed:
                return "newly showing a known defect"
            case State.PASSED if earlier.is_executed:
                return "newly passing"
            case _:
                return "newly executed" if state.is_executed else f"newly {state.value}"
    if is_longer(now, was, general):
        return "slower"
    return "faster" if is_longer(was, now, 1 / general) else None


def lines(before: Report, after: Report) -> list[str]:
    """A line for each test that changed. Files that only one of the reports has are counted."""
    added = set(files_gone(after, before))
    changes = [str(each) for each in differences(before, after) if each.kind != "new" or each.file not in added]
    machines = [f"{title}: {was}, now {now}" for title, (was, now) in _machines(before, after).items()]
    changes = [*machines, *about_times(before, after), *changes]
    for which, files in (("this", sorted(added)), ("the earlier", files_gone(before, after))):
        if files:
            changes.append(f"only in {which} report: {plural(len(files), 'file')}, such as {files[0]}")
    return ["compared with the earlier report:", *changes] if changes else ["nothing differs from the earlier report"]


def _machines(before: Report, after: Report) -> dict[str, tuple[str, str]]:
    """The facts in which the machines of two runs differ: results can depend on them."""
    sides = [report.get("machine") or {} for report in (before, after)]
    if not all(sides):
        return {}
    rows = machine.differing(dict(zip("ab", sides, strict=True)))
    return {title: (row["a"], row["b"]) for title, row in rows.items() if not title.startswith("free")}


# --- the page ---------------------------------------------------------------------------------------------------------


def _lead(differing: Sequence[Difference]) -> str:
    amounts = [
        f"<span class={KINDS[kind]}>{plural(count, 'test')} {kind}</span>"
        for kind in KINDS
        if (count := sum(each.kind == kind for each in differing))
    ]
    return f"<p class=lead>{', '.join(amounts) or 'No test differs'}.</p>"


def _runs(before: Report, after: Report) -> str:
    """The facts of both runs. Facts that differ are bold."""
    sides = (before, after)
    columns = [{"verdict": html_report.verdict(side)[0], **html_report.facts(side)} for side in sides]
    counts = [html_report.counts(side) for side in sides]
    shown = {state: words for state, words in html_report.TOTALS.items() if any(count[state] for count in counts)}
    for facts, count, side in zip(columns, counts, sides):
        facts |= {words: str(count[state]) for state, words in shown.items()}
        facts |= {"wall time": page.seconds(side["seconds"]), "files": str(len(side["files"]))}
    rows = []
    for title in dict.fromkeys(itertools.chain(*columns)):
        cells = [page.text(facts.get(title, "")) for facts in columns]
        rows.append([escape(title), *(cells if cells[0] == cells[1] else (f"<b>{cell}</b>" for cell in cells))])
    return page.table([("", "dim t"), ("before", "h"), ("after", "h")], rows)


def _features(before: Report, after: Report) -> str:
    gone = set(files_gone(before, after))
    kept = [file for file in before["files"] if file["file"] not in gone]
    rows = [{row["name"]: row for row in summary(files)} for files in (kept, after["files"])]
    kinds = {"passed": "", "failed": "bad", "known_failures": "warn", "known_defects": "warn", "skipped": ""}
    if not any(row["known_failures"] for side in rows for row in side.values()):
        del kinds["known_failures"]  # most runs have no such list
    shown = [next(side[f.name] for side in rows if f.name in side) for f in FEATURES if any(f.name in s for s in rows)]

    def cells(row: Mapping[str, Any]) -> list[str]:
        sides = [side.get(row["name"], {}) for side in rows]
        states = [html_report.state_of_feature(side) if side else "not run" for side in sides]
        earlier = f"<div class='small {html_report.STATES[states[0]][0]}'>before: {states[0]}</div>"
        name = f"<div class=what>{html_report.feature_name(row)}{earlier * (states[0] != states[1])}</div>"
        numbers = [_changed(sides[0].get(what, 0), sides[1].get(what, 0), kind) for what, kind in kinds.items()]
        return [html_report.mark(states[1]) + name, *numbers]

    columns = [("feature", "f"), *((what.replace("_", " "), "n") for what in kinds)]
    return page.table(columns, html_report.grouped(shown, cells), stack=True)


def _changed(was: int, now: int, kind: str) -> str:
    """Show a number of the later run, after that of the earlier run if they differ. Empty if both are 0."""
    later = html_report.number(now, kind)
    return later if was == now else f"<span class=dim>{was} → </span><b>{later or 0}</b>"


def _ranks(before: Report, after: Report) -> str:
    columns = [("rank", ""), *((title, "n") for title in ("CPU time before", "after", "times", "other ranks"))]
    rows = []
    for rank in rank_times(pairs_of(before, after)):
        times = f'<span class="{"warn" if rank.is_slower() else ""}">{rank.times:.2f}</span>'
        seconds = page.seconds(rank.was), page.seconds(rank.now)
        rows.append([page.text(name_of(rank, after)), *seconds, times, f"{rank.others:.2f}"])
    return page.table(columns, rows)


def _result(test: Test | None) -> str:
    if test is None:
        return "<span class=none>not there</span>"
    reason = f"<div class='dim small'>{page.text(test['reason'])}</div>" if test["reason"] else ""
    return f"{html_report.mark(html_report.state_of(test))}{escape(test['outcome'])}{reason}"


def _time(test: Test) -> str:
    return page.text(in_seconds(test)) if test.get("rounds") else page.seconds(test["seconds"])


def _table(differing: Sequence[Difference], with_times: bool) -> str:
    rows = []
    for each in differing:
        name = page.above(page.code(each.name), escape(each.file))
        results = [each.was, each.now]
        cells = [_time(test) if test else "" for test in results] if with_times else []
        state = html_report.state_of(each.now or each.was or {})
        about = html_report.names_of_features(each.file, each.name)
        rows.append(Row([name, *(cells or map(_result, results))], page.item(state, about, is_test=True)))
    kind = "n" if with_times else "r"
    return page.table([("test", ""), ("before", kind), ("after", kind)], rows, stack=True)


def _defects(before: Report, after: Report) -> list[Section]:
    """The known defects that only one of the two runs showed, in files that both runs had."""
    files = [{file["file"] for file in report["files"]} for report in (before, after)]
    common = files[0] & files[1]
    was, now = ({defect["id"]: defect for defect in report["known_defects"]} for report in (before, after))
    parts = []
    for title, side, other in (("shown before only", was, now), ("shown now only", now, was)):
        ids = [id for id, defect in side.items() if any(test.partition("::")[0] in common for test in defect["tests"])]
        only = [side[id] for id in ids if id not in other]
        parts.append(Section(f"Known defects {title}", html_report.defects_table(only), len(only), holds_items=True))
    return parts


def render(before: Report, after: Report) -> str:
    """Render the page with two runs side by side, from their ``report.json``."""
    differing = differences(before, after)
    by_kind = {kind: [each for each in differing if each.kind == kind] for kind in KINDS}
    titles = [html_report.title(report) for report in (before, after)]
    title = titles[0] if titles[0] == titles[1] else f"{titles[0]} and {titles[1].removeprefix('FSDP of ')}"
    head = f"<div class=kind>Two FSDP test reports</div><h1>{page.text(title)}</h1>{_lead(differing)}"
    if files := files_gone(before, after):
        head += page.names("Only in the earlier report, and not compared", files)
    states = {html_report.state_of(each.now or each.was or {}) for each in differing}
    about = {name for each in differing for name in html_report.names_of_features(each.file, each.name)}
    filters = html_report.filters(states, about)
    told = "".join(f"<p>{page.text(words)}</p>" for words in about_times(before, after))
    parts = [
        Section("Runs", _runs(before, after)),
        Section("Time", told + _ranks(before, after)),
        Section("Features", _features(before, after)),
        *(
            Section(kind.capitalize(), _table(its, kind in ("slower", "faster")), len(its), holds_items=True)
            for kind, its in by_kind.items()
        ),
        *_defects(before, after),
    ]
    return page.document(f"{title}: compared", [head, page.sections(parts, filters if differing else "")])


def write(folder: Path, before: Report, after: Report) -> Path:
    """Write the page, and return where it is. Raises ``OSError``."""
    write_text(folder / PAGE, render(before, after))
    return folder / PAGE


def main(arguments: Sequence[str]) -> int:
    """Compare two reports: print the differences, and write the page if a path is given for it."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_fsdp_tests.dispatch.compare",
        description="Print what differs between the report.json of two runs: tests that newly fail or pass, tests "
        "that are new or gone, and tests that became slower or faster. The exit status is 0 even if something differs.",
    )
    parser.add_argument("before", type=Path, metavar="BEFORE", help="the report.json of the earlier run, or its folder")
    parser.add_argument("after", type=Path, metavar="AFTER", help="that of the later run")
    words = "also write a page that shows both runs side by side"
    parser.add_argument("page", type=Path, nargs="?", metavar="PAGE.html", help=words)
    given = parser.parse_args(arguments)
    try:
        before, after = load(given.before), load(given.after)
        if given.page is not None:
            write_text(given.page, render(before, after))
    except (MalformedList, OSError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    print("\n".join(lines(before, after)))
    return 0


if __name__ == "__main__":
    host.run_command("compare", main)
