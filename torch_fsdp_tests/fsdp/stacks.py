"""MLPs that tensor parallelism shards before FSDP2."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.common_distributed import run_subtests
from torch_fsdp_tests.common_fsdp import MLPStack
from torch_fsdp_tests.common_utils import TEST_WITH_SLOW, manual_seed
from torch_fsdp_tests.fsdp.combinations import one_by_one, pairwise_cases
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.training import FEW, Loop, TrainingMixin, check_full, optimizers
from torch_fsdp_tests.installed_torch import torch_facts


class StacksMixin(TrainingMixin):
    """For a test case with ranks: MLPs that tensor parallelism shards before FSDP2."""

    def _check_stacks(
        self,
        tp_mesh: DeviceMesh,
        dp_mesh: DeviceMesh,
        flat_dp_mesh: DeviceMesh,
        pairwise: bool = False,
        iterations: int = FEW,
    ) -> None:
        """Train with all combinations of settings, or with those that have each pair of values. ``flat_dp_mesh`` is the
        flattened ``dp_mesh``.
        """
        # Size 3 leaves a rank empty, 5 and 17 are uneven, and 16 is even.
        dims = [3, 5, 16, 17] if TEST_WITH_SLOW else [3, 16, 17]
        config: dict[str, Sequence[Any]] = {
            "reshard_after_forward": [False, True],
            "use_activation_checkpointing": [False, True],
            "mlp_dim": dims if torch_facts.GATHERS_UNEVEN_STRIDED_SHARDS else [16],
        }
        loop = Loop(
            average=functools.partial(average_gradients, group=flat_dp_mesh.get_group()),
            data_rank=flat_dp_mesh.get_local_rank(),
            iterations=iterations,
        )
        for case in one_by_one(pairwise_cases(config)) if pairwise else [config]:
            run_subtests(self, case, self._check_stack, (tp_mesh, dp_mesh), loop)

    def _check_stack(
        self,
        meshes: tuple[DeviceMesh, DeviceMesh],
        loop: Loop,
        reshard_after_forward: bool,
        use_activation_checkpointing: bool,
        mlp_dim: int,
    ) -> None:
        tp_mesh, dp_mesh = meshes
        manual_seed(42)
        model = MLPStack(mlp_dim)
        ref_model = self._replica(model)
        model.parallelize(tp_mesh, dp_mesh, use_activation_checkpointing, reshard_after_forward=reshard_after_forward)
        check_full(self, ref_model, model)
        settings: dict[str, Any] = {}
        if mlp_dim == 16 and not use_activation_checkpointing:
            settings = {"cls": torch.optim.SGD, "momentum": 0.9}  # the fastest optimizer for DTensors
        optims = optimizers(ref_model, model, foreach=False, **settings)
        self._check_training(ref_model, model, lambda: self._inputs(8, mlp_dim), loop, optims)
        names = (*(dp_mesh.mesh_dim_names or ()), *(tp_mesh.mesh_dim_names or ()))
        for param in model.parameters():
            self.assertIsInstance(param, DTensor)
            self.assertEqual(param.device_mesh.mesh_dim_names, names)
            self.assertEqual(len(param.placements), len(names))
