"""Tries defects: each one in a group of ranks like that of a test, with a time limit, and several at a time."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import selectors
import time
import unittest
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from torch_fsdp_tests.defects import registry
from torch_fsdp_tests.defects.command import launch
from torch_fsdp_tests.defects.registry import Answer, Consequence, Defect, Devices
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.device.accelerator import Accelerator
from torch_fsdp_tests.installed_torch import torch_facts
from torch_fsdp_tests.processes import forkserver
from torch_fsdp_tests.ranks import Assignment, HarnessError, RankGroup, capture, judge
from torch_fsdp_tests.verdict import State, by_cause

LIMIT = 60.0  # seconds for one defect; a rank without an answer in this time hangs
STAY = 5.0  # seconds that a rank waits for the others after its answer; some of them hang until it leaves
TICK = 1.0  # seconds between two checks of time limits
assert launch.LIMIT < LIMIT


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of trying one defect. ``found`` and ``right`` are those of the first rank where they differ."""

    defect: Defect
    answer: Answer
    expected: Answer
    why: str = ""  # why it cannot be tried, or could not be decided
    rank: int | None = None  # the first rank with a wrong result, if not all ranks have the same
    found: Any = None
    right: Any = None
    seconds: float = 0.0

    @property
    def is_as_expected(self) -> bool:
        if self.expected is Answer.UNDECIDED:
            return self.answer is not Answer.UNDECIDED
        return self.answer in (self.expected, Answer.CANNOT_BE_TRIED)


class Reproduction:
    """What the ranks of a group run. The test of their assignment is the id of a defect."""

    @classmethod
    def program(cls, defect: Defect) -> Callable[..., tuple[Any, Any]]:
        """What each rank runs."""
        return defect.reproduce

    @classmethod
    def _serve_rank(cls, assignment: Assignment) -> None:
        accelerator.expect(assignment.world_size)
        device, defect = accelerator.current(), registry.defect(str(assignment.test))
        answer: list[Any] = []

        def reproduce() -> None:
            meeting, count = f"file://{assignment.file_name}", assignment.world_size
            try:
                found, right = launch.run_rank(
                    assignment.index, count, meeting, cls.program(defect), device.type, device.backend
                )
            except NotImplementedError as error:
                raise unittest.SkipTest(str(error)) from error
            answer.extend((plain(found), plain(right), launch.same(found, right)))

        outcome = capture(assignment.index, reproduce, time.monotonic)
        assignment.report(dataclasses.replace(outcome, text=json.dumps(answer)) if answer else outcome)
        assignment.meet(STAY)  # a rank that leaves at once would break the connections that a slower one is making


def try_all(ids: Sequence[str], at_a_time: int, reproduction: type[Reproduction] = Reproduction) -> Iterator[Finding]:
    """Try these defects on the device under test, those that hang first, and yield each finding as it comes.

    Raises :class:`accelerator.ConfigurationError` if the requested device is not available.
    """
    device = accelerator.current()
    # With the defects, this is all that forked ranks need. Nothing is computed.
    forkserver.preload(torch_facts.PRELOADED, torch_facts.IMPORTED_LATE)
    waiting = sorted(map(registry.defect, ids), key=lambda defect: defect.consequence is not Consequence.HANG)
    running: dict[RankGroup, Defect] = {}
    selector = selectors.DefaultSelector()
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                defect = waiting.pop(0)
                if why := _obstacle(defect, device):
                    yield Finding(defect, Answer.CANNOT_BE_TRIED, defect.expected_here(), why)
                else:
                    group = RankGroup(reproduction, defect.id, defect.world_size)
                    running[group] = defect
                    selector.register(group, selectors.EVENT_READ)
            if running:
                selector.select(TICK)
            for group, defect in list(running.items()):
                if (finding := _finding(defect, group)) is not None:
                    del running[group]
                    selector.unregister(group)
                    group.close()
                    yield finding
    finally:
        for group in running:
            group.close()
        selector.close()


def _obstacle(defect: Defect, device: Accelerator) -> str:
    """The reason why the defect cannot be tried here, or an empty string."""
    if defect.expected_here() is Answer.CANNOT_BE_TRIED:
        return f"torch {torch.__version__} does not have the broken feature, which {defect.since} has"
    if defect.devices is Devices.CPU and not device.is_cpu:
        return f"it shows only on the CPU, and {device.name} is under test"
    if defect.devices is Devices.OTHER_THAN_CPU and device.is_cpu:
        return "it needs a device other than the CPU"
    if defect.needs and device.lacks(defect.needs):
        return device.lacks(defect.needs) or ""
    if defect.package and importlib.util.find_spec(defect.package) is None:
        return f"it needs the package {defect.package}"
    return device.lacks_room_for(defect.world_size) or ""


def _finding(defect: Defect, group: RankGroup) -> Finding | None:
    """The finding of a group that has ended or has reached its limit. None if it runs."""
    expected = defect.expected_here()
    try:
        if group.left(LIMIT) > 0:
            return None
        reports = group.wait(LIMIT)
    except HarnessError as error:
        return Finding(defect, Answer.UNDECIDED, expected, why=str(error))
    finding = Finding(defect, Answer.ABSENT, expected, seconds=max(report.at for report in reports))
    verdict = judge(reports, LIMIT, {})
    if skipped := [report.message for report in reports if report.state is State.SKIPPED]:
        return dataclasses.replace(finding, answer=Answer.CANNOT_BE_TRIED, why=skipped[0])
    if verdict.outcome is State.TIMED_OUT and defect.consequence is Consequence.HANG:
        silent = by_cause(verdict.ranks)[0].rank
        found = f"rank {silent} gave no answer within {LIMIT:g} s"
        return dataclasses.replace(finding, answer=Answer.PRESENT, found=found, right="an answer")
    if verdict.outcome is not State.PASSED:
        return dataclasses.replace(finding, answer=Answer.UNDECIDED, why=verdict.reason)
    answers = [json.loads(report.text) for report in reports]
    wrong = [rank for rank, (found, right, equal) in enumerate(answers) if not equal]
    first = wrong[0] if wrong else 0
    alike = all(answer == answers[0] for answer in answers)
    found, right, _ = answers[first]
    answer = Answer.PRESENT if wrong else Answer.ABSENT
    return dataclasses.replace(finding, answer=answer, rank=None if alike else first, found=found, right=right)


def plain(value: Any) -> Any:
    """A result as a value that JSON can represent."""
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, torch.Size)):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else str(value)
    return value if isinstance(value, (int, str, bool, type(None))) else str(value)
