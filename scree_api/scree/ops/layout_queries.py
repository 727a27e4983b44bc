"""Queries about layouts.

The row and the position of each token, and whether two arrays have the same rows.
"""

from __future__ import annotations

from typing import Any

from ..array import Array
from ..broadcasting import check_ragged, describe_difference
from ..layout import has_same_rows

__all__ = ["align", "positions", "same_layout", "segment_ids"]


def segment_ids(arr: Array) -> Any:
    """Return the row of each token.

    Parameters
    ----------
    arr
        Ragged array.

    Returns
    -------
    dense array
        (total,) integers; n for tokens of the tail.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.segment_ids(scree.from_lengths(np.zeros(4), [1, 0, 3]))
    array([0, 2, 2, 2])
    """
    return check_ragged("arr", arr, shards=True).layout.segment_ids


def positions(arr: Array) -> Any:
    """Return the position of each token in its row: 0, 1, ... from the start of the row.

    These are the position ids of packed sequences, for a table of learned position embeddings. A
    ragged array of them is ``arr.with_values(scree.positions(arr), ragged_dim=0)``. `rope` computes
    its positions itself.

    Parameters
    ----------
    arr
        Ragged array.

    Returns
    -------
    dense array
        (total,) integers with the dtype of the offsets, along the ragged axis of the values. They
        are computed once per layout, without reading the offsets.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.positions(scree.from_lengths(np.zeros(4), [1, 0, 3]))
    array([0, 0, 1, 2], dtype=int32)

    Add an embedding of the position to each token:

    >>> table = np.asarray([[0.0, 0.0], [0.1, 0.2], [0.3, 0.4]])
    >>> tokens = scree.from_lengths(np.ones((4, 2)), [1, 0, 3])
    >>> (tokens + tokens.with_values(table[scree.positions(tokens)])).tolist()[2]
    [[1.0, 1.0], [1.1, 1.2], [1.3, 1.4]]
    """
    layout = check_ragged("arr", arr, shards=True).layout
    return layout.positions if layout.cut is None else layout.cut.positions


def same_layout(a: Array, b: Array) -> bool | None:
    """Return whether two arrays have rows of the same lengths.

    Parameters
    ----------
    a, b
        Ragged arrays.

    Returns
    -------
    bool or None
        None where only waiting for a device could tell.

    Raises
    ------
    TypeError
        If an argument is not a ragged array.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.same_layout(scree.from_lengths(np.zeros(4), [1, 3]), scree.from_lengths(np.ones(4), [1, 3]))
    True
    """
    return has_same_rows(
        check_ragged("a", a, shards=True).layout, check_ragged("b", b, shards=True).layout
    )


def align(arr: Array, like: Array) -> Array:
    """Return `arr` on the layout of `like`; the caller promises that both have the same rows.

    The promise is checked where reading the offsets is free.

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
        If an argument is not a ragged array, or they are of two libraries.
    ValueError
        If it is known that their rows differ.

    Examples
    --------
    >>> import numpy as np, scree
    >>> a, b = (scree.from_lengths(np.ones(4), [1, 3]) for _ in range(2))
    >>> scree.align(a, like=b).offsets is b.offsets
    True
    """
    if has_same_rows(check_ragged("arr", arr).layout, check_ragged("like", like).layout) is False:
        raise ValueError(f"arr: expected the rows of like, got {describe_difference(arr, like)}")
    return like.with_values(arr.values, ragged_dim=arr.ragged_dim)
