"""Ragged attention in plain Triton, forward and backward: every feature, every GPU, and Triton's interpreter.

The forward is the online softmax of FlashAttention-2 (Dao, 2023, arXiv:2307.08691). The backward recomputes the
probabilities from the log-sum-exp in two kernels: one owns query tiles and makes dQ, the other owns key tiles and makes
dK and dV. No gradient is accumulated across programs, so equal inputs give equal bits.

Queries and keys of a row are aligned at their ends: query ``i`` sits on key ``i + shift``, ``shift = k_len - q_len``, and
attends keys ``i + shift - left`` to ``i + shift + right``. A causal mask is ``right = 0``.

float32 operands are multiplied as three TF32 products ("tf32x3"), which together keep about the precision of float32, or, where
`torch.set_float32_matmul_precision` allows it, as one ("tf32"); half precision ignores the setting.

Scores are kept in base 2: the factor log2(e) is folded into the scale, so exp2 needs no multiplication of its own.

With ALiBi (Press et al., 2021, arXiv:2108.12409) a head's slope times the distance of query and key is taken off each score.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Where a running maximum starts. Finite, so that a row without valid keys so far meets exp2(-inf - m) = 0, not NaN.
LOWEST = tl.constexpr(-1.0e30)
# Numbers that change from batch to batch: a kernel must not be compiled anew for a count that is 1 or a multiple of 16.
_COUNTS = (
    "dlse_stride",
    "dlse_head",
    "total",
    "plane",
    "heads",
    "group_size",
    "group",
    "left",
    "right",
)


@triton.jit
def _entry(TILES, heads, group):
    """This program's tile and head: longest tiles first, `group` heads at a time so that their keys share the L2 cache."""
    count = tl.load(TILES)
    t = tl.program_id(0)
    part = t // (count * group + (count == 0))
    r = t - part * (count * group)
    tile = TILES + 8 * (r // group + 1)
    head = part * group + r % group
    return tile, head, t < count * heads


@triton.jit
def _load_rows(
    base,
    first,
    length,
    stride,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHECK: tl.constexpr,
):
    """A (ROWS, BLOCK_D) tile from row `first` on; zeros beyond DIM and, with CHECK, beyond `length`."""
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    pointers = base + tl.cast(first, tl.int64) * stride + (rows[:, None] * stride + cols[None, :])
    if CHECK:
        if DIM == BLOCK_D:
            return tl.load(pointers, mask=(first + rows < length)[:, None], other=0.0)
        else:
            return tl.load(
                pointers, mask=(first + rows < length)[:, None] & (cols < DIM)[None, :], other=0.0
            )
    else:
        if DIM == BLOCK_D:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=(cols < DIM)[None, :], other=0.0)


@triton.jit
def _store_rows(
    base, value, first, length, stride, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    pointers = base + tl.cast(first, tl.int64) * stride + (rows[:, None] * stride + cols[None, :])
    tl.store(
        pointers,
        value.to(base.dtype.element_ty),
        mask=(first + rows < length)[:, None] & (cols < DIM)[None, :],
    )


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def _attended(
    first,
    length,
    other,
    before,
    after,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    OWN: tl.constexpr,
    STEP: tl.constexpr,
):
    """The other side's tokens that a tile attends, in steps: [low, a) and [b, high) need a mask, [a, b) does not."""
    shift = other - length
    last = tl.minimum(first + OWN, length) - 1
    low = 0
    a = 0
    high = other
    b = other
    if BEFORE:
        low = tl.maximum(first + shift - before, 0) // STEP * STEP
        a = tl.cdiv(tl.maximum(last + shift - before, 0), STEP) * STEP
    if AFTER:
        high = tl.minimum(other, tl.maximum(last + shift + after + 1, 0))
        b = tl.minimum(other, tl.maximum(first + shift + after + 1, 0))
    a = tl.minimum(a, tl.cdiv(high, STEP) * STEP)
    b = tl.maximum(a, b // STEP * STEP)
    return low, a, b, high


@triton.jit
def _valid(query, key, k_len, shift, left, right, LEFT: tl.constexpr, RIGHT: tl.constexpr):
    valid = key < k_len
    if LEFT:
        valid = valid & (key >= query + (shift - left))
    if RIGHT:
        valid = valid & (key <= query + (shift + right))
    return valid


@triton.jit
def _distance(query, key, shift):
    return tl.abs(query + shift - key).to(tl.float32)


@triton.jit
def _forward_step(
    acc,
    m,
    l,
    q,
    K,
    V,
    j,
    query,
    k_len,
    k_stride,
    v_stride,
    shift,
    left,
    right,
    scale,
    softcap,
    slope,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    k = _load_rows(K, j, k_len, k_stride, BLOCK_N, DIM, BLOCK_D, MASK)
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFTCAP:
        x = _tanh(x * (scale / softcap))
        factor = softcap * LOG2E
    else:
        factor = scale * LOG2E
    key = j + tl.arange(0, BLOCK_N)
    if ALIBI:
        x = x * factor - slope * _distance(query[:, None], key[None, :], shift)
        factor = 1.0
    if MASK:
        x = tl.where(
            _valid(query[:, None], key[None, :], k_len, shift, left, right, LEFT, RIGHT),
            x,
            -float("inf"),
        )
    m_new = tl.maximum(m, tl.max(x, 1) * factor)
    p = tl.exp2(x * factor - m_new[:, None])
    alpha = tl.exp2(m - m_new)
    l = l * alpha + tl.sum(p, 1)
    v = _load_rows(V, j, k_len, v_stride, BLOCK_N, DIM_V, BLOCK_DV, MASK)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, m_new, l


@triton.jit(do_not_specialize=_COUNTS)
def forward_kernel(
    Q,
    K,
    V,
    SLOPES,
    OUT,
    LSE,
    TILES,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
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
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """OUT (total, heads, DIM_V) and LSE (heads, total), one query tile and head a program."""
    tile, head, exists = _entry(TILES, heads, group)
    if not exists:
        return
    q_start = tl.load(tile).to(tl.int64)
    q_len = tl.load(tile + 1)
    k_start = tl.load(tile + 2).to(tl.int64)
    k_len = tl.load(tile + 3)
    first = tl.load(tile + 4)
    shift = k_len - q_len
    head = head.to(tl.int64)
    Q += q_start * q_stride + head * q_head
    K += k_start * k_stride + head // group_size * k_head
    V += k_start * v_stride + head // group_size * v_head
    slope = tl.load(SLOPES + head) * LOG2E if ALIBI else 0.0
    query = first + tl.arange(0, BLOCK_M)
    q = _load_rows(Q, first, q_len, q_stride, BLOCK_M, DIM, BLOCK_D, True)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    low, a, b, high = _attended(first, q_len, k_len, left, right, LEFT, RIGHT, BLOCK_M, BLOCK_N)
    if LEFT:
        for j in range(low, a, BLOCK_N):
            acc, m, l = _forward_step(
                acc,
                m,
                l,
                q,
                K,
                V,
                j,
                query,
                k_len,
                k_stride,
                v_stride,
                shift,
                left,
                right,
                scale,
                softcap,
                slope,
                DIM,
                DIM_V,
                BLOCK_D,
                BLOCK_DV,
                BLOCK_N,
                LEFT,
                RIGHT,
                SOFTCAP,
                ALIBI,
                True,
                PRECISION,
            )
    for j in range(a, b, BLOCK_N):
        acc, m, l = _forward_step(
            acc,
            m,
            l,
            q,
            K,
            V,
            j,
            query,
            k_len,
            k_stride,
            v_stride,
            shift,
            left,
            right,
            scale,
            softcap,
            slope,
            DIM,
            DIM_V,
            BLOCK_D,
            BLOCK_DV,
            BLOCK_N,
            LEFT,
            RIGHT,
            SOFTCAP,
            ALIBI,
            False,
            PRECISION,
        )
    for j in range(b, high, BLOCK_N):
        acc, m, l = _forward_step(
            acc,
            m,
            l,
            q,
            K,
            V,
            j,
            query,
            k_len,
            k_stride,
            v_stride,
            shift,
            left,
            right,
            scale,
            softcap,
            slope,
            DIM,
            DIM_V,
            BLOCK_D,
            BLOCK_DV,
            BLOCK_N,
            LEFT,
            RIGHT,
            SOFTCAP,
            ALIBI,
            True,
            PRECISION,
        )
    some = l > 0.0
    acc = acc / tl.where(some, l, 1.0)[:, None]
    lse = tl.where(some, (m + tl.log2(tl.where(some, l, 1.0))) * LN2, -float("inf"))
    # A NaN in the scores must reach the LSE, though it compares as "no valid key".
    lse = tl.where(l != l, l, lse)
    _store_rows(
        OUT + q_start * out_stride + head * DIM_V,
        acc,
        first,
        q_len,
        out_stride,
        BLOCK_M,
        DIM_V,
        BLOCK_DV,
    )
    tl.store(LSE + head * total + q_start + query, lse, mask=query < q_len)


@triton.jit
def _score_gradient(
    x,
    dp,
    lse,
    delta,
    query,
    key,
    valid,
    shift,
    scale,
    softcap,
    slope,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
):
    """Probabilities and the gradient of the scaled scores; query, key and statistics arrive ready to be broadcast."""
    if ALIBI:
        lse += slope * _distance(query, key, shift)
    if SOFTCAP:
        x = _tanh(x * (scale / softcap))
        p = tl.exp2(x * (softcap * LOG2E) - lse)
    else:
        p = tl.exp2(x * (scale * LOG2E) - lse)
    if MASK:
        p = tl.where(valid, p, 0.0)
    ds = p * (dp - delta)
    if SOFTCAP:
        ds *= 1.0 - x * x
    if MASK:
        ds = tl.where(
            valid, ds, 0.0
        )  # again: a query without valid keys may have any dout, also NaN
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
    j,
    query,
    k_len,
    k_stride,
    v_stride,
    shift,
    left,
    right,
    scale,
    softcap,
    slope,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    k = _load_rows(K, j, k_len, k_stride, BLOCK_N, DIM, BLOCK_D, MASK)
    v = _load_rows(V, j, k_len, v_stride, BLOCK_N, DIM_V, BLOCK_DV, MASK)
    x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    key = j + tl.arange(0, BLOCK_N)
    valid = _valid(query[:, None], key[None, :], k_len, shift, left, right, LEFT, RIGHT)
    _, ds = _score_gradient(
        x,
        dp,
        lse[:, None],
        delta[:, None],
        query[:, None],
        key[None, :],
        valid,
        shift,
        scale,
        softcap,
        slope,
        SOFTCAP,
        ALIBI,
        MASK,
    )
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=_COUNTS)
def dq_kernel(
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
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    out_stride,
    do_stride,
    do_head,
    dq_stride,
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
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
    HAS_DLSE: tl.constexpr,
):
    """DQ, and STATS (2, heads, total) for the kernel of dK and dV: the LSE in base 2, and the softmax's row term
    sum(out * dout) - dlse, through which the gradient of the LSE enters."""
    tile, head, exists = _entry(TILES, heads, group)
    if not exists:
        return
    q_start = tl.load(tile).to(tl.int64)
    q_len = tl.load(tile + 1)
    k_start = tl.load(tile + 2).to(tl.int64)
    k_len = tl.load(tile + 3)
    first = tl.load(tile + 4)
    shift = k_len - q_len
    head = head.to(tl.int64)
    Q += q_start * q_stride + head * q_head
    K += k_start * k_stride + head // group_size * k_head
    V += k_start * v_stride + head // group_size * v_head
    slope = tl.load(SLOPES + head) * LOG2E if ALIBI else 0.0
    query = first + tl.arange(0, BLOCK_M)
    inside = query < q_len
    q = _load_rows(Q, first, q_len, q_stride, BLOCK_M, DIM, BLOCK_D, True)
    do = _load_rows(
        DO + q_start * do_stride + head * do_head,
        first,
        q_len,
        do_stride,
        BLOCK_M,
        DIM_V,
        BLOCK_DV,
        True,
    )
    out = _load_rows(
        OUT + q_start * out_stride + head * DIM_V,
        first,
        q_len,
        out_stride,
        BLOCK_M,
        DIM_V,
        BLOCK_DV,
        True,
    )
    delta = tl.sum(out.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= tl.load(
            DLSE + (q_start + query) * dlse_stride + head * dlse_head, mask=inside, other=0.0
        )
    lse = tl.load(LSE + head * total + q_start + query, mask=inside, other=0.0) * LOG2E
    stats = STATS + head * total + q_start + query
    tl.store(stats, lse, mask=inside)
    tl.store(stats + plane, delta, mask=inside)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    low, a, b, high = _attended(first, q_len, k_len, left, right, LEFT, RIGHT, BLOCK_M, BLOCK_N)
    if LEFT:
        for j in range(low, a, BLOCK_N):
            dq = _dq_step(
                dq,
                q,
                do,
                lse,
                delta,
                K,
                V,
                j,
                query,
                k_len,
                k_stride,
                v_stride,
                shift,
                left,
                right,
                scale,
                softcap,
                slope,
                DIM,
                DIM_V,
                BLOCK_D,
                BLOCK_DV,
                BLOCK_N,
                LEFT,
                RIGHT,
                SOFTCAP,
                ALIBI,
                True,
                PRECISION,
            )
    for j in range(a, b, BLOCK_N):
        dq = _dq_step(
            dq,
            q,
            do,
            lse,
            delta,
            K,
            V,
            j,
            query,
            k_len,
            k_stride,
            v_stride,
            shift,
            left,
            right,
            scale,
            softcap,
            slope,
            DIM,
            DIM_V,
            BLOCK_D,
            BLOCK_DV,
            BLOCK_N,
            LEFT,
            RIGHT,
            SOFTCAP,
            ALIBI,
            False,
            PRECISION,
        )
    for j in range(b, high, BLOCK_N):
        dq = _dq_step(
            dq,
            q,
            do,
            lse,
            delta,
            K,
            V,
            j,
            query,
            k_len,
            k_stride,
            v_stride,
            shift,
            left,
            right,
            scale,
            softcap,
            slope,
            DIM,
            DIM_V,
            BLOCK_D,
            BLOCK_DV,
            BLOCK_N,
            LEFT,
            RIGHT,
            SOFTCAP,
            ALIBI,
            True,
            PRECISION,
        )
    _store_rows(
        DQ + q_start * dq_stride + head * DIM,
        dq * scale,
        first,
        q_len,
        dq_stride,
        BLOCK_M,
        DIM,
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
    plane,
    i,
    key,
    q_len,
    k_len,
    q_stride,
    do_stride,
    shift,
    left,
    right,
    scale,
    softcap,
    slope,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    MASK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    query = i + tl.arange(0, BLOCK_M)
    q = _load_rows(Q, i, q_len, q_stride, BLOCK_M, DIM, BLOCK_D, MASK)
    x = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    do = _load_rows(DO, i, q_len, do_stride, BLOCK_M, DIM_V, BLOCK_DV, MASK)
    dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
    if MASK:
        # Queries beyond the row have weight 0, and no bias.
        lse = tl.load(STATS + query, mask=query < q_len, other=float("inf"))
        delta = tl.load(STATS + plane + query, mask=query < q_len, other=0.0)
    else:
        lse = tl.load(STATS + query)
        delta = tl.load(STATS + plane + query)
    valid = _valid(query[None, :], key[:, None], k_len, shift, left, right, LEFT, RIGHT)
    p, ds = _score_gradient(
        x,
        dp,
        lse[None, :],
        delta[None, :],
        query[None, :],
        key[:, None],
        valid,
        shift,
        scale,
        softcap,
        slope,
        SOFTCAP,
        ALIBI,
        MASK,
    )
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=_COUNTS)
def dkdv_kernel(
    Q,
    K,
    V,
    SLOPES,
    DO,
    STATS,
    DK,
    DV,
    TILES,
    q_stride,
    q_head,
    k_stride,
    k_head,
    v_stride,
    v_head,
    do_stride,
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
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """DK and DV, one key tile and key head a program; it runs over all query heads that share the key head."""
    tile, head, exists = _entry(TILES, heads // group_size, group)
    if not exists:
        return
    k_start = tl.load(tile).to(tl.int64)
    k_len = tl.load(tile + 1)
    q_start = tl.load(tile + 2).to(tl.int64)
    q_len = tl.load(tile + 3)
    first = tl.load(tile + 4)
    shift = k_len - q_len
    head = head.to(tl.int64)
    key = first + tl.arange(0, BLOCK_N)
    k = _load_rows(
        K + k_start * k_stride + head * k_head, first, k_len, k_stride, BLOCK_N, DIM, BLOCK_D, True
    )
    v = _load_rows(
        V + k_start * v_stride + head * v_head,
        first,
        k_len,
        v_stride,
        BLOCK_N,
        DIM_V,
        BLOCK_DV,
        True,
    )
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)
    # Seen from a key, the window's sides change places.
    low, a, b, high = _attended(first, k_len, q_len, right, left, RIGHT, LEFT, BLOCK_N, BLOCK_M)
    for g in range(group_size):
        q_one = head * group_size + g
        Q1 = Q + q_start * q_stride + q_one * q_head
        DO1 = DO + q_start * do_stride + q_one * do_head
        STATS1 = STATS + q_one * total + q_start
        slope = tl.load(SLOPES + q_one) * LOG2E if ALIBI else 0.0
        if RIGHT:
            for i in range(low, a, BLOCK_M):
                dk, dv = _dkdv_step(
                    dk,
                    dv,
                    k,
                    v,
                    Q1,
                    DO1,
                    STATS1,
                    plane,
                    i,
                    key,
                    q_len,
                    k_len,
                    q_stride,
                    do_stride,
                    shift,
                    left,
                    right,
                    scale,
                    softcap,
                    slope,
                    DIM,
                    DIM_V,
                    BLOCK_D,
                    BLOCK_DV,
                    BLOCK_M,
                    LEFT,
                    RIGHT,
                    SOFTCAP,
                    ALIBI,
                    True,
                    PRECISION,
                )
        for i in range(a, b, BLOCK_M):
            dk, dv = _dkdv_step(
                dk,
                dv,
                k,
                v,
                Q1,
                DO1,
                STATS1,
                plane,
                i,
                key,
                q_len,
                k_len,
                q_stride,
                do_stride,
                shift,
                left,
                right,
                scale,
                softcap,
                slope,
                DIM,
                DIM_V,
                BLOCK_D,
                BLOCK_DV,
                BLOCK_M,
                LEFT,
                RIGHT,
                SOFTCAP,
                ALIBI,
                False,
                PRECISION,
            )
        for i in range(b, high, BLOCK_M):
            dk, dv = _dkdv_step(
                dk,
                dv,
                k,
                v,
                Q1,
                DO1,
                STATS1,
                plane,
                i,
                key,
                q_len,
                k_len,
                q_stride,
                do_stride,
                shift,
                left,
                right,
                scale,
                softcap,
                slope,
                DIM,
                DIM_V,
                BLOCK_D,
                BLOCK_DV,
                BLOCK_M,
                LEFT,
                RIGHT,
                SOFTCAP,
                ALIBI,
                True,
                PRECISION,
            )
    row = k_start * dk_stride
    _store_rows(DK + row + head * DIM, dk * scale, first, k_len, dk_stride, BLOCK_N, DIM, BLOCK_D)
    _store_rows(
        DV + k_start * dv_stride + head * DIM_V,
        dv,
        first,
        k_len,
        dv_stride,
        BLOCK_N,
        DIM_V,
        BLOCK_DV,
    )
