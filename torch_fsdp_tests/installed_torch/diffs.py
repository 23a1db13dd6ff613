"""Reads unified diffs, and applies them.

A text that cannot be read as one is rejected, because a change that is misread would look like none.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TextIO

_COLOUR = re.compile(r"\x1b\[[0-9;]*[mK]")
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@ ?(.*)")
_DEFINED = re.compile(r"\s*(?:async\s+def|def|class)\s+(\w+)")
_WORD_DIFF = re.compile(r"\[-.*-\]|\{\+.*\+\}|^~$")
_ONLY_IN = re.compile(r"Only in (.+): (.+)")  # what diff -r says without -N
_OF_WORDS = "a diff of words: leave out --word-diff and --color-words"
_NOWHERE = "/dev/null"
_REMEDY = "make one with git diff or diff -u"
# What other forms of a diff begin their lines with, and what to do about them.
_OTHER_FORMS = {
    r"\*\*\* .+\n--- .+\n\*{15}": f"a context diff: {_REMEDY}",
    r"@@@ -": "a combined diff of a merge: compare with one parent, as git diff COMMIT^1 COMMIT does",
    r"\d+(?:,\d+)?[acd]\d+(?:,\d+)?\n[<>] ": f"a diff without names of files: {_REMEDY}",
}


class NotADiff(ValueError):
    """The text is not a unified diff. The message completes the sentence ``the text is ...``, and says what to do."""


@dataclasses.dataclass(frozen=True)
class Hunk:
    """One hunk: the line where it starts, its lines before and after, and what its header names."""

    start: int
    before: tuple[str, ...]
    after: tuple[str, ...]
    header: str = ""

    def reversed(self) -> Hunk:
        return dataclasses.replace(self, before=self.after, after=self.before)

    def touched(self) -> Iterator[int]:
        """The numbers of removed lines, and of lines before which lines are added."""
        import difflib

        matcher = difflib.SequenceMatcher(None, self.before, self.after, autojunk=False)
        for tag, first, last, _, _ in matcher.get_opcodes():
            if tag != "equal":
                yield from range(self.start + first, self.start + max(last, first + 1))

    def defined(self) -> set[str]:
        """The names of the functions and classes whose first lines it shows, also in its header."""
        lines = (self.header, *self.before, *self.after)
        return {match[1] for line in lines if (match := _DEFINED.match(line))}


@dataclasses.dataclass(frozen=True)
class Edited:
    """A file whose lines change, by its paths before and after, if they differ. A new file has only one path."""

    paths: tuple[str, ...]
    hunks: tuple[Hunk, ...]


@dataclasses.dataclass(frozen=True)
class Moved:
    """A file that is renamed, with or without changes of its lines."""

    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Opaque:
    """A file that changes in a way that has no lines to compare: a binary one, an empty one, or a copy."""

    path: str


@dataclasses.dataclass(frozen=True)
class ModeOnly:
    """A file of which only the permissions change."""

    path: str


FileDiff = Edited | Moved | Opaque | ModeOnly


def parse(text: str) -> list[FileDiff]:
    """The files of a unified diff, in their order. Raises :class:`NotADiff`."""
    text, colors = _COLOUR.subn("", text)
    text = text.replace("\r\n", "\n")
    if colors and "\n@@ -" in text and not re.search(r"^[-+](?!--|\+\+)", text, re.MULTILINE):
        raise NotADiff(_OF_WORDS)  # the words had only colors
    for pattern, words in _OTHER_FORMS.items():
        if re.search(f"^{pattern}", text, re.MULTILINE):
            raise NotADiff(words)
    lines = text.removesuffix("\n").split("\n")  # not at form feeds, which a source may have
    files = [file for section in _sections(lines) if (file := section.file()) is not None]
    files += [Opaque(_path(f"{match[1]}/{match[2]}")) for match in map(_ONLY_IN.fullmatch, lines) if match]
    if not files:
        raise NotADiff(f"not a unified diff: {_REMEDY}")
    return files


@dataclasses.dataclass
class _Section:
    """What a diff says about one file."""

    paths: tuple[str, str] | None = None  # of the lines "---" and "+++"
    named: str = ""  # the rest of the line "diff --git"
    facts: dict[str, str] = dataclasses.field(default_factory=dict)  # git's lines between them, by their first words
    hunks: list[Hunk] = dataclasses.field(default_factory=list)

    def is_about(self, paths: Sequence[str]) -> bool:
        """Whether git's line can be about these paths. A text may have several diffs."""
        return self.named[:1] in ("", '"') or any(path in self.named.replace("\\", "/") for path in paths)

    def file(self) -> FileDiff | None:
        if self.facts.keys() >= {"rename from", "rename to"}:
            return Moved(_path(self.facts["rename from"]), _path(self.facts["rename to"]))
        if "copy to" in self.facts:
            return Opaque(_path(self.facts["copy to"]))
        if self.paths is not None:
            old, new = self.paths
            if not self.hunks:
                raise NotADiff(f"no complete unified diff: it has no lines of {old}; {_REMEDY}")
            paths = (_bare(path, other) for path, other in ((old, new), (new, old)) if path != _NOWHERE)
            return Edited(tuple(dict.fromkeys(paths)), tuple(self.hunks))
        if not self.named:
            return None
        half = len(self.named) // 2  # both paths are the same, apart from git's prefixes
        path = _bare(_path(self.named[:half]), _path(self.named[half + 1 :]))
        return ModeOnly(path) if self.facts.keys() == {"old mode", "new mode"} else Opaque(path)


_FACT = re.compile(r"(old mode|new mode|new file mode|deleted file mode|rename from|rename to|copy to|index) (.+)")


def _sections(lines: Sequence[str]) -> Iterator[_Section]:
    section, position = _Section(), 0
    while position < len(lines):
        line = lines[position]
        position += 1
        if line.startswith("diff --git "):
            yield section
            section = _Section(named=line[len("diff --git ") :])
        elif line.startswith("--- ") and lines[position : position + 1] and lines[position].startswith("+++ "):
            paths = _path(line[4:]), _path(lines[position][4:])
            if section.paths is not None or not section.is_about(paths):
                yield section
                section = _Section()
            section.paths = paths
            position += 1
        elif section.paths is None and (fact := _FACT.fullmatch(line)):
            section.facts[fact[1]] = fact[2]
        elif section.paths is not None and (header := _HUNK.match(line)):
            hunk, position = _hunk(header, lines, position)
            section.hunks.append(hunk)
        elif section.hunks and line[:1] in ("+", "-", "@") and line.strip() != "--":  # a mail ends like this
            raise NotADiff(_not_a_line(lines, position - 1))
    yield section


def _hunk(header: re.Match[str], lines: Sequence[str], position: int) -> tuple[Hunk, int]:
    """The hunk whose lines begin at a position, and the position after it."""
    olds, news = (1 if count is None else int(count) for count in header.group(2, 3))
    before, after = list[str](), list[str]()
    changes = 0
    for line in lines[position:]:
        if len(before) >= olds and len(after) >= news:
            break
        sign, rest = line[:1] or " ", line[1:]  # mail programs take away the space of an empty line
        if sign not in " +-\\":
            break
        if sign in " -":
            before.append(rest)
        if sign in " +":
            after.append(rest)
        changes += sign in "+-"
        position += 1
    # Context may be missing at the end of the text. Then each side lacks the same number of lines.
    if not changes or len(before) - olds != len(after) - news:
        raise NotADiff(_not_a_line(lines, position))
    start = int(header[1]) + (olds == 0)  # a hunk of no line names the one before
    return Hunk(start, tuple(before), tuple(after), header[4]), position


def _not_a_line(lines: Sequence[str], position: int) -> str:
    if any(map(_WORD_DIFF.search, lines)):
        return _OF_WORDS
    return f"no complete unified diff: its hunk before line {position + 1} is cut short or has no + or -; {_REMEDY}"


def _path(text: str) -> str:
    """A path without the date after it, git's quotes, and the backslashes of Windows. It can be printed."""
    text = text.partition("\t")[0].strip().encode(errors="surrogateescape").decode(errors="replace")
    if text.startswith('"'):
        return text.strip('"').encode().decode("unicode_escape").encode("latin-1", "replace").decode(errors="replace")
    return text.replace("\\", "/")


def _bare(path: str, other: str) -> str:
    """A path without git's prefix of one letter, if the other path also has one."""
    is_prefixed = path[1:2] == "/" and (other == _NOWHERE or (other[1:2] == "/" and other[2:] == path[2:]))
    return path[2:] if is_prefixed else path


@dataclasses.dataclass(frozen=True)
class Patched:
    """A text with those hunks that fit, the hunks that do not, and how many lines off the others were."""

    lines: list[str]
    misfits: list[Hunk]
    distance: int


def patched(lines: Iterable[str], hunks: Iterable[Hunk]) -> Patched:
    """Apply hunks to a text, each at the nearest place where it fits."""
    made = Patched([*lines], [], 0)
    moved, least, distance = 0, 0, 0
    for hunk in hunks:
        height, target = len(hunk.before), hunk.start - 1 + moved
        places = sorted(range(least, len(made.lines) - height + 1), key=lambda place: abs(place - target))
        place = next((p for p in places if tuple(made.lines[p : p + height]) == hunk.before), None)
        if place is None:
            made.misfits.append(hunk)
            continue
        made.lines[place : place + height] = hunk.after
        distance += abs(place - target)
        least = place + len(hunk.after)
        moved = least - (hunk.start - 1 + height)
    return dataclasses.replace(made, distance=distance)


def standard_input() -> str:
    """What standard input has. It can be read several times."""
    return _text_of(sys.stdin)


@functools.cache
def _text_of(stream: TextIO) -> str:
    return stream.buffer.read().decode(errors="surrogateescape")
