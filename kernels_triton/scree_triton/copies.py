"""Tokens from one place to another: padded batches, numbered tokens, rows, and rows of several arrays end to end.

All of these copy the bytes of tokens, and differ in how a program finds where a token stands and where it goes, which is all
that their kernels say. Data types do not matter: bytes are moved by units of up to 8, and a thread moves two units at a time
wherever strides and addresses are multiples of 16. Tokens of one unit that go to neighboring places are written up to 16 bytes
at once, for which a thread has some of them side by side. Where there is nothing to copy, a fill is written: what tokens behind
the last row hold is not read, and they come out as 0.

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
from .host import on_its_device
from .launch import Launch, contiguous, empty

_UNITS = 1024  # that a program moves
_SLOTS = 512  # the same where it pads
# Tokens of one unit of so many bytes that a program writes to neighboring places, those side by side in a thread, and the warps.
_STREAMS = {1: (1024, 8, 2), 2: (1024, 8, 2), 4: (2048, 4, 4), 8: (1024, 2, 4)}
_LEAST_LENGTH = 8  # of a padded row, so that those side by side are of two rows at most
_WARPS = 4
_MOST_PLANS = 1024
MOST_JOINED = 4
_FLAGS = ("LEFT", "MARKS", "CHECKED", "BACK", "COUNT")  # parameters that say what a kernel does, beside its tile


@triton.jit
def _between(OFFSETS, token, low, high, most):
    """The row of each token, from `low` to `high`, which are up to `most` rows apart."""
    zero = tl.zeros(token.shape, tl.int32)
    low, high = low + zero, high + 1 + zero
    while most > 0:
        middle = (low + high) >> 1
        inside = tl.load(OFFSETS + middle) <= token
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle)
        most = most >> 1
    return low


@triton.jit
def _rows(OFFSETS, STARTS, token, first, n, TOKENS: tl.constexpr, SIDE: tl.constexpr):
    """The row of each of these tokens (TOKENS // SIDE, SIDE), n behind the last row; where it begins; and STARTS of it.

    The rows of the first and of the last token are found by looking at 256 rows at once. Those of the first and of the last of
    SIDE neighbors lie between these, and those of the others between those.
    """
    ways: tl.constexpr = 256
    ends = first + tl.arange(0, 2) * (TOKENS - 1)
    found = tl.zeros([2], tl.int32)
    rows = found + n + 1
    while tl.max(rows, 0) > 1:
        step = (rows + (ways - 1)) // ways
        beyond = tl.arange(0, ways)[None, :] * step[:, None]
        inside = beyond < rows[:, None]
        inside &= tl.load(OFFSETS + found[:, None] + beyond, mask=inside, other=0) <= ends[:, None]
        skipped = tl.maximum(tl.sum(inside.to(tl.int32), 1) - 1, 0) * step
        found += skipped
        rows = tl.minimum(step, rows - skipped)
    least, most = tl.min(found, 0), tl.max(found, 0)
    side = first + tl.arange(0, TOKENS // SIDE) * SIDE
    low = _between(OFFSETS, side, least, most, most - least)
    if SIDE == 1:
        row = low[:, None]
        begin, start = tl.load(OFFSETS + row), tl.load(STARTS + row, mask=row < n, other=0)
    else:
        high = _between(OFFSETS, side + (SIDE - 1), least, most, most - least)
        apart = tl.max(high - low, 0)
        if apart > 1:
            row = _between(OFFSETS, token, low[:, None], high[:, None], apart)
            begin, start = tl.load(OFFSETS + row), tl.load(STARTS + row, mask=row < n, other=0)
        else:  # neighbors are of two rows at most: nothing to look up for each
            begin = tl.load(OFFSETS + high)[:, None]
            later = token >= begin
            row = tl.where(later, high[:, None], low[:, None])
            begin = tl.where(later, begin, tl.load(OFFSETS + low)[:, None])
            start = tl.where(later, tl.load(STARTS + high, mask=high < n, other=0)[:, None],
                             tl.load(STARTS + low, mask=low < n, other=0)[:, None])
    return row, begin.to(token.dtype), start.to(token.dtype)


@triton.jit
def _part(PIECES: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr, SIDE: tl.constexpr,
          LONG: tl.constexpr):
    """The block of tokens, its first one, all (TOKENS // SIDE, SIDE), and the piece and the first column to copy of them."""
    COLUMNS: tl.constexpr = (WIDTH + BC - 1) // BC
    program = tl.program_id(0)
    block = program // (PIECES * COLUMNS)
    first = block.to(tl.int64 if LONG else tl.int32) * TOKENS
    tokens = first + (tl.arange(0, TOKENS // SIDE)[:, None] * SIDE + tl.arange(0, SIDE)[None, :])
    return block, first, tokens, (program // COLUMNS % PIECES).to(first.dtype), program % COLUMNS * BC


@triton.jit
def _store(y, value, exists, ends, SIDE: tl.constexpr):
    """Store neighbors at once where all of them exist; `ends` says that some may not."""
    if SIDE == 1:
        tl.store(y, value, mask=exists)
    else:
        whole = tl.min(exists.to(tl.int32), 1, keep_dims=True) > 0
        tl.store(y, value, mask=whole & (tl.zeros([1, SIDE], tl.int32) == 0))
        if ends:
            tl.store(y, value, mask=exists & (whole == 0))


@triton.jit
def _copy(FROM, TO, source, target, real, exists, ends, low, high, column, WIDTH: tl.constexpr, BC: tl.constexpr,
          SIDE: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr):
    """BC units of each token that exists from the unit `source` to the unit `target`; where it is not real, a fill."""
    unit: tl.constexpr = tl.int64 if UNIT == 8 else tl.int32 if UNIT == 4 else tl.int16 if UNIT == 2 else tl.int8
    reads, writes = real & exists, exists
    if SIDE == 1:
        columns = (column + tl.arange(0, BC))[None, :]
        source = tl.multiple_of(source, [ALIGN, ALIGN]) + columns
        target = tl.multiple_of(target, [ALIGN, ALIGN]) + columns
        if WIDTH % BC != 0:
            reads, writes = reads & (columns < WIDTH), writes & (columns < WIDTH)
    x = FROM.to(tl.pointer_type(unit), bitcast=True) + source
    y = TO.to(tl.pointer_type(unit), bitcast=True) + target
    fill = (tl.cast(high, tl.int64) << 32) | (tl.cast(low, tl.int64) & 0xFFFFFFFF)
    found = tl.load(x, mask=reads, other=0)
    _store(y, tl.where(reads, found, fill.to(unit)), writes, ends, SIDE)


@triton.jit(do_not_specialize=("slots", "length", "low", "high", "x_token", "x_piece", "row_units", "y_token", "y_piece"))
def pad_kernel(PADDED, MASK, X, OFFSETS, slots, length, low, high, x_token, x_piece, row_units, y_token, y_piece,
               LEFT: tl.constexpr, MARKS: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr,
               TOKENS: tl.constexpr, SIDE: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, LONG: tl.constexpr):
    """Every slot of a padded batch from the token that stands there."""
    _, first, slot, piece, column = _part(PIECES, WIDTH, BC, TOKENS, SIDE, LONG)
    exists = slot < slots
    side = (slot - first) if SIDE == 1 else (tl.arange(0, TOKENS // SIDE) * SIDE)[:, None]
    over = side.to(tl.int32) - (length - first % length).to(tl.int32)  # slots behind the row of the first one
    most = tl.minimum(length, TOKENS).to(tl.int32)
    each = 1.0 / most.to(tl.float32)
    rows = tl.where(over < 0, -1, ((over.to(tl.float32) + 0.5) * each).to(tl.int32))  # exact: both are small
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
            _store(MASK + slot, real, exists, ends, SIDE)
        else:
            tl.store(MASK + (row.to(tl.int64) * length + place), real, mask=exists & (piece == 0) & (column == 0))
    target = slot if SIDE > 1 else row * row_units + place * y_token + piece * y_piece
    _copy(X, PADDED, token * x_token + piece * x_piece, target, real, exists, ends, low, high, column, WIDTH, BC, SIDE, UNIT,
          ALIGN)


@triton.jit(do_not_specialize=("n", "total", "length", "x_token", "x_piece", "row_units", "y_token", "y_piece"))
def unpad_kernel(X, PADDED, OFFSETS, n, total, length, x_token, x_piece, row_units, y_token, y_piece,
                 LEFT: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr,
                 SIDE: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, LONG: tl.constexpr):
    """Every token from its slot in a padded batch; strides as above."""
    _, first, token, piece, column = _part(PIECES, WIDTH, BC, TOKENS, SIDE, LONG)
    row, begin, _ = _rows(OFFSETS, OFFSETS, token, first, n, TOKENS, SIDE)
    place = token - begin
    if LEFT:
        place += length - (tl.load(OFFSETS + row + 1, mask=row < n, other=0).to(token.dtype) - begin)
    real = (row < n) & (place < length)
    if LEFT:
        real &= place >= 0
    target = token if SIDE > 1 else token * x_token + piece * x_piece
    _copy(PADDED, X, row.to(token.dtype) * row_units + place * y_token + piece * y_piece, target, real, token < total,
          first + TOKENS > total, 0, 0, column, WIDTH, BC, SIDE, UNIT, ALIGN)


@triton.jit(do_not_specialize=("count", "size", "x_token", "y_token"))
def take_kernel(OUT, X, INDEX, CHECK, count, size, x_token, y_token, CHECKED: tl.constexpr, PIECES: tl.constexpr,
                WIDTH: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr, SIDE: tl.constexpr, UNIT: tl.constexpr,
                ALIGN: tl.constexpr, LONG: tl.constexpr):
    """Token i of OUT from token INDEX[i] of X, if there is one; with CHECK, if CHECK[INDEX[i]] is i."""
    _, first, token, _, column = _part(PIECES, WIDTH, BC, TOKENS, SIDE, LONG)
    exists = token < count
    source = tl.load(INDEX + token, mask=exists, other=-1)
    real = (source >= 0) & (source < size)
    if CHECKED:
        real &= tl.load(CHECK + source, mask=real, other=-1) == token
    source = source.to(token.dtype) * x_token
    target = token if SIDE > 1 else token * y_token
    _copy(X, OUT, source, target, real, exists, first + TOKENS > count, 0, 0, column, WIDTH, BC, SIDE, UNIT, ALIGN)


@triton.jit(do_not_specialize=("n", "total", "size", "step", "low", "high", "x_token", "x_piece", "y_token",
                               "y_piece"))
def select_kernel(TO, FROM, OFFSETS, STARTS, n, total, size, step, low, high, x_token, x_piece, y_token, y_piece,
                  BACK: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr,
                  SIDE: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, LONG: tl.constexpr):
    """Rows of OUT, whose tokens stand at STARTS, STARTS + step ... in X; BACK puts them there.

    BACK is 2 where they fill X; then what stands behind the last row in both is set to 0.
    """
    _, first, token, piece, column = _part(PIECES, WIDTH, BC, TOKENS, SIDE, LONG)
    row, begin, start = _rows(OFFSETS, STARTS, token, first, n, TOKENS, SIDE)
    source = start + (token - begin) * step
    if BACK:
        source = tl.where(row < n, source, token)
    real = (row < n) & (source >= 0) & (source < size)
    there = source * x_token + piece * x_piece
    here = token if SIDE > 1 else token * y_token + piece * y_piece
    if BACK:
        exists = (real | (row == n)) if BACK == 2 else real
        _copy(FROM, TO, here, there, real, exists & (token < total), True, low, high, column, WIDTH, BC, SIDE, UNIT, ALIGN)
    else:
        _copy(FROM, TO, there, here, real, token < total, first + TOKENS > total, low, high, column, WIDTH, BC, SIDE, UNIT,
              ALIGN)


@triton.jit(do_not_specialize=("n", "y_token", "y_piece", "block1", "block2", "block3", "total0", "total1",
                               "total2", "total3", "token0", "token1", "token2", "token3", "piece0", "piece1", "piece2",
                               "piece3"))
def join_kernel(P0, P1, P2, P3, P4, O0, O1, O2, O3, n, y_token, y_piece, block1, block2, block3, total0, total1,
                total2, total3, token0, token1, token2, token3, piece0, piece1, piece2, piece3, COUNT: tl.constexpr,
                BACK: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, BC: tl.constexpr, TOKENS: tl.constexpr,
                SIDE: tl.constexpr, UNIT: tl.constexpr, ALIGN: tl.constexpr, LONG: tl.constexpr):
    """Every token of up to four arrays, X with offsets O, to its place in rows that are joined; BACK from there.

    The blocks of array i begin at `block<i>`. What stands behind the last row of each counts as one more row.
    """
    if BACK:  # what is made stands before what is given
        X0, X1, X2, X3, OUT = P0, P1, P2, P3, P4
    else:
        OUT, X0, X1, X2, X3 = P0, P1, P2, P3, P4
    block, first, token, piece, column = _part(PIECES, WIDTH, BC, TOKENS, SIDE, LONG)
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
    row, _, _ = _rows(OFFSETS, OFFSETS, token, first, n, TOKENS, SIDE)
    place = token  # what the earlier arrays have up to the end of this row, and the later ones before it, stands before
    for i in tl.static_range(COUNT):
        OTHER = O0 if i == 0 else O1 if i == 1 else O2 if i == 2 else O3
        end = total0 if i == 0 else total1 if i == 1 else total2 if i == 2 else total3
        at = row + (j > i).to(tl.int32)
        others = tl.load(OTHER + at, mask=at <= n, other=end).to(token.dtype)
        place += tl.where(j == i, 0, others)
    here = token if SIDE > 1 else token * x_token + piece * x_piece
    there = place * y_token + piece * y_piece
    if BACK:
        _copy(OUT, X, there, here, row < n, token < total, first + TOKENS > total, 0, 0, column, WIDTH, BC, SIDE, UNIT, ALIGN)
    else:
        _copy(X, OUT, here, there, row < n, token < total, True, 0, 0, column, WIDTH, BC, SIDE, UNIT, ALIGN)


class _Plan:
    """A launch and all that is static of it, so that a call only allocates and launches."""

    __slots__ = ("index", "launch", "made", "new", "numbers", "programs", "zeros")

    def __init__(self, device: torch.device, made: Sequence[tuple[Sequence[int], torch.dtype]], launch: Launch | None = None,
                 programs: int = 0, numbers: tuple[int, ...] = (), zeros: bool = False):
        self.index = device.index if device.type == "cuda" else None
        self.new, self.launch, self.programs, self.numbers, self.zeros = empty(device.type), launch, programs, numbers, zeros
        self.made = [(*contiguous(shape), dtype) for shape, dtype in made]

    @on_its_device
    def run(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """What is made of the arrays that are given, the first of which is copied from."""
        made = [self.new(*one) for one in self.made]
        if self.zeros:
            for one in made:
                one.zero_()
        if self.launch is not None:
            self.launch(self.programs, (*made, *given), (), self.numbers)
        return made


_Seen = tuple[torch.device, torch.dtype, torch.Size, tuple[int, ...], int]  # what a plan follows from


def _seen(x: torch.Tensor) -> _Seen:
    return x.device, x.dtype, x.shape, x.stride(), x.data_ptr() & 15


@cache
def _launch(kernel: Any, device: torch.device, dtypes: tuple[torch.dtype, ...], pieces: int, width: int, align: int, long: bool,
            streams: bool, *flags: bool | int) -> tuple[Launch, int, int]:
    """A kernel for pieces of `width` bytes at multiples of `align`; the tokens of a program and the programs of a token.

    `streams` says that it writes tokens to neighboring places, if they are of one unit.
    """
    unit = min(align, 8)
    units = width // unit
    if streams and pieces == units == 1:
        block, (tokens, side, warps) = 1, _STREAMS[unit]
    else:
        most, side, warps = _SLOTS if kernel is pad_kernel else _UNITS, 1, _WARPS
        block = units & -units  # a power of two that divides it, if that is not too small
        block = min(block if block >= 32 else triton.next_power_of_2(units), most)
        tokens = most // block
    names = [name for name in kernel.arg_names if name in _FLAGS]
    tile = dict(PIECES=pieces, WIDTH=units, BC=block, TOKENS=tokens, SIDE=side, UNIT=unit, ALIGN=align // unit, LONG=long)
    return Launch(kernel, {**dict(zip(names, flags)), **tile}, dict(num_warps=warps)), tokens, pieces * -(-units // block)


def _long(tokens: int, *laid: tuple[Sequence[int], Sequence[int]]) -> bool:
    """Whether numbers of tokens, or of the units of tensors of these shapes and strides, take 64 bits."""
    return max(tokens, *(sum((size - 1) * step for size, step in zip(*one)) for one in laid)) >= 1 << 30


def _align(width: int, *parts: int) -> int:
    """The largest power of two, up to 16, that divides all of these bytes."""
    bits = width | 16
    for part in parts:
        bits |= part
    return bits & -bits


def _laid(x: torch.Tensor, dim: int, first: int = 0) -> torch.Tensor:
    """A tensor with the elements of a piece side by side, and its pieces at equal distances: itself, or a copy."""
    if x.is_contiguous():
        return x
    shape, strides = x.shape, x.stride()
    inner, even = 1, all(strides[axis] == strides[axis + 1] * shape[axis + 1] for axis in range(first, dim - 1))
    for axis in range(x.ndim - 1, dim, -1):
        even = even and strides[axis] == inner
        inner *= shape[axis]
    return x if even else x.contiguous()


def _steps(dtype: torch.dtype, strides: Sequence[int], dim: int, first: int = 0) -> tuple[int, int]:
    """The bytes from token to token, along `dim`, and from piece to piece."""
    return strides[dim] * dtype.itemsize, strides[dim - 1] * dtype.itemsize if dim > first else 0


def _pieces(dtype: torch.dtype, shape: Sequence[int], dim: int, first: int = 0) -> tuple[int, int]:
    """How many pieces a token has, and the bytes of each."""
    return math.prod(shape[first:dim]), math.prod(shape[dim + 1:]) * dtype.itemsize


def _units(align: int, *parts: int) -> tuple[int, ...]:
    """So many bytes as units."""
    unit = min(align, 8)
    return tuple(part // unit for part in parts)


def resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    """A shape with another size along `dim`."""
    return (*shape[:dim], size, *shape[dim + 1:])


@lru_cache(1024)
def _bits(fill: float, sign: float, dtype: torch.dtype) -> tuple[int, int]:
    """Eight bytes full of a value, as two integers of 32 bits; `sign` tells -0.0 from 0.0."""
    low, high = torch.full((8 // dtype.itemsize,), fill, dtype=dtype).view(torch.int32).tolist()
    return low, high


@lru_cache(_MOST_PLANS)
def _pad_plan(seen: _Seen, offsets: torch.dtype, n: int, dim: int, length: int, left: bool, fill: float, sign: float,
              marks: bool) -> _Plan:
    device, dtype, shape, strides, low = seen
    out = (n, *resized(shape, dim, length))
    made = [(out, dtype), ((n, length) if marks else (0,), torch.bool)]
    if not math.prod(out):
        return _Plan(device, made, zeros=True)
    pieces, width = _pieces(dtype, shape, dim)
    token, piece = _steps(dtype, strides, dim)
    align = _align(width, token, piece, low)
    launch, tokens, programs = _launch(pad_kernel, device, (offsets,), pieces, width, align,
                                       _long(n * length, (shape, strides), contiguous(out)), length >= _LEAST_LENGTH,
                                       left, marks)
    return _Plan(device, made, launch, -(-n * length // tokens) * programs,
                 (n * length, length, *_bits(fill, sign, dtype),
                  *_units(align, token, piece, pieces * length * width, width, length * width)))


def pad(x: torch.Tensor, offsets: torch.Tensor, dim: int, length: int, left: bool, fill: torch.types.Number,
        marks: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A padded batch (n, ..., length, ...) of rows x, (..., total, ...), and with `marks` the mask of its tokens."""
    x = _laid(x, dim)
    plan = _pad_plan(_seen(x), offsets.dtype, offsets.shape[0] - 1, dim, length, left, fill, math.copysign(1.0, fill), marks)
    out, mask = plan.run(x, offsets)
    return out, mask


@lru_cache(_MOST_PLANS)
def _unpad_plan(seen: _Seen, offsets: torch.dtype, dim: int, total: int, left: bool) -> _Plan:
    device, dtype, shape, strides, low = seen
    n, length = shape[0], shape[dim + 1]
    out = resized(shape[1:], dim, total)
    if not math.prod(out):
        return _Plan(device, [(out, dtype)])
    pieces, width = _pieces(dtype, shape, dim + 1, 1)
    row, (token, piece) = strides[0] * dtype.itemsize, _steps(dtype, strides, dim + 1, 1)
    align = _align(width, row, token, piece, low)
    launch, tokens, programs = _launch(unpad_kernel, device, (offsets,), pieces, width, align,
                                       _long(max(total, length), (shape, strides), contiguous(out)), True, left)
    return _Plan(device, [(out, dtype)], launch, -(-total // tokens) * programs,
                 (n, total, length, *_units(align, width, total * width, row, token, piece)))


def unpad(x: torch.Tensor, offsets: torch.Tensor, dim: int, total: int, left: bool) -> torch.Tensor:
    """The rows (..., total, ...) of a padded batch x, (n, ..., length, ...)."""
    x = _laid(x, dim + 1, 1)
    return _unpad_plan(_seen(x), offsets.dtype, dim, total, left).run(x, offsets)[0]


@lru_cache(_MOST_PLANS)
def _take_plan(seen: _Seen, index: torch.dtype, check: torch.dtype | None, count: int) -> _Plan:
    device, dtype, shape, strides, low = seen
    out = resized(shape, 0, count)
    if not math.prod(out):
        return _Plan(device, [(out, dtype)])
    (_, width), (token, _) = _pieces(dtype, shape, 0), _steps(dtype, strides, 0)
    align = _align(width, token, low)
    launch, tokens, programs = _launch(take_kernel, device, (index, check), 1, width, align,
                                       _long(count, (shape, strides), contiguous(out)), True, check is not None)
    return _Plan(device, [(out, dtype)], launch, -(-count // tokens) * programs,
                 (count, shape[0], *_units(align, token, width)))


def take(x: torch.Tensor, index: torch.Tensor, check: torch.Tensor | None, distinct: bool) -> torch.Tensor:
    """The tokens of x, (tokens, ...), at `index`; 0 where there is none, or `check` there does not lead back.

    `distinct` says that none is taken twice, which is good to know for the gradient.
    """
    x = _laid(x, 0)
    plan = _take_plan(_seen(x), index.dtype, None if check is None else check.dtype, index.shape[0])
    return plan.run(x, index, index if check is None else check)[0]


@lru_cache(_MOST_PLANS)
def _select_plan(seen: _Seen, offsets: torch.dtype, starts: torch.dtype, n: int, dim: int, size: int, step: int, fill: int,
                 back: bool) -> _Plan:
    """What copies tokens to rows, or with `back` from them to so many tokens, as the kernel says."""
    device, dtype, shape, strides, low = seen
    out = resized(shape, dim, size)
    whole = shape[dim] == size
    if not (math.prod(shape) and math.prod(out)):
        return _Plan(device, [(out, dtype)], zeros=True)
    pieces, width = _pieces(dtype, shape, dim)
    apart, made = _steps(dtype, strides, dim), _steps(dtype, contiguous(out)[1], dim)
    tokens_of_rows, tokens_of_x, of_rows, of_x = (shape[dim], size, apart, made) if back else (size, shape[dim], made, apart)
    align = _align(width, *apart, *made, low)
    launch, tokens, programs = _launch(select_kernel, device, (offsets, starts), pieces, width, align,
                                       _long(0, (shape, strides), contiguous(out)), not back, back and 1 + whole)
    return _Plan(device, [(out, dtype)], launch, -(-tokens_of_rows // tokens) * programs,
                 (n, tokens_of_rows, tokens_of_x, step, *_bits(fill, 1.0, dtype), *_units(align, *of_x, *of_rows)),
                 back and not whole)


def select(x: torch.Tensor, offsets: torch.Tensor, starts: torch.Tensor, dim: int, total: int, step: int, distinct: bool,
           fill: int = 0) -> torch.Tensor:
    """Rows (..., total, ...), whose tokens stand at `starts`, `starts + step` ... in x."""
    x = _laid(x, dim)
    plan = _select_plan(_seen(x), offsets.dtype, starts.dtype, offsets.shape[0] - 1, dim, total, step, fill, False)
    return plan.run(x, offsets, starts)[0]


def unselect(dy: torch.Tensor, shape: Sequence[int], offsets: torch.Tensor, starts: torch.Tensor, dim: int, step: int,
             distinct: bool) -> torch.Tensor:
    """The gradient of the x of this shape whose rows were selected; what was taken twice adds up."""
    if not distinct:
        numbers = torch.arange(shape[dim], dtype=offsets.dtype, device=dy.device)
        numbers = select(numbers, offsets, starts, 0, dy.shape[dim], step, True, -1)
        return add(dy.movedim(dim, 0), numbers, shape[dim]).movedim(0, dim).contiguous()
    dy = _laid(dy, dim)
    plan = _select_plan(_seen(dy), offsets.dtype, starts.dtype, offsets.shape[0] - 1, dim, shape[dim], step, 0, True)
    return plan.run(dy, offsets, starts)[0]


@lru_cache(_MOST_PLANS)
def _join_plan(seen: tuple[_Seen, ...], offsets: tuple[torch.dtype, ...], n: int, totals: tuple[int, ...], dim: int,
               back: bool) -> _Plan:
    """What joins the arrays that were seen, or with `back` takes one apart to arrays of so many tokens."""
    device, dtype, shape, strides, _ = seen[0]
    apart = [resized(shape, dim, total) for total in totals]
    whole = resized(shape, dim, sum(totals))
    made = [(one, dtype) for one in (apart if back else [whole])]
    if not math.prod(whole):
        return _Plan(device, made)
    own = _steps(dtype, strides if back else contiguous(whole)[1], dim)
    steps = [_steps(dtype, contiguous(one)[1], dim) for one in apart] if back else [_steps(dtype, one[3], dim) for one in seen]
    pieces, width = _pieces(dtype, shape, dim)
    align = _align(width, *own, *(part for one in steps for part in one), *(low for *_, low in seen))
    long = _long(0, contiguous(whole), *((one[2], one[3]) for one in seen))
    launch, tokens, programs = _launch(join_kernel, device, offsets, pieces, width, align, long, back, len(totals), back)
    ends = [0]
    for total in totals:
        ends.append(ends[-1] - (-total // tokens))
    rows = [(total, *_units(align, *one)) for total, one in zip(totals, steps)] + [(0, 0, 0)] * (MOST_JOINED - len(totals))
    return _Plan(device, made, launch, ends[-1] * programs,
                 (n, *_units(align, *own), *ends[1:-1], *ends[-1:] * (MOST_JOINED - len(totals)),
                  *(number for numbers in zip(*rows) for number in numbers)))


def join(xs: Sequence[torch.Tensor], offsets: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    """Row i of each of up to four arrays end to end."""
    xs = [_laid(x, dim) for x in xs]
    plan = _join_plan(tuple(_seen(x) for x in xs), tuple(one.dtype for one in offsets), offsets[0].shape[0] - 1,
                      tuple(x.shape[dim] for x in xs), dim, False)
    missing = MOST_JOINED - len(xs)
    return plan.run(*xs, *xs[:1] * missing, *offsets, *offsets[:1] * missing)[0]


def unjoin(dy: torch.Tensor, offsets: Sequence[torch.Tensor], totals: Sequence[int], dim: int) -> list[torch.Tensor]:
    """The arrays of which rows were joined."""
    dy = _laid(dy, dim)
    plan = _join_plan((_seen(dy),), tuple(one.dtype for one in offsets), offsets[0].shape[0] - 1, tuple(totals), dim, True)
    missing = MOST_JOINED - len(totals)
    return plan.run(*[dy] * missing, dy, *offsets, *offsets[:1] * missing)
