"""The limits of FSDP: torch still says what they quote, and ``--find`` shows them."""

import functools
import traceback

import torch
from runs import outputs

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.defects import limits
from torch_fsdp_tests.defects.command import find
from torch_fsdp_tests.defects.command.command_line import main
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch.version_ranges import version_fits

command = functools.partial(outputs, main)
GLOO_ONLY = {"premultiplied_sum"}


class TestLimits(FSDPTest):
    """Without it, a message could be out of date, and its user would find nothing, or a defect that it is not."""

    world_size = 2

    @skip_if_lt_x_gpu(2)
    @parametrize("id", sorted(limits.LIMITS))
    def test_message(self, id):
        limit = limits.LIMITS[id]
        if id in GLOO_ONLY and accelerator.current().backend != "gloo":
            self.skipTest("needs gloo")
        if not version_fits(torch.__version__, f">={limit.since}"):
            self.skipTest(f"needs the message of torch {limit.since}")
        try:
            limit.provoke(self.rank, self.device)
        except BaseException:  # that of checkpoints is no Exception
            self.assertEqual([each.id for each in limits.explaining(traceback.format_exc())][:1], [id])
        else:
            self.assertEqual((id, self.rank), ("ranks_differ", 0))


class TestFind(TestCase):
    """Without it, ``--find`` could name a wrong defect for a mistake, or say nothing."""

    def test_a_limit_comes_before_defects(self):
        status, out, err = command(
            "--find", "RuntimeError: aten.mm.default got mixed torch.Tensor and DTensor, need to"
        )
        self.assertEqual((status, err), (0, ""))
        self.assertTrue(out.startswith("limit: An operator gets a sharded parameter of FSDP2 (a DTensor)"), out)
        self.assertIn("\n    what to do: Call the sharded module itself; ", out)

    def test_words(self):
        for words, id in {
            "optimizer made before fully_shard": "optimizer_made_before_sharding",
            "scalar parameters": "scalar_parameter",
            "got mixed torch.Tensor and DTensor": "mixed_tensors",
            "tied weights": "tied_parameters",
            "uniform dtype": "flat_parameter_is_not_uniform",
            "missing key in checkpoint": "key_is_missing",
            "model.to(dtype) after fully_shard": "converted_after_forward",
        }.items():
            with self.subTest(words):
                self.assertIn(id, [limit.id for limit in find.limits_for(words)])
        of_defects = (
            "KeyError betas after loading an optimizer with an empty param group",
            "model.half() on an FSDP model is reverted after forward",
        )
        for words in ("setStorage", "183702", "compile", "checkpoint", "evaluation", "mixed precision", *of_defects):
            with self.subTest(words):
                self.assertEqual(find.limits_for(words), [])


instantiate_parametrized_tests(TestLimits)

if __name__ == "__main__":
    run_tests()
