"""Ragged attention in plain Triton, forward and backward.

The kernels have every feature and run on every GPU and in Triton's interpreter.

The forward is the online softmax of FlashAttention-2 (Dao, 2023, arXiv:2307.08691). The backward
recomputes the probabilities from the log-sum-exp in two kernels. One owns query tiles and computes
dQ; the other owns key tiles and computes dK and dV. No gradient is accumulated across CTAs, so
equal inputs give equal bits.

Queries and keys of a row are aligned at their ends. Query ``i`` is aligned with key
``i + diagonal_offset``, where ``diagonal_offset = seqlen_k - seqlen_q``. It attends keys
``i + diagonal_offset - window_left`` to ``i + diagonal_offset + window_right``. A causal mask is
``window_right = 0``.

float32 operands are multiplied as three TF32 products ("tf32x3"), which together keep about the
precision of float32. Where `torch.set_float32_matmul_precision` allows it, one product is used
("tf32"). Half precision ignores the setting.

Scores are kept in base 2: the factor log2(e) is folded into the scale, so exp2 needs no
multiplication of its own.

With ALiBi (Press et al., 2021, arXiv:2108.12409) the head's slope times the distance between query
and key is subtracted from each score. Slopes are loaded per head (``ALIBI == 1``) or from a table
(total_q, heads) at the first query of the row (``ALIBI == 2``).

With dropout the random numbers of `scree.ops.philox` are computed again in each kernel. Dropped
weights count in the softmax, but not in the output.
"""

import triton
import triton.language as tl

from .constants import INITIAL_MAX, LN2, LOG2E, UNSPECIALIZED


@triton.jit
def _scheduled_tile(TILES, heads, heads_in_l2):
    """Return this CTA's tile entry and head, and whether it has a tile.

    Tiles come longest first, `heads_in_l2` heads at a time so that their keys share the L2 cache.
    """
    num_tiles = tl.load(TILES)
    tile_id = tl.program_id(0)
    head_block = tile_id // (num_tiles * heads_in_l2 + (num_tiles == 0))
    r = tile_id - head_block * (num_tiles * heads_in_l2)
    tile = TILES + 8 * (r // heads_in_l2 + 1)
    head = head_block * heads_in_l2 + r % heads_in_l2
    return tile, head, tile_id < num_tiles * heads


@triton.jit
def _load_tile(
    base,
    start,
    seqlen,
    stride,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Load a (ROWS, BLOCK_D) tile from token `start` on.

    It is zero after HEAD_DIM and, with CHECK, after `seqlen`.
    """
    offs_t = tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    pointers = (
        base + tl.cast(start, tl.int64) * stride + (offs_t[:, None] * stride + offs_d[None, :])
    )
    if CHECK:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers, mask=(start + offs_t < seqlen)[:, None], other=0.0)
        else:
            return tl.load(
                pointers,
                mask=(start + offs_t < seqlen)[:, None] & (offs_d < HEAD_DIM)[None, :],
                other=0.0,
            )
    else:
        if HEAD_DIM == BLOCK_D:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def _store_tile(
    base,
    value,
    start,
    seqlen,
    stride,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_t = tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    pointers = (
        base + tl.cast(start, tl.int64) * stride + (offs_t[:, None] * stride + offs_d[None, :])
    )
    tl.store(
        pointers,
        value.to(base.dtype.element_ty),
        mask=(start + offs_t < seqlen)[:, None] & (offs_d < HEAD_DIM)[None, :],
    )


@triton.jit
def tanh(x):
    """Return the hyperbolic tangent."""
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def _block_range(
    start,
    seqlen,
    other_seqlen,
    before,
    after,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
    OTHER_BLOCK: tl.constexpr,
):
    """Return the range of the other side's tokens that a tile attends, in steps of OTHER_BLOCK.

    [begin, full_begin) and [full_end, end) need a mask; [full_begin, full_end) does not.
    """
    diagonal_offset = other_seqlen - seqlen
    last = tl.minimum(start + BLOCK, seqlen) - 1
    begin = 0
    full_begin = 0
    end = other_seqlen
    full_end = other_seqlen
    if BEFORE:
        begin = tl.maximum(start + diagonal_offset - before, 0) // OTHER_BLOCK * OTHER_BLOCK
        full_begin = (
            tl.cdiv(tl.maximum(last + diagonal_offset - before, 0), OTHER_BLOCK) * OTHER_BLOCK
        )
    if AFTER:
        end = tl.minimum(other_seqlen, tl.maximum(last + diagonal_offset + after + 1, 0))
        full_end = tl.minimum(other_seqlen, tl.maximum(start + diagonal_offset + after + 1, 0))
    full_begin = tl.minimum(full_begin, tl.cdiv(end, OTHER_BLOCK) * OTHER_BLOCK)
    full_end = tl.maximum(full_begin, full_end // OTHER_BLOCK * OTHER_BLOCK)
    return begin, full_begin, full_end, end


@triton.jit
def _valid_mask(
    offs_m,
    offs_n,
    seqlen_k,
    diagonal_offset,
    window_left,
    window_right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    valid = offs_n < seqlen_k
    if HAS_LEFT:
        valid = valid & (offs_n >= offs_m + (diagonal_offset - window_left))
    if HAS_RIGHT:
        valid = valid & (offs_n <= offs_m + (diagonal_offset + window_right))
    return valid


@triton.jit
def _distance(offs_m, offs_n, diagonal_offset):
    return tl.abs(offs_m + diagonal_offset - offs_n).to(tl.float32)


@triton.jit
def _load_slope(SLOPES, q_offset, seqlen_q, heads, head, ALIBI: tl.constexpr):
    """Return the slope of a head in a row, times log2(e)."""
    if ALIBI == 2:
        # A row without queries may begin after the end of the table.
        return tl.load(SLOPES + q_offset * heads + head, mask=seqlen_q > 0, other=0.0) * LOG2E
    return tl.load(SLOPES + head) * LOG2E


@triton.jit
def _kept_pairs(seed, dropout, row_start, head, start_m, in_m, start_n, in_n):
    """Return whether dropout keeps the pairs of queries and keys of a tile.

    Queries are ``start_m + in_m`` and keys ``start_n + in_n``; the starts are multiples of 16 and
    the other two broadcast together. `scree.ops.philox` defines the random numbers. The constant
    part of a position selects the bits, so that the compiler merges the calls of a thread.
    """
    words = tl.philox(
        seed,
        (start_m >> 1) + ((in_m & 7) | ((in_m >> 4) << 3)),
        (start_n >> 2) + (((in_n >> 1) & 3) | ((in_n >> 4) << 2)),
        row_start.to(tl.int32),
        head.to(tl.int32),
        7,
    )
    is_upper_m, is_upper_n = ((in_m >> 3) & 1) == 1, ((in_n >> 3) & 1) == 1
    low = tl.where(is_upper_n, words[1], words[0])
    high = tl.where(is_upper_n, words[3], words[2])
    word = tl.where(is_upper_m, high, low)
    # Even keys take the lower 16 bits; moved up, they decide the comparison of the whole words.
    shift = ((in_n & 1) ^ 1) << 4
    return (word << shift.to(tl.uint32)) >= (dropout.to(tl.uint32) << 16)


@triton.jit
def _kept_scale(dropout):
    """Return the factor of the weights that dropout keeps."""
    return 65536.0 / (65536 - dropout).to(tl.float32)


@triton.jit
def _forward_step(
    acc,
    row_max,
    row_sum,
    q,
    K,
    V,
    start_n,
    offs_m,
    seqlen_k,
    stride_kn,
    stride_vn,
    diagonal_offset,
    window_left,
    window_right,
    scale,
    softcap,
    slope,
    seed,
    dropout,
    row_start,
    head,
    start_m,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    k = _load_tile(K, start_n, seqlen_k, stride_kn, BLOCK_N, HEAD_DIM, BLOCK_D, MASK)
    qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP:
        qk = tanh(qk * (scale / softcap))
        factor = softcap * LOG2E
    else:
        factor = scale * LOG2E
    offs_n = start_n + tl.arange(0, BLOCK_N)
    if ALIBI:
        qk = qk * factor - slope * _distance(offs_m[:, None], offs_n[None, :], diagonal_offset)
        factor = 1.0
    if MASK:
        qk = tl.where(
            _valid_mask(
                offs_m[:, None],
                offs_n[None, :],
                seqlen_k,
                diagonal_offset,
                window_left,
                window_right,
                HAS_LEFT,
                HAS_RIGHT,
            ),
            qk,
            -float("inf"),
        )
    row_max_new = tl.maximum(row_max, tl.max(qk, 1) * factor)
    p = tl.exp2(qk * factor - row_max_new[:, None])
    alpha = tl.exp2(row_max - row_max_new)
    row_sum = row_sum * alpha + tl.sum(p, 1)
    if DROPOUT:
        in_m, in_n = tl.arange(0, q.shape[0])[:, None], tl.arange(0, BLOCK_N)[None, :]
        kept = _kept_pairs(seed, dropout, row_start, head, start_m, in_m, start_n, in_n)
        p = tl.where(kept, p, 0.0)
    v = _load_tile(V, start_n, seqlen_k, stride_vn, BLOCK_N, HEAD_DIM_V, BLOCK_DV, MASK)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, row_max_new, row_sum


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_forward_kernel(
    Q,
    K,
    V,
    SLOPES,
    OUT,
    LSE,
    TILES,
    SEED,
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
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
    dropout,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute OUT (total_q, heads, HEAD_DIM_V) and LSE (heads, total_q).

    Each CTA computes one query tile of one head.
    """
    tile, head, is_tile = _scheduled_tile(TILES, heads, heads_in_l2)
    if not is_tile:
        return
    q_offset = tl.load(tile).to(tl.int64)
    seqlen_q = tl.load(tile + 1)
    k_offset = tl.load(tile + 2).to(tl.int64)
    seqlen_k = tl.load(tile + 3)
    start_m = tl.load(tile + 4)
    diagonal_offset = seqlen_k - seqlen_q
    head = head.to(tl.int64)
    Q += q_offset * stride_qm + head * stride_qh
    K += k_offset * stride_kn + head // qheads_per_khead * stride_kh
    V += k_offset * stride_vn + head // qheads_per_khead * stride_vh
    slope = _load_slope(SLOPES, q_offset, seqlen_q, heads, head, ALIBI) if ALIBI else 0.0
    seed = tl.load(SEED) if DROPOUT else 0
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = _load_tile(Q, start_m, seqlen_q, stride_qm, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], INITIAL_MAX, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    begin, full_begin, full_end, end = _block_range(
        start_m,
        seqlen_q,
        seqlen_k,
        window_left,
        window_right,
        HAS_LEFT,
        HAS_RIGHT,
        BLOCK_M,
        BLOCK_N,
    )
    if HAS_LEFT:
        for start_n in range(begin, full_begin, BLOCK_N):
            acc, row_max, row_sum = _forward_step(
                acc,
                row_max,
                row_sum,
                q,
                K,
                V,
                start_n,
                offs_m,
                seqlen_k,
                stride_kn,
                stride_vn,
                diagonal_offset,
                window_left,
                window_right,
                scale,
                softcap,
                slope,
                seed,
                dropout,
                q_offset,
                head,
                start_m,
                HEAD_DIM,
                HEAD_DIM_V,
                BLOCK_D,
                BLOCK_DV,
                BLOCK_N,
                HAS_LEFT,
                HAS_RIGHT,
                SOFTCAP,
                ALIBI,
                DROPOUT,
                True,
                PRECISION,
            )
    for start_n in range(full_begin, full_end, BLOCK_N):
        acc, row_max, row_sum = _forward_step(
            acc,
            row_max,
            row_sum,
            q,
            K,
            V,
            start_n,
            offs_m,
            seqlen_k,
            stride_kn,
            stride_vn,
            diagonal_offset,
            window_left,
            window_right,
            scale,
            softcap,
            slope,
            seed,
            dropout,
            q_offset,
            head,
            start_m,
            HEAD_DIM,
            HEAD_DIM_V,
            BLOCK_D,
            BLOCK_DV,
            BLOCK_N,
            HAS_LEFT,
            HAS_RIGHT,
            SOFTCAP,
            ALIBI,
            DROPOUT,
            False,
            PRECISION,
        )
    for start_n in range(full_end, end, BLOCK_N):
        acc, row_max, row_sum = _forward_step(
            acc,
            row_max,
            row_sum,
            q,
            K,
            V,
            start_n,
            offs_m,
            seqlen_k,
            stride_kn,
            stride_vn,
            diagonal_offset,
            window_left,
            window_right,
            scale,
            softcap,
            slope,
            seed,
            dropout,
            q_offset,
            head,
            start_m,
            HEAD_DIM,
            HEAD_DIM_V,
            BLOCK_D,
            BLOCK_DV,
            BLOCK_N,
            HAS_LEFT,
            HAS_RIGHT,
            SOFTCAP,
            ALIBI,
            DROPOUT,
            True,
            PRECISION,
        )
    has_key = row_sum > 0.0
    acc = acc / tl.where(has_key, row_sum, 1.0)[:, None]
    if DROPOUT:
        acc = acc * _kept_scale(dropout)
    lse = tl.where(
        has_key, (row_max + tl.log2(tl.where(has_key, row_sum, 1.0))) * LN2, -float("inf")
    )
    # A NaN in the scores must reach the LSE, although it compares like "no valid key".
    lse = tl.where(row_sum != row_sum, row_sum, lse)
    _store_tile(
        OUT + q_offset * stride_om + head * HEAD_DIM_V,
        acc,
        start_m,
        seqlen_q,
        stride_om,
        BLOCK_M,
        HEAD_DIM_V,
        BLOCK_DV,
    )
    tl.store(LSE + head * total_q + q_offset + offs_m, lse, mask=offs_m < seqlen_q)


@triton.jit
def _score_gradient(
    qk,
    dp,
    lse,
    delta,
    offs_m,
    offs_n,
    valid,
    diagonal_offset,
    scale,
    softcap,
    slope,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
):
    """Return the probabilities and the gradient of the scaled scores.

    Positions, LSE and delta must have shapes that broadcast to the scores.
    """
    if ALIBI:
        lse += slope * _distance(offs_m, offs_n, diagonal_offset)
    if SOFTCAP:
        qk = tanh(qk * (scale / softcap))
        p = tl.exp2(qk * (softcap * LOG2E) - lse)
    else:
        p = tl.exp2(qk * (scale * LOG2E) - lse)
    if MASK:
        p = tl.where(valid, p, 0.0)
    ds = p * (dp - delta)
    if SOFTCAP:
        ds *= 1.0 - qk * qk
    if MASK:
        # Mask again: a query without valid keys may have any dout, also NaN.
        ds = tl.where(valid, ds, 0.0)
    return p, ds


@triton.jit
def _dq_step(
    dq,
    q,
    do,
    lse,
    delta,
    K,
    V,
    start_n,
    offs_m,
    seqlen_k,
    stride_kn,
    stride_vn,
    diagonal_offset,
    window_left,
    window_right,
    scale,
    softcap,
    slope,
    seed,
    dropout,
    row_start,
    head,
    start_m,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    k = _load_tile(K, start_n, seqlen_k, stride_kn, BLOCK_N, HEAD_DIM, BLOCK_D, MASK)
    v = _load_tile(V, start_n, seqlen_k, stride_vn, BLOCK_N, HEAD_DIM_V, BLOCK_DV, MASK)
    qk = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    valid = _valid_mask(
        offs_m[:, None],
        offs_n[None, :],
        seqlen_k,
        diagonal_offset,
        window_left,
        window_right,
        HAS_LEFT,
        HAS_RIGHT,
    )
    if DROPOUT:
        in_m, in_n = tl.arange(0, q.shape[0])[:, None], tl.arange(0, BLOCK_N)[None, :]
        kept = _kept_pairs(seed, dropout, row_start, head, start_m, in_m, start_n, in_n)
        dp = tl.where(kept, dp * _kept_scale(dropout), 0.0)
    _, ds = _score_gradient(
        qk,
        dp,
        lse[:, None],
        delta[:, None],
        offs_m[:, None],
        offs_n[None, :],
        valid,
        diagonal_offset,
        scale,
        softcap,
        slope,
        SOFTCAP,
        ALIBI,
        MASK,
    )
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_dq_kernel(
    Q,
    K,
    V,
    SLOPES,
    OUT,
    LSE,
    DO,
    DLSE,
    STATS,
    DQ,
    TILES,
    SEED,
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_om,
    stride_dom,
    stride_doh,
    stride_dqm,
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
    dropout,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """Compute DQ, and STATS (2, heads, total_q) for `attention_dkdv_kernel`.

    STATS holds the log-sum-exp in base 2 and delta = sum(out * dout) - dlse, through which the
    gradient of the log-sum-exp enters.
    """
    tile, head, is_tile = _scheduled_tile(TILES, heads, heads_in_l2)
    if not is_tile:
        return
    q_offset = tl.load(tile).to(tl.int64)
    seqlen_q = tl.load(tile + 1)
    k_offset = tl.load(tile + 2).to(tl.int64)
    seqlen_k = tl.load(tile + 3)
    start_m = tl.load(tile + 4)
    diagonal_offset = seqlen_k - seqlen_q
    head = head.to(tl.int64)
    Q += q_offset * stride_qm + head * stride_qh
    K += k_offset * stride_kn + head // qheads_per_khead * stride_kh
    V += k_offset * stride_vn + head // qheads_per_khead * stride_vh
    slope = _load_slope(SLOPES, q_offset, seqlen_q, heads, head, ALIBI) if ALIBI else 0.0
    seed = tl.load(SEED) if DROPOUT else 0
    offs_m = start_m + tl.arange(0, BLOCK_M)
    mask_m = offs_m < seqlen_q
    q = _load_tile(Q, start_m, seqlen_q, stride_qm, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    do = _load_tile(
        DO + q_offset * stride_dom + head * stride_doh,
        start_m,
        seqlen_q,
        stride_dom,
        BLOCK_M,
        HEAD_DIM_V,
        BLOCK_DV,
        True,
    )
    out = _load_tile(
        OUT + q_offset * stride_om + head * HEAD_DIM_V,
        start_m,
        seqlen_q,
        stride_om,
        BLOCK_M,
        HEAD_DIM_V,
        BLOCK_DV,
        True,
    )
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(
            DLSE + (q_offset + offs_m) * stride_dlsem + head * stride_dlseh, mask=mask_m, other=0.0
        )
    lse = tl.load(LSE + head * total_q + q_offset + offs_m, mask=mask_m, other=0.0) * LOG2E
    stats = STATS + head * total_q + q_offset + offs_m
    tl.store(stats, lse, mask=mask_m)
    tl.store(stats + stats_stride, delta, mask=mask_m)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    begin, full_begin, full_end, end = _block_range(
        start_m,
        seqlen_q,
        seqlen_k,
        window_left,
        window_right,
        HAS_LEFT,
        HAS_RIGHT,
        BLOCK_M,
        BLOCK_N,
    )
    if HAS_LEFT:
        for start_n in range(begin, full_begin, BLOCK_N):
            dq = _dq_step(
                dq,
                q,
                do,
                lse,
                delta,
                K,
                V,
                start_n,
                offs_m,
                seqlen_k,
                stride_kn,
                stride_vn,
                diagonal_offset,
                window_left,
                window_right,
                scale,
                softcap,
                slope,
                seed,
                dropout,
                q_offset,
                head,
                start_m,
                HEAD_DIM,
                HEAD_DIM_V,
                BLOCK_D,
                BLOCK_DV,
                BLOCK_N,
                HAS_LEFT,
                HAS_RIGHT,
                SOFTCAP,
                ALIBI,
                DROPOUT,
                True,
                PRECISION,
            )
    for start_n in range(full_begin, full_end, BLOCK_N):
        dq = _dq_step(
            dq,
            q,
            do,
            lse,
            delta,
            K,
            V,
            start_n,
            offs_m,
            seqlen_k,
            stride_kn,
            stride_vn,
            diagonal_offset,
            window_left,
            window_right,
            scale,
            softcap,
            slope,
            seed,
            dropout,
            q_offset,
            head,
            start_m,
            HEAD_DIM,
            HEAD_DIM_V,
            BLOCK_D,
            BLOCK_DV,
            BLOCK_N,
            HAS_LEFT,
            HAS_RIGHT,
            SOFTCAP,
            ALIBI,
            DROPOUT,
            False,
            PRECISION,
        )
    for start_n in range(full_end, end, BLOCK_N):
        dq = _dq_step(
            dq,
            q,
            do,
            lse,
            delta,
            K,
            V,
            start_n,
            offs_m,
            seqlen_k,
            stride_kn,
            stride_vn,
            diagonal_offset,
            window_left,
            window_right,
            scale,
            softcap,
            slope,
            seed,
            dropout,
            q_offset,
            head,
            start_m,
            HEAD_DIM,
            HEAD_DIM_V,
            BLOCK_D,
            BLOCK_DV,
            BLOCK_N,
            HAS_LEFT,
            HAS_RIGHT,
            SOFTCAP,
            ALIBI,
            DROPOUT,
            True,
            PRECISION,
        )
    _store_tile(
        DQ + q_offset * stride_dqm + head * HEAD_DIM,
        dq * scale,
        start_m,
        seqlen_q,
        stride_dqm,
        BLOCK_M,
        HEAD_DIM,
        BLOCK_D,
    )


@triton.jit
def _dkdv_step(
    dk,
    dv,
    k,
    v,
    Q,
    DO,
    STATS,
    stats_stride,
    start_m,
    offs_n,
    seqlen_q,
    seqlen_k,
    stride_qm,
    stride_dom,
    diagonal_offset,
    window_left,
    window_right,
    scale,
    softcap,
    slope,
    seed,
    dropout,
    row_start,
    head,
    start_n,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = _load_tile(Q, start_m, seqlen_q, stride_qm, BLOCK_M, HEAD_DIM, BLOCK_D, MASK)
    qk = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    do = _load_tile(DO, start_m, seqlen_q, stride_dom, BLOCK_M, HEAD_DIM_V, BLOCK_DV, MASK)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    if MASK:
        # Queries after the end of the row have weight 0, and no bias.
        lse = tl.load(STATS + offs_m, mask=offs_m < seqlen_q, other=float("inf"))
        delta = tl.load(STATS + stats_stride + offs_m, mask=offs_m < seqlen_q, other=0.0)
    else:
        lse = tl.load(STATS + offs_m)
        delta = tl.load(STATS + stats_stride + offs_m)
    valid = _valid_mask(
        offs_m[None, :],
        offs_n[:, None],
        seqlen_k,
        diagonal_offset,
        window_left,
        window_right,
        HAS_LEFT,
        HAS_RIGHT,
    )
    if DROPOUT:
        in_m, in_n = tl.arange(0, BLOCK_M)[None, :], tl.arange(0, k.shape[0])[:, None]
        kept = _kept_pairs(seed, dropout, row_start, head, start_m, in_m, start_n, in_n)
        dp = tl.where(kept, dp * _kept_scale(dropout), 0.0)
    p, ds = _score_gradient(
        qk,
        dp,
        lse[None, :],
        delta[None, :],
        offs_m[None, :],
        offs_n[:, None],
        valid,
        diagonal_offset,
        scale,
        softcap,
        slope,
        SOFTCAP,
        ALIBI,
        MASK,
    )
    if DROPOUT:
        p = tl.where(kept, p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=UNSPECIALIZED)
def attention_dkdv_kernel(
    Q,
    K,
    V,
    SLOPES,
    DO,
    STATS,
    DK,
    DV,
    TILES,
    SEED,
    stride_qm,
    stride_qh,
    stride_kn,
    stride_kh,
    stride_vn,
    stride_vh,
    stride_dom,
    stride_doh,
    stride_dkn,
    stride_dvn,
    total_q,
    stats_stride,
    heads,
    qheads_per_khead,
    heads_in_l2,
    window_left,
    window_right,
    scale,
    softcap,
    dropout,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute DK and DV, one key tile and key head per CTA.

    Each CTA sums over all query heads that share the key head.
    """
    tile, head, is_tile = _scheduled_tile(TILES, heads // qheads_per_khead, heads_in_l2)
    if not is_tile:
        return
    k_offset = tl.load(tile).to(tl.int64)
    seqlen_k = tl.load(tile + 1)
    q_offset = tl.load(tile + 2).to(tl.int64)
    seqlen_q = tl.load(tile + 3)
    start_n = tl.load(tile + 4)
    diagonal_offset = seqlen_k - seqlen_q
    head = head.to(tl.int64)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = _load_tile(
        K + k_offset * stride_kn + head * stride_kh,
        start_n,
        seqlen_k,
        stride_kn,
        BLOCK_N,
        HEAD_DIM,
        BLOCK_D,
        True,
    )
    v = _load_tile(
        V + k_offset * stride_vn + head * stride_vh,
        start_n,
        seqlen_k,
        stride_vn,
        BLOCK_N,
        HEAD_DIM_V,
        BLOCK_DV,
        True,
    )
    seed = tl.load(SEED) if DROPOUT else 0
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    # For keys, the left and right sides of the window are swapped.
    begin, full_begin, full_end, end = _block_range(
        start_n,
        seqlen_k,
        seqlen_q,
        window_right,
        window_left,
        HAS_RIGHT,
        HAS_LEFT,
        BLOCK_N,
        BLOCK_M,
    )
    for g in range(qheads_per_khead):
        q_head = head * qheads_per_khead + g
        Q_HEAD = Q + q_offset * stride_qm + q_head * stride_qh
        DO_HEAD = DO + q_offset * stride_dom + q_head * stride_doh
        STATS_HEAD = STATS + q_head * total_q + q_offset
        slope = _load_slope(SLOPES, q_offset, seqlen_q, heads, q_head, ALIBI) if ALIBI else 0.0
        if HAS_RIGHT:
            for start_m in range(begin, full_begin, BLOCK_M):
                dk, dv = _dkdv_step(
                    dk,
                    dv,
                    k,
                    v,
                    Q_HEAD,
                    DO_HEAD,
                    STATS_HEAD,
                    stats_stride,
                    start_m,
                    offs_n,
                    seqlen_q,
                    seqlen_k,
                    stride_qm,
                    stride_dom,
                    diagonal_offset,
                    window_left,
                    window_right,
                    scale,
                    softcap,
                    slope,
                    seed,
                    dropout,
                    q_offset,
                    q_head,
                    start_n,
                    HEAD_DIM,
                    HEAD_DIM_V,
                    BLOCK_D,
                    BLOCK_DV,
                    BLOCK_M,
                    HAS_LEFT,
                    HAS_RIGHT,
                    SOFTCAP,
                    ALIBI,
                    DROPOUT,
                    True,
                    PRECISION,
                )
        for start_m in range(full_begin, full_end, BLOCK_M):
            dk, dv = _dkdv_step(
                dk,
                dv,
                k,
                v,
                Q_HEAD,
                DO_HEAD,
                STATS_HEAD,
                stats_stride,
                start_m,
                offs_n,
                seqlen_q,
                seqlen_k,
                stride_qm,
                stride_dom,
                diagonal_offset,
                window_left,
                window_right,
                scale,
                softcap,
                slope,
                seed,
                dropout,
                q_offset,
                q_head,
                start_n,
                HEAD_DIM,
                HEAD_DIM_V,
                BLOCK_D,
                BLOCK_DV,
                BLOCK_M,
                HAS_LEFT,
                HAS_RIGHT,
                SOFTCAP,
                ALIBI,
                DROPOUT,
                False,
                PRECISION,
            )
        for start_m in range(full_end, end, BLOCK_M):
            dk, dv = _dkdv_step(
                dk,
                dv,
                k,
                v,
                Q_HEAD,
                DO_HEAD,
                STATS_HEAD,
                stats_stride,
                start_m,
                offs_n,
                seqlen_q,
                seqlen_k,
                stride_qm,
                stride_dom,
                diagonal_offset,
                window_left,
                window_right,
                scale,
                softcap,
                slope,
                seed,
                dropout,
                q_offset,
                q_head,
                start_n,
                HEAD_DIM,
                HEAD_DIM_V,
                BLOCK_D,
                BLOCK_DV,
                BLOCK_M,
                HAS_LEFT,
                HAS_RIGHT,
                SOFTCAP,
                ALIBI,
                DROPOUT,
                True,
                PRECISION,
            )
    if DROPOUT:
        dv = dv * _kept_scale(dropout)
    dk_row = k_offset * stride_dkn
    _store_tile(
        DK + dk_row + head * HEAD_DIM,
        dk * scale,
        start_n,
        seqlen_k,
        stride_dkn,
        BLOCK_N,
        HEAD_DIM,
        BLOCK_D,
    )
    _store_tile(
        DV + k_offset * stride_dvn + head * HEAD_DIM_V,
        dv,
        start_n,
        seqlen_k,
        stride_dvn,
        BLOCK_N,
        HEAD_DIM_V,
        BLOCK_DV,
    )
