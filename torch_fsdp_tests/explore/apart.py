"""The explorer in a process of its own, with another torch or another environment."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping

from torch_fsdp_tests.processes.forkserver import interpreter

START_LIMIT = 180.0  # seconds for the imports and a program, and for confirming what was found


def run(arguments: tuple[str, ...], environment: Mapping[str, str], limit: float = START_LIMIT) -> int | None:
    """The exit status of the explorer. None if it reaches the limit."""
    command = [*interpreter(), "-m", "torch_fsdp_tests.explore", *arguments]
    try:
        done = subprocess.run(command, env=dict(environment), timeout=limit, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        return None
    return done.returncode
