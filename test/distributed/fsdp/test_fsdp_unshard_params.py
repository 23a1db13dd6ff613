"""``FSDP.summon_full_params``: what it exposes, what outlives it, when it frees again, and what it refuses."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import unittest

import torch
import torch.distributed as dist
import torch.distributed.fsdp._traversal_utils as traversal_utils
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._common_utils import HandleTrainingState, TrainingState, clean_tensor_name
from torch.distributed.fsdp._flat_param import FlatParameter
from torch.distributed.fsdp.fully_sharded_data_parallel import FLAT_PARAM
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_fsdp_tests import accelerator
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    NestedWrappedModule,
    TransformerWithSharedParams,
)
from torch_fsdp_tests.common_utils import run_tests

# Numbers of elements of the two layers that _two_layers makes: neither is a multiple of 2, so both are padded.
INNER, OUTER = 25, 15
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]


def _mixed_precisions():
    return [MixedPrecision(param_dtype=torch.float16), None]


def _cpu_offloads():
    return [CPUOffload(offload_params=False), CPUOffload(offload_params=True)]


def _skip_unless(*capabilities):
    """End this subtest, and only it, as a skip where the device under test lacks one of the capabilities."""
    reason = accelerator.current().lacks(*capabilities)
    if reason is not None:
        raise unittest.SkipTest(reason)


def _skip_offload_to_host(offload_to_cpu):
    # Where the host itself computes, what to_cpu() calls a copy is the all-gathered storage, which it frees at once.
    if offload_to_cpu:
        _skip_unless("device_memory")


def _flat_params(model):
    return [handle.flat_param for handle in traversal_utils._get_fsdp_handles(model)]


def _elements(storage_of):
    """How many elements the tensor's storage has room for now; a freed one has room for none."""
    return storage_of.untyped_storage().size() // storage_of.element_size()


def _gathered(flat_param, mixed_precision):
    """The tensor into which ``summon_full_params`` gathers."""
    return flat_param._full_param_padded if mixed_precision is None else flat_param._full_prec_full_param_padded


def _named(model, prefix="module."):
    """The parameters by their names without what wrappers, FSDP or DDP, add to them."""
    return {clean_tensor_name(name).removeprefix(prefix): param for name, param in model.named_parameters()}


class TestUnshardParamsBase(FSDPTest):
    """The bodies that the sharded and the unsharded case have in common."""

    @property
    def device(self):
        return accelerator.current().device(self.rank)

    def _two_layers(self, **fsdp_kwargs):
        """FSDP around two layers, ``model[0]`` (5 x 5, again in FSDP) and ``model[1]`` (3 x 5)."""
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 3, bias=False)).to(self.device)
        layers[0] = FSDP(layers[0], **fsdp_kwargs)
        return FSDP(layers, **fsdp_kwargs)

    def _owners(self, numel, world_size=None):
        """For every element of a flattened tensor the rank whose shard it is in: equal chunks, the last one short."""
        return torch.arange(numel, device=self.device) // math.ceil(numel / (world_size or self.world_size))

    def _assert_resharded(self, model, mixed_precision=None):
        """Nothing gathered is left, the local shards are in use, and model and handles are idle."""
        flat_params = _flat_params(model)
        self.assertGreater(len(flat_params), 0)
        for flat_param in flat_params:
            if flat_param._sharded_size != flat_param._unpadded_unsharded_size or hasattr(
                flat_param, "_full_param_padded"
            ):
                self.assertEqual(_elements(flat_param._full_param_padded), 0)
                self.assertEqual(_elements(_gathered(flat_param, mixed_precision)), 0)
            self.assertEqual(flat_param.data_ptr(), flat_param._local_shard.data_ptr())
            self.assertEqual(flat_param.shape, flat_param._sharded_size)
        handles = traversal_utils._get_fsdp_handles(model)
        self.assertEqual({handle._training_state for handle in handles}, {HandleTrainingState.IDLE})
        states = traversal_utils._get_fsdp_states(model)
        self.assertEqual({state.training_state for state in states}, {TrainingState.IDLE})

    def _get_test_unshard_params_writeback_config(self):
        return {
            "writeback": [True, False],
            "check_outer": [True, False],
            "mixed_precision": _mixed_precisions(),
            "cpu_offload": _cpu_offloads(),
            "use_orig_params": [True, False],
        }

    def _test_unshard_params_writeback(self, writeback, check_outer, **fsdp_kwargs):
        model = self._two_layers(**fsdp_kwargs)
        uses_shards = self.world_size > 1
        offloads = fsdp_kwargs["cpu_offload"].offload_params
        layer = model.module[1] if check_outer else model.module[0].module
        handle = (model if check_outer else model.module[0])._handle
        # With the original parameters in use, model.parameters() begins with the inner one: each is taken by name.
        local = layer.weight if fsdp_kwargs["use_orig_params"] else handle.flat_param
        owners = self._owners(OUTER if check_outer else INNER)
        mine = int((owners == self.rank).sum())  # the rest of the local shard, if any, is padding

        with torch.no_grad():
            local.fill_(self.rank + 2)
        with FSDP.summon_full_params(model, writeback=writeback), torch.no_grad():
            self.assertEqual(layer.weight.flatten(), owners + 2.0, exact_device=False)
            for param in model.parameters():
                param.zero_()

        # NO_SHARD exposes the parameters themselves, unless they had to be copied from the host's memory first.
        same_memory = not uses_shards and not (offloads and accelerator.current().has("device_memory"))
        expected = 0.0 if writeback or same_memory else self.rank + 2.0
        self.assertEqual(local.flatten()[:mine].tolist(), [expected] * mine)
        if offloads:
            devices = [param.device.type for param in model.parameters()]
            self.assertEqual(devices, ["cpu"] * 2)  # the CPU is the subject

    def _get_test_unshard_params_param_data_config(self):
        return {
            "rank0_only": [False, True],
            "offload_to_cpu": [False, True],
            "cpu_offload": _cpu_offloads(),
            "mixed_precision": _mixed_precisions(),
            "use_orig_params": [True, False],
        }

    def _test_unshard_params_param_data(
        self, rank0_only, offload_to_cpu, cpu_offload, mixed_precision, use_orig_params
    ):
        _skip_offload_to_host(offload_to_cpu)
        init = functools.partial(
            NestedWrappedModule.init,
            self.process_group,
            device_init_mode=DEVICEInitMode.DEVICE_BEFORE,
            deterministic=True,
        )
        reference = dict(init(FSDPInitMode.NO_FSDP).named_parameters())
        fsdp_kwargs = {
            "cpu_offload": cpu_offload,
            "mixed_precision": mixed_precision,
            "use_orig_params": use_orig_params,
        }
        model = init(FSDPInitMode.RECURSIVE, fsdp_kwargs=fsdp_kwargs)
        self.assertNotIsInstance(model, FSDP)
        outside = {f"module.{layer}.{name}" for layer in (0, 3) for name in ("weight", "bias")}

        with FSDP.summon_full_params(
            model, rank0_only=rank0_only, writeback=not rank0_only, offload_to_cpu=offload_to_cpu
        ):
            if self.rank == 0 or not rank0_only:
                found = _named(model, prefix="")
                self.assertEqual(list(found), list(reference))
                for name, param in found.items():
                    host = offload_to_cpu and name not in outside
                    self.assertIsInstance(param, nn.Parameter)
                    self.assertEqual(param.dtype, torch.float32)
                    self.assertEqual(param.device, torch.device("cpu") if host else self.device)  # the CPU is the subject
                    self.assertEqual(param, reference[name], rtol=0, atol=0, exact_device=False)
            else:
                for handle in traversal_utils._get_fsdp_handles(model):
                    flat_param = handle.flat_param
                    sharded = handle.uses_sharded_strategy
                    size = flat_param._sharded_size if sharded else flat_param._unpadded_unsharded_size
                    self.assertEqual(flat_param.shape, size)

        roots = [state for state in traversal_utils._get_fsdp_states(model) if state._is_root]
        self.assertEqual(len(roots), 2)  # module.1 and module.2; the model itself is not in FSDP
        self._assert_resharded(model, mixed_precision)


class TestUnshardParams(TestUnshardParamsBase):
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2)
    def test_unshard_params_writeback(self):
        """What is written to all parameters persists exactly with ``writeback=True``."""
        self.run_subtests(self._get_test_unshard_params_writeback_config(), self._test_unshard_params_writeback)

    @skip_if_lt_x_gpu(2)
    def test_unshard_params_param_data(self):
        """Inside are the original parameters, in full precision, on every rank or on rank 0 alone."""
        self.run_subtests(self._get_test_unshard_params_param_data_config(), self._test_unshard_params_param_data)

    @skip_if_lt_x_gpu(2)
    def test_unshard_singleton_param_writeback(self):
        """Of a single element over two ranks the second holds only padding, to which nothing is written back.

        That is how it is implemented today, and no promise.
        """
        model = FSDP(nn.Linear(1, 1, bias=False).to(self.device))
        (local,) = _flat_params(model)
        self.assertEqual(local.numel(), 1)
        with torch.no_grad():
            local.fill_(self.rank + 2)
        with FSDP.summon_full_params(model, writeback=True), torch.no_grad():
            (param,) = model.parameters()
            self.assertEqual(param.flatten().tolist(), [2.0])
            param.zero_()
        self.assertEqual(local.tolist(), [0.0] if self.rank == 0 else [3.0])

    @skip_if_lt_x_gpu(2)
    def test_unshard_params_respects_reshard(self):
        """A root that stays gathered after forward stays so; what was freed is freed again."""
        self.run_subtests(
            {
                "rank0_only": [False, True],
                "offload_to_cpu": [False, True],
                "mixed_precision": _mixed_precisions(),
                "use_orig_params": [False, True],
            },
            self._test_unshard_params_respects_reshard,
        )

    def _test_unshard_params_respects_reshard(self, rank0_only, offload_to_cpu, mixed_precision, use_orig_params):
        _skip_offload_to_host(offload_to_cpu)
        model = self._two_layers(mixed_precision=mixed_precision, use_orig_params=use_orig_params)
        outer, inner = model._handle.flat_param, model.module[0]._handle.flat_param
        gathered = 16  # 8 elements on each rank

        def _get_unsharded_storage_size(flat_param):
            return _elements(flat_param._full_param_padded)

        def assert_gathered(expected_outer):
            self.assertEqual(_get_unsharded_storage_size(outer), expected_outer)
            self.assertEqual(_get_unsharded_storage_size(inner), 0)

        def open_and_close():
            with FSDP.summon_full_params(
                model, rank0_only=rank0_only, writeback=not rank0_only, offload_to_cpu=offload_to_cpu
            ):
                pass

        output = model(torch.zeros(5, device=self.device))
        assert_gathered(gathered)
        output.sum().backward()
        assert_gathered(0)
        output = model(torch.zeros(5, device=self.device))
        open_and_close()
        # Full precision was forced on what forward gathered, so its copy in low precision is out of date.
        assert_gathered(gathered if mixed_precision is None else 0)
        output.sum().backward()
        open_and_close()
        assert_gathered(0)

    @skip_if_lt_x_gpu(2)
    def test_unshard_params_recurse(self):
        """``recurse=False`` opens the module that it is called on and no FSDP instance below."""
        self.run_subtests(
            {
                "recurse": [False, True],
                "unshard_outer": [False, True],
                "mixed_precision": _mixed_precisions(),
                "use_orig_params": [False, True],
            },
            self._test_unshard_params_recurse,
        )

    def _test_unshard_params_recurse(self, recurse, unshard_outer, mixed_precision, use_orig_params):
        model = self._two_layers(mixed_precision=mixed_precision, use_orig_params=use_orig_params)
        outer, inner = model._handle.flat_param, model.module[0]._handle.flat_param
        padding = int(use_orig_params)  # then the flat parameter is itself padded to a multiple of the world size
        sharded = 8, 13

        self.assertEqual((outer.numel(), inner.numel()), sharded)
        with FSDP.summon_full_params(model if unshard_outer else model.module[0], recurse=recurse):
            self.assertEqual(outer.numel(), OUTER + padding if unshard_outer else 8)
            self.assertEqual(inner.numel(), INNER + padding if recurse or not unshard_outer else 13)
        self.assertEqual((outer.numel(), inner.numel()), sharded)

    @skip_if_lt_x_gpu(2)
    def test_named_parameters_and_buffers(self):
        """Inside, names are those of the model without FSDP."""
        self.run_subtests(
            {"prefix": ["", "test_prefix"], "recurse": [False, True]}, self._test_named_parameters_and_buffers
        )

    def _test_named_parameters_and_buffers(self, prefix, recurse):
        reference, inner = (
            NestedWrappedModule.init(
                self.process_group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE, deterministic=True
            )
            for _ in range(2)
        )
        model = FSDP(inner, self.process_group)
        for module in (reference, model):
            module.buffer = nn.Buffer(torch.ones(1, device=self.device))

        with FSDP.summon_full_params(model):
            for method, count in (("named_parameters", 10 if recurse else 0), ("named_buffers", 1)):
                expected = list(getattr(reference, method)(prefix=prefix, recurse=recurse))
                found = list(getattr(model, method)(prefix=prefix, recurse=recurse))
                self.assertEqual(len(expected), count)
                self.assertEqual([name for name, _ in found], [name for name, _ in expected])
                for (_, found_tensor), (_, expected_tensor) in zip(found, expected):
                    self.assertEqual(found_tensor, expected_tensor, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    def test_with_grads_core(self):
        """Unsharded gradients are those of DDP, after backward and before the next one, and can be written."""
        self.run_subtests(
            {
                "writeback": [False, True],
                "offload_to_cpu": [False, True],
                "sharding_strategy": STRATEGIES,
                "use_orig_params": [True],
            },
            self._test_with_grads_core,
        )

    def _transformer_and_ddp(self, **fsdp_kwargs):
        init = functools.partial(
            TransformerWithSharedParams.init,
            self.process_group,
            device_init_mode=DEVICEInitMode.DEVICE_BEFORE,
            deterministic=True,
        )
        return init(FSDPInitMode.RECURSIVE, fsdp_kwargs=fsdp_kwargs), DDP(init(FSDPInitMode.NO_FSDP))

    def _test_with_grads_core(self, writeback, offload_to_cpu, sharding_strategy, use_orig_params):
        is_supported = use_orig_params and not offload_to_cpu
        persists = writeback or (sharding_strategy is ShardingStrategy.NO_SHARD and not offload_to_cpu)

        def _get_error_context(is_supported):
            return contextlib.nullcontext() if is_supported else self.assertRaises(NotImplementedError)

        def _get_fsdp_grads(fsdp_model, is_supported):
            # Not from the parameters as they are: under SHARD_GRAD_OP these have no gradient between forward and
            # backward, and a comparison of two empty lists would pass.
            if not is_supported:
                return None
            with FSDP.summon_full_params(fsdp_model, writeback=False, with_grads=True):
                return {name: param.grad.clone() for name, param in _named(fsdp_model).items()}

        def _check_grads(ddp_model, fsdp_model, old_fsdp_grads):
            expected = _named(ddp_model)
            with FSDP.summon_full_params(
                fsdp_model, writeback=writeback, offload_to_cpu=offload_to_cpu, with_grads=True
            ):
                found = _named(fsdp_model)
                self.assertEqual(list(found), list(expected))
                for name, param in found.items():
                    self.assertIsNotNone(expected[name].grad)
                    torch.testing.assert_close(param.grad, expected[name].grad)
                    self.assertGreater(torch.count_nonzero(param.grad), 0)
                    param.grad.mul_(2)
            factor = 2 if persists else 1
            doubled = {name: grad * factor for name, grad in old_fsdp_grads.items()}
            self.assertEqual(_get_fsdp_grads(fsdp_model, is_supported), doubled, rtol=0, atol=0)
            for param in expected.values():
                param.grad.mul_(factor)

        fsdp_model, ddp_model = self._transformer_and_ddp(
            sharding_strategy=sharding_strategy, use_orig_params=use_orig_params
        )
        with FSDP.summon_full_params(fsdp_model):
            self.assertEqual(_named(fsdp_model), _named(ddp_model))
        inputs = fsdp_model.module.get_input(self.device)
        # The model's inputs are the same on every rank; weighted losses make the gradients differ.
        losses = [model(*inputs).sum() * (self.rank + 1) for model in (fsdp_model, ddp_model)]
        for loss in losses:
            loss.backward()
        for _ in range(2):  # after backward; and after the next forward, before its backward
            old_fsdp_grads = _get_fsdp_grads(fsdp_model, is_supported)
            with _get_error_context(is_supported):
                _check_grads(ddp_model, fsdp_model, old_fsdp_grads)
            for model in (fsdp_model, ddp_model):
                model(*inputs)

    @skip_if_lt_x_gpu(2)
    def test_with_grads_none_grads(self):
        """Where there was no backward there is no gradient, unsharded or not."""
        self.run_subtests({"sharding_strategy": STRATEGIES}, self._test_with_grads_none_grads)

    def _assert_no_grads(self, model):
        with FSDP.summon_full_params(model, with_grads=True):
            grads = {name: param.grad for name, param in _named(model).items()}
        self.assertGreater(len(grads), 0)
        self.assertEqual(grads, dict.fromkeys(grads))

    def _test_with_grads_none_grads(self, sharding_strategy):
        model, _ = self._transformer_and_ddp(sharding_strategy=sharding_strategy, use_orig_params=True)
        flat_params = _flat_params(model)
        self.assertEqual([flat_param.grad for flat_param in flat_params], [None] * 5)  # the root and four layers
        self._assert_no_grads(model)

    @skip_if_lt_x_gpu(2)
    def test_unshard_submodule(self):
        """A submodule opened by itself shows its original parameters."""
        layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(self.device) for _ in range(2))
        )
        model = FSDP(layers, auto_wrap_policy=ModuleWrapPolicy((nn.Sequential,)))
        with FSDP.summon_full_params(model[0]):
            shapes = {name: tuple(param.shape) for name, param in model[0].named_parameters()}
        self.assertNotIn(FLAT_PARAM, " ".join(shapes))
        expected = {f"{layer}.{name}": shape for layer in (0, 1) for name, shape in (("weight", (16, 16)), ("bias", (16,)))}
        self.assertEqual(shapes, expected)

    @skip_if_lt_x_gpu(2)
    def test_writeback_is_of_the_own_shard(self):
        """Beyond upstream: of what the ranks write, each element keeps what the rank that owns it wrote, exactly."""
        self.run_subtests(
            {
                "writeback": [True, False],
                "sharding_strategy": [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP],
                "mixed_precision": _mixed_precisions(),
                "use_orig_params": [True, False],
            },
            self._test_writeback_is_of_the_own_shard,
        )

    def _test_writeback_is_of_the_own_shard(self, writeback, **fsdp_kwargs):
        model = self._two_layers(**fsdp_kwargs)

        def values_of(ranks, numel):
            return ranks * 1000 + torch.arange(numel, device=self.device) + 1 / 3  # not a number of half precision

        with FSDP.summon_full_params(model, writeback=writeback), torch.no_grad():
            before = [param.detach().clone() for param in model.parameters()]
            for param in model.parameters():
                param.copy_(values_of(torch.full_like(param, self.rank), param.numel()).view_as(param)
                            if False else values_of(self.rank, param.numel()).view_as(param))
        with FSDP.summon_full_params(model):
            after = [param.detach().clone() for param in model.parameters()]

        self.assertEqual([param.shape for param in before], [(5, 5), (3, 5)])
        written = [values_of(self._owners(param.numel()), param.numel()).view_as(param) for param in before]
        self.assertEqual(after, written if writeback else before, rtol=0, atol=0)
