"""The table as text: a block for a document, a whole page, and lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from torch_fsdp_tests.dispatch.atomic import write_text
from torch_fsdp_tests.dispatch.listing import plural, seconds
from torch_fsdp_tests.versions.refusal import Refusal
from torch_fsdp_tests.versions.table import Only, Row, Table

BEGIN = "<!-- made by python -m torch_fsdp_tests.versions -->"
END = "<!-- end of what python -m torch_fsdp_tests.versions made -->"
TITLES = ("torch", "Python", "device", "what was run", "passed", "failed", "skipped", "known defects")
NAMED = 200  # tests of a group that the page lists; the JSON has all


def block(table: Table) -> str:
    """The block for a document: a row for each version, and how many tests execute only on some versions."""
    parts = [_markdown(*_numbers(table, code="`"))]
    if table.executes_only:
        counts = [(_listed(only.on), str(len(only.tests))) for only in table.executes_only]
        parts.append(_markdown(("tests that execute only on torch", "tests"), counts))
    return "\n\n".join([BEGIN, *parts, END])


def check_markers(path: Path) -> None:
    """Raise :class:`Refusal` if a file has no place for :func:`block`."""
    _cut(path)


def write_block(path: Path, table: Table) -> None:
    before, after = _cut(path)
    write_text(path, f"{before}{block(table)}{after}")


def _cut(path: Path) -> tuple[str, str]:
    """The text before and after the markers."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise Refusal(f"--write: {path} cannot be read: {error.strerror}") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise Refusal(f"--write: {path} does not have both of the lines {BEGIN} and {END}")
    return before, after


def page(table: Table) -> str:
    """Everything, in Markdown."""
    parts = ["# The suite over versions of torch", block(table), *table.remarks]
    for row in table.rows:
        if row.failures:
            failures = [(f"`{each['test']}`", each["outcome"], each["reason"]) for each in row.failures]
            parts += [f"## Failed on {row.label}", _markdown(("test", "outcome", "reason"), failures)]
    for row in table.rows:
        if row.skips:
            skips = [(str(each["tests"]), str(each["subtests"]), each["reason"]) for each in row.skips]
            parts += [f"## Skipped on {row.label}", _markdown(("tests", "subtests", "reason"), skips)]
    parts += _groups("execute", table.executes_only)
    parts += _groups("exist", table.exists_only)
    for sentence, found in _facts(table):
        listed = "\n".join(f"- `{name}`: {words}" for name, words in found.items())
        parts += [f"## {plural(len(found), 'fact')} of torch_facts.py that {sentence}", listed]
    return "\n\n".join(parts) + "\n"


def _groups(verb: str, groups: Sequence[Only]) -> list[str]:
    parts = []
    for only in groups:
        parts.append(f"## Tests that {verb} only on {_listed(only.on)}: {len(only.tests)}")
        names = [f"- `{name}`" for name in only.tests[:NAMED]]
        parts.append("\n".join([*names, *[f"- and {len(only.tests) - NAMED} more"] * (len(only.tests) > NAMED)]))
    return parts


def _facts(table: Table) -> list[tuple[str, dict[str, str]]]:
    """A summary of the facts over all versions: sentences, each with its facts."""
    oldest = table.rows[0].torch if table.rows else ""
    found = table.facts
    groups = [
        (
            f"hold on every version here, and are not needed if {oldest} is the oldest supported one",
            found.ended,
        ),
        ("hold on no version here", found.absent),
        ("do not hold where they should, or cannot be determined", found.disagreeing),
        ("are used by no test and no module", found.unasked),
    ]
    # With a single version it is not news whether a fact holds.
    return [(words, facts) for words, facts in groups[0 if len(table.rows) > 1 else 2 :] if facts]


def lines(table: Table) -> list[str]:
    """The lines at the end of a run on a terminal."""
    titles, cells = _numbers(table)
    rows = [titles, *cells]
    widths = [max(map(len, column)) for column in zip(*rows)]
    said = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    for row in table.rows:
        said += [f"failed on {row.label}: {each['test']}" for each in row.failures]
    said += [f"tests that execute only on {_listed(only.on)}: {len(only.tests)}" for only in table.executes_only]
    said += [f"facts that {sentence}: {', '.join(found)}" for sentence, found in _facts(table)]
    return [*said, *table.remarks]


def counts(row: Row) -> str:
    """A version in one line."""
    numbers = (
        f"{row.passed} passed, {row.failed} failed, {row.skipped} skipped, {plural(len(row.defects), 'known defect')}"
    )
    numbers += f", {plural(row.known_failures, 'known failure')}" if row.known_failures else ""
    return f"{numbers} in {seconds(row.seconds)}" + (f"; {row.problem}" if row.problem else "")


def _numbers(table: Table, code: str = "") -> tuple[Sequence[str], list[Sequence[str]]]:
    """The titles and the rows of the table in numbers. Known failures have a column if there are any."""
    rows = [_cells(row, code) for row in table.rows]
    if not any(row.known_failures for row in table.rows):
        return TITLES, [*rows]
    known = [str(row.known_failures) for row in table.rows]
    return (*TITLES, "known failures"), [(*cells, number) for cells, number in zip(rows, known)]


def _cells(row: Row, code: str = "") -> tuple[str, ...]:
    """A version as a row. ``code`` is put around options."""
    options = f"{code}{row.what}{code}" if row.what.startswith("-") else row.what
    what = "; ".join(filter(None, (options, row.problem)))
    device = row.device.upper() if row.device == "cpu" else row.device
    return (row.torch, row.python, device, what, str(row.passed), str(row.failed), str(row.skipped), _defects(row))


def _defects(row: Row) -> str:
    """The numbers of known defects of torch, and of tests that showed them."""
    return f"{len(row.defects)} ({plural(row.known_defects, 'test')})" if row.known_defects else "0"


def _listed(labels: Sequence[str]) -> str:
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def _markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(map(_cell, row))} |" for row in rows)])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
