"""The command line, and all checks between options, so that the rest of the program can trust its input.

Each option is declared once, under the name of the field of :class:`Selection`, :class:`Execution` or :class:`Output`
that it sets, or by an extension. An option that is not given is absent, so that an environment variable counts, or else
the field's default.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from torch_fsdp_tests import extension, installation, settings
from torch_fsdp_tests.dispatch import devices, keywords
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.option_types import option_type, positive, whole_number
from torch_fsdp_tests.dispatch.runtests import (
    ACCELERATOR,
    DEFAULT_DIRECTORY,
    REPORTS,
    Execution,
    Output,
    RunTests,
    Selection,
)
from torch_fsdp_tests.extension import Features, absolute
from torch_fsdp_tests.settings import BACKEND_VARIABLE, DEVICE_VARIABLE, TIMEOUT_VARIABLE, ConfigurationError

_Part = TypeVar("_Part")

MAX_JOBS = 10_000
MAX_RERUNS = 1000
MAX_TESTS = 10_000_000

# Options of PyTorch's own run_test.py that this suite accepts and ignores, so that command lines of PyTorch's CI can be
# pasted. They are about other parts of PyTorch, uploads, the order of files, or a choice of tests by a change.
WITHOUT_EFFECT = (
    *("--dynamo", "--inductor", "--exclude-aot-dispatch-tests", "--exclude-inductor-tests", "--exclude-jit-executor"),
    *("--exclude-quantization-tests", "--exclude-torch-export-tests", "--enable-td", "--enable-timeout"),
    *("--ignore-win-blocklist", "--no-translation-validation", "--upload-artifacts-while-running"),
    # What it passes on to pytest. Options that select tests are not here: ignoring them would run other tests.
    *("--pytest", "--use-pytest", "--flake-finder", "--continue-on-collection-errors", "--disable-warnings"),
    *("--forked", "--cache-clear", "--exitfirst", "--full-trace", "--no-header", "--no-summary", "-s"),
)
# Options that select only tests of other parts of PyTorch. There are none of these here.
ELSEWHERE = (
    *("-core", "--core", "--cpp", "--einops", "--functorch", "--jit", "--mps", "--onnx", "--openreg", "--xpu"),
    *("--include-cpython-tests", "--include-dynamo-core-tests", "--include-inductor-core-tests"),
)
# They take a value.
WITHOUT_EFFECT_WITH_VALUE = (
    *("--xdoctest-command", "--determine-from", "--flake-runs", "--timeout-method", "--tb", "--color", "--capture"),
    *("--dist", "-dist", "--numprocesses", "-n", "-p", "-o", "-W", "-r", "--maxfail", "--durations", "--durations-min"),
    *("--junitxml", "--junit-xml", "--junit-xml-reruns", "--import-mode", "--rootdir", "--log-level"),
)
# Options that test files have as well, behind ``--``.
_OF_TEST_FILES = {
    "-k",
    "-v",
    "--verbose",
    "-c",
    "-h",
    "--help",
    "--seed",
    "--repeat",
    "--showlocals",
    "--no-showlocals",
}
LESS_USED = """\
also accepted, for the documented tasks and command lines of PyTorch's CI: --distributed-tests,
--exclude-distributed-tests, --hw-classification, --disabled-tests, --slow-tests, --rerun-disabled-tests,
--test-times, --pipe-logs, --showlocals, --no-showlocals, --strict-leaks, --strict-names"""
# Options that no longer exist, with what to do instead.
_REMOVED = {"--perturb": "python -m torch_fsdp_tests.check compares a model before and after each step"}
# Fields that an ordinary command line of this suite leaves alone, and one of PyTorch's CI does not.
_SIGNS_OF_CI = ("without_effect", "hw_classification", "distributed_only", "without_distributed")


class Parser(argparse.ArgumentParser):
    """A parser that rejects arguments and abbreviated options in one sentence, and shows its epilog as it is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        if (word := message.removeprefix("unrecognized arguments: ")) != message:
            import difflib  # imported late, because it is rarely needed

            names = [name.strip("-") for name in self.effective_options() if name.startswith("--")]
            typed = word.split()[0].partition("=")[0]
            if typed in _REMOVED:
                self.exit(ExitStatus.USAGE_ERROR, f"{self.prog}: {typed} was removed: {_REMOVED[typed]}\n")
            typed = typed.strip("-")
            begun = [name for name in names if len(typed) > 1 and name.startswith(typed)]
            close = begun or difflib.get_close_matches(typed, names, n=1)
            message += f"; did you mean --{close[0]}?" if close else "; --help shows all options"
        self.exit(ExitStatus.USAGE_ERROR, f"{self.prog}: {message}\n")

    def effective_options(self) -> list[str]:
        """The options that are not only accepted."""
        silent = ("without_effect", "elsewhere")
        return [name for name, each in self._option_string_actions.items() if each.dest not in silent]


@option_type
def _pattern(text: str) -> str:
    if not text.strip():
        raise ValueError("an empty pattern would select every test; leave the option out")
    keywords.parse(text)
    return text


def _seed(text: str) -> int:
    if text == "random":
        return int.from_bytes(os.urandom(4), "big")
    return whole_number(0, 2**64 - 1)(text)


class _Version(argparse.Action):
    """Find out the versions, print them, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        torch = devices.torch_version()
        parts = [f"torch_fsdp_tests {installation.version()}", f"torch {torch}" if torch else "torch is not installed"]
        print(*parts, f"Python {platform.python_version()}", sep=", ")
        parser.exit(ExitStatus.OK)


def make_parser() -> Parser:
    variables = [*settings.VARIABLES, *(row for each in extension.found().values() for row in each.variables)]
    statuses = "\n".join(f"  {status:3d}  {status.sentence}" for status in ExitStatus)
    parser = Parser(
        prog=installation.program_name(),
        description="Run the tests of FSDP with the installed torch. Each file runs in a process of its own.",
        epilog=f"{LESS_USED}\n\n{settings.table(variables)}\nexit statuses:\n{statuses}\n\n"
        f"documentation: {installation.DOCUMENTS}",
        argument_default=argparse.SUPPRESS,
    )
    words = "print the versions of the suite, torch and Python, and exit"
    parser.add_argument("--version", action=_Version, nargs=0, help=words)
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "metavar": "TEST"}
    flag: dict[str, Any] = {"action": "store_true"}

    add = parser.add_argument_group("which tests").add_argument
    words = "files, folders, globs, file::Class or file::Class::test, relative to test/ or to the current folder, with "
    words += "or without .py; smoke (a list in test/smoke.txt) runs every feature once, in less than a minute"
    add("include", nargs="*", action="extend", metavar="TEST", help=words)
    add("-i", "--include", **several, help="the same as TEST")
    add("-x", "--exclude", **several, help="leave out these tests")
    words = "only tests that fit an expression of words and globs with and, or, not and parentheses: "
    words += f"{keywords.COMPARED}; may be repeated, for tests that fit any"
    add("-k", "--pytest-k-expr", action="append", type=_pattern, dest="patterns", metavar="EXPRESSION", help=words)
    words = "only tests that failed when they were last run here, on this device"
    add("--failed", **flag, dest="failed_only", help=words)
    add("--test-directory", type=absolute, metavar="DIR", help=f"where the tests are (default: {DEFAULT_DIRECTORY})")
    add("--list", **flag, dest="list_files", help="list files with their ranks and expected time, and run nothing")
    add("--tests", **flag, dest="list_tests", help="with --list: list tests instead of files")
    add("--dry-run", **flag, help="print the plan, and run nothing")
    add("--json", **flag, dest="as_json", help="with --dry-run: print only the plan, as JSON")

    add = parser.add_argument_group("where they run").add_argument
    words = "run the Nth of M parts, counted from 1"
    add("--shard", nargs=2, type=whole_number(1, settings.MAX_SHARDS), metavar=("N", "M"), help=words)
    words = "devices that the tests may use, such as 0,1,2,3 or 0-7 (default: all visible ones)"
    add("--devices", type=option_type(devices.parse_names), metavar="LIST", help=words)
    words = "run N files at a time; on devices, each file sees all of them (default: by cores and ranks, or by devices)"
    add("-j", "--jobs", type=whole_number(1, MAX_JOBS), metavar="N", help=words)
    add("--device", metavar="TYPE", help="device under test, such as cpu or cuda (default: what torch picks)")
    add("--backend", metavar="NAME", help="backend between ranks (default: the device's own)")
    words = "number of ranks of a test that does not need another number (default: depends on the device)"
    add("--ranks", type=whole_number(1, settings.MAX_RANKS), metavar="N", help=words)
    add("--save-times", type=absolute, metavar="DIR", help="write the times and needs of this run to this folder")

    add = parser.add_argument_group("how they run").add_argument
    add("--keep-going", "--continue-through-error", **flag, help="continue after a file has failed")
    add("--fail-fast", **flag, help="end the run at the first failing test, even inside a file")
    words = "time limit of a file in seconds (default: depends on its recorded time)"
    add("--timeout", type=positive, metavar="S", help=words)
    words = "repeat failed tests up to N times in new processes"
    add("--reruns", type=whole_number(0, MAX_RERUNS), metavar="N", help=words)
    add("--fail-on-flaky", **flag, help="fail the run if a test passed only when it was repeated")
    words = "fail a test if torch lacks the known defect that the test shows, or a feature that its release has"
    add("--strict-defects", **flag, help=words)
    words = "fail the run if fewer than N tests were executed"
    add("--minimum-executed", type=whole_number(0, MAX_TESTS), metavar="N", help=words)
    words = "seed for the order of tests and for random numbers, or 'random' "
    words += f"(default: unittest's order, and {Execution.seed})"
    add("--seed", type=_seed, metavar="N", help=words)
    lists: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    words = "a list of tests that are disabled, slow or expected to fail (its schema is in dispatch/data); may be "
    words += "repeated"
    add("--known-failures", **lists, action="append", help=words)

    add = parser.add_argument_group("output").add_argument
    add("-v", "--verbose", **flag, help="print a line for each test")
    junit = Path(REPORTS, "python-unittest").absolute()
    add("--save-xml", nargs="?", type=absolute, const=junit, metavar="DIR", help="write JUnit XML")
    add("--report", type=absolute, metavar="DIR", help="write report.json, and what shows it")
    groups = {group.title: group.add_argument for group in parser._action_groups}
    for each in extension.found().values():
        each.add_options(
            lambda title: groups.get(title) or groups.setdefault(title, parser.add_argument_group(title).add_argument)
        )

    _add_options_of_upstream(parser)
    add = parser.add_argument
    ignored: dict[str, Any] = {"dest": "without_effect", "help": argparse.SUPPRESS}
    for name in ("-pt", *WITHOUT_EFFECT):
        add(name, action="append_const", const=name, **ignored)
    for name in ELSEWHERE:
        add(name, action="append_const", const=name, dest="elsewhere", help=argparse.SUPPRESS)
    for name in WITHOUT_EFFECT_WITH_VALUE:
        add(name, action="append", type=_named(name), **ignored)
    add("--bring-to-front", action="extend", nargs="+", type=_named("--bring-to-front"), **ignored)
    return parser


def _add_options_of_upstream(parser: Parser) -> None:
    """Options of PyTorch's CI that another option or a variable covers. ``--help`` has only their names, in a line."""
    flag: dict[str, Any] = {"action": "store_true", "help": argparse.SUPPRESS}
    file: dict[str, Any] = {"type": Path, "metavar": "FILE", "help": argparse.SUPPRESS}
    add = parser.add_argument
    add("--distributed-tests", **flag, dest="distributed_only")  # as -i distributed
    add("--exclude-distributed-tests", **flag, dest="without_distributed")
    add("--hw-classification", nargs="+", type=str.upper, metavar="CLASS", help=argparse.SUPPRESS)
    add("--test-times", **file, action="append")
    add("--strict-leaks", **flag)
    add("--strict-names", **flag)
    add("--showlocals", **flag, dest="show_locals")
    add("--no-showlocals", action="store_false", dest="show_locals", help=argparse.SUPPRESS)
    add("--disabled-tests", "--import-disabled-tests", **file, dest="disabled")
    add("--slow-tests", "--import-slow-tests", **file, dest="slow")
    add("--rerun-disabled-tests", **flag, dest="rerun_disabled")
    add("--pipe-logs", **flag)


def _named(option: str) -> Callable[[str], str]:
    """The type of an option that is accepted and ignored: its name instead of its value."""
    return lambda value: option


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The fields that environment variables set. An option overrides its variable.

    Raises :class:`ConfigurationError` for an invalid value.
    """
    set_ones = {name for name, value in environment.items() if value}
    true_ones = {name for name in set_ones if environment[name].lower() in ("1", "true", "yes", "on", "t", "y")}
    flags = {
        "keep_going": "CONTINUE_THROUGH_ERROR" in true_ones,
        "no_limit": "NO_TEST_TIMEOUT" in set_ones,
        "show_locals": "TEST_SHOWLOCALS" in true_ones,
        "show_output": "VERBOSE_TEST_LOGS" in true_ones,
        "pipe_logs": "CI" in set_ones and "VERBOSE_TEST_LOGS" not in true_ones,
        "run_slow": settings.SLOW_VARIABLE in true_ones,
        "strict_defects": settings.STRICT_DEFECTS_VARIABLE in true_ones,
        "strict_leaks": settings.STRICT_LEAKS_VARIABLE in true_ones,
        "strict_names": settings.STRICT_NAMES_VARIABLE in true_ones,
        "rerun_disabled": "PYTORCH_TEST_RERUN_DISABLED_TESTS" in true_ones,
        "skip_fast": "PYTORCH_TEST_SKIP_FAST" in true_ones,
    }
    shard, num_shards = settings.shard(environment)
    words = {"device": DEVICE_VARIABLE, "backend": BACKEND_VARIABLE}
    paths = {"disabled": "DISABLED_TESTS_FILE", "slow": "SLOW_TESTS_FILE"}
    return {
        **flags,
        "shard": shard,
        "num_shards": num_shards,
        "jobs": 1 if "PYTORCH_TEST_RUN_EVERYTHING_IN_SERIAL" in true_ones else None,
        "within": settings.tests_to_include(environment),
        **{field: environment[name] for field, name in words.items() if name in set_ones},
        **{field: Path(environment[name]) for field, name in paths.items() if name in set_ones},
    }


def parse(argv: Sequence[str], environment: Mapping[str, str], root: Path) -> RunTests:
    """The run that the arguments and upstream's environment variables describe.

    Exits with :attr:`ExitStatus.USAGE_ERROR` and one sentence if they are wrong.
    ``root`` is the folder whose ``test`` is the default test directory. Test files get what follows the first ``--``.
    """
    dashes = list(argv).index("--") if "--" in argv else len(argv)
    parser = make_parser()
    default_directory = (root / DEFAULT_DIRECTORY).absolute()
    given = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in vars(parser.parse_intermixed_args(argv[:dashes])).items()
    }
    if "shard" in given:
        given["shard"], given["num_shards"] = given["shard"]
    for each in extension.found().values():
        given = {**each.implied(given), **given}
    try:
        settings.check(environment)
        from_environment = _from_environment(environment)
        ranks = settings.ranks(environment)
    except ConfigurationError as error:
        parser.error(str(error))
    nothing = tuple(dict.fromkeys((*given.get("without_effect", ()), *settings.without_effect(environment))))
    fields = {
        "test_directory": default_directory,
        "ranks": ranks,
        **from_environment,
        **given,
        "default_directory": default_directory,
        "arguments": tuple(argv[dashes + 1 :]),
        "shuffle": "seed" in given,
        "logs_by_option": "pipe_logs" in given,
    }
    if "fail_fast" in given and "keep_going" not in given:
        fields["keep_going"] = False  # the option overrides CONTINUE_THROUGH_ERROR
    selection = _part(Selection, fields)
    fields["remarks"] = (*_remarks(given, nothing, environment), *_of_classes(selection))
    run = RunTests(selection, _part(Execution, fields), _part(Output, fields))
    try:
        run = dataclasses.replace(run, features=_features(run, given, environment))
    except ConfigurationError as error:
        parser.error(str(error))
    problem = _misplaced(run, parser) or _problem(run, rerun_asked="rerun_disabled" in given)
    if problem is not None:
        parser.error(problem)
    return run


def _part(part: type[_Part], fields: Mapping[str, Any]) -> _Part:
    """A part of the run, of those fields that are its own."""
    names = [field.name for field in dataclasses.fields(part)]  # type: ignore[arg-type]
    return part(**{name: fields[name] for name in names if name in fields})


def _features(run: RunTests, given: Mapping[str, Any], environment: Mapping[str, str]) -> Features:
    """What the extensions do that the options ask for."""
    made = {name: each.feature(run, given, environment) for name, each in extension.found().items()}
    return Features({name: feature for name, feature in made.items() if feature is not None})


def _remarks(given: Mapping[str, Any], nothing: Sequence[str], environment: Mapping[str, str]) -> Iterator[str]:
    """What a user may not expect of a command line of PyTorch's CI, and of variables that leave out tests."""
    if nothing:
        yield f"these options and variables of PyTorch's CI have no effect here: {', '.join(nothing)}"
    if "timeout" in given and any(name in given for name in _SIGNS_OF_CI):
        yield f"--timeout limits a file here, and a test in PyTorch's CI; {TIMEOUT_VARIABLE} limits a test"
    if settings.tests_to_include(environment):
        yield f"files that {settings.TESTS_VARIABLE} does not name are left out"
    if "shard" not in given and (parts := settings.shard(environment)) != (1, 1):
        yield f"{settings.SHARD_VARIABLE} selects part {parts[0]} of {parts[1]}"


def _of_classes(selection: Selection) -> Iterator[str]:
    """What a user may not expect of --hw-classification."""
    if not selection.is_own and selection.hw_classification:
        yield "--hw-classification leaves out nothing: what test classes set as hw_classification is not read"
    elif ACCELERATOR in selection.hw_classification:
        yield f"--hw-classification {ACCELERATOR} leaves out nothing: all tests here are for any device"


def _misplaced(run: RunTests, parser: Parser) -> str | None:
    """A sentence about an option that the suite's test files would reject, or None. Other files may have any option."""
    own = {*parser.effective_options()} - _OF_TEST_FILES if run.selection.is_own else ()
    found = next((word for word in run.execution.arguments if word.partition("=")[0] in own), None)
    return found and f"{found} follows --, so test files would get it: put it before --"


def _problem(run: RunTests, rerun_asked: bool) -> str | None:
    """A sentence that says why the options are wrong, or None."""
    selection, execution, output = run.selection, run.execution, run.output
    if not selection.test_directory.is_dir():
        return f"the test directory {selection.test_directory} does not exist; name one with --test-directory"
    if selection.shard > selection.num_shards:
        return f"--shard {selection.shard} {selection.num_shards}: shards are counted from 1 to {selection.num_shards}"
    if output.as_json and not output.dry_run:
        return "--json can only be used with --dry-run"
    if output.list_tests and not output.list_files:
        return "--tests can only be used with --list"
    if execution.fail_fast and execution.keep_going:
        return "--fail-fast and --keep-going cannot be used together"
    if rerun_asked and not (selection.disabled or selection.known_failures):
        return "--rerun-disabled-tests needs a list: --disabled-tests, --known-failures or DISABLED_TESTS_FILE"
    if len(tracing := [feature.traces for feature in run.features.values() if feature.traces]) > 1:
        return f"{tracing[0]} cannot be used with {tracing[1]}: both trace what tests execute"
    for feature in run.features.values():
        if (problem := feature.problem(run)) is not None:
            return problem
    return None if output.list_files or output.dry_run else _unwritable(run)


def _unwritable(run: RunTests) -> str | None:
    """A sentence that says what could not be written at the end of the run, or None."""
    from torch_fsdp_tests.dispatch.atomic import try_folder  # imported late, because a plan writes nothing

    folders = {
        "--save-xml": run.output.save_xml,
        "--report": run.output.report,
        "--save-times": run.output.save_times,
        "--pipe-logs": run.reports / "logs" if run.output.logs_by_option else None,
    }
    for option, folder in [
        *folders.items(),
        *(pair for each in run.features.values() for pair in each.writes().items()),
    ]:
        if folder is not None:
            try:
                try_folder(folder)
            except OSError as error:
                return f"{option}: {folder} cannot be written to: {error}"
    return None


def default_jobs(ranks: int) -> int:
    """The number of files at a time on the CPU: two ranks for each core, because ranks often wait for each other.

    With few cores two files run at a time. More would slow each file down, so that tests could reach their own limits.
    """
    cores = devices.cores()
    return max(min(2, cores), 2 * cores // max(ranks, 1))
