"""Ragged arrays of every kind for the tests of bridges, and what it means that two are the same."""

from importlib.util import find_spec
from typing import Any

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

import scree

DTYPES = ("bool", "uint8", "int32", "int64", "float16", "float32", "float64")
RESTS = ((), (3,), (2, 3))
INSTALLED = [
    name for name in ("numpy", "torch", "jax", "mlx", "array_api_strict") if find_spec(name)
]

#: Few examples, always the same ones, no files: the properties are structural, and the axes below are short.
few = settings(max_examples=40, derandomize=True, deadline=None, database=None)


def filled(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Numbers that every dtype holds exactly."""
    return (np.arange(np.prod(shape, dtype=int)) % 97).reshape(shape).astype(dtype)


@st.composite
def arrays(
    draw: Any,
    dtypes: tuple[str, ...] = DTYPES,
    ragged: bool = True,
    rests: tuple[tuple[int, ...], ...] = RESTS,
    strides: tuple[str, ...] = ("plain", "step", "reversed", "transposed"),
    indices: tuple[str, ...] = ("int32", "int64"),
) -> scree.Array:
    """An array on NumPy: no rows, empty rows, one row; any element shape, ragged axis, strides and dtype of the offsets."""
    lengths = draw(st.lists(st.integers(0, 4), max_size=4))
    rest = draw(st.sampled_from(rests))
    dim = draw(st.integers(0, len(rest))) if ragged else 0
    shape = (*rest[:dim], sum(lengths), *rest[dim:])
    values = filled(shape, draw(st.sampled_from(dtypes)))
    how = draw(st.sampled_from(strides))
    if how == "step":
        values = np.repeat(values, 2, axis=dim)[(slice(None),) * dim + (slice(None, None, 2),)]
    elif how == "reversed":
        values = np.flip(np.flip(values, dim).copy(), dim)
    elif how == "transposed":
        values = np.asfortranarray(values)
    offsets = np.cumsum([0, *lengths]).astype(draw(st.sampled_from(indices)))
    return scree.Array(values, offsets, dim, draw(st.sampled_from((None, max(lengths, default=0)))))


def plain(arr: scree.Array) -> scree.Array:
    """The array on NumPy, by a way of its own: not the one that is tested."""

    def read(x: Any) -> np.ndarray:
        name = str(x.dtype).rpartition(".")[2]
        return (
            np.array(x.tolist(), dtype=name).reshape(x.shape)
            if hasattr(x, "tolist")
            else np.asarray(x)
        )

    return scree.Array(read(arr.values), read(arr.offsets), arr.ragged_dim, arr.max_length)


def assert_same(a: scree.Array, b: scree.Array) -> None:
    """The same rows, dtype and ragged axis; the dtype of the offsets may differ."""
    assert a.ragged_dim == b.ragged_dim
    assert a.shape == b.shape
    a, b = plain(a), plain(b)
    assert a.dtype == b.dtype
    np.testing.assert_array_equal(a.offsets, b.offsets)
    np.testing.assert_array_equal(a.values, b.values)


def assert_as_close(found: Any, peer: Any, exact: Any) -> None:
    """One or several tensors as close to the exact ones, of a wider type, as a peer's are, within a factor of two.

    The floor is what rounding alone takes: of half precision half a unit; float32 goes through Triton as three TF32 products,
    which keep about 21 bits, and gradients are differences of sums of them.
    """
    import torch

    def flat(x: Any) -> torch.Tensor:
        return torch.cat(
            [
                part.detach().double().reshape(-1)
                for part in (x if isinstance(x, tuple | list) else [x])
            ]
        )

    dtype = (found[0] if isinstance(found, tuple | list) else found).dtype
    floor = 2**-17 if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    ours, theirs, exact = flat(found), flat(peer), flat(exact)
    assert torch.linalg.norm(ours - exact) <= 2 * torch.linalg.norm(
        theirs - exact
    ) + floor * torch.linalg.norm(exact)
