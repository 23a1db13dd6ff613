"""FSDP2 reports its steps in the profiler's trace and, only if enabled, in its debug log."""

from __future__ import annotations

import collections
import functools
import os
import re
import unittest

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.installed_torch import torch_facts
from torch_fsdp_tests.logging_utils import LoggingTestCase
from torch_fsdp_tests.processes import system

requires_distributed = functools.partial(unittest.skipIf, not dist.is_available(), "requires distributed")

# The script runs on one rank. FSDP's default mesh creates the process group from environment variables.
SCRIPT = """
import logging
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
for module in (*model, model):
    fully_shard(module)
model(torch.rand(4, 4)).sum().backward()
{between_steps}
model(torch.rand(4, 4)).sum().backward()
dist.destroy_process_group()
print("finished")
"""

# The input has no gradient, so autograd does not run the first layer's post-backward. The final callback runs it.
LINES_OF_A_STEP = [
    "FSDP::root_pre_forward",
    "FSDP::pre_forward (0)",
    "FSDP::post_forward (0)",
    "FSDP::pre_forward (1)",
    "FSDP::post_forward (1)",
    "FSDP::pre_backward (1)",
    "FSDP::post_backward (1)",
    "FSDP::pre_backward (0)",
    "FSDP::root_post_backward",
    "FSDP::post_backward (0)",
]


@functools.cache
def log_of_script(settings: str | None, between_steps: str = "") -> str:
    """Return stderr of two steps with ``TORCH_LOGS=settings``, or with it unset. Port 0 means any free port."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_LOGS"}
    environment |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    environment |= {"MASTER_ADDR": system.LOOPBACK, "MASTER_PORT": "0"}
    if settings is not None:
        environment["TORCH_LOGS"] = settings
    script = SCRIPT.format(between_steps=between_steps)
    out, err = (text.decode() for text in LoggingTestCase.run_process_no_exception(script, environment))
    assert out.split()[-1:] == ["finished"], f"the script did not come to its end:\n{out}\n{err}"
    return err


class LoggingTests(LoggingTestCase):
    @requires_distributed()
    @skip_if_lt_x_gpu(1)
    def test_fsdp_logging(self):
        log = log_of_script("+fsdp")
        for line in LINES_OF_A_STEP:
            self.assertIn(line, log)

    @requires_distributed()
    @skip_if_lt_x_gpu(1)
    def test_order_and_count(self):
        """Each step logs exactly these ten lines, in this order."""
        lines = re.findall(r"FSDP::\w+(?: \(.*?\))?", log_of_script("+fsdp"))
        self.assertEqual(lines, LINES_OF_A_STEP * 2)

    @requires_distributed()
    @skip_if_lt_x_gpu(1)
    def test_silence(self):
        """FSDP logs nothing by default, nor at the INFO level."""
        log = log_of_script(None, between_steps="torch._logging.set_logs(fsdp=logging.INFO)")
        self.assertNotIn("FSDP::", log)


class TestProfilerLabels(FSDPTest):
    world_size = 2

    def _labels_of_a_step(self) -> collections.Counter[str]:
        """FSDP's labels in the trace of a step. The groups: two layers, a group of two layers, and the root."""
        model = nn.Sequential(*(nn.Linear(4, 4, device=self.device) for _ in range(5)))
        for part in (model[0], model[1], [model[2], model[3]], model):
            fully_shard(part)
        return self._labels_of(model)

    def _labels_of(self, model: nn.Module) -> collections.Counter[str]:
        """Count FSDP's labels in the trace of the second step."""
        inp = torch.rand(2, 4, device=self.device)
        model(inp).sum().backward()
        with profile(activities=[ProfilerActivity.CPU]) as trace:
            model(inp).sum().backward()
        return collections.Counter(event.name for event in trace.events() if event.name.startswith("FSDP::"))

    @skip_if_lt_x_gpu(2)
    def test_labels(self):
        """A group's labels have the names of its modules. The root's labels have no names."""
        actual = self._labels_of_a_step()
        groups = [" (0)", " (1)", " (2, 3)"]
        for label in ("all_gather", "all_gather_copy_out"):  # the root stays unsharded after forward
            self.assertEqual([actual[f"FSDP::{label}{suffix}"] for suffix in ("", *groups)], [1, 2, 2, 2], label)
        for label in ("pre_backward", "post_backward_reduce"):
            self.assertEqual([actual[f"FSDP::{label}{suffix}"] for suffix in ("", *groups)], [1, 1, 1, 1], label)
        for label in ("root_pre_forward", "root_post_backward_callback"):
            self.assertEqual(actual[f"FSDP::{label}"], 1, label)
        prefetched = [actual[f"FSDP::backward_prefetch for {names}"] for names in ("2, 3", "1", "0")]
        self.assertEqual(prefetched, [1, 1, 1])
        wait = "FSDP::post_backward_rs_wait"  # see the next test
        suffixes = {re.sub(r"^FSDP::\w+( for)?", "", name) for name in actual if not name.startswith(wait)}
        self.assertEqual(suffixes, {"", *groups, " 0", " 1", " 2, 3"})

    @needs(torch_facts.HAS_MESH_PER_PARAMETER)
    @skip_if_lt_x_gpu(2)
    def test_labels_of_groups_of_one_module(self):
        """Labels of a module's groups contain the size of the mesh, so groups on meshes of different sizes differ."""
        alone = [dist.new_group([rank]) for rank in range(self.world_size)][self.rank]
        info = internals.fsdp2_common.FSDPMeshInfo(DeviceMesh.from_group(alone, self.device.type), shard_mesh_dim=0)
        result = internals.fsdp2_common.ShardPlacementResult(Shard(0), info)
        layer = nn.Linear(4, 4, device=self.device)
        fully_shard(layer, shard_placement_fn=lambda param: result if param.ndim == 1 else None)
        found = self._labels_of(layer)
        self.assertEqual([found[f"FSDP::post_backward_reduce [pg={size}]"] for size in (1, 2)], [1, 1])

    @needs(torch_facts.LABELS_REDUCE_SCATTER_WAIT)
    @skip_if_lt_x_gpu(2)
    def test_label_of_wait(self):
        """The label of the wait for the previous reduce-scatter has empty parentheses for the root without a name."""
        waits = {name for name in self._labels_of_a_step() if name.startswith("FSDP::post_backward_rs_wait")}
        self.assertGreater(len(waits), 1)
        self.assertIn("FSDP::post_backward_rs_wait ()", waits)


if __name__ == "__main__":
    run_tests()
