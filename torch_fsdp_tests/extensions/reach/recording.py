"""Records which lines of torch each test runs, and makes the map from it."""

from __future__ import annotations

import ast
import json
import mmap
import os
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch_fsdp_tests.extensions.reach.functions import Statement, functions_in, module_name, owners, statements_in
from torch_fsdp_tests.extensions.reach.reach_map import Executed, Module, ReachMap, build

# The folders and modules of torch whose functions and statements are in the map. Of WHOLE it has every module. Of the
# others it has the modules that some test enters, because FSDP does not use the rest.
FOLDERS = (
    *("distributed/fsdp", "distributed/_composable", "distributed/checkpoint", "distributed/tensor"),
    *("distributed/device_mesh", "distributed/algorithms", "distributed/pipelining"),
    *("amp/grad_scaler", "nn/utils/clip_grad", "optim"),
)
WHOLE = FOLDERS[:2]


def sources(root: Path, folders: tuple[str, ...] = FOLDERS) -> Iterator[Path]:
    """The source files of these folders and modules of a package."""
    for folder in folders:
        module = (root / folder).with_suffix(".py")
        yield from [module] if module.is_file() else sorted((root / folder).rglob("*.py"))


def _places(root: Path) -> tuple[dict[Path, int], int]:
    """Where the lines of each source file are, if those of all files are counted from 0, and how many there are."""
    starts, count = dict[Path, int](), 0
    for path in sources(root):
        starts[path] = count
        count += path.read_bytes().count(b"\n") + 2  # the first line has number 1, and the last one may not end
    return starts, count


class Recorder:
    """Records by test which lines run in this process and in its forks, which share a byte for each line.

    Where Python has ``sys.monitoring``, only the first run of a line in a test costs anything.
    """

    def __init__(self, root: Path, records: Path, file: str) -> None:
        """``root`` is the folder of torch. What the tests of ``file`` run is added to the file ``records``."""
        starts, count = _places(root)
        self._starts = {str(path): start for path, start in starts.items()}
        self._shared = mmap.mmap(-1, count)
        self._ran: mmap.mmap | bytearray = self._shared
        self._records, self._file, self._test, self._process = records, file, "", os.getpid()

    def start(self) -> None:
        """Record from now on. A line that has run is not reported again before :meth:`switch` is called."""
        if sys.version_info >= (3, 12):
            self._monitor()
        else:
            self._trace()

    def switch(self, test: str | None) -> None:
        """Report that a test begins, or that it ended (None), in this process or in a fork."""
        if os.getpid() == self._process:
            if self._test:
                self._save()
            self._shared[:] = bytes(len(self._shared))
            self._test = test or ""
        else:
            self._ran = bytearray(len(self._shared)) if test is None else self._shared
        if sys.version_info >= (3, 12):
            sys.monitoring.restart_events()

    def _save(self) -> None:
        ran = [place for place, byte in enumerate(self._shared[:]) if byte]
        line = f"{json.dumps([self._file, self._test, ran], separators=(',', ':'))}\n".encode()
        descriptor = os.open(self._records, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(descriptor, line)  # in one piece, because other processes also write
        os.close(descriptor)

    if sys.version_info >= (3, 12):

        def _monitor(self) -> None:
            monitoring, tool = sys.monitoring, sys.monitoring.COVERAGE_ID
            starts = self._starts

            def enter(code: types.CodeType, offset: int) -> Any:
                if code.co_filename in starts:
                    monitoring.set_local_events(tool, code, monitoring.events.LINE)
                return monitoring.DISABLE

            def run(code: types.CodeType, line: int) -> Any:
                self._ran[starts[code.co_filename] + line] = 1
                return monitoring.DISABLE

            monitoring.use_tool_id(tool, __name__)
            monitoring.register_callback(tool, monitoring.events.PY_START, enter)
            monitoring.register_callback(tool, monitoring.events.LINE, run)
            monitoring.set_events(tool, monitoring.events.PY_START)

    def _trace(self) -> None:
        def tracer(start: int) -> Any:
            def trace(frame: types.FrameType, event: str, arg: object) -> Any:
                self._ran[start + frame.f_lineno] = 1
                return trace

            return trace

        find = {path: tracer(start) for path, start in self._starts.items()}.get

        def enter(frame: types.FrameType, event: str, arg: object) -> Any:
            return find(frame.f_code.co_filename)

        threading.settrace(enter)
        sys.settrace(enter)


def make(records: Path, seconds: Mapping[tuple[str, str], float], root: Path, torch: str) -> ReachMap:
    """The map of the tests with known seconds, by file and name, out of the records of :class:`Recorder`.

    ``root`` is the folder of the installed torch. Raises ``OSError`` for records that cannot be read.
    """
    contents = {path: path.read_bytes() for path in sources(root)}
    names = {path: module_name(path, root) for path in contents}
    functions: dict[int, str] = {}  # by the place of a line
    statements: dict[int, list[Statement]] = {}
    known: list[Statement] = []
    for path, start in _places(root)[0].items():
        owner = owners(functions_in(contents[path], names[path]))
        functions.update((start + line, function) for line, function in owner.items())
        for each in statements_in(ast.parse(contents[path]), names[path]):
            known.append(each)
            for line in range(each.first, each.last + 1):
                statements.setdefault(start + line, []).append(each)
    tests = {test: Executed([], taken) for test, taken in seconds.items()}
    for file, test, ran in map(json.loads, records.read_text(encoding="utf-8").splitlines()):
        if (taken := seconds.get((file, test))) is not None:
            entered = {functions[place] for place in ran if place in functions}
            tests[file, test] = Executed(entered, taken, {each for place in ran for each in statements.get(place, ())})
    modules = {name: Module.of(contents[path], name) for path, name in names.items()}
    entered = set[str]().union(*(test.functions for test in tests.values()))
    whole = {*sources(root, WHOLE)}
    kept = [name for path, name in names.items() if path in whole or not entered.isdisjoint(modules[name].functions)]
    return build(torch, tests, {name: modules[name] for name in kept}, known)
