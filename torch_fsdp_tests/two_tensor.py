"""A tensor that consists of two tensors. Every operation runs on both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from torch_fsdp_tests.installed_torch import upstream_names

__all__ = [
    "TwoTensor",
]

__getattr__ = upstream_names.complete(__name__)

_ALIKE = ("device", "layout", "requires_grad", "dtype", "shape")


class TwoTensor(torch.Tensor):
    """Wrapper subclass with the parts ``a`` and ``b``, which agree in shape, strides, offset, dtype, device and layout.

    From outside it looks like ``a``, or has the given ``outer_size`` and ``outer_stride``. An operation runs once on
    the ``a`` of all operands and once on their ``b``. Results that are not tensors come from the run on ``a``. Raises
    ``AssertionError`` if the parts disagree.
    """

    a: torch.Tensor
    b: torch.Tensor

    @staticmethod
    def __new__(
        cls: type[TwoTensor],
        a: torch.Tensor,
        b: torch.Tensor,
        outer_size: Sequence[int] | None = None,
        outer_stride: Sequence[int] | None = None,
        *,
        requires_grad: bool | None = None,
    ) -> TwoTensor:
        facts = [{name: getattr(part, name) for name in _ALIKE} for part in (a, b)]
        for fact, part in zip(facts, (a, b), strict=True):
            fact |= {"stride": part.stride(), "storage_offset": part.storage_offset()}
        unlike = [name for name in facts[0] if facts[0][name] != facts[1][name]]
        if unlike:
            differences = ", ".join(f"{name}: {facts[0][name]} != {facts[1][name]}" for name in unlike)
            raise AssertionError(f"the parts of a TwoTensor must be alike ({differences})")
        return torch.Tensor._make_wrapper_subclass(
            cls,
            a.size() if outer_size is None else outer_size,
            strides=a.stride() if outer_stride is None else outer_stride,
            storage_offset=a.storage_offset(),
            device=a.device,
            layout=a.layout,
            dtype=a.dtype,
            requires_grad=requires_grad or a.requires_grad,
        )

    @torch._disable_dynamo
    def __init__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        outer_size: Sequence[int] | None = None,
        outer_stride: Sequence[int] | None = None,
        *,
        requires_grad: bool | None = None,
    ) -> None:
        self.a = a
        self.b = b

    def __repr__(self) -> str:
        return f"TwoTensor({self.a!r}, {self.b!r})"

    def get_elem_a(self) -> torch.Tensor:
        return self.a

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor],
        meta: None,
        outer_size: Sequence[int] | None,
        outer_stride: Sequence[int] | None,
    ) -> TwoTensor:
        if meta is not None:
            raise AssertionError(f"a TwoTensor is flattened without context, but this one has the context {meta!r}")
        return TwoTensor(inner_tensors["a"], inner_tensors["b"], outer_size, outer_stride)

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}

        def run(part: str) -> Any:
            args_of, kwargs_of = pytree.tree_map_only(TwoTensor, lambda tensor: getattr(tensor, part), (args, kwargs))
            return func(*args_of, **kwargs_of)

        out_a, out_b = run("a"), run("b")
        out = pytree.tree_map(lambda a, b: cls(a, b) if isinstance(a, torch.Tensor) else a, out_a, out_b)
        if not isinstance(func, torch._ops.OpOverload):
            return out  # a higher-order operator has no schema that says which results are aliases
        return return_and_correct_aliasing(func, args, kwargs, out)
