"""Makes the map from what coverage.py recorded under the names of tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

from torch_fsdp_tests.reach.functions import Statement, functions_in, module_name, owners, statements_in
from torch_fsdp_tests.reach.reachmap import Executed, Module, ReachMap, build

SEPARATOR = "::"  # in a context, between a file and a test
# The folders of torch whose functions are in the map. Of WHOLE it has every module, and also statements. Of the others
# it has the modules that some test enters, because FSDP does not use the rest.
FOLDERS = tuple(f"distributed/{name}" for name in ("fsdp", "_composable", "checkpoint", "tensor"))
WHOLE = FOLDERS[:2]


def context(file: str, test: str) -> str:
    """The name under which coverage.py records what a test runs."""
    return f"{file}{SEPARATOR}{test}"


def sources(root: Path, folders: tuple[str, ...] = FOLDERS) -> Iterator[Path]:
    """The source files of these folders of a package."""
    for folder in folders:
        yield from sorted((root / folder).rglob("*.py"))


def make(data: Path, seconds: Mapping[tuple[str, str], float], root: Path, torch: str) -> ReachMap:
    """The map of the tests with known seconds, by file and name, out of a data file of coverage.py.

    ``root`` is the folder of the installed torch. Raises ``OSError`` for a data file that cannot be read.
    """
    contents = {path: path.read_bytes() for path in sources(root)}
    owners_in: dict[Path, dict[int, str]] = {}
    statements: dict[Path, list[Statement]] = {
        path: [each for _, each in statements_in(ast.parse(contents[path]), module_name(path, root))]
        for path in sources(root, WHOLE)
    }
    entered = {test: set[str]() for test in seconds}
    ran = {test: set[Statement]() for test in seconds}
    for source, label, lines in _lines(data):
        path = Path(source)
        file, _, name = label.partition(SEPARATOR)
        test = file, name
        if path not in contents or test not in seconds:
            continue
        if path not in owners_in:
            owners_in[path] = owners(functions_in(contents[path], module_name(path, root)))
        owner = owners_in[path]
        entered[test] |= {owner[line] for line in lines if line in owner}
        known, numbers = statements.get(path, ()), {*lines}
        ran[test] |= {each for each in known if not numbers.isdisjoint(range(each.first, each.last + 1))}
    all_entered = set[str]().union(*entered.values())
    kept = {*sources(root, WHOLE), *(p for p, owner in owners_in.items() if not all_entered.isdisjoint(owner.values()))}
    names = {path: module_name(path, root) for path in kept}
    return build(
        torch,
        {test: Executed(entered[test], seconds[test], ran[test]) for test in seconds},
        {name: Module.of(contents[path], name) for path, name in names.items()},
        (each for known in statements.values() for each in known),
    )


def _lines(data: Path) -> Iterator[tuple[str, str, list[int]]]:
    """File, context and lines, by the schema of data files that coverage.py documents."""
    import sqlite3  # imported late, because a plan needs neither

    from coverage.numbits import numbits_to_nums

    query = (
        "select path, context, numbits from line_bits"
        " join file on file.id = file_id join context on context.id = context_id"
    )
    try:
        database = sqlite3.connect(f"{data.resolve().as_uri()}?mode=ro", uri=True)
        try:
            for path, label, numbits in database.execute(query):
                yield path, label, numbits_to_nums(numbits)
        finally:
            database.close()
    except sqlite3.Error as error:
        raise OSError(f"{data}: {error}") from error
