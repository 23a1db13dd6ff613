"""Messages between processes: typed values over a socket, and errors for other data."""

import dataclasses
import functools
import os
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from runs import INPUTS, ROOT, run_beside

from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.processes import messages
from torch_fsdp_tests.processes.messages import Connection, MessageError
from torch_fsdp_tests.ranks import protocol
from torch_fsdp_tests.verdict import Phase, RankResult, State, Subtest


@dataclasses.dataclass(frozen=True)
class Inner:
    numbers: tuple[int, ...]
    kind: State


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    named: dict[str, Inner]
    maybe: Inner | None
    seconds: float
    names: frozenset[str]
    folder: Path
    others: tuple[Path, ...] | None
    anything: Any


@dataclasses.dataclass(frozen=True)
class Files:
    descriptors: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plain:
    text: str


SILENT = 3  # seconds
INNER = Inner((1, 2), State.SKIPPED)


@instantiate_parametrized_tests
class TestMessages(TestCase):
    """Without it, a damaged message could count as a rank's result, or block the process that reads it."""

    def pair(self, *expected: type) -> tuple[Connection, Connection]:
        self.ends = ours, theirs = socket.socketpair()
        for end in self.ends:
            end.settimeout(10)
            self.addCleanup(end.close)
        return Connection(ours, expected), Connection(theirs, expected)

    @parametrize(
        "message",
        [
            Outer(INNER, {"a": INNER}, None, 1.5, frozenset("ab"), Path("a b"), (Path("x"),) * 2, {"a": [1, None]}),
            Plain("line\nof \udcff and \u2603"),
            RankResult.report(
                3, State.FAILED, phase=Phase.BODY, text="text", seconds=0.5, subtests=(Subtest("(a=1)", "why"),)
            ),
            protocol.Started(1, (0, 1), "here", (None, 17), 0.25),
            protocol.Continue(),
        ],
        name_fn=lambda message: type(message).__name__,
    )
    def test_comes_back_as_it_was(self, message):
        ours, other = self.pair(Files, type(message))
        ours.send(message)
        self.assertEqual(vars(other.receive()), vars(message))

    def test_files_come_with_their_own_message(self):
        ours, other = self.pair(Files, Plain)
        for text in (b"first", b"second"):
            read, write = os.pipe()
            os.write(write, text)
            os.close(write)
            ours.send(Plain("before"))
            ours.send(Files((read,)))
            os.close(read)
        for text in (b"first", b"second"):
            self.assertEqual(other.receive(), Plain("before"))
            files = other.receive()
            assert isinstance(files, Files)
            (read,) = files.descriptors
            self.assertEqual(os.read(read, 100), text)
            os.close(read)

    def test_sending_to_a_closed_connection_does_nothing(self):
        ours, other = self.pair(Plain)
        ours.tell(Plain("first"))
        self.assertEqual(other.receive(), Plain("first"))
        other.close()
        ours.tell(Plain("second"))
        with self.assertRaises(OSError):
            ours.send(Plain("second"))

    def test_reading_available_messages_never_waits(self):
        ours, other = self.pair(Plain)
        self.ends[1].settimeout(None)
        whole = messages.encode(Plain("x" * 100_000)) + b"\n"
        self.ends[0].sendall(messages.encode(Plain("first")) + b"\n" + whole[:70_000])
        self.assertEqual(list(other.arrived()), [Plain("first")])
        self.assertEqual(list(other.arrived()), [])
        self.ends[0].sendall(whole[70_000:])
        self.assertEqual([len(message.text) for message in other.arrived()], [100_000])
        self.assertFalse(other.closed)
        ours.close()
        self.assertEqual(list(other.arrived()), [])
        self.assertTrue(other.closed)
        self.assertIsNone(other.receive())

    @parametrize(
        "line,words",
        [
            (b"garbage", "this is not a message: b'garbage'"),
            (b"[1, 2, 3]", "this is not a message"),
            (b'["Unknown", {}]', r"type 'Unknown' was not expected here \(expected: Plain, Outer\)"),
            (b'["Plain", {"text": 1}]', "not a valid message of the type Plain.*1 is not of the type str"),
            (b'["Plain", {}]', "not a valid message of the type Plain.*text"),
            (b'["Plain", {"text": "", "more": 1}]', "not a valid message of the type Plain.*more"),
            (b'["Outer", {"inner": 3}]', "not a valid message of the type Outer"),
        ],
        name_fn=lambda line, words: "".join(filter(str.isalnum, line.decode())),
    )
    def test_invalid_message_is_an_error_with_its_text(self, line, words):
        _, other = self.pair(Plain, Outer)
        self.ends[0].sendall(line + b"\n")
        with self.assertRaisesRegex(MessageError, words):
            other.receive()

    def test_files_that_did_not_come_are_an_error(self):
        _, other = self.pair(Files)
        self.ends[0].sendall(messages.encode(Files((7,))) + b"\n")
        with self.assertRaisesRegex(MessageError, "Files arrived without its descriptors"):
            other.receive()


class TestSilence(TestCase):
    """Without it, ranks could wait forever for a machine that has lost its power or its network."""

    def test_a_silent_machine_is_known(self):
        """Also while data is not acknowledged: the kernel sends no keep-alive probes then."""
        command = functools.partial(run_beside, ROOT, INPUTS / "silent.py", SILENT)
        with ThreadPoolExecutor() as threads:
            both = [threads.submit(command), threads.submit(command, "data")]
        for done in (each.result() for each in both):
            if "no network of its own" in done.stderr:
                self.skipTest(done.stderr.strip())
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertLess(float(done.stdout), 3 * SILENT)


if __name__ == "__main__":
    run_tests()
