"""Tokens added up at numbered places, a few at each: a place has a bin for the numbers of its tokens.

One kernel puts the tokens into bins, as they come; another one adds up those of each place, in their order. A place with more
tokens than its bin holds looks for them in the index: by one program, or by one for each stretch of the tokens where they are
very many, whichever of these comes last adding up the sums. Where the device can, each kernel is launched while the one before
it still runs, and waits for its end when it needs what that makes.
"""

import math
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..runtime.device import device_info
from ..runtime.launch import Launch, contiguous, empty, method_on_device

_MAX_TOKENS = (
    1 << 17
)  # beyond, looking for many tokens of many places takes longer than sorting all
_MAX_MEAN = 8  # tokens a place on average
_MAX_TOTAL_CAPACITY = 1 << 22  # of all bins together
_CAPACITY_FACTOR = 4  # times the average, so that hardly any bin is too small; and at least
_MIN_CAPACITY = 16
_CHUNKS = 32
MAX_SPLIT_PLACES = 128  # places can have more tokens than one program adds up
_HELPERS_PER_SM = 4  # programs a multiprocessor that look for tokens
_TILE = 2048  # elements of narrow tokens at once
_WIDE_TOKEN = 128  # elements, from which on a tile has so many bytes, which two warps read:
_WIDE_BYTES = 2048
_MAX_PLACES = 128  # of a program
_CLEAR_BLOCK = 1024  # counts of a program
_BUCKET_BLOCK = 128  # that a program puts into bins
_SEARCH_BLOCK = 1024  # numbers of places that are looked at at once
_UNROLL = 4
_MAX_REGISTERS = 64  # of a thread, for wide tokens: those that look for tokens must not take the room of those that add
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=("size",))
def clear_kernel(COUNTS, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """COUNTS (size,): 0."""
    if PDL:
        gdc_launch_dependents()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(COUNTS + place, tl.zeros([BLOCK], tl.int32), mask=place < size)


@triton.jit(do_not_specialize=("count", "size", "most"))
def bucket_kernel(
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
    """BINS (size, ROOM) of tokens; behind them the places with more than ROOM, and those with more than `most`.

    COUNTS (size + 2,): how many tokens go to each place, and how many places stand in each of the two lists.
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
    """(BC,): the tokens [begin, end) of a list, or of X itself, added up one after the other."""
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
    """(BC,): those of the tokens [begin, end) that go to a place, added up. LIST is room for their numbers."""
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


@triton.jit(do_not_specialize=("count", "size", "most", "helpers", "length"))
def add_kernel(
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
    """OUT (size, C): the sum of the tokens of each place. The first `helpers` programs do the places that have many."""
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
        tokens = tl.where(
            few[:, None] & (slot[None, :] < amount[:, None]), tokens, _NO_TOKEN
        )  # the others were never written
        total = tl.zeros([PLACES, BC], ACC)
        last = tl.zeros([PLACES], tl.int32) - 1
        inside = (columns < C)[None, :]
        for _ in range(
            0, tl.max(tl.where(few, amount, 0), 0), 2
        ):  # the two tokens that follow on the last one
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


@cache
def _launches(
    device: torch.device,
    x: torch.dtype,
    index: torch.dtype,
    acc: tl.dtype,
    capacity: int,
    width: int,
) -> tuple[Launch, Launch, Launch, int, int]:
    """What clears the counts, what fills the bins and what adds, the programs of a token, and the places of a program."""
    if width >= _WIDE_TOKEN:
        tile, warps, options = _WIDE_BYTES // x.itemsize, 2, dict(maxnreg=_MAX_REGISTERS)
    else:
        tile, warps, options = _TILE, 4, {}
    block, pdl = min(triton.next_power_of_2(width), tile), device_info(device).supports_pdl
    places = min(tile // block, _MAX_PLACES)
    clear = Launch(clear_kernel, dict(BLOCK=_CLEAR_BLOCK, PDL=pdl), dict(num_warps=4))
    bucket = Launch(
        bucket_kernel,
        dict(CAPACITY=capacity, BLOCK=_BUCKET_BLOCK, PDL=pdl),
        dict(num_warps=4, launch_pdl=pdl),
    )
    add = Launch(
        add_kernel,
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
    )
    return clear, bucket, add, -(-width // block), places


def _capacity(count: int, size: int) -> int:
    """The size of a bin."""
    return triton.next_power_of_2(max(_MIN_CAPACITY, _CAPACITY_FACTOR * -(-count // size)))


def is_supported(count: int, size: int) -> bool:
    """Whether so many tokens at so many places are added up here."""
    return (
        count <= min(_MAX_TOKENS, _MAX_MEAN * size)
        and size * _capacity(count, size) <= _MAX_TOTAL_CAPACITY
    )


class LaunchConfig:
    """What follows from shapes and dtypes, so that a call only allocates and launches."""

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
        max_tokens = max(capacity, count // MAX_SPLIT_PLACES)  # tokens that one program adds up
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
        self.numbers = count, size, max_tokens
        self.helper_numbers = helpers, length

    @method_on_device
    def run(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """(size, ...): the tokens of x, contiguous, added up at `index`."""
        counts, buckets, parts, out = (
            self.new(*one) for one in (self.counts, self.buckets, self.parts, self.out)
        )
        self.clear(-(-self.cleared // _CLEAR_BLOCK), (counts,), (), (self.cleared,))
        self.bucket(self.filling, (index, counts, buckets), (), self.numbers)
        self.finish(
            self.programs,
            (x, index, counts, buckets, parts, out),
            (),
            (*self.numbers, *self.helper_numbers),
        )
        return out
