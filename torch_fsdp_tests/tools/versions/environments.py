"""An environment for each version of torch: one that exists, or one that uv makes once and this module keeps."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

NIGHTLIES = "https://download.pytorch.org/whl/nightly/cpu"
MADE = "made"  # a file of an environment that is complete
NEWEST = "torch"  # without a version: a nightly
_RELEASE = re.compile(r"\d+\.\d+(\.\d+)?((a|b|rc|\.post|\.dev)\d+)?(\+[\w.]+)?")
_WHEEL = re.compile(r"torch-([^-]+)-.+\.whl")


class InvalidRequest(Exception):
    """The arguments cannot be used. The message is one sentence."""


class CannotBeMade(Exception):
    """A version has no environment. The others can be run."""


@dataclasses.dataclass(frozen=True)
class Version:
    """A version that the command line names: its name in the table, and where its torch comes from."""

    label: str
    requirement: str | None = None  # what is installed: torch==2.15.0, torch (the newest nightly), or a wheel
    python: str | None = None  # the interpreter of an existing environment


def parse(text: str) -> Version:
    """Parse ``2.15.0``, ``nightly``, a wheel, an environment, an interpreter, or ``LABEL=`` and one of these."""
    label, equals, target = text.rpartition("=")
    if equals and not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", label):
        raise InvalidRequest(f"{text!r}: the name before = may only have letters, digits and . _ + -")
    if target == "nightly":
        return Version(label or target, NEWEST)
    if _RELEASE.fullmatch(target):
        return Version(label or target, f"torch=={target}")
    path = Path(target).expanduser().absolute()
    if wheel := _WHEEL.fullmatch(path.name):
        if path.is_file():
            return Version(label or wheel[1], str(path))
    elif (path / "bin" / "python").exists():
        return Version(label or path.name, python=str(path / "bin" / "python"))
    elif path.is_file() and os.access(path, os.X_OK):
        return Version(label or path.parents[1].name, python=str(path))
    raise InvalidRequest(f"{target!r} is not a version such as 2.15.0, 'nightly', a wheel of torch, or an environment")


@dataclasses.dataclass(frozen=True)
class Maker:
    """Makes environments with uv in a folder, outside of the checkout."""

    folder: Path
    checkout: Path  # its pyproject.toml says what the tests need
    python: str  # the interpreter, or its version
    index: str | None  # where torch is
    run: Callable[[Sequence[str]], int]  # runs a command to its end, and returns its status

    def python_of(self, version: Version) -> str:
        """The interpreter of a version's environment. Raises :class:`CannotBeMade`."""
        if version.requirement is None:
            return str(version.python)
        recipe = repr((version.requirement, self.python, self.index))
        folder = self.folder / f"{version.label}-{hashlib.sha256(recipe.encode()).hexdigest()[:8]}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be making the same one
            if version.requirement == NEWEST or not (folder / MADE).exists():  # there is a new nightly each day
                shutil.rmtree(folder, ignore_errors=True)
                self._make(version.requirement, folder)
                (folder / MADE).touch()
        return str(folder / "bin" / "python")

    def _make(self, requirement: str, folder: Path) -> None:
        index = NIGHTLIES if requirement == NEWEST else self.index
        newest = ["--prerelease", "allow"] if requirement == NEWEST else []
        install = ["pip", "install", "--python", str(folder / "bin" / "python")]
        for words in (
            ["venv", "--python", self.python, str(folder)],
            [*install, requirement, *newest, *(["--index-url", index] if index else [])],
            [*install, "--requirement", str(self.checkout / "pyproject.toml"), "--extra", "ci"],  # torch stays
        ):
            status = self.run([*uv(), *words])
            if status:
                raise CannotBeMade(f"no environment: uv {' '.join(words[:2])} ended with status {status}")


def uv() -> list[str]:
    """The command that starts uv. Raises :class:`InvalidRequest` if there is none."""
    if importlib.util.find_spec("uv") is not None:
        return [sys.executable, "-m", "uv"]
    if program := shutil.which("uv"):
        return [program]
    raise InvalidRequest("uv makes the environments and is missing: pip install uv, or name existing environments")
