"""The backward of attention on Hopper, float16 and bfloat16, head_dim up to 256: one kernel for dq, one for dk and dv."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from ..sm90.pipeline import (
    _COUNTS,
    LOG2E,
    _barriers,
    _biased,
    _bytes,
    _capped,
    _claim,
    _column,
    _derivative,
    _entry,
    _fields,
    _first_tile,
    _follow,
    _inside,
    _key_bounds,
    _key_tiles,
    _let_follow,
    _load,
    _parts,
    _post,
    _queue,
    _ring,
    _start_scores,
    _start_sums,
    _store,
    _store_tile,
    _tile,
    _wait_sums,
    _zeros,
)


@gluon.jit
def _dq_producer(
    rings,
    read,
    left,
    right,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    qd, kd, vd, dod, TILES, COUNTER, q_head, k_head, v_head, do_head, heads, group_size, group = (
        read
    )
    t = gl.program_id(0)
    i = 0
    c = 0
    _follow(c)
    _let_follow(c)  # in this order: when the next kernel begins, what ran before this one has ended
    count = gl.load(TILES)
    total_tiles = count * heads
    while t >= 0:
        tile, head = _tile(TILES, t, count, total_tiles, group)
        start, length, other_start, other, first = _fields(tile)
        qs = i % Q_STAGES
        mbarrier.wait(q_empty.index(qs), ((i // Q_STAGES) & 1) ^ 1)
        _post(queue.index(i % 2), tile, t, total_tiles, head)
        if t < total_tiles:
            mbarrier.expect(
                q_full.index(qs), CONSUMERS * (_bytes(q_s, PARTS) + _bytes(do_s, PARTS_V))
            )
            for w in gl.static_range(CONSUMERS):
                row = first + w * (BLOCK_M // CONSUMERS)
                slot = qs * CONSUMERS + w
                _load(
                    qd,
                    start,
                    length,
                    row,
                    _column(head, q_head, q_s),
                    q_full.index(qs),
                    q_s,
                    slot,
                    PARTS,
                )
                _load(
                    dod,
                    start,
                    length,
                    row,
                    _column(head, do_head, do_s),
                    q_full.index(qs),
                    do_s,
                    slot,
                    PARTS_V,
                )
            t = _claim(COUNTER, total_tiles)
            k_column = _column(head // group_size, k_head, k_s)
            v_column = _column(head // group_size, v_head, v_s)
            tiles = _key_tiles(first, length, other, right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
            for j in range(
                tiles - 1, _first_tile(first, length, other, left, tiles, BLOCK_N, WINDOW) - 1, -1
            ):
                stage = c % STAGES
                phase = ((c // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), _bytes(k_s, PARTS))
                _load(
                    kd,
                    other_start,
                    other,
                    j * BLOCK_N,
                    k_column,
                    k_full.index(stage),
                    k_s,
                    stage,
                    PARTS,
                )
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), _bytes(v_s, PARTS_V))
                _load(
                    vd,
                    other_start,
                    other,
                    j * BLOCK_N,
                    v_column,
                    v_full.index(stage),
                    v_s,
                    stage,
                    PARTS_V,
                )
                c += 1
        else:
            mbarrier.arrive(q_full.index(qs), count=1)
            t = -1
        i += 1


@gluon.jit
def _scores(a, ring, full, c, PARTS: gl.constexpr, LAYOUT: gl.constexpr, STAGES: gl.constexpr):
    """Start a @ b^T with tile c of a ring, as soon as it is there."""
    mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)
    return _start_scores(a, ring, c % STAGES, PARTS, LAYOUT)


@gluon.jit
def _pass_over(tiles, a_full, a_empty, b_full, b_empty, c, STAGES: gl.constexpr):
    """Give back tiles that this warpgroup has no use for; where the ring then stands."""
    for _ in range(tiles):
        stage = c % STAGES
        phase = (c // STAGES) & 1
        mbarrier.wait(a_full.index(stage), phase)
        mbarrier.arrive(a_empty.index(stage), count=1)
        mbarrier.wait(b_full.index(stage), phase)
        mbarrier.arrive(b_empty.index(stage), count=1)
        c += 1
    return c


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
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT_S: gl.constexpr,
    LAYOUT_O: gl.constexpr,
):
    """Key tile c."""
    stage = c % STAGES
    x = _scores(q, k_s, k_full, c, PARTS, LAYOUT_S, STAGES)
    dp = _scores(do, v_s, v_full, c, PARTS_V, LAYOUT_S, STAGES)
    x = warpgroup_mma_wait(PARTS_V, deps=(x,))
    capped, factor = _capped(x, scale, softcap, SOFTCAP)
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
    ds = gl.convert_layout(ds.to(k_s.dtype), gl.DotOperandLayout(0, LAYOUT_O, 2))
    dq = _wait_sums(0, _start_sums(ds, k_s, stage, dq, PARTS), ds, PARTS)
    mbarrier.arrive(k_empty.index(stage), count=1)
    return dq


@gluon.jit
def _dq_consumer(
    w: gl.constexpr,
    rings,
    written,
    left,
    right,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    DIM_V: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    HAS_DLSE: gl.constexpr,
):
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LAYOUT_OUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_DV, BLOCK_DV // 8], [4, 1], [1, 0]
    )
    q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty = rings
    (
        dqd,
        SLOPES,
        OUT,
        LSE,
        DLSE,
        STATS,
        out_stride,
        dlse_stride,
        dlse_head,
        total,
        plane,
        scale,
        softcap,
    ) = written
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT_S))
    i = 0
    c = 0
    _follow(c)
    mbarrier.wait(q_full.index(0), 0)
    start, length, other, first, head = _entry(queue.index(0))
    while length > 0:
        slot = (i % Q_STAGES) * CONSUMERS + w
        q = _parts(q_s, slot, PARTS)
        do = _parts(do_s, slot, PARTS_V)
        shift = other - length
        row = first + w * ROWS
        query = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_S))
        inside = query < length
        place = head.to(gl.int64) * total + start + query
        # delta = sum(out * dout) - dlse, a row each; queries beyond the row read zeros.
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_OUT))
        cols = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, LAYOUT_OUT))
        delta = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT_S))
        for p in gl.static_range(PARTS_V):
            out = gl.load(
                OUT
                + (start + rows)[:, None].to(gl.int64) * out_stride
                + (head * DIM_V + p * BLOCK_DV + cols)[None, :],
                mask=_inside(rows, length, cols, DIM_V - p * BLOCK_DV, BLOCK_DV),
                other=0.0,
            )
            part = gl.sum(out.to(gl.float32) * do[p].load(LAYOUT_OUT).to(gl.float32), 1)
            delta += gl.convert_layout(part, gl.SliceLayout(1, LAYOUT_S))
        if HAS_DLSE:
            delta -= gl.load(
                DLSE + (start + query).to(gl.int64) * dlse_stride + head.to(gl.int64) * dlse_head,
                mask=inside,
                other=0.0,
            )
        lse = gl.load(LSE + place, mask=inside, other=0.0) * LOG2E
        gl.store(STATS + place, lse, mask=inside)
        gl.store(STATS + plane + place, delta, mask=inside)
        if Q_STAGES > 1 and i > 0:
            # By now the tile before has left the shared memory.
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index((i - 1) % Q_STAGES), count=1)
        own = query + shift
        slope = gl.load(SLOPES + head) * LOG2E if ALIBI else 0.0
        # Tiles behind this warpgroup's last key are passed over, and all where it has no queries.
        tiles = _key_tiles(first, length, other, right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
        low = _first_tile(first, length, other, left, tiles, BLOCK_N, WINDOW)
        most = low
        if row < length:
            most = gl.maximum(
                _key_tiles(row, length, other, right, ROWS, BLOCK_N, CAUSAL, WINDOW), low
            )
        c = _pass_over(tiles - most, k_full, k_empty, v_full, v_empty, c, STAGES)
        limit, full = _key_bounds(row + shift, own, other, right, most, BLOCK_N, CAUSAL, WINDOW)
        # Tiles before `inner` begin before the first key of some query.
        inner = 0
        if WINDOW:
            inner = gl.cdiv(gl.maximum(row + ROWS - 1 + shift - left, 0), BLOCK_N)
        dq = _zeros(ROWS, PARTS, LAYOUT_O)
        for j in range(most - 1, low - 1, -1):
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
                PARTS,
                PARTS_V,
                STAGES,
                LAYOUT_S,
                LAYOUT_O,
            )
            c += 1
        for p in gl.static_range(PARTS):
            q[p].store((dq[p] * _derivative(scale, softcap, SOFTCAP)).to(q_s.dtype))
        fence_async_shared()
        _store(dqd, start, length, row, _column(head, DIM, q_s), q_s, slot, PARTS)
        if Q_STAGES == 1:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(0), count=1)
        i += 1
        mbarrier.wait(q_full.index(i % Q_STAGES), (i // Q_STAGES) & 1)
        start, length, other, first, head = _entry(queue.index(i % 2))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=_COUNTS)
def dq_kernel(
    qd,
    kd,
    vd,
    dod,
    dqd,
    SLOPES,
    OUT,
    LSE,
    DLSE,
    STATS,
    TILES,
    COUNTER,
    q_head,
    k_head,
    v_head,
    do_head,
    out_stride,
    dlse_stride,
    dlse_head,
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
    BLOCK_D: gl.constexpr,
    DIM_V: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    HAS_DLSE: gl.constexpr,
):
    """dQ, by its descriptor, and STATS (2, heads, total) for the kernel of dK and dV: the LSE in base 2, and delta."""
    q_s = _ring(qd, CONSUMERS * Q_STAGES * PARTS)
    do_s = _ring(dod, CONSUMERS * Q_STAGES * PARTS_V)
    k_s = _ring(kd, STAGES * PARTS)
    v_s = _ring(vd, STAGES * PARTS_V)
    queue = _queue()
    q_full = _barriers(Q_STAGES, 1)
    q_empty = _barriers(Q_STAGES, CONSUMERS)
    k_full = _barriers(STAGES, 1)
    k_empty = _barriers(STAGES, CONSUMERS)
    v_full = _barriers(STAGES, 1)
    v_empty = _barriers(STAGES, CONSUMERS)
    rings = q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty
    read = (
        qd,
        kd,
        vd,
        dod,
        TILES,
        COUNTER,
        q_head,
        k_head,
        v_head,
        do_head,
        heads,
        group_size,
        group,
    )
    written = (
        dqd,
        SLOPES,
        OUT,
        LSE,
        DLSE,
        STATS,
        out_stride,
        dlse_stride,
        dlse_head,
        total,
        plane,
        scale,
        softcap,
    )
    right = 0 if CAUSAL else right
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _dq_consumer,
                    (
                        0,
                        rings,
                        written,
                        left,
                        right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM,
                        BLOCK_D,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HAS_DLSE,
                    ),
                ),
                (
                    _dq_consumer,
                    (
                        1,
                        rings,
                        written,
                        left,
                        right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM,
                        BLOCK_D,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HAS_DLSE,
                    ),
                ),
                (
                    _dq_producer,
                    (
                        rings,
                        read,
                        left,
                        right,
                        BLOCK_M,
                        BLOCK_N,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (
                    _dq_consumer,
                    (
                        0,
                        rings,
                        written,
                        left,
                        right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM,
                        BLOCK_D,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HAS_DLSE,
                    ),
                ),
                (
                    _dq_consumer,
                    (
                        1,
                        rings,
                        written,
                        left,
                        right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM,
                        BLOCK_D,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HAS_DLSE,
                    ),
                ),
                (
                    _dq_consumer,
                    (
                        2,
                        rings,
                        written,
                        left,
                        right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM,
                        BLOCK_D,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HAS_DLSE,
                    ),
                ),
                (
                    _dq_producer,
                    (
                        rings,
                        read,
                        left,
                        right,
                        BLOCK_M,
                        BLOCK_N,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                    ),
                ),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )


@gluon.jit
def _query_tiles(
    first,
    length,
    other,
    left,
    right,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """The query tiles, from low up to high, that attend the keys from `first` on."""
    low = 0
    end = other
    if CAUSAL or WINDOW:
        low = gl.maximum(first + other - length - right, 0) // BLOCK_M
    if WINDOW:
        end = gl.minimum(other, first + BLOCK_N + other - length + left)
    return low, gl.maximum(gl.cdiv(end, BLOCK_M), low)


@gluon.jit
def _dkdv_producer(
    rings,
    read,
    left,
    right,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
    K_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):
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
    ) = rings
    (
        qd,
        kd,
        vd,
        dod,
        STATS,
        TILES,
        COUNTER,
        q_head,
        k_head,
        v_head,
        do_head,
        total,
        plane,
        heads,
        group_size,
        group,
    ) = read
    LAYOUT_STATS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    offs_m = gl.arange(0, BLOCK_M, LAYOUT_STATS)
    count = gl.load(TILES)
    total_tiles = count * (heads // group_size)
    t = gl.program_id(0)
    i = 0
    c = 0
    while t >= 0:
        tile, head = _tile(TILES, t, count, total_tiles, group)
        start, length, other_start, other, first = _fields(tile)
        ks = i % K_STAGES
        mbarrier.wait(k_empty.index(ks), ((i // K_STAGES) & 1) ^ 1)
        _post(queue.index(i % queue.shape[0]), tile, t, total_tiles, head)
        if t < total_tiles:
            mbarrier.expect(
                k_full.index(ks), CONSUMERS * (_bytes(k_s, PARTS) + _bytes(v_s, PARTS_V))
            )
            for w in gl.static_range(CONSUMERS):
                row = first + w * (BLOCK_N // CONSUMERS)
                slot = ks * CONSUMERS + w
                _load(
                    kd,
                    start,
                    length,
                    row,
                    _column(head, k_head, k_s),
                    k_full.index(ks),
                    k_s,
                    slot,
                    PARTS,
                )
                _load(
                    vd,
                    start,
                    length,
                    row,
                    _column(head, v_head, v_s),
                    k_full.index(ks),
                    v_s,
                    slot,
                    PARTS_V,
                )
            t = _claim(COUNTER + 1, total_tiles)
            _follow(i)  # the statistics come from the kernel of dQ
            low, high = _query_tiles(
                first, length, other, left, right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW
            )
            for h in range(head * group_size, head * group_size + group_size):
                stats = STATS + h.to(gl.int64) * total + other_start
                for j in range(low, high):
                    stage = c % STAGES
                    phase = ((c // STAGES) & 1) ^ 1
                    query = j * BLOCK_M + offs_m
                    # Beyond the row the statistics are 0, and so are q and dout: such queries add nothing.
                    mbarrier.wait(q_empty.index(stage), phase)
                    async_copy.async_copy_global_to_shared(
                        lse_s.index(stage), stats + query, query < other
                    )
                    async_copy.mbarrier_arrive(q_full.index(stage))
                    mbarrier.expect(q_full.index(stage), _bytes(q_s, PARTS))
                    _load(
                        qd,
                        other_start,
                        other,
                        j * BLOCK_M,
                        _column(h, q_head, q_s),
                        q_full.index(stage),
                        q_s,
                        stage,
                        PARTS,
                    )
                    mbarrier.wait(do_empty.index(stage), phase)
                    async_copy.async_copy_global_to_shared(
                        delta_s.index(stage), stats + plane + query, query < other
                    )
                    async_copy.mbarrier_arrive(do_full.index(stage))
                    mbarrier.expect(do_full.index(stage), _bytes(do_s, PARTS_V))
                    _load(
                        dod,
                        other_start,
                        other,
                        j * BLOCK_M,
                        _column(h, do_head, do_s),
                        do_full.index(stage),
                        do_s,
                        stage,
                        PARTS_V,
                    )
                    c += 1
        else:
            _follow(i)
            mbarrier.arrive(k_full.index(ks), count=1)
            t = -1
        i += 1


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
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    DK: gl.constexpr,
    DV: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT_S: gl.constexpr,
):
    """Query tile c, from whose first query on the row has `other`; scores lie keys by queries."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT_S, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT_S)
    stage = c % STAGES
    x = _scores(k, q_s, q_full, c, PARTS, LAYOUT_S, STAGES)
    if DK:
        dp = _scores(v, do_s, do_full, c, PARTS_V, LAYOUT_S, STAGES)
    lse = lse_s.index(stage).load(COLUMN)
    x = warpgroup_mma_wait(PARTS_V if DK else 0, deps=(x,))
    if ALIBI:  # queries behind the row have no scores, and so no bias
        lse = gl.where(offs_m < other, lse, float("inf"))
    capped, factor = _capped(x, scale, softcap, SOFTCAP)
    x, factor = _biased(capped, factor, slope, own, offs_m, ALIBI)
    p = gl.exp2(x * factor - lse[None, :])
    if masked:
        p = gl.where(offs_m[None, :] >= (own - right)[:, None], p, 0.0)
        if WINDOW:
            p = gl.where(offs_m[None, :] <= (own + left)[:, None], p, 0.0)
    if DV:
        if not DK:
            mbarrier.wait(do_full.index(stage), (c // STAGES) & 1)
        p16 = gl.convert_layout(p.to(q_s.dtype), OPERAND)
        dv = _start_sums(p16, do_s, stage, dv, PARTS_V)
    if DK:
        if SOFTCAP:
            p *= 1.0 - capped * capped
        delta = delta_s.index(stage).load(COLUMN)
        dp = warpgroup_mma_wait(PARTS_V if DV else 0, deps=(dp,))
        ds = gl.convert_layout((p * (dp - delta[None, :])).to(q_s.dtype), OPERAND)
        dk = _start_sums(ds, q_s, stage, dk, PARTS)
    if DV:
        dv = _wait_sums(PARTS if DK else 0, dv, p16, PARTS_V)
    mbarrier.arrive(do_empty.index(stage), count=1)
    if DK:
        dk = _wait_sums(0, dk, ds, PARTS)
    mbarrier.arrive(q_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _dkdv_consumer(
    w: gl.constexpr,
    rings,
    written,
    left,
    right,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    DIM_V: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    HAS_DK: gl.constexpr,
    HAS_DV: gl.constexpr,
    STAGES: gl.constexpr,
    K_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    HELD: gl.constexpr,
    PASS: gl.constexpr,
):
    ROWS: gl.constexpr = BLOCK_N // CONSUMERS
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LAYOUT_DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LAYOUT_DV: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    LAYOUT_STORE: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_D, BLOCK_D // 8], [4, 1], [1, 0]
    )
    LAYOUT_STORE_V: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_DV, BLOCK_DV // 8], [4, 1], [1, 0]
    )
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
    ) = rings
    DK, DV, SLOPES, dk_stride, dv_stride, group_size, scale, softcap = written
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT_S))
    i = 0
    c = 0
    mbarrier.wait(k_full.index(0), 0)
    start, length, other, first, head = _entry(queue.index(0))
    while length > 0:
        k = _parts(k_s, (i % K_STAGES) * CONSUMERS + w, PARTS)
        v = _parts(v_s, (i % K_STAGES) * CONSUMERS + w, PARTS_V)
        if HELD:
            k = (k[0].load(gl.DotOperandLayout(0, LAYOUT_S, 2)),)
            v = (v[0].load(gl.DotOperandLayout(0, LAYOUT_S, 2)),)
        low, high = _query_tiles(
            first, length, other, left, right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW
        )
        row = first + w * ROWS
        # Where each key stands among the queries, and the tiles, from `full` up to `end`, of which every query attends all keys
        # of this warpgroup; before `begin` and from `stop` on none attends any.
        own = row + (other - length) + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_S))
        begin = low
        stop = high
        if PASS:
            begin, stop = _query_tiles(
                row, length, other, left, right, BLOCK_M, ROWS, CAUSAL, WINDOW
            )
            begin = gl.where(row < length, gl.minimum(begin, high), high)
            if WINDOW:
                stop = gl.maximum(gl.minimum(stop, high), begin)
            else:
                stop = high
        full = begin
        if CAUSAL or WINDOW:
            full = gl.maximum(
                gl.minimum(
                    gl.cdiv(gl.maximum(row + ROWS - 1 + other - length - right, 0), BLOCK_M), high
                ),
                begin,
            )
        end = gl.maximum(row + other - length + left + 1, 0) // BLOCK_M
        dk = _zeros(ROWS, PARTS if HAS_DK else 0, LAYOUT_DK)
        dv = _zeros(ROWS, PARTS_V if HAS_DV else 0, LAYOUT_DV)
        for g in range(group_size):
            slope = gl.load(SLOPES + head * group_size + g) * LOG2E if ALIBI else 0.0
            c = _pass_over(begin - low, q_full, q_empty, do_full, do_empty, c, STAGES)
            if WINDOW:
                for j in range(begin, stop):
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
                        PARTS,
                        PARTS_V,
                        HAS_DK,
                        HAS_DV,
                        STAGES,
                        LAYOUT_S,
                    )
                    c += 1
                c = _pass_over(high - stop, q_full, q_empty, do_full, do_empty, c, STAGES)
            else:
                if CAUSAL:
                    for j in range(begin, full):
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
                            PARTS,
                            PARTS_V,
                            HAS_DK,
                            HAS_DV,
                            STAGES,
                            LAYOUT_S,
                        )
                        c += 1
                for _ in range(full, stop):
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
                        PARTS,
                        PARTS_V,
                        HAS_DK,
                        HAS_DV,
                        STAGES,
                        LAYOUT_S,
                    )
                    c += 1
        mbarrier.arrive(k_empty.index(i % K_STAGES), count=1)
        if HAS_DK:
            place = start.to(gl.int64) * dk_stride + head * DIM
            for p in gl.static_range(PARTS):
                _store_tile(
                    DK + place + p * BLOCK_D,
                    dk[p] * _derivative(scale, softcap, SOFTCAP),
                    row,
                    length,
                    dk_stride,
                    DIM - p * BLOCK_D,
                    LAYOUT_STORE,
                )
        if HAS_DV:
            place = start.to(gl.int64) * dv_stride + head * DIM_V
            for p in gl.static_range(PARTS_V):
                _store_tile(
                    DV + place + p * BLOCK_DV,
                    dv[p],
                    row,
                    length,
                    dv_stride,
                    DIM_V - p * BLOCK_DV,
                    LAYOUT_STORE_V,
                )
        i += 1
        mbarrier.wait(k_full.index(i % K_STAGES), (i // K_STAGES) & 1)
        start, length, other, first, head = _entry(queue.index(i % 2))


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
    q_head,
    k_head,
    v_head,
    do_head,
    dk_stride,
    dv_stride,
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
    BLOCK_D: gl.constexpr,
    DIM_V: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    HAS_DK: gl.constexpr,
    HAS_DV: gl.constexpr,
    STAGES: gl.constexpr,
    K_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    HELD: gl.constexpr,
    PASS: gl.constexpr,
):
    """DK and DV, or one of them, one key tile and key head at a time, over all query heads that share the key head.

    HELD: keys and values stay in registers, which spares the shared memory half of its reads for the scores. PASS: a warpgroup
    passes over tiles of which it needs nothing.
    """
    STATS_S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = _ring(qd, STAGES * PARTS)
    do_s = _ring(dod, STAGES * PARTS_V)
    k_s = _ring(kd, CONSUMERS * K_STAGES * PARTS)
    v_s = _ring(vd, CONSUMERS * K_STAGES * PARTS_V)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], STATS_S)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], STATS_S)
    queue = _queue()
    k_full = _barriers(K_STAGES, 1)
    k_empty = _barriers(K_STAGES, CONSUMERS)
    q_full = _barriers(STAGES, 1)
    q_empty = _barriers(STAGES, CONSUMERS)
    do_full = _barriers(STAGES, 1)
    do_empty = _barriers(STAGES, CONSUMERS)
    rings = (
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
    )
    read = (
        qd,
        kd,
        vd,
        dod,
        STATS,
        TILES,
        COUNTER,
        q_head,
        k_head,
        v_head,
        do_head,
        total,
        plane,
        heads,
        group_size,
        group,
    )
    written = DK, DV, SLOPES, dk_stride, dv_stride, group_size, scale, softcap
    right = 0 if CAUSAL else right
    if CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _dkdv_consumer,
                    (
                        0,
                        rings,
                        written,
                        left,
                        right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM,
                        BLOCK_D,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        HAS_DK,
                        HAS_DV,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HELD,
                        PASS,
                    ),
                ),
                (
                    _dkdv_consumer,
                    (
                        1,
                        rings,
                        written,
                        left,
                        right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM,
                        BLOCK_D,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        HAS_DK,
                        HAS_DV,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HELD,
                        PASS,
                    ),
                ),
                (
                    _dkdv_producer,
                    (
                        rings,
                        read,
                        left,
                        right,
                        BLOCK_M,
                        BLOCK_N,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                    ),
                ),
            ],
            [4, 1],
            [240, 24],
        )
    elif CONSUMERS == 3:
        gl.warp_specialize(
            [
                (
                    _dkdv_consumer,
                    (
                        0,
                        rings,
                        written,
                        left,
                        right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM,
                        BLOCK_D,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        HAS_DK,
                        HAS_DV,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HELD,
                        PASS,
                    ),
                ),
                (
                    _dkdv_consumer,
                    (
                        1,
                        rings,
                        written,
                        left,
                        right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM,
                        BLOCK_D,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        HAS_DK,
                        HAS_DV,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HELD,
                        PASS,
                    ),
                ),
                (
                    _dkdv_consumer,
                    (
                        2,
                        rings,
                        written,
                        left,
                        right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM,
                        BLOCK_D,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        HAS_DK,
                        HAS_DV,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HELD,
                        PASS,
                    ),
                ),
                (
                    _dkdv_producer,
                    (
                        rings,
                        read,
                        left,
                        right,
                        BLOCK_M,
                        BLOCK_N,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                    ),
                ),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
