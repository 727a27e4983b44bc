"""Conversion between array libraries by DLPack.

Values and offsets share memory where both libraries allow it. MLX copies all memory of other
libraries. JAX copies host memory that is not aligned to 64 bytes. A library without devices gets a
copy of device memory on the host.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..array import Array
from ..backends import Backend, backend, backend_by_name, is_array
from ..broadcasting import check_ragged, moveaxis
from ..layout import Layout

#: Libraries that accept device memory; the others get a copy in host memory.
DEVICE_LIBRARIES = ("torch", "jax", "cupy")
_DLPACK_CPU = 1  # the device type of host memory in DLPack


def to_backend(arr: Array, library: Any, *, device: Any = None) -> Array:
    """Return the array in another library, on the same memory if both libraries allow it.

    Parameters
    ----------
    arr
        Ragged array of any library. It is returned itself if it belongs to `library` already.
    library
        Name of a library ("numpy", "torch", "jax", "mlx", "array_api_strict" ...) or its namespace.
    device
        Device of the result. By default the device of `arr`, or the host for a library without
        devices. CuPy uses its current device.

    Returns
    -------
    Array
        The same rows with the same dtype. Offsets that are known on the host stay known. int64
        offsets become int32 in a library that has no int64.

    Raises
    ------
    TypeError
        If the library lacks the dtype (nothing is narrowed), or if the values need a gradient,
        which cannot pass from one library to another.

    Examples
    --------
    >>> import array_api_strict, numpy as np, scree
    >>> arr = scree.from_lengths(np.arange(4.0), [1, 3])
    >>> strict = arr.to_backend("array_api_strict")
    >>> strict.values.__array_namespace__() is array_api_strict
    True
    >>> np.shares_memory(scree.bridges.to_numpy(strict).values, arr.values)
    True
    """
    lib, layout = backend_of(library), check_ragged("arr", arr).layout
    if lib is not layout.backend:
        values, offsets = convert(arr.values, lib), convert(_representable_offsets(arr, lib), lib)
        if layout.has_no_tail:
            converted = Layout(lib, offsets, layout.total, layout.max_length, layout.host_offsets)
            arr = Array.from_layout(values, converted, arr.ragged_dim)
        else:
            # The offsets may be unchecked still: the constructor checks them.
            arr = Array(values, offsets, arr.ragged_dim, layout.max_length)
    return arr if device is None else arr.to_device(device)


def to_jax(arr: Array) -> Array:
    """Return the array on JAX; see `to_backend`.

    Parameters
    ----------
    arr
        Ragged array of any library.

    Returns
    -------
    Array
        The same rows on JAX.

    Raises
    ------
    TypeError
        See `to_backend`.

    Examples
    --------
    >>> import numpy as np, scree
    >>> arr = scree.from_lengths(np.arange(3, dtype=np.float32), [1, 2])
    >>> scree.bridges.to_jax(arr).values.tolist()
    [0.0, 1.0, 2.0]
    """
    return to_backend(arr, "jax")


def to_mlx(arr: Array) -> Array:
    """Return the array on MLX, which copies; see `to_backend`.

    Parameters
    ----------
    arr
        Ragged array of any library.

    Returns
    -------
    Array
        The same rows on MLX.

    Raises
    ------
    TypeError
        See `to_backend`.

    Examples
    --------
    >>> import numpy as np, scree
    >>> arr = scree.from_lengths(np.arange(3, dtype=np.float32), [1, 2])
    >>> scree.bridges.to_mlx(arr).values.tolist()
    [0.0, 1.0, 2.0]
    """
    return to_backend(arr, "mlx")


def to_numpy(arr: Array) -> Array:
    """Return the array on NumPy; see `to_backend`.

    Parameters
    ----------
    arr
        Ragged array of any library.

    Returns
    -------
    Array
        The same rows on NumPy, in host memory.

    Raises
    ------
    TypeError
        See `to_backend`.

    Examples
    --------
    >>> import array_api_strict, scree
    >>> arr = scree.from_lengths(array_api_strict.arange(3), [1, 2])
    >>> scree.bridges.to_numpy(arr).values
    array([0, 1, 2])
    """
    return to_backend(arr, "numpy")


def to_torch(arr: Array) -> Array:
    """Return the array on PyTorch; see `to_backend`.

    Parameters
    ----------
    arr
        Ragged array of any library.

    Returns
    -------
    Array
        The same rows on PyTorch.

    Raises
    ------
    TypeError
        See `to_backend`.

    Examples
    --------
    >>> import numpy as np, scree
    >>> arr = scree.from_lengths(np.arange(3, dtype=np.float32), [1, 2])
    >>> scree.bridges.to_torch(arr).values
    tensor([0., 1., 2.])
    """
    return to_backend(arr, "torch")


def tokens_first(arr: Array) -> Array:
    """Return the array with the ragged axis first, for formats that allow no other.

    The values are a view if the library has views.
    """
    dim = check_ragged("arr", arr).ragged_dim
    if not dim:
        return arr
    return arr.with_values(moveaxis(arr.layout.xp, arr.values, dim, 0), ragged_dim=0)


def on_host(arr: Array) -> Array:
    """Return the array on NumPy with the ragged axis first."""
    return tokens_first(to_backend(arr, "numpy"))


def convert(x: Any, lib: Backend) -> Any:
    """Return a dense array in another library, by DLPack.

    bfloat16 is passed as its bits from and to NumPy, which lacks this dtype.

    Raises
    ------
    TypeError
        If the library lacks the dtype, or if a gradient would be lost.
    """
    source, name = backend(x), dtype_name(x.dtype)
    if source is lib:
        return x
    if getattr(x, "requires_grad", False):
        raise TypeError(
            "values: expected values that need no gradient, "
            f"as none can pass from {source.name} to {lib.name}; "
            "use arr.with_values(arr.values.detach())"
        )
    if name == "bfloat16" and "numpy" in (source.name, lib.name):
        bfloat16 = _bfloat16(lib)
        return _from_dlpack(lib, x.view(source.xp.uint16)).view(bfloat16)
    converted = _from_dlpack(lib, x)
    if dtype_name(converted.dtype) != name:
        raise TypeError(
            f"values: expected a dtype that {lib.name} keeps, got {name}, "
            f"which would become {dtype_name(converted.dtype)}; convert it with astype"
        )
    return converted


def widest_integer(xp: Any) -> Any:
    """Return int64, or int32 for a library that has no int64, such as JAX by default."""
    return xp.__array_namespace_info__().dtypes(kind="signed integer").get("int64", xp.int32)


def dtype_name(dtype: Any) -> str:
    """Return the standard's name of a dtype of any library."""
    return str(dtype).rpartition(".")[2]


def check_byte_order(values: np.ndarray) -> None:
    """Raise if a NumPy array has the byte order of another machine, which other libraries refuse."""
    if not values.dtype.isnative:
        raise TypeError(
            f"values: expected native byte order, got {values.dtype.str}; "
            'use arr.with_values(arr.values.astype(arr.dtype.newbyteorder("=")))'
        )


def _from_dlpack(lib: Backend, x: Any) -> Any:
    """Return a dense array in another library; copies only if the library requires it."""
    if not backend(x).has_dlpack:
        x = backend(x).read(x)
    if not lib.has_dlpack:
        return lib.xp.asarray(_from_dlpack(backend_by_name("numpy"), x))
    if x.__dlpack_device__()[0] != _DLPACK_CPU and lib.name not in DEVICE_LIBRARIES:
        x = backend(x).read(x)
    is_host = x.__dlpack_device__()[0] == _DLPACK_CPU
    if is_host and lib.name == "cupy":  # CuPy has no arrays in host memory
        return lib.xp.asarray(np.from_dlpack(x))
    if is_host and backend(x).name not in ("torch", "jax", "mlx", "numpy"):
        x = np.from_dlpack(x)  # a view, whose strides are known
    if isinstance(x, np.ndarray):
        check_byte_order(x)
    if isinstance(x, np.ndarray) and (min(x.strides, default=0) < 0 or not x.flags.writeable):
        x = np.array(x, order="C")  # DLPack supports neither negative strides nor read-only memory
    try:
        return lib.xp.from_dlpack(x)
    except (BufferError, RuntimeError):  # the library does not support these strides
        return lib.xp.from_dlpack(backend(x).xp.asarray(x, copy=True))


def _representable_offsets(arr: Array, lib: Backend) -> Any:
    """Return the offsets, as int32 if the library has no int64."""
    offsets = arr.offsets
    if dtype_name(offsets.dtype) in lib.xp.__array_namespace_info__().dtypes(kind="signed integer"):
        return offsets
    if arr.total_length > np.iinfo(np.int32).max:
        raise TypeError(
            f"offsets: expected at most 2^31 - 1 tokens for {lib.name}, which has no int64, "
            f"got {arr.total_length}; split the batch"
        )
    return arr.layout.xp.astype(offsets, arr.layout.xp.int32)


def _bfloat16(lib: Backend) -> Any:
    if lib.name != "numpy":
        return lib.xp.bfloat16
    try:
        from ml_dtypes import bfloat16
    except ImportError:
        raise TypeError(
            "values: NumPy has no bfloat16; "
            "install ml_dtypes, or convert the values to float32 first"
        ) from None
    return bfloat16


def backend_of(library: Any) -> Backend:
    """Return the backend of a library, which is given by its name or its namespace."""
    if isinstance(library, str):
        return backend_by_name(library)
    if not hasattr(library, "zeros"):
        raise TypeError(
            "library: expected the name of a library or its namespace, "
            f"got {type(library).__name__}"
        )
    probe = library.zeros(0)
    if not is_array(probe):
        raise TypeError(
            f"library: expected the name of a library or its namespace, got {library!r}"
        )
    return backend(probe)
