"""The results of a run over mutants: as data and in words."""

from __future__ import annotations

import json
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch.atomic import write_text
from torch_fsdp_tests.tools.mutants.kinds import KINDS
from torch_fsdp_tests.tools.mutants.outcomes import MutantOutcome, MutantResult

VERSION = 1
RECORD, FILE = "findings.jsonl", "mutants.json"


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
    """Write the data as JSON. Raises ``OSError``."""
    write_text(folder / FILE, json.dumps(data, indent=1) + "\n")


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
