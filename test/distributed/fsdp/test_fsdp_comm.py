"""The number and size of FSDP1's collectives in an iteration, and explicit unshards.

Each collective is counted and then carried out, so the counts come from real iterations.
"""

from __future__ import annotations

import contextlib
import enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    MLP,
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    NestedWrappedModule,
    TransformerWithSharedParams,
    debug_level,
    get_devtype,
)
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import parametrize, run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import RecordedCall, recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import full_parameters, room_in
from torch_fsdp_tests.installed_torch import torch_facts

STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
PREFETCHES = [None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST]


class PassType(enum.Enum):
    FWD = enum.auto()
    BWD = enum.auto()


class Traffic:
    """The bytes that a rank put into its collectives, in the order of the calls."""

    def __init__(self, calls: list[RecordedCall]) -> None:
        gathers = [call for call in calls if call.name == "all_gather"]
        self.all_gathers = [call.nbytes for call in gathers if call.dtype.is_floating_point]
        self.reduce_scatters = [call.nbytes for call in calls if call.name == "reduce_scatter"]
        # All-gathers of indices, which ranks use to compare their forward order.
        self.validations = len(gathers) - len(self.all_gathers)

    @property
    def counts(self) -> tuple[int, int, int]:
        return len(self.all_gathers), self.validations, len(self.reduce_scatters)


class Iteration(NamedTuple):
    """A forward and a backward. ``is_gathered`` if parameters are still unsharded from the one before."""

    in_no_sync: bool
    is_gathered: bool = False
    is_first: bool = False


class TestCommunication(FSDPTest):
    def _init_model(self, nested_model: bool, sharding_strategy: ShardingStrategy | None, **fsdp_kwargs: Any) -> FSDP:
        """A model in training mode with one FSDP instance for each of 4 (nested) or 5 (transformer) flat parameters."""
        fsdp_kwargs["sharding_strategy"] = sharding_strategy
        if not nested_model:
            return TransformerWithSharedParams.init(
                self.process_group, FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_BEFORE, fsdp_kwargs
            )
        inner = NestedWrappedModule.init(
            self.process_group,
            FSDPInitMode.RECURSIVE,
            DEVICEInitMode.DEVICE_AFTER,
            fsdp_kwargs,
            deterministic=True,
        )
        return FSDP(inner, self.process_group, **fsdp_kwargs).to(get_devtype())

    def _run_iter(self, model: FSDP, requires_grad: bool = False) -> dict[PassType, Traffic]:
        inputs = model.module.get_input(get_devtype())
        if requires_grad:
            inputs = tuple(each.requires_grad_() for each in inputs)
        with recorded() as forward:
            loss = model.module.get_loss(inputs, model(*inputs))
        with recorded() as backward:
            model.module.run_backward(loss)
        return {PassType.FWD: Traffic(forward), PassType.BWD: Traffic(backward)}

    def _get_ref_num_all_gathers_in_pass(
        self, num_fsdp: int, sharding_strategy: ShardingStrategy | None, pass_type: PassType, is_gathered: bool
    ) -> int:
        if sharding_strategy is ShardingStrategy.SHARD_GRAD_OP:
            return num_fsdp if pass_type is PassType.FWD and not is_gathered else 0
        # The root stays unsharded from forward to backward.
        return num_fsdp if pass_type is PassType.FWD else num_fsdp - 1

    def _assert_counts(
        self,
        traffic: dict[PassType, Traffic],
        num_fsdp: int,
        sharding_strategy: ShardingStrategy | None,
        iteration: Iteration,
    ) -> None:
        for pass_type in PassType:
            gathers = self._get_ref_num_all_gathers_in_pass(
                num_fsdp, sharding_strategy, pass_type, iteration.is_gathered
            )
            validations = 2 * num_fsdp if iteration.is_first and pass_type is PassType.FWD else 0
            scatters = num_fsdp if pass_type is PassType.BWD and not iteration.in_no_sync else 0
            self.assertEqual(traffic[pass_type].counts, (gathers, validations, scatters), msg=str(pass_type))

    @skip_if_lt_x_gpu(2)
    @parametrize("nested_model", [False, True])
    @parametrize("use_no_sync", [False, True])
    @parametrize("sharding_strategy", [ShardingStrategy.SHARD_GRAD_OP, None])
    def test_communication(self, nested_model, use_no_sync, sharding_strategy):
        """Each pass issues the expected collectives, in iterations first inside and then outside ``no_sync()``."""
        with debug_level(dist.DebugLevel.DETAIL):
            model = self._init_model(nested_model, sharding_strategy)
        num_fsdp = len(internals.handles(model))
        self.assertEqual(num_fsdp, 4 if nested_model else 5)

        schedule = [True] * 3 * use_no_sync + [False] * 3
        was_in_no_sync = False
        for number, in_no_sync in enumerate(schedule):
            with model.no_sync() if in_no_sync else contextlib.nullcontext():
                traffic = self._run_iter(model)
            # SHARD_GRAD_OP frees parameters when it reduces gradients, so in no_sync() they stay unsharded.
            self._assert_counts(
                traffic,
                num_fsdp,
                sharding_strategy,
                Iteration(in_no_sync, is_gathered=was_in_no_sync, is_first=number == 0),
            )
            was_in_no_sync = in_no_sync

    @skip_if_lt_x_gpu(2)
    @subtests(
        sharding_strategy=STRATEGIES,
        use_orig_params=[False, True],
        mixed_precision=[
            None,
            MixedPrecision(param_dtype=torch.bfloat16),
            MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float64),
        ],
    )
    def test_bytes(self, sharding_strategy, use_orig_params, mixed_precision):
        """Each shard is sent once per pass, each gradient once, in the dtypes of mixed precision."""
        model = self._init_model(
            True, sharding_strategy, use_orig_params=use_orig_params, mixed_precision=mixed_precision
        )
        param_dtype = mixed_precision.param_dtype if mixed_precision else torch.float32
        reduce_dtype = (mixed_precision.reduce_dtype or param_dtype) if mixed_precision else torch.float32
        # With ``use_orig_params=True`` and mixed precision, each parameter begins at a multiple of 16 bytes.
        gap = 4 if use_orig_params and mixed_precision else 0
        # The instances of the nested model in forward order. The first is the root, with two layers.
        numels = [(8 * 4 + 4) + gap + (4 * 8 + 8), 16 * 16 + 16, 4 * 16 + 16, 16 * 4 + 4]
        shards = [-(-numel // self.world_size) for numel in numels]
        self.assertEqual(sum(flat_param.numel() for flat_param in internals.flat_params(model)), sum(shards))
        gathered = [shard * param_dtype.itemsize for shard in shards]
        reduced = [self.world_size * shard * reduce_dtype.itemsize for shard in shards]
        for _ in range(2):
            traffic = self._run_iter(model)
            self.assertEqual(traffic[PassType.FWD].all_gathers, gathered)
            again = [] if sharding_strategy is ShardingStrategy.SHARD_GRAD_OP else sorted(gathered[1:])
            self.assertEqual(sorted(traffic[PassType.BWD].all_gathers), again, may_be="empty")
            self.assertEqual(sorted(traffic[PassType.BWD].reduce_scatters), sorted(reduced))

    @skip_if_lt_x_gpu(2)
    @subtests(
        forward_prefetch=[False, True],
        backward_prefetch=PREFETCHES,
        sharding_strategy=STRATEGIES,
        use_no_sync=[False, True],
    )
    def test_prefetch_adds_nothing(self, forward_prefetch, backward_prefetch, sharding_strategy, use_no_sync):
        """Prefetching moves all-gathers, but adds none and does not change gradients."""
        model = self._init_model(
            True, sharding_strategy, forward_prefetch=forward_prefetch, backward_prefetch=backward_prefetch
        )
        reference = self._init_model(True, ShardingStrategy.FULL_SHARD, backward_prefetch=None)
        was_in_no_sync = False
        for in_no_sync in [True] * 2 * use_no_sync + [False] * 2:
            with contextlib.ExitStack() as stack:
                if in_no_sync:
                    stack.enter_context(model.no_sync())
                    stack.enter_context(reference.no_sync())
                traffic = self._run_iter(model)
                self._run_iter(reference)
            # Even with forward prefetch, SHARD_GRAD_OP does not all-gather parameters that are already unsharded.
            self._assert_counts(traffic, 4, sharding_strategy, Iteration(in_no_sync, is_gathered=was_in_no_sync))
            was_in_no_sync = in_no_sync
        grads, expected = ([flat.grad for flat in internals.flat_params(each)] for each in (model, reference))
        self.assertEqual(grads, expected, rtol=0, atol=0)
        self.assertTrue(all(grad.count_nonzero() > 0 for grad in grads if grad.numel() > 1))

    @skip_if_lt_x_gpu(2)
    @subtests(backward_prefetch=PREFETCHES)
    def test_backward_after_a_forward_of_one_layer(self, backward_prefetch):
        """``forward_prefetch`` adds no all-gather to backward, also for layers that the last forward did not use."""
        kwargs = {"forward_prefetch": True, "backward_prefetch": backward_prefetch, "device_id": self.device}
        layers = [FSDP(nn.Linear(4, 4, device=self.device), **kwargs) for _ in range(4)]
        model = FSDP(nn.ModuleList(layers), **kwargs)
        model.module.forward = lambda x, used: nn.Sequential(*(layers[index] for index in used))(x)
        x = torch.randn(2, 4, device=self.device)
        model(x, range(4)).sum().backward()  # records the order of the layers
        loss = model(x, range(4)).sum()
        with torch.no_grad():
            model(x, [1])
        with recorded() as calls:
            loss.backward()
        # The forward of the second layer has unsharded the third one.
        self.assertEqual(Traffic(calls).counts, (3, 0, 4))

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES, backward_prefetch=PREFETCHES)
    def test_frozen_model(self, sharding_strategy, backward_prefetch):
        """Without trainable parameters, nothing is reduced. Backward still unshards and reshards."""
        model = self._init_model(True, sharding_strategy, backward_prefetch=backward_prefetch)
        for param in model.parameters():
            param.requires_grad_(False)
        for _ in range(2):
            traffic = self._run_iter(model, requires_grad=True)
            self._assert_counts(traffic, 4, sharding_strategy, Iteration(in_no_sync=True))
            self.assertEqual([internals.is_unsharded(each) for each in internals.flat_params(model)], [False] * 4)


class ReduceModule(nn.Module):
    """A layer whose output is summed over the ranks asynchronously."""

    def __init__(self, dim: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.weight = nn.Parameter(torch.randn(dim, dim))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dist.Work]:
        y = torch.relu(x @ self.weight)
        # Autograd ignores this sum, both in the tested model and in its reference.
        return y, dist.all_reduce(y.detach(), group=self.group, async_op=True)


class MLPs(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mlp1, self.mlp2, self.mlp3 = (MLP(dim) for _ in range(3))

    def forward(self, ys: list[torch.Tensor], works: list[dist.Work]) -> torch.Tensor:
        total = torch.zeros_like(ys[0])
        for mlp, y, work in zip(self.children(), ys, works, strict=True):
            work.wait()
            total = total + mlp(y)
        return total


class ReduceModel(nn.Module):
    """Three asynchronous reductions. During each, the MLP that uses its result is unsharded asynchronously."""

    def __init__(self, dim: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.reduce1, self.reduce2, self.reduce3 = (ReduceModule(dim, group) for _ in range(3))
        self.mlps = MLPs(dim)
        self.sizes: list[int] = []  # of the MLPs' unsharded parameters, right after the call to unshard them

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ys, works = [], []
        for number in (1, 2, 3):
            y, work = getattr(self, f"reduce{number}")(x)
            mlp = getattr(self.mlps, f"mlp{number}")
            if isinstance(mlp, FSDP):
                mlp._unshard(async_op=True)
                self.sizes.append(room_in(internals.unsharded_buffer(internals.flat_param_of(mlp))))
            ys.append(y)
            works.append(work)
        return self.mlps(ys, works)


class TestExplicitUnshard(FSDPTest):
    @property
    def world_size(self) -> int:
        return min(accelerator.current().ranks, 2)

    @skip_if_lt_x_gpu(2)
    @parametrize("use_orig_params", [False, True])
    def test_unshard_async(self, use_orig_params):
        """MLPs that are unsharded ahead of their forward are all-gathered once, and train as with DDP."""
        dim, batch = 8, 2
        device = self.device
        torch.manual_seed(42)
        reference = DDP(ReduceModel(dim, self.process_group).to(device))
        torch.manual_seed(42)
        model = ReduceModel(dim, self.process_group).to(device)
        model.mlps = FSDP(
            model.mlps,
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            auto_wrap_policy=ModuleWrapPolicy((MLP,)),
            use_orig_params=use_orig_params,
        )
        self.assertTrue(model.mlps.check_is_root())
        ignored = [name for name, _ in model.named_parameters() if name.startswith("mlps.")]
        DDP._set_params_and_buffers_to_ignore_for_model(model, ignored)
        both = reference, DDP(model)
        optims = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in both]
        flat_params = internals.flat_params(model.mlps)
        numel = 2 * dim * 4 * dim + 5 * dim  # of one MLP with its biases; even, so there is no padding

        torch.manual_seed(42 + self.rank + 1)
        ref_losses = []
        for _ in range(10):
            model.mlps._wait_unshard_streams_on_current_stream()  # an unshard ahead of forward waits for nothing else
            inputs = torch.randn(batch, dim, device=device)
            with recorded("all_gather", "reduce_scatter") as calls:
                # With the sum of the outputs as loss, ReLUs and then all gradients would be zero after a few steps.
                losses = [(each(inputs) - 1).square().mean() for each in both]
                for loss in losses:
                    loss.backward()
            ref_losses.append(losses[0])
            self.assertEqual(losses[1], losses[0])
            self.assertEqual(Traffic(calls).counts, (3, 0, 3))
            self.assertEqual(model.sizes, [numel] * 3)
            model.sizes.clear()
            self.assertEqual([internals.is_unsharded(each) for each in flat_params], [False] * 3)
            self._assert_same_grads(flat_params, reference.module.mlps, numel)
            for optim in optims:
                optim.step()
                optim.zero_grad()
        check_losses(ref_losses)

        trained = list(full_parameters(model).values())
        self.assertEqual(trained, [param.detach() for param in reference.parameters()])

    @skip_if_lt_x_gpu(2)
    def test_unshard_waits_by_default(self):
        """``_unshard`` returns a handle to wait on only with ``async_op=True``."""
        model = FSDP(nn.Linear(4, 4, device=self.device))
        model(torch.ones(2, 4, device=self.device))
        self.assertIsNone(model._unshard())
        model._unshard(async_op=True).wait()
        self.assertEqual(room_in(internals.unsharded_buffer(internals.flat_param_of(model))), 20)
        if torch_facts.UNSHARDS_WITHOUT_PARAMETERS:
            FSDP(nn.ReLU(), device_id=self.device)._unshard(async_op=True).wait()

    def _assert_same_grads(self, flat_params: list[internals.FlatParam], mlps: MLPs, numel: int) -> None:
        shard = numel // self.world_size
        for flat_param, mlp in zip(flat_params, mlps.children(), strict=True):
            whole = torch.cat([param.grad.flatten() for param in mlp.parameters()])
            self.assertEqual(whole.numel(), numel)
            self.assertEqual(flat_param.grad, whole[self.rank * shard : (self.rank + 1) * shard])


instantiate_device_type_tests(TestCommunication, globals(), allow_xpu=True)
instantiate_device_type_tests(TestExplicitUnshard, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
