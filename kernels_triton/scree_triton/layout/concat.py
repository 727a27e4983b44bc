"""Concatenation of the rows of up to four arrays, and the inverse split."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..runtime.launch import Number, Pointer, bind_args, launch_args
from .strided_copy import (
    MAX_CONFIGS,
    LaunchConfig,
    StridedCopy,
    TensorSpec,
    copy_tile,
    find_rows,
    program_tile,
    resized_shape,
    tensor_spec,
    with_regular_strides,
)

MAX_ARRAYS = 4


@triton.jit(
    do_not_specialize=(
        "n",
        "block1",
        "block2",
        "block3",
        "total0",
        "total1",
        "total2",
        "total3",
        "y_token",
        "y_piece",
        "token0",
        "piece0",
        "token1",
        "piece1",
        "token2",
        "piece2",
        "token3",
        "piece3",
    )
)
def concat_kernel(
    P0,
    P1,
    P2,
    P3,
    P4,
    O0,
    O1,
    O2,
    O3,
    n,
    block1,
    block2,
    block3,
    total0,
    total1,
    total2,
    total3,
    y_token,
    y_piece,
    token0,
    piece0,
    token1,
    piece1,
    token2,
    piece2,
    token3,
    piece3,
    COUNT: tl.constexpr,
    INVERSE: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    BC: tl.constexpr,
    TOKENS: tl.constexpr,
    PER_THREAD: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    INT64: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy every token of up to four arrays X with offsets O to its index in the concatenated rows.

    INVERSE copies in the other direction. The blocks of array i begin at `block<i>`. The tail of
    each array counts as one more row.
    """
    # Outputs come before inputs in the order of the parameters.
    if INVERSE:
        X0, X1, X2, X3, OUT = P0, P1, P2, P3, P4
    else:
        OUT, X0, X1, X2, X3 = P0, P1, P2, P3, P4
    block, first, token, piece, column = program_tile(
        PIECES, WIDTH, BC, TOKENS, PER_THREAD, INT64, PDL
    )
    X, OFFSETS, before, total, x_token, x_piece = X0, O0, block1 * 0, total0, token0, piece0
    j = block * 0
    if COUNT > 1:
        j += (block >= block1).to(tl.int32)
        if block >= block1:
            X, OFFSETS, before, total, x_token, x_piece = X1, O1, block1, total1, token1, piece1
    if COUNT > 2:
        j += (block >= block2).to(tl.int32)
        if block >= block2:
            X, OFFSETS, before, total, x_token, x_piece = X2, O2, block2, total2, token2, piece2
    if COUNT > 3:
        j += (block >= block3).to(tl.int32)
        if block >= block3:
            X, OFFSETS, before, total, x_token, x_piece = X3, O3, block3, total3, token3, piece3
    token -= before.to(token.dtype) * TOKENS
    first -= before.to(token.dtype) * TOKENS
    row, _, _ = find_rows(OFFSETS, OFFSETS, token, first, n, TOKENS, PER_THREAD)
    # The tokens before this token in the result: in earlier arrays all tokens up to the end of this
    # row, in later arrays all tokens before this row.
    place = token
    for i in tl.static_range(COUNT):
        OTHER = O0 if i == 0 else O1 if i == 1 else O2 if i == 2 else O3
        end = total0 if i == 0 else total1 if i == 1 else total2 if i == 2 else total3
        at = row + (j > i).to(tl.int32)
        others = tl.load(OTHER + at, mask=at <= n, other=end).to(token.dtype)
        place += tl.where(j == i, 0, others)
    here = token if PER_THREAD > 1 else token * x_token + piece * x_piece
    there = place * y_token + piece * y_piece
    if INVERSE:
        copy_tile(
            OUT,
            X,
            there,
            here,
            row < n,
            token < total,
            first + TOKENS > total,
            0,
            0,
            column,
            WIDTH,
            BC,
            PER_THREAD,
            UNIT,
            ALIGN,
        )
    else:
        copy_tile(
            X,
            OUT,
            here,
            there,
            row < n,
            token < total,
            True,
            0,
            0,
            column,
            WIDTH,
            BC,
            PER_THREAD,
            UNIT,
            ALIGN,
        )


@launch_args
class ConcatArgs:
    """Arguments of `concat_kernel`."""

    P0: Pointer
    P1: Pointer
    P2: Pointer
    P3: Pointer
    P4: Pointer
    O0: Pointer
    O1: Pointer
    O2: Pointer
    O3: Pointer
    n: Number
    block1: Number
    block2: Number
    block3: Number
    total0: Number
    total1: Number
    total2: Number
    total3: Number
    y_token: Number
    y_piece: Number
    token0: Number
    piece0: Number
    token1: Number
    piece1: Number
    token2: Number
    piece2: Number
    token3: Number
    piece3: Number


@lru_cache(MAX_CONFIGS)
def concat_config(
    specs: tuple[tuple[Any, ...], ...],
    offsets: tuple[torch.dtype, ...],
    n: int,
    totals: tuple[int, ...],
    dim: int,
    back: bool,
) -> LaunchConfig:
    """Return the launch config of `concat` for these token counts; with `back`, of `split`."""
    first, *_ = specs = [TensorSpec(*spec) for spec in specs]
    outputs = [
        first.with_shape(resized_shape(first.shape, dim, total))
        for total in (totals if back else [sum(totals)])
    ]
    whole, *parts = (*specs, *outputs) if back else (*outputs, *specs)
    output_specs = [(spec.shape, spec.dtype) for spec in outputs]
    if not math.prod(whole.shape):
        return LaunchConfig(whole.device, output_specs)
    unused = MAX_ARRAYS - len(totals)
    copier = StridedCopy(
        concat_kernel,
        ConcatArgs,
        sum(totals),
        back,
        [(spec, dim, 0) for spec in (whole, *parts)],
        offsets,
        len(totals),
        back,
    )
    ends = [0]
    for total in totals:
        ends.append(ends[-1] + copier.blocks(total))
    block1, block2, block3 = *ends[1:-1], *ends[-1:] * unused
    total0, total1, total2, total3 = *totals, *[0] * unused
    (y_token, y_piece), *part_strides = *copier.unit_strides, *[(0, 0)] * unused
    (token0, piece0), (token1, piece1), (token2, piece2), (token3, piece3) = part_strides
    args = bind_args(
        ConcatArgs,
        n=n,
        block1=block1,
        block2=block2,
        block3=block3,
        total0=total0,
        total1=total1,
        total2=total2,
        total3=total3,
        y_token=y_token,
        y_piece=y_piece,
        token0=token0,
        piece0=piece0,
        token1=token1,
        piece1=piece1,
        token2=token2,
        piece2=piece2,
        token3=token3,
        piece3=piece3,
    )

    def make_args(outputs, *inputs):
        P0, P1, P2, P3, P4, O0, O1, O2, O3 = *outputs, *inputs
        return args(P0=P0, P1=P1, P2=P2, P3=P3, P4=P4, O0=O0, O1=O1, O2=O2, O3=O3)

    return copier.config(output_specs, ends[-1], make_args)


def concat(xs: Sequence[torch.Tensor], offsets: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Concatenate row i of each of up to four arrays."""
    xs = [with_regular_strides(x, dim) for x in xs]
    config = concat_config(
        tuple(tensor_spec(x) for x in xs),
        tuple(x.dtype for x in offsets),
        offsets[0].shape[0] - 1,
        tuple(x.shape[dim] for x in xs),
        dim,
        False,
    )
    unused = MAX_ARRAYS - len(xs)
    return config.run(*xs, *xs[:1] * unused, *offsets, *offsets[:1] * unused)[0]


def split(
    dy: torch.Tensor, offsets: Sequence[torch.Tensor], totals: Sequence[int], dim: int
) -> list[torch.Tensor]:
    """Return the arrays whose rows were concatenated."""
    dy = with_regular_strides(dy, dim)
    config = concat_config(
        (tensor_spec(dy),),
        tuple(x.dtype for x in offsets),
        offsets[0].shape[0] - 1,
        tuple(totals),
        dim,
        True,
    )
    unused = MAX_ARRAYS - len(totals)
    return config.run(*[dy] * unused, dy, *offsets, *offsets[:1] * unused)
