"""Which copy of the suite this is: a checkout or an installed package, which version, and of which commit."""

from __future__ import annotations

import functools
import glob
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch_fsdp_tests import __version__

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

PACKAGE = Path(__file__).resolve().parent
CHECKOUT = PACKAGE.parent if (PACKAGE.parent / "run_test.py").is_file() else None
ROOT = CHECKOUT or PACKAGE  # the folder that holds the tests and the documents: an installed package has them inside
DOCUMENTS = ROOT / "docs"
COMMAND = "torch-fsdp-tests"
COMMIT = "commit.txt"  # in the package where there is no repository: what :func:`commit` returned where it was built


@functools.cache
def has(file: str | None, folder: str = "test") -> bool:
    """Whether a file is in this folder of the suite. Test files of other projects are not."""
    return file is not None and Path(file).resolve().is_relative_to(ROOT / folder)


@functools.cache
def commit() -> str | None:
    """The commit of the tests and the harness, with ``-dirty`` where files differ from it; None if it is unknown."""
    if CHECKOUT is None or not (CHECKOUT / ".git").exists():  # a folder without one may lie in another repository
        path = PACKAGE / COMMIT
        return path.read_text(encoding="utf-8").strip() or None if path.is_file() else None
    head, changes = _git("rev-parse", "--short", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    return f"{head}-dirty" if head and changes else head or None


def _git(*words: str) -> str | None:
    """What git says of the checkout. It takes no lock: one would stay behind if the run were killed now."""
    import subprocess  # not at import: a plan starts no program

    command = ["git", "--no-optional-locks", "-C", str(CHECKOUT), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def version() -> str:
    """``0.1.0``, or ``0.1.0 (6ed3527-dirty)`` where the commit is known, or should be."""
    known = commit()
    if known is None and CHECKOUT is not None and (CHECKOUT / ".git").exists():
        known = "unknown commit: git cannot read the repository"
    return f"{__version__} ({known})" if known else __version__


def on_path(environment: Mapping[str, str]) -> dict[str, str]:
    """The variable by which a program in another folder finds this checkout; an installed package is found anyway."""
    if CHECKOUT is None:
        return {}
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(CHECKOUT), environment.get("PYTHONPATH"))))}


def entry_points(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of installed packages, by name."""
    if not any(_has_entry_point(folder, group) for folder in sys.path):
        return {}
    import importlib.metadata  # imported late, because it takes longer than a whole plan, and is rarely needed

    return {entry.name: entry for entry in importlib.metadata.entry_points(group=group)}


def _has_entry_point(folder: str, group: str) -> bool:
    """Whether a folder of packages has one with an entry point of this group."""
    files = glob.glob(os.path.join(glob.escape(folder), "*-info", "entry_points.txt"))
    return any(f"[{group}]" in Path(file).read_text(encoding="utf-8", errors="replace") for file in files)


def check_file(file: str) -> None:
    """Raise ``ValueError`` if a test file lies in a checkout other than this one."""
    for folder in Path(file).resolve().parents:
        if (folder / "run_test.py").is_file() and (folder / PACKAGE.name).is_dir() and folder != CHECKOUT:
            raise ValueError(
                f"this file belongs to {folder}, and {PACKAGE.name} is that of {ROOT}: "
                f"pip install -e {folder} installs its own, and {folder}/run_test.py runs it without an installation"
            )


def is_module(program: str) -> bool:
    """Whether a program, by its path, is what ``python -m torch_fsdp_tests`` runs."""
    return Path(os.path.abspath(program)) == PACKAGE / "__main__.py"


def program_name() -> str:
    """What a message of the dispatcher begins with: the name by which it was called."""
    if is_module(sys.argv[0]):
        return f"python -m {PACKAGE.name}"
    return COMMAND if os.path.basename(sys.argv[0]) == COMMAND else "run_test.py"


def program_words() -> list[str]:
    """The first words of a command line that calls the dispatcher as it was called now."""
    import shutil

    python = "python" if shutil.which("python") == sys.executable else sys.executable
    program = sys.argv[0]
    if is_module(program):
        return [python, "-m", PACKAGE.name]
    if os.path.basename(program) == COMMAND:
        return [COMMAND if shutil.which(COMMAND) == os.path.abspath(program) else program]
    return [python, short_path(program) if os.path.exists(program) else "run_test.py"]


def short_path(path: str | Path) -> str:
    """The shorter of a path's relative and absolute forms."""
    return min(os.path.relpath(path), os.path.abspath(path), key=len)
