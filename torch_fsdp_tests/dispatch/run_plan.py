"""What one run does: its jobs in order, and what they need."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch_fsdp_tests import world_sizes
from torch_fsdp_tests.dispatch import listing, options, plan, times
from torch_fsdp_tests.dispatch.devices import DeviceSet
from torch_fsdp_tests.dispatch.discover import source_of
from torch_fsdp_tests.dispatch.expectations import Entry
from torch_fsdp_tests.dispatch.plan import Job
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.dispatch.select import Narrowed
from torch_fsdp_tests.dispatch.syntax import tests_by_class


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """The jobs of this shard in order of start, and the slots on which they run."""

    jobs: Sequence[Job]
    files: Collection[str]  # all that exist
    needs: Mapping[str, times.Needs]  # of the selected files
    ranks: int
    device_set: DeviceSet
    slots: Sequence[str]  # the names of what is assigned: devices, or places on the CPU
    entries: tuple[Entry, ...] = ()  # of the lists of tests
    remarks: Sequence[str] = ()


def make(
    run: RunTests,
    world_size: int | None,
    files: Mapping[str, Path],
    narrowed: Narrowed,
    device_set: DeviceSet,
) -> RunPlan:
    """Plan a run. With a ``world_size`` there are that many ranks, and files run one after the other."""
    selection = narrowed.tests
    known = times.load(run.execution.test_times, os.environ)
    ranks = world_sizes.planned(run.execution.ranks, world_size)
    jobs_at_a_time = run.execution.jobs or options.default_jobs(ranks) if world_size is None else 1
    slots = device_set.names or [f"slot {n + 1}" for n in range(jobs_at_a_time)]
    needs = {test.file: known.needs.get(test.file, times.Needs(ranks, ranks)) for test in selection}
    assigned = {name: len(slots) if device_set.is_assigned_whole else need.devices for name, need in needs.items()}
    cut = [test.file for test in selection if not test.is_whole and not narrowed.in_order]
    shards = plan.calculate_shards(
        run.selection.num_shards,
        selection,
        known.files,
        known.classes,
        threshold=plan.SPLIT_THRESHOLD if narrowed.may_be_cut else math.inf,
        weights={name: min(need, len(slots)) for name, need in assigned.items()} if device_set.assignable else {},
        names={name: tests_by_class(source_of(files[name])) or {} for name in cut},
    )
    parts = shards[run.selection.shard - 1][1]
    if narrowed.in_order:  # the order of the selection matters more than full use of the slots
        jobs = plan.make_jobs(plan.in_order(parts, selection), assigned, device_set.assignable)
    else:
        jobs = plan.order(plan.make_jobs(parts, assigned, device_set.assignable), len(slots), plan.assumed(parts))
    return RunPlan(jobs, files, needs, ranks, device_set, slots, remarks=known.remarks)


def shown(run: RunTests, planned: RunPlan) -> str:
    """The plan as text or as JSON, as the options ask."""
    placed = plan.simulate(planned.jobs, len(planned.slots), plan.assumed(job.part for job in planned.jobs))
    total = plan.makespan(placed)
    if run.output.as_json:
        return json.dumps(listing.plan_json(run, planned.jobs, total))
    return listing.plan_text(planned.jobs, total)
