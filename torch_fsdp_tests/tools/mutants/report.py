"""The results of a run over mutants: as data, as a page, and in words."""

from __future__ import annotations

import json
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch import page
from torch_fsdp_tests.dispatch.atomic import write_text
from torch_fsdp_tests.dispatch.listing import seconds
from torch_fsdp_tests.dispatch.page import Section
from torch_fsdp_tests.tools.mutants.kinds import KINDS
from torch_fsdp_tests.tools.mutants.outcomes import MutantOutcome, MutantResult

VERSION = 1
RECORD, FILE, PAGE = "findings.jsonl", "mutants.json", "mutants.html"
_SHOWN = 400  # the most tests that the page names for a mutant that survived
_TEST = re.compile(r"[\w/]+::[\w.]+")  # what killed a mutant, if it was a test, and not a whole file or a program


def as_json(
    facts: Mapping[str, Any], findings: Sequence[MutantResult], excluded: Mapping[str, int], command: str, selected: int
) -> dict[str, Any]:
    """``excluded`` says how many mutants are not tried, by reason; ``command`` repeats a mutant if its id is added."""
    killed = [finding for finding in findings if finding.outcome is MutantOutcome.KILLED]
    return {
        "version": VERSION,
        **facts,
        "selected": selected,
        **_row("all", findings),
        "median_seconds": round(statistics.median(each.seconds for each in killed), 1) if killed else None,
        "families": _rows(findings, "family"),
        "modules": _rows(findings, "module"),
        "kinds": [row | {"words": KINDS.get(row["name"], "")} for row in _rows(findings, "operator")],
        "ways": dict(Counter(each.how for each in killed).most_common()),
        "excluded": {reason: number for reason, number in excluded.items() if number},
        "mutants": [
            finding.as_json() | {"repeat": f"{command} --mutant {shlex.quote(finding.id)}"}
            for finding in sorted(findings, key=lambda finding: (finding.module, finding.line, finding.id))
        ],
    }


def _rows(findings: Sequence[MutantResult], key: str) -> list[dict[str, Any]]:
    """A row for each family, module or operator."""
    names = sorted({getattr(finding, key) for finding in findings})
    return [_row(name, [each for each in findings if getattr(each, key) == name]) for name in names]


def _row(name: str, findings: Sequence[MutantResult]) -> dict[str, Any]:
    """The number of mutants with each outcome, and the share of the killed among those that could be killed."""
    counts = Counter(finding.outcome for finding in findings)
    counted = sum(number for outcome, number in counts.items() if outcome.counts)
    share = round(counts[MutantOutcome.KILLED] / counted, 4) if counted else None
    return {"name": name, "share": share, **{outcome.value: counts[outcome] for outcome in MutantOutcome}}


def write(folder: Path, data: Mapping[str, Any]) -> None:
    """Write the data as JSON and as a page. Raises ``OSError``."""
    write_text(folder / FILE, json.dumps(data, indent=1) + "\n")
    write_text(folder / PAGE, render(data))


def save_kills(path: Path, findings: Iterable[MutantResult]) -> None:
    """Add which tests killed mutants of which functions to a record, or make a new one. Raises ``OSError``."""
    lines = set(path.read_text(encoding="utf-8").splitlines()) if path.is_file() else set()
    killed = [each for each in findings if _TEST.fullmatch(each.by)]
    lines |= {json.dumps({"id": ":".join(each.id.split(":")[:2]), "by": each.by}) for each in killed}
    write_text(path, "".join(f"{line}\n" for line in sorted(lines)))


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"


def text(data: Mapping[str, Any]) -> str:
    """The sums, for a terminal."""
    width = max(len(row["name"]) for row in (*data["families"], *data["modules"], *data["kinds"], data))
    lines = [f"{'':{width}}  killed  survived  not reached  equivalent  undecided"]
    for rows in ([*data["families"], data], data["modules"], data["kinds"]):
        lines += [
            f"{row['name']:{width}}  {row['killed']:6}  {row['survived']:8}  {row['not reached']:11}  "
            f"{row['equivalent']:10}  {row['undecided']:9}  {_percent(row['share'])}".rstrip()
            for row in rows
        ] + [""]
    if data["median_seconds"] is not None:
        ways = ", ".join(f"{number} {way}" for way, number in data["ways"].items())
        lines.append(f"killed by tests that ended as: {ways}; half of them within {data['median_seconds']:g} s")
    return "\n".join([*lines, *(f"not tried: {n:5}  {reason}" for reason, n in data["excluded"].items())])


def _table(title: str, rows: Iterable[Mapping[str, Any]]) -> str:
    cells = []
    for row in rows:
        words = f" <span class=dim>{escape(row['words'])}</span>" if row.get("words") else ""
        counts = (str(row[outcome.value] or "") for outcome in MutantOutcome)
        cells.append([page.code(row["name"]) + words, *counts, _percent(row["share"])])
    titles = [(title, ""), *((outcome.value, "n") for outcome in MutantOutcome), ("share killed", "n")]
    return page.table(titles, cells, stack=True)


def _mutant(entry: Mapping[str, Any]) -> str:
    """Show a mutant that survived: the change and its place, the tests that ran, and the command that repeats it."""
    tests = entry.get("tests", ())
    parts = [f"<div class=dim>{page.text(entry.get('path', ''))}:{entry.get('line', '')}</div>"]
    parts.append(page.pre(entry.get("change", "")))
    if why := entry.get("why"):
        parts.append(f"<p>{escape(why)}</p>")
    if tests:
        more = f"\n... and {len(tests) - _SHOWN} more" if len(tests) > _SHOWN else ""
        names = "\n".join(tests[:_SHOWN]) + more
        parts.append(page.folded(f"{len(tests)} tests ran", page.pre(names)))
    parts.append(page.command(entry["repeat"]))
    about = escape(KINDS.get(entry["operator"], ""))
    head = f"{page.code(entry['id'])} <span class=dim>{about}</span>"
    attributes = page.item(entry["outcome"], is_test=True)
    return page.folded(head, "".join(parts), is_open=entry["outcome"] == MutantOutcome.SURVIVED, attributes=attributes)


def _killed(entries: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for entry in entries:
        cells = [page.code(entry["id"]), page.code(entry.get("by", "")), escape(entry.get("how", ""))]
        cells.append(seconds(entry.get("seconds", 0.0)))
        rows.append(page.Row(cells, page.item(entry["outcome"], is_test=True)))
    table = page.table([("mutant", ""), ("killed by", ""), ("how", ""), ("time", "n")], rows, stack=True)
    return page.folded(f"{len(rows)} mutants", table, attributes=page.CONTAINER) if rows else ""


def _head(data: Mapping[str, Any]) -> str:
    """Show the share of the mutants that were killed, the package, and the place of the run."""
    kinds = {MutantOutcome.KILLED: "ok", MutantOutcome.SURVIVED: "bad", MutantOutcome.UNDECIDED: "warn"}
    boxes = [
        (str(data[outcome.value]), outcome.value, kinds.get(outcome, "skip") if data[outcome.value] else "none")
        for outcome in MutantOutcome
    ]
    if data["median_seconds"] is not None:
        boxes.append((seconds(data["median_seconds"]), "until half were killed", ""))
    about = {name: page.text(data[name]) for name in ("torch", "device", "package")}
    about["Python"] = page.text(data["python"])
    tried, selected = len(data["mutants"]), data["selected"]
    rest = f"<p>{tried} of {selected} mutants were tried; --resume continues.</p>" if tried < selected else ""
    return (
        f"<div class=kind>Mutants of FSDP</div><h1>Mutants of FSDP: {_percent(data['share']) or 'nothing'} killed</h1>"
        f"{page.sums(boxes)}{page.facts(about.items())}{rest}"
    )


def render(data: Mapping[str, Any]) -> str:
    """The page of a run over mutants, from its data."""
    by_outcome = {outcome: [e for e in data["mutants"] if e["outcome"] == outcome.value] for outcome in MutantOutcome}
    excluded = [[str(number), escape(reason)] for reason, number in data["excluded"].items()]
    ways = [[str(number), escape(way)] for way, number in data["ways"].items()]
    parts = [
        Section("Survived", "".join(map(_mutant, by_outcome[MutantOutcome.SURVIVED])), data["survived"], True),
        Section("By part", _table("part", data["families"])),
        Section("By module", _table("module", data["modules"])),
        Section("By kind", _table("kind", data["kinds"])),
        *(
            Section(outcome.value.capitalize(), "".join(map(_mutant, by_outcome[outcome])), data[outcome.value], True)
            for outcome in (MutantOutcome.UNDECIDED, MutantOutcome.NOT_REACHED, MutantOutcome.EQUIVALENT)
        ),
        Section("Killed, by outcome of the test", page.table([("mutants", "n"), ("the test", "")], ways)),
        Section("Killed", _killed(by_outcome[MutantOutcome.KILLED]), data["killed"], True),
        Section("Not tried, in all of the package", page.table([("mutants", "n"), ("reason", "")], excluded)),
    ]
    filters = page.filters([outcome.value for outcome in MutantOutcome if by_outcome[outcome]], things="mutants")
    title = "Mutants of FSDP"
    return page.document(title, [_head(data), page.sections(parts, filters)])
