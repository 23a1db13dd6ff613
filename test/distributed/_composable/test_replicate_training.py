"""``replicate`` on FSDP2 trains like plain data parallelism, however modules are wrapped, called and combined.

The reference is the plain model, whose gradients the tests average. Every rank has its own data, and compares losses,
gradients before each step and parameters after it.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard

from torch_fsdp_tests.common_distributed import at_most, needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    MLP,
    DoubleLinear,
    FSDPTest,
    FSDPTestMultiThread,
    MLPStack,
    check_sharded_parity,
    patch_all_reduce,
)
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import TEST_WITH_SLOW, manual_seed, run_tests, wrapSwapTensorsTest
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import TransformerBlock
from torch_fsdp_tests.fsdp import collectives, internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.forward_methods import ForwardMethodsMixin
from torch_fsdp_tests.fsdp.optimizers import ShardAdamW
from torch_fsdp_tests.fsdp.references import average_gradients, full
from torch_fsdp_tests.fsdp.seeded import filled
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
    replicate_each,
    take_step,
    tiny_transformer,
    train,
)
from torch_fsdp_tests.installed_torch import torch_facts

needs_replicate = needs(torch_facts.REPLICATES_WITHOUT_SHARDS)


@needs_replicate
class TestReplicateForwardInputs(TrainingMixin, FSDPTestMultiThread):
    world_size = 2

    @skip_if_lt_x_gpu(1)
    def test_root_move_forward_input_to_device(self):
        """Inputs are moved from the CPU to the device. If the device is the CPU, the tensors are passed unchanged."""
        received: list[torch.Tensor] = []

        class ParamlessModule(nn.Module):
            def forward(self, x: torch.Tensor, ys: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
                received.extend((x, *ys))
                return x + ys[0] * ys[1]

        model = replicate_each([ParamlessModule().to(self.device)])
        host = torch.device("cpu")  # the CPU is the subject
        x, y1, y2 = sent = [torch.randn(3, device=host) for _ in range(3)]
        for args, kwargs in (((x, (y1, y2)), {}), ((x,), {"ys": (y1, y2)})):
            received.clear()
            self.assertEqual(model(*args, **kwargs), (x + y1 * y2).to(self.device))
            self.assertEqual([tensor.device for tensor in received], [self.device] * 3)
            if self.device == host:
                self.assertEqual([id(tensor) for tensor in received], [id(tensor) for tensor in sent])


@needs_replicate
class TestReplicateRegisteredParams(TrainingMixin, FSDPTestMultiThread):
    world_size = 4

    def _replicated(self, *wrapped: str) -> tuple[nn.Module, list[torch.Tensor]]:
        """An MLP whose named submodules are replicated in turn, and copies of its initial parameters."""
        manual_seed(42)
        model = filled(MLP(3, self.device))
        before = [param.detach().clone() for param in model.parameters()]
        replicate_each([model.get_submodule(name) for name in wrapped])
        return model, before

    def _check_params(self, kind: type, model: nn.Module, values: list[torch.Tensor]) -> None:
        """The registered parameters must be of this type and have these values."""
        params = list(model.parameters())
        self.assertEqual({type(param) for param in params}, {kind})  # the type of a DTensor parameter is DTensor
        self.assertEqual([full(param.detach()) for param in params], values)
        if kind is DTensor:
            self.assertEqual({param.placements for param in params}, {(Replicate(),)})

    @skip_if_lt_x_gpu(1)
    @subtests(wrapped=[("",), ("in_proj", "out_proj", "")])
    def test_param_registration_after_forward(self, wrapped):
        """After forward the parameters stay unsharded until a reshard."""
        model, before = self._replicated(*wrapped)
        for _ in range(2):
            self._check_params(DTensor, model, before)
            model(self._inputs(2, 3))
            self._check_params(nn.Parameter, model, before)
            for module in internals.fsdp_modules(model):
                module.reshard()
        (model if len(wrapped) == 1 else model.in_proj).unshard()
        self.assertIs(type(model.in_proj.weight), nn.Parameter)

    @skip_if_lt_x_gpu(1)
    @subtests(wrapped=[("",), ("in_proj", "out_proj", "")])
    def test_param_registration_after_backward(self, wrapped):
        model, before = self._replicated(*wrapped)
        sharded = list(model.parameters())
        for _ in range(2):
            self._check_params(DTensor, model, before)
            loss_of(model(self._inputs(2, 3))).backward()
            self._check_params(DTensor, model, before)
            self.assertEqual([id(param) for param in model.parameters()], [id(param) for param in sharded])


@needs_replicate
class TestReplicateCastAfterInit(TrainingMixin, FSDPTestMultiThread):
    world_size = 2

    @skip_if_lt_x_gpu(1)
    @wrapSwapTensorsTest(True)
    def test_to_float64_after_init(self):
        """A model that is replicated and then converted trains like a converted model that was never replicated."""
        model = filled(MLP(3, self.device))
        ref_model = copy.deepcopy(model).to(torch.float64)
        replicate_each([model.in_proj, model.out_proj, model])
        model.to(torch.float64)

        def compare(test: Any, ref_model: nn.Module, model: nn.Module) -> None:
            check_sharded_parity(test, ref_model, model)
            tensors: list[Any] = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
            self.assertEqual({(each.dtype, each.to_local().dtype) for each in tensors}, {(torch.float64,) * 2})

        compare(self, ref_model, model)
        generator = torch.Generator().manual_seed(42 + self.rank)
        sample = functools.partial(torch.randn, (2, 3), generator=generator, dtype=torch.float64)
        self._check_training(
            ref_model,
            model,
            lambda: sample().to(self.device),
            Loop(compare=compare),
            optims=optimizers(ref_model, model, cls=torch.optim.Adam, foreach=True),
        )
        dist.barrier()  # the ranks are threads that share the swap mode, so none may leave it before all are done


# The points where ranks are delayed, odd ranks twice as long. Without streams nothing overlaps on a rank, so one run
# with all delays is enough.
MOMENTS = ("after forward", "before all-reduce", "before optimizer")


def delays() -> list[tuple[str, ...]]:
    return [(), *((moment,) for moment in MOMENTS), MOMENTS] if accelerator.current().has("streams") else [MOMENTS]


@needs_replicate
class TestReplicate1DTrainingCore(TrainingMixin, FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(lin_shapes=[[(16, 15), (15, 8)], [(7, 15), (15, 3)], [(16, 17), (17, 8)]])
    def test_train_parity_single_group(self, lin_shapes):
        """One group may have layers of any sizes, because nothing is sharded."""
        manual_seed(42)
        first, second = (nn.Linear(*shape) for shape in lin_shapes)
        model = nn.Sequential(first, nn.ReLU(), second)
        ref_model = self._replica(model)
        replicate_each([model])
        next_batch = functools.partial(self._inputs, 4, lin_shapes[0][0])
        kwargs: dict[str, Any] = {"cls": torch.optim.SGD, "momentum": 0.9} if lin_shapes[0][0] == 7 else {}
        loop = Loop(compare=check_sharded_parity, iterations=10)
        self._check_training(ref_model, model, next_batch, loop, optimizers(ref_model, model, **kwargs))

    @skip_if_lt_x_gpu(2)
    def test_train_parity_multi_groups(self):
        self.run_subtests({"late": delays()}, self._test_train_parity_multi_groups)
        if TEST_WITH_SLOW:
            self._test_train_parity_multi_groups((), compiled=True)

    @skip_if_lt_x_gpu(2)
    @subtests(late=delays, offload_policy=[CPUOffloadPolicy(pin_memory=True), CPUOffloadPolicy(pin_memory=False)])
    def test_train_parity_multi_group_cpu_offload_eager(self, late, offload_policy):
        self._test_train_parity_multi_groups(late, offload_policy)

    def _test_train_parity_multi_groups(
        self, late: tuple[str, ...], offload_policy: OffloadPolicy | None = None, compiled: bool = False
    ) -> None:
        manual_seed(42)
        model = tiny_transformer(vocab_size=16)
        ref_model = self._replica(model)
        blocks = [module for module in model.modules() if isinstance(module, TransformerBlock)]
        mesh = self._mesh(self.world_size, names=("replicate",))
        replicate_each([*blocks, model], mesh=mesh, offload_policy=offload_policy or OffloadPolicy())
        if compiled:
            for block in blocks:
                block.compile(backend="aot_eager")
        if offload_policy is not None:
            self.assertEqual({param.device.type for param in model.parameters()}, {"cpu"})  # the CPU is the subject

        def pause(moment: str) -> None:
            if moment in late:
                self._sleep(100)

        all_reduce = dist.all_reduce

        def late_all_reduce(*args: Any, **kwargs: Any) -> Any:
            pause("before all-reduce")
            return all_reduce(*args, **kwargs)

        def step(each: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            if each is ref_model:
                return train(each, tokens)
            output = each(tokens)
            pause("after forward")
            with patch_all_reduce(late_all_reduce):
                loss = backward(loss_of(output))
            pause("before optimizer")
            return loss

        self._check_training(ref_model, model, lambda: self._tokens(3, 16, vocab_size=16), Loop(step=step))

    @skip_if_lt_x_gpu(2)
    def test_non_root_forward_backward(self):
        """After lazy initialization a child may run without its root. It all-reduces its own gradients."""
        manual_seed(42)
        model = nn.Sequential(*(MLP(8) for _ in range(3)))
        ref_model = self._replica(model)
        replicate_each([*model, model])
        self._seed()
        inp = self._inputs(2, 8)
        chosen = iter(("", "0", "0", ""))
        step = lambda each, name: train(each.get_submodule(name), inp)  # noqa: E731
        self._check_training(ref_model, model, lambda: next(chosen), Loop(step=step, iterations=4))
        self.assertEqual(model(inp).sum(), ref_model(inp).sum())

    @skip_if_lt_x_gpu(2)
    def test_multi_forward_module(self):
        """If a forward uses a module twice, the gradients are added and all-reduced once."""

        class MultiForwardModule(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 5)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.outer(self.inner(x) + self.inner(torch.relu(x)))

        manual_seed(42)
        model = MultiForwardModule()
        ref_model = self._replica(model)
        replicate_each([model.inner, model])
        self._check_training(
            ref_model, model, lambda: self._inputs(8, 4), optims=optimizers(ref_model, model, cls=torch.optim.SGD)
        )

    @skip_if_lt_x_gpu(2)
    def test_explicit_prefetching(self):
        """Explicit prefetching changes nothing, because there is nothing to gather."""
        manual_seed(42)
        model = tiny_transformer(n_layers=8)
        ref_model = self._replica(model)
        layers = list(model.layers)
        replicate_each([*layers, model])
        for index, layer in enumerate(layers):
            layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 3])
            layer.set_modules_to_backward_prefetch(layers[max(index - 2, 0) : index][::-1])

        def step(each: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            with collectives.recorded() as calls:
                loss = train(each, tokens)
            self.assertEqual(calls.counts(), Counter(all_reduce=9) if each is model else Counter(), may_be="empty")
            return loss

        self._check_training(
            ref_model,
            model,
            lambda: self._tokens(2, 8),
            Loop(step=step),
            optims=optimizers(ref_model, model, cls=ShardAdamW),
        )
        self.assertEqual([internals.pending_gather(group) for group in internals.groups_of(model)], [None] * 9)

    @skip_if_lt_x_gpu(2)
    def test_post_optim_event(self):
        """The next forward waits for the event that the optimizer's hook records, and then clears it."""
        manual_seed(42)
        model = tiny_transformer()
        ref_model = self._replica(model)
        replicate_each([*model.layers, model])
        optims = optimizers(ref_model, model, cls=ShardAdamW)
        events: list[Any] = []

        def leave_event(*_: Any) -> None:
            events.append(torch.get_device_module(self.device.type).Event())
            events[-1].record()
            model.set_post_optim_event(events[-1])

        optims[1].register_step_post_hook(leave_event)
        self._seed()
        ref_losses = []
        for _ in range(ITERATIONS):
            tokens = self._tokens(2, 8)
            left = internals.iteration_context(model).post_optim_event
            self.assertIs(left, events[-1] if events else None)
            losses = [train(each, tokens) for each in (ref_model, model)]
            ref_losses.append(losses[0])
            self.assertEqual(*losses)
            self.assertIsNone(internals.iteration_context(model).post_optim_event)
            average_gradients(ref_model)
            check_parity(self, ref_model, model)
            take_step(optims)
        check_losses(ref_losses)
        self.assertEqual(len(events), ITERATIONS)

    @skip_if_lt_x_gpu(2)
    def test_unused_parameters(self):
        """A layer that no rank uses has no gradient. The other gradients are averaged as usual."""
        manual_seed(42)
        model = nn.Sequential(DoubleLinear(4, use_second_linear=False), nn.Linear(4, 4))
        ref_model = self._replica(model)
        replicate_each([model[0], model])
        self._check_training(ref_model, model, lambda: self._inputs(3, 4))
        self.assertIsNone(model[0].lin2.weight.grad)

    @needs(torch_facts.HAS_REDUCE_SCATTER_OF_UNUSED_PARAMETERS)
    @skip_if_lt_x_gpu(2)
    def test_parameters_that_one_rank_uses(self):
        """With ``set_reduce_scatter_unused_params`` a rank contributes zeros for unused parameters."""

        class Either(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
                self.last = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
                return self.last(self.branches[branch](x))

        manual_seed(42)
        model = Either()
        ref_model = self._replica(model)
        replicate_each([model])
        model.set_reduce_scatter_unused_params(True)

        def average(ref_model: nn.Module) -> None:
            for param in ref_model.parameters():
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad
            average_gradients(ref_model)

        step = lambda each, inp: backward(loss_of(each(inp, self.rank % 2)))  # noqa: E731
        self._check_training(ref_model, model, lambda: self._inputs(3, 4), Loop(step=step, average=average))

    @skip_if_lt_x_gpu(2)
    def test_values_that_change_between_steps(self):
        """Forward uses values that were loaded or written in place before it."""
        manual_seed(42)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        ref_model = self._replica(model)
        replicate_each([*model, model])
        other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).state_dict()

        def step(each: nn.Module, inp: torch.Tensor) -> torch.Tensor:
            losses = [train(each, inp)]
            state = {name: value.to(self.device) for name, value in other.items()}
            if each is model:
                mesh = model[0].weight.device_mesh
                state = {name: DTensor.from_local(value, mesh, [Replicate()]) for name, value in state.items()}
            each.load_state_dict(state)
            losses.append(train(each, inp))
            with torch.no_grad():
                for param in each.parameters():
                    param.mul_(0.5)
            losses.append(train(each, inp))
            return torch.stack(losses)

        self._check_training(ref_model, model, lambda: self._inputs(3, 4), Loop(step=step, iterations=FEW))

    @needs(torch_facts.HAS_RESET_ITER_STATE)
    @skip_if_lt_x_gpu(2)
    def test_reset_iter_state(self):
        """After an exception in forward and a reset, training continues as usual."""
        manual_seed(42)
        model = nn.Sequential(MLP(4), MLP(4))
        ref_model = self._replica(model)
        replicate_each([*model, model])

        def fail(*_: Any) -> None:
            raise ZeroDivisionError("in the second MLP")

        handle = model[1].in_proj.register_forward_pre_hook(fail)
        with self.assertRaisesRegex(ZeroDivisionError, "in the second MLP"):
            model(self._inputs(2, 4))
        handle.remove()
        model.reset_iter_state()
        self.assertEqual({type(param) for param in model.parameters()}, {DTensor})
        self._check_training(ref_model, model, lambda: self._inputs(2, 4))


@needs_replicate
class TestReplicateTrainingCompose(TrainingMixin, FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        checkpoint_impl=["composable", "utils", "wrapper"],
        module_grouping=["block", "mem_eff", "mem_eff_weight_tied"],
    )
    def test_train_parity_with_activation_checkpointing(self, checkpoint_impl, module_grouping):
        manual_seed(42)
        model = tiny_transformer(vocab_size=16, weight_tying=module_grouping != "mem_eff")
        ref_model = self._replica(model)
        model.checkpoint_activations = checkpoint_impl == "utils"
        if checkpoint_impl == "wrapper":
            internals.checkpoint_wrapping.apply_activation_checkpointing(
                model, check_fn=lambda module: isinstance(module, TransformerBlock)
            )
        elif checkpoint_impl == "composable":
            for layer in model.layers:
                internals.composable.checkpoint(layer)
        blocks = [module for module in model.modules() if isinstance(module, TransformerBlock)]
        units: dict[str, list[Any]] = {
            "block": list(model.layers),
            "mem_eff": [
                model.layers[0],
                [model.layers[1], model.layers[2]],
                [model.tok_embeddings, model.pos_embeddings],
                [model.norm, model.output],
            ],
            "mem_eff_weight_tied": [[model.tok_embeddings, model.output], *model.layers],
        }
        replicate_each([*units[module_grouping], model])
        recomputed: list[int] = []
        for block in blocks:
            block.attention.register_forward_pre_hook(lambda *_: recomputed.append(1))
        self._check_training(ref_model, model, lambda: self._tokens(3, 16, vocab_size=16), Loop(iterations=FEW))
        self.assertEqual(len(recomputed), FEW * 3 * 2)  # steps, layers, forward and backward


@needs_replicate
class TestReplicateSharedParams(TrainingMixin, FSDPTest):
    world_size = at_most(4)

    @skip_if_lt_x_gpu(2)
    @subtests(use_activation_checkpointing=[False, True])
    def test_train_parity_with_shared_params(self, use_activation_checkpointing):
        manual_seed(42)
        model = tiny_transformer(weight_tying=True)
        ref_model = self._replica(model)
        if use_activation_checkpointing:
            for layer in model.layers:
                internals.composable.checkpoint(layer)
        replicate_each([*model.layers, model])
        self._check_training(
            ref_model, model, lambda: self._tokens(2, 16), optims=optimizers(ref_model, model, cls=torch.optim.SGD)
        )
        self.assertIs(model.tok_embeddings.weight, model.output.weight)


@needs_replicate
class TestReplicateGradientAccumulation(TrainingMixin, FSDPTest):
    world_size = at_most(4)

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        mode=["all", "root_only", "some_mlps"],  # the modules whose flags are set
        reshard_after_backward=[False, True],  # also before the last microbatch
        offload=[False, True],
        all_reduce_only=[False, True],  # the setter that disables all-reduces
    )
    def test_gradient_accumulation(self, mode, reshard_after_backward, offload, all_reduce_only):
        """Gradients are right, and there are no unneeded all-reduces and no other collectives."""
        manual_seed(42)
        num_mlps, num_microbatches, num_marked, dim = 3, 3, 2, 4
        model = nn.Sequential(nn.Linear(dim, dim), *(MLP(dim) for _ in range(num_mlps)))
        ref_model = self._replica(model)
        policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
        replicate_each([*model[1:], model], offload_policy=policy)
        marked = list(model[1 : 1 + num_marked]) if mode == "some_mlps" else [model]

        def mark(is_last: bool) -> None:
            for module in marked:
                sync = module.set_requires_all_reduce if all_reduce_only else module.set_requires_gradient_sync
                sync(is_last, recurse=mode != "root_only")
                if not reshard_after_backward:
                    module.set_reshard_after_backward(is_last, recurse=mode != "root_only")
            if is_last and reshard_after_backward:  # marked modules have not reduced yet
                grads = [param.grad for param in model[0 if mode == "root_only" else 1].parameters()]
                self.assertFalse(any(grad is not None and grad.to_local().any() for grad in grads))

        groups, before_last = num_mlps + 1, num_microbatches - 1
        unmarked = {"all": 0, "root_only": num_mlps, "some_mlps": groups - num_marked}[mode]

        def step(each: nn.Module, microbatches: list[torch.Tensor]) -> torch.Tensor:
            with collectives.recorded() as calls:
                losses = accumulating(model, mark)(each, microbatches)
            expected = Counter(all_reduce=groups + unmarked * before_last)
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
        replicate_each([*model.layers, model])

        def step(each: nn.Module, batches: list[torch.Tensor]) -> torch.Tensor:
            if each is model and use_explicit_unshard:
                for module in internals.fsdp_modules(model):
                    module.unshard(async_op=True)
            losses: dict[int, torch.Tensor] = {}
            with collectives.recorded() as calls:
                for direction, number in (tuple(action) for action in schedule.split()):
                    index = int(number)
                    if direction == "F":
                        losses[index] = loss_of(each(batches[index]))
                        continue
                    if each is model:
                        model.set_requires_gradient_sync(index == 2)
                        model.set_is_last_backward(index == 2)
                        model.set_reshard_after_backward(index == 2 or reshard_after_backward)
                    losses[index].backward()
            self.assertEqual(calls.counts(), Counter(all_reduce=4) if each is model else Counter(), may_be="empty")
            return torch.stack([losses[index].detach() for index in range(3)])

        next_batch = lambda: self._tokens(3, 2, 16).unbind()  # noqa: E731
        self._check_training(
            ref_model,
            model,
            next_batch,
            Loop(step=step, iterations=FEW),
            optims=optimizers(ref_model, model, cls=ShardAdamW),
        )


@needs_replicate
class TestReplicateCustomForwardMethod(ForwardMethodsMixin, FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_register_fsdp_forward_method(self):
        """A registered method runs with unsharded parameters, like ``forward``."""
        self._check_register_fsdp_forward_method(replicate_each)


@needs_replicate
class TestReplicateTPTraining(TrainingMixin, FSDPTest):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    @subtests(
        case=[(checkpointing, dim) for checkpointing in (False, True) for dim in (3, 5, 16, 17)]
        if TEST_WITH_SLOW
        else [(False, 3), (True, 16), (False, 17)]
    )
    def test_replicate_tp(self, case):
        """``replicate`` works on a model with tensor parallelism, with even and uneven shards."""
        use_activation_checkpointing, mlp_dim = case
        mesh = self._mesh(2, 2, names=("dp_replicate", "tp"))
        manual_seed(42)
        model = MLPStack(mlp_dim)
        ref_model = self._replica(model)
        model.parallelize(
            mesh["tp"],
            mesh["dp_replicate"],
            use_activation_checkpointing,
            api=internals.replicate_on_fsdp2.replicate,
        )
        check_full(self, ref_model, model)
        self._check_training(
            ref_model,
            model,
            lambda: self._inputs(8, mlp_dim),
            Loop(
                average=functools.partial(average_gradients, group=mesh.get_group("dp_replicate")),
                data_rank=mesh.get_local_rank("dp_replicate"),
                iterations=FEW,
            ),
            optims=optimizers(ref_model, model, cls=torch.optim.SGD, momentum=0.9, foreach=False),
        )
        for name, param in model.named_parameters():
            self.assertEqual(param.device_mesh.mesh_dim_names, ("dp_replicate", "tp"))
            cut = Shard(0) if "in_proj" in name else Shard(1) if "weight" in name else Replicate()
            self.assertEqual(param.placements, (Replicate(), cut))


if __name__ == "__main__":
    run_tests()
