"""Runs of the test files in ``inputs``, whose outcome other tests look at. Not a test file.

A run is what ``python FILE ARGUMENTS`` does, in a process of its own. Most begin as a fork of one process that has
imported torch and nothing of this project, since the import takes longer than what is looked at; a ``plain`` one is an
interpreter of its own, as is every one where such a process may not fork.
"""

import atexit
import contextlib
import functools
import importlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INPUTS = Path(__file__).parent / "inputs"
LIMIT = 60  # seconds that a test of a run may take
COMMAND_LIMIT = 300  # seconds for a whole run

_TORCH = ("torch", "torch.distributed.fsdp", "torch.distributed.tensor", "torch.testing", "torch._dynamo", "unittest")


def leftovers(folder):
    """What a run has left in its temporary folder, but for what torch keeps there.

    That is the cache that importing torch._dynamo makes, and in torch 2.9 the templates of torch.distributed.nn, which
    a process that is killed cannot remove.
    """
    names = [name for name in os.listdir(folder) if not name.startswith("torchinductor")]
    return [name for name in names if not Path(folder, name, "_remote_module_non_scriptable.py").exists()]


def run_beside(package, *command, **variables):
    """Run an interpreter to its end, with this folder on its path, as installed, and no device asked for."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_FSDP_TESTS_")}
    return subprocess.run(
        [sys.executable, *map(str, command)],
        env=clean | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(package)])} | variables,
        text=True,
        capture_output=True,
        timeout=2 * COMMAND_LIMIT,
    )


_running = []  # processes that nobody has waited for; they end with this one


class Process:
    """One process that runs a test file. It stands in ``cwd``, and so do all that it starts."""

    def __init__(self, file, arguments, environment, cwd, stdout, stderr, plain=False):
        from torch_fsdp_tests import host  # not at the top: what forks must not have it

        command = [str(file), *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | environment
        self._popen = self._talk = None
        if plain or not host.can_fork():
            self._popen = subprocess.Popen(
                [sys.executable, *command], env=environment, cwd=cwd, stdout=stdout, stderr=stderr
            )
            self.pid = self._popen.pid
            _running.append(self)
            return
        self._talk, theirs = socket.socketpair()
        with theirs:
            request = json.dumps({"command": command, "environment": environment, "cwd": str(cwd)}).encode()
            socket.send_fds(_nursery(), [request], [theirs.fileno(), stdout.fileno(), stderr.fileno()])
        self._talk.settimeout(COMMAND_LIMIT)
        self._heard = self._talk.makefile("r")
        self.pid = int(self._heard.readline())
        _running.append(self)

    def wait(self):
        """Its exit code, or the negative number of the signal that ended it. Raises ``TimeoutError`` in time."""
        if self._popen is not None:
            code = self._popen.wait(timeout=COMMAND_LIMIT)
        else:
            with self._talk, self._heard:
                code = os.waitstatus_to_exitcode(int(self._heard.readline()))
        _running.remove(self)
        return code

    def kill(self):
        """End it, unless it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Run:
    """One run of some tests, begun at once; :meth:`end` waits for it and reads what it printed, test by test."""

    def __init__(self, file, *arguments, plain=False, **environment):
        # Not within this process' own, for torch makes a socket in there, whose path may have 107 characters.
        self._scratch = tempfile.TemporaryDirectory(dir="/tmp")
        self._outputs = [tempfile.TemporaryFile(), tempfile.TemporaryFile()]
        own = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(LIMIT), "TMPDIR": self._scratch.name}
        self._process = Process(file, ["-v", *arguments], own | environment, ROOT, *self._outputs, plain=plain)

    def end(self):
        try:
            self.code = self._process.wait()
        except (TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            raise
        texts = []
        for output in self._outputs:
            output.seek(0)
            text = output.read().decode(errors="backslashreplace")
            texts.append(re.sub(r"^\[Gloo\] Rank .*\n", "", text, flags=re.MULTILINE))  # torch 2.9 tells of connections
            output.close()
        self.left = leftovers(self._scratch.name)
        self._scratch.cleanup()
        self.stdout, self.text = texts
        name = r"(\w+) \((?:__main__\.)?(\w+)(?:\.\w+)?\)"  # with the test's own name since Python 3.11
        lines = re.findall(rf"^{name} \.\.\. (.+)$", self.text, re.MULTILINE)
        self.outcomes = {f"{cls}.{test}": outcome for test, cls, outcome in lines}
        self.words = {}
        for section in self.text.split("=" * 70 + "\n")[1:]:
            outcome, test, cls = re.match(rf"([A-Z ]+): {name}", section).groups()
            self.words[f"{cls}.{test}"] = section
            self.outcomes.setdefault(f"{cls}.{test}", outcome)  # Python 3.10 gives fixtures of classes no line
        *parts, _ = re.split(r"^seconds (\S+) (\S+)\n", self.stdout, flags=re.MULTILINE)
        self.printed = dict(zip(parts[1::3], parts[::3]))
        self.seconds = dict(zip(parts[1::3], map(float, parts[2::3])))
        self.leaks = re.findall(r"^leak: (?:__main__\.)?(.+)$", self.text, re.MULTILINE)
        return self


# --- the process that has imported torch ------------------------------------------------------------------------------


@functools.cache
def _nursery():
    """Starts it; the connection to it, with whose end it ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def end():
        for each in _running:
            each.kill()
        ours.close()
        process.wait(timeout=LIMIT)

    atexit.register(end)
    return ours


def _raise_children(control):
    """Serve one request after the other. Returns in each child, with the command that it is to become."""
    for module in _TORCH:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that stand between
    while True:
        request, (*descriptors,), _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not request:
            os._exit(0)
        if os.fork() == 0:
            control.close()
            return _become(json.loads(request), *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(request, talk, stdout, stderr):
    """In a process that stands between: start the one that runs the command, and tell how it ends. Returns in that."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:
        os.close(stdout)
        os.close(stderr)
        os.write(talk, b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            os.write(talk, b"%d\n" % status)
        os._exit(0)
    os.setsid()
    for source, target in ((stdout, 1), (stderr, 2)):
        os.dup2(source, target)
    for descriptor in (talk, stdout, stderr):
        os.close(descriptor)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    return request["command"]


if __name__ == "__main__":
    sys.argv = _raise_children(socket.socket(fileno=int(sys.argv[1])))
    sys.path[0] = os.path.dirname(sys.argv[0])
    sys.path.insert(1, str(ROOT))  # where an interpreter puts PYTHONPATH
    runpy.run_path(sys.argv[0], run_name="__main__")
