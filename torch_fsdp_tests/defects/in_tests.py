"""``torch_defect``: a test, or a block of one, that shows a known defect of torch."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from torch_fsdp_tests.common_utils import defect_blocks
from torch_fsdp_tests.common_utils.testcase import KNOWN_DEFECTS
from torch_fsdp_tests.defects import registry
from torch_fsdp_tests.defects.registry import Answer, Defect, Devices
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.verdict import DefectBlock, in_one_line

Test = TypeVar("Test", bound=Callable[..., Any])


class KnownDefect:
    """A defect that a test shows. The test case uses it when the test runs."""

    def __init__(self, id: str) -> None:
        self.id = id

    @functools.cached_property
    def _defect(self) -> Defect:
        return registry.defect(self.id)

    def is_expected(self) -> bool:
        """Whether the installed PyTorch has the defect, or may have it, and it shows on the device under test.

        If the registry does not know, a failure shows the defect, and a pass is reported as a fix. A defect that
        is fixed in this process is not expected.
        """
        if self._defect.expected_here() not in (Answer.PRESENT, Answer.UNDECIDED):
            return False
        if self._defect.devices is Devices.ANY:
            return True
        return accelerator.current().is_cpu is (self._defect.devices is Devices.CPU)

    def explains(self, exception: str) -> bool:
        """Whether a test that shows the defect fails with this type of exception."""
        return exception in self._defect.fails_with

    def facts(self) -> dict[str, Any]:
        """What a report says about it."""
        defect = self._defect
        return {
            "id": self.id,
            "title": defect.claim,
            "consequence": defect.consequence.value,
            "severity": defect.consequence.position,
            "upstream": list(defect.upstream),
        }


class torch_defect:
    """A test, or a block of one, that shows these defects of the registry.

    As a decorator it is for a test that is only one comparison, and for a test that hangs or dies. If the installed
    torch has one of the defects, the test must fail in the way that the registry says: with one of the exceptions in
    ``Defect.fails_with``. Any other failure is a failure of the test. If torch has none of them, the test must pass.

    As a context it is for the smallest comparison that shows a defect::

        with torch_defect("fsdp2_divides_twice", when=world_size == 1):
            self.assertEqual(param.grad, expected)

    If the installed torch has the defect, the block must raise one of ``fails_with`` in at least one rank. The test
    goes on after the block, and its rest must pass in all ranks. ``when`` says whether this combination of parameters,
    or this rank, shows the defect. If it is false, or if torch does not have the defect, the context does nothing. A
    block ends where it raises, so nothing in it may be needed below it. If it has a collective, all ranks must take
    part in the collective before any of them raises.

    If the test, or the block in all ranks, passes despite an expected defect, the run reports the defect as fixed. With
    ``TORCH_FSDP_TESTS_STRICT_DEFECTS=1`` that is an unexpected success. With ``sometimes``, for a race that does not
    always show, nothing follows if the block passes.

    Raises ``LookupError`` for an unknown id. In a thread that a test starts, blocks do nothing.
    """

    def __init__(self, *ids: str, when: bool = True, sometimes: bool = False) -> None:
        for id in ids:
            if id not in registry.ids():
                raise registry.unknown(id)
        self._known = [KnownDefect(id) for id in ids] if when else []
        self._sometimes = sometimes

    def __call__(self, test: Test) -> Test:
        setattr(test, KNOWN_DEFECTS, [*getattr(test, KNOWN_DEFECTS, ()), *self._known])
        return test

    def __enter__(self) -> None:
        caller = sys._getframe(1)
        self._place = defect_blocks.place(os.path.basename(caller.f_code.co_filename), caller.f_lineno)
        self._undo = defect_blocks.enter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        blocks = defect_blocks.current()
        expected = [defect for defect in self._known if defect.is_expected()]
        if blocks is None or not expected or (self._sometimes and error is None):
            return False
        raised = ""
        if error is not None:
            expected = [defect for defect in expected if defect.explains(type(error).__qualname__)]
            raised = in_one_line(error)
        blocks += [DefectBlock(defect.facts(), self._place, raised) for defect in expected]
        was_hit = error is not None and bool(expected)
        if was_hit:
            self._undo()
        return was_hit


NO_DEFECT = torch_defect()  # for a helper whose callers say which known defect a block of it shows
