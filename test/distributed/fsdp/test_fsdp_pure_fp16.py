"""FSDP1 with a low precision model, converted before or after wrapping, with and without ``MixedPrecision``."""

from __future__ import annotations

import functools

import torch
from torch.distributed.fsdp import CPUOffload, MixedPrecision, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    NestedWrappedModule,
    get_devtype,
)
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.fsdp1_cases import FewRanksTest
from torch_fsdp_tests.fsdp.references import average, full_parameters


class TestPureFP16(FewRanksTest):
    def _nested(self, device_init_mode: DEVICEInitMode = DEVICEInitMode.DEVICE_BEFORE) -> NestedWrappedModule:
        return NestedWrappedModule.init(
            self.process_group, FSDPInitMode.NO_FSDP, device_init_mode, {}, deterministic=True
        )

    @skip_if_lt_x_gpu(2)
    @subtests(cpu_offload=[CPUOffload(offload_params=True), CPUOffload(offload_params=False)])
    def test_pure_fp16_training(self, cpu_offload):
        """An fp16 model has the loss and parameters of an fp16 model with DDP, with and without CPU offloading."""
        self._test_fsdp_parity(
            NestedWrappedModule,
            FSDPInitMode.RECURSIVE,
            DEVICEInitMode.DEVICE_BEFORE,
            cpu_offload=cpu_offload,
            num_iters=1,  # in later steps, the two fp16 models diverge
            use_pure_fp16=True,
        )

    @skip_if_lt_x_gpu(2)
    def test_fp16_dtypes(self):
        """For an fp16 model, forward and reductions use the dtypes of ``MixedPrecision``, or else the model's dtype.
        Parameters and gradients always have the model's dtype.
        """
        self._run_dtypes(torch.float16)

    @skip_if_lt_x_gpu(2)
    def test_bf16_dtypes(self):
        """Like :meth:`test_fp16_dtypes`, for a bf16 model."""
        self._run_dtypes(torch.bfloat16)

    def _run_dtypes(self, dtype: torch.dtype) -> None:
        self.run_subtests(
            {
                "to_half_before_fsdp_init": [False, True],
                "use_orig_params": [False, True],
                "mixed_precision": [
                    MixedPrecision(),
                    MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32),
                    MixedPrecision(param_dtype=torch.float32),
                    MixedPrecision(reduce_dtype=torch.float32),
                ],
            },
            self._test_fp16_dtypes,
            dtype,
        )

    def _test_fp16_dtypes(
        self,
        dtype: torch.dtype,
        to_half_before_fsdp_init: bool,
        use_orig_params: bool,
        mixed_precision: MixedPrecision,
    ) -> None:
        model = self._nested(device_init_mode=DEVICEInitMode.DEVICE_NEVER)
        if to_half_before_fsdp_init:
            model = model.to(dtype)
        device = self.device
        model = FSDP(model, device_id=device, use_orig_params=use_orig_params, mixed_precision=mixed_precision)
        if not to_half_before_fsdp_init:
            model = model.to(dtype)
        self.assertEqual({param.dtype for param in model.parameters()}, {dtype})

        inputs = tuple(each.to(dtype) for each in model.module.get_input(get_devtype()))
        with recorded() as calls:
            output = model(*inputs)
            model.module.get_loss(inputs, output).backward()

        param_dtype = mixed_precision.param_dtype or dtype
        reduce_dtype = mixed_precision.reduce_dtype or param_dtype
        self.assertEqual(output.dtype, param_dtype)
        handles = internals.handles(model)
        self.assertGreater(len(handles), 0)
        for handle in handles:
            flat_param = handle.flat_param
            self.assertEqual((flat_param.dtype, flat_param.grad.dtype, handle._orig_param_dtype), (dtype,) * 3)
            self.assertEqual(handle._fwd_bwd_param_dtype, param_dtype)
            self.assertEqual(handle._reduce_dtype, reduce_dtype)
        # The collectives use this dtype.
        self.assertEqual(calls.dtypes("reduce_scatter"), [reduce_dtype] * len(handles))
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        self.assertGreater(len(grads), 0)
        self.assertEqual({param.dtype for param in model.parameters()}, {dtype})
        self.assertEqual({grad.dtype for grad in grads}, {dtype})

    @skip_if_lt_x_gpu(2)
    @subtests(dtype=[torch.float16, torch.bfloat16], to_half_before_fsdp_init=[False, True])
    def test_parameters_after_a_step(self, dtype, to_half_before_fsdp_init):
        """After a step, the parameters of an fp16 or bf16 model match a plain model with averaged gradients."""
        reference = self._nested().to(dtype)
        model = self._nested()
        model = FSDP(model.to(dtype)) if to_half_before_fsdp_init else FSDP(model).to(dtype)
        before = [param.detach().clone() for param in reference.parameters()]
        inputs = tuple(each.to(dtype) for each in reference.get_input(get_devtype()))
        for each in (reference, model):
            optim = torch.optim.SGD(each.parameters(), lr=0.1)
            # Losses differ much by rank, so no rank's own gradient is close to the average.
            (each(*inputs).sum() * (self.rank + 1)).backward()
            if each is reference:
                grads = [param.grad.float() for param in each.parameters()]
                average(grads)
                for param, grad in zip(each.parameters(), grads):
                    param.grad = grad.to(dtype)
            optim.step()
        # The sum of gradients over ranks and the updated parameter are rounded. The tolerance is 2e-3 in fp16.
        tolerance = 2 * torch.finfo(dtype).eps
        actual = list(full_parameters(model).values())
        expected = list(reference.parameters())
        self.assertEqual(actual, expected, rtol=tolerance, atol=tolerance)
        moved = max((after - at_first).abs().max().item() for after, at_first in zip(expected, before))
        self.assertGreater(moved, 10 * tolerance)  # the step is larger than the tolerance

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True])
    def test_state_dict_of_half_model(self, use_orig_params):
        """The full state dict of an fp16 model is fp16. An fp32 model loads exactly its values."""
        wrap = functools.partial(FSDP, use_orig_params=use_orig_params)
        half, full = wrap(self._nested().half()), wrap(self._nested())
        with torch.no_grad():
            for param in full.parameters():
                param.zero_()
        with FSDP.state_dict_type(half, StateDictType.FULL_STATE_DICT):
            state_dict = half.state_dict()
        self.assertEqual({value.dtype for value in state_dict.values()}, {torch.float16})
        with FSDP.state_dict_type(full, StateDictType.FULL_STATE_DICT):
            full.load_state_dict(state_dict)
        expected = [param.detach().half().float() for param in self._nested().parameters()]
        self.assertEqual(list(full_parameters(full).values()), expected, rtol=0, atol=0)


instantiate_device_type_tests(TestPureFP16, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
