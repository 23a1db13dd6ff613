"""``python -m torch_fsdp_tests.check mymodule:factory``: train a user's model with FSDP and without it, and compare."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from torch_fsdp_tests.check import check_report, checking
from torch_fsdp_tests.check.apart import NoAnswer, apart
from torch_fsdp_tests.check.checking import Checked
from torch_fsdp_tests.check.factory import InvalidFactory, case_of, returns_one_model
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.dispatch import atomic
from torch_fsdp_tests.dispatch.option_types import whole_number
from torch_fsdp_tests.dispatch.options import Parser
from torch_fsdp_tests.models import ModelTestCase, simulating
from torch_fsdp_tests.models.configurations import COMBINED, COMPILED, OPTIONS, Configuration, UnknownConfiguration
from torch_fsdp_tests.models.survey import Survey, Untrainable, survey
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
    parser.add_argument(
        "--simulate",
        metavar="N",
        type=whole_number(2, 1_000_000),
        help="train nothing: predict memory and collectives on N ranks",
    )
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    parser.add_argument("--report", metavar="DIR", type=Path, help="write report.html and report.json into DIR")
    return parser.parse_args(argv)


class _Interrupted(KeyboardInterrupt):
    """A signal ends the run. unittest lets it through, and the report has what was found."""

    status = 128 + signal.SIGINT


def _interrupt_on_signals() -> None:
    def interrupt(number: int, frame: object) -> None:
        interrupted = _Interrupted()
        interrupted.status = 128 + number
        raise interrupted

    for number in system.ending_signals():
        signal.signal(number, interrupt)


def main(argv: Sequence[str]) -> int:
    system.exit_if_unsupported()
    _interrupt_on_signals()
    options = parse(argv)
    try:
        device = accelerator.current()
        if options.simulate:
            return _simulate(options)
        models = {each: _surveyed(each, options) for each in options.factories}
    except (InvalidFactory, UnknownConfiguration, accelerator.ConfigurationError) as error:
        print(f"{check_report.PROGRAM}: {error}", file=sys.stderr)
        return 2
    findings: list[Checked] = []
    status = _check(models, _showing(findings, options.json))
    surveys = {each: survey for each, (_, survey, _) in models.items()}
    data = check_report.as_data(findings, surveys, {"device": device.name, "backend": device.backend})
    if options.report:
        atomic.write_text(options.report / "report.json", json.dumps(data, indent=1) + "\n")
        atomic.write_text(options.report / "report.html", check_report.as_html(data))
    if options.json:
        print(json.dumps(data, indent=1))
    else:
        print(f"\ntorch {torch.__version__}, device {device.name}, backend {device.backend}\n")
        print(check_report.text(findings, surveys))
    if status:
        missing = sum(len(plan) for _, _, plan in models.values()) - len(findings)
        print(f"{check_report.PROGRAM}: interrupted: {missing} configurations did not end", file=sys.stderr)
    return status or int(any(finding.ending.is_bad for finding in findings))


def _simulate(options: argparse.Namespace) -> int:
    """Print what each model takes on so many ranks. The exit status is 1 if ranks issue other collectives.

    Raises :class:`InvalidFactory`.
    """
    used = {}
    for each in options.factories:
        case = case_of(each)
        try:
            used[each] = simulating.of_ranks(options.simulate, case(), apart)
        except InvalidFactory:
            raise
        except Exception as error:
            print(f"{check_report.PROGRAM}: {each} cannot be simulated: {in_one_line(error)}", file=sys.stderr)
            return 1
    if options.json:
        print(
            json.dumps({each: [dataclasses.asdict(rank) for rank in ranks] for each, ranks in used.items()}, indent=1)
        )
    else:
        print("\n".join(f"{each}: {line}" for each, ranks in used.items() for line in simulating.report(ranks)))
    return int(any(simulating.differ(ranks) for ranks in used.values()))


Surveyed = tuple[type[ModelTestCase], Survey, Mapping[str, str]]  # with the configurations that are left of others


def _check(models: Mapping[str, Surveyed], show: Callable[[Checked], None]) -> int:
    """Train all models. Returns the exit status if a signal ended this, and else zero."""
    try:
        for each, (case, survey, plan) in models.items():
            checking.check(each, case, plan, survey, show)
    except KeyboardInterrupt as interrupted:
        return getattr(interrupted, "status", _Interrupted.status)
    return 0


def _surveyed(argument: str, options: argparse.Namespace) -> Surveyed:
    """The case of a model, after a look at it in another process. Raises :class:`InvalidFactory`."""
    case = case_of(argument, _configurations(options))
    names = [Configuration.parse(name) for name in case.configurations]
    names = [name if case.generate is not None else name.without("generate") for name in names]
    wanted = list(dict.fromkeys(option for name in names for option in name.options))
    try:
        survey = apart(lambda: _survey(case, wanted))
    except (NoAnswer, Untrainable) as error:
        raise InvalidFactory(f"{argument}: {error}") from error
    plan = checking.planned([name.name for name in names], survey.dropped)
    return case_of(argument, [*filter(None, plan.values())], survey.is_shared), survey, plan


def _survey(case: type[ModelTestCase], options: Sequence[str]) -> Survey:
    """Runs in another process."""
    try:
        found = survey(case(), options)
        found.is_shared = returns_one_model(case())
    except (InvalidFactory, Untrainable):
        raise
    except Exception as error:
        raise Untrainable(f"the plain model does not run: {in_one_line(error)}") from error
    return found


def _configurations(options: argparse.Namespace) -> list[str] | None:
    """Those that the user asks for, or None for those of the case."""
    if options.only:
        return [Configuration.parse(name).name for name in options.only.split(",")]
    return [*COMBINED, *COMPILED] if options.compile else None


def _showing(findings: list[Checked], is_quiet: bool) -> Callable[[Checked], None]:
    """What keeps each result, and prints it at once, on stderr."""

    def show(finding: Checked) -> None:
        findings.append(finding)
        if not is_quiet:
            line = f"{finding.ending.value} {finding.model} {finding.configuration} {finding.seconds:.1f}s"
            print(line, file=sys.stderr, flush=True)

    return show


if __name__ == "__main__":
    system.run_command("torch_fsdp_tests.check", main)
