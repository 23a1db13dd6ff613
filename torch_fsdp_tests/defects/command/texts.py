"""The texts about defects: lines and tables, the script of a reproduction, and a text for torch's issue tracker."""

from __future__ import annotations

import ast
import enum
import functools
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_fsdp_tests.defects import registry
from torch_fsdp_tests.defects.limits import Limit
from torch_fsdp_tests.defects.registry import Answer, Defect, Exposure
from torch_fsdp_tests.verdict import columns, plural

if TYPE_CHECKING:
    from torch_fsdp_tests.defects.command.trial import Finding

_OWN = __name__.partition(".")[0]  # the package


def line(finding: Finding) -> str:
    """The line for one finding."""
    answer = finding.answer.value if not finding.why else f"{finding.answer.value}: {finding.why}"
    return f"{finding.defect.id}  {answer}" + (f"  {finding.seconds:.1f}s" if finding.seconds else "")


def details(finding: Finding) -> str:
    """A defect that is present, with the actual and the expected result."""
    defect = finding.defect
    who = "" if finding.rank is None else f" on rank {finding.rank}"
    lines = [defect.headline, f"    actual{who}    {in_short(finding.found)}"]
    lines.append(f"    expected{' ' * len(who)}  {in_short(finding.right)}")
    return "\n".join(lines + [f"    arguable: {defect.arguable}"] * bool(defect.arguable))


def in_short(value: object) -> str:
    """A value in one line of limited length."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]} ... ({len(text)} characters)"


def counts(findings: Sequence[Finding]) -> str:
    """How many of each answer."""
    return _numbers(Answer, (finding.answer for finding in findings))


def by_exposure(defects: Iterable[Defect]) -> str:
    """How many of each exposure."""
    return _numbers(Exposure, (defect.exposure for defect in defects))


def _numbers(kinds: Iterable[enum.Enum], found: Iterable[enum.Enum]) -> str:
    numbers = Counter(found)
    return ", ".join(f"{numbers[kind]} {kind.value}" for kind in kinds)


def answer(defect: Defect, torch_version: str) -> str:
    """All facts for a user who may have hit the defect."""
    has = {Answer.PRESENT: "has it", Answer.ABSENT: "does not have it", Answer.UNDECIDED: "may have it"}
    here = has.get(defect.expected(torch_version), "does not have what is broken")
    lines = [
        defect.headline,
        f"    torch {torch_version} {here}; {history(defect)}",
        f"    workaround: {defect.workaround}",
        f"    takes: {', '.join(defect.uses)}; at fault: {defect.component.value}",
    ]
    optional = {
        "ends in": defect.message,
        "documented": defect.documented,
        "arguable": defect.arguable,
        "upstream": ", ".join(defect.upstream),
    }
    return "\n".join(lines + [f"    {name}: {words}" for name, words in optional.items() if words])


def limit(limit: Limit) -> str:
    """What a limit means, and what to do."""
    return f"limit: {limit.means}\n    what to do: {limit.advice}"


def sums(found: Sequence[Defect], limits: Sequence[Limit], next_step: str) -> str:
    """How many defects and limits were found, and what to do next."""
    what = "fits" if len(found) == 1 else "fit"
    more = f" ({by_exposure(found)}); --show ID prints a script for one" if found else ""
    none = "" if found or limits else f"; {next_step}; --list shows all"
    also = f"{plural(len(limits), 'limit')} and " if limits else ""
    return f"{also}{plural(len(found), 'known defect')} {what}{more}{none}"


def history(defect: Defect) -> str:
    """Which versions of torch have the defect, as far as the registry knows."""
    versions = registry.versions()
    present = [number for number, version in enumerate(versions) if defect.is_in(version)]
    if not present:
        return f"no version from {versions[0]} to {versions[-1]} has it"
    since = f"since {versions[present[0]]}" + " or earlier" * (present[0] == 0)
    ends = present[-1] + 1
    until = f"fixed in {versions[ends]}" if ends < len(versions) else f"not fixed in {versions[-1]}"
    return f"{since}, {until}" + ("" if defect.was_seen else "; read in torch's source, not seen yet")


def listing(defects: Sequence[Defect]) -> str:
    """A table of ids, kinds and titles, the worst first, and how many they are."""
    rows = [
        (each.id, each.component.value, each.consequence.value, each.exposure.value, each.claim)
        for each in registry.worst_first(defects)
    ]
    unseen = sum(not each.was_seen for each in defects)
    also = f"; {unseen} of them not seen yet" * (unseen > 0)
    return "\n".join([*columns(rows), f"{plural(len(rows), 'known defect')}: {by_exposure(defects)}{also}"])


def script(defect: Defect) -> str:
    """A script that needs only torch (and the defect's package), and runs with ``python`` or under ``torchrun``."""
    doc, own_imports, body = _split(defect.source)
    _, imports, helper = _split(Path(__file__).with_name("launch.py").read_text(encoding="utf-8"))
    lines = sorted({*own_imports, *imports} - {"from __future__ import annotations"}, key=_order)
    merged = "\n\n".join("\n".join(group) for _, group in itertools.groupby(lines, key=lambda line: _order(line)[0]))
    end = f'if __name__ == "__main__":\n    launch(reproduce, world_size={defect.world_size})\n'
    return f"{doc}\n\n{merged}\n\n\n{body}\n\n\n{helper}\n\n\n{end}"


@functools.cache
def _split(source: str) -> tuple[str, list[str], str]:
    """The docstring of a module, its imports with each on one line, and what follows them.

    What only the registry needs is left out: its own names, and the facts, which stand below the imports.
    """
    lines, (doc, *nodes) = source.splitlines(), ast.parse(source).body
    head = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom)) or _holds_facts(node)]
    imports = [ast.unparse(node) for node in head if not _holds_facts(node)]
    rest = "\n".join(lines[head[-1].end_lineno :]).strip()
    return "\n".join(lines[: doc.end_lineno]), [line for line in imports if _OWN not in line], rest


def _holds_facts(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and registry.is_named(node, "DEFECT")


def _order(line: str) -> tuple[bool, bool, str]:
    """The key by which imports are sorted: those of torch come last."""
    return re.match(r"(import|from) torch", line) is not None, line.startswith("from"), line


def issue(finding: Finding) -> str:
    """A text for torch's issue tracker, in Markdown. Collecting torch's environment for it takes seconds."""
    from torch.utils import collect_env

    defect = finding.defect
    who = "" if finding.rank is None else f" (rank {finding.rank})"
    related = f"\nRelated: {', '.join(defect.upstream)}\n" if defect.upstream else ""
    documented = f"\nDocumented: {defect.documented}\n" if defect.documented else ""
    arguable = f"\nOne may argue: {defect.arguable}\n" if defect.arguable else ""
    workaround = f"\nA workaround: {defect.workaround}\n" if defect.workaround != registry.NO_WORKAROUND else ""
    result = (
        f"Actual{who}: `{in_short(finding.found)}`\nExpected: `{in_short(finding.right)}`"
        if finding.answer is Answer.PRESENT
        else f"On this machine: {finding.answer.value}{f' ({finding.why})' if finding.why else ''}."
    )
    return (
        f"# {defect.title}\n\n## What happens\n\n{defect.explanation}\n{documented}{arguable}{workaround}{related}\n"
        f"## Reproduction\n\n```python\n{script(defect)}```\n\n{result}\n\n"
        f"## Where\n\n`{defect.where}`\n\n## Environment\n\n```\n{collect_env.get_pretty_env_info()}\n```\n"
    )
