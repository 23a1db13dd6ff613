"""Selects the parts of files that will run. Pure functions over names and the texts of files."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch_fsdp_tests.dispatch.discover import source_of
from torch_fsdp_tests.dispatch.plan import TestRun, class_of, matches_stem
from torch_fsdp_tests.dispatch.syntax import tests_by_class
from torch_fsdp_tests.verdict import first_few

LIST = ".txt"  # ending of a file in the test directory that holds names of tests
EVERYTHING = "."  # the name of the test directory
WHOLE = ""  # in place of a class or a test: the whole file


class UnknownTest(ValueError):
    """A name selects nothing. The message has similar names."""


@dataclasses.dataclass(frozen=True)
class Narrowed:
    """The tests of a selection that are worth running, and what the run prints about them."""

    tests: list[TestRun]
    remarks: Sequence[str] = ()  # printed before the tests
    verdict: str = ""  # printed at the end: why passing proves nothing
    proves_nothing: bool = False  # even if all tests pass
    may_be_cut: bool = False  # whether a long file may run in parts
    is_elsewhere: bool = False  # nothing is selected because only other parts of PyTorch have such tests
    in_order: bool = False  # whether the order of the tests matters more than full use of the slots


def select(
    files: Mapping[str, Path],
    include: Sequence[str],
    exclude: Sequence[str],
    directory: Path,
    within: Sequence[str] = (),
) -> list[TestRun]:
    """The parts of files that are included and not excluded, in path order. If nothing is included, all files are.

    If names are given in ``within``, what they do not name is also left out. Raises :class:`UnknownTest` if a name
    matches nothing.
    """
    included = _by_file(include, files, directory) if include else {name: {WHOLE} for name in files}
    if within:
        limits = _by_file(within, files, directory)
        included = {name: _common(parts, limits.get(name, set())) for name, parts in included.items()}
    excluded = _by_file(exclude, files, directory)
    parts = (_part(name, included[name], excluded.get(name, set())) for name in sorted(included))
    return [part for part in parts if part is not None]


def _by_file(words: Iterable[str], files: Mapping[str, Path], directory: Path) -> dict[str, set[str]]:
    """The parts of each file that the words name: ``Class``, ``Class.test``, or all of it."""
    parts: dict[str, set[str]] = {}
    for text in _with_lists(words, files, directory):
        for file, name in find(text, files, directory):
            parts.setdefault(file, set()).add(name)
    return parts


def _common(some: set[str], others: set[str]) -> set[str]:
    """What both sides have of a file."""
    return {name for name in some if _is_in(name, others)} | {name for name in others if _is_in(name, some)}


def _is_in(name: str, names: Iterable[str]) -> bool:
    """Whether one of the names is this one, its class, or the whole file."""
    return bool({WHOLE, class_of(name), name} & {*names})


def _part(file: str, included: Iterable[str], excluded: Iterable[str]) -> TestRun | None:
    """The part of a file that is included and not excluded, or None."""
    left = {name for name in included if not _is_in(name, excluded)}
    if WHOLE in left:
        return TestRun(file, excluded=frozenset(excluded))
    classes = {class_of(name) for name in left}
    without = frozenset(name for name in excluded if class_of(name) in classes)
    return TestRun(file, frozenset(left), without) if left else None


def _with_lists(words: Iterable[str], names: Iterable[str], directory: Path) -> Iterator[str]:
    """Return the words, with each list replaced by the names in it. A list has a name per line; ``#`` starts a comment.

    A list is a file ``NAME.txt`` in the test directory, unless a folder or a file of tests has that name.
    """
    for word in words:
        if not is_list(word, directory) or any(matching(name, names) for name in candidates(word, directory)):
            yield word
            continue
        lines = (directory / f"{word}{LIST}").read_text(encoding="utf-8", errors="replace").splitlines()
        yield from filter(None, (line.partition("#")[0].strip() for line in lines))


def is_list(word: str, directory: Path) -> bool:
    """Whether there is a list of this name."""
    return "::" not in word and (directory / f"{word}{LIST}").is_file()


def find(text: str, files: Mapping[str, Path], directory: Path) -> list[tuple[str, str]]:
    """The files that one argument of ``-i`` or ``-x`` names, each with its ``Class``, its ``Class.test``, or all of it.

    An argument is ``folder``, ``folder/file``, ``glob*`` or ``file::Class::test``.
    """
    pattern, *inside = text.split("::")
    names = list(candidates(pattern, directory))
    matches = next(filter(None, (matching(name, files) for name in names)), [])
    if not matches:
        known = [*files, *_folders(files), *(path.stem for path in directory.glob(f"*{LIST}"))]
        near = _suggestions(names[0] if names else pattern, known)
        raise UnknownTest(f"unknown test {text!r}{near or '; --list shows all files'}")
    if not inside:
        return [(name, WHOLE) for name in matches]
    if len(inside) > 2 or not all(inside):
        raise UnknownTest(f"unknown test {text!r}; write file::Class or file::Class::test")
    return [(name, _inside(text, inside, source_of(files[name]))) for name in matches]


def without_tests(words: Iterable[str], files: Iterable[str], directory: Path) -> list[str]:
    """The words that name a module in the test directory that is no test file, such as ``__init__.py``."""
    named = {word: [*candidates(word, directory)] for word in words}
    return [
        word
        for word, names in named.items()
        if any((directory / f"{name}.py").is_file() for name in names)
        and not any(matching(name, files) for name in names)
    ]


def candidates(pattern: str, directory: Path) -> Iterator[str]:
    """The names that discovery may give to a path or a glob, with or without ``.py`` after it.

    A path that exists relative to the current folder counts first, because shells complete it. All others are names
    below the directory, with or without its own name before them.
    """
    pattern = pattern.replace("\\", "/").strip()
    here, root = Path.cwd(), directory.resolve()
    is_here = any(os.path.exists(f"{pattern}{end}") for end in ("", ".py"))
    # An empty text, such as the value of an unset shell variable, names nothing.
    folders = [here, directory, directory.parent] if is_here else [directory, directory.parent, here]
    for folder in folders if pattern else ():
        for resolved in (os.path.abspath, os.path.realpath):  # either may be reached through links
            path = Path(resolved(folder / pattern))
            if root in (path, *path.parents):
                yield path.relative_to(root).as_posix().removesuffix(".py")
            elif path in root.parents and path.exists():
                yield EVERYTHING


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that match a normalized argument: that file, all files below that folder, or the glob's matches."""
    if pattern == EVERYTHING:
        return list(names)
    if any(character in pattern for character in "*?["):
        return [n for n in names if fnmatch.fnmatchcase(n, pattern) or fnmatch.fnmatchcase(n, f"{pattern}/*")]
    return [name for name in names if name == pattern or name.startswith(f"{pattern}/")]


def _inside(text: str, inside: Sequence[str], source: str) -> str:
    """``Class`` or ``Class.test``, checked against the source. A generated name starts with a name in the source."""
    classes = tests_by_class(source)
    if classes is None:
        return ".".join(inside)  # the file fails when it runs
    for name, known in zip(inside, (classes, {test for tests in classes.values() for test in tests})):
        if not any(matches_stem(stem, name) for stem in known):
            raise UnknownTest(f"unknown test {text!r}{_suggestions(name, known) or _there_are(known)}")
    return ".".join(inside)


def _folders(names: Iterable[str]) -> set[str]:
    return {str(parent) for name in names for parent in Path(name).parents if str(parent) != "."}


def _there_are(known: Iterable[str]) -> str:
    """The remark ``; there are: a, b``, for a name that is like none of these."""
    known = sorted(set(known))
    names = [name for name in known if name.lower().startswith("test")] or known  # a file may also define models
    return f"; there are: {first_few(names)}" if names else ""


def _suggestions(name: str, known: Iterable[str]) -> str:
    """The remark ``; nearest: a, b``. Compares whole names, then last parts, which people remember best."""
    import difflib  # imported late, because it is rarely needed

    known = sorted(set(known))
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    last = name.rpartition("/")[2]
    by_last = {name.rpartition("/")[2]: name for name in reversed(known)}
    close += [by_last[name] for name in difflib.get_close_matches(last, by_last, n=3, cutoff=0.5)]
    close = list(dict.fromkeys(close))[:3]
    return f"; nearest: {', '.join(close)}" if close else ""
