"""Tests that launch ranks several times, such as a training that is killed or continues with more or fewer ranks."""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch_fsdp_tests.common_distributed import get_timeout
from torch_fsdp_tests.common_distributed.requirements import skip_unless
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase
from torch_fsdp_tests.ranks import in_rank, start_ranks
from torch_fsdp_tests.verdict import RankResult, events

__unittest = True

_SETTINGS = "TORCH_FSDP_TESTS_LAUNCH_SETTINGS"  # an environment variable that only the ranks of a launch see


class LaunchesTestCase(DTensorTestBase):
    """A test case whose tests run in the parent, and launch ranks that run other methods of the class.

    Each launch has new processes, and the test says how many. In the ranks, ``settings`` has the arguments of the
    launch, and ``temp_dir`` is a directory that all launches of a test share.
    """

    temp_dir: str

    @property
    def world_size(self) -> int:
        """The number of ranks of this launch. In the parent it is the default for a launch."""
        return self._assignment.world_size if in_rank() else super().world_size

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """In a rank, the keyword arguments of :meth:`launch`."""
        return json.loads(os.environ[_SETTINGS])

    def setUp(self) -> None:
        super().setUp()
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.temp_dir = directory.name

    def run_test(self, test_name: str, parent_pipe: Any) -> None:
        self.temp_dir = self.settings["temp_dir"]
        super().run_test(test_name, parent_pipe)

    def _spawn_processes(self) -> None:
        """Only check what the test needs, because it launches its ranks itself."""
        self._ask_requirements(int(self.world_size))

    def _join_ranks(self, fn: Callable) -> None:
        fn()

    def launch(self, work: Callable[[], None], size: int, **settings: Any) -> list[RankResult]:
        """Run the method ``work`` in this many new ranks, and return their results."""
        events.need(size)
        skip_unless([lambda: accelerator.current().lacks_room_for(size)])
        carried = json.dumps({"temp_dir": self.temp_dir, **settings})
        with mock.patch.dict(os.environ, {_SETTINGS: carried}):
            group = start_ranks(type(self), work.__name__, size)
        try:
            return group.wait(get_timeout(self.id()))
        finally:
            self._close(group)

    def complete(self, work: Callable[[], None], size: int, **settings: Any) -> None:
        """Like :meth:`launch`, but fails as a test in these ranks would."""
        self._conclude(self.launch(work, size, **settings), get_timeout(self.id()))
