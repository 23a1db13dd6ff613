"""A model with a frozen trunk trains with FSDP1 as with DDP: only the head's parameters change."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from enum import Enum
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest, get_full_params
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.installed_torch import torch_names

IMAGES = (2, 3, 8, 8)  # small: pooling makes the layers independent of the image size
STEPS = 3


class Model(nn.Module):
    """A convolution as the trunk and a linear layer as the head. It maps images to 10 classes."""

    def __init__(
        self, with_fsdp: bool, freeze_after_wrap_fsdp: bool, disable_autograd: bool, fsdp_kwargs: dict[str, Any]
    ) -> None:
        super().__init__()
        self.disable_autograd = disable_autograd
        self._build()
        if with_fsdp and freeze_after_wrap_fsdp:
            self.fsdp_wrap(fsdp_kwargs)

    def _build(self) -> None:
        self.trunk = nn.Sequential(
            nn.Conv2d(3, 64, kernel_size=3), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(output_size=1), nn.Flatten()
        )
        self.head = nn.Linear(64, 10)

    def fsdp_wrap(self, fsdp_kwargs: dict[str, Any]) -> None:
        self.trunk = FSDP(self.trunk, **fsdp_kwargs)
        self.head = FSDP(self.head, **fsdp_kwargs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad() if self.disable_autograd else contextlib.nullcontext():
            x = self.trunk(x)
        return self.head(x)


class NestedTrunkModel(Model):
    """A model with two blocks in the trunk, each in its own FSDP instance."""

    def _build(self) -> None:
        self.trunk = nn.Sequential(self._create_block(3, 64), self._create_block(64, 64))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(output_size=1), nn.Flatten(), nn.Linear(64, 10))

    def _create_block(self, in_channels: int, out_channels: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(in_channels, out_channels, kernel_size=3), nn.ReLU(inplace=True))

    def fsdp_wrap(self, fsdp_kwargs: dict[str, Any]) -> None:
        for name, child in self.trunk.named_children():
            setattr(self.trunk, name, FSDP(child, **fsdp_kwargs))
        super().fsdp_wrap(fsdp_kwargs)


class FreezingMethod(str, Enum):
    GradToNone = "grad_to_none"
    RequiresGrad = "requires_grad"


class TestFreezingWeights(FSDPTest):
    world_size = 2

    def _create_model(
        self,
        with_fsdp: bool,
        with_nested_trunk: bool,
        freeze_after_wrap_fsdp: bool,
        disable_autograd: bool,
        fsdp_kwargs: dict[str, Any],
    ) -> Model:
        torch.manual_seed(0)
        model_class = NestedTrunkModel if with_nested_trunk else Model
        return model_class(with_fsdp, freeze_after_wrap_fsdp, disable_autograd, fsdp_kwargs).to(self.device)

    def _fsdp_model(
        self,
        with_nested_trunk: bool,
        freezing_method: FreezingMethod,
        freeze_after_wrap_fsdp: bool,
        disable_autograd: bool,
        fsdp_kwargs: dict[str, Any],
    ) -> FSDP:
        model = self._create_model(True, with_nested_trunk, freeze_after_wrap_fsdp, disable_autograd, fsdp_kwargs)
        self._freeze(model, freezing_method)
        if not freeze_after_wrap_fsdp:
            model.fsdp_wrap(fsdp_kwargs)
        return FSDP(model, **fsdp_kwargs)

    def _freeze(self, model: Model, freezing_method: FreezingMethod) -> None:
        if freezing_method is FreezingMethod.RequiresGrad:
            for param in model.trunk.parameters():
                param.requires_grad_(False)

    def _dist_train(self, model: FSDP | DDP, freezing_method: FreezingMethod) -> list[nn.Parameter]:
        """Train on images and classes that differ by rank. Return the full parameters with their requires_grad."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(1 + self.rank)
        batch = torch.randn(IMAGES, device=self.device)
        target = torch.tensor([self.rank, 2 + self.rank], device=self.device)
        for _ in range(STEPS):
            loss = F.cross_entropy(model(batch), target)
            optimizer.zero_grad()
            loss.backward()
            if freezing_method is FreezingMethod.GradToNone:
                for param in model.module.trunk.parameters():
                    param.grad = None
            optimizer.step()
        return get_full_params(model) if isinstance(model, FSDP) else list(model.parameters())

    @skip_if_lt_x_gpu(2)
    @parametrize("with_nested_trunk", [True, False])
    @parametrize("freezing_method", [FreezingMethod.RequiresGrad, FreezingMethod.GradToNone])
    @parametrize("freeze_after_wrap_fsdp", [True, False])
    @parametrize("disable_autograd", [True, False])
    @parametrize("forward_prefetch", [True, False])
    def test_freezing_weights(
        self, with_nested_trunk, freezing_method, freeze_after_wrap_fsdp, disable_autograd, forward_prefetch
    ):
        """All parameters match DDP's, and those of the trunk do not change."""
        plain = self._create_model(False, with_nested_trunk, freeze_after_wrap_fsdp, disable_autograd, {})
        self._freeze(plain, freezing_method)
        initial = [param.detach().clone() for param in plain.parameters()]
        in_trunk = [name.startswith("trunk") for name, _ in plain.named_parameters()]
        reference = DDP(plain, find_unused_parameters=disable_autograd)
        expected = self._dist_train(reference, freezing_method)

        model = self._fsdp_model(
            with_nested_trunk,
            freezing_method,
            freeze_after_wrap_fsdp,
            disable_autograd,
            {"device_id": self.device, "forward_prefetch": forward_prefetch},
        )
        actual = self._dist_train(model, freezing_method)

        self.assertEqual(actual, expected, exact_device=True)
        unchanged = [torch.equal(param, old) for param, old in zip(actual, initial, strict=True)]
        self.assertEqual(unchanged, in_trunk)
        if freezing_method is FreezingMethod.RequiresGrad:
            trainable = [param.requires_grad for param in expected]
            self.assertEqual(trainable, [not frozen for frozen in in_trunk])
            self.assertEqual([param.requires_grad for param in actual], trainable)

    @skip_if_lt_x_gpu(2)
    @subtests(
        with_nested_trunk=[True, False],
        freeze_after_wrap_fsdp=[True, False],
        disable_autograd=[True, False],
        sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP],
        input_requires_grad=[True, False],
    )
    def test_frozen_units_in_backward(
        self, with_nested_trunk, freeze_after_wrap_fsdp, disable_autograd, sharding_strategy, input_requires_grad
    ):
        """Only the head's gradients are reduced. The trunk is resharded before backward ends, unless SHARD_GRAD_OP has
        no backward through it.
        """
        model = self._fsdp_model(
            with_nested_trunk,
            FreezingMethod.RequiresGrad,
            freeze_after_wrap_fsdp,
            disable_autograd,
            {"sharding_strategy": sharding_strategy},
        )
        handles = internals.handles(model)
        self.assertEqual(len(handles), 3 if with_nested_trunk else 2)
        batch = torch.randn(IMAGES, device=self.device, requires_grad=input_requires_grad)
        head = 64 * 10 + 10
        for _ in range(2):
            with recorded("reduce_scatter") as reductions, self._gathered_at_the_end() as at_the_end:
                model(batch).sum().backward()
            self.assertEqual([call.numel for call in reductions], [head])
            # SHARD_GRAD_OP frees parameters in backward, and a trunk without autograd has no backward.
            ends_at_head = disable_autograd or not input_requires_grad
            keeps_trunk = sharding_strategy is ShardingStrategy.SHARD_GRAD_OP and ends_at_head
            freed = handles[-1:] if keeps_trunk else handles
            gathered = [internals.is_unsharded(handle.flat_param) for handle in freed]
            self.assertEqual(gathered, [False] * len(freed))
            # They were resharded before the end of backward, which reshards all others.
            self.assertEqual([at_the_end[handle] for handle in freed], [False] * len(freed))
            self.assertEqual(sum(handle.flat_param.grad is not None for handle in handles), 1)
        self.assertEqual(batch.grad is not None, input_requires_grad and not disable_autograd)

    @contextlib.contextmanager
    def _gathered_at_the_end(self) -> Iterator[dict[internals.Handle, bool]]:
        """Record which flat parameters are still unsharded when backward ends."""
        gathered = {}

        def recording(original: Any, state: Any) -> Any:
            if handle := internals.handle(state):
                gathered[handle] = internals.is_unsharded(handle.flat_param)
            return original(state)

        runtime = internals.fsdp1_runtime
        recorder = functools.partial(recording, runtime._catch_all_reshard)
        with torch_names.patched(runtime, "_catch_all_reshard", recorder):
            yield gathered

    @skip_if_lt_x_gpu(2)
    @subtests(
        sharding_strategy=[
            ShardingStrategy.FULL_SHARD,
            ShardingStrategy.SHARD_GRAD_OP,
            ShardingStrategy.NO_SHARD,
        ],
        freeze_after_wrap_fsdp=[True, False],
        frozen=["0", "2", "bias"],
    )
    def test_frozen_beside_trainable(self, sharding_strategy, freeze_after_wrap_fsdp, frozen):
        """With ``use_orig_params=True``, a flat parameter may mix frozen and trainable parameters."""

        def build() -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3)).to(self.device)

        def freeze(model: nn.Module) -> None:
            for name, param in model.named_parameters():
                param.requires_grad_(frozen not in name.split("."))

        def wrap(model: nn.Module) -> FSDP:
            return FSDP(model, sharding_strategy=sharding_strategy, use_orig_params=True)

        plain, initial, model = build(), build(), build()
        freeze(plain)
        if freeze_after_wrap_fsdp:
            model = wrap(model)
        freeze(model)
        if not freeze_after_wrap_fsdp:
            model = wrap(model)
        self.assertEqual(len(internals.handles(model)), 1)
        torch.manual_seed(1 + self.rank)
        inputs = torch.randn(5, 4, device=self.device)
        optims = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)]
        for _ in range(STEPS):
            for each, optim in zip((plain, model), optims):
                optim.zero_grad()
                each(inputs).square().sum().backward()
            average_gradients(plain)
            self.assertEqual([param.grad for param in model.parameters() if not param.requires_grad], [None] * 2)
            for optim in optims:
                optim.step()

        actual = get_full_params(model)
        trainable = [param.requires_grad for param in plain.parameters()]
        self.assertEqual([param.requires_grad for param in actual], trainable)
        self.assertEqual(actual, list(plain.parameters()))
        changed = [not torch.equal(param, old) for param, old in zip(actual, initial.parameters())]
        self.assertEqual(changed, trainable)

    @skip_if_lt_x_gpu(2)
    def test_freezing_between_microbatches(self):
        """FSDP1 drops the gradient of a parameter that is frozen, so it has only that of the last microbatch."""
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(self.device)
        model = FSDP(copy.deepcopy(plain), use_orig_params=True)
        for each in (plain, model):
            for requires_grad in (True, False, True):
                next(each.parameters()).requires_grad_(requires_grad)
                each(torch.ones(1, 4, device=self.device)).sum().backward()
        with FSDP.summon_full_params(model, with_grads=True):
            actual = [param.grad.clone() for param in model.parameters()]
        of_both, of_all = [param.grad for param in plain.parameters()]
        self.assertEqual(actual, [of_both / 2, of_all])


instantiate_parametrized_tests(TestFreezingWeights)

if __name__ == "__main__":
    run_tests()
