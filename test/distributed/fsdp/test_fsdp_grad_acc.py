"""Accumulated gradients of FSDP1 equal those of all data at once, inside and outside ``no_sync()``, and mixed."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import DEVICEInitMode, FSDPInitMode, FSDPTest, TransformerWithSharedParams
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients, full_parameters

Batch = tuple[torch.Tensor, ...]
BATCH_DIM = 1  # of the tensors of a batch
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]


@dataclasses.dataclass(frozen=True)
class _GradAccConfig:
    """A number of consecutive iterations, all inside ``no_sync()`` or all outside."""

    use_no_sync: bool
    num_iters: int

    def __repr__(self) -> str:
        return f"{'no_sync' if self.use_no_sync else 'sync'}*{self.num_iters}"


@dataclasses.dataclass(frozen=True)
class _GradAccConfigs:
    configs: list[_GradAccConfig]

    def __repr__(self) -> str:
        return "+".join(map(repr, self.configs))


class OneOf(nn.Module):
    """Runs the branch that the caller chooses."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](x)


def _in_turns(first: bool) -> _GradAccConfigs:
    return _GradAccConfigs([_GradAccConfig(use_no_sync, 3) for use_no_sync in (first, not first, first)])


class TestGradAcc(FSDPTest):
    world_size = 2

    def _model(self, fsdp_init_mode: FSDPInitMode = FSDPInitMode.RECURSIVE, **fsdp_kwargs: Any) -> Any:
        return TransformerWithSharedParams.init(
            self.process_group,
            fsdp_init_mode,
            DEVICEInitMode.DEVICE_BEFORE,
            fsdp_kwargs,
            deterministic=True,
            add_bn=False,
        )

    def _batches(self, model: FSDP, number: int) -> list[Batch]:
        """The model's own input and permutations of its tokens, by rank. No two batches share a tensor."""

        def permute_tensor(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.flatten()[torch.randperm(tensor.numel()).to(tensor.device)].view_as(tensor)

        first = model.module.get_input(self.device)  # this also sets the seed, by rank
        batches = [first, *(tuple(map(permute_tensor, first)) for _ in range(number - 1))]
        for one, other in itertools.combinations(batches, 2):
            self.assertFalse(any(torch.equal(*tensors) for tensors in zip(one, other)))
        return batches

    def _accumulate(self, model: FSDP, batches: list[Batch], configs: _GradAccConfigs) -> torch.Tensor:
        """Run backward for each batch and return the sum of the losses. The last backward always reduces."""
        flags = [config.use_no_sync for config in configs.configs for _ in range(config.num_iters)]
        self.assertEqual(len(flags), len(batches))
        flags[-1] = False
        losses = []
        for batch, use_no_sync in zip(batches, flags):
            with model.no_sync() if use_no_sync else contextlib.nullcontext():
                losses.append(self._backward(model, batch))
        return torch.stack(losses).sum()

    def _backward(self, model: FSDP, batch: Batch) -> torch.Tensor:
        loss = model.module.get_loss(batch, model(*batch))
        loss.backward()
        return loss.detach()

    def _test_grad_acc(
        self,
        configs: _GradAccConfigs,
        cpu_offload: CPUOffload,
        backward_prefetch: BackwardPrefetch | None,
        sharding_strategy: ShardingStrategy,
        use_orig_params: bool,
    ) -> None:
        model = self._model(
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            sharding_strategy=sharding_strategy,
            use_orig_params=use_orig_params,
        )
        optim = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        batches = self._batches(model, sum(config.num_iters for config in configs.configs))
        concatenated = tuple(torch.cat(tensors, dim=BATCH_DIM) for tensors in zip(*batches))

        optim.zero_grad()
        expected_loss = self._backward(model, concatenated)
        expected = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        optim.zero_grad()
        loss = self._accumulate(model, batches, configs)
        found = [param.grad for param in model.parameters() if param.grad is not None]

        torch.testing.assert_close(loss, expected_loss)
        self.assertGreater(len(expected), 0)
        self.assertEqual(len(found), len(expected))
        for grad, expected_grad in zip(found, expected):
            self.assertEqual(grad.size(), expected_grad.size())
            torch.testing.assert_close(grad, expected_grad)
        before = [param.detach().clone() for param in model.parameters()]
        optim.step()
        changed = [not torch.equal(param, old) for param, old in zip(model.parameters(), before)]
        self.assertEqual(changed, [param.grad is not None for param in model.parameters()])

    @skip_if_lt_x_gpu(2)
    @parametrize("configs", [_in_turns(True), _in_turns(False)])
    @parametrize("use_orig_params", [False, True])
    @subtests(backward_prefetch=[None, *BackwardPrefetch], sharding_strategy=STRATEGIES)
    def test_grad_acc(self, **options):
        """Nine batches, by threes inside and outside ``no_sync()``, give the gradient of one pass over all of them."""
        self._test_grad_acc(cpu_offload=CPUOffload(offload_params=False), **options)

    @skip_if_lt_x_gpu(2)
    @parametrize("use_orig_params", [False, True])
    @subtests(backward_prefetch=[None, *BackwardPrefetch], sharding_strategy=STRATEGIES)
    def test_grad_acc_cpu_offload(self, **options):
        """The same for offloaded parameters, which accumulate only inside ``no_sync()``."""
        configs = _GradAccConfigs([_GradAccConfig(use_no_sync=True, num_iters=3)])
        self._test_grad_acc(configs=configs, cpu_offload=CPUOffload(offload_params=True), **options)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES, use_orig_params=[False, True])
    def test_what_is_held_meanwhile(self, sharding_strategy, use_orig_params):
        """``no_sync()`` accumulates unsharded gradients and reduces nothing. The next backward outside reduces them."""
        model = self._model(sharding_strategy=sharding_strategy, use_orig_params=use_orig_params)
        flat_params = internals.flat_params(model)
        batches = self._batches(model, 3)
        sharded = sharding_strategy is not ShardingStrategy.NO_SHARD
        whole = [internals.unsharded_size(flat_param) for flat_param in flat_params]
        plain = self._model(FSDPInitMode.NO_FSDP)
        with recorded("reduce_scatter", "all_reduce") as reductions:
            with model.no_sync():
                for batch in batches[:2]:
                    self._backward(model, batch)
                    plain.get_loss(batch, plain(*batch)).backward()
                    self.assertEqual([flat_param.grad.size() for flat_param in flat_params], whole)
            self.assertEqual(reductions, [], may_be="empty")
            # Nothing is reduced yet: the gradient is that of a model that trains on this rank's data only.
            mine = plain.transformer.encoder.layers[0]
            expected = torch.cat([param.grad.flatten() for param in mine.parameters()])
            inner = internals.flat_param_of(model.module.transformer.encoder.layers[0])
            # Layers are flattened without gaps, since all their sizes are multiples of 4.
            torch.testing.assert_close(inner.grad[: expected.numel()], expected)

            self._backward(model, batches[2])
            kind = "reduce_scatter" if sharded else "all_reduce"
            self.assertEqual([call.name for call in reductions], [kind] * len(flat_params))
        for flat_param in flat_params:
            self.assertEqual(flat_param.grad.size(), internals.sharded_size(flat_param))
            if sharded:
                self.assertFalse(internals.is_unsharded(flat_param))

    @skip_if_lt_x_gpu(2)
    @subtests(
        sharding_strategy=STRATEGIES,
        configs=[
            _GradAccConfigs([_GradAccConfig(use_no_sync, 1) for use_no_sync in (first, not first, first)])
            for first in (True, False)
        ],
    )
    def test_training_with_accumulation(self, sharding_strategy, configs):
        """Over steps with momentum, parameters and unsharded gradients match a plain model with averaged gradients."""
        model = self._model(sharding_strategy=sharding_strategy, use_orig_params=True)
        plain = self._model(FSDPInitMode.NO_FSDP)
        optims = [torch.optim.SGD(each.parameters(), lr=0.01, momentum=0.9) for each in (model, plain)]
        batches = self._batches(model, 6)
        for window in (batches[:3], batches[3:]):
            for optim in optims:
                optim.zero_grad()
            self._accumulate(model, window, configs)
            for batch in window:
                plain.get_loss(batch, plain(*batch)).backward()
            average_gradients(plain)
            with FSDP.summon_full_params(model, with_grads=True):
                actual = [param.grad.clone() for param in model.parameters()]
            self._assert_alike(actual, [param.grad for param in plain.parameters()])
            for optim in optims:
                optim.step()
        actual = list(full_parameters(model).values())
        self._assert_alike(actual, [param.detach() for param in plain.parameters()])

    def _assert_alike(self, found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
        self.assertEqual(len(found), len(expected))
        # Hundreds of products are summed in another order. The tolerance is relative to the largest value, since small
        # values may come from cancellation.
        for one, other in zip(found, expected):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * max(1.0, float(other.abs().max())))

    @skip_if_lt_x_gpu(2)
    @subtests(
        sharding_strategy=STRATEGIES,
        use_no_sync=[False, True],
        set_to_none=[False, True],
        use_orig_params=[False, True],
    )
    def test_same_batch_twice(self, sharding_strategy, use_no_sync, set_to_none, use_orig_params):
        """A second backward doubles the gradient, however it is accumulated and was cleared before."""
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)).to(self.device)
        layers[2] = FSDP(layers[2], sharding_strategy=sharding_strategy, use_orig_params=use_orig_params)
        model = FSDP(layers, sharding_strategy=sharding_strategy, use_orig_params=use_orig_params)
        torch.manual_seed(1 + self.rank)
        inputs = torch.randn(5, 4, device=self.device)

        def gradients() -> list[torch.Tensor]:
            return copy.deepcopy([param.grad for param in model.parameters() if param.grad is not None])

        model(inputs).square().sum().backward()
        once = gradients()
        self.assertGreater(sum(int(grad.count_nonzero()) for grad in once), 0)
        for _ in range(2):
            model.zero_grad(set_to_none=set_to_none)
            with model.no_sync() if use_no_sync else contextlib.nullcontext():
                model(inputs).square().sum().backward()
            model(inputs).square().sum().backward()
            # NO_SHARD reduces the already reduced gradient again with the new one, and this rounds.
            rounds = sharding_strategy is ShardingStrategy.NO_SHARD and not use_no_sync
            tolerance = 1e-6 if rounds else 0
            self.assertEqual(gradients(), [2 * grad for grad in once], rtol=tolerance, atol=tolerance)

    @skip_if_lt_x_gpu(2)
    def test_matrix_with_shard_of_vector_shape(self):
        """Gradients add up if the matrix has a local shard on rank 0 of the same shape as the vector before it."""
        torch.manual_seed(0)
        plain = nn.Sequential(nn.LayerNorm(4, bias=False), nn.Linear(4, 3, bias=False)).to(self.device)
        model = FSDP(copy.deepcopy(plain), use_orig_params=True)
        if self.rank == 0:
            self.assertEqual([tuple(param.shape) for param in model.parameters()], [(4,), (4,)])
        torch.manual_seed(1 + self.rank)
        for context in (model.no_sync, contextlib.nullcontext):
            inputs = torch.randn(5, 4, device=self.device)
            with context():
                for each in (plain, model):
                    each(inputs).square().sum().backward()
        average_gradients(plain)
        with FSDP.summon_full_params(model, with_grads=True):
            actual = [param.grad.clone() for param in model.parameters()]
        self.assertEqual(actual, [param.grad for param in plain.parameters()])

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES, use_orig_params=[False, True])
    def test_no_sync_inside_no_sync(self, **fsdp_kwargs):
        """Leaving the inner context does not synchronize in the rest of the outer one."""
        model = FSDP(nn.Linear(1, 2, bias=False, device=self.device), **fsdp_kwargs)
        with model.no_sync():
            for context in (model.no_sync, contextlib.nullcontext):
                with context(), recorded() as calls:
                    model(self._mine(1)).sum().backward()
                self.assertNotIn("reduce", " ".join(calls.counts()))
        model(self._mine(1)).sum().backward()
        self.assertEqual(internals.flat_param_of(model).grad.unique().tolist(), [4.5])

    @skip_if_lt_x_gpu(2)
    def test_no_sync_and_plain_submodules(self):
        """``no_sync()`` adds no attribute to a submodule that is not an FSDP instance."""
        model = FSDP(nn.Sequential(nn.Linear(2, 2, device=self.device), nn.ReLU()))
        plain = [module for module in model.modules() if not isinstance(module, FSDP)]
        before = [set(vars(module)) for module in plain]
        with model.no_sync():
            model(self._mine(2)).sum().backward()
        self.assertEqual([set(vars(module)) for module in plain], before)

    def _mine(self, features: int) -> torch.Tensor:
        """One row of input. The mean of the ranks' values is 1.5."""
        return torch.full((1, features), self.rank + 1.0, device=self.device)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES, use_orig_params=[False, True])
    def test_unit_that_is_used_only_in_no_sync(self, **fsdp_kwargs):
        """The next synchronization includes a unit that only ran in ``no_sync()``."""
        branches = [FSDP(nn.Linear(1, 2, bias=False, device=self.device), **fsdp_kwargs) for _ in range(2)]
        model = FSDP(OneOf(*branches), **fsdp_kwargs)
        with model.no_sync():
            model(self._mine(1), 0).sum().backward()
        with torch_defect("fsdp1_gradient_of_no_sync_is_not_reduced"):
            model(self._mine(1), 1).sum().backward()
            actual = [internals.flat_param_of(branch).grad.unique().tolist() for branch in branches]
            self.assertEqual(actual, [[1.5], [1.5]])

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True])
    def test_reduce_dtype_of_a_unit_that_is_used_only_in_no_sync(self, use_orig_params):
        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        fsdp_kwargs = {"mixed_precision": policy, "use_orig_params": use_orig_params}
        branches = [FSDP(nn.Linear(1, 2, bias=False, device=self.device), **fsdp_kwargs) for _ in range(2)]
        model = FSDP(OneOf(*branches), **fsdp_kwargs)
        with model.no_sync():
            model(self._mine(1), 0).sum().backward()
        with torch_defect("fsdp1_gradient_of_no_sync_is_not_reduced"), recorded() as calls:
            model(self._mine(1), 1).sum().backward()
            self.assertEqual(calls.dtypes("reduce_scatter"), [torch.float32] * 2)

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True], set_to_none=[False, True])
    def test_gradient_of_no_sync_is_cleared(self, use_orig_params, set_to_none):
        """``zero_grad()`` clears a gradient that was not reduced, and the next synchronization needs none."""
        branches = [
            FSDP(nn.Linear(1, 2, bias=False, device=self.device), use_orig_params=use_orig_params) for _ in range(2)
        ]
        model = FSDP(OneOf(*branches), use_orig_params=use_orig_params)
        with model.no_sync():
            model(self._mine(1), 0).sum().backward()
        model.zero_grad(set_to_none)
        with torch_defect("fsdp1_gradient_of_no_sync_is_not_reduced"):
            model(self._mine(1), 1).sum().backward()
            kept = internals.flat_param_of(branches[0]).grad
            self.assertEqual(None if kept is None else kept.tolist(), None if set_to_none else [0.0])

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES, use_orig_params=[False, True], second_in_no_sync=[False, True])
    def test_unit_of_one_element(self, second_in_no_sync, sharding_strategy, use_orig_params):
        """Gradients add up if a unit has fewer elements than there are ranks."""
        layer = nn.Linear(1, 1, bias=False, device=self.device)
        model = FSDP(layer, sharding_strategy=sharding_strategy, use_orig_params=use_orig_params)
        for use_no_sync in (False, second_in_no_sync, False):
            with model.no_sync() if use_no_sync else contextlib.nullcontext():
                model(self._mine(1)).sum().backward()
        if self.rank == 0:  # the other rank has only padding, except under NO_SHARD
            shares_size = sharding_strategy is not ShardingStrategy.NO_SHARD and not use_orig_params
            with torch_defect("fsdp1_accumulation_of_one_element_is_wrong", when=shares_size):
                self.assertEqual(internals.flat_param_of(model).grad[0].item(), 3 * 1.5)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES, use_orig_params=[False, True])
    def test_microbatch_without_a_gradient(self, **fsdp_kwargs):
        """A unit keeps its gradient if its next backward computes none for its parameters."""
        unit = FSDP(OneOf(nn.Linear(2, 2, bias=False, device=self.device), nn.Identity()), **fsdp_kwargs)
        (param,) = unit.parameters()
        before_it = nn.Linear(2, 2, bias=False, device=self.device)
        unit(self._mine(2), 0).sum().backward()
        self.assertEqual(param.grad.unique().tolist(), [1.5])
        unit(before_it(self._mine(2)), 1).sum().backward()
        sharded = fsdp_kwargs["sharding_strategy"] is not ShardingStrategy.NO_SHARD
        with torch_defect("fsdp1_accumulated_gradient_is_lost", when=sharded and not fsdp_kwargs["use_orig_params"]):
            self.assertIsNotNone(param.grad)
            self.assertEqual(param.grad.unique().tolist(), [1.5])

    @skip_if_lt_x_gpu(2)
    @subtests(
        sharding_strategy=STRATEGIES,
        use_orig_params=[False, True],
        first_in_no_sync=[False, True],
        second_in_no_sync=[False, True],
    )
    def test_accumulation_that_is_dropped(self, first_in_no_sync, second_in_no_sync, **fsdp_kwargs):
        """``zero_grad`` drops all gradients that were accumulated."""
        model = FSDP(nn.Linear(2, 2, bias=False, device=self.device), **fsdp_kwargs)
        (param,) = model.parameters()
        for use_no_sync in (first_in_no_sync, second_in_no_sync):
            with model.no_sync() if use_no_sync else contextlib.nullcontext():
                model(4 * self._mine(2)).sum().backward()
        model.zero_grad()
        model(self._mine(2)).sum().backward()
        sharded = fsdp_kwargs["sharding_strategy"] is not ShardingStrategy.NO_SHARD
        is_set_aside = sharded and second_in_no_sync and not first_in_no_sync
        with torch_defect("fsdp1_zero_grad_after_no_sync_is_missed", when=is_set_aside):
            self.assertEqual(param.grad.unique().tolist(), [1.5])


instantiate_parametrized_tests(TestGradAcc)

if __name__ == "__main__":
    run_tests()
