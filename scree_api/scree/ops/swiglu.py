"""SwiGLU, the gated linear unit of feed-forward networks, for ragged and dense arrays."""

from __future__ import annotations

from dataclasses import field
from typing import Any

from .. import checks
from ..array import Array
from ..backends import backend
from ..broadcasting import check_array, with_values_like
from ..dispatch.operation import define_operation
from ..dtypes import accumulation_dtype
from ..records import record

__all__ = ["swiglu"]


@record
class SwigluCall:
    """A validated call of `swiglu`.

    Attributes
    ----------
    x
        (n, None, ..., 2 * D) ragged or (..., 2 * D) dense floating-point array.
    values
        The values of `x`, dense.
    """

    x: Any
    values: Any = field(init=False)

    def __post_init__(self) -> None:
        x, values = self.x, check_array("x", self.x)
        object.__setattr__(self, "values", values)
        shape = tuple(x.shape)
        if values.ndim == 0 or (isinstance(x, Array) and x.ragged_dim == x.values.ndim - 1):
            raise ValueError(f"x: expected a last axis of gates and values, got shape {shape}")
        if values.shape[-1] % 2:
            raise ValueError(
                f"x: expected a last axis of an even size, as many gates as values, got shape {shape}"
            )
        checks.check_floating("x", values)

    def result(self, values: Any) -> Any:
        """Return `values` like `x`."""
        return with_values_like(self.x, values)


def swiglu(x: Any, *, kernel: str | None = None) -> Any:
    """Compute the gated linear unit ``gate * sigmoid(gate) * value`` (Shazeer, 2020).

    One product makes both halves of `x`: ``swiglu(x @ w_gate_and_value) @ w_down``.

    Parameters
    ----------
    x
        (n, None, ..., 2 * D) ragged or (..., 2 * D) dense floating-point array: D gates, then D
        values. Half precision is computed in float32.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    Array or dense array
        (n, None, ..., D) or (..., D), with the dtype of `x`.

    Raises
    ------
    ValueError
        If the last axis does not have two halves.

    Examples
    --------
    >>> import numpy as np, scree
    >>> x = scree.from_lengths(np.asarray([[0.0, 1.0, 5.0, 2.0], [100.0, -100.0, 3.0, 1.0]]), [1, 1])
    >>> scree.swiglu(x).values.round(3)
    array([[  0.   ,   1.462],
           [300.   ,  -0.   ]])
    """
    return _swiglu.run({"x": x}, {}, kernel)


@define_operation("swiglu", SwigluCall)
def _swiglu(call: SwigluCall) -> Any:
    values, xp = call.values, backend(call.values).xp
    half = values.shape[-1] // 2
    wide = xp.astype(values, accumulation_dtype(xp, values.dtype), copy=False)
    gate, value = wide[..., :half], wide[..., half:]
    power = xp.exp(-xp.abs(gate))  # at most 1, so it cannot overflow
    sigmoid = xp.where(gate < 0, power, xp.ones_like(power)) / (1 + power)
    out = xp.astype(gate * sigmoid * value, values.dtype, copy=False)
    return call.result(out)
