"""The backend of ndonnx, which builds ONNX graphs and computes the values of constants at once."""

from typing import Any

import ndonnx as xp
import numpy as np

from . import UNREADABLE, Backend


def _peek(x: Any) -> np.ndarray | None:
    try:
        return x.unwrap_numpy()  # type: ignore[no-any-return]
    except ValueError:  # the value depends on an argument of the graph
        return None


def _read(x: Any) -> np.ndarray:
    host = _peek(x)
    if host is None:
        raise TypeError(UNREADABLE)
    return host


def _device(x: Any) -> None:
    """Return None: the runtime of the graph chooses the device."""


def _to_device(x: Any, device: Any) -> Any:
    if device not in (None, "cpu"):
        raise ValueError(
            f"device: expected 'cpu' for ndonnx, whose runtime chooses the device, got {device!r}"
        )
    return x


def _from_numpy(host: np.ndarray, dtype: Any, device: Any) -> Any:
    return xp.asarray(host, dtype=dtype)


BACKEND = Backend(
    "ndonnx", xp, _peek, _read, device=_device, to_device=_to_device, from_numpy=_from_numpy
)
