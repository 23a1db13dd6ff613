"""The fixes of known defects that are in force in a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch_fsdp_tests.extension import Feature
from torch_fsdp_tests.installed_torch import fixes
from torch_fsdp_tests.settings import ConfigurationError

MOST_NAMES = 5  # in the first line


class Fixes(Feature):
    """Processes of test files import torch with these fixes, or with all that there are for the installed version."""

    changes_torch = True

    def __init__(self, ids: Sequence[str]) -> None:
        """Raises ``ConfigurationError`` unless all of them can be used together."""
        try:
            self.ids = fixes.requested(ids)
        except fixes.NotFixed as error:
            raise ConfigurationError(f"--with-fixes: {error}") from error

    def environment(self, environment: Mapping[str, str]) -> Mapping[str, str]:
        return fixes.environment(self.ids, environment)

    def add_to_report(self, data: dict[str, Any], results: Any) -> None:
        data["fixes"] = self.ids

    def properties(self, results: Any) -> Mapping[str, str]:
        return {"fixes": " ".join(self.ids)}

    def repeating(self, test: str | None) -> Sequence[str]:
        return ["--with-fixes", *([] if fixes.are_all(self.ids) else self.ids)]

    def headline(self) -> str:
        names = ", ".join(self.ids) if len(self.ids) <= MOST_NAMES else f"{len(self.ids)} of them"
        return "with all fixes" if fixes.are_all(self.ids) else f"with fixes: {names}"
