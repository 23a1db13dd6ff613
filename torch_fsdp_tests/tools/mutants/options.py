"""The command line."""

from __future__ import annotations

import argparse
import math
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from torch_fsdp_tests import installation
from torch_fsdp_tests.dispatch import devices, reaching
from torch_fsdp_tests.dispatch.atomic import try_folder
from torch_fsdp_tests.dispatch.options import Parser, whole_number
from torch_fsdp_tests.dispatch.runtests import DEFAULT_DIRECTORY, REPORTS, RunTests
from torch_fsdp_tests.reach.changes import UnknownChange
from torch_fsdp_tests.tools.mutants.kinds import KINDS
from torch_fsdp_tests.tools.mutants.mutant import EQUIVALENT
from torch_fsdp_tests.tools.mutants.sites import RELATED

PACKAGE = "torch.distributed.fsdp"
TESTS = installation.ROOT / DEFAULT_DIRECTORY
RESULTS = RunTests(TESTS, TESTS).reports / "mutants"
NUMBER = whole_number(1, 10**9)
EPILOG = """\
A mutant is called MODULE:FUNCTION:KIND:NUMBER, such as
torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup.unshard:negate:1.

To continue an interrupted command, add --resume to it.

exit status: 0 if every mutant was tried, with any outcome; 2 for bad arguments; 3 if something could
not be written; 130 if interrupted.
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments, and check them. Exits if they are wrong.

    ``command`` are the arguments for a command that repeats a mutant: what is changed, and the map.
    """
    parser = Parser(
        prog="python -m torch_fsdp_tests.tools.mutants",
        description="Make one small change to torch's FSDP at a time, and see whether a test kills it.",
        epilog=EPILOG,
    )
    add = parser.add_argument_group("which mutants").add_argument
    words = "sample N mutants whose code a test runs, equally from FSDP1, FSDP2 and related modules"
    add("--sample", type=NUMBER, metavar="N", help=words)
    add("--seed", type=int, default=1, metavar="S", help="the same seed samples the same mutants (default: 1)")
    words = "change only modules whose full name, or whose name in the package, matches"
    add("--module", default="*", metavar="GLOB", help=words)
    words = "make only changes of these kinds: " + ", ".join(KINDS)
    add("--kind", nargs="+", action="extend", default=[], choices=[*KINDS], metavar="KIND", help=words)
    add("--mutant", action="append", default=[], metavar="ID", help="try this mutant; may be repeated")
    words = f"the package to change, such as a vendor's FSDP (default: {PACKAGE} and related modules)"
    add("--package", metavar="NAME", help=words)
    add("--list", action="store_true", help="print the mutants, and run nothing")
    add = parser.add_argument_group("which tests").add_argument
    add("-i", "--include", nargs="+", action="extend", default=[], metavar="TEST", help="run only tests of these files")
    words = "the map of what tests execute (default: the one that ships for this version of PyTorch)"
    add("--map", type=Path, metavar="FILE", help=words)
    words = "the folder of the tests (default: those of the suite)"
    add("--test-directory", type=Path, default=TESTS, metavar="DIR", help=words)
    words = "a list of mutants that no test can kill (default: the project's list)"
    add("--equivalent", type=Path, default=EQUIVALENT, metavar="FILE", help=words)
    add = parser.add_argument_group("how").add_argument
    add("-j", "--jobs", type=NUMBER, metavar="N", help="try N mutants at a time (default: one for each core)")
    words = "multiply all time limits, for busy machines (default: 1)"
    add("--patience", type=float, default=1.0, metavar="FACTOR", help=words)
    words = "run tests of at most S seconds for each mutant, by the times in the map; "
    words += "the most specific tests run first (default: no limit)"
    add("--budget", type=float, default=math.inf, metavar="S", help=words)
    add("--resume", action="store_true", help="keep the results that exist, and try the rest")
    words = f"the folder for results (default: {REPORTS}/mutants)"
    add("--output", type=Path, default=RESULTS, metavar="DIR", help=words)
    given = parser.parse_args(argv)
    if given.mutant and given.sample:
        parser.error("--mutant and --sample cannot be used together")
    if given.patience <= 0:
        parser.error("--patience must be greater than 0")
    if given.budget <= 0:
        parser.error("--budget must be greater than 0")
    if not given.test_directory.is_dir():
        parser.error(f"the test directory {given.test_directory} does not exist; name one with --test-directory")
    try:
        try_folder(given.output)
    except OSError as error:
        parser.error(f"--output: {given.output} cannot be written to: {error.strerror or error}")
    for option, file in ("--map", given.map), ("--equivalent", given.equivalent):
        if file is not None and (file.is_dir() or not os.access(file, os.R_OK)):
            parser.error(f"{option}: {file} is not a file that can be read; name another one, or leave the option out")
    repeated = [] if given.map is None else ["--map", str(given.map)]
    repeated += [] if given.package is None else ["--package", given.package]
    given.packages = (PACKAGE, *RELATED) if given.package is None else (given.package,)
    given.command = shlex.join(["python", "-m", "torch_fsdp_tests.tools.mutants", *repeated])
    try:
        given.map = given.map or reaching.shipped(devices.torch_version() or "", reaching.SHIPPED)
    except UnknownChange as error:
        parser.error(str(error))
    on_cpu = devices.find(None, None, os.environ).type == devices.CPU
    given.jobs = given.jobs or (devices.cores() if on_cpu else 1)
    given.test_directory = given.test_directory.resolve()
    return given
