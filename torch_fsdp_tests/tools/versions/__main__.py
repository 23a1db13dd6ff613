"""``python -m torch_fsdp_tests.tools.versions``: run the suite over versions of torch, and compare the results."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests import installation
from torch_fsdp_tests.dispatch import report
from torch_fsdp_tests.dispatch.atomic import write_text
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.options import Parser
from torch_fsdp_tests.dispatch.runtests import REPORTS
from torch_fsdp_tests.extensions.behavior.kept_records import NoRecord
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.processes.children import Children
from torch_fsdp_tests.tools.versions import environments, table
from torch_fsdp_tests.tools.versions.environments import CannotBeMade, InvalidRequest, Maker, Version

PAGE = "versions.md"
EPILOG = """\
a version is
  2.15.0              a release, installed from the index
  nightly             the newest nightly build
  torch-2.16...whl    a wheel
  FOLDER, PYTHON      an environment that exists, by its folder or its interpreter; nothing is installed into it
  LABEL=ANY           any of these with a name: 2.15.0=/path/to/environment
uv makes the environments (pip install uv) and reads its own settings, such as UV_DEFAULT_INDEX.

The table shows all results in the folder, also those of earlier runs. Without a version, nothing runs.
The exit status is 0 if all versions passed, 1 if a test failed, 2 for wrong arguments, 3 if a version could not be run
or did not finish, and 5 if no test was executed.
"""


class VersionsStopped(BaseException):
    """The command got a signal that stops it."""


def _parser() -> Parser:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torch_fsdp_tests" / "environments"
    parser = Parser(
        prog="python -m torch_fsdp_tests.tools.versions",
        usage="%(prog)s [VERSION ...] [-i TEST ...] [options] [-- options of run_test.py]",
        description="Run this checkout's suite with several versions of torch, and compare the results test by test.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("versions", nargs="*", metavar="VERSION", help="see below")
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": [], "metavar": "TEST"}
    add("-i", "--include", **several, help="the tests to run, as for run_test.py (default: all)")
    add("-x", "--exclude", **several, help="tests to leave out")
    add("-k", action="append", default=[], metavar="PATTERN", help="select tests by name inside files")
    add("--python", default=sys.executable, help="Python of new environments: a version or path (default: this one)")
    add("--index-url", metavar="URL", help="package index of torch, such as https://download.pytorch.org/whl/cpu")
    add("--environments", type=Path, default=cache, metavar="DIR", help="keep environments here (default: %(default)s)")
    results = installation.ROOT / REPORTS / "versions"
    add("--output", type=Path, default=results, metavar="DIR", help="keep results here (default: %(default)s)")
    words = "record what each test does with each version, and compare each version with the one before it"
    add("--behavior", action="store_true", help=words)
    add("--markdown", action="store_true", help="print only the table, in Markdown, on stdout")
    return parser


def main(argv: Sequence[str]) -> ExitStatus:
    """Run the versions that the arguments name, and show the table of all results."""
    system.exit_if_unsupported()
    cut = list(argv).index("--") if "--" in argv else len(argv)
    options = _parser().parse_args(argv[:cut])
    try:
        problems = _run_all(options, argv[cut + 1 :])
        return _tell(options, table.read(options.output, problems))
    except (InvalidRequest, NoRecord) as problem:
        _say(str(problem))
        return ExitStatus.USAGE_ERROR
    except VersionsStopped as stopped:
        _say("stopped; to continue, name the versions that are left")
        return ExitStatus(128 + stopped.args[0])  # as shells count it


def _say(words: str) -> None:
    print(f"versions: {words}", file=sys.stderr, flush=True)


def _run_all(given: argparse.Namespace, handed_on: Sequence[str]) -> Mapping[str, str]:
    """Run each version. Returns the versions that have no new report, and why."""
    versions = [environments.parse(text) for text in given.versions]
    labels = [version.label for version in versions]
    if twice := [label for label in labels if labels.count(label) > 1]:
        raise InvalidRequest(f"two versions are called {twice[0]}; give one of them a name: NAME=VERSION")
    options = {"-i": given.include, "-x": given.exclude, "-k": given.k}
    selection = [word for option, values in options.items() for value in values for word in (option, value)]
    if not versions:
        if selection or handed_on:
            raise InvalidRequest("no version is named, so nothing runs: name versions, or leave out the tests")
        return {}
    suite = [str(installation.ROOT / "run_test.py"), *selection, *handed_on]
    if any(version.python is None for version in versions):
        environments.uv()
    listed = subprocess.run([sys.executable, *suite, "--list"], stdout=subprocess.DEVNULL)
    if listed.returncode:  # it has printed why
        raise SystemExit(listed.returncode)
    problems = {}
    with Children("versions-", (signal.SIGINT, *system.ending_signals())) as children, _alone(given.output):

        def command(words: Sequence[str]) -> int:
            """Run a command with its output on stderr, and return its status."""
            status = children.run(words, sys.stderr)
            if children.signals:
                raise VersionsStopped(children.signals[0])
            return status

        maker = Maker(given.environments.absolute(), installation.ROOT, given.python, given.index_url, command)
        for version in versions:
            folder = given.output.absolute() / version.label
            recorded = ["--record-behavior", str(folder / table.BEHAVIOR)] if given.behavior else []
            if problem := _run(version, maker, [*suite, *recorded], folder):
                _say(f"{version.label}: {problem}")
                problems[version.label] = problem
    return problems


def _run(version: Version, maker: Maker, suite: Sequence[str], folder: Path) -> str:
    """Make the environment and run the suite in it. Returns why there is no new report, or an empty text."""
    try:
        python = maker.python_of(version)
        _say(f"{version.label}: running with {python}")
        for name in (report.FILE, *[table.BEHAVIOR] * ("--record-behavior" in suite)):  # of an earlier run
            (folder / name).unlink(missing_ok=True)
        status = maker.run([python, *suite, "--keep-going", "--report", str(folder)])
    except (CannotBeMade, OSError) as error:
        return str(error)
    return "" if (folder / report.FILE).exists() else f"run_test.py ended with status {status} and left no report"


@contextlib.contextmanager
def _alone(output: Path) -> Iterator[None]:
    """Lock the results against a second run. The lock ends with the process that holds it."""
    output.mkdir(parents=True, exist_ok=True)
    with open(output / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidRequest(f"another run is writing to {output}; name another folder with --output") from error
        yield


def _tell(options: argparse.Namespace, rows: Sequence[table.VersionRow]) -> ExitStatus:
    if not rows:
        raise InvalidRequest(f"no version is named, and there are no results in {options.output}")
    results = table.Table(rows)
    changed = table.behavior_lines(options.output, rows) if options.behavior else []
    print("\n".join([*results.lines(), *changed]), file=sys.stderr, flush=True)
    if options.markdown:
        print(results.block(), flush=True)
    write_text(options.output / PAGE, results.page())
    _say(f"the whole table is in {os.path.relpath(options.output / PAGE)}")
    if any(row.data and row.data["exit_code"] == ExitStatus.FAILED for row in rows):
        return ExitStatus.FAILED
    if any(row.problem for row in rows):
        return ExitStatus.BROKEN
    return min((ExitStatus(row.data["exit_code"]) for row in rows), default=ExitStatus.NOTHING_RAN)


if __name__ == "__main__":
    system.run_command("versions", main)
