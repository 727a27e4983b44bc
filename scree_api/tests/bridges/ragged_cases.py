"""Hypothesis strategies for ragged arrays, and comparisons, for the tests of bridges."""

from importlib.util import find_spec
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

import scree

DTYPES = ("bool", "uint8", "int32", "int64", "float16", "float32", "float64")
ELEMENT_SHAPES = ((), (3,), (2, 3))
INSTALLED = [
    name for name in ("numpy", "torch", "jax", "mlx", "array_api_strict") if find_spec(name)
]

#: A few fixed examples without a database: the properties are structural, and the axes are short.
few_examples = settings(max_examples=40, derandomize=True, deadline=None, database=None)


def make_values(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return values that every dtype represents exactly."""
    return (np.arange(np.prod(shape, dtype=int)) % 97).reshape(shape).astype(dtype)


@st.composite
def arrays(
    draw: Any,
    dtypes: tuple[str, ...] = DTYPES,
    ragged: bool = True,
    element_shapes: tuple[tuple[int, ...], ...] = ELEMENT_SHAPES,
    strides: tuple[str, ...] = ("plain", "step", "reversed", "transposed"),
    indices: tuple[str, ...] = ("int32", "int64"),
) -> scree.Array:
    """Draw a NumPy array with any lengths, element shape, ragged axis, strides and offset dtype.

    The lengths include no rows, empty rows and one row.
    """
    lengths = draw(st.lists(st.integers(0, 4), max_size=4))
    element_shape = draw(st.sampled_from(element_shapes))
    ragged_dim = draw(st.integers(0, len(element_shape))) if ragged else 0
    shape = (*element_shape[:ragged_dim], sum(lengths), *element_shape[ragged_dim:])
    values = make_values(shape, draw(st.sampled_from(dtypes)))
    stride = draw(st.sampled_from(strides))
    if stride == "step":
        values = np.repeat(values, 2, axis=ragged_dim)[
            (slice(None),) * ragged_dim + (slice(None, None, 2),)
        ]
    elif stride == "reversed":
        values = np.flip(np.flip(values, ragged_dim).copy(), ragged_dim)
    elif stride == "transposed":
        values = np.asfortranarray(values)
    offsets = np.cumsum([0, *lengths]).astype(draw(st.sampled_from(indices)))
    return scree.Array(
        values, offsets, ragged_dim, draw(st.sampled_from((None, max(lengths, default=0))))
    )


def as_numpy(arr: scree.Array) -> scree.Array:
    """Return the array on NumPy, independently of the conversions under test."""

    def read(x: Any) -> np.ndarray:
        name = str(x.dtype).rpartition(".")[2]
        return (
            np.array(x.tolist(), dtype=name).reshape(x.shape)
            if hasattr(x, "tolist")
            else np.asarray(x)
        )

    return scree.Array(read(arr.values), read(arr.offsets), arr.ragged_dim, arr.max_length)


def assert_same(a: scree.Array, b: scree.Array) -> None:
    """Assert equal rows, dtype and ragged axis; the dtype of the offsets may differ."""
    assert a.ragged_dim == b.ragged_dim
    assert a.shape == b.shape
    a, b = as_numpy(a), as_numpy(b)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.offsets, b.offsets)
    np.testing.assert_array_equal(a.values, b.values)


def assert_as_accurate(actual: Any, peer: Any, exact: Any) -> None:
    """Assert that the error of tensors is at most twice the error of a peer.

    Both errors are relative to exact tensors of a wider dtype. The floor is the error of rounding
    alone. For half precision it is half a unit in the last place. Triton computes float32 as three
    TF32 products, which keep about 21 bits, and gradients are differences of sums of them.
    """
    import torch

    def flat(x: Any) -> torch.Tensor:
        return torch.cat(
            [
                part.detach().double().reshape(-1)
                for part in (x if isinstance(x, tuple | list) else [x])
            ]
        )

    dtype = (actual[0] if isinstance(actual, tuple | list) else actual).dtype
    floor = 2**-17 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    actual_flat, peer_flat, exact = flat(actual), flat(peer), flat(exact)
    assert torch.linalg.norm(actual_flat - exact) <= 2 * torch.linalg.norm(
        peer_flat - exact
    ) + floor * torch.linalg.norm(exact)
