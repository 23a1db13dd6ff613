"""What all pages of results have in common: each is one file without external resources, and without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from torch_fsdp_tests.dispatch.junit import clean

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--dim:#5d6778;--line:#d9dee7;--paper:#fff;--panel:#f5f7fa;--ok:#23774a;
--bad:#b92b36;--skip:#6b7687;--flaky:#9a6200;--on:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--dim:#a3adbd;--line:#343c4a;--paper:#14181f;--panel:#1c222c;
--ok:#5cc48c;--bad:#ff7b84;--skip:#98a2b3;--flaky:#e5ad4d;--on:#10141a}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1180px;padding:28px 24px 60px;background:var(--paper);
color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:36px 0 10px}h3{font-size:15px;margin:20px 0 8px}
p{margin:8px 0}.dim{color:var(--dim)}.ok{color:var(--ok)}.bad{color:var(--bad)}.skip{color:var(--skip)}
.flaky{color:var(--flaky)}code,h3{overflow-wrap:anywhere}
.sums{display:flex;flex-wrap:wrap;gap:12px;margin:18px 0}
.sums div{background:var(--panel);border-radius:8px;padding:10px 18px;min-width:110px}
.sums b{display:block;font-size:24px;line-height:1.2}
table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:5px 14px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
td:last-child,th:last-child{padding-right:0}th{color:var(--dim);font-weight:500}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap;width:1%}
td.b{width:180px}.bar{background:var(--dim);height:9px;border-radius:3px;display:block;margin-top:7px;opacity:.6}
code,pre{font:13px/1.45 ui-monospace,monospace}
pre{background:var(--panel);border-radius:8px;padding:12px;margin:8px 0 0;overflow:auto;max-height:420px;
white-space:pre-wrap;overflow-wrap:anywhere}
details{margin:6px 0;border:1px solid var(--line);border-radius:8px;padding:8px 12px}summary{cursor:pointer}
.scroll{overflow-x:auto}svg{width:100%;min-width:720px;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--dim)}svg .name{fill:var(--on)}svg .grid{stroke:var(--line)}
.key>span{margin-right:16px;white-space:nowrap}
@media(max-width:640px){body{padding:18px 14px 40px}.b,.wide{display:none}.sums{gap:8px}
.sums div{padding:8px 12px;min-width:88px}.sums b{font-size:20px}td,th{padding-right:10px}}
"""
_FEW = 30  # names that are listed in the open; more are folded away


def seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def code(text: str) -> str:
    return f"<code>{escape(clean(text))}</code>"


def folded(summary: str, inside: str, is_open: bool = False) -> str:
    return f"<details{' open' * is_open}><summary>{summary}</summary>{inside}</details>"


def names(what: str, names: Sequence[str]) -> str:
    """A list of names in one paragraph, folded away when it is long."""
    text = code(", ".join(names))
    return f"<p>{what}: {text}</p>" if len(names) <= _FEW else folded(f"{what}: {len(names)}", text)


def table(columns: Sequence[tuple[str, str]], rows: Iterable[Sequence[str]]) -> str:
    """Columns are given by title and class; cells are HTML. Nothing where there are no rows."""
    kinds = [kind for _, kind in columns]
    head = "".join(f'<th class="{kind}">{escape(title)}</th>' for title, kind in columns)
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>" if body else ""


def bar(value: float, longest: float) -> str:
    return f'<span class=bar style="width:{max(1, 180 * value / (longest or 1)):.0f}px"></span>'


def document(title: str, body: Iterable[str]) -> str:
    """The whole file, of pieces of HTML."""
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    return (
        f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )
