"""``report.html`` beside ``report.json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests import installation
from torch_fsdp_tests.dispatch import atomic, report
from torch_fsdp_tests.extension import Feature

PAGE = "report.html"


class Html(Feature):
    """Makes the page of what the report has."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self) -> Sequence[str]:
        return report.set_aside(self._folder, PAGE)

    def reported(self, folder: Path, data: Mapping[str, Any]) -> Sequence[str]:
        from torch_fsdp_tests.extensions.html import html_report  # not before the tests have run

        others = report.set_aside(folder, PAGE)  # of a run at the same time
        atomic.write_text(folder / PAGE, html_report.render(data))
        return ["; ".join([f"page: {installation.short_path(folder / PAGE)}", *others])]
