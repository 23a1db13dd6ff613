"""The base class of all tests."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import subprocess
import sys
import unittest
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import expecttest
import torch

from torch_fsdp_tests import process_state, settings
from torch_fsdp_tests.installed_torch import upstream_names
from torch_fsdp_tests.verdict import (
    VERDICT,
    DefectBlock,
    Phase,
    State,
    Verdict,
    by_cause,
    events,
    in_one_line,
    returned,
)

from . import absent_devices, defect_blocks, vacuous
from .equality import Closeness, describe, differences, pairs
from .seed import set_rng_seed

__unittest = True  # keeps the frames of this module out of the tracebacks that unittest prints

KNOWN_DEFECTS = "__known_defects__"  # the attribute of a test function that names the defects of torch that it shows
hit: dict[str, list[str]] = {}  # the known defects that tests have hit, each with those tests
fixed: dict[str, list[str]] = {}  # the defects that were expected and did not show, each with the tests that passed

_ANSI_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


# Private names that a test class may override: upstream's, and the last one, which is meant to be extended.
_OPEN_NAMES = frozenset(
    "_run _init_pg _worker_loop _run_test_given_id _current_test_name _spawn_processes _spawn_threads "
    "_fork_processes _start_processes _join_processes _check_return_codes _get_timedout_process_traceback "
    "_event_listener _check_backward_prefetch _check_cpu_offload _check_forward_prefetch _test_fsdp_parity "
    "_test_op _test_op_on_dtensor _train_for_several_steps _assert_same_parameters".split()
)


def is_ours(cls: type) -> bool:
    """Whether this package defines the class, and not a test file."""
    return cls.__module__.partition(".")[0] == __name__.partition(".")[0]


def _check_collisions(cls: type) -> None:
    """Raise ``TypeError`` if a test class, or a mixin of it, overrides a part of the harness by accident.

    Upstream's classes have other private names, so a file that was written for them cannot know these.
    """
    if is_ours(cls):
        return
    taken = {name: base for base in cls.__mro__ if is_ours(base) for name in vars(base)}
    mixins = [base for base in cls.__mro__ if not issubclass(base, unittest.TestCase) and not is_ours(base)]
    for base in (cls, *mixins):
        for name in vars(base).keys() & taken.keys() - _OPEN_NAMES - set(dir(unittest.TestCase)):
            if name.startswith("_") and not name.startswith("__"):
                owner = taken[name].__qualname__
                raise TypeError(
                    f"{base.__qualname__}.{name} would override {owner}.{name}, which the harness needs: "
                    "give it another name"
                )


def subtest_words(msg: Any, params: Mapping[str, Any]) -> str:
    """The message and the parameters of a subtest."""
    words = ", ".join(f"{name}={value!r}" for name, value in params.items())
    return " ".join(filter(None, ["" if msg is None else f"[{msg}]", f"({words})" if params else ""]))


class TestCase(expecttest.TestCase):
    """unittest's TestCase, with comparisons for tensors.

    Differs from upstream's: what a test leaves changed in its process is undone and reported (by
    :mod:`.process_state`). The first docstring line never replaces a test's name. Messages give the place of the first
    difference inside containers, and the number of the others. Sparse-tensor invariants are not switched on.

    ``precision`` and ``rel_tol`` are lower bounds of ``atol`` and ``rtol`` in every comparison of tensors and numbers.
    """

    precision: float = 0
    rel_tol: float = 0

    maxDiff = None
    _known_defects: Sequence[Any] = ()  # defects of the installed PyTorch with which the test must fail
    _defect_blocks: list[DefectBlock]  # the blocks of the running test that must show a defect
    _diffThreshold = sys.maxsize  # unittest's switch: also explain differences in long texts

    def __init_subclass__(cls, **kwargs: Any) -> None:
        _check_collisions(cls)  # before unittest adds private names of its own
        super().__init_subclass__(**kwargs)

    def __init__(self, method_name: str = "runTest", methodName: str = "runTest") -> None:
        # Loaders pass the name by position or as methodName. Upstream's subclasses pass method_name.
        super().__init__(method_name if methodName == "runTest" else methodName)

    if not TYPE_CHECKING:  # which would no longer report a wrong name in a test

        def __getattr__(self, name: str) -> Any:
            """A method that only upstream's class has, such as ``assertNotWarn``: it is that of the installed torch."""
            if name.startswith("_") or hasattr(type(self), name):  # a property raised
                return object.__getattribute__(self, name)
            return upstream_names.lookup_method("common_utils", "TestCase", name, self)

    def shortDescription(self) -> None:
        """None, so that ``-v`` prints the name of a test and its outcome on one line."""

    def setUp(self) -> None:
        super().setUp()
        set_rng_seed()

    def run(self, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
        """Prepare the rank engine, run the test like unittest, and undo what it leaves changed.

        With ``--strict-leaks`` a leak fails the test. The check runs in the last clean-up, because
        after that unittest has announced the outcome.
        """
        from torch_fsdp_tests import ranks  # not at import: only a process that runs tests needs the engine

        ranks.prepare()
        known = getattr(getattr(type(self), self._testMethodName, None), KNOWN_DEFECTS, ())
        self._known_defects = [defect for defect in known if defect.is_expected()]
        if self._known_defects:
            self.__unittest_expecting_failure__ = True
        with defect_blocks.recorded() as self._defect_blocks, process_state.watched_threads() as ended:
            # First registered is last called, after tearDown and all clean-ups of the test.
            self.addCleanup(process_state.undo_leaks, self, process_state.SavedState(), ended)
            return super().run(result)

    def _callSetUp(self) -> None:
        with absent_devices.skips(type(self)):
            super()._callSetUp()

    def _callTestMethod(self, method: Callable[[], object]) -> None:
        if not isinstance(self, unittest.IsolatedAsyncioTestCase):  # which runs what is async
            method = returned.checked(self, method)
        try:
            with absent_devices.skips(type(self)):
                super()._callTestMethod(method)
        except unittest.SkipTest:
            raise
        except Exception as error:
            if not self._may_be_expected(error):
                self._outcome.expecting_failure = False
            elif self._known_defects:
                self._record_defects(in_one_line(error))
            raise
        if not self._known_defects:
            self._record_defects()

    def _may_be_expected(self, error: Exception) -> bool:
        """Whether a failure counts as expected. It must be an exception of the test's body; if the test shows a defect,
        the defect must explain it. unittest itself would accept a crash as an expected failure.
        """
        verdict = getattr(error, VERDICT, None)
        if isinstance(verdict, Verdict):
            first = next(iter(by_cause(verdict.ranks)), None)
            if first is not None and first.signal:  # a defect may kill the process on some devices
                return any(defect.explains(first.signal) for defect in self._known_defects)
            if not verdict.is_from_body:
                return False
            exception = type(error).__qualname__ if first is None else first.exception
        else:
            exception = type(error).__qualname__
        return not self._known_defects or any(defect.explains(exception) for defect in self._known_defects)

    def _addUnexpectedSuccess(self, result: unittest.TestResult) -> None:
        if not self._known_defects or settings.is_on(settings.STRICT_DEFECTS_VARIABLE, os.environ):
            super()._addUnexpectedSuccess(result)
            return
        self._record_defects()
        result.addSuccess(self)

    def _record_defects(self, raised: str = "") -> None:
        """Report to the dispatcher which known defects the test has shown, and which it should have shown.

        A test that is decorated with defects is one block. ``raised`` is the exception with which it failed.
        """
        self._defect_blocks += [DefectBlock(defect.facts(), raised=raised) for defect in self._known_defects]
        known = {block.defect["id"]: block.defect for block in self._defect_blocks if block.raised}
        not_shown: dict[str, dict[str, Any]] = {}
        for block in self._defect_blocks:
            if not block.raised:
                facts = not_shown.setdefault(block.defect["id"], {**block.defect, "places": []})
                if block.place:
                    facts["places"].append(block.place)
        if known or not_shown:
            events.record(known_defects=list(known.values()), fixed_defects=list(not_shown.values()))
        if not_shown and not self._known_defects and settings.is_on(settings.STRICT_DEFECTS_VARIABLE, os.environ):
            words = "; ".join(f"{id} did not show at {', '.join(facts['places'])}" for id, facts in not_shown.items())
            error = self.failureException(words)
            setattr(error, VERDICT, Verdict(State.UNEXPECTED_SUCCESS, words, Phase.BODY))
            raise error
        for id in known:
            hit.setdefault(id, []).append(self.id())
        for id, facts in not_shown.items():
            fixed.setdefault(id, []).append(" at ".join([self.id(), *facts["places"]]))

    @contextlib.contextmanager
    def subTest(self, msg: Any = None, **params: Any) -> Iterator[None]:
        """unittest's ``subTest``, whose parameters the blocks for known defects also name."""
        with defect_blocks.in_subtest(subtest_words(msg, params)):
            with super().subTest(*(() if msg is None else (msg,)), **params):
                yield

    # -- equality

    def assertEqual(
        self,
        x: Any,
        y: Any,
        msg: str | Callable[[str], str] | None = None,
        *,
        may_be: str | tuple[str, ...] = (),
        **how: Any,
    ) -> None:
        """Fail unless ``x`` (actual) equals ``y`` (expected), element by element in nested containers.

        Tensors and numpy arrays must have the same shape and, unless ``exact_dtype=False``, the same dtype. Their
        values, and those of numbers, must be close: ``|x - y| <= atol + rtol * |y|``, with defaults for each dtype. A
        number can be compared with a tensor of one element, and a sequence with a tensor whose dtype can have its
        values. DTensors must have the same placements and mesh, and their local shards are compared without a
        collective. For the rest, ``==`` must hold.

        ``how`` has the tolerances ``atol`` and ``rtol`` and the switches of :class:`.Closeness`.

        In this suite's tests of FSDP it also fails if this proves nothing: a pair of values is one object or shares
        memory ("same"), is on the meta device, where only shapes are compared ("meta"), has an infinity or NaN
        ("nonfinite") or only numbers below the tolerance ("small"), or all are without elements ("empty") or zero
        ("zero"). A call that means such values says so, with ``may_be="zero"`` or a
        tuple of these words. See :mod:`.vacuous`.

        ``msg`` is added to the message, or, when callable, gets it and returns another. Raises
        ``ValueError`` if only one of ``atol`` and ``rtol`` is given, a number is compared with a larger tensor, or
        ``may_be`` has an unknown word, and ``TypeError`` if a DTensor is compared with another tensor.
        """
        __tracebackhide__ = True
        closeness = Closeness(least_atol=self.precision, least_rtol=self.rel_tol, **how)
        allowed = vacuous.kinds(may_be)
        compared = list(pairs(x, y))
        text = describe(differences(compared, closeness))
        if not text and vacuous.is_judged(type(self)):
            text = vacuous.complaint(x, y, compared, closeness, allowed)
        if not text:
            return
        if callable(msg):
            raise self.failureException(msg(text))
        if msg is not None:
            text = f"{text}\n{msg}" if self.longMessage else str(msg)
        raise self.failureException(text)

    def assertNotEqual(self, x: Any, y: Any, msg: str | None = None, **how: Any) -> None:
        """Fail if :meth:`assertEqual` with the same arguments would pass."""
        __tracebackhide__ = True
        try:
            self.assertEqual(x, y, **{**how, "may_be": tuple(vacuous.KINDS)})
        except self.failureException:
            return
        self.fail(self._formatMessage(msg, f"{x!r} == {y!r}"))

    # -- other assertions that upstream adds to unittest's

    def assertExpectedInline(
        self, actual: Any, expect: str, skip: int = 0, ignore_comments: bool = False, ignore_empty_lines: bool = False
    ) -> None:
        """expecttest's assertion for ``str(actual)`` without terminal colors. Ignored lines are removed from both."""

        def keep(line: str) -> bool:
            bare = line.strip()
            return not ((ignore_comments and bare.startswith("#")) or (ignore_empty_lines and not bare))

        texts = [_ANSI_ESCAPE.sub("", str(text)) for text in (actual, expect)]
        if ignore_comments or ignore_empty_lines:
            texts = ["\n".join(filter(keep, text.split("\n"))) for text in texts]
        super().assertExpectedInline(texts[0], texts[1], skip=skip + 1)

    def assertLogs(self, logger: Any = None, level: Any = None) -> Any:
        """unittest's ``assertLogs``. The default logger is ``torch``, because torch's loggers do not reach the root."""
        return super().assertLogs(logging.getLogger("torch") if logger is None else logger, level)

    @contextlib.contextmanager
    def assertWarnsOnceRegex(self, category: type[Warning], regex: str = "") -> Iterator[None]:
        """Fail unless the block gives a warning of this category whose text begins with a match of ``regex``.

        In the block, torch also gives those warnings again that it gives once in a process. All are hidden.
        """
        always = torch.is_warn_always_enabled()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.set_warn_always(True)
            try:
                yield
            finally:
                torch.set_warn_always(always)
        texts = [str(each.message) for each in caught if issubclass(each.category, category)]
        if not any(re.match(regex, text) for text in texts):
            self.fail(f"no {category.__name__} matches {regex!r}: {texts}")

    @staticmethod
    def run_process_no_exception(code: str, env: Mapping[str, str] | None = None) -> tuple[bytes, bytes]:
        """Run Python source in a fresh interpreter, and return its stdout and stderr for any exit status."""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=env)
        return done.stdout, done.stderr
