"""Python's lists of lists, and columns of pandas that hold one object a row."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from ..array import Array
from ..backends import is_array
from ..broadcasting import check_ragged
from ..construct import from_lengths, pack, unpack
from .dlpack import on_host


def from_lists(rows: Sequence[Any], dtype: Any = None) -> Array:
    """A ragged array on NumPy of rows that are lists of numbers, or of lists of equal shape; it copies.

    Parameters
    ----------
    rows
        A sequence of lists, as a tokenizer gives them, or of arrays.
    dtype
        The dtype; by default what NumPy finds for all elements together. Rows that are all empty need it.

    Examples
    --------
    >>> import scree
    >>> scree.bridges.from_lists([[1, 2], [], [3]])
    scree.Array(shape=(3, None), dtype=int64, numpy, lengths 0 to 2, total 3)
         0: [1 2]
         1: []
         2: [3]
    """
    if not hasattr(rows, "__iter__"):
        raise TypeError(f"rows: expected a sequence of lists, got {type(rows).__name__}")
    rows = list(rows)
    for i, row in enumerate(rows):
        if not hasattr(row, "__len__") or isinstance(row, str | bytes | dict):
            raise TypeError(
                f"rows[{i}]: expected a list or an array, got {type(row).__name__}; an empty row is []"
            )
    if rows and all(map(is_array, rows)):
        found = pack(rows).to_numpy()
        return found if dtype is None else found.with_values(found.values.astype(dtype))
    tokens = list(chain.from_iterable(rows))
    if not tokens and dtype is None:
        raise ValueError("dtype: expected a dtype, as there are no elements to find it from")
    try:
        values = np.asarray(tokens, dtype=dtype)
    except ValueError as error:
        raise TypeError(
            f"rows: expected elements of one shape, there is one ragged axis: {error}"
        ) from None
    if values.dtype.kind not in "biufcV":
        raise TypeError(f"rows: expected numbers or booleans, got elements of {values.dtype}")
    return from_lengths(values, [len(row) for row in rows])


def to_lists(arr: Array) -> list[Any]:
    """The rows as lists of Python numbers, or of lists of them where an element has axes.

    Parameters
    ----------
    arr
        Ragged array of any library. A ragged axis that is not the first becomes the first.

    Raises
    ------
    TypeError
        If `arr` is no ragged array.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.bridges.to_lists(scree.from_lengths(np.arange(3), [2, 0, 1]))
    [[0, 1], [], [2]]
    """
    return [row.tolist() for row in unpack(on_host(arr))]


def from_pandas(series: Any, dtype: Any = None) -> Array:
    """A ragged array on NumPy of a column of lists: shared where it is one of Arrow, copied where it holds objects.

    Parameters
    ----------
    series
        `pandas.Series` of lists or arrays.
    dtype
        The dtype; by default what NumPy finds for all elements together, or that of Arrow.

    Raises
    ------
    TypeError, ValueError
        If it is no column of rows of numbers; see `from_lists` and `from_arrow`.

    Examples
    --------
    >>> import pandas, scree
    >>> scree.bridges.from_pandas(pandas.Series([[1, 2], [], [3]])).lengths
    array([2, 0, 1], dtype=int32)
    """
    import pandas

    if not isinstance(series, pandas.Series):
        raise TypeError(
            f"series: expected a pandas.Series, got {type(series).__name__}; see from_lists"
        )
    if series.dtype == object:
        return from_lists(series, dtype)
    from .arrow import from_arrow

    arr = from_arrow(series)
    return arr if dtype is None else arr.with_values(arr.values.astype(dtype))


def to_pandas(arr: Array, *, index: Any = None, name: Any = None) -> Any:
    """A column of objects, each the NumPy array of one row, which is a view of the values.

    Parameters
    ----------
    arr
        Ragged array of any library.
    index, name
        Those of the `pandas.Series`.

    Raises
    ------
    TypeError
        If `arr` is no ragged array.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.bridges.to_pandas(scree.from_lengths(np.arange(3), [2, 0, 1]), name="ids").tolist()
    [array([0, 1]), array([], dtype=int64), array([2])]
    """
    import pandas

    objects = np.empty(check_ragged("arr", arr).batch_size, dtype=object)
    for i, row in enumerate(unpack(on_host(arr))):
        objects[i] = row
    return pandas.Series(objects, index=index, name=name)
