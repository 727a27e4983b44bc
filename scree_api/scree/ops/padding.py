"""Padded batches: to ragged arrays by a mask or by lengths, and back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..array import Array
from ..backends import backend, is_array
from ..broadcasting import moved, ragged
from ..checks import integer, integers, peeked, read, scalar
from ..construct import OffsetsCall
from ..dispatch import call_cache
from ..dispatch.registry import declare, run
from ..layout import Layout, counter
from .segment import spread


def from_padded(
    padded: Any,
    mask: Any = None,
    *,
    lengths: Any = None,
    total: int | None = None,
    ragged_dim: int = 0,
    kernel: str | None = None,
) -> Array:
    """A ragged array of the real tokens of a padded batch, in their order. Reads the lengths of rows unless `total` is given.

    Parameters
    ----------
    padded
        (n, L, ...) for ragged_dim 0; the padded axis is ``ragged_dim + 1``.
    mask
        (n, L) booleans, or integers of which 0 means padding: right, left or any padding.
    lengths
        (n,) real tokens of each row, for padding on the right; instead of a mask.
    total
        How many real tokens there are in all, where that is known: then nothing waits for a device, and a compiled function
        knows the shape of the result. It is believed where counting is not free.
    ragged_dim
        The axis of one row that is padded.
    kernel
        The provider that must run it; by default the first that accepts.

    Returns
    -------
    Array
        The real tokens, copied, on offsets of int32 (int64 from 2^31 tokens on, or slots of a mask that a device counts).

    Raises
    ------
    TypeError
        If the mask holds floating-point numbers, or an argument is no array.
    ValueError
        If neither or both of mask and lengths are given, or shapes, lengths or the total do not fit.

    Examples
    --------
    >>> import numpy as np, scree
    >>> mask = np.asarray([[True, True, False], [False, False, True]])
    >>> scree.from_padded(np.arange(6).reshape(2, 3), mask).values
    array([0, 1, 5])
    """
    call = UnpadCall.make(padded, mask, lengths=lengths, total=total, ragged_dim=ragged_dim)
    values, rows = run("unpad", call, kernel), call.layout
    if (
        call.slots is not None and total is None
    ):  # a device has counted, and now the host knows the rows too
        rows.max_length = rows.bound
    return Array._of(values, rows, call.ragged_dim)


@dataclass(frozen=True, slots=True)
class UnpadCall:
    """Take the tokens of the rows of `layout` out of `x`, a padded batch, whose axis ``ragged_dim + 1`` is the padded one.

    They stand where `mask`, (n, L), is not 0; without a mask at the beginning of each row. Their values come out. Where the mask
    was not counted before, the first `layout.total` of `slots` are theirs, as of `MarkCall`; asking for that number may wait.
    """

    x: Any
    layout: Layout
    mask: Any = None
    ragged_dim: int = 0
    slots: Any = None

    @classmethod
    def make(
        cls,
        padded: Any,
        mask: Any = None,
        *,
        lengths: Any = None,
        total: int | None = None,
        ragged_dim: int = 0,
    ) -> UnpadCall:
        """Check the arguments of `from_padded` and bring them into one form."""
        lib = backend(padded, "padded")
        if padded.ndim < 2:
            raise ValueError(
                f"padded: expected at least two axes, (n, L), got shape {tuple(padded.shape)}"
            )
        axis = 1 + integer(
            "ragged_dim", ragged_dim, 0, padded.ndim - 1, ", the axes of a padded row"
        )
        if (mask is None) == (lengths is None):
            raise ValueError(
                "mask: expected either mask or lengths, got "
                + ("neither" if mask is None else "both")
            )
        total = None if total is None else integer("total", total, 0)
        shape = int(padded.shape[0]), int(padded.shape[axis])
        if mask is None:
            counts = _lengths(lengths, padded, shape, total)
        else:
            mask, counts = _marked(mask, padded, shape)
        if isinstance(counts, np.ndarray):
            if total is not None and total != counts.sum():
                raise ValueError(
                    f"total: expected {counts.sum()}, the number of real tokens, got {total}; it may be left out"
                )
            return cls(
                padded, Layout.from_host(lib, counts, device=lib.device(padded)), mask, axis - 1
            )
        dtype = counter(lib.xp, math.prod(shape) if total is None else total)
        if mask is None:
            offsets, slots = run("offsets", OffsetsCall(counts, dtype)), None
        else:
            offsets, slots = run("mark", MarkCall(mask, total, dtype))
        return cls(padded, Layout(lib, offsets, total, shape[1]), mask, axis - 1, slots)


def _lengths(lengths: Any, padded: Any, shape: tuple[int, int], total: int | None) -> Any:
    """The lengths of the rows, on the host where they are readable for free, or must be read."""
    known = peeked("lengths", lengths)
    if known is None and total is not None:
        lengths = integers("lengths", lengths, padded)
        if tuple(lengths.shape) != shape[:1]:
            raise ValueError(
                f"lengths: expected {shape[0]} integers, one a row, got shape {tuple(lengths.shape)}"
            )
        return lengths
    known = read("lengths", lengths) if known is None else known
    if known.shape != shape[:1] or known.dtype.kind not in "iu":
        raise ValueError(
            f"lengths: expected {shape[0]} integers, one a row, got {known.dtype} of shape {known.shape}"
        )
    if known.size and (known.min() < 0 or known.max() > shape[1]):
        raise ValueError(
            f"lengths: expected lengths in [0, {shape[1]}], got {known.min()} to {known.max()}"
        )
    return known


def _marked(mask: Any, padded: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
    """The mask as an array of the library and on the device of `padded`, and how many tokens of each row it marks.

    None where these are not readable for free.
    """
    lib = backend(padded)
    here = is_array(mask) and backend(mask) is lib and not lib.apart(mask, padded)
    seen = peeked("mask", mask)
    if seen is None and not here:
        seen = read("mask", mask)
    found = mask if seen is None else seen
    if tuple(found.shape) != shape:
        hint = "; lengths are given as lengths=" if tuple(found.shape) == shape[:1] else ""
        raise ValueError(
            f"mask: expected shape {shape}, the first axes of padded, got {tuple(found.shape)}{hint}"
        )
    if not (
        lib.xp.isdtype(mask.dtype, ("bool", "integral"))
        if seen is None
        else seen.dtype.kind in "biu"
    ):
        raise TypeError(
            f"mask: expected booleans or integers, got {found.dtype}; compare it with 0 first"
        )
    if seen is not None:
        real = seen != 0
        return mask if here else lib.from_host(
            real, lib.xp.bool, lib.device(padded)
        ), np.count_nonzero(real, axis=1)
    return mask, None


def _real(mask: Any) -> Any:
    """A mask as booleans."""
    return mask if backend(mask).xp.isdtype(mask.dtype, "bool") else mask != 0


@dataclass(frozen=True, slots=True)
class MarkCall:
    """Count what `mask`, (n, L), marks with something other than 0: `total` tokens, or None where their number is not known.

    The offsets of the rows, (n + 1,), come out, of a dtype; and for each token, (total,), the number of its slot among all n L,
    or one beyond these where there is no such token. Where `total` is None there may be more entries, which mean nothing.
    """

    mask: Any
    total: int | None
    dtype: Any


@declare("mark", MarkCall)
def _count(call: MarkCall) -> tuple[Any, Any]:
    lib, (n, longest) = backend(call.mask), call.mask.shape
    xp, device = lib.xp, lib.device(call.mask)
    if call.total is None:
        real = lib.read(call.mask) != 0
        ends = np.cumsum(np.count_nonzero(real, axis=1))
        return tuple(
            lib.from_host(x, call.dtype, device)
            for x in (np.concatenate([[0], ends]), np.flatnonzero(real))
        )
    marked = xp.cumulative_sum(
        xp.reshape(xp.astype(_real(call.mask), call.dtype), (-1,)), dtype=call.dtype
    )
    ends = (
        xp.reshape(marked, (n, longest))[:, -1]
        if longest
        else xp.zeros((n,), dtype=call.dtype, device=device)
    )
    offsets = xp.concat([xp.zeros((1,), dtype=call.dtype, device=device), ends])
    return offsets, xp.searchsorted(marked, Layout(lib, offsets, call.total).arange(call.total) + 1)


@declare("unpad", UnpadCall.make)
def _take_marked(call: UnpadCall) -> Any:
    x, dim, xp = call.x, call.ragged_dim, call.layout.xp
    rows = moved(xp, x, dim + 1, 1)
    values = xp.take(
        xp.reshape(rows, (rows.shape[0] * rows.shape[1], *rows.shape[2:])), _slots(call), axis=0
    )
    return moved(xp, values, 0, dim)


def _slots(call: UnpadCall) -> Any:
    """(total,) where the tokens stand among all slots of the padded batch."""
    layout, longest, mask, slots = (
        call.layout,
        call.x.shape[call.ragged_dim + 1],
        call.mask,
        call.slots,
    )
    lib, xp, size = (
        layout.backend,
        layout.xp,
        call.layout.num_rows * call.x.shape[call.ragged_dim + 1],
    )
    if slots is None:
        if mask is None:
            real = (
                None if layout.host is None else np.arange(longest) < np.diff(layout.host)[:, None]
            )
        else:  # its counts are known
            real = lib.peek(mask)
            real = lib.read(mask) if real is None else real
        if real is not None:
            return layout.put(np.flatnonzero(real), size)
        slots = (
            xp.astype(layout.rows, counter(xp, size, layout.rows), copy=False) * longest
            + layout.positions
        )
    slots = slots[: layout.total]
    return xp.where(slots < size, slots, max(size - 1, 0))


def to_padded(
    arr: Array,
    *,
    side: str = "right",
    fill_value: Any = 0,
    length: int | None = None,
    kernel: str | None = None,
) -> tuple[Any, Any]:
    """A padded batch and the mask of its real tokens.

    Parameters
    ----------
    arr
        (n, None, ...) ragged array.
    side
        "right" or "left": where the padding stands.
    fill_value
        What the padding holds, a scalar of the array's dtype.
    length
        The padded length; by default the longest row (or `max_length`, where the offsets are not read for free). Where the
        offsets are readable, a row that is longer is an error: nothing is cut.
    kernel
        The provider that must run it; by default the first that accepts.

    Returns
    -------
    padded, mask
        (n, length, ...) values and (n, length) booleans.

    Raises
    ------
    TypeError
        If `arr` is no ragged array, or its dtype does not hold `fill_value`.
    ValueError
        If a row is longer than `length`, or the side has another name.

    Examples
    --------
    >>> import numpy as np, scree
    >>> padded, mask = scree.to_padded(scree.from_lengths(np.arange(1, 5), [1, 3]), side="left", fill_value=-1)
    >>> padded
    array([[-1, -1,  1],
           [ 2,  3,  4]])
    """
    padded, mask = call_cache.run(
        "pad", {"arr": arr}, {"side": side, "fill_value": fill_value, "length": length}, kernel
    )
    return padded, mask


@dataclass(frozen=True, slots=True)
class PadCall:
    """Put the rows of `x` into a padded batch of `length` slots a row, with `fill_value` on one `side` of the tokens.

    That batch comes out, with the padded axis at ``ragged_dim + 1``, and the mask of its tokens, (n, length).
    """

    x: Array
    length: int
    side: str = "right"
    fill_value: bool | int | float | complex = 0

    @classmethod
    def make(
        cls, arr: Array, *, side: str = "right", fill_value: Any = 0, length: int | None = None
    ) -> PadCall:
        """Check the arguments of `to_padded` and bring them into one form."""
        layout = ragged("arr", arr).layout
        length = None if length is None else integer("length", length, 0)
        fill_value = scalar("fill_value", fill_value, arr.values)
        if side not in ("right", "left"):
            raise ValueError(f"side: expected 'right' or 'left', got {side!r}")
        if length is None and layout.max_length is None:
            layout.read()
        if layout.host is not None:
            longest = int(np.max(np.diff(layout.host), initial=0))
            if length is not None and length < longest:
                raise ValueError(
                    f"length: expected at least {longest}, the longest row, got {length}; cut rows with arr[:, :length]"
                )
        else:
            longest = layout.max_length or 0
        return cls(arr, longest if length is None else length, side, fill_value)


@declare("pad", PadCall.make)
def _take_padded(call: PadCall) -> tuple[Any, Any]:
    arr, length, layout, xp, n = (
        call.x,
        call.length,
        call.x.layout,
        call.x.layout.xp,
        call.x.batch_size,
    )
    slots = layout.arange(length)[None, :]
    lengths, starts = layout.lengths[:, None], layout.offsets[:-1][:, None]
    mask = slots < lengths if call.side == "right" else slots >= length - lengths
    tokens = starts + slots if call.side == "right" else starts + lengths - length + slots
    values = moved(xp, arr.values, arr.ragged_dim, 0)
    fill = xp.full((), call.fill_value, dtype=arr.dtype, device=layout.device)
    if layout.total == 0 or n == 0 or length == 0:
        padded = xp.full(
            (n, length, *values.shape[1:]), call.fill_value, dtype=arr.dtype, device=layout.device
        )
    else:
        padded = xp.take(values, xp.reshape(layout.clip(tokens), (-1,)), axis=0)
        padded = xp.reshape(padded, (n, length, *values.shape[1:]))
        padded = xp.where(spread(xp, mask, padded.ndim), padded, fill)
    return moved(xp, padded, 1, arr.ragged_dim + 1), mask
