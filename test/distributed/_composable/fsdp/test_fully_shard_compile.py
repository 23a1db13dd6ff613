"""FSDP2 with ``torch.compile``: dynamo does not trace FSDP's hooks, and compiled models train like eager ones.

Compiled models and sharded models in eager mode are compared with a plain model that gets the inputs of all ranks.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from torch_fsdp_tests.common_distributed import get_required_world_size, needs, requires_world_size, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest, check_sharded_parity
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import ModelArgs, Transformer
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.compiling import (
    CountingBackend,
    allow_time_for_inductor,
    inductor_in,
    requires_inductor,
    target_name,
)
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average_gradients, mean_backward
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.training import check_gradients, optimizers, shard_each, take_step
from torch_fsdp_tests.installed_torch import torch_facts

DIM = 16
ITERATIONS = 5  # upstream has 10; nothing new is compiled after the second (test_no_recompiles)
HOOK_WRAPPERS = {"wrapper", "fsdp_hook_wrapper"}  # the functions around hooks, by two names

INDUCTOR_TESTS = (
    "test_simple_mlp_fullgraph_backend_inductor",
    "test_nested_fully_shard_backend_inductor_fullgraph_True",
    "test_nested_fully_shard_backend_inductor_fullgraph_False",
    "test_transformer_backend_inductor_fullgraph_True",
    "test_transformer_backend_inductor_fullgraph_False",
)
allow_time_for_inductor(*INDUCTOR_TESTS)


class Mod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        sizes = (784, 1024, 1024, 4096)
        with accelerator.current().device(dist.get_rank()):
            self.encoder = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)


class Layers(nn.Module):
    """A sequence whose class is not from torch.nn. After the graph break at the root's hook, eager code calls the
    root's forward. Dynamo would not compile this forward if its code were in torch.nn.
    """

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ScaledProduct(nn.Module):
    """A layer that multiplies its input by a matrix and by a scale. No parameter is zero, so no gradient is."""

    def __init__(self, breaks_graph: bool) -> None:
        super().__init__()
        self.breaks_graph = breaks_graph
        self.weight = nn.Parameter(torch.eye(DIM) + 0.02 * torch.rand(DIM, DIM))
        self.scale = nn.Parameter(1 + 0.1 * torch.rand(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight
        if self.breaks_graph:
            torch._dynamo.graph_break()
        return F.relu(x * self.scale)


class Repeating(nn.Module):
    def __init__(self, breaks_graph: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ScaledProduct(breaks_graph) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(layer(x))
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return x


class CountsCalls(nn.Module):
    """Multiplies its input by a parameter, a buffer, and the number of calls, which is a plain attribute."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.calls = 1  # forward uses 2 and more, because dynamo treats 0 and 1 as constants
        self.weight = nn.Parameter(torch.ones(DIM, device=device))
        self.register_buffer("scale", torch.ones(DIM, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * self.weight * self.scale * self.calls


class NextToken(nn.Module):
    """Predicts tokens, and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(DIM, DIM), MLP(DIM)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embedding(tokens).tanh()).flatten(0, 1), targets.flatten())


# Tokens and targets in one buffer.
OVERLAPPING: dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]] = {
    "columns": lambda buffer: (buffer[:, :-1], buffer[:, 1:]),
    "flat": lambda buffer: (buffer.view(1, -1)[:, :-1], buffer.view(1, -1)[:, 1:]),
    "same": lambda buffer: (buffer, buffer),
}


class Subject(NamedTuple):
    """A model to compile: functions that build it, shard it, and return its input for an iteration and a rank."""

    build: Callable[[], Any]
    shard: Callable[[Any], Any]
    input_of: Callable[[int, int], torch.Tensor]

    def sharded(self) -> nn.Module:
        model = self.build()
        self.shard(model)
        return model

    def backward(self, model: Callable, iteration: int, rank: int, divide_by: int = 1) -> torch.Tensor:
        """Run forward and backward with the input of ``rank``. Returns the loss."""
        inp = self.input_of(iteration, rank)
        manual_seed(100 * iteration + rank)  # for dropout
        loss = model(inp).square().mean()
        (loss / divide_by).backward()
        return loss.detach()


def checkpointed_after_compile(layer: nn.Module, checkpointed: Callable, backend: Callable) -> nn.Module:
    layer.compile(backend=backend)
    return checkpointed(layer)


# Each gets a layer, a function that checkpoints it, and a backend.
CHECKPOINTED_AND_COMPILED: dict[str, Callable[[nn.Module, Callable, Callable], Any]] = {
    "compiled checkpoint": lambda layer, checkpointed, backend: torch.compile(checkpointed(layer), backend=backend),
    "compiled inside": lambda layer, checkpointed, backend: checkpointed(torch.compile(layer, backend=backend)),
    "compiled in place inside": checkpointed_after_compile,
}


class Step(NamedTuple):
    loss: torch.Tensor
    grads: dict[str, torch.Tensor]  # of this rank's shards


def shard_layers(model: Any) -> None:
    shard_each((*model.layers, model), reshard_after_forward=True)


class CompileTest(FSDPTest):
    @property
    def world_size(self) -> int:
        return get_required_world_size(self, 2)

    def _rows(self, iteration: int, rank: int) -> torch.Tensor:
        return uniform(2, DIM, seed=100 * iteration + rank)

    def _shard_of(self, whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(self.world_size)[self.rank]


class TestFullyShardCompileCompute(CompileTest):
    @skip_if_lt_x_gpu(2)
    @subtests(backend=["eager", "aot_eager"])
    def test_disable_compiling_hooks(self, backend):
        """Dynamo checks only the wrapper functions of hooks, never the code of FSDP inside them."""
        torch._dynamo.reset()
        seen: collections.Counter[str] = collections.Counter()
        check = torch._dynamo.trace_rules.check
        fsdp_folder = os.path.dirname(internals.fsdp2_state.__file__)

        def counting_check(obj: Any, *args: Any, **kwargs: Any) -> bool:
            if os.path.dirname(getattr(obj, "co_filename", "")) == fsdp_folder:
                seen[obj.co_name] += 1
            return check(obj, *args, **kwargs)

        counting = CountingBackend(backend)
        manual_seed(42)
        ref_model = MLP(4, self.device)
        model = fully_shard(copy.deepcopy(ref_model))
        inp = torch.randn((4, 4), device=self.device)
        dist.barrier()
        with mock.patch.object(torch._dynamo.trace_rules, "check", counting_check):
            model.compile(backend=counting)
            out = model(inp)
            out.sum().backward()
            dist.barrier()
        torch._dynamo.reset()
        self.assertEqual(sum(count for name, count in seen.items() if name not in HOOK_WRAPPERS), 0, f"{seen}")
        # The check above is not vacuous: dynamo checked the hooks' wrappers and compiled the model's code.
        self.assertGreater(sum(seen.values()), 0)
        self.assertGreater(counting.count("linear"), 0)
        self.assertEqual(out, ref_model(inp))

    @needs(torch_facts.RUNS_HOOKS_OUTSIDE_OF_COMPILED_BACKWARDS)
    @skip_if_lt_x_gpu(2)
    @subtests(input_requires_grad=[False, True])
    def test_compiled_autograd_fsdp2_backward(self, input_requires_grad):
        """A backward in a compiled function has the gradients of an eager one, with and without a gradient to pass on.

        With the defect they are not reduced if the input needs no gradient.
        """
        torch._dynamo.reset()
        model, ref_model = (fully_shard(filled(MLP(4, device=self.device))) for _ in range(2))
        inp = uniform(4, 4, seed=self.rank).requires_grad_(input_requires_grad)

        def step(model: nn.Module) -> None:
            model(inp).sum().backward()

        step(ref_model)
        counting, before = CountingBackend(), counters["compiled_autograd"]["captures"]
        with torch_defect("fsdp2_compiled_backward_skips_the_last_reduction", when=not input_requires_grad):
            with torch._dynamo.config.patch(compiled_autograd=True):
                torch.compile(step, backend=counting)(model)
            self.assertEqual(counters["compiled_autograd"]["captures"], before + 1)
            for param, ref_param in zip(model.parameters(), ref_model.parameters()):
                self.assertEqual(param.grad.to_local(), ref_param.grad.to_local(), rtol=0, atol=0)
        torch._dynamo.reset()

    @needs(torch_facts.COMPILES_STEPS_ON_UNEVEN_SHARDS)
    @skip_if_lt_x_gpu(2)
    @subtests(pairwise=True, backend=["eager", "aot_eager"], optimizer=["Adam", "SGD"], foreach=[True, False])
    def test_compile_optimizer_uneven_shard(self, backend, optimizer, foreach):
        """A compiled step changes parameters with padded shards like an eager step (#176667)."""
        torch._dynamo.reset()
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        convolutions = [filled(nn.Conv2d(3, 7, 3)).to(self.device) for _ in range(2)]
        models = [fully_shard(each, mp_policy=policy, reshard_after_forward=False) for each in convolutions]
        make = functools.partial(getattr(torch.optim, optimizer), lr=1e-2, foreach=foreach)
        optim, ref_optim = (make(each.parameters()) for each in models)
        counting, inp = CountingBackend(backend), uniform(2, 3, 8, 8, seed=self.rank)
        compiled_step = torch.compile(optim.step, backend=counting)
        for step in range(3):
            for model in models:
                model(inp).float().square().sum().backward()
            (compiled_step if step > 0 else optim.step)()
            ref_optim.step()
            optim.zero_grad()
            ref_optim.zero_grad()
        self.assertGreater(counting.op_count, 0)
        for param, ref_param in zip(*(model.parameters() for model in models)):
            self.assertEqual(param.to_local(), ref_param.to_local())
        torch._dynamo.reset()

    @needs(torch_facts.UNSHARDED_SPECS_HAVE_COMPUTE_DTYPE)
    @requires_world_size(4)
    @subtests(compiled=[False, True])
    def test_tp_mixed_precision_dtensor_spec_dtype(self, compiled):
        """With TP, the spec of an unsharded parameter has the dtype of its local tensor."""
        torch._dynamo.reset()
        mesh = make_mesh(2, 2, names=("dp", "tp"))
        model = nn.Sequential(filled(nn.Linear(8, 8, bias=False)).to(self.device), nn.Identity())
        parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})
        if compiled:
            model.compile(backend="eager")
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        fully_shard(model, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=False)
        inp = uniform(2, 8, seed=mesh.get_local_rank("dp")).bfloat16()
        out = model(inp.chunk(2, dim=1)[mesh.get_local_rank("tp")])
        weight = model[0].weight
        dtypes = weight.dtype, weight.to_local().dtype, internals.spec_dtype(weight)
        self.assertEqual(dtypes, (torch.bfloat16,) * 3)
        out.sum().backward()
        self.assertEqual(model[0].weight.grad.dtype, torch.float32)
        torch._dynamo.reset()


class TestFullyShardCompile(CompileTest):
    power_of_two_ranks = True

    def test_dynamo_trace_use_training_state(self):
        torch._dynamo.reset()
        make_group, states = internals.fsdp2_param_group.FSDPParamGroup, internals.fsdp2_common.TrainingState
        unused = ("mesh_info", "post_forward_mesh_info", "shard_placement_fn", "mp_policy", "offload_policy")
        group = make_group(params=[], modules=(nn.Linear(1, 1),), device=self.device, **dict.fromkeys(unused))
        self.assertEqual(internals.training_state(group), states.IDLE)

        def add_in_forward_state(x: torch.Tensor) -> torch.Tensor:
            group._training_state = states.IDLE  # the plain attribute, because dynamo has to trace it
            with group.use_training_state(states.FORWARD):
                if group._training_state == states.FORWARD:
                    x = x + 1
            return x

        inp = torch.zeros(1, device=self.device)
        self.assertEqual(add_in_forward_state(inp), inp + 1)
        self.assertEqual(internals.training_state(group), states.IDLE)
        counting = CountingBackend()
        self.assertEqual(torch.compile(add_in_forward_state, backend=counting, fullgraph=True)(inp), inp + 1)
        self.assertEqual(internals.training_state(group), states.IDLE)
        self.assertEqual((len(counting.graphs), counting.op_count), (1, 1))
        torch._dynamo.reset()

    @subtests(view_taken_first=[False, True])
    def test_trace_fsdp_copy_(self, view_taken_first):
        """``fsdp.copy_`` copies what was written through another view of its source, whether the source view was
        created before or after the write.
        """
        with torch.library._scoped_library("torch_fsdp_tests", "DEF") as library:
            library.define("add_one_out(Tensor x, Tensor(a!) out) -> ()")

            @torch.library.impl(library, "add_one_out", "CompositeExplicitAutograd")
            def add_one_out(x: torch.Tensor, out: torch.Tensor) -> None:
                out.copy_(x + 1)

            def write_through_views(write: Callable, x: torch.Tensor) -> None:
                whole = torch.zeros(2, device=x.device)
                early_view = whole.view(-1)
                write(x, whole.view(-1))
                torch.ops.fsdp.copy_(x, early_view if view_taken_first else whole.view(-1))

            def add_one_and_clear(x: torch.Tensor, out: torch.Tensor) -> None:
                out.copy_(x + 1)
                x.view(-1).zero_()  # must happen before the copy to x, not after it

            custom_op = torch.ops.torch_fsdp_tests.add_one_out
            ref_x, x, functional_x = (torch.zeros(2, device=self.device) for _ in range(3))
            write_through_views(custom_op, ref_x)
            counting = CountingBackend()
            torch.compile(write_through_views, backend=counting, fullgraph=True)(custom_op, x)
            # AOTAutograd replaces both operations and does not use the functionalization rule of fsdp.copy_.
            # functionalize uses this rule.
            torch.func.functionalize(functools.partial(write_through_views, add_one_and_clear))(functional_x)
            self.assertEqual(ref_x, torch.ones(2, device=self.device))
            self.assertEqual(x, ref_x)
            self.assertEqual(functional_x, ref_x)
            self.assertEqual(self._count_op_in_graph(counting.graphs[0], torch.ops.fsdp.copy_), 1)
            torch._dynamo.reset()

    def _count_op_in_graph(self, graph: torch.fx.GraphModule, op: Any) -> int:
        return sum(node.target in (op, op.default) for node in graph.graph.nodes)

    @skip_if_lt_x_gpu(2)
    def test_compiled_autograd_ctx(self):
        """Gradients equal those of eager mode over ten iterations. Only the forward is required to be one graph."""

        def build() -> nn.Module:
            manual_seed(42)
            return Layers(nn.Linear(DIM, DIM, device=self.device))

        self._test_traceable_fsdp(Subject(build, fully_shard, self._rows), "aot_eager", iterations=10)

    def _test_traceable_fsdp(
        self, subject: Subject, backend: str, fwd_fullgraph: bool = True, iterations: int = ITERATIONS
    ) -> CountingBackend:
        """Train a plain, a sharded, and a compiled sharded model. Compare losses and gradients of every iteration.

        With ``fwd_fullgraph`` the model has no graph break of its own. Returns the backend with the graphs that it
        compiled.
        """
        plain, eager, model = subject.build(), subject.sharded(), subject.sharded()

        def backward_of_all_ranks(iteration: int) -> torch.Tensor:
            size = self.world_size
            return [subject.backward(plain, iteration, rank, divide_by=size) for rank in range(size)][self.rank]

        expected = self._train(plain, backward_of_all_ranks, iterations)
        self.assertEqual(len({step.loss.item() for step in expected}), iterations)
        steps = self._train(eager, lambda iteration: subject.backward(eager, iteration, self.rank), iterations)
        self._check_steps(steps, expected, "eager")
        counting = CountingBackend(backend)
        with self._compiled(model, counting, subject) as compiled:
            steps = self._train(model, lambda iteration: subject.backward(compiled, iteration, self.rank), iterations)
            self._check_graphs(counting, fwd_fullgraph)
        self._check_steps(steps, expected, "compiled")
        return counting

    def _train(self, model: nn.Module, backward: Callable[[int], torch.Tensor], iterations: int) -> list[Step]:
        """Train a plain or a sharded model. ``backward(iteration)`` computes the gradients and returns the loss."""
        # With upstream's learning rate of 1e-4 the losses would hardly change, whatever the gradients are.
        optim = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-3, momentum=0.9)
        steps = []
        for iteration in range(iterations):
            loss = backward(iteration)
            grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
            shards = {
                name: (grad.to_local() if isinstance(grad, DTensor) else self._shard_of(grad)).clone()
                for name, grad in grads.items()
            }
            steps.append(Step(loss, shards))
            optim.step()
            optim.zero_grad(set_to_none=True)
        return steps

    @contextlib.contextmanager
    def _compiled(self, model: nn.Module, counting: CountingBackend, subject: Subject) -> Iterator[Callable]:
        """The compiled model, after one iteration in eager mode that runs FSDP's lazy initialization."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(model, backend=counting)
        with torch.compiler.set_stance("force_eager"):
            subject.backward(compiled, 0, self.rank)
        model.zero_grad(set_to_none=True)
        self.assertEqual(counting.graphs, [], may_be="empty")
        yield compiled
        torch._dynamo.reset()

    def _check_graphs(self, counting: CountingBackend, fwd_fullgraph: bool) -> None:
        """Check that operations were compiled, but none of FSDP. There must be an explicit graph break exactly if not
        ``fwd_fullgraph``.

        The breaks at hooks cannot be counted: in a loop dynamo skips the whole frame and counts no break.
        """
        self.assertGreater(counting.op_count, 0)
        for node in counting.nodes:
            self.assertNotRegex(target_name(node), "fsdp|c10d")
        reasons = torch._dynamo.utils.counters["graph_break"]
        self.assertEqual(any("torch._dynamo.graph_break()" in reason for reason in reasons), not fwd_fullgraph)

    def _check_steps(self, steps: list[Step], expected: list[Step], what: str) -> None:
        self.assertEqual(len(steps), len(expected))
        for iteration, (step, ref) in enumerate(zip(steps, expected)):
            self.assertEqual(step.loss, ref.loss, rtol=1e-5, atol=1e-8, msg=f"{what}, loss {iteration}")
            self.assertEqual(step.grads, ref.grads, msg=f"{what}, gradients {iteration}")
            for name, grad in ref.grads.items():
                self.assertGreater(grad.abs().max().item(), 0, name)

    def _simple_mlp(self) -> Subject:
        def build() -> nn.Module:
            manual_seed(42)
            linears = [nn.Linear(DIM, DIM, device=self.device) for _ in range(3)]
            return Layers(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2])

        return Subject(build, functools.partial(fully_shard, reshard_after_forward=True), self._rows)

    @skip_if_lt_x_gpu(2)
    def test_simple_mlp_fullgraph_backend_aot_eager(self):
        self._test_traceable_fsdp(self._simple_mlp(), "aot_eager")

    @skip_if_lt_x_gpu(2)
    def test_simple_mlp_fullgraph_backend_aot_eager_decomp_partition(self):
        self._test_traceable_fsdp(self._simple_mlp(), "aot_eager_decomp_partition")

    @requires_inductor
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_simple_mlp_fullgraph_backend_inductor(self):
        with inductor_in(self.temp_dir):
            self._test_traceable_fsdp(self._simple_mlp(), "inductor")

    def _test_nested(self, backend: str, fwd_fullgraph: bool) -> CountingBackend:
        def build() -> nn.Module:
            manual_seed(42)
            return Repeating(breaks_graph=not fwd_fullgraph).to(self.device)

        return self._test_traceable_fsdp(Subject(build, shard_layers, self._rows), backend, fwd_fullgraph)

    @skip_if_lt_x_gpu(2)
    def test_nested_fully_shard_backend_aot_eager(self):
        self.run_subtests({"backend": ["aot_eager"], "fwd_fullgraph": [True, False]}, self._test_nested)

    @skip_if_lt_x_gpu(2)
    def test_nested_fully_shard_backend_aot_eager_decomp_partition(self):
        config = {"backend": ["aot_eager_decomp_partition"], "fwd_fullgraph": [True, False]}
        self.run_subtests(config, self._test_nested)

    @requires_inductor
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_nested_fully_shard_backend_inductor_fullgraph_True(self):
        with inductor_in(self.temp_dir):
            self._test_nested("inductor", fwd_fullgraph=True)

    @requires_inductor
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_nested_fully_shard_backend_inductor_fullgraph_False(self):
        with inductor_in(self.temp_dir):
            counting = self._test_nested("inductor", fwd_fullgraph=False)
        self.assertGreaterEqual(len(counting.graphs), 2)  # before and after the graph break

    def _transformer(self, all_requires_grad: bool, activation_checkpoint: bool = False) -> Subject:
        args = ModelArgs(n_layers=3, vocab_size=8, max_seq_len=16)

        def build() -> nn.Module:
            manual_seed(42)
            model = Transformer(args).to(self.device)
            for layer in model.layers if activation_checkpoint else ():
                # The checkpoint is inside the FSDP module. Dynamo cannot trace a checkpoint around an FSDP module, and
                # it compiles nothing inside a checkpoint that it does not trace.
                layer.feed_forward = internals.checkpoint_wrapping.checkpoint_wrapper(layer.feed_forward)
            if not all_requires_grad:
                model.requires_grad_(False)
                for layer in model.layers:
                    layer.attention.wq.requires_grad_(True)
                    layer.attention.wv.requires_grad_(True)
            return model

        def input_of(iteration: int, rank: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(100 * iteration + rank)
            return torch.randint(0, args.vocab_size, (2, args.max_seq_len), generator=generator).to(self.device)

        return Subject(build, shard_layers, input_of)

    @contextlib.contextmanager
    def _maybe_add_graph_break_to_sdpa(self, fwd_fullgraph: bool) -> Iterator[None]:
        """Break the graph in ``scaled_dot_product_attention`` unless ``fwd_fullgraph``."""
        attend = F.scaled_dot_product_attention

        def breaking(*args: Any, **kwargs: Any) -> torch.Tensor:
            torch._dynamo.graph_break()
            return attend(*args, **kwargs)

        with contextlib.nullcontext() if fwd_fullgraph else mock.patch.object(F, attend.__name__, breaking):
            yield

    def _test_transformer(
        self, backend: str, all_requires_grad: bool, activation_checkpoint: bool = False, fwd_fullgraph: bool = True
    ) -> None:
        subject = self._transformer(all_requires_grad, activation_checkpoint)
        same_random = torch._inductor.config.patch(fallback_random=True)
        inductor = inductor_in(self.temp_dir) if backend == "inductor" else same_random
        with inductor, self._maybe_add_graph_break_to_sdpa(fwd_fullgraph):
            counting = self._test_traceable_fsdp(subject, backend, fwd_fullgraph)
        if not fwd_fullgraph:
            self.assertGreater(len(counting.graphs), 2)

    @skip_if_lt_x_gpu(2)
    @subtests(all_requires_grad=[True, False])
    def test_transformer_backend_aot_eager(self, all_requires_grad):
        self._test_transformer("aot_eager", all_requires_grad)

    @skip_if_lt_x_gpu(2)
    @subtests(all_requires_grad=[True, False])
    def test_transformer_backend_aot_eager_decomp_partition(self, all_requires_grad):
        self._test_transformer("aot_eager_decomp_partition", all_requires_grad)

    @requires_inductor
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(all_requires_grad=[True, False], activation_checkpoint=[True, False])
    def test_transformer_backend_inductor_fullgraph_True(self, all_requires_grad, activation_checkpoint):
        self._test_transformer("inductor", all_requires_grad, activation_checkpoint)

    @requires_inductor
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(all_requires_grad=[True, False])
    def test_transformer_backend_inductor_fullgraph_False(self, all_requires_grad):
        self._test_transformer("inductor", all_requires_grad, fwd_fullgraph=False)

    @skip_if_lt_x_gpu(2)
    def test_dynamo_recompiles_on_fsdp_layers(self):
        """If FSDP1 wraps layers that were compiled one by one, outputs stay right, and each layer is compiled once."""
        manual_seed(42)
        model = Mod()
        ref_model = copy.deepcopy(model)
        counting = CountingBackend("eager")
        for name, layer in list(model.encoder.named_children()):
            setattr(model.encoder, name, torch.compile(layer, backend=counting))
        model = FSDP(model, sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=True)
        inp = torch.randn((32, 784), device=self.device)
        for _ in range(2):
            self.assertEqual(model(inp), ref_model(inp))
        self.assertEqual(counting.count("linear"), 3)

    @skip_if_lt_x_gpu(2)
    @subtests(
        case=[
            ("plain", [1, 2, 3, 4, 5], {"weight": True, "scale": True}),
            ("fully_shard", [1, 2, 2, 2, 2], {"scale": False}),
            ("FSDP1", [1, 2, 2, 2, 2], {"weight": False, "scale": False}),
            ("FSDP1 without original parameters", [0, 0, 0, 0, 0], {}),  # not compiled
        ]
    )
    def test_managed_modules(self, case):
        """Dynamo does not assume that the attributes of a module that FSDP manages are constant.

        An int attribute that changes becomes an input of the graph. In a plain module dynamo recompiles for each value.
        Dynamo marks a plain module's tensors as static, which means that their addresses are fixed. It must not mark
        the tensors that FSDP1 creates for each forward, and it does not mark a buffer under FSDP2. The test does not
        check parameters under FSDP2, because the unsharded parameter is the same object in each forward.
        """
        kind, graphs, promises = case
        counting, counts = CountingBackend("eager"), []
        model = self._counting_calls(kind, counting)
        for calls in range(2, 7):
            inp = self._rows(calls, self.rank)
            self.assertEqual(model(inp), inp * calls)
            counts.append(len(counting.graphs))
        self.assertEqual(counts, graphs)
        for name, promised in promises.items():
            (node,) = (node for node in counting.graphs[-1].graph.nodes if name in node.name)
            self.assertEqual("_dynamo_static_input_type" in node.meta["tensor_dict"], promised, name)

    def _counting_calls(self, kind: str, backend: CountingBackend) -> nn.Module:
        model = CountsCalls(self.device)
        model.compile(backend=backend)
        if kind == "fully_shard":
            fully_shard(model)
        return FSDP(model, use_orig_params=kind == "FSDP1") if kind.startswith("FSDP1") else model

    def _mlps(self) -> nn.Sequential:
        manual_seed(42)
        return nn.Sequential(*(MLP(DIM, self.device) for _ in range(2)))

    def _mean_backward(self, ref_model: nn.Module, iteration: int) -> None:
        mean_backward(ref_model, [self._rows(iteration, rank) for rank in range(self.world_size)])

    @requires_world_size(4, least=2)
    @subtests(reshard_after_forward=[True, False, 2], per_layer=[False, True])
    def test_no_recompiles(self, reshard_after_forward, per_layer):
        """Nothing is compiled after the second iteration."""
        model, counting = self._mlps(), CountingBackend("eager")  # dynamo's decisions do not depend on the backend
        for mlp in model:
            fully_shard(mlp, reshard_after_forward=reshard_after_forward)
            if per_layer:
                mlp.compile(backend=counting)
        fully_shard(model, reshard_after_forward=reshard_after_forward)
        if not per_layer:
            model.compile(backend=counting)
        graphs = []
        for iteration in range(6):
            model(self._rows(iteration, self.rank)).square().sum().backward()
            graphs.append(len(counting.graphs))
        self.assertGreater(graphs[0], 0)
        self.assertEqual(graphs[2:], [graphs[1]] * 4)

    @skip_if_lt_x_gpu(2)
    @subtests(compile_first=[True, False])
    def test_compile_per_layer(self, compile_first):
        """A model trains like a plain one, whether its layers are compiled before or after ``fully_shard``."""
        ref_model, model, counting = self._mlps(), self._mlps(), CountingBackend("aot_eager")
        for mlp in model:
            if compile_first:
                mlp.compile(backend=counting)
            fully_shard(mlp, reshard_after_forward=compile_first)  # test_no_recompiles tests all combinations
            if not compile_first:
                mlp.compile(backend=counting)
        fully_shard(model)
        optims = optimizers(ref_model, model)
        for iteration in range(5):
            self._mean_backward(ref_model, iteration)
            model(self._rows(iteration, self.rank)).square().sum().backward()
            check_sharded_parity(self, ref_model, model)
            take_step(optims)
        self.assertGreater(counting.count("linear"), 0)
        check_sharded_parity(self, ref_model, model)

    @skip_if_lt_x_gpu(2)
    @subtests(order=list(CHECKPOINTED_AND_COMPILED), selective=[False, True])
    def test_compiled_checkpoints(self, order, selective):
        """A model trains like a plain one if its layers are checkpointed and compiled, in any order."""

        def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

        contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
        wrapper = internals.checkpoint_wrapping.checkpoint_wrapper
        checkpointed = functools.partial(wrapper, context_fn=contexts) if selective else wrapper
        ref_model, counting = self._mlps(), CountingBackend("aot_eager")
        wrap = CHECKPOINTED_AND_COMPILED[order]
        model = nn.Sequential(*(wrap(mlp, checkpointed, counting) for mlp in self._mlps()))
        shard_each((*model, model))
        optims = optimizers(ref_model, model)
        for iteration in range(2):
            self._mean_backward(ref_model, iteration)
            model(self._rows(iteration, self.rank)).square().sum().backward()
            actual = [param.grad.full_tensor() for param in model.parameters()]
            self.assertEqual(actual, [param.grad for param in ref_model.parameters()])
            take_step(optims)
        if not selective or torch_facts.COMPILES_INSIDE_OF_SELECTIVE_CHECKPOINTS:
            self.assertGreater(len(counting.graphs), 0)

    @skip_if_lt_x_gpu(2)
    @subtests(views=list(OVERLAPPING), per_layer=[True, False])
    def test_inputs_that_overlap(self, views, per_layer):
        """A compiled model, or one with a compiled layer, gets overlapping views of one buffer, of several lengths."""
        ref_model, counting = filled(NextToken()).to(self.device), CountingBackend("aot_eager")
        model = copy.deepcopy(ref_model)
        (model.head if per_layer else model).compile(backend=counting)
        shard_each((model.head, model))
        for length in (5, 6, 7):
            tokens = torch.arange(2 * length, device=self.device).view(2, length) * (2 * self.rank + 3) % DIM
            for each in (ref_model, model):
                each.zero_grad()
                each(*OVERLAPPING[views](tokens)).backward()
            average_gradients(ref_model)
            check_gradients(self, ref_model, model)
        self.assertGreater(len(counting.graphs), 0)

    @skip_if_lt_x_gpu(2)
    @subtests(per_layer=[True, False])
    def test_compiled_gradient_sync(self, per_layer):
        """With ``set_requires_gradient_sync(False)`` for some microbatches, a compiled model has the collectives and
        gradients of eager mode.
        """
        ref_model, counting = self._mlps(), CountingBackend("aot_eager")
        counts: list[list[collections.Counter[str]]] = []
        for iteration in range(3):
            self._mean_backward(ref_model, iteration)
        for compiled in (False, True):
            model = self._mlps()
            shard_each((*model, model))
            if compiled:
                for module in model if per_layer else [model]:
                    module.compile(backend=counting)
            counts.append([])
            for _ in range(2):
                model.zero_grad()
                for iteration in range(3):
                    model.set_requires_gradient_sync(iteration == 2)
                    with recorded() as calls:  # dynamo compiles nothing under a dispatch mode
                        model(self._rows(iteration, self.rank)).square().sum().backward()
                    counts[-1].append(calls.counts())
                check_sharded_parity(self, ref_model, model)
        self.assertEqual([each["reduce_scatter"] for each in counts[0]], [0, 0, 2] * 2)
        self.assertEqual(counts[1], counts[0])
        self.assertGreater(len(counting.graphs), 0)


if __name__ == "__main__":
    run_tests()
