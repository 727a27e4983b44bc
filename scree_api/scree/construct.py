"""Construction of ragged arrays from rows, offsets, lengths and segment ids, and their unpacking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from itertools import pairwise
from typing import Any

import numpy as np

from . import checks
from .array import Array
from .backends import backend, is_array
from .broadcasting import check_ragged
from .dispatch.operation import define_operation
from .layout import Layout, index_dtype
from .records import record

__all__ = ["from_cu_seqlens", "from_lengths", "from_offsets", "from_segment_ids", "pack", "unpack"]


def pack(arrays: Sequence[Any], *, ragged_dim: int = 0) -> Array:
    """Pack arrays of different lengths into one ragged array, one row per array.

    Parameters
    ----------
    arrays
        At least one array; all of one library, dtype and device, and of one shape except for axis
        `ragged_dim`.
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
    call = PackCall(list(arrays), ragged_dim)
    try:
        return _pack.run_call(call)
    except Exception:
        # Every library has an error of its own. Devices and shapes are compared only here, to save
        # time.
        _check_equal_devices_and_shapes(call)
        raise


@record
class PackCall:
    """A validated call of `pack`.

    Attributes
    ----------
    arrays
        Dense arrays of one library and dtype, at least one.
    ragged_dim
        The axis along which the lengths differ.
    layout
        The layout of the result.
    """

    arrays: list[Any]
    ragged_dim: int = 0
    layout: Layout = field(init=False)

    def __post_init__(self) -> None:
        arrays = self.arrays
        if not arrays:
            raise ValueError(
                "arrays: expected at least one array, got none; an empty batch is from_lengths(values, [])"
            )
        first = arrays[0]
        if isinstance(first, list | tuple | int | float | complex):
            raise TypeError(
                f"arrays[0]: expected a dense array, got {type(first).__name__}; scree.from_lists takes lists"
            )
        lib = backend(first, "arrays[0]")
        if first.ndim == 0:
            raise ValueError("arrays[0]: expected at least one axis, got a 0-d array")
        checks.check_integer(
            "ragged_dim", self.ragged_dim, 0, first.ndim, ", the axes of arrays[0]"
        )
        if len(set(map(type, arrays))) > 1:
            names = [backend(x).name if is_array(x) else type(x).__name__ for x in arrays]
            _check_equal("library", "convert it first", TypeError, names)
        if len({x.dtype for x in arrays}) > 1:
            _check_equal("dtype", "convert it first", TypeError, [x.dtype for x in arrays])
        if len({x.ndim for x in arrays}) > 1:  # PyTorch joins (0,) to anything
            _check_equal("number of axes", "reshape it first", ValueError, [x.ndim for x in arrays])
        lengths = np.asarray([x.shape[self.ragged_dim] for x in arrays])
        layout = Layout.from_host_lengths(lib, lengths, device=lib.device(first))
        object.__setattr__(self, "layout", layout)


@define_operation("pack", PackCall)
def _pack(call: PackCall) -> Array:
    values = call.layout.xp.concat(call.arrays, axis=call.ragged_dim)
    return Array.from_layout(values, call.layout, call.ragged_dim)


def _check_equal_devices_and_shapes(call: PackCall) -> None:
    arrays, dim = call.arrays, call.ragged_dim
    lib = backend(arrays[0])
    _check_equal("device", "move it first", ValueError, [lib.device(x) for x in arrays])
    shapes = [(*x.shape[:dim], *x.shape[dim + 1 :]) for x in arrays]
    remedy = "only the axis ragged_dim may differ"
    _check_equal(f"shape without axis {dim}", remedy, ValueError, shapes)


def _check_equal(quantity: str, remedy: str, error: type[Exception], entries: list[Any]) -> None:
    """Raise unless all entries are equal; name the first that differs."""
    for i, x in enumerate(entries):
        if x is not entries[0] and x != entries[0]:
            raise error(
                f"arrays[{i}]: expected the {quantity} of arrays[0], {entries[0]}, got {x}; {remedy}"
            )


def unpack(arr: Array) -> list[Any]:
    """Return the rows as a list of dense arrays, views where the library has them.

    Reads the offsets.

    Parameters
    ----------
    arr
        Ragged array.

    Returns
    -------
    list
        n arrays (length, ...), with the axis at `ragged_dim`.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array, or under a trace, which cannot read the offsets.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.unpack(scree.from_lengths(np.arange(4), [1, 3]))
    [array([0]), array([1, 2, 3])]
    """
    bounds = check_ragged("arr", arr).layout.read_offsets().tolist()
    before = (slice(None),) * arr.ragged_dim
    return [arr.values[(*before, slice(a, b), ...)] for a, b in pairwise(bounds)]


def from_offsets(
    values: Any, offsets: Any, *, ragged_dim: int = 0, max_length: int | None = None
) -> Array:
    """Return a ragged array on values and offsets (FlashAttention's ``cu_seqlens``).

    Nothing is copied.

    Parameters
    ----------
    values, offsets, ragged_dim, max_length
        See `Array`.

    Returns
    -------
    Array
        On the same memory.

    Raises
    ------
    TypeError, ValueError
        See `Array`.

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


def from_lengths(
    values: Any, lengths: Any, *, ragged_dim: int = 0, max_length: int | None = None
) -> Array:
    """Return a ragged array from values and row lengths.

    Parameters
    ----------
    values
        All rows end to end along `ragged_dim`; not copied.
    lengths
        (n,) integers, an array or a list.
    ragged_dim, max_length
        See `Array`.

    Returns
    -------
    Array
        On the memory of `values`. Offsets are int32 (int64 from 2^31 tokens), or have the dtype of
        lengths that are not read.

    Raises
    ------
    TypeError
        If the lengths are not one axis of integers.
    ValueError
        If they are negative, or their sum is not the number of tokens, where reading them is free.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.from_lengths(np.arange(5), [2, 0, 3]).offsets
    array([0, 2, 2, 5], dtype=int32)
    """
    lib = backend(values, "values")
    host = checks.peek_integers("lengths", lengths)
    if host is not None:
        if host.ndim != 1 or host.dtype.kind not in "iu":
            raise TypeError(
                f"lengths: expected one axis of integers, got {host.dtype} of shape {host.shape}"
            )
        if (host < 0).any():
            raise ValueError(
                f"lengths: expected no negative length, got {host.min()} at {int(host.argmin())}"
            )
        total, length_sum = _tokens(values, ragged_dim), int(host.sum())
        if length_sum != total:
            raise ValueError(
                f"lengths: expected a sum of {total}, the length of values along ragged_dim, got {length_sum}"
            )
        layout = Layout.from_host_lengths(lib, host, device=lib.device(values))
        arr = Array(values, layout.offsets, ragged_dim, max_length)
        arr.layout.set_host_lengths(host)
        return arr if max_length is None else arr.validate()
    lengths = checks.check_integers("lengths", lengths, values)
    if lengths.ndim != 1:
        raise TypeError(f"lengths: expected one axis of integers, got shape {tuple(lengths.shape)}")
    dtype = index_dtype(lib.xp, _tokens(values, ragged_dim), lengths)
    offsets = offsets_from_lengths(lengths, dtype)
    return Array(values, offsets, ragged_dim, max_length)


@record
class OffsetsCall:
    """The offsets of rows whose lengths only a device knows.

    Attributes
    ----------
    lengths
        (n,) integers.
    dtype
        The dtype of the result, (n + 1,): 0 and the running sum of the lengths.
    """

    lengths: Any
    dtype: Any


def offsets_from_lengths(lengths: Any, dtype: Any) -> Any:
    """Return (n + 1,) offsets from lengths on a device, without reading them."""
    return _offsets.run_call(OffsetsCall(lengths, dtype))


@define_operation("offsets", OffsetsCall, internal=True)
def _offsets(call: OffsetsCall) -> Any:
    lib = backend(call.lengths)
    zero = lib.xp.zeros((1,), dtype=call.dtype, device=lib.device(call.lengths))
    return lib.xp.concat([zero, lib.xp.cumulative_sum(call.lengths, dtype=call.dtype)])


def from_segment_ids(
    values: Any,
    segment_ids: Any,
    num_segments: int | None = None,
    *,
    ragged_dim: int = 0,
    max_length: int | None = None,
) -> Array:
    """Return a ragged array from values and the row of each token.

    Parameters
    ----------
    values
        All rows end to end along `ragged_dim`; not copied.
    segment_ids
        (total,) integers that never fall, the row of each token; see `scree.group` for unsorted
        tokens.
    num_segments
        Number of rows; by default the last id plus one, for which the ids are read.
    ragged_dim, max_length
        See `Array`.

    Returns
    -------
    Array
        On the memory of `values`.

    Raises
    ------
    TypeError
        If the ids are not integers.
    ValueError
        If there is not one id per token, or ids fall or are out of bounds, where reading them is
        free.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.from_segment_ids(np.arange(4), np.asarray([0, 0, 2, 2]), 4).offsets
    array([0, 2, 2, 4, 4], dtype=int32)
    """
    lib, total = backend(values, "values"), _tokens(values, ragged_dim)
    segment_ids = checks.check_integers("segment_ids", segment_ids, values)
    if num_segments is not None:
        num_segments = checks.check_integer("num_segments", num_segments, 0)
    checks.check_shape("segment_ids", segment_ids, (total,), "one id per token")
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
            raise ValueError(
                f"segment_ids: expected ids of at least 0{end}, got {host[0]} to {host[-1]}"
            )
    if num_segments is None:
        assert host is not None
        num_segments = int(host[-1]) + 1 if host.size else 0
    bounds = lib.xp.arange(num_segments + 1, dtype=segment_ids.dtype, device=lib.device(values))
    offsets = lib.xp.astype(lib.xp.searchsorted(segment_ids, bounds), index_dtype(lib.xp, total))
    return Array(values, offsets, ragged_dim, max_length)


def _tokens(values: Any, ragged_dim: int) -> int:
    axis = checks.check_integer("ragged_dim", ragged_dim, 0, values.ndim, ", the axes of values")
    return int(values.shape[axis])
