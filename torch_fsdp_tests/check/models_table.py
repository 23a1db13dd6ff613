"""A table of models and configurations of FSDP as HTML, with what is known about each failure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from torch_fsdp_tests.dispatch import page
from torch_fsdp_tests.models.endings import WORDS, Ending, ending_of, reason_of
from torch_fsdp_tests.processes.messages import from_data
from torch_fsdp_tests.verdict import RankResult, State

# For each model, as ``python -m torch_fsdp_tests.check --json`` has them: warnings, and results by configuration.
Models = Mapping[str, Mapping[str, Any]]


def of_run(tests: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> Models:
    """The test cases of a run that are models, from the files and tests of its ``report.json``."""
    tests = [*tests]
    classes = {_class(file, test): test["test"].rpartition(".")[0] for file, test in tests if test.get("configuration")}
    models: dict[str, dict[str, Any]] = {name: {"warnings": [], "configurations": {}} for name in classes}
    for file, test in tests:
        name, method = _class(file, test), test["test"].rpartition(".")[2]
        # One that was skipped in the test process has no facts.
        if name in models and (test.get("configuration") or method.startswith(("test_fsdp", "test_replicate"))):
            models[name]["configurations"][method.removeprefix("test_")] = _result(test)
    return models


def _class(file: Mapping[str, Any], test: Mapping[str, Any]) -> str:
    return f"{file['file']}::{test['test'].rpartition('.')[0]}"


def _result(test: Mapping[str, Any]) -> dict[str, Any]:
    facts = test.get("configuration") or {}
    ranks = [from_data(RankResult, rank) for rank in test["ranks"]]
    ending = ending_of(State(test["outcome"]), ranks)
    if ending is Ending.PASSED and facts.get("is_limit"):
        ending = Ending.LIMIT
    more = {"alone": facts.get("alone", ""), "explained": facts.get("explained", []), "repeat": test["repeat"]}
    return {"outcome": ending.name.lower(), "reason": reason_of(test["reason"], ranks), **more}


def html(models: Models) -> str:
    """The table and a paragraph for each failure. Empty without models."""
    names = {configuration for its in models.values() for configuration in its["configurations"]}
    columns = [("configuration", "c"), *((model.rpartition(":")[2], "c") for model in models)]
    rows = [
        [page.code(name), *(_letter(its["configurations"].get(name)) for its in models.values())]
        for name in sorted(names)
    ]
    used = [
        ending
        for ending in Ending
        if any(ending is _ending(result) for its in models.values() for result in _results(its))
    ]
    words = ", ".join(f"<code>{ending.value}</code> {WORDS[ending]}" for ending in used)
    warnings = (
        f"<p>expected for {page.code(name)}: {page.prose(text)}</p>"
        for name, its in models.items()
        for text in its["warnings"]
    )
    failures = (
        _failure(model, name, result)
        for model, its in models.items()
        for name, result in its["configurations"].items()
        if _ending(result).is_bad
    )
    table = page.table(columns, rows)
    return "".join([*warnings, f"<p class=dim>{words}</p>", table, *failures]) if table else ""


def _results(model: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*model["configurations"].values()]


def _ending(result: Mapping[str, Any]) -> Ending:
    return Ending[result["outcome"].upper()]


def _letter(result: Mapping[str, Any] | None) -> str:
    if result is None:
        return ""
    ending = _ending(result)
    color = "bad" if ending.is_bad else "ok" if ending is Ending.PASSED else "warn"
    return f'<span class={color} title="{escape(WORDS[ending])}">{ending.value}</span>'


def _failure(model: str, configuration: str, result: Mapping[str, Any]) -> str:
    """One line, what explains it with its workaround, and the command that repeats it."""
    lines = [
        result["alone"],
        *(
            f"{each['kind']}: {each['means']}" + f" What to do: {each['advice']}" * bool(each["advice"])
            for each in result["explained"]
        ),
    ]
    listed = "".join(f"<li>{page.prose(line)}</li>" for line in filter(None, lines))
    head = f"{_letter(result)} {page.code(f'{model} {configuration}')}: {page.text(result['reason'])}"
    return f"<p>{head}</p>{f'<ul>{listed}</ul>' if listed else ''}{page.command(result['repeat'])}"
