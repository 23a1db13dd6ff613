"""Which defects fit some words, a traceback, or the features that somebody uses."""

from __future__ import annotations

import re
from collections.abc import Collection

from torch_fsdp_tests.defects import registry
from torch_fsdp_tests.defects.registry import FRAME, Defect, Refused
from torch_fsdp_tests.dispatch.features import FEATURES

SHORT = tuple(feature.short for feature in FEATURES if feature.short)
_INTERFACES = {feature.short for feature in FEATURES if feature.group == "Interfaces"}


def by_words(words: str) -> list[Defect]:
    """The defects that have these words side by side, or else all of them anywhere. The title counts most."""
    wanted = _plain(words.replace("#", " "))
    for parts in ([wanted], wanted.split()):
        found = [each for each in registry.defects() if parts and all(part in _plain(_words(each)) for part in parts)]
        if found:
            return sorted(found, key=lambda defect: not all(part in _plain(defect.title) for part in parts))
    return []


def by_traceback(text: str) -> list[Defect]:
    """The defects whose error is in this text. The one that says most about it comes first.

    If the text has no frames, as when only the message is known, the names of functions do not count.
    """
    has_frames = re.search(r'File ".*", line \d+, in ', text) is not None
    found = [defect for defect in registry.defects() if defect.error and _ends_in(defect, text, has_frames)]
    return sorted(found, key=lambda defect: -len(defect.error))


def by_features(used: Collection[str]) -> list[Defect]:
    """The defects that take no other features than these. Without an interface among them, each one counts.

    Raises :class:`Refused` for a name that no feature has.
    """
    for name in used:
        if name not in SHORT:
            raise Refused(f"there is no feature {name!r}; there are {', '.join(SHORT)}")
    everything = {*used} if _INTERFACES & {*used} else {*used, *_INTERFACES}
    return [defect for defect in registry.defects() if everything.issuperset(defect.uses)]


def _ends_in(defect: Defect, text: str, has_frames: bool) -> bool:
    pieces = (defect.error if has_frames else defect.message).split(" ... ")
    patterns = [re.escape(piece) + r"\b" * bool(FRAME.fullmatch(piece)) for piece in pieces]
    return re.search(".*".join(patterns), text, re.DOTALL) is not None


def _words(defect: Defect) -> str:
    facts = (defect.title, defect.explanation, defect.error, defect.workaround, defect.id, defect.where)
    return " ".join((*facts, *defect.upstream, *defect.uses))


def _plain(words: str) -> str:
    return " ".join(words.replace("``", "").lower().split())
