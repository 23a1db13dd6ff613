"""The model of most FSDP1 tests, and its variants: linear layers, some of which FSDP1 wraps separately."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import always_wrap_policy

from torch_fsdp_tests.common_utils.seed import manual_seed

from .delays import _delayed_reduce_scatter, _delayed_reshard, delay_device
from .device import get_devtype
from .modes import DEVICEInitMode, FSDPInitMode, FSDPTestModel, older_keyword
from .states import _maybe_wrap_fsdp, _move_to_device

Layer = Callable[[int, int], nn.Module]
Wrapper = Callable[..., nn.Module]


class NestedWrappedModule(FSDPTestModel):
    """Five linear layers, (4, 8) to (4, 8), under the attribute ``module``.

    With ``wrap_fsdp`` the children 1 (two layers, the first of them wrapped again) and 2 are FSDP1 instances over
    ``group``. The outer layers and the model are not. ``deterministic`` seeds with 0 first. Inputs differ by rank.
    """

    @older_keyword
    def __init__(
        self,
        group: dist.ProcessGroup,
        wrap_fsdp: bool,
        device_init_mode: DEVICEInitMode,
        deterministic: bool,
        **fsdp_kwargs: Any,
    ) -> None:
        super().__init__()
        self.rank = group.rank()
        self.world_size = group.size()
        move_to_device = device_init_mode is DEVICEInitMode.DEVICE_BEFORE

        def linear(inputs: int, outputs: int) -> nn.Module:
            return _move_to_device(nn.Linear(inputs, outputs), move_to_device)

        def _maybe_wrap(layer: nn.Module, alone: bool = False) -> nn.Module:
            if not wrap_fsdp:
                return layer
            # A group with only this rank: each rank makes its own, and the others need not take part.
            own = dist.new_group([dist.get_rank()], use_local_synchronization=True) if alone else group
            return FSDP(layer, own, **fsdp_kwargs)

        if deterministic:
            manual_seed(0)
        self.module = self._build(linear, _maybe_wrap, deterministic)

    def _build(self, linear: Layer, maybe_wrap: Wrapper, deterministic: bool) -> nn.Sequential:
        # Layers are made in the order of their names, because with a seed this order decides their values.
        return nn.Sequential(
            linear(8, 4),
            maybe_wrap(nn.Sequential(maybe_wrap(linear(4, 16)), linear(16, 16))),
            maybe_wrap(linear(16, 4)),
            linear(4, 8),
        )

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        manual_seed(1 + self.rank)
        return (torch.rand(4, 8, device=device),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)

    def get_loss(self, input: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
        return output.sum()

    def run_backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    @classmethod
    @older_keyword
    def init(
        cls,
        group: dist.ProcessGroup,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        fsdp_kwargs: dict[str, Any] | None = None,
        deterministic: bool = False,
        **more: Any,
    ) -> nn.Module:
        """Build the model. In ``RECURSIVE`` mode its inner layers are wrapped with ``fsdp_kwargs``, but not the model
        itself. Like the ``init`` of every model here, it raises ``ValueError`` for another init mode. ``DEVICE_AFTER``
        moves the model after it is wrapped. ``more`` are other arguments of the class.
        """
        if fsdp_init_mode not in (FSDPInitMode.NO_FSDP, FSDPInitMode.RECURSIVE):
            raise ValueError(f"unsupported FSDP init mode: {fsdp_init_mode}")
        wrap_fsdp = fsdp_init_mode is FSDPInitMode.RECURSIVE
        kwargs = {"group": group, "device_init_mode": device_init_mode, "deterministic": deterministic, **more}
        model = cls._wrapped(wrap_fsdp, fsdp_kwargs or {}, **kwargs)
        moves_last = wrap_fsdp and device_init_mode is DEVICEInitMode.DEVICE_AFTER
        return model.to(get_devtype()) if moves_last else model

    @classmethod
    def _wrapped(cls, wrap_fsdp: bool, fsdp_kwargs: dict[str, Any], **kwargs: Any) -> nn.Module:
        return cls(wrap_fsdp=wrap_fsdp, **kwargs, **(fsdp_kwargs if wrap_fsdp else {}))


class AlwaysWrapNestedWrappedModule(NestedWrappedModule):
    """A :class:`NestedWrappedModule` whose submodules are all wrapped in ``RECURSIVE`` mode, over the default group."""

    @classmethod
    def _wrapped(cls, wrap_fsdp: bool, fsdp_kwargs: dict[str, Any], **kwargs: Any) -> nn.Module:
        plain = NestedWrappedModule(wrap_fsdp=False, **kwargs)
        return _maybe_wrap_fsdp(plain, wrap_fsdp, auto_wrap_policy=always_wrap_policy, **fsdp_kwargs)


class NonUniformReqGradNWM(NestedWrappedModule):
    """A :class:`NestedWrappedModule` with its last two layers in one FSDP1 instance; only the last one trains.

    With ``use_orig_params`` both trainable parameters are in the shard of one rank, so that the gradient scaler has
    nothing to unscale on the others.
    """

    def _build(self, linear: Layer, maybe_wrap: Wrapper, deterministic: bool) -> nn.Sequential:
        return nn.Sequential(
            linear(8, 4),
            maybe_wrap(nn.Sequential(maybe_wrap(linear(4, 16)), linear(16, 16))),
            maybe_wrap(nn.Sequential(linear(16, 4), linear(4, 8))),
        )

    @staticmethod
    def _set_nonuniform_req_grad(model: nn.Module, req_grad_mask: str | re.Pattern[str]) -> None:
        """Freeze the parameters whose names do not begin with a match of the mask."""
        for name, parameter in model.named_parameters():
            if re.match(req_grad_mask, name) is None:
                parameter.requires_grad_(False)

    @classmethod
    def init(cls, *args: Any, **kwargs: Any) -> nn.Module:
        model = super().init(*args, **kwargs)
        # FSDP's own part of a name, if there is one, is between the two numbers.
        cls._set_nonuniform_req_grad(model, r"module\.2\.(_fsdp_wrapped_module\.)?1\.")
        return model


class ModuleWithDelay(FSDPTestModel):
    """A test model that keeps the device busy after the loss and before each reduce-scatter of the gradients. The
    milliseconds are time on the device; see :func:`.delays.delay_device` for devices that cannot sleep.
    """

    def __init__(self, module: nn.Module, delay_after_loss_ms: int, delay_before_reduction_ms: int) -> None:
        super().__init__()
        self.delay_after_loss_ms = delay_after_loss_ms
        self.delay_before_reduction_ms = delay_before_reduction_ms
        self.module: Any = module

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        return self.module.get_input(device)

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.module(*inputs)

    def get_loss(self, input: tuple[torch.Tensor, ...], output: Any) -> torch.Tensor:
        loss = self.module.get_loss(input, output)
        delay_device(self.delay_after_loss_ms)
        return loss

    def run_backward(self, loss: torch.Tensor) -> None:
        with _delayed_reduce_scatter(self.delay_before_reduction_ms):
            self.module.run_backward(loss)

    @staticmethod
    def init(
        module_class: type[FSDPTestModel],
        *model_args: Any,
        delay_after_loss_ms: int,
        delay_before_reduction_ms: int,
        **model_kwargs: Any,
    ) -> ModuleWithDelay:
        """Wrap the model that ``module_class.init`` returns for the other arguments."""
        model = module_class.init(*model_args, **model_kwargs)
        return ModuleWithDelay(model, delay_after_loss_ms, delay_before_reduction_ms)


class NestedWrappedModuleWithDelay(ModuleWithDelay):
    """:class:`ModuleWithDelay` around a :class:`NestedWrappedModule`."""

    @staticmethod
    @older_keyword
    def init(  # type: ignore[override]
        group: dist.ProcessGroup,
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode = DEVICEInitMode.DEVICE_AFTER,
        fsdp_kwargs: dict[str, Any] | None = None,
        deterministic: bool = False,
        delay_after_loss_ms: int = 0,
        delay_before_reduction_ms: int = 0,
    ) -> ModuleWithDelay:
        return ModuleWithDelay.init(
            NestedWrappedModule,
            group,
            fsdp_init_mode,
            device_init_mode,
            fsdp_kwargs,
            deterministic,
            delay_after_loss_ms=delay_after_loss_ms,
            delay_before_reduction_ms=delay_before_reduction_ms,
        )


class DummyDDP(nn.Module):
    """Has the model under ``module``, like DDP, but reduces nothing: for models that reduce gradients themselves."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


class MixtureOfExperts(NestedWrappedModule):
    """Four linear layers, (4, 8) to (4, 8): child 1 is shared, child 2 an expert with parameters of each rank's own.

    With ``wrap_fsdp`` the shared layer is an FSDP1 instance over ``group``, and the expert is one over a group with
    only its rank. Without it, ``run_backward`` averages all gradients except the expert's. ``deterministic`` seeds the
    expert with 42 plus the rank and the others with 0. ``delay_before_free_ms`` delays each reshard in forward.
    """

    @older_keyword
    def __init__(
        self,
        group: dist.ProcessGroup,
        wrap_fsdp: bool,
        device_init_mode: DEVICEInitMode,
        delay_before_free_ms: int,
        deterministic: bool,
        **fsdp_kwargs: Any,
    ) -> None:
        super().__init__(group, wrap_fsdp, device_init_mode, deterministic, **fsdp_kwargs)
        self.group = group
        self.delay_before_free_ms = delay_before_free_ms
        self.wrap_fsdp = wrap_fsdp
        self.move_to_device = device_init_mode is DEVICEInitMode.DEVICE_BEFORE

    def _build(self, linear: Layer, maybe_wrap: Wrapper, deterministic: bool) -> nn.Sequential:
        d_input, d_shared, d_expert = 8, 12, 23
        if deterministic:
            manual_seed(42 + self.rank)
        expert = linear(d_expert, d_shared)
        self.num_expert_params = sum(parameter.numel() for parameter in expert.parameters())
        for parameter in expert.parameters():
            parameter.expert = True
        if deterministic:
            manual_seed(0)
        shared = linear(d_shared, d_expert)
        return nn.Sequential(
            linear(d_input, d_shared),
            maybe_wrap(shared),
            maybe_wrap(expert, alone=True),
            linear(d_shared, d_input),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with _delayed_reshard(self.delay_before_free_ms if self.wrap_fsdp else 0):
            return self.module(x)

    @torch.no_grad()
    def _average_gradients(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None and not hasattr(parameter, "expert"):
                parameter.grad.div_(self.world_size)
                dist.all_reduce(parameter.grad, group=self.group)

    def run_backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        if not self.wrap_fsdp:
            self._average_gradients()

    @classmethod
    def init(cls, *args: Any, delay_before_free_ms: int = 0, **kwargs: Any) -> nn.Module:
        return super().init(*args, delay_before_free_ms=delay_before_free_ms, **kwargs)
