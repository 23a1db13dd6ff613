"""The pages of results: their contents, and how they look and filter in Chromium, if it is installed."""

import functools
import html
import itertools
import json
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "dispatch"))

from little_results import a_file, a_report, a_test, report_of
from trees import Balanced, TreeCase, body, fits, schema

from torch_fsdp_tests import extension
from torch_fsdp_tests.defects.command import versions_page
from torch_fsdp_tests.dispatch import page as page_parts
from torch_fsdp_tests.extensions.html import html_report
from torch_fsdp_tests.verdict import RankResult, State

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars"),
)
LIMIT = 120  # seconds for one start of Chromium on a busy machine
PROBE = Path(__file__).parent / "inputs" / "probe.html"  # inspects pages in frames; its title has the results as JSON
LONG = "x" * 300  # without a place for a line break


@functools.cache
def varied() -> dict[str, Any]:
    """A report with a test of each kind, and with words that are too long for a line."""
    ranks = [
        RankResult(0, State.PASSED, reported="passed", at=1.0, host="host-a"),
        RankResult(1, State.CRASHED, signal="SIGKILL", text=f"stack {LONG}", at=2.5, host=f"host-b-{LONG}"),
    ]
    crashed = {"ranks": [rank.to_json() for rank in ranks], "reason": f"rank 1 died {LONG}", "repeat": f"python {LONG}"}
    failed = {"reason": "AssertionError: 1 != 2", "text": f"Traceback <b>&{LONG}", "repeat": "python run_test.py -i it"}
    hybrid = a_file(
        "distributed/fsdp/test_fsdp_hybrid_shard",
        a_test("TestHybrid.test_crashes", State.CRASHED, **crashed),
        a_test("TestHybrid.test_passes", subtests_skipped={"needs streams": 2}, subtests=3),
        a_test(f"TestHybrid.test_{LONG}", State.FAILED, **failed),
    )
    offload = a_file(
        "distributed/_composable/fsdp/test_fully_shard_memory",
        a_test("TestOffload.test_cpu_offload", State.SKIPPED, reason=f"needs graphs {LONG}"),
        a_test("TestOffload.test_defect", State.KNOWN_DEFECT),
        a_test("TestOffload.test_flaky", flaky=True, notes=[f"left a file {LONG}"]),
        a_test("TestOffload.test_later", State.NOT_RUN, reason="not run: the process was stopped before it"),
    )
    defect = {"id": "fsdp2_defect", "title": f"A ``call`` {LONG}", "consequence": "cost", "severity": 5}
    defect["tests"] = ["distributed/_composable/fsdp/test_fully_shard_memory::TestOffload.test_defect"]
    defect["upstream"] = ["https://github.com/pytorch/pytorch/issues/1"]
    worse = defect | {"id": "fsdp2_worse", "title": "Data are lost", "consequence": "lost data", "severity": 1}
    skips = [{"kind": "device", "reason": f"needs graphs {LONG}", "tests": 1, "subtests": 0}]
    more = {"known_defects": [defect, worse], "skips": skips, "list_remarks": [f"a remark {LONG}"]}
    return a_report(hybrid, offload, selection=f"-i {LONG}", **more)


@functools.cache
def pages() -> dict[str, str]:
    return {"report": html_report.render(varied()), "defects": versions_page.render()}


class TestCommand(TreeCase):
    """Without it, ``--report`` could write no page, or that of another run."""

    def test_page_of_a_run(self):
        test = body("self.fail()", "self.skipTest('lately')")
        for _ in range(2):
            self.check({"test_x": test}, ["--report", self.root / "r", "--keep-going"], failed=1, skipped=1)
        page = (self.root / "r" / "report.html").read_text()
        for words in ("AssertionError: None", "lately", "Slowest tests", "To repeat:"):
            self.assertIn(words, page)
        self.assertTrue((self.root / "r" / "report.previous.html").exists())


class TestContent(unittest.TestCase):
    """Without it, a page could say something else than report.json, or load something from elsewhere."""

    def test_pages_are_complete_and_load_nothing(self):
        fits(self, varied(), schema("report"))
        for name, page in pages().items():
            with self.subTest(name):
                Balanced(self).feed(page)
                self.assertNotRegex(page, r"<link|<[^>]* src=|@import|url\(|<iframe|<img")
                self.assertRegex(page, r"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-[^']{44}'")
                self.assertEqual(page.count("<script"), 1)
                self.assertIn("<div class=filter role=search data-things=", page)
                hidden = re.findall(r"<[^>]* hidden[ >]", page)
                self.assertEqual(len(hidden), 2, "without scripts everything except the filter is visible")

    def test_page_names_what_was_tested_and_the_results(self):
        page = pages()["report"]
        for words in (
            "FSDP of torch 2.13.0 on cpu: <span class=bad>failed</span>",
            *("2 of the 5 tests that ran failed, in 1 file.", "1 test showed 2 known defects, as expected."),
            *("1 test passed only when run again.", "1 test was skipped; its reason is given below."),
            "1 test did not run, because the file or the run ended first.",
            *("0.1.0 (abc1234)", "machine-1", "2026-01-02 03:04:05 UTC", "2, 4 by default"),
            *("<dt>CPU</dt><dd>Abacus 9</dd>", "<dt>free memory</dt><dd>5.5 GiB</dd>"),
            *("Traceback &lt;b&gt;&amp;xxx", "A <code>call</code>"),
            "was killed by SIGKILL (out of memory?) before reporting anything",
        ):
            self.assertTrue(words in page, words)
        self.assertEqual(re.findall(r'mark ok" title="passed">✓</span><code>(\w+)', page), ["fork"])
        self.assertIn('title="skipped">-</span><code>streams', page)
        self.assertLess(page.index("fsdp2_worse"), page.index("fsdp2_defect"), "the worst first")

    def test_features_are_counted(self):
        """The table has the numbers of tests that passed, failed, showed a defect, or skipped, and why they skipped."""
        page = pages()["report"]
        expected = {"Hybrid sharding": ["1", "2", "", ""], "Memory": ["1", "", "1", "1"]}
        for name, counts in expected.items():
            row = re.search(rf"<tr><td class=\"f\">(?:(?!</tr>).)*<b>{name}</b>.*?</tr>", page)
            cells = re.findall(r'<td class="n"[^>]*>(.*?)</td>', row[0]) if row else None
            self.assertEqual([re.sub("<[^>]*>", "", cell) for cell in cells or ()], counts)
        self.assertIn("needs streams <span class=dim>(2 subtests)</span>", page)

    def test_sentences_about_the_results_of_a_run(self):
        one, two = a_test("T.test_1"), a_test("T.test_2")
        skip, defect = a_test("T.test_2", State.SKIPPED), a_test("T.t", State.KNOWN_DEFECT)
        skipped = "The test that ran passed. 1 test was skipped; its reason is given below."
        for data, words in (
            (report_of(one, two), "All 2 tests passed."),
            (report_of(one, skip), skipped),
            (report_of(one, two, defect), "All 2 tests that should pass passed. 1 test showed "),
            (a_report(exit_code=5), "No test was executed, so this run proves nothing."),
            (a_report(exit_code=130), ": <span class=bad>interrupted</span>"),
            (a_report(torch=None), "FSDP of an unknown torch on "),
            (a_report(exit_code=143), ": <span class=bad>terminated</span>"),
            (a_report(exit_code=3), ": <span class=bad>incomplete</span>"),
            (a_report(exit_code=9), ": <span class=bad>exit status 9</span>"),
            (a_report(exit_code=4), ": <span class=bad>failed on one host</span>"),
            (a_report(device="abacus", device_count=8), "8 abacus devices"),
        ):
            with self.subTest(words):
                self.assertTrue(words in html_report.render(data))

    def test_tables_of_other_extensions(self):
        class Extending(extension.Extension):
            def tables(self, data: Mapping[str, Any]) -> Sequence[extension.PageTable]:
                rows = [("<a>", "1", "50%"), ("b", "", "ok")]
                return [extension.PageTable("Beads", f"of {data['host']}", ("bead", "n", "share"), rows, ["b & c"])]

        with unittest.mock.patch.object(extension, "found", lambda: {"beads": Extending()}):
            page = html_report.render(a_report())
        for words in (
            "Beads",
            "of machine-1",
            '<th class="n">n</th>',
            '<th class="">share</th>',
            "&lt;a&gt;",
            "<li>b &amp; c",
        ):
            self.assertIn(words, page)

    def test_a_fixture_is_no_test(self):
        fixture = a_test("T.tearDownClass", State.ERROR) | {"scope": "class"}
        file = a_file("test_x", a_test("T.test_1"), a_test("T.test_2"), fixture)
        page = html_report.render(a_report(file))
        outside = "1 failure happened outside of tests: in a fixture, or in a file that could not run."
        counts = ('<span class="n small">2 tests</span>', "Tests<span class=count> 2</span>")
        for words in (f"{outside} All 2 tests passed.", *counts):
            self.assertIn(words, page)
        file["tests"].append(a_test("T.test_3", State.FAILED))
        page = html_report.render(a_report(file))
        self.assertIn("1 of the 3 tests that ran failed, in 1 file. 1 failure happened outside", page)

    def test_a_known_failure_is_not_shown_as_passed(self):
        known = a_test("T.test_cpu_offload", State.KNOWN_FAILURE, reason="RuntimeError: no such kernel")
        listed = [{"test": "distributed/fsdp/test_x::T.test_cpu_offload", "listed": "the driver lacks it"}]
        data = a_report(a_file("distributed/fsdp/test_x", a_test("T.test_passes"), known), known_failures=listed)
        fits(self, data, schema("report"))
        page = html_report.render(data)
        text = " ".join(html.unescape(re.sub("<[^>]+>", " ", page)).split())
        summary = "The test that should pass passed. 1 test failed, as the list of known failures says."
        details = ("1 known to fail", "the driver lacks it", "RuntimeError: no such kernel")
        for words in ("passed with 1 known failure", summary, *details):
            self.assertIn(words, text)
        self.assertNotIn("All 2 tests", page)
        self.assertRegex(page, r'title="known failure">~</span><span class=what><code>T.test_cpu_offload')
        self.assertRegex(page, r'title="known failure">~</span><div class=what>.*?<b>FSDP1</b>')
        self.assertEqual(re.findall(r'title="passed">✓</span><span class=what><code>([^<]+)', page), ["T.test_passes"])

    def test_a_long_output_is_cut_from_the_front(self):
        output = "first line\n" + "y" * 50_000 + "\nlast line"
        file = a_file("test_x", a_test("T.test_1", State.FAILED))
        file["attempts"][0]["output"] = output
        page = html_report.render(a_report(file))
        self.assertNotIn("first line", page)
        self.assertIn("\nlast line</pre>", page)
        self.assertIn("The last 20,000 of 50,021 characters; the JSON file has all.", page)

    def test_a_large_run_is_a_small_page(self):
        """2,500 tests with names of the usual length."""
        name, file = "TestFullyShardTrainingCore.test_train_parity_multi_group_cpu_offload_", "test_fully_shard_number_"
        tests = [a_test(f"{name}{number}") for number in range(25)]
        files = [a_file(f"distributed/_composable/fsdp/{file}{number}", *tests) for number in range(100)]
        self.assertLess(len(html_report.render(a_report(*files)).encode()), 1_500_000)

    def test_colors_are_set_for_light_dark_and_paper(self):
        text = Path(page_parts.__file__).parent.joinpath("data/page.css").read_text()
        light, dark, paper = (set(re.findall(r"(--\w+):", part)) for part in re.findall(r":root \{(.*?)\}", text, re.S))
        self.assertEqual((dark, paper), (light, light))
        self.assertLessEqual(set(re.findall(r"var\((--\w+)\)", text)), light)


@unittest.skipIf(CHROMIUM is None, f"needs Chromium: none of {', '.join(NAMES)} is on PATH")
class TestInChromium(unittest.TestCase):
    """Without it, pages could be wider than a phone, and their filter could show other tests than it says."""

    def dump(self, text: str, address: str = "") -> str:
        """The document after the page was loaded and its timers ran."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            path = Path(folder, "page.html")
            path.write_text(text, encoding="utf-8")
            options = [f"--user-data-dir={folder}/user", "--window-size=1400,900", "--virtual-time-budget=20000"]
            command = [str(CHROMIUM), *QUIET, *options, "--dump-dom", f"{path.as_uri()}{address}"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
            self.assertEqual(done.returncode, 0, done.stderr)
            return done.stdout

    def look(self, asked: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """What the probe's script sees on pages in frames of these widths. A window cannot be as narrow as a phone."""
        data = json.dumps(asked).replace("</", "<\\/")
        title = re.search("<title>(.*?)</title>", self.dump(PROBE.read_text().replace("ASKED", data)), re.S)
        results = json.loads(html.unescape(title[1])) if title else None
        self.assertIsInstance(results, list)
        return results or []

    def test_nothing_is_wider_than_the_page_and_words_stay_whole(self):
        cases = list(itertools.product(pages(), (1300, 400)))
        asked: list[dict[str, Any]] = [{"page": pages()[name], "width": width, "wanted": []} for name, width in cases]
        for (name, width), actual in zip(cases, self.look(asked), strict=True):
            with self.subTest(page=name, width=width):
                seen = [actual[what] for what in ("width", "scrolls", "wide", "filter", "broken")]
                self.assertEqual(seen, [width, width, [], True, []])

    def test_filter(self):
        crash, long = "TestHybrid.test_crashes", f"TestHybrid.test_{LONG}"[:40]
        cases: list[tuple[dict[str, str], list[str]]] = [
            ({"find": "hybrid PASSES"}, ["TestHybrid.test_passes"]),
            ({"state": "failed"}, [crash, long]),
            ({"state": "flaky"}, ["TestOffload.test_flaky"]),
            ({"feature": "Memory", "find": "graphs"}, ["TestOffload.test_cpu_offload"]),
            ({"feature": "Memory", "state": "failed"}, []),
            ({"find": "test_fsdp_hybrid_shard"}, [crash, "TestHybrid.test_passes", long]),
        ]
        expected = [what for what, _ in cases]
        (actual,) = self.look([{"page": pages()["report"], "width": 1300, "wanted": expected}])
        for (what, tests), seen in zip(cases, actual["filter_link"], strict=True):
            with self.subTest(what):
                self.assertEqual(seen["shown"], tests)
                self.assertEqual(seen["says"], f"{len(tests)} of 7 tests")
                self.assertEqual("tests" in seen["sections"], bool(tests))
                self.assertEqual("failures" in seen["sections"], crash in tests)
                self.assertIn("features", seen["sections"])
        self.assertEqual(actual["cleared"], "7 tests")

    def test_address_of_a_defect_opens_it(self):
        page = self.dump(pages()["defects"], "#fsdp2_divides_twice")
        self.assertEqual(re.findall(r'<details[^>]* id="(\w+)"[^>]* open', page), ["fsdp2_divides_twice"])

    def test_address_of_the_report_selects_tests(self):
        """The page's own content policy allows its script, and the table of features has links to such addresses."""
        page = self.dump(pages()["report"], "#feature=Hybrid+sharding&state=failed")
        self.assertIn(">2 of 7 tests</output>", page)
        self.assertIn('<a href="#feature=Hybrid+sharding&amp;state=failed">', page)
        self.assertIn(">7 tests</output>", self.dump(pages()["report"], "#features"))


if __name__ == "__main__":
    unittest.main()
