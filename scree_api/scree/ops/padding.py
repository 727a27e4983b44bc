"""Conversion of padded batches to ragged arrays, by a mask or by lengths, and back."""

from __future__ import annotations

import math
from dataclasses import field
from typing import Any

import numpy as np

from .. import checks
from ..array import Array
from ..backends import backend, is_array
from ..broadcasting import check_ragged, moveaxis
from ..construct import offsets_from_lengths
from ..dispatch.operation import define_operation
from ..dtypes import is_nonzero
from ..layout import Layout, host_offsets_of, index_dtype, widen_index
from ..records import record
from .segment import append_axes

__all__ = ["from_padded", "to_padded"]


def from_padded(
    padded: Any,
    mask: Any = None,
    *,
    lengths: Any = None,
    total: int | None = None,
    ragged_dim: int = 0,
    kernel: str | None = None,
) -> Array:
    """Return the real tokens of a padded batch as a ragged array.

    Reads the row lengths unless `total` is given.

    Parameters
    ----------
    padded
        (n, L, ...) for ragged_dim 0; the padded axis is ``ragged_dim + 1``.
    mask
        (n, L) booleans, or integers where 0 means padding: right, left or any padding.
    lengths
        (n,) number of real tokens of each row, for padding on the right; instead of a mask.
    total
        The number of real tokens, where it is known: then nothing waits for a device, and a
        compiled function knows the shape of the result. It is not checked where counting is not
        free.
    ragged_dim
        The axis of one row that is padded.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    Array
        A copy of the real tokens. Offsets are int32 (int64 from 2^31 tokens, or slots of a mask
        that a device counts).

    Raises
    ------
    TypeError
        If the mask holds floating-point numbers, or an argument is not an array.
    ValueError
        If neither or both of mask and lengths are given, or shapes, lengths or the total do not
        fit.

    Examples
    --------
    >>> import numpy as np, scree
    >>> mask = np.asarray([[True, True, False], [False, False, True]])
    >>> scree.from_padded(np.arange(6).reshape(2, 3), mask).values
    array([0, 1, 5])
    """
    call = UnpadCall(padded, mask, lengths, total, ragged_dim)
    arr: Array = _unpad.run_call(call, kernel)
    if call.slots is not None and total is None:
        # The device has counted the mask, and the total is known on the host now.
        arr.layout.max_length = arr.layout.max_length_bound
        arr = Array.from_layout(arr.values, arr.layout, arr.ragged_dim)
    return arr


@record
class UnpadCall:
    """A validated call of `from_padded`.

    Attributes
    ----------
    padded, mask, lengths, total, ragged_dim
        See `from_padded`. A mask is an array of the library and on the device of `padded`.
    layout
        The layout of the result.
    slots
        None, or indices of the real tokens among all slots of the batch, the first `layout.total`
        of which count; see `MarkCall`. Then `layout.total` may wait for the device.
    """

    padded: Any
    mask: Any = None
    lengths: Any = None
    total: int | None = None
    ragged_dim: int = 0
    layout: Layout = field(init=False)
    slots: Any = field(init=False, default=None)

    def __post_init__(self) -> None:
        padded, mask, lengths, total = self.padded, self.mask, self.lengths, self.total
        lib = backend(padded, "padded")
        if padded.ndim < 2:
            raise ValueError(
                f"padded: expected at least two axes, (n, L), got shape {tuple(padded.shape)}"
            )
        of = ", the axes of a padded row"
        axis = 1 + checks.check_integer("ragged_dim", self.ragged_dim, 0, padded.ndim - 1, of)
        if (mask is None) == (lengths is None):
            actual = "neither" if mask is None else "both"
            raise ValueError(f"mask: expected either mask or lengths, got {actual}")
        total = None if total is None else checks.check_integer("total", total, 0)
        shape = int(padded.shape[0]), int(padded.shape[axis])
        if mask is None:
            counts = _check_lengths(lengths, padded, shape, total)
        else:
            mask, counts = _check_mask(mask, padded, shape)
        slots = None
        if isinstance(counts, np.ndarray):
            if total is not None and total != counts.sum():
                raise ValueError(
                    f"total: expected {counts.sum()}, the number of real tokens, got {total}; it may be left out"
                )
            layout = Layout.from_host_lengths(lib, counts, device=lib.device(padded))
        else:
            dtype = index_dtype(lib.xp, math.prod(shape) if total is None else total)
            if mask is None:
                offsets = offsets_from_lengths(counts, dtype)
            else:
                offsets, slots = _mark.run_call(MarkCall(mask, total, dtype))
            layout = Layout(lib, offsets, total, shape[1])
        for name, value in (("mask", mask), ("layout", layout), ("slots", slots)):
            object.__setattr__(self, name, value)

    def result(self, values: Any) -> Array:
        """Return the values of the real tokens on their layout."""
        return Array.from_layout(values, self.layout, self.ragged_dim)


def _check_lengths(lengths: Any, padded: Any, shape: tuple[int, int], total: int | None) -> Any:
    """Return the lengths of the rows, on the host where reading them is free or necessary."""
    host = checks.peek_integers("lengths", lengths)
    if host is None and total is not None:
        lengths = checks.check_integers("lengths", lengths, padded)
        checks.check_shape("lengths", lengths, shape[:1], "one per row")
        return lengths
    host = checks.read_integers("lengths", lengths) if host is None else host
    checks.check_shape("lengths", host, shape[:1], "one per row")
    if host.dtype.kind not in "iu":
        raise TypeError(f"lengths: expected integers, got {host.dtype}")
    if host.size and (host.min() < 0 or host.max() > shape[1]):
        raise ValueError(
            f"lengths: expected lengths in [0, {shape[1]}], got {host.min()} to {host.max()}"
        )
    return host


def _check_mask(mask: Any, padded: Any, shape: tuple[int, int]) -> tuple[Any, Any]:
    """Return the mask as an array like `padded`, and the number of tokens of each row.

    The numbers are None where reading them is not free.
    """
    lib = backend(padded)
    is_native = is_array(mask) and backend(mask) is lib
    is_native = is_native and not lib.on_different_devices(mask, padded)
    host = checks.peek_integers("mask", mask) if is_native else checks.read_integers("mask", mask)
    checked = mask if host is None else host
    if tuple(checked.shape) != shape:
        hint = "; lengths are given as lengths=" if tuple(checked.shape) == shape[:1] else ""
        raise ValueError(
            f"mask: expected shape {shape}, the first axes of padded, got {tuple(checked.shape)}{hint}"
        )
    if host is None:
        is_valid = lib.xp.isdtype(mask.dtype, ("bool", "integral"))
    else:
        is_valid = host.dtype.kind in "biu"
    if not is_valid:
        raise TypeError(
            f"mask: expected booleans or integers, got {checked.dtype}; compare it with 0 first"
        )
    if host is None:
        return mask, None
    booleans = host != 0
    if not is_native:
        mask = lib.from_host(booleans, lib.xp.bool, lib.device(padded))
    return mask, np.count_nonzero(booleans, axis=1)


@record
class MarkCall:
    """The offsets of the rows of a mask that only a device can read, and the slots of its tokens.

    Attributes
    ----------
    mask
        (n, L) booleans or integers; not 0 marks a token.
    total
        Number of tokens, or None where it is not known.
    dtype
        The dtype of the results: (n + 1,) offsets, and (total,) indices among all n L slots, or n L
        where there is no such token. Where `total` is None there may be more entries, which mean
        nothing.
    """

    mask: Any
    total: int | None
    dtype: Any


@define_operation("mark", MarkCall, internal=True)
def _mark(call: MarkCall) -> tuple[Any, Any]:
    lib, (n, longest) = backend(call.mask), call.mask.shape
    xp, device = lib.xp, lib.device(call.mask)
    if call.total is None:
        host = lib.read(call.mask) != 0
        results = host_offsets_of(np.count_nonzero(host, axis=1)), np.flatnonzero(host)
        return tuple(lib.from_host(x, call.dtype, device) for x in results)
    marks = xp.astype(is_nonzero(xp, call.mask), call.dtype)
    counts = xp.cumulative_sum(xp.reshape(marks, (-1,)), dtype=call.dtype)
    zeros = xp.zeros((max(n, 1),), dtype=call.dtype, device=device)
    ends = xp.reshape(counts, (n, longest))[:, -1] if longest else zeros[:n]
    offsets = xp.concat([zeros[:1], ends])
    return offsets, xp.searchsorted(counts, Layout(lib, offsets, call.total).arange(call.total) + 1)


@define_operation("unpad", UnpadCall)
def _unpad(call: UnpadCall) -> Array:
    dim, xp = call.ragged_dim, call.layout.xp
    rows = moveaxis(xp, call.padded, dim + 1, 1)
    flat = xp.reshape(rows, (rows.shape[0] * rows.shape[1], *rows.shape[2:]))
    values = moveaxis(xp, xp.take(flat, _token_slots(call), axis=0), 0, dim)
    return call.result(values)


def _token_slots(call: UnpadCall) -> Any:
    """Return (total,) the index of each token among all slots of the padded batch."""
    layout, longest, mask = call.layout, call.padded.shape[call.ragged_dim + 1], call.mask
    lib, xp, size = layout.backend, layout.xp, layout.num_rows * longest
    slots = call.slots
    if slots is None:
        if mask is None:
            lengths = None if layout.host_offsets is None else np.diff(layout.host_offsets)
            host = None if lengths is None else np.arange(longest) < lengths[:, None]
        else:  # its counts are known
            host = lib.read(mask)
        if host is not None:
            return layout.to_index(np.flatnonzero(host), size)
        rows = widen_index(xp, layout.clipped_segment_ids, size)
        slots = rows * longest + layout.positions
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
    """Return a padded batch and the mask of its real tokens.

    Parameters
    ----------
    arr
        (n, None, ...) ragged array.
    side
        "right" or "left": the side of the padding.
    fill_value
        The value of the padding, a scalar of the array's dtype.
    length
        The padded length; by default the longest row (or `max_length`, where the offsets are not
        read for free). Where the offsets are readable, a row that is longer is an error: nothing is
        cut.
    kernel
        The provider that must run the call; by default the first kernel that accepts.

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
    options = {"side": side, "fill_value": fill_value, "length": length}
    return _pad.run({"arr": arr}, options, kernel)


@record
class PadCall:
    """A validated call of `to_padded`.

    Attributes
    ----------
    arr, side, fill_value
        See `to_padded`.
    length
        The padded length, a Python integer.
    """

    arr: Array
    side: str = "right"
    fill_value: bool | int | float | complex = 0
    length: int | None = None

    def __post_init__(self) -> None:
        layout, length = check_ragged("arr", self.arr).layout, self.length
        length = None if length is None else checks.check_integer("length", length, 0)
        fill_value = checks.check_scalar("fill_value", self.fill_value, self.arr.values)
        if self.side not in ("right", "left"):
            raise ValueError(f"side: expected 'right' or 'left', got {self.side!r}")
        if length is None and layout.max_length is None:
            layout.read_offsets()
        longest = layout.max_length or 0
        if layout.host_offsets is not None:
            longest = layout.max_length_bound
            if length is not None and length < longest:
                raise ValueError(
                    f"length: expected at least {longest}, the longest row, got {length}; cut rows with arr[:, :length]"
                )
        object.__setattr__(self, "length", longest if length is None else length)
        object.__setattr__(self, "fill_value", fill_value)


@define_operation("pad", PadCall)
def _pad(call: PadCall) -> tuple[Any, Any]:
    arr, layout, n = call.arr, call.arr.layout, call.arr.batch_size
    xp, length = layout.xp, call.length or 0
    slots = layout.arange(length)[None, :]
    lengths, starts = layout.lengths[:, None], layout.offsets[:-1][:, None]
    mask = slots < lengths if call.side == "right" else slots >= length - lengths
    tokens = starts + slots if call.side == "right" else starts + lengths - length + slots
    values = moveaxis(xp, arr.values, arr.ragged_dim, 0)
    shape, options = (n, length, *values.shape[1:]), {"dtype": arr.dtype, "device": layout.device}
    if layout.total == 0 or n == 0 or length == 0:
        padded = xp.full(shape, call.fill_value, **options)
        # The sum of no tokens is 0, and belongs to the graph of a library that records one.
        if layout.total == 0 and xp.isdtype(arr.dtype, ("real floating", "complex floating")):
            padded = padded + xp.astype(xp.sum(values), arr.dtype, copy=False)
    else:
        padded = xp.take(values, xp.reshape(layout.clip(tokens), (-1,)), axis=0)
        fill = xp.full((), call.fill_value, **options)
        padded = xp.where(append_axes(xp, mask, len(shape)), xp.reshape(padded, shape), fill)
    return moveaxis(xp, padded, 1, arr.ragged_dim + 1), mask
