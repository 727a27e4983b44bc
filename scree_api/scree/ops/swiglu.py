"""The gate of a feed-forward network, for ragged and dense arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..array import Array
from ..backends import backend
from ..broadcasting import accumulator, like, values_of
from ..checks import floating
from ..dispatch import call_cache
from ..dispatch.registry import declare


@dataclass(frozen=True, slots=True)
class SwigluCall:
    """The first half of the last axis of `x`, gates, times the sigmoid of itself and times the second half."""

    x: Any

    def __post_init__(self) -> None:
        x, values = self.x, self.values
        backend(values, "x")
        if values.ndim == 0 or (isinstance(x, Array) and x.ragged_dim == x.values.ndim - 1):
            raise ValueError(
                f"x: expected a last axis of gates and values, got shape {tuple(x.shape)}"
            )
        if values.shape[-1] % 2:
            raise ValueError(
                f"x: expected a last axis of an even size, as many gates as values, got shape {tuple(x.shape)}"
            )
        floating("x", values)

    @property
    def values(self) -> Any:
        """The dense array under `x`."""
        return values_of(self.x)

    def result(self, y: Any) -> Any:
        """`y` like `x`."""
        return like(self.x, y)


def swiglu(x: Any, *, kernel: str | None = None) -> Any:
    """A gated linear unit (Shazeer, 2020): ``gate * sigmoid(gate) * value``, where `x` holds the gates and the values.

    One product makes both: ``swiglu(x @ w_gate_and_value) @ w_down``.

    Parameters
    ----------
    x
        (n, None, ..., 2 * D) ragged or (..., 2 * D) dense floating-point array: D gates, then D values. Half precision is computed
        in float32.
    kernel
        The provider that must run it; by default the first that accepts.

    Returns
    -------
    Array or dense array
        (n, None, ..., D) or (..., D), the dtype kept.

    Raises
    ------
    ValueError
        If the last axis has no two halves.

    Examples
    --------
    >>> import numpy as np, scree
    >>> x = scree.from_lengths(np.asarray([[0.0, 1.0, 5.0, 2.0], [100.0, -100.0, 3.0, 1.0]]), [1, 1])
    >>> scree.swiglu(x).values.round(3)
    array([[  0.   ,   1.462],
           [300.   ,  -0.   ]])
    """
    return call_cache.run("swiglu", {"x": x}, {}, kernel)


@declare("swiglu", SwigluCall)
def _swiglu(call: SwigluCall) -> Any:
    values, xp = call.values, backend(call.values).xp
    half = values.shape[-1] // 2
    wide = xp.astype(values, accumulator(xp, values.dtype), copy=False)
    gate, value = wide[..., :half], wide[..., half:]
    power = xp.exp(-xp.abs(gate))  # never beyond 1
    sigmoid = xp.where(gate < 0, power, xp.ones_like(power)) / (1 + power)
    return call.result(xp.astype(gate * sigmoid * value, values.dtype, copy=False))
