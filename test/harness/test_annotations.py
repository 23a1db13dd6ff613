"""Every helper of the tests has annotations. mypy checks that they are right."""

import ast
from collections.abc import Iterator

from sources import TESTS, trees

from torch_fsdp_tests.common_utils import TestCase, run_tests

FIXTURES = {f"{stage}{of}" for stage in ("setUp", "tearDown") for of in ("", "Class", "Module")}
FIXTURES |= {"perThreadSetUp", "perThreadTearDown"}


def outermost_functions(node: ast.AST) -> Iterator[ast.FunctionDef]:
    """The functions and methods below a node, without those inside another function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef):
            yield child
        else:
            yield from outermost_functions(child)


def unannotated(tree: ast.Module) -> list[str]:
    """The helpers without an annotation of their result or of a parameter other than ``self`` and ``cls``."""
    found = []
    for function in outermost_functions(tree):
        if function.name.startswith("test") or function.name in FIXTURES:
            continue
        given = function.args
        starred = [each for each in (given.vararg, given.kwarg) if each is not None]
        parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs, *starred]
        typed = [each.annotation for each in parameters if each.arg not in ("self", "cls")]
        if None in (*typed, function.returns):
            found.append(function.name)
    return found


SAMPLE = """
def no_result(a: int): ...
def no_parameter(a) -> None: ...
def no_starred(*args, **kwargs: int) -> None: ...
def no_keyword(*, key) -> None: ...
def complete(a: int, /, b: int, *args: int, key: int = 0, **kwargs: int) -> None:
    def nested(a): ...
if True:
    class TestX:
        def setUp(self): ...
        def test_x(self, a): ...
        def no_result_of_a_method(self): ...
        def complete_method(self) -> None:
            return lambda a: a
"""


class TestAnnotations(TestCase):
    """Without it, helpers could lack annotations, and mypy would not check them."""

    def test_every_helper_is_annotated(self):
        files = {str(path.relative_to(TESTS)): unannotated(tree) for path, tree in trees(TESTS)}
        self.assertGreater(len(files), 100)
        self.assertEqual({path: names for path, names in files.items() if names}, {})

    def test_what_is_found(self):
        expected = ["no_result", "no_parameter", "no_starred", "no_keyword", "no_result_of_a_method"]
        self.assertEqual(unannotated(ast.parse(SAMPLE)), expected)


if __name__ == "__main__":
    run_tests()
