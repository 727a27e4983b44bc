"""Backends of libraries that follow the standard and have no module here: array-api-strict etc."""

from itertools import accumulate
from typing import Any

import array_api_compat
import numpy as np

from . import Backend

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


def make(x: Any) -> Backend:
    """Return a backend for the library of the array `x`."""
    xp = array_api_compat.array_namespace(x)
    name = xp.__name__.rpartition(".")[2]
    return Backend(name, xp, _peek, _read, to_device=_to_device, split=_split)
