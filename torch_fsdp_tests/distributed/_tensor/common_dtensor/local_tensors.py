"""Upstream's names for tests with all ranks simulated by local tensors in one process. Here such tests skip.

They test DTensor alone, and run with PyTorch's source tree. Their files may have other tests, which run.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch_fsdp_tests.verdict import Reason, SkipKind
from torch_fsdp_tests.verdict.events import Skipped

from .cases import DTensorContinuousTestBase, DTensorOpTestBase, DTensorTestBase

REASON = Reason("needs ranks that are simulated by local tensors, as in PyTorch's source tree", SkipKind.OTHER)


class _Skips:
    @classmethod
    def setUpClass(cls) -> None:
        raise Skipped(REASON)


class LocalDTensorTestBase(_Skips, DTensorTestBase):
    """Its tests skip."""


class LocalDTensorOpTestBase(_Skips, DTensorOpTestBase):
    """Its tests skip."""


class LocalDTensorContinuousTestBase(_Skips, DTensorContinuousTestBase):
    """Its tests skip."""


def create_local_tensor_test_class(
    orig_cls: type, skipped_tests: Iterable[str] | None = None, base_class: type | None = None
) -> type:
    """A class with the tests of ``orig_cls``, under upstream's name. They skip, whatever the arguments are."""
    namespace: dict[str, Any] = {"__module__": orig_cls.__module__}
    return type(f"{orig_cls.__name__}WithLocalTensor", (_Skips, orig_cls), namespace)
