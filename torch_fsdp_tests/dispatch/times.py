"""Reads and writes the times of files and classes in upstream's formats.

``test-times.json`` is ``{BUILD_ENVIRONMENT: {TEST_CONFIG: {file: seconds}}}``, ``test-class-times.json`` has ``{file:
{class: seconds}}`` there. If the environment has no entry, ``default`` is used.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch.expectations import MalformedList, read_json
from torch_fsdp_tests.dispatch.plan import LONGEST

FILE_TIMES = "test-times.json"
CLASS_TIMES = "test-class-times.json"
RECORDED = Path(__file__).parent / "data"  # the folder with the times that ship with the project


@dataclasses.dataclass(frozen=True)
class Times:
    """Known seconds by file and by class, and remarks about files that do not exist."""

    files: Mapping[str, float] = dataclasses.field(default_factory=dict)
    classes: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def load(paths: Iterable[Path], environment: Mapping[str, str]) -> Times:
    """The times in these files, in either format. They replace those that ship with the project.

    A missing file causes a remark, and a malformed one raises :class:`MalformedList`.
    """
    files: dict[str, float] = {}
    classes: dict[str, Mapping[str, float]] = {}
    remarks = []
    asked = list(paths)
    for path in [RECORDED / FILE_TIMES, RECORDED / CLASS_TIMES, *asked]:
        if not path.exists():
            if path in asked:
                remarks.append(f"{path} does not exist; the recorded times of the project are used")
            continue
        for name, value in _configured(path, environment).items():
            if isinstance(value, dict):
                classes[name] = {cls: _seconds(path, f"{name} {cls}", seconds) for cls, seconds in value.items()}
            else:
                files[name] = _seconds(path, name, value)
    return Times(files, classes, tuple(remarks))


def _configured(path: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    data = read_json(path)
    for variable in ("BUILD_ENVIRONMENT", "TEST_CONFIG"):
        if not isinstance(data, dict) or not all(isinstance(value, dict) for value in data.values()):
            raise MalformedList(f"{path} is not of the form {{build environment: {{test config: {{file: seconds}}}}}}")
        data = data.get(environment.get(variable, "default"), data.get("default", {}))
    return data


def _seconds(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LONGEST:
        raise MalformedList(f"{path}: the time of {name} is {value!r}, not a number of seconds")
    return float(value)


def check(folder: Path, environment: Mapping[str, str]) -> None:
    """Raise :class:`MalformedList` if times cannot be added to those in the folder."""
    for path in (folder / FILE_TIMES, folder / CLASS_TIMES):
        if path.exists():
            _configured(path, environment)


def save(
    folder: Path, files: Mapping[str, float], classes: Mapping[str, Mapping[str, float]], environment: Mapping[str, str]
) -> None:
    """Write both formats into the folder, and keep the times of other files there. Raises like :func:`check`."""
    from torch_fsdp_tests.dispatch.atomic import write_text  # imported late, because a plan writes nothing

    keys = [environment.get(variable, "default") for variable in ("BUILD_ENVIRONMENT", "TEST_CONFIG")]
    for name, times in ((FILE_TIMES, files), (CLASS_TIMES, classes)):
        path = folder / name
        data = read_json(path) if path.exists() else {}
        table = data.setdefault(keys[0], {}).setdefault(keys[1], {})
        table.update(times)
        data[keys[0]][keys[1]] = dict(sorted(table.items()))
        write_text(path, json.dumps(data, indent=1, sort_keys=True) + "\n")
