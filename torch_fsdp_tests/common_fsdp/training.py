"""Trains a model with FSDP1 for a few steps, and compares it with data parallelism without FSDP."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from torch_fsdp_tests.common_distributed import RankTestCase
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch import torch_names

from .device import get_devtype, rank_device
from .modes import DEVICEInitMode, FSDPInitMode, FSDPTestModel, older_keyword
from .states import _zero_model

_fsdp1_common = torch_names.module("torch.distributed.fsdp._common_utils")
_fsdp1_init = torch_names.module("torch.distributed.fsdp._init_utils")
_grad_scaler = torch_names.module("torch.amp.grad_scaler")

LARGEST_LOSS = 1e3  # a mistake of a thousandth is still larger than float32's rounding of it
LARGEST_VALUE = 1e3  # of a parameter after a step
LEAST_CHANGE = 1e-4  # of a loss, by a step; many times the tolerance with which losses are compared
_LEARNING_RATE = 1e-2
_HOST = torch.device("cpu")


def _offloads(cpu_offload: CPUOffload | None) -> bool:
    return cpu_offload is not None and bool(cpu_offload.offload_params)


def data_parallel(model: nn.Module, **kwargs: Any) -> DDP:
    """Wrap a model on this rank's device in DDP. ``kwargs`` are DDP's."""
    device = rank_device()
    return DDP(model, device_ids=None if device.index is None else [device.index], **kwargs)


@contextlib.contextmanager
def scale_arrives() -> Iterator[None]:
    """Let gradient scalers wait for the scale that they copy to the CPU. torch does not wait for it
    (``fsdp1_scale_is_read_while_copied``), which may spoil any step with offloaded gradients.
    """

    def get(replicator: Any, device: torch.device) -> torch.Tensor:
        return replicator._per_device_tensors.setdefault(device, replicator.master.to(device, copy=True))

    with torch_names.patched(_grad_scaler._MultiDeviceReplicator, "get", get):
        yield


def check_losses(losses: Iterable[torch.Tensor]) -> None:
    """Fail unless the losses of a reference, one for each step, are finite and moderate and differ from step to step.

    Otherwise the reference proves nothing: every training that explodes ends in infinities, and a training that stands
    still does not show what a step does.
    """
    steps = [loss.detach().double().flatten() for loss in losses]
    text = f"the losses of the reference are {[step.tolist() for step in steps]}"
    if not all(bool((step.abs() <= LARGEST_LOSS).all()) for step in steps):
        raise AssertionError(f"a loss is not finite or exceeds {LARGEST_LOSS:g}: {text}")
    if any(torch.allclose(*pair, rtol=LEAST_CHANGE) for pair in itertools.pairwise(steps)):
        raise AssertionError(f"a step changes the loss by less than {LEAST_CHANGE:g} of it: {text}")


@contextlib.contextmanager
def moderate_steps() -> Iterator[None]:
    """Fail at an optimizer step of this process that leaves values that are not finite, or are very large.

    Such a training proves nothing, whatever it is compared with. A step that a gradient scaler skips does not count,
    and neither does one in a fake world, whose collectives move no data.
    """
    handle = register_optimizer_step_post_hook(_check_step)
    try:
        yield
    finally:
        handle.remove()


def _check_step(optim: torch.optim.Optimizer, *_: object) -> None:
    if dist.is_initialized() and dist.get_backend() == "fake":
        return
    params = [param.detach() for group in optim.param_groups for param in group["params"]]
    with _disable_current_modes():
        values = [param.to_local() if isinstance(param, DTensor) else param for param in params]
        plain = [value for value in values if type(value) is torch.Tensor and not value.is_meta and value.numel()]
        plain = [value for value in plain if value.untyped_storage().size()]  # FSDP may have freed it
        largest_values = [value.abs().max().item() for value in plain]
    if not all(largest <= LARGEST_VALUE for largest in largest_values):  # a comparison with nan is false
        raise AssertionError(f"an optimizer step leaves parameters whose largest values are {largest_values}")


class FSDPTestMixin(RankTestCase):
    """What all FSDP test cases share, whether their ranks exist for one test or for many."""

    process_group: Any

    def _check_cpu_offload(self, fsdp_model: FSDP, cpu_offload: CPUOffload) -> None:
        self.assertEqual(cpu_offload, fsdp_model.cpu_offload)

    def _check_backward_prefetch(self, fsdp_model: FSDP, backward_prefetch: BackwardPrefetch | None) -> None:
        self.assertEqual(backward_prefetch, fsdp_model.backward_prefetch)

    def _check_forward_prefetch(self, fsdp_model: FSDP, forward_prefetch: bool) -> None:
        self.assertEqual(forward_prefetch, fsdp_model.forward_prefetch)

    def run_subtests(self, *args: Any, **kwargs: Any) -> None:
        """See :func:`.common_distributed.run_subtests`. Upstream has it here."""
        super().run_subtests(*args, **kwargs)

    def _assert_on_host(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.assertEqual(parameter.device, _HOST, msg=f"offloaded parameter {name}")

    def _train_for_several_steps(
        self,
        model: nn.Module,
        num_steps: int,
        autocast: bool,
        lr: float = 0.01,
        fsdp_cpu_offload: CPUOffload | None = None,
        save_model: bool = False,
        mixed_precision: MixedPrecision | None = None,
        enable_sharded_grad_scaler: bool = False,
        use_pure_fp16: bool = False,
        sharded_grad_scaler_kwargs: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Train ``model`` with SGD and momentum, and return the detached, scaled loss of its last step.

        The model has an :class:`FSDPTestModel` under ``module``, which gives inputs, loss and backward. Adam would
        hide a wrong scale of the gradients, SGD does not. On the way this asserts the dtype of the loss, that offloaded
        parameters are in host memory whenever FSDP has resharded, and that FSDP is idle at the end. ``save_model``
        saves, zeroes and reloads the model after each step.

        Differs from upstream's: backward starts from the loss times (rank + 1) / world size, because some models have
        the same inputs on every rank, and equal gradients would hide a wrong average. Autocast uses the dtype of
        ``mixed_precision``. The gradient scaler works on the device under test, not only on CUDA.
        """
        if num_steps < 1:
            raise ValueError(f"cannot train for {num_steps} steps, because nothing would be tested")
        offloads = _offloads(fsdp_cpu_offload) and isinstance(model, FSDP)
        keeps = _fsdp1_init.NO_RESHARD_AFTER_FORWARD_STRATEGIES
        reshards = isinstance(model, FSDP) and model.sharding_strategy not in keeps
        device_type = accelerator.current().type
        low_dtype = mixed_precision.param_dtype if mixed_precision is not None else None
        # FSDP's mixed precision casts inputs by itself.
        input_dtype = torch.float16 if use_pure_fp16 else None if isinstance(model, FSDP) else low_dtype
        module: Any = model.module
        loss_device = next(model.parameters()).device
        weight = (dist.get_rank() + 1) / dist.get_world_size()

        scaler = ShardedGradScaler(
            **{"device": device_type, "enabled": enable_sharded_grad_scaler, **(sharded_grad_scaler_kwargs or {})}
        )
        optim = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        losses = []
        for _ in range(num_steps):
            optim.zero_grad()
            with torch.amp.autocast(device_type, dtype=low_dtype, enabled=autocast):
                inputs = module.get_input(get_devtype())  # on the device even if parameters are offloaded
                if input_dtype is not None:
                    inputs = tuple(each.to(input_dtype) if each.is_floating_point() else each for each in inputs)
                output = model(*inputs)
                if offloads and reshards:
                    self._assert_on_host(model)
                loss = module.get_loss(inputs, output).to(loss_device)
            losses.append(loss.detach())
            loss = scaler.scale(loss)
            if not autocast:  # whether autocast promotes a sum depends on the device, and not on FSDP
                self.assertEqual(loss.dtype, input_dtype or low_dtype or torch.float32)
            module.run_backward(loss * weight)
            if offloads:
                self._assert_on_host(model)
            with scale_arrives() if offloads else contextlib.nullcontext():
                scaler.step(optim)
            scaler.update()
            if save_model:
                saved = {name: value.clone() for name, value in model.state_dict().items()}
                _zero_model(model)
                model.load_state_dict(saved)

        check_losses(losses)
        if isinstance(model, FSDP):
            torch_names.attribute(model, "_assert_state")(_fsdp1_common.TrainingState.IDLE)
        return loss.detach()

    @older_keyword
    def _test_fsdp_parity(
        self,
        model_class: type[FSDPTestModel],
        fsdp_init_mode: FSDPInitMode,
        device_init_mode: DEVICEInitMode,
        ref_init_fn: Callable[[nn.Module], nn.Module] | None = None,
        num_iters: int = 2,
        save_model: bool = True,
        cpu_offload: CPUOffload = CPUOffload(),  # noqa: B008
        mixed_precision: MixedPrecision | None = None,
        enable_sharded_grad_scaler: bool = False,
        use_pure_fp16: bool = False,
        init_kwargs: dict[str, Any] | None = None,
        sharded_grad_scaler_kwargs: dict[str, Any] | None = None,
        **fsdp_kwargs: Any,
    ) -> None:
        """Fail unless FSDP1 trains a model as a data parallel reference does.

        Both are built by ``model_class.init`` with ``deterministic=True`` and ``init_kwargs``. If it does not wrap the
        root with FSDP, this method does. The reference is DDP, or what ``ref_init_fn`` makes of the plain model. Both
        train for ``num_iters`` steps. Then the last losses (not their dtypes) and all parameters are compared.

        Differs from upstream's: parameters are also compared in low precision, with a tolerance of one rounding a step,
        and the pure fp16 reference is converted before DDP wraps it, because afterwards DDP averages nothing.

        With parameter offload a model that is moved to the device after FSDP must raise, if the device
        has a memory of its own. Raises ``ValueError`` for an init mode without FSDP.
        """
        if fsdp_init_mode is FSDPInitMode.NO_FSDP:
            raise ValueError("the parity test needs an init mode that wraps with FSDP")
        plain = model_class.init(
            self.process_group,
            FSDPInitMode.NO_FSDP,
            DEVICEInitMode.DEVICE_BEFORE,
            deterministic=True,
            **(init_kwargs or {}),
        )
        if use_pure_fp16:
            plain = plain.half()
        reference = (ref_init_fn or data_parallel)(plain)
        fsdp_kwargs = {
            "cpu_offload": cpu_offload,
            "backward_prefetch": None,  # FSDP's own default prefetches
            "mixed_precision": mixed_precision,
            **fsdp_kwargs,
        }
        try:
            sharded = model_class.init(
                self.process_group,
                fsdp_init_mode,
                device_init_mode,
                fsdp_kwargs,
                deterministic=True,
                **(init_kwargs or {}),
            )
        except Exception as error:
            raise ValueError(f"{model_class.__name__} cannot be built with FSDP: {error}") from error
        if not isinstance(sharded, FSDP):
            sharded = FSDP(sharded, self.process_group, **fsdp_kwargs)
        if use_pure_fp16:
            sharded = sharded.half()  # after FSDP has made its flat parameters
        if device_init_mode is DEVICEInitMode.DEVICE_AFTER:
            sharded = sharded.to(get_devtype())

        def train(model: nn.Module, **kwargs: Any) -> torch.Tensor:
            return self._train_for_several_steps(
                model,
                num_iters,
                lr=_LEARNING_RATE,
                fsdp_cpu_offload=cpu_offload,
                mixed_precision=mixed_precision,
                enable_sharded_grad_scaler=enable_sharded_grad_scaler,
                use_pure_fp16=use_pure_fp16,
                sharded_grad_scaler_kwargs=sharded_grad_scaler_kwargs,
                **kwargs,
            )

        offloads = _offloads(cpu_offload)
        moved_away = offloads and device_init_mode is DEVICEInitMode.DEVICE_AFTER
        if moved_away and accelerator.current().has("device_memory"):
            with self.assertRaisesRegex(
                RuntimeError,
                "An FSDP-managed module with parameter CPU offloading enabled has parameters on "
                f"{accelerator.current().type}",
            ):
                train(sharded, autocast=False, save_model=save_model)
            return

        reference_loss = train(
            reference, autocast=mixed_precision is not None and mixed_precision.param_dtype is not None
        )
        if offloads:
            self._assert_on_host(sharded)
        sharded_loss = train(sharded, autocast=False, save_model=save_model)
        if offloads:
            self._assert_on_host(sharded)
        low_dtypes = [torch.float16] if use_pure_fp16 else []
        if mixed_precision is not None:
            low_dtypes += filter(None, (mixed_precision.param_dtype, mixed_precision.reduce_dtype))
        # In low precision the two round in different places. This is the largest difference per step.
        rounding = num_iters * max(torch.finfo(dtype).eps for dtype in low_dtypes) if low_dtypes else None
        # The loss is compared with the tolerance of its dtype, unless only the gradients were reduced in a lower one.
        loss_is_exact = rounding is None or sharded_loss.dtype in low_dtypes
        torch.testing.assert_close(
            sharded_loss.to(reference_loss.device),
            reference_loss,
            check_dtype=False,
            rtol=None if loss_is_exact else rounding,
            atol=None if loss_is_exact else rounding,
        )
        self._assert_same_parameters(sharded, reference, rounding)

    def _assert_same_parameters(self, sharded: nn.Module, reference: nn.Module, rounding: float | None) -> None:
        """Compare the unsharded parameters with those of the reference, which has the model under ``module``.

        ``rounding`` is the absolute and relative tolerance. None means that of the parameters' dtype.
        """
        expected = {name.removeprefix("module."): value.detach() for name, value in reference.named_parameters()}
        with FSDP.summon_full_params(sharded, writeback=False):
            of_fsdp = {name: value.detach().clone() for name, value in sharded.named_parameters()}
        self.assertEqual(list(of_fsdp), list(expected), msg="FSDP and its reference have different parameters")
        self.assertEqual(
            of_fsdp,
            expected,
            atol=rounding,
            rtol=rounding,
            exact_dtype=rounding is None,
            exact_device=True,
            msg=lambda text: f"FSDP and its reference differ after training: {text}",
        )
