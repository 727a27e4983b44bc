"""float32 attention on Hopper's tensor cores, forward and backward, head_dim 32 and 64, to the precision of float32 products.

A float32 number is the sum of three bfloat16 numbers, its planes. Of the nine products of two operands' planes float32 can tell
six from 0, so every product of matrices here is six of bfloat16, added up in float32, the least first. Planes of the inputs are
written by one pass over them; those of the weights are made in registers. Sums over a tile are added to the result by ordinary
additions, as the tensor cores' own round towards zero.

Everything else is that of `hopper_forward` and `hopper_backward`, whose producers load the planes. Six products hide all
that a consumer does between them behind those of the other one, so that no step needs to run ahead of another.
"""
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper import (
    _COUNTS,
    LN2,
    LOWEST,
    _barriers,
    _biased,
    _capped,
    _derivative,
    _entry,
    _first_tile,
    _key_bounds,
    _key_tiles,
    _rows,
    _store_tile,
)
from .hopper_backward import _dkdv_producer, _dq_producer, _query_tiles
from .hopper_forward import _attended, _forward_producer, _partial_sums, _pass_turn, _take_turn

LOG2E = tl.constexpr(1.4426950408889634)
PLANES = gl.constexpr(3)


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
def split_dout_kernel(OUT, DO, LSE, DLSE, STATS, SPLIT, do_stride, do_head, dlse_stride, dlse_head, total, plane, heads,
                      DIM: tl.constexpr, BLOCK: tl.constexpr, HAS_DLSE: tl.constexpr):
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
    return gl.inline_asm_elementwise("shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], gl.float32, True, 2)


@gluon.jit
def _split(x, LAYOUT: gl.constexpr):
    """The planes of x, as left operands."""
    a = x.to(gl.bfloat16)
    x = x - _widen(a)
    b = x.to(gl.bfloat16)
    c = (x - _widen(b)).to(gl.bfloat16)
    return gl.convert_layout(a, LAYOUT), gl.convert_layout(b, LAYOUT), gl.convert_layout(c, LAYOUT)


@gluon.jit
def _planes(ring, slot):
    slot *= PLANES
    return _rows(ring.index(slot)), _rows(ring.index(slot + 1)), _rows(ring.index(slot + 2))


@gluon.jit
def _product(a0, a1, a2, ring, slot, LAYOUT: gl.constexpr, COLUMNS: gl.constexpr, TURNED: gl.constexpr):
    """Start a @ b, or a @ b^T if TURNED, with b in a slot of a ring."""
    ROWS: gl.constexpr = a0.shape[0]
    b0, b1, b2 = _planes(ring, slot)
    if TURNED:
        b0 = b0.permute((1, 0))
        b1 = b1.permute((1, 0))
        b2 = b2.permute((1, 0))
    x = warpgroup_mma(a0, b2, gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT), use_acc=False, is_async=True)
    x = warpgroup_mma(a2, b0, x, is_async=True)
    x = warpgroup_mma(a1, b1, x, is_async=True)
    x = warpgroup_mma(a0, b1, x, is_async=True)
    x = warpgroup_mma(a1, b0, x, is_async=True)
    return warpgroup_mma(a0, b0, x, is_async=True)


@gluon.jit
def _forward_step(w: gl.constexpr, q0, q1, q2, k_s, v_s, full, empty, acc, p0, p1, p2, m, l, c, limit,
                  own, left, offs_n, scale, softcap, slope, masked, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
                  ALIBI: gl.constexpr, STAGES: gl.constexpr, DIM: gl.constexpr, LAYOUT_S: gl.constexpr,
                  LAYOUT_O: gl.constexpr):
    """Multiply key tile c, and meanwhile finish tile c - 1, whose weights are p, by its values."""
    BLOCK_N: gl.constexpr = k_s.shape[3]
    stage = c % STAGES
    mbarrier.wait(full.index(stage), (c // STAGES) & 1)
    _take_turn(w, c, 2)
    x = _product(q0, q1, q2, k_s, stage, LAYOUT_S, BLOCK_N, True)
    o = _product(p0, p1, p2, v_s, stage, LAYOUT_O, DIM, False)
    _pass_turn(w, c, 2)
    x = warpgroup_mma_wait(6, deps=(x, ))
    x, factor = _capped(x, scale, softcap, SOFTCAP, True)
    x, factor = _biased(x, factor, slope, own, offs_n, ALIBI)
    if masked:
        x = _attended(x, limit, own, left, offs_n, WINDOW)
    m_new = gl.maximum(m, gl.max(x, 1) * factor)
    alpha = gl.exp2(m - m_new)
    y = gl.exp2(x * factor - m_new[:, None])
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + _partial_sums(y)
    o, p0, p1, p2 = warpgroup_mma_wait(0, deps=(o, p0, p1, p2))
    mbarrier.arrive(empty.index(stage), count=1)
    acc = (acc + o) * gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT_O))[:, None]
    p0, p1, p2 = _split(y, gl.DotOperandLayout(0, LAYOUT_O, 2))
    return acc, p0, p1, p2, m_new, l


@gluon.jit
def _forward_consumer(w: gl.constexpr, q_s, k_s, v_s, queue, q_full, q_empty, full, empty, SLOPES,
                      OUT, LSE, out_stride, total, left, right, scale, softcap, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
                      DIM: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
                      SOFTCAP: gl.constexpr, ALIBI: gl.constexpr):
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
        q0, q1, q2 = _split(_rows(q_s.index(w)).load(OPERAND_S), OPERAND_S)
        mbarrier.arrive(q_empty.index(0), count=1)
        shift = other - length
        tiles = _key_tiles(first, length, other, right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
        row = first + w * ROWS
        query = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_S))
        own = query + shift
        slope = gl.load(SLOPES + head) * LOG2E if ALIBI else 0.0
        limit, whole = _key_bounds(row + shift, own, other, right, tiles - 1, BLOCK_N, CAUSAL, WINDOW)
        mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)
        _take_turn(w, c, 2)
        x = _product(q0, q1, q2, k_s, c % STAGES, LAYOUT_S, BLOCK_N, True)
        _pass_turn(w, c, 2)
        x = warpgroup_mma_wait(0, deps=(x, ))
        mbarrier.arrive(empty.index(c % STAGES), count=1)
        x, factor = _capped(x, scale, softcap, SOFTCAP, True)
        x, factor = _biased(x, factor, slope, own - (tiles - 1) * BLOCK_N, offs_n, ALIBI)
        x = _attended(x, limit - (tiles - 1) * BLOCK_N, own - (tiles - 1) * BLOCK_N, left, offs_n, WINDOW)
        m = gl.maximum(gl.max(x, 1) * factor, LOWEST)
        y = gl.exp2(x * factor - m[:, None])
        l = _partial_sums(y)
        p0, p1, p2 = _split(y, OPERAND_O)
        acc = gl.zeros([ROWS, DIM], gl.float32, LAYOUT_O)
        c += 1
        if WINDOW:
            inner = gl.cdiv(gl.maximum(row + ROWS - 1 + shift - left, 0), BLOCK_N)
            for j in range(tiles - 2, _first_tile(first, length, other, left, tiles, BLOCK_N, WINDOW) - 1, -1):
                acc, p0, p1, p2, m, l = _forward_step(w, q0, q1, q2, k_s, v_s, full, empty, acc, p0, p1,
                                                      p2, m, l, c, limit - j * BLOCK_N, own - j * BLOCK_N, left, offs_n, scale,
                                                      softcap, slope, (j >= whole) | (j < inner), WINDOW, SOFTCAP, ALIBI, STAGES,
                                                      DIM, LAYOUT_S, LAYOUT_O)
                c += 1
        else:
            for j in range(tiles - 2, whole - 1, -1):
                acc, p0, p1, p2, m, l = _forward_step(w, q0, q1, q2, k_s, v_s, full, empty, acc, p0, p1,
                                                      p2, m, l, c, limit - j * BLOCK_N, own, left, offs_n, scale, softcap, slope,
                                                      True, WINDOW, SOFTCAP, ALIBI, STAGES, DIM, LAYOUT_S, LAYOUT_O)
                c += 1
            for _ in range(whole - 1, -1, -1):
                acc, p0, p1, p2, m, l = _forward_step(w, q0, q1, q2, k_s, v_s, full, empty, acc, p0, p1,
                                                      p2, m, l, c, limit, own, left, offs_n, scale, softcap, slope, False, WINDOW,
                                                      SOFTCAP, ALIBI, STAGES, DIM, LAYOUT_S, LAYOUT_O)
                c += 1
        mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)
        o = _product(p0, p1, p2, v_s, c % STAGES, LAYOUT_O, DIM, False)
        l_sum = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, LAYOUT_S))
        nothing = gl.minimum(limit, other - 1) < 0
        lse = gl.where(nothing, -float("inf"), (m + gl.log2(l_sum)) * LN2)
        factor = gl.convert_layout(gl.where(nothing, 0.0, 1.0 / l_sum), gl.SliceLayout(1, LAYOUT_O))
        o, p0, p1, p2 = warpgroup_mma_wait(0, deps=(o, p0, p1, p2))
        acc = gl.where(factor[:, None] == 0.0, 0.0, (acc + o) * factor[:, None])
        _store_tile(OUT + start.to(gl.int64) * out_stride + head * DIM, acc, row, length, out_stride, DIM, LAYOUT_STORE)
        gl.store(LSE + head.to(gl.int64) * total + start + query, lse, mask=query < length)
        i += 1
        mbarrier.wait(q_full.index(0), i & 1)
        start, length, other, first, head = _entry(queue.index(0))


@gluon.jit(do_not_specialize=_COUNTS)
def forward_kernel(qd, kd, vd, SLOPES, OUT, LSE, TILES, COUNTER, q_head, out_stride, total, heads, group_size, group, left,
                   right, scale, softcap, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr,
                   STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
                   ALIBI: gl.constexpr):
    """OUT (total, heads, DIM) and LSE (heads, total), natural. The queries come whole."""
    q_s = gl.allocate_shared_memory(qd.dtype, [2, 1, 1, BLOCK_M // 2, DIM], qd.layout)
    k_s = gl.allocate_shared_memory(kd.dtype, [STAGES * PLANES, 1, 1, BLOCK_N, DIM], kd.layout)
    v_s = gl.allocate_shared_memory(vd.dtype, [STAGES * PLANES, 1, 1, BLOCK_N, DIM], vd.layout)
    queue = gl.allocate_shared_memory(gl.int32, [1, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = _barriers(1, 1)
    q_empty = _barriers(1, 2)
    full = _barriers(STAGES, 1)
    empty = _barriers(STAGES, 2)
    gl.warp_specialize([
        (_forward_consumer, (0, q_s, k_s, v_s, queue, q_full, q_empty, full, empty, SLOPES, OUT, LSE,
                             out_stride, total, left, 0 if CAUSAL else right, scale, softcap, BLOCK_M, BLOCK_N, DIM, STAGES,
                             CAUSAL, WINDOW, SOFTCAP, ALIBI)),
        (_forward_consumer, (1, q_s, k_s, v_s, queue, q_full, q_empty, full, empty, SLOPES, OUT, LSE,
                             out_stride, total, left, 0 if CAUSAL else right, scale, softcap, BLOCK_M, BLOCK_N, DIM, STAGES,
                             CAUSAL, WINDOW, SOFTCAP, ALIBI)),
        (_forward_producer, ((q_s, k_s, v_s, queue, q_full, q_empty, full, empty),
                             (qd, kd, vd, TILES, COUNTER, q_head, PLANES * DIM, PLANES * DIM, heads, group_size, group),
                             left, 0 if CAUSAL else right, BLOCK_M, BLOCK_N, 1, PLANES, PLANES, STAGES, 1, CAUSAL, WINDOW, 2)),
    ], [4, 1], [232, 40])


@gluon.jit
def _dq_step(q0, q1, q2, do0, do1, do2, k_s, v_s, k_full, k_empty, v_full, v_empty, dq, lse, delta, c, limit, own, left,
             offs_n, scale, softcap, slope, masked, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr,
             STAGES: gl.constexpr, DIM: gl.constexpr, LAYOUT_S: gl.constexpr, LAYOUT_O: gl.constexpr):
    BLOCK_N: gl.constexpr = k_s.shape[3]
    stage = c % STAGES
    phase = (c // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    x = _product(q0, q1, q2, k_s, stage, LAYOUT_S, BLOCK_N, True)
    mbarrier.wait(v_full.index(stage), phase)
    dp = _product(do0, do1, do2, v_s, stage, LAYOUT_S, BLOCK_N, True)
    x = warpgroup_mma_wait(6, deps=(x, ))
    capped, factor = _capped(x, scale, softcap, SOFTCAP, True)
    x, factor = _biased(capped, factor, slope, own, offs_n, ALIBI)
    p = gl.exp2(x * factor - lse[:, None])
    if SOFTCAP:
        p *= 1.0 - capped * capped
    dp = warpgroup_mma_wait(0, deps=(dp, ))
    mbarrier.arrive(v_empty.index(stage), count=1)
    ds = p * (dp - delta[:, None])
    if masked:
        ds = gl.where(limit[:, None] >= offs_n[None, :], ds, 0.0)
        if WINDOW:
            ds = gl.where((own - left)[:, None] <= offs_n[None, :], ds, 0.0)
    d0, d1, d2 = _split(ds, gl.DotOperandLayout(0, LAYOUT_O, 2))
    o = _product(d0, d1, d2, k_s, stage, LAYOUT_O, DIM, False)
    o, d0, d1, d2 = warpgroup_mma_wait(0, deps=(o, d0, d1, d2))
    mbarrier.arrive(k_empty.index(stage), count=1)
    return dq + o


@gluon.jit
def _dq_consumer(w: gl.constexpr, q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, SLOPES,
                 STATS, DQ, dq_stride, total, plane, left, right, scale, softcap, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
                 DIM: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
                 ALIBI: gl.constexpr):
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
        q0, q1, q2 = _planes(q_s, w)
        q0 = q0.load(OPERAND)
        q1 = q1.load(OPERAND)
        q2 = q2.load(OPERAND)
        do0, do1, do2 = _planes(do_s, w)
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
            for j in range(tiles - 1, _first_tile(first, length, other, left, tiles, BLOCK_N, WINDOW) - 1, -1):
                dq = _dq_step(q0, q1, q2, do0, do1, do2, k_s, v_s, k_full, k_empty, v_full, v_empty, dq, lse, delta, c,
                              limit - j * BLOCK_N, own - j * BLOCK_N, left, offs_n, scale, softcap, slope,
                              (j >= full) | (j < inner), WINDOW, SOFTCAP, ALIBI, STAGES, DIM, LAYOUT_S, LAYOUT_O)
                c += 1
        else:
            for j in range(tiles - 1, full - 1, -1):
                dq = _dq_step(q0, q1, q2, do0, do1, do2, k_s, v_s, k_full, k_empty, v_full, v_empty, dq, lse, delta, c,
                              limit - j * BLOCK_N, own, left, offs_n, scale, softcap, slope, True, WINDOW, SOFTCAP, ALIBI, STAGES,
                              DIM, LAYOUT_S, LAYOUT_O)
                c += 1
            for _ in range(full - 1, -1, -1):
                dq = _dq_step(q0, q1, q2, do0, do1, do2, k_s, v_s, k_full, k_empty, v_full, v_empty, dq, lse, delta, c, limit,
                              own, left, offs_n, scale, softcap, slope, False, WINDOW, SOFTCAP, ALIBI, STAGES, DIM, LAYOUT_S,
                              LAYOUT_O)
                c += 1
        mbarrier.arrive(q_empty.index(0), count=1)
        _store_tile(DQ + start.to(gl.int64) * dq_stride + head * DIM, dq * _derivative(scale, softcap, SOFTCAP), row, length,
                    dq_stride, DIM, LAYOUT_STORE)
        i += 1
        mbarrier.wait(q_full.index(0), i & 1)
        start, length, other, first, head = _entry(queue.index(0))


@gluon.jit(do_not_specialize=_COUNTS)
def dq_kernel(qd, kd, vd, dod, SLOPES, STATS, DQ, TILES, COUNTER, dq_stride, total, plane, heads, group_size, group, left,
              right, scale, softcap, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
              CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr):
    """DQ. The planes of the queries stay in registers, which spares the shared memory half of its reads for the scores."""
    q_s = gl.allocate_shared_memory(qd.dtype, [2 * PLANES, 1, 1, BLOCK_M // 2, DIM], qd.layout)
    do_s = gl.allocate_shared_memory(dod.dtype, [2 * PLANES, 1, 1, BLOCK_M // 2, DIM], dod.layout)
    k_s = gl.allocate_shared_memory(kd.dtype, [STAGES * PLANES, 1, 1, BLOCK_N, DIM], kd.layout)
    v_s = gl.allocate_shared_memory(vd.dtype, [STAGES * PLANES, 1, 1, BLOCK_N, DIM], vd.layout)
    queue = gl.allocate_shared_memory(gl.int32, [1, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = _barriers(1, 1)
    q_empty = _barriers(1, 2)
    k_full = _barriers(STAGES, 1)
    k_empty = _barriers(STAGES, 2)
    v_full = _barriers(STAGES, 1)
    v_empty = _barriers(STAGES, 2)
    gl.warp_specialize([
        (_dq_consumer, (0, q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, SLOPES, STATS, DQ,
                        dq_stride, total, plane, left, 0 if CAUSAL else right, scale, softcap, BLOCK_M, BLOCK_N, DIM, STAGES,
                        CAUSAL, WINDOW, SOFTCAP, ALIBI)),
        (_dq_consumer, (1, q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, SLOPES, STATS, DQ,
                        dq_stride, total, plane, left, 0 if CAUSAL else right, scale, softcap, BLOCK_M, BLOCK_N, DIM, STAGES,
                        CAUSAL, WINDOW, SOFTCAP, ALIBI)),
        (_dq_producer, (qd, kd, vd, dod, q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, TILES,
                        COUNTER, PLANES * DIM, PLANES * DIM, PLANES * DIM, PLANES * DIM, heads, group_size, group, left,
                        0 if CAUSAL else right, BLOCK_M, BLOCK_N, STAGES, 1, CAUSAL, WINDOW, PLANES, PLANES)),
    ], [4, 1], [232, 40])


@gluon.jit
def _dkdv_step(k0, k1, k2, v0, v1, v2, q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty, dk, dv, c, own, other,
               left, right, offs_m, scale, softcap, slope, masked, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr,
               STAGES: gl.constexpr, DIM: gl.constexpr, LAYOUT_S: gl.constexpr, LAYOUT_O: gl.constexpr):
    """Query tile c, from whose first query on the row has `other`; scores lie keys by queries."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT_O, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT_S)
    BLOCK_M: gl.constexpr = q_s.shape[3]
    stage = c % STAGES
    phase = (c // STAGES) & 1
    mbarrier.wait(q_full.index(stage), phase)
    x = warpgroup_mma_wait(0, deps=(_product(k0, k1, k2, q_s, stage, LAYOUT_S, BLOCK_M, True), ))
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
    a0, a1, a2 = _split(p, OPERAND)
    o, a0, a1, a2 = warpgroup_mma_wait(0, deps=(_product(a0, a1, a2, do_s, stage, LAYOUT_O, DIM, False), a0, a1, a2))
    dv += o
    if SOFTCAP:
        p *= 1.0 - capped * capped
    dp = warpgroup_mma_wait(0, deps=(_product(v0, v1, v2, do_s, stage, LAYOUT_S, BLOCK_M, True), ))
    delta = delta_s.index(stage).load(COLUMN)
    mbarrier.arrive(do_empty.index(stage), count=1)
    a0, a1, a2 = _split(p * (dp - delta[None, :]), OPERAND)
    o, a0, a1, a2 = warpgroup_mma_wait(0, deps=(_product(a0, a1, a2, q_s, stage, LAYOUT_O, DIM, False), a0, a1, a2))
    mbarrier.arrive(q_empty.index(stage), count=1)
    return dk + o, dv


@gluon.jit
def _dkdv_consumer(w: gl.constexpr, q_s, k_s, v_s, do_s, lse_s, delta_s, queue, k_full, k_empty, q_full, q_empty, do_full,
                   do_empty, SLOPES, DK, DV, dk_stride, group_size, left, right, scale, softcap, BLOCK_M: gl.constexpr,
                   BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
                   WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr):
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
        k0, k1, k2 = _planes(k_s, w)
        v0, v1, v2 = _planes(v_s, w)
        low, high = _query_tiles(first, length, other, left, right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
        row = first + w * ROWS
        # Where each key stands among the queries, and the tiles, from `full` up to `end`, of which every query attends all keys
        # of this warpgroup.
        own = row + (other - length) + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_S))
        full = low
        if CAUSAL or WINDOW:
            full = gl.minimum(gl.cdiv(gl.maximum(row + ROWS - 1 + other - length - right, 0), BLOCK_M), high)
        end = gl.maximum(row + other - length + left + 1, 0) // BLOCK_M
        dk = gl.zeros([ROWS, DIM], gl.float32, LAYOUT_O)
        dv = gl.zeros([ROWS, DIM], gl.float32, LAYOUT_O)
        for g in range(group_size):
            slope = gl.load(SLOPES + head * group_size + g) * LOG2E if ALIBI else 0.0
            if WINDOW:
                for j in range(low, high):
                    dk, dv = _dkdv_step(k0, k1, k2, v0, v1, v2, q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty,
                                        dk, dv, c, own - j * BLOCK_M, other - j * BLOCK_M, left, right, offs_m, scale, softcap,
                                        slope, (j < full) | (j >= end), WINDOW, SOFTCAP, ALIBI, STAGES, DIM, LAYOUT_S, LAYOUT_O)
                    c += 1
            else:
                if CAUSAL:
                    for j in range(low, full):
                        dk, dv = _dkdv_step(k0, k1, k2, v0, v1, v2, q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full,
                                            do_empty, dk, dv, c, own - j * BLOCK_M, other, left, right, offs_m, scale, softcap,
                                            slope, True, WINDOW, SOFTCAP, ALIBI, STAGES, DIM, LAYOUT_S, LAYOUT_O)
                        c += 1
                for j in range(full, high):
                    dk, dv = _dkdv_step(k0, k1, k2, v0, v1, v2, q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty,
                                        dk, dv, c, own, other, left, right, offs_m, scale, softcap, slope, False, WINDOW,
                                        SOFTCAP, ALIBI, STAGES, DIM, LAYOUT_S, LAYOUT_O)
                    c += 1
        mbarrier.arrive(k_empty.index(0), count=1)
        place = start.to(gl.int64) * dk_stride + head * DIM
        _store_tile(DK + place, dk * _derivative(scale, softcap, SOFTCAP), row, length, dk_stride, DIM, LAYOUT_STORE)
        _store_tile(DV + place, dv, row, length, dk_stride, DIM, LAYOUT_STORE)
        i += 1
        mbarrier.wait(k_full.index(0), i & 1)
        start, length, other, first, head = _entry(queue.index(0))


@gluon.jit(do_not_specialize=_COUNTS)
def dkdv_kernel(qd, kd, vd, dod, SLOPES, STATS, DK, DV, TILES, COUNTER, dk_stride, total, plane, heads, group_size, group, left,
                right, scale, softcap, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
                CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr):
    """DK and DV, one key tile and key head at a time, over all query heads that share the key head."""
    STATS_S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(qd.dtype, [STAGES * PLANES, 1, 1, BLOCK_M, DIM], qd.layout)
    do_s = gl.allocate_shared_memory(dod.dtype, [STAGES * PLANES, 1, 1, BLOCK_M, DIM], dod.layout)
    k_s = gl.allocate_shared_memory(kd.dtype, [2 * PLANES, 1, 1, BLOCK_N // 2, DIM], kd.layout)
    v_s = gl.allocate_shared_memory(vd.dtype, [2 * PLANES, 1, 1, BLOCK_N // 2, DIM], vd.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], STATS_S)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], STATS_S)
    queue = gl.allocate_shared_memory(gl.int32, [1, 8], STATS_S)
    k_full = _barriers(1, 1)
    k_empty = _barriers(1, 2)
    q_full = _barriers(STAGES, 1)
    q_empty = _barriers(STAGES, 2)
    do_full = _barriers(STAGES, 1)
    do_empty = _barriers(STAGES, 2)
    gl.warp_specialize([
        (_dkdv_consumer, (0, q_s, k_s, v_s, do_s, lse_s, delta_s, queue, k_full, k_empty, q_full, q_empty, do_full, do_empty,
                          SLOPES, DK, DV, dk_stride, group_size, left, 0 if CAUSAL else right, scale, softcap, BLOCK_M,
                          BLOCK_N, DIM, STAGES, CAUSAL, WINDOW, SOFTCAP, ALIBI)),
        (_dkdv_consumer, (1, q_s, k_s, v_s, do_s, lse_s, delta_s, queue, k_full, k_empty, q_full, q_empty, do_full, do_empty,
                          SLOPES, DK, DV, dk_stride, group_size, left, 0 if CAUSAL else right, scale, softcap, BLOCK_M,
                          BLOCK_N, DIM, STAGES, CAUSAL, WINDOW, SOFTCAP, ALIBI)),
        (_dkdv_producer, (qd, kd, vd, dod, q_s, k_s, v_s, do_s, lse_s, delta_s, queue, k_full, k_empty, q_full, q_empty,
                          do_full, do_empty, STATS, TILES, COUNTER, PLANES * DIM, PLANES * DIM, PLANES * DIM, PLANES * DIM,
                          total, plane, heads, group_size, group, left, 0 if CAUSAL else right, BLOCK_M, BLOCK_N, STAGES, 1,
                          CAUSAL, WINDOW, PLANES, PLANES)),
    ], [4, 1], [232, 40])
