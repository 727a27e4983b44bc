"""The kernel of dQ on Hopper, float16 and bfloat16, head_dim up to 256.

The kernel writes the statistics that the kernel of dK and dV reads. Its producer also serves the
float32 kernel.
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
    allocate_barriers,
    allocate_ring,
    allocate_tile_queue,
    as_matrix,
    as_wide_matrix,
    columns_layout,
    fetch_tile,
    head_coordinate,
    load_slot,
    load_tile,
    operand_parts,
    pdl_launch_dependents,
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
    start_mma,
    start_mma_when_full,
    store_accumulators,
    store_slot,
    tile_entry,
    tile_mask,
    wait_mma,
    zero_accumulators,
)
from .constants import LOG2E, UNSPECIALIZED
from .scores_sm90 import (
    apply_alibi,
    apply_softcap,
    get_key_limits,
    get_n_block_max,
    get_n_block_min,
    is_between,
    isolate_rows,
    score_derivative,
)


@gluon.jit
def dq_producer(
    smem,
    producer_args,
    window_left,
    window_right,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNKED: gl.constexpr = False,
):
    """Load queries and dout once per tile, then each key and value block."""
    q_smem, k_smem, v_smem, do_smem, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty = smem
    (
        q_desc,
        k_desc,
        v_desc,
        do_desc,
        TILES,
        COUNTER,
        stride_qh,
        stride_kh,
        stride_vh,
        stride_doh,
        heads,
        qheads_per_khead,
        heads_in_l2,
    ) = producer_args
    tile_id = gl.program_id(0)
    work_idx = 0
    step = 0
    pdl_wait(step)
    # After pdl_wait: when the next kernel begins, the kernel before this one has ended.
    pdl_launch_dependents(step)
    MERGED: gl.constexpr = queue.shape[1] > 256
    if MERGED:
        attended, total_q = TILES + gl.load(TILES + 1), gl.load(TILES + 2)
    num_tiles = gl.load(TILES)
    total_tiles = num_tiles * heads
    while tile_id >= 0:
        tile, head = tile_entry(TILES, tile_id, num_tiles, total_tiles, heads_in_l2)
        q_offset, seqlen_q, k_offset, seqlen_k, start_m = load_tile(tile)
        if CHUNKED:
            first_block, end_block = gl.load(tile + 6), gl.load(tile + 7)
        q_stage = work_idx % Q_STAGES
        mbarrier.wait(q_empty.index(q_stage), ((work_idx // Q_STAGES) & 1) ^ 1)
        publish_tile(queue.index(work_idx % 2), tile, tile_id, total_tiles, head, CHUNKED)
        if tile_id < total_tiles:
            if MERGED:
                publish_attended(
                    *(queue.index(work_idx % 2), attended, total_q),
                    *(q_offset, seqlen_q, start_m, q_full.index(q_stage)),
                )
            mbarrier.expect(
                q_full.index(q_stage),
                CONSUMERS * (slot_bytes(q_smem, PARTS) + slot_bytes(do_smem, PARTS_V)),
            )
            for wg in gl.static_range(CONSUMERS):
                wg_start_m = start_m + wg * (BLOCK_M // CONSUMERS)
                slot = q_stage * CONSUMERS + wg
                load_slot(
                    q_desc,
                    q_offset,
                    seqlen_q,
                    wg_start_m,
                    head_coordinate(head, stride_qh, q_smem),
                    q_full.index(q_stage),
                    q_smem,
                    slot,
                    PARTS,
                )
                load_slot(
                    do_desc,
                    q_offset,
                    seqlen_q,
                    wg_start_m,
                    head_coordinate(head, stride_doh, do_smem),
                    q_full.index(q_stage),
                    do_smem,
                    slot,
                    PARTS_V,
                )
            if not MERGED:
                tile_id = fetch_tile(COUNTER, total_tiles)
            k_head = head_coordinate(head // qheads_per_khead, stride_kh, k_smem)
            v_head = head_coordinate(head // qheads_per_khead, stride_vh, v_smem)
            n_block_max = get_n_block_max(
                start_m, seqlen_q, seqlen_k, window_right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW
            )
            n_block_min = get_n_block_min(
                start_m, seqlen_q, seqlen_k, window_left, n_block_max, BLOCK_N, WINDOW
            )
            if CHUNKED:
                n_block_min, n_block_max = first_block, end_block
            for n_block in range(n_block_max - 1, n_block_min - 1, -1):
                stage = step % STAGES
                phase = ((step // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), slot_bytes(k_smem, PARTS))
                load_slot(
                    k_desc,
                    k_offset,
                    seqlen_k,
                    n_block * BLOCK_N,
                    k_head,
                    k_full.index(stage),
                    k_smem,
                    stage,
                    PARTS,
                )
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), slot_bytes(v_smem, PARTS_V))
                load_slot(
                    v_desc,
                    k_offset,
                    seqlen_k,
                    n_block * BLOCK_N,
                    v_head,
                    v_full.index(stage),
                    v_smem,
                    stage,
                    PARTS_V,
                )
                step += 1
            if MERGED:  # its few loads come first
                tile_id = fetch_tile(COUNTER, total_tiles)
        else:
            mbarrier.arrive(q_full.index(q_stage), count=1)
            tile_id = -1
        work_idx += 1


@gluon.jit
def _dq_step(
    wg: gl.constexpr,
    q,
    do,
    k_smem,
    v_smem,
    k_full,
    k_empty,
    v_full,
    v_empty,
    dq,
    lse,
    delta,
    step,
    last_key,
    diagonal,
    window_left,
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
    PING_PONG: gl.constexpr,
):
    """Add the contribution of key block `step` to dQ."""
    stage = step % STAGES
    ping_pong_wait(wg, step, PING_PONG)
    scores = start_mma_when_full(q, k_smem, k_full, step, PARTS, LAYOUT_S, STAGES)
    dp = start_mma_when_full(do, v_smem, v_full, step, PARTS_V, LAYOUT_S, STAGES)
    ping_pong_arrive(wg, step, PING_PONG)
    scores = warpgroup_mma_wait(PARTS_V, deps=(scores,))
    capped, factor = apply_softcap(scores, scale, softcap, SOFTCAP)
    scores, factor = apply_alibi(capped, factor, slope, diagonal, offs_n, ALIBI)
    p = gl.exp2(scores * factor - lse[:, None])
    if SOFTCAP:
        p *= 1.0 - capped * capped
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    ds = p * (dp - delta[:, None])
    if masked:
        ds = gl.where(last_key[:, None] >= offs_n[None, :], ds, 0.0)
        if WINDOW:
            ds = gl.where((diagonal - window_left)[:, None] <= offs_n[None, :], ds, 0.0)
    ds = gl.convert_layout(ds.to(k_smem.dtype), gl.DotOperandLayout(0, LAYOUT_O, 2))
    dq = wait_mma(0, start_mma(ds, k_smem, stage, dq, PARTS), ds)
    mbarrier.arrive(k_empty.index(stage), count=1)
    return dq


@gluon.jit
def _dq_of_group(
    q,
    do,
    k_smem,
    v_smem,
    k_full,
    k_empty,
    v_full,
    v_empty,
    lse,
    delta,
    step,
    last_key,
    diagonal,
    first_key,
    end_key,
    window_left,
    offs_n,
    scale,
    softcap,
    slope,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
    LAYOUT_S: gl.constexpr,
    LAYOUT_O: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):
    """Compute dQ of a tile whose queries attend keys of one block only, and add sum(P * dP) to delta.

    This sum equals sum(out * dout), but needs no output. delta is NaN where dout is not finite, also
    for queries that attend to no key.
    """
    stage = step % STAGES
    scores = start_mma_when_full(q, k_smem, k_full, step, PARTS, LAYOUT_S, STAGES)
    dp = start_mma_when_full(do, v_smem, v_full, step, PARTS_V, LAYOUT_S, STAGES)
    scores = warpgroup_mma_wait(PARTS_V, deps=(scores,))
    capped, factor = apply_softcap(scores, scale, softcap, SOFTCAP)
    scores, factor = apply_alibi(capped, factor, slope, diagonal, offs_n, ALIBI)
    p = gl.exp2(scores * factor - lse[:, None])
    if WINDOW:
        first_key = gl.maximum(first_key, diagonal - window_left)
    is_attended = is_between(offs_n, first_key, gl.minimum(last_key + 1, end_key))
    dp = warpgroup_mma_wait(0, deps=(dp,))
    mbarrier.arrive(v_empty.index(stage), count=1)
    delta += gl.sum(gl.where(is_attended, p * dp, 0.0), 1)
    is_finite = gl.max(gl.where(gl.abs(dp) < float("inf"), 1, 0), 1) > 0
    delta = gl.where(is_finite, delta, float("nan"))
    if SOFTCAP:
        p *= 1.0 - capped * capped
    ds = gl.where(is_attended, p * (dp - delta[:, None]), 0.0)
    ds = gl.convert_layout(ds.to(k_smem.dtype), gl.DotOperandLayout(0, LAYOUT_O, 2))
    dq = zero_accumulators(q[0].shape[0], k_smem.shape[len(k_smem.shape) - 1], PARTS, HEAD_DIM)
    dq = wait_mma(0, start_mma(ds, k_smem, stage, dq, PARTS), ds)
    dq = isolate_rows(dq, ds, k_smem, stage, first_key, end_key, offs_n, PARTS)
    mbarrier.arrive(k_empty.index(stage), count=1)
    return dq, delta


@gluon.jit
def _store_dq(
    dq_desc,
    q_smem,
    slot,
    dq,
    factor,
    q_offset,
    seqlen_q,
    start_m,
    head,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    PARTS: gl.constexpr,
):
    """Start the store of dQ from the shared memory of the tile's queries."""
    for i in gl.static_range(len(dq)):
        as_wide_matrix(
            q_smem, slot * PARTS + i * (dq[0].shape[1] // BLOCK_D), dq[i].shape[1]
        ).store((dq[i] * factor).to(q_smem.dtype))
    fence_async_shared()
    store_slot(
        dq_desc,
        q_offset,
        seqlen_q,
        start_m,
        head_coordinate(head, HEAD_DIM, q_smem),
        q_smem,
        slot,
        PARTS,
    )


@gluon.jit
def _dq_consumer(
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
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    MERGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    HAS_DLSE: gl.constexpr,
    PING_PONG: gl.constexpr,
    CHUNKED: gl.constexpr,
):
    WG_M: gl.constexpr = BLOCK_M // CONSUMERS
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    LAYOUT_OUT: gl.constexpr = columns_layout(BLOCK_DV)
    q_smem, k_smem, v_smem, do_smem, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty = smem
    (
        dq_desc,
        SLOPES,
        OUT,
        LSE,
        DLSE,
        STATS,
        stride_om,
        stride_dlsem,
        stride_dlseh,
        total_q,
        stats_stride,
        scale,
        softcap,
        sums_args,
    ) = consumer_args
    if CHUNKED:
        DQ_SUMS, heads = sums_args
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT_S))
    work_idx = 0
    step = 0
    if wg == CONSUMERS - 1:  # the first warp group starts
        ping_pong_arrive(wg, step, PING_PONG)
    pdl_wait(step)
    mbarrier.wait(q_full.index(0), 0)
    q_offset, seqlen_q, seqlen_k, start_m, head = receive_tile(queue.index(0))
    while seqlen_q > 0:
        slot = (work_idx % Q_STAGES) * CONSUMERS + wg
        q = operand_parts(q_smem, slot, PARTS, HEAD_DIM)
        do = operand_parts(do_smem, slot, PARTS_V, HEAD_DIM_V)
        diagonal_offset = seqlen_k - seqlen_q
        wg_start_m = start_m + wg * WG_M
        offs_m = wg_start_m + gl.arange(0, WG_M, gl.SliceLayout(1, LAYOUT_S))
        mask_m = offs_m < seqlen_q
        offset = head.to(gl.int64) * total_q + q_offset + offs_m
        # delta = sum(out * dout) - dlse, one per query; queries after the end of the row read
        # zeros. If MERGED, the first term follows from P and dP.
        offs_m_out = wg_start_m + gl.arange(0, WG_M, gl.SliceLayout(1, LAYOUT_OUT))
        offs_d_out = gl.arange(0, BLOCK_DV, gl.SliceLayout(0, LAYOUT_OUT))
        delta = gl.zeros([WG_M], gl.float32, gl.SliceLayout(1, LAYOUT_S))
        for p in gl.static_range(0 if MERGED else PARTS_V):
            out = gl.load(
                OUT
                + (q_offset + offs_m_out)[:, None].to(gl.int64) * stride_om
                + (head * HEAD_DIM_V + p * BLOCK_DV + offs_d_out)[None, :],
                mask=tile_mask(
                    offs_m_out, seqlen_q, offs_d_out, HEAD_DIM_V - p * BLOCK_DV, BLOCK_DV
                ),
                other=0.0,
            )
            part = gl.sum(
                out.to(gl.float32)
                * as_matrix(do_smem.index(slot * PARTS_V + p)).load(LAYOUT_OUT).to(gl.float32),
                1,
            )
            delta += gl.convert_layout(part, gl.SliceLayout(1, LAYOUT_S))
        if HAS_DLSE:
            delta -= gl.load(
                DLSE
                + (q_offset + offs_m).to(gl.int64) * stride_dlsem
                + head.to(gl.int64) * stride_dlseh,
                mask=mask_m,
                other=0.0,
            )
        lse = gl.load(LSE + offset, mask=mask_m, other=0.0) * LOG2E
        gl.store(STATS + offset, lse, mask=mask_m)
        if not MERGED:
            gl.store(STATS + stats_stride + offset, delta, mask=mask_m)
        if Q_STAGES > 1 and work_idx > 0:
            # By now the previous tile's store has read the shared memory.
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index((work_idx - 1) % Q_STAGES), count=1)
        diagonal = offs_m + diagonal_offset
        if MERGED:
            first_key, end_key, diagonal = receive_attended(
                queue.index(work_idx % 2), gl.SliceLayout(1, LAYOUT_S)
            )
        slope = gl.load(SLOPES + head) * LOG2E if ALIBI else 0.0
        # This warp group skips the blocks after its last key; without queries, all blocks.
        n_block_max = get_n_block_max(
            start_m, seqlen_q, seqlen_k, window_right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW
        )
        n_block_min = get_n_block_min(
            start_m, seqlen_q, seqlen_k, window_left, n_block_max, BLOCK_N, WINDOW
        )
        if CHUNKED:
            chunk, n_block_min, n_block_max = receive_chunk(queue.index(work_idx % 2))
        wg_n_block_max = n_block_min
        if wg_start_m < seqlen_q:
            wg_n_block_max = gl.maximum(
                get_n_block_max(
                    wg_start_m, seqlen_q, seqlen_k, window_right, WG_M, BLOCK_N, CAUSAL, WINDOW
                ),
                n_block_min,
            )
            if CHUNKED:
                wg_n_block_max = gl.minimum(wg_n_block_max, n_block_max)
        step = skip_blocks(
            wg,
            n_block_max - wg_n_block_max,
            k_full,
            k_empty,
            v_full,
            v_empty,
            step,
            STAGES,
            PING_PONG,
        )
        last_key, full_blocks = get_key_limits(
            wg_start_m + diagonal_offset,
            diagonal,
            seqlen_k,
            window_right,
            wg_n_block_max,
            BLOCK_N,
            CAUSAL,
            WINDOW,
        )
        # Blocks before `window_mask_end` begin before the first key of some query.
        window_mask_end = 0
        if WINDOW:
            window_mask_end = gl.cdiv(
                gl.maximum(wg_start_m + WG_M - 1 + diagonal_offset - window_left, 0), BLOCK_N
            )
        if MERGED:
            dq, delta = _dq_of_group(
                q,
                do,
                k_smem,
                v_smem,
                k_full,
                k_empty,
                v_full,
                v_empty,
                lse,
                delta,
                step,
                last_key,
                diagonal,
                first_key,
                end_key,
                window_left,
                offs_n,
                scale,
                softcap,
                slope,
                WINDOW,
                SOFTCAP,
                ALIBI,
                PARTS,
                PARTS_V,
                STAGES,
                LAYOUT_S,
                LAYOUT_O,
                HEAD_DIM,
            )
            gl.store(STATS + stats_stride + offset, delta, mask=mask_m)
            step += 1
        else:
            dq = zero_accumulators(WG_M, BLOCK_D, PARTS, HEAD_DIM)
            for n_block in range(wg_n_block_max - 1, n_block_min - 1, -1):
                dq = _dq_step(
                    wg,
                    q,
                    do,
                    k_smem,
                    v_smem,
                    k_full,
                    k_empty,
                    v_full,
                    v_empty,
                    dq,
                    lse,
                    delta,
                    step,
                    last_key - n_block * BLOCK_N,
                    diagonal - n_block * BLOCK_N,
                    window_left,
                    offs_n,
                    scale,
                    softcap,
                    slope,
                    (n_block >= full_blocks) | (n_block < window_mask_end),
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                    PARTS,
                    PARTS_V,
                    STAGES,
                    LAYOUT_S,
                    LAYOUT_O,
                    PING_PONG,
                )
                step += 1
        factor = score_derivative(scale, softcap, SOFTCAP)
        if CHUNKED:
            if chunk > 0:
                # The sums of a chunk have the shape (heads, BLOCK_M, HEAD_DIM).
                sums = ((chunk - 1).to(gl.int64) * heads + head) * BLOCK_M
                store_accumulators(
                    *(DQ_SUMS + sums * HEAD_DIM, dq, factor, wg * WG_M, seqlen_q - start_m),
                    *(HEAD_DIM, HEAD_DIM, True),
                )
            else:
                _store_dq(
                    *(dq_desc, q_smem, slot, dq, factor, q_offset, seqlen_q, wg_start_m, head),
                    *(HEAD_DIM, BLOCK_D, PARTS),
                )
        else:
            _store_dq(
                *(dq_desc, q_smem, slot, dq, factor, q_offset, seqlen_q, wg_start_m, head),
                *(HEAD_DIM, BLOCK_D, PARTS),
            )
        if Q_STAGES == 1:
            tma.store_wait(0)
            mbarrier.arrive(q_empty.index(0), count=1)
        work_idx += 1
        mbarrier.wait(q_full.index(work_idx % Q_STAGES), (work_idx // Q_STAGES) & 1)
        q_offset, seqlen_q, seqlen_k, start_m, head = receive_tile(queue.index(work_idx % 2))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def attention_dq_sm90_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dq_desc,
    SLOPES,
    OUT,
    LSE,
    DLSE,
    STATS,
    DQ_SUMS,
    TILES,
    COUNTER,
    stride_qh,
    stride_kh,
    stride_vh,
    stride_doh,
    stride_om,
    stride_dlsem,
    stride_dlseh,
    total_q,
    stats_stride,
    heads,
    qheads_per_khead,
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
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    MERGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    HAS_DLSE: gl.constexpr,
    PING_PONG: gl.constexpr,
    CHUNKED: gl.constexpr,
):
    """Compute dQ, stored through its descriptor, and STATS (2, heads, total_q) for `attention_dkdv_sm90_kernel`.

    STATS holds the log-sum-exp in base 2 and delta = sum(out * dout) - dlse.

    CHUNKED
        TILES holds whole tiles and chunks of tiles, see `tile_chunks`. The sums of chunks go to
        DQ_SUMS in float32, and `attention_sum_chunks_kernel` adds them up.
    """
    q_smem = allocate_ring(q_desc, CONSUMERS * Q_STAGES * PARTS)
    do_smem = allocate_ring(do_desc, CONSUMERS * Q_STAGES * PARTS_V)
    k_smem = allocate_ring(k_desc, STAGES * PARTS)
    v_smem = allocate_ring(v_desc, STAGES * PARTS_V)
    queue = allocate_tile_queue(MERGED=MERGED)
    q_full = allocate_barriers(Q_STAGES, 1)
    q_empty = allocate_barriers(Q_STAGES, CONSUMERS)
    k_full = allocate_barriers(STAGES, 1)
    k_empty = allocate_barriers(STAGES, CONSUMERS)
    v_full = allocate_barriers(STAGES, 1)
    v_empty = allocate_barriers(STAGES, CONSUMERS)
    smem = q_smem, k_smem, v_smem, do_smem, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty
    producer_args = (
        q_desc,
        k_desc,
        v_desc,
        do_desc,
        TILES,
        COUNTER,
        stride_qh,
        stride_kh,
        stride_vh,
        stride_doh,
        heads,
        qheads_per_khead,
        heads_in_l2,
    )
    # Only kernels of chunks have sums.
    sums_args = ()
    if CHUNKED:
        sums_args = DQ_SUMS, heads
    consumer_args = (
        dq_desc,
        SLOPES,
        OUT,
        LSE,
        DLSE,
        STATS,
        stride_om,
        stride_dlsem,
        stride_dlseh,
        total_q,
        stats_stride,
        scale,
        softcap,
        sums_args,
    )
    window_right = 0 if CAUSAL else window_right
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (
                    _dq_consumer,
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
                        STAGES,
                        Q_STAGES,
                        CONSUMERS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HAS_DLSE,
                        PING_PONG,
                        CHUNKED,
                    ),
                ),
                (
                    dq_producer,
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
                        Q_STAGES,
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
                    _dq_consumer,
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
                        STAGES,
                        Q_STAGES,
                        CONSUMERS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HAS_DLSE,
                        PING_PONG,
                        CHUNKED,
                    ),
                ),
                (
                    _dq_consumer,
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
                        STAGES,
                        Q_STAGES,
                        CONSUMERS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HAS_DLSE,
                        PING_PONG,
                        CHUNKED,
                    ),
                ),
                (
                    dq_producer,
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
                        Q_STAGES,
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
                    _dq_consumer,
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
                        STAGES,
                        Q_STAGES,
                        CONSUMERS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HAS_DLSE,
                        PING_PONG,
                        CHUNKED,
                    ),
                ),
                (
                    _dq_consumer,
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
                        STAGES,
                        Q_STAGES,
                        CONSUMERS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HAS_DLSE,
                        PING_PONG,
                        CHUNKED,
                    ),
                ),
                (
                    _dq_consumer,
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
                        STAGES,
                        Q_STAGES,
                        CONSUMERS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        HAS_DLSE,
                        PING_PONG,
                        CHUNKED,
                    ),
                ),
                (
                    dq_producer,
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
                        Q_STAGES,
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
