"""Prefill from a paged cache on Hopper, float16 and bfloat16, head_dim 64 and 128.

`paged_kernels.prefill_kernel` has the same tiles, parts of their keys and partial results, and
`combine_prefill_kernel` adds the parts up. The consumer warp groups take the steps of `forward_sm90`.

One producer warp loads keys and another one loads values. For each page of a block of keys, a
producer reads the page number and starts one TMA copy per 64 columns. A tile in shared memory is 64
columns wide, which is one line of the 128-byte swizzle, and the swizzle repeats every 8 rows. So the
copies of pages of 8 or more tokens, one after another, form the same block as one copy of all its
rows. TMA ends at the last token of a row, as in all kernels with ragged descriptors: later tokens of a
page are not read.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from ..sm90.pipeline import (
    allocate_barriers,
    allocate_ring,
    as_wide_matrix,
    columns_layout,
    operand_parts,
    ping_pong_arrive,
    ping_pong_wait,
    ragged_coordinates,
    scale_rows,
    start_mma,
    start_mma_transposed,
    tma_load,
    wait_mma,
    zero_accumulators,
)
from .constants import INITIAL_MAX, LN2
from .forward_sm90 import forward_step
from .paged_kernels import (
    UNSPECIALIZED,
    attended_keys,
    clamped_kv_length,
    find_tile,
    part_size,
    table_start,
)
from .scores_sm90 import apply_softcap, get_key_limits, mask_scores, partial_row_sums


@gluon.constexpr_function
def _block_layout(rows, columns, dtype):
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], dtype)


@gluon.jit
def _as_blocks(ring, STAGES: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr):
    """Return a ring of pieces of pages as a ring of blocks of keys or values."""
    return ring._reinterpret(
        ring.dtype, [STAGES, 1, 1, BLOCK_N, WIDTH], _block_layout(BLOCK_N, WIDTH, ring.dtype)
    )


@gluon.jit
def _page_numbers(PAGES, start, end, COUNT: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """Return the pages of a block of keys that begins at `start`; 0 for tokens out of [0, end)."""
    numbers = ()
    for i in gl.static_range(COUNT):
        token = start + i * PAGE_SIZE
        number = gl.load(PAGES + token // PAGE_SIZE, mask=(token >= 0) & (token < end), other=0)
        numbers += (number.to(gl.int32),)
    return numbers


@gluon.jit
def _page_producer(
    args,
    tile,
    LAG: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Load the blocks of keys or values of a tile, the last block first.

    Step i of the consumers takes the keys of one block and the values of the block before. So values
    come LAG = 1 step later. Each producer arrives once per step, also without a block.
    """
    desc, ring, full, empty, PAGES, page_stride, column = args
    _, _, _, begin_block, end_block, end, _ = tile
    BOX: gl.constexpr = ring.shape[3]
    COUNT: gl.constexpr = BLOCK_N // BOX
    COLUMNS: gl.constexpr = ring.shape[4]
    PANELS: gl.constexpr = WIDTH // COLUMNS
    BYTES: gl.constexpr = BLOCK_N * WIDTH * ring.dtype.primitive_bitwidth // 8
    blocks = end_block - begin_block
    if blocks > 0:
        if LAG:
            mbarrier.wait(empty.index(0), 1)
            mbarrier.arrive(full.index(0), count=1)
        numbers = _page_numbers(PAGES, (end_block - 1) * BLOCK_N, end, COUNT, PAGE_SIZE)
        for i in range(blocks):
            start = (end_block - 1 - i) * BLOCK_N
            # One block ahead, so that no copy waits for its page number.
            next_numbers = _page_numbers(PAGES, start - BLOCK_N, end, COUNT, PAGE_SIZE)
            step = i + LAG
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            for j in gl.static_range(COUNT):
                token = start + j * BOX
                row = token % PAGE_SIZE if PAGE_SIZE > BOX else 0
                length = gl.minimum(gl.maximum(end - (token - row), 0), PAGE_SIZE)
                for c in gl.static_range(PANELS):
                    box = ring.index((stage * PANELS + c) * COUNT + j)
                    coordinates = ragged_coordinates(
                        numbers[j] * page_stride, length, row, column, c, box
                    )
                    tma_load(desc, coordinates, full.index(stage), box)
            numbers = next_numbers
        if not LAG:
            mbarrier.wait(empty.index(blocks % STAGES), ((blocks // STAGES) & 1) ^ 1)
            mbarrier.arrive(full.index(blocks % STAGES), count=1)


@gluon.jit
def _consumer(
    wg: gl.constexpr,
    smem,
    arrays,
    tile,
    numbers,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    BLOCK_N: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr,
    WRITE_LSE: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Compute 64 rows of a tile: query ``row // GROUP``, head ``row % GROUP`` of the key head."""
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM_V, 16])
    LAYOUT_Q: gl.constexpr = columns_layout(HEAD_DIM)
    q_smem, k_ring, v_ring, kv_full, kv_empty = smem
    Q, OUT, LSE, PARTIAL = arrays
    head, num_rows, aligned, begin_block, end_block, end, is_cut = tile
    stride_qt, stride_qh, window_left, window_right, scale, softcap, value_scale = numbers
    if end_block > begin_block:
        k_smem = _as_blocks(k_ring, STAGES, BLOCK_N, HEAD_DIM)
        v_smem = _as_blocks(v_ring, STAGES, BLOCK_N, HEAD_DIM_V)
        row = wg * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT_Q))
        column = gl.arange(0, HEAD_DIM, gl.SliceLayout(0, LAYOUT_Q))
        offset = (row // GROUP).to(gl.int64) * stride_qt
        offset += (head * GROUP + row % GROUP).to(gl.int64) * stride_qh
        values = gl.load(
            Q + offset[:, None] + column[None, :], mask=(row < num_rows)[:, None], other=0.0
        )
        as_wide_matrix(q_smem, wg, HEAD_DIM).store(values)
        fence_async_shared()
        q = operand_parts(q_smem, wg, 1, HEAD_DIM)
        offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT_S))
        offs_m = wg * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT_S))
        diagonal = aligned + offs_m // GROUP
        last_key, full_blocks = get_key_limits(
            aligned + wg * 64 // GROUP,
            diagonal,
            end,
            window_right,
            end_block - 1,
            BLOCK_N,
            HAS_RIGHT,
            HAS_LEFT,
        )
        full_blocks = gl.maximum(full_blocks, begin_block)
        step = 0
        if wg == CONSUMERS - 1:  # the first warp group starts
            ping_pong_arrive(wg, step, CONSUMERS)
        mbarrier.wait(kv_full.index(0), 0)
        ping_pong_wait(wg, step, CONSUMERS)
        scores = start_mma_transposed(q, k_smem, 0, 1, LAYOUT_S)
        ping_pong_arrive(wg, step, CONSUMERS)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(kv_empty.index(0), count=1)
        scores, factor = apply_softcap(scores, scale, softcap, SOFTCAP)
        first = (end_block - 1) * BLOCK_N
        scores = mask_scores(
            scores, last_key - first, diagonal - first, window_left, offs_n, HAS_LEFT
        )
        row_max = gl.maximum(gl.max(scores, 1) * factor, INITIAL_MAX)
        p = gl.exp2(scores * factor - row_max[:, None])
        row_sum = partial_row_sums(p)
        acc = zero_accumulators(64, HEAD_DIM_V, 1, HEAD_DIM_V)
        step += 1
        if HAS_LEFT or HAS_RIGHT:
            # Blocks before `window_end` begin before the first key of some query.
            window_end = begin_block
            stop = full_blocks
            if HAS_LEFT:
                last = aligned + (wg * 64 + 63) // GROUP
                window_end = gl.cdiv(gl.maximum(last - window_left, 0), BLOCK_N)
                stop = begin_block
            for n_block in range(end_block - 2, stop - 1, -1):
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
                    0.0,
                    (n_block >= full_blocks) | (n_block < window_end) if HAS_LEFT else True,
                    HAS_LEFT,
                    SOFTCAP,
                    False,
                    1,
                    1,
                    STAGES,
                    LAYOUT_S,
                    LAYOUT_O,
                    CONSUMERS,
                )
                step += 1
        if not HAS_LEFT:
            for _ in range(gl.minimum(full_blocks, end_block - 1) - begin_block):
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
                    0.0,
                    False,
                    False,
                    SOFTCAP,
                    False,
                    1,
                    1,
                    STAGES,
                    LAYOUT_S,
                    LAYOUT_O,
                    CONSUMERS,
                )
                step += 1
        p_operand = gl.convert_layout(p.to(v_smem.dtype), gl.DotOperandLayout(0, LAYOUT_O, 2))
        mbarrier.wait(kv_full.index(step % STAGES), (step // STAGES) & 1)
        acc = start_mma(p_operand, v_smem, step % STAGES, acc, 1)
        total = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, LAYOUT_S))
        is_empty = total == 0.0  # not for a NaN, which the output must have too
        lse = gl.where(is_empty, -float("inf"), row_max + gl.log2(total))
        acc = wait_mma(0, acc, p_operand)
        result = scale_rows(acc[0], gl.where(is_empty, 0.0, value_scale / total))
        out_row = wg * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT_O))
        out_column = gl.arange(0, HEAD_DIM_V, gl.SliceLayout(0, LAYOUT_O))
        mask = (out_row < num_rows)[:, None]
        if is_cut:
            gl.store(
                PARTIAL + out_row[:, None] * (HEAD_DIM_V + 4) + out_column[None, :],
                result,
                mask=mask,
            )
            gl.store(PARTIAL + offs_m * (HEAD_DIM_V + 4) + HEAD_DIM_V, lse, mask=offs_m < num_rows)
        else:
            index = (out_row // GROUP).to(gl.int64) * (KV_HEADS * GROUP)
            index += head * GROUP + out_row % GROUP
            gl.store(
                OUT + index[:, None] * HEAD_DIM_V + out_column[None, :],
                result.to(OUT.dtype.element_ty),
                mask=mask,
            )
            if WRITE_LSE:
                index = (offs_m // GROUP).to(gl.int64) * (KV_HEADS * GROUP)
                index += head * GROUP + offs_m % GROUP
                gl.store(LSE + index, lse * LN2, mask=offs_m < num_rows)


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def paged_prefill_sm90_kernel(
    k_desc,
    v_desc,
    Q,
    PAGES,
    PAGE_OFFSETS,
    KV_LENGTHS,
    Q_OFFSETS,
    OUT,
    LSE,
    PARTIAL,
    stride_qt,
    stride_qh,
    stride_kh,
    stride_vh,
    k_page_stride,
    v_page_stride,
    n,
    bisections,
    parts,
    window_left,
    window_right,
    scale,
    softcap,
    value_scale,
    table_width,
    capacity,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    HEAD_DIM_V: gl.constexpr,
    DECODE_ROWS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    IS_RAGGED: gl.constexpr,
    HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
    SOFTCAP: gl.constexpr,
    WRITE_LSE: gl.constexpr,
    MIN_PART: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """Compute the results of `paged_kernels.prefill_kernel`.

    Up to `parts` CTAs share the keys of a tile. The strides of a page are in tokens: page p begins
    at token ``p * k_page_stride`` of the descriptor. `scale` and `softcap` are as in `scores_sm90`.
    """
    QUERIES: gl.constexpr = BLOCK_M // GROUP
    part = gl.program_id(0) % parts
    head = gl.program_id(0) // parts % KV_HEADS
    number = gl.program_id(0) // (parts * KV_HEADS)
    if HAS_RIGHT:  # the last queries of a row have the most keys
        number = gl.num_programs(0) // (parts * KV_HEADS) - 1 - number
    row, q_start, q_length, query = find_tile(
        Q_OFFSETS, n, number, bisections, GROUP, DECODE_ROWS, BLOCK_M
    )
    kv_length = clamped_kv_length(
        KV_LENGTHS, PAGE_OFFSETS, row, row < n, capacity, PAGE_SIZE, IS_RAGGED
    )
    queries = gl.minimum(q_length - query, QUERIES)
    aligned = kv_length - q_length + query  # the key that is aligned with the first query
    begin, _, _, end = attended_keys(
        kv_length, aligned, queries, window_left, window_right, BLOCK_N, HAS_LEFT, HAS_RIGHT
    )
    size = part_size(begin, end, parts, BLOCK_N, MIN_PART)
    is_cut = end - begin > size
    begin += part * size
    is_active = (q_length > 0) & ((begin < end) | (part == 0))
    end = gl.minimum(end, begin + size)
    begin_block = begin // BLOCK_N
    # A tile without keys has one block, so that its output is written.
    end_block = gl.maximum(gl.cdiv(end, BLOCK_N), begin_block + 1)
    end_block = gl.where(is_active, end_block, begin_block)
    q_start += query
    pages = PAGES + table_start(PAGE_OFFSETS, row, table_width, IS_RAGGED)
    index = ((number.to(gl.int64) * KV_HEADS + head) * parts + part) * BLOCK_M
    BOX: gl.constexpr = k_desc.block_shape[2]
    BOXES: gl.constexpr = STAGES * (BLOCK_N // BOX)
    q_smem = gl.allocate_shared_memory(
        k_desc.dtype, [CONSUMERS, 1, 1, 64, HEAD_DIM], _block_layout(64, HEAD_DIM, k_desc.dtype)
    )
    k_ring = allocate_ring(k_desc, BOXES * (HEAD_DIM // k_desc.block_shape[3]))
    v_ring = allocate_ring(v_desc, BOXES * (HEAD_DIM_V // v_desc.block_shape[3]))
    kv_full = allocate_barriers(STAGES, 2)
    kv_empty = allocate_barriers(STAGES, CONSUMERS)
    smem = q_smem, k_ring, v_ring, kv_full, kv_empty
    arrays = (
        Q + q_start * stride_qt,
        OUT + q_start * (KV_HEADS * GROUP * HEAD_DIM_V),
        LSE + q_start * (KV_HEADS * GROUP),
        PARTIAL + index * (HEAD_DIM_V + 4),
    )
    tile = head, queries * GROUP, aligned, begin_block, end_block, end, is_cut
    numbers = stride_qt, stride_qh, window_left, window_right, scale, softcap, value_scale
    k_args = k_desc, k_ring, kv_full, kv_empty, pages, k_page_stride, head * stride_kh
    v_args = v_desc, v_ring, kv_full, kv_empty, pages, v_page_stride, head * stride_vh
    gl.static_assert(CONSUMERS == 2, "the kernel starts two consumer warp groups")
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0,
                    smem,
                    arrays,
                    tile,
                    numbers,
                    KV_HEADS,
                    GROUP,
                    HEAD_DIM,
                    HEAD_DIM_V,
                    BLOCK_N,
                    HAS_LEFT,
                    HAS_RIGHT,
                    SOFTCAP,
                    WRITE_LSE,
                    STAGES,
                    CONSUMERS,
                ),
            ),
            (
                _consumer,
                (
                    1,
                    smem,
                    arrays,
                    tile,
                    numbers,
                    KV_HEADS,
                    GROUP,
                    HEAD_DIM,
                    HEAD_DIM_V,
                    BLOCK_N,
                    HAS_LEFT,
                    HAS_RIGHT,
                    SOFTCAP,
                    WRITE_LSE,
                    STAGES,
                    CONSUMERS,
                ),
            ),
            (_page_producer, (k_args, tile, 0, HEAD_DIM, BLOCK_N, PAGE_SIZE, STAGES)),
            (_page_producer, (v_args, tile, 1, HEAD_DIM_V, BLOCK_N, PAGE_SIZE, STAGES)),
        ],
        [4, 1, 1],
        [232, 40, 40],
    )
