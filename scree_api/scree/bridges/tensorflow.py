"""TensorFlow's RaggedTensor, whose `row_splits` are the offsets.

Arrays from TensorFlow share its memory; arrays to TensorFlow are copied.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array import Array
from .dlpack import on_host


def from_tensorflow(tensor: Any) -> Array:
    """Return a NumPy ragged array of a `tf.RaggedTensor` with one ragged axis.

    Parameters
    ----------
    tensor
        Eager `tf.RaggedTensor`.

    Returns
    -------
    Array
        (n, None, ...) array on the memory of the tensor, which must not be written to. A tensor on
        a device is copied to the host.

    Raises
    ------
    TypeError
        If `tensor` is not a RaggedTensor, or has more than one ragged axis.

    Examples
    --------
    >>> import tensorflow, scree
    >>> scree.bridges.from_tensorflow(tensorflow.ragged.constant([[1, 2], [], [3]])).lengths
    array([2, 0, 1])
    """
    if not hasattr(tensor, "row_splits"):
        raise TypeError(
            f"tensor: expected a RaggedTensor, got {type(tensor).__name__}; "
            "for a dense one use from_padded"
        )
    if getattr(tensor, "ragged_rank", 1) != 1:
        raise TypeError(
            f"tensor: expected one ragged axis, got {tensor.ragged_rank}; merge_dims joins two"
        )
    return Array(np.asarray(tensor.values), np.asarray(tensor.row_splits))


def to_tensorflow(arr: Array) -> Any:
    """Return a `tf.RaggedTensor` of the rows; copies the values and offsets.

    TensorFlow needs memory that is aligned to 64 bytes and never changes.

    Parameters
    ----------
    arr
        Ragged array of any library. Its ragged axis becomes the first axis of each row.

    Returns
    -------
    tf.RaggedTensor
        (n, None, ...) tensor.

    Raises
    ------
    TypeError
        If `arr` is not a ragged array.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.bridges.to_tensorflow(scree.from_lengths(np.arange(3), [2, 0, 1]))
    <tf.RaggedTensor [[0, 1], [], [2]]>
    """
    import tensorflow

    arr = on_host(arr)
    # The offsets were checked when the array was made.
    return tensorflow.RaggedTensor.from_row_splits(arr.values, arr.offsets, validate=False)
