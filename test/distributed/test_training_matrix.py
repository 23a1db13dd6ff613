"""A model is trained in each layout with every pair of features, saved, loaded in another layout, and trained more.

A step on four ranks must have the same losses as the same step on one rank. Each rank has its own rows, and compares
its loss on them with the loss of a plain model that is trained on all rows. :data:`AXES` has the combined features, and
:data:`LIMITS` the cases that are left out, and why.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import os
import re
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

from torch_fsdp_tests.common_distributed import needs, run_subtests, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_fsdp.device import rank_device
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, parametrize, run_tests, subtest
from torch_fsdp_tests.defects import NO_DEFECT, torch_defect
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp import collectives, internals
from torch_fsdp_tests.fsdp.checkpoints import LAYOUTS, Layout, Run
from torch_fsdp_tests.fsdp.combinations import one_by_one, pairwise_cases
from torch_fsdp_tests.fsdp.optimizers import fused_on_host
from torch_fsdp_tests.fsdp.references import of_all_ranks
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.installed_torch import torch_facts

FSDP1_AND_TP, FSDP1_AND_PP = "FSDP1 and TP on 2x2", "FSDP1 and PP on 2x2"
FSDP2_AND_TP, FSDP2_AND_PP, REPLICATE = "FSDP2 and TP on 2x2", "FSDP2 and PP on 2x2", "replicate on 4"
TRAINED = [
    *("FSDP1 on 4", "FSDP1 on 2x2", FSDP1_AND_TP, FSDP1_AND_PP, "FSDP1 without shards on 4"),
    *("FSDP2 on 4", "FSDP2 on 2x2", FSDP2_AND_TP, FSDP2_AND_PP, REPLICATE),
]
NEEDS = {
    FSDP2_AND_PP: torch_facts.PIPELINE_START_MESSAGES_MATCH,
    REPLICATE: torch_facts.REPLICATES_WITHOUT_SHARDS,
}
OFF_AND_ON = [False, True]
AXES: dict[str, list[Any]] = {
    "saved": TRAINED,
    "loaded": TRAINED,
    "mixed_precision": OFF_AND_ON,
    "offload": OFF_AND_ON,
    "activation_checkpointing": OFF_AND_ON,
    "accumulation": OFF_AND_ON,
    "frozen_part": OFF_AND_ON,
}


class Limit(NamedTuple):
    """A combination without support in PyTorch, the cases left out for it, and the test that shows the failure."""

    applies: Callable[[str, str, Features], bool]  # takes the saved layout, the loaded one, and the features
    seen_by: str  # or the facts, if only older versions have the limit


LIMITS = {
    "FSDP1 computes one microbatch of a pipeline at a time": Limit(
        lambda saved, loaded, features: FSDP1_AND_PP in (saved, loaded),
        "test_fsdp1_in_a_pipeline",
    ),
    "FSDP1 does not accumulate, under TP": Limit(
        lambda saved, loaded, features: FSDP1_AND_TP in (saved, loaded) and features.accumulation,
        "test_fsdp1_under_tp_accumulates",
    ),
    "FSDP1 trains what is frozen, under TP": Limit(
        lambda saved, loaded, features: FSDP1_AND_TP in (saved, loaded) and features.frozen_part,
        "test_fsdp1_under_tp_keeps_frozen_parameters",
    ),
    "FSDP1 does not load checkpointed layers, under TP": Limit(
        lambda saved, loaded, features: loaded == FSDP1_AND_TP and features.activation_checkpointing,
        "test_fsdp1_under_tp_loads_checkpointed_layers",
    ),
    "FSDP1 loads wrong moments, under TP": Limit(
        lambda saved, loaded, features: loaded == FSDP1_AND_TP,
        "test_fsdp1_under_tp_loads_moments",
    ),
    "an older torch does not have the layout": Limit(
        lambda saved, loaded, features: not all(NEEDS.get(layout, True) for layout in (saved, loaded)),
        "NEEDS",
    ),
    "an older torch trains what is frozen, under TP": Limit(
        lambda saved, loaded, features: (
            FSDP2_AND_TP in (saved, loaded) and features.frozen_part and not torch_facts.TP_KEEPS_REQUIRES_GRAD
        ),
        "TP_KEEPS_REQUIRES_GRAD",
    ),
}
BEFORE, AFTER = range(2), range(2, 4)  # steps; the last one shows whether the moments were loaded
REHEARSED = 9  # the number of a step whose gradients are not used
ROWS = 8  # rows of a batch
# Relative, between losses. For bfloat16 it is torch.testing's own: under TP a sum is rounded more than once.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}


class Layer(nn.Linear):
    """A linear layer and a tanh. It records the dtype of each computation."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.ran: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran.append(self.weight.dtype)
        return super().forward(x).tanh()


class Layers(nn.Module):
    """Four layers in a row. 4 ranks divide 8 rows evenly, but not 5 rows: one of the ranks has none."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2, self.net3, self.net4 = Layer(5, 8), Layer(8, 5), Layer(5, 8), Layer(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x)
        return x


class Features(NamedTuple):
    """The features that a training uses, in any layout."""

    mixed_precision: bool = False
    offload: bool = False
    activation_checkpointing: bool = False
    accumulation: bool = False
    frozen_part: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which layers compute."""
        return torch.bfloat16 if self.mixed_precision else torch.float32

    def microbatches(self, layout: Layout) -> int:
        """The number of microbatches in a step of a rank. A pipeline needs a multiple of the number of its stages."""
        return (2 if self.accumulation else 1) * layout.dims.get("stage", 1)

    def model(self) -> nn.Module:
        """A model without FSDP. A whole layer and a part of another one are frozen."""
        model = Layers()
        if self.frozen_part:
            model.net2.requires_grad_(False)
            model.net3.bias.requires_grad_(False)
        if self.activation_checkpointing:
            for name, layer in [*model.named_children()]:
                setattr(model, name, internals.checkpoint_wrapping.checkpoint_wrapper(layer))
        return model

    def applied(self, layout: Layout) -> Layout:
        """The layout with these features."""
        low = self.dtype if self.mixed_precision else None
        return layout._replace(apply=functools.partial(layout.apply, param_dtype=low, offload=self.offload))


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with an ``eps`` as large as the gradients, so that their scale matters."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.Adam(trained, lr=0.1, eps=0.1, **fused_on_host())


def batch(step: int, parts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs and targets of a step, in equal parts."""
    generator = torch.Generator().manual_seed(step)
    inputs, targets = (torch.rand(ROWS, 5, generator=generator).to(rank_device()) for _ in range(2))
    return list(zip(inputs.chunk(parts), targets.chunk(parts)))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean squared error, in float32."""
    return (output.float() - target).square().mean()


@functools.cache
def unsharded(dtype: torch.dtype, frozen_part: bool, parts: tuple[int, ...]) -> list[list[float]]:
    """The losses of a plain model in float32, whose copy computes in ``dtype``: for each step, for each part.

    ``parts`` is the number of equal parts of its batch that each step computes separately, as ranks do with
    microbatches.
    """
    model = filled(Features(frozen_part=frozen_part).model().to(rank_device()), seed=0)
    optim, losses = adam(model), []
    for step, count in enumerate(parts):
        computing, losses_of_step = copy.deepcopy(model).to(dtype), []
        for x, target in batch(step, count):
            loss = loss_of(computing(x.to(dtype)), target)
            loss.backward()
            losses_of_step.append(loss.item())
            for param, computed in zip(model.parameters(), computing.parameters()):
                if computed.grad is not None:
                    gradient = computed.grad.float() / count
                    param.grad = gradient if param.grad is None else param.grad + gradient
                    computed.grad = None
        optim.step()
        optim.zero_grad()
        losses.append(losses_of_step)
    return losses


class Training(Run):
    """A run that records the number of parts of each batch, on which losses depend. It continues ``before``."""

    # Pipeline stages have different parameters in the group with the same number.
    options = StateDictOptions(flatten_optimizer_state_dict=True)

    def __init__(self, layout: Layout, features: Features, before: Training | None = None) -> None:
        super().__init__(features.applied(layout), 0 if before is None else 1, features.model)
        self.parts: tuple[int, ...] = () if before is None else before.parts  # number of parts of each step so far
        self.features, self.optim = features, adam(self.model)
        self.microbatches = features.microbatches(layout)
        self._stages = self.mesh["stage"] if "stage" in layout.names else None
        if self._stages is not None:
            index, group = self._stages.get_local_rank(), self._stages.get_group()
            stage = PipelineStage(self.model, index, self._stages.size(), rank_device(), group=group)
            self._schedule = ScheduleGPipe(stage, self.microbatches, loss_fn=loss_of)

    @property
    def layers(self) -> list[Layer]:
        """The layers of this rank."""
        return [module for module in self.model.modules() if isinstance(module, Layer)]

    def step(self, number: int) -> float | None:
        """Train on this rank's rows. Returns the loss on them, if this rank has it."""
        self.parts += (self.layout.batches * self.microbatches,)
        loss = self.backward(number)
        self.optim.step()
        self.optim.zero_grad()
        return loss

    def rehearse(self) -> None:
        """Run forward and backward without a step, so that the model has already run when it loads a checkpoint."""
        self.backward(REHEARSED)
        self.optim.zero_grad()

    def backward(self, number: int) -> float | None:
        """Compute the gradients of a step. Returns the loss, like :meth:`step`."""
        count = self.microbatches
        mine = batch(number, self.layout.batches * count)[self.layout.batch_index * count :][:count]
        losses = self._pipelined(mine) if self._stages is not None else self._one_by_one(mine)
        return math.fsum(losses) / count if losses else None

    def _one_by_one(self, microbatches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
        losses = []
        for index, (x, target) in enumerate(microbatches, 1):
            with self._synchronizing(index == len(microbatches)):
                loss = loss_of(self.model(x), target)
                (loss / len(microbatches)).backward()
            losses.append(loss.item())
        return losses

    def _synchronizing(self, last: bool) -> contextlib.AbstractContextManager[Any]:
        if isinstance(self.model, FSDP):
            return contextlib.nullcontext() if last else self.model.no_sync()
        self.model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def _pipelined(self, microbatches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
        assert self._stages is not None
        inputs, targets = (torch.cat(each) for each in zip(*microbatches))
        losses: list[torch.Tensor] = []
        first, last = (self._stages.get_local_rank() == stage for stage in (0, self._stages.size() - 1))
        self._schedule.step(*[inputs] * first, **({"target": targets, "losses": losses} if last else {}))
        return [loss.item() for loss in losses]

    def wanted_loss(self) -> float:
        """The loss that the last :meth:`step` must have returned, if it returned one."""
        count = self.microbatches
        losses = unsharded(self.features.dtype, self.features.frozen_part, self.parts)[-1]
        return math.fsum(losses[self.layout.batch_index * count :][:count]) / count


def _entry(layout: str) -> subtest:
    """A layout for ``parametrize``, with the torch fact that it needs."""
    needed = [needs(fact) for name, fact in NEEDS.items() if name == layout]
    return subtest(layout, name=re.sub(r"\W+", "_", layout).lower(), decorators=needed)


class TestTrainingMatrix(FSDPTest):
    world_size = 4

    @parametrize("saved", [_entry(layout) for layout in TRAINED if layout != FSDP1_AND_PP])
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_saved_by(self, saved):
        """Each layout and each feature is combined with each other one."""
        cases = [case for case in pairwise_cases(AXES, _is_valid) if case["saved"] == saved]
        self.assertTrue(cases)
        for case in one_by_one(cases):
            run_subtests(self, case, self._check_goes_on)

    # The limits. If one is a defect of PyTorch, its test is expected to fail.

    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_fsdp1_under_tp_loads_moments(self):
        self._check_goes_on("FSDP1 on 4", FSDP1_AND_TP, torch_defect("fsdp1_optim_state_is_loaded_wrong_with_tp"))

    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_fsdp1_under_tp_loads_checkpointed_layers(self):
        """They cannot be loaded: the layouts of DTensors are looked up with the prefix of the checkpoint wrapper."""
        with self.assertRaisesRegex(RuntimeError, "size mismatch"):
            self._check_goes_on("FSDP1 on 4", FSDP1_AND_TP, activation_checkpointing=True)

    @skip_if_lt_x_gpu(4)
    def test_fsdp1_under_tp_accumulates(self):
        """It raises, because it sets the ``data`` of the unsharded gradient, a plain tensor, to a DTensor."""
        with self.assertRaisesRegex(RuntimeError, "invalid python storage|mixed torch.Tensor and DTensor"):
            Training(LAYOUTS[FSDP1_AND_TP], Features(accumulation=True)).step(0)

    @skip_if_lt_x_gpu(4)
    def test_fsdp1_under_tp_keeps_frozen_parameters(self):
        with torch_defect("fsdp1_frozen_parameters_are_trained_with_tp"):
            self._check_steps(Training(LAYOUTS[FSDP1_AND_TP], Features(frozen_part=True)), BEFORE, "in one run")

    @skip_if_lt_x_gpu(4)
    def test_fsdp1_in_a_pipeline(self):
        """FSDP1 raises if all microbatches run forward before the first backward.

        After the first backward, FSDP1 frees the unsharded parameters, and does not unshard them for the next one.
        """
        one_stage = LAYOUTS[FSDP1_AND_PP]._replace(shape=(4, 1))
        run = Training(one_stage, Features(accumulation=True))
        with self.assertRaisesRegex(RuntimeError, "Failed to run stage backward") as raised:
            run.step(0)
        self.assertRegex(str(raised.exception.__cause__), "storage of size 0")

    def _check_goes_on(self, saved: str, loaded: str, shows: torch_defect = NO_DEFECT, **features: bool) -> None:
        """Train, save, load in the other layout and train more. ``shows`` is a known defect of loading."""
        run = Training(LAYOUTS[saved], Features(**features))
        self._check_steps(run, BEFORE, f"before it is saved by {saved}")
        path = os.path.join(self.temp_dir, f"{saved} to {loaded}")
        run.save(path)
        run = Training(LAYOUTS[loaded], Features(**features), before=run)
        run.rehearse()
        with shows:
            run.load(path)
            self._check_steps(run, AFTER, f"after it was loaded by {loaded}")

    def _check_steps(self, run: Training, steps: Iterable[int], when: str) -> None:
        """Each rank must have the loss of the unsharded run at each of these steps."""
        for step in steps:
            for layer in run.layers:
                layer.ran.clear()
            with collectives.recorded("reduce_scatter", "all_reduce") as calls:
                loss = run.step(step)
            for rank, (actual, expected) in enumerate(of_all_ranks((loss, run.wanted_loss()))):
                if actual is not None and not math.isclose(actual, expected, rel_tol=TOLERANCES[run.features.dtype]):
                    off = f"{actual - expected:+.2g} ({(actual - expected) / expected:+.1%})"
                    self.fail(
                        f"step {step}, {when}: rank {rank} has loss {actual:.7g}, unsharded {expected:.7g}, {off}"
                    )
        self._check_layers(run, calls)

    def _check_layers(self, run: Training, calls: collectives.Calls) -> None:
        """In the last step, which made these ``calls``, each layer must compute and be reduced as often as expected."""
        features = run.features
        times = run.microbatches * (2 if features.activation_checkpointing else 1)
        self.assertEqual([layer.ran for layer in run.layers], [[features.dtype] * times] * len(run.layers), "computed")
        trained = sum(any(param.requires_grad for param in layer.parameters()) for layer in run.layers)
        reductions = {"shard": "reduce_scatter", "replicate": "all_reduce"}
        expected = {reductions[name]: trained for name in run.layout.dims if name in reductions}
        self.assertEqual(calls.counts(), expected, "reductions")


def _is_valid(saved: str, loaded: str, **features: bool) -> bool:
    """Whether the case continues in another layout, and is within the limits."""
    return saved != loaded and not any(limit.applies(saved, loaded, Features(**features)) for limit in LIMITS.values())


instantiate_parametrized_tests(TestTrainingMatrix)

if __name__ == "__main__":
    run_tests()
