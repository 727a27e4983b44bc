"""Apache Arrow's lists: pyarrow, polars, Hugging Face datasets, and all else that speaks the Arrow C interface."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from ..array import Array
from .dlpack import on_host


def from_arrow(column: Any) -> Array:
    """A ragged array on NumPy of a column of lists.

    Parameters
    ----------
    column
        ``list<T>`` or ``large_list<T>``, T a number or a boolean or a ``fixed_size_list`` of them, of any depth: an array or a
        chunked array of pyarrow, a column of polars, pandas or datasets, or whatever has ``__arrow_c_array__`` or
        ``__arrow_c_stream__``.

    Returns
    -------
    Array
        (n, None, *sizes) on the memory of Arrow, which is not to be written to. Copied are: booleans, which Arrow packs into
        bits; the chunks of a column that has several; the offsets of a slice.

    Raises
    ------
    TypeError
        If it is no column of lists of numbers.
    ValueError
        If anything is null.

    Examples
    --------
    >>> import pyarrow, scree
    >>> scree.bridges.from_arrow(pyarrow.array([[1, 2], [], [3]])).lengths
    array([2, 0, 1], dtype=int32)
    """
    rows = _one_chunk(column)
    if not pa.types.is_list(rows.type) and not pa.types.is_large_list(rows.type):
        raise TypeError(
            f"column: expected list<T> or large_list<T>, got {rows.type}; cast it with column.cast"
        )
    _no_nulls(rows, "rows", "fill_null([])")
    offsets = rows.offsets.to_numpy(zero_copy_only=True)
    values, sizes = rows.values.slice(offsets[0], offsets[-1] - offsets[0]), []
    while pa.types.is_fixed_size_list(values.type):
        _no_nulls(values, "tokens", "fill_null")
        sizes.append(values.type.list_size)
        values = values.flatten()
    _no_nulls(values, "elements", "fill_null(0)")
    kind = values.type
    if not (pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)):
        raise TypeError(
            f"column: expected lists of numbers or booleans, got {rows.type}; there is one ragged axis"
        )
    flat = values.to_numpy(zero_copy_only=not pa.types.is_boolean(kind))
    return Array(flat.reshape(-1, *sizes), offsets - offsets[0] if offsets[0] else offsets)


def to_arrow(arr: Array) -> Any:
    """A pyarrow array of lists, ``list<T>`` or with int64 offsets ``large_list<T>``; axes of an element as ``fixed_size_list``.

    Parameters
    ----------
    arr
        (n, None, ...) array of any library, in host memory and contiguous if nothing shall be copied; booleans always are. A
        ragged axis that is not the first becomes the first. An `Array` has ``__arrow_c_array__`` too, so that what reads
        Arrow takes it as it is: ``pyarrow.array(arr)``, ``polars.Series(arr)``.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.bridges.to_arrow(scree.from_lengths(np.arange(3), [2, 0, 1])).type
    ListType(list<item: int64>)
    """
    arr = on_host(arr)
    if 0 in arr.element_shape:
        raise ValueError(
            f"arr: expected no axes of size 0 in an element, for which Arrow has no form, got shape {arr.shape}"
        )
    try:
        values = pa.array(np.ascontiguousarray(arr.values).reshape(-1))
    except pa.ArrowNotImplementedError:
        raise TypeError(f"arr: Arrow has no {arr.dtype}; convert it with astype") from None
    for size in reversed(arr.element_shape):
        values = pa.FixedSizeListArray.from_arrays(values, size)
    lists = pa.LargeListArray if arr.offsets.dtype == np.int64 else pa.ListArray
    return lists.from_arrays(pa.array(np.ascontiguousarray(arr.offsets)), values)


def _one_chunk(column: Any) -> Any:
    if hasattr(column, "column_name") and hasattr(
        column, "source"
    ):  # a column of datasets, which gives lists by itself
        column = column.source.with_format("arrow")[:][column.column_name]
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        if hasattr(column, "__arrow_c_array__"):
            column = pa.array(column)
        elif hasattr(column, "__arrow_c_stream__"):
            column = pa.chunked_array(column)
        else:
            raise TypeError(
                f"column: expected a column of Arrow, got {type(column).__name__}; for lists use from_lists"
            )
    if isinstance(column, pa.ChunkedArray):
        column = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return column.storage if isinstance(column, pa.ExtensionArray) else column


def _no_nulls(x: Any, what: str, remedy: str) -> None:
    if x.null_count:
        raise ValueError(
            f"column: expected no null {what}, got {x.null_count}; use drop_null() or {remedy}"
        )
