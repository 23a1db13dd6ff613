"""The limits of FSDP: torch still says what they quote, and ``--find`` shows them."""

import functools
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import torch
from runs import INPUTS, outputs
from torch import nn
from torch.utils._typing_utils import not_none

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.defects import limits, registry, tracebacks
from torch_fsdp_tests.defects.command import find
from torch_fsdp_tests.defects.command.command_line import main
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch.version_ranges import version_fits

command = functools.partial(outputs, main)
GLOO_ONLY = {"premultiplied_sum"}
UNNAMED = "dtensors_over_unnamed_meshes"
# Limits whose message is a part of another limit's, which comes later.
GENERAL = {"whole_state_dict": ["mixed_tensors"], "optimizer_state_is_missing": ["key_is_missing"]}
# Tracebacks of defects and users that have the message of a limit. Those of a defect do not tell which it is.
ALSO = {
    "dcp_checkpoint_of_empty_shards_is_not_loaded": ["key_is_missing"],
    "optimizer_ignored_parameters_break_foreach": ["mixed_tensors"],
    "user_collective_timeout": ["ranks_differ"],
}


class _Calls(nn.Module):
    """Its forward calls a function, so that frames of ``nn.Module`` are in the traceback."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self):
        return self.function()


def _key_below_optimizer_states():
    namespace: dict[str, Any] = {}
    place = "/site-packages/torch/distributed/checkpoint/state_dict.py"
    exec(compile("def _get_optim_state_dict(get): return get()", place, "exec"), namespace)
    namespace["_get_optim_state_dict"](lambda: dict[int, int]()[0])


PLAIN: dict[str, Callable[[], object]] = {
    "matrix times vector": _Calls(lambda: torch.mv(torch.ones(2, 3), torch.ones(4))),
    "matrix times matrix": _Calls(lambda: nn.Linear(2, 3)(torch.ones(1, 5))),
    "embedding with a vector": _Calls(lambda: nn.functional.embedding(torch.zeros(2, dtype=torch.long), torch.ones(4))),
    "matrix expected": _Calls(lambda: torch.addmm(torch.ones(1), torch.ones(2, 2), torch.ones(2))),
    "no leaf": lambda: (2 * torch.ones(1, requires_grad=True)).requires_grad_(False),
    "initialized bias": lambda: nn.init.xavier_uniform_(nn.Linear(2, 2).bias),
    "no value": lambda: not_none(None),
    "key of an optimizer": _key_below_optimizer_states,
    "dict": lambda: dict[str, int]()["weight"],
    "pickle": lambda: pickle.dumps(lambda: None),
    "shapes in a state dict": lambda: nn.Linear(2, 2).load_state_dict(nn.Linear(3, 3).state_dict()),
    "attribute": lambda: nn.Linear(2, 2).no_sync(),
    "dtype of an output": lambda: torch.add(torch.ones(1), 1, out=torch.ones(1, dtype=torch.int)),
    "view changed in place": lambda: torch.ones(2, requires_grad=True).unbind()[0].mul_(2),
}


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
            effect = limit.provoke(self.rank, self.device)
        except BaseException:  # that of checkpoints is no Exception
            text = traceback.format_exc()
            self.assertEqual(self._explaining(text), [id, *GENERAL.get(id, [])])
            self.assertEqual([defect.id for defect in tracebacks.raising(text)], [], may_be="empty")
        else:
            if limit.messages:
                self.assertEqual((id, self.rank), ("ranks_differ", 0))
            else:
                assert effect is not None
                self.assertNotEqual(*effect)

    @staticmethod
    def _explaining(text):
        return [each.id for each in limits.explaining(text)]


class TestOthers(TestCase):
    """Without it, a limit could explain what has another cause."""

    def test_plain_programs(self):
        """Mistakes in programs without FSDP raise similar messages."""
        for name, program in PLAIN.items():
            with self.subTest(name):
                try:
                    program()
                except Exception:
                    text = traceback.format_exc()
                self.assertEqual([each.id for each in limits.explaining(text)], [], may_be="empty")

    def test_defects(self):
        """The error of a defect, in the frames that it names."""
        for defect in registry.defects():
            if not defect.error or not defect.functions:
                continue
            with self.subTest(defect.id):
                path = "/".join(defect.where.split(".")[:-1])
                frames = [f'  File "/site-packages/{path}.py", line 1, in {name}\n' for name in defect.functions]
                text = f"Traceback:\n{''.join(frames)}{defect.message}\n"
                explaining = [each.id for each in limits.explaining(text)]
                self.assertEqual(explaining, ALSO.get(defect.id, []), may_be="empty")

    def test_key_with_a_similar_name(self):
        """A missing parameter is no missing state."""
        for key, id in {
            "optim.state.0.weight.step.": "optimizer_state_is_missing",
            "timestep_embedding.": "key_is_missing",
        }.items():
            with self.subTest(key):
                text = f"RuntimeError: Missing key in checkpoint state_dict: {key}"
                self.assertEqual(limits.explaining(text)[0].id, id)

    def test_recorded_tracebacks(self):
        """Of defects, and of mistakes that have nothing to do with FSDP."""
        for path in sorted((INPUTS / "tracebacks").glob("*.txt")):
            with self.subTest(path.stem):
                explaining = [each.id for each in limits.explaining(path.read_text())]
                self.assertEqual(explaining, ALSO.get(path.stem, []), may_be="empty")


class TestFind(TestCase):
    """Without it, ``--find`` could name a wrong defect for a mistake, or say nothing."""

    def test_a_limit_comes_before_defects(self):
        status, out, err = command(
            "--find", "RuntimeError: aten.mm.default got mixed torch.Tensor and DTensor, need to"
        )
        self.assertEqual((status, err), (0, ""))
        self.assertTrue(out.startswith("limit: An operator gets a sharded parameter of FSDP2 (a DTensor)"), out)
        self.assertIn("\n    what to do: Call the sharded module itself; ", out)

    def test_messages_without_a_traceback(self):
        """They find what they come from, and a log finds no defect by the words that it happens to have."""
        for text, id in {
            "RuntimeError: 'weight' must be 2-D": "flat_parameter_outside_of_forward",
            "AssertionError: Invariant encountered: value was None when it should not be": UNNAMED,
            "[rank1]:[E1103 04:07:42 ProcessGroupNCCL.cpp:629] [Rank 1] Watchdog caught collective operation timeout: "
            "WorkNCCL(SeqNum=12, OpType=_ALLGATHER_BASE, Timeout(ms)=600000)": "ranks_differ",
            "2026-01-01 10:00:00 INFO step 1\n2026-01-01 10:00:01 INFO saving checkpoint of optimizer state": "",
            "INFO mixed precision reduce dtype": "",
            "KeyError: 0": "",
        }.items():
            with self.subTest(text):
                found = [limit.id for limit in find.limits_for(text)]
                self.assertEqual(found, [id] * bool(id), may_be="empty")
                unrelated = [each.id for each in find.fitting(text) if not tracebacks.raising(text)]
                self.assertEqual(unrelated, [], may_be="empty")

    def test_words(self):
        for words, id in {
            "optimizer made before fully_shard": "optimizer_made_before_sharding",
            "scalar parameters": "scalar_parameter",
            "got mixed torch.Tensor and DTensor": "mixed_tensors",
            "tied weights": "tied_parameters",
            "uniform dtype": "flat_parameter_is_not_uniform",
            "missing key in checkpoint": "key_is_missing",
            "model.to(dtype) after fully_shard": "converted_after_forward",
            "optimizer created before fully_shard": "optimizer_made_before_sharding",
            "loss does not decrease, optimizer was built before fully_shard": "optimizer_made_before_sharding",
            "FSDP1 and generate": "flat_parameter_outside_of_forward",
            "loss is NaN after to_empty": "buffers_after_to_empty",
            "deepcopy of an FSDP1 model": "deep_copy",
            "freezing parameters after wrapping with FSDP": "frozen_after_wrapping",
            "torch.save pickle the fsdp model": "pickled_module",
            "initialize weights after fully_shard": "initialized_after_wrapping",
            "FSDP1 param.data is empty": "data_of_flat_parameter",
            "EMA of weights with fully_shard": "deep_copy",
            "torch.nn.utils.clip_grad_norm_ on an FSDP1 model": "norm_of_own_shards",
            "attribute on parameter lost after fully_shard": "attributes_of_parameters",
            "list in checkpoint is not restored by dcp.load": "containers_are_not_extended",
            "gradients of ignored modules are not averaged": "gradients_of_ignored_parameters",
            "unused parameter decays under FSDP1": "unused_parameter_of_used_instance",
        }.items():
            with self.subTest(words):
                self.assertEqual([limit.id for limit in find.limits_for(words) if limit.id == id], [id])
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
