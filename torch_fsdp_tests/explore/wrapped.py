"""A program's model under FSDP1."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from torch_fsdp_tests.explore.lifecycle import resolved
from torch_fsdp_tests.explore.program import Program, Step
from torch_fsdp_tests.explore.reference import attribute_at, dtype_of, model_of, optimizer_of
from torch_fsdp_tests.explore.subject import Seen, Subject
from torch_fsdp_tests.fsdp import internals


class FSDP1Subject(Subject):
    """The model of a program on this rank, wrapped with FSDP1. Its units have one module each."""

    def __init__(self, program: Program, rank: int, mesh: DeviceMesh) -> None:
        model = model_of(program, mesh.device_type)
        self.names = {id(each): name for name, each in model.named_parameters()}
        self.sizes = {name: each.shape for name, each in model.named_parameters()}
        ignored = [attribute_at(model, name) for name in program.ignored]
        prefetch = BackwardPrefetch[program.backward_prefetch] if program.backward_prefetch else None
        settings: dict[str, Any] = {
            "device_mesh": mesh,
            "device_id": torch.device(mesh.device_type),
            "sharding_strategy": ShardingStrategy[program.strategy],
            "use_orig_params": program.orig_params,
            "limit_all_gathers": program.limit_all_gathers,
            "forward_prefetch": program.forward_prefetch,
            "backward_prefetch": prefetch,
            "cpu_offload": CPUOffload(program.offload),
            "ignored_states": ignored or None,
        }
        if program.param_dtype or program.reduce_dtype:
            settings["mixed_precision"] = MixedPrecision(
                dtype_of(program.param_dtype), dtype_of(program.reduce_dtype), None
            )
        for unit in program.units[:-1]:
            owner, _, name = resolved(program, unit.modules[0]).rpartition(".")
            parent = model.get_submodule(owner)
            wrapped = FSDP(getattr(parent, name), **settings)
            for new, old in program.shares:
                if old == unit.modules[0]:
                    above, _, last = new.rpartition(".")
                    setattr(model.get_submodule(above), last, wrapped)
            setattr(parent, name, wrapped)
        super().__init__(program, rank, mesh, FSDP(model, **settings))
        self.flat = {
            name: (handle, index)
            for handle in internals.handles(self.model)
            for index, name in enumerate(map(internals.clean_name, self._names_of(handle)))
        }
        self.optimizer = optimizer_of(program, self.model.parameters())
        self.syncs = True

    def _names_of(self, handle: Any) -> list[str]:
        """The names of a flat parameter's parameters in the model."""
        prefix = next(name for name, module in self.model.named_modules() if module is handle._fully_sharded_module)
        return [f"{prefix}.{name}".lstrip(".") for name in internals.names_in(handle.flat_param)]

    # --- What can be seen ---------------------------------------------------------------------------------------------

    def seen(self, name: str) -> Seen:
        if name not in self.flat:
            parameter = attribute_at(self.model, name)
            return Seen(parameter.detach(), parameter.grad, parameter.requires_grad)
        handle, index = self.flat[name]
        flat = handle.flat_param
        start, size, _, _ = self._extent(name)
        shard = internals.local_shard(flat) if internals.is_initialized(flat) else flat
        if self.program.orig_params:
            original = internals.parameters_in(flat)[index]
            grad, trains = original.grad, original.requires_grad
        else:
            trains = flat.requires_grad
            grad = None if flat.grad is None else flat.grad[start : start + size]
        return Seen(shard.detach()[start : start + size], None if grad is None else grad.flatten(), trains)

    def share(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        if name not in self.flat:
            return whole
        _, size, first, _ = self._extent(name)
        return whole.flatten()[first : first + size]

    def _extent(self, name: str) -> tuple[int, int, int, int]:
        """Where the parameter is in the shard, how many elements of it, and which."""
        handle, index = self.flat[name]
        info = internals.shard_infos(handle.flat_param)[index]
        if not info.in_shard:
            return 0, 0, 0, 0
        return info.offset_in_shard, info.numel_in_shard, info.intra_param_start_idx, info.intra_param_end_idx

    def buffers(self) -> dict[str, torch.Tensor]:
        return {internals.clean_name(name): each for name, each in self.model.named_buffers()}

    def states(self) -> list[str | None]:
        return [None for _ in self.program.units]

    def unfreed(self) -> list[str]:
        return []

    # --- Steps --------------------------------------------------------------------------------------------------------

    def _forward(self, step: Step) -> torch.Tensor:
        if self.syncs:
            return super()._forward(step)
        with self.model.no_sync():
            return super()._forward(step)

    def _backward(self, step: Step) -> None:
        if self.syncs:
            return super()._backward(step)
        with self.model.no_sync():
            return super()._backward(step)

    def _sync(self, step: Step) -> None:
        self.syncs = step.flag

    def _clip(self, step: Step) -> None:
        self.norm = self.model.clip_grad_norm_(step.number)

    def _edit(self, step: Step) -> None:
        with FSDP.summon_full_params(self.model):
            super()._edit(step)

    def _types(self, kind: str) -> Any:
        if kind == "full":
            return FSDP.state_dict_type(
                self.model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig()
            )
        return FSDP.state_dict_type(
            self.model, StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig()
        )

    def _save_model(self, step: Step) -> None:
        with self._types(step.at):
            self.saved["model"] = (step.at, copy.deepcopy(self.model.state_dict()))

    def _load_model(self, step: Step) -> None:
        kind, state = self.saved["model"]
        with self._types(kind):
            self.model.load_state_dict(copy.deepcopy(state))

    def _save_optimizer(self, step: Step) -> None:
        with self._types(step.at):
            self.saved["optimizer"] = (step.at, copy.deepcopy(FSDP.optim_state_dict(self.model, self.optimizer)))

    def _load_optimizer(self, step: Step) -> None:
        kind, state = self.saved["optimizer"]
        with self._types(kind):
            state = FSDP.optim_state_dict_to_load(self.model, self.optimizer, copy.deepcopy(state))
            self.optimizer.load_state_dict(state)
