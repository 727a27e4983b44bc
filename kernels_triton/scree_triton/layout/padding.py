"""Rows of tokens to a padded batch, and the inverse."""

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from .strided_copy import (
    MAX_CONFIGS,
    LaunchConfig,
    StridedCopy,
    TensorSpec,
    copy_tile,
    fill_words,
    find_rows,
    program_tile,
    resized_shape,
    store_tile,
    tensor_spec,
    with_regular_strides,
)

_MIN_LENGTH = 8  # of a padded row, so that the adjacent tokens of a thread have at most two rows


@triton.jit(
    do_not_specialize=(
        "slots",
        "length",
        "low",
        "high",
        "x_token",
        "x_piece",
        "row_units",
        "y_token",
        "y_piece",
    )
)
def pad_kernel(
    PADDED,
    MASK,
    X,
    OFFSETS,
    slots,
    length,
    low,
    high,
    x_token,
    x_piece,
    row_units,
    y_token,
    y_piece,
    LEFT: tl.constexpr,
    WRITE_MASK: tl.constexpr,
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
    """Copy to every slot of a padded batch its token, or the fill value."""
    _, first, slot, piece, column = program_tile(PIECES, WIDTH, BC, TOKENS, PER_THREAD, INT64, PDL)
    exists = slot < slots
    side = (
        (slot - first)
        if PER_THREAD == 1
        else (tl.arange(0, TOKENS // PER_THREAD) * PER_THREAD)[:, None]
    )
    # Slots after the row of the first slot.
    over = side.to(tl.int32) - (length - first % length).to(tl.int32)
    most = tl.minimum(length, TOKENS).to(tl.int32)
    each = 1.0 / most.to(tl.float32)
    # Exact, because both are small.
    rows = tl.where(over < 0, -1, ((over.to(tl.float32) + 0.5) * each).to(tl.int32))
    place = (over - rows * most).to(slot.dtype) + tl.where(over < 0, length - most, 0)
    row = first // length + 1 + rows
    last_tokens = slots // length
    begin = tl.load(OFFSETS + row, mask=row < last_tokens, other=0).to(slot.dtype)
    end = tl.load(OFFSETS + row + 1, mask=row < last_tokens, other=0).to(slot.dtype)
    if PER_THREAD > 1:  # a row has at least PER_THREAD slots: at most two rows per thread
        after = tl.load(OFFSETS + row + 2, mask=row + 1 < last_tokens, other=0).to(slot.dtype)
        place = place + tl.arange(0, PER_THREAD)[None, :]
        later = place >= length
        place = tl.where(later, place - length, place)
        begin, end = tl.where(later, end, begin), tl.where(later, after, end)
    token = end - length + place if LEFT else begin + place
    valid = (token >= begin) & (token < end)
    ends = first + TOKENS > slots
    if WRITE_MASK:
        if PER_THREAD > 1:
            store_tile(MASK + slot, valid, exists, ends, PER_THREAD)
        else:
            tl.store(
                MASK + (row.to(tl.int64) * length + place),
                valid,
                mask=exists & (piece == 0) & (column == 0),
            )
    target = slot if PER_THREAD > 1 else row * row_units + place * y_token + piece * y_piece
    copy_tile(
        X,
        PADDED,
        token * x_token + piece * x_piece,
        target,
        valid,
        exists,
        ends,
        low,
        high,
        column,
        WIDTH,
        BC,
        PER_THREAD,
        UNIT,
        ALIGN,
    )


@triton.jit(
    do_not_specialize=(
        "n",
        "total",
        "length",
        "x_token",
        "x_piece",
        "row_units",
        "y_token",
        "y_piece",
    )
)
def unpad_kernel(
    X,
    PADDED,
    OFFSETS,
    n,
    total,
    length,
    x_token,
    x_piece,
    row_units,
    y_token,
    y_piece,
    LEFT: tl.constexpr,
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
    """Copy every token from its slot in a padded batch; strides as in `pad_kernel`."""
    _, first, token, piece, column = program_tile(PIECES, WIDTH, BC, TOKENS, PER_THREAD, INT64, PDL)
    row, begin, _ = find_rows(OFFSETS, OFFSETS, token, first, n, TOKENS, PER_THREAD)
    place = token - begin
    if LEFT:
        place += length - (
            tl.load(OFFSETS + row + 1, mask=row < n, other=0).to(token.dtype) - begin
        )
    valid = (row < n) & (place < length)
    if LEFT:
        valid &= place >= 0
    target = token if PER_THREAD > 1 else token * x_token + piece * x_piece
    copy_tile(
        PADDED,
        X,
        row.to(token.dtype) * row_units + place * y_token + piece * y_piece,
        target,
        valid,
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


@lru_cache(MAX_CONFIGS)
def pad_config(
    x: tuple[Any, ...],
    offsets: torch.dtype,
    n: int,
    dim: int,
    length: int,
    left: bool,
    fill: float,
    sign: float,
    marks: bool,
) -> LaunchConfig:
    x = TensorSpec(*x)
    padded = x.with_shape((n, *resized_shape(x.shape, dim, length)))
    outputs = [(padded.shape, x.dtype), ((n, length) if marks else (0,), torch.bool)]
    if not math.prod(padded.shape):
        return LaunchConfig(x.device, outputs, zeros=True)
    copier = StridedCopy(
        pad_kernel,
        n * length,
        length >= _MIN_LENGTH,
        [(x, dim, 0), (padded, dim + 1, 1)],
        (offsets,),
        left,
        marks,
    )
    return copier.config(
        outputs, copier.blocks(n * length), n * length, length, *fill_words(fill, sign, x.dtype)
    )


def pad(
    x: torch.Tensor,
    offsets: torch.Tensor,
    dim: int,
    length: int,
    left: bool,
    fill: torch.types.Number,
    marks: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a padded batch (n, ..., length, ...) of rows x, (..., total, ...).

    With `marks`, also return the mask of its tokens.
    """
    x = with_regular_strides(x, dim)
    config = pad_config(
        tensor_spec(x),
        offsets.dtype,
        offsets.shape[0] - 1,
        dim,
        length,
        left,
        fill,
        math.copysign(1.0, fill),
        marks,
    )
    out, mask = config.run(x, offsets)
    return out, mask


@lru_cache(MAX_CONFIGS)
def unpad_config(
    padded: tuple[Any, ...], offsets: torch.dtype, dim: int, total: int, left: bool
) -> LaunchConfig:
    padded = TensorSpec(*padded)
    x = padded.with_shape(resized_shape(padded.shape[1:], dim, total))
    if not math.prod(x.shape):
        return LaunchConfig(x.device, [(x.shape, x.dtype)])
    copier = StridedCopy(
        unpad_kernel, total, True, [(x, dim, 0), (padded, dim + 1, 1)], (offsets,), left
    )
    return copier.config(
        [(x.shape, x.dtype)], copier.blocks(total), padded.shape[0], total, padded.shape[dim + 1]
    )


def unpad(x: torch.Tensor, offsets: torch.Tensor, dim: int, total: int, left: bool) -> torch.Tensor:
    """Return the rows (..., total, ...) of a padded batch x, (n, ..., length, ...)."""
    x = with_regular_strides(x, dim + 1, 1)
    return unpad_config(tensor_spec(x), offsets.dtype, dim, total, left).run(x, offsets)[0]
