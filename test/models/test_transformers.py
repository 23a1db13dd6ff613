"""Tiny models of transformers, and LoRA by peft, without downloads. ``pip install -e ".[models]"`` has the packages."""

from __future__ import annotations

import importlib
import unittest
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests, set_rng_seed
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.training import Loop, TrainingMixin, backward
from torch_fsdp_tests.models import ModelTestCase

try:
    transformers: Any = importlib.import_module("transformers")
    peft: Any = importlib.import_module("peft")
except ModuleNotFoundError as error:
    raise unittest.SkipTest(f'needs the package {error.name}: pip install -e ".[models]"') from None

VOCABULARY = 32
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
TEXT = {**SIZES, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GROUPED = {**TEXT, **SPECIAL, "num_key_value_heads": 1}
IMAGE = {**SIZES, "image_size": 8, "patch_size": 4}


def tokens(step: int, *shape: int, least: int = 3, most: int = VOCABULARY) -> torch.Tensor:
    """Ids without the special ones, unless ``least`` says so."""
    return torch.randint(least, most, shape, generator=torch.Generator().manual_seed(step))


def numbers(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


class TransformersTestCase(ModelTestCase):
    """A model by the name of its class and the settings of its configuration. By default it is a language model."""

    configurations: Sequence[str] = ()
    model_class = ""
    config: Mapping[str, Any] = {}

    def build(self) -> nn.Module:
        cls = getattr(transformers, self.model_class)
        return cls(cls.config_class(**self.config))

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        ids = tokens(step, 2, 7)
        return {"input_ids": ids, "labels": ids.clone()}

    def loss(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return model(**batch).loss


COMBINED = ModelTestCase.configurations


class GeneratingTestCase(TransformersTestCase):
    def generate(self, model: Any) -> torch.Tensor:
        ids = tokens(0, 2, 4).to(self.device)
        options = {"attention_mask": torch.ones_like(ids), "pad_token_id": 0, "eos_token_id": None}
        return model.generate(input_ids=ids, max_new_tokens=3, do_sample=False, **options)


class TestLlama(GeneratingTestCase):
    configurations = COMBINED
    model_class = "LlamaForCausalLM"
    config = {**GROUPED, "tie_word_embeddings": False}


class TestQwen3(GeneratingTestCase):
    """Its embedding is tied, and stays with the head in the root."""

    configurations = COMBINED
    model_class = "Qwen3ForCausalLM"
    config = {**GROUPED, "tie_word_embeddings": True, "head_dim": 8}


class TestGemma2(GeneratingTestCase):
    """Its cache for a window does not allow recomputation, also without FSDP."""

    configurations = COMBINED
    model_class = "Gemma2ForCausalLM"
    config = {**GROUPED, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8, "use_cache": False}


class TestGPT2(GeneratingTestCase):
    configurations = COMBINED
    model_class = "GPT2LMHeadModel"
    config = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2, **SPECIAL}


class TestMixtral(GeneratingTestCase):
    configurations = COMBINED
    model_class = "MixtralForCausalLM"
    config = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}


class TestBert(TransformersTestCase):
    """``_no_split_modules`` also names its embeddings, which share a weight with the head."""

    configurations = COMBINED
    model_class = "BertForMaskedLM"
    config = {**TEXT, "pad_token_id": 0}

    def units(self, model: Any) -> list[Any]:
        return [*model.bert.encoder.layer]


class TestT5(TransformersTestCase):
    """Its cache does not allow recomputation, also without FSDP."""

    configurations = COMBINED
    model_class = "T5ForConditionalGeneration"
    config = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2} | {
        "decoder_start_token_id": 0,
        "use_cache": False,
    }


class TestViT(TransformersTestCase):
    """It converts its input to the dtype of a weight in a unit, which FSDP1 has in float32 outside of the unit."""

    configurations = COMBINED
    limits = {"fsdp1_bf16_ownac_clip_eval": "Input type .* and bias type .* should be the same"}
    model_class = "ViTForImageClassification"
    config = {**IMAGE, "num_labels": 5}

    def batch(self, step: int) -> dict[str, torch.Tensor]:
        return {"pixel_values": numbers(step, 3, 3, 8, 8), "labels": tokens(step, 3, least=0, most=5)}


class TestCLIP(TransformersTestCase):
    """FSDP rejects its scalar parameter, so it becomes a vector of one element."""

    configurations = COMBINED
    model_class = "CLIPModel"
    config = {"text_config": {**TEXT, **SPECIAL, "projection_dim": 8}, "projection_dim": 8} | {
        "vision_config": {**IMAGE, "projection_dim": 8}
    }

    def build(self) -> nn.Module:
        model: Any = super().build()
        model.logit_scale = nn.Parameter(model.logit_scale.detach().reshape(1))
        return model

    def batch(self, step: int) -> dict[str, Any]:
        ids = tokens(step, 3, 7)
        ids[:, -1] = 2
        return {"input_ids": ids, "pixel_values": numbers(step, 3, 3, 8, 8), "return_loss": True}


class TestLoRA(TestLlama):
    """Adapters inside frozen layers."""

    limits = {"fsdp1_hsdp_flat_frozen_eval": "has both parameters with requires_grad=True and False"}

    def build(self) -> nn.Module:
        adapters = peft.LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(super().build(), adapters)

    def units(self, model: Any) -> list[Any]:
        return [*model.base_model.model.model.layers]

    def freeze(self, model: nn.Module) -> None:
        """All but the adapters is frozen already."""


class TestDistributedConfig(TrainingMixin, FSDPTest):
    """transformers shards while it loads: blocks, the embedding, and a group of norm and head that stays unsharded."""

    world_size = 2

    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(is_tied=[False, True])
    def test_training(self, is_tied):
        if not hasattr(transformers, "DistributedConfig"):
            self.skipTest("needs a version of transformers with DistributedConfig")
        cls, sizes = transformers.Qwen3ForCausalLM, {**GROUPED, "head_dim": 8, "tie_word_embeddings": is_tied}
        set_rng_seed(0)
        ref_model = cls(cls.config_class(**sizes)).to(self.device)
        ref_model.save_pretrained(self.temp_dir)  # rank 0 writes
        dist.barrier()
        config = transformers.DistributedConfig(fsdp_size=2)
        model = cls.from_pretrained(self.temp_dir, distributed_config=config, dtype=torch.float32)
        self.assertIsInstance(model.model.layers[0], FSDPModule)

        def step(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
            return backward(model(input_ids=ids, labels=ids.clone()).loss)

        self._check_training(ref_model, model, lambda: self._tokens(2, 7, vocab_size=VOCABULARY), Loop(step=step))


if __name__ == "__main__":
    run_tests()
