"""Attention on Hopper in Gluon: what the forward and the backward have in common.

A program is one producer warp and up to three consumer warpgroups of 64 rows each (Shah et al., FlashAttention-3, 2024,
arXiv:2407.08608). The producer takes tiles from a counter, longest first, and fills rings of shared memory by TMA; the
consumers multiply on the tensor cores.

Descriptors are ragged (see `launch.Ragged`): the copy engine itself ends at a row's last token and fills with zeros,
so no tile ever holds a token of another row. A head is read as some PARTS of BLOCK_D numbers, one of 32, 64 or 128 up to
head_dim 128, three of 64 up to 192, two of 128 up to 256. Where that is more than its own DIM, the copy engine fills it up with
zeros, too. The heads of v have DIM_V, BLOCK_DV and PARTS_V. Products add up over the parts of what they sum over, and give
outputs in parts, tuples of tiles.

What a kernel computes is chosen by constants. CAUSAL: a query attends keys up to its own position, both rows aligned at their
ends. WINDOW: it attends `left` keys before and `right` keys after its own. ALIBI: a head's slope times the distance of query and
key is taken off each score. SOFTCAP: scores are softcap * tanh(scores / softcap); then `scale` makes the tanh's argument, and
`softcap` includes the factor log2(e), as `scale` does otherwise. Without WINDOW, loops over tiles are split by whether they need
a mask; with it one loop asks each tile, which takes fewer registers. ALIBI and SOFTCAP come with WINDOW alone, to compile less.
"""

from collections.abc import Iterator
from itertools import cycle

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..runtime.launch import current_stream

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(
    -1.0e30
)  # where a running maximum starts; finite, so that exp2(-inf - m) is 0 and not NaN
BILLION = gl.constexpr(1 << 30)  # the extent of a ragged descriptor's token dimension
_COUNTS = (
    "dlse_stride",
    "dlse_head",
    "total",
    "plane",
    "heads",
    "group_size",
    "group",
    "left",
    "right",
)
_SLOTS = 4096
_rings: dict[tuple[int, int], Iterator[torch.Tensor]] = {}


def counter(device: torch.device) -> torch.Tensor:
    """Tile counters at 0 for launches one after another, each of which leaves its own at 0.

    The first is for all kernels but that of dK and dV, which may begin before the one of dQ ends and has the second.

    Streams run beside each other, so each has its own, from a ring that is far longer than a device's queue. A captured graph
    may be replayed at any time, so its counter is its own for good.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(4, dtype=torch.int32, device=device)
    key = device.index, current_stream(device.index)
    ring = _rings.get(key)
    if ring is None:
        # 16 bytes apart, as alignment is part of what a kernel is compiled for.
        ring = _rings[key] = cycle(
            torch.zeros((_SLOTS, 4), dtype=torch.int32, device=device).unbind()
        )
    return next(ring)


@gluon.jit
def _column(head, stride, ring):
    """Where a head is in the last dimension, or, where that is of one head, its number."""
    if len(ring.shape) == 6:
        return head
    else:
        return head * stride


@gluon.jit
def _place(start, length, row, column, part, tile):
    """Where in a ragged descriptor a part of some rows is."""
    WIDTH: gl.constexpr = tile.shape[len(tile.shape) - 1]
    if (
        len(tile.shape) == 5
    ):  # heads are a dimension of their own, so that the last part is filled up with zeros
        return BILLION, start + length, BILLION - length + row, column, part * WIDTH
    else:
        return BILLION, start + length, BILLION - length + row, column + part * WIDTH


@gluon.jit
def _load(desc, start, length, row, column, barrier, ring, slot, PARTS: gl.constexpr):
    """Rows into a slot of a ring, which has a tile for each part of the operand."""
    for p in gl.static_range(PARTS):
        tile = ring.index(slot * PARTS + p)
        tma.async_copy_global_to_shared(
            desc, _place(start, length, row, column, p, tile), barrier, tile
        )


@gluon.jit
def _store(desc, start, length, row, column, ring, slot, PARTS: gl.constexpr):
    """Rows out of a slot of a ring; those behind the end of their row stay there."""
    for p in gl.static_range(PARTS):
        tile = ring.index(slot * PARTS + p)
        tma.async_copy_shared_to_global(desc, _place(start, length, row, column, p, tile), tile)


@gluon.constexpr_function
def _bytes(ring, parts):
    """Of a slot of a ring."""
    return ring.shape[3] * ring.shape[-1] * ring.dtype.primitive_bitwidth // 8 * parts


@gluon.jit
def _ring(desc, slots: gl.constexpr):
    """Shared memory for some tiles of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [slots] + desc.block_shape, desc.layout)


@gluon.jit
def _rows(tile):
    """A (1, 1, rows, columns) or (1, 1, rows, 1, columns) tile as a matrix."""
    return tile.reshape([tile.shape[2], tile.shape[len(tile.shape) - 1]])


@gluon.jit
def _parts(ring, slot, PARTS: gl.constexpr):
    """The tiles in a slot of a ring, as matrices."""
    parts = ()
    for p in gl.static_range(PARTS):
        parts += (_rows(ring.index(slot * PARTS + p)),)
    return parts


@gluon.jit
def _zeros(rows: gl.constexpr, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Accumulators of the parts of an output."""
    COLUMNS: gl.constexpr = LAYOUT.instr_shape[1]
    parts = ()
    for _ in gl.static_range(PARTS):
        parts += (gl.zeros([rows, COLUMNS], gl.float32, LAYOUT),)
    return parts


@gluon.jit
def _start_scores(a, ring, slot, PARTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Start a @ b^T, b in a slot of a ring, both in parts of their columns."""
    ROWS: gl.constexpr = a[0].shape[0]
    COLUMNS: gl.constexpr = LAYOUT.instr_shape[1]
    x = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    for p in gl.static_range(PARTS):
        x = warpgroup_mma(
            a[p],
            _rows(ring.index(slot * PARTS + p)).permute((1, 0)),
            x,
            use_acc=p > 0,
            is_async=True,
        )
    return x


@gluon.jit
def _start_sums(a, ring, slot, sums, PARTS: gl.constexpr):
    """Start sums + a @ b, b in a slot of a ring, in parts of its columns."""
    parts = ()
    for p in gl.static_range(PARTS):
        parts += (warpgroup_mma(a, _rows(ring.index(slot * PARTS + p)), sums[p], is_async=True),)
    return parts


@gluon.jit
def _wait_sums(pending: gl.constexpr, sums, a, PARTS: gl.constexpr):
    """Wait for what `_start_sums` started, but `pending` products behind it."""
    done = warpgroup_mma_wait(pending, deps=sums + (a,))
    return done[:PARTS]


@gluon.jit
def _barriers(count: gl.constexpr, arrivals: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(count):
        mbarrier.init(bars.index(s), count=arrivals)
    return bars


@gluon.jit
def _queue(slots: gl.constexpr = 2):
    """Room for the entries of two tiles, this one's and the next one's, and a copy of each for every lane of the producer."""
    return gl.allocate_shared_memory(
        gl.int32, [slots, 32 * 8], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )


@gluon.jit
def _post(slot, tile, t, total_tiles, head):
    """Copy a tile's entry to the consumers' queue; a length of 0 stops them.

    Every lane writes a copy of its own. The consumers read that of the first lane, which is the one that arrives at barriers: an
    arrival orders what its own thread wrote, and nothing else.
    """
    e = gl.arange(0, 32 * 8, gl.BlockedLayout([8], [32], [1], [0])) % 8
    entry = gl.load(tile + e)
    entry = gl.where(e == 5, head, entry)
    slot.store(gl.where(t < total_tiles, entry, 0))


@gluon.jit
def _field(entry, i: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, 8, entry.type.layout) == i, entry, 0), 0)


@gluon.jit
def _entry(slot):
    """Row start, row length, the other side's length, first token and head, from the queue."""
    x = slot.slice(0, 8).load(gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    return _field(x, 0), _field(x, 1), _field(x, 3), _field(x, 4), _field(x, 5)


@gluon.jit
def _key_tiles(
    first,
    length,
    other,
    right,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):
    """Key tiles of a query tile; at least one, so that a tile without valid keys takes the common way."""
    end = other
    if CAUSAL or WINDOW:
        end = gl.minimum(other, first + BLOCK_M + other - length + right)
    return gl.maximum(gl.cdiv(end, BLOCK_N), 1)


@gluon.jit
def _key_bounds(
    row, own, other, right, most, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr
):
    """The last key of queries that stand on the keys `own`, the first of them on `row`; and how many tiles, at most `most`, end
    before the first query's last key does."""
    if CAUSAL or WINDOW:
        return gl.minimum(own + right, other - 1), gl.minimum(
            gl.maximum(gl.minimum(row + right + 1, other), 0) // BLOCK_N, most
        )
    else:
        return own * 0 + (other - 1), gl.minimum(other // BLOCK_N, most)


@gluon.jit
def _first_tile(first, length, other, left, tiles, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr):
    """The first key tile that a query tile attends: 0 without a window."""
    if WINDOW:
        return gl.minimum(gl.maximum(first + other - length - left, 0) // BLOCK_N, tiles - 1)
    else:
        return 0


@gluon.jit
def _capped(x, scale, softcap, SOFTCAP: gl.constexpr, EXACT: gl.constexpr = False):
    """Scores, or with a softcap their tanh, and the factor that makes them what exp2 takes.

    The hardware's own tanh, which is not EXACT, has an error of 2^-11, that of a score in half precision.
    """
    if not SOFTCAP:
        return x, scale
    elif EXACT:
        return 1.0 - 2.0 / (gl.exp2(x * (scale * (2.0 * LOG2E))) + 1.0), softcap
    else:
        return gl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=r,r", [x * scale], gl.float32, True, 1
        ), softcap


@gluon.jit
def _biased(x, factor, slope, own, others, ALIBI: gl.constexpr):
    """Scores less slope times the distance of the rows' and the columns' tokens, and the factor that they still want."""
    if ALIBI:
        distance = gl.abs(own.to(gl.float32)[:, None] - others.to(gl.float32)[None, :])
        return x * factor - slope * distance, 1.0
    else:
        return x, factor


@gluon.jit
def _derivative(scale, softcap, SOFTCAP: gl.constexpr):
    """Of what exp2 takes, by the product of query and key, times ln(2); without that of the tanh."""
    if SOFTCAP:
        return scale * softcap * LN2
    else:
        return scale * LN2


@gluon.jit
def _let_follow(x):
    """Let the next kernel, if it is launched so, begin where this one leaves multiprocessors; x is any number."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1
    )


@gluon.jit
def _follow(x):
    """Wait for the end of the kernel before this one; x is any number."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, $1;", "=r,r", [x], gl.int32, False, 1
    )


@gluon.jit
def _claim(COUNTER, total_tiles):
    """The next tile. As many additions as tiles are made in all, so whoever makes the last one resets the counter."""
    t = gl.atomic_add(COUNTER, 1, sem="relaxed")
    if t == total_tiles - 1:
        gl.store(COUNTER, 0)
    return t + gl.num_programs(0)


@gluon.jit
def _tile(TILES, t, count, total_tiles, group):
    """Tile t's entry and head: longest first, `group` heads at a time so that their keys share the L2 cache."""
    part = t // (count * group)
    r = t - part * (count * group)
    return TILES + gl.where(t < total_tiles, 8 * (r // group + 1), 0), part * group + r % group


@gluon.jit
def _fields(tile):
    """Of a tile's entry in the map: row start and length, those of the other side, first token."""
    return gl.load(tile), gl.load(tile + 1), gl.load(tile + 2), gl.load(tile + 3), gl.load(tile + 4)


@gluon.jit
def _inside(rows, length, cols, DIM: gl.constexpr, BLOCK_D: gl.constexpr):
    """Where a tile has tokens of its row and numbers of its head."""
    inside = (rows < length)[:, None]
    if DIM < BLOCK_D:
        inside &= (cols < DIM)[None, :]
    return inside


@gluon.jit
def _store_tile(base, value, first, length, stride, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    rows = first + gl.arange(0, value.shape[0], gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, value.shape[1], gl.SliceLayout(0, LAYOUT))
    value = gl.convert_layout(value.to(base.dtype.element_ty), LAYOUT)
    gl.store(
        base + rows[:, None].to(gl.int64) * stride + cols[None, :],
        value,
        mask=_inside(rows, length, cols, DIM, value.shape[1]),
    )
