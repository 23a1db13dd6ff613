"""What fixtures have changed in the test process since the server was forked, as ranks get it. Both ends are here.

Class attributes reach all ranks. Settings of the process (those that :mod:`torch_fsdp_tests.process_state` watches)
reach ranks that upstream's harness forks, or makes as threads of the test process. Upstream starts other ranks as fresh
interpreters, which know nothing of them. Variables that torch reads once are the subject of ``server.start_method``.
"""

from __future__ import annotations

import base64
import pickle
import unittest
from collections.abc import Iterator
from typing import Any

from torch_fsdp_tests import process_state
from torch_fsdp_tests.ranks import calls, classes

_settings: dict[str, Any] = {}
_attributes: dict[type, dict[str, Any]] = {}  # of test classes


def note() -> None:
    """Note the state of this process, which its server inherits by the fork that follows."""
    _settings.update(process_state.values())
    _attributes.update((cls, dict(vars(cls))) for cls in classes.known.values())


def pack(cls: type, settings: bool) -> str:
    """What the ranks of a test class are to adopt. ``settings`` are those of the process."""
    changed = {
        name: value for name, value in process_state.values().items() if name in _settings and value != _settings[name]
    }
    return base64.b64encode(calls.dumps((changed if settings else {}, list(_changed_attributes(cls))))).decode()


def _changed_attributes(cls: type) -> Iterator[tuple[type, str, Any]]:
    """The class, name and value of each attribute that can be sent. A test class, or a base of it, has it."""
    private = {name for base in cls.__mro__ if base not in _attributes for name in (*vars(base), *_annotated(base))}
    private |= set(dir(unittest.TestCase))
    for owner in set(cls.__mro__) & _attributes.keys():
        for name, value in vars(owner).items():
            is_harness = name.startswith("_") and name in private
            if not is_harness and value is not _attributes[owner].get(name, _attributes) and _can_be_sent(value):
                yield owner, name, value


def _annotated(cls: type) -> set[str]:
    return set(vars(cls).get("__annotations__", ()))


def _can_be_sent(value: Any) -> bool:
    try:
        calls.dumps(value)
    except Exception:  # whatever the value raises when it is pickled
        return False
    return True


def adopt(packed: str) -> None:
    """In a rank, adopt what :func:`pack` has returned."""
    settings, attributes = pickle.loads(base64.b64decode(packed))
    process_state.adopt(settings)
    for owner, name, value in attributes:
        setattr(owner, name, value)
