"""TCP ports of this machine, for tests whose ranks meet over TCP."""

from __future__ import annotations

import socket

from torch_fsdp_tests.processes import host


def find_free_port() -> int:
    """Return a TCP port of the loopback interface that is free now.

    Another process may take it before the caller does: retry, or let a store choose its own port with port 0, or
    rendezvous over a file.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.LOOPBACK, 0))
        return listener.getsockname()[1]
