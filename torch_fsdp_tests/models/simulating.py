"""Predicts what one rank of any number of ranks holds and sends under FSDP2, in one process and without data.

The process group is torch's fake one, which sends nothing. Tensors are fake too, if the model allows that. The trackers
of torch count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.common_fsdp.device import rank_device
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.shards import local_of
from torch_fsdp_tests.models.configurations import Configuration
from torch_fsdp_tests.models.plain import Model, loss_of, named_units, on_device
from torch_fsdp_tests.models.sharded import sharded
from torch_fsdp_tests.ranks.fake_pg import FakeStore

STEPS = 2  # the first one makes the states of the optimizer


@dataclasses.dataclass
class Usage:
    """What one rank holds and sends in the second step of a training. All sizes are in bytes."""

    rank: int
    world_size: int
    parameters: int  # its shards
    gradients: int
    optimizer: int
    peak: int  # as torch's tracker counts, with activations, batches and gathered parameters
    largest_unit: str
    largest_unit_bytes: int  # unsharded
    padding: int  # of all ranks together, because shards have the same size on all ranks
    collectives: list[tuple[str, str, int]]  # name, dtype, and the number of elements that this rank gives
    sent: int  # what it gives to the collectives
    is_fake: bool
    seconds: float


def usage(case: Model, is_fake: bool = False) -> Usage:
    """Train this rank of the process group that there is, and count. A collective, unless the group is fake."""
    began = time.perf_counter()
    mode: Any = internals.fake_tensors.FakeTensorMode() if is_fake else contextlib.nullcontext()
    with mode:
        training = sharded(case, Configuration("fsdp2"))
        model, optimizer = training.model, training.optimizer
        tracker = internals.fsdp2_memory.FSDPMemTracker(model, optimizer)
        with tracker:
            for _ in range(STEPS):
                batch = on_device(case.batch(dist.get_rank()))
                with recorded() as calls:
                    loss_of(case, model, batch, 0).backward()
                gradients = _bytes(param.grad for param in model.parameters() if param.grad is not None)
                training.update()
                tracker.reset_mod_stats()
        states = [each for state in optimizer.state.values() for each in state.values()]
        unit, largest = _largest_unit(case, model)
        return Usage(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            parameters=_bytes(model.parameters()),
            gradients=gradients,
            optimizer=_bytes(each for each in states if isinstance(each, torch.Tensor)),
            peak=tracker.get_tracker_snapshot("peak")[rank_device()]["Total"],
            largest_unit=unit,
            largest_unit_bytes=largest,
            padding=sum(map(_padding, model.parameters())),
            collectives=[(call.name, str(call.dtype).removeprefix("torch."), call.numel) for call in calls],
            sent=sum(call.nbytes for call in calls),
            is_fake=is_fake,
            seconds=time.perf_counter() - began,
        )


def simulated(case: Model, rank: int, world_size: int) -> Usage:
    """The usage of this rank of so many. This process must have no process group, and ends with a fake one.

    Raises what the model raises with real tensors.
    """
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    if rank:
        warnings.simplefilter("ignore")  # the first rank has shown them
    try:
        return usage(case, is_fake=True)
    except Exception:  # the values of its tensors decide what the model does, or an operator has no fake form
        return usage(case)


def of_ranks(world_size: int, case: Model, apart: Callable[[Callable[[], Usage]], Usage]) -> list[Usage]:
    """The usage of three of so many ranks. ``apart`` calls each in a process of its own."""
    ranks = sorted({0, world_size // 2, world_size - 1})
    return [apart(functools.partial(simulated, case, rank, world_size)) for rank in ranks]


def differ(ranks: Sequence[Usage]) -> bool:
    """Whether these ranks issue other collectives, so that they would hang."""
    return any(each.collectives != ranks[0].collectives for each in ranks)


def report(ranks: Sequence[Usage]) -> list[str]:
    """The lines about these ranks of a world."""
    worst = max(ranks, key=lambda each: each.peak)
    tried = f"ranks {', '.join(str(each.rank) for each in ranks)} of {worst.world_size}"
    kind, seconds = "fake" if worst.is_fake else "real", sum(each.seconds for each in ranks)
    agree = "these ranks do not issue the same ones, and would hang" if differ(ranks) else "these ranks issue the same"
    return [
        f"FSDP2, {tried} were tried ({kind} tensors, {seconds:.1f} s)",
        f"bytes of a rank: parameters {worst.parameters:,}, gradients {worst.gradients:,}, "
        f"optimizer states {worst.optimizer:,}, peak {worst.peak:,}",
        f"largest unit, unsharded: {worst.largest_unit}, {worst.largest_unit_bytes:,} bytes",
        f"padding of all ranks: {worst.padding:,} bytes",
        f"collectives of a step: {len(worst.collectives)}, to which a rank gives {worst.sent:,} bytes; {agree}",
    ]


def _bytes(tensors: Any) -> int:
    return sum(local.numel() * local.element_size() for local in map(local_of, tensors))


def _padding(param: nn.Parameter) -> int:
    """The bytes that the shards of all ranks have more than the parameter, because they have the size of the first."""
    if not isinstance(param, DTensor) or not param.dim():
        return 0
    ranks, rows = param.device_mesh.size(), param.shape[0]
    return (-rows % ranks) * (param.numel() // max(rows, 1)) * param.element_size()


def _largest_unit(case: Model, model: nn.Module) -> tuple[str, int]:
    """The name and the unsharded bytes of the unit with the most. The root has what is in no unit."""
    units = named_units(model, case.units(model))
    inside = {param for unit in units.values() for param in unit.parameters()}
    params = {name: [*unit.parameters()] for name, unit in units.items()}
    params["the root"] = [param for param in model.parameters() if param not in inside]
    sizes = {name: sum(each.numel() * each.element_size() for each in some) for name, some in params.items()}
    name = max(sizes, key=lambda each: sizes[each])
    return name, sizes[name]
