"""``--reaching``, ``--changed``, ``--save-map``: the tests that a change reaches, by a map of what each runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch_fsdp_tests.extension import AddOption, Extension, Feature, absolute


class _Extension(Extension):
    def add_options(self, group: Callable[[str], AddOption]) -> None:
        add = group("which tests")
        words = "only tests that execute a function, class, module, file or FILE:LINES, or what has changed in a diff "
        words += "(- for stdin) or compared with the folder of another version of PyTorch"
        add("--reaching", nargs="+", action="extend", metavar="WHAT", help=words)
        words = "only tests that execute what differs between the installed FSDP and that of the map"
        add("--changed", action="store_true", help=words)
        words = "with --reaching or --changed: the map of what tests execute (default: the shipped one for "
        words += "this version of PyTorch); with --save-map: run only the tests that it does not know, and write both"
        add("--map", type=absolute, metavar="FILE", help=words)
        words = "write a map of which tests execute which functions and statements, for --reaching and --changed"
        group("how they run")("--save-map", type=absolute, metavar="FILE", help=words)

    def feature(self, run: Any, given: Mapping[str, Any], environment: Mapping[str, str]) -> Feature | None:
        if not given.keys() & {"reaching", "changed", "map", "save_map"}:
            return None
        from torch_fsdp_tests.extensions.reach.feature import Reach

        return Reach(run, given)

    def start(self, file: str) -> None:
        from torch_fsdp_tests.extensions.reach import reaching

        reaching.record(file)


EXTENSION = _Extension()
