"""Layer norm and RMS norm over the last axis, for ragged and dense arrays."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from .. import checks
from ..array import Array
from ..backends import backend
from ..broadcasting import (
    as_values,
    check_array,
    check_ragged,
    check_shared_layout,
    with_values_like,
)
from ..dispatch.operation import define_operation
from ..dtypes import accumulation_dtype
from ..records import record

__all__ = ["layer_norm", "rms_norm"]


@record
class NormCall:
    """A validated call of `layer_norm` or `rms_norm`.

    Attributes
    ----------
    x
        (n, None, ..., D) ragged or (..., D) dense array.
    weight, bias
        (D,) or None.
    eps
        Added to the variance.
    residual
        None, or an array like `x`: the sum of both is normalized and returned too.
    values
        The values of `x`, dense.
    """

    x: Any
    weight: Any = None
    bias: Any = None
    eps: float = 1e-6
    residual: Any = None
    values: Any = field(init=False)

    def __post_init__(self) -> None:
        x, values = self.x, check_array("x", self.x)
        object.__setattr__(self, "values", values)
        if values.ndim == 0:
            raise ValueError("x: expected at least one axis, got a 0-d array")
        if isinstance(x, Array) and x.ragged_dim == x.values.ndim - 1:
            raise ValueError(
                f"x: expected element axes after the ragged axis, got {x.shape}; a norm runs over the last axis"
            )
        checks.check_floating("x", values)
        width = (int(values.shape[-1]),)
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is not None:
                checks.check_dense(name, parameter, values)
                checks.check_shape(name, parameter, width, "the last axis of x")
        checks.check_number("eps", self.eps, low=0)
        if self.residual is None:
            return
        if isinstance(x, Array):
            check_shared_layout("residual", (x, check_ragged("residual", self.residual)))
        else:
            checks.check_dense("residual", self.residual, x)
        checks.check_shape("residual", self.residual, tuple(x.shape), "the shape of x")
        checks.check_same_dtype("residual", self.residual, x)

    @property
    def residual_values(self) -> Any:
        """The dense array of `residual`, or None."""
        return as_values(self.residual)

    def result(self, y: Any, total: Any) -> Any:
        """Return the norm `y` like `x`, and with a residual also `total`, the normalized sum."""
        normed = with_values_like(self.x, y)
        return normed if self.residual is None else (normed, with_values_like(self.x, total))


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    residual: Any = None,
    eps: float = 1e-5,
    kernel: str | None = None,
) -> Any:
    """Compute the layer norm over the last axis (Ba, Kiros and Hinton, 2016).

    The result is ``(x - mean) / sqrt(var + eps) * weight + bias``.

    Parameters
    ----------
    x
        (n, None, ..., D) ragged or (..., D) dense floating-point array. Half precision is computed
        in float32.
    weight, bias
        (D,) scale and shift, or None.
    residual
        Like `x`, or None. It is added to `x` first, and the sum, to which the next block adds, is
        returned too. In half precision the norm is of the float32 sum, and the returned sum is
        rounded. A kernel may compute gradients from the rounded sum.
    eps
        Added to the variance.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    Array or dense array, or a pair
        Like `x`, with its dtype. With a residual a pair: the norm of ``x + residual``, and ``x +
        residual``.

    Raises
    ------
    TypeError
        If `x` is not floating-point, or an argument is not an array of its library.
    ValueError
        If a shape does not fit, or the last axis is the ragged one.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.layer_norm(scree.from_lengths(np.asarray([[1.0, 3.0]]), [1]), eps=0).values
    array([[-1.,  1.]])
    """
    arrays = {"x": x, "weight": weight, "bias": bias, "residual": residual}
    return _layer_norm.run(arrays, {"eps": eps}, kernel)


def rms_norm(
    x: Any,
    weight: Any = None,
    *,
    residual: Any = None,
    eps: float = 1e-6,
    kernel: str | None = None,
) -> Any:
    """Compute the root mean square norm over the last axis (Zhang and Sennrich, 2019).

    The result is ``x / sqrt(mean(x**2) + eps) * weight``.

    Parameters
    ----------
    x, weight, residual, eps, kernel
        See `layer_norm`.

    Returns
    -------
    Array or dense array, or a pair
        See `layer_norm`.

    Raises
    ------
    TypeError, ValueError
        See `layer_norm`.

    Examples
    --------
    >>> import numpy as np, scree
    >>> x = scree.from_lengths(np.asarray([[3.0, 3.0]]), [1])
    >>> scree.rms_norm(x, eps=0).values
    array([[1., 1.]])
    >>> normed, total = scree.rms_norm(x, residual=x, eps=0)
    >>> normed.values, total.values
    (array([[1., 1.]]), array([[6., 6.]]))
    """
    return _rms_norm.run({"x": x, "weight": weight, "residual": residual}, {"eps": eps}, kernel)


def _normalize(call: NormCall, center: bool) -> Any:
    total, xp = call.values, backend(call.values).xp
    dtype = total.dtype
    wide = accumulation_dtype(xp, dtype)
    y = xp.astype(total, wide, copy=False)
    if call.residual is not None:
        # The norm is of the sum before it is rounded.
        y = y + xp.astype(call.residual_values, wide, copy=False)
        total = xp.astype(y, dtype, copy=False)
    if center:
        y = y - xp.mean(y, axis=-1, keepdims=True)
    y = y / xp.sqrt(xp.mean(y * y, axis=-1, keepdims=True) + call.eps)
    if call.weight is not None:
        y = y * xp.astype(call.weight, wide, copy=False)
    if call.bias is not None:
        y = y + xp.astype(call.bias, wide, copy=False)
    return call.result(xp.astype(y, dtype, copy=False), total)


@define_operation("layer_norm", NormCall)
def _layer_norm(call: NormCall) -> Any:
    return _normalize(call, center=True)


@define_operation("rms_norm", NormCall)
def _rms_norm(call: NormCall) -> Any:
    return _normalize(call, center=False)
