"""The description of a run: checked and frozen options."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from torch_fsdp_tests import installation

DEFAULT_DIRECTORY = "test"  # in the checkout, or in the installed package
REPORTS = "test-reports"


@dataclasses.dataclass(frozen=True)
class RunTests:
    """One run of the dispatcher. Times are in seconds; paths are absolute."""

    test_directory: Path
    default_directory: Path  # the test directory if no option names one
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ()  # -k
    arguments: tuple[str, ...] = ()  # for the test files
    within: tuple[str, ...] = ()  # of what is included, only these: TESTS_TO_INCLUDE
    without_effect: tuple[str, ...] = ()  # options and variables of PyTorch's run_test.py
    remarks: tuple[str, ...] = ()  # what to say first about options and variables
    distributed_only: bool = False
    without_distributed: bool = False
    failed_only: bool = False
    reaching: tuple[str, ...] = ()
    changed: bool = False
    map: Path | None = None  # the map of what tests reach

    list_files: bool = False
    list_tests: bool = False
    dry_run: bool = False
    as_json: bool = False

    shard: int = 1  # counted from one
    num_shards: int = 1
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
    repeat: int | None = None  # rounds
    duration: float | None = None  # seconds for all rounds
    fail_on_flaky: bool = False
    fixes: tuple[str, ...] = ()  # the ids of the known defects that are fixed in memory
    strict_defects: bool = False
    strict_names: bool = False
    check_streams: bool = False
    minimum_executed: int = 0
    show_locals: bool = False
    verbose: bool = False
    show_output: bool = False
    pipe_logs: bool = False
    logs_by_option: bool = False  # and not by CI's variable: only then the folder is checked before the run
    coverage: bool = False
    save_map: Path | None = None

    save_xml: Path | None = None
    report: Path | None = None
    compare: Path | None = None
    record_behaviour: Path | None = None
    against_behaviour: Path | None = None
    compare_behaviour: bool = False
    operators: bool = False  # whether operators belong to the behaviour
    fail_on_difference: bool = False
    behaviour: Path | None = None  # the folder in which ranks record their behaviour
    sources: Path | None = None  # a folder with files that replace those of the installed torch in memory
    test_times: tuple[Path, ...] = ()
    save_times: Path | None = None
    disabled: Path | None = None
    slow: Path | None = None
    known_failures: tuple[Path, ...] = ()
    run_slow: bool = False
    skip_fast: bool = False
    rerun_disabled: bool = False

    @property
    def reports(self) -> Path:
        """The folder for files that no option asked for: beside a folder called ``test``, as in a checkout, else inside
        it. For the tests of an installed package it is in the current folder.
        """
        if self.test_directory.is_relative_to(installation.PACKAGE):
            return Path.cwd() / REPORTS
        inside = self.test_directory.name != DEFAULT_DIRECTORY
        return (self.test_directory if inside else self.test_directory.parent) / REPORTS

    @property
    def is_repeated(self) -> bool:
        """True when the selection runs in rounds."""
        return self.repeat is not None or self.duration is not None

    @property
    def records_behaviour(self) -> bool:
        return bool(self.record_behaviour or self.against_behaviour or self.compare_behaviour)

    @property
    def by_reach(self) -> bool:
        """True when tests are selected by what they reach."""
        return bool(self.reaching) or self.changed

    @property
    def completes_map(self) -> bool:
        """True when only the tests that ``map`` does not have are run, so that ``save_map`` gets all."""
        return self.map is not None and self.save_map is not None and not self.by_reach

    @property
    def is_own(self) -> bool:
        """Whether it runs the tests of the suite."""
        return self.test_directory == self.default_directory

    @property
    def is_narrowed_by_file(self) -> bool:
        """True when not every file below the test directory was asked for."""
        by_option = self.distributed_only, self.without_distributed, self.failed_only, self.by_reach
        return any((self.include, self.exclude, self.within, *by_option, self.num_shards > 1))
