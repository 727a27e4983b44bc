"""Gather by index, scatter to distinct indices, selection of rows, and their gradients."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..runtime.launch import Number, Pointer, bind_args, launch_args
from .scatter_add import scatter_add
from .scatter_indices import last_tokens
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
    tensor_spec,
    with_regular_strides,
)

# Bytes that are written and read per output token if the kernel looks up its source token.
_LOOKUP_BYTES = 8


@triton.jit(do_not_specialize=("count", "size", "x_token", "x_piece", "y_token", "y_piece"))
def gather_kernel(
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
    PER_THREAD: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    INT64: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute OUT[i] = X[INDEX[i]]; 0 if the index is out of bounds.

    With CHECKED, OUT[i] is also 0 unless CHECK[INDEX[i]] == i.
    """
    _, first, token, piece, column = program_tile(PIECES, WIDTH, BC, TOKENS, PER_THREAD, INT64, PDL)
    exists = token < count
    # Faster if the sources are not adjacent, slower otherwise.
    policy: tl.constexpr = "evict_first" if PER_THREAD == 1 else ""
    source = tl.load(INDEX + token, mask=exists, other=-1, eviction_policy=policy)
    valid = (source >= 0) & (source < size)
    if CHECKED:
        valid &= tl.load(CHECK + source, mask=valid, other=-1) == token
    source = source.to(token.dtype) * x_token + piece * x_piece
    target = token if PER_THREAD > 1 else token * y_token + piece * y_piece
    copy_tile(
        X,
        OUT,
        source,
        target,
        valid,
        exists,
        first + TOKENS > count,
        0,
        0,
        column,
        WIDTH,
        BC,
        PER_THREAD,
        UNIT,
        ALIGN,
    )


@triton.jit(do_not_specialize=("count", "size", "x_token", "x_piece", "y_token", "y_piece"))
def scatter_unique_kernel(
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
    PER_THREAD: tl.constexpr,
    UNIT: tl.constexpr,
    ALIGN: tl.constexpr,
    INT64: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute OUT[TO[i]] = X[i] for the indices within bounds."""
    _, _, token, piece, column = program_tile(PIECES, WIDTH, BC, TOKENS, PER_THREAD, INT64, PDL)
    place = tl.load(TO + token, mask=token < count, other=-1)
    valid = (place >= 0) & (place < size)
    target = place.to(token.dtype) * y_token + piece * y_piece
    copy_tile(
        X,
        OUT,
        token * x_token + piece * x_piece,
        target,
        valid,
        valid,
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
    """Gather rows whose tokens are at STARTS, STARTS + step ... in X; INVERSE scatters them to X.

    INVERSE is 2 if the rows fill X; then the tail of X is set to 0.
    """
    _, first, token, piece, column = program_tile(PIECES, WIDTH, BC, TOKENS, PER_THREAD, INT64, PDL)
    row, begin, start = find_rows(OFFSETS, STARTS, token, first, n, TOKENS, PER_THREAD)
    source = start + (token - begin) * step
    if INVERSE:
        source = tl.where(row < n, source, token)
    valid = (row < n) & (source >= 0) & (source < size)
    x_at = source * x_token + piece * x_piece
    y_at = token if PER_THREAD > 1 else token * y_token + piece * y_piece
    if INVERSE:
        exists = (valid | (row == n)) if INVERSE == 2 else valid
        copy_tile(
            FROM,
            TO,
            y_at,
            x_at,
            valid,
            exists & (token < total),
            True,
            low,
            high,
            column,
            WIDTH,
            BC,
            PER_THREAD,
            UNIT,
            ALIGN,
        )
    else:
        copy_tile(
            FROM,
            TO,
            x_at,
            y_at,
            valid,
            token < total,
            first + TOKENS > total,
            low,
            high,
            column,
            WIDTH,
            BC,
            PER_THREAD,
            UNIT,
            ALIGN,
        )


@launch_args
class GatherArgs:
    """Arguments of `gather_kernel`."""

    OUT: Pointer
    X: Pointer
    INDEX: Pointer
    CHECK: Pointer
    count: Number
    size: Number
    x_token: Number
    x_piece: Number
    y_token: Number
    y_piece: Number


@launch_args
class ScatterUniqueArgs:
    """Arguments of `scatter_unique_kernel`."""

    OUT: Pointer
    X: Pointer
    TO: Pointer
    count: Number
    size: Number
    y_token: Number
    y_piece: Number
    x_token: Number
    x_piece: Number


@launch_args
class SelectArgs:
    """Arguments of `select_kernel`."""

    TO: Pointer
    FROM: Pointer
    OFFSETS: Pointer
    STARTS: Pointer
    n: Number
    total: Number
    size: Number
    step: Number
    low: Number
    high: Number
    x_token: Number
    x_piece: Number
    y_token: Number
    y_piece: Number


@lru_cache(MAX_CONFIGS)
def gather_config(
    x: tuple[Any, ...], index: torch.dtype, check: torch.dtype | None, count: int, ordered: bool
) -> LaunchConfig:
    x = TensorSpec(*x)
    out = x.with_shape(resized_shape(x.shape, 0, count))
    outputs = [(out.shape, out.dtype)]
    if not math.prod(out.shape):
        return LaunchConfig(x.device, outputs)
    copier = StridedCopy(
        gather_kernel,
        GatherArgs,
        count,
        ordered,
        [(x, 0, 0), (out, 0, 0)],
        (index, check),
        check is not None,
    )
    (x_token, x_piece), (y_token, y_piece) = copier.unit_strides
    args = bind_args(
        GatherArgs,
        count=count,
        size=x.shape[0],
        x_token=x_token,
        x_piece=x_piece,
        y_token=y_token,
        y_piece=y_piece,
    )
    return copier.config(
        outputs,
        copier.blocks(count),
        lambda outputs, x, index, check: args(OUT=outputs[0], X=x, INDEX=index, CHECK=check),
    )


def _gather_checked(
    x: torch.Tensor, index: torch.Tensor, check: torch.Tensor | None, ordered: bool
) -> torch.Tensor:
    """Return the tokens of x at `index`; `ordered` means that the indices mostly ascend.

    Token i is 0 if its index is out of bounds, or if `check[index[i]] != i`.
    """
    x = with_regular_strides(x, 0)
    config = gather_config(
        tensor_spec(x), index.dtype, None if check is None else check.dtype, index.shape[0], ordered
    )
    return config.run(x, index, index if check is None else check)[0]


def gather(x: torch.Tensor, index: torch.Tensor, distinct: bool) -> torch.Tensor:
    """Return the tokens of x, (tokens, ...), at `index`; 0 for an index out of bounds.

    `distinct` means that no index repeats, so the gradient needs no additions, and that the indices
    mostly ascend.
    """
    return _gather_checked(x, index, None, distinct)


@lru_cache(MAX_CONFIGS)
def scatter_unique_config(x: tuple[Any, ...], index: torch.dtype, size: int) -> LaunchConfig:
    x = TensorSpec(*x)
    out = x.with_shape(resized_shape(x.shape, 0, size))
    outputs = [(out.shape, out.dtype)]
    if not math.prod(x.shape) * size:
        return LaunchConfig(x.device, outputs, zeros=True)
    copier = StridedCopy(
        scatter_unique_kernel,
        ScatterUniqueArgs,
        x.shape[0],
        False,
        [(out, 0, 0), (x, 0, 0)],
        (index,),
    )
    (y_token, y_piece), (x_token, x_piece) = copier.unit_strides
    args = bind_args(
        ScatterUniqueArgs,
        count=x.shape[0],
        size=size,
        y_token=y_token,
        y_piece=y_piece,
        x_token=x_token,
        x_piece=x_piece,
    )
    return copier.config(
        outputs,
        copier.blocks(x.shape[0]),
        lambda outputs, x, index: args(OUT=outputs[0], X=x, TO=index),
        zeros=True,
    )


def scatter_unique(x: torch.Tensor, index: torch.Tensor, size: int) -> torch.Tensor:
    """Scatter the tokens of x to `index`, which has no duplicates.

    Returns (size, ...), 0 elsewhere.
    """
    if x.numel() * x.itemsize > _LOOKUP_BYTES * size:
        return _gather_checked(x, last_tokens(index, size), None, True)
    x = with_regular_strides(x, 0)
    return scatter_unique_config(tensor_spec(x), index.dtype, size).run(x, index)[0]


def scatter_last(x: torch.Tensor, index: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Scatter the tokens of x to `index`; `kept` is the token of each place, or -1."""
    return _gather_checked(x, kept, None, False)


def gather_last(dy: torch.Tensor, index: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `scatter_last`; 0 for tokens that were not kept."""
    return _gather_checked(dy, index, kept, False)


@lru_cache(MAX_CONFIGS)
def select_config(
    spec: tuple[Any, ...],
    offsets: torch.dtype,
    starts: torch.dtype,
    n: int,
    dim: int,
    size: int,
    step: int,
    fill: int,
    back: bool,
) -> LaunchConfig:
    """Return the launch config of `select`; with `back`, of its gradient with `size` tokens."""
    spec = TensorSpec(*spec)
    out = spec.with_shape(resized_shape(spec.shape, dim, size))
    outputs = [(out.shape, out.dtype)]
    fills_output = spec.shape[dim] == size
    if not (math.prod(spec.shape) and math.prod(out.shape)):
        return LaunchConfig(spec.device, outputs, zeros=True)
    x, y = (out, spec) if back else (spec, out)
    total = y.shape[dim]
    copier = StridedCopy(
        select_kernel,
        SelectArgs,
        total,
        not back,
        [(x, dim, 0), (y, dim, 0)],
        (offsets, starts),
        back and 1 + fills_output,
    )
    low, high = fill_words(fill, 1.0, out.dtype)
    (x_token, x_piece), (y_token, y_piece) = copier.unit_strides
    args = bind_args(
        SelectArgs,
        n=n,
        total=total,
        size=x.shape[dim],
        step=step,
        low=low,
        high=high,
        x_token=x_token,
        x_piece=x_piece,
        y_token=y_token,
        y_piece=y_piece,
    )
    return copier.config(
        outputs,
        copier.blocks(total),
        lambda outputs, source, offsets, starts: args(
            TO=outputs[0], FROM=source, OFFSETS=offsets, STARTS=starts
        ),
        zeros=back and not fills_output,
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
    """Return rows (..., total, ...) whose tokens are at `starts`, `starts + step` ... in x."""
    x = with_regular_strides(x, dim)
    config = select_config(
        tensor_spec(x),
        offsets.dtype,
        starts.dtype,
        offsets.shape[0] - 1,
        dim,
        total,
        step,
        fill,
        False,
    )
    return config.run(x, offsets, starts)[0]


def select_backward(
    dy: torch.Tensor,
    shape: Sequence[int],
    offsets: torch.Tensor,
    starts: torch.Tensor,
    dim: int,
    step: int,
    distinct: bool,
) -> torch.Tensor:
    """Return the gradient of `select` for an x of this shape; repeated tokens are added."""
    if not distinct:
        numbers = torch.arange(shape[dim], dtype=offsets.dtype, device=dy.device)
        numbers = select(numbers, offsets, starts, 0, dy.shape[dim], step, True, -1)
        return scatter_add(dy.movedim(dim, 0), numbers, shape[dim]).movedim(0, dim).contiguous()
    dy = with_regular_strides(dy, dim)
    config = select_config(
        tensor_spec(dy),
        offsets.dtype,
        starts.dtype,
        offsets.shape[0] - 1,
        dim,
        shape[dim],
        step,
        0,
        True,
    )
    return config.run(dy, offsets, starts)[0]
