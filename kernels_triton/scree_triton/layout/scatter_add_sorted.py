"""Sorted scatter_add, for any number of tokens per place: the indices are sorted.

A place is an index of the first axis of the result. The tokens of a place are adjacent in the
sorted order, which is divided into chunks of equal length. The first kernel sums each chunk whose
tokens all belong to one place. The second kernel adds these sums and the other tokens of each
place, in order. So a place with most of the tokens is summed by many CTAs.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl

from ..runtime.launch import (
    Launch,
    Number,
    Pointer,
    bind_args,
    contiguous,
    empty,
    launch_args,
    method_on_device,
)

# Elements per tile.
_ELEMENTS = 2048
# From this number of elements on, a CTA computes one place and loads _UNROLL tokens at once.
_WIDE_TOKEN = 512
_UNROLL = 4
# Maximum number of places per CTA.
_MAX_PLACES = 128
# Minimum and maximum: tokens per chunk, and number of chunks.
_MIN_CHUNK = 32
_MAX_CHUNKS = 2048
# Places per CTA of the lookup.
_LOOKUP_BLOCK = 256


@triton.jit
def _sum(
    X,
    ORDER,
    begin,
    end,
    columns,
    C: tl.constexpr,
    BC: tl.constexpr,
    UNROLL: tl.constexpr,
    SORTED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Return the sums (places, BC) of the tokens [begin, end) of the order, or of X itself."""
    total = tl.zeros([begin.shape[0], BC], ACC)
    for first in range(0, tl.max(end - begin, 0), UNROLL):
        at = begin[:, None] + first + tl.arange(0, UNROLL)[None, :]
        valid = at < end[:, None]
        token = tl.load(ORDER + at, mask=valid, other=0).to(tl.int64) if SORTED else at.to(tl.int64)
        mask = valid[:, :, None]
        if C % BC != 0:
            mask = mask & (columns < C)[None, None, :]
        total += tl.sum(
            tl.load(X + token[:, :, None] * C + columns[None, None, :], mask=mask, other=0).to(ACC),
            1,
        )
    return total


@triton.jit(do_not_specialize=("count", "size", "bisections", "lookups"))
def scatter_add_sorted_prepare_kernel(
    X,
    KEYS,
    ORDER,
    BOUNDS,
    PARTS,
    count,
    size,
    bisections,
    lookups,
    CHUNK: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    UNROLL: tl.constexpr,
    PLACES: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute BOUNDS (size + 1,), where the tokens of each place begin in the order.

    Also compute PARTS (chunks, C), the sums of the chunks that belong to a single place.
    """
    COLUMNS: tl.constexpr = (C + BC - 1) // BC
    program = tl.program_id(0)
    if program < lookups:
        place = program.to(tl.int64) * PLACES + tl.arange(0, PLACES)
        low = tl.zeros([PLACES], tl.int64)
        high = low + count
        for _ in range(bisections):
            middle = (low + high) // 2
            before = (low < high) & (tl.load(KEYS + middle, mask=low < high, other=0) < place)
            low, high = tl.where(before, middle + 1, low), tl.where(before, high, middle)
        tl.store(BOUNDS + place, low, mask=place <= size)
    else:
        chunk = (program - lookups) // COLUMNS
        begin = chunk.to(tl.int64) * CHUNK
        if tl.load(KEYS + begin) == tl.load(KEYS + begin + (CHUNK - 1)):
            columns = (program - lookups) % COLUMNS * BC + tl.arange(0, BC)
            one = begin + tl.zeros([1], tl.int64)
            part = _sum(X, ORDER, one, one + CHUNK, columns, C, BC, UNROLL, True, ACC)
            tl.store(
                PARTS + chunk.to(tl.int64) * C + columns[None, :], part, mask=(columns < C)[None, :]
            )


@triton.jit(do_not_specialize=("size",))
def scatter_add_sorted_add_kernel(
    X,
    ORDER,
    BOUNDS,
    PARTS,
    OUT,
    size,
    CHUNK: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    UNROLL: tl.constexpr,
    PLACES: tl.constexpr,
    ACC: tl.constexpr,
):
    """Compute OUT (size, C), the sum of the tokens of each place."""
    COLUMNS: tl.constexpr = (C + BC - 1) // BC
    place = (tl.program_id(0) // COLUMNS).to(tl.int64) * PLACES + tl.arange(0, PLACES)
    columns = tl.program_id(0) % COLUMNS * BC + tl.arange(0, BC)
    begin = tl.load(BOUNDS + place, mask=place < size, other=0).to(tl.int64)
    end = tl.load(BOUNDS + place + 1, mask=place < size, other=0).to(tl.int64)
    # The tokens [first, last) are whole chunks, whose sums are in PARTS.
    first = tl.minimum((begin + (CHUNK - 1)) // CHUNK * CHUNK, end)
    last = tl.maximum(end // CHUNK * CHUNK, first)
    total = _sum(X, ORDER, begin, first, columns, C, BC, UNROLL, True, ACC)
    total += _sum(
        PARTS,
        ORDER,
        first // CHUNK,
        first // CHUNK + (last - first) // CHUNK,
        columns,
        C,
        BC,
        UNROLL,
        False,
        ACC,
    )
    total += _sum(X, ORDER, last, end, columns, C, BC, UNROLL, True, ACC)
    mask = (place < size)[:, None]
    if C % BC != 0:
        mask = mask & (columns < C)[None, :]
    tl.store(OUT + place[:, None] * C + columns[None, :], total.to(OUT.dtype.element_ty), mask=mask)


@launch_args
class PrepareArgs:
    """Arguments of `scatter_add_sorted_prepare_kernel`."""

    X: Pointer
    KEYS: Pointer
    ORDER: Pointer
    BOUNDS: Pointer
    PARTS: Pointer
    count: Number
    size: Number
    bisections: Number
    lookups: Number


@launch_args
class AddArgs:
    """Arguments of `scatter_add_sorted_add_kernel`."""

    X: Pointer
    ORDER: Pointer
    BOUNDS: Pointer
    PARTS: Pointer
    OUT: Pointer
    size: Number


@cache
def _launches(
    device: torch.device,
    x: torch.dtype,
    keys: torch.dtype,
    bounds: torch.dtype,
    acc: tl.dtype,
    width: int,
    chunk: int,
) -> tuple[Launch, Launch, int, int]:
    """Return the two launches, the programs per place and the places per program."""
    block = min(triton.next_power_of_2(width), 1024)
    wide = block >= _WIDE_TOKEN
    places = 1 if wide else min(_ELEMENTS // block, _MAX_PLACES)
    same = dict(CHUNK=chunk, C=width, BC=block)
    unroll = max(_UNROLL, min(chunk, _ELEMENTS // block))
    prepare = Launch(
        scatter_add_sorted_prepare_kernel,
        dict(**same, UNROLL=unroll, PLACES=_LOOKUP_BLOCK, ACC=acc),
        dict(num_warps=4),
        args=PrepareArgs,
    )
    each = dict(UNROLL=_UNROLL if wide else 1, PLACES=places, ACC=acc)
    add = Launch(
        scatter_add_sorted_add_kernel,
        {**same, **each},
        dict(num_warps=2 if wide else 4),
        args=AddArgs,
    )
    return prepare, add, -(-width // block), places


def _smallest_dtype(size: int) -> torch.dtype:
    """Return the smallest integer dtype for the indices: a radix sort takes time per byte."""
    return next(
        dtype
        for dtype in (torch.int8, torch.int16, torch.int32, torch.int64)
        if size <= torch.iinfo(dtype).max
    )


class LaunchConfig:
    """Launch config; it depends on shapes and dtypes only, so a call allocates and launches."""

    def __init__(
        self,
        device: torch.device,
        x: torch.dtype,
        index: torch.dtype,
        shape: tuple[int, ...],
        size: int,
        acc: tl.dtype,
        wide: torch.dtype,
    ):
        count, width = shape[0], math.prod(shape[1:])
        chunk = max(_MIN_CHUNK, triton.next_power_of_2(-(-count // _MAX_CHUNKS)))
        self.keys, bounds = _smallest_dtype(size), torch.int32 if count < 1 << 31 else torch.int64
        self.prepare, self.finish, columns, places = _launches(
            device, x, self.keys, bounds, acc, width, chunk
        )
        self.index, self.new = device.index if device.type == "cuda" else None, empty(device.type)
        self.size, lookups = size, size // _LOOKUP_BLOCK + 1
        self.bounds, self.parts = (
            (*contiguous((size + 1,)), bounds),
            (*contiguous((count // chunk, width)), wide),
        )
        self.out = *contiguous((size, *shape[1:])), x
        self.prepare_args = bind_args(
            PrepareArgs, count=count, size=size, bisections=count.bit_length(), lookups=lookups
        )
        self.programs = lookups + count // chunk * columns, -(-size // places) * columns

    @method_on_device
    def run(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the sums (size, ...) of the tokens of x, which is contiguous, per index."""
        keys, order = torch.sort(index.clamp(-1, self.size).to(self.keys), stable=True)
        bounds, parts, out = self.new(*self.bounds), self.new(*self.parts), self.new(*self.out)
        args = self.prepare_args(X=x, KEYS=keys, ORDER=order, BOUNDS=bounds, PARTS=parts)
        self.prepare(self.programs[0], args)
        args = AddArgs(X=x, ORDER=order, BOUNDS=bounds, PARTS=parts, OUT=out, size=self.size)
        self.finish(self.programs[1], args)
        return out
