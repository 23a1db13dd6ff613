"""The documents: their commands work, their links are valid, and the first page is short."""

import ast
import concurrent.futures
import dataclasses
import doctest
import functools
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from pathlib import Path

import torch
from runs import INPUTS, ROOT

from torch_fsdp_tests import extension, installation, settings
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.verdict import State

MARK = re.compile(r"<!-- (executed|parsed|not executed: .+) -->")
SPAN = re.compile(r"`([^`]+)`")
COMMANDS = ("sh", "console")  # the languages of blocks with commands
PROGRAMS = ("python", "torchrun", "srun", "run_test.py", installation.COMMAND, "pip")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
LONGEST_README = 110  # lines
OUTPUT_OF = "2.13."  # the version of torch whose output the documents show
LIMIT = 300  # seconds for an executed block
LANGUAGES = (*COMMANDS, "text", "python", "json", "toml")
FOREIGN = {"-e", "-p1"}  # options of other programs


@dataclasses.dataclass(frozen=True)
class Block:
    """A fenced block, or a paragraph, which has no language."""

    mark: str  # as in the document, or an empty string
    language: str | None
    text: str

    @property
    def is_checked(self) -> bool:
        return not self.mark.startswith("not executed")

    def commands(self) -> list[str]:
        """The commands of a fenced block, each in one line."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            return [line[2:] for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip()]

    def spans(self) -> list[str]:
        """The texts in backticks of a paragraph."""
        return [span.replace("\\|", "|") for span in SPAN.findall(self.text)]


def documents() -> list[Path]:
    """Every document of the project."""
    folders = ("docs", "test", installation.PACKAGE.name)
    return [*ROOT.glob("*.md"), *(path for folder in folders for path in sorted((ROOT / folder).rglob("*.md")))]


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a document. A mark counts for the block that follows it."""
    mark, lines = "", iter(text.splitlines())
    paragraph: list[str] = []
    for line in lines:
        fence = re.fullmatch(r"( *)```(\w*)", line)
        found = MARK.fullmatch(line.strip())
        if fence or found or not line.strip():
            if paragraph:
                yield Block(mark, None, "\n".join(paragraph))
                mark, paragraph = "", []
            if found:
                mark = found[1]
        if fence:
            inside = []
            for code in lines:
                if code.strip() == "```":
                    break
                inside.append(code.removeprefix(fence[1]))
            yield Block(mark, fence[2], "\n".join(inside))
            mark = ""
        elif line.strip() and not found:
            paragraph.append(line)
    if paragraph:
        yield Block(mark, None, "\n".join(paragraph))


def simple_commands(line: str) -> list[list[str]]:
    """The programs of a command line, each with its arguments, without pipes and redirections."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    found: list[list[str]] = [[]]
    skip = False
    for word in words:
        if skip:
            skip = False
        elif re.fullmatch(r"[|&;]+", word):
            found.append([])
        elif re.fullmatch(r"[<>&]+", word):
            skip = True
            if found[-1] and found[-1][-1].isdigit() and word != "<":
                found[-1].pop()  # the descriptor of 2>&1
        else:
            found[-1].append(word)
    return [command for command in found if command]


def is_command(span: str) -> bool:
    """Whether a text in backticks is a command, and not a name or an option."""
    words = [word for word in span.split() if not re.fullmatch(r"[A-Z_]+=.*", word)]
    return bool(words) and (words[0].startswith(".ci/") or (len(words) > 1 and words[0] in PROGRAMS) or "| " in span)


def read(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def all_blocks() -> Iterator[tuple[str, Block]]:
    return ((name(page), block) for page in documents() for block in blocks(read(page)))


@functools.cache
def parsed(lines: tuple[str, ...]) -> tuple[dict[str, str], set[str]]:
    """The command lines that the parsers of their programs reject, each with the reason, and all known options."""
    commands = [(line, words) for line in lines for words in simple_commands(line)]
    command = [sys.executable, str(INPUTS / "parse_commands.py")]
    given = json.dumps([words for _, words in commands])
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=ROOT, timeout=LIMIT)
    if done.returncode:
        raise RuntimeError(done.stderr)
    answer = json.loads(done.stdout.splitlines()[-1])
    problems = {line: why for (line, _), why in zip(commands, answer["problems"]) if why}
    return problems, set(answer["options"])


def commands_of(block: Block) -> list[str]:
    """The commands of a block that can be parsed: those of a fence, or those in the backticks of a paragraph."""
    if not block.is_checked:
        return []
    if block.language is None:
        return [span for span in block.spans() if is_command(span)]
    return block.commands() if block.language in COMMANDS else []


def executed(command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    program = ["bash", "-e", "-o", "pipefail", "-c", command]
    return subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)


def anchors(page: Path) -> set[str]:
    """The link targets after ``#``: headings in lower case, with hyphens for spaces, without punctuation."""
    headings = [line for block in blocks(read(page)) if block.language is None for line in block.text.splitlines()]
    found = (re.fullmatch(r"#+ (.*)", line) for line in headings)
    return {re.sub(r"[^\w\- ]", "", heading[1].lower()).replace(" ", "-") for heading in found if heading}


def links_of(page: Path) -> list[str]:
    return [link for block in blocks(read(page)) if block.language is None for link in LINK.findall(block.text)]


def dead_links(page: Path) -> list[str]:
    """The relative links of a page whose file or heading does not exist."""
    dead = []
    for link in links_of(page):
        file, _, anchor = link.partition("#")
        target = page.parent / file if file else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target))):
            dead.append(link)
    return dead


@functools.cache
def known_names() -> frozenset[str]:
    """The words of code, of data files, and of the samples in documents, and the names of these files."""
    files = [*ROOT.glob(".ci/*"), *ROOT.glob("*.py"), *ROOT.glob("*.toml")]
    files += [file for folder in ("test", "torch_fsdp_tests") for file in (ROOT / folder).glob("**/*.*")]
    texts = [read(file) for file in files if file.suffix in ("", ".py", ".toml", ".json", ".txt") and file.is_file()]
    samples = [block.text for _, block in all_blocks() if block.language is not None]
    words = {word for text in texts + samples for word in re.findall(r"\w+", text)}
    return frozenset(words | {file.stem for file in files})


def unknown_names(text: str) -> list[str]:
    """The names with an underscore in backticks that are not known. A name that ends in one is a prefix."""
    spans = [span for block in blocks(text) if block.language is None for span in block.spans()]
    names = [name for span in spans for name in re.findall(r"(?<![\w-])\w*_\w+(?![\w-])", span)]
    return [name for name in names if name not in known_names()]


@unittest.skipUnless((ROOT / "CONTRIBUTING.md").exists(), "needs the documents of a checkout")
class TestDocuments(TestCase):
    """Without it, a document could have dead links or wrong names, or no link to it."""

    def test_every_link_leads_somewhere(self):
        found = {name(page): dead_links(page) for page in documents()}
        self.assertIn("README.md", found)
        self.assertEqual({page: links for page, links in found.items() if links}, {})

    def test_every_document_can_be_reached_from_readme(self):
        reached, new = set(), {ROOT / "README.md"}
        while new:
            reached |= new
            links = {(page.parent / link.partition("#")[0]).resolve() for page in new for link in links_of(page)}
            new = {link for link in links if link.suffix == ".md" and link.exists()} - reached
        self.assertEqual({name(page) for page in set(documents()) - reached}, set())

    def test_readme_is_short(self):
        self.assertLessEqual(len(read(ROOT / "README.md").splitlines()), LONGEST_README)

    def test_generated_parts_have_their_marks(self):
        """The commands that make them reject a page without the marks."""
        figures, gpu = (runpy.run_path(str(ROOT / ".ci" / script)) for script in ("figures.py", "gpu"))
        for page, made in (("README.md", figures), ("docs/benchmarks.md", figures), ("docs/benchmarks.md", gpu)):
            text = read(ROOT / page)
            self.assertEqual([text.count(made[mark]) for mark in ("BEGIN", "END")], [1, 1], page)

    def test_names_in_documents_exist(self):
        self.assertEqual({name(page): found for page in documents() if (found := unknown_names(read(page)))}, {})
        absent = "_a_name" + "_that_is_gone"
        self.assertEqual(unknown_names(f"Call `judge(x)`, `fsdp2_` and `{absent}` of `known_names`."), [absent])

    def test_every_outcome_and_exit_status_is_explained(self):
        page = read(ROOT / "docs" / "reading-a-report.md")
        good = State.PASSED, State.EXPECTED_FAILURE, State.SKIPPED
        outcomes = set(State) - {*good, State.STILL_RUNNING}  # the last one is never that of a test
        self.assertEqual([state.value for state in outcomes if f"\n| {state.value} |" not in page], [])
        page = read(ROOT / "docs" / "running.md")
        rows = re.findall(r"^\| (\d+(?:, \d+)*) \|", page.partition("\n## Exit statuses\n")[2], re.MULTILINE)
        self.assertEqual(sorted(int(number) for row in rows for number in row.split(",")), sorted(ExitStatus))

    def test_dead_links_are_found(self):
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "page.md"
            links = "[a](#one--two) [b](#three) [c](none.md) [d](page.md#one--two) [e](https://x.y)"
            page.write_text(f"# One & Two\n{links}\n")
            self.assertEqual(dead_links(page), ["#three", "none.md"])


@unittest.skipUnless((ROOT / "CONTRIBUTING.md").exists(), "needs the documents of a checkout")
class TestCommands(TestCase):
    """Without it, a document could show a command, an option or a path that no longer exists."""

    def test_every_block_with_commands_says_how_it_is_checked(self):
        for page, block in all_blocks():
            if block.language is not None:
                self.assertIn(block.language, LANGUAGES, f"{page}: {block.text}")
                self.assertTrue(block.mark or block.language not in COMMANDS, f"{page} has no mark above {block.text}")

    def test_every_command_is_parsed(self):
        lines = {line: page for page, block in all_blocks() for line in commands_of(block)}
        self.assertGreater(len(lines), 40)
        problems, _ = parsed(tuple(lines))
        self.assertEqual({f"{lines[line]}: {line}": why for line, why in problems.items()}, {})

    def test_every_option_exists(self):
        _, options = parsed(tuple({line: page for page, block in all_blocks() for line in commands_of(block)}))
        spans = [(page, span) for page, block in all_blocks() if block.is_checked for span in block.spans()]
        unknown = {
            (page, word)
            for page, span in spans
            if span.startswith("-") and not is_command(span)
            for word in re.findall(r"(?<![\w-])--?[a-z][\w-]*", span)
            if word not in options | FOREIGN
        }
        self.assertEqual(unknown, set())

    def test_every_path_exists(self):
        spans = [(page, span) for page, block in all_blocks() if block.is_checked for span in block.spans()]
        paths = [(page, span) for page, span in spans if re.fullmatch(r"(test|torch_fsdp_tests|docs)/[\w./-]+", span)]
        self.assertGreater(len(paths), 20)
        made_names = re.compile(r"/(ID|[A-Z]+)\b")
        missing = {(page, path) for page, path in paths if not (ROOT / path).exists() and not made_names.search(path)}
        self.assertEqual(missing, set())

    def test_executed_commands(self):
        marked = [block for _, block in all_blocks() if block.mark == "executed" and block.language in COMMANDS]
        actual = {command: block for block in marked for command in block.commands()}
        self.assertGreater(len(actual), 2)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            all_done = [*pool.map(executed, actual)]
        for (command, block), done in zip(actual.items(), all_done):
            with self.subTest(command):
                self.assertEqual(done.returncode, 0, done.stderr)
                if block.language == "console" and torch.__version__.startswith(OUTPUT_OF):
                    expected = block.text.partition("\n")[2]
                    fits = doctest.OutputChecker().check_output(f"{expected}\n", done.stdout, doctest.ELLIPSIS)
                    self.assertTrue(fits, f"the document shows\n{expected}\nbut this was printed:\n{done.stdout}")

    def test_examples(self):
        """The marked example passes as a test file, and that of a model its check. Others are valid Python or JSON."""
        found = [(page, block) for page, block in all_blocks() if block.language in ("python", "json")]
        for _, block in found:
            ast.parse(block.text) if block.language == "python" else json.loads(block.text)
        marked = {page: block.text for page, block in found if block.mark == "executed"}
        model = marked.pop("docs/models.md")
        (example,) = marked.values()
        check = "python -m torch_fsdp_tests.check mymodule:factory"
        self.assertIn(check, read(ROOT / "docs" / "models.md"))
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "test_example.py").write_text(example)
            (Path(folder) / "mymodule.py").write_text(model)
            done = executed(f"python run_test.py --test-directory {folder}")
            checked = executed(f"{check.replace('mymodule', f'{folder}/mymodule.py')} --only fsdp2_clip,fsdp1_eval")
        self.assertIn("1 passed, 0 failed, 0 skipped", done.stdout, done.stderr)
        self.assertEqual(checked.returncode, 0, checked.stdout)

    def test_wrong_commands_are_found(self):
        wrong = [
            "git diff | python run_test.py --reach -",
            "python -m torch_fsdp_tests.defects --find",
            "python -m torch_fsdp_tests.nothing",
            "python run_test.py -i distributed/fsdp/test_that_is_gone",
            "torchrun --nproc-per-node 2 run_test.py --jobz 2",
            "torchrun --procs 2 run_test.py",
            "srun -N 2 python run_test.py --jobz",
            "python -m torch_fsdp_tests.tools.versions 2.13.0 -- --jobz",
            'pip install -e ".[nothing]"',
            "rm -r /",
            ".ci/nothing",
            ".ci/gpu --nothing",
        ]
        right = ["X=1 python run_test.py -i smoke > log.txt 2>&1", "python x.py 2>&1 | python run_test.py --version"]
        problems, _ = parsed((*wrong, right[0]))
        self.assertEqual([*problems], wrong)
        self.assertEqual(simple_commands(right[1]), [["python", "x.py"], ["python", "run_test.py", "--version"]])


class TestVariables(TestCase):
    """Without it, a variable that changes how tests run could be documented nowhere."""

    def test_each_variable_without_an_option_is_documented(self):
        documented = "".join(map(read, documents()))
        own = [each for each in settings.VARIABLES if not each.option and not each.is_upstreams]
        self.assertEqual([each.name for each in own if f"`{each.name}" not in documented], [])

    def test_no_variable_is_outside_of_the_table(self):
        """Other names with the suite's prefix are those that its processes exchange."""
        actual = set()
        for path in (ROOT / "torch_fsdp_tests").rglob("*.py"):
            actual |= set(re.findall(r"\"(TORCH_FSDP_TESTS_[A-Z_]+)\"", path.read_text(encoding="utf-8")))
        between_processes = {"EVENTS", "ABSENT_DEFECTS", "LAUNCH_SETTINGS"} | {
            "BEHAVIOR",
            "OPERATORS",
            "REACH_RECORDS",
            "SOURCES",
            "MODEL_CHECKPOINTS",
        }
        known = {each.name for each in settings.VARIABLES}
        known |= {each.name for door in extension.found().values() for each in door.variables}
        self.assertEqual(actual - known, {f"TORCH_FSDP_TESTS_{name}" for name in between_processes})


if __name__ == "__main__":
    run_tests()
