"""Completion of the command line in a shell. If argcomplete is set up, the shell asks for it with a variable."""

from __future__ import annotations

import argparse
import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch import devices
from torch_fsdp_tests.dispatch.discover import discover, source_of
from torch_fsdp_tests.dispatch.select import LIST
from torch_fsdp_tests.dispatch.syntax import tests_by_class

VARIABLE = "_ARGCOMPLETE"


def complete(parser: argparse.ArgumentParser, directory: Path, environment: Mapping[str, str]) -> None:
    """Answer the shell and exit, if it asks. ``directory`` has the tests, unless the command line names another one."""
    if VARIABLE not in environment:
        return
    with contextlib.suppress(ImportError):
        import argcomplete

        tests = functools.partial(_tests, directory)
        completers = {"include": tests, "exclude": tests, "device": _types}  # other values are completed as files
        for action in parser._actions:
            if action.dest in completers:
                setattr(action, "completer", completers[action.dest])  # noqa: B010 - argcomplete's way
        argcomplete.autocomplete(parser, always_complete_options="long")


def _tests(directory: Path, prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Return the possible completions: a folder, a file or a list of tests, and the classes of a file after ``::``."""
    directory = getattr(parsed_args, "test_directory", directory)
    files = discover(directory)
    name, colons, _inside = prefix.partition("::")
    if colons and name in files:
        return [f"{name}::{each}" for each in tests_by_class(source_of(files[name])) or ()]
    names = {_next_step(name, prefix) for name in files if name.startswith(prefix)}
    return sorted(names | {path.stem for path in directory.glob(f"*{LIST}")})


def _types(**_: Any) -> list[str]:
    return devices.known_types()


def _next_step(name: str, prefix: str) -> str:
    """Cut a name after the next folder, because a list of a hundred files is too long."""
    end = name.find("/", len(prefix))
    return name if end < 0 else name[: end + 1]
