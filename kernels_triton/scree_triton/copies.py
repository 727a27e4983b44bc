"""Tokens from one place to another: padded batches, numbered tokens, rows, and rows of several arrays end to end.

All of these copy the bytes of tokens, and differ in how a program finds where a token stands and where it goes, which is all
that their kernels say. Data types do not matter: bytes are moved by units of up to 8, and a thread moves two units at a time
wherever strides and addresses are multiples of 16. Where there is nothing to copy, a fill is written: what tokens behind the
last row hold is not read, and they come out as 0.

Values have the shape (..., total, ...) with the tokens along `dim`; what stands before that axis makes the pieces of a token.
"""
import math
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from .addition import add
from .host import start
from .launch import Launch

_UNITS = 1024  # that a program moves
_SLOTS = 512  # the same where it pads
_WARPS = 4
MOST_JOINED = 4
_FLAGS = ("LEFT", "MARKS", "CHECKED", "BACK", "COUNT")  # parameters that say what a kernel does, beside its tile


@triton.jit
def _rows(OFFSETS, token, first, n, TOKENS: tl.constexpr):
    """The row of each of so many tokens, from `first` on; n behind the last row.

    Those of the first and of the last one are found by looking at 256 of the rows at once; the others lie between.
    """
    ways: tl.constexpr = 256
    ends = first + tl.arange(0, 2) * (TOKENS - 1)
    low = tl.zeros([2], tl.int32)
    rows = low + n + 1
    while tl.max(rows, 0) > 1:
        step = (rows + (ways - 1)) // ways
        beyond = tl.arange(0, ways)[None, :] * step[:, None]
        inside = beyond < rows[:, None]
        inside &= tl.load(OFFSETS + low[:, None] + beyond, mask=inside, other=0) <= ends[:, None]
        skipped = tl.maximum(tl.sum(inside.to(tl.int32), 1) - 1, 0) * step
        low += skipped
        rows = tl.minimum(step, rows - skipped)
    least, most = tl.min(low, 0), tl.max(low, 0)
    low = tl.zeros([TOKENS], tl.int32) + least
    high = low + (most - least) + 1
    between = most - least
    while between > 0:
        middle = (low + high) // 2
        inside = tl.load(OFFSETS + middle) <= token
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle)
        between = between // 2
    return low


@triton.jit
def _part(PIECES: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr, LONG: tl.constexpr):
    """The block of tokens, the tokens themselves, the piece of them and the first column that this program copies."""
    COLUMNS: tl.constexpr = (WIDTH + BC - 1) // BC
    program = tl.program_id(0)
    block = program // (PIECES * COLUMNS)
    tokens = block.to(tl.int64 if LONG else tl.int32) * TOKENS + tl.arange(0, TOKENS)
    return block, tokens, program // COLUMNS % PIECES, program % COLUMNS * BC


@triton.jit
def _copy(FROM, TO, source, target, real, exists, low, high, column, WIDTH: tl.constexpr, BC: tl.constexpr, UNIT: tl.constexpr,
          ALIGN: tl.constexpr):
    """BC units of each token that exists from the unit `source` to the unit `target`; where it is not real, a fill."""
    unit: tl.constexpr = tl.int64 if UNIT == 8 else tl.int32 if UNIT == 4 else tl.int16 if UNIT == 2 else tl.int8
    columns = (column + tl.arange(0, BC))[None, :]
    source = tl.multiple_of(source[:, None], [ALIGN, ALIGN])
    target = tl.multiple_of(target[:, None], [ALIGN, ALIGN])
    x = FROM.to(tl.pointer_type(unit), bitcast=True) + (source + columns)
    y = TO.to(tl.pointer_type(unit), bitcast=True) + (target + columns)
    reads, writes = (real & exists)[:, None], exists[:, None]
    if WIDTH % BC != 0:
        reads, writes = reads & (columns < WIDTH), writes & (columns < WIDTH)
    fill = (tl.cast(high, tl.int64) << 32) | (tl.cast(low, tl.int64) & 0xFFFFFFFF)
    found = tl.load(x, mask=reads, other=0)
    tl.store(y, tl.where(reads, found, fill.to(unit)), mask=writes)


@triton.jit(do_not_specialize=("slots", "length", "low", "high", "x_token", "x_piece", "row_units", "y_token", "y_piece"))
def pad_kernel(X, PADDED, MASK, OFFSETS, slots, length, low, high, x_token, x_piece, row_units, y_token, y_piece,
               LEFT: tl.constexpr, MARKS: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr,
               TOKENS: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, LONG: tl.constexpr):
    """Every slot of a padded batch from the token that stands there."""
    block, slot, piece, column = _part(PIECES, WIDTH, BC, TOKENS, LONG)
    exists = slot < slots
    first = block.to(slot.dtype) * TOKENS
    over = (tl.arange(0, TOKENS) - (length - first % length)).to(tl.int32)  # slots behind the row of the first one
    most = tl.minimum(length, TOKENS).to(tl.int32)
    rows = tl.where(over < 0, -1, ((over.to(tl.float32) + 0.5) / most.to(tl.float32)).to(tl.int32))  # exact: both are small
    place = (over - rows * most).to(slot.dtype) + tl.where(over < 0, length - most, 0)
    row = first // length + 1 + rows
    begin = tl.load(OFFSETS + row, mask=exists, other=0).to(slot.dtype)
    end = tl.load(OFFSETS + row + 1, mask=exists, other=0).to(slot.dtype)
    token = end - length + place if LEFT else begin + place
    real = (token >= begin) & (token < end)
    if MARKS:
        tl.store(MASK + (row.to(tl.int64) * length + place), real, mask=exists & (piece == 0) & (column == 0))
    _copy(X, PADDED, token.to(tl.int64) * x_token + piece.to(tl.int64) * x_piece,
          row.to(tl.int64) * row_units + place.to(tl.int64) * y_token + piece.to(tl.int64) * y_piece, real, exists, low, high,
          column, WIDTH, BC, UNIT, ALIGN)


@triton.jit(do_not_specialize=("n", "total", "length", "x_token", "x_piece", "row_units", "y_token", "y_piece"))
def unpad_kernel(PADDED, X, OFFSETS, n, total, length, x_token, x_piece, row_units, y_token, y_piece,
                 LEFT: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr,
                 UNIT: tl.constexpr, ALIGN: tl.constexpr, LONG: tl.constexpr):
    """Every token from its slot in a padded batch; strides as above."""
    block, token, piece, column = _part(PIECES, WIDTH, BC, TOKENS, LONG)
    row = _rows(OFFSETS, token, block.to(token.dtype) * TOKENS, n, TOKENS)
    begin = tl.load(OFFSETS + row).to(token.dtype)
    place = token - begin
    if LEFT:
        place += length - (tl.load(OFFSETS + row + 1, mask=row < n, other=0).to(token.dtype) - begin)
    real = (row < n) & (place >= 0) & (place < length)
    _copy(PADDED, X, row.to(tl.int64) * row_units + place.to(tl.int64) * y_token + piece.to(tl.int64) * y_piece,
          token.to(tl.int64) * x_token + piece.to(tl.int64) * x_piece, real, token < total, 0, 0, column, WIDTH, BC, UNIT, ALIGN)


@triton.jit(do_not_specialize=("count", "size", "x_token", "y_token"))
def take_kernel(X, OUT, INDEX, CHECK, count, size, x_token, y_token, CHECKED: tl.constexpr, PIECES: tl.constexpr,
                WIDTH: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr,
                LONG: tl.constexpr):
    """Token i of OUT from token INDEX[i] of X, if there is one; with CHECK, if CHECK[INDEX[i]] is i."""
    _, token, _, column = _part(PIECES, WIDTH, BC, TOKENS, LONG)
    exists = token < count
    source = tl.load(INDEX + token, mask=exists, other=-1).to(tl.int64)
    real = (source >= 0) & (source < size)
    if CHECKED:
        real &= tl.load(CHECK + source, mask=real, other=-1) == token
    _copy(X, OUT, source * x_token, token.to(tl.int64) * y_token, real, exists, 0, 0, column, WIDTH, BC, UNIT, ALIGN)


@triton.jit(do_not_specialize=("n", "total", "size", "step", "low", "high", "x_token", "x_piece", "y_token",
                               "y_piece"))
def select_kernel(X, OUT, OFFSETS, STARTS, n, total, size, step, low, high, x_token, x_piece, y_token, y_piece,
                  BACK: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr,
                  UNIT: tl.constexpr, ALIGN: tl.constexpr, LONG: tl.constexpr):
    """Rows of OUT, whose tokens stand at STARTS, STARTS + step ... in X; BACK puts them there.

    BACK is 2 where they fill X; then what stands behind the last row in both is set to 0.
    """
    block, token, piece, column = _part(PIECES, WIDTH, BC, TOKENS, LONG)
    row = _rows(OFFSETS, token, block.to(token.dtype) * TOKENS, n, TOKENS)
    begin = tl.load(OFFSETS + row).to(token.dtype)
    source = tl.load(STARTS + row, mask=row < n, other=0).to(token.dtype) + (token - begin) * step
    source = tl.where(row < n, source, token)
    real = (row < n) & (source >= 0) & (source < size)
    there = source.to(tl.int64) * x_token + piece.to(tl.int64) * x_piece
    here = token.to(tl.int64) * y_token + piece.to(tl.int64) * y_piece
    if BACK:
        exists = (real | (row == n)) if BACK == 2 else real
        _copy(OUT, X, here, there, real, exists & (token < total), low, high, column, WIDTH, BC, UNIT, ALIGN)
    else:
        _copy(X, OUT, there, here, real, token < total, low, high, column, WIDTH, BC, UNIT, ALIGN)


@triton.jit(do_not_specialize=("n", "y_token", "y_piece", "block1", "block2", "block3", "total0", "total1",
                               "total2", "total3", "token0", "token1", "token2", "token3", "piece0", "piece1", "piece2",
                               "piece3"))
def join_kernel(X0, X1, X2, X3, O0, O1, O2, O3, OUT, n, y_token, y_piece, block1, block2, block3, total0, total1,
                total2, total3, token0, token1, token2, token3, piece0, piece1, piece2, piece3, COUNT: tl.constexpr,
                BACK: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr,
                UNIT: tl.constexpr, ALIGN: tl.constexpr, LONG: tl.constexpr):
    """Every token of up to four arrays, X with offsets O, to its place in rows that are joined; BACK from there.

    The blocks of array i begin at `block<i>`. What stands behind the last row of each counts as one more row.
    """
    block, token, piece, column = _part(PIECES, WIDTH, BC, TOKENS, LONG)
    X, OFFSETS, first, total, x_token, x_piece = X0, O0, block1 * 0, total0, token0, piece0
    j = block * 0
    if COUNT > 1:
        j += (block >= block1).to(tl.int32)
        if block >= block1:
            X, OFFSETS, first, total, x_token, x_piece = X1, O1, block1, total1, token1, piece1
    if COUNT > 2:
        j += (block >= block2).to(tl.int32)
        if block >= block2:
            X, OFFSETS, first, total, x_token, x_piece = X2, O2, block2, total2, token2, piece2
    if COUNT > 3:
        j += (block >= block3).to(tl.int32)
        if block >= block3:
            X, OFFSETS, first, total, x_token, x_piece = X3, O3, block3, total3, token3, piece3
    token -= first.to(token.dtype) * TOKENS
    row = _rows(OFFSETS, token, (block - first).to(token.dtype) * TOKENS, n, TOKENS)
    place = token  # what the earlier arrays have up to the end of this row, and the later ones before it, stands before
    for i in tl.static_range(COUNT):
        OTHER = O0 if i == 0 else O1 if i == 1 else O2 if i == 2 else O3
        end = total0 if i == 0 else total1 if i == 1 else total2 if i == 2 else total3
        at = row + (j > i).to(tl.int32)
        before = tl.load(OTHER + at, mask=at <= n, other=end).to(token.dtype)
        place += tl.where(j == i, 0, before)
    there = place.to(tl.int64) * y_token + piece.to(tl.int64) * y_piece
    here = token.to(tl.int64) * x_token + piece.to(tl.int64) * x_piece
    if BACK:
        _copy(OUT, X, there, here, row < n, token < total, 0, 0, column, WIDTH, BC, UNIT, ALIGN)
    else:
        _copy(X, OUT, here, there, row < n, token < total, 0, 0, column, WIDTH, BC, UNIT, ALIGN)


@cache
def _launch(kernel: Any, device: torch.device, dtypes: tuple[torch.dtype, ...], pieces: int, width: int, align: int, long: bool,
            *flags: bool | int) -> tuple[Launch, int, int]:
    """A kernel for pieces of `width` bytes at multiples of `align`; the tokens of a program and the programs of a token."""
    unit = min(align, 8)
    units = width // unit
    most = _SLOTS if kernel is pad_kernel else _UNITS
    block = units & -units  # a power of two that divides it, if that is not too small
    block = min(block if block >= 32 else triton.next_power_of_2(units), most)
    tokens = most // block
    names = [name for name in kernel.arg_names if name in _FLAGS]
    tile = dict(PIECES=pieces, WIDTH=units, BC=block, TOKENS=tokens, UNIT=unit, ALIGN=align // unit, LONG=long)
    return Launch(kernel, {**dict(zip(names, flags)), **tile}, dict(num_warps=_WARPS)), tokens, pieces * -(-units // block)


def _long(*tokens: int) -> bool:
    """Whether numbers of tokens take 64 bits."""
    return max(tokens) >= 1 << 30


def _align(width: int, *parts: int) -> int:
    """The largest power of two, up to 16, that divides all of these bytes."""
    bits = width | 16
    for part in parts:
        bits |= part
    return bits & -bits


def _laid(x: torch.Tensor, dim: int, first: int = 0) -> tuple[torch.Tensor, int, int]:
    """A tensor with the elements of a piece side by side; the bytes from token to token, along `dim`, and piece to piece."""
    size, shape, strides = x.element_size(), x.shape, x.stride()
    if not x.is_contiguous():
        inner, even = 1, all(strides[axis] == strides[axis + 1] * shape[axis + 1] for axis in range(first, dim - 1))
        for axis in range(x.ndim - 1, dim, -1):
            even = even and strides[axis] == inner
            inner *= shape[axis]
        if not even:
            x = x.contiguous()
            strides = x.stride()
    return x, strides[dim] * size, strides[dim - 1] * size if dim > first else 0


def _pieces(x: torch.Tensor, dim: int, first: int = 0) -> tuple[int, int]:
    """How many pieces a token has, and the bytes of each."""
    return math.prod(x.shape[first:dim]), math.prod(x.shape[dim + 1:]) * x.element_size()


def _units(align: int, *parts: int) -> tuple[int, ...]:
    """So many bytes as units."""
    unit = min(align, 8)
    return tuple(part // unit for part in parts)


@lru_cache(1024)
def _bits(fill: float, sign: float, dtype: torch.dtype) -> tuple[int, int]:
    """Eight bytes full of a value, as two integers of 32 bits; `sign` tells -0.0 from 0.0."""
    low, high = torch.full((8 // dtype.itemsize,), fill, dtype=dtype).view(torch.int32).tolist()
    return low, high


def pad(x: torch.Tensor, offsets: torch.Tensor, dim: int, length: int, left: bool, fill: torch.types.Number,
        marks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A padded batch (n, ..., length, ...) of rows x, (..., total, ...), and with `marks` the mask of its tokens."""
    n = offsets.shape[0] - 1
    out = torch.empty((n, *x.shape[:dim], length, *x.shape[dim + 1:]), dtype=x.dtype, device=x.device)
    mask = (torch.empty if out.numel() else torch.zeros)((n, length) if marks else (0,), dtype=torch.bool, device=x.device)
    if out.numel():
        x, x_token, x_piece = _laid(x, dim)
        pieces, width = _pieces(x, dim)
        align = _align(width, x_token, x_piece, x.data_ptr(), out.data_ptr())
        launch, tokens, programs = _launch(pad_kernel, x.device, (offsets.dtype,), pieces, width, align,
                                           _long(n * length, x.shape[dim]), left, marks)
        start(launch, -(-n * length // tokens) * programs, (x, out, mask, offsets), (),
              (n * length, length, *_bits(fill, math.copysign(1.0, fill), x.dtype),
               *_units(align, x_token, x_piece, pieces * length * width, width, length * width)))
    return out, mask


def unpad(x: torch.Tensor, offsets: torch.Tensor, dim: int, total: int, left: bool) -> torch.Tensor:
    """The rows (..., total, ...) of a padded batch x, (n, ..., length, ...)."""
    n, length = x.shape[0], x.shape[dim + 1]
    out = torch.empty((*x.shape[1:dim + 1], total, *x.shape[dim + 2:]), dtype=x.dtype, device=x.device)
    if out.numel():
        x, x_token, x_piece = _laid(x, dim + 1, 1)
        pieces, width = _pieces(x, dim + 1, 1)
        row = x.stride(0) * x.element_size()
        align = _align(width, row, x_token, x_piece, x.data_ptr(), out.data_ptr())
        launch, tokens, programs = _launch(unpad_kernel, x.device, (offsets.dtype,), pieces, width, align, _long(total, length),
                                           left)
        start(launch, -(-total // tokens) * programs, (x, out, offsets), (),
              (n, total, length, *_units(align, width, total * width, row, x_token, x_piece)))
    return out


def take(x: torch.Tensor, index: torch.Tensor, check: torch.Tensor | None, distinct: bool) -> torch.Tensor:
    """The tokens of x, (tokens, ...), at `index`; 0 where there is none, or `check` there does not lead back.

    `distinct` says that none is taken twice, which is good to know for the gradient.
    """
    count = index.shape[0]
    out = torch.empty((count, *x.shape[1:]), dtype=x.dtype, device=x.device)
    if out.numel():
        x, x_token, _ = _laid(x, 0)
        _, width = _pieces(x, 0)
        align = _align(width, x_token, x.data_ptr(), out.data_ptr())
        dtypes = (index.dtype,) if check is None else (index.dtype, check.dtype)
        launch, tokens, programs = _launch(take_kernel, x.device, dtypes, 1, width, align, _long(count), check is not None)
        start(launch, -(-count // tokens) * programs, (x, out, index, index if check is None else check), (),
              (count, x.shape[0], *_units(align, x_token, width)))
    return out


def select(x: torch.Tensor, offsets: torch.Tensor, starts: torch.Tensor, dim: int, total: int, step: int, distinct: bool,
           fill: int = 0) -> torch.Tensor:
    """Rows (..., total, ...), whose tokens stand at `starts`, `starts + step` ... in x."""
    out = torch.empty((*x.shape[:dim], total, *x.shape[dim + 1:]), dtype=x.dtype, device=x.device)
    if out.numel():
        _select(x, out, offsets, starts, dim, step, fill, 0)
    return out


def _select(x: torch.Tensor, rows: torch.Tensor, offsets: torch.Tensor, starts: torch.Tensor, dim: int, step: int, fill: int,
            back: int) -> None:
    """Copy tokens of x to rows, or with `back` from them, as the kernel says."""
    if back:
        rows, y_token, y_piece = _laid(rows, dim)
        _, x_token, x_piece = _laid(x, dim)
    else:
        x, x_token, x_piece = _laid(x, dim)
        _, y_token, y_piece = _laid(rows, dim)
    pieces, width = _pieces(x, dim)
    n, total = offsets.shape[0] - 1, rows.shape[dim]
    align = _align(width, x_token, x_piece, y_token, y_piece, x.data_ptr(), rows.data_ptr())
    launch, tokens, programs = _launch(select_kernel, x.device, (offsets.dtype, starts.dtype), pieces, width, align,
                                       _long(total, x.shape[dim]), back)
    start(launch, -(-total // tokens) * programs, (x, rows, offsets, starts), (),
          (n, total, x.shape[dim], step, *_bits(fill, 1.0, x.dtype),
           *_units(align, x_token, x_piece, y_token, y_piece)))


def unselect(dy: torch.Tensor, shape: Sequence[int], offsets: torch.Tensor, starts: torch.Tensor, dim: int, step: int,
             distinct: bool) -> torch.Tensor:
    """The gradient of the x of this shape whose rows were selected; what was taken twice adds up."""
    if not distinct:
        numbers = torch.arange(shape[dim], dtype=offsets.dtype, device=dy.device)
        numbers = select(numbers, offsets, starts, 0, dy.shape[dim], step, True, -1)
        return add(dy.movedim(dim, 0), numbers, shape[dim]).movedim(0, dim).contiguous()
    whole = dy.shape[dim] == shape[dim]
    dx = (torch.empty if whole else torch.zeros)(tuple(shape), dtype=dy.dtype, device=dy.device)
    if dy.numel() and dx.numel():
        _select(dx, dy, offsets, starts, dim, step, 0, 1 + whole)
    return dx


def join(xs: Sequence[torch.Tensor], offsets: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Row i of each of up to four arrays end to end."""
    total = sum(x.shape[dim] for x in xs)
    out = torch.empty((*xs[0].shape[:dim], total, *xs[0].shape[dim + 1:]), dtype=xs[0].dtype, device=xs[0].device)
    if out.numel():
        _join(xs, offsets, out, dim, False)
    return out


def unjoin(dy: torch.Tensor, offsets: Sequence[torch.Tensor], totals: Sequence[int], dim: int) -> list[torch.Tensor]:
    """The arrays of which rows were joined."""
    xs = [torch.empty((*dy.shape[:dim], total, *dy.shape[dim + 1:]), dtype=dy.dtype, device=dy.device) for total in totals]
    if dy.numel():
        _join(xs, offsets, dy, dim, True)
    return xs


def _join(xs: Sequence[torch.Tensor], offsets: Sequence[torch.Tensor], out: torch.Tensor, dim: int, back: bool) -> None:
    laid = [_laid(x, dim) for x in xs]
    out, y_token, y_piece = _laid(out, dim)
    pieces, width = _pieces(out, dim)
    parts = [part for x, *strides in laid for part in (x.data_ptr(), *strides)]
    align = _align(width, y_token, y_piece, out.data_ptr(), *parts)
    count, n, dtypes = len(xs), offsets[0].shape[0] - 1, tuple(one.dtype for one in offsets)
    launch, tokens, programs = _launch(join_kernel, out.device, dtypes, pieces, width, align, _long(out.shape[dim]), count, back)
    ends = [0]
    for x in xs:
        ends.append(ends[-1] - (-x.shape[dim] // tokens))
    filler = MOST_JOINED - count  # arrays that are not there
    pointers = *(x for x, *_ in laid), *(out,) * filler, *offsets, *offsets[:1] * filler, out
    columns = [(x.shape[dim], *_units(align, *strides)) for x, *strides in laid] + [(0, 0, 0)] * filler
    start(launch, ends[-1] * programs, pointers, (),
          (n, *_units(align, y_token, y_piece), *(ends + [0] * filler)[1:MOST_JOINED],
           *(number for numbers in zip(*columns) for number in numbers)))
