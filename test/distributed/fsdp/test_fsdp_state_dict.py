"""State dicts of FSDP1 models: their contents, their devices, and whether loading them restores the model.

The tests cover full, sharded and local state dicts, from rank 0 only and in CPU memory; activation checkpoints,
buffers, shared, ignored and skipped modules; and loads that must be rejected.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import math
import unittest
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, enable_wrap, wrap
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    FSDPTestContinuous,
    SkipModel,
    TransformerWithSharedParams,
    _assert_module_states,
    _broadcast_state_dict,
    _zero_model,
)
from torch_fsdp_tests.common_utils import decorateIf, instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.fsdp1_cases import states_may_be_synced
from torch_fsdp_tests.fsdp.fsdp1_state_dicts import (
    FORMS,
    KINDS,
    UNFLATTENED,
    StateDict,
    StateDictMixin,
    gathered,
    summoned,
)
from torch_fsdp_tests.fsdp.internals import checkpoint_wrapping, sharded_tensors
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import data_parallel, named
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.installed_torch import torch_names

remote_device = torch_names.module("torch.distributed.remote_device")
sharded_metadata = torch_names.module("torch.distributed._shard.sharded_tensor.metadata")
sharding_spec = torch_names.module("torch.distributed._shard.sharding_spec")
unshard_utils = torch_names.module("torch.distributed.fsdp._unshard_param_utils")


HOST = torch.device("cpu")  # the CPU is the subject
OFFLOAD = [CPUOffload(offload_params=True), CPUOffload(offload_params=False)]
HALF = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)
SINGLE = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float32, buffer_dtype=torch.float32)
LAYERS = ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer})


def _is_unsupported(parameters: dict[str, Any]) -> bool:
    kind = parameters["state_dict_type"]
    rank0 = parameters.get("state_dict_rank0_and_offload", False)
    return (rank0 and kind != "state_dict") or (parameters.get("use_orig_params", False) and kind == "local_state_dict")


skip_unsupported = unittest.skip(
    "only full state dicts can be on rank 0 alone, and flat shards need use_orig_params=False"
)
only_supported = decorateIf(skip_unsupported, _is_unsupported)


def square() -> nn.Linear:
    return nn.Linear(10, 10, bias=False)


def make_nonzero(model: nn.Module) -> None:
    """Make all elements nonzero, and the same on all ranks."""
    generator = torch.Generator().manual_seed(0)
    with FSDP.summon_full_params(model), torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            values = torch.randint(1, 100, tensor.shape, generator=generator)
            tensor.copy_(values / 100 if tensor.is_floating_point() else values)


def train(model: nn.Module, optim: torch.optim.Optimizer, inp: torch.Tensor, iterations: int = 1) -> None:
    for _ in range(iterations):
        optim.zero_grad()
        model(inp).mean().backward()
        optim.step()


class Model(nn.Module):
    """Two layers. FSDP may wrap the first one. They may have buffers."""

    def __init__(
        self,
        wrap_fsdp: bool,
        register_buffers: bool = False,
        ignore_inner: bool = False,
        mixed_precision: bool = False,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 5)
        if register_buffers:
            for layer in (self.inner, self.outer):
                layer.register_buffer("buffer", torch.randn(5, 5))
                layer.register_buffer("non_persistent_buffer", torch.randn(5, 5), persistent=False)
        self.to(accelerator.current().device(dist.get_rank()))
        if wrap_fsdp:
            self.inner = FSDP(
                self.inner,
                process_group=process_group,
                ignored_modules=[self.inner] if ignore_inner else None,
                mixed_precision=HALF if mixed_precision else None,
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x) + self.inner(x))


class TestDummyModel(nn.Module):
    """A module and a parameter with two names each."""

    __test__ = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net1 = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.net2 = nn.Sequential(nn.Linear(16, 16), nn.ReLU())
        self.net3 = self.net2
        self.random_parameter = nn.Parameter(torch.rand(10))
        self.shared_parameter = self.random_parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net3(self.net2(self.net1(x)))


def shards_to(value: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """A copy of a tensor, or of a sharded tensor with its metadata, on another device."""
    if not isinstance(value, sharded_tensors.ShardedTensor):
        return value.to(device)
    shards = [
        sharded_tensors.Shard.from_tensor_and_offsets(
            shard.tensor.detach().to(device), shard.metadata.shard_offsets, dist.get_rank()
        )
        for shard in value.local_shards()
    ]
    return sharded_tensors.init_from_local_shards(shards, value.size(), process_group=group)


class TestFSDPStateDict(StateDictMixin, FSDPTestContinuous):
    """About a hundred short tests, run by the same two ranks."""

    world_size = 2

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

    # Models of 10 by 10 layers.

    def _get_simple_model(self, *, checkpoint_wrap: bool = False, **fsdp_kwargs: Any) -> nn.Module:
        layer = square().to(self.device)
        return FSDP(self._maybe_checkpoint(layer, checkpoint_wrap), **fsdp_kwargs)

    def _maybe_checkpoint(self, module: nn.Module, checkpoint: bool) -> nn.Module:
        return checkpoint_wrapping.checkpoint_wrapper(module) if checkpoint else module

    def _get_simple_nested_model(self, *, checkpoint_wrap: bool = False, **fsdp_kwargs: Any) -> nn.Module:
        lin1, lin2 = (self._maybe_checkpoint(square().to(self.device), checkpoint_wrap) for _ in range(2))
        layers = nn.Sequential(FSDP(lin1, **fsdp_kwargs), lin2)
        return FSDP(self._maybe_checkpoint(layers, checkpoint_wrap), **fsdp_kwargs)

    def _get_multibuffer_nested_model(self, mixed_precision: MixedPrecision | None, **fsdp_kwargs: Any) -> nn.Module:
        """Batch norm, with three buffers, in an FSDP instance that always uses single precision."""
        lin1, bn, lin2 = square(), nn.BatchNorm1d(10), square()
        layers = [
            FSDP(lin1.to(self.device), mixed_precision=mixed_precision, **fsdp_kwargs),
            FSDP(bn.to(self.device), mixed_precision=SINGLE if mixed_precision else None, **fsdp_kwargs),
            lin2.to(self.device),
        ]
        return FSDP(nn.Sequential(*layers), **fsdp_kwargs)

    def _get_non_fsdp_root_module(self, *, wrap_fsdp: bool = True, **fsdp_kwargs: Any) -> nn.Module:
        device = self.device  # moved layer by layer, since offloaded parameters must stay on the CPU

        class NonFSDPRoot(nn.Module):
            def __init__(self, nested: Callable[[], nn.Module]) -> None:
                super().__init__()
                self.non_fsdp_lin = square().to(device)
                self.nested1, self.nested2 = nested(), nested()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.nested2(self.nested1(self.non_fsdp_lin(x)))

        def plain() -> nn.Module:
            return nn.Sequential(square(), square()).to(device)

        nested = functools.partial(self._get_simple_nested_model, **fsdp_kwargs) if wrap_fsdp else plain
        return NonFSDPRoot(nested)

    @skip_if_lt_x_gpu(2)
    @parametrize("state_dict_type", UNFLATTENED)
    @parametrize("checkpoint_wrap", ["source", "dest", "both", "source_after_wrap", "both_after_wrap"])
    @parametrize("rank0_only_and_offload", [False, True])
    def test_fsdp_state_dict_with_activation_checkpoint(self, state_dict_type, checkpoint_wrap, rank0_only_and_offload):
        """Names match the model without checkpoints, so each state dict loads into either model."""

        def build(builder: Callable[..., nn.Module], name: str) -> nn.Module:
            before, after = (name, "both"), (f"{name}_after_wrap", "both_after_wrap")
            model = builder(checkpoint_wrap=checkpoint_wrap in before)
            if checkpoint_wrap in after:
                checkpoint_wrapping.apply_activation_checkpointing(
                    model, check_fn=lambda module: isinstance(module, nn.Linear)
                )
            return model

        names = {self._get_simple_model: ["weight"], self._get_simple_nested_model: ["0.weight", "1.weight"]}
        for builder, expected in names.items():
            source, dest = build(builder, "source"), build(builder, "dest")
            state_dict = gathered(self._save(source, state_dict_type, rank0_only_and_offload), self.device)
            rank0_only = rank0_only_and_offload and state_dict_type == "state_dict"
            self._validate_state_dict_contents(source, state_dict, rank0_only)
            state_dict = self._received(state_dict, rank0_only)
            self.assertEqual(list(state_dict), expected)
            _zero_model(dest)
            self._compare_models(source, dest, self.assertNotEqual)
            self._load(dest, "state_dict", state_dict)
            self._compare_models(source, dest, self.assertEqual)

    @skip_if_lt_x_gpu(2)
    @parametrize("state_dict_type", UNFLATTENED)
    @parametrize("rank0_only_and_offload", [False, True])
    @decorateIf(
        skip_unsupported,
        lambda each: each["rank0_only_and_offload"] and each["state_dict_type"] != "state_dict",
    )
    def test_state_dict_with_manual_ac_wrapper(self, state_dict_type, rank0_only_and_offload):
        """Checkpoints within FSDP change neither the names nor the loaded values."""

        def wrapped(checkpoint: bool) -> nn.Module:
            model = self._transformer(FSDPInitMode.NO_FSDP)
            for layers in (model.transformer.encoder.layers, model.transformer.decoder.layers):
                for index, layer in enumerate(layers):
                    layers[index] = FSDP(self._maybe_checkpoint(layer, checkpoint))
            model.transformer = FSDP(model.transformer)
            return model

        plain, checkpointed = wrapped(False), wrapped(True)
        saved = [self._save(each, state_dict_type, rank0_only_and_offload) for each in (plain, checkpointed)]
        self.assertEqual(list(saved[0]), list(saved[1]))
        outside = [name for name in plain.state_dict() if not name.startswith("transformer.")]
        saved = [{name: copy.deepcopy(value) for name, value in each.items()} for each in saved]
        before = summoned(plain)
        for model, state_dict in zip((plain, checkpointed), saved, strict=True):
            self._validate_state_dict_contents(model, state_dict, rank0_only_and_offload, outside)
            _zero_model(model)
            self.assertNotEqual(summoned(model), before)
            self._load(model, state_dict_type, self._received(state_dict, rank0_only_and_offload))
            self.assertEqual(summoned(model), before)
        self._compare_models(plain, checkpointed, self.assertEqual)

    def _transformer(self, mode: FSDPInitMode, **fsdp_kwargs: Any) -> nn.Module:
        return TransformerWithSharedParams.init(
            self.process_group, mode, DEVICEInitMode.DEVICE_BEFORE, fsdp_kwargs, deterministic=True
        )

    @skip_if_lt_x_gpu(2)
    @parametrize("state_dict_type", list(KINDS))
    def test_state_dict_with_shared_parameters(self, state_dict_type):
        """The embedding and the output share a weight. Full and sharded state dicts list it under both names."""
        policy = LAYERS
        source, dest = (self._transformer(FSDPInitMode.RECURSIVE, auto_wrap_policy=policy) for _ in range(2))
        make_nonzero(source)
        _zero_model(dest, zero_buffers=True)
        state_dict = self._save(source, state_dict_type)
        if state_dict_type != "local_state_dict":
            self.assertEqual(sorted(state_dict), sorted(self._transformer(FSDPInitMode.NO_FSDP).state_dict()))
            whole = gathered(state_dict, self.device)
            self.assertEqual(whole["embed_tokens.weight"], whole["output_proj.weight"])
        self._load(dest, state_dict_type, state_dict)
        self._compare_models(source, dest, self.assertEqual)

    @skip_if_lt_x_gpu(2)
    @parametrize("use_orig_params", [False, True])
    def test_state_dict_rank0_offload_save_load_flow(self, use_orig_params):
        """Rank 0 saves, and rank 0 loads into a plain model. FSDP then wraps it and broadcasts the values."""
        kwargs = {"auto_wrap_policy": LAYERS, "use_orig_params": use_orig_params}
        source = self._transformer(FSDPInitMode.RECURSIVE, **kwargs)
        make_nonzero(source)
        state_dict = self._save(source, "state_dict", rank0_and_offload=True)
        self._validate_state_dict_contents(source, state_dict, rank0_and_offload=True)
        dest = self._transformer(FSDPInitMode.NO_FSDP)
        _zero_model(dest, zero_buffers=True, summon_full=False)
        if self.rank == 0:
            dest.load_state_dict(state_dict, strict=True)
        _assert_module_states(dest, self.process_group, self.assertNotEqual)
        with states_may_be_synced():
            dest = FSDP(dest, device_id=self.device, sync_module_states=True, **kwargs)
        with FSDP.summon_full_params(dest):
            _assert_module_states(dest, self.process_group, self.assertEqual)
        self.assertEqual(summoned(dest), summoned(source))

    @skip_if_lt_x_gpu(2)
    @parametrize("state_dict_type", list(KINDS))
    @parametrize("cpu_offload", OFFLOAD)
    @parametrize("fp16", [True, False])
    @parametrize("state_dict_rank0_and_offload", [True, False])
    @parametrize("use_orig_params", [True, False])
    @only_supported
    def test_basic_save_and_load_state_dict(
        self, state_dict_type, cpu_offload, fp16, state_dict_rank0_and_offload, use_orig_params
    ):
        """Save after a backward, and load into another model of the same kind."""
        builders = self._get_non_fsdp_root_module, self._get_simple_nested_model, self._get_simple_model
        dtype = torch.float16 if fp16 else torch.float32
        for build in builders:

            def built(build: Callable[..., nn.Module] = build) -> nn.Module:
                model = build(cpu_offload=cpu_offload, use_orig_params=use_orig_params)
                if fp16:
                    model.half()
                model(self._rows(3, 10).to(dtype)).sum().backward()
                return model

            model, model_new = built(), built()
            state_dict = self._save(model, state_dict_type, state_dict_rank0_and_offload)
            self._validate_state_dict_contents(model, state_dict, state_dict_rank0_and_offload, ["non_fsdp_lin"])
            self.assertEqual({value.dtype for value in state_dict.values()} - {dtype}, set(), may_be="empty")
            _zero_model(model_new)
            self._compare_models(model, model_new, self.assertNotEqual)
            self._load(model_new, state_dict_type, self._received(state_dict, state_dict_rank0_and_offload))
            self._compare_models(model, model_new, self.assertEqual)
            self.assertEqual({value.dtype for value in summoned(model_new).values()}, {dtype})

    @skip_if_lt_x_gpu(2)
    @parametrize("state_dict_type", list(KINDS))
    @parametrize("cpu_offload", OFFLOAD)
    @parametrize("mixed_precision", [True, False])
    @parametrize("state_dict_rank0_and_offload", [True, False])
    @parametrize("use_orig_params", [True, False])
    @only_supported
    def test_buffers_save_and_load_state_dict(
        self, state_dict_type, cpu_offload, mixed_precision, state_dict_rank0_and_offload, use_orig_params
    ):
        """Buffers are saved and loaded, even before the first forward."""

        def build() -> nn.Module:
            mixed = HALF if mixed_precision else None
            return self._get_multibuffer_nested_model(mixed, cpu_offload=cpu_offload, use_orig_params=use_orig_params)

        model, model_new = build(), build()
        self.assertEqual([len(list(each.buffers())) for each in (model, model_new)], [3, 3])
        make_nonzero(model)
        state_dict = self._save(model, state_dict_type, state_dict_rank0_and_offload)
        self._validate_state_dict_contents(model, state_dict, state_dict_rank0_and_offload)
        _zero_model(model_new, zero_buffers=True)
        self._compare_models(model, model_new, self.assertNotEqual)
        self._load(model_new, state_dict_type, self._received(state_dict, state_dict_rank0_and_offload))
        self._compare_models(model, model_new, self.assertEqual)

    @skip_if_lt_x_gpu(2)
    @parametrize("state_dict_type", list(KINDS))
    @parametrize("mixed_precision", [True, False])
    @parametrize("state_dict_rank0_and_offload", [True, False])
    @only_supported
    def test_save_and_load_after_forward_state_dict(
        self, state_dict_type, mixed_precision, state_dict_rank0_and_offload
    ):
        """Saved values are current and in full precision, whatever dtype forward used."""
        model = self._get_simple_nested_model(mixed_precision=HALF if mixed_precision else None)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        initial = summoned(model)
        for _ in range(6):
            optim.zero_grad()
            loss = model(self._rows(1, 10)).sum()
            self.assertEqual(loss.dtype, torch.float16 if mixed_precision else torch.float32)
            loss.backward()
            optim.step()
        trained = summoned(model)
        for name, value in initial.items():
            self.assertNotEqual(trained[name], value)
        saved = self._save(model, state_dict_type, state_dict_rank0_and_offload)
        state_dict = {name: value.clone() for name, value in saved.items()}
        self._validate_state_dict_contents(model, state_dict, state_dict_rank0_and_offload)
        _zero_model(model)
        for name, value in state_dict.items():
            self.assertEqual(value.dtype, torch.float32, name)
        for name, value in summoned(model).items():
            self.assertEqual(value, torch.zeros_like(value), msg=name, may_be="zero")
        self._load(model, state_dict_type, self._received(state_dict, state_dict_rank0_and_offload))
        self.assertEqual(summoned(model), trained)

    def _dist_train(self, wrap_fsdp: bool = True, state_dict: StateDict | None = None, kind: str = "") -> nn.Module:
        """``Model`` after three training steps, or a zeroed one that loads ``state_dict``."""
        torch.manual_seed(0)
        model = FSDP(Model(True)) if wrap_fsdp else data_parallel(Model(False))
        if state_dict is None:
            train(model, torch.optim.SGD(model.parameters(), lr=0.1), self._rows(64, 4), iterations=3)
        else:
            _zero_model(model)
            self._load(model, kind, state_dict)
        return model

    @skip_if_lt_x_gpu(2)
    @parametrize("state_dict_type", list(KINDS))
    @subtests(move_to_cpu=[True, False])
    def test_state_dict_save_load_flow(self, state_dict_type, move_to_cpu):
        """A zeroed model that loads the state of a trained FSDP model equals a model trained with DDP."""
        reference = self._dist_train(wrap_fsdp=False)
        # A local state dict holds the live tensors, so its context must end before they move.
        state_dict = self._save(self._dist_train(), state_dict_type)
        if move_to_cpu:
            state_dict = {name: shards_to(value, HOST) for name, value in state_dict.items()}
        blank = self._dist_train(state_dict=state_dict, kind=state_dict_type)
        # DDP averages gradients in another order, hence the float32 tolerances of assertEqual.
        self.assertEqual(summoned(blank), named(reference))

    @skip_if_lt_x_gpu(2)
    @parametrize("state_dict_type", list(KINDS))
    def test_fsdp_state_dict_keys(self, state_dict_type):
        state_dict = self._save(FSDP(Model(True)), state_dict_type)
        plain = list(Model(False).state_dict())
        flat = [unshard_utils.FLAT_PARAM, f"inner.{unshard_utils.FLAT_PARAM}"]
        self.assertEqual(sorted(state_dict), sorted(flat if state_dict_type == "local_state_dict" else plain))

    @skip_if_lt_x_gpu(2)
    @parametrize("state_dict_type", UNFLATTENED)
    @parametrize("state_dict_rank0_and_offload", [True, False])
    @parametrize("fsdp_root", [True, False])
    @only_supported
    def test_state_dict_load_into_local_module(self, state_dict_type, state_dict_rank0_and_offload, fsdp_root):
        """The joined state dict of a trained model loads into the same model without FSDP."""
        if fsdp_root:
            model, local = FSDP(Model(True, register_buffers=True)), Model(False, register_buffers=True)
            inp = self._rows(64, 4)
        else:
            model, local = self._get_non_fsdp_root_module(), self._get_non_fsdp_root_module(wrap_fsdp=False)
            inp = self._rows(1, 10, of=0)  # the gradients of the layer outside FSDP are not averaged
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), inp, iterations=3)
        trained = {name: value for name, value in summoned(model).items() if "non_persistent" not in name}
        state_dict = self._save(model, state_dict_type, state_dict_rank0_and_offload)
        self._validate_state_dict_contents(model, state_dict, state_dict_rank0_and_offload, ["non_fsdp_lin"])
        state_dict = self._received(gathered(state_dict, self.device), state_dict_rank0_and_offload)

        self.assertFalse(any(isinstance(module, FSDP) for module in local.modules()))
        _zero_model(local, zero_buffers=True, summon_full=False)
        local.load_state_dict(state_dict, strict=True)
        self.assertEqual(dict(local.state_dict()), trained)

    @skip_if_lt_x_gpu(2)
    @parametrize("state_dict_type", list(KINDS))
    @parametrize("double_nest", [True])
    def test_state_dict_skip_module(self, state_dict_type, double_nest):
        """A layer that is added after its neighbors were wrapped is saved unsharded under its own name."""
        model, model_new = (self._skipping(double_nest) for _ in range(2))
        local = SkipModel(double_nest=False)
        model(self._rows(1, 10)).sum().backward()
        state_dict = self._save(model, state_dict_type)
        if state_dict_type != "local_state_dict":
            self.assertEqual(sorted(state_dict), sorted(local.state_dict()))
        skipped = "linear_skip.lin.weight"
        self.assertEqual(state_dict[skipped].data_ptr(), model.module.linear_skip.lin.weight.data_ptr())

        _zero_model(model_new)
        self._compare_models(model, model_new, self.assertNotEqual)
        self._load(model_new, state_dict_type, state_dict)
        self._compare_models(model, model_new, self.assertEqual)
        if state_dict_type != "local_state_dict":
            whole = gathered(state_dict, self.device)
            _zero_model(local, summon_full=False)
            local.load_state_dict(whole, strict=True)
            self.assertEqual(dict(local.named_parameters()), summoned(model))

    def _skipping(self, double_nest: bool) -> nn.Module:
        with enable_wrap(wrapper_cls=FSDP):
            model = SkipModel(double_nest=double_nest)
            skip = model.linear_skip
            del model.linear_skip
            wrapped = wrap(model)
            model.linear_skip = skip
        return wrapped

    @skip_if_lt_x_gpu(2)
    def test_wrong_state_dict_config(self):
        model = FSDP(Model(True))
        with self.assertRaisesRegex(RuntimeError, "Expected state_dict_config of type"):
            with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, LocalStateDictConfig()):
                pass
        self.assertIs(FSDP.get_state_dict_type(model).state_dict_type, StateDictType.FULL_STATE_DICT)

    @skip_if_lt_x_gpu(2)
    @parametrize("state_dict_type", UNFLATTENED)
    @parametrize("prefix", [True, False])
    @parametrize("ignore_inner", [True, False])
    @parametrize("mixed_precision", [True, False])
    def test_state_dict_with_ignored_modules(self, state_dict_type, prefix, ignore_inner, mixed_precision):
        """Ignored modules are neither copied, sharded nor cast."""
        model = Model(True, register_buffers=True, ignore_inner=ignore_inner, mixed_precision=mixed_precision)
        ignored = {f"outer.{name}": state for name, state in model.outer.state_dict(keep_vars=True).items()}
        inner = model.inner.module
        if ignore_inner:
            ignored |= {f"inner.{name}": state for name, state in inner.state_dict(keep_vars=True).items()}
        elif not mixed_precision:  # otherwise it is a copy, cast back
            ignored["inner.buffer"] = inner.buffer
        model = FSDP(model, ignored_modules=[model.outer], mixed_precision=HALF if mixed_precision else None)
        start = "foo." if prefix else ""
        pointers = {f"{start}{name}": state.data_ptr() for name, state in ignored.items()}

        state_dict = self._save(model, state_dict_type, prefix=start)
        self.assertEqual({name: state_dict[name].data_ptr() for name in pointers}, pointers)
        self.assertEqual({state_dict[f"{start}{layer}.buffer"].dtype for layer in ("inner", "outer")}, {torch.float32})
        local = Model(False, register_buffers=True)
        whole = {name.removeprefix(start): value for name, value in gathered(state_dict, self.device).items()}
        _zero_model(local, zero_buffers=True, summon_full=False)
        local.load_state_dict(whole, strict=True)
        found = summoned(model)
        self.assertEqual(dict(local.named_parameters()), {name: found[name] for name, _ in local.named_parameters()})
        for name in ignored:
            self.assertEqual(local.state_dict()[name], ignored[name].detach(), msg=name)

        again = self._save(model, state_dict_type, prefix=start)
        self.assertEqual({name: again[name].data_ptr() for name in pointers}, pointers)

    @skip_if_lt_x_gpu(2)
    def test_state_dict_type(self):
        model = self._skipping(double_nest=True)
        with FSDP.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
            within = {each._state_dict_type for each in FSDP.fsdp_modules(model)}
        self.assertEqual(within, {StateDictType.LOCAL_STATE_DICT})
        self.assertGreater(len(FSDP.fsdp_modules(model)), 2)
        for each in FSDP.fsdp_modules(model):
            self.assertIs(each._state_dict_type, StateDictType.FULL_STATE_DICT)

    @skip_if_lt_x_gpu(2)
    def test_configs_of_an_outer_context_come_back(self):
        """An inner context restores the configurations of the outer one when it ends."""
        model = self._skipping(double_nest=True)
        configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
            with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                pass
            for each in FSDP.fsdp_modules(model):
                self.assertEqual((each._state_dict_config, each._optim_state_dict_config), configs)

    @skip_if_lt_x_gpu(2)
    def test_state_dict_type_after_exception(self):
        """The context restores the state dict type only if its block does not raise."""
        model = FSDP(square().to(self.device))
        with contextlib.suppress(KeyError), FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            raise KeyError
        self.assertIs(FSDP.get_state_dict_type(model).state_dict_type, StateDictType.SHARDED_STATE_DICT)

    @skip_if_lt_x_gpu(2)
    def test_local_state_dict_with_empty_ranks(self):
        """The model has one element. The second rank has no part of it and loads nothing."""

        class OneElement(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a = nn.Parameter(torch.tensor([3.1415926]))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * self.a

        model = FSDP(OneElement().to(self.device))
        with self._mode(model, "local_state_dict"):
            model(torch.ones(1, device=self.device)).sum().backward()
            state_dict = copy.deepcopy(model.state_dict())
            self.assertEqual(len(state_dict[unshard_utils.FLAT_PARAM].local_shards()), 1 - self.rank)
            with FSDP.summon_full_params(model), torch.no_grad():
                model.a.fill_(1.75)
            self.assertEqual(summoned(model)["a"].tolist(), [1.75])
            model.load_state_dict(state_dict)
        self.assertEqual(summoned(model)["a"], torch.tensor([3.1415926], device=self.device))

    @skip_if_lt_x_gpu(2)
    def test_torch_save_load(self):
        """A local state dict can be saved with ``torch.save`` and loaded with ``weights_only=True``."""
        model = FSDP(Model(True))
        state_dict = self._save(model, "local_state_dict")
        file = io.BytesIO()
        torch.save(state_dict, file)
        file.seek(0)
        allowed = [
            sharded_tensors.ShardedTensor,
            sharded_tensors.ShardedTensor.ProcessGroupState,
            sharded_metadata.ShardedTensorMetadata,
            sharded_tensors.Shard,
            sharding_spec.ShardMetadata,
            sharded_tensors.TensorProperties,
            sharded_metadata.MEM_FORMAT_ENCODING,
            sharding_spec.ChunkShardingSpec,
            remote_device._remote_device,
            getattr,
        ]
        with torch.serialization.safe_globals(allowed):
            loaded = torch.load(file, weights_only=True)
        self.assertEqual(list(loaded), list(state_dict))
        for name, value in state_dict.items():
            self.assertEqual(loaded[name].size(), value.size())
            for shard, saved in zip(loaded[name].local_shards(), value.local_shards(), strict=True):
                self.assertEqual(shard.metadata, saved.metadata)
                self.assertEqual(shard.tensor, saved.tensor)
                self.assertNotEqual(shard.tensor.data_ptr(), saved.tensor.data_ptr())

    @skip_if_lt_x_gpu(2)
    def test_shared_module_and_shared_parameter(self):
        plain = TestDummyModel().to(self.device)
        state_dict = self._save(FSDP(copy.deepcopy(plain)), "state_dict")
        self.assertEqual(dict(state_dict), dict(plain.state_dict()))
        self.assertEqual(state_dict["random_parameter"], state_dict["shared_parameter"])
        for name in ("0.bias", "0.weight"):
            self.assertEqual(state_dict[f"net2.{name}"], state_dict[f"net3.{name}"])

    @skip_if_lt_x_gpu(2)
    def test_full_state_dict_missing_unexpected_keys_cleaned(self):
        model = self._get_simple_nested_model()
        state_dict = self._save(model, "state_dict")
        missing = next(iter(state_dict))
        del state_dict[missing]
        state_dict["unexpected"] = torch.ones(1)
        result = self._load(model, "state_dict", state_dict, strict=False)
        self.assertEqual((result.missing_keys, result.unexpected_keys), ([missing], ["unexpected"]))
        self.assertNotIn(internals.fsdp1_common.FSDP_PREFIX, missing)

    @skip_if_lt_x_gpu(2)
    def test_sharded_load_multi_backend_pg(self):
        """Shards on the CPU and shards on the device both load. If the CPU is the device, both cases are the same."""
        device = accelerator.current()
        backends = {HOST.type: "gloo", device.type: device.backend}
        group = dist.new_group(backend=",".join(f"{kind}:{backend}" for kind, backend in backends.items()))
        for load_cpu in (True, False):
            with self.subTest(load_cpu=load_cpu):
                model = TransformerWithSharedParams.init(
                    group, FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_BEFORE, {"use_orig_params": True}
                )
                before = summoned(model)
                state_dict = self._save(model, "sharded_state_dict")
                for param in model.parameters():
                    param.detach().zero_()
                if load_cpu:
                    state_dict = {name: shards_to(value, HOST, group) for name, value in state_dict.items()}
                self._load(model, "sharded_state_dict", state_dict)
                self.assertEqual(summoned(model), before)
        dist.destroy_process_group(group)

    @skip_if_lt_x_gpu(2)
    @subtests(form=FORMS, strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
    def test_gathered_storage(self, form, strategy):
        """Saving reshards only what it unsharded itself. Parameters that are unsharded after forward stay unsharded."""
        kind, use_orig_params = form
        model = self._get_simple_nested_model(sharding_strategy=strategy, use_orig_params=use_orig_params)

        def sizes() -> list[int]:
            return [internals.unsharded_buffer(each).untyped_storage().size() for each in internals.flat_params(model)]

        for _ in range(2):
            self._save(model, kind)
            loss = model(self._rows(1, 10)).sum()
            after_forward = sizes()
            # The root stays unsharded from forward to backward. Under SHARD_GRAD_OP, every instance does.
            self.assertEqual([size > 0 for size in after_forward], [True, strategy is ShardingStrategy.SHARD_GRAD_OP])
            with self._mode(model, kind):
                model.state_dict()
            self.assertEqual(sizes(), after_forward)
            loss.backward()
            self.assertEqual(sizes(), [0, 0])

    @skip_if_lt_x_gpu(2)
    def test_non_persistent_buffers(self):
        """Non-persistent buffers are neither saved nor loaded, with any kind of state dict."""
        for kind in KINDS:
            model, other = (FSDP(Model(True, register_buffers=True)) for _ in range(2))
            state_dict = self._save(model, kind)
            self.assertEqual([name for name in state_dict if "non_persistent" in name], [], may_be="empty")
            self.assertEqual(sorted(name for name in state_dict if "buffer" in name), ["inner.buffer", "outer.buffer"])
            before = summoned(other)
            self._load(other, kind, state_dict)
            after, expected = summoned(other), summoned(model)
            for name in after:
                self.assertEqual(after[name], (before if "non_persistent" in name else expected)[name], msg=name)

    @skip_if_lt_x_gpu(2)
    def test_plain_tensors_are_refused(self):
        """Plain tensors do not load as shards, and the model does not change."""
        model = self._get_simple_model()
        whole = self._save(model, "state_dict")
        for kind, name in (("sharded_state_dict", "weight"), ("local_state_dict", unshard_utils.FLAT_PARAM)):
            with self._mode(model, kind):
                with self.assertRaises(AssertionError):
                    model.load_state_dict({name: torch.ones(10, 10, device=self.device)})
            self.assertEqual(self._save(model, "state_dict"), whole)

    @skip_if_lt_x_gpu(2)
    def test_save_after_refused_load(self):
        """If an inner instance rejects a load, the outer ones stay unsharded, and cannot be saved any more."""
        model = self._get_simple_nested_model()
        state_dict = self._save(model, "sharded_state_dict")
        with self._mode(model, "sharded_state_dict"):
            with contextlib.suppress(AssertionError):
                model.load_state_dict({**state_dict, "0.weight": torch.ones(10, 10, device=self.device)})
            self.assertRaisesRegex(AssertionError, "_unshard_params_ctx", model.state_dict)

    @skip_if_lt_x_gpu(2)
    def test_ignored_buffers_beside_managed_parameters(self):
        """State dicts cast back buffers of mixed precision. Ignored buffers are not cast or copied."""
        for kind in KINDS:
            norms = [nn.BatchNorm1d(4).to(self.device) for _ in range(2)]
            model = FSDP(nn.Sequential(*norms), ignored_modules=[norms[1]], mixed_precision=HALF)
            state_dict = self._save(model, kind)
            same = [state_dict[f"{i}.running_var"].data_ptr() == norms[i].running_var.data_ptr() for i in range(2)]
            # A local state dict holds live shards and live buffers.
            self.assertEqual(same, [kind == "local_state_dict", True])
            dtypes = [state_dict[f"{i}.running_var"].dtype for i in range(2)]
            live = torch.float16 if kind == "local_state_dict" else torch.float32
            self.assertEqual(dtypes, [live, torch.float32])

    @skip_if_lt_x_gpu(2)
    @subtests(
        form=[("state_dict", False), ("state_dict", True), ("sharded_state_dict", False)],
        use_orig_params=[False, True],
        affine=[False, True],
    )
    def test_buffers_beside_units(self, form, use_orig_params, affine):
        """An instance saves its buffers in full precision, and only on ranks that save parameters.

        This holds also if all parameters of the instance are in an inner unit.
        """
        linear, norm = square().to(self.device), nn.BatchNorm1d(10, affine=affine).to(self.device)
        dtypes = {name: value.dtype for name, value in nn.Sequential(linear, norm).state_dict().items()}
        kwargs = {"mixed_precision": HALF, "use_orig_params": use_orig_params}
        model = FSDP(nn.Sequential(FSDP(linear, **kwargs), norm), **kwargs)
        saved = {name: value.dtype for name, value in self._save(model, *form).items()}
        self.assertEqual(norm.running_var.dtype, torch.float16)
        rank0_only = form[1]
        with torch_defect("fsdp1_buffers_beside_units_are_saved_low", when=not affine):
            self.assertEqual(saved, {} if rank0_only and self.rank > 0 else dtypes, may_be="empty")

    @skip_if_lt_x_gpu(2)
    @subtests(kind=list(KINDS), keep_vars=[False, True], low=[False, True])
    def test_saving_leaves_the_buffers(self, kind, keep_vars, low):
        """The model's own buffers keep their dtypes and values, unless the state dict has the buffers themselves."""
        layers = Model(True, register_buffers=True, mixed_precision=low)
        model = FSDP(layers, mixed_precision=HALF if low else None)
        model(self._rows(2, 4))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self.assertEqual({buffer.dtype for buffer in before.values()}, {torch.float16 if low else torch.float32})
        with self._mode(model, kind):
            model.state_dict(keep_vars=keep_vars)
        if keep_vars and low and kind != "local_state_dict":  # which are saved in full precision
            before = {name: each if "non_persistent" in name else each.float() for name, each in before.items()}
        self.assertEqual(dict(model.named_buffers()), before, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    def test_lazy_module_beside_instance(self):
        """A plain parent is saved even if a lazy module before the FSDP instance is not initialized."""
        inner = filled(square()).to(self.device)
        saved = nn.Sequential(nn.LazyLinear(3), FSDP(copy.deepcopy(inner))).state_dict()
        self.assertTrue(nn.parameter.is_lazy(saved["0.weight"]))
        self.assertEqual(saved["1.weight"], inner.weight)

    @skip_if_lt_x_gpu(2)
    @subtests(meshes=[(False, False), (False, True), (True, True)])
    def test_models_with_one_config(self, meshes):
        """Models share one config. Each is saved as DTensors if it has a mesh, and as ShardedTensors otherwise."""
        config = ShardedStateDictConfig()
        for with_mesh in meshes:
            mesh = make_mesh(self.world_size) if with_mesh else None
            model = FSDP(square().to(self.device), device_mesh=mesh)
            FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config)
            kind = DTensor if with_mesh else sharded_tensors.ShardedTensor
            self.assertIs(type(model.state_dict()["weight"]), kind)
            # FSDP1 sets this in the caller's config, so no model without a mesh may follow one with a mesh.
            self.assertIs(config._use_dtensor, with_mesh)

    @skip_if_lt_x_gpu(2)
    def test_optimizer_state_after_state_of_a_part(self):
        """All instances of a model with a mesh have equal settings after one of them was saved alone."""
        kwargs = {"device_mesh": make_mesh(self.world_size), "use_orig_params": True}
        inner = FSDP(square().to(self.device), **kwargs)
        model = FSDP(nn.Sequential(inner, square().to(self.device)), **kwargs)
        optim = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 10, device=self.device)).sum().backward()
        optim.step()
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            inner.state_dict()
            states = FSDP.optim_state_dict(model, optim)["state"]
        self.assertEqual(states.keys(), named(nn.Sequential(square(), square())).keys())

    @skip_if_lt_x_gpu(2)
    def test_world_size_one(self):
        """A rank that is alone in its group gets a full state dict, also of inner instances and a shared weight.

        FSDP gives a warning.
        """
        group = [dist.new_group([rank]) for rank in range(self.world_size)][self.rank]
        plain = TransformerWithSharedParams.init(group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE)
        filled(plain, seed=self.rank)
        model = FSDP(copy.deepcopy(plain), process_group=group, auto_wrap_policy=LAYERS)
        with self._mode(model, "sharded_state_dict"):
            with self.assertWarnsRegex(UserWarning, "full_state_dict will be returned"):
                state_dict = copy.deepcopy(model.state_dict())
            self.assertEqual(dict(state_dict), dict(plain.state_dict()))
            _zero_model(model, zero_buffers=True)
            model.load_state_dict(state_dict)
        self.assertEqual(summoned(model), {**dict(plain.named_parameters()), **dict(plain.named_buffers())})
        dist.destroy_process_group(group)


class TestFSDPStateDict4GPUs(StateDictMixin, FSDPTest):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    def test_local_state_dict_reshard(self):
        """Flat shards of four ranks are joined and cut for two ranks. They load as the same model."""
        pair = dist.new_group([0, 1])
        model = FSDP(Model(True))
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), self._rows(4, 4))
        local = self._save(model, "local_state_dict")
        whole = self._save(model, "state_dict")
        flat = gathered(local, self.device)
        self.assertEqual(
            {name: value.numel() for name, value in flat.items()},
            {unshard_utils.FLAT_PARAM: 25, f"inner.{unshard_utils.FLAT_PARAM}": 20},
        )
        if self.rank > 1:
            return
        resharded = {}
        for name, value in flat.items():
            half = value.chunk(2)[self.rank]
            shard = sharded_tensors.Shard.from_tensor_and_offsets(
                half, [self.rank * math.ceil(value.numel() / 2)], self.rank
            )
            resharded[name] = sharded_tensors.init_from_local_shards([shard], value.numel(), process_group=pair)
        smaller = FSDP(Model(True, process_group=pair), process_group=pair)
        self.assertNotEqual(self._save(smaller, "state_dict"), whole)
        self._load(smaller, "local_state_dict", resharded)
        self.assertEqual(self._save(smaller, "state_dict"), whole, rtol=0, atol=0)

    @skip_if_lt_x_gpu(4)
    def test_sharded_state_dict_is_chunks(self):
        """Each rank has its chunk of the rows, or nothing. Only the last chunk may be smaller."""
        config = {"use_orig_params": [False, True], "offload_to_cpu": [False, True], "pair": [False, True]}
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
        self.run_subtests(config, self._test_sharded_state_dict_is_chunks, pairs)

    def _test_sharded_state_dict_is_chunks(
        self, pairs: list[dist.ProcessGroup], use_orig_params: bool, offload_to_cpu: bool, pair: bool
    ) -> None:
        group = pairs[self.rank // 2] if pair else dist.group.WORLD
        rank, size = group.rank(), group.size()
        whole = self._uneven_layers().state_dict()
        model = self._wrapped(self._uneven_layers(), process_group=group, use_orig_params=use_orig_params)
        state_dict = self._save(model, "sharded_state_dict", offload_to_cpu)
        self.assertEqual(sorted(state_dict), sorted(whole))
        for name, value in state_dict.items():
            rows = whole[name].shape[0]
            chunk = math.ceil(rows / size)
            starts = list(range(0, rows, chunk))
            self.assertEqual(value.size(), whole[name].size())
            self.assertEqual([shard.shard_offsets[0] for shard in value.metadata().shards_metadata], starts)
            owners = [shard.placement.rank() for shard in value.metadata().shards_metadata]
            self.assertEqual(owners, dist.get_process_group_ranks(group)[: len(starts)])
            mine = [shard.tensor for shard in value.local_shards()]
            expected = [whole[name][starts[rank] : starts[rank] + chunk]] if rank < len(starts) else []
            self.assertEqual(mine, expected, rtol=0, atol=0, exact_device=False, may_be="empty")
            actual = [shard.metadata.shard_offsets[0] for shard in value.local_shards()]
            self.assertEqual(actual, starts[rank : rank + 1], may_be="empty")
            for tensor in mine:
                self.assertEqual(tensor.device, HOST if offload_to_cpu else self.device)


instantiate_parametrized_tests(TestFSDPStateDict)

if __name__ == "__main__":
    run_tests()
