"""Sum of the gradients of keys and values over the splits of their query heads."""

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
