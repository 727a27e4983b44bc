"""Running sums and products of the rows of a ragged array, and the gradient of sums, on the kernels
of `merge_path`.
"""

from collections.abc import Callable
from typing import Any

import torch

from ..runtime.autograd import differentiable
from ..runtime.compile import define_operator
from . import interface, merge_path
from .interface import OPS, Rows, launch_config, over_rows, rows_of


def _scan(x: torch.Tensor, rows: Rows, op: str, dtype: torch.dtype, back: bool) -> torch.Tensor:
    return over_rows(
        x.contiguous(),
        rows,
        OPS[op],
        merge_path.RUNNING_BACK if back else merge_path.RUNNING,
        dtype=dtype,
    )


def _record_scan(ctx, x, rows, config):
    ctx.rows, ctx.dtype = rows, x.dtype
    return config.run(x.contiguous(), rows)


def _scan_gradient(ctx, dy):
    return _scan(dy, ctx.rows, "sum", ctx.dtype, True), None, None


_differentiable_scan = differentiable("Scan", _record_scan, _scan_gradient)


def _run_operator(
    x: torch.Tensor,
    offsets: torch.Tensor,
    max_length: int | None,
    op: str,
    dtype: torch.dtype,
    back: bool,
) -> torch.Tensor:
    return _scan(x, Rows(offsets, max_length), op, dtype, back)


def _fake(x, offsets, max_length, op, dtype, back):
    return x.new_empty(x.shape, dtype=dtype)


def _save(ctx, inputs, output):
    x, offsets, ctx.max_length, *_, ctx.back = inputs
    ctx.dtype = x.dtype
    ctx.save_for_backward(offsets)


_op = define_operator(
    "segment_scan",
    _run_operator,
    _fake,
    save=_save,
    backward=lambda ctx, dy: (
        _op(dy, *ctx.saved_tensors, ctx.max_length, "sum", ctx.dtype, not ctx.back),
        *(None,) * 5,
    ),
)


def rejects(call: Any) -> str | None:
    """Why the kernels do not run over the rows of a `SegmentCall`; None if they do."""
    if call.op == "prod" and call.values.requires_grad:
        return "the Triton kernels have no gradient of a running product"
    return interface.rejects(call)


def segment_scan(call: Any) -> torch.Tensor:
    """Run a `SegmentCall` as a scan."""
    if not torch.compiler.is_compiling():
        return prepare_segment_scan(call)(call.layout, call.values)
    rows = rows_of(call.layout)
    return _op(call.values, rows.offsets, rows.max_length, call.op, call.dtype, False)


def prepare_segment_scan(call: Any) -> Callable[..., torch.Tensor]:
    """Return a function for calls with the same metadata."""
    config = launch_config(
        call.values, rows_of(call.layout), OPS[call.op], merge_path.RUNNING, dtype=call.dtype
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
