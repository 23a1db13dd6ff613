"""Writes the numbers of a run's training loops, and compares them with those of another run, or round by round.

A file of numbers is JSON: for each test and rank the steps, each with the checksum, the dtype and the norm of every
value. ``perturb.numbers`` records them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch.atomic import write_text
from torch_fsdp_tests.dispatch.listing import plural

Steps = list[dict[str, list[Any]]]
Numbers = dict[str, dict[str, Steps]]  # by test and rank


class NoNumbers(ValueError):
    """A file has no numbers to compare with. The message says why, in a sentence."""


def load(path: Path) -> Numbers:
    """Read a file of numbers. Raises :class:`NoNumbers`."""
    try:
        numbers: Numbers = json.loads(path.read_text(encoding="utf-8"))["numbers"]
        for ranks in numbers.values():
            for steps in ranks.values():
                all({name: norm for name, (_, _, norm) in step.items()} for step in steps)
    except OSError as error:
        raise NoNumbers(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise NoNumbers(f"{path} was not written by --record-numbers") from error
    return numbers


def conclude(folder: Path, record: Path | None, against: Numbers | None) -> tuple[list[str], bool]:
    """Write the numbers that ranks recorded in a folder, and compare them. Returns lines for the end of the run, and
    whether all compared numbers are equal. Raises ``OSError`` if the file cannot be written.
    """
    first: Numbers = {}
    limits: dict[str, float] = {}
    repeated = 0
    unequal: list[str] = []
    lines = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text("utf-8").splitlines()]
    for line in sorted(lines, key=lambda line: (line["at"], line["rank"])):
        limits |= line["limits"]
        ranks = first.setdefault(line["test"], {})
        rank = str(line["rank"])
        if rank not in ranks:
            ranks[rank] = line["steps"]
            continue
        repeated += 1
        unequal += _difference(f"{line['test']}, rank {rank}", ranks[rank], line["steps"], {})
    words = []
    if record is not None:
        write_text(record, json.dumps({"numbers": dict(sorted(first.items()))}))
        words.append(f"numbers of {plural(len(first), 'test')}: {record}")
    if repeated:
        words += unequal[:1] or [f"the numbers repeat bit by bit: {plural(repeated, 'repetition')} of a test in a rank"]
    if against is not None:
        shared = [test for test in first if test in against]
        apart = [*_differences(against, {test: first[test] for test in shared}, limits)]
        words.append(f"numbers of {plural(len(shared), 'test')} compared, {len(apart) or 'none'} different")
        words += apart[:5]
        unequal += apart
    return words, not unequal


def _differences(before: Numbers, after: Numbers, limits: Mapping[str, float]) -> Iterator[str]:
    """The first difference of each test in words."""
    for test, ranks in sorted(after.items()):
        for rank in sorted(ranks, key=int):
            words = _difference(f"{test}, rank {rank}", before[test].get(rank, []), ranks[rank], limits)
            if words:
                yield words[0]
                break


def _difference(where: str, before: Steps, after: Steps, limits: Mapping[str, float]) -> list[str]:
    for number, (was, now) in enumerate(zip(before, after), 1):
        for name in dict.fromkeys([*was, *now]):
            if name not in was or name not in now:
                return [f"{where}, step {number}: {name} is missing in {'this run' if name in was else 'the earlier'}"]
            if not _agree(was[name], now[name], limits):
                return [f"{where}, step {number}: {name} differs (norm {was[name][2]!r}, now {now[name][2]!r})"]
    if len(before) != len(after):
        return [f"{where}: {plural(len(before), 'step')} before, {len(after)} now"]
    return []


def _agree(was: list[Any], now: list[Any], limits: Mapping[str, float]) -> bool:
    """Whether two values have the same bits, or differ by no more than a vendor allows for their dtype."""
    if was[:2] == now[:2]:
        return True
    limit = limits.get(now[1], 0.0)
    return was[1] == now[1] and abs(was[2] - now[2]) <= limit * max(abs(was[2]), abs(now[2])) and limit > 0
