"""The flat parameter: its contents and layout, each rank's shard, and the parameters that are rejected."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy, StateDictType

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.internals import Handle
from torch_fsdp_tests.fsdp.references import average_gradients, full_parameters
from torch_fsdp_tests.installed_torch.torch_names import set_attribute

# The range of a parameter's elements in a shard: first and last index within the flattened parameter.
Offsets = dict[str, tuple[int, int]]

# Weights of 3 x 3 as parts of a tensor of 6 x 6. The last two have gaps in memory.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda whole: whole[:3, :3].contiguous(),
    "transposed": lambda whole: whole[:3, :3].contiguous().t(),
    "columns": lambda whole: whole[:3, :3],
    "every other column": lambda whole: whole[:3, ::2],
}


class EmptyModule(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def get_input(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor]:
        torch.manual_seed(1)
        return (torch.rand(1, device=device, dtype=dtype),)


class Transformer(nn.Transformer):
    """Two layers per side, in training mode. ``get_input`` sets the seed, so dropout is the same after each call."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(d_model=32, num_encoder_layers=2, num_decoder_layers=2, dim_feedforward=128, dropout=0.1)
        self.register_buffer("dummy_buffer", torch.tensor(1.0))

    def get_input(self, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        source, target = torch.rand(20, 8, 32), torch.rand(10, 8, 32)
        return source.to(device, dtype), target.to(device, dtype)


def numel(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)


class FlattenTest(FSDPTest):
    def _get_default_config(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "sharding_strategy": internals.flat_param.HandleShardingStrategy.FULL_SHARD,
            "offload_params": False,
            "mp_param_dtype": None,
            "mp_reduce_dtype": None,
            "keep_low_precision_grads": False,
            "process_group": self.process_group,
            "use_orig_params": False,
            "fsdp_extension": None,
        }

    def _handle(self, module: nn.Module, **config: Any) -> Handle:
        """A handle over all parameters of the module."""
        return internals.flat_param.FlatParamHandle(
            list(module.parameters()), module, **{**self._get_default_config(), **config}
        )

    def _get_transformer(self, seed: int = 0) -> Transformer:
        return Transformer(seed).to(self.device)

    def _get_shared_params_transformer(self, seed: int = 0) -> Transformer:
        """Each decoder layer shares its feed-forward weights with the encoder layer of the same number."""
        module = self._get_transformer(seed)
        for encoder, decoder in zip(module.encoder.layers, module.decoder.layers, strict=True):
            decoder.linear1.weight = encoder.linear1.weight
            decoder.linear2.weight = encoder.linear2.weight
        return module

    def assert_same_tensors(self, found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
        self.assertEqual(len(found), len(wanted))
        for mine, theirs in zip(found, wanted):
            self.assertEqual(mine.detach(), theirs.detach())


class TestFlattenParams(FlattenTest):
    """One rank: the whole flat parameter."""

    world_size = 1

    def _get_empty_module(self, seed: int = 0) -> EmptyModule:
        torch.manual_seed(seed)
        return EmptyModule().to(self.device)

    def _get_output(self, module: nn.Module, dtype: torch.dtype) -> torch.Tensor:
        return module(*module.get_input(self.device, dtype))

    def _dtype(self, half: bool) -> torch.dtype:
        return torch.float16 if half else torch.float32

    @skip_if_lt_x_gpu(1)
    @subtests(half=[False, True])
    def test_partial_flattening(self, half):
        """Wrapped layers have one parameter each, other layers keep theirs, and no element is lost."""
        dtype, other_dtype = self._dtype(half), self._dtype(not half)
        module = self._get_transformer().to(dtype)
        total = numel(module.parameters())
        encoder, decoder = module.encoder.layers, module.decoder.layers
        wrapped = numel(encoder[1].parameters()), numel(decoder[0].parameters())
        alone = len(list(encoder[0].parameters())), len(list(decoder[1].parameters()))

        encoder[1] = FSDP(encoder[1])
        decoder[0] = FSDP(decoder[0])
        flat_params = [layer._flat_param for layer in (encoder[1], decoder[0])]
        self.assertEqual((flat_params[0].numel(), flat_params[1].numel()), wrapped)
        self.assertEqual(numel(module.parameters()), total)
        for layer, flat_param in zip((encoder[1], decoder[0]), flat_params):
            (only,) = layer.parameters()
            self.assertIs(only, flat_param)
        self.assertEqual((len(list(encoder[0].parameters())), len(list(decoder[1].parameters()))), alone)

        self.assertEqual({param.dtype for param in module.parameters()}, {dtype})
        module = module.to(other_dtype)
        for layer in (encoder[1], decoder[0]):
            self.assertEqual(layer._flat_param.dtype, other_dtype)
        self.assertEqual({param.dtype for param in encoder[0].parameters()}, {other_dtype})

    @skip_if_lt_x_gpu(1)
    @subtests(half=[False, True])
    def test_flatten_nothing(self, half):
        module = self._get_transformer().to(self._dtype(half))
        with self.assertRaisesRegex(ValueError, "Cannot construct a FlatParamHandle with an empty parameter list"):
            internals.flat_param.FlatParamHandle([], module, **self._get_default_config())

    @skip_if_lt_x_gpu(1)
    def test_empty_module(self):
        """A module without parameters has no flat parameter and computes in ``param_dtype``."""
        for dtype in (torch.float32, torch.float16):
            module = self._get_empty_module()
            (x,) = module.get_input(self.device, torch.float32)
            expected = module(x.to(dtype))
            fsdp_module = FSDP(module, mixed_precision=MixedPrecision(param_dtype=dtype))
            self.assertEqual(list(fsdp_module.parameters()), [], may_be="empty")
            self.assertIsNone(fsdp_module._flat_param)
            self.assertEqual(self._get_output(fsdp_module, torch.float32), expected)

    def _test_numel(self, module: nn.Module) -> Handle:
        expected, dtypes = numel(module.parameters()), {param.dtype for param in module.parameters()}
        handle = self._handle(module)
        self.assertEqual(handle.flat_param.numel(), expected)
        self.assertEqual({handle.flat_param.dtype}, dtypes)
        return handle

    @skip_if_lt_x_gpu(1)
    @subtests(half=[False, True])
    def test_numel_without_shared_params(self, half):
        handle = self._test_numel(self._get_transformer().to(self._dtype(half)))
        self.assertEqual(handle.flat_param._shared_param_infos, (), may_be="empty")

    @skip_if_lt_x_gpu(1)
    @subtests(half=[False, True])
    def test_numel_with_shared_params(self, half):
        """A shared parameter is counted once."""
        handle = self._test_numel(self._get_shared_params_transformer().to(self._dtype(half)))
        shared = handle.flat_param._shared_param_infos
        self.assertEqual(len(shared), 4)
        # Two weights of 32 x 128 in each of the two layers.
        self.assertEqual(handle.flat_param.numel(), numel(self._get_transformer().parameters()) - 4 * 32 * 128)

    def _test_output(self, module: nn.Module) -> None:
        module.train()
        dtype = next(module.parameters()).dtype
        expected = self._get_output(module, dtype)
        self.assertEqual(self._get_output(FSDP(module), dtype), expected)

    @skip_if_lt_x_gpu(1)
    @subtests(half=[False, True])
    def test_output_without_shared_params(self, half):
        self._test_output(self._get_transformer().to(self._dtype(half)))

    @skip_if_lt_x_gpu(1)
    @subtests(half=[False, True])
    def test_output_with_shared_params(self, half):
        self._test_output(self._get_shared_params_transformer().to(self._dtype(half)))

    def _get_pnorm_after_step(self, module: nn.Module) -> torch.Tensor:
        dtype = next(module.parameters()).dtype
        optim = torch.optim.SGD(module.parameters(), lr=0.01)
        self._get_output(module, dtype).sum().backward()
        before = [param.detach().clone() for param in module.parameters()]
        optim.step()
        self.assertNotEqual(list(module.parameters()), before)
        return torch.stack([param.detach().norm() for param in module.parameters()]).norm()

    @skip_if_lt_x_gpu(1)
    @subtests(half=[False, True])
    def test_pnorm_after_step_with_shared_params(self, half):
        module, other = (self._get_shared_params_transformer().to(self._dtype(half)) for _ in range(2))
        self.assertEqual(self._get_pnorm_after_step(FSDP(other)), self._get_pnorm_after_step(module))

    def _test_flat_param_shard_metadata(self, handle: Handle, start: int, end: int, expected: Any) -> None:
        """Compare the metadata of the shard from element ``start`` to element ``end``, both inclusive."""
        set_attribute(handle.flat_param, "_shard_param_infos", handle._get_shard_metadata(start, end))
        self.assertEqual(handle.shard_metadata(), expected, may_be="empty")

    def _check_table(self, module: nn.Module, handle: Handle, table: dict[tuple[int, int], Offsets]) -> None:
        shapes = {name: (tuple(param.shape), param.stride()) for name, param in module.named_parameters()}
        for (start, end), offsets in table.items():
            metadata = internals.flat_param.FlatParamShardMetadata(
                tuple(offsets),
                tuple(torch.Size(shapes[name][0]) for name in offsets),
                tuple(shapes[name][1] for name in offsets),
                tuple(self._is_contiguous(*shapes[name]) for name in offsets),
                tuple(math.prod(shapes[name][0]) for name in offsets),
                tuple(offsets.values()),
            )
            with self.subTest(start=start, end=end):
                self._test_flat_param_shard_metadata(handle, start, end, metadata)

    def _is_contiguous(self, shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
        """Whether the memory order of the elements is that of their indices."""
        return stride == tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))

    @skip_if_lt_x_gpu(1)
    def test_flat_param_shard_metadata_unaligned(self):
        """Parameters follow each other without gaps. A shard may end after the last one."""
        layers = [nn.Linear(10, 10, bias=False).to(self.device) for _ in range(3)]
        module = nn.Sequential(*itertools.chain(*((layer, nn.ReLU()) for layer in layers)))
        plain = self._plain(module)
        first, second, third = "0.weight", "2.weight", "4.weight"
        self._check_table(
            plain,
            self._handle(module),
            {
                (0, 0): {first: (0, 0)},
                (0, 50): {first: (0, 50)},
                (0, 99): {first: (0, 99)},
                (50, 149): {first: (50, 99), second: (0, 49)},
                (50, 199): {first: (50, 99), second: (0, 99)},
                (99, 199): {first: (99, 99), second: (0, 99)},
                (100, 199): {second: (0, 99)},
                (100, 299): {second: (0, 99), third: (0, 99)},
                (100, 1000): {second: (0, 99), third: (0, 99)},
                (299, 299): {third: (99, 99)},
            },
        )

    def _plain(self, module: nn.Module) -> nn.Module:
        """A copy with the same names, shapes and strides. No handle replaces its parameters by views."""
        copy = nn.Module()
        for name, param in module.named_parameters():
            *path, last = name.split(".")
            owner = copy
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_parameter(last, nn.Parameter(param.detach().clone()))
        return copy

    @skip_if_lt_x_gpu(1)
    def test_flat_param_shard_metadata_aligned_full_precision(self):
        """Each parameter begins at a multiple of 16 bytes, here 4 elements: 21 + (3) + 35 + (1) + 25."""
        module = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in ((3, 7), (7, 5), (5, 5)))).to(self.device)
        plain = self._plain(module)
        handle = self._handle(module, use_orig_params=True)
        self.assertEqual(handle.flat_param.numel(), 85)
        self._check_table(
            plain,
            handle,
            {
                (0, 42): {"0.weight": (0, 20), "1.weight": (0, 18)},
                (43, 85): {"1.weight": (19, 34), "2.weight": (0, 24)},
                (21, 23): {},  # only padding
            },
        )

    @skip_if_lt_x_gpu(1)
    def test_flat_param_shard_metadata_aligned_mixed_precision(self):
        """With two-byte elements in forward, 16 bytes are 8 elements: 10 + (6) + 25 + (7) + 15."""
        module = nn.Sequential(*(nn.Linear(*sizes, bias=False) for sizes in ((2, 5), (5, 5), (5, 3)))).to(self.device)
        plain = self._plain(module)
        handle = self._handle(module, use_orig_params=True, mp_param_dtype=torch.float16)
        self.assertEqual(handle.flat_param.numel(), 63)
        self._check_table(
            plain,
            handle,
            {
                (0, 31): {"0.weight": (0, 9), "1.weight": (0, 15)},
                (32, 63): {"1.weight": (16, 24), "2.weight": (0, 14)},
            },
        )

    @skip_if_lt_x_gpu(1)
    @parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
    def test_flat_param_shard_metadata_with_memory_format(self, memory_format):
        """A parameter keeps its values and strides, and is flattened in memory order."""
        module = nn.Sequential(
            nn.Conv2d(10, 20, 3, bias=False), nn.Conv2d(20, 10, 5, bias=False), nn.Conv2d(10, 10, 1, bias=False)
        ).to(self.device, memory_format=memory_format)
        in_memory = [
            (param.permute(0, 2, 3, 1) if memory_format is torch.channels_last else param).detach().flatten()
            for param in module.parameters()
        ]
        before = [param.detach().clone() for param in module.parameters()]
        handle = self._handle(module, use_orig_params=True)
        self.assertEqual(handle.flat_param.detach(), torch.cat(in_memory))  # all sizes are multiples of 4 elements
        for layer, weight in zip(module, before, strict=True):
            self.assertEqual((layer.weight, layer.weight.stride()), (weight, weight.stride()))
        contiguous = memory_format is torch.contiguous_format
        shapes = [(20, 10, 3, 3), (10, 20, 5, 5), (10, 10, 1, 1)]
        strides = {
            True: [(90, 9, 3, 1), (500, 25, 5, 1), (10, 1, 1, 1)],
            False: [(90, 1, 30, 10), (500, 1, 100, 20), (10, 1, 10, 10)],
        }[contiguous]
        numels = [1800, 5000, 100]
        for start, end, layers, offsets in (
            (0, 2999, [0, 1], ((0, 1799), (0, 1199))),
            (3000, 6899, [1, 2], ((1200, 4999), (0, 99))),
        ):
            expected = internals.flat_param.FlatParamShardMetadata(
                tuple(f"{layer}.weight" for layer in layers),
                tuple(torch.Size(shapes[layer]) for layer in layers),
                tuple(strides[layer] for layer in layers),
                (contiguous,) * 2,
                tuple(numels[layer] for layer in layers),
                offsets,
            )
            self._test_flat_param_shard_metadata(handle, start, end, expected)

    @skip_if_lt_x_gpu(1)
    def test_writeback_orig_params_no_shard(self):
        """Values reach a flat parameter that was converted alone, as for an optimizer in full precision.

        Without shards, parameters keep their shapes. The forward keeps its dtype.
        """
        torch.manual_seed(0)
        module = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3)).to(self.device, torch.float16)
        plain = copy.deepcopy(module)
        fsdp_module = FSDP(module, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
        handle = fsdp_module._handle
        handle.flat_param.data = torch.zeros_like(handle.flat_param, dtype=torch.float32)
        set_attribute(handle, "_orig_param_dtype", torch.float32)
        rows = torch.arange(5, device=self.device)
        with torch.no_grad():
            self.assertEqual(fsdp_module(rows), plain(rows))
        self.assert_same_tensors(list(fsdp_module.parameters()), list(plain.float().parameters()))

    @skip_if_lt_x_gpu(1)
    def test_refused(self):
        """Parameters that cannot be flattened raise ValueError."""

        def flatten(*tensors: torch.Tensor, trainable: Sequence[bool] = (True, True), **config: Any) -> Handle:
            params = [
                nn.Parameter(tensor.to(self.device), requires_grad=requires_grad)
                for tensor, requires_grad in zip(tensors, trainable)
            ]
            return self._handle(nn.ParameterList(params), **config)

        floats, integers = torch.ones(3), torch.ones(3, dtype=torch.long)
        with self.assertRaisesRegex(ValueError, "uniform dtype but got torch.float32 and torch.float16"):
            flatten(floats, floats.half())
        for tensor in (integers, torch.ones(3, dtype=torch.complex64)):  # the message is the same
            with self.assertRaisesRegex(ValueError, "Cannot flatten integer dtype tensors"):
                flatten(tensor, trainable=[False])
        with self.assertRaisesRegex(ValueError, "uniform dtype but got torch.float32 and torch.int64"):
            flatten(floats, integers, trainable=[True, False])
        for trainable in ([True, False], [False, True]):
            with self.assertRaisesRegex(ValueError, "uniform `requires_grad` when `use_orig_params=False`"):
                flatten(floats, floats, trainable=trainable)
            handle = flatten(floats, floats, trainable=trainable, use_orig_params=True)
            self.assertTrue(handle.flat_param.requires_grad)
        params = [nn.Parameter(torch.ones(3, device=device)) for device in (self.device, "meta")]
        with self.assertRaisesRegex(ValueError, "on the same device but got both"):
            self._handle(nn.ParameterList(params))
        with self.assertRaisesRegex(ValueError, "Cannot flatten a `FlatParameter`"):
            inner = flatten(floats)
            internals.flat_param.FlatParamHandle(
                [inner.flat_param], nn.ParameterList([inner.flat_param]), **self._get_default_config()
            )
        with self.assertRaisesRegex(ValueError, "were not found in `module`'s tree"):
            param = nn.Parameter(floats.to(self.device))
            internals.flat_param.FlatParamHandle(
                [param], nn.Linear(2, 2, device=self.device), **self._get_default_config()
            )
        for use_orig_params in (False, True):
            module = nn.Linear(2, 2)
            module.scale = nn.Parameter(torch.tensor(1.0))
            with self.assertRaisesRegex(ValueError, "FSDP doesn't support scalar parameters"):
                FSDP(module.to(self.device), use_orig_params=use_orig_params)


class ShardsTest(FlattenTest):
    """Several ranks: each rank's shard of the flat parameter."""

    def _layers(self, case: str) -> nn.Sequential:
        torch.manual_seed(0)
        layers = {
            "equal": [nn.Linear(10, 10, bias=False) for _ in range(3)],
            "uneven": [nn.Linear(3, 7, bias=False), nn.Linear(7, 5), nn.Linear(5, 5, bias=False)],
            "channels last": [nn.Conv2d(3, 5, 3), nn.Conv2d(5, 2, 1)],
            "four elements": [nn.Linear(2, 2, bias=False)],  # three ranks get 2, 2 and 0
            "one element": [nn.Linear(1, 1, bias=False)],
        }[case]
        module = nn.Sequential(*layers).to(self.device)
        return module.to(memory_format=torch.channels_last) if case == "channels last" else module

    @skip_if_lt_x_gpu(2)
    @subtests(
        case=["equal", "uneven", "channels last", "four elements", "one element"],
        use_orig_params=[False, True],
        mp_param_dtype=[None, torch.float16],
    )
    def test_shards_make_the_whole(self, case, use_orig_params, mp_param_dtype):
        """The ranks' shards, concatenated in the order of ranks, are the parameters in memory order."""
        module = self._layers(case)
        alignment = 1 if not use_orig_params else 8 if mp_param_dtype else 4
        pieces, starts, total = {}, {}, 0
        for name, param in module.named_parameters():
            in_memory = param.permute(0, 2, 3, 1) if case == "channels last" and param.dim() == 4 else param
            pieces[name] = in_memory.detach().clone().flatten()
            starts[name] = math.ceil(total / alignment) * alignment
            total = starts[name] + param.numel()

        handle = self._handle(module, use_orig_params=use_orig_params, mp_param_dtype=mp_param_dtype)
        handle.shard()
        flat_param = handle.flat_param
        size = math.ceil(total / self.world_size)
        self.assertEqual(flat_param.shape, (size,))
        self.assertEqual(internals.sharded_size(flat_param), (size,))
        everywhere = [torch.empty_like(flat_param) for _ in range(self.world_size)]
        dist.all_gather(everywhere, flat_param.detach())
        whole = torch.cat(everywhere)
        for name, piece in pieces.items():
            self.assertEqual(whole[starts[name] : starts[name] + piece.numel()], piece, rtol=0, atol=0)

        # Only the last shards have padding, of zeros. With ``use_orig_params=True``, it is part of the flat parameter.
        padded = max(0, min(size, (self.rank + 1) * size - total))
        self.assertEqual(internals.padding_of(flat_param), 0 if use_orig_params else padded)
        if not use_orig_params and padded:
            self.assertEqual(
                flat_param[size - padded :].detach(), torch.zeros(padded, device=self.device), may_be="zero"
            )

        # The elements of each parameter that are in this rank's range of the flat parameter.
        first, last = self.rank * size, (self.rank + 1) * size - 1
        offsets = {
            name: (max(first, start) - start, min(last, start + pieces[name].numel() - 1) - start)
            for name, start in starts.items()
            if start <= last and start + pieces[name].numel() > first
        }
        metadata = handle.shard_metadata()
        self.assertEqual(dict(zip(metadata.param_names, metadata.param_offsets, strict=True)), offsets, may_be="empty")
        self.assertEqual(metadata.param_numels, tuple(pieces[name].numel() for name in offsets), may_be="empty")
        if use_orig_params:
            for name, param in module.named_parameters():
                begin, end = offsets.get(name, (0, -1))
                self.assertEqual(param.detach(), pieces[name][begin : end + 1], rtol=0, atol=0, may_be="empty")

    @skip_if_lt_x_gpu(2)
    @subtests(layout=list(LAYOUTS), use_orig_params=[False, True])
    def test_weights_of_any_layout_are_trained(self, layout, use_orig_params):
        """A weight keeps its values and gets its gradients, wherever its elements lie in memory."""
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(self.device)
        layers[0].weight = nn.Parameter(LAYOUTS[layout](torch.rand(6, 6).to(self.device)))
        reference = copy.deepcopy(layers)
        model = FSDP(layers, use_orig_params=use_orig_params)
        inputs = torch.full((1, 3), self.rank + 1.0, device=self.device)
        for each in (reference, model):
            each(inputs).square().sum().backward()
        average_gradients(reference)
        for each in (reference, model):
            torch.optim.SGD(each.parameters(), lr=0.01).step()
        with torch_defect("fsdp1_sliced_parameters_overlap", when="column" in layout):
            self.assertEqual(full_parameters(model), reference.state_dict())

    @skip_if_lt_x_gpu(2)
    @subtests(layout=["contiguous", "transposed"], use_orig_params=[False, True])
    def test_sharded_state_dict_of_any_layout(self, layout, use_orig_params):
        layer = nn.Linear(3, 3).to(self.device)
        layer.weight = nn.Parameter(LAYOUTS[layout](torch.rand(6, 6).to(self.device)))
        expected = layer.weight.detach().chunk(self.world_size)[self.rank].clone()  # which keeps dense strides
        model = FSDP(layer, use_orig_params=use_orig_params)
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            if not expected.is_contiguous():  # which no ShardedTensor can describe
                return self.assertRaisesRegex(ValueError, "Only torch.contiguous_format", model.state_dict)
            shards = [shard.tensor for shard in model.state_dict()["weight"].local_shards()]
            self.assertEqual(shards, [expected])

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True])
    def test_gradients_of_shared_params(self, use_orig_params):
        """A shared parameter gets the gradients of all its uses and is still shared afterwards."""
        reference = self._get_shared_params_transformer().eval()  # no dropout, since inputs differ by rank
        model = FSDP(self._get_shared_params_transformer().eval(), use_orig_params=use_orig_params)
        initial = {name: param.detach().clone() for name, param in reference.named_parameters()}
        optims = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (reference, model)]
        torch.manual_seed(1 + self.rank)
        inputs = [torch.rand(length, 2, 32).to(self.device) for length in (5, 3)]
        for each in (reference, model):
            each(*inputs).pow(3).sum().backward()  # not squared: the last norm fixes the sum of squares
        average_gradients(reference)
        if use_orig_params:
            with FSDP.summon_full_params(model, with_grads=True):
                self.check_sharing(model.module)
                grads = {name: param.grad.clone() for name, param in model.module.named_parameters()}
            self.assertEqual(grads, {name: param.grad for name, param in reference.named_parameters()})
        for optim in optims:
            optim.step()
        with FSDP.summon_full_params(model):
            self.check_sharing(model.module)
            actual = {name: param.detach().clone() for name, param in model.module.named_parameters()}
        expected = {name: param.detach() for name, param in reference.named_parameters()}
        self.assertEqual(actual, expected)
        # This proves that there was a gradient.
        self.assertNotEqual(actual["encoder.layers.0.linear1.weight"], initial["encoder.layers.0.linear1.weight"])
        self.assertEqual(model(*inputs), reference(*inputs))

    def check_sharing(self, module: nn.Module) -> None:
        for encoder, decoder in zip(module.encoder.layers, module.decoder.layers, strict=True):
            self.assertIs(decoder.linear1.weight, encoder.linear1.weight)
            self.assertIs(decoder.linear2.weight, encoder.linear2.weight)


class TestShardsOfTwoRanks(ShardsTest):
    world_size = 2


class TestShardsOfThreeRanks(ShardsTest):
    world_size = 3


del ShardsTest  # only a base class, without a world size
instantiate_parametrized_tests(TestFlattenParams)

if __name__ == "__main__":
    run_tests()
