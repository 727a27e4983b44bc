"""Searching and indexing: argmax, nonzero, searchsorted, take, take_along_axis."""

from __future__ import annotations

from typing import Any

from .. import checks
from ..array import Array
from ..broadcasting import (
    check_ragged_axis_first,
    check_shared_layout,
    mask_tail,
    moveaxis,
    normalize_axis,
)
from ..indexing.getitem import drop_tail, normalize_element_index, positions_to_tokens
from ..ops.segment import identity, segment_arg
from .binding import Standard, implements, library_dtype


@implements("take", ragged="either")
def take(x: Any, indices: Any, /, *, axis: int | None = None, std: Standard) -> Any:
    """Take rows of a dense table by ragged indices, as an embedding does.

    Of a ragged array, take rows, or entries of its element axes.
    """
    if not isinstance(x, Array):
        if indices.ndim != 2 or axis not in (None if x.ndim == 1 else 0, 0):
            raise ValueError(
                f"indices: expected (n, None) along axis 0, got {indices.shape} along {axis}"
            )
        return indices.with_values(std.function(x, _table_index(std, x, indices.values), axis=0))
    if isinstance(indices, Array):
        raise TypeError(
            "indices: expected a dense array for a ragged x; scree.gather takes tokens by ragged indices"
        )
    checks.check_integers("indices", indices, x.values)
    axis = normalize_axis(std.name, axis, x.ndim, allow_batch=True)
    if axis == 0:
        return x[indices]
    if axis == x.ragged_dim + 1:
        raise ValueError(
            "axis: take along the ragged axis has no common index; use arr[:, i] or scree.gather"
        )
    index = normalize_element_index(x, indices, axis - 1, int(x.values.shape[axis - 1]))
    return x.with_values(std.function(x.values, index, axis=axis - 1))


def _table_index(std: Standard, table: Any, indices: Any) -> Any:
    """Return the indices as integers >= 0 where reading them is free; check their bounds there."""
    indices, size = checks.check_integers("indices", indices, table), int(table.shape[0])
    host = std.backend.peek(indices)
    if host is None or not host.size:
        return indices
    checks.check_index_bounds("indices", host, size, ", the rows of x", from_end=True)
    return std.xp.where(indices < 0, indices + size, indices) if host.min() < 0 else indices


@implements("take_along_axis")
def take_along_axis(x: Array, indices: Any, /, *, axis: int = -1, std: Standard) -> Any:
    """Take entries of each row by ragged positions in the row.

    Along an element axis, take entries by an array like the values.
    """
    axis = normalize_axis(std.name, axis, x.ndim)
    if not isinstance(indices, Array):
        raise TypeError(
            "indices: expected a ragged array, got a dense one; rows of different lengths have no common index"
        )
    indices = indices.with_values(checks.check_integers("indices", indices.values, x.values))
    lib, dim = std.backend, x.ragged_dim
    if axis != dim + 1:
        check_shared_layout(std.name, (x, indices))
        return x.with_values(lib.take_along_axis(x.values, indices.values, axis - 1))
    if indices.batch_size != x.batch_size or indices.ndim != x.ndim or indices.ragged_dim != dim:
        raise ValueError(
            f"indices: expected the axes and the batch of {x.shape}, got {indices.shape}"
        )
    tokens = indices.values
    if 0 not in (x.total_length, indices.total_length):
        tokens = positions_to_tokens("indices", indices, x, tokens)
    return indices.with_values(lib.take_along_axis(x.values, tokens, dim))


@implements("arg", dtype_rule=library_dtype)
def arg(x: Array, /, *, axis: int | None = None, keepdims: bool = False, std: Standard) -> Any:
    """Return the position of the extremum; along the ragged axis in each row, -1 for an empty row.

    NaN is the extremum.
    """
    xp, dim = std.xp, x.ragged_dim
    checks.check_real_dtype(std.name, xp, x.dtype)
    if axis is None:
        return _arg_of_all(std, x, keepdims)
    axis = normalize_axis(std.name, axis, x.ndim)
    if axis != dim + 1:
        removed = axis - 1 < dim and not keepdims
        out = std.function(x.values, axis=axis - 1, keepdims=keepdims)
        return x.with_values(out, ragged_dim=dim - removed)
    first = segment_arg(std.name.removeprefix("arg"), moveaxis(xp, x.values, dim, 0), x.layout)
    first = xp.astype(first, std.result_dtype(x.dtype), copy=False)
    return xp.expand_dims(first, axis=axis) if keepdims else first


def _arg_of_all(std: Standard, x: Array, keepdims: bool) -> Any:
    xp, op = std.xp, std.name.removeprefix("arg")
    check_ragged_axis_first("x", x)
    if x.size:
        first = std.function(mask_tail(x, x.values, identity(xp, op, x.dtype)))
    else:
        first = std.function(xp.zeros((1,), dtype=x.dtype, device=x.layout.device)) - 1
    if x.layout.token_mask is not None:  # there may be no token but the tail
        first = xp.where(x.offsets[-1] > 0, first, -1)
    return xp.reshape(first, (1,) * x.ndim) if keepdims else first


@implements("nonzero")
def nonzero(x: Array, /, *, std: Standard) -> tuple[Any, ...]:
    """Return one dense index array per axis.

    The row, the position in the row, and the element axes.
    """
    check_ragged_axis_first("x", x)
    x, xp = drop_tail(x), std.xp
    tokens, *elements = std.function(x.values)
    pair = (xp.take(n, tokens, axis=0) for n in (x.layout.segment_ids, x.layout.positions))
    return *(xp.astype(n, tokens.dtype, copy=False) for n in pair), *elements


@implements("searchsorted", ragged="either")
def searchsorted(x1: Any, x2: Any, /, *, std: Standard, **options: Any) -> Any:
    """Return the indices at which ragged values are inserted into one sorted dense array."""
    if isinstance(x1, Array) or isinstance(options.get("sorter"), Array):
        raise TypeError(
            "searchsorted: expected a dense sorted x1; scree.unpack gives the rows one by one"
        )
    return x2.with_values(std.function(x1, x2.values, **options))
