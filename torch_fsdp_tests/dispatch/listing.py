"""Lists what would run, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch_fsdp_tests.dispatch.plan import Job, Seconds
from torch_fsdp_tests.dispatch.runtests import RunTests
from torch_fsdp_tests.dispatch.times import Needs
from torch_fsdp_tests.verdict import plural, seconds


def files_text(jobs: Iterable[Job], needs: Mapping[str, Needs]) -> str:
    """List the files in path order, each with the ranks of its widest test, its devices and its estimated time."""
    in_order = sorted(jobs, key=lambda job: job.key)
    return "\n".join(f"{_name(job)}  {plural(needs[job.part.name].ranks, 'rank')}{_about(job)}" for job in in_order)


def plan_text(jobs: Sequence[Job], total: Seconds) -> str:
    """List the plan, with a line for each job in order of start."""
    lines = [f"{_name(job)}{_about(job)}" for job in jobs]
    return "\n".join([*lines, f"{plural(len(jobs), 'job')}, estimate {seconds(total)}"])


def _name(job: Job) -> str:
    part = job.part
    which = f" ({part.shard} of {part.num_shards})" if part.num_shards > 1 else ""
    inside = f" [{', '.join(part.test.order or sorted(part.test.included))}]" if part.test.included else ""
    without = f" without [{', '.join(sorted(part.test.excluded))}]" if part.test.excluded else ""
    return f"{part.name}{which}{inside}{without}"


def _about(job: Job) -> str:
    about = "unknown" if job.part.time is None else seconds(job.part.time)
    assigned = f"  {plural(job.devices, 'device')}" if job.devices else ""  # on the CPU nothing is assigned
    return f"{assigned}  estimate {about}"


def plan_json(run: RunTests, jobs: Sequence[Job], total: Seconds) -> dict:
    """Return the plan as data. ``data/plan.schema.json`` describes it."""
    return {
        "shard": run.selection.shard,
        "num_shards": run.selection.num_shards,
        "jobs": [
            {
                "file": job.part.name,
                "shard_id": job.part.shard,
                "num_shards": job.part.num_shards,
                "devices": job.devices,
                "estimate": job.part.time,
                "tests": list(job.part.test.order) or sorted(job.part.test.included) or None,
                **({"excluded": sorted(job.part.test.excluded)} if job.part.test.excluded else {}),
            }
            for job in jobs
        ],
        "estimate": round(total, 3),
    }
