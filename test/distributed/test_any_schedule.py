"""Any pipeline schedule, with any number of stages on a rank and anything in them, against the plain model."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.pipelines import (
    LOOPED,
    MICROBATCHES,
    SCHEDULES,
    SINGLE,
    SPLIT_BACKWARD,
    V_SHAPED,
    Batch,
    Block,
    Carrying,
    Conditioned,
    Counting,
    Pipeline,
    PipelineMixin,
    microbatched,
    units_of,
)
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.shards import local_of, shard_of
from torch_fsdp_tests.fsdp.training import replicate_each, shard_each
from torch_fsdp_tests.installed_torch import torch_facts

RATE = 0.1  # the learning rate

# What is in the stages. A split backward needs parameters that stay unsharded after forward.
WRAPS = {
    "nothing": lambda stage, **kwargs: stage,
    "FSDP2": lambda stage, **kwargs: shard_each(units_of(stage), reshard_after_forward=False, **kwargs),
    "FSDP2 without nested units": lambda stage, **kwargs: shard_each([stage], reshard_after_forward=False, **kwargs),
    "FSDP2 that reshards": lambda stage, **kwargs: shard_each(units_of(stage), **kwargs),
    "replicate": lambda stage, **kwargs: replicate_each(units_of(stage), **kwargs),
}
# The models that are split into stages.
KINDS = {
    "plain": nn.Sequential,
    "with a keyword": Conditioned,
    "with an unused input": Carrying,
    "with integers": Counting,
}
# For the first and the second step: whether losses and outputs are requested.
REQUESTS = {
    "all": [(True, True), (True, True)],
    "losses of the first": [(True, False), (False, True)],
    "losses of the second": [(False, True), (True, True)],
    "only outputs": [(False, True), (False, True)],
}


def is_valid(
    schedule: str,
    per_rank: int,
    wrap: str,
    ranks: str,
    requests: str,
    between: str,
    microbatches: int,
    has_shapes: bool,
    kind: str,
) -> bool:
    """Whether torch supports the combination. The known defects are tested elsewhere.

    ``pipeline_split_backward_loses_gradients``: a split backward with units that reshard.
    """
    has_neighbors = ranks == "of data" and (per_rank > 1 or schedule in V_SHAPED)
    return all(
        (
            per_rank == 2 if schedule in V_SHAPED else schedule in LOOPED or per_rank == 1,
            not (has_shapes and kind == "with integers"),  # the shapes are those of floating-point numbers
            microbatches >= MICROBATCHES or schedule not in ("Schedule1F1B", "ScheduleDualPipeV"),
            not (wrap == "FSDP2 that reshards" and schedule in SPLIT_BACKWARD),
            # FSDP2 makes a view of an input that the only unit returns, and a split backward cannot detach views.
            not (
                kind == "with an unused input" and schedule in SPLIT_BACKWARD and wrap == "FSDP2 without nested units"
            ),
            # In eval, a stage that passes activations to one on the same rank still asks for their gradients.
            not (between == "eval" and (has_neighbors or schedule in V_SHAPED)),
            wrap != "replicate" or torch_facts.REPLICATES_WITHOUT_SHARDS,
            not has_neighbors or torch_facts.PIPELINES_SEND_NOTHING_TO_THEMSELVES,
            between != "eval" or torch_facts.PIPELINES_TRAIN_AFTER_EVAL,
            requests != "losses of the first" or torch_facts.CAN_LEAVE_OUT_PIPELINE_OUTPUTS,
        )
    )


def _fail(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    raise RuntimeError("broken")


@needs(torch_facts.PIPELINE_START_MESSAGES_MATCH)
class TestAnySchedule(PipelineMixin, FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        among=800,
        valid=is_valid,
        schedule=SCHEDULES,
        per_rank=[1, 2, 3, 4, 5],
        wrap=list(WRAPS),
        ranks=["of data", "of the pipeline"],
        requests=list(REQUESTS),
        between=["update", "accumulate", "eval"],
        microbatches=[MICROBATCHES, 6, 3, 1],
        has_shapes=[True, False],
        kind=list(KINDS),
    )
    def test_two_steps(self, schedule, per_rank, wrap, ranks, requests, between, microbatches, has_shapes, kind):
        """Outputs, losses, gradients and parameters of two steps equal those of the plain model.

        Between the steps, parameters are updated, gradients are kept, or the pipeline runs forward alone. The two ranks
        have different data and all stages, or they share a pipeline. All stages may get a keyword argument, or a second
        tensor from the stage before, which they do not use.
        """
        is_data = ranks == "of data"
        mesh = self._mesh(*((2, 1) if is_data else (1, 2)), names=("data", "pipeline"))
        torch.manual_seed(42)
        size = per_rank * (1 if is_data else 2)
        plain = KINDS[kind](*(Block(hidden=3) for _ in range(size))).to(self.device)
        pipeline = Pipeline(
            schedule,
            plain,
            mesh.get_group("pipeline"),
            functools.partial(WRAPS[wrap], mesh=mesh["data"]),
            torch.float32 if has_shapes else None,
            passed=2 if kind == "with an unused input" else 1,
            per_rank=per_rank,
            microbatches=microbatches,
            scale_grads=between != "accumulate",  # see the defect pipeline_accumulated_gradients_are_scaled_again
        )
        self._seed(self.rank if is_data else 0)
        averaged = mesh.get_group("data") if wrap != "nothing" else None
        losses = [torch.zeros(())]  # a list with the loss of another step
        for number, (with_losses, with_outputs) in enumerate(REQUESTS[requests]):
            batch = self._batch(microbatches)
            keywords = {"scale": 1 + batch[1][:, :1].tanh() / 10} if kind == "with a keyword" else {}
            asked: dict[str, Any] = {"losses": losses} if with_losses else {}
            asked |= {} if with_outputs else {"return_outputs": False}
            self._check_step(pipeline, plain, batch, keywords, asked)
            if number == 0 and between == "accumulate":
                continue
            if averaged is not None:
                average_gradients(plain, averaged)
            if between == "accumulate":
                for param in plain.parameters():
                    param.grad.mul_(microbatches)
            self._check_parts(pipeline)
            self._update(plain, pipeline.modules)
            if between == "eval":
                with torch.no_grad():
                    expected = plain(batch[0], **keywords)
                output = pipeline.eval(batch, **keywords)
                self.assertEqual(output, expected if self._has_last(pipeline) else None)
                self.assertEqual({param.grad for param in pipeline.modules.parameters()}, {None})

    @skip_if_lt_x_gpu(2)
    @subtests(schedule=SINGLE, has_shapes=[True, False])
    def test_step_after_failed_eval(self, schedule, has_shapes):
        """If a forward in ``eval`` raises, the next step computes gradients as ever."""
        mesh = self._mesh(2, 1, names=("data", "pipeline"))
        plain = nn.Sequential(Block(hidden=3)).to(self.device)
        wrap = functools.partial(WRAPS["FSDP2"], mesh=mesh["data"])
        dtype = torch.float32 if has_shapes else None
        pipeline = Pipeline(schedule, plain, mesh.get_group("pipeline"), wrap, dtype)
        broken = pipeline.modules[0].register_forward_pre_hook(_fail)
        words = "failed to run forward" if has_shapes else "broken"  # the shapes are inferred outside of the schedule
        with self.assertRaisesRegex(RuntimeError, words):
            pipeline.eval(self._batch())
        broken.remove()
        batch = self._batch()
        self._check_step(pipeline, plain, batch, {}, {})
        average_gradients(plain, mesh.get_group("data"))
        self._check_parts(pipeline)

    def _has_last(self, pipeline: Pipeline) -> bool:
        return pipeline.num_stages - 1 in pipeline.indices

    def _check_step(
        self,
        pipeline: Pipeline,
        plain: nn.Module,
        batch: Batch,
        keywords: dict[str, torch.Tensor],
        requests: dict[str, Any],
    ) -> None:
        with torch.no_grad():
            output = plain(batch[0], **keywords)
        expected = microbatched(plain, batch, **keywords)
        is_last = self._has_last(pipeline)
        targets = {"target": batch[1]} if is_last else {}
        found = pipeline.schedule.step(
            *([batch[0]] if 0 in pipeline.indices else []), **targets, **keywords, **requests
        )
        self.assertEqual(found, output if is_last and "return_outputs" not in requests else None)
        if "losses" in requests and is_last:
            self.assertEqual(torch.stack(requests["losses"]).detach(), expected)

    def _check_parts(self, pipeline: Pipeline) -> None:
        """This rank's shards of the parameters and gradients of its stages."""
        actual: dict[str, Any] = {}
        expected: dict[str, Any] = {}
        for index, part, module in zip(pipeline.indices, pipeline.parts, pipeline.modules, strict=True):
            params = dict(module.named_parameters())
            self.assertEqual(list(params), [name for name, _ in part.named_parameters()])
            for name, ref in part.named_parameters():
                for kind, whole, own in (
                    ("", ref.detach(), params[name].detach()),
                    (" grad", ref.grad, params[name].grad),
                ):
                    actual[f"{index}.{name}{kind}"] = local_of(own)
                    expected[f"{index}.{name}{kind}"] = shard_of(whole, own)
        self.assertEqual(actual, expected, may_be="empty")

    def _update(self, *models: nn.Module) -> None:
        with torch.no_grad():
            for param in (param for model in models for param in model.parameters()):
                local_of(param).sub_(RATE * local_of(param.grad))
                param.grad = None


if __name__ == "__main__":
    run_tests()
