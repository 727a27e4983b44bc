"""Making ragged arrays and taking them apart: pack, offsets, lengths, segment ids, padded batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from .array import Array
from .backends import backend, is_array
from .checks import integer, integers, scalar
from .fit import moved, ragged
from .layout import Layout, counter
from .registry import declare, run
from .segments import spread


def pack(arrays: Sequence[Any], *, ragged_dim: int = 0) -> Array:
    """Join arrays of different lengths into one ragged array, a row each.

    Parameters
    ----------
    arrays
        At least one array; all of one library, dtype and device, and of one shape but for axis `ragged_dim`.
    ragged_dim
        The axis along which the lengths differ.

    Returns
    -------
    Array
        Rows in the order given, int32 offsets (int64 from 2^31 tokens on).

    Raises
    ------
    TypeError
        If libraries or dtypes are mixed; nothing is promoted.
    ValueError
        If there are no arrays, or shapes or devices do not fit.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.pack([np.zeros((4, 8)), np.zeros((0, 8)), np.zeros((7, 8))]).offsets
    array([ 0,  4,  4, 11], dtype=int32)
    """
    if not hasattr(arrays, "__iter__"):
        raise TypeError(f"arrays: expected a sequence of arrays, got {type(arrays).__name__}")
    arrays = list(arrays)
    if not arrays:
        raise ValueError("arrays: expected at least one array, got none; an empty batch is from_lengths(values, [])")
    first = arrays[0]
    lib = backend(first, "arrays[0]")
    if first.ndim == 0:
        raise ValueError("arrays[0]: expected at least one axis, got a 0-d array")
    integer("ragged_dim", ragged_dim, 0, first.ndim, ", the axes of arrays[0]")
    if len(set(map(type, arrays))) > 1:
        _agree("library", "convert it first", TypeError, [backend(x).name if is_array(x) else type(x).__name__ for x in arrays])
    if len({x.dtype for x in arrays}) > 1:
        _agree("dtype", "convert it first", TypeError, [x.dtype for x in arrays])
    if len({x.ndim for x in arrays}) > 1:  # PyTorch joins (0,) to anything
        _agree("number of axes", "reshape it first", ValueError, [x.ndim for x in arrays])
    try:
        values = run("pack", PackCall(arrays, ragged_dim))
    except Exception:  # the library says that something does not fit; name what
        _agree("device", "move it first", ValueError, [lib.device(x) for x in arrays])
        shapes = [tuple(x.shape) for x in arrays]
        rest = [s[:ragged_dim] + s[ragged_dim + 1 :] for s in shapes]
        _agree(f"shape without axis {ragged_dim}", "only the axis ragged_dim may differ", ValueError, rest)
        raise
    lengths = np.asarray([x.shape[ragged_dim] for x in arrays])
    return Array._of(values, Layout.from_host(lib, lengths, device=lib.device(first)), ragged_dim)


def _agree(what: str, remedy: str, error: type[Exception], found: list[Any]) -> None:
    """Raise unless all entries are equal; name the first that is not."""
    for i, x in enumerate(found):
        if x is not found[0] and x != found[0]:
            raise error(f"arrays[{i}]: expected the {what} of arrays[0], {found[0]}, got {x}; {remedy}")


@dataclass(frozen=True, slots=True)
class PackCall:
    """Join dense arrays of one library along `ragged_dim`."""

    arrays: list[Any]
    ragged_dim: int = 0


@declare("pack", PackCall)
def _join(call: PackCall) -> Any:
    return backend(call.arrays[0]).xp.concat(call.arrays, axis=call.ragged_dim)


def unpack(arr: Array) -> list[Any]:
    """The rows as a list of dense arrays, views where the library has them. Reads the offsets.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.unpack(scree.from_lengths(np.arange(4), [1, 3]))
    [array([0]), array([1, 2, 3])]
    """
    bounds = ragged("arr", arr).layout.read().tolist()
    before = (slice(None),) * arr.ragged_dim
    return [arr.values[(*before, slice(a, b), ...)] for a, b in pairwise(bounds)]


def from_offsets(values: Any, offsets: Any, *, ragged_dim: int = 0, max_length: int | None = None) -> Array:
    """A ragged array on given values and offsets (FlashAttention's ``cu_seqlens``); nothing is copied.

    See `Array` for the parameters.

    Examples
    --------
    >>> import numpy as np, scree
    >>> values, cu_seqlens = np.zeros((5, 2)), np.asarray([0, 2, 5], dtype=np.int32)
    >>> arr = scree.from_cu_seqlens(values, cu_seqlens, max_length=3)
    >>> arr.values is values and arr.offsets is cu_seqlens
    True
    """
    return Array(values, offsets, ragged_dim, max_length)


from_cu_seqlens = from_offsets


def from_lengths(values: Any, lengths: Any, *, ragged_dim: int = 0, max_length: int | None = None) -> Array:
    """A ragged array of rows of given lengths.

    Parameters
    ----------
    values
        All rows end to end along `ragged_dim`; not copied.
    lengths
        (n,) integers, an array or a list.
    ragged_dim, max_length
        See `Array`.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.from_lengths(np.arange(5), [2, 0, 3]).offsets
    array([0, 2, 2, 5], dtype=int32)
    """
    lib = backend(values, "values")
    known = _on_host("lengths", lengths)
    if known is not None:
        if known.ndim != 1 or known.dtype.kind not in "iu":
            raise TypeError(f"lengths: expected one axis of integers, got {known.dtype} of shape {known.shape}")
        if (known < 0).any():
            raise ValueError(f"lengths: expected no negative length, got {known.min()} at {int(known.argmin())}")
        total, given = _tokens(values, ragged_dim), int(known.sum())
        if given != total:
            raise ValueError(f"lengths: expected a sum of {total}, the length of values along ragged_dim, got {given}")
        arr = Array(values, Layout.from_host(lib, known, device=lib.device(values)).offsets, ragged_dim, max_length)
        arr.layout.learn(known)
        return arr if max_length is None else arr.validate()
    lengths = integers("lengths", lengths, values)
    if lengths.ndim != 1:
        raise TypeError(f"lengths: expected one axis of integers, got shape {tuple(lengths.shape)}")
    offsets = run("offsets", OffsetsCall(lengths, counter(lib.xp, _tokens(values, ragged_dim), lengths)))
    return Array(values, offsets, ragged_dim, max_length)


@dataclass(frozen=True, slots=True)
class OffsetsCall:
    """Offsets of a dtype from `lengths`, (n,): (n + 1,), 0 and the sums of all lengths so far."""

    lengths: Any
    dtype: Any


@declare("offsets", OffsetsCall)
def _add_up(call: OffsetsCall) -> Any:
    lib = backend(call.lengths)
    zero = lib.xp.zeros((1,), dtype=call.dtype, device=lib.device(call.lengths))
    return lib.xp.concat([zero, lib.xp.cumulative_sum(call.lengths, dtype=call.dtype)])


def from_segment_ids(
    values: Any, segment_ids: Any, num_segments: int | None = None, *, ragged_dim: int = 0, max_length: int | None = None
) -> Array:
    """A ragged array of tokens that carry the number of their row.

    Parameters
    ----------
    values
        All rows end to end along `ragged_dim`; not copied.
    segment_ids
        (total,) row of each token, never falling; sort tokens first where it does (see `scree.group`).
    num_segments
        Number of rows; by default the last id plus one, which reads the ids.
    ragged_dim, max_length
        See `Array`.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.from_segment_ids(np.arange(4), np.asarray([0, 0, 2, 2]), 4).offsets
    array([0, 2, 2, 4, 4], dtype=int32)
    """
    lib, total = backend(values, "values"), _tokens(values, ragged_dim)
    segment_ids = integers("segment_ids", segment_ids, values)
    if num_segments is not None:
        num_segments = integer("num_segments", num_segments, 0)
    if tuple(segment_ids.shape) != (total,):
        raise ValueError(f"segment_ids: expected one id for each of {total} tokens, got shape {tuple(segment_ids.shape)}")
    host = lib.peek(segment_ids) if num_segments is not None else lib.read(segment_ids)
    if host is not None and host.size:
        falls = np.nonzero(host[1:] < host[:-1])[0]
        if falls.size:
            raise ValueError(
                f"segment_ids: expected ids that never fall, got {host[falls[0]]} before {host[falls[0] + 1]} at "
                f"{int(falls[0])}; scree.group sorts tokens by id"
            )
        if host[0] < 0 or (num_segments is not None and host[-1] >= num_segments):
            end = "" if num_segments is None else f" and below num_segments, {num_segments}"
            raise ValueError(f"segment_ids: expected ids of at least 0{end}, got {host[0]} to {host[-1]}")
    if num_segments is None:
        assert host is not None
        num_segments = int(host[-1]) + 1 if host.size else 0
    bounds = lib.xp.arange(num_segments + 1, dtype=segment_ids.dtype, device=lib.device(values))
    offsets = lib.xp.astype(lib.xp.searchsorted(segment_ids, bounds), counter(lib.xp, total))
    return Array(values, offsets, ragged_dim, max_length)


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

    Examples
    --------
    >>> import numpy as np, scree
    >>> mask = np.asarray([[True, True, False], [False, False, True]])
    >>> scree.from_padded(np.arange(6).reshape(2, 3), mask).values
    array([0, 1, 5])
    """
    call = UnpadCall.make(padded, mask, lengths=lengths, total=total, ragged_dim=ragged_dim)
    return Array._of(run("unpad", call, kernel), call.layout, call.ragged_dim)


@dataclass(frozen=True, slots=True)
class UnpadCall:
    """Take the tokens of the rows of `layout` out of `x`, a padded batch, whose axis ``ragged_dim + 1`` is the padded one.

    They stand where `mask`, (n, L), is not 0; without a mask at the beginning of each row. Their values come out. `slots` are
    theirs as of `MarkCall`, where the mask was not counted before.
    """

    x: Any
    layout: Layout
    mask: Any = None
    ragged_dim: int = 0
    slots: Any = None

    @classmethod
    def make(
        cls, padded: Any, mask: Any = None, *, lengths: Any = None, total: int | None = None, ragged_dim: int = 0
    ) -> UnpadCall:
        """Check the arguments of `from_padded` and bring them into one form."""
        lib = backend(padded, "padded")
        if padded.ndim < 2:
            raise ValueError(f"padded: expected at least two axes, (n, L), got shape {tuple(padded.shape)}")
        axis = 1 + integer("ragged_dim", ragged_dim, 0, padded.ndim - 1, ", the axes of a padded row")
        if (mask is None) == (lengths is None):
            raise ValueError("mask: expected either mask or lengths, got " + ("neither" if mask is None else "both"))
        total = None if total is None else integer("total", total, 0)
        shape = int(padded.shape[0]), int(padded.shape[axis])
        if mask is None:
            counts = _lengths(lengths, padded, shape, total)
        else:
            mask, counts = _marked(mask, padded, shape, total)
        if isinstance(counts, np.ndarray):
            if total is not None and total != counts.sum():
                raise ValueError(f"total: expected {counts.sum()}, the number of real tokens, got {total}; it may be left out")
            return cls(padded, Layout.from_host(lib, counts, device=lib.device(padded)), mask, axis - 1)
        assert total is not None
        dtype, slots = counter(lib.xp, total), None
        if mask is None:
            offsets = run("offsets", OffsetsCall(counts, dtype))
        else:
            offsets, slots = run("mark", MarkCall(mask, total, dtype))
        return cls(padded, Layout(lib, offsets, total, shape[1]), mask, axis - 1, slots)


def _lengths(lengths: Any, padded: Any, shape: tuple[int, int], total: int | None) -> Any:
    """The lengths of the rows, on the host where they are readable for free, or must be read."""
    known = _on_host("lengths", lengths)
    if known is None and total is not None:
        lengths = integers("lengths", lengths, padded)
        if tuple(lengths.shape) != shape[:1]:
            raise ValueError(f"lengths: expected {shape[0]} integers, one a row, got shape {tuple(lengths.shape)}")
        return lengths
    known = _read("lengths", lengths) if known is None else known
    if known.shape != shape[:1] or known.dtype.kind not in "iu":
        raise ValueError(f"lengths: expected {shape[0]} integers, one a row, got {known.dtype} of shape {known.shape}")
    if known.size and (known.min() < 0 or known.max() > shape[1]):
        raise ValueError(f"lengths: expected lengths in [0, {shape[1]}], got {known.min()} to {known.max()}")
    return known


def _marked(mask: Any, padded: Any, shape: tuple[int, int], total: int | None) -> tuple[Any, Any]:
    """The mask as an array of the library and on the device of `padded`, and how many tokens of each row it marks.

    None where these are not readable for free, and need not be read.
    """
    lib = backend(padded)
    here = is_array(mask) and backend(mask) is lib and not lib.apart(mask, padded)
    seen = _on_host("mask", mask)
    if seen is None and not here:
        seen = _read("mask", mask)
    found = mask if seen is None else seen
    if tuple(found.shape) != shape:
        hint = "; lengths are given as lengths=" if tuple(found.shape) == shape[:1] else ""
        raise ValueError(f"mask: expected shape {shape}, the first axes of padded, got {tuple(found.shape)}{hint}")
    if not (lib.xp.isdtype(mask.dtype, ("bool", "integral")) if seen is None else seen.dtype.kind in "biu"):
        raise TypeError(f"mask: expected booleans or integers, got {found.dtype}; compare it with 0 first")
    if seen is not None:
        real = seen != 0
        return mask if here else lib.from_host(real, lib.xp.bool, lib.device(padded)), np.count_nonzero(real, axis=1)
    if total is not None:
        return mask, None
    return mask, lib.read(lib.xp.sum(lib.xp.astype(_real(mask), lib.xp.int32), axis=1, dtype=lib.xp.int32))


def _real(mask: Any) -> Any:
    """A mask as booleans."""
    return mask if backend(mask).xp.isdtype(mask.dtype, "bool") else mask != 0


@dataclass(frozen=True, slots=True)
class MarkCall:
    """Count what `mask`, (n, L), marks with something other than 0: `total` tokens.

    The offsets of the rows, (n + 1,), come out, of a dtype; and for each token, (total,), the number of its slot among all n L,
    or one beyond these where there is no such token.
    """

    mask: Any
    total: int
    dtype: Any


@declare("mark", MarkCall)
def _count(call: MarkCall) -> tuple[Any, Any]:
    lib, (n, longest) = backend(call.mask), call.mask.shape
    xp, device = lib.xp, lib.device(call.mask)
    marked = xp.cumulative_sum(xp.reshape(xp.astype(_real(call.mask), call.dtype), (-1,)), dtype=call.dtype)
    ends = xp.reshape(marked, (n, longest))[:, -1] if longest else xp.zeros((n,), dtype=call.dtype, device=device)
    offsets = xp.concat([xp.zeros((1,), dtype=call.dtype, device=device), ends])
    return offsets, xp.searchsorted(marked, Layout(lib, offsets, call.total).arange(call.total) + 1)


@declare("unpad", UnpadCall.make)
def _take_marked(call: UnpadCall) -> Any:
    x, dim, xp = call.x, call.ragged_dim, call.layout.xp
    rows = moved(xp, x, dim + 1, 1)
    values = xp.take(xp.reshape(rows, (rows.shape[0] * rows.shape[1], *rows.shape[2:])), _slots(call), axis=0)
    return moved(xp, values, 0, dim)


def _slots(call: UnpadCall) -> Any:
    """(total,) where the tokens stand among all slots of the padded batch."""
    layout, longest, mask, slots = call.layout, call.x.shape[call.ragged_dim + 1], call.mask, call.slots
    lib, xp, size = layout.backend, layout.xp, call.layout.num_rows * call.x.shape[call.ragged_dim + 1]
    if slots is None:
        if mask is None:
            real = None if layout.host is None else np.arange(longest) < np.diff(layout.host)[:, None]
        else:  # its counts are known
            real = lib.peek(mask)
            real = lib.read(mask) if real is None else real
        if real is not None:
            return layout.put(np.flatnonzero(real), size)
        slots = xp.astype(layout.rows, counter(xp, size, layout.rows), copy=False) * longest + layout.positions
    return xp.where(slots < size, slots, max(size - 1, 0))


def to_padded(
    arr: Array, *, side: str = "right", fill_value: Any = 0, length: int | None = None, kernel: str | None = None
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

    Examples
    --------
    >>> import numpy as np, scree
    >>> padded, mask = scree.to_padded(scree.from_lengths(np.arange(1, 5), [1, 3]), side="left", fill_value=-1)
    >>> padded
    array([[-1, -1,  1],
           [ 2,  3,  4]])
    """
    padded, mask = run("pad", PadCall.make(arr, side=side, fill_value=fill_value, length=length), kernel)
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
    def make(cls, arr: Array, *, side: str = "right", fill_value: Any = 0, length: int | None = None) -> PadCall:
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
    arr, length, layout, xp, n = call.x, call.length, call.x.layout, call.x.layout.xp, call.x.batch_size
    slots = layout.arange(length)[None, :]
    lengths, starts = layout.lengths[:, None], layout.offsets[:-1][:, None]
    mask = slots < lengths if call.side == "right" else slots >= length - lengths
    tokens = starts + slots if call.side == "right" else starts + lengths - length + slots
    values = moved(xp, arr.values, arr.ragged_dim, 0)
    fill = xp.full((), call.fill_value, dtype=arr.dtype, device=layout.device)
    if layout.total == 0 or n == 0 or length == 0:
        padded = xp.full((n, length, *values.shape[1:]), call.fill_value, dtype=arr.dtype, device=layout.device)
    else:
        padded = xp.take(values, xp.reshape(layout.clip(tokens), (-1,)), axis=0)
        padded = xp.reshape(padded, (n, length, *values.shape[1:]))
        padded = xp.where(spread(xp, mask, padded.ndim), padded, fill)
    return moved(xp, padded, 1, arr.ragged_dim + 1), mask


def _tokens(values: Any, ragged_dim: int) -> int:
    return int(values.shape[integer("ragged_dim", ragged_dim, 0, values.ndim, ", the axes of values")])


def _on_host(name: str, x: Any) -> np.ndarray | None:
    """A list or array of integers as NumPy sees it where that is free, else None."""
    return backend(x).peek(x) if is_array(x) else _listed(name, x)


def _read(name: str, x: Any) -> np.ndarray:
    return backend(x).read(x) if is_array(x) else _listed(name, x)


def _listed(name: str, x: Any) -> np.ndarray:
    if not isinstance(x, Sequence) or isinstance(x, str):
        raise TypeError(f"{name}: expected an array or a list of numbers, got {type(x).__name__}")
    try:
        return np.asarray(x, dtype=None if len(x) else np.int64)  # an empty list is one of integers
    except ValueError as error:
        raise TypeError(f"{name}: expected a list of numbers, got one of lists of different lengths") from error
