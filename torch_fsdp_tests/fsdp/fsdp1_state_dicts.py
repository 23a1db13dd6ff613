"""The three types of FSDP1's state dicts, and common helpers of their tests."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, LocalStateDictConfig, ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.common_distributed import RankTestCase
from torch_fsdp_tests.common_fsdp.substitutes import to_host_is_a_copy
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.internals import clean_name, sharded_tensors
from torch_fsdp_tests.fsdp.references import full_parameters, of_all_ranks

HOST = torch.device("cpu")  # the CPU is the subject

StateDict = dict[str, Any]

KINDS = {
    "state_dict": (StateDictType.FULL_STATE_DICT, FullStateDictConfig),
    "sharded_state_dict": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig),
    "local_state_dict": (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig),
}
UNFLATTENED = ["state_dict", "sharded_state_dict"]
# Kinds of state dict, without and with ``use_orig_params=True``. The local kind does not support ``use_orig_params``.
FORMS = [*((kind, False) for kind in KINDS), *((kind, True) for kind in UNFLATTENED)]


class StateDictMixin(RankTestCase):
    """Helpers to save, load and compare."""

    def _mode(self, model: nn.Module, kind: str, rank0_and_offload: bool = False) -> Any:
        """The context for a kind of state dict. Only full state dicts can be saved on rank 0 only."""
        state_dict_type, config = KINDS[kind]
        rank0 = {"rank0_only": True} if rank0_and_offload and kind == "state_dict" else {}
        return FSDP.state_dict_type(model, state_dict_type, config(offload_to_cpu=rank0_and_offload, **rank0))

    def _save(self, model: nn.Module, kind: str, rank0_and_offload: bool = False, **kwargs: Any) -> StateDict:
        """Save a state dict, and check that all parameters are resharded and their buffers are freed."""
        copies = to_host_is_a_copy() if rank0_and_offload else contextlib.nullcontext()
        with self._mode(model, kind, rank0_and_offload), copies:
            state_dict = model.state_dict(**kwargs)
        self._assert_resharded(model)
        return state_dict

    def _load(self, model: nn.Module, kind: str, state_dict: StateDict, strict: bool = True) -> Any:
        with self._mode(model, kind):
            result = model.load_state_dict(state_dict, strict=strict)
        self._assert_resharded(model)
        return result

    def _assert_resharded(self, model: nn.Module) -> None:
        for flat_param in internals.flat_params(model):
            for buffer in internals.gather_buffers(flat_param):
                self.assertEqual(buffer.untyped_storage().size(), 0)
            self.assertEqual(flat_param.data_ptr(), internals.local_shard(flat_param).data_ptr())
        for module in FSDP.fsdp_modules(model):
            self.assertIs(module.training_state, internals.fsdp1_common.TrainingState.IDLE)

    def _rows(self, *shape: int, of: int | None = None, step: int = 0) -> torch.Tensor:
        """Random rows for this rank, or for rank ``of``."""
        generator = torch.Generator().manual_seed(100 * step + (self.rank if of is None else of))
        return torch.randn(shape, generator=generator).to(self.device)

    def _uneven_layers(self, seed: int = 0, hidden: int = 5) -> nn.Module:
        """Layers of 5 x 3 and 1 x 5, with biases, so that no number of ranks divides all sizes."""
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, hidden), nn.Tanh(), nn.Linear(hidden, 1)).to(self.device)

    def _wrapped(self, model: nn.Module, **fsdp_kwargs: Any) -> nn.Module:
        return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **fsdp_kwargs)


def summoned(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers, by the names of the plain model."""
    buffers = {clean_name(name): buffer.detach().clone() for name, buffer in model.named_buffers()}
    return {**full_parameters(model), **buffers}


def gathered(state_dict: StateDict, device: torch.device) -> StateDict:
    """Join sharded tensors by their offsets. Elements that no rank has become NaN."""
    sharded = {name: value for name, value in state_dict.items() if isinstance(value, sharded_tensors.ShardedTensor)}
    # Flat shards are detached, because autograd forbids to use views that were made under ``no_grad`` after a step.
    mine = {
        name: [(shard.metadata.shard_offsets, shard.tensor.detach().to(HOST)) for shard in value.local_shards()]
        for name, value in sharded.items()
    }
    of_all = of_all_ranks(mine)
    whole = dict(state_dict)
    for name, value in sharded.items():
        tensor = torch.full(value.size(), torch.nan, dtype=value.dtype)
        for offsets, piece in itertools.chain.from_iterable(each[name] for each in of_all):
            tensor[tuple(map(lambda start, size: slice(start, start + size), offsets, piece.shape))] = piece
        whole[name] = tensor.to(device)
    return whole
