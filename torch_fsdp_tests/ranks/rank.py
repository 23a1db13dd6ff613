"""The life of a rank process, from its fork to its exit.

A rank is a child of the rank server (or, where forking is not possible, a fresh interpreter started by it). It has its
own session and output file, one thread for computing, the environment that the test process had when the test requested
ranks, and orders that come over its channel. It reports its tests over that channel. The stack of a crash or of a hang
goes through a separate pipe, because the process may not live to report it.
"""

from __future__ import annotations

import atexit
import dataclasses
import faulthandler
import importlib
import json
import os
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch_fsdp_tests import extension
from torch_fsdp_tests.processes import foreign, messages, system
from torch_fsdp_tests.processes.messages import Connection
from torch_fsdp_tests.ranks import classes, inherited
from torch_fsdp_tests.ranks.protocol import TO_RANK, Leaked, Leaving, Raised, RunTest, Start, Waits
from torch_fsdp_tests.verdict import RankResult, events

__unittest = True  # unittest leaves the frames of such modules out of tracebacks

STACKS_SIGNAL = system.stacks_signal()  # makes a rank write the Python stacks of all its threads into the separate pipe
LEFT_WITHOUT_CLASS = 70  # EX_SOFTWARE: the rank could not find the test class

_in_rank = False


def in_rank() -> bool:
    """True in a process that hosts one or more ranks of a test."""
    return _in_rank


class Assignment:
    """The task of a rank process, and its connection to the test process.

    ``index`` is the number of the process. ``world_size`` is the number of ranks; if ranks are threads, there are fewer
    processes. ``directory`` belongs to the test, and is removed after it.
    """

    def __init__(self, request: Start, index: int, connection: Connection) -> None:
        self.index = index
        self.test = request.task.test
        self.call, self.files = request.call, request.files
        self._class = f"{request.task.module}.{request.task.qualname}"
        self.world_size = request.task.world_size
        self.directory = Path(request.directory)
        self.file_name = request.file_name
        self._connection = connection
        self._leaving = False

    def _tell(self, message: Any) -> None:
        with _reporting:
            self._connection.send(message)

    def report(self, result: RankResult) -> None:
        """Report how a rank's test ended to the test process. Any thread of the process may call this."""
        self._tell(dataclasses.replace(result, at=time.monotonic()))

    def name_leak(self, leak: str) -> None:
        """Report something that a test left behind in this rank. Call it before the outcome is reported."""
        self._tell(Leaked(self.index, leak))

    def meet(self, limit: float | None = None) -> None:
        """Wait until every other rank has called this, has raised or reported, or is gone, or for ``limit`` seconds.

        After this call a rank may destroy a process group, because no other rank is still making it. (Making a group is
        not a barrier: see c10d's ``_is_barrier_after_init``.)
        """
        self._tell(Waits(self.index))
        if select.select([self._connection], [], [], limit)[0]:
            self._connection.receive()

    def raised(self) -> None:
        """Let the other ranks continue from :meth:`meet`: the test has raised, and what follows it may need them."""
        self._tell(Raised(self.index))

    def leave(self) -> None:
        """Run no more tests after the next report, because the last test left something that cannot be undone."""
        self._leaving = True
        self._tell(Leaving(self.index))

    def orders(self) -> Iterable[str]:
        """Yield the tests to run: the one for which the process was started, or those that the test process sends."""
        if self.test is not None:
            yield self._entered(self.test)
            return
        while not self._leaving and isinstance(order := self._connection.receive(), RunTest):
            yield self._entered(order.test)

    def _entered(self, test: str) -> str:
        events.enter(f"{self._class}.{test.rpartition('.')[2]}")
        return test


_reporting = threading.RLock()  # reentrant, because a report may open a file, which is reported too


def main(request: Start, index: int, channel: int, crash_output: int, server: int) -> None:
    """Run a rank to its end. Never returns."""
    global _in_rank
    _in_rank = True
    code = 1
    try:
        _settle(request, index, crash_output, server)
        target = classes.find(request.task.module, request.task.qualname)
        inherited.adopt(request.task.state)
        assignment = Assignment(request, index, Connection(socket.socket(fileno=channel), TO_RANK))
        extension.enter_rank(assignment.file_name, index, assignment.world_size)
        target._serve_rank(assignment)
        code = 0
        atexit._run_exitfuncs()
    except SystemExit as leaving:
        code = system.exit_status(leaving)
        os.write(crash_output, traceback.format_exc().encode(errors="backslashreplace"))
    except LookupError as error:
        code = LEFT_WITHOUT_CLASS
        os.write(crash_output, str(error).encode())
    except BaseException:
        os.write(crash_output, traceback.format_exc().encode(errors="backslashreplace"))
    finally:
        system.flush_outputs()
        os._exit(code)


def _settle(request: Start, index: int, crash_output: int, server: int) -> None:
    """Separate the process from the one that forked it."""
    _leave_parent(server)
    _take_environment(request)
    _redirect(Path(request.directory) / f"output{index}")
    faulthandler.enable(crash_output)  # before the import of torch, which may crash or hang
    faulthandler.register(STACKS_SIGNAL, crash_output)
    import torch

    if "OMP_NUM_THREADS" not in _changed_variables(request):
        torch.set_num_threads(1)


def _changed_variables(request: Start) -> list[str]:
    """The variables that the test process has changed since it imported torch. Fresh interpreters have read them."""
    changed: list[str] = json.loads(request.preparation)["changed"] if request.preparation else []
    return changed


def _leave_parent(server: int) -> None:
    system.die_with_parent(server)  # first, because the server may die at any moment
    system.favor_throughput()
    if os.getsid(0) != os.getpid():  # a fresh interpreter leads its session already
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process handles Ctrl-C, and ends the ranks
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):  # the server's handlers
        signal.signal(number, signal.SIG_DFL)
    atexit._clear()  # the test process' exit functions must not run here


def _take_environment(request: Start) -> None:
    """Take the environment and the folder that the test process has now; the server is older."""
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.cwd)
    scratch = Path(request.directory, "tmp")  # removed with the test, so that what is left there is named
    scratch.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(scratch)
    tempfile.tempdir = None  # so that TMPDIR is read again


def _redirect(output: Path) -> None:
    """Redirect stdin to nothing, stdout and stderr to the rank's file, even if they were replaced before the fork."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((nowhere, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.close(nowhere)
    os.close(file)
    sys.stdin = open(0, closefd=False)
    open_outputs()


def open_outputs() -> None:
    sys.stdout = open(1, "w", closefd=False, errors="backslashreplace", buffering=1)
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)


def fresh() -> None:
    """The entry point of a rank that is a fresh interpreter: ``python -c ... DIRECTORY INDEX CHANNEL CRASH_OUTPUT``."""
    directory, index, channel, crash_output = sys.argv[1:]
    request = messages.decode((Path(directory) / f"request{index}.json").read_bytes(), [Start])
    prepare_interpreter(request.preparation)
    main(request, int(index), int(channel), int(crash_output), os.getppid())


def prepare_interpreter(preparation: str) -> None:
    """Prepare a fresh interpreter to match the test process: path, arguments, main module, test classes."""
    from multiprocessing import spawn

    recipe = json.loads(preparation)
    del recipe["changed"]
    modules = recipe.pop("modules")
    foreign.import_tests_from(recipe.pop("root_of_tests"))
    spawn.prepare(recipe)
    for module in modules:
        importlib.import_module(module)
