"""``run_tests()``: what a test file calls when it is run as a program."""

from __future__ import annotations

import argparse
import os
import sys
import unittest
from collections.abc import Sequence
from typing import Any

import expecttest

from torch_fsdp_tests import extension, installation, process_state, settings
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch import upstream_names
from torch_fsdp_tests.settings import BACKEND_VARIABLE, DEVICE_VARIABLE
from torch_fsdp_tests.verdict import events, stream

from . import testcase
from .seed import SEED_VARIABLE, set_rng_seed

NO_TESTS_RAN = 5  # unittest's own exit status for this since Python 3.12
BAD_ARGUMENTS = 2

# Options of upstream's run_tests for many files or other runners. They are rejected: ignoring them would mislead.
_ELSEWHERE = {
    "--save-xml": "run_test.py writes JUnit: python run_test.py -i FILE --save-xml DIR",
    "--subprocess": "run_test.py runs each file in a process of its own",
    "--run-parallel": "run_test.py runs files side by side: python run_test.py -j N",
    "--use-pytest": "call pytest itself: pytest FILE",
    "--pytest-single-test": "call pytest itself: pytest FILE::CLASS::TEST",
    "--import-slow-tests": "run_test.py reads the list that the environment variable SLOW_TESTS_FILE names",
    "--import-disabled-tests": "run_test.py reads the list that the environment variable DISABLED_TESTS_FILE names",
    "--rerun-disabled-tests": "run_test.py does so under PYTORCH_TEST_RERUN_DISABLED_TESTS=1",
    "--log-suffix": "run_test.py names its reports",
}


def _own_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, usage=argparse.SUPPRESS)
    options = parser.add_argument_group("options in addition to unittest's")
    options.add_argument("--seed", type=int, metavar="N", help="seed of every test and of its ranks (default: 1234)")
    options.add_argument("--showlocals", action="store_true", help="the same as --locals")
    options.add_argument("--no-showlocals", dest="showlocals", action="store_false", help=argparse.SUPPRESS)
    options.add_argument("--repeat", type=int, default=1, metavar="N", help="run the tests N times, or until one fails")
    options.add_argument("--accept", action="store_true", help="update the strings that expecttest keeps in the tests")
    options.add_argument("--discover-tests", action="store_true", help="print the names of the tests, and run nothing")
    return parser


class _Runner(unittest.TextTestRunner):
    """unittest's runner, which also prints what tests left changed, below the list of failures."""

    def _makeResult(self) -> Any:
        result: Any = super()._makeResult()
        print_errors = result.printErrors

        def print_errors_and_leaks() -> None:
            print_errors()
            process_state.notes.report(self.stream)  # type: ignore[arg-type]
            if borrowed := upstream_names.borrowed_in_words():
                print(borrowed, file=self.stream)
            for defects, words, how in (
                (testcase.hit, "known defect of torch reproduced", "by"),
                (testcase.fixed, "fixed in this PyTorch", "as shown by"),
            ):
                for defect, tests in defects.items():
                    print(f"{words}: {defect}, {how} {', '.join(tests)}", file=self.stream)

        result.printErrors = print_errors_and_leaks
        return result


class _Program(unittest.TestProgram):
    """unittest's program, which prepares the rank engine after the tests are loaded and before the first one runs."""

    test: unittest.TestSuite
    testNames: Sequence[str] | None

    def __init__(self, argv: list[str], repeat: int, only_names: bool) -> None:
        self._repeat = repeat
        self._only_names = only_names
        super().__init__(module="__main__", argv=argv, testRunner=_Runner)

    def _why_nothing(self) -> str:
        patterns = " or ".join(f"-k {pattern.strip('*')}" for pattern in self.testNamePatterns or ())
        names = ", ".join(self.testNames or ())
        return f"no test matches {patterns}" if patterns else f"there is no test in {names or 'this file'}"

    def runTests(self) -> None:
        from torch_fsdp_tests import ranks  # not at import: only a process that runs tests needs the engine

        if self._only_names:
            if ranks.follows():
                sys.exit(0)
            print(*map(events.test_name, events.tests_in(self.test)), sep="\n")
            sys.exit(0)
        if not self.test.countTestCases() and not stream.attached():
            if not ranks.follows():
                print(f"{os.path.basename(sys.argv[0])}: nothing ran: {self._why_nothing()}", file=sys.stderr)
            sys.exit(NO_TESTS_RAN)
        ranks.prepare()
        if borrowed := upstream_names.borrowed_in_words():
            events.note(borrowed)
        self.exit = False  # the exit status is decided below, in the same way on all versions of Python
        tests = list(events.tests_in(self.test)) if self._repeat > 1 else []  # a suite forgets what it has run
        for _ in range(self._repeat):
            self.test = unittest.TestSuite(tests) if tests else self.test
            super().runTests()
            if not self.result.wasSuccessful():
                sys.exit(extension.place().conclude(1))
        ran = self.result.testsRun or self.result.skipped
        sys.exit(extension.place().conclude(0 if ran else NO_TESTS_RAN))


_show_exception = sys.excepthook


def _skip_file(kind: Any, error: BaseException, trace: Any) -> None:
    """Exit with 0 if the program is a test file whose import raises a skip. Show any other exception as before."""
    if not events.skips_file(error):
        _show_exception(kind, error, trace)
        return
    print(f"{os.path.basename(sys.argv[0])}: skipped: {error}\n\nOK (skipped=1)", file=sys.stderr)
    sys.exit(0)


sys.excepthook = _skip_file


def run_tests(argv: Sequence[str] | None = None) -> None:
    """Run the tests of the file that runs as a program, like :func:`unittest.main`, and exit.

    ``argv`` is by default ``sys.argv``, the program's name first. Options, output and exit status are unittest's (1: a
    test failed; 2: bad arguments; 5: nothing ran, also before Python 3.12), and ``--seed`` and upstream's
    ``--showlocals``, ``--repeat``, ``--accept`` and ``--discover-tests`` are understood. Upstream's other options
    belong to ``run_test.py`` and are rejected.

    What tests left changed in the process is printed under the list of failures, one sentence for each thing.
    """
    program, *arguments = sys.argv if argv is None else argv
    for argument in arguments:
        option = argument.partition("=")[0]
        if option in _ELSEWHERE:
            print(f"{option} is not an option of a single test file: {_ELSEWHERE[option]}", file=sys.stderr)
            sys.exit(BAD_ARGUMENTS)
    parser = _own_options()
    if {"-h", "--help"} & set(arguments):
        try:
            unittest.main(argv=[program, "--help"])
        finally:
            print(parser.format_help())
    options, rest = parser.parse_known_args(arguments)
    if options.repeat < 1:
        parser.error(f"argument --repeat: {options.repeat} is less than 1")
    if options.seed is not None:
        os.environ[SEED_VARIABLE] = str(options.seed)
    try:
        if not stream.attached():
            installation.check_file(program)
        settings.check(os.environ)
        extension.place()
        set_rng_seed()
        is_named = any(map(os.environ.get, (DEVICE_VARIABLE, BACKEND_VARIABLE)))
        if is_named and not (options.discover_tests or stream.attached()):  # a dispatcher has checked it
            accelerator.current()  # raises if it is not available
    except ValueError as error:
        print(f"{os.path.basename(program)}: {error}", file=sys.stderr)
        sys.exit(BAD_ARGUMENTS)
    if options.accept:
        expecttest.ACCEPT = "1"  # what it makes of EXPECTTEST_ACCEPT=1
        os.environ["EXPECTTEST_ACCEPT"] = "1"  # for the ranks
    if options.showlocals:
        rest.insert(0, "--locals")
    _Program([program, *rest], options.repeat, options.discover_tests)


upstream_names.replace_run_tests(run_tests)
