"""The test classes of this process, by module and qualified name.

The rank server is forked off the test process once all test files are loaded. So a rank finds classes here that it
could not import, because a function or a decorator made them.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

known: dict[tuple[str, str], type] = {}


def register(cls: type) -> None:
    """Register a test class, so that ranks can find it."""
    known[cls.__module__, cls.__qualname__] = cls


def find(module: str, qualname: str) -> Any:
    """The registered class, or the one in its module. Raises ``LookupError`` with the reason."""
    if (module, qualname) in known:
        return known[module, qualname]
    try:
        owner: Any = sys.modules.get(module) or importlib.import_module(module)
        for name in qualname.split("."):
            owner = getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise LookupError(f"a rank cannot find the test class {module}.{qualname}: {error}") from error
    return owner
