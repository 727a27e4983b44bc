"""Round trips of list columns of pyarrow, polars, pandas and datasets, on shared memory."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from ragged_cases import INSTALLED, arrays, assert_same, few_examples, make_values

import scree
from scree.bridges import from_arrow, to_arrow
from scree.bridges.dlpack import on_host

SHARED = ("uint8", "int32", "int64", "float16", "float32", "float64")


def make_array(dtype: str = "float32") -> scree.Array:
    return scree.from_lengths(make_values((6, 2), dtype), [3, 0, 2, 1])


@few_examples
@given(arr=arrays())
def test_round_trip_keeps_rows_and_offset_dtype(arr: scree.Array) -> None:
    column = to_arrow(arr)
    column.validate(full=True)
    expected = on_host(arr)
    assert column.to_pylist() == [row.tolist() for row in expected]
    back = from_arrow(column)
    assert back.offsets.dtype == arr.offsets.dtype
    assert_same(back, scree.Array(expected.values, expected.offsets))


@pytest.mark.parametrize("dtype", SHARED)
def test_round_trip_shares_memory(dtype: str) -> None:
    arr = make_array(dtype)
    back = from_arrow(to_arrow(arr))
    assert np.shares_memory(back.values, arr.values)
    assert np.shares_memory(back.offsets, arr.offsets)


@pytest.mark.parametrize("library", INSTALLED)
def test_to_arrow_of_every_library(library: str) -> None:
    assert to_arrow(make_array().to_backend(library)).to_pylist() == [
        row.tolist() for row in make_array()
    ]


@pytest.mark.parametrize("start, stop", [(1, 4), (2, 2), (0, 2)])
def test_from_arrow_of_a_slice_shares_memory(start: int, stop: int) -> None:
    arr = make_array()
    part = from_arrow(to_arrow(arr)[start:stop])
    assert_same(part, arr[start:stop])
    assert not part.size or np.shares_memory(part.values, arr.values)


def test_from_arrow_joins_chunks() -> None:
    column = pa.chunked_array([to_arrow(make_array()), to_arrow(make_array())[1:3]])
    assert from_arrow(column).lengths.tolist() == [3, 0, 2, 1, 0, 2]
    empty = from_arrow(pa.chunked_array([], type=pa.list_(pa.int8())))
    assert empty.shape == (0, None)
    assert empty.dtype == np.int8


def test_array_implements_the_c_interface() -> None:
    arr = make_array()
    assert pa.array(arr).equals(to_arrow(arr))
    assert np.shares_memory(from_arrow(pa.array(arr)).values, arr.values)
    assert pa.field(
        pa.schema([pa.field("x", to_arrow(arr).type)]).field("x")
    ).type == pa.DataType._import_from_c_capsule(arr.__arrow_c_schema__())
    assert_same(from_arrow(arr), arr)


@pytest.mark.needs("polars")
@pytest.mark.parametrize("indices", ["int32", "int64"])
def test_polars_round_trip(indices: str) -> None:
    import polars

    arr = scree.Array(make_values((6,), "int64"), np.asarray([0, 3, 3, 6], dtype=indices))
    series = polars.Series("ids", arr)
    assert series.to_list() == [row.tolist() for row in arr]
    back = from_arrow(series)
    assert_same(back, arr)
    assert np.shares_memory(
        back.values, from_arrow(series.to_arrow()).values
    )  # the memory of the series itself
    assert_same(from_arrow(polars.DataFrame({"ids": series})["ids"][1:]), arr[1:])


@pytest.mark.needs("polars")
def test_polars_lists_of_arrays() -> None:
    import polars

    series = polars.Series("x", make_array())
    assert series.dtype == polars.List(polars.Array(polars.Float32, 2))
    assert_same(from_arrow(series), make_array())
    with pytest.raises(ValueError, match="no null rows, got 1"):
        from_arrow(polars.Series("x", [[1, 2], None]))


@pytest.mark.needs("datasets")
def test_from_arrow_of_a_datasets_column() -> None:
    import datasets

    data = datasets.Dataset(
        pa.table({"ids": pa.array(make_array("int64").with_values(make_values((6,), "int64")))})
    )
    arr = from_arrow(data["ids"])
    assert arr.lengths.tolist() == [3, 0, 2, 1]
    assert np.shares_memory(arr.values, from_arrow(data.data.column("ids")).values)
    assert from_arrow(data.select([2, 0])["ids"]).lengths.tolist() == [2, 3]


@pytest.mark.needs("pandas")
def test_from_pandas_of_an_arrow_column() -> None:
    import pandas

    series = pandas.Series(
        pa.array(make_array()), dtype=pandas.ArrowDtype(to_arrow(make_array()).type)
    )
    assert_same(scree.bridges.from_pandas(series), make_array())


@pytest.mark.parametrize(
    "column, error, message",
    [
        (pa.array([[1], None, [2]]), ValueError, r"no null rows, got 1; use column"),
        (pa.array([[1, None], [2]]), ValueError, "no null elements, got 1"),
        (
            pa.array([[[1, 2], None]], type=pa.list_(pa.list_(pa.int64(), 2))),
            ValueError,
            "no null tokens, got 1",
        ),
        (pa.array([1, 2]), TypeError, r"expected list<T> or large_list<T>, got int64"),
        (pa.array([[[1], [2, 3]]]), TypeError, "there is one ragged axis"),
        (pa.array([["a"]]), TypeError, "lists of numbers"),
        ([[1], [2]], TypeError, "for lists use from_lists"),
    ],
)
def test_from_arrow_unsupported_column_raises(
    column: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"column: .*{message}"):
        from_arrow(column)


def test_to_arrow_unsupported_array_raises() -> None:
    with pytest.raises(ValueError, match="no axes of size 0"):
        to_arrow(make_array().with_values(np.zeros((6, 0))))
    with pytest.raises(TypeError, match="Arrow has no complex64"):
        to_arrow(make_array("complex64"))


def test_remedies_for_nulls_work() -> None:
    column = pa.chunked_array(
        [pa.array([[1, None], [3]]), pa.array([[None]], pa.list_(pa.int64()))]
    )
    with pytest.raises(ValueError, match="column: expected no null elements, got 2; use ") as error:
        from_arrow(column)
    remedies = str(error.value).partition("use ")[2].split(" or ")
    rows = [eval(remedy, {"scree": scree, "column": column}).tolist() for remedy in remedies]
    assert rows == [[[1], [3], []], [[1, 0], [3], [0]]]
    column = pa.array([[1], None])
    with pytest.raises(ValueError, match="column: expected no null rows, got 1; use ") as error:
        from_arrow(column)
    remedies = str(error.value).partition("use ")[2].split(" or ")
    rows = [from_arrow(eval(remedy, {"column": column})).tolist() for remedy in remedies]
    assert rows == [[[1]], [[1], []]]


def test_collate_of_arrow_tables() -> None:
    table = pa.table({"ids": [[1, 2], [], [3]], "label": [0.5, 1.5, 2.5]})
    for samples in (table, [table[:1], table[1:]]):
        batch = scree.data.collate(samples)
        assert batch["ids"].tolist() == [[1, 2], [], [3]]
        assert batch["label"].tolist() == [0.5, 1.5, 2.5]


@pytest.mark.parametrize("sizes", [(0,), (0, 2), (2, 0)])
@pytest.mark.parametrize("rows", [[], [[]], [[], []], [[[]] * 3, [[]]]])
def test_from_arrow_lists_of_size_zero_keep_their_tokens(sizes: tuple, rows: list) -> None:
    if rows and rows[0] and sizes != (0,):
        return  # an element of several axes has another nesting
    dtype = pa.float32()
    for size in reversed(sizes):
        dtype = pa.list_(dtype, size)
    arr = from_arrow(pa.array(rows, type=pa.list_(dtype)))
    assert arr.shape == (len(rows), None, *sizes)
    np.testing.assert_array_equal(arr.lengths, [len(row) for row in rows])
