"""Attention to a paged cache in plain Triton: decoding, prefill and the combination of parts.

A row is decoded if its queries, times the query heads per key head, fit one tile. `decode_kernel`
takes all rows that are decoded, `prefill_kernel` the others, each from the lengths on the device.
So nothing is planned on the host, and a CUDA graph stays right when the lengths change.

`decode_kernel` has a fixed number of CTAs per key head. The keys of all rows, in blocks of BLOCK_N,
are one sequence of units, of which every CTA takes an equal share. A CTA stores the result of a row
that it holds completely, and partial results of its first and its last row otherwise.
`combine_kernel` adds them up by their log-sum-exp. This is stream-K (Osama et al., 2023,
arXiv:2301.03598) for the split keys of FlashDecoding (Dao et al., 2023).

`prefill_kernel` has one CTA per tile of queries and key head, or PARTS of them if that leaves most
of the device idle. `combine_prefill_kernel` adds up their parts.

With SPLIT > 0 a unit has that many blocks of one row, and all partial results are kept. Then the
bits of a row do not depend on the other rows.

The query heads of one key head are rows of one tile (GQA): row r of a key head belongs to query
``r // GROUP`` and to its query head ``r % GROUP``. Scores are kept in base 2.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..runtime.device import INTERPRETED
from .constants import INITIAL_MAX, LN2, LOG2E
from .portable import tanh

USES_PTX = tl.constexpr(not INTERPRETED)

UNSPECIALIZED = (
    "n",
    "bisections",
    "parts",
    "window_left",
    "window_right",
    "scale",
    "softcap",
    "value_scale",
    "table_width",
    "capacity",
    "num_tokens",
)


@triton.jit
def _load_pages(
    PAGES, start, end, HEADS: tl.constexpr, BLOCK_N: tl.constexpr, PAGE_SIZE: tl.constexpr
):
    """Return the page of a block of keys, or the page of each column if it may have several."""
    if PAGE_SIZE == 0:
        return 0
    elif PAGE_SIZE % BLOCK_N == 0:
        return tl.load(PAGES + start // PAGE_SIZE, mask=start < end, other=0)
    else:
        token = tl.arange(0, BLOCK_N * HEADS) // HEADS
        if BLOCK_N % PAGE_SIZE == 0 and BLOCK_N // PAGE_SIZE <= 4:
            # A few pages are cheaper as numbers than as an array, which would change its layout.
            PAGES += start // PAGE_SIZE
            page = tl.load(PAGES, mask=start < end, other=0)
            for i in tl.static_range(1, BLOCK_N // PAGE_SIZE):
                next_page = tl.load(PAGES + i, mask=start + i * PAGE_SIZE < end, other=0)
                page = tl.where(token >= i * PAGE_SIZE, next_page, page)
            return page
        else:
            token += start
            return tl.load(PAGES + token // PAGE_SIZE, mask=token < end, other=0)


@triton.jit
def _load_block(
    X,
    page,
    start,
    end,
    stride_p,
    stride_t,
    stride_h,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_FULL: tl.constexpr,
):
    """Load a block of keys or values, (BLOCK_N * HEADS, BLOCK_D); 0 after `end` and DIM.

    With IS_FULL the block ends before `end`.
    """
    column = tl.arange(0, BLOCK_N * HEADS)
    offs_d = tl.arange(0, BLOCK_D)
    token = column // HEADS
    head = (column % HEADS).to(tl.int64) * stride_h
    if PAGE_SIZE == 0:
        X += tl.cast(start, tl.int64) * stride_t
        offset = token.to(tl.int64) * stride_t + head
    elif PAGE_SIZE % BLOCK_N == 0:
        X += page.to(tl.int64) * stride_p + tl.cast(start % PAGE_SIZE, tl.int64) * stride_t
        offset = token.to(tl.int64) * stride_t + head
    else:
        place = ((start + token) % PAGE_SIZE).to(tl.int64)
        offset = page.to(tl.int64) * stride_p + place * stride_t + head
    pointers = X + offset[:, None] + offs_d[None, :]
    if IS_FULL and DIM == BLOCK_D:
        return tl.load(pointers)
    mask = (start + token < end)[:, None]
    if DIM != BLOCK_D:
        mask = mask & (offs_d < DIM)[None, :]
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def _unpack(pairs, NUMBER: tl.constexpr):
    """Return the even and the odd numbers of pairs of 8-bit numbers in float16."""
    if USES_PTX:
        # The compiler needs twice the instructions to select bytes of two pairs in one register.
        convert: tl.constexpr = "e4m3x2" if NUMBER.is_fp8e4nv() else "e5m2x2"
        start: tl.constexpr = "{ .reg .b16 x, y; .reg .b32 z; prmt.b32 z, $1, $1, "
        end: tl.constexpr = "; mov.b32 {x, y}, z; cvt.rn.f16x2." + convert + " $0, x; }"
        even = tl.inline_asm_elementwise(
            start + "0x2020" + end, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2
        )
        odd = tl.inline_asm_elementwise(
            start + "0x3131" + end, "=r,r", [pairs], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        even = (pairs & 0xFF).to(tl.int8).to(NUMBER, bitcast=True).to(tl.float16)
        odd = (pairs >> 8).to(tl.int8).to(NUMBER, bitcast=True).to(tl.float16)
    return even, odd


@triton.jit
def _attend(
    acc,
    row_max,
    row_sum,
    q,
    K,
    V,
    PAGES,
    page,
    begin,
    end,
    position,
    slope,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_vp,
    stride_vt,
    stride_vh,
    window_left,
    window_right,
    scale,
    softcap,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    IS_FULL: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SUM_LATER: tl.constexpr,
    PAIRS: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the keys [begin, end) of a row to the online softmax of a tile of its queries.

    `begin` is a multiple of BLOCK_N; K, V and PAGES point to the row and to the first head. `page` is
    the result of `_load_pages` for the first block. Pages are loaded one block ahead, so that the
    loads of keys and values do not wait for them.
    Query m is aligned with key ``position[m]`` and belongs to key head ``m // ROWS`` of the tile.
    A block has BLOCK_N keys of HEADS heads, which are adjacent in memory; column c is key
    ``c // HEADS`` of head ``c % HEADS``. Products of a query with another head are masked. That
    wastes products, of which decoding has plenty, and reads memory in long runs. With SUM_LATER the
    caller sums `row_sum` over the columns, which several warps may hold. With PAIRS numbers of 8 bits
    are loaded in pairs, because `ldmatrix` transposes no smaller elements than 16 bits.
    """
    column = tl.arange(0, BLOCK_N * HEADS)
    BLOCK_M: tl.constexpr = q.shape[0]
    if HEADS > 1:
        own_head = (tl.arange(0, BLOCK_M) // ROWS)[:, None] == (column % HEADS)[None, :]
    SIZE: tl.constexpr = 2 if PAIRS else 1
    if SAME_STRIDES:
        stride_vp = stride_kp
        stride_vt = stride_kt
        stride_vh = stride_kh
    if PAIRS:
        KEY = K.dtype.element_ty
        VALUE = V.dtype.element_ty
        K = K.to(tl.pointer_type(tl.int16))
        V = V.to(tl.pointer_type(tl.int16))
        q, q_odd = tl.split(tl.reshape(q, BLOCK_M, BLOCK_D // 2, 2))
        acc, acc_odd = tl.split(tl.reshape(acc, BLOCK_M, BLOCK_DV // 2, 2))
    for start in range(begin, end, BLOCK_N):
        next_page = _load_pages(PAGES, start + BLOCK_N, end, HEADS, BLOCK_N, PAGE_SIZE)
        k = _load_block(
            K, page, start, end, stride_kp // SIZE, stride_kt // SIZE, stride_kh // SIZE, HEADS,
            HEAD_DIM // SIZE, BLOCK_D // SIZE, BLOCK_N, PAGE_SIZE, IS_FULL,
        )  # fmt: skip
        v = _load_block(
            V, page, start, end, stride_vp // SIZE, stride_vt // SIZE, stride_vh // SIZE, HEADS,
            HEAD_DIM_V // SIZE, BLOCK_DV // SIZE, BLOCK_N, PAGE_SIZE, IS_FULL,
        )  # fmt: skip
        if PAIRS:
            k, k_odd = _unpack(k, KEY)
            v, v_odd = _unpack(v, VALUE)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION)
        if PAIRS:
            scores = tl.dot(q_odd, tl.trans(k_odd), scores)
        if SOFTCAP:
            scores = tanh(scores * (scale / softcap)) * (softcap * LOG2E)
        else:
            scores = scores * (scale * LOG2E)
        token = start + (column // HEADS)[None, :]
        aligned = position[:, None]
        if ALIBI:
            scores -= slope[:, None] * tl.abs(aligned - token).to(tl.float32)
        if not IS_FULL:
            attended = token < end
            if HEADS > 1:
                attended = attended & own_head
            if HAS_LEFT:
                attended = attended & (token >= aligned - window_left)
            if HAS_RIGHT:
                attended = attended & (token <= aligned + window_right)
            scores = tl.where(attended, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        p = tl.exp2(scores - new_max[:, None])
        alpha = tl.exp2(row_max - new_max)
        if SUM_LATER:
            row_sum = row_sum * alpha[:, None] + p
        else:
            row_sum = row_sum * alpha + tl.sum(p, 1)
        row_max = new_max
        p = p.to(q.dtype)
        acc = tl.dot(p, v.to(q.dtype), acc * alpha[:, None], input_precision=PRECISION)
        if PAIRS:
            acc_odd = tl.dot(p, v_odd, acc_odd * alpha[:, None])
        page = next_page
    if PAIRS:
        acc = tl.interleave(acc, acc_odd)
    return acc, row_max, row_sum


@triton.jit
def table_start(PAGE_OFFSETS, row, table_width, IS_RAGGED: tl.constexpr):
    """Return the first entry of a row of the page table; a dense table has no offsets."""
    if IS_RAGGED:
        return tl.load(PAGE_OFFSETS + row).to(tl.int64)
    else:
        return row.to(tl.int64) * table_width


@triton.jit
def _query_rows(first_head, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):
    """Return the query and the query head of each row of a tile, and its row within its key head."""
    m = tl.arange(0, HEADS * ROWS)
    row = m % ROWS
    return row // GROUP, (first_head + m // ROWS) * GROUP + row % GROUP, row


@triton.jit
def _load_queries(
    Q,
    num_rows,
    first_head,
    stride_qt,
    stride_qh,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load a tile of queries, (HEADS * ROWS, BLOCK_D), with `num_rows` rows per key head."""
    offs_d = tl.arange(0, BLOCK_D)
    query, head, row = _query_rows(first_head, HEADS, GROUP, ROWS)
    offset = query.to(tl.int64) * stride_qt + head.to(tl.int64) * stride_qh
    mask = (row < num_rows)[:, None] & (offs_d < HEAD_DIM)[None, :]
    return tl.load(Q + offset[:, None] + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def _as_float16(q):
    """Return queries in float16, each divided by a power of two, and these powers, (rows, 1).

    Hopper converts 8-bit keys to float16 in one instruction, and to bfloat16 in many. The division
    keeps queries beyond the range of float16.
    """
    largest = tl.max(tl.abs(q.to(tl.float32)), 1)
    exponent = largest.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.clamp(exponent.to(tl.float32, bitcast=True), 2.0**-100, 2.0**100)[:, None]
    return (q.to(tl.float32) / power).to(tl.float16), power


@triton.jit
def _store_partial(
    partial,
    acc,
    row_max,
    row_sum,
    value_scale,
    is_row,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Store the results of a part of the keys, followed by the log-sum-exp in base 2."""
    offs_dv = tl.arange(0, BLOCK_DV)
    weight = tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(
        partial[:, None] + offs_dv[None, :],
        acc * (value_scale / weight)[:, None],
        mask=is_row[:, None] & (offs_dv < HEAD_DIM_V)[None, :],
    )
    lse = tl.where(row_sum > 0, row_max + tl.log2(weight), -float("inf"))
    tl.store(partial + HEAD_DIM_V, lse, mask=is_row)


@triton.jit
def _store_results(
    OUT,
    LSE,
    acc,
    row_max,
    row_sum,
    value_scale,
    num_rows,
    first_head,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    WRITE_LSE: tl.constexpr,
):
    """Store the output and the natural log-sum-exp of a tile of queries.

    OUT and LSE point to the first query.
    """
    offs_d = tl.arange(0, BLOCK_DV)
    query, head, row = _query_rows(first_head, HEADS, GROUP, ROWS)
    index = query.to(tl.int64) * (KV_HEADS * GROUP) + head
    is_row = row < num_rows
    total = tl.where(row_sum > 0, row_sum, 1.0)  # a query without keys has output 0
    out = acc * (value_scale / total)[:, None]
    mask = is_row[:, None] & (offs_d < HEAD_DIM_V)[None, :]
    pointers = OUT + index[:, None] * HEAD_DIM_V + offs_d[None, :]
    tl.store(pointers, out.to(OUT.dtype.element_ty), mask=mask)
    if WRITE_LSE:
        lse = tl.where(row_sum > 0, (row_max + tl.log2(total)) * LN2, -float("inf"))
        tl.store(LSE + index, lse, mask=is_row)


@triton.jit
def _first_block(kv_length, q_length, window_left, HAS_LEFT: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first block of keys that a query of a row attends."""
    if HAS_LEFT:
        return tl.maximum(kv_length - q_length - window_left, 0) // BLOCK_N
    else:
        return kv_length * 0


@triton.jit
def clamped_kv_length(
    KV_LENGTHS,
    PAGE_OFFSETS,
    row,
    is_row,
    capacity,
    PAGE_SIZE: tl.constexpr,
    IS_RAGGED: tl.constexpr,
):
    """Return the numbers of keys of rows, at most the tokens of their pages.

    A length beyond the pages would read after the row of the page table. `capacity` is the number of
    tokens of a row of a dense table, or of all rows of a ragged one, which is not read here.
    """
    length = tl.load(KV_LENGTHS + row, mask=is_row, other=0)
    if PAGE_SIZE == 0:
        length = tl.load(KV_LENGTHS + row + 1, mask=is_row, other=0) - length
    elif IS_RAGGED:
        pages = tl.load(PAGE_OFFSETS + row + 1, mask=is_row, other=0)
        pages -= tl.load(PAGE_OFFSETS + row, mask=is_row, other=0)
        length = tl.minimum(length, pages.to(tl.int64) * PAGE_SIZE)
    else:
        length = tl.minimum(length, capacity)
    return length.to(tl.int32)


@triton.jit
def _num_units(
    KV_LENGTHS,
    PAGE_OFFSETS,
    Q_OFFSETS,
    row,
    is_row,
    capacity,
    window_left,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_RAGGED: tl.constexpr,
):
    """Return the units of keys of decoded rows; 0 for other rows and for rows without queries."""
    kv_length = clamped_kv_length(
        KV_LENGTHS, PAGE_OFFSETS, row, is_row, capacity, PAGE_SIZE, IS_RAGGED
    )
    start = tl.load(Q_OFFSETS + row, mask=is_row, other=0)
    q_length = (tl.load(Q_OFFSETS + row + 1, mask=is_row, other=0) - start).to(tl.int32)
    blocks = tl.cdiv(kv_length, BLOCK_N)
    blocks -= _first_block(kv_length, q_length, window_left, HAS_LEFT, BLOCK_N)
    units = tl.cdiv(blocks, SPLIT) if SPLIT else blocks
    # A row without keys has one unit, so that its output is written.
    is_decoded = (q_length > 0) & (q_length * GROUP <= ROWS)
    return tl.where(is_decoded, tl.maximum(units, 1), 0)


@triton.jit
def _total_units(
    KV_LENGTHS,
    PAGE_OFFSETS,
    Q_OFFSETS,
    n,
    capacity,
    window_left,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    LENGTHS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Return the units of the first n rows; without MANY at most LENGTHS."""
    total = tl.zeros([LENGTHS], tl.int32)
    for start in range(0, n if MANY else 1, LENGTHS):
        row = start + tl.arange(0, LENGTHS)
        total += _num_units(
            KV_LENGTHS, PAGE_OFFSETS, Q_OFFSETS, row, row < n, capacity, window_left, GROUP, ROWS,
            BLOCK_N, HAS_LEFT, SPLIT, PAGE_SIZE, IS_RAGGED,
        )  # fmt: skip
    return tl.sum(total)


@triton.jit
def _find_row(
    KV_LENGTHS,
    PAGE_OFFSETS,
    Q_OFFSETS,
    n,
    unit,
    capacity,
    window_left,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    LENGTHS: tl.constexpr,
    MANY: tl.constexpr,
):
    """Return the row of a unit, and the first unit of that row."""
    row = n * 0
    first = unit * 0
    for start in range(0, n if MANY else 1, LENGTHS):
        rows = start + tl.arange(0, LENGTHS)
        units = _num_units(
            KV_LENGTHS, PAGE_OFFSETS, Q_OFFSETS, rows, rows < n, capacity, window_left, GROUP, ROWS,
            BLOCK_N, HAS_LEFT, SPLIT, PAGE_SIZE, IS_RAGGED,
        )  # fmt: skip
        # Rows before the unit come first: a block of rows counts if all rows before it do.
        is_before = (first + tl.cumsum(units, 0) <= unit) & (rows < n) & (row == start)
        row += tl.sum(is_before.to(tl.int32))
        first += tl.sum(tl.where(is_before, units, 0))
    if MANY:
        # The compiler loses the alignment of all that is computed from a sum over a loop.
        first = first.to(tl.float64).to(tl.int32)
    return row, first


@triton.jit
def _first_unit(total, slot, SLOTS: tl.constexpr):
    """Return the first unit of a slot, of equal shares of all units."""
    return slot * (total // SLOTS) + tl.minimum(slot, total % SLOTS)


@triton.jit
def _slot_of(total, unit, SLOTS: tl.constexpr):
    """Return the slot of a unit."""
    share = total // SLOTS
    large = total % SLOTS  # slots with one unit more
    end = large * (share + 1)
    return tl.where(unit < end, unit // (share + 1), large + (unit - end) // tl.maximum(share, 1))


@triton.jit(do_not_specialize=UNSPECIALIZED)
def decode_kernel(
    Q,
    K,
    V,
    PAGES,
    PAGE_OFFSETS,
    KV_LENGTHS,
    Q_OFFSETS,
    SLOPES,
    K_SCALE,
    V_SCALE,
    OUT,
    LSE,
    PARTIAL,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_vp,
    stride_vt,
    stride_vh,
    n,
    window_left,
    window_right,
    scale,
    softcap,
    value_scale,
    table_width,
    capacity,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SCALED: tl.constexpr,
    IS_NARROW: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    SPLIT: tl.constexpr,
    LENGTHS: tl.constexpr,
    MANY: tl.constexpr,
    SLOTS: tl.constexpr,
    PAIRS: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
    ONE_ROW: tl.constexpr,
):
    """Compute the decoded rows of OUT (total, heads, HEAD_DIM_V) and of LSE (total, heads).

    PARTIAL (parts, KV_HEADS, ROWS, HEAD_DIM_V + 4) gets the results of parts of rows, each followed
    by its log-sum-exp in base 2. Part ``2 * slot + 1`` begins with its row, part ``2 * slot`` does
    not; with SPLIT the parts are the units. With PAGE_SIZE = 0 the keys are contiguous: PAGES is
    not read, and KV_LENGTHS has the offsets of their rows.

    ONE_ROW is for one query on one row of pages. Then the pages of a CTA are loaded together with the
    lengths, for a row of `capacity` tokens. They are loaded again if the row is so much
    shorter that its blocks are cut elsewhere.
    """
    slot = tl.program_id(0) // (KV_HEADS // HEADS)
    head = tl.program_id(0) % (KV_HEADS // HEADS) * HEADS
    if ONE_ROW:
        if PDL:
            gdc_launch_dependents()
        row = tl.cast(0, tl.int32)
        first = tl.cast(0, tl.int32)
        expected_total = tl.maximum(tl.cdiv(capacity, BLOCK_N), 1)
        expected_begin = _first_unit(expected_total, slot, SLOTS) * BLOCK_N
        expected_page = _load_pages(PAGES, expected_begin, capacity, HEADS, BLOCK_N, PAGE_SIZE)
        only_q = _load_queries(
            Q, GROUP, head, stride_qt, stride_qh, HEADS, GROUP, ROWS, HEAD_DIM, BLOCK_D
        )
        only_kv_length = clamped_kv_length(
            KV_LENGTHS, PAGE_OFFSETS, row, True, capacity, PAGE_SIZE, IS_RAGGED
        )
        only_q_length = tl.load(Q_OFFSETS + 1).to(tl.int32)
        blocks = tl.cdiv(only_kv_length, BLOCK_N)
        blocks -= _first_block(only_kv_length, only_q_length, window_left, HAS_LEFT, BLOCK_N)
        total = tl.where(only_q_length > 0, tl.maximum(blocks, 1), 0)
        unit = _first_unit(total, slot, SLOTS)
        last = _first_unit(total, slot + 1, SLOTS)
    else:
        total = _total_units(
            KV_LENGTHS,
            PAGE_OFFSETS,
            Q_OFFSETS,
            n,
            capacity,
            window_left,
            GROUP,
            ROWS,
            BLOCK_N,
            HAS_LEFT,
            SPLIT,
            PAGE_SIZE,
            IS_RAGGED,
            LENGTHS,
            MANY,
        )
        unit = _first_unit(total, slot, SLOTS)
        last = _first_unit(total, slot + 1, SLOTS)
        row, first = _find_row(
            KV_LENGTHS,
            PAGE_OFFSETS,
            Q_OFFSETS,
            n,
            unit,
            capacity,
            window_left,
            GROUP,
            ROWS,
            BLOCK_N,
            HAS_LEFT,
            SPLIT,
            PAGE_SIZE,
            IS_RAGGED,
            LENGTHS,
            MANY,
        )
        if PDL:
            gdc_launch_dependents()
    query, query_head, query_row = _query_rows(head, HEADS, GROUP, ROWS)
    slope = tl.load(SLOPES + query_head) * LOG2E if ALIBI else query.to(tl.float32)
    if SCALED:
        scale = scale * tl.load(K_SCALE + query_head // GROUP).to(tl.float32)[:, None]
        value_scale = value_scale * tl.load(V_SCALE + query_head // GROUP).to(tl.float32)
    K += head.to(tl.int64) * stride_kh
    V += head.to(tl.int64) * stride_vh
    while unit < last:
        if ONE_ROW:
            units = total
        else:
            units = _num_units(
                KV_LENGTHS, PAGE_OFFSETS, Q_OFFSETS, row, row < n, capacity, window_left, GROUP, ROWS,
                BLOCK_N, HAS_LEFT, SPLIT, PAGE_SIZE, IS_RAGGED,
            )  # fmt: skip
        if units > 0:
            stop = unit + 1 if SPLIT else tl.minimum(last, first + units)
            keys = tl.cast(0, tl.int64)
            if ONE_ROW:
                kv_length = only_kv_length
                q_start = tl.cast(0, tl.int64)
                q_length = only_q_length
            else:
                kv_length = clamped_kv_length(
                    KV_LENGTHS, PAGE_OFFSETS, row, row < n, capacity, PAGE_SIZE, IS_RAGGED
                )
                if PAGE_SIZE == 0:
                    keys = tl.load(KV_LENGTHS + row).to(tl.int64)
                q_start = tl.load(Q_OFFSETS + row).to(tl.int64)
                q_length = tl.load(Q_OFFSETS + row + 1).to(tl.int32) - q_start.to(tl.int32)
            per_unit: tl.constexpr = SPLIT if SPLIT else 1
            before = _first_block(kv_length, q_length, window_left, HAS_LEFT, BLOCK_N)
            begin = (before + (unit - first) * per_unit) * BLOCK_N
            end = (before + (stop - first) * per_unit) * BLOCK_N
            end = tl.minimum(end, kv_length)
            if ONE_ROW:
                pages = PAGES
                page = expected_page
                if begin != expected_begin:
                    page = _load_pages(pages, begin, end, HEADS, BLOCK_N, PAGE_SIZE)
                q = only_q
            else:
                # All pages are requested before the kernel waits for the queries.
                pages = PAGES + table_start(PAGE_OFFSETS, row, table_width, IS_RAGGED)
                page = _load_pages(pages, begin, end, HEADS, BLOCK_N, PAGE_SIZE)
                q = _load_queries(
                    Q + q_start * stride_qt, q_length * GROUP, head, stride_qt, stride_qh,
                    HEADS, GROUP, ROWS, HEAD_DIM, BLOCK_D,
                )  # fmt: skip
            row_scale = scale
            if IS_NARROW:
                q, power = _as_float16(q)
                row_scale = scale * power
            acc, row_max, row_sum = _attend(
                tl.zeros([HEADS * ROWS, BLOCK_DV], tl.float32),
                tl.full([HEADS * ROWS], INITIAL_MAX, tl.float32),
                tl.zeros([HEADS * ROWS, BLOCK_N * HEADS], tl.float32),
                q,
                K + keys * stride_kt,
                V + keys * stride_vt,
                pages,
                page,
                begin,
                end,
                kv_length - q_length + query,
                slope,
                stride_kp,
                stride_kt,
                stride_kh,
                stride_vp,
                stride_vt,
                stride_vh,
                window_left,
                window_right,
                row_scale,
                softcap,
                HEADS,
                ROWS,
                HEAD_DIM,
                HEAD_DIM_V,
                BLOCK_D,
                BLOCK_DV,
                BLOCK_N,
                PAGE_SIZE,
                HAS_LEFT,
                HAS_RIGHT,
                False,
                SOFTCAP,
                ALIBI,
                True,
                PAIRS,
                SAME_STRIDES,
                PRECISION,
            )
            row_sum = tl.sum(row_sum, 1)
            if stop - unit == units:
                _store_results(
                    OUT + q_start * (KV_HEADS * GROUP * HEAD_DIM_V),
                    LSE + q_start * (KV_HEADS * GROUP),
                    acc,
                    row_max,
                    row_sum,
                    value_scale,
                    q_length * GROUP,
                    head,
                    KV_HEADS,
                    HEADS,
                    GROUP,
                    ROWS,
                    HEAD_DIM_V,
                    BLOCK_DV,
                    WRITE_LSE,
                )
            else:
                part = unit if SPLIT else 2 * slot + (unit == first)
                index = (part.to(tl.int64) * KV_HEADS + query_head // GROUP) * ROWS + query_row
                _store_partial(
                    PARTIAL + index * (HEAD_DIM_V + 4),
                    acc,
                    row_max,
                    row_sum,
                    value_scale,
                    query_row < q_length * GROUP,
                    HEAD_DIM_V,
                    BLOCK_DV,
                )
            unit = stop
        if unit >= first + units:
            first += units
            row += 1


@triton.jit
def _clear_tail(X, begin, num_tokens, WIDTH: tl.constexpr, VALUE: tl.constexpr):
    """Write VALUE to the elements of X (num_tokens, WIDTH) from `begin` on, by all CTAs."""
    end = tl.cast(num_tokens, tl.int64) * WIDTH
    for start in range(begin + tl.program_id(0) * 512, end, tl.num_programs(0) * 512):
        elements = start + tl.arange(0, 512)
        tl.store(X + elements, tl.full([512], VALUE, X.dtype.element_ty), mask=elements < end)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def combine_kernel(
    PAGE_OFFSETS,
    KV_LENGTHS,
    Q_OFFSETS,
    OUT,
    LSE,
    PARTIAL,
    n,
    window_left,
    capacity,
    num_tokens,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    SPLIT: tl.constexpr,
    LENGTHS: tl.constexpr,
    MANY: tl.constexpr,
    SLOTS: tl.constexpr,
    BY_ROW: tl.constexpr,
    TILES: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
    CLEAR_TAIL: tl.constexpr,
):
    """Combine the parts of the rows that `decode_kernel` cut.

    A CTA computes one of TILES parts of TILE queries of a key head: with BY_ROW of any row, else of
    the row whose first part is the last part of a slot.

    With CLEAR_TAIL the tokens from Q_OFFSETS[n] to `num_tokens` become 0 in OUT, and -inf in LSE.
    """
    # Requested together with the lengths, because the kernel waits for these anyway.
    tail = tl.load(Q_OFFSETS + n).to(tl.int64) if CLEAR_TAIL else 0
    query_row = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    head = tl.program_id(0) // TILES % KV_HEADS
    row = tl.program_id(0) // (TILES * KV_HEADS)
    total = _total_units(
        KV_LENGTHS,
        PAGE_OFFSETS,
        Q_OFFSETS,
        n,
        capacity,
        window_left,
        GROUP,
        ROWS,
        BLOCK_N,
        HAS_LEFT,
        SPLIT,
        PAGE_SIZE,
        IS_RAGGED,
        LENGTHS,
        MANY,
    )
    if BY_ROW:
        first = _total_units(
            KV_LENGTHS,
            PAGE_OFFSETS,
            Q_OFFSETS,
            row,
            capacity,
            window_left,
            GROUP,
            ROWS,
            BLOCK_N,
            HAS_LEFT,
            SPLIT,
            PAGE_SIZE,
            IS_RAGGED,
            LENGTHS,
            MANY,
        )
        slot = _slot_of(total, first, SLOTS)
    else:
        slot = row
        end = _first_unit(total, slot + 1, SLOTS)
        row, first = _find_row(
            KV_LENGTHS, PAGE_OFFSETS, Q_OFFSETS, n, tl.maximum(end - 1, 0), capacity, window_left,
            GROUP, ROWS, BLOCK_N, HAS_LEFT, SPLIT, PAGE_SIZE, IS_RAGGED, LENGTHS, MANY,
        )  # fmt: skip
        row = tl.minimum(row, n - 1)
    units = _num_units(
        KV_LENGTHS,
        PAGE_OFFSETS,
        Q_OFFSETS,
        row,
        row < n,
        capacity,
        window_left,
        GROUP,
        ROWS,
        BLOCK_N,
        HAS_LEFT,
        SPLIT,
        PAGE_SIZE,
        IS_RAGGED,
    )
    if SPLIT:
        parts = units
    else:
        parts = _slot_of(total, first + units - 1, SLOTS) - slot + 1
    is_cut = (units > 0) & (parts > 1)
    if not BY_ROW:
        is_cut &= (first >= _first_unit(total, slot, SLOTS)) & (first < end)
    q_start = tl.load(Q_OFFSETS + row).to(tl.int64)
    q_length = tl.load(Q_OFFSETS + row + 1).to(tl.int32) - q_start.to(tl.int32)
    if PDL:
        # All CTAs wait: the kernel after this one may start when this one has ended.
        gdc_wait()
    if is_cut:
        offs_d = tl.arange(0, BLOCK_DV)
        is_row = query_row < q_length * GROUP
        acc = tl.zeros([TILE, BLOCK_DV], tl.float32)
        top = tl.full([TILE], INITIAL_MAX, tl.float32)
        weight = tl.zeros([TILE], tl.float32)
        for j in range(0, parts, PARTS):
            part = j + tl.arange(0, PARTS)
            index = first + part if SPLIT else 2 * (slot + part) + (part == 0)
            index = (index.to(tl.int64) * KV_HEADS + head) * ROWS
            index = index[None, :] + query_row[:, None]
            is_part = (part < parts)[None, :] & is_row[:, None]
            partial = PARTIAL + index * (HEAD_DIM_V + 4)
            lse = tl.load(partial + HEAD_DIM_V, mask=is_part, other=-float("inf"))
            result = tl.load(
                partial[:, :, None] + offs_d[None, None, :],
                mask=is_part[:, :, None] & (offs_d < HEAD_DIM_V)[None, None, :],
                other=0.0,
            )
            new_top = tl.maximum(top, tl.max(lse, 1))
            factor = tl.exp2(lse - new_top[:, None])
            alpha = tl.exp2(top - new_top)
            acc = acc * alpha[:, None] + tl.sum(result * factor[:, :, None], 1)
            weight = weight * alpha + tl.sum(factor, 1)
            top = new_top
        index = (q_start + query_row // GROUP) * (KV_HEADS * GROUP) + head * GROUP
        index += query_row % GROUP
        divisor = tl.where(weight > 0, weight, 1.0)
        out = acc / divisor[:, None]
        tl.store(
            OUT + index[:, None] * HEAD_DIM_V + offs_d[None, :],
            out.to(OUT.dtype.element_ty),
            mask=is_row[:, None] & (offs_d < HEAD_DIM_V)[None, :],
        )
        if WRITE_LSE:
            lse = tl.where(weight > 0, (top + tl.log2(divisor)) * LN2, -float("inf"))
            tl.store(LSE + index, lse, mask=is_row)
    if CLEAR_TAIL:
        _clear_tail(
            OUT,
            tail * (KV_HEADS * GROUP * HEAD_DIM_V),
            num_tokens,
            KV_HEADS * GROUP * HEAD_DIM_V,
            0.0,
        )
        if WRITE_LSE:
            _clear_tail(LSE, tail * (KV_HEADS * GROUP), num_tokens, KV_HEADS * GROUP, -float("inf"))


@triton.jit
def find_tile(
    Q_OFFSETS,
    n,
    number,
    bisections,
    GROUP: tl.constexpr,
    DECODE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Return the row of a tile of queries, the row's first query and length, and the tile's first query.

    Tiles are numbered so that row i begins with tile ``Q_OFFSETS[i] // QUERIES + i``. Some numbers
    have no tile: the length is 0 then, as for rows that `decode_kernel` computes.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    low = n * 0
    high = n
    for _ in range(bisections):
        middle = (low + high) // 2
        is_at_most = tl.load(Q_OFFSETS + middle) // QUERIES + middle <= number
        low = tl.where(is_at_most, middle, low)
        high = tl.where(is_at_most, high, middle)
    row = low
    q_start = tl.load(Q_OFFSETS + row).to(tl.int64)
    q_length = tl.load(Q_OFFSETS + row + 1).to(tl.int32) - q_start.to(tl.int32)
    query = (number - (q_start // QUERIES).to(tl.int32) - row) * QUERIES
    has_tile = (query < q_length) & (q_length * GROUP > DECODE_ROWS)
    return row, q_start, tl.where(has_tile, q_length, 0), query


@triton.jit
def attended_keys(
    kv_length,
    aligned,
    queries,
    window_left,
    window_right,
    BLOCK_N: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Return the keys [begin, end) of a tile of queries, and [full_begin, full_end) without a mask.

    `aligned` is the key that is aligned with the first query. All but `end` are multiples of BLOCK_N.
    """
    begin = aligned * 0
    full_begin = begin
    full_end = kv_length
    end = kv_length
    if HAS_LEFT:
        begin = tl.maximum(aligned - window_left, 0) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(aligned + queries - 1 - window_left, 0), BLOCK_N) * BLOCK_N
    if HAS_RIGHT:
        end = tl.minimum(kv_length, tl.maximum(aligned + queries + window_right, 0))
        full_end = tl.minimum(kv_length, tl.maximum(aligned + window_right + 1, 0))
    full_end = tl.maximum(full_end // BLOCK_N * BLOCK_N, begin)
    return begin, tl.minimum(full_begin, full_end), full_end, end


@triton.jit
def part_size(begin, end, parts, BLOCK_N: tl.constexpr, MIN_PART: tl.constexpr):
    """Return the keys of each part of a tile; the last parts may have fewer, or none."""
    size = tl.cdiv(tl.maximum(end - begin, 0), parts)
    return tl.cdiv(tl.maximum(size, MIN_PART), BLOCK_N) * BLOCK_N


@triton.jit(do_not_specialize=UNSPECIALIZED)
def prefill_kernel(
    Q,
    K,
    V,
    PAGES,
    PAGE_OFFSETS,
    KV_LENGTHS,
    Q_OFFSETS,
    SLOPES,
    K_SCALE,
    V_SCALE,
    OUT,
    LSE,
    PARTIAL,
    stride_qt,
    stride_qh,
    stride_kp,
    stride_kt,
    stride_kh,
    stride_vp,
    stride_vt,
    stride_vh,
    n,
    bisections,
    window_left,
    window_right,
    scale,
    softcap,
    value_scale,
    table_width,
    capacity,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DECODE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    SCALED: tl.constexpr,
    IS_NARROW: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    PARTS: tl.constexpr,
    MIN_PART: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the rows of OUT and LSE that `decode_kernel` does not, one tile of queries per CTA.

    With PARTS > 1 up to that many CTAs share the keys of a tile, each at least MIN_PART keys. Then
    PARTIAL (tiles, KV_HEADS, PARTS, BLOCK_M, HEAD_DIM_V + 4) gets their results, as in
    `decode_kernel`.
    """
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    part = tl.program_id(0) % PARTS
    head = tl.program_id(0) // PARTS % KV_HEADS
    number = tl.program_id(0) // (PARTS * KV_HEADS)
    row, q_start, q_length, query = find_tile(
        Q_OFFSETS, n, number, bisections, GROUP, DECODE_ROWS, BLOCK_M
    )
    if q_length == 0:
        return
    kv_length = clamped_kv_length(
        KV_LENGTHS, PAGE_OFFSETS, row, row < n, capacity, PAGE_SIZE, IS_RAGGED
    )
    offs_m = tl.arange(0, BLOCK_M)
    slope = (
        tl.load(SLOPES + head * GROUP + offs_m % GROUP) * LOG2E if ALIBI else offs_m.to(tl.float32)
    )
    if SCALED:
        scale = scale * tl.load(K_SCALE + head).to(tl.float32)
        value_scale = value_scale * tl.load(V_SCALE + head).to(tl.float32)
    queries = tl.minimum(q_length - query, QUERIES)
    q_start += query
    q = _load_queries(
        Q + q_start * stride_qt, queries * GROUP, head, stride_qt, stride_qh, 1, GROUP, BLOCK_M,
        HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    if IS_NARROW:
        q, power = _as_float16(q)
        scale = scale * power
    aligned = kv_length - q_length + query  # the key that is aligned with the first query
    begin, full_begin, full_end, end = attended_keys(
        kv_length, aligned, queries, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    is_cut = False
    if PARTS > 1:
        size = part_size(begin, end, PARTS, BLOCK_N, MIN_PART)
        is_cut = end - begin > size
        begin += part * size
        if (begin >= end) & (part > 0):
            return
        end = tl.minimum(end, begin + size)
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
        full_end = tl.minimum(tl.maximum(full_end, begin), end)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_M], INITIAL_MAX, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    pages = PAGES + table_start(PAGE_OFFSETS, row, table_width, IS_RAGGED)
    position = aligned + offs_m // GROUP
    K += head.to(tl.int64) * stride_kh
    V += head.to(tl.int64) * stride_vh
    for masked in tl.static_range(3):
        if masked == 0:
            low = begin
            high = full_begin
        elif masked == 1:
            low = full_begin
            high = full_end
        else:
            low = full_end
            high = end
        if masked != 0 or HAS_LEFT:
            acc, row_max, row_sum = _attend(
                acc,
                row_max,
                row_sum,
                q,
                K,
                V,
                pages,
                _load_pages(pages, low, high, 1, BLOCK_N, PAGE_SIZE),
                low,
                high,
                position,
                slope,
                stride_kp,
                stride_kt,
                stride_kh,
                stride_vp,
                stride_vt,
                stride_vh,
                window_left,
                window_right,
                scale,
                softcap,
                1,
                BLOCK_M,
                HEAD_DIM,
                HEAD_DIM_V,
                BLOCK_D,
                BLOCK_DV,
                BLOCK_N,
                PAGE_SIZE,
                HAS_LEFT,
                HAS_RIGHT,
                masked == 1,
                SOFTCAP,
                ALIBI,
                False,
                False,
                SAME_STRIDES,
                PRECISION,
            )
    if is_cut:
        index = ((number.to(tl.int64) * KV_HEADS + head) * PARTS + part) * BLOCK_M + offs_m
        _store_partial(
            PARTIAL + index * (HEAD_DIM_V + 4),
            acc,
            row_max,
            row_sum,
            value_scale,
            offs_m < queries * GROUP,
            HEAD_DIM_V,
            BLOCK_DV,
        )
    else:
        _store_results(
            OUT + q_start * (KV_HEADS * GROUP * HEAD_DIM_V),
            LSE + q_start * (KV_HEADS * GROUP),
            acc,
            row_max,
            row_sum,
            value_scale,
            queries * GROUP,
            head,
            KV_HEADS,
            1,
            GROUP,
            BLOCK_M,
            HEAD_DIM_V,
            BLOCK_DV,
            WRITE_LSE,
        )


@triton.jit(do_not_specialize=UNSPECIALIZED)
def combine_prefill_kernel(
    PAGE_OFFSETS,
    KV_LENGTHS,
    Q_OFFSETS,
    OUT,
    LSE,
    PARTIAL,
    n,
    bisections,
    parts,
    window_left,
    window_right,
    capacity,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DECODE_ROWS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    WRITE_LSE: tl.constexpr,
    MIN_PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """Combine the parts of the tiles that `prefill_kernel` cut, TILE rows of a tile per CTA."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    TILES: tl.constexpr = BLOCK_M // TILE
    offs_m = tl.program_id(0) % TILES * TILE + tl.arange(0, TILE)
    head = tl.program_id(0) // TILES % KV_HEADS
    number = tl.program_id(0) // (TILES * KV_HEADS)
    row, q_start, q_length, query = find_tile(
        Q_OFFSETS, n, number, bisections, GROUP, DECODE_ROWS, BLOCK_M
    )
    if q_length == 0:
        return
    kv_length = clamped_kv_length(
        KV_LENGTHS, PAGE_OFFSETS, row, row < n, capacity, PAGE_SIZE, IS_RAGGED
    )
    queries = tl.minimum(q_length - query, QUERIES)
    begin, _, _, end = attended_keys(
        kv_length, kv_length - q_length + query, queries, window_left, window_right, BLOCK_N,
        HAS_LEFT, HAS_RIGHT,
    )  # fmt: skip
    size = part_size(begin, end, parts, BLOCK_N, MIN_PART)
    if end - begin <= size:
        return
    offs_d = tl.arange(0, BLOCK_DV)
    is_row = offs_m < queries * GROUP
    mask = is_row[:, None] & (offs_d < HEAD_DIM_V)[None, :]
    acc = tl.zeros([TILE, BLOCK_DV], tl.float32)
    top = tl.full([TILE], INITIAL_MAX, tl.float32)
    weight = tl.zeros([TILE], tl.float32)
    for part in range(tl.cdiv(end - begin, size)):
        index = ((number.to(tl.int64) * KV_HEADS + head) * parts + part) * BLOCK_M + offs_m
        partial = PARTIAL + index * (HEAD_DIM_V + 4)
        lse = tl.load(partial + HEAD_DIM_V, mask=is_row, other=-float("inf"))
        result = tl.load(partial[:, None] + offs_d[None, :], mask=mask, other=0.0)
        new_top = tl.maximum(top, lse)
        factor = tl.exp2(lse - new_top)
        alpha = tl.exp2(top - new_top)
        acc = acc * alpha[:, None] + result * factor[:, None]
        weight = weight * alpha + factor
        top = new_top
    index = (q_start + query + offs_m // GROUP) * (KV_HEADS * GROUP) + head * GROUP
    index += offs_m % GROUP
    divisor = tl.where(weight > 0, weight, 1.0)
    out = acc / divisor[:, None]
    pointers = OUT + index[:, None] * HEAD_DIM_V + offs_d[None, :]
    tl.store(pointers, out.to(OUT.dtype.element_ty), mask=mask)
    if WRITE_LSE:
        lse = tl.where(weight > 0, (top + tl.log2(divisor)) * LN2, -float("inf"))
        tl.store(LSE + index, lse, mask=is_row)
