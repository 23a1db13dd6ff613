"""Compares a model that FSDP2 sharded with a replicated one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor


def check_sharded_parity(
    cls: Any, replicated_module: nn.Module, sharded_module: nn.Module, prefixes_to_ignore: tuple[str, ...] = ()
) -> None:
    """Fail the test ``cls`` unless both modules have the same parameters and gradients.

    Names and order must agree after each of ``prefixes_to_ignore`` is removed from the sharded module's names. Every
    sharded parameter must be a DTensor whose local shard equals that of the replicated parameter. The same holds for
    its gradient, unless neither module has one. Buffers are not compared. Nothing is communicated.

    Raises ``AssertionError`` that names the parameter and what differs. Differs from upstream's: every rank compares
    with its own replica, so that replicas that drifted apart are noticed. A missing gradient is named, and modules
    without parameters are an error. As upstream's, it refuses the placements (Shard(0), Shard(0)): FSDP shards the
    shards of tensor parallelism, and ``distribute_tensor`` does it the other way round.
    """
    replicated = dict(replicated_module.named_parameters())
    sharded = {_without(prefixes_to_ignore, name): param for name, param in sharded_module.named_parameters()}
    _check_names(cls, list(replicated), list(sharded))
    parts = {}
    for name, reference in replicated.items():
        param = sharded[name]
        what = f"parameter {name!r}"
        parts[f"{what}, local shard"] = _local_parts(cls, what, reference, param, param)
        if (reference.grad is None) != (param.grad is None):
            without, with_one = ("replicated", "sharded") if reference.grad is None else ("sharded", "replicated")
            cls.fail(f"gradient of {name!r}: the {with_one} module has one, the {without} module has none")
        if reference.grad is not None:
            what = f"gradient of {name!r}"
            parts[f"{what}, local shard"] = _local_parts(cls, what, reference.grad, param.grad, param)
    # All at once: some gradients may be zero, but not all values. A rank may have no part of any parameter.
    found, expected = ({what: pair[side] for what, pair in parts.items()} for side in (0, 1))
    cls.assertEqual(found, expected, may_be="empty")


def _without(prefixes: tuple[str, ...], name: str) -> str:
    for prefix in prefixes:
        name = name.replace(prefix, "")
    return name


def _check_names(cls: Any, replicated: list[str], sharded: list[str]) -> None:
    if not replicated and not sharded:
        cls.fail("neither module has a parameter, so nothing was compared")
    missing = [name for name in replicated if name not in sharded]
    extra = [name for name in sharded if name not in replicated]
    if missing or extra:
        cls.fail(f"parameters of the replicated module only: {missing}; of the sharded module only: {extra}")
    if replicated != sharded:
        cls.fail(f"the modules' parameters differ in order: {replicated} and {sharded}")


def _local_parts(
    cls: Any, what: str, reference: torch.Tensor, sharded: Any, param: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """The local shard of ``sharded``, and that of ``reference`` under the placements of the DTensor ``param``."""
    if not isinstance(sharded, DTensor):
        cls.fail(f"{what} is a {type(sharded).__name__} in the sharded module, not a DTensor")
    mesh, placements = param.device_mesh, param.placements
    if placements == (Shard(0), Shard(0)):
        cls.fail(f"{what} has the placements {placements}, which distribute_tensor lays out in another order")
    if sharded.placements != placements or sharded.device_mesh != mesh:
        cls.fail(f"{what} has the placements {sharded.placements}, its parameter {placements}")
    if sharded.shape != reference.shape:
        cls.fail(f"{what} has the shape {tuple(sharded.shape)}, in the replicated module {tuple(reference.shape)}")
    expected = distribute_tensor(reference.detach(), mesh, placements, src_data_rank=None).to_local()
    return sharded.to_local().detach(), expected
