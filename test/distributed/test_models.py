"""Models with the parts of real ones, in all configurations."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.parametrizations import spectral_norm

from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.models import ModelTestCase

sys.path.insert(0, str(Path(__file__).parents[1]))
from distributed.model_zoo import LENGTH, Contrastive, Decoder, Layers, Mixture, Recommender, Speech, numbers, tokens


class TestDecoder(ModelTestCase):
    """The tied embedding is the first of a group of three modules. The root alone returns a dataclass."""

    known_defects = {"fsdp2_keep_accumulate_eval_dsd": ["fsdp2_outputs_in_dataclasses_raise"]}

    def build(self) -> nn.Module:
        return Decoder()

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        ids = tokens(step, 3, LENGTH + 1)
        return {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**batch).loss

    def units(self, model: Any) -> list[Any]:
        return [*model.blocks, [model.embedding, model.norm, model.head]]

    def generate(self, model: Any) -> torch.Tensor:
        return model.generate(input_ids=tokens(0, 2, 3).to(self.device), count=3)


class TestTiedTail(TestDecoder):
    """As accelerate wraps: the tied embedding is in the group of the head, which stays unsharded until backward."""

    configurations = ("fsdp2_clip_eval_generate", "fsdp2_hsdp_ac_nosync_eval")

    def units(self, model: Any) -> list[Any]:
        return [*model.blocks, [model.norm, model.embedding, model.head]]

    def optimizer(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        """One with the defaults of torch, such as weight decay."""
        return torch.optim.AdamW(params)

    def prepare(self, model: Any) -> None:
        model.head.set_reshard_after_forward(False, recurse=False)


class TestUntiedTail(TestTiedTail):
    """As accelerate, torchtitan and transformers wrap a model with a head of its own."""

    def build(self) -> nn.Module:
        model = Decoder()
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        return model

    def units(self, model: Any) -> list[Any]:
        return [model.embedding, *model.blocks, [model.norm, model.head]]


class TestForcedSums(TestUntiedTail):
    """As torchtitan trains: gradients are only summed, because each rank divides its loss by the tokens of all."""

    configurations = ("fsdp2_hsdp_ac_nosync_clip", "fsdp2_bf16_accumulate_eval")
    optimizer = ModelTestCase.optimizer  # in bfloat16, a small eps would turn rounding into whole steps

    def prepare(self, model: Any) -> None:
        super().prepare(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = super().loss(model, batch)
        weight = 1 / dist.get_world_size() if isinstance(model, FSDPModule) else 1.0
        return torch.lerp(loss.detach(), loss, weight)  # the same value, with a part of the gradient


class TestSpeech(ModelTestCase):
    """Buffers of BatchNorm stay in float32 in FSDP2, which has no dtype for buffers."""

    limits = {"fsdp2_bf16_ownac_accumulate_clip_eval": "expected scalar type BFloat16 but found Float"}

    def build(self) -> nn.Module:
        return Speech()

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        return numbers(step, 6, 2, 7), tokens(step, 6, most=3)

    def loss(self, model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def units(self, model: Any) -> list[Any]:
        return [*model.blocks, model.rnn]


class TestSpectralNorm(TestSpeech):
    """It has buffers that also stay in float32 in FSDP2."""

    configurations = ("fsdp1_bf16_clip", "fsdp2_bf16", "fsdp2_ac_clip_dcp")
    limits = {"fsdp2_bf16": "expected scalar type BFloat16 but found Float"}

    def build(self) -> nn.Module:
        return Speech(spectral_norm)


class TestContrastive(ModelTestCase):
    def build(self) -> nn.Module:
        return Contrastive(1)

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        return {"text": tokens(step, 4, LENGTH, least=1), "image": numbers(step, 4, 3, 4, 4)}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(**batch)
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2

    def units(self, model: Any) -> list[Any]:
        return [*model.towers.values()]


class TestScalarParameter(TestContrastive):
    configurations = ("fsdp1", "fsdp2")
    limits = dict.fromkeys(configurations, "doesn't support scalar parameters. Change logit_scale to a 1D tensor")

    def build(self) -> nn.Module:
        return Contrastive()


class TestRecommender(ModelTestCase):
    def build(self) -> nn.Module:
        return Recommender()

    def batch(self, step: int) -> dict[str, Any]:
        sparse = [tokens(step, 4, 3, most=23), tokens(step, 4, 2, most=3)]
        return {"dense": numbers(step, 4, 5), "sparse": sparse, "clicked": tokens(step, 4, most=2).float()}

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        logits = model(batch["dense"], batch["sparse"])
        return F.binary_cross_entropy_with_logits(logits, batch["clicked"].to(logits.dtype))

    def units(self, model: Any) -> list[Any]:
        return [*model.tables, model.top]


class TestMixture(ModelTestCase):
    """An optimizer has no state for an unused expert, and does not load what it saved."""

    known_defects = {
        "fsdp2_keep_accumulate_eval_dsd": [
            "dsd_missing_optim_state_raises_key_error",
            "dsd_optim_state_of_some_parameters_is_refused",
        ]
    }
    limits = {"fsdp2_ac_nosync_clip_dcp": "Missing key in checkpoint state_dict: optimizer.state"}

    def build(self) -> nn.Module:
        return Mixture()

    def batch(self, step: int) -> torch.Tensor:
        return tokens(step, 3, LENGTH + 1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


class TestLayers(ModelTestCase):
    """FSDP1 clips, and so is in float32, because of the defect ``fsdp1_missing_gradient_is_float32``."""

    configurations = ("fsdp2_keep_nosync_dsd", "fsdp2_hsdp_eval", "fsdp1_flat_clip_eval_dcp", "fsdp1_accumulate_clip")

    def build(self) -> nn.Module:
        return Layers()

    def batch(self, step: int) -> torch.Tensor:
        return numbers(step, 3, LENGTH, 4)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) - 1).square().mean()

    def units(self, model: Any) -> list[Any]:
        return [*model.layers.values()]


if __name__ == "__main__":
    run_tests()
