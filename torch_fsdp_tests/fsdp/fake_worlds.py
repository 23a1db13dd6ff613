"""One process as one rank after another of fake worlds, and the collectives that each of them calls."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_fsdp_tests.common_fsdp import substitutes
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed.fake_pg import FakeStore
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.installed_torch import torch_names

_c10d = torch_names.module("torch.distributed.distributed_c10d")


@contextlib.contextmanager
def fake_rank(rank: int, world_size: int, **kwargs: Any) -> Iterator[None]:
    """In the context, this process is this rank of a fake world."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore(), **kwargs)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Slicing a flattened dim")
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def as_rank(rank: int, *shape: int, names: tuple[str, ...] = (), **kwargs: Any) -> Iterator[DeviceMesh]:
    """Like :func:`fake_rank`. Yields a mesh of all ranks."""
    substitutes.install(accelerator.current())
    with fake_rank(rank, math.prod(shape), **kwargs):
        yield make_mesh(*shape, names=names or None)


class Called(NamedTuple):
    """A collective: its name, the shapes of this rank's tensors, and the ranks that must call it together."""

    name: str
    shapes: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]


class CalledCollectives(TorchDispatchMode):
    """Records all collectives inside the context in their order, also those of DTensors and of backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Called] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # the operator of the DTensor consists of others, which come here
        arguments = dict(zip((each.name for each in func._schema.arguments), args)) | (kwargs or {})
        group = arguments.get("process_group", arguments.get("group_name"))
        if group is not None:
            # The operators of c10d get the group itself, and the functional ones get its name.
            found = _c10d._resolve_process_group(group) if isinstance(group, str) else dist.ProcessGroup.unbox(group)
            shapes = tuple(tuple(each.shape) for each in tree_leaves(args) if isinstance(each, torch.Tensor))
            self.calls.append(Called(func.overloadpacket.__name__, shapes, tuple(dist.get_process_group_ranks(found))))
        return func(*args, **(kwargs or {}))
