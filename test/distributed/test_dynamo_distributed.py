"""``torch.compile`` around and inside FSDP1: a compiled model trains like a plain one without recompiling.

Dynamo does not trace FSDP's own code, so graphs end at its hooks. Dynamo does not assume that attributes and parameters
of modules that FSDP manages are constant.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
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
from torch_fsdp_tests.fsdp.references import average, average_gradients, full_parameters
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.training import loss_of

ROWS, WIDTH, HIDDEN = 3, 10, 8
LR, STEPS = 0.1, 3

allow_time_for_inductor("test_fsdp_inductor")


class Dense(nn.Module):
    """A layer whose class is not from torch.nn. After the graph break at the hooks of an FSDP instance, eager code
    calls the instance's forward. Dynamo would not compile a forward in torch.nn that eager code calls.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias).tanh()


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Dense(WIDTH, HIDDEN), Dense(HIDDEN, HIDDEN), Dense(HIDDEN, 5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class MutatingModel(nn.Module):
    """Changes one of its own attributes, and its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Dense(WIDTH, WIDTH)
        self.seen: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = x * 2
        x.add_(1)
        return self.layer(x) + self.seen


class ForcedGetAttrMod(nn.Module):
    """Gets a layer with ``__getattr__`` and uses its weight, but does not call the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.__getattr__("linear").weight)


class ToyInnerModel(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Dense(inputs, outputs), Dense(outputs, outputs)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class ToyOuterModel(nn.Module):
    """Has two children of different sizes, so that the compiled code of one does not fit the other."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([ToyInnerModel(WIDTH, HIDDEN), ToyInnerModel(HIDDEN, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for inner in self.inner:
            x = inner(x)
        return x


class WithBuffer(nn.Module):
    """A layer, and a buffer with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Dense(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.layer.register_buffer("same_scale", self.scale)


class UsesTwice(WithBuffer):
    """Uses its buffer twice, and one tensor as two arguments."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layer(x * self.scale + y) * self.scale


class ChangesSharedBuffer(WithBuffer):
    """Adds to the buffer under one of its names, and computes with it under the other one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer.same_scale.add_(0.5)
        return self.layer(x) * self.scale


class CallsStaticMethod(nn.Module):
    def __init__(self, through_class: bool) -> None:
        super().__init__()
        self.layer, self.through_class = Dense(WIDTH, WIDTH), through_class

    @staticmethod
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        double = CallsStaticMethod.double if self.through_class else self.double
        return double(self.layer(x))


class CountsCalls(nn.Module):
    """Multiplies by the number of calls, which is an int attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = Dense(WIDTH, WIDTH), 1  # forward uses 2 and more: dynamo treats 0 and 1 as constants

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.layer(x) * self.calls


def breaks() -> dict[str, int]:
    """The reasons of graph breaks since the counters were cleared, with their counts."""
    return dict(torch._dynamo.utils.counters["graph_break"])


class DynamoTest(FSDPTest):
    def _plain(self, model: nn.Module) -> Any:
        """Reset dynamo. Returns the model on the device, with the same parameters on all ranks."""
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        return filled(model, low=-0.3, high=0.3).to(self.device)

    def _batch(self, step: int) -> torch.Tensor:
        """A batch that differs by rank and step."""
        return uniform(ROWS, WIDTH, seed=100 * step + self.rank)

    def _sharded(self, model: nn.Module, *units: type[nn.Module], **kwargs: Any) -> FSDP:
        """A copy of the model wrapped with FSDP. Modules of the types ``units`` are FSDP instances of their own."""
        policy = ModuleWrapPolicy(set(units)) if units else None
        return FSDP(copy.deepcopy(model), auto_wrap_policy=policy, **{"use_orig_params": True, **kwargs})

    def _train(
        self,
        ref_model: nn.Module,
        model: FSDP,
        call: Callable[[torch.Tensor], torch.Tensor],
        counting: CountingBackend,
    ) -> None:
        """Train the plain model and the compiled one, which ``call`` runs, and compare them after each step.

        Nothing is compiled after the second step.
        """
        optims = [torch.optim.SGD(each.parameters(), lr=LR) for each in (ref_model, model)]
        graphs = []
        for step in range(STEPS):
            self._backward(ref_model, call, step)
            self._step(ref_model, model, optims)
            graphs.append(len(counting.graphs))
        self.assertGreater(graphs[0], 0)
        self.assertEqual(graphs[-1], graphs[1])

    def _backward(self, ref_model: nn.Module, call: Callable[[torch.Tensor], torch.Tensor], step: int) -> None:
        """Run forward and backward of both models on a batch. Compare outputs and gradients of inputs."""
        inputs = [self._batch(step).requires_grad_() for _ in range(2)]
        outputs = [each(inp) for each, inp in zip((ref_model, call), inputs)]
        self.assertEqual(*outputs)
        for output in outputs:
            loss_of(output).backward()
        self.assertEqual(inputs[0].grad, inputs[1].grad)

    def _step(
        self, ref_model: nn.Module, model: FSDP, optims: list[torch.optim.SGD], local: Sequence[str] = ()
    ) -> None:
        """Average the plain model's gradients, compare gradients, step, and compare parameters.

        The gradients of the parameters in ``local`` are not averaged.
        """
        average(param.grad for name, param in ref_model.named_parameters() if name not in local)
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            actual = {internals.clean_name(name): param.grad for name, param in model.named_parameters()}
            self.assertEqual(actual, {name: param.grad for name, param in ref_model.named_parameters()})
        before = full_parameters(model)
        for optim in optims:
            optim.step()
            optim.zero_grad()
        after = full_parameters(model)
        self.assertEqual(after, {name: param.detach() for name, param in ref_model.named_parameters()})
        for name, param in after.items():
            self.assertNotEqual(param, before[name], msg=name)


class TestMultiProc(DynamoTest):
    world_size = 2

    def _test_training(self, backend: str, units: tuple[type[nn.Module], ...]) -> None:
        counting, ref_model = CountingBackend(backend), self._plain(ToyModel())
        model = self._sharded(ref_model, *units)
        self._train(ref_model, model, torch.compile(model, backend=counting), counting)
        self.assertEqual(len(counting.graphs), 3 if units else 1)
        self.assertEqual(counting.count("linear"), 3)

    @skip_if_lt_x_gpu(2)
    @subtests(units=[(), (Dense,)])
    def test_fsdp_aot_eager(self, units):
        """The forward of each FSDP instance is compiled as one graph."""
        self._test_training("aot_eager", units)

    @skip_if_lt_x_gpu(2)
    def test_fsdp_setattr(self):
        """A forward that sets an attribute and changes its input is one graph. Neither causes a graph break."""
        counting, ref_model = CountingBackend(), self._plain(MutatingModel())
        model = self._sharded(ref_model)
        compiled = torch.compile(model, backend=counting)
        for step in range(3):
            inputs = [self._batch(step) for _ in range(2)]
            self.assertEqual(compiled(inputs[1]), ref_model(inputs[0]))
            self.assertEqual(*inputs)
            self.assertEqual(inputs[0], self._batch(step) + 1)
            self.assertEqual(model.module.seen, ref_model.seen)
        self.assertEqual(len(counting.graphs), 1)
        self.assertEqual(len(breaks()), 1)
        self.assertNotIn("setattr", str(breaks()).lower())

    @skip_if_lt_x_gpu(2)
    def test_fsdp_unspecialized_forced_getattr_no_inline(self):
        """The forward is one graph with ``inline_inbuilt_nn_modules=False``, which newer versions of PyTorch ignore."""
        with internals.dynamo_switched(inline_inbuilt_nn_modules=False):
            self._test_forced_getattr()

    @skip_if_lt_x_gpu(2)
    def test_fsdp_unspecialized_forced_getattr_inline(self):
        self._test_forced_getattr()

    def _test_forced_getattr(self) -> None:
        counting, ref_model = CountingBackend(), self._plain(ForcedGetAttrMod())
        model = self._sharded(ref_model)
        compiled = torch.compile(model, backend=counting)
        for step in range(3):
            self.assertEqual(compiled(self._batch(step)), ref_model(self._batch(step)))
        self.assertEqual(len(counting.graphs), 1)

    @requires_inductor
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(units=[(), (Dense,)])
    def test_fsdp_inductor(self, units):
        with inductor_in(self.temp_dir):
            self._test_training("inductor", units)

    @skip_if_lt_x_gpu(2)
    def test_fsdp_activation_checkpointing(self):
        """Each checkpointed FSDP instance is one graph, which contains a ``tag_activation_checkpoint`` node."""
        counting, ref_model = CountingBackend(), self._plain(ToyOuterModel())
        model = self._sharded(ref_model, ToyInnerModel)
        internals.checkpoint_wrapping.apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, ToyInnerModel)
        )
        self._train(ref_model, model, torch.compile(model, backend=counting), counting)
        tagged = [
            any("tag_activation_checkpoint" in target_name(node) for node in graph.graph.nodes)
            for graph in counting.graphs
        ]
        self.assertEqual(tagged, [True, True])

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD],
        inside=[False, True],
        units=[(), (Dense,)],
    )
    def test_training(self, strategy, inside, units):
        """A compiled model trains like a plain one, with FSDP inside the compiled module or around it."""
        counting, ref_model = CountingBackend(), self._plain(ToyModel())
        model = self._sharded(ref_model, *units, sharding_strategy=strategy)
        if inside:
            for unit in FSDP.fsdp_modules(model):
                unit.module.compile(backend=counting)
        self._train(ref_model, model, model if inside else torch.compile(model, backend=counting), counting)

    @skip_if_lt_x_gpu(2)
    @subtests(ignored=["layers.1", "layers.0.bias"])
    def test_ignored_states(self, ignored):
        """Gradients of ignored modules and parameters are not reduced (#147143)."""
        counting, ref_model = CountingBackend(), self._plain(ToyModel())
        plain = copy.deepcopy(ref_model)
        states = [attrgetter(ignored)(plain)]
        model = FSDP(plain, ignored_states=states, use_orig_params=True)
        local = [name for name, _ in ref_model.named_parameters() if name.startswith(ignored)]
        compiled = torch.compile(model, backend=counting)
        optims = [torch.optim.SGD(each.parameters(), lr=LR) for each in (ref_model, model)]
        for step in range(STEPS):
            self._backward(ref_model, compiled, step)
            self._step(ref_model, model, optims, local)
        self.assertEqual(counting.count("linear"), 3)

    @skip_if_lt_x_gpu(2)
    @subtests(how=["compiled outside", "compiled inside", "compiled units"])
    def test_mixed_precision(self, how):
        """With mixed precision a compiled model trains like an eager one (#161153, #152162)."""
        counting, plain = CountingBackend(), self._plain(ToyModel())
        bf16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
        units = (Dense,) if how == "compiled units" else ()
        eager, model = (self._sharded(plain, *units, mixed_precision=bf16) for _ in range(2))
        call = model
        if how == "compiled inside":
            model.module.compile(backend=counting)
        else:
            call = torch.compile(model, backend=counting)
        optims = [torch.optim.SGD(each.parameters(), lr=LR) for each in (eager, model)]
        ref_losses = []
        for step in range(STEPS):
            outputs = [each(self._batch(step)) for each in (eager, call)]
            ref_losses.append(loss_of(outputs[0]))
            self.assertEqual(outputs[1].dtype, torch.bfloat16)
            self.assertEqual(outputs[1], outputs[0], rtol=0.02, atol=0.02)
            for output, optim in zip(outputs, optims, strict=True):
                loss_of(output).backward()
                optim.step()
                optim.zero_grad()
            self.assertEqual(full_parameters(model), full_parameters(eager), rtol=0.02, atol=0.02)
        check_losses(ref_losses)
        self.assertEqual(counting.count("linear"), 3)

    @skip_if_lt_x_gpu(2)
    def test_offload_and_evaluation(self):
        """A compiled model with offloaded parameters trains, with a forward in eval mode before each step (#139110)."""
        counting, ref_model = CountingBackend(), self._plain(ToyModel())
        model = self._sharded(ref_model, cpu_offload=CPUOffload(offload_params=True))
        compiled = torch.compile(model, backend=counting)
        optims = [torch.optim.SGD(each.parameters(), lr=LR) for each in (ref_model, model)]
        for step in range(STEPS):
            with torch.no_grad():
                model.eval()
                self.assertEqual(compiled(self._batch(10 + step)), ref_model(self._batch(10 + step)))
                model.train()
            with torch_defect("fsdp1_evaluation_brings_back_offloaded_gradients"):
                self.assertTrue(all(param.grad is None for param in model.parameters()))
            optims[1].zero_grad()  # a workaround, because dynamo cannot compile if parameters have gradients
            self._backward(ref_model, compiled, step)
            average_gradients(ref_model)
            for optim in optims:
                optim.step()
                optim.zero_grad()
        self.assertEqual(full_parameters(model), {name: p.detach() for name, p in ref_model.named_parameters()})

    @skip_if_lt_x_gpu(2)
    def test_accumulation_over_shapes(self):
        """Accumulation raises, because dynamo cannot copy an unsharded parameter with a sharded gradient."""
        ref_model = self._plain(ToyModel())
        model = self._sharded(ref_model)
        compiled = torch.compile(model, backend="eager")
        first, second = self._batch(0), self._batch(1)[:2]
        loss_of(compiled(first)).backward()
        with self.assertRaisesRegex(
            torch._dynamo.exc.InternalTorchDynamoError, "attempting to assign a gradient of size"
        ):
            compiled(second)

    @skip_if_lt_x_gpu(2)
    @subtests(units=[(), (Dense,)])
    def test_between_steps(self, units):
        """Accumulation, changed parameters and forwards in eval mode between compiled steps give right results. Later
        training steps are not recompiled.
        """
        counting, ref_model = CountingBackend(), self._plain(ToyModel())
        model = self._sharded(ref_model, *units)
        compiled = torch.compile(model, backend=counting)
        self._train(ref_model, model, compiled, counting)
        graphs = len(counting.graphs)
        optims = [torch.optim.SGD(each.parameters(), lr=LR) for each in (ref_model, model)]

        for last in (False, True):
            with contextlib.nullcontext() if last else model.no_sync(), recorded("reduce_scatter") as calls:
                self._backward(ref_model, compiled, 10 + last)
            self.assertEqual(len(calls), (len(units) * 3 or 1) * last)
        self._step(ref_model, model, optims)

        with torch.no_grad(), FSDP.summon_full_params(model):
            for each in (ref_model, model):
                for param in each.parameters():
                    param.mul_(0.5)
        self._backward(ref_model, compiled, 20)
        self._step(ref_model, model, optims)
        self.assertEqual(len(counting.graphs), graphs)

        with torch.no_grad():
            model.eval()
            self.assertEqual(compiled(self._batch(30)), ref_model(self._batch(30)))
            model.train()
        graphs = len(counting.graphs)
        self._backward(ref_model, compiled, 31)
        self._step(ref_model, model, optims)
        self.assertEqual(len(counting.graphs), graphs)


class TestSingleProc(DynamoTest):
    """Tests on one rank, where FSDP1 does not shard."""

    world_size = 1

    @contextlib.contextmanager
    def _compiled_as(self, graphs: int) -> Iterator[CountingBackend]:
        """Yield a backend. At the end of the context, it must have compiled this number of graphs."""
        counting = CountingBackend()
        yield counting
        self.assertEqual(len(counting.graphs), graphs)

    @subtests(fullgraph=[False, True])
    def test_fsdp_orig_params_assert(self, fullgraph):
        """With ``use_orig_params=False`` dynamo compiles nothing, or raises with ``fullgraph``.

        Upstream's name mentions an assertion, which no longer exists.
        """
        says = "Dynamo only supports FSDP with use_orig_params=True"
        ref_model = self._plain(ToyModel())
        model = self._sharded(ref_model, use_orig_params=False)
        with self._compiled_as(0) as counting:
            model.module.compile(backend=counting, fullgraph=fullgraph)
            if fullgraph:
                with self.assertRaisesRegex(torch._dynamo.exc.Unsupported, says):
                    model(self._batch(0))
            else:
                self.assertEqual(model(self._batch(0)), ref_model(self._batch(0)))

    @subtests(skip_fsdp_guards=[True, False])
    def test_fsdp_skip_guards(self, skip_fsdp_guards):
        """With ``skip_fsdp_guards``, dynamo marks guards of FSDP-managed modules and does not treat an int attribute as
        a constant. Without it, dynamo treats these modules like others and recompiles for each value of the attribute.
        """
        seen: list[Any] = []
        counting, ref_model = CountingBackend(), self._plain(CountsCalls())

        def keep_all(guards: list[Any]) -> list[bool]:
            seen.extend(guards)
            return [True] * len(guards)

        with internals.dynamo_switched(skip_fsdp_guards=skip_fsdp_guards):
            model = self._sharded(ref_model)
            compiled = torch._dynamo.optimize(counting, guard_filter_fn=keep_all)(model)
            for step in range(5):
                self.assertEqual(compiled(self._batch(step)), ref_model(self._batch(step)))
        of_parameters = [guard for guard in seen if guard.guard_type == "TENSOR_MATCH" and "weight" in guard.name]
        self.assertEqual(len(of_parameters), len(counting.graphs))
        for guard in of_parameters:
            self.assertEqual(guard.orig_guard.is_fsdp_module(), skip_fsdp_guards)
        self.assertEqual(len(counting.graphs), 2 if skip_fsdp_guards else 5)

    def test_fsdp_skip_register_attr_or_module(self):
        """Parameters are inputs of the graph, which has no ``get_attr`` and ``call_module`` nodes."""
        ref_model = self._plain(ToyModel())
        with self._compiled_as(1) as counting:
            model = torch.compile(self._sharded(ref_model), backend=counting)
            self.assertEqual(model(self._batch(0)), ref_model(self._batch(0)))
        kinds = [node.op for node in counting.nodes]
        self.assertNotIn("get_attr", kinds)
        self.assertNotIn("call_module", kinds)
        self.assertEqual(kinds.count("placeholder"), 1 + len(list(ref_model.parameters())))

    def test_fsdp_dup_tensors_same_source(self):
        """A tensor that is passed twice and a buffer that is used twice are one graph input each."""
        ref_model = self._plain(UsesTwice())
        with self._compiled_as(1) as counting:
            model = torch.compile(self._sharded(ref_model), backend=counting)
            for step in range(2):
                inp = self._batch(step)
                self.assertEqual(model(inp, inp), ref_model(inp, inp))
        self.assertEqual([node.op for node in counting.nodes].count("placeholder"), 4)

    def test_fsdp_dup_tensors_diff_source(self):
        """A buffer with two names is one graph input. An in-place change under one name is visible under the other."""
        ref_model = self._plain(ChangesSharedBuffer())
        with self._compiled_as(1) as counting:
            model = self._sharded(ref_model)
            compiled = torch.compile(model, backend=counting)
            for step in range(15):
                self.assertEqual(compiled(self._batch(step)), ref_model(self._batch(step)))
        self.assertEqual([node.op for node in counting.nodes].count("placeholder"), 4)
        self.assertEqual(model.module.scale, ref_model.scale)
        self.assertIs(model.module.scale, model.module.layer.same_scale)

    @subtests(through_class=[False, True])
    def test_fsdp_staticmethod(self, through_class):
        """A static method is compiled with the rest of the forward."""
        ref_model = self._plain(CallsStaticMethod(through_class))
        with self._compiled_as(1) as counting:
            model = torch.compile(self._sharded(ref_model), backend=counting)
            for step in range(3):
                self.assertEqual(model(self._batch(step)), ref_model(self._batch(step)))
        self.assertEqual(counting.count("mul"), 1)


if __name__ == "__main__":
    run_tests()
