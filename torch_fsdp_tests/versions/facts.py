"""The facts of ``torch_facts`` for each version, which are computed in its environment, and their summary.

``python -m torch_fsdp_tests.versions.facts FILE`` runs inside the environment, and is the only part that has torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def answer() -> dict[str, Any]:
    """What the probe of each fact finds in the torch of this process, or what follows from its version."""
    from torch_fsdp_tests import torch_facts

    facts = {}
    for name, fact in torch_facts.facts().items():
        about: dict[str, Any] = {"since": list(fact.since), "says": fact.says, "probed": fact.probe is not None}
        try:
            facts[name] = {**about, "holds": fact.seen, "why": ""}
        except torch_facts.FactIsUnknown as error:
            facts[name] = {**about, "holds": None, "why": str(error)}
    return facts


@dataclasses.dataclass(frozen=True)
class Summary:
    """A summary over all versions: names of facts, with an explanation where one is needed."""

    ended: dict[str, str]  # they hold on every version
    absent: dict[str, str]  # they hold on none
    disagreeing: dict[str, str]  # the probe and the version disagree, or the probe fails
    unasked: dict[str, str]  # no test and no module uses them


def summarize(answers: Mapping[str, Mapping[str, Any]], asked: Iterable[str]) -> Summary:
    """``answers`` has the facts of each version, by torch's own version; ``asked`` has the names in use."""
    names = dict.fromkeys(name for facts in answers.values() for name in facts)
    asked = set(asked)
    ended, absent, disagreeing, unasked = {}, {}, {}, {}
    for name in names:
        by_version = {version: facts[name] for version, facts in answers.items() if name in facts}
        fact = next(iter(by_version.values()))
        since = ".".join(map(str, fact["since"]))
        words = f"since {since}: torch {fact['says']}"
        holds = {each["holds"] for each in by_version.values()}
        if holds == {True}:
            ended[name] = words
        elif holds == {False}:
            absent[name] = words
        wrong = [
            _disagreement(version, each, since)
            for version, each in by_version.items()
            if each["holds"] != (numbers(version)[:2] >= tuple(each["since"]))
        ]
        if wrong:
            disagreeing[name] = "; ".join(wrong)
        if name not in asked:
            unasked[name] = words
    return Summary(ended, absent, disagreeing, unasked)


def _disagreement(version: str, fact: Mapping[str, Any], since: str) -> str:
    if fact["holds"] is None:
        return fact["why"]
    return (
        f"torch {version} {'has it already' if fact['holds'] else 'does not have it'}, and the fact says since {since}"
    )


def in_use(sources: Iterable[Path], names: Iterable[str]) -> set[str]:
    """The names that occur in any of these Python files."""
    pattern = re.compile(r"\b[A-Z][A-Z0-9_]+\b")
    words: set[str] = set()
    for path in sources:
        words.update(pattern.findall(path.read_text(encoding="utf-8", errors="replace")))
    return words.intersection(names)


def numbers(version: str) -> tuple[int, ...]:
    """A version such as ``2.15.0+cpu`` as numbers that can be compared."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(answer()), encoding="utf-8")
