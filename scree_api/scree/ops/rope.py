"""Rotary position embedding; positions restart at each row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from .. import checks
from ..array import Array
from ..broadcasting import accumulation_dtype, check_ragged, check_shared_layout
from ..dispatch.operation import define_operation

__all__ = ["rope"]


@dataclass(frozen=True, slots=True)
class RopeCall:
    """A validated call of `rope`.

    Attributes
    ----------
    x
        (n, None, ..., head_dim) ragged array.
    k
        None, or an array with the rows, dtype and head_dim of `x` that is rotated too.
    theta, interleaved
        See `rope`.
    start
        (n,) position of each row's first token, or None.
    """

    x: Array
    k: Array | None = None
    theta: float = 10000.0
    interleaved: bool = False
    start: Any = None

    def __post_init__(self) -> None:
        x = check_ragged("x", self.x)
        if x.ragged_dim != 0 or x.ndim < 3:
            raise ValueError(f"x: expected a ragged array (n, None, ..., head_dim), got {x.shape}")
        checks.check_floating("x", x.values)
        head_dim = x.values.shape[-1]
        if head_dim % 2 or head_dim == 0:
            raise ValueError(f"x: expected an even head_dim of at least 2, got {head_dim}")
        if self.k is not None:
            check_shared_layout("k", (x, check_ragged("k", self.k)))
            checks.check_same_dtype("k", self.k, x)
            k_dim = self.k.values.shape[-1]
            if k_dim != head_dim:
                raise ValueError(f"k: expected head_dim {head_dim} as x, got {k_dim}")
        checks.check_number("theta", self.theta, above=0)
        checks.check_flag("interleaved", self.interleaved)
        if self.start is not None:
            checks.check_integers("start", self.start, x.values)
            checks.check_shape("start", self.start, (x.batch_size,), "one position per row")


def rope(
    x: Array,
    k: Array | None = None,
    /,
    *,
    theta: float = 10000.0,
    interleaved: bool = False,
    start: Any = None,
    kernel: str | None = None,
) -> Any:
    """Apply the rotary position embedding (Su et al., 2021) to queries or keys, or to both at once.

    Parameters
    ----------
    x
        (n, None, ..., head_dim) floating-point ragged array, head_dim even.
    k
        An array with the same rows, dtype and head_dim, or None; it may have fewer heads. A kernel
        computes the angles once for both.
    theta
        Base of the wavelengths: pair i turns by ``position * theta ** (-2 i / head_dim)``.
    interleaved
        Pair elements (2i, 2i + 1), as in the paper, instead of (i, i + head_dim / 2).
    start
        (n,) integers, position of each row's first token, for rows that continue; 0 by default.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    Array, or a pair
        Like `x`; with `k` a pair, like `x` and like `k`. Angles and products are computed in at
        least float32.

    Raises
    ------
    TypeError
        If `x` or `k` is not a ragged array of floating-point numbers, or `start` does not hold
        integers.
    ValueError
        If head_dim is odd, or rows or shapes do not fit.

    Examples
    --------
    >>> import numpy as np, scree
    >>> q = scree.from_lengths(np.asarray([[1.0, 0.0], [1.0, 0.0]]), [1, 1])
    >>> scree.rope(q).values  # both at position 0
    array([[1., 0.],
           [1., 0.]])
    >>> q, k = scree.rope(q, q * 2)
    >>> k.values
    array([[2., 0.],
           [2., 0.]])
    """
    options = {"theta": theta, "interleaved": interleaved}
    return _rope.run({"x": x, "k": k, "start": start}, options, kernel)


@define_operation("rope", RopeCall)
def _rope(call: RopeCall) -> Any:
    x, layout, xp = call.x, call.x.layout, call.x.layout.xp
    half, wide = x.values.shape[-1] // 2, accumulation_dtype(xp, x.dtype)
    positions = layout.positions
    if call.start is not None:
        positions = positions + layout.per_token(call.start)
    pair = xp.arange(half, dtype=wide, device=layout.device)
    frequency = xp.exp(pair * (-math.log(call.theta) / half))
    angle = xp.astype(positions, wide)[:, None] * frequency[None, :]
    cos, sin = xp.cos(angle), xp.sin(angle)

    def rotate(x: Array) -> Array:
        values = xp.astype(x.values, wide, copy=False)
        c, s = (xp.reshape(t, (t.shape[0], *(1,) * (values.ndim - 2), half)) for t in (cos, sin))
        if call.interleaved:
            a, b = values[..., ::2], values[..., 1::2]
        else:
            a, b = values[..., :half], values[..., half:]
        parts = [a * c - b * s, b * c + a * s]
        if call.interleaved:
            out = xp.reshape(xp.stack(parts, axis=-1), values.shape)
        else:
            out = xp.concat(parts, axis=-1)
        return x.with_values(xp.astype(out, x.dtype, copy=False))

    return rotate(x) if call.k is None else (rotate(x), rotate(call.k))
