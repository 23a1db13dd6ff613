"""The description of a run: checked and frozen options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from torch_fsdp_tests import installation, settings
from torch_fsdp_tests.extension import Features

DEFAULT_DIRECTORY = "test"  # in the checkout, or in the installed package
REPORTS = "test-reports"


ACCELERATOR = "ACCELERATOR"  # upstream's kind of test classes that are for any device


@dataclasses.dataclass(frozen=True)
class Selection:
    """What runs."""

    test_directory: Path
    default_directory: Path  # the test directory if no option names one
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()  # -k
    within: tuple[str, ...] = ()  # of what is included, only these: TESTS_TO_INCLUDE
    elsewhere: tuple[str, ...] = ()  # options that select only tests of other parts of PyTorch
    hw_classification: tuple[str, ...] = ()  # upstream's kinds of test classes
    distributed_only: bool = False
    without_distributed: bool = False
    failed_only: bool = False
    shard: int = 1  # counted from one
    num_shards: int = 1
    disabled: Path | None = None
    slow: Path | None = None
    known_failures: tuple[Path, ...] = ()
    run_slow: bool = False
    skip_fast: bool = False
    rerun_disabled: bool = False

    @property
    def is_own(self) -> bool:
        """Whether it runs the tests of the suite."""
        return self.test_directory == self.default_directory

    @property
    def elsewhere_in_words(self) -> str | None:
        """A sentence about options of PyTorch's CI that select no test of this suite, or None."""
        options = list(self.elsewhere)
        if self.is_own and self.hw_classification and ACCELERATOR not in self.hw_classification:
            options.append(" ".join(("--hw-classification", *self.hw_classification)))
        return f"no test is here of what {' and '.join(options)} would run of PyTorch" if options else None

    @property
    def is_narrowed_by_file(self) -> bool:
        """True when not every file below the test directory was asked for."""
        by_option = self.distributed_only, self.without_distributed, self.failed_only
        return any((self.include, self.exclude, self.within, *by_option, self.num_shards > 1))


@dataclasses.dataclass(frozen=True)
class Execution:
    """How and where it runs. Times are in seconds."""

    arguments: tuple[str, ...] = ()  # for the test files
    devices: tuple[str, ...] | None = None
    jobs: int | None = None
    device: str | None = None
    backend: str | None = None
    ranks: int | None = None
    seed: int = 1234  # the harness' own, and upstream's
    shuffle: bool = False
    timeout: float | None = None
    no_limit: bool = False
    keep_going: bool = False
    fail_fast: bool = False
    reruns: int = 0
    fail_on_flaky: bool = False
    strict_defects: bool = False
    strict_leaks: bool = False
    strict_names: bool = False
    minimum_executed: int = 0
    show_locals: bool = False
    test_times: tuple[Path, ...] = ()


@dataclasses.dataclass(frozen=True)
class Output:
    """What is printed and written."""

    list_files: bool = False
    list_tests: bool = False
    dry_run: bool = False
    as_json: bool = False
    verbose: bool = False
    show_output: bool = False
    pipe_logs: bool = False
    logs_by_option: bool = False  # and not by CI's variable: only then the folder is checked before the run
    save_xml: Path | None = None
    report: Path | None = None
    save_times: Path | None = None
    remarks: tuple[str, ...] = ()  # what to say first about options and variables

    @property
    def is_plan(self) -> bool:
        """Whether nothing runs, not even to list the tests of a file."""
        return self.dry_run or (self.list_files and not self.list_tests)


@dataclasses.dataclass(frozen=True)
class RunTests:
    """One run of the dispatcher. Paths are absolute."""

    selection: Selection
    execution: Execution = Execution()
    output: Output = Output()
    features: Features = dataclasses.field(default_factory=Features, compare=False)  # what extensions do in it

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The variables that test files get besides those of an environment: what the options and features ask for."""
        execution = self.execution
        requested = {
            settings.SEED_VARIABLE: str(execution.seed),
            settings.DEVICE_VARIABLE: execution.device,
            settings.BACKEND_VARIABLE: execution.backend,
            settings.RANKS_VARIABLE: None if execution.ranks is None else str(execution.ranks),
            settings.STRICT_DEFECTS_VARIABLE: "1" if execution.strict_defects else None,
            settings.STRICT_LEAKS_VARIABLE: "1" if execution.strict_leaks else None,
            settings.STRICT_NAMES_VARIABLE: "1" if execution.strict_names else None,
        }
        stated = {name: value for name, value in requested.items() if value is not None}
        variables = self.features.variables({**environment, **installation.on_path(environment), **stated})
        return {name: value for name, value in variables.items() if environment.get(name) != value}

    @property
    def reports(self) -> Path:
        """The folder for files that no option asked for: beside a folder called ``test``, as in a checkout, else inside
        it. For the tests of an installed package it is in the current folder.
        """
        directory = self.selection.test_directory
        if directory.is_relative_to(installation.PACKAGE):
            return Path.cwd() / REPORTS
        inside = directory.name != DEFAULT_DIRECTORY
        return (directory if inside else directory.parent) / REPORTS
