"""A run that is compared with an earlier one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch import report
from torch_fsdp_tests.extension import Conclusion, Feature
from torch_fsdp_tests.extensions.compare import two_reports


class Compare(Feature):
    """Prints what differs from an earlier report."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def problem(self, run: Any) -> str | None:
        return None if self._path.exists() else f"--compare: there is no file {self._path}"

    def begin(self) -> Sequence[str]:
        self._earlier = two_reports.load(self._path)
        return ()

    def conclude(self, results: Any, rerun: Any, jobs: Any) -> Conclusion:
        return Conclusion(two_reports.lines(self._earlier, report.as_json(results)))
