"""The seam between the core and its extensions: what an optional feature of a run can do, here and in a rank.

An extension is a package ``torch_fsdp_tests.extensions.NAME``, or what an entry point ``NAME`` of the group
``torch_fsdp_tests.extensions`` names. Its attribute ``EXTENSION``, an :class:`Extension`, declares the options, and
imports nothing else. If they ask for it, it makes the :class:`Feature` that works in this run. The core finds and calls
them, and knows none by name: the folder of any of them, with its tests, can be deleted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_fsdp_tests import installation
from torch_fsdp_tests.settings import EXTENSIONS_VARIABLE, ConfigurationError, Variable

if TYPE_CHECKING:  # the seam itself depends on no other part
    import unittest

    from torch_fsdp_tests.dispatch.exit_status import ExitStatus
    from torch_fsdp_tests.dispatch.other_ranks import OtherRanks
    from torch_fsdp_tests.dispatch.plan import Job, TestRun
    from torch_fsdp_tests.dispatch.run_results import Results
    from torch_fsdp_tests.dispatch.runtests import RunTests
    from torch_fsdp_tests.dispatch.select import Narrowed
    from torch_fsdp_tests.dispatch.stages import Stage
    from torch_fsdp_tests.ranks.group import Transport

FOLDER = Path(__file__).parent / "extensions"
ENTRY_POINTS = "torch_fsdp_tests.extensions"
AddOption = Callable[..., Any]  # ``add_argument`` of a group in ``--help``
Rerun = Callable[["Sequence[Job]", "Features", str], "Results"]  # runs jobs again, with these features


def absolute(text: str) -> Path:
    """The type of an option that is a path."""
    return Path(text).absolute()


class Place:
    """Where the ranks of tests run, as the process of a test file sees it. This one is the usual place: here."""

    world_size: int | None = None  # how many ranks there are; None for as many as a test wants
    one_host = True  # whether all of them are on this machine
    follows = False  # whether this process runs no tests, but follows the one that does
    maker = ""  # what made the ranks, in words
    remedy = ""  # how to run without it, in words

    def prepare(self) -> None:
        """Called before the device under test is looked at, and before anything that ranks inherit exists."""

    def begin(self) -> None:
        """Called before the first test. Does not return if this process ``follows``."""

    def transport(self) -> Transport | None:
        """How the group of one test reaches its ranks; None if it starts them here."""
        return None

    def conclude(self, status: int) -> int:
        """The exit status of this process, given that of its tests."""
        return status


@dataclasses.dataclass(frozen=True)
class PageTable:
    """What a page shows of ``report.json``: rows of texts below titles, and sentences."""

    title: str
    about: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    sentences: Sequence[str] = ()


class Extension:
    """What is known about a feature before it is used. Every method may be left out."""

    name = ""  # of its folder or of its entry point
    variables: Sequence[Variable] = ()  # environment variables for ``--help``
    in_report: Mapping[str, Any] = {}  # what ``report.json`` has of it if it does not work in a run
    in_report_of_test: Mapping[str, Any] = {}  # the same for each test

    # --- in the dispatcher ---

    def take_over(self, environment: Mapping[str, str], root: Path) -> ExitStatus | None:
        """Let this process work for another one that is the dispatcher, and return its exit status.

        None if this process is the dispatcher itself. Raises ``ConfigurationError``.
        """
        return None

    def other_ranks(self, environment: Mapping[str, str]) -> OtherRanks | None:
        """The processes in which the ranks of tests run besides this one, if there are any.

        Called before the options are known. Raises ``ConfigurationError`` if they cannot be reached.
        """
        return None

    def add_options(self, group: Callable[[str], AddOption]) -> None:
        """Declare options with ``group(TITLE)("--option", ...)``. An option that is not given must have no default."""

    def implied(self, given: Mapping[str, Any]) -> Mapping[str, Any]:
        """Options of the core that these options set, unless they are given."""
        return {}

    def feature(self, run: RunTests, given: Mapping[str, Any], environment: Mapping[str, str]) -> Feature | None:
        """What works in this run; None if nothing asks for it. ``given`` has the values of all given options.

        Raises :class:`~torch_fsdp_tests.settings.ConfigurationError` with a sentence if they are wrong.
        """
        return None

    def tables(self, data: Mapping[str, Any]) -> Sequence[PageTable]:
        """What a page shows of its part of the data of ``report.json``, which may lack that part."""
        return ()

    # --- in the process of a test file, and in its ranks ---

    def place(self, environment: Mapping[str, str]) -> Place | None:
        """Where ranks run, if not here. Every such process asks, so it must be cheap. Raises ``ConfigurationError``."""
        return None

    # --- in the process of a test file, and in its ranks, if the feature is ``in_tests`` ---

    def start(self, file: str) -> None:
        """Called before the test file is loaded. ``file`` is its name below the test directory."""

    def enter_rank(self, file_name: str, rank: int, world_size: int) -> None:
        """Called in the process of a rank before its first test. The ranks meet at ``file_name``."""

    def around(self, test: unittest.TestCase, rank: int) -> contextlib.AbstractContextManager[Any]:
        """What one test runs in, in each rank."""
        return contextlib.nullcontext()


class Feature:
    """An extension at work in one run. Every method may be left out, and then changes nothing."""

    in_tests = False  # whether :meth:`Extension.start` and :meth:`Extension.around` are called in test processes
    narrows = False  # whether :meth:`narrow` selects tests
    changes_torch = False  # whether test processes import another torch than the installed one
    traces = ""  # the option that needs the interpreter's tracing, which only one feature can have

    # --- before the first file ---

    def problem(self, run: RunTests) -> str | None:
        """A sentence that says why the options of the whole run are wrong, or None."""
        return None

    def needs_own_ranks(self, one_host: bool) -> str | None:
        """Why it cannot be used if the processes of this run do not start all ranks, or None.

        ``one_host`` says whether all ranks are on this machine.
        """
        return None

    def writes(self) -> Mapping[str, Path]:
        """The folders to write to at the end, each by its option. The run does not begin if one cannot be written."""
        return {}

    def narrow(self, selection: Sequence[TestRun], device: str) -> Narrowed | None:
        """The part of a selection that is worth running, for a type of device; None to leave it alone."""
        return None

    def begin(self) -> Sequence[str]:
        """Called right before the first file starts. Returns remarks. Raises ``ConfigurationError`` for bad files."""
        return ()

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """What the whole run happens in, such as a temporary folder."""
        return contextlib.nullcontext()

    # --- for the processes of test files ---

    def environment(self, environment: Mapping[str, str]) -> Mapping[str, str]:
        """More variables for them. ``environment`` is what they get so far."""
        return {}

    def interpreter(self, directory: Path, test_directory: Path) -> Sequence[str]:
        """Arguments of their interpreter. With any, each is a fresh one. ``directory`` is a temporary folder."""
        return ()

    # --- while files run ---

    def drive(self, once: Callable[[], Results], say: Callable[[str], None]) -> Results:
        """Run all jobs with ``once()``, perhaps several times, and return the results. ``say`` prints a line."""
        return once()

    def stage(self, stage: Stage) -> Stage:
        """Take note of a stage of the run, and return what is shown and kept of it, usually the same."""
        return stage

    # --- at the end ---

    def conclude(self, results: Results, rerun: Rerun, jobs: Sequence[Job]) -> Conclusion:
        """Write what the options ask for, and return what the run prints of it. May raise ``OSError``.

        ``rerun(jobs, features, why)`` runs some jobs again, with these features, and says why.
        """
        return Conclusion()

    def status(self, status: ExitStatus) -> ExitStatus:
        """The exit status of the run, which is ``status`` by the results alone."""
        return status

    def add_to_report(self, data: dict[str, Any], results: Results) -> None:
        """Add to the data of ``report.json`` before it is written."""

    def properties(self, results: Results) -> Mapping[str, str]:
        """Facts about the run in words, by name."""
        return {}

    def reported(self, folder: Path, data: Mapping[str, Any]) -> Sequence[str]:
        """``report.json`` has been written to this folder. Returns lines to print. May raise ``OSError``."""
        return ()

    # --- in words ---

    def selecting(self) -> Sequence[str]:
        """The options by which it selects tests, as they were given."""
        return ()

    def repeating(self, test: str | None) -> Sequence[str]:
        """The options that belong to a command that repeats a test or a file."""
        return ()

    def headline(self) -> str:
        """A few words for the first line of the run."""
        return ""


@dataclasses.dataclass(frozen=True)
class Conclusion:
    """What a feature says at the end: lines, and an exit status if that of the run is 0."""

    lines: Sequence[str] = ()
    status: ExitStatus | None = None


class Features(dict[str, Feature]):
    """The features of a run, by the name of their extensions."""

    @property
    def narrow(self) -> bool:
        """Whether any of them selects tests."""
        return any(feature.narrows for feature in self.values())

    def words(self, ask: Callable[[Feature], Sequence[str]]) -> list[str]:
        """What all of them answer, in a row."""
        return [word for feature in self.values() for word in ask(feature)]

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The variables for the processes of test files."""
        variables = dict(environment)
        for feature in self.values():
            variables |= feature.environment(variables)
        names = ",".join(name for name, feature in self.items() if feature.in_tests)
        return variables | ({EXTENSIONS_VARIABLE: names} if names else {})


@functools.cache
def found() -> Mapping[str, Extension]:
    """All extensions that are installed, by name: those of the suite first. Only what declares options is imported."""
    own = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))
    places = {name: f"{__package__}.extensions.{name}" for name in own}
    places |= {
        name: entry.value
        for name, entry in sorted(installation.entry_points(ENTRY_POINTS).items())
        if name not in places
    }
    return {name: _load(name, place) for name, place in places.items()}


def _load(name: str, place: str) -> Extension:
    module, _, attribute = place.partition(":")
    try:
        extension = getattr(importlib.import_module(module), attribute or "EXTENSION")
    except Exception as error:
        raise ConfigurationError(f"the extension {name} ({place}) cannot be loaded: {error}") from error
    if not isinstance(extension, Extension):
        raise ConfigurationError(f"the extension {name}: {place} is not a torch_fsdp_tests.extension.Extension")
    extension.name = name
    return extension


def in_tests(environment: Mapping[str, str]) -> list[Extension]:
    """Those that work in the processes of test files. Raises ``ConfigurationError`` for an unknown name."""
    names = [name for name in environment.get(EXTENSIONS_VARIABLE, "").split(",") if name]
    if unknown := [name for name in names if name not in found()]:
        there = ", ".join(found()) or "none"
        raise ConfigurationError(f"{EXTENSIONS_VARIABLE}: there is no extension {unknown[0]!r}; there are: {there}")
    return [found()[name] for name in names]


def other_ranks(environment: Mapping[str, str]) -> OtherRanks | None:
    """The processes in which ranks run besides this one, if an extension knows some."""
    made = (extension.other_ranks(environment) for extension in found().values())
    return next((others for others in made if others is not None), None)


@functools.cache
def place() -> Place:
    """Where the ranks of this process' tests run, according to its environment at the first call."""
    places = (extension.place(os.environ) for extension in found().values())
    return next((each for each in places if each is not None), Place())


def enter_rank(file_name: str, rank: int, world_size: int) -> None:
    """Let all extensions that work in this rank begin."""
    for extension in in_tests(os.environ):
        extension.enter_rank(file_name, rank, world_size)


@contextlib.contextmanager
def around(test: unittest.TestCase, rank: int) -> Iterator[None]:
    """What one test runs in, in each rank: that of all extensions which work in tests, the first outermost."""
    with contextlib.ExitStack() as stack:
        for extension in in_tests(os.environ):
            stack.enter_context(extension.around(test, rank))
        yield
