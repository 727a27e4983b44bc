"""Reductions, scans and argmax within each row, by tiles.

Every row is cut into tiles of at most 32 tokens, tiles are reduced, and the tiles of a row form a
row again until one tile is left. Rows are not padded to the longest one, there is no Python loop
over rows, and no difference of running totals. The summation is a tree, so the error grows with the
logarithm of the length. The number of steps has a static bound.

A row fills its last tile with identities. Short rows get small tiles, so that all tiles together
have at most three times as many slots as there are tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..array import Array
from ..backends import backend
from ..dispatch.operation import define_operation
from ..dtypes import accumulation_dtype, is_nonzero, real_dtype
from ..layout import Layout, Tiles
from ..records import record
from .row_chunks import map_rows

TILE = 32
MAX_SEQUENTIAL = 4096  # longest row whose sum may be computed one number after the other

#: Reduction -> its value over no elements, where that does not depend on the dtype.
IDENTITIES = {"sum": 0, "mean": float("nan"), "prod": 1, "any": False, "all": True}
SCANS = {"sum": "cumulative_sum", "prod": "cumulative_prod"}


@record
class SegmentCall:
    """A reduction, a scan, or the position of an extremum, within the rows of dense values.

    Attributes
    ----------
    op
        Reduction: sum, prod, max, min, any, all, mean. Scan: sum, prod. Position: max, min.
    values
        (total, ...) dense array.
    layout
        The rows.
    dtype
        The dtype of the result; for positions the dtype of the values. A reduction may also return
        `accumulation_dtype`.
    """

    op: str
    values: Any
    layout: Layout
    dtype: Any

    @property
    def accumulation_dtype(self) -> Any:
        """The dtype to accumulate in: float32 for half precision."""
        return accumulation_dtype(self.layout.xp, self.dtype)

    @property
    def converted(self) -> Any:
        """The values in the dtype to accumulate in."""
        xp = self.layout.xp
        dtype = accumulation_dtype(xp, self.dtype)
        return self.values if self.values.dtype == dtype else xp.astype(self.values, dtype)


def identity(xp: Any, op: str, dtype: Any) -> Any:
    """Return the reduction of no elements as a Python scalar, for instance -inf for max."""
    if op in IDENTITIES:
        return IDENTITIES[op]
    lowest = op == "max"
    if xp.isdtype(dtype, "real floating"):
        return -float("inf") if lowest else float("inf")
    if xp.isdtype(dtype, "bool"):
        return not lowest
    info = xp.iinfo(dtype)
    return int(info.min if lowest else info.max)


def segment_reduce(
    op: str, values: Any, layout: Layout, kernel: str | None = None, dtype: Any = None
) -> Any:
    """Reduce each row of `values` (total, ...) to one entry.

    (n, ...), in their dtype unless one is given.
    """
    dtype = values.dtype if dtype is None else dtype
    # A kernel for sums serves means too.
    operation = _segment_mean if op == "mean" else _segment_reduce
    out = operation.run({"layout": layout, "values": values}, {"op": op, "dtype": dtype}, kernel)
    return out if out.dtype == dtype else layout.xp.astype(out, dtype)


@define_operation("segment_reduce", SegmentCall)
def _segment_reduce(call: SegmentCall) -> Any:
    layout, xp = call.layout, call.layout.xp
    if call.op in ("any", "all") and not xp.isdtype(call.values.dtype, "bool"):
        # A kernel that rejects numbers may take booleans.
        return segment_reduce(call.op, is_nonzero(xp, call.values), layout, dtype=call.dtype)
    if layout.num_rows == 0 or 0 in call.values.shape:
        empty = _empty(call, call.accumulation_dtype)
        if xp.isdtype(call.values.dtype, "real floating"):
            # The sum of no tokens is 0, and belongs to the graph of a library that records one.
            empty = empty + xp.astype(xp.sum(call.values[:0, ...], axis=0), empty.dtype, copy=False)
        return xp.broadcast_to(empty, (layout.num_rows, *call.values.shape[1:]))
    return map_rows(partial(_reduce_tiles, call), Array.from_layout(call.values, layout))


def _empty(call: SegmentCall, dtype: Any) -> Any:
    xp = call.layout.xp
    fill_value = identity(xp, call.op, dtype)
    return xp.full((), fill_value, dtype=dtype, device=call.layout.device)


def _reduce_tiles(call: SegmentCall, x: Array) -> Any:
    layout, xp, dtype = x.layout, x.layout.xp, call.accumulation_dtype
    values = x.values if x.values.dtype == dtype else xp.astype(x.values, dtype)
    empty = _empty(call, dtype)
    options = {"dtype": dtype} if call.op in SCANS else {}
    reduce = partial(getattr(xp, call.op), axis=1, **options)
    reduced = _reduce_nonempty_rows(reduce, values, layout, empty)
    return xp.where(append_axes(xp, layout.nonempty, reduced.ndim), reduced, empty)


def _reduce_nonempty_rows(
    reduce: Callable[[Any], Any], values: Any, layout: Layout, empty: Any
) -> Any:
    """Return (n, ...) the reduction of each row; any number for an empty row."""
    xp, size = layout.xp, tile_size(layout)
    while layout.max_length_bound > 1:
        tiles = layout.tiles(size)
        values = reduce(gather_tiles(xp, values, tiles, empty))
        long_rows = find_long_rows(layout, tiles.layout, size)
        if long_rows is not None:
            firsts = xp.take(values, tiles.layout.clip(tiles.layout.offsets[:-1]), axis=0)
            values = xp.take(values, long_rows.tokens, axis=0)
            reduced = _reduce_nonempty_rows(reduce, values, long_rows.layout, empty)
            is_long = append_axes(xp, long_rows.is_long, firsts.ndim)
            return xp.where(is_long, xp.take(reduced, long_rows.slots, axis=0), firsts)
        layout = tiles.layout
        size = min(TILE, layout.max_length_bound)
    return xp.take(values, layout.clip(layout.offsets[:-1]), axis=0)


class LongRows(NamedTuple):
    """The rows of a layout with more than one token.

    Attributes
    ----------
    layout
        Their layout.
    tokens
        (total,) index of each of their tokens in the values of all rows.
    is_long
        (n,) whether a row is among them.
    slots
        (n,) index of each row among them; any valid index for the other rows.
    """

    layout: Layout
    tokens: Any
    is_long: Any
    slots: Any


def find_long_rows(layout: Layout, tiles: Layout, size: int) -> LongRows | None:
    """Return the rows of `tiles`, the tiles of `layout`, with more than one tile.

    With many short rows few rows go on to the next reduction. None if there are no such rows, if the
    tiles are not small because rows are short, or under a compiler.
    """
    if size >= min(TILE, layout.max_length_bound) or layout.backend.is_compiling():
        return None
    # A row with more than one tile has at least size + 1 tokens.
    most_rows = layout.total // (size + 1)
    most_tiles = 2 * layout.total // (size + 1)
    return layout.cached(("long rows", size), lambda: _long_rows(tiles, most_rows, most_tiles))


def _long_rows(layout: Layout, most_rows: int, most_tokens: int) -> LongRows | None:
    xp, n = layout.xp, min(layout.num_rows, most_rows)
    host = layout.host_offsets
    if n == 0:
        return None
    is_long = layout.lengths > 1
    if host is not None:
        lengths = np.diff(host)
        is_long_row = lengths > 1
        rows = np.flatnonzero(is_long_row)
        if rows.size == 0:
            return None
        new = Layout.from_host_lengths(layout.backend, lengths[rows], like=layout.offsets)
        slots = layout.to_index(np.maximum(np.cumsum(is_long_row) - 1, 0))
        starts = layout.to_index(host[rows])
    else:
        dtype = layout.offsets.dtype
        ranks = xp.cumulative_sum(xp.astype(is_long, dtype), dtype=dtype)
        index = layout.arange(n) + 1
        row = xp.searchsorted(ranks, index)
        row = xp.astype(
            xp.where(row < layout.num_rows, row, layout.num_rows - 1), dtype, copy=False
        )
        exists = index <= ranks[-1:]
        lengths = xp.where(exists, xp.take(layout.lengths, row, axis=0), 0)
        new = layout.with_lengths(lengths, most_tokens, layout.max_length_bound)
        slots = xp.where(ranks > 0, ranks - 1, 0)
        slots = xp.where(slots < n, slots, n - 1)
        starts = xp.take(layout.offsets, row, axis=0)
    tokens = layout.clip(new.per_token(starts) + new.positions)
    return LongRows(new, tokens, is_long, slots)


def tile_size(layout: Layout, largest: int = TILE) -> int:
    """Return a number of tokens per tile, at most `largest`, for which few slots are padding.

    It is at most twice the mean length of the rows, or 2. Under a compiler, which would specialize
    on the number of tokens, it is `largest`.
    """
    if layout.backend.is_compiling():
        return min(largest, layout.max_length_bound)
    return layout.cached(("tile size", largest), lambda: _tile_size(layout, largest))


def _tile_size(layout: Layout, largest: int) -> int:
    host, num_rows = layout.host_offsets, layout.num_rows
    if host is not None:
        num_rows = int(np.count_nonzero(host[1:] > host[:-1]))  # empty rows have no tiles
    twice_the_mean = 2 * layout.total // max(num_rows, 1)
    if twice_the_mean < largest:
        largest = max(2, 1 << max(twice_the_mean.bit_length() - 1, 0))
    return min(largest, layout.max_length_bound)


@define_operation("segment_mean", SegmentCall)
def _segment_mean(call: SegmentCall) -> Any:
    layout, xp = call.layout, call.layout.xp
    total = segment_reduce("sum", call.values, layout, dtype=call.accumulation_dtype)
    dtype, ndim = real_dtype(xp, total.dtype), total.ndim

    def divisors() -> tuple[Any, Any]:
        # 1 for an empty row, whose gradient would otherwise be NaN.
        count = xp.astype(xp.where(layout.nonempty, layout.lengths, 1), dtype)
        return append_axes(xp, layout.nonempty, ndim), append_axes(xp, count, ndim)

    nonempty, count = layout.cached(("divisors", dtype, ndim), divisors)
    return xp.where(nonempty, total / count, float("nan"))


def segment_arg(op: str, values: Any, layout: Layout) -> Any:
    """Return (n, ...) the position of the first "max" or "min" of each row of `values`.

    -1 in an empty row.

    NaN counts as the extremum.
    """
    return _segment_arg.run({"layout": layout, "values": values}, {"op": op, "dtype": values.dtype})


@define_operation("segment_arg", SegmentCall)
def _segment_arg(call: SegmentCall) -> Any:
    return map_rows(partial(_arg_of_rows, call.op), Array.from_layout(call.values, call.layout))


def _arg_of_rows(op: str, x: Array) -> Any:
    values, layout, xp = x.values, x.layout, x.layout.xp
    is_best = values == layout.per_token(segment_reduce(op, values, layout))
    if xp.isdtype(values.dtype, ("real floating", "complex floating")):
        is_best = is_best | xp.isnan(values)
    position = xp.where(is_best, append_axes(xp, layout.positions, values.ndim), layout.total)
    position = xp.astype(position, layout.offsets.dtype, copy=False)
    first = segment_reduce("min", position, layout)
    return xp.where(append_axes(xp, layout.nonempty, first.ndim), first, -1)


def segment_scan(op: str, values: Any, layout: Layout, dtype: Any = None) -> Any:
    """Return the running "sum" or "prod" within each row of `values` (total, ...).

    The dtype is the dtype of the values unless another one is given.
    """
    options = {"op": op, "dtype": values.dtype if dtype is None else dtype}
    return _segment_scan.run({"layout": layout, "values": values}, options)


@define_operation("segment_scan", SegmentCall)
def _segment_scan(call: SegmentCall) -> Any:
    x = Array.from_layout(call.values, call.layout)
    return map_rows(partial(_scan_rows, call), x, per_token=True)


def _scan_rows(call: SegmentCall, x: Array) -> Any:
    xp = x.layout.xp
    values = xp.astype(x.values, call.accumulation_dtype, copy=False)
    scanned = _scan_tiles(call.op, values, x.layout)
    return xp.astype(scanned, call.dtype, copy=False)


def _scan_tiles(op: str, values: Any, layout: Layout, size: int | None = None) -> Any:
    if layout.max_length_bound <= 1 or layout.num_rows == 0 or layout.total == 0:
        return values
    xp, size = layout.xp, tile_size(layout) if size is None else size
    tiles = layout.tiles(size)
    neutral = xp.full((), IDENTITIES[op], dtype=values.dtype, device=layout.device)
    inside = gather_tiles(xp, values, tiles, neutral)
    inside = getattr(xp, SCANS[op])(inside, axis=1, dtype=values.dtype)
    before = _scan_before_tiles(op, inside[:, -1, ...], layout, tiles, size, neutral)
    if before is not None:
        inside = inside + before if op == "sum" else inside * before
    flat = xp.reshape(inside, (inside.shape[0] * size, *values.shape[1:]))
    return xp.take(flat, layout.tile_slots(size), axis=0)


def _scan_before_tiles(
    op: str, totals: Any, layout: Layout, tiles: Tiles, size: int, neutral: Any
) -> Any:
    """Return (tiles, 1, ...) the sum or product of a row's tokens before each tile.

    `totals` are the sums or products of the tiles. The result is None if no row has two tiles.
    """
    if tiles.layout.max_length_bound <= 1:
        return None
    xp, is_later = layout.xp, append_axes(layout.xp, tiles.starts > 0, totals.ndim)
    long_rows = find_long_rows(layout, tiles.layout, size)
    if long_rows is not None:
        totals = xp.take(totals, long_rows.tokens, axis=0)
        inclusive = _scan_tiles(op, totals, long_rows.layout)
        first = xp.take(long_rows.layout.offsets, long_rows.slots, axis=0)
        earlier = xp.take(first, tiles.rows, axis=0) + tiles.layout.positions - 1
        exclusive = xp.take(inclusive, long_rows.layout.clip(earlier), axis=0)
    else:
        longest = tiles.layout.max_length_bound
        inclusive = _scan_tiles(op, totals, tiles.layout, min(TILE, longest))
        start = xp.broadcast_to(neutral, (1, *inclusive.shape[1:]))
        exclusive = xp.concat([start, inclusive[:-1, ...]], axis=0)
    return xp.where(is_later, exclusive, neutral)[:, None, ...]


def sort_by_id(xp: Any, ids: Any, size: int, device: Any) -> tuple[Any, Any]:
    """Return the stable order of the ids, and (size + 1,) where each id begins in it."""
    order = xp.argsort(ids, stable=True)
    bounds = xp.arange(size + 1, dtype=ids.dtype, device=device)
    return order, xp.searchsorted(xp.take(ids, order, axis=0), bounds)


def safe_divide(xp: Any, total: Any, count: Any) -> Any:
    """Return the quotient; NaN where the count is not positive, with a gradient of 0 there."""
    return _divide_where(xp, count > 0, total, count)


def divide_by_weight(xp: Any, total: Any, weight: Any) -> Any:
    """Return the quotient; NaN where the weight is 0, with a gradient of 0 there.

    In contrast to the count in `safe_divide`, the weight may be negative.
    """
    return _divide_where(xp, weight != 0, total, weight)


def _divide_where(xp: Any, condition: Any, total: Any, divisor: Any) -> Any:
    nan = xp.full((), float("nan"), dtype=total.dtype, device=backend(total).device(total))
    return xp.where(condition, total / xp.where(condition, divisor, xp.ones_like(divisor)), nan)


def safe_root(xp: Any, x: Any, degree: float = 2) -> Any:
    """Return the root of a sum of powers.

    Its gradient at 0 is 0, so a constant row has a finite gradient.
    """
    positive = xp.where(x > 0, x, xp.ones_like(x))
    root = xp.sqrt(positive) if degree == 2 else positive ** (1 / degree)
    return xp.where(x > 0, root, x)


def append_axes(xp: Any, x: Any, ndim: int) -> Any:
    """Return `x` with axes of size 1 appended until it has `ndim` axes."""
    return xp.reshape(x, (*x.shape, *(1,) * (ndim - x.ndim)))


def gather_tiles(xp: Any, values: Any, tiles: Tiles, fill_value: Any) -> Any:
    """Return the values by tile, (tiles, size, ...), with `fill_value` after the end of a row."""
    blocks = xp.take(values, xp.reshape(tiles.tokens, (-1,)), axis=0)
    blocks = xp.reshape(blocks, (*tiles.tokens.shape, *values.shape[1:]))
    return xp.where(append_axes(xp, tiles.valid, blocks.ndim), blocks, fill_value)
