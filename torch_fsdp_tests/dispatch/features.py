"""The features of FSDP, the tests of each, and their results. A test may belong to several features.

``data/features.txt`` first has the features, by group, with their short names in brackets. Then it has a line for each
folder, file or class, with its features. Classes stand indented below their file. A test belongs to the features of its
class, its file and its folders. A class is declared with the features of at least a quarter of its tests.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch_fsdp_tests.verdict import COUNTED, skip_rows, tally

DECLARED = Path(__file__).parent / "data" / "features.txt"


class FsdpFeature(NamedTuple):
    """A feature, the group of features that it belongs to in tables, a sentence about it, and a short name.

    Only a feature that users can leave out has a short name, with which the defects of PyTorch are declared.
    """

    name: str
    group: str
    about: str
    short: str = ""


def _features() -> Iterator[FsdpFeature]:
    group = ""
    for line in DECLARED.read_text(encoding="utf-8").partition("\n\n")[0].splitlines():
        name, _, about = line.strip().partition(" = ")
        if about:
            name, _, short = name.removesuffix("]").partition(" [")
            yield FsdpFeature(name, group, about, short)
        else:
            group = name.removesuffix(":")


FEATURES = tuple(_features())


@functools.cache
def declared() -> Mapping[str, Sequence[str]]:
    """The features of each declared ``folder``, ``folder/file`` or ``folder/file::Class``."""
    features_by_name: dict[str, list[str]] = {}
    file = ""
    for line in DECLARED.read_text(encoding="utf-8").partition("\n\n")[2].splitlines():
        name, _, features = line.partition(" = ")
        name = f"{file}::{name.strip()}" if name.startswith(" ") else (file := name)
        features_by_name[name] = features.split("; ") if features else []
    return features_by_name


def names_of(file: str, test: str) -> Iterator[str]:
    """The names by which a test can be declared. A class may be longer in a report, by a type of device, as in
    ``TestInputCPU``.
    """
    folders = file.split("/")
    yield from ("/".join(folders[:end]) for end in range(1, len(folders) + 1))
    cls = test.rpartition(".")[0]
    yield from (f"{file}::{cls[:end]}" for end in range(1, len(cls) + 1) if end == len(cls) or cls[end:].isupper())


def features_of(file: str, test: str) -> list[FsdpFeature]:
    """The features of a test. Empty for a test that is not declared."""
    declared_names = {feature for name in names_of(file, test) for feature in declared().get(name, ())}
    return [feature for feature in FEATURES if feature.name in declared_names]


def summary(files: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each feature that has tests among the files of a ``report.json``."""
    tests: dict[FsdpFeature, list[Mapping[str, Any]]] = {feature: [] for feature in FEATURES}
    for file in files:
        for test in file["tests"]:
            for feature in features_of(file["file"], test["test"]):
                tests[feature].append(test)
    return [_row(feature, its) for feature, its in tests.items() if its]


def _row(feature: FsdpFeature, tests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = tally(test["outcome"] for test in tests)
    return {
        "name": feature.name,
        "group": feature.group,
        "about": feature.about,
        **{name: counts[state] for state, name in COUNTED.items()},
        "missing": skip_rows(tests),
    }
