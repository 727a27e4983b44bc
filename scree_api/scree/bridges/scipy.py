"""SciPy's sparse matrices by rows (CSR): a ragged array of column numbers and one of values, on one layout."""

from __future__ import annotations

from typing import Any

from scipy import sparse

from ..array import Array
from ..broadcasting import check_shared_layout
from .dlpack import on_host


def from_scipy(matrix: Any) -> tuple[Array, Array]:
    """The column numbers and the values of the stored entries of each row; nothing is copied.

    Parameters
    ----------
    matrix
        (n, m) sparse array or matrix in CSR form.

    Returns
    -------
    columns, values
        (n, None) each, on one layout, ``indptr`` of the matrix.

    Examples
    --------
    >>> import numpy as np, scipy.sparse, scree
    >>> columns, values = scree.bridges.from_scipy(scipy.sparse.csr_array(np.asarray([[0, 5, 6], [0, 0, 0], [7, 0, 0]])))
    >>> columns.values, values.values, values.lengths
    (array([1, 2, 0], dtype=int32), array([5, 6, 7]), array([2, 0, 1], dtype=int32))
    """
    if getattr(matrix, "format", None) != "csr":
        raise TypeError(
            f"matrix: expected a sparse matrix in CSR form, got {type(matrix).__name__}; convert it with tocsr()"
        )
    columns = Array(matrix.indices, matrix.indptr)
    return columns, columns.with_values(matrix.data)


def to_scipy(columns: Array, values: Array, num_columns: int) -> Any:
    """A CSR array (n, num_columns) of column numbers and values on one layout; host memory is not copied.

    Parameters
    ----------
    columns
        (n, None) int32 or int64 in [0, num_columns).
    values
        (n, None) on the same rows.
    num_columns
        The width of the matrix.

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
            f"columns: expected (n, None) int32 or int64, got {columns.dtype} of shape {columns.shape}"
        )
    check_shared_layout("to_scipy", (columns, values))
    columns, values = on_host(columns), on_host(values)
    found = columns.values
    if found.size and not 0 <= found.min() <= found.max() < num_columns:
        raise ValueError(
            f"columns: expected numbers in [0, {num_columns}), got {found.min()} to {found.max()}"
        )
    shape = (columns.batch_size, num_columns)
    return sparse.csr_array((values.values, found, columns.offsets), shape=shape, copy=False)
