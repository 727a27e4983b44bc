"""The backward of attention on Hopper, float16 and bfloat16, head_dim up to 128: one kernel for dq, one for dk and dv."""
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, warpgroup_mma, warpgroup_mma_wait

from .hopper import (
    _COUNTS,
    LOG2E,
    _barriers,
    _biased,
    _capped,
    _claim,
    _column,
    _derivative,
    _entry,
    _first_tile,
    _inside,
    _key_bounds,
    _key_tiles,
    _load_planes,
    _post,
    _ring,
    _rows,
    _store_tile,
    _tile,
)


@gluon.jit
def _dq_producer(qd, kd, vd, dod, q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, TILES,
                 COUNTER, q_head, k_head, v_head, do_head, heads, group_size, group, left, right, BLOCK_M: gl.constexpr,
                 BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
                 CAUSAL: gl.constexpr, WINDOW: gl.constexpr, PLANES: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    count = gl.load(TILES)
    total_tiles = count * heads
    t = gl.program_id(0)
    i = 0
    c = 0
    while t >= 0:
        tile, head = _tile(TILES, t, count, total_tiles, group)
        start = gl.load(tile)
        length = gl.load(tile + 1)
        other_start = gl.load(tile + 2)
        other = gl.load(tile + 3)
        first = gl.load(tile + 4)
        qs = i % Q_STAGES
        mbarrier.wait(q_empty.index(qs), ((i // Q_STAGES) & 1) ^ 1)
        _post(queue.index(qs), tile, t, total_tiles, head, LAYOUT)
        if t < total_tiles:
            mbarrier.expect(q_full.index(qs), BLOCK_M * BLOCK_D * 4 * PLANES)
            for w in gl.static_range(2):
                row = first + w * (BLOCK_M // 2)
                _load_planes(qd, start, length, row, _column(head, q_head, q_s), q_full.index(qs), q_s, qs * 2 + w, PLANES)
                _load_planes(dod, start, length, row, _column(head, do_head, do_s), q_full.index(qs), do_s, qs * 2 + w, PLANES)
            t = _claim(COUNTER, total_tiles)
            k_column = _column(head // group_size, k_head, k_s)
            v_column = _column(head // group_size, v_head, v_s)
            tiles = _key_tiles(first, length, other, right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
            for j in range(tiles - 1, _first_tile(first, length, other, left, tiles, BLOCK_N, WINDOW) - 1, -1):
                stage = c % STAGES
                phase = ((c // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), BLOCK_N * BLOCK_D * 2 * PLANES)
                _load_planes(kd, other_start, other, j * BLOCK_N, k_column, k_full.index(stage), k_s, stage, PLANES)
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), BLOCK_N * BLOCK_D * 2 * PLANES)
                _load_planes(vd, other_start, other, j * BLOCK_N, v_column, v_full.index(stage), v_s, stage, PLANES)
                c += 1
        else:
            mbarrier.arrive(q_full.index(qs), count=1)
            t = -1
        i += 1


@gluon.jit
def _scores(a, b_s, full, c, LAYOUT: gl.constexpr, STAGES: gl.constexpr):
    """Start a @ b^T with tile c of a ring, as soon as it is there."""
    ROWS: gl.constexpr = a.shape[0]
    COLUMNS: gl.constexpr = b_s.shape[3]
    stage = c % STAGES
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    mbarrier.wait(full.index(stage), (c // STAGES) & 1)
    return warpgroup_mma(a, _rows(b_s.index(stage)).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _dq_step(q, do, k_s, v_s, k_full, k_empty, v_full, v_empty, dq, lse, delta, c, limit, own, left, offs_n, scale,
             softcap, slope, masked, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr,
             STAGES: gl.constexpr, LAYOUT_S: gl.constexpr, LAYOUT_O: gl.constexpr):
    """Key tile c."""
    stage = c % STAGES
    x = _scores(q, k_s, k_full, c, LAYOUT_S, STAGES)
    dp = _scores(do, v_s, v_full, c, LAYOUT_S, STAGES)
    x = warpgroup_mma_wait(1, deps=(x, ))
    capped, factor = _capped(x, scale, softcap, SOFTCAP)
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
    ds = gl.convert_layout(ds.to(k_s.dtype), gl.DotOperandLayout(0, LAYOUT_O, 2))
    dq = warpgroup_mma(ds, _rows(k_s.index(stage)), dq, is_async=True)
    dq, ds = warpgroup_mma_wait(0, deps=(dq, ds))
    mbarrier.arrive(k_empty.index(stage), count=1)
    return dq


@gluon.jit
def _dq_consumer(w: gl.constexpr, q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, SLOPES,
                 OUT, LSE, DLSE, STATS, DQ, out_stride, dq_stride, dlse_stride, dlse_head, total, plane, left, right, scale,
                 softcap, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, BLOCK_D: gl.constexpr,
                 STAGES: gl.constexpr, Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
                 SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, HAS_DLSE: gl.constexpr, HELD: gl.constexpr):
    ROWS: gl.constexpr = BLOCK_M // 2
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LAYOUT_STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT_S))
    i = 0
    c = 0
    mbarrier.wait(q_full.index(0), 0)
    start, length, other, first, head = _entry(queue.index(0))
    while length > 0:
        q = _rows(q_s.index((i % Q_STAGES) * 2 + w))
        do = _rows(do_s.index((i % Q_STAGES) * 2 + w))
        shift = other - length
        tiles = _key_tiles(first, length, other, right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
        row = first + w * ROWS
        # delta = sum(out * dout) - dlse, a row each; queries beyond the row read zeros.
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_STORE))
        cols = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LAYOUT_STORE))
        out = gl.load(OUT + (start + rows)[:, None].to(gl.int64) * out_stride + (head * DIM + cols)[None, :],
                      mask=_inside(rows, length, cols, DIM, BLOCK_D), other=0.0)
        delta = gl.sum(out.to(gl.float32) * do.load(LAYOUT_STORE).to(gl.float32), 1)
        delta = gl.convert_layout(delta, gl.SliceLayout(1, LAYOUT_S))
        query = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_S))
        inside = query < length
        if HAS_DLSE:
            delta -= gl.load(DLSE + (start + query).to(gl.int64) * dlse_stride + head.to(gl.int64) * dlse_head,
                             mask=inside, other=0.0)
        place = head.to(gl.int64) * total + start + query
        lse = gl.load(LSE + place, mask=inside, other=0.0) * LOG2E
        gl.store(STATS + place, lse, mask=inside)
        gl.store(STATS + plane + place, delta, mask=inside)
        own = query + shift
        slope = gl.load(SLOPES + head) * LOG2E if ALIBI else 0.0
        limit, full = _key_bounds(row + shift, own, other, right, tiles, BLOCK_N, CAUSAL, WINDOW)
        if HELD:
            q = q.load(gl.DotOperandLayout(0, LAYOUT_S, 2))
            do = do.load(gl.DotOperandLayout(0, LAYOUT_S, 2))
        dq = gl.zeros([ROWS, BLOCK_D], gl.float32, LAYOUT_O)
        if WINDOW:
            # Tiles before `inner` begin before the first key of some query. One loop over all tiles takes fewer registers.
            inner = gl.cdiv(gl.maximum(row + ROWS - 1 + shift - left, 0), BLOCK_N)
            for j in range(tiles - 1, _first_tile(first, length, other, left, tiles, BLOCK_N, WINDOW) - 1, -1):
                dq = _dq_step(q, do, k_s, v_s, k_full, k_empty, v_full, v_empty, dq, lse, delta, c, limit - j * BLOCK_N,
                              own - j * BLOCK_N, left, offs_n, scale, softcap, slope, (j >= full) | (j < inner), WINDOW,
                              SOFTCAP, ALIBI, STAGES, LAYOUT_S, LAYOUT_O)
                c += 1
        else:
            for j in range(tiles - 1, full - 1, -1):
                dq = _dq_step(q, do, k_s, v_s, k_full, k_empty, v_full, v_empty, dq, lse, delta, c, limit - j * BLOCK_N, own,
                              left, offs_n, scale, softcap, slope, True, WINDOW, SOFTCAP, ALIBI, STAGES, LAYOUT_S, LAYOUT_O)
                c += 1
            for _ in range(full):
                dq = _dq_step(q, do, k_s, v_s, k_full, k_empty, v_full, v_empty, dq, lse, delta, c, limit, own, left, offs_n,
                              scale, softcap, slope, False, WINDOW, SOFTCAP, ALIBI, STAGES, LAYOUT_S, LAYOUT_O)
                c += 1
        mbarrier.arrive(q_empty.index(i % Q_STAGES), count=1)
        _store_tile(DQ + start.to(gl.int64) * dq_stride + head * DIM, dq * _derivative(scale, softcap, SOFTCAP), row, length,
                    dq_stride, DIM, LAYOUT_STORE)
        i += 1
        mbarrier.wait(q_full.index(i % Q_STAGES), (i // Q_STAGES) & 1)
        start, length, other, first, head = _entry(queue.index(i % Q_STAGES))


@gluon.jit(do_not_specialize=_COUNTS)
def dq_kernel(qd, kd, vd, dod, SLOPES, OUT, LSE, DLSE, STATS, DQ, TILES, COUNTER, q_head, k_head, v_head, do_head, out_stride,
              dq_stride, dlse_stride, dlse_head, total, plane, heads, group_size, group, left, right, scale, softcap,
              BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
              Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
              ALIBI: gl.constexpr, HAS_DLSE: gl.constexpr, HELD: gl.constexpr):
    """DQ, and STATS (2, heads, total) for the kernel of dK and dV: the LSE in base 2, and delta.

    HELD: queries and their gradients stay in registers, which spares the shared memory half of its reads for the scores.
    """
    q_s = _ring(qd, 2 * Q_STAGES)
    do_s = _ring(dod, 2 * Q_STAGES)
    k_s = _ring(kd, STAGES)
    v_s = _ring(vd, STAGES)
    queue = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = _barriers(Q_STAGES, 1)
    q_empty = _barriers(Q_STAGES, 2)
    k_full = _barriers(STAGES, 1)
    k_empty = _barriers(STAGES, 2)
    v_full = _barriers(STAGES, 1)
    v_empty = _barriers(STAGES, 2)
    gl.warp_specialize([
        (_dq_consumer, (0, q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, SLOPES, OUT,
                        LSE, DLSE, STATS, DQ, out_stride, dq_stride, dlse_stride, dlse_head, total, plane, left,
                        0 if CAUSAL else right, scale, softcap, BLOCK_M, BLOCK_N, DIM, BLOCK_D, STAGES, Q_STAGES, CAUSAL,
                        WINDOW, SOFTCAP, ALIBI, HAS_DLSE, HELD)),
        (_dq_consumer, (1, q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, SLOPES, OUT,
                        LSE, DLSE, STATS, DQ, out_stride, dq_stride, dlse_stride, dlse_head, total, plane, left,
                        0 if CAUSAL else right, scale, softcap, BLOCK_M, BLOCK_N, DIM, BLOCK_D, STAGES, Q_STAGES, CAUSAL,
                        WINDOW, SOFTCAP, ALIBI, HAS_DLSE, HELD)),
        (_dq_producer, (qd, kd, vd, dod, q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                        TILES, COUNTER, q_head, k_head, v_head, do_head, heads, group_size, group, left,
                        0 if CAUSAL else right, BLOCK_M, BLOCK_N, BLOCK_D, STAGES, Q_STAGES, CAUSAL, WINDOW, 1)),
    ], [4, 1], [240, 24])


@gluon.jit
def _query_tiles(first, length, other, left, right, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr,
                 WINDOW: gl.constexpr):
    """The query tiles, from low up to high, that attend the keys from `first` on."""
    low = 0
    end = other
    if CAUSAL or WINDOW:
        low = gl.maximum(first + other - length - right, 0) // BLOCK_M
    if WINDOW:
        end = gl.minimum(other, first + BLOCK_N + other - length + left)
    return low, gl.maximum(gl.cdiv(end, BLOCK_M), low)


@gluon.jit
def _dkdv_producer(qd, kd, vd, dod, q_s, k_s, v_s, do_s, lse_s, delta_s, queue, k_full, k_empty, q_full, q_empty,
                   do_full, do_empty, STATS, TILES, COUNTER, q_head, k_head, v_head, do_head, total, plane, heads,
                   group_size, group, left, right, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr,
                   STAGES: gl.constexpr, K_STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
                   PLANES: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    LAYOUT_STATS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    offs_m = gl.arange(0, BLOCK_M, LAYOUT_STATS)
    count = gl.load(TILES)
    total_tiles = count * (heads // group_size)
    t = gl.program_id(0)
    i = 0
    c = 0
    while t >= 0:
        tile, head = _tile(TILES, t, count, total_tiles, group)
        start = gl.load(tile)
        length = gl.load(tile + 1)
        other_start = gl.load(tile + 2)
        other = gl.load(tile + 3)
        first = gl.load(tile + 4)
        ks = i % K_STAGES
        mbarrier.wait(k_empty.index(ks), ((i // K_STAGES) & 1) ^ 1)
        _post(queue.index(ks), tile, t, total_tiles, head, LAYOUT)
        if t < total_tiles:
            mbarrier.expect(k_full.index(ks), BLOCK_N * BLOCK_D * 4 * PLANES)
            for w in gl.static_range(2):
                row = first + w * (BLOCK_N // 2)
                _load_planes(kd, start, length, row, _column(head, k_head, k_s), k_full.index(ks), k_s, ks * 2 + w, PLANES)
                _load_planes(vd, start, length, row, _column(head, v_head, v_s), k_full.index(ks), v_s, ks * 2 + w, PLANES)
            t = _claim(COUNTER, total_tiles)
            low, high = _query_tiles(first, length, other, left, right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
            for h in range(head * group_size, head * group_size + group_size):
                stats = STATS + h.to(gl.int64) * total + other_start
                for j in range(low, high):
                    stage = c % STAGES
                    phase = ((c // STAGES) & 1) ^ 1
                    query = j * BLOCK_M + offs_m
                    # Beyond the row the statistics are 0, and so are q and dout: such queries add nothing.
                    mbarrier.wait(q_empty.index(stage), phase)
                    async_copy.async_copy_global_to_shared(lse_s.index(stage), stats + query, query < other)
                    async_copy.mbarrier_arrive(q_full.index(stage))
                    mbarrier.expect(q_full.index(stage), BLOCK_M * BLOCK_D * 2 * PLANES)
                    _load_planes(qd, other_start, other, j * BLOCK_M, _column(h, q_head, q_s), q_full.index(stage), q_s, stage,
                                 PLANES)
                    mbarrier.wait(do_empty.index(stage), phase)
                    async_copy.async_copy_global_to_shared(delta_s.index(stage), stats + plane + query, query < other)
                    async_copy.mbarrier_arrive(do_full.index(stage))
                    mbarrier.expect(do_full.index(stage), BLOCK_M * BLOCK_D * 2 * PLANES)
                    _load_planes(dod, other_start, other, j * BLOCK_M, _column(h, do_head, do_s), do_full.index(stage), do_s,
                                 stage, PLANES)
                    c += 1
        else:
            mbarrier.arrive(k_full.index(ks), count=1)
            t = -1
        i += 1


@gluon.jit
def _dkdv_step(k, v, q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty, dk, dv, c, own, other, left, right,
               offs_m, scale, softcap, slope, masked, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr,
               STAGES: gl.constexpr, LAYOUT_S: gl.constexpr, LAYOUT_O: gl.constexpr):
    """Query tile c, from whose first query on the row has `other`; scores lie keys by queries."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT_O, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT_S)
    stage = c % STAGES
    x = _scores(k, q_s, q_full, c, LAYOUT_S, STAGES)
    dp = _scores(v, do_s, do_full, c, LAYOUT_S, STAGES)
    lse = lse_s.index(stage).load(COLUMN)
    x = warpgroup_mma_wait(1, deps=(x, ))
    if ALIBI:  # queries behind the row have no scores, and so no bias
        lse = gl.where(offs_m < other, lse, float("inf"))
    capped, factor = _capped(x, scale, softcap, SOFTCAP)
    x, factor = _biased(capped, factor, slope, own, offs_m, ALIBI)
    p = gl.exp2(x * factor - lse[None, :])
    if masked:
        p = gl.where(offs_m[None, :] >= (own - right)[:, None], p, 0.0)
        if WINDOW:
            p = gl.where(offs_m[None, :] <= (own + left)[:, None], p, 0.0)
    p16 = gl.convert_layout(p.to(q_s.dtype), OPERAND)
    dv = warpgroup_mma(p16, _rows(do_s.index(stage)), dv, is_async=True)
    if SOFTCAP:
        p *= 1.0 - capped * capped
    delta = delta_s.index(stage).load(COLUMN)
    dp = warpgroup_mma_wait(1, deps=(dp, ))
    ds = gl.convert_layout((p * (dp - delta[None, :])).to(q_s.dtype), OPERAND)
    dk = warpgroup_mma(ds, _rows(q_s.index(stage)), dk, is_async=True)
    dv, p16 = warpgroup_mma_wait(1, deps=(dv, p16))
    mbarrier.arrive(do_empty.index(stage), count=1)
    dk, ds = warpgroup_mma_wait(0, deps=(dk, ds))
    mbarrier.arrive(q_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _dkdv_consumer(w: gl.constexpr, q_s, k_s, v_s, do_s, lse_s, delta_s, queue, k_full, k_empty, q_full, q_empty,
                   do_full, do_empty, SLOPES, DK, DV, dk_stride, group_size, left, right, scale, softcap,
                   BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr,
                   K_STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SOFTCAP: gl.constexpr,
                   ALIBI: gl.constexpr, HELD: gl.constexpr):
    ROWS: gl.constexpr = BLOCK_N // 2
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LAYOUT_STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0])
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT_S))
    i = 0
    c = 0
    mbarrier.wait(k_full.index(0), 0)
    start, length, other, first, head = _entry(queue.index(0))
    while length > 0:
        k = _rows(k_s.index((i % K_STAGES) * 2 + w))
        v = _rows(v_s.index((i % K_STAGES) * 2 + w))
        if HELD:
            k = k.load(gl.DotOperandLayout(0, LAYOUT_S, 2))
            v = v.load(gl.DotOperandLayout(0, LAYOUT_S, 2))
        low, high = _query_tiles(first, length, other, left, right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
        row = first + w * ROWS
        # Where each key stands among the queries, and the tiles, from `full` up to `end`, of which every query attends all keys
        # of this warpgroup.
        own = row + (other - length) + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_S))
        full = low
        if CAUSAL or WINDOW:
            full = gl.minimum(gl.cdiv(gl.maximum(row + ROWS - 1 + other - length - right, 0), BLOCK_M), high)
        end = gl.maximum(row + other - length + left + 1, 0) // BLOCK_M
        dk = gl.zeros([ROWS, BLOCK_D], gl.float32, LAYOUT_O)
        dv = gl.zeros([ROWS, BLOCK_D], gl.float32, LAYOUT_O)
        for g in range(group_size):
            slope = gl.load(SLOPES + head * group_size + g) * LOG2E if ALIBI else 0.0
            if WINDOW:
                for j in range(low, high):
                    dk, dv = _dkdv_step(k, v, q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty, dk, dv, c,
                                        own - j * BLOCK_M, other - j * BLOCK_M, left, right, offs_m, scale, softcap, slope,
                                        (j < full) | (j >= end), WINDOW, SOFTCAP, ALIBI, STAGES, LAYOUT_S, LAYOUT_O)
                    c += 1
            else:
                if CAUSAL:
                    for j in range(low, full):
                        dk, dv = _dkdv_step(k, v, q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty, dk, dv, c,
                                            own - j * BLOCK_M, other, left, right, offs_m, scale, softcap, slope, True, WINDOW,
                                            SOFTCAP, ALIBI, STAGES, LAYOUT_S, LAYOUT_O)
                        c += 1
                for j in range(full, high):
                    dk, dv = _dkdv_step(k, v, q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty, dk, dv, c, own,
                                        other, left, right, offs_m, scale, softcap, slope, False, WINDOW, SOFTCAP, ALIBI,
                                        STAGES, LAYOUT_S, LAYOUT_O)
                    c += 1
        mbarrier.arrive(k_empty.index(i % K_STAGES), count=1)
        place = start.to(gl.int64) * dk_stride + head * DIM
        _store_tile(DK + place, dk * _derivative(scale, softcap, SOFTCAP), row, length, dk_stride, DIM, LAYOUT_STORE)
        _store_tile(DV + place, dv, row, length, dk_stride, DIM, LAYOUT_STORE)
        i += 1
        mbarrier.wait(k_full.index(i % K_STAGES), (i // K_STAGES) & 1)
        start, length, other, first, head = _entry(queue.index(i % K_STAGES))


@gluon.jit(do_not_specialize=_COUNTS)
def dkdv_kernel(qd, kd, vd, dod, SLOPES, STATS, DK, DV, TILES, COUNTER, q_head, k_head, v_head, do_head, dk_stride, total,
                plane, heads, group_size, group, left, right, scale, softcap, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
                DIM: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr, K_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
                WINDOW: gl.constexpr, SOFTCAP: gl.constexpr, ALIBI: gl.constexpr, HELD: gl.constexpr):
    """DK and DV, one key tile and key head at a time, over all query heads that share the key head.

    HELD: keys and values stay in registers, which spares the shared memory half of its reads for the scores.
    """
    STATS_S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = _ring(qd, STAGES)
    do_s = _ring(dod, STAGES)
    k_s = _ring(kd, 2 * K_STAGES)
    v_s = _ring(vd, 2 * K_STAGES)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], STATS_S)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], STATS_S)
    queue = gl.allocate_shared_memory(gl.int32, [K_STAGES, 8], STATS_S)
    k_full = _barriers(K_STAGES, 1)
    k_empty = _barriers(K_STAGES, 2)
    q_full = _barriers(STAGES, 1)
    q_empty = _barriers(STAGES, 2)
    do_full = _barriers(STAGES, 1)
    do_empty = _barriers(STAGES, 2)
    gl.warp_specialize([
        (_dkdv_consumer, (0, q_s, k_s, v_s, do_s, lse_s, delta_s, queue, k_full, k_empty, q_full, q_empty, do_full,
                          do_empty, SLOPES, DK, DV, dk_stride, group_size, left, 0 if CAUSAL else right, scale, softcap,
                          BLOCK_M, BLOCK_N, DIM, BLOCK_D, STAGES, K_STAGES, CAUSAL, WINDOW, SOFTCAP, ALIBI, HELD)),
        (_dkdv_consumer, (1, q_s, k_s, v_s, do_s, lse_s, delta_s, queue, k_full, k_empty, q_full, q_empty, do_full,
                          do_empty, SLOPES, DK, DV, dk_stride, group_size, left, 0 if CAUSAL else right, scale, softcap,
                          BLOCK_M, BLOCK_N, DIM, BLOCK_D, STAGES, K_STAGES, CAUSAL, WINDOW, SOFTCAP, ALIBI, HELD)),
        (_dkdv_producer, (qd, kd, vd, dod, q_s, k_s, v_s, do_s, lse_s, delta_s, queue, k_full, k_empty, q_full, q_empty,
                          do_full, do_empty, STATS, TILES, COUNTER, q_head, k_head, v_head, do_head, total, plane, heads,
                          group_size, group, left, 0 if CAUSAL else right, BLOCK_M, BLOCK_N, BLOCK_D, STAGES, K_STAGES,
                          CAUSAL, WINDOW, 1)),
    ], [4, 1], [240, 24])
