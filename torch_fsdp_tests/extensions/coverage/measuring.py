"""``--coverage``: runs coverage.py in every test process and in its forked ranks.

It measures the test files, this package, and torch's FSDP with its state dicts. It does not measure separate
interpreters (spawned ranks, programs that a test starts) and killed processes, which cannot save their data.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch_fsdp_tests.dispatch.plan import Job
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.extension import Conclusion, Feature, Rerun

LEAST = (7, 10)  # the first version that can follow a fork and save at os._exit, with which ranks exit
RESULT = ".coverage"  # in the folder of reports
COMBINE_LIMIT = 300.0  # seconds; thousands of ranks leave thousands of small files
OF_TORCH = ("fsdp/*", "_composable/*", "_state_dict_utils.py", "checkpoint/state_dict.py")  # in torch/distributed
_PACKAGE = Path(__file__).resolve().parents[2]
_INSIDE = "coverage"  # a folder in the run's temporary folder


class Coverage(Feature):
    """Measures every test process."""

    traces = "--coverage"

    def __init__(self, run: RunTests) -> None:
        self._run = run

    def problem(self, run: RunTests) -> str | None:
        missing = missing_package()
        return missing and f"--coverage needs {missing}"

    def needs_own_ranks(self, one_host: bool) -> str | None:
        return "--coverage measures only the ranks that this run starts"

    def writes(self) -> Mapping[str, Path]:
        return {"--coverage": self._run.reports}

    def interpreter(self, directory: Path, test_directory: Path) -> Sequence[str]:
        self._directory = directory
        return begin(directory, test_directory)

    def conclude(self, results: Results, rerun: Rerun, jobs: Sequence[Job]) -> Conclusion:
        return Conclusion([end(self._directory, self._run.reports)])


def missing_package() -> str | None:
    """What must be installed first, or None."""
    try:
        version = importlib.metadata.version("coverage")
    except importlib.metadata.PackageNotFoundError:
        return "coverage.py: pip install coverage"
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < LEAST:
        return f"coverage.py {LEAST[0]}.{LEAST[1]} or later, but {version} is installed: pip install -U coverage"
    return None


def begin(directory: Path, test_directory: Path) -> tuple[str, ...]:
    """Prepare a folder inside the run's folder, and return interpreter arguments that measure a process."""
    folder = directory / _INSIDE
    folder.mkdir()
    settings = folder / "settings"
    measured = [f"{test_directory}/*", f"{_PACKAGE}/*", *(f"*/torch/distributed/{pattern}" for pattern in OF_TORCH)]
    lines = ["[run]", "parallel = true", "patch =", "  fork", "  _exit", f"data_file = {folder / RESULT}", "include ="]
    settings.write_text("\n".join([*lines, *(f"  {pattern}" for pattern in measured), ""]))
    return "-m", "coverage", "run", "--rcfile", str(settings)


def end(directory: Path, reports: Path) -> str:
    """Combine the data of all processes into one file in the folder of reports, and say where it is."""
    folder, result = directory / _INSIDE, reports / RESULT
    reports.mkdir(parents=True, exist_ok=True)
    result.unlink(missing_ok=True)  # so that the data belongs to this run
    command = ["combine", "--quiet", "--rcfile", str(folder / "settings"), "--data-file", str(result), str(folder)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "coverage", *command], capture_output=True, text=True, timeout=COMBINE_LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"coverage: the results were not combined within {COMBINE_LIMIT:g} s"
    if done.returncode != 0:
        return f"coverage: {(done.stdout + done.stderr).strip() or 'combining failed'}"
    return f"coverage: python -m coverage report --data-file {result}"
