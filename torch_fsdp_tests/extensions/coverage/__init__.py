"""``--coverage``: which lines of the tests, the harness, and torch's FSDP and state dicts run, by coverage.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch_fsdp_tests.extension import AddOption, Extension, Feature
from torch_fsdp_tests.settings import Variable, is_true

VARIABLE = "PYTORCH_COLLECT_COVERAGE"


class _Extension(Extension):
    variables = (Variable(VARIABLE, option="--coverage", is_upstreams=True),)

    def add_options(self, group: Callable[[str], AddOption]) -> None:
        words = "measure with coverage.py which lines of the tests, the harness, and torch's FSDP and state dicts run "
        words += "(in test-reports/.coverage)"
        group("how they run")("-c", "--coverage", action="store_true", help=words)

    def feature(self, run: Any, given: Mapping[str, Any], environment: Mapping[str, str]) -> Feature | None:
        if not given.get("coverage", is_true(VARIABLE, environment)):
            return None
        from torch_fsdp_tests.extensions.coverage.measuring import Coverage

        return Coverage(run)


EXTENSION = _Extension()
