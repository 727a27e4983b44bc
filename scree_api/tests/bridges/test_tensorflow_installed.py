"""Round trips of TensorFlow's RaggedTensors, in the environment of ``nox -s tensorflow``."""

import pytest
import tensorflow as tf

from scree.bridges import from_tensorflow, to_tensorflow


def test_round_trip_of_tensorflow_tensors() -> None:
    arr = from_tensorflow(tf.ragged.constant([[1, 2], [], [3]]))
    assert arr.values.tolist() == [1, 2, 3]
    assert arr.lengths.tolist() == [2, 0, 1]
    assert to_tensorflow(arr * 2).to_list() == [[2, 4], [], [6]]
    assert from_tensorflow(
        tf.RaggedTensor.from_uniform_row_length(tf.range(6), 3)
    ).lengths.tolist() == [3, 3]
    half = from_tensorflow(tf.cast(tf.ragged.constant([[1.5], [2.5, 3.5]]), tf.bfloat16))
    assert half.dtype == "bfloat16"
    with pytest.raises(TypeError, match="expected one ragged axis, got 2"):
        from_tensorflow(tf.ragged.constant([[[1], [2, 3]], []]))
