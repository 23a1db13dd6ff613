"""Invented results of runs, for tests of reports, pages and comparisons."""

from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch import features, report
from torch_fsdp_tests.dispatch.file_result import Attempt, EndKind, FileResult, ProcessEnd
from torch_fsdp_tests.dispatch.plan import Job, ShardedTest, TestRun
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.dispatch.runtests import RunTests, Selection
from torch_fsdp_tests.verdict import State, TestResult, tally

MACHINE = {"cpu": "Abacus 9", "instruction_sets": "AVX2", "blas": "mkl", "threads": 2, "memory": 5.5}
RUN = RunTests(Selection(Path("test"), Path("test")))


def file_of(*tests: TestResult, name: str = "test_x", ended: float = 1.0, **more: Any) -> FileResult:
    """The result of a file with these tests, which ran once."""
    job = Job(ShardedTest(TestRun(name)), 0)
    return FileResult((Attempt(job, ProcessEnd(EndKind.EXITED, 0), tests, 0.0, ended, **more),))


def a_test(name: str, outcome: State = State.PASSED, **more: Any) -> dict[str, Any]:
    """A test in the format of ``report.json``."""
    test = TestResult(outcome, name=name, seconds=0.5, facts={"world_size": 2})
    return report._test(Results(RUN), file_of(test), test, flaky=False) | {"repeat": "", **more}


def a_file(name: str, *tests: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A file in the format of ``report.json``."""
    file = report._file(Results(RUN), file_of(name=name, ended=9.5, assigned=(0,)))
    failed = any(State(test["outcome"]).is_bad for test in tests)
    return file | {"estimate": 3.0, "tests": list(tests), "failed": failed, **more}


def a_report(*files: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A ``report.json`` of these files."""
    facts = {"machine": MACHINE, "torch": "2.13.0", "device": "cpu", "backend": "gloo", "ranks": 4}
    facts |= {"device_count": 0, "capabilities": ["fork"]}
    data = report.as_json(Results(RUN, seconds=20.0, slots=["slot 1", "slot 2"], under_test=facts))
    data |= {"suite": {"version": "0.1.0", "commit": "abc1234"}, "date": "2026-01-02T03:04:05+00:00"}
    data |= {"host": "machine-1", "python": "3.11.7"}
    counts = tally(test["outcome"] for file in files for test in file["tests"])
    data |= {state.value: counts[state] for state in (State.PASSED, State.FAILED, State.SKIPPED)}
    data |= {"files": list(files), "features": features.summary(files), "exit_code": int(counts[State.FAILED] > 0)}
    return data | more


def report_of(*tests: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A ``report.json`` of a file with these tests."""
    return a_report(a_file("test_x", *tests), **more)
