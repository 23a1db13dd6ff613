"""Checkpoints that are incomplete, damaged, or made of files that do not belong together.

There are two right results: an error on every rank, or the values of one checkpoint. Mixed or invented values are never
right. After an error, the same ranks or new ones can load the previous checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.common_distributed import requires, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.checkpoints import LAYOUTS, HostBackendMixin, SavedRun, plain_run
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.launches import LaunchesTestCase
from torch_fsdp_tests.fsdp.references import of_all_ranks
from torch_fsdp_tests.fsdp.shards import local_of
from torch_fsdp_tests.verdict import Reason

BOTH = ["FSDP1 on 2", "FSDP2 on 2"]
METADATA = ".metadata"
FULL_DISK = Path("/dev/full")

requires_full_disk = requires(
    lambda: None if FULL_DISK.exists() else Reason(f"needs {FULL_DISK}, a file that is always full")
)


def shard_file(rank: int) -> str:
    """The file that this rank writes."""
    return f"__{rank}_0.distcp"


FILES = [shard_file(0), shard_file(1), f"{METADATA}.tmp"]


def contents(path: str) -> dict[str, bytes]:
    """The contents of the files in a directory."""
    return {file.name: file.read_bytes() for file in Path(path).iterdir()}


# The damage that a file can have after it was written.


def _cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


def _overwritten_with_noise(file: Path) -> None:
    file.write_bytes(b"\x5a" * file.stat().st_size)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": Path.unlink,
    "empty": lambda file: os.truncate(file, 0),
    "cut": _cut,
    "short of a byte": lambda file: os.truncate(file, file.stat().st_size - 1),
    "noise": _overwritten_with_noise,
}


class FaultTest(HostBackendMixin, DTensorTestBase):
    """The common parts of the tests of faults, for ranks that are launched once or several times."""

    temp_dir: str

    def _path(self, name: str) -> str:
        return os.path.join(self.temp_dir, name)

    def _save(self, run: SavedRun, path: str, asynchronously: bool = False, **kwargs: Any) -> None:
        """Save the run, and wait until the save is complete or has failed."""
        if asynchronously:
            # A separate group is needed: otherwise collectives of the thread and the training would be in any order.
            group = dist.new_group()
            future: Any = dcp.async_save(run.state_dict(), checkpoint_id=path, process_group=group, **kwargs)
            getattr(future, "upload_completion", future).result()
        else:
            run.save(path, **kwargs)

    def _check_rejects(self, run: SavedRun, path: str, *ranks: int) -> str:
        """On every rank, loading must raise an error that names at least these ranks. Returns the error message."""
        with self.assertRaises(CheckpointException) as caught:
            run.load(path)
        self.assertLessEqual(set(ranks), set(caught.exception.failures))
        return str(caught.exception)

    def _check_recovers(self, run: SavedRun, path: str) -> None:
        """The checkpoint of two steps can be loaded, and the next two steps equal those of a plain training."""
        run.load(path)
        self.assertEqual(run.full(), plain_run(range(2)))
        self.assertEqual(run.train(range(2, 4)).full(), plain_run(range(4)))

    def _check_rejected_or_right(self, run: SavedRun, path: str, steps: range) -> None:
        """Loading must raise an error on every rank, or give the states after these steps."""
        try:
            run.load(path)
        except CheckpointException:
            return
        self.assertEqual(run.full(), plain_run(steps))

    def _on_first_rank(self, change: Callable[[], object]) -> None:
        if self.rank == 0:
            change()
        dist.barrier()


class TestDamagedCheckpoint(FaultTest):
    world_size = 2

    def _checkpoints(self, layout: str, name: object) -> tuple[SavedRun, str, str]:
        """A run of three steps, and its checkpoints: a good one of two steps, and one of three that will be damaged."""
        run = SavedRun(LAYOUTS[layout]).train(range(2))
        good, bad = (self._path(f"{layout} {name} {kind}") for kind in ("good", "bad"))
        run.save(good)
        run.train(range(2, 3)).save(bad)
        return run, good, bad

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(pairwise=True, layout=BOTH, rank=[0, 1], damage=list(DAMAGES))
    def test_shard_file(self, layout, rank, damage):
        """If one rank's file is damaged, all ranks get an error that names the rank that could not read its shard."""
        run, good, bad = self._checkpoints(layout, (rank, damage))
        self._on_first_rank(lambda: DAMAGES[damage](Path(bad, shard_file(rank))))
        self._check_rejects(run, bad, rank)
        self._check_recovers(run, good)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(pairwise=True, layout=BOTH, damage=list(DAMAGES))
    def test_metadata_file(self, layout, damage):
        """Without a complete metadata file nothing is loaded, and the states do not change."""
        run, good, bad = self._checkpoints(layout, damage)
        self._on_first_rank(lambda: DAMAGES[damage](Path(bad, METADATA)))
        before = run.full()
        self._check_rejects(run, bad, 0, 1)
        self.assertEqual(run.full(), before, rtol=0, atol=0)
        self._check_recovers(run, good)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(layout=BOTH)
    def test_metadata_of_another_model(self, layout):
        """The error names the parameters whose names or shapes differ, and the states do not change."""
        run, good, bad = self._checkpoints(layout, "")
        before = run.full()
        for name, model_class, says in (
            ("names", OtherNames, "Missing key in checkpoint state_dict: model.net[12]"),
            ("shapes", OtherShapes, "Size mismatch between saved .* and current: .* for model.net[12]"),
        ):
            other = self._path(f"{layout} {name}")
            SavedRun(LAYOUTS[layout], model_class=model_class).train(range(1)).save(other)
            self._on_first_rank(functools.partial(shutil.copy, Path(other, METADATA), bad))
            self.assertRegex(self._check_rejects(run, bad, 0, 1), says)
        self.assertEqual(run.full(), before, rtol=0, atol=0)
        self._check_recovers(run, good)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(layout=BOTH)
    def test_altered_values(self, layout):
        """A bit that is flipped in a file changes one element. DCP compares no checksums, nor does ``torch.load``."""
        run, good, bad = self._checkpoints(layout, "")
        of_each_rank = of_all_ranks(local_of(run.state_dict()["model"]["net1.bias"]))
        self._on_first_rank(lambda: turn_a_bit(Path(bad, shard_file(1)), of_each_rank[1]))
        run.load(bad)
        loaded, saved = run.full(), plain_run(range(3))
        differ = {name: int((~torch.isclose(loaded[name], value)).sum()) for name, value in saved.items()}
        self.assertEqual({name: count for name, count in differ.items() if count}, {"net1.bias": 1})
        self._check_recovers(run, good)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(layout=BOTH)
    def test_shard_file_of_another_step(self, layout):
        """If one file is from an earlier checkpoint, as after an incomplete copy, a load raises or is right."""
        run, good, bad = self._checkpoints(layout, "")
        self._on_first_rank(lambda: shutil.copy(Path(good, shard_file(1)), bad))
        with torch_defect("dcp_interrupted_overwrite_mixes_checkpoints"):
            self._check_rejected_or_right(run, bad, range(3))
        self._check_recovers(run, good)


class OtherNames(nn.Module):
    """The shapes of ``UnevenLayers`` under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())

    def get_input(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return torch.rand(2, 3, generator=generator)


class OtherShapes(nn.Module):
    """The names of ``UnevenLayers``, with other shapes of the same size."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(5, 3), nn.Linear(3, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.net1(x).tanh())

    def get_input(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return torch.rand(2, 5, generator=generator)


def turn_a_bit(file: Path, values: torch.Tensor) -> None:
    """Flip a bit of these values at their place in the file."""
    data, expected = bytearray(file.read_bytes()), values.detach().cpu().numpy().tobytes()
    data[data.index(expected) + 2] ^= 1 << 6
    file.write_bytes(data)


class TestSaveThatFails(FaultTest):
    world_size = 2

    @requires_full_disk
    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(
        pairwise=True, layout=BOTH, file=[shard_file(0), shard_file(1), f"{METADATA}.tmp"], asynchronously=[False, True]
    )
    def test_full_disk(self, layout, file, asynchronously):
        """The disk has no room for one of the files. All ranks get the reason, and nothing loadable is left."""
        run = SavedRun(LAYOUTS[layout]).train(range(2))
        good, bad = (self._path(f"{layout} {file} {asynchronously} {kind}") for kind in ("good", "bad"))
        self._save(run, good, asynchronously)
        run.train(range(2, 3))
        os.makedirs(bad, exist_ok=True)
        self._on_first_rank(functools.partial(os.symlink, FULL_DISK, os.path.join(bad, file)))
        with self.assertRaisesRegex(CheckpointException, "No space left on device") as caught:
            self._save(run, bad, asynchronously)
        self.assertEqual(set(caught.exception.failures), {1 if file == shard_file(1) else 0})
        self._check_rejects(run, bad, 0, 1)
        self._check_recovers(run, good)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(layout=BOTH)
    def test_room_for_a_part(self, layout):
        """The disk becomes full in the middle of one rank's file, while an older checkpoint is overwritten.

        The next checkpoint can be saved in the same directory.
        """
        path = self._path(layout)
        run = SavedRun(LAYOUTS[layout]).train(range(2))
        run.save(path)
        with self.assertRaisesRegex(CheckpointException, "File too large") as caught:
            with at_most(2000) if self.rank == 1 else contextlib.nullcontext():
                run.train(range(2, 3)).save(path)
        self.assertEqual(set(caught.exception.failures), {1})
        self._check_rejects(run, path, 1)
        run.save(path)
        other = SavedRun(LAYOUTS[layout], seed=1)
        other.load(path)
        self.assertEqual(other.train(range(3, 4)).full(), plain_run(range(4)))

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_room_for_a_part_of_a_large_tensor(self):
        """The disk becomes full in the middle of a tensor that is larger than the file buffers."""
        model = fully_shard(nn.Linear(100, 100, device=self.device), mesh=self.mesh)
        with self.assertRaises(CheckpointException) as caught:
            with at_most(10000):
                dcp.save(model.state_dict(), checkpoint_id=self.temp_dir)
        self.assertEqual(set(caught.exception.failures), {0, 1})
        self.assertFalse(os.path.exists(self._path(METADATA)))
        self.assertIn("unexpected pos", str(caught.exception))  # torch.save hides the cause

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(layout=BOTH)
    def test_rank_that_did_not_overwrite_its_file(self, layout):
        """One rank fails before it opens its file. The older checkpoint in the directory is unchanged or rejected."""
        path = self._path(layout)
        run = SavedRun(LAYOUTS[layout]).train(range(2))
        run.save(path)
        writer = FileSystemWriter(path)
        if self.rank == 1:
            writer.write_data = mock.Mock(side_effect=OSError("no such luck"))
        with self.assertRaisesRegex(CheckpointException, "no such luck"):
            run.train(range(2, 3)).save(path, storage_writer=writer)
        with torch_defect("dcp_interrupted_overwrite_mixes_checkpoints"):
            self._check_rejected_or_right(run, path, range(2))

    @requires_full_disk
    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(layout=BOTH)
    def test_full_disk_in_a_thread(self, layout):
        """If the disk is full for one of two writer threads of one rank, the save raises."""
        path = self._path(layout)
        run = SavedRun(LAYOUTS[layout]).train(range(2))
        writer = FileSystemWriter(path, thread_count=2)
        if self.rank == 1:
            writer.fs.create_stream = FullForThreads(writer.fs.create_stream)
        with mock.patch.object(threading, "excepthook"):
            with (
                torch_defect("dcp_failed_writer_thread_is_not_noticed"),
                self.assertRaisesRegex(CheckpointException, "No space left on device"),
            ):
                run.save(path, storage_writer=writer)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(pairwise=True, layout=BOTH, asynchronously=[False, True])
    def test_overwrite_is_refused(self, layout, asynchronously):
        """With ``overwrite=False`` a save into a directory with a checkpoint raises, and changes no byte."""
        path = self._path(f"{layout} {asynchronously}")
        run = SavedRun(LAYOUTS[layout]).train(range(2))
        self._save(run, path, asynchronously)
        before = contents(path)
        run.train(range(2, 3))
        with self.assertRaisesRegex(CheckpointException, "already exists") as caught:
            self._save(run, path, asynchronously, storage_writer=FileSystemWriter(path, overwrite=False))
        self.assertEqual(set(caught.exception.failures), {0, 1})
        self.assertEqual(contents(path), before)
        self._check_recovers(run, path)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(pairwise=True, layout=BOTH, overwrite=[False, True])
    def test_directory_with_other_files(self, layout, overwrite):
        """Files that are not a checkpoint stay as they are, and do not prevent a save into the directory."""
        path = self._path(f"{layout} {overwrite}")
        others = {"notes.txt": b"mine", "__9_0.distcp": b"of no rank"}

        def put() -> None:
            os.mkdir(path)
            for name, data in others.items():
                Path(path, name).write_bytes(data)

        self._on_first_rank(put)
        run = SavedRun(LAYOUTS[layout]).train(range(2))
        run.save(path, storage_writer=FileSystemWriter(path, overwrite=overwrite))
        run.train(range(2, 3))
        self.assertEqual({name: contents(path)[name] for name in others}, others)
        self.assertEqual(set(contents(path)), {*others, METADATA, shard_file(0), shard_file(1)})
        self._check_recovers(run, path)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(layout=BOTH)
    def test_path_of_a_file(self, layout):
        """If the path of the checkpoint is that of a file, all ranks raise, and the file is unchanged."""
        path = self._path(layout)
        self._on_first_rank(lambda: Path(path).write_bytes(b"mine"))
        run = SavedRun(LAYOUTS[layout]).train(range(2))
        with self.assertRaises(CheckpointException) as caught:
            run.save(path)
        self.assertEqual(set(caught.exception.failures), {0, 1})
        self._check_rejects(run, path, 0, 1)
        self.assertEqual(Path(path).read_bytes(), b"mine")
        self.assertEqual(run.train(range(2, 4)).full(), plain_run(range(4)))

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_files_are_whole_when_they_are_synced(self):
        """Files are complete when they are synced, so a crash of the machine loses no checkpoint reported as saved."""
        synced, sync = [], os.fsync

        def note(descriptor: int) -> None:
            synced.append(os.fstat(descriptor).st_size)
            sync(descriptor)

        model = fully_shard(nn.Linear(2, 2, device=self.device), mesh=self.mesh)
        with mock.patch.object(os, "fsync", note):
            dcp.save(model.state_dict(), checkpoint_id=self.temp_dir)
        written = [shard_file(self.rank), METADATA][: 2 - self.rank]
        with torch_defect("dcp_metadata_is_synced_too_early", when=self.rank == 0):
            self.assertEqual(synced, [len(contents(self.temp_dir)[name]) for name in written])

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(code=["EINVAL", "ENOTSUP"])
    def test_file_system_without_fsync(self, code):
        """A checkpoint can be saved to a file system that does not support ``fsync``."""
        run, path = SavedRun(LAYOUTS["FSDP2 on 2"]).train(range(2)), self._path(code)
        with torch_defect("dcp_unsupported_fsync_fails_the_save"), sync_that_raises(getattr(errno, code)):
            self._save(run, path)
            self._check_recovers(run, path)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_disk_fails_when_it_is_synced(self):
        """If the disk fails to sync a file, the checkpoint is not reported as saved."""
        run = SavedRun(LAYOUTS["FSDP2 on 2"]).train(range(2))
        with sync_that_raises(errno.EIO), self.assertRaisesRegex(CheckpointException, os.strerror(errno.EIO)) as caught:
            self._save(run, self._path("bad"))
        self.assertEqual(set(caught.exception.failures), {0, 1})
        self._check_rejects(run, self._path("bad"), 0, 1)


def sync_that_raises(code: int) -> Any:
    """Make all attempts to sync a file raise this error of the operating system."""
    return mock.patch.object(os, "fsync", side_effect=OSError(code, os.strerror(code)))


@contextlib.contextmanager
def at_most(size: int) -> Iterator[None]:
    """Limit the size of files to ``size`` bytes, to simulate a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class FullForThreads:
    """Opens files for the main thread, which waits for another thread. For other threads the disk is full."""

    def __init__(self, create_stream: Callable[..., Any]) -> None:
        self._create_stream, self._begun = create_stream, threading.Event()

    def __call__(self, path: Any, mode: str) -> Any:
        if threading.current_thread() is threading.main_thread():
            if "distcp" in str(path):
                assert self._begun.wait(60)
            return self._create_stream(path, mode)
        self._begun.set()
        return self._create_stream(FULL_DISK, mode)


class TestKilledRank(LaunchesTestCase, FaultTest):
    """A rank is killed while it saves. Then the job is launched again."""

    def _check_resumes(self, layout: str, victim: int, moment: str, asynchronously: bool = False) -> None:
        """The new ranks reject the incomplete checkpoint, and load the previous one."""
        self._kill(layout, victim, moment, asynchronously=asynchronously, path="bad")
        self.complete(self._resume, 2, layout=layout)

    def _kill(self, layout: str, victim: int, moment: str, **settings: Any) -> None:
        """Launch ranks that save two checkpoints. One rank is killed during the second save."""
        reports = self.launch(self._save_and_die, 2, layout=layout, victim=victim, moment=moment, **settings)
        self.assertEqual(reports[victim].signal, "SIGKILL")
        other = reports[1 - victim]
        # With gloo the other rank detects that the connection is gone. With other backends it may wait until killed.
        self.assertTrue(other.reported == "error" if other.reported else other.killed, other)

    @with_comms
    def _save_and_die(self) -> None:
        settings = self.settings
        run = SavedRun(LAYOUTS[settings["layout"]]).train(range(2))
        run.save(self._path("good"))
        writer = DyingWriter(self._path(settings["path"]), settings["moment"], self.rank == settings["victim"])
        self._save(run.train(range(2, 3)), str(writer.path), settings["asynchronously"], storage_writer=writer)

    @with_comms
    def _resume(self) -> None:
        run = SavedRun(LAYOUTS[self.settings["layout"]], seed=1).train(range(9, 10))
        self._check_rejects(run, self._path("bad"), 0, 1)
        self._check_recovers(run, self._path("good"))

    @with_comms
    def _resume_overwritten(self) -> None:
        run = SavedRun(LAYOUTS[self.settings["layout"]], seed=1).train(range(9, 10))
        with torch_defect("dcp_interrupted_overwrite_mixes_checkpoints"):
            self._check_rejected_or_right(run, self._path("good"), range(2))

    def test_before_planning(self):
        self._check_resumes("FSDP2 on 2", victim=1, moment="prepare_local_plan")

    def test_before_writing(self):
        self._check_resumes("FSDP1 on 2", victim=1, moment="write_data")

    def test_coordinator_before_writing(self):
        self._check_resumes("FSDP2 on 2", victim=0, moment="write_data", asynchronously=True)

    def test_coordinator_before_it_names_the_metadata(self):
        """All files are complete, but the metadata still has a temporary name."""
        self._check_resumes("FSDP1 on 2", victim=0, moment="rename", asynchronously=True)

    def test_while_it_overwrites(self):
        """Both checkpoints use the same directory. Rank 0 has written its new file, and rank 1 has not."""
        for layout in BOTH:
            self._kill(layout, victim=1, moment="after the other", asynchronously=False, path="good")
            self.complete(self._resume_overwritten, 2, layout=layout)


class DyingWriter(FileSystemWriter):
    """A writer on all ranks. One rank is killed at a ``moment``, which is the name of the method that it calls then."""

    def __init__(self, path: str, moment: str, dies: bool) -> None:
        super().__init__(path)
        self._waits, self._dies = moment == "after the other", dies
        owner: Any = self.fs if moment == "rename" else self
        if dies and not self._waits:
            setattr(owner, moment, lambda *args: os.kill(os.getpid(), signal.SIGKILL))

    def write_data(self, *args: Any) -> Any:
        if not self._waits:
            return super().write_data(*args)
        written = None if self._dies else super().write_data(*args)
        dist.barrier()
        if self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return written


if __name__ == "__main__":
    run_tests()
