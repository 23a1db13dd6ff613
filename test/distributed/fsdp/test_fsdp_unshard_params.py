"""``FSDP.summon_full_params``: what it exposes, what it writes back, when it reshards, and what it rejects."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.fully_sharded_data_parallel import FLAT_PARAM
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    NestedWrappedModule,
    TransformerWithSharedParams,
)
from torch_fsdp_tests.common_fsdp.substitutes import to_host_is_a_copy
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.forward_methods import GenerationMixin
from torch_fsdp_tests.fsdp.references import average_gradients, full_parameters, named, of_all_ranks, room_in
from torch_fsdp_tests.fsdp.shards import owners
from torch_fsdp_tests.installed_torch import torch_facts

# Numbers of elements of the two layers in _two_layers. Neither is a multiple of 2, so both are padded.
INNER, OUTER = 25, 15
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]


def _mixed_precisions() -> list[MixedPrecision | None]:
    return [MixedPrecision(param_dtype=torch.float16), None]


def _cpu_offloads() -> list[CPUOffload]:
    return [CPUOffload(offload_params=False), CPUOffload(offload_params=True)]


@contextlib.contextmanager
def _open(model: nn.Module, **kwargs: Any) -> Iterator[None]:
    """``summon_full_params`` with workarounds for the defect ``fsdp1_offloading_on_the_host_frees_parameters``."""
    with torch.no_grad(), to_host_is_a_copy(), FSDP.summon_full_params(model, **kwargs):
        yield


def _summoned(flat_param: internals.FlatParam, mixed_precision: MixedPrecision | None) -> torch.Tensor:
    """The tensor into which ``summon_full_params`` all-gathers."""
    gathered = internals.unsharded_buffer if mixed_precision is None else internals.full_precision_buffer
    return gathered(flat_param)


def _get_fsdp_grads(model: nn.Module, **kwargs: Any) -> dict[str, Any]:
    """Copies of the unsharded gradients by the names of the plain model. A missing gradient is None."""
    with FSDP.summon_full_params(model, with_grads=True, **kwargs):
        return {name: None if p.grad is None else p.grad.clone() for name, p in named(model).items()}


class TestUnshardParamsBase(FSDPTest):
    """The test bodies for both the sharded and the unsharded case."""

    def _two_layers(self, **fsdp_kwargs: Any) -> FSDP:
        """FSDP around two layers: ``model[0]`` (5 x 5, in FSDP itself) and ``model[1]`` (3 x 5)."""
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 3, bias=False)).to(self.device)
        layers[0] = FSDP(layers[0], **fsdp_kwargs)
        return FSDP(layers, **fsdp_kwargs)

    def _owners(self, numel: int) -> torch.Tensor:
        return owners(numel, self.world_size, self.device)

    def _assert_resharded(self, model: nn.Module, mixed_precision: MixedPrecision | None = None) -> None:
        """No parameter is unsharded, the local shards are in use, and model and handles are idle."""
        handles = internals.handles(model)
        self.assertGreater(len(handles), 0)
        for handle in handles:
            flat_param = handle.flat_param
            if handle.uses_sharded_strategy:
                self.assertFalse(internals.is_unsharded(flat_param))
                self.assertEqual(room_in(_summoned(flat_param, mixed_precision)), 0)
            if mixed_precision is not None:
                self.assertEqual(room_in(internals.low_precision_shard(flat_param)), 0)
            self.assertEqual(flat_param.data_ptr(), internals.local_shard(flat_param).data_ptr())
            self.assertEqual(flat_param.shape, internals.sharded_size(flat_param))
            self.assertIs(internals.training_state(handle), internals.fsdp1_common.HandleTrainingState.IDLE)
        for state in internals.fsdp1_traversal._get_fsdp_states(model):
            self.assertIs(state.training_state, internals.fsdp1_common.TrainingState.IDLE)

    def _assert_no_grads(self, model: nn.Module) -> None:
        grads = _get_fsdp_grads(model)
        self.assertGreater(len(grads), 0)
        self.assertEqual(grads, dict.fromkeys(grads))

    def _get_test_unshard_params_writeback_config(self) -> dict[str, list[Any]]:
        return {
            "writeback": [True, False],
            "check_outer": [True, False],
            "mixed_precision": _mixed_precisions(),
            "cpu_offload": _cpu_offloads(),
            "use_orig_params": [True, False],
        }

    def _test_unshard_params_writeback(self, writeback: bool, check_outer: bool, **fsdp_kwargs: Any) -> None:
        model = self._two_layers(**fsdp_kwargs)
        uses_shards = self.world_size > 1
        offloads = fsdp_kwargs["cpu_offload"].offload_params
        layer = model.module[1] if check_outer else model.module[0].module
        unit = model if check_outer else model.module[0]
        # With ``use_orig_params=True``, model.parameters() begins with the inner one, so each is taken by name.
        local = layer.weight if fsdp_kwargs["use_orig_params"] else internals.flat_param_of(unit)
        ranks = self._owners(OUTER if check_outer else INNER)
        mine = int((ranks == self.rank).sum())  # the rest of the local shard, if any, is padding

        with torch.no_grad():
            local.fill_(self.rank + 2)
        with FSDP.summon_full_params(model, writeback=writeback), torch.no_grad():
            self.assertEqual(layer.weight.flatten(), ranks + 2.0, exact_device=False)
            for param in model.parameters():
                param.zero_()

        # NO_SHARD exposes the parameters themselves, unless they were first copied from pinned memory.
        same_memory = not uses_shards and not offloads
        expected = 0.0 if writeback or same_memory else self.rank + 2.0
        self.assertEqual(local.flatten()[:mine].tolist(), [expected] * mine)
        if offloads:
            devices = [param.device.type for param in model.parameters()]
            self.assertEqual(devices, ["cpu"] * 2)  # the CPU is the subject

    def _get_test_unshard_params_param_data_config(self) -> dict[str, list[Any]]:
        return {
            "rank0_only": [False, True],
            "offload_to_cpu": [False, True],
            "cpu_offload": _cpu_offloads(),
            "mixed_precision": _mixed_precisions(),
            "use_orig_params": [True, False],
        }

    def _test_unshard_params_param_data(
        self,
        rank0_only: bool,
        offload_to_cpu: bool,
        cpu_offload: CPUOffload,
        mixed_precision: MixedPrecision | None,
        use_orig_params: bool,
    ) -> None:
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

        with _open(model, rank0_only=rank0_only, writeback=not rank0_only, offload_to_cpu=offload_to_cpu):
            if self.rank == 0 or not rank0_only:
                found = named(model, wrappers=())
                self.assertEqual(list(found), list(reference))
                host = torch.device("cpu")  # the CPU is the subject
                for name, param in found.items():
                    self.assertIsInstance(param, nn.Parameter)
                    self.assertEqual(param.dtype, torch.float32)
                    self.assertEqual(param.device, host if offload_to_cpu and name not in outside else self.device)
                    self.assertEqual(param, reference[name], rtol=0, atol=0, exact_device=False)
                for handle in internals.handles(model):
                    if handle.uses_sharded_strategy:  # offloaded parameters are freed on the device
                        freed = room_in(_summoned(handle.flat_param, mixed_precision)) == 0
                        stays = self.device == host
                        shows = torch_defect(
                            "fsdp1_offloading_on_the_host_frees_parameters", when=offload_to_cpu and stays
                        )
                        with shows:
                            self.assertEqual(freed, offload_to_cpu and not stays)
            else:
                for handle in internals.handles(model):
                    size = internals.sharded_size if handle.uses_sharded_strategy else internals.unsharded_size
                    self.assertEqual(handle.flat_param.shape, size(handle.flat_param))

        roots = [state for state in internals.fsdp1_traversal._get_fsdp_states(model) if internals.is_root(state)]
        self.assertEqual(len(roots), 2)  # module.1 and module.2; the model itself is not in FSDP
        self._assert_resharded(model, mixed_precision)


class TestUnshardParams(TestUnshardParamsBase):
    @property
    def world_size(self) -> int:
        return 2

    @skip_if_lt_x_gpu(2)
    def test_unshard_params_writeback(self):
        """Changes to parameters persist with ``writeback=True``, and only then."""
        self.run_subtests(self._get_test_unshard_params_writeback_config(), self._test_unshard_params_writeback)

    @skip_if_lt_x_gpu(2)
    def test_unshard_params_param_data(self):
        """The context shows the unsharded parameters in full precision, on every rank or on rank 0 only."""
        self.run_subtests(self._get_test_unshard_params_param_data_config(), self._test_unshard_params_param_data)

    @skip_if_lt_x_gpu(2)
    def test_unshard_singleton_param_writeback(self):
        """With one element on two ranks, the second rank has only padding. Nothing is written back to it.

        This is the current implementation, not a guarantee.
        """
        model = FSDP(nn.Linear(1, 1, bias=False).to(self.device))
        (local,) = internals.flat_params(model)
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
        """A root that is unsharded after forward stays unsharded after the context. Other parameters are resharded."""
        self.run_subtests(
            {
                "rank0_only": [False, True],
                "offload_to_cpu": [False, True],
                "mixed_precision": _mixed_precisions(),
                "use_orig_params": [False, True],
            },
            self._test_unshard_params_respects_reshard,
        )

    def _test_unshard_params_respects_reshard(
        self, rank0_only: bool, offload_to_cpu: bool, mixed_precision: MixedPrecision | None, use_orig_params: bool
    ) -> None:
        model = self._two_layers(mixed_precision=mixed_precision, use_orig_params=use_orig_params)
        flat_params = internals.flat_params(model)
        gathered = 16  # 8 elements on each rank

        def _get_unsharded_storage_size(flat_param: Any) -> int:
            return room_in(internals.unsharded_buffer(flat_param))

        def assert_gathered(expected_outer: int) -> None:
            self.assertEqual([*map(_get_unsharded_storage_size, flat_params)], [expected_outer, 0])

        def open_and_close() -> None:
            with _open(model, rank0_only=rank0_only, writeback=not rank0_only, offload_to_cpu=offload_to_cpu):
                pass

        output = model(torch.zeros(5, device=self.device))
        assert_gathered(gathered)
        output.sum().backward()
        assert_gathered(0)
        output = model(torch.zeros(5, device=self.device))
        open_and_close()
        # The context all-gathered in full precision, so FSDP has freed the low-precision copy from forward.
        assert_gathered(gathered if mixed_precision is None else 0)
        output.sum().backward()
        open_and_close()
        assert_gathered(0)

    @skip_if_lt_x_gpu(2)
    def test_unshard_params_recurse(self):
        """``recurse=False`` unshards only the module it is called on, and no FSDP instance below it."""
        self.run_subtests(
            {
                "recurse": [False, True],
                "unshard_outer": [False, True],
                "mixed_precision": _mixed_precisions(),
                "use_orig_params": [False, True],
            },
            self._test_unshard_params_recurse,
        )

    def _test_unshard_params_recurse(
        self, recurse: bool, unshard_outer: bool, mixed_precision: MixedPrecision | None, use_orig_params: bool
    ) -> None:
        model = self._two_layers(mixed_precision=mixed_precision, use_orig_params=use_orig_params)
        outer, inner = internals.flat_params(model)
        padding = int(use_orig_params)  # then the flat parameter itself is padded to a multiple of the world size
        sharded = 8, 13

        self.assertEqual((outer.numel(), inner.numel()), sharded)
        with FSDP.summon_full_params(model if unshard_outer else model.module[0], recurse=recurse):
            self.assertEqual(outer.numel(), OUTER + padding if unshard_outer else 8)
            self.assertEqual(inner.numel(), INNER + padding if recurse or not unshard_outer else 13)
        self.assertEqual((outer.numel(), inner.numel()), sharded)

    @skip_if_lt_x_gpu(2)
    def test_named_parameters_and_buffers(self):
        """In the context, names match the model without FSDP."""
        self.run_subtests(
            {"prefix": ["", "test_prefix"], "recurse": [False, True]}, self._test_named_parameters_and_buffers
        )

    def _test_named_parameters_and_buffers(self, prefix: str, recurse: bool) -> None:
        reference, inner = (
            NestedWrappedModule.init(
                self.process_group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE, deterministic=True
            )
            for _ in range(2)
        )
        for module in (reference, inner):
            module.module.inside = nn.Buffer(torch.full((1,), 2.0, device=self.device))
        model = FSDP(inner, self.process_group)
        for module in (reference, model):
            module.buffer = nn.Buffer(torch.ones(1, device=self.device))

        with FSDP.summon_full_params(model):
            for method, count in (("named_parameters", 10 if recurse else 0), ("named_buffers", 2 if recurse else 1)):
                expected = list(getattr(reference, method)(prefix=prefix, recurse=recurse))
                found = list(getattr(model, method)(prefix=prefix, recurse=recurse))
                self.assertEqual(len(expected), count)
                self.assertEqual([name for name, _ in found], [name for name, _ in expected], may_be="empty")
                for (_, found_tensor), (_, expected_tensor) in zip(found, expected):
                    self.assertEqual(found_tensor, expected_tensor, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    def test_with_grads_core(self):
        """Unsharded gradients match DDP after backward and before the next one, and can be changed."""
        self.run_subtests(
            {
                "writeback": [False, True],
                "offload_to_cpu": [False, True],
                "sharding_strategy": STRATEGIES,
                "use_orig_params": [True],
            },
            self._test_with_grads_core,
        )

    def _test_with_grads_core(
        self, writeback: bool, offload_to_cpu: bool, sharding_strategy: ShardingStrategy, use_orig_params: bool
    ) -> None:
        is_supported = use_orig_params and not offload_to_cpu
        persists = writeback or (sharding_strategy is ShardingStrategy.NO_SHARD and not offload_to_cpu)

        def _get_error_context(is_supported: bool) -> contextlib.AbstractContextManager[Any]:
            words = (
                f"with_grads=True, use_orig_params={use_orig_params}, offload_to_cpu={offload_to_cpu} is not supported"
            )
            return contextlib.nullcontext() if is_supported else self.assertRaisesRegex(NotImplementedError, words)

        def _check_grads() -> None:
            # Use the summoned parameters: under SHARD_GRAD_OP the others have no gradient between forward and backward,
            # and a comparison of two empty lists would pass.
            before = _get_fsdp_grads(fsdp_model, writeback=False)
            expected = named(ddp_model)
            with FSDP.summon_full_params(
                fsdp_model, writeback=writeback, offload_to_cpu=offload_to_cpu, with_grads=True
            ):
                found = named(fsdp_model)
                self.assertEqual(list(found), list(expected))
                for name, param in found.items():
                    self.assertIsNotNone(expected[name].grad)
                    torch.testing.assert_close(param.grad, expected[name].grad)
                    self.assertGreater(torch.count_nonzero(param.grad), 0)
                    param.grad.mul_(2)
            factor = 2 if persists else 1
            doubled = {name: grad * factor for name, grad in before.items()}
            self.assertEqual(_get_fsdp_grads(fsdp_model, writeback=False), doubled, rtol=0, atol=0)
            for param in expected.values():
                param.grad.mul_(factor)

        fsdp_model, ddp_model = self._transformer_and_ddp(
            sharding_strategy=sharding_strategy, use_orig_params=use_orig_params
        )
        self.assertEqual(full_parameters(fsdp_model), named(ddp_model))
        inputs = fsdp_model.module.get_input(self.device)
        # Inputs are the same on every rank. Weighted losses make the gradients differ.
        losses = [model(*inputs).sum() * (self.rank + 1) for model in (fsdp_model, ddp_model)]
        for loss in losses:
            loss.backward()
        for _ in range(2):  # after backward, and after the next forward but before its backward
            with _get_error_context(is_supported):
                _check_grads()
            for model in (fsdp_model, ddp_model):
                model(*inputs)

    def _transformer_and_ddp(self, **fsdp_kwargs: Any) -> tuple[FSDP, DDP]:
        init = functools.partial(
            TransformerWithSharedParams.init,
            self.process_group,
            device_init_mode=DEVICEInitMode.DEVICE_BEFORE,
            deterministic=True,
        )
        return init(FSDPInitMode.RECURSIVE, fsdp_kwargs=fsdp_kwargs), DDP(init(FSDPInitMode.NO_FSDP))

    @skip_if_lt_x_gpu(2)
    def test_with_grads_none_grads(self):
        """Before any backward, neither sharded nor unsharded parameters have gradients."""
        self.run_subtests({"sharding_strategy": STRATEGIES}, self._test_with_grads_none_grads)

    def _test_with_grads_none_grads(self, sharding_strategy: ShardingStrategy) -> None:
        model, _ = self._transformer_and_ddp(sharding_strategy=sharding_strategy, use_orig_params=True)
        flat_params = internals.flat_params(model)
        self.assertEqual([flat_param.grad for flat_param in flat_params], [None] * 5)  # the root and four layers
        self._assert_no_grads(model)

    @skip_if_lt_x_gpu(2)
    def test_unshard_submodule(self):
        """``summon_full_params`` of a submodule unshards all parameters below it."""
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)).to(self.device) for _ in range(2)))
        model = FSDP(layers, auto_wrap_policy=ModuleWrapPolicy((nn.Sequential,)))
        with FSDP.summon_full_params(model[0]):
            shapes = {name: tuple(param.shape) for name, param in model[0].named_parameters()}
        self.assertNotIn(FLAT_PARAM, " ".join(shapes))
        expected = {
            f"{layer}.{name}": shape for layer in (0, 1) for name, shape in (("weight", (16, 16)), ("bias", (16,)))
        }
        self.assertEqual(shapes, expected)

    @skip_if_lt_x_gpu(2)
    @subtests(
        writeback=[True, False],
        sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP],
        mixed_precision=_mixed_precisions(),
        use_orig_params=[True, False],
    )
    def test_writeback_is_of_the_own_shard(self, writeback, **fsdp_kwargs):
        """Each element keeps exactly the value written by the rank that owns it."""
        model = self._two_layers(**fsdp_kwargs)

        def values_of(ranks: int | torch.Tensor, numel: int) -> torch.Tensor:
            return ranks * 1000 + torch.arange(numel, device=self.device) + 1 / 3  # inexact in half precision

        with FSDP.summon_full_params(model, writeback=writeback), torch.no_grad():
            before = [param.detach().clone() for param in model.parameters()]
            for param in model.parameters():
                param.copy_(values_of(self.rank, param.numel()).view_as(param))
        after = list(full_parameters(model).values())

        self.assertEqual([param.shape for param in before], [(5, 5), (3, 5)])
        written = [values_of(self._owners(param.numel()), param.numel()).view_as(param) for param in before]
        self.assertEqual(after, written if writeback else before, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    @subtests(cpu_offload=_cpu_offloads(), use_orig_params=[True, False], offload_to_cpu=[False, True])
    def test_writeback_of_many_parameters(self, offload_to_cpu, **fsdp_kwargs):
        """All parameters that share a flat parameter are written back, not only one.

        This includes parameters that the context moved to host memory while FSDP keeps them on the device.
        """
        model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)).to(self.device), **fsdp_kwargs)  # an odd number
        self.assertEqual(len(internals.flat_params(model)), 1)
        expected = [
            torch.arange(math.prod(shape), device=self.device).view(shape) + 100.0 * index
            for index, shape in enumerate([(4, 4), (4,), (3, 4), (3,)])
        ]
        with _open(model, offload_to_cpu=offload_to_cpu):
            parameters = list(model.parameters())
            self.assertEqual(len(parameters), 4)
            for param, values in zip(parameters, expected):
                param.copy_(values)
        self.assertEqual(list(full_parameters(model).values()), expected, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    @subtests(
        rank0_only=[False, True],
        fails=[False, True],
        mixed_precision=_mixed_precisions(),
        use_orig_params=[True, False],
    )
    def test_memory_and_state_around_the_context(self, rank0_only, fails, mixed_precision, use_orig_params):
        """The context unshards all parameters and frees them at its end, also after an exception. Training goes on."""
        model = self._two_layers(mixed_precision=mixed_precision, use_orig_params=use_orig_params)
        flat_params = internals.flat_params(model)
        params = {name: id(param) for name, param in model.named_parameters()}
        has_all = self.rank == 0 or not rank0_only
        error = RuntimeError("raised inside the context")
        expects_error = self.assertRaisesRegex(RuntimeError, str(error)) if fails else contextlib.nullcontext()

        with expects_error, FSDP.summon_full_params(model, rank0_only=rank0_only, writeback=not rank0_only):
            sizes = [room_in(_summoned(flat_param, mixed_precision)) for flat_param in flat_params]
            self.assertEqual(sizes, [16, 26] if has_all else [0, 0])
            if mixed_precision is not None:
                self.assertFalse(any(map(internals.is_unsharded, flat_params)))
            if fails:
                raise error

        self._assert_resharded(model, mixed_precision)
        self.assertEqual({name: id(param) for name, param in model.named_parameters()}, params)
        self._assert_trains(model, mixed_precision)

    def _assert_trains(self, model: FSDP, mixed_precision: MixedPrecision | None) -> None:
        """One step of SGD matches two plain layers with averaged gradients. Each rank has its own input."""
        plain = nn.Sequential(nn.Linear(5, 5, bias=False), nn.Linear(5, 3, bias=False)).to(self.device)
        plain.load_state_dict(full_parameters(model))
        inputs = torch.arange(10.0, device=self.device).view(2, 5) / 8 + self.rank
        for each in (plain, model):
            each(inputs).square().sum().backward()
            if each is plain:
                average_gradients(plain)
            torch.optim.SGD(each.parameters(), lr=0.01).step()
        tolerance = 1e-6 if mixed_precision is None else 1e-2
        self.assertEqual(full_parameters(model), named(plain), rtol=tolerance, atol=tolerance)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES)
    def test_with_grads_of_distinct_data(self, sharding_strategy):
        """If tokens differ by rank, gradients match DDP and are bitwise the same on all ranks."""
        model, reference = self._transformer_and_ddp(sharding_strategy=sharding_strategy, use_orig_params=True)
        generator = torch.Generator().manual_seed(100 + self.rank)
        tokens = [torch.randint(23, (length, 2), generator=generator).to(self.device) for length in (6, 4)]
        for each in (model, reference):
            each(*tokens).square().sum().backward()

        grads = _get_fsdp_grads(model)
        expected = {name: param.grad for name, param in named(reference).items()}
        self.assertEqual(list(grads), list(expected))
        self.assertEqual(grads, expected, rtol=1e-4, atol=1e-5)
        for name, grad in grads.items():
            of_rank_0 = grad.clone()
            dist.broadcast(of_rank_0, src=0)
            self.assertTrue(torch.equal(grad, of_rank_0), name)

    def _two_layers_with_grads(self, **fsdp_kwargs: Any) -> tuple[FSDP, list[torch.Tensor]]:
        """The two layers after a backward, and their unsharded gradients."""
        model = self._two_layers(use_orig_params=True, **fsdp_kwargs)
        model(torch.arange(1.0, 6.0, device=self.device) + self.rank).sum().backward()
        grads = list(_get_fsdp_grads(model, writeback=False).values())
        self.assertEqual([grad.shape for grad in grads], [(5, 5), (3, 5)])
        return model, grads

    @skip_if_lt_x_gpu(2)
    @subtests(writeback=[True, False])
    def test_grads_are_written_back_to_the_own_shard(self, writeback):
        """A rank's changes to gradients are written back only where its own shard is."""
        model, grads = self._two_layers_with_grads()
        with FSDP.summon_full_params(model, writeback=writeback, with_grads=True):
            for param in model.parameters():
                param.grad.mul_(self.rank + 2)
        factor = self.rank + 2 if writeback else 1
        mine = [grad.flatten()[self._owners(grad.numel()) == self.rank] * factor for grad in grads]
        self.assertEqual([param.grad for param in model.parameters()], mine, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    def test_grads_of_many_parameters_are_resharded(self):
        """Each parameter in a flat parameter gets its own part of the gradient back."""
        model = FSDP(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)).to(self.device), use_orig_params=True)
        model(torch.arange(5.0, device=self.device) + self.rank).square().sum().backward()
        expected = [grad.flatten().tolist() for grad in _get_fsdp_grads(model).values()]
        self.assertEqual([len(grad) for grad in expected], [25, 5, 15, 3])
        mine = [[] if param.grad is None else param.grad.tolist() for param in model.parameters()]
        self.assertEqual([list(itertools.chain(*parts)) for parts in zip(*of_all_ranks(mine))], expected)

    @skip_if_lt_x_gpu(2)
    def test_grads_on_rank_0_only(self):
        """With ``rank0_only``, other ranks keep their gradient shards during and after the context."""
        model, grads = self._two_layers_with_grads()
        mine = [grad.flatten()[self._owners(grad.numel()) == self.rank] for grad in grads]
        with FSDP.summon_full_params(model, rank0_only=True, writeback=False, with_grads=True):
            inside = [param.grad.clone() for param in model.parameters()]
        self.assertEqual(inside, grads if self.rank == 0 else mine, rtol=0, atol=0)
        self.assertEqual([param.grad for param in model.parameters()], mine, rtol=0, atol=0)
        self.assertEqual([flat_param.grad.numel() for flat_param in internals.flat_params(model)], [8, 13])

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES, mixed_precision=_mixed_precisions())
    def test_open_between_forward_and_backward(self, **fsdp_kwargs):
        """Summoning before backward shows full precision parameters and does not change gradients."""
        model, grads = self._two_layers_with_grads(**fsdp_kwargs)
        model.zero_grad()
        before = list(full_parameters(model).values())
        output = model(torch.arange(1.0, 6.0, device=self.device) + self.rank)
        with FSDP.summon_full_params(model):
            self.assertEqual([param.detach() for param in model.parameters()], before, rtol=0, atol=0)
        output.sum().backward()
        self._assert_resharded(model, fsdp_kwargs["mixed_precision"])
        self.assertEqual(list(_get_fsdp_grads(model).values()), grads, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    @subtests(writeback=[True, False])
    def test_grads_that_only_some_ranks_have(self, writeback):
        """A missing gradient shard counts as zeros if other ranks have one, and stays missing."""
        model, grads = self._two_layers_with_grads()
        if self.rank == 1:
            model.zero_grad(set_to_none=True)
        actual = list(_get_fsdp_grads(model, writeback=writeback).values())
        of_rank_0 = [(self._owners(grad.numel()) == 0).view_as(grad) for grad in grads]
        self.assertEqual(actual, [grad * owned for grad, owned in zip(grads, of_rank_0)], rtol=0, atol=0)
        kept = [param.grad is not None for param in model.parameters()]
        self.assertEqual(kept, [self.rank == 0] * 2)

    def _linear_with_grads(self, dtype: torch.dtype, **fsdp_kwargs: Any) -> FSDP:
        """A layer with three rows after a backward. Each element of its mean gradient is 1.5."""
        layer = nn.Linear(5, 3, bias=False, dtype=dtype, device=self.device)
        model = FSDP(layer, use_orig_params=True, **fsdp_kwargs)
        model(torch.full((5,), self.rank + 1.0, dtype=dtype, device=self.device)).sum().backward()
        return model

    @skip_if_lt_x_gpu(2)
    @subtests(dtype=[torch.float16, torch.bfloat16, torch.float64], sharding_strategy=STRATEGIES)
    def test_grads_of_any_dtype(self, dtype, sharding_strategy):
        """Gradients have the model's dtype while they are summoned, and changes to them are written back."""
        model = self._linear_with_grads(dtype, sharding_strategy=sharding_strategy)
        for factor in (1, 2):
            with FSDP.summon_full_params(model, with_grads=True):
                (weight,) = model.parameters()
                self.assertEqual(weight.grad, torch.full((3, 5), 1.5 * factor, dtype=dtype, device=self.device))
                weight.grad.mul_(2)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES)
    def test_grads_are_gone_after_zero_grad(self, sharding_strategy):
        """A gradient that was cleared between two contexts does not come back."""
        model, _ = self._two_layers_with_grads(sharding_strategy=sharding_strategy)
        model.zero_grad(set_to_none=True)
        self._assert_no_grads(model)
        self.assertEqual([flat_param.grad for flat_param in internals.flat_params(model)], [None] * 2)

    @skip_if_lt_x_gpu(2)
    def test_low_precision_grads(self):
        """``with_grads`` raises for gradients that are kept in low precision, because it assigns them to ``grad``."""
        config = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
        model = FSDP(nn.Linear(4, 3, bias=False, device=self.device), mixed_precision=config, use_orig_params=True)
        inputs = torch.arange(4.0, device=self.device).view(1, 4)
        expected = (inputs * 1.5).expand(3, 4).bfloat16()
        model(inputs * (self.rank + 1)).sum().backward()
        mine = expected.flatten().chunk(self.world_size)[self.rank]
        self.assertEqual(internals.flat_param_of(model).grad, mine, rtol=0, atol=0)
        self.assertRaisesRegex(RuntimeError, "assign a gradient with dtype", _get_fsdp_grads, model)

    @skip_if_lt_x_gpu(2)
    @subtests(keeps_low_precision=[False, True])
    def test_grads_of_another_dtype_on_some_ranks(self, keeps_low_precision):
        """A rank without gradients contributes zeros of the gradients' dtype.

        Nothing is exchanged, because messages of different sizes would abort a rank or hang.
        """
        policy = MixedPrecision(param_dtype=torch.bfloat16, keep_low_precision_grads=True)
        layer = nn.Linear(1, 1, bias=False, device=self.device)
        layer, policy = (layer, policy) if keeps_low_precision else (layer.bfloat16(), None)
        model = FSDP(layer, use_orig_params=True, mixed_precision=policy)
        model(torch.ones(1, 1, device=self.device, dtype=torch.bfloat16)).sum().backward()
        self.assertEqual(model.module.weight.grad is None, self.rank == 1)
        (handle,) = internals.handles(model)
        with FSDP.summon_full_params(model, writeback=False):
            gather = mock.Mock(side_effect=InterruptedError)
            with mock.patch.object(dist, torch_facts.all_gather_name(), gather), self.assertRaises(InterruptedError):
                handle.unshard_grad()
        output, contribution, *_ = gather.call_args.args
        with torch_defect("fsdp1_missing_gradient_is_float32", when=self.rank == 1):
            self.assertEqual([output.dtype, contribution.dtype], [torch.bfloat16] * 2)

    @skip_if_lt_x_gpu(2)
    def test_offloaded_parameters_have_memory(self):
        """Parameters that are moved to the CPU can be read there.

        Their values are compared where :func:`to_host_is_a_copy` makes reading them safe.
        """
        model = self._two_layers(use_orig_params=True)
        with FSDP.summon_full_params(model, offload_to_cpu=True, writeback=False):
            actual = [param.untyped_storage().nbytes() >= param.nbytes for param in model.parameters()]
        with torch_defect("fsdp1_offloading_on_the_host_frees_parameters"):
            self.assertEqual(actual, [True] * 2)


class TestGeneration(GenerationMixin, FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[True, False])
    def test_generation_between_steps(self, use_orig_params):
        """Each training step trains on what was just generated inside ``summon_full_params`` of the root."""

        def generate(model: FSDP, tokens: torch.Tensor) -> torch.Tensor:
            with FSDP.summon_full_params(model, writeback=False, recurse=False):
                return model.generate(tokens)

        policy = ModuleWrapPolicy({nn.Linear})
        wrap = functools.partial(FSDP, auto_wrap_policy=policy, use_orig_params=use_orig_params)
        self._check_generation(wrap, generate)


class TestUnshardParamsSubgroups(TestUnshardParamsBase):
    """FSDP over the pairs (0, 2) and (1, 3), so that global ranks and the default group would be wrong."""

    world_size = 4

    def _pair(self) -> tuple[dist.ProcessGroup, int]:
        """This rank's group, and the index of its pair."""
        groups = [dist.new_group([first, first + 2]) for first in (0, 1)]
        return groups[self.rank % 2], self.rank % 2

    @skip_if_lt_x_gpu(4)
    @subtests(use_orig_params=[True, False])
    def test_unshard_within_the_group(self, use_orig_params):
        """Parameters and gradients are all-gathered over the instance's own process group."""
        group, pair = self._pair()
        layer = nn.Linear(5, 3, bias=False, device=self.device)
        with torch.no_grad():
            layer.weight.copy_((torch.arange(15) + 100 * pair).view(3, 5))
        expected = layer.weight.detach().clone()
        model = FSDP(layer, group, use_orig_params=use_orig_params)
        if use_orig_params:
            self._assert_no_grads(model)
        model(torch.full((5,), self.rank + 1.0, device=self.device)).sum().backward()

        with FSDP.summon_full_params(model, with_grads=use_orig_params):
            (weight,) = model.parameters()
            self.assertEqual(weight.detach(), expected, rtol=0, atol=0)
            if use_orig_params:
                self.assertEqual(weight.grad, torch.full_like(expected, pair + 2.0))  # the mean of rank + 1
            with torch.no_grad():
                weight.fill_(self.rank)
        with FSDP.summon_full_params(model):
            (weight,) = model.parameters()
            ranks = pair + 2 * owners(OUTER, 2, self.device)
            self.assertEqual(weight.detach().flatten(), ranks.float(), rtol=0, atol=0)

    @skip_if_lt_x_gpu(4)
    def test_rank0_only_within_the_group(self):
        """``rank0_only`` means the first rank of each group.

        The docstring of ``summon_full_params`` says "global rank 0", but the code checks the rank within the group.
        """
        group, pair = self._pair()
        model = FSDP(nn.Linear(5, 3, bias=False, device=self.device), group)
        with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
            numels = [param.numel() for param in model.parameters()]
        self.assertEqual(numels, [OUTER if self.rank == pair else 8])


class TestUnshardParamsNoShard(TestUnshardParamsBase):
    world_size = 1  # FSDP shards nothing here

    @skip_if_lt_x_gpu(1)
    def test_unshard_params_writeback_no_shard(self):
        """Without shards, changes persist even with ``writeback=False``, except changes to a copy."""
        self.run_subtests(self._get_test_unshard_params_writeback_config(), self._test_unshard_params_writeback)

    @skip_if_lt_x_gpu(1)
    def test_unshard_params_param_data_no_shard(self):
        """Like :meth:`TestUnshardParams.test_unshard_params_param_data`. NO_SHARD rejects ``offload_to_cpu``."""
        config = self._get_test_unshard_params_param_data_config()
        self.run_subtests({**config, "offload_to_cpu": [False]}, self._test_unshard_params_param_data)


class TestUnshardParamsErrors(TestUnshardParamsBase):
    world_size = 2

    def _assert_rejected_in_training(self) -> AbstractContextManager[Any]:
        return self.assertRaisesRegex(AssertionError, "Cannot manually unshard parameters during forward/backward")

    def _assert_still_opens(self, model: nn.Module) -> None:
        """The rejected call leaked nothing."""
        with FSDP.summon_full_params(model):
            self.assertGreater(len(list(model.parameters())), 1)
        self._assert_resharded(model)

    def _nested(self, **fsdp_kwargs: Any) -> NestedWrappedModule:
        return NestedWrappedModule.init(
            self.process_group, FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_BEFORE, fsdp_kwargs
        )

    @skip_if_lt_x_gpu(2)
    def test_unshard_params_from_forward_raises(self):
        """A forward may not summon the parameters of its own module."""

        class MyModule(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.param = nn.Parameter(torch.zeros(5))

            def forward(self, fsdp_module: nn.Module) -> None:
                with FSDP.summon_full_params(fsdp_module):
                    pass

        model = FSDP(MyModule().to(self.device))
        with self._assert_rejected_in_training():
            model(model)

    @skip_if_lt_x_gpu(2)
    def test_unshard_params_from_backward_raises(self):
        """A hook that runs during backward may not summon parameters either."""
        model = FSDP(nn.Linear(2, 1).to(self.device))
        output = model(torch.ones(2, device=self.device))
        called = []

        def invalid_backward_hook(grad: torch.Tensor) -> None:
            called.append(grad)
            with FSDP.summon_full_params(model):
                pass

        self.assertTrue(output.requires_grad)
        output.register_hook(invalid_backward_hook)
        with self._assert_rejected_in_training():
            output.backward()
        self.assertEqual(len(called), 1)

    @skip_if_lt_x_gpu(2)
    def test_rank0_only_with_writeback_raises(self):
        """With ``rank0_only``, only rank 0 sees the parameters, so writeback on all ranks is rejected."""
        model = self._nested()
        with self.assertRaisesRegex(NotImplementedError, "writeback=True and rank0_only=True is not supported"):
            with FSDP.summon_full_params(model, rank0_only=True, writeback=True):
                pass
        self._assert_still_opens(model)

    @skip_if_lt_x_gpu(2)
    def test_offload_to_cpu_no_shard_raises(self):
        """NO_SHARD rejects ``offload_to_cpu``. It also rejects ``writeback`` with ``rank0_only``."""
        model = self._nested(sharding_strategy=ShardingStrategy.NO_SHARD)
        for kwargs, words in (
            ({"offload_to_cpu": True}, "offload_to_cpu=True and NO_SHARD is not supported"),
            ({"rank0_only": True, "writeback": True}, "writeback=True and rank0_only=True is not supported"),
        ):
            with self.assertRaisesRegex(NotImplementedError, words):
                with FSDP.summon_full_params(model, **kwargs):
                    pass
            self._assert_still_opens(model)

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[True, False])
    def test_nested_contexts_raise(self, use_orig_params):
        """Parameters that are summoned cannot be summoned again. The outer context stays valid."""
        model = self._two_layers(use_orig_params=use_orig_params)
        with FSDP.summon_full_params(model), torch.no_grad():
            with self.assertRaisesRegex(AssertionError, "already unsharding parameters"):
                with FSDP.summon_full_params(model):
                    pass
            for param in model.parameters():
                param.fill_(7)
        self._assert_resharded(model)
        with FSDP.summon_full_params(model):
            self.assertEqual([param.unique().tolist() for param in model.parameters()], [[7.0], [7.0]])

    @skip_if_lt_x_gpu(2)
    def test_with_grads_needs_orig_params(self):
        """``with_grads`` needs ``use_orig_params=True``, with any strategy."""
        for sharding_strategy in STRATEGIES:
            model = self._two_layers(sharding_strategy=sharding_strategy, use_orig_params=False)
            with self.assertRaisesRegex(NotImplementedError, "with_grads=True, use_orig_params=False"):
                with FSDP.summon_full_params(model, with_grads=True):
                    pass
            self._assert_still_opens(model)


if __name__ == "__main__":
    run_tests()
