"""float32 matrix products on Hopper's tensor cores, as six bfloat16 products (bf16x3 split).

A float32 number is the sum of three bfloat16 numbers, its terms. Of the nine products of two
operands' terms, float32 can distinguish six from 0. So every matrix product here is six bfloat16
products, added up in float32 from the smallest to the largest.

One pass over the inputs writes their terms; the terms of the weights are made in registers.
Ordinary additions add the sums over a tile to the result, because the tensor cores' own additions
round towards zero.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ..sm90.pipeline import slot_parts
from .constants import LOG2E

TERMS = gl.constexpr(3)
PRODUCTS = gl.constexpr(6)


@triton.jit
def _store_terms(SPLIT, x, i, offs_d, mask, HEAD_DIM: tl.constexpr):
    out = SPLIT + (i * (TERMS * HEAD_DIM))[:, None] + offs_d[None, :]
    for p in tl.static_range(TERMS):
        y = x.to(tl.bfloat16)
        tl.store(out + p * HEAD_DIM, y, mask=mask)
        x -= y.to(tl.float32)


@triton.jit(do_not_specialize=("total", "heads"))
def attention_split_kernel(
    X, SPLIT, stride_xt, stride_xh, total, heads, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Write SPLIT (total, heads, TERMS, HEAD_DIM) bfloat16: its sum over the terms is X."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, HEAD_DIM)
    offs_t = i // heads
    mask = (offs_t < total)[:, None]
    x = tl.load(
        X + (offs_t * stride_xt + i % heads * stride_xh)[:, None] + offs_d[None, :],
        mask=mask,
        other=0.0,
    )
    _store_terms(SPLIT, x, i, offs_d, mask, HEAD_DIM)


@triton.jit(do_not_specialize=("stride_dlsem", "stride_dlseh", "total_q", "stats_stride", "heads"))
def attention_split_dout_kernel(
    OUT,
    DO,
    LSE,
    DLSE,
    STATS,
    SPLIT,
    stride_dom,
    stride_doh,
    stride_dlsem,
    stride_dlseh,
    total_q,
    stats_stride,
    heads,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """Write the terms of DO, and STATS (2, heads, total_q).

    STATS holds the log-sum-exp in base 2 and delta = sum(OUT * DO) - DLSE.
    """
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    offs_d = tl.arange(0, HEAD_DIM)
    offs_m = i // heads
    head = i % heads
    mask_m = offs_m < total_q
    mask = mask_m[:, None]
    x = tl.load(
        DO + (offs_m * stride_dom + head * stride_doh)[:, None] + offs_d[None, :],
        mask=mask,
        other=0.0,
    )
    delta = tl.sum(
        x * tl.load(OUT + (i * HEAD_DIM)[:, None] + offs_d[None, :], mask=mask, other=0.0), 1
    )
    if HAS_DLSE:
        delta -= tl.load(DLSE + offs_m * stride_dlsem + head * stride_dlseh, mask=mask_m, other=0.0)
    offset = head * total_q + offs_m
    tl.store(STATS + offset, tl.load(LSE + offset, mask=mask_m, other=0.0) * LOG2E, mask=mask_m)
    tl.store(STATS + stats_stride + offset, delta, mask=mask_m)
    _store_terms(SPLIT, x, i, offs_d, mask, HEAD_DIM)


@gluon.jit
def _widen(x):
    """Convert bfloat16 to float32, two at a time; a plain cast converts singly in a slow pipe."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], gl.float32, True, 2
    )


@gluon.jit
def split_bf16x3(x, LAYOUT: gl.constexpr):
    """Return the terms of x, as left operands."""
    a = x.to(gl.bfloat16)
    x = x - _widen(a)
    b = x.to(gl.bfloat16)
    c = (x - _widen(b)).to(gl.bfloat16)
    return gl.convert_layout(a, LAYOUT), gl.convert_layout(b, LAYOUT), gl.convert_layout(c, LAYOUT)


@gluon.jit
def start_mma_bf16x3(a, ring, slot, LAYOUT: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Start a @ b, or a @ b^T if TRANSPOSED, with the terms of b in a slot of a ring."""
    ROWS: gl.constexpr = a[0].shape[0]
    COLUMNS: gl.constexpr = LAYOUT.instr_shape[1]
    b0, b1, b2 = slot_parts(ring, slot, TERMS)
    if TRANSPOSED:
        b0 = b0.permute((1, 0))
        b1 = b1.permute((1, 0))
        b2 = b2.permute((1, 0))
    x = warpgroup_mma(
        a[0], b2, gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT), use_acc=False, is_async=True
    )
    x = warpgroup_mma(a[2], b0, x, is_async=True)
    x = warpgroup_mma(a[1], b1, x, is_async=True)
    x = warpgroup_mma(a[0], b1, x, is_async=True)
    x = warpgroup_mma(a[1], b0, x, is_async=True)
    return warpgroup_mma(a[0], b0, x, is_async=True)


@gluon.jit
def add_mma_bf16x3(acc, x, ring, slot, LAYOUT: gl.constexpr):
    """Add x @ b to acc, with the terms of b in a slot of a ring."""
    a = split_bf16x3(x, gl.DotOperandLayout(0, LAYOUT, 2))
    return (
        acc + warpgroup_mma_wait(0, deps=(start_mma_bf16x3(a, ring, slot, LAYOUT, False),) + a)[0]
    )
