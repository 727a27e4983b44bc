"""Rows of tokens to a padded batch, and back."""

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from .strided_copy import (
    MOST_PLANS,
    Copier,
    Plan,
    Seen,
    copy,
    eight,
    laid,
    part,
    resized,
    rows_of,
    seen,
    store,
)

_LEAST_LENGTH = 8  # of a padded row, so that tokens side by side are of two rows at most


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
    MARKS: tl.constexpr,
    PIECES: tl.constexpr,
    WIDTH: tl.constexpr,
    BC: tl.constexpr,
    TOKENS: tl.constexpr,
    SIDE: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    LONG: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """Every slot of a padded batch from the token that stands there."""
    _, first, slot, piece, column = part(PIECES, WIDTH, BC, TOKENS, SIDE, LONG, FOLLOWS)
    exists = slot < slots
    side = (slot - first) if SIDE == 1 else (tl.arange(0, TOKENS // SIDE) * SIDE)[:, None]
    over = side.to(tl.int32) - (length - first % length).to(
        tl.int32
    )  # slots behind the row of the first one
    most = tl.minimum(length, TOKENS).to(tl.int32)
    each = 1.0 / most.to(tl.float32)
    rows = tl.where(
        over < 0, -1, ((over.to(tl.float32) + 0.5) * each).to(tl.int32)
    )  # exact: both are small
    place = (over - rows * most).to(slot.dtype) + tl.where(over < 0, length - most, 0)
    row = first // length + 1 + rows
    last = slots // length
    begin = tl.load(OFFSETS + row, mask=row < last, other=0).to(slot.dtype)
    end = tl.load(OFFSETS + row + 1, mask=row < last, other=0).to(slot.dtype)
    if SIDE > 1:  # rows have SIDE slots at least, so that neighbors are of two rows at most
        after = tl.load(OFFSETS + row + 2, mask=row + 1 < last, other=0).to(slot.dtype)
        place = place + tl.arange(0, SIDE)[None, :]
        later = place >= length
        place = tl.where(later, place - length, place)
        begin, end = tl.where(later, end, begin), tl.where(later, after, end)
    token = end - length + place if LEFT else begin + place
    real = (token >= begin) & (token < end)
    ends = first + TOKENS > slots
    if MARKS:
        if SIDE > 1:
            store(MASK + slot, real, exists, ends, SIDE)
        else:
            tl.store(
                MASK + (row.to(tl.int64) * length + place),
                real,
                mask=exists & (piece == 0) & (column == 0),
            )
    target = slot if SIDE > 1 else row * row_units + place * y_token + piece * y_piece
    copy(
        X,
        PADDED,
        token * x_token + piece * x_piece,
        target,
        real,
        exists,
        ends,
        low,
        high,
        column,
        WIDTH,
        BC,
        SIDE,
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
    SIDE: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    LONG: tl.constexpr,
    FOLLOWS: tl.constexpr,
):
    """Every token from its slot in a padded batch; strides as above."""
    _, first, token, piece, column = part(PIECES, WIDTH, BC, TOKENS, SIDE, LONG, FOLLOWS)
    row, begin, _ = rows_of(OFFSETS, OFFSETS, token, first, n, TOKENS, SIDE)
    place = token - begin
    if LEFT:
        place += length - (
            tl.load(OFFSETS + row + 1, mask=row < n, other=0).to(token.dtype) - begin
        )
    real = (row < n) & (place < length)
    if LEFT:
        real &= place >= 0
    target = token if SIDE > 1 else token * x_token + piece * x_piece
    copy(
        PADDED,
        X,
        row.to(token.dtype) * row_units + place * y_token + piece * y_piece,
        target,
        real,
        token < total,
        first + TOKENS > total,
        0,
        0,
        column,
        WIDTH,
        BC,
        SIDE,
        UNIT,
        ALIGN,
    )


@lru_cache(MOST_PLANS)
def _pad_plan(
    x: tuple[Any, ...],
    offsets: torch.dtype,
    n: int,
    dim: int,
    length: int,
    left: bool,
    fill: float,
    sign: float,
    marks: bool,
) -> Plan:
    x = Seen(*x)
    padded = x.made((n, *resized(x.shape, dim, length)))
    made = [(padded.shape, x.dtype), ((n, length) if marks else (0,), torch.bool)]
    if not math.prod(padded.shape):
        return Plan(x.device, made, zeros=True)
    copier = Copier(
        pad_kernel,
        n * length,
        length >= _LEAST_LENGTH,
        [(x, dim, 0), (padded, dim + 1, 1)],
        (offsets,),
        left,
        marks,
    )
    return copier.plan(
        made, copier.blocks(n * length), n * length, length, *eight(fill, sign, x.dtype)
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
    """A padded batch (n, ..., length, ...) of rows x, (..., total, ...), and with `marks` the mask of its tokens."""
    x = laid(x, dim)
    plan = _pad_plan(
        seen(x),
        offsets.dtype,
        offsets.shape[0] - 1,
        dim,
        length,
        left,
        fill,
        math.copysign(1.0, fill),
        marks,
    )
    out, mask = plan.run(x, offsets)
    return out, mask


@lru_cache(MOST_PLANS)
def _unpad_plan(
    padded: tuple[Any, ...], offsets: torch.dtype, dim: int, total: int, left: bool
) -> Plan:
    padded = Seen(*padded)
    x = padded.made(resized(padded.shape[1:], dim, total))
    if not math.prod(x.shape):
        return Plan(x.device, [(x.shape, x.dtype)])
    copier = Copier(
        unpad_kernel, total, True, [(x, dim, 0), (padded, dim + 1, 1)], (offsets,), left
    )
    return copier.plan(
        [(x.shape, x.dtype)], copier.blocks(total), padded.shape[0], total, padded.shape[dim + 1]
    )


def unpad(x: torch.Tensor, offsets: torch.Tensor, dim: int, total: int, left: bool) -> torch.Tensor:
    """The rows (..., total, ...) of a padded batch x, (n, ..., length, ...)."""
    x = laid(x, dim + 1, 1)
    return _unpad_plan(seen(x), offsets.dtype, dim, total, left).run(x, offsets)[0]
