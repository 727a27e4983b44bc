"""Rotary position embedding; positions restart at each row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..array import Array
from ..backends import backend
from ..broadcasting import check_ragged, check_shared_layout
from ..dispatch.operation import define_operation
from ..dtypes import accumulation_dtype
from ..records import record
from .rope_scaling import (
    FrequencyScaling,
    RopeScaling,
    as_rope_scaling,
    check_rotary_dim,
    resolve_scaling,
)

__all__ = ["rope"]

DEFAULT_THETA = 10000.0


class Tables(NamedTuple):
    """The arrays of a rotation, each a dense array or None; see `rope`."""

    inv_freq: Any = None
    cos: Any = None
    sin: Any = None


@record
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
    rotary_dim
        Number of leading elements that are rotated.
    scaling
        None, or the `FrequencyScaling` of the pairs.
    inv_freq, cos, sin
        See `rope`.
    """

    x: Array
    k: Array | None = None
    theta: float = DEFAULT_THETA
    interleaved: bool = False
    start: Any = None
    rotary_dim: Any = None  # the constructor makes it an integer
    scaling: Any = None  # the constructor makes it a FrequencyScaling
    inv_freq: Any = None
    cos: Any = None
    sin: Any = None

    def __post_init__(self) -> None:
        x = check_ragged("x", self.x)
        if x.ragged_dim != 0 or x.ndim < 3:
            raise ValueError(f"x: expected a ragged array (n, None, ..., head_dim), got {x.shape}")
        checks.check_floating("x", x.values)
        checks.check_flag("interleaved", self.interleaved)
        rotary_dim, scaling = resolve_rotation(
            "x", x.values, self.theta, self.rotary_dim, self.scaling, self.tables
        )
        if self.k is not None:
            check_shared_layout("k", (x, check_ragged("k", self.k)))
            checks.check_same_dtype("k", self.k, x)
            k_dim, head_dim = self.k.values.shape[-1], x.values.shape[-1]
            if k_dim != head_dim:
                raise ValueError(f"k: expected head_dim {head_dim} as x, got {k_dim}")
        if self.start is not None:
            checks.check_integers("start", self.start, x.values)
            checks.check_shape("start", self.start, (x.batch_size,), "one position per row")
        if self.cos is not None:
            host = x.layout.host_offsets
            start = 0 if self.start is None else backend(self.start).peek(self.start)
            check_positions("cos", self.cos, None if host is None else np.diff(host), start)
        object.__setattr__(self, "rotary_dim", rotary_dim)
        object.__setattr__(self, "scaling", scaling)

    @property
    def tables(self) -> Tables:
        """The arrays of the rotation."""
        return Tables(self.inv_freq, self.cos, self.sin)


def resolve_rotation(
    name: str, x: Any, theta: Any, rotary_dim: Any, scaling: Any, tables: Tables
) -> tuple[int, FrequencyScaling | None]:
    """Return the number of elements that are rotated, and the scaling of their frequencies.

    Raise if options of `rope` for the values `x`, an argument called `name`, contradict each other.
    """
    head_dim, (inv_freq, cos, sin) = int(x.shape[-1]), tables
    checks.check_number("theta", theta, above=0)
    if (cos is None) != (sin is None):
        missing, other = ("sin", "cos") if sin is None else ("cos", "sin")
        raise TypeError(f"{missing}: expected a table as {other}, got None")
    source = next((n for n, t in zip(tables._fields, tables, strict=True) if t is not None), None)
    if source is not None:
        if inv_freq is not None and cos is not None:
            raise TypeError("inv_freq: expected None with cos and sin, got an array")
        if theta != DEFAULT_THETA:
            raise TypeError(
                f"theta: expected its default with {source}, which has the frequencies, got {theta}"
            )
        if scaling is not None:
            raise TypeError(
                f"scaling: expected None with {source}, which has the frequencies, got {scaling!r:.80}"
            )
        ndim, meaning = (
            (1, "(rotary_dim / 2,)") if cos is None else (2, "(positions, rotary_dim / 2)")
        )
        table = inv_freq if cos is None else cos
        for table_name, array in zip(tables._fields, tables, strict=True):
            if array is None:
                continue
            checks.check_dense(table_name, array, x)
            checks.check_floating(table_name, array)
            if len(array.shape) != ndim:
                raise ValueError(
                    f"{table_name}: expected shape {meaning}, got {tuple(array.shape)}"
                )
            if getattr(array, "requires_grad", False):
                raise ValueError(
                    f"{table_name}: expected a table without gradient, which rope does not compute; use "
                    f"{table_name}.detach()"
                )
        width = 2 * int(table.shape[-1])
        if not 2 <= width <= head_dim:
            raise ValueError(
                f"{source}: expected 1 to {head_dim // 2} frequencies, half of head_dim, got {width // 2}"
            )
        if rotary_dim is not None and check_rotary_dim(rotary_dim, head_dim) != width:
            raise ValueError(
                f"rotary_dim: expected {width}, twice the frequencies of {source}, got {rotary_dim}"
            )
        if cos is not None:
            checks.check_shape("sin", sin, tuple(cos.shape), "as cos")
            if cos.shape[0] == 0:
                raise ValueError("cos: expected at least one position, got 0")
        return width, None
    if rotary_dim is None:
        if head_dim % 2 or head_dim == 0:
            raise ValueError(
                f"{name}: expected an even head_dim of at least 2, got {head_dim}; rotate a part with rotary_dim="
            )
        rotary_dim = head_dim
    rotary_dim = check_rotary_dim(rotary_dim, head_dim)
    return rotary_dim, resolve_scaling(scaling, rotary_dim, head_dim, theta)


def check_positions(
    name: str, table: Any, lengths: np.ndarray | None, start: np.ndarray | int | None
) -> None:
    """Raise if a row that begins at position `start` leaves a table; None is unknown on the host."""
    if lengths is None or start is None:
        return
    first, last = np.where(lengths > 0, start, 0), np.where(lengths > 0, start + lengths, 0)
    if first.min(initial=0) < 0:
        raise ValueError(f"start: expected positions of at least 0 with {name}, got {first.min()}")
    if last.max(initial=0) > table.shape[0]:
        raise ValueError(
            f"{name}: expected at least {last.max()} rows, one per position, got {table.shape[0]}"
        )


def rope(
    x: Array,
    k: Array | None = None,
    /,
    *,
    theta: float = DEFAULT_THETA,
    interleaved: bool = False,
    start: Any = None,
    rotary_dim: int | None = None,
    scaling: RopeScaling | Mapping[str, Any] | None = None,
    inv_freq: Any = None,
    cos: Any = None,
    sin: Any = None,
    kernel: str | None = None,
) -> Any:
    """Apply the rotary position embedding (Su et al., 2021) to queries or keys, or to both at once.

    Parameters
    ----------
    x
        (n, None, ..., head_dim) floating-point ragged array.
    k
        An array with the same rows, dtype and head_dim, or None; it may have fewer heads. A kernel
        computes the angles once for both.
    theta
        Base of the wavelengths: pair i turns by ``position * theta ** (-2 i / rotary_dim)``.
    interleaved
        Pair elements (2i, 2i + 1), as in the paper, instead of (i, i + rotary_dim / 2).
    start
        (n,) integers, position of each row's first token, for rows that continue; 0 by default.
    rotary_dim
        Only the first `rotary_dim` elements of each head are rotated, an even number; the whole
        head by default.
    scaling
        Scaling of the frequencies: a `RopeScaling`, or a dictionary with its fields, as in a
        Hugging Face configuration.
    inv_freq
        (rotary_dim / 2,) frequencies, in radians per position, instead of `theta` and `scaling`.
    cos, sin
        (positions, rotary_dim / 2) tables instead of all frequencies: the token at position p uses
        row p. Where the host cannot read the positions, a position after the table uses its last
        row. Tables and frequencies have no gradient.
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
        If `x` or `k` is not a ragged array of floating-point numbers, `start` does not hold
        integers, or options exclude each other.
    ValueError
        If head_dim or `rotary_dim` is odd, if rows or shapes do not fit, if a row is longer than
        the tables, or if a table requires a gradient.

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
    >>> q = scree.from_lengths(np.ones((2, 3)), [2])
    >>> cos, sin = np.asarray([[1.0], [0.0]]), np.asarray([[0.0], [1.0]])
    >>> scree.rope(q, cos=cos, sin=sin).values  # the third element passes through
    array([[ 1.,  1.,  1.],
           [-1.,  1.,  1.]])
    """
    options = {
        "theta": theta,
        "interleaved": interleaved,
        "rotary_dim": rotary_dim,
        "scaling": None if scaling is None else as_rope_scaling(scaling),
    }
    arrays = {"x": x, "k": k, "start": start}
    if inv_freq is not None or cos is not None or sin is not None:
        arrays |= {"inv_freq": inv_freq, "cos": cos, "sin": sin}
    return _rope.run(arrays, options, kernel)


@define_operation("rope", RopeCall)
def _rope(call: RopeCall) -> Any:
    xp, rotary_dim = call.x.layout.xp, call.rotary_dim
    half, wide = rotary_dim // 2, accumulation_dtype(xp, call.x.dtype)
    cos, sin = _cos_and_sin(call, half, wide)

    def rotate(x: Array) -> Array:
        rotated = x.values if rotary_dim == x.values.shape[-1] else x.values[..., :rotary_dim]
        values = xp.astype(rotated, wide, copy=False)
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
        out = xp.astype(out, x.dtype, copy=False)
        if rotary_dim != x.values.shape[-1]:
            out = xp.concat([out, x.values[..., rotary_dim:]], axis=-1)
        return x.with_values(out)

    return rotate(call.x) if call.k is None else (rotate(call.x), rotate(call.k))


def _cos_and_sin(call: RopeCall, half: int, wide: Any) -> tuple[Any, Any]:
    """Return the cosine and the sine of each token and pair, (total, half)."""
    layout, xp = call.x.layout, call.x.layout.xp
    positions = layout.positions
    if call.start is not None:
        positions = positions + layout.per_token(call.start)
    if call.cos is not None:
        # Positions of the tail, which have no meaning, may be outside of the table.
        index = xp.clip(positions, 0, call.cos.shape[0] - 1)
        cos, sin = (xp.take(t, index, axis=0) for t in (call.cos, call.sin))
        return xp.astype(cos, wide, copy=False), xp.astype(sin, wide, copy=False)
    if call.inv_freq is not None:
        frequency = xp.astype(call.inv_freq, wide, copy=False)
    else:
        pair = xp.arange(half, dtype=wide, device=layout.device)
        frequency = xp.exp(pair * (-math.log(call.theta) / half))
        if call.scaling is not None:
            frequency = call.scaling.scale(xp, pair, frequency)
    angle = xp.astype(positions, wide)[:, None] * frequency[None, :]
    cos, sin = xp.cos(angle), xp.sin(angle)
    if call.scaling is not None and call.scaling.attention_factor != 1:
        cos, sin = cos * call.scaling.attention_factor, sin * call.scaling.attention_factor
    return cos, sin
