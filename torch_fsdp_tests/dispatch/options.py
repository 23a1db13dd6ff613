"""The command line, and every check between options: the rest of the program may trust its input."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from torch_fsdp_tests import launcher
from torch_fsdp_tests.dispatch import devices
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.plan import SPLIT_THRESHOLD
from torch_fsdp_tests.dispatch.runtests import DEFAULT_SEED, DEFAULT_SLOW_AFTER, RunTests

DEFAULT_DIRECTORY = "test"
REPORTS = "test-reports"
VARIABLES = """\
environment variables, as upstream's run_test.py has them (an option wins):
  CI, VERBOSE_TEST_LOGS                under CI as --pipe-logs, unless VERBOSE_TEST_LOGS shows the output of every file
  CONTINUE_THROUGH_ERROR               as --keep-going
  NO_TEST_TIMEOUT                      a file limit of a day
  TEST_SHOWLOCALS                      as --showlocals
  DISABLED_TESTS_FILE, SLOW_TESTS_FILE as --disabled-tests and --slow-tests
  PYTORCH_TEST_WITH_SLOW               run what is listed or marked as slow
  PYTORCH_TEST_RERUN_DISABLED_TESTS    as --rerun-disabled-tests
  BUILD_ENVIRONMENT, TEST_CONFIG       which of the recorded times count
and TORCH_FSDP_TESTS_DEVICE, _BACKEND, _RANKS as --device, --backend, --ranks
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(ExitStatus.REFUSED, f"{self.prog}: {message}\n")

    def format_help(self) -> str:
        statuses = "\n".join(f"  {status:3d}  {status.sentence}" for status in ExitStatus)
        self.epilog = f"{VARIABLES}\nexit statuses:\n{statuses}"
        return super().format_help()


def _whole(least: int) -> type[int]:
    def whole(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of {least} or more")
        return int(text)

    return whole  # type: ignore[return-value]


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return value


def _names(text: str) -> tuple[str, ...]:
    try:
        return devices.parse_names(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _seed(text: str) -> int:
    if text == "random":
        return int.from_bytes(os.urandom(4), "big")
    return int(_whole(0)(text))


def make_parser() -> _Parser:
    parser = _Parser(
        prog="run_test.py",
        description="Run the FSDP tests below a folder against the installed torch, each file in a process of its own.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument_group("which tests").add_argument
    add(
        "-i",
        "--include",
        nargs="+",
        action="extend",
        default=[],
        metavar="TEST",
        help="files, folders, globs, file::Class or file::Class::test; with or without test/ and .py",
    )
    add("-x", "--exclude", nargs="+", action="extend", default=[], metavar="TEST", help="the same, left out")
    add(
        "-k",
        action="append",
        default=[],
        dest="patterns",
        metavar="PATTERN",
        help="only tests whose name has this substring, or fits this glob; may be repeated",
    )
    add("--distributed-tests", action="store_true", help="only files below distributed/")
    add("--failed", action="store_true", help="only what failed in the last run")
    add("--test-directory", type=Path, metavar="DIR", help=f"where the tests are (default: {DEFAULT_DIRECTORY})")
    add("--list", action="store_true", help="list files with need and estimate, and run nothing")
    add("--tests", action="store_true", help="with --list: list the ids of tests, which the files are asked for")
    add("--dry-run", action="store_true", help="print the plan, and run nothing")
    add("--json", action="store_true", help="with --dry-run: the plan as JSON, alone on stdout")

    add = parser.add_argument_group("where and how many at a time").add_argument
    add("--shard", nargs=2, type=_whole(1), default=[1, 1], metavar=("N", "M"), help="the Nth of M parts, from 1")
    add(
        "--split-threshold",
        type=_positive,
        default=SPLIT_THRESHOLD,
        metavar="S",
        help="split files by tests that take longer than S seconds (default: %(default)g)",
    )
    add("--devices", type=_names, metavar="LIST", help="devices to lend, such as 0,1,2,3 or 0-7 (default: all visible)")
    add("-j", "--jobs", type=_whole(1), metavar="N", help="on the CPU: files at a time (default: by cores and ranks)")
    add("--device", metavar="TYPE", help="device under test, such as cpu or cuda (default: what torch picks)")
    add("--backend", metavar="NAME", help="backend between ranks (default: the device's own)")
    add("--ranks", type=_whole(1), metavar="N", help="ranks of a test that states no number")
    add(
        "--test-times",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="recorded times in upstream's shapes; may be repeated",
    )
    add("--save-times", type=Path, metavar="DIR", help="write the times of this run into this folder")

    add = parser.add_argument_group("how they run").add_argument
    add("--keep-going", "--continue-through-error", action="store_true", help="go on after a file has failed")
    add("--timeout", type=_positive, metavar="S", help="limit of a file in seconds (default: from its recorded time)")
    add(
        "--slow-after",
        type=_positive,
        default=DEFAULT_SLOW_AFTER,
        metavar="S",
        help="name a file that has run S seconds, and twice its recorded time, every S seconds (default: %(default)g)",
    )
    add(
        "--reruns",
        type=_whole(0),
        default=0,
        metavar="N",
        help="run what failed again, up to N times, in new processes",
    )
    add("--fail-on-flaky", action="store_true", help="a test that passed only when run again fails the run")
    add("--minimum-executed", type=_whole(0), default=0, metavar="N", help="fail when fewer tests were executed")
    add(
        "--seed",
        type=_seed,
        metavar="N",
        help=f"seed of order and RNG, or 'random' (default: source order, {DEFAULT_SEED})",
    )
    add("--showlocals", action="store_true", help="local variables in tracebacks")
    add(
        "--coverage",
        action="store_true",
        help=f"measure tests, harness and torch's FSDP with coverage.py, into {REPORTS}/.coverage",
    )
    add(
        "--disabled-tests",
        "--import-disabled-tests",
        type=Path,
        metavar="FILE",
        help="upstream's list of disabled tests",
    )
    add("--slow-tests", "--import-slow-tests", type=Path, metavar="FILE", help="upstream's list of slow tests")
    add("--known-failures", type=Path, metavar="FILE", help="our own list; its shape is in dispatch/data")
    add("--rerun-disabled-tests", action="store_true", help="run only what the lists disable, and say what passes")

    add = parser.add_argument_group("what is said").add_argument
    add("-v", "--verbose", action="store_true", help="a line for each test")
    add("--pipe-logs", action="store_true", help=f"keep the output of every file in {REPORTS}/logs")
    add("--save-xml", nargs="?", type=Path, const=Path(REPORTS, "python-unittest"), metavar="DIR", help="write JUnit")
    add("--report", type=Path, metavar="DIR", help="write report.json and report.html")
    add("--compare", type=Path, metavar="REPORT", help="say what differs from the report.json of an earlier run")
    return parser


def parse(argv: Sequence[str], environment: Mapping[str, str], root: Path) -> RunTests:
    """The run that the arguments and upstream's environment variables describe.

    Leaves with status 2 and one sentence when they make no sense. ``root`` is the checkout, whose ``test`` is the
    default test directory.
    """
    own, _, rest = _split_at_dashes(argv)
    parser = make_parser()
    asked = parser.parse_args(own)
    _refuse_launches(parser, environment)

    def flag(name: str) -> bool:
        return environment.get(name, "").lower() in ("1", "true", "yes", "on", "t", "y")

    directory = (asked.test_directory or root / DEFAULT_DIRECTORY).absolute()
    if not directory.is_dir():
        parser.error(f"the test directory {directory} does not exist; name one with --test-directory")
    shard, num_shards = asked.shard
    if shard > num_shards:
        parser.error(f"--shard {shard} {num_shards}: shards are counted from 1 to {num_shards}")
    if asked.json and not asked.dry_run:
        parser.error("--json belongs to --dry-run")
    if asked.tests and not asked.list:
        parser.error("--tests belongs to --list")
    if asked.coverage:
        from torch_fsdp_tests.dispatch import coverage

        if (lack := coverage.lacking()) is not None:
            parser.error(f"--coverage needs {lack}")
    if asked.rerun_disabled_tests and not (
        asked.disabled_tests or asked.known_failures or environment.get("DISABLED_TESTS_FILE")
    ):
        parser.error("--rerun-disabled-tests needs a list: --disabled-tests, --known-failures or DISABLED_TESTS_FILE")
    if asked.compare is not None and not asked.compare.is_file():
        parser.error(f"--compare: {asked.compare} is no file")
    ranks = asked.ranks
    if ranks is None and environment.get("TORCH_FSDP_TESTS_RANKS"):
        try:
            ranks = _whole(1)(environment["TORCH_FSDP_TESTS_RANKS"])
        except argparse.ArgumentTypeError as error:
            parser.error(f"TORCH_FSDP_TESTS_RANKS: {error}")

    def from_environment(given: Path | None, name: str) -> Path | None:
        return given or (Path(environment[name]) if environment.get(name) else None)

    run = RunTests(
        test_directory=directory,
        default_directory=(root / DEFAULT_DIRECTORY).absolute(),
        include=tuple(asked.include),
        exclude=tuple(asked.exclude),
        patterns=tuple(asked.patterns),
        arguments=tuple(rest),
        distributed_only=asked.distributed_tests,
        failed_only=asked.failed,
        list_files=asked.list,
        list_tests=asked.list and asked.tests,
        dry_run=asked.dry_run,
        as_json=asked.json,
        shard=shard,
        num_shards=num_shards,
        split_threshold=asked.split_threshold,
        devices=asked.devices,
        jobs=asked.jobs,
        device=asked.device or environment.get(devices.DEVICE_VARIABLE) or None,
        backend=asked.backend or environment.get("TORCH_FSDP_TESTS_BACKEND") or None,
        ranks=ranks,
        seed=DEFAULT_SEED if asked.seed is None else asked.seed,
        shuffle=asked.seed is not None,
        timeout=asked.timeout,
        no_limit=bool(environment.get("NO_TEST_TIMEOUT")),
        slow_after=asked.slow_after,
        keep_going=asked.keep_going or flag("CONTINUE_THROUGH_ERROR"),
        reruns=asked.reruns,
        fail_on_flaky=asked.fail_on_flaky,
        minimum_executed=asked.minimum_executed,
        show_locals=asked.showlocals or flag("TEST_SHOWLOCALS"),
        verbose=asked.verbose,
        show_output=flag("VERBOSE_TEST_LOGS"),
        pipe_logs=asked.pipe_logs or (bool(environment.get("CI")) and not flag("VERBOSE_TEST_LOGS")),
        logs_must_be=asked.pipe_logs,
        coverage=asked.coverage,
        save_xml=asked.save_xml and asked.save_xml.absolute(),
        report=asked.report and asked.report.absolute(),
        compare=asked.compare,
        test_times=tuple(asked.test_times),
        save_times=asked.save_times and asked.save_times.absolute(),
        disabled=from_environment(asked.disabled_tests, "DISABLED_TESTS_FILE"),
        slow=from_environment(asked.slow_tests, "SLOW_TESTS_FILE"),
        known_failures=asked.known_failures,
        run_slow=flag("PYTORCH_TEST_WITH_SLOW"),
        rerun_disabled=asked.rerun_disabled_tests or flag("PYTORCH_TEST_RERUN_DISABLED_TESTS"),
    )
    if not (asked.list or asked.dry_run):
        _try_places(parser, run)
    return run


def _refuse_launches(parser: _Parser, environment: Mapping[str, str]) -> None:
    """Leave with status 2 in a process that a launcher made: every rank would run everything."""
    try:
        launch = launcher.from_environment(environment)
    except launcher.LaunchError as error:
        parser.error(str(error))
    if launch is not None:
        parser.error(
            "this is a process of a launcher, which starts test files one by one (torchrun test/.../test_x.py), not "
            f"this program; if the launcher's variables are left over, set {launcher.LAUNCHED_VARIABLE}=0"
        )


def _try_places(parser: _Parser, run: RunTests) -> None:
    """Leave with status 2 when something could not be written at the end of the run."""
    from torch_fsdp_tests.dispatch.atomic import try_folder  # not at import: a plan writes nothing

    for option, folder in (
        ("--save-xml", run.save_xml),
        ("--report", run.report),
        ("--save-times", run.save_times),
        ("--pipe-logs", run.reports / "logs" if run.logs_must_be else None),
        ("--coverage", run.reports if run.coverage else None),
    ):
        if folder is not None:
            try:
                try_folder(folder)
            except OSError as error:
                parser.error(f"{option}: {folder} cannot be written to: {error.strerror or error}")


def _split_at_dashes(argv: Sequence[str]) -> tuple[list[str], bool, list[str]]:
    """Ours before the first ``--``, the test files' after it."""
    if "--" not in argv:
        return list(argv), False, []
    place = list(argv).index("--")
    return list(argv[:place]), True, list(argv[place + 1 :])


def default_jobs(ranks: int) -> int:
    """Files at a time on the CPU. Ranks wait for one another much of the time, so cores are handed out twice.

    With 4 ranks on 2 cores, eight files took 123 s two at a time, 145 s three and 128 s four at a time, beside other
    work on the machine; more than two only slowed each file down, which its tests' own limits do not forgive.
    """
    cores = devices.cores()
    return max(min(2, cores), 2 * cores // max(ranks, 1))
