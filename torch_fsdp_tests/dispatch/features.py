"""The features of FSDP, the tests of each, and their results. A test may belong to several features.

``data/features.txt`` says which: a line for each folder, file, class or test, with the features that all tests of it
belong to. Classes and tests stand indented below their file. A test that is not named belongs to the features of its
class, its file and its folders.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch_fsdp_tests.verdict import State, tally

DECLARED = Path(__file__).parent / "data" / "features.txt"

# The names of the numbers of a feature in report.json.
COUNTS = {
    State.PASSED: "passed",
    State.FAILED: "failed",
    State.SKIPPED: "skipped",
    State.KNOWN_DEFECT: "known_defects",
    State.KNOWN_FAILURE: "known_failures",
    State.NOT_RUN: "not_run",
}


class Feature(NamedTuple):
    """A feature, the group of features that it belongs to in tables, and a sentence about it."""

    name: str
    group: str
    about: str


API, SHARDING, TRAINING, STATE, BESIDE, SUITE = (
    "Interfaces",
    "Sharding",
    "Training",
    "Saving and loading",
    "Together with",
    "The suite itself",
)

FEATURES = (
    Feature("FSDP1", API, "FullyShardedDataParallel"),
    Feature("FSDP2", API, "fully_shard"),
    Feature("Replication", API, "replicate, which is FSDP2 without shards"),
    Feature(
        "Sharding strategies", SHARDING,
        "full shards, sharded gradients only, no shards; resharding after forward",
    ),
    Feature("Hybrid sharding", SHARDING, "HSDP: shards within a group, replicas across groups"),
    Feature("Uneven shards", SHARDING, "sizes that the world size does not divide; ranks without a shard"),
    Feature("Wrapping", SHARDING, "which modules become units: policies, nesting, several roots"),
    Feature("Deferred initialization", SHARDING, "models on the meta device; states that rank 0 sends"),
    Feature("Frozen, ignored and shared parameters", SHARDING, "what is not trained, not sharded, or used twice"),
    Feature("Original parameters", SHARDING, "use_orig_params of FSDP1"),
    Feature("Unsharding by hand", SHARDING, "summon_full_params, unshard and reshard"),
    Feature("Forward and backward", TRAINING, "the same losses and gradients as without FSDP, for all kinds of inputs"),
    Feature("Gradient accumulation", TRAINING, "several backward passes per step, with and without communication"),
    Feature("Gradient clipping", TRAINING, "norms over shards"),
    Feature("Gradient scaling", TRAINING, "GradScaler and ShardedGradScaler"),
    Feature("Mixed precision", TRAINING, "other dtypes for computation, communication and storage"),
    Feature("Offload", TRAINING, "parameters, gradients and states in host memory"),
    Feature("Activation checkpointing", TRAINING, "activations that are computed again in the backward pass"),
    Feature("Communication", TRAINING, "which collectives run, when, and over which ranks; communication hooks"),
    Feature("Overlap and prefetching", TRAINING, "communication during computation"),
    Feature("Memory", TRAINING, "what is held, and when it is freed"),
    Feature("Extensions", TRAINING, "tensor subclasses that customize the all-gather"),
    Feature("State dicts of models", STATE, "full, sharded and local; on rank 0 only, and offloaded"),
    Feature("State dicts of optimizers", STATE, "full, sharded and flattened; at other world sizes"),
    Feature("Distributed checkpoint", STATE, "torch.distributed.checkpoint: save, load, reshard, convert"),
    Feature("Tensor parallelism", BESIDE, "two and three dimensions: FSDP over DTensor parameters"),
    Feature("Pipeline parallelism", BESIDE, "stages that are sharded"),
    Feature("Expert parallelism", BESIDE, "experts that are sharded separately"),
    Feature("torch.compile", BESIDE, "dynamo, AOT autograd, Inductor"),
    Feature("Typed tensors", BESIDE, "SPMD types"),
    Feature("Harness", SUITE, "ranks, verdicts, devices"),
    Feature("Dispatcher", SUITE, "selection, processes, reports"),
)  # fmt: skip


@functools.cache
def declared() -> Mapping[str, Sequence[str]]:
    """The features of each declared ``folder``, ``folder/file``, ``folder/file::Class`` or ``::Class.test``."""
    found: dict[str, list[str]] = {}
    file = ""
    for line in DECLARED.read_text(encoding="utf-8").splitlines():
        name, _, features = line.partition(" = ")
        name = f"{file}::{name.strip()}" if name.startswith(" ") else (file := name)
        found[name] = features.split("; ") if features else []
    return found


def names_of(file: str, test: str) -> Iterator[str]:
    """The names by which a test can be declared. A declared class or test may be longer in a report: by a type of
    device, as in ``TestInputCPU``, and by parameters, as in ``test_it_offload_True``.
    """
    folders = file.split("/")
    yield from ("/".join(folders[:end]) for end in range(1, len(folders) + 1))
    cls, _, method = test.rpartition(".")
    words = method.split("_")
    methods = ["_".join(words[:end]) for end in range(1, len(words) + 1)]
    for name in (cls[:end] for end in range(1, len(cls) + 1) if end == len(cls) or cls[end:].isupper()):
        yield f"{file}::{name}"
        yield from (f"{file}::{name}.{method}" for method in methods)


def features_of(file: str, test: str) -> list[Feature]:
    """The features of a test. Empty for a test that is not declared."""
    found = {feature for name in names_of(file, test) for feature in declared().get(name, ())}
    return [feature for feature in FEATURES if feature.name in found]


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
