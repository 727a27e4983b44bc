"""Round trips of RaggedTensors: of a stand-in class, and of TensorFlow if it is installed.

TensorFlow takes more than a gigabyte of disk, so it has a separate environment:
``nox -s tensorflow``.
"""

import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from ragged_cases import arrays, assert_same, few_examples

import scree
from scree.bridges import from_tensorflow, to_tensorflow
from scree.bridges.dlpack import on_host


class RaggedTensor:
    """The part of `tf.RaggedTensor` that the bridge uses."""

    ragged_rank = 1

    @classmethod
    def from_row_splits(cls, values: np.ndarray, row_splits: np.ndarray, validate: bool) -> Any:
        self = cls()
        self.values, self.row_splits = values, row_splits
        return self


@pytest.mark.parametrize("installed", [False, True] if find_spec("tensorflow") else [False])
@few_examples
@given(arr=arrays())
def test_round_trip_shares_memory(installed: bool, arr: scree.Array) -> None:
    expected = on_host(arr)
    with pytest.MonkeyPatch.context() as patch:
        if not installed:
            patch.setitem(sys.modules, "tensorflow", SimpleNamespace(RaggedTensor=RaggedTensor))
        tensor = to_tensorflow(arr)
    back = from_tensorflow(tensor)
    assert np.shares_memory(back.values, np.asarray(tensor.values)) or not arr.size
    assert np.shares_memory(back.offsets, np.asarray(tensor.row_splits))
    assert back.offsets.dtype == arr.offsets.dtype
    assert_same(back, scree.Array(expected.values, expected.offsets))


def test_from_tensorflow_unsupported_tensor_raises() -> None:
    with pytest.raises(TypeError, match="tensor: expected a RaggedTensor, got ndarray"):
        from_tensorflow(np.zeros((2, 3)))
    with pytest.raises(TypeError, match="tensor: expected one ragged axis, got 2"):
        from_tensorflow(SimpleNamespace(row_splits=None, ragged_rank=2))
