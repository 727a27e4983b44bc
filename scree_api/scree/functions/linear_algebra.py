"""Products: tokens times matrices, and norms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import checks
from ..array import Array
from ..backends import Backend, constant, is_array
from ..broadcasting import (
    Function,
    accumulator,
    against,
    axes_of,
    axis_of,
    in_rows,
    moved,
    shared_layout,
    unless_either_ragged,
    unless_ragged,
    values_of,
)
from ..dispatch import call_cache
from ..dispatch.registry import declare
from ..ops.segment import root, segment_reduce, tiled

TOKENS = 64  # of one row that meet its matrix together
WEIGHTS = 1 << 22  # elements of the matrices gathered at a time


def matmul(f: Function, name: str, lib: Backend) -> Function:
    """Tokens times one matrix, (n, None, ..., k) @ (k, m), or times that of their row, (n, None, k) @ (n, k, m)."""

    def ragged(a: Any, b: Any, /) -> Any:
        fits = (
            isinstance(a, Array)
            and is_array(b)
            and a.ndim >= 3
            and a.ragged_dim < a.values.ndim - 1
        )
        if not fits or not (b.ndim in (1, 2) or b.ndim == a.ndim == 3):
            came = (tuple(x.shape) if hasattr(x, "shape") else repr(x) for x in (a, b))
            raise TypeError(
                "matmul: expected a ragged array (n, None, ..., k) and a dense (k,), (k, m) or, one matrix a row, (n, k, m); "
                f"got {' and '.join(map(str, came))}; where the ragged axis itself is multiplied, use scree.to_padded"
            )
        checks.dense("matmul", b, a.values)
        if b.ndim == 3:
            return call_cache.run("grouped_matmul", {"x": a, "weight": b}, {})
        k = a.values.shape[-1]
        if b.shape[0] != k:
            raise ValueError(
                f"matmul: expected a matrix ({k}, m) or a vector ({k},) for {a.shape}, got {tuple(b.shape)}"
            )
        return Array._of(f(a.values, b), a.layout, a.ragged_dim)

    return unless_either_ragged(f, ragged)


@dataclass(frozen=True, slots=True)
class GroupedCall:
    """The grouped matrix product: every row of `x`, (n, None, k), times its own matrix of `weight`, (n, k, m)."""

    x: Array
    weight: Any

    def __post_init__(self) -> None:
        n, _, k = self.x.shape
        if tuple(self.weight.shape[:2]) != (n, k):
            raise ValueError(
                f"matmul: expected one matrix a row, ({n}, {k}, m), got {tuple(self.weight.shape)}"
            )
        if self.weight.dtype != self.x.dtype:
            raise TypeError(
                f"matmul: expected dtype {self.x.dtype} as x, got {self.weight.dtype}; convert it with xp.astype"
            )


@declare("grouped_matmul", GroupedCall)
def _grouped(call: GroupedCall) -> Array:
    """Tiles of tokens against the matrix of their row, as many at a time as their matrices fit into the cache."""
    x, rows, xp = call.x, call.x.layout, call.x.layout.xp
    _, k, m = (int(n) for n in call.weight.shape)
    if 0 in (x.batch_size, x.total_length):
        return x.with_values(xp.zeros((x.total_length, m), dtype=x.dtype, device=rows.device))
    tiles = rows.tiles(TOKENS)
    blocks, step = tiled(xp, x.values, tiles, 0), max(1, WEIGHTS // max(k * m, 1))
    count = int(blocks.shape[0])
    parts = []
    for i in range(0, count, step):
        part = slice(i, min(i + step, count))
        parts.append(xp.matmul(blocks[part, ...], xp.take(call.weight, tiles.rows[part], axis=0)))
    out = xp.reshape(parts[0] if len(parts) == 1 else xp.concat(parts, axis=0), (-1, m))
    return x.with_values(xp.take(out, rows.tile_slots(TOKENS), axis=0))


def vecdot(f: Function, name: str, lib: Backend) -> Function:
    """The product of vectors along an element axis, or of rows along the ragged axis."""

    @constant
    def promoted(a: Any, b: Any) -> Any:
        return lib.xp.result_type(a, b)

    def ragged(x1: Any, x2: Any, /, *, axis: int = -1) -> Any:
        arrays = [x for x in (x1, x2) if isinstance(x, Array)]
        first = shared_layout(name, arrays)
        for x in (x1, x2):
            checks.dense(name, values_of(x), first.values)
        at = axis_of(name, axis, first.ndim)
        a, b = (x.values if isinstance(x, Array) else against(name, x, first) for x in (x1, x2))
        if at != first.ragged_dim + 1:
            dim = first.ragged_dim - (at <= first.ragged_dim)
            return first.with_values(f(a, b, axis=at - 1 - first.values.ndim), ragged_dim=dim)
        xp, dtype = lib.xp, promoted(a.dtype, b.dtype)
        wide = accumulator(xp, dtype)
        a, b = (in_rows(first, xp.astype(x, wide, copy=False)) for x in (a, b))
        a = xp.conj(a) if xp.isdtype(wide, "complex floating") else a
        return segment_reduce(
            "sum", moved(xp, a * b, first.ragged_dim, 0), first.layout, dtype=dtype
        )

    return unless_either_ragged(f, ragged)


def tensordot(f: Function, name: str, lib: Backend) -> Function:
    """The last element axes of a ragged array against the first axes of a dense one."""

    def ragged(x1: Any, x2: Any, /, *, axes: Any = 2) -> Any:
        if not isinstance(x1, Array) or isinstance(x2, Array) or not isinstance(axes, int):
            raise TypeError(
                "tensordot: expected a ragged array, a dense array and a number of axes; see xp.matmul, xp.vecdot"
            )
        checks.dense("tensordot", x2, x1.values)
        if not 0 <= axes <= x1.values.ndim - 1 - x1.ragged_dim:
            raise ValueError(
                f"axes: expected at most the element axes behind the ragged one of {x1.shape}, got {axes}"
            )
        if tuple(x2.shape[:axes]) != tuple(x1.values.shape[x1.values.ndim - axes :]):
            raise ValueError(
                f"axes: expected the last {axes} axes of {x1.shape} to be the first of {tuple(x2.shape)}"
            )
        return x1.with_values(f(x1.values, x2, axes=axes))

    return unless_either_ragged(f, ragged)


def vector_norm(f: Function, name: str, lib: Backend) -> Function:
    """The norm of vectors along element axes, of rows along the ragged axis (with element axes, or alone)."""
    xp = lib.xp

    def ragged(x: Array, /, *, axis: Any = None, keepdims: bool = False, ord: float = 2) -> Any:
        axes = axes_of(name, axis, x.ndim)
        if x.ragged_dim + 1 not in axes:
            if 0 in axes:
                raise ValueError(
                    "axis: a norm over the batch alone would mix unrelated positions of rows; use axis=(0, 1)"
                )
            gone = 0 if keepdims else sum(a - 1 < x.ragged_dim for a in axes)
            out = f(x.values, axis=tuple(a - 1 for a in axes), keepdims=keepdims, ord=ord)
            return x.with_values(out, ragged_dim=x.ragged_dim - gone)
        out = f(xp.ones((1,), dtype=x.dtype)).dtype  # of integers, floating point
        space = x.__array_namespace__()
        real = xp.isdtype(x.dtype, ("real floating", "complex floating"))
        size = xp.abs(in_rows(x, x.values)) if real else xp.astype(x.values, out)

        def over(reduce: str, values: Any) -> Any:
            return getattr(space, reduce)(x.with_values(values), axis=axes, keepdims=keepdims)

        if ord in (float("inf"), -float("inf")):
            found = over("max" if ord > 0 else "min", size)
            return xp.maximum(found, xp.zeros_like(found))  # the greatest of nothing is 0 here
        if ord == 0:
            return xp.astype(over("count_nonzero", size), out)
        wide = xp.astype(size, accumulator(xp, size.dtype), copy=False)
        total = over("sum", wide * wide if ord == 2 else wide**ord)
        return xp.astype(root(xp, total, ord) if ord > 0 else total ** (1 / ord), out, copy=False)

    return unless_ragged(f, ragged)


def matrices(f: Function, name: str, lib: Backend) -> Function:
    """Functions of matrices, one for each token: the last two axes must be element axes."""

    def ragged(x: Array, /, *args: Any, **kwargs: Any) -> Any:
        if x.ragged_dim > x.values.ndim - 3:
            raise ValueError(
                f"x: expected a matrix for each token, (n, None, ..., k, m), got {x.shape}"
            )
        if any(isinstance(a, Array) for a in args):
            shared_layout(name, [x, *(a for a in args if isinstance(a, Array))])
        out = f(x.values, *map(values_of, args), **kwargs)
        if not isinstance(out, tuple):
            return x.with_values(out)
        return getattr(type(out), "_make", type(out))(tuple(map(x.with_values, out)))

    return unless_ragged(f, ragged)
