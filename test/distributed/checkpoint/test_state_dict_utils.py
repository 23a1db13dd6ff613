"""The helper functions of distributed state dicts: gather, offload, copy to the CPU, and shard."""

from __future__ import annotations

import io
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_fsdp_tests.common_distributed import at_most, requires_capability, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.common_state_dict import EXACT, is_sharded, whole_tree
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import of_all_ranks
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.shards import shard_largest_dim
from torch_fsdp_tests.fsdp.training import shard_each, train

HOST = torch.device("cpu")  # the CPU is the subject


class TestStateDictUtils(DTensorTestBase):
    world_size = at_most(4)

    def _rows(self, rank: int, seed: int = 0) -> torch.Tensor:
        """One rank's rows of a tensor."""
        return uniform(3, 3, 3, seed=100 * seed + rank)

    def _whole(self, seed: int = 0) -> torch.Tensor:
        return torch.cat([self._rows(rank, seed) for rank in range(self.world_size)])

    def _sharded(self, seed: int = 0) -> DTensor:
        return DTensor.from_local(self._rows(self.rank, seed), make_mesh(self.world_size), [Shard(0)])

    def _check_on(self, ranks: tuple[int, ...], found: dict[str, Any], wanted: dict[str, Any]) -> None:
        """These ranks must have the whole dict in host memory, and the others nothing."""
        self.assertEqual(found, wanted if self.rank in ranks else {}, **EXACT, may_be="empty")
        self.assertTrue(all(value.device == HOST for value in found.values()))

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_gather_state_dict_dtensor(self):
        actual = internals.state_dict_utils._gather_state_dict({"tensor": self._sharded()})
        self.assertEqual(type(actual["tensor"]), torch.Tensor)
        self.assertEqual(actual["tensor"].device.type, self.device.type)
        self.assertEqual(actual, {"tensor": self._whole()}, **EXACT)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @subtests(ranks=[(0, 2), (0,), (3,), (0, 1, 2, 3)])
    def test_gather_with_cpu_and_ranks_only(self, ranks):
        state_dict = {"tensor": self._sharded(), "other": self._sharded(1)}
        found = internals.state_dict_utils._gather_state_dict(state_dict, cpu_offload=True, ranks_only=ranks)
        self._check_on(ranks, found, {"tensor": self._whole(), "other": self._whole(1)})

    @with_comms
    @skip_if_lt_x_gpu(2)
    @subtests(ranks=[(0, 2), (3,)])
    def test_cpu_and_ranks_only(self, ranks):
        """The given ranks get their own plain tensors on the CPU, and the others get nothing."""
        state_dict = {"tensor": self._rows(self.rank), "other": self._rows(self.rank, 1)}
        found = internals.state_dict_utils._offload_state_dict_to_cpu(state_dict, ranks_only=ranks)
        self._check_on(ranks, found, {"tensor": self._rows(self.rank), "other": self._rows(self.rank, 1)})
        for name, value in found.items():
            self.assertEqual(value.device, HOST)
            self.assertEqual(value.shape, state_dict[name].shape)

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_complicated_dict(self):
        """DTensors are gathered wherever they are in the dict; everything else stays the same."""

        def built(tensor: Any) -> dict[str, Any]:
            inner = {"numbers": [range(3)[1], 2.5], "text": "a", "nothing": None, "bytes": b"b"}
            mixed = [tensor(seed) if seed % 2 else self._rows(7, seed) for seed in range(10)]
            return {"mixed": mixed, "pair": (tensor(20), 5), "bare": tensor(21), "inner": [inner, {"deep": tensor(22)}]}

        actual = internals.state_dict_utils._gather_state_dict(built(self._sharded))
        self.assertEqual(actual, built(self._whole), **EXACT)
        self.assertIs(type(actual["pair"]), tuple)
        with self.assertRaisesRegex(ValueError, "Unexpected value type.*set"):
            internals.state_dict_utils._gather_state_dict({"set": {1}})

    def _test_create_cpu_state_dict(self, **memory: bool) -> dict[str, Any]:
        """A copy of a state dict has the same structure, its own host memory, and after copying the same values."""
        utils = internals.state_dict_utils
        file = io.BytesIO(b"file")

        def built(shape: tuple[int, ...] = (3, 2)) -> dict[str, Any]:
            inner = [uniform(*shape, seed=1), {"scalar": torch.tensor(3.5, device=self.device), "number": 4}]
            empty = torch.empty(0, 2, device=self.device)
            return {"tensor": uniform(2, 2, seed=0), "inner": inner, "empty": empty, "bytes": b"b", "file": file}

        state_dict = built()
        copied = utils._create_cpu_state_dict(state_dict, **memory)
        self.assertTrue(utils._check_state_dict_similarity(state_dict, copied))
        self.assertFalse(utils._check_state_dict_similarity(built((2, 3)), copied))
        self.assertFalse(utils._check_state_dict_similarity({**state_dict, "more": 1}, copied))
        low = state_dict["tensor"].bfloat16()
        self.assertFalse(utils._check_state_dict_similarity({**state_dict, "tensor": low}, copied))
        returned = utils._copy_state_dict(state_dict, copied)
        self.assertEqual(returned, state_dict, **EXACT)
        self.assertEqual(
            (copied["tensor"], copied["inner"][0]), (state_dict["tensor"], state_dict["inner"][0]), **EXACT
        )
        for tensor in (copied["tensor"], copied["inner"][0]):
            self.assertEqual(tensor.device, HOST)
        state_dict["tensor"].fill_(-1)
        self.assertEqual(returned["tensor"], built()["tensor"], **EXACT)
        return copied

    @with_comms
    @skip_if_lt_x_gpu(2)
    @subtests(share_memory=[False, True])
    def test_create_cpu_state_dict(self, share_memory):
        copied = self._test_create_cpu_state_dict(share_memory=share_memory)
        for tensor in (copied["tensor"], copied["inner"][0], copied["empty"]):
            self.assertEqual(tensor.is_shared(), share_memory)

    @with_comms
    @requires_capability("pinned_memory")
    @skip_if_lt_x_gpu(2)
    @subtests(share_memory=[False, True])
    def test_create_pinned_cpu_state_dict(self, share_memory):
        """Like :meth:`test_create_cpu_state_dict`, in pinned memory."""
        copied = self._test_create_cpu_state_dict(share_memory=share_memory, pin_memory=True)
        for tensor in (copied["tensor"], copied["inner"][0]):
            self.assertEqual((tensor.is_pinned(), tensor.is_shared()), (True, share_memory))

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_copy_of_dtensors(self):
        """The copy is a DTensor of the same placements. Later changes to the state dict do not change it."""
        utils = internals.state_dict_utils
        scalar = DTensor.from_local(torch.full((), 2.5, device=self.device), self._sharded().device_mesh)
        state_dict = {"tensor": self._sharded(), "scalar": scalar}
        copied = utils._copy_state_dict(state_dict, utils._create_cpu_state_dict(state_dict))
        actual = copied["tensor"]
        self.assertEqual((type(actual), actual.placements), (DTensor, (Shard(0),)))
        self.assertEqual((type(copied["scalar"]), copied["scalar"].placements), (DTensor, scalar.placements))
        expected = {"tensor": self._rows(self.rank), "scalar": torch.tensor(2.5)}
        self.assertEqual({name: value.to_local() for name, value in copied.items()}, expected, **EXACT)
        for value in state_dict.values():
            value.to_local().fill_(-1)
        self.assertEqual(actual.to_local(), expected["tensor"], **EXACT)
        with torch_defect("dcp_staged_scalar_changes"):
            self.assertEqual(copied["scalar"].to_local(), expected["scalar"], **EXACT)

    def _state_of_fsdp1(self, rows: int, steps: int = 1) -> dict[str, Any]:
        """The state dicts of a layer with ``rows`` rows, and of its optimizer after some steps, as ShardedTensors."""
        model = FSDP(filled(nn.Linear(2, rows, bias=False)).to(self.device))
        optim = torch.optim.Adam(model.parameters())
        for step in range(steps):
            train(model, uniform(1, 2, seed=10 * step + self.rank))
            optim.step()
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optim)}
        self.assertTrue(all(map(is_sharded, (state["model"]["weight"], state["optim"]["state"]["weight"]["exp_avg"]))))
        return state

    @with_comms
    @skip_if_lt_x_gpu(2)
    @subtests(rows=[4, 5, 2], share_memory=[False, True])
    def test_copy_of_sharded_tensors(self, rows, share_memory):
        """State dicts of FSDP1 can be copied into the same host memory repeatedly.

        Ranks may have no shard. Later changes to a state dict do not change its copy.
        """
        utils = internals.state_dict_utils
        cached = utils._create_cpu_state_dict(self._state_of_fsdp1(rows), share_memory=share_memory)
        for steps in (1, 2):
            state = self._state_of_fsdp1(rows, steps)
            expected = whole_tree(state)
            copied = utils._copy_state_dict(state, cached)
            for moment in (state["model"]["weight"], state["optim"]["state"]["weight"]["exp_avg"]):
                for shard in moment.local_shards():
                    shard.tensor.fill_(-1)
            self.assertEqual(whole_tree(copied), expected, **EXACT)
            self.assertEqual(whole_tree(cached["model"]), expected["model"], **EXACT)
        shards = cached["model"]["weight"].local_shards()
        self.assertEqual(len(shards), int(self.rank * -(-rows // self.world_size) < rows))
        for shard in shards:
            self.assertEqual((shard.tensor.device, shard.tensor.is_shared()), (HOST, share_memory))

    @with_comms
    @skip_if_lt_x_gpu(2)
    @subtests(rows=[4, 5, 2])
    def test_gather_of_sharded_tensors(self, rows):
        """States of FSDP1 are gathered, and they can be offloaded before that."""
        utils, state = internals.state_dict_utils, self._state_of_fsdp1(rows)
        expected = whole_tree(state)
        offloaded = utils._offload_state_dict_to_cpu(state)
        self.assertEqual(offloaded["model"]["weight"].device, HOST)
        for given in (state, offloaded):
            self.assertEqual(utils._gather_state_dict(given), expected, **EXACT)

    def _distribute(self, tensor: DTensor, full: torch.Tensor) -> DTensor:
        state_dict: dict[str, Any] = {"tensor": (tensor, full)}
        internals.state_dict_utils._distribute_tensors(state_dict, ["tensor"], self.device)
        return state_dict["tensor"]

    @with_comms
    @skip_if_lt_x_gpu(2)
    @subtests(rows=[4, 1, 6, 9])
    def test_state_dict_util_distribute_tensors(self, rows):
        """A full tensor is written into the existing shards. Some ranks may have none."""
        old, new = uniform(rows, 2, seed=0), uniform(rows, 2, seed=1)
        tensor = distribute_tensor(old, make_mesh(self.world_size), [Shard(0)])
        before = tensor.to_local().data_ptr()
        actual = self._distribute(tensor, new)
        self.assertIs(actual, tensor)
        self.assertEqual(actual.to_local().data_ptr(), before)
        self.assertEqual((actual.size(), actual.stride()), (old.size(), old.stride()))
        self.assertEqual(actual.full_tensor(), new, **EXACT)
        mine = new.chunk(self.world_size)
        self.assertEqual(
            actual.to_local(), mine[self.rank] if self.rank < len(mine) else new[:0], **EXACT, may_be="empty"
        )

    def _meshed(self, layout: str, rows: int) -> nn.Module:
        manual_seed(rows)
        model = nn.Sequential(nn.Linear(3, rows, device=self.device), nn.Linear(rows, 3, device=self.device))
        kwargs: dict[str, Any] = {"mesh": make_mesh(self.world_size)}
        if layout != "FSDP2":
            mesh = make_mesh(2, 2, names=("dp", "other"))
            kwargs["mesh"] = mesh
        if layout == "FSDP2 + TP":
            parallelize_module(model, mesh["other"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
            kwargs["mesh"] = mesh["dp"]
        if layout == "largest dimension":
            kwargs = {"shard_placement_fn": shard_largest_dim}
        return shard_each((*model, model), **kwargs)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(layout=["FSDP2", "HSDP", "FSDP2 + TP", "largest dimension"], rows=[4, 8])
    def test_slices_and_gathers_of_fsdp2(self, layout, rows):
        """A full tensor is written into the shards and gathered from them. No shard keeps the full tensor's memory."""
        model = self._meshed(layout, rows)
        for seed, (name, param) in enumerate(model.named_parameters()):
            local = param.to_local()
            before, most = local.data_ptr(), local.untyped_storage().nbytes()
            new = uniform(*param.shape, seed=seed)
            actual = self._distribute(param.detach(), new)
            self.assertEqual(actual.to_local().data_ptr(), before, msg=name)
            self.assertEqual(actual.to_local().untyped_storage().nbytes(), most, msg=name)
            gathered = internals.state_dict_utils._gather_state_dict({name: actual})
            self.assertEqual(gathered, {name: new}, **EXACT)
            self.assertEqual(param.full_tensor().detach(), new, msg=name, **EXACT)

    @with_comms
    @skip_if_lt_x_gpu(2)
    def test_shards_on_meta_device(self):
        """A shard on the meta device is replaced by a shard with memory of its size."""
        full = uniform(6, 2, seed=0)
        with torch.device("meta"):
            model = nn.Linear(2, 6, bias=False)
        fully_shard(model, mesh=make_mesh(self.world_size))
        actual = self._distribute(model.weight.detach(), full)
        self.assertEqual(actual.placements, (Shard(0),))
        self.assertEqual(actual.full_tensor(), full, **EXACT)
        local = actual.to_local()
        self.assertEqual(local.untyped_storage().nbytes(), local.numel() * local.element_size())

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(rows=[12, 5, 2])
    def test_gathered_dict_is_the_callers(self, rows):
        """Changing a gathered dict changes no shard, and no other rank's dict.

        Some ranks have no rows.
        """
        full = uniform(rows, 2, seed=rows)
        tensor = distribute_tensor(full, make_mesh(self.world_size), [Shard(0)])
        found = internals.state_dict_utils._gather_state_dict({"tensor": tensor}, ranks_only=(1, 3))
        if self.rank == 1:
            found["tensor"].fill_(-1)
        of_ranks = of_all_ranks(found.get("tensor"))
        self.assertEqual(of_ranks, [None, torch.full_like(full, -1), None, full], **EXACT)
        self.assertEqual(tensor.full_tensor(), full, **EXACT)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(placements=[(Replicate(), Shard(0)), (Shard(0), Shard(1)), (Shard(1), Replicate())])
    def test_gather_over_two_dimensions(self, placements):
        """DTensors on a mesh of two dimensions are gathered with any placements."""
        mesh: DeviceMesh = make_mesh(2, 2, names=("first", "second"))
        full = torch.arange(math.prod((5, 3)), dtype=torch.float32, device=self.device).view(5, 3)
        tensor = distribute_tensor(full, mesh, placements)
        self.assertEqual(internals.state_dict_utils._gather_state_dict({"tensor": tensor}), {"tensor": full}, **EXACT)


if __name__ == "__main__":
    run_tests()
