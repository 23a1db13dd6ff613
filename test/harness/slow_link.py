"""A slow network that loses packets, between two network namespaces, for other tests. Not a test file.

The kernel need not support this (netem). Each namespace gets a TUN device, and a thread of this process carries the IP
packets from one to the other.
"""

import contextlib
import fcntl
import heapq
import os
import selectors
import struct
import subprocess
import threading
import time
from collections.abc import Sequence

_TUNSETIFF = 0x400454CA  # <linux/if_tun.h>
_IFF_TUN = 0x0001
_IFF_NO_PI = 0x1000  # packets only, without a header that describes them
_PACKET = 1 << 16  # bytes of the largest IP packet


class SlowLink:
    """Connects ``namespaces``, in which the devices ``names`` get ``addresses``, until :meth:`close`.

    Every packet arrives ``delay`` seconds after it was sent, in either direction. Of each ``lost_of`` packets one is
    lost. ``sent`` and ``lost`` count them. Raises :class:`OSError` if this process may not make the devices.
    """

    def __init__(
        self, namespaces: Sequence[str], names: Sequence[str], addresses: Sequence[str], delay: float, lost_of: int
    ) -> None:
        self.addresses = addresses
        self.sent = self.lost = 0
        self._delay = delay
        self._lost_of = lost_of
        with contextlib.ExitStack() as opened:
            ends = zip(namespaces, names, addresses, strict=True)
            self._devices = [self._open(*end, opened) for end in ends]
            self._wake, self._stop = os.pipe()
            for pipe_end in (self._wake, self._stop):
                opened.callback(os.close, pipe_end)
            self._thread = threading.Thread(target=self._carry, daemon=True)
            self._thread.start()
            self._opened = opened.pop_all()

    def close(self) -> None:
        os.write(self._stop, b"x")
        self._thread.join()
        self._opened.close()  # a device disappears with its descriptor

    def _open(self, namespace: str, name: str, address: str, opened: contextlib.ExitStack) -> int:
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        opened.callback(os.close, device)
        fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH14x", name.encode(), _IFF_TUN | _IFF_NO_PI))
        for words in (
            ["link", "set", name, "netns", namespace],
            ["-n", namespace, "addr", "add", f"{address}/24", "dev", name],
            ["-n", namespace, "link", "set", name, "up"],
        ):
            subprocess.run(["ip", *words], check=True, capture_output=True)
        return device

    def _carry(self) -> None:
        """Read packets, and write each to the other device when its time has come."""
        underway: list[tuple[float, int, int, bytes]] = []  # due, number, device, packet
        with selectors.DefaultSelector() as selector:
            for source in (*self._devices, self._wake):
                selector.register(source, selectors.EVENT_READ)
            while True:
                wait = max(0.0, underway[0][0] - time.monotonic()) if underway else None
                for key, _ in selector.select(wait):
                    if key.fd == self._wake:
                        return
                    self.sent += 1
                    packet = os.read(key.fd, _PACKET)
                    if self.sent % self._lost_of == 0:
                        self.lost += 1
                        continue
                    (other,) = {*self._devices} - {key.fd}
                    heapq.heappush(underway, (time.monotonic() + self._delay, self.sent, other, packet))
                while underway and underway[0][0] <= time.monotonic():
                    with contextlib.suppress(OSError):  # a device that is full, or gone, loses the packet
                        os.write(underway[0][2], underway[0][3])
                    heapq.heappop(underway)
