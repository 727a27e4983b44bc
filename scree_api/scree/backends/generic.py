"""Backends of libraries that follow the standard and have no module here: array-api-strict etc."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import array_api_compat
import numpy as np

from . import Backend, override

DLPACK_CPU = 1  # kDLCPU, the device type of host memory


def _peek(x: Any) -> np.ndarray | None:
    return _read(x) if x.__dlpack_device__()[0] == DLPACK_CPU else None


def _read(x: Any) -> np.ndarray:
    if x.__dlpack_device__()[0] != DLPACK_CPU:
        x = array_api_compat.to_device(x, "cpu")
    return np.from_dlpack(x)


def _to_device(x: Any, device: Any) -> Any:
    # Clients of array-api-compat write "cpu" for every library, also where it names no device.
    if isinstance(device, str) and device == "cpu" and x.__dlpack_device__()[0] == DLPACK_CPU:
        return x
    return array_api_compat.to_device(x, device)


def _split(x: Any, sizes: list[int], axis: int) -> list[Any]:
    ends = list(accumulate(sizes))
    leading = (slice(None),) * axis
    return [x[(*leading, slice(end - size, end), ...)] for end, size in zip(ends, sizes)]


def first_nan(xp: Any, name: str) -> Callable[..., Any]:
    """Return `argmax` or `argmin` of a namespace so that the first NaN is the extremum.

    CuPy returns the position of any NaN.
    """
    function = getattr(xp, name)

    def run(x: Any, /, *, axis: int | None = None, keepdims: bool = False) -> Any:
        position = function(x, axis=axis, keepdims=keepdims)
        if not xp.isdtype(x.dtype, "real floating"):
            return position
        is_nan = xp.isnan(x)
        position_of_nan = xp.argmax(is_nan, axis=axis, keepdims=keepdims)
        return xp.where(xp.any(is_nan, axis=axis, keepdims=keepdims), position_of_nan, position)

    return run


def make(x: Any) -> Backend:
    """Return a backend for the library of the array `x`."""
    xp = array_api_compat.array_namespace(x)
    name = xp.__name__.rpartition(".")[2]
    if name == "cupy":
        xp = override(xp, argmax=first_nan(xp, "argmax"), argmin=first_nan(xp, "argmin"))
    return Backend(name, xp, _peek, _read, to_device=_to_device, split=_split)
