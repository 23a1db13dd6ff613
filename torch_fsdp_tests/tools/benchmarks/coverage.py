"""How many statements of torch's FSDP random programs run in some minutes, beside those that the suite runs.

Only statements in functions count, because those of modules and classes run at every import. The map of what tests
reach tells which ones the suite runs. Of the programs, one in four tells which lines it runs.
"""

from __future__ import annotations

import argparse
import ast
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch_fsdp_tests.dispatch import devices, reaching
from torch_fsdp_tests.dispatch.options import duration
from torch_fsdp_tests.reach.functions import Statement, module_name, statements_in
from torch_fsdp_tests.reach.reachmap import ReachMap

PARTS = {"FSDP2": "distributed/fsdp/_fully_shard/*.py", "FSDP1": "distributed/fsdp/*.py"}  # of the folder of torch
Statements = list[tuple[str, Statement]]  # each with the path of its file


def main(argv: Sequence[str]) -> int:
    """Search, and print how many statements had run by each time. Returns 2 if there is no map for this torch."""
    parser = argparse.ArgumentParser(prog="python -m torch_fsdp_tests.tools.benchmarks coverage", description=__doc__)
    words = "when to count (default: 1m 10m 1h)"
    parser.add_argument("--after", type=duration, nargs="+", default=[60.0, 600.0, 3600.0], metavar="T", help=words)
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed (default: 0)")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write the findings into a folder")
    options = parser.parse_args(argv)
    folder, version = devices.torch_folder(), devices.torch_version()
    if folder is None or version is None:
        parser.error("torch is not installed")
    suite = ReachMap.load(reaching.shipped(version, reaching.SHIPPED))
    if suite.torch != version:
        parser.error(f"the map of what tests reach was recorded with torch {suite.torch}, and {version} is installed")
    counts = _search(sorted(options.after), options.seed, options.output)
    print("\n| seconds | programs | " + " | ".join(PARTS) + " |\n" + "|---" * (2 + len(PARTS)) + "|")
    parts = [_statements(folder, pattern) for pattern in PARTS.values()]
    for seconds, programs, lines in counts:
        _show(f"{seconds:g} | {programs}", parts, functools.partial(_ran, lines))
    _show("the suite |", parts, lambda path, each: suite.running(each.function, each.number) != 0)
    return 0


def _search(after: list[float], seed: int, output: Path | None) -> list[tuple[float, int, frozenset[str]]]:
    """The programs that had run by each time, and the lines of torch that they had run."""
    from torch_fsdp_tests.explore import ranks  # torch is imported only after the options are read
    from torch_fsdp_tests.explore.search import Search, Settings, save

    ranks.prepare()
    start = time.monotonic()
    counts: list[tuple[float, int, frozenset[str]]] = []

    def note(search: Search) -> None:
        while len(counts) < len(after) and time.monotonic() - start >= after[len(counts)]:
            counts.append((after[len(counts)], search.programs, frozenset(search.lines)))
            print(f"{search.programs} programs in {counts[-1][0]:g} s", flush=True)

    search = Search(Settings(after[-1] + 1, seed), note)
    for finding in search.findings():
        print(f"{finding.known or 'new'}: {finding.result.what} {finding.result.place}", flush=True)
        if output is not None:
            save(finding, output)
    return counts


def _statements(torch_folder: Path, pattern: str) -> Statements:
    """The statements of all functions in some files, without docstrings."""
    statements: Statements = []
    for source in sorted(torch_folder.glob(pattern)):
        path = source.relative_to(torch_folder).as_posix()
        for node, each in statements_in(ast.parse(source.read_bytes()), module_name(source, torch_folder)):
            if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                statements.append((path, each))
    return statements


def _ran(lines: frozenset[str], path: str, statement: Statement) -> bool:
    return any(f"{path}:{line}" in lines for line in range(statement.first, statement.last + 1))


def _show(label: str, parts: list[Statements], runs: Callable[[str, Statement], bool]) -> None:
    cells = []
    for statements in parts:
        count = sum(runs(path, each) for path, each in statements)
        cells.append(f"{count} of {len(statements)} ({count / len(statements):.0%})")
    print(f"| {label} | {' | '.join(cells)} |")
