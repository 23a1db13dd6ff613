"""Two hosts on one machine, for other tests. Not a test file.

Each is a network namespace with its own address, name and loopback interface. A pair of virtual interfaces connects
them. The namespaces share the files and the processes of the machine, but no part of its network.
"""

import contextlib
import os
import shutil
import string
import subprocess
import tempfile
import unittest
from pathlib import Path

NAMES = ("hosta", "hostb")
MARK = "fsdp"  # before the process id in the names of namespaces
NAMESPACES = Path("/run/netns")  # where ip keeps them


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def remove_what_killed_runs_left() -> None:
    for path in NAMESPACES.glob(f"{MARK}[0-9]*[a-z]"):
        if not Path("/proc", path.name[len(MARK) : -1]).exists():
            with contextlib.suppress(subprocess.CalledProcessError):  # another run was faster
                ip("netns", "delete", path.name)


class TwoHosts:
    """Creates the hosts, and removes them after the tests of the module.

    Raises :class:`unittest.SkipTest`, which names what the machine lacks.

    ``network`` is the first three numbers of the addresses. ``resolve`` says whether the hosts know each other's
    names.
    """

    _letters = iter(string.ascii_lowercase)

    def __init__(self, network: str, resolve: bool = False) -> None:
        # The name of a host's namespace is also that of its interface. Concurrent runs use different names.
        self.devices = (f"{MARK}{os.getpid()}{next(self._letters)}", f"{MARK}{os.getpid()}{next(self._letters)}")
        self.addresses = (f"{network}.1", f"{network}.2")
        self._scratch = tempfile.TemporaryDirectory(prefix="hosts-")
        unittest.addModuleCleanup(self._close)
        known = [f"{address} {name}\n" for address, name in zip(self.addresses, NAMES, strict=True)]
        self._etc_hosts = Path(self._scratch.name) / "hosts"
        self._etc_hosts.write_text("127.0.0.1 localhost\n" + "".join(known if resolve else ()))
        try:
            self._make()
        except subprocess.CalledProcessError as error:
            reason = error.stderr.decode().strip()
            raise unittest.SkipTest(f"needs network namespaces, which this process may not make: {reason}") from None

    def _make(self) -> None:
        for tool in ("ip", "unshare"):
            if shutil.which(tool) is None:
                raise unittest.SkipTest(f"needs the command {tool} (Debian's iproute2 and util-linux)")
        remove_what_killed_runs_left()
        for device in self.devices:
            ip("netns", "add", device)
        ip("link", "add", self.devices[0], "type", "veth", "peer", "name", self.devices[1])
        for device, address in zip(self.devices, self.addresses, strict=True):
            ip("link", "set", device, "netns", device)
            ip("-n", device, "addr", "add", f"{address}/24", "dev", device)
            ip("-n", device, "link", "set", "lo", "up")
        for device in self.devices:
            ip("-n", device, "link", "set", device, "up")

    def prefix(self, host: int) -> list[str]:
        """Return the words to put before a command so that it runs on this host."""
        # Without a resolv.conf, programs ask a name server on the loopback interface, where none is, and fail at once.
        # They would wait for the machine's own one, which cannot be reached from the namespace.
        become = (
            f"hostname {NAMES[host]}; mount --bind /dev/null /etc/resolv.conf; "
            f'mount --bind {self._etc_hosts} /etc/hosts; exec "$@"'
        )
        return ["ip", "netns", "exec", self.devices[host], "unshare", "--uts", "sh", "-c", become, "sh"]

    def _close(self) -> None:
        for device in self.devices:
            with contextlib.suppress(OSError, subprocess.CalledProcessError):
                ip("netns", "delete", device)
        self._scratch.cleanup()
