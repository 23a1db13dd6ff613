"""Mutants as data: all mutants of a package, samples of them, and the tests that could notice each."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
import hashlib
import heapq
import importlib.util
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.mutants.sites import Site, Source
from torch_fsdp_tests.reach import Reached, ReachMap, module_name
from torch_fsdp_tests.reach.functions import digest

EQUIVALENT = Path(__file__).parent / "data" / "equivalent.json"
FSDP2 = "._fully_shard"  # in the names of modules


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change. Its id does not depend on other functions."""

    id: str
    module: str
    function: str
    operator: str
    excluded: str | None  # why it is not tried
    path: Path
    site: Site = dataclasses.field(repr=False, compare=False)

    @property
    def family(self) -> str:
        return "FSDP2" if f"{FSDP2}." in f"{self.module}." else "FSDP1"

    @property
    def change(self) -> str:
        """The changed statement, as a diff."""
        before, after = (text.splitlines() for text in self.site.change)
        gone = [line for line in before if line not in after]
        come = [line for line in after if line not in before]
        return "\n".join([*(f"- {line}" for line in gone or before), *(f"+ {line}" for line in come or after)])


class NoPackage(ValueError):
    """The package or the mutant does not exist. The message says so."""


def folder_of(package: str) -> Path:
    """Return the folder of a package. Only finds the outermost package, so nothing is imported. Raises NoPackage."""
    outermost, *inner = package.split(".")
    spec = importlib.util.find_spec(outermost)
    for place in (spec and spec.submodule_search_locations) or ():
        folder = Path(place, *inner)
        if (folder / "__init__.py").is_file():
            return folder
    raise NoPackage(f"there is no package {package}")


def all_of(package: str, on_host: bool, pattern: str = "*") -> Iterator[Mutant]:
    """The mutants of those modules of a package whose names match a pattern, in the order of their lines."""
    folder = folder_of(package)
    root = folder.parents[package.count(".")] / package.partition(".")[0]
    for path in sorted(folder.rglob("*.py")):
        name = module_name(path, root)
        if fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name.removeprefix(f"{package}."), pattern):
            for site in Source(path.read_bytes(), name, on_host).sites.values():
                yield Mutant(site.id, name, site.function, site.operator, site.excluded, path, site)


def draw(mutants: Iterable[Mutant], number: int, seed: int) -> list[Mutant]:
    """Draw this number of mutants, equally from both families if possible. The same seed draws the same ones.

    A mutant's place in the draw depends only on the seed and its id, so that a change of torch affects few.
    """
    by_family: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_family.setdefault(mutant.family, []).append(mutant)
    families = sorted(by_family.values(), key=len)
    drawn: list[Mutant] = []
    for position, family in enumerate(families):
        share = (number - len(drawn)) // (len(families) - position)
        drawn += sorted(family, key=lambda mutant: _place(mutant.id, seed))[:share]
    return sorted(drawn, key=lambda mutant: _place(mutant.id, seed))


def _place(id: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{id}".encode()).digest()


SPECIFIC = 4  # the number of specific tests that come first
START = 0.5  # seconds that a test costs in addition to its own


class Tests:
    """The tests that could notice a mutant, the most telling first.

    First come a few specific ones. Then tests whose names share rare words with the changed code alternate with tests
    that quickly cover most functions. Hundreds of tests enter a function that all of FSDP uses. The most specific of
    them do little else, so the effect of a mutant often shows only in other tests.
    """

    def __init__(self, reach: ReachMap, sources: Mapping[str, str]) -> None:
        """``sources`` are the texts of the test files, by name. Only tests of these files count."""
        self._map, self._sources = reach, sources
        self._known: dict[tuple[str, int | None, str], Sequence[Reached]] = {}
        self._as_recorded: dict[str, bool] = {}  # whether a module's file is the recorded one

    def of(self, function: str, statement: int | None = None, text: str = "") -> Sequence[Reached]:
        """The tests of a function, or of one of its statements with this text."""
        key = function, statement, text
        if key not in self._known:
            found = self._running(function, statement)
            spread = self._spread(found, self._neighbours(function))
            named = self._by_words(found, _words(f"{function.rpartition('.')[2]} {text}"))
            mixed = (test for pair in itertools.zip_longest(named, spread[SPECIFIC:]) for test in pair if test)
            self._known[key] = [*dict.fromkeys([*spread[:SPECIFIC], *mixed])]
        return self._known[key]

    def for_mutant(self, mutant: Mutant) -> Sequence[Reached]:
        """The tests that run the changed statement, or its function if the file differs from the recorded one."""
        return self.of(mutant.function, self._statement(mutant), mutant.site.change[0])

    def is_run(self, mutant: Mutant) -> bool:
        """Whether there are such tests."""
        return bool(self._running(mutant.function, self._statement(mutant)))

    def _statement(self, mutant: Mutant) -> int | None:
        if mutant.module not in self._as_recorded:
            known = self._map.modules.get(mutant.module)
            self._as_recorded[mutant.module] = known is not None and known.digest == digest(mutant.path.read_bytes())
        return mutant.site.number if self._as_recorded[mutant.module] else None

    @functools.cache  # noqa: B019 (there is one object in a run)
    def _running(self, function: str, statement: int | None) -> list[Reached]:
        if statement is not None and self._map.is_function(function):
            found = self._map.in_order(self._map.running(function, statement))
        else:
            found = self._map.tests_of(function) or self._of_fields(function) or self._around(function)
        return [test for test in found if test.file in self._sources]

    @functools.cached_property
    def _words_of(self) -> Mapping[Reached, frozenset[str]]:
        """The words in the names of each test and its file."""
        return {test: _words(f"{test.file.rpartition('/')[2]} {test.test}") for test in self._map.tests}

    @functools.cached_property
    def _rarity(self) -> Mapping[str, float]:
        """For each word how much it says about a test: the fewer tests have it, the more."""
        counts = collections.Counter(word for words in self._words_of.values() for word in words)
        return {word: math.log(1 + len(self._map.tests) / count) for word, count in counts.items()}

    def _by_words(self, found: Sequence[Reached], wanted: frozenset[str]) -> list[Reached]:
        """The tests whose names have some of these words, first those with rare words and few others.

        The second test of a file counts half as much as the first, and so on, so that many files have their turn.
        """
        scores: dict[Reached, float] = {}
        for test in found:
            known = self._words_of[test]
            if shared := wanted & known:
                scores[test] = sum(self._rarity[word] for word in shared) / math.sqrt(len(known))
        turns: collections.Counter[str] = collections.Counter()
        for test in sorted(scores, key=lambda test: (-scores[test], test.seconds)):
            turns[test.file] += 1
            scores[test] /= turns[test.file]
        return sorted(scores, key=lambda test: (-scores[test], test.seconds))

    @functools.cached_property
    def _entered(self) -> Mapping[Reached, int]:
        """The functions that each test enters, as bits."""
        entered = dict.fromkeys(self._map.tests, 0)
        for number, tests in enumerate(self._map.reached.values()):
            for test, bit in zip(self._map.tests, reversed(f"{tests:b}"), strict=False):
                if bit == "1":
                    entered[test] |= 1 << number
        return entered

    def _neighbours(self, function: str) -> int:
        """The functions of the package that contains this one, as bits. All functions, if its module is unknown."""
        module = function
        while module and module not in self._map.modules:
            module = module.rpartition(".")[0]
        package = module.rpartition(".")[0]
        inside = (name.startswith(package) for name in self._map.reached)
        return sum(1 << number for number, is_inside in enumerate(inside) if is_inside)

    def _spread(self, found: Sequence[Reached], wanted: int) -> list[Reached]:
        """After the specific tests: each next test enters the most new functions per second among the wanted ones.

        When no function is new, all functions count as new again.
        """
        order, left = list(found[:SPECIFIC]), list(found[SPECIFIC:])
        fresh = wanted
        for test in order:
            fresh &= ~self._entered[test]
        while left:
            # A gain never grows while other tests enter functions. So the first test that gains what it promised is
            # best.
            queue = [(-self._gain(test, fresh), place, test) for place, test in enumerate(left)]
            heapq.heapify(queue)
            left = []
            while queue:
                promised, place, test = heapq.heappop(queue)
                gain = self._gain(test, fresh)
                if not gain and fresh != wanted:
                    left.append(test)
                elif gain < -promised:
                    heapq.heappush(queue, (-gain, place, test))
                else:
                    order.append(test)
                    fresh &= ~self._entered[test]
            fresh = wanted
        return order

    def _gain(self, test: Reached, fresh: int) -> float:
        return (self._entered[test] & fresh).bit_count() / (START + test.seconds)

    def _around(self, name: str) -> list[Reached]:
        """The tests of the scope around code outside of functions, or around a function that is not in the map."""
        enclosing = None if self._map.is_function(name) else self._map.enclosing(name)
        return self._map.tests_of(enclosing) if enclosing else []

    def _of_fields(self, name: str) -> list[Reached]:
        """The tests of files that mention a class without functions, such as a dataclass of options."""
        name = name.rpartition(".")[2]
        if not name[:1].isupper():
            return []
        word = re.compile(rf"\b{re.escape(name)}\b")
        counts = {file: len(word.findall(text)) for file, text in self._sources.items()}
        found = [test for test in self._map.in_order((1 << len(self._map.tests)) - 1) if counts.get(test.file)]
        return sorted(found, key=lambda test: -counts[test.file])


def _words(text: str) -> frozenset[str]:
    """The words of identifiers, in the singular and in lower case."""
    parts = re.findall(r"[A-Z]?[a-z]{2,}|[A-Z]{2,}(?![a-z])", text)
    return frozenset(part.lower().removesuffix("s") for part in parts)


def equivalents(path: Path, on_host: bool) -> Mapping[str, Mapping[str, Any]]:
    """Return the mutants that no test can notice on this kind of device, by id, with the change and the argument."""
    entries = json.loads(path.read_text(encoding="utf-8"))["mutants"]
    return {entry["id"]: entry for entry in entries if on_host or entry.get("only") != "host"}
