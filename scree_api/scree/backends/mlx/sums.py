"""Reductions and scans of the standard over ``mlx.core``: exact along long axes, half precision in float32, values over nothing."""

from __future__ import annotations

import builtins
import functools
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import mlx.core as mx

Array: TypeAlias = mx.array
Dtype: TypeAlias = mx.Dtype

_HALF = (mx.float16, mx.bfloat16)
_LIFT = {
    mx.bool_: mx.int32,
    mx.int8: mx.int32,
    mx.int16: mx.int32,
    mx.uint8: mx.uint32,
    mx.uint16: mx.uint32,
}
_LONG, _FOLD = 1024, 32  # a sum of more than _LONG terms is folded, _FOLD terms at a time


def _accumulate(x: Array, dtype: Dtype | None) -> tuple[Array, Dtype]:
    """``x`` in the dtype to accumulate in (float32 for half precision), and the dtype of the result."""
    out = _LIFT.get(x.dtype, x.dtype) if dtype is None else dtype
    return x.astype(mx.float32 if out in _HALF else out), out


def axes_of(x: Array, axis: Any) -> tuple[int, ...]:
    """The axes as numbers >= 0; all of them for None."""
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    if not builtins.all(-x.ndim <= a < x.ndim for a in axes):
        raise IndexError(f"axis {axis} is out of bounds for an array of {x.ndim} dimensions")
    return tuple(a + x.ndim if a < 0 else a for a in axes)


def _reduce(fn: Callable[..., Array], first: Any, x: Array, axis: Any, keepdims: bool) -> Array:
    """``fn``; over nothing ``first``, where MLX itself may give anything or not return."""
    if x.size:
        return fn(x, axis, keepdims)
    axes = axes_of(x, axis)
    out = mx.full([1 if a in axes else n for a, n in enumerate(x.shape)], first, x.dtype)
    return out if keepdims else mx.squeeze(out, axes)


def _fold(x: Array, axis: int) -> Array:
    """Sum along ``axis``, kept as length 1, ``_FOLD`` terms at a time."""
    n = x.shape[axis]
    if n <= _FOLD:
        return mx.sum(x, axis, True)
    head, tail = mx.split(x, [n - n % _FOLD], axis)
    parts = mx.sum(mx.unflatten(head, axis, (_FOLD, -1)), axis)
    return _fold(mx.concat([parts, tail], axis), axis)


def _total(x: Array, axis: Any, keepdims: bool = False) -> Array:
    """``mx.sum``; over many float32 terms folded, where MLX by itself may add them one after the other."""
    axes = axes_of(x, axis)
    if x.dtype not in (mx.float32, mx.complex64) or math.prod(x.shape[a] for a in axes) <= _LONG:
        return _reduce(mx.sum, 0, x, axes, keepdims)
    out = functools.reduce(_fold, axes, x)
    return out if keepdims else mx.squeeze(out, axes)


def sum(
    x: Array, /, *, axis: Any = None, dtype: Dtype | None = None, keepdims: bool = False
) -> Array:
    """Accurate over long float axes; half precision accumulates in float32."""
    x, out = _accumulate(x, dtype)
    return _total(x, axis, keepdims).astype(out)


def prod(
    x: Array, /, *, axis: Any = None, dtype: Dtype | None = None, keepdims: bool = False
) -> Array:
    """Half precision accumulates in float32."""
    x, out = _accumulate(x, dtype)
    return _reduce(mx.prod, 1, x, axis, keepdims).astype(out)


def mean(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """Accurate over long float axes; integers give float32."""
    x, out = _accumulate(x, None if mx.issubdtype(x.dtype, mx.inexact) else mx.float32)
    return (_total(x, axis, keepdims) / math.prod(x.shape[a] for a in axes_of(x, axis))).astype(out)


def var(x: Array, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    """Two-pass, accurate over long float axes; integers give float32."""
    x, out = _accumulate(x, None if mx.issubdtype(x.dtype, mx.inexact) else mx.float32)
    n = math.prod(x.shape[a] for a in axes_of(x, axis))
    squares = _total(mx.square(x - _total(x, axis, True) / n), axis, keepdims)
    return (squares / max(n - correction, 0)).astype(out)


def std(x: Array, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    """Return the root of ``var``."""
    return mx.sqrt(var(x, axis=axis, correction=correction, keepdims=keepdims))


def all(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """True over nothing."""
    return _reduce(mx.all, True, x.astype(mx.bool_), axis, keepdims)


def any(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """False over nothing."""
    return _reduce(mx.any, False, x.astype(mx.bool_), axis, keepdims)


def _scan(fn: Callable[..., Array], first: int) -> Callable[..., Array]:
    def scan(
        x: Array,
        /,
        *,
        axis: int | None = None,
        dtype: Dtype | None = None,
        include_initial: bool = False,
    ) -> Array:
        """Add ``dtype`` promotion and ``include_initial``; sums float32 in order, so cast long axes to float64."""
        if axis is None and x.ndim != 1:
            raise ValueError("axis is needed unless x has one dimension")
        axis = -1 if axis is None else axis
        x, out = _accumulate(x, dtype)
        y = fn(x, axis).astype(out)
        if not include_initial:
            return y
        shape = list(x.shape)
        shape[axis] = 1
        return mx.concat([mx.full(shape, first, out), y], axis)

    return scan


cumulative_sum, cumulative_prod = _scan(mx.cumsum, 0), _scan(mx.cumprod, 1)
