"""Private names of torch, which are looked up when a test uses them.

If a test file imports a private name and torch renames it, the whole file breaks. If the name is looked up here
instead, only the tests that use it skip, and the reason says which name is gone and which file to update.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any
from unittest import mock

from torch_fsdp_tests import settings
from torch_fsdp_tests.verdict import Reason, SkipKind
from torch_fsdp_tests.verdict.events import Skipped

__unittest = True

_CHECKOUT = Path(__file__).resolve().parents[2]


class NameIsGone(Exception):
    """The installed torch does not have a name that a test needs, or a fact about it cannot be decided."""


class _SkippedNameIsGone(NameIsGone, Skipped):
    pass


def module(name: str) -> Any:
    """Return an object that represents the module of that name. It imports the module when an attribute is used.

    Reading an attribute that torch lacks raises :class:`NameIsGone`. Attributes are set in the module itself, so
    ``mock.patch.object`` works.
    """
    return _LateModule(name, sys._getframe(1).f_code.co_filename)


class _LateModule:
    __slots__ = ("_asked_in", "_name")

    def __init__(self, name: str, asked_in: str) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_asked_in", asked_in)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        return vars(self._module)

    @property
    def _module(self) -> ModuleType:
        try:
            return importlib.import_module(self._name)
        except ImportError as error:
            raise _gone(self._name, self._asked_in) from error

    def __getattr__(self, name: str) -> Any:
        try:
            return getattr(self._module, name)
        except AttributeError as error:
            raise _gone(f"{self._name}.{name}", self._asked_in) from error

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._module, name, value)

    def __repr__(self) -> str:
        return f"<{self._name}, looked up when it is used>"


def groups_of_state(state: Any) -> list[Any]:
    """The parameter groups of an FSDP2 module's state. Before torch 2.12, it has at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [attribute(state, "_fsdp_param_group")]
    return [group for group in groups if group is not None]


def attribute(owner: Any, name: str) -> Any:
    """Return ``owner.name``, where ``owner`` is an object or a class of torch.

    Raises :class:`NameIsGone` if FSDP's code no longer mentions the name. If FSDP mentions it but this object lacks the
    attribute, the ``AttributeError`` fails the test, as it should.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        if name in _names_in_fsdp():
            raise
        raise _gone(name, sys._getframe(1).f_code.co_filename) from error


def set_attribute(owner: Any, name: str, value: object) -> None:
    """Set ``owner.name``. Raises :class:`NameIsGone` if FSDP's code no longer mentions the name."""
    if name not in _names_in_fsdp():
        raise _gone(name, sys._getframe(1).f_code.co_filename)
    setattr(owner, name, value)


def patched(owner: Any, name: str, *replacement: Any, **kwargs: Any) -> Any:
    """Like ``mock.patch.object``, but raises :class:`NameIsGone` if torch has renamed the attribute."""
    if not isinstance(owner, _LateModule) and not hasattr(owner, name):
        asked_in = sys._getframe(1).f_code.co_filename
        raise _gone(f"{getattr(owner, '__qualname__', type(owner).__qualname__)}.{name}", asked_in)
    return mock.patch.object(owner, name, *replacement, **kwargs)


def _gone(name: str, asked_in: str) -> NameIsGone:
    path = Path(asked_in)
    user = path.relative_to(_CHECKOUT) if path.is_relative_to(_CHECKOUT) else path
    return name_is_gone(f"the installed torch has no {name}, which {user} uses: update that file")


def name_is_gone(reason: str, kind: SkipKind = SkipKind.NAME) -> NameIsGone:
    """The error for a test that cannot run: a skip, or an error if ``--strict-names`` was given."""
    is_strict = settings.is_on(settings.STRICT_NAMES_VARIABLE, os.environ)
    return NameIsGone(reason) if is_strict else _SkippedNameIsGone(Reason(reason, kind))


@functools.cache
def _names_in_fsdp() -> frozenset[str]:
    """Every name that the code of torch's FSDP mentions."""
    names: set[str] = set()
    for name, loaded in list(sys.modules.items()):
        if f"{name}.".startswith("torch.distributed.fsdp.") and loaded is not None:
            _collect(loaded.__spec__.loader.get_code(name), names)  # type: ignore[union-attr]
    return frozenset(names)


def _collect(code: CodeType, names: set[str]) -> None:
    names.update(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            _collect(constant, names)
        elif isinstance(constant, str):  # the names of annotated attributes, and setattr(flat_param, "_mp_shard", ...)
            names.add(constant)
