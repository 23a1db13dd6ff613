"""The table of a check, and what is known about each failure, as text, data and HTML."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from torch_fsdp_tests.check import models_table
from torch_fsdp_tests.check.checking import Checked
from torch_fsdp_tests.dispatch import page
from torch_fsdp_tests.models.endings import WORDS, Ending
from torch_fsdp_tests.models.survey import Survey
from torch_fsdp_tests.verdict import plural

PROGRAM = "python -m torch_fsdp_tests.check"


def text(findings: Sequence[Checked], surveys: Mapping[str, Survey]) -> str:
    """The whole report: the units, what was expected to fail, the table, and a paragraph for each failure."""
    heads = [line for model, survey in surveys.items() for line in _heads(model, survey)]
    return "\n\n".join(filter(None, ["\n".join(heads), table(findings), *_paragraphs(findings), _summary(findings)]))


def _heads(model: str, survey: Survey) -> Iterator[str]:
    yield f"{model}: {survey.units_in_words}"
    yield from (f"expected for {model}: {each}" for each in survey.expected)


def _paragraphs(findings: Sequence[Checked]) -> Iterator[str]:
    """One for all failures with the same words, and one for what was dropped or skipped."""
    alike: dict[tuple[object, ...], list[Checked]] = {}
    for finding in findings:
        if finding.ending.is_bad:
            alike.setdefault((finding.model, finding.ending, finding.reason, finding.explained), []).append(finding)
    yield from ("\n".join(_paragraph(some)) for some in alike.values())
    said: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        words = (*finding.without, *[finding.reason] * (finding.ending is Ending.SKIPPED and not finding.without))
        for each in words:
            said.setdefault((finding.model, each), []).append(finding.configuration)
    yield "\n".join(f"{model} {', '.join(names)}: {words}" for (model, words), names in said.items())


def table(findings: Sequence[Checked]) -> str:
    """A row for each configuration and a column for each model, below the models' names."""
    models = list(dict.fromkeys(finding.model for finding in findings))
    rows = sorted({finding.configuration for finding in findings})
    letters = {(finding.configuration, finding.model): finding.ending.value for finding in findings}
    width = max(map(len, rows), default=0)
    heads = [f"{'':{width}} {'| ' * index}{model}" for index, model in enumerate(models)]
    lines = [f"{row:{width}} {' '.join(letters.get((row, model), ' ') for model in models)}".rstrip() for row in rows]
    used = [ending for ending in Ending if any(finding.ending is ending for finding in findings)]
    return "\n".join([*heads, *lines, ", ".join(f"{ending.value} {WORDS[ending]}" for ending in used)])


def _paragraph(alike: Sequence[Checked]) -> Iterator[str]:
    first = alike[0]
    names = ", ".join(finding.configuration for finding in alike)
    yield f"{first.ending.value} {first.model} {names}: {first.reason}"
    yield from (f"    {each}" for each in dict.fromkeys(finding.alone for finding in alike if finding.alone))
    yield from (f"    {cause.in_full}" for cause in first.explained)
    yield f"    repeat: {repeat_command(first)}"


def _summary(findings: Sequence[Checked]) -> str:
    bad, skipped = (
        sum(map(chosen, findings))
        for chosen in (lambda each: each.ending.is_bad, lambda each: each.ending is Ending.SKIPPED)
    )
    seconds = sum(finding.seconds for finding in findings)
    return f"{plural(len(findings), 'configuration')}, {bad} failed, {skipped} skipped, in {seconds:.0f} s"


def repeat_command(finding: Checked) -> str:
    return f"{PROGRAM} {shlex.quote(finding.model)} --only {finding.configuration}"


def as_data(findings: Iterable[Checked], surveys: Mapping[str, Survey], facts: Mapping[str, str]) -> Any:
    """The report for programs, with the tracebacks."""
    models: dict[str, dict[str, Any]] = {
        model: {"units": survey.units, "warnings": [str(each) for each in survey.expected], "configurations": {}}
        for model, survey in surveys.items()
    }
    for finding in findings:
        models[finding.model]["configurations"][finding.configuration] = {
            "outcome": finding.ending.name.lower(),
            "seconds": round(finding.seconds, 3),
            "reason": finding.reason,
            "alone": finding.alone,
            "without": list(finding.without),
            "explained": [cause._asdict() for cause in finding.explained],
            "repeat": repeat_command(finding),
            "text": finding.text,
        }
    return {"version": 1, "torch": torch.__version__, **facts, "models": models}


def as_html(data: Mapping[str, Any]) -> str:
    """One page with what :func:`as_data` returns."""
    title = f"FSDP of torch {data['torch']} on {data['device']} with {data['backend']}"
    return page.document(
        title, [f"<div class=kind>check of models</div><h1>{page.text(title)}</h1>", models_table.html(data["models"])]
    )
