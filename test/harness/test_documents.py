"""The documents: their links are valid, and README stays short."""

import re
import runpy
import tempfile
import unittest
from pathlib import Path

from torch_fsdp_tests import settings
from torch_fsdp_tests.common_utils import TestCase, run_tests

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LONGEST_README = 130  # lines


def pages() -> list[Path]:
    """Every document of the project."""
    return [*ROOT.glob("*.md"), *ROOT.glob("test/**/*.md"), *ROOT.glob("torch_fsdp_tests/**/*.md")]


def prose(page: Path) -> str:
    """The text of a page without its code blocks."""
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def links_of(page: Path) -> list[str]:
    return LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """The link targets after ``#``: headings in lower case, with hyphens for spaces, without punctuation."""
    headings = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path) -> list[str]:
    """The relative links of a page without an existing file or heading."""
    dead = []
    for link in links_of(page):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            dead.append(link)
    return dead


@unittest.skipUnless((ROOT / "CONTRIBUTING.md").exists(), "needs the documents of a checkout")
class TestDocuments(TestCase):
    """Without it, a reader could meet a dead link, or never find a document."""

    def test_every_link_leads_somewhere(self):
        found = {str(page.relative_to(ROOT)): dead_links(page) for page in pages()}
        self.assertIn("README.md", found)
        self.assertEqual({page: links for page, links in found.items() if links}, {})

    def test_every_document_can_be_reached_from_readme(self):
        reached, new = set(), {ROOT / "README.md"}
        while new:
            reached |= new
            links = {(page.parent / link.partition("#")[0]).resolve() for page in new for link in links_of(page)}
            new = {link for link in links if link.suffix == ".md" and link.exists()} - reached
        self.assertEqual({str(page.relative_to(ROOT)) for page in set(pages()) - reached}, set())

    def test_readme_is_short(self):
        lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
        self.assertLessEqual(len(lines), LONGEST_README)

    def test_figures_have_their_marks(self):
        """The command that makes the figures refuses a page without the marks."""
        figures = runpy.run_path(str(ROOT / ".ci" / "figures.py"))
        for page in ("README.md", "test/README.md"):
            text = (ROOT / page).read_text(encoding="utf-8")
            self.assertEqual([text.count(mark) for mark in (figures["BEGIN"], figures["END"])], [1, 1], page)

    def test_dead_links_are_found(self):
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "page.md"
            page.write_text(
                "# One & Two\n[a](#one--two) [b](#three) [c](none.md) [d](page.md#one--two) [e](https://x.y)\n"
            )
            self.assertEqual(dead_links(page), ["#three", "none.md"])


class TestVariables(TestCase):
    """Without it, a variable that changes how tests run could be documented nowhere."""

    def test_each_variable_without_an_option_is_documented(self):
        documented = "".join(page.read_text(encoding="utf-8") for page in pages())
        own = [each for each in settings.VARIABLES if not each.option and not each.is_upstreams]
        self.assertEqual([each.name for each in own if f"`{each.name}" not in documented], [])

    def test_no_variable_is_outside_of_the_table(self):
        """The other names that begin like the suite's are those that its processes exchange."""
        found = set()
        for path in (ROOT / "torch_fsdp_tests").rglob("*.py"):
            found |= set(re.findall(r"\"(TORCH_FSDP_TESTS_[A-Z_]+)\"", path.read_text(encoding="utf-8")))
        between_processes = {"EVENTS", "FIXES", "MUTANT", "MUTANT_REACHED", "LAUNCH_SETTINGS"}
        known = {each.name for each in settings.VARIABLES}
        self.assertEqual(found - known, {f"TORCH_FSDP_TESTS_{name}" for name in between_processes})


if __name__ == "__main__":
    run_tests()
