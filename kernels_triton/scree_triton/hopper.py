"""Attention on Hopper in Gluon: what the forward and the backward have in common.

A program is one producer warp and two consumer warpgroups of 64 rows each (Shah et al., FlashAttention-3, 2024,
arXiv:2407.08608). The producer takes tiles from a counter, longest first, and fills rings of shared memory by TMA; the
consumers multiply on the tensor cores.

Descriptors are ragged (see `launch.Ragged`): the copy engine itself ends at a row's last token and fills with zeros,
so no tile ever holds a token of another row.
"""
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .launch import current_stream

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1.0e30)  # where a running maximum starts; finite, so that exp2(-inf - m) is 0 and not NaN
BILLION = gl.constexpr(1 << 30)  # the extent of a ragged descriptor's token dimension
_COUNTS = ("dlse_stride", "dlse_head", "total", "plane", "heads", "group_size", "group", "left")
_SLOTS = 4096
_rings: dict[tuple[int, int], list] = {}


def counter(device: torch.device) -> torch.Tensor:
    """A tile counter at 0 for one launch, which leaves it at 0.

    Launches may overlap, so each has its own, from a ring of its stream that is far longer than a device's queue. A
    captured graph may be replayed at any time, so its counter is its own for good.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device.index, current_stream(device.index)
    ring = _rings.get(key)
    if ring is None:
        # 16 bytes apart, as alignment is part of what a kernel is compiled for.
        ring = _rings[key] = [0, torch.zeros((_SLOTS, 4), dtype=torch.int32, device=device).unbind()]
    ring[0] = (ring[0] + 1) % _SLOTS
    return ring[1][ring[0]]


@gluon.jit
def _load_ragged(desc, start, length, row, column, barrier, tile):
    tma.async_copy_global_to_shared(desc, [BILLION, start + length, BILLION - length + row, column], barrier, tile)


@gluon.jit
def _load_planes(desc, start, length, row, column, barrier, ring, slot, PLANES: gl.constexpr):
    """A tile into a slot of a ring: one tile of each plane of the operand, of which most have one."""
    DIM: gl.constexpr = ring.shape[4]
    for p in gl.static_range(PLANES):
        _load_ragged(desc, start, length, row, column + p * DIM, barrier, ring.index(slot * PLANES + p))


@gluon.jit
def _rows(tile):
    """A (1, 1, rows, columns) tile without its two ragged dimensions."""
    return tile.reshape([tile.shape[2], tile.shape[3]])


@gluon.jit
def _barriers(count: gl.constexpr, arrivals: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [count, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(count):
        mbarrier.init(bars.index(s), count=arrivals)
    return bars


@gluon.jit
def _post(slot, tile, t, total_tiles, head, LAYOUT: gl.constexpr):
    """Copy a tile's entry to the consumers' queue; a length of 0 stops them.

    All lanes write the same, so that the arrival of one lane, which comes after its own write, is enough for the readers.
    """
    e = gl.arange(0, 8, LAYOUT)
    entry = gl.load(tile + e)
    entry = gl.where(e == 5, head, entry)
    slot.store(gl.where(t < total_tiles, entry, 0))


@gluon.jit
def _field(entry, i: gl.constexpr):
    return gl.sum(gl.where(gl.arange(0, 8, entry.type.layout) == i, entry, 0), 0)


@gluon.jit
def _entry(slot):
    """Row start, row length, the other side's length, first token and head, from the queue."""
    x = slot.load(gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))
    return _field(x, 0), _field(x, 1), _field(x, 3), _field(x, 4), _field(x, 5)


@gluon.jit
def _key_tiles(first, length, other, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """Key tiles of a query tile; at least one, so that a tile without valid keys takes the common way."""
    end = other
    if CAUSAL:
        end = gl.minimum(other, first + BLOCK_M + other - length)
    return gl.maximum(gl.cdiv(end, BLOCK_N), 1)


@gluon.jit
def _first_tile(first, length, other, left, tiles, BLOCK_N: gl.constexpr, LEFT: gl.constexpr):
    """The first key tile that a query tile attends: 0 without a window."""
    if LEFT:
        return gl.minimum(gl.maximum(first + other - length - left, 0) // BLOCK_N, tiles - 1)
    else:
        return 0


@gluon.jit
def _claim(COUNTER, total_tiles):
    """The next tile. As many additions as tiles are made in all, so whoever makes the last one resets the counter."""
    t = gl.atomic_add(COUNTER, 1)
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
def _store_tile(base, value, first, length, stride, LAYOUT: gl.constexpr):
    rows = first + gl.arange(0, value.shape[0], gl.SliceLayout(1, LAYOUT))
    cols = gl.arange(0, value.shape[1], gl.SliceLayout(0, LAYOUT))
    value = gl.convert_layout(value.to(base.dtype.element_ty), LAYOUT)
    gl.store(base + rows[:, None].to(gl.int64) * stride + cols[None, :], value, mask=(rows < length)[:, None])
