"""Awkward Array, and scikit-hep's `ragged`, which is made of it."""

from __future__ import annotations

from typing import Any

import awkward as ak
import numpy as np

from ..array import Array
from .dlpack import on_host


def from_awkward(array: Any) -> Array:
    """A ragged array on NumPy of an awkward array with one ragged axis, its second.

    Parameters
    ----------
    array
        `awkward.Array` of type ``n * var * T`` or ``n * var * k * T`` ..., T a number or a boolean.

    Returns
    -------
    Array
        On the memory of the awkward array, unless its rows do not lie end to end.

    Raises
    ------
    TypeError
        If it has another type: more than one ragged axis, records, strings.
    ValueError
        If anything is missing (None).

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
                f"array: expected no missing rows, got {missing}; awkward.drop_none leaves them out"
            )
        layout = ak.to_layout(ak.drop_none(array, axis=0))
    layout = layout.project() if layout.is_indexed else layout
    if not layout.is_list:
        raise TypeError(f"array: expected rows of numbers, n * var * T, got {ak.type(array)}")
    layout = (
        layout
        if isinstance(layout, ak.contents.ListOffsetArray)
        else layout.to_ListOffsetArray64(True)
    )
    offsets = np.asarray(layout.offsets.data)
    first, last = int(offsets[0]), int(offsets[-1])
    try:
        values = ak.to_numpy(layout.content[first:last], allow_missing=False)
    except ValueError as error:
        raise TypeError(
            f"array: expected one ragged axis without missing elements, got {ak.type(array)}: {error}"
        ) from None
    if values.dtype.kind not in "biufc":
        raise TypeError(f"array: expected rows of numbers, got {ak.type(array)}")
    if first or offsets.dtype == np.uint32:
        offsets = offsets.astype(np.int64) - first
    return Array(values, offsets)


def to_awkward(arr: Array) -> Any:
    """An awkward array ``n * var * T`` on the values and offsets of the array.

    Parameters
    ----------
    arr
        (n, None, ...) array of any library, in host memory if nothing shall be copied. A ragged axis that is not the first
        becomes the first.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.bridges.to_awkward(scree.from_lengths(np.arange(3), [2, 0, 1])).tolist()
    [[0, 1], [], [2]]
    """
    arr = on_host(arr)
    return ak.Array(
        ak.contents.ListOffsetArray(ak.index.Index(arr.offsets), ak.contents.NumpyArray(arr.values))
    )


def from_ragged(array: Any) -> Array:
    """A ragged array on NumPy of a `ragged.array`; see `from_awkward`."""
    if not hasattr(array, "_impl"):
        raise TypeError(f"array: expected a ragged.array, got {type(array).__name__}")
    return from_awkward(array._impl)  # no public way leads to the memory


def to_ragged(arr: Array) -> Any:
    """A `ragged.array` on the values and offsets of the array; see `to_awkward`."""
    import ragged

    return ragged.array(to_awkward(arr))
