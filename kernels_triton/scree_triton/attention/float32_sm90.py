"""float32 attention on Hopper's tensor cores, forward and backward, head_dim 32 and 64.

The results have the precision of float32 products. `bf16x3` describes how six bfloat16 products make
one float32 product. Everything else is as in `forward_sm90`, `dq_sm90` and `dkdv_sm90`, whose
producers load the bfloat16 terms. The six products of one consumer warp group hide all work between
products of the other one, so no step needs to run ahead of another.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from ..sm90.pipeline import (
    allocate_barriers,
    allocate_ring,
    allocate_tile_queue,
    as_matrix,
    ping_pong_arrive,
    ping_pong_wait,
    receive_tile,
    slot_parts,
    store_tile,
)
from .bf16x3 import PRODUCTS, TERMS, add_mma_bf16x3, split_bf16x3, start_mma_bf16x3
from .constants import INITIAL_MAX, LN2, LOG2E, UNSPECIALIZED
from .dkdv_sm90 import dkdv_producer
from .dq_sm90 import dq_producer
from .forward_sm90 import forward_producer
from .scores_sm90 import (
    apply_alibi,
    apply_softcap,
    get_key_limits,
    get_m_block_min_max,
    get_n_block_max,
    get_n_block_min,
    mask_scores,
    partial_row_sums,
    score_derivative,
)


@gluon.jit
def _forward_step(
    wg: gl.constexpr,
    q,
    k_smem,
    v_smem,
    kv_full,
    kv_empty,
    acc,
    p_terms,
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
    STAGES: gl.constexpr,
    LAYOUT_S: gl.constexpr,
    LAYOUT_O: gl.constexpr,
):
    """Run Q K^T of block `step` and P V of block `step - 1`, whose weights are already split."""
    stage = step % STAGES
    mbarrier.wait(kv_full.index(stage), (step // STAGES) & 1)
    ping_pong_wait(wg, step, 2)
    scores = start_mma_bf16x3(q, k_smem, stage, LAYOUT_S, True)
    pv = start_mma_bf16x3(p_terms, v_smem, stage, LAYOUT_O, False)
    ping_pong_arrive(wg, step, 2)
    scores = warpgroup_mma_wait(PRODUCTS, deps=(scores,))
    scores, factor = apply_softcap(scores, scale, softcap, SOFTCAP, True)
    scores, factor = apply_alibi(scores, factor, slope, diagonal, offs_n, ALIBI)
    if masked:
        scores = mask_scores(scores, last_key, diagonal, window_left, offs_n, WINDOW)
    row_max_new = gl.maximum(row_max, gl.max(scores, 1) * factor)
    alpha = gl.exp2(row_max - row_max_new)
    p = gl.exp2(scores * factor - row_max_new[:, None])
    row_sum = row_sum * gl.convert_layout(alpha, gl.SliceLayout(1, row_sum.type.layout))[
        :, None
    ] + partial_row_sums(p)
    pv = warpgroup_mma_wait(0, deps=(pv,) + p_terms)[0]
    mbarrier.arrive(kv_empty.index(stage), count=1)
    acc = (acc + pv) * gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT_O))[:, None]
    return acc, split_bf16x3(p, gl.DotOperandLayout(0, LAYOUT_O, 2)), row_max_new, row_sum


@gluon.jit
def _forward_consumer(
    wg: gl.constexpr,
    q_smem,
    k_smem,
    v_smem,
    queue,
    q_full,
    q_empty,
    kv_full,
    kv_empty,
    SLOPES,
    OUT,
    LSE,
    stride_om,
    total_q,
    window_left,
    window_right,
    scale,
    softcap,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
):
    WG_M: gl.constexpr = BLOCK_M // 2
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OPERAND_S: gl.constexpr = gl.DotOperandLayout(0, LAYOUT_S, 2)
    OPERAND_O: gl.constexpr = gl.DotOperandLayout(0, LAYOUT_O, 2)
    LAYOUT_STORE: gl.constexpr = gl.BlockedLayout(
        [1, 4], [128 // HEAD_DIM, HEAD_DIM // 4], [4, 1], [1, 0]
    )
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT_S))
    work_idx = 0
    step = 0
    if wg == 1:
        ping_pong_arrive(wg, step, 2)
    mbarrier.wait(q_full.index(0), 0)
    q_offset, seqlen_q, seqlen_k, start_m, head = receive_tile(queue.index(0))
    while seqlen_q > 0:
        q = split_bf16x3(as_matrix(q_smem.index(wg)).load(OPERAND_S), OPERAND_S)
        mbarrier.arrive(q_empty.index(0), count=1)
        diagonal_offset = seqlen_k - seqlen_q
        n_block_max = get_n_block_max(
            start_m, seqlen_q, seqlen_k, window_right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW
        )
        wg_start_m = start_m + wg * WG_M
        offs_m = wg_start_m + gl.arange(0, WG_M, gl.SliceLayout(1, LAYOUT_S))
        diagonal = offs_m + diagonal_offset
        slope = gl.load(SLOPES + head) * LOG2E if ALIBI else 0.0
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
        ping_pong_wait(wg, step, 2)
        scores = start_mma_bf16x3(q, k_smem, step % STAGES, LAYOUT_S, True)
        ping_pong_arrive(wg, step, 2)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(kv_empty.index(step % STAGES), count=1)
        scores, factor = apply_softcap(scores, scale, softcap, SOFTCAP, True)
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
        row_max = gl.maximum(gl.max(scores, 1) * factor, INITIAL_MAX)
        p = gl.exp2(scores * factor - row_max[:, None])
        row_sum = partial_row_sums(p)
        p_terms = split_bf16x3(p, OPERAND_O)
        acc = gl.zeros([WG_M, HEAD_DIM], gl.float32, LAYOUT_O)
        step += 1
        n_block_min = get_n_block_min(
            start_m, seqlen_q, seqlen_k, window_left, n_block_max, BLOCK_N, WINDOW
        )
        full_blocks = gl.maximum(full_blocks, n_block_min)
        # Blocks before `window_mask_end` begin before the first key of some query. In one loop over
        # all blocks ptxas would serialize the products.
        window_mask_end = gl.cdiv(
            gl.maximum(wg_start_m + WG_M - 1 + diagonal_offset - window_left, 0), BLOCK_N
        )
        for n_block in range(n_block_max - 2, full_blocks - 1, -1):
            acc, p_terms, row_max, row_sum = _forward_step(
                wg,
                q,
                k_smem,
                v_smem,
                kv_full,
                kv_empty,
                acc,
                p_terms,
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
                True,
                WINDOW,
                SOFTCAP,
                ALIBI,
                STAGES,
                LAYOUT_S,
                LAYOUT_O,
            )
            step += 1
        for n_block in range(full_blocks - 1, n_block_min - 1, -1):
            acc, p_terms, row_max, row_sum = _forward_step(
                wg,
                q,
                k_smem,
                v_smem,
                kv_full,
                kv_empty,
                acc,
                p_terms,
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
                WINDOW and n_block < window_mask_end,
                WINDOW,
                SOFTCAP,
                ALIBI,
                STAGES,
                LAYOUT_S,
                LAYOUT_O,
            )
            step += 1
        mbarrier.wait(kv_full.index(step % STAGES), (step // STAGES) & 1)
        pv = start_mma_bf16x3(p_terms, v_smem, step % STAGES, LAYOUT_O, False)
        row_sum_total = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, LAYOUT_S))
        no_valid_key = gl.minimum(last_key, seqlen_k - 1) < 0
        lse = gl.where(no_valid_key, -float("inf"), (row_max + gl.log2(row_sum_total)) * LN2)
        inv_row_sum = gl.convert_layout(
            gl.where(no_valid_key, 0.0, 1.0 / row_sum_total), gl.SliceLayout(1, LAYOUT_O)
        )
        pv = warpgroup_mma_wait(0, deps=(pv,) + p_terms)[0]
        acc = gl.where(inv_row_sum[:, None] == 0.0, 0.0, (acc + pv) * inv_row_sum[:, None])
        store_tile(
            OUT + q_offset.to(gl.int64) * stride_om + head * HEAD_DIM,
            acc,
            wg_start_m,
            seqlen_q,
            stride_om,
            HEAD_DIM,
            LAYOUT_STORE,
        )
        gl.store(LSE + head.to(gl.int64) * total_q + q_offset + offs_m, lse, mask=offs_m < seqlen_q)
        work_idx += 1
        mbarrier.wait(q_full.index(0), work_idx & 1)
        q_offset, seqlen_q, seqlen_k, start_m, head = receive_tile(queue.index(work_idx % 2))


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def attention_forward_float32_sm90_kernel(
    q_desc,
    k_desc,
    v_desc,
    SLOPES,
    OUT,
    LSE,
    TILES,
    COUNTER,
    stride_qh,
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
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
):
    """Compute OUT (total_q, heads, HEAD_DIM) and the natural log-sum-exp LSE (heads, total_q).

    The queries are loaded as float32 and split in registers.
    """
    q_smem = allocate_ring(q_desc, 2)
    k_smem = allocate_ring(k_desc, STAGES * TERMS)
    v_smem = allocate_ring(v_desc, STAGES * TERMS)
    queue = allocate_tile_queue()
    q_full = allocate_barriers(1, 1)
    q_empty = allocate_barriers(1, 2)
    kv_full = allocate_barriers(STAGES, 1)
    kv_empty = allocate_barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (
                _forward_consumer,
                (
                    0,
                    q_smem,
                    k_smem,
                    v_smem,
                    queue,
                    q_full,
                    q_empty,
                    kv_full,
                    kv_empty,
                    SLOPES,
                    OUT,
                    LSE,
                    stride_om,
                    total_q,
                    window_left,
                    0 if CAUSAL else window_right,
                    scale,
                    softcap,
                    BLOCK_M,
                    BLOCK_N,
                    HEAD_DIM,
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
                    q_smem,
                    k_smem,
                    v_smem,
                    queue,
                    q_full,
                    q_empty,
                    kv_full,
                    kv_empty,
                    SLOPES,
                    OUT,
                    LSE,
                    stride_om,
                    total_q,
                    window_left,
                    0 if CAUSAL else window_right,
                    scale,
                    softcap,
                    BLOCK_M,
                    BLOCK_N,
                    HEAD_DIM,
                    STAGES,
                    CAUSAL,
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                ),
            ),
            (
                forward_producer,
                (
                    (q_smem, k_smem, v_smem, queue, q_full, q_empty, kv_full, kv_empty),
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        TILES,
                        COUNTER,
                        stride_qh,
                        TERMS * HEAD_DIM,
                        TERMS * HEAD_DIM,
                        heads,
                        qheads_per_khead,
                        heads_in_l2,
                    ),
                    window_left,
                    0 if CAUSAL else window_right,
                    BLOCK_M,
                    BLOCK_N,
                    1,
                    TERMS,
                    TERMS,
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
    STAGES: gl.constexpr,
    LAYOUT_S: gl.constexpr,
    LAYOUT_O: gl.constexpr,
):
    stage = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    scores = start_mma_bf16x3(q, k_smem, stage, LAYOUT_S, True)
    mbarrier.wait(v_full.index(stage), phase)
    dp = start_mma_bf16x3(do, v_smem, stage, LAYOUT_S, True)
    scores = warpgroup_mma_wait(PRODUCTS, deps=(scores,))
    capped, factor = apply_softcap(scores, scale, softcap, SOFTCAP, True)
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
    dq = add_mma_bf16x3(dq, ds, k_smem, stage, LAYOUT_O)
    mbarrier.arrive(k_empty.index(stage), count=1)
    return dq


@gluon.jit
def _dq_consumer(
    wg: gl.constexpr,
    q_smem,
    k_smem,
    v_smem,
    do_smem,
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
    stride_dqm,
    total_q,
    stats_stride,
    window_left,
    window_right,
    scale,
    softcap,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
):
    WG_M: gl.constexpr = BLOCK_M // 2
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT_S, 2)
    LAYOUT_STORE: gl.constexpr = gl.BlockedLayout(
        [1, 4], [128 // HEAD_DIM, HEAD_DIM // 4], [4, 1], [1, 0]
    )
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT_S))
    work_idx = 0
    step = 0
    mbarrier.wait(q_full.index(0), 0)
    q_offset, seqlen_q, seqlen_k, start_m, head = receive_tile(queue.index(0))
    while seqlen_q > 0:
        q0, q1, q2 = slot_parts(q_smem, wg, TERMS)
        q = q0.load(OPERAND), q1.load(OPERAND), q2.load(OPERAND)
        do = slot_parts(do_smem, wg, TERMS)
        diagonal_offset = seqlen_k - seqlen_q
        n_block_max = get_n_block_max(
            start_m, seqlen_q, seqlen_k, window_right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW
        )
        wg_start_m = start_m + wg * WG_M
        offs_m = wg_start_m + gl.arange(0, WG_M, gl.SliceLayout(1, LAYOUT_S))
        offset = head.to(gl.int64) * total_q + q_offset + offs_m
        lse = gl.load(STATS + offset, mask=offs_m < seqlen_q, other=0.0)
        delta = gl.load(STATS + stats_stride + offset, mask=offs_m < seqlen_q, other=0.0)
        diagonal = offs_m + diagonal_offset
        slope = gl.load(SLOPES + head) * LOG2E if ALIBI else 0.0
        last_key, full_blocks = get_key_limits(
            wg_start_m + diagonal_offset,
            diagonal,
            seqlen_k,
            window_right,
            n_block_max,
            BLOCK_N,
            CAUSAL,
            WINDOW,
        )
        dq = gl.zeros([WG_M, HEAD_DIM], gl.float32, LAYOUT_O)
        if WINDOW:
            window_mask_end = gl.cdiv(
                gl.maximum(wg_start_m + WG_M - 1 + diagonal_offset - window_left, 0), BLOCK_N
            )
            for n_block in range(
                n_block_max - 1,
                get_n_block_min(
                    start_m, seqlen_q, seqlen_k, window_left, n_block_max, BLOCK_N, WINDOW
                )
                - 1,
                -1,
            ):
                dq = _dq_step(
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
                    STAGES,
                    LAYOUT_S,
                    LAYOUT_O,
                )
                step += 1
        else:
            for n_block in range(n_block_max - 1, full_blocks - 1, -1):
                dq = _dq_step(
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
                    STAGES,
                    LAYOUT_S,
                    LAYOUT_O,
                )
                step += 1
            for _ in range(full_blocks - 1, -1, -1):
                dq = _dq_step(
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
                    False,
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                    STAGES,
                    LAYOUT_S,
                    LAYOUT_O,
                )
                step += 1
        mbarrier.arrive(q_empty.index(0), count=1)
        store_tile(
            DQ + q_offset.to(gl.int64) * stride_dqm + head * HEAD_DIM,
            dq * score_derivative(scale, softcap, SOFTCAP),
            wg_start_m,
            seqlen_q,
            stride_dqm,
            HEAD_DIM,
            LAYOUT_STORE,
        )
        work_idx += 1
        mbarrier.wait(q_full.index(0), work_idx & 1)
        q_offset, seqlen_q, seqlen_k, start_m, head = receive_tile(queue.index(work_idx % 2))


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def attention_dq_float32_sm90_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    SLOPES,
    STATS,
    DQ,
    TILES,
    COUNTER,
    stride_dqm,
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
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
):
    """Compute DQ.

    The terms of the queries stay in registers, which halves the shared-memory reads of the scores.
    """
    q_smem = allocate_ring(q_desc, 2 * TERMS)
    do_smem = allocate_ring(do_desc, 2 * TERMS)
    k_smem = allocate_ring(k_desc, STAGES * TERMS)
    v_smem = allocate_ring(v_desc, STAGES * TERMS)
    queue = allocate_tile_queue()
    q_full = allocate_barriers(1, 1)
    q_empty = allocate_barriers(1, 2)
    k_full = allocate_barriers(STAGES, 1)
    k_empty = allocate_barriers(STAGES, 2)
    v_full = allocate_barriers(STAGES, 1)
    v_empty = allocate_barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (
                _dq_consumer,
                (
                    0,
                    q_smem,
                    k_smem,
                    v_smem,
                    do_smem,
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
                    stride_dqm,
                    total_q,
                    stats_stride,
                    window_left,
                    0 if CAUSAL else window_right,
                    scale,
                    softcap,
                    BLOCK_M,
                    BLOCK_N,
                    HEAD_DIM,
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
                    q_smem,
                    k_smem,
                    v_smem,
                    do_smem,
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
                    stride_dqm,
                    total_q,
                    stats_stride,
                    window_left,
                    0 if CAUSAL else window_right,
                    scale,
                    softcap,
                    BLOCK_M,
                    BLOCK_N,
                    HEAD_DIM,
                    STAGES,
                    CAUSAL,
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                ),
            ),
            (
                dq_producer,
                (
                    (
                        q_smem,
                        k_smem,
                        v_smem,
                        do_smem,
                        queue,
                        q_full,
                        q_empty,
                        k_full,
                        k_empty,
                        v_full,
                        v_empty,
                    ),
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        do_desc,
                        TILES,
                        COUNTER,
                        TERMS * HEAD_DIM,
                        TERMS * HEAD_DIM,
                        TERMS * HEAD_DIM,
                        TERMS * HEAD_DIM,
                        heads,
                        qheads_per_khead,
                        heads_in_l2,
                    ),
                    window_left,
                    0 if CAUSAL else window_right,
                    BLOCK_M,
                    BLOCK_N,
                    TERMS,
                    TERMS,
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
    remaining_q,
    window_left,
    window_right,
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
    """Add the contribution of query block `step` to dK and dV.

    Scores are transposed: keys by queries. `remaining_q` is the number of queries from the block's
    first query to the end of the row.
    """
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT_S)
    stage = step % STAGES
    phase = (step // STAGES) & 1
    mbarrier.wait(q_full.index(stage), phase)
    scores = warpgroup_mma_wait(0, deps=(start_mma_bf16x3(k, q_smem, stage, LAYOUT_S, True),))
    lse = lse_smem.index(stage).load(COLUMN)
    if ALIBI:  # queries after the end of the row have no scores, and so no bias
        lse = gl.where(offs_m < remaining_q, lse, float("inf"))
    capped, factor = apply_softcap(scores, scale, softcap, SOFTCAP, True)
    scores, factor = apply_alibi(capped, factor, slope, diagonal, offs_m, ALIBI)
    p = gl.exp2(scores * factor - lse[None, :])
    if masked:
        p = gl.where(offs_m[None, :] >= (diagonal - window_right)[:, None], p, 0.0)
        if WINDOW:
            p = gl.where(offs_m[None, :] <= (diagonal + window_left)[:, None], p, 0.0)
    mbarrier.wait(do_full.index(stage), phase)
    dv = add_mma_bf16x3(dv, p, do_smem, stage, LAYOUT_O)
    if SOFTCAP:
        p *= 1.0 - capped * capped
    dp = warpgroup_mma_wait(0, deps=(start_mma_bf16x3(v, do_smem, stage, LAYOUT_S, True),))
    delta = delta_smem.index(stage).load(COLUMN)
    mbarrier.arrive(do_empty.index(stage), count=1)
    dk = add_mma_bf16x3(dk, p * (dp - delta[None, :]), q_smem, stage, LAYOUT_O)
    mbarrier.arrive(q_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _dkdv_consumer(
    wg: gl.constexpr,
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
    SLOPES,
    DK,
    DV,
    stride_dkn,
    qheads_per_khead,
    window_left,
    window_right,
    scale,
    softcap,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
):
    WG_N: gl.constexpr = BLOCK_N // 2
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    LAYOUT_STORE: gl.constexpr = gl.BlockedLayout(
        [1, 4], [128 // HEAD_DIM, HEAD_DIM // 4], [4, 1], [1, 0]
    )
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT_S))
    work_idx = 0
    step = 0
    mbarrier.wait(k_full.index(0), 0)
    k_offset, seqlen_k, seqlen_q, start_n, head = receive_tile(queue.index(0))
    while seqlen_k > 0:
        k = slot_parts(k_smem, wg, TERMS)
        v = slot_parts(v_smem, wg, TERMS)
        m_block_min, m_block_max = get_m_block_min_max(
            start_n, seqlen_k, seqlen_q, window_left, window_right, BLOCK_M, BLOCK_N, CAUSAL, WINDOW
        )
        wg_start_n = start_n + wg * WG_N
        # `diagonal` is the query position aligned with each key. In the blocks from
        # `full_m_block_min` up to `full_m_block_max` every query attends all keys of this warp
        # group.
        diagonal = (
            wg_start_n + (seqlen_q - seqlen_k) + gl.arange(0, WG_N, gl.SliceLayout(1, LAYOUT_S))
        )
        full_m_block_min = m_block_min
        if CAUSAL or WINDOW:
            full_m_block_min = gl.minimum(
                gl.cdiv(
                    gl.maximum(wg_start_n + WG_N - 1 + seqlen_q - seqlen_k - window_right, 0),
                    BLOCK_M,
                ),
                m_block_max,
            )
        full_m_block_max = (
            gl.maximum(wg_start_n + seqlen_q - seqlen_k + window_left + 1, 0) // BLOCK_M
        )
        dk = gl.zeros([WG_N, HEAD_DIM], gl.float32, LAYOUT_O)
        dv = gl.zeros([WG_N, HEAD_DIM], gl.float32, LAYOUT_O)
        for g in range(qheads_per_khead):
            slope = gl.load(SLOPES + head * qheads_per_khead + g) * LOG2E if ALIBI else 0.0
            if WINDOW:
                for m_block in range(m_block_min, m_block_max):
                    dk, dv = _dkdv_step(
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
                        seqlen_q - m_block * BLOCK_M,
                        window_left,
                        window_right,
                        offs_m,
                        scale,
                        softcap,
                        slope,
                        (m_block < full_m_block_min) | (m_block >= full_m_block_max),
                        WINDOW,
                        SOFTCAP,
                        ALIBI,
                        STAGES,
                        LAYOUT_S,
                        LAYOUT_O,
                    )
                    step += 1
            else:
                if CAUSAL:
                    for m_block in range(m_block_min, full_m_block_min):
                        dk, dv = _dkdv_step(
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
                            seqlen_q,
                            window_left,
                            window_right,
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
                        step += 1
                for m_block in range(full_m_block_min, m_block_max):
                    dk, dv = _dkdv_step(
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
                        seqlen_q,
                        window_left,
                        window_right,
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
                    step += 1
        mbarrier.arrive(k_empty.index(0), count=1)
        offset = k_offset.to(gl.int64) * stride_dkn + head * HEAD_DIM
        store_tile(
            DK + offset,
            dk * score_derivative(scale, softcap, SOFTCAP),
            wg_start_n,
            seqlen_k,
            stride_dkn,
            HEAD_DIM,
            LAYOUT_STORE,
        )
        store_tile(DV + offset, dv, wg_start_n, seqlen_k, stride_dkn, HEAD_DIM, LAYOUT_STORE)
        work_idx += 1
        mbarrier.wait(k_full.index(0), work_idx & 1)
        k_offset, seqlen_k, seqlen_q, start_n, head = receive_tile(queue.index(0))


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def attention_dkdv_float32_sm90_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    SLOPES,
    STATS,
    DK,
    DV,
    TILES,
    COUNTER,
    stride_dkn,
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
    STAGES: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
    SOFTCAP: gl.constexpr,
    ALIBI: gl.constexpr,
):
    """Compute DK and DV for one key tile and key head at a time.

    Each tile sums over all query heads that share the key head.
    """
    STATS_S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_smem = allocate_ring(q_desc, STAGES * TERMS)
    do_smem = allocate_ring(do_desc, STAGES * TERMS)
    k_smem = allocate_ring(k_desc, 2 * TERMS)
    v_smem = allocate_ring(v_desc, 2 * TERMS)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], STATS_S)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], STATS_S)
    queue = allocate_tile_queue(1)  # shared memory has no room for two slots
    k_full = allocate_barriers(1, 1)
    k_empty = allocate_barriers(1, 2)
    q_full = allocate_barriers(STAGES, 1)
    q_empty = allocate_barriers(STAGES, 2)
    do_full = allocate_barriers(STAGES, 1)
    do_empty = allocate_barriers(STAGES, 2)
    gl.warp_specialize(
        [
            (
                _dkdv_consumer,
                (
                    0,
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
                    SLOPES,
                    DK,
                    DV,
                    stride_dkn,
                    qheads_per_khead,
                    window_left,
                    0 if CAUSAL else window_right,
                    scale,
                    softcap,
                    BLOCK_M,
                    BLOCK_N,
                    HEAD_DIM,
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
                    SLOPES,
                    DK,
                    DV,
                    stride_dkn,
                    qheads_per_khead,
                    window_left,
                    0 if CAUSAL else window_right,
                    scale,
                    softcap,
                    BLOCK_M,
                    BLOCK_N,
                    HEAD_DIM,
                    STAGES,
                    CAUSAL,
                    WINDOW,
                    SOFTCAP,
                    ALIBI,
                ),
            ),
            (
                dkdv_producer,
                (
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
                    ),
                    (
                        q_desc,
                        k_desc,
                        v_desc,
                        do_desc,
                        STATS,
                        TILES,
                        COUNTER,
                        TERMS * HEAD_DIM,
                        TERMS * HEAD_DIM,
                        TERMS * HEAD_DIM,
                        TERMS * HEAD_DIM,
                        total_q,
                        stats_stride,
                        heads,
                        qheads_per_khead,
                        1,
                        heads_in_l2,
                    ),
                    window_left,
                    0 if CAUSAL else window_right,
                    BLOCK_M,
                    BLOCK_N,
                    TERMS,
                    TERMS,
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
