"""Cases of functions that move axes, rows and tokens, against NumPy's functions on each row.

Functions that only move numbers must be exact, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from . import oracle
from .backends import FLOATS, HALF
from .bench import Bench, Data
from .layouts import ALL, Layout, lengths_of
from .oracle import Rows
from .table import operation

MOVED = (
    "float32",
    "int32",
    "bool",
    "bfloat16",
    "complex64",
)  # nothing is computed: any dtype works


def numbers(dtype: str) -> str:
    """Return the draw that suits a dtype."""
    other = "natural" if dtype[0] == "u" else "any" if dtype in FLOATS else "integer"
    return {"bool": "bool", "complex64": "complex"}.get(dtype, other)


def cubes(
    bench: Bench, layout: Layout, dtype: str, token: tuple[int, ...] = (3,)
) -> list[tuple[int, Data]]:
    """Yield (ragged axis of a row, array) for every possible position of the ragged axis."""
    dims = range(2 if bench.lib.compiles else len(token) + 1)
    return [(dim, bench.ragged(layout, token, dtype, numbers(dtype), dim)) for dim in dims]


def by_row(f: Callable[..., Any]) -> Callable[[Rows], list[np.ndarray]]:
    """Apply `f` to each row."""
    return lambda rows: [np.asarray(f(row)) for row in rows]


# --------------------------------------------------------------------------------------------- axes
@operation("expand_dims squeeze", ALL, MOVED)
def axes_of_size_one(bench: Bench, layout: Layout, dtype: str) -> None:
    """A new axis at every position after the batch axis, and its removal."""
    xp = bench.xp
    for dim, x in cubes(bench, layout, dtype):
        for axis in bench.some((1, 2, 3, -1, -2, -3)):
            new = bench.check(
                lambda a: xp.expand_dims(a, axis=axis),
                by_row(lambda row: np.expand_dims(row, axis % 4 - 1)),
                x,
                note=f"ragged_dim={dim}, axis={axis}: ",
            )
            assert new.offsets is x.x.offsets, "expand_dims lost the layout"
            bench.close(
                xp.squeeze(new, axis=axis),
                list(x.exact),
                dtype=dtype,
                note=f"squeeze, axis={axis}: ",
            )
        wide = bench.check(
            lambda a: xp.expand_dims(a, axis=(-1, 1)),
            by_row(lambda row: np.expand_dims(row, (0, -1))),
            x,
            note=f"ragged_dim={dim}, two axes: ",
        )
        bench.close(
            xp.squeeze(wide, axis=(-1, 1)), list(x.exact), dtype=dtype, note="squeeze of two axes: "
        )


@operation("permute_dims moveaxis matrix_transpose linalg.matrix_transpose", ALL, MOVED)
def permuted(bench: Bench, layout: Layout, dtype: str) -> None:
    """Every order of the axes after the batch axis, the ragged axis among them."""
    xp = bench.xp
    for dim, x in cubes(bench, layout, dtype, (3, 2)):
        for axes in bench.some(((0, 1, 2, 3), (0, 3, 1, 2), (0, 2, 3, 1), (0, -1, 2, 1))):
            inner = tuple(a % 4 - 1 for a in axes[1:])
            bench.check(
                lambda a: xp.permute_dims(a, axes),
                by_row(lambda row: row.transpose(inner)),
                x,
                note=f"{dim}, {axes}: ",
            )
        for source, target in bench.some(((1, 2), (3, 1), (-1, -2), ((1, 3), (3, 2)))):
            places = [tuple(a % 4 - 1 for a in np.atleast_1d(n).tolist()) for n in (source, target)]
            bench.check(
                lambda a: xp.moveaxis(a, source, target),
                by_row(lambda row: np.moveaxis(row, *places)),
                x,
                note=f"{dim}, moveaxis {source} to {target}: ",
            )
        swap = by_row(lambda row: row.swapaxes(1, 2))
        for f in (xp.matrix_transpose, xp.linalg.matrix_transpose):
            bench.check(f, swap, x)


@operation("reshape", ALL, MOVED)
def reshaped(bench: Bench, layout: Layout, dtype: str) -> None:
    """The element axes in other shapes; None is the ragged axis, -1 the inferred size."""
    n = len(lengths_of(layout))
    x = bench.ragged(layout, (4, 3), dtype, numbers(dtype))
    for want in ((n, None, 12), (-1, None, 3, 4), (n, None, 2, 2, 3), (n, None, 4, 3)):
        bench.check(
            lambda a: bench.xp.reshape(a, want),
            by_row(lambda row: row.reshape(row.shape[0], *want[2:])),
            x,
            note=f"{want}: ",
        )
    x = bench.ragged(layout, (4, 3), dtype, numbers(dtype), 1)
    for want in ((n, 2, 2, None, 3), (n, 4, None, 3, 1)):
        at = want.index(None)
        bench.check(
            lambda a: bench.xp.reshape(a, want),
            by_row(lambda row: row.reshape(*want[1:at], row.shape[1], *want[at + 1 :])),
            x,
            note=f"{want}: ",
        )


@operation("broadcast_to broadcast_arrays", ALL, MOVED)
def stretched(bench: Bench, layout: Layout, dtype: str) -> None:
    """Axes of size 1 broadcast; dense operands broadcast to the rows of the ragged one."""
    xp, n = bench.xp, len(lengths_of(layout))
    for dim in (0, 1):
        x = bench.ragged(layout, (1, 3) if not dim else (3, 1), dtype, numbers(dtype), dim)
        shape = (n, None, 4, 3) if not dim else (n, 3, None, 4)
        bench.check(
            lambda a: xp.broadcast_to(a, shape),
            by_row(
                lambda row: np.broadcast_to(
                    row, [row.shape[dim] if s is None else s for s in shape[1:]]
                )
            ),
            x,
        )
    x = bench.ragged(layout, (3,), dtype, numbers(dtype))
    others = [
        bench.dense(s, dtype, numbers(dtype)) for s in ((3,), (n, 1, 3), (1, 3), (n, 1, 1), ())
    ]
    got = xp.broadcast_arrays(
        x.x, *(o.x for o in others), bench.like(x, (1,), dtype, numbers(dtype)).x
    )
    for result, other in zip(got, [x, *others], strict=False):
        spread = oracle.each(lambda row, o: np.broadcast_to(o, row.shape))(x.exact, other.exact)
        bench.close(
            result,
            spread,
            dtype=dtype,
            note=f"{np.shape(other.exact) if other is not x else 'ragged'}: ",
        )
    assert got[-1].shape == (n, None, 3)
    wider = bench.like(x, (1,), dtype, numbers(dtype))
    bench.check(
        lambda a, b: tuple(xp.broadcast_arrays(a, b)),
        lambda a, b: ([np.broadcast_to(row, (len(row), 3)) for row in a], list(b)),
        wider,
        x,
    )


@operation("unstack", ALL, MOVED)
def unstacked(bench: Bench, layout: Layout, dtype: str) -> None:
    """Rows, or the entries of an element axis."""
    for dim, x in cubes(bench, layout, dtype):
        rows = bench.xp.unstack(x.x)
        assert isinstance(rows, tuple) and len(rows) == x.x.batch_size
        for row, exact in zip(rows, x.exact, strict=True):
            bench.close(row, exact, dtype=dtype)
        for axis in (2 - dim, -1 - dim):
            bench.check(
                lambda a: bench.xp.unstack(a, axis=axis),
                lambda a: tuple([np.take(row, i, axis=1 - dim) for row in a] for i in range(3)),
                x,
            )


# ---------------------------------------------------------------------------------- rows and tokens
def batch(f: Callable[[np.ndarray], np.ndarray]) -> Callable[[Rows], list[np.ndarray]]:
    """Return `f` applied to the row indices."""
    return lambda rows: [rows[i] for i in f(np.arange(len(rows)))]


@operation("flip", ALL, MOVED)
def flipped(bench: Bench, layout: Layout, dtype: str) -> None:
    """Rows reversed, the batch reversed, elements reversed, and all of them at once."""
    for dim, x in cubes(bench, layout, dtype):
        for axis in bench.some((1, 2, -1, -2, (1, 2))):
            inner = tuple(a % 3 - 1 for a in np.atleast_1d(axis).tolist())
            bench.check(
                lambda a: bench.xp.flip(a, axis=axis),
                by_row(lambda row: np.flip(row, inner)),
                x,
                note=f"{dim}, {axis}: ",
            )
        bench.check(lambda a: bench.xp.flip(a, axis=0), lambda rows: rows[::-1], x)
        for every in (None, (0, 1, 2)):
            bench.check(
                lambda a: bench.xp.flip(a, axis=every),
                lambda rows: [np.flip(row) for row in rows[::-1]],
                x,
            )


@operation("roll", ALL, MOVED)
def rolled(bench: Bench, layout: Layout, dtype: str) -> None:
    """By more than a row, backwards, by zero; several axes at once."""
    for dim, x in cubes(bench, layout, dtype):
        for shift, axis in bench.some(((1, 1), (-2, 2), (7, -1), (0, 1), (-601, dim + 1))):
            bench.check(
                lambda a: bench.xp.roll(a, shift, axis=axis),
                by_row(lambda row: np.roll(row, shift, axis % 3 - 1)),
                x,
                note=f"{dim}, {shift}, {axis}: ",
            )
        bench.check(lambda a: bench.xp.roll(a, -1, axis=0), batch(lambda i: np.roll(i, -1)), x)
        bench.check(
            lambda a: bench.xp.roll(a, (2, -1), axis=(1, 2)),
            by_row(lambda row: np.roll(row, (2, -1), (0, 1))),
            x,
        )
        bench.check(
            lambda a: bench.xp.roll(a, (1, 1), axis=(0, dim + 1)),
            lambda rows: [np.roll(row, 1, dim) for row in batch(lambda i: np.roll(i, 1))(rows)],
            x,
        )


@operation("repeat", ALL, MOVED)
def repeated(bench: Bench, layout: Layout, dtype: str) -> None:
    """Tokens, rows and elements; by one count for all, or by one count for each."""
    xp, n = bench.xp, len(lengths_of(layout))
    for dim, x in cubes(bench, layout, dtype):
        for count in bench.some((3, 0, 1)):
            for axis in (1, 2, -1):
                bench.check(
                    lambda a: xp.repeat(a, count, axis=axis),
                    by_row(lambda row: np.repeat(row, count, axis % 3 - 1)),
                    x,
                    note=f"{dim}, {count} times, axis={axis}: ",
                )
            bench.check(
                lambda a: xp.repeat(a, count, axis=0), batch(lambda i: np.repeat(i, count)), x
            )
        each = bench.rng.integers(0, 3, n)
        bench.check(
            lambda a: xp.repeat(a, bench.lib.make(each, "int32"), axis=0),
            batch(lambda i: np.repeat(i, each)),
            x,
        )
        counts = bench.like(bench.ragged(layout, (), "int32"), (), "int32", "natural")
        got = xp.repeat(x.x, x.x.with_values(counts.x.values, ragged_dim=0), axis=dim + 1)
        bench.close(
            got,
            [np.repeat(row, c, dim) for row, c in zip(x.exact, counts.exact, strict=True)],
            dtype=dtype,
        )


@operation("tile", ALL, MOVED)
def tiles(bench: Bench, layout: Layout, dtype: str) -> None:
    """Rows end to end, the batch repeated, elements side by side; missing repetitions are 1."""
    for dim, x in cubes(bench, layout, dtype):
        for times in bench.some(((2, 3), (3, 1), (2,), (1, 4, 1), (1, 1, 1), (1, 0, 2), ())):
            inner = ((1, 1) + times)[-2:]
            bench.check(
                lambda a: bench.xp.tile(a, times),
                by_row(lambda row: np.tile(row, inner)),
                x,
                note=f"{dim}, {times}: ",
            )
        bench.check(lambda a: bench.xp.tile(a, (2, 1, 1)), lambda rows: [*rows, *rows], x)
        bench.check(
            lambda a: bench.xp.tile(a, (2, 2, 1)),
            lambda rows: [np.tile(row, (2, 1)) for row in [*rows, *rows]],
            x,
        )


@operation("diff", ALL, (*FLOATS, "int32", "int8"))
def differences(bench: Bench, layout: Layout, dtype: str) -> None:
    """Within rows and along elements; short rows become empty; rows are prepended and appended."""
    half = dtype in HALF
    for dim, x in cubes(bench, layout, dtype):
        for axis, n in bench.some(product((1, 2, -1), (1, 0, 2))):
            if n == 2 and half:
                continue  # the intermediate differences are rounded
            bench.check(
                lambda a: bench.xp.diff(a, axis=axis, n=n),
                by_row(partial(_diff, axis=axis % 3 - 1, n=n)),
                x,
                note=f"{dim}, axis={axis}, n={n}: ",
            )
        end = bench.like(x, (3,), dtype, numbers(dtype))
        axis = dim + 1
        for names in (("prepend",), ("append",), ("prepend", "append")):
            bench.check(
                lambda a, b: bench.xp.diff(a, axis=axis, **dict.fromkeys(names, b)),
                lambda a, b: [
                    _diff(row, dim, 1, **dict.fromkeys(names, other))
                    for row, other in zip(a, b, strict=True)
                ],
                x,
                end,
                note=f"{dim}, {names}: ",
            )


def _diff(row: np.ndarray, axis: int, n: int, **ends: np.ndarray) -> np.ndarray:
    parts = [ends.get("prepend"), row, ends.get("append")]
    row = np.concatenate([part for part in parts if part is not None], axis=axis)
    for _ in range(n):
        later, earlier = (
            np.take(row, np.arange(a, max(row.shape[axis] - 1 + a, a)), axis=axis) for a in (1, 0)
        )
        row = later - earlier
    return row
