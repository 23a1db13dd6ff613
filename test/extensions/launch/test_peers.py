"""How launched processes find rank 0, which ones are rejected, and how little traffic an idle rank causes.

The launcher's store is a dictionary here. The processes of other ranks are threads of this process.
"""

import contextlib
import dataclasses
import io
import json
import resource
import select
import socket
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from torch_fsdp_tests.common_utils import TestCase, find_free_port, run_tests
from torch_fsdp_tests.dispatch import main
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.runtests import RunTests, Selection
from torch_fsdp_tests.extensions.launch import peers, worker
from torch_fsdp_tests.extensions.launch.launcher import Launch
from torch_fsdp_tests.extensions.launch.peers import Hello, Peers
from torch_fsdp_tests.extensions.launch.workers import LaunchFailure, Workers
from torch_fsdp_tests.processes import messages, system
from torch_fsdp_tests.processes.messages import Connection

MANY = 64  # ranks
LEAST = 0.3  # seconds in which a process that sends its hello must be accepted


class Store(dict[str, str]):
    """The methods of the launcher's store that the suite uses."""

    def set(self, key: str, value: str) -> None:
        self[key] = value


class PeersCase(TestCase):
    def setUp(self):
        super().setUp()
        self.store = Store()
        mock.patch.object(peers, "open_store", lambda launch, serve=False: self.store).start()
        self.addCleanup(mock.patch.stopall)

    def launch(self, rank: int, size: int = 3) -> Launch:
        return Launch(rank, size, rank, "127.0.0.1", 1, one_host=True)

    def close_later(self, made: Peers) -> Peers:
        def close() -> None:
            made._listener.close()
            made._selector.close()
            for peer in made.of_rank.values():
                peer.connection.close()

        self.addCleanup(close)
        return made

    def workers(self, size: int = 3) -> Workers:
        made = Workers(self.launch(0, size))
        self.close_later(made._peers)
        return made


class TestPendingConnections(PeersCase):
    """Without it, any program that finds the port could join a launch as a rank, or delay its start."""

    def setUp(self):
        super().setUp()
        self.peers = self.close_later(Peers(self.launch(0), [worker.Signalled]))
        self.address, self.port, self.secret = json.loads(next(iter(self.store.values())))

    def pending(self) -> socket.socket:
        end = socket.create_connection((self.address, self.port), timeout=10)
        self.addCleanup(end.close)
        return end

    def hello(self, **fields: Any) -> bytes:
        known: dict[str, Any] = {"secret": self.secret, "rank": 1, "local_rank": 1, "host": "a", "pid": 1, "clock": 0.0}
        return messages.encode(Hello(**known | fields)) + b"\n"

    def gather(self, *ranks: int, seconds: float = LEAST) -> list[int]:
        return self.peers.gather(ranks, time.monotonic() + seconds)

    def is_closed(self, end: socket.socket) -> bool:
        try:
            return end.recv(1) == b""
        except ConnectionError:
            return True

    def test_rank_0_serves_the_store_if_the_launcher_serves_none(self):
        launch = dataclasses.replace(self.launch(0), port=find_free_port())
        mock.patch.stopall()
        self.close_later(Peers(launch, [worker.Signalled]))
        rank_0, _ = peers.join(dataclasses.replace(launch, rank=1), [])
        rank_0.close()

    def test_only_the_loopback_interface_listens_where_all_are_on_one_machine(self):
        self.assertEqual(self.peers._listener.getsockname()[0], "127.0.0.1")

    def test_peer_with_the_secret_is_accepted(self):
        rank_0, _ = peers.join(self.launch(1), [])
        self.addCleanup(rank_0.close)
        self.assertEqual(self.gather(1), [])
        self.assertEqual(self.peers.of_rank[1].hello.local_rank, 1)
        rank_0.send(worker.Signalled(15))
        (message,) = self.peers.of_rank[1].connection.arrived()
        self.assertEqual(message.signal, 15)

    def test_peer_without_the_secret_is_refused(self):
        greetings = (
            self.hello(secret="guessed"),
            self.hello(rank=0),
            self.hello(rank=3),
            self.hello(secret="\u00e9"),
            b"GET / HTTP/1.1\n",
            b'["Hello", {}]\n',
            b'["Signalled", {"signal": 9}]\n',
            b"x" * (peers.HELLO_SIZE + 1),  # more than a hello takes
        )
        ends_of_others = [self.pending() for _ in greetings]
        for end, greeting in zip(ends_of_others, greetings, strict=True):
            end.sendall(greeting)
        self.assertEqual(self.gather(1), [1])
        for end, greeting in zip(ends_of_others, greetings, strict=True):
            self.assertTrue(self.is_closed(end), greeting)

    def test_second_connection_of_a_rank_is_refused(self):
        first, second = self.pending(), self.pending()
        for end in (first, second):
            end.sendall(self.hello())
            self.gather(1)
        self.assertEqual(self.gather(1, 2), [2])
        self.assertTrue(self.is_closed(second))

    def test_silent_connections_delay_nobody_and_are_closed(self):
        mock.patch.object(peers, "HELLO_LIMIT", 2.0).start()
        silent = [self.pending() for _ in range(20)]
        self.assertEqual(self.gather(1), [1])
        self.pending().sendall(self.hello())
        began = time.monotonic()
        self.assertEqual(self.gather(1, seconds=10), [])
        self.assertLess(time.monotonic() - began, peers.HELLO_LIMIT / 2)
        self.gather(2, seconds=peers.HELLO_LIMIT + LEAST)
        self.assertTrue(all(self.is_closed(end) for end in silent))

    def test_an_older_connection_makes_room(self):
        with mock.patch.object(peers, "MOST_PENDING", 2):
            ends = []
            for _ in range(3):
                ends.append(self.pending())
                self.gather(1, seconds=0.1)
            self.assertTrue(self.is_closed(ends[0]))
            ends[1].sendall(self.hello())
            self.assertEqual(self.gather(1, seconds=10), [])


class TestDismissal(PeersCase):
    """Without it, a run that is rejected could end with another status at each rank, or leave ranks that wait."""

    def test_agents_that_connect_late_leave_with_the_status_of_rank_0(self):
        workers = self.workers()
        first, _ = peers.join(self.launch(1), worker.ORDERS)
        dismissing = threading.Thread(target=workers.dismiss, args=[ExitStatus.USAGE_ERROR])
        dismissing.start()
        last, _ = peers.join(self.launch(2), worker.ORDERS)
        dismissing.join()
        for end in (first, last):
            select.select([end], [], [], 10)
            self.assertEqual(list(end.arrived()), [peers.Dismiss(2)])
            end.close()


class TestRefusal(PeersCase):
    """Without it, the machines of a launch could run different code."""

    @staticmethod
    def answer(end: Connection, machine: worker.Machine) -> None:
        """Answer as a worker does before the first file."""
        end.receive()
        end.send(machine)

    def test_machines_that_differ_are_named_before_the_first_test(self):
        folder = Path(__file__).parent
        own = worker.describe(folder, "cpu")
        suite = own.suite | {"torch_fsdp_tests/processes/system.py": "another"}
        del suite["torch_fsdp_tests/inductor_utils.py"]
        machines = [own, dataclasses.replace(own, suite=suite), dataclasses.replace(own, torch="1.0")]
        workers = self.workers(4)
        for rank, machine in enumerate(machines, 1):
            end, _ = peers.join(self.launch(rank, 4), worker.ORDERS)
            self.addCleanup(end.close)
            threading.Thread(target=self.answer, args=[end, machine], daemon=True).start()
        with self.assertRaises(LaunchFailure) as problem:
            workers.gather(RunTests(Selection(folder, folder)), "cpu")
        name = socket.gethostname()
        files = "torch_fsdp_tests/inductor_utils.py is missing, torch_fsdp_tests/processes/system.py differs"
        expected = [
            "the machines of the launch differ:",
            f"rank 2: the suite on {name}: {files}",
            f"rank 3: torch 1.0 on {name}, and torch {own.torch} at rank 0 on {name}",
        ]
        self.assertEqual(str(problem.exception).split("\n  "), expected)

    def test_rank_0_that_cannot_listen(self):
        """The run ends with one sentence and status 2, before it looks at its arguments."""
        launch = mock.patch("torch_fsdp_tests.extensions.launch._find", lambda _: self.launch(0))
        listen = mock.patch(
            "torch_fsdp_tests.extensions.launch.workers.Peers", mock.Mock(side_effect=OSError("no port"))
        )
        with launch, listen, contextlib.redirect_stderr(io.StringIO()) as err:
            self.assertEqual(main.main(["-i", "test_x"], Path()), ExitStatus.USAGE_ERROR)
        self.assertRegex(err.getvalue(), r"\A.*: the other processes of the launch cannot be reached: no port\n\Z")

    def test_changed_file_changes_the_digest_of_the_suite(self):
        with tempfile.TemporaryDirectory() as name:
            before = worker.describe(Path(name), "cpu")
            Path(name, "test_x.py").touch()
            after = worker.describe(Path(name), "cpu")
        self.assertEqual(after.suite.keys() - before.suite.keys(), {"test/test_x.py"})
        self.assertEqual(dataclasses.replace(before, suite=after.suite, facts=after.facts), after)


class TestAddress(PeersCase):
    """Without it, the other machines could get an address that they cannot reach."""

    def test_interface_that_the_user_names_gives_the_address(self):
        launch = dataclasses.replace(self.launch(0), address="192.0.2.1", one_host=False)  # no machine has this address
        with mock.patch.dict("os.environ", {peers.INTERFACE_VARIABLE: system.loopback_interface()}):
            self.assertEqual(peers.own_address(launch), system.LOOPBACK)


class TestIdleRanks(PeersCase):
    """Without it, a launch of a thousand ranks could fail for lack of open files, or be slowed by idle ranks."""

    def run_file(self, size: int) -> dict[int, int]:
        """The number of bytes between rank 0 and each other rank for a file in which one test needs two ranks."""
        workers = self.workers(size)
        with ThreadPoolExecutor(size) as threads:
            launches = [self.launch(rank, size) for rank in range(1, size)]
            joining = {launch.rank: threads.submit(peers.join, launch, worker.ORDERS) for launch in launches}
            workers.wait_for_all()
        folder = Path("/checkout/test")
        run = RunTests(Selection(folder, folder))
        workers.begin(run, "distributed/test_x", {"TORCH_FSDP_TESTS_SEED": "1234"})
        workers.call([1])
        workers.end()
        traffic = {}
        for rank, joined in joining.items():
            end, _ = joined.result()
            orders = list(end.arrived())
            traffic[rank] = sum(len(messages.encode(order)) for order in orders)
            if orders:
                self.assertEqual([type(order) for order in orders], [worker.StartFile, worker.EndFile])
                for answer in (worker.PartEnded(1, 0, ""), worker.PartOver(1)):
                    traffic[rank] += len(messages.encode(answer))
                    end.send(answer)
                while rank in workers.busy:
                    workers.on_message(rank)
            end.close()
        return traffic

    def test_a_thousand_ranks(self):
        """They need more open files than a process may have by default, and select() rejects such descriptors."""
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        self.addCleanup(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
        try:
            system.allow_open_files(4096)  # both ends of each connection are in this process
        except OSError as error:
            self.skipTest(str(error))
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limits[1]))
        self.assertEqual([rank for rank, count in self.run_file(1024).items() if count], [1])

    def test_too_few_open_files(self):
        words = "the limit of open files is 4096, but 4097 are needed; raise it with ulimit -Hn 4097"
        with mock.patch("resource.getrlimit", lambda _: (1024, 4096)), self.assertRaisesRegex(OSError, words):
            system.allow_open_files(4097)

    def test_a_file_of_two_ranks_says_nothing_to_the_others(self):
        few, many = self.run_file(8), self.run_file(MANY)
        self.assertEqual([rank for rank, count in many.items() if count], [1])
        self.assertLess(many[1], 10_000)
        self.assertEqual(few[1], many[1])


if __name__ == "__main__":
    run_tests()
