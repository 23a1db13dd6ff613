"""``ShardedGradScaler`` scales and unscales, and an inf or NaN in one rank's shard makes all ranks skip the step.

Training with FSDP1 and this scaler is compared with DDP, with a ``GradScaler`` or without a scaler.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.amp.grad_scaler import OptState
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    DEVICEInitMode,
    DummyProcessGroup,
    FSDPInitMode,
    NestedWrappedModule,
    NonUniformReqGradNWM,
    TransformerWithSharedParams,
    subtest_name,
)
from torch_fsdp_tests.common_fsdp.training import scale_arrives
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.fsdp1_cases import FewRanksTest, device_init_modes
from torch_fsdp_tests.fsdp.references import data_parallel, of_all_ranks

params = "cpu_offload,sharding_strategy,mixed_precision,use_orig_params"
cpu_offload_config = [CPUOffload(offload_params=True), CPUOffload(offload_params=False)]
sharding_strategy_config = [ShardingStrategy.SHARD_GRAD_OP, None]
mixed_precision = ["enable_mixed_precision", None]
use_orig_params = ["enable_use_orig_params", None]

configs = list(itertools.product(cpu_offload_config, sharding_strategy_config, mixed_precision, use_orig_params))
test_name_mapping = {
    str(CPUOffload(offload_params=True)): "offload_true",
    str(CPUOffload(offload_params=False)): "offload_false",
    str(ShardingStrategy.SHARD_GRAD_OP): "shard_grad_op",
    "enable_mixed_precision": "mixed_precision",
    "enable_use_orig_params": "use_orig_params",
}
subtest_name = functools.partial(subtest_name, test_name_mapping)

LAYERS = ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer})
NOT_FINITE = [math.inf, -math.inf, math.nan]


class TestShardGradScaler(TestCase):
    """Tests without ranks, with CPU tensors, which a scaler accepts whatever the accelerator."""

    def _scaler(self, **kwargs: Any) -> ShardedGradScaler:
        device = "cpu"  # the CPU is the subject
        return ShardedGradScaler(device, process_group=DummyProcessGroup(0, 1), **{"init_scale": 2.0, **kwargs})

    def test_grad_scaling(self):
        scaler = self._scaler()
        t4, t8 = torch.full((1,), 4.0), torch.full((1,), 8.0)
        outputs = [t8.clone(), (t4.clone(), t8.clone()), [t4.clone(), t8.clone()]]
        scaled = scaler.scale(outputs)
        self.assertIsInstance(scaled[1], tuple)
        self.assertIsInstance(scaled[2], list)
        self.assertEqual(scaled, [t8 * 2, (t4 * 2, t8 * 2), [t4 * 2, t8 * 2]])
        self.assertEqual(outputs, [t8, (t4, t8), [t4, t8]])
        self.assertEqual(scaler._scale, torch.tensor(2.0), exact_device=True)

    def test_scaled_dtypes(self):
        """Scaled tensors keep their dtype, alone and in iterables. Scaling other outputs raises."""
        scaler = self._scaler()
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            for shape in ((2,), ()):  # a scalar tensor could be promoted to the dtype of the scale
                output = torch.full(shape, 3.0, dtype=dtype)
                doubled = torch.full(shape, 6.0, dtype=dtype)
                self.assertEqual(scaler.scale(output), doubled)
                self.assertEqual(list(scaler.scale(each for each in (output, output))), [doubled] * 2)
        with self.assertRaisesRegex(ValueError, "outputs must be a Tensor or an iterable of Tensors"):
            scaler.scale([1.0])

    def test_scaling_unscaling_sparse(self):
        """Values of sparse gradients are unscaled. Duplicate indices are added before the check for inf."""
        scaler = self._scaler()
        inverse, found = torch.full((1,), 0.5), torch.empty(1)
        indices = torch.tensor([[0, 1, 1], [2, 0, 2]])

        def unscaled(
            indices: torch.Tensor, values: list[float], dtype: torch.dtype
        ) -> tuple[torch.Tensor, list[float]]:
            """The gradient after unscaling, and the recorded inf checks."""
            grad = torch.sparse_coo_tensor(indices, torch.tensor(values), (2, 3), dtype=dtype, check_invariants=True)
            param = torch.empty((2, 3), dtype=dtype, requires_grad=True)
            param.grad = grad.clone()
            found.zero_()
            optim = torch.optim.SGD([param], lr=1.0)
            records = scaler._unscale_grads_(optim, inverse, found, True)
            return param.grad, [record.item() for record in records.values()]

        grad, record = unscaled(indices, [16.0, 32.0, 64.0], torch.float32)
        self.assertEqual(record, [0.0])
        self.assertEqual(grad.to_dense(), torch.tensor([[0.0, 0.0, 8.0], [16.0, 0.0, 32.0]]))

        for value in NOT_FINITE:
            _, record = unscaled(indices, [16.0, value, 64.0], torch.float32)
            self.assertEqual(record, [1.0])

        # All values are finite in half precision, but the sum of the first two is not.
        same = torch.tensor([[0, 0, 1], [2, 2, 0]])
        _, record = unscaled(same, [2.0**15, 2.0**15, 1.0], torch.float16)
        self.assertEqual(record, [1.0])
        grad, record = unscaled(same, [2.0**14, 2.0**14, 1.0], torch.float16)
        self.assertEqual(record, [0.0])
        expected = torch.tensor([[0.0, 0.0, 2.0**14], [0.5, 0.0, 0.0]], dtype=torch.float16)
        self.assertEqual(grad.to_dense(), expected)

    def test_inf_gradients_skip_optim_step(self):
        """A skipped step returns None and changes nothing but the scale."""
        for value in NOT_FINITE:
            scaler = self._scaler()
            loss = torch.full((1,), 4.0)
            self.assertEqual(scaler.scale(loss), torch.full((1,), 8.0))
            param = torch.ones(4, requires_grad=True)
            param.grad = torch.tensor([1.0, value, 1.0, 1.0])
            optim = torch.optim.SGD([param], lr=1.0)
            self.assertIsNone(scaler.step(optim))
            self.assertEqual(param.detach(), torch.ones(4))
            scaler.update()
            self.assertEqual(scaler.get_scale(), 1.0)

    def test_disabled(self):
        """A disabled scaler changes nothing and steps with any gradient."""
        scaler = self._scaler(enabled=False)
        loss = torch.full((1,), 4.0)
        self.assertIs(scaler.scale(loss), loss)
        param = torch.ones(2, requires_grad=True)
        param.grad = torch.tensor([1.0, math.inf])
        optim = torch.optim.SGD([param], lr=1.0)
        scaler.unscale_(optim)
        scaler.step(optim)
        scaler.update()
        self.assertEqual(param.detach(), torch.tensor([0.0, -math.inf]), may_be="nonfinite")
        self.assertEqual(scaler.get_scale(), 1.0)

    def test_order_of_calls(self):
        """It is an error to unscale twice, to unscale after a step, or to update without an inf check."""
        scaler = self._scaler()
        param = torch.ones(2, requires_grad=True)
        optim = torch.optim.SGD([param], lr=1.0)
        with self.assertRaisesRegex(AssertionError, "Attempted unscale_ but _scale is None"):
            scaler.unscale_(optim)
        scaler.scale(param.sum()).backward()
        with self.assertRaisesRegex(AssertionError, "No inf checks were recorded prior to update"):
            scaler.update()
        scaler.unscale_(optim)
        self.assertEqual(param.grad, torch.ones(2))
        with self.assertRaisesRegex(RuntimeError, r"unscale_\(\) has already been called"):
            scaler.unscale_(optim)
        scaler.step(optim)  # does not unscale again
        self.assertEqual(param.detach(), torch.zeros(2), may_be="zero")
        with self.assertRaisesRegex(RuntimeError, r"unscale_\(\) is being called after step\(\)"):
            scaler.unscale_(optim)
        scaler.update()
        scaler.unscale_(optim)
        self.assertEqual(param.grad, torch.full((2,), 0.5))

    def test_update_with_a_new_scale(self):
        """``update`` copies a new scale from a number or a scalar tensor. It raises for unsuitable tensors."""
        scaler = self._scaler()
        scaler.scale(torch.ones(1))
        scaler.update(8.0)
        self.assertEqual(scaler.get_scale(), 8.0)
        new_scale = torch.tensor(4.0)
        scaler.update(new_scale)
        new_scale.fill_(32.0)
        self.assertEqual(scaler.get_scale(), 4.0)
        for rejected in (torch.ones(2), torch.ones(1, requires_grad=True), torch.ones(1, device="meta")):
            with self.assertRaisesRegex(AssertionError, "new_scale should be a float or a 1-element"):
                scaler.update(rejected)
        # A vector of one element passes this check, but cannot be copied into the scale, which has no dimension.
        with self.assertRaisesRegex(RuntimeError, "doesn't match the broadcast shape"):
            scaler.update(torch.ones(1))

    def test_host_reads_finished_copies(self):
        """Unscaling gradients on the CPU reads no result of a non-blocking copy, which may be incomplete. The test
        records the copies, because a wrong value would depend on timing.
        """
        copies: list[tuple[torch.Tensor, bool]] = []
        read: list[bool] = []
        original = torch.Tensor.to

        def to(tensor, *args, **kwargs):
            copies.append((original(tensor, *args, **kwargs), kwargs.get("non_blocking", False)))
            return copies[-1][0]

        def unscale(grads, *operands):
            read.extend(is_late for copy, is_late in copies if any(copy is operand for operand in operands))

        param = torch.ones(2, requires_grad=True)
        scaler = self._scaler()
        scaler.scale(param.sum()).backward()
        with (
            mock.patch.object(torch.Tensor, "to", to),
            mock.patch.object(torch, "_amp_foreach_non_finite_check_and_unscale_", unscale),
        ):
            scaler.unscale_(torch.optim.SGD([param]))
        with torch_defect("fsdp1_scale_is_read_while_copied"):
            self.assertEqual(read, [False, False])

    def test_two_optimizers(self):
        """An inf skips only the step of its own optimizer. The scale is shared."""
        scaler = self._scaler()
        ps = [torch.full((2,), 3.0, requires_grad=True) for _ in range(2)]
        optims = [torch.optim.SGD([param], lr=1.0) for param in ps]
        for spoilt in (1, 0):
            scaler.scale((ps[0] + ps[1]).sum()).backward()
            ps[spoilt].grad[0] = math.inf
            before = [param.detach().clone() for param in ps]
            for optim in optims:
                scaler.step(optim)
                optim.zero_grad()
            scaler.update()
            before[1 - spoilt] -= 1.0
            self.assertEqual([param.detach() for param in ps], before)
        self.assertEqual(scaler.get_scale(), 0.5)
        # An inf of the first optimizer does not count in later iterations without its step.
        scaler.scale(ps[1].sum()).backward()
        scaler.step(optims[1])
        scaler.update()
        self.assertEqual(scaler.get_scale(), 0.5)

    def test_unscaling_of_each_dtype(self):
        """Gradients of several dtypes in one optimizer are all unscaled and checked, in any order."""
        dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float16]
        for spoilt in (None, *range(len(dtypes))):
            scaler = self._scaler()
            scaler.scale(torch.ones(1))
            ps = [torch.ones(2, dtype=dtype, requires_grad=True) for dtype in dtypes]
            for number, param in enumerate(ps):
                param.grad = torch.tensor([4.0, math.nan if number == spoilt else 6.0], dtype=param.dtype)
            optim = torch.optim.SGD(ps, lr=1.0)
            scaler.unscale_(optim)
            for number, param in enumerate(ps):
                expected = torch.tensor([2.0, math.nan if number == spoilt else 3.0], dtype=param.dtype)
                self.assertEqual(param.grad, expected, may_be="nonfinite")
            scaler.step(optim)
            scaler.update()
            self.assertEqual(scaler.get_scale(), 2.0 if spoilt is None else 1.0)
            moved = [param[0].item() for param in ps]
            self.assertEqual(moved, [-1.0 if spoilt is None else 1.0] * len(ps))


class TestShardedGradScalerParityWithDDP(FewRanksTest):
    def _scaler(self, cls: type[GradScaler] = ShardedGradScaler, **kwargs: Any) -> GradScaler:
        return cls(**{"device": accelerator.current().type, "init_scale": 2.0, **kwargs})

    def _check_scale(self, scaler: GradScaler, expected: float) -> None:
        """All ranks must have the expected scale."""
        self.assertEqual(of_all_ranks(scaler.get_scale()), [float(expected)] * self.world_size)

    @skip_if_lt_x_gpu(2)
    @parametrize(params, configs, subtest_name)
    def test_fsdp_ddp_parity_with_grad_scaler(self, cpu_offload, sharding_strategy, mixed_precision, use_orig_params):
        """FSDP with the scaler takes the same steps as DDP without a scaler, even if a rank has no trainable elements.

        Scaling by a power of two and unscaling does not change values. With mixed precision the loss is float16, and
        the default scale would make it inf, so that every step would be skipped.
        """
        low = torch.float16 if mixed_precision else None
        if use_orig_params:
            model_class, scale = NonUniformReqGradNWM, {"init_scale": 2.0**11}
        else:
            model_class, scale = NestedWrappedModule, {}
        if mixed_precision:
            scale = {"init_scale": 2.0**8}

        def check(device_init_mode: DEVICEInitMode) -> None:
            self._test_fsdp_parity(
                model_class,
                FSDPInitMode.RECURSIVE,
                device_init_mode,
                cpu_offload=cpu_offload,
                sharding_strategy=sharding_strategy,
                mixed_precision=MixedPrecision(low, low, low) if mixed_precision else None,
                enable_sharded_grad_scaler=True,
                use_orig_params=use_orig_params is not None,
                sharded_grad_scaler_kwargs=scale,
            )

        self.run_subtests({"device_init_mode": device_init_modes(cpu_offload)}, check)

    def _train_for_several_steps(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train an FSDP model with the scaler and any other model without. Fail if all steps were skipped."""
        before = [param.detach().clone() for param in model.parameters()]
        if isinstance(model, FSDP):
            loss = super()._train_for_several_steps(model, *args, **kwargs)
        else:
            kwargs["enable_sharded_grad_scaler"] = False
            loss = super()._train_for_several_steps(model, *args, **kwargs)
            loss = loss * kwargs["sharded_grad_scaler_kwargs"].get("init_scale", 2.0**16)
        changed = sum(not torch.equal(param, was) for param, was in zip(model.parameters(), before))
        self.assertGreater(sum(of_all_ranks(changed)), 0)
        self.assertTrue(loss.isfinite())
        return loss

    def _build_model_and_optim(
        self, cpu_offload: CPUOffload | None = None, use_orig_params: bool = False
    ) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
        """A transformer with FSDP and a copy with DDP, each with its optimizer."""
        model = TransformerWithSharedParams.init(
            self.process_group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE, deterministic=True
        )
        ref_model = data_parallel(copy.deepcopy(model))
        model = FSDP(model, cpu_offload=cpu_offload, auto_wrap_policy=LAYERS, use_orig_params=use_orig_params)
        ref_optim = torch.optim.Adam(ref_model.parameters(), lr=1e-2)
        return model, torch.optim.Adam(model.parameters(), lr=1e-2), ref_model, ref_optim

    def _tokens(self) -> tuple[torch.Tensor, ...]:
        """A random batch that differs by rank and by call."""
        return tuple(torch.randint(23, (length, 2), device=self.device) for length in (6, 4))

    @skip_if_lt_x_gpu(2)
    @subtests(
        use_orig_params=[False, True],
        cpu_offload=[CPUOffload(offload_params=True), CPUOffload(offload_params=False)],
        spoilt=lambda: [(0, math.inf), (dist.get_world_size() - 1, math.nan)],
    )
    def test_sharded_grad_scaler_found_inf(self, use_orig_params, cpu_offload, spoilt):
        """If a gradient is not finite on one rank, all ranks skip the step, and the scale backs off.

        The first rank has an inf, or the last rank has a NaN. A skipped step leaves parameters bitwise unchanged.
        """
        model, optim, ref_model, ref_optim = self._build_model_and_optim(cpu_offload, use_orig_params)
        scaler, ref_scaler = self._scaler(), self._scaler(GradScaler)
        spoilt_rank, value = spoilt
        torch.manual_seed(42 + self.rank + 1)
        for iteration in range(10):
            tokens = self._tokens()
            losses = []
            for each, each_optim, each_scaler, ranks in (
                (ref_model, ref_optim, ref_scaler, range(self.world_size)),
                (model, optim, scaler, [spoilt_rank]),
            ):
                scale = each_scaler.get_scale()
                each_optim.zero_grad()
                losses.append(each_scaler.scale(each.module.get_loss(tokens, each(*tokens))))
                losses[-1].backward()
                with_grad = [param for param in each.parameters() if param.grad is not None]
                before = [param.detach().clone() for param in with_grad]
                self.assertGreater(len(with_grad), 0)
                if iteration % 2 == 0 and self.rank in ranks:
                    with_grad[0].grad.fill_(value)
                with scale_arrives():
                    each_scaler.step(each_optim)
                each_scaler.update()

                changed = [not torch.equal(param, was) for param, was in zip(with_grad, before)]
                if iteration % 2 == 0:
                    self._check_scale(each_scaler, scale * each_scaler.get_backoff_factor())
                    self.assertNotIn(True, changed)
                else:
                    self._check_scale(each_scaler, scale)
                    self.assertNotIn(False, changed)
            self.assertEqual(losses[1], losses[0].detach())
        self.assertEqual(scaler.get_scale(), 2.0 * 0.5**5)

    @skip_if_lt_x_gpu(2)
    def test_growth(self):
        """The scale doubles after two clean steps in a row, and an inf restarts the count.

        It backs off once, even if several ranks have an inf.
        """
        model, optim, *_ = self._build_model_and_optim()
        scaler = self._scaler(growth_interval=2)
        torch.manual_seed(self.rank)
        last, everywhere = [self.world_size - 1], range(self.world_size)
        # Each step has the ranks with an inf, and the scale after it. The count of clean steps goes: 1, 2 and growth;
        # 1, an inf; 1, 2 and growth; an inf; 1, an inf; 1, 2 and growth.
        steps = [([], 2), ([], 4), ([], 4), (last, 2), ([], 2), ([], 4), (everywhere, 2), ([], 2), (last, 1)]
        for spoilt, scale in [*steps, ([], 1), ([], 2)]:
            tokens = self._tokens()
            optim.zero_grad()
            scaler.scale(model.module.get_loss(tokens, model(*tokens))).backward()
            if self.rank in spoilt:
                internals.flat_param_of(model).grad[0] = math.inf
            scaler.step(optim)
            scaler.update()
            self._check_scale(scaler, scale)

    @skip_if_lt_x_gpu(2)
    @subtests(factors=[(3.0, 0.25), (1.5, 0.1)])
    def test_factors(self, factors):
        """The scale grows and backs off by ``growth_factor`` and ``backoff_factor``."""
        growth, backoff = factors
        scaler = self._scaler(growth_factor=growth, backoff_factor=backoff, growth_interval=1, init_scale=2.0)
        param = torch.ones(2, device=self.device, requires_grad=True)
        optim = torch.optim.SGD([param], lr=1.0)
        scales = []
        for spoilt in (False, True, True, False):
            optim.zero_grad()
            scaler.scale(param.sum()).backward()
            if spoilt and self.rank == 0:
                param.grad[0] = math.inf
            scaler.step(optim)
            scaler.update()
            scales.append(scaler.get_scale())
        up = 2 * growth
        self.assertEqual(scales, [up, up * backoff, up * backoff**2, up * backoff**2 * growth])

    @skip_if_lt_x_gpu(2)
    @subtests(fused=[False, True], unscales_first=[False, True], spoilt=["no", "one", "every"])
    def test_all_ranks_skip_the_same_steps(self, fused, unscales_first, spoilt):
        """An inf on some ranks makes all ranks skip the step, even if the optimizer unscales the gradients itself."""
        layer = nn.Linear(1, self.world_size, bias=False, device=self.device)
        nn.init.ones_(layer.weight)
        model = FSDP(layer)  # each rank has one row
        (param,) = model.parameters()
        optim = torch.optim.SGD([param], lr=1.0, fused=fused)
        scaler = self._scaler()
        scaler.scale(model(torch.tensor([self.rank + 1.0], device=self.device)).sum()).backward()
        spoilt_ranks = {"no": [], "one": [self.world_size - 1], "every": range(self.world_size)}[spoilt]
        if self.rank in spoilt_ranks:
            param.grad.fill_(math.inf)
        if unscales_first:
            scaler.unscale_(optim)
        mean = (self.world_size + 1) / 2  # of the inputs, which is the gradient
        alone = fused and not unscales_first and spoilt == "one"
        together = fused and unscales_first and spoilt == "every"
        with (
            torch_defect("fsdp1_fused_optimizer_steps_alone", when=alone),
            torch_defect("fsdp1_fused_optimizer_steps_with_infinities", when=together),
        ):
            scaler.step(optim)  # inside the context, because the test case fails on infinite parameters after a step
            scaler.update()
            expected = (1.0, 1.0) if spoilt_ranks else (1.0 - mean, 2.0)
            self.assertEqual(of_all_ranks((param.item(), scaler.get_scale())), [expected] * self.world_size)

    @skip_if_lt_x_gpu(2)
    @subtests(scaler_class=[GradScaler, ShardedGradScaler], exponent=[100, 126])
    def test_scale_grows_to_the_largest_that_is_finite(self, scaler_class, exponent):
        """The scale stops growing at the largest power of two in float32, in both scaler classes."""
        scaler = self._scaler(scaler_class, init_scale=2.0**exponent, growth_interval=1)
        param = torch.zeros(2, device=self.device, requires_grad=True)
        optim = torch.optim.SGD([param], lr=1.0)
        scales = []
        for _ in range(3):
            optim.zero_grad()
            scaler.scale(param.sum() * 2.0**-20).backward()  # small, so that the scaled gradients are finite
            scaler.step(optim)
            scaler.update()
            scales.append(scaler.get_scale())
        is_shown = scaler_class is ShardedGradScaler and exponent == 126
        with torch_defect("fsdp1_scale_on_the_host_becomes_infinite", when=is_shown):
            self.assertEqual(scales, [min(2.0 ** (exponent + step), 2.0**127) for step in (1, 2, 3)])

    @skip_if_lt_x_gpu(2)
    @subtests(spoilt=[False, True])
    def test_rank_without_gradients(self, spoilt):
        """A rank without gradients also has an inf check and backs off with the other ranks.

        Both trainable parameters are in the second half of a flat parameter, and the first rank has no shard of it.
        """
        model = NonUniformReqGradNWM.init(
            self.process_group,
            FSDPInitMode.RECURSIVE,
            DEVICEInitMode.DEVICE_BEFORE,
            {"use_orig_params": True},
            deterministic=True,
        )
        model = FSDP(model, use_orig_params=True)
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        scaler = self._scaler()
        inputs = model.module.get_input(self.device)
        scaler.scale(model(*inputs).sum()).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        numels = of_all_ranks(sum(grad.numel() for grad in grads))
        self.assertEqual((numels[0], sum(numels)), (0, 4 * 8 + 8))
        if spoilt and grads:
            grads[0].fill_(math.inf)
        scaler.unscale_(optim)
        state = scaler._per_optimizer_states[id(optim)]
        self.assertIs(state["stage"], OptState.UNSCALED)
        records = [(device.type, record.item() > 0) for device, record in state["found_inf_per_device"].items()]
        self.assertEqual(records, [(accelerator.current().type, spoilt)])
        scaler.step(optim)
        scaler.update()
        self._check_scale(scaler, 1.0 if spoilt else 2.0)

    @skip_if_lt_x_gpu(2)
    def test_ranks_of_another_group(self):
        """A scaler checks only the gradients of the ranks in its process group."""
        mine = dist.new_group([self.rank], use_local_synchronization=True)
        scaler = self._scaler(process_group=mine)
        param = torch.ones(2, device=self.device, requires_grad=True)
        optim = torch.optim.SGD([param], lr=1.0)
        scaler.scale(param.sum()).backward()
        if self.rank == 0:
            param.grad[1] = math.nan
        scaler.step(optim)
        scaler.update()
        self.assertEqual(param[0].item(), 1.0 if self.rank == 0 else 0.0)
        self.assertEqual(of_all_ranks(scaler.get_scale()), [1.0] + [2.0] * (self.world_size - 1))


instantiate_parametrized_tests(TestShardedGradScalerParityWithDDP)

if __name__ == "__main__":
    run_tests()
