"""``--with-fixes``: known defects of torch are fixed in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch_fsdp_tests.extension import AddOption, Extension, Feature


class _Extension(Extension):
    in_report = {"fixes": []}

    def add_options(self, group: Callable[[str], AddOption]) -> None:
        words = "fix these known defects of torch in memory (default: all that have a fix for this version)"
        group("how they run")("--with-fixes", nargs="*", action="extend", dest="fixes", metavar="ID", help=words)

    def feature(self, run: Any, given: Mapping[str, Any], environment: Mapping[str, str]) -> Feature | None:
        if "fixes" not in given:
            return None
        from torch_fsdp_tests.extensions.fixes.applying import Fixes

        return Fixes(given["fixes"])


EXTENSION = _Extension()
