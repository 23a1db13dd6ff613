"""Activation checkpoints and offloaded activations, around FSDP1 and within it, change no loss and no gradient."""

from __future__ import annotations

import contextlib
import copy
import itertools
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.algorithms._checkpoint.checkpoint_wrapper as wrappers
import torch.distributed.fsdp._traversal_utils as traversal_utils
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from torch_fsdp_tests import accelerator
from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, parametrize, run_tests

_save_on_cpu_called = False


def get_patched_save_on_cpu():
    """``save_on_cpu`` itself, which tells that it was called."""
    original = torch.autograd.graph.save_on_cpu

    def patched_save_on_cpu(*args, **kwargs):
        global _save_on_cpu_called
        _save_on_cpu_called = True
        return original(*args, **kwargs)

    return patched_save_on_cpu


@contextlib.contextmanager
def patch_save_on_cpu(new_save_on_cpu):
    """What the wrapper for offload calls is replaced in the context."""
    with mock.patch.object(wrappers, "save_on_cpu", new_save_on_cpu):
        yield


def _wrapper(offload_activations):
    return offload_wrapper if offload_activations else checkpoint_wrapper


def _handles(model):
    return traversal_utils._get_fsdp_handles(model)


class _CheckpointTest(FSDPTest):
    """On the CPU two ranks are enough; a device is tested with all that there are."""

    @property
    def world_size(self):
        return accelerator.current().few_ranks

    def _input(self, *shape):
        """Every rank has its own."""
        return torch.randn(shape).to(self.device).requires_grad_()


class TestFSDPCheckpoint(_CheckpointTest):
    class SequentialModule(nn.Module):
        """Three layers, each in a checkpoint or with its activations offloaded, and then in FSDP, if so asked."""

        def __init__(
            self,
            checkpoint_layer=False,
            offload_activations=False,
            wrap_fsdp=False,
            *fsdp_args,
            widths=(3, 3, 3, 3),
            **fsdp_kwargs,
        ):
            super().__init__()
            torch.manual_seed(0)
            device = accelerator.current().device(dist.get_rank())
            layers = [nn.Linear(inputs, outputs, device=device) for inputs, outputs in itertools.pairwise(widths)]
            if checkpoint_layer:
                layers = map(_wrapper(offload_activations), layers)
            if wrap_fsdp:
                layers = (FSDP(layer, *fsdp_args, **fsdp_kwargs) for layer in layers)
            self.ffn = nn.Sequential(*layers)

        def forward(self, x):
            return self.ffn(x)

    def _full_grads(self, model):
        """The gradients of all elements, by the names of the parameters without wrappers."""
        if not isinstance(model, DDP) and not _handles(model)[0]._use_orig_params:
            return self._gathered_grads(model)
        # Each layer that is in FSDP may be a root of its own, so each is opened for itself.
        with contextlib.ExitStack() as stack:
            for root in FSDP.fsdp_modules(model, root_only=True):
                stack.enter_context(FSDP.summon_full_params(root, with_grads=True, writeback=False))
            named = [(clean_tensor_name(name), param.grad.clone()) for name, param in model.named_parameters()]
        return {name.removeprefix("module."): grad for name, grad in named}

    def _gathered_grads(self, model):
        grads = {}
        for name, module in model.named_modules():
            if isinstance(module, FSDP) and module._handle is not None:
                flat_param = module._handle.flat_param
                grad = flat_param.grad.to(self.device)  # which may be offloaded
                shards = [torch.empty_like(grad) for _ in range(self.world_size)]
                dist.all_gather(shards, grad)
                numels = [shape.numel() for shape in flat_param._shapes]
                pieces = torch.cat(shards)[: sum(numels)].split(numels)
                for fqn, shape, piece in zip(flat_param._fqns, flat_param._shapes, pieces):
                    grads[clean_tensor_name(f"{name}.{fqn}".strip("."))] = piece.view(shape)
        return grads

    def _verify_parity(self, losses, outputs, models):
        """All are like the first, which is the one without FSDP and without checkpoints."""
        self.assertGreater(len(losses), 1)
        self.assertEqual([len(outputs), len(models)], [len(losses)] * 2)
        grads = [self._full_grads(model) for model in models]
        for loss, output, grad in zip(losses[1:], outputs[1:], grads[1:]):
            self.assertEqual(loss, losses[0])
            self.assertEqual(output, outputs[0])
            self.assertEqual(grad, grads[0], exact_device=False)

    def _ddp(self, widths):
        device = self.device
        plain = self.SequentialModule(widths=widths)
        return DDP(plain, device_ids=None if device.index is None else [device.index])

    def _check_iterations(self, calls, models, num_iters, cpu_offload, offload_activations, offloading):
        """Train by ``calls``, and compare after each iteration; see who offloads activations, in the first."""
        global _save_on_cpu_called
        torch.manual_seed(self.rank + 1)
        for iteration in range(num_iters):
            x = self._input(10, 3)
            if cpu_offload.offload_params:
                models[0].zero_grad()  # since offloaded gradients do not accumulate
            losses, outputs = [], []
            for index, call in enumerate(calls):
                _save_on_cpu_called = False
                output = call(x)
                if iteration == 0:
                    self.assertEqual(_save_on_cpu_called, offload_activations and index in offloading)
                losses.append(output.sum())
                outputs.append(output.detach())
                losses[-1].backward()
            self._verify_parity(losses, outputs, models)
        dist.barrier()

    @skip_if_lt_x_gpu(2)
    @parametrize("cpu_offload", [CPUOffload(offload_params=True), CPUOffload(offload_params=False)])
    @parametrize("offload_activations", [True, False])
    @parametrize("use_orig_params", [False, True])
    def test_checkpoint_fsdp_wrapping(self, cpu_offload, offload_activations, use_orig_params):
        """One checkpoint around three layers in FSDP, and FSDP around a checkpoint in each of them."""
        self._test_checkpoint_fsdp_wrapping(cpu_offload, offload_activations, use_orig_params)

    def _test_checkpoint_fsdp_wrapping(self, cpu_offload, offload_activations, use_orig_params, widths=(3, 3, 3, 3)):
        kwargs = {"cpu_offload": cpu_offload, "use_orig_params": use_orig_params, "widths": widths}
        models = [
            self._ddp(widths),
            _wrapper(offload_activations)(self.SequentialModule(wrap_fsdp=True, **kwargs)),
            self.SequentialModule(True, offload_activations, True, **kwargs),
            self.SequentialModule(wrap_fsdp=True, **kwargs),
        ]
        with patch_save_on_cpu(get_patched_save_on_cpu()):
            self._check_iterations(models, models, 2, cpu_offload, offload_activations, offloading=(1, 2))

    @skip_if_lt_x_gpu(2)
    @parametrize("cpu_offload", [CPUOffload(offload_params=True), CPUOffload(offload_params=False)])
    @parametrize("offload_activations", [True, False])
    @parametrize("use_orig_params", [False, True])
    def test_basic_checkpoint_end_to_end(self, cpu_offload, offload_activations, use_orig_params):
        """A checkpoint around FSDP, FSDP around a checkpoint, and a checkpoint only for the call of FSDP."""
        self._test_basic_checkpoint_end_to_end(cpu_offload, offload_activations, use_orig_params)

    def _test_basic_checkpoint_end_to_end(self, cpu_offload, offload_activations, use_orig_params, widths=(3, 3, 3, 3)):
        kwargs = {"cpu_offload": cpu_offload, "use_orig_params": use_orig_params}
        wrapper = _wrapper(offload_activations)
        plain = self.SequentialModule(widths=widths)
        models = [
            self._ddp(widths),
            FSDP(copy.deepcopy(plain), **kwargs),
            wrapper(FSDP(copy.deepcopy(plain), **kwargs)),
            FSDP(wrapper(copy.deepcopy(plain)), **kwargs),
            FSDP(copy.deepcopy(plain), **kwargs),
        ]
        save_on_cpu = get_patched_save_on_cpu()

        def call_in_checkpoint(x):
            context = save_on_cpu(pin_memory=True) if offload_activations else contextlib.nullcontext()
            with context:
                return checkpoint(models[-1], x, use_reentrant=True)

        with patch_save_on_cpu(save_on_cpu):
            calls = [*models[:-1], call_in_checkpoint]
            self._check_iterations(calls, models, 6, cpu_offload, offload_activations, offloading=(2, 3, 4))

    @skip_if_lt_x_gpu(2)
    def test_uneven_shards(self):
        """Beyond upstream: layers of 16, 25 and 12 elements, of which neither one nor all divide by two."""
        config = {"offload_activations": [True, False], "use_orig_params": [False, True]}
        for test in (self._test_checkpoint_fsdp_wrapping, self._test_basic_checkpoint_end_to_end):
            self.run_subtests(config, test, cpu_offload=CPUOffload(offload_params=False), widths=(3, 4, 5, 2))

    @contextlib.contextmanager
    def _counted_all_gathers(self):
        original = FlatParamHandle._all_gather_flat_param
        with mock.patch.object(FlatParamHandle, "_all_gather_flat_param", autospec=True, side_effect=original) as calls:
            yield calls

    @skip_if_lt_x_gpu(2)
    def test_how_often_recomputation_gathers(self):
        """Beyond upstream: a checkpoint around FSDP gathers anew to recompute, one within FSDP uses what is there."""
        strategies = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
        self.run_subtests({"sharding_strategy": strategies}, self._test_how_often_recomputation_gathers)

    def _test_how_often_recomputation_gathers(self, sharding_strategy):
        kwargs = {"sharding_strategy": sharding_strategy, "backward_prefetch": None}
        torch.manual_seed(self.rank)
        x = self._input(10, 3)
        models = {
            "without": FSDP(self.SequentialModule(wrap_fsdp=True, **kwargs), **kwargs),
            "within": FSDP(self.SequentialModule(True, False, True, **kwargs), **kwargs),
            "around": FSDP(checkpoint_wrapper(self.SequentialModule(wrap_fsdp=True, **kwargs)), **kwargs),
        }
        found = {}
        # Recomputation ends as soon as it has all it needs, within the last layer, or goes on to the end.
        for name, stops_early in (("without", True), ("within", True), ("around", True), ("around", False)):
            model = models[name]
            with self._counted_all_gathers() as calls, set_checkpoint_early_stop(stops_early):
                loss = model(x).sum()
                in_forward = calls.call_count
                loss.backward()
            found[name, stops_early] = in_forward, calls.call_count - in_forward
            for handle in _handles(model):
                self.assertEqual(handle.flat_param._full_param_padded.untyped_storage().size(), 0)
        if sharding_strategy is ShardingStrategy.FULL_SHARD:
            # Of the three layers the last is there already when recomputation begins, and stays; the first two are
            # gathered for it, freed, and gathered again for their own backward.
            expected = [(3, 3), (3, 3), (3, 5), (3, 5)]
            self.assertEqual(list(found.values()), expected)
        else:
            self.assertEqual(found, dict.fromkeys(found, (3, 0)))


class CheckpointModule(nn.Module):
    def __init__(self, checkpoint: bool = False, use_reentrant: bool = True):
        super().__init__()
        self.seq = nn.Sequential(*(nn.Linear(100, 100) for _ in range(4)))
        self.checkpoint = checkpoint
        self.use_reentrant = use_reentrant

    def forward(self, x):
        return checkpoint(self.seq, x, use_reentrant=self.use_reentrant) if self.checkpoint else self.seq(x)


class ModelWithCheckpointSubmodule(nn.Module):
    def __init__(self, checkpoint: bool = False, use_reentrant: bool = True):
        super().__init__()
        self.l1 = nn.Linear(100, 100)
        self.s1 = CheckpointModule(checkpoint, use_reentrant)
        self.s2 = CheckpointModule(checkpoint, use_reentrant)
        self.relu = nn.ReLU()
        self.l2 = nn.Linear(100, 100)

    def forward(self, x):
        return self.l2(self.relu(self.s2(self.s1(self.l1(x)))))


class TestModel(nn.Module):
    def __init__(self, checkpoint: bool = False, use_reentrant: bool = True):
        super().__init__()
        self.l1 = nn.Linear(100, 100)
        self.relu = nn.ReLU()
        self.checkpoint1 = ModelWithCheckpointSubmodule(checkpoint, use_reentrant)
        self.checkpoint2 = ModelWithCheckpointSubmodule(checkpoint, use_reentrant)
        self.l2 = nn.Linear(100, 100)

    def forward(self, x):
        return self.l2(self.relu(self.checkpoint2(self.checkpoint1(self.l1(x)))))


class TestFSDPCheckpointSubmodule(_CheckpointTest):
    def _models(self, use_reentrant, sharding_strategy):
        """Without FSDP, with FSDP, and with FSDP and checkpoints."""
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
        """Checkpoints in modules that are in FSDP, unsharded, change no gradient."""
        self._test_checkpoint_submodule(use_reentrant, ShardingStrategy.NO_SHARD)

    @skip_if_lt_x_gpu(2)
    def test_checkpoint_submodule_sharded(self, device):
        """Beyond upstream: the same where parameters are sharded, and freed again after backward."""
        strategies = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
        self.run_subtests({"sharding_strategy": strategies}, self._test_checkpoint_submodule, use_reentrant=False)

    def _test_checkpoint_submodule(self, use_reentrant, sharding_strategy):
        plain, without, within = self._models(use_reentrant, sharding_strategy)
        torch.manual_seed(1 + self.rank)
        x = self._input(2, 100)
        for model in (plain, without, within):
            model(x).sum().backward()
        names = [[name for name, _ in model.named_parameters()] for model in (without, within)]
        self.assertEqual(*names)
        self.assertEqual(*[[param.grad for param in model.parameters()] for model in (without, within)])

        # Against gradients that are averaged by hand, where FSDP averages.
        for model in (without, within):
            self.assertEqual(model.l1.weight.grad, plain.l1.weight.grad)
        for name in ("checkpoint1", "checkpoint2"):
            mean = torch.cat([param.grad.flatten() for param in getattr(plain, name).parameters()])
            dist.all_reduce(mean)
            mean /= self.world_size
            for model in (without, within):
                flat_param = getattr(model, name)._handle.flat_param
                if sharding_strategy is ShardingStrategy.NO_SHARD:
                    self.assertEqual(flat_param.grad, mean)
                else:
                    self.assertEqual(flat_param.grad, mean.chunk(self.world_size)[self.rank])
                    self.assertEqual(flat_param._full_param_padded.untyped_storage().size(), 0)


instantiate_parametrized_tests(TestFSDPCheckpoint)
instantiate_device_type_tests(TestFSDPCheckpointSubmodule, globals())

if __name__ == "__main__":
    run_tests()
