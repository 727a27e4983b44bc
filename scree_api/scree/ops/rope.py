"""Rotary position embedding; positions restart at each row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..array import Array
from ..checks import integers, number
from ..fit import accumulator, ragged
from ..registry import declare, run


@dataclass(frozen=True, slots=True)
class RopeCall:
    """Rotate the pairs of the last axis of `x`, values (total, ..., head_dim), by angles that grow with the position."""

    x: Array
    theta: float = 10000.0
    interleaved: bool = False
    start: Any = None

    def __post_init__(self) -> None:
        x = ragged("x", self.x)
        if x.ragged_dim != 0 or x.ndim < 3:
            raise ValueError(f"x: expected a ragged array (n, None, ..., head_dim), got {x.shape}")
        if not x.layout.xp.isdtype(x.dtype, "real floating"):
            raise TypeError(f"x: expected a real floating-point dtype, got {x.dtype}; convert it with xp.astype")
        if x.values.shape[-1] % 2 or x.values.shape[-1] == 0:
            raise ValueError(f"x: expected an even head_dim of at least 2, got {x.values.shape[-1]}")
        number("theta", self.theta, above=0)
        if self.start is not None:
            integers("start", self.start, x.values)
            if tuple(self.start.shape) != (x.batch_size,):
                raise ValueError(f"start: expected shape ({x.batch_size},), a position a row, got {tuple(self.start.shape)}")


def rope(
    x: Array, /, *, theta: float = 10000.0, interleaved: bool = False, start: Any = None, kernel: str | None = None
) -> Array:
    """Rotary position embedding (Su et al., 2021) of queries or keys.

    Parameters
    ----------
    x
        (n, None, ..., head_dim) floating-point ragged array, head_dim even.
    theta
        Base of the wavelengths: pair i turns by ``position * theta ** (-2 i / head_dim)``.
    interleaved
        Pair neighbours (2i, 2i + 1), as in the paper, instead of (i, i + head_dim / 2).
    start
        (n,) position of each row's first token, for rows that continue; 0 by default.
    kernel
        The provider that must run it; by default the first that accepts.

    Returns
    -------
    Array
        Like `x`; angles and products in at least float32.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.rope(scree.from_lengths(np.asarray([[1.0, 0.0], [1.0, 0.0]]), [1, 1])).values  # both at position 0
    array([[1., 0.],
           [1., 0.]])
    """
    return run("rope", RopeCall(x, theta, interleaved, start), kernel)  # type: ignore[no-any-return]


@declare("rope", RopeCall)
def _rope(call: RopeCall) -> Array:
    x, layout, xp = call.x, call.x.layout, call.x.layout.xp
    values, half = x.values, x.values.shape[-1] // 2
    wide = accumulator(xp, x.dtype)
    positions = layout.positions
    if call.start is not None:
        positions = positions + xp.take(call.start, layout.rows, axis=0)
    pair = xp.arange(half, dtype=wide, device=layout.backend.device(values))
    angle = xp.astype(positions, wide)[:, None] * xp.exp(pair * (-math.log(call.theta) / half))[None, :]
    angle = xp.reshape(angle, (angle.shape[0], *(1,) * (values.ndim - 2), half))
    cos, sin = xp.cos(angle), xp.sin(angle)
    values = xp.astype(values, wide, copy=False)
    a, b = (values[..., ::2], values[..., 1::2]) if call.interleaved else (values[..., :half], values[..., half:])
    turned = [a * cos - b * sin, b * cos + a * sin]
    out = xp.reshape(xp.stack(turned, axis=-1), values.shape) if call.interleaved else xp.concat(turned, axis=-1)
    return x.with_values(xp.astype(out, x.dtype, copy=False))
