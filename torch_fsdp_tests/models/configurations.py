"""The configurations in which a model is trained. Their names say all of them: ``fsdp2_ac_nosync_clip_dcp``."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

INTERFACES = {
    "fsdp1": "FullyShardedDataParallel",
    "fsdp2": "fully_shard",
    "replicate": "FSDP2 without shards",
}
# In the order in which names have them.
OPTIONS = {
    "root": "the root is the only unit",
    "keep": "parameters stay unsharded after forward (reshard_after_forward=False, SHARD_GRAD_OP)",
    "hsdp": "shards within two ranks, replicas across two (4 ranks)",
    "tp": "parallelize() splits the model within two ranks, FSDP shards across two (4 ranks)",
    "noshard": "FSDP1 with NO_SHARD",
    "flat": "FSDP1 with use_orig_params=False",
    "bf16": "mixed precision: computes in bfloat16, reduces in float32",
    "bf16reduce": "mixed precision: computes and reduces in bfloat16",
    "autocast": "torch.autocast to bfloat16 around each forward",
    "offload": "parameters and gradients in host memory",
    "ac": "activation checkpointing of each unit",
    "ownac": "the model's own gradient_checkpointing_enable(), or else as ac",
    "compile": "each unit is compiled (aot_eager)",
    "frozen": "what freeze() freezes is not trained",
    "accumulate": "three microbatches a step, each reduced",
    "nosync": "three microbatches a step, reduced once",
    "clip": "gradients are clipped",
    "eval": "a forward in eval mode before each step",
    "generate": "generate() after the first step",
    "dcp": "saved by torch.distributed.checkpoint, loaded by new processes in another layout",
    "dsd": "saved as one full state dict by get_state_dict, loaded by new processes in another layout",
}
PLAIN = "plain"  # the interface of a training without FSDP
# What a program also has without FSDP. FSDP must not change what it computes.
_WITHOUT_FSDP = {"nosync": "accumulate"}
_OF_PROGRAM = {
    *("tp", "bf16", "bf16reduce", "autocast", "ac", "ownac", "compile"),
    *("frozen", "accumulate", "clip", "eval", "generate"),
}
_LAYOUT = ("root", "keep", "hsdp", "tp", "noshard", "flat")
_ONLY_FSDP1 = {"noshard", "flat"}
# Each pair excludes the other: interfaces and options.
_APART = (
    *((interface, option) for interface in ("fsdp2", "replicate") for option in sorted(_ONLY_FSDP1)),
    *(("replicate", option) for option in ("keep", "hsdp", "tp")),
    *(("noshard", option) for option in ("keep", "hsdp", "tp")),
    ("bf16", "bf16reduce"),
    *(("hsdp", "tp"), ("tp", "flat")),
)

COMBINED = (
    "fsdp2_clip_eval_generate",
    "fsdp2_ac_nosync_clip_dcp",
    "fsdp2_keep_accumulate_eval_dsd",
    "fsdp2_hsdp_offload_frozen_accumulate_eval",
    "fsdp2_bf16_ownac_nosync_clip_eval",
    "fsdp1_nosync_clip_eval_generate_dcp",
    "fsdp1_keep_ac_accumulate_dsd",
    "fsdp1_hsdp_flat_frozen_eval",
    "fsdp1_bf16_ownac_clip_eval",
)
# On request, because compiling takes long.
COMPILED = ("fsdp2_compile_nosync_clip_eval", "fsdp1_keep_compile_eval")


class UnknownConfiguration(ValueError):
    """The message is a sentence."""


class Configuration(NamedTuple):
    """An interface of FSDP with some of the :data:`OPTIONS`, in their order.

    One that saves may name the layout that loads, as in "fsdp2_clip_dcp_to_fsdp1_hsdp".
    """

    interface: str
    options: tuple[str, ...] = ()
    target: Configuration | None = None

    @classmethod
    def parse(cls, name: str) -> Configuration:
        """The configuration with this name. Raises :class:`UnknownConfiguration`."""
        trained, _, target = name.partition("_to_")
        interface, *options = trained.split("_")
        _check(name, interface, INTERFACES)
        for option in options:
            _check(name, option, OPTIONS)
        for pair in _APART:
            if {*pair} <= {interface, *options}:
                raise UnknownConfiguration(f"{name!r} is no configuration: use {pair[0]} without {pair[1]}")
        loaded = cls.parse(target) if target else None
        found = cls(interface, tuple(option for option in OPTIONS if option in options), loaded)
        if loaded is not None and not (found.saves and {*loaded.options} <= {*_LAYOUT}):
            raise UnknownConfiguration(f"{name!r} is no configuration: write dcp_to_ or dsd_to_ and a layout")
        return found

    @property
    def name(self) -> str:
        return "_".join((self.interface, *self.options)) + (f"_to_{self.target.name}" if self.target else "")

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
        return 4 if self.has("hsdp", "tp") else 2

    @property
    def microbatches(self) -> int:
        """Those of a step. Three, because two hide what happens to gradients that wait for the third."""
        return 3 if self.has("accumulate", "nosync") else 1

    @property
    def ranks_of_batch(self) -> int:
        """How many ranks share a batch: more than one if tensor parallelism splits the model."""
        return 2 if self.has("tp") else 1

    @property
    def low(self) -> bool:
        """Whether the model computes in bfloat16."""
        return self.is_mixed or self.has("autocast")

    @property
    def is_mixed(self) -> bool:
        """Whether FSDP casts parameters to bfloat16."""
        return self.has("bf16", "bf16reduce")

    @property
    def program(self) -> Configuration:
        """What is left without FSDP. Configurations with the same program must give the same numbers."""
        left = {_WITHOUT_FSDP.get(option, option) for option in self.options} & _OF_PROGRAM
        return Configuration(PLAIN, tuple(option for option in OPTIONS if option in left))

    def resumed(self) -> Configuration:
        """The layout that loads what this one saved: by default the other interface after DCP, the root after DSD."""
        if self.target is not None:
            return Configuration.parse("_".join((self.target.name, *self.without(*_LAYOUT).options)))
        if self.has("dsd"):
            return Configuration.parse(f"{self.without('root', 'hsdp').name}_root")
        other = next(interface for interface in INTERFACES if interface != self.interface)
        return self._replace(interface=other).without(*_ONLY_FSDP1, "hsdp", "tp")

    def alone(self) -> Iterator[Configuration]:
        """The interface by itself, and with each of the options alone."""
        yield Configuration(self.interface)
        yield from (
            Configuration(self.interface, (option,), self.target if option in ("dcp", "dsd") else None)
            for option in self.options
        )


def _check(name: str, word: str, words: Sequence[str] | dict[str, str]) -> None:
    if word not in words:
        near = difflib.get_close_matches(word, words, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(words)}"
        raise UnknownConfiguration(f"{name!r} is no configuration, because of {word!r}: {hint}")
