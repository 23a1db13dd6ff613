"""What FSDP2 holds in memory: upper bounds through a step, and nothing left behind.

Where the device has an allocator with statistics, its peaks are bounded. Everywhere the storages that FSDP owns are
counted by kind, which is exact: a bound that is met by one byte too many fails.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from torch_fsdp_tests import accelerator, torch_facts
from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest, patch_post_backward
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.distributed._tensor.common_dtensor import ModelArgs, Transformer, TransformerBlock
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.internals import groups_of
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import bytes_of
from torch_fsdp_tests.fsdp.shards import local_of

BYTES = 4  # of a float32
SMALL = ModelArgs(n_layers=3, vocab_size=32, dim=16, dropout_p=0.0, weight_tying=False)
LARGE = ModelArgs(n_layers=3, vocab_size=32, dim=768, n_heads=12, dropout_p=0.0, weight_tying=False)


def gathered(groups: Iterable[internals.Group]) -> list[torch.Tensor]:
    return [output for group in groups for param in group.fsdp_params for output in param.all_gather_outputs]


def numel(modules: Iterable[nn.Module]) -> int:
    return sum(param.numel() for module in modules for param in module.parameters())


class TestFullyShardMemory(FSDPTest):
    world_size = 2

    def _sharded(
        self, args: ModelArgs, reshard_after_forward: bool = True, use_cpu_offload: bool = False, **kwargs: Any
    ) -> Transformer:
        torch.manual_seed(42)
        model = Transformer(args)
        policy = CPUOffloadPolicy() if use_cpu_offload else OffloadPolicy()
        shard = functools.partial(
            fully_shard, reshard_after_forward=reshard_after_forward, offload_policy=policy, **kwargs
        )
        for module in model.modules():
            if isinstance(module, TransformerBlock):
                shard(module)
        return shard(model)

    def _tokens(self, args: ModelArgs) -> torch.Tensor:
        torch.manual_seed(42 + self.rank)
        return torch.randint(0, args.vocab_size, (1, 4), device=self.device)

    def _register_optim_in_backward(self, model: nn.Module, **kwargs: Any) -> list[torch.optim.Optimizer]:
        """An optimizer for each parameter, which steps as soon as its gradient is there, and drops it."""
        optims = {param: torch.optim.AdamW([param], foreach=True, **kwargs) for param in model.parameters()}

        def step(param: torch.Tensor) -> None:
            optims[param].step()
            optims[param].zero_grad()

        for param in optims:
            param.register_post_accumulate_grad_hook(step)
        return list(optims.values())

    def _memory(self, which: str) -> int:
        stats = torch.get_device_module(accelerator.current().type).memory_stats()
        return round(stats[f"active_bytes.all.{which}"] / 1e6)

    def _get_peak_active_memory_mb(self) -> int:
        return self._memory("peak")

    def _get_curr_active_memory_mb(self) -> int:
        return self._memory("current")

    @staticmethod
    def _combinations() -> Iterator[tuple[bool, bool, bool]]:
        for reshard, offload, in_backward in itertools.product([True, False], repeat=3):
            if ((offload or in_backward) and not reshard) or (offload and in_backward):
                continue
            yield reshard, offload, in_backward

    @skip_if_lt_x_gpu(2)
    def test_fully_shard_training_memory(self):
        """By the storages that FSDP owns, exactly, and by the allocator where it has statistics."""
        for reshard, offload, in_backward in self._combinations():
            names = "reshard_after_forward", "use_cpu_offload", "run_optim_in_backward"
            with self.subTest(**dict(zip(names, (reshard, offload, in_backward), strict=True))):
                self._test_training_storage(reshard, offload, in_backward)
                if accelerator.current().has("memory_stats"):
                    self._test_fully_shard_training_memory(reshard, offload, in_backward)

    # What the allocator says.

    def _base_memory(self) -> int:
        """What is in use with the libraries of matrix products loaded, for the second row of an input too."""
        warm = nn.Linear(768, 768, device=self.device)
        warm(torch.randn(2, 768, device=self.device)).sum().backward()
        del warm
        gc.collect()
        module = torch.get_device_module(accelerator.current().type)
        module.empty_cache()
        module.reset_peak_memory_stats()
        return self._get_peak_active_memory_mb()

    def _test_fully_shard_training_memory(
        self, reshard_after_forward: bool, use_cpu_offload: bool, run_optim_in_backward: bool
    ) -> None:
        base = self._base_memory()
        model = self._sharded(LARGE, reshard_after_forward, use_cpu_offload)
        with torch.device("meta"):
            plain = Transformer(LARGE)
        # Millions of bytes of all parameters, of one block's, of what is in no block, and of a shard of all.
        total, block = (BYTES * numel([module]) / 1e6 for module in (plain, plain.layers[0]))
        rest = total - LARGE.n_layers * block
        shard = BYTES * math.ceil(numel([plain]) / 2) / 1e6

        at_init = 1.5 * block if use_cpu_offload else shard + block
        self.assertLessEqual(self._get_peak_active_memory_mb() - base, at_init + 4)
        self.assertLessEqual(self._get_curr_active_memory_mb() - base, at_init)
        on_device = 0 if use_cpu_offload else shard
        slack = 18 if torch.version.hip else 16

        if run_optim_in_backward:
            self._register_optim_in_backward(model, lr=1e-2)
        else:
            optim = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)
        loss = model(self._tokens(LARGE)).sum()
        in_forward = 3 * block + rest + on_device if reshard_after_forward else shard + total + block
        self.assertLessEqual(self._get_peak_active_memory_mb() - base, in_forward + slack)

        loss.backward()
        if not reshard_after_forward:
            in_backward = shard + total + 1.5 * block
        elif use_cpu_offload:
            in_backward = 4 * block + rest
        elif run_optim_in_backward:
            in_backward = 4 * block + rest + shard + block / 2
        else:
            in_backward = 4 * block + rest + 2 * shard
        self.assertLessEqual(self._get_peak_active_memory_mb() - base, in_backward + slack)
        del loss

        reset_peak = torch.get_device_module(accelerator.current().type).reset_peak_memory_stats
        reset_peak()
        if not run_optim_in_backward:
            optim.step()
            after_step = 0 if use_cpu_offload else 4 * shard
            self.assertLessEqual(self._get_curr_active_memory_mb() - base, after_step + slack)
            reset_peak()
            optim.zero_grad()
        after_zero = 0 if use_cpu_offload else 3 * shard
        self.assertLessEqual(self._get_curr_active_memory_mb() - base, after_zero + 2 * slack)

    def _test_del_memory(self) -> None:
        base = self._base_memory()
        model = self._sharded(LARGE)
        with torch.device("meta"):
            half = math.floor(numel([Transformer(LARGE)]) / 2) * BYTES / 1e6
        self.assertLessEqual(self._get_curr_active_memory_mb() - base, half + 4)
        del model
        gc.collect()
        self.assertEqual(self._get_curr_active_memory_mb(), base)

    # What FSDP's own storages add up to.

    def _held(self, model: nn.Module, optims: Iterable[torch.optim.Optimizer]) -> dict[str, int]:
        groups = groups_of(model)
        params = [param for group in groups for param in group.fsdp_params]
        unsharded = [param._unsharded_param.grad for param in params if hasattr(param, "_unsharded_param")]
        moments = (value for optim in optims for state in optim.state.values() for value in state.values())
        return {
            "shards": bytes_of(param._sharded_param_data for param in params),
            "gathered": bytes_of(gathered(groups)),
            "unsharded gradients": bytes_of([*unsharded, *(param.unsharded_accumulated_grad for param in params)]),
            "sharded gradients": bytes_of(local_of(param.sharded_param.grad) for param in params),
            "moments": bytes_of(local_of(value) for value in moments if value.numel() > 1),
        }

    def _test_training_storage(self, reshard: bool, offload: bool, in_backward: bool) -> None:
        model = self._sharded(SMALL, reshard, offload)
        plain = Transformer(SMALL)
        total, block = (BYTES * numel([module]) for module in (plain, plain.layers[0]))
        rest = total - SMALL.n_layers * block
        shard = total // 2  # every parameter has an even number of rows
        nothing = dict.fromkeys(self._held(model, []), 0)
        self.assertEqual(self._held(model, []), {**nothing, "shards": shard})

        peaks: list[int] = []
        for layer in model.layers:
            # Hooks that come after fully_shard's see what that has gathered.
            layer.attention.register_forward_pre_hook(lambda *_: peaks.append(bytes_of(gathered(groups_of(model)))))
        optims = (
            self._register_optim_in_backward(model, lr=1e-2)
            if in_backward
            else [torch.optim.AdamW(model.parameters(), lr=1e-2)]
        )
        for iteration in range(2):
            moments = 2 * shard if iteration else 0
            peaks.clear()
            loss = model(self._tokens(SMALL)).sum()
            after_first = [rest + block] * 3 if reshard else [rest + (index + 1) * block for index in range(3)]
            self.assertEqual(peaks, after_first)
            kept = 0 if reshard else total
            self.assertEqual(
                self._held(model, optims), {**nothing, "shards": shard, "gathered": kept, "moments": moments}
            )
            loss.backward()
            gradients = {"moments": 2 * shard} if in_backward else {"sharded gradients": shard, "moments": moments}
            self.assertEqual(self._held(model, optims), {**nothing, "shards": shard, **gradients})
            if not in_backward:
                optims[0].step()
                wanted = {**nothing, "shards": shard, "sharded gradients": shard, "moments": 2 * shard}
                self.assertEqual(self._held(model, optims), wanted)
                optims[0].zero_grad()
            self.assertEqual(self._held(model, optims), {**nothing, "shards": shard, "moments": 2 * shard})

    @skip_if_lt_x_gpu(2)
    def test_fully_shard_del_memory(self):
        """Parameters, groups and what was gathered all die with the model; the allocator, if asked, agrees."""
        if accelerator.current().has("memory_stats"):
            self._test_del_memory()
        model = self._sharded(SMALL, reshard_after_forward=False)
        model(self._tokens(SMALL)).sum().backward()
        groups = groups_of(model)
        things = [*groups, *gathered(groups), *model.parameters(), *(param.grad for param in model.parameters())]
        references = [weakref.ref(thing) for thing in things]
        self.assertEqual(len(groups), 4)
        del model, groups, things

        def alive() -> list[str]:
            gc.collect()
            return [type(found).__name__ for reference in references if (found := reference()) is not None]

        give_up = time.monotonic() + 5  # a device's thread of autograd lets go of the graph after backward has returned
        while alive() and time.monotonic() < give_up:
            pass
        self.assertEqual(alive(), [])

    @needs(torch_facts.KEEPS_REDUCE_SCATTER_INPUTS)
    @skip_if_lt_x_gpu(2)
    @subtests(most=[1, 2, 3, 10], by_one_block=[False, True], replicated=[False, True])
    def test_reduce_scatter_max_input_buffers(self, most, by_one_block, replicated):
        """Beyond upstream: no more inputs of reduce-scatters are kept than asked for, and none after backward.

        If one block alone asks for more, all have it, since they keep them in one list.
        """
        model = self._sharded(SMALL, reshard_after_forward=not by_one_block, mesh=self._mesh(replicated))
        (model.layers[1] if by_one_block else model).set_reduce_scatter_max_input_buffers(most)
        for _ in range(2):
            loss = model(self._tokens(SMALL)).sum()
            with self._after_each_group(lambda group: len(group.comm_ctx.reduce_scatter_states)) as kept:
                loss.backward()
            self.assertEqual(kept, [min(reduced, most) for reduced in (1, 2, 3, 4)])  # three blocks and the root
            self.assertEqual(internals.comm_context(model).reduce_scatter_states, [])

    def _mesh(self, replicated: bool) -> DeviceMesh:
        """One shard for each rank, or a whole replica."""
        return make_mesh(2, 1, names=("replicate", "shard")) if replicated else make_mesh(2, names=("shard",))

    @contextlib.contextmanager
    def _after_each_group(self, look: Callable[[internals.Group], int]) -> Iterator[list[int]]:
        """What there is to see when the backward of each group has just ended."""
        seen: list[int] = []
        original = internals.fsdp2_param_group.FSDPParamGroup.post_backward

        def post_backward(group: internals.Group, *args: Any) -> None:
            original(group, *args)
            seen.append(look(group))

        with patch_post_backward(post_backward):
            yield seen

    def _alive(self) -> int:
        """The bytes of the storages under all tensors that the garbage collector knows."""
        gc.collect()
        return bytes_of(each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter))

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False])
    def test_no_leak(self, reshard_after_forward):
        """Beyond upstream: after the 13th iteration as much is alive as after the third."""
        model = self._sharded(SMALL, reshard_after_forward)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = self._tokens(SMALL)
        found = {}
        for iteration in range(1, 14):
            optim.zero_grad()
            model(tokens).sum().backward()
            optim.step()
            if iteration in (3, 13):
                waiting = len(internals.comm_context(model).post_forward_order)
                found[iteration] = self._held(model, [optim]), waiting, self._alive()
        self.assertEqual(found[13], found[3])

    @needs(torch_facts.RESETS_ITERATION)
    @skip_if_lt_x_gpu(2)
    def test_no_leak_after_error(self):
        """Beyond upstream: a forward that breaks off leaves nothing once the iteration is reset."""
        model = self._sharded(SMALL)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = self._tokens(SMALL)

        def fail(module: nn.Module, args: Any) -> None:
            raise ZeroDivisionError("in the second block")

        found = []
        for breaks_off in (False, False, True, True):
            if breaks_off:
                handle = model.layers[1].attention.register_forward_pre_hook(fail)
                with self.assertRaisesRegex(ZeroDivisionError, "in the second block"):
                    model(tokens)
                handle.remove()
                self.assertGreater(self._held(model, [optim])["gathered"], 0)
                model.reset_iter_state()
                self.assertEqual(self._held(model, [optim])["gathered"], 0)
            optim.zero_grad()
            model(tokens).sum().backward()
            optim.step()
            found.append((self._held(model, [optim]), self._alive()))
        self.assertEqual(found[2:], [found[1]] * 2)

    @skip_if_lt_x_gpu(2)
    def test_all_reduce_buffer_is_dropped(self):
        """Beyond upstream: what HSDP all-reduces is held until the next group's reduction, and not after backward."""
        model = self._sharded(SMALL, mesh=self._mesh(replicated=True))
        for _ in range(2):
            loss = model(self._tokens(SMALL)).sum()
            with self._after_each_group(
                lambda _: sum(each._all_reduce_state is not None for each in groups_of(model))
            ) as held:
                loss.backward()
            self.assertGreater(max(held), 0)
            self.assertEqual([group._all_reduce_state for group in groups_of(model)], [None] * 4)
            dist.barrier()


if __name__ == "__main__":
    run_tests()
