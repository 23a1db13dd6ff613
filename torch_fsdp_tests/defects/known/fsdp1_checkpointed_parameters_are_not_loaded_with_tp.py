"""Loading FSDP1's sharded state dict raises for a layer with TP inside ``checkpoint_wrapper``.

To load a DTensor, FSDP1 unshards it over its own mesh dimension and makes a DTensor over the TP dimension again. It
stores the layout of that DTensor under the parameter's name without the checkpoint wrapper, but looks it up with the
wrapper in the name. It finds no layout, and copies the local TP shard into the full parameter, which raises because the
shapes differ.
"""

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.fsdp._state_dict_utils._sharded_pre_load_state_dict_hook",
    features="fsdp1, activation_checkpointing, state_dict, tp",
    workaround="Call ``torch.utils.checkpoint.checkpoint`` in the forward of the layer, instead of "
    "``checkpoint_wrapper``.",
    error="size mismatch for ... _fsdp_wrapped_module. ... _checkpoint_wrapped_module.",
    world_size=4,
    fails_with=("RuntimeError",),
)


def reproduce(rank, world_size, device):
    mesh = init_device_mesh(device.type, (2, world_size // 2), mesh_dim_names=("dp", "tp"))
    actual = []
    for wrap in (nn.Sequential, checkpoint_wrapper):
        layer = parallelize_module(nn.Linear(2, 4, device=device), mesh["tp"], ColwiseParallel())
        model = FSDP(wrap(layer), device_mesh=mesh["dp"], use_orig_params=True, device_id=device)
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        try:
            model.load_state_dict(model.state_dict())
            actual.append("loaded")
        except RuntimeError as error:
            actual.append(f"RuntimeError: {str(error).splitlines()[-1].strip()}")
    return actual, ["loaded", "loaded"]


FIX = """
The layouts would have to be stored and looked up under names that are cleaned in the same way.
"""
