"""Functions that look for, sort and pick tokens."""

from __future__ import annotations

import math
from typing import Any

from .. import checks
from ..array import Array
from ..backends import Backend
from ..broadcasting import (
    Function,
    axis_of,
    by_dtype,
    by_token,
    in_rows,
    like,
    moved,
    shared_layout,
    unless_either_ragged,
    unless_ragged,
    values_of,
)
from ..indexing.getitem import any_outside, entries, select, trimmed
from ..ops.segment import identity, segment_arg, spread


def take(f: Function, name: str, lib: Backend) -> Function:
    """A dense table by ragged indices (an embedding), rows of a ragged array, or entries of its element axes."""

    def ragged(x: Any, indices: Any, /, *, axis: int | None = None) -> Any:
        if not isinstance(x, Array):
            if indices.ndim != 2 or axis not in (None if x.ndim == 1 else 0, 0):
                raise ValueError(
                    f"indices: expected (n, None) along axis 0, got {indices.shape} along {axis}"
                )
            return indices.with_values(f(x, _in_table(lib, x, indices.values), axis=0))
        if isinstance(indices, Array):
            raise TypeError(
                "indices: expected a dense array for a ragged x; scree.gather takes tokens by ragged indices"
            )
        checks.integers("indices", indices, x.values)
        axis = axis_of(name, axis, x.ndim, batch=True)
        if axis == 0:
            return x[indices]
        if axis == x.ragged_dim + 1:
            raise ValueError(
                "axis: take along the ragged axis has no common index; use arr[:, i] or scree.gather"
            )
        return x.with_values(f(x.values, entries(x, indices, axis - 1), axis=axis - 1))

    return unless_either_ragged(f, ragged)


def _in_table(lib: Backend, table: Any, indices: Any) -> Any:
    """The indices, after a check of what can be seen of them for free."""
    indices, size = checks.integers("indices", indices, table), int(table.shape[0])
    seen = lib.peek(indices)
    if seen is None or not seen.size:
        return indices
    low, high = int(seen.min()), int(seen.max())
    if low < -size or high >= size:
        raise IndexError(
            f"indices: expected numbers in [-{size}, {size}), the rows of x, got {low} to {high}"
        )
    return lib.xp.where(indices < 0, indices + size, indices) if low < 0 else indices


def take_along_axis(f: Function, name: str, lib: Backend) -> Function:
    """Entries of each row by a ragged array of positions in the row, or of an element axis by an array like the values."""

    def ragged(x: Array, indices: Any, /, *, axis: int = -1) -> Array:
        axis = axis_of(name, axis, x.ndim)
        if not isinstance(indices, Array):
            raise TypeError(
                "indices: expected a ragged array, got a dense one; rows of different lengths have no common index"
            )
        indices = indices.with_values(checks.integers("indices", indices.values, x.values))
        if axis != x.ragged_dim + 1:
            return shared_layout(name, (x, indices)).with_values(
                lib.take_along_axis(x.values, indices.values, axis - 1)
            )
        return _by_position(lib, x, indices)

    return unless_ragged(f, ragged)


def _by_position(lib: Backend, x: Array, indices: Array) -> Array:
    xp, dim, rows = lib.xp, x.ragged_dim, indices.layout
    if indices.batch_size != x.batch_size or indices.ndim != x.ndim or indices.ragged_dim != dim:
        raise ValueError(
            f"indices: expected the axes and the batch of {x.shape}, got {indices.shape}"
        )
    if 0 in (x.total_length, indices.total_length):
        return indices.with_values(lib.take_along_axis(x.values, indices.values, dim))

    start, length = (
        by_token(indices, xp.take(n, rows.rows, axis=0)) for n in (x.offsets[:-1], x.layout.lengths)
    )
    index = xp.where(indices.values < 0, indices.values + length, indices.values)
    if any_outside(indices, index, length):
        raise IndexError(
            "indices: expected positions within the rows, got one that is outside of its row"
        )
    return indices.with_values(lib.take_along_axis(x.values, x.layout.clip(start + index), dim))


def arg(f: Function, name: str, lib: Backend) -> Function:
    """Argmax and argmin: along the ragged axis the position in each row, -1 for an empty one; NaN comes first."""
    xp, op = lib.xp, name.removeprefix("arg")
    result_dtype = by_dtype(lambda dtype, options: f(xp.ones((1,), dtype=dtype)).dtype)

    def whole(x: Array, keepdims: bool) -> Any:
        if x.ragged_dim:
            raise ValueError(
                f"x: expected the ragged axis in front for {name} of all, got shape {x.shape}; use xp.moveaxis"
            )
        values = x.values
        if x.layout.real is not None:  # tokens behind the last row are never ahead of those before
            values = in_rows(x, values, identity(xp, op, x.dtype))
        first = (
            f(values) if x.size else f(xp.zeros((1,), dtype=x.dtype, device=x.layout.device)) - 1
        )
        return xp.reshape(first, (1,) * x.ndim) if keepdims else first

    def ragged(x: Array, /, *, axis: int | None = None, keepdims: bool = False) -> Any:
        checks.real(name, xp, x.dtype)
        if axis is None:
            return whole(x, keepdims)
        axis = axis_of(name, axis, x.ndim)
        if axis != x.ragged_dim + 1:
            dim = x.ragged_dim - (axis - 1 < x.ragged_dim and not keepdims)
            return x.with_values(f(x.values, axis=axis - 1, keepdims=keepdims), ragged_dim=dim)
        values = moved(xp, x.values, x.ragged_dim, 0)
        first = xp.astype(segment_arg(op, values, x.layout), result_dtype(x.dtype, {}), copy=False)
        return xp.expand_dims(first, axis=axis) if keepdims else first

    return unless_ragged(f, ragged)


def _order(lib: Backend, x: Array, descending: bool) -> Any:
    """The tokens of each row in sorted order, like the values: sorted by value, and then, stably, by row."""
    xp = lib.xp
    values = moved(xp, x.values, x.ragged_dim, 0)
    by_value = xp.argsort(values, axis=0, descending=descending, stable=True)
    row = xp.reshape(
        xp.take(x.layout.segment_ids, xp.reshape(by_value, (-1,)), axis=0), by_value.shape
    )
    order = lib.take_along_axis(by_value, xp.argsort(row, axis=0, stable=True), 0)
    return moved(xp, order, 0, x.ragged_dim)


def _by_buckets(f: Function, lib: Backend, x: Array, **options: Any) -> Any:
    """(total, ...) the ascending sort or argsort of each row, of rows of similar length together.

    What fills them up is NaN, or the greatest integer: it comes last, or is equal to what it stands before.
    """
    xp, plan = lib.xp, x.layout.buckets()
    values = moved(xp, x.values, x.ragged_dim, 0)
    last = float("nan") if xp.isdtype(x.dtype, "real floating") else identity(xp, "min", x.dtype)
    last, parts = xp.full((), last, dtype=x.dtype, device=x.layout.device), []
    for tokens, real in plan.parts:
        block = xp.take(values, xp.reshape(tokens, (-1,)), axis=0)
        block = xp.reshape(block, (*tokens.shape, *values.shape[1:]))
        block = block if real is None else xp.where(spread(xp, real, block.ndim), block, last)
        parts.append(
            xp.reshape(f(block, axis=1, **options), (math.prod(tokens.shape), *values.shape[1:]))
        )
    out = xp.take(parts[0] if len(parts) == 1 else xp.concat(parts, axis=0), plan.slots, axis=0)
    return moved(xp, out, 0, x.ragged_dim)


def sort(f: Function, name: str, lib: Backend) -> Function:
    """Sorted, within rows along the ragged axis."""

    def rows(x: Array, descending: bool) -> Any:
        if not x.layout.full:
            return lib.take_along_axis(x.values, _order(lib, x, descending), x.ragged_dim)
        up = x.with_values(_by_buckets(f, lib, x))
        return select(up, up.layout, up.offsets[1:] - 1, -1).values if descending else up.values

    return _within_rows(f, name, rows)


def argsort(f: Function, name: str, lib: Backend) -> Function:
    """The order that sorts, within rows along the ragged axis: positions in the row."""

    def rows(x: Array, descending: bool) -> Any:
        if x.layout.full and not descending:
            return _by_buckets(f, lib, x, stable=True)
        order = _order(lib, x, descending)
        start = by_token(x, lib.xp.take(x.offsets[:-1], x.layout.rows, axis=0))
        return order - lib.xp.astype(start, order.dtype, copy=False)

    return _within_rows(f, name, rows)


def _within_rows(f: Function, name: str, rows: Function) -> Function:
    """A sort whose values along the ragged axis are ``rows(x, descending)``."""

    def ragged(
        x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True
    ) -> Array:
        axis = axis_of(name, axis, x.ndim)
        checks.real(name, x.layout.xp, x.dtype)
        if axis != x.ragged_dim + 1 or 0 in (x.batch_size, x.total_length):
            return x.with_values(f(x.values, axis=axis - 1, descending=descending, stable=stable))
        return x.with_values(rows(x, descending))

    return unless_ragged(f, ragged)


def nonzero(f: Function, name: str, lib: Backend) -> Function:
    """One dense index array for each axis: the row, the position in the row, and the element axes."""

    def ragged(x: Array, /) -> tuple[Any, ...]:
        if x.ragged_dim:
            raise ValueError(
                f"x: expected the ragged axis in front for nonzero, got shape {x.shape}; use xp.moveaxis"
            )
        x = trimmed(x)
        tokens, *elements = f(x.values)
        row, position = (
            lib.xp.take(n, tokens, axis=0) for n in (x.layout.segment_ids, x.layout.positions)
        )
        return tuple(lib.xp.astype(n, tokens.dtype, copy=False) for n in (row, position)) + tuple(
            elements
        )

    return unless_ragged(f, ragged)


def searchsorted(f: Function, name: str, lib: Backend) -> Function:
    """Where ragged values belong in one sorted dense array."""

    def ragged(x1: Any, x2: Any, /, **options: Any) -> Any:
        if isinstance(x1, Array) or isinstance(options.get("sorter"), Array):
            raise TypeError(
                "searchsorted: expected a dense sorted x1; scree.unpack gives the rows one by one"
            )
        return x2.with_values(f(x1, x2.values, **options))

    return unless_either_ragged(f, ragged)


def isin(f: Function, name: str, lib: Backend) -> Function:
    """Whether each element stands among some values."""

    def ragged(x1: Any, x2: Any, /, *, invert: bool = False) -> Any:
        values, real = values_of(x2), x2.layout.real if isinstance(x2, Array) else None
        if real is None or 0 in values.shape:
            return like(x1, f(values_of(x1), values, invert=invert))
        first = values[
            (slice(None),) * x2.ragged_dim + (slice(0, 1), ...)
        ]  # in a row, if any token is
        found = f(values_of(x1), lib.xp.where(by_token(x2, real), values, first)) & (
            x2.offsets[-1] > 0
        )
        return like(x1, lib.xp.logical_not(found) if invert else found)

    return unless_either_ragged(f, ragged)


def unique_values(f: Function, name: str, lib: Backend) -> Function:
    """The distinct values of all rows together, a dense array."""
    return unless_ragged(f, lambda x: f(trimmed(x).values))


unique_counts = unique_values


def unique_inverse(f: Function, name: str, lib: Backend) -> Function:
    """The distinct values of all rows, and where each element stands among them, a ragged array."""

    def ragged(x: Array, /) -> Any:
        x = trimmed(x)
        found = f(x.values)
        return found._replace(inverse_indices=x.with_values(found.inverse_indices))

    return unless_ragged(f, ragged)


unique_all = unique_inverse
