"""JUnit files in upstream's directory layout: ``DIR/<dotted file>/TEST-<dotted file>-<class>-<part>.xml``."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from torch_fsdp_tests.dispatch.atomic import write_text
from torch_fsdp_tests.dispatch.result import FILE_ITSELF, FileResult, Outcome, TestResult
from torch_fsdp_tests.dispatch.results import Results

# What XML 1.0 cannot hold, and the escape character that Jenkins and GitLab refuse with it.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


OF_FILE = "file"  # stands where a class would, for what concerns the whole file


def clean(text: str) -> str:
    """The text with what XML cannot hold written out, as in ``\\x1b``."""
    return _FORBIDDEN.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), text)


def write(folder: Path, results: Results) -> None:
    """One file for each test class of each job. Raises ``OSError``."""
    for file in results.files:
        dotted = file.job.part.name.replace("/", ".")
        for cls, tests in _by_class(file).items():
            suite = _suite(file, f"{dotted}.{cls}", cls, tests)
            part = f"-{file.job.part.shard}" if file.job.part.num_shards > 1 else ""
            text = ET.tostring(suite, encoding="unicode", xml_declaration=False)
            name = re.sub(r"[^\w.-]", "_", f"TEST-{dotted}.{cls}{part}.xml")
            write_text(folder / dotted / name, f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n')


def _by_class(file: FileResult) -> dict[str, list[list[TestResult]]]:
    found: dict[str, list[list[TestResult]]] = {}
    for name, attempts in file.history().items():
        cls = "" if name == FILE_ITSELF else attempts[-1].class_name
        found.setdefault(cls or OF_FILE, []).append(attempts)
    return found


def _suite(file: FileResult, name: str, cls: str, tests: list[list[TestResult]]) -> ET.Element:
    last = [attempts[-1] for attempts in tests]
    counts = {
        "tests": len(last),
        "failures": sum(t.outcome in (Outcome.FAILED, Outcome.UNEXPECTED_SUCCESS) for t in last),
        "errors": sum(t.outcome is Outcome.ERROR for t in last),
        "skipped": sum(t.outcome in (Outcome.SKIPPED, Outcome.NOT_RUN) for t in last),
        "time": f"{sum(t.seconds for t in last):.6f}",
    }
    suite = ET.Element("testsuite", {"name": name, **{key: str(value) for key, value in counts.items()}})
    for attempts in tests:
        suite.append(_case(file, cls, attempts))
    return suite


def _case(file: FileResult, cls: str, attempts: list[TestResult]) -> ET.Element:
    test = attempts[-1]
    about = {
        "name": clean(test.method if test.name != FILE_ITSELF else "(import)"),
        "classname": cls,
        "file": f"{file.job.part.name}.py",
        "time": f"{test.seconds:.6f}",
    }
    case = ET.Element("testcase", about)
    tags = {
        Outcome.FAILED: "failure", Outcome.UNEXPECTED_SUCCESS: "failure", Outcome.ERROR: "error",
        Outcome.SKIPPED: "skipped", Outcome.NOT_RUN: "skipped",
    }  # fmt: skip
    tag = tags.get(test.outcome)
    if tag is not None:
        text = test.text.strip()
        summary = test.reason or (text.splitlines() or [test.outcome.value])[0 if "ended the process" in text else -1]
        ET.SubElement(case, tag, {"message": clean(summary), "type": test.outcome.value}).text = clean(test.text)
    for earlier in attempts[:-1]:
        if earlier.outcome.is_bad and not test.outcome.is_bad:
            kind = "flakyError" if earlier.outcome is Outcome.ERROR else "flakyFailure"
        elif earlier.outcome.is_bad:
            kind = "rerunError" if earlier.outcome is Outcome.ERROR else "rerunFailure"
        else:
            continue
        message = (earlier.text.strip().splitlines() or [earlier.outcome.value])[-1]
        ET.SubElement(case, kind, {"message": clean(message), "type": earlier.outcome.value}).text = clean(earlier.text)
    return case
