"""No module of the package imports one from a higher layer. The syntax trees show imports inside functions too."""

import ast
from collections.abc import Iterator
from pathlib import Path

import torch_fsdp_tests
from torch_fsdp_tests.common_utils import TestCase, run_tests

PACKAGE = Path(torch_fsdp_tests.__path__[0])

# The lowest layer comes first. Names on one line may import each other. Modules that are not listed are above all
# layers. The longest name that matches a module counts.
LAYERS = [
    {"processes.messages", "device.capabilities", "verdict"},
    {"processes", "installation", "reach", "settings", "installed_torch.version_ranges"}
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


def imports(source: str, package: tuple[str, ...]) -> Iterator[str]:
    """The modules of the package that a module imports, by dotted names below it. ``package`` contains the module."""
    for node in ast.walk(ast.parse(source)):
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


def modules() -> Iterator[tuple[Path, tuple[str, ...], str]]:
    """For each module: its path below the package, the package that contains it, its dotted name below the package."""
    for path in sorted(PACKAGE.rglob("*.py")):
        below = path.relative_to(PACKAGE)
        yield below, (PACKAGE.name, *below.parts[:-1]), ".".join(below.with_suffix("").parts)


class TestLayers(TestCase):
    """Without it, ``--list`` could need torch, or a process could wait minutes for the name localhost."""

    def test_no_module_imports_a_higher_layer(self):
        upward = [
            f"{path} imports {imported}"
            for path, package, name in modules()
            for imported in imports((PACKAGE / path).read_text(), package)
            if layer(imported) > layer(name)
        ]
        self.assertEqual(upward, [])

    def test_dispatcher_imports_only_the_lowest_layers(self):
        found = {
            imported
            for path, package, name in modules()
            if name.partition(".")[0] == "dispatch"
            for imported in imports((PACKAGE / path).read_text(), package)
            if not imported.startswith("dispatch.") and layer(imported) > HIGHEST_WITHOUT_TORCH
        }
        self.assertEqual(found, set())

    def test_nothing_connects_to_localhost_by_its_name(self):
        """Some containers cannot resolve it, and a process that tries may wait for minutes."""
        parsers = {PACKAGE / "processes" / "peers.py"}  # it compares with the name, and connects to nothing
        files = {*PACKAGE.rglob("*.py"), *PACKAGE.parent.glob("test/distributed/**/*.py")} - parsers
        self.assertGreater(len(files), 200)
        for file in sorted(files):
            texts = (node.value for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Constant))
            found = [text for text in texts if isinstance(text, str) and "localhost" in text]
            self.assertEqual(found, [], str(file))

    def test_all_kinds_of_imports_are_seen(self):
        source = "import torch_fsdp_tests.a.b\nfrom torch_fsdp_tests import c\nfrom torch_fsdp_tests.d.e import f\n"
        relative = (
            "def function():\n    from . import g\n    from .. import h\n    from ..i import j\n    import torch.k\n"
        )
        self.assertEqual(
            list(imports(source + relative, ("torch_fsdp_tests", "x"))), ["a.b", "c", "d.e.f", "x.g", "h", "i.j"]
        )


if __name__ == "__main__":
    run_tests()
