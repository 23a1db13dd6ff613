"""Finds and removes what a process leaves behind: other processes, threads, files, and shared memory.

A process finds its own threads and children (:class:`ProcessBaseline`). After it has ended, the process that adopts its
orphans kills them (:func:`end_leftovers`), and the owner of its directory removes its files (:func:`remove_files`).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from torch_fsdp_tests.processes import system

TIDY_LIMIT = 2.0  # seconds for multiprocessing's resource trackers to clean up
_TICK = 0.005  # seconds between two looks at a tracker
_SHARED_MEMORY = "/dev/shm/"
_TRACKER = "multiprocessing.resource_tracker"
_SERVANTS = (_TRACKER, "torch_shm_manager", "_inductor/compile_worker")  # Python or torch start them by themselves
_TORCHS_CACHE = "torchinductor"  # the prefix of torch's folder for compiled code

# --- processes --------------------------------------------------------------------------------------------------------


def end_leftovers(spared: Collection[int], directory: Path | None = None) -> list[str]:
    """Kill children of this process, including adopted ones, and the orphans that these leave to it.

    With a directory only those with temporary or open files in it. Returns the command lines, except of ``_SERVANTS``.
    A resource tracker comes last: after the last process that it serves is gone, it removes shared memory, and ends.
    """
    ended: list[str] = []
    spared = set(spared)
    while leftovers := [
        pid for pid in system.children() if pid not in spared and (not directory or _in(pid, directory))
    ]:
        commands = {pid: system.command_of(pid) for pid in leftovers}
        for pid in [pid for pid in leftovers if _TRACKER not in commands[pid]] or leftovers:
            patience = time.monotonic() + TIDY_LIMIT * (_TRACKER in commands[pid])
            while not (has_ended := system.has_ended(pid)) and time.monotonic() < patience:
                time.sleep(_TICK)
            if not has_ended and not _is_servant(commands[pid]):
                ended.append(commands[pid])
            spared.add(pid)
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return ended


def _is_servant(command: str) -> bool:
    return any(name in command for name in _SERVANTS)


def _in(pid: int, directory: Path) -> bool:
    """Whether a process has its temporary files or an open file in a directory. False if that cannot be read."""
    with contextlib.suppress(OSError):
        if f"TMPDIR={directory}".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            return True
        for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                if os.readlink(descriptor).startswith(f"{directory}/"):
                    return True
    return False


class ProcessBaseline:
    """What this process has now, so that later additions can be found."""

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._children = set(system.children())
        self._shared = _tracked_files()

    def new_threads(self) -> list[threading.Thread]:
        """New threads for which the interpreter would wait at its exit. Only the end of the process ends them."""
        return [each for each in threading.enumerate() if each not in self._threads and not each.daemon]

    def end_new_children(self) -> list[str]:
        """Kill new child processes, except ``_SERVANTS``, and return the command line of each."""
        return end_leftovers(
            {pid for pid in system.children() if pid in self._children or _is_servant(system.command_of(pid))}
        )

    def end_tracked_files(self) -> list[str]:
        """Let multiprocessing's resource tracker remove unused files, and return their names.

        Does nothing if this process has no tracker. The tracker ends; Python starts a new one when it is needed.
        """
        tracker = sys.modules.get("multiprocessing.resource_tracker")
        before = _tracked_files()
        if tracker is None or before <= self._shared or tracker._resource_tracker._pid not in system.children():
            return []
        tracker._resource_tracker._stop()
        return sorted(before - self._shared - _tracked_files())


# --- files and shared memory ------------------------------------------------------------------------------------------


def _tracked_files() -> set[str]:
    """The files of ``multiprocessing.shared_memory``."""
    try:
        return {name for name in os.listdir(_SHARED_MEMORY) if name.startswith("psm_")}
    except OSError:
        return set()


def remove_files(scratch: Path, pids: Iterable[int]) -> Iterator[str]:
    """Remove what processes have left in their temporary directory and in shared memory, and describe it.

    In shared memory these are torch's files, which have the process' id in their names.
    """
    left = [path for path in sorted(scratch.glob("*")) if not path.name.startswith(_TORCHS_CACHE)]
    if left:
        more = " ..." if len(left) > 5 else ""
        yield f"left in the temporary directory: {', '.join(path.name for path in left[:5])}{more}"
    for path in left:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    for path in sorted(path for pid in pids for path in Path(_SHARED_MEMORY).glob(f"torch_{pid}_*")):
        yield f"left in shared memory: {path.name}"
        path.unlink(missing_ok=True)


def paths_below(folder: Path, depth: int | None = None) -> set[str]:
    """What lies in a folder of sources, without what Python and editors put there: hidden files, sources and caches.

    With a depth of 1 only the folder itself is read.
    """
    found: set[str] = set()
    for place, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        names = [*folders, *(name for name in files if not name.startswith(".") and not name.endswith((".py", "~")))]
        found.update(os.path.join(place, name) for name in names)
        if depth == 1:
            break
    return found
