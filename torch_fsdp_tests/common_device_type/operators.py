"""Makes a test for each operator and data type of a list of ``OpInfo``.

The descriptions themselves are torch's (``torch.testing._internal.opinfo``), or any objects with the same methods.
"""

from __future__ import annotations

import enum
import functools
import unittest
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from torch_fsdp_tests.common_utils.parametrization import Test, Variant, _TestParametrizer

# The most preferred one comes first.
DTYPES = (
    *(torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


class OpDTypes(enum.Enum):
    """Which data types of an operator get a test."""

    supported = 0
    unsupported = 1
    supported_backward = 2
    unsupported_backward = 3
    any_one = 4  # one that is supported, if possible with a backward
    none = 5  # one test without a data type
    any_common_cpu_cuda_one = 6  # one that both the CPU and CUDA support


class ops(_TestParametrizer):
    """Make a test with the arguments ``op`` and ``dtype`` for each operator and each of its data types.

    ``op_list`` has descriptions with the methods of torch's ``OpInfo``, whose decorators are applied. ``dtypes`` is a
    rule or a list; ``allowed_dtypes`` leaves out all others. ``skip_if_dynamo`` is accepted and changes nothing.

    When tests are made, it raises ``ValueError`` for an empty list and ``RuntimeError`` outside of
    ``instantiate_device_type_tests``. Unlike upstream's, the test skips if no operator has a data type left.
    """

    def __init__(
        self,
        op_list: Iterable[Any],
        *,
        dtypes: OpDTypes | Sequence[torch.dtype] = OpDTypes.supported,
        allowed_dtypes: Sequence[torch.dtype] | None = None,
        skip_if_dynamo: bool = True,
    ) -> None:
        self.op_list = list(op_list)
        self.opinfo_dtypes = dtypes
        self.allowed_dtypes = None if allowed_dtypes is None else set(allowed_dtypes)

    def _parametrize_test(self, test: Test, generic_cls: type, device_cls: type | None) -> Iterator[Variant]:
        if device_cls is None:
            raise RuntimeError(f"@ops of {test.__qualname__} needs a device: use instantiate_device_type_tests()")
        if not self.op_list:
            raise ValueError(f"@ops of {test.__qualname__} has no operators, so the test would disappear")
        device_type: str = device_cls.device_type  # type: ignore[attr-defined]
        made = False
        for op in self.op_list:
            for dtype in self._dtypes(op, device_type):
                made = True
                arguments = {"op": op} if dtype is None else {"op": op, "dtype": dtype}
                decorators = functools.partial(
                    op.get_decorators, generic_cls.__name__, test.__name__, device_type, dtype
                )
                yield test, op.formatted_name, arguments, decorators
        if not made:
            reason = f"none of its {len(self.op_list)} operators has one of its data types on {device_type}"
            yield test, "", {}, lambda _: [unittest.skip(reason)]

    def _dtypes(self, op: Any, device_type: str) -> list[torch.dtype | None]:
        """The data types of the tests of one operator, in a fixed order."""
        rule = self.opinfo_dtypes
        if rule is OpDTypes.none:
            return [None]
        found: set[torch.dtype]
        match rule:
            case OpDTypes.supported:
                found = set(op.supported_dtypes(device_type))
            case OpDTypes.unsupported:
                found = set(DTYPES) - set(op.supported_dtypes(device_type))
            case OpDTypes.supported_backward:
                found = set(op.supported_backward_dtypes(device_type))
            case OpDTypes.unsupported_backward:
                found = set(DTYPES) - set(op.supported_backward_dtypes(device_type))
            case OpDTypes.any_one:
                supported = set(op.supported_dtypes(device_type))
                found = _first(supported & set(op.supported_backward_dtypes(device_type)) or supported)
            case OpDTypes.any_common_cpu_cuda_one:
                found = _first(set(op.supported_dtypes("cpu")) & set(op.supported_dtypes("cuda")))
            case _:
                found = set(rule)
        return sorted(found if self.allowed_dtypes is None else found & self.allowed_dtypes, key=str)


def _first(dtypes: set[torch.dtype]) -> set[torch.dtype]:
    """The most preferred one, or nothing."""
    return set([dtype for dtype in DTYPES if dtype in dtypes][:1])
