"""Cases of sorting and searching, within each row, as in NumPy.

NaN counts as the largest number. Sorts are stable.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from .bench import Bench, Data
from .layouts import ALL, Layout, lengths_of
from .reshaping import MOVED, by_row, cubes
from .table import DTYPES, operation

REAL = (*DTYPES, "int32", "int8", "uint8")


def drawn(dtype: str) -> tuple[str, ...]:
    """Return the draws that make sorting hard."""
    return (
        ("any", "ties", "gaps")
        if dtype in DTYPES
        else ("natural",)
        if dtype[0] == "u"
        else ("ties",)
    )


def order(row: np.ndarray, axis: int, descending: bool) -> np.ndarray:
    """Return the stable order of a row: equal numbers, NaN among them, keep their order."""
    ranks = np.unique(row, return_inverse=True)[1].reshape(row.shape)
    return np.argsort(-ranks if descending else ranks, axis=axis, kind="stable")


def sorting(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """Ascending and descending, stable or not, within rows and along elements."""
    f = getattr(bench.xp, name)
    index = bench.lib.dtype_name(bench.xp.argsort(bench.lib.make(np.ones(2), dtype)))
    for dim in (0, 1):
        for draw in drawn(dtype):
            x = bench.ragged(layout, (3,), dtype, draw, dim)
            for axis, descending in bench.some(
                ((dim + 1, False), (2 - dim, False), (-1, False), (dim + 1, True), (2 - dim, True))
            ):
                at = axis % 3 - 1
                places = by_row(partial(order, axis=at, descending=descending))
                if name == "argsort":
                    bench.check(
                        lambda a: f(a, axis=axis, descending=descending),
                        places,
                        x,
                        dtype=index,
                        note=f"{dim}, {draw}, axis={axis}, descending={descending}: ",
                    )
                    continue
                bench.check(
                    lambda a: f(a, axis=axis, descending=descending, stable=False),
                    lambda a: [
                        np.take_along_axis(row, p, at) for row, p in zip(a, places(a), strict=True)
                    ],
                    x,
                    note=f"{dim}, {draw}, axis={axis}, descending={descending}: ",
                )


for _name in ("sort", "argsort"):
    operation(_name, ALL, REAL)(partial(sorting, name=_name))


def extremes(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """The first extreme of each row, -1 for an empty row; the first NaN wins."""
    f, plain = getattr(bench.xp, name), getattr(np, name)
    out = bench.lib.dtype_name(f(bench.lib.make(np.ones(2), dtype)))

    def one(row: np.ndarray, axis: int, keepdims: bool) -> np.ndarray:
        if row.shape[axis]:
            return np.asarray(plain(row, axis=axis, keepdims=keepdims))
        return np.full_like(row.sum(axis=axis, keepdims=keepdims), -1, dtype=np.int64)

    for dim in (0, 1):
        for draw in drawn(dtype):
            x = bench.ragged(layout, (3,), dtype, draw, dim)
            for keepdims in (False, True):
                note = f"{dim}, {draw}, keepdims={keepdims}: "
                bench.check(
                    lambda a: f(a, axis=dim + 1, keepdims=keepdims),
                    lambda a: a.stack(lambda row: one(row, dim, keepdims)),
                    x,
                    dtype=out,
                    note=note,
                )
                bench.check(
                    lambda a: (
                        f(a, axis=1 - dim - 2, keepdims=keepdims)
                        if not dim
                        else f(a, axis=1, keepdims=keepdims)
                    ),
                    by_row(lambda row: one(row, 1 - dim, keepdims)),
                    x,
                    dtype=out,
                    note=f"elements, {note}",
                )
            if not dim:
                whole = np.concatenate([x.exact.template, *x.exact])
                actual = bench.lib.read(f(x.x))
                np.testing.assert_array_equal(
                    actual, plain(whole) if whole.size else -1, err_msg=f"axis=None, {draw}"
                )


for _name in ("argmax", "argmin"):
    operation(_name, ALL, REAL)(partial(extremes, name=_name))


@operation("nonzero", ALL, ("float32", "int32", "bool"))
def nonzero(bench: Bench, layout: Layout, dtype: str) -> None:
    """Row, position in the row and element of each nonzero, in the order of the rows."""
    for token in ((), (3,), (3, 2)):
        x = bench.ragged(layout, token, dtype, "bool")
        got = [bench.lib.read(part) for part in bench.xp.nonzero(x.x)]
        coordinates = [
            (i, *place) for i, row in enumerate(x.exact) for place in np.argwhere(row).tolist()
        ]
        np.testing.assert_array_equal(
            np.stack(got, axis=1), np.asarray(coordinates, np.int64).reshape(-1, len(token) + 2)
        )


@operation("searchsorted", ALL, ("float32", "int32"))
def searchsorted(bench: Bench, layout: Layout, dtype: str) -> None:
    """Ragged numbers in one sorted table."""
    table = np.asarray([-3, -1, 0, 0, 2, 5])
    library_table = bench.lib.make(table, dtype)
    for dim, x in cubes(bench, layout, dtype):
        for side in ("left", "right"):
            got = bench.xp.searchsorted(library_table, x.x, side=side)
            bench.close(
                got,
                [np.searchsorted(table, row, side=side) for row in x.exact],
                note=f"{dim}, {side}: ",
            )


@operation("isin: invert", ("plain",), ("int32",))
def not_in(bench: Bench, layout: Layout, dtype: str) -> None:
    """Membership in dense numbers, inverted."""
    x, table = bench.ragged(layout, (3,), dtype, "natural"), bench.dense((4,), dtype, "natural")
    bench.check(
        lambda a, b: bench.xp.isin(a, b, invert=True),
        lambda a, b: [np.isin(row, b, invert=True) for row in a],
        x,
        table,
        dtype="bool",
    )


@operation("isin", ALL, ("int32", "int8", "float32"))
def isin(bench: Bench, layout: Layout, dtype: str) -> None:
    """Membership in dense numbers, or in the numbers of all rows of another ragged array."""
    for dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, "natural", dim)
        table = bench.dense((4,), dtype, "natural")
        bench.check(
            bench.xp.isin, lambda a, b: [np.isin(row, b) for row in a], x, table, dtype="bool"
        )
        other = bench.ragged([1, 0, 2], (), dtype, "natural")
        bench.check(
            bench.xp.isin,
            lambda a, b: [np.isin(row, np.concatenate(b)) for row in a],
            x,
            other,
            dtype="bool",
        )


def unique(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """The distinct numbers of all rows together; the inverse indices are ragged."""
    for dim, draw in ((0, "ties"), (1, "ties"), (0, "special")):
        if draw == "special" and dtype != "float32":
            continue
        x = bench.ragged(layout, (3,), dtype, draw, dim)
        flat = np.concatenate([x.exact.template, *x.exact], axis=dim).ravel()
        values, first, counts = np.unique(
            flat, return_index=True, return_counts=True, equal_nan=False
        )
        got = getattr(bench.xp, name)(x.x)
        actual = bench.lib.read(got if name == "unique_values" else got.values)
        order = np.argsort(actual, kind="stable")
        np.testing.assert_array_equal(actual[order], values)
        if name in ("unique_counts", "unique_all"):
            np.testing.assert_array_equal(bench.lib.read(got.counts)[order], counts)
        if name in ("unique_inverse", "unique_all"):
            bench.close(_taken(bench, got) if x.x.size else x.x, list(x.exact))
        if name == "unique_all" and not dim and draw != "special":
            np.testing.assert_array_equal(bench.lib.read(got.indices)[order], first)


def _taken(bench: Bench, got: Any) -> Any:
    index = got.inverse_indices
    flat = bench.xp.take(got.values, bench.xp.reshape(index.values, (-1,)), axis=0)
    return index.with_values(bench.xp.reshape(flat, index.values.shape))


for _name in ("unique_values", "unique_counts", "unique_inverse", "unique_all"):
    operation(_name, ALL, ("float32", "int32", "bool"))(partial(unique, name=_name))


@operation("take_along_axis", ALL, MOVED)
def take_along_axis(bench: Bench, layout: Layout, dtype: str) -> None:
    """Positions in the row, also negative, with other lengths than the rows.

    Also entries of an element axis.
    """
    lengths = lengths_of(layout)
    for dim, x in cubes(bench, layout, dtype):
        counts = [int(bench.rng.integers(0, 4)) if length else 0 for length in lengths]
        rows = [
            bench.rng.integers(-n, n, (c, 3) if not dim else (3, c))
            if n
            else np.zeros((0, 3) if not dim else (3, 0), int)
            for n, c in zip(lengths, counts, strict=True)
        ]
        whole = np.concatenate([np.zeros((0, 3) if not dim else (3, 0), int), *rows], axis=dim)
        index = bench.of(bench.lib.make(whole, bench.lib.default_integer), counts, dim)
        bench.check(
            lambda a, i: bench.xp.take_along_axis(a, i, axis=dim + 1),
            lambda a, i: [np.take_along_axis(row, p, dim) for row, p in zip(a, i, strict=True)],
            x,
            index,
        )
        picks = bench.ragged(layout, (2,), bench.lib.default_integer, "bool", dim)
        picks = Data(x.x.with_values(picks.x.values), picks.exact)
        for axis in (2 - dim, -1 - dim):
            bench.check(
                lambda a, i: bench.xp.take_along_axis(a, i, axis=axis),
                lambda a, i: [
                    np.take_along_axis(row, p, 1 - dim) for row, p in zip(a, i, strict=True)
                ],
                x,
                picks,
            )
