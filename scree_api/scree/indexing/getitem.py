"""`arr[...]`: rows, slices of rows, tokens or slices within each row, ragged masks and positions, elements.

A result whose size depends on the offsets or on a mask reads them: rows chosen by an array, `arr[:, a:b]`, `arr[arr > 0]`.
Single rows need two entries. What keeps the layout, or takes one token of each row, reads nothing.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import checks
from ..array import Array
from ..backends import backend, is_array
from ..broadcasting import by_token, moved
from ..dispatch.registry import declare, run
from ..layout import Layout
from ..ops.segment import spread

FULL = slice(None)


def getitem(arr: Array, key: Any, missing: Any = None) -> Any:
    """The rows, slices or tokens that `key` names; see `Array`. `missing` is what `_token` gives for a row that is too short."""
    if isinstance(key, Array):
        checks.dense("index", key.values, arr.values)
        return _mask(arr, key) if key.layout.xp.isdtype(key.dtype, "bool") else _positions(arr, key)
    keys = key if isinstance(key, tuple) else (key,)
    if any(k is None for k in keys):
        return _new_axes(arr, keys, missing)
    batch, *inner = _expand(arr, keys)
    if _is_integer(batch):
        row = _row(arr, operator.index(batch))
        _in_bounds(arr, row.shape, inner)
        return row[tuple(inner)]
    arr = arr if _is_full(batch) else _rows(arr, batch)
    ragged = inner[arr.ragged_dim]
    arr = _elements(arr, inner)
    if _is_integer(ragged):
        return _token(arr, operator.index(ragged), missing)
    if not isinstance(ragged, slice):
        raise TypeError(
            f"index: expected an integer or a slice on the ragged axis, got {type(ragged).__name__}; for some positions of each "
            "row, index with a ragged array of them"
        )
    return arr if _is_full(ragged) else _slice(arr, ragged)


def _expand(arr: Array, keys: tuple[Any, ...]) -> list[Any]:
    """One key an axis: the ellipsis and missing keys as full slices."""
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
    if isinstance(key, slice | bool):  # not every compiler asks a slice whether it has `__index__`
        return False
    if isinstance(key, int) or not is_array(key):
        return hasattr(key, "__index__")
    return key.ndim == 0 and backend(key).xp.isdtype(key.dtype, "integral")  # type: ignore[no-any-return]


def _is_full(key: Any) -> bool:
    return isinstance(key, slice) and key == FULL


def _in_bounds(arr: Array, shape: tuple[int, ...], keys: list[Any]) -> None:
    """Raise unless the integers among the keys lie within the axes behind the batch; some libraries would clip them."""
    for axis, (k, size) in enumerate(zip(keys, shape, strict=True), start=1):
        if isinstance(k, checks.INTEGERS) and not -size <= k < size:
            raise IndexError(
                f"index: expected a number in [-{size}, {size}) on axis {axis} of {arr.shape}, got {k}"
            )


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
    return take_rows(arr, row_numbers(key, n))


def row_numbers(key: Any, n: int) -> np.ndarray:
    """The numbers >= 0 of the rows, of `n`, that an array or a list of numbers or of booleans names. Reads it."""
    if not is_array(key) and not isinstance(key, list):
        raise TypeError(
            f"index: expected an integer, a slice or an array of rows, got {type(key).__name__}"
        )
    rows = (
        backend(key).read(key)
        if is_array(key)
        else np.asarray(key, dtype=None if key else np.int64)
    )
    if rows.dtype.kind == "b":
        if rows.shape != (n,):
            raise IndexError(
                f"index: expected a mask of shape {(n,)}, one entry a row, got {rows.shape}"
            )
        return np.flatnonzero(rows)
    if rows.ndim != 1 or rows.dtype.kind not in "iu":
        raise IndexError(
            f"index: expected one axis of integers or booleans, got {rows.dtype} of shape {rows.shape}"
        )
    if ((rows < -n) | (rows >= n)).any():
        raise IndexError(
            f"index: expected rows in [-{n}, {n}), got {rows[(rows < -n) | (rows >= n)][0]}"
        )
    return np.where(rows < 0, rows + n, rows)


def _row_range(arr: Array, start: int, stop: int) -> Array:
    host = arr.layout.read()[start : stop + 1]
    first, last = int(host[0]), int(host[-1])
    offsets = arr.offsets[start : stop + 1]
    rows = Layout(
        arr.layout.backend,
        offsets - first if first else offsets,
        last - first,
        None,
        host - host[0],
    )
    return Array._of(
        arr.values[(FULL,) * arr.ragged_dim + (slice(first, last), ...)], rows, arr.ragged_dim
    )


def trimmed(arr: Array) -> Array:
    """The array without the tokens behind its last row. Reads the offsets."""
    arr.layout.read()
    return arr if arr.layout.full else _row_range(arr, 0, arr.batch_size)


def take_rows(arr: Array, rows: np.ndarray, kernel: str | None = None) -> Array:
    """The rows of the given numbers, in that order, as a new array. Reads the offsets."""
    old = arr.layout
    new = Layout.from_host(old.backend, np.diff(old.read())[rows], like=arr.offsets)
    distinct = rows.size < 2 or int(np.bincount(rows).max()) == 1
    return select(
        arr,
        new,
        old.xp.take(old.offsets[:-1], old.put(rows), axis=0),
        distinct=distinct,
        kernel=kernel,
    )


def _slice(arr: Array, key: slice) -> Array:
    """Each row by the same slice, with Python's rules for negative and missing bounds."""
    old = arr.layout
    step = 1 if key.step is None else operator.index(key.step)
    if key == slice(None, None, -1):  # every length stays: nothing to read
        return select(arr, old, old.offsets[1:] - 1, step, distinct=True)
    lengths = np.diff(old.read())
    low, high = (0, lengths) if step > 0 else (-1, lengths - 1)

    def bound(x: Any, missing: Any) -> Any:
        return missing if x is None else np.clip(np.where(x < 0, x + lengths, x), low, high)

    first = bound(key.start, np.zeros_like(lengths) if step > 0 else lengths - 1)
    stop = bound(key.stop, lengths if step > 0 else np.full_like(lengths, -1))
    new = Layout.from_host(old.backend, np.maximum(0, -((first - stop) // step)), like=arr.offsets)
    return select(arr, new, old.offsets[:-1] + old.put(first), step, distinct=True)


def select(
    arr: Array,
    new: Layout,
    starts: Any,
    step: int = 1,
    *,
    distinct: bool = False,
    kernel: str | None = None,
) -> Array:
    """Rows of the layout `new`, whose tokens stand at `starts`, `starts + step` ... in the values of `arr`."""
    return Array._of(
        run("select", SelectCall(arr, new, starts, step, distinct), kernel), new, arr.ragged_dim
    )


@dataclass(frozen=True, slots=True)
class SelectCall:
    """Rows of `layout`, whose tokens stand at `starts`, (n,), `starts + step` ... in the values of `x`; the values come out.

    `distinct` says that no token of `x` is taken twice.
    """

    x: Array
    layout: Layout
    starts: Any
    step: int = 1
    distinct: bool = False


@declare("select", SelectCall)
def _take_pieces(call: SelectCall) -> Any:
    arr, new, xp = call.x, call.layout, call.x.layout.xp
    if new.total == 0:
        return arr.values[(FULL,) * arr.ragged_dim + (slice(0, 0), ...)]
    tokens = xp.take(call.starts, new.rows, axis=0) + call.step * new.positions
    return xp.take(arr.values, arr.layout.clip(tokens), axis=arr.ragged_dim)


def _token(arr: Array, i: int, missing: Any) -> Any:
    """(n, ...) token i of each row. Where the offsets are not read for free, a row that is too short gives `missing`, or NaN."""
    layout, xp = arr.layout, arr.layout.xp
    need = i + 1 if i >= 0 else -i
    if layout.host is not None:
        short = np.flatnonzero(np.diff(layout.host) < need)
        if short.size:
            names = ", ".join(map(str, short[:5].tolist())) + (" ..." if short.size > 5 else "")
            raise IndexError(
                f"index: expected rows of at least {need} tokens for [:, {i}], got shorter rows: {names}"
            )
    elif missing is None and not xp.isdtype(arr.dtype, ("real floating", "complex floating")):
        raise TypeError(
            f"index: [:, {i}] of {arr.dtype} needs offsets that are readable without waiting: a row that is too short has no "
            "NaN to give; arr.validate() reads them once"
        )
    values = moved(xp, arr.values, arr.ragged_dim, 0)
    if layout.num_rows == 0:  # nothing to ask for, of any dtype
        return xp.zeros((0, *values.shape[1:]), dtype=arr.dtype, device=layout.device)
    missing = float("nan") if missing is None else missing
    if layout.total == 0:
        return xp.full(
            (layout.num_rows, *values.shape[1:]), missing, dtype=arr.dtype, device=layout.device
        )
    tokens = layout.offsets[:-1] + i if i >= 0 else layout.offsets[1:] + i
    found = xp.take(values, layout.clip(tokens), axis=0)
    if layout.host is None:
        fill = xp.full((), missing, dtype=arr.dtype, device=layout.device)
        found = xp.where(spread(xp, layout.lengths >= need, found.ndim), found, fill)
    return found


def _elements(arr: Array, keys: list[Any]) -> Array:
    """The element axes by integers and slices; the ragged axis stays."""
    keys = [FULL if axis == arr.ragged_dim else k for axis, k in enumerate(keys)]
    if all(_is_full(k) for k in keys):
        return arr
    _in_bounds(arr, arr.values.shape, keys)
    for axis, k in enumerate(keys):  # one array an axis, each on its own, as slices are
        if isinstance(k, slice) or _is_integer(k):
            continue
        if is_array(k) and k.ndim == 1:
            places = entries(arr, k, axis)
            arr, keys[axis] = (
                arr.with_values(arr.layout.xp.take(arr.values, places, axis=axis)),
                FULL,
            )
        else:
            raise TypeError(
                f"index: expected integers, slices or 1-D arrays on the element axes, got {type(k).__name__}"
            )
    gone = sum(_is_integer(k) for k in keys[: arr.ragged_dim])
    return arr.with_values(arr.values[tuple(keys)], ragged_dim=arr.ragged_dim - gone)


def entries(arr: Array, key: Any, axis: int) -> Any:
    """The numbers >= 0 of the entries that a 1-D array of integers or booleans names on an axis of the values."""
    lib, size = arr.layout.backend, int(arr.values.shape[axis])
    xp, where = lib.xp, f"on axis {axis + 1} of {arr.shape}"
    if backend(key) is not lib or key.dtype == xp.bool:
        known = backend(key).read(key)
        if known.dtype.kind == "b":
            if known.shape != (size,):
                raise IndexError(
                    f"index: expected a mask of {size} entries {where}, got {known.shape[0]}"
                )
            known = np.flatnonzero(known)
        key = lib.from_host(known, None, arr.layout.device)
    if not xp.isdtype(key.dtype, "integral"):
        raise TypeError(f"index: expected integers or booleans {where}, got {key.dtype}")
    seen = lib.peek(key)
    if seen is not None and seen.size and (seen.min() < -size or seen.max() >= size):
        raise IndexError(
            f"index: expected numbers in [-{size}, {size}) {where}, got {seen.min()} to {seen.max()}"
        )
    key = xp.astype(key, arr.offsets.dtype, copy=False)
    return xp.where(key < 0, key + size, key)


def _new_axes(arr: Array, keys: tuple[Any, ...], missing: Any) -> Any:
    """The other entries first, then an element axis of size 1 for every None."""
    plain = tuple(k for k in keys if k is not None)
    found = getitem(arr, plain, missing)
    missing = (FULL,) * (arr.ndim - sum(k is not Ellipsis for k in plain))
    at = next((i for i, k in enumerate(keys) if k is Ellipsis), len(keys))
    whole = (*keys[:at], *missing, *keys[at + 1 :])
    kept = [k is None for k in whole if k is None or not _is_integer(k)]
    for axis, new in enumerate(kept):
        if new and not isinstance(found, Array):
            found = arr.layout.xp.expand_dims(found, axis=axis)
        elif new:
            if axis == 0:
                raise ValueError(
                    "index: a new axis cannot stand before the batch of a ragged array"
                )
            dim = found.ragged_dim + (axis - 1 <= found.ragged_dim)
            found = found.with_values(
                arr.layout.xp.expand_dims(found.values, axis=axis - 1), ragged_dim=dim
            )
    return found


def _mask(arr: Array, mask: Array) -> Array:
    """The tokens, or elements, of each row where the mask holds. Reads the mask."""
    if (
        mask.ndim > arr.ndim
        or arr.ragged_dim
        or mask.ragged_dim
        or mask.values.shape != arr.values.shape[: mask.values.ndim]
    ):
        raise IndexError(
            f"index: expected a mask like the first axes of {arr.shape}, got {mask.shape}"
        )
    if mask.layout is not arr.layout and not np.array_equal(mask.layout.read(), arr.layout.read()):
        raise IndexError("index: expected a mask with the rows of the array, got other lengths")
    xp, lib = arr.layout.xp, arr.layout.backend
    real = lib.read(mask.values)
    counts = np.concatenate(
        [np.zeros(1, np.int64), np.cumsum(real.sum(axis=tuple(range(1, real.ndim))))]
    )
    rows = Layout.from_host(lib, np.diff(counts[arr.layout.read()]), like=arr.offsets)
    flat = xp.reshape(arr.values, (real.size, *arr.values.shape[mask.values.ndim :]))
    return Array._of(xp.take(flat, arr.layout.put(np.flatnonzero(real), real.size), axis=0), rows)


def any_outside(index: Array, place: Any, length: Any) -> bool:
    """Whether it is known that one of the places, values on the rows of `index`, is not in [0, length)."""
    outside, real = (place < 0) | (place >= length), index.layout.real
    outside = outside if real is None else outside & by_token(index, real)
    return bool(index.layout.backend.peek(index.layout.xp.any(outside)))


def _positions(arr: Array, index: Array) -> Array:
    """Of each row the tokens at the positions in the same row of `index`, (n, None)."""
    if index.ndim != 2 or index.batch_size != arr.batch_size:
        raise IndexError(
            f"index: expected positions ({arr.batch_size}, None), got shape {index.shape}"
        )
    place, layout, xp = (
        checks.integers("index", index.values, arr.values),
        arr.layout,
        arr.layout.xp,
    )
    if 0 in (arr.total_length, index.total_length):
        if index.total_length:
            raise IndexError(
                "index: expected positions within the rows, got some for rows that are all empty"
            )
        return select(arr, index.layout, index.layout.offsets[:-1])
    start, length = (
        xp.take(n, index.layout.rows, axis=0) for n in (layout.offsets[:-1], layout.lengths)
    )
    place = xp.where(place < 0, place + length, place)
    if any_outside(index, place, length):
        raise IndexError(
            "index: expected positions within the rows, got one that is outside of its row"
        )
    return Array._of(
        xp.take(arr.values, layout.clip(start + place), axis=arr.ragged_dim),
        index.layout,
        arr.ragged_dim,
    )
