"""A model that FSDP1 or FSDP2 shards in one of the configurations: it trains, is saved, and is loaded."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.modules.batchnorm import _BatchNorm

from torch_fsdp_tests.common_fsdp.device import rank_device
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import full, named, of_all_ranks
from torch_fsdp_tests.fsdp.shards import local_of, shard_of
from torch_fsdp_tests.models.configurations import Configuration
from torch_fsdp_tests.models.plain import (
    LARGEST_NORM,
    LOW,
    Data,
    Model,
    ModelTraining,
    Tensors,
    Unit,
    buffers_of,
    built,
    single,
)


class Mismatch(AssertionError):
    """The sharded training differs from the plain one. The message is a sentence."""


# For each name, what this rank has and what it must have. Both may be local shards.
Pairs = dict[str, tuple[torch.Tensor, torch.Tensor]]


def sharded(case: Model, configuration: Configuration, seed: int = 0) -> ShardedTraining:
    """A new model with an optimizer in this configuration."""
    cls = Fsdp1Training if configuration.interface == "fsdp1" else Fsdp2Training
    return cls(case, configuration, built(case, seed, is_frozen=configuration.has("frozen")))


def _mesh(configuration: Configuration) -> DeviceMesh:
    """All ranks. The last of two dimensions is for tensor parallelism, if there is any."""
    with internals.fake_tensors.unset_fake_temporarily():  # a mesh computes with the ranks
        if configuration.has("hsdp", "tp"):
            return make_mesh(2, 2, names=("replicate", "shard") if configuration.has("hsdp") else ("shard", "tensor"))
        return make_mesh(dist.get_world_size(), names=("shard",))


class ShardedTraining(ModelTraining):
    """A sharded model with its optimizer. Both interfaces have these methods."""

    def __init__(self, case: Model, configuration: Configuration, model: nn.Module) -> None:
        super().__init__(case, configuration)
        mesh = _mesh(configuration)
        if configuration.has("tp"):
            case.parallelize(model, mesh["tensor"])
            mesh = mesh["shard"]
        self._computed: list[torch.dtype] = []  # dtypes of parameters in the forward of their modules
        self._reductions: list[int] = []  # how often each microbatch of the last step reduced gradients
        for module in model.modules() if configuration.is_mixed else ():
            if not isinstance(module, _BatchNorm):  # FSDP1 leaves it in float32
                names = [name for name, param in module.named_parameters(recurse=False) if param.is_floating_point()]
                module.register_forward_pre_hook(functools.partial(self._record_dtypes, names))
        units = self._units_of(model)
        self.model = self._sharded(model, [] if configuration.has("root") else units, mesh)
        case.prepare(self.model)
        self.optimizer = self._optimizer_of(self.model.parameters())

    @property
    def _reduced_in(self) -> torch.dtype:
        return LOW if self._configuration.has("bf16reduce") else torch.float32

    def _record_dtypes(self, names: list[str], module: nn.Module, args: Any) -> None:
        self._computed += [getattr(module, name).dtype for name in names]

    def _sharded(self, model: nn.Module, units: list[Unit], mesh: DeviceMesh) -> nn.Module:
        raise NotImplementedError

    def _reducing(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """The context for a microbatch that is reduced only if it is the last one."""
        raise NotImplementedError

    def clip(self) -> float:
        """Clip the gradients. Returns their norm."""
        raise NotImplementedError

    def gradients(self, expected: Tensors) -> Pairs:
        raise NotImplementedError

    def parameters(self, expected: Tensors) -> Pairs:
        raise NotImplementedError

    def backward(self, data: Data, step: int) -> list[float]:
        self._reductions = []
        return super().backward(data, step)

    @contextlib.contextmanager
    def _microbatch(self, is_last: bool) -> Iterator[None]:
        is_reduced = is_last or not self._configuration.has("nosync")
        with self._reducing(is_reduced), recorded("reduce_scatter", "all_reduce") as calls:
            yield
        self._reductions.append(len(calls))

    def check_features(self, order: list[str]) -> None:
        """Raises :class:`Mismatch` if the last step did not use features that hardly change its numbers.

        ``order`` has the units that the plain training ran in this step.
        """
        has = self._configuration.has
        if self._configuration.is_mixed and (wrong := {*self._computed} - {LOW}):
            raise Mismatch(f"with mixed precision, modules must compute in {LOW}, but some do in {wrong}")
        if self.order != order:
            runs = f"{len(self.order)} times, and the plain model {len(order)} times"
            raise Mismatch(f"the model and its units run {runs}, or in another order")
        if has("nosync") and not self._reductions[0] < self._reductions[-1]:
            raise Mismatch(f"only the last microbatch may reduce gradients, but they do {self._reductions} times")

    def invented(self, expected: Tensors) -> list[str]:
        """The parameters that have a gradient in a rank, and none in the plain training. A collective."""
        own = [name for name, param in named(self.model).items() if param.grad is not None and name not in expected]
        return [*dict.fromkeys(name for names in of_all_ranks(own) for name in names)]

    @property
    def buffers(self) -> Tensors:
        return buffers_of(self.model)

    def spoil(self, saved: Iterable[str]) -> None:
        """Change all parameters and the saved buffers, so that a value that is not loaded shows."""
        with torch.no_grad():
            for tensor in (*self.model.parameters(), *map(self.buffers.get, saved)):
                local_of(tensor).add_(1)

    def save(self, folder: str) -> None:
        """Save model and optimizer. A collective."""
        model, optimizer = get_state_dict(self.model, self.optimizer, options=self._options(cpu_offload=True))
        states = {"model": model, "optimizer": optimizer}
        if self._configuration.has("dcp"):
            dcp.save(states, checkpoint_id=folder)
        elif dist.get_rank() == 0:
            torch.save(states, os.path.join(folder, "full.pt"))

    def load(self, folder: str) -> None:
        """Load what any configuration has saved in this way. A collective."""
        if self._configuration.has("dcp"):
            model, optimizer = get_state_dict(self.model, self.optimizer)
            states = {"model": model, "optimizer": optimizer}
            dcp.load(states, checkpoint_id=folder, planner=self._load_planner)
        else:
            states = torch.load(os.path.join(folder, "full.pt"), weights_only=True)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=states["model"],
            optim_state_dict=states["optimizer"],
            options=self._options(),
        )

    _load_planner: dcp.LoadPlanner | None = None  # torch's default

    def _options(self, cpu_offload: bool = False) -> StateDictOptions:
        is_full = self._configuration.has("dsd")
        leaves_device = is_full and cpu_offload and accelerator.current().has("device_memory")
        return StateDictOptions(full_state_dict=is_full, cpu_offload=leaves_device)


class Fsdp2Training(ShardedTraining):
    """A model on each unit of which ``fully_shard`` or ``replicate`` was called, and then on the root."""

    def _sharded(self, model: nn.Module, units: list[Unit], mesh: DeviceMesh) -> nn.Module:
        has = self._configuration.has
        pinned = accelerator.current().has("pinned_memory")
        options: dict[str, Any] = {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(LOW, self._reduced_in)
            if self._configuration.is_mixed
            else MixedPrecisionPolicy(),
            "offload_policy": CPUOffloadPolicy(pin_memory=pinned) if has("offload") else OffloadPolicy(),
            **({"reshard_after_forward": False} if has("keep") else {}),
        }
        is_whole = self._configuration.interface == "replicate"
        shard = internals.replicate_on_fsdp2.replicate if is_whole else fully_shard
        for module in (*units, model):
            shard(module, **options)
        return model

    def _reducing(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        self.model.set_requires_gradient_sync(is_last)
        return contextlib.nullcontext()

    def clip(self) -> float:
        return full(torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)).item()

    def generated(self) -> Any:
        if hasattr(self.model, "generate"):
            register_fsdp_forward_method(self.model, "generate")
        return super().generated()

    def gradients(self, expected: Tensors) -> Pairs:
        grads = {name: param.grad for name, param in named(self.model).items() if param.grad is not None}
        return _paired(grads, expected, shard_of)

    def parameters(self, expected: Tensors) -> Pairs:
        return _paired({name: param.detach() for name, param in named(self.model).items()}, expected, shard_of)


def _paired(tensors: Mapping[str, Any], expected: Tensors, part: Callable[[torch.Tensor, Any], torch.Tensor]) -> Pairs:
    """The local shards, and the same part of the expected tensors. A tensor that only one side has counts as zeros."""
    pairs = {}
    for name in expected.keys() | tensors.keys():
        if name not in tensors:
            pairs[name] = torch.zeros_like(expected[name]), expected[name]
        else:
            local = local_of(tensors[name])
            wanted = part(expected[name], tensors[name]) if name in expected else torch.zeros_like(local)
            pairs[name] = local, wanted.to(local.device)
    return pairs


class Fsdp1Training(ShardedTraining):
    """A model that ``FullyShardedDataParallel`` wraps, with a policy that selects the units."""

    # The workaround for ``dcp_checkpoint_of_empty_shards_is_not_loaded``, which only tiny parameters show.
    _load_planner = property(lambda self: dcp.DefaultLoadPlanner(flatten_sharded_tensors=False))

    def _sharded(self, model: nn.Module, units: list[Unit], mesh: DeviceMesh) -> nn.Module:
        has, ids = self._configuration.has, set(map(id, single(units)))
        is_mixed = self._configuration.is_mixed
        low = MixedPrecision(LOW, self._reduced_in, buffer_dtype=LOW) if is_mixed else None
        return FSDP(
            model,
            auto_wrap_policy=CustomPolicy(lambda module: id(module) in ids),
            sharding_strategy=self._strategy,
            device_mesh=mesh if has("hsdp", "tp", "noshard") else None,
            use_orig_params=not has("flat"),
            mixed_precision=low,
            cpu_offload=CPUOffload(has("offload")),
            device_id=rank_device(),
        )

    @property
    def _strategy(self) -> ShardingStrategy:
        has = self._configuration.has
        if has("noshard"):
            return ShardingStrategy.NO_SHARD
        if has("hsdp"):
            return internals.hybrid_strategies()[has("keep")]
        return ShardingStrategy.SHARD_GRAD_OP if has("keep") else ShardingStrategy.FULL_SHARD

    def _reducing(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if is_last else self.model.no_sync()

    def clip(self) -> float:
        return self.model.clip_grad_norm_(LARGEST_NORM).item()

    def generated(self) -> Any:
        """The root's own parameters are unsharded, because the calls inside ``generate`` pass the root's hooks by."""
        with FSDP.summon_full_params(self.model, writeback=False, recurse=False):
            return super().generated()

    def gradients(self, expected: Tensors) -> Pairs:
        """This rank's elements of each gradient. No gradient counts as zeros.

        ``summon_full_params`` raises for flat and offloaded ones, and aborts if only some ranks have any
        (``fsdp1_missing_gradient_is_float32``).
        """
        if self._configuration.has("tp"):  # a flat parameter has parts of DTensors, and does not know their placements
            no_grads = self._configuration.has("offload")
            return {} if no_grads else self._full(lambda param: param.grad, expected, with_grads=True)
        params, instances, pairs = named(self.model), internals.instances(self.model), {}
        for unit, names in internals.names_managed(self.model).items():
            flat_param = internals.flat_param_of(instances[unit])
            infos = zip(names, internals.shard_infos(flat_param), internals.strides_in(flat_param), strict=True)
            for name, info, stride in (each for each in infos if each[1].in_shard):
                grad, start = (params[name].grad, 0) if name in params else (flat_param.grad, info.offset_in_shard)
                own = _elements(grad, stride, start, info.numel_in_shard)
                wanted = _elements(expected.get(name), stride, info.intra_param_start_idx, info.numel_in_shard)
                pairs[name] = own, wanted.to(own.device)
        return pairs

    def parameters(self, expected: Tensors) -> Pairs:
        return self._full(lambda param: param.detach(), expected)

    def _full(self, read: Callable[[Any], torch.Tensor | None], expected: Tensors, **options: bool) -> Pairs:
        with FSDP.summon_full_params(self.model, writeback=False, **options):
            tensors = {name: read(param) for name, param in named(self.model).items()}
            own = {name: full(tensor).clone() for name, tensor in tensors.items() if tensor is not None}
        return _paired(own, expected, lambda whole, own: whole)


def _elements(tensor: torch.Tensor | None, stride: tuple[int, ...], start: int, count: int) -> torch.Tensor:
    """Elements of a flat or full tensor, in the order in which a parameter with this stride has them in memory."""
    if tensor is None:
        return torch.zeros(count)
    if tensor.dim() > 1:
        tensor = tensor.new_empty_strided(tensor.shape, stride).copy_(tensor).as_strided((tensor.numel(),), (1,))
    return tensor.flatten().narrow(0, start, count)
