"""``--save-xml``: JUnit files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch_fsdp_tests.extension import AddOption, Extension, Feature, absolute

FOLDER = Path("test-reports", "python-unittest")


class _Extension(Extension):
    def add_options(self, group: Callable[[str], AddOption]) -> None:
        words = "write JUnit XML"
        group("output")("--save-xml", nargs="?", type=absolute, const=FOLDER.absolute(), metavar="DIR", help=words)

    def feature(self, run: Any, given: Mapping[str, Any], environment: Mapping[str, str]) -> Feature | None:
        if "save_xml" not in given:
            return None
        from torch_fsdp_tests.extensions.junit.writing import JUnit

        return JUnit(run, given["save_xml"])


EXTENSION = _Extension()
