"""The backend of ndonnx, which builds ONNX graphs and computes the values of constants at once."""

from typing import Any

import ndonnx
import numpy as np

from . import UNREADABLE, Backend, override


# The standard accepts indices of every integer dtype. ndonnx accepts only int64.
def _take(x: Any, indices: Any, /, *, axis: int | None = None) -> Any:
    return ndonnx.take(x, indices.astype(ndonnx.int64, copy=False), axis=axis)


def _take_along_axis(x: Any, indices: Any, /, *, axis: int = -1) -> Any:
    return ndonnx.take_along_axis(x, indices.astype(ndonnx.int64, copy=False), axis=axis)


def _peek(x: Any) -> np.ndarray | None:
    try:
        return x.unwrap_numpy()
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
    return ndonnx.asarray(host, dtype=dtype)


BACKEND = Backend(
    "ndonnx",
    override(ndonnx, take=_take, take_along_axis=_take_along_axis),
    _peek,
    _read,
    device=_device,
    to_device=_to_device,
    from_numpy=_from_numpy,
)
