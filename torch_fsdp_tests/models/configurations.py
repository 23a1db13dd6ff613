"""The configurations in which a model is trained. Their names say all of them: ``fsdp2_ac_nosync_clip_dcp``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

INTERFACES = {"fsdp1": "FullyShardedDataParallel", "fsdp2": "fully_shard"}
# In the order in which names have them.
OPTIONS = {
    "root": "the root is the only unit",
    "keep": "parameters stay unsharded after forward (reshard_after_forward=False, SHARD_GRAD_OP)",
    "hsdp": "shards within two ranks, replicas across two (4 ranks)",
    "flat": "FSDP1 with use_orig_params=False",
    "bf16": "mixed precision: computes in bfloat16, reduces in float32",
    "autocast": "torch.autocast to bfloat16 around each forward",
    "offload": "parameters and gradients in host memory",
    "ac": "activation checkpointing of each unit",
    "ownac": "the model's own gradient_checkpointing_enable(), or else as ac",
    "compile": "each unit is compiled (aot_eager)",
    "frozen": "what freeze() freezes is not trained",
    "accumulate": "two microbatches a step, each reduced",
    "nosync": "two microbatches a step, reduced once",
    "clip": "gradients are clipped",
    "eval": "a forward in eval mode before each step",
    "generate": "generate() after the first step",
    "dcp": "saved by torch.distributed.checkpoint, loaded by new processes in another layout",
    "dsd": "saved as one full state dict by get_state_dict, loaded by new processes in another layout",
}
_ONLY_FSDP1 = {"flat"}

COMBINED = (
    "fsdp2_clip_eval_generate",
    "fsdp2_ac_nosync_clip_dcp",
    "fsdp2_keep_accumulate_eval_dsd",
    "fsdp2_hsdp_offload_frozen_eval",
    "fsdp2_bf16_ownac_accumulate_clip_eval",
    "fsdp1_nosync_clip_eval_generate_dcp",
    "fsdp1_keep_ac_accumulate_dsd",
    "fsdp1_hsdp_flat_frozen_eval",
    "fsdp1_bf16_ownac_clip_eval",
)
# On request, because compiling takes long.
COMPILED = ("fsdp2_compile_nosync_clip_eval", "fsdp1_keep_compile_eval")


class UnknownConfiguration(ValueError):
    """The message is a sentence."""


class Arithmetic(NamedTuple):
    """What the numbers of a training depend on. The rest of a configuration must not change them."""

    microbatches: int = 1
    clips: bool = False
    is_frozen: bool = False
    low: str = ""  # "bf16" or "autocast", if the model computes in bfloat16


class Configuration(NamedTuple):
    """An interface of FSDP with some of the :data:`OPTIONS`, in their order."""

    interface: str
    options: tuple[str, ...] = ()

    @classmethod
    def parse(cls, name: str) -> Configuration:
        """The configuration with this name. Raises :class:`UnknownConfiguration`."""
        interface, *options = name.split("_")
        _check(name, interface, INTERFACES)
        for option in options:
            _check(name, option, OPTIONS)
        if interface != "fsdp1" and (wrong := _ONLY_FSDP1.intersection(options)):
            raise UnknownConfiguration(f"{name!r} is no configuration: only fsdp1 can have {', '.join(wrong)}")
        configuration = cls(interface, tuple(option for option in OPTIONS if option in options))
        if configuration.saves and (low := configuration.arithmetic.low):
            raise UnknownConfiguration(
                f"{name!r} is no configuration: a checkpoint has the rounding of {low}; save without {low}"
            )
        return configuration

    @property
    def name(self) -> str:
        return "_".join((self.interface, *self.options))

    def has(self, *options: str) -> bool:
        """Whether it has one of these options."""
        return any(option in self.options for option in options)

    def without(self, *options: str) -> Configuration:
        return self._replace(options=tuple(option for option in self.options if option not in options))

    @property
    def saves(self) -> bool:
        return self.has("dcp", "dsd")

    @property
    def world_size(self) -> int:
        """The number of ranks that train it, until it is saved."""
        return 4 if self.has("hsdp") else 2

    @property
    def arithmetic(self) -> Arithmetic:
        low = next((option for option in ("bf16", "autocast") if self.has(option)), "")
        return Arithmetic(2 if self.has("accumulate", "nosync") else 1, self.has("clip"), self.has("frozen"), low)

    def resumed(self) -> Configuration:
        """The layout that loads what this one saved: the other interface after DCP, the root alone after DSD."""
        if self.has("dsd"):
            return Configuration.parse(f"{self.without('root', 'hsdp').name}_root")
        other = next(interface for interface in INTERFACES if interface != self.interface)
        return self._replace(interface=other).without(*_ONLY_FSDP1, "hsdp")

    def alone(self) -> Iterator[Configuration]:
        """The interface by itself, and with each of the options alone."""
        yield Configuration(self.interface)
        yield from (Configuration(self.interface, (option,)) for option in self.options)


def _check(name: str, word: str, words: Sequence[str] | dict[str, str]) -> None:
    if word not in words:
        near = difflib.get_close_matches(word, words, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(words)}"
        raise UnknownConfiguration(f"{name!r} is no configuration, because of {word!r}: {hint}")
