"""An environment for each version. It is made once, outside of the checkout, and kept."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch_fsdp_tests.dispatch.atomic import write_text
from torch_fsdp_tests.dispatch.listing import seconds
from torch_fsdp_tests.versions import pythons
from torch_fsdp_tests.versions.processes import Finished, Processes, Say
from torch_fsdp_tests.versions.pythons import Python
from torch_fsdp_tests.versions.refusal import CannotBeMade, Refusal
from torch_fsdp_tests.versions.wanted import Kind, Wanted, wheels_version

MADE = "made.json"  # written last; an environment without it is incomplete
# What torch needs at run time. A folder with a torch package may or may not have it.
_BESIDE_TORCH = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")
_SHOWN = ("Downloading ", "Installing collected ", "Building wheel", "... ")  # lines of pip that tell what takes long

_NOT_FOR_THIS_PYTHON = ("No matching distribution found for torch", "is not a supported wheel on this platform")
_NO_NETWORK = re.compile(
    r"Failed to establish a new connection|Temporary failure in name resolution|Name or service not known"
    r"|Network is unreachable|Read timed out|ConnectTimeout|Connection (refused|reset|aborted)|Tunnel connection failed"
)
_ASKED = [(3, minor) for minor in range(10, 20)]  # Pythons, for the sentence that names those with wheels


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How environments are made: the options, and what the tests need beside torch."""

    folder: Path
    requirements: tuple[str, ...]
    pythons: tuple[str, ...] = ()
    index: tuple[str, ...] = ()  # arguments of pip that say where torch is
    nightly_index: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()  # arguments for every call of pip

    def of(self, wanted: Wanted) -> dict[str, object]:
        """Everything that determines the environment. Another recipe makes another environment."""
        stamp = [path.stat().st_mtime_ns for path in [Path(wanted.what)] if wanted.kind is Kind.WHEEL]
        return {
            "kind": wanted.kind.value,
            "what": wanted.what,
            "stamp": stamp,
            "requirements": self.requirements,
            "pythons": self.pythons,
            "index": self.nightly_index if wanted.kind is Kind.NIGHTLY else self.index,
            "pip": self.pip,
        }


@dataclasses.dataclass(frozen=True)
class Environment:
    """An interpreter that has a version of torch and what the tests need."""

    wanted: Wanted
    python: str

    def variables(self, caller: Mapping[str, str]) -> dict[str, str]:
        """The caller's variables, without those that change paths or forbid bytecode, which makes starts faster."""
        left_out = {"PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
        folder = os.path.dirname(self.python)
        path = os.pathsep.join(filter(None, (folder, caller.get("PATH"))))
        return {**{name: value for name, value in caller.items() if name not in left_out}, "PATH": path}


class Maker:
    """Makes environments, or finds existing ones."""

    def __init__(self, recipe: Recipe, processes: Processes) -> None:
        self._recipe, self._processes = recipe, processes
        self._say: Say = lambda words: None
        self._found: list[Python] | None = None

    def make(self, wanted: Wanted, say: Say) -> Environment:
        """A version's environment. Raises :class:`Refusal` if there is no such torch, or :class:`CannotBeMade`."""
        self._say = say
        if wanted.kind is Kind.ENVIRONMENT:
            return Environment(wanted, wanted.what)
        recipe = json.loads(json.dumps(self._recipe.of(wanted)))
        digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:8]
        folder = self._recipe.folder / f"{wanted.label}-{digest}"
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        recipe["day"] = today if wanted.kind is Kind.NIGHTLY else None
        environment = Environment(wanted, str(folder / "bin" / "python"))
        with self._lock(folder):
            if _made(folder) == recipe:
                self._say(f"the environment exists: {folder}")
                return environment
            try:
                self._make(environment, folder)
                write_text(folder / MADE, json.dumps(recipe, indent=1) + "\n")
            except OSError as error:
                raise CannotBeMade(_space(folder) or f"{folder}: {error}", Path(f"{folder}.log")) from error
            finally:
                if _made(folder) != recipe:
                    shutil.rmtree(folder, ignore_errors=True)
        return environment

    @contextlib.contextmanager
    def _lock(self, folder: Path) -> Iterator[None]:
        """Wait while another run makes the same environment. The lock ends with the process that holds it."""
        with open(f"{folder}.lock", "w") as file:
            said = False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not said:
                        self._say(f"waiting for another run that is making {folder}")
                        said = True
                    self._processes.check()
                    time.sleep(0.2)
            yield

    def _make(self, environment: Environment, folder: Path) -> None:
        began = time.monotonic()
        log = Path(f"{folder}.log")
        log.unlink(missing_ok=True)
        wanted = environment.wanted
        for python in self._candidates(wanted):
            if folder.exists():  # incomplete, of another day, or of a Python without such a torch
                self._say(f"removing {folder}")
                shutil.rmtree(folder)
            self._say(f"making an environment with {python} ({python.path}): {folder}")
            made = self._processes.run([python.path, "-m", "venv", str(folder)], os.environ, log, lambda line: None)
            if made.status != 0:
                raise CannotBeMade(self._words(made, folder), log)
            if self._install_torch(environment, folder, log):
                break
            self._say(f"no torch {wanted.label} for {python}")
        else:
            raise Refusal(self._not_found(environment, log))
        # Nothing that is installed from now on may replace torch.
        fixed = Path(f"{folder}.constraints")
        write_text(fixed, self._frozen(environment, log, folder))
        more = _BESIDE_TORCH if wanted.kind is Kind.PACKAGE else ()
        self._pip(environment, folder, log, ["-c", str(fixed), *more, *self._recipe.requirements])
        self._say(f"ready after {seconds(time.monotonic() - began)}")

    def _candidates(self, wanted: Wanted) -> list[Python]:
        if self._found is None:
            self._found = pythons.find(self._recipe.pythons, os.environ)
        fitting = [python for python in self._found if wanted.python in (None, python.version)]
        if not fitting:
            there = ", ".join(str(python) for python in self._found) or "none at all"
            needed = "3.10 or newer" if wanted.python is None else ".".join(map(str, wanted.python))
            raise Refusal(
                f"torch {wanted.label} needs Python {needed} with venv and pip, but found {there}; "
                "name an interpreter with --python"
            )
        return fitting

    def _install_torch(self, environment: Environment, folder: Path, log: Path) -> bool:
        """Install torch. Returns False if this version does not exist for this Python."""
        wanted, index = environment.wanted, self._recipe.index
        match wanted.kind:
            case Kind.PACKAGE:
                (site,) = folder.glob("lib/python*/site-packages")
                (site / "torch_of_folder.pth").write_text(f"{wanted.what}\n", encoding="utf-8")
                return True
            case Kind.RELEASE:
                what: Sequence[str] = [f"torch=={wanted.what}", *index]
            case Kind.NIGHTLY:
                what = ["--pre", "torch", *self._recipe.nightly_index]
            case Kind.WHEEL:
                what = [wanted.what, *index]
            case _:
                what = [f"torch=={wheels_version(wanted.what)}", "--find-links", wanted.what, *index]
        self._say(f"installing torch {wanted.label}")
        done = self._pip(environment, folder, log, what, may_lack=True)
        return done.status == 0

    def _pip(
        self, environment: Environment, folder: Path, log: Path, what: Sequence[str], may_lack: bool = False
    ) -> Finished:
        """Run ``pip install``. With ``may_lack``, torch may be missing for this Python."""
        options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
        command = [environment.python, "-m", "pip", "install", *options, *self._recipe.pip, *what]
        done = self._processes.run(command, environment.variables(os.environ), log, self._say_some)
        lacks = any(words in done.output for words in _NOT_FOR_THIS_PYTHON) and not _NO_NETWORK.search(done.output)
        if done.status != 0 and not (may_lack and lacks):
            raise CannotBeMade(self._words(done, folder), log)
        return done

    def _frozen(self, environment: Environment, log: Path, folder: Path) -> str:
        """A constraint that keeps the installed torch."""
        command = [environment.python, "-m", "pip", "--disable-pip-version-check", "list", "--format=freeze"]
        done = self._processes.run(command, environment.variables(os.environ), log, lambda line: None)
        if done.status != 0:
            raise CannotBeMade(self._words(done, folder), log)
        return "".join(f"{line}\n" for line in done.output.splitlines() if line.startswith("torch=="))

    def _say_some(self, line: str) -> None:
        if line.lstrip().startswith(_SHOWN):
            self._say(line.strip())

    def _words(self, done: Finished, folder: Path) -> str:
        """Why a step failed: the cause if it is known, and the tool's last output."""
        said = done.last_words()
        if "No space left on device" in done.output and (space := _space(folder)):
            return f"{space}: {said}"
        return f"the index cannot be reached: {said}" if _NO_NETWORK.search(done.output) else said

    def _not_found(self, environment: Environment, log: Path) -> str:
        """No interpreter here has this version. Say for which Pythons it is made, if the index knows."""
        wanted = environment.wanted
        tried = ", ".join(str(python) for python in self._candidates(wanted))
        if wanted.kind is not Kind.RELEASE:
            return f"there is no torch {wanted.label} for {tried}; name another interpreter with --python ({log})"
        index = [*self._recipe.index, *self._recipe.pip]
        public = wanted.what.partition("+")[0]
        having = []
        for version in _ASKED:
            only = ["--python-version", ".".join(map(str, version)), "--only-binary", ":all:", "--pre"]
            command = [environment.python, "-m", "pip", "index", "versions", "torch", *only, *index]
            done = self._processes.run(command, environment.variables(os.environ), log, lambda line: None)
            if done.status == 0 and re.search(rf"(?<![\w.]){re.escape(public)}(\+\w+)?(?![\w.])", done.output):
                having.append(version)
        if not having:
            return f"there is no torch {wanted.what} for this machine in the index (tried with {tried}; {log})"
        names = ", ".join(".".join(map(str, version)) for version in having)
        return f"torch {wanted.what} is made for Python {names}, but found {tried}; name an interpreter with --python"


def _made(folder: Path) -> object:
    """The recipe of a complete environment."""
    try:
        return json.loads((folder / MADE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _space(folder: Path) -> str | None:
    """The message for a disk that is almost full."""
    free = shutil.disk_usage(folder.parent).free
    return f"there is no space left in {folder.parent} ({free >> 20} MB)" if free < 1 << 30 else None
