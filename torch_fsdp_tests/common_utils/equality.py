"""Compares two values, and says where and by how much they differ.

:func:`pairs` walks through two containers, and :func:`differences` compares every pair of leaves: numbers and tensors
with the public :func:`torch.testing.assert_close`, text with unittest's comparison, and everything else with ``==``.
Every difference is reported with its place, so that a failure in a state dict of a hundred tensors can be read.
"""

from __future__ import annotations

import dataclasses
import enum
import reprlib
import unittest
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

_SEQUENCES = (Sequence, torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ParameterList, torch.utils.data.Subset)
_MAPPINGS = (Mapping, torch.nn.ModuleDict, torch.nn.ParameterDict)
_TEXT = (str, bytes)
_BOOLEANS = (bool, np.bool_)
_NUMBERS = (int, float, complex, np.number)
_ARRAYS = (torch.Tensor, np.ndarray)
_NUMBER_LIKE = (*_NUMBERS, *_ARRAYS)

# (rtol, atol) by dtype, as assert_close documents them, of complex numbers by their parts. Other dtypes are exact.
_TOLERANCES = {
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}
# Python numbers have double precision, but tests compare them with results of float32 tensors. So this module uses
# float32's tolerances for them, as upstream does.
_NUMBER_DTYPES = ((complex, torch.complex64), (float, torch.float32))

_HOW_MANY_PLACES = 5  # further differences to list, after the one that is described in full

_SHORT = reprlib.Repr()  # of sequences of unlike lengths
_SHORT.maxstring = _SHORT.maxother = 200


@dataclasses.dataclass(frozen=True)
class Closeness:
    """The tolerances of a comparison. ``least_atol`` and ``least_rtol`` are lower bounds, which a test class sets."""

    atol: float | None = None
    rtol: float | None = None
    least_atol: float = 0
    least_rtol: float = 0
    equal_nan: bool = True
    exact_dtype: bool = True
    exact_device: bool = False
    exact_layout: bool = False
    exact_stride: bool = False
    exact_is_coalesced: bool = False

    def tolerances(self, *dtypes: torch.dtype) -> dict[str, float]:
        """The keyword arguments for assert_close. If there are several dtypes, the loosest tolerance counts."""
        if (self.atol is None) != (self.rtol is None):
            raise ValueError("give both atol and rtol, or neither: a default for the other one would be a guess")
        if self.rtol is not None and self.atol is not None:
            rtol, atol = self.rtol, self.atol
        else:
            each = [_TOLERANCES.get(dtype.to_real(), (0.0, 0.0)) for dtype in dtypes]
            rtol, atol = max(pair[0] for pair in each), max(pair[1] for pair in each)
        return {"rtol": max(rtol, self.least_rtol), "atol": max(atol, self.least_atol)}


@dataclasses.dataclass(frozen=True)
class Difference:
    """One place where two values differ; ``path`` holds the keys and indices that lead to it."""

    path: tuple[object, ...]
    message: str


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two leaves that are at the same place: the actual value and the expected one."""

    path: tuple[object, ...]
    x: Any
    y: Any


def place(path: tuple[object, ...]) -> str:
    """How a message names a place: ``['layer'][1]``."""
    return "".join(f"[{key!r}]" for key in path)


def describe(differences: Iterable[Difference]) -> str:
    """The message of a failure: the first difference in full, and the places of the others. Empty if there is none."""
    if not (all_of_them := list(differences)):
        return ""
    first, *others = all_of_them
    lines = [f"at {place(first.path)}: {first.message}" if first.path else first.message]
    if others:
        places = ", ".join(place(difference.path) for difference in others[:_HOW_MANY_PLACES])
        unnamed = len(others) - _HOW_MANY_PLACES
        lines.append(f"\n{len(others)} more differ: {places}{f' and {unnamed} others' if unnamed > 0 else ''}")
    return "\n".join(lines)


def pairs(x: Any, y: Any, path: tuple[object, ...] = ()) -> Iterator[Pair | Difference]:
    """Yield the leaves of ``x`` (the actual value) and ``y`` (the expected one), and where their containers differ."""
    if path == ():
        try:
            x, y = _alike(x, y)
        except AssertionError as error:
            yield Difference(path, str(error))
            return
    if _are(_SEQUENCES, x, y) and not isinstance(x, _TEXT) and not isinstance(y, _TEXT):
        if len(x) != len(y):
            lengths = f"The lengths of the sequences do not match: {len(x)} != {len(y)}"
            yield Difference(path, f"{lengths}\n{_SHORT.repr(x)} is not {_SHORT.repr(y)}")
            return
        for index in range(len(x)):
            yield from pairs(x[index], y[index], (*path, index))
    elif _are(_MAPPINGS, x, y):
        missing, additional = [k for k in y.keys() if k not in x], [k for k in x.keys() if k not in y]
        if missing or additional:
            yield Difference(path, f"The keys of the mappings do not match: missing {missing}, additional {additional}")
            return
        for key in x.keys():
            yield from pairs(x[key], y[key], (*path, key))
    else:
        yield Pair(path, x, y)


def differences(pairs: Iterable[Pair | Difference], how: Closeness) -> Iterator[Difference]:
    """Yield every place where the values of :func:`pairs` differ.

    Raises ``ValueError`` if a tensor of several elements is compared with a number, and ``TypeError`` if a DTensor is
    compared with another tensor. Neither comparison has an answer.
    """
    for each in pairs:
        if isinstance(each, Difference):
            yield each
            continue
        try:
            _compare_leaves(each.x, each.y, how)
        except AssertionError as error:
            yield Difference(each.path, str(error))


def _are(kinds: tuple[type, ...], x: object, y: object) -> bool:
    return isinstance(x, kinds) and isinstance(y, kinds)


def _alike(x: Any, y: Any) -> tuple[Any, Any]:
    """Convert a list that is compared with a tensor to a tensor. Raises ``AssertionError`` if that changes numbers."""
    if isinstance(x, torch.Tensor) and isinstance(y, Sequence) and not isinstance(y, _TEXT):
        y = _like(x, y)
    elif isinstance(y, torch.Tensor) and isinstance(x, Sequence) and not isinstance(x, _TEXT):
        x = _like(y, x)
    return x, y


def _like(tensor: torch.Tensor, values: Sequence[Any]) -> torch.Tensor:
    """The values as a tensor of the same dtype and device. They may only be rounded."""
    given = torch.as_tensor(values)
    if not (tensor.is_complex() or (tensor.is_floating_point() and not given.is_complex())):
        if not torch.equal(given.to(tensor.dtype).to(given.dtype), given):
            raise AssertionError(f"a tensor of {tensor.dtype} cannot have the values {_SHORT.repr(values)}")
    return torch.as_tensor(values, dtype=tensor.dtype, device=tensor.device)


def _compare_leaves(x: Any, y: Any, how: Closeness) -> None:
    """Raise ``AssertionError`` with a readable message if the two differ."""
    if x is None or y is None:
        if x is not y:
            raise AssertionError(f"None mismatch: {_brief(x)} is not {_brief(y)}")
    elif isinstance(x, _BOOLEANS) or isinstance(y, _BOOLEANS):
        _compare_booleans(x, y)
    elif isinstance(x, enum.Enum) and isinstance(y, enum.Enum):
        _compare_objects(x, y)  # members of an IntEnum are numbers too, but their names are more useful in a message
    elif _are(_NUMBER_LIKE, x, y) and not _are(_ARRAYS, x, y):
        _compare_numbers(_as_number(x), _as_number(y), how)
    elif _are(_ARRAYS, x, y):
        _compare_tensors(x, y, how)
    else:
        _compare_objects(x, y)


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"


def _compare_objects(x: Any, y: Any) -> None:
    case = unittest.TestCase()
    case.maxDiff = None
    if isinstance(x, _ARRAYS) or isinstance(y, _ARRAYS):
        # A tensor is never equal to another kind of value; ``==`` would compare elementwise or fail.
        raise AssertionError(f"{type(x).__name__} and {type(y).__name__} differ: {_brief(x)} != {_brief(y)}")
    case.assertEqual(x, y)


def _only_element(value: Any, other: str) -> Any:
    count = value.numel() if isinstance(value, torch.Tensor) else value.size
    if count != 1:
        raise ValueError(f"a {other} can only be compared with a tensor of one element, and this one has {count}")
    return value.item()


def _as_number(value: Any) -> int | float | complex:
    number = _only_element(value, "number") if isinstance(value, _ARRAYS) else value
    if isinstance(number, np.number):
        number = number.item()
    return int(number) if isinstance(number, int) else number  # also a member of an IntEnum, and True


def _compare_booleans(x: Any, y: Any) -> None:
    if not _are((*_BOOLEANS, *_NUMBER_LIKE), x, y):
        _compare_objects(x, y)
        return
    truth = [bool(_only_element(value, "boolean") if isinstance(value, _ARRAYS) else value) for value in (x, y)]
    if truth[0] != truth[1]:
        raise AssertionError(f"Booleans mismatch: {truth[0]} is not {truth[1]}")


def _compare_numbers(x: int | float | complex, y: int | float | complex, how: Closeness) -> None:
    if x == y:  # also if both are infinite, or integers that are too large for a tensor
        return
    dtypes = [next((dtype for kind, dtype in _NUMBER_DTYPES if isinstance(n, kind)), torch.int64) for n in (x, y)]
    torch.testing.assert_close(x, y, check_dtype=False, equal_nan=how.equal_nan, **how.tolerances(*dtypes))


def _compare_tensors(x: Any, y: Any, how: Closeness) -> None:
    # This copies, because torch rejects arrays with negative strides and warns about read-only ones.
    x, y = (torch.from_numpy(np.array(value)) if isinstance(value, np.ndarray) else value for value in (x, y))
    x, y = local_parts(x, y)
    if x.is_meta != y.is_meta:
        raise AssertionError(f"only one of the tensors has values: their devices are {x.device} and {y.device}")
    if x.layout == y.layout == torch.sparse_coo and x.is_coalesced() != y.is_coalesced():
        if how.exact_is_coalesced:
            raise AssertionError(f"is_coalesced does not match: {x.is_coalesced()} != {y.is_coalesced()}")
        x, y = x.coalesce(), y.coalesce()
    torch.testing.assert_close(
        x,
        y,
        equal_nan=how.equal_nan,
        check_dtype=how.exact_dtype,
        check_device=how.exact_device,
        check_layout=how.exact_layout,
        check_stride=how.exact_stride,
        **how.tolerances(x.dtype, y.dtype),
    )


def local_parts(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The local shards of two DTensors with the same layout, so that the comparison starts no collective."""
    if not dist.is_available():
        return x, y
    from torch.distributed.tensor import DTensor

    if not isinstance(x, DTensor) and not isinstance(y, DTensor):
        return x, y
    if not isinstance(x, DTensor) or not isinstance(y, DTensor):
        raise TypeError("cannot compare a DTensor with a plain tensor: compare its full_tensor() or its to_local()")
    if x.placements != y.placements:
        raise AssertionError(f"DTensor placements do not match: {x.placements} != {y.placements}")
    if x.device_mesh != y.device_mesh:
        raise AssertionError(f"DTensor device meshes do not match: {x.device_mesh} != {y.device_mesh}")
    return x.to_local(), y.to_local()
