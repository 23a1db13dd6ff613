"""What ``parallelize_module`` and its styles promise about parameters, inputs, outputs and gradients.

Meshes are both dimensions of a two-dimensional one, so groups do not start at rank 0. Weights are sharded unevenly.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.shards import chunk_of
from torch_fsdp_tests.installed_torch import torch_facts

MESHES: dict[str, Callable[[], DeviceMesh]] = {
    dim: lambda dim=dim: make_mesh(2, 2, names=("outer", "inner"))[dim]  # type: ignore[misc]
    for dim in ("outer", "inner")
}


class Layer(NamedTuple):
    """A kind of layer with a style, and how the style shards its parameters."""

    make: Callable[[], nn.Module]
    style: Callable[..., ParallelStyle]
    weight: Placement
    bias: Placement | None = None


LAYERS = {
    "columns of Linear": Layer(lambda: nn.Linear(4, 5), ColwiseParallel, Shard(0), Shard(0)),
    "rows of Linear": Layer(lambda: nn.Linear(5, 4), RowwiseParallel, Shard(1), Replicate()),
    "columns of Embedding": Layer(lambda: nn.Embedding(4, 5), ColwiseParallel, Shard(1)),
    "rows of Embedding": Layer(lambda: nn.Embedding(5, 4), RowwiseParallel, Shard(0)),
}
LAYOUTS: list[Placement] = [Replicate(), Shard(0), Shard(1), Shard(-1)]


def part(whole: torch.Tensor, mesh: DeviceMesh, layout: Placement) -> torch.Tensor:
    """This rank's part of ``whole``."""
    if layout.is_replicate():
        return whole
    return chunk_of(whole, mesh.get_local_rank(), mesh.size(), layout.dim)


def freeze(module: nn.Module, names: tuple[str, ...]) -> nn.Module:
    for name, param in module.named_parameters():
        param.requires_grad_(name not in names)
    return module


class TestMixin(DTensorTestBase):
    world_size = 4

    def _first_of(self, mesh: DeviceMesh, index: int = 0) -> int:
        return int(mesh.mesh[index])

    def _filled(self, make: Callable[[], nn.Module], seed: int) -> nn.Module:
        return filled(make(), seed=seed).to(self.device)


class TestParameters(TestMixin):
    @with_comms
    @needs(torch_facts.TP_KEEPS_REQUIRES_GRAD)
    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
        mesh=list(MESHES),
        name=list(LAYERS),
        source=[0, 1, None],
        frozen=[(), ("weight",), ("bias",), ("weight", "bias")],
    )
    def test_shards(self, mesh, name, source, frozen):
        """Each rank has its shard of the source rank's values, or of its own. Frozen parameters stay frozen."""
        mesh, layer = MESHES[mesh](), LAYERS[name]
        seed = self.rank if source is None else self._first_of(mesh, source)
        expected = self._filled(layer.make, seed)
        actual = freeze(self._filled(layer.make, self.rank), frozen)
        parallelize_module(actual, mesh, layer.style(), src_data_rank=source)
        for key, param in actual.named_parameters():
            layout: Any = getattr(layer, key)
            self.assertEqual((param.placements, param.device_mesh), ((layout,), mesh), key)
            self.assertEqual(param.requires_grad, key not in frozen, key)
            self.assertEqual(param.shape, expected.get_parameter(key).shape, key)
            self.assertEqual(param.to_local(), part(expected.get_parameter(key), mesh, layout), key)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(frozen=[(), ("weight",)])
    def test_sequence_parallel(self, frozen):
        """``SequenceParallel`` replicates the rank's own parameters. Frozen parameters stay frozen."""
        mesh, plain = MESHES["inner"](), self._filled(lambda: nn.LayerNorm(4), 1)
        actual = freeze(copy.deepcopy(plain), frozen)
        parallelize_module(actual, mesh, SequenceParallel())
        for key, param in actual.named_parameters():
            self.assertEqual(param.placements, (Replicate(),))
            self.assertEqual(param.to_local(), plain.get_parameter(key))
            with torch_defect("dtensor_sequence_parallel_trains_frozen_parameters", when=key in frozen):
                self.assertEqual(param.requires_grad, key not in frozen, key)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(path=["0", "2.0", "2.*", "*", ""], source=[1, None])
    def test_plans(self, path, source):
        """A plan reaches the modules of a path, with ``*`` for any name, and all of them get ``src_data_rank``."""
        reached = {"0": ["0"], "2.0": ["2.0"], "2.*": ["2.0", "2.1"], "*": ["0"], "": ["0"]}[path]
        mesh = MESHES["outer"]()

        def make() -> nn.Module:
            deep = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), deep if path != "*" else nn.ReLU())

        model = self._filled(make, self.rank)
        plain = self._filled(make, self.rank if source is None else self._first_of(mesh, source))
        own = self._filled(make, self.rank)
        target = model[0] if path == "" else model
        plan: dict[str, ParallelStyle] = {path: ColwiseParallel()}
        if path == "*":  # its other modules cannot be parallelized
            target = nn.Sequential(model[0])
        parallelize_module(target, mesh, plan, src_data_rank=source)
        for name, param in model.named_parameters():
            module = name.rpartition(".")[0]
            self.assertEqual(isinstance(param, DTensor), module in reached, name)
            expected = part(plain.get_parameter(name), mesh, Shard(0)) if module in reached else own.get_parameter(name)
            local = param.to_local() if isinstance(param, DTensor) else param
            shows = path == "" and module in reached and (source is not None or mesh.get_local_rank() > 0)
            with torch_defect("dtensor_plan_of_the_module_itself_loses_the_source_rank", when=shows):
                self.assertEqual(local, expected, name)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_plans_without_effect(self):
        """A path without a module warns. An unknown kind of plan, and a layer that a style does not know, raise."""
        mesh, model = MESHES["inner"](), nn.Sequential(nn.Linear(4, 4, device=self.device))
        with self.assertWarnsRegex(UserWarning, "could not be resolved"):
            parallelize_module(model, mesh, {"nowhere": ColwiseParallel()})
        with self.assertWarnsRegex(UserWarning, "will do nothing"):
            parallelize_module(model, mesh)
        with self.assertRaisesRegex(TypeError, "for parallelize_plan"):
            parallelize_module(model, mesh, "0")
        for style in (ColwiseParallel(), RowwiseParallel()):
            with self.assertRaisesRegex(NotImplementedError, "only support nn.Linear and nn.Embedding"):
                parallelize_module(nn.LayerNorm(4), mesh, style)
        with mesh:
            parallelize_module(model, parallelize_plan={"0": ColwiseParallel()})
        self.assertEqual(model[0].weight.device_mesh, mesh)


class TestComputation(TestMixin):
    def _check(self, mesh: DeviceMesh, plain: nn.Module, model: nn.Module, whole: torch.Tensor, **layouts: Any) -> None:
        """``model`` computes this rank's part of the plain output, and the gradients of all."""
        before, after, local, distributed = (layouts[key] for key in ("before", "after", "local", "distributed"))
        inp = part(whole.detach(), mesh, before).clone().requires_grad_(whole.is_floating_point())
        given = DTensor.from_local(inp, mesh, [before]) if distributed else inp
        out, ref = model(given), plain(whole)
        self.assertEqual(isinstance(out, DTensor), not local)
        if not local:
            self.assertEqual(out.placements, (Shard(after.dim % ref.ndim) if after.is_shard() else after,))
            out = out.to_local()
        self.assertEqual(out, part(ref, mesh, after))
        factors = torch.arange(1.0, ref.numel() + 1, device=self.device).view_as(ref)
        (out * part(factors, mesh, after)).sum().backward()
        (ref * factors).sum().backward()
        if whole.is_floating_point():
            self.assertEqual(inp.grad, part(whole.grad, mesh, before))
        for name, param in model.named_parameters():
            grad: Any = param.grad
            self.assertEqual(grad.full_tensor(), plain.get_parameter(name).grad, name)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
        name=list(LAYERS),
        mesh=list(MESHES),
        before=LAYOUTS,
        after=LAYOUTS,
        local=[True, False],
        distributed=[True, False],
    )
    def test_layers(self, name, mesh, before, after, local, distributed):
        """Inputs and outputs may have any layout, and outputs may stay DTensors."""
        mesh, layer = MESHES[mesh](), LAYERS[name]
        plain = self._filled(layer.make, 1)
        model = copy.deepcopy(plain)
        style = layer.style(input_layouts=before, output_layouts=after, use_local_output=local)
        parallelize_module(model, mesh, style)
        if isinstance(plain, nn.Embedding):
            whole = torch.arange(16, device=self.device).view(4, 4) % 4
        else:
            features = 5 if layer.style is RowwiseParallel else 4
            if features == 5 and before in (Shard(1), Shard(-1)):
                return  # a local input is taken as an even shard
            whole = uniform(4, features, seed=3).requires_grad_()
        self._check(mesh, plain, model, whole, before=before, after=after, local=local, distributed=distributed)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(mesh=list(MESHES), after=[None, Shard(1)], before=[None, Replicate()])
    def test_default_layouts(self, mesh, before, after):
        """The default input of columns is replicated, and their output is sharded like the default input of rows."""
        mesh = MESHES[mesh]()
        plain = self._filled(lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), 1)
        model = copy.deepcopy(plain)
        styles = ColwiseParallel(input_layouts=before, output_layouts=after), RowwiseParallel(input_layouts=after)
        parallelize_module(model, mesh, dict(zip("01", styles)))
        whole = uniform(4, 4, seed=3).requires_grad_()
        layouts = {"before": Replicate(), "after": Replicate(), "local": True, "distributed": False}
        self._check(mesh, plain, model, whole, **layouts)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(mesh=list(MESHES), dim=[0, 1], local=[True, False], given=[None, Shard(0), Shard(1), Replicate()])
    def test_sequence_parallel(self, mesh, dim, local, given):
        """The input is, or becomes, sharded on the dimension of the sequence, as the output is."""
        mesh, plain = MESHES[mesh](), self._filled(lambda: nn.LayerNorm(6), 1)
        model = copy.deepcopy(plain)
        parallelize_module(model, mesh, SequenceParallel(sequence_dim=dim, use_local_output=local))
        whole = uniform(2, 4, 6, seed=3)
        expected = part(plain(whole), mesh, Shard(dim))
        inp = part(whole, mesh, Shard(dim)) if given is None else distribute_tensor(whole, mesh, [given])
        out = model(inp)
        self.assertEqual(isinstance(out, DTensor), not local)
        self.assertEqual(out if local else out.to_local(), expected)
        if not local:
            self.assertEqual((out.placements, out.shape), ((Shard(dim),), whole.shape))
        (out if local else out.to_local()).square().sum().backward()
        plain(whole).square().sum().backward()
        self.assertEqual(model.weight.grad.full_tensor(), plain.weight.grad)


class Recorder(nn.Module):
    """Returns its arguments, and keeps them."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        return args[0] if len(args) == 1 else args


class TestPreparation(TestMixin):
    def _check(self, value: Any, mesh: DeviceMesh, whole: torch.Tensor, layout: Placement, local: bool) -> None:
        self.assertEqual(isinstance(value, DTensor), not local)
        if not local:
            self.assertEqual((value.placements, value.shape), ((layout,), whole.shape))
        self.assertEqual(value if local else value.to_local(), part(whole, mesh, layout))

    def _given(self, mesh: DeviceMesh, whole: torch.Tensor, layout: Placement, distributed: bool) -> torch.Tensor:
        whole = whole.clone()
        return distribute_tensor(whole, mesh, [layout]) if distributed else part(whole, mesh, layout)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
        mesh=list(MESHES),
        before=LAYOUTS[:3],
        after=LAYOUTS[:3],
        local=[True, False],
        distributed=[True, False],
        how=["input", "keyword", "output", "input and output"],
    )
    def test_layouts(self, mesh, before, after, local, distributed, how):
        """Arguments and outputs get the desired layouts. Those with None as their layout stay as they are."""
        mesh, whole, other = MESHES[mesh](), uniform(4, 6, seed=3), object()
        given, module = self._given(mesh, whole, before, distributed), Recorder()
        inputs: dict[str, Any] = {"input_layouts": (before, None), "desired_input_layouts": (after, None)}
        outputs: dict[str, Any] = {"output_layouts": (before, None), "desired_output_layouts": (after, None)}
        if how == "input":
            parallelize_module(module, mesh, PrepareModuleInput(**inputs, use_local_output=local))
            module(given, other)
            found = module.args
        elif how == "keyword":
            layouts = {"input_kwarg_layouts": {"a": before}, "desired_input_kwarg_layouts": {"a": after}}
            parallelize_module(module, mesh, PrepareModuleInput(**layouts, use_local_output=local))
            module(a=given, b=other)
            found = module.kwargs["a"], module.kwargs["b"]
        elif how == "output":
            parallelize_module(module, mesh, PrepareModuleOutput(**outputs, use_local_output=local))
            found = module(given, other)
        else:
            back = {"output_layouts": (after, None), "desired_output_layouts": (before, None)}
            style = PrepareModuleInputOutput(**inputs, **back, use_local_input=not local, use_local_output=local)
            parallelize_module(module, mesh, style)
            found = module(given, other)
            self._check(module.args[0], mesh, whole, after, not local)
            after = before
        self.assertIs(type(found), tuple)
        self._check(found[0], mesh, whole, after, local)
        self.assertIs(found[1], other)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_one_value(self):
        """A single layout is that of the only input, or of the only output, which is then no tuple."""
        mesh, whole = MESHES["inner"](), uniform(4, 6, seed=3)
        layouts = {"input_layouts": Shard(0), "desired_input_layouts": Replicate()}
        module = parallelize_module(Recorder(), mesh, PrepareModuleInput(**layouts))
        self._check(
            module(self._given(mesh, whole, Shard(0), distributed=False)), mesh, whole, Replicate(), local=False
        )
        layouts = {"output_layouts": Shard(0), "desired_output_layouts": Replicate()}
        module = parallelize_module(Recorder(), mesh, PrepareModuleOutput(**layouts))
        self._check(module(self._given(mesh, whole, Shard(0), distributed=False)), mesh, whole, Replicate(), local=True)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_numbers_of_values(self):
        """Another number of inputs or outputs than of layouts raises."""
        mesh, pair = MESHES["inner"](), (Replicate(), Replicate())
        with self.assertRaisesRegex(ValueError, "inputs and input_layouts should have same length"):
            style: ParallelStyle = PrepareModuleInput(input_layouts=pair, desired_input_layouts=pair)
            parallelize_module(Recorder(), mesh, style)(torch.ones(2))
        with self.assertRaisesRegex(ValueError, "outputs and output_layouts should have same length"):
            style = PrepareModuleOutput(output_layouts=pair, desired_output_layouts=pair)
            parallelize_module(Recorder(), mesh, style)(torch.ones(2))


if __name__ == "__main__":
    run_tests()
