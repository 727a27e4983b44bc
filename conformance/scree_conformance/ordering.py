"""Cases of sorting and searching, within each row, as in NumPy.

NaN counts as the largest number. Sorts are stable.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from . import oracle
from .bench import Bench, Input
from .layouts import ALL, Layout, lengths_of
from .reshaping import COPIED_DTYPES, for_each_ragged_dim
from .table import DTYPES, operation

REAL = (*DTYPES, "int32", "int8", "uint8")


def draws_of(dtype: str) -> tuple[str, ...]:
    """Return the draws with ties and, where the dtype has them, NaN and infinity."""
    if dtype in DTYPES:
        return ("any", "ties", "gaps")
    return ("natural",) if dtype.startswith("u") else ("ties",)


def sorting(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """Ascending and descending, stable or not, within rows and along elements."""
    f = getattr(bench.xp, name)
    index_dtype = bench.lib.dtype_name(bench.xp.argsort(bench.lib.make(np.ones(2), dtype)))
    for ragged_dim in (0, 1):
        tokens, elements = ragged_dim + 1, 2 - ragged_dim
        variants = (
            (tokens, False),
            (elements, False),
            (-1, False),
            (tokens, True),
            (elements, True),
        )
        for draw in draws_of(dtype):
            x = bench.ragged(layout, (3,), dtype, draw, ragged_dim)
            for axis, descending in bench.select(variants):
                row_axis = axis % 3 - 1
                note = f"{ragged_dim}, {draw}, axis={axis}, descending={descending}: "
                argsort = partial(oracle.stable_argsort, axis=row_axis, descending=descending)
                if name == "argsort":
                    bench.check(
                        lambda a: f(a, axis=axis, descending=descending),
                        oracle.map_rows(argsort),
                        x,
                        dtype=index_dtype,
                        note=note,
                    )
                else:
                    bench.check(
                        lambda a: f(a, axis=axis, descending=descending, stable=False),
                        oracle.map_rows(
                            lambda row: np.take_along_axis(row, argsort(row), row_axis)
                        ),
                        x,
                        note=note,
                    )


for _name in ("sort", "argsort"):
    operation(_name, ALL, REAL)(partial(sorting, name=_name))


def extremes(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """The first maximum or minimum of each row, -1 for an empty row; NaN precedes all numbers."""
    f, numpy_function = getattr(bench.xp, name), getattr(np, name)
    index_dtype = bench.lib.dtype_name(f(bench.lib.make(np.ones(2), dtype)))

    def reference_row(row: np.ndarray, axis: int, keepdims: bool) -> np.ndarray:
        if row.shape[axis]:
            return np.asarray(numpy_function(row, axis=axis, keepdims=keepdims))
        return np.full_like(row.sum(axis=axis, keepdims=keepdims), -1, dtype=np.int64)

    for ragged_dim in (0, 1):
        for draw in draws_of(dtype):
            x = bench.ragged(layout, (3,), dtype, draw, ragged_dim)
            for keepdims in (False, True):
                note = f"{ragged_dim}, {draw}, keepdims={keepdims}: "
                bench.check(
                    lambda a: f(a, axis=ragged_dim + 1, keepdims=keepdims),
                    lambda a: a.stack(lambda row: reference_row(row, ragged_dim, keepdims)),
                    x,
                    dtype=index_dtype,
                    note=note,
                )
                # The element axis, counted from the end or from the start.
                element_axis = 1 if ragged_dim else -1
                bench.check(
                    lambda a: f(a, axis=element_axis, keepdims=keepdims),
                    oracle.map_rows(lambda row: reference_row(row, 1 - ragged_dim, keepdims)),
                    x,
                    dtype=index_dtype,
                    note=f"elements, {note}",
                )
            if not ragged_dim:
                tokens = x.exact.concatenate()
                expected = numpy_function(tokens) if tokens.size else -1
                actual = bench.lib.read(f(x.array))
                np.testing.assert_array_equal(actual, expected, err_msg=f"axis=None, {draw}")


for _name in ("argmax", "argmin"):
    operation(_name, ALL, REAL)(partial(extremes, name=_name))


@operation("nonzero", ALL, ("float32", "int32", "bool"))
def nonzero(bench: Bench, layout: Layout, dtype: str) -> None:
    """Row, position in the row and element of each nonzero, in the order of the rows."""
    for token in ((), (3,), (3, 2)):
        x = bench.ragged(layout, token, dtype, "bool")
        got = [bench.lib.read(part) for part in bench.xp.nonzero(x.array)]
        coordinates = [
            (i, *index) for i, row in enumerate(x.exact) for index in np.argwhere(row).tolist()
        ]
        np.testing.assert_array_equal(
            np.stack(got, axis=1), np.asarray(coordinates, np.int64).reshape(-1, len(token) + 2)
        )


@operation("searchsorted", ALL, ("float32", "int32"))
def searchsorted(bench: Bench, layout: Layout, dtype: str) -> None:
    """Ragged numbers in one sorted table."""
    table = np.asarray([-3, -1, 0, 0, 2, 5])
    library_table = bench.lib.make(table, dtype)
    for ragged_dim, x in for_each_ragged_dim(bench, layout, dtype):
        for side in ("left", "right"):
            got = bench.xp.searchsorted(library_table, x.array, side=side)
            bench.close(
                got,
                [np.searchsorted(table, row, side=side) for row in x.exact],
                note=f"{ragged_dim}, {side}: ",
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
    for ragged_dim in (0, 1):
        x = bench.ragged(layout, (3,), dtype, "natural", ragged_dim)
        table = bench.dense((4,), dtype, "natural")
        bench.check(
            bench.xp.isin, lambda a, b: [np.isin(row, b) for row in a], x, table, dtype="bool"
        )
        ragged_table = bench.ragged([1, 0, 2], (), dtype, "natural")
        bench.check(
            bench.xp.isin,
            lambda a, b: [np.isin(row, np.concatenate(b)) for row in a],
            x,
            ragged_table,
            dtype="bool",
        )


def unique(bench: Bench, layout: Layout, dtype: str, *, name: str) -> None:
    """The distinct numbers of all rows together; the inverse indices are ragged."""
    for ragged_dim, draw in ((0, "ties"), (1, "ties"), (0, "special")):
        if draw == "special" and dtype != "float32":
            continue
        x = bench.ragged(layout, (3,), dtype, draw, ragged_dim)
        flat = x.exact.concatenate(axis=ragged_dim).ravel()
        values, first_indices, counts = np.unique(
            flat, return_index=True, return_counts=True, equal_nan=False
        )
        got = getattr(bench.xp, name)(x.array)
        actual = bench.lib.read(got if name == "unique_values" else got.values)
        order = np.argsort(actual, kind="stable")
        np.testing.assert_array_equal(actual[order], values)
        if name in ("unique_counts", "unique_all"):
            np.testing.assert_array_equal(bench.lib.read(got.counts)[order], counts)
        if name in ("unique_inverse", "unique_all"):
            bench.close(_from_inverse(bench, got) if x.array.size else x.array, list(x.exact))
        if name == "unique_all" and not ragged_dim and draw != "special":
            np.testing.assert_array_equal(bench.lib.read(got.indices)[order], first_indices)


def _from_inverse(bench: Bench, got: Any) -> Any:
    """Return the original array, from the distinct values and the inverse indices."""
    index = got.inverse_indices
    flat = bench.xp.take(got.values, bench.xp.reshape(index.values, (-1,)), axis=0)
    return index.with_values(bench.xp.reshape(flat, index.values.shape))


for _name in ("unique_values", "unique_counts", "unique_inverse", "unique_all"):
    operation(_name, ALL, ("float32", "int32", "bool"))(partial(unique, name=_name))


@operation("take_along_axis", ALL, COPIED_DTYPES)
def take_along_axis(bench: Bench, layout: Layout, dtype: str) -> None:
    """Positions in the row, also negative, and entries of an element axis.

    The index has other row lengths than the array.
    """
    lengths = lengths_of(layout)
    for ragged_dim, x in for_each_ragged_dim(bench, layout, dtype):
        counts = [int(bench.rng.integers(0, 4)) if length else 0 for length in lengths]
        shapes = [(3, count) if ragged_dim else (count, 3) for count in counts]
        positions = [
            bench.rng.integers(-length, length, shape) if length else np.zeros(shape, int)
            for length, shape in zip(lengths, shapes, strict=True)
        ]
        no_positions = np.zeros((3, 0) if ragged_dim else (0, 3), int)
        values = np.concatenate([no_positions, *positions], axis=ragged_dim)
        index = bench.of(bench.lib.make(values, bench.lib.default_integer), counts, ragged_dim)
        bench.check(
            lambda a, i: bench.xp.take_along_axis(a, i, axis=ragged_dim + 1),
            oracle.map_rows(partial(np.take_along_axis, axis=ragged_dim)),
            x,
            index,
        )
        element_index = bench.ragged(layout, (2,), bench.lib.default_integer, "bool", ragged_dim)
        element_index = Input(x.array.with_values(element_index.array.values), element_index.exact)
        for axis in (2 - ragged_dim, -1 - ragged_dim):
            bench.check(
                lambda a, i: bench.xp.take_along_axis(a, i, axis=axis),
                oracle.map_rows(partial(np.take_along_axis, axis=1 - ragged_dim)),
                x,
                element_index,
            )
