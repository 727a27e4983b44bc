"""Long rows of single numbers on Hopper, in Gluon: reduce each row and map the result over its
tokens.

A row belongs to a cluster of eight CTAs, which hold its tokens in registers: tokens are read once
and written once. Each CTA reduces its part of the row and writes the result to memory for the
others, which wait at the hardware barrier of the cluster. Tokens that do not fit into registers, in
longer rows, are read again from the cache.
"""

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..runtime.launch import Launch, Number, Pointer, launch_args
from ..sm90.pipeline import pdl_launch_dependents
from .merge_path import DOT, EQUAL, LSE, SUM_Y, combine, fast_exp, finite_or_zero, map_values

PROGRAMS = 8  # of a cluster
_TOKENS = 16  # that a thread holds
_MOST_TOKENS = 1 << 13  # that a program holds
_REGISTERS = 40  # of a thread, so that three of the largest programs run at once
_ALIGNED = gl.constexpr(32)  # where a program begins, in tokens


@gluon.constexpr_function
def _layout(K, THREADS, WARPS):
    """The first dimension goes over the programs of a cluster, the second over THREADS of a warp
    and WARPS warps.
    """
    return gl.BlockedLayout(
        [1, 1],
        [32 // THREADS, THREADS],
        [1, WARPS],
        [1, 0],
        [[1 << i, 0] for i in range(K.bit_length() - 1)],
    )


@gluon.constexpr_function
def _threads(K, WARPS):
    return gl.BlockedLayout([1], [32], [WARPS], [0], [[0] for _ in range(K.bit_length() - 1)])


@gluon.jit
def _meet(K: gl.constexpr, WARPS: gl.constexpr):
    """Wait for the other programs of the cluster, and see what they have written."""
    thread = gl.arange(0, 32 * WARPS, _threads(K, WARPS))
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.b32 $0, $1;",
        "=r,r",
        [thread],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def _read(X, Y, at, r, start, stop, OP: gl.constexpr, READS: gl.constexpr):
    """The tokens at + r of a tile, (K, R), as what changes no result where they are not in [start,
    stop); and which are.
    """
    valid = (r >= gl.maximum(start - at, 0).to(gl.int32)) & (
        r < gl.minimum(stop - at, r.shape[1]).to(gl.int32)
    )
    x = gl.load((X + at) + r, mask=valid, other=-float("inf") if OP == LSE else 0).to(gl.float32)
    y = x
    if READS == 2:
        y = gl.load((Y + at) + r, mask=valid, other=0).to(gl.float32)
    return x, y, valid


@gluon.jit
def reduce_tokens(x, y, a, valid, OP: gl.constexpr):
    """Reduce the tokens (K, R) of each CTA to (K,)."""
    if OP == LSE:
        u = gl.max(x, 1)
        v = gl.sum(fast_exp(x - finite_or_zero(u)[:, None]), 1)
    else:
        if OP == DOT:
            x = x * y
        elif OP == SUM_Y:
            x = y
        else:
            gl.static_assert(OP == EQUAL)
            x = (valid & (x == a)).to(gl.float32)
        u = gl.sum(x, 1)
        v = u
    return u, v


@gluon.jit
def _write(OUT, x, y, u, v, a, b, at, r, valid, MAP: gl.constexpr):
    mapped = map_values(x, y, u, v, a, b, MAP)
    gl.store((OUT + at) + r, mapped.to(OUT.dtype.element_ty), mask=valid, cache_modifier=".cs")


@gluon.jit
def _share(PARTS, u, v, k, OP: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr):
    """Combine the reductions of all CTAs of the cluster, to (K, 1)."""
    gl.store(PARTS + k, u)
    if OP == LSE:
        gl.store(PARTS + K + k, v)
    _meet(K, WARPS)
    PARTS_LAYOUT: gl.constexpr = _layout(K, K, WARPS)
    parts = (
        PARTS
        + gl.arange(0, K, gl.SliceLayout(0, PARTS_LAYOUT))[None, :]
        + gl.arange(0, K, gl.SliceLayout(1, PARTS_LAYOUT))[:, None] * 0
    )
    us = gl.load(parts, cache_modifier=".cg")
    if OP == LSE:
        vs = gl.load(parts + K, cache_modifier=".cg")
        u = finite_or_zero(gl.max(us, 1))
        vs = vs * fast_exp(us - u[:, None])
    else:
        u = gl.sum(us, 1)
        vs = us
    return gl.convert_layout(u, k.type.layout)[:, None], gl.convert_layout(
        gl.sum(vs, 1), k.type.layout
    )[:, None]


@gluon.jit(do_not_specialize=("n", "total", "most"))
def cluster_kernel(
    X,
    Y,
    A,
    B,
    OUT,
    OFFSETS,
    PARTS,
    n,
    total,
    most,
    OP: gl.constexpr,
    MAP: gl.constexpr,
    READS: gl.constexpr,
    HAS_A: gl.constexpr,
    HAS_B: gl.constexpr,
    FOLLOWED: gl.constexpr,
    K: gl.constexpr,
    R: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Write the tokens OUT (total,) of rows of up to `most` tokens; the tail becomes 0.

    PARTS (n, 2, K) is memory for the clusters.
    """
    LAYOUT: gl.constexpr = _layout(K, 32, WARPS)
    row = gl.program_id(0)
    if FOLLOWED:
        pdl_launch_dependents(row)
    PARTS += row.to(gl.int64) * (2 * K)
    k = gl.arange(0, K, gl.SliceLayout(1, LAYOUT))
    r = gl.arange(0, R, gl.SliceLayout(0, LAYOUT))[None, :]
    start = gl.load(OFFSETS + row).to(gl.int64)
    end = gl.load(OFFSETS + row + 1).to(gl.int64)
    if end - start <= most:
        a = 0.0
        b = 0.0
        if HAS_A:
            a = gl.load(A + row).to(gl.float32)
        if HAS_B:
            b = gl.load(B + row).to(gl.float32)
        begin = start - start % _ALIGNED
        positions = (end - begin).to(gl.int32)
        if positions <= K * R:
            part = gl.cdiv(gl.cdiv(positions, K), _ALIGNED) * _ALIGNED
            at = begin + (k * part)[:, None]
            x, y, valid = _read(X, Y, at, r, start, gl.minimum(at + part, end), OP, READS)
            u, v = reduce_tokens(x, y, a, valid, OP)
            u, v = _share(PARTS, u, v, k, OP, K, WARPS)
            _write(OUT, x, y, u, v, a, b, at, r, valid, MAP)
        else:
            u = gl.full([K], -float("inf") if OP == LSE else 0.0, gl.float32, k.type.layout)
            v = gl.zeros_like(u)
            for tile in range(0, positions, K * R):
                at = begin + (tile + k * R)[:, None]
                x, y, valid = _read(X, Y, at, r, start, end, OP, READS)
                more_u, more_v = reduce_tokens(x, y, a, valid, OP)
                u, v = combine(u, v, more_u, more_v, OP)
            u, v = _share(PARTS, u, v, k, OP, K, WARPS)
            for tile in range(0, positions, K * R):
                at = begin + (tile + k * R)[:, None]
                x, y, valid = _read(X, Y, at, r, start, end, OP, READS)
                _write(OUT, x, y, u, v, a, b, at, r, valid, MAP)
    end_of_rows = gl.load(OFFSETS + n).to(gl.int64)
    partition = gl.cdiv(total - end_of_rows, n)
    stop = gl.minimum(end_of_rows + (row + 1) * partition, total)
    for at in range(end_of_rows + row * partition, stop, K * R):
        tokens = at + k[:, None] * R + r
        gl.store(OUT + tokens, gl.zeros([K, R], OUT.dtype.element_ty, LAYOUT), mask=tokens < stop)


@launch_args
class ClusterArgs:
    """Arguments of `cluster_kernel`."""

    X: Pointer
    Y: Pointer
    A: Pointer
    B: Pointer
    OUT: Pointer
    OFFSETS: Pointer
    PARTS: Pointer
    n: Number
    total: Number
    most: Number


def launch(mean: int, constants: dict[str, Any]) -> Launch:
    """Return the launch for rows of `mean` tokens on average, with the first of its constants."""
    tokens = min(triton.next_power_of_2(-(-mean // PROGRAMS)), _MOST_TOKENS)
    warps = tokens // (32 * _TOKENS)
    return Launch(
        cluster_kernel,
        constants | dict(K=PROGRAMS, R=tokens, WARPS=warps),
        dict(num_warps=warps, num_ctas=PROGRAMS, maxnreg=_REGISTERS),
        args=ClusterArgs,
    )
