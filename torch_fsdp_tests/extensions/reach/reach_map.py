"""The map of tests and the functions that they enter, its file, and queries on it."""

from __future__ import annotations

import base64
import bisect
import dataclasses
import functools
import json
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch_fsdp_tests.extensions.reach.functions import Statement, digest, digests, functions_in

FORMAT = 3


class MalformedMap(ValueError):
    """The file is not a map, or has another format. The message says what to do."""


class Reached(NamedTuple):
    """A test that enters a function, its recorded seconds, and how many functions it enters in total."""

    file: str
    test: str
    seconds: float
    breadth: int


@dataclasses.dataclass(frozen=True)
class Module:
    """A source file as it was when the map was recorded: the digests of the whole, and of its parts by their names."""

    digest: str
    functions: Mapping[str, str]
    scopes: Mapping[str, str]  # classes, and the module itself: what runs when it is imported

    @property
    def parts(self) -> dict[str, str]:
        return {**self.functions, **self.scopes}

    @classmethod
    def of(cls, content: bytes, name: str) -> Module:
        """The module of this name and content. Raises ``SyntaxError``."""
        parts = functions_in(content, name)
        functions = digests(each for each in parts if each.body is not None)
        return cls(digest(content), functions, digests(each for each in parts if each.body is None))


@dataclasses.dataclass(frozen=True)
class ReachMap:
    """Maps functions to the tests that enter them, and statements by their numbers to the tests that run them.

    A set of tests is an integer: test N is in it if bit N is set. Omitted are statements that every test of their
    function runs.
    """

    torch: str
    tests: tuple[Reached, ...]
    reached: Mapping[str, int]  # by qualified name; functions that no test enters are not in it
    modules: Mapping[str, Module] = dataclasses.field(default_factory=dict)
    statements: Mapping[str, Mapping[int, int]] = dataclasses.field(default_factory=dict)
    device: str = "cpu"  # the type of the device with which it was recorded
    skipped: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)  # tests, by file

    @classmethod
    def load(cls, path: Path) -> ReachMap:
        """Read a map. Raises :class:`MalformedMap`, and ``OSError`` where the file cannot be read."""
        remedy = "record one with run_test.py --save-map FILE"
        try:
            data = json.loads(path.read_bytes())
            if data["format"] != FORMAT:
                raise MalformedMap(f"{path} has format {data['format']!r}, and this version reads {FORMAT}; {remedy}")
            return cls(
                torch=data["torch"],
                tests=tuple(Reached(file, *fields) for file in data["tests"] for fields in data["tests"][file]),
                reached=_unpack(data["reached"]),
                modules={
                    module: Module(whole, *({module + name: part for name, part in parts.items()} for parts in kinds))
                    for module, (whole, *kinds) in data["modules"].items()
                },
                statements=_by_function(_unpack(data["statements"])),
                device=data["device"],
                skipped={file: [*names] for file, names in data["skipped"].items()},
            )
        except MalformedMap:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, zlib.error) as error:
            raise MalformedMap(f"{path} is not a map of what tests reach; {remedy}") from error

    def as_text(self) -> str:
        """The text of its file: a line for each test file and each module, so that two maps can be compared.

        It has a few hundred kilobytes for some thousand tests and functions.
        """
        tests: dict[str, list[Any]] = {}
        for file, *fields in self.tests:
            tests.setdefault(file, []).append(fields)

        def relative(module: str, names: Mapping[str, str]) -> dict[str, str]:
            return {name.removeprefix(module): names[name] for name in names}

        data = {
            "format": FORMAT,
            "torch": self.torch,
            "device": self.device,
            "tests": tests,
            "skipped": self.skipped,
            "modules": {
                name: [module.digest, relative(name, module.functions), relative(name, module.scopes)]
                for name, module in self.modules.items()
            },
            "reached": _pack(self.reached, len(self.tests)),
            "statements": _pack(_by_tests(self.statements), len(self.tests)),
        }

        def lines(table: Mapping[str, Any]) -> str:
            rows = (f"{json.dumps(key)}: {json.dumps(table[key], separators=(',', ':'))}" for key in table)
            return "{\n" + ",\n".join(rows) + "\n}"

        parts = (f'"{key}": {lines(v) if isinstance(v, dict) else json.dumps(v)}' for key, v in data.items())
        return "{\n" + ",\n".join(parts) + "\n}\n"

    @functools.cached_property
    def _names(self) -> list[str]:
        return sorted(self.reached)

    def bits_of(self, name: str) -> int:
        """The tests that enter a function or one inside of it, or any function of a class, module or package."""
        bits = self.reached.get(name, 0)
        start, end = (bisect.bisect_left(self._names, name + after) for after in (".", "/"))  # "/" follows "."
        for each in self._names[start:end]:
            bits |= self.reached[each]
        return bits

    def running(self, function: str, statement: int | None) -> int:
        """The tests that run a statement of a function, or any (None)."""
        if statement is None:
            return self.bits_of(function)
        return self.statements.get(function, {}).get(statement, self.reached.get(function, 0))

    def rows(self, function: str) -> list[int]:
        """The tests that enter a function, and those that run each statement that not all of them run."""
        return [bits for bits in (self.reached.get(function, 0), *self.statements.get(function, {}).values()) if bits]

    def has(self, module: str, content: bytes) -> bool:
        """Whether a module had this content when the map was recorded."""
        known = self.modules.get(module)
        return known is not None and known.digest == digest(content)

    def is_function(self, name: str) -> bool:
        """Whether this function existed when the map was recorded."""
        return name in self.reached or any(name in module.functions for module in self._around(name))

    def knows(self, name: str) -> bool:
        """Whether a function, class, module or package of this name existed then."""
        return self.is_function(name) or any(name in m.scopes for m in self._around(name)) or bool(self.bits_of(name))

    def _around(self, name: str) -> list[Module]:
        """The modules in which something of this name could be."""
        return [module for each in scopes_around(name) if (module := self.modules.get(each)) is not None]

    def enclosing(self, name: str) -> str | None:
        """Of a name and the scopes around it, the innermost that tests reach, or None if there is none in the map."""
        known = (each for each in scopes_around(name) if self._around(each))
        return next((each for each in known if self.bits_of(each)), None)

    def keys(self) -> list[tuple[str, str]]:
        """The tests that it knows, also the skipped ones, by file and name."""
        skipped = ((file, name) for file, names in self.skipped.items() for name in names)
        return [*((test.file, test.test) for test in self.tests), *skipped]

    def unknown(self, declared: Mapping[str, Collection[str]], with_skipped: bool = False) -> list[Reached]:
        """The declared tests that the map does not have, each with zero seconds and no functions.

        A declared name means the tests that begin with it. ``with_skipped`` also returns those that were skipped.
        """
        names = by_file(((test.file, test.test) for test in self.tests) if with_skipped else self.keys())
        unknown = []
        for file, stems in declared.items():
            made = {declared_as(test, stems) for test in names.get(file, ())}
            unknown += [Reached(file, name, 0.0, 0) for name in stems if name not in made]
        return unknown

    def merged(self, newer: ReachMap, gone: Collection[tuple[str, str]] = ()) -> ReachMap:
        """This map without the tests that are ``gone``, and with those of a newer map, which replace its own.

        Both maps are of the same sources.
        """
        replaced = {(test.file, test.test) for test in newer.tests} | {*gone}
        kept = [(test, 0, n) for n, test in enumerate(self.tests) if (test.file, test.test) not in replaced]
        rows = sorted([*kept, *((test, 1, n) for n, test in enumerate(newer.tests))], key=lambda row: row[0][:2])

        def both(old: int, new: int) -> int:
            bits = f"{old:b}"[::-1], f"{new:b}"[::-1]
            return sum(1 << place for place, (_, of, n) in enumerate(rows) if bits[of][n : n + 1] == "1")

        reached = {
            name: both(self.reached.get(name, 0), newer.reached.get(name, 0))
            for name in sorted({*self.reached, *newer.reached})
        }
        statements: dict[str, dict[int, int]] = {}
        for function in sorted({*self.statements, *newer.statements}):
            for number in sorted({*self.statements.get(function, ()), *newer.statements.get(function, ())}):
                running = both(self.running(function, number), newer.running(function, number))
                if running != reached.get(function, 0):
                    statements.setdefault(function, {})[number] = running
        skipped = {*self.keys(), *newer.keys()} - {(test.file, test.test) for test, _, _ in rows} - {*gone}
        return dataclasses.replace(
            newer,
            tests=tuple(test for test, _, _ in rows),
            reached={name: bits for name, bits in reached.items() if bits},
            modules=dict(sorted({**self.modules, **newer.modules}.items())),
            statements=statements,
            skipped=by_file(skipped),
        )

    def tests_of(self, qualified_name: str) -> list[Reached]:
        """The tests that enter a function, or any function of a class or module: sorted by the number of functions that
        they enter, then by time. Empty if no test enters it, or for an unknown name.
        """
        return self.in_order(self.bits_of(qualified_name))

    def in_order(self, tests: int) -> list[Reached]:
        """A set of tests in order: the most specific first, and the fastest among equals."""
        return sorted(self.members(tests), key=lambda test: (test.breadth, test.seconds, test.file, test.test))

    def members(self, tests: int) -> list[Reached]:
        """A set of tests in the order of the map."""
        return [test for test, bit in zip(self.tests, reversed(f"{tests:b}"), strict=False) if bit == "1"]


class Executed(NamedTuple):
    """What a test executes, and its seconds."""

    functions: Collection[str]
    seconds: float = 0.0
    statements: Collection[Statement] = ()


def build(
    torch: str,
    tests: Mapping[tuple[str, str], Executed],
    modules: Mapping[str, Module] | None = None,
    statements: Iterable[Statement] = (),
) -> ReachMap:
    """Build the map of these tests, by file and name. It does not depend on their order.

    ``statements`` are all those of the functions, so that the map knows which of them no test runs.
    """
    reached: dict[str, int] = {}
    running: dict[Statement, int] = {}
    for index, key in enumerate(sorted(tests)):
        for name in tests[key].functions:
            reached[name] = reached.get(name, 0) | 1 << index
        for each in tests[key].statements:
            running[each] = running.get(each, 0) | 1 << index
    fewer: dict[str, dict[int, int]] = {}
    for each in sorted(statements, key=lambda each: (each.function, each.number)):
        if running.get(each, 0) != reached.get(each.function, 0):
            fewer.setdefault(each.function, {})[each.number] = running.get(each, 0)
    listed = (Reached(*key, round(it.seconds, 2), len({*it.functions})) for key, it in sorted(tests.items()))
    return ReachMap(torch, tuple(listed), dict(sorted(reached.items())), dict(sorted((modules or {}).items())), fewer)


def by_file(tests: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names of tests by file, both sorted."""
    names: dict[str, list[str]] = {}
    for file, test in sorted(tests):
        names.setdefault(file, []).append(test)
    return names


def declared_as(test: str, stems: Iterable[str]) -> str | None:
    """The declared ``Class.test`` from which a test is made: the longest prefix of its class, then of its name."""
    cls, _, name = test.partition(".")
    pairs = (stem.partition(".")[::2] for stem in stems)
    fitting = [(len(c), len(n), f"{c}.{n}") for c, n in pairs if cls.startswith(c) and name.startswith(n)]
    return max(fitting)[2] if fitting else None


def scopes_around(name: str) -> Iterator[str]:
    """A qualified name and the scopes around it: ``a.b.c``, ``a.b``, ``a``."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _by_tests(statements: Mapping[str, Mapping[int, int]]) -> dict[str, int]:
    """Statements of a function that the same tests run, joined as one name: ``torch.f#3,4``."""
    rows: dict[str, int] = {}
    for function, tests in statements.items():
        for same in dict.fromkeys(tests.values()):
            numbers = ",".join(str(number) for number, each in tests.items() if each == same)
            rows[f"{function}#{numbers}"] = same
    return rows


def _by_function(rows: Mapping[str, int]) -> dict[str, dict[int, int]]:
    """The opposite of :func:`_by_tests`."""
    tests_of: dict[str, dict[int, int]] = {}
    for name, tests in rows.items():
        function, _, numbers = name.partition("#")
        tests_of.setdefault(function, {}).update(dict.fromkeys(map(int, numbers.split(",")), tests))
    return {function: dict(sorted(tests.items())) for function, tests in tests_of.items()}


def _pack(reached: Mapping[str, int], count: int) -> list[Any]:
    """Pack names, and their sets as bit rows of the same width. Both compress well."""
    width = (count + 7) // 8
    rows = b"".join(tests.to_bytes(width, "little") for tests in reached.values())
    return [width, *(base64.b64encode(zlib.compress(part, 9)).decode() for part in (" ".join(reached).encode(), rows))]


def _unpack(packed: list[Any]) -> dict[str, int]:
    width, *parts = packed
    text, rows = (zlib.decompress(base64.b64decode(part)) for part in parts)
    names = text.decode().split()
    if len(rows) != len(names) * width:
        raise ValueError("the rows do not fit the names")
    return {name: int.from_bytes(rows[n * width : (n + 1) * width], "little") for n, name in enumerate(names)}
