"""Device meshes of the ranks of a test."""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torch_fsdp_tests.device import accelerator


def make_mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """A mesh of all ranks, of the type of the device under test."""
    return init_device_mesh(accelerator.current().type, shape, mesh_dim_names=names)
