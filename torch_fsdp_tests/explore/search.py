"""The search: programs that are new, or variations of programs that reached something new, until the time is over."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import random
import selectors
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch_fsdp_tests.explore import generate, known, script
from torch_fsdp_tests.explore.execution import COMPARE
from torch_fsdp_tests.explore.lifecycle import problem
from torch_fsdp_tests.explore.program import Program, ProgramError, Step
from torch_fsdp_tests.explore.ranks import Crew, Result
from torch_fsdp_tests.explore.shrink import shrunk

SHRINK_SECONDS = 40.0  # for one finding
VARIED = 0.4  # the share of programs that vary one which reached something new
CORPUS = 200  # programs that are kept for variation
SETTINGS = (
    "offload",
    "optimizer",
    "foreach",
    "param_dtype",
    "reduce_dtype",
    "output_dtype",
    "dtype",
    "width",
    "replicas",
    "api",
    "meta",
    "scaler",
    "inputs",
)

USUAL = {  # settings and their values in the simplest program
    each.name: each.default
    for each in dataclasses.fields(Program)
    if each.name in (*SETTINGS, "strategy", "original_parameters", "tensor_parallel") and each.name != "width"
}
PARTS = ("frozen", "ignored", "columns", "ties", "shares")  # parameters and modules with a special role
LAYER_FLAGS = ("box", "twice", "hooked", "dtype", "recompute")
COMPUTING = {"chain", "linear", "wide", "scale", "one", "relu"}  # layers of which one is as good as another


@dataclasses.dataclass
class Finding:
    """A program that ends otherwise than FSDP promises, shrunk, and how often the search has met it."""

    program: Program
    result: Result
    known: str = ""  # the id of a defect that explains it
    is_confirmed: bool = True  # it showed again in fresh ranks
    count: int = 1

    @property
    def is_new(self) -> bool:
        return not self.known and self.is_confirmed

    def explains(self, result: Result) -> bool:
        """Whether a result ends in the same way at the same place, and its program has all that this one's has."""
        return _same_end(self.result, result) and traits(self.program) <= traits(result.program)


def _same_end(one: Result, other: Result) -> bool:
    return (one.what, one.place) == (other.what, other.place)


@dataclasses.dataclass
class Settings:
    seconds: float = 60.0
    seed: int = 0
    world_size: int = 2
    at_a_time: int = 2
    without: tuple[str, ...] = ()
    demanded: tuple[str, ...] = ()
    with_known: tuple[str, ...] = ()  # known defects that are not avoided, nor those with the same rewriting
    most: int | None = None  # programs
    shrinks: bool = True
    mode: str = COMPARE


class Search:
    """Runs programs in a few groups of ranks at a time. :meth:`findings` yields what it finds."""

    def __init__(
        self,
        settings: Settings,
        note: Callable[[Search], object] = lambda search: None,
        take: Callable[[Result], object] | None = None,
    ) -> None:
        self.settings = settings
        self._taker = take
        self.programs = self.invalid = 0
        self.earlier = 0  # programs of the searches that this one continues
        self.lines: set[str] = set()
        self.pairs: set[tuple[str, str]] = set()
        self.found: list[Finding] = []
        self._note = note
        self._choice = random.Random(settings.seed)
        self._next = settings.seed * 1_000_000  # the seed of the next new program
        self._corpus: list[Program] = []
        self._present = known.present()
        let_in = {known.REWRITINGS[id] for id in settings.with_known}
        self._avoided = [id for id in self._present if known.REWRITINGS[id] not in let_in]
        self._without = (*settings.without, *known.lacking())
        self._crews = [Crew(settings.world_size, settings.mode) for _ in range(settings.at_a_time)]

    def findings(self) -> Iterator[Finding]:
        """Yield each finding when it has been shrunk. Ends after the time, or with the last program."""
        end = time.monotonic() + self.settings.seconds
        selector = selectors.DefaultSelector()
        running: list[Crew] = []
        idle = list(self._crews)
        started = 0
        try:
            while running or (time.monotonic() < end and started != self.settings.most):
                while idle and time.monotonic() < end and started != self.settings.most:
                    crew = idle.pop()
                    crew.begin(self.next_program())
                    selector.register(crew, selectors.EVENT_READ)
                    running.append(crew)
                    started += 1
                selector.select(1.0)
                for crew in list(running):
                    descriptor = crew.fileno()
                    if (result := crew.result()) is None:
                        continue
                    selector.unregister(descriptor)
                    running.remove(crew)
                    self._take(result)
                    if result.is_finding and (finding := self._judged(result, crew)):
                        yield finding
                    idle.append(crew)
                    self._note(self)
        finally:
            selector.close()
            self.close()

    def close(self) -> None:
        for crew in self._crews:
            crew.close()

    def state(self) -> dict[str, Any]:
        """What :meth:`resume` needs, as JSON data."""
        found = [
            {"program": json.loads(each.program.as_json()), "known": each.known, "is_confirmed": each.is_confirmed}
            | {"count": each.count, "what": each.result.what, "place": each.result.place}
            for each in self.found
        ]
        return {"next": self._next, "programs": self.earlier + self.programs, "found": found}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on where another search ended: with its next seed, and without shrinking its findings again.

        Raises :class:`ProgramError` if the data are no state of a search.
        """
        try:
            self._next, self.earlier = int(state["next"]), int(state["programs"])
            for each in state["found"]:
                program = Program.from_json(json.dumps(each["program"]))
                result = Result(program, each["what"], place=each["place"])
                self.found.append(Finding(program, result, each["known"], each["is_confirmed"], each["count"]))
        except (TypeError, KeyError, ValueError) as error:
            raise ProgramError(f"this is no state of a search: {error}") from error

    def _new(self, seed: int) -> Program:
        return generate.program_of(seed, self.settings.world_size, self._without, self.settings.demanded)

    def next_program(self) -> Program:
        if self._corpus and self._choice.random() < VARIED:
            program = varied(
                self._choice.choice(self._corpus), self._new(self._choice.randrange(1 << 40)), self._choice
            )
        else:
            program = self._new(self._next)
            self._next += 1
        return known.avoiding(known.possible(program), self._avoided)

    def _take(self, result: Result) -> None:
        self.programs += 1
        if self._taker is not None and not result.is_finding and not result.invalid:
            self._taker(result)
        self.invalid += bool(result.invalid)
        pairs = set(pairs_of(result.program))
        is_new = not (self.lines.issuperset(result.lines) and self.pairs >= pairs)
        if is_new and not result.is_finding and not result.invalid:
            self._corpus = [*self._corpus[-CORPUS + 1 :], result.program]
        self.lines.update(result.lines)
        self.pairs |= pairs

    def _judged(self, result: Result, crew: Crew) -> Finding | None:
        """The finding, if it is the first of its kind: confirmed in fresh ranks, shrunk, and explained."""
        for finding in self.found:
            if finding.explains(result):
                finding.count += 1
                return None
        finding = Finding(result.program, result)
        self.found.append(finding)  # before it is shrunk, which takes time and may be stopped
        finding.is_confirmed = _same_end(crew.run(result.program), result)
        if not finding.is_confirmed or not self.settings.shrinks:
            return finding

        def shows_it(program: Program) -> bool:
            """A smaller program might show another, known defect, which ends in the same way."""
            return known.avoiding(program, self._avoided) == program and shows(program, result, crew)

        finding.program = shrunk(result.program, shows_it, SHRINK_SECONDS)
        again = crew.run(finding.program)
        finding.result = again if _same_end(again, result) else result
        finding.known = explanation(finding.program, result, crew, self._present)
        return finding


def shows(program: Program, result: Result, crew: Crew) -> bool:
    """Whether the program ends in the same way, in ranks of the same number."""
    if program.world_size != crew.world_size:
        return False
    return _same_end(crew.run(program), result)


def explanation(program: Program, result: Result, crew: Crew, ids: Iterable[str]) -> str:
    """The id of the known defect without which the program does not show the finding. Empty if there is none."""
    for id in ids:
        rewritten = known.avoiding(program, [id])
        if rewritten != program and not problem(rewritten) and not shows(rewritten, result, crew):
            return id
    return ""


def varied(program: Program, other: Program, choice: random.Random) -> Program:
    """A valid variation that takes steps or a setting from another program."""
    for _ in range(10):
        match choice.randrange(3):
            case 0:
                start = choice.randrange(len(program.steps) + 1)
                new = program.but(steps=(*program.steps[:start], *other.steps, *program.steps[start:]))
            case 1:
                end = choice.randrange(len(program.steps) + 1)
                new = program.but(steps=(*program.steps[:end], *other.steps))
            case _:
                field = choice.choice(SETTINGS)
                new = program.but(**{field: getattr(other, field)})
        new = known.valid(new)
        if new.steps and not problem(new):
            return new
    return program


def traits(program: Program) -> set[str]:
    """What a program has that the simplest one has not. Which layers it computes with does not count."""
    have = {f"{name} {getattr(program, name)}" for name, usual in USUAL.items() if getattr(program, name) != usual}
    have |= {name for name in PARTS if getattr(program, name)}
    for layer in program.all_layers():
        have |= {layer.kind} - COMPUTING | {flag for flag in LAYER_FLAGS if getattr(layer, flag)}
    for unit in program.units:
        have |= {"group"} if len(unit.modules) > 1 else {f"reshard {unit.reshard}"} - {"reshard default"}
    for step in program.steps:
        have |= {_kind(step), *(["skips"] if step.names else []), *(["odd"] if step.odd else [])}
    return have | ({"several units"} if len(program.units) > 1 else set())


def _kind(step: Step) -> str:
    return f"{step.kind}({step.at})" if step.kind in ("evaluate", "transform") else step.kind


def pairs_of(program: Program) -> Iterator[tuple[str, str]]:
    """Pairs of features: of two steps that follow each other, and of what the program has."""
    yield from itertools.pairwise(map(_kind, program.steps))
    yield from itertools.combinations(sorted(traits(program)), 2)


def save(finding: Finding, folder: Path) -> list[Path]:
    """Write a finding: its program, a script, and a text for torch's issue tracker. Returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha1(finding.program.as_json().encode()).hexdigest()[:6]
    contents = {
        ".json": finding.program.as_json() + "\n",
        ".py": script.script(finding.program, finding.result),
        ".md": script.issue(finding.program, finding.result),
    }
    paths = []
    for suffix, text in contents.items():
        paths.append(folder / f"{finding.known or 'new'}-{digest}{suffix}")
        paths[-1].write_text(text)
    return paths
