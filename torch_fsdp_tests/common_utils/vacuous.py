"""Finds comparisons that pass and prove nothing, because of what is compared.

Infinities, zeros and missing elements are equal to each other, whatever made them, and a tensor is always equal to
itself. A test that compares such values fails in :meth:`.TestCase.assertEqual`, unless ``may_be`` allows it.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from torch_fsdp_tests import installation

from .equality import Closeness, Pair, local_parts, place

# What a call may give as ``may_be``, and what a failure says of the values.
KINDS = {
    "same": "both are one object or share their memory, so they cannot differ",
    "empty": "neither has an element",
    "zero": "both have only zeros, as if nothing had been computed",
    "meta": "both are on the meta device, so only their shapes were compared",
    "small": "both are smaller than the tolerance, so zeros would also pass",
    "nonfinite": "both have an infinity or a NaN, which many mistakes lead to",
}

_TESTS = installation.ROOT / "test" / "distributed"


def is_judged(cls: type) -> bool:
    """Whether a test case is one of this suite's tests of FSDP. Other files are not judged: those that were written for
    upstream's classes, in any other folder, and the tests of the suite itself, which compare few tensors.
    """
    return _is_test_of_fsdp(getattr(sys.modules.get(cls.__module__), "__file__", None))


@functools.cache
def _is_test_of_fsdp(path: str | None) -> bool:
    return path is not None and Path(path).resolve().is_relative_to(_TESTS)


def kinds(may_be: str | tuple[str, ...]) -> set[str]:
    """The kinds that a call gives as ``may_be``. Raises ``ValueError`` for a word that is none."""
    given = {may_be} if isinstance(may_be, str) else set(may_be)
    if unknown := given - KINDS.keys():
        raise ValueError(f"may_be has {', '.join(sorted(unknown))}, and can only have {', '.join(KINDS)}")
    return given


def complaint(x: Any, y: Any, compared: Sequence[Any], how: Closeness, allowed: set[str]) -> str:
    """The message of a failure, if a comparison without differences proves nothing and its call does not say so."""
    pairs = [each for each in compared if isinstance(each, Pair)]
    reasons = _reasons(x, y, pairs, how)
    wrong = tuple(kind for kind in reasons if kind not in allowed)
    if not wrong:
        return ""
    lines = [f"at {reasons[kind]}: {KINDS[kind]}" if reasons[kind] else KINDS[kind] for kind in wrong]
    remedy = f"If the test is about such values, give may_be={wrong if len(wrong) > 1 else wrong[0]!r}"
    return "\n".join(["The values are equal, but that proves nothing:", *lines, remedy])


def _reasons(x: Any, y: Any, pairs: Sequence[Pair], how: Closeness) -> dict[str, str]:
    """Why a comparison without differences proves nothing: the kinds, each with the place of the first such pair.

    One pair of tensors that are the same, on the meta device, not finite, or too small is enough. Elements, and numbers
    other than zero, may be in any of the tensors, because a rank has no part of some parameters, and some gradients are
    zero. Of the values that are not tensors, only containers can be the same or empty, and only numbers be infinite.
    """
    reasons: dict[str, str] = {}
    if x is y and isinstance(x, (Mapping, list, set)) and len(x):
        reasons["same"] = ""
    sizes, largest = [], []
    for pair in pairs:
        at = place(pair.path)
        if isinstance(pair.x, torch.Tensor) and isinstance(pair.y, torch.Tensor):
            both = local_parts(pair.x.detach(), pair.y.detach())
            if pair.x is pair.y or _share_memory(*both):
                reasons.setdefault("same", at)
            if both[0].is_meta:
                reasons.setdefault("meta", at)
            sizes.append(both[0].numel())
            if sizes[-1] and not both[0].is_meta:
                largest.append(_largest(both[0]))
                limit = how.tolerances(both[0].dtype, both[1].dtype)["atol"]
                if not math.isfinite(largest[-1]):
                    reasons.setdefault("nonfinite", at)
                elif largest[-1] <= limit and 0 < max(largest[-1], _largest(both[1])) <= limit:
                    reasons.setdefault("small", at)
        elif isinstance(pair.x, float) and isinstance(pair.y, float) and not math.isfinite(pair.x):
            reasons.setdefault("nonfinite", at)
    if not sizes and all(isinstance(pair.x, (set, frozenset)) and not pair.x for pair in pairs):
        reasons["empty"] = ""
    if sizes and not any(sizes):
        reasons["empty"] = ""
    if largest and not any(largest):
        reasons["zero"] = ""
    return reasons


def _largest(tensor: torch.Tensor) -> float:
    """The largest absolute value of a tensor with elements. It is NaN if one of them is."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if not tensor.is_floating_point() and not tensor.is_complex():
        tensor = tensor.to(torch.int64)
    elif tensor.element_size() == 1:
        tensor = tensor.to(torch.float32)  # torch does not compute with 8 bits
    return float(tensor.abs().max().item())


def _share_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether both are the same part of one storage. Subclasses may have no storage of their own, so they never are."""
    if any(type(each) not in (torch.Tensor, torch.nn.Parameter) or each.layout is not torch.strided for each in (x, y)):
        return False
    same_part = x.shape == y.shape and x.stride() == y.stride() and x.device == y.device
    return same_part and x.numel() > 0 and 0 != x.data_ptr() == y.data_ptr()
