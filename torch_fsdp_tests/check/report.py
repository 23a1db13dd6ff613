"""The table of a check, and what is known about each failure, as text and JSON."""

from __future__ import annotations

import functools
import itertools
import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_fsdp_tests.check.checking import WORDS, Finding, Kind
from torch_fsdp_tests.defects import limits
from torch_fsdp_tests.defects.command import find
from torch_fsdp_tests.defects.registry import NO_WORKAROUND, Answer, Defect
from torch_fsdp_tests.verdict import plural

PROGRAM = "python -m torch_fsdp_tests.check"
_MOST = 2  # known defects that are named for one failure


def text(findings: Sequence[Finding], warnings: Mapping[str, Sequence[object]]) -> str:
    """The whole report: what was expected to fail, the table, and a paragraph for each failure."""
    failures = ["\n".join(_paragraph(finding)) for finding in findings if finding.kind.is_bad]
    expected = [f"expected for {model}: {each}" for model, some in warnings.items() for each in some]
    return "\n\n".join(filter(None, ["\n".join(expected), table(findings), *failures, _summary(findings)]))


def table(findings: Sequence[Finding]) -> str:
    """A row for each configuration and a column for each model, below the models' names."""
    models = list(dict.fromkeys(finding.model for finding in findings))
    rows = sorted({finding.configuration for finding in findings})
    letters = {(finding.configuration, finding.model): finding.kind.value for finding in findings}
    width = max(map(len, rows), default=0)
    heads = [f"{'':{width}} {'| ' * index}{model}" for index, model in enumerate(models)]
    lines = [f"{row:{width}} {' '.join(letters.get((row, model), ' ') for model in models)}".rstrip() for row in rows]
    used = [kind for kind in Kind if any(finding.kind is kind for finding in findings)]
    return "\n".join([*heads, *lines, ", ".join(f"{kind.value} {WORDS[kind]}" for kind in used)])


def _paragraph(finding: Finding) -> Iterator[str]:
    yield f"{finding.kind.value} {finding.model} {finding.configuration}: {finding.reason}"
    if finding.alone:
        yield f"    {finding.alone}"
    for limit in limits.explaining(finding.text)[:1]:
        yield f"    limit: {limit.means}"
        yield f"    what to do: {limit.advice}"
    for defect in explaining(finding):
        yield f"    known: {defect.headline}"
        if defect.workaround != NO_WORKAROUND:
            yield f"    workaround: {defect.workaround}"
    yield f"    repeat: {repeat_command(finding)}"


def _summary(findings: Sequence[Finding]) -> str:
    bad, skipped = (
        sum(map(chosen, findings)) for chosen in (lambda each: each.kind.is_bad, lambda each: each.kind is Kind.SKIPPED)
    )
    seconds = sum(finding.seconds for finding in findings)
    return f"{plural(len(findings), 'configuration')}, {bad} failed, {skipped} skipped, in {seconds:.0f} s"


def repeat_command(finding: Finding) -> str:
    return f"{PROGRAM} {shlex.quote(finding.model)} --only {finding.configuration}"


@functools.cache
def explaining(finding: Finding) -> tuple[Defect, ...]:
    """The known defects of the installed PyTorch that raise such an error. A mismatch has no traceback of torch."""
    if finding.kind is not Kind.RAISED:
        return ()
    present = (defect for defect in find.fitting(finding.text) if defect.expected_here() is not Answer.ABSENT)
    return tuple(itertools.islice(present, _MOST))


def as_json(findings: Iterable[Finding], warnings: Mapping[str, Sequence[object]], facts: Mapping[str, str]) -> str:
    """The report for programs, with the tracebacks."""
    models: dict[str, dict[str, Any]] = {
        model: {"warnings": [str(each) for each in some], "configurations": {}} for model, some in warnings.items()
    }
    for finding in findings:
        models[finding.model]["configurations"][finding.configuration] = {
            "outcome": finding.kind.name.lower(),
            "seconds": round(finding.seconds, 3),
            "reason": finding.reason,
            "alone": finding.alone,
            "limits": [limit.id for limit in limits.explaining(finding.text)[:1]],
            "defects": [defect.id for defect in explaining(finding)],
            "repeat": repeat_command(finding),
            "text": finding.text,
        }
    return json.dumps({"version": 1, "torch": torch.__version__, **facts, "models": models}, indent=1)
