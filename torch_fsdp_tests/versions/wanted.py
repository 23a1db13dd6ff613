"""A version of torch that the command line names."""

from __future__ import annotations

import dataclasses
import enum
import os
import re
from pathlib import Path

from torch_fsdp_tests.versions.refusal import Refusal

NIGHTLY = "nightly"
_RELEASE = re.compile(r"\d+\.\d+(\.\d+)?((a|b|rc|\.post|\.dev)\d+)?(\+[\w.]+)?")
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_WHEEL = re.compile(r"torch-(?P<version>[^-]+)(-\d[^-]*)?-(?P<python>[^-]+)-[^-]+-[^-]+\.whl")


class Kind(str, enum.Enum):
    """The source of a torch."""

    RELEASE = "release"  # from the index, by its version
    NIGHTLY = "nightly"  # the newest one of the nightly index
    WHEEL = "wheel"  # a file
    WHEELS = "folder of wheels"  # wheels of one version, for several Pythons or with dependencies
    PACKAGE = "folder with a torch package"  # such as a source tree that was built in place
    ENVIRONMENT = "environment"  # that exists, with torch and all that the tests need; nothing is installed there


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A version: its name in the table, and its source."""

    label: str
    kind: Kind
    what: str  # a version for a release, an absolute path otherwise; the interpreter of an environment
    python: tuple[int, int] | None = None  # the only possible one, if the file names say so

    @property
    def torch(self) -> str | None:
        """The version that it must have, if the label or the file says so."""
        if self.kind is Kind.RELEASE:
            return self.what
        return self.label if _RELEASE.fullmatch(self.label) else None


def parse(text: str) -> Wanted:
    """Parse ``2.15.0``, ``nightly``, a wheel, a folder, an interpreter, or ``LABEL=`` and one of these."""
    label, equals, target = text.rpartition("=")
    if equals and not _LABEL.fullmatch(label):
        raise Refusal(f"{text!r}: the name before = may only have letters, digits and . _ + -")
    if target == NIGHTLY:
        return Wanted(label or NIGHTLY, Kind.NIGHTLY, NIGHTLY)
    if _RELEASE.fullmatch(target):
        return Wanted(label or target, Kind.RELEASE, target)
    path = Path(os.path.abspath(os.path.expanduser(target)))
    if not path.exists():
        raise Refusal(
            f"{target!r} is not a version such as 2.15.0, {NIGHTLY!r}, or an existing wheel, folder or interpreter"
        )
    return _local(label, path)


def _local(label: str, path: Path) -> Wanted:
    if path.suffix == ".whl":
        return Wanted(label or _wheel(path)["version"], Kind.WHEEL, str(path), _python_of_tag(_wheel(path)["python"]))
    if path.is_file():
        if not os.access(path, os.X_OK):
            raise Refusal(f"{path} is not a wheel or an interpreter")
        return Wanted(label or _safe(path.parents[1].name), Kind.ENVIRONMENT, str(path))
    if (path / "bin" / "python").exists():
        return Wanted(label or _safe(path.name), Kind.ENVIRONMENT, str(path / "bin" / "python"))
    if (path / "torch" / "__init__.py").is_file():
        return Wanted(label or _safe(path.name), Kind.PACKAGE, str(path), _python_of_extension(path))
    versions = {_wheel(wheel)["version"] for wheel in path.glob("torch-*.whl")}
    if len(versions) > 1:
        raise Refusal(f"{path} has wheels of several versions of torch ({', '.join(sorted(versions))}): name one wheel")
    if not versions:
        raise Refusal(
            f"{path} is not an environment (it has no bin/python), and has no torch package or wheel of torch"
        )
    return Wanted(label or versions.pop(), Kind.WHEELS, str(path))


def _wheel(path: Path) -> dict[str, str]:
    match = _WHEEL.fullmatch(path.name)
    if match is None:
        raise Refusal(f"the name of {path} is not that of a torch wheel")
    return match.groupdict()


def wheels_version(folder: str) -> str:
    """The only version of torch in a folder of wheels."""
    return next(_wheel(wheel)["version"] for wheel in Path(folder).glob("torch-*.whl"))


def _python_of_tag(tag: str) -> tuple[int, int] | None:
    match = re.fullmatch(r"cp(\d)(\d+)", tag)
    return (int(match[1]), int(match[2])) if match else None


def _python_of_extension(folder: Path) -> tuple[int, int] | None:
    """The Python for which torch's extension module was built, according to its name."""
    for extension in folder.glob("torch/_C.cpython-*"):
        if match := re.match(r"_C\.cpython-(\d)(\d+)", extension.name):
            return int(match[1]), int(match[2])
    return None


def _safe(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._+-]", "_", name).lstrip("._+-") or "local"
