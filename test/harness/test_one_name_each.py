"""A name of a class or of a module stands for one thing, so that a search for it finds that thing."""

import ast
import collections
from collections.abc import Iterable

from sources import PACKAGE, trees

from torch_fsdp_tests import UPSTREAMS
from torch_fsdp_tests.common_utils import TestCase, run_tests

# Each reproduction of a defect stands alone. The names of modules below upstream's import paths are upstream's choice.
ALONE = PACKAGE / "defects" / "known"
ENTRANCES = {"__init__", "__main__", "feature"}  # what each folder may have
CLASSES = {
    "Difference": "of two values, and of two behaviors",
}
MODULES: dict[str, str] = {}


def twice(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """The names that stand for several things, with their places."""
    places = collections.defaultdict(set)
    for name, place in pairs:
        places[name].add(place)
    return {name: sorted(found) for name, found in places.items() if len(found) > 1}


class TestOneNameEach(TestCase):
    def test_classes(self):
        pairs = [
            (node.name, str(path))
            for path, tree in trees(PACKAGE)
            if path.parent != ALONE
            for node in tree.body
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        ]
        self.assertGreater(len(pairs), 100)
        found = twice(pairs)
        self.assertEqual({name: places for name, places in found.items() if name not in CLASSES}, {})
        self.assertEqual(CLASSES.keys() - found.keys(), set())

    def test_modules(self):
        paths = [path for path in PACKAGE.rglob("*.py") if path.stem not in ENTRANCES]
        ours = [path for path in paths if path.relative_to(PACKAGE).parts[0] not in UPSTREAMS]
        self.assertGreater(len(ours), 50)
        found = twice((path.stem, str(path)) for path in ours)
        self.assertEqual({name: places for name, places in found.items() if name not in MODULES}, {})
        self.assertEqual(MODULES.keys() - found.keys(), set())


if __name__ == "__main__":
    run_tests()
