"""The gate of a feed-forward network, forward and backward: every element is read once and written once."""
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from .host import Function, differentiated, once_differentiable, refuses, start
from .launch import Launch
from .norms import even

_BLOCK = 1024  # columns of a program, or more tokens of fewer


@triton.jit(do_not_specialize=("count",))
def swiglu_kernel(X, DY, OUT, x_stride, dy_stride, count, D: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
                  BACKWARD: tl.constexpr):
    """OUT (count, D) of X (count, 2 D), gates and values; BACKWARD: OUT (count, 2 D), the gradient of X from DY (count, D)."""
    blocks = tl.cdiv(D, BLOCK)
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    token = tl.program_id(0) // blocks * TOKENS + tl.arange(0, TOKENS)
    mask = (token < count)[:, None] & (column < D)[None, :]
    token = token.to(tl.int64)[:, None]
    x = X + token * x_stride + column[None, :]
    gate = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    value = tl.load(x + D, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    if BACKWARD:
        dy = tl.load(DY + token * dy_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
        out = OUT + token * (2 * D) + column[None, :]
        dgate = dy * value * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(out, dgate.to(OUT.dtype.element_ty), mask=mask)
        tl.store(out + D, (dy * gate * sigmoid).to(OUT.dtype.element_ty), mask=mask)
    else:
        tl.store(OUT + token * D + column[None, :], (gate * sigmoid * value).to(OUT.dtype.element_ty), mask=mask)


@cache
def _launch(device: torch.device, x: torch.dtype, dy: torch.dtype | None, width: int) -> tuple[Launch, int, int]:
    """The kernel, how many programs share a token, and how many tokens a program has."""
    block = min(triton.next_power_of_2(width), _BLOCK)
    tokens = _BLOCK // block
    launch = Launch(swiglu_kernel, dict(D=width, BLOCK=block, TOKENS=tokens, BACKWARD=dy is not None), dict(num_warps=4))
    return launch, -(-width // block), tokens


def _run(x: torch.Tensor, dy: torch.Tensor | None, out: torch.Tensor) -> torch.Tensor:
    if out.numel():
        launch, blocks, tokens = _launch(x.device, x.dtype, None if dy is None else dy.dtype, x.shape[-1] // 2)
        count = x.numel() // x.shape[-1]
        x, x_stride = even(x)
        dy, dy_stride = (x, x_stride) if dy is None else even(dy)
        start(launch, -(-count // tokens) * blocks, (x, dy, out), (x_stride, dy_stride), (count,))
    return out


def forward(x: torch.Tensor) -> torch.Tensor:
    """(..., D) of x (..., 2 D)."""
    return _run(x, None, torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device))


def backward(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """The gradient of x (..., 2 D) from dy (..., D)."""
    return _run(x, dy, torch.empty(x.shape, dtype=x.dtype, device=x.device))


class _Swiglu(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return forward(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        return backward(*ctx.saved_tensors, dy)


@torch.library.custom_op("scree_triton::swiglu", mutates_args=())
def _op(x: torch.Tensor) -> torch.Tensor:
    return forward(x)


@_op.register_fake
def _(x):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.custom_op("scree_triton::swiglu_backward", mutates_args=())
def _backward_op(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return backward(x, dy)


@_backward_op.register_fake
def _(x, dy):
    return x.new_empty(x.shape)


_op.register_autograd(lambda ctx, dy: _backward_op(*ctx.saved_tensors, dy),
                      setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


def rejects(call: Any) -> str | None:
    """Why the kernel does not take a `SwigluCall`; None if it does."""
    return refuses(call.values)


def run(call: Any) -> Any:
    """Run a `SwigluCall`."""
    x = call.values
    if torch.compiler.is_compiling():
        return call.result(_op(x))
    return call.result(_Swiglu.apply(x) if differentiated(x) else forward(x))
