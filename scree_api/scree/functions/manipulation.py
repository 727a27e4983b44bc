"""Functions that move, join and repeat axes, rows and tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import numpy as np

from .. import checks
from ..array import Array
from ..backends import Backend
from ..broadcasting import (
    Function,
    against,
    axes_of,
    axis_of,
    equal_rows,
    shared_layout,
    stretches,
    unless_ragged,
    unless_ragged_among,
)
from ..construct import unpack
from ..dispatch import call_cache
from ..dispatch.registry import declare
from ..indexing.getitem import select, take_rows
from ..layout import Layout


def concat(f: Function, name: str, lib: Backend) -> Function:
    """Batches one after another (axis 0), rows joined pairwise (the ragged axis), or element axes side by side."""

    def ragged(arrays: Any, /, *, axis: int | None = 0) -> Any:
        if not all(isinstance(x, Array) for x in arrays):
            raise TypeError(
                "arrays: expected ragged arrays only, got dense ones among them; make them ragged first"
            )
        first = arrays[0]
        axis, dim = axis_of(name, axis, first.ndim, batch=True), first.ragged_dim
        if axis == dim + 1:
            found = call_cache.run("join", {f"x{i}": x for i, x in enumerate(arrays)}, {})
            return Array._of(found, _joined([x.layout for x in arrays]), dim)
        _same_axes(arrays, but=axis)
        if axis == 0:
            return _stacked(arrays, f([x.values for x in arrays], axis=dim))
        shared_layout(name, arrays)
        return first.with_values(f([x.values for x in arrays], axis=axis - 1))

    return unless_ragged_among(f, ragged)


def _same_axes(arrays: list[Array], but: int) -> None:
    """Raise unless all have the axes of the first, and its element axes, one of them aside."""
    first = arrays[0]
    if any(x.ragged_dim != first.ragged_dim or x.ndim != first.ndim for x in arrays):
        raise ValueError(
            f"arrays: expected the same axes in all, got shapes {', '.join(str(x.shape) for x in arrays)}"
        )
    _same_elements(arrays, but)


def _same_elements(arrays: list[Array], but: int | None = None) -> None:
    """Raise unless all have the library and the element axes of the first, one of them aside."""
    first, shape = arrays[0], arrays[0].shape
    for i, x in enumerate(arrays):
        checks.dense(f"arrays[{i}]", x.values, first.values)
        if any(
            a != b
            for axis, (a, b) in enumerate(zip(x.shape, shape, strict=True))
            if axis not in (0, but)
        ):
            raise ValueError(
                f"arrays[{i}]: expected the element axes of arrays[0], {shape}, got {x.shape}"
            )


def _stacked(arrays: list[Array], values: Any) -> Array:
    """All rows of all arrays, whose values stand end to end in `values`."""
    layouts, dim = [x.layout for x in arrays], arrays[0].ragged_dim
    first, total = layouts[0], sum(one.total for one in layouts)
    apart = not all(one.full for one in layouts[:-1])  # tokens may follow the last row of each
    everything = [one.counting(total) for one in layouts]
    ends, starts, end, base = [everything[0][:1]], [], 0, 0
    for one, offsets in zip(layouts, everything, strict=True):
        ends.append(offsets[1:] + end)
        starts.append(offsets[:-1] + base)
        base += one.total
        end = end + offsets[-1:] if apart else base
    longest = [one.max_length for one in layouts]
    new = Layout(
        first.backend, first.xp.concat(ends), total, None if None in longest else max(longest)
    )  # type: ignore[type-var]
    stacked = Array._of(values, new, dim)
    return select(stacked, new, first.xp.concat(starts)) if apart else stacked


def _joined(layouts: list[Layout]) -> Layout:
    """Row i of each layout end to end."""
    if any(one.num_rows != layouts[0].num_rows for one in layouts):
        raise ValueError(
            f"arrays: expected the same number of rows, got {', '.join(str(x.num_rows) for x in layouts)}"
        )
    return reduce(lambda one, other: one.once("joined", partial(_both, one, other), other), layouts)


def _both(one: Layout, other: Layout) -> Layout:
    total = one.total + other.total
    longest = (
        None
        if one.max_length is None or other.max_length is None
        else one.max_length + other.max_length
    )
    return Layout(one.backend, one.counting(total) + other.counting(total), total, longest)


@dataclass(frozen=True, slots=True)
class JoinCall:
    """Row i of each of several ragged arrays end to end, as row i of `layout`; the values come out."""

    arrays: list[Array]
    layout: Layout

    @classmethod
    def make(cls, **arrays: Array) -> JoinCall:
        """Check the arrays that `concat` joins along their ragged axis, whatever their names."""
        found = [*arrays.values()]
        _same_axes(found, but=found[0].ragged_dim + 1)
        return cls(found, _joined([x.layout for x in found]))


@declare("join", JoinCall.make)
def _take_joined(call: JoinCall) -> Any:
    xp, new, dim = call.layout.xp, call.layout, call.arrays[0].ragged_dim
    tokens, position, base = None, new.positions, 0
    for one in (x.layout for x in call.arrays):
        here = position + xp.take(one.offsets[:-1], new.rows, axis=0) + base
        tokens = here if tokens is None else xp.where(position >= 0, here, tokens)
        position, base = position - xp.take(one.lengths, new.rows, axis=0), base + one.total
    if not all(x.layout.full for x in call.arrays):  # what stands behind the last rows has no place
        tokens = new.clip(tokens)
    return xp.take(xp.concat([x.values for x in call.arrays], axis=dim), tokens, axis=dim)


def stack(f: Function, name: str, lib: Backend) -> Function:
    """Ragged arrays of one layout along a new element axis."""

    def ragged(arrays: Any, /, *, axis: int = 0) -> Any:
        if not all(isinstance(x, Array) for x in arrays):
            raise TypeError("arrays: expected ragged arrays only, got dense ones among them")
        first = arrays[0]
        axis = axis_of(name, axis, first.ndim + 1, batch=True)
        if axis == 0:
            raise ValueError(
                "axis: the batch is axis 0 of a ragged array; use concat, or stack along another axis"
            )
        shared_layout(name, arrays)
        _same_elements(arrays)
        out = f([x.values for x in arrays], axis=axis - 1)
        return first.with_values(out, ragged_dim=first.ragged_dim + (axis - 1 <= first.ragged_dim))

    return unless_ragged_among(f, ragged)


# ------------------------------------------------------------------------------------------ axes of an element
def _inner(name: str, x: Array, axis: Any, ndim: int | None = None) -> tuple[int, ...]:
    """Axes of the values for axes of the array, of which none may be the batch."""
    axes = axes_of(name, axis, x.ndim if ndim is None else ndim)
    if axes and axes[0] == 0:
        raise ValueError(
            f"axis: {name} cannot move the batch axis of a ragged array, got axis {axis}"
        )
    return tuple(a - 1 for a in axes)


def expand_dims(f: Function, name: str, lib: Backend) -> Function:
    """New element axes of size 1."""

    def ragged(x: Array, /, *, axis: int | tuple[int, ...] = 0) -> Array:
        count = len(axis) if isinstance(axis, tuple) else 1
        new = _inner(name, x, axis, x.ndim + count)
        old = [a for a in range(x.values.ndim + count) if a not in new]
        return x.with_values(
            f(x.values, axis=new if isinstance(axis, tuple) else new[0]),
            ragged_dim=old[x.ragged_dim],
        )

    return unless_ragged(f, ragged)


def squeeze(f: Function, name: str, lib: Backend) -> Function:
    """Element axes of size 1 removed."""

    def ragged(x: Array, /, axis: Any) -> Array:
        axes = _inner(name, x, axis)
        if x.ragged_dim in axes or any(x.values.shape[a] != 1 for a in axes):
            raise ValueError(
                f"axis: expected element axes of size 1, got {axis} for shape {x.shape}"
            )
        return x.with_values(
            f(x.values, axis=axes), ragged_dim=x.ragged_dim - sum(a < x.ragged_dim for a in axes)
        )

    return unless_ragged(f, ragged)


def permute_dims(f: Function, name: str, lib: Backend) -> Function:
    """The axes behind the batch in another order."""

    def ragged(x: Array, /, axes: tuple[int, ...]) -> Array:
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
        return x.with_values(f(x.values, order), ragged_dim=order.index(x.ragged_dim))

    return unless_ragged(f, ragged)


def moveaxis(f: Function, name: str, lib: Backend) -> Function:
    """Axes behind the batch moved to other places."""

    def ragged(x: Array, source: Any, destination: Any, /) -> Array:
        pairs = [a if isinstance(a, tuple) else (a,) for a in (source, destination)]
        if len(pairs[0]) != len(pairs[1]):
            raise ValueError(
                f"destination: expected as many axes as source, {source}, got {destination}"
            )
        (sources, destinations) = ([_inner(name, x, a)[0] for a in axes] for axes in pairs)
        if len(set(sources)) < len(sources) or len(set(destinations)) < len(destinations):
            raise ValueError(f"source: expected every axis once, got {source} to {destination}")
        order = [a for a in range(x.values.ndim) if a not in sources]
        for at, a in sorted(zip(destinations, sources, strict=True)):
            order.insert(at, a)
        return x.with_values(
            lib.xp.permute_dims(x.values, tuple(order)), ragged_dim=order.index(x.ragged_dim)
        )

    return unless_ragged(f, ragged)


def matrix_transpose(f: Function, name: str, lib: Backend) -> Function:
    """The last two axes exchanged."""
    return unless_ragged(f, lambda x: x.mT)


def _shape(shape: Any) -> tuple[Any, ...]:
    if not isinstance(shape, tuple | list):
        raise TypeError(f"shape: expected a tuple (n, ..., None, ...), got {shape!r}")
    return tuple(shape)


def reshape(f: Function, name: str, lib: Backend) -> Function:
    """Element axes in another shape, ``(n, None, ...)``; None stands where the ragged axis is."""

    def ragged(x: Array, /, shape: Any, *, copy: bool | None = None) -> Array:
        want = _shape(shape)
        if len(want) < 2 or (want[0] != x.batch_size and want[0] != -1) or want.count(None) != 1:
            raise ValueError(
                f"shape: expected ({x.batch_size}, ..., None, ...) with None for the ragged axis, got {want}"
            )
        dim = want.index(None) - 1
        if math.prod(want[1 : dim + 1]) != math.prod(x.values.shape[: x.ragged_dim]):
            raise ValueError(
                f"shape: expected the elements before the ragged axis of {x.shape} to stay, got {want}"
            )
        inner, have = want[dim + 2 :], math.prod(x.values.shape[x.ragged_dim + 1 :])
        known = math.prod([n for n in inner if n != -1])
        if inner.count(-1) > 1 or (known == 0 or have % known if -1 in inner else have != known):
            raise ValueError(
                f"shape: expected {have} elements behind the ragged axis of {x.shape}, got {want}"
            )
        inner = tuple(
            have // known if n == -1 else n for n in inner
        )  # a batch without tokens does not tell the library
        values = f(x.values, (*want[1 : dim + 1], x.total_length, *inner), copy=copy)
        return x.with_values(values, ragged_dim=dim)

    return unless_ragged(f, ragged)


def broadcast_to(f: Function, name: str, lib: Backend) -> Function:
    """Element axes of size 1 stretched, to ``(n, None, ...)``."""

    def ragged(x: Array, /, shape: Any) -> Array:
        want = _shape(shape)
        if len(want) != x.ndim or want[0] != x.batch_size or want[x.ragged_dim + 1] is not None:
            raise ValueError(
                f"shape: expected {x.ndim} axes, {x.batch_size} rows and None for the ragged axis, got {want}"
            )
        values = [x.total_length if n is None else n for n in want[1:]]
        if not stretches(tuple(x.values.shape), tuple(values)):
            raise ValueError(
                f"shape: expected element axes of {x.shape}, those of size 1 stretched, got {want}"
            )
        return x.with_values(f(x.values, tuple(values)))

    return unless_ragged(f, ragged)


def broadcast_arrays(f: Function, name: str, lib: Backend) -> Function:
    """All arrays on the layout of the ragged ones among them, with common element axes."""

    def call(*arrays: Any) -> Any:
        ragged = [x for x in arrays if isinstance(x, Array)]
        if not ragged:
            return f(*arrays)
        first = shared_layout(name, ragged)
        values = f(
            first.values,
            *(x.values if isinstance(x, Array) else against(name, x, first) for x in arrays),
        )[1:]
        return [first.with_values(x) for x in values]

    return call


def unstack(f: Function, name: str, lib: Backend) -> Function:
    """The rows as dense arrays (axis 0), or the entries of an element axis as ragged ones."""

    def ragged(x: Array, /, *, axis: int = 0) -> tuple[Any, ...]:
        axis = axis_of(name, axis, x.ndim, batch=True)
        if axis == 0:
            return tuple(unpack(x))
        if axis == x.ragged_dim + 1:
            raise ValueError(
                "axis: the ragged axis has no common number of entries to unstack; use axis 0 for the rows"
            )
        before = (slice(None),) * axis
        return tuple(x[(*before, i)] for i in range(x.values.shape[axis - 1]))

    return unless_ragged(f, ragged)


# ------------------------------------------------------------------------------------------- rows and tokens
def flip(f: Function, name: str, lib: Backend) -> Function:
    """Each row reversed (the ragged axis), the rows in reverse order (axis 0), element axes reversed."""

    def ragged(x: Array, /, *, axis: Any = None) -> Array:
        axes = axes_of(name, axis, x.ndim)
        inner = tuple(a - 1 for a in axes if a not in (0, x.ragged_dim + 1))
        x = x.with_values(f(x.values, axis=inner)) if inner else x
        x = select(x, x.layout, x.offsets[1:] - 1, -1) if x.ragged_dim + 1 in axes else x
        return take_rows(x, np.arange(x.batch_size - 1, -1, -1)) if 0 in axes else x

    return unless_ragged(f, ragged)


def roll(f: Function, name: str, lib: Backend) -> Function:
    """Tokens rolled within their row, rows in the batch, or entries of element axes."""

    def ragged(x: Array, /, shift: Any, *, axis: Any = None) -> Array:
        axes, shifts = ((a if isinstance(a, tuple) else (a,)) for a in (axis, shift))
        shifts = shifts * len(axes) if len(shifts) == 1 else shifts
        if len(shifts) != len(axes):
            raise ValueError(f"shift: expected one for each axis of {axis}, got {shift}")
        for by, a in zip(shifts, axes, strict=True):
            by, a = checks.integer("shift", by), axis_of(name, a, x.ndim, batch=True)
            if a == 0:
                x = take_rows(x, np.roll(np.arange(x.batch_size), by))
            elif a != x.ragged_dim + 1:
                x = x.with_values(f(x.values, by, axis=a - 1))
            elif x.total_length and x.batch_size:
                rows = x.layout
                starts, lengths = (
                    lib.xp.take(n, rows.rows, axis=0) for n in (x.offsets[:-1], rows.lengths)
                )
                tokens = rows.clip(
                    starts + (rows.positions - by) % lib.xp.where(lengths > 0, lengths, 1)
                )
                x = x.with_values(lib.xp.take(x.values, tokens, axis=x.ragged_dim))
        return x

    return unless_ragged(f, ragged)


def repeat(f: Function, name: str, lib: Backend) -> Function:
    """Every token (the ragged axis), row (axis 0) or element repeated; the counts of tokens may be a ragged array."""

    def ragged(x: Array, repeats: Any, /, *, axis: int | None = None) -> Array:
        axis = axis_of(name, axis, x.ndim, batch=True)
        if isinstance(repeats, bool | float | int | np.integer):
            repeats = checks.integer("repeats", repeats, 0)
            if axis == x.ragged_dim + 1:
                return Array._of(
                    f(x.values, repeats, axis=x.ragged_dim), x.layout.times(repeats), x.ragged_dim
                )
        if axis == 0:
            counts = repeats if isinstance(repeats, int) else _counts(repeats, (x.batch_size,), x)
            return take_rows(x, np.repeat(np.arange(x.batch_size), counts))
        if axis != x.ragged_dim + 1:
            return x.with_values(f(x.values, repeats, axis=axis - 1))
        if not isinstance(repeats, Array):
            raise TypeError(
                f"repeats: expected an integer or a ragged array for tokens, got {type(repeats).__name__}"
            )
        equal_rows("repeats", x, repeats)
        counts = _counts(repeats.values, (x.total_length,), x)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])[x.layout.read()]
        rows = Layout.from_host(lib, np.diff(ends), like=x.offsets)
        tokens = np.repeat(np.arange(counts.size), counts)
        return Array._of(
            lib.xp.take(x.values, x.layout.put(tokens), axis=x.ragged_dim), rows, x.ragged_dim
        )

    return unless_ragged(f, ragged)


def _counts(repeats: Any, shape: tuple[int, ...], x: Array) -> np.ndarray:
    counts = x.layout.backend.read(checks.integers("repeats", repeats, x.values))
    if counts.shape not in (shape, (1,)):
        raise ValueError(f"repeats: expected shape {shape}, got {counts.shape}")
    if (counts < 0).any():
        raise ValueError(f"repeats: expected numbers >= 0, got {counts.min()}")
    return counts


def tile(f: Function, name: str, lib: Backend) -> Function:
    """Each row (the ragged axis), the batch (axis 0) or the elements repeated as a whole."""

    def ragged(x: Array, repetitions: tuple[int, ...], /) -> Array:
        if not isinstance(repetitions, tuple | list):
            raise TypeError(f"repetitions: expected a tuple of integers, got {repetitions!r}")
        repetitions = tuple(checks.integer("repetitions", n, 0) for n in repetitions)
        if len(repetitions) > x.ndim:
            raise ValueError(
                f"repetitions: expected at most {x.ndim} entries for shape {x.shape}, got {repetitions}"
            )
        times = (1,) * (x.ndim - len(repetitions)) + tuple(repetitions)
        inner = tuple(1 if a == x.ragged_dim else n for a, n in enumerate(times[1:]))
        x = x.with_values(f(x.values, inner)) if set(inner) != {1} else x
        if times[x.ragged_dim + 1] != 1:
            rows = x.layout.times(times[x.ragged_dim + 1])
            starts, lengths = (
                lib.xp.take(n, rows.rows, axis=0) for n in (x.offsets[:-1], x.layout.lengths)
            )
            tokens = x.layout.clip(starts + rows.positions % lib.xp.where(lengths > 0, lengths, 1))
            x = Array._of(lib.xp.take(x.values, tokens, axis=x.ragged_dim), rows, x.ragged_dim)
        return take_rows(x, np.tile(np.arange(x.batch_size), times[0])) if times[0] != 1 else x

    return unless_ragged(f, ragged)


def diff(f: Function, name: str, lib: Backend) -> Function:
    """Differences of neighbors, within rows along the ragged axis; a row of n tokens gives max(n - 1, 0)."""
    joined = concat(lib.xp.concat, "concat", lib)

    def ragged(
        x: Array, /, *, axis: int = -1, n: int = 1, prepend: Any = None, append: Any = None
    ) -> Array:
        axis = axis_of(name, axis, x.ndim)
        n, parts = (
            checks.integer("n", n, 0),
            [part for part in (prepend, x, append) if part is not None],
        )
        x = joined(parts, axis=axis) if len(parts) > 1 else x
        if axis != x.ragged_dim + 1:
            return x.with_values(f(x.values, axis=axis - 1, n=n))
        before = (slice(None),) * axis
        for _ in range(n):
            later, earlier = x[(*before, slice(1, None))], x[(*before, slice(None, -1))]
            x = later.with_values(later.values - earlier.values)
        return x

    return unless_ragged(f, ragged)
