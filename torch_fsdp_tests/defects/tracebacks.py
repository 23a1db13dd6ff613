"""Which defects a traceback may come from. Does not import torch."""

from __future__ import annotations

import re

from torch_fsdp_tests.defects import registry
from torch_fsdp_tests.defects.registry import Defect

# In a traceback: any frame, the module and the function of a frame of torch or Python, and the exceptions that Python
# raises by itself in any program.
ANY_FRAME = re.compile(r'File ".*", line \d+, in ')
_FRAME = re.compile(r'File "[^"]*/((?:torch/|python[\d.]*/(?!site-packages))[^"]*)\.py", line \d+, in (\S+)')
ERROR = re.compile(r"\b\w+(?:Error|Exception)\b")
_PYTHONS_OWN = {"AttributeError", "IndexError", "KeyError", "TypeError", "ZeroDivisionError"}


def raising(text: str) -> list[Defect]:
    """The defects whose error is in this text, the nearest first, and of several equally near ones the worst."""
    found = (defect for defect in registry.defects() if defect.error and _ends_in(defect, text))
    return sorted(found, key=lambda defect: distance(defect, text))


def pattern(defect: Defect) -> str:
    """Matches the message of its error."""
    return ".*".join(map(re.escape, defect.message.split(" ... ")))


def distance(defect: Defect, text: str) -> tuple[int, int]:
    """How many frames lie between the end of a traceback and a function that the defect names.

    If that is the same for two defects, the message with more words is nearer.
    """
    names = [name for _, name in reversed(_frames(text))]
    words = len(re.findall(r"[^\W_]+", defect.message))
    if not defect.functions or not names:
        return len(names), -words
    return min((names.index(name) for name in defect.functions if name in names), default=len(names) + 1), -words


def _frames(text: str) -> list[tuple[str, str]]:
    return [(module.replace("/", "."), name) for module, name in _FRAME.findall(text)]


def _ends_in(defect: Defect, text: str) -> bool:
    """Whether the text has the defect's message, and a frame near it.

    A user may have called another function of the same file, unless any program could have the message. If the text
    has no frames, as when only the message is known, the message is enough.
    """
    found = re.search(pattern(defect), text, re.DOTALL)
    if not found or not defect.functions or not ANY_FRAME.search(text):
        return found is not None
    frames = _frames(text)
    if {*defect.functions} & {name for _, name in frames}:
        return True
    error = ERROR.findall(text[: found.end()])[-1:]
    if {*error} & _PYTHONS_OWN or re.fullmatch(r"\w+", defect.message):
        return False
    return any(defect.where.startswith(f"{module}.") for module, _ in frames)
