"""The backend of dask.array, whose arrays are computed on request and hide their devices."""

from typing import Any

import array_api_compat.dask.array as xp
import numpy as np

from . import Backend, override


def _take_along_axis(x: Any, indices: Any, /, *, axis: int = -1) -> Any:
    axes = tuple(range(x.ndim))
    axis = axes[axis]
    # The sizes of `x` and `indices` along the axis differ, so the axis of `x` has another number.
    axes_of_x = tuple(x.ndim if dim == axis else dim for dim in axes)
    return xp.blockwise(
        np.take_along_axis,
        *(axes, x, axes_of_x, indices, axes),
        axis=axis,
        concatenate=True,
        dtype=x.dtype,
    )


def _peek(x: Any) -> None:
    """Return None: reading an array runs its graph."""


def _read(x: Any) -> np.ndarray:
    return np.asarray(x.compute())


def _device(x: Any) -> None:
    """Return None: the chunks may be on any device, which is known only after a computation."""


def _to_device(x: Any, device: Any) -> Any:
    if device not in (None, "cpu"):
        raise ValueError(f"device: expected 'cpu' for dask.array, got {device!r}")
    return x


BACKEND = Backend(
    "dask",
    override(xp, take_along_axis=_take_along_axis),
    _peek,
    _read,
    device=_device,
    to_device=_to_device,
    has_dlpack=False,
)
