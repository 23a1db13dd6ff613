"""Runs of the test files in ``inputs``, whose results other tests check. This is not a test file.

A run is like ``python FILE ARGUMENTS`` in a separate process. Most runs are forks of one process that has imported
torch, and only as much of this project as it needs to fork, because the import takes longer than the run. If that
process may not fork, every run is a fresh interpreter.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from torch_fsdp_tests.processes import program_server, system
from torch_fsdp_tests.processes.forkserver import preload, start_fresh
from torch_fsdp_tests.processes.program_server import Program, ProgramServer

ROOT = Path(__file__).resolve().parents[2]
INPUTS = Path(__file__).parent / "inputs"
LIMIT = 60  # seconds for a test of a run
COMMAND_LIMIT = 300  # seconds for a whole run
POLL = 0.02  # seconds
NAME = r"(\w+) \((?:__main__\.)?(\w+)(?:\.\w+)?\)"  # of a test, with its own name again since Python 3.11

_TORCH = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.testing", "torch._dynamo", "unittest")


def leftovers(folder: str) -> list[str]:
    """The files that a run has left in its temporary folder, except torch's own.

    Torch's own are the cache that importing torch._dynamo makes, and in torch 2.9 the templates of
    torch.distributed.nn. A process that is killed cannot remove these.
    """
    names = [name for name in os.listdir(folder) if not name.startswith("torchinductor")]
    return [name for name in names if not Path(folder, name, "_remote_module_non_scriptable.py").exists()]


def wait_until(condition: Callable[[], object], seconds: float) -> bool:
    """Whether the condition becomes true within these seconds."""
    give_up = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(POLL)
    return True


def failures(text: str) -> dict[str, str]:
    """What unittest prints about each failure, by the name of the test, or by the title if that names no test."""
    found = {}
    for section in text.split("=" * 70 + "\n")[1:]:
        title = section.partition("\n")[0]
        name = re.match(rf"[A-Z ]+: {NAME}", title)
        found[f"{name[2]}.{name[1]}" if name else title] = section
    return found


def clean_environment() -> dict[str, str]:
    """The environment of this process, without the variables of the suite."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TORCH_FSDP_TESTS_")}


def outputs(main: Callable[[Sequence[str]], Any], *arguments: str, stdin: str = "") -> tuple[int, str, str]:
    """The exit status, stdout and stderr of a command that runs in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        unittest.mock.patch.object(sys, "stdin", io.StringIO(stdin)),
    ):
        try:
            status = main(arguments)
        except SystemExit as leaving:
            status = system.exit_status(leaving)
    return status, out.getvalue(), err.getvalue()


def assert_rejected(
    case: unittest.TestCase,
    main: Callable[[Sequence[str]], Any],
    cases: Iterable[tuple[Sequence[str], str]],
    one_line: bool = True,
) -> None:
    """For each of these arguments, a command prints nothing but an error with these words, and exits with status 2."""
    for arguments, words in cases:
        with case.subTest(arguments):
            status, out, err = outputs(main, *arguments)
            case.assertEqual((status, out), (2, ""))
            case.assertIn(words, err)
            case.assertTrue(err.count("\n") == 1 or not one_line, err)


def run_beside(package: str | Path, *command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run an interpreter to its end, with this folder on its path, as if it were installed. No device is requested."""
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=clean_environment() | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(package)])} | variables,
        text=True,
        capture_output=True,
        timeout=2 * COMMAND_LIMIT,
    )


@functools.cache
def _server() -> ProgramServer | None:
    """The process that has imported torch, if it may fork. Its forks become children of this process."""
    if not (system.can_fork() and system.adopt_orphans()):
        return None
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder)
    server = ProgramServer([__file__], os.environ | {"PYTHONPATH": str(ROOT)}, ROOT, Path(folder))
    atexit.register(server.close)
    while not server.ready and not system.has_ended(server.pid):
        time.sleep(POLL)
    return server


_running: list[Process] = []  # processes that have not been waited for; this process kills them when it ends


@atexit.register
def _kill_what_runs() -> None:
    for each in _running:
        each.kill()


class Process:
    """One process that runs a test file. ``cwd`` is its working directory, and that of all processes that it starts."""

    def __init__(
        self,
        file: str | Path,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        cwd: str | Path,
        stdout: IO[bytes],
        stderr: IO[bytes],
    ) -> None:
        command = [str(file), *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | dict(environment)
        server = _server()
        program = Program((), command, environment, Path(cwd))
        forked = server and server.fork(program, (stdout.fileno(), stderr.fileno()))
        self.pid = forked or start_fresh(command, (), environment, cwd=cwd, stdout=stdout, stderr=stderr)
        _running.append(self)

    def wait(self) -> int:
        """Return its exit code, or the negative number of the signal that ended it.

        Raises ``TimeoutError`` after ``COMMAND_LIMIT`` seconds.
        """
        give_up = time.monotonic() + COMMAND_LIMIT
        while (ended := os.waitpid(self.pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > give_up:
                raise TimeoutError(f"process {self.pid} did not end within {COMMAND_LIMIT} s")
            time.sleep(POLL)
        _running.remove(self)
        return os.waitstatus_to_exitcode(ended[1])

    def kill(self) -> None:
        """End it, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Run:
    """One run of some tests. It starts at once; :meth:`end` waits for it and reads its output, test by test."""

    def __init__(self, file: str | Path, *arguments: str, **environment: str) -> None:
        # Not in this process' own folder: torch makes a socket there, and its path may have only 107 characters.
        self._scratch = tempfile.TemporaryDirectory(dir="/tmp")
        self._outputs = stdout, stderr = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        own = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT), "TMPDIR": self._scratch.name}
        self._process = Process(file, ["-v", *arguments], own | environment, ROOT, stdout, stderr)
        self.code: int | None = None  # until it has ended

    def end(self) -> Run:
        if self.code is not None:
            return self
        try:
            self.code = self._process.wait()
        except TimeoutError:
            self._process.kill()
            raise
        texts = []
        for output in self._outputs:
            output.seek(0)
            text = output.read().decode(errors="backslashreplace")
            texts.append(re.sub(r"^\[Gloo\] Rank .*\n", "", text, flags=re.MULTILINE))  # torch 2.9 prints connections
            output.close()
        self.left = leftovers(self._scratch.name)
        self._scratch.cleanup()
        self.stdout, self.text = texts
        assert "Exception ignored" not in self.text, self.text  # when the interpreter ends, nothing of ours may raise
        lines = re.findall(rf"^{NAME} \.\.\. (.+)$", self.text, re.MULTILINE)
        self.outcomes = {f"{cls}.{test}": outcome for test, cls, outcome in lines}
        self.words = failures(self.text)
        for test, words in self.words.items():  # Python 3.10 prints no line for fixtures of classes
            self.outcomes.setdefault(test, words.partition(":")[0])
        *parts, _ = re.split(r"^seconds (\S+) (\S+)\n", self.stdout, flags=re.MULTILINE)
        self.printed = dict(zip(parts[1::3], parts[::3]))
        self.seconds = dict(zip(parts[1::3], map(float, parts[2::3])))
        self.leaks = re.findall(r"^leak: (?:__main__\.)?(.+)$", self.text, re.MULTILINE)
        return self


if __name__ == "__main__":
    sys.argv = list(program_server.serve(sys.argv[1:], lambda: preload(_TORCH)))
    sys.path[0] = os.path.dirname(sys.argv[0])
    runpy.run_path(sys.argv[0], run_name="__main__")
