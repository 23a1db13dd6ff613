"""The documents of the project, as blocks of text and code, with the marks that say how each block is checked."""

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from torch_fsdp_tests import installation

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"<!-- (executed|parsed|not executed: .+) -->")
MADE = re.compile(r"<!-- made by .*? -->.*?<!-- end of what .*? made -->", re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
COMMANDS = ("sh", "console")  # the languages of blocks with commands
PROGRAMS = ("python", "torchrun", "srun", "run_test.py", installation.COMMAND, "pip")


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
        """What a paragraph has in backticks."""
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


def prose(text: str) -> str:
    """What a person wrote: without code, and without what a command has made."""
    return "\n\n".join(SPAN.sub("", block.text) for block in blocks(MADE.sub("", text)) if block.language is None)


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
    """Whether what stands in backticks is a command, and not a name or an option."""
    words = [word for word in span.split() if not re.fullmatch(r"[A-Z_]+=.*", word)]
    return bool(words) and (words[0].startswith(".ci/") or (len(words) > 1 and words[0] in PROGRAMS) or "| " in span)
