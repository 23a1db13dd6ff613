"""FSDP2 trains like plain data parallelism, however modules are wrapped, grouped, called and combined.

The reference is the unsharded model, whose gradients the tests average. Every rank has its own data, and compares
losses, gradients before each step and parameters after it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_fsdp_tests.common_distributed import at_most, needs, ranks_of, requires_capability, skip_if_lt_x_gpu
from torch_fsdp_tests.common_distributed.requirements import skip_unless
from torch_fsdp_tests.common_fsdp import (
    MLP,
    FSDPTest,
    FSDPTestMultiThread,
    check_sharded_parity,
    compiled_fsdp_test,
    patch_all_gather,
    patch_foreach_all_gather,
    patch_foreach_reduce,
    patch_reduce_scatter,
)
from torch_fsdp_tests.common_utils import TEST_WITH_SLOW, manual_seed, run_tests, wrapSwapTensorsTest
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import Transformer, TransformerBlock
from torch_fsdp_tests.fsdp import collectives, internals
from torch_fsdp_tests.fsdp.combinations import one_by_one, pairwise_cases, subtests
from torch_fsdp_tests.fsdp.expert_parallelism import Meshes, expert_meshes, shard_experts
from torch_fsdp_tests.fsdp.forward_methods import ForwardMethodsMixin
from torch_fsdp_tests.fsdp.optimizers import ShardAdam, ShardAdamW
from torch_fsdp_tests.fsdp.references import average, average_gradients, full
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.shards import shard_largest_dim
from torch_fsdp_tests.fsdp.stacks import StacksMixin
from torch_fsdp_tests.fsdp.toy_models import ChunkedHeadModel
from torch_fsdp_tests.fsdp.training import (
    FEW,
    ITERATIONS,
    Loop,
    TrainingMixin,
    accumulating,
    backward,
    check_full,
    check_parity,
    loss_of,
    optimizers,
    shard_each,
    take_step,
    tiny_transformer,
    train,
)
from torch_fsdp_tests.installed_torch import torch_facts

needs_reset = needs(torch_facts.HAS_RESET_ITER_STATE)
needs_partial_groups = needs(torch_facts.COMPLETES_PARTIAL_GROUPS)


class RaisesOnDemand(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises:
            raise ZeroDivisionError("on demand")
        return self.module(x)


class TiedModel(nn.Module):
    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


def average_with_experts(ref_model: Any, meshes: Meshes) -> None:
    """Average the gradients as FSDP does. Gradients of experts are sums over the expert-parallel ranks."""
    average_gradients(ref_model, meshes.data.get_group())
    for layer in ref_model.layers:
        for param in layer.expert_layer.parameters():
            param.grad.mul_(meshes.expert_parallel.size())


class TestFullyShardForwardInputs(TrainingMixin, FSDPTestMultiThread):
    world_size = 2

    @skip_if_lt_x_gpu(1)
    def test_root_move_forward_input_to_device(self):
        """FSDP moves inputs from the CPU to the device. If the device is the CPU, it passes the tensors unchanged."""
        received: list[torch.Tensor] = []

        class ParamlessModule(nn.Module):
            def forward(self, x: torch.Tensor, ys: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
                received.extend((x, *ys))
                return x + ys[0] * ys[1]

        model = fully_shard(ParamlessModule().to(self.device))
        host = torch.device("cpu")  # the CPU is the subject
        x, y1, y2 = sent = [torch.randn(3, device=host) for _ in range(3)]
        for args, kwargs in (((x, (y1, y2)), {}), ((x,), {"ys": (y1, y2)})):
            received.clear()
            output = model(*args, **kwargs)
            self.assertEqual([tensor.device for tensor in received], [self.device] * 3)
            self.assertEqual(output, (x + y1 * y2).to(self.device))
            if self.device == host:
                self.assertEqual([id(tensor) for tensor in received], [id(tensor) for tensor in sent])

    @torch_defect("fsdp2_root_without_inputs_raises")
    @skip_if_lt_x_gpu(1)
    @subtests(reshard_after_forward=[True, False, None])
    def test_root_no_forward_inputs(self, reshard_after_forward):
        """A root without inputs reduces its gradients at the end of the backward."""

        class Squared(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.arange(16.0).view(4, 4) / 16)

            def forward(self) -> torch.Tensor:
                return self.weight @ self.weight

        ref_model = Squared().to(self.device)
        model = fully_shard(copy.deepcopy(ref_model), reshard_after_forward=reshard_after_forward)

        def step(each: nn.Module, batch: None) -> torch.Tensor:
            output = each()
            self.assertEqual(output.shape, (4, 4))
            return backward((self.rank + 1) * loss_of(output))

        self._check_training(ref_model, model, lambda: None, Loop(step=step))


class TestFullyShardRegisteredParams(TrainingMixin, FSDPTestMultiThread):
    world_size = 4

    def _check_params(self, sharded: bool, model: nn.Module, values: list[torch.Tensor]) -> None:
        """The registered parameters must be DTensors, or plain parameters, with these values."""
        params = list(model.parameters())
        # The type of a DTensor parameter is DTensor, although isinstance(param, nn.Parameter) is true.
        self.assertEqual({type(param) for param in params}, {DTensor if sharded else nn.Parameter})
        self.assertEqual([full(param.detach()) for param in params], values)

    @skip_if_lt_x_gpu(1)
    @subtests(reshard_after_forward=[True, False, 2, None])
    def test_param_registration_after_forward(self, reshard_after_forward):
        """After forward, parameters are DTensors if the module reshards, else unsharded. By default a root does not."""
        manual_seed(42)
        model = filled(MLP(3, self.device))
        before = [param.detach().clone() for param in model.parameters()]
        fully_shard(model, reshard_after_forward=reshard_after_forward)
        self._check_params(True, model, before)
        model(self._inputs(2, 3))
        root_reshards = bool(reshard_after_forward)
        self._check_params(root_reshards, model, before)
        if root_reshards:  # and over the requested number of ranks
            halves = reshard_after_forward == 2 and reshard_after_forward is not True
            placements = (Replicate(), Shard(0)) if halves else (Shard(0),)
            self.assertEqual({param.placements for param in model.parameters()}, {placements})
        model.reshard()
        self._check_params(True, model, before)
        self.assertEqual({param.placements for param in model.parameters()}, {(Shard(0),)})

        model = filled(nn.Sequential(MLP(3, self.device), MLP(3, self.device)))
        before_inner, before_root = ([param.detach().clone() for param in mlp.parameters()] for mlp in model)
        shard_each([model[0].in_proj, model[0].out_proj, model], reshard_after_forward=reshard_after_forward)
        for mlp, ref in zip(model, (before_inner, before_root)):
            self._check_params(True, mlp, ref)
        model(self._inputs(2, 3))
        self._check_params(reshard_after_forward is not False, model[0], before_inner)
        self._check_params(root_reshards, model[1], before_root)
        for module in internals.fsdp_modules(model):
            module.reshard()
        for mlp, ref in zip(model, (before_inner, before_root)):
            self._check_params(True, mlp, ref)

    @skip_if_lt_x_gpu(1)
    @subtests(rows=[4, 5, 7])
    def test_param_registration_after_partial_reshard(self, rows):
        """After a reshard over two of four ranks, the registered DTensor has the parameter's values."""
        model = filled(nn.Linear(2, rows, device=self.device))
        before = [param.detach().clone() for param in model.parameters()]
        fully_shard(model, reshard_after_forward=2)
        output = model(self._inputs(2, 2))
        self.assertEqual({param.placements for param in model.parameters()}, {(Replicate(), Shard(0))})
        with torch_defect("fsdp2_uneven_rows_shown_wrong", when=rows == 5):
            self._check_params(True, model, before)
        output.sum().backward()
        self._check_params(True, model, before)

    @skip_if_lt_x_gpu(1)
    @subtests(reshard_after_forward=[True, False, 2], wrapped=[("",), ("in_proj", "out_proj", "")])
    def test_param_registration_after_backward(self, reshard_after_forward, wrapped):
        model = filled(MLP(8, self.device))
        before = [param.detach().clone() for param in model.parameters()]
        for name in wrapped:
            fully_shard(model.get_submodule(name), reshard_after_forward=reshard_after_forward)
        sharded = list(model.parameters())
        for _ in range(2):
            self.assertEqual({type(param) for param in model.parameters()}, {DTensor})
            loss_of(model(self._inputs(2, 8))).backward()
            self._check_params(True, model, before)
            self.assertEqual([id(param) for param in model.parameters()], [id(param) for param in sharded])

    @skip_if_lt_x_gpu(1)
    def test_modules_to_run_forward_empty_for_single_module(self):
        """Only a group of several modules tracks which of its modules have not run forward."""
        model = MLP(8, self.device)
        shard_each([model.in_proj, model.out_proj, model])
        grouped = MLP(8, self.device)
        shard_each([[grouped.in_proj, grouped.out_proj], grouped])

        def waiting(model: nn.Module) -> list[set[nn.Module]]:
            states = dict.fromkeys(map(internals.state_of, internals.fsdp_modules(model)))
            return [set(state._modules_to_run_forward) for state in states]

        seen: list[list[set[nn.Module]]] = []
        for each in (model, grouped):
            each.in_proj.register_forward_hook(lambda *_, each=each: seen.append(waiting(each)))
        for each, meanwhile in ((model, [set()] * 3), (grouped, [set(), {grouped.out_proj}])):
            self.assertEqual(waiting(each), [set()] * len(meanwhile), may_be="empty")
            seen.clear()
            each(self._inputs(2, 8)).sum().backward()
            self.assertEqual(seen, [meanwhile], may_be="empty")
            self.assertEqual(waiting(each), [set()] * len(meanwhile), may_be="empty")


class TestFullyShardCastAfterInit(TrainingMixin, FSDPTestMultiThread):
    world_size = 2

    @skip_if_lt_x_gpu(1)
    @wrapSwapTensorsTest(True)
    @subtests(dim=[4, 3])
    def test_to_float64_after_init(self, dim):
        """A model that is sharded and then converted trains like a converted model that was never sharded.

        With three rows the second rank has padding, and FSDP has to create the padding again.
        """
        model = filled(MLP(dim, self.device))
        ref_model = copy.deepcopy(model).to(torch.float64)
        shard_each([model.in_proj, model.out_proj, model])
        model.to(torch.float64)
        self._check_dtypes(model.parameters())
        check_sharded_parity(self, ref_model, model)

        def compare(test: Any, ref_model: nn.Module, model: nn.Module) -> None:
            check_sharded_parity(test, ref_model, model)
            self._check_dtypes(model.parameters())
            self._check_dtypes(param.grad for param in model.parameters())

        generator = torch.Generator().manual_seed(42 + self.rank)
        sample = functools.partial(torch.randn, (2, dim), generator=generator, dtype=torch.float64)
        self._check_training(
            ref_model,
            model,
            lambda: sample().to(self.device),
            Loop(compare=compare),
            optims=optimizers(ref_model, model, cls=torch.optim.Adam, foreach=True),
        )
        dist.barrier()  # the ranks are threads that share the swap mode, so none may leave it before all are done

    def _check_dtypes(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            dtypes = tensor.dtype, tensor.to_local().dtype, internals.spec_dtype(tensor)
            self.assertEqual(dtypes, (torch.float64,) * 3)


class SingleGroupTest(TrainingMixin):
    """Two linear layers in one group."""

    def _test_train_parity_single_group(
        self,
        lin_shapes: list[tuple[int, int]],
        use_shard_placement_fn: bool = False,
        reshard_after_forward: bool | int | None = None,
        check: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        optim_cls: type = ShardAdam,
    ) -> None:
        """Each step of the sharded model runs in the context ``check``."""
        manual_seed(42)
        first, second = (nn.Linear(*shape) for shape in lin_shapes)
        model = nn.Sequential(first, nn.ReLU(), second)
        ref_model = self._replica(model)
        placement_fn = shard_largest_dim if use_shard_placement_fn else None
        fully_shard(model, shard_placement_fn=placement_fn, reshard_after_forward=reshard_after_forward)
        shard_dims = [param.placements[0].dim for param in model.parameters()]
        self.assertEqual(shard_dims, [1, 0, 1, 0] if use_shard_placement_fn else [0] * 4)

        def step(each: nn.Module, inp: torch.Tensor) -> torch.Tensor:
            with check() if each is model else contextlib.nullcontext():
                return train(each, inp)

        next_batch = functools.partial(self._inputs, 4, lin_shapes[0][0])
        self._check_training(
            ref_model,
            model,
            next_batch,
            Loop(step=step, compare=check_sharded_parity),
            optims=optimizers(ref_model, model, cls=optim_cls),
        )


# The calls that are delayed, on odd ranks twice as long, so that a rank that does not wait for others reads too early.
# Without streams nothing overlaps on a rank, so one run with all delays is enough.
MOMENTS = ("after forward", "before all-gather", "before reduce-scatter", "before optimizer")


def delays() -> list[tuple[str, ...]]:
    return [(), *((moment,) for moment in MOMENTS), MOMENTS] if accelerator.current().has("streams") else [MOMENTS]


class TestFullyShard1DTrainingCore(SingleGroupTest, FSDPTest):
    power_of_two_ranks = True

    @property
    def world_size(self) -> int:
        # Four ranks are enough for transformers. With eight ranks, some have no row of a linear layer.
        words = ("multi_group", "prefetching", "event", "post_forward")
        return ranks_of(self, 4 if any(word in self._testMethodName for word in words) else 8)

    @skip_if_lt_x_gpu(2)
    @subtests(lin_shapes=[[(16, 15), (15, 8)], [(16, 17), (17, 8)], [(7, 15), (15, 3)]])
    def test_train_parity_single_group_shard_dim0(self, lin_shapes):
        """One group has dimensions that are even or uneven over eight ranks, or too small for a row on each rank."""
        optim_cls = torch.optim.Adam if lin_shapes[0][0] == 7 else ShardAdam
        self._test_train_parity_single_group(lin_shapes, optim_cls=optim_cls)

    @skip_if_lt_x_gpu(2)
    @subtests(lin_shapes=[[(32, 16), (16, 8)]])
    def test_train_parity_single_group_shard_largest_dim(self, lin_shapes):
        self._test_train_parity_single_group(lin_shapes, use_shard_placement_fn=True, optim_cls=torch.optim.Adam)

    @skip_if_lt_x_gpu(4)
    def test_train_parity_post_forward_shard_largest_dim(self):
        """Parameters sharded by columns cannot be unsharded from a smaller mesh: their shards there are flat."""
        manual_seed(42)
        layer: Any = nn.Linear(16, 4)
        ref_layer = self._replica(layer)
        fully_shard(layer, shard_placement_fn=shard_largest_dim, reshard_after_forward=2)
        for _ in range(2):
            with torch.no_grad():
                self.assertEqual(layer(inp := self._inputs(4, 16)), ref_layer(inp))
            layer.reshard()
        self.assertRaises(IndexError, layer(inp).sum().backward)

    @skip_if_lt_x_gpu(2)
    @compiled_fsdp_test(compile_compute_on_module=Transformer)
    @subtests(reshard_after_forward=[True, False, 2], late=delays)
    def test_train_parity_multi_group(self, reshard_after_forward, late):
        self._test_train_parity_multi_group(reshard_after_forward, late)

    @skip_if_lt_x_gpu(2)
    @subtests(offload_policy=[CPUOffloadPolicy(pin_memory=True), CPUOffloadPolicy(pin_memory=False)], late=delays)
    def test_train_parity_multi_group_cpu_offload_eager(self, offload_policy, late):
        self._test_train_parity_multi_group(True, late, offload_policy)

    @skip_if_lt_x_gpu(2)
    @subtests(backwards=[1, 2])
    def test_offloaded_gradients_are_there_after_backward(self, backwards):
        """After backward the host may read offloaded gradients at once. A second backward adds its gradients."""
        layer = nn.Linear(4, self.world_size, bias=False, device=self.device)
        fully_shard(layer, offload_policy=CPUOffloadPolicy())
        for _ in range(backwards):
            layer(torch.full((2, 4), self.rank + 1.0, device=self.device)).sum().backward()
        gradient = layer.weight.grad.to_local().clone()
        self.assertEqual(gradient, torch.full_like(gradient, backwards * (self.world_size + 1.0)))

    @skip_if_lt_x_gpu(2)
    @compiled_fsdp_test(compile_compute_on_module=Transformer)
    @subtests(late=delays)
    def test_train_parity_multi_group_unshard_async_op(self, late):
        self._test_train_parity_multi_group(True, late, unshard_async_op=True)

    def _test_train_parity_multi_group(
        self,
        reshard_after_forward: bool | int,
        late: tuple[str, ...],
        offload_policy: OffloadPolicy | None = None,
        unshard_async_op: bool = False,
    ) -> None:
        manual_seed(42)
        model = tiny_transformer(vocab_size=16)
        ref_model = self._replica(model)
        shard = functools.partial(
            fully_shard,
            mesh=self._mesh(self.world_size),
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload_policy or OffloadPolicy(),
        )
        for module in model.modules():
            if isinstance(module, TransformerBlock):
                shard(module)
        shard(model)
        model._set_unshard_async_op(unshard_async_op)

        def pause(moment: str) -> None:
            if moment in late:
                self._sleep(100)

        def pausing(collective: Callable[..., Any], moment: str) -> Callable[..., Any]:
            def pause_first(*args: Any, **kwargs: Any) -> Any:
                pause(moment)
                return collective(*args, **kwargs)

            return pause_first

        def step(each: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            if each is ref_model:
                return train(each, tokens)
            output = each(tokens)
            pause("after forward")
            loss = backward(loss_of(output))
            pause("before optimizer")
            return loss

        with (
            patch_all_gather(pausing(internals.all_gather(), "before all-gather")),
            patch_reduce_scatter(pausing(internals.reduce_scatter(), "before reduce-scatter")),
        ):
            next_batch = functools.partial(self._tokens, 3, 16, vocab_size=16)
            self._check_training(ref_model, model, next_batch, Loop(step=step))

    @skip_if_lt_x_gpu(2)
    def test_non_root_forward_backward(self):
        """After lazy initialization a child may run without its root. It unshards and reduces its own parameters."""
        manual_seed(42)
        model = nn.Sequential(*(MLP(32) for _ in range(3)))
        ref_model = self._replica(model)
        shard_each([*model, model])
        self._seed()
        inp = self._inputs(2, 32)
        # The other parameters have no gradients, or gradients of zeros.
        chosen = iter(("", "0", "0", ""))

        def step(each: nn.Module, name: str) -> torch.Tensor:
            loss = train(each.get_submodule(name), inp)
            self._sleep(100)
            return loss

        self._check_training(ref_model, model, lambda: next(chosen), Loop(step=step))
        self.assertEqual(model(inp).sum(), ref_model(inp).sum())

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False, 2])
    def test_multi_forward_module(self, reshard_after_forward):
        class MultiForwardModule(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(4, 4)
                self.outer = nn.Linear(4, 5)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.outer(self.inner(x) + self.inner(torch.relu(x)))

        manual_seed(42)
        model = MultiForwardModule()
        ref_model = self._replica(model)
        shard_each([model.inner, model], reshard_after_forward=reshard_after_forward)
        self._check_training(ref_model, model, lambda: self._inputs(32, 4))

    @skip_if_lt_x_gpu(2)
    def test_explicit_prefetching(self):
        """While a layer runs, the all-gathers of the next two layers are pending, in forward and in backward."""
        manual_seed(42)
        model = tiny_transformer(n_layers=8)
        ref_model = self._replica(model)
        layers = list(model.layers)
        under_way: dict[str, list[list[int]]] = {"forward": [], "backward": []}

        def look(direction: str) -> None:
            groups = [internals.group_of(layer) for layer in layers]
            found = [index for index, group in enumerate(groups) if internals.pending_gather(group) is not None]
            under_way[direction].append(found)

        for layer in layers:
            layer.attention.register_forward_pre_hook(lambda *_: look("forward"))
            layer.ffn_norm.register_forward_hook(
                lambda module, args, output: output.register_hook(lambda grad: look("backward")) and None
            )
            fully_shard(layer)
        fully_shard(model)
        for index, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 3])
            layer.set_modules_to_backward_prefetch(layers[max(index - 2, 0) : index][::-1])
        self._check_training(
            ref_model, model, lambda: self._tokens(2, 8), optims=optimizers(ref_model, model, cls=ShardAdamW)
        )
        after = [list(range(8))[index + 1 : index + 3] for index in range(8)]
        before = [list(range(8))[max(index - 2, 0) : index] for index in reversed(range(8))]
        self.assertEqual(under_way, {"forward": after * 3, "backward": before * 3})

    @skip_if_lt_x_gpu(2)
    def test_post_optim_event(self):
        """The all-gather streams of the next forward wait for the event that the optimizer's hook records."""
        manual_seed(42)
        model = tiny_transformer()
        ref_model = self._replica(model)
        shard_each([*model.layers, model])
        ref_optim, optim = optimizers(ref_model, model, cls=torch.optim.AdamW)
        events: list[Any] = []

        def leave_event(*_: Any) -> None:
            events.append(torch.get_device_module(self.device.type).Event())
            events[-1].record()
            model.set_post_optim_event(events[-1])

        optim.register_step_post_hook(leave_event)
        self._seed()
        tokens = self._tokens(2, 8)
        ref_losses, losses = [], []
        for _ in range(ITERATIONS):
            ref_optim.zero_grad()
            ref_losses.append(loss_of(ref_model(tokens)))
            ref_losses[-1].backward()
            average_gradients(ref_model)
            ref_optim.step()
        streams, context = internals.comm_context(model), internals.iteration_context(model)
        for iteration in range(ITERATIONS):
            optim.zero_grad()
            with contextlib.ExitStack() as watching:
                waits = []
                if iteration:
                    self.assertIs(context.post_optim_event, events[-1])
                    for stream in (streams.all_gather_copy_in_stream, streams.all_gather_stream):
                        wait = mock.patch.object(stream, "wait_event", wraps=stream.wait_event)
                        waits.append(watching.enter_context(wait))
                losses.append(loss_of(model(tokens)))
            for wait in waits:
                self.assertIs(wait.call_args_list[0].args[0], events[-1])
            self.assertIsNone(context.post_optim_event)
            losses[-1].backward()
            optim.step()
            self._sleep(25)
        self.assertEqual(losses, ref_losses)
        ref_optim.zero_grad()
        optim.zero_grad()
        check_sharded_parity(self, ref_model, model)


def shard_in_groups(model: Transformer, module_grouping: str, reshard_after_forward: bool) -> None:
    """Shard a model of three layers by layer, or with several modules in a group."""
    groups: dict[str, list[Any]] = {
        "block": [*model.layers],
        "mem_eff_weight_tied": [[model.tok_embeddings, model.output], *model.layers],
        "mem_eff": [
            model.layers[0],
            [model.layers[1], model.layers[2]],
            [model.tok_embeddings, model.pos_embeddings],
            [model.norm, model.output],
        ],
    }
    for group in (*groups[module_grouping], model):
        fully_shard(group, reshard_after_forward=reshard_after_forward)
    if module_grouping == "mem_eff":
        model.tok_embeddings.set_unshard_in_backward(False)  # an embedding's gradient does not need its weight


class TestFullyShard1DTrainingCompose(TrainingMixin, FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @compiled_fsdp_test(compile_compute_on_module=TransformerBlock)
    @subtests(
        pairwise=True,
        reshard_after_forward=[True, False],
        checkpoint_impl=["composable", "utils", "wrapper"],
        module_grouping=["block", "mem_eff", "mem_eff_weight_tied"],
    )
    def test_train_parity_with_activation_checkpointing(self, reshard_after_forward, checkpoint_impl, module_grouping):
        compiled = isinstance(fully_shard, functools.partial)  # compiled_fsdp_test patches it for its second run
        if compiled and checkpoint_impl == "composable":
            return  # dynamo would trace the hooks of the checkpoint
        manual_seed(42)
        model = tiny_transformer(vocab_size=16, weight_tying=module_grouping != "mem_eff")
        ref_model = self._replica(model)
        self._checkpoint_activations(model, checkpoint_impl)
        shard_in_groups(model, module_grouping, reshard_after_forward)
        next_batch = functools.partial(self._tokens, 3, 16, vocab_size=16)
        if compiled:  # fused kernels round differently from eager ones
            self._check_training(ref_model, model, next_batch, Loop(compare=None))
            return
        check_parity(self, ref_model, model)
        recomputed: list[nn.Module] = []
        for block in model.modules():
            if isinstance(block, TransformerBlock):
                block.attention.register_forward_pre_hook(lambda module, args: recomputed.append(module))
        self._check_training(ref_model, model, next_batch)
        self.assertEqual(len(recomputed), 3 * 3 * 2)  # steps, layers, forward and backward

    def _checkpoint_activations(self, model: Transformer, impl: str) -> None:
        checkpoint_wrapping = internals.checkpoint_wrapping
        model.checkpoint_activations = impl == "utils"
        if impl == "wrapper":
            checkpoint_wrapping.apply_activation_checkpointing(
                model, check_fn=lambda module: isinstance(module, TransformerBlock)
            )
        elif impl == "composable":
            for layer in model.layers:
                internals.composable.checkpoint(layer)
        wrappers = sum(isinstance(module, checkpoint_wrapping.CheckpointWrapper) for module in model.modules())
        self.assertEqual(wrappers, 3 if impl == "wrapper" else 0)

    @needs_partial_groups
    @skip_if_lt_x_gpu(2)
    def test_partial_group_forward_then_standalone(self):
        """The root's forward skips a module of a group. The module then runs alone, once for each chunk."""
        config: dict[str, list[Any]] = {
            "reshard_after_forward": [True, False],
            "tie": [False, True],
            "bf16_output": ["nowhere", "everywhere", "inside"],
        }
        case = {"reshard_after_forward": True, "tie": False, "bf16_output": "nowhere"}
        cases = [*pairwise_cases(config), case | {"checkpoint_body": True}, case | {"reshard_after_forward": 1}]
        for subtest in one_by_one(cases):
            self.run_subtests(subtest, self._test_partial_group_forward_then_standalone)

    def _test_partial_group_forward_then_standalone(
        self, reshard_after_forward: bool | int, tie: bool, bf16_output: str, checkpoint_body: bool = False
    ) -> None:
        manual_seed(42)
        plain = ChunkedHeadModel(32, 128, tie).to(self.device)
        # Inputs are cast to float32, so a bfloat16 output shows that the output was cast.
        bf16 = MixedPrecisionPolicy(param_dtype=torch.float32, output_dtype=torch.bfloat16)
        kwargs: dict[str, Any] = {"reshard_after_forward": reshard_after_forward}
        if bf16_output == "everywhere":
            kwargs["mp_policy"] = bf16
        elif bf16_output == "inside":
            kwargs["inner"] = {"mp_policy": bf16}
        grouped, *references = (self._replica(plain) for _ in range(1 if tie else 2))
        for model in (grouped, *references):
            if checkpoint_body:
                internals.composable.checkpoint(model.body)
            model.shard(grouped=model is grouped, **kwargs)
        if bf16_output == "nowhere":
            references.append(plain)
        optims = optimizers(grouped, *references)
        dtype = torch.float32 if bf16_output == "nowhere" else torch.bfloat16
        self._seed()
        for _ in range(3):
            tokens = self._tokens(2, 16, vocab_size=128)
            loss, head_grads = self._backward_in_chunks(grouped, tokens, dtype)
            for before, after in itertools.pairwise(head_grads):
                self.assertFalse(torch.equal(before, after))
            for reference in references:
                expected_loss, expected_grads = self._backward_in_chunks(reference, tokens, dtype)
                if reference is plain:
                    average(expected_grads)
                    average_gradients(plain)
                self.assertEqual(loss, expected_loss)
                self.assertEqual(head_grads, expected_grads)
                check_parity(self, reference, grouped)
            take_step(optims)
        for reference in references:
            check_parity(self, reference, grouped)

    def _backward_in_chunks(
        self, model: Any, tokens: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the loss, and the head's gradients after each chunk. Body and head must have outputs of this dtype."""
        head_grads = []

        def after_chunk(output: torch.Tensor) -> None:
            self.assertEqual(output.dtype, dtype)
            head_grads.append(full(model.head.weight.grad).clone())

        hidden = model(tokens, skip_head=True)
        self.assertEqual(hidden.dtype, dtype)
        return model.backward_in_chunks(hidden, 4, after_chunk), head_grads

    @needs(torch_facts.CASTS_INPUTS_OF_EACH_MODULE)
    @skip_if_lt_x_gpu(2)
    def test_grouped_module_cast_forward_inputs(self):
        """Each module of a group casts its own input, also if a module in between has cast it back."""

        class CastsBetween(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.a, self.b = (nn.Linear(32, 32, bias=False) for _ in range(2))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.b(self.a(x).float())

        manual_seed(42)
        model = CastsBetween().to(self.device)
        weights = [linear.weight.detach().to(torch.bfloat16) for linear in (model.a, model.b)]
        fully_shard([model.a, model.b], mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        fully_shard(model)
        self._seed()
        x = self._inputs(4, 32)
        output = model(x)
        self.assertEqual(output.dtype, torch.bfloat16)
        expected = F.linear(F.linear(x.to(torch.bfloat16), weights[0]), weights[1])
        self.assertEqual(output, expected, rtol=0, atol=0)
        output.sum().backward()
        for name, param in model.named_parameters():
            self.assertIsNotNone(param.grad, name)
            self.assertTrue(param.grad.to_local().isfinite().all(), name)
            self.assertEqual(param.grad.dtype, torch.float32)

    @needs_partial_groups
    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False], grouped=[True, False])
    def test_partial_group_forward_grad_accum_chunked(self, reshard_after_forward, grouped):
        manual_seed(42)
        plain = ChunkedHeadModel(32, 128, tie=False).to(self.device)
        model = self._replica(plain).shard(grouped, reshard_after_forward=reshard_after_forward)

        def step(each: nn.Module, microbatches: list[torch.Tensor]) -> torch.Tensor:
            losses = []
            for index, tokens in enumerate(microbatches):
                if each is model:
                    model.set_requires_gradient_sync(index == 2)
                    model.set_is_last_backward(index == 2)
                losses.append(each.backward_in_chunks(each(tokens, skip_head=True), 2))
                if each is model and index < 2:
                    for param in model.parameters():
                        self.assertTrue(param.grad is None or not param.grad.to_local().any())
            return torch.stack(losses)

        next_batch = lambda: [self._tokens(2, 16, vocab_size=128) for _ in range(3)]  # noqa: E731
        self._check_training(plain, model, next_batch, Loop(step=step))

    @needs_partial_groups
    @skip_if_lt_x_gpu(2)
    @subtests(tie=[False, True], reshard_after_forward=[False, True])
    def test_partial_group_reshard_toggle(self, tie, reshard_after_forward):
        """With resharding off, a group keeps its parameters unsharded between chunks, until ``reshard`` is called."""
        manual_seed(42)
        plain = ChunkedHeadModel(32, 128, tie).to(self.device)
        model = self._replica(plain).shard(reshard_after_forward=reshard_after_forward)
        group = internals.group_of(model.head)
        unsharded: list[bool] = []

        def toggle(reshards: bool) -> None:
            model.head.set_reshard_after_forward(reshards, recurse=False)
            model.head.set_reshard_after_backward(reshards, recurse=False)

        def let_go() -> None:
            toggle(True)
            model.head.reshard()
            self.assertFalse(group.is_unsharded)

        def step(each: Any, tokens: torch.Tensor) -> torch.Tensor:
            hidden = each(tokens, skip_head=True)
            if each is plain:
                return plain.backward_in_chunks(hidden, 4)
            toggle(False)
            unsharded.clear()
            loss = model.backward_in_chunks(hidden, 4, lambda output: unsharded.append(group.is_unsharded), let_go)
            self.assertEqual(unsharded, [True] * 4)
            self.assertFalse(any(param.grad is None for param in model.parameters()))
            return loss

        self._check_training(plain, model, lambda: self._tokens(2, 16, vocab_size=128), Loop(step=step))

    @needs_reset
    @skip_if_lt_x_gpu(2)
    def test_reset_iter_state_after_exception(self):
        """After an exception in forward and a reset, the next step trains as usual."""
        manual_seed(42)
        plain = ChunkedHeadModel(32, 128, tie=False)
        plain.body = RaisesOnDemand(plain.body)
        ref_model = self._replica(plain)
        model = self._replica(plain).shard()

        def step(each: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            if each is model:
                model.body.raises = True
                with self.assertRaisesRegex(ZeroDivisionError, "on demand"):
                    model(tokens)
                model.reset_iter_state()
                model.body.raises = False
            return train(each, tokens)

        self._check_training(ref_model, model, lambda: self._tokens(2, 16, vocab_size=128), Loop(step=step))
        self.assertFalse(any(param.grad is None for param in model.parameters()))

    @needs(torch_facts.KEEPS_GROUPS_UNSHARDED_FOR_RECOMPUTATION)
    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False], checkpoint_impl=["composable", "utils"])
    def test_double_forward_with_nested_fsdp_and_checkpoint(self, reshard_after_forward, checkpoint_impl):
        """Two forwards come before one backward. A recomputed module stays unsharded until its gradients are computed,
        so recomputation adds no collective.
        """
        manual_seed(42)
        model = tiny_transformer(n_layers=2, max_seq_len=32, checkpoint_activations=checkpoint_impl == "utils")
        ref_model = self._replica(model)
        if checkpoint_impl == "composable":
            for layer in model.layers:
                internals.composable.checkpoint(layer)
        modules = [module for layer in model.layers for module in (layer.attention, layer.feed_forward, layer)]
        shard_each([*modules, model], reshard_after_forward=reshard_after_forward)
        inner = len(internals.fsdp_modules(model)) - 1
        # Backward runs through each of them twice and reshards in between. The root is unsharded once.
        gathers = 2 * inner + 1 if reshard_after_forward else inner
        self._seed()
        for _ in range(2):
            batches = [self._tokens(2, 32) for _ in range(2)]
            for each in (ref_model, model):
                each.zero_grad()
                first, second = (each(tokens) for tokens in batches)
                with collectives.recorded() as calls:
                    (first.sum() - second.sum()).square().backward()
            self.assertEqual(calls.counts(), {"all_gather": gathers, "reduce_scatter": inner + 1})
            average_gradients(ref_model)
            self.assertFalse(any(param.grad is None for param in model.parameters()))
            check_sharded_parity(self, ref_model, model)

    @needs_partial_groups
    @skip_if_lt_x_gpu(2)
    def test_double_partial_forward_then_backward(self):
        """Two forwards skip the head, and one backward covers both. The head gets no gradient."""
        manual_seed(42)
        plain = ChunkedHeadModel(32, 128, tie=False).to(self.device)
        model = self._replica(plain).shard()

        def step(each: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
            first, second = (each(tokens, skip_head=True) for tokens in batches)
            loss = backward(loss_of(first + second))
            self.assertIsNone(each.head.weight.grad)
            return loss

        next_batch = lambda: [self._tokens(2, 16, vocab_size=128) for _ in range(2)]  # noqa: E731
        self._check_training(plain, model, next_batch, Loop(step=step))
        for param in (model.embed.weight, model.norm.weight):
            self.assertTrue(param.grad.to_local().isfinite().all())


class TestFullyShardShardPlacementFnMultiProcess(TrainingMixin, FSDPTest):
    world_size = at_most(8)
    power_of_two_ranks = True

    @skip_if_lt_x_gpu(2)
    def test_train_parity_shard_placement_fn_shard_largest_dim(self):
        manual_seed(42)
        model = tiny_transformer()
        ref_model = self._replica(model)
        shard_each([*model.layers, model], shard_placement_fn=shard_largest_dim)
        self.assertEqual({param.placements[0].dim for param in model.parameters()}, {0, 1})
        check_full(self, ref_model, model)
        self._check_training(
            ref_model, model, lambda: self._tokens(2, 16), optims=optimizers(ref_model, model, cls=ShardAdamW)
        )
        check_full(self, ref_model, model)


class TestFullyShardShardPlacementFnMultiThread(TrainingMixin, FSDPTestMultiThread):
    world_size = 4

    @skip_if_lt_x_gpu(1)
    @subtests(columns=[Shard(1), Shard(-1)])
    def test_shard_placement_fn_contiguous_params_grads(self, columns):
        """Shards of a matrix's columns are contiguous, and so are the unsharded parameters and the gradients."""
        model = filled(nn.Sequential(MLP(4, self.device), MLP(4, self.device, dim_multiplier=3)))
        ref_model = copy.deepcopy(model)
        groups = (model[0], model[1].in_proj, model)
        shard_each(groups, shard_placement_fn=lambda param: columns if param.ndim > 1 else Shard(0))
        self.assertEqual([param.placements[0].dim for param in model.parameters()], [1, 0] * 4)
        seen: list[int] = []

        def check(tensors: Iterable[torch.Tensor]) -> None:
            tensors = list(tensors)
            locals_ = [tensor.to_local() for tensor in tensors if isinstance(tensor, DTensor)]
            self.assertTrue(all(tensor.is_contiguous() for tensor in (*tensors, *locals_)))
            seen.append(len(locals_))

        for mlp in model:
            mlp.register_forward_pre_hook(lambda module, args: check(module.parameters()))
        generator = torch.Generator().manual_seed(self.rank)
        for _ in range(2):
            inp = torch.randn(2, 4, generator=generator).to(self.device)
            seen.clear()
            check(model.parameters())
            for each in (ref_model, model):
                each.zero_grad()
                loss_of(each(inp)).backward()
            check(model.parameters())
            check(param.grad for param in model.parameters())
            # All parameters are sharded before forward, and after backward like the gradients. In between the hooks see
            # unsharded parameters, except for the two of ``model[1].in_proj``, whose own forward has not begun.
            self.assertEqual(seen, [8, 0, 2, 8, 8])
            average_gradients(ref_model)
            check_sharded_parity(self, ref_model, model)


class TestFullyShardSharedParams(TrainingMixin, FSDPTest):
    world_size = at_most(4)

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[False, True], use_activation_checkpointing=[False, True])
    def test_train_parity_with_shared_params(self, reshard_after_forward, use_activation_checkpointing):
        manual_seed(42)
        model = tiny_transformer(weight_tying=True)
        ref_model = self._replica(model)
        if use_activation_checkpointing:
            for layer in model.layers:
                internals.composable.checkpoint(layer)
        shard_each([*model.layers, model], reshard_after_forward=reshard_after_forward)
        self.assertIs(model.tok_embeddings.weight, model.output.weight)
        self._check_training(ref_model, model, lambda: self._tokens(2, 16))
        self.assertIs(model.tok_embeddings.weight, model.output.weight)

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False])
    def test_train_shared_params_uneven_shard(self, reshard_after_forward):
        manual_seed(42)
        vocab_size = 4 * self.world_size + 1
        model = TiedModel(vocab_size, 16)
        ref_model = self._replica(model)
        shard_each([[model.embed, model.head], model], reshard_after_forward=reshard_after_forward)
        self.assertEqual(model.head.weight.to_local().size(0), min(5, vocab_size - 5 * self.rank))
        before = full(model.head.weight.detach()).clone()

        def step(each: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            ids, targets = batch
            return backward(F.cross_entropy(each(ids).flatten(0, 1), targets.flatten()))

        next_batch = lambda: self._tokens(2, 2, 8, vocab_size=vocab_size).unbind()  # noqa: E731
        self._check_training(
            ref_model,
            model,
            next_batch,
            Loop(step=step, iterations=10),
            optims=optimizers(ref_model, model, cls=torch.optim.AdamW),
        )
        changed = (full(model.head.weight.detach()) - before).abs().amax(dim=1)
        self.assertGreater(changed.min().item(), 0.01)  # weight decay alone changes a hundredth of that

    @skip_if_lt_x_gpu(2)
    def test_shared_params_separate_fsdp_groups_error(self):
        model = TiedModel(8, 16).to(self.device)
        shard_each([model.embed, model.head, model])
        with torch_defect("fsdp2_tied_parameters_come_apart"):
            with self.assertRaisesRegex(ValueError, "'head.weight' .* already managed by another"):
                model(self._tokens(2, 8))

    @skip_if_lt_x_gpu(2)
    @subtests(name=["weight", "bias"])
    def test_any_shared_parameter_of_a_group(self, name):
        """FSDP rejects any parameter that two groups share, not only the first one of a group."""
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(self.device)
        setattr(model[1], name, getattr(model[0], name))
        shard_each([*model, model])
        with torch_defect("fsdp2_tied_parameters_come_apart"):
            with self.assertRaisesRegex(ValueError, f"'1.{name}' .* already managed by another"):
                model(self._inputs(2, 4))

    @skip_if_lt_x_gpu(2)
    def test_layer_by_layer_shard_no_false_positive(self):
        """If a new parameter reuses the address of a freed one, FSDP does not treat the two as shared."""
        manual_seed(42)
        ref_blocks, blocks = nn.ModuleList(), nn.ModuleList()
        for _ in range(8):
            block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)).to(self.device)
            ref_blocks.append(copy.deepcopy(block))
            blocks.append(fully_shard(block))
            gc.collect()
        ref_model, model = nn.Sequential(*ref_blocks), fully_shard(nn.Sequential(*blocks))
        self._check_training(ref_model, model, lambda: self._inputs(2, 16), Loop(iterations=FEW))


def _is_accumulation(**case: Any) -> bool:
    """Whether the case is useful for ``test_gradient_accumulation``."""
    if not case["reshard_after_backward"] and (
        case["reshard_after_forward"] is not False or case["mode"] == "some_mlps"
    ):
        return False  # a group that was resharded in forward is all-gathered in backward anyway
    if case["offload"] and case["reshard_after_forward"] is not True:
        return False
    return not case["reduce_scatter_only"] or case["hybrid"]  # otherwise there is no all-reduce


class TestFullyShardGradientAccumulation(TrainingMixin, FSDPTest):
    world_size = at_most(4)
    power_of_two_ranks = True

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        valid=_is_accumulation,
        hybrid=[False, True],
        reshard_after_forward=[True, False, 2],
        mode=["all", "root_only", "some_mlps"],  # the modules whose flags are set
        reshard_after_backward=[False, True],  # also before the last microbatch
        offload=[False, True],
        reduce_scatter_only=[False, True],  # between microbatches, skip only the all-reduce
    )
    def test_gradient_accumulation(
        self, hybrid, reshard_after_forward, mode, reshard_after_backward, offload, reduce_scatter_only
    ):
        """Gradients are right, and there are no unneeded collectives, whatever is skipped between microbatches."""
        if hybrid:
            skip_unless([lambda: None if self.world_size == 4 else "needs 4 ranks"])
        manual_seed(42)
        num_mlps, num_microbatches, num_marked, dim = 3, 3, 2, 8
        model = nn.Sequential(nn.Linear(dim, dim), *(MLP(dim) for _ in range(num_mlps)))
        ref_model = self._replica(model)
        shard_each(
            [*model[1:], model],
            mesh=self._mesh(2, 2) if hybrid else self._mesh(self.world_size),
            reshard_after_forward=reshard_after_forward,
            offload_policy=CPUOffloadPolicy() if offload else OffloadPolicy(),
        )

        def mark(is_last: bool) -> None:
            for module in model[1 : 1 + num_marked] if mode == "some_mlps" else [model]:
                sync = module.set_requires_all_reduce if reduce_scatter_only else module.set_requires_gradient_sync
                sync(is_last, recurse=mode != "root_only")
                if not reshard_after_backward:
                    module.set_reshard_after_backward(is_last, recurse=mode != "root_only")

        groups, before_last = num_mlps + 1, num_microbatches - 1
        unmarked = {"all": 0, "root_only": num_mlps, "some_mlps": groups - num_marked}[mode]
        synced = groups + unmarked * before_last
        if reshard_after_forward is not False:
            gathered = 2 * groups * num_microbatches
        elif reshard_after_backward:
            gathered = groups * num_microbatches
        else:
            gathered = synced
        reduced = groups * num_microbatches if reduce_scatter_only else synced
        all_reduced = synced if hybrid else 0
        expected = +Counter(all_gather=gathered, reduce_scatter=reduced, all_reduce=all_reduced)

        def step(each: nn.Module, microbatches: list[torch.Tensor]) -> torch.Tensor:
            with collectives.recorded() as calls:
                losses = accumulating(model, mark)(each, microbatches)
            self.assertEqual(calls.counts(), expected if each is model else Counter(), may_be="empty")
            return losses

        next_batch = lambda: self._inputs(num_microbatches, 2, dim).unbind()  # noqa: E731
        self._check_training(ref_model, model, next_batch, Loop(step=step, iterations=FEW))

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        use_explicit_unshard=[False, True],
        reshard_after_backward=[False, True],
        schedule=["F0 B0 F1 B1 F2 B2", "F0 F1 B0 F2 B1 B2"],
    )
    def test_1f1b_microbatching(self, use_explicit_unshard, reshard_after_backward, schedule):
        """Microbatches run in the order of a pipeline, also in the interleaved order 1F1B."""
        manual_seed(42)
        model = tiny_transformer()
        ref_model = self._replica(model)
        shard_each([*model.layers, model], reshard_after_forward=False)
        ref_optim, optim = optimizers(ref_model, model, cls=ShardAdamW)
        self._seed()
        batches = [self._tokens(2, 16) for _ in range(3)]
        ref_losses = [loss_of(ref_model(tokens)) for tokens in batches]
        for ref_loss in ref_losses:
            ref_loss.backward()
        average_gradients(ref_model)
        if use_explicit_unshard:
            for module in internals.fsdp_modules(model):
                module.unshard(async_op=True)
        losses: dict[int, torch.Tensor] = {}
        remembers_forwards: list[bool] = []
        with collectives.recorded() as calls:
            for action in schedule.split():
                direction, index = action[0], int(action[1])
                if direction == "F":
                    losses[index] = loss_of(model(batches[index]))
                    continue
                model.set_requires_gradient_sync(index == 2)
                model.set_is_last_backward(index == 2)
                model.set_reshard_after_backward(index == 2 or reshard_after_backward)
                losses[index].backward()
                remembers_forwards.append(bool(internals.comm_context(model).post_forward_order))
        self.assertEqual(remembers_forwards, [True, True, False])  # cleared by the last backward
        self.assertEqual(list(losses.values()), ref_losses)
        counts = calls.counts()
        self.assertEqual(counts["reduce_scatter"], 4)
        if not reshard_after_backward:
            self.assertEqual(counts["all_gather"], 0 if use_explicit_unshard else 4)
        check_sharded_parity(self, ref_model, model)
        ref_optim.step()
        optim.step()
        check_sharded_parity(self, ref_model, model)


# The TP ranks, the replicas, and how modules other than layers reshard after forward. With tensor
# parallelism, resharding to a smaller mesh (2) is not supported.
EXPERTS = [(1, 1, False), (1, 2, 2), (2, 1, True), (2, 2, True)]
if TEST_WITH_SLOW:
    EXPERTS += [(1, 1, True), (1, 1, 2), (1, 2, False), (1, 2, True)]


class TestFullyShardNDTraining(StacksMixin, FSDPTest):
    world_size = at_most(8)

    @skip_if_lt_x_gpu(4)
    def test_what_is_refused_with_tp(self):
        """With TP, FSDP rejects resharding to a smaller mesh, and parameters on a TP mesh of three dimensions."""
        mesh = self._mesh(self.world_size, 1, names=("dp", "tp"))
        model = parallelize_module(nn.Sequential(nn.Linear(8, 8)).to(self.device), mesh["tp"], {"0": ColwiseParallel()})
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=2)
        with self.assertRaisesRegex(NotImplementedError, "Resharding to smaller mesh"):
            model(self._inputs(2, 8))

        names = "pp", "cp", "tp"
        mesh = self._mesh(self.world_size // 4, 1, 2, 2, names=("dp", *names))
        layer = nn.Linear(8, 8, bias=False)
        layer.weight = nn.Parameter(
            distribute_tensor(layer.weight.detach().to(self.device), mesh[names], [Shard(0)] * 3)
        )
        with self.assertRaisesRegex(NotImplementedError, "only supports 1D TP"):
            fully_shard(layer, mesh=mesh["dp"])

    @skip_if_lt_x_gpu(4)
    def test_2d_mlp_with_nd_mesh(self):
        """FSDP and tensor parallelism use two dimensions of a three-dimensional mesh."""
        mesh = self._mesh(self.world_size // 4, 2, 2, names=("pp", "dp", "tp"))
        self._check_stacks(mesh["tp"], mesh["dp"], mesh["dp"])

    @needs(torch_facts.HAS_MESH_PER_PARAMETER)
    @skip_if_lt_x_gpu(4)
    @subtests(case=EXPERTS)
    def test_shard_placement_fn_tp_ep(self, case):
        """FSDP shards experts over fewer ranks than the rest, because expert parallelism has already sharded them."""
        tp_size, replicas, reshard = case
        shards, rest = divmod(self.world_size, 2 * replicas * tp_size)  # two ranks divide the experts
        skip_unless([lambda: f"needs a multiple of {2 * replicas * tp_size} ranks" if shards == 0 or rest else None])
        names = ("replicate", "shard", "expert", "tensor")
        meshes = expert_meshes(self._mesh(replicas, shards, 2, tp_size, names=names))
        manual_seed(42)
        model = tiny_transformer(n_layers=2, vocab_size=32, num_experts=8, weight_tying=False).to(self.device)
        ref_model = copy.deepcopy(model)
        tp_mesh = meshes.tensor if tp_size > 1 else None
        Transformer.parallelize(model, tp_mesh, use_seq_parallel=False, ep_mesh=meshes.expert_parallel)
        shard_experts(model, meshes, reshard)
        for layer in model.layers:
            sizes = [group.mesh_info.mesh.size() for group in internals.groups_in(layer)]
            self.assertEqual(sorted(sizes), [meshes.experts.size(), meshes.dense.size()])
        # DTensor takes seconds to plan the redistribution of an expert that is on three mesh dimensions.
        (check_full if replicas == tp_size == 1 else check_parity)(self, ref_model, model)
        self._check_training(
            ref_model,
            model,
            lambda: self._tokens(2, 8, vocab_size=32),
            Loop(
                average=functools.partial(average_with_experts, meshes=meshes),
                data_rank=meshes.data.get_local_rank(),
                iterations=FEW,
            ),
        )


class TestFullyShardHSDP3DTraining(StacksMixin, FSDPTest):
    world_size = 8

    @skip_if_lt_x_gpu(8)
    def test_3d_mlp_with_nd_mesh(self):
        """HSDP with tensor parallelism on a three-dimensional mesh."""
        mesh = self._mesh(2, 2, 2, names=("dp_replicate", "dp_shard", "tp"))
        dp_mesh = mesh["dp_replicate", "dp_shard"]
        self._check_stacks(mesh["tp"], dp_mesh, dp_mesh._flatten("dp"), pairwise=True)


class TestFullyShardHSDPTraining(TrainingMixin, FSDPTest):
    world_size = at_most(4)
    power_of_two_ranks = True

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        reshard_after_forward=[False, True],
        use_activation_checkpointing=[False, True],
        mlp_dim=[3, 16, 17],
        sync_gradients_at_last_batch=[True, False],
        # Pinned memory only changes how a gradient is copied to the CPU. Other tests cover it.
        offload_policy=[OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)],
    )
    def test_train_parity_hsdp(
        self, reshard_after_forward, use_activation_checkpointing, mlp_dim, sync_gradients_at_last_batch, offload_policy
    ):
        manual_seed(42)
        mlps = (MLP(mlp_dim, dim_multiplier=times) for times in (3, 4, 3))
        model = nn.Sequential(nn.LayerNorm(mlp_dim, bias=False), *mlps)
        ref_model = self._replica(model)
        if use_activation_checkpointing:
            for mlp in model[1:]:
                internals.composable.checkpoint(mlp)
        shards = 2 if self.world_size > 2 else 1
        shard_each(
            [*model[1:], model],
            mesh=self._mesh(self.world_size // shards, shards),
            reshard_after_forward=reshard_after_forward,
            offload_policy=offload_policy,
        )
        check_sharded_parity(self, ref_model, model)
        mark = model.set_requires_gradient_sync if sync_gradients_at_last_batch else lambda is_last: None
        next_batch = lambda: self._inputs(3, 8, mlp_dim).unbind()  # noqa: E731
        self._check_training(ref_model, model, next_batch, Loop(step=accumulating(model, mark), iterations=FEW))


class TestFullyShardCustomForwardMethod(ForwardMethodsMixin, FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_register_fsdp_forward_method(self):
        """A registered method unshards before and reshards after, like ``forward``."""
        model = self._check_register_fsdp_forward_method(shard_each)
        self.assertIsInstance(model.vit.conv.weight, DTensor)


class TestFullyShardShareCommContext(TrainingMixin, FSDPTest):
    world_size = 2

    @needs(torch_facts.CAN_SHARE_COMM_CONTEXT)
    @skip_if_lt_x_gpu(2)
    def test_share_comm_context(self):
        """Three roots, as in a pipeline, communicate on the streams of the first. Their own streams are not used."""
        from torch.distributed.fsdp import share_comm_ctx

        manual_seed(42)
        model = nn.Sequential(*(MLP(16) for _ in range(3)))
        ref_model = self._replica(model)
        for mlp in model:
            internals.initialize_lazily(fully_shard(mlp))
        contexts = [internals.comm_context(mlp) for mlp in model]
        self.assertEqual(len({id(context) for context in contexts}), 3)
        self.assertEqual(len({id(context.all_gather_stream) for context in contexts}), 3)
        share_comm_ctx(list(model))
        used: dict[str, list[Any]] = {"all_gather_stream": [], "reduce_scatter_stream": []}

        def recording(function: Callable[..., Any], stream: str) -> Callable[..., Any]:
            signature = inspect.signature(function)

            def record(*args: Any, **kwargs: Any) -> Any:
                used[stream].append(signature.bind(*args, **kwargs).arguments[stream])
                return function(*args, **kwargs)

            return record

        with (
            patch_foreach_all_gather(recording(internals.fsdp2_param_group.foreach_all_gather, "all_gather_stream")),
            patch_foreach_reduce(recording(internals.fsdp2_param_group.foreach_reduce, "reduce_scatter_stream")),
        ):
            self._check_training(ref_model, model, lambda: self._inputs(4, 3, 16), Loop(iterations=FEW))
        for name, streams in used.items():
            self.assertEqual(len(streams), 3 * FEW)
            self.assertEqual({id(stream) for stream in streams}, {id(getattr(contexts[0], name))})
        self.assertEqual({id(internals.comm_context(mlp)) for mlp in model}, {id(contexts[0])})
        # Older versions of PyTorch keep these events in the parameter groups.
        self.assertEqual(getattr(contexts[0], "_last_post_reduce_events", {}), {}, may_be="empty")


class TestFullyShardInference(TrainingMixin, FSDPTest):
    world_size = at_most(8)

    @skip_if_lt_x_gpu(4)
    @subtests(
        without_grad=[torch.inference_mode, torch.no_grad],
        placement_fn=[shard_largest_dim, None],
        shard_size=[4, 1],
    )
    def test_inference(self, without_grad, placement_fn, shard_size):
        """The first forward may be under ``inference_mode``, also with column shards or shard groups of one rank."""
        manual_seed(42)
        model = nn.Linear(16, 4)
        ref_model = self._replica(model)
        mesh = self._mesh(self.world_size // shard_size, shard_size, names=("replicate", "shard"))
        fully_shard(model, mesh=mesh, shard_placement_fn=placement_fn, reshard_after_forward=True)
        self._seed()
        inference, one_rank = without_grad is torch.inference_mode, shard_size == 1
        with torch_defect("fsdp2_inference_mode_with_columns_raises", when=inference and (one_rank or placement_fn)):
            for _ in range(2):
                inp = self._inputs(2, 16)
                with without_grad():
                    self.assertEqual(model(inp), ref_model(inp))
                with torch.no_grad():
                    for param in (*model.parameters(), *ref_model.parameters()):
                        param.mul_(3)  # the second forward reads the new shards


class TestFullyShardWorldSize1(SingleGroupTest, FSDPTest):
    world_size = 1

    @needs(torch_facts.SKIPS_REDUCTION_OVER_ONE_RANK)
    @skip_if_lt_x_gpu(1)
    @subtests(lin_shapes=[[(16, 15), (15, 8)], [(7, 15), (15, 3)], [(16, 17), (17, 8)]])
    def test_train_parity_single_worldsize1(self, lin_shapes):
        """A single rank issues no collectives."""
        self._test_train_parity_single_group(lin_shapes, check=self._no_collectives)

    @contextlib.contextmanager
    def _no_collectives(self) -> Iterator[None]:
        with CommDebugMode() as comm_mode:
            yield
        self.assertEqual(comm_mode.get_total_counts(), 0)


class TestFullyShardCudaGraph(TrainingMixin, FSDPTest):
    world_size = 2

    @requires_capability("graphs", "streams")
    @skip_if_lt_x_gpu(2)
    def test_two_layer_fully_shard_cudagraph(self):
        """A captured step, replayed with other inputs, gives bitwise the results of the eager step."""
        device_module = torch.get_device_module(self.device.type)
        manual_seed(42)
        model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(2))).to(self.device)
        shard_each([*model, model])
        self._seed()
        inputs = [self._inputs(4, 8) for _ in range(2)]
        static = torch.zeros_like(inputs[0])

        def step() -> torch.Tensor:
            output = model(static)
            loss_of(output).backward()
            return output

        expected = []
        stream = device_module.Stream()
        stream.wait_stream(device_module.current_stream())
        with device_module.stream(stream):
            for inp in (*inputs, *inputs):  # the first round warms up
                model.zero_grad()
                static.copy_(inp)
                output = step().detach().clone()
                expected.append((output, [param.grad.to_local().clone() for param in model.parameters()]))
            model.zero_grad()
            device_module.synchronize()
            make_graph = torch.accelerator.Graph if torch_facts.HAS_ACCELERATOR_GRAPHS else device_module.CUDAGraph
            graph = make_graph()
            with device_module.graph(graph, stream=stream):
                output = step()
        device_module.current_stream().wait_stream(stream)
        for inp, (ref_output, ref_grads) in zip(inputs, expected[2:]):
            static.copy_(inp)
            graph.replay()
            device_module.synchronize()
            self.assertEqual(output, ref_output, rtol=0, atol=0)
            grads = [param.grad.to_local() for param in model.parameters()]
            self.assertEqual(grads, ref_grads, rtol=0, atol=0)


if __name__ == "__main__":
    run_tests()
