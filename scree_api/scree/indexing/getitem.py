"""Indexing: ``arr[...]``.

Keys select rows, slices of rows, tokens or slices within each row, ragged masks and positions, and
elements.

A result whose size depends on the offsets or on a mask reads them: a row, a slice of rows, rows
chosen by an array, `arr[:, a:b]`, `arr[arr > 0]`. An index that keeps the layout, or takes one token
of each row, reads nothing.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from .. import checks
from ..array import Array
from ..backends import backend, is_array
from ..broadcasting import expand_to_tokens, moveaxis
from ..dispatch.operation import define_operation
from ..layout import Layout, has_same_rows, host_offsets_of
from ..ops.row_chunks import slice_rows
from ..ops.segment import append_axes
from ..records import record

FULL = slice(None)


def getitem(arr: Array, key: Any, fill_value: Any = None) -> Any:
    """Return the rows, slices or tokens of an index.

    Where the offsets are not read for free, `fill_value` is the result for a row that is too short
    for ``[:, i]``. Elsewhere such a row raises.
    """
    if isinstance(key, Array):
        checks.check_dense("index", key.values, arr.values)
        return _mask(arr, key) if key.layout.xp.isdtype(key.dtype, "bool") else _positions(arr, key)
    keys = key if isinstance(key, tuple) else (key,)
    if any(k is None for k in keys):
        return _new_axes(arr, keys, fill_value)
    batch, *inner = _expand(arr, keys)
    if _is_integer(batch):
        return _index_axes(arr, _row(arr, operator.index(batch)), inner)
    arr = arr if _is_full(batch) else _rows(arr, batch)
    ragged = inner[arr.ragged_dim]
    arr = _elements(arr, inner)
    if _is_integer(ragged):
        return _token(arr, operator.index(ragged), fill_value)
    if not isinstance(ragged, slice):
        raise TypeError(
            f"index: expected an integer or a slice on the ragged axis, got {type(ragged).__name__}; for several positions of "
            "each row, index with a ragged array of positions"
        )
    return arr if _is_full(ragged) else _slice(arr, ragged)


def _expand(arr: Array, keys: tuple[Any, ...]) -> list[Any]:
    """Return one key per axis, with full slices for the ellipsis and for missing keys."""
    if any(isinstance(k, Array) for k in keys):
        raise TypeError(
            "index: expected a ragged mask or ragged positions alone, as arr[mask], got it among other entries"
        )
    for k in keys:
        if isinstance(k, slice):
            if not all(x is None or hasattr(x, "__index__") for x in (k.start, k.stop, k.step)):
                raise TypeError(f"index: expected integers in a slice, got {k}")
            if k.step is not None and operator.index(k.step) == 0:
                raise ValueError(f"index: expected a slice step other than 0, got {k}")
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    if len(dots) > 1 or len(keys) - len(dots) > arr.ndim:
        raise IndexError(
            f"index: expected at most {arr.ndim} entries and one ellipsis for shape {arr.shape}, got {len(keys)}"
        )
    at = dots[0] if dots else len(keys)
    fill = [FULL] * (arr.ndim - len(keys) + len(dots))
    return [*keys[:at], *fill, *keys[at + 1 :]]


def _is_integer(key: Any) -> bool:
    if isinstance(key, slice | bool):  # some compilers do not support `hasattr` of a slice
        return False
    if isinstance(key, int) or not is_array(key):
        return hasattr(key, "__index__")
    return key.ndim == 0 and bool(backend(key).xp.isdtype(key.dtype, "integral"))


def _is_full(key: Any) -> bool:
    return isinstance(key, slice) and key == FULL


def _check_in_bounds(arr: Array, key: Any, axis: int, size: int) -> None:
    """Raise if an integer is known to be out of bounds; some libraries clip it."""
    key = backend(key).peek(key) if is_array(key) else key
    if key is not None and not -size <= operator.index(key) < size:
        raise IndexError(
            f"index: expected a number in [-{size}, {size}) on axis {axis + 1} of {arr.shape}, got {key}"
        )


def _row(arr: Array, i: int) -> Any:
    n = arr.batch_size
    if not -n <= i < n:
        raise IndexError(f"index: expected a row in [-{n}, {n}), got {i}")
    start, stop = arr.layout.read_offsets()[i % n : i % n + 2].tolist()
    return arr.values[(FULL,) * arr.ragged_dim + (slice(start, stop), ...)]


def _rows(arr: Array, key: Any) -> Array:
    n = arr.batch_size
    if isinstance(key, slice):
        start, stop, step = key.indices(n)
        if step == 1:
            return _row_range(arr, start, max(start, stop))
        return take_rows(arr, np.arange(start, stop, step))
    return take_rows(arr, read_row_index(key, n))


def read_row_index(key: Any, n: int) -> np.ndarray:
    """Return an index of rows (integers or booleans, array or list) as integers in [0, n).

    Reads it.
    """
    if not is_array(key) and not isinstance(key, list):
        raise TypeError(
            f"index: expected an integer, a slice or an array of rows, got {type(key).__name__}"
        )
    rows = checks.read_integers("index", key)
    if rows.dtype.kind == "b":
        if rows.shape != (n,):
            raise IndexError(
                f"index: expected a mask of shape {(n,)}, one entry per row, got {rows.shape}"
            )
        return np.flatnonzero(rows)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise IndexError(
            f"index: expected one axis of integers or booleans, got {rows.dtype} of shape {rows.shape}"
        )
    checks.check_index_bounds("index", rows, n, ", the rows", from_end=True)
    rows = rows.astype(np.int64, copy=False)  # narrow dtypes do not hold n
    return np.where(rows < 0, rows + n, rows)


def _row_range(arr: Array, start: int, stop: int) -> Array:
    host = arr.layout.read_offsets()
    tokens = slice(int(host[start]), int(host[stop]))
    values = arr.values[(FULL,) * arr.ragged_dim + (tokens, ...)]
    return Array.from_layout(values, slice_rows(arr.layout, start, stop), arr.ragged_dim)


def drop_tail(arr: Array) -> Array:
    """Return the array without its tail. Reads the offsets."""
    arr.layout.read_offsets()
    return arr if arr.layout.has_no_tail else _row_range(arr, 0, arr.batch_size)


def take_rows(arr: Array, rows: np.ndarray, kernel: str | None = None) -> Array:
    """Return the rows with the given indices, in their order. Reads the offsets."""
    old = arr.layout
    new = Layout.from_host_lengths(old.backend, np.diff(old.read_offsets())[rows], like=arr.offsets)
    distinct = rows.size < 2 or int(np.bincount(rows).max()) == 1
    starts = old.xp.take(old.offsets[:-1], old.to_index(rows), axis=0)
    return _select.run_call(SelectCall(arr, new, starts, distinct=distinct), kernel)


def _slice(arr: Array, key: slice) -> Array:
    """Return the same slice of each row, with Python's rules for negative and missing bounds."""
    old = arr.layout
    step = 1 if key.step is None else operator.index(key.step)
    step = max(-old.total - 1, min(step, old.total + 1))  # any Python integer fits
    if key == slice(None, None, -1):  # the lengths stay the same
        return select(arr, old, old.offsets[1:] - 1, step, distinct=True)
    lengths = np.diff(old.read_offsets()).astype(np.int64)
    low, high = (0, lengths) if step > 0 else (-1, lengths - 1)

    def bound(x: Any, default: Any) -> Any:
        if x is None:
            return default
        # Beyond all rows, so that any Python integer fits.
        x = max(-old.total - 1, min(operator.index(x), old.total + 1))
        return np.clip(x + lengths if x < 0 else x, low, high)

    first = bound(key.start, np.zeros_like(lengths) if step > 0 else lengths - 1)
    stop = bound(key.stop, lengths if step > 0 else np.full_like(lengths, -1))
    counts = np.maximum(0, -((first - stop) // step))
    new = Layout.from_host_lengths(old.backend, counts, like=arr.offsets)
    return select(arr, new, old.offsets[:-1] + old.to_index(first), step, distinct=True)


def select(arr: Array, new: Layout, starts: Any, step: int = 1, *, distinct: bool = False) -> Array:
    """Return an array on the layout `new`.

    Row i holds the tokens of `arr` at ``starts[i]``, ``starts[i] + step``, ...; `starts` are (n,)
    indices into the values.
    """
    return _select.run_call(SelectCall(arr, new, starts, step, distinct))


@record
class SelectCall:
    """A call of `select`, which serves slices, flips and rows by index.

    Attributes
    ----------
    x
        Ragged array.
    layout
        The layout of the result.
    starts
        (n,) index into the values of `x` of each row's first token.
    step
        Distance of neighboring tokens in the values of `x`.
    distinct
        Whether the caller knows that no token of `x` is taken twice.
    """

    x: Array
    layout: Layout
    starts: Any
    step: int = 1
    distinct: bool = False


@define_operation("select", SelectCall)
def _select(call: SelectCall) -> Array:
    arr, new, xp = call.x, call.layout, call.x.layout.xp
    if new.total == 0:
        values = arr.values[(FULL,) * arr.ragged_dim + (slice(0, 0), ...)]
    else:
        tokens = new.per_token(call.starts) + call.step * new.positions
        values = xp.take(arr.values, arr.layout.clip(tokens), axis=arr.ragged_dim)
    return Array.from_layout(values, new, arr.ragged_dim)


def _token(arr: Array, i: int, fill_value: Any) -> Any:
    """Return (n, ...) token i of each row.

    Where the offsets are not read for free, a row that is too short gives `fill_value`, or NaN.
    """
    layout, xp = arr.layout, arr.layout.xp
    need = i + 1 if i >= 0 else -i
    if layout.host_offsets is not None:
        short = np.flatnonzero(np.diff(layout.host_offsets) < need)
        if short.size:
            names = ", ".join(map(str, short[:5].tolist())) + (" ..." if short.size > 5 else "")
            raise IndexError(
                f"index: expected rows of at least {need} tokens for [:, {i}], got shorter rows: {names}"
            )
    elif fill_value is None and not xp.isdtype(arr.dtype, ("real floating", "complex floating")):
        raise TypeError(
            f"index: [:, {i}] of {arr.dtype} needs offsets that are readable without waiting: a row that is too short has no "
            "NaN value; arr.validate() reads them once"
        )
    values = moveaxis(xp, arr.values, arr.ragged_dim, 0)
    if fill_value is None:
        fill_value = float("nan") if layout.num_rows else 0
    options = {"dtype": arr.dtype, "device": layout.device}
    if 0 in (layout.num_rows, layout.total):
        return xp.full((layout.num_rows, *values.shape[1:]), fill_value, **options)
    tokens = layout.offsets[:-1] + i if i >= 0 else layout.offsets[1:] + i
    out = xp.take(values, layout.clip(tokens), axis=0)
    if layout.host_offsets is None:
        is_long_enough = append_axes(xp, layout.lengths >= need, out.ndim)
        out = xp.where(is_long_enough, out, xp.full((), fill_value, **options))
    return out


def _elements(arr: Array, keys: list[Any]) -> Array:
    """Index the element axes by integers, slices and 1-D arrays; the ragged axis stays."""
    dim = arr.ragged_dim
    keys = [FULL if axis == dim else k for axis, k in enumerate(keys)]
    if all(_is_full(k) for k in keys):
        return arr
    removed = 0
    if dim:  # several index arrays become one axis
        integers = [_is_integer(k) for k in keys]
        arrays = [a for a, k in enumerate(keys) if not integers[a] and not isinstance(k, slice)]
        removed = sum(integers[:dim]) + max(sum(a < dim for a in arrays) - 1, 0)
    return arr.with_values(_index_axes(arr, arr.values, keys), ragged_dim=dim - removed)


def _index_axes(arr: Array, x: Any, keys: list[Any]) -> Any:
    """Return ``x[keys]`` for `x`, the values or a row of `arr`, with one key per axis.

    Several index arrays are broadcast together, as in NumPy, and have to be next to each other.
    Some libraries support neither negative steps nor bounds beyond the axis.
    """
    shape, has_arrays = x.shape, False
    for axis, k in enumerate(keys):
        if isinstance(k, slice):
            if k != FULL and _is_out_of_bounds(k, shape[axis]):
                x, keys[axis] = _slice_axis(arr, x, k, axis)
        elif isinstance(k, list):
            host, has_arrays = checks.read_integers("index", k), True
            keys[axis] = arr.layout.backend.from_host(host, None, arr.layout.device)
        elif type(k) is not int and not _is_integer(k):
            has_arrays = True
        elif type(k) is not int or not -shape[axis] <= k < shape[axis]:
            _check_in_bounds(arr, k, axis, shape[axis])
    if has_arrays:
        x, keys = _take_together(arr, x, keys)
    return x[tuple(keys)]


def _slice_axis(arr: Array, x: Any, key: slice, axis: int) -> tuple[Any, slice]:
    """Slice an axis as far as libraries cannot; return the result and the slice that remains."""
    layout, positions = arr.layout, range(*key.indices(int(x.shape[axis])))
    if positions.step > 0:
        return x, slice(positions.start, max(positions.start, positions.stop), positions.step)
    index = layout.to_index(np.arange(positions.start, positions.stop, positions.step))
    return layout.xp.take(x, index, axis=axis), FULL


def _is_out_of_bounds(key: slice, size: Any) -> bool:
    """Return whether some library does not take the slice of an axis of this size."""
    if key.step is not None and operator.index(key.step) < 0:
        return True
    limit = size if type(size) is int else 2**31 - 1  # a compiler may know no size
    parts = (key.start, key.stop, key.step)
    return any(p is not None and abs(operator.index(p)) > limit for p in parts)


def _take_together(arr: Array, x: Any, keys: list[Any]) -> tuple[Any, list[Any]]:
    """Index `x` by the arrays among the keys, and by integers beside them.

    Return the result and the keys for its axes.
    """
    for k in keys:
        if not (isinstance(k, slice) or _is_integer(k) or (is_array(k) and k.ndim == 1)):
            raise TypeError(
                f"index: expected integers, slices or 1-D arrays on the element axes, got {type(k).__name__}"
            )
    is_slice = [isinstance(k, slice) for k in keys]
    first, last = is_slice.index(False), len(keys) - 1 - is_slice[::-1].index(False)
    if True in is_slice[first:last]:
        raise IndexError(
            f"index: expected index arrays and integers on neighboring axes of {arr.shape}, got a slice between them; "
            "index one axis after the other"
        )
    xp, sizes = arr.layout.xp, [int(n) for n in x.shape[first : last + 1]]
    indices = [
        operator.index(k) % sizes[i]
        if _is_integer(k)
        else normalize_element_index(arr, k, first + i, sizes[i])
        for i, k in enumerate(keys[first : last + 1])
    ]
    lengths = {int(k.shape[0]) for k in indices if not isinstance(k, int)}
    if len(lengths - {1}) > 1:
        raise IndexError(
            f"index: expected index arrays of one length, got lengths {sorted(lengths)}; index one axis after the other "
            "for all combinations"
        )
    index: Any = 0
    for i, size in zip(indices, sizes, strict=True):
        index = index * size + i
    shape = (*x.shape[:first], math.prod(sizes), *x.shape[last + 1 :])
    taken = xp.take(xp.reshape(x, shape), index, axis=first)
    return taken, [*keys[:first], FULL, *keys[last + 1 :]]


def normalize_element_index(arr: Array, key: Any, axis: int, size: int) -> Any:
    """Return a 1-D index (integers or booleans) as integers >= 0.

    It is an index of an axis with `size` entries, of the values or of a row of them.
    """
    lib = arr.layout.backend
    xp, where = lib.xp, f"on axis {axis + 1} of {arr.shape}"
    if backend(key) is not lib or key.dtype == xp.bool:
        host = backend(key).read(key)
        if host.dtype.kind == "b":
            count = host.size
            if host.shape != (size,):
                raise IndexError(f"index: expected a mask of {size} entries {where}, got {count}")
            host = np.flatnonzero(host)
        key = lib.from_host(host, None, arr.layout.device)
    if not xp.isdtype(key.dtype, "integral"):
        raise TypeError(f"index: expected integers or booleans {where}, got {key.dtype}")
    checks.check_index_bounds("index", lib.peek(key), size, f" {where}", from_end=True)
    key = xp.astype(key, arr.offsets.dtype, copy=False)
    return xp.where(key < 0, key + size, key)


def _new_axes(arr: Array, keys: tuple[Any, ...], fill_value: Any) -> Any:
    """Index by the other keys, then insert an element axis of size 1 for every None."""
    xp, plain = arr.layout.xp, tuple(k for k in keys if k is not None)
    out = getitem(arr, plain, fill_value)
    implied = (FULL,) * (arr.ndim - sum(k is not Ellipsis for k in plain))
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    expanded = (*keys[:at], *implied, *keys[at + 1 :])
    # The ellipsis is written out, so that each None has a fixed place.
    is_new = [k is None for k in expanded if k is None or not _is_integer(k)]
    for axis, new in enumerate(is_new):
        if new and not isinstance(out, Array):
            out = xp.expand_dims(out, axis=axis)
        elif new:
            if axis == 0:
                raise ValueError("index: expected no new axis before the batch of a ragged array")
            dim = out.ragged_dim + (axis - 1 <= out.ragged_dim)
            out = out.with_values(xp.expand_dims(out.values, axis=axis - 1), ragged_dim=dim)
    return out


def check_mask(arr: Array, mask: Array) -> None:
    """Raise unless the axes of a ragged mask are the first axes of `arr`."""
    checks.check_dense("index", mask.values, arr.values)
    expected = arr.values.shape[: mask.values.ndim]
    if mask.ndim > arr.ndim or arr.ragged_dim or mask.ragged_dim or mask.values.shape != expected:
        raise IndexError(
            f"index: expected a mask like the first axes of {arr.shape}, got {mask.shape}"
        )
    if has_same_rows(mask.layout, arr.layout) is False:
        raise IndexError("index: expected a mask with the rows of the array, got other lengths")


def _mask(arr: Array, mask: Array) -> Array:
    """Return the tokens, or elements, of each row where the mask is True. Reads the mask."""
    mask.layout.read_offsets()
    layout, lib, offsets = arr.layout, arr.layout.backend, arr.layout.read_offsets()
    check_mask(arr, mask)
    chosen = lib.read(mask.values)[: offsets[-1]]  # without the tail
    per_token = chosen.sum(axis=tuple(range(1, chosen.ndim)))
    lengths = np.diff(host_offsets_of(per_token)[offsets])
    new = Layout.from_host_lengths(lib, lengths, like=arr.offsets)
    size = math.prod(mask.values.shape)
    flat = layout.xp.reshape(arr.values, (size, *arr.values.shape[mask.values.ndim :]))
    index = layout.to_index(np.flatnonzero(chosen), size)
    return Array.from_layout(layout.xp.take(flat, index, axis=0), new)


def positions_to_tokens(name: str, index: Array, arr: Array, positions: Any) -> Any:
    """Return the token of `arr` for each position in the rows of `index`.

    Negative positions count from the end.
    """
    layout, xp = arr.layout, arr.layout.xp
    start, length = (expand_to_tokens(index, x) for x in index.layout.starts_and_lengths(layout))
    is_outside, mask = (positions < -length) | (positions >= length), index.layout.token_mask
    # The offsets may have a narrower dtype, which takes less memory.
    positions = xp.astype(positions, layout.offsets.dtype, copy=False)
    positions = xp.where(positions < 0, positions + length, positions)
    is_outside = is_outside if mask is None else is_outside & expand_to_tokens(index, mask)
    if layout.backend.peek(xp.any(is_outside)):  # None if the answer would have to wait
        raise IndexError(
            f"{name}: expected positions within the rows, got a position outside of its row"
        )
    return layout.clip(start + positions)


def _positions(arr: Array, index: Array) -> Array:
    """Return the tokens of each row at the positions in the same row of `index`, (n, None)."""
    n, shape = arr.batch_size, index.shape
    if len(shape) != 2 or shape[0] != n:
        raise IndexError(f"index: expected positions ({n}, None), got shape {shape}")
    positions = checks.check_integers("index", index.values, arr.values)
    if 0 in (arr.total_length, index.total_length):
        if index.total_length:
            raise IndexError(
                "index: expected positions within the rows, got some for rows that are all empty"
            )
        return select(arr, index.layout, index.layout.offsets[:-1])
    tokens = positions_to_tokens("index", index, arr, positions)
    values = arr.layout.xp.take(arr.values, tokens, axis=arr.ragged_dim)
    return Array.from_layout(values, index.layout, arr.ragged_dim)
