"""Ten changes to torch's FSDP: how many tests ``--reaching`` selects for each, and how soon the first of them fails.

Each change is made in a copy of the installed torch, whose other files are links. With ``--whole`` the suite runs
without ``--reaching`` too, until its first failure, for comparison.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_fsdp_tests.dispatch import devices

_SELECTED = re.compile(r"(\d+) tests? in (\d+) files? reach ")
_TOLD = re.compile(r"^  failed: (.+)", re.MULTILINE)


@dataclass(frozen=True)
class Edit:
    """One change: what is wrong afterwards, and the text that is replaced, once, in a file of ``torch.distributed``."""

    what: str
    file: str
    old: str
    new: str


EDITS = (
    Edit(
        "FSDP2: gradients are not divided after reduction",
        "fsdp/_fully_shard/_fsdp_collectives.py",
        "_div_if_needed(reduce_output, postdivide_factor)",
        "pass",
    ),
    Edit(
        "FSDP2: uneven shards keep their padding",
        "fsdp/_fully_shard/_fsdp_param.py",
        "length = sharded_param.size(shard_dim) if",
        "length = padded_sharded_size[shard_dim] if",
    ),
    Edit(
        "FSDP2: keyword arguments are not cast",
        "fsdp/_fully_shard/_fsdp_state.py",
        "_apply_to_tensors(cast_fn, args), _apply_to_tensors(cast_fn, kwargs)",
        "_apply_to_tensors(cast_fn, args), kwargs",
    ),
    Edit(
        "FSDP2: the root is resharded after forward",
        "fsdp/_fully_shard/_fsdp_state.py",
        "fsdp_param_group.post_forward_mesh_info = None",
        "pass",
    ),
    Edit(
        "FSDP2: a default is another",
        "fsdp/_fully_shard/_fully_shard.py",
        "self, requires_gradient_sync: bool, *, recurse: bool = True",
        "self, requires_gradient_sync: bool, *, recurse: bool = False",
    ),
    Edit(
        "FSDP1: replicas do not reduce",
        "fsdp/_runtime_utils.py",
        "dist.all_reduce(new_sharded_grad, group=state._inter_node_pg)",
        "pass",
    ),
    Edit(
        "FSDP1: optimizer states forget scalars",
        "fsdp/_optim_utils.py",
        "processed_state.scalar_tensors[state_name] = value.cpu()",
        "processed_state.scalar_tensors[state_name] = value.cpu() * 0",
    ),
    Edit(
        "FSDP1: a wrapping policy is off by one",
        "fsdp/wrap.py",
        "is_large = nonwrapped_numel >= min_nonwrapped_numel",
        "is_large = nonwrapped_numel > min_nonwrapped_numel",
    ),
    Edit(
        "FSDP1: an overflow stays on its rank",
        "fsdp/sharded_grad_scaler.py",
        "dist.all_reduce(found_inf, async_op=True, group=self.process_group)",
        "dist.all_reduce(found_inf.clone(), async_op=True, group=self.process_group)",
    ),
    Edit(
        "state dicts: unknown keys are accepted",
        "checkpoint/state_dict.py",
        "state_dict=state_dict, strict=info.strict, assign=assign",
        "state_dict=state_dict, strict=False, assign=assign",
    ),
)


@contextlib.contextmanager
def _changed(torch: Path, edit: Edit) -> Iterator[tuple[Path, Path]]:
    """A folder with a torch that is changed, to be put before the installed one, and the change as a diff."""
    name = f"{torch.name}/distributed/{edit.file}"
    before = (torch.parent / name).read_text()
    if before.count(edit.old) != 1:
        raise SystemExit(f"torch {devices.torch_version()} does not have {edit.old!r} exactly once in {name}")
    after = before.replace(edit.old, edit.new)
    with tempfile.TemporaryDirectory(prefix="changed-torch-") as made:
        site = Path(made)
        shutil.copytree(torch, site / torch.name, copy_function=os.symlink)
        (site / name).unlink()
        (site / name).write_text(after)
        lines = difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
        )
        (site / "change.diff").write_text("".join(lines))
        yield site, site / "change.diff"


def _run(site: Path, words: list[str]) -> tuple[float, str]:
    """Seconds until ``run_test.py`` has seen a test fail, and what it printed."""
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with tempfile.TemporaryDirectory(prefix="reaching-") as reports:
        command = [sys.executable, "run_test.py", "-i", "distributed", "--fail-fast", "--report", reports, *words]
        started = time.monotonic()
        ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        return time.monotonic() - started, ended.stdout


def main(argv: Sequence[str]) -> int:
    """Print a table, one line for each change."""
    parser = argparse.ArgumentParser(prog="python -m torch_fsdp_tests.tools.benchmarks reaching", description=__doc__)
    parser.add_argument("--whole", action="store_true", help="also run the suite without --reaching")
    numbers = range(1, len(EDITS) + 1)
    words = f"try only the change with this number, from 1 to {len(EDITS)}; may be repeated"
    parser.add_argument("--only", type=int, action="append", choices=numbers, metavar="N", help=words)
    asked = parser.parse_args(argv)
    torch = devices.torch_folder()
    if torch is None or not Path("run_test.py").exists():
        parser.error("install torch, and run this command in the checkout of the suite")
    whole = " seconds without `--reaching` |" if asked.whole else ""
    print(f"| change | tests selected | files | seconds to the first failure |{whole}")
    print("|---|---|---|---|" + ("---|" if asked.whole else ""))
    for number, edit in enumerate(EDITS, 1):
        if asked.only and number not in asked.only:
            continue
        with _changed(torch, edit) as (site, diff):
            seconds, text = _run(site, ["--reaching", str(diff)])
            selected, failed = _SELECTED.search(text), _TOLD.search(text)
            tests, files = selected.groups() if selected else ("?", "?")
            row = f"| {edit.what} | {tests} | {files} | {seconds:.0f} |"
            print(f"{edit.what}: {failed[1] if failed else 'nothing'} failed first", file=sys.stderr)
            if asked.whole:
                seconds, text = _run(site, [])
                row += f" {seconds:.0f} |" if _TOLD.search(text) else f" nothing in {seconds:.0f} |"
        print(row, flush=True)
    return 0
