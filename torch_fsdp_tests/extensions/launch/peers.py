"""How the processes that a launcher made find the process of rank 0, and introduce themselves.

Rank 0 listens, and writes its address and a secret into the launcher's store, where the others read them. They connect,
all at the same time, and send a :class:`Hello` with the secret. Then both sides use the connection freely. They see at
once when it ends; a store would have to be polled. A peer that is silent for
:data:`~torch_fsdp_tests.processes.messages.SILENCE_LIMIT` seconds also counts as lost.

Any process can connect to the port. Rank 0 reads at most :data:`HELLO_SIZE` bytes from a pending connection, for at
most :data:`HELLO_LIMIT` seconds, and listens to at most :data:`MOST_PENDING` at a time. The messages are not encrypted,
like the launcher's store and the traffic between ranks. The secret keeps others out, but does not hide anything.
"""

from __future__ import annotations

import dataclasses
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Collection, Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch_fsdp_tests.extensions.launch.launcher import Launch
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.processes.messages import Connection, MessageError, watch_for_loss

if TYPE_CHECKING:
    import torch.distributed as dist

__unittest = True

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"  # gloo's own variable: the interface that leads to the other ranks
STORE_LIMIT = 120.0  # seconds for the launcher's store to answer
GATHER_LIMIT = 120.0  # seconds for all processes to connect; each has much to import first
HELLO_LIMIT = 5.0  # seconds for a new connection to introduce itself
HELLO_SIZE = 1 << 16  # the most bytes of an introduction
MOST_PENDING = 256  # connections without an introduction at a time; a new one replaces the oldest
OWN_FILES = 512  # what a process opens besides the connections to its peers, at most
_ELSEWHERE = "192.0.2.1"  # an address that is never assigned (RFC 5737); it shows where the default route leads


class NoWay(OSError):
    """No address is known at which other machines reach this one. The message says what to do."""


@dataclasses.dataclass(frozen=True)
class Hello:
    """A process introduces itself. ``clock`` is its ``time.time()`` less its ``time.monotonic()``."""

    secret: str
    rank: int
    local_rank: int
    host: str
    pid: int
    clock: float


@dataclasses.dataclass(frozen=True)
class Dismiss:
    """The run is over. Exit with this status, but not before rank 0's process is gone."""

    status: int


@dataclasses.dataclass
class Peer:
    """A process that has introduced itself."""

    hello: Hello
    connection: Connection
    is_local: bool  # on rank 0's machine

    @property
    def rank(self) -> int:
        return self.hello.rank

    def __str__(self) -> str:
        return f"the process of rank {self.rank} (id {self.hello.pid} on {self.hello.host})"


def clock() -> float:
    """Return what to add to this machine's ``time.monotonic()`` to get the time that all machines share."""
    return time.time() - time.monotonic()


def open_store(launch: Launch, serve: bool = False) -> dist.TCPStore:
    """Open the launcher's store. ``serve`` creates it if there is none. Raises torch's ``DistError`` in time."""
    import torch.distributed as dist

    return dist.TCPStore(
        launch.address,
        launch.port,
        is_master=serve and not launch.agent_store,
        timeout=timedelta(seconds=STORE_LIMIT),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _key(launch: Launch) -> str:
    return f"torch_fsdp_tests/{launch.attempt}/rank 0"


class Peers:
    """Rank 0's side. ``expected`` are the types of message that the others may send."""

    def __init__(self, launch: Launch, expected: Iterable[type]) -> None:
        system.allow_open_files(OWN_FILES + MOST_PENDING + 2 * launch.world_size)  # dismiss() doubles the connections
        self.launch = launch
        self.of_rank: dict[int, Peer] = {}  # peers that have connected
        self._expected = tuple(expected)
        self._pending: dict[Connection, float] = {}  # the deadline of each
        self.address = own_address(launch)
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self._listener = socket.create_server(
            (self.address, 0), family=family, backlog=launch.world_size + MOST_PENDING
        )
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._secret = secrets.token_hex(16)
        self._store = open_store(launch, serve=True)  # kept open: if the launcher serves no store, this process does
        place = (self.address, self._listener.getsockname()[1], self._secret)
        self._store.set(_key(launch), json.dumps(place))

    def gather(self, ranks: Collection[int], give_up: float) -> list[int]:
        """Wait for these ranks until ``give_up`` (of ``time.monotonic()``). Returns the missing ranks."""
        while absent := sorted(set(ranks) - self.of_rank.keys()):
            now = time.monotonic()
            if now >= give_up:
                return absent
            due = min([give_up, *self._pending.values()])
            for key, _ in self._selector.select(max(0.0, due - now)):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._receive(key.data)
            for pending, limit in list(self._pending.items()):
                if limit <= time.monotonic():
                    self._forget(pending)
        return []

    def _accept(self) -> None:
        try:
            end = self._listener.accept()[0]
        except OSError:
            return
        if len(self._pending) >= MOST_PENDING:
            self._forget(next(iter(self._pending)))
        end.setblocking(True)
        pending = Connection(end, [Hello], limit=HELLO_SIZE)
        watch_for_loss(end)
        self._pending[pending] = time.monotonic() + HELLO_LIMIT
        self._selector.register(pending, selectors.EVENT_READ, pending)

    def _receive(self, pending: Connection) -> None:
        """Read from a pending connection. Close it unless it sends a valid :class:`Hello` with the secret."""
        if pending not in self._pending:
            return
        try:
            hello = next(pending.arrived(), None)
        except MessageError:
            self._forget(pending)
            return
        if hello is None:
            if pending.closed:
                self._forget(pending)
            return
        known = secrets.compare_digest(hello.secret.encode(), self._secret.encode())
        if not known or hello.rank in self.of_rank or not 0 < hello.rank < self.launch.world_size:
            self._forget(pending)
            return
        self._selector.unregister(pending)
        del self._pending[pending]
        pending.expect(self._expected)
        self.of_rank[hello.rank] = Peer(hello, pending, pending.is_local)

    def _forget(self, pending: Connection) -> None:
        self._selector.unregister(pending)
        del self._pending[pending]
        pending.close()

    def dismiss(self, status: int) -> None:
        """Let all peers leave with this status, after this process: a launcher ends all when it sees one fail.

        The connections stay open until this process is gone, although the interpreter closes its sockets earlier.
        """
        for peer in self.of_rank.values():
            os.dup(peer.connection.fileno())
            peer.connection.tell(Dismiss(status))


def join(launch: Launch, expected: Iterable[type]) -> tuple[Connection, str]:
    """Connect another rank to rank 0. Returns the connection, and the name of its network interface, if known."""
    address, port, secret = json.loads(open_store(launch).get(_key(launch)))
    end = socket.create_connection((address, port), timeout=GATHER_LIMIT)
    end.settimeout(None)
    watch_for_loss(end)
    rank_0 = Connection(end, expected)
    rank_0.send(Hello(secret, launch.rank, launch.local_rank, socket.gethostname(), os.getpid(), clock()))
    return rank_0, system.interface_of(end.getsockname()[0])


def own_address(launch: Launch) -> str:
    """Return the address at which the other processes of the launch reach this one.

    If all processes are on one machine, it is the loopback address. Otherwise it is the address of the interface that
    the user names for gloo, or that leads to the store, or that has the default route.
    """
    if launch.one_host or system.is_loopback(launch.address):
        return "127.0.0.1"
    named = system.address_of(os.environ.get(INTERFACE_VARIABLE, "").partition(",")[0])
    if named:
        return named
    for goal in (launch.address, _ELSEWHERE):
        source = _source_towards(goal)
        if source and not system.is_loopback(source):
            return source
    raise NoWay(
        f"no address is known at which other machines can reach this one, because no network interface leads to "
        f"{launch.address}; name the interface in {INTERFACE_VARIABLE}"
    )


def _source_towards(goal: str) -> str:
    """Return the address from which this machine sends to ``goal``, or an empty string if it has no route."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(goal, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # this sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def in_time_of(peer: Peer, message: Any) -> Any:
    """Return a peer's message with its time ``at`` converted to this machine's clock."""
    return dataclasses.replace(message, at=message.at + peer.hello.clock - clock())
