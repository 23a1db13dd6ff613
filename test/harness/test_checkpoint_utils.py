"""The shared directory of checkpoint tests, over processes, threads, and a single rank; copies of state dicts."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from samples import Processes

from torch_fsdp_tests.common_distributed.multi_threaded import run_threads
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.distributed.common_state_dict import copied
from torch_fsdp_tests.verdict import RankResult, State


class Method:
    """A test instance as the decorators see it."""

    temp_dir: str

    @with_temp_dir
    def write_and_list(self, rank: int, after: Callable[[], object] = lambda: None) -> tuple[str | None, list[str]]:
        with open(os.path.join(self.temp_dir, str(rank)), "x"):
            pass
        after()
        return self.temp_dir, sorted(os.listdir(self.temp_dir))

    @with_temp_dir
    def fail(self) -> None:
        raise LookupError(self.temp_dir)


class TestCopies(TestCase):
    """Without it, a test could load the model's own memory into the model."""

    def test_copies_share_no_memory(self):
        whole: dict[str, Any] = {"state": {"weight": torch.ones(2)}, "groups": [{"lr": 0.1, "params": ["weight"]}]}
        copy = copied(whole)
        self.assertEqual(copy, whole)
        copy["state"]["weight"].zero_()
        copy["groups"][0]["params"].append("bias")
        self.assertEqual(whole["state"]["weight"], torch.ones(2))
        self.assertEqual(whole["groups"], [{"lr": 0.1, "params": ["weight"]}])


class TestLastOut(TestCase):
    """Without it, a checkpoint test could fail now and then because another rank has removed the directory."""

    def test_folder_removed_by_the_other_rank(self):
        """Both ranks may have seen all markers. Then one of them looks at a directory that the other has removed."""
        list_files = os.listdir

        def removed_first(path: str) -> list[str]:
            if os.path.basename(path) != "files":
                shutil.rmtree(path)
            return list_files(path)

        with mock.patch.object(os, "listdir", removed_first):
            path, _ = Method().write_and_list(0)
        self.assertFalse(os.path.exists(os.path.dirname(path)))


class TestSharedDirectory(Processes):
    """Without it, ranks could write parts of a checkpoint to different directories, or leave these on the disk."""

    world_size = 2

    def init(self) -> None:
        dist.init_process_group("gloo", rank=self.rank, world_size=2, store=dist.FileStore(self.file_name, 2))
        self.addCleanup(dist.destroy_process_group)

    def test_folder_is_removed_by_the_last_rank(self):
        self.init()
        store = dist.distributed_c10d._get_default_store()
        if self.rank == 0:
            Method().write_and_list(0)
            store.set("rank 0 is out", "")
        else:
            path, names = Method().write_and_list(1, after=lambda: store.wait(["rank 0 is out"]))
            self.assertEqual(names, ["0", "1"])
            self.assertFalse(os.path.exists(os.path.dirname(path)))

    def test_folder_is_removed_when_a_rank_fails(self):
        self.init()
        instance = Method()
        if self.rank == 0:
            with self.assertRaises(LookupError):
                instance.fail()
        else:
            instance.write_and_list(1)
        dist.barrier()
        self.assertFalse(os.path.exists(os.path.dirname(instance.temp_dir)))

    def test_threads_share_a_folder_that_is_removed(self):
        paths: list[Any] = [None] * 3
        names: list[Any] = [None] * 3

        def live(rank: int) -> RankResult:
            paths[rank], names[rank] = Method().write_and_list(rank, after=dist.barrier)
            return RankResult.report(rank, State.PASSED)

        run_threads(3, live)
        self.assertEqual(names, [["0", "1", "2"]] * 3)
        self.assertEqual(len(set(paths)), 1)
        self.assertFalse(os.path.exists(os.path.dirname(paths[0])))


class TestAlone(TestCase):
    """Without it, a test without a process group could get another test's directory, or leave its own on the disk."""

    def test_each_process_has_a_folder_without_a_group(self):
        first, second = Method(), Method()
        path, names = first.write_and_list(0)
        self.assertEqual(names, ["0"])
        self.assertTrue(path.startswith(tempfile.gettempdir()))
        with self.assertRaisesRegex(LookupError, "shared_"):
            second.fail()
        self.assertNotEqual(first.temp_dir, second.temp_dir)
        for instance in (first, second):
            self.assertFalse(os.path.exists(os.path.dirname(instance.temp_dir)))


if __name__ == "__main__":
    run_tests()
