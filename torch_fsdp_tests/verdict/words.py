"""How numbers, names and exceptions are written in one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

LINE_LIMIT = 300  # characters of what is to be one line
# The characters that XML 1.0 cannot hold, and the escape character, which Jenkins and GitLab reject.
_FORBIDDEN = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def seconds(value: float) -> str:
    """Format seconds with useful precision: ``4.2s``, ``3m05s``, ``1h02m``."""
    if value < 59.95:
        return f"{value:.1f}s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes}m{rest:02d}s" if minutes < 60 else f"{minutes // 60}h{minutes % 60:02d}m"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table for a terminal."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def first_few(names: Iterable[str], most: int = 5) -> str:
    """The first few of some names, and the number of the others."""
    known = list(names)
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0 and 2``, ``ranks 0-3``: runs of neighbors in short form."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    listed = words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"


# What may be behind a signal that the suite has not sent.
_HINTS = {
    "SIGKILL": "out of memory?",
    "SIGBUS": "shared memory full?",
    "SIGILL": "an instruction that this processor lacks?",
    "SIGSEGV": "see the stack",
    "SIGABRT": "gloo and NCCL abort when a peer is gone",
}


def death(end: float | str | None, was: str = "was") -> str:
    """How a process ended, to follow its name: with this exit code, or by the signal with this name."""
    if not isinstance(end, str):
        return f"exited with code {end}"
    hint = f" ({_HINTS[end]})" if end in _HINTS else ""
    return f"{was} killed by {end}{hint}"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, shortened if it is long. Works for exceptions that cannot be shown."""
    try:
        return next((line for line in str(error).splitlines() if line.strip()), "")[:LINE_LIMIT]
    except Exception as broken:
        return f"its message cannot be shown: {type(broken).__qualname__} in its __str__"


def in_one_line(error: BaseException) -> str:
    """The type of an exception, and the first line of its message."""
    return f"{type(error).__name__}: {first_line(error)}".removesuffix(": ")


def clean(text: str) -> str:
    """Escape the characters that XML cannot hold, as in ``\\x1b``."""
    return _FORBIDDEN.sub(lambda match: match[0].encode("unicode_escape", "surrogatepass").decode(), text)
