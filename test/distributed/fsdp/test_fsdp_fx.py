"""Symbolic tracing records the order in which a model uses its modules and parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.installed_torch import torch_names

trace_utils = torch_names.module("torch.distributed.fsdp._trace_utils")
ExecutionInfo = Any  # of trace_utils, which has it under a private name
ParamUsageInfo = Any  # the same


class Model(nn.Module):
    """Layers that run once, twice, or only on request, and own parameters, of which one is unused."""

    def __init__(self) -> None:
        super().__init__()
        self.weight1 = nn.Parameter(torch.randn(6, 6))
        self.weight2 = nn.Parameter(torch.randn(6, 6))
        self.weight_unused = nn.Parameter(torch.randn(2, 2))
        self.layer0 = nn.Linear(6, 6)
        self.layer1 = nn.Linear(6, 6, bias=False)
        self.layer2 = nn.Sequential(nn.Linear(6, 3, bias=False), nn.ReLU(), nn.Linear(3, 6, bias=False))
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor, run_all_layers: bool) -> torch.Tensor:
        z = self.relu(self.layer0(x))
        z = self.relu(self.layer2(z))
        z = z @ self.weight1
        if run_all_layers:
            z = self.relu(self.layer1(z))
            z = z @ self.weight2
            # Drops the result so far: the same layer runs again, on the input.
            z = self.relu(self.layer0(x))
        return z


def traced(model: Model, run_all_layers: bool) -> ExecutionInfo:
    tracer, exec_order = torch.fx.Tracer(), trace_utils._ExecOrderTracer()
    with exec_order.patch_tracer(tracer=tracer, root_module=model):
        tracer.trace(model, concrete_args={"run_all_layers": run_all_layers})
    return exec_order.exec_info


class TestSymbolicTracing(TestCase):
    def assertSame(self, found: list, expected: list) -> None:
        """Compare objects by identity and in order. Equality would compare parameters by value."""
        self.assertEqual([id(each) for each in found], [id(each) for each in expected], may_be="empty")

    def assertUsages(self, found: list[ParamUsageInfo], expected: list[tuple[nn.Module, list]]) -> None:
        self.assertSame([usage.module for usage in found], [module for module, _ in expected])
        for usage, (_, named_params) in zip(found, expected, strict=True):
            self.assertEqual([name for name, _ in usage.named_params], [name for name, _ in named_params])
            self.assertSame([param for _, param in usage.named_params], [param for _, param in named_params])

    def test_symbolic_tracing_outputs(self):
        """Modules and parameters are recorded in order of use, for each module, and once for the whole model."""
        model = Model()
        tracer, exec_order = torch.fx.Tracer(), trace_utils._ExecOrderTracer()
        original = tracer.call_module, tracer.create_proxy
        with exec_order.patch_tracer(tracer=tracer, root_module=model):
            self.assertNotEqual((tracer.call_module, tracer.create_proxy), original)
            tracer.trace(model, concrete_args={"run_all_layers": True})
        self.assertEqual((tracer.call_module, tracer.create_proxy), original)

        info, seq = exec_order.exec_info, model.layer2
        first = [model, model.layer0, model.relu, seq, seq[0], seq[1], seq[2], model.relu]
        self.assertSame(info.module_forward_order, [*first, model.layer1, model.relu, model.layer0, model.relu])

        def whole(module: nn.Module) -> tuple[nn.Module, list]:
            return module, list(module.named_parameters())

        usages = info.module_to_param_usage_infos
        self.assertEqual(set(usages), {model, model.layer0, model.layer1, seq, *seq, model.relu})
        expected = {
            model: [
                whole(model.layer0),
                whole(seq),
                (model, [("weight1", model.weight1)]),
                whole(model.layer1),
                (model, [("weight2", model.weight2)]),
                whole(model.layer0),
            ],
            model.layer0: [whole(model.layer0)],
            model.layer1: [whole(model.layer1)],
            seq: [whole(seq[0]), whole(seq[2])],
            seq[0]: [whole(seq[0])],
            seq[1]: [],
            seq[2]: [whole(seq[2])],
            model.relu: [],
        }
        for module, of_module in expected.items():
            self.assertUsages(usages[module], of_module)

        order = [*model.layer0.parameters(), seq[0].weight, seq[2].weight, model.weight1, model.layer1.weight]
        self.assertSame(info.param_forward_order, [*order, model.weight2])
        self.assertEqual(info.visited_params, {*order, model.weight2})
        self.assertEqual(len(info.visited_params), len(info.param_forward_order))

    def test_layers_that_do_not_run(self):
        """The record has no layers that the traced branch skips, and never an unused parameter."""
        model = Model()
        info, seq = traced(model, run_all_layers=False), model.layer2
        expected = [model, model.layer0, model.relu, seq, seq[0], seq[1], seq[2], model.relu]
        self.assertSame(info.module_forward_order, expected)
        order = [*model.layer0.parameters(), seq[0].weight, seq[2].weight, model.weight1]
        self.assertSame(info.param_forward_order, order)
        self.assertEqual(info.visited_params, set(order))
        self.assertNotIn(model.layer1, info.module_to_param_usage_infos)
        used = [usage.module for usage in info.module_to_param_usage_infos[model]]
        self.assertSame(used, [model.layer0, seq, model])
        for run_all_layers in (False, True):
            self.assertNotIn(model.weight_unused, traced(model, run_all_layers).visited_params)

    def test_exception_while_tracing(self):
        """After an exception, the tracer has its own methods again and works."""
        model = Model()
        tracer, exec_order = torch.fx.Tracer(), trace_utils._ExecOrderTracer()
        original = tracer.call_module, tracer.create_proxy
        with self.assertRaisesRegex(torch.fx.proxy.TraceError, "control flow"):
            with exec_order.patch_tracer(tracer=tracer, root_module=model):
                tracer.trace(model)  # fails: the branch depends on an unknown argument
        self.assertEqual((tracer.call_module, tracer.create_proxy), original)
        recorded = len(exec_order.exec_info.module_forward_order)
        tracer.trace(model, concrete_args={"run_all_layers": True})
        self.assertEqual(len(exec_order.exec_info.module_forward_order), recorded)


class TestRuntimeOrder(FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_order_at_runtime(self):
        """FSDP runs its units in the order that tracing recorded."""
        device = self.device
        for run_all_layers in (False, True):
            torch.manual_seed(0)
            model = Model().to(device)
            names = {module: name for name, module in model.named_modules()}
            modules = traced(model, run_all_layers).module_forward_order
            units = [module for module in modules if module is model or isinstance(module, nn.Linear)]
            reported = list(dict.fromkeys(names[module] for module in units))
            self.assertEqual(reported, ["", "layer0", "layer2.0", "layer2.2", *(["layer1"] if run_all_layers else [])])

            fsdp_model = FSDP(model, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
            instances = {internals.handle(unit): name for name, unit in internals.instances(fsdp_model).items()}
            fsdp_model(torch.randn(2, 6, device=device), run_all_layers).sum().backward()
            order = internals.execution_order(fsdp_model).handles_pre_forward_order
            self.assertEqual([instances[handle] for handle in order], reported)


instantiate_device_type_tests(TestSymbolicTracing, globals())

if __name__ == "__main__":
    run_tests()
