"""The backend of ndonnx, which builds ONNX graphs and computes the values of constants at once."""

from typing import Any

import ndonnx
import numpy as np

from . import UNREADABLE, Backend, override


# The standard accepts indices of every integer dtype, but ndonnx only int64.
def _take(x: Any, indices: Any, /, *, axis: int | None = None) -> Any:
    return ndonnx.take(x, indices.astype(ndonnx.int64, copy=False), axis=axis)


def _take_along_axis(x: Any, indices: Any, /, *, axis: int = -1) -> Any:
    return ndonnx.take_along_axis(x, indices.astype(ndonnx.int64, copy=False), axis=axis)


def _logaddexp(x1: Any, x2: Any, /) -> Any:
    # The function of ndonnx adds the exponentials, which overflow from 89 in float32.
    difference = ndonnx.where(x1 == x2, 0.0, x1 - x2)  # equal infinities have no difference
    return ndonnx.maximum(x1, x2) + ndonnx.log1p(ndonnx.exp(-ndonnx.abs(difference)))


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


def _to_device(x: Any, device: Any) -> Any:
    if device not in ("cpu", x.device):
        raise ValueError(
            f"device: expected 'cpu' or {x.device!r}, ndonnx's only device, got {device!r}"
        )
    return x


BACKEND = Backend(
    "ndonnx",
    override(ndonnx, take=_take, take_along_axis=_take_along_axis, logaddexp=_logaddexp),
    _peek,
    _read,
    to_device=_to_device,
    has_dlpack=False,
)
