"""MLX: sums of short rows by a scatter."""

from typing import Any

import mlx.core as mx

from ..backends.mlx import BACKEND
from ..dispatch.registry import register_kernel
from ..ops.segment import SegmentCall

SHORT = 4  # longest row for which a scatter is as fast as tiles


def _rejects(call: SegmentCall) -> str | None:
    if call.layout.backend is not BACKEND:
        return "only MLX arrays are scattered into rows"
    if call.op != "sum":
        return f"MLX has no gradient of a scatter by {call.op}"
    if 0 in call.values.shape:
        return "MLX divides by the number of elements per token, which is 0"
    if call.layout.max_length_bound > SHORT:
        return f"tiles are faster in rows beyond {SHORT} tokens"
    return None


@register_kernel("segment_reduce", provider="scatter", rejects=_rejects)
def scatter(call: SegmentCall) -> Any:
    """Add every token to its row; the tail has a row of its own, which is dropped."""
    n, values = call.layout.num_rows, call.converted
    out = mx.zeros((n + 1, *values.shape[1:]), dtype=values.dtype)
    return out.at[call.layout.segment_ids].add(values)[:n]
