"""The fixes of known defects that are in force in a run."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.defects import fixes
from torch_fsdp_tests.defects.registry import ABSENT_VARIABLE
from torch_fsdp_tests.extension import Feature
from torch_fsdp_tests.installed_torch import sources
from torch_fsdp_tests.settings import ConfigurationError

MOST_NAMES = 5  # in the first line


class Fixes(Feature):
    """Processes of test files import torch with these fixes, or with all that there are for the installed version."""

    changes_torch = True
    _folder: Path  # one that ends with the run

    def __init__(self, ids: Sequence[str]) -> None:
        """Raises ``ConfigurationError`` unless all of them can be used together."""
        with _as_wrong_option():
            self.ids = fixes.requested(ids)
            self._version = sources.installed()[1]
        self._are_all = self.ids == fixes.tried(self._version)
        self._written: dict[str, Path] = {}  # the folders of edited files, by what else replaces files

    def needs_local_ranks(self, one_host: bool) -> str | None:
        return None if one_host else "--with-fixes: the edited files are on one machine; leave the option out"

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with tempfile.TemporaryDirectory(prefix="run_test-") as name:
            self._folder = Path(name)
            yield

    def environment(self, environment: Mapping[str, str]) -> Mapping[str, str]:
        below = environment.get(sources.VARIABLE, "")
        if below not in self._written:
            folder = self._folder / str(len(self._written))
            with _as_wrong_option():
                read = functools.partial(sources.text, environment=environment)
                sources.write(fixes.edited_files(self.ids, self._version, read), folder)
            self._written[below] = folder
        return {**sources.environment(self._written[below], environment), ABSENT_VARIABLE: " ".join(self.ids)}

    def add_to_report(self, data: dict[str, Any], results: Any) -> None:
        data["fixes"] = self.ids

    def properties(self, results: Any) -> Mapping[str, str]:
        return {"fixes": " ".join(self.ids)}

    def repeating(self, test: str | None) -> Sequence[str]:
        return ["--with-fixes", *([] if self._are_all else self.ids)]

    def headline(self) -> str:
        names = ", ".join(self.ids) if len(self.ids) <= MOST_NAMES else f"{len(self.ids)} of them"
        return "with all fixes" if self._are_all else f"with fixes: {names}"


@contextlib.contextmanager
def _as_wrong_option() -> Iterator[None]:
    try:
        yield
    except (fixes.NotFixed, sources.NotInstalled) as error:
        raise ConfigurationError(f"--with-fixes: {error}") from error
