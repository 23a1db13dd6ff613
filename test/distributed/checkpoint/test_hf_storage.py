"""States of FSDP2 in files of the package safetensors: each rank writes its shards, and these are then put together."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.common_distributed import requires, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.distributed.common_state_dict import EXACT
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.installed_torch import torch_names
from torch_fsdp_tests.verdict import Reason

safetensors = torch_names.module("safetensors.torch")
needs_package = requires(
    lambda: (
        None if importlib.util.find_spec("safetensors") else Reason('needs the package safetensors (the extra "hf")')
    )
)


class TestConsolidation(DTensorTestBase):
    """Parameters, of which each rank writes some rows, and a buffer, which one rank writes."""

    world_size = 2

    def _model(self, buffer: torch.Tensor) -> nn.Module:
        model = filled(nn.Linear(2, 5)).to(self.device)
        model.register_buffer("buffer", buffer.to(self.device))
        return model

    def _consolidated(self, buffer: torch.Tensor, name: str) -> dict[str, Any]:
        """Save the model, and return what the consolidated files have."""
        folder = Path(self.temp_dir, name)
        model = fully_shard(self._model(buffer), mesh=make_mesh(self.world_size))
        writer = dcp.HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
        dcp.save(model.state_dict(), storage_writer=writer)
        found: dict[str, Any] = {}
        for file in sorted(folder.glob("*.safetensors")):
            found |= {name: value.to(self.device) for name, value in safetensors.load_file(file).items()}
        return found

    @with_comms
    @needs_package
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(shape=[(), (1,), (3, 2)])
    def test_consolidated_files_have_values_of_any_shape(self, shape):
        buffer = torch.full(shape, 3.0)
        found, wanted = self._consolidated(buffer, str(shape)), self._model(buffer).state_dict()
        self.assertEqual(sorted(found), sorted(wanted))
        for name, value in wanted.items():
            with torch_defect("dcp_consolidated_scalar_becomes_zero", when=name == "buffer" and shape == ()):
                self.assertEqual(found[name], value, msg=name, **EXACT)

    @with_comms
    @needs_package
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(dtype=[torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
    def test_consolidated_files_have_values_of_any_dtype(self, dtype):
        buffer = torch.tensor([3, 0, 1]).to(dtype)
        with torch_defect("dcp_consolidation_refuses_integers", when=not dtype.is_floating_point):
            found = self._consolidated(buffer, str(dtype))
            self.assertEqual(found, self._model(buffer).state_dict(), **EXACT)


if __name__ == "__main__":
    run_tests()
