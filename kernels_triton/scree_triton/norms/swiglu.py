"""SwiGLU, forward and backward; the kernel reads and writes every element once."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

import scree

from ..runtime.autograd import differentiable, needs_gradient
from ..runtime.compile import define_operator, uses_operators
from ..runtime.device import unsupported_dtype
from ..runtime.fallback import falls_back_to, gradients
from ..runtime.launch import (
    Launch,
    Number,
    Pointer,
    Stride,
    Written,
    contiguous,
    empty,
    launch_args,
    method_on_device,
)
from .norms import as_token_matrix

#: Elements per CTA: columns, or several tokens if there are fewer columns.
_BLOCK = 1024


@triton.jit(do_not_specialize=("count",))
def swiglu_kernel(
    X,
    DY,
    OUT,
    x_stride,
    dy_stride,
    count,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """Compute OUT (count, D) from X (count, 2 D), gates followed by values.

    With BACKWARD, OUT (count, 2 D) is the gradient of X, from DY (count, D).
    """
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
        tl.store(
            OUT + token * D + column[None, :],
            (gate * sigmoid * value).to(OUT.dtype.element_ty),
            mask=mask,
        )


@launch_args
class SwigluArgs:
    """Arguments of `swiglu_kernel`."""

    X: Pointer
    DY: Pointer
    OUT: Written
    x_stride: Stride
    dy_stride: Stride
    count: Number


@cache
def _launch(
    device: torch.device, x: torch.dtype, dy: torch.dtype | None, width: int
) -> tuple[Launch, int, int]:
    """Return the launch, the CTAs per token, and the tokens per CTA."""
    block = min(triton.next_power_of_2(width), _BLOCK)
    tokens = _BLOCK // block
    launch = Launch(
        swiglu_kernel,
        dict(D=width, BLOCK=block, TOKENS=tokens, BACKWARD=dy is not None),
        dict(num_warps=4),
        args=SwigluArgs,
    )
    return launch, -(-width // block), tokens


@dataclass
class _LaunchConfig:
    """Everything that the metadata of x (..., 2 D) and dy (..., D) determines."""

    index: int | None  # index of the CUDA device
    new: Callable[..., torch.Tensor]
    out: tuple[tuple[int, ...], tuple[int, ...], torch.dtype]
    launch: Launch
    programs: int
    count: int

    @method_on_device
    def run(self, x: torch.Tensor, dy: torch.Tensor | None = None) -> torch.Tensor:
        """Return the result (..., D) for x, or with dy the gradient of x."""
        out = self.new(*self.out)
        if self.programs:
            x, x_stride = as_token_matrix(x)
            dy, dy_stride = (x, x_stride) if dy is None else as_token_matrix(dy)
            args = SwigluArgs(
                X=x, DY=dy, OUT=out, x_stride=x_stride, dy_stride=dy_stride, count=self.count
            )
            self.launch(self.programs, args)
        return out


@lru_cache(1024)
def _launch_config(
    device: torch.device, x: torch.dtype, dy: torch.dtype | None, shape: tuple[int, ...]
) -> _LaunchConfig:
    *axes, input_width = shape
    width, count = input_width // 2, math.prod(axes)
    index = device.index if device.type == "cuda" else None
    out = *contiguous((*axes, width) if dy is None else shape), x
    launch, blocks, tokens = _launch(device, x, dy, max(width, 1))
    return _LaunchConfig(
        index, empty(device.type), out, launch, -(-count // tokens) * blocks if width else 0, count
    )


def forward(x: torch.Tensor) -> torch.Tensor:
    """Return the result (..., D) for x (..., 2 D)."""
    return _launch_config(x.device, x.dtype, None, x.shape).run(x)


def _standard(x: torch.Tensor) -> torch.Tensor:
    return scree.swiglu(x, kernel="standard")


@falls_back_to(lambda x, dy: gradients(_standard, (x,), dy)[0])
def backward(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Return the gradient of x (..., 2 D) from dy (..., D)."""
    return _launch_config(x.device, x.dtype, dy.dtype, x.shape).run(x, dy)


def _record_swiglu(ctx, x, config):
    ctx.save_for_backward(x)
    return config.run(x)


def _swiglu_gradient(ctx, dy):
    return backward(*ctx.saved_tensors, dy), None


_differentiable_swiglu = differentiable("Swiglu", _record_swiglu, _swiglu_gradient)


@falls_back_to(_standard)
def _run_operator(x: torch.Tensor) -> torch.Tensor:
    return forward(x)


def _fake(x):
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _backward_operator(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return backward(x, dy)


def _backward_fake(x, dy):
    return x.new_empty(x.shape)


_backward_op = define_operator("swiglu_backward", _backward_operator, _backward_fake)


_op = define_operator(
    "swiglu",
    _run_operator,
    _fake,
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    backward=lambda ctx, dy: (_backward_op(*ctx.saved_tensors, dy),),
)


def rejects(call: Any) -> str | None:
    """Return why the kernel does not support a `SwigluCall`; None if it does."""
    return unsupported_dtype(call.values)


def swiglu(call: Any) -> Any:
    """Compute a `SwigluCall`."""
    x = call.values
    if uses_operators(x):
        return call.result(_op(x))
    return call.result(
        _differentiable_swiglu(x, _launch_config(x.device, x.dtype, None, x.shape))
        if needs_gradient(x)
        else forward(x)
    )


def prepare_swiglu(call: Any) -> Callable[..., Any]:
    """Return a function for calls on ragged arrays with the same metadata."""
    x = call.values
    config, needs_grad = _launch_config(x.device, x.dtype, None, x.shape), x.requires_grad

    def gate(x: Any) -> Any:
        out = (
            _differentiable_swiglu(x.values, config)
            if needs_grad and torch.is_grad_enabled()
            else config.run(x.values)
        )
        return x.from_layout(out, x.layout, x.ragged_dim)

    return gate
