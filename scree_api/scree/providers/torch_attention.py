"""Attention on the CPU by PyTorch's fused kernel, with one call per row length.

A compiler cannot read the lengths. For it the same calls are in a custom operator, which
`torch.compile` and `torch.export` do not trace.
"""

from typing import Any

import torch

from ..array import Array
from ..backends.torch import BACKEND
from ..dispatch.registry import register_kernel
from ..layout import Layout, has_same_rows
from ..ops.attention import AttentionCall, empty_result


def rejects(call: AttentionCall) -> str | None:
    """Return why PyTorch's fused CPU kernel does not take the call."""
    if call.q.layout.backend is not BACKEND:
        return "the fused kernel takes torch tensors only"
    if BACKEND.is_forward_mode():
        return "the fused kernel has no derivative in forward mode"
    if call.q.values.device.type != "cpu":
        return "rows of equal length are found only on the CPU, where reading the lengths is free"
    if (
        call.q.layout.host_offsets is None and not torch.compiler.is_compiling()
    ) or not has_same_rows(call.q.layout, call.k.layout):
        return "the fused kernel needs q and k with the same rows, known on the host"
    if call.return_lse or call.softcap is not None or call.alibi_slopes is not None:
        return "the fused kernel has no softcap and no ALiBi, and gives no log-sum-exp"
    if call.dropout:
        return "the fused kernel has no seed for dropout"
    if call.window != (None, 0 if call.causal else None):
        return "the fused kernel has no window"
    if call.scale <= 0:
        return "the fused kernel multiplies the mask -inf by the scale, which must be positive"
    if call.v.values.shape[2] != call.head_dim:
        return f"the fused kernel needs value_dim {call.v.values.shape[2]} to be head_dim {call.head_dim}"
    return None


@register_kernel("attention", provider="sdpa", rejects=rejects)
def sdpa(call: AttentionCall) -> Array:
    """Call `torch.nn.functional.scaled_dot_product_attention` for the rows of each length."""
    q, k, v = (x.values for x in (call.q, call.k, call.v))
    if torch.compiler.is_compiling():
        return call.q.with_values(attend(q, k, v, call.q.offsets, call.causal, call.scale)[0])
    buckets = call.q.layout.buckets(padded=False)
    if not buckets.batches:
        return empty_result(call)
    shapes = [tokens.shape for tokens, _ in buckets.batches]
    order = torch.cat([tokens.reshape(-1) for tokens, _ in buckets.batches])

    def split_by_length(x: torch.Tensor) -> list[torch.Tensor]:
        # One selection for all lengths: the gradient of each selection has the size of `x`.
        parts = torch.index_select(x, 0, order).split([shape.numel() for shape in shapes])
        return [
            _heads_first(part.unflatten(0, shape), call.num_heads)
            for part, shape in zip(parts, shapes)
        ]

    outs = [
        _flatten_rows(
            torch.nn.functional.scaled_dot_product_attention(
                *qkv, is_causal=call.causal, scale=call.scale
            )
        )
        for qkv in zip(*map(split_by_length, (q, k, v)))
    ]
    return call.q.with_values(torch.index_select(torch.cat(outs), 0, buckets.slots).to(q.dtype))


def _heads_first(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rearrange (rows, length, kv_heads, dim) to (rows, num_heads, length, dim); repeat key heads."""
    x = x.transpose(1, 2)
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], dim=1)


def _flatten_rows(x: torch.Tensor) -> torch.Tensor:
    """Rearrange (rows, heads, length, ...) to (rows * length, heads, ...)."""
    return x.transpose(1, 2).flatten(0, 1)


# ---------------------------------------------------------------- the custom operator


def _buckets(x: torch.Tensor, offsets: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return for each length the first token of its rows, and all their tokens (rows, length)."""
    buckets = Layout(BACKEND, offsets, x.shape[0]).buckets(padded=False)
    return list(zip(buckets.first_tokens, (tokens for tokens, _ in buckets.batches)))


def _empty_like_tokens(
    x: torch.Tensor, offsets: torch.Tensor, *shape: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return an uninitialized tensor (total, *shape) for the tokens of `x`, with a tail of 0."""
    out = x.new_empty((x.shape[0], *shape), dtype=dtype)
    out[int(offsets[-1]) :] = 0
    return out


def _read_rows(x: torch.Tensor, start: int, tokens: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return the rows of one length as (rows, num_heads, length, dim)."""
    if tokens.shape[0] == 1:  # one row is contiguous
        return _heads_first(x.narrow(0, start, tokens.shape[1])[None], num_heads)
    rows = torch.index_select(x, 0, tokens.reshape(-1)).unflatten(0, tokens.shape)
    return _heads_first(rows, num_heads)


def _write_rows(out: torch.Tensor, start: int, tokens: torch.Tensor, rows: torch.Tensor) -> None:
    """Write the rows of one length, (rows, heads, length, ...), to their tokens in `out`."""
    if tokens.shape[0] == 1:
        out.narrow(0, start, tokens.shape[1]).copy_(_flatten_rows(rows))
    else:
        out.index_copy_(0, tokens.reshape(-1), _flatten_rows(rows))


@torch.library.custom_op("scree::attention", mutates_args=())
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp (total, num_heads)."""
    num_heads = q.shape[1]
    out = _empty_like_tokens(q, offsets, *q.shape[1:], dtype=q.dtype)
    lse = _empty_like_tokens(q, offsets, num_heads, dtype=_accumulation_dtype(q.dtype))
    for start, tokens in _buckets(q, offsets):
        qkv = (_read_rows(x, start, tokens, num_heads) for x in (q, k, v))
        results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *qkv, 0.0, causal, scale=scale
        )
        for x, rows in zip((out, lse), results, strict=True):
            _write_rows(x, start, tokens, rows)
    return out, lse


@attend.register_fake
def _(q: Any, k: Any, v: Any, offsets: Any, causal: bool, scale: float) -> Any:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=_accumulation_dtype(q.dtype))


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


@torch.library.custom_op("scree::attention_backward", mutates_args=())
def attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of q, k and v."""
    num_heads, kv_heads = q.shape[1], k.shape[1]
    grads = [_empty_like_tokens(q, offsets, *q.shape[1:], dtype=q.dtype) for _ in range(3)]
    for start, tokens in _buckets(q, offsets):
        inputs = (_read_rows(x, start, tokens, num_heads) for x in (grad, q, k, v, out, lse))
        results = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *inputs, 0.0, causal, scale=scale
        )
        for x, rows in zip(grads, results, strict=True):
            _write_rows(x, start, tokens, rows)
    dq, dk, dv = grads
    if num_heads != kv_heads:
        dk, dv = (x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return dq, dk, dv


@attend_backward.register_fake
def _(grad: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, offsets, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, offsets, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
    return *attend_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None, None


attend.register_autograd(_backward, setup_context=_setup_context)
