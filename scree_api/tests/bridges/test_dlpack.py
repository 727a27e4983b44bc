"""Conversion between libraries: no change, no narrowing, and shared memory where possible."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from ragged_cases import INSTALLED, arrays, assert_same, few_examples, make_values

import scree
from scree.backends import backend_by_name
from scree.bridges import dlpack, to_backend, to_numpy

PAIRS = list(permutations(INSTALLED, 2))
MISSING_DTYPES = {"jax": ("int64", "float64"), "array_api_strict": ("float16",)}


def make(library: str, values: np.ndarray, lengths: list[int]) -> scree.Array:
    """Return an array of a library that was made by the library itself."""
    if library == "torch":
        import torch

        return scree.from_lengths(torch.tensor(values), lengths)
    if library == "jax":
        import jax.numpy as jnp

        return scree.from_lengths(jnp.array(values), lengths)
    if library == "mlx":
        import mlx.core as mx

        return scree.from_lengths(mx.array(values), lengths)
    if library == "array_api_strict":
        import array_api_strict as xp

        return scree.from_lengths(xp.asarray(values), lengths)
    return scree.from_lengths(values.copy(), lengths)


def address(x: object) -> int:
    """Return the address of the first element."""
    if hasattr(x, "data_ptr"):
        return x.data_ptr()
    if hasattr(x, "unsafe_buffer_pointer"):
        return x.unsafe_buffer_pointer()
    if hasattr(x, "data") and hasattr(x.data, "ptr"):  # CuPy
        return x.data.ptr
    return np.from_dlpack(x).__array_interface__["data"][0]


@pytest.mark.parametrize("library", [name for name in INSTALLED if name != "numpy"])
@few_examples
@given(arr=arrays())
def test_round_trip_changes_nothing(library: str, arr: scree.Array) -> None:
    if str(arr.dtype) in MISSING_DTYPES.get(library, ()):
        with pytest.raises(TypeError, match=str(arr.dtype)):
            arr.to_backend(library)
        return
    converted = arr.to_backend(library)
    assert converted.layout.backend.name == library
    assert converted.max_length == arr.max_length
    assert converted.layout.host_offsets is not None  # offsets known on the host stay known
    assert_same(converted, arr)
    assert_same(converted.to_numpy(), arr)


@pytest.mark.parametrize("source, target", PAIRS)
def test_to_backend_shares_host_memory(source: str, target: str) -> None:
    values = make_values((64, 16), "float32")
    arr = make(source, values, [32, 0, 32])
    converted = arr.to_backend(target)
    np.testing.assert_array_equal(np.asarray(to_numpy(converted).values), values)
    is_copied = (
        target == "mlx"
        or (source, target) == ("mlx", "jax")
        or (target == "jax" and address(arr.values) % 64)
    )
    assert (address(converted.values) == address(arr.values)) == (not is_copied)


@pytest.mark.needs("ml_dtypes")
@pytest.mark.parametrize(
    "source, target", [pair for pair in PAIRS if "array_api_strict" not in pair]
)
def test_bfloat16_keeps_its_bits(source: str, target: str) -> None:
    bits = np.asarray([0x0000, 0x3F80, 0xC000, 0x7F80, 0x0001, 0x7FC0], dtype=np.uint16)
    start = scree.from_lengths(bits.view("bfloat16"), [2, 4]).to_backend(source)
    assert str(start.dtype).endswith("bfloat16")
    np.testing.assert_array_equal(start.to_backend(target).to_numpy().values.view(np.uint16), bits)


def test_to_backend_accepts_a_namespace() -> None:
    import array_api_strict

    arr = scree.from_lengths(np.arange(3.0), [1, 2])
    assert to_backend(arr, array_api_strict).layout.backend.name == "array_api_strict"
    assert to_backend(arr, np) is arr
    assert to_backend(arr, scree.namespace(arr)) is arr
    with pytest.raises(TypeError, match="library: expected the name"):
        to_backend(arr, 3)


@pytest.mark.needs("torch")
def test_to_backend_of_values_with_a_gradient_raises() -> None:
    import torch

    arr = scree.from_lengths(torch.ones(3, requires_grad=True), [1, 2])
    with pytest.raises(TypeError, match=r"with_values\(arr.values.detach"):
        arr.to_numpy()
    assert arr.to_backend(torch) is arr


@pytest.mark.needs("mlx")
def test_to_backend_checks_unchecked_offsets() -> None:
    import mlx.core as mx

    arr = scree.Array(mx.zeros(3), mx.array([0, 2, 1], dtype=mx.int32))
    with pytest.raises(ValueError, match="offsets"):
        arr.to_numpy()


# ---------------------------------------------------------------- on a device
ON_CUDA = [name for name in ("torch", "jax", "cupy") if find_spec(name)]


def on_cuda(library: str, dtype: str = "float32") -> scree.Array:
    """Return an array on the first CUDA device, for a library that supports CUDA."""
    arr = scree.from_lengths(make_values((64, 16), "float32"), [32, 0, 32]).to_backend(
        "torch", device="cuda"
    )
    import torch

    return arr.to(getattr(torch, dtype)).to_backend(library)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "uint8"])
@pytest.mark.parametrize("source, target", list(permutations(ON_CUDA, 2)))
def test_to_backend_shares_device_memory(source: str, target: str, dtype: str) -> None:
    arr = on_cuda(source, dtype)
    converted = arr.to_backend(target)
    assert converted.layout.backend.name == target
    assert address(converted.values) == address(arr.values)
    assert address(converted.offsets) == address(arr.offsets)
    assert converted.layout.host_offsets is not None
    np.testing.assert_array_equal(converted.to_numpy().values, make_values((64, 16), dtype))
    assert_same(
        converted.to_backend("torch").to_device("cpu"), arr.to_backend("torch").to_device("cpu")
    )


@pytest.mark.parametrize("library", [name for name in INSTALLED if name != "numpy"])
def test_to_backend_of_another_byte_order_says_how_to_convert(library: str) -> None:
    order = ">" if sys.byteorder == "little" else "<"
    arr = scree.from_lengths(np.arange(3, dtype=f"{order}f4"), [2, 1])
    with pytest.raises(TypeError, match="values: expected native byte order"):
        to_backend(arr, library)
    native = arr.with_values(arr.values.astype(arr.dtype.newbyteorder("=")))
    assert to_numpy(to_backend(native, library)).tolist() == [[0, 1], [2]]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "source, target", [pair for pair in permutations(ON_CUDA, 2) if "cupy" not in pair]
)
def test_to_backend_shares_bfloat16_device_memory(source: str, target: str) -> None:
    arr = on_cuda(source, "bfloat16")
    converted = arr.to_backend(target)
    assert str(converted.dtype).endswith("bfloat16")
    assert address(converted.values) == address(arr.values)
    np.testing.assert_array_equal(
        converted.to_numpy().values.astype("float32"), make_values((64, 16), "float32")
    )


@pytest.mark.gpu
@pytest.mark.parametrize("library", ON_CUDA)
def test_device_round_trip_through_numpy(library: str) -> None:
    arr = on_cuda(library)
    host = arr.to_numpy()
    assert isinstance(host.values, np.ndarray)
    back = host.to_backend(library, device=arr.device)
    assert back.device == arr.device
    assert_same(back.to_numpy(), host)


def test_convert_library_without_dlpack_passes_through_numpy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    numpy, values = backend_by_name("numpy"), np.arange(3.0)
    array = SimpleNamespace(values=values, dtype=values.dtype)  # without `__dlpack_device__`
    lazy = replace(
        numpy,
        name="lazy",
        xp=SimpleNamespace(asarray=lambda x: SimpleNamespace(values=x, dtype=x.dtype)),
        read=lambda x: x.values,
        has_dlpack=False,
    )
    monkeypatch.setattr(dlpack, "backend", lambda x: lazy if x is array else numpy)
    np.testing.assert_array_equal(dlpack.convert(array, numpy), values)
    np.testing.assert_array_equal(dlpack.convert(values, lazy).values, values)
