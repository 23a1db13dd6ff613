"""The memory that FSDP1 holds during training: when it is allocated and when it is freed.

If the device's allocator has statistics, the test follows them through the iterations. On every device, it also counts
the storages of FSDP and the optimizer by kind, which is exact.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.utils.checkpoint import checkpoint

from torch_fsdp_tests import common_cuda
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import bytes_of
from torch_fsdp_tests.installed_torch import torch_names

BYTES = 4  # of a float32
ITERATIONS = 4
POINTS = "start", "after fwd", "after loss", "after bwd", "after step", "done"
# Channels of the model, and image size: SMALL to count storages, LARGE to measure the allocator. Upstream has
# measured what one kind of device allocates, with larger images.
SMALL, LARGE = (32, 16), (128, 224 if common_cuda.TEST_CUDA else 64)


Seen = dict[str, Any]  # values at each of the POINTS


def get_cur_mem(device: torch.device) -> int:
    """MiB allocated on the device, without the workspaces of matrix product libraries."""
    clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear_workspaces is not None:
        clear_workspaces()
    return round(torch.get_device_module(device).memory_allocated() / 1024**2)


def drop_last_work(device: torch.device) -> None:
    """Make autograd's thread release its last work, which it may keep until it gets other work."""
    torch.ones((), device=device, requires_grad=True).backward()
    torch.get_device_module(device).synchronize()
    gc.collect()


def alive(device: torch.device) -> int:
    """The bytes of the storages of all tensors that the garbage collector tracks."""
    drop_last_work(device)
    return bytes_of(each for each in gc.get_objects() if isinstance(each, torch.Tensor))


class Model(nn.Module):
    """Four convolutions, then ten outputs per sample. Each norm can be in FSDP."""

    def __init__(
        self, hidden_dim: int, with_fsdp: bool = False, with_checkpoint: bool = False, **fsdp_kwargs: Any
    ) -> None:
        super().__init__()

        def convolution(inputs: int, outputs: int, size: int, padding: int) -> tuple[nn.Module, ...]:
            norm = nn.BatchNorm2d(outputs)
            norm = FSDP(norm, **fsdp_kwargs) if with_fsdp else norm
            return nn.Conv2d(inputs, outputs, size, padding=padding), norm, nn.ReLU(inplace=True)

        self.stem = nn.Sequential(*convolution(3, 64, 3, 0))
        self.blocks = nn.Sequential(
            *convolution(64, hidden_dim, 5, 2),
            *convolution(hidden_dim, hidden_dim, 5, 2),
            *convolution(hidden_dim, hidden_dim, 5, 2),
            nn.AdaptiveAvgPool2d((1, 1)),
            nn.Flatten(),
        )
        self.head = nn.Linear(hidden_dim, 10)
        self.with_checkpoint = with_checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(checkpoint(self.blocks, x, use_reentrant=True) if self.with_checkpoint else self.blocks(x))


def create_model(with_fsdp: bool, with_checkpoint: bool, model_hidden_dim: int, **fsdp_kwargs: Any) -> Model:
    torch.manual_seed(0)
    model = Model(model_hidden_dim, with_fsdp, with_checkpoint, **fsdp_kwargs)
    if with_fsdp:
        for name in ("stem", "blocks", "head"):
            setattr(model, name, FSDP(getattr(model, name), **fsdp_kwargs))
    return model


class TestFSDPMemory(FSDPTest):
    world_size = 2

    def _sharded(self, hidden_dim: int, with_checkpoint: bool = False, **fsdp_kwargs: Any) -> FSDP:
        model = create_model(True, with_checkpoint, hidden_dim, **fsdp_kwargs)
        return FSDP(model.to(self.device), **fsdp_kwargs)

    def _input(self, size: int) -> torch.Tensor:
        torch.manual_seed(1 + self.rank)
        return torch.randn(2, 3, size, size).to(self.device)

    def _dist_train(
        self,
        model: FSDP,
        optim: torch.optim.Optimizer,
        x: torch.Tensor,
        look: Callable[[], Any],
        iterations: int = ITERATIONS,
    ) -> list[Seen]:
        """Train, and return for each iteration the value of ``look`` at each point."""
        seen = []
        for _ in range(iterations):
            at = {"start": look()}
            output = model(x)
            at["after fwd"] = look()
            loss = nn.functional.mse_loss(output[0].sum(), torch.tensor(0.0, device=self.device))
            at["after loss"] = look()
            loss.backward()
            at["after bwd"] = look()
            optim.step()
            at["after step"] = look()
            optim.zero_grad(set_to_none=True)
            del output, loss
            at["done"] = look()
            seen.append(at)
        return seen

    def _optimizer(self, model: FSDP) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)

    @skip_if_lt_x_gpu(2)
    @parametrize("ckpt", ["no_ckpt", "ckpt"])
    def test_fsdp_memory(self, ckpt):
        """Shards stay allocated. Unsharded parameters and gradients are freed. Momentum is added in the first step."""
        self._test_storages(ckpt == "ckpt")
        if accelerator.current().has("memory_stats"):
            self._test_allocator(ckpt == "ckpt")

    # By the allocator.

    def _test_allocator(self, with_checkpoint: bool) -> None:
        hidden_dim, size = LARGE
        look = functools.partial(get_cur_mem, self.device)
        before = look()
        model = create_model(False, False, hidden_dim).to(self.device)
        shard = (look() - before) // 2
        del model
        model = self._sharded(hidden_dim, with_checkpoint)
        seen = self._dist_train(model, self._optimizer(model), self._input(size), look)

        # The activations were measured for one kind of device. On others, the first forward measures them.
        activations = seen[0]["after fwd"]
        if common_cuda.TEST_CUDA:
            activations = 51 if with_checkpoint else 340
        first = [shard + 1, activations, activations, 2 * shard + 1, 3 * shard + 1, 2 * shard + 1]
        later = [2 * shard + 1, *[activations + shard] * 2, 3 * shard + 1, 3 * shard + 1, 2 * shard + 1]
        for actual, expected in zip(seen, [first, *[later] * (ITERATIONS - 1)], strict=True):
            self.assertEqual(actual, dict(zip(POINTS, expected, strict=True)), rtol=0, atol=1)

    # By storages.

    def _held(self, model: FSDP, optim: torch.optim.Optimizer) -> dict[str, int]:
        flat_params = internals.flat_params(model)
        return {
            "shards": bytes_of(flat_params),
            "gathered": bytes_of(self._gathered(model)),
            "gradients": bytes_of(
                getattr(flat_param, name, None) for flat_param in flat_params for name in ("grad", "_saved_grad_shard")
            ),
            "momentum": bytes_of(value for state in optim.state.values() for value in state.values()),
        }

    def _gathered(self, model: FSDP) -> list[torch.Tensor]:
        """The all-gather buffers of all units. There are none before the first forward."""
        return [each for flat_param in internals.flat_params(model) for each in internals.gather_buffers(flat_param)]

    def _shard_bytes(self, model: FSDP) -> tuple[int, int]:
        """The bytes of this rank's shards and of all parameters. Shards have equal sizes; the last is padded."""
        numels = [internals.numel_of(flat_param) for flat_param in internals.flat_params(model)]
        self.assertEqual(len(numels), 7)  # stem, blocks, head, and four norms
        self.assertIsNone(internals.handle(model))
        shards = [-(-numel // self.world_size) for numel in numels]
        return BYTES * sum(shards), BYTES * sum(numels)

    def _test_storages(self, with_checkpoint: bool) -> None:
        hidden_dim, size = SMALL
        model = self._sharded(hidden_dim, with_checkpoint)
        optim = self._optimizer(model)
        x = self._input(size)
        shard, total = self._shard_bytes(model)
        plain = create_model(False, False, hidden_dim)
        self.assertEqual(total, BYTES * sum(param.numel() for param in plain.parameters()))
        seen = self._dist_train(model, optim, x, lambda: self._held(model, optim))
        for iteration, actual in enumerate(seen):
            momentum = shard if iteration else 0
            forward = {"shards": shard, "gathered": 0, "gradients": 0, "momentum": momentum}
            backward = {**forward, "gradients": shard}
            expected = [*[forward] * 3, backward, {**backward, "momentum": shard}, {**forward, "momentum": shard}]
            self.assertEqual(actual, dict(zip(POINTS, expected, strict=True)))

        # The shards hold all parameters, and less than one element of padding per rank and unit.
        of_all = torch.tensor(shard, device=self.device)
        dist.all_reduce(of_all)
        self.assertGreaterEqual(of_all.item(), total)
        self.assertLessEqual(of_all.item() - total, BYTES * 7 * (self.world_size - 1))
        if with_checkpoint:
            without = self._saved_bytes(self._sharded(hidden_dim), x)
            self.assertLess(2 * self._saved_bytes(model, x), without)

    def _saved_bytes(self, model: FSDP, x: torch.Tensor) -> int:
        """The bytes that forward saves for backward, without the parameters."""
        saved = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            saved.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(x).sum()
        owned = set(map(internals.storage_id, self._gathered(model)))
        kept = bytes_of(tensor for tensor in saved if internals.storage_id(tensor) not in owned)
        loss.backward()
        self.assertGreater(kept, 0)
        return kept

    @skip_if_lt_x_gpu(2)
    def test_gathered_only_on_the_path(self):
        """In forward, a unit is unsharded only while it, or a unit inside it, runs."""
        model = self._sharded(SMALL[0])
        units = {name: unit for name, unit in internals.instances(model).items() if internals.handle(unit)}
        self._shard_bytes(model)
        looks: list[str] = []

        def gathered() -> set[str]:
            return {name for name, unit in units.items() if internals.is_unsharded(internals.flat_param_of(unit))}

        def look_within(name: str, *_: Any) -> None:
            path = {unit for unit in units if f"{name}.".startswith(f"{unit}.")}
            looks.append(name)
            self.assertEqual(gathered(), path)

        def look_after(name: str, *_: Any) -> None:
            looks.append(name)
            self.assertNotIn(name, gathered())

        for name, unit in units.items():
            unit.module.register_forward_pre_hook(functools.partial(look_within, name))
            unit.module.register_forward_hook(functools.partial(look_within, name))
            unit.register_forward_hook(functools.partial(look_after, name))
        for _ in range(2):
            looks.clear()
            loss = model(self._input(SMALL[1])).sum()
            self.assertEqual({name: looks.count(name) for name in units}, dict.fromkeys(units, 3))
            loss.backward()
            self.assertEqual(gathered(), set(), may_be="empty")

    @skip_if_lt_x_gpu(2)
    @subtests(with_checkpoint=[False, True])
    def test_gathered_until_backward(self, with_checkpoint):
        """With SHARD_GRAD_OP, parameters stay unsharded from forward until backward frees them all."""
        hidden_dim, size = SMALL
        model = self._sharded(hidden_dim, with_checkpoint, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
        optim = self._optimizer(model)
        shard, _ = self._shard_bytes(model)
        seen = self._dist_train(model, optim, self._input(size), lambda: self._held(model, optim), iterations=2)
        for found in seen:
            gathered = [at["gathered"] for at in found.values()]
            self.assertEqual(gathered, [0, *[self.world_size * shard] * 2, 0, 0, 0])
            self.assertEqual({at["shards"] for at in found.values()}, {shard})

    @skip_if_lt_x_gpu(2)
    @parametrize("ckpt", ["no_ckpt", "ckpt"])
    def test_no_growth(self, ckpt):
        """At each point, the last iteration holds as much memory as the one before.

        The test counts all tensors. If the device has statistics, it also compares the allocator's peaks.
        """
        model = self._sharded(SMALL[0], ckpt == "ckpt")
        x = self._input(SMALL[1])
        seen = self._dist_train(model, self._optimizer(model), x, functools.partial(alive, self.device))
        self.assertEqual(seen[3], seen[2])
        # After forward there are activations. This proves that the test counted something.
        self.assertGreater(seen[2]["after fwd"], seen[2]["start"])
        if accelerator.current().has("memory_stats"):
            hidden_dim, size = LARGE
            model = self._sharded(hidden_dim, ckpt == "ckpt")
            optim, x = self._optimizer(model), self._input(size)
            module = torch.get_device_module(self.device)
            peaks = []
            for _ in range(ITERATIONS):
                module.reset_peak_memory_stats()
                self._dist_train(model, optim, x, lambda: None, iterations=1)
                peaks.append(module.max_memory_allocated() / 1024**2)
            self.assertEqual(peaks[3], peaks[2], rtol=0, atol=1)

    @skip_if_lt_x_gpu(2)
    def test_readers_of_offloaded_parameters(self):
        """The copy of an offloaded flat parameter is not reused before its readers have run.

        Without sharding, there is no all-gather between the copy and its readers. Without ``use_orig_params`` the
        module's views keep the copy.
        """
        layer = nn.Linear(4, 4, device=self.device)
        how = {"sharding_strategy": ShardingStrategy.NO_SHARD, "cpu_offload": CPUOffload(offload_params=True)}
        model = FSDP(layer, use_orig_params=True, **how)
        flat_param = internals.flat_param_of(model)
        read: list[int] = []
        reported: list[tuple[int, Any]] = []

        def look(*_: Any) -> None:
            read.append(internals.storage_id(flat_param.data))

        def record(tensor: torch.Tensor, stream: Any) -> None:
            reported.append((internals.storage_id(tensor), stream))

        layer.register_forward_pre_hook(look)
        with torch_names.patched(internals.flat_param, "_no_dispatch_record_stream", record):
            output = model(torch.ones(2, 4, device=self.device))
            output.register_hook(look)
            output.sum().backward()
        current = torch.get_device_module(self.device.type).current_stream()
        self.assertEqual(len(read), 2)
        with torch_defect("fsdp1_unsharded_copy_is_freed_while_read"):
            for storage in read:
                self.assertIn((storage, current), reported)

    @skip_if_lt_x_gpu(2)
    @subtests(runs=[False, True], use_orig_params=[False, True])
    def test_deleted_model_is_freed(self, runs, use_orig_params):
        """Nothing of a deleted model stays in memory."""
        model = FSDP(nn.Linear(4, 4, device=self.device), use_orig_params=use_orig_params)
        if runs:
            model(torch.ones(1, 4, device=self.device)).sum().backward()
        parts = {"instance": model, "module": model.module, "parameter": next(model.parameters())}
        alive = {name: weakref.ref(part) for name, part in parts.items()}
        del model, parts
        drop_last_work(self.device)
        with torch_defect("fsdp1_flat_model_is_never_freed", when=not use_orig_params):
            self.assertEqual([name for name, part in alive.items() if part() is not None], [], may_be="empty")


instantiate_parametrized_tests(TestFSDPMemory)

if __name__ == "__main__":
    run_tests()
