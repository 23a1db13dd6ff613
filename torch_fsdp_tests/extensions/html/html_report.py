"""``report.html``: the results of a run, for readers who did not run it."""

from __future__ import annotations

import collections
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from torch_fsdp_tests import extension
from torch_fsdp_tests.check import models_table
from torch_fsdp_tests.device import machine
from torch_fsdp_tests.device.capabilities import CAPABILITIES
from torch_fsdp_tests.dispatch import page
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.features import features_of
from torch_fsdp_tests.dispatch.file_result import EndKind, ProcessEnd
from torch_fsdp_tests.dispatch.page import Row, Section
from torch_fsdp_tests.dispatch.report import tests_in
from torch_fsdp_tests.extension import PageTable
from torch_fsdp_tests.processes.messages import from_data
from torch_fsdp_tests.verdict import (
    COUNTED,
    Phase,
    RankResult,
    Scope,
    SkipKind,
    State,
    clean,
    describe,
    plural,
    rank_rows,
    seconds,
    tally,
)

_NUMBER = re.compile(r"[\d.]*%?")  # a cell that is one, or empty
_SLOWEST = 15
_REASONS = 1  # reasons of a feature that are shown without a click

# The states that the page distinguishes: the class and the mark of each.
STATES = {
    "passed": ("ok", "✓"),
    "failed": ("bad", "✗"),
    "flaky": ("warn", "↻"),
    "known failure": ("warn", "~"),
    "known defect": ("warn", "!"),
    "skipped": ("skip", "-"),
    "not run": ("skip", "·"),
}
TOTALS = {state: state for state in STATES} | {
    "known failure": "known to fail",
    "known defect": "show known defects",
    "flaky": "passed when run again",
}
VERDICTS = {
    ExitStatus.OK: "passed",
    ExitStatus.FAILED: "failed",
    ExitStatus.HOST: "failed on one host",
    ExitStatus.NOTHING_RAN: "nothing ran",
    ExitStatus.BROKEN: "incomplete",
    ExitStatus.HUNG_UP: "hung up",
    ExitStatus.INTERRUPTED: "interrupted",
    ExitStatus.TERMINATED: "terminated",
}


def state_of(test: Mapping[str, Any]) -> str:
    """Return the one of ``STATES`` that a test is in."""
    state = State(test["outcome"]).counted_as
    return "flaky" if test["flaky"] and state is not State.FAILED else state.value


def mark(state: str) -> str:
    """Return a character for a state, in its color."""
    kind, character = STATES[state]
    return f'<span class="mark {kind}" title="{state}">{character}</span>'


def _state_of_file(file: Mapping[str, Any]) -> str:
    if file["failed"]:
        return "failed"
    if len(file["attempts"]) > 1:
        return "flaky"
    return state_of_several(tally(test["outcome"] for test in file["tests"]))


def state_of_several(counts: Mapping[State, int]) -> str:
    """Return the one of ``STATES`` that several tests are in together."""
    order = (State.FAILED, State.KNOWN_FAILURE, State.PASSED, State.KNOWN_DEFECT, State.SKIPPED)
    return next((state for state in order if counts[state]), State.NOT_RUN).value


def _name(file: Mapping[str, Any]) -> str:
    of = f" ({file['shard_id']} of {file['num_shards']})" if file["num_shards"] > 1 else ""
    return f"{file['file']}{of}"


@functools.cache
def names_of_features(file: str, test: str) -> tuple[str, ...]:
    return tuple(feature.name for feature in features_of(file, test))


def _item(file: Mapping[str, Any], test: Mapping[str, Any], is_test: bool = False) -> str:
    return page.item(state_of(test), names_of_features(file["file"], test["test"]), is_test)


def _row(file: Mapping[str, Any], test: Mapping[str, Any], *cells: str) -> Row:
    """A row about a test: its name above that of its file, and these cells."""
    return Row([page.above(page.code(test["test"]), escape(_name(file))), *cells], _item(file, test))


# --- the head ---------------------------------------------------------------------------------------------------------


def verdict(data: Mapping[str, Any]) -> tuple[str, str]:
    """Return the verdict on a run in a few words, and its class."""
    words = VERDICTS.get(data["exit_code"], f"exit status {data['exit_code']}")
    if data["exit_code"] != ExitStatus.OK:
        return words, "bad"
    known = counts(data)["known failure"]
    return (f"{words} with {plural(known, 'known failure')}", "warn") if known else (words, "ok")


def counts(data: Mapping[str, Any]) -> collections.Counter[str]:
    """Return the number of tests in each of ``STATES``."""
    return collections.Counter(state_of(test) for _, test in tests_in(data))


def _summary(data: Mapping[str, Any]) -> str:
    """Return the verdict in sentences."""
    count = collections.Counter(state_of(test) for _, test in tests_in(data) if test["scope"] == Scope.TEST)
    failed, ran = count["failed"], sum(count.values()) - count["skipped"] - count["not run"]
    outside = counts(data)["failed"] - failed
    if failed:
        files = sum(file["failed"] for file in data["files"])
        sentences = [f"{failed} of the {plural(ran, 'test')} that ran failed, in {plural(files, 'file')}."]
    elif ran:
        held = ran - count["known defect"] - count["known failure"]
        did = "that should pass passed" if held < ran else "that ran passed" if ran < sum(count.values()) else "passed"
        sentences = [f"All {plural(held, 'test')} {did}." if held > 1 else f"The test {did}."] if held else []
    else:
        sentences = ["No test was executed, so this run proves nothing."]
    if outside:
        where = "outside of tests: in a fixture, or in a file that could not run"
        sentences.insert(int(bool(failed)), f"{plural(outside, 'failure')} happened {where}.")
    were, their = ("was", "its reason is") if count["skipped"] == 1 else ("were", "their reasons are")
    deeds = {
        "known failure": "failed, as the list of known failures says",
        "known defect": f"showed {plural(len(data['known_defects']), 'known defect')}, as expected",
        "flaky": "passed only when run again",
        "skipped": f"{were} skipped; {their} given below",
        "not run": "did not run, because the file or the run ended first",
    }
    sentences += [f"{plural(count[state], 'test')} {deed}." for state, deed in deeds.items() if count[state]]
    if (rounds := data.get("rounds")) is not None:
        complete = plural(rounds["complete"], "complete round")
        sentences.append(f"This is the sum of {complete}: of each test the worst outcome counts.")
    return f"<p class=lead>{' '.join(sentences)}</p>"


def _tests_of(file: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the results of tests, without those of fixtures and of the file itself."""
    return [test for test in file["tests"] if test["scope"] == Scope.TEST]


def _place(failure: Mapping[str, Any]) -> str:
    """Where a test failed, such as ``rank 3 on host-b``. Empty if it has no ranks."""
    on = f" on {failure['host']}" if failure["host"] else ""
    return "" if failure["rank"] is None else f"rank {failure['rank']}{on}"


def rounds_in_words(data: Mapping[str, Any]) -> str:
    if (rounds := data.get("rounds")) is None:
        return ""
    asked = [f"of {rounds['asked']}"] if rounds["asked"] is not None else []
    asked += [f"in {seconds(rounds['limit'])} at most"] if rounds["limit"] is not None else []
    failed = [f"{rounds['failed']} failed"] if rounds["failed"] else []
    return ", ".join([" ".join([str(rounds["complete"]), *asked]), *failed])


def facts(data: Mapping[str, Any]) -> dict[str, str]:
    """List what was tested, where and when: titles and texts. Unknown facts are left out."""
    suite, device = data["suite"], data["device"]
    if data["device_count"]:
        device = plural(data["device_count"], f"{device} device")
        device += ", shared by several ranks" if data["shared"] else ""
    sizes = sorted({test["world_size"] for _, test in tests_in(data)} - {None})
    ranks = " to ".join(map(str, dict.fromkeys([*sizes[:1], *sizes[-1:]])))
    if data["ranks"] and sizes != [data["ranks"]]:
        ranks = ", ".join(filter(None, [ranks, f"{data['ranks']} by default"]))
    values = {
        "torch": data["torch"],
        "device": device,
        "backend": data["backend"],
        "ranks": ranks,
        "host": data["host"],
        "suite": f"{suite['version']} ({suite['commit']})" if suite["commit"] else suite["version"],
        "Python": data["python"],
        "system": data["system"],
        **machine.titled(data["machine"]),
        "cores": str(data["cores"]),
        "finished": data["date"].replace("T", " ").replace("+00:00", " UTC"),
        "fixes": ", ".join(data.get("fixes", ())),
        "seed": str(data["seed"]),
        "shard": f"{data['shard']} of {data['num_shards']}" if data["num_shards"] > 1 else "",
        "rounds": rounds_in_words(data),
        "tests selected": data["selection"] or "all",
    }
    return {title: str(value) for title, value in values.items() if value}


def totals(data: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return the large numbers of a run."""
    count = counts(data)
    states = [state for state in STATES if count[state] or state in ("passed", "failed", "skipped")]
    boxes = [(str(count[state]), TOTALS[state], STATES[state][0] if count[state] else "none") for state in states]
    files, _, noun = plural(len(data["files"]), "file").partition(" ")
    return [*boxes, (seconds(data["seconds"]), "wall time", ""), (files, noun, "")]


def title(data: Mapping[str, Any]) -> str:
    return f"FSDP of {'torch ' + data['torch'] if data['torch'] else 'an unknown torch'} on {data['device']}"


def _head(data: Mapping[str, Any]) -> str:
    words, kind = verdict(data)
    ways = collections.Counter(test["outcome"] for _, test in tests_in(data) if State(test["outcome"]).is_bad)
    counts = ", ".join(f"{escape(way)}: {count}" for way, count in ways.most_common())
    return (
        f"<div class=kind>FSDP test report</div><h1>{page.text(title(data))}: <span class={kind}>{words}</span></h1>"
        f"{_summary(data)}{page.sums(totals(data))}"
        + (f"<p class=dim>{counts}</p>" if ways.keys() - {State.FAILED.value} else "")
        + (page.names("Files not started", data["not_started"]) if data["not_started"] else "")
        + page.facts((title, page.text(value)) for title, value in facts(data).items())
    )


# --- what was tested --------------------------------------------------------------------------------------------------


def number(count: int, kind: str = "") -> str:
    """Show a number in a table. A 0 is left empty."""
    return f'<span class="{kind}">{count}</span>' if count else ""


def _missing(reasons: Sequence[Mapping[str, Any]]) -> str:
    items = []
    for item in reasons:
        amounts = [plural(item[what], what[:-1]) for what in ("tests", "subtests") if item[what]]
        items.append(f"<li>{page.text(item['reason'])} <span class=dim>({', '.join(amounts)})</span></li>")
    rest = items[_REASONS:]
    more = page.folded(f"{plural(len(rest), 'more reason')}", f"<ul>{''.join(rest)}</ul>") if rest else ""
    return f"<ul class=small>{''.join(items[:_REASONS])}</ul>{more}" if items else ""


def _filter_link(row: Mapping[str, Any], name: str, state: str, kind: str) -> str:
    """Show a number of a feature as a link to its tests in this state."""
    return page.filter_link(number(row[name], kind), feature=row["name"], state=state) if row[name] else ""


def _features(data: Mapping[str, Any]) -> str:
    def cells(row: Mapping[str, Any]) -> list[str]:
        kinds = {"ok": row["passed"], "bad": row["failed"], "warn": row["known_failures"] + row["known_defects"]}
        state = state_of_several({state: row[name] for state, name in COUNTED.items()})
        name = page.filter_link(f"<b>{escape(row['name'])}</b>", feature=row["name"])
        return [
            f"{mark(state)}<div class=what>{page.above(name, escape(row['about']))}</div>",
            page.parts(kinds | {"skip": row["skipped"] + row["not_run"]}),
            number(row["passed"]),
            _filter_link(row, "failed", "failed", "bad"),
            *([_filter_link(row, "known_failures", "known failure", "warn")] if listed else []),
            number(row["known_defects"], "warn"),
            number(row["skipped"]),
            _missing(row["missing"]),
        ]

    listed = any(row["known_failures"] for row in data["features"])  # most runs have no such list
    numbers = ["passed", "failed", *(["known failures"] if listed else []), "known defects", "skipped"]
    columns = [("feature", "f"), ("", "b"), *((title, "n") for title in numbers), ("what was missing", "m")]
    rows = []
    for group, its in itertools.groupby(data["features"], key=lambda row: row["group"]):
        rows += [Row([escape(group)]), *(Row(cells(row)) for row in its)]
    table = page.table(columns, rows, stack=True)
    known = "~ a test failed, as the list of known failures says; " if listed else ""
    words = (
        f"✓ every test had the expected outcome; ✗ a test failed; {known}- no test was executed. Tests that show "
        "a known defect of torch fail as expected, and are counted separately. A test may count for several features."
    )
    return f"<p class=dim>{words}</p>{table}" if table else ""


def _capabilities(data: Mapping[str, Any]) -> str:
    present = data["capabilities"]
    if present is None:
        return ""
    lines = [
        f"<li>{mark('passed' if name in present else 'skipped')}<code>{escape(name)}</code>"
        f"<span class=dim>{escape(CAPABILITIES.get(name, ''))}</span></li>"
        for name in dict.fromkeys([*sorted(CAPABILITIES, key=lambda name: name not in present), *present])
    ]
    device = page.text(" with ".join(filter(None, [data["device"], data["backend"]])))
    words = f"The capabilities that {device} has (✓) and lacks (-). Tests that need a missing one are skipped."
    return f"<p class=dim>{words}</p><ul class=has>{''.join(lines)}</ul>"


def defects_table(defects: Sequence[Mapping[str, Any]]) -> str:
    """Defects of torch, the worst first."""
    rows = []
    for defect in sorted(defects, key=lambda defect: (defect["severity"], defect["id"])):
        hrefs = map(escape, defect["upstream"])
        links = " ".join(f'<a href="{href}">#{href.rpartition("/")[2]}</a>' for href in hrefs)
        tests = [name.partition("::")[::2] for name in defect["tests"]]
        about = dict.fromkeys(name for test in tests for name in names_of_features(*test))
        names = page.folded(plural(len(tests), "test"), "<br>".join(map(page.code, defect["tests"])))
        name = page.above(page.prose(defect["title"]), f"{page.code(defect['id'])} {links}")
        rows.append(Row([name, escape(defect["consequence"]), names], page.item("known defect", about)))
    return page.table([("defect", ""), ("consequence", "c"), ("shown by", "c")], rows, stack=True)


# --- what went wrong --------------------------------------------------------------------------------------------------


def _failure(file: Mapping[str, Any], test: Mapping[str, Any]) -> str:
    """Show one test: its state and why, a row for each of its ranks, and all exceptions."""
    phase = " in a fixture" if test["phase"] == Phase.FIXTURE else ""
    head = f'<b class="bad">{escape(test["outcome"])}{phase}</b> {page.code(test["test"])}'
    ranks = [from_data(RankResult, rank) for rank in test["ranks"]]
    titles, *rows = rank_rows(ranks) or [()]
    columns = [(title, "n" if title in ("rank", "at") else "") for title in titles]
    table = page.table(columns, [[page.text(cell) for cell in row] for row in rows])
    story = clean(describe(ranks, test["text"]))
    repeat = f"<p class=dim>To repeat:</p>{page.command(test['repeat'])}" if test["repeat"] else ""
    rounds = f"<p>{page.text(test['rounds']['summary'])}</p>" if test.get("rounds") else ""
    inside = f"{rounds}<p>{page.text(test['reason'])}</p>{table}{page.pre(story) if story else ''}{repeat}"
    return page.folded(head, inside, is_open=True, attributes=_item(file, test))


def _ending(attempt: Mapping[str, Any]) -> str:
    return str(ProcessEnd(EndKind(attempt["ending"]["how"]), attempt["ending"]["detail"]))


def _failures(data: Mapping[str, Any]) -> str:
    parts = []
    for file in data["files"]:
        bad = [test for test in file["tests"] if State(test["outcome"]).is_bad]
        if not bad:
            continue
        last = file["attempts"][-1]
        attempts = f", {len(file['attempts'])} attempts" if len(file["attempts"]) > 1 else ""
        parts.append(f'<div {page.CONTAINER}="{escape(file["file"])}">')
        parts.append(f"<h3>{escape(_name(file))} <span class=dim>{escape(_ending(last))}{attempts}</span></h3>")
        on = machine.in_one_line(last["facts"].get("machine") or {})
        if on:
            parts.append(f"<p class='dim small'>on {page.text(on)}</p>")
        parts += [_failure(file, test) for test in bad]
        left = [test["test"] for test in file["tests"] if test["outcome"] == State.NOT_RUN]
        if left:
            parts.append(page.names("Not reached", left))
        parts.append(page.folded("full output of the file", page.pre(last["output"])))
        parts.append("</div>")
    return "".join(parts)


def _rounds(data: Mapping[str, Any]) -> str:
    """Show the tests that did not have the same outcome in all rounds, or that failed: in which rounds, and where."""
    rows = []
    for file, test in tests_in(data):
        record = test.get("rounds") or {"outcomes": {}, "failures": []}
        outcomes = {outcome: count for outcome, count in record["outcomes"].items() if outcome != State.NOT_RUN}
        if len(outcomes) < 2 and not record["failures"]:
            continue
        counts = ", ".join(f"{page.text(outcome)}: {count}" for outcome, count in outcomes.items())
        failures = ([number(f["round"]), page.text(_place(f)), page.text(f["reason"])] for f in record["failures"])
        table = page.table([("round", "n"), ("where", "c"), ("what happened first", "")], failures)
        rows.append(_row(file, test, counts, table))
    return page.table([("test", ""), ("rounds", "c"), ("failures", "")], rows, stack=True)


def _of_extensions(data: Mapping[str, Any]) -> list[Section]:
    """Show the tables that other extensions have of their parts of the data."""
    tables = [each for known in extension.found().values() for each in known.tables(data)]
    return [Section(each.title, _shown(each)) for each in tables]


def _shown(table: PageTable) -> str:
    kinds = ["n" if all(map(_NUMBER.fullmatch, cells)) else "" for cells in zip(*table.rows, strict=True)]
    cells = [[page.text(cell) for cell in row] for row in table.rows]
    listed = "".join(f"<li>{page.text(each)}</li>" for each in table.sentences)
    about = f"<p class=dim>{page.text(table.about)}</p>"
    return f"{about}{page.table(list(zip(table.titles, kinds)), cells)}{f'<ul>{listed}</ul>' if listed else ''}"


def _known_failures(data: Mapping[str, Any]) -> str:
    """Show the tests that failed and are listed as failing: the reason in the list, and how they failed."""
    listed = {entry["test"]: entry["listed"] for entry in data["known_failures"]}
    rows = [
        _row(file, test, page.text(listed.get(f"{file['file']}::{test['test']}", "")), page.text(test["reason"]))
        for file, test in tests_in(data)
        if test["outcome"] == State.KNOWN_FAILURE
    ]
    return page.table([("test", ""), ("listed as", ""), ("how it failed", "")], rows, stack=True)


def _flaky(data: Mapping[str, Any]) -> str:
    parts = []
    for file in data["files"]:
        names = [test["test"] for test in file["tests"] if test["flaky"]]
        if not names and (file["failed"] or len(file["attempts"]) == 1):
            continue
        first = file["attempts"][0]
        parts.append(f"<h3>{escape(_name(file))} <span class=dim>{len(file['attempts'])} attempts</span></h3>")
        if names:
            parts.append(page.names("Passed only when run again", names))
        parts.append(page.folded(f"output of the first attempt ({escape(_ending(first))})", page.pre(first["output"])))
    return "".join(parts)


def _skips(data: Mapping[str, Any]) -> str:
    kinds = [kind.value for kind in SkipKind]
    rows = [
        [number(item["tests"]), number(item["subtests"]), page.text(item["kind"]), page.text(item["reason"])]
        for item in sorted(data["skips"], key=lambda item: kinds.index(item["kind"]))
    ]
    return page.table([("tests", "n"), ("subtests", "n"), ("missing", "c"), ("reason", "")], rows)


def _notes(data: Mapping[str, Any]) -> str:
    """Show what does not change the verdict: leaks, stale entries of lists, and what is unusual about torch."""
    notes = [(_name(file), note) for file in data["files"] for a in file["attempts"] for note in a["notes"]]
    notes += [(f"{_name(file)}::{test['test']}", note) for file, test in tests_in(data) for note in test["notes"]]
    notes += [("lists", remark) for remark in data["list_remarks"]]
    notes += [("torch", difference) for difference in data["unlike_release"]]
    rows = [[page.code(about), page.text(note)] for about, note in dict.fromkeys(notes)]
    return page.table([("about", ""), ("note", "")], rows, stack=True)


# --- where the time went, and every test ------------------------------------------------------------------------------


def _spread(test: Mapping[str, Any]) -> str:
    """Show the seconds of a test, and over several rounds between which seconds half of them took."""
    spread = (test.get("rounds") or {}).get("seconds")
    took = seconds(test["seconds"])
    return page.above(took, f"{seconds(spread['low'])} to {seconds(spread['high'])}") if spread else took


def _slowest(data: Mapping[str, Any]) -> str:
    slowest = sorted(tests_in(data), key=lambda item: -item[1]["seconds"])[:_SLOWEST]
    rows = []
    for file, test in slowest:
        if test["seconds"] > 0:
            numbers = number(test["subtests"]), number(test["world_size"] or 0)
            rows.append(_row(file, test, *numbers, _spread(test), page.bar(test["seconds"], slowest[0][1]["seconds"])))
    return page.table([("test", ""), ("subtests", "n wide"), ("ranks", "n wide"), ("time", "n"), ("", "b")], rows)


def _test(file: Mapping[str, Any], test: Mapping[str, Any]) -> str:
    """Show one line of the list of all tests."""
    details = [plural(test["subtests"], "subtest")] if test["subtests"] else []
    if test["world_size"]:
        details.append(plural(test["world_size"], "rank"))
    why = f"<span class=why>{page.text(test['reason'])}</span>" if test["reason"] else ""
    shown_details = f"<span class='dim small'>{', '.join(details)}</span>" if details else ""
    return (
        f"<li {_item(file, test, is_test=True)}>{mark(state_of(test))}<span class=what>{page.code(test['test'])} "
        f"{shown_details}{why}</span><span class=time>{seconds(test['seconds'])}</span></li>"
    )


def _tests(data: Mapping[str, Any]) -> str:
    """List every test, file by file."""
    parts = []
    for file in data["files"]:
        count = collections.Counter(map(state_of, file["tests"]))
        took = sum(attempt["ended"] - attempt["began"] for attempt in file["attempts"])
        expected = f' title="{seconds(file["estimate"])} expected"' if file["estimate"] is not None else ""
        amounts = [
            (number(count["failed"], "bad"), "failed"),
            (number(count["known failure"], "warn"), "known to fail"),
            (number(count["known defect"], "warn"), "known defects"),
            (number(count["skipped"] + count["not run"]), "skipped"),
        ]
        figures = "".join(f'<span class="n wide small">{amount} {what}</span>' for amount, what in amounts if amount)
        head = (
            f"{mark(_state_of_file(file))}<span class=what>{page.code(_name(file))}</span>{figures}"
            f'<span class="n small">{plural(len(_tests_of(file)), "test")}</span>'
            f'<span class="n dim small"{expected}>{seconds(took)}</span>'
        )
        lines = "".join(_test(file, test) for test in file["tests"])
        about = f'class=file {page.CONTAINER}="{escape(file["file"])}"'
        parts.append(page.folded(head, f"<ul class=tests>{lines}</ul>", attributes=about))
    return "".join(parts)


def render(data: Mapping[str, Any]) -> str:
    """Render the page of a run, from its ``report.json``."""
    present = counts(data)
    filters = page.filters([state for state in STATES if present[state]], [row["name"] for row in data["features"]])
    parts = [
        Section("Features", _features(data)),
        Section("Capabilities", _capabilities(data)),
        Section("Models", models_table.html(models_table.of_run(tests_in(data)))),
        Section("Fixed defects", defects_table(data["fixed_defects"]), has_items=True),
        Section("Failures", _failures(data), present["failed"], has_items=True),
        *_of_extensions(data),
        Section("Rounds", _rounds(data), has_items=True),
        Section("Known failures", _known_failures(data), present["known failure"], has_items=True),
        Section("Flaky", _flaky(data)),
        Section("Known defects", defects_table(data["known_defects"]), len(data["known_defects"]), has_items=True),
        Section("Skipped, by reason", _skips(data)),
        Section("Notes", _notes(data)),
        Section("Slowest tests", _slowest(data), has_items=True),
        Section("Tests", _tests(data), sum(len(_tests_of(file)) for file in data["files"]), has_items=True),
    ]
    return page.document(f"{title(data)}: {verdict(data)[0]}", [_head(data), page.sections(parts, filters)])
