"""Reductions and scans of the Array API standard for ``mlx.core``.

They fill three gaps of MLX: sums over long axes keep their accuracy, half precision accumulates in
float32, and reductions over no elements return the identity of the operation.
"""

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
_PROMOTED = {
    mx.bool_: mx.int32,
    mx.int8: mx.int32,
    mx.int16: mx.int32,
    mx.uint8: mx.uint32,
    mx.uint16: mx.uint32,
}
# A float32 sum of more than _BLOCKWISE_THRESHOLD terms adds _BLOCK terms at a time.
_BLOCKWISE_THRESHOLD, _BLOCK = 1024, 32


def _to_accumulator(x: Array, dtype: Dtype | None) -> tuple[Array, Dtype]:
    """Return ``x`` in the accumulation dtype (float32 for half precision), and the output dtype."""
    out = _PROMOTED.get(x.dtype, x.dtype) if dtype is None else dtype
    return x.astype(mx.float32 if out in _HALF else out), out


def normalize_axes(x: Array, axis: Any) -> tuple[int, ...]:
    """Return the axes as non-negative integers; None means all axes."""
    axes = range(x.ndim) if axis is None else (axis,) if isinstance(axis, int) else axis
    if not builtins.all(-x.ndim <= a < x.ndim for a in axes):
        raise IndexError(f"axis {axis} is out of bounds for an array of {x.ndim} dimensions")
    return tuple(a + x.ndim if a < 0 else a for a in axes)


def _reduce(fn: Callable[..., Array], identity: Any, x: Array, axis: Any, keepdims: bool) -> Array:
    """Apply ``fn``; return ``identity`` if ``x`` is empty.

    MLX itself may return arbitrary values for an empty array, or not return at all.
    """
    if x.size:
        return fn(x, axis, keepdims)
    axes = normalize_axes(x, axis)
    out = mx.full([1 if a in axes else n for a, n in enumerate(x.shape)], identity, x.dtype)
    return out if keepdims else mx.squeeze(out, axes)


def _blockwise_sum(x: Array, axis: int) -> Array:
    """Sum along ``axis``, ``_BLOCK`` terms at a time; the axis stays with length 1."""
    n = x.shape[axis]
    if n <= _BLOCK:
        return mx.sum(x, axis, True)
    head, tail = mx.split(x, [n - n % _BLOCK], axis)
    parts = mx.sum(mx.unflatten(head, axis, (_BLOCK, -1)), axis)
    return _blockwise_sum(mx.concat([parts, tail], axis), axis)


def _accurate_sum(x: Array, axis: Any, keepdims: bool = False) -> Array:
    """Return ``mx.sum``, blockwise for many float32 terms: MLX itself may add them one by one."""
    axes = normalize_axes(x, axis)
    count = math.prod(x.shape[a] for a in axes)
    if x.dtype not in (mx.float32, mx.complex64) or count <= _BLOCKWISE_THRESHOLD:
        return _reduce(mx.sum, 0, x, axes, keepdims)
    out = functools.reduce(_blockwise_sum, axes, x)
    return out if keepdims else mx.squeeze(out, axes)


def sum(
    x: Array, /, *, axis: Any = None, dtype: Dtype | None = None, keepdims: bool = False
) -> Array:
    """Return the sum; accurate over long float axes, half precision accumulates in float32."""
    x, out = _to_accumulator(x, dtype)
    return _accurate_sum(x, axis, keepdims).astype(out)


def prod(
    x: Array, /, *, axis: Any = None, dtype: Dtype | None = None, keepdims: bool = False
) -> Array:
    """Return the product; half precision accumulates in float32."""
    x, out = _to_accumulator(x, dtype)
    return _reduce(mx.prod, 1, x, axis, keepdims).astype(out)


def mean(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """Return the mean; accurate over long float axes, integers give float32."""
    x, out = _to_accumulator(x, None if mx.issubdtype(x.dtype, mx.inexact) else mx.float32)
    count = math.prod(x.shape[a] for a in normalize_axes(x, axis))
    return (_accurate_sum(x, axis, keepdims) / count).astype(out)


def var(x: Array, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    """Return the variance in two passes; accurate over long float axes, integers give float32."""
    x, out = _to_accumulator(x, None if mx.issubdtype(x.dtype, mx.inexact) else mx.float32)
    n = math.prod(x.shape[a] for a in normalize_axes(x, axis))
    squares = _accurate_sum(mx.square(x - _accurate_sum(x, axis, True) / n), axis, keepdims)
    return (squares / max(n - correction, 0)).astype(out)


def std(x: Array, /, *, axis: Any = None, correction: float = 0.0, keepdims: bool = False) -> Array:
    """Return the square root of ``var``."""
    return mx.sqrt(var(x, axis=axis, correction=correction, keepdims=keepdims))


def all(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """Return whether all elements are true; True for no elements."""
    return _reduce(mx.all, True, x.astype(mx.bool_), axis, keepdims)


def any(x: Array, /, *, axis: Any = None, keepdims: bool = False) -> Array:
    """Return whether any element is true; False for no elements."""
    return _reduce(mx.any, False, x.astype(mx.bool_), axis, keepdims)


def _make_scan(fn: Callable[..., Array], identity: int) -> Callable[..., Array]:
    def scan(
        x: Array,
        /,
        *,
        axis: int | None = None,
        dtype: Dtype | None = None,
        include_initial: bool = False,
    ) -> Array:
        """Return the scan, with ``dtype`` promotion and ``include_initial``.

        float32 terms are added in order: cast to float64 if a long axis must stay accurate.
        """
        if axis is None and x.ndim != 1:
            raise ValueError("axis: expected an integer unless x has one dimension, got None")
        axis = -1 if axis is None else axis
        x, out = _to_accumulator(x, dtype)
        y = fn(x, axis).astype(out)
        if not include_initial:
            return y
        shape = list(x.shape)
        shape[axis] = 1
        return mx.concat([mx.full(shape, identity, out), y], axis)

    return scan


cumulative_sum, cumulative_prod = _make_scan(mx.cumsum, 0), _make_scan(mx.cumprod, 1)
