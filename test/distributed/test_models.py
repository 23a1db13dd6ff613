"""Small models with what real models have, in all configurations. Each model's docstring lists its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.models import ModelTestCase

VOCABULARY, WIDTH, LENGTH = 19, 6, 5


def tokens(step: int, *shape: int, least: int = 0, most: int = VOCABULARY) -> torch.Tensor:
    """Token ids that depend on the number of the step."""
    return torch.randint(least, most, shape, generator=torch.Generator().manual_seed(step))


def numbers(step: int, *shape: int) -> torch.Tensor:
    """Normal numbers that depend on the number of the step."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(step))


class Cache:
    """Keys and values of the tokens so far. Each block of :class:`Decoder` writes its own, also when recomputed."""

    def __init__(self, length: int = 0) -> None:
        self.length = length  # tokens that all blocks have
        self.of_block: dict[int, tuple[torch.Tensor, ...]] = {}

    def write(self, block: int, *new: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Put new keys and values behind those of ``length`` tokens. Returns all of the block."""
        before = self.of_block.get(block, ())
        old = [each[:, : self.length] for each in before]
        self.of_block[block] = tuple(map(lambda *pair: torch.cat(pair, 1), old, new)) if old else new
        return self.of_block[block]


@dataclasses.dataclass
class DecoderOutput:
    logits: torch.Tensor
    cache: Cache
    loss: torch.Tensor | None = None


class DecoderBlock(nn.Module):
    """Takes keywords only, and a position that all blocks share."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Dropout(0.1), nn.Linear(9, WIDTH))

    def forward(
        self, *, hidden: torch.Tensor, position: tuple[torch.Tensor, torch.Tensor], cache: Cache
    ) -> torch.Tensor:
        cos, sin = position
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, -1)
        query, key = (each * cos + each.roll(WIDTH // 2, -1) * sin for each in (query, key))
        key, value = cache.write(self.index, key, value)
        mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool, device=query.device).tril(cache.length)
        scores = (query @ key.transpose(1, 2)).masked_fill(~mask, -1e4)
        hidden = hidden + self.out(scores.softmax(-1) @ value)
        return hidden + self.mlp(hidden)


class Decoder(nn.Module):
    """A language model: keyword inputs, an output in a dataclass, a cache that each block writes, (cos, sin) that all
    blocks share, non-persistent buffers, a tied embedding, and ``generate``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0)
        self.blocks = nn.ModuleList(DecoderBlock(index) for index in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("frequencies", 0.5 ** torch.arange(float(WIDTH)), persistent=False)

    def forward(
        self, *, input_ids: torch.Tensor, labels: torch.Tensor | None = None, cache: Cache | None = None
    ) -> DecoderOutput:
        cache = Cache() if cache is None else cache
        hidden = self.embedding(input_ids)
        at = (cache.length + torch.arange(input_ids.shape[1], device=hidden.device))[:, None] * self.frequencies
        position = at.cos().to(hidden.dtype), at.sin().to(hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden=hidden, position=position, cache=cache)
        logits = self.head(self.norm(hidden))
        loss = None if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)
        return DecoderOutput(logits, cache, loss)

    def generate(self, *, input_ids: torch.Tensor, count: int) -> torch.Tensor:
        """Append the most probable tokens, each from the last one and the cache."""
        output = self(input_ids=input_ids)
        for _ in range(count):
            last = output.logits[:, -1:].argmax(-1)
            input_ids = torch.cat([input_ids, last], 1)
            output.cache.length = input_ids.shape[1] - 1
            output = self(input_ids=last, cache=output.cache)
        return input_ids


class SpeechBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = weight_norm(nn.Conv1d(channels, 6, 3, padding=1))
        self.norm = nn.GroupNorm(2, 6)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.norm(self.conv(x)))


class Speech(nn.Module):
    """A model of sound: BatchNorm, Conv1d under weight norm, GroupNorm, an LSTM; ``norm`` changes the last layer."""

    def __init__(self, norm: Callable[[nn.Linear], nn.Module] = lambda layer: layer) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.blocks = nn.ModuleList([SpeechBlock(2), SpeechBlock(6)])
        self.rnn = nn.LSTM(6, 5, num_layers=2, batch_first=True)
        self.head = norm(nn.Linear(5, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        states, _ = self.rnn(x.transpose(1, 2))
        return self.head(states[:, -1])


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.scale = nn.Parameter(torch.full((1,), 0.3))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        attended, _ = self.attention(x, x, x, key_padding_mask=mask, need_weights=False)
        return F.normalize(self.norm(x + self.scale * attended).mean(1), dim=-1)


class Contrastive(nn.Module):
    """Two towers: attention whose ``out_proj`` another module reads, and a scale, by default without dimensions."""

    def __init__(self, *shape_of_scale: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.patches = nn.Conv2d(3, WIDTH, 2, stride=2)
        self.towers = nn.ModuleDict({"text": Tower(), "image": Tower()})
        self.logit_scale = nn.Parameter(torch.ones(shape_of_scale))

    def forward(self, text: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        of_text = self.towers["text"](self.words(text), text == 0)
        of_image = self.towers["image"](self.patches(image).flatten(2).transpose(1, 2))
        return self.logit_scale.exp() * of_text @ of_image.T


class Recommender(nn.Module):
    """Sparse features: EmbeddingBags with ``padding_idx``, activations in place, a list among the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.EmbeddingBag(23, 4, mode="sum", padding_idx=0), nn.EmbeddingBag(3, 4)])
        self.bottom = nn.Sequential(nn.Linear(5, 4), nn.ReLU(inplace=True), nn.LayerNorm(4))
        self.top = nn.Sequential(nn.Linear(3 + 4, 8), nn.LeakyReLU(inplace=True), nn.Linear(8, 1))
        self.register_buffer("pairs", torch.triu_indices(3, 3, 1), persistent=False)

    def forward(self, dense: torch.Tensor, sparse: list[torch.Tensor]) -> torch.Tensor:
        features = [self.bottom(dense), *(table(each) for table, each in zip(self.tables, sparse))]
        stacked = torch.stack(features, 1)
        products = (stacked @ stacked.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([products, stacked[:, 0]], 1)).squeeze(1)


class Experts(nn.Module):
    """Chooses one of its experts by the number of a token, and uses two of the three."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(hidden)
        for index in range(2):
            chosen = ids % 2 == index
            result[chosen] = self.experts[index](hidden[chosen]).to(hidden.dtype)
        return hidden + result.tanh()


class Mixture(nn.Module):
    """Layers that a step skips at random (LayerDrop), an expert that no step uses, and an index into a result."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Experts() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.4:
                hidden = layer(hidden, ids)
        return self.head(hidden)


class Pieces(nn.Module):
    """Parameters in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.by_name = nn.ParameterDict({"weight": torch.randn(4, 4), "bias": torch.randn(4)})
        self.scales = nn.ParameterList([torch.ones(1), torch.randn(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.by_name["weight"] + self.by_name["bias"]) * self.scales[0] + self.scales[1]


class Adapted(nn.Module):
    """A layer with an adapter, as in DoRA: it reads the weights of layers that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 4)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)
        self.magnitude = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        norm = (self.base.weight + self.up.weight @ self.down.weight).norm(dim=1)
        return (self.base(x) + self.up(self.down(x))) * self.magnitude / norm.detach()


def over_channels(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x.transpose(1, 2)).transpose(1, 2)


# Layers, and how to call those that do not take the input alone.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "bidirectional": lambda: nn.GRU(4, 2, bidirectional=True, batch_first=True),
    "projection": lambda: nn.LSTM(4, 5, proj_size=4, batch_first=True),
    "cell": lambda: nn.LSTMCell(4, 4),
    "attention": lambda: nn.MultiheadAttention(4, 2, kdim=4, vdim=3, add_bias_kv=True, batch_first=True),
    "decoder": lambda: nn.TransformerDecoderLayer(4, 2, 8, batch_first=True),
    "hook": lambda: nn.utils.weight_norm(nn.Linear(4, 4)),
    "spectral_hook": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: orthogonal(nn.Linear(4, 4)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(4, 4), "weight", amount=0.5),
    "prelu": nn.PReLU,
    "norm": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "transposed": lambda: nn.ConvTranspose1d(4, 4, 3, padding=1),
    "grouped": lambda: nn.Conv1d(4, 4, 3, padding=1, groups=2),
    "bilinear": lambda: nn.Bilinear(4, 4, 4),
    "pieces": Pieces,
    "adapted": Adapted,
    "twice": lambda: nn.Linear(4, 4),
    "empty": lambda: nn.Sequential(nn.RMSNorm(4, elementwise_affine=False), nn.LayerNorm(4, elementwise_affine=False)),
}
CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "bidirectional": lambda layer, x: layer(x)[0],
    "projection": lambda layer, x: layer(x)[0],
    "cell": lambda layer, x: layer(x.flatten(0, 1))[0].view_as(x),
    "attention": lambda layer, x: layer(x, x, x[..., :3])[0],
    "decoder": lambda layer, x: layer(x, x),
    "norm": over_channels,
    "transposed": over_channels,
    "grouped": over_channels,
    "bilinear": lambda layer, x: layer(x, x),
    "twice": lambda layer, x: layer(layer(x).tanh()),
}


class Layers(nn.Module):
    """The sum of all :data:`LAYERS`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({name: make() for name, make in LAYERS.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [CALLS.get(name, lambda layer, x: layer(x))(layer, x) for name, layer in self.layers.items()]
        return torch.stack(outputs).sum(0)


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

    limits = {"fsdp2_bf16_ownac_nosync_clip_eval": "expected scalar type BFloat16 but found Float"}

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
    """An optimizer has no state for an unused expert, and does not load what it saved.

    The last microbatch skips layers that those without synchronization have used.
    """

    known_defects = {
        "fsdp1_nosync_clip_eval_dcp": ["fsdp1_gradient_of_no_sync_is_not_reduced"],
        "fsdp2_keep_accumulate_eval_dsd": [
            "dsd_missing_optim_state_raises_key_error",
            "dsd_optim_state_of_some_parameters_is_refused",
        ],
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
