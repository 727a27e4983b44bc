"""Linear algebra: matrix products, norms, and functions of one matrix per token."""

from __future__ import annotations

from typing import Any

from .. import checks
from ..array import Array
from ..backends import is_array
from ..broadcasting import (
    as_values,
    broadcast_operand,
    check_shared_layout,
    mask_tail,
    moveaxis,
    normalize_axes,
    normalize_axis,
)
from ..dispatch.operation import define_operation
from ..dtypes import accumulation_dtype
from ..ops.segment import gather_tiles, safe_root, segment_reduce, tile_size
from ..records import record
from .binding import Standard, implements, library_dtype

TILE = 64  # tokens of one row that are multiplied together
MAX_WEIGHTS = 1 << 22  # elements of the matrices gathered at a time


@implements("matmul", ragged="either")
def matmul(x1: Any, x2: Any, /, *, std: Standard) -> Array:
    """Multiply tokens by one matrix, or by a matrix per row.

    The shapes are (n, None, ..., k) @ (k, m) and (n, None, k) @ (n, k, m).
    """
    fits = isinstance(x1, Array) and is_array(x2) and x1.ragged_dim < x1.values.ndim - 1
    if not fits or not (x2.ndim in (1, 2) or x2.ndim == x1.ndim == 3):
        shapes = (tuple(x.shape) if hasattr(x, "shape") else repr(x) for x in (x1, x2))
        raise TypeError(
            "matmul: expected a ragged array (n, None, ..., k) and a dense (k,), (k, m) or, one matrix per row, "
            f"(n, k, m); got {' and '.join(map(str, shapes))}; where the ragged axis itself is multiplied, use "
            "scree.to_padded"
        )
    checks.check_dense("matmul", x2, x1.values)
    if x2.ndim == 3:
        return _grouped_matmul.run({"x": x1, "weight": x2}, {})
    k = x1.values.shape[-1]
    if x2.shape[0] != k:
        raise ValueError(
            f"matmul: expected a matrix ({k}, m) or a vector ({k},) for {x1.shape}, got {tuple(x2.shape)}"
        )
    return Array.from_layout(std.function(x1.values, x2), x1.layout, x1.ragged_dim)


@record
class GroupedCall:
    """A validated call of `matmul` with one matrix per row.

    Attributes
    ----------
    x
        (n, None, k) ragged array.
    weight
        (n, k, m) dense array of the dtype of `x`.
    """

    x: Array
    weight: Any

    def __post_init__(self) -> None:
        (n, _, k), shape = self.x.shape, tuple(self.weight.shape)
        if shape[:2] != (n, k):
            raise ValueError(f"matmul: expected one matrix per row, ({n}, {k}, m), got {shape}")
        checks.check_same_dtype("matmul", self.weight, self.x, "x1")


@define_operation("grouped_matmul", GroupedCall)
def _grouped_matmul(call: GroupedCall) -> Array:
    """Multiply tiles of tokens by the matrix of their row.

    As many tiles are multiplied at a time as their matrices fit into the cache.
    """
    x, layout, xp = call.x, call.x.layout, call.x.layout.xp
    _, k, m = (int(n) for n in call.weight.shape)
    if 0 in (x.batch_size, x.total_length, k, m):
        return _zeros(x, m)
    size = max(tile_size(layout, TILE), 1)
    tiles = layout.tiles(size)
    step = max(1, MAX_WEIGHTS // max(k * m, size * k))
    count, parts = int(tiles.tokens.shape[0]), []
    if count == 0:  # all tokens are in the tail
        return _zeros(x, m)
    for i in range(0, count, step):
        part = slice(i, min(i + step, count))
        part_tiles = tiles._replace(tokens=tiles.tokens[part, :], valid=tiles.valid[part, :])
        weight = xp.take(call.weight, tiles.rows[part], axis=0)
        parts.append(xp.matmul(gather_tiles(xp, x.values, part_tiles, 0), weight))
    out = parts[0] if len(parts) == 1 else xp.concat(parts, axis=0)
    out = xp.reshape(out, (count * size, m))
    return x.with_values(xp.take(out, layout.tile_slots(size), axis=0))


def _zeros(x: Array, width: int) -> Array:
    shape = (x.total_length, width)
    return x.with_values(x.layout.xp.zeros(shape, dtype=x.dtype, device=x.layout.device))


def _promoted_dtype(std: Standard, a: Any, b: Any) -> Any:
    return std.xp.result_type(a, b)


@implements("vecdot", dtype_rule=_promoted_dtype, ragged="either")
def vecdot(x1: Any, x2: Any, /, *, axis: int = -1, std: Standard) -> Any:
    """Compute the dot product of vectors along an element axis, or of rows along the ragged axis."""
    first = check_shared_layout(std.name, [x for x in (x1, x2) if isinstance(x, Array)])
    for x in (x1, x2):
        checks.check_dense(std.name, as_values(x), first.values)
    axis, dim = normalize_axis(std.name, axis, first.ndim), first.ragged_dim
    a, b = (broadcast_operand(std.name, x, first) for x in (x1, x2))
    if axis != dim + 1:
        out = std.function(a, b, axis=axis - 1 - first.values.ndim)
        return first.with_values(out, ragged_dim=dim - (axis <= dim))
    xp, dtype = std.xp, std.result_dtype(a.dtype, b.dtype)
    wide = accumulation_dtype(xp, dtype)
    a, b = (mask_tail(first, xp.astype(x, wide, copy=False)) for x in (a, b))
    a = xp.conj(a) if xp.isdtype(wide, "complex floating") else a
    return segment_reduce("sum", moveaxis(xp, a * b, dim, 0), first.layout, dtype=dtype)


@implements("tensordot", ragged="either")
def tensordot(x1: Any, x2: Any, /, *, axes: Any = 2, std: Standard) -> Array:
    """Contract the last element axes of a ragged array with the first axes of a dense one."""
    if not isinstance(x1, Array) or isinstance(x2, Array) or not isinstance(axes, int):
        raise TypeError(
            "tensordot: expected a ragged array, a dense array and a number of axes; see xp.matmul, xp.vecdot"
        )
    checks.check_dense("tensordot", x2, x1.values)
    if not 0 <= axes <= x1.values.ndim - 1 - x1.ragged_dim:
        raise ValueError(
            f"axes: expected at most the element axes after the ragged axis of {x1.shape}, got {axes}"
        )
    if tuple(x2.shape[:axes]) != tuple(x1.values.shape[x1.values.ndim - axes :]):
        raise ValueError(
            f"axes: expected the last {axes} axes of {x1.shape} to be the first of {tuple(x2.shape)}"
        )
    return x1.with_values(std.function(x1.values, x2, axes=axes))


@implements("vector_norm", dtype_rule=library_dtype)
def vector_norm(
    x: Array, /, *, axis: Any = None, keepdims: bool = False, ord: float = 2, std: Standard
) -> Any:
    """Compute the norm of vectors along element axes, or of rows along the ragged axis.

    The ragged axis may be combined with element axes.
    """
    xp, axes = std.xp, normalize_axes(std.name, axis, x.ndim)
    if x.ragged_dim + 1 not in axes:
        if 0 in axes:
            raise ValueError(
                "axis: a norm over the batch alone would mix unrelated positions of rows; use axis=(0, 1)"
            )
        removed = 0 if keepdims else sum(a - 1 < x.ragged_dim for a in axes)
        out = std.function(x.values, axis=tuple(a - 1 for a in axes), keepdims=keepdims, ord=ord)
        return x.with_values(out, ragged_dim=x.ragged_dim - removed)
    dtype = std.result_dtype(x.dtype)  # floating-point for integers
    namespace = x.__array_namespace__()
    is_floating = xp.isdtype(x.dtype, ("real floating", "complex floating"))
    size = xp.abs(mask_tail(x, x.values if is_floating else xp.astype(x.values, dtype)))

    def reduce(function: str, values: Any) -> Any:
        return getattr(namespace, function)(x.with_values(values), axis=axes, keepdims=keepdims)

    if ord in (float("inf"), -float("inf")):
        out = reduce("max" if ord > 0 else "min", size)
        return xp.maximum(out, xp.zeros_like(out))  # the norm of no elements is 0
    if ord == 0:
        return xp.astype(reduce("count_nonzero", size), dtype)
    wide = xp.astype(size, accumulation_dtype(xp, size.dtype), copy=False)
    total = reduce("sum", wide * wide if ord == 2 else wide**ord)
    out = safe_root(xp, total, ord) if ord > 0 else total ** (1 / ord)
    return xp.astype(out, dtype, copy=False)


@implements("matrices")
def matrices(x: Array, /, *args: Any, std: Standard, **kwargs: Any) -> Any:
    """Apply a function of matrices to one matrix per token: the last two axes must be element axes."""
    if x.ragged_dim > x.values.ndim - 3:
        raise ValueError(
            f"x: expected a matrix for each token, (n, None, ..., k, m), got {x.shape}"
        )
    check_shared_layout(std.name, [x, *(a for a in args if isinstance(a, Array))])
    out = std.function(x.values, *map(as_values, args), **kwargs)
    if not isinstance(out, tuple):
        return x.with_values(out)
    return getattr(type(out), "_make", type(out))(tuple(map(x.with_values, out)))
