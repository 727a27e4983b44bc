"""Apache Arrow's lists: pyarrow, polars, Hugging Face datasets, and the Arrow C data interface.

Values and offsets share host memory in both directions, except booleans, which Arrow packs into
bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ..array import Array
from .dlpack import on_host

#: Remedies for null tokens and for null elements, where `column` is the column.
DROP_NULLS = "scree.from_lists([[x for x in row if x is not None] for row in column.to_pylist()])"
REPLACE_NULLS = (
    "scree.from_lists([[0 if x is None else x for x in row] for row in column.to_pylist()])"
)


def from_arrow(column: Any) -> Array:
    """Return a NumPy ragged array of a column of lists.

    Parameters
    ----------
    column
        Column of type ``list<T>`` or ``large_list<T>``, with T a number, a boolean or a
        ``fixed_size_list`` of them, nested to any depth. It may be an array or chunked array of
        pyarrow, a column of polars, pandas or datasets, or any object with
        ``__arrow_c_array__`` or ``__arrow_c_stream__``.

    Returns
    -------
    Array
        (n, None, *sizes) array on the memory of Arrow, which must not be written to. Three things
        are copied: booleans, a column of several chunks, and the offsets of a slice.

    Raises
    ------
    TypeError
        If `column` is not a column of lists of numbers.
    ValueError
        If a row, token or element is null.

    Examples
    --------
    >>> import pyarrow, scree
    >>> scree.bridges.from_arrow(pyarrow.array([[1, 2], [], [3]])).lengths
    array([2, 0, 1], dtype=int32)
    """
    lists = _as_one_chunk(column)
    if not pa.types.is_list(lists.type) and not pa.types.is_large_list(lists.type):
        raise TypeError(
            f"column: expected list<T> or large_list<T>, got {lists.type}; cast it with column.cast"
        )
    _check_no_nulls(lists, "rows", "column.drop_null() or column.fill_null([])")
    offsets = lists.offsets.to_numpy(zero_copy_only=True)
    values, sizes = lists.values.slice(offsets[0], offsets[-1] - offsets[0]), []
    while pa.types.is_fixed_size_list(values.type):
        _check_no_nulls(values, "tokens", DROP_NULLS)
        sizes.append(values.type.list_size)
        values = values.flatten()
    _check_no_nulls(values, "elements", f"{DROP_NULLS} or {REPLACE_NULLS}")
    dtype = values.type
    is_boolean = pa.types.is_boolean(dtype)
    if not (pa.types.is_integer(dtype) or pa.types.is_floating(dtype) or is_boolean):
        raise TypeError(
            f"column: expected lists of numbers or booleans, got {lists.type}; "
            "there is one ragged axis"
        )
    flat = values.to_numpy(zero_copy_only=not is_boolean)
    total = int(offsets[-1] - offsets[0])
    return Array(flat.reshape(total, *sizes), offsets - offsets[0] if offsets[0] else offsets)


def to_arrow(arr: Array) -> Any:
    """Return a pyarrow array of lists.

    Parameters
    ----------
    arr
        Ragged array of any library. Contiguous arrays in host memory are not copied, except
        booleans. The ragged axis becomes the first axis of each row.

    Returns
    -------
    pyarrow.ListArray or pyarrow.LargeListArray
        Array of type ``list<T>``, or ``large_list<T>`` for int64 offsets. Axes of an element are
        ``fixed_size_list``.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array, or Arrow lacks its dtype.
    ValueError
        If an axis of an element has size 0.

    Notes
    -----
    An `Array` has the method ``__arrow_c_array__``, so that readers of Arrow accept it directly:
    ``pyarrow.array(arr)``, ``polars.Series(arr)``.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.bridges.to_arrow(scree.from_lengths(np.arange(3), [2, 0, 1])).type
    ListType(list<item: int64>)
    """
    arr = on_host(arr)
    if 0 in arr.element_shape:
        raise ValueError(
            "arr: expected no axes of size 0 in an element, which Arrow cannot represent, "
            f"got shape {arr.shape}"
        )
    try:
        values = pa.array(np.ascontiguousarray(arr.values).reshape(-1))
    except pa.ArrowNotImplementedError:
        raise TypeError(f"arr: Arrow has no {arr.dtype}; convert it with astype") from None
    for size in reversed(arr.element_shape):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    lists = pa.LargeListArray if arr.offsets.dtype == np.int64 else pa.ListArray
    return lists.from_arrays(pa.array(np.ascontiguousarray(arr.offsets)), values)


def _as_one_chunk(column: Any) -> Any:
    """Return a column of any library as one pyarrow array, without its extension type."""
    # A column of `datasets` returns Python lists unless its format is Arrow.
    if hasattr(column, "column_name") and hasattr(column, "source"):
        column = column.source.with_format("arrow")[:][column.column_name]
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        if hasattr(column, "__arrow_c_array__"):
            column = pa.array(column)
        elif hasattr(column, "__arrow_c_stream__"):
            column = pa.chunked_array(column)
        else:
            raise TypeError(
                f"column: expected a column of Arrow, got {type(column).__name__}; "
                "for lists use from_lists"
            )
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def from_table(table: Any) -> dict[str, Any]:
    """Return the columns of an Arrow table: ragged arrays of lists, NumPy arrays of numbers."""
    columns = {name: table.column(name) for name in table.column_names}
    return {
        name: column.to_numpy() if _is_flat(column.type) else from_arrow(column)
        for name, column in columns.items()
    }


def _is_flat(dtype: Any) -> bool:
    kinds = pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean
    return any(is_kind(dtype) for is_kind in kinds)


def _check_no_nulls(x: Any, items: str, remedy: str) -> None:
    if x.null_count:
        raise ValueError(f"column: expected no null {items}, got {x.null_count}; use {remedy}")
