"""What runs: the selected files, and the state of the checkout."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch import discover, options, select
from torch_fsdp_tests.dispatch.runtests import DEFAULT_DIRECTORY, RunTests
from torch_fsdp_tests.versions.refusal import Refusal

CHECKOUT = Path(__file__).resolve().parents[2]
_OURS = {"report", "list_files", "list_tests", "dry_run", "as_json", "failed_only", "compare"}  # or useless here
_OURS |= {
    "reaching",
    "changed",
    "map",
    "save_map",
    "fail_fast",
}  # a map belongs to one version
_NO_MATTER = (
    "keep_going",
    "jobs",
    "verbose",
    "slow_after",
    "pipe_logs",
    "save_xml",
)  # do not change what runs
_FSDPS = "distributed/"  # the tests of FSDP and what it is used with; the others test the suite itself
_VARIABLES = ("TORCH_FSDP_TESTS_", "PYTORCH_TEST_", "DISABLED_TESTS_FILE", "SLOW_TESTS_FILE")


@dataclasses.dataclass(frozen=True)
class Suite:
    """A selection of tests of this checkout, as it is now."""

    arguments: tuple[str, ...]  # for run_test.py
    words: str  # what is run, for a reader
    files: tuple[str, ...]  # that the selection names
    options: dict[str, Any]  # that decide which tests run, and how
    commit: str
    is_dirty: bool
    digest: str  # of the contents of all that a run reads
    digests: dict[str, str]  # by file, of all that its results depend on
    reports: Path  # where run_test.py puts what has no other place

    @property
    def is_cut_up(self) -> bool:
        """Whether this run has only a part of the files, so that the selection does not say which."""
        return "shard" in self.options

    @property
    def key(self) -> dict[str, Any]:
        """What must not change if results are to stay valid."""
        chosen = {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}
        whole = {"digest": self.digest} if self.is_cut_up else {}  # a shard's files depend on all of them
        return {**whole, "options": self.options, "variables": dict(sorted(chosen.items()))}


def of(arguments: Sequence[str]) -> Suite:
    """The suite that these arguments of ``run_test.py`` select. Raises :class:`Refusal`, or exits."""
    own = list(arguments)[: list(arguments).index("--") if "--" in arguments else len(arguments)]
    parser = options.make_parser()
    given = {name: value for name, value in vars(parser.parse_intermixed_args(own)).items() if value != []}
    spelled = {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}
    for name in _OURS & given.keys():
        raise Refusal(f"the option {spelled[name]} of run_test.py cannot be used with several versions of torch")
    directory = given.get("test_directory", CHECKOUT / DEFAULT_DIRECTORY)
    if not directory.is_dir():
        raise Refusal(f"the test directory {directory} does not exist")
    files = {file.name: file for file in discover.discover(directory)}
    try:
        selection = select.select(
            list(files.values()),
            given.get("include", ()),
            given.get("exclude", ()),
            directory,
            lambda name: files[name].source(),
        )
    except select.UnknownTest as error:
        raise Refusal(str(error)) from error
    chosen = [test.file for test in selection]
    if given.get("distributed_only"):
        chosen = select.matching("distributed", chosen)
    if not chosen:
        raise Refusal("nothing is selected")
    kept = {name: value for name, value in given.items() if name not in _NO_MATTER}
    paths = {name: file.path for name, file in files.items()}
    digest, digests = _digests([CHECKOUT / DEFAULT_DIRECTORY, CHECKOUT / "torch_fsdp_tests", directory], paths)
    return Suite(
        arguments=tuple(arguments),
        words=" ".join(_spelled(spelled[name], value) for name, value in kept.items()) or "everything",
        files=tuple(chosen),
        options=json.loads(json.dumps(kept, default=str)),
        commit=_git("rev-parse", "--short", "HEAD"),
        is_dirty=bool(_git("status", "--porcelain")),
        reports=RunTests(directory, CHECKOUT / DEFAULT_DIRECTORY).reports,
        digest=digest,
        digests={name: digests[name] for name in chosen},
    )


def _spelled(option: str, value: object) -> str:
    """The name of an option as a user types it."""
    values: list[Any] = value if isinstance(value, list) else [value]
    if option == "-k":
        return " ".join(shlex.join([option, str(each)]) for each in values)
    return shlex.join([option, *(str(each) for each in values if each is not True)])


def _digests(folders: Sequence[Path], tests: Mapping[str, Path]) -> tuple[str, dict[str, str]]:
    """A digest of everything that a run reads, and one for each test file.

    An FSDP test file depends on itself and on shared code, which does not include this command. The suite's own tests
    depend on everything.
    """
    names = {path: name for name, path in tests.items()}
    whole, shared = hashlib.sha256(), hashlib.sha256()
    contents: dict[str, bytes] = {}
    paths = [(folder, path) for folder in dict.fromkeys(folders) for path in _files(folder)]
    for folder, path in [(CHECKOUT, CHECKOUT / "run_test.py"), *paths]:
        content = f"{path.relative_to(folder)}\0".encode() + path.read_bytes()
        whole.update(content)
        if path in names:
            contents[names[path]] = content
        elif path.suffix == ".py" and path.parent != Path(__file__).parent:
            shared.update(content)
    everything = whole.hexdigest()[:16]
    digests = {
        name: hashlib.sha256(shared.digest() + content).hexdigest()[:16] if name.startswith(_FSDPS) else everything
        for name, content in contents.items()
    }
    return everything, digests


def _files(folder: Path) -> Iterator[Path]:
    """The files of the suite, without hidden files and bytecode."""
    for path, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name != "__pycache__")
        yield from (Path(path, name) for name in sorted(names) if not name.startswith("."))


def sources() -> Iterator[Path]:
    """The Python files of the checkout's package and tests."""
    for folder in ("torch_fsdp_tests", DEFAULT_DIRECTORY):
        yield from (path for path in _files(CHECKOUT / folder) if path.suffix == ".py")


def _git(*arguments: str) -> str:
    """The output of git for the checkout. Empty without a repository or without git."""
    try:
        said = subprocess.run(["git", "-C", str(CHECKOUT), *arguments], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return ""
    return said.stdout.strip() if said.returncode == 0 else ""
