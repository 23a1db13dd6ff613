"""Which test files PyTorch's own suite has: command lines of its CI name some that are not here."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path

from torch_fsdp_tests.dispatch.select import candidates, is_list, matching

LISTED = Path(__file__).parent / "data" / "upstream-files.txt"  # its head says how to read it


@functools.cache
def _listed() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The files, and the folders of which every file counts, with ``/`` at the end."""
    found, folder = [], ""
    lines = LISTED.read_text(encoding="utf-8").splitlines()
    for word in (word for line in lines for word in line.partition("#")[0].split()):
        if word.endswith(":"):
            folder = "" if word == ".:" else f"{word[:-1]}/"
        else:
            found.append(f"{folder}{word}")
    folders = tuple(name for name in found if name.endswith("/"))
    return tuple(name for name in found if name not in folders), folders


def absent(words: Iterable[str], files: Iterable[str], directory: Path) -> list[str]:
    """The words that name no test file here, but one of PyTorch's own suite."""
    unknown = []
    for word in words:
        names = [*candidates(word.partition("::")[0], directory)]
        if not any(matching(name, files) for name in names) and not is_list(word, directory):
            if any(map(_has, names)):
                unknown.append(word)
    return unknown


def _has(name: str) -> bool:
    """Whether PyTorch's suite has this file, files in this folder, or files that fit this glob."""
    name = name.removeprefix("test/")
    files, folders = _listed()
    return bool(matching(name, files)) or f"{name}/".startswith(folders)
