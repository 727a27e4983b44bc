"""Scatter indices: the slots that a mask marks, and the last token with each index."""

import math
from functools import cache, lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..runtime.compile import define_operator, uses_operators
from ..runtime.device import device_info
from ..runtime.fallback import falls_back_to
from ..runtime.launch import (
    Launch,
    Number,
    Pointer,
    bind_args,
    contiguous,
    empty,
    launch_args,
    launch_on_device,
    method_on_device,
)
from .offsets import offsets_from_lengths

# Up to this number of slots, every CTA counts all marked slots before its own slots.
MAX_SLOTS_ONE_PASS = 1 << 17
# Slots per program and warps, by whether one pass is used.
_TILES = {True: (512, 16), False: (1024, 2)}
# Blocks that a CTA of `scatter_indices_count_kernel` counts.
_BLOCKS_PER_PROGRAM = 4
# Maximum number of adjacent slots per thread.
_MAX_PER_THREAD = 8
# Earlier slots that a CTA counts at a time.
_SCAN_BLOCK = 8192


@triton.jit
def _load_marks(MASK, slot, slots, ends):
    """Return 1 for marked slots and 0 for others; `ends` means that some slots may not exist."""
    if ends:
        real = (tl.load(MASK + slot, mask=slot < slots, other=0) != 0).to(tl.int32)
    else:
        real = (tl.load(MASK + slot) != 0).to(tl.int32)
    return real


@triton.jit(do_not_specialize=("slots",))
def scatter_indices_count_kernel(
    MASK, COUNTS, slots, BLOCK: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr
):
    """Write the number of marked slots of each block to COUNTS (blocks,)."""
    block = tl.program_id(0) * BLOCKS_PER_PROGRAM + tl.arange(0, BLOCKS_PER_PROGRAM)
    slot = block.to(tl.int64)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = _load_marks(
        MASK, slot, slots, (tl.program_id(0) + 1).to(tl.int64) * BLOCKS_PER_PROGRAM * BLOCK > slots
    )
    tl.store(COUNTS + block, tl.sum(real, 1), mask=block < slots // BLOCK + 1)


@triton.jit(do_not_specialize=("slots", "length", "total", "filled"))
def scatter_indices_mark_kernel(
    MASK,
    COUNTS,
    OFFSETS,
    SLOTS,
    slots,
    length,
    total,
    filled,
    COUNTED: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_THREAD: tl.constexpr,
    SCAN_BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute SLOTS (total,), the marked slots, and OFFSETS of rows of `length` slots each.

    SLOTS is filled up to `filled` with the number `slots`. A CTA processes one block of slots, with
    PER_THREAD adjacent slots per thread, of at most two rows.

    With COUNTED, COUNTS has the number of marked slots before each block, so a block in which all
    or no slots are marked is not read. Otherwise the CTA counts the marked slots before its block.
    With WORDS it then reads eight booleans as one word. The word times 0x0101010101010101 has their
    sum in its highest byte.
    """
    number: tl.constexpr = SLOTS.dtype.element_ty
    if PDL:
        gdc_wait()
        # With COUNTED, the waiting CTAs would occupy the SMs that the counting CTAs need.
        if not COUNTED:
            gdc_launch_dependents()
    first = tl.program_id(0).to(number) * BLOCK
    each = tl.arange(0, SCAN_BLOCK)
    if COUNTED:
        token = tl.load(COUNTS + tl.program_id(0)).to(number)
        found = tl.load(COUNTS + tl.program_id(0) + 1).to(number) - token
    else:
        # -1: the number of marked slots in the block is not counted yet.
        found = tl.cast(-1, number)
        marks = tl.zeros([SCAN_BLOCK], number)
        if WORDS:
            EIGHT = MASK.to(tl.pointer_type(tl.int64), bitcast=True)
            for at in range(0, first // 8, SCAN_BLOCK):
                eight = tl.load(EIGHT + at + each, mask=at + each < first // 8, other=0)
                marks += ((eight * 0x0101010101010101) >> 56).to(number)
        else:
            for at in range(0, first, SCAN_BLOCK):
                marks += (tl.load(MASK + at + each, mask=at + each < first, other=0) != 0).to(
                    number
                )
        token = tl.sum(marks, 0)
    side = first + tl.arange(0, BLOCK // PER_THREAD) * PER_THREAD
    slot = side[:, None] + tl.arange(0, PER_THREAD)[None, :]
    # The row that begins in the slots of the thread, if any.
    row = (side + (length - 1)) // length
    begin = row * length
    begins = (begin < side + PER_THREAD) & (begin <= slots)
    if found == 0:
        tl.store(OFFSETS + row, token + side * 0, mask=begins)
    elif found == BLOCK:
        rank = token + (slot - first)
        tl.store(SLOTS + rank, slot, mask=rank < total)
        tl.store(OFFSETS + row, token + (begin - first), mask=begins)
    else:
        real = _load_marks(MASK, slot, slots, first + BLOCK > slots)
        count = tl.sum(real, 1)
        before = token + (tl.cumsum(count, 0) - count).to(number)
        rank = before[:, None] + (tl.cumsum(real, 1) - real).to(number)
        tl.store(SLOTS + rank, slot, mask=(real > 0) & (rank < total))
        tl.store(
            OFFSETS + row,
            before + tl.sum(tl.where(slot < begin[:, None], real, 0), 1).to(number),
            mask=begins,
        )
        found = tl.sum(count, 0).to(number)
    if first + BLOCK > slots:
        for rest in range(token + found, filled, SCAN_BLOCK):
            tl.store(SLOTS + rest + each, slots, mask=rest + each < filled)


@triton.jit(do_not_specialize=("count", "size"))
def scatter_indices_last_kernel(INDEX, LAST, count, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Compute LAST (size,), the last token with each index; the caller fills LAST with -1."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(INDEX + token, mask=token < count, other=-1).to(tl.int64)
    tl.atomic_max(
        LAST + place,
        token.to(LAST.dtype.element_ty),
        mask=(place >= 0) & (place < size),
        sem="relaxed",
    )


@launch_args
class CountArgs:
    """Arguments of `scatter_indices_count_kernel`."""

    MASK: Pointer
    COUNTS: Pointer
    slots: Number


@launch_args
class MarkArgs:
    """Arguments of `scatter_indices_mark_kernel`."""

    MASK: Pointer
    COUNTS: Pointer
    OFFSETS: Pointer
    SLOTS: Pointer
    slots: Number
    length: Number
    total: Number
    filled: Number


@launch_args
class LastArgs:
    """Arguments of `scatter_indices_last_kernel`."""

    INDEX: Pointer
    LAST: Pointer
    count: Number
    size: Number


@cache
def _launch(
    kernel: Any,
    args: Any,
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    warps: int,
    **constants: int,
) -> Launch:
    options = dict(num_warps=warps, launch_pdl=constants.get("PDL", False))
    return Launch(kernel, constants, options, args=args)


def _index_dtype(count: int) -> torch.dtype:
    """Return the dtype for numbers up to `count`, plus a block or a row."""
    return torch.int32 if count < 1 << 30 else torch.int64


class _MarkConfig:
    """Launch config of `mask_indices`: depends on shapes and dtypes only."""

    def __init__(
        self,
        device: torch.device,
        marks: torch.dtype,
        shape: tuple[int, int],
        total: int | None,
        dtype: torch.dtype,
        words: bool,
    ):
        (n, length), slots = shape, math.prod(shape)
        total, filled = (slots, 0) if total is None else (total, total)
        self.index, self.new = device.index if device.type == "cuda" else None, empty(device.type)
        self.offsets, self.found = (
            (*contiguous((n + 1,)), dtype),
            (*contiguous((total,)), _index_dtype(max(slots, total))),
        )
        self.few, self.slots = slots <= MAX_SLOTS_ONE_PASS, slots
        (block, warps), side = (
            _TILES[self.few],
            min(_MAX_PER_THREAD, 1 << max(length, 1).bit_length() - 1),
        )
        self.programs = slots // block + 1
        self.mark_args = bind_args(MarkArgs, slots=slots, length=length, total=total, filled=filled)
        self.counts = *contiguous((self.programs,)), torch.int32
        self.count = _launch(
            scatter_indices_count_kernel,
            CountArgs,
            device,
            (marks,),
            2,
            BLOCK=block,
            BLOCKS_PER_PROGRAM=_BLOCKS_PER_PROGRAM,
        )
        self.mark = _launch(
            scatter_indices_mark_kernel,
            MarkArgs,
            device,
            (marks, dtype, self.found[2]),
            warps,
            COUNTED=not self.few,
            WORDS=words,
            BLOCK=block,
            PER_THREAD=side,
            SCAN_BLOCK=_SCAN_BLOCK,
            PDL=device_info(device).supports_pdl,
        )

    @method_on_device
    def run(self, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the offsets and the slots of a contiguous mask."""
        begins, found = self.new(*self.offsets), self.new(*self.found)
        if self.slots == 0:
            return begins.zero_(), found.zero_()
        counts = begins
        if not self.few:
            counts = self.new(*self.counts)
            args = CountArgs(MASK=mask, COUNTS=counts, slots=self.slots)
            self.count(-(-self.programs // _BLOCKS_PER_PROGRAM), args)
            counts = offsets_from_lengths(counts, self.found[2])
        args = self.mark_args(MASK=mask, COUNTS=counts, OFFSETS=begins, SLOTS=found)
        self.mark(self.programs, args)
        return begins, found


mark_config = lru_cache(1024)(_MarkConfig)


def mask_indices(
    mask: torch.Tensor, total: int | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the offsets of the rows of a mask (n, length), and the slots (total,) of their tokens.

    Slots after the last token are n * length. If `total` is None, the result has n * length slots,
    and the slots after the last token are not written.
    """
    mask = mask.contiguous()
    words = mask.dtype == torch.bool and mask.data_ptr() % 16 == 0
    return mark_config(mask.device, mask.dtype, mask.shape, total, dtype, words).run(mask)


def last_tokens(index: torch.Tensor, size: int) -> torch.Tensor:
    """Return the last token with each index; -1 for none."""
    count = index.shape[0]
    found = torch.full((size,), -1, dtype=_index_dtype(count), device=index.device)
    if count and size:
        launch = _launch(
            scatter_indices_last_kernel,
            LastArgs,
            index.device,
            (index.dtype, found.dtype),
            4,
            BLOCK=256,
            PDL=device_info(index.device).supports_pdl,
        )
        args = LastArgs(INDEX=index, LAST=found, count=count, size=size)
        launch_on_device(launch, -(-count // 256), args)
    return found


def _mask_indices_fake(mask, total, dtype):
    total = mask.numel() if total is None else total
    return mask.new_empty((mask.shape[0] + 1,), dtype=dtype), mask.new_empty(
        (total,), dtype=_index_dtype(max(mask.numel(), total))
    )


def _standard_mask_indices(
    mask: torch.Tensor, total: int | None, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    marked, slots = mask.bool(), mask.numel()
    total = slots if total is None else total
    offsets = torch.nn.functional.pad(marked.sum(1).cumsum(0, dtype=dtype), (1, 0))
    number = torch.arange(slots, device=mask.device)
    # Tokens come first, in order; slots that hold none sort to the end.
    found, _ = torch.where(marked.flatten(), number, slots).sort()
    found = torch.nn.functional.pad(found[:total], (0, max(total - slots, 0)), value=slots)
    return offsets, found.to(_index_dtype(max(slots, total)))


mask_indices_op = define_operator(
    "mark", falls_back_to(_standard_mask_indices)(mask_indices), _mask_indices_fake
)


def _last_tokens_fake(index, size):
    return index.new_empty((size,), dtype=_index_dtype(index.shape[0]))


def _standard_last_tokens(index: torch.Tensor, size: int) -> torch.Tensor:
    tokens = torch.arange(index.shape[0], device=index.device)
    places = torch.where((index >= 0) & (index < size), index, size).long()
    last = torch.full((size + 1,), -1, device=index.device)
    last.scatter_reduce_(0, places, tokens, "amax")
    return last[:size].to(_index_dtype(index.shape[0]))


last_tokens_op = define_operator(
    "last",
    falls_back_to(_standard_last_tokens, f"{__package__}.interface")(last_tokens),
    _last_tokens_fake,
)


def rejects(call: Any) -> str | None:
    """Return None: the kernels support every `MarkCall`."""
    return None


def mark(call: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute a `MarkCall`."""
    return (mask_indices_op if uses_operators(call.mask) else mask_indices)(
        call.mask, call.total, call.dtype
    )
