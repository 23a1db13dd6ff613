"""A page about all defects: which version of torch has which, what changed, the workarounds, and the scripts."""

from __future__ import annotations

import enum
import itertools
from collections import Counter
from collections.abc import Collection, Iterable
from html import escape

from torch_fsdp_tests.defects import registry
from torch_fsdp_tests.defects.command import changes, texts
from torch_fsdp_tests.defects.registry import Answer, Component, Consequence, Defect, Exposure
from torch_fsdp_tests.dispatch import page
from torch_fsdp_tests.dispatch.features import FEATURES
from torch_fsdp_tests.dispatch.page import Section

# The mark of an answer, its class, and what it means.
MARKS = {
    Answer.PRESENT: ("✗", "bad", "has the defect"),
    Answer.ABSENT: ("✓", "ok", "does not have it"),
    Answer.CANNOT_BE_TRIED: ("·", "none", "does not have what is broken"),
}
EXPOSURES = {
    Exposure.DEFAULT: "with default settings",
    Exposure.COMMON: "with a common option",
    Exposure.RARE: "in rare cases",
    Exposure.HARDWARE: "on accelerators only",
}
WORST = 10


def render() -> str:
    """The page, which needs no other file."""
    versions = registry.versions()
    defects = registry.defects()
    used = {short for defect in defects for short in defect.uses}
    filters = page.filters(
        _values(Consequence, {each.consequence for each in defects}),
        [feature.name for feature in FEATURES if feature.short in used],
        things="defects",
        kinds="consequences",
        exposure=_values(Exposure, {each.exposure for each in defects}),
        component=_values(Component, {each.component for each in defects}),
    )
    present = [defect for defect in defects if defect.is_in(versions[-1])]
    worst = sorted(present, key=lambda defect: defect.exposure.position)[:WORST]  # what most users may meet
    steps = [_changes(older, newer) for older, newer in itertools.pairwise(versions)]
    parts = [
        Section(f"The worst of torch {versions[-1]}", _list(worst)),
        Section("Defects", _defects(defects, versions), len(defects), has_items=True),
        Section("What changed", "".join(reversed(steps))),
    ]
    title = f"Known defects of FSDP in torch {versions[0]} to {versions[-1]}"
    return page.document(title, [_head(defects, versions), page.sections(parts, filters)])


def _values(kind: type[enum.Enum], used: Collection[enum.Enum]) -> list[str]:
    return [member.value for member in kind if member in used]


def _head(defects: list[Defect], versions: list[str]) -> str:
    oldest, newest = versions[0], versions[-1]
    exposures = Counter(defect.exposure for defect in defects if defect.is_in(newest) and defect.was_seen)
    total = changes.between(oldest, newest)
    boxes = [
        *((str(exposures[exposure]), words, "bad") for exposure, words in EXPOSURES.items()),
        (str(len(total.fixed)), f"fixed since {oldest}", "ok"),
        (str(len(total.introduced)), f"introduced since {oldest}", "warn"),
    ]
    return (
        "<div class=kind>torch_fsdp_tests</div><h1>Known defects of torch's FSDP</h1><p class=lead>Which versions "
        f"have each one, the workaround, and a script that shows it. Torch {newest} has:</p>{page.sums(boxes)}"
    )


def _defects(defects: list[Defect], versions: list[str]) -> str:
    """A folded line with a column for each version, and all about the defect below it."""
    columns = f"<span class=versions>{''.join(f'<span>{version}</span>' for version in versions)}</span>"
    words = "".join(f"<span><span class={kind}>{mark}</span> {means}</span>" for mark, kind, means in MARKS.values())
    parts = [f"<div class='dim small key'>{words}</div>"]
    for consequence, its in itertools.groupby(defects, key=lambda defect: defect.consequence):
        lines = "".join(_defect(defect, versions) for defect in its)
        head = f"<div class=columns><h3 class=what>{consequence.value.capitalize()}</h3>{columns}</div>"
        parts.append(f"<div {page.CONTAINER}>{head}{lines}</div>")
    return "".join(parts)


def _mark(answer: Answer, version: str) -> str:
    mark, kind, means = MARKS.get(answer, ("?", "warn", "may have it"))  # as for a new defect
    return f'<span class="{kind}" data-title="{version}" title="torch {version} {means}">{mark}</span>'


def _defect(defect: Defect, versions: list[str]) -> str:
    names = [feature.name for feature in FEATURES if feature.short in defect.uses]
    marks = "".join(_mark(defect.expected(f"{version}.0"), version) for version in versions)
    component, exposure = defect.component.value, defect.exposure.value
    others = [name for name in names if name != component]
    unseen = ["not seen yet"] * (not defect.was_seen)
    about = page.above(page.prose(defect.claim), escape(", ".join([exposure, component, *unseen, *others])))
    head = f"<span class=what>{about}</span><span class='versions small'>{marks}</span>"
    upstream = [f'<a href="{escape(url)}">{escape(url.partition("github.com/")[2])}</a>' for url in defect.upstream]
    facts = {
        "Workaround": page.prose(defect.workaround),
        "Versions": page.text(texts.history(defect)),
        "Ends in": page.code(defect.message) * bool(defect.message),
        "Where": page.code(defect.where),
        "Documented": page.prose(defect.documented) * bool(defect.documented),
        "Arguable": page.prose(defect.arguable),
        "Upstream": ", ".join(upstream),
        "Name": page.code(defect.id),
    }
    facts_list = page.facts((title, value) for title, value in facts.items() if value)
    explanation = "".join(f"<p>{page.prose(paragraph)}</p>" for paragraph in defect.explanation.split("\n\n"))
    script = page.folded("Script", page.pre(texts.script(defect)))
    kinds = page.item(defect.consequence.value, names, is_test=True, exposure=exposure, component=component)
    attributes = f'class=file id="{defect.id}" {kinds}'
    return page.folded(head, f"<div class=inside>{explanation}{facts_list}{script}</div>", attributes=attributes)


def _changes(older: str, newer: str) -> str:
    """The changes from one version to the next, folded under their numbers."""
    sections = changes.between(older, newer).sections()
    lists = "".join(f"<h3>{title}</h3>{_list(each)}" for title, each in sections.items())
    counts = ", ".join(f"{title.lower()}: {len(each)}" for title, each in sections.items())
    return page.folded(f"torch {newer} <span class='dim small'>{counts}</span>", lists)


def _kinds(defect: Defect) -> str:
    return f"{defect.consequence.value}, {defect.exposure.value}, {defect.component.value}"


def _list(changed: Iterable[Defect | str]) -> str:
    lines = [
        f'<a href="#{each.id}">{page.prose(each.claim)}</a> <span class="dim small">{_kinds(each)}</span>'
        if isinstance(each, Defect)
        else page.prose(each)
        for each in changed
    ]
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"
