"""The life of one rank process: from the fork to its exit.

A rank is a child of the rank server (or, where forking is not possible, a fresh interpreter started by it). It gets
a session of its own, its own output file, one thread for computing, the environment that the test process had when
the test asked for ranks, and the orders that come over its channel. What it has to say of its tests goes back over
that channel; what it may not live to say (the stack of a crash or of a hang) goes through a pipe of last words.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import json
import os
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

from torch_fsdp_tests import events, host, messages
from torch_fsdp_tests.messages import Connection
from torch_fsdp_tests.ranks import leaks, rendezvous
from torch_fsdp_tests.ranks.outcome import Outcome
from torch_fsdp_tests.ranks.protocol import ORDERS, Leaked, MadeSharedFile, Reported, RunTest, Start, Waits

__unittest = True  # unittest leaves the frames of such modules out of tracebacks

STACKS_SIGNAL = host.stacks_signal()  # makes a rank write the Python stacks of all its threads into its last words
LEFT_WITHOUT_CLASS = 70  # EX_SOFTWARE: the rank could not find the test class; its last words say why

# Test classes by module and qualified name. The server is forked off the test process once all test files are loaded,
# so a rank finds here what no import could give it: a class that a function or a decorator made.
_classes: dict[tuple[str, str], type] = {}

_in_rank = False


def in_rank() -> bool:
    """True in a process that hosts one or more ranks of a test."""
    return _in_rank


def register(cls: type) -> None:
    """Make a test class findable in ranks."""
    _classes[cls.__module__, cls.__qualname__] = cls


def find(module: str, qualname: str) -> Any:
    """The registered class, else the one that an import of its module gives. Raises ``LookupError`` with the reason."""
    if (module, qualname) in _classes:
        return _classes[module, qualname]
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for name in qualname.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"a rank cannot find the test class {module}.{qualname}: {error}") from error
    return found


class Assignment:
    """What a rank process was started for, and its line back to the test process.

    ``index`` counts the processes of the test; ``world_size`` its ranks, which are more than the processes when ranks
    are threads. ``directory`` belongs to the test alone and goes with it.
    """

    def __init__(self, request: Start, index: int, connection: Connection) -> None:
        self.index = index
        self.test = request.task.test
        self._class = f"{request.task.module}.{request.task.qualname}"
        self.world_size = request.task.world_size
        self.directory = Path(request.directory)
        self.file_name = request.file_name
        self._connection = connection
        self._leaving = False

    def _tell(self, message: Any) -> None:
        with _reporting:
            self._connection.send(message)

    def report(self, outcome: Outcome) -> None:
        """Tell the test process how a rank came out. Safe to call from any thread of the process."""
        self._tell(Reported(self.index, outcome, time.monotonic(), self._leaving))

    def name_leak(self, leak: str) -> None:
        """Tell the test process of something that a test left behind in this rank; before the outcome is told."""
        self._tell(Leaked(self.index, leak))

    def name_shared_file(self, name: str) -> None:
        """Tell the test process of a file in shared memory, which it will remove unless somebody has done so."""
        self._tell(MadeSharedFile(name))

    def meet(self) -> None:
        """Wait until every other rank has come as far, has reported or is gone.

        What a rank ends after it, such as a process group, no other rank is still busy to make. (Making one is no
        barrier: c10d's ``_is_barrier_after_init``.)
        """
        self._tell(Waits(self.index))
        self._connection.receive()

    def leave(self) -> None:
        """Take no further test, since the last one has left what cannot be undone; after the next report."""
        self._leaving = True

    def orders(self) -> Iterable[str]:
        """The tests to run: the one it was started for, or as many as the test process sends, until it says no more."""
        if self.test is not None:
            yield self._entered(self.test)
            return
        while not self._leaving and isinstance(order := self._connection.receive(), RunTest):
            yield self._entered(order.test)

    def _entered(self, test: str) -> str:
        events.enter(f"{self._class}.{test.rpartition('.')[2]}")
        return test


_reporting = threading.RLock()  # a thread that reports may come to report once more, of a file that was opened for it


def main(request: Start, index: int, channel: int, last_words: int, server: int) -> None:
    """Run a rank to its end; never returns."""
    global _in_rank
    _in_rank = True
    code = 1
    try:
        _settle(request, index, last_words, server)
        target = find(request.task.module, request.task.qualname)
        assignment = Assignment(request, index, Connection(socket.socket(fileno=channel), ORDERS))
        rendezvous.join(assignment.file_name, index, assignment.world_size)
        leaks.watch_shared_memory(assignment.name_shared_file)
        target._serve_rank(assignment)
        code = 0
        atexit._run_exitfuncs()
    except SystemExit as leaving:
        code = host.exit_status(leaving)
        os.write(last_words, traceback.format_exc().encode(errors="backslashreplace"))
    except LookupError as error:
        code = LEFT_WITHOUT_CLASS
        os.write(last_words, str(error).encode())
    except BaseException:
        os.write(last_words, traceback.format_exc().encode(errors="backslashreplace"))
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)


def _settle(request: Start, index: int, last_words: int, server: int) -> None:
    """Cut what ties the process to the one it was forked from."""
    host.die_with_parent(server)
    if os.getsid(0) != os.getpid():
        os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the test process' business; it ends the ranks in order
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    atexit._clear()  # what the test process registered is for the test process to do
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.cwd)
    directory = Path(request.directory)
    scratch = directory / "tmp"
    scratch.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(scratch)
    tempfile.tempdir = None
    _redirect(directory / f"output{index}")
    faulthandler.enable(last_words)
    faulthandler.register(STACKS_SIGNAL, last_words)
    import torch

    torch.set_num_threads(1)


def _redirect(output: Path) -> None:
    """Standard input from nowhere; both outputs into the rank's file, whoever had taken them over before the fork."""
    nowhere = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((nowhere, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.close(nowhere)
    os.close(file)
    sys.stdin = open(0, closefd=False)
    sys.stdout = open(1, "w", closefd=False, errors="backslashreplace", buffering=1)
    sys.stderr = open(2, "w", closefd=False, errors="backslashreplace", buffering=1)


def fresh() -> None:
    """Entry of a rank that is a fresh interpreter: ``python -c ... DIRECTORY INDEX CHANNEL LAST_WORDS``."""
    directory, index, channel, last_words = sys.argv[1:]
    request = messages.decode((Path(directory) / "request.json").read_bytes(), [Start])
    prepare_interpreter(request.preparation)
    main(request, int(index), int(channel), int(last_words), os.getppid())


def prepare_interpreter(preparation: str) -> None:
    """Make a fresh interpreter look like the test process: path, arguments, main module, test classes."""
    from multiprocessing import spawn

    recipe = json.loads(preparation)
    modules = recipe.pop("modules")
    spawn.prepare(recipe)
    for module in modules:
        importlib.import_module(module)
