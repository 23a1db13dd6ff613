"""The files of behavior: the lines that ranks write in a run, and the record that a user keeps.

A kept record is compressed JSON. Texts and lists of events are stored once, and named by their numbers.
"""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch.atomic import write_bytes
from torch_fsdp_tests.extensions.behavior.differences import Ranks, Record
from torch_fsdp_tests.extensions.behavior.kinds import Kind
from torch_fsdp_tests.settings import ConfigurationError

FORMAT = 2


class NoRecord(ConfigurationError):
    """A file has no behavior to compare with. The message says why, in a sentence."""


def collect(folder: Path, directory: Path, passed: Collection[str], torch: str, device: str) -> Record:
    """The record of the tests that passed, from the lines of their ranks. ``directory`` is the test directory.

    What a second round has recorded differently is marked as unstable.
    """
    record = Record(torch, device)
    for line in sorted(_lines(folder), key=lambda line: line["at"]):
        test = f"{_file(line['file'], directory)}::{line['test']}"
        if test not in passed:
            continue
        record.limits |= line["limits"]
        if line["left_out"]:
            record.left_out[test] = line["left_out"]
        rank = str(line["rank"])
        words = [sys.intern(word) for word in line["words"]]
        trace = {kind: [words[number] for number in events] for kind, events in line["events"].items()}
        first = record.tests.setdefault(test, {}).setdefault(rank, trace)
        kinds = record.unstable.get(test, [])
        if differing := [kind for kind in trace if trace[kind] != first[kind] and kind not in kinds]:
            record.unstable[test] = [*kinds, *differing]
    for test in record.left_out:
        record.tests.pop(test, None)
        record.unstable.pop(test, None)
    return record


def _lines(folder: Path) -> Iterator[dict[str, Any]]:
    for path in folder.glob("*.jsonl"):
        with open(path, encoding="utf-8") as file:
            yield from map(json.loads, file)


def _file(path: str, directory: Path) -> str:
    """The name by which the dispatcher knows a test file."""
    bare = Path(path).with_suffix("")
    return bare.relative_to(directory).as_posix() if bare.is_relative_to(directory) else bare.name


class _Table:
    """Values by number, each of them once."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def add(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))


def save(path: Path, record: Record) -> None:
    """Write a record. Raises ``OSError``."""
    words, lists = _Table(), _Table()
    tests = {
        test: {
            rank: {kind: lists.add(tuple(map(words.add, events))) for kind, events in trace.items() if events}
            for rank, trace in ranks.items()
        }
        for test, ranks in sorted(record.tests.items())
    }
    data = {"behavior": FORMAT, **vars(record), "tests": tests}
    data |= {"words": list(words.numbers), "lists": list(lists.numbers)}
    write_bytes(path, gzip.compress(json.dumps(data, separators=(",", ":")).encode(), mtime=0))


def load(path: Path) -> Record:
    """Read a record. Raises :class:`NoRecord`."""
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        if data.pop("behavior") != FORMAT:
            raise NoRecord(f"{path} was written by another version of the suite: record the behavior again")
        words, lists = data.pop("words"), data.pop("lists")
        known = [[words[number] for number in each] for each in lists]
        tests: dict[str, Ranks] = {
            test: {
                str(int(rank)): {Kind(kind).value: known[n] for kind, n in trace.items()}
                for rank, trace in ranks.items()
            }
            for test, ranks in data.pop("tests").items()
        }
        return Record(**data, tests=tests)
    except OSError as error:
        if error.errno is None:  # not compressed
            raise NoRecord(f"{path} was not written by --record-behavior") from error
        raise NoRecord(f"{path} cannot be read: {error.strerror}") from error
    except (EOFError, zlib.error, RecursionError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        if isinstance(error, NoRecord):
            raise
        raise NoRecord(f"{path} was not written by --record-behavior") from error


def about(record: Record) -> list[str]:
    """What a record lacks: the tests that are left out, and those that do not repeat."""
    return [*_left_out(record.left_out), *_unstable(record.unstable)]


def _left_out(tests: Mapping[str, str]) -> Iterator[str]:
    for why in sorted({*tests.values()}):
        which = [test for test, each in tests.items() if each == why]
        yield f"left out, because {why}: {_some(which)}"


def _unstable(tests: Mapping[str, Iterable[str]]) -> Iterator[str]:
    for test, kinds in sorted(tests.items()):
        yield f"does not repeat, so not compared: {', '.join(kinds)} of {test}"


def _some(tests: list[str]) -> str:
    return f"{len(tests)} tests, such as {tests[0]}" if len(tests) > 1 else tests[0]
