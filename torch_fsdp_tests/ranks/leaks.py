"""What a test leaves behind in its rank's process, apart from settings: threads, processes, files in shared memory.

They are found from inside the process, because there the kernel tells which are its own. The rank server and the test
process find what a process leaves when it dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from torch_fsdp_tests.processes import host


class Belongings:
    """What this process has now, so that later additions can be found."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._children = set(host.children())
        self._shared = _tracked_files()

    def new_threads(self) -> list[threading.Thread]:
        """New threads for which the interpreter would wait at its exit. Only the end of the process ends them."""
        return [each for each in threading.enumerate() if each not in self._threads and not each.daemon]

    def end_new_children(self) -> Iterator[str]:
        """Kill new child processes, and yield the command line of each."""
        for pid in set(host.children()) - self._children:
            command = host.command_of(pid)
            if not host.is_servant(command) and not host.has_ended(pid):
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                yield command

    def end_tracked_files(self) -> list[str]:
        """Let multiprocessing's resource tracker remove files that nobody uses, and return their names.

        Does nothing if this process has no tracker. The tracker ends with this, and is started again when it is needed.
        """
        tracker = sys.modules.get("multiprocessing.resource_tracker")
        before = _tracked_files()
        if tracker is None or before <= self._shared or tracker._resource_tracker._pid not in host.children():
            return []
        tracker._resource_tracker._stop()
        return sorted(before - self._shared - _tracked_files())


def _tracked_files() -> set[str]:
    return {name for name in host.shared_memory() if name.startswith("psm_")}  # multiprocessing.shared_memory's own


def watch_shared_memory(tell: Callable[[str], None]) -> None:
    """From now on, call ``tell`` with the name of every file that this process makes in shared memory.

    The receiver can remove the file, however this process ends. Only files that Python code opens are noticed.
    """

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and type(arguments[0]) is str and arguments[0].startswith(host.SHARED_MEMORY):
            if arguments[2] & os.O_CREAT:
                tell(os.path.basename(arguments[0]))

    sys.addaudithook(hook)
