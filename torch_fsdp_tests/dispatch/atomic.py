"""The one writer of files that users name: a reader finds the old file or the new one, but never a part of it."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def naming(place: object) -> Iterator[None]:
    """Add the path to an ``OSError`` in the block, because errors of a write do not contain it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(place)) from error


def json_rows(value: Any, depth: int, indent: str = "") -> str:
    """JSON with a line for each entry of the mappings ``depth`` levels below ``value``, in the order of their keys."""
    if depth == 0 or not isinstance(value, Mapping) or not value:
        return json.dumps(value, sort_keys=True)
    inner = f"{indent} "
    rows = (f"{inner}{json.dumps(key)}: {json_rows(value[key], depth - 1, inner)}" for key in sorted(value))
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def write_text(path: Path, text: str) -> None:
    """Write a file that a user named, as :func:`write_bytes` does."""
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file that a user named. Raises ``OSError`` with the path.

    A regular file, or the one that a link names, is replaced atomically: of two writers, one wins. Anything else, such
    as a device or a pipe, is written in place.
    """
    import tempfile  # imported late, because a plan writes nothing

    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG | 0o644
    if not stat.S_ISREG(mode):
        with naming(path), open(path, "wb") as file:
            file.write(content)
        return
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with naming(path), open(descriptor, "wb") as file:
            file.write(content)
        os.chmod(temporary, stat.S_IMODE(mode))
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def set_aside(path: Path, name: str) -> Path | None:
    """Rename a regular file, or the one that a link names, inside its folder. Leaves anything else where it is.

    If the name is taken, it gets a number. Returns the new path, or None if nothing was renamed.
    """
    if not path.is_file():
        return None
    path = path.resolve()
    stem, dot, ending = name.rpartition(".")
    names = itertools.chain([name], (f"{stem}-{number}{dot}{ending}" for number in itertools.count(2)))
    new = next(place for place in map(path.with_name, names) if not place.exists())
    os.replace(path, new)
    return new


def try_folder(path: Path) -> None:
    """Try to make a folder and a file in it, so that a run fails early if that is not possible. Raises ``OSError``."""
    import tempfile

    path.mkdir(parents=True, exist_ok=True)
    with naming(path), tempfile.TemporaryFile(dir=path) as file:
        file.write(b"x")
