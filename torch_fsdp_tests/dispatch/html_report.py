"""``report.html``: one file without external resources, and without scripts."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from torch_fsdp_tests.dispatch import page
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.junit import clean
from torch_fsdp_tests.messages import from_data
from torch_fsdp_tests.verdict import Phase, RankResult, State, rank_rows, tell

_WIDTH, _LEFT, _ROW = 1130, 84, 26
_SLOWEST = 15

_BAD = {state.value for state in State if state.is_bad}
_KINDS = {"ok": "passed", "bad": "failed", "flaky": "flaky", "skip": "nothing executed"}


def _kind(file: Mapping[str, Any]) -> str:
    if file["failed"]:
        return "bad"
    if len(file["attempts"]) > 1:
        return "flaky"
    return "ok" if any(State(test["outcome"]).is_executed for test in file["tests"]) else "skip"


def _name(file: Mapping[str, Any]) -> str:
    of = f" ({file['shard_id']} of {file['num_shards']})" if file["num_shards"] > 1 else ""
    return f"{file['file']}{of}"


def _timeline(data: Mapping[str, Any]) -> str:
    """Slots downwards, seconds to the right, a box for each process on the slots that it was lent."""
    total = max(data["seconds"], 0.001)
    scale = (_WIDTH - _LEFT - 20) / total
    height = _ROW * len(data["slots"]) + 24
    steps = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1800, 3600, 7200)
    step = next((s for s in steps if total / s <= 12), 14400)
    parts = []
    for tick in range(int(total / step) + 1):
        x, at = _LEFT + tick * step * scale, tick * step
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 20}"/>')
        words = f"{at:g} s" if step < 60 else f"{at / 60:g} min"
        parts.append(f'<text x="{x:.1f}" y="{height - 6}" text-anchor="middle">{words}</text>')
    for row, slot in enumerate(data["slots"]):
        label = slot if not str(slot).isdecimal() else f"{data['device']} {slot}"
        parts.append(f'<text x="0" y="{row * _ROW + 17}">{escape(str(label))}</text>')
    for file in data["files"]:
        for attempt in file["attempts"]:
            x, width = _LEFT + attempt["began"] * scale, max(2.0, (attempt["ended"] - attempt["began"]) * scale - 1)
            kind = "bad" if attempt["failed"] else _kind(file)
            name = _name(file).rpartition("/")[2].removeprefix("test_")
            title = escape(f"{_name(file)}: {page.seconds(attempt['ended'] - attempt['began'])}, {attempt['ending']}")
            for slot in attempt["slots"]:
                y = slot * _ROW + 2
                parts.append(
                    f'<g><title>{title}</title><rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW - 4}" '
                    f'rx="3" fill="var(--{kind})"/>'
                )
                room = int((width - 8) / 6.2)
                if room > 2:
                    short = name if len(name) <= room else name[: room - 1] + "…"
                    parts.append(f'<text class="name" x="{x + 5:.1f}" y="{y + 15}">{escape(short)}</text>')
                parts.append("</g>")
    label = "Timeline of slots and the files on them"
    key = "".join(
        f'<span><span class="{kind}" aria-hidden=true>■</span> {words}</span>' for kind, words in _KINDS.items()
    )
    svg = f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    return f"<div class=scroll tabindex=0>{svg}</div><div class='dim key'>{key}</div>"


def _failure(test: Mapping[str, Any]) -> str:
    """One test: its state and why, a row for each of its ranks, and everything that was raised."""
    phase = " in a fixture" if test["phase"] == Phase.FIXTURE else ""
    head = f'<b class="bad">{escape(test["outcome"])}{phase}</b> {page.code(test["test"])}'
    ranks = [from_data(RankResult, rank) for rank in test["ranks"]]
    titles, *rows = rank_rows(ranks) or [()]
    columns = [(title, "n" if title in ("rank", "at") else "") for title in titles]
    table = page.table(columns, [[escape(clean(cell)) for cell in row] for row in rows])
    text = clean(tell(ranks, test["text"]))
    text = f"<pre tabindex=0>{escape(text)}</pre>" if text else ""
    return page.folded(head, f"<p>{escape(clean(test['reason']))}</p>{table}{text}", is_open=True)


def _failures(data: Mapping[str, Any]) -> str:
    parts = []
    for file in data["files"]:
        bad = [test for test in file["tests"] if test["outcome"] in _BAD]
        if not bad:
            continue
        last = file["attempts"][-1]
        attempts = f", {len(file['attempts'])} attempts" if len(file["attempts"]) > 1 else ""
        parts.append(f"<h3>{escape(_name(file))} <span class=dim>{escape(last['ending'])}{attempts}</span></h3>")
        parts += [_failure(test) for test in bad]
        left = [test["test"] for test in file["tests"] if test["outcome"] == State.NOT_RUN]
        if left:
            parts.append(page.names("Not reached", left))
        parts.append(page.folded("whole output of the file", f"<pre tabindex=0>{escape(clean(last['output']))}</pre>"))
    return "".join(parts)


def _flaky(data: Mapping[str, Any]) -> str:
    parts = []
    for file in data["files"]:
        names = [test["test"] for test in file["tests"] if test["flaky"]]
        if not names and (file["failed"] or len(file["attempts"]) == 1):
            continue
        first = file["attempts"][0]
        parts.append(f"<h3>{escape(_name(file))} <span class=dim>{len(file['attempts'])} attempts</span></h3>")
        parts += [page.names("Passed only when run again", names)] * bool(names)
        words = f"output of the first attempt ({escape(first['ending'])})"
        parts.append(page.folded(words, f"<pre tabindex=0>{escape(clean(first['output']))}</pre>"))
    return "".join(parts)


def _slowest(data: Mapping[str, Any]) -> str:
    tests = [(file, test) for file in data["files"] for test in file["tests"] if test["seconds"] > 0]
    slowest = sorted(tests, key=lambda item: -item[1]["seconds"])[:_SLOWEST]
    longest = max((test["seconds"] for _, test in slowest), default=0.0)
    rows = [
        [
            f"{page.code(test['test'])}<br><span class=dim>{escape(_name(file))}</span>",
            str(test["subtests"] or ""),
            page.seconds(test["seconds"]),
            page.bar(test["seconds"], longest),
        ]
        for file, test in slowest
    ]
    return page.table([("test", ""), ("subtests", "n wide"), ("time", "n"), ("", "b")], rows)


def _skips(data: Mapping[str, Any]) -> str:
    rows = [
        [str(item["tests"] or ""), str(item["subtests"] or ""), escape(clean(item["reason"]))] for item in data["skips"]
    ]
    return page.table([("tests", "n"), ("subtests", "n"), ("reason", "")], rows)


def _defects(defects: Sequence[Mapping[str, Any]]) -> str:
    rows = [
        [
            page.code(defect["id"]),
            escape(defect["title"]),
            escape(defect["consequence"]),
            " ".join(f'<a href="{escape(link)}">{escape(link.rpartition("/")[2])}</a>' for link in defect["upstream"]),
            "<br>".join(map(page.code, defect["tests"])),
        ]
        for defect in defects
    ]
    return page.table([("id", ""), ("title", ""), ("consequence", ""), ("upstream", ""), ("tests", "")], rows)


def _notes(data: Mapping[str, Any]) -> str:
    """What is no verdict: leaks, stale entries of lists."""
    notes = [(_name(file), note) for file in data["files"] for a in file["attempts"] for note in a["notes"]]
    notes += [(f"{_name(f)}::{t['test']}", note) for f in data["files"] for t in f["tests"] for note in t["notes"]]
    notes += [("lists", remark) for remark in data["list_remarks"]]
    rows = [[page.code(about), escape(clean(note))] for about, note in dict.fromkeys(notes)]
    return page.table([("about", ""), ("note", "")], rows)


def _files(data: Mapping[str, Any]) -> str:
    def took(file: Mapping[str, Any]) -> float:
        return sum(attempt["ended"] - attempt["began"] for attempt in file["attempts"])

    longest = max(map(took, data["files"]), default=0.0)
    rows = []
    for file in data["files"]:
        outcomes = [test["outcome"] for test in file["tests"]]
        kind = _kind(file)
        left_out = sum(not State(outcome).is_executed for outcome in outcomes)
        rows.append(
            [
                f'<span class="{kind}" title="{_KINDS[kind]}">●</span>&nbsp;{page.code(_name(file))}',
                str(len(outcomes)),
                f"<span class=bad>{count}</span>" if (count := sum(o in _BAD for o in outcomes)) else "",
                str(left_out or ""),
                page.seconds(took(file)),
                page.seconds(file["estimate"]) if file["estimate"] is not None else "unknown",
                page.bar(took(file), longest),
            ]
        )
    columns = [("file", ""), ("tests", "n"), ("failed", "n"), ("not executed", "n wide"), ("time", "n")]
    return page.table([*columns, ("estimate", "n wide"), ("", "b")], rows)


def _sums(data: Mapping[str, Any]) -> str:
    tests = [test for file in data["files"] for test in file["tests"]]
    flaky = sum(test["flaky"] for test in tests)
    not_run = sum(test["outcome"] == State.NOT_RUN for test in tests)
    sums = [(data["passed"], "passed", "ok"), (data["failed"], "failed", "bad"), (data["skipped"], "skipped", "skip")]
    sums += [(flaky, "flaky", "flaky")] * bool(flaky) + [(not_run, "not reached", "bad")] * bool(not_run)
    boxes = "".join(f'<div><b class="{kind if count else "dim"}">{count}</b>{word}</div>' for count, word, kind in sums)
    ways = collections.Counter(test["outcome"] for test in tests if test["outcome"] in _BAD)
    if ways.keys() - {State.FAILED.value}:
        boxes += f"<div class=dim>{'<br>'.join(f'{escape(way)}: {count}' for way, count in ways.most_common())}</div>"
    plural = "file" if len(data["files"]) == 1 else "files"
    files = f"<div><b>{len(data['files'])}</b>{plural}</div>"
    return f"{boxes}<div><b>{page.seconds(data['seconds'])}</b>wall time</div>{files}"


def render(data: Mapping[str, Any]) -> str:
    about = [f"torch {data['torch']}", f"Python {data['python']}", f"device {data['device']}"]
    about += [f"{name} {data[name]}" for name in ("backend", "ranks") if data[name]]
    about += ["devices shared" if data["shared"] else "devices not shared", f"{data['cores']} cores"]
    about += [f"seed {data['seed']}", f"shard {data['shard']} of {data['num_shards']}"]
    verdict = {
        ExitStatus.OK: ("passed", "ok"),
        ExitStatus.FAILED: ("failed", "bad"),
        ExitStatus.NOTHING_RAN: ("nothing ran", "bad"),
        ExitStatus.INTERRUPTED: ("interrupted", "bad"),
    }
    words, kind = verdict.get(data["exit_code"], (f"exit status {data['exit_code']}", "bad"))
    body = [f"<h1>FSDP test run: <span class={kind}>{words}</span></h1>"]
    body += [f"<div class=dim>{escape(' · '.join(map(str, about)))}</div><div class=sums>{_sums(data)}</div>"]
    if data["not_started"]:
        body.append(page.names("Files not started", data["not_started"]))
    sections = {
        "Timeline": _timeline(data),
        "Failures": _failures(data),
        "Flaky: failed, then passed in a new process": _flaky(data),
        "Known defects of this torch": _defects(data["known_defects"]),
        "Repaired in this torch": _defects(data["repaired_defects"]),
        "Slowest tests": _slowest(data),
        "Skipped, by reason": _skips(data),
        "Notes": _notes(data),
        "Files": _files(data),
    }
    body += [f"<h2>{title}</h2>{section}" for title, section in sections.items() if section]
    return page.document("FSDP test run", body)
