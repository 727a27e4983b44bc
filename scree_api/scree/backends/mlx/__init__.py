"""The backend of MLX, and its namespace of the standard, which array-api-compat lacks."""

import math
from typing import Any

import mlx.core as mx
import numpy as np

from .. import UNREADABLE, Backend
from . import namespace as xp


def _peek(x: Any) -> None:
    # Reading a lazy array would compute it, and MLX does not tell whether it is computed.
    return None


def _read(x: Any) -> np.ndarray:
    try:
        return np.array(x)
    except (RuntimeError, ValueError) as error:
        raise TypeError(UNREADABLE) from error


def _uniform(key: Any, shape: tuple[int, ...], like: Any) -> Any:
    if not isinstance(key, mx.array):
        raise TypeError(f"key: expected a key of mlx.core.random, got {type(key).__name__}")
    return mx.random.uniform(shape=shape, key=key)


def _gelu(x: mx.array) -> mx.array:
    # The backend has no `erf`: the error of mx.erf near 0 is 40,000 ulp, which matters less here.
    wide = x if x.dtype == mx.float64 else x.astype(mx.float32)
    return (wide * (0.5 + 0.5 * mx.erf(wide * math.sqrt(0.5)))).astype(x.dtype)


def _write(x: mx.array, index: tuple[mx.array, ...], values: mx.array) -> mx.array:
    x = mx.array(x)  # a new handle: an assignment changes what `x` refers to
    x[index] = values
    return x


BACKEND = Backend(
    "mlx",
    xp,
    _peek,
    _read,
    device=xp.device,
    # MLX arrays are in memory that the host reads, whatever their device.
    to_device=lambda x, device: x if device == "cpu" else xp.to_device(x, device),
    uniform=_uniform,
    checkpoint=mx.checkpoint,
    write=_write,
    activations={"gelu": _gelu},
)
