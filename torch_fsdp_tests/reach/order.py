"""The order in which tests should run for a change: first those that would detect it soonest.

A test is relevant to a change if its name, its docstring or its body shares rare words with the changed code, if it
checks errors and the change is about one, if it detected an earlier change of the same function, and if it enters few
other functions. Its relevance is divided by its cost. Nothing here runs a test or imports torch.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import heapq
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch_fsdp_tests.reach.reachmap import Reached, ReachMap

# How much a word of the change counts, by its place there, and by its place in the test.
CHANGED, NAMED, AROUND = 1.0, 1.0, 0.25
IN_NAME, IN_BODY = 2.0, 1.0
RARITY = 1.5  # the exponent of the logarithm of how rare a word is

# The relevance of a test. The words add up to 1 for a body that has them all.
BASE = 0.1  # any test that runs what changes
ERRORS = 0.5  # added for a test of errors that has all words of the message
SPECIFIC = 0.1  # added for the most specific test
DETECTED = 10.0  # factor for a test that detected an earlier change of the function
ELSEWHERE = 0.1  # factor for a test that enters the function, but does not run what changes in it
AGAIN = 0.5  # factor for each earlier variant of the same test
SAME_CLASS = 0.95  # factor for each earlier test of the same class

START = 1.0  # seconds that a test costs in addition to its own
COST = 0.7  # the exponent of the seconds by which the relevance is divided
USUAL = 100  # words of a body; the words of a longer body count less

FIRST_BATCH = 2  # tests in the first process; each further process has up to twice as many, but no more than MAX_BATCH
MAX_BATCH = 8
LOOKAHEAD = 4  # how far ahead a process looks for tests of its file, as a multiple of its number of tests


@dataclasses.dataclass(frozen=True)
class Edit:
    """What changes in a function, class or module."""

    name: str
    text: str = ""  # the changed lines, before and after
    around: str = ""  # the source of the function, with comments and docstring
    messages: str = ""  # of the errors and warnings that the changed lines give, or decide on
    statements: frozenset[int] = frozenset()  # the numbers of the changed ones


def kills_in(*records: Path) -> dict[str, set[tuple[str, str]]]:
    """The tests that killed mutants, as pairs of file and test, by the name of the mutated function.

    ``python -m torch_fsdp_tests.tools.mutants`` writes the records. Those that do not exist are left out.
    """
    tests_of: dict[str, set[tuple[str, str]]] = {}
    texts = [record.read_text(encoding="utf-8") for record in records if record.is_file()]
    for line in itertools.chain.from_iterable(map(str.splitlines, texts)):
        with contextlib.suppress(ValueError):  # the last line can be cut short
            finding = json.loads(line)
            if finding.get("by"):
                module, function, *_ = finding["id"].split(":")
                file, _, test = finding["by"].partition("::")
                tests_of.setdefault(f"{module}.{function}", set()).add((file, test))
    return tests_of


class Order:
    """Sorts tests for a change."""

    def __init__(
        self,
        reach: ReachMap,
        sources: Mapping[str, str],
        detected: Mapping[str, Iterable[tuple[str, str]]] | None = None,
    ) -> None:
        """``sources`` are the texts of test files by name. ``detected`` are the tests, with their files, that detected
        earlier changes of a function, by its name.
        """
        self._map = reach
        self._detected = {name: frozenset(tests) for name, tests in (detected or {}).items()}
        self._files = {name: _File(source) for name, source in sources.items()}

    def sort(self, tests: Iterable[Reached], edits: Sequence[Edit]) -> list[Reached]:
        """The tests with the highest score first. A score falls with each earlier test of the same kind."""
        scores = self.scores(tests, edits)
        earlier: collections.Counter[tuple[str, str]] = collections.Counter()
        order = []
        queue = [(-score, test.seconds, test) for test, score in scores.items()]
        heapq.heapify(queue)
        while queue:
            score_before, seconds, test = heapq.heappop(queue)
            cls, _, name = test.test.rpartition(".")
            variants, others = (test.file, self._file(test).definition(name)), (test.file, cls)
            score = scores[test] * AGAIN ** earlier[variants] * SAME_CLASS ** earlier[others]
            if score < -score_before:  # since scores only fall, the first test that still has its score is the best
                heapq.heappush(queue, (-score, seconds, test))
                continue
            order.append(test)
            earlier.update((variants, others))
        return order

    def scores(self, tests: Iterable[Reached], edits: Sequence[Edit]) -> dict[Reached, float]:
        """The relevance of each test for the change, divided by its cost."""
        tests = [*tests]
        weights, messages = _weights(edits), {word for edit in edits for word in words(edit.messages)}
        rarity = self._rarity
        total = sum(weight * rarity.get(word, 0.0) for word, weight in weights.items()) or 1.0
        running = {*self._map.in_order(functools.reduce(int.__or__, map(self._running, edits), 0))}
        detected = {key for edit in edits for key in self._detected.get(edit.name, ())}
        min_breadth = min((test.breadth for test in tests), default=0)
        scores = {}
        for test in tests:
            text = self._text(test)
            shared = text.words & weights.keys()
            relevance = BASE + sum(weights[word] * rarity.get(word, 0.0) * text.weight(word) for word in shared) / total
            relevance += ERRORS * text.checks_errors * len(messages & text.words) / max(1, len(messages))
            relevance += SPECIFIC * (1 + min_breadth) / (1 + test.breadth)
            relevance *= DETECTED if (test.file, test.test) in detected else 1.0
            relevance *= 1.0 if test in running else ELSEWHERE
            scores[test] = relevance / (START + test.seconds) ** COST
        return scores

    def _running(self, edit: Edit) -> int:
        """The tests that run any changed statement, as bits. All of the function, if these are not known."""
        bits = functools.reduce(int.__or__, (self._map.running(edit.name, each) for each in edit.statements), 0)
        return bits or self._map.bits_of(edit.name)

    @functools.cached_property
    def _rarity(self) -> Mapping[str, float]:
        """The weight of each word: the fewer bodies have it, the higher. It is 0 if all have it."""
        bodies = [text.words for file in self._files.values() for text in file.bodies()]
        counts = collections.Counter(word for each in bodies for word in each)
        return {word: math.log(len(bodies) / count) ** RARITY for word, count in counts.items()}

    def _text(self, test: Reached) -> _Text:
        return self._file(test).text(*test.test.rpartition(".")[::2])

    def _file(self, test: Reached) -> _File:
        return self._files.get(test.file) or self._files.setdefault(test.file, _File(""))


def within(budget: float, tests: Iterable[Reached]) -> list[Reached]:
    """The first tests whose recorded seconds fit into the budget together, and at least one."""
    chosen: list[Reached] = []
    for test in tests:
        budget -= test.seconds
        if chosen and budget < 0:
            break
        chosen.append(test)
    return chosen


def batches(tests: Iterable[Reached], first: int = FIRST_BATCH) -> Iterator[tuple[Reached, ...]]:
    """Divide tests into processes, in their order. A process has tests of one file that come soon after each other.
    The first one has at most ``first``.
    """
    left, size = [*tests], first
    while left:
        batch = [test for test in left[: LOOKAHEAD * size] if test.file == left[0].file][:size]
        yield tuple(batch)
        taken = set(batch)
        left = [test for test in left if test not in taken]
        size = min(2 * size, MAX_BATCH)


@dataclasses.dataclass(frozen=True)
class _Text:
    """The words of a test."""

    name: frozenset[str]
    words: frozenset[str]  # with those of the name
    checks_errors: bool

    def weight(self, word: str) -> float:
        return IN_NAME if word in self.name else IN_BODY / max(1.0, len(self.words) / USUAL)


class _File:
    """The tests and helpers of a file."""

    def __init__(self, source: str) -> None:
        self._source = source

    @functools.cached_property
    def _parts(self) -> Mapping[str, str]:
        """The text of each function, method and class header by its name. Texts of one name are joined."""
        lines_of: dict[str, list[str]] = {}
        part, decorators = list[str](), list[str]()
        for line in self._source.splitlines():
            start = _START.match(line)
            if start and start["name"]:
                part = lines_of.setdefault(start["name"], [])
                part += [*decorators, line]
                decorators = []
            elif start or decorators:
                decorators.append(line)
            else:
                part.append(line)
        return {name: "\n".join(lines) for name, lines in lines_of.items()}

    @functools.cache  # noqa: B019 (there is one object in a run)
    def definition(self, test: str) -> str:
        """The name of the function that a test is made from: the longest with which its name begins."""
        return max((name for name in self._parts if test.startswith(name)), key=len, default=test)

    @functools.cache  # noqa: B019
    def text(self, cls: str, test: str) -> _Text:
        named, body = words(f"{cls} {test}"), self._body(self.definition(test))
        return _Text(named, named | body.words, body.checks_errors)

    def bodies(self) -> list[_Text]:
        return [self._body(name) for name in self._parts if name.startswith("test")]

    @functools.cache  # noqa: B019
    def _body(self, name: str) -> _Text:
        """The words of a function and of the functions and classes of the file that it names, except other tests."""
        own = self._parts.get(name, "")
        helpers = {each for each in _IDENTIFIER.findall(own) if each in self._parts and not each.startswith("test")}
        text = "\n".join([own, *(self._parts[each] for each in helpers if each != name)])
        return _Text(frozenset(), words(text), "assertRaises" in text or "assertWarns" in text)


def words(text: str) -> frozenset[str]:
    """The identifiers of a text and their words, in lower case and in the singular."""
    return frozenset().union(*map(_words_in, {*_IDENTIFIER.findall(text)}))


@functools.cache
def _words_in(identifier: str) -> frozenset[str]:
    identifier = identifier.strip("_")
    words = {part.lower().removesuffix("s") for part in _WORD.findall(identifier)}
    return frozenset(words | {identifier} if "_" in identifier else words)


def _weights(edits: Iterable[Edit]) -> dict[str, float]:
    """The words of a change with their weights."""
    weights: dict[str, float] = {}
    for edit in edits:
        name = edit.name.rpartition(".")[2]
        for text, weight in ((f"{edit.text} {edit.messages}", CHANGED), (name, NAMED), (edit.around, AROUND)):
            for word in words(text):
                weights[word] = max(weight, weights.get(word, 0.0))
    return weights


# Where a function or a class begins at the margin or in a class, or the first of its decorators.
_START = re.compile(r"(?: {4})?(?:@|(?:async )?(?:def|class) (?P<name>\w+))")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w+")
_WORD = re.compile(r"[A-Z]?[a-z]{2,}|[A-Z]{2,}(?![a-z])")
