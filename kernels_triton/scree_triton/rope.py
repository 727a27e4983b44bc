"""Rotary position embedding of the rows of a ragged array, forward and backward: the same kernel, turned the other way.

A program turns a few tokens, all heads of each, of the queries and of the keys; the angles of a token are computed once for
all of them. The row of a token is found by bisection, so that positions restart in each row without an array of positions.
"""
import math
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .host import Function, differentiated, once_differentiable, refuses, start
from .launch import Launch
from .offsets import row_of

_ELEMENTS = 8192  # elements that a program turns at a time
_TOKENS = 4  # of a program


@triton.jit
def _turn(X, OUT, tokens, total, x_stride, x_head, heads, pair, cos, sin, DIM: tl.constexpr, HALF: tl.constexpr,
          HEADS: tl.constexpr, TOKENS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """All heads of some tokens by angles (TOKENS, 1, HALF)."""
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


@triton.jit(do_not_specialize=("n", "total", "bisections", "q_heads", "k_heads", "sign"))
def rope_kernel(Q, K, Q_OUT, K_OUT, OFFSETS, START, q_stride, q_head, k_stride, k_head, n, total, bisections, q_heads, k_heads,
                sign, DIM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, RATE: tl.constexpr,
                INTERLEAVED: tl.constexpr, HAS_START: tl.constexpr):
    """Q_OUT (total, q_heads, DIM): pair i of the token at position p turned by ``sign * p * exp(-RATE * i)``; K the same."""
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    row = row_of(OFFSETS, tokens, n - 1, bisections)  # the last one for tokens behind it
    position = tokens - tl.load(OFFSETS + row)
    if HAS_START:
        position += tl.load(START + row)
    pair = tl.arange(0, HALF)
    # The rates in float64: an angle is thousands of turns, and its error that of the rate.
    angle = (position * sign).to(tl.float32)[:, None] * tl.exp(pair.to(tl.float64) * -RATE).to(tl.float32)[None, :]
    cos = tl.cos(angle)[:, None, :]
    sin = tl.sin(angle)[:, None, :]
    _turn(Q, Q_OUT, tokens, total, q_stride, q_head, q_heads, pair, cos, sin, DIM, HALF, HEADS, TOKENS, INTERLEAVED)
    _turn(K, K_OUT, tokens, total, k_stride, k_head, k_heads, pair, cos, sin, DIM, HALF, HEADS, TOKENS, INTERLEAVED)


@cache
def _launch(device: torch.device, x: torch.dtype, offsets: torch.dtype, start_dtype: torch.dtype | None, heads: int, dim: int,
            rate: float, interleaved: bool) -> Launch:
    half = triton.next_power_of_2(dim // 2)
    at_once = min(triton.next_power_of_2(heads), max(1, _ELEMENTS // (2 * half * _TOKENS)))
    return Launch(rope_kernel, dict(DIM=dim, HALF=half, HEADS=at_once, TOKENS=_TOKENS, RATE=rate, INTERLEAVED=interleaved,
                                    HAS_START=start_dtype is not None), dict(num_warps=4))


class Turn(NamedTuple):
    """How to turn: the rows, the position of the first token of each or None, the rate of the angles, and which are pairs."""

    offsets: torch.Tensor
    start: torch.Tensor | None
    rate: float
    interleaved: bool


def turn(q: torch.Tensor, k: torch.Tensor | None, how: Turn, sign: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Turn q and k, (total, ..., dim), by `sign` times the angles that grow with the position; contiguous."""
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_out = None if k is None else torch.empty_like(k, memory_format=torch.contiguous_format)
    q, (q_heads, dim, *q_strides) = _heads(q)
    k, (k_heads, _, *k_strides) = (q, (0, 0, *q_strides)) if k is None else _heads(k)
    total, n = q.shape[0], how.offsets.shape[0] - 1
    if total and q_heads + k_heads:
        launch = _launch(q.device, q.dtype, how.offsets.dtype, None if how.start is None else how.start.dtype,
                         max(q_heads, k_heads), dim, how.rate, how.interleaved)
        start(launch, -(-total // _TOKENS),
              (q, k, q_out, q_out if k_out is None else k_out, how.offsets, how.offsets if how.start is None else how.start),
              (*q_strides, *k_strides), (n, total, n.bit_length(), q_heads, k_heads, sign))
    return q_out, k_out


def _heads(x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, int, int, int]]:
    """Values as (total, heads, dim) with the elements of a head side by side; heads, dim, and the strides of tokens and heads."""
    if x.ndim != 3:
        x = x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1])
    if x.stride(2) != 1:
        x = x.contiguous()
    return x, (*x.shape[1:], *x.stride()[:2])


class _Rope(Function):
    @staticmethod
    def forward(ctx, q, k, how):
        ctx.how = how
        ctx.set_materialize_grads(False)
        q, k = turn(q, k, how, 1)
        return q if k is None else (q, k)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk=None):
        if dq is None:
            return None, None if dk is None else turn(dk, None, ctx.how, -1)[0], None
        return *turn(dq, dk, ctx.how, -1), None


@torch.library.custom_op("scree_triton::rope", mutates_args=())
def _op(q: torch.Tensor, k: torch.Tensor | None, offsets: torch.Tensor, start: torch.Tensor | None, rate: float,
        interleaved: bool, sign: int) -> list[torch.Tensor]:
    return [x for x in turn(q, k, Turn(offsets, start, rate, interleaved), sign) if x is not None]


@_op.register_fake
def _(q, k, offsets, start, rate, interleaved, sign):
    return [x.new_empty(x.shape) for x in (q, k) if x is not None]


def _save(ctx, inputs, output):
    _, k, offsets, start, *ctx.how, ctx.sign = inputs
    ctx.both = k is not None
    ctx.save_for_backward(offsets, start)


def _differentiate(ctx, grads):
    dq, *dk = _op(grads[0], grads[1] if ctx.both else None, *ctx.saved_tensors, *ctx.how, -ctx.sign)
    return dq, dk[0] if dk else None, *(None,) * 5


_op.register_autograd(_differentiate, setup_context=_save)


def rejects(call: Any) -> str | None:
    """Why the kernel does not take a `RopeCall`; None if it does."""
    dim = call.x.values.shape[-1]
    if not 2 <= dim <= 1024:
        return f"the Triton kernels take a head_dim of 2 to 1024, not {dim}"
    return refuses(call.x.values)


def run(call: Any) -> Any:
    """Run a `RopeCall`."""
    return run_again(call)(call.x, call.k, call.start)


def run_again(call: Any) -> Callable[..., Any]:
    """What runs calls that differ from this one in the contents of their arrays alone."""
    rate, interleaved = math.log(call.theta) * 2 / call.x.values.shape[-1], call.interleaved

    def rotate(x: Any, k: Any, start: torch.Tensor | None) -> Any:
        how = Turn(x.offsets.contiguous(), None if start is None else start.contiguous(), rate, interleaved)
        q_out, k_out = _both(x.values, None if k is None else k.values, how)
        return x.with_values(q_out) if k is None else (x.with_values(q_out), k.with_values(k_out))

    return rotate


def _both(q: torch.Tensor, k: torch.Tensor | None, how: Turn) -> Any:
    if torch.compiler.is_compiling():
        q, *more = _op(q, k, *how, 1)
        return q, more[0] if more else None
    if differentiated(q, k):
        found = _Rope.apply(q, k, how)
        return (found, None) if k is None else found
    return turn(q, k, how, 1)
