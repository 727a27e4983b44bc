"""Methods of `Array` that convert it to other libraries and formats.

Importing this module adds them to `Array`. A method imports its bridge when it is called, so that
`import scree` loads no library.
"""

from __future__ import annotations

from typing import Any

from ..array import Array


def to_backend(arr: Array, library: Any, *, device: Any = None) -> Array:
    """Return the array in another library, sharing memory where both allow it.

    Parameters
    ----------
    library, device
        See `scree.bridges.to_backend`.

    Returns
    -------
    Array
        The same rows with the same dtype.

    Examples
    --------
    >>> import array_api_strict, numpy as np, scree
    >>> arr = scree.from_lengths(np.arange(4.0), [1, 3])
    >>> arr.to_backend("array_api_strict").values.__array_namespace__() is array_api_strict
    True
    """
    from .dlpack import to_backend

    return to_backend(arr, library, device=device)


def to_numpy(arr: Array) -> Array:
    """Return the array on NumPy; see `to_backend`.

    Returns
    -------
    Array
        The same rows on NumPy, in host memory.

    Examples
    --------
    >>> import array_api_strict, scree
    >>> scree.from_lengths(array_api_strict.arange(3), [1, 2]).to_numpy().values
    array([0, 1, 2])
    """
    return to_backend(arr, "numpy")


def tolist(arr: Array) -> list[Any]:
    """Return the rows as lists of Python numbers; see `scree.bridges.to_lists`.

    Returns
    -------
    list
        One list per row.

    Examples
    --------
    >>> import numpy as np, scree
    >>> scree.from_lengths(np.arange(4), [1, 3]).tolist()
    [[0], [1, 2, 3]]
    """
    from .lists import to_lists

    return to_lists(arr)


def to(arr: Array, *args: Any, **kwargs: Any) -> Array:
    """Return the array with another device or dtype, as `torch.Tensor.to`; for PyTorch only.

    Parameters
    ----------
    *args, **kwargs
        Arguments of `torch.Tensor.to`: a device, a dtype or a tensor, ``non_blocking=``, ``copy=``.
        The offsets are moved to the device and keep their dtype.

    Returns
    -------
    Array
        The converted array; the array itself if nothing changes.

    Examples
    --------
    >>> import torch, scree
    >>> scree.from_lengths(torch.ones(3), [1, 2]).to(torch.float16).dtype
    torch.float16
    """
    from .torch import to

    return to(arr, *args, **kwargs)


def pin_memory(arr: Array) -> Array:
    """Return the array in pinned memory, as a DataLoader requests it; for PyTorch only.

    Returns
    -------
    Array
        The array with values and offsets in pinned memory.
    """
    from .torch import pin_memory

    return pin_memory(arr)


def record_stream(arr: Array, stream: Any) -> None:
    """Keep the memory until `stream` has finished its current work; for PyTorch only.

    Parameters
    ----------
    stream
        `torch.cuda.Stream` that uses the array.
    """
    from .torch import record_stream

    record_stream(arr, stream)


def arrow_c_schema(arr: Array) -> Any:
    """Return the schema of the Arrow PyCapsule interface."""
    from .arrow import to_arrow

    return to_arrow(arr).type.__arrow_c_schema__()


def arrow_c_array(arr: Array, requested_schema: Any = None) -> Any:
    """Return the schema and array of the Arrow PyCapsule interface."""
    from .arrow import to_arrow

    return to_arrow(arr).__arrow_c_array__(requested_schema)


for _name, _method in {
    "to_backend": to_backend,
    "to_numpy": to_numpy,
    "tolist": tolist,
    "to": to,
    "pin_memory": pin_memory,
    "record_stream": record_stream,
    "__arrow_c_schema__": arrow_c_schema,
    "__arrow_c_array__": arrow_c_array,
}.items():
    setattr(Array, _name, _method)
