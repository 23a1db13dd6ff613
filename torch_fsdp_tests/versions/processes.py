"""The processes that this command starts, one at a time: heard, logged, and ended with it however it ends."""

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

from torch_fsdp_tests.dispatch.listing import seconds
from torch_fsdp_tests.dispatch.reaper import Reaper

TICK = 0.2  # seconds between two looks at the process and at signals, while it says nothing
PULSE = 60.0  # seconds of silence after which a sign of life is given
REMEMBERED = 200  # last lines of output that the caller gets
SCRATCH = ".scratch-"  # and the process id of the command whose folder it is
Say = Callable[[str], None]


class Stopped(BaseException):
    """Somebody asked this command to stop, by the signal of that number."""

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
    """How a process ended, and the end of what it said."""

    status: int
    output: str

    def last_words(self) -> str:
        """The last lines that say what went wrong, or the last line at all."""
        lines = [line.strip() for line in self.output.splitlines() if line.strip()]
        errors = dict.fromkeys(line for line in lines if line.lower().startswith("error"))
        nothing = f"it said nothing and left with status {self.status}"
        return "; ".join([*errors][-3:] or lines[-1:] or [nothing])


class Processes:
    """Starts processes. While it is open, signals are noted and end the running process first.

    A :class:`~torch_fsdp_tests.dispatch.reaper.Reaper` ends what a killed command would leave, and removes the
    folder ``scratch``, in which pip unpacks.
    """

    def __init__(self, parent: Path) -> None:
        for path in parent.glob(f"{SCRATCH}*-*"):  # no reaper outlives its machine
            if not _is_alive(int(path.name.removeprefix(SCRATCH).partition("-")[0])):
                shutil.rmtree(path, ignore_errors=True)
        self.scratch = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{os.getpid()}-", dir=parent))
        self._signals: list[int] = []

    def __enter__(self) -> Processes:
        self._reaper = Reaper(self.scratch)
        self._before: dict[int, Any] = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
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
        """Raise :class:`Stopped` when somebody has asked for it."""
        if self._signals:
            raise Stopped(self._signals[0])

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, say: Say, patience: float = 2.0
    ) -> Finished:
        """Run to the end; each line of output goes to ``say`` and to the end of the log.

        On a signal the process is asked to stop, and killed with its whole group ``patience`` seconds later, or at a
        second signal. Then :class:`Stopped` is raised.
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
        """Take in what the process says until it is gone; a descendant that keeps the pipe open is not waited for."""
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
