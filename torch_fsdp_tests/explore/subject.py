"""A program's model under FSDP2: what a step does, and what a user can see afterwards."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from torch_fsdp_tests.explore.lifecycle import resolved
from torch_fsdp_tests.explore.program import Program, Step
from torch_fsdp_tests.explore.reference import attribute_at, batch_of, dtype_of, model_of, optimizer_of
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.installed_torch import torch_names


@dataclasses.dataclass
class Seen:
    """What can be seen of a parameter on this rank."""

    value: torch.Tensor
    grad: torch.Tensor | None
    requires_grad: bool


class Subject:
    """The model of a program on this rank, and the steps that all APIs have."""

    def __init__(self, program: Program, rank: int, mesh: DeviceMesh, model: nn.Module) -> None:
        self.program, self.rank, self.mesh = program, rank, mesh
        self.model: Any = model
        self.optimizer: torch.optim.Optimizer
        self.pending: list[torch.Tensor] = []
        self.saved: dict[str, Any] = {}
        self.norm: torch.Tensor | None = None

    def seen(self, name: str) -> Seen:
        """What can be seen of a parameter."""
        raise NotImplementedError

    def share(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's share of a parameter or gradient."""
        raise NotImplementedError

    def buffers(self) -> dict[str, torch.Tensor]:
        return dict(self.model.named_buffers())

    def states(self) -> list[str | None]:
        """The state of each unit. None where it cannot be seen."""
        raise NotImplementedError

    def unfreed(self) -> list[str]:
        """Units that are sharded, and still hold the memory of gathered parameters."""
        raise NotImplementedError

    def module(self, path: str) -> Any:
        return self.model.get_submodule(resolved(self.program, path))

    def apply(self, step: Step) -> torch.Tensor | None:
        """Run a step, and return the output of a forward."""
        return getattr(self, f"_{step.kind}")(step)

    def _run(self, step: Step, fail: str | None) -> tuple[torch.Tensor, torch.Tensor]:
        x, weights = batch_of(self.program, step, self.rank, self.mesh.device_type)
        return self.model(x, step.names, fail), weights

    def _forward(self, step: Step) -> torch.Tensor:
        output, weights = self._run(step, step.at or None)
        self.pending.append((output * weights).sum())
        return output

    def _evaluate(self, step: Step) -> torch.Tensor:
        self.model.train(step.at != "eval")
        with torch.inference_mode() if step.at == "inference" else torch.no_grad():
            output, _ = self._run(step, None)
        self.model.train()
        return output

    def _backward(self, step: Step) -> None:
        index = int(step.number)
        loss = self.pending[index] if step.flag else self.pending.pop(index)
        loss.backward(retain_graph=step.flag)

    def _step(self, step: Step) -> None:
        self.optimizer.step()

    def _zero(self, step: Step) -> None:
        self.optimizer.zero_grad(set_to_none=step.flag)

    def _parameter(self, step: Step) -> nn.Parameter:
        return attribute_at(self.model, resolved(self.program, step.at))

    def _freeze(self, step: Step) -> None:
        self._parameter(step).requires_grad_(step.flag)

    def _edit(self, step: Step) -> None:
        with torch.no_grad():
            self._parameter(step).mul_(0.5)


class FSDP2Subject(Subject):
    """The model of a program on this rank, sharded with ``fully_shard``."""

    def __init__(self, program: Program, rank: int, mesh: DeviceMesh) -> None:
        super().__init__(program, rank, mesh, model_of(program, mesh.device_type))
        ignored = {attribute_at(self.model, name) for name in program.ignored}
        columns = {id(attribute_at(self.model, name)) for name in program.columns}
        by_columns = {"shard_placement_fn": lambda each: Shard(1) if id(each) in columns else None} if columns else {}
        for unit in program.units:
            modules = [self.module(path) for path in unit.modules]
            is_root = unit.modules == ("",)
            policy = MixedPrecisionPolicy(
                dtype_of(program.param_dtype),
                dtype_of(program.reduce_dtype),
                dtype_of(program.output_dtype) if is_root else None,
                program.cast_inputs,
            )
            fully_shard(
                modules if len(modules) > 1 else modules[0],
                mesh=mesh,
                reshard_after_forward=_reshards(unit.reshard),
                mp_policy=policy,
                offload_policy=CPUOffloadPolicy(pin_memory=False) if program.offload else OffloadPolicy(),
                **({"ignored_params": ignored} if ignored else {}),
                **by_columns,
            )
        self.named = dict(self.model.named_parameters())  # while all are sharded
        self.optimizer = optimizer_of(program, self.model.parameters())

    # --- What can be seen ---------------------------------------------------------------------------------------------

    def seen(self, name: str) -> Seen:
        parameter = self.named[name]
        return Seen(
            _local(parameter.detach()),
            None if parameter.grad is None else _local(parameter.grad),
            parameter.requires_grad,
        )

    def share(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """This rank's share of a parameter or gradient."""
        parameter = self.named[name]
        if not isinstance(parameter, DTensor):
            return whole
        (dim,) = {each.dim for each in parameter.placements if isinstance(each, Shard)} or {0}
        count = self.mesh.size(self.mesh.ndim - 1)
        chunks = whole.chunk(count, dim)
        place = self.mesh.get_coordinate()[-1]
        return chunks[place] if place < len(chunks) else whole.narrow(dim, 0, 0)

    def states(self) -> list[str | None]:
        """The state of each unit. None without parameters of its own."""
        return [group and torch_names.attribute(group, "_sharded_state").name for group in self._groups()]

    def unfreed(self) -> list[str]:
        """Units that are sharded, and still hold the memory of gathered parameters."""
        held = []
        for unit, group in zip(self.program.units, self._groups()):
            if group is None or torch_names.attribute(group, "_sharded_state").name != "SHARDED":
                continue
            for each in torch_names.attribute(group, "fsdp_params"):
                whole = getattr(each, "_unsharded_param", None)
                if whole is not None and self.mesh.size(self.mesh.ndim - 1) > 1:
                    if whole.untyped_storage().size() > 0 and whole.numel():
                        held.append(",".join(unit.modules))
        return held

    def _groups(self) -> list[Any]:
        modules = [self.module(unit.modules[0]) for unit in self.program.units]
        return [internals.group_of(each) if internals.has_group(each) else None for each in modules]

    # --- Steps --------------------------------------------------------------------------------------------------------

    def _clip(self, step: Step) -> None:
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), step.number)
        self.norm = norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _reset(self, step: Step) -> None:
        self.model.reset_iter_state()

    def _sync(self, step: Step) -> None:
        self.model.set_requires_gradient_sync(step.flag)

    def _last(self, step: Step) -> None:
        self.model.set_is_last_backward(step.flag)

    def _keep_after_backward(self, step: Step) -> None:
        self.model.set_reshard_after_backward(step.flag)

    def _reshard_after_forward(self, step: Step) -> None:
        self.module(step.at).set_reshard_after_forward(step.flag, recurse=False)

    def _all_reduce(self, step: Step) -> None:
        self.model.set_requires_all_reduce(step.flag)

    def _divide(self, step: Step) -> None:
        for module in internals.fsdp_modules(self.model):
            module.set_gradient_divide_factor(step.number)

    def _sum(self, step: Step) -> None:
        for module in internals.fsdp_modules(self.model):
            module.set_force_sum_reduction_for_comms(step.flag)

    def _prefetch_forward(self, step: Step) -> None:
        self.module(step.at).set_modules_to_forward_prefetch([self.module(name) for name in step.names])

    def _prefetch_backward(self, step: Step) -> None:
        self.module(step.at).set_modules_to_backward_prefetch([self.module(name) for name in step.names])

    def _unshard(self, step: Step) -> None:
        handles = [module.unshard(async_op=step.flag) for module in self._at(step.at)]
        for handle in handles:
            if handle is not None:
                handle.wait()

    def _reshard(self, step: Step) -> None:
        for module in self._at(step.at):
            module.reshard()

    def _at(self, path: str) -> list[Any]:
        return internals.fsdp_modules(self.model) if path == "*" else [self.module(path)]

    def _save_model(self, step: Step) -> None:
        if step.at == "plain":
            state = {name: value.detach().clone() for name, value in self.model.state_dict().items()}
        else:
            state = get_model_state_dict(self.model, options=_options(step.at))
        self.saved["model"] = (step.at, _copy(state))

    def _load_model(self, step: Step) -> None:
        kind, state = self.saved["model"]
        if kind == "plain":
            self.model.load_state_dict(_copy(state))
        else:
            set_model_state_dict(self.model, _copy(state), options=_options(kind))

    def _save_optimizer(self, step: Step) -> None:
        if step.at == "plain":
            state: Any = self.optimizer.state_dict()
        else:
            state = get_optimizer_state_dict(self.model, self.optimizer, options=_options(step.at))
        self.saved["optimizer"] = (step.at, _copy(state))

    def _load_optimizer(self, step: Step) -> None:
        kind, state = self.saved["optimizer"]
        if kind == "plain":
            self.optimizer.load_state_dict(_copy(state))
        else:
            set_optimizer_state_dict(self.model, self.optimizer, _copy(state), options=_options(kind))


def _options(kind: str) -> StateDictOptions:
    return StateDictOptions(full_state_dict=kind == "full", flatten_optimizer_state_dict=kind == "flattened")


def _copy(state: Any) -> Any:
    return copy.deepcopy(state)


def _reshards(reshard: str) -> bool | int | None:
    match reshard:
        case "default":
            return None
        case "yes" | "no":
            return reshard == "yes"
    return int(reshard)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
