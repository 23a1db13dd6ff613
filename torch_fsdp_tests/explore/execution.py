"""Runs a program on this rank beside its reference, and compares after every step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from torch_fsdp_tests import settings
from torch_fsdp_tests.defects.races import explaining
from torch_fsdp_tests.device import ordering
from torch_fsdp_tests.explore.coverage import LineCoverage
from torch_fsdp_tests.explore.flat import FlatSubject
from torch_fsdp_tests.explore.lifecycle import GATHERED, LOW, SHARDED, UNKNOWN, Lifecycle
from torch_fsdp_tests.explore.program import Program, Unit
from torch_fsdp_tests.explore.reference import Forward, Invalid, Reference
from torch_fsdp_tests.explore.subject import Subject
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.installed_torch import fixes

_coverage = LineCoverage("distributed/fsdp", "distributed/_composable")

COMPARE, TWICE, RECORD = "compare", "twice", "record"  # a program runs once, twice, or once and keeps its numbers
LIMITS = {torch.float64: 2**-44, torch.float32: 2**-18, torch.bfloat16: 2**-6, torch.float16: 2**-8}  # relative errors

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


def run(program: Program, rank: int, device: str, mode: str = COMPARE, covers: bool = False) -> Outcome:
    """Run the program up to its end, or to the first difference, as a mode says. ``covers`` collects lines of FSDP."""
    coverage: contextlib.AbstractContextManager[LineCoverage | None] = _coverage if covers else contextlib.nullcontext()
    if mode != TWICE:
        return _run(program, rank, device, coverage, keeps=mode == RECORD)
    first, second = (_run(program, rank, device, coverage, keeps=True) for _ in range(2))
    for index, pair in enumerate(zip(first.values, second.values)):
        for name, values in pair[0].items():
            if repr(values) != repr(pair[1].get(name)):
                detail = f"{name}: first {values}, then {pair[1].get(name)}"
                return Outcome("not the same twice", index, detail, digest=first.digest)
    return dataclasses.replace(first, values=())


def _run(
    program: Program,
    rank: int,
    device: str,
    coverage: contextlib.AbstractContextManager[LineCoverage | None],
    keeps: bool,
) -> Outcome:
    torch.manual_seed(program.seed)
    index = -1
    values: list[Values] = []
    outcome = Outcome()
    races = ordering.part() if settings.is_on(settings.CHECK_STREAMS_VARIABLE, os.environ) else contextlib.nullcontext()
    with recorded() as calls, coverage as covered, races as recording:
        try:
            reference, life = Reference(program, device), Lifecycle(program)
            subject = (FlatSubject if program.api == "fsdp1" else Subject)(program, rank, device)
            for index, step in enumerate(program.steps):
                forward = reference.apply(step)
                output = subject.apply(index)
                life.apply(step)
                if life.unfinished:  # FSDP waits for gradients only in the last backward
                    torch.get_device_module(device).synchronize()
                if keeps:
                    values.append(values_of(subject, reference.master(rank), output))
                with recording.looking() if recording else contextlib.nullcontext():
                    difference = next(differences(program, rank, reference, subject, life, forward, output), None)
                difference = difference or (recording and _new_race(recording))
                if difference:
                    outcome = Outcome(difference[0], index, difference[1])
                    break
        except Invalid as error:
            outcome = Outcome(invalid=str(error))
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            outcome = Outcome(f"raised {shape_of(text)}", index, text[:2000], place=_place(error))
    digest = hashlib.sha1(repr([(call.name, call.dtype, call.numel) for call in calls]).encode()).hexdigest()[:8]
    lines = tuple(covered.new) if covered else ()
    if recording:
        recording.races.clear()
        recording.synchronize()  # what a program leaves behind is not the next one's
    return dataclasses.replace(outcome, digest=digest, lines=lines, values=tuple(values))


def _new_race(recording: ordering.Recording) -> tuple[str, str] | None:
    """A race that no known defect explains."""
    found, recording.races = recording.races, []
    for race in found:
        if not explaining(race):
            return "race: " + re.sub(r"\d+", "N", str(race)), str(race)
    return None


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
    # In a low precision, FSDP rounds what a plain model rounds, so that no error is allowed.
    dtypes = {program.dtype, program.dtype_at(len(program.steps)), *program.own_dtypes - LOW}
    if program.data_ranks // program.replicas > 2:  # a sum over more than two ranks depends on their order
        dtypes |= {program.reduce_dtype or program.param_dtype or program.dtype, *program.own_dtypes}
    compared = functools.partial(_compared, max(LIMITS[getattr(torch, name)] for name in dtypes))
    data_rank = program.data_rank(rank)
    if forward is not None and output is not None:
        yield from compared("output", "the output", output.detach(), forward.outputs[data_rank].detach())
    if reference.derivatives and subject.derivative is not None:
        yield from compared("derivative", "derivative", subject.derivative.detach(), reference.derivatives[data_rank])
    for index, (mine, inputs) in enumerate(zip(subject.inputs(), reference.inputs)):
        right = inputs[data_rank]
        if (mine.grad is None) != (right.grad is None):
            yield "gradient of an input", f"inputs[{index}]: {mine.grad} instead of {right.grad}"
        elif mine.grad is not None and right.grad is not None:
            yield from compared("gradient of an input", f"inputs[{index}]", mine.grad, right.grad)
    for name, master in reference.master(rank).items():
        seen = subject.seen(name)
        share = functools.partial(subject.share, name)
        yield from compared("parameter", name, seen.value, share(master.detach()))
        if seen.requires_grad != master.requires_grad:
            yield "requires_grad", f"{name} has requires_grad {seen.requires_grad}"
        if not seen.value.numel():
            continue
        if program.api == "fsdp1" and life.unreduced:
            continue  # gradients are those of the rank, and not sharded
        if (seen.grad is None) != (master.grad is None):
            yield "a gradient is missing" if seen.grad is None else "a gradient too many", name
        elif seen.grad is not None and master.grad is not None:
            yield from compared("gradient", name, seen.grad, share(master.grad))
        state = reference.state(rank, name)
        if seen.state.keys() != state.keys():
            yield "keys of the optimizer's state", f"{name}: {sorted(seen.state)} instead of {sorted(state)}"
        for key in seen.state.keys() & state.keys():
            if isinstance(state[key], torch.Tensor):
                yield from compared("optimizer state", f"{key} of {name}", seen.state[key], share(state[key]))
    buffers = subject.buffers()
    for name, buffer in reference.models[data_rank].named_buffers():
        yield from compared("buffer", name, buffers[name], buffer)
    if reference.norm is not None and subject.norm is not None:
        yield from compared("norm", "the norm of the gradients", subject.norm, reference.norm)
    for unit, group, expected in zip(program.units, subject.groups(), life.states):
        if group is None:
            continue
        where, state_now = _words(unit), internals.sharded_state(group)
        may_be = {UNKNOWN, state_now}
        if state_now == SHARDED and "fsdp2_evaluation_leaves_the_root_gathered" in fixes.in_force():
            may_be.add(GATHERED)  # the fix reshards what no backward needs
        if expected not in may_be:
            yield f"{state_now.lower()} instead of {expected.lower()}", where
        if state_now == SHARDED and internals.gathered_bytes(group):
            yield "memory is not freed", where
    yield from _in_backward(program, subject, life)


def _in_backward(program: Program, subject: Subject, life: Lifecycle) -> Iterator[tuple[str, str]]:
    """Which units are gathered when the backward of a layer begins, although no unit at work needs them."""
    for seen in subject.observed:
        allowed = life.at_work.get(seen.call)
        if allowed is None:
            continue
        when = f"when the backward of {seen.call[0]!r} begins"
        idle = [index for index in range(len(program.units)) if index not in allowed]
        for index in idle:
            if seen.held[index]:
                yield "gathered in backward", f"{_words(program.units[index])} {when}"
        ahead = [index for index in idle if seen.pending[index]]
        if len(ahead) > 1 and life.prefetches_one:
            names = ", ".join(_words(program.units[index]) for index in ahead)
            yield "gathers ahead in backward", f"{names} {when}"


def _words(unit: Unit) -> str:
    return f"the unit {', '.join(map(repr, unit.modules))}"


def _compared(
    limit: float, kind: str, name: str, found: torch.Tensor, right: torch.Tensor
) -> Iterator[tuple[str, str]]:
    if found.shape != right.shape:
        yield f"shape of {kind}", f"{name}: {tuple(found.shape)} instead of {tuple(right.shape)}"
    elif found.dtype != right.dtype:
        yield f"dtype of {kind}", f"{name}: {found.dtype} instead of {right.dtype}"
    elif torch.equal(found, right := right.to(found.device)):  # faster
        return
    elif not torch.allclose(found, right, rtol=limit, atol=limit * _largest(right), equal_nan=True):
        yield kind, f"{name}: {found.tolist()} instead of {right.tolist()}"


def _largest(values: torch.Tensor) -> float:
    """The largest value, or 1. A sum is rounded relative to its largest term, which may be gone."""
    finite = values[values.isfinite()].abs()
    return max(1.0, float(finite.max())) if finite.numel() else 1.0


def shape_of(text: str) -> str:
    """The first line of a message without numbers, quoted names and addresses."""
    line = (text.splitlines() or [""])[0][:160]
    line = re.sub(r"\b(c10::)?(double|float|half|bfloat16)\b", "DTYPE", line, flags=re.IGNORECASE)
    return re.sub(r"\d+(\.\d+)?", "N", re.sub(r"'[^']*'|\"[^\"]*\"", "NAME", re.sub(r"0x[0-9a-f]+", "N", line)))


def _place(error: BaseException) -> str:
    """The innermost function of torch's distributed code in a traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "torch_fsdp_tests" not in frame.filename]
    ours = [frame for frame in frames if "distributed" in frame.filename] or frames
    return f"{Path(ours[-1].filename).stem}.{ours[-1].name}" if ours else ""
