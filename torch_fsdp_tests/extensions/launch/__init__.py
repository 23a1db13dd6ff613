"""Runs under torchrun, srun or another launcher, which makes the ranks, on one machine or on several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_fsdp_tests.extension import Extension, Feature, PageTable, Place
from torch_fsdp_tests.settings import Variable

if TYPE_CHECKING:  # it is imported only in a launch
    from torch_fsdp_tests.dispatch.exit_status import ExitStatus
    from torch_fsdp_tests.extensions.launch.launcher import Launch
    from torch_fsdp_tests.extensions.launch.workers import Workers

LAUNCHED_VARIABLE = "TORCH_FSDP_TESTS_LAUNCHED"
_SIGNS = (LAUNCHED_VARIABLE, "TORCHELASTIC_RUN_ID", "SLURM_PROCID")  # without any of them there is no launch


def _find(environment: Mapping[str, str]) -> Launch | None:
    """The launch to which this process belongs, if any. Raises ``ConfigurationError``."""
    if not any(map(environment.get, _SIGNS)):
        return None
    from torch_fsdp_tests.extensions.launch import launcher

    return launcher.from_environment(environment)


def _works() -> bool:
    """Whether the processes of a launch can run test files together. If not, the feature says so."""
    from torch_fsdp_tests.processes import system

    return system.can_fork()


class _Extension(Extension):
    variables = (Variable(LAUNCHED_VARIABLE, "1 or 0: a launcher did, or did not, make the ranks"),)
    in_report = {"hosts": {}, "lost": None}

    def __init__(self) -> None:
        self._workers: Workers | None = None  # of this process, if it is the dispatcher of a launch

    def take_over(self, environment: Mapping[str, str], root: Path) -> ExitStatus | None:
        launch = _find(environment)
        if launch is None or launch.rank == 0 or not _works():
            return None
        from torch_fsdp_tests.extensions.launch import worker

        return worker.main(launch, root)

    def other_ranks(self, environment: Mapping[str, str]) -> Workers | None:
        launch = _find(environment)
        if launch is None or not _works():
            return None
        from torch_fsdp_tests.extensions.launch import workers

        self._workers = workers.reach(launch)
        return self._workers

    def feature(self, run: Any, given: Mapping[str, Any], environment: Mapping[str, str]) -> Feature | None:
        launch = _find(environment)
        if launch is None:
            return None
        from torch_fsdp_tests.extensions.launch.feature import Launched

        return Launched(launch, self._workers)

    def tables(self, data: Mapping[str, Any]) -> Sequence[PageTable]:
        if len(data.get("hosts", ())) < 2 and not data.get("lost"):
            return ()
        from torch_fsdp_tests.extensions.launch import hosts

        return [hosts.table(data)]

    def place(self, environment: Mapping[str, str]) -> Place | None:
        launch = _find(environment)
        if launch is None:
            return None
        from torch_fsdp_tests.extensions.launch.place import LaunchedPlace

        return LaunchedPlace(launch)

    def enter_rank(self, file_name: str, rank: int, world_size: int) -> None:
        from torch_fsdp_tests.extensions.launch import rendezvous

        rendezvous.join(file_name, rank, world_size)


EXTENSION = _Extension()
