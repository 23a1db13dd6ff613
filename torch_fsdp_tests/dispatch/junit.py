"""JUnit files in upstream's directory layout: ``DIR/<dotted file>/TEST-<dotted file>-<class>-<part>.xml``."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from torch_fsdp_tests import installation
from torch_fsdp_tests.device import machine
from torch_fsdp_tests.dispatch.atomic import write_text
from torch_fsdp_tests.dispatch.file_result import FileResult
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.verdict import State, TestResult, clean, columns, describe, rank_rows

OF_FILE = "file"  # replaces the class in results about the whole file


def write(folder: Path, results: Results) -> None:
    """Write one file for each test class of each job. Raises ``OSError``."""
    facts = results.facts()
    about = {"torch_fsdp_tests": installation.version()}
    about |= {name: facts[name] for name in facts if name in ("torch", "device", "backend")}
    about |= machine.titled(facts.get("machine") or {})
    for feature in results.run.features.values():
        about |= feature.properties(results)
    for file in results.files:
        dotted = file.job.part.name.replace("/", ".")
        by_class: dict[str, list[list[TestResult]]] = {}
        for attempts in file.history().values():
            by_class.setdefault(attempts[-1].class_name or OF_FILE, []).append(attempts)
        for cls, tests in by_class.items():
            suite = _suite(file, f"{dotted}.{cls}", cls, tests)
            properties = ET.Element("properties")
            for key, value in about.items():
                ET.SubElement(properties, "property", {"name": key, "value": clean(str(value))})
            suite.insert(0, properties)
            part = f"-{file.job.part.shard}" if file.job.part.num_shards > 1 else ""
            text = ET.tostring(suite, encoding="unicode", xml_declaration=False)
            name = re.sub(r"[^\w.-]", "_", f"TEST-{dotted}.{cls}{part}.xml")
            write_text(folder / dotted / name, f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n')


def _suite(file: FileResult, name: str, cls: str, tests: list[list[TestResult]]) -> ET.Element:
    last = [attempts[-1] for attempts in tests]
    tags = [_tag(test.outcome) for test in last]
    suite = ET.Element("testsuite", {"name": name, "tests": str(len(last))})
    for key, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(key, str(tags.count(tag)))
    suite.set("time", f"{sum(t.seconds for t in last):.6f}")
    for attempts in tests:
        suite.append(_case(file, cls, attempts))
    return suite


def _case(file: FileResult, cls: str, attempts: list[TestResult]) -> ET.Element:
    test = attempts[-1]
    about = {
        "name": clean(test.method),
        "classname": cls,
        "file": f"{file.job.part.name}.py",
        "time": f"{test.seconds:.6f}",
    }
    case = ET.Element("testcase", about)
    if tag := _tag(test.outcome):
        case.append(_element(tag, test))
    for earlier in attempts[:-1]:
        if earlier.outcome.is_bad:
            kind = "rerun" if test.outcome.is_bad else "flaky"
            case.append(_element(f"{kind}{str(_tag(earlier.outcome)).capitalize()}", earlier))
    return case


def _tag(outcome: State) -> str | None:
    """Return the tag of an outcome. JUnit has three tags for tests that did not pass; ``type`` distinguishes ours.

    Readers of JUnit count a test without a tag as passed. So a test that failed as expected has the tag of a skip, as
    pytest writes it.
    """
    if not outcome.is_bad:
        return None if outcome.counted_as is State.PASSED else "skipped"
    if outcome in (State.FAILED, State.UNEXPECTED_SUCCESS, State.LEAKED):
        return "failure"
    return "error"


def _element(tag: str, test: TestResult) -> ET.Element:
    """Return the result of a test, with one entry for each rank if it had ranks."""
    element = ET.Element(tag, {"message": clean(test.reason or test.outcome.value), "type": test.outcome.value})
    table = "\n".join(columns(rank_rows(test.ranks)))
    element.text = clean("\n\n".join(filter(None, [table, describe(test.ranks, test.text)])))
    return element
