"""Selects the parts of files that will run. Pure functions over names and a function that reads a file's text."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from torch_fsdp_tests.dispatch.discover import TestFile
from torch_fsdp_tests.dispatch.plan import TestRun, stands_for
from torch_fsdp_tests.dispatch.syntax import names_in

LIST = ".txt"  # ending of a file in the test directory that holds names of tests
SHOWN = 5  # names in a message
Source = Callable[[str], str]  # the text of a file by its name


class UnknownTest(ValueError):
    """A name selects nothing. The message has similar names."""


def select(
    files: Sequence[TestFile], include: Sequence[str], exclude: Sequence[str], directory: Path, source: Source
) -> list[TestRun]:
    """The parts of files that are included and not excluded, in path order. If nothing is included, all files are.

    Raises :class:`UnknownTest` if a name in either list matches nothing.
    """
    names = [file.name for file in files]
    chosen: dict[str, TestRun] = {} if include else {name: TestRun(name) for name in names}
    for text in _with_lists(include, names, directory):
        for test in find(text, names, directory, source):
            chosen[test.file] = chosen[test.file] | test if test.file in chosen else test
    for text in _with_lists(exclude, names, directory):
        for test in find(text, names, directory, source):
            if test.file in chosen:
                left = chosen.pop(test.file) - test
                if left is not None:
                    chosen[test.file] = left
    return [chosen[name] for name in sorted(chosen)]


def _with_lists(words: Iterable[str], names: Sequence[str], directory: Path) -> Iterator[str]:
    """Return the words, with each list replaced by the names in it. A list has one name per line, and ``#`` remarks.

    A list is a file ``NAME.txt`` in the test directory, unless a folder or a file of tests has that name.
    """
    for word in words:
        path = directory / f"{word}{LIST}"
        if "::" in word or not path.is_file() or matching(normalise(word, directory), names):
            yield word
            continue
        lines = (
            line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        )
        yield from filter(None, lines)


def find(text: str, names: Sequence[str], directory: Path, source: Source) -> list[TestRun]:
    """The tests that one argument of ``-i`` or ``-x`` names: ``folder``, ``folder/file``, ``glob*``,
    ``file::Class::test``.
    """
    pattern, *inside = text.split("::")
    wanted, here = normalise(pattern, directory), _from_here(pattern, directory)
    # A path that exists relative to the current folder counts first, because shells complete it. All others are names
    # below the directory.
    matches = [] if here is None or not _is_there(pattern) else matching(here, names)
    matches = matches or matching(wanted, names) or ([] if here is None else matching(here, names))
    if not matches:
        known = [*names, *_folders(names), *(path.stem for path in directory.glob(f"*{LIST}"))]
        raise UnknownTest(f"unknown test {text!r}{_nearest(wanted, known) or '; --list shows all files'}")
    if not inside:
        return [TestRun(name) for name in matches]
    if len(inside) > 2 or not all(inside):
        raise UnknownTest(f"unknown test {text!r}; write file::Class or file::Class::test")
    return [TestRun(name, frozenset([_inside(text, inside, source(name))])) for name in matches]


def normalise(text: str, directory: Path) -> str:
    """The name that discovery gives a path, with or without the test directory before it and ``.py`` after it."""
    text = text.replace("\\", "/").strip()
    if Path(text).is_absolute():
        path = _inside_of(directory, text)
        if path is None:
            return text
        text = path.as_posix()
    while text.startswith("./"):
        text = text[2:]
    text = text.rstrip("/").removesuffix(".py")
    for prefix in (directory.as_posix(), directory.name):
        if text == prefix:
            return "."
        if text.startswith(f"{prefix}/"):
            return text[len(prefix) + 1 :]
    return text


def _from_here(text: str, directory: Path) -> str | None:
    """The name that discovery gives to a path relative to the current folder, or None if it is elsewhere."""
    path, root = Path(os.path.abspath(text.strip())), directory.resolve()
    if path == root or (path in root.parents and _is_there(text)):
        return "."
    inside = _inside_of(directory, text.strip())
    return None if inside is None else inside.as_posix().removesuffix(".py")


def _inside_of(directory: Path, text: str) -> Path | None:
    """The path relative to the directory, or None if it is elsewhere. Either may be reached through links."""
    root = directory.resolve()
    for path in (Path(os.path.abspath(text)), Path(os.path.realpath(text))):
        if root in (path, *path.parents):
            return path.relative_to(root)
    return None


def _is_there(text: str) -> bool:
    return any(os.path.exists(f"{text.strip()}{end}") for end in ("", ".py"))


def matching(wanted: str, names: Iterable[str]) -> list[str]:
    """The names that match a normalised argument: that file, all files below that folder, or the glob's matches."""
    if wanted == ".":
        return list(names)
    if any(character in wanted for character in "*?["):
        return [n for n in names if fnmatch.fnmatchcase(n, wanted) or fnmatch.fnmatchcase(n, f"{wanted}/*")]
    return [name for name in names if name == wanted or name.startswith(f"{wanted}/")]


def _inside(text: str, inside: Sequence[str], source: str) -> str:
    """``Class`` or ``Class.test``, checked against the source. A generated name starts with a name in the source."""
    for name, known in zip(inside, names_in(source) or (), strict=False):  # an unreadable file fails when it runs
        if not any(stands_for(stem, name) for stem in known):
            raise UnknownTest(f"unknown test {text!r}{_nearest(name, known) or _there_are(known)}")
    return ".".join(inside)


def _folders(names: Iterable[str]) -> set[str]:
    return {str(parent) for name in names for parent in Path(name).parents if str(parent) != "."}


def _there_are(known: Iterable[str]) -> str:
    """The remark ``; there are: a, b``, for a name that is like none of these."""
    known = sorted(set(known))
    names = [name for name in known if name.lower().startswith("test")] or known  # a file may define models, too
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"; there are: {', '.join(names[:SHOWN])}{more}" if names else ""


def _nearest(wanted: str, known: Iterable[str]) -> str:
    """The remark ``; nearest: a, b``. Compares whole names, then last parts, which people remember best."""
    import difflib  # imported late, because it is rarely needed

    known = sorted(set(known))
    close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.6)
    last = wanted.rpartition("/")[2]
    by_last = {name.rpartition("/")[2]: name for name in reversed(known)}
    close += [by_last[name] for name in difflib.get_close_matches(last, by_last, n=3, cutoff=0.5)]
    close = list(dict.fromkeys(close))[:3]
    return f"; nearest: {', '.join(close)}" if close else ""
