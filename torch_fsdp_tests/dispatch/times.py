"""Reads and writes what runs have recorded: the times of files and classes in upstream's formats, and their needs.

``test-times.json`` is ``{job: {TEST_CONFIG: {file: seconds}}}``, ``test-class-times.json`` has ``{file: {class:
seconds}}`` there, and ``test-needs.json`` has ``{file: {"ranks": 4, "devices": 4}}``. The job is the part of
``JOB_NAME`` before ``" / test ("``, or else ``BUILD_ENVIRONMENT``. Where there is no entry, ``default`` is used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch.expectations import MalformedList, read_json
from torch_fsdp_tests.dispatch.plan import LONGEST

FILE_TIMES = "test-times.json"
CLASS_TIMES = "test-class-times.json"
NEEDS = "test-needs.json"
RECORDED = Path(__file__).parent / "data"  # the folder with the times that ship with the project


@dataclasses.dataclass(frozen=True)
class Needs:
    """The most ranks and devices that a test of a file asks for. Ranks in threads share a device."""

    ranks: int = 1
    devices: int = 1


@dataclasses.dataclass(frozen=True)
class Times:
    """Known seconds by file and by class, known needs by file, and remarks about files that do not exist."""

    files: Mapping[str, float] = dataclasses.field(default_factory=dict)
    classes: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    needs: Mapping[str, Needs] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()


def load(paths: Iterable[Path], environment: Mapping[str, str]) -> Times:
    """The times in these files, in either format. They replace those that ship with the project.

    A missing file causes a remark, and a malformed one raises :class:`MalformedList`.
    """
    files: dict[str, float] = {}
    classes: dict[str, Mapping[str, float]] = {}
    needs: dict[str, Needs] = {}
    remarks = []
    requested = list(paths)
    for path in [*(RECORDED / name for name in (FILE_TIMES, CLASS_TIMES, NEEDS)), *requested]:
        if not path.exists():
            if path in requested:
                remarks.append(f"{path} does not exist; the recorded times of the project are used")
            continue
        for name, value in _configured(path, environment).items():
            if path.name == NEEDS:
                needs[name] = _needs(path, name, value)
            elif isinstance(value, dict):
                classes[name] = {cls: _seconds(path, f"{name} {cls}", seconds) for cls, seconds in value.items()}
            else:
                files[name] = _seconds(path, name, value)
    return Times(files, classes, needs, tuple(remarks))


def _configured(path: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    data = read_json(path)
    for level in ([data], data.values() if isinstance(data, dict) else ()):
        if not all(isinstance(each, dict) and all(isinstance(one, dict) for one in each.values()) for each in level):
            raise MalformedList(f"{path} is not of the form {{job: {{test config: {{file: seconds}}}}}}")
    jobs, config = _jobs(environment), _config(environment)
    places = [*((job, config) for job in (*jobs, "default")), ("default", "default")]
    return next((data[job][each] for job, each in places if each in data.get(job, {})), {})


def _jobs(environment: Mapping[str, str]) -> list[str]:
    """The names of this job, of which the first counts first. Upstream's jobs have their shard after their name."""
    names = environment.get("JOB_NAME", "").partition(" / test (")[0], environment.get("BUILD_ENVIRONMENT", "")
    return [name for name in names if name]


def _config(environment: Mapping[str, str]) -> str:
    return environment.get("TEST_CONFIG") or "default"


def _seconds(path: Path, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LONGEST:
        raise MalformedList(f"{path}: the time of {name} is {value!r}, not a number of seconds")
    return float(value)


def _needs(path: Path, name: str, value: Any) -> Needs:
    fields = {field.name for field in dataclasses.fields(Needs)}
    if (
        not isinstance(value, dict)
        or value.keys() != fields
        or not all(type(n) is int and n > 0 for n in value.values())
    ):
        raise MalformedList(f'{path}: the needs of {name} are {value!r}, not of the form {{"ranks": 4, "devices": 4}}')
    return Needs(**value)


def check(folder: Path, environment: Mapping[str, str]) -> None:
    """Raise :class:`MalformedList` if times cannot be added to those in the folder."""
    for path in (folder / FILE_TIMES, folder / CLASS_TIMES, folder / NEEDS):
        if path.exists():
            _configured(path, environment)


def save(
    folder: Path,
    files: Mapping[str, float],
    classes: Mapping[str, Mapping[str, float]],
    needs: Mapping[str, Needs],
    environment: Mapping[str, str],
) -> None:
    """Write all formats into the folder, and keep what is there about other files. Raises like :func:`check`.

    The needs of a file do not shrink, because a test that is skipped here may not report its own.
    """
    from torch_fsdp_tests.dispatch.atomic import json_rows, write_text  # imported late, because a plan writes nothing

    keys = [[*_jobs(environment), "default"][0], _config(environment)]
    as_data = {file: dataclasses.asdict(need) for file, need in needs.items()}
    tables: dict[str, Mapping[str, Any]] = {FILE_TIMES: files, CLASS_TIMES: classes, NEEDS: as_data}
    for name, recorded in tables.items():
        path = folder / name
        data = read_json(path) if path.exists() else {}
        table = data.setdefault(keys[0], {}).setdefault(keys[1], {})
        if name == NEEDS:
            recorded = {
                file: {what: max(number, table.get(file, {}).get(what, 1)) for what, number in value.items()}
                for file, value in as_data.items()
            }
        table.update(recorded)
        write_text(path, json_rows(data, depth=3) + "\n")
