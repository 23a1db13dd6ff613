"""``python -m torch_fsdp_tests.versions``: run the suite over versions of torch, and make one table of the results."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch_fsdp_tests import host
from torch_fsdp_tests.dispatch.atomic import write_text
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.versions import facts, options, suite, table, texts
from torch_fsdp_tests.versions.environments import Environment, Maker
from torch_fsdp_tests.versions.options import Options
from torch_fsdp_tests.versions.processes import Processes, Say, Stopped
from torch_fsdp_tests.versions.refusal import CannotBeMade, Refusal
from torch_fsdp_tests.versions.runs import RECORD, Folder, Runs, VersionRun
from torch_fsdp_tests.versions.table import Table

JSON, PAGE = "versions.json", "versions.md"


def main(argv: Sequence[str]) -> ExitStatus:
    host.refuse_unsupported()
    try:
        asked = options.parse(argv, os.environ)
        runs = _run_all(asked) if asked.versions else _there(asked.output)
        found = table.make(runs, facts.in_use(_askers(), _names(runs)))
        _tell(asked, found)
        return _status(runs, found)
    except Refusal as refusal:
        _say(str(refusal))
        return ExitStatus.REFUSED
    except Stopped as stopped:
        _say("stopped; run the same command again to continue")
        return ExitStatus(128 + stopped.number)  # as shells count it
    except KeyboardInterrupt:  # before there was anything to stop
        return ExitStatus.INTERRUPTED
    except BrokenPipeError:  # as with "--list | head"
        host.drop_stdout()
        return ExitStatus.NOT_READ
    except OSError as error:
        _say(f"cannot continue: {error}")
        return ExitStatus.BROKEN


def _say(words: str) -> None:
    print(f"versions: {words}", file=sys.stderr, flush=True)


def _about(label: str) -> Say:
    return lambda words: _say(f"{label}: {words}")


def _run_all(asked: Options) -> list[VersionRun]:
    """Make all environments first, so that a version that does not exist is reported before an hour has passed."""
    assert asked.suite is not None
    found: dict[str, VersionRun] = {}
    with Processes(asked.recipe.folder) as processes, _alone(asked.output):
        maker = Maker(asked.recipe, processes)
        runs = Runs(asked.suite, asked.output, processes, show=lambda line: print(f"    {line}", file=sys.stderr))
        environments: list[Environment] = []
        for wanted in asked.versions:
            try:
                environment = maker.make(wanted, _about(wanted.label))
                runs.look(environment)
                environments.append(environment)
            except CannotBeMade as problem:
                found[wanted.label] = _broken(asked, wanted.label, problem)
        for environment in environments:
            label = environment.wanted.label
            try:
                run = runs.run(environment, label in asked.again, asked.failed, _about(label))
                _about(label)(texts.counts(table.make([run], ()).rows[0]))
            except CannotBeMade as problem:
                run = _broken(asked, label, problem)
            found[label] = run
    return [found[wanted.label] for wanted in asked.versions]


def _broken(asked: Options, label: str, problem: CannotBeMade) -> VersionRun:
    """Report a version without results now and in the table. Its earlier results are kept."""
    _about(label)(problem.at_length())
    Folder(asked.output, label).note_problem(str(problem))
    return VersionRun(label, problem=str(problem))


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Lock the results against a second run. The lock ends with the process that holds it."""
    with open(output / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise Refusal(f"another run is writing to {output}; name another folder with --output") from error
        yield


def _there(output: Path) -> list[VersionRun]:
    """The results that exist."""
    found = [Folder(output, path.parent.name).read() for path in sorted(output.glob(f"*/{RECORD}"))]
    if not found:
        raise Refusal(f"no version is named, and there are no results in {output}")
    return found


def _names(runs: Sequence[VersionRun]) -> set[str]:
    return {name for run in runs for name in run.facts}


def _askers() -> Iterator[Path]:
    """The files that may use a fact, except the one that defines the facts."""
    return (path for path in suite.sources() if path.name != "torch_facts.py")


def _tell(asked: Options, found: Table) -> None:
    for line in texts.lines(found):
        print(line, file=sys.stderr)
    if asked.as_markdown:
        print(texts.block(found))
    write_text(asked.output / JSON, json.dumps(found.as_json(), indent=1) + "\n")
    write_text(asked.output / PAGE, texts.page(found))
    _say(f"table: {os.path.relpath(asked.output / PAGE)} and {os.path.relpath(asked.output / JSON)}")
    if asked.write is not None:
        texts.write_block(asked.write, found)
        _say(f"written to {asked.write}")


def _status(runs: Sequence[VersionRun], found: Table) -> ExitStatus:
    if any(row.failed for row in found.rows):
        return ExitStatus.FAILED
    if not all(run.is_complete for run in runs):
        return ExitStatus.BROKEN
    executed = any(row.passed or row.known_defects or row.known_failures for row in found.rows)
    return ExitStatus.OK if executed else ExitStatus.NOTHING_RAN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
