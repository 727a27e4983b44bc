"""One lifter a kind: from a library's function to one that also takes ragged arrays.

Axis 0 is the batch, axis k >= 1 of a ragged array is axis k - 1 of its values. Broadcasting is strictly right-aligned. Dense
arguments pass straight through to the library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from . import layout as rows_of
from .array import Array
from .backends import Backend, is_array
from .index import take_rows
from .layout import Layout
from .segments import segment_reduce, segment_scan, spread

Function = Callable[..., Any]


# ---------------------------------------------------------------------------------------------- broadcasting
def shared_layout(name: str, arrays: Iterable[Array]) -> Array:
    """The first of the arrays, after a check that all have its layout."""
    first, *others = arrays
    for other in others:
        if other.ragged_dim != first.ragged_dim or other.ndim != first.ndim:
            raise ValueError(
                f"{name}: expected ragged arrays with the same axes, got shapes {first.shape} and {other.shape}; add axes to "
                "the values of one (arr.with_values(arr.values[:, None]))"
            )
        same = rows_of.same(first.layout, other.layout)
        if same is None:
            raise ValueError(
                f"{name}: two layouts whose offsets are not read for free cannot be compared; make one from the other with "
                "with_values, or declare it with scree.align(a, like=b)"
            )
        if not same:
            raise ValueError(f"{name}: expected rows of equal lengths, got {_difference(first, other)}")
    return first


def _difference(a: Array, b: Array) -> str:
    if a.batch_size != b.batch_size:
        return f"{a.batch_size} and {b.batch_size} rows (shapes {a.shape} and {b.shape})"
    if a.layout.host is None or b.layout.host is None:
        return f"{a.total_length} and {b.total_length} tokens"
    x, y = np.diff(a.layout.host), np.diff(b.layout.host)
    i = int(np.flatnonzero(x != y)[0])
    return f"{x[i]} and {y[i]} tokens in row {i} (shapes {a.shape} and {b.shape})"


def against(name: str, x: Any, like: Array) -> Any:
    """The dense operand `x`, shaped so that it broadcasts against the values of the ragged array `like`."""
    if not is_array(x) or x.ndim == 0:
        return x
    shape, target = tuple(x.shape), like.shape
    pairs = zip(reversed(shape), reversed(target), strict=False)
    if len(shape) > len(target) or not all(a in (1, b) or b == 1 for a, b in pairs):
        new = ", None" * (like.ndim - 1)
        hint = f"; v[:{new}] has one entry a row" if shape == (like.batch_size,) else ""
        raise ValueError(f"{name}: shape {shape} does not broadcast, aligned right, against {target}{hint}")
    if len(shape) < len(target):
        return x
    xp, dim = like.layout.xp, like.ragged_dim
    if shape[0] == 1:
        return xp.squeeze(x, axis=0)
    if shape[0] != like.batch_size:  # a batch of one row does not stretch
        raise ValueError(f"{name}: shape {shape} does not broadcast against {target}: expected {like.batch_size} rows")
    per_row = xp.take(xp.squeeze(x, axis=dim + 1), like.layout.rows, axis=0)
    return xp.moveaxis(per_row, 0, dim) if dim else per_row


def elementwise(f: Function, name: str, lib: Backend) -> Function:
    """Functions of each element: the values by the library's function, dense operands broadcast."""

    def call(*args: Any, **kwargs: Any) -> Any:
        ragged = [x for x in args if isinstance(x, Array)]
        if kwargs:
            ragged += [x for x in kwargs.values() if isinstance(x, Array)]
        if not ragged:
            return f(*args, **kwargs)
        first = ragged[0] if len(ragged) == 1 else shared_layout(name, ragged)
        if len(args) == 1 and not kwargs:
            return first.with_values(f(first.values))

        def operand(x: Any) -> Any:
            return x.values if isinstance(x, Array) else against(name, x, first)

        return first.with_values(f(*map(operand, args), **{k: operand(x) for k, x in kwargs.items()}))

    return call


# ------------------------------------------------------------------------------------------------ reductions
def axes_of(name: str, axis: Any, ndim: int) -> tuple[int, ...]:
    """The axes as sorted numbers >= 0; all of them for None."""
    if axis is None:
        return tuple(range(ndim))
    given = axis if isinstance(axis, tuple) else (axis,)
    for a in given:
        if not isinstance(a, int) or not -ndim <= a < ndim:
            raise ValueError(f"axis: expected {name} along axes in [-{ndim}, {ndim}), got {axis}")
    axes = sorted(a % ndim for a in given)
    if len(set(axes)) < len(axes):
        raise ValueError(f"axis: expected every axis once, got {axis}")
    return tuple(axes)


#: Reductions of integers to the default floating-point dtype, whether or not the library has them for integers.
AVERAGES = ("mean", "std", "var")


def accumulator(xp: Any, dtype: Any) -> Any:
    """The dtype to add up in: float32 for half precision, else the dtype itself."""
    return xp.float32 if xp.isdtype(dtype, "real floating") and xp.finfo(dtype).bits < 32 else dtype


def reduction(f: Function, name: str, lib: Backend) -> Function:
    """Reductions: over element axes a ragged array again, over the ragged axis (n, ...), over the batch too a dense one."""
    xp = lib.xp
    results: dict[Any, Any] = {}

    def result_dtype(dtype: Any, options: dict[str, Any]) -> Any:
        """What the library makes of this dtype, asked once: its promotion is ours."""
        key = (dtype, *options.values())
        if key not in results:
            if name in AVERAGES and not xp.isdtype(dtype, ("real floating", "complex floating")):
                results[key] = xp.__array_namespace_info__().default_dtypes()["real floating"]
            else:
                results[key] = f(xp.ones((2,), dtype=dtype), **options).dtype
        return results[key]

    def call(x: Any, /, *args: Any, **kwargs: Any) -> Any:
        return reduce(x, *args, **kwargs) if isinstance(x, Array) else f(x, *args, **kwargs)

    def reduce(x: Array, /, *, axis: Any = None, keepdims: bool = False, **options: Any) -> Any:
        axes, ragged = axes_of(name, axis, x.ndim), x.ragged_dim + 1
        if 0 in axes and ragged not in axes:
            raise ValueError(
                f"axis: {name} over the batch alone would add up unrelated positions of rows of different lengths; use "
                "axis=(0, 1), or scree.to_padded(x) and its mask for columns"
            )
        inner = tuple(a - 1 for a in axes if a)
        dtype = result_dtype(x.dtype, options)
        wide = accumulator(xp, dtype if name in AVERAGES else x.dtype)
        if options.get("dtype") is not None:
            options["dtype"] = accumulator(xp, dtype)
        if ragged not in axes:
            gone = 0 if keepdims else sum(a < x.ragged_dim for a in inner)
            out = f(xp.astype(x.values, wide, copy=False), axis=inner, keepdims=keepdims, **options)
            return x.with_values(xp.astype(out, dtype, copy=False), ragged_dim=x.ragged_dim - gone)
        if 0 in axes and x.total_length:
            out = f(xp.astype(x.values, wide, copy=False), axis=inner, keepdims=keepdims, **options)
            out = xp.expand_dims(out, axis=0) if keepdims else out
            return xp.astype(out, dtype, copy=False)
        whole = 0 in axes  # of no tokens: the value of an empty row
        if whole:
            nothing = Layout.from_host(lib, np.zeros(1, np.int64), like=x.offsets)
            x, axes = Array._of(x.values, nothing, x.ragged_dim), axes[1:]
        out = ROWS[name](xp, x, axes, keepdims, wide, dtype, options.get("correction", 0.0))
        return xp.astype(out[0, ...] if whole and not keepdims else out, dtype, copy=False)

    return call


def _monoid(op: str) -> Function:
    def rows(xp: Any, x: Array, axes: tuple[int, ...], keepdims: bool, wide: Any, dtype: Any, correction: Any) -> Any:
        if op in ("any", "all"):
            wide = xp.bool
        elif op in ("sum", "prod") and accumulator(xp, dtype) == dtype:
            wide = dtype
        return _reduce_rows(xp, op, x, axes, keepdims, wide)

    return rows


def _reduce_rows(xp: Any, op: str, x: Array, axes: tuple[int, ...], keepdims: bool, dtype: Any) -> Any:
    """(n, ...) reduction over the ragged axis and the element axes in `axes`, in `dtype`."""
    values = xp.moveaxis(x.values, x.ragged_dim, 0) if x.ragged_dim else x.values
    values = xp.astype(values, dtype, copy=False)
    inner = tuple(a - 1 if a - 1 > x.ragged_dim else a for a in axes if a != x.ragged_dim + 1)
    if inner:
        options = {"dtype": dtype} if op in ("sum", "prod") else {}
        values = getattr(xp, op)(values, axis=inner, **options)
    out = segment_reduce(op, values, x.layout)
    return xp.reshape(out, _kept(x, axes)) if keepdims else out


def _kept(x: Array, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if a in axes else int(n or 0) for a, n in enumerate(x.shape))


def _counts(xp: Any, x: Array, axes: tuple[int, ...], like: Any, keepdims: bool) -> Any:
    """How many elements each row reduces over, with the dtype and axes of `like`."""
    each = 1
    for a in axes:
        each *= x.shape[a] if x.shape[a] is not None else 1  # type: ignore[operator]
    return spread(xp, xp.astype(x.lengths, like.dtype) * each, like.ndim)


def _mean(xp: Any, x: Array, axes: tuple[int, ...], keepdims: bool, wide: Any, dtype: Any, correction: Any) -> Any:
    total = _reduce_rows(xp, "sum", x, axes, keepdims, wide)
    return _divide(xp, total, _counts(xp, x, axes, total, keepdims))


def _divide(xp: Any, total: Any, count: Any) -> Any:
    """The quotient, NaN where there is nothing to divide by, with a gradient of 0 there."""
    nan = xp.full((), float("nan"), dtype=total.dtype, device=_device(total))
    return xp.where(count > 0, total / xp.where(count > 0, count, xp.ones_like(count)), nan)


def _variance(xp: Any, x: Array, axes: tuple[int, ...], keepdims: bool, wide: Any, dtype: Any, correction: Any) -> Any:
    values = xp.astype(x.values, wide, copy=False)
    x = x.with_values(values)
    centre = against("var", _mean(xp, x, axes, True, wide, dtype, 0), x)
    total = _reduce_rows(xp, "sum", x.with_values(xp.square(values - centre)), axes, keepdims, wide)
    return _divide(xp, total, _counts(xp, x, axes, total, keepdims) - correction)


def _deviation(xp: Any, *args: Any) -> Any:
    return xp.sqrt(_variance(xp, *args))


def _count(xp: Any, x: Array, axes: tuple[int, ...], keepdims: bool, wide: Any, dtype: Any, correction: Any) -> Any:
    return _reduce_rows(xp, "sum", x.with_values(x.values != 0), axes, keepdims, dtype)


def _device(x: Any) -> Any:
    from .backends import backend

    return backend(x).device(x)


ROWS: dict[str, Function] = {
    **{op: _monoid(op) for op in ("sum", "prod", "max", "min", "any", "all")},
    "mean": _mean,
    "var": _variance,
    "std": _deviation,
    "count_nonzero": _count,
}


def scan(f: Function, name: str, lib: Backend) -> Function:
    """Running sums and products: along the ragged axis within each row."""
    xp, op = lib.xp, name.removeprefix("cumulative_")

    def call(x: Any, /, *args: Any, **kwargs: Any) -> Any:
        return along(x, *args, **kwargs) if isinstance(x, Array) else f(x, *args, **kwargs)

    def along(x: Array, /, *, axis: int | None = None, dtype: Any = None, include_initial: bool = False) -> Any:
        if axis is None:
            raise ValueError(f"axis: expected the axis of {name} for a ragged array, got None")
        (axis,) = axes_of(name, axis, x.ndim)
        if axis == 0:
            raise ValueError(f"axis: {name} runs over rows or elements, not over the batch; got axis 0")
        out = f(xp.ones((1,), dtype=x.dtype), axis=0, dtype=dtype).dtype
        if axis != x.ragged_dim + 1:
            wide = accumulator(xp, out)
            values = f(xp.astype(x.values, wide, copy=False), axis=axis - 1, include_initial=include_initial, dtype=wide)
            return x.with_values(xp.astype(values, out, copy=False))
        values = xp.moveaxis(x.values, x.ragged_dim, 0) if x.ragged_dim else x.values
        values = segment_scan(op, xp.astype(values, accumulator(xp, out), copy=False), x.layout)
        rows = x.layout
        if include_initial:
            values, rows = _with_initial(xp, values, rows, op)
        values = xp.astype(values, out, copy=False)
        return Array._of(xp.moveaxis(values, 0, x.ragged_dim) if x.ragged_dim else values, rows, x.ragged_dim)

    return call


def _with_initial(xp: Any, values: Any, old: Layout, op: str) -> tuple[Any, Layout]:
    """One token more at the head of each row: the sum or product of nothing."""
    ones = old.arange(old.num_rows + 1)
    longest = None if old.max_length is None else old.max_length + 1
    new = Layout(old.backend, old.offsets + ones, old.total + old.num_rows, longest)
    neutral = xp.full((1, *values.shape[1:]), 0 if op == "sum" else 1, dtype=values.dtype, device=_device(values))
    tokens = xp.where(new.positions > 0, new.arange(new.total) - new.rows, 0)  # 0 is the neutral one, put in front
    return xp.take(xp.concat([neutral, values], axis=0), tokens, axis=0), new


# ---------------------------------------------------------------------------------------------- other kinds
def same_rows(f: Function, name: str, lib: Backend) -> Function:
    """Functions of one array that keep its shape: casts and arrays like another."""

    def call(x: Any, /, *args: Any, **kwargs: Any) -> Any:
        return x.with_values(f(x.values, *args, **kwargs)) if isinstance(x, Array) else f(x, *args, **kwargs)

    return call


def dtypes(f: Function, name: str, lib: Backend) -> Function:
    """Functions that look at dtypes alone."""

    def call(*args: Any) -> Any:
        return f(*(x.dtype if isinstance(x, Array) else x for x in args))

    return call


def matmul(f: Function, name: str, lib: Backend) -> Function:
    """Tokens times one matrix: (n, None, ..., k) @ (k, m)."""

    def call(a: Any, b: Any, /) -> Any:
        if not isinstance(a, Array) and not isinstance(b, Array):
            return f(a, b)
        if not isinstance(a, Array) or isinstance(b, Array) or b.ndim != 2 or a.ndim < 3 or a.ragged_dim == a.values.ndim - 1:
            raise TypeError(
                f"matmul: expected a ragged array (n, None, ..., k) and a dense matrix (k, m), got {a.shape} and {b.shape}; "
                "where the ragged axis itself is multiplied, use scree.to_padded"
            )
        return a.with_values(f(a.values, b))

    return call


def take(f: Function, name: str, lib: Backend) -> Function:
    """A dense table by ragged indices (an embedding), rows of a ragged array, or entries of its element axes."""

    def call(x: Any, indices: Any, /, *, axis: int | None = None) -> Any:
        if not isinstance(x, Array):
            if not isinstance(indices, Array):
                return f(x, indices, axis=axis) if axis is not None else f(x, indices)
            if indices.ndim != 2 or axis not in (None if x.ndim == 1 else 0, 0):
                raise ValueError(f"take: expected indices (n, None) along axis 0, got {indices.shape} along {axis}")
            return indices.with_values(f(x, indices.values, axis=0))
        if isinstance(indices, Array):
            raise TypeError("take: expected dense indices for a ragged array; scree.gather takes tokens by ragged indices")
        if axis is None:
            raise ValueError(f"axis: expected the axis of take for shape {x.shape}, got None")
        (axis,) = axes_of(name, axis, x.ndim)
        if axis == 0:
            return take_rows(x, lib.read(indices))
        if axis == x.ragged_dim + 1:
            raise ValueError("axis: take along the ragged axis has no common index; use arr[:, i] or scree.gather")
        return x.with_values(f(x.values, indices, axis=axis - 1))

    return call


def concat(f: Function, name: str, lib: Backend) -> Function:
    """Batches one after another (axis 0), rows joined pairwise (the ragged axis), or element axes side by side."""

    def call(arrays: Any, /, *, axis: int | None = 0) -> Any:
        arrays = list(arrays)
        if not any(isinstance(x, Array) for x in arrays):
            return f(arrays, axis=axis)
        if not all(isinstance(x, Array) for x in arrays):
            raise TypeError("arrays: expected ragged arrays only, got dense ones among them; make them ragged first")
        first = arrays[0]
        if axis is None:
            raise ValueError("axis: expected an axis for ragged arrays, got None")
        (axis,) = axes_of(name, axis, first.ndim)
        if any(x.ragged_dim != first.ragged_dim or x.ndim != first.ndim for x in arrays):
            raise ValueError(f"arrays: expected the same axes in all, got shapes {', '.join(str(x.shape) for x in arrays)}")
        dim = first.ragged_dim
        if axis not in (0, dim + 1):
            shared_layout(name, arrays)
            return first.with_values(f([x.values for x in arrays], axis=axis - 1))
        values = f([x.values for x in arrays], axis=dim)
        if axis == 0:
            return Array._of(values, _stacked([x.layout for x in arrays]), dim)
        rows, tokens = _joined([x.layout for x in arrays], lib.xp)
        return Array._of(lib.xp.take(values, tokens, axis=dim), rows, dim)

    return call


def _stacked(layouts: list[Layout]) -> Layout:
    """All rows of all layouts."""
    first, before, parts = layouts[0], 0, [layouts[0].offsets[:1]]
    for one in layouts:
        parts.append(one.offsets[1:] + before)
        before += one.total
    longest = [one.max_length for one in layouts]
    return Layout(
        first.backend, first.xp.concat(parts), before, None if None in longest else max(longest)  # type: ignore[type-var]
    )


def _joined(layouts: list[Layout], xp: Any) -> tuple[Layout, Any]:
    """Row i of each layout end to end, and where its tokens stand in the values put end to end."""
    first = layouts[0]
    if any(one.num_rows != first.num_rows for one in layouts):
        raise ValueError(f"arrays: expected the same number of rows, got {', '.join(str(x.num_rows) for x in layouts)}")
    longest = [one.max_length for one in layouts]
    offsets = sum((one.offsets for one in layouts[1:]), start=first.offsets)
    total = sum(one.total for one in layouts)
    new = Layout(first.backend, offsets, total, None if None in longest else sum(longest))  # type: ignore[arg-type]
    tokens, position, base = None, new.positions, 0
    for one in layouts:
        here = base + xp.take(one.offsets[:-1], new.rows, axis=0) + position
        tokens = here if tokens is None else xp.where(position >= 0, here, tokens)
        position, base = position - xp.take(one.lengths, new.rows, axis=0), base + one.total
    return new, tokens


def stack(f: Function, name: str, lib: Backend) -> Function:
    """Ragged arrays of one layout along a new element axis."""

    def call(arrays: Any, /, *, axis: int = 0) -> Any:
        arrays = list(arrays)
        if not any(isinstance(x, Array) for x in arrays):
            return f(arrays, axis=axis)
        if not all(isinstance(x, Array) for x in arrays):
            raise TypeError("arrays: expected ragged arrays only, got dense ones among them")
        first = shared_layout(name, arrays)
        (axis,) = axes_of(name, axis, first.ndim + 1)
        if axis == 0:
            raise ValueError("axis: the batch is axis 0 of a ragged array; use concat, or stack along another axis")
        out = f([x.values for x in arrays], axis=axis - 1)
        return first.with_values(out, ragged_dim=first.ragged_dim + (axis - 1 <= first.ragged_dim))

    return call


def unsupported(f: Function, name: str, why: str) -> Function:
    """Functions that ragged arrays do not have: a clear refusal, and the library's own for dense arrays."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(x, Array) for x in (*args, *kwargs.values())):
            raise TypeError(f"{name} does not take ragged arrays: {why}")
        return f(*args, **kwargs)

    return call


LIFTERS: dict[str, Callable[[Function, str, Backend], Function]] = {
    "elementwise": elementwise, "reduction": reduction, "scan": scan, "same_rows": same_rows, "dtypes": dtypes,
    "matmul": matmul, "take": take, "concat": concat, "stack": stack,
}  # fmt: skip
