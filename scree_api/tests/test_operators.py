"""Operators with a dense array first: the right result, or an error, on every library."""

from __future__ import annotations

import operator

import numpy as np
import pytest
from libraries import NAMES, load

import scree

OPERATORS = (
    "add sub mul truediv floordiv mod pow eq ne lt le gt ge and_ or_ xor lshift rshift".split()
)
INTEGER_ONLY = ("and_", "or_", "xor", "lshift", "rshift")
#: Libraries whose dense arrays refuse a ragged array as the second operand, with the message.
REFUSES = {
    "mlx": "expected the ragged array first",
    "array_api_strict": "Expected Array or Python scalar",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("function", OPERATORS)
def test_operator_dense_first_is_right_or_raises(name: str, function: str) -> None:
    arrays, compute = load(name), getattr(operator, function)
    dtype, lengths = "int32" if function in INTEGER_ONLY else "float32", [2, 0, 3]
    numbers, per_row = np.arange(1, 6).astype(dtype), np.asarray([[2], [3], [4]], dtype)
    x = scree.from_lengths(arrays.make(numbers), lengths)
    for dense, tokens in (
        (arrays.make(per_row), np.repeat(per_row[:, 0], lengths)),
        (arrays.make(np.asarray(3, dtype)), np.asarray(3, dtype)),
    ):
        if name in REFUSES:
            with pytest.raises(TypeError, match=REFUSES[name]):
                compute(dense, x)
            continue
        got = compute(dense, x)
        assert isinstance(got, scree.Array)
        np.testing.assert_allclose(
            arrays.library.read(got.values), compute(tokens, numbers), rtol=1e-5
        )


@pytest.mark.needs("mlx")
def test_mlx_operator_dense_first_names_the_remedy() -> None:
    arrays = load("mlx")
    with pytest.raises(TypeError, match="expected the ragged array first"):
        _ = arrays.f(1) == arrays.r([2])
