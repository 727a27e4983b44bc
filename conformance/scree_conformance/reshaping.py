"""Cases of functions that move axes, rows and tokens, against NumPy's functions on each row.

Functions that only move numbers must be exact, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import numpy as np

from . import oracle
from .backends import FLOATS, HALF
from .bench import Bench, Input
from .layouts import ALL, Layout, lengths_of
from .oracle import Rows
from .table import operation

#: Dtypes of functions that only copy numbers; they work with any dtype.
COPIED_DTYPES = ("float32", "int32", "bool", "bfloat16", "complex64")


def draw_of(dtype: str) -> str:
    """Return the name of a draw whose numbers are representable in a dtype."""
    draws = {"bool": "bool", "complex64": "complex", **dict.fromkeys(FLOATS, "any")}
    return draws.get(dtype, "natural" if dtype.startswith("u") else "integer")


def for_each_ragged_dim(
    bench: Bench, layout: Layout, dtype: str, token: tuple[int, ...] = (3,)
) -> list[tuple[int, Input]]:
    """Return (ragged_dim, array) for every position of the ragged axis."""
    dims = range(2 if bench.lib.compiles else len(token) + 1)
    return [
        (ragged_dim, bench.ragged(layout, token, dtype, draw_of(dtype), ragged_dim))
        for ragged_dim in dims
    ]


def row_axes(axes: int | tuple[int, ...], ndim: int) -> tuple[int, ...]:
    """Return the axes of a row for axes of an array with `ndim` axes, which counts the batch."""
    return tuple(axis % ndim - 1 for axis in np.atleast_1d(axes).tolist())


# --------------------------------------------------------------------------------------------- axes
@operation("expand_dims squeeze", ALL, COPIED_DTYPES)
def axes_of_size_one(bench: Bench, layout: Layout, dtype: str) -> None:
    """A new axis at every position after the batch axis, and its removal."""
    xp = bench.xp
    for ragged_dim, x in for_each_ragged_dim(bench, layout, dtype):
        for axis in bench.select((1, 2, 3, -1, -2, -3)):
            new = bench.check(
                lambda a: xp.expand_dims(a, axis=axis),
                oracle.map_rows(lambda row: np.expand_dims(row, axis % 4 - 1)),
                x,
                note=f"ragged_dim={ragged_dim}, axis={axis}: ",
            )
            assert new.offsets is x.array.offsets, "expand_dims lost the layout"
            bench.close(
                xp.squeeze(new, axis=axis),
                list(x.exact),
                dtype=dtype,
                note=f"squeeze, axis={axis}: ",
            )
        wide = bench.check(
            lambda a: xp.expand_dims(a, axis=(-1, 1)),
            oracle.map_rows(lambda row: np.expand_dims(row, (0, -1))),
            x,
            note=f"ragged_dim={ragged_dim}, two axes: ",
        )
        bench.close(
            xp.squeeze(wide, axis=(-1, 1)), list(x.exact), dtype=dtype, note="squeeze of two axes: "
        )


@operation("permute_dims moveaxis matrix_transpose linalg.matrix_transpose", ALL, COPIED_DTYPES)
def permuted(bench: Bench, layout: Layout, dtype: str) -> None:
    """Every order of the axes after the batch axis, including the ragged axis."""
    xp = bench.xp
    for ragged_dim, x in for_each_ragged_dim(bench, layout, dtype, (3, 2)):
        for axes in bench.select(((0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 3, 1), (0, -1, 2, 1))):
            inner_axes = row_axes(axes[1:], 4)
            bench.check(
                lambda a: xp.permute_dims(a, axes),
                oracle.map_rows(lambda row: row.transpose(inner_axes)),
                x,
                note=f"{ragged_dim}, {axes}: ",
            )
        for source, target in bench.select(((1, 2), (3, 1), (-1, -2), ((1, 3), (3, 2)))):
            source_and_target = row_axes(source, 4), row_axes(target, 4)
            bench.check(
                lambda a: xp.moveaxis(a, source, target),
                oracle.map_rows(lambda row: np.moveaxis(row, *source_and_target)),
                x,
                note=f"{ragged_dim}, moveaxis {source} to {target}: ",
            )
        swap = oracle.map_rows(lambda row: row.swapaxes(1, 2))
        for f in bench.functions("matrix_transpose"):
            bench.check(f, swap, x)


@operation("reshape", ALL, COPIED_DTYPES)
def reshaped(bench: Bench, layout: Layout, dtype: str) -> None:
    """The element axes in other shapes; None is the ragged axis, -1 the inferred size."""
    n = len(lengths_of(layout))
    x = bench.ragged(layout, (4, 3), dtype, draw_of(dtype))
    for shape in ((n, None, 12), (-1, None, 3, 4), (n, None, 2, 2, 3), (n, None, 4, 3)):
        bench.check(
            lambda a: bench.xp.reshape(a, shape),
            oracle.map_rows(lambda row: row.reshape(row.shape[0], *shape[2:])),
            x,
            note=f"{shape}: ",
        )
    x = bench.ragged(layout, (4, 3), dtype, draw_of(dtype), 1)
    for shape in ((n, 2, 2, None, 3), (n, 4, None, 3, 1)):
        ragged_axis = shape.index(None)
        bench.check(
            lambda a: bench.xp.reshape(a, shape),
            oracle.map_rows(
                lambda row: row.reshape(
                    *shape[1:ragged_axis], row.shape[1], *shape[ragged_axis + 1 :]
                )
            ),
            x,
            note=f"{shape}: ",
        )


@operation("broadcast_to broadcast_arrays", ALL, COPIED_DTYPES)
def stretched(bench: Bench, layout: Layout, dtype: str) -> None:
    """Axes of size 1, and dense operands that broadcast to the rows of a ragged operand."""
    xp, n = bench.xp, len(lengths_of(layout))
    for ragged_dim in (0, 1):
        x = bench.ragged(
            layout, (1, 3) if not ragged_dim else (3, 1), dtype, draw_of(dtype), ragged_dim
        )
        shape = (n, None, 4, 3) if not ragged_dim else (n, 3, None, 4)
        bench.check(
            lambda a: xp.broadcast_to(a, shape),
            oracle.map_rows(
                lambda row: np.broadcast_to(
                    row, [row.shape[ragged_dim] if size is None else size for size in shape[1:]]
                )
            ),
            x,
        )
    x = bench.ragged(layout, (3,), dtype, draw_of(dtype))
    operands = [
        bench.dense(shape, dtype, draw_of(dtype))
        for shape in ((3,), (n, 1, 3), (1, 3), (n, 1, 1), ())
    ]
    narrow = bench.like(x, (1,), dtype, draw_of(dtype))
    got = xp.broadcast_arrays(x.array, *(operand.array for operand in operands), narrow.array)
    for result, operand in zip(got, [x, *operands], strict=False):
        bench.close(
            result,
            oracle.map_rows(lambda row, o: np.broadcast_to(o, row.shape))(x.exact, operand.exact),
            dtype=dtype,
            note="ragged: " if operand is x else f"{np.shape(operand.exact)}: ",
        )
    assert got[-1].shape == (n, None, 3)
    bench.check(
        lambda a, b: tuple(xp.broadcast_arrays(a, b)),
        lambda a, b: ([np.broadcast_to(row, (len(row), 3)) for row in a], list(b)),
        narrow,
        x,
    )


@operation("unstack", ALL, COPIED_DTYPES)
def unstacked(bench: Bench, layout: Layout, dtype: str) -> None:
    """Rows, or the entries of an element axis."""
    for ragged_dim, x in for_each_ragged_dim(bench, layout, dtype):
        rows = bench.xp.unstack(x.array)
        assert isinstance(rows, tuple) and len(rows) == x.array.batch_size
        for row, exact in zip(rows, x.exact, strict=True):
            bench.close(row, exact, dtype=dtype)
        for axis in (2 - ragged_dim, -1 - ragged_dim):
            bench.check(
                lambda a: bench.xp.unstack(a, axis=axis),
                lambda a: tuple(
                    [np.take(row, i, axis=1 - ragged_dim) for row in a] for i in range(3)
                ),
                x,
            )


# ---------------------------------------------------------------------------------- rows and tokens
def map_row_indices(f: Callable[[np.ndarray], np.ndarray]) -> Callable[[Rows], list[np.ndarray]]:
    """Return a function that takes the rows at the indices ``f(arange(n))``."""
    return lambda rows: [rows[i] for i in f(np.arange(len(rows)))]


@operation("flip", ALL, COPIED_DTYPES)
def flipped(bench: Bench, layout: Layout, dtype: str) -> None:
    """Reversed rows, batch and elements, and all of them at once."""
    for ragged_dim, x in for_each_ragged_dim(bench, layout, dtype):
        for axis in bench.select((1, 2, -1, -2, (1, 2))):
            bench.check(
                lambda a: bench.xp.flip(a, axis=axis),
                oracle.map_rows(lambda row: np.flip(row, row_axes(axis, 3))),
                x,
                note=f"{ragged_dim}, {axis}: ",
            )
        bench.check(lambda a: bench.xp.flip(a, axis=0), lambda rows: rows[::-1], x)
        for all_axes in (None, (0, 1, 2)):
            bench.check(
                lambda a: bench.xp.flip(a, axis=all_axes),
                lambda rows: [np.flip(row) for row in rows[::-1]],
                x,
            )


@operation("roll", ALL, COPIED_DTYPES)
def rolled(bench: Bench, layout: Layout, dtype: str) -> None:
    """Shifts beyond the row length, backwards and of zero; several axes at once."""
    for ragged_dim, x in for_each_ragged_dim(bench, layout, dtype):
        for shift, axis in bench.select(((1, 1), (-2, 2), (7, -1), (0, 1), (-601, ragged_dim + 1))):
            bench.check(
                lambda a: bench.xp.roll(a, shift, axis=axis),
                oracle.map_rows(lambda row: np.roll(row, shift, axis % 3 - 1)),
                x,
                note=f"{ragged_dim}, {shift}, {axis}: ",
            )
        bench.check(
            lambda a: bench.xp.roll(a, -1, axis=0), map_row_indices(lambda i: np.roll(i, -1)), x
        )
        bench.check(
            lambda a: bench.xp.roll(a, (2, -1), axis=(1, 2)),
            oracle.map_rows(lambda row: np.roll(row, (2, -1), (0, 1))),
            x,
        )
        bench.check(
            lambda a: bench.xp.roll(a, (1, 1), axis=(0, ragged_dim + 1)),
            lambda rows: [
                np.roll(row, 1, ragged_dim)
                for row in map_row_indices(lambda i: np.roll(i, 1))(rows)
            ],
            x,
        )


@operation("repeat", ALL, COPIED_DTYPES)
def repeated(bench: Bench, layout: Layout, dtype: str) -> None:
    """Repeated tokens, rows and elements, with one count for all or one count for each."""
    xp, n = bench.xp, len(lengths_of(layout))
    for ragged_dim, x in for_each_ragged_dim(bench, layout, dtype):
        for count in bench.select((3, 0, 1)):
            for axis in (1, 2, -1):
                bench.check(
                    lambda a: xp.repeat(a, count, axis=axis),
                    oracle.map_rows(lambda row: np.repeat(row, count, axis % 3 - 1)),
                    x,
                    note=f"{ragged_dim}, {count} times, axis={axis}: ",
                )
            bench.check(
                lambda a: xp.repeat(a, count, axis=0),
                map_row_indices(lambda i: np.repeat(i, count)),
                x,
            )
        row_counts = bench.rng.integers(0, 3, n)
        bench.check(
            lambda a: xp.repeat(a, bench.lib.make(row_counts, "int32"), axis=0),
            map_row_indices(lambda i: np.repeat(i, row_counts)),
            x,
        )
        counts = bench.like(bench.ragged(layout, (), "int32"), (), "int32", "natural")
        got = xp.repeat(
            x.array, x.array.with_values(counts.array.values, ragged_dim=0), axis=ragged_dim + 1
        )
        bench.close(
            got,
            [
                np.repeat(row, token_counts, ragged_dim)
                for row, token_counts in zip(x.exact, counts.exact, strict=True)
            ],
            dtype=dtype,
        )


@operation("tile", ALL, COPIED_DTYPES)
def tiles(bench: Bench, layout: Layout, dtype: str) -> None:
    """Tiled rows, batch and elements; missing repetitions are 1."""
    for ragged_dim, x in for_each_ragged_dim(bench, layout, dtype):
        for repetitions in bench.select(
            ((2, 3), (3, 1), (2,), (1, 4, 1), (1, 1, 1), (1, 0, 2), ())
        ):
            row_repetitions = ((1, 1) + repetitions)[-2:]
            bench.check(
                lambda a: bench.xp.tile(a, repetitions),
                oracle.map_rows(lambda row: np.tile(row, row_repetitions)),
                x,
                note=f"{ragged_dim}, {repetitions}: ",
            )
        bench.check(lambda a: bench.xp.tile(a, (2, 1, 1)), lambda rows: [*rows, *rows], x)
        bench.check(
            lambda a: bench.xp.tile(a, (2, 2, 1)),
            lambda rows: [np.tile(row, (2, 1)) for row in [*rows, *rows]],
            x,
        )


@operation("diff", ALL, (*FLOATS, "int32", "int8"))
def differences(bench: Bench, layout: Layout, dtype: str) -> None:
    """Differences within rows and along elements, with prepended and appended rows."""
    for ragged_dim, x in for_each_ragged_dim(bench, layout, dtype):
        for axis, n in bench.select(product((1, 2, -1), (1, 0, 2))):
            # The first differences are rounded, which the oracle does not do.
            if n == 2 and dtype in HALF:
                continue
            bench.check(
                lambda a: bench.xp.diff(a, axis=axis, n=n),
                oracle.map_rows(partial(np.diff, axis=axis % 3 - 1, n=n)),
                x,
                note=f"{ragged_dim}, axis={axis}, n={n}: ",
            )
        end = bench.like(x, (3,), dtype, draw_of(dtype))
        axis = ragged_dim + 1
        for sides in (("prepend",), ("append",), ("prepend", "append")):
            bench.check(
                lambda a, b: bench.xp.diff(a, axis=axis, **dict.fromkeys(sides, b)),
                oracle.map_rows(
                    lambda row, b: np.diff(row, axis=ragged_dim, **dict.fromkeys(sides, b))
                ),
                x,
                end,
                note=f"{ragged_dim}, {sides}: ",
            )
