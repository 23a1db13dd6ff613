"""Which lines of FSDP a program runs. A function whose lines are all known is not traced, but each call still costs."""

from __future__ import annotations

import dis
import sys
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch


class LineCoverage:
    """A context that collects the lines which run in some folders of torch for the first time."""

    def __init__(self, *folders: str) -> None:
        self._torch = Path(torch.__file__).parent
        self._roots = tuple(str(self._torch / folder) for folder in folders)
        self._missing: dict[CodeType, set[int] | None] = {}  # None for code of other files
        self.new: list[str] = []  # such as "distributed/fsdp/api.py:12"

    def __enter__(self) -> LineCoverage:
        self.new = []
        sys.settrace(self._call)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, where: TracebackType | None) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in self._missing:
            inside = code.co_filename.startswith(self._roots)
            lines = {line for _, line in dis.findlinestarts(code) if line} - {code.co_firstlineno}
            self._missing[code] = lines if inside else None
        return self._line if self._missing[code] else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            missing = self._missing[frame.f_code]
            if missing and frame.f_lineno in missing:
                missing.remove(frame.f_lineno)
                path = Path(frame.f_code.co_filename).relative_to(self._torch).as_posix()
                self.new.append(f"{path}:{frame.f_lineno}")
        return self._line
