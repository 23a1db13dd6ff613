"""A file in upstream's style, with only its import prefix changed."""

import ast
import os
import re
import unittest
import unittest.mock
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
    DynamoDistributedMultiProcTestCase,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    cleanup_temp_dir,
    initialize_temp_directories,
    requires_nccl,
    requires_nccl_version,
    requires_world_size,
    skip_if_lt_x_gpu,
    with_dist_debug_levels,
)
from torch_fsdp_tests.common_fsdp import get_devtype
from torch_fsdp_tests.common_utils import FILE_SCHEMA, TestCase, run_tests
from torch_fsdp_tests.device import accelerator

NAMES = Path(__file__).with_name("inputs") / "upstream_names.txt"
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

    def test_no_name_is_kept_for_nobody(self):
        defined, used = defined_and_used()
        self.assertGreater(len(defined), 200)
        self.assertEqual(defined - used - {name.rpartition(".")[2] for name in IMPORTED} - {"__unittest"}, set())

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

    @skip_if_lt_x_gpu(2, allow_cpu=False)
    def test_accelerator_only(self):
        self.assertNotEqual(get_devtype().type, "cpu")

    @requires_world_size(2)
    def test_requires_world_size(self):
        self.assertEqual(vars(type(self).test_requires_world_size)["_required_world_size"], 2)


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


class TestDebugLevels(DynamoDistributedMultiProcTestCase):
    """Without it, a test for several levels of torch's checks could run once, or leak a level."""

    seen: list

    def setUp(self):
        self.assertEqual(self.world_size, accelerator.current().ranks)
        super().setUp()

    @with_dist_debug_levels(["DETAIL", "INFO"])
    def _run_at_each_level(self, fails: bool = False) -> int:
        self.seen.append((os.environ["TORCH_DISTRIBUTED_DEBUG"], dist.get_debug_level()))
        if fails:
            raise ZeroDivisionError
        return len(self.seen)

    def _check(self) -> None:
        self.create_pg(accelerator.current().type)
        level, variable = dist.get_debug_level(), os.environ.get("TORCH_DISTRIBUTED_DEBUG")
        self.seen = []
        with unittest.mock.patch.object(dist, "barrier", side_effect=lambda: self.seen.append("barrier")):
            self.assertEqual(self._run_at_each_level(), 3)
        detail, info = ("DETAIL", dist.DebugLevel.DETAIL), ("INFO", dist.DebugLevel.INFO)
        self.assertEqual(self.seen, [detail, "barrier", info, "barrier"])
        with self.assertRaises(ZeroDivisionError):
            self._run_at_each_level(fails=True)
        self.assertEqual((dist.get_debug_level(), os.environ.get("TORCH_DISTRIBUTED_DEBUG")), (level, variable))

    def test_levels(self):
        os.environ.pop("TORCH_DISTRIBUTED_DEBUG", None)
        self._check()
        with self.assertRaisesRegex(ValueError, "with_dist_debug_levels has no level"):
            with_dist_debug_levels([])

    @unittest.mock.patch.dict(os.environ, {"TORCH_DISTRIBUTED_DEBUG": "OFF"})
    def test_levels_with_one_before(self):
        self._check()


class TestDirectories(MultiProcessTestCase):
    """Without it, the ranks of an upstream test could have no directory, or each its own, or leak it."""

    world_size = 2

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        initialize_temp_directories()
        cls.directory = os.environ["TEMP_DIR"]

    @classmethod
    def tearDownClass(cls):
        initialize_temp_directories("env://")
        assert not os.path.exists(cls.directory), "the first directory is left"
        assert os.environ["INIT_METHOD"] == "env://"
        directory = os.environ["TEMP_DIR"]
        cleanup_temp_dir()
        cleanup_temp_dir()
        assert not os.path.exists(directory), "the second directory is left"
        assert not {"TEMP_DIR", "INIT_METHOD"} & os.environ.keys()
        super().tearDownClass()

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_ranks_share_it(self):
        self.assertEqual(sorted(os.listdir(os.environ["TEMP_DIR"])), ["barrier", "init_dir", "test_dir"])
        dist.init_process_group("gloo", init_method=os.environ["INIT_METHOD"], rank=self.rank, world_size=2)
        directories = [None] * 2
        dist.all_gather_object(directories, os.environ["TEMP_DIR"])
        self.assertEqual(len(set(directories)), 1)


class TestThreads(MultiThreadedTestCase):
    """Without it, an upstream test in threads could run without ``perThreadSetUp`` or ``assertEqualOnRank``."""

    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def perThreadSetUp(self):
        self.prepared = True

    def test_ranks(self):
        ranks = [None] * self.world_size
        dist.all_gather_object(ranks, self.rank)
        self.assertEqual(ranks, [0, 1])
        self.assertTrue(self.prepared)
        self.assertEqualOnRank(self.rank, 1, rank=1)
        self.assertNotEqualOnRank(self.rank, 1, rank=0)
        for differs, rank in ((self.assertEqualOnRank, 1), (self.assertNotEqualOnRank, 0)):
            if self.rank == rank:
                with self.assertRaises(AssertionError):
                    differs(self.rank, 1 - rank if rank else 0, rank=rank)


instantiate_device_type_tests(TestBase, globals())

if __name__ == "__main__":
    run_tests()
