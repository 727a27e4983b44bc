"""Reductions, scans and argmax within each row, by tiles.

Every row is cut into tiles of 32 tokens, tiles are reduced, and the tiles of a row form a row again
until one tile is left. There is no padding, no Python loop over rows, and no difference of running
totals. The summation is a tree, so the error grows with the logarithm of the length. The number of
steps has a static bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..backends import backend
from ..broadcasting import accumulation_dtype, is_nonzero, real_dtype
from ..dispatch.operation import define_operation
from ..layout import Layout, Tiles

TILE = 32
MAX_SEQUENTIAL = 4096  # longest row whose sum may be computed one number after the other

#: Reduction -> its value over no elements, where that does not depend on the dtype.
IDENTITIES = {"sum": 0, "mean": float("nan"), "prod": 1, "any": False, "all": True}
SCANS = {"sum": "cumulative_sum", "prod": "cumulative_prod"}


@dataclass(frozen=True, slots=True)
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
    values = call.converted
    empty = identity(xp, call.op, values.dtype)
    empty = xp.full((), empty, dtype=values.dtype, device=layout.device)
    if layout.num_rows == 0 or 0 in values.shape:
        return xp.broadcast_to(empty, (layout.num_rows, *values.shape[1:]))
    nonempty, reduce = layout.nonempty, getattr(xp, call.op)
    options = {"dtype": values.dtype} if call.op in SCANS else {}
    while layout.max_length_bound > 1:
        tiles = layout.tiles(min(TILE, layout.max_length_bound))
        values = reduce(gather_tiles(xp, values, tiles, empty), axis=1, **options)
        layout = tiles.layout
    firsts = xp.take(values, layout.clip(layout.offsets[:-1]), axis=0)
    return xp.where(append_axes(xp, nonempty, firsts.ndim), firsts, empty)


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
    options = {"op": op, "dtype": values.dtype}
    return _segment_arg.run({"layout": layout, "values": values}, options)


@define_operation("segment_arg", SegmentCall)
def _segment_arg(call: SegmentCall) -> Any:
    values, layout, xp = call.values, call.layout, call.layout.xp
    is_best = values == values
    if layout.num_rows:
        is_best = values == layout.per_token(segment_reduce(call.op, values, layout))
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
    scanned = _scan_tiles(call.op, call.converted, call.layout)
    return call.layout.xp.astype(scanned, call.dtype, copy=False)


def _scan_tiles(op: str, values: Any, layout: Layout) -> Any:
    if layout.max_length_bound <= 1 or layout.num_rows == 0 or layout.total == 0:
        return values
    xp, size = layout.xp, min(TILE, layout.max_length_bound)
    tiles = layout.tiles(size)
    neutral = xp.full((), IDENTITIES[op], dtype=values.dtype, device=layout.device)
    blocks = gather_tiles(xp, values, tiles, neutral)
    inside = getattr(xp, SCANS[op])(blocks, axis=1, dtype=values.dtype)
    inclusive = _scan_tiles(op, inside[:, -1, ...], tiles.layout)
    start = xp.broadcast_to(neutral, (1, *inclusive.shape[1:]))
    exclusive = xp.concat([start, inclusive[:-1, ...]], axis=0)
    is_later = append_axes(xp, tiles.starts > 0, exclusive.ndim)
    carry = xp.where(is_later, exclusive, neutral)[:, None, ...]
    inside = inside + carry if op == "sum" else inside * carry
    flat = xp.reshape(inside, (inside.shape[0] * size, *values.shape[1:]))
    return xp.take(flat, layout.tile_slots(size), axis=0)


def sort_by_id(xp: Any, ids: Any, size: int, device: Any) -> tuple[Any, Any]:
    """Return the stable order of the ids, and (size + 1,) where each id begins in it."""
    order = xp.argsort(ids, stable=True)
    bounds = xp.arange(size + 1, dtype=ids.dtype, device=device)
    return order, xp.searchsorted(xp.take(ids, order, axis=0), bounds)


def safe_divide(xp: Any, total: Any, count: Any) -> Any:
    """Return the quotient; NaN where the count is 0, with a gradient of 0 there."""
    nan = xp.full((), float("nan"), dtype=total.dtype, device=backend(total).device(total))
    return xp.where(count > 0, total / xp.where(count > 0, count, xp.ones_like(count)), nan)


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
