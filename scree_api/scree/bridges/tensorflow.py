"""TensorFlow's RaggedTensor: the same values, and `row_splits` for offsets."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array import Array
from .dlpack import on_host


def from_tensorflow(tensor: Any) -> Array:
    """A ragged array on NumPy of a `tf.RaggedTensor` with one ragged axis.

    Parameters
    ----------
    tensor
        Eager `tf.RaggedTensor`.

    Returns
    -------
    Array
        (n, None, ...) on the memory of the tensor, which is not to be written to; copied from a device.

    Raises
    ------
    TypeError
        If it is no RaggedTensor, or has more than one ragged axis.

    Examples
    --------
    >>> import tensorflow, scree
    >>> scree.bridges.from_tensorflow(tensorflow.ragged.constant([[1, 2], [], [3]])).lengths
    array([2, 0, 1])
    """
    if not hasattr(tensor, "row_splits"):
        raise TypeError(
            f"tensor: expected a RaggedTensor, got {type(tensor).__name__}; for a dense one use from_padded"
        )
    if getattr(tensor, "ragged_rank", 1) != 1:
        raise TypeError(
            f"tensor: expected one ragged axis, got {tensor.ragged_rank}; merge_dims joins two"
        )
    return Array(np.asarray(tensor.values), np.asarray(tensor.row_splits))


def to_tensorflow(arr: Array) -> Any:
    """A `tf.RaggedTensor` of the rows, which copies, as TensorFlow asks for memory aligned to 64 bytes that never changes.

    Parameters
    ----------
    arr
        (n, None, ...) array of any library. A ragged axis that is not the first becomes the first.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.bridges.to_tensorflow(scree.from_lengths(np.arange(3), [2, 0, 1]))
    <tf.RaggedTensor [[0, 1], [], [2]]>
    """
    import tensorflow

    arr = on_host(arr)
    return tensorflow.RaggedTensor.from_row_splits(
        arr.values, arr.offsets, validate=False
    )  # they were checked
