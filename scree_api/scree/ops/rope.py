"""Rotary position embedding; positions restart at each row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..array import Array
from ..broadcasting import accumulator, ragged, shared_layout
from ..checks import flag, floating, integers, number
from ..dispatch import call_cache
from ..dispatch.registry import declare


@dataclass(frozen=True, slots=True)
class RopeCall:
    """Rotate the pairs of the last axis of `x`, values (total, ..., head_dim), by angles that grow with the position.

    `k` is None, or another array of the same rows, dtype and head_dim that is rotated too.
    """

    x: Array
    k: Array | None = None
    theta: float = 10000.0
    interleaved: bool = False
    start: Any = None

    def __post_init__(self) -> None:
        x = ragged("x", self.x)
        if x.ragged_dim != 0 or x.ndim < 3:
            raise ValueError(f"x: expected a ragged array (n, None, ..., head_dim), got {x.shape}")
        floating("x", x.values)
        if x.values.shape[-1] % 2 or x.values.shape[-1] == 0:
            raise ValueError(
                f"x: expected an even head_dim of at least 2, got {x.values.shape[-1]}"
            )
        if self.k is not None:
            shared_layout("k", (x, ragged("k", self.k)))
            if self.k.values.shape[-1] != x.values.shape[-1] or self.k.dtype != x.dtype:
                raise ValueError(
                    f"k: expected head_dim {x.values.shape[-1]} and dtype {x.dtype} as x, got {self.k.values.shape[-1]} and "
                    f"{self.k.dtype}"
                )
        number("theta", self.theta, above=0)
        flag("interleaved", self.interleaved)
        if self.start is not None:
            integers("start", self.start, x.values)
            if tuple(self.start.shape) != (x.batch_size,):
                raise ValueError(
                    f"start: expected shape ({x.batch_size},), a position a row, got {tuple(self.start.shape)}"
                )


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
    """Rotary position embedding (Su et al., 2021) of queries or keys, or of both at once.

    Parameters
    ----------
    x
        (n, None, ..., head_dim) floating-point ragged array, head_dim even.
    k
        Another one with the same rows, dtype and head_dim, or None; its heads may be fewer. A kernel computes the angles once
        for both.
    theta
        Base of the wavelengths: pair i turns by ``position * theta ** (-2 i / head_dim)``.
    interleaved
        Pair neighbors (2i, 2i + 1), as in the paper, instead of (i, i + head_dim / 2).
    start
        (n,) position of each row's first token, for rows that continue; 0 by default.
    kernel
        The provider that must run it; by default the first that accepts.

    Returns
    -------
    Array, or a pair of them
        Like `x`, and with `k` like both; angles and products in at least float32.

    Raises
    ------
    TypeError
        If `x` or `k` is no ragged array of floating-point numbers, or `start` holds no integers.
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
    return call_cache.run("rope", {"x": x, "k": k, "start": start}, options, kernel)


@declare("rope", RopeCall)
def _rope(call: RopeCall) -> Any:
    x, layout, xp = call.x, call.x.layout, call.x.layout.xp
    half, wide = x.values.shape[-1] // 2, accumulator(xp, x.dtype)
    positions = layout.positions
    if call.start is not None:
        positions = positions + xp.take(call.start, layout.rows, axis=0)
    pair = xp.arange(half, dtype=wide, device=layout.device)
    angle = (
        xp.astype(positions, wide)[:, None] * xp.exp(pair * (-math.log(call.theta) / half))[None, :]
    )
    cos, sin = xp.cos(angle), xp.sin(angle)

    def turned(x: Array) -> Array:
        values = xp.astype(x.values, wide, copy=False)
        c, s = (xp.reshape(t, (t.shape[0], *(1,) * (values.ndim - 2), half)) for t in (cos, sin))
        a, b = (
            (values[..., ::2], values[..., 1::2])
            if call.interleaved
            else (values[..., :half], values[..., half:])
        )
        parts = [a * c - b * s, b * c + a * s]
        out = (
            xp.reshape(xp.stack(parts, axis=-1), values.shape)
            if call.interleaved
            else xp.concat(parts, axis=-1)
        )
        return x.with_values(xp.astype(out, x.dtype, copy=False))

    return turned(x) if call.k is None else (turned(x), turned(call.k))
