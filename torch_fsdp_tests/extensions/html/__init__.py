"""``--report``: also as a page, for readers who did not run it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_fsdp_tests.extension import Extension, Feature


class _Extension(Extension):
    def feature(self, run: Any, given: Mapping[str, Any], environment: Mapping[str, str]) -> Feature | None:
        if run.output.report is None:
            return None
        from torch_fsdp_tests.extensions.html.feature import Html

        return Html(run.output.report)


EXTENSION = _Extension()
