"""A file in upstream's style, with only its import prefix changed."""

import ast
import os
import re
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist
from sources import PACKAGE, TESTS_OF_FSDP, trees

from torch_fsdp_tests import UPSTREAMS
from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import (
    TEST_SKIPS,
    DistributedTestBase,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    requires_nccl,
    requires_nccl_version,
    skip_if_lt_x_gpu,
)
from torch_fsdp_tests.common_utils import FILE_SCHEMA, TestCase, run_tests

NAMES = Path(__file__).with_name("inputs") / "upstream_names.txt"
OLD = {"common_fsdp": {"CUDAInitMode"}}
IMPORTED = [line for line in NAMES.read_text().splitlines() if not line.startswith("#")]


def defined_and_used() -> tuple[set[str], set[str]]:
    """The names that the replacements of upstream's modules define, and the names that this project uses.

    The import of a name into the ``__init__`` of its package does not count as a use.
    """
    defined, used = set(), set()
    for path, tree in trees(PACKAGE, TESTS_OF_FSDP):
        if path.is_relative_to(PACKAGE) and path.relative_to(PACKAGE).parts[0].removesuffix(".py") in UPSTREAMS:
            defined |= {node.name for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
            targets = (node.targets[0] for node in tree.body if isinstance(node, ast.Assign))
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and path.name != "__init__.py":
                used |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute):
                used.add(node.attr)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                used.add(node.id)
    return defined, used


class TestNames(TestCase):
    """Without it, a test file of upstream or of a vendor could stop working here."""

    def test_every_name_that_others_import_is_here(self):
        self.assertGreater(len(IMPORTED), 100)
        places = (name.rpartition(".") for name in IMPORTED)
        missing = [f"{at}.{name}" for at, _, name in places if not hasattr(import_module(f"{PACKAGE.name}.{at}"), name)]
        self.assertEqual(missing, [])

    def test_modules_list_their_names(self):
        """``import *`` gives them, but no name that a newer one has replaced."""
        modules: dict[str, set[str]] = {}
        for at, _, name in (name.rpartition(".") for name in IMPORTED):
            modules.setdefault(at, set()).add(name)
        unlisted = {at: names ^ {*import_module(f"{PACKAGE.name}.{at}").__all__} for at, names in modules.items()}
        self.assertEqual({at: names for at, names in unlisted.items() if names}, OLD)

    def test_no_name_is_kept_for_nobody(self):
        defined, used = defined_and_used()
        self.assertGreater(len(defined), 200)
        imported = {name.rpartition(".")[2] for name in IMPORTED}
        self.assertEqual(defined - used - imported - {"__all__", "__unittest"}, set())

    def test_places_are_those_of_the_package(self):
        self.assertEqual(list(UPSTREAMS), sorted({name.split(".")[0] for name in IMPORTED}))


class TestProcesses(MultiProcessTestCase):
    """Without it, an upstream test with processes could fail here for lack of a property or a decorator."""

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def tearDown(self):
        super().tearDown()
        try:
            os.remove(self.file_name)
        except OSError:
            pass

    @property
    def world_size(self) -> int:
        return 3

    @property
    def device(self) -> int:
        return self.rank

    @requires_nccl()
    @requires_nccl_version((2, 10), "for the sake of the test")
    @skip_if_lt_x_gpu(2)
    def test_file_name(self):
        method = f"{FILE_SCHEMA}{self.file_name}"
        dist.init_process_group("gloo", init_method=method, rank=self.rank, world_size=self.world_size)
        ranks = [None] * self.world_size
        dist.all_gather_object(ranks, self.rank)
        self.assertEqual(ranks, [0, 1, 2])
        self.assertEqual(self.is_master, dist.get_rank() == 0)


class TestSkipCodes(TestCase):
    """Without it, a rank that skips with a code of upstream could fail here, or skip with another reason."""

    def test_every_code_of_the_installed_torch_is_here(self):
        source = Path(torch.__file__).with_name("testing") / "_internal" / "common_distributed.py"
        upstreams = re.findall(r'"([\w-]+)": TestSkip\(\s*(\d+)', source.read_text())
        self.assertGreater(len(upstreams), 15)
        codes = [(name, str(skip.exit_code)) for name, skip in TEST_SKIPS.items()]
        self.assertEqual(set(upstreams) - set(codes), set())


class TestBase(DistributedTestBase):
    """Without it, an upstream test that calls ``create_pg`` could get no group, or one for another device."""

    world_size = 2

    def test_create_pg(self, device):
        group = self.create_pg(device)
        total = torch.full((2,), float(self.rank), device=device)
        dist.all_reduce(total, group=group)
        self.assertEqual(total, torch.ones(2, device=device))

    def test_create_pg_with_a_backend(self, device):
        group = self.create_pg(device, backend="fake")
        self.assertEqual(dist.get_backend(group), "fake")


class TestThreads(MultiThreadedTestCase):
    """Without it, an upstream test in threads could compare nothing on the rank that it names."""

    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_ranks(self):
        self.assertEqualOnRank(self.rank, 1, rank=1)
        self.assertNotEqualOnRank(self.rank, 1, rank=0)
        for differs, rank in ((self.assertEqualOnRank, 1), (self.assertNotEqualOnRank, 0)):
            if self.rank == rank:
                with self.assertRaises(AssertionError):
                    differs(self.rank, 1 - rank if rank else 0, rank=rank)


instantiate_device_type_tests(TestBase, globals())

if __name__ == "__main__":
    run_tests()
