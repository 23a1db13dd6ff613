"""How soon random programs find each known defect that they can show, and whether its fix makes them pass.

The search avoids all other known defects. A defect is found when a program ends otherwise than FSDP promises, and the
rewriting that avoids the defect makes the program end as expected. Defects with the same rewriting are searched for
together. If all of them have a fix for the installed torch, the program runs once more with the fixes.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_fsdp_tests.dispatch.options import whole_number
from torch_fsdp_tests.explore import apart
from torch_fsdp_tests.installed_torch import fixes


def main(argv: Sequence[str]) -> int:
    """Print a table, one line for each defect that the installed torch has and that programs can show."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_fsdp_tests.tools.benchmarks rediscovery", description=__doc__
    )
    parser.add_argument("--only", action="append", help="only the defects whose ids begin like this")
    words = "for each defect (default: 240, about a minute of two cores)"
    parser.add_argument("--programs", type=whole_number(1, 10**6), default=240, metavar="N", help=words)
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed (default: 0)")
    options = parser.parse_args(argv)
    from torch_fsdp_tests.explore import known, ranks  # torch is imported only after the options are read

    named = [id for id in known.present() if id.startswith(tuple(options.only or ("",)))]
    if not named:
        parser.error("programs can show no defect with such an id in this torch")
    groups: dict[known.Rewriting, list[str]] = {}
    for id in named:
        groups.setdefault(known.REWRITINGS[id], []).append(id)
    ranks.prepare()
    print("| defects | ranks | programs that the rewriting changes | programs until it was found | with the fix |")
    print("|---|---|---|---|---|", flush=True)
    counts: list[float] = []
    for ids in groups.values():
        row = _search(ids, options.programs, options.seed)
        counts.append(row.count)
        cells = (", ".join(f"`{id}`" for id in ids), row.world_size, row.able, _shown(row.count), row.fixed)
        print(f"| {' | '.join(map(str, cells))} |", flush=True)
    found = sum(each < float("inf") for each in counts)
    print(
        f"\n{found} of {len(groups)} within {options.programs} programs; median {_shown(statistics.median_low(counts))}"
    )
    return 0


@dataclass(frozen=True)
class _Row:
    world_size: int
    able: int  # the programs of the search's seeds that the rewriting changes
    count: float
    fixed: str = ""


def _shown(count: float) -> str:
    return f"{count:.0f}" if count < float("inf") else "not found"


def _search(ids: Sequence[str], programs: int, seed: int) -> _Row:
    """Search with the fewest ranks whose programs can show one of the defects."""
    from torch_fsdp_tests.explore import known
    from torch_fsdp_tests.explore.ranks import Crew
    from torch_fsdp_tests.explore.search import Search, Settings, explanation

    able = 0
    for world_size in (2, 4):
        settings = Settings(math.inf, seed, world_size, with_known=tuple(ids), most=programs)
        settings.shrinks = False
        if ids[0].startswith("fsdp1"):
            settings.demanded = ("fsdp1",)
        else:
            settings.without = ("fsdp1",)
        search = Search(settings)
        able = sum(known.REWRITINGS[ids[0]](each) != each for each in (search.next_program() for _ in range(programs)))
        if able:
            break
    search = Search(settings)
    crew = Crew(world_size)
    try:
        for finding in search.findings():
            if finding.is_confirmed and explanation(finding.program, finding.result, crew, ids[:1]):
                fixed = _fixed(ids, finding.program.as_json())
                return _Row(world_size, able, search.programs, fixed)
    finally:
        search.close()
        crew.close()
    return _Row(world_size, able, float("inf"))


def _fixed(ids: Sequence[str], program: str) -> str:
    try:
        found = fixes.requested(ids)
    except fixes.NotFixed:
        return "no fix"
    with tempfile.TemporaryDirectory(prefix="rediscovery-") as folder:
        path = Path(folder, "program.json")
        path.write_text(program, encoding="utf-8")
        status = apart.run(("--replay", str(path)), os.environ | fixes.environment(found, os.environ))
    if status == 1:
        print(f"with the fix this program does not pass: {program}", file=sys.stderr)
    return "passes" if status == 0 else "does not pass" if status == 1 else "cannot be run"
