"""The common parts of all pages of results.

Each page is one file without external resources. Scripts only filter: without them the page shows everything.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from urllib.parse import urlencode

from torch_fsdp_tests.verdict import clean

_DATA = Path(__file__).parent / "data"
_MAX_UNFOLDED = 30  # names that are always visible; longer lists are folded away
_MAX_CHARACTERS = 20_000  # characters of one text that a page shows


def text(value: object) -> str:
    """Any value as HTML text."""
    return escape(clean(str(value)))


def code(value: str) -> str:
    return f"<code>{text(value)}</code>"


def prose(value: str) -> str:
    """A sentence as HTML. A pair of backquotes marks ``code``."""
    return re.sub("``(.+?)``", r"<code>\1</code>", text(value))


def pre(value: str) -> str:
    """A text of several lines. Of a long text only the end is shown, because the cause is usually there."""
    value = clean(value)
    note = ""
    if len(value) > _MAX_CHARACTERS:
        words = f"The last {_MAX_CHARACTERS:,} of {len(value):,} characters; the JSON file has all."
        note = f"<p class='dim small'>{words}</p>"
    return f"{note}<pre tabindex=0>{escape(value[-_MAX_CHARACTERS:])}</pre>"


def command(value: str) -> str:
    """A command. It is copied as one line, even if the page wraps it."""
    return f"<pre tabindex=0>{text(value)}</pre>"


def folded(summary: str, inside: str, is_open: bool = False, attributes: str = "") -> str:
    return f"<details{' open' if is_open else ''} {attributes}><summary>{summary}</summary>{inside}</details>"


def names(what: str, names: Sequence[str]) -> str:
    """A list of names in one paragraph. A long list is folded away."""
    listed = code(", ".join(names))
    return f"<p>{what}: {listed}</p>" if len(names) <= _MAX_UNFOLDED else folded(f"{what}: {len(names)}", listed)


def item(state: str = "", features: Iterable[str] = (), is_test: bool = False, **others: str) -> str:
    """The attributes of an element that the filter may hide. Only tests are counted, each one once per page."""
    attributes = {"item": "test" if is_test else "more", "state": state, "feature": "|".join(features), **others}
    return " ".join(f'data-{name}="{escape(value)}"' for name, value in attributes.items() if value)


def above(upper: str, lower: str) -> str:
    """A cell of two lines, the lower one in small letters, both in HTML."""
    return f"{upper}<div class='dim small'>{lower}</div>"


CONTAINER = "data-holder"  # the attribute of an element that is hidden together with the last item in it


def filter_link(words: str, **filters: str) -> str:
    """Words that become a link to the filter's results if scripts run."""
    return f'<span data-filter-link="{escape(urlencode(filters))}">{words}</span>'


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a table, with attributes. A row of a single cell is the heading of the rows below it."""

    cells: Sequence[str]
    attributes: str = ""


def table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str] | Row], stack: bool = False) -> str:
    """A table. Columns have a title and a class; cells are HTML. Empty if there are no rows.

    On a phone the cells of a ``stack`` are below each other, and numbers have the titles of their columns.
    """
    head = "".join(f'<th class="{kind}">{escape(title)}</th>' for title, kind in columns)
    body = "".join(_row(columns, row if isinstance(row, Row) else Row(row), stack) for row in rows)
    kind = " class=stack" if stack else ""
    return f"<table{kind}><tbody><tr class=head>{head}</tr>{body}</tbody></table>" if body else ""


def _row(columns: Sequence[tuple[str, str]], row: Row, stack: bool) -> str:
    if len(row.cells) == 1:
        return f'<tr class="group" {row.attributes}><th colspan={len(columns)}>{row.cells[0]}</th></tr>'
    cells = []
    for (title, kind), cell in zip(columns, row.cells, strict=True):
        is_titled = stack and kind.startswith("n") and cell
        named = f' data-title="{escape(title)}"' if is_titled else ""
        cells.append(f'<td class="{kind}"{named}>{cell}</td>')
    return f"<tr{f' {row.attributes}' if row.attributes else ''}>{''.join(cells)}</tr>"


def bar(value: float, longest: float) -> str:
    return f'<span class=bar style="width:{max(1.0, 100 * value / (longest or 1)):.0f}%"></span>'


def parts(counts: Mapping[str, int]) -> str:
    """A bar that shows the parts of a whole, each with its class."""
    bars = "".join(f'<i class={kind} style="flex-grow:{count}"></i>' for kind, count in counts.items() if count)
    return f"<span class=parts aria-hidden=true>{bars}</span>"


def sums(boxes: Iterable[tuple[str, str, str]]) -> str:
    """The large numbers at the top of a page: the number, what it counts, and its class."""
    html = "".join(
        f"<div><b{f' class={kind}' if kind else ''}>{number}</b>{words}</div>" for number, words, kind in boxes
    )
    return f"<div class=sums>{html}</div>"


def facts(facts: Iterable[tuple[str, str]]) -> str:
    """The facts about a run: titles, and values in HTML. A long value has a line of its own."""
    html = "".join(
        f"<div{' class=long' if len(value) > 90 else ''}><dt>{escape(title)}</dt><dd>{value}</dd></div>"
        for title, value in facts
    )
    return f"<dl class=facts>{html}</dl>"


def filters(
    states: Iterable[str],
    features: Iterable[str] = (),
    things: str = "tests",
    kinds: str = "states",
    **others: Iterable[str],
) -> str:
    """The fields of the filter. It is hidden where scripts do not run. ``kinds`` names what ``item`` calls states."""
    selects = [_select("state", f"all {kinds}", states), _select("feature", "all features", features)]
    selects += [_select(name, f"all {name}s", values) for name, values in others.items()]
    return (
        f"<div class=filter role=search data-things={things} hidden><input name=find type=search autocomplete=off "
        f'aria-label="Find {things}" placeholder="Find {things}: words of names, files, reasons">{"".join(selects)}'
        "<button type=button hidden>Show all</button><output></output></div>"
    )


def _select(name: str, everything: str, values: Iterable[str]) -> str:
    options = "".join(f"<option>{escape(value)}</option>" for value in values)
    first = f'<option value="">{everything}</option>'
    return f'<select name={name} aria-label="{name}">{first}{options}</select>' if options else ""


@dataclasses.dataclass(frozen=True)
class Section:
    """A part of a page under a heading. If it has items, it is hidden when the filter finds none of them."""

    title: str
    content: str
    count: int | None = None
    has_items: bool = False

    @property
    def id(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower()).strip("-")

    def __str__(self) -> str:
        count = "" if self.count is None else f"<span class=count> {self.count}</span>"
        holder = f" {CONTAINER}" if self.has_items else ""
        return f'<section id="{self.id}"{holder}><h2>{escape(self.title)}{count}</h2>{self.content}</section>'


def sections(sections: Iterable[Section], before: str = "") -> str:
    """The sections that have something to show, below a list of them. ``before`` is placed between the two."""
    full = [section for section in sections if section.content]
    links = "".join(f'<a href="#{section.id}">{escape(section.title)}</a>' for section in full)
    return f'<nav aria-label="Sections">{links}</nav>{before}{"".join(map(str, full))}'


def document(title: str, body: Iterable[str]) -> str:
    """The whole file, from pieces of HTML. It tells browsers to load nothing, and to run no script but the filter's."""
    style, script = (_DATA.joinpath(name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><title>{escape(title)}</title>'
    )
    return (
        f"<!doctype html>\n<html lang=en><head>{head}<style>\n{style}</style></head>\n"
        f"<body>{''.join(body)}<script>{script}</script></body></html>\n"
    )
