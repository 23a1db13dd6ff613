"""The interpreters of this machine that can make an environment."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

LEAST = (3, 10)
ANSWER_WITHIN = 30.0  # seconds
_ASK = (
    "import sys, venv, ensurepip; "
    "print(sys.implementation.name, *sys.version_info[:2], int('t' in getattr(sys, 'abiflags', '')))"
)


@dataclasses.dataclass(frozen=True)
class Python:
    """An interpreter and its version."""

    path: str
    version: tuple[int, int]

    def __str__(self) -> str:
        return f"Python {self.version[0]}.{self.version[1]}"


def find(given: Sequence[str], environment: Mapping[str, str]) -> list[Python]:
    """Find one interpreter for each version of Python, the preferred one first.

    If interpreters are named, only these are used, in that order. Otherwise the running one comes first, and then the
    newest.
    """
    if given:
        return _ask(given)
    found = _ask([sys.executable, *_around(environment)])
    return sorted(found, key=lambda python: (python.version == sys.version_info[:2], python.version), reverse=True)


def _around(environment: Mapping[str, str]) -> Iterator[str]:
    """The interpreters on PATH, and all of pyenv's, because pyenv puts only active ones on PATH."""
    for folder in map(Path, os.get_exec_path(dict(environment))):
        try:
            names = sorted(os.listdir(folder))
        except OSError:
            continue
        yield from (str(folder / name) for name in names if re.fullmatch(r"python(3(\.\d+)?)?", name))
    root = Path(environment.get("PYENV_ROOT") or Path.home() / ".pyenv")
    yield from map(str, sorted(root.glob("versions/*/bin/python"), reverse=True))


def _ask(paths: Iterable[str]) -> list[Python]:
    """The first interpreter of each version among those that run and are new enough."""
    found: dict[tuple[int, int], Python] = {}
    for path in dict.fromkeys(paths):
        version = _version(path)
        if version is not None and version >= LEAST:
            found.setdefault(version, Python(path, version))
    return list(found.values())


def _version(path: str) -> tuple[int, int] | None:
    """The version of a CPython with the global lock, venv and pip, or None for anything else."""
    try:
        said = subprocess.run(
            [path, "-I", "-c", _ASK], capture_output=True, text=True, timeout=ANSWER_WITHIN, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    name, *numbers = said.stdout.split() or [""]
    if said.returncode != 0 or name != "cpython" or len(numbers) != 3 or numbers[2] != "0":
        return None
    return int(numbers[0]), int(numbers[1])
