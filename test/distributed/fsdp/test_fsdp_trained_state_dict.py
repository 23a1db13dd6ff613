"""State dicts of models that have trained."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTestContinuous
from torch_fsdp_tests.common_fsdp.substitutes import to_host_is_a_copy
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.fsdp1_state_dicts import FORMS, KINDS, StateDictMixin, gathered
from torch_fsdp_tests.installed_torch import torch_names

unshard_utils = torch_names.module("torch.distributed.fsdp._unshard_param_utils")
HOST = torch.device("cpu")  # the CPU is the subject


class TestFSDPStateDict(StateDictMixin, FSDPTestContinuous):
    world_size = 2

    def _step(self, model: nn.Module, optim: torch.optim.Optimizer, step: int) -> None:
        """One step of the uneven layers on this rank's rows."""
        optim.zero_grad()
        model(self._rows(4, 3, step=step)).square().sum().backward()
        optim.step()

    @skip_if_lt_x_gpu(2)
    def test_trained_state_dict(self):
        """Saved values equal those of a plain model that trains on the rows of all ranks.

        Full and sharded state dicts are copies, so training does not change them. Local ones hold the live shards.
        """
        # On other devices ``ShardedTensor.cpu`` rejects a flat shard, because its copy requires no gradient.
        offloaded = [form for form in FORMS if form[0] != "local_state_dict" or accelerator.current().is_cpu]
        self.run_subtests({"form": FORMS, "offload_to_cpu": [False]}, self._test_trained_state_dict)
        self.run_subtests({"form": offloaded, "offload_to_cpu": [True]}, self._test_trained_state_dict)

    @skip_if_lt_x_gpu(2)
    def test_copy_of_a_local_state_dict(self):
        """It cannot be copied after a step: its shards are views that were made under ``no_grad``."""
        model = self._wrapped(self._uneven_layers())
        state_dict = self._save(model, "local_state_dict")
        self._step(model, torch.optim.SGD(model.parameters(), lr=0.1), step=0)
        self.assertRaisesRegex(RuntimeError, "view was created in no_grad mode", copy.deepcopy, state_dict)

    def _test_trained_state_dict(self, form: tuple[str, bool], offload_to_cpu: bool) -> None:
        kind, use_orig_params = form
        ref_model = self._uneven_layers()
        model = self._wrapped(self._uneven_layers(), use_orig_params=use_orig_params)
        ref_optim, optim = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (ref_model, model))
        for step in range(3):
            ref_optim.zero_grad()
            for rank in range(self.world_size):
                loss = ref_model(self._rows(4, 3, of=rank, step=step)).square().sum()
                (loss / self.world_size).backward()
            ref_optim.step()
            self._step(model, optim, step)

        state_dict_type, config = KINDS[kind]
        with FSDP.state_dict_type(model, state_dict_type, config(offload_to_cpu=offload_to_cpu)), to_host_is_a_copy():
            saved = model.state_dict()
        expected = {name: value.clone() for name, value in ref_model.state_dict().items()}
        if kind == "local_state_dict":
            layers = {name: param.flatten() for name, param in expected.items()}
            expected = {
                f"{i}.{unshard_utils.FLAT_PARAM}": torch.cat([layers[f"{i}.weight"], layers[f"{i}.bias"]])
                for i in (0, 2)
            }
        # The float32 gradients of two ranks are added in another order, hence the tolerances of assertEqual.
        self.assertEqual(gathered(saved, self.device), expected, exact_device=False)
        for value in saved.values():
            for tensor in [shard.tensor for shard in value.local_shards()] if kind != "state_dict" else [value]:
                self.assertEqual(tensor.device, HOST if offload_to_cpu else self.device)

        before = {name: value.clone() for name, value in gathered(saved, HOST).items()}
        self._step(model, optim, step=3)
        after = gathered(saved, HOST)
        if kind == "local_state_dict" and not (offload_to_cpu and accelerator.current().has("device_memory")):
            live = [flat_param.data_ptr() for flat_param in internals.flat_params(model)]
            self.assertEqual([value.local_tensor().data_ptr() for value in saved.values()], live)
            for name, value in after.items():
                self.assertNotEqual(value, before[name])
        else:
            self.assertEqual(after, before, rtol=0, atol=0, exact_device=False)


if __name__ == "__main__":
    run_tests()
