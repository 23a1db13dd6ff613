"""``fully_shard(..., ignored_params=...)``: parameters that FSDP does not shard. DDP may manage them, or nothing does.

TestFullyShardIgnoreParams nests both: DDP wraps a model, FSDP wraps a submodule, and DDP manages a module inside that.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest, FSDPTestMultiThread
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.custom_comms import RecordingAllGather, RecordingReduceScatter
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average, average_gradients, full
from torch_fsdp_tests.fsdp.seeded import filled

DIM = 8
IGNORED_PATH = "module_b.module_c"


class C(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lin_c = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin_c(x)


class B(nn.Module):
    def __init__(self, dim: int, subtrahend: torch.Tensor) -> None:
        super().__init__()
        self.lin_b = nn.Linear(dim, dim)
        self.module_c = C(dim)
        self.subtrahend = nn.Parameter(subtrahend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin_b(self.module_c(x)) - self.subtrahend


class A(nn.Module):
    """Returns the sum of all elements of ``B(x) + addend``."""

    def __init__(self, dim: int, addend: torch.Tensor, subtrahend: torch.Tensor) -> None:
        super().__init__()
        self.module_b = B(dim, subtrahend)
        self.addend = nn.Parameter(addend)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.module_b(x) + self.addend).sum()


def _append_prefix(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _random_rows(seed: int) -> torch.Tensor:
    return torch.randn((DIM, DIM), generator=torch.Generator().manual_seed(seed))


def _generate_model_and_input() -> tuple[A, torch.Tensor]:
    torch.manual_seed(21)
    return A(DIM, addend=_random_rows(42), subtrahend=_random_rows(70)), _random_rows(84)


def _find_name_param_mappings(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[nn.Parameter, str]]:
    params = dict(module.named_parameters())
    return params, {param: name for name, param in params.items()}


def _find_all_fsdped_modules(module: nn.Module) -> set[str]:
    return {name for name, submodule in module.named_modules() if isinstance(submodule, FSDPModule)}


def _discover_ddp_ignored_params(module: nn.Module) -> set[str]:
    """The names of all parameters below FSDP modules."""
    names = set()
    for path in _find_all_fsdped_modules(module):
        names |= {_append_prefix(path, name) for name, _ in module.get_submodule(path).named_parameters()}
    return names


def _modify_ddp_ignored_params(
    ddp_ignored: set[str], fsdp_ignored: set[nn.Parameter], param_to_name: dict[nn.Parameter, str]
) -> set[str]:
    """DDP must not ignore the parameters that FSDP ignores. ``param_to_name`` is from before the wrapping."""
    return ddp_ignored - {param_to_name[param] for param in fsdp_ignored}


def _discover_fsdp_ignored_params(module: nn.Module, path: str) -> set[nn.Parameter]:
    submodule = module.get_submodule(path)
    if any(True for _ in submodule.buffers()):
        raise ValueError(f"{path} has buffers, which DDP would not know as its own")
    return set(submodule.parameters())


def _post_order_wrap_fsdp(
    module: nn.Module, path: str, ignored_path: str, ignored_params: set[nn.Parameter], **kwargs: Any
) -> None:
    """Wrap all modules below ``module`` and then ``module``, except those at and below ``ignored_path``."""
    if path == ignored_path:
        return
    for name, child in module.named_children():
        _post_order_wrap_fsdp(child, _append_prefix(path, name), ignored_path, ignored_params, **kwargs)
    fully_shard(module, ignored_params=ignored_params, **kwargs)


class TestFullyShardIgnoreParams(FSDPTest):
    world_size = 2

    def compare_params(self, name: str, ref_param: torch.Tensor, param: torch.Tensor) -> None:
        self.assertEqual(full(param), full(ref_param), msg=lambda text: f"{name}: {text}")

    def compare_ref_test_params(self, ref_model: nn.Module, model: nn.Module) -> None:
        ref_params, params = dict(ref_model.named_parameters()), dict(model.named_parameters())
        self.assertEqual(list(params), list(ref_params))
        self.assertEqual(len(params), 6)
        for name, ref_param in ref_params.items():
            self.compare_params(name, ref_param.detach(), params[name].detach())

    def _ddp(self, model: nn.Module) -> DDP:
        device = self.device
        return DDP(model, device_ids=None if device.index is None else [device.index], broadcast_buffers=False)

    def _ddp_fsdp_ddp(self, model: A) -> DDP:
        """Apply FSDP to ``module_b`` without ``module_c``, and DDP to the model. Check what each manages."""
        _, param_to_name = _find_name_param_mappings(model)
        fsdp_ignored = _discover_fsdp_ignored_params(model, IGNORED_PATH)
        _post_order_wrap_fsdp(model.module_b, "module_b", IGNORED_PATH, fsdp_ignored)
        self.assertEqual(_find_all_fsdped_modules(model), {"module_b", "module_b.lin_b"})

        below_fsdp = _discover_ddp_ignored_params(model)
        sharded = {"module_b.subtrahend", "module_b.lin_b.weight", "module_b.lin_b.bias"}
        ignored = {"module_b.module_c.lin_c.weight", "module_b.module_c.lin_c.bias"}
        self.assertEqual(below_fsdp, sharded | ignored)
        ddp_ignored = _modify_ddp_ignored_params(below_fsdp, fsdp_ignored, param_to_name)
        self.assertEqual(ddp_ignored, sharded)
        DDP._set_params_and_buffers_to_ignore_for_model(model, sorted(ddp_ignored))
        self.assertEqual({name for name, param in model.named_parameters() if isinstance(param, DTensor)}, sharded)
        return self._ddp(model)

    @skip_if_lt_x_gpu(2)
    def test_ddp_A_fsdp_B_ddp_C(self):
        """A model with FSDP inside DDP, and DDP parameters inside FSDP, trains like a model with only DDP."""
        device = self.device
        model, inp = _generate_model_and_input()
        model, inp = model.to(device), inp.to(device)
        ref_model = self._ddp(copy.deepcopy(model))
        wrapped = self._ddp_fsdp_ddp(model)
        ref_optim, optim = (torch.optim.Adam(module.parameters(), lr=1e-2) for module in (ref_model, wrapped))
        self.compare_ref_test_params(ref_model, wrapped)
        start = copy.deepcopy(ref_model.module)
        ref_losses = []
        for _ in range(3):
            ref_loss, loss = ref_model(inp), wrapped(inp)
            ref_loss.backward()
            loss.backward()
            ref_losses.append(ref_loss)
            self.assertEqual(loss, ref_loss)
            ref_optim.step()
            # The optimizer has plain and sharded parameters. Where foreach is the default, it would otherwise raise
            # because of the defect optimizer_ignored_parameters_break_foreach.
            with implicit_replication():
                optim.step()
            self.compare_ref_test_params(ref_model, wrapped)
            ref_optim.zero_grad()
            optim.zero_grad()
        check_losses(ref_losses)
        for old, new in zip(start.parameters(), ref_model.parameters()):
            self.assertNotEqual(old, new)

    @skip_if_lt_x_gpu(2)
    def test_who_averages(self):
        """Each gradient is averaged over the ranks once, by DDP if FSDP ignores its parameter, otherwise by FSDP."""
        device = self.device
        model, inp = _generate_model_and_input()
        ref_model = copy.deepcopy(model).to(device)
        inp = (inp * (self.rank + 1) + self.rank).to(device)
        wrapped = self._ddp_fsdp_ddp(model.to(device))
        numels = {"lin_b": DIM * DIM + DIM, "subtrahend": DIM * DIM}
        for step in range(2):
            ref_model(inp).square().backward()
            average_gradients(ref_model)
            with recorded() as calls:
                wrapped(inp).square().backward()
            reduced = sorted(output.numel() for output in calls.values("reduce_scatter", "output"))
            self.assertEqual(reduced, sorted(numel // self.world_size for numel in numels.values()))
            params = dict(wrapped.module.named_parameters())
            for name, ref_param in ref_model.named_parameters():
                grad = params[name].grad
                is_fsdps = name.startswith("module_b") and not name.startswith(IGNORED_PATH)
                self.assertEqual(isinstance(grad, DTensor), is_fsdps, name)
                self.assertTrue(ref_param.grad.any(), name)
                self.compare_params(f"gradient of {name} in step {step}", ref_param.grad, grad)
                ref_param.grad = params[name].grad = None

    @skip_if_lt_x_gpu(2)
    def test_buffers_below_ignored_path(self):
        """The search for ignored parameters rejects buffers, because nothing would sync them."""
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
        self.assertEqual(_discover_fsdp_ignored_params(model, "1"), set(model[1].parameters()))
        with self.assertRaisesRegex(ValueError, "0 has buffers"):
            _discover_fsdp_ignored_params(model, "0")


class Tied(nn.Module):
    """Two layers with separate biases and one shared weight."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(4, 4, device=device) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


class Optional(nn.Module):
    """Adds the output of an extra layer if ``use_extra`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.extra = nn.Linear(4, 4), nn.Linear(4, 4)
        self.use_extra = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin(x) + self.extra(x) if self.use_extra else self.lin(x)


class TestFullyShardIgnoreParamsAlone(FSDPTestMultiThread):
    world_size = 2

    def _sharded(
        self, module: nn.Module, ignored: set[nn.Parameter]
    ) -> tuple[RecordingAllGather, RecordingReduceScatter]:
        fully_shard(module, ignored_params=ignored, reshard_after_forward=True)
        gather, reduce_scatter = RecordingAllGather(), RecordingReduceScatter()
        module.set_custom_all_gather(gather)
        module.set_custom_reduce_scatter(reduce_scatter)
        return gather, reduce_scatter

    def _backward(self, ref_model: nn.Module, model: nn.Module) -> None:
        """Run a backward of both models on the same input, which differs by rank."""
        inp = torch.sin(torch.arange(8.0, device=self.device)).view(2, 4) * (self.rank + 1)
        outputs = [module(inp) for module in (ref_model, model)]
        self.assertEqual(outputs[1], outputs[0])
        for output in outputs:
            output.square().sum().backward()

    def _check_gradients(self, ref_model: nn.Module, model: nn.Module, ignored: set[str]) -> None:
        """Gradients of sharded parameters must be means over ranks, those of ignored parameters local."""
        params = dict(model.named_parameters())
        self.assertEqual(list(params), [name for name, _ in ref_model.named_parameters()])
        self.assertEqual(
            {name for name, param in params.items() if not isinstance(param, DTensor)}, ignored, may_be="empty"
        )
        for name, ref_param in ref_model.named_parameters():
            expected = ref_param.grad.clone()
            if name not in ignored:
                average([expected])
            self.assertTrue(expected.any(), name)
            self.assertEqual(full(params[name].grad), expected, msg=name)

    @skip_if_lt_x_gpu(1)
    def test_ignored_parameters_stay(self):
        """Ignored parameters stay the same objects in the same memory. They are not communicated."""
        ref_model = filled(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))).to(self.device)
        model = copy.deepcopy(ref_model)
        ignored = {"2.weight": model[2].weight, "2.bias": model[2].bias}
        pointers = [param.data_ptr() for param in ignored.values()]
        gather, reduce_scatter = self._sharded(model, set(ignored.values()))
        for _ in range(2):  # the second accumulates gradients
            self._backward(ref_model, model)
            self._check_gradients(ref_model, model, set(ignored))
            for name, param in ignored.items():
                self.assertIs(model.get_parameter(name), param)
                self.assertIs(type(param), nn.Parameter)
            self.assertEqual([param.data_ptr() for param in ignored.values()], pointers)
        numel = 4 * 4 + 4
        self.assertEqual([numel for _, numel, _ in gather.outputs], [numel] * 4)
        self.assertEqual([inp.numel() for inp in reduce_scatter.inputs], [numel] * 2)
        state_dict = model.state_dict()
        self.assertEqual(list(state_dict), ["0.weight", "0.bias", "2.weight", "2.bias"])
        for name, value in state_dict.items():
            self.assertEqual(isinstance(value, DTensor), name not in ignored, name)
            self.assertEqual(full(value), ref_model.get_parameter(name).detach(), msg=name)

    @skip_if_lt_x_gpu(1)
    @subtests(ignored=["0.bias", "0.weight"])
    def test_one_parameter_of_a_layer(self, ignored):
        """A layer may have one parameter sharded and the other ignored."""
        ref_model = filled(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))).to(self.device)
        model = copy.deepcopy(ref_model)
        gather, _ = self._sharded(model, {model.get_parameter(ignored)})
        for _ in range(2):
            self._backward(ref_model, model)
            self._check_gradients(ref_model, model, {ignored})
        numel = 2 * (4 * 4 + 4) - ref_model.get_parameter(ignored).numel()
        self.assertEqual({numel for _, numel, _ in gather.outputs}, {numel})

    def _layer_after_backward(self) -> tuple[nn.Module, nn.Module]:
        """A plain layer and one whose bias is ignored, with the same gradients. The bias is averaged by hand."""
        ref_model = filled(nn.Linear(4, 4)).to(self.device)
        model = copy.deepcopy(ref_model)
        self._sharded(model, {model.bias})
        self._backward(ref_model, model)
        average([*(param.grad for param in ref_model.parameters()), model.bias.grad])
        return ref_model, model

    @skip_if_lt_x_gpu(1)
    @subtests(foreach=[True, False], optim_cls=[torch.optim.SGD, torch.optim.AdamW])
    def test_optimizer(self, foreach, optim_cls):
        """An optimizer trains sharded and ignored parameters."""
        models = self._layer_after_backward()
        optims = [optim_cls(model.parameters(), lr=0.1, foreach=foreach) for model in models]
        optims[0].step()
        with torch_defect("optimizer_ignored_parameters_break_foreach", when=foreach):
            optims[1].step()
            for ref_param, param in zip(*(model.parameters() for model in models)):
                self.assertEqual(full(param.detach()), ref_param.detach())

    @skip_if_lt_x_gpu(1)
    @subtests(foreach=[None, True, False])
    def test_clip_grad_norm(self, foreach):
        """The norm covers the gradients of sharded and ignored parameters."""
        ref_model, model = self._layer_after_backward()
        ref_norm = nn.utils.clip_grad_norm_(ref_model.parameters(), 0.1)
        self.assertGreater(ref_norm.item(), 0.1)
        with torch_defect("optimizer_ignored_parameters_break_foreach"):
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=foreach)
            self.assertEqual(full(norm), ref_norm)
            for ref_param, param in zip(ref_model.parameters(), model.parameters()):
                self.assertEqual(full(param.grad), ref_param.grad)

    @skip_if_lt_x_gpu(1)
    def test_module_with_buffer(self):
        """FSDP manages a module with only ignored parameters if it has a buffer.

        FSDP moves the buffer to the device, but not the parameters.
        """
        model = nn.Sequential(nn.BatchNorm1d(4), nn.LayerNorm(4), nn.Linear(4, 4))  # in CPU memory
        host = model[2].weight.device
        ignored = {*model[0].parameters(), *model[1].parameters()}
        fully_shard(model, ignored_params=ignored)
        managed = [getattr(module, "_is_fsdp_managed_module", False) for module in (model, *model)]
        self.assertEqual(managed, [True, True, False, True])
        self.assertEqual({buffer.device for buffer in model.buffers()}, {self.device})
        self.assertEqual({param.device for param in ignored}, {host})
        self.assertEqual({param for param in model.parameters() if not isinstance(param, DTensor)}, ignored)
        model.to(self.device)(torch.tensor([[1.0], [2.0]], device=self.device).expand(2, 4)).sum().backward()
        for param in model.parameters():
            self.assertIsNotNone(param.grad)

    @skip_if_lt_x_gpu(1)
    @subtests(groups=[1, 2])
    def test_tied_parameter(self, groups):
        """An ignored parameter stays shared by two modules, in one group or in two."""
        ref_model = filled(Tied(self.device))
        model = copy.deepcopy(ref_model)
        weight = model.first.weight
        for module in (model.first, model.second) if groups == 2 else ():
            fully_shard(module, ignored_params={weight})
        fully_shard(model, ignored_params={weight})
        for _ in range(2):
            self._backward(ref_model, model)
            self._check_gradients(ref_model, model, {"first.weight"})
            self.assertIs(model.first.weight, weight)
            self.assertIs(model.second.weight, weight)

    @skip_if_lt_x_gpu(1)
    def test_parameter_of_another_model(self):
        """A parameter of another model in ``ignored_params`` has no effect and stays unchanged."""
        ref_model = filled(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))).to(self.device)
        model, other = copy.deepcopy(ref_model), nn.Linear(4, 3, device=self.device)
        weight = other.weight
        self._sharded(model, {weight})
        self._backward(ref_model, model)
        self._check_gradients(ref_model, model, set())
        self.assertIs(other.weight, weight)
        self.assertIs(type(weight), nn.Parameter)

    @skip_if_lt_x_gpu(1)
    def test_ignored_parameters_on_meta(self):
        """Ignored parameters may be on the meta device at first, and be materialized later."""
        ref_model = filled(Optional()).to(self.device)
        model = copy.deepcopy(ref_model)
        model.extra.to("meta")
        ignored = set(model.extra.parameters())
        fully_shard(model, ignored_params=ignored, mesh=make_mesh(self.world_size))
        self._backward(ref_model, model)
        self._check_gradients(ref_model.lin, model.lin, set())
        self.assertEqual({param.device.type for param in ignored}, {"meta"})

        model.extra.to_empty(device=self.device)
        model.extra.load_state_dict(ref_model.extra.state_dict())
        for module in (ref_model, model):
            module.use_extra = True
            module.zero_grad()
        self._backward(ref_model, model)
        self._check_gradients(ref_model, model, {"extra.weight", "extra.bias"})


if __name__ == "__main__":
    run_tests()
