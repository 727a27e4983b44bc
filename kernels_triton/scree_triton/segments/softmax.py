"""Softmax, log-softmax and log-sum-exp of the rows of a ragged array, and their gradients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton.language as tl

import scree
from scree.ops.segment import segment_reduce

from ..runtime.autograd import differentiable
from ..runtime.compile import define_operator, uses_operators
from ..runtime.device import unsupported_dtype
from ..runtime.fallback import falls_back_to, gradients
from . import reductions
from .interface import Rows, launch_config, layout_of, over_rows, rows_of, too_wide

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class _Passes(NamedTuple):
    """The reduction and the map of the forward and of the backward pass.

    The backward pass takes dy and y, which is the result, or x for logsumexp.
    """

    forward: tuple[tl.constexpr, tl.constexpr]
    backward: tuple[tl.constexpr, tl.constexpr]


_PASSES = {
    "softmax": _Passes(
        (reductions.LSE, reductions.SOFTMAX), (reductions.DOT, reductions.SOFTMAX_BACKWARD)
    ),
    "log_softmax": _Passes(
        (reductions.LSE, reductions.LOG_SOFTMAX),
        (reductions.SUM_Y, reductions.LOG_SOFTMAX_BACKWARD),
    ),
    "logsumexp": _Passes(
        (reductions.LSE, reductions.NONE), (reductions.LSE, reductions.LOGSUMEXP_BACKWARD)
    ),
}


def _launch_config(x: torch.Tensor, rows: Rows, kind: str) -> Any:
    return launch_config(x, rows, *_PASSES[kind].forward, dtype=x.dtype)


def _standard(x: torch.Tensor, rows: Rows, kind: str) -> torch.Tensor:
    out = getattr(scree, kind)(scree.Array.from_layout(x, layout_of(x, rows)), kernel="standard")
    return out if kind == "logsumexp" else out.values


def _standard_backward(dy: torch.Tensor, y: torch.Tensor, rows: Rows, kind: str) -> torch.Tensor:
    x = y if y.dtype == torch.float64 else y.float()
    rows = rows._replace(layout=layout_of(x, rows))
    if kind == "softmax":
        weighted = x * dy
        sums = segment_reduce("sum", weighted, rows.layout, "standard")
        return (weighted - x * rows.layout.per_token(sums)).to(y.dtype)
    # For log-softmax, y itself is an x with the result y.
    (dx,) = gradients(lambda x: _standard(x, rows, kind), (x,), dy.to(x.dtype))
    return dx.to(y.dtype)


@falls_back_to(_standard_backward)
def _backward(dy: torch.Tensor, y: torch.Tensor, rows: Rows, kind: str) -> torch.Tensor:
    """Return the gradient of x; y is the result, or x for logsumexp."""
    dy = dy.contiguous()
    gradient = dict(row_a=dy) if kind == "logsumexp" else dict(y=dy)
    return over_rows(y.contiguous(), rows, *_PASSES[kind].backward, **gradient)


def _record_softmax(ctx, x, rows, kind, config):
    out = config.run(x.contiguous(), rows)
    ctx.save_for_backward(x if kind == "logsumexp" else out)
    ctx.rows, ctx.kind = rows, kind
    return out


def _softmax_gradient(ctx, dy):
    return _backward(dy, *ctx.saved_tensors, ctx.rows, ctx.kind), None, None, None


_differentiable_softmax = differentiable("Softmax", _record_softmax, _softmax_gradient)


@falls_back_to(lambda x, offsets, max_length, kind: _standard(x, Rows(offsets, max_length), kind))
def _softmax_operator(
    x: torch.Tensor, offsets: torch.Tensor, max_length: int | None, kind: str
) -> torch.Tensor:
    rows = Rows(offsets, max_length)
    return _launch_config(x, rows, kind).run(x.contiguous(), rows)


def _softmax_fake(x, offsets, max_length, kind):
    return x.new_empty((offsets.shape[0] - 1, *x.shape[1:]) if kind == "logsumexp" else x.shape)


def _backward_operator(
    dy: torch.Tensor, y: torch.Tensor, offsets: torch.Tensor, max_length: int | None, kind: str
) -> torch.Tensor:
    return _backward(dy, y, Rows(offsets, max_length), kind)


def _backward_fake(dy, y, offsets, max_length, kind):
    return y.new_empty(y.shape)


_backward_op = define_operator("softmax_backward", _backward_operator, _backward_fake)


def _save_softmax(ctx, inputs, output):
    x, offsets, ctx.max_length, ctx.kind = inputs
    ctx.save_for_backward(x if ctx.kind == "logsumexp" else output, offsets)


_softmax_op = define_operator(
    "softmax",
    _softmax_operator,
    _softmax_fake,
    save=_save_softmax,
    backward=lambda ctx, dy: (
        _backward_op(dy, *ctx.saved_tensors, ctx.max_length, ctx.kind),
        None,
        None,
        None,
    ),
)


def rejects(call: Any) -> str | None:
    """Return why the kernels do not support a `SoftmaxCall`; None if they do."""
    if not call.is_along_rows:
        return "softmax runs along rows only, not along element axes"
    return unsupported_dtype(call.x.values, _DTYPES) or too_wide(
        call.x.values.movedim(call.x.ragged_dim, 0)
    )


def _run(call: Any, kind: str) -> Any:
    x, dim = call.x, call.x.ragged_dim
    if not uses_operators(x.values):
        return _prepare(call, kind)(x)
    rows = rows_of(x.layout)
    out = _softmax_op(x.values.movedim(dim, 0), rows.offsets, rows.max_length, kind)
    return out if kind == "logsumexp" else x.with_values(out.movedim(0, dim))


def _prepare(call: Any, kind: str) -> Callable[..., Any]:
    values, dim = call.x.values, call.x.ragged_dim
    config = _launch_config(values.movedim(dim, 0), rows_of(call.x.layout), kind)
    requires_grad = values.requires_grad

    def run(x: Any) -> Any:
        values, rows = x.values.movedim(dim, 0) if dim else x.values, rows_of(x.layout)
        if requires_grad and torch.is_grad_enabled():
            out = _differentiable_softmax(values, rows, kind, config)
        else:
            out = config.run(values.contiguous(), rows)
        if kind == "logsumexp":
            return out
        return x.from_layout(out.movedim(0, dim) if dim else out, x.layout, dim)

    return run


def softmax(call: Any) -> Any:
    """Compute a `SoftmaxCall` as softmax."""
    return _run(call, "softmax")


def log_softmax(call: Any) -> Any:
    """Compute a `SoftmaxCall` as log-softmax."""
    return _run(call, "log_softmax")


def logsumexp(call: Any) -> Any:
    """Compute a `SoftmaxCall` as log-sum-exp."""
    return _run(call, "logsumexp")


def prepare_softmax(call: Any) -> Callable[..., Any]:
    """Return a function for softmax calls with the same metadata."""
    return _prepare(call, "softmax")


def prepare_log_softmax(call: Any) -> Callable[..., Any]:
    """Return a function for log-softmax calls with the same metadata."""
    return _prepare(call, "log_softmax")


def prepare_logsumexp(call: Any) -> Callable[..., Any]:
    """Return a function for log-sum-exp calls with the same metadata."""
    return _prepare(call, "logsumexp")
