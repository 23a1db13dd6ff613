"""FSDP2's use of memory: upper bounds during a step, and no leaks.

If the device's allocator has statistics, the tests check its peaks. On every device they count the bytes of FSDP's own
storages by kind. These counts must be exact.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import math
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest, patch_all_reduce, patch_post_backward
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import NO_DEFECT, torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import ModelArgs, Transformer, TransformerBlock
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.expert_parallelism import expert_meshes, shard_experts
from torch_fsdp_tests.fsdp.internals import groups_of
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average_gradients, bytes_of
from torch_fsdp_tests.fsdp.shards import local_of
from torch_fsdp_tests.fsdp.training import shard_each, tiny_transformer
from torch_fsdp_tests.installed_torch import torch_facts

BYTES = 4  # per float32
SMALL = ModelArgs(n_layers=3, vocab_size=32, dim=16, dropout_p=0.0, weight_tying=False)
LARGE = ModelArgs(n_layers=3, vocab_size=32, dim=768, n_heads=12, dropout_p=0.0, weight_tying=False)


def gathered(groups: Iterable[internals.Group]) -> list[torch.Tensor]:
    return [output for group in groups for param in group.fsdp_params for output in param.all_gather_outputs]


def numel(modules: Iterable[nn.Module]) -> int:
    return sum(param.numel() for module in modules for param in module.parameters())


class BodyAlone(nn.Module):
    """Two layers, of which forward runs only the first."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


class MemoryTest(FSDPTest):
    """A test case that measures the memory of models."""

    def _memory(self, which: str) -> int:
        stats = torch.get_device_module(accelerator.current().type).memory_stats()
        return round(stats[f"active_bytes.all.{which}"] / 1e6)

    def _get_peak_active_memory_mb(self) -> int:
        return self._memory("peak")

    def _get_curr_active_memory_mb(self) -> int:
        return self._memory("current")

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

    def _alive(self, collects: bool = True) -> int:
        """The bytes of the storages of all tensors that the garbage collector tracks."""
        if collects:
            gc.collect()
        return bytes_of(each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter))


class TestFullyShardMemory(MemoryTest):
    world_size = 2

    def _sharded(
        self, args: ModelArgs, reshard_after_forward: bool = True, use_cpu_offload: bool = False, **kwargs: Any
    ) -> Transformer:
        torch.manual_seed(42)
        model = Transformer(args)
        self._originals = {
            name: (weakref.ref(param), StorageWeakRef(param.untyped_storage()))
            for name, param in model.named_parameters()
        }
        policy = CPUOffloadPolicy() if use_cpu_offload else OffloadPolicy()
        shard = functools.partial(
            fully_shard, reshard_after_forward=reshard_after_forward, offload_policy=policy, **kwargs
        )
        for module in model.modules():
            if isinstance(module, TransformerBlock):
                shard(module)
        return shard(model)

    def _assert_originals_are_freed(self) -> None:
        """Nothing keeps the parameters from before ``fully_shard``, or their memory."""
        gc.collect()
        kept = [
            name for name, (param, storage) in self._originals.items() if param() is not None or not storage.expired()
        ]
        self.assertEqual(kept, [], may_be="empty")

    def _tokens(self, args: ModelArgs) -> torch.Tensor:
        torch.manual_seed(42 + self.rank)
        return torch.randint(0, args.vocab_size, (1, 4), device=self.device)

    def _register_optim_in_backward(self, model: nn.Module, **kwargs: Any) -> list[torch.optim.Optimizer]:
        """Create an optimizer for each parameter. It steps when the gradient is ready, and frees the gradient."""
        optims = {param: torch.optim.AdamW([param], foreach=True, **kwargs) for param in model.parameters()}

        def step(param: torch.Tensor) -> None:
            optims[param].step()
            optims[param].zero_grad()

        for param in optims:
            param.register_post_accumulate_grad_hook(step)
        return list(optims.values())

    @skip_if_lt_x_gpu(2)
    @subtests(
        reshard_after_forward=[True, False],
        use_cpu_offload=[True, False],
        run_optim_in_backward=[True, False],
        # The last two exclude each other, and are tested only with resharding.
        valid=lambda reshard_after_forward, **others: sum(others.values()) <= reshard_after_forward,
    )
    def test_fully_shard_training_memory(self, reshard_after_forward, use_cpu_offload, run_optim_in_backward):
        """FSDP's own storages have exactly the expected sizes. Allocator peaks are bounded if it has statistics."""
        options = reshard_after_forward, use_cpu_offload, run_optim_in_backward
        self._test_training_storage(*options)
        if accelerator.current().has("memory_stats"):
            self._test_fully_shard_training_memory(*options)

    # Statistics of the allocator.

    def _base_memory(self) -> int:
        """Return the peak of active memory after a step that loads the matrix multiplication libraries."""
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
        # Megabytes of all parameters, of one block, of the parameters outside blocks, and of one rank's shards.
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
        # A block is copied out of its all-gather output while that of the block before is kept ("free after the next
        # copy-out", says FSDPParamGroup.wait_for_unshard). Without resharding upstream allows one block less, from a
        # base that may hold earlier peaks.
        in_forward = 3 * block + rest + on_device if reshard_after_forward else shard + total + 2 * block
        self.assertLessEqual(self._get_peak_active_memory_mb() - base, in_forward + slack)

        reset_peak = torch.get_device_module(accelerator.current().type).reset_peak_memory_stats
        reset_peak()
        loss.backward()
        if not reshard_after_forward:
            in_backward = shard + total + 1.5 * block
        elif use_cpu_offload:
            in_backward = 4 * block + rest
        elif run_optim_in_backward:
            # The block before has had its step, so its states are there: two values for each element of its shards.
            in_backward = 4 * block + rest + shard + 2 * (block / 2)
        else:
            in_backward = 4 * block + rest + 2 * shard
        self.assertLessEqual(self._get_peak_active_memory_mb() - base, in_backward + slack)
        del loss

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

    # Sizes of FSDP's own storages.

    def _test_training_storage(self, reshard: bool, offload: bool, in_backward: bool) -> None:
        model = self._sharded(SMALL, reshard, offload)
        self._assert_originals_are_freed()
        plain = Transformer(SMALL)
        total, block = (BYTES * numel([module]) for module in (plain, plain.layers[0]))
        rest = total - SMALL.n_layers * block
        shard = total // 2  # every parameter has an even number of rows
        nothing = dict.fromkeys(self._held(model, []), 0)
        self.assertEqual(self._held(model, []), {**nothing, "shards": shard})

        peaks: list[int] = []
        for layer in model.layers:
            # This hook runs after the hook of fully_shard, so it sees the unsharded parameters.
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
                expected = {**nothing, "shards": shard, "sharded gradients": shard, "moments": 2 * shard}
                self.assertEqual(self._held(model, optims), expected)
                optims[0].zero_grad()
            self.assertEqual(self._held(model, optims), {**nothing, "shards": shard, "moments": 2 * shard})

    @skip_if_lt_x_gpu(2)
    def test_fully_shard_del_memory(self):
        """Parameters, groups and all-gather outputs are freed with the model, also according to the allocator."""
        if accelerator.current().has("memory_stats"):
            self._test_del_memory()
        model = self._sharded(SMALL, reshard_after_forward=False)
        self._assert_originals_are_freed()
        model(self._tokens(SMALL)).sum().backward()
        groups = groups_of(model)
        things = [*groups, *gathered(groups), *model.parameters(), *(param.grad for param in model.parameters())]
        references = [weakref.ref(thing) for thing in things]
        self.assertEqual(len(groups), 4)
        del model, groups, things

        def alive() -> list[str]:
            gc.collect()
            return [type(found).__name__ for reference in references if (found := reference()) is not None]

        give_up = time.monotonic() + 5  # a device's autograd thread may free the graph after backward returns
        while alive() and time.monotonic() < give_up:
            pass
        self.assertEqual(alive(), [], may_be="empty")

    @needs(torch_facts.LIMITS_REDUCE_SCATTER_INPUT_BUFFERS)
    @skip_if_lt_x_gpu(2)
    @subtests(most=[1, 2, 3, 10], by_one_block=[False, True], replicated=[False, True])
    def test_reduce_scatter_max_input_buffers(self, most, by_one_block, replicated):
        """FSDP keeps at most the set number of reduce-scatter inputs, and none after backward.

        All groups share one list of inputs, so a larger limit of one block applies to all.
        """
        model = self._sharded(SMALL, reshard_after_forward=not by_one_block, mesh=self._mesh(replicated))
        (model.layers[1] if by_one_block else model).set_reduce_scatter_max_input_buffers(most)
        for _ in range(2):
            loss = model(self._tokens(SMALL)).sum()
            with self._after_each_group(lambda group: len(group.comm_ctx.reduce_scatter_states)) as kept:
                loss.backward()
            self.assertEqual(kept, [min(reduced, most) for reduced in (1, 2, 3, 4)])  # three blocks and the root
            self.assertEqual(internals.comm_context(model).reduce_scatter_states, [], may_be="empty")

    @needs(torch_facts.LIMITS_REDUCE_SCATTER_INPUT_BUFFERS, torch_facts.HAS_MESH_PER_PARAMETER)
    @skip_if_lt_x_gpu(2)
    def test_reductions_of_one_module_overlap(self):
        """FSDP applies the limit when a module begins to reduce, not between the groups of one module."""
        group = DeviceMesh.from_group(dist.new_group(), self.device.type)
        other = internals.fsdp2_common.FSDPMeshInfo(group, shard_mesh_dim=0)
        model = nn.Sequential(*(nn.Linear(4, 4, device=self.device) for _ in range(2)))
        for layer in model:
            result = internals.fsdp2_common.ShardPlacementResult(Shard(0), other)
            fully_shard(layer, shard_placement_fn=lambda param, result=result: result if param.ndim == 1 else None)
        fully_shard(model)
        with self._after_each_group(lambda group: len(group.comm_ctx.reduce_scatter_states)) as kept:
            model(torch.ones(2, 4, device=self.device)).sum().backward()
        self.assertEqual(kept, [1, 2, 1, 2])  # two groups of each layer

    def _mesh(self, replicated: bool) -> DeviceMesh:
        """Return a mesh that shards over two ranks, or replicates over them."""
        return make_mesh(2, 1, names=("replicate", "shard")) if replicated else make_mesh(2, names=("shard",))

    @contextlib.contextmanager
    def _after_each_group(self, look: Callable[[internals.Group], int]) -> Iterator[list[int]]:
        """Collect the result of ``look`` after the backward of each group."""
        seen: list[int] = []
        original = internals.fsdp2_param_group.FSDPParamGroup.post_backward

        def post_backward(group: internals.Group, *args: Any) -> None:
            original(group, *args)
            seen.append(look(group))

        with patch_post_backward(post_backward):
            yield seen

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False])
    def test_no_leak(self, reshard_after_forward):
        """After 13 iterations as much memory is in use as after three."""
        model = self._sharded(SMALL, reshard_after_forward)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = self._tokens(SMALL)
        actual = {}
        for iteration in range(1, 14):
            optim.zero_grad()
            model(tokens).sum().backward()
            optim.step()
            if iteration in (3, 13):
                waiting = len(internals.comm_context(model).post_forward_order)
                actual[iteration] = self._held(model, [optim]), waiting, self._alive()
        self.assertEqual(actual[13], actual[3])

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False])
    def test_fully_shard_training_memory_no_gc(self, reshard_after_forward):
        """Iterations leave no memory that only the garbage collector could free (#173415)."""
        model = self._sharded(SMALL, reshard_after_forward)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        tokens = self._tokens(SMALL)
        actual = {}
        gc.disable()
        self.addCleanup(gc.enable)
        for iteration in range(1, 14):
            model(tokens).sum().backward()
            optim.step()
            optim.zero_grad()
            if iteration == 3:
                gc.collect()
            if iteration in (3, 13):
                actual[iteration] = self._alive(collects=False)
        self.assertEqual(actual[13], actual[3])

    @skip_if_lt_x_gpu(2)
    @subtests(kind=["foreach", "fused"])
    def test_no_growth_of_tracked_objects(self, kind):
        """An iteration adds no object that the garbage collector tracks (#178276, #181761)."""
        model = self._sharded(SMALL)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2, **{kind: True})
        tokens = self._tokens(SMALL)
        tracked = {}
        for iteration in range(1, 14):
            model(tokens).sum().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optim.step()
            optim.zero_grad()
            gc.collect()
            tracked[iteration] = len(gc.get_objects())
        with torch_defect("dtensor_optimizer_steps_keep_objects"):
            self.assertLess(tracked[13] - tracked[3], 10)

    @needs(torch_facts.HAS_RESET_ITER_STATE)
    @skip_if_lt_x_gpu(2)
    def test_no_leak_after_error(self):
        """After an exception in forward and a reset, no memory is left in use."""
        model = self._sharded(SMALL)
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = self._tokens(SMALL)

        def fail(module: nn.Module, args: Any) -> None:
            raise ZeroDivisionError("in the second block")

        actual = []
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
            actual.append((self._held(model, [optim]), self._alive()))
        self.assertEqual(actual[2:], [actual[1]] * 2)

    @skip_if_lt_x_gpu(2)
    def test_all_reduce_buffer_is_dropped(self):
        """HSDP keeps each all-reduce input during backward, and none after it."""
        model = self._sharded(SMALL, mesh=self._mesh(replicated=True))
        self._check_held_for_all_reduce(model)

    @skip_if_lt_x_gpu(2)
    def test_input_of_all_reduce_hook_is_dropped(self):
        """FSDP keeps each input of an all-reduce hook during backward, and none after it."""
        model = self._sharded(SMALL)
        given: list[torch.Tensor] = []
        for module in internals.fsdp_modules(model):
            module.set_all_reduce_hook(given.append)
        freed = torch_defect("fsdp2_input_of_all_reduce_hook_is_freed")
        self._check_held_for_all_reduce(model, lambda held: held is given[-1], freed)
        self.assertEqual(len(given), 2 * 4)

    def _check_held_for_all_reduce(
        self,
        model: nn.Module,
        is_right: Callable[[torch.Tensor], bool] = lambda held: True,
        freed: torch_defect = NO_DEFECT,
    ) -> None:
        """Run two backwards. Each group holds one buffer from its own reduction to the end of backward."""

        def look(group: internals.Group) -> int:
            state = group._all_reduce_state
            if state is None or not is_right(state.all_reduce_input):
                return 0
            return sum(each._all_reduce_state is not None for each in groups_of(model))

        for _ in range(2):
            loss = model(self._tokens(SMALL)).sum()
            with self._after_each_group(look) as held:
                loss.backward()
            with freed:
                self.assertEqual(held, [1, 2, 3, 4])  # three blocks and the root
            self.assertEqual([group._all_reduce_state for group in groups_of(model)], [None] * 4)
            dist.barrier()

    @skip_if_lt_x_gpu(2)
    def test_partial_group_is_resharded(self):
        """A group with a module that forward does not use is resharded when the root's forward ends."""
        model: Any = BodyAlone()
        fully_shard([model.body, model.head], reshard_after_forward=True)
        fully_shard(model)
        with torch.no_grad():
            model(torch.ones(2, 4, device=self.device))
        with torch_defect("fsdp2_partial_group_stays_gathered"):
            self.assertTrue(internals.group_of(model.head).is_sharded)

    @skip_if_lt_x_gpu(2)
    def test_group_is_resharded_after_error(self):
        """If the last module of a group raises in forward, all of its modules are resharded."""

        class Raises(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                raise RuntimeError("at the end of the group")

        model = nn.Sequential(nn.Linear(4, 4), Raises(4, 4)).to(self.device)
        fully_shard([*model])
        with self.assertRaisesRegex(RuntimeError, "at the end of the group"):
            fully_shard(model)(torch.ones(1, 4, device=self.device))
        self.assertEqual([group.is_sharded for group in internals.groups_of(model)], [True])
        for param in model.parameters():
            self.assertIsInstance(param, DTensor)

    @needs(torch_facts.CASTS_GRADIENTS_BY_DTYPE)
    @skip_if_lt_x_gpu(2)
    @subtests(features=[(2, 16, 4), (8, 4, 16), (4, 4, 4)])
    def test_gradients_of_two_dtypes(self, features):
        """Gradients that are cast do not keep their reduction buffer alive.

        The second layer requests bfloat16 gradients, the layers around it float32. If more than half is cast, FSDP
        copies the rest and frees the buffer. Otherwise the rest stays in the buffer.
        """

        class SideBySide(nn.Sequential):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.cat([layer(x) for layer in self], dim=1)

        model: Any = SideBySide(*(nn.Linear(4, out, bias=False) for out in features)).to(self.device)
        ref_model = copy.deepcopy(model)
        model[1].weight.grad_dtype = torch.bfloat16
        fully_shard(model, reshard_after_forward=True)
        torch.manual_seed(42 + self.rank)
        inp = torch.randint(-4, 5, (2, 4)).float().to(self.device)  # small integers are exact in bfloat16
        for each in (ref_model, model):
            each(inp).sum().backward()
        average_gradients(ref_model)
        grads = [layer.weight.grad for layer in model]
        self.assertEqual([grad.dtype for grad in grads], [torch.float32, torch.bfloat16, torch.float32])
        for grad, ref_layer in zip(grads, ref_model, strict=True):
            self.assertEqual(grad.full_tensor().float(), ref_layer.weight.grad, rtol=0, atol=0)
        # Gradients of one dtype share one storage, so one copy is enough for all of them.
        self.assertEqual(len({internals.storage_id(local_of(grads[index])) for index in (0, 2)}), 1)
        first, cast, last = (4 * out // self.world_size for out in features)
        reduced = first + last if cast > first + last else first + cast + last
        self.assertEqual(bytes_of(local_of(grad) for grad in grads), reduced * BYTES + cast * 2)


@needs(torch_facts.HAS_MESH_PER_PARAMETER)
class TestFullyShardPerParamMeshMemory(MemoryTest):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    def test_per_param_mesh_training_memory_no_gc(self):
        """Iterations of a model whose experts have a smaller mesh leave no memory to the garbage collector.

        After each step, local shards and moments are the only memory that FSDP and the optimizer hold.
        """
        meshes = expert_meshes(make_mesh(1, 2, 2, 1, names=("replicate", "shard", "expert", "tensor")))
        torch.manual_seed(42)
        model = tiny_transformer(n_layers=2, vocab_size=32, num_experts=8, weight_tying=False).to(self.device)
        Transformer.parallelize(model, None, use_seq_parallel=False, ep_mesh=meshes.expert_parallel)
        shard_experts(model, meshes, reshard_others=True)
        optim = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=False)
        tokens = torch.randint(0, 32, (2, 8), device=self.device)
        gc.disable()
        self.addCleanup(gc.enable)
        actual = {}
        for iteration in range(1, 14):
            model(tokens).sum().backward()
            self.assertEqual(internals.comm_context(model).reduce_scatter_states, [], may_be="empty")
            optim.step()
            optim.zero_grad()
            if iteration == 3:
                gc.collect()
            actual[iteration] = self._held(model, [optim]), self._alive(collects=False), self._in_use()
        shards = bytes_of(param._sharded_param_data for group in groups_of(model) for param in group.fsdp_params)
        self.assertEqual(
            {name: size for name, size in actual[3][0].items() if size}, {"shards": shards, "moments": 2 * shards}
        )
        self.assertEqual(actual[13], actual[3])

    def _in_use(self) -> int:
        """Megabytes according to the allocator, or 0 if it has no statistics."""
        return self._get_curr_active_memory_mb() if accelerator.current().has("memory_stats") else 0


class TestFullyShardHSDPSyncCorrectness(FSDPTest):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    @subtests(mp_dtype=[torch.bfloat16, torch.float16])
    def test_ar_buffer_lifetime_mixed_dtype(self, mp_dtype):
        """Buffers that are all-reduced in a low precision live until the end of backward.

        Gradients are float32 copies of them. Otherwise the next layer could reduce into a buffer that is still being
        all-reduced.
        """
        mesh = make_mesh(2, 2, names=("replicate", "shard"))
        policy = MixedPrecisionPolicy(param_dtype=mp_dtype, reduce_dtype=mp_dtype)
        torch.manual_seed(42)
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False, device=self.device) for _ in range(3)))
        shard_each([*model, model], mesh=mesh, mp_policy=policy)
        buffers: list[weakref.ref[torch.Tensor]] = []
        original = dist.all_reduce

        def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            buffers.append(weakref.ref(tensor))
            self.assertEqual(tensor.dtype, mp_dtype)
            self.assertNotIn(None, [buffer() for buffer in buffers])
            return original(tensor, *args, **kwargs)

        for _ in range(2):
            with patch_all_reduce(all_reduce):
                model(torch.ones(2, 8, device=self.device)).sum().backward()
            self.assertEqual([buffer() for buffer in buffers], [None] * 3)
            buffers.clear()


if __name__ == "__main__":
    run_tests()
