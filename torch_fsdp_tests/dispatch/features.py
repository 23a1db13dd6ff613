"""The features of FSDP, the tests of each, and their results. A test may belong to several features."""

from __future__ import annotations

import collections
import dataclasses
import fnmatch
import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_fsdp_tests.verdict import State, tally

# The names of the numbers of a feature in report.json.
COUNTS = {
    State.PASSED: "passed",
    State.FAILED: "failed",
    State.SKIPPED: "skipped",
    State.KNOWN_DEFECT: "known_defects",
    State.KNOWN_FAILURE: "known_failures",
    State.NOT_RUN: "not_run",
}


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature. A test belongs to it if its file matches a pattern, or if its name has one of the words.

    ``files`` are patterns of paths below the test directory. ``words`` are lower-case words joined by ``_``. They are
    looked for in the names of the file, class and test, as whole words: ``tp`` is in ``test_fsdp_tp_integration`` and
    in ``TestTPTraining``, but not in ``test_http``.
    """

    name: str
    group: str
    about: str
    files: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def has(self, file: str, name: str) -> bool:
        """Whether a test belongs to this feature. ``name`` is what :func:`words_of` returns for the test."""
        return any(fnmatch.fnmatchcase(file, pattern) for pattern in self.files) or bool(
            self.words and self._pattern.search(name)
        )

    @functools.cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(f"_({'|'.join(self.words)})_")


API, SHARDING, TRAINING, STATE, BESIDE, SUITE = (
    "Interfaces",
    "Sharding",
    "Training",
    "Saving and loading",
    "Together with",
    "The suite itself",
)

FEATURES = (
    Feature(
        "FSDP1", API, "FullyShardedDataParallel",
        files=("distributed/fsdp/*", "distributed/test_dynamo_distributed", "distributed/checkpoint/test_fsdp_*"),
        words=("fsdp1", "flat_parameters", "use_orig_params", "fsdp_hybrid_shard"),
    ),
    Feature(
        "FSDP2", API, "fully_shard",
        files=("distributed/_composable/fsdp/*", "distributed/test_composability", "distributed/_tools/test_fsdp2*"),
        words=("fully_shard", "fsdp2", "replicate_fully_shard", "pp_composability"),
    ),
    Feature(
        "Replication", API, "replicate, which is FSDP2 without shards",
        files=("distributed/_composable/test_replicate*",), words=("replicate",),
    ),
    Feature(
        "Sharding strategies", SHARDING, "full shards, sharded gradients only, no shards; resharding after forward",
        files=(
            "distributed/fsdp/test_fsdp_core", "distributed/fsdp/test_fsdp_flatten_params",
            "distributed/fsdp/test_shard_utils", "distributed/_composable/fsdp/test_fully_shard_training",
            "distributed/_composable/fsdp/test_fully_shard_chunk_cat", "distributed/test_training_matrix",
            "distributed/test_fake_pg",
        ),
        words=("no_shard", "reshard", "shard_dim", "shard_largest_dim"),
    ),
    Feature(
        "Hybrid sharding", SHARDING, "HSDP: shards within a group, replicas across groups",
        words=("hsdp", "hybrid", "replicas"),
    ),
    Feature(
        "Uneven shards", SHARDING, "sizes that the world size does not divide; ranks without a shard",
        words=("uneven", "empty_shard", "empty_ranks", "without_a_shard", "padding", "rows"),
    ),
    Feature(
        "Wrapping", SHARDING, "which modules become units: policies, nesting, several roots",
        files=(
            "distributed/fsdp/test_wrap", "distributed/fsdp/test_fsdp_traversal", "distributed/fsdp/test_fsdp_apply",
            "distributed/_composable/fsdp/test_fully_shard_state", "distributed/_composable/fsdp/test_fully_shard_init",
            "distributed/fsdp/test_fsdp_misc", "distributed/fsdp/test_fsdp_fx",
        ),
        words=("wrap", "wrapping", "managed_modules", "several_roots"),
    ),
    Feature(
        "Deferred initialization", SHARDING, "models on the meta device; states that rank 0 sends",
        words=("meta", "sync_module_state", "sync_module_states"),
    ),
    Feature(
        "Frozen, ignored and shared parameters", SHARDING, "what is not trained, not sharded, or used twice",
        words=("frozen", "freezing", "ignored", "ignore", "shared", "tied", "requires_grad", "trainability", "unused"),
    ),
    Feature(
        "Original parameters", SHARDING, "use_orig_params of FSDP1", words=("orig_params",),
    ),
    Feature(
        "Unsharding by hand", SHARDING, "summon_full_params, unshard and reshard",
        words=("unshard", "unsharded", "summon"),
    ),
    Feature(
        "Forward and backward", TRAINING, "the same losses and gradients as without FSDP, for all kinds of inputs",
        files=(
            "distributed/fsdp/test_fsdp_core", "distributed/fsdp/test_fsdp_input", "distributed/fsdp/test_utils",
            "distributed/fsdp/test_fsdp_fine_tune", "distributed/_composable/fsdp/test_fully_shard_conversion",
            "distributed/_composable/fsdp/test_fully_shard_manual_finalization",
            "distributed/_composable/fsdp/test_fully_shard_training", "distributed/test_training_matrix",
        ),
        words=("autograd", "multiple_forward", "multi_forward", "parity", "training", "train", "backward"),
    ),
    Feature(
        "Gradient accumulation", TRAINING, "several backward passes per step, with and without communication",
        words=("grad_acc", "accumulation", "accumulates", "no_sync", "accumulate", "gradient_sync"),
    ),
    Feature(
        "Gradient clipping", TRAINING, "norms over shards", words=("clip_grad_norm",),
    ),
    Feature(
        "Gradient scaling", TRAINING, "GradScaler and ShardedGradScaler",
        words=("scaler", "grad_scaling", "scale_grads"),
    ),
    Feature(
        "Mixed precision", TRAINING, "other dtypes for computation, communication and storage",
        words=(
            "mixed_precision", "fp16", "bf16", "bfloat16", "float16", "low_precision", "compute_dtype", "reduce_dtype",
            "param_dtype", "grad_dtype", "dtypes", "cast", "casts", "half",
        ),
    ),
    Feature(
        "Offload", TRAINING, "parameters, gradients and states in host memory",
        words=("offload", "offloaded", "offloading", "cpu_training"),
    ),
    Feature(
        "Activation checkpointing", TRAINING, "activations that are computed again in the backward pass",
        files=("distributed/fsdp/test_checkpoint_wrapper", "distributed/fsdp/test_fsdp_checkpoint"),
        words=("activation_checkpoint", "activation_checkpointing", "ac", "checkpoint_recompute", "checkpointed"),
    ),
    Feature(
        "Communication", TRAINING, "which collectives run, when, and over which ranks; communication hooks",
        files=("distributed/fsdp/test_fsdp_exec_order",),
        words=(
            "comm", "comms", "communication", "collectives", "all_gather", "reduce_scatter",
            "reduction", "all_reduce", "logging",
        ),
    ),
    Feature(
        "Overlap and prefetching", TRAINING, "communication during computation",
        words=("overlap", "prefetch", "prefetching", "post_optim_event", "stream_order"),
    ),
    Feature("Memory", TRAINING, "what is held, and when it is freed", words=("memory", "leak", "mem_tracker", "freed")),
    Feature(
        "Extensions", TRAINING, "tensor subclasses that customize the all-gather",
        words=("extension", "extensions"),
    ),
    Feature(
        "State dicts of models", STATE, "full, sharded and local; on rank 0 only, and offloaded",
        files=("distributed/checkpoint/test_state_dict*", "distributed/checkpoint/fsdp/test_fsdp_dsd"),
        words=("state_dict", "model_state", "save_load"),
    ),
    Feature(
        "State dicts of optimizers", STATE, "full, sharded and flattened; at other world sizes",
        words=("optim_state", "optimizer_state", "optim_load"),
    ),
    Feature(
        "Distributed checkpoint", STATE, "torch.distributed.checkpoint: save, load, reshard, convert",
        files=("distributed/checkpoint/*", "distributed/fsdp/test_distributed_checkpoint"),
        words=("dcp", "checkpoint_on_disk", "checkpoint_resume", "damaged_checkpoint", "checkpoint_of_other_layout"),
    ),
    Feature(
        "Tensor parallelism", BESIDE, "two and three dimensions: FSDP over DTensor parameters",
        files=("distributed/_composable/test_composability/test_2d*", "distributed/tensor/*"),
        words=("tp", "tensor_parallel", "tensor_parallelism", "2d", "3d", "dtensor", "strided"),
    ),
    Feature(
        "Pipeline parallelism", BESIDE, "stages that are sharded",
        files=("distributed/test_composability",), words=("pp", "pipeline", "1f1b", "split_backward"),
    ),
    Feature("Expert parallelism", BESIDE, "experts that are sharded separately", words=("ep", "experts", "expert")),
    Feature(
        "torch.compile", BESIDE, "dynamo, AOT autograd, Inductor",
        words=("compile", "compiled", "dynamo", "inductor", "aot_eager", "fullgraph"),
    ),
    Feature("Typed tensors", BESIDE, "SPMD types", words=("spmd",)),
    Feature("Harness", SUITE, "ranks, verdicts, devices", files=("harness/*",)),
    Feature("Dispatcher", SUITE, "selection, processes, reports", files=("dispatch/*",)),
)  # fmt: skip

_PARTS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+[A-Z]?(?![a-z])|\d+")


def words_of(file: str, test: str) -> str:
    """The words of a test's file, class and method in lower case, with ``_`` between and around them."""
    cls, _, method = test.rpartition(".")
    parts = [file.rpartition("/")[2], *_PARTS.findall(cls), method]
    return f"_{'_'.join(parts).lower()}_"


def features_of(file: str, test: str, features: Sequence[Feature] = FEATURES) -> list[Feature]:
    """The features of a test. Empty if nothing is known about the test."""
    name = words_of(file, test)
    return [feature for feature in features if feature.has(file, name)]


def summary(files: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each feature that has tests among the files of a ``report.json``."""
    tests: dict[Feature, list[Mapping[str, Any]]] = {feature: [] for feature in FEATURES}
    for file in files:
        for test in file["tests"]:
            for feature in features_of(file["file"], test["test"]):
                tests[feature].append(test)
    return [_row(feature, its) for feature, its in tests.items() if its]


def _row(feature: Feature, tests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counts = tally(test["outcome"] for test in tests)
    return {
        "name": feature.name,
        "group": feature.group,
        "about": feature.about,
        **{name: counts[state] for state, name in COUNTS.items()},
        "missing": _missing(tests),
    }


def _missing(tests: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    whole: collections.Counter[str] = collections.Counter()
    parts: collections.Counter[str] = collections.Counter()
    for test in tests:
        if test["outcome"] == State.SKIPPED:
            whole[test["reason"]] += 1
        else:
            parts.update(test["subtests_skipped"])
    reasons = sorted({*whole, *parts}, key=lambda reason: (-whole[reason], -parts[reason], reason))
    return [{"reason": reason, "tests": whole[reason], "subtests": parts[reason]} for reason in reasons]
