"""The other ranks of a launch, at which files also run. This module has the usual case: there are none.

Under a launcher they are :class:`~torch_fsdp_tests.dispatch.workers.Workers`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.runtests import RunTests

if TYPE_CHECKING:  # a plan starts no process
    from torch_fsdp_tests.dispatch.hosts import Hosts
    from torch_fsdp_tests.processes.children import Children


class OtherRanks:
    """No other ranks, so most methods have nothing to do."""

    world_size: int | None = None  # of the launch
    lost: str | None = None  # a sentence about the first process of the launch that is gone
    lost_process = ""  # the name of this process
    lost_host = ""  # its host
    signals: Sequence[int] = ()  # received by other ranks

    # --- before the first file ---

    def gather(self, run: RunTests, device: str) -> None:
        """Wait until all processes have connected. Raises :class:`LaunchFailure` if they cannot run the suite together.

        ``device`` is the type of the devices under test.
        """

    def hosts(self) -> Hosts:
        """Return the hosts, if a launcher made the ranks."""
        from torch_fsdp_tests.dispatch.hosts import Hosts  # imported late, because a plan has no results

        return Hosts()

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


class LaunchFailure(RuntimeError):
    """The processes of the launch cannot run the suite together. The message says why, in sentences."""
