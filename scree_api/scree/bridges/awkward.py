"""Awkward Array, and scikit-hep's `ragged`, which is built on it.

Values and offsets share memory in both directions, in host memory.
"""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np

from ..array import Array
from .dlpack import check_byte_order, on_host


def from_awkward(array: Any) -> Array:
    """Return a NumPy ragged array of an awkward array whose second axis is its only ragged axis.

    Parameters
    ----------
    array
        `awkward.Array` of type ``n * var * T`` or ``n * var * k * T`` ..., with T a number or a
        boolean.

    Returns
    -------
    Array
        (n, None, ...) array on the memory of the awkward array. Rows that are not contiguous and in
        order are copied.

    Raises
    ------
    TypeError
        If `array` has another type: more than one ragged axis, records, strings.
    ValueError
        If a row or an element is missing (None).

    Examples
    --------
    >>> import awkward, scree
    >>> scree.bridges.from_awkward(awkward.Array([[1, 2], [], [3]])).lengths
    array([2, 0, 1])
    """
    layout = ak.to_layout(array)
    if not isinstance(layout, ak.contents.Content):
        raise TypeError(f"array: expected rows of numbers, n * var * T, got {type(array).__name__}")
    if layout.is_option:
        missing = int(ak.sum(ak.is_none(array)))
        if missing:
            raise ValueError(
                f"array: expected no missing rows, got {missing}; "
                "remove them with awkward.drop_none"
            )
        layout = ak.to_layout(ak.drop_none(array, axis=0))
    layout = layout.project() if layout.is_indexed else layout
    if (
        not layout.is_list or layout.parameter("__array__") is not None
    ):  # strings are lists of bytes
        raise TypeError(f"array: expected rows of numbers, n * var * T, got {ak.type(array)}")
    if not isinstance(layout, ak.contents.ListOffsetArray):
        layout = layout.to_ListOffsetArray64(True)
    offsets = np.asarray(layout.offsets.data)
    first, last = int(offsets[0]), int(offsets[-1])
    try:
        values = ak.to_numpy(layout.content[first:last], allow_missing=False)
    except ValueError as error:
        raise TypeError(
            "array: expected one ragged axis without missing elements, "
            f"got {ak.type(array)}: {error}"
        ) from None
    if values.dtype.kind not in "biufc":
        raise TypeError(f"array: expected rows of numbers, got {ak.type(array)}")
    if first or offsets.dtype == np.uint32:
        offsets = offsets.astype(np.int64) - first
    return Array(values, offsets)


def to_awkward(arr: Array) -> Any:
    """Return an awkward array ``n * var * T`` on the values and offsets of the array.

    Parameters
    ----------
    arr
        Ragged array of any library; arrays in host memory are not copied. Its ragged axis becomes
        the first axis of each row.

    Returns
    -------
    awkward.Array
        Array of type ``n * var * T``, or ``n * var * k * T`` ... for elements with axes.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.bridges.to_awkward(scree.from_lengths(np.arange(3), [2, 0, 1])).tolist()
    [[0, 1], [], [2]]
    """
    arr = on_host(arr)
    check_byte_order(arr.values)
    return ak.Array(
        ak.contents.ListOffsetArray(ak.index.Index(arr.offsets), ak.contents.NumpyArray(arr.values))
    )


def from_ragged(array: Any) -> Array:
    """Return a NumPy ragged array of a `ragged.array`, on its memory; see `from_awkward`.

    Parameters
    ----------
    array
        `ragged.array` with one ragged axis.

    Returns
    -------
    Array
        The rows on NumPy.

    Raises
    ------
    TypeError
        If `array` is not a `ragged.array`, or its rows are not rows of numbers.

    Examples
    --------
    >>> import ragged, scree
    >>> scree.bridges.from_ragged(ragged.array([[1, 2], [], [3]])).lengths
    array([2, 0, 1])
    """
    if not hasattr(array, "_impl"):
        raise TypeError(f"array: expected a ragged.array, got {type(array).__name__}")
    # `ragged` has no public access to the memory.
    return from_awkward(array._impl)


def to_ragged(arr: Array) -> Any:
    """Return a `ragged.array` on the values and offsets of the array; see `to_awkward`.

    Parameters
    ----------
    arr
        Ragged array of any library; arrays in host memory are not copied.

    Returns
    -------
    ragged.array
        The same rows.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.bridges.to_ragged(scree.from_lengths(np.arange(3), [2, 0, 1])).tolist()
    [[0, 1], [], [2]]
    """
    import ragged

    return ragged.array(to_awkward(arr))
