"""``torch.amp.GradScaler`` over sharded gradients: all ranks must agree whether to skip a step.

Each rank sees only the non-finite values of its own shards. DTensor's handler of the unscaling op shares the result
with all ranks. Otherwise some ranks would step while others skip, and the model would silently become inconsistent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest, check_sharded_parity
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import NO_DEFECT, torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.seeded import uniform
from torch_fsdp_tests.fsdp.training import shard_each

INIT_SCALE = 2.0
TP_STYLES = {"in_proj": ColwiseParallel, "out_proj": RowwiseParallel}


def local_grad(param: nn.Parameter) -> torch.Tensor:
    assert isinstance(param.grad, DTensor), type(param.grad)
    return param.grad.to_local()


class TestFullyShardGradientScaler(FSDPTest):
    world_size = 4

    def _scaler(self, **kwargs: float) -> GradScaler:
        return GradScaler(init_scale=INIT_SCALE, enabled=True, device=accelerator.current().type, **kwargs)

    def _two_linears(self, seed: int = 0) -> nn.Sequential:
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Linear(4, 4, bias=False, device=self.device) for _ in range(2)))

    def _sharded(self, model: nn.Sequential, mesh: DeviceMesh | None = None) -> nn.Sequential:
        return shard_each((*model, model), mesh=mesh)

    def _inputs(self, seed: int, *shape: int) -> torch.Tensor:
        """Positive numbers that differ by seed, and from the parameters."""
        return uniform(*shape, seed=1000 + seed) + 0.1

    def _found_inf(self, scaler: GradScaler, optimizer: torch.optim.Optimizer) -> float:
        """The scaler's ``found_inf`` for this rank's device, which must be a plain 0 or 1."""
        records = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        self.assertEqual(list(records), [self.device])
        return records[self.device].item()

    def _check_on_all_ranks(self, **expected: tuple[float, float]) -> None:
        """Each pair (value on this rank, expected value) must match on every rank."""
        here = torch.tensor([actual for actual, _ in expected.values()], device=self.device)
        everywhere = [torch.empty_like(here) for _ in range(self.world_size)]
        dist.all_gather(everywhere, here)
        wanted = [float(value) for _, value in expected.values()]
        self.assertEqual(
            [actual.tolist() for actual in everywhere], [wanted] * self.world_size, msg=f"{list(expected)}"
        )

    @skip_if_lt_x_gpu(4)
    def test_gradient_scaler(self):
        self.run_subtests({"has_inf": [True, False], "test_2d": [True, False]}, self._test_gradient_scaler)

    def _test_gradient_scaler(self, has_inf: bool, test_2d: bool) -> None:
        if test_2d:
            model, inputs = self._stack_2d()
        else:
            model, inputs = self._sharded(self._two_linears()), self._inputs(self.rank, 4, 4)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        scaler = self._scaler()
        scaler.scale(model(inputs).sum()).backward()
        grad = local_grad(optimizer.param_groups[0]["params"][0])
        self.assertGreater(grad.count_nonzero().item(), 0)
        if has_inf and self.rank == 1:
            grad[0, 0] = math.inf
        saved = grad.clone()
        scale = scaler.get_scale()

        scaler.unscale_(optimizer)
        self.assertEqual(self._found_inf(scaler, optimizer), float(has_inf))
        self.assertEqual(scaler._per_optimizer_states[id(optimizer)]["stage"], OptState.UNSCALED)
        self.assertEqual(grad, saved / scale, rtol=0, atol=0, may_be="nonfinite")

        self.assertEqual(len(optimizer.state), 0)
        scaler.step(optimizer)
        self.assertEqual(len(optimizer.state), 0 if has_inf else len(list(model.parameters())))

        scaler.update()
        self.assertEqual(scale, INIT_SCALE)
        self.assertEqual(scaler.get_scale(), INIT_SCALE * scaler.get_backoff_factor() if has_inf else INIT_SCALE)

    def _mesh_2d(self) -> DeviceMesh:
        return make_mesh(2, 2, names=("dp", "tp"))

    def _stack_2d(self) -> tuple[nn.Module, torch.Tensor]:
        """Three MLPs with tensor parallelism inside FSDP, and an input that tensor-parallel ranks share."""
        mesh = self._mesh_2d()
        torch.manual_seed(0)
        model = nn.Sequential(*(MLP(2, self.device) for _ in range(3)))
        for param in model.parameters():
            nn.init.uniform_(param, 0.1, 1.0)  # every ReLU is active, so no gradient is zero
        plan = {f"{i}.{name}": style() for i in range(3) for name, style in TP_STYLES.items()}
        parallelize_module(model, mesh["tp"], plan)
        return self._sharded(model, mesh["dp"]), self._inputs(mesh.get_local_rank("dp"), 2)

    @skip_if_lt_x_gpu(4)
    @subtests(first_is_skipped=[True, False])
    def test_parameters_after_step(self, first_is_skipped):
        """A skipped step does not change parameters. Other steps train as without a scaler."""
        ref_model, model = self._two_linears(), self._sharded(self._two_linears())
        ref_optimizer, optimizer = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (ref_model, model))
        scaler = self._scaler()
        for step in range(3):
            skipped = first_is_skipped and step == 0
            inputs = self._inputs(10 * step + self.rank, 4, 4)
            ref_optimizer.zero_grad()
            ref_model(inputs).square().sum().backward()
            average_gradients(ref_model)

            before = [param.to_local().clone() for param in model.parameters()]
            optimizer.zero_grad()
            scaler.scale(model(inputs).square().sum()).backward()
            if skipped and self.rank == 2:
                local_grad(model[0].weight)[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            unchanged = [torch.equal(old, new.to_local()) for old, new in zip(before, model.parameters())]
            self.assertEqual(unchanged, [skipped] * 2)
            if not skipped:
                ref_optimizer.step()
                check_sharded_parity(self, ref_model, model)  # the gradients are already unscaled

    @skip_if_lt_x_gpu(4)
    @subtests(rank=[0, 1, 2, 3], value=[math.inf, -math.inf, math.nan], layer=[0, 1])
    def test_any_rank_any_value(self, rank, value, layer):
        """If one rank finds a non-finite value in any gradient, all ranks skip the step."""
        model = self._sharded(self._two_linears())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        scaler = self._scaler()
        scaler.scale(model(self._inputs(self.rank, 4, 4)).sum()).backward()
        if self.rank == rank:
            local_grad(model[layer].weight)[-1, -1] = value
        scaler.unscale_(optimizer)
        found_inf = self._found_inf(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        self._check_on_all_ranks(found_inf=(found_inf, 1), scale=(scaler.get_scale(), 1))

    @skip_if_lt_x_gpu(4)
    @subtests(has_inf=[True, False])
    def test_ranks_without_a_shard(self, has_inf):
        """Ranks with empty shards get the result of the other ranks."""
        model = fully_shard(nn.Linear(4, 2, bias=False, device=self.device))
        self.assertEqual(model.weight.to_local().numel(), 4 if self.rank < 2 else 0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        scaler = self._scaler()
        scaler.scale(model(self._inputs(self.rank, 3, 4)).sum()).backward()
        if has_inf and self.rank == 1:
            local_grad(model.weight)[0, 0] = math.inf
        scaler.unscale_(optimizer)
        self._check_on_all_ranks(found_inf=(self._found_inf(scaler, optimizer), has_inf))

    def _norm_then_mlp(self, norm_has_tp: bool = True) -> nn.Sequential:
        """A layer norm before an MLP that is sharded over ``tp``. The norm's parameters are the same on all tp ranks.

        With ``norm_has_tp`` they are DTensors on the whole mesh, replicated over ``tp``. Otherwise only FSDP shards
        them, over ``dp``.
        """
        mesh = self._mesh_2d()
        torch.manual_seed(0)
        model = nn.Sequential(nn.LayerNorm(4, device=self.device), MLP(4, self.device))
        between = Shard(0) if norm_has_tp else Replicate()
        plan = {"1.in_proj": ColwiseParallel(input_layouts=between), "1.out_proj": RowwiseParallel()}
        if norm_has_tp:
            plan["0"] = SequenceParallel(sequence_dim=0)
        parallelize_module(model, mesh["tp"], plan)
        return self._sharded(model, mesh["dp"])

    def _check_agreement_2d(
        self, model: nn.Sequential, params: list[nn.Parameter], shows: torch_defect = NO_DEFECT
    ) -> None:
        """Put an inf into the tp-sharded weight's gradient on one rank. Every rank of the mesh must find it.

        ``shows`` is the known defect that this shows. Even then, ranks 1 and 3, with the same TP shard, find the inf.
        """
        optimizer = torch.optim.SGD(params, lr=1e-2)
        scaler = self._scaler()
        scaler.scale(model(self._inputs(self.rank // 2, 2, 4)).sum()).backward()
        if self.rank == 1:
            local_grad(model[1].in_proj.weight)[0, 0] = math.inf
        scaler.unscale_(optimizer)
        found_inf = self._found_inf(scaler, optimizer)
        with shows:
            self._check_on_all_ranks(found_inf=(found_inf, 1))
        if self.rank % 2:
            self.assertEqual(found_inf, 1)

    @skip_if_lt_x_gpu(4)
    @subtests(norm_has_tp=[True, False])
    def test_split_parameter_first(self, norm_has_tp):
        """If the optimizer's first parameter is ``tp``-sharded, the whole mesh agrees."""
        model = self._norm_then_mlp(norm_has_tp)
        self._check_agreement_2d(model, [*model[1].parameters(), *model[0].parameters()])

    @skip_if_lt_x_gpu(4)
    def test_replicated_parameter_first(self):
        """If the optimizer's first parameter is ``tp``-replicated, the whole mesh agrees."""
        model = self._norm_then_mlp()
        shows = torch_defect("dtensor_scaler_disagrees_over_two_meshes")
        self._check_agreement_2d(model, list(model.parameters()), shows)

    @skip_if_lt_x_gpu(4)
    def test_parameter_of_one_dimension_first(self):
        """If only FSDP shards the optimizer's first parameter, the whole mesh agrees.

        The defect is that of :meth:`test_replicated_parameter_first`.
        """
        model = self._norm_then_mlp(norm_has_tp=False)
        shows = torch_defect("dtensor_scaler_disagrees_over_two_meshes")
        self._check_agreement_2d(model, list(model.parameters()), shows)

    def _mesh_hsdp(self) -> DeviceMesh:
        return make_mesh(2, 2, names=("replicate", "shard"))

    @skip_if_lt_x_gpu(4)
    @subtests(rank=[0, 1, 2, 3], infinite=["input", "loss weight"])
    def test_hsdp_reduction_spreads_inf(self, rank, infinite):
        """The reduction spreads a non-finite value to the replicas, and the scaler to all other ranks.

        An infinite input affects a column, and so every shard. An infinite loss weight affects one row of one shard.
        """
        mesh = self._mesh_hsdp()
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(4, 4, bias=False, device=self.device), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        inputs, weights = self._inputs(self.rank, 3, 4), torch.ones(4, device=self.device)
        if self.rank == rank:
            (inputs[1] if infinite == "input" else weights)[0] = math.inf
        scaler = self._scaler()
        scaler.scale((model(inputs) * weights).sum()).backward()
        spoilt = not local_grad(model.weight).isfinite().all().item()
        self.assertEqual(spoilt, infinite == "input" or mesh.get_local_rank("shard") == 0)
        before = model.weight.to_local().clone()
        scaler.unscale_(optimizer)
        found_inf = self._found_inf(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()
        self._check_on_all_ranks(found_inf=(found_inf, 1), scale=(scaler.get_scale(), 1))
        self.assertEqual(model.weight.to_local(), before, rtol=0, atol=0)

    @skip_if_lt_x_gpu(4)
    @subtests(hsdp=[True, False])
    def test_scale_over_steps(self, hsdp):
        """After a finite, an infinite and a finite step, the scale goes 2, 4, 2, 4."""
        model = self._sharded(self._two_linears(), self._mesh_hsdp() if hsdp else None)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        scaler = self._scaler(growth_interval=1)
        for step, (has_inf, scale_after) in enumerate([(False, 4), (True, 2), (False, 4)]):
            inputs = self._inputs(10 * step + self.rank, 4, 4)
            if has_inf and self.rank == 3:
                inputs[2, 1] = math.inf
            optimizer.zero_grad()
            scaler.scale(model(inputs).sum()).backward()
            scaler.step(optimizer)  # step also unscales
            scaler.update()
            self._check_on_all_ranks(scale=(scaler.get_scale(), scale_after))
        states = [optimizer.state[param] for param in model.parameters()]
        self.assertEqual([state["step"].item() for state in states], [2, 2])

    def _scales(self, scaler: GradScaler, model: nn.Sequential, infinite: Sequence[bool]) -> list[float]:
        """The scale after each step. In the ``infinite`` ones, a gradient of one rank is infinite."""
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        scales = []
        for has_inf in infinite:
            optimizer.zero_grad()
            scaler.scale(model(self._inputs(self.rank, 4, 4)).sum()).backward()
            if has_inf and self.rank == 1:
                local_grad(model[0].weight)[0, 0] = math.inf
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    @skip_if_lt_x_gpu(4)
    @subtests(before=[0, 2, 4], is_used=[True, False])
    def test_loaded_state(self, before, is_used):
        """A scaler that loads a state has the scales of the saved one from then on, even if it is in use."""
        model = self._sharded(self._two_linears())
        saved = self._scaler(growth_interval=3, growth_factor=4.0, backoff_factor=0.25)
        self._scales(saved, model, [False] * before)
        loaded = self._scaler()
        if is_used:
            self._scales(loaded, model, [True, False])
        loaded.load_state_dict(saved.state_dict())
        following = [False, False, True, False, False, False]
        self.assertEqual(self._scales(loaded, model, following), self._scales(saved, model, following))


if __name__ == "__main__":
    run_tests()
