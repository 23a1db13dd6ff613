"""``-i smoke``: the list only names existing tests, covers every feature by the recorded map, and stays short."""

import collections
import unittest
from pathlib import Path

from torch_fsdp_tests.dispatch.discover import discover
from torch_fsdp_tests.dispatch.plan import positions_of
from torch_fsdp_tests.dispatch.select import select
from torch_fsdp_tests.extensions.reach.reach_map import ReachMap
from torch_fsdp_tests.extensions.reach.reaching import SHIPPED

TESTS = Path(__file__).resolve().parents[1]
FSDP1, FSDP2 = "torch.distributed.fsdp.", "torch.distributed.fsdp._fully_shard."
CHECKPOINT = "torch.distributed.checkpoint."
LONGEST = 60  # serial seconds of all tests by the map, whose times include the overhead of coverage

# For each heading of the list: functions that its tests enter. The map does not have compiled code.
RUNTIME, GROUP = f"{FSDP1}_runtime_utils.", f"{FSDP2}_fsdp_param_group.FSDPParamGroup."
ENTERED = {
    "FSDP1 and its sharding strategies": (f"{RUNTIME}_reduce_grad", f"{RUNTIME}_reduce_grad_no_shard"),
    "FSDP2": (f"{FSDP2}_fsdp_collectives.foreach_all_gather", f"{FSDP2}_fsdp_collectives.foreach_reduce"),
    "Gradient accumulation": (f"{FSDP2}_fully_shard.FSDPModule.set_requires_gradient_sync",),
    "Mixed precision": (
        f"{FSDP1}_flat_param.FlatParamHandle._use_low_precision_shard",
        f"{FSDP2}_fsdp_state.FSDPState._cast_output_dtype",
    ),
    "CPU offload": (f"{RUNTIME}_offload_grad", f"{GROUP}_validate_cpu_offload_params"),
    "State dicts": (
        f"{FSDP1}_state_dict_utils._local_pre_load_state_dict_hook",
        f"{FSDP1}_state_dict_utils._sharded_post_state_dict_hook",
        f"{GROUP}_register_state_dict_hooks.<locals>.to_sharded_hook",
    ),
    "Optimizer states": (f"{FSDP1}_optim_utils._optim_state_dict",),
    "Checkpoints": (f"{CHECKPOINT}state_dict_saver.save", f"{CHECKPOINT}state_dict_loader.load"),
    "HSDP": (
        f"{FSDP1}_init_utils._init_process_group_state_for_hybrid_shard",
        f"{FSDP2}_fsdp_common.HSDPMeshInfo.__post_init__",
    ),
    "Tensor parallelism": ("torch.distributed.tensor.parallel.fsdp.DTensorExtensions.pre_flatten_transform",),
    "Clipping of gradients": ("torch.distributed.tensor._ops._math_ops.foreach_norm_strategy",),
    "torch.compile": (),
}


def sections() -> dict[str, list[str]]:
    """The names of the list, by the heading above them."""
    found: dict[str, list[str]] = collections.defaultdict(list)
    heading = ""
    for line in (TESTS / "smoke.txt").read_text(encoding="utf-8").partition("\n\n")[2].splitlines():
        if line.startswith("#"):
            heading = line.removeprefix("#").strip()
        else:
            found[heading].append(line)
    return found


class TestSmoke(unittest.TestCase):
    """Without it, ``-i smoke`` could name tests that are gone, leave out a feature of FSDP, or take too long."""

    def reached(self, words: list[str], known: ReachMap) -> set[int]:
        """The positions in a map of the tests that these words select."""
        actual = set()
        for run in select(discover(TESTS), words, (), TESTS):
            own = {number: test.test for number, test in enumerate(known.tests) if test.file == run.file}
            for expected in run.included:
                here = positions_of(expected, list(own.values()))
                self.assertTrue(here, f"{run.file}::{expected} is no test that the map knows")
                actual |= {list(own)[place] for place in here}
        return actual

    def test_smoke_tests_exist_and_reach_every_feature(self):
        maps = sorted(SHIPPED.glob("map-*.json"))
        if not maps:
            self.skipTest("needs a recorded map of what tests reach")
        known = ReachMap.load(maps[-1])
        self.assertEqual(list(sections()), list(ENTERED))
        for heading, words in sections().items():
            tests = self.reached(words, known)
            for function in ENTERED[heading]:
                entering = {number for number in tests if known.reached[function] >> number & 1}
                self.assertTrue(entering, f"{heading}: no test enters {function}")
        seconds = sum(known.tests[number].seconds for number in self.reached(["smoke"], known))
        self.assertLess(seconds, LONGEST)

    def test_smoke_list_names_no_device_type(self):
        """A class that is generated for each device type has another name for each."""
        names = [name for words in sections().values() for name in words]
        self.assertEqual([name for name in names if "CPU" in name], [])


if __name__ == "__main__":
    unittest.main()
