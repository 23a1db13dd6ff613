"""How soon random programs find each known defect that they can show, and whether its repair makes them pass.

The search avoids all other known defects. A defect is found when a program ends otherwise than FSDP promises, and the
rewriting that avoids the defect makes the program end as expected. If there is a repair of torch for the defect (in
``test/harness/inputs/repaired``), the program runs once more with it.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from torch_fsdp_tests.dispatch.options import positive
from torch_fsdp_tests.processes.forkserver import interpreter

REPAIRED = Path("test/harness/inputs/repaired")
REPLAY_LIMIT = 180.0  # seconds for the imports and one program
NOT_FOUND = "not found"


def main(argv: Sequence[str]) -> int:
    """Print a table, one line for each defect that the installed torch has and that programs can show."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_fsdp_tests.tools.benchmarks rediscovery", description=__doc__
    )
    parser.add_argument("--only", action="append", help="only the defects whose ids begin like this")
    parser.add_argument("--seconds", type=positive, default=60.0, help="of search for each defect (default: 60)")
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed (default: 0)")
    options = parser.parse_args(argv)
    if not REPAIRED.exists():
        parser.error("run this command in the checkout of the suite")
    from torch_fsdp_tests.explore import known, ranks  # torch is imported only after the options are read

    ids = [id for id in known.present() if id.startswith(tuple(options.only or ("",)))]
    if not ids:
        parser.error("programs can show no defect with such an id in this torch")
    ranks.prepare()
    print("| defect | programs | seconds | with the repair |\n|---|---|---|---|", flush=True)
    spent: list[float] = []
    for id in ids:
        row = _search(id, options.seconds, options.seed)
        spent.append(row[1])
        shown = f"{row[0]} | {row[1]:.0f}" if row[1] < float("inf") else f"{row[0]} | {NOT_FOUND}"
        print(f"| `{id}` | {shown} | {row[2]} |", flush=True)
    found = sum(each < float("inf") for each in spent)
    middle = statistics.median_low(spent)
    print(f"\n{found} of {len(ids)} found; median {f'{middle:.0f} s' if middle < float('inf') else NOT_FOUND}")
    return 0


def _search(id: str, seconds: float, seed: int) -> tuple[int, float, str]:
    """The programs and the seconds until the defect was found, and how its program ends in a torch with the repair."""
    from torch_fsdp_tests.explore.ranks import Crew
    from torch_fsdp_tests.explore.search import Search, Settings, explanation

    settings = Settings(seconds, seed, with_known=(id,), shrinks=False)
    if id.startswith("fsdp1"):
        settings.demanded = ("fsdp1",)
    else:
        settings.without = ("fsdp1",)
    search = Search(settings)
    began = time.monotonic()
    crew = Crew(2)
    try:
        for finding in search.findings():
            after = time.monotonic() - began
            if finding.is_confirmed and explanation(finding.program, finding.result, crew, [id]):
                return search.programs, after, _repaired(id, finding.program.as_json())
    finally:
        search.close()
        crew.close()
    return search.programs, float("inf"), ""


def _repaired(id: str, program: str) -> str:
    texts = [(REPAIRED / name).read_text(encoding="utf-8") for name in ("patches.txt", "repairs.py")]
    if not re.search(rf"\b{id}\b", "".join(texts)):
        return "no repair"
    paths = [str(REPAIRED.resolve()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"REPAIRED_DEFECTS": id, "PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory(prefix="rediscovery-") as folder:
        path = Path(folder, "program.json")
        path.write_text(program, encoding="utf-8")
        command = [*interpreter(), "-m", "torch_fsdp_tests.explore", "--replay", str(path)]
        done = subprocess.run(command, env=environment, timeout=REPLAY_LIMIT, capture_output=True, text=True)
    return {0: "passes", 1: "does not pass"}.get(done.returncode, f"exit status {done.returncode}")
