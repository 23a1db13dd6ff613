"""FSDP1 models are saved with ``torch.distributed.checkpoint`` and loaded into another model or world size.

After a load, training gives the values of an uninterrupted run. Loading a damaged checkpoint raises on all ranks, and
the model does not change.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.fsdp import (
    CPUOffload,
    FullStateDictConfig,
    LocalStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, enable_wrap, wrap

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import get_required_world_size, requires_world_size, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest, SkipModel
from torch_fsdp_tests.common_fsdp.substitutes import to_host_is_a_copy
from torch_fsdp_tests.common_utils import parametrize, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import full_parameters

FULL, LOCAL, SHARDED = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
)
# In a fixed order, because the names of parametrized tests contain the index.
_DISTRIBUTED_STATE_DICT_IMPLS = (LOCAL, SHARDED)
CONFIGS = {FULL: FullStateDictConfig, LOCAL: LocalStateDictConfig, SHARDED: ShardedStateDictConfig}
FEATURES = 6
ROWS = 4  # of the batch of all ranks; a multiple of each world size that trains


def layers(seed: int, device: torch.device, hidden: int = 3, outputs: int = 1) -> nn.Sequential:
    """Layers of 3 x 6 and 1 x 3, with biases. Neither their rows nor their elements divide evenly by 2 or 4."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).to(device)


def shards(model: nn.Module) -> list[torch.Tensor]:
    """Copies of this rank's flat shards, without padding."""
    return [
        flat_param.detach()[: flat_param.numel() - internals.padding_of(flat_param)].clone()
        for flat_param in internals.flat_params(model)
    ]


@contextlib.contextmanager
def mode(model: nn.Module, kind: StateDictType, **config: bool) -> Iterator[None]:
    """Set the state dict type of ``model`` within the context."""
    with to_host_is_a_copy(), FSDP.state_dict_type(model, kind, CONFIGS[kind](**config)):
        yield


class TestDistributedCheckpoint(FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @parametrize("state_dict_type", _DISTRIBUTED_STATE_DICT_IMPLS)
    def test_distributed_checkpoint(self, device, state_dict_type):
        with enable_wrap(wrapper_cls=FSDP, device_id=torch.device(device)):
            torch.manual_seed(100)
            model = wrap(SkipModel(double_nest=True))
            torch.manual_seed(200)
            model_new = wrap(SkipModel(double_nest=True))
        self.assertEqual(list(full_parameters(model)), list(full_parameters(model_new)))
        for name, value in full_parameters(model).items():
            self.assertNotEqual(full_parameters(model_new)[name], value)

        with mode(model, state_dict_type), mode(model_new, state_dict_type):
            dcp.save(model.state_dict(), storage_writer=FileSystemWriter(self.temp_dir))
            state_dict = model_new.state_dict()
            dcp.load(state_dict, storage_reader=FileSystemReader(self.temp_dir))
            model_new.load_state_dict(state_dict)
        self.assertEqual(full_parameters(model_new), full_parameters(model), rtol=0, atol=0)


class TestCheckpointOnDisk(FSDPTest):
    """Shards, different world sizes, continued training, and damaged checkpoints."""

    @property
    def world_size(self) -> int:
        return get_required_world_size(self, 4)

    def _wrapped(self, model: nn.Module, group: dist.ProcessGroup | None = None, **kwargs: Any) -> FSDP:
        return FSDP(model, group, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **kwargs)

    def _path(self, *names: object) -> str:
        return os.path.join(self.temp_dir, *map(str, names))

    @requires_world_size(3)
    @with_temp_dir
    @subtests(kind=_DISTRIBUTED_STATE_DICT_IMPLS)
    def test_shards_of_each_rank(self, kind):
        """Each rank's shards get the values of the saved model, even if a shard is empty.

        On three ranks, the last layer (1 x 3 with a bias) gives the third rank an empty shard of the flat parameter,
        and two ranks empty shards of its rows. Values outside the state dict do not change: non-persistent buffers and
        ``requires_grad``.
        """

        def build(seed: int) -> FSDP:
            model = layers(seed, self.device)
            model[2].requires_grad_(seed == 0)
            model.register_buffer("kept", torch.full((2,), float(seed), device=self.device), persistent=False)
            model.register_buffer("saved", torch.full((2,), float(seed), device=self.device))
            return self._wrapped(model)

        model, other = build(0), build(1)
        path = self._path(kind)
        before, expected = shards(other), shards(model)
        with mode(model, kind), mode(other, kind):
            # Local state dicts hold the live shards, so without a copy dcp.load would change the model.
            state_dict, loaded = model.state_dict(), copy.deepcopy(other.state_dict())
            self.assertEqual(list(loaded), list(state_dict))
            rows = {name: value for name, value in state_dict.items() if name != "saved"}
            empty = [name for name, value in rows.items() if not value.local_shards()]
            self.assertEqual(len(empty), {LOCAL: [0, 0, 1], SHARDED: [0, 2, 2]}[kind][self.rank])
            dcp.save(state_dict, storage_writer=FileSystemWriter(path))
            dcp.load(loaded, storage_reader=FileSystemReader(path))
            other.load_state_dict(loaded)

        self.assertEqual(shards(other), expected, rtol=0, atol=0)
        self.assertEqual(len(expected), 2)
        for value, old in zip(expected, before, strict=True):
            self.assertEqual(torch.equal(value, old), value.numel() == 0)
        self.assertEqual(full_parameters(other), dict(layers(0, self.device).named_parameters()), rtol=0, atol=0)
        self.assertEqual(other.module.kept.tolist(), [1.0, 1.0])
        self.assertEqual(other.module.saved.tolist(), [0.0, 0.0])
        self.assertEqual([flat_param.requires_grad for flat_param in internals.flat_params(other)], [True, False])

    # Continued training.

    def _step(self, model: nn.Module, optim: torch.optim.Optimizer, step: int, rank: int = 0, size: int = 1) -> None:
        """One step on this rank's rows. FSDP averages the ranks' means, which gives the mean over all rows."""
        rows = torch.randn(ROWS, FEATURES, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        optim.zero_grad()
        model(rows.to(self.device)).square().mean().backward()
        optim.step()

    def _save(self, path: str, model: FSDP, optim: torch.optim.Optimizer, kind: StateDictType, **config: bool) -> None:
        """With ``rank0_only``, only rank 0 writes the model. Otherwise all ranks of its group write it.

        The optimizer state is saved in shards of each parameter. This includes LOCAL_STATE_DICT, although it is
        documented as not supported yet for optimizers.
        """
        group = model.process_group
        with mode(model, kind, **config):
            state_dict = model.state_dict()
        if not config.get("rank0_only"):
            dcp.save(state_dict, storage_writer=FileSystemWriter(f"{path}/model"), process_group=group)
        elif group.rank() == 0:
            dcp.save(state_dict, storage_writer=FileSystemWriter(f"{path}/model"), no_dist=True)
        else:
            self.assertEqual(state_dict, {}, may_be="empty")
        with mode(model, LOCAL if kind is LOCAL else SHARDED):
            state_dict = FSDP.optim_state_dict(model, optim, group=group)
        kinds = {type(state["exp_avg"]) for state in state_dict["state"].values()}
        self.assertEqual(kinds, {internals.sharded_tensors.ShardedTensor})
        dcp.save(state_dict, storage_writer=FileSystemWriter(f"{path}/optim"), process_group=group)

    def _load(self, path: str, model: FSDP, optim: torch.optim.Optimizer, kind: StateDictType, **config: bool) -> None:
        group = model.process_group
        with mode(model, kind, **config):
            state_dict = model.state_dict()
            with torch.no_grad():  # because flat shards are views made under it
                dcp.load(state_dict, storage_reader=FileSystemReader(f"{path}/model"), process_group=group)
            model.load_state_dict(state_dict)
        with mode(model, LOCAL if kind is LOCAL else SHARDED):
            state_dict = FSDP.optim_state_dict(model, optim, group=group)
            # A workaround for the defect dcp_checkpoint_of_empty_shards_is_not_loaded.
            planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
            reader = FileSystemReader(f"{path}/optim")
            dcp.load(state_dict, storage_reader=reader, planner=planner, process_group=group)
            optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, state_dict, group=group))

    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_training_goes_on_sharded(self):
        """Sharded state dicts of model and optimizer load in the same world size or another one."""
        config = {"sizes": [(2, 2), (2, 4), (4, 2), (4, 1)], "offload_to_cpu": [False, True]}
        self.run_subtests(config, self._test_training_goes_on, self._first_ranks(), SHARDED)

    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_training_goes_on_local(self):
        """Local state dicts, which have flat shards, load in the same world size or another one.

        ``test_flat_shards_for_one_rank`` covers a single rank, which does not shard.
        """
        config = {"sizes": [(2, 2), (4, 4), (2, 4), (4, 2)], "offload_to_cpu": [False, True]}
        self.run_subtests(config, self._test_training_goes_on, self._first_ranks(), LOCAL)

    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_flat_shards_for_one_rank(self):
        """A single rank has full state dicts, so its model does not load flat shards.

        The errors of the planner and of the model name the keys, and training continues as if nothing had been loaded.
        The checkpoint is complete: read as a tensor, each flat parameter is a layer's weight followed by its bias.
        """
        model, optim = self._trained(0, dist.group.WORLD)
        saved = full_parameters(model)
        self._save(self.temp_dir, model, optim, LOCAL)
        groups = [dist.new_group([rank]) for rank in range(self.world_size)]
        (model, optim), (twin, twin_optim) = (self._trained(1, groups[self.rank]) for _ in range(2))
        before = full_parameters(model)
        flat = {
            f"{layer}._flat_param": torch.cat([saved[f"{layer}.weight"].flatten(), saved[f"{layer}.bias"]])
            for layer in (0, 2)
        }
        actual = {name: torch.zeros_like(value) for name, value in flat.items()}
        reader = FileSystemReader(f"{self.temp_dir}/model")
        with mode(model, LOCAL):
            with self.assertWarnsRegex(UserWarning, "full_state_dict will be returned"):
                state_dict = model.state_dict()
            self.assertEqual(list(state_dict), list(before))
            with self.assertRaisesRegex(CheckpointException, r"Missing key in checkpoint state_dict: 0\.(weight|bias)"):
                dcp.load(state_dict, storage_reader=reader, process_group=groups[self.rank])
            dcp.load(actual, storage_reader=reader, process_group=groups[self.rank])
            self.assertEqual(actual, flat, rtol=0, atol=0)
            words = r'Missing key\(s\) in state_dict: "0.weight"(.|\n)*Unexpected key\(s\) .*"0._flat_param"'
            with self.assertRaisesRegex(RuntimeError, words):
                model.load_state_dict(actual)
        self.assertEqual(full_parameters(model), before, rtol=0, atol=0)
        for step in (2, 3):
            self._step(model, optim, step)
            self._step(twin, twin_optim, step)
        self.assertEqual(full_parameters(model), full_parameters(twin), rtol=0, atol=0)

    @skip_if_lt_x_gpu(4)
    def test_flat_shards_of_more_ranks(self):
        """Loading flat shards of four ranks directly on two ranks raises on both, because the sizes differ."""
        pair = dist.new_group([0, 1])
        source, _ = self._trained(0, dist.group.WORLD)
        with mode(source, LOCAL):
            state_dict = source.state_dict()
        if self.rank > 1:
            return
        (model, optim), (twin, twin_optim) = (self._trained(1, pair) for _ in range(2))
        before = shards(model)
        with mode(model, LOCAL), self.assertRaisesRegex(RuntimeError, r"size mismatch for (\S+\.)?0\.\S*_flat_param"):
            model.load_state_dict(state_dict)
        self.assertEqual(shards(model), before, rtol=0, atol=0)
        for step in (2, 3):
            self._step(model, optim, step, self.rank, 2)
            self._step(twin, twin_optim, step, self.rank, 2)
        self.assertEqual(shards(model), shards(twin), rtol=0, atol=0)

    def _trained(self, seed: int, group: dist.ProcessGroup) -> tuple[FSDP, torch.optim.Optimizer]:
        """A model after two steps on the group's ranks."""
        model = self._wrapped(layers(seed, self.device), group)
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(2):
            self._step(model, optim, step, group.rank(), group.size())
        return model, optim

    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_training_goes_on_full(self):
        """Full state dicts, written by all ranks together or by rank 0 only."""
        config = {
            "sizes": [(2, 2), (2, 4), (4, 2), (4, 1)],
            "offload_to_cpu": [False, True],
            "rank0_only": [False, True],
        }
        self.run_subtests(config, self._test_training_goes_on, self._first_ranks(), FULL)

    def _first_ranks(self) -> dict[int, dist.ProcessGroup]:
        """Groups of the first ranks, by world size."""
        return {size: dist.new_group(list(range(size))) for size in (1, 2, 4)}

    def _test_training_goes_on(
        self,
        groups: dict[int, dist.ProcessGroup],
        kind: StateDictType,
        sizes: tuple[int, int],
        offload_to_cpu: bool,
        rank0_only: bool = False,
    ) -> None:
        path = self._path(kind, *sizes, offload_to_cpu, rank0_only)
        adam = functools.partial(torch.optim.Adam, lr=1e-2)

        def sharded(seed: int, size: int) -> tuple[FSDP, torch.optim.Optimizer, Callable[[int], None]]:
            offload = CPUOffload(offload_params=offload_to_cpu)
            model = self._wrapped(layers(seed, self.device), groups[size], cpu_offload=offload)
            optim = adam(model.parameters())
            return model, optim, functools.partial(self._step, model, optim, rank=self.rank, size=size)

        ref_model = layers(0, self.device)
        ref_step = functools.partial(self._step, ref_model, adam(ref_model.parameters()))
        saved_by, loaded_by = sizes
        for step in range(2):
            ref_step(step)
        saved = {}
        if self.rank < saved_by:
            source, optim, source_step = sharded(0, saved_by)
            for step in range(2):
                source_step(step)
            saved = full_parameters(source)
            config = {"rank0_only": True} if rank0_only else {}
            self._save(path, source, optim, kind, offload_to_cpu=offload_to_cpu, **config)
        dist.barrier()

        if self.rank < loaded_by:
            model, optim, model_step = sharded(1, loaded_by)
            model_step(9)  # gives the optimizer a state that the load must replace
            self._load(path, model, optim, kind, offload_to_cpu=offload_to_cpu)
            actual = full_parameters(model)
            if saved:
                self.assertEqual(actual, saved, rtol=0, atol=0)
        for step in range(2, 5):
            ref_step(step)
            if self.rank < loaded_by:
                model_step(step)
                # The ranks' means are averaged in another order, so the values are not bitwise equal.
                self.assertEqual(full_parameters(model), dict(ref_model.named_parameters()))
            if saved_by == loaded_by and self.rank < saved_by:
                source_step(step)
                self.assertEqual(shards(model), shards(source), rtol=0, atol=0)

    @requires_world_size(2)
    @with_temp_dir
    def test_optimizer_of_ignored_parameters(self):
        """The optimizer state of a parameter that FSDP ignores is loaded as an unsharded tensor."""
        plain = layers(0, self.device, hidden=4, outputs=4)
        model = FSDP(plain, ignored_states=[plain[2]])
        optim = torch.optim.Adam(model.parameters())
        self._step(model, optim, 0, self.rank, self.world_size)
        with mode(model, SHARDED):
            dcp.save({"optim": FSDP.optim_state_dict(model, optim)}, checkpoint_id=self.temp_dir)
            reader = FileSystemReader(self.temp_dir)
            loaded = dcp.load_sharded_optimizer_state_dict(model.state_dict(), "optim", reader)
            loaded_by = torch.optim.Adam(model.parameters())
            loaded_by.load_state_dict(FSDP.optim_state_dict_to_load(model, loaded_by, loaded["optim"]))
        actual = loaded_by.state[plain[2].weight]["exp_avg"]
        with torch_defect("dcp_ignored_optim_state_is_loaded_sharded"):
            self.assertIs(type(actual), torch.Tensor)
            self.assertEqual(actual.shape, plain[2].weight.shape)
            loaded_by.step()

    # Damage.

    @requires_world_size(2)
    @with_temp_dir
    @subtests(
        kind=[FULL, LOCAL, SHARDED],
        damage=["missing shard", "truncated shard", "missing metadata", "truncated metadata", "shape", "key"],
    )
    def test_damaged_checkpoint(self, kind, damage):
        """If one rank cannot read, all ranks raise an error. The model does not change and can still be trained.

        The test loads into a copy of the state dict. Local state dicts hold the live shards, so without a copy the
        values that are read before the error would be in the model.
        """
        path = self._path(kind, damage)
        source = self._wrapped(layers(0, self.device))
        with mode(source, kind):
            dcp.save(source.state_dict(), storage_writer=FileSystemWriter(path))
        dist.barrier()
        if self.rank == 0:
            self._damage(path, damage)
        dist.barrier()

        def build() -> tuple[FSDP, torch.optim.Optimizer]:
            model = layers(1, self.device, hidden=4 if damage == "shape" else 3)
            if damage == "key":
                model.append(nn.Linear(1, 1, device=self.device))
            model = self._wrapped(model)
            optim = torch.optim.Adam(model.parameters(), lr=1e-2)
            self._step(model, optim, 0, self.rank, self.world_size)
            return model, optim

        (model, optim), (twin, twin_optim) = build(), build()
        before = shards(model)
        with mode(model, kind):
            state_dict = copy.deepcopy(model.state_dict())
            with self.assertRaises(CheckpointException) as caught:
                dcp.load(state_dict, storage_reader=FileSystemReader(path))
        self._check_failures(caught.exception, kind, damage)
        self.assertEqual(shards(model), before, rtol=0, atol=0)
        for step in (1, 2):
            self._step(model, optim, step, self.rank, self.world_size)
            self._step(twin, twin_optim, step, self.rank, self.world_size)
        self.assertEqual(shards(model), shards(twin), rtol=0, atol=0)

    def _damage(self, path: str, damage: str) -> None:
        file = os.path.join(path, ".metadata" if "metadata" in damage else "__1_0.distcp")
        if damage.startswith("missing"):
            os.remove(file)
        elif damage.startswith("truncated"):
            os.truncate(file, os.path.getsize(file) // 2)

    def _check_failures(self, error: CheckpointException, kind: StateDictType, damage: str) -> None:
        """The exception must have the ranks that failed and the error of each."""
        # Each rank reads all full tensors, but only its own shards.
        own = "shard" in damage and kind is not FULL
        self.assertEqual(set(error.failures), {1} if own else {0, 1})
        for failure, _ in error.failures.values():
            kinds, words = {
                "missing shard": (FileNotFoundError, r"__1_0\.distcp"),
                "truncated shard": ((EOFError, RuntimeError), "Error"),
                "missing metadata": (AssertionError, "Error"),
                "truncated metadata": (AssertionError, "Error"),
                "shape": (ValueError, r"Size mismatch between saved torch.Size\(.*\) and current"),
                "key": (RuntimeError, r"Missing key in checkpoint state_dict: 3\."),
            }[damage]
            self.assertIsInstance(failure, kinds)
            self.assertRegex(f"{type(failure).__name__}: {failure}", words)

    @requires_world_size(2)
    @with_temp_dir
    def test_surplus_in_checkpoint(self):
        """``dcp.load`` ignores extra values in the checkpoint. ``load_state_dict`` raises for extra values."""
        for kind in (FULL, SHARDED):
            path = self._path(kind)
            larger = self._wrapped(layers(0, self.device).append(nn.Linear(1, 1, device=self.device)))
            model = self._wrapped(layers(1, self.device))
            with mode(larger, kind), mode(model, kind):
                dcp.save(larger.state_dict(), storage_writer=FileSystemWriter(path))
                whole, state_dict = larger.state_dict(), model.state_dict()
                dcp.load(state_dict, storage_reader=FileSystemReader(path))
                model.load_state_dict(state_dict)
                expected = {name: value for name, value in full_parameters(larger).items() if not name.startswith("3.")}
                self.assertEqual(full_parameters(model), expected, rtol=0, atol=0)
                with self.assertRaisesRegex(RuntimeError, r'Unexpected key\(s\) in state_dict: "3.weight", "3.bias"'):
                    model.load_state_dict(whole)
                self.assertEqual(full_parameters(model), expected, rtol=0, atol=0)


instantiate_device_type_tests(TestDistributedCheckpoint, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
