"""The command that repeats what a run has run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

from torch_fsdp_tests import installation, settings
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.installed_torch import fixes
from torch_fsdp_tests.verdict import TestResult


def repeat_command(run: RunTests, file: str, facts: Mapping[str, Any], test: TestResult | None = None) -> str:
    """The command that repeats one test, class or file as it ran here. ``facts`` say what it was tested on.

    A test whose world size is not that of the run has a fixed one.
    """
    name, ranks = test and test.rerun_name, facts.get("ranks")
    words = installation.program_words()
    if run.test_directory != run.default_directory:
        words += ["--test-directory", installation.short_path(run.test_directory)]
    inside = f"::{name.replace('.', '::')}" if name else ""
    words += ["-i", f"{file}{inside}"]
    if name or run.shuffle:  # for a whole file the option would also shuffle, and this run did not shuffle
        words += ["--seed", str(run.seed)]
    lists = {"--disabled-tests": run.disabled, "--slow-tests": run.slow}
    options = {
        "--device": run.device or facts.get("device"),
        "--backend": run.backend or facts.get("backend"),
        "--ranks": run.ranks or (ranks if test is None or test.facts.get("world_size", ranks) == ranks else None),
        "--devices": None if run.devices is None else ",".join(run.devices),
        **{option: path and installation.short_path(path) for option, path in lists.items()},
        "--timeout": None if run.timeout is None else f"{run.timeout:g}",
        "--strict-defects": run.strict_defects,
        "--strict-names": run.strict_names,
        "--check-streams": run.check_streams,
    }
    for option, value in options.items():
        if value is not None and value is not False:
            words += [option] if value is True else [option, str(value)]
    if run.compare_behaviour and run.reaching:
        words += ["--compare-behaviour", "--reaching", *run.reaching]
    if run.fixes:
        words += ["--with-fixes", *([] if fixes.are_all(run.fixes) else run.fixes)]
    for path in run.known_failures:
        words += ["--known-failures", installation.short_path(path)]
    if run.arguments:
        words += ["--", *run.arguments]
    names = [variable.name for variable in settings.VARIABLES if variable.is_repeated]
    set_ones = [f"{name}={shlex.quote(value)}" for name in names if (value := os.environ.get(name))]
    return " ".join([*set_ones, shlex.join(words)])
