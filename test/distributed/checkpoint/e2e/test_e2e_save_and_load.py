"""Train, save, load into a fresh model, and train on: synchronous or asynchronous saves, full or partial loads."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, FSDPModule, StateDictType, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_fsdp_tests.common_distributed import at_most, requires_capability, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp.delays import delay_device
from torch_fsdp_tests.common_fsdp.device import rank_device
from torch_fsdp_tests.common_utils import (
    TEST_WITH_SLOW,
    host_time,
    instantiate_parametrized_tests,
    manual_seed,
    parametrize,
    run_tests,
)
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.distributed.common_state_dict import EXACT, whole_tree
from torch_fsdp_tests.fsdp.checkpoints import (
    LAYOUTS,
    HostBackendMixin,
    Layout,
    LayoutsMixin,
    SavedRun,
    UnevenLayers,
    compiled,
    plain_run,
)
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.installed_torch import torch_names

state_dicts = torch_names.module("torch.distributed.checkpoint.state_dict")
loader = torch_names.module("torch.distributed.checkpoint.state_dict_loader")

DELAY_MS = 200.0  # longer than it takes to copy the states


def _ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    index = rank_device().index
    return DDP(model, device_ids=None if index is None else [index])


TYPES = {
    "FSDP": LAYOUTS["FSDP1 on 4"],
    "HSDP": LAYOUTS["FSDP1 on 2x2"],
    "DDP": Layout((4,), _ddp),
    "FSDP2": LAYOUTS["FSDP2 on 4"],
    "HSDP2": LAYOUTS["FSDP2 on 2x2"],
    "FSDP2_TP": LAYOUTS["FSDP2 and TP on 2x2"],
}
OFFLOADED = {
    "FSDP1, offloaded": Layout(
        (4,), lambda model, mesh: FSDP(model, device_mesh=mesh, use_orig_params=True, cpu_offload=CPUOffload(True))
    ),
    "FSDP2, offloaded": Layout(
        (4,), lambda model, mesh: fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy())
    ),
}


class TestStatefulObj:
    """An object with ``state_dict`` and ``load_state_dict``. It holds values that only this rank has."""

    __test__ = False

    def __init__(self, rank: int, seed: int) -> None:
        self.name = f"of rank {rank}"
        self.data = torch.rand(10, 10, generator=torch.Generator().manual_seed(10 * seed + rank))

    def state_dict(self) -> dict[str, Any]:
        return {self.name: self.data}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.data = state_dict[self.name]


class TestTrainState:
    """The progress of a training, saved as a tensor and as bytes."""

    __test__ = False

    def __init__(self) -> None:
        self.step = torch.zeros(1, dtype=torch.int32)
        self.outputs: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        outputs = io.BytesIO()
        torch.save(self.outputs, outputs)
        return {"step": self.step, "outputs": outputs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]
        state_dict["outputs"].seek(0)
        self.outputs = torch.load(state_dict["outputs"])


class Training:
    """A run, and the other objects that are saved with it."""

    def __init__(self, layout: Layout, seed: int) -> None:
        self.run = SavedRun(layout, seed)
        self.object = TestStatefulObj(dist.get_rank(), seed)
        self.progress = TestTrainState()
        self.probe = UnevenLayers().get_input(torch.Generator().manual_seed(5)).to(rank_device())

    def train(self, steps: range) -> None:
        for step in steps:
            self.run.train(range(step, step + 1))
            self.progress.step += 1
            self.progress.outputs.append(self.output())

    def output(self) -> float:
        """A number that depends on all parameters."""
        with torch.no_grad():
            return self.run.model(self.probe).sum().item()

    def saved(self) -> dict[str, Any]:
        """Everything to save: the model and the optimizer themselves, and the rest."""
        state_dicts._patch_model_state_dict(self.run.model)
        state_dicts._patch_optimizer_state_dict(self.run.model, optimizers=self.run.optim)
        return {
            "model": self.run.model,
            "optimizer": self.run.optim,
            "object": self.object,
            "progress": self.progress,
        }


class LateWriter(FileSystemWriter):
    """A writer that waits for a signal, so that the test can run steps before files are written."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.may_begin = threading.Event()

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        assert self.may_begin.wait(60)
        return super().write_data(*args, **kwargs)


def done(future: Any) -> Any:
    """The future of the written files, from the result of ``async_save``."""
    return getattr(future, "upload_completion", future)


class TestE2ESaveAndLoad(HostBackendMixin, LayoutsMixin, DTensorTestBase):
    world_size = at_most(4)

    def _run_e2e_test(self, layout: Layout, save: Callable[[dict[str, Any], str], object], path: str) -> None:
        """Loading restores all states bit for bit. The next steps equal those of an uninterrupted training.

        They also equal those of a plain training.
        """
        first = Training(layout, seed=0)
        first.train(range(2))
        expected = first.run.full()
        self.assertEqual(expected, plain_run(range(2)))
        save(first.saved(), path)

        second = Training(layout, seed=1)
        second.train(range(9, 10))
        self._check_all_differ(second.run, expected)
        self.assertNotEqual(second.object.data, first.object.data)
        dcp.load(second.saved(), checkpoint_id=path)
        self.assertEqual(second.run.full(), expected, rtol=0, atol=0)
        self.assertEqual(second.object.data, first.object.data, rtol=0, atol=0)
        self.assertEqual(second.progress.step.tolist(), [2])
        self.assertEqual(second.progress.outputs, first.progress.outputs, rtol=0, atol=0)

        for training in (first, second):
            training.train(range(2, 4))
        self.assertEqual(second.progress.outputs, first.progress.outputs, rtol=0, atol=0)
        self.assertEqual(second.run.full(), first.run.full(), rtol=0, atol=0)
        self.assertEqual(second.run.full(), plain_run(range(4)))
        self._check_loads_into_plain(second.run)

    def _check_loads_into_plain(self, run: SavedRun) -> None:
        """A plain optimizer can load the full state of the parallel one. The state equals that of plain training."""
        osd = get_optimizer_state_dict(run.model, run.optim, options=StateDictOptions(full_state_dict=True))
        plain = UnevenLayers().to(self.device)
        optim = torch.optim.Adam(plain.parameters(), lr=1.0)
        set_optimizer_state_dict(plain, optim, osd)
        expected = plain_run(range(4))
        for name, param in plain.named_parameters():
            for key in ("exp_avg", "exp_avg_sq"):
                self.assertEqual(optim.state[param][key], expected[f"{name}.{key}"], exact_device=False)
        self.assertEqual(optim.param_groups[0]["lr"], run.optim.param_groups[0]["lr"])

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @parametrize("compile", [True, False])
    def test_e2e(self, compile):
        # Compiling DTensors takes a minute.
        types = ["FSDP", "HSDP", "DDP"] if compile and not TEST_WITH_SLOW else list(TYPES)
        self.run_subtests({"model_type": types}, self._test_e2e, compile)

    def _test_e2e(self, compile: bool, model_type: str) -> None:
        layout = compiled(TYPES[model_type]) if compile else TYPES[model_type]
        path = os.path.join(self.temp_dir, model_type)
        self._run_e2e_test(layout, lambda state, path: dcp.save(state, checkpoint_id=path), path)

    # Asynchronous saves.

    def _async_save(self, state: dict[str, Any], path: str, group: dist.ProcessGroup, **kwargs: Any) -> Any:
        # A separate group is needed: otherwise collectives of the thread and the training would be in any order.
        return done(dcp.async_save(state, checkpoint_id=path, process_group=group, **kwargs))

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(cache_staged_state_dict=[False, True], model_type=["FSDP", "FSDP2"])
    def test_e2e_async_cached(self, cache_staged_state_dict, model_type):
        group = dist.new_group()
        path = os.path.join(self.temp_dir, f"{model_type} {cache_staged_state_dict}")

        def save(state: dict[str, Any], path: str) -> None:
            writer = FileSystemWriter(path, cache_staged_state_dict=cache_staged_state_dict)
            self._async_save(state, path, group, storage_writer=writer).result()

        self._run_e2e_test(TYPES[model_type], save, path)

    @requires_capability("pinned_memory", "streams")
    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(model_type=["FSDP", "FSDP2"])
    def test_e2e_async_zero_overhead_copy(self, model_type):
        """States are copied to pinned memory during training."""
        group, stager = dist.new_group(), DefaultStager(StagingOptions())

        def save(state: dict[str, Any], path: str) -> None:
            self._async_save(state, path, group, async_stager=stager).result()

        self._run_e2e_test(TYPES[model_type], save, os.path.join(self.temp_dir, model_type))
        stager.close()

    @with_comms
    @torch_defect("dcp_stager_is_used_once")
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(use_async_staging=[False, True])
    def test_stager_is_used_again(self, use_async_staging):
        """Each of three saves with one stager has the values from the time of this save (pytorch#183413)."""
        if use_async_staging and (why := accelerator.current().lacks("pinned_memory")):
            self.skipTest(why)
        options = StagingOptions(
            use_pinned_memory=use_async_staging,
            use_shared_memory=False,
            use_async_staging=use_async_staging,
            use_non_blocking_copy=use_async_staging,
        )
        group, stager = dist.new_group(), DefaultStager(options)
        weight = fully_shard(nn.Linear(2, 4, bias=False, device=self.device)).weight
        folders = [os.path.join(self.temp_dir, f"{use_async_staging} {save}") for save in range(3)]
        for save, folder in enumerate(folders):
            with torch.no_grad():
                weight.fill_(save)
            self._async_save({"weight": weight}, folder, group, async_stager=stager).result()
        actual = []
        for folder in folders:
            state = {"weight": weight}
            dcp.load(state, checkpoint_id=folder)
            actual.append(state["weight"].full_tensor().unique().tolist())
        self.assertEqual(actual, [[0.0], [1.0], [2.0]])
        stager.close()

    @requires_capability("streams", "sleep_kernel")
    @with_comms
    @skip_if_lt_x_gpu(1)
    def test_staging_waits_for_the_device(self):
        """``stage`` copies the states only after the device has finished its queued work."""
        state, stager = SavedRun(TYPES["FSDP2"]).state_dict(), DefaultStager(StagingOptions())
        began = host_time()
        delay_device(DELAY_MS)
        stager.stage(state).result()
        with torch_defect("dcp_staging_does_not_wait_for_the_step"):
            self.assertGreaterEqual(host_time() - began, DELAY_MS / 1e3)
        stager.close()

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(layout=["FSDP", "FSDP2", "FSDP2_TP", *OFFLOADED])
    def test_async_save_does_not_see_later_steps(self, layout):
        """Two steps run after ``async_save`` has returned and before a file is written.

        The checkpoint must have the states from before these steps, although the shards are updated in place.
        """
        path = os.path.join(self.temp_dir, layout)
        run = SavedRun({**TYPES, **OFFLOADED}[layout]).train(range(2))
        expected = run.full()
        writer = LateWriter(path)
        future = self._async_save(run.state_dict(), path, dist.new_group(), storage_writer=writer)
        later = run.train(range(2, 4)).full()
        self.assertFalse(future.done())
        writer.may_begin.set()
        future.result()
        for name, value in later.items():
            self.assertNotEqual(value, expected[name], msg=name)
        run.load(path)
        self.assertEqual(run.full(), expected, rtol=0, atol=0)
        self.assertEqual(run.train(range(2, 4)).full(), later, rtol=0, atol=0)

    def _test_async_save_of_sharded_tensors(self, path: str, **kwargs: Any) -> None:
        """FSDP1 without a mesh has ShardedTensors in its state dict. The last rank has none of three rows."""
        model = FSDP(filled(nn.Linear(2, 3, bias=False)).to(rank_device()), use_orig_params=True)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict()}
            expected = whole_tree(state)
            self._async_save(state, path, dist.new_group(), **kwargs).result()
            with torch.no_grad():
                for param in model.parameters():
                    param.zero_()
            actual = {"model": model.state_dict()}
            self.assertNotEqual(whole_tree(actual), expected)
            dcp.load(actual, checkpoint_id=path)
        self.assertEqual(whole_tree(actual), expected, **EXACT)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(cache_staged_state_dict=[False, True])
    def test_async_save_of_sharded_tensors(self, cache_staged_state_dict):
        """The writer copies the states of FSDP1 to the CPU."""
        path = os.path.join(self.temp_dir, str(cache_staged_state_dict))
        writer = FileSystemWriter(path, cache_staged_state_dict=cache_staged_state_dict)
        self._test_async_save_of_sharded_tensors(path, storage_writer=writer)

    @torch_defect("dcp_sharded_tensors_are_not_saved_asynchronously")
    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_async_save_of_sharded_tensors_by_default(self):
        self._test_async_save_of_sharded_tensors(self.temp_dir)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_two_saves_at_once(self):
        """Two checkpoints are written at the same time, and each has the states of its own step."""
        run = SavedRun(TYPES["FSDP2"])
        futures, writers, expected = [], [], []
        for step in range(2):
            run.train(range(step, step + 1))
            expected.append(run.full())
            writers.append(LateWriter(os.path.join(self.temp_dir, str(step))))
            group = dist.new_group()
            futures.append(self._async_save(run.state_dict(), str(writers[-1].path), group, storage_writer=writers[-1]))
        run.train(range(2, 3))
        for writer in reversed(writers):
            writer.may_begin.set()
        for future in futures:
            future.result()
        for step, state in enumerate(expected):
            run.load(os.path.join(self.temp_dir, str(step)))
            self.assertEqual(run.full(), state, rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(model_type=["FSDP", "FSDP2"])
    def test_async_save_that_fails(self, model_type):
        """If one rank cannot write, the future raises on all ranks, and training continues."""

        class BrokenWriter(FileSystemWriter):
            def write_data(writer, *args: Any, **kwargs: Any) -> Any:
                if self.rank == 2:
                    raise OSError("no such luck")
                return super().write_data(*args, **kwargs)

        path = os.path.join(self.temp_dir, model_type)
        run = SavedRun(TYPES[model_type]).train(range(2))
        future = self._async_save(run.state_dict(), path, dist.new_group(), storage_writer=BrokenWriter(path))
        with self.assertRaisesRegex(CheckpointException, "no such luck") as caught:
            future.result()
        self.assertEqual(set(caught.exception.failures), {2})
        self.assertEqual(run.train(range(2, 4)).full(), plain_run(range(4)))

    # Partial loads.

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(model_type=["FSDP", "FSDP2"])
    def test_partial_load(self, model_type):
        """A fresh model loads only the "model" part. Single parts are read in full without any model."""
        path = os.path.join(self.temp_dir, model_type)
        first = Training(TYPES[model_type], seed=0)
        first.train(range(2))
        wanted = first.run.full()
        names = list(dict(UnevenLayers().named_parameters()))
        dcp.save(first.saved(), checkpoint_id=path)

        second = Training(TYPES[model_type], seed=1)
        second.train(range(9, 10))
        before = second.run.full()
        dcp.load({"model": second.saved()["model"]}, checkpoint_id=path)
        actual = second.run.full()
        expected = {name: (wanted if name in names else before)[name] for name in actual}
        self.assertEqual(actual, expected, rtol=0, atol=0)

        loaded = loader._load_state_dict_from_keys("model", checkpoint_id=path)
        self.assertEqual(list(loaded), ["model"])
        self.assertEqual(loaded["model"], {name: wanted[name] for name in names}, rtol=0, atol=0, exact_device=False)
        loaded = loader._load_state_dict_from_keys("optimizer.state", checkpoint_id=path)
        self.assertEqual(list(loaded), ["optimizer"])
        self.assertEqual(list(loaded["optimizer"]), ["state"])
        for name in names:
            state = loaded["optimizer"]["state"][name]
            self.assertEqual(set(state), {"exp_avg", "exp_avg_sq", "step"})
            self.assertEqual(float(state["step"]), 2.0)
            for key in ("exp_avg", "exp_avg_sq"):
                self.assertEqual(state[key], wanted[f"{name}.{key}"], rtol=0, atol=0, exact_device=False)

    # Saves of more state, or at other moments.

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_scheduler_and_random_state(self):
        """If the scheduler and the random states are also saved, training continues bit for bit."""

        def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
            model = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Linear(5, 3)).to(self.device)
            fully_shard(filled(model, seed=seed), mesh=self.mesh)
            optim = torch.optim.Adam(model.parameters(), lr=0.1)
            return model, optim, torch.optim.lr_scheduler.StepLR(optim, step_size=1, gamma=0.5)

        def train(model: nn.Module, optim: torch.optim.Optimizer, scheduler: Any) -> list[float]:
            losses = []
            for _ in range(2):
                optim.zero_grad()
                loss = model(torch.rand(4, 3, device=self.device)).square().sum()
                loss.backward()
                optim.step()
                scheduler.step()
                losses.append(loss.item())
            return losses

        device_module, has_own = torch.get_device_module(self.device), not accelerator.current().is_cpu

        def state_of(model: nn.Module, optim: torch.optim.Optimizer, scheduler: Any) -> dict[str, Any]:
            msd, osd = get_state_dict(model, optim)
            own = {"host": torch.get_rng_state()}
            if has_own:
                own["device"] = device_module.get_rng_state()
            return {"model": msd, "optim": osd, "scheduler": scheduler, f"random numbers of rank {self.rank}": own}

        manual_seed(self.rank)
        first, second = build(0), build(1)
        train(*first)
        dcp.save(state_of(*first), checkpoint_id=self.temp_dir)
        expected = train(*first)
        self.assertEqual(len(set(expected)), 2)

        train(*second)
        state = state_of(*second)
        dcp.load(state, checkpoint_id=self.temp_dir)
        state_dicts.set_state_dict(*second[:2], model_state_dict=state["model"], optim_state_dict=state["optim"])
        own = state[f"random numbers of rank {self.rank}"]
        if has_own:
            device_module.set_rng_state(own["device"])
        torch.set_rng_state(own["host"])
        self.assertEqual(train(*second), expected, rtol=0, atol=0)
        self.assertEqual(second[1].param_groups[0]["lr"], 0.1 * 0.5**4)
        for param, other in zip(first[0].parameters(), second[0].parameters(), strict=True):
            self.assertEqual(param.to_local(), other.to_local(), rtol=0, atol=0, may_be="empty")

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(model_type=["FSDP", "FSDP2"])
    def test_save_while_gradients_accumulate(self, model_type):
        """A checkpoint between two backwards of one step has the states from before the step.

        Saving does not change the gradients: the step equals that of a training that was not saved.
        """
        path = os.path.join(self.temp_dir, model_type)
        run, twin = (SavedRun(TYPES[model_type]).train(range(2)) for _ in range(2))
        expected = run.full()
        for each in (run, twin):
            each.optim.zero_grad()
            with self._without_reduction(each.model):
                self._backward(each.model, 0)
                if each is run:
                    run.save(path)
            self._backward(each.model, 1)
            each.optim.step()
        self.assertEqual(run.full(), twin.full(), rtol=0, atol=0)
        self._check_all_differ(run, expected)
        run.load(path)
        self.assertEqual(run.full(), expected, rtol=0, atol=0)

    def _backward(self, model: nn.Module, seed: int) -> None:
        rows = UnevenLayers().get_input(torch.Generator().manual_seed(10 * seed + self.rank))
        model(rows.to(self.device)).sum().backward()

    @contextlib.contextmanager
    def _without_reduction(self, model: nn.Module) -> Iterator[None]:
        if isinstance(model, FSDP):
            with model.no_sync():
                yield
        else:
            assert isinstance(model, FSDPModule)
            model.set_requires_gradient_sync(False)
            yield
            model.set_requires_gradient_sync(True)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_save_while_gathered(self):
        """A checkpoint has the shards, also if parameters are unsharded after a forward under ``no_grad``.

        Training then continues.
        """
        run = SavedRun(TYPES["FSDP2"]).train(range(2))
        expected = run.full()
        assert isinstance(run.model, FSDPModule)
        run.model.set_reshard_after_forward(False)
        self._evaluate(run.model)
        run.save(self.temp_dir)
        other = SavedRun(TYPES["FSDP2"], seed=1).train(range(9, 10))
        other.load(self.temp_dir)
        self.assertEqual(other.full(), expected, rtol=0, atol=0)
        self.assertEqual(run.train(range(2, 4)).full(), plain_run(range(4)))

    def _evaluate(self, model: nn.Module) -> None:
        """Run a forward without gradients, and leave all parameters unsharded."""
        with torch.no_grad():
            model(UnevenLayers().get_input().to(self.device))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
        self.assertNotIsInstance(model.net1.weight, DTensor)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_optimizer_state_while_gathered(self):
        """``get_optimizer_state_dict`` does not find unsharded parameters in the optimizer, but ``get_state_dict``
        reshards.
        """
        run = SavedRun(TYPES["FSDP2"]).train(range(2))
        expected = copy.deepcopy(get_optimizer_state_dict(run.model, run.optim))
        assert isinstance(run.model, FSDPModule)
        run.model.set_reshard_after_forward(False)
        self._evaluate(run.model)
        self.assertRaises(KeyError, get_optimizer_state_dict, run.model, run.optim)
        self.assertEqual(get_state_dict(run.model, run.optim)[1], expected, rtol=0, atol=0)


instantiate_parametrized_tests(TestE2ESaveAndLoad)

if __name__ == "__main__":
    run_tests()
