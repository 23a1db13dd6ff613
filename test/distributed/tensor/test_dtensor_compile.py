"""``torch.compile`` with FSDP around tensor parallelism: one graph, and the same training as a plain model.

The ranks of one TP group have the same rows. FSDP ranks have different rows. The plain model averages its gradients
over the FSDP ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, MLPModule, with_comms
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.compiling import CountingBackend
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average_gradients, of_all_ranks
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.training import shard_each, train
from torch_fsdp_tests.installed_torch import torch_facts

STEPS = 3


class SimpleModel(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.mlp_0, self.mlp_1 = MLPModule(device), MLPModule(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp_1(self.mlp_0(x))


class TestDTensorCompileE2E(DTensorTestBase):
    world_size = 4

    def _model(self) -> SimpleModel:
        return filled(SimpleModel(self.device), high=0.5)

    def _tensor_parallel(self, mesh: DeviceMesh) -> Any:
        plan = {"net1": ColwiseParallel(), "net2": RowwiseParallel()}
        return parallelize_module(
            self._model(), mesh, {f"mlp_{index}.{name}": style for index in range(2) for name, style in plan.items()}
        )

    def _train(self, model: Any, call: Callable, mesh: DeviceMesh, is_plain: bool = False) -> list[torch.Tensor]:
        """The losses of some steps, and a last loss after them."""
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(STEPS + 1):
            optim.zero_grad()
            losses.append(train(call, uniform(20, 10, seed=10 * step + mesh.get_local_rank("dp"))))
            if is_plain:
                average_gradients(model, mesh.get_group("dp"))
            optim.step()
        return losses

    def _check_losses(self, mesh: DeviceMesh, found: list[torch.Tensor]) -> None:
        plain = self._model()
        expected = self._train(plain, plain, mesh, is_plain=True)
        check_losses(expected)
        self.assertEqual(found, expected)

    def _test_2d_fsdp_tp(self, checkpoints: bool) -> None:
        """An eager and a compiled model must train like a plain one."""
        mesh = make_mesh(2, 2, names=("dp", "tp"))

        def build() -> FSDP:
            model = self._tensor_parallel(mesh["tp"])
            if checkpoints:
                for name, mlp in list(model.named_children()):
                    setattr(model, name, internals.checkpoint_wrapping.checkpoint_wrapper(mlp))
            return FSDP(model, device_mesh=mesh["dp"], use_orig_params=True)

        eager, model, counting = build(), build(), CountingBackend()
        self._check_losses(mesh, self._train(eager, eager, mesh))
        self._check_losses(mesh, self._train(model, torch.compile(model, backend=counting), mesh))
        self.assertEqual(len(counting.graphs), 1)
        self.assertEqual(counting.count("tag_activation_checkpoint"), 2 if checkpoints else 0)
        torch.compiler.reset()

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_2d_fsdp_tp_compile(self):
        self._test_2d_fsdp_tp(checkpoints=False)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_2d_fsdp_tp_ac_compile(self):
        """With activation checkpointing there is still one graph, and training equals a plain model's.

        Upstream compares the gradients of the compiled model with themselves.
        """
        self._test_2d_fsdp_tp(checkpoints=True)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(reshard_after_forward=[True, False])
    def test_2d_fully_shard_of_compiled_blocks(self, reshard_after_forward):
        """FSDP2 around separately compiled blocks. Each block compiles once, even if it reshards."""
        torch.compiler.reset()
        mesh = make_mesh(2, 2, names=("dp", "tp"))
        model, counting = self._tensor_parallel(mesh["tp"]), CountingBackend()
        for mlp in model.children():
            mlp.compile(backend=counting, fullgraph=True)
        shard_each([*model.children(), model], mesh=mesh["dp"], reshard_after_forward=reshard_after_forward)
        self._check_losses(mesh, self._train(model, model, mesh))
        self.assertEqual(len(counting.graphs), 2)
        torch.compiler.reset()

    @with_comms
    @skip_if_lt_x_gpu(4)
    @needs(torch_facts.HAS_KEYS_FOR_CACHED_GRAPHS)
    @subtests(rows=[8, 7, 3])
    def test_cache_keys_of_shards(self, rows):
        """A cache of compiled graphs tells the shards of a parameter apart if they differ in shape."""
        weight = fully_shard(nn.Linear(2, rows, bias=False, device=self.device)).weight.detach()
        keys = of_all_ranks((tuple(weight.to_local().shape), internals.cache_key(weight)))
        shapes = {shape for shape, _ in keys}
        with torch_defect("compiler_cached_graph_of_another_rank", when=len(shapes) > 1):
            self.assertEqual(len({key for _, key in keys}), len(shapes))


if __name__ == "__main__":
    run_tests()
