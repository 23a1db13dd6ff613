"""How a pipeline schedule splits a batch into microbatches, and merges outputs: each row stays with its own inputs."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
    sum_reducer,
)
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.installed_torch import torch_facts

LENGTH, BLOCK = 20, 8  # of a sequence, and of a block of its mask: the last block is not full
# Where the documents of each row of a batch begin, whose tokens attend to earlier tokens of the same document.
STARTS = [[0], [0, 1], [0, 9, 16], [0, 19], [0, 8]]


def numbers(*shape: int, start: float = 0.0) -> torch.Tensor:
    """Numbers that are all different."""
    return (torch.arange(math.prod(shape)) + float(start)).view(shape)


def pieces(whole: torch.Tensor, count: int, dim: int = 0) -> list[torch.Tensor]:
    """Copies of the chunks of a tensor."""
    return list(whole.detach().clone().tensor_split(count, dim))


def document_mask(rows: int) -> BlockMask:
    """A mask that differs in each of the rows. In some, whole blocks are visible. With one row, it is for all rows."""
    documents = torch.zeros(rows, LENGTH, dtype=torch.long)
    for row, starts in enumerate(STARTS[:rows]):
        for start in starts:
            documents[row, start:] = start

    def same_document(b: torch.Tensor, h: torch.Tensor, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
        return (documents[b, q] == documents[b, kv]) & (q >= kv)

    return create_block_mask(same_document, rows, None, LENGTH, LENGTH, device=documents.device, BLOCK_SIZE=BLOCK)


def visible(mask: BlockMask, rows: int) -> torch.Tensor:
    """What each token sees by the function of a mask, which attention asks only in blocks that are visible in part."""
    places = (torch.arange(size) for size in (rows, 1, LENGTH, LENGTH))
    return mask.mask_mod(*torch.meshgrid(*places, indexing="ij"))


class TestAnyChunks(TestCase):
    @subtests(rows=[4, 5], count=[1, 2, 3, 4], dims=[None, (0, 1, 0), (-1, 0, 1)], is_leaf=[False, True])
    def test_tensors(self, rows, count, dims, is_leaf):
        """Tensors are split along the dimension that is given, and merging the chunks restores them.

        The rows of a chunk are those of ``torch.tensor_split``. The gradients of the chunks add up in the whole.
        """
        tensors = [numbers(rows, rows, 2 * rows, start=start).requires_grad_(is_leaf) for start in range(3)]
        one, two, three = tensors
        given: dict[str, Any] = {}
        if dims is not None:
            specs = TensorChunkSpec.from_tuple(dims)
            given = {"args_chunk_spec": specs[:2], "kwargs_chunk_spec": TensorChunkSpec.from_dict({"three": dims[2]})}
        args, kwargs = split_args_kwargs_into_chunks((one, two), {"three": three}, count, **given)
        for whole, dim, parts in zip(tensors, dims or (0, 0, 0), [*zip(*args), [each["three"] for each in kwargs]]):
            self.assertEqual(list(parts), pieces(whole, count, dim))
            self.assertEqual(merge_chunks([(part,) for part in parts], (TensorChunkSpec(dim),)), (whole,))
            if is_leaf:
                sum((part * (index + 1)).sum() for index, part in enumerate(parts)).backward()
                lengths = [part.size(dim) for part in parts]
                factors = torch.cat([torch.full((length,), index + 1.0) for index, length in enumerate(lengths)])
                self.assertEqual(whole.grad, factors.expand_as(whole.transpose(dim, -1)).transpose(dim, -1))
                retained = bool(torch_facts.RETAINS_GRADIENTS_OF_CHUNKS)
                self.assertEqual([part.retains_grad for part in parts], [retained] * count)

    @needs(torch_facts.SPLITS_CONTAINERS)
    @subtests(count=[1, 2, 3])
    def test_containers(self, count):
        """Tensors in containers are split, and other values are the same in each chunk."""
        x = numbers(4, 2)
        batch = {"nested": [x, {"scale": 3}], "none": None, "text": ("a", x + 1)}
        args, kwargs = split_args_kwargs_into_chunks((batch, 7), batch, count)
        self.assertEqual(len(args), count)
        for (first, seven), second, part in zip(args, kwargs, pieces(x, count)):
            right = {"nested": [part, {"scale": 3}], "none": None, "text": ("a", part + 1)}
            self.assertEqual((first, seven, second), (right, 7, right))

    @needs(torch_facts.SPLITS_CONTAINERS)
    @subtests(shortest=[1, 2, 3], place=["args", "kwargs"])
    def test_few_rows(self, shortest, place):
        """The input with the fewest rows limits the number of chunks of all."""
        long, short = numbers(4, 2), numbers(shortest, 2)
        args, keyword = (short, long) if place == "args" else (long, short)
        split, kwargs = split_args_kwargs_into_chunks((args,), {"keyword": keyword}, 4)
        self.assertEqual([len(split), len(kwargs)], [shortest, shortest])
        self.assertEqual([each["keyword"] for each in kwargs], pieces(keyword, shortest))

    def test_merged_losses(self):
        """Losses are summed, values that are equal in all chunks stay, and other values raise."""
        specs = (sum_reducer, None, TensorChunkSpec(1))
        chunks = [(torch.tensor(index + 1.0), "same", numbers(2, 1, start=index)) for index in range(3)]
        loss, same, output = merge_chunks(chunks, specs)
        self.assertEqual((loss, same), (torch.tensor(6.0), "same"))
        self.assertEqual(output, torch.cat([chunk[2] for chunk in chunks], dim=1))
        with self.assertRaises(AssertionError):
            merge_chunks([("one",), ("other",)], (None,))

    @needs(torch_facts.SPLITS_CONTAINERS)
    @subtests(rows=[1, 4, 5], count=[1, 2, 3, 4])
    def test_block_masks(self, rows, count):
        """A chunk of a mask of flex attention shows its tokens what the whole mask shows them.

        A mask of one row is for all rows. Rows of a batch may be padded differently, so a wrong row is a wrong result.
        """
        mask, x = document_mask(rows), numbers(max(rows, 4), 2)
        args, kwargs = split_args_kwargs_into_chunks((x,), {"mask": mask}, count)
        sees, blocks = (
            pieces(whole, count) if rows > 1 else [whole] * count for whole in (visible(mask, rows), mask.to_dense())
        )
        for (part,), keyword, right, shown in zip(args, kwargs, sees, blocks, strict=True):
            self.assertEqual(len(right), len(part) if rows > 1 else 1)
            self.assertEqual(visible(keyword["mask"], len(right)), right)
            self.assertEqual(keyword["mask"].to_dense(), shown)
            self.assertEqual(keyword["mask"].shape, (len(right), 1, LENGTH, LENGTH))


def is_right(placement: Any, rows: int, count: int) -> bool:
    """Whether PyTorch knows the length of each chunk. It takes that of a chunk of all rows.

    Each rank splits its own rows: if two ranks have three rows each, the first of two chunks has four rows, not three.
    """
    if placement != Shard(0):
        return True
    of_ranks = [len(part) for part in torch.arange(rows).chunk(2)]
    return all(
        len(chunk) == sum(len(torch.arange(length).tensor_split(count)[index]) for length in of_ranks)
        for index, chunk in enumerate(torch.arange(rows).tensor_split(count))
    )


class TestAnyDTensorChunks(FSDPTest):
    world_size = 2

    @needs(torch_facts.KNOWS_SHAPES_OF_DTENSOR_CHUNKS)
    @skip_if_lt_x_gpu(2)
    @subtests(
        placement=[Shard(0), Shard(1), Replicate(), Partial()], rows=[4, 5, 6, 8], count=[1, 2, 3], valid=is_right
    )
    def test_dtensors(self, placement, rows, count):
        """Each rank splits its local shard. Chunks keep placement and shape, and merging them restores the whole.

        PyTorch gives some chunks of sharded rows a wrong length, which ``is_right`` leaves out.
        """
        whole = numbers(rows, 3).to(self.device)
        tensor = distribute_tensor(whole, init_device_mesh(self.device.type, (2,)), [placement])
        args, _ = split_args_kwargs_into_chunks((tensor,), {}, count)
        chunks = [chunk for (chunk,) in args]
        self.assertEqual([chunk.placements for chunk in chunks], [(placement,)] * count)
        self.assertEqual([chunk.to_local() for chunk in chunks], pieces(tensor.to_local(), count))
        self.assertEqual([chunk.shape for chunk in chunks], [chunk.full_tensor().shape for chunk in chunks])
        if placement != Shard(0):
            self.assertEqual([chunk.full_tensor() for chunk in chunks], pieces(whole, count))
        merged = merge_chunks(chunks, None)
        self.assertEqual((merged.placements, merged.full_tensor()), ((placement,), whole))


if __name__ == "__main__":
    run_tests()
