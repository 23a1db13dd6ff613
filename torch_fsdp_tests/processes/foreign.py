"""The package ``test`` of another project, whose files are run: this checkout and Python also have one of this name."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys

PACKAGE = "test"


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the package in one folder, before those on ``sys.path``."""

    def __init__(self, root: str) -> None:
        self.root = root

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.PathFinder.find_spec(name, [self.root]) if name == PACKAGE else None


def import_tests_from(root: str | None) -> None:
    """Let this process import the package ``test`` from this folder. None changes nothing."""
    if root is not None:
        sys.meta_path.insert(0, _Finder(root))


def root_of_tests() -> str | None:
    """What :func:`import_tests_from` was called with here, so that a fresh interpreter can do the same."""
    return next((finder.root for finder in sys.meta_path if isinstance(finder, _Finder)), None)
