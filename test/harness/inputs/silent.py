"""Measures the seconds until a connection ends whose other side is silent: ``silent.py LIMIT [data]``.

The other side becomes silent because the loopback interface goes down, in a network namespace of this process. With
``data``, the other side has not acknowledged some data.
"""

import ctypes
import fcntl
import os
import socket
import struct
import sys
import time

from torch_fsdp_tests.processes import messages

# From <linux/sched.h>, <linux/sockios.h> and <linux/if.h>.
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def take_own_network() -> None:
    unshare = getattr(ctypes.CDLL(None, use_errno=True), "unshare", None)
    if unshare is None:
        sys.exit("a process can have no network of its own on this system")
    if unshare(CLONE_NEWNET) != 0 and unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        sys.exit(f"this process may have no network of its own: {os.strerror(ctypes.get_errno())}")


def set_loopback(flags: int) -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags))


take_own_network()
set_loopback(IFF_UP)
listener = socket.create_server(("127.0.0.1", 0))
mine = socket.create_connection(listener.getsockname())
other, _ = listener.accept()
messages.SILENCE_LIMIT = limit = int(sys.argv[1])
messages.watch_for_loss(mine)
mine.sendall(b"first")
other.recv(5)
set_loopback(0)
if sys.argv[2:] == ["data"]:
    mine.sendall(b"second")
began = time.monotonic()
mine.settimeout(4 * limit)
try:
    mine.recv(1)
except OSError:
    print(time.monotonic() - began)
