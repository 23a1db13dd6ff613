"""The facts of each defect, and how to find all defects. Does not import torch."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import enum
import fnmatch
import functools
import importlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.defects import fixes
from torch_fsdp_tests.installed_torch.version_ranges import numbers, version_fits

SEEN = Path(__file__).parent / "data" / "seen.json"
# The ids of defects that the torch under test does not have, although its version has them, between spaces.
ABSENT_VARIABLE = "TORCH_FSDP_TESTS_ABSENT_DEFECTS"
NO_WORKAROUND = "none is known"
FRAME = re.compile(r"in \w+")  # the part of an error that names a function


class InvalidQuery(LookupError):
    """The arguments name something that does not exist. The message is a sentence."""


class _Ordered(enum.Enum):
    """The order of the members is that of defects in lists."""

    @property
    def position(self) -> int:
        """0 for the first."""
        return [*type(self)].index(self)


class Consequence(_Ordered):
    """The effect of a defect on a user. The worst comes first."""

    SILENTLY_WRONG = "silently wrong"
    LOST_DATA = "lost data"
    HANG = "hang"
    ERROR = "error"
    STATE_LEFT_CHANGED = "state left changed"
    COST = "cost"
    COSMETIC = "cosmetic"


class Exposure(_Ordered):
    """Which programs hit a defect. Most programs are of the first kind."""

    DEFAULT = "default"  # a plain training loop with default settings
    COMMON = "common"  # one widely used option, such as mixed precision, eval mode between steps, or a checkpoint
    RARE = "rare"  # two or more options, or an unusual call, model or event
    HARDWARE = "hardware"  # it shows only on an accelerator


class Component(_Ordered):
    """The part of torch that is at fault: FSDP2, then what is used with it, and then its predecessor."""

    FSDP2 = "FSDP2"
    DTENSOR = "DTensor"
    DCP = "DCP"  # torch.distributed.checkpoint
    DSD = "DSD"  # its state_dict module
    OPTIMIZER = "optimizer"  # torch.optim, and the clipping of gradients
    PIPELINE = "pipeline"
    COMPILER = "compiler"
    FSDP1 = "FSDP1"


class Devices(enum.Enum):
    """The devices on which a defect can show."""

    ANY = "any device"
    CPU = "the CPU"
    OTHER_THAN_CPU = "a device other than the CPU"


class Answer(enum.Enum):
    """Whether a version of PyTorch has a defect."""

    PRESENT = "present"
    ABSENT = "absent"
    CANNOT_BE_TRIED = "cannot be tried here"
    UNDECIDED = "could not be decided"


@dataclasses.dataclass(frozen=True)
class Defect:
    """The facts of one defect.

    ``features`` are those that it needs, by their short names in ``dispatch/data/features.txt``. The first one is the
    interface through which a user reaches the component. ``workaround`` says how to avoid it, or is ``NO_WORKAROUND``.
    ``error`` is the exception, if it raises: ``in FUNCTION`` as in its traceback, and its message, with `` ... `` for
    what varies. ``since`` is the first version with the affected feature; ``data/seen.json`` says which of the versions
    since then have the defect. ``package`` is a package that must be installed to reach it. ``where`` names the place
    in torch. ``upstream`` are issues and pull requests of torch. ``documented`` quotes the documentation of the right
    behavior; without it, that of the plain module or optimizer is right. ``arguable`` is an argument that it is no
    defect. ``fails_with`` has the names of the exceptions with which the tests that show it fail (``AssertionError``
    for a comparison), and of the signals that kill a rank. ``races`` has globs: a race whose text contains a match is
    reported as this defect.
    """

    component: Component
    consequence: Consequence
    exposure: Exposure
    where: str
    features: str
    workaround: str
    error: str = ""
    world_size: int = 2
    since: str = "2.9"
    devices: Devices = Devices.ANY
    needs: str = ""  # a capability of the device, as in ``accelerator.CAPABILITIES``
    package: str = ""  # the name by which Python imports it
    upstream: tuple[str, ...] = ()
    documented: str = ""
    arguable: str = ""
    fails_with: tuple[str, ...] = ("AssertionError",)
    races: tuple[str, ...] = ()
    # What its module says beside these facts, as :func:`defect` adds it.
    id: str = ""  # the name of the module
    title: str = ""  # its first line
    explanation: str = ""  # what is wrong and why
    source: str = ""  # without the fix

    @property
    def reproduce(self) -> Callable[..., tuple[Any, Any]]:
        """Returns the actual and the right result, with the workaround if it takes ``workaround``. Imports torch."""
        return importlib.import_module(f"{__package__}.known.{self.id}").reproduce

    @property
    def uses(self) -> tuple[str, ...]:
        """The short names of all features that it takes."""
        return tuple(self.features.split(", "))

    @property
    def code(self) -> str:
        """Its module without the docstring and the facts."""
        return self.source.partition('"""\n')[2].partition("DEFECT = ")[0] + self.source.rpartition("\n)\n")[2]

    @property
    def claim(self) -> str:
        """The title, and whether it is arguable."""
        return f"{self.title} (arguable)" if self.arguable else self.title

    @property
    def was_seen(self) -> bool:
        """Whether its reproduction has shown it in any version of torch. Otherwise it was only read in the source."""
        return any(answers.get(self.id) == Answer.PRESENT.value for answers in recorded()["seen"].values())

    @property
    def headline(self) -> str:
        """The line for it in lists."""
        kinds = [self.consequence.value, self.exposure.value] + ["not seen yet"] * (not self.was_seen)
        return f"{self.id} ({', '.join(kinds)}): {self.claim}"

    @property
    def functions(self) -> list[str]:
        """The functions that the error names, in the order of a traceback."""
        return [piece.removeprefix("in ") for piece in self.error.split(" ... ") if FRAME.fullmatch(piece)]

    @property
    def message(self) -> str:
        """The words of the error's message."""
        return " ... ".join(piece for piece in self.error.split(" ... ") if not FRAME.fullmatch(piece))

    def is_in(self, version: str) -> bool:
        """Whether a version of torch such as ``2.13`` has the defect."""
        return self.expected(f"{version}.0") is Answer.PRESENT

    def expected(self, torch_version: str) -> Answer:
        """The expected answer of this version of torch, if the defect can be tried.

        It is that of the nearest known versions before and after this one. It is ``UNDECIDED`` if these two differ, or
        if no version is known, as for a new defect.
        """
        if not version_fits(torch_version, f">={self.since}"):
            return Answer.CANNOT_BE_TRIED
        known, version = _known(self.id), numbers(torch_version)[:2]
        before = [at for at in known if at <= version]
        after = [at for at in known if at >= version]
        nearest = {known[at] for at in (*sorted(before)[-1:], *sorted(after)[:1])}
        return nearest.pop() if len(nearest) == 1 else Answer.UNDECIDED

    def expected_here(self) -> Answer:
        """The expected answer of the torch in this process, which may lack the defect although its version has it."""
        import torch  # not at import: most of this module does not need it

        return Answer.ABSENT if self.id in absent_here() else self.expected(torch.__version__)


def absent_here() -> frozenset[str]:
    """The ids of the defects that torch does not have in this process, whatever its version."""
    return frozenset(os.environ.get(ABSENT_VARIABLE, "").split())


def ids() -> list[str]:
    """The ids of all defects, in alphabetical order."""
    return fixes.ids()


@functools.cache
def defect(id: str) -> Defect:
    """Return one defect. Raises :class:`InvalidQuery` for an unknown id, and names similar ones.

    The facts are read from the source, because its module imports torch.
    """
    if id not in ids():
        raise unknown(id)
    source = fixes.text_of(id).partition(fixes.BEGIN)[0].rstrip() + "\n"
    tree = ast.parse(source)
    (facts,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and is_named(node, "DEFECT"))
    defect: Defect = eval(compile(ast.Expression(facts), f"{id}.py", "eval"))
    title, _, explanation = (ast.get_docstring(tree) or "").partition("\n\n")
    return dataclasses.replace(defect, id=id, title=title.rstrip("."), explanation=explanation.strip(), source=source)


def is_named(node: ast.Assign, name: str) -> bool:
    """Whether it assigns to this name."""
    return ast.unparse(node.targets[0]) == name


def defects() -> list[Defect]:
    """All defects, the worst first."""
    return worst_first(map(defect, ids()))


def worst_first(defects: Iterable[Defect]) -> list[Defect]:
    """By consequence, exposure and component. Among equals, those that are arguable come last."""

    def order(defect: Defect) -> tuple[object, ...]:
        kinds = defect.consequence, defect.exposure, defect.component
        return (*(kind.position for kind in kinds), bool(defect.arguable), defect.id)

    return sorted(defects, key=order)


def chosen(defects: Iterable[Defect], **kinds: Collection[enum.Enum] | None) -> list[Defect]:
    """The defects whose facts are among these, as ``exposure={Exposure.COMMON}``. None means all."""
    facts = {name: some for name, some in kinds.items() if some is not None}
    return [defect for defect in defects if all(getattr(defect, name) in some for name, some in facts.items())]


def matching(patterns: Sequence[str]) -> list[str]:
    """The ids that match these names and globs. Raises :class:`InvalidQuery` for one that matches nothing."""
    matches: dict[str, None] = {}
    for pattern in patterns:
        hits = fnmatch.filter(ids(), pattern)
        if not hits:
            raise unknown(pattern)
        matches.update(dict.fromkeys(hits))
    return list(matches)


def unknown(id: str) -> InvalidQuery:
    """The error for an unknown id, which names similar ones."""
    near = difflib.get_close_matches(id, ids(), n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}?" if near else "--list shows all"
    return InvalidQuery(f"there is no defect {id!r}: {hint}")


@functools.cache
def recorded() -> Mapping[str, Mapping[str, Mapping[str, str]]]:
    """What is known about versions of torch: the answers by version and id. ``seen`` has those of the command's last
    run on a version, and ``read`` those that were read in torch's source and that do not follow from ``seen``.
    """
    return {kind: transposed(answers) for kind, answers in json.loads(SEEN.read_text(encoding="utf-8")).items()}


def transposed(answers: Mapping[str, Mapping[str, str]]) -> dict[str, dict[str, str]]:
    """Answers by version and id instead of by id and version, as in the file, or the other way."""
    result: dict[str, dict[str, str]] = {}
    for outer, row in answers.items():
        for inner, answer in row.items():
            result.setdefault(inner, {})[outer] = answer
    return result


def versions() -> list[str]:
    """The versions of torch about which the registry knows, such as ``2.9``, without gaps."""
    minors = [numbers(version)[:2] for answers in recorded().values() for version in answers]
    return [f"{min(minors)[0]}.{minor}" for minor in range(min(minors)[1], max(minors)[1] + 1)]


def _known(id: str) -> dict[tuple[int, ...], Answer]:
    """Which versions have a defect, and which do not. All patch releases of a version are taken to be alike."""
    by_version: dict[tuple[int, ...], Answer] = {}
    for versions in (recorded()["read"], recorded()["seen"]):
        for version, answers in versions.items():
            answer = Answer(answers.get(id, Answer.CANNOT_BE_TRIED))
            if answer in (Answer.PRESENT, Answer.ABSENT):
                by_version[numbers(version)[:2]] = answer
    return by_version
