"""Softmax, log-softmax and log-sum-exp within each row, along the ragged axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .. import checks
from ..array import Array
from ..broadcasting import accumulation_dtype, check_ragged, mask_tail, moveaxis
from ..dispatch.operation import define_operation
from .row_chunks import map_rows
from .segment import segment_reduce

__all__ = ["log_softmax", "logsumexp", "softmax"]


@dataclass(frozen=True, slots=True)
class SoftmaxCall:
    """A validated call of `softmax`, `log_softmax` or `logsumexp`.

    Attributes
    ----------
    x
        (n, None, ...) floating-point ragged array.
    """

    x: Array

    def __post_init__(self) -> None:
        checks.check_floating("x", check_ragged("x", self.x).values)


def softmax(x: Array, /, *, kernel: str | None = None) -> Array:
    """Compute the softmax along the ragged axis: the tokens of each row sum to 1.

    Parameters
    ----------
    x
        (n, None, ...) floating-point ragged array. Half precision is computed in float32.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    Array
        Like `x`.

    Raises
    ------
    TypeError
        If `x` is not a ragged array of floating-point numbers.
    ValueError
        If the required kernel does not take the call.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.softmax(scree.from_lengths(np.zeros(5), [4, 1])).values
    array([0.25, 0.25, 0.25, 0.25, 1.  ])
    """
    return _softmax.run({"x": x}, {}, kernel)  # type: ignore[no-any-return]


def log_softmax(x: Array, /, *, kernel: str | None = None) -> Array:
    """Compute the logarithm of `softmax` without taking the logarithm of small numbers.

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
    return _log_softmax.run({"x": x}, {}, kernel)  # type: ignore[no-any-return]


def logsumexp(x: Array, /, *, kernel: str | None = None) -> Any:
    """Compute the logarithm of the sum of exponentials of each row; -inf for an empty row.

    Parameters
    ----------
    x, kernel
        See `softmax`.

    Returns
    -------
    dense array
        (n, ...), with the dtype of `x`.

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
    return _logsumexp.run({"x": x}, {}, kernel)


def _exponentials(x: Array) -> tuple[Any, Any, Any, Any]:
    """Return the shifted values and their exponentials, and two reductions of rows.

    The reductions are the maximum of each row and its sum of exponentials.

    All are in the accumulation dtype, with the ragged axis first. The tail is 0.
    """
    xp, layout = x.layout.xp, x.layout
    values = xp.astype(x.values, accumulation_dtype(xp, x.dtype), copy=False)
    values = moveaxis(xp, values, x.ragged_dim, 0)
    maximum = segment_reduce("max", values, layout)
    # Rows that are empty or contain an infinity are not shifted.
    maximum = xp.where(xp.isfinite(maximum), maximum, xp.zeros_like(maximum))
    shifted = values - layout.per_token(maximum)
    shifted = mask_tail(Array.from_layout(shifted, layout), shifted)
    weights = xp.exp(shifted)
    return shifted, weights, maximum, segment_reduce("sum", weights, layout)


def _like(x: Array, values: Any) -> Any:
    """Return values, whose first axis is the ragged one, with the dtype and the axes of `x`."""
    xp = x.layout.xp
    return moveaxis(xp, xp.astype(values, x.dtype, copy=False), 0, x.ragged_dim)


@define_operation("softmax", SoftmaxCall)
def _softmax(call: SoftmaxCall) -> Array:
    return call.x.with_values(map_rows(_softmax_of_rows, call.x, per_token=True))


def _softmax_of_rows(x: Array) -> Any:
    _, weights, _, total = _exponentials(x)
    totals = x.layout.per_token(total)
    # The tail has the total of the last row, which may be 0 or NaN.
    totals = mask_tail(Array.from_layout(totals, x.layout), totals, 1)
    return _like(x, weights / totals)


@define_operation("log_softmax", SoftmaxCall)
def _log_softmax(call: SoftmaxCall) -> Array:
    return call.x.with_values(map_rows(_log_softmax_of_rows, call.x, per_token=True))


def _log_softmax_of_rows(x: Array) -> Any:
    shifted, _, _, total = _exponentials(x)
    xp, layout = x.layout.xp, x.layout
    log_total = xp.log(xp.where(total != 0, total, 1.0))
    return _like(x, shifted - layout.per_token(log_total))


@define_operation("logsumexp", SoftmaxCall)
def _logsumexp(call: SoftmaxCall) -> Any:
    return map_rows(_logsumexp_of_rows, call.x)


def _logsumexp_of_rows(x: Array) -> Any:
    _, _, maximum, total = _exponentials(x)
    xp = x.layout.xp
    nonzero = total != 0  # True for NaN, which must reach the result
    out = xp.where(nonzero, maximum + xp.log(xp.where(nonzero, total, 1.0)), -float("inf"))
    return xp.astype(out, x.dtype, copy=False)
