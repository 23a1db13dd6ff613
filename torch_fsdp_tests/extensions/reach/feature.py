"""A run whose tests are selected by what they reach, or that records what they reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch.plan import TestRun
from torch_fsdp_tests.dispatch.select import Narrowed
from torch_fsdp_tests.extension import Conclusion, Feature
from torch_fsdp_tests.extensions.reach import reaching


class Reach(Feature):
    """Selects tests by a map, records one, or completes one."""

    def __init__(self, run: Any, given: Mapping[str, Any]) -> None:
        self._asked = reaching.ReachAsked(
            run,
            reaching=given.get("reaching", ()),
            changed=given.get("changed", False),
            map=given.get("map"),
            save_map=given.get("save_map"),
        )
        self.narrows = self._asked.by_reach
        self.in_tests = self._asked.save_map is not None
        self.traces = "--save-map" if self.in_tests else ""

    def problem(self, run: Any) -> str | None:
        asked = self._asked
        if asked.save_map is not None and asked.save_map.is_dir():
            return f"--save-map: {asked.save_map} is a folder; name a file"
        if asked.map is not None and not asked.by_reach and asked.save_map is None:
            return "--map can only be used with --reaching, --changed or --save-map"
        return None

    def needs_own_ranks(self, one_host: bool) -> str | None:
        return "--save-map measures only the ranks that this run starts" if self._asked.save_map else None

    def writes(self) -> Mapping[str, Path]:
        return {"--save-map": self._asked.save_map.parent} if self._asked.save_map else {}

    def narrow(self, selection: Sequence[TestRun], device: str) -> Narrowed | None:
        if self._asked.by_reach:
            return reaching.narrow(self._asked, selection, device)
        return reaching.unknown(self._asked, selection, device) if self._asked.completes_map else None

    def begin(self) -> Sequence[str]:
        if self._asked.save_map is not None:
            self._asked.records.write_bytes(b"")
        return ()

    def environment(self, environment: Mapping[str, str]) -> Mapping[str, str]:
        return {reaching.VARIABLE: str(self._asked.records)} if self._asked.save_map else {}

    def conclude(self, results: Any, rerun: Any, jobs: Any) -> Conclusion:
        path = self._asked.save_map
        return Conclusion([reaching.save(self._asked, path, results)] if path else ())

    def selecting(self) -> Sequence[str]:
        words = [word for what in self._asked.reaching for word in ("--reaching", what)]
        return [*words, *["--changed"] * self._asked.changed]
