"""Activation checkpointing and offloading, around FSDP1 and within it, change neither loss nor gradients."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.fsdp1_cases import FewRanksTest
from torch_fsdp_tests.fsdp.references import average_gradients, data_parallel, named
from torch_fsdp_tests.installed_torch import torch_names

_save_on_cpu_called = False


def get_patched_save_on_cpu() -> Callable[..., Any]:
    """``save_on_cpu``, with a record that it was called."""
    original = torch.autograd.graph.save_on_cpu

    def patched_save_on_cpu(*args: Any, **kwargs: Any) -> Any:
        global _save_on_cpu_called
        _save_on_cpu_called = True
        return original(*args, **kwargs)

    return patched_save_on_cpu


def patch_save_on_cpu(new_save_on_cpu: Callable[..., Any]) -> AbstractContextManager[Any]:
    """In the context, the offload wrapper calls this function in place of ``save_on_cpu``."""
    return torch_names.patched(internals.checkpoint_wrapping, "save_on_cpu", new_save_on_cpu)


def _wrapper(offload_activations: bool) -> Callable[[nn.Module], nn.Module]:
    wrapping = internals.checkpoint_wrapping
    return wrapping.offload_wrapper if offload_activations else wrapping.checkpoint_wrapper


class _CheckpointTest(FewRanksTest):
    def _input(self, *shape: int) -> torch.Tensor:
        """A random input, different on each rank."""
        return torch.randn(shape).to(self.device).requires_grad_()


class TestFSDPCheckpoint(_CheckpointTest):
    class SequentialModule(nn.Module):
        """Three layers. Each may have a checkpoint or offloaded activations, and FSDP around that."""

        def __init__(
            self,
            checkpoint_layer: bool = False,
            offload_activations: bool = False,
            wrap_fsdp: bool = False,
            *fsdp_args: Any,
            widths: Sequence[int] = (3, 3, 3, 3),
            **fsdp_kwargs: Any,
        ) -> None:
            super().__init__()
            torch.manual_seed(0)
            device = accelerator.current().device(dist.get_rank())
            layers: list[nn.Module] = [
                nn.Linear(inputs, outputs, device=device) for inputs, outputs in itertools.pairwise(widths)
            ]
            if checkpoint_layer:
                layers = [_wrapper(offload_activations)(layer) for layer in layers]
            if wrap_fsdp:
                layers = [FSDP(layer, *fsdp_args, **fsdp_kwargs) for layer in layers]
            self.ffn = nn.Sequential(*layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.ffn(x)

    def _full_grads(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """All full gradients by parameter name, without the prefixes of wrappers."""
        handles = internals.handles(model)
        if handles and not handles[0]._use_orig_params:
            return self._gathered_grads(model)
        # Each layer in FSDP may be a root, so each root is summoned separately.
        with contextlib.ExitStack() as stack:
            for root in FSDP.fsdp_modules(model, root_only=True):
                stack.enter_context(FSDP.summon_full_params(root, with_grads=True, writeback=False))
            return {name: param.grad.clone() for name, param in named(model).items()}

    def _gathered_grads(self, model: nn.Module) -> dict[str, torch.Tensor]:
        grads = {}
        for unit, names in internals.names_managed(model).items():
            flat_param = internals.flat_param_of(internals.instances(model)[unit])
            grad = flat_param.grad.to(self.device)  # it may be offloaded
            shards = [torch.empty_like(grad) for _ in range(self.world_size)]
            dist.all_gather(shards, grad)
            shapes = internals.shapes_in(flat_param)
            pieces = torch.cat(shards)[: internals.numel_of(flat_param)].split([shape.numel() for shape in shapes])
            for name, shape, piece in zip(names, shapes, pieces):
                grads[internals.clean_name(name)] = piece.view(shape)
        return grads

    def _verify_parity(
        self, losses: list[torch.Tensor], outputs: list[torch.Tensor], models: Sequence[nn.Module]
    ) -> None:
        """Compare all results with the first ones, those of the model without FSDP and checkpoints."""
        self.assertGreater(len(losses), 1)
        self.assertEqual([len(outputs), len(models)], [len(losses)] * 2)
        grads = [self._full_grads(model) for model in models]
        for loss, output, grad in zip(losses[1:], outputs[1:], grads[1:]):
            self.assertEqual(loss, losses[0])
            self.assertEqual(output, outputs[0])
            self.assertEqual(grad, grads[0], exact_device=False)

    def _check_iterations(
        self,
        calls: Sequence[Callable[..., torch.Tensor]],
        models: Sequence[nn.Module],
        num_iters: int,
        cpu_offload: CPUOffload,
        offloading: Sequence[int] = (),
    ) -> None:
        """Train by ``calls`` and compare after each iteration. In the first, the models ``offloading``, and no others,
        must offload activations.
        """
        global _save_on_cpu_called
        torch.manual_seed(self.rank + 1)
        for iteration in range(num_iters):
            x = self._input(10, 3)
            if cpu_offload.offload_params:
                models[0].zero_grad()  # because offloaded gradients do not accumulate
            losses: list[torch.Tensor] = []
            outputs: list[torch.Tensor] = []
            for index, call in enumerate(calls):
                _save_on_cpu_called = False
                output = call(x)
                if iteration == 0:
                    self.assertEqual(_save_on_cpu_called, index in offloading)
                losses.append(output.sum())
                outputs.append(output.detach())
                losses[-1].backward()
            self._verify_parity(losses, outputs, models)
        dist.barrier()

    @skip_if_lt_x_gpu(2)
    @parametrize("cpu_offload", [CPUOffload(offload_params=True), CPUOffload(offload_params=False)])
    @parametrize("offload_activations", [True, False])
    @parametrize("use_orig_params", [False, True])
    def test_checkpoint_fsdp_wrapping(self, **config):
        """One checkpoint around three layers in FSDP; and FSDP around a checkpoint of each layer."""
        self._test_checkpoint_fsdp_wrapping(**config)

    def _test_checkpoint_fsdp_wrapping(
        self,
        cpu_offload: CPUOffload,
        offload_activations: bool,
        use_orig_params: bool,
        widths: Sequence[int] = (3, 3, 3, 3),
    ) -> None:
        kwargs = {"cpu_offload": cpu_offload, "use_orig_params": use_orig_params, "widths": widths}
        models = [
            data_parallel(self.SequentialModule(widths=widths)),
            _wrapper(offload_activations)(self.SequentialModule(wrap_fsdp=True, **kwargs)),
            self.SequentialModule(
                checkpoint_layer=True, offload_activations=offload_activations, wrap_fsdp=True, **kwargs
            ),
            self.SequentialModule(wrap_fsdp=True, **kwargs),
        ]
        with patch_save_on_cpu(get_patched_save_on_cpu()):
            self._check_iterations(models, models, 2, cpu_offload, (1, 2) if offload_activations else ())

    @skip_if_lt_x_gpu(2)
    @parametrize("cpu_offload", [CPUOffload(offload_params=True), CPUOffload(offload_params=False)])
    @parametrize("offload_activations", [True, False])
    @parametrize("use_orig_params", [False, True])
    def test_basic_checkpoint_end_to_end(self, **config):
        """A checkpoint around FSDP; FSDP around a checkpoint; and a checkpoint only for the call of FSDP."""
        self._test_basic_checkpoint_end_to_end(**config)

    def _test_basic_checkpoint_end_to_end(
        self,
        cpu_offload: CPUOffload,
        offload_activations: bool,
        use_orig_params: bool,
        widths: Sequence[int] = (3, 3, 3, 3),
    ) -> None:
        kwargs = {"cpu_offload": cpu_offload, "use_orig_params": use_orig_params}
        wrapper = _wrapper(offload_activations)
        plain = self.SequentialModule(widths=widths)
        models = [
            data_parallel(copy.deepcopy(plain)),
            FSDP(copy.deepcopy(plain), **kwargs),
            wrapper(FSDP(copy.deepcopy(plain), **kwargs)),
            FSDP(wrapper(copy.deepcopy(plain)), **kwargs),
            FSDP(copy.deepcopy(plain), **kwargs),
        ]
        save_on_cpu = get_patched_save_on_cpu()

        def call_in_checkpoint(x: torch.Tensor) -> torch.Tensor:
            context = save_on_cpu(pin_memory=True) if offload_activations else contextlib.nullcontext()
            with context:
                return checkpoint(models[-1], x, use_reentrant=True)

        with patch_save_on_cpu(save_on_cpu):
            calls = [*models[:-1], call_in_checkpoint]
            self._check_iterations(calls, models, 6, cpu_offload, (2, 3, 4) if offload_activations else ())

    @skip_if_lt_x_gpu(2)
    def test_uneven_shards(self):
        """Layers have 16, 25 and 12 elements, so one layer and the whole model have an odd number."""
        config = {"offload_activations": [True, False], "use_orig_params": [False, True]}
        for test in (self._test_checkpoint_fsdp_wrapping, self._test_basic_checkpoint_end_to_end):
            self.run_subtests(config, test, cpu_offload=CPUOffload(offload_params=False), widths=(3, 4, 5, 2))

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
    def test_how_often_recomputation_gathers(self, sharding_strategy):
        """A checkpoint around FSDP adds all-gathers for its recomputation. A checkpoint within FSDP does not."""
        kwargs = {"sharding_strategy": sharding_strategy, "backward_prefetch": None}
        torch.manual_seed(self.rank)
        x = self._input(10, 3)
        models = {
            "without": FSDP(self.SequentialModule(wrap_fsdp=True, **kwargs), **kwargs),
            "within": FSDP(self.SequentialModule(checkpoint_layer=True, wrap_fsdp=True, **kwargs), **kwargs),
            "around": FSDP(
                _wrapper(offload_activations=False)(self.SequentialModule(wrap_fsdp=True, **kwargs)), **kwargs
            ),
        }
        actual = {}
        # With early stop, recomputation ends within the last layer. Otherwise it runs to the end.
        for name, stops_early in (("without", True), ("within", True), ("around", True), ("around", False)):
            model = models[name]
            gathers: list[internals.Handle] = []
            with internals.recorded_gathers(gathers.append), set_checkpoint_early_stop(stops_early):
                loss = model(x).sum()
                in_forward = len(gathers)
                loss.backward()
            actual[name, stops_early] = in_forward, len(gathers) - in_forward
            self.assertFalse(any(map(internals.is_unsharded, internals.flat_params(model))))
        if sharding_strategy is ShardingStrategy.FULL_SHARD:
            # When recomputation begins, the last of the three layers is already unsharded, and stays unsharded. The
            # first two are all-gathered for it, freed, and all-gathered again for their own backward.
            expected = [(3, 3), (3, 3), (3, 5), (3, 5)]
            self.assertEqual(list(actual.values()), expected)
        else:
            self.assertEqual(actual, dict.fromkeys(actual, (3, 0)))


class CheckpointModule(nn.Module):
    def __init__(self, checkpoint: bool = False, use_reentrant: bool = True) -> None:
        super().__init__()
        self.seq = nn.Sequential(*(nn.Linear(100, 100) for _ in range(4)))
        self.checkpoint = checkpoint
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.seq, x, use_reentrant=self.use_reentrant) if self.checkpoint else self.seq(x)


class ModelWithCheckpointSubmodule(nn.Module):
    def __init__(self, checkpoint: bool = False, use_reentrant: bool = True) -> None:
        super().__init__()
        self.l1 = nn.Linear(100, 100)
        self.s1 = CheckpointModule(checkpoint, use_reentrant)
        self.s2 = CheckpointModule(checkpoint, use_reentrant)
        self.relu = nn.ReLU()
        self.l2 = nn.Linear(100, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l2(self.relu(self.s2(self.s1(self.l1(x)))))


class TestModel(nn.Module):
    def __init__(self, checkpoint: bool = False, use_reentrant: bool = True) -> None:
        super().__init__()
        self.l1 = nn.Linear(100, 100)
        self.relu = nn.ReLU()
        self.checkpoint1 = ModelWithCheckpointSubmodule(checkpoint, use_reentrant)
        self.checkpoint2 = ModelWithCheckpointSubmodule(checkpoint, use_reentrant)
        self.l2 = nn.Linear(100, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l2(self.relu(self.checkpoint2(self.checkpoint1(self.l1(x)))))


class TestFSDPCheckpointSubmodule(_CheckpointTest):
    def _models(self, use_reentrant: bool, sharding_strategy: ShardingStrategy) -> tuple[TestModel, ...]:
        """The same model without FSDP, with FSDP, and with FSDP and checkpoints."""
        torch.manual_seed(0)
        plain = TestModel(use_reentrant=use_reentrant).to(self.device)
        without, within = copy.deepcopy(plain), copy.deepcopy(plain)
        for module in within.modules():
            if isinstance(module, CheckpointModule):
                module.checkpoint = True
        for model in (without, within):
            for name in ("checkpoint1", "checkpoint2"):
                flags = [getattr(getattr(model, name), child).checkpoint for child in ("s1", "s2")]
                self.assertEqual(flags, [model is within] * 2)
                wrapped = FSDP(getattr(model, name), sharding_strategy=sharding_strategy, device_id=self.device)
                setattr(model, name, wrapped)
        return plain, without, within

    @skip_if_lt_x_gpu(2)
    @parametrize("use_reentrant", [False])
    def test_checkpoint_submodule(self, device, use_reentrant):
        """Checkpoints within unsharded FSDP instances do not change gradients."""
        self._test_checkpoint_submodule(use_reentrant, ShardingStrategy.NO_SHARD)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
    def test_checkpoint_submodule_sharded(self, device, sharding_strategy):
        """The same holds with sharded parameters, which are resharded after backward."""
        self._test_checkpoint_submodule(use_reentrant=False, sharding_strategy=sharding_strategy)

    def _test_checkpoint_submodule(self, use_reentrant: bool, sharding_strategy: ShardingStrategy) -> None:
        plain, without, within = self._models(use_reentrant, sharding_strategy)
        torch.manual_seed(1 + self.rank)
        x = self._input(2, 100)
        for model in (plain, without, within):
            model(x).sum().backward()
        grads = [{name: param.grad for name, param in model.named_parameters()} for model in (without, within)]
        self.assertEqual(list(grads[1]), list(grads[0]))
        self.assertEqual(grads[1], grads[0], rtol=1e-5, atol=1e-8)

        # The expected gradients are averaged by hand for the layers in FSDP.
        for model in (without, within):
            self.assertEqual(model.l1.weight.grad, plain.l1.weight.grad)
        for name in ("checkpoint1", "checkpoint2"):
            average_gradients(getattr(plain, name))
            mean = torch.cat([param.grad.flatten() for param in getattr(plain, name).parameters()])
            for model in (without, within):
                flat_param = internals.flat_param_of(getattr(model, name))
                if sharding_strategy is ShardingStrategy.NO_SHARD:
                    self.assertEqual(flat_param.grad, mean)
                else:
                    self.assertEqual(flat_param.grad, mean.chunk(self.world_size)[self.rank])
                    self.assertFalse(internals.is_unsharded(flat_param))


instantiate_parametrized_tests(TestFSDPCheckpoint)
instantiate_device_type_tests(TestFSDPCheckpointSubmodule, globals())

if __name__ == "__main__":
    run_tests()
