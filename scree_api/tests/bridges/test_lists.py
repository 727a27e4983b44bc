"""Round trips of lists of lists and pandas columns of objects."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from ragged_cases import INSTALLED, arrays, assert_same, few_examples, make_values

import scree
from scree.bridges import from_lists, from_pandas, to_lists, to_pandas
from scree.bridges.dlpack import on_host


@few_examples
@given(arr=arrays(indices=("int32",)))
def test_lists_round_trip(arr: scree.Array) -> None:
    lists, expected = to_lists(arr), on_host(arr)
    assert lists == [row.tolist() for row in expected]
    if arr.size or arr.ndim == 2:  # empty lists have no element axes
        assert_same(
            from_lists(lists, dtype=arr.dtype), scree.Array(expected.values, expected.offsets)
        )
    if lists:
        assert_same(
            from_lists(list(expected)), scree.Array(expected.values, expected.offsets)
        )  # rows that are arrays


@pytest.mark.needs("pandas")
@few_examples
@given(arr=arrays(indices=("int32",)))
def test_pandas_round_trip(arr: scree.Array) -> None:
    import pandas

    series, expected = to_pandas(arr, name="x"), on_host(arr)
    assert isinstance(series, pandas.Series)
    assert series.name == "x"
    assert all(np.shares_memory(row, arr.values) or not row.size for row in series)
    if arr.batch_size:
        assert_same(from_pandas(series), scree.Array(expected.values, expected.offsets))


@pytest.mark.parametrize("library", INSTALLED)
def test_to_lists_of_every_library(library: str) -> None:
    arr = scree.from_lengths(make_values((6, 2), "float32"), [3, 0, 2, 1])
    assert to_lists(arr.to_backend(library)) == to_lists(arr)


@pytest.mark.parametrize(
    "rows, error, message",
    [
        ([[], []], ValueError, "dtype: expected a dtype"),
        ([[1], None], TypeError, r"rows\[1\]: expected a list or an array, got NoneType"),
        ([[1], 2], TypeError, r"rows\[1\]: expected a list or an array, got int"),
        (["ab"], TypeError, r"rows\[0\]: expected a list or an array, got str"),
        ([[[1], [2, 3]]], TypeError, "rows: expected elements of one shape"),
        ([["a"]], TypeError, "rows: expected numbers or booleans"),
        ([[None]], TypeError, "rows: expected numbers or booleans"),
    ],
)
def test_from_lists_invalid_rows_raise(rows: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_lists(rows)


@pytest.mark.parametrize(
    ("rows", "dtype"),
    [
        ([np.asarray([300])], np.int8), ([[300]], np.int8), ([[-1]], np.uint8), ([[1.5]], np.int64),
        ([[np.nan]], np.int32), ([[2**63]], np.int64), ([[-1]], np.uint64), ([[2]], np.bool_),
        ([[1j]], np.int8), ([np.asarray([1e30], np.float32)], np.int64),
    ],
)  # fmt: skip
def test_from_lists_elements_that_a_dtype_cannot_hold_raise(rows: Any, dtype: Any) -> None:
    with pytest.raises(ValueError, match="dtype: expected one that holds all elements"):
        scree.bridges.from_lists(rows, dtype)


def test_from_lists_exact_and_rounding_conversions() -> None:
    for rows, dtype in (([[1.0, 2.0]], np.int8), ([[1, 2]], np.float16), ([[0.1]], np.float32), ([[0, 1]], np.bool_)):  # fmt: skip
        values = scree.bridges.from_lists(rows, dtype).values
        assert values.dtype == dtype and np.array_equal(values, np.asarray(rows[0]).astype(dtype))


@pytest.mark.parametrize(
    "make",
    [
        lambda m: scree.from_lengths(m, [1, 2]),
        lambda m: scree.pack([m, m]),
        lambda m: scree.bridges.from_lists([m, m]),
        lambda m: scree.from_lengths(np.arange(3.0), [1, 2]).with_values(m),
        lambda m: scree.from_lengths(np.arange(3.0), [1, 2]) + m[:1],
        lambda m: scree.from_lengths(np.arange(6.0), np.ma.array([1, 5], mask=[0, 1])),
        lambda m: scree.from_padded(np.ma.array(np.zeros((2, 3)), mask=True), lengths=[1, 2]),
    ],
)
def test_masked_array_raises(make: Any) -> None:
    with pytest.raises(TypeError, match=r"without a mask, which would be lost.*x\.filled"):
        make(np.ma.array(np.arange(3.0), mask=[0, 1, 0]))
