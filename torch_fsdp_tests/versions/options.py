"""The command line, and every check that needs neither the network nor an environment."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from torch_fsdp_tests.dispatch.atomic import try_folder
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.runtests import REPORTS
from torch_fsdp_tests.versions import suite, texts, wanted
from torch_fsdp_tests.versions.environments import Recipe
from torch_fsdp_tests.versions.refusal import Refusal
from torch_fsdp_tests.versions.suite import CHECKOUT, Suite
from torch_fsdp_tests.versions.wanted import Wanted

REQUIREMENTS = CHECKOUT / ".ci" / "test.txt"
NIGHTLIES = "https://download.pytorch.org/whl/nightly/cpu"
EPILOG = """\
a version is
  2.15.0              a release, installed from the index
  nightly             the newest nightly build
  torch-2.16...whl    a wheel
  FOLDER              an environment (bin/python), a folder with a torch package, or one with wheels of one version
  PYTHON              the interpreter of an environment
  LABEL=ANY           any of these with a name: 2.15.0=/path/to/environment
Nothing is installed into an existing environment. All others are made once and kept.

  python -m torch_fsdp_tests.versions 2.9.1 2.15.0 nightly -i distributed \\
      --index-url https://download.pytorch.org/whl/cpu -- --strict-defects

An interrupted run continues where it stopped. A version that has run with the same state of the suite is not run again.
Without a version, the table shows the existing results.

exit statuses:
"""
# What the exit statuses mean for several versions, where that differs from one run.
SENTENCES = {
    ExitStatus.OK: "every version ran, and every test that ran had the expected outcome",
    ExitStatus.FAILED: "a test or a file failed with one of the versions",
    ExitStatus.BROKEN: "a version could not be run or did not finish, or a result could not be written",
    ExitStatus.NOTHING_RAN: "no test was executed",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The checked options."""

    versions: tuple[Wanted, ...]
    suite: Suite | None  # None if nothing runs
    recipe: Recipe
    output: Path
    again: frozenset[str]  # labels
    failed: bool  # whether files with failures run again
    as_markdown: bool
    write: Path | None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(ExitStatus.REFUSED, f"{self.prog}: {message}\n")

    def format_help(self) -> str:
        sentences = {status: status.sentence for status in ExitStatus} | SENTENCES
        self.epilog = EPILOG + "\n".join(f"  {status:3d}  {sentence}" for status, sentence in sentences.items())
        return super().format_help()


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m torch_fsdp_tests.versions",
        usage="%(prog)s [VERSION ...] [-i TEST ...] [options] [-- options of run_test.py]",
        description="Run this checkout's suite with several versions of torch, and compare the results test by test.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="see below")
    several: dict[str, Any] = {"nargs": "+", "action": "extend", "default": [], "metavar": "TEST"}
    parser.add_argument("-i", "--include", **several, help="the tests to run, as for run_test.py (default: all)")
    parser.add_argument("-x", "--exclude", **several, help="tests to leave out")
    parser.add_argument("-k", action="append", default=[], metavar="PATTERN", help="select tests by name inside files")
    add = parser.add_argument_group("environments").add_argument
    add(
        "--environments",
        type=Path,
        metavar="DIR",
        help="keep environments in this folder (default: in the user's cache)",
    )
    words = "make environments with this interpreter; may be repeated (default: those on PATH, and pyenv's)"
    add("--python", action="append", default=[], metavar="PATH", help=words)
    add("--index-url", metavar="URL", help="package index of torch, such as https://download.pytorch.org/whl/cpu")
    add("--extra-index-url", action="append", default=[], metavar="URL", help="another package index; may be repeated")
    add(
        "--nightly-index-url",
        default=NIGHTLIES,
        metavar="URL",
        help=f"package index of nightlies (default: {NIGHTLIES})",
    )
    words = "pass an argument to every pip install, as in --pip-arg=--no-cache-dir; may be repeated"
    add("--pip-arg", action="append", default=[], metavar="ARG", help=words)
    add = parser.add_argument_group("results").add_argument
    words = f"keep results in this folder (default: {REPORTS}/versions of the checkout)"
    add("--output", type=Path, default=CHECKOUT / REPORTS / "versions", metavar="DIR", help=words)
    words = "run these versions again, or all of them; must be the last option"
    add("--again", nargs="*", metavar="LABEL", help=words)
    add("--failed", action="store_true", help="run files with failures again")
    add("--markdown", action="store_true", help="print only the table, in Markdown, on stdout")
    add("--write", type=Path, metavar="FILE", help="write that table between its marks in this file")
    return parser


def parse(argv: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Parse the arguments. Exits or raises :class:`Refusal` if they are wrong."""
    dashes = list(argv).index("--") if "--" in argv else len(argv)
    given = _parser().parse_args(argv[:dashes])
    if not REQUIREMENTS.is_file():
        raise Refusal(f"this command needs a checkout of the suite, and {CHECKOUT} is not one")
    versions = tuple(map(wanted.parse, given.versions))
    labels = [version.label for version in versions]
    for label in labels:
        if labels.count(label) > 1:
            raise Refusal(f"two versions are called {label}; give one of them a name: NAME=VERSION")
    again = given.again if given.again is None or given.again else labels
    for label in again or ():
        if label not in labels:
            raise Refusal(f"--again: {label} is not one of the versions {', '.join(labels) or '(none is named)'}")
    selection = [*(["-i", *given.include] if given.include else []), *(["-x", *given.exclude] if given.exclude else [])]
    selection += [word for pattern in given.k for word in ("-k", pattern)]
    if not versions and (selection or argv[dashes + 1 :]):
        raise Refusal("no version is named, so nothing runs: leave out the selection of tests, or name versions")
    if given.write is not None:
        texts.check_markers(given.write)
    index = ["--index-url", given.index_url] if given.index_url else []
    extra = [word for url in given.extra_index_url for word in ("--extra-index-url", url)]
    folder = (given.environments or _cache(environment) / "torch_fsdp_tests" / "environments").expanduser().absolute()
    output = given.output.absolute()
    for option, path in (("--output", output), ("--environments", folder)) if versions else ():
        try:
            try_folder(path)
        except OSError as error:
            raise Refusal(f"{option}: {path} cannot be written to: {error.strerror or error}") from error
    recipe = Recipe(
        folder=folder,
        requirements=tuple(REQUIREMENTS.read_text(encoding="utf-8").splitlines()),
        pythons=tuple(given.python),
        index=(*index, *extra),
        nightly_index=("--index-url", given.nightly_index_url, *extra),
        pip=tuple(given.pip_arg),
    )
    return Options(
        versions=versions,
        suite=suite.of([*selection, *argv[dashes + 1 :]]) if versions else None,
        recipe=recipe,
        output=output,
        again=frozenset(again or ()),
        failed=given.failed,
        as_markdown=given.markdown,
        write=given.write,
    )


def _cache(environment: Mapping[str, str]) -> Path:
    """The user's cache folder."""
    if environment.get("XDG_CACHE_HOME"):
        return Path(environment["XDG_CACHE_HOME"])
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
