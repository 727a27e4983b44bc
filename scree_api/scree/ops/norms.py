"""Layer norm and RMS norm over the last axis, for ragged and dense arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..array import Array
from ..backends import backend
from ..broadcasting import accumulator, like, ragged, shared_layout, values_of
from ..checks import dense, floating, number
from ..dispatch import call_cache
from ..dispatch.registry import declare


@dataclass(frozen=True, slots=True)
class NormCall:
    """Normalize `x` over its last axis; `weight` and `bias` have one entry for each of its elements, or are None.

    With a `residual` like `x` the sum of both is normalized, and given beside the result.
    """

    x: Any
    weight: Any = None
    bias: Any = None
    eps: float = 1e-6
    residual: Any = None

    def __post_init__(self) -> None:
        x, values = self.x, self.values
        backend(values, "x")
        if values.ndim == 0:
            raise ValueError("x: expected at least one axis, got a 0-d array")
        if isinstance(x, Array) and x.ragged_dim == x.values.ndim - 1:
            raise ValueError(
                f"x: expected element axes behind the ragged one, got {x.shape}; a norm runs over the last axis"
            )
        floating("x", values)
        width = (int(values.shape[-1]),)
        for name, found in (("weight", self.weight), ("bias", self.bias)):
            if found is None:
                continue
            dense(name, found, values)
            if tuple(found.shape) != width:
                raise ValueError(
                    f"{name}: expected shape {width}, the last axis of x, got {tuple(found.shape)}"
                )
        number("eps", self.eps, low=0)
        if self.residual is None:
            return
        if isinstance(x, Array):
            shared_layout("residual", (x, ragged("residual", self.residual)))
        else:
            dense("residual", self.residual, x)
        if self.residual.shape != x.shape or self.residual.dtype != x.dtype:
            raise ValueError(
                f"residual: expected shape {tuple(x.shape)} and dtype {x.dtype}, those of x, got {tuple(self.residual.shape)} "
                f"and {self.residual.dtype}"
            )

    @property
    def values(self) -> Any:
        """The dense array under `x`."""
        return values_of(self.x)

    @property
    def added(self) -> Any:
        """The dense array under `residual`, or None."""
        return values_of(self.residual)

    def result(self, y: Any, total: Any) -> Any:
        """`y` like `x`, and with a residual also `total`, the sum that was normalized."""
        normed = like(self.x, y)
        return normed if self.residual is None else (normed, like(self.x, total))


def layer_norm(
    x: Any,
    weight: Any = None,
    bias: Any = None,
    *,
    residual: Any = None,
    eps: float = 1e-5,
    kernel: str | None = None,
) -> Any:
    """Layer normalization over the last axis (Ba, Kiros and Hinton, 2016): ``(x - mean) / sqrt(var + eps) * weight + bias``.

    Parameters
    ----------
    x
        (n, None, ..., D) ragged or (..., D) dense floating-point array. Half precision is computed in float32.
    weight, bias
        (D,) scale and shift, or None.
    residual
        Like `x`, and added to it before; their sum, which the next block adds to, is given too.
    eps
        Added to the variance.
    kernel
        The provider that must run it; by default the first that accepts.

    Returns
    -------
    Array or dense array, or a pair of them
        Like `x`, its dtype kept. With a residual a pair: the norm of the sum ``x + residual``, and the sum.

    Raises
    ------
    TypeError
        If `x` holds no floating-point numbers, or an argument is no array of its library.
    ValueError
        If a shape does not fit, or the last axis is the ragged one.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.layer_norm(scree.from_lengths(np.asarray([[1.0, 3.0]]), [1]), eps=0).values
    array([[-1.,  1.]])
    """
    return call_cache.run(
        "layer_norm",
        {"x": x, "weight": weight, "bias": bias, "residual": residual},
        {"eps": eps},
        kernel,
    )


def rms_norm(
    x: Any,
    weight: Any = None,
    *,
    residual: Any = None,
    eps: float = 1e-6,
    kernel: str | None = None,
) -> Any:
    """Root mean square normalization over the last axis (Zhang and Sennrich, 2019): ``x / sqrt(mean(x**2) + eps) * weight``.

    Parameters
    ----------
    x, weight, residual, eps, kernel
        See `layer_norm`.

    Returns
    -------
    Array or dense array, or a pair of them
        As `layer_norm`.

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
    return call_cache.run(
        "rms_norm", {"x": x, "weight": weight, "residual": residual}, {"eps": eps}, kernel
    )


def _normalize(call: NormCall, center: bool) -> Any:
    values, xp = call.values, backend(call.values).xp
    if call.residual is not None:
        values = values + call.added
    wide = accumulator(xp, values.dtype)
    y = xp.astype(values, wide, copy=False)
    if center:
        y = y - xp.mean(y, axis=-1, keepdims=True)
    y = y / xp.sqrt(xp.mean(y * y, axis=-1, keepdims=True) + call.eps)
    if call.weight is not None:
        y = y * xp.astype(call.weight, wide, copy=False)
    if call.bias is not None:
        y = y + xp.astype(call.bias, wide, copy=False)
    return call.result(xp.astype(y, values.dtype, copy=False), values)


@declare("layer_norm", NormCall)
def _layer_norm(call: NormCall) -> Any:
    return _normalize(call, center=True)


@declare("rms_norm", NormCall)
def _rms_norm(call: NormCall) -> Any:
    return _normalize(call, center=False)
