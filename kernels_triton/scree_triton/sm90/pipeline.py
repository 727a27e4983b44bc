"""TMA rings, barriers, tile fetching and warp-group products of warp-specialized CTAs on Hopper.

A CTA has one producer warp and up to three consumer warp groups of 64 rows each (Shah et al.,
FlashAttention-3, 2024, arXiv:2407.08608). The producer warp fetches tiles from a counter, longest
first, and fills rings of shared memory by TMA. The consumer warp groups multiply on the tensor
cores.

Descriptors are ragged (see `descriptors.Ragged`): TMA itself ends at a row's last token and fills with
zeros. So no tile ever holds a token of another row.

A head is read as PARTS parts of BLOCK_D numbers:

========== ========================
HEAD_DIM   parts
========== ========================
up to 64   one of 32 or 64
65 to 96   three of 32, or two of 64
97 to 128  one of 128
129 to 160 five of 32, or three of 64
161 to 192 three of 64
193 to 256 two of 128
========== ========================

Where the parts are wider than HEAD_DIM, TMA fills the rest with zeros. The heads of v have
HEAD_DIM_V, BLOCK_DV and PARTS_V. A slot of a ring holds the parts of one operand. Products that sum
over the head dimension add up over the parts. Products that produce the head dimension return a tuple
of accumulators. Each accumulator has the columns of one part or of several adjacent parts.
"""

from collections.abc import Callable, Iterator
from functools import cache
from itertools import cycle

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..runtime.device import current_stream, persistent_zeros
from ..runtime.recording import recorded_zeros

# Triton 3.8 renamed these functions.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
start_copy = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared

#: The extent of a ragged descriptor's token dimension.
RAGGED_EXTENT = gl.constexpr(1 << 30)
_COUNTERS_PER_STREAM = 4096


@cache
def tile_counters(device: torch.device) -> Callable[[], torch.Tensor]:
    """Return a function that returns tile counters at 0 for the next launches on the device.

    Every launch leaves the counter that it uses at 0. All kernels use counter 0, except the kernel of dK
    and dV. That kernel may begin before the dQ kernel ends, so it uses counter 1.

    Streams run concurrently, so each stream has its own ring of counters. The ring is far longer
    than a device's queue of launches. A captured graph may be replayed at any time, so it gets
    counters that nothing else uses.
    """
    if device.type == "meta":
        return lambda: recorded_zeros((4,), torch.int32)
    index, rings = device.index, dict[int, Iterator[torch.Tensor]]()

    def next_counters() -> torch.Tensor:
        stream = current_stream(index)
        # CUDA cannot capture the default stream, which is 0.
        if stream and torch.cuda.is_current_stream_capturing():
            return torch.zeros(4, dtype=torch.int32, device=device)
        ring = rings.get(stream)
        if ring is None:
            # 16 bytes apart, as Triton specializes a kernel on the alignment of its pointers.
            counters = persistent_zeros((_COUNTERS_PER_STREAM, 4), torch.int32, device)
            ring = rings[stream] = cycle(counters.unbind())
        return next(ring)

    return next_counters


# --- Shared memory and TMA
@gluon.jit
def allocate_ring(desc, slots: gl.constexpr):
    """Allocate shared memory for `slots` tiles of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [slots] + desc.block_shape, desc.layout)


@gluon.jit
def head_coordinate(head, stride_h, ring):
    """Return the TMA coordinate of a head.

    It is the head's index where heads are a dimension of their own, otherwise its first column.
    """
    if len(ring.shape) == 6:
        return head
    else:
        return head * stride_h


@gluon.jit
def ragged_coordinates(offset, seqlen, row, head_coord, part, tile):
    """Return the coordinates in a ragged descriptor of a part, from token `row` of a row on."""
    WIDTH: gl.constexpr = tile.shape[len(tile.shape) - 1]
    # Heads are a dimension of their own where TMA must fill the last part with zeros.
    if len(tile.shape) == 5:
        return (
            RAGGED_EXTENT,
            offset + seqlen,
            RAGGED_EXTENT - seqlen + row,
            head_coord,
            part * WIDTH,
        )
    else:
        return (
            RAGGED_EXTENT,
            offset + seqlen,
            RAGGED_EXTENT - seqlen + row,
            head_coord + part * WIDTH,
        )


@gluon.jit
def load_slot(desc, offset, seqlen, row, head_coord, barrier, ring, slot, PARTS: gl.constexpr):
    """Start the TMA load of tokens into a slot of a ring, one tile per part of the operand."""
    for p in gl.static_range(PARTS):
        tile = ring.index(slot * PARTS + p)
        tma_load(desc, ragged_coordinates(offset, seqlen, row, head_coord, p, tile), barrier, tile)


@gluon.jit
def store_slot(desc, offset, seqlen, row, head_coord, ring, slot, PARTS: gl.constexpr):
    """Start the TMA store of a slot of a ring; tokens after the end of the row are not written."""
    for p in gl.static_range(PARTS):
        tile = ring.index(slot * PARTS + p)
        tma_store(desc, ragged_coordinates(offset, seqlen, row, head_coord, p, tile), tile)


@gluon.constexpr_function
def slot_bytes(ring, parts):
    """Return the size of a slot of a ring in bytes."""
    return ring.shape[3] * ring.shape[-1] * ring.dtype.primitive_bitwidth // 8 * parts


@gluon.jit
def as_matrix(tile):
    """Return a (1, 1, rows, columns) or (1, 1, rows, 1, columns) tile as a matrix."""
    return tile.reshape([tile.shape[2], tile.shape[len(tile.shape) - 1]])


@gluon.jit
def slot_parts(ring, slot, PARTS: gl.constexpr):
    """Return the tiles in a slot of a ring as matrices."""
    parts = ()
    for p in gl.static_range(PARTS):
        parts += (as_matrix(ring.index(slot * PARTS + p)),)
    return parts


# --- Warp-group products
# Parts of 32 or 64 columns are adjacent panels of one matrix in shared memory. So one product can produce
# several parts, in less time than products of one part each. The last part has a product of its own,
# because the number of columns of a product is a power of two. This product ends with the head.
@gluon.constexpr_function
def product_widths(block, parts, dim):
    """Return the columns of each product that produces `dim` columns in parts of `block`."""
    if parts < 2 or block > 64:
        return [block] * parts
    before = block * (parts - 1)
    last = next(x for x in (16, 32, 64) if x >= min(dim - before, block))
    # A last part of 64 columns that is needed in full gains little from a product for the others.
    if before not in (64, 128) or last == 64:
        return [block] * parts
    return [before, last]


@gluon.constexpr_function
def _num_products(block, parts, dim):
    return len(product_widths(block, parts, dim))


@gluon.constexpr_function
def _last_width(block, parts, dim):
    return product_widths(block, parts, dim)[-1]


@gluon.constexpr_function
def _accumulator_layout(block, parts, dim, i):
    """Return the layout of the result of product `i`."""
    width = product_widths(block, parts, dim)[i]
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])


@gluon.constexpr_function
def _matrix_layout(ring):
    """Return the layout of adjacent parts of a ring as one matrix, with the swizzle of a part."""
    return gl.NVMMASharedLayout(
        ring.shape[-1] * ring.dtype.primitive_bitwidth // 8, ring.dtype.primitive_bitwidth, 2
    )


@gluon.jit
def as_wide_matrix(ring, part, width: gl.constexpr):
    """Return the first `width` columns of the parts of a ring from `part` on, as a matrix."""
    BLOCK: gl.constexpr = ring.shape[len(ring.shape) - 1]
    tile = as_matrix(ring.index(part))
    if width > BLOCK:
        return tile._reinterpret(ring.dtype, [tile.shape[0], width], _matrix_layout(ring))
    elif width < BLOCK:
        return tile.slice(0, width, 1)
    else:
        return tile


@gluon.jit
def operand_parts(ring, slot, PARTS: gl.constexpr, DIM: gl.constexpr):
    """Return the parts of a head in a slot of a ring as matrices.

    Columns after DIM are left out of the last part, if they are the last 16.
    """
    BLOCK: gl.constexpr = ring.shape[len(ring.shape) - 1]
    LAST: gl.constexpr = _last_width(BLOCK, PARTS, DIM)
    parts = ()
    for p in gl.static_range(PARTS):
        parts += (as_wide_matrix(ring, slot * PARTS + p, LAST if p == PARTS - 1 else BLOCK),)
    return parts


@gluon.jit
def load_parts(parts, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the first COUNT parts of an operand into registers, as the left side of a product.

    The product then reads only its right side from shared memory.
    """
    loaded = ()
    for p in gl.static_range(len(parts)):
        if p < COUNT:
            loaded += (parts[p].load(gl.DotOperandLayout(0, LAYOUT, 2)),)
        else:
            loaded += (parts[p],)
    return loaded


@gluon.jit
def _zeros(rows: gl.constexpr, LAYOUT: gl.constexpr):
    COLUMNS: gl.constexpr = LAYOUT.instr_shape[1]
    return gl.zeros([rows, COLUMNS], gl.float32, LAYOUT)


@gluon.jit
def scale_rows(part, factor):
    """Multiply the rows of an accumulator; a row with the factor 0 becomes 0, even if it is NaN."""
    factor = gl.convert_layout(factor, gl.SliceLayout(1, part.type.layout))[:, None]
    return gl.where(factor == 0.0, 0.0, part * factor)


@gluon.constexpr_function
def columns_layout(columns):
    """Return a layout of a tile of this width, with 8 adjacent numbers per thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def zero_accumulators(
    rows: gl.constexpr, BLOCK: gl.constexpr, PARTS: gl.constexpr, DIM: gl.constexpr
):
    """Return accumulators for the DIM columns of an output."""
    parts = ()
    for i in gl.static_range(_num_products(BLOCK, PARTS, DIM)):
        parts += (_zeros(rows, _accumulator_layout(BLOCK, PARTS, DIM, i)),)
    return parts


@gluon.jit
def start_mma_transposed(a, ring, slot, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Start a @ b^T, with b in a slot of a ring and both in parts of their columns.

    Each product takes as many columns of b as the part of a has, see `operand_parts`.
    """
    ROWS: gl.constexpr = a[0].shape[0]
    COLUMNS: gl.constexpr = LAYOUT.instr_shape[1]
    x = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    for p in gl.static_range(PARTS):
        b = as_wide_matrix(ring, slot * PARTS + p, a[p].shape[1])
        x = warpgroup_mma(a[p], b.permute((1, 0)), x, use_acc=p > 0, is_async=True)
    return x


@gluon.jit
def start_mma(a, ring, slot, acc, PARTS: gl.constexpr):
    """Start acc + a @ b, with b in a slot of a ring; one product per accumulator."""
    BLOCK: gl.constexpr = ring.shape[len(ring.shape) - 1]
    STEP: gl.constexpr = acc[0].shape[1] // BLOCK
    parts = ()
    for i in gl.static_range(len(acc)):
        b = as_wide_matrix(ring, slot * PARTS + i * STEP, acc[i].shape[1])
        parts += (warpgroup_mma(a, b, acc[i], is_async=True),)
    return parts


@gluon.jit
def wait_mma(pending: gl.constexpr, acc, a):
    """Wait for the products of `start_mma`, leaving `pending` later products in flight."""
    COUNT: gl.constexpr = len(acc)
    done = warpgroup_mma_wait(pending, deps=acc + (a,))
    return done[:COUNT]


# --- Barriers
# One thread arrives for all warps of a partition, and every warp polls. If the thread arrived while
# another warp still polls, the other side could use the slot again, complete the next phase of the
# same parity, and leave the slow warp waiting forever (Triton's pull request 10035). It cannot:
# - Consumers: Triton puts a barrier of the warp group before each arrival. So all four warps have
#   left every earlier wait.
# - Producers have one warp. Its phases complete by the bytes of TMA loads, which one elected lane
#   issues after all lanes have met. Arrivals without bytes follow a barrier of the warp.
# - The loads of STATS (`cp.async`) are counted by every lane before that meeting. So the phase
#   cannot complete before them.
# `tests/barrier_paths.py` checks these barriers on every path of the compiled kernels.
@gluon.jit
def allocate_barriers(count: gl.constexpr, arrivals: gl.constexpr):
    """Allocate `count` mbarriers that complete after `arrivals` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(count):
        mbarrier.init(bars.index(s), count=arrivals)
    return bars


@gluon.constexpr_function
def _named_barrier(kind, wg, consumers):
    return f"bar.{kind} {10 + wg % consumers}, 256; mov.b32 $0, $1;"


@gluon.jit
def ping_pong_wait(wg: gl.constexpr, x, CONSUMERS: gl.constexpr):
    """Wait until the previous warp group has issued its products; x is any number.

    Gluon has no named barriers, so this is inline assembly.
    """
    if CONSUMERS > 1:
        gl.inline_asm_elementwise(
            _named_barrier("sync", wg, CONSUMERS), "=r,r", [x], gl.int32, False, 1
        )


@gluon.jit
def ping_pong_arrive(wg: gl.constexpr, x, CONSUMERS: gl.constexpr):
    """Let the next warp group issue its products; x is any number."""
    if CONSUMERS > 1:
        gl.inline_asm_elementwise(
            _named_barrier("arrive", wg + 1, CONSUMERS), "=r,r", [x], gl.int32, False, 1
        )


@gluon.jit
def pdl_launch_dependents(x):
    """Let the next kernel start on SMs that this one leaves, if it was launched with PDL.

    PDL is programmatic dependent launch; x is any number.
    """
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1
    )


@gluon.jit
def pdl_wait(x):
    """Wait for the end of the previous kernel; x is any number."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1
    )


# --- Blocks of rings
@gluon.jit
def start_mma_when_full(
    a, ring, full, step, PARTS: gl.constexpr, LAYOUT: gl.constexpr, STAGES: gl.constexpr
):
    """Wait for block `step` of a ring, b, and start a @ b^T."""
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    return start_mma_transposed(a, ring, step % STAGES, PARTS, LAYOUT)


@gluon.jit
def skip_blocks(
    wg: gl.constexpr,
    blocks,
    a_full,
    a_empty,
    b_full,
    b_empty,
    step,
    STAGES: gl.constexpr,
    PING_PONG: gl.constexpr,
):
    """Release blocks that this warp group does not need, and return the next step."""
    for _ in range(blocks):
        stage = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(a_full.index(stage), phase)
        mbarrier.arrive(a_empty.index(stage), count=1)
        mbarrier.wait(b_full.index(stage), phase)
        mbarrier.arrive(b_empty.index(stage), count=1)
        ping_pong_wait(wg, step, PING_PONG)
        ping_pong_arrive(wg, step, PING_PONG)
        step += 1
    return step


# --- Tiles: the producer warp fetches and publishes them, the consumer warp groups receive them
@gluon.jit
def fetch_tile(COUNTER, total_tiles):
    """Return the index of the next tile.

    All CTAs together make as many additions as there are tiles, so the last addition resets the
    counter.
    """
    tile_id = gl.atomic_add(COUNTER, 1, sem="relaxed")
    if tile_id == total_tiles - 1:
        gl.store(COUNTER, 0)
    return tile_id + gl.num_programs(0)


@gluon.jit
def tile_entry(TILES, tile_id, num_tiles, total_tiles, heads_in_l2):
    """Return a tile's entry in the schedule, and its head.

    Tiles come longest first, `heads_in_l2` heads at a time so that their keys share the L2 cache.
    """
    head_block = tile_id // (num_tiles * heads_in_l2)
    r = tile_id - head_block * (num_tiles * heads_in_l2)
    return (
        TILES + gl.where(tile_id < total_tiles, 8 * (r // heads_in_l2 + 1), 0),
        head_block * heads_in_l2 + r % heads_in_l2,
    )


@gluon.jit
def load_tile(tile):
    """Return the fields of a tile's entry.

    They are the row's offset and length, the other side's offset and length, and the first token.
    """
    return gl.load(tile), gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3), gl.load(tile + 4)


@gluon.jit
def allocate_tile_queue(slots: gl.constexpr = 2, MERGED: gl.constexpr = False):
    """Allocate room for the entries of two tiles, the current one and the next one.

    Each entry has one copy per lane of the producer warp. If MERGED, the attended tokens of the
    tile's tokens follow.
    """
    SIZE: gl.constexpr = 512 if MERGED else 256
    return gl.allocate_shared_memory(gl.int32, [slots, SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def publish_tile(slot, tile, tile_id, total_tiles, head, CHUNKED: gl.constexpr = False):
    """Copy a tile's entry to the consumers' queue; a length of 0 stops them.

    Field 5 becomes the head. With CHUNKED, field 2 becomes the former field 5.

    Every lane writes its own copy. The consumers read the copy of the first lane, which is the lane
    that arrives at barriers: an arrival orders the writes of its own thread only.
    """
    e = gl.arange(0, 32 * 8, gl.BlockedLayout([8], [32], [1], [0])) % 8
    entry = gl.load(tile + e)
    if CHUNKED:
        entry = gl.where(e == 2, gl.load(tile + 5), entry)
    entry = gl.where(e == 5, head, entry)
    slot.slice(0, 32 * 8).store(gl.where(tile_id < total_tiles, entry, 0))


@gluon.jit
def publish_attended(slot, attended, total, offset, seqlen, start, barrier):
    """Start the copy of the attended tokens of a tile's tokens to the consumers' queue.

    `attended` holds the attended tokens of all `total` tokens, see `schedule_tiles`.
    """
    offs = start + gl.arange(0, 64, gl.BlockedLayout([1], [32], [1], [0]))
    for i in gl.static_range(3):
        start_copy(
            slot.slice(256 + 64 * i, 64), attended + i * total + offset + offs, offs < seqlen
        )
    async_copy.mbarrier_arrive(barrier)


@gluon.jit
def receive_attended(slot, LAYOUT: gl.constexpr):
    """Read the attended tokens of a tile's tokens, relative to the offset of the attended rows.

    Returns the first one, the end, and the one that is aligned with the token. Tokens after the end
    of the tile attend to none.
    """
    entry = slot.slice(0, 8).load(gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    offset = entry_field(entry, 2)
    return (
        slot.slice(256, 64).load(LAYOUT) - offset,
        slot.slice(320, 64).load(LAYOUT) - offset,
        slot.slice(384, 64).load(LAYOUT) - offset,
    )


@gluon.jit
def entry_field(entry, i: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, 8, entry.type.layout) == i, entry, 0), 0)


@gluon.jit
def receive_tile(slot):
    """Read a published tile.

    Returns the row's offset and length, the other side's length, the first token and the head.
    """
    x = slot.slice(0, 8).load(gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    return (
        entry_field(x, 0),
        entry_field(x, 1),
        entry_field(x, 3),
        entry_field(x, 4),
        entry_field(x, 5),
    )


@gluon.jit
def receive_chunk(slot):
    """Read the chunk of a published tile, see `tile_chunks`.

    Returns 1 + the index of its sums, or 0 for a whole tile; its first block, and the end of its blocks.
    """
    x = slot.slice(0, 8).load(gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    return entry_field(x, 2), entry_field(x, 6), entry_field(x, 7)


# --- Loads and stores without TMA
@gluon.jit
def tile_mask(rows, seqlen, cols, HEAD_DIM: gl.constexpr, BLOCK_D: gl.constexpr):
    """Return a mask of the tile's elements that are inside the row and inside the head."""
    mask = (rows < seqlen)[:, None]
    if HEAD_DIM < BLOCK_D:
        mask &= (cols < HEAD_DIM)[None, :]
    return mask


@gluon.jit
def store_tile(base, value, start, seqlen, stride, HEAD_DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """Store a tile from token `start` of a row on, within the row and the head."""
    rows = start + gl.arange(0, value.shape[0], gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, value.shape[1], gl.SliceLayout(0, LAYOUT))
    value = gl.convert_layout(value.to(base.dtype.element_ty), LAYOUT)
    gl.store(
        base + rows[:, None].to(gl.int64) * stride + cols[None, :],
        value,
        mask=tile_mask(rows, seqlen, cols, HEAD_DIM, value.shape[1]),
    )


@gluon.constexpr_function
def store_layout(accumulator, columns, in_float32):
    """Return the layout in which a tile is stored.

    Four threads of an accumulator hold 32 adjacent bytes in float32, so it needs no conversion.
    """
    if in_float32:
        return accumulator
    return columns_layout(columns)


@gluon.jit
def store_accumulators(
    base, acc, factor, start, seqlen, stride, HEAD_DIM: gl.constexpr, IN_FLOAT32: gl.constexpr
):
    """Store the accumulators of a tile, multiplied by a factor."""
    for p in gl.static_range(len(acc)):
        store_tile(
            base + p * acc[0].shape[1],
            acc[p] * factor,
            start,
            seqlen,
            stride,
            HEAD_DIM - p * acc[0].shape[1],
            store_layout(acc[p].type.layout, acc[p].shape[1], IN_FLOAT32),
        )
