"""``FSDP.clip_grad_norm_`` returns the norm of the unsharded gradient on every rank and clips the shards by it."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import requires_capability, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    NestedWrappedModule,
    TransformerWithSharedParams,
)
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average_gradients, named, of_all_ranks

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD, "mixed_strategy"]
NORM_TYPES = [1, 2, math.inf]
EPSILON = 1e-6  # PyTorch divides by the norm plus this


Strategy = Any  # one of STRATEGIES


def _norm(grads: Iterable[torch.Tensor], norm_type: float) -> float:
    """The norm of several gradients as one vector, in float64."""
    return torch.linalg.vector_norm(torch.cat([grad.double().flatten() for grad in grads]), norm_type).item()


class TestClipGradNorm(FSDPTest):
    world_size = 2

    def _transformer(self, sharding_strategy: Strategy, **fsdp_kwargs: Any) -> FSDP:
        """The transformer with this strategy. The mixed one leaves the encoder unsharded and shards the rest."""
        mixed = sharding_strategy == "mixed_strategy"
        if not mixed:
            fsdp_kwargs["sharding_strategy"] = sharding_strategy
        model = TransformerWithSharedParams.init(
            self.process_group,
            FSDPInitMode.NO_FSDP if mixed else FSDPInitMode.RECURSIVE,
            DEVICEInitMode.DEVICE_BEFORE,
            fsdp_kwargs,
            deterministic=True,
        )
        if not mixed:
            return model
        layers = model.transformer
        layers.encoder = FSDP(layers.encoder, sharding_strategy=ShardingStrategy.NO_SHARD, **fsdp_kwargs)
        layers.decoder = FSDP(layers.decoder, sharding_strategy=ShardingStrategy.FULL_SHARD, **fsdp_kwargs)
        return FSDP(model, sharding_strategy=ShardingStrategy.FULL_SHARD, **fsdp_kwargs)

    def _tokens(self, device: str, step: int = 0) -> tuple[torch.Tensor, ...]:
        """Tokens that differ by rank. The model's own inputs are the same on all ranks."""
        generator = torch.Generator().manual_seed(100 * (step + 1) + self.rank)
        return tuple(torch.randint(23, (length, 2), generator=generator).to(device) for length in (6, 4))

    def _assert_same_on_all_ranks(self, value: float) -> None:
        self.assertEqual(of_all_ranks(value), [value] * self.world_size, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    def test_non_root(self, device):
        """Only the root has all gradients, so only the root can clip."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin1, self.lin2 = nn.Linear(5, 5), nn.Linear(5, 5)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.lin2(self.lin1(x))

        model = Model().to(device)
        model.lin2 = FSDP(model.lin2)
        model = FSDP(model)
        model(torch.randn(2, 5, device=device)).sum().backward()
        with self.assertRaisesRegex(RuntimeError, "should only be called on the root FSDP instance"):
            model.lin2.clip_grad_norm_(max_norm=2)
        self.assertGreater(model.clip_grad_norm_(max_norm=2), 0)

    @skip_if_lt_x_gpu(2)
    @subtests(
        norm_type=NORM_TYPES, sharding_strategy=STRATEGIES, use_orig_params=[False, True], offload_params=[False, True]
    )
    def test_ddp_parity(self, device, norm_type, sharding_strategy, use_orig_params, offload_params):
        """Norms, gradients and updated parameters match DDP with ``nn.utils.clip_grad_norm_``."""
        model = self._transformer(
            sharding_strategy,
            use_orig_params=use_orig_params,
            cpu_offload=CPUOffload(offload_params=offload_params),
        )
        plain = TransformerWithSharedParams.init(
            self.process_group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE, deterministic=True
        )
        reference = DDP(plain)
        # SGD, because Adam would hide gradients of a wrong scale.
        optims = [torch.optim.SGD(each.parameters(), lr=1e-2, momentum=0.9) for each in (model, reference)]

        def clip(max_norm: float) -> None:
            actual = model.clip_grad_norm_(max_norm=max_norm, norm_type=norm_type)
            self.assertGreater(actual, max_norm)
            expected = nn.utils.clip_grad_norm_(reference.parameters(), max_norm=max_norm, norm_type=norm_type)
            self.assertEqual(actual, expected, exact_device=not offload_params)
            self._assert_same_on_all_ranks(actual.item())

        tokens = self._tokens(device)
        for each in (model, reference):
            each.module.get_loss(tokens, each(*tokens)).backward()
            for param in each.parameters():
                if param.grad is not None:
                    param.grad.mul_(100)  # makes gradients large enough to clip
        before = [copy.deepcopy([param.grad for param in each.parameters()]) for each in (model, reference)]
        clip(1)
        for each, grads in zip((model, reference), before):
            self.assertTrue(any(grad is not None for grad in grads))
            for param, old in zip(each.parameters(), grads, strict=True):
                self.assertEqual(param.grad is None, old is None)
                # Some shards are empty or only padding. Zeros stay zero.
                if old is not None and old.count_nonzero() > 0:
                    self.assertNotEqual(param.grad, old)
        for optim in optims:
            optim.step()
        self._assert_same_params(model, reference)
        if offload_params:
            return

        for step, set_to_none in enumerate((True, False, True), 1):
            tokens = self._tokens(device, step)
            for each, optim in zip((model, reference), optims):
                optim.zero_grad(set_to_none=set_to_none)
                each(*tokens).sum().backward()
            clip(2.5)
            for optim in optims:
                optim.step()
        self._assert_same_params(model, reference)

    def _assert_same_params(self, model: FSDP, reference: DDP) -> None:
        with FSDP.summon_full_params(model):
            found, expected = named(model), named(reference)
            self.assertEqual(list(found), list(expected))
            for name, param in found.items():
                torch.testing.assert_close(param.detach(), expected[name].detach(), rtol=1e-5, atol=1e-5)

    @requires_capability("fp16_collectives")
    @skip_if_lt_x_gpu(2)
    @subtests(
        max_norm=[1, 2.5],
        norm_type=[1, 2, math.inf],
        sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD],
        use_orig_params=[False, True],
    )
    def test_low_precision_grads(self, device, max_norm, norm_type, sharding_strategy, use_orig_params):
        """Gradients kept in float16 are measured in float32. The returned norm is float16."""
        fsdp_kwargs: dict[str, Any] = {
            "sharding_strategy": sharding_strategy,
            "use_orig_params": use_orig_params,
            "mixed_precision": MixedPrecision(
                param_dtype=torch.float16, reduce_dtype=torch.float16, keep_low_precision_grads=True
            ),
        }
        inner = NestedWrappedModule.init(
            self.process_group,
            FSDPInitMode.RECURSIVE,
            DEVICEInitMode.DEVICE_BEFORE,
            fsdp_kwargs,
            deterministic=True,
        )
        model = FSDP(inner, **fsdp_kwargs)
        model(*model.module.get_input(torch.device(device))).sum().backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        self.assertGreater(len(grads), 0)
        self.assertEqual({grad.dtype for grad in grads}, {torch.float16})
        expected = self._norm_of_shards(grads, norm_type, sharding_strategy)
        total_norm = model.clip_grad_norm_(max_norm=max_norm, norm_type=norm_type)

        rounding = torch.finfo(torch.float16).eps
        self.assertEqual(total_norm.dtype, torch.float16)
        self.assertGreater(expected, max_norm)
        self.assertEqual(total_norm.item(), expected, rtol=rounding, atol=0)
        # Each element is rounded, and so is the factor.
        clipped = self._norm_of_shards(grads, norm_type, sharding_strategy)
        self.assertEqual(clipped, max_norm, rtol=2 * rounding, atol=0)
        for grad in grads:
            self.assertLessEqual(_norm([grad], norm_type), max_norm * (1 + 2 * rounding))

    @skip_if_lt_x_gpu(2)
    def test_norm_beyond_low_precision(self, device):
        """A norm too large for float16 is returned as infinity, but clipping uses the true norm."""
        mixed_precision = MixedPrecision(
            param_dtype=torch.float16, reduce_dtype=torch.float16, keep_low_precision_grads=True
        )
        for norm_type, norm in ((1, 200 * 1000.0), (2, 200 * 1000.0 / math.sqrt(200))):
            model = FSDP(nn.Linear(20, 10, bias=False).to(device), mixed_precision=mixed_precision)
            model(torch.ones(20, device=device)).sum().backward()
            (grad,) = (param.grad for param in model.parameters())
            grad.fill_(1000)
            actual = model.clip_grad_norm_(max_norm=1000, norm_type=norm_type)
            self.assertEqual(actual.item(), math.inf if norm_type == 1 else norm, rtol=1e-3, atol=0, may_be="nonfinite")
            expected = torch.full_like(grad, 1000 * 1000 / norm)
            self.assertEqual(grad, expected, rtol=2 * torch.finfo(torch.float16).eps, atol=0)

    def _norm_of_shards(
        self, grads: list[torch.Tensor], norm_type: float, sharding_strategy: ShardingStrategy
    ) -> float:
        """The norm over all ranks in float64, computed from the norms of their shards."""
        mine = _norm(grads, norm_type)
        if sharding_strategy is ShardingStrategy.NO_SHARD:
            return mine
        return _norm([torch.tensor(of_all_ranks(mine), dtype=torch.float64)], norm_type)

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True])
    def test_no_gradients(self, device, use_orig_params):
        """Without gradients, the norm is a float32 zero, and a warning names this dtype."""
        model = FSDP(
            nn.Linear(24, 24).to(device),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            mixed_precision=MixedPrecision(
                param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float32
            ),
            use_orig_params=use_orig_params,
        )
        model(torch.randn(32, 24, device=device))
        text = f"on rank {self.rank} with no gradients -- returning the total norm in the default dtype torch.float32"
        with self.assertWarnsRegex(UserWarning, text):
            total_norm = model.clip_grad_norm_(1)
        self.assertEqual((total_norm.dtype, total_norm.shape, total_norm.item()), (torch.float32, (), 0.0))

    @skip_if_lt_x_gpu(2)
    def test_norm_type_of_zero(self, device):
        """A ``norm_type`` of 0 raises, and the gradients do not change."""
        model = self._transformer(ShardingStrategy.FULL_SHARD, use_orig_params=True)
        model(*self._tokens(device)).square().sum().backward()
        before = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
        with self.assertRaises(ZeroDivisionError):
            model.clip_grad_norm_(max_norm=1, norm_type=0)
        self.assertEqual([param.grad for param in model.parameters()], before, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[*STRATEGIES, ShardingStrategy.SHARD_GRAD_OP], norm_type=[1, 2, 3, math.inf])
    def test_norm_of_the_whole_gradient(self, device, sharding_strategy, norm_type):
        """The norm is that of unsharded gradients. A larger ``max_norm`` changes none; a smaller one scales all."""
        model = self._transformer(sharding_strategy, use_orig_params=True)
        model(*self._tokens(device)).square().sum().backward()
        with FSDP.summon_full_params(model, writeback=False, with_grads=True):
            expected = _norm([param.grad for param in model.parameters()], norm_type)
        before = [None if param.grad is None else param.grad.clone() for param in model.parameters()]

        def grads() -> list[torch.Tensor | None]:
            return [param.grad for param in model.parameters()]

        actual = model.clip_grad_norm_(max_norm=2 * expected, norm_type=norm_type)
        self.assertEqual(actual.item(), expected, rtol=1e-5, atol=0)
        self._assert_same_on_all_ranks(actual.item())
        self.assertEqual(grads(), before, rtol=0, atol=0)

        max_norm = expected / 8
        actual = model.clip_grad_norm_(max_norm=max_norm, norm_type=norm_type)
        self.assertEqual(actual.item(), expected, rtol=1e-5, atol=0)
        factor = max_norm / (expected + EPSILON)
        scaled = [None if grad is None else grad * factor for grad in before]
        self.assertEqual(grads(), scaled, rtol=1e-5, atol=1e-7)

    @skip_if_lt_x_gpu(2)
    @subtests(norm_type=[1, 2, math.inf])
    def test_parameters_outside_of_fsdp(self, device, norm_type):
        """Gradients of ignored parameters count once, not once per rank, and are clipped as well."""
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 3, bias=False)).to(device)
        model = FSDP(layers, ignored_modules=[layers[1]], use_orig_params=True)
        model(torch.full((2, 4), self.rank + 1.0, device=device)).square().sum().backward()
        ignored = model.module[1].weight
        dist.all_reduce(ignored.grad)
        with FSDP.summon_full_params(model, with_grads=True):
            expected = _norm([param.grad for param in model.parameters()], norm_type)
        before = ignored.grad.clone()
        actual = model.clip_grad_norm_(max_norm=expected / 2, norm_type=norm_type)
        self.assertEqual(actual.item(), expected, rtol=1e-5, atol=0)
        self.assertEqual(ignored.grad, before / 2)

    def _half_frozen(self, device: str) -> FSDP:
        """Two layers in one flat parameter. The second one, which is rank 1's whole shard, is frozen."""
        layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)).to(device)
        with torch.no_grad():
            for param in layers.parameters():
                param.fill_(1.0)
        layers[1].weight.requires_grad_(False)
        model = FSDP(layers, use_orig_params=True)
        self.assertEqual([param.numel() for param in model.parameters()], [16, 0] if self.rank == 0 else [0, 16])
        return model

    def _clip_half_frozen(self, model: FSDP, scale: float, norm_type: float) -> float:
        """The norm after a backward that gives each of the 16 trainable elements the gradient ``4 * scale``."""
        model.zero_grad()
        model(torch.full((4,), float(scale), device=self.device)).sum().backward()
        self.assertEqual(any(param.grad is not None for param in model.parameters()), self.rank == 0)
        return model.clip_grad_norm_(max_norm=1, norm_type=norm_type).item()

    @skip_if_lt_x_gpu(2)
    def test_rank_without_gradients(self, device):
        """A rank without trainable elements takes part and gets the same norm."""
        self.run_subtests({"device": [device], "norm_type": [1, 2]}, self._test_rank_without_gradients)
        model = self._half_frozen(device)
        self.assertEqual(self._clip_half_frozen(model, 2, math.inf), 8.0)

    def _test_rank_without_gradients(self, device: str, norm_type: float) -> None:
        model = self._half_frozen(device)
        for scale in (2, 1):
            actual = self._clip_half_frozen(model, scale, norm_type)
            self.assertEqual(actual, 4.0 * scale * 16 ** (1 / norm_type))
            if self.rank == 0:
                clipped = _norm([param.grad for param in model.parameters() if param.grad is not None], norm_type)
                self.assertEqual(clipped, 1.0)

    @skip_if_lt_x_gpu(2)
    def test_maximum_norm_of_a_rank_without_gradients(self, device):
        """A later, smaller gradient has a smaller maximum norm."""
        model = self._half_frozen(device)
        self.assertEqual(self._clip_half_frozen(model, 2, math.inf), 8.0)
        norm = self._clip_half_frozen(model, 1, math.inf)
        with torch_defect("fsdp1_inf_norm_only_grows"):
            self.assertEqual(norm, 4.0)

    @skip_if_lt_x_gpu(2)
    def test_gradients_in_float64(self, device):
        """They raise, because each norm is computed in float32."""
        model = FSDP(nn.Linear(2, 1, bias=False, dtype=torch.float64).to(device))
        model(torch.tensor([[3.0, 4.0]], dtype=torch.float64, device=device)).sum().backward()
        self.assertRaisesRegex(RuntimeError, "convertible without narrowing", model.clip_grad_norm_, 1.0)


class TestClipGradNormHSDP(FSDPTest):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    @subtests(root=["full", "hybrid"], nested=["full", "hybrid"], norm_type=NORM_TYPES, use_orig_params=[False, True])
    def test_norm_over_the_ranks_of_each_instance(self, root, nested, norm_type, use_orig_params):
        """All elements count once, whether an instance is sharded over all ranks or over those of a replica."""
        mesh = make_mesh(2, self.world_size // 2)
        hybrid = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
        wrap = {
            "full": functools.partial(FSDP, use_orig_params=use_orig_params),
            "hybrid": functools.partial(FSDP, use_orig_params=use_orig_params, **hybrid),
        }
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(self.device)
        reference = copy.deepcopy(layers)
        model = wrap[root](nn.Sequential(layers[0], wrap[nested](layers[1])))
        weights = torch.arange(1.0, 5.0, device=self.device)  # the last rows, which are on the last ranks, get the most
        for each in (reference, model):
            (each(torch.full((4,), self.rank + 1.0, device=self.device)) * weights).sum().backward()
        average_gradients(reference)
        expected = _norm([param.grad for param in reference.parameters()], norm_type)
        found = model.clip_grad_norm_(max_norm=1, norm_type=norm_type).item()
        is_wrong = root != nested and (root == "hybrid" or norm_type != math.inf)  # a maximum may count twice
        with torch_defect("fsdp1_clip_grad_norm_takes_the_roots_group", when=is_wrong):
            self.assertEqual(of_all_ranks(found), [expected] * self.world_size, rtol=1e-5, atol=0)


instantiate_device_type_tests(TestClipGradNorm, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
