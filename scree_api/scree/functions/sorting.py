"""Sorting: along element axes, or within each row."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from .. import checks
from ..array import Array
from ..broadcasting import expand_to_tokens, moveaxis, normalize_axis
from ..indexing.getitem import select
from ..ops.row_chunks import map_rows
from ..ops.segment import append_axes, identity
from .binding import Standard, implements


@implements("sort", "argsort")
def sort(
    x: Array, /, *, axis: int = -1, descending: bool = False, stable: bool = True, std: Standard
) -> Array:
    """Return the sorted values or their order, along the ragged axis within each row."""
    axis = normalize_axis(std.name, axis, x.ndim)
    checks.check_real_dtype(std.name, std.xp, x.dtype)
    if axis != x.ragged_dim + 1 or 0 in (x.batch_size, x.total_length):
        options = {"descending": descending, "stable": stable}
        return x.with_values(std.function(x.values, axis=axis - 1, **options))
    sort_rows = _sorted_values if std.name == "sort" else _sorted_positions
    return x.with_values(map_rows(partial(sort_rows, std, descending), x, per_token=True))


def _sorted_values(std: Standard, descending: bool, x: Array) -> Any:
    if not x.layout.has_no_tail:
        return std.backend.take_along_axis(x.values, _order(std, x, descending), x.ragged_dim)
    ascending = x.with_values(_sort_buckets(std, x))
    if not descending:
        return ascending.values
    return select(ascending, x.layout, x.offsets[1:] - 1, -1).values


def _sorted_positions(std: Standard, descending: bool, x: Array) -> Any:
    if x.layout.has_no_tail and not descending:
        return _sort_buckets(std, x, stable=True)
    order = _order(std, x, descending)
    start = expand_to_tokens(x, x.layout.per_token(x.offsets[:-1]))
    return order - std.xp.astype(start, order.dtype, copy=False)


def _order(std: Standard, x: Array, descending: bool) -> Any:
    """Return the tokens of each row in sorted order, like the values.

    Sorted by value, then, stably, by row.
    """
    xp, layout = std.xp, x.layout
    values = moveaxis(xp, x.values, x.ragged_dim, 0)
    by_value = xp.argsort(values, axis=0, descending=descending, stable=True)
    row = xp.take(layout.segment_ids, xp.reshape(by_value, (-1,)), axis=0)
    by_row = xp.argsort(xp.reshape(row, by_value.shape), axis=0, stable=True)
    order = std.backend.take_along_axis(by_value, by_row, 0)
    return moveaxis(xp, order, 0, x.ragged_dim)


def _sort_buckets(std: Standard, x: Array, **options: Any) -> Any:
    """Return (total, ...) the ascending sort or argsort of each row.

    It is computed for rows of similar length together.

    The padding is NaN or the greatest integer, so it comes last or after elements equal to it.
    """
    xp, buckets = std.xp, x.layout.buckets()
    values = moveaxis(xp, x.values, x.ragged_dim, 0)
    is_floating = xp.isdtype(x.dtype, "real floating")
    last = float("nan") if is_floating else identity(xp, "min", x.dtype)
    last, parts = xp.full((), last, dtype=x.dtype, device=x.layout.device), []
    for tokens, mask in buckets.batches:
        block = xp.take(values, xp.reshape(tokens, (-1,)), axis=0)
        block = xp.reshape(block, (*tokens.shape, *values.shape[1:]))
        if mask is not None:
            block = xp.where(append_axes(xp, mask, block.ndim), block, last)
        block = std.function(block, axis=1, **options)
        parts.append(xp.reshape(block, (math.prod(tokens.shape), *values.shape[1:])))
    flat = parts[0] if len(parts) == 1 else xp.concat(parts, axis=0)
    return moveaxis(xp, xp.take(flat, buckets.slots, axis=0), 0, x.ragged_dim)
