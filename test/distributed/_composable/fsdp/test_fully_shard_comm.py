"""The communication of FSDP2: what is all-gathered and reduced, how often, by which operation and in which order.

The tests cover the collectives alone, their number in a step, divide factors and reduce operations, prefetching,
explicit unshards, and the setters that replace a collective, its buffers or its process group.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.experimental import implicit_replication

from torch_fsdp_tests.common_distributed import (
    at_most,
    needs,
    requires,
    requires_capability,
    skip_if_lt_x_gpu,
    sm_is_or_higher_than,
)
from torch_fsdp_tests.common_fsdp import (
    MLP,
    DoubleLinear,
    FSDPTest,
    FSDPTestContinuous,
    FSDPTestMultiThread,
    check_sharded_parity,
    patch_post_backward,
    patch_reshard,
    patch_unshard,
)
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import NO_DEFECT, torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import FeedForward, ModelArgs, Transformer, TransformerBlock
from torch_fsdp_tests.fsdp import collectives, internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.optimizers import ShardAdamW
from torch_fsdp_tests.fsdp.references import average_gradients, copy_values, move_gradients
from torch_fsdp_tests.fsdp.seeded import filled, normal
from torch_fsdp_tests.fsdp.training import (
    Loop,
    TrainingMixin,
    check_gradients,
    check_parity,
    loss_of,
    optimizers,
    shard_each,
    take_step,
    tiny_transformer,
    train,
)
from torch_fsdp_tests.installed_torch import torch_facts, torch_names

ALL_GATHER, REDUCE_SCATTER = "c10d._allgather_base_", "c10d._reduce_scatter_base_"
AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM

fsdp_api = torch_names.module("torch.distributed.fsdp._fully_shard._fsdp_api")
fsdp_collectives = internals.fsdp2_collectives

Reshard = bool | int | None


def shard_blocks(model: Transformer, **kwargs: Any) -> Any:
    return shard_each([*model.layers, model], **kwargs)


def transformer(device: torch.device, **changes: Any) -> Transformer:
    """A model with the same weights on every rank."""
    manual_seed(42)
    return tiny_transformer(**{"n_layers": 2, "weight_tying": False} | changes).to(device)


def tokens(rank: int, step: int, device: torch.device) -> torch.Tensor:
    """(2, 16) tokens, different for each rank and step."""
    args, generator = ModelArgs(), torch.Generator().manual_seed(seed_of(rank, step))
    return torch.randint(args.vocab_size, (2, args.max_seq_len), generator=generator).to(device)


def rows(rank: int, step: int, *shape: int) -> torch.Tensor:
    """Numbers that are different for each rank and step."""
    return normal(*shape, seed=seed_of(rank, step))


def seed_of(rank: int, step: int) -> int:
    return 100 * step + rank + 1


def local_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    grads = {}
    for name, param in model.named_parameters():
        assert isinstance(param.grad, DTensor), name
        grads[name] = param.grad.to_local().clone()
    return grads


def check_identical(
    test: Any, found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], where: str = ""
) -> None:
    test.assertEqual(list(found), list(expected))
    for name, tensor in found.items():
        test.assertTrue(torch.equal(tensor, expected[name]), f"{name} {where}")


class HalfUsed(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.unused_lin = nn.Linear(1, 1)
        self.lin = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.lin(x))


class Branch(nn.Module):
    """Returns relu(x @ weight), its sum over the ranks (a constant to autograd), and the sum's pending work."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dist.Work]:
        y = F.relu(x @ self.weight)
        total = y.detach().clone()
        return y, total, dist.all_reduce(total, async_op=True)


class MLPs(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlps = nn.ModuleList(MLP(dim) for _ in range(3))

    def forward(self, launched: list[tuple[torch.Tensor, torch.Tensor, dist.Work]]) -> list[torch.Tensor]:
        outputs = []
        for mlp, (y, total, work) in zip(self.mlps, launched):
            work.wait()
            outputs.append(mlp(y + total))
        return outputs


class BranchedModel(nn.Module):
    """Three branches, each followed by an MLP. If the MLP is an ``FSDPModule``, its unshard overlaps the branch's
    all-reduce.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(Branch(dim) for _ in range(3))
        self.mlps = MLPs(dim)
        self.pending: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        launched = []
        for branch, mlp in zip(self.branches, self.mlps.mlps):
            launched.append(branch(x))
            if isinstance(mlp, FSDPModule):
                mlp.unshard(async_op=True)
                result = internals.pending_gather(internals.group_of(mlp))
                self.pending.append(result is not None and result.all_gather_work is not None)
        return loss_of(torch.stack(self.mlps(launched)))


class TestFullyShardCollectiveOps(TrainingMixin, FSDPTestMultiThread):
    """FSDP's all-gather and reduction as functions, without a module's hooks around them."""

    world_size = 16  # enough for uneven shards, empty shards and a smaller mesh of 8. Upstream has 128 threads.

    def _get_param_sizes(self) -> list[tuple[int, ...]]:
        return [(17, 257), (17,), (64, 312), (64,), (64, 64), (512, 64), (256,), (64, 297)]

    def _init_params(self, sizes: Sequence[tuple[int, ...]]) -> list[nn.Parameter]:
        """Make parameters that are the same on every rank, although threads share one random generator."""
        params = [nn.Parameter(torch.empty(size, device=self.device)) for size in sizes]
        filled(nn.ParameterList(params))
        return params

    def _init_fsdp_param_group(
        self, params: list[nn.Parameter], reshard_after_forward: bool | int, shard_dim: int = 0
    ) -> internals.Group:
        clones = nn.ParameterList(nn.Parameter(p.detach().clone(), p.requires_grad) for p in params)
        mesh_info = internals.fsdp2_common.FSDPMeshInfo(self._mesh(self.world_size), shard_mesh_dim=0)
        group = internals.fsdp2_param_group.FSDPParamGroup(
            list(clones),
            (clones,),
            mesh_info,
            internals.fsdp2_init._get_post_forward_mesh_info(reshard_after_forward, mesh_info),
            self.device,
            (lambda param: Shard(shard_dim)) if shard_dim else None,
            MixedPrecisionPolicy(),
            OffloadPolicy(),
        )
        group.lazy_init()
        return group

    def _streams(self, new: bool, count: int) -> list[Any]:
        module = torch.get_device_module(self.device.type)
        return [module.Stream() if new else module.current_stream() for _ in range(count)]

    def _check_sharded(self, group: internals.Group, originals: list[nn.Parameter], even_only: bool = False) -> None:
        registered = list(group.modules[0].parameters())
        self.assertEqual(len(registered), len(originals))
        for param, original in zip(registered, originals):
            self.assertIsInstance(param, DTensor)
            if not even_only or param.size(0) % self.world_size == 0:
                self.assertEqual(param.full_tensor(), original, rtol=0, atol=0)

    def _gather(self, group: internals.Group, over: dist.ProcessGroup, streams: list[Any], async_op: bool) -> None:
        current = torch.get_device_module(self.device.type).current_stream()
        for stream in streams:  # the shards were made on the current stream
            stream.wait_stream(current)
        result = fsdp_collectives.foreach_all_gather(
            fsdp_params=group.fsdp_params,
            group=over,
            async_op=async_op,
            all_gather_copy_in_stream=streams[0],
            all_gather_stream=streams[1],
            device=self.device,
            all_gather_comm=fsdp_collectives.DefaultAllGather(),
        )
        self.assertEqual(result.all_gather_work is not None, async_op)
        fsdp_collectives.foreach_all_gather_copy_out(result, group.fsdp_params, over)
        for fsdp_param in group.fsdp_params:
            fsdp_param.init_unsharded_param()
        group._to_unsharded()

    def _check_unsharded(self, group: internals.Group, originals: list[nn.Parameter]) -> None:
        for param, original in zip(group.modules[0].parameters(), originals):
            self.assertIsInstance(param, nn.Parameter)
            self.assertNotIsInstance(param, DTensor)
            self.assertEqual(param.dtype, original.dtype)
            self.assertEqual(param, original, rtol=0, atol=0)

    @skip_if_lt_x_gpu(1)
    def test_all_gather_fp32(self):
        """Parameters all-gathered from the shards, or from the post-forward shards, equal the unsharded parameters."""
        cases = [(False, False, True), (False, True, True), (False, True, 8), (True, False, True), (True, True, True)]
        originals = self._init_params(self._get_param_sizes())
        for async_op, new_streams, reshard_after_forward in cases:
            with self.subTest(async_op=async_op, new_streams=new_streams, reshard_after_forward=reshard_after_forward):
                self._test_all_gather(originals, reshard_after_forward, async_op, self._streams(new_streams, 2))

    def _test_all_gather(
        self,
        originals: list[nn.Parameter],
        reshard_after_forward: bool | int,
        async_op: bool,
        streams: list[Any],
        shard_dim: int = 0,
    ) -> None:
        group = self._init_fsdp_param_group(originals, reshard_after_forward, shard_dim)
        self._check_sharded(group, originals)
        self._gather(group, group.mesh_info.shard_process_group, streams, async_op)
        self._check_unsharded(group, originals)
        if reshard_after_forward is not True:
            group._to_sharded_post_forward()
            smaller = group.post_forward_mesh_info.shard_process_group
            self.assertEqual(smaller.size(), reshard_after_forward)
            self._check_sharded(group, originals, even_only=True)  # see test_uneven_shards_after_forward
            self._gather(group, smaller, streams, async_op)
            self._check_unsharded(group, originals)

    @skip_if_lt_x_gpu(1)
    def test_all_gather_mixed_dtypes(self):
        """Parameters of several dtypes are all-gathered together as bytes, and keep dtype and value."""
        originals = self._init_params([(17, 3), (5,), (64, 2), (33,)])
        for index, dtype in ((1, torch.bfloat16), (3, torch.float64)):
            originals[index] = nn.Parameter(originals[index].detach().to(dtype), requires_grad=False)
        self._test_all_gather(originals, True, False, self._streams(False, 2))

    @skip_if_lt_x_gpu(1)
    def test_all_gather_shard_dim_1(self):
        """Shards along a dimension other than the first are all-gathered in the right order."""
        self._test_all_gather(self._init_params([(3, 32), (5, 16, 2)]), True, False, self._streams(False, 2), 1)

    @skip_if_lt_x_gpu(1)
    @subtests(new_stream=[False, True])
    def test_reduce_scatter_fp32(self, new_stream):
        self._test_reduce_scatters(new_stream, torch.float32, factors=(None, None, AVG, AVG))

    @skip_if_lt_x_gpu(1)
    @subtests(new_stream=[False, True])
    def test_reduce_scatter_fp16(self, new_stream):
        """Gradients are divided by the square root of the world size before and after the sum, so no sum overflows."""
        self._test_reduce_scatters(new_stream, torch.float16, factors=(4, 4, SUM, SUM))

    @skip_if_lt_x_gpu(1)
    @subtests(factor_before=[(1, 1), (2, 2), (6, 4), (9, 2), (16, 4), (24, 8)])
    def test_divide_factors_of_fp16(self, factor_before):
        """Before the sum, gradients are divided by a power of two.

        It doubles from 1 while it divides the factor and is below the factor's square root.
        """
        factor, before = factor_before
        actual = fsdp_collectives._get_gradient_divide_factors(
            dist.group.WORLD, None, torch.float16, device_type=self.device.type, factor=factor
        )
        self.assertEqual(actual, (before, factor / before, SUM, SUM))

    def _test_reduce_scatters(self, new_stream: bool, reduce_dtype: torch.dtype, factors: tuple[Any, ...]) -> None:
        group = self._test_reduce_scatter(self._get_param_sizes(), new_stream, reduce_dtype)
        shard_group = group.mesh_info.shard_process_group
        actual = fsdp_collectives._get_gradient_divide_factors(
            shard_group, None, reduce_dtype, device_type=self.device.type, factor=None
        )
        self.assertEqual(actual, factors)

    @skip_if_lt_x_gpu(1)
    def test_reduce_scatter_shard_dim_1(self):
        """Gradients are sharded along a dimension other than the first."""
        self._test_reduce_scatter([(3, 32), (5, 16, 2)], False, torch.float32, shard_dim=1)

    def _test_reduce_scatter(
        self, sizes: list[tuple[int, ...]], new_stream: bool, reduce_dtype: torch.dtype, shard_dim: int = 0
    ) -> internals.Group:
        """Every rank gets its shard of the mean.

        An element of a gradient is (rank mod 8 + its index mod 61) * 128. Each sum is exact in float16 in any order.
        The undivided sum of 16 ranks would overflow in float16. A misplaced element changes the result.
        """
        params = self._init_params(sizes)
        group = self._init_fsdp_param_group(params, True, shard_dim)
        group.comm_ctx.lazy_init(self.device)
        group.unshard()
        group.wait_for_unshard()  # FSDP gets the shapes here
        group.reshard()
        places = [(torch.arange(p.numel(), device=self.device) % 61).view_as(p) for p in params]
        grads = [(self.rank % 8 + place).float() * 128 for place in places]
        (stream,) = self._streams(new_stream, 1)
        buffer, *_ = fsdp_collectives.foreach_reduce(
            fsdp_params=group.fsdp_params,
            unsharded_grads=grads,
            reduce_scatter_group=group.mesh_info.shard_process_group,
            reduce_scatter_stream=stream,
            reduce_scatter_comm=fsdp_collectives.DefaultReduceScatter(),
            reduce_dtype=reduce_dtype,
            device=self.device,
            gradient_divide_factor=None,
            all_reduce_group=None,
            all_reduce_stream=stream,
            all_reduce_grads=True,
            partial_reduce_output=None,
            all_reduce_hook=None,
            **({"orig_dtype": params[0].dtype} if not torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE else {}),
        )
        torch.get_device_module(self.device.type).current_stream().wait_stream(stream)
        self.assertEqual((grads, buffer.dtype), ([], reduce_dtype))
        for fsdp_param, place in zip(group.fsdp_params, places):
            grad = fsdp_param.sharded_param.grad
            self.assertIsInstance(grad, DTensor)
            self.assertEqual(grad.full_tensor(), (3.5 + place) * 128, rtol=0, atol=0)
        return group


class TestFullyShardCommunication(TrainingMixin, FSDPTestContinuous):
    """The number of collectives in a step, and the divide factors of gradients."""

    world_size = at_most(4)
    power_of_two_ranks = True

    def _count(self, function: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
        """Return the function's result, and the number of collectives of each kind that it issues."""
        with CommDebugMode() as communication:
            result = function()
        return result, {str(operation): count for operation, count in communication.get_comm_counts().items()}

    def _check_counts(self, model: nn.Module, forward: int, backward: int) -> None:
        """Run two steps. Each must issue this many all-gathers, and one reduce-scatter for every FSDP module."""
        for step in range(2):
            output, counts = self._count(functools.partial(model, tokens(self.rank, step, self.device)))
            self.assertEqual(counts, {ALL_GATHER: forward})
            _, counts = self._count(output.sum().backward)
            expected = {ALL_GATHER: backward} if backward else {}
            self.assertEqual(counts, expected | {REDUCE_SCATTER: len(internals.fsdp_modules(model))})

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False, 2, None])
    def test_fully_shard_communication_count(self, reshard_after_forward):
        model = transformer(self.device, weight_tying=True)
        blocks = len(model.layers)
        shard_blocks(model, reshard_after_forward=reshard_after_forward)
        backward = {None: blocks, False: 0}.get(reshard_after_forward, blocks + 1)
        self._check_counts(model, blocks + 1, backward)

    @skip_if_lt_x_gpu(2)
    def test_manual_reshard_with_reshard_after_forward_false(self):
        """A module that the user reshards between forward and backward is unsharded again in backward."""
        model = shard_blocks(transformer(self.device, weight_tying=True), reshard_after_forward=False)
        modules = internals.fsdp_modules(model)
        output, counts = self._count(functools.partial(model, tokens(self.rank, 0, self.device)))
        self.assertEqual(counts, {ALL_GATHER: len(modules)})
        for module in modules:
            module.reshard()
        _, counts = self._count(output.sum().backward)
        self.assertEqual(counts, {ALL_GATHER: len(modules), REDUCE_SCATTER: len(modules)})

    @skip_if_lt_x_gpu(2)
    def test_set_reshard_after_forward(self):
        config = {"set_reshard_after_forward": [True, False, None], "recurse": [True, False]}
        self.run_subtests(config, self._test_set_reshard_after_forward_by_communication_count)
        # By default the root does not reshard after forward. With the setter it does.
        model = shard_blocks(transformer(self.device))
        model.set_reshard_after_forward(True, recurse=False)
        self._check_counts(model, len(model.layers) + 1, len(model.layers) + 1)

    def _test_set_reshard_after_forward_by_communication_count(
        self, set_reshard_after_forward: bool | None, recurse: bool
    ) -> None:
        """The setter overrides the constructor's argument, for the root only or for all modules."""
        value = set_reshard_after_forward
        model = transformer(self.device, weight_tying=True)
        blocks = len(model.layers)
        shard_blocks(model, reshard_after_forward=None if value is None else not value)
        if value is not None:
            model.set_reshard_after_forward(value, recurse=recurse)
        backward: dict[Any, int] = {
            (True, True): blocks + 1,
            (True, False): 1,  # only the root
            (False, True): 0,
            (False, False): blocks,
        }
        self._check_counts(model, blocks + 1, backward.get((value, recurse), blocks))

    @skip_if_lt_x_gpu(2)
    def test_communication_count_after_evaluation(self):
        """A forward under ``no_grad`` adds no all-gather to the backward of the next step."""
        model = nn.Sequential(*(nn.Linear(4, 4, device=self.device) for _ in range(2)))
        shard_each([*model, model])
        inputs = rows(self.rank, 0, 2, 4)
        for evaluate in (False, True):
            if evaluate:
                with torch.no_grad():
                    model(inputs)
            _, counts = self._count(model(inputs).sum().backward)
            self.assertEqual(counts[REDUCE_SCATTER], 2)
            with torch_defect("fsdp2_extra_all_gather_after_evaluation", when=evaluate):
                self.assertEqual(counts, {ALL_GATHER: 2, REDUCE_SCATTER: 2})

    def _force_sum_if_needed(self, model: nn.Module, shape: tuple[int, ...], divide_factor: float) -> None:
        """Force a sum, after which FSDP divides, if the backend lacks PREMUL_SUM.

        FSDP uses PREMUL_SUM unless the factor equals the number of shards. With one shard there is no reduce-scatter,
        and a forced sum would divide twice (``test_hsdp_of_one_shard_force_sum``).
        """
        averages = divide_factor == (shape[-1] if torch_facts.AVERAGES_OVER_SHARDS else self.world_size)
        copies = shape[-1] == 1 and torch_facts.SKIPS_REDUCTION_OVER_ONE_RANK
        if not averages and not copies and accelerator.current().lacks("premul_sum"):
            for module in internals.fsdp_modules(model):
                module.set_force_sum_reduction_for_comms(True)

    @skip_if_lt_x_gpu(2)
    def test_set_reduce_scatter_divide_factor(self):
        size = self.world_size
        shapes = [(size,), (size // 2, 2), (size, 1)]
        cases = [(factor, shape) for factor in (2 * size, size) for shape in shapes]
        cases.append((2, (size // 2, 2)))  # the factor is the number of shards, so the reduce-scatter averages
        self.run_subtests({"case": cases}, lambda case: self._test_set_reduce_scatter_divide_factor(*case))
        self._test_set_reduce_scatter_divide_factor_mixed_precision(size)

    def _test_set_reduce_scatter_divide_factor(self, divide_factor: float, shape: tuple[int, ...]) -> None:
        """The root's own gradients are divided by the factor. Those of the blocks are divided by the world size."""
        ref_model = transformer(self.device, n_layers=1)
        model = shard_blocks(copy.deepcopy(ref_model), mesh=self._mesh(*shape), reshard_after_forward=False)
        model.set_gradient_divide_factor(divide_factor)
        self._force_sum_if_needed(model, shape, divide_factor)

        def average(ref_model: nn.Module) -> None:
            average_gradients(ref_model)
            for name, param in ref_model.named_parameters():
                if not name.startswith("layers."):
                    param.grad.mul_(self.world_size / divide_factor)

        optims = optimizers(ref_model, model, cls=ShardAdamW)
        loop = Loop(average=average, iterations=6)  # upstream has 10, for fewer cases
        self._check_training(ref_model, model, lambda: self._tokens(2, 16), loop, optims)

    def _test_set_reduce_scatter_divide_factor_mixed_precision(self, divide_factor: float) -> None:
        """Compute in bfloat16 and reduce in float32. The test calls the setter by its old name, which still works."""
        manual_seed(42)
        ref_model = nn.Sequential(*(MLP(16) for _ in range(3))).to(self.device)
        computing = copy.deepcopy(ref_model).to(torch.bfloat16)
        model: Any = copy.deepcopy(ref_model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        shard_each([*model, model], mp_policy=policy, reshard_after_forward=False)
        for mlp in model:
            with self.assertWarnsRegex(DeprecationWarning, "set_gradient_divide_factor"):
                mlp.set_reduce_scatter_divide_factor(divide_factor)
        optims = optimizers(ref_model, model, cls=ShardAdamW)
        for step in range(10):
            inputs = rows(self.rank, step, 4, 16)
            ref_loss, loss = loss_of(computing(inputs.to(torch.bfloat16))), loss_of(model(inputs))
            self.assertEqual(loss, ref_loss)
            ref_loss.backward()
            loss.backward()
            move_gradients(computing, ref_model)
            average_gradients(ref_model)
            check_gradients(self, ref_model, model)
            take_step(optims)
            copy_values(ref_model, computing)
        check_sharded_parity(self, ref_model, model)

    @needs(torch_facts.LIMITS_REDUCE_SCATTER_INPUT_BUFFERS)
    @skip_if_lt_x_gpu(2)
    @subtests(is_hsdp=[False, True], reshard_after_forward=[True, False])
    def test_set_reduce_scatter_max_input_buffers(self, is_hsdp, reshard_after_forward):
        """The cap changes no value bitwise, and all input buffers are freed after backward.

        test_fully_shard_memory checks how many buffers are kept during backward.
        """
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        mesh = self._mesh(*((self.world_size // 2, 2) if is_hsdp else (self.world_size,)))
        kwargs = {"mesh": mesh, "reshard_after_forward": reshard_after_forward, "mp_policy": policy}
        expected = self._train_three_steps(shard_blocks(transformer(self.device), **kwargs))
        for max_input_buffers in (1, 2):
            model = shard_blocks(transformer(self.device), **kwargs)
            model.set_reduce_scatter_max_input_buffers(max_input_buffers)
            for step, (found, values) in enumerate(zip(self._train_three_steps(model), expected, strict=True)):
                check_identical(self, found, values, f"{max_input_buffers=}, {step=}")
            self.assertEqual(internals.group_of(model).reduce_scatter_max_input_buffers, max_input_buffers)

    def _train_three_steps(self, model: Any) -> list[dict[str, torch.Tensor]]:
        """Return the loss, the gradients and the new parameters of each step."""
        optims, values = optimizers(model, cls=ShardAdamW), []
        for step in range(3):
            loss = model(tokens(self.rank, step, self.device)).sum()
            loss.backward()
            self.assertEqual(internals.comm_context(model).reduce_scatter_states, [], may_be="empty")
            grads = {f"gradient of {name}": grad for name, grad in local_grads(model).items()}
            take_step(optims)
            params = {name: param.to_local().clone() for name, param in model.named_parameters()}
            values.append({"loss": loss.detach(), **grads, **params})
        return values

    @needs(torch_facts.LIMITS_REDUCE_SCATTER_INPUT_BUFFERS)
    @skip_if_lt_x_gpu(2)
    def test_reduce_scatter_max_input_buffers_resolves_to_max(self):
        """All groups share one list of buffers, limited by the largest cap. Each group still keeps its own cap."""
        model = shard_blocks(transformer(self.device))
        model.layers[0].set_reduce_scatter_max_input_buffers(3, recurse=False)
        model(tokens(self.rank, 0, self.device)).sum().backward()
        groups = [internals.group_of(layer) for layer in model.layers]
        self.assertEqual([group.reduce_scatter_max_input_buffers for group in groups], [3, 1])
        for group in groups:
            self.assertEqual(group.comm_ctx.reduce_scatter_max_input_buffers, 3)

    @needs(torch_facts.LIMITS_REDUCE_SCATTER_INPUT_BUFFERS)
    @skip_if_lt_x_gpu(2)
    def test_set_reduce_scatter_max_input_buffers_validation(self):
        model: Any = fully_shard(nn.Linear(16, 16, device=self.device))
        for value, error in ((0, ValueError), (-1, ValueError), (2.5, TypeError), (True, TypeError)):
            with self.assertRaisesRegex(error, "max_input_buffers must be"):
                model.set_reduce_scatter_max_input_buffers(value)
            self.assertEqual(internals.group_of(model).reduce_scatter_max_input_buffers, 1)
        model.set_reduce_scatter_max_input_buffers(2)
        self.assertEqual(internals.group_of(model).reduce_scatter_max_input_buffers, 2)


class Events(NamedTuple):
    """The events of some kinds in forward and in backward, as :class:`TestFullyShardPrefetch` writes them."""

    forward: str
    backward: str
    kinds: str = "UP"


class TestFullyShardPrefetch(TrainingMixin, FSDPTest):
    """The order in which parameter groups are unsharded, resharded and reduced, and the gradients of each step.

    An event has a letter for what happens (U: the group is unsharded, R: it is resharded, P: its backward is over), a
    letter for the group's state (f: in forward, b: before its backward, none: after it), and the group. The group is
    "root", the number of a transformer's block, or a module's name; several modules of one group are joined by "+".
    """

    world_size = at_most(4)
    power_of_two_ranks = True

    def _note(self, events: list[str], kind: str, group: internals.Group) -> None:
        stages = internals.fsdp2_common.TrainingState
        states = {stages.FORWARD: "f", stages.PRE_BACKWARD: "b", stages.POST_BACKWARD: ""}
        name = internals.clean_name(group._module_fqn or "root").replace("layers.", "")
        events.append(f"{kind}{states.get(internals.training_state(group), '?')} {name.replace(', ', '+')}")

    @contextlib.contextmanager
    def _recorded(self, kinds: str) -> Iterator[list[str]]:
        events: list[str] = []
        owner = internals.fsdp2_param_group.FSDPParamGroup
        original = {"U": owner.unshard, "R": owner.reshard, "P": owner.post_backward}

        def unshard(group: internals.Group, *args: Any, **kwargs: Any) -> None:
            if internals.pending_gather(group) is None and not group.is_unsharded:
                self._note(events, "U", group)
            original["U"](group, *args, **kwargs)

        def reshard(group: internals.Group, *args: Any, **kwargs: Any) -> None:
            in_forward = internals.training_state(group) == internals.fsdp2_common.TrainingState.FORWARD
            if group._reshard_after_forward or not in_forward:
                self._note(events, "R", group)
            original["R"](group, *args, **kwargs)

        def post_backward(group: internals.Group, *args: Any, **kwargs: Any) -> None:
            original["P"](group, *args, **kwargs)
            self._note(events, "P", group)

        patches = {
            "U": (patch_unshard, unshard),
            "R": (patch_reshard, reshard),
            "P": (patch_post_backward, post_backward),
        }
        with contextlib.ExitStack() as stack:
            for patch, replacement in map(patches.__getitem__, kinds):
                stack.enter_context(patch(replacement))
            yield events

    def _check_events(self, events: list[str], expected: str) -> None:
        self.assertEqual(events, expected.split(", ") if expected else [], may_be="empty")
        events.clear()

    def _check_training_events(
        self,
        ref_model: nn.Module,
        model: nn.Module,
        loss_of: Callable[[nn.Module, int], torch.Tensor],
        expected: Events,
        steps: int = 3,
    ) -> None:
        """Check that each step has these events, and the same gradients and updates as the replica."""
        optims = optimizers(ref_model, model)
        with self._recorded(expected.kinds) as events:
            for step in range(steps):
                loss = loss_of(model, step)
                self._check_events(events, expected.forward)
                loss.backward()
                self._check_events(events, expected.backward)
                ref_loss = loss_of(ref_model, step)
                ref_loss.backward()
                average_gradients(ref_model)
                self.assertEqual(loss, ref_loss)
                check_gradients(self, ref_model, model)
                take_step(optims)
        check_parity(self, ref_model, model)

    def _init_transformer(
        self, n_layers: int, reshard_after_forward: Reshard, checkpoint_impl: str | None
    ) -> tuple[Transformer, Any]:
        """Return a plain replica, and a model whose blocks and root are wrapped.

        ``checkpoint_impl`` is the model's activation checkpointing: "utils", "composable" or None.
        """
        args = {"n_layers": n_layers, "weight_tying": True}
        ref_model = transformer(self.device, **args)
        model = transformer(self.device, **args, checkpoint_activations=checkpoint_impl == "utils")
        if checkpoint_impl == "composable":
            for block in model.layers:
                internals.composable.checkpoint(block)
        return ref_model, shard_blocks(model, reshard_after_forward=reshard_after_forward)

    def _loss(self, model: nn.Module, step: int) -> torch.Tensor:
        return model(tokens(self.rank, step, self.device)).sum()

    @skip_if_lt_x_gpu(2)
    def test_fully_shard_backward_prefetch(self):
        config = {"reshard_after_forward": [True, False, 2, None], "checkpoint_impl": [None, "utils", "composable"]}
        self.run_subtests(config, self._test_backward_prefetch)
        self._test_backward_prefetch_unused_in_backward(True)

    def _test_backward_prefetch(self, reshard_after_forward: Reshard, checkpoint_impl: str | None) -> None:
        """Each check runs one step on the same model (upstream: three). Leaked state of a check fails the next one."""
        models = self._init_transformer(3, reshard_after_forward, checkpoint_impl)

        def gathers_of(events: str) -> str:
            """Drop the unshard events of groups that stay unsharded after forward."""
            prefixes: dict[Any, str] = {False: "U", None: "Ub root"}
            kept = prefixes.get(reshard_after_forward, "none")
            return ", ".join(event for event in events.split(", ") if not event.startswith(kept))

        # A block's backward begins with the all-gather for the next block. Its own all-gather was prefetched.
        once = "Uf root, Uf 0, Uf 1, Uf 2"
        backward = gathers_of("Ub root, Ub 2, Ub 1, P 2, Ub 0, P 1, P 0")
        self._check_training_events(*models, self._loss, Events(once, f"{backward}, P root"), steps=1)

        # Two forwards come before one backward, and the backward unshards every block twice.
        again: dict[Any, str] = {False: once, None: f"{once}, Uf 0, Uf 1, Uf 2"}
        self._check_training_events(
            *models,
            lambda model, step: self._loss(model, 0) + self._loss(model, 1),
            Events(
                again.get(reshard_after_forward, f"{once}, {once}"),
                f"{backward}, Ub 2, Ub 1, P 2, Ub 0, P 1, P 0, P root",
            ),
            steps=1,
        )

    def _test_backward_prefetch_unused_in_backward(self, reshard_after_forward: Reshard) -> None:
        """A backward of only the second output prefetches the unused first layer. The next backward is unaffected."""
        manual_seed(42)
        ref_model = nn.Sequential(nn.Linear(8, 8), DoubleLinear(8)).to(self.device)
        model: Any = copy.deepcopy(ref_model)
        modules = [model[0], model[1].lin1, model[1].lin2]
        shard_each([*modules, model], reshard_after_forward=reshard_after_forward)
        optims = optimizers(ref_model, model)
        with self._recorded("UP") as events:
            for step in range(2):
                inputs = rows(self.rank, step, 4, 8)
                first, second = model(inputs)
                self._check_events(events, "Uf 0, Uf 1.lin1, Uf 1.lin2")
                model.set_is_last_backward(False)
                second.sum().backward(retain_graph=True)
                self._check_events(events, "Ub 1.lin2, Ub 1.lin1, P 1.lin2, Ub 0, P 0, P 1.lin1")
                model.set_is_last_backward(True)
                first.sum().backward()
                self._check_events(events, "Ub 0, P 1.lin1, P 0, P 1.lin2")
                for group in map(internals.group_of, modules):
                    self.assertEqual((internals.forward_positions(group), internals.pending_gather(group)), ([], None))
                ref_first, ref_second = ref_model(inputs)
                (ref_first.sum() + ref_second.sum()).backward()
                average_gradients(ref_model)
                check_gradients(self, ref_model, model)
                take_step(optims)
            model(inputs)[0].sum().backward()  # the second layer of the pair is not used
            expected = "Uf 0, Uf 1.lin1, Uf 1.lin2, Ub 1.lin1, Ub 0, P 1.lin1, P 0, P 1.lin2"
            self._check_events(events, expected)
            self.assertEqual(internals.forward_positions(internals.group_of(model[1].lin2)), [], may_be="empty")

    @needs(torch_facts.HAS_MESH_PER_PARAMETER)
    @skip_if_lt_x_gpu(2)
    def test_backward_prefetch_of_two_groups(self):
        """A module with parameters on two meshes prefetches both groups of the module before it."""
        other = internals.fsdp2_common.FSDPMeshInfo(DeviceMesh.from_group(dist.new_group(), self.device.type), 0)
        result = internals.fsdp2_common.ShardPlacementResult(Shard(0), other)
        ref_model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).to(self.device)
        model = copy.deepcopy(ref_model)
        for layer in model:
            fully_shard(layer, shard_placement_fn=lambda param: result if param.ndim == 1 else None)
        fully_shard(model)
        loss_of = lambda each, step: each(rows(self.rank, step, 4, 8)).square().sum()  # noqa: E731
        backward = "Ub 2, Ub 2, Ub 1, Ub 1, P 2, P 2, Ub 0, Ub 0, P 1, P 1, P 0, P 0"
        events = Events("Uf 0, Uf 0, Uf 1, Uf 1, Uf 2, Uf 2", backward)
        self._check_training_events(ref_model, model, loss_of, events)

    @skip_if_lt_x_gpu(2)
    @subtests(depth=[1, 2])
    def test_set_modules_to_forward_prefetch(self, depth):
        forward = {
            1: "Uf root, Uf 0, Uf 1, Rf 0, Uf 2, Rf 1, Uf 3, Rf 2, Rf 3, Rf root",
            2: "Uf root, Uf 0, Uf 1, Uf 2, Rf 0, Uf 3, Rf 1, Rf 2, Rf 3, Rf root",
        }
        backward = (
            "Ub root, Ub 3, Ub 2, R 3, P 3, Ub 1, R 2, P 2, Ub 0, R 1, P 1, R 0, P 0, R root, P root"  # the default
        )
        ref_model, model = self._init_transformer(4, True, "utils")
        layers = list(model.layers)
        for index, layer in enumerate(layers[:-depth]):
            layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + depth])
        self._check_training_events(ref_model, model, self._loss, Events(forward[depth], backward, "URP"), steps=2)

    @skip_if_lt_x_gpu(2)
    @subtests(depth=[1, 2])
    def test_set_modules_to_backward_prefetch(self, depth):
        forward = "Uf root, Uf 0, Rf 0, Uf 1, Rf 1, Uf 2, Rf 2, Uf 3, Rf 3, Rf root"
        backward = {
            1: "Ub root, Ub 3, Ub 2, R 3, P 3, Ub 1, R 2, P 2, Ub 0, R 1, P 1, R 0, P 0, R root, P root",
            2: "Ub root, Ub 3, Ub 2, Ub 1, R 3, P 3, Ub 0, R 2, P 2, R 1, P 1, R 0, P 0, R root, P root",
        }
        ref_model, model = self._init_transformer(4, True, "utils")
        layers = list(model.layers)
        for index, layer in enumerate(layers[depth:]):
            layer.set_modules_to_backward_prefetch(layers[index : index + depth][::-1])
        self._check_training_events(ref_model, model, self._loss, Events(forward, backward[depth], "URP"), steps=2)

    @needs(torch_facts.KEEPS_GROUPS_UNSHARDED_FOR_RECOMPUTATION)
    @skip_if_lt_x_gpu(2)
    @subtests(explicit=[False, True])
    def test_set_modules_to_backward_prefetch_inside_ac(self, explicit):
        """Groups inside an activation checkpoint are unsharded by recomputation, or earlier by explicit prefetching."""
        ref_model, model = (transformer(self.device, n_layers=3) for _ in range(2))
        for kind in (FeedForward, TransformerBlock):
            internals.checkpoint_wrapping.apply_activation_checkpointing(
                model, check_fn=lambda module, kind=kind: isinstance(module, kind)
            )
        embeddings, ends = [model.tok_embeddings, model.pos_embeddings], [model.norm, model.output]
        blocks = [module for layer in model.layers for module in (layer.feed_forward.w1, layer)]
        shard_each([embeddings, *blocks, ends, model], reshard_after_forward=True)
        first, second, third = model.layers
        if explicit:
            model.output.set_modules_to_backward_prefetch([third])
            third.set_modules_to_backward_prefetch([second, second.feed_forward.w1])
            second.set_modules_to_backward_prefetch([first, first.feed_forward.w1])
            first.set_modules_to_backward_prefetch([model.tok_embeddings])
        default = """Ub norm+output, Ub 2, R norm+output, Ub 2.feed_forward.w1, Ub 1, R 2.feed_forward.w1, R 2,
            Ub 1.feed_forward.w1, Ub 0, R 1.feed_forward.w1, R 1,
            Ub 0.feed_forward.w1, Ub tok_embeddings+pos_embeddings, R 0.feed_forward.w1, R 0,
            R tok_embeddings+pos_embeddings"""
        explicit_order = """Ub norm+output, Ub 2, R norm+output, Ub 1, Ub 1.feed_forward.w1, Uf 2.feed_forward.w1,
            R 2.feed_forward.w1, R 2, Ub 0, Ub 0.feed_forward.w1, R 1.feed_forward.w1, R 1,
            Ub tok_embeddings+pos_embeddings, R 0.feed_forward.w1, R 0, R tok_embeddings+pos_embeddings"""
        parts = [("tok_embeddings+pos_embeddings",), *((f"{i}", f"{i}.feed_forward.w1") for i in range(3))]
        forward = [f"Uf {name}, Rf {name}" for (name,) in parts[:1]]
        forward += [f"Uf {layer}, Uf {inner}, Rf {inner}, Rf {layer}" for layer, inner in parts[1:]]
        forward += ["Uf norm+output, Rf norm+output"]
        backward = re.sub(r",\s+", ", ", explicit_order if explicit else default)
        if not torch_facts.RUNS_POST_BACKWARD_ONCE_PER_GROUP:
            backward += ", R tok_embeddings+pos_embeddings, R norm+output"
        self._check_training_events(ref_model, model, self._loss, Events(", ".join(forward), backward, "UR"))
        inner = "layers.1._checkpoint_wrapped_module.feed_forward._checkpoint_wrapped_module.w1"
        self.assertEqual(internals.group_of(second.feed_forward.w1)._module_fqn, inner)

    @skip_if_lt_x_gpu(2)
    def test_fully_shard_multi_module_backward_prefetch(self):
        """The modules of one parameter group are unsharded together, before the first of them runs."""
        args = {"n_layers": 5}  # no tied weights: FSDP rejects a parameter that is in two groups
        ref_model = transformer(self.device, **args)
        model = transformer(self.device, **args, checkpoint_activations=True)
        layers = list(model.layers)
        embeddings = [model.tok_embeddings, model.pos_embeddings]
        shard_each([layers[0], layers[1:3], layers[3:5], embeddings], reshard_after_forward=True)
        fully_shard([model.norm, model.output], reshard_after_forward=False)
        fully_shard(model, reshard_after_forward=True)
        forward = "Uf tok_embeddings+pos_embeddings, Uf 0, Uf 1+2, Uf 3+4, Uf norm+output"
        backward = (
            "Ub 3+4, P norm+output, Ub 1+2, P 3+4, Ub 0, P 1+2, Ub tok_embeddings+pos_embeddings, P 0, "
            "P tok_embeddings+pos_embeddings"
        )
        if not torch_facts.RUNS_POST_BACKWARD_ONCE_PER_GROUP:
            backward += ", P tok_embeddings+pos_embeddings, P 1+2, P 3+4, P norm+output"
        self._check_training_events(ref_model, model, self._loss, Events(forward, backward))

    @needs(torch_facts.COMPLETES_PARTIAL_GROUPS)
    @skip_if_lt_x_gpu(2)
    def test_fully_shard_multi_module_unused_module(self):
        """A group with a module that is not used in forward is still unsharded, reduced and resharded."""
        manual_seed(42)
        ref_model = nn.Sequential(HalfUsed(16), HalfUsed(16), nn.Linear(16, 16)).to(self.device)
        model = copy.deepcopy(ref_model)
        shard_each([*([module.unused_lin, module.lin] for module in model[:2]), model], reshard_after_forward=True)

        def loss_of(model: nn.Module, step: int) -> torch.Tensor:
            return model(rows(self.rank, step, 4, 16)).sum()

        forward = "Uf root, Uf 0.unused_lin+0.lin, Uf 1.unused_lin+1.lin"
        backward = (
            "Ub root, Ub 1.unused_lin+1.lin, Ub 0.unused_lin+0.lin, P 1.unused_lin+1.lin, P root, P 0.unused_lin+0.lin"
        )
        self._check_training_events(ref_model, model, loss_of, Events(forward, backward))

    @skip_if_lt_x_gpu(2)
    def test_backward_misprefetch(self):
        """Prefetching a module whose backward has already run does not hang or change the next step."""
        manual_seed(42)
        ref_model = MLP(16, self.device)
        model = copy.deepcopy(ref_model)
        shard_each([model.in_proj, model.out_proj, model])
        model.in_proj.set_modules_to_backward_prefetch([model.out_proj])

        def step(each: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
            loss = train(each, inputs)
            for module in internals.fsdp_modules(each)[1:]:
                self.assertIsNone(internals.pending_gather(internals.group_of(module)))
            return loss

        self._check_training(ref_model, model, lambda: self._inputs(2, 16), Loop(step=step))


class TestFullyShardUnshardMultiProcess(TrainingMixin, FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_unshard_async(self):
        """A model may start asynchronous unshards itself, also next to DDP modules. FSDP waits for them when needed."""
        device = self.device
        device_ids = None if device.index is None else [device.index]
        manual_seed(42)
        ref_model = BranchedModel(8).to(device)
        model = copy.deepcopy(ref_model)
        internals.composable.replicate(ref_model, device_ids=device_ids)
        shard_each(model.mlps.mlps, reshard_after_forward=False)
        fully_shard(model.mlps)
        internals.composable.replicate(model, device_ids=device_ids)
        optims = optimizers(ref_model, model)
        ref_losses = []
        for step in range(10):
            inputs = rows(self.rank, step, 4, 8)
            losses = []
            for module, optim in ((ref_model, optims[0]), (model, optims[1])):
                losses.append(module(inputs))
                losses[-1].backward()
                with implicit_replication():  # because of the defect optimizer_ignored_parameters_break_foreach
                    optim.step()
                optim.zero_grad()
            self.assertEqual(losses[0], losses[1])
            ref_losses.append(losses[0])
            self.assertEqual(model.pending, [True] * 3)
            model.pending.clear()
        check_losses(ref_losses)
        check_sharded_parity(self, ref_model.mlps, model.mlps)
        for ref_branch, branch in zip(ref_model.branches, model.branches):
            self.assertEqual(branch.weight, ref_branch.weight)


class TestFullyShardUnshardMultiThread(TrainingMixin, FSDPTestMultiThread):
    world_size = 2

    @skip_if_lt_x_gpu(1)
    def test_unshard_no_param_group(self):
        """``unshard(async_op=True)`` returns a handle also for a root without parameters. Its wait unshards nothing."""
        model: Any = nn.Sequential(*(nn.Linear(4, 4, device=self.device) for _ in range(2)))
        shard_each([*model, model])
        self.assertIsNone(internals.own_group(model))
        handle = model.unshard(async_op=True)
        self.assertIsNone(handle.wait())
        self.assertEqual([type(param) for param in model.parameters()], [DTensor] * 4)

    @skip_if_lt_x_gpu(1)
    def test_unshard_without_lazy_init(self):
        """An unshard before the first forward registers the unsharded parameters."""
        model = filled(MLP(4, self.device))
        ref_model = copy.deepcopy(model)
        fully_shard(model)
        model.unshard()
        self.assertEqual(len(list(model.parameters())), 4)
        for (ref_name, ref_param), (name, param) in zip(ref_model.named_parameters(), model.named_parameters()):
            self.assertNotIsInstance(param, DTensor)
            self.assertEqual((name, param), (ref_name, ref_param))


class TestFullyShardAllocFromPG(TrainingMixin, FSDPTest):
    """The process group allocates the buffers of the collectives, if it can."""

    world_size = 2
    log_name = ""

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        """Set NCCL's logging variables, which NCCL reads when its first group is created."""
        with tempfile.NamedTemporaryFile() as log:
            cls.log_name = log.name
            variables = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,REG", "NCCL_DEBUG_FILE": log.name}
            with mock.patch.dict(os.environ, variables if accelerator.current().backend == "nccl" else {}):
                super()._run(*args, **kwargs)

    def _buffers_registered(self) -> bool:
        with open(self.log_name) as log:
            return re.search(r"register comm .* buffer", log.read()) is not None

    def _comms(self, model: nn.Module) -> set[tuple[type, type]]:
        groups = internals.groups_of(model)
        return {(type(group._all_gather_comm), type(group._reduce_scatter_comm)) for group in groups}

    @skip_if_lt_x_gpu(2)
    def test_fully_shard_alloc_from_pg(self):
        """FSDP uses the group's allocator if there is one (gloo has none). All numbers stay bitwise the same.

        Only NCCL's log shows that the buffers are registered, and only with symmetric memory.
        """
        device = self.device
        twin, model = (shard_blocks(transformer(device)) for _ in range(2))
        default = {(fsdp_collectives.DefaultAllGather, fsdp_collectives.DefaultReduceScatter)}
        from_group = {
            (
                fsdp_collectives.ProcessGroupAllocAllGather,
                fsdp_collectives.ProcessGroupAllocReduceScatter,
            )
        }
        logged = accelerator.current().has("symmetric_memory")
        optims = optimizers(twin, model)
        asked: list[torch.Size] = []
        allocate = fsdp_collectives.ProcessGroupAllocMixin.allocate

        def record(comm: Any, size: Any, **kwargs: Any) -> torch.Tensor:
            self.assertIs(comm._group, internals.group_of(model).mesh_info.shard_process_group)
            asked.append(size)
            return allocate(comm, size, **kwargs)

        self.assertEqual(self._comms(model), default)
        for step, enable in enumerate((None, True, True, False)):
            if enable is not None:
                for module in internals.fsdp_modules(model):
                    module.set_allocate_memory_from_process_group_for_comm(enable)
                self.assertEqual(self._comms(model), from_group if enable else default)
            ids = tokens(self.rank, step, device)
            with mock.patch.object(fsdp_collectives.ProcessGroupAllocMixin, "allocate", record):
                model(ids).sum().backward()
            # three groups in forward, the two blocks again in backward, and two buffers for each reduction
            self.assertEqual(len(asked), 3 + 2 + 3 * 2 if enable else 0)
            asked.clear()
            if logged and step < 2:
                self.assertEqual(self._buffers_registered(), bool(enable))
            twin(ids).sum().backward()
            check_identical(self, local_grads(model), local_grads(twin))
            take_step(optims)

    @skip_if_lt_x_gpu(2)
    def test_exception_when_used_together_with_comm_hooks(self):
        """The process group's allocator cannot be combined with a custom collective."""
        model: Any = fully_shard(nn.Linear(16, 16, device=self.device))
        model.set_allocate_memory_from_process_group_for_comm(True)
        custom = mock.MagicMock(spec=fsdp_api.AllGather)
        model.set_custom_all_gather(custom)
        with self.assertRaisesRegex(AssertionError, "all gather comm is custom"):
            model.set_allocate_memory_from_process_group_for_comm(True)
        self.assertIs(internals.group_of(model)._all_gather_comm, custom)

        model.set_custom_all_gather(fsdp_collectives.DefaultAllGather())
        model.set_custom_reduce_scatter(mock.MagicMock(spec=fsdp_api.ReduceScatter))
        with self.assertRaisesRegex(AssertionError, "reduce scatter comm is custom"):
            model.set_allocate_memory_from_process_group_for_comm(True)


class TestFullyShardSymmMem(TrainingMixin, FSDPTestContinuous):
    """The buffers are in symmetric memory."""

    @classmethod
    def opts(cls, high_priority_stream: bool = False) -> Any:
        """With zero CTAs NCCL all-gathers by copy engines and uses no thread block of the device."""
        options = dist.ProcessGroupNCCL.Options()
        options.config.cta_policy = dist.ProcessGroupNCCL.NCCL_CTA_POLICY_ZERO
        return options

    @needs(torch_facts.HAS_SYMMETRIC_MEMORY_FOR_COMMUNICATION)
    @requires_capability("symmetric_memory")
    @requires(
        lambda: None if sm_is_or_higher_than(accelerator.current().device(), 9, 0) else "needs compute capability 9.0"
    )
    @skip_if_lt_x_gpu(2)
    @subtests(sum_reduction=[True, False])
    def test_fully_shard_symm_mem(self, sum_reduction):
        """Run one step. Only sums are reduced in symmetric memory."""
        device = self.device
        model = shard_blocks(transformer(device, dim=4096, max_seq_len=64))
        for module in internals.fsdp_modules(model):
            module.set_force_sum_reduction_for_comms(sum_reduction)
            module.set_symm_mem_for_comm()
            comms = internals.group_of(module)._all_gather_comm, internals.group_of(module)._reduce_scatter_comm
            self.assertIsInstance(comms[0], fsdp_collectives.SymmMemAllGather)
            self.assertEqual(isinstance(comms[1], fsdp_collectives.SymmMemReduceScatter), sum_reduction)
        model(torch.randint(0, 8, (4, 64), device=device)).sum().backward()
        for name, grad in local_grads(model).items():
            self.assertTrue(grad.isfinite().all().item(), name)


class TestFullyShardForceSumReduction(TrainingMixin, FSDPTest):
    """The reduce operations that FSDP passes to the collectives of ``torch.distributed``.

    Upstream reads them from NCCL's log. These tests record the calls, so they work with any backend.
    """

    world_size = at_most(2)

    def _test_force_sum(self, mesh_shape: tuple[int, ...]) -> None:
        """Average in the first step, sum in the next two, average in the last. Gradients always equal a replica's."""
        ref_model = transformer(self.device)
        model = shard_blocks(copy.deepcopy(ref_model), mesh=self._mesh(*mesh_shape))
        modules = internals.fsdp_modules(model)
        forced = iter((False, True, True, False))

        def step(each: nn.Module, ids: torch.Tensor) -> torch.Tensor:
            if each is ref_model:
                return train(each, ids)
            force_sum = next(forced)
            for module in modules:
                module.set_force_sum_reduction_for_comms(force_sum)
            with collectives.recorded() as calls:
                loss = train(each, ids)
            ops = [SUM if force_sum else AVG] * len(modules)
            self.assertEqual(calls.values("reduce_scatter", "op"), ops)
            self.assertEqual(calls.values("all_reduce", "op"), ops if len(mesh_shape) > 1 else [], may_be="empty")
            return loss

        self._check_training(ref_model, model, lambda: self._tokens(2, 16), Loop(step=step, iterations=4))

    @skip_if_lt_x_gpu(2)
    def test_fully_shard_force_sum_reduce_scatter(self):
        self._test_force_sum((2,))

    @skip_if_lt_x_gpu(4)
    def test_fully_shard_force_sum_both_reductions(self):
        self._test_force_sum((2, 2))


class TestFullyShardReduceOpWorldSize1(TrainingMixin, FSDPTestContinuous):
    """With one rank there is nothing to reduce."""

    world_size = 1

    @skip_if_lt_x_gpu(1)
    def test_size1_reduceop(self):
        """Training on one rank equals plain training, and FSDP selects a sum without division.

        Upstream uses a layer of 1024 by 1025 because of NCCL's average over one rank. Any odd size works.
        """
        manual_seed(42)
        ref_model = nn.Linear(16, 17, device=self.device)
        model: Any = fully_shard(copy.deepcopy(ref_model), mesh=self._mesh(1), reshard_after_forward=False)
        self._check_training(ref_model, model, lambda: self._inputs(17, 16))
        group = internals.group_of(model).mesh_info.shard_process_group
        pairs = [(group, None), (group, group), (None, group)]
        for reduce_scatter_group, all_reduce_group in pairs[: 3 if torch_facts.SKIPS_REDUCTION_OVER_ONE_RANK else 2]:
            factors = fsdp_collectives._get_gradient_divide_factors(
                reduce_scatter_group, all_reduce_group, torch.float32
            )
            self.assertEqual(factors, (None, None, SUM, SUM))

    def _test_singleton(
        self,
        divide_factor: float | None,
        force_sum: bool = False,
        shows: torch_defect = NO_DEFECT,
        **kwargs: Any,
    ) -> None:
        """Every element of the gradient is 3 before it is divided. ``shows`` is a known defect of the result."""
        model: Any = nn.Linear(8, 4, bias=False, device=self.device)
        fully_shard(model, mesh=self._mesh(1), **kwargs)
        if divide_factor is not None:
            model.set_gradient_divide_factor(divide_factor)
        model.set_force_sum_reduction_for_comms(force_sum)
        model(torch.ones(3, 8, device=self.device)).sum().backward()
        expected = torch.full((4, 8), 3 / (divide_factor or 1), device=self.device)
        with shows:
            self.assertEqual(model.weight.grad.to_local(), expected)

    @skip_if_lt_x_gpu(1)
    def test_singleton_copy_division(self):
        # Older versions of PyTorch reduce the gradient by PREMUL_SUM, or by a sum that is divided afterwards.
        force_sum = not torch_facts.SKIPS_REDUCTION_OVER_ONE_RANK and bool(accelerator.current().lacks("premul_sum"))
        self.run_subtests({"divide_factor": [None, 0.5, 1.0, 2.0]}, self._test_singleton, force_sum=force_sum)

    @skip_if_lt_x_gpu(1)
    @subtests(divide_factor=[None, 0.5, 1.0, 2.0])
    def test_singleton_force_sum(self, divide_factor):
        """A forced sum over one rank divides by the factor once."""
        shows = torch_defect("fsdp2_divides_twice", when=divide_factor in (0.5, 2.0))
        self._test_singleton(divide_factor, force_sum=True, shows=shows)

    @skip_if_lt_x_gpu(1)
    @subtests(divide_factor=[None, 0.5, 1.0, 2.0])
    def test_singleton_fp16(self, divide_factor):
        """A reduction in float16 over one rank divides by the factor once."""
        shows = torch_defect("fsdp2_divides_twice", when=divide_factor in (0.5, 2.0))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
        self._test_singleton(divide_factor, shows=shows, mp_policy=policy)


if __name__ == "__main__":
    run_tests()
