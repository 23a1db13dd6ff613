"""Lists of tests that are treated specially: disabled, slow, known to fail.

Upstream's disabled list is ``{"test_x (__main__.Class)": [issue, url, platforms]}``; the issue number may be missing.
Its slow list is ``{"test_x (__main__.Class)": seconds}``. A class in these lists matches all classes whose names
begin with it. Our own list is ``{"version": 1, "entries": [{"test": "folder/test_x::Class::test_y", "action": "disable"
| "slow" | "fail", "reason": ..., "link": ..., "device": ..., "torch": ">=2.10,<2.12", "world_size": 2}]}``. ``test``
may have globs. An entry counts only if all of its conditions hold.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from torch_fsdp_tests.dispatch import devices
from torch_fsdp_tests.dispatch.plan import LONGEST
from torch_fsdp_tests.installed_torch.version_ranges import version_fits

ACTIONS = ("disable", "slow", "fail")
_REQUIRED = {"test", "action", "reason"}
_FIELDS = _REQUIRED | {"link", "device", "torch", "world_size"}


class MalformedList(ValueError):
    """A list cannot be read. The message names the file and the error in it."""


@dataclasses.dataclass(frozen=True)
class Situation:
    """What a test is about to run on. Unknown values are None."""

    device: str | None
    torch: str | None
    world_size: int | None

    @classmethod
    def of_process(cls, facts: Mapping[str, Any], test: object, device: str | None) -> Situation:
        """The situation of a test from its file's facts. Without them, ``device`` is that of the run."""
        try:
            size = getattr(test, "world_size", None)
        except Exception:  # it may be a property that only works in a running test
            size = None
        return cls(
            facts.get("device") or device,
            facts.get("torch") or devices.torch_version(),
            size if isinstance(size, int) else None,
        )


@dataclasses.dataclass(frozen=True)
class Entry:
    """One entry of a list: its tests, the action, the reason, and the conditions."""

    test: str  # file::Class::test with globs; in upstream's lists the file is *
    action: str
    reason: str = ""
    link: str = ""
    device: str | None = None
    torch: str | None = None
    world_size: int | None = None
    upstreams: bool = False  # from a list about all of PyTorch's tests, most of which are not in this suite

    @property
    def words(self) -> str:
        return " ".join(filter(None, (self.reason, f"({self.link})" if self.link else ""))) or "no reason given"

    def names(self, file: str, test: str) -> bool:
        """Whether this entry names this test (``Class.test``) of this file."""
        pattern, _, inside = self.test.partition("::")
        inside = inside.replace("::", ".") or "*"
        if self.upstreams:
            return _names_as_upstream(inside, test)
        inside = inside if "." in inside or inside == "*" else f"{inside}.*"
        return fnmatch.fnmatchcase(file, pattern.removesuffix(".py")) and fnmatch.fnmatchcase(test, inside)

    def applies(self, situation: Situation) -> bool:
        """Whether all conditions of this entry are true. A condition about an unknown value is not true."""
        return (
            self.device in (None, situation.device)
            and self.world_size in (None, situation.world_size)
            and (self.torch is None or (situation.torch is not None and version_fits(situation.torch, self.torch)))
        )


def _names_as_upstream(listed: str, test: str) -> bool:
    """Whether an upstream entry names a test: ``TestX.test_y`` also means ``TestXCPU.test_y_cpu``."""
    listed_class, _, listed_method = listed.rpartition(".")
    cls, _, method = test.rpartition(".")
    if not cls.startswith(listed_class):
        return False
    return method in (listed_method, f"{listed_method}_{cls[len(listed_class) :].lower()}")


def read_json(path: Path) -> Any:
    """The contents of a JSON file. Raises :class:`MalformedList` with the path if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant)
    except OSError as error:
        raise MalformedList(f"{path} cannot be read: {error.strerror}") from error
    except RecursionError as error:
        raise MalformedList(f"{path} is nested too deeply to be read") from error
    except ValueError as error:
        raise MalformedList(f"{path} is not JSON: {error}") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def read_disabled(path: Path) -> tuple[list[Entry], list[str]]:
    """The entries of upstream's list of disabled tests that apply on this platform, and remarks on platforms."""
    entries, unknown = [], dict[str, str]()
    for key, value in _table(path).items():
        if not isinstance(value, list) or len(value) not in (2, 3) or not isinstance(value[-1], list):
            raise MalformedList(f"{path}: the entry {key!r} must be [url, platforms] or [issue, url, platforms]")
        *number, url, listed = value
        issue = str(number[0] if number else str(url).rpartition("/")[2])
        platforms = [platform for platform in map(str, listed) if platform]
        known = [platform for platform in platforms if platform in _SYSTEMS | _BUILDS]
        unknown |= {platform: key for platform in platforms if platform not in known}
        if not known or any(map(_is_here, known)):
            reason = f"issue {issue}" if issue else ""
            entries.append(Entry(_upstream_name(path, key), "disable", reason, str(url), upstreams=True))
    end = "is unknown, so it does not restrict the entry"
    return entries, [f"{path}: the platform {platform!r} of {key!r} {end}" for platform, key in unknown.items()]


def read_slow(path: Path) -> list[Entry]:
    """The entries of upstream's list of slow tests."""
    entries = []
    for key, value in _table(path).items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= LONGEST:
            raise MalformedList(f"{path}: the entry {key!r} is not a number of seconds")
        entries.append(Entry(_upstream_name(path, key), "slow", f"took {value:g} s", upstreams=True))
    return entries


def read_own(path: Path) -> list[Entry]:
    """The entries of a list in this project's format."""
    data = _table(path)
    if data.get("version") != 1 or not isinstance(data.get("entries"), list):
        raise MalformedList(f'{path} does not have the form {{"version": 1, "entries": [...]}}')
    entries = []
    for number, fields in enumerate(data["entries"], 1):
        where = f"{path}: entry {number}"
        if not isinstance(fields, dict) or not _REQUIRED <= fields.keys() <= _FIELDS:
            raise MalformedList(f"{where} must have test, action and reason, and may only have {sorted(_FIELDS)}")
        for name, value in fields.items():
            kind = int if name == "world_size" else str
            if not isinstance(value, kind) and not (value is None and name not in _REQUIRED):
                raise MalformedList(f"{where} has {value!r} for {name}, which is not of type {kind.__name__}")
        entry = Entry(**(fields | {"link": fields.get("link") or ""}))
        if entry.action not in ACTIONS:
            raise MalformedList(f"{where} has the action {entry.action!r}; the actions are {', '.join(ACTIONS)}")
        try:
            version_fits("0", entry.torch or ">0")
        except ValueError as error:
            raise MalformedList(f"{where}: {error}") from error
        entries.append(entry)
    return entries


def _table(path: Path) -> dict[str, Any]:
    data = read_json(path)
    if not isinstance(data, dict):
        raise MalformedList(f"{path} is not a JSON object")
    return data


def _upstream_name(path: Path, key: str) -> str:
    match = re.fullmatch(r"(\w+) \((?:\w+\.)*(\w+)\)", key)
    if match is None:
        raise MalformedList(f'{path}: the key {key!r} does not have the form "test_x (__main__.Class)"')
    return f"*::{match[2]}::{match[1]}"


# The platforms in upstream's lists: systems, each with the beginning of ``sys.platform`` on it,
_SYSTEMS = {"linux": "linux", "mac": "darwin", "macos": "darwin", "win": "win32", "windows": "win32"}
# and kinds of builds, with what can be read from the installed torch. CI names them in a variable.
_BUILDS = {"rocm": "hip", "xpu": "xpu", "asan": "", "dynamo": "", "dynamo_wrapped": "", "inductor": "", "slow": ""}


def _is_here(platform: str) -> bool:
    """Whether the tests run on this platform, or with this kind of build."""
    if platform in _SYSTEMS:
        return sys.platform.startswith(_SYSTEMS[platform])
    variable = f"PYTORCH_TEST_WITH_{platform.removesuffix('_wrapped').upper()}"
    return os.environ.get(variable) == "1" or devices.is_built_for(_BUILDS[platform])
