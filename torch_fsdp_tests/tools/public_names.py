"""Prints what users may rely on, a line for each name, option, status, variable and capability.

``docs/stability.md`` says what that means. ``test/harness/inputs/public.txt`` is the stored list. Names of upstream's
modules are in ``test/harness/inputs/upstream_names.txt``, and keys of files in the schemas of ``dispatch/data``.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Iterator, Sequence

from torch_fsdp_tests import extension, settings
from torch_fsdp_tests.defects.command import command_line
from torch_fsdp_tests.device import vendors
from torch_fsdp_tests.device.accelerator import Accelerator
from torch_fsdp_tests.device.capabilities import CAPABILITIES
from torch_fsdp_tests.dispatch import options
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.options import Parser
from torch_fsdp_tests.extension import Extension, Feature
from torch_fsdp_tests.processes import system

EXPERIMENTAL = ("behavior", "fixes", "reach")  # the extensions


def stable() -> Iterator[str]:
    """What changes only as semantic versioning allows."""
    experimental = set(_of_extensions())
    yield from (line for line in _options("run_test.py", options.make_parser()) if line not in experimental)
    yield from _options("python -m torch_fsdp_tests.defects", command_line.make_parser())
    yield from (f"exit status {status:d} {status.name}" for status in ExitStatus)
    yield from (f"variable {variable.name}" for variable in settings.VARIABLES)
    yield from (f"capability {name}" for name in CAPABILITIES)
    yield f"entry point {vendors.ENTRY_POINTS}"
    yield from _members(vendors.Vendor)
    yield from _members(Accelerator)


def experimental() -> Iterator[str]:
    """What may change in any release."""
    yield from _of_extensions()
    yield "python -m torch_fsdp_tests.check"
    yield f"entry point {extension.ENTRY_POINTS}"
    yield from (line for each in (Extension, Feature) for line in _members(each))


def _of_extensions() -> Iterator[str]:
    for name in EXPERIMENTAL:
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        found = extension.found().get(name)
        if found is not None:  # its folder may be deleted
            found.add_options(lambda title, parser=parser: parser.add_argument)  # type: ignore[misc]
        yield from _options("run_test.py", parser)


def _options(program: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    shown = (action for action in parser._actions if action.dest not in ("without_effect", "elsewhere"))
    return (f"option {program} {name}" for action in shown for name in action.option_strings)


def _members(cls: type) -> Iterator[str]:
    """The fields and methods of a class, with the parameters of each."""
    fields = [field.name for field in dataclasses.fields(cls)] if dataclasses.is_dataclass(cls) else []
    for name in sorted({*fields, *vars(cls), *getattr(cls, "__annotations__", ())}):
        if not name.startswith("_"):
            member = vars(cls).get(name)
            function = getattr(member, "__func__", member)
            parameters = list(inspect.signature(function).parameters) if inspect.isfunction(function) else None
            yield f"{cls.__name__}.{name}" + ("" if parameters is None else f"({', '.join(parameters)})")


def text() -> str:
    """The whole list."""
    heading = "# made by python -m torch_fsdp_tests.tools.public_names"
    return "\n".join([heading, "# stable", *stable(), "", "# experimental", *experimental(), ""])


def main(argv: Sequence[str]) -> int:
    """Print the list. Returns the exit status."""
    Parser(prog="python -m torch_fsdp_tests.tools.public_names", description=__doc__).parse_args(argv)
    print(text(), end="")
    return 0


if __name__ == "__main__":
    system.run_command("public_names", main)
