"""Position of the first maximum or minimum of each row."""

from collections.abc import Callable
from typing import Any

import torch

from scree.dispatch.operation import OPERATIONS
from scree.ops.segment import SegmentCall

from ..runtime.compile import define_operator, uses_operators
from ..runtime.device import unsupported_dtype
from ..runtime.fallback import falls_back_to
from . import reductions
from .interface import Rows, launch_config, layout_of, over_rows, rows_of, too_wide

# A value and its position share a 64-bit search key, so values have at most 32 bits.
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.int32)
_SEARCHES = {"max": reductions.ARGMAX, "min": reductions.ARGMIN}


def _argmax_rows(x: torch.Tensor, rows: Rows, op: str) -> torch.Tensor:
    return over_rows(x.detach().contiguous(), rows, _SEARCHES[op], dtype=rows.offsets.dtype)


def _standard(
    x: torch.Tensor, offsets: torch.Tensor, max_length: int | None, op: str
) -> torch.Tensor:
    call = SegmentCall(op, x, layout_of(x, Rows(offsets, max_length)), x.dtype)
    return OPERATIONS["segment_arg"].run_call(call, "standard")


@falls_back_to(_standard)
def _arg_operator(
    x: torch.Tensor, offsets: torch.Tensor, max_length: int | None, op: str
) -> torch.Tensor:
    return _argmax_rows(x, Rows(offsets, max_length), op)


def _arg_fake(x, offsets, max_length, op):
    return x.new_empty((offsets.shape[0] - 1, *x.shape[1:]), dtype=offsets.dtype)


_arg_op = define_operator("segment_arg", _arg_operator, _arg_fake)


def rejects(call: Any) -> str | None:
    """Return why the kernels do not support a `SegmentCall`; None if they do."""
    return unsupported_dtype(call.values, _DTYPES) or too_wide(call.values)


def segment_arg(call: Any) -> torch.Tensor:
    """Return the position of the first extremum of each row, (n, ...); -1 for empty rows."""
    if not uses_operators(call.values):
        return prepare_segment_arg(call)(call.layout, call.values)
    rows = rows_of(call.layout)
    return _arg_op(call.values, rows.offsets, rows.max_length, call.op)


def prepare_segment_arg(call: Any) -> Callable[..., torch.Tensor]:
    """Return a function for calls with the same metadata."""
    rows = rows_of(call.layout)
    config = launch_config(call.values, rows, _SEARCHES[call.op], dtype=rows.offsets.dtype)
    return lambda layout, values: config.run(values.detach().contiguous(), rows_of(layout))
