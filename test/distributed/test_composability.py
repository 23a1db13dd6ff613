"""Pipelines with stages of FSDP2: when each stage all-gathers its parameters and reduces its gradients.

While a schedule runs, FSDP2 does not end the backward of a microbatch by itself. The schedule unshards a stage before
it computes, and reduces its gradients after the last microbatch. The reference is the plain model in one piece. Its
gradients of the same microbatches are averaged over the ranks with different data.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import Calls, recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.pipelines import (
    BLOCKS,
    DIM,
    LOOPED,
    MICROBATCHES,
    SCHEDULES,
    SINGLE,
    V_SHAPED,
    Batch,
    Block,
    Pipeline,
    PipelineMixin,
    loss_fn,
    microbatched,
    microbatched_in_bfloat16,
    shard_stage,
)
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.training import FEW, Loop, check_gradients
from torch_fsdp_tests.installed_torch import torch_facts

BF16 = torch.bfloat16
GROUPS = 4  # parameter groups on each of two ranks that share the pipeline
POLICIES = {
    "FSDP": MixedPrecisionPolicy(),
    "FSDP_MP": MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32),
}
FORWARDS, BACKWARDS = ([f"0{kind}{index}" for index in range(MICROBATCHES)] for kind in "FB")
# The number of parameters without a gradient, by reason.
NO_GRADIENT = {"unused": 1, "layer": 2, "stage": 4}
# The methods of a stage that a schedule calls to compute.
COMPUTE = ["forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"]
# The plain model's step for each policy.
REFERENCES: dict[str, Callable[..., torch.Tensor]] = {"FSDP": microbatched, "FSDP_MP": microbatched_in_bfloat16}


def reduction() -> list[str]:
    """The actions that end the backward of a rank's only stage."""
    return ["0REDUCE_GRAD", *(["0WAIT_REDUCE_GRAD"] if torch_facts.WAITS_FOR_GRADIENTS_BY_ACTION else [])]


def first_mode() -> list[str]:
    """What a pipeline may do before its training is compared: a training step, or ``schedule.eval``."""
    return ["training", *(["evaluation"] if torch_facts.PIPELINES_TRAIN_AFTER_EVAL else [])]


def is_sharded(module: nn.Module) -> bool:
    """Whether all parameters are sharded. Either all or none must be."""
    (answer,) = {isinstance(param, DTensor) for param in module.parameters()}
    return answer


class BlockWithSpare(Block):
    """A block with a parameter that no forward uses."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        self.spare = nn.Parameter(torch.ones(DIM))


@needs(torch_facts.PIPELINE_START_MESSAGES_MATCH)
class ComposabilityTest(PipelineMixin, FSDPTest):
    world_size = 4

    def _pipeline(
        self, schedule: str, plain: nn.Sequential, mesh: DeviceMesh, dp_type: str = "FSDP", **kwargs: Any
    ) -> Pipeline:
        """A pipeline of fully sharded stages. From here on, random data is that of this rank's pipeline."""
        wrap = functools.partial(shard_stage, mesh=mesh["data"], mp_policy=POLICIES[dp_type])
        boundary_dtype = BF16 if dp_type == "FSDP_MP" else torch.float32
        self._seed(mesh.get_local_rank("data"))
        return Pipeline(schedule, plain, mesh.get_group("pipeline"), wrap, boundary_dtype, **kwargs)

    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
        valid=lambda dp_type, schedule: (dp_type, schedule) != ("FSDP_MP", "ScheduleDualPipeV"),
        dp_type=["FSDP", "FSDP_MP"],
        schedule=SCHEDULES,
    )
    def test_pp_fsdp(self, dp_type, schedule):
        """The gradients are complete, and may be changed, as soon as a step returns."""
        self._check_one_step(dp_type, schedule)

    @needs(torch_facts.PIPELINES_SEND_NOTHING_TO_THEMSELVES)
    @skip_if_lt_x_gpu(4)
    def test_split_backward_in_low_precision(self):
        """The split backward also adds up gradients of parameters in float32, even several in a row.

        With the defect they are added in bfloat16, the dtype in which autograd computes them.
        """
        with torch_defect("pipeline_split_backward_adds_up_in_low_precision"):
            self._check_one_step("FSDP_MP", "ScheduleDualPipeV")

    def _check_one_step(self, dp_type: str, schedule: str) -> None:
        mesh, plain = self._pipelines_and_data(), self._plain()
        pipeline = self._pipeline(schedule, plain, mesh, dp_type)
        batch = self._batch()
        losses = pipeline.step(batch)
        for param in pipeline.modules.parameters():
            param.grad.div_(2)
            param.grad.mul_(2)
        self.assertEqual(losses, REFERENCES[dp_type](plain, batch))
        average_gradients(plain, mesh.get_group("data"))
        pipeline.check(self, check_gradients)

    @needs(torch_facts.REDUCES_GRADIENTS_BY_ACTION)
    @skip_if_lt_x_gpu(4)
    @subtests(schedule=SCHEDULES)
    def test_collectives(self, schedule):
        """Each group is gathered and reduced once per step, for any number of microbatches.

        If a rank has several stages, the computation of a microbatch calls no collective. A single stage is gathered by
        its first forward.
        """
        mesh = self._pipelines_and_data()
        pipeline = self._pipeline(schedule, self._plain(), mesh)
        for _ in range(2):
            with recorded("all_gather", "reduce_scatter") as calls:
                computing = self._calls_of_computations(pipeline, calls)
                pipeline.step(self._batch())
            self.assertEqual(calls.counts(), Counter(all_gather=GROUPS, reduce_scatter=GROUPS))
            gathers, *others = computing
            self.assertEqual(gathers.counts(), Counter(all_gather=GROUPS) if schedule in SINGLE else {}, may_be="empty")
            self.assertEqual([call for each in others for call in each], [], may_be="empty")

    def _calls_of_computations(self, pipeline: Pipeline, calls: Calls) -> list[Calls]:
        """Return a list. Each computation of a stage adds to it the ``calls`` that it makes."""
        found: list[Calls] = []
        for name in COMPUTE:
            self._intercept(pipeline, name, lambda: len(calls), lambda before: found.append(Calls(calls[before:])))
        return found

    def _intercept(
        self, pipeline: Pipeline, name: str, before: Callable[[], Any], after: Callable[[Any], Any] = lambda value: None
    ) -> None:
        """Make the stages call ``before`` before their method of this name, and ``after`` with its result."""

        def run(original: Any, *args: Any, **kwargs: Any) -> Any:
            value = before()
            result = original(*args, **kwargs)
            after(value)
            return result

        for stage in pipeline.stages:
            setattr(stage, name, functools.partial(run, getattr(type(stage), name).__get__(stage)))

    @needs(torch_facts.REDUCES_GRADIENTS_BY_ACTION)
    @skip_if_lt_x_gpu(4)
    @subtests(dp_type=["FSDP", "FSDP_MP"])
    def test_pp_fsdp_unshard_reshard_runtime(self, dp_type):
        """The actions of a schedule unshard and reshard a stage, or reduce its gradients, which also reshards it."""
        plain = self._plain()
        pipeline = self._pipeline_of_one(plain, dp_type)
        module, seen = pipeline.modules[0], []
        module[0].net1.register_forward_hook(lambda net1, *args: seen.append(is_sharded(net1)))
        batch = self._batch()
        self.assertTrue(is_sharded(module))
        with recorded() as calls:
            output = self._act(pipeline, ["0UNSHARD", *FORWARDS, "0RESHARD"], batch, loss_fn=None)
        self.assertEqual(calls.counts(), {"all_gather": 2 * GROUPS})
        self.assertEqual(seen, [False] * MICROBATCHES)
        self.assertTrue(is_sharded(module))
        self.assertEqual(output, copy.deepcopy(plain).to(output.dtype)(batch[0].to(output.dtype)))

        seen.clear()
        with recorded() as calls:
            self._act(pipeline, ["0UNSHARD", *FORWARDS, *BACKWARDS, *reduction()], batch)
        self.assertEqual(calls.counts(), {"all_gather": 2 * GROUPS, "reduce_scatter": 2 * GROUPS})
        self.assertEqual(seen, [False] * MICROBATCHES)
        self.assertTrue(is_sharded(module))
        REFERENCES[dp_type](plain, batch)
        average_gradients(plain)
        check_gradients(self, plain, module)

    @needs(torch_facts.REDUCES_GRADIENTS_BY_ACTION)
    @skip_if_lt_x_gpu(4)
    def test_runtime_gathers_again(self):
        """A stage may be resharded and unsharded again between forwards and before backward."""
        plain = self._plain()
        pipeline, batch = self._pipeline_of_one(plain), self._batch()
        first, second = FORWARDS[:2], FORWARDS[2:]
        actions = ["0UNSHARD", *first, "0RESHARD", "0UNSHARD", *second, "0RESHARD", "0UNSHARD", *BACKWARDS]
        with recorded() as calls:
            self._act(pipeline, [*actions, *reduction()], batch)
        self.assertEqual(calls.counts(), {"all_gather": 3 * 2 * GROUPS, "reduce_scatter": 2 * GROUPS})
        microbatched(plain, batch)
        average_gradients(plain)
        check_gradients(self, plain, pipeline.modules[0])

    @skip_if_lt_x_gpu(4)
    @subtests(
        actions_and_message=[
            (["0F0"], "Attempted to compute on sharded stage_idx=0"),
            (["0UNSHARD", "0F0", "0RESHARD", "0F1"], "Attempted to compute on sharded stage_idx=0"),
            (["0UNSHARD", "0F0", "0UNSHARD"], "(Unsharding the same|Already unsharded) stage_idx=0"),
            (["0UNSHARD", "0UNSHARD"], "Unsharding (the same|already in progress for) stage_idx=0"),
            (["0RESHARD"], "Resharding stage_idx=0 without unsharding"),
            (["0UNSHARD"], "Unused unshard operations"),
        ]
    )
    def test_runtime_refuses(self, actions_and_message):
        """All ranks reject actions that do not fit together."""
        actions, message = actions_and_message
        pipeline = self._pipeline_of_one(self._plain())
        with self.assertRaisesRegex(AssertionError, message):
            self._act(pipeline, actions, self._batch())

    def _pipeline_of_one(self, plain: nn.Sequential, dp_type: str = "FSDP") -> Pipeline:
        """A pipeline whose only stage is the whole model, sharded over all ranks, each with its own data."""
        return self._pipeline("ScheduleGPipe", plain, self._mesh(4, 1, names=("data", "pipeline")), dp_type)

    def _act(self, pipeline: Pipeline, actions: list[str], batch: Batch, loss_fn: Any = loss_fn) -> torch.Tensor:
        """Run these actions on the only stage of a pipeline. Returns its output."""
        schedule = internals.scheduled(pipeline.stages, actions, MICROBATCHES, loss_fn=loss_fn)
        return schedule.step(batch[0], target=batch[1])

    @skip_if_lt_x_gpu(4)
    @subtests(pairwise=True, schedule=SCHEDULES, which=["unused", "layer", "stage"])
    def test_unused_or_frozen(self, schedule, which):
        """An unused parameter, a frozen layer, and a frozen stage have no gradient."""
        torch.manual_seed(42)
        make = {1: BlockWithSpare} if which == "unused" else {}
        plain = nn.Sequential(*(make.get(index, Block)(hidden=5) for index in range(BLOCKS))).to(self.device)
        frozen = {"unused": [], "layer": [plain[1].net2], "stage": [plain[2]]}[which]
        for module in frozen:
            module.requires_grad_(False)
        mesh = self._pipelines_and_data()
        self._check_trains(plain, self._pipeline(schedule, plain, mesh), mesh.get_group("data"), Loop(iterations=FEW))
        self.assertEqual(sum(param.grad is None for param in plain.parameters()), NO_GRADIENT[which])

    @skip_if_lt_x_gpu(4)
    @subtests(pairwise=True, schedule=SCHEDULES, scale_grads=[False, True])
    def test_scale_grads(self, schedule, scale_grads):
        """Gradients are divided by the number of microbatches once, and by the number of ranks."""
        self._check_steps(1, schedule, scale_grads)

    @skip_if_lt_x_gpu(4)
    @subtests(schedule=SCHEDULES, scale_grads=[False, True])
    def test_accumulation(self, schedule, scale_grads):
        """The gradients of two steps add up. With the defect those of the first are divided twice."""
        with torch_defect("pipeline_accumulated_gradients_are_scaled_again", when=scale_grads):
            self._check_steps(2, schedule, scale_grads)

    @skip_if_lt_x_gpu(4)
    @subtests(pairwise=True, schedule=[*SINGLE, *LOOPED], first=first_mode)
    def test_evaluation(self, schedule, first):
        """``schedule.eval`` has the plain model's output, reduces nothing, and does not disturb training.

        A V-shaped schedule cannot evaluate any stages, because it requests the gradients of activations.
        """
        mesh, plain = self._pipelines_and_data(), self._plain()
        pipeline, batch = self._pipeline(schedule, plain, mesh), self._batch()
        if first == "training":
            pipeline.step(batch)
            pipeline.modules.zero_grad()
        with recorded("reduce_scatter") as calls:
            output = pipeline.eval(batch)
        self.assertEqual(calls, [], may_be="empty")
        if output is not None:  # on the rank of the last stage
            self.assertEqual(output, plain(batch[0]))
        # Without a backward, a stage may stay unsharded, but an optimizer needs sharded parameters.
        for module in internals.fsdp_modules(pipeline.modules):
            module.reshard()
        self._check_trains(plain, pipeline, mesh.get_group("data"), Loop(iterations=FEW))

    @skip_if_lt_x_gpu(4)
    @subtests(schedule=["Schedule1F1B", "ScheduleInterleaved1F1B"])
    def test_evaluation_keeps_gradients(self, schedule):
        """The gradients of two steps also add up with ``schedule.eval`` between them.

        With the defect ``schedule.eval`` sets them to None.
        """
        with torch_defect("pipeline_evaluation_clears_gradients"):
            self._check_steps(2, schedule, between=lambda pipeline, batch: pipeline.eval(batch))

    def _check_steps(
        self,
        count: int,
        schedule: str,
        scale_grads: bool = False,
        between: Callable[[Pipeline, Batch], object] = lambda pipeline, batch: None,
    ) -> None:
        mesh, plain = self._pipelines_and_data(), self._plain()
        pipeline = self._pipeline(schedule, plain, mesh, scale_grads=scale_grads)
        for index in range(count):
            batch = self._batch()
            pipeline.step(batch)
            microbatched(plain, batch)
            if index < count - 1:
                between(pipeline, batch)
        average_gradients(plain, mesh.get_group("data"))
        for param in plain.parameters():
            param.grad.mul_(1 if scale_grads else MICROBATCHES)
        pipeline.check(self, check_gradients)

    @needs(torch_facts.WAITS_FOR_GRADIENTS_BY_ACTION)
    @skip_if_lt_x_gpu(4)
    @subtests(pairwise=True, schedule=[*LOOPED, *V_SHAPED], defer_reduce_grad_wait=[False, True])
    def test_deferred_wait(self, schedule, defer_reduce_grad_wait):
        """If a rank may defer the wait, it computes between the start and the end of a stage's reduction.

        At most one reduction is pending.
        """
        mesh, plain = self._pipelines_and_data(), self._plain()
        pipeline = self._pipeline(schedule, plain, mesh, defer_reduce_grad_wait=defer_reduce_grad_wait)
        events: list[str] = []
        reducing = {"start_gradient_reduction": "start", "wait_for_gradient_reduction": "wait"}
        for name, event in {**dict.fromkeys(COMPUTE, "compute"), **reducing}.items():
            self._intercept(pipeline, name, functools.partial(events.append, event))
        self._check_trains(plain, pipeline, mesh.get_group("data"), Loop(iterations=FEW))
        reductions = [event for event in events if event != "compute"]
        self.assertEqual(reductions, ["start", "wait"] * 2 * FEW)
        is_deferred = "start compute" in " ".join(events)
        self.assertEqual(is_deferred, defer_reduce_grad_wait)


if __name__ == "__main__":
    run_tests()
