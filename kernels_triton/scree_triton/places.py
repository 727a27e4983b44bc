"""Which token goes where: the slots that a mask marks, and the last token that goes to each of numbered places."""
import math
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from .host import on_its_device, start
from .launch import Launch, contiguous, empty

_FEW = 1 << 17  # slots, up to which every program counts all marks before its own
_TILES = {True: (512, 16), False: (4096, 8)}  # by whether they are few: slots at a time, and warps
_SIDE = 16  # neighbors in a thread
_BEFORE = 2048  # numbers at a time that count the marks before
_MOST_CHUNKS = 4096


@triton.jit
def _marked(MASK, first, end, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the slots [first, end), multiples of 8, are marked.

    Booleans are looked at eight at a time, as WORDS, whose multiple by ones has their sum in its highest byte.
    """
    count = tl.zeros([BLOCK], tl.int32)
    each = tl.arange(0, BLOCK)
    if WORDS:
        EIGHT = MASK.to(tl.pointer_type(tl.int64), bitcast=True)
        for at in range(first // 8, end // 8, BLOCK):
            eight = tl.load(EIGHT + at + each, mask=at + each < end // 8, other=0)
            count += ((eight * 0x0101010101010101) >> 56).to(tl.int32)
    else:
        for at in range(first, end, BLOCK):
            count += (tl.load(MASK + at + each, mask=at + each < end, other=0) != 0).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit(do_not_specialize=("slots", "chunk"))
def count_kernel(MASK, COUNTS, slots, chunk, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    """COUNTS (chunks,): how many slots of each chunk but the last are marked."""
    first = tl.program_id(0).to(tl.int64) * chunk
    if first + chunk <= slots:
        tl.store(COUNTS + tl.program_id(0), _marked(MASK, first, first + chunk, WORDS, BLOCK))


@triton.jit(do_not_specialize=("slots", "length", "total", "chunk"))
def mark_kernel(MASK, COUNTS, OFFSETS, SLOTS, slots, length, total, chunk, COUNTED: tl.constexpr, WORDS: tl.constexpr,
                BLOCK: tl.constexpr, SIDE: tl.constexpr, BEFORE: tl.constexpr):
    """SLOTS (total,): the marked slots, and `slots` behind the last one; and the OFFSETS of rows of `length` slots each.

    A program does a chunk of the slots, SIDE neighbors a thread, of two rows at most. What is marked before it is counted,
    where not COUNTED, by the program itself.
    """
    number: tl.constexpr = SLOTS.dtype.element_ty
    first = tl.program_id(0).to(number) * chunk
    each = tl.arange(0, BEFORE)
    if COUNTED:
        before = tl.zeros([BEFORE], number)
        for at in range(0, tl.program_id(0), BEFORE):
            before += tl.load(COUNTS + at + each, mask=at + each < tl.program_id(0), other=0).to(number)
        token = tl.sum(before, 0)
    else:
        token = _marked(MASK, first * 0, first, WORDS, BEFORE).to(number)
    for at in range(0, chunk, BLOCK):
        side = first + at + tl.arange(0, BLOCK // SIDE) * SIDE
        slot = side[:, None] + tl.arange(0, SIDE)[None, :]
        real = (tl.load(MASK + slot, mask=slot < slots, other=0) != 0).to(tl.int32)
        count = tl.sum(real, 1)
        rank = token + (tl.cumsum(count, 0) - count).to(number)  # of the first one of each thread
        place = rank[:, None] + (tl.cumsum(real, 1) - real).to(number)
        tl.store(SLOTS + place, slot, mask=(real > 0) & (place < total))
        row = (side + (length - 1)) // length  # that begins here, if one does
        begin = row * length
        rank += tl.sum(tl.where(slot < begin[:, None], real, 0), 1).to(number)
        tl.store(OFFSETS + row, rank, mask=(begin < side + SIDE) & (begin <= slots))
        token += tl.sum(count, 0).to(number)
    if first + chunk > slots:
        for rest in range(token, total, BEFORE):
            tl.store(SLOTS + rest + each, slots, mask=rest + each < total)


@triton.jit(do_not_specialize=("count", "size"))
def last_kernel(INDEX, LAST, count, size, BLOCK: tl.constexpr):
    """LAST (size,) the greatest of the tokens that go to each place, where it held -1."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(INDEX + token, mask=token < count, other=-1).to(tl.int64)
    tl.atomic_max(LAST + place, token.to(LAST.dtype.element_ty), mask=(place >= 0) & (place < size), sem="relaxed")


@cache
def _launch(kernel: Any, device: torch.device, dtypes: tuple[torch.dtype, ...], warps: int, **constants: int) -> Launch:
    return Launch(kernel, constants, dict(num_warps=warps))


def _counter(count: int) -> torch.dtype:
    """The dtype that counts so far, and by a block or a row further."""
    return torch.int32 if count < 1 << 30 else torch.int64


class _Mark:
    """What follows from shapes and dtypes where the marks of a mask are counted, so that a call only allocates and launches."""

    def __init__(self, device: torch.device, marks: torch.dtype, shape: tuple[int, int], total: int, dtype: torch.dtype,
                 words: bool):
        (n, length), slots = shape, math.prod(shape)
        self.index, self.new = device.index if device.type == "cuda" else None, empty(device.type)
        self.offsets, self.found = (*contiguous((n + 1,)), dtype), (*contiguous((total,)), _counter(max(slots, total)))
        few = slots <= _FEW
        (block, warps), side = _TILES[few], min(_SIDE, 1 << max(length, 1).bit_length() - 1)
        chunk = block * max(1, -(-slots // (block * _MOST_CHUNKS)))
        self.slots, self.chunks = slots, 0 if few else -(-slots // chunk)
        if self.chunks:
            self.counts = *contiguous((self.chunks,)), torch.int32
            self.count = _launch(count_kernel, device, (marks,), 4, WORDS=words, BLOCK=_BEFORE // 4)
        self.mark = _launch(mark_kernel, device, (marks, dtype, self.found[2]), warps, COUNTED=not few, WORDS=words, BLOCK=block,
                            SIDE=side, BEFORE=_BEFORE)
        self.programs, self.numbers = slots // chunk + 1, (slots, length, total, chunk)

    @on_its_device
    def run(self, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The offsets and the slots of a contiguous mask."""
        offsets, found = self.new(*self.offsets), self.new(*self.found)
        if self.slots == 0:
            return offsets.zero_(), found.zero_()
        counts = offsets
        if self.chunks:
            counts = self.new(*self.counts)
            self.count(self.chunks, (mask, counts), (), (self.slots, self.numbers[3]))
        self.mark(self.programs, (mask, counts, offsets, found), (), self.numbers)
        return offsets, found


_marking = lru_cache(1024)(_Mark)


def mark(mask: torch.Tensor, total: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """For a mask (n, length) the offsets of its rows, of a dtype, and the slots (total,) of their tokens; n length for none."""
    mask = mask.contiguous()
    words = mask.dtype == torch.bool and mask.data_ptr() % 16 == 0
    return _marking(mask.device, mask.dtype, mask.shape, total, dtype, words).run(mask)  # type: ignore[no-any-return]


def last(index: torch.Tensor, size: int) -> torch.Tensor:
    """The last token that goes to each place; -1 for none."""
    count = index.shape[0]
    found = torch.full((size,), -1, dtype=_counter(count), device=index.device)
    if count and size:
        launch = _launch(last_kernel, index.device, (index.dtype, found.dtype), 4, BLOCK=256)
        start(launch, -(-count // 256), (index, found), (), (count, size))
    return found


mark_op = torch.library.custom_op("scree_triton::mark", mark, mutates_args=())
last_op = torch.library.custom_op("scree_triton::last", last, mutates_args=())


@mark_op.register_fake
def _(mask, total, dtype):
    return mask.new_empty((mask.shape[0] + 1,), dtype=dtype), mask.new_empty((total,), dtype=_counter(max(mask.numel(), total)))


@last_op.register_fake
def _(index, size):
    return index.new_empty((size,), dtype=_counter(index.shape[0]))


def rejects(call: Any) -> str | None:
    """Why the kernels do not take a `MarkCall`; they always do."""
    return None


def run(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a `MarkCall`."""
    return (mark_op if torch.compiler.is_compiling() else mark)(call.mask, call.total, call.dtype)
