"""Which defects fit some words, a traceback, or the features that somebody uses."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence

from torch_fsdp_tests.defects import registry
from torch_fsdp_tests.defects.registry import FRAME, Defect, Entry
from torch_fsdp_tests.dispatch.features import FEATURES

SHORT = tuple(feature.short for feature in FEATURES if feature.short)
_INTERFACES = {feature.short for feature in FEATURES if feature.group == "Interfaces"}


def by_words(words: str) -> list[Entry]:
    """The entries that have these words side by side, or else all of them anywhere. The title counts most."""
    wanted = _plain(words.replace("#", " "))
    for parts in ([wanted], wanted.split()):
        found = [entry for entry in _all() if parts and all(part in _plain(_words(entry)) for part in parts)]
        if found:
            return sorted(found, key=lambda entry: not all(part in _plain(entry.defect.title) for part in parts))
    return []


def by_traceback(text: str) -> list[Entry]:
    """The entries whose error is in this text. The one that says most about it comes first.

    If the text has no frames, as when only the message is known, the names of functions do not count.
    """
    has_frames = re.search(r'File ".*", line \d+, in ', text) is not None
    found = [entry for entry in _all() if entry.defect.error and _ends_in(entry.defect, text, has_frames)]
    return sorted(found, key=lambda entry: -len(entry.defect.error))


def by_features(used: Collection[str]) -> list[Entry]:
    """The entries that take no other features than these. Without an interface among them, each one counts."""
    everything = {*used} if _INTERFACES & {*used} else {*used, *_INTERFACES}
    return [entry for entry in _all() if everything.issuperset(entry.defect.uses)]


def unknown_feature(names: Sequence[str]) -> str:
    """A sentence about the first name that no feature has, or an empty string."""
    for name in names:
        if name not in SHORT:
            return f"there is no feature {name!r}; there are {', '.join(SHORT)}"
    return ""


def _all() -> list[Entry]:
    """All entries, the worst first."""
    return sorted(map(registry.entry, registry.ids()), key=lambda entry: entry.defect.consequence.severity)


def _ends_in(defect: Defect, text: str, has_frames: bool) -> bool:
    pieces = (defect.error if has_frames else defect.message).split(" ... ")
    patterns = [re.escape(piece) + r"\b" * bool(FRAME.fullmatch(piece)) for piece in pieces]
    return re.search(".*".join(patterns), text, re.DOTALL) is not None


def _words(entry: Entry) -> str:
    defect = entry.defect
    facts = (defect.title, entry.explanation, defect.error, defect.way_round, defect.id, defect.where)
    return " ".join((*facts, *defect.upstream, *defect.uses))


def _plain(words: str) -> str:
    return " ".join(words.replace("``", "").lower().split())
