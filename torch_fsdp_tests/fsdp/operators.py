"""The table of operators, and the ways to distribute their inputs.

A row has a function and the words for its tensors. Each letter of a word is a dimension. ``+`` stands before positive
numbers, ``=`` before numbers between 0 and 1 that need no gradient, ``?`` before booleans. ``b<a`` is a vector of
indices below the size of ``b``.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from torch_fsdp_tests.fsdp.seeded import uniform
from torch_fsdp_tests.fsdp.shards import by_hand, strided

Args = Mapping[str, Any]
Layout = tuple[Placement, ...]

# Sizes by letter. Two and four ranks divide the even ones. Of the small ones, some ranks have no part.
SIZES = {
    "even": {"a": 8, "b": 12, "c": 16, "1": 1, "2": 2},
    "uneven": {"a": 7, "b": 5, "c": 9, "1": 1, "2": 2},
    "small": {"a": 1, "b": 3, "c": 2, "1": 1, "2": 2},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of an operator: arguments, sizes, and a layout for each tensor."""

    args: Args
    sizes: str
    layouts: tuple[Layout, ...]

    def shards(self, tensor: int, dim: int) -> bool:
        """Whether a dimension of one of the tensors is sharded."""
        return any(getattr(each, "dim", None) == dim for each in self.layouts[tensor])

    @property
    def is_partial(self) -> bool:
        return any(each.is_partial() for each in itertools.chain(*self.layouts))


@dataclasses.dataclass(frozen=True)
class OperatorRow:
    """An operator. ``call`` gets the tensors, and one of ``args`` by keyword."""

    name: str
    call: Callable[..., Any]
    inputs: tuple[str, ...]
    args: Sequence[Args] = ({},)
    # If all combinations of arguments, sizes and layouts are tried, and not only some.
    is_thorough: bool = False
    # A regular expression. DTensor documents that it raises this for some layouts.
    refuses: str = ""
    has_gradient: bool = True
    # Cases that are left out, because they are known to differ.
    without: Callable[[Case], bool] = lambda case: False
    # An empty local shard makes one rank raise, and others wait: see the defect dtensor_reduction_of_empty_shard_hangs.
    hangs_if_empty: bool = False


def row(name: str, call: Callable[..., Any], *inputs: str, **more: Any) -> OperatorRow:
    return OperatorRow(name, call, inputs, **more)


def _written(call: Callable[..., Any], *inputs: str, name: str, **more: Any) -> OperatorRow:
    """An operator that writes its first tensor."""
    return row(name, lambda x, *others, **args: call(x.clone(), *others, **args), *inputs, refuses=IN_PLACE, **more)


def _listed(name: str, tensors: int, *extra: Any, words: tuple[str, str] = ("ab", "c"), **more: Any) -> OperatorRow:
    """A ``torch._foreach_`` operator of lists of two tensors, which may have different layouts."""
    function = getattr(torch, name)
    lists = tensors // 2

    def call(*each: torch.Tensor) -> Any:
        taken = [list(each[2 * i : 2 * i + 2]) for i in range(lists)]
        if name.endswith("_"):
            taken[0] = [one.clone() for one in taken[0]]
            function(*taken, *each[2 * lists :], *extra)
            return taken[0]
        return function(*taken, *each[2 * lists :], *extra)

    shapes = [*words * lists, *[""] * (tensors % 2)]
    words_of = tuple(f"+{word}" for word in shapes)
    return OperatorRow(f"{name}{extra or ''}", call, words_of, has_gradient=False, refuses=IN_PLACE, **more)


DIMS: Sequence[Args] = ({"dim": 0}, {"dim": 1, "keepdim": True}, {"dim": -1}, {"dim": (0, 1)})
DIM: Sequence[Args] = ({"dim": 0}, {"dim": 1, "keepdim": True}, {"dim": -2})
# DTensor derives the rules of some losses. Their means are known to be wrong, and have tests of their own: see the
# defects dtensor_mean_loss_of_uneven_shards_is_wrong and dtensor_gradient_of_mean_loss_is_too_large.
NOT_MEAN: Sequence[Args] = ({"reduction": "sum"}, {"reduction": "none"})
REDUCTIONS: Sequence[Args] = ({"reduction": "mean"}, {"reduction": "sum"}, {"reduction": "none"})
IS_PARTIAL = operator.attrgetter("is_partial")
IN_PLACE = "in-place operations that require placement changes"
UNEVEN = "cannot be evenly sharded"
VIEW = "redistribut|Attempted to unbind"


def _is_mean(case: Case) -> bool:
    return case.args.get("reduction", "mean") == "mean"


def _is_biased(case: Case) -> bool:
    """Whether ranks have different rows, of which weighted means would be averaged."""
    return any(case.shards(0, dim) for dim in (0, 2))


def _counts_from_the_end(case: Case) -> bool:
    return case.args.get("dim", 0) < 0 and any(case.shards(0, dim) for dim in range(3))


POINTWISE = [
    row("exp", torch.exp, "ab"),
    row("log", torch.log, "+ab"),
    row("sqrt", torch.sqrt, "+ab"),
    row("rsqrt", torch.rsqrt, "+ab"),
    row("reciprocal", torch.reciprocal, "+ab"),
    row("abs", torch.abs, "ab"),
    row("neg", torch.neg, "ab"),
    row("sgn", torch.sgn, "ab", has_gradient=False),
    row("sign", torch.sign, "ab", has_gradient=False),
    row("pow", torch.pow, "+ab", args=({"exponent": 2}, {"exponent": 3.5})),
    row("relu", F.relu, "ab"),
    row("leaky_relu", F.leaky_relu, "ab", args=({"negative_slope": 0.1}, {"negative_slope": 2.0})),
    row("elu", F.elu, "ab"),
    row("gelu", F.gelu, "ab", args=({"approximate": "none"}, {"approximate": "tanh"})),
    row("silu", F.silu, "ab"),
    row("sigmoid", torch.sigmoid, "ab"),
    row("tanh", torch.tanh, "ab"),
    row("softplus", F.softplus, "ab"),
    row("logsigmoid", F.logsigmoid, "ab", has_gradient=False),
    row("glu", F.glu, "a2b", args=({"dim": 1}, {"dim": -2})),
    row("clamp", torch.clamp, "ab", args=({"min": -0.5, "max": 0.5}, {"min": 0.25}, {"max": 0.25})),
    row("clamp_min", torch.clamp_min, "ab", args=({"min": -0.5}, {"min": 0.5})),
    row("add", torch.add, "ab", "ab", args=({}, {"alpha": 3})),
    row("add of a vector", torch.add, "ab", "b"),
    row("add of a number", torch.add, "ab", args=({"other": 2.0}, {"other": -3})),
    row("sub", torch.sub, "ab", "ab", args=({}, {"alpha": 3})),
    row("sub of a number", torch.sub, "ab", args=({"other": 2.0},)),
    row("mul", torch.mul, "ab", "ab"),
    row("mul of columns", torch.mul, "ab", "a1"),
    row("mul of a number", torch.mul, "ab", args=({"other": 2.0},)),
    row("div", torch.div, "ab", "+ab"),
    row("div of a vector", torch.div, "b", "+ab"),
    row("div of a number", torch.div, "ab", args=({"other": 4}, {"other": 2, "rounding_mode": "floor"})),
    row("maximum", torch.maximum, "ab", "ab"),
    row("minimum", torch.minimum, "ab", "b"),
    row("lerp", torch.lerp, "ab", "ab", args=({"weight": 0.3}, {"weight": 2.0})),
    row("addcmul", torch.addcmul, "ab", "ab", "b", args=({}, {"value": 0.5})),
    row("addcdiv", torch.addcdiv, "ab", "ab", "+ab", refuses=IN_PLACE, args=({"value": -2.0},)),
    row("where", lambda x, mask, y: torch.where(mask, x, y), "ab", "?ab", "b"),
    row("masked_fill", torch.masked_fill, "ab", "?ab", args=({"value": 7.0}, {"value": -1.0})),
    row("xlogy", torch.xlogy, "ab", "+ab"),
    row("eq", torch.eq, "2<ab", "2<ab", has_gradient=False),
    row("ge", torch.ge, "ab", has_gradient=False, args=({"other": 0.1}, {"other": -0.5})),
    row("gt", torch.gt, "ab", "ab", has_gradient=False),
    row("lt", torch.lt, "ab", "b", has_gradient=False),
    row("bitwise_not", torch.bitwise_not, "?ab", has_gradient=False),
    row("to", lambda x, dtype: x.to(dtype), "ab", args=({"dtype": torch.bfloat16}, {"dtype": torch.float64})),
    row(
        *("to integers", lambda x, dtype: (5 * x).to(dtype), "ab"),
        args=({"dtype": torch.int32}, {"dtype": torch.bool}),
        has_gradient=False,
    ),
    row("clone", torch.clone, "ab"),
    row("contiguous", lambda x: x.t().contiguous(), "ab"),
    _written(torch.Tensor.add_, "ab", "ab", name="add_", args=({}, {"alpha": 2})),
    _written(torch.Tensor.add_, "ab", name="add_ of a number", args=({"other": 2},)),
    _written(torch.Tensor.sub_, "ab", "b", name="sub_"),
    _written(torch.Tensor.mul_, "ab", "b", name="mul_"),
    _written(torch.Tensor.div_, "ab", "+ab", name="div_"),
    _written(torch.Tensor.div_, "ab", name="div_ of a number", args=({"other": 4},)),
    _written(torch.Tensor.addcmul_, "ab", "ab", "ab", name="addcmul_", args=({"value": 0.5},)),
    _written(torch.Tensor.addcdiv_, "ab", "ab", "+ab", name="addcdiv_", args=({"value": 0.5},)),
    _written(torch.Tensor.lerp_, "ab", "ab", name="lerp_", args=({"weight": 0.3},)),
    _written(torch.Tensor.sqrt_, "+ab", name="sqrt_"),
    _written(torch.Tensor.rsqrt_, "+ab", name="rsqrt_"),
    _written(torch.Tensor.pow_, "+ab", name="pow_", args=({"exponent": 0.5}, {"exponent": 2})),
    _written(torch.Tensor.clamp_, "ab", name="clamp_", args=({"min": 0.2}, {"min": -0.5, "max": 0.1})),
    _written(torch.Tensor.clamp_min_, "ab", name="clamp_min_", args=({"min": 0.2},)),
    _written(torch.Tensor.masked_fill_, "ab", "?ab", name="masked_fill_", args=({"value": 3.0},)),
    _written(torch.Tensor.copy_, "ab", "ab", name="copy_"),
    _written(torch.Tensor.fill_, "ab", name="fill_", args=({"value": 3.0},), has_gradient=False),
    _written(lambda x: x.zero_() + 1, "ab", name="zero_", has_gradient=False),
    row(
        "maximum.out",
        lambda x, y: torch.maximum(x, y, out=x.clone()),
        "ab",
        "ab",
        has_gradient=False,
        refuses=f"{IN_PLACE}|no valid sharding strategy for the input placements",  # the second since 2.14
    ),
]

REDUCING = [
    row("sum", torch.sum, "ab", args=({}, *DIMS), is_thorough=True),
    row("sum of a cube", torch.sum, "abc", args=({"dim": (1, 2)}, {"dim": 1}, {"dim": (0, -1), "keepdim": True})),
    row("sum in another dtype", torch.sum, "ab", args=({"dim": 0, "dtype": torch.float64},)),
    row("mean", torch.mean, "ab", args=({}, *DIMS), is_thorough=True),
    row("mean of a cube", torch.mean, "abc", args=({"dim": (1, 2)}, {"dim": 1}, {"dim": (0, -1), "keepdim": True})),
    row("prod", torch.prod, "+ab", args=({}, *DIM), has_gradient=False),
    row("var", torch.var, "2ab", args=({"dim": 0}, {"dim": (0, 2)}, {"dim": 0, "correction": 0, "keepdim": True})),
    row("std", torch.std, "2ab", args=({"dim": 0}, {"dim": (0, 1), "keepdim": True})),
    row("amax", torch.amax, "ab", args=({}, *DIMS), is_thorough=True, hangs_if_empty=True, has_gradient=False),
    row("amin", torch.amin, "ab", args=({}, *DIMS), hangs_if_empty=True, has_gradient=False),
    row("max", torch.max, "ab", hangs_if_empty=True),
    row("max of a dimension", torch.max, "ab", args=DIM, hangs_if_empty=True),
    row("min of a dimension", torch.min, "ab", args=DIM, hangs_if_empty=True),
    row(
        "argmax",
        torch.argmax,
        "ab",
        args=({}, *DIM),
        has_gradient=False,
        hangs_if_empty=True,
        without=_counts_from_the_end,
    ),
    row(
        "argmin",
        torch.argmin,
        "ab",
        args=({}, *DIM),
        has_gradient=False,
        hangs_if_empty=True,
        without=_counts_from_the_end,
    ),
    row("any", torch.any, "?ab", args=({}, *DIM), has_gradient=False),
    row("all", torch.all, "?ab", args=({}, *DIM), has_gradient=False),
    row("logsumexp", torch.logsumexp, "ab", args=DIMS),
    *(
        row(
            f"vector_norm of order {order}",
            lambda x, order=order, **args: torch.linalg.vector_norm(x, order, **args),
            "ab",
            args=({}, *DIMS),
            is_thorough=order == 2,
            refuses=IN_PLACE,
            hangs_if_empty=math.isinf(order),
            has_gradient=not math.isinf(order),
            without=lambda case, order=order: math.isinf(order) and case.is_partial,
        )
        for order in (2, 1, 0, 3.0, math.inf, -math.inf)
    ),
    row("norm", torch.norm, "ab", refuses=IN_PLACE, args=({"p": 2, "dim": 1}, {"p": 1, "dim": 0, "keepdim": True})),
    row("normalize", F.normalize, "ab", refuses=IN_PLACE, args=({"dim": 1}, {"dim": 0, "p": 1.0})),
    row("cosine_similarity", F.cosine_similarity, "ab", "ab", refuses=IN_PLACE, args=({"dim": 1}, {"dim": 0})),
    row("cumsum", torch.cumsum, "ab", args=({"dim": 0}, {"dim": 1}), without=_counts_from_the_end),
    row("softmax", torch.softmax, "ab", args=({"dim": 0}, {"dim": -1}), is_thorough=True),
    row("log_softmax", torch.log_softmax, "ab", args=({"dim": 0}, {"dim": -1})),
    row("topk", torch.topk, "ab", args=({"k": 1, "dim": 0}, {"k": 1})),
    row("sort", torch.sort, "ab", args=({"dim": 0}, {"dim": 1, "descending": True})),
]

MATRICES = [
    row("mm", torch.mm, "ab", "bc", is_thorough=True),
    row("addmm", torch.addmm, "c", "ab", "bc", args=({}, {"beta": 0.5, "alpha": 2.0}), is_thorough=True),
    row("addmm of a matrix", torch.addmm, "ac", "ab", "bc"),
    row("bmm", torch.bmm, "abc", "ac2"),
    row("baddbmm", torch.baddbmm, "ab2", "abc", "ac2", args=({}, {"beta": 0.5})),
    row("matmul", torch.matmul, "abc", "c2", refuses=VIEW),
    row("linear", F.linear, "abc", "2c", "2", refuses=VIEW),
    row("t", torch.t, "ab"),
    row("mv", torch.mv, "ab", "b"),
    row("dot", torch.dot, "b", "b"),
    row("vdot", torch.vdot, "b", "b"),
    row("tril", torch.tril, "ab", args=({}, {"diagonal": 1})),
    row("diagonal", torch.diagonal, "ab", args=({}, {"offset": -1, "dim1": 1, "dim2": 0})),
    row("geqrf", torch.geqrf, "+ab", has_gradient=False),
]

LAYERS = [
    row("layer_norm", lambda x, w, b: F.layer_norm(x, w.shape, w, b), "abc", "c", "c"),
    row("layer_norm over two dimensions", lambda x, w: F.layer_norm(x, w.shape, w), "abc", "bc"),
    row(
        "layer_norm without weights",
        lambda x, dims: F.layer_norm(x, x.shape[-dims:]),
        "abc",
        args=({"dims": 1}, {"dims": 2}),
    ),
    row("rms_norm", lambda x, w: F.rms_norm(x, w.shape, w), "abc", "c"),
    row(
        "group_norm",
        lambda x, w, b, groups: F.group_norm(x, groups, w, b),
        "a2b",
        "2",
        "2",
        has_gradient=False,
        args=({"groups": 1}, {"groups": 2}),
    ),
    row("batch_norm", lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True), "2ab", "a", "a"),
    row(
        "embedding",
        lambda i, w, **args: F.embedding(i, w, **args),
        "c<ab",
        "c2",
        args=({}, {"padding_idx": 1}),
        is_thorough=True,
    ),
    row("embedding of a vector", F.embedding, "b<a", "bc", args=({}, {"padding_idx": 0})),
]

LOSSES = [
    row("nll_loss", F.nll_loss, "ab", "b<a", args=REDUCTIONS, is_thorough=True, refuses=UNEVEN),
    row(
        "nll_loss with ignore_index",
        F.nll_loss,
        "ab",
        "b<a",
        refuses=UNEVEN,
        without=lambda case: _is_mean(case) and (case.sizes == "small" or _is_biased(case)),
        args=({"ignore_index": 0}, {"ignore_index": 0, "reduction": "sum"}, {"ignore_index": 1, "reduction": "none"}),
    ),
    row(
        "nll_loss with weights",
        lambda x, t, w, **args: F.nll_loss(x, t, w, **args),
        "ab",
        "b<a",
        "=b",
        args=REDUCTIONS,
        refuses=UNEVEN,
        without=lambda case: _is_mean(case) and _is_biased(case),
    ),
    row("nll_loss of a cube", F.nll_loss, "abc", "b<ac", args=REDUCTIONS, refuses=UNEVEN),
    row("cross_entropy", F.cross_entropy, "ab", "b<a", refuses=UNEVEN, args=REDUCTIONS),
    row(
        "cross_entropy with smoothed labels",
        F.cross_entropy,
        "ab",
        "b<a",
        refuses=f"{UNEVEN}|{IN_PLACE}",
        args=({"label_smoothing": 0.1}, {"label_smoothing": 0.2, "reduction": "sum"}),
    ),
    row("mse_loss", F.mse_loss, "ab", "ab", args=NOT_MEAN),
    row("l1_loss", F.l1_loss, "ab", "ab", args=REDUCTIONS),
    row("smooth_l1_loss", F.smooth_l1_loss, "ab", "ab", args=NOT_MEAN),
    row("huber_loss", F.huber_loss, "ab", "ab", args=NOT_MEAN),
    row(
        "binary_cross_entropy",
        lambda x, y, **args: F.binary_cross_entropy(x.sigmoid(), y, **args),
        "ab",
        "=ab",
        args=NOT_MEAN,
    ),
    row("binary_cross_entropy_with_logits", F.binary_cross_entropy_with_logits, "ab", "ab", args=NOT_MEAN),
    row(
        "kl_div", F.kl_div, "ab", "=ab", args=({"reduction": "batchmean"}, {"reduction": "sum"}, {"reduction": "none"})
    ),
]

VIEWS = [
    row(
        "view",
        lambda x, shape: x.view([x.size(i) if i >= 0 else -1 for i in shape]),
        "abc",
        args=({"shape": (0, -1)}, {"shape": (-1, 2)}),
        refuses=VIEW,
    ),
    row("view of a split dimension", lambda x: x.view(-1, 1, x.size(1)), "ab", refuses=VIEW),
    row(
        "view of another dtype",
        lambda x, dtype: x.view(dtype),
        "=ab",
        args=({"dtype": torch.int32}, {"dtype": torch.float32}),
        has_gradient=False,
    ),
    row("reshape", lambda x: x.reshape(-1), "ab", refuses=VIEW),
    row("reshape of a transposed matrix", lambda x: x.t().reshape(-1), "ab", refuses=VIEW),
    row("flatten", torch.flatten, "abc", args=({"start_dim": 1}, {"end_dim": 1}), refuses=VIEW),
    row("unflatten", lambda x: x.unflatten(0, (-1, 1)), "ab", refuses=VIEW),
    row(
        "unflatten into groups",
        lambda x: x.unflatten(0, (-1, 2 if x.size(0) % 2 == 0 else 3)),
        "cb",
        refuses=VIEW,
        is_thorough=True,
    ),
    row("permute", torch.permute, "abc", args=({"dims": (2, 0, 1)}, {"dims": (1, 0, 2)})),
    row("transpose", torch.transpose, "abc", args=({"dim0": 0, "dim1": 2}, {"dim0": -1, "dim1": -2})),
    row("squeeze", torch.squeeze, "1ab", args=({"dim": 0}, {"dim": 1}), refuses=VIEW),
    row("unsqueeze", torch.unsqueeze, "ab", args=({"dim": 0}, {"dim": 1}, {"dim": -1})),
    row(
        "expand", lambda x, shape: x.expand(shape), "1b", args=({"shape": (3, -1)}, {"shape": (4, 2, -1)}), refuses=VIEW
    ),
    row("repeat", lambda x, repeats: x.repeat(repeats), "ab", args=({"repeats": (1, 2)}, {"repeats": (3, 1)})),
    row(
        "select",
        torch.select,
        "abc",
        args=({"dim": 0, "index": 0}, {"dim": 1, "index": -1}, {"dim": -1, "index": 1}),
        is_thorough=True,
        without=_counts_from_the_end,
    ),
    row(
        "slice",
        lambda x, dim, part: x[(slice(None),) * dim + (part,)],
        "abc",
        args=tuple(
            {"dim": dim, "part": part}
            for part in (slice(0, 1), slice(1, None), slice(None, None, 2))
            for dim in range(3)
        ),
        is_thorough=True,
    ),
    row(
        "split",
        lambda x, **args: torch.split(x, **args),
        "ab",
        args=({"split_size_or_sections": 2}, {"split_size_or_sections": 1, "dim": 1}),
        is_thorough=True,
    ),
    row("chunk", torch.chunk, "ab", args=({"chunks": 2}, {"chunks": 3, "dim": 1}), is_thorough=True),
    row("unbind", torch.unbind, "2ab", args=({"dim": 0}, {"dim": 2}), refuses=VIEW),
    row("cat", lambda *each, dim: torch.cat(each, dim), "ab", "ab", args=({"dim": 0}, {"dim": 1})),
    row("cat of three", lambda *each, dim: torch.cat(each, dim), "ab", "cb", "1b", args=({"dim": 0}, {"dim": -2})),
    row(
        "stack",
        lambda *each, dim: torch.stack(each, dim),
        "ab",
        "ab",
        args=({"dim": 0}, {"dim": 1}, {"dim": -1}),
        is_thorough=True,
    ),
    row("flip", torch.flip, "ab", args=({"dims": (0,)}, {"dims": (1,)})),
    row("roll", torch.roll, "ab", args=({"shifts": 1, "dims": 0}, {"shifts": 1, "dims": 1}, {"shifts": 2})),
]

INDEXING = [
    row(
        "index_select",
        lambda x, i, dim: torch.index_select(x, dim, i),
        "bb",
        "b<c",
        args=({"dim": 0}, {"dim": 1}),
        is_thorough=True,
    ),
    row("index by a vector", lambda x, i: x[i], "ab", "a<c"),
    row("index by two vectors", lambda x, i, j: x[i, j], "abc", "a<b", "b<b"),
    row("index by vectors apart", lambda x, i, j: x[:, i, :, j], "2abc", "a<2", "c<2"),
    row("index of the last dimension", lambda x, i: x[..., i], "ab", "b<c"),
    row("index by a matrix", lambda x, i: x[:, i], "abc", "b<2a"),
    row(
        "gather",
        lambda x, i, dim: torch.gather(x, dim, i),
        "bb",
        "b<bb",
        args=({"dim": 0}, {"dim": 1}),
        is_thorough=True,
    ),
    row("gather of one column", lambda x, i, dim: torch.gather(x, dim, i), "ab", "b<a1", args=({"dim": 1},)),
    row("scatter", lambda x, i, y, dim: torch.scatter(x, dim, i, y), "bb", "b<2b", "2b", args=({"dim": 0},)),
    row("scatter of a number", lambda x, i: torch.scatter(x, 1, i, 3.0), "ab", "b<a1"),
    row(
        "scatter_add",
        lambda x, i, y, dim: torch.scatter_add(x, dim, i, y),
        "bb",
        "b<bb",
        "bb",
        args=({"dim": 0}, {"dim": 1}),
    ),
    row("index_put", lambda x, i, y: torch.index_put(x, (i,), y), "ab", "a<1", "1b", has_gradient=False),
    row("index_fill", lambda x, i, dim: torch.index_fill(x, dim, i, 3.0), "bb", "b<2", args=({"dim": 0}, {"dim": 1})),
]

MAKING = [
    row("zeros_like", lambda x: torch.zeros_like(x) + 1, "ab", has_gradient=False),
    row("ones_like", torch.ones_like, "ab", has_gradient=False, args=({}, {"dtype": torch.int32})),
    row("full_like", torch.full_like, "ab", has_gradient=False, args=({"fill_value": 2.0}, {"fill_value": 3.0})),
    row("empty_like", lambda x: torch.empty_like(x).fill_(2.0), "ab", has_gradient=False, without=IS_PARTIAL),
    row(
        "new_zeros",
        lambda x, shape: x.new_zeros(shape or x.shape) + 1,
        "ab",
        has_gradient=False,
        args=({"shape": ()}, {"shape": (3, 2)}),
        without=IS_PARTIAL,
    ),
    row(
        "new_ones",
        lambda x, shape: x.new_ones(shape or x.shape),
        "ab",
        has_gradient=False,
        args=({"shape": ()}, {"shape": (3, 2)}),
        without=IS_PARTIAL,
    ),
    row(
        "new_full",
        lambda x, shape: x.new_full(shape or x.shape, 7),
        "ab",
        has_gradient=False,
        args=({"shape": ()}, {"shape": (4, 4)}),
        without=IS_PARTIAL,
    ),
    row(
        "new_empty_strided",
        lambda x: x.new_empty_strided(x.shape, x.stride()).fill_(3),
        "ab",
        has_gradient=False,
        without=IS_PARTIAL,
    ),
    row("new_empty", lambda x: x.new_empty(x.shape).fill_(3), "ab", has_gradient=False, without=IS_PARTIAL),
    row("equal", lambda x, y: (torch.equal(x, y), torch.equal(x, x.clone())), "ab", "ab", has_gradient=False),
    row("item", lambda x: x.item(), "=", has_gradient=False),
]

LISTS = [
    _listed("_foreach_abs", 2),
    _listed("_foreach_add", 4),
    _listed("_foreach_add", 2, 2.0),
    _listed("_foreach_add_", 4),
    _listed("_foreach_add_", 2, 2.0),
    _listed("_foreach_add_", 2, [2.0, 3.0]),
    _listed("_foreach_addcdiv_", 6, 0.5),
    _listed("_foreach_addcdiv_", 6, [0.5, 2.0]),
    _listed("_foreach_addcmul", 6, 0.5),
    _listed("_foreach_addcmul_", 6, 0.5),
    _listed("_foreach_clamp_max_", 2, 1.0),
    _listed("_foreach_clamp_min_", 2, 1.0),
    _listed("_foreach_div_", 4),
    _listed("_foreach_div_", 2, [2.0, 3.0]),
    _listed("_foreach_lerp_", 4, 0.3),
    _listed("_foreach_lerp_", 4, [0.3, 0.6]),
    _listed("_foreach_maximum_", 4),
    _listed("_foreach_mul", 4),
    _listed("_foreach_mul", 2, [2.0, 3.0]),
    _listed("_foreach_mul_", 4),
    _listed("_foreach_mul_", 2, 2.0),
    _listed("_foreach_mul_", 2, [2.0, 3.0]),
    _listed("_foreach_mul_", 3),
    _listed("_foreach_neg", 2),
    *(
        _listed("_foreach_norm", 2, order, hangs_if_empty=math.isinf(order))
        for order in (2.0, 1.0, math.inf, -math.inf, 0.0)
    ),
    _listed("_foreach_reciprocal_", 2),
    _listed("_foreach_rsqrt_", 2),
    _listed("_foreach_sign_", 2),
    _listed("_foreach_sqrt", 2),
    _listed("_foreach_sqrt_", 2),
    _listed("_foreach_sub", 4),
    row(
        "norm of norms",
        lambda x, y: torch.linalg.vector_norm(torch.stack(torch._foreach_norm([x, y]))),
        "ab",
        "c",
        has_gradient=False,
    ),
]

ROWS: Mapping[str, Sequence[OperatorRow]] = {
    "pointwise": POINTWISE,
    "reducing": REDUCING,
    "matrices": MATRICES,
    "layers": LAYERS,
    "losses": LOSSES,
    "views": VIEWS,
    "indexing": INDEXING,
    "making": MAKING,
    "lists": LISTS,
}


# --- the tensors of a case --------------------------------------------------------------------------------------------


def shape_of(word: str, sizes: str) -> tuple[int, ...]:
    return tuple(SIZES[sizes][letter] for letter in _letters(word))


def _letters(word: str) -> str:
    return word.rpartition("<")[2].lstrip("+=?")


def is_number(word: str) -> bool:
    """Whether a word is that of floating-point numbers."""
    return not word.startswith("?") and "<" not in word


def is_trained(word: str) -> bool:
    return is_number(word) and not word.startswith("=")


def filled(word: str, sizes: str, seed: int) -> torch.Tensor:
    """A tensor of random values. No two are equal, except for indices and booleans."""
    shape = shape_of(word, sizes)
    values = uniform(*shape, seed=seed)
    if word.startswith("?"):
        return values > 0.4
    if "<" in word:
        return (values * SIZES[sizes][word[0]]).long()
    if word.startswith("="):
        return values
    return values + 0.5 if word.startswith("+") else 2 * values - 1


def distributed(whole: torch.Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """The DTensor with this value. Of a partial one, each rank has another share."""
    local = part_of(whole, mesh, layout)
    for dim, placement in enumerate(layout):
        if placement.is_partial():
            index, size = mesh.get_local_rank(dim), mesh.size(dim)
            share = 2 * (index + 1) / (size * (size + 1))
            factor, offset = {
                "sum": (share, 0.0),
                "avg": (share * size, 0.0),
                "max": (1.0, -0.25 * (size - 1 - index)),
                "min": (1.0, 0.25 * index),
            }[placement.reduce_op]
            local = local * factor + offset
    return DTensor.from_local(local, mesh, layout, run_check=False, shape=whole.shape, stride=whole.stride())


def part_of(whole: torch.Tensor, mesh: DeviceMesh, layout: Layout) -> torch.Tensor:
    """This rank's local shard of a tensor."""
    for dim, indices in enumerate(by_hand(whole.shape, mesh, layout)):
        whole = whole.index_select(dim, torch.tensor(indices, dtype=torch.long, device=whole.device))
    return whole.clone()


# --- the cases of a row -----------------------------------------------------------------------------------------------


def _layouts(word: str, mesh_ndim: int, reduce_op: str) -> list[Layout]:
    """The layouts of a tensor, those of the first mesh dimension first. The last replicates the tensor."""
    dims = range(len(_letters(word)))
    shards: list[Placement] = [Shard(dim) for dim in dims]
    partial: list[Placement] = [Partial(reduce_op)] if is_trained(word) else []
    if mesh_ndim == 1:
        return [(each,) for each in (*shards, *partial, Replicate())]
    pairs = list(itertools.product((*shards, *partial, Replicate()), repeat=2))
    return [*((strided(dim, 2), Shard(dim)) for dim in dims), *pairs]


def cases(row: OperatorRow, index: int, mesh: DeviceMesh) -> Iterator[list[Case]]:
    """The cases of a row by layouts. Those of a list differ only in their arguments.

    The first :func:`enough` are taken. Rows with another ``index`` begin with other layouts and sizes.
    """
    reduce_op = ("sum", "avg", "sum", "max", "sum", "min")[index % 6]
    choices = [_layouts(word, mesh.ndim, reduce_op) for word in row.inputs]
    most = max(map(len, choices), default=1)
    # Each layout of each tensor, once with similar layouts of the others and once with different ones.
    shifts = [
        [(i + shift * at) % len(each) for at, each in enumerate(choices)] for shift in (0, 1) for i in range(most)
    ]
    every = list(dict.fromkeys(tuple(each[i] for each, i in zip(choices, chosen)) for chosen in shifts))
    kinds = ["uneven", "even", "uneven", "small"]
    for number in range(len(every)):
        layouts = every[(5 * index + number) % len(every)]
        sizes = kinds[(index + number) % len(kinds)]
        made = [Case(args, sizes, layouts) for args in _arguments(row, 3 * number + index, mesh)]
        kept = [
            case
            for case in made
            if not row.without(case) and not (row.hangs_if_empty and _has_empty_shard(row, case, mesh))
        ]
        if kept:
            yield kept


def _arguments(row: OperatorRow, first: int, mesh: DeviceMesh) -> Sequence[Args]:
    """All arguments of a row, or three of many, so that a cache that forgets an argument is asked for another value."""
    if len(row.args) <= 3 or (row.is_thorough and mesh.ndim == 1):
        chosen = row.args
    else:
        chosen = [row.args[(first + each) % len(row.args)] for each in range(3)]
    ndim = len(_letters(row.inputs[0]))
    from_the_end = [
        {**args, "dim": args["dim"] - ndim} for args in chosen if isinstance(args.get("dim"), int) and args["dim"] >= 0
    ]
    return [*chosen, *from_the_end]


def enough(kind: str, row: OperatorRow, index: int, mesh: DeviceMesh) -> int:
    """How many layouts of a row are tried. On planes that is none for most rows."""
    if mesh.ndim > 1:
        # Other losses and products consist of simpler operators, and their rules take long to derive.
        return int(row.is_thorough or (index % 4 == 0 and kind not in ("losses", "matrices")))
    if row.is_thorough:
        return 4
    return 1 if kind in ("pointwise", "losses", "making", "lists") else 2


def _has_empty_shard(row: OperatorRow, case: Case, mesh: DeviceMesh) -> bool:
    """Whether some rank has no part of some tensor, in any layout that the operator may choose."""
    return any(size < 2 * mesh.size() - 1 for word in row.inputs for size in shape_of(word, case.sizes))


# --- what is known to differ ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Known:
    """A case in which DTensor raises ``error``, or has other values than plain tensors. ``why`` says where."""

    why: str
    row: OperatorRow
    layouts: tuple[Layout, ...]
    sizes: str = "even"
    seed: int = 0  # of the values
    error: str = r" are not (close|equal)!"  # a regular expression


_S0, _S1, _R = (Shard(0),), (Shard(1),), (Replicate(),)
KNOWN: Sequence[Known] = [
    Known(
        "native_group_norm_backward gets the size of the whole batch: it has no rule (_math_ops.py)",
        row("group_norm", lambda x: F.group_norm(x, 1), "a2b"),
        (_S0,),
        error="does not have a sharding strategy",
    ),
    Known(
        "the norms of order inf and -inf are taken for max and min, also of partial negative numbers (_math_ops.py)",
        row("vector_norm", lambda x: torch.linalg.vector_norm(x, -math.inf), "ab"),
        ((Partial("min"),),),
    ),
    Known(
        "a view of another dtype keeps partial placements, and bits are added up (_tensor_ops.py)",
        row("view", lambda x: x.view(torch.int32), "ab", has_gradient=False),
        ((Partial("sum"),),),
    ),
    Known(
        "backward of index_put writes a plain tensor of zeros into a DTensor",
        row("index_put", lambda x, i, y: torch.index_put(x, (i,), y), "ab", "a<1", "1b"),
        (_S0, _R, _R),
        error="got mixed torch.Tensor and DTensor",
    ),
    Known(
        "empty_like keeps partial placements, so that what the ranks write is added up (_tensor_ops.py)",
        row("empty_like", lambda x: torch.empty_like(x).fill_(2.0), "ab", has_gradient=False),
        ((Partial("sum"),),),
    ),
    Known(
        "a mean of weighted losses averages the means of the ranks, whose weights differ (nll_loss_forward_strategy)",
        row("nll_loss", lambda x, t, w: F.nll_loss(x, t, w), "ab", "b<a", "=b"),
        (_S0, _S0, _R),
    ),
    Known(
        "gather shards the rows of a tensor and those of a shorter index (_tensor_ops.py), which then do not match",
        row("gather", lambda x, i: torch.gather(x, 1, i), "cb", "b<2b"),
        (_S0, _R),
    ),
    Known(
        "backward of amax, and of norms of order inf, divides by zero if the first rank does not have the maximum",
        row("amax", torch.amax, "ab"),
        (_S1,),
        seed=2,
    ),
    Known(
        "the gradient of the numerator of addcdiv is wrong if the divisor is a partial sum",
        row("addcdiv", torch.addcdiv, "ab", "ab", "+ab", args=({"value": -2.0},)),
        (_S0, _S1, (Partial("sum"),)),
    ),
    Known(
        "argmax and argmin raise if the sharded dimension is given as -2: they gather along it (_nonlinear_redux.py)",
        row("argmax", lambda x: torch.argmax(x, -2), "ab", has_gradient=False),
        (_S0,),
        error="is invalid for input of size",
    ),
    Known(
        "each rank adds up its own shard if the dimension of cumsum counts from the end (scan_strategy)",
        row("cumsum", lambda x: torch.cumsum(x, -1), "ab"),
        (_S1,),
    ),
    Known(
        "backward of select shifts all shards if its dimension counts from the end (select_backward_strategy)",
        row("select", lambda x: torch.select(x, -1, 1), "abc"),
        (_S1,),
        error="must match the size of tensor b",
    ),
    Known(
        "index_put takes a mask for indices into one dimension (_tensor_ops.py), so Rprop raises",
        row("index_put", lambda x, m, y: torch.index_put(x, (m,), y), "ab", "?ab", "=", has_gradient=False),
        (_S1, _S1, _R),
        error="does not match the shape of the indexed tensor",
    ),
]
