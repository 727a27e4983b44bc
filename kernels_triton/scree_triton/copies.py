"""Tokens from one place to another: padded batches, numbered tokens, rows, and rows of several arrays end to end.

All of these copy the bytes of tokens, and differ in how a program finds where a token stands and where it goes, which is all
that their kernels say. Data types do not matter: bytes are moved by units of up to 8, and a thread moves two units at a time
wherever strides and addresses are multiples of 16. Where there is nothing to copy, a fill is written: what tokens behind the
last row hold is not read, and they come out as 0.

Values have the shape (..., total, ...) with the tokens along `dim`; what stands before that axis makes the pieces of a token.
"""
import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .addition import ACC, add
from .host import start
from .launch import Launch
from .offsets import row_of

_UNITS = 512  # that a program moves
_WARPS = 4
_CHUNK = 1024  # slots of a mask that are counted at a time
_MOST_JOINED = 4
_FLAGS = ("LEFT", "MARKS", "CHECKED", "BACK", "COUNT")  # parameters that say what a kernel does, beside its tile


@triton.jit
def _part(PIECES: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr):
    """The block of tokens, the tokens themselves, the piece of them and the first column that this program copies."""
    COLUMNS: tl.constexpr = (WIDTH + BC - 1) // BC
    program = tl.program_id(0)
    block = program // (PIECES * COLUMNS)
    tokens = block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
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
               TOKENS: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """Every slot of a padded batch from the token that stands there."""
    block, slot, piece, column = _part(PIECES, WIDTH, BC, TOKENS)
    exists = slot < slots
    first = block.to(tl.int64) * TOKENS  # one long division for all slots
    place = (first % length).to(tl.int32) + tl.arange(0, TOKENS)
    row = first // length + place // length
    place = (place % length).to(tl.int64)
    begin = tl.load(OFFSETS + row, mask=exists, other=0).to(tl.int64)
    end = tl.load(OFFSETS + row + 1, mask=exists, other=0).to(tl.int64)
    token = end - length + place if LEFT else begin + place
    real = (token >= begin) & (token < end)
    if MARKS:
        tl.store(MASK + slot, real, mask=exists & (piece == 0) & (column == 0))
    _copy(X, PADDED, token * x_token + piece.to(tl.int64) * x_piece,
          row * row_units + place * y_token + piece.to(tl.int64) * y_piece, real, exists, low, high, column, WIDTH, BC, UNIT,
          ALIGN)


@triton.jit(do_not_specialize=("n", "total", "bisections", "length", "x_token", "x_piece", "row_units", "y_token", "y_piece"))
def unpad_kernel(PADDED, X, OFFSETS, n, total, bisections, length, x_token, x_piece, row_units, y_token, y_piece,
                 LEFT: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr,
                 UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """Every token from its slot in a padded batch; strides as above."""
    _, token, piece, column = _part(PIECES, WIDTH, BC, TOKENS)
    row = row_of(OFFSETS, token, n, bisections)
    begin = tl.load(OFFSETS + row).to(tl.int64)
    place = token - begin
    if LEFT:
        place += length - (tl.load(OFFSETS + row + 1, mask=row < n, other=0).to(tl.int64) - begin)
    real = (row < n) & (place >= 0) & (place < length)
    _copy(PADDED, X, row.to(tl.int64) * row_units + place * y_token + piece.to(tl.int64) * y_piece,
          token * x_token + piece.to(tl.int64) * x_piece, real, token < total, 0, 0, column, WIDTH, BC, UNIT, ALIGN)


@triton.jit(do_not_specialize=("count", "size", "x_token", "y_token"))
def take_kernel(X, OUT, INDEX, CHECK, count, size, x_token, y_token, CHECKED: tl.constexpr, PIECES: tl.constexpr,
                WIDTH: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """Token i of OUT from token INDEX[i] of X, if there is one; with CHECK, if CHECK[INDEX[i]] is i."""
    _, token, _, column = _part(PIECES, WIDTH, BC, TOKENS)
    exists = token < count
    source = tl.load(INDEX + token, mask=exists, other=-1).to(tl.int64)
    real = (source >= 0) & (source < size)
    if CHECKED:
        real &= tl.load(CHECK + source, mask=real, other=-1) == token
    _copy(X, OUT, source * x_token, token * y_token, real, exists, 0, 0, column, WIDTH, BC, UNIT, ALIGN)


@triton.jit(do_not_specialize=("n", "total", "bisections", "size", "step", "low", "high", "x_token", "x_piece", "y_token",
                               "y_piece"))
def select_kernel(X, OUT, OFFSETS, STARTS, n, total, bisections, size, step, low, high, x_token, x_piece, y_token, y_piece,
                  BACK: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr,
                  UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """Rows of OUT, whose tokens stand at STARTS, STARTS + step ... in X; BACK puts them there.

    BACK is 2 where they fill X; then what stands behind the last row in both is set to 0.
    """
    _, token, piece, column = _part(PIECES, WIDTH, BC, TOKENS)
    row = row_of(OFFSETS, token, n, bisections)
    begin = tl.load(OFFSETS + row).to(tl.int64)
    source = tl.load(STARTS + row, mask=row < n, other=0).to(tl.int64) + (token - begin) * step
    source = tl.where(row < n, source, token)
    real = (row < n) & (source >= 0) & (source < size)
    there = source * x_token + piece.to(tl.int64) * x_piece
    here = token * y_token + piece.to(tl.int64) * y_piece
    if BACK:
        exists = (real | (row == n)) if BACK == 2 else real
        _copy(OUT, X, here, there, real, exists & (token < total), low, high, column, WIDTH, BC, UNIT, ALIGN)
    else:
        _copy(X, OUT, there, here, real, token < total, low, high, column, WIDTH, BC, UNIT, ALIGN)


@triton.jit(do_not_specialize=("n", "bisections", "y_token", "y_piece", "block1", "block2", "block3", "total0", "total1",
                               "total2", "total3", "token0", "token1", "token2", "token3", "piece0", "piece1", "piece2",
                               "piece3"))
def join_kernel(X0, X1, X2, X3, O0, O1, O2, O3, OUT, n, bisections, y_token, y_piece, block1, block2, block3, total0, total1,
                total2, total3, token0, token1, token2, token3, piece0, piece1, piece2, piece3, COUNT: tl.constexpr,
                BACK: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr,
                UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """Every token of up to four arrays, X with offsets O, to its place in rows that are joined; BACK from there.

    The blocks of array i begin at `block<i>`. What stands behind the last row of each counts as one more row.
    """
    block, token, piece, column = _part(PIECES, WIDTH, BC, TOKENS)
    X, O, first, total, x_token, x_piece = X0, O0, block1 * 0, total0, token0, piece0
    j = block * 0
    if COUNT > 1:
        j += (block >= block1).to(tl.int32)
        if block >= block1:
            X, O, first, total, x_token, x_piece = X1, O1, block1, total1, token1, piece1
    if COUNT > 2:
        j += (block >= block2).to(tl.int32)
        if block >= block2:
            X, O, first, total, x_token, x_piece = X2, O2, block2, total2, token2, piece2
    if COUNT > 3:
        j += (block >= block3).to(tl.int32)
        if block >= block3:
            X, O, first, total, x_token, x_piece = X3, O3, block3, total3, token3, piece3
    token -= first.to(tl.int64) * TOKENS
    row = row_of(O, token, n, bisections)
    place = token  # what the earlier arrays have up to the end of this row, and the later ones before it, stands before
    for i in tl.static_range(COUNT):
        OTHER = O0 if i == 0 else O1 if i == 1 else O2 if i == 2 else O3
        end = total0 if i == 0 else total1 if i == 1 else total2 if i == 2 else total3
        at = row + (j > i).to(tl.int32)
        before = tl.load(OTHER + at, mask=at <= n, other=end).to(tl.int64)
        place += tl.where(j == i, 0, before)
    there = place * y_token + piece.to(tl.int64) * y_piece
    here = token * x_token + piece.to(tl.int64) * x_piece
    if BACK:
        _copy(OUT, X, there, here, row < n, token < total, 0, 0, column, WIDTH, BC, UNIT, ALIGN)
    else:
        _copy(X, OUT, here, there, row < n, token < total, 0, 0, column, WIDTH, BC, UNIT, ALIGN)


@triton.jit(do_not_specialize=("length", "chunks"))
def count_kernel(MASK, COUNTS, length, chunks, BLOCK: tl.constexpr):
    """COUNTS (n, chunks): how many slots of each chunk of a row are marked."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    place = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    real = tl.load(MASK + row * length + place, mask=place < length, other=0) != 0
    tl.store(COUNTS + tl.program_id(0), tl.sum(real.to(tl.int32), 0))


@triton.jit(do_not_specialize=("n", "length", "total", "chunks"))
def number_kernel(MASK, COUNTS, OFFSETS, SLOTS, TOKENS, n, length, total, chunks, BLOCK: tl.constexpr):
    """For every slot of a padded batch the token that stands there or -1, and for every token its slot or -1.

    A program does a chunk of a row; the last one what is in no row.
    """
    row = (tl.program_id(0) // chunks).to(tl.int64)
    chunk = tl.program_id(0) % chunks
    token = tl.load(OFFSETS + row).to(tl.int64)
    each = tl.arange(0, BLOCK)
    if row < n:
        for at in range(0, chunk, BLOCK):
            token += tl.sum(tl.load(COUNTS + row * chunks + at + each, mask=at + each < chunk, other=0), 0)
        place = chunk * BLOCK + each
        real = tl.load(MASK + row * length + place, mask=place < length, other=0) != 0
        rank = token + tl.cumsum(real.to(tl.int32), 0) - 1
        tl.store(TOKENS + row * length + place, tl.where(real, rank, -1), mask=place < length)
        tl.store(SLOTS + rank, row * length + place, mask=real & (rank < total))
    else:
        for rest in range(token, total, BLOCK):
            tl.store(SLOTS + rest + each, -1, mask=rest + each < total)


@triton.jit(do_not_specialize=("count", "size"))
def last_kernel(INDEX, LAST, count, size, BLOCK: tl.constexpr):
    """LAST (size,) the greatest of the tokens that go to each place, where it held -1."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(INDEX + token, mask=token < count, other=-1).to(tl.int64)
    tl.atomic_max(LAST + place, token.to(LAST.dtype.element_ty), mask=(place >= 0) & (place < size), sem="relaxed")


@cache
def _launch(kernel: Any, device: torch.device, dtypes: tuple[torch.dtype, ...], pieces: int, width: int, align: int,
            *flags: bool | int) -> tuple[Launch, int, int]:
    """A kernel for pieces of `width` bytes at multiples of `align`; the tokens of a program and the programs of a token."""
    unit = min(align, 8)
    units = width // unit
    block = units & -units  # a power of two that divides it, if that is not too small
    block = min(block if block >= 32 else triton.next_power_of_2(units), _UNITS)
    tokens = _UNITS // block
    names = [name for name in kernel.arg_names if name in _FLAGS]
    tile = dict(PIECES=pieces, WIDTH=units, BC=block, TOKENS=tokens, UNIT=unit, ALIGN=align // unit)
    return Launch(kernel, {**dict(zip(names, flags)), **tile}, dict(num_warps=_WARPS)), tokens, pieces * -(-units // block)


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
        launch, tokens, programs = _launch(pad_kernel, x.device, (offsets.dtype,), pieces, width, align, left, marks)
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
        launch, tokens, programs = _launch(unpad_kernel, x.device, (offsets.dtype,), pieces, width, align, left)
        start(launch, -(-total // tokens) * programs, (x, out, offsets), (),
              (n, total, (n + 1).bit_length(), length, *_units(align, width, total * width, row, x_token, x_piece)))
    return out


def take(x: torch.Tensor, index: torch.Tensor, check: torch.Tensor | None) -> torch.Tensor:
    """The tokens of x, (tokens, ...), at `index`; 0 where there is none, or `check` there does not lead back."""
    count = index.shape[0]
    out = torch.empty((count, *x.shape[1:]), dtype=x.dtype, device=x.device)
    if out.numel():
        x, x_token, _ = _laid(x, 0)
        _, width = _pieces(x, 0)
        align = _align(width, x_token, x.data_ptr(), out.data_ptr())
        dtypes = (index.dtype,) if check is None else (index.dtype, check.dtype)
        launch, tokens, programs = _launch(take_kernel, x.device, dtypes, 1, width, align, check is not None)
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
    launch, tokens, programs = _launch(select_kernel, x.device, (offsets.dtype, starts.dtype), pieces, width, align, back)
    start(launch, -(-total // tokens) * programs, (x, rows, offsets, starts), (),
          (n, total, (n + 1).bit_length(), x.shape[dim], step, *_bits(fill, 1.0, x.dtype),
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
    launch, tokens, programs = _launch(join_kernel, out.device, dtypes, pieces, width, align, count, back)
    ends = [0]
    for x in xs:
        ends.append(ends[-1] - (-x.shape[dim] // tokens))
    filler = _MOST_JOINED - count  # arrays that are not there
    pointers = *(x for x, *_ in laid), *(out,) * filler, *offsets, *offsets[:1] * filler, out
    columns = [(x.shape[dim], *_units(align, *strides)) for x, *strides in laid] + [(0, 0, 0)] * filler
    start(launch, ends[-1] * programs, pointers, (),
          (n, (n + 1).bit_length(), *_units(align, y_token, y_piece), *(ends + [0] * filler)[1:_MOST_JOINED],
           *(number for numbers in zip(*columns) for number in numbers)))


def _counter(count: int) -> torch.dtype:
    """The dtype that counts so far."""
    return torch.int32 if count < 1 << 31 else torch.int64


def number(mask: torch.Tensor, offsets: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """For a mask (n, length) the slot of each of `total` tokens, and the token of each slot; -1 for none."""
    n, length = mask.shape
    dtype = _counter(max(n * length, total))
    slots = torch.empty((total,), dtype=dtype, device=mask.device)
    tokens = torch.empty((n * length,), dtype=dtype, device=mask.device)
    chunks = max(1, -(-length // _CHUNK))
    mask, counts = mask.contiguous(), torch.empty((n * chunks,), dtype=torch.int32, device=mask.device)
    if n:
        start(_small(count_kernel, mask.device, _CHUNK, mask.dtype), n * chunks, (mask, counts), (), (length, chunks))
    launch = _small(number_kernel, mask.device, _CHUNK, mask.dtype, offsets.dtype, dtype)
    start(launch, n * chunks + 1, (mask, counts, offsets, slots, tokens), (), (n, length, total, chunks))
    return slots, tokens


@cache
def _small(kernel: Any, device: torch.device, block: int, *dtypes: torch.dtype) -> Launch:
    """A kernel whose only constant is its block."""
    return Launch(kernel, dict(BLOCK=block), dict(num_warps=4))


def last(index: torch.Tensor, size: int) -> torch.Tensor:
    """The last token that goes to each place; -1 for none."""
    count = index.shape[0]
    found = torch.full((size,), -1, dtype=_counter(count), device=index.device)
    if count and size:
        launch = _small(last_kernel, index.device, 256, index.dtype, found.dtype)
        start(launch, -(-count // 256), (index, found), (), (count, size))
    return found


# ------------------------------------------------------------------------------------------ gradients
class _Linear(NamedTuple):
    """A function that is linear in its first argument.

    `gradient(f, dy, shape, *args)` is that of an x of this shape, by the functions `f`; `empty(x, *args)` shows the result.
    """

    run: Callable[..., Any]
    gradient: Callable[..., torch.Tensor]
    empty: Callable[..., Any]


def _without(x: torch.Tensor, dim: int, size: int) -> tuple[int, ...]:
    """The shape of x with another size along `dim`."""
    return (*x.shape[:dim], size, *x.shape[dim + 1:])


LINEAR = {
    "pad": _Linear(
        pad, lambda f, dy, shape, offsets, dim, length, left, *_: f.unpad(dy, offsets, dim, shape[dim], left),
        lambda x, offsets, dim, length, left, fill, marks: (
            x.new_empty((offsets.shape[0] - 1, *_without(x, dim, length))),
            x.new_empty((offsets.shape[0] - 1, length) if marks else (0,), dtype=torch.bool))),
    "unpad": _Linear(
        unpad, lambda f, dy, shape, offsets, dim, total, left: f.pad(dy, offsets, dim, shape[dim + 1], left, 0, False)[0],
        lambda x, offsets, dim, total, left: x.new_empty(_without(x, dim + 1, total)[1:])),
    "take": _Linear(
        take, lambda f, dy, shape, index, check: f.add(dy, index, shape[0]) if check is None else f.take(dy, check, index),
        lambda x, index, check: x.new_empty((index.shape[0], *x.shape[1:]))),
    "add": _Linear(
        add, lambda f, dy, shape, index, size: f.take(dy, index, None),
        lambda x, index, size: x.new_empty((size, *x.shape[1:]))),
    "select": _Linear(
        select, lambda f, dy, shape, offsets, starts, dim, total, step, distinct, *_: f.unselect(
            dy, shape, offsets, starts, dim, step, distinct),
        lambda x, offsets, starts, dim, total, *_: x.new_empty(_without(x, dim, total))),
    "unselect": _Linear(
        unselect, lambda f, dy, shape, _, offsets, starts, dim, step, distinct: f.select(
            dy, offsets, starts, dim, shape[dim], step, distinct),
        lambda dy, shape, *_: dy.new_empty(shape)),
}
_EAGER = SimpleNamespace()  # the functions of this table for eager code, which are differentiable in their turn
_OPERATORS = SimpleNamespace()  # and for compiled code


class _Map(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name, *args):
        ctx.set_materialize_grads(False)
        ctx.name, ctx.shape, ctx.args = name, x.shape, args
        out = LINEAR[name].run(x, *args)
        if isinstance(out, tuple):
            ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    def backward(ctx, dy, *_):
        return LINEAR[ctx.name].gradient(_EAGER, dy, ctx.shape, *ctx.args), None, *(None,) * len(ctx.args)


def _make_operator(name: str) -> None:
    linear = LINEAR[name]
    operator = torch.library.custom_op(f"scree_triton::{name}", linear.run, mutates_args=())
    operator.register_fake(linear.empty)

    def keep(ctx, inputs, output):
        x, *args = inputs
        ctx.shape, ctx.rest = x.shape, [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.tensors = [i for i, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        ctx.save_for_backward(*(args[i] for i in ctx.tensors))

    def differentiate(ctx, dy, *_):
        args = list(ctx.rest)
        for i, tensor in zip(ctx.tensors, ctx.saved_tensors):
            args[i] = tensor
        return linear.gradient(_OPERATORS, dy, ctx.shape, *args), *(None,) * len(args)

    operator.register_autograd(differentiate, setup_context=keep)
    setattr(_OPERATORS, name, operator)
    setattr(_EAGER, name, partial(_eager, name))


def _eager(name: str, x: torch.Tensor, *args: Any) -> Any:
    if x.requires_grad and torch.is_grad_enabled():
        return _Map.apply(x, name, *args)
    return LINEAR[name].run(x, *args)


def _apply(name: str, x: torch.Tensor, *args: Any) -> Any:
    return getattr(_OPERATORS, name)(x, *args) if torch.compiler.is_compiling() else _eager(name, x, *args)


for _name in LINEAR:
    _make_operator(_name)


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx, offsets, dim, *xs):
        ctx.offsets, ctx.dim, ctx.totals = offsets, dim, [x.shape[dim] for x in xs]
        return join(xs, offsets, dim)

    @staticmethod
    def backward(ctx, dy):
        return None, None, *_Unjoin.apply(dy, ctx.offsets, ctx.totals, ctx.dim)


class _Unjoin(torch.autograd.Function):
    @staticmethod
    def forward(ctx, dy, offsets, totals, dim):
        ctx.offsets, ctx.dim = offsets, dim
        return tuple(unjoin(dy, offsets, totals, dim))

    @staticmethod
    def backward(ctx, *dxs):
        return _Join.apply(ctx.offsets, ctx.dim, *dxs), None, None, None


_join_op = torch.library.custom_op("scree_triton::join", join, mutates_args=())
_unjoin_op = torch.library.custom_op("scree_triton::unjoin", unjoin, mutates_args=())
_number_op = torch.library.custom_op("scree_triton::number", number, mutates_args=())
_last_op = torch.library.custom_op("scree_triton::last", last, mutates_args=())


@_join_op.register_fake
def _(xs, offsets, dim):
    return xs[0].new_empty(_without(xs[0], dim, sum(x.shape[dim] for x in xs)))


@_unjoin_op.register_fake
def _(dy, offsets, totals, dim):
    return [dy.new_empty(_without(dy, dim, total)) for total in totals]


@_number_op.register_fake
def _(mask, offsets, total):
    dtype = _counter(max(mask.numel(), total))
    return mask.new_empty((total,), dtype=dtype), mask.new_empty((mask.numel(),), dtype=dtype)


@_last_op.register_fake
def _(index, size):
    return index.new_empty((size,), dtype=_counter(index.shape[0]))


def _keep_joined(ctx, inputs, output):
    xs, offsets, ctx.dim = inputs
    ctx.totals = [x.shape[ctx.dim] for x in xs]
    ctx.save_for_backward(*offsets)


_join_op.register_autograd(
    lambda ctx, dy: (_unjoin_op(dy, ctx.saved_tensors, ctx.totals, ctx.dim), [None] * len(ctx.totals), None),
    setup_context=_keep_joined)


# ------------------------------------------------------------------------------------------ calls
def rejects(call: Any) -> str | None:
    """Why the kernels do not take a call; None if they do."""
    x = call.arrays[0] if hasattr(call, "arrays") else call.x
    x = x if isinstance(x, torch.Tensor) else x.values
    if hasattr(call, "arrays"):
        if len(call.arrays) > _MOST_JOINED:
            return f"the Triton kernels join up to {_MOST_JOINED} arrays at once, not {len(call.arrays)}"
        if any(other.values.dtype != x.dtype for other in call.arrays):
            return "the Triton kernels join arrays of one data type"
    if x.is_complex():
        return f"the Triton kernels take no {str(x.dtype)[6:]} here"
    if (x.requires_grad or getattr(call, "add", False)) and x.dtype not in ACC:
        return f"the Triton kernels do not add up {str(x.dtype)[6:]}"
    if hasattr(call, "fill_value") and (isinstance(call.fill_value, complex) or (x.numel() == 0 and call.x.total_length)):
        return "the Triton kernels pad tokens of one element at least, and with real numbers"
    return None


def _offsets(layout: Any) -> torch.Tensor:
    return layout.offsets.contiguous()


def run_pad(call: Any) -> Any:
    """Run a `PadCall`."""
    x = call.x
    return _apply("pad", x.values, _offsets(x.layout), x.ragged_dim, call.length, call.side == "left", call.fill_value, True)


def run_unpad(call: Any) -> torch.Tensor:
    """Run an `UnpadCall`."""
    x, dim, offsets, total = call.x, call.ragged_dim, _offsets(call.layout), call.layout.total
    if call.mask is None:
        return _apply("unpad", x, offsets, dim, total, False)
    numbers = _number_op if torch.compiler.is_compiling() else number
    x = x.movedim(dim + 1, 1) if dim else x
    out = _apply("take", x.flatten(0, 1), *numbers(call.mask, offsets, total))
    return out.movedim(0, dim) if dim else out


def run_gather(call: Any) -> torch.Tensor:
    """Run a `GatherCall`."""
    index = call.index.contiguous()
    differentiated = call.x.requires_grad and torch.is_grad_enabled()
    return _apply("take", call.x, index, _last(index, call.x.shape[0]) if call.distinct and differentiated else None)


def run_scatter(call: Any) -> torch.Tensor:
    """Run a `ScatterCall`."""
    index = call.index.contiguous()
    return _apply("add", call.x, index, call.size) if call.add else _apply("take", call.x, _last(index, call.size), index)


def _last(index: torch.Tensor, size: int) -> torch.Tensor:
    return (_last_op if torch.compiler.is_compiling() else last)(index, size)


def run_select(call: Any) -> torch.Tensor:
    """Run a `SelectCall`."""
    x, layout = call.x, call.layout
    return _apply("select", x.values, _offsets(layout), call.starts.contiguous(), x.ragged_dim, layout.total, call.step,
                  call.distinct)


def run_join(call: Any) -> torch.Tensor:
    """Run a `JoinCall`."""
    xs, offsets, dim = [x.values for x in call.arrays], [_offsets(x.layout) for x in call.arrays], call.arrays[0].ragged_dim
    if torch.compiler.is_compiling():
        return _join_op(xs, offsets, dim)
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        return _Join.apply(offsets, dim, *xs)
    return join(xs, offsets, dim)
