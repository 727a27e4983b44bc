"""The forward of attention on Hopper, float16 and bfloat16, head_dim up to 256.

Each consumer issues the next Q K^T before the softmax of the current tile, and they take turns at the tensor cores, so that
the softmax of one runs under the matrix products of the others. Two or three of them share what is read, as what the L2 cache
can give bounds one. Short rows of narrow heads have one consumer a program instead, and three programs a multiprocessor, which
hide each other's waits. The copy engine takes the output away, from where the queries were, while the next tile begins.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma_wait,
)

from ..sm90.pipeline import (
    _COUNTS,
    LN2,
    LOG2E,
    LOWEST,
    _barriers,
    _biased,
    _bytes,
    _capped,
    _claim,
    _column,
    _entry,
    _fields,
    _first_tile,
    _key_bounds,
    _key_tiles,
    _let_follow,
    _load,
    _parts,
    _post,
    _queue,
    _ring,
    _rows,
    _start_scores,
    _start_sums,
    _store,
    _store_tile,
    _tile,
    _wait_sums,
    _zeros,
)


@gluon.jit
def _begin(first, length, BLOCK_M: gl.constexpr):
    """Where a tile of three warpgroups begins, at or before its place in the map: the last of a row ends with the row's last 64.

    So the warpgroups without queries are in the tile with the fewest keys. Two warpgroups would not gain by it.
    """
    if BLOCK_M > 128:
        return first - (gl.cdiv(length, BLOCK_M) * BLOCK_M - gl.cdiv(length, 64) * 64)
    else:
        return first


@gluon.jit
def _forward_producer(
    rings,
    read,
    left,
    right,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PARTS_Q: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Keys of a tile come with the values of the one before, as both are multiplied in one step; the last values come alone.

    The next tile is claimed and looked up before the last keys of this one are waited for, so that nobody waits for that.
    """
    q_s, k_s, v_s, queue, q_full, q_empty, full, empty = rings
    qd, kd, vd, TILES, COUNTER, q_head, k_head, v_head, heads, group_size, group = read
    count = gl.load(TILES)
    total_tiles = count * heads
    t = gl.program_id(0)
    tile, head = _tile(TILES, t, count, total_tiles, group)
    start, length, other_start, other, first = _fields(tile)
    i = 0
    c = 0
    v_start = 0
    v_length = 0
    v_row = 0
    v_column = 0
    while t >= 0:
        qs = i % Q_STAGES
        mbarrier.wait(q_empty.index(qs), ((i // Q_STAGES) & 1) ^ 1)
        _post(queue.index(i % 2), tile, t, total_tiles, head)
        if t < total_tiles:
            first = _begin(first, length, BLOCK_M)
            mbarrier.expect(q_full.index(qs), CONSUMERS * _bytes(q_s, PARTS_Q))
            for w in gl.static_range(CONSUMERS):
                _load(
                    qd,
                    start,
                    length,
                    gl.maximum(first + w * (BLOCK_M // CONSUMERS), 0),
                    _column(head, q_head, q_s),
                    q_full.index(qs),
                    q_s,
                    qs * CONSUMERS + w,
                    PARTS_Q,
                )
            tiles = _key_tiles(first, length, other, right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
            low = _first_tile(first, length, other, left, tiles, BLOCK_N, WINDOW)
            k_start = other_start + 0
            k_length = other + 0
            k_column = _column(head // group_size, k_head, k_s)
            next_v_column = _column(head // group_size, v_head, v_s)
            for j in range(tiles - 1, low - 1, -1):
                if j == low:
                    t = _claim(COUNTER, total_tiles)
                    tile, head = _tile(TILES, t, count, total_tiles, group)
                    start, length, other_start, other, first = _fields(tile)
                stage = c % STAGES
                mbarrier.wait(empty.index(stage), ((c // STAGES) & 1) ^ 1)
                if c > 0:
                    mbarrier.expect(full.index(stage), _bytes(k_s, PARTS) + _bytes(v_s, PARTS_V))
                    _load(
                        vd,
                        v_start,
                        v_length,
                        v_row,
                        v_column,
                        full.index(stage),
                        v_s,
                        stage,
                        PARTS_V,
                    )
                else:
                    mbarrier.expect(full.index(stage), _bytes(k_s, PARTS))
                _load(
                    kd,
                    k_start,
                    k_length,
                    j * BLOCK_N,
                    k_column,
                    full.index(stage),
                    k_s,
                    stage,
                    PARTS,
                )
                v_start = k_start + 0
                v_length = k_length + 0
                v_row = j * BLOCK_N
                v_column = next_v_column + 0
                c += 1
        else:
            if c > 0:
                stage = c % STAGES
                mbarrier.wait(empty.index(stage), ((c // STAGES) & 1) ^ 1)
                mbarrier.expect(full.index(stage), _bytes(v_s, PARTS_V))
                _load(
                    vd, v_start, v_length, v_row, v_column, full.index(stage), v_s, stage, PARTS_V
                )
            mbarrier.arrive(q_full.index(qs), count=1)
            _let_follow(i)  # sooner costs more than it saves
            t = -1
        i += 1


@gluon.constexpr_function
def _turn(kind, w, consumers):
    return f"bar.{kind} {10 + w % consumers}, 256; mov.b32 $0, $1;"


@gluon.jit
def _take_turn(w: gl.constexpr, c, CONSUMERS: gl.constexpr):
    """Wait for this warpgroup's turn at the tensor cores. Named barriers are not in Gluon, so by inline assembly."""
    if CONSUMERS > 1:
        gl.inline_asm_elementwise(_turn("sync", w, CONSUMERS), "=r,r", [c], gl.int32, False, 1)


@gluon.jit
def _pass_turn(w: gl.constexpr, c, CONSUMERS: gl.constexpr):
    if CONSUMERS > 1:
        gl.inline_asm_elementwise(
            _turn("arrive", w + 1, CONSUMERS), "=r,r", [c], gl.int32, False, 1
        )


@gluon.jit
def _partial_sums(y):
    """Row sums that leave the eight columns of a quad of threads unsummed, so that the loop needs no shuffles."""
    return gl.sum(y.reshape([y.shape[0], y.shape[1] // 8, 8]), 1)


@gluon.jit
def _attended(x, limit, own, left, offs_n, WINDOW: gl.constexpr):
    """Scores, -inf behind each query's last key and, with a window, before its first."""
    x = gl.where(limit[:, None] >= offs_n[None, :], x, -float("inf"))
    if WINDOW:
        x = gl.where((own - left)[:, None] <= offs_n[None, :], x, -float("inf"))
    return x


@gluon.jit
def _rescaled(parts, factor, PARTS: gl.constexpr):
    """The parts of an output, each times a factor. Most factors are 1: then the predicate turns the product off."""
    products = ()
    for p in gl.static_range(PARTS):
        products += (
            gl.inline_asm_elementwise(
                "{.reg .pred other; setp.neu.f32 other, $2, 0f3F800000; mov.b32 $0, $1; @other mul.f32 $0, $1, $2;}",
                "=f,f,f",
                [parts[p], factor],
                gl.float32,
                True,
                1,
            ),
        )
    return products


@gluon.jit
def _forward_step(
    w: gl.constexpr,
    q,
    k_s,
    v_s,
    full,
    empty,
    acc,
    y,
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
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT_S: gl.constexpr,
    LAYOUT_O: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Multiply key tile c, and meanwhile finish tile c - 1, whose weights y are still float32, by its values."""
    stage = c % STAGES
    mbarrier.wait(full.index(stage), (c // STAGES) & 1)
    _take_turn(w, c, CONSUMERS)
    x = _start_scores(q, k_s, stage, PARTS, LAYOUT_S)
    p = gl.convert_layout(y.to(v_s.dtype), gl.DotOperandLayout(0, LAYOUT_O, 2))
    acc = _start_sums(p, v_s, stage, acc, PARTS_V)
    _pass_turn(w, c, CONSUMERS)
    x = warpgroup_mma_wait(PARTS_V, deps=(x,))
    x, factor = _capped(x, scale, softcap, SOFTCAP)
    x, factor = _biased(x, factor, slope, own, offs_n, ALIBI)
    if masked:
        x = _attended(x, limit, own, left, offs_n, WINDOW)
    # A maximum that grows by little stays, so that most sums need not be rescaled; weights are at most 2^8.
    top = gl.max(x, 1) * factor
    m_new = gl.where(top > m + 8.0, top, m)
    alpha = gl.exp2(m - m_new)
    y = gl.exp2(x * factor - m_new[:, None])
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + _partial_sums(y)
    acc = _wait_sums(0, acc, p, PARTS_V)
    mbarrier.arrive(empty.index(stage), count=1)
    acc = _rescaled(acc, gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT_O))[:, None], PARTS_V)
    return acc, y, m_new, l


@gluon.jit
def _forward_consumer(
    w: gl.constexpr,
    rings,
    written,
    left,
    right,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    DIM_V: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    THROUGH: gl.constexpr,
    SAME: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    LAYOUT_STORE: gl.constexpr = gl.BlockedLayout(
        [1, 8], [256 // BLOCK_DV, BLOCK_DV // 8], [4, 1], [1, 0]
    )
    q_s, k_s, v_s, queue, q_full, q_empty, full, empty = rings
    od, OUT, LSE, SLOPES, out_stride, total, scale, softcap = written
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT_S))
    i = 0
    c = 0
    if w == CONSUMERS - 1:  # the first one begins
        _pass_turn(w, c, CONSUMERS)
    mbarrier.wait(q_full.index(0), 0)
    start, length, other, first, head = _entry(queue.index(0))
    while length > 0:
        slot = (i % Q_STAGES) * CONSUMERS + w
        q = _parts(q_s, slot, PARTS)
        first = _begin(first, length, BLOCK_M)
        shift = other - length
        tiles = _key_tiles(first, length, other, right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW)
        row = first + w * ROWS
        query = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_S))
        own = query + shift
        slope = gl.load(SLOPES + head) * LOG2E if ALIBI else 0.0
        low = _first_tile(first, length, other, left, tiles, BLOCK_N, WINDOW)
        # Tiles behind this warpgroup's last key are passed over, and all but one where it has no queries.
        end = gl.where(row < 0, row, length)
        most = low + 1
        if row < end:
            most = gl.maximum(
                _key_tiles(row, length, other, right, ROWS, BLOCK_N, CAUSAL, WINDOW), most
            )
        for _ in range(tiles - most):
            mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)
            mbarrier.arrive(empty.index(c % STAGES), count=1)
            _take_turn(w, c, CONSUMERS)
            _pass_turn(w, c, CONSUMERS)
            c += 1
        tiles = most
        # The last key of each query, and the tiles that all queries of this warpgroup attend in full: with rows of one
        # length (and ROWS that divide BLOCK_N) all but the last.
        if SAME:
            limit = query
            whole = tiles - 1
        else:
            limit, whole = _key_bounds(
                row + shift, own, other, right, tiles - 1, BLOCK_N, CAUSAL, WINDOW
            )
        mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)
        _take_turn(w, c, CONSUMERS)
        x = _start_scores(q, k_s, c % STAGES, PARTS, LAYOUT_S)
        _pass_turn(w, c, CONSUMERS)
        if THROUGH and i > 0:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index((i - 1) % Q_STAGES), count=1)
        x = warpgroup_mma_wait(0, deps=(x,))
        mbarrier.arrive(empty.index(c % STAGES), count=1)
        x, factor = _capped(x, scale, softcap, SOFTCAP)
        x, factor = _biased(x, factor, slope, own - (tiles - 1) * BLOCK_N, offs_n, ALIBI)
        x = _attended(
            x, limit - (tiles - 1) * BLOCK_N, own - (tiles - 1) * BLOCK_N, left, offs_n, WINDOW
        )
        m = gl.maximum(gl.max(x, 1) * factor, LOWEST)
        y = gl.exp2(x * factor - m[:, None])
        l = _partial_sums(y)
        acc = _zeros(ROWS, PARTS_V, LAYOUT_O)
        c += 1
        if WINDOW:
            # Tiles before `inner` begin before the first key of some query. One loop over all tiles takes fewer registers.
            inner = gl.cdiv(gl.maximum(row + ROWS - 1 + shift - left, 0), BLOCK_N)
            for j in range(tiles - 2, low - 1, -1):
                acc, y, m, l = _forward_step(
                    w,
                    q,
                    k_s,
                    v_s,
                    full,
                    empty,
                    acc,
                    y,
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
                    (j >= whole) | (j < inner),
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                    PARTS,
                    PARTS_V,
                    STAGES,
                    LAYOUT_S,
                    LAYOUT_O,
                    CONSUMERS,
                )
                c += 1
        else:
            if CAUSAL and not SAME:
                for j in range(tiles - 2, whole - 1, -1):
                    acc, y, m, l = _forward_step(
                        w,
                        q,
                        k_s,
                        v_s,
                        full,
                        empty,
                        acc,
                        y,
                        m,
                        l,
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
                        PARTS,
                        PARTS_V,
                        STAGES,
                        LAYOUT_S,
                        LAYOUT_O,
                        CONSUMERS,
                    )
                    c += 1
            for _ in range(whole - 1, -1, -1):
                acc, y, m, l = _forward_step(
                    w,
                    q,
                    k_s,
                    v_s,
                    full,
                    empty,
                    acc,
                    y,
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
                    False,
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                    PARTS,
                    PARTS_V,
                    STAGES,
                    LAYOUT_S,
                    LAYOUT_O,
                    CONSUMERS,
                )
                c += 1
        if not THROUGH:
            mbarrier.arrive(q_empty.index(i % Q_STAGES), count=1)
        p = gl.convert_layout(y.to(v_s.dtype), gl.DotOperandLayout(0, LAYOUT_O, 2))
        mbarrier.wait(full.index(c % STAGES), (c // STAGES) & 1)
        acc = _start_sums(p, v_s, c % STAGES, acc, PARTS_V)
        l_sum = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, LAYOUT_S))
        nothing = gl.minimum(limit, other - 1) < 0
        lse = gl.where(nothing, -float("inf"), (m + gl.log2(l_sum)) * LN2)
        factor = gl.convert_layout(gl.where(nothing, 0.0, 1.0 / l_sum), gl.SliceLayout(1, LAYOUT_O))
        acc = _wait_sums(0, acc, p, PARTS_V)
        for n in gl.static_range(PARTS_V):
            # What lies behind the rows may be NaN, so a factor of 0 would not do.
            part = gl.where(factor[:, None] == 0.0, 0.0, acc[n] * factor[:, None])
            if THROUGH:
                _rows(q_s.index(slot * PARTS + n)).store(part.to(OUT.dtype.element_ty))
            else:
                _store_tile(
                    OUT + start.to(gl.int64) * out_stride + head * DIM_V + n * BLOCK_DV,
                    part,
                    row,
                    end,
                    out_stride,
                    DIM_V - n * BLOCK_DV,
                    LAYOUT_STORE,
                )
        if THROUGH:
            fence_async_shared()
            if row < end:
                _store(od, start, length, row, _column(head, DIM_V, q_s), q_s, slot, PARTS)
        gl.store(LSE + head.to(gl.int64) * total + start + query, lse, mask=query < end)
        i += 1
        mbarrier.wait(q_full.index(i % Q_STAGES), (i // Q_STAGES) & 1)
        start, length, other, first, head = _entry(queue.index(i % 2))
    if THROUGH:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=_COUNTS)
def forward_kernel(
    qd,
    kd,
    vd,
    od,
    SLOPES,
    OUT,
    LSE,
    TILES,
    COUNTER,
    q_head,
    k_head,
    v_head,
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
    DIM_V: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    THROUGH: gl.constexpr,
    CONSUMERS: gl.constexpr,
    SAME: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
):
    """OUT (total, heads, DIM_V) and LSE (heads, total), natural.

    CONSUMERS: 1, where programs share a multiprocessor, to 3, of 64 queries each. SAME: queries and keys of causal rows have
    the same offsets. THROUGH: the output leaves through the slot of its queries, which are as wide. The other constants are those
    that `hopper` tells of.
    """
    q_s = _ring(qd, Q_STAGES * CONSUMERS * PARTS)
    k_s = _ring(kd, STAGES * PARTS)
    v_s = _ring(vd, STAGES * PARTS_V)
    queue = _queue()
    q_full = _barriers(Q_STAGES, 1)
    q_empty = _barriers(Q_STAGES, CONSUMERS)
    full = _barriers(STAGES, 1)
    empty = _barriers(STAGES, CONSUMERS)
    rings = q_s, k_s, v_s, queue, q_full, q_empty, full, empty
    read = qd, kd, vd, TILES, COUNTER, q_head, k_head, v_head, heads, group_size, group
    written = od, OUT, LSE, SLOPES, out_stride, total, scale, softcap
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (
                    _forward_consumer,
                    (
                        0,
                        rings,
                        written,
                        left,
                        0 if CAUSAL else right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        THROUGH,
                        SAME,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        1,
                    ),
                ),
                (
                    _forward_producer,
                    (
                        rings,
                        read,
                        left,
                        0 if CAUSAL else right,
                        BLOCK_M,
                        BLOCK_N,
                        PARTS,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        CAUSAL,
                        WINDOW,
                        1,
                    ),
                ),
            ],
            [1],
            [24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (
                    _forward_consumer,
                    (
                        0,
                        rings,
                        written,
                        left,
                        0 if CAUSAL else right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        THROUGH,
                        SAME,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        2,
                    ),
                ),
                (
                    _forward_consumer,
                    (
                        1,
                        rings,
                        written,
                        left,
                        0 if CAUSAL else right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        THROUGH,
                        SAME,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        2,
                    ),
                ),
                (
                    _forward_producer,
                    (
                        rings,
                        read,
                        left,
                        0 if CAUSAL else right,
                        BLOCK_M,
                        BLOCK_N,
                        PARTS,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        CAUSAL,
                        WINDOW,
                        2,
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
                    _forward_consumer,
                    (
                        0,
                        rings,
                        written,
                        left,
                        0 if CAUSAL else right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        THROUGH,
                        SAME,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        3,
                    ),
                ),
                (
                    _forward_consumer,
                    (
                        1,
                        rings,
                        written,
                        left,
                        0 if CAUSAL else right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        THROUGH,
                        SAME,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        3,
                    ),
                ),
                (
                    _forward_consumer,
                    (
                        2,
                        rings,
                        written,
                        left,
                        0 if CAUSAL else right,
                        BLOCK_M,
                        BLOCK_N,
                        DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        THROUGH,
                        SAME,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        3,
                    ),
                ),
                (
                    _forward_producer,
                    (
                        rings,
                        read,
                        left,
                        0 if CAUSAL else right,
                        BLOCK_M,
                        BLOCK_N,
                        PARTS,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        CAUSAL,
                        WINDOW,
                        3,
                    ),
                ),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
