"""What a test leaves behind in the process of its rank, beside settings: threads, processes, files in shared memory.

Found from inside, where the kernel says for certain whose they are. What a process can still leave while it dies is
found by the rank server and by the test process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from torch_fsdp_tests import host


class Belongings:
    """What this process had at one moment, so that what came since can be told."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._children = set(host.children())
        self._shared = _tracked_files()

    def new_threads(self) -> list[threading.Thread]:
        """Threads that a leaving interpreter would wait for, and that only the end of the process ends."""
        return [each for each in threading.enumerate() if each not in self._threads and not each.daemon]

    def end_new_children(self) -> Iterator[str]:
        """Kill the child processes that came since, and yield what each of them ran."""
        for pid in set(host.children()) - self._children:
            command = host.command_of(pid)
            if not host.is_servant(command) and not host.has_ended(pid):
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                yield command

    def end_tracked_files(self) -> list[str]:
        """Have multiprocessing's resource tracker, if this process started one, remove what nobody has; its names.

        A tracker ends with that and is started again when it is needed.
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
    """Have ``tell`` called, for good, with the name of every file that this process makes in shared memory.

    Who is told can remove it, however this process ends. Seen is what Python code opens, not what libraries do.
    """

    def hook(event: str, arguments: tuple) -> None:
        if event == "open" and type(arguments[0]) is str and arguments[0].startswith(host.SHARED_MEMORY):
            if arguments[2] & os.O_CREAT:
                tell(os.path.basename(arguments[0]))

    sys.addaudithook(hook)
