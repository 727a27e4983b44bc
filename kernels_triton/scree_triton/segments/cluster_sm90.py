"""Reduce long rows of scalars and map the result over their tokens, on Hopper, in Gluon.

A cluster of eight CTAs processes one row and holds its tokens in registers, so tokens are read once
and written once. Each CTA reduces its part of the row and writes the state to memory. The other
CTAs read it after the hardware barrier of the cluster. If a row does not fit into registers, its
tokens are read again from the cache.

The names of `merge_path` have the same meaning here. CTAS is the number of CTAs per cluster, TILE
the number of tokens per CTA and step. Tensors of tokens have the shape (CTAS, TILE), tensors of
states the shape (CTAS,): their first dimension goes over the CTAs of the cluster.
"""

from typing import Any

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..runtime.launch import Launch, Number, Pointer, launch_args
from ..sm90.pipeline import pdl_launch_dependents
from .reductions import COUNT_EQUAL, DOT, LSE, SUM_Y, combine, fast_exp, finite_or_zero, map_values

CTAS_PER_CLUSTER = 8
_TOKENS_PER_THREAD = 16
_MAX_TILE = 1 << 13
# Registers per thread, so that three of the largest CTAs run at once on an SM.
_MAX_REGISTERS = 40
# The first token of a tile is a multiple of this.
_ALIGNMENT = gl.constexpr(32)


@gluon.constexpr_function
def _tile_layout(CTAS, THREADS, WARPS):
    """Return the layout of tokens: CTAs along the first dimension, threads along the second.

    THREADS is the number of threads of a warp along the second dimension.
    """
    return gl.BlockedLayout(
        [1, 1],
        [32 // THREADS, THREADS],
        [1, WARPS],
        [1, 0],
        [[1 << i, 0] for i in range(CTAS.bit_length() - 1)],
    )


@gluon.constexpr_function
def _thread_layout(CTAS, WARPS):
    """Return the layout of one element per thread, equal in all CTAs."""
    return gl.BlockedLayout([1], [32], [WARPS], [0], [[0] for _ in range(CTAS.bit_length() - 1)])


@gluon.jit
def _cluster_barrier(CTAS: gl.constexpr, WARPS: gl.constexpr):
    """Wait for the other CTAs of the cluster, and make their stores visible."""
    thread = gl.arange(0, 32 * WARPS, _thread_layout(CTAS, WARPS))
    gl.inline_asm_elementwise(
        "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.b32 $0, $1;",
        "=r,r",
        [thread],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def _load_tokens(
    X, Y, tile_start, token_in_tile, start, stop, OP: gl.constexpr, NUM_INPUTS: gl.constexpr
):
    """Load the tokens `tile_start + token_in_tile`; return x, y and the mask of [start, stop).

    Tokens outside [start, stop) become values that change no result.
    """
    valid = (token_in_tile >= gl.maximum(start - tile_start, 0).to(gl.int32)) & (
        token_in_tile < gl.minimum(stop - tile_start, token_in_tile.shape[1]).to(gl.int32)
    )
    x = gl.load(
        (X + tile_start) + token_in_tile, mask=valid, other=-float("inf") if OP == LSE else 0
    ).to(gl.float32)
    y = x
    if NUM_INPUTS == 2:
        y = gl.load((Y + tile_start) + token_in_tile, mask=valid, other=0).to(gl.float32)
    return x, y, valid


@gluon.jit
def _reduce_tokens(x, y, row_a, valid, OP: gl.constexpr):
    """Reduce the tokens (CTAS, TILE) of each CTA to states (CTAS,)."""
    if OP == LSE:
        state = gl.max(x, 1)
        state2 = gl.sum(fast_exp(x - finite_or_zero(state)[:, None]), 1)
    else:
        if OP == DOT:
            x = x * y
        elif OP == SUM_Y:
            x = y
        else:
            gl.static_assert(OP == COUNT_EQUAL)
            x = (valid & (x == row_a)).to(gl.float32)
        state = gl.sum(x, 1)
        state2 = state
    return state, state2


@gluon.jit
def _store_mapped(
    OUT, x, y, state, state2, row_a, row_b, tile_start, token_in_tile, valid, MAP: gl.constexpr
):
    mapped = map_values(x, y, state, state2, row_a, row_b, MAP)
    gl.store(
        (OUT + tile_start) + token_in_tile,
        mapped.to(OUT.dtype.element_ty),
        mask=valid,
        cache_modifier=".cs",
    )


@gluon.jit
def _combine_ctas(
    PARTS, state, state2, cta, OP: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr
):
    """Combine the states of all CTAs of the cluster to (CTAS, 1), with equal entries."""
    gl.store(PARTS + cta, state)
    if OP == LSE:
        gl.store(PARTS + CTAS + cta, state2)
    _cluster_barrier(CTAS, WARPS)
    PARTS_LAYOUT: gl.constexpr = _tile_layout(CTAS, CTAS, WARPS)
    parts = (
        PARTS
        + gl.arange(0, CTAS, gl.SliceLayout(0, PARTS_LAYOUT))[None, :]
        + gl.arange(0, CTAS, gl.SliceLayout(1, PARTS_LAYOUT))[:, None] * 0
    )
    states = gl.load(parts, cache_modifier=".cg")
    if OP == LSE:
        states2 = gl.load(parts + CTAS, cache_modifier=".cg")
        state = finite_or_zero(gl.max(states, 1))
        states2 = states2 * fast_exp(states - state[:, None])
    else:
        state = gl.sum(states, 1)
        states2 = states
    return gl.convert_layout(state, cta.type.layout)[:, None], gl.convert_layout(
        gl.sum(states2, 1), cta.type.layout
    )[:, None]


@gluon.jit(do_not_specialize=("n", "total", "max_uncut_length"))
def segment_cluster_kernel(
    X,
    Y,
    ROW_A,
    ROW_B,
    OUT,
    OFFSETS,
    PARTS,
    n,
    total,
    max_uncut_length,
    OP: gl.constexpr,
    MAP: gl.constexpr,
    NUM_INPUTS: gl.constexpr,
    HAS_A: gl.constexpr,
    HAS_B: gl.constexpr,
    LAUNCH_DEPENDENTS: gl.constexpr,
    CTAS: gl.constexpr,
    TILE: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Write the mapped tokens OUT (total,) of the rows of up to `max_uncut_length` tokens.

    One cluster processes one row. PARTS (n, 2, CTAS) is memory for the states of the CTAs. The
    cluster of each row clears an equal piece of the tail.
    """
    LAYOUT: gl.constexpr = _tile_layout(CTAS, 32, WARPS)
    row = gl.program_id(0)
    if LAUNCH_DEPENDENTS:
        pdl_launch_dependents(row)
    PARTS += row.to(gl.int64) * (2 * CTAS)
    cta = gl.arange(0, CTAS, gl.SliceLayout(1, LAYOUT))
    token_in_tile = gl.arange(0, TILE, gl.SliceLayout(0, LAYOUT))[None, :]
    start = gl.load(OFFSETS + row).to(gl.int64)
    end = gl.load(OFFSETS + row + 1).to(gl.int64)
    if end - start <= max_uncut_length:
        row_a = 0.0
        row_b = 0.0
        if HAS_A:
            row_a = gl.load(ROW_A + row).to(gl.float32)
        if HAS_B:
            row_b = gl.load(ROW_B + row).to(gl.float32)
        begin = start - start % _ALIGNMENT
        length = (end - begin).to(gl.int32)
        if length <= CTAS * TILE:
            part_size = gl.cdiv(gl.cdiv(length, CTAS), _ALIGNMENT) * _ALIGNMENT
            tile_start = begin + (cta * part_size)[:, None]
            x, y, valid = _load_tokens(
                X,
                Y,
                tile_start,
                token_in_tile,
                start,
                gl.minimum(tile_start + part_size, end),
                OP,
                NUM_INPUTS,
            )
            state, state2 = _reduce_tokens(x, y, row_a, valid, OP)
            state, state2 = _combine_ctas(PARTS, state, state2, cta, OP, CTAS, WARPS)
            _store_mapped(
                OUT, x, y, state, state2, row_a, row_b, tile_start, token_in_tile, valid, MAP
            )
        else:
            state = gl.full(
                [CTAS], -float("inf") if OP == LSE else 0.0, gl.float32, cta.type.layout
            )
            state2 = gl.zeros_like(state)
            for done in range(0, length, CTAS * TILE):
                tile_start = begin + (done + cta * TILE)[:, None]
                x, y, valid = _load_tokens(
                    X, Y, tile_start, token_in_tile, start, end, OP, NUM_INPUTS
                )
                tile_state, tile_state2 = _reduce_tokens(x, y, row_a, valid, OP)
                state, state2 = combine(state, state2, tile_state, tile_state2, OP)
            state, state2 = _combine_ctas(PARTS, state, state2, cta, OP, CTAS, WARPS)
            for done in range(0, length, CTAS * TILE):
                tile_start = begin + (done + cta * TILE)[:, None]
                x, y, valid = _load_tokens(
                    X, Y, tile_start, token_in_tile, start, end, OP, NUM_INPUTS
                )
                _store_mapped(
                    OUT, x, y, state, state2, row_a, row_b, tile_start, token_in_tile, valid, MAP
                )
    end_of_rows = gl.load(OFFSETS + n).to(gl.int64)
    piece = gl.cdiv(total - end_of_rows, n)
    stop = gl.minimum(end_of_rows + (row + 1) * piece, total)
    for tile_start in range(end_of_rows + row * piece, stop, CTAS * TILE):
        tokens = tile_start + cta[:, None] * TILE + token_in_tile
        gl.store(
            OUT + tokens, gl.zeros([CTAS, TILE], OUT.dtype.element_ty, LAYOUT), mask=tokens < stop
        )


@launch_args
class ClusterArgs:
    """Arguments of `segment_cluster_kernel`."""

    X: Pointer
    Y: Pointer
    ROW_A: Pointer
    ROW_B: Pointer
    OUT: Pointer
    OFFSETS: Pointer
    PARTS: Pointer
    n: Number
    total: Number
    max_uncut_length: Number


def launch(mean_length: int, constants: dict[str, Any]) -> Launch:
    """Return the launch for rows of this mean length.

    `constants` are the constexpr arguments of `segment_cluster_kernel` except the last three.
    """
    tile = min(triton.next_power_of_2(-(-mean_length // CTAS_PER_CLUSTER)), _MAX_TILE)
    warps = tile // (32 * _TOKENS_PER_THREAD)
    return Launch(
        segment_cluster_kernel,
        constants | dict(CTAS=CTAS_PER_CLUSTER, TILE=tile, WARPS=warps),
        dict(num_warps=warps, num_ctas=CTAS_PER_CLUSTER, maxnreg=_MAX_REGISTERS),
        args=ClusterArgs,
    )
