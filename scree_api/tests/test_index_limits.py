"""Indices at the limits: narrow dtypes, numbers beyond int32, negative steps, several arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from libraries import NAMES, SmallArrays, load

import scree

LENGTHS = [3, 0, 2, 4]
VALUES = np.arange(9 * 4 * 5).reshape(9, 4, 5).astype(np.float32)
ROWS = np.split(VALUES, np.cumsum(LENGTHS)[:-1])
FIRST, SECOND = [1, -1, 2], [0, 3, -2]


def rows_of(arrays: SmallArrays, x: Any) -> list[np.ndarray]:
    """Return the rows of a ragged array, or a dense array as one row."""
    parts = scree.unpack(x) if isinstance(x, scree.Array) else [x]
    return [arrays.library.read(part) for part in parts]


def check(arrays: SmallArrays, x: Any, expected: list[np.ndarray]) -> None:
    for got, row in zip(rows_of(arrays, x), expected, strict=True):
        assert got.shape == row.shape
        np.testing.assert_array_equal(got, row)


@pytest.fixture(params=NAMES)
def arrays(request: pytest.FixtureRequest) -> SmallArrays:
    return load(request.param)


#: Name -> key of the array, given the index arrays; and the rows of the result.
KEYS: dict[str, tuple[Callable[[Any, Any], Any], list[np.ndarray]]] = {
    "negative step": (lambda i, j: (..., slice(None, None, -1)), [r[..., ::-1] for r in ROWS]),
    "negative step of a row": (lambda i, j: (0, slice(None), slice(3, 0, -2)), [ROWS[0][:, 3:0:-2]]),
    "reversed row": (lambda i, j: (0, slice(None, None, -1)), [ROWS[0][::-1]]),
    "two arrays": (lambda i, j: (slice(None), slice(None), i, j), [r[:, FIRST, SECOND] for r in ROWS]),
    "two arrays of some rows": (lambda i, j: (slice(1, None), slice(None), i, j), [r[:, FIRST, SECOND] for r in ROWS[1:]]),
    "two arrays of a row": (lambda i, j: (3, slice(None), i, j), [ROWS[3][:, FIRST, SECOND]]),
    "three arrays of a row": (lambda i, j: (3, i, j, j), [ROWS[3][FIRST, SECOND, SECOND]]),
    "tokens and elements of a row": (lambda i, j: (3, i, j), [ROWS[3][FIRST, SECOND]]),
    "an array and an integer": (lambda i, j: (slice(None), slice(None), i, 1), [r[:, FIRST, 1] for r in ROWS]),
    "an array and a slice": (lambda i, j: (slice(None), slice(1, None), i, slice(1, None)), [r[1:, FIRST, 1:] for r in ROWS]),
    "large bounds of elements": (lambda i, j: (..., slice(0, 2**40), slice(-(2**70), None)), [*ROWS]),
    "large bounds of tokens": (lambda i, j: (slice(None), slice(-(2**70), 2**40)), [*ROWS]),
    "large bounds of rows": (lambda i, j: slice(-(2**70), 2**70), [*ROWS]),
    "large bounds of a row": (lambda i, j: (3, slice(-(2**70), 2**70)), [ROWS[3]]),
    "large step": (lambda i, j: (slice(None), slice(None, None, 2**40)), [r[:1] for r in ROWS]),
}  # fmt: skip


@pytest.mark.parametrize("case", KEYS)
def test_getitem_follows_numpy_in_each_row(arrays: SmallArrays, case: str) -> None:
    key, expected = KEYS[case]
    x = scree.from_lengths(arrays.make(VALUES), LENGTHS)
    check(arrays, x[key(arrays.i(FIRST), arrays.i(SECOND))], expected)


def test_getitem_arrays_with_a_slice_between_raises(arrays: SmallArrays) -> None:
    x = scree.from_lengths(arrays.make(VALUES[..., None] + np.zeros(2, np.float32)), LENGTHS)
    with pytest.raises(IndexError, match=r"expected index arrays .* neighboring axes"):
        x[:, :, arrays.i(FIRST), :, arrays.i([0, 1, 0])]
    with pytest.raises(IndexError, match="expected index arrays of one length"):
        x[:, :, arrays.i(FIRST), arrays.i([0, 1])]


@pytest.mark.parametrize("shift", [2**31 - 1, -(2**31), 2**31, 2**40, -(2**40) - 1, 2**70])
def test_roll_by_a_large_number_rolls_by_its_remainder(arrays: SmallArrays, shift: int) -> None:
    x, xp = scree.from_lengths(arrays.make(VALUES), LENGTHS), arrays.xp
    rolled = [np.roll(row, shift % max(len(row), 1), axis=0) for row in ROWS]
    check(arrays, xp.roll(x, shift, axis=1), rolled)
    check(arrays, xp.roll(x, shift, axis=2), [np.roll(row, shift % 4, axis=1) for row in ROWS])
    check(arrays, xp.roll(x, shift, axis=0), [ROWS[i] for i in np.roll(range(4), shift % 4)])


def test_diff_of_large_order_is_empty(arrays: SmallArrays) -> None:
    x = scree.from_lengths(arrays.make(VALUES), LENGTHS)
    check(arrays, arrays.xp.diff(x, axis=1, n=2**40), [row[:0] for row in ROWS])


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**40])
def test_attention_of_a_large_window_sees_all_keys(arrays: SmallArrays, window: int) -> None:
    x = arrays.r(LENGTHS, 1, 4)
    for options, expected in (
        ({"causal": True, "window": window}, {"causal": True}),
        ({"window": (window, window)}, {}),
    ):
        got = scree.attention(x, x, x, kernel="standard", **options)
        check(arrays, got, rows_of(arrays, scree.attention(x, x, x, kernel="standard", **expected)))


@pytest.mark.parametrize("k, m", [(5, 0), (0, 3), (0, 0)])
def test_matmul_of_empty_element_axes_is_zero(arrays: SmallArrays, k: int, m: int) -> None:
    x = scree.from_lengths(arrays.f(9, k), LENGTHS)
    expected = [np.zeros((n, m)) for n in LENGTHS]
    check(arrays, x @ arrays.f(k, m), expected)
    check(arrays, x @ arrays.f(4, k, m), expected)


@pytest.mark.parametrize("dtype, numbers", [
    ("int8", [-1, -128, 127, 0]), ("uint8", [255, 128, 0]), ("int16", [-300, 299]), ("uint16", [299, 0]),
    ("uint32", [299]),
])  # fmt: skip
def test_index_of_a_narrow_dtype_selects_from_many_entries(
    arrays: SmallArrays, dtype: str, numbers: list[int]
) -> None:
    if dtype not in arrays.library.dtypes:
        return  # this library has no such dtype
    xp, index, wrapped = arrays.xp, arrays.i(numbers, dtype), np.asarray(numbers) % 300
    tall, wide = np.arange(600.0).reshape(300, 2), np.arange(900.0).reshape(3, 300)
    tall, wide = tall.astype(np.float32), wide.astype(np.float32)
    short_rows = scree.from_lengths(arrays.make(tall), [1] * 300)
    elements = scree.from_lengths(arrays.make(wide), [1, 2])
    wide_rows = np.split(wide, [1])
    check(arrays, short_rows[index], [tall[[i]] for i in wrapped])
    check(arrays, xp.take(short_rows, index, axis=0), [tall[[i]] for i in wrapped])
    check(arrays, elements[:, :, index], [row[:, wrapped] for row in wide_rows])
    check(arrays, xp.take(elements, index, axis=2), [row[:, wrapped] for row in wide_rows])
    is_set = np.isin(np.arange(300), wrapped)
    updated = scree.at(short_rows)[index].set(-1.0)
    check(arrays, updated, [np.where(is_set[i], -1, tall[[i]]) for i in range(300)])
    updated = scree.at(elements)[:, :, index].add(1.0)
    check(arrays, updated, [row + is_set for row in wide_rows])

    positive = np.asarray([i for i in numbers if i >= 0])
    tokens = scree.from_lengths(arrays.i(positive, dtype), [len(positive)])
    check(arrays, scree.gather(short_rows, tokens), [tall[positive]])
    check(arrays, scree.gather(short_rows, tokens.values, axis=0), [tall[[i]] for i in positive])
    check(arrays, xp.take(arrays.make(tall), tokens, axis=0), [tall[positive]])
    ids = np.arange(300) % 100
    ids[-1] = positive.max()
    total, last = np.zeros((300, 2)), np.zeros((300, 2))
    np.add.at(total, ids, tall)
    last[ids] = tall
    check(arrays, scree.scatter_add(short_rows, arrays.i(ids, dtype), 300), [total])
    check(arrays, scree.scatter(short_rows, arrays.i(ids, dtype), 300), [last])

    row = scree.from_lengths(arrays.make(wide[0]), [300])
    positions = scree.from_lengths(index, [len(numbers)])
    check(arrays, row[positions], [wide[0][wrapped]])
    check(arrays, xp.take_along_axis(row, positions, axis=1), [wide[0][wrapped]])
