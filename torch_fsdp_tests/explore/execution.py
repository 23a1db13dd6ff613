"""Runs a program on this rank beside its reference, and compares after every step."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_fsdp_tests.explore import layers
from torch_fsdp_tests.explore.coverage import LineCoverage
from torch_fsdp_tests.explore.lifecycle import UNKNOWN, Lifecycle
from torch_fsdp_tests.explore.program import Program
from torch_fsdp_tests.explore.reference import Forward, Invalid, Reference
from torch_fsdp_tests.explore.subject import FSDP2Subject, Subject
from torch_fsdp_tests.explore.wrapped import FSDP1Subject
from torch_fsdp_tests.installed_torch import torch_facts

_coverage = LineCoverage("distributed/fsdp", "distributed/_composable")

COMPARE, TWICE, RECORD = "compare", "twice", "record"  # a program runs once, twice, or once and keeps its numbers
SUBJECTS = {"fsdp1": FSDP1Subject, "fsdp2": FSDP2Subject}
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-8}  # relative errors


Values = dict[str, list[float]]  # the numbers of outputs, parameters and gradients on a rank, by name


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a program on one rank. ``what`` is empty if everything is as expected."""

    what: str = ""  # the kind of difference, without numbers or names of parameters
    step: int = -1  # of the program; -1 while it is sharded
    detail: str = ""
    place: str = ""  # the function of torch in which an exception was raised
    invalid: str = ""  # why a plain model cannot run the program
    digest: str = ""  # of the collectives that ran
    lines: tuple[str, ...] = ()  # of FSDP that ran for the first time in this process
    values: tuple[Values, ...] = ()  # after each step, if they were asked for

    @property
    def is_finding(self) -> bool:
        return bool(self.what)


def run(program: Program, rank: int, device: str, mode: str = COMPARE) -> Outcome:
    """Run the program up to its end, or to the first difference, as a mode says."""
    if mode != TWICE:
        return _run(program, rank, device, keeps=mode == RECORD)
    first, second = (_run(program, rank, device, keeps=True) for _ in range(2))
    for index, pair in enumerate(zip(first.values, second.values)):
        for name, values in pair[0].items():
            if repr(values) != repr(pair[1].get(name)):
                detail = f"{name}: first {values}, then {pair[1].get(name)}"
                return Outcome("not the same twice", index, detail, digest=first.digest)
    return dataclasses.replace(first, values=())


def _run(program: Program, rank: int, device: str, keeps: bool) -> Outcome:
    torch.manual_seed(program.seed)
    index = -1
    values: list[Values] = []
    coverage = _coverage if rank == 0 else contextlib.nullcontext()
    with recorded_collectives() as calls, coverage:
        outcome = Outcome()
        try:
            reference = Reference(program, device)
            life = Lifecycle(program)
            subject = SUBJECTS[program.api](program, rank, mesh_of(program, device))
            for index, step in enumerate(program.steps):
                forward, expected = None, None
                try:
                    forward = reference.apply(step)
                except layers.Interrupted as error:
                    expected = error
                output = None
                try:
                    output = subject.apply(step)
                except layers.Interrupted:
                    if expected is None:
                        raise
                    expected = None
                life.apply(step)
                if expected is not None:
                    outcome = Outcome("no interruption", index, "forward went on where it must be interrupted")
                    break
                difference = next(differences(program, rank, reference, subject, life, forward, output), None)
                if keeps:
                    values.append(values_of(subject, reference.master(rank), output))
                if difference:
                    outcome = Outcome(difference[0], index, difference[1])
                    break
        except Invalid as error:
            outcome = Outcome(invalid=str(error))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            outcome = Outcome(f"raised {shape_of(text)}", index, text[:2000], place=_place(error))
    digest = hashlib.sha1("\n".join(calls).encode()).hexdigest()[:8]
    lines = tuple(_coverage.new) if rank == 0 else ()
    return dataclasses.replace(outcome, digest=digest, lines=lines, values=tuple(values))


def values_of(subject: Subject, names: Iterable[str], output: torch.Tensor | None) -> Values:
    """The numbers that this rank has after a step."""
    values = {} if output is None else {"output": output.detach().flatten().tolist()}
    for name in names:
        seen = subject.seen(name)
        values[name] = seen.value.flatten().tolist()
        if seen.grad is not None:
            values[f"{name}.grad"] = seen.grad.flatten().tolist()
    return values


def differences(
    program: Program,
    rank: int,
    reference: Reference,
    subject: Subject,
    life: Lifecycle,
    forward: Forward | None,
    output: torch.Tensor | None,
) -> Iterator[tuple[str, str]]:
    """The differences after a step: the kind, and what exactly differs."""
    reduction = program.reduce_dtype or program.param_dtype or program.dtype  # ranks may be added in any order
    limit = max(LIMITS[getattr(torch, name)] for name in (program.dtype, reduction))
    if forward is not None:
        if output is None:
            yield "no output", ""
        else:
            yield from _compared("output", "the output", output.detach(), forward.outputs[rank].detach(), limit)
    for name, master in reference.master(rank).items():
        seen = subject.seen(name)
        yield from _compared("parameter", name, seen.value, subject.share(name, master.detach()), limit)
        if seen.requires_grad != master.requires_grad:
            yield "requires_grad", f"{name} has requires_grad {seen.requires_grad}"
        if not seen.value.numel() or (program.api == "fsdp1" and life.unreduced):
            continue  # FSDP1 shows the gradients of no_sync, which are not reduced yet
        if (seen.grad is None) != (master.grad is None):
            yield "a gradient is missing" if seen.grad is None else "a gradient too many", name
        elif seen.grad is not None and master.grad is not None:
            yield from _compared("gradient", name, seen.grad, subject.share(name, master.grad), limit)
    buffers = subject.buffers()
    for name, buffer in reference.models[rank].named_buffers():
        yield from _compared("buffer", name, buffers[name], buffer, limit)
    if reference.norm is not None and subject.norm is not None:
        yield from _compared("norm", "the norm of the gradients", subject.norm, reference.norm, limit)
    for unit, state, expected in zip(program.units, subject.states(), life.states):
        if state is not None and expected not in (UNKNOWN, state):
            yield f"{state.lower()} instead of {expected.lower()}", f"the unit {', '.join(map(repr, unit.modules))}"
    for modules in subject.unfreed():
        yield "memory is not freed", f"the unit {modules!r}"


def _compared(
    kind: str, name: str, found: torch.Tensor, right: torch.Tensor, limit: float
) -> Iterator[tuple[str, str]]:
    if found.shape != right.shape:
        yield f"shape of {kind}", f"{name}: {tuple(found.shape)} instead of {tuple(right.shape)}"
    elif found.dtype != right.dtype:
        yield f"dtype of {kind}", f"{name}: {found.dtype} instead of {right.dtype}"
    elif not torch.allclose(found, right, rtol=limit, atol=limit, equal_nan=True):
        yield kind, f"{name}: {found.tolist()} instead of {right.tolist()}"


_meshes: dict[int, DeviceMesh] = {}


def mesh_of(program: Program, device: str) -> DeviceMesh:
    """One mesh for each shape, because every mesh makes groups."""
    if program.replicas not in _meshes:
        shards = program.world_size // program.replicas
        shape, names = (
            ((program.replicas, shards), ("replicas", "shards")) if program.replicas > 1 else ((shards,), ("shards",))
        )
        _meshes[program.replicas] = init_device_mesh(device, shape, mesh_dim_names=names)
    return _meshes[program.replicas]


class recorded_collectives:  # a class, so that a traceback has no frame of contextlib
    """Record the collectives of FSDP2 that run, with their sizes."""

    NAMES = ("all_reduce", "broadcast", torch_facts.all_gather_name(), torch_facts.reduce_scatter_name())

    def __enter__(self) -> list[str]:
        calls: list[str] = []
        self.originals = {name: getattr(dist, name) for name in self.NAMES}
        for name, original in self.originals.items():
            setattr(dist, name, self._recording(calls, name, original))
        return calls

    @staticmethod
    def _recording(calls: list[str], name: str, original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            calls.append(f"{name} {[each.numel() for each in tensors]}")
            return original(*args, **kwargs)

        return call

    def __exit__(self, *_: object) -> None:
        for name, original in self.originals.items():
            setattr(dist, name, original)


def shape_of(text: str) -> str:
    """The first line of a message without numbers, quoted names and addresses."""
    line = (text.splitlines() or [""])[0][:160]
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r"'[^']*'|\"[^\"]*\"", "NAME", re.sub(r"0x[0-9a-f]+", "N", line)))


def _place(error: BaseException) -> str:
    """The innermost function of torch's distributed code in a traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "torch_fsdp_tests" not in frame.filename]
    ours = [frame for frame in frames if "distributed" in frame.filename] or frames
    return f"{Path(ours[-1].filename).stem}.{ours[-1].name}" if ours else ""
