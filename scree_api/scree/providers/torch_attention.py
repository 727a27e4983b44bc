"""Attention on the CPU by PyTorch's fused kernel, for all rows of equal length at a time.

A compiler cannot read the lengths. There the same calls are inside an operator of their own, which
`torch.compile` and `torch.export` treat as one step.
"""

from typing import Any

import torch

from ..array import Array
from ..backends.torch import BACKEND
from ..dispatch.registry import register_kernel
from ..layout import Layout, has_same_rows
from ..ops.attention import AttentionCall


def rejects(call: AttentionCall) -> str | None:
    """Return why PyTorch's fused CPU kernel does not take the call."""
    if call.q.layout.backend is not BACKEND:
        return "the fused kernel takes torch tensors only"
    if call.q.values.device.type != "cpu":
        return "rows of equal length are found only on the CPU, where reading the lengths is free"
    if (
        call.q.layout.host_offsets is None and not torch.compiler.is_compiling()
    ) or not has_same_rows(call.q.layout, call.k.layout):
        return "the fused kernel needs q and k with the same rows, known on the host"
    if call.return_lse or call.softcap is not None or call.alibi_slopes is not None:
        return "the fused kernel has no softcap and no ALiBi, and gives no log-sum-exp"
    if call.window != (None, 0 if call.causal else None):
        return "the fused kernel has no window"
    if call.v.values.shape[2] != call.head_dim:
        return f"the fused kernel needs value_dim {call.v.values.shape[2]} to be head_dim {call.head_dim}"
    return None


@register_kernel("attention", provider="sdpa", rejects=rejects)
def sdpa(call: AttentionCall) -> Array:
    """Call `torch.nn.functional.scaled_dot_product_attention` for the rows of each length."""
    q, k, v = (x.values for x in (call.q, call.k, call.v))
    if torch.compiler.is_compiling():
        return call.q.with_values(attend(q, k, v, call.q.offsets, call.causal, call.scale)[0])
    plan = call.q.layout.buckets(padded=False)
    if not plan.batches:
        return call.q
    shapes = [tokens.shape for tokens, _ in plan.batches]
    order = torch.cat([tokens.reshape(-1) for tokens, _ in plan.batches])

    def split_by_length(
        x: torch.Tensor,
    ) -> list[torch.Tensor]:  # at once: a selection has a gradient as long as all rows
        parts = torch.index_select(x, 0, order).split([shape.numel() for shape in shapes])
        return [
            _heads(part.unflatten(0, shape), call.num_heads) for part, shape in zip(parts, shapes)
        ]

    outs = [
        _tokens(
            torch.nn.functional.scaled_dot_product_attention(
                *part, is_causal=call.causal, scale=call.scale
            )
        )
        for part in zip(*map(split_by_length, (q, k, v)))
    ]
    return call.q.with_values(torch.index_select(torch.cat(outs), 0, plan.slots).to(q.dtype))


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return (rows, heads, length, dim) from (rows, length, kv_heads, dim).

    Heads of keys are repeated for their queries.
    """
    x = x.transpose(1, 2)
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _rows(x: torch.Tensor, start: int, tokens: torch.Tensor, heads: int) -> torch.Tensor:
    """(rows, heads, length, dim) of the rows of one length."""
    if tokens.shape[0] == 1:  # one row is contiguous
        return _heads(x.narrow(0, start, tokens.shape[1])[None], heads)
    return _heads(torch.index_select(x, 0, tokens.reshape(-1)).unflatten(0, tokens.shape), heads)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """(rows, heads, length, ...) -> (rows * length, heads, ...)."""
    return x.transpose(1, 2).flatten(0, 1)


# ------------------------------------------------------------------------------------ as one step
# of a compiled function
def _parts(x: torch.Tensor, offsets: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
    """Return per length the first token and all tokens (rows, length) of its rows."""
    plan = Layout(BACKEND, offsets, x.shape[0]).buckets(padded=False)
    return list(zip(plan.first_tokens, (tokens for tokens, _ in plan.batches)))


def _empty_rows(
    x: torch.Tensor, offsets: torch.Tensor, *shape: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return a buffer for every row of `x`, with a tail of 0."""
    out = x.new_empty((x.shape[0], *shape), dtype=dtype)
    out[int(offsets[-1]) :] = 0
    return out


def _write_rows(out: torch.Tensor, start: int, tokens: torch.Tensor, result: torch.Tensor) -> None:
    """Write the result of one bucket, (rows, heads, length, ...), to its tokens."""
    if tokens.shape[0] == 1:
        out.narrow(0, start, tokens.shape[1]).copy_(_tokens(result))
    else:
        out.index_copy_(0, tokens.reshape(-1), _tokens(result))


@torch.library.custom_op("scree::attention", mutates_args=())
def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output, and log-sum-exp (total, num_heads)."""
    out, sums = (
        _empty_rows(q, offsets, *shape, dtype=t)
        for shape, t in ((q.shape[1:], q.dtype), (q.shape[1:2], _wide(q.dtype)))
    )
    for start, tokens in _parts(q, offsets):
        part, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *(_rows(x, start, tokens, q.shape[1]) for x in (q, k, v)), 0.0, causal, scale=scale
        )
        _write_rows(out, start, tokens, part)
        _write_rows(sums, start, tokens, lse)
    return out, sums


@attend.register_fake
def _(q: Any, k: Any, v: Any, offsets: Any, causal: bool, scale: float) -> Any:
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=_wide(q.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
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
    """Gradients of q, k and v."""
    heads = q.shape[1]
    grads = [_empty_rows(q, offsets, *q.shape[1:], dtype=q.dtype) for _ in range(3)]
    for start, tokens in _parts(q, offsets):
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(_rows(x, start, tokens, heads) for x in (grad, q, k, v, out, lse)),
            0.0,
            causal,
            scale=scale,
        )
        for whole, x in zip(grads, parts, strict=True):
            _write_rows(whole, start, tokens, x)
    dq, dk, dv = grads
    return dq, *(
        x.unflatten(1, (k.shape[1], -1)).sum(2) if heads != k.shape[1] else x for x in (dk, dv)
    )


@attend_backward.register_fake
def _(grad: Any, q: Any, k: Any, v: Any, *rest: Any) -> Any:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, offsets, ctx.causal, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, offsets, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
    return *attend_backward(grad, *ctx.saved_tensors, ctx.causal, ctx.scale), None, None, None


attend.register_autograd(_differentiate, setup_context=_keep)
