"""The command that repeats what a run has run."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from typing import Any

from torch_fsdp_tests import installation, settings
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.verdict import TestResult


def repeat_command(run: RunTests, file: str, facts: Mapping[str, Any], test: TestResult | None = None) -> str:
    """The command that repeats one test, class or file as it ran here. ``facts`` say what it was tested on.

    A test whose world size is not that of the run has a fixed one.
    """
    execution = run.execution
    name, ranks = test.rerun_name if test else None, facts.get("ranks")
    words = installation.program_words()
    if run.selection.test_directory != run.selection.default_directory:
        words += ["--test-directory", installation.short_path(run.selection.test_directory)]
    inside = f"::{name.replace('.', '::')}" if name else ""
    words += ["-i", f"{file}{inside}"]
    if name or execution.shuffle:  # for a whole file the option would also shuffle, and this run did not shuffle
        words += ["--seed", str(execution.seed)]
    lists = {"--disabled-tests": run.selection.disabled, "--slow-tests": run.selection.slow}
    options = {
        "--device": execution.device or facts.get("device"),
        "--backend": execution.backend or facts.get("backend"),
        "--ranks": execution.ranks or (ranks if test is None or test.facts.get("world_size", ranks) == ranks else None),
        "--devices": None if execution.devices is None else ",".join(execution.devices),
        **{option: path and installation.short_path(path) for option, path in lists.items()},
        "--timeout": None if execution.timeout is None else f"{execution.timeout:g}",
        "--strict-defects": execution.strict_defects,
        "--strict-leaks": execution.strict_leaks,
        "--strict-names": execution.strict_names,
    }
    for option, value in options.items():
        if value is not None and value is not False:
            words += [option] if value is True else [option, str(value)]
    words += run.features.words(lambda feature: feature.repeating(name or None))
    for path in run.selection.known_failures:
        words += ["--known-failures", installation.short_path(path)]
    if execution.arguments:
        words += ["--", *execution.arguments]
    names = [variable.name for variable in settings.VARIABLES if variable.is_repeated]
    set_ones = [f"{name}={shlex.quote(value)}" for name in names if (value := os.environ.get(name))]
    return " ".join([*set_ones, shlex.join(words)])
