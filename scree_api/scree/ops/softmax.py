"""Softmax, its logarithm and log-sum-exp within each row, along the ragged axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..array import Array
from ..broadcasting import accumulator, against, in_rows, moved, ragged
from ..checks import floating
from ..dispatch import call_cache
from ..dispatch.registry import declare
from .segment import segment_reduce


@dataclass(frozen=True, slots=True)
class SoftmaxCall:
    """Softmax of `x`, floating-point (n, None, ...), along its ragged axis."""

    x: Array

    def __post_init__(self) -> None:
        floating("x", ragged("x", self.x).values)


def softmax(x: Array, /, *, kernel: str | None = None) -> Array:
    """Softmax along the ragged axis: the tokens of each row add up to 1.

    Parameters
    ----------
    x
        (n, None, ...) floating-point ragged array. Half precision is computed in float32.
    kernel
        The provider that must run it; by default the first that accepts.

    Returns
    -------
    Array
        Like `x`.

    Raises
    ------
    TypeError
        If `x` is no ragged array, or holds no floating-point numbers.
    ValueError
        If the kernel that is asked for does not take the call.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.softmax(scree.from_lengths(np.zeros(5), [4, 1])).values
    array([0.25, 0.25, 0.25, 0.25, 1.  ])
    """
    return call_cache.run("softmax", {"x": x}, {}, kernel)  # type: ignore[no-any-return]


def log_softmax(x: Array, /, *, kernel: str | None = None) -> Array:
    """The logarithm of `softmax`, computed without taking it of small numbers.

    Parameters
    ----------
    x, kernel
        See `softmax`.

    Returns
    -------
    Array
        Like `x`.

    Raises
    ------
    TypeError, ValueError
        See `softmax`.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.log_softmax(scree.from_lengths(np.asarray([0.0, 1000.0]), [2])).values
    array([-1000.,     0.])
    """
    return call_cache.run("log_softmax", {"x": x}, {}, kernel)  # type: ignore[no-any-return]


def logsumexp(x: Array, /, *, kernel: str | None = None) -> Any:
    """(n, ...) the logarithm of the sum of exponentials of each row; -inf for an empty row.

    Parameters
    ----------
    x, kernel
        See `softmax`.

    Returns
    -------
    dense array
        (n, ...), of the dtype of `x`.

    Raises
    ------
    TypeError, ValueError
        See `softmax`.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.logsumexp(scree.from_lengths(np.full(2, 1000.0), [2, 0]))
    array([1000.69314718,          -inf])
    """
    return call_cache.run("logsumexp", {"x": x}, {}, kernel)


def _parts(x: Array) -> tuple[Any, Array, Any, Any, Any]:
    """In the accumulating dtype: xp, the shifted rows, their exponentials, the row maxima and the sums, (n, ...)."""
    xp = x.layout.xp
    values = xp.astype(x.values, accumulator(xp, x.dtype), copy=False)
    values = moved(xp, values, x.ragged_dim, 0)
    top = segment_reduce("max", values, x.layout)
    top = xp.where(
        xp.isfinite(top), top, xp.zeros_like(top)
    )  # rows that are empty or hold an infinity
    shifted = x.with_values(values, ragged_dim=0)
    shifted = shifted.with_values(in_rows(shifted, values - _per_token(xp, top, shifted)))
    weights = xp.exp(shifted.values)
    return xp, shifted, weights, top, segment_reduce("sum", weights, x.layout)


def _per_token(xp: Any, per_row: Any, x: Array) -> Any:
    return against("softmax", xp.expand_dims(per_row, axis=1), x)


def _finish(xp: Any, values: Any, x: Array) -> Array:
    values = xp.astype(values, x.dtype, copy=False)
    return x.with_values(moved(xp, values, 0, x.ragged_dim))


@declare("softmax", SoftmaxCall)
def _softmax(call: SoftmaxCall) -> Array:
    xp, shifted, weights, _, total = _parts(call.x)
    return _finish(xp, weights / _per_token(xp, total, shifted), call.x)


@declare("log_softmax", SoftmaxCall)
def _log_softmax(call: SoftmaxCall) -> Array:
    xp, shifted, _, _, total = _parts(call.x)
    return _finish(
        xp,
        shifted.values - _per_token(xp, xp.log(xp.where(total != 0, total, 1.0)), shifted),
        call.x,
    )


@declare("logsumexp", SoftmaxCall)
def _logsumexp(call: SoftmaxCall) -> Any:
    xp, _, _, top, total = _parts(call.x)
    some = total != 0  # a sum that is NaN must be seen
    found = xp.where(some, top + xp.log(xp.where(some, total, 1.0)), -float("inf"))
    return xp.astype(found, call.x.dtype, copy=False)
