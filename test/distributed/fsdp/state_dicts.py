"""The three types of FSDP1's state dicts, and common helpers of their tests."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, LocalStateDictConfig, ShardedStateDictConfig, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.common_fsdp import FSDPTest, _broadcast_state_dict
from torch_fsdp_tests.common_fsdp.substitutes import to_host_is_a_copy
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.internals import clean_name, sharded_tensors
from torch_fsdp_tests.fsdp.references import full_parameters, of_all_ranks

HOST = torch.device("cpu")  # the CPU is the subject

if TYPE_CHECKING:
    _Base = FSDPTest
else:
    _Base = object

StateDict = dict[str, Any]

KINDS = {
    "state_dict": (StateDictType.FULL_STATE_DICT, FullStateDictConfig),
    "sharded_state_dict": (StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig),
    "local_state_dict": (StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig),
}
UNFLATTENED = ["state_dict", "sharded_state_dict"]
# Kinds of state dict, without and with ``use_orig_params=True``. The local kind does not support ``use_orig_params``.
FORMS = [*((kind, False) for kind in KINDS), *((kind, True) for kind in UNFLATTENED)]


class StateDictMixin(_Base):
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

    def _received(self, state_dict: StateDict, rank0_and_offload: bool) -> StateDict:
        """If only rank 0 has the state dict, send it to every rank and to the device."""
        return _broadcast_state_dict(self.rank, state_dict) if rank0_and_offload else state_dict

    def _compare_models(self, model: nn.Module, model_new: nn.Module, assert_fn: Callable[[Any, Any], None]) -> None:
        """Call ``assert_fn`` on the lists of unsharded parameters, and on the lists of buffers if there are any."""
        with FSDP.summon_full_params(model), FSDP.summon_full_params(model_new):
            params, params_new = list(model.parameters()), list(model_new.parameters())
            self.assertEqual(len(params), len(params_new))
            self.assertGreater(len(params), 0)
            assert_fn(params, params_new)
            buffers, buffers_new = list(model.buffers()), list(model_new.buffers())
            self.assertEqual(len(buffers), len(buffers_new))
            if buffers:
                assert_fn(buffers, buffers_new)

    def _validate_state_dict_contents(
        self, model: nn.Module, state_dict: StateDict, rank0_and_offload: bool, ignore_keys: Iterable[str] = ()
    ) -> None:
        """Only rank 0 has values, in CPU memory. Every rank keeps values from outside FSDP on their device.

        ``ignore_keys`` are parts of names.
        """
        if not rank0_and_offload:
            return
        if self.rank == 0:
            self.assertNotEqual(state_dict, {})
            for name, value in state_dict.items():
                if not any(part in name for part in ignore_keys):
                    self.assertEqual(value.device, HOST, name)
        elif isinstance(model, FSDP):
            self.assertEqual(state_dict, {}, may_be="empty")
        else:
            self.assertTrue(all(any(part in name for part in ignore_keys) for name in state_dict), state_dict)

    def _train(self, model: nn.Module, optim: torch.optim.Optimizer, inp: torch.Tensor, iterations: int = 1) -> None:
        for _ in range(iterations):
            optim.zero_grad()
            model(inp).mean().backward()
            optim.step()

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

    def _step(self, model: nn.Module, optim: torch.optim.Optimizer, step: int) -> None:
        """One step of the uneven layers on this rank's rows."""
        optim.zero_grad()
        model(self._rows(4, 3, step=step)).square().sum().backward()
        optim.step()


def square() -> nn.Linear:
    return nn.Linear(10, 10, bias=False)


def summoned(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers, by the names of the plain model."""
    buffers = {clean_name(name): buffer.detach().clone() for name, buffer in model.named_buffers()}
    return {**full_parameters(model), **buffers}


def make_nonzero(model: nn.Module) -> None:
    """Make all elements nonzero, and the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    with FSDP.summon_full_params(model), torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            values = torch.randint(1, 100, tensor.shape, generator=generator)
            tensor.copy_(values / 100 if tensor.is_floating_point() else values)


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
