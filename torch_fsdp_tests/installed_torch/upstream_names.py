"""Names of ``torch.testing._internal`` that this project does not have. They come from the installed torch.

A test file of a vendor asks the modules that replace upstream's for hundreds of names. What starts, watches or judges
ranks, compares values or decides skips is this project's own. All else, such as constants, decorators of other modules
and whole modules, is looked up in the installed torch when it is first used (PEP 562), so that a newer torch brings its
newer names. :mod:`.upstream_tables` has the names of both kinds in the modules about ranks.

Nothing of this project needs a name from there.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import importlib.machinery
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from torch_fsdp_tests.installed_torch.upstream_tables import INSTEAD

UPSTREAM = "torch.testing._internal"
PACKAGE = __name__.partition(".")[0]
_ASK_LIMIT = 300  # seconds for a process that asks the device; a driver may take a minute to start

borrowed: dict[str, None] = {}  # the names that this process has got from the installed torch, in this order
computed_names: dict[str, Mapping[str, Callable[[], object]]] = {}  # by replacing module
_assignable: dict[str, Mapping[str, str]] = {}  # by replacing module: the environment variable of a global
_assigned: set[str] = set()  # the variables that an assignment has set


def complete(
    module: str,
    computed: Mapping[str, Callable[[], object]] | None = None,
    assignable: Mapping[str, str] | None = None,
) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module that replaces one of upstream's. Other names come from :func:`lookup`.

    ``computed`` has the names whose values are computed when they are used, such as those about the device under test.
    ``assignable`` has the globals of upstream's module that a test file may assign to choose its device, each with the
    environment variable that the assignment then sets. A variable that the user has set has priority.
    """
    computed_names[module] = computed or {}
    # With a path, "from module import name" asks the finder of the package about a missing name, which explains it.
    vars(sys.modules[module]).setdefault("__path__", [])
    if assignable:
        _assignable[module] = assignable
        sys.modules[module].__class__ = _Assignable

    def get(name: str) -> Any:
        compute = computed_names[module].get(name)
        return lookup(module, name) if compute is None else compute()

    return get


def renamed(value: object, old: str, new: str) -> Callable[[], object]:
    """The value of a name that newer versions of torch have replaced. Its use gives a ``FutureWarning``."""

    def compute() -> object:
        warnings.warn(f"{old} is the name in torch 2.6 and older versions: use {new}", FutureWarning, stacklevel=3)
        return value

    return compute


class _Assignable(ModuleType):
    """A module with globals that set environment variables."""

    def __setattr__(self, name: str, value: object) -> None:
        variable = _assignable[self.__name__].get(name)
        if variable is None:
            super().__setattr__(name, value)
        elif variable in os.environ and variable not in _assigned:
            if os.environ[variable] != str(value):
                words = (
                    f"{self.__name__}.{name} = {value!r} has no effect, because {variable} is {os.environ[variable]}"
                )
                warnings.warn(words, stacklevel=2)
        else:
            _assigned.add(variable)
            os.environ[variable] = str(value)

    def __delattr__(self, name: str) -> None:
        variable = _assignable[self.__name__].get(name)
        if variable is None:
            super().__delattr__(name)
        elif variable in _assigned:
            _assigned.discard(variable)
            os.environ.pop(variable, None)


def borrowed_in_words() -> str | None:
    """A sentence about the names that this process has got from the installed torch, or None."""
    return f"from {UPSTREAM} of {installed_torch()}: {', '.join(borrowed)}" if borrowed else None


def lookup(module: str, name: str) -> Any:
    """Return what a replacing module of this project, by its full name, lacks: upstream's value of the same place.

    One that belongs to upstream's way to run ranks can be imported. Who uses it gets an ``ImportError``, which says
    what to do instead. Raises ``AttributeError`` for a name that upstream's module lacks.
    """
    place = module.removeprefix(f"{PACKAGE}.")
    missing = AttributeError(f"module {module!r} has no attribute {name!r}")
    if name.startswith("__") or importlib.util.find_spec(UPSTREAM) is None:
        raise missing
    instead = INSTEAD.get(place, {}).get(name)
    if instead is not None:
        return Refused(f"{PACKAGE} has no {place}.{name}: {instead}")
    origin = _imports(place).get(name)
    if origin is not None:  # upstream's module imports it from another one, which this project may replace
        return (
            importlib.import_module(origin[0])
            if origin[1] is None
            else getattr(importlib.import_module(origin[0]), origin[1])
        )
    try:
        value = getattr(_module(place), name)
    except AttributeError:
        raise missing from None
    if _starts_ranks(value):
        return Refused(
            f"{UPSTREAM}.{place}.{name} starts ranks with upstream's harness, which passes a test whose rank 1 dies: "
            f"derive from a test case of {PACKAGE}.common_distributed or {PACKAGE}.common_fsdp"
        )
    borrowed[f"{place}.{name}"] = None
    if type(value).__name__ == "LazyVal" and value._cb is not None:
        value._cb = functools.partial(_without_driver, place, name, value._cb)
    return value


def lookup_method(place: str, cls: str, name: str, case: object) -> Any:
    """Return a method of upstream's class of this name, bound to an object of the class that replaces it.

    Raises ``AttributeError`` for a name that upstream's class lacks, and then imports nothing.
    """
    # The text is searched before it is parsed, because tests are also asked for names that no class has.
    if f" def {name}(" not in (_source_of(place) or "") or name not in _methods(place, cls):
        raise AttributeError(f"{type(case).__name__!r} object has no attribute {name!r}")
    borrowed[f"{place}.{cls}.{name}"] = None
    return vars(getattr(_module(place), cls))[name].__get__(case, type(case))


@functools.cache
def _methods(place: str, cls: str) -> frozenset[str]:
    """The names of the methods that upstream's class defines."""
    tree = tree_of(place)
    found = (node for node in (tree.body if tree else ()) if isinstance(node, ast.ClassDef) and node.name == cls)
    return frozenset(each.name for node in found for each in node.body if isinstance(each, ast.FunctionDef))


class Refused:
    """What a file imports in place of a name that it must not use: a file with many tests may need it for one."""

    def __init__(self, words: str) -> None:
        self._words = words

    def _refuse(self, *_: object, **__: object) -> Any:
        raise ImportError(self._words)

    __call__ = __mro_entries__ = __instancecheck__ = __subclasscheck__ = __enter__ = __exit__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(self._words)


@functools.cache
def _imports(place: str) -> Mapping[str, tuple[str, str | None]]:
    """What upstream's module imports from its neighbors, by its name there: the replacing module, and the name in it.

    Without a name it is the module itself.
    """
    found: dict[str, tuple[str, str | None]] = {}
    tree = tree_of(place)
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(UPSTREAM):
            continue
        module = f"{PACKAGE}{(node.module or '').removeprefix(UPSTREAM)}"
        for alias in node.names:
            is_module = module == PACKAGE
            found[alias.asname or alias.name] = (f"{module}.{alias.name}", None) if is_module else (module, alias.name)
    return found


def tree_of(place: str) -> ast.Module | None:
    """The syntax tree of upstream's module, or None without one."""
    source = _source_of(place)
    return None if source is None else ast.parse(source)


@functools.cache
def _source_of(place: str) -> str | None:
    spec = _spec(place)
    return None if spec is None or spec.origin is None else Path(spec.origin).read_text(encoding="utf-8")


def _spec(place: str) -> importlib.machinery.ModuleSpec | None:
    """Where the installed torch has a module of upstream's harness, or None if it has none."""
    try:
        return importlib.util.find_spec(f"{UPSTREAM}.{place}")
    except ModuleNotFoundError:  # also torch itself may be missing
        return None


@functools.cache
def _module(place: str) -> ModuleType:
    """Import upstream's module. Of what the import changes in this process, the backends that it registers stay. It
    starts no driver.
    """
    with mock.patch.dict(os.environ), _unchanged_torch(), _answered_by_another_process():
        os.environ.pop("NUM_PARALLEL_PROCS", None)  # with it, the import sets a limit for the memory of a device
        return importlib.import_module(f"{UPSTREAM}.{place}")


@contextlib.contextmanager
def _answered_by_another_process() -> Iterator[None]:
    """Answer the questions of an import, whether there are devices and how many, without this process' runtime."""
    device = _idle_device()
    if device is None:
        yield
        return
    it = "torch.get_device_module(torch.accelerator.current_accelerator())"
    answers = _ask(f"import torch; it = {it}; value = it.is_available(), it.device_count()")
    with contextlib.ExitStack() as stack:
        for name, answer in zip(("is_available", "device_count"), answers, strict=True):
            stack.enter_context(mock.patch.object(device, name, lambda answer=answer: answer))
        yield


def _idle_device() -> ModuleType | None:
    """torch's module of the accelerator if there is one whose runtime does not run yet in this process."""
    import torch

    current = torch.accelerator.current_accelerator()
    module = None if current is None else torch.get_device_module(current.type)
    return None if module is None or getattr(module, "is_initialized", lambda: False)() else module


def _ask(code: str) -> Any:
    """The ``value`` that code computes in another process, in which a driver may start."""
    words = [sys.executable, "-c", f"{code}; import json; print(json.dumps(value))"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_ASK_LIMIT)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RuntimeError(f"a process that asks the device failed: {last}; it ran: {code}")
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def _unchanged_torch() -> Iterator[None]:
    """Prevent that an import of upstream's harness freezes flags, and replaces or adds a backend that is ours.

    Other backends that it registers stay: functions of the same module need them.
    """
    import torch
    from torch.distributed import Backend

    tables = [(table, copy.copy(table)) for table in vars(Backend).values() if isinstance(table, dict | list)]
    attributes = set(vars(Backend))
    try:
        with warnings.catch_warnings(), mock.patch.object(torch.backends, "disable_global_flags", lambda: None):
            warnings.simplefilter("ignore")  # about packages that upstream's tests could use
            yield
    finally:
        for table, before in tables:
            if isinstance(table, list):
                table[:] = [*before, *(each for each in table if each not in before and each not in _OUR_BACKENDS)]
            else:
                for key in {*table} - {*before}:
                    if key.lower() in _OUR_BACKENDS or table[key] in _OUR_BACKENDS:
                        del table[key]
                table.update(before)
        for name in vars(Backend).keys() - attributes:
            if name.lower() in _OUR_BACKENDS:
                delattr(Backend, name)


_OUR_BACKENDS = ("fake", "threaded")


def _starts_ranks(value: object) -> bool:
    bases = value.__mro__ if isinstance(value, type) else ()
    return any(f"{UPSTREAM}.common_distributed.{base.__name__}" in _RANK_CASES for base in bases if _is_upstreams(base))


def _is_upstreams(cls: type) -> bool:
    return cls.__module__ == f"{UPSTREAM}.common_distributed"


_RANK_CASES = {
    f"{UPSTREAM}.common_distributed.{name}"
    for name in ("MultiProcessTestCase", "MultiThreadedTestCase", "MultiProcContinuousTest")
}


def _without_driver(place: str, name: str, compute: Callable[[], Any]) -> Any:
    """The value of a constant that may ask the device, computed in another process if this one may still fork ranks."""
    if _idle_device() is None:
        return compute()
    return _ask(f"from {UPSTREAM} import {place} as it; it = it.{name}; bool(it); value = it._value")


# --- a function that torch itself calls -------------------------------------------------------------------------------


class _CommonUtils(importlib.machinery.SourceFileLoader):
    """The loader of upstream's ``common_utils``, which gets ``run_tests`` of this project."""

    run_tests: Callable[..., None]

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        vars(module)["run_tests"] = self.run_tests


class _CommonUtilsFinder:
    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != f"{UPSTREAM}.common_utils":
            return None
        found = importlib.machinery.PathFinder.find_spec(fullname, path)
        if found is not None and found.origin is not None:
            found.loader = _CommonUtils(fullname, found.origin)
        return found


def replace_run_tests(run_tests: Callable[..., None]) -> None:
    """Let ``run_tests`` of ``torch._dynamo.test_case`` and the like, which call upstream's, run the tests of a file.

    Upstream's exits if a class of the file does not derive from its own test case.
    """
    _CommonUtils.run_tests = staticmethod(run_tests)
    loaded = sys.modules.get(f"{UPSTREAM}.common_utils")
    if loaded is None:
        sys.meta_path.insert(0, _CommonUtilsFinder)
    else:
        vars(loaded)["run_tests"] = run_tests


# --- modules that only upstream has -----------------------------------------------------------------------------------


class _Borrowed:
    """The loader of a module that has all its names from upstream's module of the same place."""

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> None:
        return None

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        place = module.__name__.removeprefix(f"{PACKAGE}.")
        upstreams = _module(place)
        borrowed[place] = None
        public = getattr(upstreams, "__all__", [name for name in vars(upstreams) if not name.startswith("_")])
        vars(module).update(
            __getattr__=functools.partial(lookup, module.__name__),
            __all__=[name for name in public if name not in INSTEAD.get(place, ())],
            __doc__=f"``{UPSTREAM}.{place}`` of the installed torch, name by name.",
        )


def spec(missing: str) -> importlib.machinery.ModuleSpec:
    """How a module that this project lacks is loaded. ``missing`` is its dotted name below the package.

    Raises ``ModuleNotFoundError``, with what to do, if the installed torch lacks it as well.
    """
    if missing.partition(".")[0] == "tools":
        raise ModuleNotFoundError(f"{PACKAGE}.tools is not installed with the suite: run it in a checkout")
    if _spec(missing) is not None:
        return importlib.machinery.ModuleSpec(f"{PACKAGE}.{missing}", _Borrowed(), is_package=True)  # type: ignore[arg-type]
    # The exception gets no name, because "from package import name" would hide it.
    raise ModuleNotFoundError(
        f"neither {PACKAGE} nor {UPSTREAM} of {installed_torch()} has {missing}: "
        "correct the name, or test with a version of PyTorch that has it"
    )


def installed_torch() -> str:
    with contextlib.suppress(ImportError):
        import torch

        return f"PyTorch {torch.__version__}"
    return "PyTorch, which is not installed,"
