"""No module of the package imports one from a higher layer. The syntax trees show imports inside functions too."""

import ast
import functools
from collections.abc import Iterator

from sources import PACKAGE, TESTS_OF_FSDP, trees

from torch_fsdp_tests.common_utils import TestCase, run_tests

# The lowest layer comes first. Names on one line may import each other. Modules that are not listed are above all
# layers. The longest name that matches a module counts.
LAYERS = [
    {"processes.messages", "device.capabilities", "verdict"},
    {"processes", "installation", "reach", "settings", "installed_torch.version_ranges", "installed_torch.fixes"}
    | {"device.vendors", "device.machine"},
    {"installed_torch", "device"} | {"defects.registry", "defects.known"},
    {"ranks"},
    {"common_utils", "common_cuda", "common_device_type", "inductor_utils", "logging_utils", "two_tensor"},
    {"device.substitutes", "common_distributed", "defects.in_tests", "defects.races"},
    {"distributed"},
    {"common_fsdp", "fsdp.shards"},
    {"fsdp"},
    {"distributed.common_state_dict"},  # upstream's place for everything above
]
TOP = len(LAYERS)
HIGHEST_WITHOUT_TORCH = 1  # the dispatcher never imports torch


def layer(name: str) -> int:
    """The layer of a module, by its dotted name below the package."""
    while name:
        for number, names in enumerate(LAYERS):
            if name in names:
                return number
        name = name.rpartition(".")[0]
    return TOP


def imports(tree: ast.Module, package: tuple[str, ...]) -> Iterator[str]:
    """The modules of the package that a module imports, by dotted names below it. ``package`` contains the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            origin = ".".join([*above, *filter(None, [node.module])])
            names = [f"{origin}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == PACKAGE.name and rest and rest != ["__version__"]:
                yield ".".join(rest)


@functools.cache
def imports_of_package() -> list[tuple[str, str]]:
    """Each module of the package with each one that it imports, by dotted names below the package."""
    found = []
    for path, tree in trees(PACKAGE):
        *folders, name = path.relative_to(PACKAGE).with_suffix("").parts
        found += [(".".join([*folders, name]), imported) for imported in imports(tree, (PACKAGE.name, *folders))]
    return found


class TestLayers(TestCase):
    """Without it, ``--list`` could need torch, or a process could wait minutes for the name localhost."""

    def test_no_module_imports_a_higher_layer(self):
        upward = [f"{name} imports {each}" for name, each in imports_of_package() if layer(each) > layer(name)]
        self.assertEqual(upward, [])

    def test_dispatcher_imports_only_the_lowest_layers(self):
        found = {
            imported
            for name, imported in imports_of_package()
            if name.startswith("dispatch.") and not imported.startswith("dispatch.")
            if layer(imported) > HIGHEST_WITHOUT_TORCH
        }
        self.assertEqual(found, set())

    def test_nothing_connects_to_localhost_by_its_name(self):
        """Some containers cannot resolve it, and a process that tries may wait for minutes."""
        found = {
            path
            for path, tree in trees(PACKAGE, TESTS_OF_FSDP, with_words="localhost")
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "localhost" in node.value
        }
        self.assertEqual(found, {PACKAGE / "processes" / "peers.py"})  # it compares with the name

    def test_all_kinds_of_imports_are_seen(self):
        source = "import torch_fsdp_tests.a.b\nfrom torch_fsdp_tests import c\nfrom torch_fsdp_tests.d.e import f\n"
        relative = (
            "def function():\n    from . import g\n    from .. import h\n    from ..i import j\n    import torch.k\n"
        )
        found = list(imports(ast.parse(source + relative), ("torch_fsdp_tests", "x")))
        self.assertEqual(found, ["a.b", "c", "d.e.f", "x.g", "h", "i.j"])


if __name__ == "__main__":
    run_tests()
