"""The stages of a run: what the runner tells its consumers, in this order. The console is one, each feature another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_fsdp_tests.dispatch.file_process import TestProcess
    from torch_fsdp_tests.dispatch.file_result import FileResult
    from torch_fsdp_tests.dispatch.run_results import Results


@dataclasses.dataclass(frozen=True)
class Began:
    """All jobs begin: once, or once more."""


@dataclasses.dataclass(frozen=True)
class Learned:
    """A file has reported these facts about what it tests on."""

    facts: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class FileIsSlow:
    """A running file takes longer than expected. Seconds count from the start of the run."""

    process: TestProcess
    now: float


@dataclasses.dataclass(frozen=True)
class Progress:
    """Some time has passed, with these files running. ``left`` are the seconds until the end, if they are known."""

    running: Sequence[TestProcess]
    now: float
    left: float | None
    about: str = ""  # a few words before all others


@dataclasses.dataclass(frozen=True)
class FileEnded:
    """A file has ended. ``results`` has it already."""

    file: FileResult
    results: Results
    is_new: bool = True  # whether a failure of it was not shown before
    is_shown: bool = True  # whether the console has a line about it


@dataclasses.dataclass(frozen=True)
class Said:
    """A line to print."""

    words: str


@dataclasses.dataclass(frozen=True)
class RunEnded:
    """Everything has ended, and was written. These lines are printed with the results."""

    results: Results
    lines: Sequence[str]


Stage = Began | Learned | FileIsSlow | Progress | FileEnded | Said | RunEnded
Tell = Callable[[Stage], None]
