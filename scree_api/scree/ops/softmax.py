"""Softmax, log-softmax and log-sum-exp within each row, along the ragged axis or an element axis."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from functools import partial
from typing import Any

from .. import checks
from ..array import Array
from ..broadcasting import check_ragged, mask_tail, moveaxis, normalize_axis
from ..dispatch.operation import define_operation
from ..dtypes import accumulation_dtype
from ..records import record
from .row_chunks import map_rows
from .segment import segment_reduce

__all__ = ["log_softmax", "logsumexp", "softmax"]


@record
class SoftmaxCall:
    """A validated call of `softmax`, `log_softmax` or `logsumexp`.

    Attributes
    ----------
    x
        (n, None, ...) floating-point ragged array.
    axis
        See `softmax`.
    values_axis
        The same axis of the values; equal to `x.ragged_dim` for the ragged axis.
    """

    x: Array
    axis: int | None = None
    values_axis: int = field(init=False)

    def __post_init__(self) -> None:
        x = check_ragged("x", self.x)
        checks.check_floating("x", x.values)
        axis = x.ragged_dim
        if self.axis is not None:
            axis = normalize_axis("softmax", self.axis, x.ndim) - 1
        object.__setattr__(self, "values_axis", axis)

    @property
    def is_along_rows(self) -> bool:
        """Return whether the axis is the ragged axis."""
        return self.values_axis == self.x.ragged_dim


def softmax(x: Array, /, *, axis: int | None = None, kernel: str | None = None) -> Array:
    """Compute the softmax: by default the tokens of each row sum to 1.

    The maximum is subtracted first, so no exponential overflows.

    Parameters
    ----------
    x
        (n, None, ...) floating-point ragged array. Half precision is computed in float32.
    axis
        The axis whose entries sum to 1: the ragged axis (the default) or an element axis. Axis 0 is
        the batch.
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
        If `axis` is the batch or does not exist, or the required kernel does not take the call.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.softmax(scree.from_lengths(np.zeros(5), [4, 1])).values
    array([0.25, 0.25, 0.25, 0.25, 1.  ])
    >>> scree.softmax(scree.from_lengths(np.zeros((3, 2)), [2, 1]), axis=-1).values
    array([[0.5, 0.5],
           [0.5, 0.5],
           [0.5, 0.5]])
    """
    return _softmax.run({"x": x}, {"axis": axis}, kernel)


def log_softmax(x: Array, /, *, axis: int | None = None, kernel: str | None = None) -> Array:
    """Compute the logarithm of `softmax` without taking the logarithm of small numbers.

    Parameters
    ----------
    x, axis, kernel
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
    return _log_softmax.run({"x": x}, {"axis": axis}, kernel)


def logsumexp(x: Array, /, *, axis: int | None = None, kernel: str | None = None) -> Any:
    """Compute the logarithm of the sum of exponentials, by default of the tokens of each row.

    It is -inf for an empty row.

    Parameters
    ----------
    x, axis, kernel
        See `softmax`.

    Returns
    -------
    dense array or Array
        (n, ...), with the dtype of `x`. Along an element axis it is ragged, without that axis.

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
    return _logsumexp.run({"x": x}, {"axis": axis}, kernel)


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


def _exponentials_of_elements(x: Array, axis: int) -> tuple[Any, Any, Any, Any]:
    """Return the arrays of `_exponentials` along an element axis, which is kept with size 1."""
    xp = x.layout.xp
    values = xp.astype(mask_tail(x, x.values), accumulation_dtype(xp, x.dtype), copy=False)
    # Without elements there is no maximum. The sum has the shape of the result, and is 0.
    maximum = (xp.max if values.shape[axis] else xp.sum)(values, axis=axis, keepdims=True)
    maximum = xp.where(xp.isfinite(maximum), maximum, xp.zeros_like(maximum))
    shifted = values - maximum
    weights = xp.exp(shifted)
    return shifted, weights, maximum, xp.sum(weights, axis=axis, keepdims=True)


@define_operation("softmax", SoftmaxCall)
def _softmax(call: SoftmaxCall) -> Array:
    f = partial(_softmax_of_elements, axis=call.values_axis)
    return _map_tokens(_softmax_of_rows if call.is_along_rows else f, call.x)


def _map_tokens(f: Callable[[Array], Any], x: Array) -> Array:
    return x.with_values(map_rows(f, x, per_token=True))


def _softmax_of_rows(x: Array) -> Any:
    _, weights, _, total = _exponentials(x)
    totals = x.layout.per_token(total)
    # The tail has the total of the last row, which may be 0 or NaN.
    totals = mask_tail(Array.from_layout(totals, x.layout), totals, 1)
    return _like(x, weights / totals)


def _softmax_of_elements(x: Array, axis: int) -> Any:
    _, weights, _, total = _exponentials_of_elements(x, axis)
    return x.layout.xp.astype(weights / total, x.dtype, copy=False)


@define_operation("log_softmax", SoftmaxCall)
def _log_softmax(call: SoftmaxCall) -> Array:
    f = partial(_log_softmax_of_elements, axis=call.values_axis)
    return _map_tokens(_log_softmax_of_rows if call.is_along_rows else f, call.x)


def _log_softmax_of_rows(x: Array) -> Any:
    shifted, _, _, total = _exponentials(x)
    xp, layout = x.layout.xp, x.layout
    log_total = xp.log(xp.where(total != 0, total, 1.0))
    return _like(x, shifted - layout.per_token(log_total))


def _log_softmax_of_elements(x: Array, axis: int) -> Any:
    shifted, _, _, total = _exponentials_of_elements(x, axis)
    xp = x.layout.xp
    out = shifted - xp.log(xp.where(total != 0, total, 1.0))
    return xp.astype(out, x.dtype, copy=False)


@define_operation("logsumexp", SoftmaxCall)
def _logsumexp(call: SoftmaxCall) -> Any:
    x, axis = call.x, call.values_axis
    if call.is_along_rows:
        return map_rows(_logsumexp_of_rows, x)
    out = map_rows(partial(_logsumexp_of_elements, axis=axis), x, per_token=True)
    ragged_dim = x.ragged_dim - (axis < x.ragged_dim)
    return x.with_values(x.layout.xp.squeeze(out, axis=axis), ragged_dim=ragged_dim)


def _logsumexp_of_rows(x: Array) -> Any:
    _, _, maximum, total = _exponentials(x)
    return _log_of_total(x, maximum, total)


def _logsumexp_of_elements(x: Array, axis: int) -> Any:
    _, _, maximum, total = _exponentials_of_elements(x, axis)
    return _log_of_total(x, maximum, total)


def _log_of_total(x: Array, maximum: Any, total: Any) -> Any:
    xp = x.layout.xp
    nonzero = total != 0  # True for NaN, which must reach the result
    out = xp.where(nonzero, maximum + xp.log(xp.where(nonzero, total, 1.0)), -float("inf"))
    return xp.astype(out, x.dtype, copy=False)
