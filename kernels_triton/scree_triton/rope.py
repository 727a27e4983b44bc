"""Rotary position embedding of the rows of a ragged array, forward and backward: the same kernel, turned the other way.

A program turns a few tokens, all heads of each; the angles of a token are computed once for all its heads. The row of a
token is found by bisection, so that positions restart in each row without an array of positions. Queries and keys that
are slices of one tensor (total, heads, head_dim) are turned by one launch on both.
"""
import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from .host import refuses, start
from .launch import Launch

_ELEMENTS = 4096  # elements that a program turns at a time
_TOKENS = 8  # of a program


@triton.jit(do_not_specialize=("n", "total", "bisections", "heads", "sign"))
def rope_kernel(X, OUT, OFFSETS, START, x_stride, x_head, n, total, bisections, heads, sign, DIM: tl.constexpr,
                HALF: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, RATE: tl.constexpr,
                INTERLEAVED: tl.constexpr, HAS_START: tl.constexpr):
    """OUT (total, heads, DIM): pair i of the token at position p turned by ``sign * p * exp(-RATE * i)``."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    low = tl.zeros([TOKENS], tl.int32)
    high = tl.zeros([TOKENS], tl.int32) + n
    for _ in range(bisections):
        middle = (low + high) // 2
        inside = tl.load(OFFSETS + middle) <= tokens
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle)
    position = tokens - tl.load(OFFSETS + low)
    if HAS_START:
        position += tl.load(START + low)
    pair = tl.arange(0, HALF)
    # The rates in float64: an angle is thousands of turns, and its error that of the rate.
    angle = (position * sign).to(tl.float32)[:, None] * tl.exp(pair.to(tl.float64) * -RATE).to(tl.float32)[None, :]
    cos = tl.cos(angle)[:, None, :]
    sin = tl.sin(angle)[:, None, :]
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)
        mask = (tokens < total)[:, None] & (head < heads)[None, :]
        x = X + (tokens[:, None] * x_stride + head[None, :] * x_head)[:, :, None]
        out = OUT + (tokens[:, None] * (heads * DIM) + head[None, :] * DIM)[:, :, None]
        if INTERLEAVED:
            both = tl.arange(0, 2 * HALF)[None, None, :]
            inside = mask[:, :, None] & (both < DIM)
            a, b = tl.split(tl.reshape(tl.load(x + both, mask=inside, other=0.0).to(tl.float32), [TOKENS, HEADS, HALF, 2]))
            y = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), [TOKENS, HEADS, 2 * HALF])
            tl.store(out + both, y.to(OUT.dtype.element_ty), mask=inside)
        else:
            each = pair[None, None, :]
            inside = mask[:, :, None] & (each < DIM // 2)
            a = tl.load(x + each, mask=inside, other=0.0).to(tl.float32)
            b = tl.load(x + DIM // 2 + each, mask=inside, other=0.0).to(tl.float32)
            tl.store(out + each, (a * cos - b * sin).to(OUT.dtype.element_ty), mask=inside)
            tl.store(out + DIM // 2 + each, (b * cos + a * sin).to(OUT.dtype.element_ty), mask=inside)


@cache
def _launch(device: torch.device, x: torch.dtype, offsets: torch.dtype, start_dtype: torch.dtype | None, heads: int, dim: int,
            rate: float, interleaved: bool) -> Launch:
    half = triton.next_power_of_2(dim // 2)
    at_once = min(triton.next_power_of_2(heads), max(1, _ELEMENTS // (2 * half * _TOKENS)))
    return Launch(rope_kernel, dict(DIM=dim, HALF=half, HEADS=at_once, TOKENS=_TOKENS, RATE=rate, INTERLEAVED=interleaved,
                                    HAS_START=start_dtype is not None), dict(num_warps=4))


def turn(x: torch.Tensor, offsets: torch.Tensor, first: torch.Tensor | None, rate: float, interleaved: bool,
         sign: int) -> torch.Tensor:
    """Turn x, (total, heads, dim), by `sign` times the angles that grow with the position; contiguous."""
    if x.stride(2) != 1:
        x = x.contiguous()
    total, heads, dim = x.shape
    out = torch.empty((total, heads, dim), dtype=x.dtype, device=x.device)
    if out.numel():
        n = offsets.shape[0] - 1
        kind = x.device, x.dtype, offsets.dtype, None if first is None else first.dtype
        launch = _launch(*kind, heads, dim, rate, interleaved)
        start(launch, -(-total // _TOKENS), (x, out, offsets, offsets if first is None else first), x.stride()[:2],
              (n, total, n.bit_length(), heads, sign))
    return out


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *args):
        ctx.args = args
        return turn(x, *args, 1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        return turn(dy, *ctx.args, -1), None, None, None, None


@torch.library.custom_op("scree_triton::rope", mutates_args=())
def _op(x: torch.Tensor, offsets: torch.Tensor, start: torch.Tensor | None, rate: float, interleaved: bool,
        sign: int) -> torch.Tensor:
    return turn(x, offsets, start, rate, interleaved, sign)


@_op.register_fake
def _(x, offsets, start, rate, interleaved, sign):
    return x.new_empty(x.shape)


def _save(ctx, inputs, output):
    _, offsets, start, *ctx.how, ctx.sign = inputs
    ctx.save_for_backward(offsets, start)


_op.register_autograd(lambda ctx, dy: (_op(dy, *ctx.saved_tensors, *ctx.how, -ctx.sign), *(None,) * 5), setup_context=_save)


def rejects(call: Any) -> str | None:
    """Why the kernel does not take a `RopeCall`; None if it does."""
    dim = call.x.values.shape[-1]
    if not 2 <= dim <= 1024:
        return f"the Triton kernels take a head_dim of 2 to 1024, not {dim}"
    return refuses(call.x.values)


def run(call: Any) -> Any:
    """Run a `RopeCall`."""
    values = call.x.values
    x = values.reshape(values.shape[0], math.prod(values.shape[1:-1]), values.shape[-1])
    first = None if call.start is None else call.start.contiguous()
    args = call.x.offsets.contiguous(), first, math.log(call.theta) * 2 / x.shape[2], call.interleaved
    if torch.compiler.is_compiling():
        out = _op(x, *args, 1)
    elif x.requires_grad and torch.is_grad_enabled():
        out = _Rope.apply(x, *args)
    else:
        out = turn(x, *args, 1)
    return call.x.with_values(out.view(values.shape))
