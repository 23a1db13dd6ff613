"""Environment variables that torch and its libraries read once, when they are imported.

A process that was forked from one that has imported torch does not see a later change of such a variable.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

# Not those that communication libraries and our own package read in the rank, when they are used.
_READ_ONCE = re.compile(
    r"(?:PYTORCH_|TORCH(?!ELASTIC|INDUCTOR_CACHE_DIR|_FSDP_TESTS_|_FR_|_GLOO_|_[A-Z]*CCL_)"
    r"|AOT_?INDUCTOR_|INDUCTOR_|TRITON_(?!CACHE_DIR)|ATEN_|(?:ONE)?DNNL?_|OMP_|GOMP_|KMP_|MKL_)\w+"
)


def _environment_of_the_import() -> dict[str, str]:
    """The environment when torch was imported. If that was before this import, it is that of the interpreter's start,
    where the system has it: a variable that was set before torch was imported then counts as changed.
    """
    if "torch" in sys.modules:
        try:
            entries = Path("/proc/self/environ").read_bytes().split(b"\0")
        except OSError:
            return dict(os.environ)
        return dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
    return dict(os.environ)


_AT_IMPORT = _environment_of_the_import()


def changed(environment: Mapping[str, str]) -> list[str]:
    """The names of such variables that are different in this environment from what torch has read, in order."""
    names = filter(_READ_ONCE.fullmatch, _AT_IMPORT.keys() | environment.keys())
    return sorted(name for name in names if _AT_IMPORT.get(name) != environment.get(name))
