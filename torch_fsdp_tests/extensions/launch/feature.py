"""What the dispatcher of a launch does besides: it rejects options, and reports on each host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch_fsdp_tests.dispatch import stages
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.dispatch.stages import Stage
from torch_fsdp_tests.extension import Conclusion, Feature
from torch_fsdp_tests.extensions.launch import hosts
from torch_fsdp_tests.extensions.launch.hosts import Hosts
from torch_fsdp_tests.extensions.launch.launcher import Launch
from torch_fsdp_tests.extensions.launch.workers import Workers
from torch_fsdp_tests.processes import system


class Launched(Feature):
    """A launch, and what its hosts have done so far."""

    def __init__(self, launch: Launch, workers: Workers | None) -> None:
        """``workers`` are known unless only the options are looked at."""
        self._launch, self._workers = launch, workers
        self.hosts = Hosts()  # none until all processes have connected

    def problem(self, run: RunTests) -> str | None:
        if not system.can_fork():
            return "a launcher can only be used on Linux, where a process that has imported torch may fork"
        execution = run.execution
        if (execution.jobs or 1) > 1:
            words = "under a launcher files run one after the other, over all ranks; leave the option out"
            return f"-j {execution.jobs}: {words}"
        if execution.devices is not None:
            return "--devices: under a launcher every rank takes the device of its LOCAL_RANK; leave the option out"
        for feature in run.features.values():
            if (reason := feature.needs_own_ranks(self._launch.one_host)) is not None:
                return f"{reason}; run it without a launcher"
        if (execution.ranks or 1) > self._launch.world_size:
            words = f"--ranks {execution.ranks}: the launcher made only {self._launch.world_size}"
            return f"{words}; let it make more, or ask for fewer"
        return None

    def begin(self) -> Sequence[str]:
        if self._workers is not None:
            self.hosts = self._workers.hosts()
        return ()

    def stage(self, stage: Stage) -> Stage:
        if isinstance(stage, stages.FileEnded):
            for test in stage.file.tests():
                self.hosts.take(test)
        return stage

    def _note_loss(self) -> None:
        if self._workers is not None:
            self.hosts.lose(self._workers.lost_host)

    def status(self, status: ExitStatus) -> ExitStatus:
        return ExitStatus.HOST if status is ExitStatus.FAILED and self.hosts.has_suspect() else status

    def conclude(self, results: Results, rerun: Any, jobs: Any) -> Conclusion:
        self._note_loss()
        return Conclusion(hosts.lines(self.hosts.to_json()))

    def add_to_report(self, data: dict[str, Any], results: Results) -> None:
        self._note_loss()
        data["hosts"] = self.hosts.to_json()
        data["lost"] = None if self._workers is None else self._workers.lost
