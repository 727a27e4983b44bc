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

from ..runtime.autograd import follows, multiprocessors, on_its_device
from ..runtime.launch import Launch, contiguous, empty

_MOST_TOKENS = (
    1 << 17
)  # beyond, looking for many tokens of many places takes longer than sorting all
_MOST_EACH = 8  # tokens a place on average
_MOST_ROOM = 1 << 22  # of all bins together
_ROOM = 4  # times the average, so that hardly any bin is too small; and at least
_LEAST_ROOM = 16
_STRETCHES = 32
_MANY = 128  # places can have more tokens than one program adds up
_HELPERS = 4  # programs a multiprocessor that look for tokens
_TILE = 2048  # elements of narrow tokens at once
_WIDE_TOKEN = 128  # elements, from which on a tile has so many bytes, which two warps read:
_WIDE_BYTES = 2048
_MOST_PLACES = 128  # of a program
_CLEARED = 1024  # counts of a program
_TOKENS = 128  # that a program puts into bins
_SEEN = 1024  # numbers of places that are looked at at once
_AT_ONCE = 4
_REGISTERS = 64  # of a thread, for wide tokens: those that look for tokens must not take the room of those that add
_NONE = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=("size",))
def clear_kernel(COUNTS, size, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """COUNTS (size,): 0."""
    if CHAINED:
        gdc_launch_dependents()
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(COUNTS + place, tl.zeros([BLOCK], tl.int32), mask=place < size)


@triton.jit(do_not_specialize=("count", "size", "most"))
def bin_kernel(
    INDEX,
    COUNTS,
    BINS,
    count,
    size,
    most,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """BINS (size, ROOM) of tokens; behind them the places with more than ROOM, and those with more than `most`.

    COUNTS (size + 2,): how many tokens go to each place, and how many places stand in each of the two lists.
    """
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(INDEX + token, mask=token < count, other=-1).to(tl.int64)
    known = (place >= 0) & (place < size)
    if CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    before = tl.atomic_add(COUNTS + place, 1, mask=known, sem="relaxed")
    tl.store(BINS + place * ROOM + before, token, mask=known & (before < ROOM))
    LISTS = BINS + tl.cast(size, tl.int64) * ROOM
    for i in tl.static_range(2):
        over = known & (before == (most if i else ROOM))
        number = tl.atomic_add(
            COUNTS + size + i + tl.zeros([BLOCK], tl.int32), 1, mask=over, sem="relaxed"
        )
        tl.store(LISTS + i * (count // ROOM + 1) + number, place.to(tl.int32), mask=over)


@triton.jit
def _in_turn(
    X,
    LIST,
    begin,
    end,
    columns,
    C: tl.constexpr,
    BC: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LISTED: tl.constexpr,
    ACC: tl.constexpr,
):
    """(BC,): the tokens [begin, end) of a list, or of X itself, added up one after the other."""
    total = tl.zeros([BC], ACC)
    for first in range(begin, end, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            at = first + i
            token = tl.cast(tl.load(LIST + at, mask=at < end, other=0) if LISTED else at, tl.int64)
            total += tl.load(X + token * C + columns, mask=(columns < C) & (at < end), other=0).to(
                ACC
            )
    return total


@triton.jit
def _of_stretch(
    X,
    INDEX,
    LIST,
    place,
    begin,
    end,
    columns,
    C: tl.constexpr,
    BC: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
):
    """(BC,): those of the tokens [begin, end) that go to a place, added up. LIST is room for their numbers."""
    found = begin * 0
    for first in range(begin, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        here = (tl.load(INDEX + token, mask=token < end, other=-1).to(tl.int64) == place).to(
            tl.int32
        )
        count = tl.sum(here, 0)
        if count > 0:
            tl.store(LIST + found + tl.cumsum(here, 0) - 1, token, mask=here > 0)
        found += count
    tl.debug_barrier()
    total = _in_turn(X, LIST, 0, found, columns, C, BC, AT_ONCE, True, ACC)
    tl.debug_barrier()
    return total


@triton.jit(do_not_specialize=("count", "size", "most", "helpers", "length"))
def add_kernel(
    X,
    INDEX,
    COUNTS,
    BINS,
    PARTS,
    OUT,
    count,
    size,
    most,
    helpers,
    length,
    ROOM: tl.constexpr,
    STRETCHES: tl.constexpr,
    C: tl.constexpr,
    BC: tl.constexpr,
    PLACES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    BLOCK: tl.constexpr,
    ACC: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """OUT (size, C): the sum of the tokens of each place. The first `helpers` programs do the places that have many."""
    COLUMNS: tl.constexpr = (C + BC - 1) // BC
    if CHAINED:
        gdc_wait()
    if tl.program_id(0) < helpers:
        MANY = BINS + tl.cast(size, tl.int64) * ROOM
        MOST = MANY + (count // ROOM + 1)
        LIST = (
            MOST
            + (count // (most + 1) + 1)
            + tl.program_id(0).to(tl.int64) * tl.maximum(length, most)
        )
        parts = tl.load(COUNTS + size + 1) * STRETCHES
        for item in range(tl.program_id(0), (parts + tl.load(COUNTS + size)) * COLUMNS, helpers):
            job, column = item // COLUMNS, item % COLUMNS
            columns = column * BC + tl.arange(0, BC)
            if job < parts:
                number = job // STRETCHES
                place = tl.load(MOST + number).to(tl.int64)
                begin = job % STRETCHES * length
                part = _of_stretch(
                    X,
                    INDEX,
                    LIST,
                    place,
                    begin,
                    tl.minimum(begin + length, count),
                    columns,
                    C,
                    BC,
                    AT_ONCE,
                    BLOCK,
                    ACC,
                )
                tl.store(PARTS + tl.cast(job, tl.int64) * C + columns, part, mask=columns < C)
                tl.debug_barrier()
                done = tl.atomic_add(
                    COUNTS + size + 2 + number * COLUMNS + column, 1, sem="acq_rel"
                )
                if done == STRETCHES - 1:
                    tl.debug_barrier()
                    total = _in_turn(
                        PARTS,
                        LIST,
                        number * STRETCHES,
                        number * STRETCHES + STRETCHES,
                        columns,
                        C,
                        BC,
                        AT_ONCE,
                        False,
                        ACC,
                    )
                    tl.store(
                        OUT + place * C + columns, total.to(OUT.dtype.element_ty), mask=columns < C
                    )
            else:
                place = tl.load(MANY + (job - parts)).to(tl.int64)
                if tl.load(COUNTS + place) <= most:
                    total = _of_stretch(
                        X, INDEX, LIST, place, job * 0, count, columns, C, BC, AT_ONCE, BLOCK, ACC
                    )
                    tl.store(
                        OUT + place * C + columns, total.to(OUT.dtype.element_ty), mask=columns < C
                    )
    else:
        program = tl.program_id(0) - helpers
        columns = program % COLUMNS * BC + tl.arange(0, BC)
        place = (program // COLUMNS).to(tl.int64) * PLACES + tl.arange(0, PLACES)
        amount = tl.load(COUNTS + place, mask=place < size, other=0)
        few = amount <= ROOM
        slot = tl.arange(0, ROOM)
        tokens = tl.load(
            BINS + place[:, None] * ROOM + slot[None, :], mask=(place < size)[:, None], other=0
        )
        tokens = tl.where(
            few[:, None] & (slot[None, :] < amount[:, None]), tokens, _NONE
        )  # the others were never written
        total = tl.zeros([PLACES, BC], ACC)
        last = tl.zeros([PLACES], tl.int32) - 1
        inside = (columns < C)[None, :]
        for _ in range(
            0, tl.max(tl.where(few, amount, 0), 0), 2
        ):  # the two tokens that follow on the last one
            one = tl.min(tl.where(tokens > last[:, None], tokens, _NONE), 1)
            last = tl.min(tl.where(tokens > one[:, None], tokens, _NONE), 1)
            x = tl.load(
                X + one.to(tl.int64)[:, None] * C + columns[None, :],
                mask=(one < _NONE)[:, None] & inside,
                other=0,
            )
            y = tl.load(
                X + last.to(tl.int64)[:, None] * C + columns[None, :],
                mask=(last < _NONE)[:, None] & inside,
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
    device: torch.device, x: torch.dtype, index: torch.dtype, acc: tl.dtype, room: int, width: int
) -> tuple[Launch, Launch, Launch, int, int]:
    """What clears the counts, what fills the bins and what adds, the programs of a token, and the places of a program."""
    if width >= _WIDE_TOKEN:
        tile, warps, options = _WIDE_BYTES // x.itemsize, 2, dict(maxnreg=_REGISTERS)
    else:
        tile, warps, options = _TILE, 4, {}
    block, chained = min(triton.next_power_of_2(width), tile), follows(device)
    places = min(tile // block, _MOST_PLACES)
    clear = Launch(clear_kernel, dict(BLOCK=_CLEARED, CHAINED=chained), dict(num_warps=4))
    fill = Launch(
        bin_kernel,
        dict(ROOM=room, BLOCK=_TOKENS, CHAINED=chained),
        dict(num_warps=4, launch_pdl=chained),
    )
    add = Launch(
        add_kernel,
        dict(
            ROOM=room,
            STRETCHES=_STRETCHES,
            C=width,
            BC=block,
            PLACES=places,
            AT_ONCE=_AT_ONCE,
            BLOCK=_SEEN,
            ACC=acc,
            CHAINED=chained,
        ),
        dict(num_warps=warps, launch_pdl=chained, **options),
    )
    return clear, fill, add, -(-width // block), places


def _room(count: int, size: int) -> int:
    """The size of a bin."""
    return triton.next_power_of_2(max(_LEAST_ROOM, _ROOM * -(-count // size)))


def suits(count: int, size: int) -> bool:
    """Whether so many tokens at so many places are added up here."""
    return count <= min(_MOST_TOKENS, _MOST_EACH * size) and size * _room(count, size) <= _MOST_ROOM


class Plan:
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
        room = _room(count, size)
        most = max(room, count // _MANY)  # tokens that one program adds up
        length = -(-count // _STRETCHES)
        self.clear, self.fill, self.finish, columns, places = _launches(
            device, x, index, acc, room, width
        )
        helpers, many, self.filling = (
            _HELPERS * multiprocessors(device),
            count // (most + 1) + 1,
            -(-count // _TOKENS),
        )
        self.index, self.new = device.index if device.type == "cuda" else None, empty(device.type)
        self.programs = helpers + -(-size // places) * columns
        self.cleared = size + 2 + many * columns
        self.counts = *contiguous((self.cleared,)), torch.int32
        self.bins = (
            *contiguous((size * room + count // room + 1 + many + helpers * max(length, most),)),
            torch.int32,
        )
        self.parts = *contiguous((many * _STRETCHES, width)), wide
        self.out = *contiguous((size, *shape[1:])), x
        self.numbers = count, size, most
        self.more = helpers, length

    @on_its_device
    def run(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """(size, ...): the tokens of x, contiguous, added up at `index`."""
        counts, bins, parts, out = (
            self.new(*one) for one in (self.counts, self.bins, self.parts, self.out)
        )
        self.clear(-(-self.cleared // _CLEARED), (counts,), (), (self.cleared,))
        self.fill(self.filling, (index, counts, bins), (), self.numbers)
        self.finish(
            self.programs, (x, index, counts, bins, parts, out), (), (*self.numbers, *self.more)
        )
        return out
