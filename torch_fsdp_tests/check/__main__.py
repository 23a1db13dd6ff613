"""``python -m torch_fsdp_tests.check mymodule:factory``: train a user's model with FSDP and without it, and compare."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from torch_fsdp_tests.check import check_report, checking
from torch_fsdp_tests.check.checking import Checked
from torch_fsdp_tests.check.factory import InvalidFactory, case_of
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.dispatch import atomic
from torch_fsdp_tests.dispatch.options import Parser
from torch_fsdp_tests.models import ModelTestCase
from torch_fsdp_tests.models.advice import advice
from torch_fsdp_tests.models.configurations import COMBINED, COMPILED, OPTIONS, Configuration, UnknownConfiguration
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.verdict import in_one_line

EPILOG = f"""\
example, with mymodule.py in this folder:

    def factory():
        def batch(step):  # different for each step; each rank gets its own
            generator = torch.Generator().manual_seed(step)
            return torch.rand(4, 8, generator=generator)

        def loss(model, batch):
            return model(batch).square().mean()

        return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)), batch, loss

    python -m torch_fsdp_tests.check mymodule:factory

FACTORY is MODULE:NAME or FILE.py:NAME. NAME is such a function, or a subclass of torch_fsdp_tests.models.ModelTestCase,
which can also say which modules are units, what is frozen, and how the model generates.

A configuration is fsdp1, fsdp2 or replicate with options, as in {COMBINED[1]} or fsdp2_dcp_to_fsdp1_hsdp:
{chr(10).join(f"    {option:12}{words}" for option, words in OPTIONS.items())}

exit status: 0 if FSDP trains as the plain model does; 1 if not; 2 for bad arguments.
The device under test is chosen as for the tests: TORCH_FSDP_TESTS_DEVICE, TORCH_FSDP_TESTS_BACKEND.
"""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog=check_report.PROGRAM,
        description="Train a model in many configurations of FSDP, and compare it with the plain model.",
        epilog=EPILOG,
    )
    parser.add_argument("factories", nargs="+", metavar="FACTORY", help="what makes the model; see below")
    parser.add_argument("--only", metavar="NAMES", help="train only in these configurations, separated by commas")
    parser.add_argument("--compile", action="store_true", help="also train with compiled units")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--report", metavar="DIR", type=Path, help="write report.html and report.json into DIR")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    system.exit_if_unsupported()
    system.exit_on_signals()
    options = parse(argv)
    try:
        device = accelerator.current()
        cases = {each: case_of(each, _configurations(options)) for each in options.factories}
        warnings = {each: _advice(each, case) for each, case in cases.items()}
    except (InvalidFactory, UnknownConfiguration, accelerator.ConfigurationError) as error:
        print(f"{check_report.PROGRAM}: {error}", file=sys.stderr)
        return 2
    facts = {"device": device.name, "backend": device.backend}
    findings = [finding for each, case in cases.items() for finding in checking.check(each, case, _show(options.json))]
    data = check_report.as_data(findings, warnings, facts)
    if options.report:
        atomic.write_text(options.report / "report.json", json.dumps(data, indent=1) + "\n")
        atomic.write_text(options.report / "report.html", check_report.as_html(data))
    if options.json:
        print(json.dumps(data, indent=1))
    else:
        print(f"\ntorch {torch.__version__}, device {device.name}, backend {device.backend}\n")
        print(check_report.text(findings, warnings))
    return 1 if any(finding.ending.is_bad for finding in findings) else 0


def _configurations(options: argparse.Namespace) -> list[str] | None:
    """Those that the user asks for, or None for those of the case."""
    if options.only:
        return [Configuration.parse(name).name for name in options.only.split(",")]
    return [*COMBINED, *COMPILED] if options.compile else None


def _advice(argument: str, case: type[ModelTestCase]) -> list[object]:
    """What is expected to fail. Raises :class:`InvalidFactory` if the plain model itself does not run."""
    try:
        return [*advice(case())]
    except Exception as error:
        raise InvalidFactory(f"{argument}: the plain model does not run: {in_one_line(error)}") from error


def _show(is_quiet: bool) -> Callable[[Checked], None]:
    """What prints each result at once, on stderr."""

    def show(finding: Checked) -> None:
        if not is_quiet:
            line = f"{finding.ending.value} {finding.model} {finding.configuration} {finding.seconds:.1f}s"
            print(line, file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    system.run_command("torch_fsdp_tests.check", main)
