"""Manipulation of axes, rows and tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial, reduce
from itertools import accumulate
from typing import Any

import numpy as np

from .. import checks
from ..array import Array
from ..broadcasting import (
    SCALARS,
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
from ..layout import Layout, host_offsets_of
from ..records import record
from .binding import Standard, check_library, implements


@implements("concat", ragged="list")
def concat(arrays: Any, /, *, axis: int | None = 0, std: Standard) -> Any:
    """Concatenate along axis 0 (more rows), the ragged axis (row by row), or an element axis."""
    first = _check_all_ragged(arrays)
    axis, dim = normalize_axis(std.name, axis, first.ndim, allow_batch=True), first.ragged_dim
    if axis == dim + 1:
        # The call cache takes arrays by name.
        return _join.run({f"x{i}": x for i, x in enumerate(arrays)}, {})
    _check_same_axes(arrays, except_axis=axis)
    if axis == 0:
        return _concat_batches(arrays, std.function([x.values for x in arrays], axis=dim))
    check_shared_layout(std.name, arrays)
    return first.with_values(std.function([x.values for x in arrays], axis=axis - 1))


def _check_all_ragged(arrays: Sequence[Array]) -> Array:
    """Return the first array; raise unless all are ragged."""
    for i, x in enumerate(arrays):
        check_ragged(f"arrays[{i}]", x)
    return arrays[0]


def _check_same_axes(arrays: list[Array], except_axis: int) -> None:
    """Raise unless all arrays have the axes of the first; sizes may differ along `except_axis`."""
    first = arrays[0]
    if any(x.ragged_dim != first.ragged_dim or x.ndim != first.ndim for x in arrays):
        raise ValueError(
            f"arrays: expected the same axes in all, got shapes {', '.join(str(x.shape) for x in arrays)}; "
            "see xp.moveaxis and xp.expand_dims"
        )
    _check_same_elements(arrays, except_axis)


def _check_same_elements(arrays: list[Array], except_axis: int | None = None) -> None:
    """Raise unless all arrays have the library and the element sizes of the first, except on an axis."""
    first, shape = arrays[0], arrays[0].shape
    for i, x in enumerate(arrays):
        checks.check_dense(f"arrays[{i}]", x.values, first.values)
        sizes = enumerate(zip(x.shape, shape, strict=True))
        if any(a != b for axis, (a, b) in sizes if axis not in (0, except_axis)):
            raise ValueError(
                f"arrays[{i}]: expected the element axes of arrays[0], {shape}, got {x.shape}"
            )


def _concat_batches(arrays: list[Array], values: Any) -> Array:
    """Return the rows of all arrays as one batch; `values` holds their concatenated values."""
    layouts, dim = [x.layout for x in arrays], arrays[0].ragged_dim
    backend, xp, total = layouts[0].backend, layouts[0].xp, sum(layout.total for layout in layouts)
    bounds = [layout.max_length for layout in layouts if layout.max_length is not None]
    longest = max(bounds) if len(bounds) == len(layouts) else None
    offsets = [layout.offsets_as_index(total) for layout in layouts]
    bases = accumulate((layout.total for layout in layouts[:-1]), initial=0)  # in `values`
    shifted = [x + base for x, base in zip(offsets, bases, strict=True)]
    starts = [x[:-1] for x in shifted]
    if all(layout.has_no_tail for layout in layouts[:-1]):
        has_no_tail = layouts[-1].has_no_tail
        offsets_of_all = xp.concat([*starts, shifted[-1][-1:]])
        new = Layout(backend, offsets_of_all, total, longest, has_no_tail=has_no_tail)
        return Array.from_layout(values, new, dim)
    # Tails of all arrays but the last would be between the rows.
    lengths = xp.concat([x[1:] - x[:-1] for x in offsets])
    new = layouts[0].with_lengths(lengths, total, longest)
    return select(Array.from_layout(values, new, dim), new, xp.concat(starts), distinct=True)


def joined_layout(layouts: list[Layout]) -> Layout:
    """Return the layout whose row i is row i of each layout, concatenated."""
    if any(layout.num_rows != layouts[0].num_rows for layout in layouts):
        counts = ", ".join(str(layout.num_rows) for layout in layouts)
        raise ValueError(f"arrays: expected the same number of rows, got {counts}")

    def join(a: Layout, b: Layout) -> Layout:
        return a.cached("joined", partial(_join_pair, a, b), pair=b)

    return reduce(join, layouts)


def _join_pair(a: Layout, b: Layout) -> Layout:
    total, longest = a.total + b.total, None
    if a.max_length is not None and b.max_length is not None:
        longest = a.max_length + b.max_length
    offsets = a.offsets_as_index(total) + b.offsets_as_index(total)
    return Layout(a.backend, offsets, total, longest)


@record
class JoinCall:
    """A validated call of `concat` along the ragged axis.

    Attributes
    ----------
    arrays
        Ragged arrays with equal numbers of rows.
    layout
        The layout of the result.
    """

    arrays: list[Array]
    layout: Layout

    def __init__(self, **arrays: Array) -> None:
        checked = [*arrays.values()]
        _check_same_axes(checked, except_axis=checked[0].ragged_dim + 1)
        object.__setattr__(self, "arrays", checked)
        object.__setattr__(self, "layout", joined_layout([x.layout for x in checked]))


@define_operation("join", JoinCall)
def _join(call: JoinCall) -> Array:
    xp, new, dim = call.layout.xp, call.layout, call.arrays[0].ragged_dim
    # `positions`: position of each result token minus the lengths of the earlier arrays' rows. The
    # last array for which it is not negative holds the token.
    tokens, positions, base = None, new.positions, 0
    for layout in (x.layout for x in call.arrays):
        candidates = positions + new.per_token(layout.offsets[:-1]) + base
        tokens = candidates if tokens is None else xp.where(positions >= 0, candidates, tokens)
        positions, base = positions - new.per_token(layout.lengths), base + layout.total
    if not all(x.layout.has_no_tail for x in call.arrays):
        tokens = new.clip(tokens)  # tokens of the tail may be out of bounds
    values = xp.take(xp.concat([x.values for x in call.arrays], axis=dim), tokens, axis=dim)
    return Array.from_layout(values, new, dim)


@implements("stack", ragged="list")
def stack(arrays: Any, /, *, axis: int = 0, std: Standard) -> Any:
    """Stack ragged arrays of one layout along a new element axis."""
    first = _check_all_ragged(arrays)
    axis = normalize_axis(std.name, axis, first.ndim + 1, allow_batch=True)
    if axis == 0:
        raise ValueError(
            "axis: the batch is axis 0 of a ragged array; use concat, or stack along another axis"
        )
    check_shared_layout(std.name, arrays)
    _check_same_elements(arrays)
    out, dim = std.function([x.values for x in arrays], axis=axis - 1), first.ragged_dim
    return first.with_values(out, ragged_dim=dim + 1 if axis - 1 <= dim else dim)


def _values_axes(name: str, x: Array, axis: Any, ndim: int | None = None) -> tuple[int, ...]:
    """Return axes of the values for axes of the array; raise for the batch axis."""
    axes = normalize_axes(name, axis, x.ndim if ndim is None else ndim)
    if 0 in axes:
        raise ValueError(
            f"axis: {name} cannot move the batch axis of a ragged array, got axis {axis}"
        )
    return tuple(a - 1 for a in axes)


@implements("expand_dims")
def expand_dims(x: Array, /, *, axis: int | tuple[int, ...] = 0, std: Standard) -> Array:
    """Insert element axes of size 1."""
    count = len(axis) if isinstance(axis, tuple) else 1
    new = _values_axes(std.name, x, axis, x.ndim + count)
    kept = [a for a in range(x.values.ndim + count) if a not in new]
    values = std.function(x.values, axis=new if isinstance(axis, tuple) else new[0])
    return x.with_values(values, ragged_dim=kept[x.ragged_dim])


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
    # -1 for an invalid entry, which fails the check.
    allowed = range(-x.ndim, x.ndim)
    order = [
        int(a) % x.ndim if isinstance(a, checks.INTEGERS) and a in allowed else -1 for a in axes
    ]
    if sorted(order) != list(range(x.ndim)) or order[0] != 0:
        raise ValueError(
            f"axes: expected 0, the batch, and then the others of {x.ndim} axes in any order, got {axes}"
        )
    inner = tuple(a - 1 for a in order[1:])
    return x.with_values(std.function(x.values, inner), ragged_dim=inner.index(x.ragged_dim))


@implements("moveaxis")
def moveaxis(x: Array, source: Any, destination: Any, /, *, std: Standard) -> Array:
    """Move axes after the batch."""
    from_axes = source if isinstance(source, tuple) else (source,)
    to_axes = destination if isinstance(destination, tuple) else (destination,)
    if len(from_axes) != len(to_axes):
        raise ValueError(
            f"destination: expected as many axes as source, {source}, got {destination}"
        )
    sources = [_values_axes(std.name, x, a)[0] for a in from_axes]
    destinations = [_values_axes(std.name, x, a)[0] for a in to_axes]
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
def reshape(x: Array, /, shape: Any, *, copy: bool | None = None, std: Standard) -> Any:
    """Reshape the element axes to ``(n, None, ...)``; None marks the ragged axis.

    The shape ``(-1,)`` gives the elements of all rows as a dense array.
    """
    shape = _check_shape(shape)
    if shape == (-1,):
        if x.ragged_dim:
            raise ValueError(
                f"shape: expected (-1,) only where the ragged axis is axis 1, got an array of shape {x.shape}; "
                "use xp.moveaxis first"
            )
        if not x.layout.has_no_tail:
            raise ValueError(
                "shape: expected (-1,) only where every token is known to belong to a row, got an array that may have "
                "tokens after its last row; use xp.reshape(arr.values, (-1,))"
            )
        return std.function(x.values, (x.size,), copy=copy)
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
    given_size = math.prod([n for n in inner if n != -1])
    if inner.count(-1) == 1 and given_size:  # the library cannot infer -1 without tokens
        inner = tuple(size // given_size if n == -1 else n for n in inner)
    if -1 in inner or math.prod(inner) != size:
        raise ValueError(
            f"shape: expected {size} elements after the ragged axis of {x.shape}, got {shape}"
        )
    values = std.function(x.values, (*shape[1 : dim + 1], x.total_length, *inner), copy=copy)
    return x.with_values(values, ragged_dim=dim)


@implements("broadcast_to")
def broadcast_to(x: Array, /, shape: Any, *, std: Standard) -> Array:
    """Broadcast element axes of size 1 to a shape ``(n, None, ...)``."""
    shape = _check_shape(shape)
    fits = len(shape) == x.ndim and shape[0] == x.batch_size and shape.count(None) == 1
    if not fits or shape[x.ragged_dim + 1] is not None:
        raise ValueError(
            f"shape: expected {x.ndim} axes, {x.batch_size} rows and None for the ragged axis, got {shape}"
        )
    target = tuple(x.total_length if n is None else n for n in shape[1:])
    if not is_broadcastable(tuple(x.values.shape), target):
        raise ValueError(
            f"shape: expected a shape to which the element axes of {x.shape} broadcast, got {shape}"
        )
    return x.with_values(std.function(x.values, target))


@implements("broadcast_arrays", ragged="all")
def broadcast_arrays(*arrays: Any, std: Standard) -> Any:
    """Broadcast all arrays to the layout of the ragged arrays among them, with common element axes."""
    ragged = [x for x in arrays if isinstance(x, Array)]
    if not ragged:
        return std.function(*arrays)
    first = check_shared_layout(std.name, ragged)
    check_library(std, first)
    operands = [broadcast_operand(std.name, x, first) for x in arrays]
    # `first` gives dense operands the number of tokens; its own result is dropped.
    return [first.with_values(x) for x in std.function(first.values, *operands)[1:]]


@implements("unstack")
def unstack(x: Array, /, *, axis: int = 0, std: Standard) -> tuple[Any, ...]:
    """Return the rows as dense arrays (axis 0), or the entries of an element axis as ragged arrays."""
    axis = normalize_axis(std.name, axis, x.ndim, allow_batch=True)
    if axis == 0:
        return tuple(unpack(x))
    if axis == x.ragged_dim + 1:
        raise ValueError(
            "axis: the ragged axis has no common number of entries to unstack; use axis 0 for the rows"
        )
    leading = (slice(None),) * axis
    return tuple(x[(*leading, i)] for i in range(x.values.shape[axis - 1]))


@implements("flip")
def flip(x: Array, /, *, axis: Any = None, std: Standard) -> Array:
    """Reverse tokens within rows, the order of the rows (axis 0), or element axes."""
    axes = normalize_axes(std.name, axis, x.ndim)
    if element_axes := tuple(a - 1 for a in axes if a not in (0, x.ragged_dim + 1)):
        x = x.with_values(std.function(x.values, axis=element_axes))
    if x.ragged_dim + 1 in axes:
        x = select(x, x.layout, x.offsets[1:] - 1, -1, distinct=True)
    return take_rows(x, np.arange(x.batch_size - 1, -1, -1)) if 0 in axes else x


@implements("roll")
def roll(x: Array, /, shift: Any, *, axis: Any = None, std: Standard) -> Array:
    """Roll tokens within their row, rows in the batch, or entries of element axes."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    shifts = shift if isinstance(shift, tuple) else (shift,)
    shifts = shifts * len(axes) if len(shifts) == 1 else shifts
    if len(shifts) != len(axes):
        raise ValueError(f"shift: expected one for each axis of {axis}, got {shift}")
    for by, a in zip(shifts, axes, strict=True):
        by = checks.check_integer("shift", by)
        a = normalize_axis(std.name, a, x.ndim, allow_batch=True)
        if a == 0:
            x = take_rows(x, np.roll(np.arange(x.batch_size), by % max(x.batch_size, 1)))
        elif a != x.ragged_dim + 1:
            if abs(by) >= 2**31:
                by %= max(int(x.values.shape[a - 1]), 1)
            x = x.with_values(std.function(x.values, by, axis=a - 1))
        elif x.total_length and x.batch_size:
            shift = x.layout.per_token(_remainders(x.layout, by)) if abs(by) >= 2**30 else by
            x = _take_cyclic(x, x.layout, x.layout.positions - shift)
    return x


def _remainders(layout: Layout, number: int) -> Any:
    """Return (n,) a number modulo the length of each row, also if no dtype holds the number."""
    xp = layout.xp
    lengths = xp.where(layout.nonempty, layout.lengths, 1)
    remainder = xp.zeros_like(lengths)
    for digit in bin(abs(number))[2:]:
        rest = lengths - remainder
        remainder = xp.where(remainder < rest, remainder + remainder, remainder - rest)
        if digit == "1":
            remainder = xp.where(remainder + 1 < lengths, remainder + 1, 0)
    return remainder if number >= 0 else -remainder


def _take_cyclic(x: Array, layout: Layout, positions: Any) -> Array:
    """Return an array on `layout` with the tokens of `x` at (total,) positions in the same rows.

    A position is taken modulo the length of the row in `x`.
    """
    xp = layout.xp
    starts, lengths = layout.starts_and_lengths(x.layout)
    tokens = x.layout.clip(starts + positions % xp.where(lengths > 0, lengths, 1))
    return Array.from_layout(xp.take(x.values, tokens, axis=x.ragged_dim), layout, x.ragged_dim)


@implements("repeat")
def repeat(x: Array, repeats: Any, /, *, axis: int | None = None, std: Standard) -> Array:
    """Repeat tokens, rows or elements, by an integer or by one count per token, row or element."""
    axis, dim = normalize_axis(std.name, axis, x.ndim, allow_batch=True), x.ragged_dim
    if isinstance(repeats, SCALARS):
        repeats = checks.check_integer("repeats", repeats, 0)
        if axis == dim + 1:
            values = std.function(x.values, repeats, axis=dim)
            return Array.from_layout(values, x.layout.repeat_tokens(repeats), dim)
    if axis == 0:
        if not isinstance(repeats, int):
            repeats = _read_counts(repeats, (x.batch_size,), x)
        return take_rows(x, np.repeat(np.arange(x.batch_size), repeats))
    if isinstance(repeats, Array) is not (axis == dim + 1):
        expected = "a ragged array for tokens" if axis == dim + 1 else "a dense array for elements"
        raise TypeError(f"repeats: expected an integer or {expected}, got {type(repeats).__name__}")
    if axis != dim + 1:
        return x.with_values(std.function(x.values, repeats, axis=axis - 1))
    check_same_rows("repeats", x, repeats)
    offsets = x.layout.read_offsets()
    counts = _read_counts(repeats.values, (x.total_length,), x)
    counts = np.broadcast_to(counts, (x.total_length,))[: offsets[-1]]  # without the tail
    lengths = np.diff(host_offsets_of(counts)[offsets])
    layout = Layout.from_host_lengths(std.backend, lengths, like=x.offsets)
    tokens = x.layout.to_index(np.repeat(np.arange(counts.size), counts))
    return Array.from_layout(std.xp.take(x.values, tokens, axis=dim), layout, dim)


def _read_counts(repeats: Any, shape: tuple[int, ...], x: Array) -> np.ndarray:
    """Return the counts in host memory; raise unless their shape is `shape` or (1,), and all >= 0."""
    counts = x.layout.backend.read(checks.check_integers("repeats", repeats, x.values))
    if counts.shape not in (shape, (1,)):
        raise ValueError(f"repeats: expected shape {shape}, got {counts.shape}")
    if (counts < 0).any():
        raise ValueError(f"repeats: expected numbers >= 0, got {counts.min()}")
    return counts


@implements("tile")
def tile(x: Array, repetitions: tuple[int, ...], /, *, std: Standard) -> Array:
    """Repeat each row's tokens as a block, the batch, or the elements, as ``numpy.tile`` does."""
    if not isinstance(repetitions, tuple | list):
        raise TypeError(f"repetitions: expected a tuple of integers, got {repetitions!r}")
    repetitions = tuple(checks.check_integer("repetitions", n, 0) for n in repetitions)
    if len(repetitions) > x.ndim:
        raise ValueError(
            f"repetitions: expected at most {x.ndim} entries for shape {x.shape}, got {repetitions}"
        )
    counts = (1,) * (x.ndim - len(repetitions)) + repetitions
    element_counts = tuple(1 if a == x.ragged_dim else n for a, n in enumerate(counts[1:]))
    if any(n != 1 for n in element_counts):
        x = x.with_values(std.function(x.values, element_counts))
    if counts[x.ragged_dim + 1] != 1:
        layout = x.layout.repeat_tokens(counts[x.ragged_dim + 1])
        x = _take_cyclic(x, layout, layout.positions)
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
    """Compute the n-th difference of neighbors.

    Along the ragged axis a row of L tokens gives ``max(L - n, 0)`` tokens.
    """
    axis, n = normalize_axis(std.name, axis, x.ndim), checks.check_integer("n", n, 0)
    parts = [part for part in (prepend, x, append) if part is not None]
    if len(parts) > 1:
        x = x.__array_namespace__().concat(parts, axis=axis)
    if axis != x.ragged_dim + 1:
        return x.with_values(std.function(x.values, axis=axis - 1, n=n))
    leading, bound = (slice(None),) * axis, x.layout.max_length_bound
    for _ in range(min(n, bound)):  # then all rows are empty
        later, earlier = x[(*leading, slice(1, None))], x[(*leading, slice(None, -1))]
        x = later.with_values(later.values - earlier.values)
    return x
