"""The process of a test file: starts it as a child, reads its events, and judges it. Only the caller waits for it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch_fsdp_tests.dispatch import run_file
from torch_fsdp_tests.dispatch.atomic import naming
from torch_fsdp_tests.dispatch.file_result import Attempt, EndKind, ProcessEnd, worst_of_each
from torch_fsdp_tests.dispatch.plan import Job
from torch_fsdp_tests.dispatch.run_file import Orders
from torch_fsdp_tests.processes import messages, system
from torch_fsdp_tests.processes.children import Child, Children
from torch_fsdp_tests.processes.program_server import Program
from torch_fsdp_tests.verdict import FILE_ITSELF, Phase, Scope, State, TestResult, first_few, stream

GRACE = 5.0  # seconds between the signal that requests stacks, and the kill
OUTPUT_SHOWN = 1 << 20  # bytes of a file's output in a report; longer output is cut in the middle
NO_TESTS_STATUS = 5  # the exit status of unittest itself since Python 3.12


class TestProcess:
    """A running process, and what it has reported so far."""

    __test__ = False

    child: Child  # after it has been started

    def __init__(self, job: Job, assigned: tuple[int, ...], began: float, limit: float, children: Children) -> None:
        self.job, self.assigned, self.began, self.limit = job, assigned, began, limit
        self._children = children
        self.directory = children.make_directory()
        self.running: str | None = None
        self._running_since = time.monotonic()
        self.reported_slow_at: float | None = None  # when it was last reported as slow
        self.results: list[TestResult] = []
        self.facts: dict[str, Any] = {}
        self._reader = stream.Reader()
        self._announced = stream.Announced()
        self._started: set[str] = set()
        self._notes: dict[str | None, list[str]] = {}
        self._test_facts: dict[str | None, dict[str, Any]] = {}
        self._broken: stream.FileBroken | None = None
        self.ranks: set[int] = set()  # that its tests have needed so far
        self._over = False
        self._stop: ProcessEnd | None = None

    def start(self, orders: Orders, environment: Mapping[str, str], measure: Sequence[str] = ()) -> None:
        """Start it. Raises ``OSError`` or ``SubprocessError`` if that fails."""
        orders_path = self.directory / "orders.json"
        with naming(orders_path):
            orders_path.write_bytes(messages.encode(orders))
        path = orders.test_directory / f"{orders.part.name}.py"
        self._events, write = os.pipe()
        os.set_blocking(self._events, False)
        try:
            program = Program(
                [*measure, "-m", run_file.__name__],
                [str(path), str(orders_path), "--", *orders.arguments],
                environment,
                cwd=orders.test_directory,
                kept={stream.DESCRIPTOR_VARIABLE: write},
            )
            self.child = self._children.start(program, self.directory, time.monotonic() + self.limit, GRACE)
        except BaseException:
            os.close(self._events)
            raise
        finally:
            os.close(write)
        self._children.watch(self._events, self._listen)

    def _listen(self) -> bool:
        """Read the messages of the process. Returns False if no more will come."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._events, 1 << 16):
                for message in self._reader.feed(data):
                    self._take(message)
            return False
        return True

    def _take(self, message: stream.Message) -> None:
        match message:
            case stream.Announced():
                self._announced += message
                self._over = False
            case stream.TestStarted(test):
                self._started.add(test)
                self.running, self._running_since = test, time.monotonic()
            case TestResult():
                self._take_end(message)
            case stream.Note(test, text):
                self._notes.setdefault(test, []).append(text)
            case stream.Facts(test, facts):
                about = self.facts if test is None else self._test_facts.setdefault(test, {})
                about.update(facts)
            case stream.FileBroken():
                self._broken = message
            case stream.EventsOver():
                self._over = True
            case stream.NeedsRanks(ranks):
                self.ranks |= set(ranks)

    def _take_end(self, result: TestResult) -> None:
        name = result.name
        is_known = result.outcome.may_be_known and name in self._announced.known
        taken = dataclasses.replace(
            result,
            outcome=State.KNOWN_FAILURE if is_known else result.outcome,
            notes=tuple(self._notes.pop(name, ())),
            facts=self._test_facts.pop(name, {}),
        )
        self.results.append(dataclasses.replace(taken, reason=taken.reason or taken.skipped_in_part))
        self.running = None

    def stop(self, why: ProcessEnd) -> None:
        """Ask the process to show its stacks and leave."""
        if self.child.ask_to_end():
            self._stop = why

    def conclude(
        self, wait_status: int, now: float, extra_notes: Sequence[str] = (), extra_output: str = ""
    ) -> Attempt:
        """Judge the process, which is gone, by its reports and how it ended. Release everything that belongs to it."""
        leftovers = self._children.clean_up(self.child)
        self._listen()
        self._children.ignore(self._events)
        os.close(self._events)
        if self.child.reached_limit:
            self._stop = ProcessEnd(EndKind.TIMED_OUT, self.limit)
        if self.child.used is not None:
            self.facts["used"] = dataclasses.asdict(self.child.used)
        end = system.how_ended(wait_status)
        ending = self._stop or ProcessEnd(EndKind.KILLED if isinstance(end, str) else EndKind.EXITED, end)
        notes = [note for of_one in self._notes.values() for note in of_one]
        notes += [*(f"the process {command} was left running, and was killed" for command in leftovers), *extra_notes]
        if self._reader.garbage:
            notes.append(f"{len(self._reader.garbage)} lines on the event stream could not be read")
        try:
            output = system.head_and_tail(self.child.output, OUTPUT_SHOWN)
        except OSError as error:
            output = f"the output cannot be read: {error}"
        shutil.rmtree(self.directory, ignore_errors=True)  # not only at the end: a run may have thousands of processes
        output = "\n".join(filter(None, (output.rstrip("\n"), extra_output)))
        tests = worst_of_each([*self.results, *self._blame(ending, output), *self._not_reached(ending)])
        if twice := [name for name, times in collections.Counter(self._announced.tests).items() if times > 1]:
            notes.append(f"several tests have the same id, of which the worst outcome counts: {first_few(twice)}")
        return Attempt(
            job=self.job,
            ending=ending,
            tests=tuple(tests),
            began=self.began,
            ended=now,
            assigned=self.assigned,
            output=output,
            notes=tuple(notes),
            facts=self.facts,
            announced=self._announced,
        )

    def _blame(self, ending: ProcessEnd, output: str) -> list[TestResult]:
        """Return a result for a problem that no test's own verdict covers, or nothing if there was no problem."""
        if self._announced.unknown and not self._announced.tests:
            return []  # the run reports which names are wrong
        state = State.TIMED_OUT if ending.how is EndKind.TIMED_OUT else State.CRASHED
        if self.running is not None:
            state = State.NOT_RUN if ending.how is EndKind.STOPPED else state
            seconds = round(time.monotonic() - self._running_since, 3)
            reason = f"did not finish: the process {ending.in_words()}"
            return [TestResult(state, name=self.running, seconds=seconds, reason=reason, text=_tail(output))]
        if ending.how is EndKind.STOPPED:
            return []
        if self._broken is not None:
            return [_about_file(State.ERROR, self._broken.reason, self._broken.text)]
        if not self._over:
            when = "before its tests were known" if not self._announced.tests else "between tests"
            return [_about_file(state, f"the process {ending.in_words()} {when}", _tail(output))]
        failed = any(test.outcome.is_bad or test.outcome is State.KNOWN_FAILURE for test in self.results)
        # If a fixture failed, perhaps none of the announced tests ran.
        fine = {0, 1, NO_TESTS_STATUS} if failed else {0} if self._announced.tests else {0, NO_TESTS_STATUS}
        if ending.how is EndKind.EXITED and ending.detail in fine:
            return []
        return [_about_file(state, f"the process {ending.in_words()} after its tests", _tail(output))]

    def _not_reached(self, ending: ProcessEnd) -> Iterator[TestResult]:
        seen = {result.name for result in self.results} | {self.running}
        # What a failed fixture sets up: a class, or the whole file, which has no class name.
        unready = {result.class_name for result in self.results if result.scope is not Scope.TEST}
        earlier_cause = "the process never reached it" if self._over else f"the process {ending.in_words()} before it"
        for name in dict.fromkeys(name for name in self._announced.tests if name not in seen):
            cls = name.rpartition(".")[0]
            why = f"the set-up of {cls} failed" if unready & {cls, ""} else earlier_cause
            if self._over and name in self._started:
                yield TestResult(State.HARNESS_ERROR, "its outcome was not reported", Phase.HARNESS, name=name)
            else:
                yield TestResult(State.NOT_RUN, f"not run: {why}", name=name)


def _tail(output: str) -> str:
    whole, lines = output.rstrip().splitlines(), 60
    left_out = [f"... {len(whole) - lines} lines left out ..."] if len(whole) > lines else []
    return "\n".join([*left_out, *whole[-lines:]])


def _about_file(state: State, reason: str, text: str) -> TestResult:
    return TestResult(state, reason, name=FILE_ITSELF, scope=Scope.FILE, text=text)


def not_started(job: Job, why: str, now: float) -> Attempt:
    ending = ProcessEnd(EndKind.NOT_STARTED, why)
    reason = f"the process {ending.in_words()}"
    blame = TestResult(State.HARNESS_ERROR, reason, Phase.HARNESS, name=FILE_ITSELF, scope=Scope.FILE)
    return Attempt(job=job, ending=ending, tests=(blame,), began=now, ended=now)
