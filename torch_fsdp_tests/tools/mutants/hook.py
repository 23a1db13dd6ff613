"""Makes the change: compiles a mutant's module from a changed syntax tree when it is imported.

Neither source nor bytecode is written. Forks of a process, including ranks, also have the changed module. Interpreters
that tests start run this code through ``site/sitecustomize.py``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from torch_fsdp_tests.tools.mutants.sites import MARKER, Source, is_in, module_of

VARIABLE = "TORCH_FSDP_TESTS_MUTANT"  # the id of a process' mutant
REACHED = "TORCH_FSDP_TESTS_MUTANT_REACHED"  # a file that is created when changed code runs
BROKEN = ".broken"  # the suffix of a file that says why there is no changed code
SITE = Path(__file__).parent / "site"


def changed_code(source: bytes, path: str, id: str) -> CodeType:
    """A module's code with the mutant's change and the marker. Raises ``LookupError`` for an unknown id."""
    changed = Source(source, module_of(id), on_cpu=False, only=id)
    mutant = changed.mutants.get(id)
    if mutant is None:
        raise LookupError(f"{path} has no place for the mutant {id}")
    mutant.mark()
    mutant.apply()
    code: CodeType = compile(changed.tree, path, "exec", dont_inherit=True)
    return code


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module again into its former object. The mutant's module is loaded with the change."""

    def __init__(self, name: str, path: str, id: str, former: ModuleType | None) -> None:
        super().__init__(name, path)
        self._id, self._former = id, former

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._former

    def get_code(self, fullname: str) -> Any:
        if fullname != module_of(self._id):
            return super().get_code(fullname)
        path = self.get_filename(fullname)
        try:
            return changed_code(self.get_data(path), path, self._id)
        except Exception as error:
            _note(error)
            raise

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == module_of(self._id):
            vars(module)[MARKER] = _marker(os.environ.get(REACHED))
        super().exec_module(module)


def _marker(path: str | None) -> Any:
    """Create a file, once per process. Changed code calls this."""
    done = path is None

    def reached() -> None:
        nonlocal done
        if not done:
            done = True
            with contextlib.suppress(OSError):
                os.close(os.open(path or "", os.O_CREAT | os.O_WRONLY))

    reached._dynamo_marked_constant = True  # type: ignore[attr-defined]  # Dynamo calls it without a graph break
    return reached


def _note(error: Exception) -> None:
    """Report that the change could not be made, so that the tests' results do not count."""
    if reached := os.environ.get(REACHED):
        Path(reached).with_suffix(BROKEN).write_text(f"the change cannot be made: {error}", encoding="utf-8")


class Finder(importlib.abc.MetaPathFinder):
    def __init__(self, id: str, forgotten: dict[str, ModuleType]) -> None:
        self._id, self._forgotten = id, forgotten

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != module_of(self._id) and fullname not in self._forgotten:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin, self._id, self._forgotten.get(fullname))
        return spec


def install(id: str, forgotten: dict[str, ModuleType] | None = None) -> None:
    """Turn this process into a mutant, as soon as it imports the module. An empty id changes nothing.

    Raises ``RuntimeError`` if the module has been imported already.
    """
    if module_of(id) in sys.modules:
        error = RuntimeError(f"{module_of(id)} was imported before it could be changed")
        _note(error)
        raise error
    sys.meta_path.insert(0, Finder(id, forgotten or {}))


def forget(packages: Collection[str]) -> dict[str, ModuleType]:
    """Let the modules of packages be imported again when they are next used. Returns what :func:`install` needs.

    Other modules may refer to them, as torch's compiler does, so each remains the same object, but empty. Modules that
    refer to a class or function of the packages are also imported again.
    """
    modules = [(name, module) for name, module in sys.modules.items() if module]
    names = {name for name, _ in modules if any(is_in(package, name) for package in packages)}
    names |= {name for name, module in modules if _holds(module, packages)}
    forgotten = {name: sys.modules.pop(name) for name in names}
    for module in forgotten.values():
        vars(module).clear()
    gc.collect()  # the last reference also removes what the package registered in torch's operator libraries
    return forgotten


def _holds(module: ModuleType, packages: Collection[str]) -> bool:
    for value in list(vars(module).values()):
        origin = vars(value).get("__module__") if isinstance(value, type) else getattr(value, "__module__", None)
        if not isinstance(value, ModuleType) and isinstance(origin, str) and any(is_in(p, origin) for p in packages):
            return True
    return False


def environment(id: str, reached: Path, others: Mapping[str, str]) -> dict[str, str]:
    """The variables that turn a process, and every interpreter that it starts, into a mutant."""
    path = os.pathsep.join(filter(None, (str(SITE), others.get("PYTHONPATH"))))
    return {VARIABLE: id, REACHED: str(reached), "PYTHONPATH": path}


def install_from_environment() -> None:
    """Called when an interpreter starts."""
    if id := os.environ.get(VARIABLE):
        install(id)
