"""The installed torch, and files that replace some of its own in memory. Does not import torch.

Nothing is written to where torch is installed. A folder has the other texts, below ``torch/``. A process whose
environment names the folder, and every interpreter that it starts, imports them in place of the installed ones, and
shows them in tracebacks. Several folders may be named. The first that has a file is the one that counts, so whoever
adds a folder edits what :func:`text` returns.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import linecache
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType

VARIABLE = "TORCH_FSDP_TESTS_SOURCES"  # the folders, as in a search path
_SITE = str(Path(__file__).parent / "site")


class NotInstalled(LookupError):
    """There is no torch. The message says so."""


def folder() -> Path | None:
    """The folder of the installed torch, or None."""
    spec = importlib.util.find_spec("torch")
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None


@functools.cache
def versions() -> Mapping[str, str]:
    """Torch's version and what it was built for, read from its version file, because an import takes seconds."""
    place = folder()
    try:
        text = (place / "version.py").read_text(encoding="utf-8") if place else ""
    except OSError:
        return {}
    return dict(re.findall(r"^(__version__|cuda|hip|xpu)\b[^=\n]*=\s*['\"]([^'\"]*)['\"]", text, re.MULTILINE))


def installed() -> tuple[Path, str]:
    """The folder that holds torch, and torch's version. Raises :class:`NotInstalled`."""
    place = folder()
    if place is None:
        raise NotInstalled("torch is not installed")
    return place.parent, versions().get("__version__", "")


def text(path: str, environment: Mapping[str, str]) -> str:
    """What processes with this environment import as a file of torch. ``path`` begins with ``torch/``."""
    folders = [*_folders(environment), installed()[0]]
    place = next((each / path for each in folders if (each / path).is_file()), folders[-1] / path)
    return place.read_text("utf-8", errors="surrogateescape")


def write(texts: Mapping[str, str], folder: Path) -> None:
    """Write the texts of files, by their paths, to a folder."""
    for path, text in texts.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8", errors="surrogateescape")


def environment(folder: Path, others: Mapping[str, str]) -> dict[str, str]:
    """The variables with which processes import the files of a folder, and otherwise those of the other variables."""
    site = [each for each in others.get("PYTHONPATH", "").split(os.pathsep) if each and each != _SITE]
    folders = [str(folder), *map(str, _folders(others))]
    return {VARIABLE: os.pathsep.join(folders), "PYTHONPATH": os.pathsep.join([_SITE, *site])}


def _folders(environment: Mapping[str, str]) -> list[Path]:
    return [Path(each) for each in environment.get(VARIABLE, "").split(os.pathsep) if each]


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles another source than that of its path, and shows it in tracebacks."""

    def __init__(self, name: str, path: str, source: bytes) -> None:
        super().__init__(name, path)
        self._source = source

    def get_code(self, fullname: str) -> CodeType:
        # An entry without a time is not compared with the file.
        text = importlib.util.decode_source(self._source)
        linecache.cache[self.path] = len(text), None, text.splitlines(keepends=True), self.path
        code: CodeType = compile(self._source, self.path, "exec", dont_inherit=True)
        return code


class _Finder:
    """Finds the modules whose files some folders have."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._root = installed()[0]
        places = [(place.relative_to(each), place) for each in reversed(folders) for place in each.rglob("*.py")]
        self._files = {_module(path.as_posix()): (path, place) for path, place in places}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._files:
            return None
        inside, place = self._files[fullname]
        origin = str(self._root / inside)
        loader = _Loader(fullname, origin, place.read_bytes())
        return importlib.util.spec_from_file_location(fullname, origin, loader=loader)


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def install_from_environment() -> None:
    """Called when an interpreter starts."""
    if folders := _folders(os.environ):
        sys.meta_path.insert(0, _Finder(folders))
