"""Reductions and running sums: along element axes, within rows, or over all tokens."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from .. import checks
from ..array import Array
from ..broadcasting import broadcast_operand, mask_tail, moveaxis, normalize_axes, normalize_axis
from ..dtypes import accumulation_dtype, is_nonzero, real_dtype
from ..layout import Layout
from ..ops.row_chunks import map_rows
from ..ops.segment import (
    IDENTITIES,
    SCANS,
    append_axes,
    identity,
    safe_divide,
    safe_root,
    segment_reduce,
    segment_scan,
)
from .binding import Standard, implements, library_dtype

AVERAGES = ("mean", "std", "var")  # an integer input gives a floating-point result
REAL_ONLY = ("max", "min", "std", "var")
#: The keyword of the standard besides `axis` and `keepdims`.
REDUCTION_KEYWORD = {"sum": "dtype", "prod": "dtype", "std": "correction", "var": "correction"}
SEGMENT_OPS = (*IDENTITIES, "max", "min")  # the reductions of `segment_reduce`


def _reduced_dtype(std: Standard, dtype: Any, *options: Any) -> Any:
    """Return the dtype of the library's own result, whose promotion we follow."""
    xp = std.xp
    if std.name in REAL_ONLY:
        checks.check_real_dtype(std.name, xp, dtype)
    if std.name in AVERAGES and not xp.isdtype(dtype, ("real floating", "complex floating")):
        return xp.__array_namespace_info__().default_dtypes()["real floating"]
    return library_dtype(std, dtype, *options)


@implements("reduction", dtype_rule=_reduced_dtype)
def reduction(
    x: Array, /, *, axis: Any = None, keepdims: bool = False, std: Standard, **options: Any
) -> Any:
    """Reduce over element axes, rows, or the whole batch.

    The result is a ragged array over element axes, (n, ...) over the ragged axis, and dense over
    the batch too.
    """
    values, ragged_axis, name = x.values, x.ragged_dim + 1, std.name
    axes = normalize_axes(name, axis, values.ndim + 1)
    if options:
        allowed = (REDUCTION_KEYWORD[name],) if name in REDUCTION_KEYWORD else ()
        checks.check_keywords(name, options, allowed)
        if "correction" in options:
            checks.check_number("correction", options["correction"])
    dtype = std.result_dtype(values.dtype, *options.items())
    if axes == (1,) and ragged_axis == 1 and not keepdims and name in SEGMENT_OPS:
        return segment_reduce(name, values, x.layout, dtype=dtype)
    if 0 in axes and ragged_axis not in axes:
        raise ValueError(
            f"axis: {name} over the batch alone would combine unrelated positions of rows of different lengths; use "
            "axis=(0, 1), or scree.to_padded(x) and its mask for columns"
        )
    if 0 in axes and not x.size:  # of no elements: the value of an empty row
        x, axes = _one_empty_row(x), axes[1:]
        out = _reduce_rows(std, x, axes, keepdims, dtype, options.get("correction", 0.0))
        return out if keepdims else out[0, ...]
    if 0 not in axes and ragged_axis in axes:
        return _reduce_rows(std, x, axes, keepdims, dtype, options.get("correction", 0.0))
    xp, inner = std.xp, tuple([a - 1 for a in axes if a])
    if options.get("dtype") is not None:
        options["dtype"] = accumulation_dtype(xp, dtype)
    values = xp.astype(values, _wide_dtype(std, x, dtype), copy=False)
    if 0 in axes:
        x = Array.from_layout(values, x.layout, x.ragged_dim)
        out = _reduce_all(std, x, inner, keepdims, options)
        out = xp.expand_dims(out, axis=0) if keepdims else out
        return xp.astype(out, dtype, copy=False)
    removed = 0 if keepdims else sum(a < x.ragged_dim for a in inner)
    out = std.function(values, axis=inner, keepdims=keepdims, **options)
    return x.with_values(xp.astype(out, dtype, copy=False), ragged_dim=x.ragged_dim - removed)


def _wide_dtype(std: Standard, x: Array, dtype: Any) -> Any:
    """Return the dtype to reduce in, where the result has `dtype`."""
    if std.name in AVERAGES:
        return accumulation_dtype(std.xp, dtype)
    return accumulation_dtype(std.xp, x.dtype) if std.name in SCANS else x.dtype


def _one_empty_row(x: Array) -> Array:
    xp, layout = x.layout.xp, x.layout
    offsets = xp.zeros((2,), dtype=x.offsets.dtype, device=layout.device)
    values = x.values[(slice(None),) * x.ragged_dim + (slice(0, 0), ...)]
    return Array.from_layout(values, Layout(layout.backend, offsets, 0, 0), x.ragged_dim)


def _reduce_all(
    std: Standard, x: Array, axes: tuple[int, ...], keepdims: bool, options: dict[str, Any]
) -> Any:
    """Reduce all tokens over axes of the values by the library's own function.

    The tail does not count.
    """
    xp, values, name = std.xp, x.values, std.name
    if x.layout.token_mask is None:
        return std.function(values, axis=axes, keepdims=keepdims, **options)
    if name not in AVERAGES:
        is_logical = name in ("any", "all", "count_nonzero")
        values = is_nonzero(xp, values) if is_logical else values
        fill = identity(xp, "any" if name == "count_nonzero" else name, values.dtype)
        fill = xp.full((), fill, dtype=values.dtype, device=x.layout.device)
        return std.function(mask_tail(x, values, fill), axis=axes, keepdims=keepdims, **options)
    per_token = math.prod([values.shape[a] for a in axes if a != x.ragged_dim])
    count = xp.astype(x.layout.offsets[-1], real_dtype(xp, values.dtype)) * per_token
    total = xp.sum(mask_tail(x, values), axis=axes, keepdims=keepdims or name != "mean")
    mean = safe_divide(xp, total, count)
    if name == "mean":
        return mean
    total = xp.sum(xp.square(mask_tail(x, values - mean)), axis=axes, keepdims=keepdims)
    variance = safe_divide(xp, total, count - options.get("correction", 0.0))
    return variance if name == "var" else safe_root(xp, variance)


def _reduce_rows(
    std: Standard, x: Array, axes: tuple[int, ...], keepdims: bool, dtype: Any, correction: float
) -> Any:
    """Reduce over the ragged axis and the element axes in `axes`: (n, ...) of `dtype`."""
    xp, name = std.xp, std.name
    if name == "count_nonzero":
        return _segment(xp, "sum", x.with_values(is_nonzero(xp, x.values)), axes, keepdims, dtype)
    if name not in ("var", "std"):
        return _segment(xp, name, x, axes, keepdims, dtype)
    return map_rows(partial(_variance_of_rows, std, axes, keepdims, dtype, correction), x)


def _variance_of_rows(
    std: Standard, axes: tuple[int, ...], keepdims: bool, dtype: Any, correction: float, x: Array
) -> Any:
    xp, name, wide = std.xp, std.name, accumulation_dtype(std.xp, dtype)
    x = x.with_values(xp.astype(x.values, wide, copy=False))
    mean = broadcast_operand(name, _segment(xp, "mean", x, axes, True, wide), x)
    squares = x.with_values(xp.square(mask_tail(x, x.values - mean)))
    total = _segment(xp, "sum", squares, axes, keepdims, wide)
    per_token = math.prod([x.values.shape[a - 1] for a in axes if a != x.ragged_dim + 1])
    count = xp.astype(x.lengths, real_dtype(xp, total.dtype)) * per_token
    variance = safe_divide(xp, total, append_axes(xp, count, total.ndim) - correction)
    return xp.astype(variance if name == "var" else safe_root(xp, variance), dtype, copy=False)


def _segment(xp: Any, op: str, x: Array, axes: tuple[int, ...], keepdims: bool, dtype: Any) -> Any:
    """Reduce element axes by the library, then rows by `segment_reduce`."""
    values = moveaxis(xp, x.values, x.ragged_dim, 0)
    inner = tuple([a - 1 if a - 1 > x.ragged_dim else a for a in axes if a != x.ragged_dim + 1])
    if inner and 0 in [values.shape[a] for a in inner]:  # of no elements: the value of an empty row
        shape = tuple([n for a, n in enumerate(values.shape) if a not in inner])
        values = xp.full(shape, identity(xp, op, dtype), dtype=dtype, device=x.layout.device)
    elif inner and op in (*SCANS, "mean"):
        wide = accumulation_dtype(xp, dtype)
        options = {"dtype": wide} if op in SCANS else {}
        values = getattr(xp, op)(xp.astype(values, wide, copy=False), axis=inner, **options)
    elif inner:
        values = getattr(xp, op)(values, axis=inner)
    out = segment_reduce(op, values, x.layout, dtype=dtype)
    if not keepdims:
        return out
    return xp.reshape(out, tuple(1 if a in axes else int(n or 0) for a, n in enumerate(x.shape)))


@implements("scan", dtype_rule=library_dtype)
def scan(
    x: Array,
    /,
    *,
    axis: int | None = None,
    dtype: Any = None,
    include_initial: bool = False,
    std: Standard,
) -> Array:
    """Compute running sums or products; along the ragged axis within each row."""
    xp, op, dim = std.xp, std.name.removeprefix("cumulative_"), x.ragged_dim
    axis = normalize_axis(std.name, axis, x.ndim)
    dtype = std.result_dtype(x.dtype, ("dtype", dtype))
    if axis != dim + 1:
        wide = accumulation_dtype(xp, dtype)
        values = xp.astype(x.values, wide, copy=False)
        values = std.function(values, axis=axis - 1, include_initial=include_initial, dtype=wide)
        return x.with_values(xp.astype(values, dtype, copy=False))
    values = segment_scan(op, moveaxis(xp, x.values, dim, 0), x.layout, dtype)
    layout = x.layout
    if include_initial:
        values, layout = _prepend_initial(xp, values, layout, op)
    return Array.from_layout(moveaxis(xp, values, 0, dim), layout, dim)


def _prepend_initial(xp: Any, values: Any, layout: Layout, op: str) -> tuple[Any, Layout]:
    """Prepend to each row the sum or product of no elements."""
    longest = None if layout.max_length is None else layout.max_length + 1
    total = layout.total + layout.num_rows
    offsets = layout.offsets_as_index(total) + layout.arange(layout.num_rows + 1)
    new = Layout(layout.backend, offsets, total, longest)
    shape, options = (1, *values.shape[1:]), {"dtype": values.dtype, "device": layout.device}
    initial = xp.full(shape, IDENTITIES[op], **options)
    # Index 0 is the initial value, index i + 1 is token i.
    tokens = xp.where(new.positions > 0, new.arange(new.total) - new.clipped_segment_ids, 0)
    return xp.take(xp.concat([initial, values], axis=0), tokens, axis=0), new
