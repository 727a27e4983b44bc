"""Cumulative sums and products within the rows of a ragged array, and the gradient of sums."""

from collections.abc import Callable
from typing import Any

import torch

from scree.dispatch.operation import OPERATIONS
from scree.ops.segment import SegmentCall

from ..runtime.autograd import differentiable
from ..runtime.compile import define_operator, uses_operators
from ..runtime.fallback import falls_back_to, gradients
from . import interface, reductions
from .interface import OPS, Rows, launch_config, layout_of, over_rows, rows_of


def _standard(
    x: torch.Tensor, rows: Rows, op: str, dtype: torch.dtype, reverse: bool
) -> torch.Tensor:
    layout = layout_of(x, rows)

    def run(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        call = SegmentCall(op, x, layout, dtype)
        return OPERATIONS["segment_scan"].run_call(call, "standard")

    if not reverse:
        return run(x, dtype)
    # A sum from the end of each row is the gradient of a sum from its start.
    zeros = x.new_zeros(x.shape, dtype=dtype)
    return gradients(lambda zeros: run(zeros, x.dtype), (zeros,), x)[0]


@falls_back_to(_standard)
def _scan(x: torch.Tensor, rows: Rows, op: str, dtype: torch.dtype, reverse: bool) -> torch.Tensor:
    return over_rows(
        x.contiguous(),
        rows,
        OPS[op],
        reductions.CUMULATIVE_REVERSE if reverse else reductions.CUMULATIVE,
        dtype=dtype,
    )


def _record_scan(ctx, x, rows, config):
    ctx.rows, ctx.dtype = rows, x.dtype
    return config.run(x.contiguous(), rows)


def _scan_gradient(ctx, dy):
    return _scan(dy, ctx.rows, "sum", ctx.dtype, True), None, None


_differentiable_scan = differentiable("Scan", _record_scan, _scan_gradient)


def _scan_operator(
    x: torch.Tensor,
    offsets: torch.Tensor,
    max_length: int | None,
    op: str,
    dtype: torch.dtype,
    reverse: bool,
) -> torch.Tensor:
    return _scan(x, Rows(offsets, max_length), op, dtype, reverse)


def _scan_fake(x, offsets, max_length, op, dtype, reverse):
    return x.new_empty(x.shape, dtype=dtype)


def _save_scan(ctx, inputs, output):
    x, offsets, ctx.max_length, *_, ctx.reverse = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(offsets)


_scan_op = define_operator(
    "segment_scan",
    _scan_operator,
    _scan_fake,
    save=_save_scan,
    backward=lambda ctx, dy: (
        _scan_op(dy, *ctx.saved_tensors, ctx.max_length, "sum", ctx.dtype, not ctx.reverse),
        *(None,) * 5,
    ),
)


def rejects(call: Any) -> str | None:
    """Return why the kernels do not scan the rows of a `SegmentCall`; None if they do."""
    if call.op == "prod" and call.values.requires_grad:
        return "the Triton kernels have no gradient of a cumulative product"
    return interface.rejects(call)


def segment_scan(call: Any) -> torch.Tensor:
    """Compute a `SegmentCall` as a scan."""
    if not uses_operators(call.values):
        return prepare_segment_scan(call)(call.layout, call.values)
    rows = rows_of(call.layout)
    return _scan_op(call.values, rows.offsets, rows.max_length, call.op, call.dtype, False)


def prepare_segment_scan(call: Any) -> Callable[..., torch.Tensor]:
    """Return a function for calls with the same metadata."""
    config = launch_config(
        call.values, rows_of(call.layout), OPS[call.op], reductions.CUMULATIVE, dtype=call.dtype
    )
    requires_grad = call.values.requires_grad

    def scan(layout: Any, values: torch.Tensor) -> torch.Tensor:
        rows = rows_of(layout)
        return (
            _differentiable_scan(values, rows, config)
            if requires_grad and torch.is_grad_enabled()
            else config.run(values.contiguous(), rows)
        )

    return scan
