"""No module of the package imports one from a higher layer. Imports inside functions count, and names in strings."""

import ast
import functools
import graphlib
import re
from collections.abc import Callable, Iterable, Iterator

from sources import PACKAGE, ROOT, TESTS_OF_FSDP, trees

from torch_fsdp_tests.common_utils import TestCase, run_tests

# A module imports only its own package and lower layers. Modules that the table does not name are above all layers.
TABLE = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8").partition("| package |")[2].partition("\n\n")[0]
LAYERS = [re.findall(r"`([\w.]+)`", line.split("|")[1]) for line in TABLE.splitlines()[2:]]
# Their functions run in processes of test files, which import torch.
IN_TEST_FILES = {"dispatch.run_file", "dispatch.server_of_files"}
SEAM = "extension"  # it names types of what is above it, for a type checker only
EXTENSIONS = [path.parent.name for path in (PACKAGE / "extensions").glob("*/__init__.py")]
NUMBERS = {name: number for number, names in enumerate(LAYERS) for name in names}
TEST_BASES = ("common_", "defects", "distributed", "fsdp", "models")


def room(name: str) -> str:
    """The package of a module in the table. A command is none, and above all of them."""
    names = [each for each in NUMBERS if f"{name}.".startswith(f"{each}.")]
    return "" if name.endswith("__main__") else max(names, key=len, default="")


def is_above(name: str, other: str) -> bool:
    """Whether the first of two modules, by their dotted names below the package, may import the second."""
    return room(name) == room(other) or NUMBERS.get(room(name), len(LAYERS)) > NUMBERS.get(room(other), len(LAYERS) - 1)


def at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module outside of functions and of what only a type checker sees."""
    for node in ast.iter_child_nodes(tree):
        only_checked = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        if not isinstance(node, ast.FunctionDef) and not only_checked:
            yield node
            yield from at_import(node)


def imports(nodes: Iterable[ast.AST], package: tuple[str, ...]) -> Iterator[str]:
    """The dotted names that these statements import. ``package`` contains their module."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # for importlib.import_module, for example
            is_own = node.value.startswith(".".join(package))  # such as the name of a logger
            yield from [node.value] if node.value.startswith(f"{PACKAGE.name}.") and not is_own else []


@functools.cache
def graph(nodes_of: Callable[[ast.AST], Iterable[ast.AST]]) -> dict[str, set[str]]:
    """The modules of the package, and ``torch``, that each module imports. Names are dotted, below the package."""
    found = {}
    for path, tree in trees(PACKAGE):
        *folders, name = path.relative_to(PACKAGE).with_suffix("").parts
        module = ".".join(folders if name == "__init__" else [*folders, name])
        # An extension's own module imports the rest of it only when the extension is asked for.
        is_door = module == SEAM or module.removeprefix("extensions.") in EXTENSIONS
        found[module] = set(imports((at_import if is_door else nodes_of)(tree), (PACKAGE.name, *folders)))

    def module_of(name: str) -> str:
        first, _, below = name.partition(".")
        while below not in found and below:
            below = below.rpartition(".")[0]
        return {"torch": first, PACKAGE.name: below}.get(first, "")

    return {module: set(map(module_of, names)) - {"", module} for module, names in found.items()}


class TestLayers(TestCase):
    """Without it, ``--list`` could need torch, or a process could wait minutes for the name localhost."""

    def test_no_module_imports_a_higher_layer(self):
        pairs = [(name, each) for name, imported in graph(ast.walk).items() for each in imported - {"torch"}]
        self.assertGreater(len(pairs), 500)
        self.assertEqual([f"{name} imports {each}" for name, each in pairs if not is_above(name, each)], [])

    def test_files_of_tests_import_no_other_file_of_tests(self):
        """So each runs alone, from any folder. What several use is in the package."""
        files = {path: set(imports(ast.walk(tree), ())) for path, tree in trees(TESTS_OF_FSDP)}
        self.assertGreater(len(files), 100)
        names = {path.stem for path in files} | {"distributed", "test"}
        self.assertEqual([path for path in files if not re.match("test_|__init__", path.name)], [])
        actual = {path: {each.partition(".")[0] for each in imported} & names for path, imported in files.items()}
        self.assertEqual({path: found for path, found in actual.items() if found}, {})

    def test_no_modules_import_each_other(self):
        graphlib.TopologicalSorter(graph(ast.walk)).prepare()

    def test_nothing_below_names_an_extension(self):
        """So the folder of any of them can be deleted. ``tools`` are above them, and are not in the wheel."""
        wrong = []
        for name, imported in graph(ast.walk).items():
            for extension in {each.split(".")[1] for each in imported if each.startswith("extensions.")}:
                if not f"{name}.".startswith(("tools.", f"extensions.{extension}.")):
                    wrong.append(f"{name} imports {extension}")
        self.assertEqual(wrong, [])
        for path in sorted(PACKAGE.rglob("*.py")):
            if path.relative_to(PACKAGE).parts[0] not in ("extensions", "tools"):
                named = re.findall(rf"\bextensions[./](?:{'|'.join(EXTENSIONS)})\b", path.read_text(encoding="utf-8"))
                self.assertEqual(named, [], str(path))
        self.assertGreater(len(EXTENSIONS), 1)

    def test_nothing_below_names_an_option_of_an_extension(self):
        """Test files have some of upstream's options too, and say what the dispatcher has instead of others."""
        theirs = {"--repeat": {"common_utils", "dispatch"}, "--save-xml": {"common_utils"}}
        options = {
            node.value
            for path in (PACKAGE / "extensions").glob("*/__init__.py")
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if re.fullmatch("--[a-z-]{2,}", node.value)
        }
        self.assertGreater(len(options), 5)
        found: dict[str, set[str]] = {}
        for path in sorted(PACKAGE.rglob("*.py")):
            first = path.relative_to(PACKAGE).parts[0]
            if first not in ("extensions", "tools"):
                for option in options & {*re.findall("--[a-z-]+", path.read_text(encoding="utf-8"))}:
                    found.setdefault(option, set()).add(first)
        self.assertEqual({name: rooms for name, rooms in found.items() if rooms - theirs.get(name, set())}, {})

    def test_every_module_has_a_layer(self):
        missing = {name for name in graph(ast.walk) if not room(name) and not name.endswith("__main__")}
        self.assertEqual(missing, {""})  # the package itself
        self.assertEqual({name for name in NUMBERS if name not in graph(ast.walk)}, set())

    def test_dispatcher_imports_no_torch(self):
        anywhere, first = graph(ast.walk), graph(at_import)
        origins = {name: "" for name in anywhere if name.startswith("dispatch")}
        here = origins.keys() - IN_TEST_FILES
        origins |= {each: name for name in here for each in anywhere[name] if each != "torch"}
        waiting = list(origins)
        for name in waiting:
            above = name.rpartition(".")[0]
            for each in {*first[name], above} - origins.keys() - {""}:
                self.assertNotEqual(each, "torch", f"{name} imports torch, and {origins[name]} imports {name}")
                origins[each] = name
                waiting.append(each)
        self.assertGreater(len(waiting), 50)

    def test_no_test_imports_the_dispatcher(self):
        """Not even through another package. Only the commands are above the dispatcher."""
        anywhere = graph(ast.walk)
        waiting = [name for name in anywhere if room(name).startswith(TEST_BASES) and room(name) != "defects.command"]
        for name in waiting:
            self.assertNotIn("dispatch", {each.partition(".")[0] for each in anywhere.get(name, ())}, name)
            waiting += anywhere.get(name, set()) - {*waiting}
        self.assertGreater(len(waiting), 100)

    def test_nothing_connects_to_localhost_by_its_name(self):
        """Some containers cannot resolve it, and a process that tries may wait for minutes."""
        actual = {
            path
            for path, tree in trees(PACKAGE, TESTS_OF_FSDP, with_words="localhost")
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "localhost" in node.value
        }
        self.assertEqual(actual, {PACKAGE / "processes" / "system.py"})  # which only compares names with it

    def test_all_kinds_of_imports_are_seen(self):
        source = "import torch_fsdp_tests.a.b\nfrom torch_fsdp_tests import c\nfrom torch_fsdp_tests.d.e import f\n"
        source += (
            "def function():\n    from . import g\n    from .. import h\n    from ..i import j\n    import torch.k\n"
        )
        tree, package = ast.parse(source), ("torch_fsdp_tests", "x")
        tree.body += ast.parse("import_module('torch_fsdp_tests.l')").body
        actual = [name.removeprefix("torch_fsdp_tests.") for name in imports(ast.walk(tree), package)]
        self.assertEqual(sorted(actual), ["a.b", "c", "d.e.f", "h", "i.j", "l", "torch.k", "x.g"])
        self.assertEqual(len(list(imports(at_import(tree), package))), 4)


if __name__ == "__main__":
    run_tests()
