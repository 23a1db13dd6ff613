"""``--compare``: what differs from an earlier run. ``python -m torch_fsdp_tests.extensions.compare`` compares two."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch_fsdp_tests.extension import AddOption, Extension, Feature


class _Extension(Extension):
    def add_options(self, group: Callable[[str], AddOption]) -> None:
        words = "report what differs from the report.json of an earlier run, or of its folder"
        group("output")("--compare", type=Path, metavar="REPORT", help=words)

    def feature(self, run: Any, given: Mapping[str, Any], environment: Mapping[str, str]) -> Feature | None:
        if "compare" not in given:
            return None
        from torch_fsdp_tests.extensions.compare.feature import Compare

        return Compare(given["compare"])


EXTENSION = _Extension()
