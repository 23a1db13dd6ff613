"""Writes files atomically: a reader finds the old file or the new one, but never a part of it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(place: object) -> Iterator[None]:
    """Add the path to an ``OSError`` in the block, because errors of a write do not contain it."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(place)) from error


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically. Of two writers, one wins. Raises ``OSError`` with the path."""
    import tempfile  # imported late, because a plan writes nothing

    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with naming(path), open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def try_folder(path: Path) -> None:
    """Try to make a folder and a file in it, so that a run fails early if that is not possible. Raises ``OSError``."""
    import tempfile

    path.mkdir(parents=True, exist_ok=True)
    with naming(path), tempfile.TemporaryFile(dir=path) as file:
        file.write(b"x")
