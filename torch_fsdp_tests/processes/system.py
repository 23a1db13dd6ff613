"""The services of the operating system, in one place.

Linux has all of them. macOS has no ``/proc`` and no parent-death signal, and a process that has loaded the system
frameworks cannot continue after a fork, so every rank is a fresh interpreter there. Windows is not supported.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import io
import ipaddress
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

LINUX = sys.platform.startswith("linux")

NOT_SUPPORTED = "torch_fsdp_tests does not run on Windows: use Linux, WSL 2, or macOS (CPU only)"

LOOPBACK = "127.0.0.1"  # not "localhost", which some containers cannot resolve

# prctl(2) options, from <linux/prctl.h>.
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_SIOCGIFADDR = 0x8915  # ioctl(2) request, from <linux/sockios.h>


def exit_if_unsupported() -> None:
    """Exit with one sentence and status 2 if the suite cannot run on this system."""
    if sys.platform == "win32":
        print(NOT_SUPPORTED, file=sys.stderr)
        sys.exit(2)


def flush_outputs() -> None:
    """Write the buffers of stdout and stderr. Exceptions are ignored: a test may have closed or replaced them."""
    for output in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            output.flush()


def drop_stdout() -> None:
    """Discard what is left in stdout's buffer, so that the interpreter does not try to write it when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def prepare_streams() -> None:
    """Open the null device for each closed standard stream. Otherwise a file would be opened in its place.

    What the encoding of an output lacks is escaped, so that no text can end the program.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_RDWR), number)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper) and number:
            stream.reconfigure(errors="backslashreplace")


def run_command(name: str, main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Run a command's main function, and exit with the status that it returns.

    The exit status is 130 if the command was interrupted, 141 if the program that read its output ended, and 3, with
    one sentence, if something could not be read or written. The output of a closed stream is lost.
    """
    prepare_streams()
    status: int | str | None
    try:
        try:
            status = main(sys.argv[1:])
        except SystemExit as left:  # invalid arguments, or --help
            status = left.code
        sys.stdout.flush()  # an exit would report a failure in a traceback
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    except BrokenPipeError:  # as with "--list | head"
        drop_stdout()
        status = 128 + signal.SIGPIPE
    except OSError as error:
        print(f"{name}: cannot continue: {error}", file=sys.stderr)
        drop_stdout()
        status = 3
    sys.exit(status)


def stacks_signal() -> signal.Signals:
    """The signal that makes a rank write its stacks. Exits on Windows, which does not have it."""
    exit_if_unsupported()
    return signal.SIGUSR1


def ending_signals() -> tuple[signal.Signals, ...]:
    """The signals by which others end this program: SIGTERM, and SIGHUP unless it is ignored, as under ``nohup``."""
    hang_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
    return (signal.SIGTERM, *hang_up)


def exit_on_signals() -> None:
    """Let :func:`ending_signals` raise ``SystemExit``, so that processes are ended and folders removed."""
    for ending in ending_signals():
        signal.signal(ending, lambda number, _: sys.exit(128 + number))


def can_fork() -> bool:
    """Whether a process that has imported torch may fork."""
    return LINUX


def allow_open_files(number: int) -> None:
    """Let this process open this many files. Raises ``OSError`` if the system does not allow it."""
    import resource  # Windows does not have it

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= number:
        return
    if hard != unlimited and hard < number:
        raise OSError(f"the limit of open files is {hard}, but {number} are needed; raise it with ulimit -Hn {number}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (number, hard))


def loopback_interface() -> str:
    """The name of the network interface on which the ranks of one machine meet."""
    return "lo" if LINUX else "lo0"


def is_loopback(address: str) -> bool:
    """Whether a written address is that of the loopback interface."""
    try:
        return address == "localhost" or ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface; empty where it has none or there is no such interface."""
    if not (LINUX and interface):
        return ""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str:
    """The name of the network interface that has this IPv4 address; empty where none is found."""
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), "") if LINUX else ""


def _prctl(option: int, value: int) -> bool:
    if not LINUX:
        return False
    return ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that forked it ends.

    If the parent died between the fork and this call, no signal ever comes, so its id is compared afterwards.
    ``parent`` is the id of the process that forked this one. Does nothing if the kernel has no such service.
    """
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
        os._exit(1)


def signal_on_parents_death(number: int) -> None:
    """On Linux, let the kernel send this process a signal when the thread that forked it ends."""
    _prctl(_PR_SET_PDEATHSIG, number)


def favor_throughput() -> None:
    """Let this thread, and those that it starts, wait for their turn when they wake up, and not interrupt another one.

    Does nothing if the system has no such policy, or if this process has another policy than the usual one.

    With the usual policy, gloo's network thread interrupts the thread that woke it, which holds a lock that it needs.
    It then asks for this lock a million times in a test with four ranks (pytorch/gloo#246).
    """
    with contextlib.suppress(OSError):
        if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def adopt_orphans() -> bool:
    """Make this process the new parent of descendants whose parent exits. Returns False if that is not possible."""
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """The process ids of this process' living children, including adopted ones. Empty if they cannot be read.

    The kernel lists children by the thread that forked them. When a thread ends, its children move to another thread,
    whose list may have been read before. So one reading may lack them, but two equal readings cannot.
    """
    pids, before = _children_by_thread(), None
    while pids != before:
        pids, before = _children_by_thread(), pids
    return sorted(pids)


def _children_by_thread() -> set[int]:
    pids: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        try:
            pids.update(map(int, task.read_text().split()))
        except OSError:
            continue
    return pids


def has_ended(pid: int) -> bool:
    """Whether a child of this process has ended. It can still be waited for. False if that cannot be read."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def command_of(pid: int) -> str:
    """The command line of a process in one line, for a report, or its id if that cannot be read."""
    words: list[bytes] = []
    for _ in range(10):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if any(words) or has_ended(pid):
            break
        time.sleep(0.005)  # during its exec the kernel shows nothing
    line = b" ".join(words).decode(errors="backslashreplace").strip()
    return f"{pid} ({line[:120]})" if line else str(pid)


def kill_group(leader: int) -> None:
    """Kill what is left of a process group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def head_and_tail(path: Path, limit: int, start: int = 0) -> str:
    """The text of a file from byte ``start``. Of more than ``limit`` bytes, only the head and the tail."""
    half = limit // 2
    with path.open("rb") as file:
        left_out = file.seek(0, os.SEEK_END) - start - 2 * half
        file.seek(start)
        data = file.read(half if left_out > 0 else limit)
        if left_out > 0:
            file.seek(-half, os.SEEK_END)
            data += b"\n... %d bytes left out ...\n" % left_out + file.read()
    return data.decode(errors="backslashreplace")


@dataclasses.dataclass(frozen=True)
class Used:
    """What a process and all descendants that were waited for have used."""

    user: float  # seconds of processor time
    system: float  # seconds of the kernel's processor time
    page_faults: int  # without reading from a disk


def ended_children(options: int = 0) -> Iterator[tuple[int, int, Used]]:
    """Yield the process id, wait status and used resources of each child that has ended, or stopped (``options``)."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status, used = os.wait4(-1, os.WNOHANG | options)
            if not pid:
                return
            yield pid, status, Used(round(used.ru_utime, 3), round(used.ru_stime, 3), used.ru_minflt)


def exit_status(leaving: SystemExit) -> int:
    """The exit status that the interpreter would return."""
    if leaving.code is None:
        return 0
    return leaving.code & 0xFF if isinstance(leaving.code, int) else 1


def how_ended(status: int) -> int | str:
    """The exit code or the name of the signal in a wait status."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else signal_name(-code)


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
