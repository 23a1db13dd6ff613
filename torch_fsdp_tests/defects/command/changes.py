"""What changes for users of FSDP from one version of torch to another: release notes for FSDP."""

from __future__ import annotations

from typing import NamedTuple

from torch_fsdp_tests.defects import registry
from torch_fsdp_tests.defects.registry import Defect, InvalidQuery
from torch_fsdp_tests.installed_torch import torch_facts
from torch_fsdp_tests.installed_torch.version_ranges import dotted, version_fits


class Between(NamedTuple):
    """The defects of only one of two versions, and sentences about FSDP and what it depends on.

    ``introduced`` are those of features that both versions have, and ``in_new_features`` the others.
    """

    fixed: list[Defect]
    introduced: list[Defect]
    in_new_features: list[Defect]
    new: list[str]
    changed: list[str]

    def sections(self) -> dict[str, list[Defect] | list[str]]:
        """The changes by title, without empty lists."""
        titles: dict[str, list[Defect] | list[str]] = {"Fixed": self.fixed, "Introduced": self.introduced}
        titles |= {"In new features": self.in_new_features, "New": self.new, "Changed": self.changed}
        return {title: each for title, each in titles.items() if each}


def between(older: str, newer: str) -> Between:
    """What changed between two of ``registry.versions()``. Raises :class:`InvalidQuery` for others."""
    known = registry.versions()
    for version in (older, newer):
        if version not in known:
            raise InvalidQuery(f"the registry knows torch {known[0]} to {known[-1]}, and not {version}")
    if known.index(older) >= known.index(newer):
        raise InvalidQuery(f"{older} is not older than {newer}")
    defects = registry.defects()
    facts = [
        (f"torch {dotted(fact.since)} {fact.says}.", fact)
        for fact in sorted(torch_facts.facts().values(), key=lambda fact: fact.since)
        if not fact.fixes and dotted(fact.since) in known[known.index(older) + 1 : known.index(newer) + 1]
    ]
    only_newer = [defect for defect in defects if defect.is_in(newer) and not defect.is_in(older)]
    return Between(
        [defect for defect in defects if defect.is_in(older) and not defect.is_in(newer)],
        [defect for defect in only_newer if version_fits(older, f">={defect.since}")],
        [defect for defect in only_newer if not version_fits(older, f">={defect.since}")],
        [sentence for sentence, fact in facts if fact.is_new],
        [sentence for sentence, fact in facts if not fact.is_new],
    )


def text(older: str, newer: str) -> str:
    """The changes for a terminal."""
    parts = [f"FSDP from torch {older} to {newer}"]
    for title, changes in between(older, newer).sections().items():
        lines = [_line(each, older) if isinstance(each, Defect) else each for each in changes]
        parts.append(f"{title} ({len(changes)})\n" + "\n".join(f"  {line}" for line in lines))
    return "\n\n".join(parts)


def _line(defect: Defect, older: str) -> str:
    """The defect, and the first version after the older one that differs in it."""
    known, has = registry.versions(), defect.is_in(older)
    later = known[known.index(older) :]
    change = next((version for version in later if defect.is_in(version) is not has), "")
    return f"{defect.headline} ({'fixed in' if has else 'since'} {change})"
