"""Lets random programs try a mutant that the tests have missed."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from torch_fsdp_tests.explore import apart
from torch_fsdp_tests.tools.mutants import hook
from torch_fsdp_tests.tools.mutants.findings import Finding, Outcome

PROGRAM_LIMIT = 2.0  # seconds for a program, on average; a quiet machine needs an eighth of it
OF_FAMILY = {"FSDP1": ("--with", "fsdp1"), "FSDP2": ("--without", "fsdp1")}  # the programs that may run the change


def with_programs(judged: Iterable[Finding], programs: int | None, environment: Mapping[str, str]) -> Iterator[Finding]:
    """With ``--explore``, what the tests missed comes last, after random programs have tried it, too."""
    missed = []
    for finding in judged:
        if programs is not None and finding.outcome is Outcome.MISSED:
            missed.append(finding)
        else:
            yield finding
    for finding in missed:
        yield _explored(finding, programs or 0, environment)


def _explored(finding: Finding, programs: int, environment: Mapping[str, str]) -> Finding:
    """The finding with what so many random programs say about the mutant.

    A program notices the mutant if it ends otherwise than expected with the change, and as expected without it.
    Programs are counted, and not seconds, so that a busy machine gives the same.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        changed = {**environment, **hook.environment(finding.id, Path(folder, "reached"), environment)}
        found = Path(folder, "found")
        arguments = ("--programs", str(programs), "--first", "--output", str(found), *OF_FAMILY.get(finding.family, ()))
        if apart.run(arguments, changed, PROGRAM_LIMIT * programs + apart.START_LIMIT) != 1:
            return finding
        paths = sorted(found.glob("new-*.json"))
        if not paths or apart.run(("--replay", str(paths[0])), environment) != 0:
            return finding
        program = paths[0].read_text(encoding="utf-8").strip()
    return dataclasses.replace(finding, outcome=Outcome.NOTICED, by="a random program", how="failed", why=program)
