"""The forward of attention on Hopper, float16 and bfloat16, head_dim up to 256.

Each consumer warp group starts the next Q K^T before the softmax of the current block. Named
barriers alternate the warp groups on the tensor cores (FlashAttention-3's ping-pong), so the
softmax of one warp group runs during the matrix products of the others. Two or three warp groups
share each K and V tile, because the bandwidth of the L2 cache limits a single one.

Short rows of narrow heads use one consumer warp group per CTA and three CTAs per SM instead; the
CTAs hide each other's waits. TMA stores the output from the shared memory of the queries while the
next tile begins.
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
    as_wide_matrix,
    columns_layout,
    fetch_tile,
    head_coordinate,
    load_parts,
    load_slot,
    load_tile,
    operand_parts,
    pdl_launch_dependents,
    ping_pong_arrive,
    ping_pong_wait,
    publish_attended,
    publish_tile,
    receive_attended,
    receive_tile,
    scale_rows,
    slot_bytes,
    start_mma,
    start_mma_transposed,
    store_slot,
    store_tile,
    tile_entry,
    wait_mma,
    zero_accumulators,
)
from .constants import INITIAL_MAX, LN2, LOG2E, UNSPECIALIZED
from .scores_sm90 import (
    apply_alibi,
    apply_softcap,
    get_key_limits,
    get_n_block_max,
    get_n_block_min,
    is_between,
    isolate_rows,
    mask_scores,
    partial_row_sums,
)


@gluon.jit
def _shift_tile_start(start_m, seqlen_q, BLOCK_M: gl.constexpr):
    """Move the tiles of three warp groups to the left, so that a row ends with its last 64 tokens.

    The last tile is then full, and the warp groups without queries are in the first tile, which has
    the fewest keys. Two warp groups would not gain from this.
    """
    if BLOCK_M > 128:
        return start_m - (gl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M - gl.cdiv(seqlen_q, 64) * 64)
    else:
        return start_m


@gluon.jit
def _is_empty(
    start_m,
    seqlen_q,
    seqlen_k,
    window_right,
    BLOCK_M: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Return whether no query of a tile attends to a key."""
    end = seqlen_k
    if CAUSAL or WINDOW:
        end = gl.minimum(seqlen_k, start_m + BLOCK_M + seqlen_k - seqlen_q + window_right)
    return end <= 0


@gluon.jit
def _has_values(step, pending, SKIP_EMPTY: gl.constexpr):
    """Return whether the values of a block are still to be loaded."""
    if SKIP_EMPTY:
        return pending > 0
    else:
        return step > 0


@gluon.jit
def _load_last_values(
    v_desc,
    k_offset,
    seqlen_k,
    start_n,
    v_head,
    kv_full,
    kv_empty,
    v_smem,
    step,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load values without keys, and return the next step."""
    stage = step % STAGES
    mbarrier.wait(kv_empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(kv_full.index(stage), slot_bytes(v_smem, PARTS_V))
    load_slot(
        v_desc, k_offset, seqlen_k, start_n, v_head, kv_full.index(stage), v_smem, stage, PARTS_V
    )
    return step + 1


@gluon.jit
def forward_producer(
    smem,
    producer_args,
    window_left,
    window_right,
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
    SKIP_EMPTY: gl.constexpr = False,
):
    """Load queries once per tile, and each key block with the values of the previous block.

    One step of the consumers multiplies both. The last values before a tile without keys, and after the
    last tile, are loaded alone. The producer fetches the next tile and reads its entry before it waits for the
    slot of the last keys, which hides the latency.
    """
    q_smem, k_smem, v_smem, queue, q_full, q_empty, kv_full, kv_empty = smem
    (
        q_desc,
        k_desc,
        v_desc,
        TILES,
        COUNTER,
        stride_qh,
        stride_kh,
        stride_vh,
        heads,
        qheads_per_khead,
        heads_in_l2,
    ) = producer_args
    num_tiles = gl.load(TILES)
    total_tiles = num_tiles * heads
    tile_id = gl.program_id(0)
    tile, head = tile_entry(TILES, tile_id, num_tiles, total_tiles, heads_in_l2)
    q_offset, seqlen_q, k_offset, seqlen_k, start_m = load_tile(tile)
    work_idx = 0
    step = 0
    pending = 0  # whether the values of the last block are still to be loaded
    prev_k_offset = 0
    prev_seqlen_k = 0
    prev_start_n = 0
    prev_v_head = 0
    while tile_id >= 0:
        q_stage = work_idx % Q_STAGES
        mbarrier.wait(q_empty.index(q_stage), ((work_idx // Q_STAGES) & 1) ^ 1)
        publish_tile(queue.index(work_idx % 2), tile, tile_id, total_tiles, head)
        if tile_id < total_tiles:
            start_m = _shift_tile_start(start_m, seqlen_q, BLOCK_M)
            if SKIP_EMPTY and _is_empty(
                start_m, seqlen_q, seqlen_k, window_right, BLOCK_M, CAUSAL, WINDOW
            ):
                if pending > 0:
                    step = _load_last_values(
                        v_desc,
                        prev_k_offset,
                        prev_seqlen_k,
                        prev_start_n,
                        prev_v_head,
                        kv_full,
                        kv_empty,
                        v_smem,
                        step,
                        PARTS_V,
                        STAGES,
                    )
                pending = 0
                mbarrier.arrive(q_full.index(q_stage), count=1)
                tile_id = fetch_tile(COUNTER, total_tiles)
                tile, head = tile_entry(TILES, tile_id, num_tiles, total_tiles, heads_in_l2)
                q_offset, seqlen_q, k_offset, seqlen_k, start_m = load_tile(tile)
            else:
                mbarrier.expect(q_full.index(q_stage), CONSUMERS * slot_bytes(q_smem, PARTS_Q))
                for wg in gl.static_range(CONSUMERS):
                    load_slot(
                        q_desc,
                        q_offset,
                        seqlen_q,
                        gl.maximum(start_m + wg * (BLOCK_M // CONSUMERS), 0),
                        head_coordinate(head, stride_qh, q_smem),
                        q_full.index(q_stage),
                        q_smem,
                        q_stage * CONSUMERS + wg,
                        PARTS_Q,
                    )
                n_block_max = get_n_block_max(
                    start_m, seqlen_q, seqlen_k, window_right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW
                )
                n_block_min = get_n_block_min(
                    start_m, seqlen_q, seqlen_k, window_left, n_block_max, BLOCK_N, WINDOW
                )
                cur_k_offset = k_offset + 0
                cur_seqlen_k = seqlen_k + 0
                cur_k_head = head_coordinate(head // qheads_per_khead, stride_kh, k_smem)
                cur_v_head = head_coordinate(head // qheads_per_khead, stride_vh, v_smem)
                for n_block in range(n_block_max - 1, n_block_min - 1, -1):
                    if n_block == n_block_min:
                        tile_id = fetch_tile(COUNTER, total_tiles)
                        tile, head = tile_entry(TILES, tile_id, num_tiles, total_tiles, heads_in_l2)
                        q_offset, seqlen_q, k_offset, seqlen_k, start_m = load_tile(tile)
                    stage = step % STAGES
                    mbarrier.wait(kv_empty.index(stage), ((step // STAGES) & 1) ^ 1)
                    if _has_values(step, pending, SKIP_EMPTY):
                        mbarrier.expect(
                            kv_full.index(stage),
                            slot_bytes(k_smem, PARTS) + slot_bytes(v_smem, PARTS_V),
                        )
                        load_slot(
                            v_desc,
                            prev_k_offset,
                            prev_seqlen_k,
                            prev_start_n,
                            prev_v_head,
                            kv_full.index(stage),
                            v_smem,
                            stage,
                            PARTS_V,
                        )
                    else:
                        mbarrier.expect(kv_full.index(stage), slot_bytes(k_smem, PARTS))
                    load_slot(
                        k_desc,
                        cur_k_offset,
                        cur_seqlen_k,
                        n_block * BLOCK_N,
                        cur_k_head,
                        kv_full.index(stage),
                        k_smem,
                        stage,
                        PARTS,
                    )
                    prev_k_offset = cur_k_offset + 0
                    prev_seqlen_k = cur_seqlen_k + 0
                    prev_start_n = n_block * BLOCK_N
                    prev_v_head = cur_v_head + 0
                    step += 1
                    pending = 1
        else:
            if _has_values(step, pending, SKIP_EMPTY):
                _load_last_values(
                    v_desc,
                    prev_k_offset,
                    prev_seqlen_k,
                    prev_start_n,
                    prev_v_head,
                    kv_full,
                    kv_empty,
                    v_smem,
                    step,
                    PARTS_V,
                    STAGES,
                )
            mbarrier.arrive(q_full.index(q_stage), count=1)
            pdl_launch_dependents(work_idx)  # an earlier start costs more than it saves
            tile_id = -1
        work_idx += 1


@gluon.jit
def _forward_group_producer(
    smem,
    producer_args,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
):
    """Load the queries, keys and values of each tile of short rows, then fetch the next tile."""
    q_smem, k_smem, v_smem, queue, q_full, q_empty, kv_full, kv_empty = smem
    (
        q_desc,
        k_desc,
        v_desc,
        TILES,
        COUNTER,
        stride_qh,
        stride_kh,
        stride_vh,
        heads,
        qheads_per_khead,
        heads_in_l2,
    ) = producer_args
    num_tiles, attended, total_q = gl.load(TILES), TILES + gl.load(TILES + 1), gl.load(TILES + 2)
    total_tiles = num_tiles * heads
    tile_id = gl.program_id(0)
    work_idx = 0
    while tile_id >= 0:
        tile, head = tile_entry(TILES, tile_id, num_tiles, total_tiles, heads_in_l2)
        q_offset, seqlen_q, k_offset, seqlen_k, start_m = load_tile(tile)
        q_stage = work_idx % Q_STAGES
        mbarrier.wait(q_empty.index(q_stage), ((work_idx // Q_STAGES) & 1) ^ 1)
        publish_tile(queue.index(work_idx % 2), tile, tile_id, total_tiles, head)
        if tile_id < total_tiles:
            publish_attended(
                *(queue.index(work_idx % 2), attended, total_q),
                *(q_offset, seqlen_q, start_m, q_full.index(q_stage)),
            )
            mbarrier.expect(q_full.index(q_stage), slot_bytes(q_smem, PARTS))
            load_slot(
                q_desc,
                q_offset,
                seqlen_q,
                start_m,
                head_coordinate(head, stride_qh, q_smem),
                q_full.index(q_stage),
                q_smem,
                q_stage,
                PARTS,
            )
            stage = work_idx % STAGES
            mbarrier.wait(kv_empty.index(stage), ((work_idx // STAGES) & 1) ^ 1)
            mbarrier.expect(
                kv_full.index(stage), slot_bytes(k_smem, PARTS) + slot_bytes(v_smem, PARTS_V)
            )
            load_slot(
                k_desc,
                k_offset,
                seqlen_k,
                0,
                head_coordinate(head // qheads_per_khead, stride_kh, k_smem),
                kv_full.index(stage),
                k_smem,
                stage,
                PARTS,
            )
            load_slot(
                v_desc,
                k_offset,
                seqlen_k,
                0,
                head_coordinate(head // qheads_per_khead, stride_vh, v_smem),
                kv_full.index(stage),
                v_smem,
                stage,
                PARTS_V,
            )
            tile_id = fetch_tile(COUNTER, total_tiles)
        else:
            mbarrier.arrive(q_full.index(q_stage), count=1)
            pdl_launch_dependents(work_idx)
            tile_id = -1
        work_idx += 1


@gluon.jit
def _rescale_accumulators(parts, alpha):
    """Multiply the rows of the accumulators by factors.

    Most factors are 1; the predicate then skips the multiplication.
    """
    products = ()
    for p in gl.static_range(len(parts)):
        factor = gl.convert_layout(alpha, gl.SliceLayout(1, parts[p].type.layout))[:, None]
        products += (
            gl.inline_asm_elementwise(
                "{.reg .pred other; setp.neu.f32 other, $2, 0f3F800000; "
                "mov.b32 $0, $1; @other mul.f32 $0, $1, $2;}",
                "=f,f,f",
                [parts[p], factor],
                gl.float32,
                True,
                1,
            ),
        )
    return products


@gluon.jit
def forward_step(
    wg: gl.constexpr,
    q,
    k_smem,
    v_smem,
    kv_full,
    kv_empty,
    acc,
    p,
    row_max,
    row_sum,
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
    CONSUMERS: gl.constexpr,
):
    """Run Q K^T of block `step` and P V of block `step - 1`, whose weights p are still float32."""
    stage = step % STAGES
    mbarrier.wait(kv_full.index(stage), (step // STAGES) & 1)
    ping_pong_wait(wg, step, CONSUMERS)
    scores = start_mma_transposed(q, k_smem, stage, PARTS, LAYOUT_S)
    p_operand = gl.convert_layout(p.to(v_smem.dtype), gl.DotOperandLayout(0, LAYOUT_O, 2))
    acc = start_mma(p_operand, v_smem, stage, acc, PARTS_V)
    ping_pong_arrive(wg, step, CONSUMERS)
    scores = warpgroup_mma_wait(len(acc), deps=(scores,))
    scores, factor = apply_softcap(scores, scale, softcap, SOFTCAP)
    scores, factor = apply_alibi(scores, factor, slope, diagonal, offs_n, ALIBI)
    if masked:
        scores = mask_scores(scores, last_key, diagonal, window_left, offs_n, WINDOW)
    # Keep the running maximum while it grows by at most 8, so that most sums need no rescaling.
    # Weights are then at most 2^8.
    block_max = gl.max(scores, 1) * factor
    row_max_new = gl.where(block_max > row_max + 8.0, block_max, row_max)
    alpha = gl.exp2(row_max - row_max_new)
    p = gl.exp2(scores * factor - row_max_new[:, None])
    row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[
        :, None
    ] + partial_row_sums(p)
    acc = wait_mma(0, acc, p_operand)
    mbarrier.arrive(kv_empty.index(stage), count=1)
    acc = _rescale_accumulators(acc, alpha)
    return acc, p, row_max_new, row_sum


@gluon.jit
def _store_output(
    parts,
    o_desc,
    OUT,
    q_smem,
    slot,
    head,
    q_offset,
    seqlen_q,
    wg_start_m,
    wg_end_m,
    stride_om,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    PARTS: gl.constexpr,
    STORE_IN_Q_SMEM: gl.constexpr,
):
    """Store the output of a warp group, or start its store by TMA."""
    for n in gl.static_range(len(parts)):
        if STORE_IN_Q_SMEM:
            as_wide_matrix(
                q_smem, slot * PARTS + n * (parts[0].shape[1] // BLOCK_DV), parts[n].shape[1]
            ).store(parts[n].to(OUT.dtype.element_ty))
        else:
            store_tile(
                OUT + q_offset.to(gl.int64) * stride_om + head * HEAD_DIM_V + n * parts[0].shape[1],
                parts[n],
                wg_start_m,
                wg_end_m,
                stride_om,
                HEAD_DIM_V - n * parts[0].shape[1],
                columns_layout(parts[n].shape[1]),
            )
    if STORE_IN_Q_SMEM:
        fence_async_shared()
        if wg_start_m < wg_end_m:
            store_slot(
                o_desc,
                q_offset,
                seqlen_q,
                wg_start_m,
                head_coordinate(head, HEAD_DIM_V, q_smem),
                q_smem,
                slot,
                PARTS,
            )


@gluon.jit
def _forward_consumer(
    wg: gl.constexpr,
    smem,
    consumer_args,
    window_left,
    window_right,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    STORE_IN_Q_SMEM: gl.constexpr,
    SAME_OFFSETS: gl.constexpr,
    MERGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr,
    CONSUMERS: gl.constexpr,
    SKIP_EMPTY: gl.constexpr,
):
    WG_M: gl.constexpr = BLOCK_M // CONSUMERS
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    q_smem, k_smem, v_smem, queue, q_full, q_empty, kv_full, kv_empty = smem
    o_desc, OUT, LSE, SLOPES, stride_om, total_q, scale, softcap = consumer_args
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT_S))
    work_idx = 0
    step = 0
    pending = 0  # whether the slot of the last values is still to be released
    if wg == CONSUMERS - 1:  # the first warp group starts
        ping_pong_arrive(wg, step, CONSUMERS)
    mbarrier.wait(q_full.index(0), 0)
    q_offset, seqlen_q, seqlen_k, start_m, head = receive_tile(queue.index(0))
    while seqlen_q > 0:
        slot = (work_idx % Q_STAGES) * CONSUMERS + wg
        start_m = _shift_tile_start(start_m, seqlen_q, BLOCK_M)
        if SKIP_EMPTY and _is_empty(
            start_m, seqlen_q, seqlen_k, window_right, BLOCK_M, CAUSAL, WINDOW
        ):
            if pending > 0:
                # The last values, which came without keys, have been multiplied.
                mbarrier.arrive(kv_empty.index(step % STAGES), count=1)
                step += 1
            pending = 0
            if not STORE_IN_Q_SMEM:
                mbarrier.arrive(q_empty.index(work_idx % Q_STAGES), count=1)
            elif work_idx > 0:
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index((work_idx - 1) % Q_STAGES), count=1)
            wg_start_m = start_m + wg * WG_M
            wg_end_m = gl.where(wg_start_m < 0, wg_start_m, seqlen_q)
            acc = zero_accumulators(WG_M, BLOCK_DV, PARTS_V, HEAD_DIM_V)
            _store_output(
                acc,
                o_desc,
                OUT,
                q_smem,
                slot,
                head,
                q_offset,
                seqlen_q,
                wg_start_m,
                wg_end_m,
                stride_om,
                HEAD_DIM_V,
                BLOCK_DV,
                PARTS,
                STORE_IN_Q_SMEM,
            )
            offs_m = wg_start_m + gl.arange(0, WG_M, gl.SliceLayout(1, LAYOUT_S))
            lse = gl.full([WG_M], -float("inf"), gl.float32, gl.SliceLayout(1, LAYOUT_S))
            gl.store(
                LSE + head.to(gl.int64) * total_q + q_offset + offs_m, lse, mask=offs_m < wg_end_m
            )
        else:
            q = operand_parts(q_smem, slot, PARTS, HEAD_DIM)
            if Q_IN_REGISTERS:
                q = load_parts(q, PARTS, LAYOUT_S)
                if not STORE_IN_Q_SMEM:
                    mbarrier.arrive(q_empty.index(work_idx % Q_STAGES), count=1)
            diagonal_offset = seqlen_k - seqlen_q
            n_block_max = get_n_block_max(
                start_m, seqlen_q, seqlen_k, window_right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW
            )
            wg_start_m = start_m + wg * WG_M
            offs_m = wg_start_m + gl.arange(0, WG_M, gl.SliceLayout(1, LAYOUT_S))
            diagonal = offs_m + diagonal_offset
            slope = gl.load(SLOPES + head) * LOG2E if ALIBI else 0.0
            if MERGED:
                first_key, end_key, diagonal = receive_attended(
                    queue.index(work_idx % 2), gl.SliceLayout(1, LAYOUT_S)
                )
            n_block_min = get_n_block_min(
                start_m, seqlen_q, seqlen_k, window_left, n_block_max, BLOCK_N, WINDOW
            )
            # This warp group skips the blocks after its last key; without queries, all blocks but one.
            wg_end_m = gl.where(wg_start_m < 0, wg_start_m, seqlen_q)
            wg_n_block_max = n_block_min + 1
            if wg_start_m < wg_end_m:
                wg_n_block_max = gl.maximum(
                    get_n_block_max(
                        wg_start_m, seqlen_q, seqlen_k, window_right, WG_M, BLOCK_N, CAUSAL, WINDOW
                    ),
                    wg_n_block_max,
                )
            for _ in range(n_block_max - wg_n_block_max):
                mbarrier.wait(kv_full.index(step % STAGES), (step // STAGES) & 1)
                mbarrier.arrive(kv_empty.index(step % STAGES), count=1)
                ping_pong_wait(wg, step, CONSUMERS)
                ping_pong_arrive(wg, step, CONSUMERS)
                step += 1
            n_block_max = wg_n_block_max
            # The last key of each query, and the number of blocks that all queries of this warp group
            # attend in full. With equal rows (and a BLOCK_N that WG_M divides) it is all but the last.
            if SAME_OFFSETS:
                last_key = offs_m
                full_blocks = n_block_max - 1
            else:
                last_key, full_blocks = get_key_limits(
                    wg_start_m + diagonal_offset,
                    diagonal,
                    seqlen_k,
                    window_right,
                    n_block_max - 1,
                    BLOCK_N,
                    CAUSAL,
                    WINDOW,
                )
            mbarrier.wait(kv_full.index(step % STAGES), (step // STAGES) & 1)
            ping_pong_wait(wg, step, CONSUMERS)
            scores = start_mma_transposed(q, k_smem, step % STAGES, PARTS, LAYOUT_S)
            ping_pong_arrive(wg, step, CONSUMERS)
            if STORE_IN_Q_SMEM and work_idx > 0:
                tma.store_wait(0)
                mbarrier.arrive(q_empty.index((work_idx - 1) % Q_STAGES), count=1)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            if not MERGED:
                mbarrier.arrive(kv_empty.index(step % STAGES), count=1)
            scores, factor = apply_softcap(scores, scale, softcap, SOFTCAP)
            scores, factor = apply_alibi(
                scores, factor, slope, diagonal - (n_block_max - 1) * BLOCK_N, offs_n, ALIBI
            )
            scores = mask_scores(
                scores,
                last_key - (n_block_max - 1) * BLOCK_N,
                diagonal - (n_block_max - 1) * BLOCK_N,
                window_left,
                offs_n,
                WINDOW,
            )
            if MERGED:
                scores = gl.where(is_between(offs_n, first_key, end_key), scores, -float("inf"))
            row_max = gl.maximum(gl.max(scores, 1) * factor, INITIAL_MAX)
            p = gl.exp2(scores * factor - row_max[:, None])
            row_sum = partial_row_sums(p)
            acc = zero_accumulators(WG_M, BLOCK_DV, PARTS_V, HEAD_DIM_V)
            if not MERGED:
                step += 1
            if MERGED:
                pass  # the tile has one block of keys, which came together with its values
            elif WINDOW:
                # Blocks before `window_mask_end` begin before the first key of some query. One loop
                # over all blocks takes fewer registers.
                window_mask_end = gl.cdiv(
                    gl.maximum(wg_start_m + WG_M - 1 + diagonal_offset - window_left, 0), BLOCK_N
                )
                for n_block in range(n_block_max - 2, n_block_min - 1, -1):
                    acc, p, row_max, row_sum = forward_step(
                        wg,
                        q,
                        k_smem,
                        v_smem,
                        kv_full,
                        kv_empty,
                        acc,
                        p,
                        row_max,
                        row_sum,
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
                        CONSUMERS,
                    )
                    step += 1
            else:
                if CAUSAL and not SAME_OFFSETS:
                    for n_block in range(n_block_max - 2, full_blocks - 1, -1):
                        acc, p, row_max, row_sum = forward_step(
                            wg,
                            q,
                            k_smem,
                            v_smem,
                            kv_full,
                            kv_empty,
                            acc,
                            p,
                            row_max,
                            row_sum,
                            step,
                            last_key - n_block * BLOCK_N,
                            diagonal,
                            window_left,
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
                        step += 1
                for _ in range(full_blocks - 1, -1, -1):
                    acc, p, row_max, row_sum = forward_step(
                        wg,
                        q,
                        k_smem,
                        v_smem,
                        kv_full,
                        kv_empty,
                        acc,
                        p,
                        row_max,
                        row_sum,
                        step,
                        last_key,
                        diagonal,
                        window_left,
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
                    step += 1
            if not STORE_IN_Q_SMEM and not Q_IN_REGISTERS:
                mbarrier.arrive(q_empty.index(work_idx % Q_STAGES), count=1)
            p_operand = gl.convert_layout(p.to(v_smem.dtype), gl.DotOperandLayout(0, LAYOUT_O, 2))
            if not MERGED:
                mbarrier.wait(kv_full.index(step % STAGES), (step // STAGES) & 1)
            acc = start_mma(p_operand, v_smem, step % STAGES, acc, PARTS_V)
            row_sum_total = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, LAYOUT_S))
            no_valid_key = gl.minimum(last_key, seqlen_k - 1) < 0
            if MERGED:
                no_valid_key = gl.minimum(last_key, end_key - 1) < first_key
            lse = gl.where(no_valid_key, -float("inf"), (row_max + gl.log2(row_sum_total)) * LN2)
            inv_row_sum = gl.where(no_valid_key, 0.0, 1.0 / row_sum_total)
            acc = wait_mma(0, acc, p_operand)
            if MERGED:
                acc = isolate_rows(
                    acc, p_operand, v_smem, step % STAGES, first_key, end_key, offs_n, PARTS_V
                )
                mbarrier.arrive(kv_empty.index(step % STAGES), count=1)
                step += 1
            scaled = ()
            for n in gl.static_range(len(acc)):
                # Tokens after the end of the row may be NaN, so multiplying by 0 is not enough.
                scaled += (scale_rows(acc[n], inv_row_sum),)
            _store_output(
                scaled,
                o_desc,
                OUT,
                q_smem,
                slot,
                head,
                q_offset,
                seqlen_q,
                wg_start_m,
                wg_end_m,
                stride_om,
                HEAD_DIM_V,
                BLOCK_DV,
                PARTS,
                STORE_IN_Q_SMEM,
            )
            gl.store(
                LSE + head.to(gl.int64) * total_q + q_offset + offs_m, lse, mask=offs_m < wg_end_m
            )
            pending = 1
        work_idx += 1
        mbarrier.wait(q_full.index(work_idx % Q_STAGES), (work_idx // Q_STAGES) & 1)
        q_offset, seqlen_q, seqlen_k, start_m, head = receive_tile(queue.index(work_idx % 2))
    if STORE_IN_Q_SMEM:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def attention_forward_sm90_kernel(
    q_desc,
    k_desc,
    v_desc,
    o_desc,
    SLOPES,
    OUT,
    LSE,
    TILES,
    COUNTER,
    stride_qh,
    stride_kh,
    stride_vh,
    stride_om,
    total_q,
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
    HEAD_DIM_V: gl.constexpr,
    BLOCK_DV: gl.constexpr,
    PARTS: gl.constexpr,
    PARTS_V: gl.constexpr,
    STAGES: gl.constexpr,
    Q_STAGES: gl.constexpr,
    STORE_IN_Q_SMEM: gl.constexpr,
    CONSUMERS: gl.constexpr,
    SAME_OFFSETS: gl.constexpr,
    MERGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr,
    SKIP_EMPTY: gl.constexpr,
):
    """Compute OUT (total_q, heads, HEAD_DIM_V) and the natural log-sum-exp LSE (heads, total_q).

    CONSUMERS
        The number of consumer warp groups, of 64 queries each: 1 where CTAs share an SM, up to 3.
    SAME_OFFSETS
        Queries and keys of causal rows have the same offsets.
    Q_IN_REGISTERS
        Queries stay in registers, so the scores read half as much shared memory.
    STORE_IN_Q_SMEM
        The output goes through the shared memory of its queries, which are as wide.
    SKIP_EMPTY
        Tiles whose queries attend to no key load nothing, and their output is 0.

    `sm90.pipeline` and `scores_sm90` describe the other constants.
    """
    q_smem = allocate_ring(q_desc, Q_STAGES * CONSUMERS * PARTS)
    k_smem = allocate_ring(k_desc, STAGES * PARTS)
    v_smem = allocate_ring(v_desc, STAGES * PARTS_V)
    queue = allocate_tile_queue(MERGED=MERGED)
    q_full = allocate_barriers(Q_STAGES, 1)
    q_empty = allocate_barriers(Q_STAGES, CONSUMERS)
    kv_full = allocate_barriers(STAGES, 1)
    kv_empty = allocate_barriers(STAGES, CONSUMERS)
    smem = q_smem, k_smem, v_smem, queue, q_full, q_empty, kv_full, kv_empty
    producer_args = (
        q_desc,
        k_desc,
        v_desc,
        TILES,
        COUNTER,
        stride_qh,
        stride_kh,
        stride_vh,
        heads,
        qheads_per_khead,
        heads_in_l2,
    )
    consumer_args = o_desc, OUT, LSE, SLOPES, stride_om, total_q, scale, softcap
    if MERGED:
        gl.warp_specialize(
            [
                (
                    _forward_consumer,
                    (
                        0,
                        smem,
                        consumer_args,
                        window_left,
                        0 if CAUSAL else window_right,
                        BLOCK_M,
                        BLOCK_N,
                        HEAD_DIM,
                        HEAD_DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        STORE_IN_Q_SMEM,
                        SAME_OFFSETS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        Q_IN_REGISTERS,
                        1,
                        SKIP_EMPTY,
                    ),
                ),
                (_forward_group_producer, (smem, producer_args, PARTS, PARTS_V, STAGES, Q_STAGES)),
            ],
            [1],
            [24],
        )
    elif CONSUMERS == 1:
        gl.warp_specialize(
            [
                (
                    _forward_consumer,
                    (
                        0,
                        smem,
                        consumer_args,
                        window_left,
                        0 if CAUSAL else window_right,
                        BLOCK_M,
                        BLOCK_N,
                        HEAD_DIM,
                        HEAD_DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        STORE_IN_Q_SMEM,
                        SAME_OFFSETS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        Q_IN_REGISTERS,
                        1,
                        SKIP_EMPTY,
                    ),
                ),
                (
                    forward_producer,
                    (
                        smem,
                        producer_args,
                        window_left,
                        0 if CAUSAL else window_right,
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
                        SKIP_EMPTY,
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
                        smem,
                        consumer_args,
                        window_left,
                        0 if CAUSAL else window_right,
                        BLOCK_M,
                        BLOCK_N,
                        HEAD_DIM,
                        HEAD_DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        STORE_IN_Q_SMEM,
                        SAME_OFFSETS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        Q_IN_REGISTERS,
                        2,
                        SKIP_EMPTY,
                    ),
                ),
                (
                    _forward_consumer,
                    (
                        1,
                        smem,
                        consumer_args,
                        window_left,
                        0 if CAUSAL else window_right,
                        BLOCK_M,
                        BLOCK_N,
                        HEAD_DIM,
                        HEAD_DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        STORE_IN_Q_SMEM,
                        SAME_OFFSETS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        Q_IN_REGISTERS,
                        2,
                        SKIP_EMPTY,
                    ),
                ),
                (
                    forward_producer,
                    (
                        smem,
                        producer_args,
                        window_left,
                        0 if CAUSAL else window_right,
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
                        SKIP_EMPTY,
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
                        smem,
                        consumer_args,
                        window_left,
                        0 if CAUSAL else window_right,
                        BLOCK_M,
                        BLOCK_N,
                        HEAD_DIM,
                        HEAD_DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        STORE_IN_Q_SMEM,
                        SAME_OFFSETS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        Q_IN_REGISTERS,
                        3,
                        SKIP_EMPTY,
                    ),
                ),
                (
                    _forward_consumer,
                    (
                        1,
                        smem,
                        consumer_args,
                        window_left,
                        0 if CAUSAL else window_right,
                        BLOCK_M,
                        BLOCK_N,
                        HEAD_DIM,
                        HEAD_DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        STORE_IN_Q_SMEM,
                        SAME_OFFSETS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        Q_IN_REGISTERS,
                        3,
                        SKIP_EMPTY,
                    ),
                ),
                (
                    _forward_consumer,
                    (
                        2,
                        smem,
                        consumer_args,
                        window_left,
                        0 if CAUSAL else window_right,
                        BLOCK_M,
                        BLOCK_N,
                        HEAD_DIM,
                        HEAD_DIM_V,
                        BLOCK_DV,
                        PARTS,
                        PARTS_V,
                        STAGES,
                        Q_STAGES,
                        STORE_IN_Q_SMEM,
                        SAME_OFFSETS,
                        MERGED,
                        CAUSAL,
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        Q_IN_REGISTERS,
                        3,
                        SKIP_EMPTY,
                    ),
                ),
                (
                    forward_producer,
                    (
                        smem,
                        producer_args,
                        window_left,
                        0 if CAUSAL else window_right,
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
                        SKIP_EMPTY,
                    ),
                ),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
