"""Between the libraries themselves: values and offsets by DLPack, which shares memory where both sides can."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array import Array
from ..backends import Backend, backend, backend_by_name, is_array
from ..broadcasting import check_ragged, moveaxis
from ..layout import Layout

#: Libraries that may take memory of a device; the others get a copy in host memory.
DEVICES = ("torch", "jax", "cupy")


def to_backend(arr: Array, library: Any, *, device: Any = None) -> Array:
    """The array in another library, on the same memory where both libraries allow it.

    Parameters
    ----------
    arr
        Ragged array of any library; it is returned itself where it is one of `library` already.
    library
        The name of a library ("numpy", "torch", "jax", "mlx", "array_api_strict" ...) or its namespace.
    device
        Where the result shall be; by default where the memory is, or the host for a library that knows no devices. CuPy
        has its arrays on its current device.

    Returns
    -------
    Array
        The same rows with the same dtype. What is known of the rows on the host stays known. int64 offsets become int32 in a
        library that has no int64.

    Raises
    ------
    TypeError
        If the library has no such dtype (nothing is narrowed), or if the values need a gradient, which ends at the border of a
        library.

    Examples
    --------
    >>> import array_api_strict, numpy as np, scree
    >>> arr = scree.from_lengths(np.arange(4.0), [1, 3])
    >>> there = arr.to_backend("array_api_strict")
    >>> there.values.__array_namespace__() is array_api_strict
    True
    >>> np.shares_memory(scree.bridges.to_numpy(there).values, arr.values)
    True
    """
    lib, rows = backend_of(library), check_ragged("arr", arr).layout
    if lib is not rows.backend:
        values, offsets = convert(arr.values, lib), convert(_offsets(arr, lib), lib)
        if rows.has_no_tail:
            arr = Array.from_layout(
                values, Layout(lib, offsets, rows.total, rows.max_length, rows.host), arr.ragged_dim
            )
        else:  # unchecked so far
            arr = Array(values, offsets, arr.ragged_dim, rows.max_length)
    return arr if device is None else arr.to_device(device)


def to_jax(arr: Array) -> Array:
    """The array on JAX; see `to_backend`."""
    return to_backend(arr, "jax")


def to_mlx(arr: Array) -> Array:
    """The array on MLX, which copies; see `to_backend`."""
    return to_backend(arr, "mlx")


def to_numpy(arr: Array) -> Array:
    """The array on NumPy; see `to_backend`."""
    return to_backend(arr, "numpy")


def to_torch(arr: Array) -> Array:
    """The array on PyTorch; see `to_backend`."""
    return to_backend(arr, "torch")


def tokens_first(arr: Array) -> Array:
    """The array with the ragged axis first, as formats want it that know no other; a view where it can be one."""
    dim = check_ragged("arr", arr).ragged_dim
    return (
        arr.with_values(moveaxis(arr.layout.xp, arr.values, dim, 0), ragged_dim=0) if dim else arr
    )


def on_host(arr: Array) -> Array:
    """The array on NumPy with the ragged axis first."""
    return tokens_first(to_backend(arr, "numpy"))


def convert(x: Any, lib: Backend) -> Any:
    """A dense array in another library, by DLPack; bfloat16 goes as its bits where one side is NumPy, which has no such type.

    Raises `TypeError` where the library has no such dtype or a gradient would be lost.
    """
    own, name = backend(x), dtype_name(x.dtype)
    if own is lib:
        return x
    if getattr(x, "requires_grad", False):
        raise TypeError(
            f"values: expected values that need no gradient, which cannot follow from {own.name} to {lib.name}, got some that "
            "do; use arr.with_values(arr.values.detach())"
        )
    bits = name == "bfloat16" and "numpy" in (own.name, lib.name)
    target = _bfloat16(lib) if bits else None
    y = _take(lib, x.view(own.xp.uint16) if bits else x)
    y = y.view(target) if bits else y
    if dtype_name(y.dtype) != name:
        raise TypeError(
            f"values: {lib.name} would make {dtype_name(y.dtype)} of {name} here; convert with astype"
        )
    return y


def widest_integer(xp: Any) -> Any:
    """int64, or int32 in a library that has no int64 (here, as JAX by default)."""
    return xp.__array_namespace_info__().dtypes(kind="signed integer").get("int64", xp.int32)


def dtype_name(dtype: Any) -> str:
    """The standard's name of a dtype of any library."""
    return str(dtype).rpartition(".")[2]


def _take(lib: Backend, x: Any) -> Any:
    if x.__dlpack_device__()[0] != 1 and lib.name not in DEVICES:  # 1 is host memory
        x = backend(x).read(x)
    if x.__dlpack_device__()[0] == 1 and lib.name == "cupy":  # which has no arrays in host memory
        return lib.xp.asarray(np.from_dlpack(x))
    if backend(x).name not in ("torch", "jax", "mlx", "numpy") and x.__dlpack_device__()[0] == 1:
        x = np.from_dlpack(x)  # a view, whose strides are known
    if isinstance(x, np.ndarray) and (min(x.strides, default=0) < 0 or not x.flags.writeable):
        x = np.array(x, order="C")  # DLPack has no word for either
    try:
        return lib.xp.from_dlpack(x)
    except (BufferError, RuntimeError):  # strides that the library does not take
        return lib.xp.from_dlpack(backend(x).xp.asarray(x, copy=True))


def _offsets(arr: Array, lib: Backend) -> Any:
    """The offsets, as int32 where the library has no int64."""
    offsets = arr.offsets
    if dtype_name(offsets.dtype) in lib.xp.__array_namespace_info__().dtypes(kind="signed integer"):
        return offsets
    if arr.total_length > np.iinfo(np.int32).max:
        raise TypeError(
            f"offsets: expected at most 2^31 - 1 tokens for {lib.name}, which has no int64, got {arr.total_length}"
        )
    return arr.layout.xp.astype(offsets, arr.layout.xp.int32)


def _bfloat16(lib: Backend) -> Any:
    if lib.name != "numpy":
        return lib.xp.bfloat16
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise TypeError(
            "values: NumPy has no bfloat16; install ml_dtypes, or convert the values to float32 first"
        ) from None
    return bfloat16


def backend_of(library: Any) -> Backend:
    """The backend of a library that is given by its name or its namespace."""
    if isinstance(library, str):
        return backend_by_name(library)
    if not hasattr(library, "zeros"):
        raise TypeError(
            f"library: expected the name of a library or its namespace, got {type(library).__name__}"
        )
    found = library.zeros(0)
    if not is_array(found):
        raise TypeError(
            f"library: expected the name of a library or its namespace, got {library!r}"
        )
    return backend(found)
