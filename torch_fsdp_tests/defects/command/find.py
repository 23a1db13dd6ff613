"""Which defects fit some words, a traceback, or the features of a program."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence

from torch_fsdp_tests.defects import limits, registry, tracebacks
from torch_fsdp_tests.defects.command.ranking import Ranking, words
from torch_fsdp_tests.defects.limits import Limit
from torch_fsdp_tests.defects.registry import Defect, InvalidQuery
from torch_fsdp_tests.dispatch.features import FEATURES

SHORT = tuple(feature.short for feature in FEATURES if feature.short)
_INTERFACES = {feature.short for feature in FEATURES if feature.group == "Interfaces"}
_ABOUT = {feature.short: f"{feature.short} {feature.name} {feature.about}" for feature in FEATURES}

# Chosen with the queries in ``test/harness/inputs/find_queries.json``.
_WEIGHTS = {
    "id": 5.0,
    "title": 2.0,
    "explanation": 0.9,
    "error": 1.2,
    "where": 2.0,
    "features": 0.2,
    "workaround": 0.6,
    "code": 0.25,
    "upstream": 1.0,
}

HAS_CONDITION = 0.5  # texts beside an error that fit less say nothing about the defect's condition
LIMIT_FITS = 0.9  # the least score of a limit for some words
LIMIT_BESIDE_DEFECT = 0.6  # and its least share of the best score of a defect
_ISSUE = re.compile(r"(?:https?://\S*/(?:issues|pull)/|\b)(\d{3,})\b\S*")  # by its address or its number

_CODE_OF_TORCH = re.compile(r'File "[^"]*/torch/.*\n.*\n|File ".*\n')  # and the places of the user's code
# A line of a log: of a rank, with a time, or with a level.
_LOG = re.compile(r"(?m)^ *(\[[a-z]*\d+\]|\[?\d{4}-\d\d-\d\d\b|[IWEF]\d{4} )|\b(INFO|WARNING|ERROR)\b")
_TYPE = re.compile(r"[\w.]*(Error|Exception)(:|$)")  # before a message, of which a user may give only a part


def fitting(text: str) -> list[Defect]:
    """The defects that fit words, the number or the address of an issue, or a traceback. The best comes first.

    The words of a log, and of an error that a limit explains, are not those of a user who describes a problem.
    """
    message = _TYPE.sub("", text.strip())
    if not _is_error(text) or not message:
        return by_words(message)
    found = by_traceback(text)
    is_described = not (tracebacks.ANY_FRAME.search(text) or _LOG.search(text) or limits.explaining(text))
    return by_words(message) if is_described and not found else found


def limits_for(text: str) -> list[Limit]:
    """The limits that fit words or a traceback, at most two."""
    if explaining := limits.explaining(text):
        return explaining[:1]
    if _is_error(text) or len(words(text)) < 2:
        return []
    least = max(LIMIT_FITS, LIMIT_BESIDE_DEFECT * max(_ranking().fits(text)))
    fits = zip(_limits().fits(text), limits.LIMITS.values())
    fitting = sorted((each for each in fits if each[0] >= least), key=lambda each: -each[0])
    return [limit for _, limit in fitting[:2]]


def _is_error(text: str) -> bool:
    return "\n" in text.strip() or _LOG.search(text) is not None or _TYPE.match(text.strip()) is not None


def by_words(text: str) -> list[Defect]:
    """The defects that have the most of these words, if they have enough of them. For one word, the worst first."""
    defects = registry.defects()
    return [defects[number] for number in _ranking().best(_ISSUE.sub(r"issue\1", text))]


def by_traceback(text: str) -> list[Defect]:
    """The defects whose error is in this text. First are those that name a function near its end, then those whose
    message has more words, then those whose condition is in the user's code or words, and then the worst."""
    found = tracebacks.raising(text)
    condition = _ranking().fits(_beside_the_error(text, found))
    fits = {defect.id: fit if fit >= HAS_CONDITION else 0 for defect, fit in zip(registry.defects(), condition)}

    def order(defect: Defect) -> tuple[float, ...]:
        return *tracebacks.distance(defect, text), -fits[defect.id]

    return sorted(found, key=order)


def _beside_the_error(text: str, found: Sequence[Defect]) -> str:
    """The user's code and words, without what all defects with this error have: torch's code and the message."""
    for defect in found:
        text = re.sub(rf"(?s)({tracebacks.ERROR.pattern}: )?{tracebacks.pattern(defect)}", "", text)
    return _CODE_OF_TORCH.sub("", text)


def by_features(used: Collection[str]) -> list[Defect]:
    """The defects that take no other features than these. If none of these is an interface, any interface is allowed.

    Raises :class:`InvalidQuery` for a name that no feature has.
    """
    for name in used:
        if name not in SHORT:
            raise InvalidQuery(f"there is no feature {name!r}; there are {', '.join(SHORT)}")
    everything = {*used} if _INTERFACES & {*used} else {*used, *_INTERFACES}
    return [defect for defect in registry.defects() if everything.issuperset(defect.uses)]


@functools.cache
def _ranking() -> Ranking:
    return Ranking([_fields(defect) for defect in registry.defects()], _WEIGHTS)


@functools.cache
def _limits() -> Ranking:
    texts = [
        {
            "messages": " ".join(each.messages),
            "means": each.means,
            "advice": each.advice,
            "id": each.id.replace("_", " "),
            "asked": each.asked,
        }
        for each in limits.LIMITS.values()
    ]
    return Ranking(texts, {"id": 2.0, "messages": 1.0, "means": 1.0, "advice": 0.2, "asked": 1.5})


def _fields(defect: Defect) -> dict[str, str]:
    about = [defect.component.value, defect.consequence.value, *(_ABOUT[short] for short in defect.uses)]
    return {
        "id": defect.id.replace("_", " "),
        "title": defect.title,
        "explanation": defect.explanation,
        "error": defect.error,
        "where": defect.where,
        "features": " ".join(about),
        "workaround": defect.workaround,
        "code": defect.code,
        "upstream": _ISSUE.sub(r"issue\1", " ".join(defect.upstream)),
    }
