"""A small model is trained in each layout with every pair of features, saved, and trained on in each other layout."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp.combinations import pairwise_cases
from torch_fsdp_tests.fsdp.seeded import uniform
from torch_fsdp_tests.models import ModelTestCase

LAYOUTS = ["fsdp1", "fsdp1_hsdp", "fsdp1_noshard", "fsdp1_tp", "fsdp2", "fsdp2_hsdp", "fsdp2_tp", "replicate"]
FEATURES = ["bf16", "offload", "ac", "frozen", "nosync"]
AXES: dict[str, list[Any]] = {"saved": LAYOUTS, "loaded": LAYOUTS, **{name: [False, True] for name in FEATURES}}


def is_valid(saved: str, loaded: str, offload: bool, frozen: bool, nosync: bool, **others: bool) -> bool:
    """Whether another layout loads, and the case is none that :class:`TestFsdp1UnderTp` or ``TestNoShard`` limits."""
    fails_under_tp = loaded == "fsdp1_tp" or (saved == "fsdp1_tp" and (frozen or nosync))
    return saved != loaded and not fails_under_tp and not (loaded == "fsdp1_noshard" and offload)


def name_of(saved: str, loaded: str, **features: bool) -> str:
    return "_".join([saved, *(name for name in FEATURES if features[name]), f"dcp_to_{loaded}"])


class TestTrainingMatrix(ModelTestCase):
    """Some ranks have no rows of a layer. A whole layer and a part of another one are frozen."""

    configurations: Sequence[str] = [name_of(**case) for case in pairwise_cases(AXES, is_valid)]

    def build(self) -> nn.Module:
        sizes = itertools.pairwise([5, 8, 5, 8, 5])
        return nn.Sequential(*(nn.Sequential(nn.Linear(*each), nn.Tanh()) for each in sizes))

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return uniform(2, 5, seed=2 * step), uniform(2, 5, seed=2 * step + 1)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return (model(batch[0]).float() - batch[1]).square().mean()

    def freeze(self, model: Any) -> None:
        model[1].requires_grad_(False)
        model[2][0].bias.requires_grad_(False)

    def parallelize(self, model: Any, mesh: DeviceMesh) -> None:
        # A DTensor passes between the layers: a local tensor would not say how many columns the other ranks have.
        styles = itertools.cycle([ColwiseParallel(use_local_output=False), RowwiseParallel()])
        parallelize_module(model, mesh, {f"{index}.0": style for index, style in zip(range(len(model)), styles)})


class TestFsdp1UnderTp(TestTrainingMatrix):
    """It raises when it sets the ``data`` of an accumulated gradient, a plain tensor, to a DTensor.

    The layouts of DTensors to load are looked up with the prefix of the checkpoint wrapper.
    """

    configurations = ("fsdp1_tp_frozen", "fsdp1_tp_nosync", "fsdp1_dcp_to_fsdp1_tp", "fsdp1_ac_dcp_to_fsdp1_tp")
    known_defects = {
        "fsdp1_tp_frozen": ["fsdp1_frozen_parameters_are_trained_with_tp"],
        "fsdp1_dcp_to_fsdp1_tp": ["fsdp1_optim_state_is_loaded_wrong_with_tp"],
    }
    limits = {
        "fsdp1_tp_nosync": "invalid python storage|mixed torch.Tensor and DTensor",
        "fsdp1_ac_dcp_to_fsdp1_tp": "size mismatch",
    }


class TestNoShard(TestTrainingMatrix):
    configurations = ("fsdp1_offload_dcp_to_fsdp1_noshard",)
    known_defects = {"fsdp1_offload_dcp_to_fsdp1_noshard": ["fsdp1_offloaded_replicas_ignore_a_load"]}


if __name__ == "__main__":
    run_tests()
