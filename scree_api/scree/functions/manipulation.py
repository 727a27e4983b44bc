"""Manipulation of axes, rows and tokens.

Concat, stack, reshape, flip, roll, repeat, tile and others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np

from .. import checks
from ..array import Array
from ..broadcasting import (
    broadcast_operand,
    check_ragged,
    check_same_rows,
    check_shared_layout,
    is_broadcastable,
    normalize_axes,
    normalize_axis,
)
from ..construct import unpack
from ..dispatch.operation import define_operation
from ..indexing.getitem import select, take_rows
from ..layout import Layout
from .binding import Standard, implements


@implements("concat", ragged="list")
def concat(arrays: Any, /, *, axis: int | None = 0, std: Standard) -> Any:
    """Concatenate batches (axis 0), rows pairwise (the ragged axis), or element axes."""
    first = _check_all_ragged(arrays)
    axis, dim = normalize_axis(std.name, axis, first.ndim, batch=True), first.ragged_dim
    if axis == dim + 1:
        return _join.run({f"x{i}": x for i, x in enumerate(arrays)}, {})
    _check_same_axes(arrays, but=axis)
    if axis == 0:
        return _concat_batches(arrays, std.function([x.values for x in arrays], axis=dim))
    check_shared_layout(std.name, arrays)
    return first.with_values(std.function([x.values for x in arrays], axis=axis - 1))


def _check_all_ragged(arrays: Any) -> Array:
    """Return the first array; raise unless all are ragged."""
    for i, x in enumerate(arrays):
        check_ragged(f"arrays[{i}]", x)
    return arrays[0]  # type: ignore[no-any-return]


def _check_same_axes(arrays: list[Array], but: int) -> None:
    """Raise unless all arrays have the axes and element axes of the first, except one."""
    first = arrays[0]
    if any(x.ragged_dim != first.ragged_dim or x.ndim != first.ndim for x in arrays):
        raise ValueError(
            f"arrays: expected the same axes in all, got shapes {', '.join(str(x.shape) for x in arrays)}"
        )
    _check_same_elements(arrays, but)


def _check_same_elements(arrays: list[Array], but: int | None = None) -> None:
    """Raise unless all arrays have the library and the element axes of the first, except one."""
    first, shape = arrays[0], arrays[0].shape
    for i, x in enumerate(arrays):
        checks.check_dense(f"arrays[{i}]", x.values, first.values)
        sizes = enumerate(zip(x.shape, shape, strict=True))
        if any(a != b for axis, (a, b) in sizes if axis not in (0, but)):
            raise ValueError(
                f"arrays[{i}]: expected the element axes of arrays[0], {shape}, got {x.shape}"
            )


def _concat_batches(arrays: list[Array], values: Any) -> Array:
    """Return all rows of all arrays, whose values are concatenated in `values`."""
    layouts, dim = [x.layout for x in arrays], arrays[0].ragged_dim
    first, total = layouts[0], sum(layout.total for layout in layouts)
    has_gaps = not all(layout.has_no_tail for layout in layouts[:-1])
    parts = [layout.offsets_as_index(total) for layout in layouts]
    ends, starts, end, base = [parts[0][:1]], [], 0, 0
    for layout, offsets in zip(layouts, parts, strict=True):
        ends.append(offsets[1:] + end)
        starts.append(offsets[:-1] + base)
        base += layout.total
        end = end + offsets[-1:] if has_gaps else base
    bounds = [layout.max_length for layout in layouts]
    longest = None if None in bounds else max(bounds)  # type: ignore[type-var]
    new = Layout(first.backend, first.xp.concat(ends), total, longest)
    concatenated = Array.from_layout(values, new, dim)
    return select(concatenated, new, first.xp.concat(starts)) if has_gaps else concatenated


def joined_layout(layouts: list[Layout]) -> Layout:
    """Return the layout whose row i is row i of each layout, concatenated."""
    if any(layout.num_rows != layouts[0].num_rows for layout in layouts):
        counts = ", ".join(str(layout.num_rows) for layout in layouts)
        raise ValueError(f"arrays: expected the same number of rows, got {counts}")

    def join(a: Layout, b: Layout) -> Layout:
        joined: Layout = a.cached("joined", partial(_join_pair, a, b), pair=b)
        return joined

    return reduce(join, layouts)


def _join_pair(a: Layout, b: Layout) -> Layout:
    total = a.total + b.total
    longest = None
    if a.max_length is not None and b.max_length is not None:
        longest = a.max_length + b.max_length
    offsets = a.offsets_as_index(total) + b.offsets_as_index(total)
    return Layout(a.backend, offsets, total, longest)


@dataclass(frozen=True, slots=True, init=False)
class JoinCall:
    """A validated call of `concat` along the ragged axis.

    Attributes
    ----------
    arrays
        Ragged arrays with as many rows.
    layout
        The layout of the result.
    """

    arrays: list[Array]
    layout: Layout

    def __init__(self, **arrays: Array) -> None:
        checked = [*arrays.values()]
        _check_same_axes(checked, but=checked[0].ragged_dim + 1)
        object.__setattr__(self, "arrays", checked)
        object.__setattr__(self, "layout", joined_layout([x.layout for x in checked]))


@define_operation("join", JoinCall)
def _join(call: JoinCall) -> Array:
    xp, new, dim = call.layout.xp, call.layout, call.arrays[0].ragged_dim
    tokens, positions, base = None, new.positions, 0
    for layout in (x.layout for x in call.arrays):
        in_array = positions + new.per_token(layout.offsets[:-1]) + base
        tokens = in_array if tokens is None else xp.where(positions >= 0, in_array, tokens)
        positions, base = positions - new.per_token(layout.lengths), base + layout.total
    if not all(x.layout.has_no_tail for x in call.arrays):
        tokens = new.clip(tokens)  # tokens of the tail may be out of bounds
    values = xp.take(xp.concat([x.values for x in call.arrays], axis=dim), tokens, axis=dim)
    return Array.from_layout(values, new, dim)


@implements("stack", ragged="list")
def stack(arrays: Any, /, *, axis: int = 0, std: Standard) -> Any:
    """Stack ragged arrays of one layout along a new element axis."""
    first = _check_all_ragged(arrays)
    axis = normalize_axis(std.name, axis, first.ndim + 1, batch=True)
    if axis == 0:
        raise ValueError(
            "axis: the batch is axis 0 of a ragged array; use concat, or stack along another axis"
        )
    check_shared_layout(std.name, arrays)
    _check_same_elements(arrays)
    out = std.function([x.values for x in arrays], axis=axis - 1)
    return first.with_values(out, ragged_dim=first.ragged_dim + (axis - 1 <= first.ragged_dim))


def _values_axes(name: str, x: Array, axis: Any, ndim: int | None = None) -> tuple[int, ...]:
    """Return axes of the values for axes of the array; raise for the batch axis."""
    axes = normalize_axes(name, axis, x.ndim if ndim is None else ndim)
    if axes and axes[0] == 0:
        raise ValueError(
            f"axis: {name} cannot move the batch axis of a ragged array, got axis {axis}"
        )
    return tuple(a - 1 for a in axes)


@implements("expand_dims")
def expand_dims(x: Array, /, *, axis: int | tuple[int, ...] = 0, std: Standard) -> Array:
    """Insert element axes of size 1."""
    count = len(axis) if isinstance(axis, tuple) else 1
    new = _values_axes(std.name, x, axis, x.ndim + count)
    old = [a for a in range(x.values.ndim + count) if a not in new]
    values = std.function(x.values, axis=new if isinstance(axis, tuple) else new[0])
    return x.with_values(values, ragged_dim=old[x.ragged_dim])


@implements("squeeze")
def squeeze(x: Array, /, axis: Any, *, std: Standard) -> Array:
    """Remove element axes of size 1."""
    axes = _values_axes(std.name, x, axis)
    if x.ragged_dim in axes or any(x.values.shape[a] != 1 for a in axes):
        raise ValueError(f"axis: expected element axes of size 1, got {axis} for shape {x.shape}")
    removed = sum(a < x.ragged_dim for a in axes)
    return x.with_values(std.function(x.values, axis=axes), ragged_dim=x.ragged_dim - removed)


@implements("permute_dims")
def permute_dims(x: Array, /, axes: tuple[int, ...], *, std: Standard) -> Array:
    """Permute the axes after the batch."""
    if not isinstance(axes, tuple | list):
        raise TypeError(f"axes: expected a tuple of {x.ndim} axes, got {axes!r}")
    order = tuple(
        int(a) % x.ndim if isinstance(a, int | np.integer) and -x.ndim <= a < x.ndim else -1
        for a in axes
    )
    if sorted(order) != list(range(x.ndim)) or order[0] != 0:
        raise ValueError(
            f"axes: expected 0, the batch, and then the others of {x.ndim} axes in any order, got {axes}"
        )
    order = tuple(a - 1 for a in order[1:])
    return x.with_values(std.function(x.values, order), ragged_dim=order.index(x.ragged_dim))


@implements("moveaxis")
def moveaxis(x: Array, source: Any, destination: Any, /, *, std: Standard) -> Array:
    """Move axes after the batch."""
    pairs = [a if isinstance(a, tuple) else (a,) for a in (source, destination)]
    if len(pairs[0]) != len(pairs[1]):
        raise ValueError(
            f"destination: expected as many axes as source, {source}, got {destination}"
        )
    sources, destinations = ([_values_axes(std.name, x, a)[0] for a in axes] for axes in pairs)
    if len(set(sources)) < len(sources) or len(set(destinations)) < len(destinations):
        raise ValueError(f"source: expected every axis once, got {source} to {destination}")
    order = [a for a in range(x.values.ndim) if a not in sources]
    for at, a in sorted(zip(destinations, sources, strict=True)):
        order.insert(at, a)
    values = std.xp.permute_dims(x.values, tuple(order))
    return x.with_values(values, ragged_dim=order.index(x.ragged_dim))


@implements("matrix_transpose")
def matrix_transpose(x: Array, /, *, std: Standard) -> Array:
    """Swap the last two axes."""
    return x.mT


def _check_shape(shape: Any) -> tuple[Any, ...]:
    if not isinstance(shape, tuple | list):
        raise TypeError(f"shape: expected a tuple (n, ..., None, ...), got {shape!r}")
    return tuple(shape)


@implements("reshape")
def reshape(x: Array, /, shape: Any, *, copy: bool | None = None, std: Standard) -> Array:
    """Reshape the element axes to ``(n, None, ...)``; None marks the ragged axis."""
    shape = _check_shape(shape)
    if len(shape) < 2 or (shape[0] != x.batch_size and shape[0] != -1) or shape.count(None) != 1:
        raise ValueError(
            f"shape: expected ({x.batch_size}, ..., None, ...) with None for the ragged axis, got {shape}"
        )
    dim = shape.index(None) - 1
    if math.prod(shape[1 : dim + 1]) != math.prod(x.values.shape[: x.ragged_dim]):
        raise ValueError(
            f"shape: expected the elements before the ragged axis of {x.shape} to stay, got {shape}"
        )
    inner, size = shape[dim + 2 :], math.prod(x.values.shape[x.ragged_dim + 1 :])
    known = math.prod([n for n in inner if n != -1])
    if inner.count(-1) > 1 or (known == 0 or size % known if -1 in inner else size != known):
        raise ValueError(
            f"shape: expected {size} elements after the ragged axis of {x.shape}, got {shape}"
        )
    # Without tokens the library could not infer -1.
    inner = tuple(size // known if n == -1 else n for n in inner)
    values = std.function(x.values, (*shape[1 : dim + 1], x.total_length, *inner), copy=copy)
    return x.with_values(values, ragged_dim=dim)


@implements("broadcast_to")
def broadcast_to(x: Array, /, shape: Any, *, std: Standard) -> Array:
    """Broadcast element axes of size 1, to ``(n, None, ...)``."""
    shape = _check_shape(shape)
    if len(shape) != x.ndim or shape[0] != x.batch_size or shape[x.ragged_dim + 1] is not None:
        raise ValueError(
            f"shape: expected {x.ndim} axes, {x.batch_size} rows and None for the ragged axis, got {shape}"
        )
    target = tuple(x.total_length if n is None else n for n in shape[1:])
    if not is_broadcastable(tuple(x.values.shape), target):
        raise ValueError(
            f"shape: expected element axes of {x.shape}, axes of size 1 broadcast, got {shape}"
        )
    return x.with_values(std.function(x.values, target))


@implements("broadcast_arrays", ragged="all")
def broadcast_arrays(*arrays: Any, std: Standard) -> Any:
    """Broadcast all arrays to the layout of the ragged arrays among them, with common element axes."""
    ragged = [x for x in arrays if isinstance(x, Array)]
    if not ragged:
        return std.function(*arrays)
    first = check_shared_layout(std.name, ragged)
    operands = [
        x.values if isinstance(x, Array) else broadcast_operand(std.name, x, first) for x in arrays
    ]
    return [first.with_values(x) for x in std.function(first.values, *operands)[1:]]


@implements("unstack")
def unstack(x: Array, /, *, axis: int = 0, std: Standard) -> tuple[Any, ...]:
    """Return the rows as dense arrays (axis 0), or the entries of an element axis as ragged arrays."""
    axis = normalize_axis(std.name, axis, x.ndim, batch=True)
    if axis == 0:
        return tuple(unpack(x))
    if axis == x.ragged_dim + 1:
        raise ValueError(
            "axis: the ragged axis has no common number of entries to unstack; use axis 0 for the rows"
        )
    before = (slice(None),) * axis
    return tuple(x[(*before, i)] for i in range(x.values.shape[axis - 1]))


@implements("flip")
def flip(x: Array, /, *, axis: Any = None, std: Standard) -> Array:
    """Reverse each row (the ragged axis), the order of the rows (axis 0), or element axes."""
    axes = normalize_axes(std.name, axis, x.ndim)
    inner = tuple(a - 1 for a in axes if a not in (0, x.ragged_dim + 1))
    x = x.with_values(std.function(x.values, axis=inner)) if inner else x
    x = select(x, x.layout, x.offsets[1:] - 1, -1) if x.ragged_dim + 1 in axes else x
    return take_rows(x, np.arange(x.batch_size - 1, -1, -1)) if 0 in axes else x


@implements("roll")
def roll(x: Array, /, shift: Any, *, axis: Any = None, std: Standard) -> Array:
    """Roll tokens within their row, rows in the batch, or entries of element axes."""
    axes, shifts = ((a if isinstance(a, tuple) else (a,)) for a in (axis, shift))
    shifts = shifts * len(axes) if len(shifts) == 1 else shifts
    if len(shifts) != len(axes):
        raise ValueError(f"shift: expected one for each axis of {axis}, got {shift}")
    for by, a in zip(shifts, axes, strict=True):
        by = checks.check_integer("shift", by)
        a = normalize_axis(std.name, a, x.ndim, batch=True)
        if a == 0:
            x = take_rows(x, np.roll(np.arange(x.batch_size), by))
        elif a != x.ragged_dim + 1:
            x = x.with_values(std.function(x.values, by, axis=a - 1))
        elif x.total_length:
            x = _take_modulo(x, x.layout, x.layout.positions - by)
    return x


def _take_modulo(x: Array, layout: Layout, positions: Any) -> Array:
    """Return rows of a layout with the tokens of `x` at some positions.

    The positions are taken modulo the length of the rows of `x`.
    """
    xp = layout.xp
    starts, lengths = layout.starts_and_lengths(x.layout)
    tokens = x.layout.clip(starts + positions % xp.where(lengths > 0, lengths, 1))
    return Array.from_layout(xp.take(x.values, tokens, axis=x.ragged_dim), layout, x.ragged_dim)


@implements("repeat")
def repeat(x: Array, repeats: Any, /, *, axis: int | None = None, std: Standard) -> Array:
    """Repeat every token (the ragged axis), row (axis 0) or element; tokens may have ragged counts."""
    axis, dim = normalize_axis(std.name, axis, x.ndim, batch=True), x.ragged_dim
    if isinstance(repeats, bool | float | int | np.integer):
        repeats = checks.check_integer("repeats", repeats, 0)
        if axis == dim + 1:
            values = std.function(x.values, repeats, axis=dim)
            return Array.from_layout(values, x.layout.repeat(repeats), dim)
    if axis == 0:
        if not isinstance(repeats, int):
            repeats = _read_counts(repeats, (x.batch_size,), x)
        return take_rows(x, np.repeat(np.arange(x.batch_size), repeats))
    if axis != dim + 1:
        return x.with_values(std.function(x.values, repeats, axis=axis - 1))
    if not isinstance(repeats, Array):
        raise TypeError(
            f"repeats: expected an integer or a ragged array for tokens, got {type(repeats).__name__}"
        )
    check_same_rows("repeats", x, repeats)
    counts = _read_counts(repeats.values, (x.total_length,), x)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])[x.layout.read_offsets()]
    layout = Layout.from_host_lengths(std.backend, np.diff(ends), like=x.offsets)
    tokens = x.layout.to_index(np.repeat(np.arange(counts.size), counts))
    return Array.from_layout(std.xp.take(x.values, tokens, axis=dim), layout, dim)


def _read_counts(repeats: Any, shape: tuple[int, ...], x: Array) -> np.ndarray:
    counts = x.layout.backend.read(checks.check_integers("repeats", repeats, x.values))
    if counts.shape not in (shape, (1,)):
        raise ValueError(f"repeats: expected shape {shape}, got {counts.shape}")
    if (counts < 0).any():
        raise ValueError(f"repeats: expected numbers >= 0, got {counts.min()}")
    return counts


@implements("tile")
def tile(x: Array, repetitions: tuple[int, ...], /, *, std: Standard) -> Array:
    """Repeat each row (the ragged axis), the batch (axis 0) or the elements as a whole."""
    if not isinstance(repetitions, tuple | list):
        raise TypeError(f"repetitions: expected a tuple of integers, got {repetitions!r}")
    repetitions = tuple(checks.check_integer("repetitions", n, 0) for n in repetitions)
    if len(repetitions) > x.ndim:
        raise ValueError(
            f"repetitions: expected at most {x.ndim} entries for shape {x.shape}, got {repetitions}"
        )
    counts = (1,) * (x.ndim - len(repetitions)) + repetitions
    inner = tuple(1 if a == x.ragged_dim else n for a, n in enumerate(counts[1:]))
    x = x.with_values(std.function(x.values, inner)) if set(inner) != {1} else x
    if counts[x.ragged_dim + 1] != 1:
        layout = x.layout.repeat(counts[x.ragged_dim + 1])
        x = _take_modulo(x, layout, layout.positions)
    return take_rows(x, np.tile(np.arange(x.batch_size), counts[0])) if counts[0] != 1 else x


@implements("diff")
def diff(
    x: Array,
    /,
    *,
    axis: int = -1,
    n: int = 1,
    prepend: Any = None,
    append: Any = None,
    std: Standard,
) -> Array:
    """Compute differences of neighbors, within rows along the ragged axis.

    A row of n tokens gives max(n - 1, 0).
    """
    axis, n = normalize_axis(std.name, axis, x.ndim), checks.check_integer("n", n, 0)
    parts = [part for part in (prepend, x, append) if part is not None]
    if len(parts) > 1:
        x = concat(parts, axis=axis, std=Standard(std.xp.concat, "concat", std.backend))
    if axis != x.ragged_dim + 1:
        return x.with_values(std.function(x.values, axis=axis - 1, n=n))
    before = (slice(None),) * axis
    for _ in range(n):
        later, earlier = x[(*before, slice(1, None))], x[(*before, slice(None, -1))]
        x = later.with_values(later.values - earlier.values)
    return x
