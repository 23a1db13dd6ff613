"""FSDP1 saves and loads optimizer states of each kind: dtypes, memory formats, tensor subclasses, numbers and None, and
states of only some parameters.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullOptimStateDictConfig, FullStateDictConfig, OptimStateKeyType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.common_distributed import requires, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.optim_states import (
    FULL,
    OptimStateTest,
    Training,
    full_with_orig_params,
    load_into,
    set_state_dict_type,
)
from torch_fsdp_tests.fsdp.references import average_gradients, full_parameters
from torch_fsdp_tests.fsdp.seeded import filled, uniform


class StoredInBfloat16(torch.Tensor):
    """A float32 tensor subclass that is stored in bfloat16. ``detach`` is its only operator."""

    stored: torch.Tensor

    @staticmethod
    def __new__(cls, stored: torch.Tensor) -> StoredInBfloat16:
        self = torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=torch.float32, device=stored.device)
        self.stored = stored
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].stored.detach())
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class TestFSDPOptimState(OptimStateTest):
    @skip_if_lt_x_gpu(2)
    @subtests(without=["weight", "bias"])
    def test_flat_state_without_that_of_a_parameter(self, without):
        """If one parameter has no state, the flat state has zeros for it, in the dtype of the other's state."""
        plain = nn.Linear(4, 2, device=self.device, dtype=torch.bfloat16)
        optim = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        whole = torch.arange(1.0, 11.0).bfloat16()  # the weight and then the bias
        for values, (name, param) in zip(whole.split([8, 2]), plain.named_parameters()):
            if name == without:
                values.zero_()
            else:
                param.grad = values.view_as(param).to(self.device)
        optim.step()
        osd = FSDP.rekey_optim_state_dict(optim.state_dict(), OptimStateKeyType.PARAM_NAME, plain)
        model = FSDP(copy.deepcopy(plain), device_id=self.device)
        (state,) = FSDP.shard_full_optim_state_dict(osd, model)["state"].values()
        with torch_defect("fsdp1_optim_state_after_a_stateless_parameter_is_lost", when=without == "weight"):
            self.assertEqual(state["momentum_buffer"].cpu(), whole.chunk(2)[self.rank], may_be="zero")

    @skip_if_lt_x_gpu(2)
    @subtests(memory_format=[torch.contiguous_format, torch.channels_last], use_orig_params=[False, True])
    def test_state_in_each_memory_format(self, memory_format, use_orig_params):
        """Saving and loading keep the index of each element of a state, in each memory format of its parameter."""
        plain = nn.Conv2d(2, 3, (1, 2), device=self.device).to(memory_format=memory_format)
        model = FSDP(copy.deepcopy(plain), use_orig_params=use_orig_params)
        set_state_dict_type(model, full_with_orig_params())
        optims = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model, model)]
        for each in (plain, model):
            each(uniform(3, 2, 2, 2, seed=self.rank)).square().sum().backward()
        average_gradients(plain)
        for optim in optims[:2]:
            optim.step()
        expected = {name: optims[0].state[param] for name, param in plain.named_parameters()}
        saved = FSDP.optim_state_dict(model, optims[1])
        self.assertEqual(saved["state"], expected)
        load_into(optims[2], FSDP.optim_state_dict_to_load(model, optims[2], saved))
        loaded = FSDP.optim_state_dict(model, optims[2])["state"]
        with torch_defect("fsdp1_optim_state_in_channels_last_is_reordered", when=memory_format is torch.channels_last):
            self.assertEqual(loaded, expected)

    @skip_if_lt_x_gpu(2)
    @subtests(saved=["01", "0 1"], use_orig_params=[False, True], reverse=[False, True])
    def test_state_goes_to_the_parameter_of_its_name(self, saved, use_orig_params, reverse):
        """A parameter gets the state with its name, even if its group in the new optimizer has another order. Groups
        themselves are paired by position, as in ``Optimizer.load_state_dict``.
        """
        layers = [nn.Linear(1, 2, bias=False, device=self.device) for _ in range(2)]
        units = [FSDP(layer, use_orig_params=use_orig_params) for layer in layers]
        model = FSDP(nn.Sequential(*units), device_id=self.device, use_orig_params=use_orig_params)
        params = list(model.parameters())
        optims = [
            torch.optim.SGD(
                [{"params": [params[int(each)] for each in group]} for group in order.split()], momentum=0.9
            )
            for order in (saved, saved[::-1] if reverse else saved)  # "0 1" means two groups
        ]
        for value, param in enumerate(params, start=1):
            param.grad = torch.full_like(param, value + self.rank / 2)
        optims[0].step()
        osd = FSDP.optim_state_dict(model, optims[0])
        load_into(optims[1], FSDP.optim_state_dict_to_load(model, optims[1], osd))
        actual = [optims[1].state[param]["momentum_buffer"].flatten().tolist() for param in params]
        expected = [[1 + self.rank / 2], [2 + self.rank / 2]]
        self.assertEqual(actual, expected[::-1] if saved == "0 1" and reverse else expected)

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True])
    def test_states_of_two_dtypes(self, use_orig_params):
        """A state in bfloat16 is saved beside a parameter's moments in float32."""
        run = self._dummy(use_orig_params=use_orig_params)
        self._train(run)
        expected = {name: param.bfloat16().cpu() for name, param in full_parameters(run.model).items()}
        for param in run.model.parameters():
            if param.numel() > 0:
                run.optim.state[param]["low"] = param.detach().bfloat16()
        with torch_defect("fsdp1_optim_states_of_two_dtypes_raise", when=use_orig_params):
            saved = FSDP.optim_state_dict(run.model, run.optim)
            self.assertEqual({name: state["low"].cpu() for name, state in saved["state"].items()}, expected)

    @skip_if_lt_x_gpu(2)
    @subtests(step=[torch.tensor(2.0), torch.tensor(1.0, dtype=torch.float64)])
    def test_scalars_of_one_flat_parameter_must_be_equal(self, step):
        """A load raises if scalar states of one flat parameter's parameters differ in value or dtype."""
        model = FSDP(nn.Linear(4, 2, device=self.device))
        optim = torch.optim.Adam(model.parameters())
        model(uniform(3, 4, seed=self.rank)).square().sum().backward()
        optim.step()
        osd = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
        osd["state"]["bias"]["step"] = step
        with self.assertRaisesRegex(ValueError, "must have scalar state with the same value and dtype"):
            FSDP.shard_full_optim_state_dict(osd, model)

    @skip_if_lt_x_gpu(2)
    @subtests(is_subclass=[False, True])
    def test_state_of_a_tensor_subclass(self, is_subclass):
        """A state is saved if it is a tensor subclass with a storage format of its own."""
        model = FSDP(nn.Linear(2, 2, bias=False, device=self.device), use_orig_params=True)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        right = full_parameters(model)["weight"].bfloat16().float().cpu()
        for param in model.parameters():
            low = param.detach().bfloat16()
            optim.state[param]["moment"] = StoredInBfloat16(low) if is_subclass else low.float()
        with torch_defect("fsdp1_optim_states_of_a_subclass_raise", when=is_subclass):
            (state,) = FSDP.optim_state_dict(model, optim)["state"].values()
            moment = state["moment"]
            self.assertEqual((moment.stored.float() if is_subclass else moment).cpu(), right, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True], rank0_only=[False, True])
    def test_numbers_are_loaded(self, use_orig_params, rank0_only):
        """All ranks load states that are numbers or None. If only rank 0 has them, it raises for them itself."""
        model = FSDP(nn.Linear(2, 2, bias=False, device=self.device), use_orig_params=use_orig_params)
        optim = torch.optim.Adam(model.parameters())
        model(torch.ones(2, device=self.device)).sum().backward()
        optim.step()
        (param,) = model.parameters()
        optim.state[param].update(number=2.74, nothing=None)
        set_state_dict_type(model, full_with_orig_params(rank0_only))
        osd = FSDP.optim_state_dict(model, optim)
        load = FSDP.optim_state_dict_to_load
        if rank0_only and self.rank == 0:
            return self.assertRaisesRegex(AttributeError, "has no attribute 'cpu'", load, model, optim, osd)
        (state,) = load(model, optim, osd)["state"].values()
        self.assertEqual((state["number"], state["nothing"]), (2.74, None))

    @skip_if_lt_x_gpu(2)
    @subtests(amsgrad=[(False, False), (True, True), (False, True)])
    def test_kinds_of_state_by_group(self, amsgrad):
        """Each parameter has the states that its group's options require. FSDP1 raises if another parameter of the
        instance has more: it leaves no room for the missing state in the flat parameter.
        """
        plain = nn.Linear(2, 2, device=self.device)
        model = FSDP(copy.deepcopy(plain), use_orig_params=True)  # each rank has some elements of the weight
        set_state_dict_type(model, full_with_orig_params())
        optims = [
            torch.optim.Adam([{"params": [p], "amsgrad": on} for p, on in zip(each.parameters(), amsgrad)])
            for each in (plain, model)
        ]
        for each in (plain, model):
            each(uniform(3, 2, seed=self.rank)).square().sum().backward()
        average_gradients(plain)
        for optim in optims:
            optim.step()
        expected = {name: optims[0].state[param] for name, param in plain.named_parameters()}
        if amsgrad[0] != amsgrad[1]:
            return self.assertRaises(AssertionError, FSDP.optim_state_dict, model, optims[1])
        self.assertEqual(FSDP.optim_state_dict(model, optims[1])["state"], expected)

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True])
    def test_state_of_fused_optimizer(self, use_orig_params):
        """The state of a fused optimizer is saved and loaded (#108860)."""
        ref_model = filled(nn.Linear(3, 5)).to(self.device)
        models = [FSDP(copy.deepcopy(ref_model), use_orig_params=use_orig_params) for _ in range(2)]
        for model in models:
            set_state_dict_type(model, full_with_orig_params())
        runs = [Training(model, torch.optim.AdamW(model.parameters(), fused=True)) for model in models]
        ref_optim = torch.optim.AdamW(ref_model.parameters())

        def step(model: nn.Module, optim: torch.optim.Optimizer, seed: int) -> None:
            model(uniform(2, 3, seed=10 * seed + self.rank)).square().sum().backward()
            if model is ref_model:
                average_gradients(ref_model)
            optim.step()
            optim.zero_grad()

        step(models[0], runs[0].optim, 0)
        models[1].load_state_dict(models[0].state_dict())
        saved = FSDP.optim_state_dict(models[0], runs[0].optim)
        load_into(runs[1].optim, FSDP.optim_state_dict_to_load(models[1], runs[1].optim, saved))
        step(models[1], runs[1].optim, 1)
        for seed in range(2):
            step(ref_model, ref_optim, seed)
        self.assertEqual(full_parameters(models[1]), {name: p.detach() for name, p in ref_model.named_parameters()})

    @skip_if_lt_x_gpu(2)
    def test_steps_are_apart(self):
        """Each parameter of a saved state has its own step count, which increases by one per step."""
        model, plain = FSDP(nn.Linear(2, 3, device=self.device)), nn.Linear(2, 3, device=self.device)
        optims = [torch.optim.Adam(each.parameters()) for each in (model, plain)]
        model(torch.randn(4, 2, device=self.device)).sum().backward()
        optims[0].step()
        osd = FSDP.full_optim_state_dict(model, optims[0], rank0_only=False)
        optims[1].load_state_dict(FSDP.rekey_optim_state_dict(osd, OptimStateKeyType.PARAM_ID, plain, optim=optims[1]))
        plain(torch.randn(4, 2, device=self.device)).sum().backward()
        optims[1].step()
        with torch_defect("fsdp1_step_counts_are_shared"):
            self.assertEqual([int(state["step"]) for state in optims[1].state.values()], [2, 2])

    @requires(lambda: "here offloading copies" if accelerator.current().has("device_memory") else None)
    def test_offloaded_state_of_original_parameters(self):
        """With or without offloading, ``exp_avg`` is the average, not a state gathered later."""
        model = FSDP(nn.Linear(2, 3, device=self.device), use_orig_params=True)
        optim = torch.optim.Adam(model.parameters())
        model(torch.randn(4, 2, device=self.device)).sum().backward()
        optim.step()
        osds = []
        for offload_to_cpu in (False, True):
            config = FullOptimStateDictConfig(offload_to_cpu=offload_to_cpu)
            FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(), config)
            osds.append(FSDP.optim_state_dict(model, optim))
        with torch_defect("fsdp1_offloaded_optim_states_are_one"):
            self._check_same_osd(*osds)


if __name__ == "__main__":
    run_tests()
