"""Small edits of torch's FSDP: an edit that changes the compiled code is never reported as a change of nothing."""

import ast
import collections
import difflib
import random
import re
import types
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path

from torch_fsdp_tests.dispatch import devices
from torch_fsdp_tests.extensions.reach.changed_functions import Changes
from torch_fsdp_tests.extensions.reach.functions import module_name
from torch_fsdp_tests.extensions.reach.reach_map import Module, build

EDITS = 8  # of each kind
LONGEST = 30_000  # characters of a file, so that the test takes few seconds

Lines = list[str]


def line_with(pattern: str, replacement: str) -> Callable[[Lines, int], Lines | None]:
    """An edit that replaces the first match in a line."""

    def edit(lines: Lines, at: int) -> Lines | None:
        changed = re.sub(pattern, replacement, lines[at], count=1)
        return [*lines[:at], changed, *lines[at + 1 :]] if changed != lines[at] else None

    return edit


def entering(lines: Lines, at: int) -> Lines | None:
    """An edit that moves a statement into the block before it."""
    space, deeper = (line[: len(line) - len(line.lstrip())] for line in (lines[at], lines[at - 1]))
    is_after = len(deeper) > len(space) and re.match(r" *(self\.\w+|\w+ =|\w+\(|return)", lines[at])
    return [*lines[:at], deeper + lines[at].lstrip(), *lines[at + 1 :]] if is_after else None


def swapped(lines: Lines, at: int) -> Lines | None:
    return [*lines[:at], *reversed(lines[at : at + 2]), *lines[at + 2 :]]


def in_front(text: str) -> Callable[[Lines, int], Lines | None]:
    """An edit that adds a line, with the indentation of the next one."""

    def edit(lines: Lines, at: int) -> Lines | None:
        space = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
        name = re.match(r"\s*(\w+) = ", lines[at])
        if "{}" in text and not name:
            return None
        return [*lines[:at], f"{space}{text.format(name[1] if name else '')}", *lines[at:]] if lines[at] else None

    return edit


KINDS: dict[str, Callable[[Lines, int], Lines | None]] = {
    "a line leaves its block": line_with(r"^    (?= *[\w@])", ""),
    "a line enters the block above": entering,
    "two lines change places": swapped,
    "a line goes": lambda lines, at: [*lines[:at], *lines[at + 1 :]],
    "a line comes twice": lambda lines, at: [*lines[: at + 1], *lines[at:]],
    "a decorator goes": line_with(r"^ *@.*", ""),
    "another number": line_with(r"\b\d+\b", "7"),
    "another constant": line_with(r"\bTrue\b", "1"),
    "no value": line_with(r"\bNone\b", "False"),
    "another text": line_with(r"(?<=\w\")$|(?<=\w\"[,):])", ' " "'),
    "a prefix of a text": line_with(r"(?<![\w\"])f?(?=\"\w)", "b"),
    "no prefix of a text": line_with(r"\bf(?=\")", ""),
    "another operator": line_with(r" == | is not | and | \+ ", " or "),
    "no operator": line_with(r"\bnot ", ""),
    "another default": line_with(r"(?<=\w)=(?:True|False|None)\b", "=3"),
    "no annotation": line_with(r": [\w.]+(?= =|,$)", ""),
    "no answer": line_with(r"\breturn (?=\w)", ""),
    "one more tuple": line_with(r"\((\w+, \w+)\)", r"((\1),)"),
    "a name of the module": in_front("global {}"),
    "another name": line_with(r"\bself\.(?=_)", "self._"),
    "a comment": in_front("# more"),
    "an empty line": line_with(r"^$", "\n"),
}

WITHOUT_CODE = ("a comment", "an empty line")


def code_of(source: str) -> types.CodeType:
    """What Python makes of a source without its docstrings and line numbers."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if ast.get_docstring(node, clean=False) is not None:
                node.body[0] = ast.Pass()
        for field in ("lineno", "end_lineno", "col_offset", "end_col_offset"):
            if hasattr(node, field):
                setattr(node, field, int("line" in field))
    return compile(ast.fix_missing_locations(tree), "", "exec", dont_inherit=True)


def sources(root: Path) -> dict[Path, str]:
    """The files of FSDP in a version of PyTorch that are neither too short nor too long."""
    paths = [path for name in ("fsdp", "_composable") for path in sorted((root / "distributed" / name).rglob("*.py"))]
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return {path: text for path, text in texts.items() if 500 < len(text) < LONGEST}


def edited(rng: random.Random, files: dict[Path, str]) -> Iterator[tuple[str, Path, str]]:
    """Edits of each kind: the kind, the file, and its text afterwards, which is still valid Python.

    They go on until one of a kind that can change the compiled code does.
    """
    texts = {path: text.split("\n") for path, text in files.items()}
    places = [(path, at) for path, lines in texts.items() for at in range(1, len(lines) - 1)]
    for kind, edit in KINDS.items():
        rng.shuffle(places)
        made, has_changed = 0, kind in WITHOUT_CODE
        for path, at in places:
            changed = edit(texts[path], at)
            if changed is None or changed == texts[path]:
                continue
            try:
                compile("\n".join(changed), "", "exec", dont_inherit=True)
            except (SyntaxError, ValueError):
                continue
            yield kind, path, "\n".join(changed)
            made += 1
            has_changed = has_changed or code_of("\n".join(changed)) != code_of(files[path])
            if made >= EDITS and has_changed:
                break


@unittest.skipIf(devices.torch_folder() is None, "needs torch")
class TestEdits(unittest.TestCase):
    """Without it, ``--reaching`` could report for a change of code that nothing has changed."""

    def test_what_changes_the_compiled_code_is_a_change(self):
        root = devices.torch_folder()
        assert root is not None
        files = sources(root)
        names = {path: module_name(path, root) for path in files}
        codes = {path: code_of(text) for path, text in files.items()}
        modules = {names[path]: Module.of(text.encode(), names[path]) for path, text in files.items()}
        changes = Changes(build("0", {}, modules), root)
        counts: collections.Counter[tuple[str, bool]] = collections.Counter()
        rng = random.Random(0)
        for kind, path, text in edited(rng, files):
            place = path.relative_to(root.parent).as_posix()
            sides = [files[path].split("\n"), text.split("\n")]
            rng.shuffle(sides)  # the installed torch has the file before or after the edit
            diff = "\n".join(difflib.unified_diff(sides[0], sides[1], f"a/{place}", f"b/{place}", lineterm=""))
            change = changes.of_diff(diff, "the edit")
            with self.subTest(kind=kind, diff=diff):
                self.assertTrue(change.names or code_of(text) == codes[path])
                self.assertNotEqual(bool(change.names), bool(change.without_code))
            counts[kind, bool(change.names)] += 1
        for kind in KINDS:
            self.assertGreaterEqual(counts[kind, True] + counts[kind, False], EDITS, kind)
            self.assertTrue(counts[kind, kind not in WITHOUT_CODE], kind)
        self.assertEqual([counts[kind, True] for kind in WITHOUT_CODE], [0, 0])


if __name__ == "__main__":
    unittest.main()
