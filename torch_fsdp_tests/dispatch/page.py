"""``report.html``: one file without external resources, and without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from torch_fsdp_tests.dispatch.junit import clean

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--dim:#667085;--line:#d9dee7;--paper:#fff;--panel:#f5f7fa;--ok:#2e8b57;
--bad:#c8323c;--skip:#8b95a5;--flaky:#c98a1b}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--dim:#98a2b3;--line:#343c4a;--paper:#14181f;--panel:#1c222c}}
*{box-sizing:border-box}body{margin:0 auto;max-width:1180px;padding:28px 24px 60px;background:var(--paper);
color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:24px;margin:0 0 4px}h2{font-size:18px;margin:34px 0 10px}
.dim{color:var(--dim)}.sums{display:flex;flex-wrap:wrap;gap:12px;margin:18px 0}
.sums div{background:var(--panel);border-radius:8px;padding:10px 18px;min-width:110px}
.sums b{display:block;font-size:24px;line-height:1.2}
.ok{color:var(--ok)}.bad{color:var(--bad)}
.skip{color:var(--skip)}.flaky{color:var(--flaky)}table{border-collapse:collapse;width:100%}
td,th{text-align:left;padding:5px 10px 5px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--dim);font-weight:500}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
code,pre{font:13px/1.45 ui-monospace,monospace}
pre{background:var(--panel);border-radius:8px;padding:12px;overflow:auto;max-height:420px;white-space:pre-wrap}
details{margin:6px 0;border:1px solid var(--line);border-radius:8px;padding:8px 12px}summary{cursor:pointer}
svg{width:100%;height:auto;display:block}svg text{font:11px system-ui,sans-serif;fill:var(--dim)}svg .name{fill:#fff}
svg .grid{stroke:var(--line)}.bar{background:var(--ok);height:9px;border-radius:3px;display:inline-block;opacity:.7}
.wrap{overflow-wrap:anywhere}
"""
_WIDTH, _LEFT, _ROW = 1130, 84, 26
_SLOWEST = 15


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def _verdict(file: Mapping[str, Any]) -> str:
    if file["failed"]:
        return "bad"
    if len(file["attempts"]) > 1:
        return "flaky"
    return "ok" if any(test["outcome"] not in ("skipped", "not run") for test in file["tests"]) else "skip"


def _rows(header: Iterable[tuple[str, str]], rows: Iterable[Iterable[str]]) -> str:
    kinds = [kind for _, kind in header]
    head = "".join(f'<th class="{kind}">{escape(name)}</th>' for name, kind in header)
    body = "".join(
        "<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _timeline(data: Mapping[str, Any]) -> str:
    """Slots downwards, seconds to the right, a box for each process on the slots that it was lent."""
    total = max(data["seconds"], 0.001)
    scale = (_WIDTH - _LEFT - 10) / total
    height = _ROW * len(data["slots"]) + 24
    step = next((s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800) if total / s <= 12), 3600)
    parts = []
    for tick in range(int(total / step) + 1):
        x = _LEFT + tick * step * scale
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 20}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{tick * step:g} s</text>')
    for row, slot in enumerate(data["slots"]):
        label = slot if not str(slot).isdecimal() else f"{data['device']} {slot}"
        parts.append(f'<text x="0" y="{row * _ROW + 17}">{escape(str(label))}</text>')
    colours = {"bad": "var(--bad)", "ok": "var(--ok)", "skip": "var(--skip)", "flaky": "var(--flaky)"}
    for file in data["files"]:
        for attempt in file["attempts"]:
            x, width = _LEFT + attempt["began"] * scale, max(2.0, (attempt["ended"] - attempt["began"]) * scale - 1)
            colour = colours["bad" if attempt["failed"] else _verdict(file)]
            name = file["file"].rpartition("/")[2].removeprefix("test_")
            title = escape(f"{file['file']}: {_seconds(attempt['ended'] - attempt['began'])}, {attempt['ending']}")
            for slot in attempt["slots"]:
                y = slot * _ROW + 2
                parts.append(
                    f'<g><title>{title}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 4}" '
                    f'rx="3" fill="{colour}"/>'
                )
                room = int((width - 8) / 6.2)
                if room > 2:
                    short = name if len(name) <= room else name[: room - 1] + "…"
                    parts.append(f'<text class="name" x="{x + 5:.1f}" y="{y + 15}">{escape(short)}</text>')
                parts.append("</g>")
    label = "Timeline of slots and the files on them"
    return f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _failures(data: Mapping[str, Any]) -> str:
    parts = []
    for file in data["files"]:
        bad = [test for test in file["tests"] if test["outcome"] in ("failed", "error", "unexpected success")]
        if not bad:
            continue
        parts.append(f'<h3 class="wrap">{escape(file["file"])}</h3>')
        for test in bad:
            head = f'<b class="bad">{escape(test["outcome"])}</b> <code class="wrap">{escape(test["test"])}</code>'
            text = escape(clean(test["text"]) or "no traceback")
            parts.append(f"<details open><summary>{head}</summary><pre>{text}</pre></details>")
        left = [test["test"] for test in file["tests"] if test["outcome"] == "not run"]
        if left:
            parts.append(f"<p>Not reached: <code class='wrap'>{escape(', '.join(left))}</code></p>")
        output = file["attempts"][-1]["output"]
        ending = escape(file["attempts"][-1]["ending"])
        parts.append(f"<details><summary>whole output ({ending})</summary><pre>{escape(clean(output))}</pre></details>")
    return "".join(parts)


def render(data: Mapping[str, Any]) -> str:
    """The page of a report, from its data."""
    tests = [(file["file"], test) for file in data["files"] for test in file["tests"]]
    slowest = sorted(tests, key=lambda item: -item[1]["seconds"])[:_SLOWEST]
    longest = max((test["seconds"] for _, test in slowest), default=0.0) or 1.0
    flaky = [(file, test) for file, test in tests if test["flaky"]]
    about = [f"torch {data['torch']}", f"Python {data['python']}", f"device {data['device']}"]
    about += [f"{name} {data[name]}" for name in ("backend", "ranks") if data[name]]
    about += ["ranks share devices"] * data["shared"]
    about += [f"{data['cores']} cores", f"seed {data['seed']}", f"shard {data['shard']} of {data['num_shards']}"]
    sums = [(data["passed"], "passed", "ok"), (data["failed"], "failed", "bad"), (data["skipped"], "skipped", "skip")]
    sums += [(len(flaky), "flaky", "flaky")] * bool(flaky)
    boxes = "".join(f'<div><b class="{kind if count else "dim"}">{count}</b>{word}</div>' for count, word, kind in sums)
    boxes += f"<div><b>{_seconds(data['seconds'])}</b>wall time</div><div><b>{len(data['files'])}</b>files</div>"
    body = [
        f"<h1>FSDP test run</h1><div class=dim>{escape(' · '.join(map(str, about)))}</div><div class=sums>{boxes}</div>"
    ]
    if data["not_started"]:
        body.append(f"<p>Not started: <code class=wrap>{escape(', '.join(data['not_started']))}</code></p>")
    body.append(f"<h2>Timeline</h2>{_timeline(data)}")
    failures = _failures(data)
    if failures:
        body.append(f"<h2>Failures</h2>{failures}")
    if flaky:
        rows = [[f"<code class=wrap>{escape(file + '::' + test['test'])}</code>"] for file, test in flaky]
        body.append("<h2>Flaky: failed, then passed in a new process</h2>" + _rows([("test", "")], rows))
    rows = [
        [
            f"<code class=wrap>{escape(test['test'])}</code><br><span class=dim>{escape(file)}</span>",
            _seconds(test["seconds"]),
            f'<span class=bar style="width:{max(1, 160 * test["seconds"] / longest):.0f}px"></span>',
        ]
        for file, test in slowest
    ]
    body.append("<h2>Slowest tests</h2>" + _rows([("test", ""), ("time", "n"), ("", "")], rows))
    if data["requirements_not_met"]:
        rows = [
            [str(item["tests"]), f"<span class=wrap>{escape(item['reason'])}</span>"]
            for item in data["requirements_not_met"]
        ]
        body.append("<h2>Skipped, by reason</h2>" + _rows([("tests", "n"), ("reason", "")], rows))
    rows = [
        [
            f'<span class="{_verdict(file)}">●</span> <code class=wrap>{escape(file["file"])}</code>',
            str(len(file["tests"])),
            _seconds(sum(attempt["ended"] - attempt["began"] for attempt in file["attempts"])),
            _seconds(file["estimate"]) if file["estimate"] else "unknown",
        ]
        for file in data["files"]
    ]
    body.append("<h2>Files</h2>" + _rows([("file", ""), ("tests", "n"), ("time", "n"), ("estimate", "n")], rows))
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>FSDP test run</title>'
    return (
        f"<!doctype html><html lang=en><head>{head}<style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )
