"""Methods besides ``forward`` for which FSDP unshards the parameters (``register_fsdp_forward_method``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method

from torch_fsdp_tests.common_utils import manual_seed
from torch_fsdp_tests.fsdp.training import FEW, Loop, TrainingMixin, backward, optimizers


class VisionFeatures(nn.Module):
    """Computes in a method other than ``forward``, which raises."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, kernel_size=7, stride=7)

    def features(self, imgs: torch.Tensor) -> torch.Tensor:
        return self.conv(imgs).flatten(2).transpose(1, 2)

    def forward(self, imgs: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("only the features are used")


class FeaturesModel(nn.Module):
    """Projects the features of images of shape (batch, 3, 14, 14)."""

    def __init__(self) -> None:
        super().__init__()
        self.vit, self.projector = VisionFeatures(), nn.Linear(4, 2)

    def forward(self, imgs: torch.Tensor) -> torch.Tensor:
        return self.projector(self.vit.features(imgs))


class Generating(nn.Module):
    """A language model whose method ``generate`` calls forward in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 4), nn.Linear(4, 8)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, count: int = 3) -> torch.Tensor:
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


class GenerationMixin(TrainingMixin):
    """For a test case with ranks."""

    def _check_generation(self, wrap: Callable[[Any], Any], generate: Callable[[Any, Any], torch.Tensor]) -> None:
        """A wrapped model that trains on what it has generated does so like the plain model."""
        manual_seed(42)
        ref_model = Generating().to(self.device)
        model, seen = wrap(self._replica(ref_model)), {}

        def step(each: Any, tokens: torch.Tensor) -> torch.Tensor:
            seen[each] = (each.generate if each is ref_model else functools.partial(generate, each))(tokens)
            if len(seen) == 2:
                self.assertEqual(seen.pop(model), seen.pop(ref_model))
            return backward(nn.functional.cross_entropy(each(tokens).flatten(0, 1), tokens.flatten()))

        self._check_training(
            ref_model,
            model,
            lambda: self._tokens(2, 3),
            Loop(step=step, compare=None),
            optims=optimizers(ref_model, model, cls=torch.optim.Adam),
        )


class ForwardMethodsMixin(TrainingMixin):
    """For a test case with ranks (threads or processes)."""

    def _check_register_fsdp_forward_method(self, wrap_each: Callable[[Iterable[Any]], Any]) -> FeaturesModel:
        """A registered method gets unsharded parameters, like ``forward``. Return the model after one more forward."""
        manual_seed(42)
        model = FeaturesModel()
        ref_model = self._replica(model)
        wrap_each([model.vit, model.projector, model])
        with self.assertRaisesRegex(ValueError, "does not have a method feature"):
            register_fsdp_forward_method(model.vit, "feature")
        register_fsdp_forward_method(model.vit, "features")
        register_fsdp_forward_method(ref_model.vit, "features")  # no effect on a plain module
        seen: list[type] = []
        model.vit.conv.register_forward_pre_hook(lambda conv, args: seen.append(type(conv.weight)))
        self._check_training(ref_model, model, lambda: self._inputs(4, 3, 14, 14), Loop(iterations=FEW))
        self.assertEqual(seen, [nn.Parameter] * FEW)
        model(self._inputs(4, 3, 14, 14))
        return model
