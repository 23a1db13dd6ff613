"""FSDP1's optimizer states in checkpoints on disk, and states that a load rejects."""

from __future__ import annotations

import copy
import itertools
import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import CPUOffload, StateDictSettings
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.common_distributed import requires_world_size, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import flags, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.optim_states import (
    FULL_EVERYWHERE,
    FULL_ON_RANK_0,
    SHARDED,
    SHARDS,
    BlockA,
    BlockB,
    Group,
    NestedModel,
    OptimStateTest,
    Training,
    gathered,
    group_of,
    set_state_dict_type,
)
from torch_fsdp_tests.fsdp.references import full_parameters


class TwoBlocks(nn.Sequential):
    """One block and one bias of the other block are FSDP instances. Four ranks shard both of them unevenly."""

    features = 5

    def __init__(self) -> None:
        super().__init__(BlockB(5, 3), BlockA(3, 5))

    def wrap(self, **kwargs: Any) -> None:
        self[0] = FSDP(self[0], **kwargs)
        self[1].bias_module0 = FSDP(self[1].bias_module0, **kwargs)


class TestFSDPOptimState(OptimStateTest):
    @skip_if_lt_x_gpu(2)
    def test_damaged_state_is_refused(self):
        """Loading a damaged state raises an error with the reason. The optimizer does not change."""
        run = self._init_nested_model(NestedModel.wrap)
        self._train(run, 3)
        model, optim = run.model, run.optim
        set_state_dict_type(model, FULL_EVERYWHERE)
        good = FSDP.optim_state_dict(model, optim)
        before = copy.deepcopy(optim.state_dict()), full_parameters(model)

        def shape(state: dict[str, Any]) -> None:
            state["block1.weight"]["exp_avg"] = state["block1.weight"]["exp_avg"].t()

        def dtype(state: dict[str, Any]) -> None:
            state["block1.weight"]["exp_avg"] = state["block1.weight"]["exp_avg"].double()

        def names(state: dict[str, Any]) -> None:
            del state["block1.weight"]["exp_avg"]

        def kind(state: dict[str, Any]) -> None:
            state["block1.weight"]["exp_avg"] = 1.0

        def dimension(state: dict[str, Any]) -> None:
            state["block1.weight"]["exp_avg"] = torch.tensor(1.0)

        def steps(state: dict[str, Any]) -> None:
            state["block1.weight"]["step"] = torch.tensor(7.0)

        def parameter(state: dict[str, Any]) -> None:
            del state["block1.bias_module1.bias"]

        for damage, message in {
            shape: "Tensor optimizer state does not have same shape as its parameter",
            dtype: "must have positive-dimension tensor state with the same dtype",
            names: "Differing optimizer state names for the unflattened parameters",
            kind: "Differing optimizer state types for state exp_avg",
            dimension: "Differing optimizer state types for state exp_avg",
            steps: "must have scalar state with the same value and dtype",
            parameter: "must have scalar state with the same value and dtype",
        }.items():
            osd = copy.deepcopy(good)
            damage(osd["state"])
            with self.subTest(damage.__name__), self.assertRaisesRegex(ValueError, message):
                FSDP.optim_state_dict_to_load(model, optim, osd, load_directly=True)
        with self.assertRaisesRegex(ValueError, '`optim_state_dict` must have the keys "state"'):
            FSDP.optim_state_dict_to_load(model, optim, {"param_groups": []}, load_directly=True)
        unknown = copy.deepcopy(good)
        unknown["param_groups"][0]["params"].append("nowhere.bias")
        with self.assertRaisesRegex(KeyError, "nowhere.bias"):
            FSDP.optim_state_dict_to_load(model, optim, unknown, load_directly=True)
        self._check_same_osd(optim.state_dict(), before[0], rtol=0, atol=0)
        self.assertEqual(full_parameters(model), before[1], rtol=0, atol=0)

    @requires_world_size(4)
    @with_temp_dir
    def test_checkpoint_on_disk(self):
        """A checkpoint loads on as many, more or fewer ranks, and training continues like that of a plain model."""
        groups = {size: group_of(range(size)) for size in (4, 2, 1)}
        kinds = [SHARDS, FULL_EVERYWHERE, FULL_ON_RANK_0]
        # All pairs of sizes, settings and use_orig_params are tested, and all triples if slow tests are enabled.
        for number, (saved_by, settings) in enumerate(itertools.product([4, 2], kinds)):
            path, orig = os.path.join(self.temp_dir, str(number)), number % 2 == 1
            if self.rank < saved_by:
                run = self._init_two_blocks(orig, groups[saved_by])
                self._train(run, 3)
                state = self._state_on_disk(run, settings, orig)
                dcp.save(state, checkpoint_id=path, process_group=groups[saved_by])
            dist.barrier()
            for also_orig, loaded_by in enumerate([4, 2, 1] if saved_by == 4 else [4]):
                which = [False, True] if flags.TEST_WITH_SLOW else [(number + also_orig) % 2 == 1]
                config = {"loaded_by": [loaded_by], "use_orig_params": which, "settings": [settings]}
                self.run_subtests(config, self._test_load_from_disk, path, groups)

    def _init_two_blocks(self, use_orig_params: bool | None, group: Group = None) -> Training:
        """The two blocks wrapped with FSDP. With None for ``use_orig_params``, a plain model."""
        model = TwoBlocks().to(self.device)
        if use_orig_params is not None:
            # Offload only without use_orig_params: both options are independent, so not all combinations are needed.
            offload = CPUOffload(not use_orig_params)
            model.wrap(use_orig_params=use_orig_params, cpu_offload=offload, process_group=group)
        return Training(model, torch.optim.Adam(model.parameters(), lr=0.01), group=group)

    def _state_on_disk(self, run: Training, settings: StateDictSettings, use_orig_params: bool) -> dict[str, Any]:
        settings = copy.deepcopy(settings)
        offload, has_copies = not use_orig_params, accelerator.current().has("device_memory")
        settings.optim_state_dict_config.offload_to_cpu = offload
        # On the CPU, offloading a full state dict does not copy the unsharded tensors, whose memory is then freed.
        settings.state_dict_config.offload_to_cpu = offload and (settings.state_dict_type is SHARDED or has_copies)
        set_state_dict_type(run.model, settings)
        osd = FSDP.optim_state_dict(run.model, run.optim, group=run.group)
        # Without parameter groups; test_load_where_a_rank_has_no_rows says why.
        return {"model": run.model.state_dict(), "optim": osd.get("state", {})}

    def _test_load_from_disk(
        self,
        path: str,
        groups: dict[int, Group],
        loaded_by: int,
        settings: StateDictSettings,
        use_orig_params: bool,
    ) -> None:
        if self.rank >= loaded_by:
            return
        reference, group = self._init_two_blocks(None), groups[loaded_by]
        self._train(reference, 3)
        run = self._init_two_blocks(use_orig_params, group)
        run.iteration = 50  # a step on another batch, which the load must undo
        self._train(run, 1)
        self.assertNotEqual(full_parameters(run.model), dict(reference.model.named_parameters()))
        state = self._state_on_disk(run, settings, use_orig_params)
        dcp.load(state, checkpoint_id=path, process_group=group)
        run.model.load_state_dict(state["model"])
        osd = FSDP.optim_state_dict(run.model, run.optim, group=group)
        osd = {**osd, "state": state["optim"]} if osd else {}
        FSDP.optim_state_dict_to_load(run.model, run.optim, osd, load_directly=True, group=group)
        osd = FSDP.optim_state_dict(run.model, run.optim, group=group)
        self._check_saved(osd, reference, group, settings == FULL_ON_RANK_0)
        run.iteration = reference.iteration
        self._train(run, 3)
        self._train(reference, 3)
        self.assertEqual(full_parameters(run.model), dict(reference.model.named_parameters()), exact_device=False)

    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_load_into_states_of_a_new_optimizer(self):
        """``dcp.load`` into the state dict of an optimizer that has taken no step loads all states."""
        saved, loaded = (self._init_nested_model(NestedModel.wrap) for _ in range(2))
        self._train(saved, 2)
        for run in (saved, loaded):
            set_state_dict_type(run.model, SHARDS)
        dcp.save({"optim": FSDP.optim_state_dict(saved.model, saved.optim)}, checkpoint_id=self.temp_dir)
        state = {"optim": FSDP.optim_state_dict(loaded.model, loaded.optim)}
        dcp.load(state, checkpoint_id=self.temp_dir)
        loaded.optim.load_state_dict(FSDP.optim_state_dict_to_load(loaded.model, loaded.optim, state["optim"]))
        with torch_defect("fsdp1_optim_state_of_new_optimizer_is_empty"):
            self.assertEqual([*loaded.optim.state.values()], [*saved.optim.state.values()])

    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_load_where_a_rank_has_no_rows(self):
        """An optimizer state dict loads from disk even if a rank has an empty shard of a parameter."""
        model = FSDP(nn.Linear(3, 1, device=self.device))
        optim = torch.optim.Adam(model.parameters())
        model(torch.randn(4, 3, device=self.device)).sum().backward()
        optim.step()
        set_state_dict_type(model, SHARDS)
        saved = {"optim": FSDP.optim_state_dict(model, optim)}
        dcp.save(saved, checkpoint_id=self.temp_dir)
        loaded = {"optim": FSDP.optim_state_dict(model, optim)}
        with torch_defect("dcp_checkpoint_of_empty_shards_is_not_loaded"):
            try:
                dcp.load(loaded, checkpoint_id=self.temp_dir)
            except CheckpointException as error:  # a BaseException, which unittest does not count as a failure
                self.fail(str(error))
            self.assertEqual(*(gathered(each["optim"]["state"]) for each in (loaded, saved)))

    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_damaged_checkpoint(self):
        """Loading a damaged checkpoint raises on every rank. Training continues as if nothing had been loaded."""
        # The root is also wrapped, because parameters outside FSDP would be loaded in place.
        model = FSDP(self._init_nested_model(NestedModel.wrap).model)
        run, reference = Training(model, torch.optim.Adam(model.parameters(), lr=0.01)), self._init_nested_model(None)
        self._train_alike(reference, run, iterations=3)
        set_state_dict_type(model, SHARDS)

        def state() -> dict[str, Any]:
            return {"model": run.model.state_dict(), "optim": FSDP.optim_state_dict(run.model, run.optim)}

        def save(name: str, damage: Callable[[dict[str, Any]], object] = lambda states: None) -> str:
            path, saved = os.path.join(self.temp_dir, name), state()
            for key in saved["model"]:  # every value in the file differs from the model's
                saved["model"][key] = torch.zeros_like(saved["model"][key])
            damage(saved["optim"]["state"]["block1.weight"])
            dcp.save(saved, checkpoint_id=path)
            return path

        def on_rank_0(damage: Callable[[], object]) -> None:
            if self.rank == 0:
                damage()
            dist.barrier()

        good = save("good")
        copies = {name: os.path.join(self.temp_dir, name) for name in ("missing", "truncated", "headless")}
        on_rank_0(lambda: [shutil.copytree(good, path) for path in copies.values()])
        second = "__1_0.distcp"
        on_rank_0(lambda: os.remove(os.path.join(copies["missing"], second)))
        on_rank_0(lambda: os.truncate(os.path.join(copies["truncated"], second), 100))
        on_rank_0(lambda: os.remove(os.path.join(copies["headless"], ".metadata")))
        shape = save("shape", lambda state: state.update(exp_avg=torch.zeros(3, 8)))
        key = save("key", lambda state: state.pop("exp_avg"))

        before = copy.deepcopy(run.optim.state_dict()), full_parameters(run.model)
        for path, message in {
            copies["missing"]: second,
            copies["truncated"]: "PytorchStreamReader failed|EOFError|unexpected end",
            copies["headless"]: r"\.metadata|metadata is (not )?None",
            shape: "Size mismatch between saved .* and current: .* for optim.state.block1.weight.exp_avg",
            key: "Missing key in checkpoint state_dict: optim.state.block1.weight.exp_avg",
        }.items():
            with self.subTest(os.path.basename(path)), self.assertRaisesRegex(CheckpointException, message):
                dcp.load(state(), checkpoint_id=path)
        self._check_same_osd(run.optim.state_dict(), before[0], rtol=0, atol=0)
        self.assertEqual(full_parameters(run.model), before[1], rtol=0, atol=0)
        self._train_alike(reference, run, iterations=3)


if __name__ == "__main__":
    run_tests()
