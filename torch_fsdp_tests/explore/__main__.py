"""``python -m torch_fsdp_tests.explore``: search for defects of FSDP with random programs."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch_fsdp_tests import settings
from torch_fsdp_tests.dispatch.options import positive, whole_number
from torch_fsdp_tests.explore.generate import FEATURES
from torch_fsdp_tests.explore.program import Program, ProgramError
from torch_fsdp_tests.processes import host

if TYPE_CHECKING:  # torch is imported only after the options are read
    from torch_fsdp_tests.explore.ranks import Result
    from torch_fsdp_tests.explore.search import Search

NAME = "torch_fsdp_tests.explore"
ALL = ("all",)
DEFAULT_SECONDS = 60.0
EPILOG = """\
exit status: 0 if nothing new was found; 1 if something was; 2 for bad arguments; 3 if something could not be read or
written; 130 after Ctrl-C without findings.
The device under test is chosen as for the tests: TORCH_FSDP_TESTS_DEVICE, TORCH_FSDP_TESTS_BACKEND.
"""


def _features(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in FEATURES:
            raise argparse.ArgumentTypeError(f"unknown feature {name!r}; --features lists them")
    return names


def _ids(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"python -m {NAME}",
        description="Run random programs over FSDP, compare each with a plain model, and shrink what differs.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    words = "how long to search (default: 60, or up to the last program with --programs)"
    parser.add_argument("--seconds", type=positive, help=words)
    parser.add_argument("--seed", type=int, default=0, help="the first program's seed (default: 0)")
    parser.add_argument("--ranks", type=int, choices=[1, 2, 4], default=2, help="ranks of a program (default: 2)")
    parser.add_argument("--with", dest="demanded", type=_features, default=(), metavar="A,B", help="features to demand")
    parser.add_argument("--without", type=_features, default=(), metavar="A,B", help="features to switch off")
    words = "do not avoid the known defects of the registry, or only not these"
    parser.add_argument("--with-known", type=_ids, nargs="?", const=ALL, default=(), metavar="ID,ID", help=words)
    parser.add_argument("--programs", type=whole_number(1, 10**9), metavar="N", help="stop after so many programs")
    parser.add_argument("--first", action="store_true", help="stop at the first new finding, and do not shrink it")
    words = "also look for memory that streams, or the host, use without waiting for each other"
    parser.add_argument("--check-streams", action="store_true", help=words)
    one = parser.add_mutually_exclusive_group().add_argument
    one("--twice", action="store_true", help="run each program twice, and demand the same bits")
    one("--record", type=Path, metavar="FILE", help="write the numbers of each program into a file")
    one("--against", type=Path, metavar="FILE", help="run the programs of a record, and compare")
    one("--replay", type=Path, metavar="FILE", help="run the program in a file, and say how it ends")
    parser.add_argument("--output", type=Path, metavar="DIR", help="write the findings into a folder")
    parser.add_argument("--resume", action="store_true", help="go on where the search of --output ended")
    parser.add_argument("--features", action="store_true", help="list the features, and search for nothing")
    given = parser.parse_args(argv)
    if given.resume and given.output is None:
        parser.error("--resume needs --output, the folder of the search that it continues")
    if both := {*given.demanded}.intersection(given.without):
        parser.error(f"--with and --without name {min(both)}; leave it out of one of them")
    return given


def main(argv: Sequence[str]) -> int:
    host.refuse_unsupported()
    host.exit_on_signals()
    options = parse(argv)
    if options.features:
        for name, meaning in FEATURES.items():
            print(f"{name:15} {meaning}")
        return 0
    if options.check_streams:
        os.environ[settings.CHECK_STREAMS_VARIABLE] = "1"
    try:
        if options.replay:
            return _replay(options.replay)
        return _against(options.against) if options.against else _search(options)
    except ProgramError as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2


def _replay(path: Path) -> int:
    from torch_fsdp_tests.explore import lifecycle, ranks

    program = Program.read(path)
    print(program.listing())
    if why := lifecycle.problem(program):
        raise ProgramError(f"{path} has a program that is not valid: {why}")
    ranks.prepare()
    crew = ranks.Crew(program.world_size)
    try:
        result = crew.run(program)
    finally:
        crew.close()
    print("\n" + in_words(result))
    return 1 if result.is_finding else 0


def _against(path: Path) -> int:
    from torch_fsdp_tests.explore import ranks, record

    ranks.prepare()
    count = differing = 0
    for count, difference in enumerate(record.differences(path), 1):
        if difference:
            differing += 1
            print(f"program {count}: {difference}", flush=True)
    print(f"{differing} of {count} programs differ")
    return 1 if differing else 0


def in_words(result: Result) -> str:
    if result.invalid:
        return f"a plain model cannot run this program: {result.invalid}"
    if not result.is_finding:
        return "as expected"
    return f"rank {result.rank}, {result.when}: {result.what}\n{result.detail}"


def _search(options: argparse.Namespace) -> int:
    import torch

    from torch_fsdp_tests.explore import known, ranks
    from torch_fsdp_tests.explore.execution import COMPARE, RECORD, TWICE
    from torch_fsdp_tests.explore.record import Recorder
    from torch_fsdp_tests.explore.search import Search, Settings, save

    with_known = tuple(known.REWRITINGS) if options.with_known == ALL else options.with_known
    for id in with_known:
        if id not in known.REWRITINGS:
            raise ProgramError(f"--with-known: programs avoid no defect {id}; they avoid {', '.join(known.REWRITINGS)}")
    ranks.prepare()
    recorder = Recorder(options.record) if options.record else None
    progress = _Progress()
    search = Search(
        Settings(
            options.seconds or (math.inf if options.programs else DEFAULT_SECONDS),
            options.seed,
            options.ranks,
            without=options.without,
            demanded=options.demanded,
            with_known=with_known,
            most=options.programs,
            shrinks=not options.first,
            mode=TWICE if options.twice else RECORD if options.record else COMPARE,
        ),
        progress.show,
        None if recorder is None else recorder.take,
    )
    state = options.output and options.output / "search.json"
    if options.resume and state.exists():
        try:
            search.resume(json.loads(state.read_text()))
        except ValueError as error:
            raise ProgramError(f"{state} cannot be resumed: {error}") from error
    print(f"torch {torch.__version__}, {options.ranks} ranks, seed {options.seed}", flush=True)
    stopped = 0
    try:
        for finding in search.findings():
            progress.clear()
            label = f"known: {finding.known}" if finding.known else "new" if finding.is_confirmed else "not repeated"
            print(f"\n{label}\n{finding.program.listing()}\n{in_words(finding.result)}", flush=True)
            if options.output:
                print(f"written: {', '.join(map(str, save(finding, options.output)))}", flush=True)
            if options.first and finding.is_new:
                break
    except (KeyboardInterrupt, SystemExit) as left:
        stopped = host.exit_status(left) if isinstance(left, SystemExit) else 130
    search.close()
    progress.clear()
    if state:
        state.parent.mkdir(parents=True, exist_ok=True)
        state.write_text(json.dumps(search.state()) + "\n")
    new = [finding for finding in search.found if finding.is_new]
    print(f"\n{progress.line(search)}")
    for finding in search.found:
        print(f"  {finding.count} times: {finding.result.what} {finding.result.place} {finding.known}".rstrip())
    return 1 if new else stopped


class _Progress:
    """One line on a terminal, rewritten at most four times a second; elsewhere a line every minute."""

    def __init__(self) -> None:
        self.start = time.monotonic()
        self.is_terminal = sys.stdout.isatty()
        self.shown = self.start

    def line(self, search: Search) -> str:
        spent = time.monotonic() - self.start
        new = sum(finding.is_new for finding in search.found)
        return (
            f"{search.programs} programs in {spent:.0f} s ({search.programs / max(spent, 0.1):.1f} a second)"
            f"{f' after {search.earlier}' if search.earlier else ''}, "
            f"{len(search.lines)} lines of FSDP, {len(search.pairs)} pairs of features, {new} new findings"
        )

    def show(self, search: Search) -> None:
        now = time.monotonic()
        if now - self.shown < (0.25 if self.is_terminal else 60.0):
            return
        self.shown = now
        if self.is_terminal:
            print(f"\r{self.line(search)}\x1b[K", end="", flush=True)
        else:
            print(self.line(search), flush=True)

    def clear(self) -> None:
        if self.is_terminal:
            print("\r\x1b[K", end="", flush=True)


if __name__ == "__main__":
    host.run_command(NAME, main)
