"""Lists of lists, and pandas columns with one list or array per row.

Lists are copied. `to_pandas` returns rows that are views of the values, and `from_pandas` shares
the memory of a column that Arrow backs.
"""

from __future__ import annotations

import warnings
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
    """Return a NumPy ragged array of a list of rows; copies the data.

    Parameters
    ----------
    rows
        Sequence of lists of numbers, as a tokenizer returns them, of nested lists of equal shape,
        or of arrays.
    dtype
        Data type of the result. By default NumPy infers it from all elements; rows that are all
        empty need it.

    Returns
    -------
    Array
        (n, None, ...) array with int32 offsets.

    Raises
    ------
    TypeError
        If `rows` is not a sequence of lists of numbers, or has a second ragged axis.
    ValueError
        If there are no elements and `dtype` is None, or an integer or boolean `dtype` cannot hold an
        element.

    Examples
    --------
    >>> import scree
    >>> scree.from_lists([[1, 2], [], [3]])
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
                f"rows[{i}]: expected a list or an array, got {type(row).__name__}; "
                "an empty row is []"
            )
    if rows and all(map(is_array, rows)):
        packed = pack(rows).to_numpy()
        return packed if dtype is None else packed.with_values(_cast(packed.values, dtype))
    tokens = list(chain.from_iterable(rows))
    if not tokens and dtype is None:
        raise ValueError(
            "dtype: expected a dtype for rows without elements, from which none can be inferred"
        )
    try:
        values = np.asarray(tokens)
    except ValueError as error:
        raise TypeError(
            f"rows: expected elements of one shape, there is one ragged axis: {error}"
        ) from None
    if values.dtype.kind not in "biufcV":
        raise TypeError(f"rows: expected numbers or booleans, got elements of {values.dtype}")
    values = values if dtype is None else _cast(values, dtype)
    return from_lengths(values, [len(row) for row in rows])


def _cast(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Return the values in another dtype; raise if an integer or boolean dtype cannot hold them.

    Floating-point dtypes round.
    """
    target = np.dtype(dtype)
    if target.kind in "fV" and values.dtype.kind != "c":
        return values.astype(target)
    with np.errstate(invalid="ignore", over="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", np.exceptions.ComplexWarning)
        cast = values.astype(target)
        differs = cast.astype(values.dtype) != values
    if values.dtype.kind in "iuf" and target.kind in "iu":
        differs |= (cast < 0) != (values < 0)  # of integers that wrap around both ways
    if target.kind == "c" or not differs.any():
        return cast
    wrong = values[differs].reshape(-1)[0]
    raise ValueError(f"dtype: expected one that holds all elements, got {target} for {wrong}")


def to_lists(arr: Array) -> list[Any]:
    """Return the rows as lists of Python numbers.

    Parameters
    ----------
    arr
        Ragged array of any library. Its ragged axis becomes the first axis of each row.

    Returns
    -------
    list
        One list per row; elements with axes are nested lists.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.bridges.to_lists(scree.from_lengths(np.arange(3), [2, 0, 1]))
    [[0, 1], [], [2]]
    """
    return [row.tolist() for row in unpack(on_host(arr))]


def from_pandas(series: Any, dtype: Any = None) -> Array:
    """Return a NumPy ragged array of a pandas column of lists.

    Parameters
    ----------
    series
        `pandas.Series` of lists or arrays.
    dtype
        Data type of the result. By default the dtype of an Arrow column is kept, and NumPy infers
        the dtype of a column of objects.

    Returns
    -------
    Array
        (n, None, ...) array. It shares memory with an Arrow column and copies a column of objects.

    Raises
    ------
    TypeError, ValueError
        If `series` is not a column of rows of numbers; see `from_lists` and `from_arrow`.

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
    return arr if dtype is None else arr.with_values(_cast(arr.values, dtype))


def to_pandas(arr: Array, *, index: Any = None, name: Any = None) -> Any:
    """Return a pandas column of objects, one NumPy array per row.

    Parameters
    ----------
    arr
        Ragged array of any library.
    index, name
        Index and name of the `pandas.Series`.

    Returns
    -------
    pandas.Series
        Column of dtype object, whose entries are views of the values.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array.

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
