"""``python -m torch_fsdp_tests.tools.mutants``: mutation testing of torch's FSDP."""

from __future__ import annotations

import contextlib
import os
import platform
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch import devices
from torch_fsdp_tests.dispatch.discover import discover, source_of
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.select import select
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.reach import ReachMap
from torch_fsdp_tests.tools.mutants import mutant, options, report
from torch_fsdp_tests.tools.mutants.kinds import KINDS
from torch_fsdp_tests.tools.mutants.mutant import NoPackage, Tests
from torch_fsdp_tests.tools.mutants.outcomes import MutantOutcome, MutantResult, ResultFile
from torch_fsdp_tests.tools.mutants.sites import Mutant
from torch_fsdp_tests.tools.mutants.trials import Trials
from torch_fsdp_tests.verdict import plural, seconds


def main(argv: Sequence[str]) -> ExitStatus:
    system.exit_if_unsupported()
    system.exit_on_signals()
    try:
        return _main(options.parse(argv))
    except ValueError as error:  # its message is one sentence: of a bad list, map, device or name
        _say(str(error))
        return ExitStatus.USAGE_ERROR


def _main(options: Namespace) -> ExitStatus:
    device = devices.find(None, None, os.environ)
    mutants = list(mutant.all_of(options.packages, device.type == devices.CPU, options.module))
    chosen, excluded = _choose(options, mutants), Counter(each.excluded for each in mutants if each.excluded)
    tests = Tests(ReachMap.load(options.map), _sources(options))
    if options.sample is not None:
        run = [each for each in chosen if tests.is_run(each)]
        excluded["code that no test runs"] += len(chosen) - len(run)
        chosen = mutant.sample(run, options.sample, options.seed)
    if not chosen:
        raise ValueError("no mutant is selected")
    if options.list:
        for each in chosen:
            print(f"{each.id}  line {each.line}, {plural(len(tests.for_mutant(each)), 'test')}\n{each.diff}")
        return ExitStatus.OK
    facts = _facts(options, device.type)
    record = ResultFile(options.output / report.RECORD, facts)
    findings = record.resume() if options.resume else record.start()
    known, selected = {each.id for each in findings}, {each.id for each in chosen}
    findings = [each for each in findings if each.id in selected]
    began = time.monotonic()
    equivalents = mutant.equivalents(options.equivalent, device.type == devices.CPU)
    trials = Trials(options, device.type, tests, equivalents)
    _say(f"{plural(len(chosen), 'mutant')} of {len(mutants)}, {options.jobs} at a time; {len(findings)} tried already")
    status = ExitStatus.OK
    try:
        with contextlib.closing(trials.judge(each for each in chosen if each.id not in known)) as judged:
            for finding in judged:
                record.add(finding)
                findings.append(finding)
                _print_finding(finding, len(findings), len(chosen), began, len(known & selected))
    except KeyboardInterrupt:
        _say("interrupted; the same command with --resume continues")
        status = ExitStatus.INTERRUPTED
    finally:
        data = report.as_json(facts, findings, excluded, options.command, len(chosen))
        report.write(options.output, data)
    print(report.text(data))
    _say(f"report: {os.path.relpath(options.output / report.FILE)}")
    return status


def _choose(options: Namespace, mutants: Sequence[Mutant]) -> list[Mutant]:
    if not options.mutant:
        kinds = options.kind or KINDS
        return [each for each in mutants if each.excluded is None and each.operator in kinds]
    by_id = {each.id: each for each in mutants}
    for id in options.mutant:
        if id not in by_id:
            raise NoPackage(f"{options.package or 'torch'} has no mutant {id}; --list shows all")
    return [by_id[id] for id in options.mutant]


def _sources(options: Namespace) -> dict[str, str]:
    """Return the sources of the test files that may run."""
    files = discover(options.test_directory)
    chosen = select(files, options.include, (), options.test_directory)
    return {test.file: source_of(files[test.file]) for test in chosen}


def _facts(options: Namespace, device: str) -> dict[str, Any]:
    """Return the facts that must not change between runs, so that their findings can be combined."""
    version, package = devices.torch_version(), options.package or "torch.distributed.fsdp and related modules"
    return {"torch": version, "python": platform.python_version(), "device": device, "package": package}


def _print_finding(finding: MutantResult, number: int, of: int, began: float, known: int) -> None:
    """Print a line for each mutant, and all details of one that survived."""
    spent = time.monotonic() - began
    left = spent / max(1, number - known) * (of - number)
    about = {
        MutantOutcome.KILLED: f" by {finding.by} ({finding.how})",
        MutantOutcome.SURVIVED: f" by {finding.executed} tests",
    }
    words = about.get(finding.outcome, f": {finding.why}")
    rest = f", {seconds(left)} left" if number < of else ""
    print(f"[{number}/{of}] {finding.id} {finding.outcome.value}{words}  {finding.seconds:.1f}s{rest}", flush=True)
    if finding.outcome is MutantOutcome.SURVIVED:
        print(f"    {Path(finding.path).name}:{finding.line}")
        print("\n".join(f"    {line}" for line in finding.change.splitlines()), flush=True)


def _say(words: str) -> None:
    print(f"mutants: {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    system.run_command("mutants", main)
