"""MLX: the standard namespace over `mlx.core` that array-api-compat does not have yet."""

from typing import Any

import mlx.core as mx
import numpy as np

from ..layout import Layout
from ..registry import register_kernel
from ..segments import TILE, SegmentCall
from . import Backend
from . import mlx_namespace as xp


def _peek(x: Any) -> None:
    return None  # nothing tells whether a lazy array is computed, and looking would compute it


def _read(x: Any) -> np.ndarray:
    try:
        return np.array(x)
    except (RuntimeError, ValueError) as error:
        raise TypeError("the size of this result depends on the offsets, which a traced function cannot read") from error


def _uniform(key: Any, shape: tuple[int, ...], like: Any) -> Any:
    return mx.random.uniform(shape=shape, key=key)


BACKEND = Backend("mlx", xp, _peek, _read, device=xp.device, to_device=xp.to_device, uniform=_uniform)


def _rejects(call: SegmentCall) -> str | None:
    if call.layout.backend is not BACKEND:
        return "the scatter takes MLX arrays only"
    return None if call.op == "sum" else f"MLX has no derivative of a scatter by {call.op}"


@register_kernel("segment_reduce", provider="scatter", rejects=_rejects)
def scatter_sum(call: SegmentCall) -> mx.array:
    """Row sums by scatters, which are faster than gathers here: first into tiles, so that a sum stays a tree."""
    values, layout = call.values, call.layout
    while layout.bound > TILE:
        tiles = layout.tiles(TILE).layout
        values, layout = _scatter(values, layout, layout.tile_slots(TILE) // TILE, tiles.total), tiles
    return _scatter(values, layout, layout.segment_ids, layout.num_rows)


def _scatter(values: mx.array, layout: Layout, places: mx.array, size: int) -> mx.array:
    """Add the values up at `size` places; what lies behind the last row goes to one place more, which is cut off."""
    places = mx.where(layout.segment_ids < layout.num_rows, places, size)
    return mx.zeros((size + 1, *values.shape[1:]), dtype=values.dtype).at[places].add(values)[:size]
