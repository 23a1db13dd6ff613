"""Compares distributed state dicts with those of plain models, value by value.

Replaces ``torch/testing/_internal/distributed/common_state_dict.py``. Names are upstream's.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map

from torch_fsdp_tests.common_utils import TestCase
from torch_fsdp_tests.installed_torch import torch_names, upstream_names

__all__ = [
    "FusionEmbeddingWithHook",
    "FusionEmbeddingWithModifier",
    "VerifyStateDictMixin",
]

__getattr__ = upstream_names.complete(__name__)

_sharded_tensors = torch_names.module("torch.distributed._shard.sharded_tensor")
_HOST = torch.device("cpu")
EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}  # for comparisons after a round trip, bit for bit
# With the default tolerance the second moments, which are squares, could as well be zeros.
MOMENTS: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-9}

StateDict = dict[str, Any]


def is_sharded(value: object) -> bool:
    """Whether the value is a DTensor or a ShardedTensor."""
    return isinstance(value, (DTensor, _sharded_tensors.ShardedTensor))


def whole(value: Any) -> Any:
    """The full tensor of a DTensor or a ShardedTensor, or any other value itself. A collective for sharded values."""
    if isinstance(value, DTensor):
        return value.to(value.device_mesh.device_type).full_tensor()
    if not is_sharded(value):
        return value
    shards = [(shard.metadata.shard_offsets, shard.tensor.cpu()) for shard in value.local_shards()]
    shards_of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(shards_of_all, shards)
    full = torch.full(value.size(), float("nan"), dtype=value.dtype)
    for offsets, shard in itertools.chain.from_iterable(shards_of_all):
        full[tuple(slice(start, start + size) for start, size in zip(offsets, shard.shape, strict=True))] = shard
    return full


def whole_tree(state_dict: Any) -> Any:
    """The state dict with :func:`whole` of each value, and copies of the tensors. A collective."""

    def whole_copy(value: Any) -> Any:
        value = whole(value)
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    return tree_map(whole_copy, state_dict, is_leaf=is_sharded)


def copied(state_dict: Any) -> Any:
    """A deep copy of a state dict, value by value.

    ``copy.deepcopy`` of the whole takes quadratic time with ShardedTensors: for each, torch searches all copies.
    """
    return tree_map(copy.deepcopy, state_dict, is_leaf=is_sharded)


def by_parameter(osd: StateDict) -> StateDict:
    """The entries of an optimizer's state dict for each parameter: ``state.NAME.KEY`` and ``param_groups.NAME.KEY``.

    A flattened state dict has this form, and is returned. Raises ``ValueError`` for a parameter in two groups.
    """
    if "state" not in osd:
        return osd
    entries = {f"state.{name}.{key}": value for name, state in osd["state"].items() for key, value in state.items()}
    names = [name for group in osd["param_groups"] for name in group["params"]]
    if len(set(names)) < len(names):
        raise ValueError(f"a parameter is in two groups: {names}")
    for group in osd["param_groups"]:
        settings = {key: value for key, value in group.items() if key != "params"}
        entries |= {f"param_groups.{name}.{key}": value for name in group["params"] for key, value in settings.items()}
    return entries


def named_osd(model: nn.Module, optim: torch.optim.Optimizer, osd: StateDict | None = None) -> StateDict:
    """The state dict of a plain model's optimizer, with the parameters' names instead of their numbers."""
    osd = optim.state_dict() if osd is None else osd
    names = {param: name for name, param in model.named_parameters()}
    numbered = [names[param] for group in optim.param_groups for param in group["params"]]
    groups = [{**group, "params": [numbered[number] for number in group["params"]]} for group in osd["param_groups"]]
    return {"state": {numbered[number]: state for number, state in osd["state"].items()}, "param_groups": groups}


class VerifyStateDictMixin(TestCase):
    """Comparisons for a test case whose ranks all call them.

    Differs from upstream's: states of optimizers are gathered and compared with those of the plain model, while
    upstream compares them with themselves. The parameter groups are also compared.
    """

    def _compare_tensor(self, orig_tensor: Any, dist_tensor: Any, offload_to_cpu: bool = False, **kwargs: Any) -> None:
        """Compare a value with the full value of a distributed one. ``kwargs`` are those of ``assertEqual``."""
        if offload_to_cpu and isinstance(dist_tensor, torch.Tensor):
            self.assertEqual(dist_tensor.device, _HOST)
        gathered = whole(dist_tensor)
        self.assertIs(isinstance(gathered, torch.Tensor), isinstance(orig_tensor, torch.Tensor))
        self.assertEqual(gathered, orig_tensor, **kwargs)

    def _compare_dicts(
        self, expected: StateDict, actual: StateDict, offload_to_cpu: bool = False, **kwargs: Any
    ) -> None:
        """Compare the full values of a distributed dict by their names. There must be at least one."""
        self.assertGreater(len(expected), 0)
        self.assertEqual(sorted(actual), sorted(expected))
        if offload_to_cpu:
            devices = {value.device for value in actual.values() if isinstance(value, torch.Tensor)}
            self.assertEqual(devices, {_HOST})
        self.assertEqual(whole_tree(actual), expected, **kwargs)

    def _verify_msd(
        self,
        msd: StateDict,
        dist_msd: StateDict,
        options: StateDictOptions | None = None,
        offload_to_cpu: bool = False,
        **kwargs: Any,
    ) -> None:
        """Compare a plain model's state dict with a distributed one, taken with ``options``.

        With ``ignore_frozen_params`` the names must be those of trainable parameters, so ``msd`` must have only these.
        """
        if options is not None and options.full_state_dict:
            self.assertFalse(any(map(is_sharded, dist_msd.values())))
        self._compare_dicts(msd, dist_msd, offload_to_cpu, **kwargs)

    def _verify_osd(
        self, model: nn.Module, optim: torch.optim.Optimizer, osd: StateDict, dist_osd: StateDict, **kwargs: Any
    ) -> None:
        """Compare ``osd``, of a plain model's optimizer, with a distributed state dict, either nested or flattened."""
        kwargs = {**MOMENTS, **kwargs}
        self._compare_dicts(by_parameter(named_osd(model, optim, osd)), by_parameter(dist_osd), **kwargs)

    def _verify_osd_by_load(
        self,
        model: nn.Module,
        optim: torch.optim.Optimizer,
        new_optim: torch.optim.Optimizer,
        dist_osd: StateDict,
        **kwargs: Any,
    ) -> None:
        """Gather a distributed state dict and load it into ``new_optim``, which must then equal the plain ``optim``.

        The gradients are cleared, because with gradients torch does not create the states of a new optimizer.
        """
        model.zero_grad()
        options = StateDictOptions(flatten_optimizer_state_dict="state" not in dist_osd)
        set_optimizer_state_dict(model, new_optim, whole_tree(dist_osd), options=options)
        self.assertEqual(new_optim.state_dict(), optim.state_dict(), **{**MOMENTS, **kwargs})


class FusionEmbeddingWithHook(nn.Module):
    """Two embeddings. In the state dict, the first is ``weight``, not ``embedding.weight``. DSD does not know this."""

    def __init__(self, vocab_size: int, fusion_vocab_size: int, embed_dim: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embed_dim)
        self.fusion_embedding = nn.Embedding(fusion_vocab_size, embed_dim)
        self._register_state_dict_hook(type(self)._state_dict_hook)
        self.register_load_state_dict_pre_hook(type(self)._load_state_dict_hook)

    def _state_dict_hook(self, destination: StateDict, prefix: str, keep_vars: Any) -> None:
        destination[f"{prefix}weight"] = destination.pop(f"{prefix}embedding.weight")

    def _load_state_dict_hook(self, state_dict: StateDict, prefix: str, *args: Any, **kwargs: Any) -> None:
        if f"{prefix}weight" in state_dict:
            state_dict[f"{prefix}embedding.weight"] = state_dict.pop(f"{prefix}weight")


class FusionEmbeddingWithModifier(FusionEmbeddingWithHook):
    """Like :class:`FusionEmbeddingWithHook`, but tells DSD the name."""

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "embedding"}
