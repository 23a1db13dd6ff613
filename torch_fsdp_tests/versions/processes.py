"""The processes that this command starts, one at a time. Their output is logged, and they end with the command."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from torch_fsdp_tests import host
from torch_fsdp_tests.dispatch.listing import seconds
from torch_fsdp_tests.dispatch.reaper import Reaper

TICK = 0.2  # seconds between two checks of the process and of signals while it prints nothing
PULSE = 60.0  # seconds of silence after which a progress line is printed
REMEMBERED = 200  # the number of last lines of output that the caller gets
SCRATCH = ".scratch-"  # followed by the process id of the command that owns the folder
Say = Callable[[str], None]


class Stopped(BaseException):
    """The command got a signal that stops it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


@dataclasses.dataclass(frozen=True)
class Finished:
    """How a process ended, and the end of its output."""

    status: int
    output: str

    def last_words(self) -> str:
        """The last lines that describe an error, or the last line."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = dict.fromkeys(line for line in lines if line.lower().startswith("error"))
        nothing = f"it printed nothing and exited with status {self.status}"
        return "; ".join([*errors][-3:] or lines[-1:] or [nothing])


class Processes:
    """Starts processes. While this is open, signals are recorded, and end the running process first.

    A :class:`~torch_fsdp_tests.dispatch.reaper.Reaper` ends what a killed command would leave, and removes the
    folder ``scratch``, in which pip unpacks.
    """

    def __init__(self, parent: Path) -> None:
        for path in parent.glob(f"{SCRATCH}*-*"):  # a reaper does not survive the machine
            if not _is_alive(int(path.name.removeprefix(SCRATCH).partition("-")[0])):
                shutil.rmtree(path, ignore_errors=True)
        self.scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-", dir=parent))
        self._signals: list[int] = []

    def __enter__(self) -> Processes:
        self._reaper = Reaper(self.scratch)
        self._before: dict[int, Any] = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, *host.ending_signals())
        }
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._reaper.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def check(self) -> None:
        """Raise :class:`Stopped` after a signal."""
        if self._signals:
            raise Stopped(self._signals[0])

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, say: Say, patience: float = 2.0
    ) -> Finished:
        """Run a process to its end. Each line of output goes to ``say`` and to the end of the log.

        After a signal the process is asked to stop. It is killed with its whole group after ``patience`` seconds, or
        after a second signal. Then :class:`Stopped` is raised.
        """
        self.check()
        process = subprocess.Popen(
            command,
            env={**environment, "TMPDIR": str(self.scratch), "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reaper.tell(process.pid, there=True)
        try:
            lines = self._hear(process, log, say, patience)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            self._reaper.tell(process.pid, there=False)
        self.check()
        return Finished(process.returncode, "\n".join(lines))

    def _hear(self, process: subprocess.Popen[bytes], log: Path, say: Say, patience: float) -> list[str]:
        """Read the output until the process is gone. A descendant that keeps the pipe open is not waited for."""
        assert process.stdout is not None
        pipe, decoder = process.stdout.fileno(), codecs.getincrementaldecoder("utf-8")("backslashreplace")
        lines: list[str] = []
        rest, asked, began = "", None, time.monotonic()
        heard, open_ended = began, True
        with process.stdout, log.open("a", encoding="utf-8") as file:
            file.write(f"$ {' '.join(map(str, process.args))}\n")  # type: ignore[arg-type]
            while True:
                gone = process.poll() is not None
                if open_ended and select.select([pipe], [], [], 0 if gone else TICK)[0]:
                    data = os.read(pipe, 1 << 16)
                    open_ended = bool(data)
                    *whole, rest = (rest + decoder.decode(data, final=not data)).split("\n")
                    for line in [*whole, *([rest] if rest and not data else [])]:
                        print(line, file=file, flush=True)
                        lines = [*lines[-REMEMBERED:], line]
                        say(line)
                        heard = time.monotonic()
                elif gone:
                    return lines
                elif not open_ended:
                    time.sleep(TICK)
                now = time.monotonic()
                if now - heard > PULSE:
                    heard = now
                    say(f"... {seconds(now - began)} so far")
                if self._signals and asked is None:
                    asked = now
                    process.send_signal(self._signals[0])
                if asked is not None and (now - asked > patience or len(self._signals) > 1):
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.killpg(process.pid, signal.SIGKILL)
