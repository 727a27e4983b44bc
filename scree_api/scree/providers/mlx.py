"""MLX: sums of short rows by scatter-add, and the error of operators with an MLX array first."""

from typing import Any, NoReturn

import mlx.core as mx

from ..array import Array
from ..backends.mlx import BACKEND
from ..dispatch.registry import register_kernel
from ..ops.segment import SegmentCall

MAX_LENGTH = 4  # longest row for which a scatter is as fast as tiles


def _refuse_conversion(self: Array) -> NoReturn:
    raise TypeError(
        "mx.array: expected the ragged array first, as in ragged == dense, got an MLX array first, which never asks the "
        "ragged array; put it first, or use a function of scree.namespace(ragged), such as xp.subtract(dense, ragged)"
    )


# MLX calls this method in its operators. Without it, `dense == ragged` is False.
Array.__mlx_array__ = _refuse_conversion  # type: ignore[attr-defined]  # only MLX reads it


def _rejects(call: SegmentCall) -> str | None:
    if call.layout.backend is not BACKEND:
        return "only MLX arrays are scattered into rows"
    if call.op != "sum":
        return f"MLX has no gradient of a scatter by {call.op}"
    if 0 in call.values.shape:
        return "MLX divides by the number of elements per token, which is 0"
    if call.layout.max_length_bound > MAX_LENGTH:
        return f"tiles are faster in rows beyond {MAX_LENGTH} tokens"
    return None


@register_kernel("segment_reduce", provider="scatter", rejects=_rejects)
def scatter(call: SegmentCall) -> Any:
    """Add every token to the sum of its row. The sum of the tail is dropped."""
    num_rows, values = call.layout.num_rows, call.converted
    zeros = mx.zeros((num_rows + 1, *values.shape[1:]), dtype=values.dtype)
    return zeros.at[call.layout.segment_ids].add(values)[:num_rows]
