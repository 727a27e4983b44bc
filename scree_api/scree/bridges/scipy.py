"""SciPy's sparse CSR matrices.

The stored entries of a matrix are two ragged arrays on one layout: the column indices and the
values. Indices, values and ``indptr`` share memory in both directions.
"""

from __future__ import annotations

from typing import Any

from scipy import sparse

from ..array import Array
from ..broadcasting import check_shared_layout
from .dlpack import on_host


def from_scipy(matrix: Any) -> tuple[Array, Array]:
    """Return the column indices and the values of the stored entries of each row; copies nothing.

    Parameters
    ----------
    matrix
        (n, m) sparse array or matrix in CSR form.

    Returns
    -------
    columns, values
        (n, None) arrays on one layout, whose offsets are ``indptr`` of the matrix.

    Raises
    ------
    TypeError
        If `matrix` is not in CSR form.

    Examples
    --------
    >>> import numpy as np, scipy.sparse, scree
    >>> matrix = scipy.sparse.csr_array(np.asarray([[0, 5, 6], [0, 0, 0], [7, 0, 0]]))
    >>> columns, values = scree.bridges.from_scipy(matrix)
    >>> columns.values, values.values, values.lengths
    (array([1, 2, 0], dtype=int32), array([5, 6, 7]), array([2, 0, 1], dtype=int32))
    """
    if getattr(matrix, "format", None) != "csr":
        raise TypeError(
            f"matrix: expected a sparse matrix in CSR form, got {type(matrix).__name__}; "
            "convert it with tocsr()"
        )
    columns = Array(matrix.indices, matrix.indptr)
    return columns, columns.with_values(matrix.data)


def to_scipy(columns: Array, values: Array, num_columns: int) -> Any:
    """Return a CSR array of column indices and values; does not copy host memory.

    Parameters
    ----------
    columns
        (n, None) int32 or int64 column indices in [0, num_columns).
    values
        (n, None) values on the same rows.
    num_columns
        Width of the matrix.

    Returns
    -------
    scipy.sparse.csr_array
        (n, num_columns) matrix.

    Raises
    ------
    ValueError
        If `columns` has another shape or dtype or is out of bounds, or if the rows of `values` have
        other lengths.

    Examples
    --------
    >>> import numpy as np, scree
    >>> columns = scree.from_lengths(np.asarray([1, 2, 0]), [2, 0, 1])
    >>> scree.bridges.to_scipy(columns, columns.with_values(np.asarray([5, 6, 7])), 3).toarray()
    array([[0, 5, 6],
           [0, 0, 0],
           [7, 0, 0]])
    """
    if columns.ndim != 2 or columns.dtype not in (columns.layout.xp.int32, columns.layout.xp.int64):
        raise ValueError(
            f"columns: expected (n, None) int32 or int64, got {columns.dtype} "
            f"of shape {columns.shape}"
        )
    check_shared_layout("to_scipy", (columns, values))
    columns, values = on_host(columns), on_host(values)
    indices = columns.values
    if indices.size and not 0 <= indices.min() <= indices.max() < num_columns:
        raise ValueError(
            f"columns: expected numbers in [0, {num_columns}), "
            f"got {indices.min()} to {indices.max()}"
        )
    shape = (columns.batch_size, num_columns)
    return sparse.csr_array((values.values, indices, columns.offsets), shape=shape, copy=False)
