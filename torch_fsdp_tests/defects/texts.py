"""The texts about defects: lines and tables, the script of a reproduction, and a text for torch's issue tracker."""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Sequence

from torch_fsdp_tests.defects import registry
from torch_fsdp_tests.defects.registry import Answer, Defect, Entry
from torch_fsdp_tests.defects.trial import Finding


def line(finding: Finding) -> str:
    """The line for one finding."""
    answer = finding.answer.value if not finding.why else f"{finding.answer.value}: {finding.why}"
    return f"{finding.defect.id}  {answer}" + (f"  {finding.seconds:.1f}s" if finding.seconds else "")


def details(finding: Finding) -> str:
    """A defect that is present, with what was found and what is right."""
    defect = finding.defect
    who = "" if finding.rank is None else f" on rank {finding.rank}"
    lines = [f"{defect.id} ({defect.consequence.value}): {defect.title}"]
    lines.append(f"    found{who}  {shown(finding.found)}")
    lines.append(f"    right{' ' * len(who)}  {shown(finding.right)}")
    if defect.arguable:
        lines.append(f"    arguable: {defect.arguable}")
    return "\n".join(lines)


def shown(value: object) -> str:
    """A value in one line of limited length."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 300 else f"{text[:300]} ... ({len(text)} characters)"


def counts(findings: Sequence[Finding]) -> str:
    """The last line: how many of each answer."""
    numbers = Counter(finding.answer for finding in findings)
    return ", ".join(f"{numbers[answer]} {answer.value}" for answer in Answer)


def worst_first(defects: Sequence[Defect]) -> list[Defect]:
    """By consequence, then by id."""
    return sorted(defects, key=lambda defect: (defect.consequence.severity, defect.id))


def listing(defects: Sequence[Defect]) -> str:
    """A table of ids, families, consequences and titles."""
    width = max((len(defect.id) for defect in defects), default=0)
    return "\n".join(
        f"{defect.id:{width}}  {defect.family}  {defect.consequence.value:18}  {defect.title}"
        for defect in worst_first(defects)
    )


def script(entry: Entry) -> str:
    """A script that needs only torch (and the defect's package), and runs with ``python`` or under ``torchrun``."""
    from torch_fsdp_tests.defects import launch

    body = registry.without_registry(entry.source).rstrip()
    helper = inspect.getsource(launch).partition("from __future__ import annotations\n")[2].strip()
    imports, definitions = _split_imports(helper)
    own_imports, own_body = _split_imports(body)
    doc, own_imports = _split_docstring(own_imports)
    merged = _sorted_imports(own_imports + imports)
    end = f'if __name__ == "__main__":\n    launch(reproduce, world_size={entry.defect.world_size})\n'
    return f"{doc}\n\n{merged}\n\n\n{own_body.strip()}\n\n\n{definitions.strip()}\n\n\n{end}"


def _split_imports(source: str) -> tuple[list[str], str]:
    """The lines up to the last import at the top, and the rest."""
    lines = source.splitlines()
    last = max((n for n, text in enumerate(lines) if re.match(r"(import|from) \w", text)), default=-1)
    while (last + 1 < len(lines) and lines[last].endswith("(")) or (lines[last].startswith("    ")):
        last += 1
    return lines[: last + 1], "\n".join(lines[last + 1 :])


def _split_docstring(lines: list[str]) -> tuple[str, list[str]]:
    ends = [n for n, text in enumerate(lines) if text.rstrip().endswith('"""')]
    return "\n".join(lines[: ends[0] + 1]), lines[ends[0] + 1 :]


def _sorted_imports(lines: list[str]) -> str:
    wanted = sorted({text for text in lines if text.strip()}, key=lambda text: (text.startswith("from"), text))
    torchs = [text for text in wanted if re.match(r"(import|from) torch", text)]
    others = [text for text in wanted if text not in torchs]
    return "\n".join(others) + "\n\n" + "\n".join(torchs)


def issue(entry: Entry, finding: Finding) -> str:
    """A text for torch's issue tracker, in Markdown. Collecting torch's environment for it takes seconds."""
    from torch.utils import collect_env

    defect = entry.defect
    who = "" if finding.rank is None else f" (rank {finding.rank})"
    related = f"\nRelated: {', '.join(defect.upstream)}\n" if defect.upstream else ""
    arguable = f"\nOne may argue: {defect.arguable}\n" if defect.arguable else ""
    result = (
        f"Found{who}: `{shown(finding.found)}`\nRight: `{shown(finding.right)}`"
        if finding.answer is Answer.PRESENT
        else f"On this machine: {finding.answer.value}{f' ({finding.why})' if finding.why else ''}."
    )
    return (
        f"# {defect.title}\n\n## What happens\n\n{entry.explanation}\n{arguable}{related}\n"
        f"## Reproduction\n\n```python\n{script(entry)}```\n\n{result}\n\n"
        f"## Where\n\n`{defect.where}`\n\n## Environment\n\n```\n{collect_env.get_pretty_env_info()}\n```\n"
    )


MARK = {"present": "present", "absent": "-", "cannot be tried here": "n/a", "could not be decided": "?"}


def table() -> str:
    """A table of defects by version, in Markdown, from the answers on each version."""
    seen = registry.recorded()["seen"]
    versions = sorted(seen, key=lambda version: [int(part) for part in version.split(".")])
    rows = ["| defect | family | consequence | " + " | ".join(versions) + " |", "|---" * (3 + len(versions)) + "|"]
    for defect in worst_first([registry.entry(id).defect for id in registry.ids()]):
        marks = [MARK.get(seen[version].get(defect.id, ""), " ") for version in versions]
        arguable = " (arguable)" if defect.arguable else ""
        title = f"{defect.title}{arguable}<br>`{defect.id}`"
        rows.append(f"| {title} | {defect.family} | {defect.consequence.value} | {' | '.join(marks)} |")
    return "\n".join(rows)
