"""`arr[...]`: rows, slices of rows, and slices or single tokens within each row.

A result whose size depends on the offsets needs them on the host: rows chosen by an array, `arr[:, a:b]`. Single rows need
two entries. What keeps the layout, or takes one token of each row, reads nothing.
"""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from .array import Array
from .backends import backend, is_array
from .layout import Layout
from .segments import spread

FULL = slice(None)


def getitem(arr: Array, key: Any) -> Any:
    """The rows, slices or tokens that `key` names; see `Array`."""
    batch, *inner = _expand(arr, key if isinstance(key, tuple) else (key,))
    if _is_integer(batch):
        return _row(arr, operator.index(batch))[tuple(inner)]
    arr = arr if _is_full(batch) else _rows(arr, batch)
    ragged = inner[arr.ragged_dim]
    arr = _elements(arr, inner)
    if _is_integer(ragged):
        return _token(arr, operator.index(ragged))
    if not isinstance(ragged, slice):
        raise TypeError(f"index: expected an integer or a slice on the ragged axis, got {type(ragged).__name__}")
    return arr if _is_full(ragged) else _slice(arr, ragged)


def _expand(arr: Array, keys: tuple[Any, ...]) -> list[Any]:
    """One key an axis: the ellipsis and missing keys as full slices."""
    if any(k is None or isinstance(k, Array) for k in keys):
        raise TypeError("index: a new axis or a ragged index is not supported; index arr.values and use with_values")
    dots = [i for i, k in enumerate(keys) if k is Ellipsis]
    if len(dots) > 1 or len(keys) - len(dots) > arr.ndim:
        raise IndexError(f"index: expected at most {arr.ndim} entries and one ellipsis for shape {arr.shape}, got {len(keys)}")
    at = dots[0] if dots else len(keys)
    fill = [FULL] * (arr.ndim - len(keys) + len(dots))
    return [*keys[:at], *fill, *keys[at + 1 :]]


def _is_integer(key: Any) -> bool:
    return hasattr(key, "__index__") and not isinstance(key, bool) and getattr(key, "ndim", 0) == 0


def _is_full(key: Any) -> bool:
    return isinstance(key, slice) and key == FULL


def _row(arr: Array, i: int) -> Any:
    n = arr.batch_size
    if not -n <= i < n:
        raise IndexError(f"index: expected a row in [-{n}, {n}), got {i}")
    start, stop = arr.layout.read()[i % n : i % n + 2].tolist()
    return arr.values[(FULL,) * arr.ragged_dim + (slice(start, stop), ...)]


def _rows(arr: Array, key: Any) -> Array:
    n = arr.batch_size
    if isinstance(key, slice):
        start, stop, step = key.indices(n)
        if step == 1:
            return _row_range(arr, start, max(start, stop))
        return take_rows(arr, np.arange(start, stop, step))
    if not is_array(key) and not isinstance(key, list):
        raise TypeError(f"index: expected an integer, a slice or an array of rows, got {type(key).__name__}")
    rows = backend(key).read(key) if is_array(key) else np.asarray(key, dtype=None if key else np.int64)
    if rows.dtype.kind == "b":
        if rows.shape != (n,):
            raise IndexError(f"index: expected a mask of shape {(n,)}, one entry a row, got {rows.shape}")
        return take_rows(arr, np.flatnonzero(rows))
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise IndexError(f"index: expected one axis of integers or booleans, got {rows.dtype} of shape {rows.shape}")
    if ((rows < -n) | (rows >= n)).any():
        raise IndexError(f"index: expected rows in [-{n}, {n}), got {rows[(rows < -n) | (rows >= n)][0]}")
    return take_rows(arr, np.where(rows < 0, rows + n, rows))


def _row_range(arr: Array, start: int, stop: int) -> Array:
    host = arr.layout.read()[start : stop + 1]
    first, last = int(host[0]), int(host[-1])
    offsets = arr.offsets[start : stop + 1]
    rows = Layout(arr.layout.backend, offsets - first if first else offsets, last - first, None, host - host[0])
    return Array._of(arr.values[(FULL,) * arr.ragged_dim + (slice(first, last), ...)], rows, arr.ragged_dim)


def take_rows(arr: Array, rows: np.ndarray) -> Array:
    """The rows of the given numbers, in that order, as a new array. Reads the offsets."""
    old, xp = arr.layout, arr.layout.xp
    new = Layout.from_host(old.backend, np.diff(old.read())[rows], like=arr.offsets)
    index = xp.asarray(rows, dtype=arr.offsets.dtype, device=old.backend.device(arr.offsets))
    return select(arr, new, xp.take(old.offsets[:-1], index, axis=0))


def _slice(arr: Array, key: slice) -> Array:
    """Each row by the same slice, with Python's rules for negative and missing bounds."""
    old, xp = arr.layout, arr.layout.xp
    step = 1 if key.step is None else operator.index(key.step)
    if step == 0:
        raise ValueError("index: expected a slice step other than 0")
    if key == slice(None, None, -1):  # every length stays: nothing to read
        return select(arr, old, old.offsets[1:] - 1, step)
    lengths = np.diff(old.read())
    low, high = (0, lengths) if step > 0 else (-1, lengths - 1)

    def bound(x: Any, missing: Any) -> Any:
        return missing if x is None else np.clip(np.where(x < 0, x + lengths, x), low, high)

    first = bound(key.start, np.zeros_like(lengths) if step > 0 else lengths - 1)
    stop = bound(key.stop, lengths if step > 0 else np.full_like(lengths, -1))
    new = Layout.from_host(old.backend, np.maximum(0, -((first - stop) // step)), like=arr.offsets)
    starts = xp.asarray(first, dtype=arr.offsets.dtype, device=old.backend.device(arr.offsets))
    return select(arr, new, old.offsets[:-1] + starts, step)


def select(arr: Array, new: Layout, starts: Any, step: int = 1) -> Array:
    """Rows of the layout `new`, whose tokens stand at `starts`, `starts + step` ... in the values of `arr`."""
    xp = arr.layout.xp
    if new.total == 0:
        return Array._of(arr.values[(FULL,) * arr.ragged_dim + (slice(0, 0), ...)], new, arr.ragged_dim)
    tokens = xp.take(starts, new.rows, axis=0) + step * new.positions
    return Array._of(xp.take(arr.values, arr.layout.clip(tokens), axis=arr.ragged_dim), new, arr.ragged_dim)


def _token(arr: Array, i: int) -> Any:
    """(n, ...) token i of each row. Where the offsets are not read for free, a row that is too short gives NaN."""
    layout, xp, dim = arr.layout, arr.layout.xp, arr.ragged_dim
    need = i + 1 if i >= 0 else -i
    if layout.host is not None:
        short = np.flatnonzero(np.diff(layout.host) < need)
        if short.size:
            names = ", ".join(map(str, short[:5].tolist())) + (" ..." if short.size > 5 else "")
            raise IndexError(f"index: expected rows of at least {need} tokens for [:, {i}], got shorter rows: {names}")
    elif not xp.isdtype(arr.dtype, ("real floating", "complex floating")):
        raise TypeError(
            f"index: [:, {i}] of {arr.dtype} needs offsets that are readable without waiting: a row that is too short has no "
            "NaN to give"
        )
    values = xp.moveaxis(arr.values, dim, 0) if dim else arr.values
    if layout.num_rows == 0 or layout.total == 0:
        return xp.zeros((layout.num_rows, *values.shape[1:]), dtype=arr.dtype, device=arr.device)
    tokens = layout.offsets[:-1] + i if i >= 0 else layout.offsets[1:] + i
    found = xp.take(values, layout.clip(tokens), axis=0)
    if layout.host is None:
        nan = xp.full((), float("nan"), dtype=arr.dtype, device=arr.device)
        found = xp.where(spread(xp, layout.lengths >= need, found.ndim), found, nan)
    return found


def _elements(arr: Array, keys: list[Any]) -> Array:
    """The element axes by integers and slices; the ragged axis stays."""
    keys = [FULL if axis == arr.ragged_dim else k for axis, k in enumerate(keys)]
    if all(_is_full(k) for k in keys):
        return arr
    if not all(isinstance(k, slice) or _is_integer(k) for k in keys):
        raise TypeError("index: expected integers and slices on the element axes; use xp.take for arrays")
    gone = sum(_is_integer(k) for k in keys[: arr.ragged_dim])
    return arr.with_values(arr.values[tuple(keys)], ragged_dim=arr.ragged_dim - gone)
