"""Tokens by their numbers, and back to their places; rows whose tokens stand at equal distances, and their gradient."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from .scatter_add import add
from .scatter_indices import last
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
)

_NUMBERS = (
    8  # bytes that are written and read for a place, where the token that goes there is looked up
)


@triton.jit(do_not_specialize=("count", "size", "x_token", "x_piece", "y_token", "y_piece"))
def take_kernel(
    OUT,
    X,
    INDEX,
    CHECK,
    count,
    size,
    x_token,
    x_piece,
    y_token,
    y_piece,
    CHECKED: tl.constexpr,
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
    """Token i of OUT from token INDEX[i] of X, if there is one; with CHECK, if CHECK[INDEX[i]] is i."""
    _, first, token, piece, column = part(PIECES, WIDTH, BC, TOKENS, SIDE, LONG, FOLLOWS)
    exists = token < count
    policy: tl.constexpr = (
        "evict_first" if SIDE == 1 else ""
    )  # a gain where tokens come from anywhere, else a loss
    source = tl.load(INDEX + token, mask=exists, other=-1, eviction_policy=policy)
    real = (source >= 0) & (source < size)
    if CHECKED:
        real &= tl.load(CHECK + source, mask=real, other=-1) == token
    source = source.to(token.dtype) * x_token + piece * x_piece
    target = token if SIDE > 1 else token * y_token + piece * y_piece
    copy(
        X,
        OUT,
        source,
        target,
        real,
        exists,
        first + TOKENS > count,
        0,
        0,
        column,
        WIDTH,
        BC,
        SIDE,
        UNIT,
        ALIGN,
    )


@triton.jit(do_not_specialize=("count", "size", "x_token", "x_piece", "y_token", "y_piece"))
def put_kernel(
    OUT,
    X,
    TO,
    count,
    size,
    y_token,
    y_piece,
    x_token,
    x_piece,
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
    """Token i of X to token TO[i] of OUT, if there is one."""
    _, _, token, piece, column = part(PIECES, WIDTH, BC, TOKENS, SIDE, LONG, FOLLOWS)
    place = tl.load(TO + token, mask=token < count, other=-1)
    real = (place >= 0) & (place < size)
    target = place.to(token.dtype) * y_token + piece * y_piece
    copy(
        X,
        OUT,
        token * x_token + piece * x_piece,
        target,
        real,
        real,
        True,
        0,
        0,
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
        "size",
        "step",
        "low",
        "high",
        "x_token",
        "x_piece",
        "y_token",
        "y_piece",
    )
)
def select_kernel(
    TO,
    FROM,
    OFFSETS,
    STARTS,
    n,
    total,
    size,
    step,
    low,
    high,
    x_token,
    x_piece,
    y_token,
    y_piece,
    BACK: tl.constexpr,
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
    """Rows of OUT, whose tokens stand at STARTS, STARTS + step ... in X; BACK puts them there.

    BACK is 2 where they fill X; then what stands behind the last row in both is set to 0.
    """
    _, first, token, piece, column = part(PIECES, WIDTH, BC, TOKENS, SIDE, LONG, FOLLOWS)
    row, begin, start = rows_of(OFFSETS, STARTS, token, first, n, TOKENS, SIDE)
    source = start + (token - begin) * step
    if BACK:
        source = tl.where(row < n, source, token)
    real = (row < n) & (source >= 0) & (source < size)
    there = source * x_token + piece * x_piece
    here = token if SIDE > 1 else token * y_token + piece * y_piece
    if BACK:
        exists = (real | (row == n)) if BACK == 2 else real
        copy(
            FROM,
            TO,
            here,
            there,
            real,
            exists & (token < total),
            True,
            low,
            high,
            column,
            WIDTH,
            BC,
            SIDE,
            UNIT,
            ALIGN,
        )
    else:
        copy(
            FROM,
            TO,
            there,
            here,
            real,
            token < total,
            first + TOKENS > total,
            low,
            high,
            column,
            WIDTH,
            BC,
            SIDE,
            UNIT,
            ALIGN,
        )


@lru_cache(MOST_PLANS)
def _take_plan(
    x: tuple[Any, ...], index: torch.dtype, check: torch.dtype | None, count: int, ordered: bool
) -> Plan:
    x = Seen(*x)
    out = x.made(resized(x.shape, 0, count))
    made = [(out.shape, out.dtype)]
    if not math.prod(out.shape):
        return Plan(x.device, made)
    copier = Copier(
        take_kernel, count, ordered, [(x, 0, 0), (out, 0, 0)], (index, check), check is not None
    )
    return copier.plan(made, copier.blocks(count), count, x.shape[0])


def _taken(
    x: torch.Tensor, index: torch.Tensor, check: torch.Tensor | None, ordered: bool
) -> torch.Tensor:
    """The tokens of x at `index`, which mostly ascends where it is `ordered`; 0 where there is none, or `check` leads elsewhere."""
    x = laid(x, 0)
    plan = _take_plan(
        seen(x), index.dtype, None if check is None else check.dtype, index.shape[0], ordered
    )
    return plan.run(x, index, index if check is None else check)[0]


def take(x: torch.Tensor, index: torch.Tensor, distinct: bool) -> torch.Tensor:
    """The tokens of x, (tokens, ...), at `index`; 0 where there is none.

    `distinct` says that none is taken twice, which is good to know for the gradient; they mostly come in order then.
    """
    return _taken(x, index, None, distinct)


@lru_cache(MOST_PLANS)
def _put_plan(x: tuple[Any, ...], index: torch.dtype, size: int) -> Plan:
    x = Seen(*x)
    out = x.made(resized(x.shape, 0, size))
    made = [(out.shape, out.dtype)]
    if not math.prod(x.shape) * size:
        return Plan(x.device, made, zeros=True)
    copier = Copier(put_kernel, x.shape[0], False, [(out, 0, 0), (x, 0, 0)], (index,))
    return copier.plan(made, copier.blocks(x.shape[0]), x.shape[0], size, zeros=True)


def put(x: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """(size, ...): the tokens of x at the places `index`, of which none comes twice; 0 elsewhere."""
    if x.numel() * x.itemsize > _NUMBERS * size:
        return _taken(x, last(index, size), None, True)
    x = laid(x, 0)
    return _put_plan(seen(x), index.dtype, size).run(x, index)[0]


def keep(x: torch.Tensor, index: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The tokens of x at the places `index`, where these meet those that are `kept`, one a place, or -1."""
    return _taken(x, kept, None, False)


def unkeep(dy: torch.Tensor, index: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The gradient of the x whose tokens were put at `index`; 0 for those that were not kept."""
    return _taken(dy, index, kept, False)


@lru_cache(MOST_PLANS)
def _select_plan(
    given: tuple[Any, ...],
    offsets: torch.dtype,
    starts: torch.dtype,
    n: int,
    dim: int,
    size: int,
    step: int,
    fill: int,
    back: bool,
) -> Plan:
    """What copies tokens to rows, or with `back` from them to so many tokens, as the kernel says."""
    given = Seen(*given)
    out = given.made(resized(given.shape, dim, size))
    made = [(out.shape, out.dtype)]
    whole = given.shape[dim] == size
    if not (math.prod(given.shape) and math.prod(out.shape)):
        return Plan(given.device, made, zeros=True)
    x, rows = (out, given) if back else (given, out)
    total = rows.shape[dim]
    copier = Copier(
        select_kernel,
        total,
        not back,
        [(x, dim, 0), (rows, dim, 0)],
        (offsets, starts),
        back and 1 + whole,
    )
    return copier.plan(
        made,
        copier.blocks(total),
        n,
        total,
        x.shape[dim],
        step,
        *eight(fill, 1.0, out.dtype),
        zeros=back and not whole,
    )


def select(
    x: torch.Tensor,
    offsets: torch.Tensor,
    starts: torch.Tensor,
    dim: int,
    total: int,
    step: int,
    distinct: bool,
    fill: int = 0,
) -> torch.Tensor:
    """Rows (..., total, ...), whose tokens stand at `starts`, `starts + step` ... in x."""
    x = laid(x, dim)
    plan = _select_plan(
        seen(x), offsets.dtype, starts.dtype, offsets.shape[0] - 1, dim, total, step, fill, False
    )
    return plan.run(x, offsets, starts)[0]


def unselect(
    dy: torch.Tensor,
    shape: Sequence[int],
    offsets: torch.Tensor,
    starts: torch.Tensor,
    dim: int,
    step: int,
    distinct: bool,
) -> torch.Tensor:
    """The gradient of the x of this shape whose rows were selected; what was taken twice adds up."""
    if not distinct:
        numbers = torch.arange(shape[dim], dtype=offsets.dtype, device=dy.device)
        numbers = select(numbers, offsets, starts, 0, dy.shape[dim], step, True, -1)
        return add(dy.movedim(dim, 0), numbers, shape[dim]).movedim(0, dim).contiguous()
    dy = laid(dy, dim)
    plan = _select_plan(
        seen(dy), offsets.dtype, starts.dtype, offsets.shape[0] - 1, dim, shape[dim], step, 0, True
    )
    return plan.run(dy, offsets, starts)[0]
