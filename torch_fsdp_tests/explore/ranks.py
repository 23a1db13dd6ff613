"""Ranks that stay and run one program after the other."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import select
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.explore import execution
from torch_fsdp_tests.explore.program import Program
from torch_fsdp_tests.installed_torch import torch_facts
from torch_fsdp_tests.processes import forkserver
from torch_fsdp_tests.ranks import Assignment, HarnessError, RankGroup, capture
from torch_fsdp_tests.ranks.outcome import Outcome as RankOutcome
from torch_fsdp_tests.ranks.outcome import RankReport
from torch_fsdp_tests.verdict import State

LIMIT = 20.0  # seconds for one program; a quiet machine needs less than one
COLLECTIVE_LIMIT = 12.0  # seconds for one collective
COVER_EVERY = 4  # programs, because a program takes twice as long while the lines that it runs are noted
COLLECT_EVERY = 20  # programs, because FSDP's modules are parts of cycles
assert COLLECTIVE_LIMIT < LIMIT


@dataclasses.dataclass(frozen=True)
class Result:
    """The result of a program on all ranks."""

    program: Program
    what: str = ""  # empty if everything is as expected
    step: int | None = None  # -1 while the model is sharded; None if it is unknown, as after a death
    detail: str = ""
    place: str = ""
    rank: int = 0
    invalid: str = ""
    lines: tuple[str, ...] = ()  # of FSDP that ran for the first time in these ranks
    values: tuple[tuple[execution.Values, ...], ...] = ()  # of each rank, if they were asked for

    @property
    def is_finding(self) -> bool:
        return bool(self.what)

    @property
    def when(self) -> str:
        if self.step is None:
            return "in an unknown step"
        return f"in step {self.step}" if self.step >= 0 else "before the first step"


class Explorer:
    """What each rank does: the tests of the group are programs."""

    @classmethod
    def _serve_rank(cls, assignment: Assignment) -> None:
        accelerator.expect(assignment.world_size)
        device = accelerator.current()
        warnings.filterwarnings("ignore")
        tempfile.tempdir = os.path.dirname(assignment.file_name)  # it is removed with the ranks
        dist.init_process_group(
            device.backend_with_host,
            init_method=f"file://{assignment.file_name}",
            rank=assignment.index,
            world_size=assignment.world_size,
            timeout=timedelta(seconds=COLLECTIVE_LIMIT),
        )
        for count, text in enumerate(assignment.orders()):
            if count % COLLECT_EVERY == 0:
                gc.collect()
            mode, _, program = text.partition(" ")
            covers = assignment.index == 0 and count % COVER_EVERY == 0
            run = functools.partial(
                execution.run, Program.from_json(program), assignment.index, device.type, mode, covers
            )
            assignment.report(cls.outcome(assignment.index, run))

    @staticmethod
    def outcome(rank: int, run: Callable[[], execution.Outcome]) -> RankOutcome:
        """Run a program, and return its outcome as the text of a test's outcome."""
        outcomes: list[execution.Outcome] = []
        report = capture(rank, lambda: outcomes.append(run()), time.monotonic)
        return dataclasses.replace(report, text=json.dumps(dataclasses.asdict(outcomes[0]))) if outcomes else report


class Crew:
    """A group of ranks that is replaced after a finding, a death or a hang."""

    def __init__(self, world_size: int, mode: str = execution.COMPARE, explorer: type = Explorer) -> None:
        self.world_size = world_size
        self._mode = mode
        self._explorer = explorer
        self.program: Program | None = None  # that runs
        self._group: RankGroup | None = None

    def run(self, program: Program) -> Result:
        """Run a program to its end."""
        self.begin(program)
        while (result := self.result()) is None:
            select.select([self], [], [], 1.0)
        return result

    def begin(self, program: Program) -> None:
        """Start a program. :meth:`result` returns its result.

        Raises :class:`HarnessError` if new ranks cannot be started.
        """
        self.program = program
        order = f"{self._mode} {program.as_json()}"
        if self._group is not None and self._group.ready():
            with contextlib.suppress(HarnessError):
                return self._group.begin(order)
        self.close()
        self._group = RankGroup(self._explorer, None, self.world_size)
        self._group.begin(order)

    def fileno(self) -> int:
        """A descriptor that can be read when there is news."""
        assert self._group is not None
        return self._group.fileno()

    def result(self) -> Result | None:
        """The result of the program that was started, or None while it runs."""
        assert self._group is not None and self.program is not None
        try:
            if self._group.left(LIMIT) > 0:
                return None
            result = _judged(self.program, self._group.wait(LIMIT))
        except HarnessError as error:
            result = Result(self.program, "the ranks cannot be used", detail=str(error))
        if result.is_finding:
            self.close()
        return result

    def close(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            with contextlib.suppress(HarnessError):  # the group is over in any case
                group.close()


def _judged(program: Program, reports: list[RankReport]) -> Result:
    outcomes: list[tuple[int, execution.Outcome]] = []
    silent: list[RankReport] = []
    dead: list[RankReport] = []
    for report in reports:
        if report.outcome is None:
            (silent if report.ending.ours else dead).append(report)
        elif report.outcome.state is not State.PASSED:
            return Result(program, "explorer", detail=report.outcome.text, rank=report.rank)
        else:
            outcomes.append((report.rank, execution.Outcome(**json.loads(report.outcome.text))))
    for rank, outcome in outcomes:
        if outcome.invalid:
            return Result(program, invalid=outcome.invalid, rank=rank)
    if dead:
        words = dead[0].ending.in_words()
        return Result(program, f"died: {words}", detail=dead[0].stacks, rank=dead[0].rank)
    bad = [(rank, outcome) for rank, outcome in outcomes if outcome.is_finding]
    if bad:
        rank, first = min(bad, key=lambda pair: (pair[1].step, pair[0]))
        return Result(program, first.what, first.step, first.detail, first.place, rank)
    if silent:
        return Result(program, "hangs", detail=silent[0].stacks, rank=silent[0].rank)
    if len({outcome.digest for _, outcome in outcomes}) > 1:
        return Result(program, "ranks ran different collectives")
    values = tuple(tuple(outcome.values) for _, outcome in outcomes)
    return Result(program, lines=tuple(outcomes[0][1].lines), values=values)


def prepare() -> None:
    """Import what forked ranks need, so that they import nothing."""
    forkserver.preload(torch_facts.PRELOADED, torch_facts.IMPORTED_LATE)
