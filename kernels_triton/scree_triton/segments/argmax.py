"""Positions of the first maximum or minimum of each row, by the kernels of `merge_path`."""

from collections.abc import Callable
from typing import Any

import torch

from ..runtime.compile import define_operator
from ..runtime.device import unsupported_dtype
from . import merge_path
from .interface import Rows, launch_config, over_rows, rows_of, too_wide

_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int32,
)  # which fit in 64 bits beside a place
_OPS = {"max": merge_path.ARGMAX, "min": merge_path.ARGMIN}


def _find_extrema(x: torch.Tensor, rows: Rows, op: str) -> torch.Tensor:
    return over_rows(x.detach().contiguous(), rows, _OPS[op], dtype=rows.offsets.dtype)


def _run_operator(
    x: torch.Tensor, offsets: torch.Tensor, max_length: int | None, op: str
) -> torch.Tensor:
    return _find_extrema(x, Rows(offsets, max_length), op)


def _fake(x, offsets, max_length, op):
    return x.new_empty((offsets.shape[0] - 1, *x.shape[1:]), dtype=offsets.dtype)


_op = define_operator("segment_arg", _run_operator, _fake)


def rejects(call: Any) -> str | None:
    """Why the kernels do not find the extremum of the rows of a `SegmentCall`; None if they do."""
    return unsupported_dtype(call.values, _DTYPES) or too_wide(call.values)


def segment_arg(call: Any) -> torch.Tensor:
    """Run a `SegmentCall` as a search for the extremum: (n, ...) its place in each row, -1 in an
    empty one.
    """
    if not torch.compiler.is_compiling():
        return prepare_segment_arg(call)(call.layout, call.values)
    rows = rows_of(call.layout)
    return _op(call.values, rows.offsets, rows.max_length, call.op)


def prepare_segment_arg(call: Any) -> Callable[..., torch.Tensor]:
    """Return a function for calls with the same metadata."""
    rows = rows_of(call.layout)
    config = launch_config(call.values, rows, _OPS[call.op], dtype=rows.offsets.dtype)
    return lambda layout, values: config.run(values.detach().contiguous(), rows_of(layout))
