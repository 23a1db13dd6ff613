"""``python -m torch_fsdp_tests.tools.devices``: count the tests that run on a number of devices, and run none."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from torch_fsdp_tests import installation
from torch_fsdp_tests.processes import host
from torch_fsdp_tests.tools import devices

HEAD = (
    "devices",
    "tests of PyTorch, there",
    "the same tests, here",
    "all tests, here",
    "skip here for want of devices",
)


def main(argv: Sequence[str]) -> int:
    """Parse the arguments, and print the table. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m torch_fsdp_tests.tools.devices",
        description="Count the tests that run on some devices, with one rank for each device. No test is started.",
        epilog="The exit status is 1 if a test of PyTorch has none here, or one that skips on a number of devices that "
        "is enough in PyTorch.",
    )
    parser.add_argument("numbers", type=int, nargs="*", default=[1, 2, 4, 8], metavar="N", help="numbers of devices")
    parser.add_argument("--skipped", action="store_true", help="also name the tests that skip for want of devices")
    arguments = parser.parse_args(argv)
    ours = devices.tests_below(installation.ROOT / "test" / "distributed")
    counts = devices.count(ours, arguments.numbers)
    for row in (HEAD, ("---",) * len(HEAD), *map(_row, counts)):
        print(f"| {' | '.join(map(str, row))} |")
    missing = devices.missing(ours)
    _print("no test here:", map(_name, missing))
    for each in counts:
        _print(f"runs in PyTorch on {each.devices}, and skips here:", map(_name, each.behind))
        if arguments.skipped:
            _print(f"skips on {each.devices}:", (test.id() for test in each.wanting))
    return 1 if missing or any(each.behind for each in counts) else 0


def _row(each: devices.Count) -> tuple[int, ...]:
    return each.devices, each.upstream, each.theirs, each.tests, len(each.wanting)


def _name(test: devices.Upstreams) -> str:
    return f"{test.file}::{test.cls}::{test.name}"


def _print(title: str, names: Iterable[str]) -> None:
    lines = list(names)
    if lines:
        print(f"\n{title}", *lines, sep="\n  ")


if __name__ == "__main__":
    host.run_command("devices", main)
