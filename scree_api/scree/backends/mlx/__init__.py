"""MLX: the standard namespace over `mlx.core` that array-api-compat does not have yet."""

from typing import Any

import mlx.core as mx
import numpy as np

from ...dispatch.registry import register_kernel
from ...ops.segment import SegmentCall
from .. import UNREADABLE, Backend
from . import namespace as xp

SHORT = 4  # tokens of the longest row up to which a scatter is as fast as tiles


def _peek(x: Any) -> None:
    return None  # nothing tells whether a lazy array is computed, and looking would compute it


def _read(x: Any) -> np.ndarray:
    try:
        return np.array(x)
    except (RuntimeError, ValueError) as error:
        raise TypeError(UNREADABLE) from error


def _uniform(key: Any, shape: tuple[int, ...], like: Any) -> Any:
    if not isinstance(key, mx.array):
        raise TypeError(f"key: expected a key of mlx.core.random, got {type(key).__name__}")
    return mx.random.uniform(shape=shape, key=key)


BACKEND = Backend(
    "mlx",
    xp,
    _peek,
    _read,
    device=xp.device,
    to_device=xp.to_device,
    uniform=_uniform,
    checkpoint=mx.checkpoint,
)


def _rejects(call: SegmentCall) -> str | None:
    if call.layout.backend is not BACKEND:
        return "only MLX arrays are scattered into rows"
    if call.op != "sum":
        return f"MLX has no gradient of a scatter by {call.op}"
    if call.layout.bound > SHORT:
        return f"tiles are faster in rows beyond {SHORT} tokens"
    return None


@register_kernel("segment_reduce", provider="scatter", rejects=_rejects)
def scatter(call: SegmentCall) -> Any:
    """Add every token to its row; tokens behind the last row have a row of their own."""
    n, values = call.layout.num_rows, call.converted
    out = mx.zeros((n + 1, *values.shape[1:]), dtype=values.dtype)
    return out.at[call.layout.segment_ids].add(values)[:n]
