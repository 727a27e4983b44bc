"""The combination of two results of attention by their log-sum-exp, in one launch."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

import scree

from ..runtime.autograd import needs_gradient
from ..runtime.compile import define_operator, uses_operators
from ..runtime.device import unsupported_dtype
from ..runtime.fallback import fallback_note, falls_back_to
from ..runtime.launch import Launch, Number, Pointer, contiguous, empty, launch_args, on_device

#: Elements of the outputs per CTA.
_BLOCK = 2048


@triton.jit(do_not_specialize=("count",))
def merge_kernel(
    OUT_A,
    LSE_A,
    OUT_B,
    LSE_B,
    OUT,
    LSE,
    count,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute OUT (count, DIM) and LSE (count,) from two of each."""
    row = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    offs_d = tl.arange(0, BLOCK_D)
    is_row = row < count
    lse_a = tl.load(LSE_A + row, mask=is_row, other=-float("inf")).to(tl.float32)
    lse_b = tl.load(LSE_B + row, mask=is_row, other=-float("inf")).to(tl.float32)
    top = tl.maximum(lse_a, lse_b)
    is_seen = top != -float("inf")
    top = tl.where(is_seen, top, 0.0)  # without any key the weights are 0 instead of NaN
    weight_a = tl.exp(lse_a - top)
    weight_b = tl.exp(lse_b - top)
    total = tl.where(is_seen, weight_a + weight_b, 1.0)
    offset = row[:, None] * DIM + offs_d[None, :]
    mask = is_row[:, None] & (offs_d < DIM)[None, :]
    # An output without keys has no influence, even if it is NaN.
    a = tl.load(OUT_A + offset, mask=mask & (weight_a != 0)[:, None], other=0.0).to(tl.float32)
    b = tl.load(OUT_B + offset, mask=mask & (weight_b != 0)[:, None], other=0.0).to(tl.float32)
    out = a * (weight_a / total)[:, None] + b * (weight_b / total)[:, None]
    tl.store(OUT + offset, out.to(OUT.dtype.element_ty), mask=mask)
    lse = tl.where(is_seen, top + tl.log(total), -float("inf"))
    tl.store(LSE + row, lse.to(LSE.dtype.element_ty), mask=is_row)


@launch_args
class MergeArgs:
    """Arguments of `merge_kernel`."""

    OUT_A: Pointer
    LSE_A: Pointer
    OUT_B: Pointer
    LSE_B: Pointer
    OUT: Pointer
    LSE: Pointer
    count: Number


@lru_cache(64)
def _launch(width: int, dtypes: tuple[torch.dtype, ...]) -> tuple[Launch, int]:
    """Return the launch for rows of a width, and the rows per CTA.

    A `Launch` has variants per alignment but not per dtype, so every pair of dtypes has its own.
    """
    block = triton.next_power_of_2(width)
    tile = max(1, _BLOCK // block)
    sizes = dict(DIM=width, BLOCK_D=block, TILE=tile)
    return Launch(merge_kernel, sizes, dict(num_warps=4), args=MergeArgs), tile


@lru_cache(1024)
def _prepare(
    device: torch.device, dtype: torch.dtype, lse_dtype: torch.dtype, shape: tuple[int, ...]
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return a function that merges contiguous outputs of a shape and their log-sum-exp."""
    *rows, width = shape
    count, new = math.prod(rows), empty(device.type)
    out_spec = *contiguous(shape), dtype
    lse_spec = *contiguous(tuple(rows)), lse_dtype
    launch, tile = _launch(max(width, 1), (dtype, lse_dtype))

    def run(
        out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = new(*out_spec), new(*lse_spec)
        if count:
            args = MergeArgs(
                OUT_A=out_a, LSE_A=lse_a, OUT_B=out_b, LSE_B=lse_b, OUT=out, LSE=lse, count=count
            )
            launch(-(-count // tile), args)
        return out, lse

    return on_device(device.index if device.type == "cuda" else None, run)


def rejects(call: Any) -> str | None:
    """Return why the kernel does not support a `MergeAttentionCall`; None if it does."""
    outputs, lses = _arrays_of(call)
    if len(outputs) != 2:
        return f"the Triton kernel merges two outputs, not {len(outputs)}"
    if reason := unsupported_dtype(outputs[0]) or unsupported_dtype(lses[0]):
        return reason
    if outputs[0].shape[-1] > _BLOCK:
        return f"the Triton kernel takes value_dim up to {_BLOCK}, not {outputs[0].shape[-1]}"
    if needs_gradient(*outputs, *lses):
        return "the Triton kernel computes no gradients"
    return None


def note(call: Any) -> str | None:
    """Return why another implementation replaces the kernel; None if none does."""
    return fallback_note(__name__, _arrays_of(call)[0][0].dtype)


def merge_attention(call: Any) -> tuple[Any, Any]:
    """Compute a `MergeAttentionCall`."""
    outputs, lses = _arrays_of(call)
    arrays = outputs[0], lses[0], outputs[1], lses[1]
    out, lse = (_op if uses_operators(*arrays) else _run_operator)(*arrays)
    if isinstance(call.outputs[0], torch.Tensor):
        return out, lse
    return call.outputs[0].with_values(out), call.lses[0].with_values(lse)


def _arrays_of(call: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    outputs, lses = (
        [x if isinstance(x, torch.Tensor) else x.values for x in arrays]
        for arrays in (call.outputs, call.lses)
    )
    return outputs, lses


def _standard(out_a, lse_a, out_b, lse_b):
    """Compute the operator without kernels; see `_run_operator`."""
    return scree.merge_attention([out_a, out_b], [lse_a, lse_b], kernel="standard")


@falls_back_to(_standard)
def _run_operator(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    run = _prepare(out_a.device, out_a.dtype, lse_a.dtype, out_a.shape)
    return run(*(x.contiguous() for x in (out_a, lse_a, out_b, lse_b)))


def _fake(out_a, lse_a, out_b, lse_b):
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


_op = define_operator("merge_attention", _run_operator, _fake)
