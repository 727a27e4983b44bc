"""float32 attention on Hopper's tensor cores, forward and backward, head_dim 32 and 64, to the precision of float32 products.

What a product is made of stands in `planes`. Everything else is that of `hopper_forward` and `hopper_backward`, whose producers
load the planes. Six products hide all that a consumer does between them behind those of the other one, so that no step needs to
run ahead of another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ..sm90.pipeline import (
    _COUNTS,
    LN2,
    LOG2E,
    LOWEST,
    _barriers,
    _biased,
    _capped,
    _derivative,
    _entry,
    _first_tile,
    _key_bounds,
    _key_tiles,
    _parts,
    _queue,
    _ring,
    _rows,
    _store_tile,
)
from .backward_sm90 import _dkdv_producer, _dq_producer, _query_tiles
from .bf16x3 import PLANES, PRODUCTS, _plus_product, _product, _split
from .forward_sm90 import _attended, _forward_producer, _partial_sums, _pass_turn, _take_turn


@gluon.jit
def _forward_step(
    w: gl.constexpr,
    q,
    k_s,
    v_s,
    full,
    empty,
    acc,
    p,
    m,
    l,
    c,
    limit,
    own,
    left,
    offs_n,
    scale,
    softcap,
    slope,
    masked,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT_S: gl.constexpr,
    LAYOUT_O: gl.constexpr,
):
    """Multiply key tile c, and meanwhile finish tile c - 1, whose weights are p, by its values."""
    stage = c % STAGES
    mbarrier.wait(full.index(stage), (c // STAGES) & 1)
    _take_turn(w, c, 2)
    x = _product(q, k_s, stage, LAYOUT_S, True)
    o = _product(p, v_s, stage, LAYOUT_O, False)
    _pass_turn(w, c, 2)
    x = warpgroup_mma_wait(PRODUCTS, deps=(x,))
    x, factor = _capped(x, scale, softcap, SOFTCAP, True)
    x, factor = _biased(x, factor, slope, own, offs_n, ALIBI)
    if masked:
        x = _attended(x, limit, own, left, offs_n, WINDOW)
    m_new = gl.maximum(m, gl.max(x, 1) * factor)
    alpha = gl.exp2(m - m_new)
    y = gl.exp2(x * factor - m_new[:, None])
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + _partial_sums(y)
    o = warpgroup_mma_wait(0, deps=(o,) + p)[0]
    mbarrier.arrive(empty.index(stage), count=1)
    acc = (acc + o) * gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT_O))[:, None]
    return acc, _split(y, gl.DotOperandLayout(0, LAYOUT_O, 2)), m_new, l


@gluon.jit
def _forward_consumer(
    w: gl.constexpr,
    q_s,
    k_s,
    v_s,
    queue,
    q_full,
    q_empty,
    full,
    empty,
    SLOPES,
    OUT,
    LSE,
    out_stride,
    total,
    left,
    right,
    scale,
    softcap,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
):
    ROWS: gl.constexpr = BLOCK_M // 2
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND_S: gl.constexpr = gl.DotOperandLayout(0, LAYOUT_S, 2)
    OPERAND_O: gl.constexpr = gl.DotOperandLayout(0, LAYOUT_O, 2)
    LAYOUT_STORE: gl.constexpr = gl.BlockedLayout([1, 4], [128 // DIM, DIM // 4], [4, 1], [1, 0])
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT_S))
    i = 0
    c = 0
    if w == 1:
        _pass_turn(w, c, 2)
    mbarrier.wait(q_full.index(0), 0)
    start, length, other, first, head = _entry(queue.index(0))
    while length > 0:
        q = _split(_rows(q_s.index(w)).load(OPERAND_S), OPERAND_S)
        mbarrier.arrive(q_empty.index(0), count=1)
        shift = other - length
        tiles = _key_tiles(first, length, other, right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
        row = first + w * ROWS
        query = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_S))
        own = query + shift
        slope = gl.load(SLOPES + head) * LOG2E if ALIBI else 0.0
        limit, whole = _key_bounds(
            row + shift, own, other, right, tiles - 1, BLOCK_N, CAUSAL, WINDOW
        )
        mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)
        _take_turn(w, c, 2)
        x = _product(q, k_s, c % STAGES, LAYOUT_S, True)
        _pass_turn(w, c, 2)
        x = warpgroup_mma_wait(0, deps=(x,))
        mbarrier.arrive(empty.index(c % STAGES), count=1)
        x, factor = _capped(x, scale, softcap, SOFTCAP, True)
        x, factor = _biased(x, factor, slope, own - (tiles - 1) * BLOCK_N, offs_n, ALIBI)
        x = _attended(
            x, limit - (tiles - 1) * BLOCK_N, own - (tiles - 1) * BLOCK_N, left, offs_n, WINDOW
        )
        m = gl.maximum(gl.max(x, 1) * factor, LOWEST)
        y = gl.exp2(x * factor - m[:, None])
        l = _partial_sums(y)
        p = _split(y, OPERAND_O)
        acc = gl.zeros([ROWS, DIM], gl.float32, LAYOUT_O)
        c += 1
        low = _first_tile(first, length, other, left, tiles, BLOCK_N, WINDOW)
        whole = gl.maximum(whole, low)
        # Tiles before `inner` begin before the first key of some query. In one loop over all tiles ptxas would serialize
        # the products.
        inner = gl.cdiv(gl.maximum(row + ROWS - 1 + shift - left, 0), BLOCK_N)
        for j in range(tiles - 2, whole - 1, -1):
            acc, p, m, l = _forward_step(
                w,
                q,
                k_s,
                v_s,
                full,
                empty,
                acc,
                p,
                m,
                l,
                c,
                limit - j * BLOCK_N,
                own - j * BLOCK_N,
                left,
                offs_n,
                scale,
                softcap,
                slope,
                True,
                WINDOW,
                SOFTCAP,
                ALIBI,
                STAGES,
                LAYOUT_S,
                LAYOUT_O,
            )
            c += 1
        for j in range(whole - 1, low - 1, -1):
            acc, p, m, l = _forward_step(
                w,
                q,
                k_s,
                v_s,
                full,
                empty,
                acc,
                p,
                m,
                l,
                c,
                limit - j * BLOCK_N,
                own - j * BLOCK_N,
                left,
                offs_n,
                scale,
                softcap,
                slope,
                WINDOW and j < inner,
                WINDOW,
                SOFTCAP,
                ALIBI,
                STAGES,
                LAYOUT_S,
                LAYOUT_O,
            )
            c += 1
        mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)
        o = _product(p, v_s, c % STAGES, LAYOUT_O, False)
        l_sum = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, LAYOUT_S))
        nothing = gl.minimum(limit, other - 1) < 0
        lse = gl.where(nothing, -float("inf"), (m + gl.log2(l_sum)) * LN2)
        factor = gl.convert_layout(gl.where(nothing, 0.0, 1.0 / l_sum), gl.SliceLayout(1, LAYOUT_O))
        o = warpgroup_mma_wait(0, deps=(o,) + p)[0]
        acc = gl.where(factor[:, None] == 0.0, 0.0, (acc + o) * factor[:, None])
        _store_tile(
            OUT + start.to(gl.int64) * out_stride + head * DIM,
            acc,
            row,
            length,
            out_stride,
            DIM,
            LAYOUT_STORE,
        )
        gl.store(LSE + head.to(gl.int64) * total + start + query, lse, mask=query < length)
        i += 1
        mbarrier.wait(q_full.index(0), i & 1)
        start, length, other, first, head = _entry(queue.index(i % 2))


@gluon.jit(do_not_specialize=_COUNTS)
def forward_kernel(
    qd,
    kd,
    vd,
    SLOPES,
    OUT,
    LSE,
    TILES,
    COUNTER,
    q_head,
    out_stride,
    total,
    heads,
    group_size,
    group,
    left,
    right,
    scale,
    softcap,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
):
    """OUT (total, heads, DIM) and LSE (heads, total), natural. The queries come whole."""
    q_s = _ring(qd, 2)
    k_s = _ring(kd, STAGES * PLANES)
    v_s = _ring(vd, STAGES * PLANES)
    queue = _queue()
    q_full = _barriers(1, 1)
    q_empty = _barriers(1, 2)
    full = _barriers(STAGES, 1)
    empty = _barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (
                _forward_consumer,
                (
                    0,
                    q_s,
                    k_s,
                    v_s,
                    queue,
                    q_full,
                    q_empty,
                    full,
                    empty,
                    SLOPES,
                    OUT,
                    LSE,
                    out_stride,
                    total,
                    left,
                    0 if CAUSAL else right,
                    scale,
                    softcap,
                    BLOCK_M,
                    BLOCK_N,
                    DIM,
                    STAGES,
                    CAUSAL,
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                ),
            ),
            (
                _forward_consumer,
                (
                    1,
                    q_s,
                    k_s,
                    v_s,
                    queue,
                    q_full,
                    q_empty,
                    full,
                    empty,
                    SLOPES,
                    OUT,
                    LSE,
                    out_stride,
                    total,
                    left,
                    0 if CAUSAL else right,
                    scale,
                    softcap,
                    BLOCK_M,
                    BLOCK_N,
                    DIM,
                    STAGES,
                    CAUSAL,
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                ),
            ),
            (
                _forward_producer,
                (
                    (q_s, k_s, v_s, queue, q_full, q_empty, full, empty),
                    (
                        qd,
                        kd,
                        vd,
                        TILES,
                        COUNTER,
                        q_head,
                        PLANES * DIM,
                        PLANES * DIM,
                        heads,
                        group_size,
                        group,
                    ),
                    left,
                    0 if CAUSAL else right,
                    BLOCK_M,
                    BLOCK_N,
                    1,
                    PLANES,
                    PLANES,
                    STAGES,
                    1,
                    CAUSAL,
                    WINDOW,
                    2,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )


@gluon.jit
def _dq_step(
    q,
    do,
    k_s,
    v_s,
    k_full,
    k_empty,
    v_full,
    v_empty,
    dq,
    lse,
    delta,
    c,
    limit,
    own,
    left,
    offs_n,
    scale,
    softcap,
    slope,
    masked,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT_S: gl.constexpr,
    LAYOUT_O: gl.constexpr,
):
    stage = c % STAGES
    phase = (c // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    x = _product(q, k_s, stage, LAYOUT_S, True)
    mbarrier.wait(v_full.index(stage), phase)
    dp = _product(do, v_s, stage, LAYOUT_S, True)
    x = warpgroup_mma_wait(PRODUCTS, deps=(x,))
    capped, factor = _capped(x, scale, softcap, SOFTCAP, True)
    x, factor = _biased(capped, factor, slope, own, offs_n, ALIBI)
    p = gl.exp2(x * factor - lse[:, None])
    if SOFTCAP:
        p *= 1.0 - capped * capped
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    ds = p * (dp - delta[:, None])
    if masked:
        ds = gl.where(limit[:, None] >= offs_n[None, :], ds, 0.0)
        if WINDOW:
            ds = gl.where((own - left)[:, None] <= offs_n[None, :], ds, 0.0)
    dq = _plus_product(dq, ds, k_s, stage, LAYOUT_O)
    mbarrier.arrive(k_empty.index(stage), count=1)
    return dq


@gluon.jit
def _dq_consumer(
    w: gl.constexpr,
    q_s,
    k_s,
    v_s,
    do_s,
    queue,
    q_full,
    q_empty,
    k_full,
    k_empty,
    v_full,
    v_empty,
    SLOPES,
    STATS,
    DQ,
    dq_stride,
    total,
    plane,
    left,
    right,
    scale,
    softcap,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
):
    ROWS: gl.constexpr = BLOCK_M // 2
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT_S, 2)
    LAYOUT_STORE: gl.constexpr = gl.BlockedLayout([1, 4], [128 // DIM, DIM // 4], [4, 1], [1, 0])
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT_S))
    i = 0
    c = 0
    mbarrier.wait(q_full.index(0), 0)
    start, length, other, first, head = _entry(queue.index(0))
    while length > 0:
        q0, q1, q2 = _parts(q_s, w, PLANES)
        q = q0.load(OPERAND), q1.load(OPERAND), q2.load(OPERAND)
        do = _parts(do_s, w, PLANES)
        shift = other - length
        tiles = _key_tiles(first, length, other, right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
        row = first + w * ROWS
        query = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_S))
        place = head.to(gl.int64) * total + start + query
        lse = gl.load(STATS + place, mask=query < length, other=0.0)
        delta = gl.load(STATS + plane + place, mask=query < length, other=0.0)
        own = query + shift
        slope = gl.load(SLOPES + head) * LOG2E if ALIBI else 0.0
        limit, full = _key_bounds(row + shift, own, other, right, tiles, BLOCK_N, CAUSAL, WINDOW)
        dq = gl.zeros([ROWS, DIM], gl.float32, LAYOUT_O)
        if WINDOW:
            inner = gl.cdiv(gl.maximum(row + ROWS - 1 + shift - left, 0), BLOCK_N)
            for j in range(
                tiles - 1, _first_tile(first, length, other, left, tiles, BLOCK_N, WINDOW) - 1, -1
            ):
                dq = _dq_step(
                    q,
                    do,
                    k_s,
                    v_s,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    dq,
                    lse,
                    delta,
                    c,
                    limit - j * BLOCK_N,
                    own - j * BLOCK_N,
                    left,
                    offs_n,
                    scale,
                    softcap,
                    slope,
                    (j >= full) | (j < inner),
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                    STAGES,
                    LAYOUT_S,
                    LAYOUT_O,
                )
                c += 1
        else:
            for j in range(tiles - 1, full - 1, -1):
                dq = _dq_step(
                    q,
                    do,
                    k_s,
                    v_s,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    dq,
                    lse,
                    delta,
                    c,
                    limit - j * BLOCK_N,
                    own,
                    left,
                    offs_n,
                    scale,
                    softcap,
                    slope,
                    True,
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                    STAGES,
                    LAYOUT_S,
                    LAYOUT_O,
                )
                c += 1
            for _ in range(full - 1, -1, -1):
                dq = _dq_step(
                    q,
                    do,
                    k_s,
                    v_s,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    dq,
                    lse,
                    delta,
                    c,
                    limit,
                    own,
                    left,
                    offs_n,
                    scale,
                    softcap,
                    slope,
                    False,
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                    STAGES,
                    LAYOUT_S,
                    LAYOUT_O,
                )
                c += 1
        mbarrier.arrive(q_empty.index(0), count=1)
        _store_tile(
            DQ + start.to(gl.int64) * dq_stride + head * DIM,
            dq * _derivative(scale, softcap, SOFTCAP),
            row,
            length,
            dq_stride,
            DIM,
            LAYOUT_STORE,
        )
        i += 1
        mbarrier.wait(q_full.index(0), i & 1)
        start, length, other, first, head = _entry(queue.index(i % 2))


@gluon.jit(do_not_specialize=_COUNTS)
def dq_kernel(
    qd,
    kd,
    vd,
    dod,
    SLOPES,
    STATS,
    DQ,
    TILES,
    COUNTER,
    dq_stride,
    total,
    plane,
    heads,
    group_size,
    group,
    left,
    right,
    scale,
    softcap,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
):
    """DQ. The planes of the queries stay in registers, which spares the shared memory half of its reads for the scores."""
    q_s = _ring(qd, 2 * PLANES)
    do_s = _ring(dod, 2 * PLANES)
    k_s = _ring(kd, STAGES * PLANES)
    v_s = _ring(vd, STAGES * PLANES)
    queue = _queue()
    q_full = _barriers(1, 1)
    q_empty = _barriers(1, 2)
    k_full = _barriers(STAGES, 1)
    k_empty = _barriers(STAGES, 2)
    v_full = _barriers(STAGES, 1)
    v_empty = _barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (
                _dq_consumer,
                (
                    0,
                    q_s,
                    k_s,
                    v_s,
                    do_s,
                    queue,
                    q_full,
                    q_empty,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    SLOPES,
                    STATS,
                    DQ,
                    dq_stride,
                    total,
                    plane,
                    left,
                    0 if CAUSAL else right,
                    scale,
                    softcap,
                    BLOCK_M,
                    BLOCK_N,
                    DIM,
                    STAGES,
                    CAUSAL,
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                ),
            ),
            (
                _dq_consumer,
                (
                    1,
                    q_s,
                    k_s,
                    v_s,
                    do_s,
                    queue,
                    q_full,
                    q_empty,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    SLOPES,
                    STATS,
                    DQ,
                    dq_stride,
                    total,
                    plane,
                    left,
                    0 if CAUSAL else right,
                    scale,
                    softcap,
                    BLOCK_M,
                    BLOCK_N,
                    DIM,
                    STAGES,
                    CAUSAL,
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                ),
            ),
            (
                _dq_producer,
                (
                    (q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty),
                    (
                        qd,
                        kd,
                        vd,
                        dod,
                        TILES,
                        COUNTER,
                        PLANES * DIM,
                        PLANES * DIM,
                        PLANES * DIM,
                        PLANES * DIM,
                        heads,
                        group_size,
                        group,
                    ),
                    left,
                    0 if CAUSAL else right,
                    BLOCK_M,
                    BLOCK_N,
                    PLANES,
                    PLANES,
                    STAGES,
                    1,
                    2,
                    CAUSAL,
                    WINDOW,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )


@gluon.jit
def _dkdv_step(
    k,
    v,
    q_s,
    do_s,
    lse_s,
    delta_s,
    q_full,
    q_empty,
    do_full,
    do_empty,
    dk,
    dv,
    c,
    own,
    other,
    left,
    right,
    offs_m,
    scale,
    softcap,
    slope,
    masked,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT_S: gl.constexpr,
    LAYOUT_O: gl.constexpr,
):
    """Query tile c, from whose first query on the row has `other`; scores lie keys by queries."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT_S)
    stage = c % STAGES
    phase = (c // STAGES) & 1
    mbarrier.wait(q_full.index(stage), phase)
    x = warpgroup_mma_wait(0, deps=(_product(k, q_s, stage, LAYOUT_S, True),))
    lse = lse_s.index(stage).load(COLUMN)
    if ALIBI:  # queries behind the row have no scores, and so no bias
        lse = gl.where(offs_m < other, lse, float("inf"))
    capped, factor = _capped(x, scale, softcap, SOFTCAP, True)
    x, factor = _biased(capped, factor, slope, own, offs_m, ALIBI)
    p = gl.exp2(x * factor - lse[None, :])
    if masked:
        p = gl.where(offs_m[None, :] >= (own - right)[:, None], p, 0.0)
        if WINDOW:
            p = gl.where(offs_m[None, :] <= (own + left)[:, None], p, 0.0)
    mbarrier.wait(do_full.index(stage), phase)
    dv = _plus_product(dv, p, do_s, stage, LAYOUT_O)
    if SOFTCAP:
        p *= 1.0 - capped * capped
    dp = warpgroup_mma_wait(0, deps=(_product(v, do_s, stage, LAYOUT_S, True),))
    delta = delta_s.index(stage).load(COLUMN)
    mbarrier.arrive(do_empty.index(stage), count=1)
    dk = _plus_product(dk, p * (dp - delta[None, :]), q_s, stage, LAYOUT_O)
    mbarrier.arrive(q_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _dkdv_consumer(
    w: gl.constexpr,
    q_s,
    k_s,
    v_s,
    do_s,
    lse_s,
    delta_s,
    queue,
    k_full,
    k_empty,
    q_full,
    q_empty,
    do_full,
    do_empty,
    SLOPES,
    DK,
    DV,
    dk_stride,
    group_size,
    left,
    right,
    scale,
    softcap,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
):
    ROWS: gl.constexpr = BLOCK_N // 2
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LAYOUT_STORE: gl.constexpr = gl.BlockedLayout([1, 4], [128 // DIM, DIM // 4], [4, 1], [1, 0])
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT_S))
    i = 0
    c = 0
    mbarrier.wait(k_full.index(0), 0)
    start, length, other, first, head = _entry(queue.index(0))
    while length > 0:
        k = _parts(k_s, w, PLANES)
        v = _parts(v_s, w, PLANES)
        low, high = _query_tiles(
            first, length, other, left, right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW
        )
        row = first + w * ROWS
        # Where each key stands among the queries, and the tiles, from `full` up to `end`, of which every query attends all keys
        # of this warpgroup.
        own = row + (other - length) + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_S))
        full = low
        if CAUSAL or WINDOW:
            full = gl.minimum(
                gl.cdiv(gl.maximum(row + ROWS - 1 + other - length - right, 0), BLOCK_M), high
            )
        end = gl.maximum(row + other - length + left + 1, 0) // BLOCK_M
        dk = gl.zeros([ROWS, DIM], gl.float32, LAYOUT_O)
        dv = gl.zeros([ROWS, DIM], gl.float32, LAYOUT_O)
        for g in range(group_size):
            slope = gl.load(SLOPES + head * group_size + g) * LOG2E if ALIBI else 0.0
            if WINDOW:
                for j in range(low, high):
                    dk, dv = _dkdv_step(
                        k,
                        v,
                        q_s,
                        do_s,
                        lse_s,
                        delta_s,
                        q_full,
                        q_empty,
                        do_full,
                        do_empty,
                        dk,
                        dv,
                        c,
                        own - j * BLOCK_M,
                        other - j * BLOCK_M,
                        left,
                        right,
                        offs_m,
                        scale,
                        softcap,
                        slope,
                        (j < full) | (j >= end),
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        STAGES,
                        LAYOUT_S,
                        LAYOUT_O,
                    )
                    c += 1
            else:
                if CAUSAL:
                    for j in range(low, full):
                        dk, dv = _dkdv_step(
                            k,
                            v,
                            q_s,
                            do_s,
                            lse_s,
                            delta_s,
                            q_full,
                            q_empty,
                            do_full,
                            do_empty,
                            dk,
                            dv,
                            c,
                            own - j * BLOCK_M,
                            other,
                            left,
                            right,
                            offs_m,
                            scale,
                            softcap,
                            slope,
                            True,
                            WINDOW,
                            SOFTCAP,
                            ALIBI,
                            STAGES,
                            LAYOUT_S,
                            LAYOUT_O,
                        )
                        c += 1
                for j in range(full, high):
                    dk, dv = _dkdv_step(
                        k,
                        v,
                        q_s,
                        do_s,
                        lse_s,
                        delta_s,
                        q_full,
                        q_empty,
                        do_full,
                        do_empty,
                        dk,
                        dv,
                        c,
                        own,
                        other,
                        left,
                        right,
                        offs_m,
                        scale,
                        softcap,
                        slope,
                        False,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        STAGES,
                        LAYOUT_S,
                        LAYOUT_O,
                    )
                    c += 1
        mbarrier.arrive(k_empty.index(0), count=1)
        place = start.to(gl.int64) * dk_stride + head * DIM
        _store_tile(
            DK + place,
            dk * _derivative(scale, softcap, SOFTCAP),
            row,
            length,
            dk_stride,
            DIM,
            LAYOUT_STORE,
        )
        _store_tile(DV + place, dv, row, length, dk_stride, DIM, LAYOUT_STORE)
        i += 1
        mbarrier.wait(k_full.index(0), i & 1)
        start, length, other, first, head = _entry(queue.index(0))


@gluon.jit(do_not_specialize=_COUNTS)
def dkdv_kernel(
    qd,
    kd,
    vd,
    dod,
    SLOPES,
    STATS,
    DK,
    DV,
    TILES,
    COUNTER,
    dk_stride,
    total,
    plane,
    heads,
    group_size,
    group,
    left,
    right,
    scale,
    softcap,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
):
    """DK and DV, one key tile and key head at a time, over all query heads that share the key head."""
    STATS_S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = _ring(qd, STAGES * PLANES)
    do_s = _ring(dod, STAGES * PLANES)
    k_s = _ring(kd, 2 * PLANES)
    v_s = _ring(vd, 2 * PLANES)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], STATS_S)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], STATS_S)
    queue = _queue(1)  # there is no room for two
    k_full = _barriers(1, 1)
    k_empty = _barriers(1, 2)
    q_full = _barriers(STAGES, 1)
    q_empty = _barriers(STAGES, 2)
    do_full = _barriers(STAGES, 1)
    do_empty = _barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (
                _dkdv_consumer,
                (
                    0,
                    q_s,
                    k_s,
                    v_s,
                    do_s,
                    lse_s,
                    delta_s,
                    queue,
                    k_full,
                    k_empty,
                    q_full,
                    q_empty,
                    do_full,
                    do_empty,
                    SLOPES,
                    DK,
                    DV,
                    dk_stride,
                    group_size,
                    left,
                    0 if CAUSAL else right,
                    scale,
                    softcap,
                    BLOCK_M,
                    BLOCK_N,
                    DIM,
                    STAGES,
                    CAUSAL,
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                ),
            ),
            (
                _dkdv_consumer,
                (
                    1,
                    q_s,
                    k_s,
                    v_s,
                    do_s,
                    lse_s,
                    delta_s,
                    queue,
                    k_full,
                    k_empty,
                    q_full,
                    q_empty,
                    do_full,
                    do_empty,
                    SLOPES,
                    DK,
                    DV,
                    dk_stride,
                    group_size,
                    left,
                    0 if CAUSAL else right,
                    scale,
                    softcap,
                    BLOCK_M,
                    BLOCK_N,
                    DIM,
                    STAGES,
                    CAUSAL,
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                ),
            ),
            (
                _dkdv_producer,
                (
                    (
                        q_s,
                        k_s,
                        v_s,
                        do_s,
                        lse_s,
                        delta_s,
                        queue,
                        k_full,
                        k_empty,
                        q_full,
                        q_empty,
                        do_full,
                        do_empty,
                    ),
                    (
                        qd,
                        kd,
                        vd,
                        dod,
                        STATS,
                        TILES,
                        COUNTER,
                        PLANES * DIM,
                        PLANES * DIM,
                        PLANES * DIM,
                        PLANES * DIM,
                        total,
                        plane,
                        heads,
                        group_size,
                        group,
                    ),
                    left,
                    0 if CAUSAL else right,
                    BLOCK_M,
                    BLOCK_N,
                    PLANES,
                    PLANES,
                    STAGES,
                    1,
                    2,
                    CAUSAL,
                    WINDOW,
                ),
            ),
        ],
        [4, 1],
        [232, 40],
    )
