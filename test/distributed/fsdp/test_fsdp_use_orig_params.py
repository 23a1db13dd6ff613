"""FSDP1 with ``use_orig_params=True``: the model keeps its parameters, as views of this rank's flat shard.

So parameter groups of the optimizer may divide them, and each can be frozen separately. If a parameter or its gradient
is replaced, the new value is written back to the flat parameter.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_distributed.requirements import requires_capability
from torch_fsdp_tests.common_fsdp import MLP, DEVICEInitMode, FSDPInitMode, FSDPTest, TransformerWithSharedParams
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import one_by_one, pairwise_cases, subtests
from torch_fsdp_tests.fsdp.references import average_gradients, data_parallel, named, of_all_ranks
from torch_fsdp_tests.installed_torch import torch_names

dynamo_testing = torch_names.module("torch._dynamo.testing")
inductor_config = torch_names.module("torch._inductor.config")
triton = torch_names.module("torch.utils._triton")

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = (
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
)
STRATEGIES = {"no_shard": NO_SHARD, "shard_grad_op": SHARD_GRAD_OP, "full_shard": FULL_SHARD}
LAYERS = ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer})
LINEARS = ModuleWrapPolicy({nn.Linear})

# The gradient of the attention's key bias is zero except for rounding errors. Adam makes a full step for any gradient
# that is not small compared to eps. This large eps prevents that, and it also makes gradients of a wrong size visible.
EPS = 1e-3

Tensors = dict[str, "torch.Tensor | None"]


def flattened(tensors: Tensors) -> Tensors:
    return {name: None if tensor is None else tensor.detach().flatten().cpu() for name, tensor in tensors.items()}


class UseOrigParamsTest(FSDPTest):
    """A test case with a transformer, and comparisons of gradients and parameters with a reference such as DDP."""

    world_size = 2

    @property
    def num_iters(self) -> int:
        """Ten on devices with streams. Elsewhere four: ``zero_grad`` runs twice before forward and twice after it."""
        return 10 if accelerator.current().has("streams") else 4

    @functools.cached_property
    def _plain(self) -> nn.Module:
        """A transformer before its move to the device. One layer of each kind is enough for these tests."""
        model = TransformerWithSharedParams.init(
            self.process_group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_AFTER, deterministic=True
        )
        for side in (model.transformer.encoder, model.transformer.decoder):
            del side.layers[1:]
        return model

    def _transformer(self, **fsdp_kwargs: Any) -> nn.Module:
        """A transformer with the same initial values on all ranks, plain or with an FSDP instance for each layer."""
        model = copy.deepcopy(self._plain).to(self.device)
        return FSDP(model, auto_wrap_policy=LAYERS, **fsdp_kwargs) if fsdp_kwargs else model

    def _tokens(self) -> tuple[torch.Tensor, torch.Tensor]:
        """A batch that differs by rank."""
        generator = torch.Generator().manual_seed(1 + self.rank)
        source, target = (torch.randint(23, (length, 2), generator=generator) for length in (6, 4))
        return source.to(self.device), target.to(self.device)

    def _joined(self, tensors: Tensors) -> Tensors:
        """Concatenate the local shards of each tensor in rank order. A tensor is None if no rank has a shard."""
        mine = flattened(tensors)
        of_all = of_all_ranks(mine)
        self.assertEqual([list(pieces) for pieces in of_all], [list(mine)] * self.world_size)
        joined: Tensors = {}
        for name in mine:
            pieces = [piece for other in of_all if (piece := other[name]) is not None]
            joined[name] = torch.cat(pieces) if pieces else None
        return joined

    def assert_same_grads(self, model: nn.Module, reference: nn.Module, strategy: ShardingStrategy) -> None:
        """Compare gradients with the reference by name. Gradients are unsharded under NO_SHARD, otherwise sharded."""
        actual, expected = ({name: param.grad for name, param in named(each).items()} for each in (model, reference))
        self.assertTrue(any(grad is not None for grad in expected.values()))
        self.assertEqual(flattened(actual) if strategy is NO_SHARD else self._joined(actual), flattened(expected))

    def assert_same_full_params(self, model: nn.Module, *others: nn.Module, writeback: bool = False) -> None:
        """Unsharded parameters must equal those of the other models by name. The others need not be FSDP models."""
        full = []
        for each in (model, *others):
            with FSDP.summon_full_params(each, writeback=writeback):
                full.append({name: param.detach().clone() for name, param in named(each).items()})
        self.assertGreater(len(full[0]), 0)
        for other in full[1:]:
            self.assertEqual(full[0], other, exact_device=False)


@dataclasses.dataclass(frozen=True)
class Hyperparams:
    """The options of the model, its optimizer and its training in ``test_diff_hyperparams``."""

    optim_class: type[torch.optim.Optimizer]
    sharding_strategy: ShardingStrategy
    device_init_mode: DEVICEInitMode = DEVICEInitMode.DEVICE_BEFORE
    init_optim_before_wrap: bool = False
    multi_tensor: bool = False
    set_to_none: bool = False
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    skip_writeback_check: bool = False
    offload_params: bool = False


class TestFSDPUseOrigParamsMultipleParamGroups(UseOrigParamsTest):
    """Hyperparameters, optimizers and ``requires_grad`` that differ between the parameters of one instance."""

    def _get_param_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Three groups (weights, biases and the rest, if any) with different hyperparameters."""
        groups: dict[str, dict[str, Any]] = {
            "weight": {"params": [], "weight_decay": 0.1, "lr": 1e-2},
            "bias": {"params": [], "weight_decay": 0.01, "lr": 1e-3},
            "": {"params": []},
        }
        for name, param in named(model).items():
            kind = next(kind for kind in groups if kind in name)
            groups[kind]["params"].append(param)
        return [group for group in groups.values() if group["params"]]

    def _get_optim(
        self, model: nn.Module, optim_class: type[torch.optim.Optimizer], multi_tensor: bool
    ) -> torch.optim.Optimizer:
        return optim_class(self._get_param_groups(model), lr=5e-3, eps=EPS, foreach=multi_tensor)

    def _check_train_parity(
        self,
        ddp_model: nn.Module,
        ddp_optim: torch.optim.Optimizer,
        fsdp_model: FSDP,
        fsdp_optim: torch.optim.Optimizer,
        set_to_none: bool,
    ) -> None:
        """Both models train alike on data that differs by rank. ``zero_grad`` comes before or after forward."""
        strategy = fsdp_model.sharding_strategy
        inputs = self._tokens()
        ref_losses = []
        for iteration in range(self.num_iters):
            losses = []
            for model, optim in ((ddp_model, ddp_optim), (fsdp_model, fsdp_optim)):
                if iteration % 2 == 0:
                    optim.zero_grad(set_to_none=set_to_none)
                loss = model.module.get_loss(inputs, model(*inputs))
                losses.append(loss.detach())
                if iteration % 2 == 1:
                    optim.zero_grad(set_to_none=set_to_none)
                loss.backward()
            if iteration < 2:  # later, the optimizer's state would hide gradients of a wrong size
                self.assert_same_grads(fsdp_model, ddp_model, strategy)
            ddp_optim.step()
            fsdp_optim.step()
            ref_losses.append(losses[0])
            self.assertEqual(*losses)
        check_losses(ref_losses)
        self.assert_same_full_params(fsdp_model, ddp_model)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], skip_fsdp_guards=[True, False])
    def test_fsdp_compile(self, sharding_strategy, skip_fsdp_guards):
        """A compiled FSDP model trains like the uncompiled one and like DDP."""
        # Inductor's C++ compiler is not under test, and it takes minutes. So the CPU does not use it.
        backend = "inductor" if triton.has_triton() and not accelerator.current().is_cpu else "aot_eager"
        counter = dynamo_testing.CompileCounterWithBackend(backend)
        torch.manual_seed(0)
        plain = nn.Sequential(MLP(4), MLP(4))
        kwargs = {
            "auto_wrap_policy": ModuleWrapPolicy({MLP}),
            "backward_prefetch": BackwardPrefetch.BACKWARD_PRE,
            "sharding_strategy": sharding_strategy,
            "use_orig_params": True,
        }
        eager, compiled = (FSDP(copy.deepcopy(plain).to(self.device), **kwargs) for _ in range(2))
        models = [data_parallel(plain.to(self.device)), eager, torch.compile(compiled, backend=counter)]
        optims = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
        torch.manual_seed(1 + self.rank)
        with (
            internals.dynamo_config.patch(skip_fsdp_guards=skip_fsdp_guards),
            inductor_config.patch(compile_threads=1),  # a pool of processes would outlive this rank
        ):
            ref_losses = []
            for _ in range(self.num_iters):
                inp = torch.randn(2, 4, device=self.device)
                losses = []
                for model, optim in zip(models, optims):
                    optim.zero_grad()
                    # With the sum of the outputs as the loss, ReLUs and then all gradients would become zero.
                    losses.append((model(inp) - 1).square().mean())
                    losses[-1].backward()
                self.assert_same_grads(compiled, models[0], sharding_strategy)
                for optim in optims:
                    optim.step()
                self.assertEqual(losses[1], losses[0])
                self.assertEqual(losses[2], losses[0])
                ref_losses.append(losses[0])
        check_losses(ref_losses)
        self.assert_same_full_params(compiled, eager, models[0])
        self.assertGreater(counter.frame_count, 0, "nothing was compiled")

    @skip_if_lt_x_gpu(2)
    @parametrize("sharding_strategy_str", ["no_shard", "shard_grad_op", "full_shard"])
    def test_diff_hyperparams(self, sharding_strategy_str):
        """Parameters of one flat parameter may be in groups with different learning rates and weight decays."""
        device, strategy = accelerator.current(), STRATEGIES[sharding_strategy_str]
        options = {
            "init_optim_before_wrap": [False, True],
            "multi_tensor": [False, True],
            "set_to_none": [False, True],
            "skip_writeback_check": [False, True],
            "backward_prefetch": [None, *BackwardPrefetch],
        }
        # All 48 combinations take minutes on the CPU. Nothing overlaps there, so all pairs of values are enough.
        pairs = pairwise_cases({"sharding_strategy": list(STRATEGIES.values()), **options})
        mine = [case for case in pairs if case["sharding_strategy"] is strategy]
        for config in [{"sharding_strategy": [strategy], **options}] if device.has("streams") else one_by_one(mine):
            # On the CPU the modes are the same, since no module has to be moved.
            config["device_init_mode"] = list(DEVICEInitMode)[: 2 if device.has("device_memory") else 1]
            self.run_subtests(
                config,
                lambda **case: self._test_diff_hyperparams(Hyperparams(optim_class=torch.optim.AdamW, **case)),
            )

    @skip_if_lt_x_gpu(2)
    @parametrize("sharding_strategy_str", ["no_shard", "shard_grad_op", "full_shard"])
    def test_diff_hyperparams_cpu_offload(self, sharding_strategy_str):
        """Like :meth:`test_diff_hyperparams`, with parameters and gradients that are offloaded to the CPU."""
        for skip_writeback_check in (False, True):
            self._test_diff_hyperparams(
                Hyperparams(
                    optim_class=torch.optim.Adam,
                    sharding_strategy=STRATEGIES[sharding_strategy_str],
                    set_to_none=skip_writeback_check,
                    skip_writeback_check=skip_writeback_check,
                    offload_params=True,
                )
            )

    def _test_diff_hyperparams(self, case: Hyperparams) -> None:
        ddp_model = data_parallel(self._transformer())
        ddp_optim = self._get_optim(ddp_model, case.optim_class, case.multi_tensor)
        is_moved = case.device_init_mode is DEVICEInitMode.DEVICE_BEFORE
        plain = self._transformer() if is_moved else copy.deepcopy(self._plain)
        early = self._get_optim(plain, case.optim_class, case.multi_tensor) if case.init_optim_before_wrap else None
        with internals.switched("FSDP_SKIP_WRITEBACK_CHECK", case.skip_writeback_check):
            fsdp_model = FSDP(
                plain,
                auto_wrap_policy=LAYERS,
                use_orig_params=True,
                sharding_strategy=case.sharding_strategy,
                backward_prefetch=case.backward_prefetch,
                cpu_offload=CPUOffload(case.offload_params),
            )
        if case.device_init_mode is DEVICEInitMode.DEVICE_AFTER:
            fsdp_model = fsdp_model.to(self.device)
        fsdp_optim = early or self._get_optim(fsdp_model, case.optim_class, case.multi_tensor)
        self._check_train_parity(ddp_model, ddp_optim, fsdp_model, fsdp_optim, case.set_to_none)

    @skip_if_lt_x_gpu(2)
    @subtests(multi_tensor=[False, True], sharding_strategy=[FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
    def test_diff_trainability(self, multi_tensor, sharding_strategy):
        """Biases that are frozen after wrapping do not change. The weights in the same flat parameters train."""
        ddp_model = data_parallel(self._transformer(), find_unused_parameters=True)
        fsdp_model = self._transformer(use_orig_params=True, sharding_strategy=sharding_strategy)
        optims, biases = [], []
        for model in (ddp_model, fsdp_model):
            frozen = {name: param for name, param in named(model).items() if "bias" in name}
            for param in frozen.values():
                param.requires_grad_(False).fill_(0.1)  # the biases of attention are initialized with zeros
            biases.append({name: param.detach().clone() for name, param in frozen.items()})
            optims.append(self._get_optim(model, torch.optim.Adam, multi_tensor))
        self._check_train_parity(ddp_model, optims[0], fsdp_model, optims[1], set_to_none=False)
        for model, before in zip((ddp_model, fsdp_model), biases):
            after = {name: param.detach() for name, param in named(model).items() if "bias" in name}
            self.assertGreater(len(after), 0)
            self.assertEqual(after, before, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[FULL_SHARD, SHARD_GRAD_OP])
    def test_multiple_optimizers(self, sharding_strategy):
        """One optimizer has the weights, another has the biases. Only the former clears its gradients."""
        ddp_model = data_parallel(self._transformer())
        fsdp_model = self._transformer(use_orig_params=True, sharding_strategy=sharding_strategy)
        models = ddp_model, fsdp_model
        # Otherwise no flat gradient would be partly cleared, and the test would check nothing.
        kinds = [
            {"bias" if "bias" in name else "weight" for name in handle._fqns_in_shard}
            for handle in internals.handles(fsdp_model)
        ]
        self.assertIn({"weight", "bias"}, kinds)
        weight_optims, bias_optims = [], []
        for model in models:
            params = named(model)
            weight_optims.append(
                torch.optim.Adam([params[name] for name in params if "weight" in name], lr=5e-3, eps=EPS)
            )
            bias_optims.append(torch.optim.AdamW([params[name] for name in params if "bias" in name], lr=1e-2, eps=EPS))
            self.assertEqual(
                len(weight_optims[-1].param_groups[0]["params"]) + len(bias_optims[-1].param_groups[0]["params"]),
                len(params),
            )
        inputs = self._tokens()

        def forward() -> list[torch.Tensor]:
            losses = [model.module.get_loss(inputs, model(*inputs)) for model in models]
            self.assertEqual(*losses)
            return losses

        def backward_and_step(losses: list[torch.Tensor]) -> None:
            for loss, *optims in zip(losses, weight_optims, bias_optims):
                loss.backward()
                for optim in optims:
                    optim.step()
            self.assert_same_full_params(fsdp_model, ddp_model)

        backward_and_step(forward())
        for optim in weight_optims:
            optim.zero_grad(set_to_none=True)
        losses = forward()
        if sharding_strategy is FULL_SHARD:  # SHARD_GRAD_OP does not expose gradients between forward and backward
            of_ddp, of_fsdp = ({name: param.grad for name, param in named(model).items()} for model in models)
            for name, param in named(fsdp_model).items():
                if param.numel() == 0:
                    self.assertIsNone(param.grad, name)
                else:
                    self.assertEqual(param.grad is None, of_ddp[name] is None, name)
                    self.assertEqual(param.grad is None, "weight" in name, name)
            self.assertEqual(self._joined(of_fsdp), flattened(of_ddp))
            self.assertEqual(self._joined(named(fsdp_model)), flattened(named(ddp_model)))
        backward_and_step(losses)
        # Adam's bias correction depends on the number of steps, so a zero gradient in place of None would show here.
        backward_and_step(forward())


class TestFSDPUseOrigParamsUnshardReshard(UseOrigParamsTest):
    """Models that unshard and reshard repeatedly match ``use_orig_params=False`` and DDP."""

    def _get_models_and_optims(
        self, sharding_strategy: ShardingStrategy, cpu_offload: CPUOffload
    ) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        kwargs = {"sharding_strategy": sharding_strategy, "cpu_offload": cpu_offload}
        models = [
            # DDP's broadcast of buffers may overwrite what an earlier forward saved for backward.
            data_parallel(self._transformer(), broadcast_buffers=False),
            *(self._transformer(use_orig_params=use_orig_params, **kwargs) for use_orig_params in (False, True)),
        ]
        return models, [torch.optim.Adam(model.parameters(), foreach=False, lr=1e-2, eps=EPS) for model in models]

    def assert_all_equal(self, tensors: list[torch.Tensor]) -> None:
        for tensor in tensors[1:]:
            self.assertEqual(tensor, tensors[0])

    @skip_if_lt_x_gpu(2)
    @parametrize("offload_params", [False, True])
    @subtests(sharding_strategy=[NO_SHARD, SHARD_GRAD_OP, FULL_SHARD])
    def test_multiple_forward(self, offload_params, sharding_strategy):
        """Two forwards before one backward give the losses and parameters of DDP."""
        cpu_offload = CPUOffload(offload_params)
        models, optims = self._get_models_and_optims(sharding_strategy, cpu_offload)
        first = self._tokens()
        second = tuple((tokens + 1) % 23 for tokens in first)
        for _ in range(3):
            losses = []
            for model, optim in zip(models, optims):
                optim.zero_grad()
                outputs = [model(*first), model(*second)]
                losses.append((outputs[0] + outputs[1]).square().mean())
            self.assert_all_equal(losses)
            for loss, optim in zip(losses, optims):
                loss.backward()
                optim.step()
        self.assert_same_full_params(*models)

    @skip_if_lt_x_gpu(2)
    @parametrize("offload_params", [False, True])
    @subtests(sharding_strategy=[NO_SHARD, SHARD_GRAD_OP, FULL_SHARD])
    def test_summon_between_two_forwards(self, offload_params, sharding_strategy):
        """``summon_full_params(writeback=True)`` between two forwards does not change the training."""
        cpu_offload = CPUOffload(offload_params)
        models, optims = self._get_models_and_optims(sharding_strategy, cpu_offload)
        # If the flat parameter moves, both forwards need a backward; see test_forward_without_backward_with_offload.
        moves = cpu_offload.offload_params and accelerator.current().has("device_memory")
        first = self._tokens()
        second = tuple((tokens + 1) % 23 for tokens in first)
        for uses_both in (True, moves, True):
            for optim in optims:
                optim.zero_grad()
            before = [model(*first) for model in models]
            self.assert_all_equal(before)
            self.assert_same_full_params(*models, writeback=True)
            outputs = [model(*second) for model in models]
            self.assert_all_equal(outputs)
            for earlier, output, optim in zip(before, outputs, optims):
                used = [earlier, output] if uses_both else [output]
                torch.stack(used).square().mean().backward()
                optim.step()
        self.assert_same_full_params(*models)


class TestFSDPUseOrigParamsParamAccess(UseOrigParamsTest):
    """Parameters, gradients and optimizer state outside forward and backward."""

    # The number of elements of each parameter on rank 0 and on rank 1. Each flat parameter is cut in two halves. In it,
    # each parameter begins at a multiple of 16 bytes, so the 7 elements of 2.bias begin at element 36 of 44.
    LOCAL = {"0.weight": (13, 12), "2.weight": (22, 13), "2.bias": (0, 7)}

    def _model(self) -> nn.Sequential:
        torch.manual_seed(42)
        return nn.Sequential(nn.Linear(5, 5, bias=False), nn.ReLU(), nn.Linear(5, 7)).to(self.device)

    def _fsdp(self, sharding_strategy: ShardingStrategy) -> FSDP:
        return FSDP(
            self._model(),
            sharding_strategy=sharding_strategy,
            auto_wrap_policy=always_wrap_policy,
            use_orig_params=True,
        )

    def _local(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's elements of a full tensor, flattened."""
        of_first, of_second = self.LOCAL[name]
        self.assertEqual(of_first + of_second, full.numel())
        return full.flatten()[:of_first] if self.rank == 0 else full.flatten()[of_first:]

    def assert_local(self, model: FSDP, reference: nn.Module, is_sharded: bool) -> None:
        """Parameters and gradients must be this rank's shards of the reference's. The gradient of an empty shard is
        None.
        """
        expected = named(reference)
        actual = named(model)
        self.assertEqual(list(actual), list(expected))
        for name, param in actual.items():
            value, grad = expected[name].detach(), expected[name].grad
            if is_sharded:
                value = self._local(name, value)
                grad = None if grad is None or value.numel() == 0 else self._local(name, grad)
            self.assertEqual(param.detach(), value, may_be="empty")
            self.assertEqual(param.grad, grad)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[NO_SHARD, FULL_SHARD, SHARD_GRAD_OP])
    def test_access_params_after_forward(self, sharding_strategy):
        """Parameters are local shards after a forward that reshards or runs under ``no_grad``, and after backward."""
        models = data_parallel(self._model()), self._fsdp(sharding_strategy)
        ddp_model, fsdp_model = models
        optims = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
        torch.manual_seed(42 + self.rank)

        def assert_unsharded_after_forward() -> None:
            # Under SHARD_GRAD_OP the model still has the tensors used in forward: views without gradients.
            shown = {name: param.detach().clone() for name, param in named(fsdp_model).items()}
            self.assertEqual(shown, {name: param.detach() for name, param in named(ddp_model).items()})

        ref_losses = []
        for _ in range(3):
            inp = torch.randn(2, 5, device=self.device)
            losses = [model(inp).square().sum() for model in models]
            ref_losses.append(losses[0])
            self.assertEqual(*losses)
            if sharding_strategy is SHARD_GRAD_OP:
                assert_unsharded_after_forward()
            else:
                self.assert_local(fsdp_model, ddp_model, sharding_strategy is FULL_SHARD)
            for loss, optim in zip(losses, optims):
                loss.backward()
                optim.step()
            self.assert_local(fsdp_model, ddp_model, sharding_strategy is not NO_SHARD)
            for optim in optims:
                optim.zero_grad()
            with torch.no_grad():
                fsdp_model(inp)
            self.assert_local(fsdp_model, ddp_model, sharding_strategy is not NO_SHARD)
        check_losses(ref_losses)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[NO_SHARD, FULL_SHARD, SHARD_GRAD_OP])
    def test_parameters_are_views_of_the_local_shard(self, sharding_strategy):
        """After backward, parameters are views of the local shard, and the unsharded flat parameter is freed."""
        model = self._fsdp(sharding_strategy)
        flat_params = internals.flat_params(model)
        self.assertEqual(len(flat_params), 2)  # neither the ReLU nor the root has parameters of its own
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(torch.ones(2, 5, device=self.device)).sum()
            sharded = [] if sharding_strategy is NO_SHARD else flat_params
            gathered = [internals.is_unsharded(flat_param) for flat_param in sharded]
            self.assertEqual(gathered, [sharding_strategy is SHARD_GRAD_OP] * len(sharded), may_be="empty")
            loss.backward()
            self.assertEqual(
                [internals.is_unsharded(flat_param) for flat_param in sharded], [False] * len(sharded), may_be="empty"
            )
            for flat_param in flat_params:
                self.assertEqual(flat_param.data_ptr(), internals.local_shard(flat_param).data_ptr())
                for param, info in zip(flat_param._params, internals.shard_infos(flat_param), strict=True):
                    self.assertEqual(param.numel() > 0, info.in_shard)
                    if info.in_shard:
                        for mine, whole in ((param, flat_param), (param.grad, flat_param.grad)):
                            start = whole.data_ptr() + info.offset_in_shard * whole.element_size()
                            self.assertEqual(mine.data_ptr(), start)
            optim.step()
            optim.zero_grad()

    @skip_if_lt_x_gpu(2)
    def test_optimizer_state_is_local(self):
        """Optimizer states have the shape of the local shard. An empty shard has no gradient and no state."""
        for sharding_strategy in (FULL_SHARD, SHARD_GRAD_OP):
            model = self._fsdp(sharding_strategy)
            optim = torch.optim.Adam(model.parameters(), lr=1e-2)
            for _ in range(2):
                optim.zero_grad()
                model(torch.ones(2, 5, device=self.device)).sum().backward()
                optim.step()
            with_state = []
            for name, param in named(model).items():
                numel = self.LOCAL[name][self.rank]
                if numel == 0:
                    self.assertIsNone(param.grad)
                    self.assertNotIn(param, optim.state)
                    continue
                with_state.append(param)
                for key in ("exp_avg", "exp_avg_sq"):
                    self.assertEqual(optim.state[param][key].shape, (numel,))
                self.assertEqual(optim.state[param]["step"].item(), 2)
            self.assertEqual(len(optim.state), len(with_state))
            self.assertEqual(len(with_state), 2 if self.rank == 0 else 3)


class TestFSDPUseOrigParamsWriteback(UseOrigParamsTest):
    """Writeback: a new parameter or gradient is copied into the flat parameter or its gradient."""

    class Model(nn.Module):
        """The model has one flat parameter. ``lin1`` is on rank 0 only. Both ranks have elements of ``lin2.weight``."""

        def __init__(self, device: torch.device) -> None:
            super().__init__()
            torch.manual_seed(42)
            self.lin1 = nn.Linear(5, 5, bias=True, device=device)
            self.relu = nn.ReLU()
            self.lin2 = nn.Linear(5, 7, bias=True, device=device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lin2(self.relu(self.lin1(x)))

        def get_input(self, rank: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(1 + rank)
            return torch.randn((2, 5), generator=generator).to(self.lin1.weight.device)

    def _models(self, **fsdp_kwargs: Any) -> tuple[nn.Module, FSDP]:
        return data_parallel(self.Model(self.device)), FSDP(
            self.Model(self.device), use_orig_params=True, **fsdp_kwargs
        )

    def _loss(self, model: nn.Module) -> torch.Tensor:
        return model(model.module.get_input(self.rank)).sum()

    def _take_step(self, models: Iterable[nn.Module]) -> None:
        for model in models:
            self._loss(model).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()

    def _layer(self, model: nn.Module, first: bool) -> nn.Linear:
        return model.module.lin1 if first else model.module.lin2

    def _test_param_writeback(
        self, models: tuple[nn.Module, FSDP], change_first_weight: bool, change_data: bool, dtype: torch.dtype
    ) -> None:
        """A new parameter, or new data of the old parameter, replaces the old values, also in another dtype."""
        for model in models:
            layer = self._layer(model, change_first_weight)
            twos = torch.full_like(layer.weight, 2.0, dtype=dtype if model is models[1] else None)
            if change_data:
                layer.weight.data = twos
            else:
                layer.weight = nn.Parameter(twos)
            changed = layer.weight
        self.assert_same_full_params(*models[::-1])
        # The new values are now in the flat parameter, and the new parameter is a view of it.
        flat_param, layer = internals.flat_param_of(models[1]), self._layer(models[1], change_first_weight)
        if layer.weight.numel() > 0:
            self.assertIs(layer.weight, changed)
            self.assertEqual(layer.weight.untyped_storage().data_ptr(), flat_param.untyped_storage().data_ptr())
            self.assertEqual(layer.weight.dtype, flat_param.dtype)
        self.assertEqual(self._loss(models[1]), self._loss(models[0]))

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        sharding_strategy=[FULL_SHARD, SHARD_GRAD_OP, NO_SHARD],
        change_first_weight=[True, False],
        change_data=[True, False],
        dtype=[torch.float32, torch.float64],
        after_step=[False, True],
    )
    def test_param_writeback(self, sharding_strategy, change_first_weight, change_data, dtype, after_step):
        models = self._models(sharding_strategy=sharding_strategy)
        if after_step:
            self._take_step(models)
        self._test_param_writeback(models, change_first_weight, change_data, dtype)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[FULL_SHARD, SHARD_GRAD_OP, NO_SHARD], change_data=[True, False])
    def test_param_writeback_with_offload(self, sharding_strategy, change_data):
        models = self._models(sharding_strategy=sharding_strategy, cpu_offload=CPUOffload(offload_params=True))
        self._take_step(models)
        self._test_param_writeback(models, False, change_data, torch.float32)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
    def test_param_writeback_before_use_with_offload(self, sharding_strategy):
        """Like :meth:`test_param_writeback_with_offload`, before the first unshard of the parameters."""
        models = self._models(sharding_strategy=sharding_strategy, cpu_offload=CPUOffload(offload_params=True))
        with torch_defect("fsdp1_replaced_offloaded_parameter_is_lost"):
            self._test_param_writeback(models, False, True, torch.float32)

    @skip_if_lt_x_gpu(2)
    @subtests(
        change_first_weight_grad=[False, True],
        change_data=[False, True],
        set_to_none=[False, True],
        # None has no data.
        valid=lambda change_first_weight_grad, change_data, set_to_none: not (change_data and set_to_none),
    )
    def test_grad_writeback(self, change_first_weight_grad, change_data, set_to_none):
        """The optimizer and the next backward continue from a gradient that was replaced or cleared."""
        models = self._models()
        optims = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
        for model in models:
            self._loss(model).backward()
        flat_grad = internals.flat_param_of(models[1]).grad.detach().clone()
        is_empty = False
        for model in models:
            weight = self._layer(model, change_first_weight_grad).weight
            is_empty = weight.numel() == 0  # that of the FSDP model, which comes last
            twos = torch.full_like(weight, 2.0)
            if set_to_none:
                weight.grad = None
            elif not change_data:
                weight.grad = twos
            elif weight.grad is not None:
                weight.grad.data = twos
        self.assertEqual(is_empty, change_first_weight_grad and self.rank == 1)
        if is_empty:
            # This rank has nothing to write, so nothing is written.
            others = {name: param.grad.clone() for name, param in named(models[1]).items() if param.numel() > 0}
            self.assertEqual(len(others), 2)
            with FSDP.summon_full_params(models[1], writeback=False):
                pass
            self.assertEqual(internals.flat_param_of(models[1]).grad, flat_grad, rtol=0, atol=0)
            for name, grad in others.items():
                self.assertEqual(named(models[1])[name].grad, grad, rtol=0, atol=0)
        elif change_first_weight_grad:
            with FSDP.summon_full_params(models[1], writeback=False):  # a collective: the other rank summons above
                pass
        for optim in optims:
            optim.step()
        self.assert_same_full_params(*models[::-1])

        for model in models:  # gradients are added to the new ones, since nothing clears them
            self._loss(model).backward()
        self.assert_same_grads(models[1], models[0], FULL_SHARD)
        for optim in optims:
            optim.step()
        self.assert_same_full_params(*models[::-1])

    @skip_if_lt_x_gpu(2)
    @subtests(skips=[False, True])
    def test_switch_that_skips_writeback(self, skips):
        with internals.switched("FSDP_SKIP_WRITEBACK_CHECK", skips):
            model = self._models()[1]
        before = internals.flat_param_of(model).detach().clone()
        for param in model.parameters():
            param.data = torch.full_like(param, 2.0)
        with torch.no_grad():
            self._loss(model)
        self.assertEqual(torch.equal(internals.flat_param_of(model), before), skips)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[FULL_SHARD, SHARD_GRAD_OP], change_data=[False, True])
    def test_grad_writeback_with_offload(self, sharding_strategy, change_data):
        """An offloaded gradient that was replaced is kept by a forward."""
        model = self._models(sharding_strategy=sharding_strategy, cpu_offload=CPUOffload(True))[1]
        self._loss(model).backward()
        twos = {param: torch.full_like(param, 2.0) for param in model.parameters() if param.grad is not None}
        for param, grad in twos.items():
            if change_data:
                param.grad.data = grad
            else:
                param.grad = grad
        with torch.no_grad():
            self._loss(model)
        self.assertEqual([param.grad for param in twos], [*twos.values()])

    @skip_if_lt_x_gpu(2)
    @subtests(change_data=[False, True])
    def test_grad_writeback_without_shards(self, change_data):
        """Under NO_SHARD, the next backward adds to a gradient that was replaced."""
        models = self._models(sharding_strategy=NO_SHARD)
        for model in models:
            self._loss(model).backward()
            for param in model.parameters():
                twos = torch.full_like(param, 2.0)
                if change_data:
                    param.grad.data = twos
                else:
                    param.grad = twos
            self._loss(model).backward()
        self.assert_same_grads(models[1], models[0], NO_SHARD)

    @skip_if_lt_x_gpu(2)
    def test_update_in_place_needs_no_writeback(self):
        """An in-place update, as by an optimizer, changes the flat parameter without a writeback."""
        models = self._models()
        handle_class = internals.flat_param.FlatParamHandle
        original = handle_class._writeback_tensor
        with torch_names.patched(handle_class, "_writeback_tensor", autospec=True, side_effect=original) as writeback:
            for _ in range(2):
                for model in models:
                    before = {name: param.data_ptr() for name, param in named(model).items()}
                    with torch.no_grad():
                        for param in model.parameters():
                            param.mul_(1.5)
                    self.assertEqual({name: param.data_ptr() for name, param in named(model).items()}, before)
                losses = [self._loss(model) for model in models]
                self.assertEqual(*losses)
                for loss in losses:
                    loss.backward()
                self.assert_same_full_params(*models[::-1])
            writeback.assert_not_called()
            with torch.no_grad():
                models[1].module.lin2.weight.data = torch.zeros_like(models[1].module.lin2.weight)
            self._loss(models[1])
            writeback.assert_called_once()  # a replaced tensor does call the mock

    @skip_if_lt_x_gpu(2)
    @subtests(change_param=[True, False])
    def test_writeback_shape_mismatch(self, change_param):
        """A replaced parameter or gradient with another shape raises at the next unshard."""
        model = FSDP(self.Model(self.device), use_orig_params=True)
        self._loss(model).backward()
        layer = self._layer(model, first=self.rank == 0)
        self.assertGreater(layer.weight.numel(), 0)
        larger = torch.ones([size + 1 for size in layer.weight.shape], device=self.device)
        if change_param:
            layer.weight = nn.Parameter(larger)
            layer.weight.grad = torch.ones_like(larger)
        else:
            layer.weight.grad.data = larger
        what = "parameter" if change_param else "gradient"
        with self.assertRaisesRegex(RuntimeError, f"Cannot writeback when the {what} shape changes"):
            with FSDP.summon_full_params(model):
                pass

    @skip_if_lt_x_gpu(2)
    @subtests(change_data=[True, False])
    def test_writeback_between_fwd_and_bwd_for_no_reshard_raises(self, change_data):
        """Backward raises if a parameter was replaced while it was unsharded, because there is no writeback then."""
        model = FSDP(
            self.Model(self.device), sharding_strategy=SHARD_GRAD_OP, auto_wrap_policy=LINEARS, use_orig_params=True
        )
        loss = self._loss(model)
        lin1 = model.module.lin1.module
        if change_data:
            lin1.weight.data = torch.ones_like(lin1.weight)
        else:
            lin1.weight = nn.Parameter(torch.ones_like(lin1.weight))
        with self.assertRaisesRegex(
            AssertionError, "FSDP does not support changing the parameters between forward and backward"
        ):
            loss.backward()

    @skip_if_lt_x_gpu(2)
    @subtests(use_full_prec_in_eval=[False, True], unused_forwards=[False, True])
    def test_no_reshard_and_mixed_precision(self, use_full_prec_in_eval, unused_forwards):
        """SHARD_GRAD_OP keeps low precision parameters unsharded after forward. Then ``summon_full_params``, forwards
        in eval mode and ``load_state_dict`` still work.

        With ``unused_forwards``, some forwards have no backward. Gradients are then not compared because of the defect
        in test_forward_without_backward_in_mixed_precision.
        """
        with internals.switched("FSDP_USE_FULL_PREC_IN_EVAL", use_full_prec_in_eval):
            model = FSDP(
                self.Model(self.device),
                sharding_strategy=SHARD_GRAD_OP,
                auto_wrap_policy=LINEARS,
                mixed_precision=MixedPrecision(param_dtype=torch.float16),
                use_orig_params=True,
            )
        reference = self.Model(self.device)
        inp = reference.get_input(self.rank)
        expected = reference(inp).detach()

        def check_forward(training: bool) -> torch.Tensor:
            output = model.train(training)(inp)
            in_full = use_full_prec_in_eval and not training
            self.assertEqual(output.dtype, torch.float32 if in_full else torch.float16)
            # Values are about one, from two layers of 5 terms each. The tolerance covers some half precision roundings.
            rtol, atol = (None, None) if in_full else (1e-2, 5e-3)
            self.assertEqual(output.float(), expected, rtol=rtol, atol=atol)
            return output

        if unused_forwards:
            check_forward(training=True)
            self.assert_same_full_params(model, reference)
            for training in (True, True, False):
                check_forward(training)
        check_forward(training=True).sum().backward()
        with torch.set_grad_enabled(unused_forwards):
            check_forward(training=False)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state_dict = copy.deepcopy(model.state_dict())
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            model.load_state_dict(state_dict)
        self.assert_same_full_params(model, reference)
        check_forward(training=False).sum().backward()
        if not unused_forwards:
            actual = self._joined({name: param.grad for name, param in named(model).items()})
            for name, param in named(self._averaged(inp)).items():
                # The sum of two backwards, each with half precision roundings.
                self.assertEqual(actual[name], 2 * param.grad.flatten().cpu(), rtol=1e-2, atol=1e-2)

    @skip_if_lt_x_gpu(2)
    def test_forward_without_backward_in_mixed_precision(self):
        """The gradients of a forward are right if the forward before it had no backward."""
        mixed_precision = MixedPrecision(param_dtype=torch.float16)
        _, model = self._models(auto_wrap_policy=LINEARS, mixed_precision=mixed_precision)
        inp = model.module.get_input(self.rank)
        model(inp)
        model(inp).sum().backward()
        actual = self._joined({name: param.grad for name, param in named(model).items()})
        for name, param in named(self._averaged(inp)).items():
            with self.subTest(name=name), torch_defect("fsdp1_unused_forward_costs_reduction"):
                self.assertIsNotNone(actual[name])
                self.assertEqual(actual[name], param.grad.flatten().cpu(), rtol=5e-3, atol=5e-3)

    @skip_if_lt_x_gpu(2)
    def test_update_in_place_between_forwards(self):
        """A forward uses in-place updates of parameters, even without a backward since the last forward."""
        model = self._models()[1].eval()
        inp = model.module.get_input(self.rank)
        with torch.no_grad():
            self.assertGreater(model(inp).abs().sum().item(), 0)
            for param in model.parameters():
                param.zero_()
            output = model(inp)
        with torch_defect("fsdp1_update_between_forwards_is_not_seen"):
            self.assertEqual(output, torch.zeros(2, 7, device=self.device), may_be="zero")

    def _averaged(self, inp: torch.Tensor) -> nn.Module:
        """The plain model after a backward, with gradients that are averaged over the ranks."""
        model = self.Model(self.device)
        model(inp).sum().backward()
        average_gradients(model)
        return model


class TestFSDPUseOrigParamsFQNs(UseOrigParamsTest):
    @skip_if_lt_x_gpu(2)
    def test_named_parameters_in_forward(self):
        """In forward, ``named_parameters`` has the plain model's names, and shapes if the parameters are unsharded."""
        shapes: dict[str, torch.Size] = {}

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(5, 5)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                shapes.update((internals.clean_name(name), param.shape) for name, param in self.named_parameters())
                return self.lin(x)

        for strategy, policy in itertools.product(STRATEGIES.values(), (None, LINEARS)):
            shapes.clear()
            kwargs = {"sharding_strategy": strategy, "auto_wrap_policy": policy, "use_orig_params": True}
            model = FSDP(Model().to(self.device), **kwargs)
            model(torch.ones(2, 5, device=self.device))
            self.assertEqual(list(shapes), ["lin.weight", "lin.bias"])
            # A child in FSDP is unsharded in its own forward, but not yet in its parent's forward.
            if policy is None or strategy is NO_SHARD:
                self.assertEqual(list(shapes.values()), [(5, 5), (5,)])


class TestFSDPUseOrigParamsNoSync(UseOrigParamsTest):
    """In ``no_sync()``, gradients accumulate unsharded, and each rank keeps its own."""

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
    def test_no_sync_correctness(self, sharding_strategy):
        """Parameters and gradients match those with ``use_orig_params=False``. After a reduction they match DDP."""
        torch.manual_seed(0)
        plain = nn.Linear(7, 1, bias=False, device=self.device)
        models = [
            FSDP(copy.deepcopy(plain), sharding_strategy=sharding_strategy, use_orig_params=use_orig_params)
            for use_orig_params in (False, True)
        ]
        flat, orig = models
        ddp_model = data_parallel(plain)
        everyone = [ddp_model, flat, orig]
        optims = [torch.optim.AdamW(model.parameters(), foreach=True) for model in everyone]
        torch.manual_seed(1 + self.rank)
        inp = torch.randn(2, 7, device=self.device)

        def assert_same_local(is_unsharded: bool = False) -> None:
            (of_flat,), (of_orig,) = (list(model.parameters()) for model in models)
            self.assertEqual(of_flat.flatten()[: of_orig.numel()], of_orig.flatten())
            if of_orig.numel() == 0:
                self.assertIsNone(of_orig.grad)
                return
            self.assertEqual(of_flat.grad is None, of_orig.grad is None)
            # The flat gradient may end in padding. In ``no_sync()`` both gradients are unsharded.
            self.assertEqual(of_flat.grad.flatten()[: of_orig.grad.numel()], of_orig.grad.flatten())
            if is_unsharded:
                self.assertEqual(of_orig.grad.numel(), 7)

        def backward() -> None:
            losses = [model(inp).square().sum() for model in everyone]
            self.assertEqual(losses[1], losses[0])
            self.assertEqual(losses[2], losses[0])
            for loss in losses:
                loss.backward()

        backward()
        assert_same_local()
        self.assert_same_grads(orig, ddp_model, sharding_strategy)
        reference_grad = None if (grad := next(orig.parameters()).grad) is None else grad.detach().clone()
        for optim in optims:
            optim.zero_grad(set_to_none=True)
        with contextlib.ExitStack() as stack:
            for model in everyone:
                stack.enter_context(model.no_sync())
            backward()
        # Each rank has the same gradient as with DDP: neither reduced nor sharded.
        (of_orig,) = orig.parameters()
        self.assertEqual(of_orig.grad.flatten(), next(ddp_model.parameters()).grad.flatten())
        assert_same_local(is_unsharded=True)
        backward()
        assert_same_local()
        self.assert_same_grads(orig, ddp_model, sharding_strategy)
        if reference_grad is not None:
            self.assertEqual(next(orig.parameters()).grad, 2 * reference_grad)
        for optim in optims:
            optim.step()
        self.assert_same_full_params(orig, flat, ddp_model)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[FULL_SHARD, SHARD_GRAD_OP, NO_SHARD])
    def test_no_sync_mixed_precision(self, sharding_strategy):
        """In ``no_sync()`` gradients accumulate in ``param_dtype``. Reduced gradients have full precision."""
        torch.manual_seed(0)
        plain = nn.Linear(3, 3, device=self.device)
        model = FSDP(
            copy.deepcopy(plain),
            sharding_strategy=sharding_strategy,
            mixed_precision=MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
            use_orig_params=True,
        )
        torch.manual_seed(1 + self.rank)
        inp = torch.randn(2, 3, device=self.device)

        def backward() -> set[torch.dtype]:
            model(inp).sum().backward()
            plain(inp).sum().backward()
            return {param.grad.dtype for param in model.parameters() if param.grad is not None}

        with model.no_sync():
            self.assertEqual(backward(), {torch.float16})
            self.assertEqual(backward(), {torch.float16})
            # The rank's own unsharded gradient, after two additions in half precision.
            for name, param in named(model).items():
                grad = named(plain)[name].grad
                self.assertEqual(param.grad.flatten().float(), grad.flatten(), rtol=4e-3, atol=4e-3)
        self.assertEqual(backward(), {torch.float32})
        average_gradients(plain)
        actual = {name: param.grad for name, param in named(model).items()}
        actual = actual if sharding_strategy is NO_SHARD else self._joined(actual)
        for name, param in named(plain).items():
            self.assertEqual(actual[name].flatten().cpu(), param.grad.flatten().cpu(), rtol=4e-3, atol=4e-3)


class TestFSDPUseOrigParamsInit(UseOrigParamsTest):
    @skip_if_lt_x_gpu(2)
    def test_non_uniform_requires_grad(self):
        """Some parameters of one instance may be frozen before wrapping, and stay frozen."""
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(self.device)
        expected = {"0.weight": True, "0.bias": False, "1.weight": True, "1.bias": False}
        for name, param in model.named_parameters():
            param.requires_grad_(expected[name])
        with self.assertRaisesRegex(ValueError, "Must flatten tensors with uniform `requires_grad`"):
            FSDP(copy.deepcopy(model), use_orig_params=False)
        fsdp_model = FSDP(model, use_orig_params=True)
        self.assertEqual(len(internals.handles(fsdp_model)), 1)
        self.assertEqual({name: param.requires_grad for name, param in named(fsdp_model).items()}, expected)
        fsdp_model(torch.ones(2, 3, device=self.device)).sum().backward()
        for name, param in named(fsdp_model).items():
            self.assertEqual(param.grad is not None, expected[name] and param.numel() > 0, name)
        self.assertEqual({name: param.requires_grad for name, param in named(fsdp_model).items()}, expected)


# If a parameter's local shard is empty, optimizers with foreach=True get tensors without elements.
class TestMultiTensorApply(TestCase):
    def _scaled_empty_tensors(self, device: torch.device) -> list[torch.Tensor]:
        tensors = [torch.empty(0, device=device) for _ in range(1000)]
        torch._foreach_mul_(tensors, 0.1)
        return tensors

    def test_multi_tensor_apply_size0_tensors_cpu(self):
        tensors = self._scaled_empty_tensors(torch.device("cpu"))  # the CPU is the subject
        self.assertEqual({tensor.shape for tensor in tensors}, {(0,)})

    @requires_capability("device_memory")
    def test_multi_tensor_apply_size0_tensors_cuda(self):
        tensors = self._scaled_empty_tensors(accelerator.current().device())
        self.assertEqual({tensor.shape for tensor in tensors}, {(0,)})


instantiate_parametrized_tests(TestFSDPUseOrigParamsMultipleParamGroups)
instantiate_parametrized_tests(TestFSDPUseOrigParamsUnshardReshard)

if __name__ == "__main__":
    run_tests()
