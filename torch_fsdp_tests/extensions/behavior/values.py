"""Values as a few numbers: a checksum, a norm, and a sum that depends on signs and order."""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

# What differs between two runs that behave alike: addresses, paths, ports, process ids, and the lines of a source.
_VOLATILE = re.compile(r"0x[0-9a-f]+|/\S+|\d{4,}|\bline \d+|\d+\.\d+(?:e-?\d+)?")
_ADDRESSES = 1 << 40  # numbers from here on are those of objects or storages, which differ in each run
_EXACT = bool, str, torch.dtype, torch.Size, torch.device, type(None)


def cleaned(text: object) -> str:
    """A text on one line, without what differs in each run."""
    return " ".join(_VOLATILE.sub("#", str(text)).split())[:300]


def dtype_of(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, or the tensor. No mode of the test sees it: one of spmd_types could raise."""
    with torch._C.DisableTorchFunction():
        return tensor.detach()._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a storage of its own. Those of function transforms do not."""
    return not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def digest(value: Any) -> list[str]:
    """What is in a value, such as ``2 float32``, then its checksum, its 1-norm and the sum of its weighted elements.

    The weights are between -1 and 1. So relative errors of the elements up to a limit change the sum by at most the
    limit times the norm, and a changed sign or order usually by more. Of what is neither a tensor nor a number, only
    the checksum depends.
    """
    made = _Digest()
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        for leaf in _leaves(value):
            made.add(leaf)
    kinds = " ".join(f"{count} {name}" for name, count in sorted(made.kinds.items()))
    return [kinds, f"{made.crc:08x}", f"{made.norm:.6g}", f"{made.signed:.6g}"]


class _Digest:
    def __init__(self) -> None:
        self.kinds: dict[str, int] = {}
        self.crc, self.count = 0, 0
        self.norm = self.signed = 0.0

    def add(self, leaf: Any) -> None:
        if _is_tensor(leaf):
            leaf = local(leaf)
            self._add_array(dtype_of(leaf), *_content(leaf))
        elif isinstance(leaf, int) and leaf >= _ADDRESSES:
            self._add_array("address", b"", np.empty(0))
        elif isinstance(leaf, (int, float)) and not isinstance(leaf, bool):
            self._add_array("number", repr(leaf).encode(), np.array([leaf], dtype=np.float64))
        else:
            text = cleaned(repr(leaf)) if isinstance(leaf, _EXACT) else type(leaf).__name__
            self._add_array("object", text.encode(), np.empty(0))

    def _add_array(self, kind: str, content: bytes, numbers: np.ndarray) -> None:
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        self.crc = zlib.crc32(content, self.crc)
        start, self.count = self.count, self.count + numbers.size
        weights = _weights(1 << self.count.bit_length())[start : self.count]
        with np.errstate(all="ignore"):
            self.norm += float(np.abs(numbers).sum())
            self.signed += float((numbers * weights).sum())


@functools.lru_cache(maxsize=4)
def _weights(count: int) -> np.ndarray:
    return np.cos(np.arange(count))


def _content(tensor: torch.Tensor) -> tuple[bytes, np.ndarray]:
    """The bytes and the numbers of a tensor, or a word and no numbers if it has no content here."""
    if why := _unreadable(tensor):
        return why.encode(), np.empty(0)
    here = tensor.clone().cpu().contiguous().flatten()  # numpy() on a storage would make it unresizable
    if not here.numel():
        return b"", np.empty(0)
    wide = torch.view_as_real(here.to(torch.complex128)) if here.is_complex() else here.to(torch.float64)
    return here.view(torch.uint8).numpy().tobytes(), wide.flatten().numpy()


def _unreadable(tensor: torch.Tensor) -> str:
    if not has_storage(tensor):
        return "no storage"
    if tensor.device.type == "meta" or tensor.layout is not torch.strided or tensor.is_quantized:
        return "no content"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return type(tensor).__name__  # a subclass, which may have its content elsewhere
    return "freed" if tensor.numel() and not tensor.untyped_storage().nbytes() else ""


def _leaves(value: Any) -> Iterator[Any]:
    """The leaves of a value, with the shards of this rank in place of a ShardedTensor."""
    for leaf in tree_leaves(value):
        yield from [shard.tensor for shard in leaf.local_shards()] if isinstance(leaf, ShardedTensor) else [leaf]


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    return filter(_is_tensor, _leaves(values))


def _is_tensor(leaf: Any) -> bool:
    """Whether it is a tensor with a shape, which a parameter of a lazy module does not have yet."""
    return isinstance(leaf, torch.Tensor) and not is_lazy(leaf)


def described(tensors: Iterable[torch.Tensor]) -> list[str]:
    """The dtypes and the shapes of tensors, as two words."""
    tensors = list(tensors)
    dtypes = ",".join(dict.fromkeys(map(dtype_of, tensors)))
    return [dtypes, "".join(f"[{', '.join(map(str, tensor.shape))}]" for tensor in tensors[:8])]
