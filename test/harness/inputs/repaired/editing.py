"""Replaces text in the source of torch's functions, in memory."""

from __future__ import annotations

import inspect
import sys
import textwrap
from typing import Any


def edit(owner: Any, name: str, *replacements: tuple[str, str]) -> None:
    """Replace texts in the source of a function. The result replaces the function wherever torch has imported it.

    Raises ``LookupError`` for a text that does not occur exactly once.
    """
    former = getattr(owner, name)
    function = inspect.unwrap(former)
    source = textwrap.dedent(inspect.getsource(function))
    for old, new in replacements:
        if source.count(old) != 1:
            raise LookupError(f"{name} has {old!r} {source.count(old)} times")
        source = source.replace(old, new)
    made: dict[str, Any] = {}
    exec(source, function.__globals__, made)
    setattr(owner, name, made[name])
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("torch.distributed") and vars(module).get(name) is former:
            setattr(module, name, made[name])
