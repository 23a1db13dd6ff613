"""What the process of a test file, and its ranks, see of a launch. It imports the rest when that begins."""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

from torch_fsdp_tests.extension import Place
from torch_fsdp_tests.extensions.launch import LAUNCHED_VARIABLE
from torch_fsdp_tests.extensions.launch.launcher import Launch, forget_variables
from torch_fsdp_tests.settings import RANKS_VARIABLE

if TYPE_CHECKING:
    from torch_fsdp_tests.extensions.launch.launched import Followers, LaunchedRanks


class LaunchedPlace(Place):
    """The ranks are those of a launcher. The process of rank 0 runs tests, and the others follow it."""

    maker = "the launcher"
    remedy = f"run this file without the launcher, or set {LAUNCHED_VARIABLE}=0"

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._workers: Followers | None = None
        self.world_size = launch.world_size
        self.one_host = launch.one_host
        self.follows = launch.rank > 0

    def prepare(self) -> None:
        """Remove the launcher's variables. A test that sets no world size gets the launcher's ranks."""
        os.environ.setdefault(RANKS_VARIABLE, str(self._launch.world_size))
        forget_variables()

    def begin(self) -> None:
        """Let the other processes connect, or, if this is not rank 0, follow rank 0 and exit."""
        from torch_fsdp_tests.extensions.launch import launched

        if self.follows:
            launched.follow_rank_0(self._launch)
        self._workers = launched.Followers(self._launch)
        atexit.register(self._workers.leave)

    def transport(self) -> LaunchedRanks | None:
        if self._workers is None:
            return None
        from torch_fsdp_tests.extensions.launch.launched import LaunchedRanks

        return LaunchedRanks(self._workers)

    def conclude(self, status: int) -> int:
        return status if self._workers is None else self._workers.conclude(status)
