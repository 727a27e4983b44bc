"""Bucketed scatter_add, for few tokens per place: each place has a bucket of token numbers.

A place is an index of the first axis of the result. One kernel writes the token numbers into the
buckets, in any order. Another kernel adds the tokens of each place, in ascending order. If a place
has more tokens than its bucket holds, a helper CTA finds its tokens in the index. If it has very
many, one job per chunk of the index finds and adds them, and the last job adds the partial sums.
The helper CTAs process all jobs. If the device supports PDL (programmatic
dependent launch), each kernel is launched while the previous one still runs. It waits for the end
of the previous kernel before it reads the results.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..runtime.device import device_info
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

# With more tokens, finding many tokens of many places takes longer than sorting all tokens.
_MAX_TOKENS = 1 << 17
# Maximum number of tokens per place on average.
_MAX_MEAN = 8
# Maximum capacity of all buckets together.
_MAX_TOTAL_CAPACITY = 1 << 22
# Capacity of a bucket relative to the average, so that hardly any bucket is too small.
_CAPACITY_FACTOR = 4
_MIN_CAPACITY = 16
# Chunks of the tokens of a place that has more tokens than one CTA adds.
_CHUNKS = 32
# Maximum number of such places.
MAX_SPLIT_PLACES = 128
# CTAs per SM that find the tokens of overflowing places.
_HELPERS_PER_SM = 4
# Elements per tile of narrow tokens.
_TILE = 2048
# From this number of elements on, a tile has _WIDE_BYTES bytes, read by two warps.
_WIDE_TOKEN = 128
_WIDE_BYTES = 2048
# Maximum number of places per CTA.
_MAX_PLACES = 128
# Counts per CTA of `scatter_add_bucketed_clear_kernel`.
_CLEAR_BLOCK = 1024
# Tokens per CTA of `scatter_add_bucketed_bucket_kernel`.
_BUCKET_BLOCK = 128
# Indices searched at once.
_SEARCH_BLOCK = 1024
_UNROLL = 4
# Per thread, for wide tokens: the helper CTAs must not reduce the occupancy of the other CTAs.
_MAX_REGISTERS = 64
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=("size",))
def scatter_add_bucketed_clear_kernel(COUNTS, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Set COUNTS (size,) to 0."""
    if PDL:
        gdc_launch_dependents()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(COUNTS + place, tl.zeros([BLOCK], tl.int32), mask=place < size)


@triton.jit(do_not_specialize=("count", "size", "max_tokens"))
def scatter_add_bucketed_bucket_kernel(
    INDEX,
    COUNTS,
    BUCKETS,
    count,
    size,
    max_tokens,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the tokens to BUCKETS (size, CAPACITY), followed by two lists of places.

    The lists hold the places with more than CAPACITY and with more than `max_tokens` tokens. COUNTS
    (size + 2,) are the tokens per place, and the lengths of the two lists.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(INDEX + token, mask=token < count, other=-1).to(tl.int64)
    valid = (place >= 0) & (place < size)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    before = tl.atomic_add(COUNTS + place, 1, mask=valid, sem="relaxed")
    tl.store(BUCKETS + place * CAPACITY + before, token, mask=valid & (before < CAPACITY))
    LISTS = BUCKETS + tl.cast(size, tl.int64) * CAPACITY
    for i in tl.static_range(2):
        over = valid & (before == (max_tokens if i else CAPACITY))
        number = tl.atomic_add(
            COUNTS + size + i + tl.zeros([BLOCK], tl.int32), 1, mask=over, sem="relaxed"
        )
        tl.store(LISTS + i * (count // CAPACITY + 1) + number, place.to(tl.int32), mask=over)


@triton.jit
def _sum_in_order(
    X,
    LIST,
    begin,
    end,
    columns,
    C: tl.constexpr,
    BC: tl.constexpr,
    UNROLL: tl.constexpr,
    LISTED: tl.constexpr,
    ACC: tl.constexpr,
):
    """Return the sum (BC,) of the tokens [begin, end) of a list, or of X itself, added in order."""
    total = tl.zeros([BC], ACC)
    for first in range(begin, end, UNROLL):
        for i in tl.static_range(UNROLL):
            at = first + i
            token = tl.cast(tl.load(LIST + at, mask=at < end, other=0) if LISTED else at, tl.int64)
            total += tl.load(X + token * C + columns, mask=(columns < C) & (at < end), other=0).to(
                ACC
            )
    return total


@triton.jit
def _sum_of_place(
    X,
    INDEX,
    LIST,
    place,
    begin,
    end,
    columns,
    C: tl.constexpr,
    BC: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """Return (BC,), the sum of the tokens of a place among the tokens [begin, end).

    LIST is scratch memory for the token numbers.
    """
    matches = begin * 0
    for first in range(begin, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        here = (tl.load(INDEX + token, mask=token < end, other=-1).to(tl.int64) == place).to(
            tl.int32
        )
        count = tl.sum(here, 0)
        if count > 0:
            tl.store(LIST + matches + tl.cumsum(here, 0) - 1, token, mask=here > 0)
        matches += count
    tl.debug_barrier()
    total = _sum_in_order(X, LIST, 0, matches, columns, C, BC, UNROLL, True, ACC)
    tl.debug_barrier()
    return total


@triton.jit(do_not_specialize=("count", "size", "max_tokens", "helpers", "length"))
def scatter_add_bucketed_add_kernel(
    X,
    INDEX,
    COUNTS,
    BUCKETS,
    PARTS,
    OUT,
    count,
    size,
    max_tokens,
    helpers,
    length,
    CAPACITY: tl.constexpr,
    CHUNKS: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    PLACES: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute OUT (size, C), the sum of the tokens of each place.

    The first `helpers` CTAs compute the places whose buckets overflow.
    """
    COLUMNS: tl.constexpr = (C + BC - 1) // BC
    if PDL:
        gdc_wait()
    if tl.program_id(0) < helpers:
        OVERFLOW = BUCKETS + tl.cast(size, tl.int64) * CAPACITY
        SPLIT = OVERFLOW + (count // CAPACITY + 1)
        LIST = (
            SPLIT
            + (count // (max_tokens + 1) + 1)
            + tl.program_id(0).to(tl.int64) * tl.maximum(length, max_tokens)
        )
        split_jobs = tl.load(COUNTS + size + 1) * CHUNKS
        for item in range(
            tl.program_id(0), (split_jobs + tl.load(COUNTS + size)) * COLUMNS, helpers
        ):
            job, column = item // COLUMNS, item % COLUMNS
            columns = column * BC + tl.arange(0, BC)
            if job < split_jobs:
                number = job // CHUNKS
                place = tl.load(SPLIT + number).to(tl.int64)
                begin = job % CHUNKS * length
                part = _sum_of_place(
                    X,
                    INDEX,
                    LIST,
                    place,
                    begin,
                    tl.minimum(begin + length, count),
                    columns,
                    C,
                    BC,
                    UNROLL,
                    BLOCK,
                    ACC,
                )
                tl.store(PARTS + tl.cast(job, tl.int64) * C + columns, part, mask=columns < C)
                tl.debug_barrier()
                done = tl.atomic_add(
                    COUNTS + size + 2 + number * COLUMNS + column, 1, sem="acq_rel"
                )
                if done == CHUNKS - 1:
                    tl.debug_barrier()
                    total = _sum_in_order(
                        PARTS,
                        LIST,
                        number * CHUNKS,
                        number * CHUNKS + CHUNKS,
                        columns,
                        C,
                        BC,
                        UNROLL,
                        False,
                        ACC,
                    )
                    tl.store(
                        OUT + place * C + columns, total.to(OUT.dtype.element_ty), mask=columns < C
                    )
            else:
                place = tl.load(OVERFLOW + (job - split_jobs)).to(tl.int64)
                if tl.load(COUNTS + place) <= max_tokens:
                    total = _sum_of_place(
                        X, INDEX, LIST, place, job * 0, count, columns, C, BC, UNROLL, BLOCK, ACC
                    )
                    tl.store(
                        OUT + place * C + columns, total.to(OUT.dtype.element_ty), mask=columns < C
                    )
    else:
        program = tl.program_id(0) - helpers
        columns = program % COLUMNS * BC + tl.arange(0, BC)
        place = (program // COLUMNS).to(tl.int64) * PLACES + tl.arange(0, PLACES)
        amount = tl.load(COUNTS + place, mask=place < size, other=0)
        few = amount <= CAPACITY
        slot = tl.arange(0, CAPACITY)
        tokens = tl.load(
            BUCKETS + place[:, None] * CAPACITY + slot[None, :],
            mask=(place < size)[:, None],
            other=0,
        )
        # Other slots of the bucket were never written.
        tokens = tl.where(few[:, None] & (slot[None, :] < amount[:, None]), tokens, _NO_TOKEN)
        total = tl.zeros([PLACES, BC], ACC)
        last = tl.zeros([PLACES], tl.int32) - 1
        inside = (columns < C)[None, :]
        # Each iteration adds the two tokens that follow the last added token, in order.
        for _ in range(0, tl.max(tl.where(few, amount, 0), 0), 2):
            one = tl.min(tl.where(tokens > last[:, None], tokens, _NO_TOKEN), 1)
            last = tl.min(tl.where(tokens > one[:, None], tokens, _NO_TOKEN), 1)
            x = tl.load(
                X + one.to(tl.int64)[:, None] * C + columns[None, :],
                mask=(one < _NO_TOKEN)[:, None] & inside,
                other=0,
            )
            y = tl.load(
                X + last.to(tl.int64)[:, None] * C + columns[None, :],
                mask=(last < _NO_TOKEN)[:, None] & inside,
                other=0,
            )
            total += x.to(ACC)
            total += y.to(ACC)
        tl.store(
            OUT + place[:, None] * C + columns[None, :],
            total.to(OUT.dtype.element_ty),
            mask=(few & (place < size))[:, None] & inside,
        )


@launch_args
class ClearArgs:
    """Arguments of `scatter_add_bucketed_clear_kernel`."""

    COUNTS: Pointer
    size: Number


@launch_args
class BucketArgs:
    """Arguments of `scatter_add_bucketed_bucket_kernel`."""

    INDEX: Pointer
    COUNTS: Pointer
    BUCKETS: Pointer
    count: Number
    size: Number
    max_tokens: Number


@launch_args
class AddArgs:
    """Arguments of `scatter_add_bucketed_add_kernel`."""

    X: Pointer
    INDEX: Pointer
    COUNTS: Pointer
    BUCKETS: Pointer
    PARTS: Pointer
    OUT: Pointer
    count: Number
    size: Number
    max_tokens: Number
    helpers: Number
    length: Number


@cache
def _launches(
    device: torch.device,
    x: torch.dtype,
    index: torch.dtype,
    acc: tl.dtype,
    capacity: int,
    width: int,
) -> tuple[Launch, Launch, Launch, int, int]:
    """Return the launches and the tile sizes.

    The tuple has the launches that clear the counts, fill the buckets and add the tokens, the
    number of CTAs per place, and the number of places per CTA.
    """
    if width >= _WIDE_TOKEN:
        tile, warps, options = _WIDE_BYTES // x.itemsize, 2, dict(maxnreg=_MAX_REGISTERS)
    else:
        tile, warps, options = _TILE, 4, {}
    block, pdl = min(triton.next_power_of_2(width), tile), device_info(device).supports_pdl
    places = min(tile // block, _MAX_PLACES)
    clear = Launch(
        scatter_add_bucketed_clear_kernel,
        dict(BLOCK=_CLEAR_BLOCK, PDL=pdl),
        dict(num_warps=4),
        args=ClearArgs,
    )
    bucket = Launch(
        scatter_add_bucketed_bucket_kernel,
        dict(CAPACITY=capacity, BLOCK=_BUCKET_BLOCK, PDL=pdl),
        dict(num_warps=4, launch_pdl=pdl),
        args=BucketArgs,
    )
    add = Launch(
        scatter_add_bucketed_add_kernel,
        dict(
            CAPACITY=capacity,
            CHUNKS=_CHUNKS,
            C=width,
            BC=block,
            PLACES=places,
            UNROLL=_UNROLL,
            BLOCK=_SEARCH_BLOCK,
            ACC=acc,
            PDL=pdl,
        ),
        dict(num_warps=warps, launch_pdl=pdl, **options),
        args=AddArgs,
    )
    return clear, bucket, add, -(-width // block), places


def _capacity(count: int, size: int) -> int:
    """Return the capacity of a bucket."""
    return triton.next_power_of_2(max(_MIN_CAPACITY, _CAPACITY_FACTOR * -(-count // size)))


def is_supported(count: int, size: int) -> bool:
    """Return whether this method supports so many tokens and places."""
    return (
        count <= min(_MAX_TOKENS, _MAX_MEAN * size)
        and size * _capacity(count, size) <= _MAX_TOTAL_CAPACITY
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
        capacity = _capacity(count, size)
        # Maximum number of tokens of a place that one CTA adds.
        max_tokens = max(capacity, count // MAX_SPLIT_PLACES)
        length = -(-count // _CHUNKS)
        self.clear, self.bucket, self.finish, columns, places = _launches(
            device, x, index, acc, capacity, width
        )
        helpers, many, self.filling = (
            _HELPERS_PER_SM * device_info(device).sm_count,
            count // (max_tokens + 1) + 1,
            -(-count // _BUCKET_BLOCK),
        )
        self.index, self.new = device.index if device.type == "cuda" else None, empty(device.type)
        self.programs = helpers + -(-size // places) * columns
        self.cleared = size + 2 + many * columns
        self.counts = *contiguous((self.cleared,)), torch.int32
        self.buckets = (
            *contiguous(
                (
                    size * capacity
                    + count // capacity
                    + 1
                    + many
                    + helpers * max(length, max_tokens),
                )
            ),
            torch.int32,
        )
        self.parts = *contiguous((many * _CHUNKS, width)), wide
        self.out = *contiguous((size, *shape[1:])), x
        numbers = dict(count=count, size=size, max_tokens=max_tokens)
        self.bucket_args = bind_args(BucketArgs, **numbers)
        self.add_args = bind_args(AddArgs, **numbers, helpers=helpers, length=length)

    @method_on_device
    def run(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """Return the sums (size, ...) of the tokens of x, which is contiguous, per index."""
        counts, buckets, parts, out = (
            self.new(*one) for one in (self.counts, self.buckets, self.parts, self.out)
        )
        args = ClearArgs(COUNTS=counts, size=self.cleared)
        self.clear(-(-self.cleared // _CLEAR_BLOCK), args)
        args = self.bucket_args(INDEX=index, COUNTS=counts, BUCKETS=buckets)
        self.bucket(self.filling, args)
        args = self.add_args(X=x, INDEX=index, COUNTS=counts, BUCKETS=buckets, PARTS=parts, OUT=out)
        self.finish(self.programs, args)
        return out
