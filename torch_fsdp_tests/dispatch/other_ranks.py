"""The processes besides this one in which files run for some of their ranks. Here is the usual case: there are none.

An extension may know some (:meth:`torch_fsdp_tests.extension.Extension.other_ranks`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.runtests import RunTests

if TYPE_CHECKING:  # a plan starts no process
    from torch_fsdp_tests.processes.children import Children


class OtherRanks:
    """No other ranks, so most methods have nothing to do."""

    world_size: int | None = None  # how many ranks there are with rank 0; None for as many as a test wants
    lost: str | None = None  # a sentence about the first process that is gone, without which the run cannot continue
    lost_process = ""  # the name of this process
    signals: Sequence[int] = ()  # received by other ranks

    # --- before the first file ---

    def gather(self, run: RunTests, device: str) -> None:
        """Wait until all processes have connected. Raises ``ConfigurationError`` if they cannot run the suite together.

        ``device`` is the type of the devices under test.
        """

    def watch(self, children: Children) -> None:
        """Handle messages of other ranks from now on, while the ``children`` are waited for."""

    # --- while files run ---

    def begin(self, run: RunTests, name: str, variables: Mapping[str, str]) -> dict[str, str]:
        """Begin another file, with these variables at all ranks. Returns more of them for its process at rank 0."""
        return {}

    def call(self, ranks: Collection[int]) -> None:
        """Make sure that the file also runs at these ranks."""

    def end(self) -> None:
        """End the file at all other ranks, because its process at rank 0 has ended."""

    @property
    def busy(self) -> Collection[int]:
        """The ranks at which the file is not over."""
        return ()

    def due(self) -> float:
        """The time at which :meth:`check_time` has something to do."""
        return math.inf

    def check_time(self) -> str | None:
        """Describe what ends the file, if it happened at another rank."""
        return None

    def report(self) -> tuple[list[str], str]:
        """Return notes on what went wrong in a file at other ranks, and the output from there."""
        return [], ""

    # --- at the end ---

    def dismiss(self, status: ExitStatus) -> None:
        """Let all other processes exit with this status, after this one."""
