"""Rows of tokens to a padded batch, and the inverse."""

import math
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
    fill_words,
    find_rows,
    program_tile,
    resized_shape,
    store_tile,
    tensor_spec,
    with_regular_strides,
)

# Minimum length of a padded row, so that the adjacent tokens of a thread have at most two rows.
_MIN_LENGTH = 8


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
    rows_ahead = tl.where(over < 0, -1, ((over.to(tl.float32) + 0.5) * each).to(tl.int32))
    place = (over - rows_ahead * most).to(slot.dtype) + tl.where(over < 0, length - most, 0)
    row = first // length + 1 + rows_ahead
    last_tokens = slots // length
    begin = tl.load(OFFSETS + row, mask=row < last_tokens, other=0).to(slot.dtype)
    end = tl.load(OFFSETS + row + 1, mask=row < last_tokens, other=0).to(slot.dtype)
    # A row has at least PER_THREAD slots, so a thread has tokens of at most two rows.
    if PER_THREAD > 1:
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


@launch_args
class PadArgs:
    """Arguments of `pad_kernel`."""

    PADDED: Pointer
    MASK: Pointer
    X: Pointer
    OFFSETS: Pointer
    slots: Number
    length: Number
    low: Number
    high: Number
    x_token: Number
    x_piece: Number
    row_units: Number
    y_token: Number
    y_piece: Number


@launch_args
class UnpadArgs:
    """Arguments of `unpad_kernel`."""

    X: Pointer
    PADDED: Pointer
    OFFSETS: Pointer
    n: Number
    total: Number
    length: Number
    x_token: Number
    x_piece: Number
    row_units: Number
    y_token: Number
    y_piece: Number


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
    with_mask: bool,
) -> LaunchConfig:
    x = TensorSpec(*x)
    padded = x.with_shape((n, *resized_shape(x.shape, dim, length)))
    outputs = [(padded.shape, x.dtype), ((n, length) if with_mask else (0,), torch.bool)]
    if not math.prod(padded.shape):
        return LaunchConfig(x.device, outputs, zeros=True)
    copier = StridedCopy(
        pad_kernel,
        PadArgs,
        n * length,
        length >= _MIN_LENGTH,
        [(x, dim, 0), (padded, dim + 1, 1)],
        (offsets,),
        left,
        with_mask,
    )
    low, high = fill_words(fill, sign, x.dtype)
    (x_token, x_piece), (row_units, y_token, y_piece) = copier.unit_strides
    args = bind_args(
        PadArgs,
        slots=n * length,
        length=length,
        low=low,
        high=high,
        x_token=x_token,
        x_piece=x_piece,
        row_units=row_units,
        y_token=y_token,
        y_piece=y_piece,
    )
    return copier.config(
        outputs,
        copier.blocks(n * length),
        lambda outputs, x, offsets: args(PADDED=outputs[0], MASK=outputs[1], X=x, OFFSETS=offsets),
    )


def pad(
    x: torch.Tensor,
    offsets: torch.Tensor,
    dim: int,
    length: int,
    left: bool,
    fill: torch.types.Number,
    with_mask: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a padded batch (n, ..., length, ...) of rows x, (..., total, ...).

    With `with_mask`, also return the mask of its tokens.
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
        with_mask,
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
        unpad_kernel, UnpadArgs, total, True, [(x, dim, 0), (padded, dim + 1, 1)], (offsets,), left
    )
    (x_token, x_piece), (row_units, y_token, y_piece) = copier.unit_strides
    args = bind_args(
        UnpadArgs,
        n=padded.shape[0],
        total=total,
        length=padded.shape[dim + 1],
        x_token=x_token,
        x_piece=x_piece,
        row_units=row_units,
        y_token=y_token,
        y_piece=y_piece,
    )
    return copier.config(
        [(x.shape, x.dtype)],
        copier.blocks(total),
        lambda outputs, padded, offsets: args(X=outputs[0], PADDED=padded, OFFSETS=offsets),
    )


def unpad(x: torch.Tensor, offsets: torch.Tensor, dim: int, total: int, left: bool) -> torch.Tensor:
    """Return the rows (..., total, ...) of a padded batch x, (n, ..., length, ...)."""
    x = with_regular_strides(x, dim + 1, 1)
    return unpad_config(tensor_spec(x), offsets.dtype, dim, total, left).run(x, offsets)[0]
