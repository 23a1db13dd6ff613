"""FSDP1's ``MixedPrecision``: the dtypes of inputs, parameters, buffers, gradients and collectives.

The tests cover forward and backward, summoned parameters, state dicts, eval mode, modules that stay in full precision,
and submodules with their own precision. ``test_fsdp_mixed_precision_parity`` compares training with a model that casts
by hand.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from torch_fsdp_tests.common_distributed import SaveForwardInputsModel, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    TransformerWithSharedParams,
    subtest_name,
)
from torch_fsdp_tests.common_fsdp.training import scale_arrives
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import mean_over_ranks, named
from torch_fsdp_tests.installed_torch import torch_names

batchnorm = torch_names.module("torch.nn.modules.batchnorm")

default_mp = MixedPrecision(param_dtype=torch.float16, buffer_dtype=torch.float16, reduce_dtype=torch.float16)
mp_only_reduce = MixedPrecision(reduce_dtype=torch.float16)
mp_only_param_and_buf = MixedPrecision(param_dtype=torch.float16, buffer_dtype=torch.float16)
mp_no_mixed_precision = MixedPrecision()
mp_diff_buffer_and_reduce = MixedPrecision(
    param_dtype=torch.float16, buffer_dtype=torch.bfloat16, reduce_dtype=torch.float32
)

mp_configs = [
    default_mp,
    mp_only_reduce,
    mp_only_param_and_buf,
    mp_no_mixed_precision,
    mp_diff_buffer_and_reduce,
]
cpu_offload_config = [CPUOffload(offload_params=True), CPUOffload(offload_params=False)]
full_precision_param_dtype_config = [torch.float32, torch.float64]
NO_RESHARD = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
enable_sharded_grad_scaler = ["enable_sharded_grad_scaler", None]

params = "mp_config,cpu_offload,full_precision_param_dtype,enable_sharded_grad_scaler"
configs = list(
    itertools.product(mp_configs, cpu_offload_config, full_precision_param_dtype_config, enable_sharded_grad_scaler)
)
test_name_mapping = {
    str(default_mp): "mp_fp16",
    str(mp_only_reduce): "mp_only_reduce",
    str(mp_only_param_and_buf): "mp_only_param_and_buf",
    str(mp_no_mixed_precision): "mp_no_mp",
    str(mp_diff_buffer_and_reduce): "mp_diff_buffer_reduce",
    str(CPUOffload(offload_params=True)): "offload_true",
    str(CPUOffload(offload_params=False)): "offload_false",
    str(torch.float32): "fp32",
    str(torch.float64): "fp64",
    "enable_sharded_grad_scaler": "enable_sharded_grad_scaler",
}
subtest_name = functools.partial(subtest_name, test_name_mapping)

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
PREFETCHES = [None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST]
LOW_DTYPES = [torch.float16, torch.bfloat16]
BUFFER_DTYPE = torch.float64
ITERATIONS = 3
INIT_SCALE = 16.0  # small enough that nothing overflows in float16, so every step is taken
SAME_DTYPE = "mat1 and mat2 must have the same dtype"
FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"
IN_EVAL: dict[str, Any] = {"cast_forward_inputs": [True, False], "full_precision": [True, False]}


class Dtypes(NamedTuple):
    """The dtypes of an FSDP model: of sharded parameters, of parameters in forward, of buffers and of reductions."""

    full: torch.dtype
    param: torch.dtype
    buffer: torch.dtype
    reduce: torch.dtype


class LinearMixedPrecision(nn.Module):
    """A layer without bias, and a buffer with its own dtype. Input and output: tuples of a tensor and any objects."""

    def __init__(self, param_dtype: torch.dtype, buffer_name: str = "buffer") -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10, bias=False).to(param_dtype)
        self.buffer_name = buffer_name
        self.register_buffer(buffer_name, torch.randn((1, 2), dtype=BUFFER_DTYPE))

    def forward(self, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *others = inputs
        return self.lin(x), *others


class TestFSDPMixedPrecision(FSDPTest):
    """The code that the sharded and the unsharded tests share."""

    def _get_simple_model(self, param_dtype: torch.dtype, **fsdp_kwargs: Any) -> FSDP:
        return FSDP(LinearMixedPrecision(param_dtype).to(self.device), **fsdp_kwargs)

    def _get_simple_nested_model(self, param_dtype: torch.dtype, **fsdp_kwargs: Any) -> FSDP:
        inner, outer = (LinearMixedPrecision(param_dtype, name).to(self.device) for name in ("buffer0", "buffer1"))
        return FSDP(nn.Sequential(FSDP(inner, **fsdp_kwargs), outer), **fsdp_kwargs)

    def _transformer(self, fsdp_init_mode: FSDPInitMode = FSDPInitMode.RECURSIVE, **fsdp_kwargs: Any) -> nn.Module:
        return TransformerWithSharedParams.init(
            self.process_group, fsdp_init_mode, DEVICEInitMode.DEVICE_BEFORE, fsdp_kwargs, deterministic=True
        )

    def _scaler(self, **kwargs: Any) -> ShardedGradScaler:
        return ShardedGradScaler(**{"device": accelerator.current().type, "init_scale": INIT_SCALE, **kwargs})

    def _run_test_mixed_precision_e2e(
        self,
        mp_config: MixedPrecision,
        full_precision_param_dtype: torch.dtype = torch.float64,
        scales: bool = False,
        fsdp_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Train the models with these options. Parameters are offloaded, unless ``fsdp_kwargs`` says otherwise."""
        kwargs = {
            "mixed_precision": mp_config,
            "cpu_offload": CPUOffload(offload_params=True),
            "backward_prefetch": None,
            "forward_prefetch": False,
            "sharding_strategy": ShardingStrategy.FULL_SHARD,
            **(fsdp_kwargs or {}),
        }
        torch.manual_seed(0)
        models = [self._get_simple_nested_model(full_precision_param_dtype, **kwargs)]
        # A single instance has nothing to prefetch.
        if kwargs["backward_prefetch"] is None and not kwargs["forward_prefetch"]:
            models.append(self._get_simple_model(full_precision_param_dtype, **kwargs))
        for model in models:
            self._check_training(model, mp_config, full_precision_param_dtype, scales)

    def _check_training(self, model: FSDP, config: MixedPrecision, full: torch.dtype, scales: bool) -> None:
        """Train for some steps and check dtypes in all places where they are visible."""
        param = config.param_dtype or full
        dtypes = Dtypes(full, param, config.buffer_dtype or BUFFER_DTYPE, config.reduce_dtype or param)
        for layer in model.modules():
            if isinstance(layer, LinearMixedPrecision):
                layer.register_forward_pre_hook(lambda layer, args: self._check_forward(model, layer, args[0], dtypes))
        instances = len(internals.handles(model))
        gathers = {
            ShardingStrategy.FULL_SHARD: 2 * instances - 1,  # the root is all-gathered once
            ShardingStrategy.SHARD_GRAD_OP: instances,
            ShardingStrategy.NO_SHARD: 0,
        }[model.sharding_strategy]

        optim, scaler = torch.optim.Adam(model.parameters(), lr=0.1), self._scaler(enabled=scales)
        torch.manual_seed(self.rank + 1)
        for _ in range(ITERATIONS):
            before = [param.detach().clone() for param in model.parameters()]
            with recorded() as calls:
                others = [object(), torch.float64, config]  # no tensors, so FSDP passes them on unchanged
                output, *actual = model((torch.randn(3, 10, device=self.device, dtype=dtypes.full), *others))
                self.assertListEqual(actual, others)
                self._check_low_shards_and_buffers(model, dtypes)
                loss = scaler.scale(output.sum())
                self.assertEqual(loss.dtype, dtypes.param)
                loss.backward()
            self.assertEqual(calls.dtypes("all_gather"), [dtypes.param] * gathers, may_be="empty")
            self.assertEqual(calls.dtypes("reduce_scatter", "all_reduce"), [dtypes.reduce] * instances)
            self._check_low_shards_and_buffers(model, dtypes)
            for param in model.parameters():
                self.assertEqual((param.dtype, param.grad.dtype), (dtypes.full, dtypes.full))
            with scale_arrives():
                scaler.step(optim)
            scaler.update()
            for param, was in zip(model.parameters(), before):
                self.assertNotEqual(param, was)
            optim.zero_grad()

            with FSDP.summon_full_params(model):
                self._check_low_shards_and_buffers(model, dtypes)
                self.assertEqual({param.dtype for param in model.parameters()}, {dtypes.full})
            # State dicts have the model's original dtypes. The buffers in use keep their low dtype.
            buffers = {internals.clean_name(name) for name, _ in model.named_buffers()}
            state_dict = model.state_dict()
            self.assertLessEqual(buffers, set(state_dict))
            for name, value in state_dict.items():
                self.assertEqual(value.dtype, BUFFER_DTYPE if name in buffers else dtypes.full, msg=name)
            self._check_low_shards_and_buffers(model, dtypes)

    def _check_forward(self, model: FSDP, layer: nn.Module, inputs: tuple[Any, ...], dtypes: Dtypes) -> None:
        """The layer computes in low dtypes. Unsharded flat parameters have the low dtype, the others the full one."""
        actual = inputs[0].dtype, layer.lin.weight.dtype, getattr(layer, layer.buffer_name).dtype
        self.assertEqual(actual, (dtypes.param, dtypes.param, dtypes.buffer))
        if model.sharding_strategy is ShardingStrategy.NO_SHARD:
            return
        flat_params = internals.flat_params(model)
        gathered = [flat.data_ptr() != internals.local_shard(flat).data_ptr() for flat in flat_params]
        self.assertIn(True, gathered)
        self.assertEqual(
            [flat.dtype for flat in flat_params], [dtypes.param if each else dtypes.full for each in gathered]
        )
        self._check_low_shards_and_buffers(model, dtypes)

    def _check_low_shards_and_buffers(self, model: FSDP, dtypes: Dtypes) -> None:
        """Flat parameters have a freed low precision shard if the dtypes differ. Buffers have the low dtype."""
        for flat_param in internals.flat_params(model):
            is_low = dtypes.param != dtypes.full
            self.assertEqual(internals.has_optional(flat_param, "_mp_shard"), is_low)
            if is_low:
                shard = internals.low_precision_shard(flat_param)
                self.assertEqual((shard.dtype, shard.untyped_storage().size()), (dtypes.param, 0))
        buffers = [buffer.dtype for buffer in model.buffers()]
        self.assertEqual(buffers, [dtypes.buffer] * len(internals.handles(model)))

    def _test_grads_reduced_precision(self, offload_params: bool, use_orig_params: bool) -> None:
        """Accumulated gradients stay in low precision. With offloading, each iteration starts with new gradients."""
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)).to(self.device)
        reference = copy.deepcopy(layers).half()
        fsdp_kwargs = {
            "mixed_precision": MixedPrecision(
                param_dtype=torch.float16,
                reduce_dtype=torch.float16,
                buffer_dtype=torch.float16,
                keep_low_precision_grads=True,
            ),
            "cpu_offload": CPUOffload(offload_params=offload_params),
            "use_orig_params": use_orig_params,
        }
        layers[0] = FSDP(layers[0], **fsdp_kwargs)
        model = FSDP(layers, **fsdp_kwargs)
        x = torch.full((1, 10), self.rank + 1.0, device=self.device)

        reference(x.half()).sum().backward()
        expected = [mean_over_ranks(param.grad) for param in reference.parameters()]
        for iteration in range(6):
            model(x).sum().backward()
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            self.assertGreater(len(grads), 0)
            self.assertEqual({grad.dtype for grad in grads}, {torch.float16})
            if use_orig_params:
                times = 1 if offload_params else iteration + 1
                self._check_low_grads(model, [grad * times for grad in expected], times)

    def _check_low_grads(self, model: FSDP, expected: list[torch.Tensor], additions: int) -> None:
        """Each local gradient is this rank's part of the expected one, up to one rounding for each addition."""
        found = {name: param.grad for name, param in named(model).items()}
        tolerance = additions * torch.finfo(torch.float16).eps
        for handle in internals.handles(model):
            flat_param = handle.flat_param
            for name, info in zip(internals.names_in(flat_param), internals.shard_infos(flat_param)):
                name = name if handle is internals.handle(model) else f"0.{name}"
                grad = expected[list(found).index(name)].flatten()
                if handle.uses_sharded_strategy:
                    first = info.intra_param_start_idx
                    grad = grad[first : info.intra_param_end_idx + 1] if info.in_shard else None
                mine = None if found[name] is None else found[name].flatten()
                self.assertEqual(mine, grad, rtol=tolerance, atol=0, msg=name)


class TestFSDPMixedPrecisionSharded(TestFSDPMixedPrecision):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_mixed_precision_no_reshard_after_forward(self):
        """Parameters that stay unsharded after forward also have the low dtype. They are all-gathered once."""
        self._run_test_mixed_precision_e2e(mp_diff_buffer_and_reduce, fsdp_kwargs=NO_RESHARD)

    @skip_if_lt_x_gpu(2)
    @parametrize(params, configs, subtest_name)
    @subtests(
        # Without streams, a prefetch only moves an all-gather. So each value is tested, but not each pair.
        prefetches=lambda: (
            list(itertools.product([False, True], PREFETCHES))
            if accelerator.current().has("streams")
            else list(zip([False, True, False], PREFETCHES))
        )
    )
    def test_mixed_precision_e2e_full_shard(
        self, mp_config, cpu_offload, prefetches, full_precision_param_dtype, enable_sharded_grad_scaler
    ):
        """Check dtypes in all places where they are visible, over three steps."""
        forward_prefetch, backward_prefetch = prefetches
        self._run_test_mixed_precision_e2e(
            mp_config,
            full_precision_param_dtype,
            scales=enable_sharded_grad_scaler is not None,
            fsdp_kwargs={
                "cpu_offload": cpu_offload,
                "forward_prefetch": forward_prefetch,
                "backward_prefetch": backward_prefetch,
            },
        )

    @skip_if_lt_x_gpu(2)
    @subtests(
        mp_config=[
            MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16),
            MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        ],
        cpu_offload=cpu_offload_config,
        sharding_strategy=STRATEGIES,
    )
    def test_mixed_precision_e2e_bf16(self, mp_config, **fsdp_kwargs):
        """All dtypes are right also in bfloat16, and with gradients reduced in full precision."""
        self._run_test_mixed_precision_e2e(mp_config, torch.float32, scales=True, fsdp_kwargs=fsdp_kwargs)

    def _check_embedding(self, mp_config: MixedPrecision) -> None:
        """Tokens stay integers, otherwise the embedding would raise. Gradients are reduced in the low dtype."""
        model = self._transformer(FSDPInitMode.NO_FSDP)
        model = FSDP(model, mixed_precision=mp_config)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        low = mp_config.param_dtype or torch.float32
        for _ in range(6):
            inputs = model.module.get_input(self.device)
            with recorded() as calls:
                output = model(*inputs)
                loss = model.module.get_loss(inputs, output)
                loss.backward()
            self.assertEqual((output.dtype, loss.dtype), (low, low))
            sent = [(call.name, call.dtype) for call in calls]
            self.assertEqual(sent, [("all_gather", low), ("reduce_scatter", mp_config.reduce_dtype or low)])
            flat_param = internals.flat_param_of(model)
            before = flat_param.detach().clone()
            optim.step()
            self.assertNotEqual(flat_param.detach(), before)
            optim.zero_grad()

    @skip_if_lt_x_gpu(2)
    def test_mp_embedding_reduce(self):
        self._check_embedding(MixedPrecision(reduce_dtype=torch.float16))

    @skip_if_lt_x_gpu(2)
    def test_mp_embedding_only_params_and_bufs(self):
        self._check_embedding(MixedPrecision(param_dtype=torch.float16, buffer_dtype=torch.float16))

    @skip_if_lt_x_gpu(2)
    def test_mp_embedding_default(self):
        self._check_embedding(default_mp)

    @skip_if_lt_x_gpu(2)
    def test_mp_embedding_params_and_reduce_diff(self):
        self._check_embedding(
            MixedPrecision(param_dtype=torch.float16, buffer_dtype=torch.float16, reduce_dtype=torch.float32)
        )

    def _residual_network(self) -> tuple[nn.Module, torch.Tensor]:
        """torchvision's ResNet-50 on an accelerator if it is installed, otherwise a small residual network."""
        if not accelerator.current().is_cpu and importlib.util.find_spec("torchvision") is not None:
            resnet50 = importlib.import_module("torchvision.models").resnet50
            return resnet50(), torch.ones(1, 3, 1000, 1000, device=self.device)
        return ResidualNetwork(), torch.ones(2, 3, 8, 8, device=self.device)

    @skip_if_lt_x_gpu(2)
    def test_mixed_precision_resnet(self):
        """Every batch norm of a convolutional network becomes an FSDP instance in full precision.

        SyncBatchNorm does not run on the CPU, so the plain batch norm is tested there.
        """
        network, x = self._residual_network()
        if not accelerator.current().is_cpu:
            network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
        norms = sum(isinstance(module, batchnorm._BatchNorm) for module in network.modules())
        synced = sum(isinstance(module, nn.SyncBatchNorm) for module in network.modules())
        self.assertGreater(norms, 1)
        policy = functools.partial(size_based_auto_wrap_policy, min_num_params=200)
        with self.assertWarnsRegex(UserWarning, "These modules will be wrapped as separate FSDP"):
            model = FSDP(network.to(self.device), auto_wrap_policy=policy, mixed_precision=default_mp)
        instances = FSDP.fsdp_modules(model)
        apart = [each for each in instances if isinstance(each.module, batchnorm._BatchNorm)]
        self.assertEqual(len(apart), norms)
        self.assertGreater(len(instances), norms + 1)  # the policy has also wrapped other modules
        with recorded() as calls:
            output = model(x)
            output.sum().backward()
        reduced = calls.dtypes("reduce_scatter", "all_reduce")
        self.assertEqual(output.dtype, torch.float16)
        with_parameters = len(internals.handles(model))
        # Each gradient is reduced once. SyncBatchNorm also reduces sums in its own backward.
        self.assertEqual(reduced.count(torch.float32), norms + synced)
        self.assertEqual(reduced.count(torch.float16), with_parameters - norms)
        for norm in apart:
            self.assertTrue(internals.flat_param_of(norm).grad.isfinite().all())

    @skip_if_lt_x_gpu(2)
    @subtests(offload_params=[False, True], use_orig_params=[False, True])
    def test_grads_reduced_precision(self, offload_params, use_orig_params):
        self._test_grads_reduced_precision(offload_params, use_orig_params)

    @skip_if_lt_x_gpu(2)
    def test_forward_without_backward(self):
        """A forward without a backward does not change the gradients of the next iteration."""
        torch.manual_seed(0)
        layer = nn.Linear(4, 4, device=self.device)
        x = torch.full((1, 4), self.rank + 1.0, device=self.device)
        grads = []
        for forwards in (1, 2):
            model = FSDP(copy.deepcopy(layer), mixed_precision=MixedPrecision(param_dtype=torch.float16))
            for _ in range(forwards):
                output = model(x)
            output.sum().backward()
            grads.append(internals.flat_param_of(model).grad)
        self.assertEqual(grads[0].dtype, torch.float32)
        with torch_defect("fsdp1_unused_forward_costs_reduction"):
            self.assertEqual(grads[1], grads[0])

    @skip_if_lt_x_gpu(2)
    def test_offloaded_low_grads_after_zero_grad(self):
        """Backward creates offloaded low precision gradients again after they were set to None."""
        config = MixedPrecision(param_dtype=torch.float16, keep_low_precision_grads=True)
        offload = CPUOffload(offload_params=True)
        model = FSDP(nn.Linear(4, 4), mixed_precision=config, cpu_offload=offload, device_id=self.device)
        for was_cleared in (False, True):
            output = model(torch.ones(1, 4, device=self.device))
            with torch_defect("fsdp1_low_gradients_offloaded_raise", when=was_cleared):
                output.sum().backward()
                self.assertEqual(internals.flat_param_of(model).grad.dtype, torch.float16)
            model.zero_grad()

    @skip_if_lt_x_gpu(2)
    @parametrize("convert_sync_bn", [True, False])
    def test_mp_batchnorm(self, convert_sync_bn):
        """Norms that the config ignores become FSDP instances without mixed precision and get float32 inputs."""

        def never_wrap_policy(*args: Any, **kwargs: Any) -> bool:
            return False

        config = MixedPrecision(
            torch.float16, torch.float16, torch.float16, _module_classes_to_ignore=[batchnorm._BatchNorm, nn.LayerNorm]
        )
        net = BatchNormNet().to(self.device)
        if convert_sync_bn:
            net = nn.SyncBatchNorm.convert_sync_batchnorm(net)
        with self.assertWarnsRegex(UserWarning, "These modules will be wrapped as separate FSDP"):
            model = FSDP(net, mixed_precision=config, auto_wrap_policy=never_wrap_policy)

        for norm in (model.bn, model.ln):
            self.assertIsInstance(norm, FSDP)
            self.assertEqual(norm.mixed_precision, MixedPrecision())
        for layer in (model.fc1, model.fc2, model.fc3):
            self.assertNotIsInstance(layer, FSDP)
        self.assertEqual(model.mixed_precision, config)
        seen: list[torch.dtype] = []
        for norm in (model.bn.module, model.ln.module):
            norm.register_forward_hook(lambda module, args, output: seen.extend((args[0].dtype, module.weight.dtype)))

        x = torch.randn((1, 2), device=self.device)
        if convert_sync_bn and accelerator.current().is_cpu:
            with self.assertRaisesRegex(ValueError, "SyncBatchNorm expected input tensor to be on"):
                model(x)
            return
        output = model(x)
        self.assertEqual((output.dtype, seen), (torch.float16, [torch.float32] * 4))
        output.sum().backward()
        self.assertTrue(internals.flat_param_of(model.bn).grad.isfinite().all())

    @skip_if_lt_x_gpu(2)
    @subtests(dtypes=list(itertools.product([torch.float16, torch.float32], repeat=2)))
    def test_inputs_of_ignored_module(self, dtypes):
        """Inputs of an ignored module are cast to float32. Its output is cast to float16 if any input had float16."""
        config = MixedPrecision(torch.float16, _module_classes_to_ignore=[Sums])
        with self.assertWarnsRegex(UserWarning, "These modules will be wrapped as separate FSDP"):
            model = FSDP(SumsOf(*dtypes).to(self.device), auto_wrap_policy=ModuleWrapPolicy([]), mixed_precision=config)
        seen: list[torch.dtype] = []
        model.sums.module.register_forward_hook(lambda module, args, output: seen.extend(x.dtype for x in args))
        output = model(torch.ones(1, 2, device=self.device))
        self.assertEqual((seen, output.dtype), ([torch.float32] * 2, min(dtypes, key=lambda dtype: dtype.itemsize)))

    @skip_if_lt_x_gpu(2)
    @subtests(full_precision=[True, False])
    def test_eval_root_cast_inputs(self, full_precision):
        """In eval mode, a root without parameters casts its inputs, unless eval mode uses full precision."""
        with internals.switched(FULL_PRECISION_IN_EVAL, full_precision):
            root = SeesInput(FSDP(nn.Linear(5, 5).to(self.device), mixed_precision=default_mp))
            model = FSDP(root, mixed_precision=default_mp).eval()
        self.assertIsNone(internals.handle(model))
        output = model(torch.randn(5, 5, device=self.device))
        dtype = torch.float32 if full_precision else torch.float16
        self.assertEqual((root.seen, output.dtype), (dtype, dtype))
        output.sum().backward()
        self.assertEqual(internals.flat_param_of(root.layer).grad.dtype, torch.float32)

    @skip_if_lt_x_gpu(2)
    @subtests(**IN_EVAL)
    def test_full_precision_in_eval(self, cast_forward_inputs, full_precision):
        """Eval mode uses full precision if requested. Training after it uses low precision again."""
        config = MixedPrecision(torch.float16, torch.float16, torch.float16, cast_forward_inputs=cast_forward_inputs)
        with internals.switched(FULL_PRECISION_IN_EVAL, full_precision):
            model = self._transformer(mixed_precision=config)
        reference = self._transformer(FSDPInitMode.NO_FSDP)
        inputs = model.module.get_input(self.device)
        for _ in range(2):
            model.train()
            loss = model.module.get_loss(inputs, model(*inputs))
            loss.backward()
            self.assertEqual(loss.dtype, torch.float16)
            self.assertEqual({param.grad.dtype for param in model.parameters()}, {torch.float32})
            model.zero_grad()
            model.eval()
            with torch.no_grad():  # a workaround for the defect fsdp1_unused_forward_costs_reduction
                output = model(*inputs)
            self.assertEqual(output.dtype, torch.float32 if full_precision else torch.float16)
            if full_precision:  # the result is exactly that of full precision
                reference.bn.running_mean.copy_(model.bn.running_mean)
                reference.bn.running_var.copy_(model.bn.running_var)
                self.assertEqual(output, reference(*inputs))

    @skip_if_lt_x_gpu(2)
    @subtests(**IN_EVAL)
    def test_full_precision_in_eval_buffers(self, cast_forward_inputs, full_precision):
        """In eval mode, buffers have full precision if requested. In training they have low precision again."""
        config = MixedPrecision(torch.float16, torch.float16, torch.float16, cast_forward_inputs=cast_forward_inputs)
        with internals.switched(FULL_PRECISION_IN_EVAL, full_precision):
            model = self._get_simple_nested_model(torch.float32, mixed_precision=config)
        seen: list[torch.dtype] = []
        for layer in (model.module[0].module, model.module[1]):
            layer.register_forward_pre_hook(lambda layer, _: seen.append(getattr(layer, layer.buffer_name).dtype))
        x = torch.randn(1, 10, device=self.device)
        in_eval = BUFFER_DTYPE if full_precision else torch.float16
        for training, dtype in ((True, torch.float16), (False, in_eval), (True, torch.float16)):
            model.train(training)
            model((x,))
            self.assertEqual(seen, [dtype] * 2)
            self.assertEqual([buffer.dtype for buffer in model.buffers()], [dtype] * 2)
            seen.clear()

    @skip_if_lt_x_gpu(2)
    def test_full_precision_in_eval_buffers_under_any_root(self):
        """A root without parameters casts buffers if any of its instances uses mixed precision."""
        with internals.switched(FULL_PRECISION_IN_EVAL, True):
            layers = [LinearMixedPrecision(torch.float32, f"buffer{index}").to(self.device) for index in (0, 1)]
            half = MixedPrecision(torch.float16, torch.float16, torch.float16, cast_forward_inputs=True)
            wrapped = [FSDP(layers[0], mixed_precision=half), FSDP(layers[1])]
            model = FSDP(nn.ModuleList(wrapped))
        model.module.forward = lambda x: [layer((x,)) for layer in wrapped]
        self.assertIsNone(internals.handle(model))
        for training, low in ((True, torch.float16), (False, BUFFER_DTYPE), (True, torch.float16)):
            model.train(training)
            model(torch.randn(1, 10, device=self.device))
            self.assertEqual([buffer.dtype for buffer in model.buffers()], [low, BUFFER_DTYPE])

    @skip_if_lt_x_gpu(2)
    @subtests(**IN_EVAL)
    def test_full_precision_in_eval_comm(self, cast_forward_inputs, full_precision):
        """In eval mode, gradients are reduced in full precision if requested."""
        config = MixedPrecision(
            param_dtype=torch.float32,
            buffer_dtype=torch.float32,
            reduce_dtype=torch.float16,
            cast_forward_inputs=cast_forward_inputs,
            _module_classes_to_ignore=[],
        )
        with internals.switched(FULL_PRECISION_IN_EVAL, full_precision):
            model = self._transformer(mixed_precision=config).eval()
        inputs = model.module.get_input(self.device)
        with recorded() as calls:
            model.module.get_loss(inputs, model(*inputs)).backward()
        reduced = calls.dtypes("reduce_scatter", "all_reduce")
        self.assertEqual(reduced, [torch.float32 if full_precision else torch.float16] * 5)
        self.assertEqual(set(calls.dtypes("all_gather")), {torch.float32})

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES, use_orig_params=[False, True])
    def test_input_grads_with_param_mixed_precision(self, sharding_strategy, use_orig_params):
        """The gradient of a float32 input is float32, even if it was computed in float16."""
        torch.manual_seed(0)
        layer = nn.Linear(16, 16, bias=False, device=self.device)
        expected = layer.weight.detach().half()
        model = FSDP(
            layer,
            sharding_strategy=sharding_strategy,
            use_orig_params=use_orig_params,
            mixed_precision=MixedPrecision(torch.float16, torch.float32, torch.float32),
        )
        x = torch.randn(4, 16, device=self.device, requires_grad=True)
        weight = torch.randn(4, 16, device=self.device).half()
        (model(x) * weight).sum().backward()
        self.assertEqual((x.dtype, x.grad.dtype), (torch.float32, torch.float32))
        self.assertEqual(x.grad, (weight @ expected).float(), rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    def test_buffer_dtype_no_root_handle(self):
        """Buffers of modules without parameters are cast, also if the root has no parameters of its own."""
        torch.manual_seed(0)

        class Blur(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("kernel", torch.rand(4, 4))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x @ self.kernel

        plain = nn.Sequential(*(nn.Sequential(module) for module in (nn.Linear(4, 4), Blur(), nn.Linear(4, 4), Blur())))
        plain.to(self.device)
        model = FSDP(
            copy.deepcopy(plain),
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
            mixed_precision=default_mp,
        )
        self.assertIsNone(internals.handle(model))
        x = torch.randn(2, 4, device=self.device)
        output = model(x)
        self.assertEqual({buffer.dtype for buffer in model.buffers()}, {torch.float16})
        self.assertEqual(output, plain.half()(x.half()), rtol=0, atol=0)
        output.mean().backward()
        self.assertEqual({param.grad.dtype for param in model.parameters() if param.numel()}, {torch.float32})


class ResidualNetwork(nn.Module):
    """Convolutions and batch norms with a shortcut, and a linear layer at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.block = nn.Sequential(
            *(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.Conv2d(8, 4, 3, padding=1), nn.BatchNorm2d(4)),
        )
        self.fc = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.fc(F.relu(x + self.block(x)).mean((2, 3)))


class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(2, 40, bias=False)
        self.bn = nn.BatchNorm1d(4)
        self.fc2 = nn.Linear(40, 4, bias=False)
        self.ln = nn.LayerNorm(4)
        self.fc3 = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn(self.fc1(x).reshape(-1, 4, 10))
        x = self.ln(self.fc2(x.reshape(-1, 40)))
        return self.fc3(x).softmax(dim=1)


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y) * self.scale


class SumsOf(nn.Module):
    """Calls its inner module with inputs of these dtypes."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.linear, self.sums, self.dtypes = nn.Linear(2, 2), Sums(), dtypes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return self.sums(*(x.to(dtype) for dtype in self.dtypes))


class SeesInput(nn.Module):
    """A module that remembers the dtype of its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x.dtype
        return self.layer(x)


class TestFSDPMixedPrecisionUnsharded(TestFSDPMixedPrecision):
    """One rank, for which every strategy becomes NO_SHARD."""

    world_size = 1

    @skip_if_lt_x_gpu(1)
    @subtests(offload_params=[False, True], use_orig_params=[False, True])
    def test_grads_reduced_precision(self, offload_params, use_orig_params):
        self._test_grads_reduced_precision(offload_params, use_orig_params)

    @skip_if_lt_x_gpu(1)
    def test_mixed_precision_no_reshard_after_forward(self):
        self._run_test_mixed_precision_e2e(mp_diff_buffer_and_reduce, fsdp_kwargs=NO_RESHARD)

    @skip_if_lt_x_gpu(1)
    def test_mixed_precision_e2e_full_shard(self):
        self._run_test_mixed_precision_e2e(mp_diff_buffer_and_reduce)


class IgnoredModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(100, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x)


class ModelWithIgnoredModule(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l1 = nn.Linear(100, 100)
        self.ignored = IgnoredModule()
        self.l2 = nn.Linear(100, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l2(self.ignored(self.l1(x)))


class TestFSDPMixedPrecisionIgnoredModules(FSDPTest):
    world_size = 1

    @skip_if_lt_x_gpu(1)
    def test_mixed_precision_with_ignored_module(self):
        """An ignored module stays in full precision, so it rejects a low precision input."""
        model = ModelWithIgnoredModule().to(self.device)
        float16 = MixedPrecision(param_dtype=torch.float16)
        model = FSDP(model, ignored_modules=[model.ignored], mixed_precision=float16)
        x = torch.ones(2, 100, device=self.device)
        with self.assertRaisesRegex(RuntimeError, "must have the same dtype"):
            model(x)
        self.assertEqual(model.ignored.l.weight.dtype, torch.float32)


class TestFSDPDifferentSubmodulePrecision(FSDPTest):
    """The dtypes that a model and its two submodules see if one or both of them have their own precision.

    The tests use float16 and bfloat16. Gradients must have the original dtype.
    """

    world_size = 2

    def _build(
        self,
        seen: dict[nn.Module, torch.Tensor],
        cast_forward_inputs: bool,
        c1: MixedPrecision | None = None,
        c2: MixedPrecision | None = None,
        root: MixedPrecision | None = None,
    ) -> tuple[nn.Module, nn.Module, nn.Module, FSDP]:
        """The model, its submodules c1 and c2, and the model in FSDP. A submodule with a precision is also in FSDP.

        ``seen`` gets the inputs of all three. With ``cast_forward_inputs`` the submodules cast their own inputs.
        """
        model = SaveForwardInputsModel(seen, cast_forward_inputs).to(self.device)
        plain = model, model.c1, model.c2
        if c1 is not None:
            model.c1 = FSDP(model.c1, mixed_precision=c1)
        if c2 is not None:
            model.c2 = FSDP(model.c2, mixed_precision=c2)
        return *plain, FSDP(model, mixed_precision=root)

    def _forward(self, sharded: FSDP) -> torch.Tensor:
        return sharded(torch.zeros(2, 100, device=self.device))

    def _check_seen(self, seen: dict[nn.Module, torch.Tensor], expected: dict[nn.Module, torch.dtype]) -> None:
        self.assertEqual([seen[module].dtype for module in expected], list(expected.values()))

    def _check_grads(self, model: FSDP) -> None:
        self.assertEqual({flat_param.grad.dtype for flat_param in internals.flat_params(model)}, {torch.float32})

    @skip_if_lt_x_gpu(2)
    @subtests(low=LOW_DTYPES)
    def test_float16_on_one_submodule(self, low):
        seen: dict[nn.Module, torch.Tensor] = {}
        casts = MixedPrecision(param_dtype=low, cast_forward_inputs=True)
        model, c1, c2, sharded = self._build(seen, cast_forward_inputs=False, c2=casts)
        output = self._forward(sharded)
        output.sum().backward()
        self._check_seen(seen, {model: torch.float32, c1: torch.float32, c2: low})
        self.assertEqual(output.dtype, low)
        self._check_grads(sharded)

    @skip_if_lt_x_gpu(2)
    @subtests(low=LOW_DTYPES)
    def test_float16_on_one_submodule_skip_inputs(self, low):
        seen: dict[nn.Module, torch.Tensor] = {}
        casts_not = MixedPrecision(param_dtype=low, cast_forward_inputs=False)
        model, c1, c2, sharded = self._build(seen, cast_forward_inputs=True, c2=casts_not)
        self._forward(sharded).sum().backward()
        self._check_seen(seen, {model: torch.float32, c1: torch.float32, c2: torch.float32})
        self._check_grads(sharded)

    @skip_if_lt_x_gpu(2)
    @subtests(low=LOW_DTYPES)
    def test_float16_on_one_submodule_skip_inputs_error(self, low):
        casts_not = MixedPrecision(param_dtype=low, cast_forward_inputs=False)
        *_, sharded = self._build({}, cast_forward_inputs=False, c2=casts_not)
        with self.assertRaisesRegex(RuntimeError, SAME_DTYPE):
            self._forward(sharded)

    @skip_if_lt_x_gpu(2)
    @subtests(low=LOW_DTYPES)
    def test_submodules_with_different_precisions_error(self, low):
        """The root casts only its own input, so the first submodule's low precision output reaches the second one."""
        casts, root = (MixedPrecision(dtype, cast_forward_inputs=True) for dtype in (low, torch.float32))
        *_, sharded = self._build({}, cast_forward_inputs=False, c1=casts, root=root)
        with self.assertRaisesRegex(RuntimeError, SAME_DTYPE):
            self._forward(sharded)

    @skip_if_lt_x_gpu(2)
    @subtests(low=LOW_DTYPES)
    def test_submodules_with_different_precisions(self, low):
        seen: dict[nn.Module, torch.Tensor] = {}
        casts, root = (MixedPrecision(dtype, cast_forward_inputs=True) for dtype in (low, torch.float32))
        model, c1, c2, sharded = self._build(seen, cast_forward_inputs=False, c2=casts, root=root)
        self._forward(sharded).sum().backward()
        self._check_seen(seen, {model: torch.float32, c1: torch.float32, c2: low})
        self._check_grads(sharded)

    @skip_if_lt_x_gpu(2)
    @subtests(low=LOW_DTYPES)
    def test_submodules_with_external_inputs(self, low):
        """The submodule does not cast its inputs, so a tensor that the model creates stays float32."""
        seen: dict[str, torch.dtype] = {}
        model = MakesAnInput(seen).to(self.device)
        l2 = model.l2
        model.l2 = FSDP(model.l2, mixed_precision=MixedPrecision(param_dtype=low))
        sharded = FSDP(model, mixed_precision=MixedPrecision(param_dtype=low))
        sharded(torch.ones(2, 100, device=self.device)).sum().backward()
        self.assertEqual(seen, {"root": low, "x": low, "y": torch.float32})
        self.assertIs(model.l2.module, l2)
        self._check_grads(sharded)


class TakesTwo(nn.Module):
    def __init__(self, seen: dict[str, torch.dtype]) -> None:
        super().__init__()
        self.l = nn.Linear(100, 100)
        self.seen = seen

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.seen.update(x=x.dtype, y=y.dtype)
        return self.l(x)


class MakesAnInput(nn.Module):
    """Calls its second layer with an output of the first and with a tensor that it creates."""

    def __init__(self, seen: dict[str, torch.dtype]) -> None:
        super().__init__()
        self.l1 = nn.Linear(100, 100)
        self.l2 = TakesTwo(seen)
        self.seen = seen

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["root"] = x.dtype
        return self.l2(self.l1(x), torch.ones(2, 100, device=x.device))


class TransformerWithEMA(nn.Module):
    """Runs a transformer in training, and its moving average in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.module = self._transformer()
        # The decay is small, so that a step's effect is visible in half precision.
        self.ema_module = AveragedModel(self._transformer(), multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)

    def _transformer(self) -> nn.Module:
        return nn.Transformer(8, nhead=2, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=8)

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return self.module(*args) if self.training else self.ema_module(*args)


class TestFSDPTrainEval(FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES)
    def test_train_ema_eval_flow(self, sharding_strategy):
        """Each round trains one submodule, averages it into another one, and runs the average in eval mode."""
        device = self.device
        torch.manual_seed(0)
        model = FSDP(
            TransformerWithEMA().to(device),
            auto_wrap_policy=ModuleWrapPolicy({nn.Transformer, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}),
            mixed_precision=MixedPrecision(param_dtype=torch.float16),
            sharding_strategy=sharding_strategy,
        )
        optim = torch.optim.Adam(model.module.module.parameters(), lr=1e-2)
        torch.manual_seed(1 + self.rank)
        eval_source = torch.randn(8, 1, 8, device=device)
        eval_target = torch.randn(16, 1, 8, device=device)
        sums = []
        expected: list[torch.Tensor] | None = None  # the average, kept by hand
        for _ in range(3):
            model.train()
            source, target = torch.randn(8, 4, 8, device=device), torch.randn(16, 4, 8, device=device)
            model(source, target).sum().backward()
            optim.step()
            optim.zero_grad()
            with FSDP.summon_full_params(model):
                model.ema_module.update_parameters(model.module.module)
                trained = [param.detach().clone() for param in model.module.module.parameters()]
                averaged = [param.detach().clone() for param in model.ema_module.module.parameters()]
            expected = trained if expected is None else [0.9 * a + 0.1 * b for a, b in zip(expected, trained)]
            self.assertEqual(averaged, expected)
            model.eval()
            with torch.no_grad():
                output = model(eval_source, eval_target)
            self.assertEqual(output.dtype, torch.float16)
            sums.append(output.float().sum().item())
        for one, other in ((0, 1), (1, 2), (0, 2)):
            self.assertNotEqual(sums[one], sums[other])


instantiate_parametrized_tests(TestFSDPMixedPrecisionSharded)

if __name__ == "__main__":
    run_tests()
