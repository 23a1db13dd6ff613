"""``@torch_defect``: a test that shows a known defect of torch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torch_fsdp_tests import accelerator
from torch_fsdp_tests.common_utils.testcase import KNOWN_DEFECTS
from torch_fsdp_tests.defects import registry
from torch_fsdp_tests.defects.registry import Answer, Defect, Place

Test = TypeVar("Test", bound=Callable[..., Any])


class KnownDefect:
    """A defect that a test shows. The test case uses it when the test runs."""

    def __init__(self, id: str) -> None:
        self.id = id

    @functools.cached_property
    def _defect(self) -> Defect:
        return registry.entry(self.id).defect

    def is_expected(self) -> bool:
        """Whether this torch has the defect, and the device under test shows it."""
        if self._defect.expected(torch.__version__) is not Answer.PRESENT:
            return False
        if self._defect.place is Place.ANYWHERE:
            return True
        return accelerator.current().is_host is (self._defect.place is Place.HOST)

    def explains(self, exception: str) -> bool:
        """Whether a test that shows the defect fails with this type of exception."""
        return exception in self._defect.fails_with

    def facts(self) -> dict[str, Any]:
        """What a report says about it."""
        defect = self._defect
        return {
            "id": self.id,
            "title": defect.title,
            "consequence": defect.consequence.value,
            "severity": defect.consequence.severity,
            "upstream": list(defect.upstream),
        }


def torch_defect(*ids: str) -> Callable[[Test], Test]:
    """Mark a test as one that shows these defects of the registry.

    If the installed torch has one of them, the test must fail in the way that the registry says: with one of the
    exceptions in ``Defect.fails_with``. Any other failure is a failure of the test. If torch has none of them, the test
    must pass. If the test passes although a defect was expected, it reports that the defect is repaired, and passes.
    With ``TORCH_FSDP_TESTS_STRICT_DEFECTS=1`` it fails as an unexpected success.

    Raises ``LookupError`` for an unknown id when the file is imported.
    """
    for id in ids:
        if id not in registry.ids():
            raise LookupError(registry.unknown(id))

    def decorate(test: Test) -> Test:
        known = [*getattr(test, KNOWN_DEFECTS, ()), *map(KnownDefect, ids)]
        setattr(test, KNOWN_DEFECTS, known)
        return test

    return decorate
