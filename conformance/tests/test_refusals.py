"""The law of equal rows accepts only the refusals that its table lists."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import scree
from scree_conformance.dense import is_expected_refusal

DENSE = np.arange(6)
RAGGED = scree.from_lengths(DENSE, [3, 3])
NOT_AN_OPERAND = "broadcast_arrays: expected an array or a Python scalar, got a value"
NO_CUPY_ARRAY = "values: expected a dense array of cupy, got int"
NO_NUMPY_ARRAY = "a ragged array is not a NumPy array: use arr.values"


@pytest.mark.parametrize(
    ("name", "args", "message", "expected"),
    [
        ("broadcast_arrays", (RAGGED, float), NOT_AN_OPERAND, True),
        ("broadcast_arrays", (RAGGED, (1, 2)), NOT_AN_OPERAND, True),
        # A scalar is an operand, so this error would be a defect in any library.
        ("broadcast_arrays", (RAGGED, 2), NOT_AN_OPERAND, False),
        ("broadcast_arrays", (2, RAGGED), NO_CUPY_ARRAY, True),
        ("broadcast_arrays", (RAGGED, RAGGED), NO_CUPY_ARRAY, False),
        ("roll", (DENSE, RAGGED), NO_NUMPY_ARRAY, True),
        # A function of the library must not see the ragged array that rolls.
        ("roll", (RAGGED, DENSE), NO_NUMPY_ARRAY, False),
    ],
)
def test_is_expected_refusal_only_of_listed_arguments(
    name: str, args: tuple[Any, ...], message: str, expected: bool
) -> None:
    assert is_expected_refusal(name, args, {}, TypeError(message)) is expected
