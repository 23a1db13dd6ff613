"""Records of programs: the numbers that one device or torch computes, to be compared with those of another."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.explore.execution import LIMITS, RECORD
from torch_fsdp_tests.explore.program import Program, ProgramError
from torch_fsdp_tests.explore.ranks import Crew, Result


class Recorder:
    """Writes a record: a line for each program, with the numbers of each rank after each step."""

    def __init__(self, path: Path) -> None:
        path.write_text("")
        self._path = path

    def take(self, result: Result) -> None:
        line = {"program": json.loads(result.program.as_json()), "values": result.values}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def differences(path: Path) -> Iterator[str]:
    """Run each program of a record, and yield in words where its numbers differ most. Empty if they agree.

    Raises :class:`ProgramError` for a file that is no record.
    """
    crews: dict[int, Crew] = {}
    try:
        lines = path.read_text().splitlines()
        if not lines:
            raise ProgramError(f"{path} has no programs")
        for line in lines:
            try:
                data = json.loads(line)
                program = Program.from_json(json.dumps(data["program"]))
                values = data["values"]
            except (ValueError, TypeError, KeyError) as error:
                raise ProgramError(f"{path} is not a record: {error}") from error
            crew = crews.setdefault(program.world_size, Crew(program.world_size, RECORD))
            yield _difference(program, values, crew.run(program))
    finally:
        for crew in crews.values():
            crew.close()


def _difference(program: Program, recorded: list[list[dict[str, list[float]]]], result: Result) -> str:
    if result.is_finding or result.invalid:
        return f"rank {result.rank}, {result.when}: {result.what or result.invalid}"
    names = (program.dtype, program.param_dtype, program.reduce_dtype, program.output_dtype, *program.own_dtypes)
    tolerances = {str(dtype).removeprefix("torch."): limit for dtype, limit in LIMITS.items()}
    tolerances |= accelerator.current().tolerances
    limit = max(tolerances[name] for name in names if name)
    worst = max(_errors(recorded, result.values), default=(0.0, 0, 0, ""))
    if worst[0] <= limit:
        return ""
    return f"step {worst[2]}, rank {worst[1]}: {worst[3]} differs by {worst[0]:.2g} of its size (limit {limit:.2g})"


def _errors(recorded: Any, found: Any) -> Iterator[tuple[float, int, int, str]]:
    """The relative error of each value, with its rank, step and name."""
    for rank, (steps, others) in enumerate(zip(recorded, found, strict=True)):
        for step, (before, now) in enumerate(zip(steps, others, strict=True)):
            for name in before.keys() | now.keys():
                yield _error(before.get(name), now.get(name)), rank, step, name


def _error(before: list[float] | None, now: list[float] | None) -> float:
    if before is None or now is None or len(before) != len(now):
        return math.inf
    size = max((abs(value) for value in before), default=0.0) or 1.0
    apart = max((abs(one - other) for one, other in zip(before, now)), default=0.0)
    return math.inf if math.isnan(apart) else apart / size
