"""Any library that follows the standard and that scree has no module for, array-api-strict among them."""

from typing import Any

import array_api_compat
import numpy as np

from ..dispatch.registry import load_plugins
from . import Backend

_MADE: dict[str, Backend] = {}


def _peek(x: Any) -> np.ndarray | None:
    return _read(x) if x.__dlpack_device__()[0] == 1 else None  # 1 is kDLCPU in DLPack


def _read(x: Any) -> np.ndarray:
    if x.__dlpack_device__()[0] != 1:
        x = array_api_compat.to_device(x, "cpu")
    return np.from_dlpack(x)


def make(x: Any) -> Backend:
    """The backend of the library that the array `x` comes from."""
    xp = array_api_compat.array_namespace(x)
    name = xp.__name__.rpartition(".")[2]
    load_plugins(name)
    return _MADE.setdefault(
        name, Backend(name, xp, _peek, _read, to_device=array_api_compat.to_device)
    )
