"""Writing files so that a reader finds the old one or the new one, never half of one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def naming(place: object) -> Iterator[None]:
    """Have an ``OSError`` in the block name the place that it is about; that of a write does not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(place)) from error


def write_text(path: Path, text: str) -> None:
    """Replace a file at one stroke; two writers leave the text of one of them. Raises ``OSError``, with the path."""
    import tempfile  # not at import: a plan writes nothing

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
    """Make a folder and a file in it, so that a run does not learn at its end that it cannot. Raises ``OSError``."""
    import tempfile

    path.mkdir(parents=True, exist_ok=True)
    with naming(path), tempfile.TemporaryFile(dir=path) as file:
        file.write(b"x")
