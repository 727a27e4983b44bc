"""Round trips of CSR matrices, on shared memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ragged_cases import arrays, assert_same, few_examples, make_values
from scipy import sparse

import scree
from scree.bridges import from_scipy, to_scipy


@few_examples
@given(
    columns=arrays(
        dtypes=("int32", "int64"), ragged=False, element_shapes=((),), strides=("plain",)
    ),
    dtype=st.sampled_from(("bool", "int8", "int64", "float32", "float64", "complex64")),
)
def test_round_trip_shares_memory(columns: scree.Array, dtype: str) -> None:
    columns = scree.Array(
        columns.values, columns.offsets.astype(columns.dtype)
    )  # SciPy keeps one dtype for both
    values = columns.with_values(make_values((columns.total_length,), dtype))
    matrix = to_scipy(columns, values, 97)
    assert matrix.shape == (columns.batch_size, 97)
    back = from_scipy(matrix)
    for converted, original in zip(back, (columns, values), strict=True):
        assert_same(converted, original)
        assert np.shares_memory(converted.values, original.values) or not original.size
    assert back[0].layout is back[1].layout


def test_from_scipy_of_a_dense_matrix() -> None:
    dense = np.where(make_values((5, 7), "int64") % 3 == 0, make_values((5, 7), "int64"), 0)
    dense[2] = 0
    columns, values = from_scipy(sparse.csr_matrix(dense))
    for row, row_columns, row_values in zip(dense, columns, values, strict=True):
        np.testing.assert_array_equal(row_columns, np.flatnonzero(row))
        np.testing.assert_array_equal(row_values, row[row != 0])


def test_invalid_argument_raises() -> None:
    columns = scree.from_lengths(np.asarray([0, 3]), [1, 1])
    with pytest.raises(TypeError, match=r"convert it with tocsr\(\)"):
        from_scipy(sparse.csc_array(np.eye(2)))
    with pytest.raises(ValueError, match=r"columns: expected numbers in \[0, 3\), got 0 to 3"):
        to_scipy(columns, columns, 3)
    with pytest.raises(ValueError, match="columns: expected"):
        to_scipy(columns.with_values(np.ones(2)), columns, 4)
    with pytest.raises(ValueError, match="to_scipy: expected rows of equal lengths"):
        to_scipy(columns, scree.from_lengths(np.ones(2), [2, 0]), 4)
