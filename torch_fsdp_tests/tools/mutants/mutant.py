"""Mutants as data: all mutants of a package, samples of them, and the tests that could kill each."""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.reach import Reached, ReachMap, module_name
from torch_fsdp_tests.reach.changes import Changes, Code
from torch_fsdp_tests.reach.functions import find_root
from torch_fsdp_tests.reach.order import sort
from torch_fsdp_tests.reach.selection import select
from torch_fsdp_tests.tools.mutants.sites import Mutant, Source

EQUIVALENT = Path(__file__).parent / "data" / "equivalent.json"


class NoPackage(ValueError):
    """The package or the mutant does not exist. The message says so."""


def files_of(package: str) -> list[tuple[str, Path]]:
    """The modules of a package, or a module itself, with their files. Only finds the outermost package, so nothing is
    imported. Raises NoPackage.
    """
    outermost, *inner = package.split(".")
    spec = importlib.util.find_spec(outermost)
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place, *inner)
        found = sorted(folder.rglob("*.py")) if (folder / "__init__.py").is_file() else [folder.with_suffix(".py")]
        if found[0].is_file():
            return [(module_name(path, Path(place)), path) for path in found]
    raise NoPackage(f"there is no package {package}")


def all_of(packages: Iterable[str], on_cpu: bool, pattern: str = "*") -> Iterator[Mutant]:
    """The mutants of those modules of packages whose names match a pattern, in the order of their lines."""
    for package in packages:
        for name, path in files_of(package):
            if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.removeprefix(f"{package}."), pattern):
                yield from Source(path.read_bytes(), name, on_cpu, path=path).mutants.values()


def sample(mutants: Iterable[Mutant], number: int, seed: int) -> list[Mutant]:
    """Sample this number of mutants, equally from all families if possible. The same seed samples the same ones.

    A mutant's place in the sample depends only on the seed and its id, so that a change of torch affects few.
    """
    by_family: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_family.setdefault(mutant.family, []).append(mutant)
    families = sorted(by_family.values(), key=len)
    sampled: list[Mutant] = []
    for position, family in enumerate(families):
        share = (number - len(sampled)) // (len(families) - position)
        sampled += sorted(family, key=lambda mutant: _place(mutant.id, seed))[:share]
    return sorted(sampled, key=lambda mutant: _place(mutant.id, seed))


def _place(id: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{id}".encode()).digest()


class Tests:
    """The tests that could kill a mutant, the most relevant first."""

    def __init__(self, reach: ReachMap, sources: Mapping[str, str]) -> None:
        """``sources`` are the texts of the test files, by name. Only tests of these files count."""
        self._map, self._sources = reach, sources

    def for_mutant(self, mutant: Mutant) -> Sequence[Reached]:
        """The tests that run the changed statement, or its function if the file differs from the recorded one."""
        number = self._statement(mutant)
        return sort(self._map, self._of(mutant), {mutant.function: () if number is None else (number,)})

    def code(self, mutant: Mutant) -> str:
        """A digest of the source of the function or class that the mutant changes."""
        text = self._code(mutant.module, mutant.path).text(mutant.function, of_classes=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def has_statement(self, mutant: Mutant) -> bool:
        """Whether the map tells which tests run the statement. Otherwise the tests of its function may not run it."""
        return self._statement(mutant) is not None and self._has_statements(mutant.module)

    @functools.cache  # noqa: B019
    def _has_statements(self, module: str) -> bool:
        return any(function.startswith(f"{module}.") for function in self._map.statements)

    def is_run(self, mutant: Mutant) -> bool:
        """Whether any test could kill the mutant."""
        return bool(self._of(mutant))

    def _of(self, mutant: Mutant) -> list[Reached]:
        tests = self.of(mutant.function, self._statement(mutant))
        if tests or mutant.module in self._map.modules:
            return tests
        return self._of_users(mutant.module, mutant.function, mutant.path)

    @functools.cache  # noqa: B019 (there is one object in a run)
    def of(self, function: str, statement: int | None = None) -> list[Reached]:
        """The tests of a function or of one of its statements, in no particular order."""
        tests: Sequence[Reached]
        if statement is not None and self._map.is_function(function):
            tests = self._map.in_order(self._map.running(function, statement))
        else:
            tests = self._map.tests_of(function) or self._of_fields(function) or select([function], self._map).tests
        return [test for test in tests if test.file in self._sources]

    @functools.cache  # noqa: B019
    def _code(self, module: str, path: Path) -> Code:
        return Code(module, path.read_bytes())

    def _statement(self, mutant: Mutant) -> int | None:
        return mutant.number if self._is_recorded(mutant.module, mutant.path) else None

    @functools.cache  # noqa: B019
    def _is_recorded(self, module: str, path: Path) -> bool:
        return self._map.has(module, path.read_bytes())

    def _of_fields(self, name: str) -> list[Reached]:
        """The tests of files that mention a class without functions, such as a dataclass of options."""
        name = name.rpartition(".")[2]
        return self._that_name([name]) if name[:1].isupper() else []

    @functools.cache  # noqa: B019
    def _of_users(self, module: str, function: str, path: Path) -> list[Reached]:
        """The tests of what uses a function of a module that is not in the map, and of files that name it."""
        root = find_root(path)
        if root is None:
            return []
        changes = Changes(self._map, root)
        affected = changes.affected(module, {function})
        used = {test for user in changes.users(module, affected) for test in self._map.tests_of(user)}
        used |= {*self._that_name(affected)}
        return [test for test in self._map.tests if test in used and test.file in self._sources]

    def _that_name(self, names: Iterable[str]) -> list[Reached]:
        words = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
        files = {file for file, text in self._sources.items() if words.search(text)}
        return [test for test in self._map.tests if test.file in files]


def equivalents(path: Path, on_cpu: bool) -> Mapping[str, Mapping[str, Any]]:
    """Return the mutants that no test can kill on this kind of device, by id, with the change and the argument."""
    entries = json.loads(path.read_text(encoding="utf-8"))["mutants"]
    return {entry["id"]: entry for entry in entries if on_cpu or entry.get("only") != "host"}
