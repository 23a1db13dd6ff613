"""Reduces a program that shows a finding to the fewest steps, modules and settings that still show it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator

from torch_fsdp_tests.explore.known import valid
from torch_fsdp_tests.explore.lifecycle import parameters, paths, problem
from torch_fsdp_tests.explore.program import Layer, Program, Unit


def shrunk(program: Program, still_shows: Callable[[Program], bool], seconds: float) -> Program:
    """The smallest program that greedy attempts find within about ``seconds``."""
    end = time.monotonic() + seconds
    tried = {program}
    again = True
    while again:
        again = False
        for smaller in attempts(program):
            if time.monotonic() > end:
                return program
            smaller = valid(smaller)
            if smaller in tried or problem(smaller):
                continue
            tried.add(smaller)
            if still_shows(smaller):
                program, again = smaller, True
                break
    return program


def attempts(program: Program) -> Iterator[Program]:
    """Simpler programs, those that leave out most first. They need not be valid."""
    steps = program.steps
    size = len(steps) // 2
    while size:
        for start in range(0, len(steps), size):
            yield program.but(steps=steps[:start] + steps[start + size :])
        size //= 2
    for field in dataclasses.fields(Program):
        if field.name not in ("seed", "world_size", "width", "layers", "units", "steps", "dtype", "strategy"):
            if getattr(program, field.name) != field.default:
                yield program.but(**{field.name: field.default})
    if program.api == "fsdp1":
        yield program.but(api="fully_shard", strategy="", original_parameters=False)
    for setting in ("frozen", "ignored", "columns"):
        names = getattr(program, setting)
        for name in names:
            yield program.but(**{setting: tuple(each for each in names if each != name)})
    for layers in _fewer(program.layers):
        yield _fitted(program.but(layers=layers))
    for index, unit in enumerate(program.units[:-1]):
        rest = program.units[:index] + program.units[index + 1 :]
        yield program.but(units=rest)
        for path in unit.modules if len(unit.modules) > 1 else ():
            fewer = Unit(tuple(each for each in unit.modules if each != path), unit.reshard)
            yield program.but(units=(*program.units[:index], fewer, *program.units[index + 1 :]))
    for index, unit in enumerate(program.units):
        if unit.reshard != "default":
            plain = Unit(unit.modules)
            yield program.but(units=(*program.units[:index], plain, *program.units[index + 1 :]))
    for layers in _simpler(program.layers):
        yield _fitted(program.but(layers=layers))
    for index, step in enumerate(steps):
        if step.odd:
            yield program.but(steps=(*steps[:index], dataclasses.replace(step, odd=()), *steps[index + 1 :]))
        if step.names:
            yield program.but(steps=(*steps[:index], dataclasses.replace(step, names=()), *steps[index + 1 :]))
    for width in range(1, program.width):
        yield program.but(width=width)
    if program.world_size > 2:
        yield program.but(world_size=2, replicas=1)


def _fitted(program: Program) -> Program:
    """The program without what names layers that are gone."""
    modules = {"", *(path for path, _ in paths(program.layers))}
    names = set(parameters(program))
    units = []
    for unit in program.units:
        kept = tuple(path for path in unit.modules if path in modules)
        if kept:
            units.append(Unit(kept, unit.reshard))
    return program.but(
        units=tuple(units),
        frozen=tuple(name for name in program.frozen if name in names),
        ignored=tuple(name for name in program.ignored if name in names),
        columns=tuple(name for name in program.columns if name in names),
        ties=tuple(pair for pair in program.ties if names.issuperset(pair)),
        shares=tuple(pair for pair in program.shares if modules.issuperset(pair)),
    )


def _fewer(layers: tuple[Layer, ...]) -> Iterator[tuple[Layer, ...]]:
    for index, layer in enumerate(layers):
        before, after = layers[:index], layers[index + 1 :]
        yield before + after
        if layer.parts:
            yield before + layer.parts + after
        for parts in _fewer(layer.parts):
            yield (*before, dataclasses.replace(layer, parts=parts), *after)


def _simpler(layers: tuple[Layer, ...]) -> Iterator[tuple[Layer, ...]]:
    for index, layer in enumerate(layers):
        before, after = layers[:index], layers[index + 1 :]
        for change in (
            {"kind": "scale", "rows": 0},
            {"kind": "linear", "rows": 0},
            {"rows": 1},
            {"bias": False},
            {"box": ""},
            {"twice": False},
            {"hooked": False},
            {"recompute": False},
            {"dtype": ""},
        ):
            if layer.parts and "kind" in change:
                continue
            if all(getattr(layer, name) != value for name, value in change.items()) and not (
                change.get("kind") == "linear" and layer.kind == "scale"
            ):
                yield (*before, dataclasses.replace(layer, **change), *after)
        for parts in _simpler(layer.parts):
            yield (*before, dataclasses.replace(layer, parts=parts), *after)
