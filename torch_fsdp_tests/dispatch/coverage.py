"""``--coverage``: runs coverage.py in every test process and in its forked ranks.

It measures the test files, this package, and torch's FSDP with its state dicts. It does not measure separate
interpreters (spawned ranks, programs that a test starts) and killed processes, which cannot save their data.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

from torch_fsdp_tests.reach import recording
from torch_fsdp_tests.verdict import events

LEAST = (7, 10)  # the first version that can follow a fork and save at os._exit, with which ranks exit
RESULT = ".coverage"  # in the folder of reports
COMBINE_LIMIT = 300.0  # seconds; thousands of ranks leave thousands of small files
OF_TORCH = ("fsdp/*", "_composable/*", "_state_dict_utils.py", "checkpoint/state_dict.py")  # in torch/distributed
_PACKAGE = Path(__file__).resolve().parents[1]
_INSIDE = "coverage"  # a folder in the run's temporary folder


def missing_package() -> str | None:
    """What must be installed first, or None."""
    try:
        version = importlib.metadata.version("coverage")
    except importlib.metadata.PackageNotFoundError:
        return "coverage.py: pip install coverage"
    if tuple(map(int, re.findall(r"\d+", version)[:2])) < LEAST:
        return f"coverage.py {LEAST[0]}.{LEAST[1]} or later, but {version} is installed: pip install -U coverage"
    return None


def begin(directory: Path, test_directory: Path, by_test: bool) -> tuple[str, ...]:
    """Prepare a folder inside the run's folder, and return interpreter arguments that measure a process.

    With ``by_test``, for :func:`record_by_test`, the folders of the map are measured instead of ``OF_TORCH``.
    """
    folder = directory / _INSIDE
    folder.mkdir()
    settings = folder / "settings"
    of_torch = [f"*/torch/distributed/{pattern}" for pattern in OF_TORCH]
    if by_test:
        of_torch = [f"*/torch/{folder}/*" for folder in recording.FOLDERS]
    measured = [f"{test_directory}/*", f"{_PACKAGE}/*", *of_torch]
    lines = ["[run]", "parallel = true", "patch =", "  fork", "  _exit", f"data_file = {folder / RESULT}"]
    if by_test:
        lines.append("core = ctrace")  # the faster core of Python 3.14 cannot record by test
    lines += ["include ="]
    settings.write_text("\n".join([*lines, *(f"  {pattern}" for pattern in measured), ""]))
    return "-m", "coverage", "run", "--rcfile", str(settings)


def record_by_test(file: str) -> None:
    """Record by test which code a file runs, in this process and its forks."""
    from coverage import Coverage

    current: str | None = None

    def switch(test: str | None) -> None:
        nonlocal current
        current = test
        measured = Coverage.current()  # of this process; a fork has its own
        if measured is not None:
            measured.switch_context("" if test is None else recording.context(file, test))

    events.watch(switch)
    # This is for a fork that a test makes itself. Coverage.py registered earlier, so it measures the child already.
    os.register_at_fork(after_in_child=lambda: None if current is None else switch(current))


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
