"""float32 as planes of bfloat16: the passes that split it, and products of matrices of its precision on Hopper's tensor cores.

A float32 number is the sum of three bfloat16 numbers, its planes. Of the nine products of two operands' planes float32 can tell
six from 0, so every product of matrices here is six of bfloat16, added up in float32, the least first. Planes of the inputs are
written by one pass over them; those of the weights are made in registers. Sums over a tile are added to the result by ordinary
additions, as the tensor cores' own round towards zero.
"""

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ..sm90.pipeline import _parts

LOG2E = tl.constexpr(1.4426950408889634)
PLANES = gl.constexpr(3)
PRODUCTS = gl.constexpr(6)


@triton.jit
def _store_planes(SPLIT, x, i, d, inside, DIM: tl.constexpr):
    out = SPLIT + (i * (PLANES * DIM))[:, None] + d[None, :]
    for p in tl.static_range(PLANES):
        y = x.to(tl.bfloat16)
        tl.store(out + p * DIM, y, mask=inside)
        x -= y.to(tl.float32)


@triton.jit(do_not_specialize=("total", "heads"))
def split_kernel(X, SPLIT, stride, head, total, heads, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """SPLIT (total, heads, PLANES, DIM) bfloat16, whose sum over the planes is X (total, heads, DIM)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DIM)
    t = i // heads
    inside = (t < total)[:, None]
    x = tl.load(X + (t * stride + i % heads * head)[:, None] + d[None, :], mask=inside, other=0.0)
    _store_planes(SPLIT, x, i, d, inside, DIM)


@triton.jit(do_not_specialize=("dlse_stride", "dlse_head", "total", "plane", "heads"))
def split_dout_kernel(
    OUT,
    DO,
    LSE,
    DLSE,
    STATS,
    SPLIT,
    do_stride,
    do_head,
    dlse_stride,
    dlse_head,
    total,
    plane,
    heads,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """The planes of DO, and STATS (2, heads, total): the LSE in base 2, and delta, the sum of OUT * DO less DLSE."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    d = tl.arange(0, DIM)
    t = i // heads
    h = i % heads
    one = t < total
    inside = one[:, None]
    x = tl.load(DO + (t * do_stride + h * do_head)[:, None] + d[None, :], mask=inside, other=0.0)
    delta = tl.sum(x * tl.load(OUT + (i * DIM)[:, None] + d[None, :], mask=inside, other=0.0), 1)
    if HAS_DLSE:
        delta -= tl.load(DLSE + t * dlse_stride + h * dlse_head, mask=one, other=0.0)
    place = h * total + t
    tl.store(STATS + place, tl.load(LSE + place, mask=one, other=0.0) * LOG2E, mask=one)
    tl.store(STATS + plane + place, delta, mask=one)
    _store_planes(SPLIT, x, i, d, inside, DIM)


@gluon.jit
def _widen(x):
    """float32 of bfloat16, two at a time; an ordinary cast goes one by one through a slow pipe."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], gl.float32, True, 2
    )


@gluon.jit
def _split(x, LAYOUT: gl.constexpr):
    """The planes of x, as left operands."""
    a = x.to(gl.bfloat16)
    x = x - _widen(a)
    b = x.to(gl.bfloat16)
    c = (x - _widen(b)).to(gl.bfloat16)
    return gl.convert_layout(a, LAYOUT), gl.convert_layout(b, LAYOUT), gl.convert_layout(c, LAYOUT)


@gluon.jit
def _product(a, ring, slot, LAYOUT: gl.constexpr, TURNED: gl.constexpr):
    """Start a @ b, or a @ b^T if TURNED, with the planes of b in a slot of a ring: PRODUCTS of bfloat16."""
    ROWS: gl.constexpr = a[0].shape[0]
    COLUMNS: gl.constexpr = LAYOUT.instr_shape[1]
    b0, b1, b2 = _parts(ring, slot, PLANES)
    if TURNED:
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
def _plus_product(y, x, ring, slot, LAYOUT: gl.constexpr):
    """Add x @ b to y, with the planes of b in a slot of a ring."""
    a = _split(x, gl.DotOperandLayout(0, LAYOUT, 2))
    return y + warpgroup_mma_wait(0, deps=(_product(a, ring, slot, LAYOUT, False),) + a)[0]
