"""Helpers for tests of pipeline schedules: a model that is split into stages, and the comparison with a plain model."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh

from torch_fsdp_tests.common_distributed.requirements import skip_unless
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.training import Loop, TrainingMixin, check_parity, shard_each
from torch_fsdp_tests.installed_torch import torch_facts

SINGLE = ["ScheduleGPipe", "Schedule1F1B"]  # one stage per rank; the others have two by default
LOOPED = ["ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble"]
V_SHAPED = ["ScheduleZBVZeroBubble", "ScheduleDualPipeV"]
SCHEDULES = [*SINGLE, *LOOPED, *V_SHAPED]
# These compute the gradients of inputs and of parameters separately.
SPLIT_BACKWARD = ["ScheduleInterleavedZeroBubble", *V_SHAPED]

DIM = 4
BLOCKS = 4
MICROBATCHES = 4  # the number that DualPipeV needs on two ranks
ROWS = 2  # rows of a microbatch

Batch = tuple[torch.Tensor, torch.Tensor]  # the inputs and the targets of all microbatches


class Block(nn.Module):
    """Two layers with a residual connection, so that gradients of the first block do not vanish."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(DIM, hidden), nn.Linear(hidden, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net2(self.net1(x).tanh())


class Conditioned(nn.Sequential):
    """Blocks, each of whose outputs is scaled by a keyword argument that all stages get."""

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        for block in self:
            x = block(x) * scale
        return x


class Carrying(nn.Sequential):
    """Blocks, each of which passes on its input beside its output. So stages get a tensor that they do not use."""

    def forward(self, x: torch.Tensor, carried: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        for block in self:
            x, carried = block(x), x
        return x, carried


class Counting(nn.Sequential):
    """Blocks that pass on, before their output, the number of blocks so far: integers, which have no gradient."""

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        count, x = inputs if len(inputs) == 2 else (torch.zeros_like(inputs[0], dtype=torch.long), *inputs)
        for block in self:
            count, x = count + 1, block(x)
        return count, x


def blocks(hidden: int = 5) -> nn.Sequential:
    """The model that is split into stages. If ``hidden`` is odd, two ranks have uneven shards."""
    return nn.Sequential(*(Block(hidden) for _ in range(BLOCKS)))


def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
    """The loss of an output, or of the first of several that is not an integer."""
    first = next(each for each in output if each.is_floating_point()) if isinstance(output, tuple) else output
    return (first - target).square().mean(dtype=torch.float32)


def microbatched(model: nn.Module, batch: Batch, **kwargs: torch.Tensor) -> torch.Tensor:
    """Run all microbatches through a model without stages. Returns the detached losses.

    The gradients are accumulated, divided by the number of microbatches as schedules do by default. ``kwargs`` of the
    model have a row for each row of the batch.
    """
    losses = []
    for inp, target, *others in zip(*(each.split(ROWS) for each in (*batch, *kwargs.values())), strict=True):
        loss = loss_fn(model(inp, **dict(zip(kwargs, others, strict=True))), target)
        (loss * ROWS / len(batch[0])).backward()
        losses.append(loss.detach())
    return torch.stack(losses)


def microbatched_in_bfloat16(plain: nn.Module, batch: Batch) -> torch.Tensor:
    """Like ``microbatched``, but computed in bfloat16. The gradients are accumulated in float32."""
    losses = []
    for inp, target in zip(*(each.chunk(MICROBATCHES) for each in batch), strict=True):
        low = copy.deepcopy(plain).to(torch.bfloat16)
        low.zero_grad()
        loss = loss_fn(low(inp.to(torch.bfloat16)), target)
        (loss / MICROBATCHES).backward()
        for param, computed in zip(plain.parameters(), low.parameters(), strict=True):
            if computed.grad is not None:
                param.grad = computed.grad.float() if param.grad is None else param.grad + computed.grad
        losses.append(loss.detach())
    return torch.stack(losses)


def units_of(stage: Any) -> list[Any]:
    """The modules of a stage to wrap: the first layer of each block, each block, and the stage, which has no parameters
    of its own.
    """
    return [*(module for block in stage for module in (block.net1, block)), stage]


def shard_stage(stage: Any, **kwargs: Any) -> Any:
    """Apply ``fully_shard`` to ``units_of`` a stage: two parameter groups per block. Returns the stage.

    The groups stay unsharded after forward, as a split backward requires.
    """
    return shard_each(units_of(stage), **{"reshard_after_forward": False, **kwargs})


def indices_of(schedule: str, rank: int, size: int, per_rank: int = 2) -> list[int]:
    """The indices of the stages of a rank, of which schedules in loops have any number."""
    if schedule in SINGLE:
        return [rank]
    return [rank, 2 * size - 1 - rank] if schedule in V_SHAPED else [rank + size * index for index in range(per_rank)]


class Pipeline:
    """A plain model that is split into stages on the ranks of a group, under one of the ``SCHEDULES``.

    ``wrap`` parallelizes a copy of each stage and returns it. ``boundary_dtype`` is the dtype of all inputs and outputs
    of stages except the pipeline's input. With None the stages infer dtypes and shapes. ``passed`` is the number of
    tensors of each output. ``per_rank`` is the number of stages of a rank in one of the ``LOOPED`` schedules. Other
    arguments go to the schedule. The test is skipped if the installed PyTorch cannot run the schedule with any backend.
    """

    def __init__(
        self,
        schedule: str,
        plain: nn.Sequential,
        group: dist.ProcessGroup,
        wrap: Callable[[Any], Any],
        boundary_dtype: torch.dtype | None = torch.float32,
        passed: int = 1,
        per_rank: int = 2,
        microbatches: int = MICROBATCHES,
        **kwargs: Any,
    ) -> None:
        if schedule in V_SHAPED:
            skip_unless([torch_facts.PIPELINES_SEND_NOTHING_TO_THEMSELVES.lacks])
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        self.group = group
        self.indices = indices_of(schedule, rank, size, per_rank)
        self.num_stages = size * len(self.indices)
        length = len(plain) // self.num_stages
        self.parts = [plain[index * length : (index + 1) * length] for index in self.indices]
        self.modules = nn.ModuleList(wrap(copy.deepcopy(part)) for part in self.parts)
        device = next(plain.parameters()).device
        self.stages = [
            pipelining.PipelineStage(
                module, index, self.num_stages, device, group=group, **_shapes(index, device, boundary_dtype, passed)
            )
            for index, module in zip(self.indices, self.modules, strict=True)
        ]
        arguments = {"loss_fn": loss_fn, **kwargs}
        stages: Any = self.stages[0] if schedule in SINGLE else self.stages
        self.schedule = getattr(pipelining, schedule)(stages, microbatches, **arguments)
        self._rank_of_last = size - 1 if schedule not in V_SHAPED else 0

    def step(self, batch: Batch, **kwargs: Any) -> torch.Tensor:
        """Run one step of the schedule, with ``kwargs``. Returns the losses of the microbatches on all ranks."""
        targets = self._targets(batch)
        self.schedule.step(*self._inputs(batch), **targets, **kwargs)
        known = torch.stack(targets["losses"]).detach() if targets else batch[0].new_empty(MICROBATCHES)
        dist.broadcast(known, dist.get_global_rank(self.group, self._rank_of_last), self.group)
        return known

    def eval(self, batch: Batch, **kwargs: Any) -> torch.Tensor | None:
        """Run the schedule without backward, with ``kwargs``. Returns the output on the rank of the last stage."""
        return self.schedule.eval(*self._inputs(batch), **self._targets(batch), **kwargs)

    def _inputs(self, batch: Batch) -> list[torch.Tensor]:
        return [batch[0]] if 0 in self.indices else []

    def _targets(self, batch: Batch) -> dict[str, Any]:
        return {"target": batch[1], "losses": []} if self.num_stages - 1 in self.indices else {}

    def check(self, test: Any, compare: Callable[..., None] = check_parity, **kwargs: Any) -> None:
        """Compare each stage with its part of the plain model."""
        for part, module in zip(self.parts, self.modules, strict=True):
            compare(test, part, module, **kwargs)


def _shapes(index: int, device: torch.device, dtype: torch.dtype | None, passed: int) -> dict[str, Any]:
    """The arguments of a stage that give shapes and dtypes of its input and output. Empty if ``dtype`` is None."""
    if dtype is None:
        return {}
    empty = functools.partial(torch.empty, ROWS, DIM, device=device)
    outputs = tuple(empty(dtype=dtype, requires_grad=True) for _ in range(passed))
    return {"input_args": outputs if index else empty(dtype=torch.float32), "output_args": outputs}


class PipelineMixin(TrainingMixin):
    """A mixin for test cases with pipelines. Batches differ by rank only along the mesh dimension "data"."""

    def _plain(self, **kwargs: Any) -> nn.Sequential:
        """A plain model that is the same on all ranks."""
        torch.manual_seed(42)
        return blocks(**kwargs).to(self.device)

    def _pipelines_and_data(self) -> DeviceMesh:
        """Two pipelines of two ranks."""
        return self._mesh(2, 2, names=("data", "pipeline"))

    def _batch(self, microbatches: int = MICROBATCHES) -> Batch:
        inp, target = (self._inputs(microbatches * ROWS, DIM) for _ in range(2))
        return inp, target

    def _check_trains(
        self,
        plain: nn.Sequential,
        pipeline: Pipeline,
        data_group: dist.ProcessGroup,
        loop: Loop | None = None,
        optims: Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """The pipeline must train like the plain model, whose gradients are averaged over ``data_group``.

        ``loop`` says how the parts of the models are compared, and how often they are trained.
        """

        def step(each: nn.Module, batch: Batch) -> torch.Tensor:
            return pipeline.step(batch) if each is pipeline.modules else microbatched(each, batch)

        loop = loop or Loop()
        compare = loop.compare or check_parity
        loop = dataclasses.replace(
            loop,
            step=step,
            average=functools.partial(average_gradients, group=data_group),
            compare=lambda test, *models: pipeline.check(test, compare),
            data_rank=dist.get_rank(data_group),
        )
        self._check_training(plain, pipeline.modules, self._batch, loop, optims)
