"""Sums of gradients over the splits of query heads, and over the chunks of tiles."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait


@triton.jit
def _sum_splits(
    SPLITS, OUT, block, rows, NUM_SPLITS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum BLOCK elements of SPLITS (rows, NUM_SPLITS, D) over the splits, always in this order."""
    element = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = element < rows.to(tl.int64) * D
    first = SPLITS + element // D * (NUM_SPLITS * D) + element % D
    total = tl.load(first, mask=mask)
    for i in tl.static_range(1, NUM_SPLITS):
        total += tl.load(first + i * D, mask=mask)
    tl.store(OUT + element, total.to(OUT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("rows",))
def attention_sum_splits_kernel(
    DK_SPLITS,
    DV_SPLITS,
    DK,
    DV,
    rows,
    NUM_SPLITS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sum DK_SPLITS and DV_SPLITS (rows, NUM_SPLITS, head_dim); a row is one key head of a token.

    The first CTAs compute DK, the others DV. DEPENDENT: the kernel is a dependent launch.
    """
    if DEPENDENT:
        gdc_wait()
    block = tl.program_id(0)
    dk_blocks = tl.cdiv(rows.to(tl.int64) * HEAD_DIM, BLOCK).to(tl.int32)
    if block < dk_blocks:
        _sum_splits(DK_SPLITS, DK, block, rows, NUM_SPLITS, HEAD_DIM, BLOCK)
    else:
        _sum_splits(DV_SPLITS, DV, block - dk_blocks, rows, NUM_SPLITS, HEAD_DIM_V, BLOCK)


@triton.jit
def _sum_chunks(
    SUMS, OUT, first, count, distance, rows, stride, block, D: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum BLOCK elements of `count` sums (rows, D), always in this order.

    The sums of two chunks are `distance` numbers apart, and two rows of OUT are `stride` apart.
    """
    element = block * BLOCK + tl.arange(0, BLOCK)
    mask = element < rows * D
    first = SUMS + first + element
    total = tl.load(first, mask=mask)
    for i in tl.range(1, count, loop_unroll_factor=4):
        total += tl.load(first + i * distance, mask=mask)
    out = OUT + (element // D).to(tl.int64) * stride + element % D
    tl.store(out, total.to(OUT.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=("first_entry", "heads"))
def attention_sum_chunks_kernel(
    ITEMS,
    A_SUMS,
    B_SUMS,
    A,
    B,
    first_entry,
    heads,
    TILE_SIZE: tl.constexpr,
    DIM_A: tl.constexpr,
    DIM_B: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Sum the chunks of cut tiles, see `tile_chunks`.

    A_SUMS has the shape (chunks, heads, TILE_SIZE, DIM_A), and A has the shape (tokens, heads, DIM_A).
    The same holds for B, which is not used if DIM_B is 0. A CTA has BLOCK elements of a tile of one head.
    """
    A_BLOCKS: tl.constexpr = (TILE_SIZE * DIM_A + BLOCK - 1) // BLOCK
    B_BLOCKS: tl.constexpr = (TILE_SIZE * DIM_B + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    block = program % (A_BLOCKS + B_BLOCKS)
    program = program // (A_BLOCKS + B_BLOCKS)
    head, chunk = program % heads, program // heads
    if DEPENDENT:
        gdc_wait()
    entry = ITEMS + (first_entry + chunk) * 8
    count = 0
    if chunk < tl.load(ITEMS + 3):
        count = tl.load(entry)
    if count > 0:
        start = tl.load(entry + 3)
        rows = tl.minimum(tl.load(entry + 2) - start, TILE_SIZE)
        token = (tl.load(entry + 1) + start).to(tl.int64)
        sums = chunk.to(tl.int64) * heads + head
        if block < A_BLOCKS:
            _sum_chunks(
                *(A_SUMS, A + (token * heads + head) * DIM_A, sums * (TILE_SIZE * DIM_A), count),
                *(heads.to(tl.int64) * (TILE_SIZE * DIM_A), rows, heads * DIM_A, block),
                *(DIM_A, BLOCK),
            )
        else:
            _sum_chunks(
                *(B_SUMS, B + (token * heads + head) * DIM_B, sums * (TILE_SIZE * DIM_B), count),
                *(heads.to(tl.int64) * (TILE_SIZE * DIM_B), rows, heads * DIM_B, block - A_BLOCKS),
                *(max(DIM_B, 1), BLOCK),
            )
