"""``python -m torch_fsdp_tests.defects``: which known FSDP defects does the installed torch have?"""

from __future__ import annotations

import argparse
import enum
import json
import platform
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_fsdp_tests.defects import fixes, registry
from torch_fsdp_tests.defects.command import changes, find, texts, versions_page
from torch_fsdp_tests.defects.limits import Limit
from torch_fsdp_tests.defects.registry import Answer, Component, Consequence, Defect, Exposure, InvalidQuery
from torch_fsdp_tests.dispatch.atomic import json_rows, write_text
from torch_fsdp_tests.dispatch.devices import cores
from torch_fsdp_tests.dispatch.options import Parser
from torch_fsdp_tests.installed_torch import sources
from torch_fsdp_tests.processes import system
from torch_fsdp_tests.settings import ConfigurationError
from torch_fsdp_tests.verdict import plural

if TYPE_CHECKING:
    from torch_fsdp_tests.defects.command.trial import Finding

KINDS: tuple[type[enum.Enum], ...] = (Component, Consequence, Exposure)  # facts by which options choose defects
EPILOG = """\
exit status: 0 if every answer is what the registry expects of this version of torch; 1 if one is not (a defect was
fixed, reappeared, or could not be decided), or if --fail-on applies, or if --find or --using finds nothing, or if
--patch lacks a fix; 2 for bad arguments; 3 if something could not be written.
The device under test is chosen as for the tests: TORCH_FSDP_TESTS_DEVICE, TORCH_FSDP_TESTS_BACKEND.
"""
CHOICE = tuple(kind.__name__.lower() for kind in KINDS)
# Options that ask for something else than a check, and what each can be used with.
ALONE = ("between", "html", "show", "issue", "patch")
QUESTIONS: dict[str, Sequence[str]] = dict.fromkeys(ALONE, ()) | dict.fromkeys(("find", "using"), CHOICE)
QUESTIONS["list"] = ("ids", *CHOICE)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m torch_fsdp_tests.defects",
        description="Check the installed torch for the known defects of FSDP.",
        epilog=EPILOG,
    )
    words = "the defects to check, by id or glob (default: all)"
    parser.add_argument("ids", nargs="*", default=[], metavar="ID", help=words)
    for kind in KINDS:
        name = kind.__name__.lower()
        what = f"check, list or find only defects of some of {', '.join(each.value for each in kind)}"
        parser.add_argument(f"--{name}", type=_some_of(kind), metavar="SOME", help=f"{what} (separated by commas)")
    parser.add_argument("--list", action="store_true", help="list the defects, the worst first, and check none")
    words = "print the defects that fit these words, an issue of torch, or a traceback (- reads it from stdin)"
    parser.add_argument("--find", nargs="+", metavar="WORD", help=words)
    words = f"print the defects that can affect programs that use these: {', '.join(find.SHORT)}"
    parser.add_argument("--using", metavar="FEATURES", help=words)
    words = "print what changed from one version of torch to another"
    parser.add_argument("--between", nargs=2, metavar="VERSION", help=words)
    words = "write a page about all defects, their versions and the workarounds"
    parser.add_argument("--html", metavar="FILE", help=words)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--show", metavar="ID", help="print a script that reproduces the defect with torch alone")
    parser.add_argument("--issue", metavar="ID", help="check the defect, and print a text for torch's issue tracker")
    words = "print the fixes of these defects, or all, as a diff, a proposal: patch -p1 -d SITE_PACKAGES applies it"
    parser.add_argument("--patch", nargs="+", metavar="ID", help=words)
    parser.add_argument("--fail-on", choices=["present"], help="exit with 1 if a defect is present")
    parser.add_argument("--save-seen", action="store_true", help="store the findings for this version in the registry")
    given = parser.parse_args(argv)
    named = [name for name, value in vars(given).items() if value != parser.get_default(name)]
    for question in (name for name in QUESTIONS if name in named):
        ignored = [name for name in named if name != question and name not in QUESTIONS[question]]
        if ignored:
            options = [f"--{name.replace('_', '-')}" if name != "ids" else "ID" for name in (question, ignored[0])]
            parser.error(f"{' and '.join(options)} cannot be used together; give one of them")
    return given


def _some_of(kind: type[enum.Enum]) -> Callable[[str], Collection[enum.Enum]]:
    """How to read some members of an enum, such as ``default,common``."""

    def read(text: str) -> Collection[enum.Enum]:
        members = {member.value.lower(): member for member in kind}
        names = [name.strip().lower() for name in text.split(",")]
        for name in names:
            if name not in members:
                there_are = ", ".join(member.value for member in kind)
                raise argparse.ArgumentTypeError(f"there is no {kind.__name__.lower()} {name!r}; there are {there_are}")
        return {members[name] for name in names}

    return read


def main(argv: Sequence[str]) -> int:
    system.exit_if_unsupported()
    system.exit_on_signals()
    try:
        return _answer(parse(argv))
    except (InvalidQuery, ConfigurationError, fixes.NotFixed, sources.NotInstalled) as error:
        print(f"torch_fsdp_tests.defects: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print("torch_fsdp_tests.defects: torch is not installed, so no defect can be tried", file=sys.stderr)
        return 2


def _answer(options: argparse.Namespace) -> int:
    """Run the requested command. Returns the exit status."""
    if options.find or options.using is not None:
        return _find(options)
    if options.between is not None:
        print(changes.text(*(".".join(version.split(".")[:2]) for version in options.between)))
        return 0
    if options.html is not None:
        path = Path(options.html)
        if path.is_dir():
            raise InvalidQuery(f"--html: {path} is a folder; name a file")
        write_text(path, versions_page.render())
        return 0
    if options.show is not None:
        print(texts.script(registry.defect(options.show)), end="")
        return 0
    if options.patch:
        return _patch(["*"] if options.patch == ["all"] else options.patch, is_strict=options.patch != ["all"])
    if options.issue is not None:
        from torch_fsdp_tests.defects.command import trial  # imports torch

        (finding,) = trial.try_all([registry.defect(options.issue).id], 1)
        print(texts.issue(finding), end="")
        return 0
    defects = _chosen(options, map(registry.defect, registry.matching(options.ids or ["*"])))
    if not defects:
        raise InvalidQuery("none of these defects has these kinds; --list shows all")
    if options.list:
        print(texts.listing(defects))
        return 0
    return _try(options, [defect.id for defect in defects])


def _chosen(options: argparse.Namespace, defects: Iterable[Defect]) -> list[Defect]:
    return registry.chosen(defects, **{kind: getattr(options, kind) for kind in CHOICE})


def _patch(patterns: Sequence[str], is_strict: bool) -> int:
    """Print the fixes as one diff for the installed torch. If some are missing, say why and return 1."""
    root, version = sources.installed()
    defects = list(map(registry.defect, registry.matching(patterns)))
    missing = {defect.id: _why_no_fix(defect, version) for defect in defects}
    found = [defect for defect in defects if not missing[defect.id]]
    try:
        diff = fixes.diff([defect.id for defect in found], root, version)
    except fixes.NotFixed as error:
        print(f"torch_fsdp_tests.defects: {error}", file=sys.stderr)
        return 1
    for defect in found:
        print(f"# {defect.id}: {defect.title}")
    if found:
        print("# A proposal of this suite's, which PyTorch has not reviewed.")
    print(diff, end="")
    if not is_strict:
        print(f"{len(found)} of {len(defects)} defects have a fix for torch {version}", file=sys.stderr)
        return 0
    for why in filter(None, missing.values()):
        print(f"torch_fsdp_tests.defects: {why}", file=sys.stderr)
    return 1 if any(missing.values()) else 0


def _why_no_fix(defect: Defect, version: str) -> str:
    """Why there is no fix of a defect for this version of torch, or an empty string."""
    if defect.expected(version) in (Answer.ABSENT, Answer.CANNOT_BE_TRIED):
        return f"torch {version} does not have {defect.id}"
    return fixes.fix(defect.id).why_not(version)


def _find(options: argparse.Namespace) -> int:
    version, limits = _version(), list[Limit]()
    if options.find:
        words = sys.stdin.read() if options.find == ["-"] else " ".join(options.find)
        if not words.strip():
            raise InvalidQuery("--find needs words or a traceback")
        limits = find.limits_for(words)
        found = find.fitting(words)
        found.sort(key=lambda defect: defect.expected(version) is not Answer.PRESENT)
    else:
        found = find.by_features(options.using.lower().replace(" ", "").split(","))
        expected = {Answer.PRESENT, Answer.UNDECIDED}
        found = [defect for defect in found if defect.expected(version) in expected]
    found = _chosen(options, found)
    for limit in limits:
        print(f"{texts.limit(limit)}\n")
    for defect in found:
        print(f"{texts.answer(defect, version)}\n")
    print(
        texts.sums(
            found, limits, "try other words, or the whole traceback" if options.find else "ask for fewer features"
        )
    )
    return 0 if found or limits else 1


def _version() -> str:
    """The version of the installed torch, or the newest that the registry knows."""
    try:
        return sources.installed()[1]
    except sources.NotInstalled:
        return f"{registry.versions()[-1]}.0"


def _try(options: argparse.Namespace, ids: list[str]) -> int:
    import torch  # nothing else of this command needs it

    from torch_fsdp_tests.defects.command import trial
    from torch_fsdp_tests.device import accelerator

    device = accelerator.current()
    facts = {"torch": torch.__version__, "python": platform.python_version()}
    facts |= {"device": device.name, "backend": device.backend}
    heading = ", ".join(f"{name} {value}" for name, value in facts.items())
    findings = []
    if not options.json:
        print(f"{heading}; {plural(len(ids), 'defect')}", flush=True)
    for finding in trial.try_all(ids, at_a_time=2 * cores()):  # ranks mostly wait for each other
        findings.append(finding)
        if not options.json:
            print(f"[{len(findings)}/{len(ids)}] {texts.line(finding)}", flush=True)
    order = [defect.id for defect in registry.worst_first(finding.defect for finding in findings)]
    findings.sort(key=lambda finding: order.index(finding.defect.id))
    if options.save_seen:
        _save(findings, facts["torch"])
    unexpected = [finding for finding in findings if not finding.is_as_expected]
    present = [finding for finding in findings if finding.answer is Answer.PRESENT]
    if options.json:
        print(json.dumps(facts | {"version": 2, "defects": [_as_json(finding) for finding in findings]}, indent=1))
    else:
        for finding in present:
            print(f"\n{texts.details(finding)}")
        for finding in unexpected:
            answers = f"{finding.answer.value}, but {finding.expected.value} was expected"
            print(f"\nnot as expected: {finding.defect.id} is {answers}")
        exposures = texts.by_exposure(finding.defect for finding in present)
        print(f"\n{heading}\n{texts.counts(findings)}\nof those that are present: {exposures}")
    return 1 if unexpected or (options.fail_on == "present" and present) else 0


def _as_json(finding: Finding) -> dict[str, Any]:
    defect = finding.defect
    return {
        "id": defect.id,
        "title": defect.title,
        "component": defect.component.value,
        "consequence": defect.consequence.value,
        "exposure": defect.exposure.value,
        "answer": finding.answer.value,
        "expected": finding.expected.value,
        "why": finding.why,
        "rank": finding.rank,
        "found": finding.found,
        "right": finding.right,
        "upstream": list(defect.upstream),
        "arguable": defect.arguable,
        "seconds": round(finding.seconds, 3),
    }


def _save(findings: Sequence[Finding], version: str) -> None:
    """Store the answers for this version of torch, whatever its build, beside those of other defects.

    A defect that cannot be tried on this device keeps the answer of another device.
    """
    recorded, of_version = registry.recorded(), version.partition("+")[0]
    known = {id: answer for id, answer in recorded["seen"].get(of_version, {}).items() if id in registry.ids()}
    tried = [each for each in findings if each.answer is not Answer.CANNOT_BE_TRIED or each.defect.id not in known]
    answers = known | {each.defect.id: each.answer.value for each in tried}
    data = {**recorded, "seen": {**recorded["seen"], of_version: answers}}
    by_id = {kind: registry.transposed(table) for kind, table in data.items()}
    write_text(registry.SEEN, json_rows(by_id, depth=2) + "\n")
