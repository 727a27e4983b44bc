"""Methods of `Array` that convert it to other libraries and formats.

Importing this module adds them to `Array`. A method imports its bridge when it is called, so that
`import scree` loads no library.
"""

from __future__ import annotations

from typing import Any

from ..array import Array


def to_backend(arr: Array, library: Any, *, device: Any = None) -> Array:
    """Return the array in another library, sharing memory where both allow it.

    See `scree.bridges.to_backend`.
    """
    from .dlpack import to_backend

    return to_backend(arr, library, device=device)


def to_numpy(arr: Array) -> Array:
    """Return the array on NumPy; see `to_backend`."""
    return to_backend(arr, "numpy")


def tolist(arr: Array) -> list[Any]:
    """Return the rows as lists of Python numbers; see `scree.bridges.to_lists`."""
    from .lists import to_lists

    return to_lists(arr)


def to(arr: Array, *args: Any, **kwargs: Any) -> Array:
    """Return the array with another device or dtype, as `torch.Tensor.to`; for PyTorch only."""
    from .torch import to

    return to(arr, *args, **kwargs)


def pin_memory(arr: Array) -> Array:
    """Return the array in pinned memory, as a DataLoader requests it; for PyTorch only."""
    from .torch import pin_memory

    return pin_memory(arr)


def record_stream(arr: Array, stream: Any) -> None:
    """Keep the memory until `stream` has finished its current work; for PyTorch only."""
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
