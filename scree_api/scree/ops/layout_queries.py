"""The row and the position of each token, and the question whether two arrays have the same rows."""

from __future__ import annotations

from typing import Any

from .. import layout
from ..array import Array
from ..broadcasting import difference, ragged


def segment_ids(arr: Array) -> Any:
    """(total,) the row that each token belongs to.

    Parameters
    ----------
    arr
        Ragged array.

    Returns
    -------
    dense array
        (total,) numbers of rows; n for tokens behind the last row.

    Raises
    ------
    TypeError
        If `arr` is no ragged array.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.segment_ids(scree.from_lengths(np.zeros(4), [1, 0, 3]))
    array([0, 2, 2, 2])
    """
    return ragged("arr", arr).layout.segment_ids


def positions(arr: Array) -> Any:
    """(total,) the position of each token in its row.

    Parameters
    ----------
    arr
        Ragged array.

    Returns
    -------
    dense array
        (total,) positions, of the dtype of the offsets.

    Raises
    ------
    TypeError
        If `arr` is no ragged array.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.positions(scree.from_lengths(np.zeros(4), [1, 0, 3]))
    array([0, 0, 1, 2], dtype=int32)
    """
    return ragged("arr", arr).layout.positions


def same_layout(a: Array, b: Array) -> bool | None:
    """Whether two arrays have rows of the same lengths; None where only waiting for a device could tell.

    Parameters
    ----------
    a, b
        Ragged arrays.

    Returns
    -------
    bool or None
        Nothing is read from a device.

    Raises
    ------
    TypeError
        If one of them is no ragged array.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.same_layout(scree.from_lengths(np.zeros(4), [1, 3]), scree.from_lengths(np.ones(4), [1, 3]))
    True
    """
    return layout.same(ragged("a", a).layout, ragged("b", b).layout)


def align(arr: Array, like: Array) -> Array:
    """`arr` on the layout of `like`: a promise of the caller that both have the same rows.

    It is checked where reading the offsets is free, and believed elsewhere.

    Parameters
    ----------
    arr
        Ragged array.
    like
        Ragged array of the same library and device, with the same rows.

    Returns
    -------
    Array
        The values of `arr` on the layout of `like`; nothing is copied.

    Raises
    ------
    TypeError
        If one of them is no ragged array, or they are of two libraries.
    ValueError
        If it is known that their rows differ.

    Examples
    --------
    >>> import numpy as np, scree
    >>> a, b = (scree.from_lengths(np.ones(4), [1, 3]) for _ in range(2))
    >>> scree.align(a, like=b).offsets is b.offsets
    True
    """
    if layout.same(ragged("arr", arr).layout, ragged("like", like).layout) is False:
        raise ValueError(f"arr: expected the rows of like, got {difference(arr, like)}")
    return like.with_values(arr.values, ragged_dim=arr.ragged_dim)
