"""The kernel of dK and dV on Hopper, float16 and bfloat16, head_dim up to 256.

Its producer also serves the float32 kernel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    warpgroup_mma_wait,
)

from ..sm90.pipeline import (
    allocate_barriers,
    allocate_ring,
    allocate_tile_queue,
    fetch_tile,
    head_coordinate,
    load_parts,
    load_slot,
    load_tile,
    operand_parts,
    pdl_wait,
    ping_pong_arrive,
    ping_pong_wait,
    publish_attended,
    publish_tile,
    receive_attended,
    receive_chunk,
    receive_tile,
    skip_blocks,
    slot_bytes,
    start_copy,
    start_mma,
    start_mma_when_full,
    store_accumulators,
    tile_entry,
    wait_mma,
    zero_accumulators,
)
from .constants import LOG2E, UNSPECIALIZED
from .scores_sm90 import (
    apply_alibi,
    apply_softcap,
    find_infinite_tokens,
    get_m_block_min_max,
    is_between,
    score_derivative,
    zero_tokens,
)


@gluon.jit
def dkdv_producer(
    smem,
    producer_args,
    window_left,
    window_right,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
    K_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNKED: gl.constexpr = False,
):
    """Load keys and values once per tile, then each query block of every query head."""
    (
        q_smem,
        k_smem,
        v_smem,
        do_smem,
        lse_smem,
        delta_smem,
        queue,
        k_full,
        k_empty,
        q_full,
        q_empty,
        do_full,
        do_empty,
    ) = smem
    (
        q_desc,
        k_desc,
        v_desc,
        do_desc,
        STATS,
        TILES,
        COUNTER,
        stride_qh,
        stride_kh,
        stride_vh,
        stride_doh,
        total_q,
        stats_stride,
        heads,
        qheads_per_split,
        splits_per_khead,
        heads_in_l2,
    ) = producer_args
    LAYOUT_STATS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    offs_m = gl.arange(0, BLOCK_M, LAYOUT_STATS)
    MERGED: gl.constexpr = queue.shape[1] > 256
    if MERGED:
        attended, total_k = TILES + gl.load(TILES + 1), gl.load(TILES + 2)
    num_tiles = gl.load(TILES)
    total_tiles = num_tiles * (heads // qheads_per_split)
    tile_id = gl.program_id(0)
    work_idx = 0
    step = 0
    while tile_id >= 0:
        tile, head = tile_entry(TILES, tile_id, num_tiles, total_tiles, heads_in_l2)
        k_head = head // splits_per_khead
        k_offset, seqlen_k, q_offset, seqlen_q, start_n = load_tile(tile)
        if CHUNKED:
            first_block, end_block = gl.load(tile + 6), gl.load(tile + 7)
        k_stage = work_idx % K_STAGES
        mbarrier.wait(k_empty.index(k_stage), ((work_idx // K_STAGES) & 1) ^ 1)
        publish_tile(
            queue.index(work_idx % queue.shape[0]), tile, tile_id, total_tiles, head, CHUNKED
        )
        if tile_id < total_tiles:
            if MERGED:
                publish_attended(
                    *(queue.index(work_idx % 2), attended, total_k),
                    *(k_offset, seqlen_k, start_n, k_full.index(k_stage)),
                )
            mbarrier.expect(
                k_full.index(k_stage),
                CONSUMERS * (slot_bytes(k_smem, PARTS) + slot_bytes(v_smem, PARTS_V)),
            )
            for wg in gl.static_range(CONSUMERS):
                wg_start_n = start_n + wg * (BLOCK_N // CONSUMERS)
                slot = k_stage * CONSUMERS + wg
                load_slot(
                    k_desc,
                    k_offset,
                    seqlen_k,
                    wg_start_n,
                    head_coordinate(k_head, stride_kh, k_smem),
                    k_full.index(k_stage),
                    k_smem,
                    slot,
                    PARTS,
                )
                load_slot(
                    v_desc,
                    k_offset,
                    seqlen_k,
                    wg_start_n,
                    head_coordinate(k_head, stride_vh, v_smem),
                    k_full.index(k_stage),
                    v_smem,
                    slot,
                    PARTS_V,
                )
            if not MERGED:
                tile_id = fetch_tile(COUNTER + 1, total_tiles)
            pdl_wait(work_idx)  # attention_dq_sm90_kernel computes STATS
            m_block_min, m_block_max = get_m_block_min_max(
                start_n,
                seqlen_k,
                seqlen_q,
                window_left,
                window_right,
                BLOCK_M,
                BLOCK_N,
                CAUSAL and not MERGED,
                WINDOW and not MERGED,
            )
            if CHUNKED:
                m_block_min, m_block_max = first_block, end_block
            for q_head in range(
                head * qheads_per_split, head * qheads_per_split + qheads_per_split
            ):
                stats = STATS + q_head.to(gl.int64) * total_q + q_offset
                for m_block in range(m_block_min, m_block_max):
                    stage = step % STAGES
                    phase = ((step // STAGES) & 1) ^ 1
                    query = m_block * BLOCK_M + offs_m
                    # After the end of the row STATS, q and dout read as 0, so such queries add
                    # nothing.
                    mbarrier.wait(q_empty.index(stage), phase)
                    start_copy(lse_smem.index(stage), stats + query, query < seqlen_q)
                    async_copy.mbarrier_arrive(q_full.index(stage))
                    mbarrier.expect(q_full.index(stage), slot_bytes(q_smem, PARTS))
                    load_slot(
                        q_desc,
                        q_offset,
                        seqlen_q,
                        m_block * BLOCK_M,
                        head_coordinate(q_head, stride_qh, q_smem),
                        q_full.index(stage),
                        q_smem,
                        stage,
                        PARTS,
                    )
                    mbarrier.wait(do_empty.index(stage), phase)
                    start_copy(
                        delta_smem.index(stage), stats + stats_stride + query, query < seqlen_q
                    )
                    async_copy.mbarrier_arrive(do_full.index(stage))
                    mbarrier.expect(do_full.index(stage), slot_bytes(do_smem, PARTS_V))
                    load_slot(
                        do_desc,
                        q_offset,
                        seqlen_q,
                        m_block * BLOCK_M,
                        head_coordinate(q_head, stride_doh, do_smem),
                        do_full.index(stage),
                        do_smem,
                        stage,
                        PARTS_V,
                    )
                    step += 1
            if MERGED:
                tile_id = fetch_tile(COUNTER + 1, total_tiles)
        else:
            pdl_wait(work_idx)
            mbarrier.arrive(k_full.index(k_stage), count=1)
            tile_id = -1
        work_idx += 1


@gluon.jit
def _dkdv_step(
    wg: gl.constexpr,
    k,
    v,
    q_smem,
    do_smem,
    lse_smem,
    delta_smem,
    q_full,
    q_empty,
    do_full,
    do_empty,
    dk,
    dv,
    step,
    diagonal,
    first_query,
    end_query,
    remaining_q,
    window_left,
    window_right,
    offs_m,
    scale,
    softcap,
    slope,
    masked,
    MERGED: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    HAS_DK: gl.constexpr,
    HAS_DV: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT_S: gl.constexpr,
    PING_PONG: gl.constexpr,
):
    """Add the contribution of query block `step` to dK and dV.

    Scores are transposed: keys by queries. `remaining_q` is the number of queries from the block's
    first query to the end of the row.
    """
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT_S, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT_S)
    stage = step % STAGES
    ping_pong_wait(wg, step, PING_PONG)
    scores = start_mma_when_full(k, q_smem, q_full, step, PARTS, LAYOUT_S, STAGES)
    if HAS_DK:
        dp = start_mma_when_full(v, do_smem, do_full, step, PARTS_V, LAYOUT_S, STAGES)
    ping_pong_arrive(wg, step, PING_PONG)
    lse = lse_smem.index(stage).load(COLUMN)
    scores = warpgroup_mma_wait(PARTS_V if HAS_DK else 0, deps=(scores,))
    if MERGED:
        mbarrier.wait(do_full.index(stage), (step // STAGES) & 1)
        delta = delta_smem.index(stage).load(COLUMN)
        # delta sums numbers of dout, and lse of q, unless a softcap bounds the scores. A query
        # without a valid key has lse = -inf.
        is_finite = (lse < float("inf")) & (gl.abs(delta) < float("inf"))
        infinite = gl.where(is_finite, 0, 1)
        if SOFTCAP:
            infinite = gl.maximum(infinite, find_infinite_tokens(q_smem, stage, COLUMN, PARTS))
        excluded = gl.where(lse > float("-inf"), infinite, 1)
    if ALIBI:  # queries after the end of the row have no scores, and so no bias
        lse = gl.where(offs_m < remaining_q, lse, float("inf"))
    capped, factor = apply_softcap(scores, scale, softcap, SOFTCAP)
    scores, factor = apply_alibi(capped, factor, slope, diagonal, offs_m, ALIBI)
    p = gl.exp2(scores * factor - lse[None, :])
    if masked:
        p = gl.where(offs_m[None, :] >= (diagonal - window_right)[:, None], p, 0.0)
        if WINDOW:
            p = gl.where(offs_m[None, :] <= (diagonal + window_left)[:, None], p, 0.0)
        if MERGED:
            p = gl.where(is_between(offs_m, first_query, end_query), p, 0.0)
    if MERGED:
        if HAS_DK:
            dp = warpgroup_mma_wait(0, deps=(dp,))
        if gl.max(excluded, 0) > 0:
            # An infinite query adds NaN to its own row, and nothing to other rows. A query without
            # a valid key adds nothing, also if its numbers, which no score shows, are infinite.
            is_infinite = infinite[None, :] > 0
            p = gl.where(is_infinite & is_between(offs_m, first_query, end_query), float("nan"), p)
            is_excluded = excluded[None, :] > 0
            capped = gl.where(is_excluded, 0.0, capped)
            zero_tokens(do_smem, stage, excluded, PARTS_V)
            if HAS_DK:
                dp = gl.where(is_excluded, 0.0, dp)
                delta = gl.where(excluded > 0, 0.0, delta)
                zero_tokens(q_smem, stage, excluded, PARTS)
    if HAS_DV:
        if not HAS_DK:
            mbarrier.wait(do_full.index(stage), (step // STAGES) & 1)
        p_operand = gl.convert_layout(p.to(q_smem.dtype), OPERAND)
        dv = start_mma(p_operand, do_smem, stage, dv, PARTS_V)
    if HAS_DK:
        if SOFTCAP:
            p *= 1.0 - capped * capped
        if not MERGED:
            delta = delta_smem.index(stage).load(COLUMN)
            dp = warpgroup_mma_wait(len(dv), deps=(dp,))
        ds = gl.convert_layout((p * (dp - delta[None, :])).to(q_smem.dtype), OPERAND)
        dk = start_mma(ds, q_smem, stage, dk, PARTS)
    if HAS_DV:
        dv = wait_mma(len(dk), dv, p_operand)
    mbarrier.arrive(do_empty.index(stage), count=1)
    if HAS_DK:
        dk = wait_mma(0, dk, ds)
    mbarrier.arrive(q_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _store_dkdv(
    DK,
    DV,
    dk,
    dv,
    factor,
    start,
    seqlen,
    stride_dkn,
    stride_dvn,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    HAS_DK: gl.constexpr,
    HAS_DV: gl.constexpr,
    IN_FLOAT32: gl.constexpr,
):
    """Store the gradients of a tile of keys; `factor` multiplies dK."""
    if HAS_DK:
        store_accumulators(DK, dk, factor, start, seqlen, stride_dkn, HEAD_DIM, IN_FLOAT32)
    if HAS_DV:
        store_accumulators(DV, dv, 1.0, start, seqlen, stride_dvn, HEAD_DIM_V, IN_FLOAT32)


@gluon.jit
def _dkdv_consumer(
    wg: gl.constexpr,
    smem,
    consumer_args,
    window_left,
    window_right,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    HAS_DK: gl.constexpr,
    HAS_DV: gl.constexpr,
    STAGES: gl.constexpr,
    K_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    MERGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    K_IN_REGISTERS: gl.constexpr,
    V_IN_REGISTERS: gl.constexpr,
    SKIP_BLOCKS: gl.constexpr,
    IN_FLOAT32: gl.constexpr,
    PING_PONG: gl.constexpr,
    CHUNKED: gl.constexpr,
):
    WG_N: gl.constexpr = BLOCK_N // CONSUMERS
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    (
        q_smem,
        k_smem,
        v_smem,
        do_smem,
        lse_smem,
        delta_smem,
        queue,
        k_full,
        k_empty,
        q_full,
        q_empty,
        do_full,
        do_empty,
    ) = smem
    (DK, DV, SLOPES, stride_dkn, stride_dvn, qheads_per_split, scale, softcap, sums_args) = (
        consumer_args
    )
    if CHUNKED:
        DK_SUMS, DV_SUMS, k_heads = sums_args
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT_S))
    work_idx = 0
    step = 0
    if wg == CONSUMERS - 1:
        ping_pong_arrive(wg, step, PING_PONG)
    mbarrier.wait(k_full.index(0), 0)
    k_offset, seqlen_k, seqlen_q, start_n, head = receive_tile(queue.index(0))
    while seqlen_k > 0:
        k = operand_parts(k_smem, (work_idx % K_STAGES) * CONSUMERS + wg, PARTS, HEAD_DIM)
        v = operand_parts(v_smem, (work_idx % K_STAGES) * CONSUMERS + wg, PARTS_V, HEAD_DIM_V)
        k = load_parts(k, K_IN_REGISTERS, LAYOUT_S)
        v = load_parts(v, V_IN_REGISTERS, LAYOUT_S)
        m_block_min, m_block_max = get_m_block_min_max(
            start_n,
            seqlen_k,
            seqlen_q,
            window_left,
            window_right,
            BLOCK_M,
            BLOCK_N,
            CAUSAL and not MERGED,  # the rows of a group have diagonals of their own
            WINDOW and not MERGED,
        )
        if CHUNKED:
            chunk, m_block_min, m_block_max = receive_chunk(queue.index(work_idx % 2))
        wg_start_n = start_n + wg * WG_N
        # `diagonal` is the query position aligned with each key. In the blocks from
        # `full_m_block_min` up to `full_m_block_max` every query attends all keys of this warp
        # group. Before `wg_m_block_min` and from `wg_m_block_max` on, no query attends any of them.
        diagonal = (
            wg_start_n + (seqlen_q - seqlen_k) + gl.arange(0, WG_N, gl.SliceLayout(1, LAYOUT_S))
        )
        first_query, end_query = diagonal, diagonal
        if MERGED:
            first_query, end_query, diagonal = receive_attended(
                queue.index(work_idx % 2), gl.SliceLayout(1, LAYOUT_S)
            )
        wg_m_block_min = m_block_min
        wg_m_block_max = m_block_max
        if SKIP_BLOCKS:
            wg_m_block_min, wg_m_block_max = get_m_block_min_max(
                wg_start_n,
                seqlen_k,
                seqlen_q,
                window_left,
                window_right,
                BLOCK_M,
                WG_N,
                CAUSAL and not MERGED,
                WINDOW and not MERGED,
            )
            wg_m_block_min = gl.where(
                wg_start_n < seqlen_k, gl.minimum(wg_m_block_min, m_block_max), m_block_max
            )
            if CHUNKED:
                wg_m_block_min = gl.maximum(wg_m_block_min, m_block_min)
            if WINDOW:
                wg_m_block_max = gl.maximum(gl.minimum(wg_m_block_max, m_block_max), wg_m_block_min)
            else:
                wg_m_block_max = m_block_max
        full_m_block_min = wg_m_block_min
        if CAUSAL or WINDOW:
            full_m_block_min = gl.maximum(
                gl.minimum(
                    gl.cdiv(
                        gl.maximum(wg_start_n + WG_N - 1 + seqlen_q - seqlen_k - window_right, 0),
                        BLOCK_M,
                    ),
                    m_block_max,
                ),
                wg_m_block_min,
            )
        full_m_block_max = (
            gl.maximum(wg_start_n + seqlen_q - seqlen_k + window_left + 1, 0) // BLOCK_M
        )
        dk = zero_accumulators(WG_N, BLOCK_D, PARTS if HAS_DK else 0, HEAD_DIM)
        dv = zero_accumulators(WG_N, BLOCK_DV, PARTS_V if HAS_DV else 0, HEAD_DIM_V)
        for g in range(qheads_per_split):
            slope = gl.load(SLOPES + head * qheads_per_split + g) * LOG2E if ALIBI else 0.0
            step = skip_blocks(
                wg,
                wg_m_block_min - m_block_min,
                q_full,
                q_empty,
                do_full,
                do_empty,
                step,
                STAGES,
                PING_PONG,
            )
            if WINDOW or MERGED:
                for m_block in range(wg_m_block_min, wg_m_block_max):
                    dk, dv = _dkdv_step(
                        wg,
                        k,
                        v,
                        q_smem,
                        do_smem,
                        lse_smem,
                        delta_smem,
                        q_full,
                        q_empty,
                        do_full,
                        do_empty,
                        dk,
                        dv,
                        step,
                        diagonal - m_block * BLOCK_M,
                        first_query - m_block * BLOCK_M,
                        end_query - m_block * BLOCK_M,
                        seqlen_q - m_block * BLOCK_M,
                        window_left,
                        window_right,
                        offs_m,
                        scale,
                        softcap,
                        slope,
                        MERGED | (m_block < full_m_block_min) | (m_block >= full_m_block_max),
                        MERGED,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        PARTS,
                        PARTS_V,
                        HAS_DK,
                        HAS_DV,
                        STAGES,
                        LAYOUT_S,
                        PING_PONG,
                    )
                    step += 1
                step = skip_blocks(
                    wg,
                    m_block_max - wg_m_block_max,
                    q_full,
                    q_empty,
                    do_full,
                    do_empty,
                    step,
                    STAGES,
                    PING_PONG,
                )
            else:
                if CAUSAL:
                    for m_block in range(wg_m_block_min, full_m_block_min):
                        dk, dv = _dkdv_step(
                            wg,
                            k,
                            v,
                            q_smem,
                            do_smem,
                            lse_smem,
                            delta_smem,
                            q_full,
                            q_empty,
                            do_full,
                            do_empty,
                            dk,
                            dv,
                            step,
                            diagonal - m_block * BLOCK_M,
                            first_query,
                            end_query,
                            seqlen_q,
                            window_left,
                            window_right,
                            offs_m,
                            scale,
                            softcap,
                            slope,
                            True,
                            MERGED,
                            WINDOW,
                            SOFTCAP,
                            ALIBI,
                            PARTS,
                            PARTS_V,
                            HAS_DK,
                            HAS_DV,
                            STAGES,
                            LAYOUT_S,
                            PING_PONG,
                        )
                        step += 1
                for _ in range(full_m_block_min, wg_m_block_max):
                    dk, dv = _dkdv_step(
                        wg,
                        k,
                        v,
                        q_smem,
                        do_smem,
                        lse_smem,
                        delta_smem,
                        q_full,
                        q_empty,
                        do_full,
                        do_empty,
                        dk,
                        dv,
                        step,
                        diagonal,
                        first_query,
                        end_query,
                        seqlen_q,
                        window_left,
                        window_right,
                        offs_m,
                        scale,
                        softcap,
                        slope,
                        False,
                        MERGED,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        PARTS,
                        PARTS_V,
                        HAS_DK,
                        HAS_DV,
                        STAGES,
                        LAYOUT_S,
                        PING_PONG,
                    )
                    step += 1
        mbarrier.arrive(k_empty.index(work_idx % K_STAGES), count=1)
        factor = score_derivative(scale, softcap, SOFTCAP)
        dk_offset = k_offset.to(gl.int64) * stride_dkn + head * HEAD_DIM
        dv_offset = k_offset.to(gl.int64) * stride_dvn + head * HEAD_DIM_V
        if CHUNKED:
            if chunk > 0:
                # The sums of a chunk have the shape (key heads, BLOCK_N, head_dim).
                sums = ((chunk - 1).to(gl.int64) * k_heads + head) * BLOCK_N
                _store_dkdv(
                    *(DK_SUMS + sums * HEAD_DIM, DV_SUMS + sums * HEAD_DIM_V, dk, dv, factor),
                    *(wg * WG_N, seqlen_k - start_n, HEAD_DIM, HEAD_DIM_V),
                    *(HEAD_DIM, HEAD_DIM_V, HAS_DK, HAS_DV, True),
                )
            else:
                _store_dkdv(
                    *(DK + dk_offset, DV + dv_offset, dk, dv, factor),
                    *(wg_start_n, seqlen_k, stride_dkn, stride_dvn),
                    *(HEAD_DIM, HEAD_DIM_V, HAS_DK, HAS_DV, IN_FLOAT32),
                )
        else:
            _store_dkdv(
                *(DK + dk_offset, DV + dv_offset, dk, dv, factor),
                *(wg_start_n, seqlen_k, stride_dkn, stride_dvn),
                *(HEAD_DIM, HEAD_DIM_V, HAS_DK, HAS_DV, IN_FLOAT32),
            )
        work_idx += 1
        mbarrier.wait(k_full.index(work_idx % K_STAGES), (work_idx // K_STAGES) & 1)
        k_offset, seqlen_k, seqlen_q, start_n, head = receive_tile(queue.index(work_idx % 2))


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def attention_dkdv_sm90_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    SLOPES,
    STATS,
    DK,
    DV,
    DK_SUMS,
    DV_SUMS,
    TILES,
    COUNTER,
    stride_qh,
    stride_kh,
    stride_vh,
    stride_doh,
    stride_dkn,
    stride_dvn,
    total_q,
    stats_stride,
    heads,
    qheads_per_split,
    splits_per_khead,
    heads_in_l2,
    window_left,
    window_right,
    scale,
    softcap,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    HAS_DK: gl.constexpr,
    HAS_DV: gl.constexpr,
    STAGES: gl.constexpr,
    K_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    MERGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    K_IN_REGISTERS: gl.constexpr,
    V_IN_REGISTERS: gl.constexpr,
    SKIP_BLOCKS: gl.constexpr,
    IN_FLOAT32: gl.constexpr,
    PING_PONG: gl.constexpr,
    CHUNKED: gl.constexpr,
):
    """Compute DK and DV, or one of them, for one key tile and key head at a time.

    The query heads of a key head are summed in `splits_per_khead` splits. DK and DV have one head
    per split. With more than one split they are float32, and `attention_sum_splits_kernel` adds
    them up.

    K_IN_REGISTERS, V_IN_REGISTERS
        The number of parts of keys and values that stay in registers. Their products read half as much
        shared memory.
    SKIP_BLOCKS
        A warp group skips blocks of which it needs nothing.
    IN_FLOAT32
        DK and DV are float32.
    CHUNKED
        TILES holds whole tiles and chunks of tiles, see `tile_chunks`. The sums of chunks go to
        DK_SUMS and DV_SUMS in float32, and `attention_sum_chunks_kernel` adds them up.
    """
    STATS_S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = allocate_ring(q_desc, STAGES * PARTS)
    do_smem = allocate_ring(do_desc, STAGES * PARTS_V)
    k_smem = allocate_ring(k_desc, CONSUMERS * K_STAGES * PARTS)
    v_smem = allocate_ring(v_desc, CONSUMERS * K_STAGES * PARTS_V)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], STATS_S)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], STATS_S)
    queue = allocate_tile_queue(MERGED=MERGED)
    k_full = allocate_barriers(K_STAGES, 1)
    k_empty = allocate_barriers(K_STAGES, CONSUMERS)
    q_full = allocate_barriers(STAGES, 1)
    q_empty = allocate_barriers(STAGES, CONSUMERS)
    do_full = allocate_barriers(STAGES, 1)
    do_empty = allocate_barriers(STAGES, CONSUMERS)
    smem = (
        q_smem,
        k_smem,
        v_smem,
        do_smem,
        lse_smem,
        delta_smem,
        queue,
        k_full,
        k_empty,
        q_full,
        q_empty,
        do_full,
        do_empty,
    )
    producer_args = (
        q_desc,
        k_desc,
        v_desc,
        do_desc,
        STATS,
        TILES,
        COUNTER,
        stride_qh,
        stride_kh,
        stride_vh,
        stride_doh,
        total_q,
        stats_stride,
        heads,
        qheads_per_split,
        splits_per_khead,
        heads_in_l2,
    )
    # Only kernels of chunks have sums.
    sums_args = ()
    if CHUNKED:
        sums_args = DK_SUMS, DV_SUMS, heads // qheads_per_split
    consumer_args = (
        DK,
        DV,
        SLOPES,
        stride_dkn,
        stride_dvn,
        qheads_per_split,
        scale,
        softcap,
        sums_args,
    )
    window_right = 0 if CAUSAL else window_right
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (
                    _dkdv_consumer,
                    (
                        0,
                        smem,
                        consumer_args,
                        window_left,
                        window_right,
                        BLOCK_M,
                        BLOCK_N,
                        HEAD_DIM,
                        BLOCK_D,
                        HEAD_DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        HAS_DK,
                        HAS_DV,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        K_IN_REGISTERS,
                        V_IN_REGISTERS,
                        SKIP_BLOCKS,
                        IN_FLOAT32,
                        PING_PONG,
                        CHUNKED,
                    ),
                ),
                (
                    dkdv_producer,
                    (
                        smem,
                        producer_args,
                        window_left,
                        window_right,
                        BLOCK_M,
                        BLOCK_N,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                        CHUNKED,
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
                    _dkdv_consumer,
                    (
                        0,
                        smem,
                        consumer_args,
                        window_left,
                        window_right,
                        BLOCK_M,
                        BLOCK_N,
                        HEAD_DIM,
                        BLOCK_D,
                        HEAD_DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        HAS_DK,
                        HAS_DV,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        K_IN_REGISTERS,
                        V_IN_REGISTERS,
                        SKIP_BLOCKS,
                        IN_FLOAT32,
                        PING_PONG,
                        CHUNKED,
                    ),
                ),
                (
                    _dkdv_consumer,
                    (
                        1,
                        smem,
                        consumer_args,
                        window_left,
                        window_right,
                        BLOCK_M,
                        BLOCK_N,
                        HEAD_DIM,
                        BLOCK_D,
                        HEAD_DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        HAS_DK,
                        HAS_DV,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        K_IN_REGISTERS,
                        V_IN_REGISTERS,
                        SKIP_BLOCKS,
                        IN_FLOAT32,
                        PING_PONG,
                        CHUNKED,
                    ),
                ),
                (
                    dkdv_producer,
                    (
                        smem,
                        producer_args,
                        window_left,
                        window_right,
                        BLOCK_M,
                        BLOCK_N,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                        CHUNKED,
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
                        smem,
                        consumer_args,
                        window_left,
                        window_right,
                        BLOCK_M,
                        BLOCK_N,
                        HEAD_DIM,
                        BLOCK_D,
                        HEAD_DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        HAS_DK,
                        HAS_DV,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        K_IN_REGISTERS,
                        V_IN_REGISTERS,
                        SKIP_BLOCKS,
                        IN_FLOAT32,
                        PING_PONG,
                        CHUNKED,
                    ),
                ),
                (
                    _dkdv_consumer,
                    (
                        1,
                        smem,
                        consumer_args,
                        window_left,
                        window_right,
                        BLOCK_M,
                        BLOCK_N,
                        HEAD_DIM,
                        BLOCK_D,
                        HEAD_DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        HAS_DK,
                        HAS_DV,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        K_IN_REGISTERS,
                        V_IN_REGISTERS,
                        SKIP_BLOCKS,
                        IN_FLOAT32,
                        PING_PONG,
                        CHUNKED,
                    ),
                ),
                (
                    _dkdv_consumer,
                    (
                        2,
                        smem,
                        consumer_args,
                        window_left,
                        window_right,
                        BLOCK_M,
                        BLOCK_N,
                        HEAD_DIM,
                        BLOCK_D,
                        HEAD_DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        HAS_DK,
                        HAS_DV,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        K_IN_REGISTERS,
                        V_IN_REGISTERS,
                        SKIP_BLOCKS,
                        IN_FLOAT32,
                        PING_PONG,
                        CHUNKED,
                    ),
                ),
                (
                    dkdv_producer,
                    (
                        smem,
                        producer_args,
                        window_left,
                        window_right,
                        BLOCK_M,
                        BLOCK_N,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        K_STAGES,
                        CONSUMERS,
                        CAUSAL,
                        WINDOW,
                        CHUNKED,
                    ),
                ),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
