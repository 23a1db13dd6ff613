"""Tries defects: each one in rank processes of its own with a time limit, and several at a time."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import multiprocessing
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch

from torch_fsdp_tests.defects import launch, registry
from torch_fsdp_tests.defects.registry import Answer, Consequence, Defect, Place
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.device.accelerator import Accelerator
from torch_fsdp_tests.installed_torch import torch_facts
from torch_fsdp_tests.processes import forkserver, host

LIMIT = 60.0  # seconds for one defect; a rank without an answer in this time hangs
GRACE = 3.0  # seconds for the other ranks to answer after one has raised
assert GRACE < launch.LIMIT < LIMIT


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of trying one defect. ``found`` and ``right`` are those of the first rank where they differ."""

    defect: Defect
    answer: Answer
    expected: Answer
    why: str = ""  # why it cannot be tried, or could not be decided
    rank: int | None = None  # that differs, where the ranks differ from each other
    found: Any = None
    right: Any = None
    seconds: float = 0.0

    @property
    def is_as_expected(self) -> bool:
        return self.answer in (self.expected, Answer.CANNOT_BE_TRIED)


def try_all(ids: Sequence[str], at_a_time: int) -> Iterator[Finding]:
    """Try these defects on the device under test, and yield each finding as it comes.

    Raises :class:`accelerator.ConfigurationError` if the requested device is not available.
    """
    device = accelerator.current()
    _import_what_ranks_need(ids)
    waiting, running = list(ids), list[_Trial]()
    folder = tempfile.TemporaryDirectory(prefix="torch_fsdp_tests-defects-", ignore_cleanup_errors=True)
    try:
        while waiting or running:
            while waiting and len(running) < at_a_time:
                defect = registry.entry(waiting.pop(0)).defect
                if why := _obstacle(defect, device):
                    yield Finding(defect, Answer.CANNOT_BE_TRIED, defect.expected(torch.__version__), why)
                else:
                    running.append(_Trial(defect, device, Path(folder.name, defect.id)))
                    running[-1].start()
            for trial in _done(running):
                running.remove(trial)
                yield trial.finish()
    finally:
        for trial in running:
            trial.end()
        folder.cleanup()


def _import_what_ranks_need(ids: Sequence[str]) -> None:
    """Import what forked ranks need, so that they import nothing. No tensor is computed here or at import."""
    forkserver.preload(torch_facts.PRELOADED)
    for id in ids:
        registry.entry(id)


def _obstacle(defect: Defect, device: Accelerator) -> str:
    """The reason why the defect cannot be tried here, or an empty string."""
    if defect.expected(torch.__version__) is Answer.CANNOT_BE_TRIED:
        return f"torch {torch.__version__} does not have the broken feature, which {defect.since} has"
    if defect.place is Place.HOST and not device.is_host:
        return f"it shows only on the host, and {device.name} is under test"
    if defect.place is Place.APART_FROM_HOST and device.is_host:
        return "it needs a device apart from the host"
    if defect.needs and device.lacks(defect.needs):
        return device.lacks(defect.needs) or ""
    if defect.package and importlib.util.find_spec(defect.package) is None:
        return f"it needs the package {defect.package}"
    return device.lacks_room_for(defect.world_size) or ""


class _Trial:
    """The ranks of one defect, while they run."""

    def __init__(self, defect: Defect, device: Accelerator, folder: Path) -> None:
        self.defect, self._device, self._folder = defect, device, folder
        self._began = time.monotonic()
        self._give_up = self._began + LIMIT
        self._said: dict[int, tuple[str, Any]] = {}  # by rank
        self._pipes: list[Any] = []
        self._processes: list[Any] = []

    def start(self) -> None:
        """Start the ranks. In any case :meth:`end` must be called afterwards."""
        defect, device = self.defect, self._device
        self._folder.mkdir()
        method = "fork" if host.can_fork() and device.has("fork") else "spawn"
        context: Any = multiprocessing.get_context(method)
        for rank in range(defect.world_size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, defect.id, rank, str(self._folder), device.type, device.backend, os.getpid())
            process = context.Process(target=_be_rank, args=arguments, daemon=True)
            self._pipes.append(ours)
            process.start()
            self._processes.append(process)
            theirs.close()

    @property
    def sources(self) -> list[Any]:
        """What to wait for: the pipes of ranks that have not answered."""
        return [pipe for rank, pipe in enumerate(self._pipes) if rank not in self._said]

    @property
    def left(self) -> float:
        """Seconds until this trial is given up."""
        return max(0.0, self._give_up - time.monotonic())

    def listen(self) -> bool:
        """Read the ranks' answers. Returns True if all ranks have answered, or time is up."""
        for rank, pipe in enumerate(self._pipes):
            if rank not in self._said and pipe.poll():
                try:
                    self._said[rank] = pipe.recv()
                except EOFError:
                    self._processes[rank].join(GRACE)
                    self._said[rank] = "died", self._processes[rank].exitcode
                if self._said[rank][0] != "answer":
                    self._give_up = min(self._give_up, time.monotonic() + GRACE)
        return not self.sources or self.left == 0

    def finish(self) -> Finding:
        self.end()
        expected = self.defect.expected(torch.__version__)
        seconds = time.monotonic() - self._began
        finding = Finding(self.defect, Answer.ABSENT, expected, seconds=seconds)
        silent = [rank for rank in range(self.defect.world_size) if rank not in self._said]
        for rank, (kind, what) in sorted(self._said.items()):
            if kind == "unsupported":
                return dataclasses.replace(finding, answer=Answer.CANNOT_BE_TRIED, why=what)
            if kind != "answer":
                why = f"rank {rank} {_death(what)}" if kind == "died" else f"rank {rank} raised {what}"
                return dataclasses.replace(finding, answer=Answer.UNDECIDED, why=why)
        if silent:
            why = f"rank {silent[0]} gave no answer within {LIMIT:g} s"
            hangs = self.defect.consequence is Consequence.HANG
            answer = Answer.PRESENT if hangs else Answer.UNDECIDED
            return dataclasses.replace(finding, answer=answer, why="" if hangs else why, found=why, right="an answer")
        answers = {rank: what for rank, (_, what) in sorted(self._said.items())}
        wrong = [rank for rank, (found, right, equal) in answers.items() if not equal]
        first = wrong[0] if wrong else 0
        alike = all(answer == answers[0] for answer in answers.values())
        found, right, _ = answers[first]
        answer = Answer.PRESENT if wrong else Answer.ABSENT
        return dataclasses.replace(finding, answer=answer, rank=None if alike else first, found=found, right=right)

    def end(self) -> None:
        """Kill what is left of the ranks, and remove their folder. May be called again."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _done(running: list[_Trial]) -> list[_Trial]:
    """Wait for news, and return the trials that are over."""
    left = min((trial.left for trial in running), default=0.0)
    connection.wait([source for trial in running for source in trial.sources], timeout=left)
    return [trial for trial in running if trial.listen()]


def _death(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was killed by {host.signal_name(-exit_code)}"
    return f"exited with status {exit_code} without an answer"


def _be_rank(pipe: Any, id: str, rank: int, folder: str, device_type: str, backend: str, parent: int) -> None:
    """The main function of a rank process, which reports what it found."""
    host.die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", host.loopback_interface())
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    entry = registry.entry(id)
    meeting = f"file://{folder}/meeting"
    try:
        found, right = launch.run_rank(rank, entry.defect.world_size, meeting, entry.reproduce, device_type, backend)
        pipe.send(("answer", (plain(found), plain(right), launch.same(found, right))))
    except NotImplementedError as error:
        pipe.send(("unsupported", str(error)))
    except BaseException as error:
        last = traceback.format_exception_only(type(error), error)[-1].strip()
        pipe.send(("error", last))
    finally:
        os._exit(0)  # a defect may leave collectives that never finish


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
