"""Tries mutants, several at a time. Each one has its own processes, which run tests until one kills it."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import shutil
import time
from argparse import Namespace
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch_fsdp_tests import installation, settings
from torch_fsdp_tests.dispatch import devices
from torch_fsdp_tests.dispatch.file_process import TestProcess
from torch_fsdp_tests.dispatch.file_result import Attempt
from torch_fsdp_tests.dispatch.plan import Job, ShardedTest, TestRun
from torch_fsdp_tests.dispatch.run_file import Orders
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.processes.children import Children
from torch_fsdp_tests.reach import Reached
from torch_fsdp_tests.reach.order import BATCH, batches, within
from torch_fsdp_tests.tools.mutants import hook
from torch_fsdp_tests.tools.mutants.mutant import Tests
from torch_fsdp_tests.tools.mutants.outcomes import MutantOutcome, MutantResult
from torch_fsdp_tests.tools.mutants.sites import REIMPORTED, RELATED, Mutant, is_in, module_of
from torch_fsdp_tests.verdict import Scope, State, TestResult

TEST_LIMIT = 20.0  # seconds for one test, in addition to its recorded time
FILE_LIMIT = 60.0  # seconds for a process, in addition to the recorded times of its tests
FACTOR = 10.0  # on the recorded times, because a busy machine is slower than the one that recorded them
PROBED = 16  # tests, one of which has to run a statement that the map does not have, before others are tried
WORTH_A_SERVER = 3  # mutants in a row; for fewer, separate interpreters start faster
assert TEST_LIMIT < FILE_LIMIT


@dataclasses.dataclass(frozen=True)
class Work:
    """Some tests of a file, for a process that is the mutant with this id. With an empty id nothing is changed."""

    id: str
    tests: tuple[Reached, ...]  # all tests are of one file

    @property
    def file(self) -> str:
        return self.tests[0].file


Story = Generator[Work, Attempt, MutantResult]


class Trials:
    """Tries mutants in one thread. Use it only once."""

    def __init__(self, options: Namespace, device: str, tests: Tests, argued: Mapping[str, Mapping[str, str]]) -> None:
        """``options`` are those of the command, ``device`` is the type of the device under test, and ``argued`` has the
        equivalent mutants, by id.
        """
        self._options, self._device, self._tests, self._argued = options, device, tests, argued
        # The server has imported torch, so it can only forget packages that ``import torch`` itself does not need.
        self._forgotten = [each for each in options.packages if each not in RELATED or each in REIMPORTED]
        self._run = RunTests(options.test_directory, options.test_directory, fail_fast=True)
        seed = {settings.SEED_VARIABLE: str(self._run.seed)}
        self.environment = {**os.environ, **installation.on_path(os.environ), **seed}
        self._running: dict[int, tuple[TestProcess, Story]] = {}
        self._fit: dict[tuple[str, str], bool] = {}  # whether a test passes without a change, by file and name

    def judge(self, mutants: Iterable[Mutant]) -> Generator[MutantResult]:
        """Yield each mutant's finding as soon as it is known. If the caller stops, all running processes are ended."""
        waiting = collections.deque(mutants)
        at_a_time = self._options.jobs
        may_fork = self._device == devices.CPU and system.can_fork()
        with Children("mutants-") as self._children:
            if may_fork and self._children.adopts and len(waiting) > WORTH_A_SERVER * at_a_time:
                program = ("-m", "torch_fsdp_tests.tools.mutants.server", ",".join(self._forgotten))
                self._children.start_server(program, self.environment, self._run.test_directory)
                self._children.wait_for_server()  # a separate interpreter would take longer
            while waiting or self._running:
                while waiting and len(self._running) < at_a_time:
                    yield from self._go_on(self._story(waiting.popleft()), None)
                yield from self._wait()

    def _go_on(self, story: Story, attempt: Attempt | None) -> Iterator[MutantResult]:
        """Pass the result of the last work to a mutant's generator, and start its next work."""
        try:
            work = next(story) if attempt is None else story.send(attempt)
        except StopIteration as over:
            yield over.value
            return
        process = self._start(work)
        self._running[process.child.pid] = process, story

    def _story(self, mutant: Mutant) -> Story:
        """A generator that yields a mutant's work, and returns its finding."""
        finding = MutantResult(
            mutant.id, mutant.module, mutant.family, mutant.operator, MutantOutcome.UNDECIDED, str(mutant.path)
        )
        code = self._tests.code(mutant)
        finding = dataclasses.replace(finding, line=mutant.line, change=mutant.diff, code=code)
        argued = self._argued.get(mutant.id)
        if argued is not None and (argued["change"], argued["code"]) == (finding.change, code):
            return dataclasses.replace(finding, outcome=MutantOutcome.EQUIVALENT, why=argued["why"])
        executed: list[str] = []
        seconds = 0.0
        reaching = self._tests.for_mutant(mutant)
        chosen = within(self._options.budget, reaching)
        for batch in batches(chosen, BATCH if self._may_fork(mutant.id) else 2 * BATCH):
            while batch:
                attempt = yield Work(mutant.id, batch)
                seconds += attempt.seconds
                executed += [f"{batch[0].file}::{test.name}" for test in attempt.tests if test.outcome.is_executed]
                finding = dataclasses.replace(finding, seconds=round(seconds, 1), executed=len(executed))
                if (problem := self._problem(mutant, attempt)) is not None:
                    return dataclasses.replace(finding, why=problem)
                bad = next((test for test in attempt.tests if test.outcome.is_bad), None)
                if bad is None:
                    break
                if (yield from self._passes_unchanged(batch, bad)):
                    by = f"{batch[0].file}::{bad.name}"
                    how, why = bad.outcome.value, bad.reason
                    return dataclasses.replace(finding, outcome=MutantOutcome.KILLED, by=by, how=how, why=why)
                # The test also fails without the change, so it proves nothing. The tests after it still have to run.
                batch = _after(batch, bad, attempt)
            is_run = self._tests.has_statement(mutant) or self._reached(mutant.id).exists()
            if not is_run and len(executed) >= PROBED:
                why = f"none of the first {len(executed)} tests of its function runs the statement"
                return dataclasses.replace(finding, outcome=MutantOutcome.NOT_REACHED, why=why, tests=tuple(executed))
        left_out = f", of the first {len(chosen)} of {len(reaching)}" if len(chosen) < len(reaching) else ""
        if not executed:
            why = "no test runs the statement" if not reaching else "the tests of its function are skipped here"
            return dataclasses.replace(finding, outcome=MutantOutcome.NOT_REACHED, why=why)
        if not self._reached(mutant.id).exists():
            why = f"none of the tests runs the statement{left_out}"
            return dataclasses.replace(finding, outcome=MutantOutcome.NOT_REACHED, why=why, tests=tuple(executed))
        why = f"of {len(reaching)} tests the first {len(chosen)} ran" if left_out else ""
        return dataclasses.replace(finding, outcome=MutantOutcome.SURVIVED, why=why, tests=tuple(executed))

    def _problem(self, mutant: Mutant, attempt: Attempt) -> str | None:
        """The reason why an attempt says nothing about the mutant, or None."""
        broken = self._reached(mutant.id).with_suffix(hook.BROKEN)
        if broken.exists():
            return broken.read_text(encoding="utf-8")
        ours = [test for test in attempt.tests if test.outcome is State.HARNESS_ERROR]
        return f"{ours[0].name}: {ours[0].reason}" if ours else None

    def _passes_unchanged(self, batch: Sequence[Reached], bad: TestResult) -> Generator[Work, Attempt, bool]:
        """Whether a failed test passes without the change in the same kind of process. Each test is tried once."""
        of_test = tuple(test for test in batch if test.test == bad.name) if bad.scope is Scope.TEST else ()
        key = batch[0].file, bad.name if of_test else ",".join(test.test for test in batch)
        if key not in self._fit:
            attempt = yield Work("", of_test or tuple(batch))
            self._fit[key] = not attempt.is_bad
        return self._fit[key]

    def _reached(self, id: str) -> Path:
        """The file that is created when a mutant's changed code runs."""
        return self._children.directory / f"{id.translate(str.maketrans(':<>', '...'))}.reached"

    def _start(self, work: Work) -> TestProcess:
        names = tuple(test.test for test in work.tests)
        job = Job(ShardedTest(TestRun(work.file, frozenset(names), order=names)), devices=0)
        longest = max(test.seconds for test in work.tests)
        together = sum(test.seconds for test in work.tests)
        test_limit = self._options.patience * (TEST_LIMIT + FACTOR * longest)
        limit = self._options.patience * (FILE_LIMIT + FACTOR * together)
        process = TestProcess(job, (), time.monotonic(), limit, self._children)
        environment = {
            **self.environment,
            settings.TIMEOUT_VARIABLE: str(math.ceil(test_limit)),
            **(hook.environment(work.id, self._reached(work.id), self.environment) if work.id else {}),
        }
        orders = Orders(os.getpid(), self._run, job.part, device=self._device)
        process.start(orders, environment, may_fork=self._may_fork(work.id))
        return process

    def _may_fork(self, id: str) -> bool:
        """Whether the server can fork a process of this mutant. Otherwise it is a new interpreter, which costs more."""
        return not id or any(is_in(package, module_of(id)) for package in self._forgotten)

    def _wait(self) -> Iterator[MutantResult]:
        """Sleep until a process ends or reaches its limit, and continue with its mutant."""
        if not self._running:
            return
        for child, status in self._children.wait():
            process, story = self._running.pop(child.pid)
            attempt = process.conclude(status, time.monotonic())
            shutil.rmtree(child.directory, ignore_errors=True)
            yield from self._go_on(story, attempt)


def _after(batch: Sequence[Reached], bad: TestResult, attempt: Attempt) -> tuple[Reached, ...]:
    """The tests of a batch after the one that failed. Empty if the failure is not about one test."""
    if bad.scope is not Scope.TEST:
        return ()
    done = {test.name for test in attempt.tests if test.outcome is not State.NOT_RUN}
    return tuple(test for test in batch if test.test not in done)
