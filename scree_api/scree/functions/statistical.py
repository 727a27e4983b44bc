"""Reductions and running sums: along element axes, within rows, or over everything."""

from __future__ import annotations

import math
from typing import Any

from ..array import Array
from ..backends import Backend
from ..broadcasting import (
    Function,
    accumulator,
    against,
    axes_of,
    axis_of,
    by_dtype,
    in_rows,
    moved,
    real_of,
    truth,
    unless_ragged,
)
from ..checks import number, real
from ..layout import Layout
from ..ops.segment import SCANS, divide, identity, root, segment_reduce, segment_scan, spread

#: Reductions that divide: an integer input gives a floating-point result.
AVERAGES = ("mean", "std", "var")
#: Those that the standard has for real numbers alone.
REAL = ("max", "min", "std", "var")


def reduction(f: Function, name: str, lib: Backend) -> Function:
    """Reductions: over element axes a ragged array again, over the ragged axis (n, ...), over the batch too a dense one."""
    xp = lib.xp

    @by_dtype
    def result_dtype(dtype: Any, options: dict[str, Any]) -> Any:
        """What the library makes of this dtype: its promotion is ours."""
        if name in REAL:
            real(name, xp, dtype)
        if name in AVERAGES and not xp.isdtype(dtype, ("real floating", "complex floating")):
            return xp.__array_namespace_info__().default_dtypes()["real floating"]
        return f(xp.ones((2,), dtype=dtype), **options).dtype

    def ragged(x: Array, /, *, axis: Any = None, keepdims: bool = False, **options: Any) -> Any:
        axes, along = axes_of(name, axis, x.ndim), x.ragged_dim + 1
        if "correction" in options:
            number("correction", options["correction"])
        if 0 in axes and along not in axes:
            raise ValueError(
                f"axis: {name} over the batch alone would add up unrelated positions of rows of different lengths; use "
                "axis=(0, 1), or scree.to_padded(x) and its mask for columns"
            )
        inner = tuple([a - 1 for a in axes if a])
        dtype = result_dtype(x.dtype, options)
        adds = name in AVERAGES or name in SCANS
        wide = accumulator(xp, dtype if name in AVERAGES else x.dtype) if adds else x.dtype
        if options.get("dtype") is not None:
            options["dtype"] = accumulator(xp, dtype)
        if along not in axes:
            gone = 0 if keepdims else sum(a < x.ragged_dim for a in inner)
            out = f(xp.astype(x.values, wide, copy=False), axis=inner, keepdims=keepdims, **options)
            return x.with_values(xp.astype(out, dtype, copy=False), ragged_dim=x.ragged_dim - gone)
        if 0 in axes and x.size:
            out = _everything(f, name, x, inner, keepdims, wide, options)
            out = xp.expand_dims(out, axis=0) if keepdims else out
            return xp.astype(out, dtype, copy=False)
        whole = 0 in axes  # of no elements: the value of an empty row
        if whole:
            nothing = Layout(
                lib, xp.zeros((2,), dtype=x.offsets.dtype, device=x.layout.device), 0, 0
            )
            values = x.values[(slice(None),) * x.ragged_dim + (slice(0, 0), ...)]
            x, axes = Array._of(values, nothing, x.ragged_dim), axes[1:]
        out = ROWS[name](xp, x, axes, keepdims, wide, dtype, options.get("correction", 0.0))
        out = out[0, ...] if whole and not keepdims else out
        return out if out.dtype == dtype else xp.astype(out, dtype)

    return unless_ragged(f, ragged)


def _everything(
    f: Function, name: str, x: Array, axes: tuple[int, ...], keepdims: bool, wide: Any, options: Any
) -> Any:
    """The reduction of all tokens over axes of the values, by the library's own `f`; tokens behind the last row do not count."""
    xp = x.layout.xp
    values = xp.astype(x.values, wide, copy=False)
    if x.layout.real is None:
        return f(values, axis=axes, keepdims=keepdims, **options)
    if name not in AVERAGES:
        values = truth(xp, values) if name in ("any", "all", "count_nonzero") else values
        least = identity(xp, "any" if name == "count_nonzero" else name, values.dtype)
        nothing = xp.full((), least, dtype=values.dtype, device=x.layout.device)
        return f(in_rows(x, values, nothing), axis=axes, keepdims=keepdims, **options)
    count = xp.astype(x.layout.offsets[-1], real_of(xp, wide)) * math.prod(
        [values.shape[a] for a in axes if a != x.ragged_dim]
    )
    mean = divide(
        xp, xp.sum(in_rows(x, values), axis=axes, keepdims=keepdims or name != "mean"), count
    )
    if name == "mean":
        return mean
    total = xp.sum(xp.square(in_rows(x, values - mean)), axis=axes, keepdims=keepdims)
    variance = divide(xp, total, count - options.get("correction", 0.0))
    return variance if name == "var" else root(xp, variance)


def _monoid(op: str) -> Function:
    def rows(
        xp: Any,
        x: Array,
        axes: tuple[int, ...],
        keepdims: bool,
        wide: Any,
        dtype: Any,
        correction: Any,
    ) -> Any:
        return _reduce_rows(xp, op, x, axes, keepdims, xp.bool if op in ("any", "all") else dtype)

    return rows


def _reduce_rows(
    xp: Any, op: str, x: Array, axes: tuple[int, ...], keepdims: bool, dtype: Any
) -> Any:
    """(n, ...) reduction over the ragged axis and the element axes in `axes`, of `dtype`."""
    values = moved(xp, x.values, x.ragged_dim, 0)
    inner = tuple([a - 1 if a - 1 > x.ragged_dim else a for a in axes if a != x.ragged_dim + 1])
    if inner and 0 in [values.shape[a] for a in inner]:  # of no elements: the value of an empty row
        shape = [n for a, n in enumerate(values.shape) if a not in inner]
        values = xp.full(tuple(shape), identity(xp, op, dtype), dtype=dtype, device=x.layout.device)
    elif inner and op in (*SCANS, "mean"):
        wide = accumulator(xp, dtype)
        options = {"dtype": wide} if op in SCANS else {}
        values = getattr(xp, op)(xp.astype(values, wide, copy=False), axis=inner, **options)
    elif inner:
        values = getattr(xp, op)(values, axis=inner)
    out = segment_reduce(op, values, x.layout, dtype=dtype)
    return xp.reshape(out, _kept(x, axes)) if keepdims else out


def _kept(x: Array, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if a in axes else int(n or 0) for a, n in enumerate(x.shape))


def _elements(x: Array, axes: tuple[int, ...]) -> int:
    """How many elements each token reduces over."""
    return math.prod([x.values.shape[a - 1] for a in axes if a != x.ragged_dim + 1])


def _variance(
    xp: Any, x: Array, axes: tuple[int, ...], keepdims: bool, wide: Any, dtype: Any, correction: Any
) -> Any:
    values = xp.astype(x.values, wide, copy=False)
    x = x.with_values(values)
    center = against("var", _reduce_rows(xp, "mean", x, axes, True, wide), x)
    total = _reduce_rows(
        xp, "sum", x.with_values(xp.square(in_rows(x, values - center))), axes, keepdims, wide
    )
    count = spread(
        xp, xp.astype(x.lengths, real_of(xp, total.dtype)) * _elements(x, axes), total.ndim
    )
    return divide(xp, total, count - correction)


def _deviation(xp: Any, *args: Any) -> Any:
    return root(xp, _variance(xp, *args))


def _count(
    xp: Any, x: Array, axes: tuple[int, ...], keepdims: bool, wide: Any, dtype: Any, correction: Any
) -> Any:
    return _reduce_rows(xp, "sum", x.with_values(truth(xp, x.values)), axes, keepdims, dtype)


ROWS: dict[str, Function] = {
    **{op: _monoid(op) for op in ("sum", "mean", "prod", "max", "min", "any", "all")},
    "var": _variance,
    "std": _deviation,
    "count_nonzero": _count,
}


def scan(f: Function, name: str, lib: Backend) -> Function:
    """Running sums and products: along the ragged axis within each row."""
    xp, op = lib.xp, name.removeprefix("cumulative_")
    result_dtype = by_dtype(
        lambda dtype, options: f(xp.ones((1,), dtype=dtype), axis=0, **options).dtype
    )

    def ragged(
        x: Array, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False
    ) -> Any:
        axis = axis_of(name, axis, x.ndim)
        out = result_dtype(x.dtype, {"dtype": dtype})
        if axis != x.ragged_dim + 1:
            wide = accumulator(xp, out)
            values = f(
                xp.astype(x.values, wide, copy=False),
                axis=axis - 1,
                include_initial=include_initial,
                dtype=wide,
            )
            return x.with_values(xp.astype(values, out, copy=False))
        values = moved(xp, x.values, x.ragged_dim, 0)
        values, rows = segment_scan(op, values, x.layout, out), x.layout
        if include_initial:
            values, rows = _with_initial(xp, values, rows, op)
        return Array._of(moved(xp, values, 0, x.ragged_dim), rows, x.ragged_dim)

    return unless_ragged(f, ragged)


def _with_initial(xp: Any, values: Any, old: Layout, op: str) -> tuple[Any, Layout]:
    """One token more at the head of each row: the sum or product of nothing."""
    longest, total = (
        None if old.max_length is None else old.max_length + 1,
        old.total + old.num_rows,
    )
    new = Layout(old.backend, old.counting(total) + old.arange(old.num_rows + 1), total, longest)
    neutral = xp.full(
        (1, *values.shape[1:]), 0 if op == "sum" else 1, dtype=values.dtype, device=old.device
    )
    tokens = xp.where(
        new.positions > 0, new.arange(new.total) - new.rows, 0
    )  # 0 is the neutral one, put in front
    return xp.take(xp.concat([neutral, values], axis=0), tokens, axis=0), new
