"""Reductions and scans within each row, by tiles: no padding, no Python loop over rows, no differences of running totals.

Cut every row into tiles of 32 tokens, reduce inside the tiles, and repeat on the tiles until a row is one tile. The
summation is a tree, so the error grows with the logarithm of the length; the number of steps has a static bound.
"""

from dataclasses import dataclass
from typing import Any

from ..backends import backend
from ..broadcasting import accumulator, real_of, truth
from ..dispatch import call_cache
from ..dispatch.registry import declare
from ..layout import Layout, Tiles

TILE = 32
LONGEST = 4096  # tokens of the longest row whose sum may be left to a kernel that adds one number after the other

#: Reduction -> its value over no elements, where that does not depend on the dtype.
IDENTITIES = {"sum": 0, "mean": float("nan"), "prod": 1, "any": False, "all": True}
SCANS = {"sum": "cumulative_sum", "prod": "cumulative_prod"}


@dataclass(frozen=True, slots=True)
class SegmentCall:
    """What `segment_reduce`, `segment_mean`, `segment_arg` or `segment_scan` shall do with the rows of `values`, (total, ...).

    A reduction by `op` (sum, prod, max, min, any, all, mean) or a scan (sum, prod) gives `dtype`, and is done in `wide`, which is
    float32 where that is half precision; who runs a reduction may give that, too. For the place of an extremum (max, min) it is
    the dtype of the values. Of any and all it is that of booleans, and the values may be numbers.
    """

    op: str
    values: Any
    layout: Layout
    dtype: Any

    @property
    def wide(self) -> Any:
        """The dtype to add up in."""
        return accumulator(self.layout.xp, self.dtype)

    @property
    def converted(self) -> Any:
        """The values in `wide`."""
        return self.layout.xp.astype(self.values, self.wide, copy=False)


def identity(xp: Any, op: str, dtype: Any) -> Any:
    """What the reduction of an empty row gives, a Python scalar: -inf for max, or the least integer of the dtype."""
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
    """Reduce each row of `values` (total, ...), in their own dtype unless one is given, to one entry: (n, ...)."""
    dtype = values.dtype if dtype is None else dtype
    operation = (
        "segment_mean" if op == "mean" else "segment_reduce"
    )  # who adds up needs no kernel of its own for means
    out = call_cache.run(
        operation, {"layout": layout, "values": values}, {"op": op, "dtype": dtype}, kernel
    )
    return out if out.dtype == dtype else layout.xp.astype(out, dtype)


@declare("segment_reduce", SegmentCall)
def _reduce_tiles(call: SegmentCall) -> Any:
    layout, xp = call.layout, call.layout.xp
    known = truth(xp, call.values) if call.op in ("any", "all") else call.values
    if known is not call.values:
        return segment_reduce(
            call.op, known, layout, dtype=call.dtype
        )  # who takes no such numbers may take booleans
    values = call.converted
    empty = xp.full(
        (), identity(xp, call.op, values.dtype), dtype=values.dtype, device=layout.device
    )
    if layout.num_rows == 0 or layout.total == 0:
        return xp.broadcast_to(empty, (layout.num_rows, *values.shape[1:]))
    filled = layout.filled
    keep = {"dtype": values.dtype} if call.op in SCANS else {}
    while layout.bound > 1:
        tiles = layout.tiles(min(TILE, layout.bound))
        values, layout = (
            getattr(xp, call.op)(tiled(xp, values, tiles, empty), axis=1, **keep),
            tiles.layout,
        )
    firsts = xp.take(values, layout.clip(layout.offsets[:-1]), axis=0)
    return xp.where(spread(xp, filled, firsts.ndim), firsts, empty)


@declare("segment_mean", SegmentCall)
def _mean(call: SegmentCall) -> Any:
    rows, xp = call.layout, call.layout.xp
    total = segment_reduce("sum", call.values, rows, dtype=call.wide)
    real, ndim = real_of(xp, total.dtype), total.ndim

    def tokens() -> tuple[Any, Any]:  # 1 for an empty row, whose gradient would else be NaN
        count = xp.astype(xp.where(rows.filled, rows.lengths, 1), real)
        return spread(xp, rows.filled, ndim), spread(xp, count, ndim)

    filled, count = rows.once(("tokens", real, ndim), tokens)
    return xp.where(filled, total / count, float("nan"))


def segment_arg(op: str, values: Any, layout: Layout) -> Any:
    """Where in each row of `values` (total, ...) its first maximum or minimum ("max", "min") stands: (n, ...), -1 in an empty row.

    NaN counts as the extremum.
    """
    return call_cache.run(
        "segment_arg", {"layout": layout, "values": values}, {"op": op, "dtype": values.dtype}
    )


@declare("segment_arg", SegmentCall)
def _first_of_the_best(call: SegmentCall) -> Any:
    values, layout, xp = call.values, call.layout, call.layout.xp
    best = values == values
    if layout.num_rows:
        best = values == xp.take(segment_reduce(call.op, values, layout), layout.rows, axis=0)
    if xp.isdtype(values.dtype, ("real floating", "complex floating")):
        best = best | xp.isnan(values)
    position = xp.where(best, spread(xp, layout.positions, values.ndim), layout.total)
    first = segment_reduce("min", xp.astype(position, layout.offsets.dtype, copy=False), layout)
    return xp.where(spread(xp, layout.filled, first.ndim), first, -1)


def segment_scan(op: str, values: Any, layout: Layout, dtype: Any = None) -> Any:
    """The running sum or product ("sum", "prod") within each row of `values` (total, ...), in their dtype unless one is given."""
    options = {"op": op, "dtype": values.dtype if dtype is None else dtype}
    return call_cache.run("segment_scan", {"layout": layout, "values": values}, options)


@declare("segment_scan", SegmentCall)
def _scan(call: SegmentCall) -> Any:
    xp = call.layout.xp
    return xp.astype(_scan_tiles(call.op, call.converted, call.layout), call.dtype, copy=False)


def _scan_tiles(op: str, values: Any, layout: Layout) -> Any:
    if layout.bound <= 1 or layout.num_rows == 0 or layout.total == 0:
        return values
    xp, size = layout.xp, min(TILE, layout.bound)
    tiles = layout.tiles(size)
    neutral = xp.full((), IDENTITIES[op], dtype=values.dtype, device=layout.device)
    inside = getattr(xp, SCANS[op])(tiled(xp, values, tiles, neutral), axis=1, dtype=values.dtype)
    through = _scan_tiles(op, inside[:, -1, ...], tiles.layout)
    before = xp.concat(
        [xp.broadcast_to(neutral, (1, *through.shape[1:])), through[:-1, ...]], axis=0
    )
    before = xp.where(spread(xp, tiles.starts > 0, before.ndim), before, neutral)[:, None, ...]
    inside = inside + before if op == "sum" else inside * before
    return xp.take(
        xp.reshape(inside, (inside.shape[0] * size, *values.shape[1:])),
        layout.tile_slots(size),
        axis=0,
    )


def divide(xp: Any, total: Any, count: Any) -> Any:
    """The quotient, NaN where there is nothing to divide by, with a gradient of 0 there."""
    nan = xp.full((), float("nan"), dtype=total.dtype, device=backend(total).device(total))
    return xp.where(count > 0, total / xp.where(count > 0, count, xp.ones_like(count)), nan)


def root(xp: Any, x: Any, degree: float = 2) -> Any:
    """The root of sums of powers, whose gradient is finite at 0, so that what adds up to 0 (a constant row) has one of 0."""
    known = xp.where(x > 0, x, xp.ones_like(x))
    return xp.where(x > 0, xp.sqrt(known) if degree == 2 else known ** (1 / degree), x)


def spread(xp: Any, x: Any, ndim: int) -> Any:
    """`x` with axes of size 1 behind it, so that it has `ndim` axes."""
    return xp.reshape(x, (*x.shape, *(1,) * (ndim - x.ndim)))


def tiled(xp: Any, values: Any, tiles: Tiles, missing: Any) -> Any:
    """The values by tiles, (tiles, size, ...), `missing` where a tile is longer than its row."""
    blocks = xp.take(values, xp.reshape(tiles.tokens, (-1,)), axis=0)
    blocks = xp.reshape(blocks, (*tiles.tokens.shape, *values.shape[1:]))
    return xp.where(spread(xp, tiles.valid, blocks.ndim), blocks, missing)
