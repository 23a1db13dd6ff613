"""FSDP1 tests that fit no other file: devices, unused outputs, optimizers in backward, constructor errors.

Tests that need two kinds of device run on every device: the meta device represents an accelerator. They call FSDP's
functions with device names only, or its whole constructor in :func:`_meta_computes`.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import inspect
import os
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy, transformer_auto_wrap_policy
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode

from torch_fsdp_tests.common_distributed import get_required_world_size, requires, requires_world_size, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    MLP,
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    FSDPTestMultiThread,
    NestedWrappedModule,
    TransformerWithSharedParams,
    _assert_module_states,
)
from torch_fsdp_tests.common_fsdp.patches import swapped
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.fsdp1_cases import states_may_be_synced
from torch_fsdp_tests.fsdp.references import average_gradients, data_parallel, full_parameters, named
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.toy_models import TwoLayers
from torch_fsdp_tests.installed_torch import torch_names

distributed_optim = torch_names.module("torch.distributed.optim")

HOST = torch.device("cpu")  # the CPU is the subject
META = torch.device("meta")
SHARDED = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]

# Warnings and the environment belong to the process, so ranks that are threads use them one at a time.
_in_turn = threading.Lock()


class MyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.b = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x + y))


class MnistNet(nn.Module):
    """Two convolutions, pooling, norm and two layers over (8, 1, 10, 10). Returns the loss for the given labels.

    It is narrower than the usual network for this task: more width would cost time and prove nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 4, 3)
        self.conv2 = nn.Conv2d(4, 8, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.ln = nn.LayerNorm(72)
        self.fc1 = nn.Linear(72, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = self.ln(self.dropout1(F.max_pool2d(x, 2)).flatten(1))
        x = self.fc2(self.dropout2(F.relu(self.fc1(x))))
        return F.cross_entropy(F.log_softmax(x, dim=1), y)


class SideBySide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin1 = nn.Linear(4, 4)
        self.lin2 = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.lin1(x), self.lin2(x)


class CountingSGD(torch.optim.SGD):
    """An optimizer that counts its steps for each parameter."""

    steps: collections.Counter[int] = collections.Counter()

    def step(self, *args: Any, **kwargs: Any) -> Any:
        for group in self.param_groups:
            CountingSGD.steps.update(id(param) for param in group["params"])
        return super().step(*args, **kwargs)


def _stub_handle(current: torch.device) -> Any:
    """A stub of a device's runtime, with all that FSDP needs to choose its compute device."""
    return types.SimpleNamespace(current_device=lambda: current)


class _MovesToMeta(TorchFunctionMode):
    """Lets tensors move between the meta device and others, as they do between the CPU and an accelerator.

    Without this mode, PyTorch cannot set a tensor's data to a tensor on another kind of device, and cannot copy from
    the meta device. Tensors that come back from the meta device are empty.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func == torch.Tensor.data.__set__ and args[0].is_meta != args[1].is_meta:
            moved = args[1].detach().requires_grad_(args[0].requires_grad)
            return torch._C._swap_tensor_impl(args[0], moved)
        if func == torch.Tensor.to and args[0].is_meta and args[1] == HOST:
            return torch.empty_like(args[0], device=HOST)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _meta_computes() -> Iterator[None]:
    """Let FSDP find a runtime for the meta device, so that ``device_id`` may be meta. Only the constructor works.

    This shows what FSDP moves, and what it leaves, even if the device under test is the CPU. It applies to all ranks.
    """

    def register(runtime: Any) -> None:
        if runtime is None:
            vars(torch).pop(META.type, None)
        else:
            setattr(torch, META.type, runtime)

    with swapped(register, None, _stub_handle(META)), _MovesToMeta():
        yield


def _without_default_device_id() -> AbstractContextManager[None]:
    """Restore FSDP's own constructor: the harness gives some devices a default ``device_id``."""
    original = FSDP.__init__
    return swapped(functools.partial(setattr, FSDP, "__init__"), original, inspect.unwrap(original))


def _add_buffers_of(rank: int, model: Any) -> None:
    """Register buffers in the future root, in an inner module that stays unwrapped, and in one to be wrapped."""
    for module, shape in ((model, (2, 2)), (model.module, (4,)), (model.module[0], (3, 2))):
        module.register_buffer("buffer", torch.full(shape, float(rank)))


class TestFSDPMiscMultiProcess(FSDPTest):
    @property
    def world_size(self) -> int:
        return get_required_world_size(self, 2)

    def _assert_alike(self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
        """The tensor must be bitwise the same on all ranks of the group."""
        everywhere = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everywhere, tensor.contiguous(), group=group)
        for other in everywhere:
            self.assertEqual(other, tensor, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    @parametrize("use_index", [True, False])
    def test_fsdp_device_id(self, use_index):
        """FSDP moves the module to ``device_id``, given as an index or as a device, or finds it there already."""
        device = self.device
        if device.index is None:
            device_id = device if use_index else str(device)
        else:
            device_id = device.index if use_index else device

        def check(device_id: Any, device_init_mode: DEVICEInitMode, device: torch.device = device) -> None:
            model = NestedWrappedModule.init(
                self.process_group, FSDPInitMode.RECURSIVE, device_init_mode, {"device_id": device_id}
            )
            model = FSDP(model, device_id=device_id)
            self.assertEqual([flat_param.device for flat_param in internals.flat_params(model)], [device] * 4)
            self.assertEqual({module.compute_device for module in FSDP.fsdp_modules(model)}, {device})

        check(device_id, DEVICEInitMode.DEVICE_NEVER)
        check(device_id, DEVICEInitMode.DEVICE_BEFORE)
        if device.index is not None:
            with self.assertWarnsRegex(UserWarning, "does not have an explicit index"):
                check(torch.device(device.type), DEVICEInitMode.DEVICE_BEFORE)
        with _meta_computes(), self.assertWarnsRegex(UserWarning, "does not have an explicit index"):
            check(META if use_index else str(META), DEVICEInitMode.DEVICE_NEVER, META)

    @skip_if_lt_x_gpu(2)
    @subtests(names=[(), ("weight",), ("bias",), ("weight", "bias")], use_orig_params=[False, True])
    def test_module_with_gradients(self, names, use_orig_params):
        """FSDP1 shards the values of parameters, and leaves the gradients that they have when they are wrapped."""
        layer = filled(nn.Linear(4, 4))
        for name in names:
            param = getattr(layer, name)
            param.grad = torch.full_like(param, 5.0)
        plain = copy.deepcopy(layer).to(self.device)
        plain.zero_grad()
        model = FSDP(layer, device_id=self.device, use_orig_params=use_orig_params)
        inp = uniform(2, 4, seed=self.rank)
        plain(inp).square().sum().backward()
        average_gradients(plain)
        whole = torch.cat([param.grad.flatten() for param in plain.parameters()])
        if use_orig_params and "weight" in names:  # which is split, while its gradient is not
            return self.assertRaisesRegex(RuntimeError, "Cannot writeback when the gradient shape changes", model, inp)
        if use_orig_params and "bias" in names:  # which is whole on the last rank
            whole[-4:] += 5.0
        model(inp).square().sum().backward()
        grads = [param.grad.flatten() for param in model.parameters() if param.grad is not None]
        self.assertEqual(torch.cat(grads), whole.chunk(self.world_size)[self.rank])

    def test_device_id_without_index(self):
        """A device without an index means the current one, and gives a warning. The CPU needs no index."""
        current = torch.device("meta", self.rank)
        with self.assertWarnsRegex(UserWarning, "does not have an explicit index"):
            actual = internals.fsdp1_init._get_device_from_device_id(META, self.rank, _stub_handle(current))
        self.assertEqual(actual, current)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for device_id in (torch.device("meta", 1), HOST):
                actual = internals.fsdp1_init._get_device_from_device_id(device_id, self.rank, _stub_handle(current))
                self.assertEqual(actual, device_id)
            self.assertIsNone(internals.fsdp1_init._get_device_from_device_id(None, self.rank, _stub_handle(current)))

    @requires(lambda: None if accelerator.current().is_cpu else "needs a host without an accelerator")
    def test_device_id_that_is_not_there(self):
        """Without an accelerator, FSDP rejects an accelerator index, and a CPU device with an index."""
        # A PyTorch build for an accelerator reports a missing driver.
        with self.assertRaisesRegex(RuntimeError, "Cannot access accelerator device|Found no .* driver"):
            FSDP(nn.Linear(2, 2), device_id=0)
        with self.assertRaisesRegex(ValueError, f"Inconsistent compute device.* on rank {self.rank}: {HOST} vs"):
            FSDP(nn.Linear(2, 2), device_id=torch.device(HOST.type, 0))

    @skip_if_lt_x_gpu(2)
    def test_fsdp_zero2_eval_with_prefetch(self):
        """Training, eval mode and more training match DDP, with SHARD_GRAD_OP and forward prefetch."""
        torch.manual_seed(0)
        plain = MnistNet()
        fsdp = FSDP(
            copy.deepcopy(plain).to(self.device),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            forward_prefetch=True,
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear, nn.Conv2d}),
        )
        ddp = data_parallel(plain.to(self.device))
        models = fsdp, ddp
        # The learning rate is large enough for a step to change the next loss. So the loss shows if a forward uses
        # parameters that were unsharded before the step.
        optims = [torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9) for model in models]
        torch.manual_seed(self.rank + 20231010)
        data = [(torch.randn(8, 1, 10, 10), torch.randint(0, 9, (8,))) for _ in range(15)]

        ref_losses = []
        for step, (x, y) in enumerate(data):
            training = not 5 <= step < 10
            losses, input_grads = [], []
            for model, optim in zip(models, optims):
                model.train(training)
                torch.manual_seed(self.rank + step)  # for dropout
                own = x.to(self.device, copy=True).requires_grad_(training)
                with torch.set_grad_enabled(training):
                    losses.append(model(own, y.to(self.device)))
                if training:
                    optim.zero_grad()
                    losses[-1].backward()
                    optim.step()
                    input_grads.append(own.grad)
            self.assertEqual(*losses)
            ref_losses.append(losses[models.index(ddp)])
            if training:
                self.assertEqual(*input_grads)
        check_losses(ref_losses)
        self.assertEqual(full_parameters(fsdp), named(ddp))

    @skip_if_lt_x_gpu(2)
    @parametrize("use_second_layer", [True, False])
    @parametrize("sharding_strategy", [ShardingStrategy.NO_SHARD, None])
    def test_fsdp_module_no_compute_grad(self, use_second_layer, sharding_strategy):
        """A layer with an unused output, or one that does not run, gets no gradient. The other layer gets its own."""
        self._test_fsdp_module_no_compute_grad(use_second_layer, sharding_strategy)

    def _test_fsdp_module_no_compute_grad(
        self, use_second_layer: bool, sharding_strategy: ShardingStrategy | None
    ) -> None:
        torch.manual_seed(0)
        model = FSDP(
            TwoLayers(use_second_layer).to(self.device),
            auto_wrap_policy=always_wrap_policy,
            sharding_strategy=sharding_strategy,
        )
        a, b = (internals.flat_param_of(layer) for layer in (model.a, model.b))
        before = [flat_param.detach().clone() for flat_param in (a, b)]
        is_sharded = sharding_strategy is not ShardingStrategy.NO_SHARD
        inputs = [torch.randn(5, 10, generator=torch.Generator().manual_seed(rank)) for rank in range(self.world_size)]
        # The loss is a sum. Each row of the weight's gradient is the sum of all inputs. Each element of the bias's
        # gradient is the number of inputs.
        of_ranks = torch.stack([torch.cat([x.sum(0).repeat(10), torch.full((10,), 5.0)]) for x in inputs])
        mean = of_ranks.mean(0)
        mine = mean.chunk(self.world_size)[self.rank] if is_sharded else mean
        for step in range(1, 5):
            y, _ = model(inputs[self.rank].to(self.device))
            y.sum().backward()
            self.assertEqual(a.grad, step * mine.to(self.device))
            self.assertIsNone(b.grad)
            for flat_param in (a, b):
                self.assertEqual(flat_param.data_ptr(), internals.local_shard(flat_param).data_ptr())
                if is_sharded:
                    self.assertFalse(internals.is_unsharded(flat_param))
        torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1).step()
        self.assertNotEqual(a.detach(), before[0])
        self.assertEqual(b.detach(), before[1], rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=[*SHARDED, ShardingStrategy.NO_SHARD])
    def test_fsdp_not_all_outputs_used_in_loss(self, sharding_strategy):
        """Only some losses use an output. Parameters match a model without FSDP, and units are freed each time."""
        torch.manual_seed(0)
        local = SideBySide().to(self.device)
        model = copy.deepcopy(local)
        model.lin1 = FSDP(model.lin1, sharding_strategy=sharding_strategy)
        model = FSDP(model, sharding_strategy=sharding_strategy)
        optims = [torch.optim.SGD(each.parameters(), lr=1e-3) for each in (model, local)]
        inputs = [torch.ones(4, device=self.device) * (rank + 1) for rank in range(self.world_size)]

        def loss(each: nn.Module, x: torch.Tensor, step: int) -> torch.Tensor:
            first, second = each(x)
            return (first * second).sum() if step < 2 else first.sum()

        for step in range(6):
            before = [param.detach().clone() for param in local.parameters()]
            for optim in optims:
                optim.zero_grad()
            loss(model, inputs[self.rank], step).backward()
            flat_param = internals.flat_param_of(model)
            self.assertEqual(flat_param.data_ptr(), internals.local_shard(flat_param).data_ptr())
            if sharding_strategy is not ShardingStrategy.NO_SHARD:
                self.assertFalse(internals.is_unsharded(flat_param))
            torch.stack([loss(local, x, step) for x in inputs]).mean().backward()
            for optim in optims:
                optim.step()
            changed = [not torch.equal(new, old) for new, old in zip(local.parameters(), before)]
            self.assertEqual(changed, [True] * 2 + [step < 2] * 2)
            self.assertEqual(full_parameters(model), named(local))

    @skip_if_lt_x_gpu(2)
    def test_fsdp_optim_overlap_no_use_orig_params_error(self):
        """An optimizer in backward needs ``use_orig_params=True``. Otherwise the first forward raises an error."""
        model = FSDP(MyModel().to(self.device), auto_wrap_policy=always_wrap_policy, use_orig_params=False)
        distributed_optim._apply_optimizer_in_backward(
            optimizer_class=torch.optim.SGD,
            params=model.parameters(),
            optimizer_kwargs={"lr": 0.03},
            register_hook=False,
        )
        x = torch.randn(2, 2, device=self.device)
        with self.assertRaisesRegex(RuntimeError, "only supported with use_orig_params=True"):
            model(x, x)

    @skip_if_lt_x_gpu(2)
    @subtests(cpu_offload=[True, False])
    def test_fsdp_optimizer_overlap(self, cpu_offload):
        """An optimizer that steps in backward gives the same result as one that steps later, and keeps no gradient."""
        torch.manual_seed(0)
        plain = MyModel()
        normal, overlap = (
            FSDP(
                copy.deepcopy(plain).to(self.device),
                auto_wrap_policy=always_wrap_policy,
                use_orig_params=True,
                cpu_offload=CPUOffload(offload_params=cpu_offload),
            )
            for _ in range(2)
        )
        ddp = data_parallel(plain.to(self.device))
        optims = [torch.optim.SGD(model.parameters(), lr=0.03) for model in (normal, ddp)]
        distributed_optim._apply_optimizer_in_backward(
            optimizer_class=CountingSGD,
            params=overlap.parameters(),
            optimizer_kwargs={"lr": 0.03},
            register_hook=False,
        )
        for param in overlap.parameters():
            self.assertEqual([type(optim) for optim in param._in_backward_optimizers], [CountingSGD])
        previous = full_parameters(overlap)
        self.assertEqual(previous, full_parameters(normal), rtol=0, atol=0)

        for step in range(6):
            CountingSGD.steps.clear()
            torch.manual_seed(2 * step + self.rank)
            x = torch.randn(2, 2, device=self.device)
            for model in (normal, overlap, ddp):
                model(x, x).sum().backward()
            for optim in optims:
                optim.step()
            for handle in internals.handles(overlap):
                self.assertIsNone(handle.sharded_grad)
            self.assertEqual([param.grad for param in overlap.parameters()], [None] * 4)
            # One step for each parameter that has elements in this rank's shard.
            owned = {id(param): 1 for param in overlap.parameters() if param.numel() > 0}
            self.assertEqual(dict(CountingSGD.steps), owned)

            with FSDP.summon_full_params(overlap, with_grads=True):
                for name, param in named(overlap).items():
                    self.assertNotEqual(param.detach(), previous[name])
            previous = full_parameters(overlap)
            self.assertEqual(previous, full_parameters(normal))
            self.assertEqual(previous, named(ddp), exact_device=not cpu_offload)
            for optim in optims:
                optim.zero_grad()

    def _groups_of_the_host(
        self, sharding_strategy: ShardingStrategy, shards: int
    ) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
        """The shard group and, for hybrid strategies, the replicate group of this rank. All ranks make all groups."""
        if sharding_strategy not in internals.hybrid_strategies():
            return dist.new_group(backend="gloo"), None
        ranks = range(self.world_size)
        within = [dist.new_group([*ranks[first : first + shards]], backend="gloo") for first in ranks[::shards]]
        across = [dist.new_group([*ranks[first::shards]], backend="gloo") for first in range(shards)]
        return within[self.rank // shards], across[self.rank % shards]

    @skip_if_lt_x_gpu(2)
    @subtests(
        sharding_strategy=lambda: [ShardingStrategy.NO_SHARD, *SHARDED, *internals.hybrid_strategies()],
        optim_class=[torch.optim.Adam, functools.partial(torch.optim.SGD, momentum=0.9)],
    )
    def test_fsdp_cpu_training(self, sharding_strategy, optim_class):
        """On the CPU, every strategy trains as DDP does. Each loss and each parameter is compared.

        Adam hides a wrong scale of gradients, so the test also trains with SGD.
        """
        self._test_fsdp_cpu_training(sharding_strategy, optim_class, shards=2)

    @requires_world_size(4)
    @subtests(sharding_strategy=internals.hybrid_strategies)
    def test_fsdp_cpu_training_with_replicas(self, sharding_strategy):
        """Hybrid strategies over two groups of two ranks keep the replicas the same."""
        self._test_fsdp_cpu_training(sharding_strategy, functools.partial(torch.optim.SGD, momentum=0.9), shards=2)

    def _test_fsdp_cpu_training(
        self, sharding_strategy: ShardingStrategy, optim_class: Callable[..., torch.optim.Optimizer], shards: int
    ) -> None:
        group, replicas = self._groups_of_the_host(sharding_strategy, shards)
        torch.manual_seed(42)
        plain = MyModel()
        fsdp = FSDP(
            copy.deepcopy(plain),
            process_group=group if replicas is None else (group, replicas),
            sharding_strategy=sharding_strategy,
            auto_wrap_policy=always_wrap_policy,
            device_id=HOST,
        )
        self.assertEqual({each.sharding_strategy for each in FSDP.fsdp_modules(fsdp)}, {sharding_strategy})
        everybody = dist.new_group(backend="gloo")
        ddp = DDP(plain, process_group=everybody)
        optims = [optim_class(model.parameters(), lr=1e-2) for model in (ddp, fsdp)]
        torch.manual_seed(42 + self.rank)
        x = torch.randn(2, 2)
        ref_losses = []
        for _ in range(10):
            losses = []
            for model, optim in zip((ddp, fsdp), optims):
                optim.zero_grad()
                losses.append(model(x, x).sum())
                losses[-1].backward()
                optim.step()
            ref_losses.append(losses[0])
            self.assertEqual(*losses)
            self.assertEqual(full_parameters(fsdp), named(ddp))
            alike = everybody if sharding_strategy is ShardingStrategy.NO_SHARD else replicas
            if alike is not None:
                for flat_param in internals.flat_params(fsdp):
                    self._assert_alike(flat_param.detach(), alike)
        check_losses(ref_losses)

    @skip_if_lt_x_gpu(2)
    def test_fsdp_cpu_init_stays_on_cpu(self):
        """Without a ``device_id`` the module stays in CPU memory, with a warning, until it is moved by hand.

        Without an accelerator, FSDP rejects this. There the test trains with an explicit ``device_id``.
        """

        def build(**fsdp_kwargs: Any) -> FSDP:
            mode = DEVICEInitMode.DEVICE_NEVER
            model = NestedWrappedModule.init(self.process_group, FSDPInitMode.RECURSIVE, mode, fsdp_kwargs)
            return FSDP(model, self.process_group, **fsdp_kwargs)

        torch.manual_seed(self.rank)
        with _without_default_device_id():
            if accelerator.current().is_cpu:
                rejected = self.assertRaisesRegex(RuntimeError, "FSDP needs a non-CPU accelerator device")
                for module in (nn.Linear(2, 2), nn.Linear(2, 2, device=META), nn.ReLU()):
                    with rejected:
                        FSDP(module)
                with rejected:
                    build()
                model = build(device_id=HOST)
            else:
                with self.assertWarnsRegex(UserWarning, "passed-in `module` is on CPU"):
                    model = build()
        self.assertEqual([param.device for param in model.parameters()], [HOST] * 4)
        model = model.to(self.device)
        model(*(each.to(HOST) for each in model.module.get_input(self.device))).sum().backward()
        for flat_param in model.parameters():
            self.assertEqual(flat_param.grad.device, self.device)
            self.assertGreater(flat_param.grad.abs().sum().item(), 0)

    def test_warning_about_module_on_cpu(self):
        """A module in CPU memory gives a warning, unless ``device_id`` says where to move it."""
        module = nn.Linear(2, 2, device=HOST)
        with self.assertWarnsRegex(UserWarning, "passed-in `module` is on CPU"):
            internals.fsdp1_init._move_module_to_device(module, set(), set(), None)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            internals.fsdp1_init._move_module_to_device(module, set(module.parameters()), set(), None)
            internals.fsdp1_init._move_module_to_device(nn.Linear(2, 2, device=META), set(), set(), None)
            internals.fsdp1_init._move_module_to_device(module, set(), set(), HOST)
        self.assertEqual([param.device for param in module.parameters()], [HOST] * 2)

    @skip_if_lt_x_gpu(2)
    def test_cpu_init_with_sync_module_states(self):
        """``sync_module_states`` needs the module on the device. ``device_id`` moves it there."""

        def build() -> nn.Module:
            mode = DEVICEInitMode.DEVICE_NEVER
            model = NestedWrappedModule.init(self.process_group, FSDPInitMode.NO_FSDP, mode)
            _add_buffers_of(self.rank, model)
            return model

        with contextlib.ExitStack() as stack:
            if not accelerator.current().is_cpu:
                stack.enter_context(_without_default_device_id())
            message = "The module has CPU parameters or buffers when `sync_module_states=True`"
            for module in (build(), nn.BatchNorm1d(2, affine=False)):  # the second one has only buffers
                with self.assertRaisesRegex(ValueError, message):
                    FSDP(module, self.process_group, sync_module_states=True)

        torch.manual_seed(self.rank)
        model = build()
        expected = [{name: param.detach().clone() for name, param in model.named_parameters()}]
        dist.broadcast_object_list(expected)
        with states_may_be_synced():
            model = FSDP(
                model,
                self.process_group,
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                device_id=self.device,
                sync_module_states=True,
            )
        expected_buffers = [torch.zeros(shape, device=self.device) for shape in ((2, 2), (4,), (3, 2))]
        self.assertEqual(list(model.buffers()), expected_buffers, may_be="zero")
        # The parameters are also those of rank 0.
        self.assertEqual(full_parameters(model), expected[0], rtol=0, atol=0, exact_device=False)


class TestFSDPMiscMultiThread(FSDPTestMultiThread):
    world_size = 2

    @property
    def process_group(self) -> dist.ProcessGroup:
        return dist.distributed_c10d._get_default_group()

    @skip_if_lt_x_gpu(1)
    def test_fsdp_namedtuple(self):
        """FSDP finds the tensors in a namedtuple and registers the pre-backward hook on each of them."""
        fields = collections.namedtuple("fields", "x1 x2 x3 x4")

        class OfEach(nn.Linear):
            def forward(self, inputs: Any) -> Any:
                return fields(*(F.linear(x, self.weight) for x in inputs))

        model = FSDP(OfEach(1, 1).to(self.device))
        x = torch.ones(1, device=self.device, requires_grad=True)
        output = model(fields(x, x, x, x))
        self.assertIsInstance(output, fields)
        for tensor in output:
            self.assertEqual(len(tensor._backward_hooks or {}), 1)

    @skip_if_lt_x_gpu(1)
    def test_device_id_auto_wrap(self):
        """``device_id`` reaches every module that the policy wraps, whether the policy is an object or a callable."""
        self.run_subtests({"use_callable": [False, True]}, self._test_device_id_auto_wrap, self.device)
        with _meta_computes():
            self.run_subtests({"use_callable": [False, True]}, self._test_device_id_auto_wrap, META)

    def _test_device_id_auto_wrap(self, device: torch.device, use_callable: bool) -> None:
        layers = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}
        policy = (
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)
            if use_callable
            else ModuleWrapPolicy(layers)
        )
        with _without_default_device_id():
            model = TransformerWithSharedParams.init(
                self.process_group,
                FSDPInitMode.RECURSIVE,
                DEVICEInitMode.DEVICE_NEVER,
                {"auto_wrap_policy": policy, "device_id": device},
            )
        actual = [module.compute_device for module in FSDP.fsdp_modules(model)]
        self.assertEqual(actual, [device] * 5)
        actual = [flat_param.device for flat_param in internals.flat_params(model)]
        self.assertEqual(actual, [device] * 5)
        self.assertEqual({buffer.device for buffer in model.buffers()}, {device})

    @skip_if_lt_x_gpu(1)
    @subtests(use_orig_params=[False, True])
    def test_fsdp_device_id_cpu_offload(self, use_orig_params):
        """Offloaded parameters stay in CPU memory before and after a step. ``device_id`` is used for computation."""
        local = nn.Sequential(collections.OrderedDict(seq=nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))))
        local.append(nn.Linear(10, 10))
        with torch.no_grad():
            for number, param in enumerate(local.parameters()):  # threads share the random generator
                param.copy_(torch.rand(param.shape, generator=torch.Generator().manual_seed(number)) - 0.5)

        def build(device: torch.device) -> FSDP:
            return FSDP(
                copy.deepcopy(local),
                auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
                cpu_offload=CPUOffload(offload_params=True),
                device_id=device,
                use_orig_params=use_orig_params,
            )

        with _meta_computes():
            of_meta = build(META)
        model = build(self.device)
        for each, device in ((of_meta, META), (model, self.device)):
            handles = internals.handles(each)
            self.assertEqual([handle.flat_param.device for handle in handles], [HOST] * 2)
            self.assertEqual([handle.device for handle in handles], [device] * 2)

        # The model also trains.
        inputs = [torch.rand(3, 10, generator=torch.Generator().manual_seed(rank)) for rank in range(self.world_size)]
        model(inputs[self.rank].to(self.device)).square().sum().backward()
        torch.stack([local(x).square().sum() for x in inputs]).mean().backward()
        for each in (model, local):
            torch.optim.SGD(each.parameters(), lr=1e-2).step()
        self.assertEqual([flat_param.device for flat_param in internals.flat_params(model)], [HOST] * 2)
        self.assertEqual(full_parameters(model), named(local), exact_device=False)

    @skip_if_lt_x_gpu(1)
    @subtests(sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD], use_orig_params=[False, True])
    def test_offloaded_parameters_are_pinned(self, sharding_strategy, use_orig_params):
        """Offloaded parameters and their gradients are pinned, also gradients that replace cleared ones."""
        offload = CPUOffload(offload_params=True)
        model = FSDP(nn.Linear(4, 4), None, sharding_strategy, offload, use_orig_params=use_orig_params)
        for _ in range(2):
            model(torch.ones(1, 4, device=self.device)).sum().backward()
            pinned = [(param.is_pinned(), param.grad.is_pinned()) for param in model.parameters() if param.numel()]
            self.assertEqual({*pinned}, {(True, True)})
            model.zero_grad()

    @skip_if_lt_x_gpu(1)
    def test_module_device_mismatches_device_id(self):
        """Parameters on another device than ``device_id`` are rejected."""
        device = self.device
        if device.index is not None:
            expected = ValueError, f"{device.type}:{device.index} vs {device.type}:0"
            context = contextlib.nullcontext() if device.index == 0 else self.assertRaisesRegex(*expected)
            with context:
                FSDP(nn.Linear(2, 2).to(device), device_id=0)
        else:
            with self.assertRaisesRegex(ValueError, f"on rank {self.rank}: {device.type} vs {device.type}:0"):
                FSDP(nn.Linear(2, 2), device_id=torch.device(device.type, 0))

        decide = internals.fsdp1_init._get_compute_device
        on_host, on_meta = nn.Linear(1, 1, device=HOST), nn.Linear(1, 1, device=META)
        current = _stub_handle(torch.device("meta", 1))
        # For parameters in CPU memory, FSDP takes the current device, otherwise their device unless they are ignored.
        self.assertEqual(decide(on_host, set(), None, self.rank, current), torch.device("meta", 1))
        self.assertEqual(decide(on_meta, set(), META, self.rank, current), META)
        self.assertEqual(decide(on_meta, set(on_meta.parameters()), None, self.rank, current), torch.device("meta", 1))
        for module, message in ((on_host, "meta:1 vs meta:0"), (on_meta, "meta vs meta:0")):
            with self.assertRaisesRegex(ValueError, f"`device_id` on rank {self.rank}: {message}"):
                decide(module, set(), torch.device("meta", 0), self.rank, current)

    @skip_if_lt_x_gpu(1)
    def test_cpu_gpu_module(self):
        """A module that is half in CPU memory and half on a device needs a ``device_id``."""
        device = self.device
        if accelerator.current().has("device_memory"):
            module = MyModel()
            module.a.to(device)
            with self.assertRaisesRegex(RuntimeError, "please pass in device_id"):
                FSDP(module)
            model = FSDP(module, device_id=device)
            self.assertEqual({param.device for param in model.parameters()}, {device})

        mixed = nn.Sequential(nn.Linear(1, 1, device=META), nn.Linear(1, 1, device=HOST))
        check = internals.fsdp1_init._check_single_device_module
        with self.assertRaisesRegex(RuntimeError, "please pass in device_id"):
            check(mixed, set(), None)
        self.assertIsNone(check(mixed, set(), META))
        self.assertIsNone(check(mixed, set(mixed[0].parameters()), None))

    @skip_if_lt_x_gpu(1)
    def test_fsdp_ignored_module_meta(self):
        """An ignored module on the meta device stays there and is not initialized."""

        initialized: list[nn.Module] = []

        def init(module: nn.Module) -> None:
            initialized.append(module)
            module.to_empty(device=self.device, recurse=False)

        for kwargs in ({}, {"param_init_fn": init}):
            initialized.clear()
            with torch.device(META):
                module = MyModel()
            ignored = module.a
            model = FSDP(module, device_id=self.device, ignored_modules=[ignored], use_orig_params=True, **kwargs)
            self.assertEqual([param.device for param in model.module.a.parameters()], [META] * 2)
            self.assertEqual([param.device for param in model.module.b.parameters()], [self.device] * 2)
            self.assertEqual(initialized, [module, module.b] if kwargs else [], may_be="empty")

        initialized.clear()
        module = MyModel()
        module.a.to(META)
        FSDP(module, device_id=self.device, ignored_modules=[module.a], use_orig_params=True, param_init_fn=init)
        self.assertEqual(initialized, [], may_be="empty")  # all managed parameters have values

    @skip_if_lt_x_gpu(1)
    def test_fsdp_device_id_no_move_ignored_params_and_bufs(self):
        """Ignored parameters and buffers are neither moved nor flattened. They stay the same tensors."""
        self._test_fsdp_device_id_no_move_ignored_params_and_bufs(self.device)
        with _meta_computes():
            self._test_fsdp_device_id_no_move_ignored_params_and_bufs(META)

    def _test_fsdp_device_id_no_move_ignored_params_and_bufs(self, device: torch.device) -> None:
        module = MyModel()
        for layer in (module.a, module.b):
            layer.register_buffer("buf", torch.ones(1))
        ignored = [*module.a.parameters(), *module.a.buffers()]
        addresses = [tensor.data_ptr() for tensor in ignored]
        model = FSDP(module, device_id=device, ignored_modules=[module.a])
        flat_param = internals.flat_param_of(model)
        self.assertEqual((flat_param.device, model.module.b.buf.device), (device, device))
        found = [*model.module.a.parameters(), *model.module.a.buffers()]
        self.assertEqual([id(tensor) for tensor in found], [id(tensor) for tensor in ignored])
        self.assertEqual([tensor.data_ptr() for tensor in found], addresses)
        self.assertEqual([tensor.device for tensor in found], [HOST] * 3)
        self.assertEqual(internals.names_in(flat_param), ("b.weight", "b.bias"))

    @skip_if_lt_x_gpu(1)
    def test_multigpu_module(self):
        """Parameters on two devices are rejected."""
        device = accelerator.current()
        if device.count > 1:
            module = MyModel()
            for offset, layer in enumerate((module.a, module.b)):
                layer.to(device.device(self.rank + offset))
            with self.assertRaisesRegex(RuntimeError, "FSDP only supports single device modules"):
                FSDP(module)

        def module_on(*devices: torch.device) -> Any:
            params = [mock.Mock(device=device, _fsdp_flattened=False) for device in devices]
            return mock.Mock(parameters=lambda: iter(params))

        check = internals.fsdp1_init._check_single_device_module
        first, second = (torch.device("meta", index) for index in range(2))
        for devices in ((first, second), (first, HOST, second)):
            for device_id in (None, first):
                with self.assertRaisesRegex(RuntimeError, "FSDP only supports single device modules"):
                    check(module_on(*devices), set(), device_id)
        self.assertIsNone(check(module_on(first, first), set(), None))

    @skip_if_lt_x_gpu(1)
    def test_no_params(self):
        """A module without parameters can be wrapped and computes on any device. A wrong ``device_id`` is an error."""
        device = self.device
        x = torch.tensor([-1.0, 1.0], device=device)
        models = [FSDP(nn.ReLU()), FSDP(nn.ReLU().to(device)), FSDP(nn.ReLU(), device_id=device)]
        for model in models:
            self.assertIsNone(internals.handle(model))
            self.assertEqual(model.compute_device, device)
            self.assertEqual(model(x), x.relu())
        if device.index != 0:
            with self.assertRaisesRegex(ValueError, f"Inconsistent.*{device} vs {device.type}:0"):
                FSDP(nn.ReLU().to(device), device_id=torch.device(device.type, 0))

    @skip_if_lt_x_gpu(1)
    def test_only_the_outermost_instance_without_params_is_root(self):
        inner = FSDP(nn.ReLU(), device_id=self.device)
        model = FSDP(nn.Sequential(inner), device_id=self.device)
        x = torch.tensor([-1.0, 1.0 + self.rank], device=self.device)
        self.assertEqual(model(x), x.relu())
        self.assertEqual((model.check_is_root(), inner.check_is_root()), (True, False))

    @skip_if_lt_x_gpu(1)
    @subtests(moves=[False, True])
    def test_fsdp_same_model_across_ranks(self, moves):
        """``sync_module_states`` copies rank 0's states to all ranks. ``device_id`` first moves them to the device."""

        def weight_of(rank: int) -> torch.Tensor:
            return torch.rand(10, 10, generator=torch.Generator().manual_seed(rank))

        module = nn.Linear(10, 10, bias=False)
        module.weight = nn.Parameter(weight_of(self.rank))
        module.register_buffer("buffer", torch.full((3,), float(self.rank)))
        if not moves:
            module.to(self.device)
        _assert_module_states(module, self.process_group, self.assertNotEqual)
        with states_may_be_synced():
            model = FSDP(module, sync_module_states=True, device_id=self.device if moves else None)
        with FSDP.summon_full_params(model):
            _assert_module_states(model, self.process_group, functools.partial(self.assertEqual, may_be="zero"))
            # Unsharded parameters are the same on all ranks in any case. These must be rank 0's.
            self.assertEqual(model.module.weight.detach(), weight_of(0).to(self.device), rtol=0, atol=0)
        self.assertEqual(model.module.buffer, torch.zeros(3, device=self.device), may_be="zero")

    @skip_if_lt_x_gpu(1)
    def test_name_that_the_device_lacks(self):
        """FSDP1 asks the module of its device for functions. A missing one is an error that names it."""
        model = FSDP(nn.Linear(2, 2, device=self.device), device_id=self.device)
        with self.assertRaisesRegex(AttributeError, "no_such_function"):
            torch_names.attribute(model, "_device_handle").no_such_function()

    @skip_if_lt_x_gpu(1)
    def test_homogeneous_attributes(self):
        """Some attributes must be the same in all instances of a tree. The first forward checks them."""
        names = ["_use_orig_params", "limit_all_gathers", "_use_full_prec_in_eval"]
        self.assertEqual(list(internals.fsdp1_runtime.HOMOGENEOUS_ATTR_NAMES), names)
        self.run_subtests({"attr_name": names}, self._test_homogeneous_attributes)

    def _test_homogeneous_attributes(self, attr_name: str) -> None:
        def wrap(module: nn.Module, value: bool) -> FSDP:
            if attr_name != "_use_full_prec_in_eval":
                return FSDP(module, **{attr_name.removeprefix("_"): value})
            with mock.patch.dict(os.environ, {internals.flat_param._FSDP_USE_FULL_PREC_IN_EVAL: "1" if value else ""}):
                return FSDP(module)

        model = NestedWrappedModule.init(self.process_group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE)
        with _in_turn:
            model.module[1] = wrap(model.module[1], False)
            model = wrap(model, True)
        inputs = [torch.rand(4, 8, device=self.device)]
        actual = [getattr(module, attr_name) for module in FSDP.fsdp_modules(model)]
        self.assertEqual(actual, [True, False])
        with self.assertRaisesRegex(ValueError, f"Expects one homogeneous value for {attr_name}"):
            model(*inputs)

    @skip_if_lt_x_gpu(1)
    def test_fsdp_unsupported_module_cls(self):
        """FSDP warns about a container, because it has no forward in which FSDP could all-gather its parameters."""
        mlps = [MLP(8, self.device) for _ in range(3)]
        message = "FSDP will not all-gather parameters for containers that do not implement forward"
        with _in_turn:
            with self.assertWarnsRegex(UserWarning, message):
                FSDP(nn.ModuleList(mlps[:2]))
            with self.assertWarnsRegex(UserWarning, message):
                FSDP(nn.ModuleDict({"a": mlps[2]}))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                FSDP(nn.Sequential(nn.Linear(2, 2, device=self.device)))
        self.assertNotIn(message, " ".join(str(each.message) for each in caught))

    @skip_if_lt_x_gpu(1)
    def test_no_shard_is_deprecated(self):
        with _in_turn, self.assertWarnsRegex(FutureWarning, "`NO_SHARD` sharding strategy is deprecated"):
            FSDP(nn.Linear(2, 2, device=self.device), sharding_strategy=ShardingStrategy.NO_SHARD)


class _RecordsSetattr(nn.Module):
    """A module with a 5 by 5 weight and a ``__setattr__`` that records the names that it sets."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))
        self.calls: list[str] = []

    def __setattr__(self, name: str, value: Any) -> None:
        if "calls" in vars(self):
            self.calls.append(name)
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class TestFSDPMiscWorldSize1(FSDPTestMultiThread):
    world_size = 1

    @skip_if_lt_x_gpu(1)
    @subtests(sharding_strategy=[ShardingStrategy.NO_SHARD, None, *SHARDED])
    def test_world_size_1_sharding_strategy_warning(self, sharding_strategy):
        """One rank has nothing to shard: any strategy becomes NO_SHARD, with a warning."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = FSDP(nn.Linear(3, 3).to(self.device), sharding_strategy=sharding_strategy)
        self.assertIs(model.sharding_strategy, ShardingStrategy.NO_SHARD)
        prefix = "FSDP is switching to use `NO_SHARD` instead of"
        actual = [(each.category, str(each.message)) for each in caught if str(each.message).startswith(prefix)]
        asked = sharding_strategy or ShardingStrategy.FULL_SHARD
        words = f"{prefix} {asked} since the world size is 1."
        switched = [] if asked is ShardingStrategy.NO_SHARD else [(UserWarning, words)]
        self.assertEqual(actual, switched, may_be="empty")

    @skip_if_lt_x_gpu(1)
    def test_training_device_mismatch_errors(self):
        """The first forward rejects parameters that are not on the compute device, or not on the CPU when offloaded."""
        device = self.device
        x = torch.randn(2, 10, device=device)
        in_host = "An FSDP-managed module unexpectedly has parameters on {}. Make sure to move the module to {} before"
        on_device = "An FSDP-managed module with parameter CPU offloading enabled has parameters on {}. Make sure"
        offload = CPUOffload(offload_params=True)
        if accelerator.current().has("device_memory"):
            with self.assertRaisesRegex(RuntimeError, in_host.format(HOST, device)):
                FSDP(nn.Linear(10, 10))(x)
            model = FSDP(nn.Linear(10, 10).to(device), cpu_offload=offload).to(device)
            with self.assertRaisesRegex(RuntimeError, on_device.format(device)):
                model(x)

        model = FSDP(nn.Linear(10, 10).to(device))
        model.compute_device = META
        with self.assertRaisesRegex(RuntimeError, in_host.format(device, META)):
            model(x)
        model = FSDP(nn.Linear(10, 10).to(device), cpu_offload=offload)
        on_meta = types.SimpleNamespace(_offload_params=True, flat_param=torch.empty(1, device=META))
        torch_names.set_attribute(model, "_handle", on_meta)
        with self.assertRaisesRegex(RuntimeError, on_device.format(META)):
            model(x)

    @skip_if_lt_x_gpu(1)
    @subtests(use_orig_params=[False, True])
    def test_unsafe_setattr(self, use_orig_params):
        """FSDP sets parameters with the module's own ``__setattr__``, unless an environment variable disables this."""
        variable = internals.flat_param._FSDP_USE_UNSAFE_SETATTR
        for value, calls in ((None, True), ("1", False), ("0", True)):
            with mock.patch.dict(os.environ):
                os.environ.pop(variable, None)
                if value is not None:
                    os.environ[variable] = value
                module = _RecordsSetattr().to(self.device)
                model = FSDP(module, use_orig_params=use_orig_params)
            expected = (x := torch.randn(8, 5, device=self.device)) @ module.weight
            module.calls.clear()
            self.assertEqual(model(x), expected)  # outside the context: the constructor has already read the variable
            self.assertEqual(set(module.calls), {"weight"} if calls else set(), may_be="empty")


instantiate_parametrized_tests(TestFSDPMiscMultiThread)
instantiate_parametrized_tests(TestFSDPMiscMultiProcess)

if __name__ == "__main__":
    run_tests()
