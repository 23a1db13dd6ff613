"""What the three kinds of test cases with ranks have in common.

In the parent, the test method is replaced by one that waits for the ranks and turns their reports into one outcome. A
rank runs the test itself. ``setUp``, ``tearDown``, cleanups and class fixtures run once, in the parent.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
import sys
import threading
import time
import types
import unittest
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_fsdp_tests import extension, process_state, settings, world_sizes
from torch_fsdp_tests.common_distributed.requirements import requirements_of, skip_codes, skip_unless
from torch_fsdp_tests.common_distributed.subtests import run_subtests
from torch_fsdp_tests.common_utils import TestCase, absent_devices, defect_blocks
from torch_fsdp_tests.common_utils.testcase import is_ours, subtest_words
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.ranks import (
    Assignment,
    ProcessBaseline,
    RankGroup,
    RanksErred,
    RanksFailed,
    Verdict,
    capture,
    judge,
    register,
)
from torch_fsdp_tests.ranks.outcome import BODY_MARK, THEN_RAISED, enters_test
from torch_fsdp_tests.ranks.rank import open_outputs
from torch_fsdp_tests.settings import ConfigurationError
from torch_fsdp_tests.verdict import Phase, RankResult, Reason, State, Subtest, events, joined, kinds_of
from torch_fsdp_tests.verdict.events import Skipped
from torch_fsdp_tests.verdict.returned import check_returned

__unittest = True

try:
    TIMEOUT_DEFAULT = settings.timeout(os.environ)  # seconds per test
except ConfigurationError:  # run_tests() reports a bad value in a sentence; an import could only raise
    TIMEOUT_DEFAULT = settings.DEFAULT_TIMEOUT
TIMEOUT_OVERRIDE: dict[str, int] = {}  # seconds by test name, for the few that need more


def get_timeout(test_id: str) -> int:
    """The time limit for a test's ranks in seconds, counted from their fork. ``test_id`` is that of the test case.

    It is that of :data:`TIMEOUT_OVERRIDE`, or the default: that of the environment, unless a test file has set
    ``common_distributed.TIMEOUT_DEFAULT``. Differs from upstream's: the default is 120 and not 300, and both are read
    at each call. Raises :class:`~torch_fsdp_tests.settings.ConfigurationError` for an invalid
    ``DISTRIBUTED_TESTS_DEFAULT_TIMEOUT``.
    """
    package: Any = sys.modules[__package__]  # test files assign to its globals
    is_set = package.TIMEOUT_DEFAULT != TIMEOUT_DEFAULT
    default = package.TIMEOUT_DEFAULT if is_set else settings.timeout(os.environ)
    return min(package.TIMEOUT_OVERRIDE.get(test_id.split(".")[-1], default), settings.LONGEST_TIMEOUT)


def limit_of(test_id: str) -> int:
    """The seconds of :func:`get_timeout`, or of the function by which a test file has replaced it in the package."""
    package: Any = sys.modules[__package__]
    return package.get_timeout(test_id)


class _Tally(threading.local):
    """The subtests of the running test that ended in this rank, and how the test method ended.

    A rank may be a thread.
    """

    def __init__(self) -> None:
        self.subtests: list[Subtest] = []
        self.returned = False
        self.raised: BaseException | None = None

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Note how the block ends, which is the test method, or the method with its clean-ups."""
        try:
            yield
        except BaseException as error:
            self.raised = error
            raise
        self.returned, self.raised = True, None  # an override may have run the method again


_tally = _Tally()


def run_in_rank(rank: int, body: Callable[[], object], owner: type | Callable = TestCase) -> RankResult:
    """Run a test in a rank, count its subtests, and return its result with its ``torch_defect`` blocks.

    If all subtests of a test skipped, the test has skipped. Only ``SystemExit`` leaves this function: a rank that exits
    with 0 after its test method has passed, as some ``_run`` of vendors do, has passed. ``owner`` is the class of the
    test, or a function of its file.
    """
    _tally.__init__()  # type: ignore[misc]

    reasons: list[str] = []

    def counted() -> None:
        try:
            with absent_devices.skips(owner):
                body()
        except SystemExit as leaving:
            _check_exit(leaving)
        finally:
            reasons.extend(each.skipped for each in _tally.subtests if each.skipped is not None)
        if reasons and len(reasons) == len(_tally.subtests):
            raise Skipped(Reason.joined(reasons))

    spent = time.process_time()
    with defect_blocks.recorded() as blocks:
        result = capture(rank, counted, time.perf_counter)
    is_process = threading.current_thread() is threading.main_thread()
    return dataclasses.replace(
        result,
        cpu=time.process_time() - spent if is_process else 0.0,
        subtests=tuple(_tally.subtests),
        kinds=result.kinds | kinds_of(reasons),
        defect_blocks=tuple(blocks),
    )


def _check_exit(leaving: SystemExit) -> None:
    """Return if a rank that exits has passed. Else raise the exception that it replaces, or the exit itself."""
    if system.exit_status(leaving) != 0 or not (_tally.returned or _tally.raised):
        raise leaving
    replaced = _tally.raised or leaving.__context__
    if replaced is not None:
        raise replaced


def run_all(steps: Iterable[Callable[[], object]]) -> None:
    """Take every step of a test, even after one has raised. Then raise the first failure, or else the first skip.

    Its attribute ``THEN_RAISED`` has the later failures.
    """
    raised: list[BaseException] = []
    for step in steps:
        try:
            step()
        except BaseException as error:
            raised += [error, *getattr(error, THEN_RAISED, ())]
    failed = [error for error in raised if not is_skip(error)]
    for first in (failed or raised)[:1]:
        with contextlib.suppress(AttributeError):  # an exception may allow no attributes
            setattr(first, THEN_RAISED, tuple(error for error in failed if error is not first))
        raise first


def is_skip(error: BaseException) -> bool:
    if isinstance(error, SystemExit):
        return system.exit_status(error) in skip_codes()
    return isinstance(error, unittest.SkipTest)


@contextlib.contextmanager
def named_leaks(assignment: Assignment) -> Iterator[None]:
    """Undo what the block leaves behind in this rank's process, and report it to the test process.

    Threads cannot be ended, so a rank with threads left runs no further test.
    """
    baseline = ProcessBaseline()
    outputs = sys.stdout, sys.stderr
    changes: list[str] = []
    try:
        with process_state.saved_state() as changes:
            yield
    finally:
        if outputs != (sys.stdout, sys.stderr) or any(getattr(output, "closed", False) for output in outputs):
            system.flush_outputs()
            open_outputs()
            changes.append("left sys.stdout or sys.stderr closed or replaced")
        threads = baseline.new_threads()
        if threads:
            assignment.leave()
        for leak in (
            *changes,
            *(f"left the thread {thread.name!r} running" for thread in threads),
            *(f"left the process {command} running" for command in baseline.end_new_children()),
            *(f"left in shared memory: {name}" for name in baseline.end_tracked_files()),
        ):
            assignment.name_leak(leak)


def raise_verdict(verdict: Verdict) -> None:
    """Raise the exception for a verdict; return if the test passed."""
    if verdict.outcome is State.SKIPPED:
        raise Skipped(verdict.reason)
    if verdict.outcome is not State.PASSED:
        raise (RanksFailed if verdict.outcome is State.FAILED else RanksErred)(verdict) from None


def _is_torchs(cls: type) -> bool:
    """Whether PyTorch defines a class, such as ``torch._dynamo.test_case.TestCase``, which tests may have as a base."""
    return cls.__module__.partition(".")[0] == "torch"


class RankTestCase(TestCase):
    """The base class of all test cases whose tests run in ranks. The module's docstring says what runs where.

    ``rank`` is -1 in the parent. The constructor raises ``ValueError`` if the class does not have the method.
    """

    MAIN_RANK = -1
    rank: int = MAIN_RANK
    _spawner = ""  # the method that a test class calls in its setUp
    # Names that upstream's harness uses and this one does not, with what to do instead. A class that has one fails.
    _unsupported_hooks: Mapping[str, str] = {
        "MAIN_PROCESS_RANK": "it is always -1",
        "MAIN_THREAD_RANK": "it is always -1",
        "_should_stop_test_suite": "run with -f, or `run_test.py` without --keep-going, to stop at a failure",
    }
    _group: RankGroup | None = None

    @functools.cached_property  # unlike a property, a test may replace it by assignment
    def device(self) -> torch.device:
        """The device of this rank. It has the type under test, and an index if devices of this type have one."""
        return accelerator.current().device(self.rank)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        register(cls)

    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:
        super().__init__(method_name, methodName)
        name = self._testMethodName
        test = getattr(self, name, None)
        if test is not None:
            setattr(self, name, self.join_or_run(test))
        elif name != "runTest":
            raise ValueError(f"{type(self).__qualname__} has no test method {name!r}")

    def join_or_run(self, fn: Callable) -> types.MethodType:
        """Return what replaces the test ``fn``: it waits for the ranks in the parent, and calls ``fn`` in a rank."""

        @functools.wraps(fn)
        @enters_test
        def stand_in(self: RankTestCase) -> object:
            if self.rank != self.MAIN_RANK:
                with _tally.noted():
                    return fn()
            self._join_ranks(fn)
            return None

        return types.MethodType(stand_in, self)

    def _take_ranks(self, group: RankGroup) -> None:
        """From now on these are the ranks of the current test. They end with it."""
        self._group = group
        self.addCleanup(self._close, group)

    def _ranks(self) -> RankGroup:
        """The ranks of the current test."""
        if self._group is None:
            words = f"{self.id()} started no rank, so nothing was tested: {self._how_to_start()}"
            raise RanksErred(Verdict(State.ERROR, words, Phase.FIXTURE))
        return self._group

    def _how_to_start(self) -> str:
        mro = type(self).__mro__
        ours = next(cls for cls in mro if is_ours(cls))
        for cls in mro[: mro.index(ours)]:
            if _is_torchs(cls) and "setUp" in vars(cls):
                return f"name {ours.__name__} before {cls.__module__}.{cls.__qualname__} in its bases"
        return f"call self.{self._spawner}() in its setUp"

    def _join_ranks(self, fn: Callable) -> None:
        """Wait for the ranks and raise their verdict. ``fn`` is the function of the test."""
        group, limit = self._ranks(), limit_of(self.id())
        self._conclude(group.wait(limit), limit)
        self._close(group)

    def _ask_requirements(self, world_size: int, devices: int | None = None) -> None:
        """Check what can be checked before any rank starts. Raises ``SkipTest``, or an error for an impossible world
        size or an unsupported hook of upstream's harness. ``devices`` is how many the ranks need, if they share them.
        """
        devices = world_size if devices is None else devices
        for owner in type(self).__mro__:
            is_written = not (is_ours(owner) or _is_torchs(owner))
            for name in self._unsupported_hooks.keys() & (vars(owner) if is_written else {}).keys():
                hook = f"{owner.__qualname__}.{name}"
                instead = self._unsupported_hooks[name]
                words = f"{hook} has no effect here, because only upstream's harness uses it: {instead}"
                raise_verdict(Verdict(State.ERROR, words, Phase.FIXTURE))
        if world_size < 1 and not self._too_few(world_size):
            stated = f"{type(self).__qualname__} has a world size of {world_size}"
            raise_verdict(Verdict(State.ERROR, f"{stated}: set its world_size to 1 or more", Phase.FIXTURE))
        events.need(devices)  # also of a test that skips here: another device may run it
        accelerator.expect(devices)
        self.addCleanup(accelerator.expect, 0)
        test = getattr(type(self), self._testMethodName)
        ours = (lambda: self._too_few(world_size), lambda: accelerator.current().lacks_room_for(devices))
        skip_unless([*requirements_of(test), *ours])

    def _too_few(self, world_size: int) -> str | None:
        return world_sizes.too_few(self, world_size, accelerator.current())

    def _conclude(self, reports: Sequence[RankResult], limit: float) -> None:
        """Raise the verdict on the ranks' reports; return if the test passed in every rank."""
        self._digest(reports)
        raise_verdict(judge(reports, limit, skip_codes()))

    def _digest(self, reports: Sequence[RankResult]) -> None:
        """Show or record the ranks' output, times and defects."""
        if settings.SHOW_VARIABLE in os.environ:
            for report in reports:
                if report.output:
                    print(f"--- output of rank {report.rank} ---\n{report.output}")
        self._record(reports)
        blocks = defect_blocks.current()  # of the test that runs in this process
        if blocks is not None:
            blocks += joined(report.defect_blocks for report in reports)

    def _record(self, reports: Sequence[RankResult]) -> None:
        """Report to the dispatcher the test's world size, how many of its subtests ran, and which skipped and why."""
        most = max(reports, key=lambda report: len(report.skipped_subtests))
        skipped = collections.Counter(most.skipped_subtests)
        ran = max(report.ran_subtests for report in reports)
        events.record(world_size=len(reports), subtests=ran, subtests_skipped=dict(skipped), skip_kinds=most.kinds)
        for name in ("seconds", "cpu"):
            values = {each.rank: getattr(each, name) for each in reports}
            events.record(**{f"rank_{name}": [round(values[rank], 3) for rank in sorted(values)]})

    def _close(self, group: RankGroup) -> None:
        """End a group, and report once what its ranks left behind. With the strict setting a leak fails the test."""
        group.close()
        self._name_leaks(group)

    def _name_leaks(self, group: RankGroup) -> None:
        leaks = group.take_leaks()
        if leaks and settings.is_on(settings.STRICT_LEAKS_VARIABLE, os.environ):
            words = f"{'; '.join(leaks)} (--strict-leaks makes this a failure)"
            raise_verdict(Verdict(State.LEAKED, words))
        process_state.notes.add(self.id(), leaks)

    def _run_body(self, test_name: str, **kwargs: Any) -> None:
        """In a rank, run the test method and then its clean-ups, which upstream's harness never runs."""
        returned = None

        def body() -> None:
            nonlocal returned
            try:
                with extension.around(self, self.rank):
                    returned = getattr(self, test_name)(**kwargs)
            except Exception as error:
                with contextlib.suppress(AttributeError):  # then it counts as an exception of the fixtures
                    setattr(error, BODY_MARK, True)
                raise

        with _tally.noted():
            run_all([body, self._run_cleanups])
        check_returned(returned)  # not in the body, because this is never an expected failure

    def _run_cleanups(self) -> None:
        registered: list = self._cleanups

        def steps() -> Iterator[Callable[[], object]]:
            while registered:
                function, args, kwargs = registered.pop()
                yield functools.partial(function, *args, **kwargs)

        run_all(steps())

    def run_subtests(self, *args: Any, **kwargs: Any) -> None:
        """See :func:`.subtests.run_subtests`."""
        run_subtests(self, *args, **kwargs)

    @contextlib.contextmanager
    def subTest(self, msg: Any = None, **params: Any) -> Iterator[None]:
        """In a rank, count the subtest, let a skip end only the subtest, and add its parameters to a failure.

        Raises what the block raises, except for a skip. So a failure ends the rank's test, unlike in plain unittest.
        The other ranks may still wait in a collective of the failed subtest, and would match it with a collective of
        the next subtest. All ranks must run the same subtests and skip the same ones, except for those with a parameter
        ``rank``, which belong to that rank. In the parent this method is unittest's.
        """
        if self.rank == self.MAIN_RANK:
            with super().subTest(msg, **params):
                yield
            return
        described = subtest_words(msg, params)
        try:
            with defect_blocks.in_subtest(described):
                yield
        except unittest.SkipTest as skip:
            _tally.subtests.append(Subtest(described, str(skip), "rank" in params))
        except Exception as error:
            if not hasattr(error, "__subtest__"):
                error.__subtest__ = described  # type: ignore[attr-defined]
            raise
        else:
            _tally.subtests.append(Subtest(described, None, "rank" in params))
