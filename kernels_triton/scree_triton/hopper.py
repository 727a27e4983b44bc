"""Attention on Hopper in Gluon: warp-specialised forward and backward, float16 and bfloat16, head_dim 32, 64 and 128.

A program is one producer warp and two consumer warpgroups of 64 query rows each (Shah et al., FlashAttention-3, 2024,
arXiv:2407.08608). The producer takes tiles from a counter, longest first, and fills rings of shared memory by TMA; the
consumers multiply on the tensor cores. Each consumer issues the next Q K^T before the softmax of the current tile, and
the two take turns at the tensor cores, so that the softmax of one runs under the matrix products of the other.
The forward of narrow heads has one consumer a program instead, and three programs a multiprocessor, which hide each other's
waits.

Descriptors are ragged (see `launch.Ragged`): the copy engine itself ends at a row's last token and fills with zeros,
so no tile ever holds a token of another row.
"""
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

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


@gluon.jit
def _forward_producer(qd, kd, vd, q_s, k_s, v_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, TILES,
                      COUNTER, q_head, k_head, v_head, heads, group_size, group, left, BLOCK_M: gl.constexpr,
                      BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
                      CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, LEFT: gl.constexpr, Q_PLANES: gl.constexpr,
                      PLANES: gl.constexpr):
    Q_BYTES: gl.constexpr = q_s.dtype.primitive_bitwidth // 8 * Q_PLANES
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    count = gl.load(TILES)
    total_tiles = count * heads
    t = gl.program_id(0)
    i = 0
    c = 0
    while t >= 0:
        tile, head = _tile(TILES, t, count, total_tiles, group)
        start = gl.load(tile)
        length = gl.load(tile + 1)
        other_start = gl.load(tile + 2)
        other = gl.load(tile + 3)
        first = gl.load(tile + 4)
        qs = i % Q_STAGES
        mbarrier.wait(q_empty.index(qs), ((i // Q_STAGES) & 1) ^ 1)
        _post(queue.index(qs), tile, t, total_tiles, head, LAYOUT)
        if t < total_tiles:
            mbarrier.expect(q_full.index(qs), BLOCK_M * DIM * Q_BYTES)
            for w in gl.static_range(CONSUMERS):
                _load_planes(qd, start, length, first + w * (BLOCK_M // CONSUMERS), head * q_head, q_full.index(qs),
                             q_s, qs * CONSUMERS + w, Q_PLANES)
            k_column = head // group_size * k_head
            v_column = head // group_size * v_head
            tiles = _key_tiles(first, length, other, BLOCK_M, BLOCK_N, CAUSAL)
            for j in range(tiles - 1, _first_tile(first, length, other, left, tiles, BLOCK_N, LEFT) - 1, -1):
                stage = c % STAGES
                phase = ((c // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), BLOCK_N * DIM * 2 * PLANES)
                _load_planes(kd, other_start, other, j * BLOCK_N, k_column, k_full.index(stage), k_s, stage, PLANES)
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), BLOCK_N * DIM * 2 * PLANES)
                _load_planes(vd, other_start, other, j * BLOCK_N, v_column, v_full.index(stage), v_s, stage, PLANES)
                c += 1
            t = _claim(COUNTER, total_tiles)
        else:
            mbarrier.arrive(q_full.index(qs), count=1)
            t = -1
        i += 1


@gluon.jit
def _take_turn(w: gl.constexpr, c, CONSUMERS: gl.constexpr):
    """Wait for this warpgroup's turn at the tensor cores. Named barriers are not in Gluon, so by inline assembly."""
    if CONSUMERS == 1:
        pass
    elif w == 0:
        gl.inline_asm_elementwise("bar.sync 10, 256; mov.b32 $0, $1;", "=r,r", [c], gl.int32, False, 1)
    else:
        gl.inline_asm_elementwise("bar.sync 11, 256; mov.b32 $0, $1;", "=r,r", [c], gl.int32, False, 1)


@gluon.jit
def _pass_turn(w: gl.constexpr, c, CONSUMERS: gl.constexpr):
    if CONSUMERS == 1:
        pass
    elif w == 0:
        gl.inline_asm_elementwise("bar.arrive 11, 256; mov.b32 $0, $1;", "=r,r", [c], gl.int32, False, 1)
    else:
        gl.inline_asm_elementwise("bar.arrive 10, 256; mov.b32 $0, $1;", "=r,r", [c], gl.int32, False, 1)


@gluon.jit
def _partial_sums(y):
    """Row sums that leave the eight columns of a quad of threads unsummed, so that the loop needs no shuffles."""
    return gl.sum(y.reshape([y.shape[0], y.shape[1] // 8, 8]), 1)


@gluon.jit
def _attended(x, limit, left, offs_n, LEFT: gl.constexpr):
    """Scores, -inf behind each query's last key and, with a window, before its first."""
    x = gl.where(limit[:, None] >= offs_n[None, :], x, -float("inf"))
    if LEFT:
        x = gl.where((limit - left)[:, None] <= offs_n[None, :], x, -float("inf"))
    return x


@gluon.jit
def _forward_step(w: gl.constexpr, q, k_s, v_s, k_full, k_empty, v_full, v_empty, acc, y, m, l, c, limit, left, offs_n,
                  scale, MASK: gl.constexpr, LEFT: gl.constexpr, STAGES: gl.constexpr, LAYOUT_S: gl.constexpr,
                  LAYOUT_O: gl.constexpr, CONSUMERS: gl.constexpr):
    """Multiply key tile c, and meanwhile finish tile c - 1, whose weights y are still float32, by its values, which are there.

    The values of tile c are waited for behind its softmax: ptxas would move the wait for the products before it.
    """
    ROWS: gl.constexpr = q.shape[0]
    BLOCK_N: gl.constexpr = k_s.shape[3]
    stage = c % STAGES
    before = c - 1
    mbarrier.wait(k_full.index(stage), (c // STAGES) & 1)
    _take_turn(w, c, CONSUMERS)
    x = warpgroup_mma(q, _rows(k_s.index(stage)).permute((1, 0)), gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT_S),
                      use_acc=False, is_async=True)
    p = gl.convert_layout(y.to(v_s.dtype), gl.DotOperandLayout(0, LAYOUT_O, 2))
    acc = warpgroup_mma(p, _rows(v_s.index(before % STAGES)), acc, is_async=True)
    _pass_turn(w, c, CONSUMERS)
    x = warpgroup_mma_wait(1, deps=(x, ))
    mbarrier.arrive(k_empty.index(stage), count=1)
    if MASK:
        x = _attended(x, limit, left, offs_n, LEFT)
    m_new = gl.maximum(m, gl.max(x, 1) * scale)
    alpha = gl.exp2(m - m_new)
    y = gl.exp2(x * scale - m_new[:, None])
    l = l * gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))[:, None] + _partial_sums(y)
    mbarrier.wait(v_full.index(stage), (c // STAGES) & 1)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(v_empty.index(before % STAGES), count=1)
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, LAYOUT_O))[:, None]
    return acc, y, m_new, l


@gluon.jit
def _forward_consumer(w: gl.constexpr, q_s, k_s, v_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, OUT, LSE,
                      out_stride, total, left, scale, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr,
                      STAGES: gl.constexpr, CAUSAL: gl.constexpr, SAME: gl.constexpr, LEFT: gl.constexpr,
                      CONSUMERS: gl.constexpr):
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LAYOUT_STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT_S))
    i = 0
    c = 0
    if w == 1:  # the other one begins
        _pass_turn(w, c, CONSUMERS)
    mbarrier.wait(q_full.index(0), 0)
    start, length, other, first, head = _entry(queue.index(0))
    while length > 0:
        q = _rows(q_s.index((i % 2) * CONSUMERS + w))
        shift = other - length
        tiles = _key_tiles(first, length, other, BLOCK_M, BLOCK_N, CAUSAL)
        row = first + w * ROWS
        query = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_S))
        # The last key of each query, and the tiles that all queries of this warpgroup attend in full: with rows of one
        # length (and BLOCK_M = BLOCK_N) all but the last.
        if SAME and CAUSAL:
            limit = query
            full = tiles - 1
        elif CAUSAL:
            limit = gl.minimum(query + shift, other - 1)
            full = gl.minimum(gl.maximum(gl.minimum(row + shift + 1, other), 0) // BLOCK_N, tiles - 1)
        else:
            limit = query * 0 + (other - 1)
            full = gl.minimum(other // BLOCK_N, tiles - 1)
        # From here on down to `low`, those of `low` to `inner` begin before the first key of some query.
        low = _first_tile(first, length, other, left, tiles, BLOCK_N, LEFT)
        inner = low
        if LEFT:
            inner = gl.minimum(gl.cdiv(gl.maximum(row + ROWS - 1 + shift - left, 0), BLOCK_N), full)
        mbarrier.wait(k_full.index(c % STAGES), (c // STAGES) & 1)
        _take_turn(w, c, CONSUMERS)
        x = warpgroup_mma(q, _rows(k_s.index(c % STAGES)).permute((1, 0)),
                          gl.zeros([ROWS, BLOCK_N], gl.float32, LAYOUT_S), use_acc=False, is_async=True)
        _pass_turn(w, c, CONSUMERS)
        x = warpgroup_mma_wait(0, deps=(x, ))
        mbarrier.arrive(k_empty.index(c % STAGES), count=1)
        x = _attended(x, limit - (tiles - 1) * BLOCK_N, left, offs_n, LEFT)
        m = gl.maximum(gl.max(x, 1) * scale, LOWEST)
        y = gl.exp2(x * scale - m[:, None])
        l = _partial_sums(y)
        mbarrier.wait(v_full.index(c % STAGES), (c // STAGES) & 1)
        acc = gl.zeros([ROWS, DIM], gl.float32, LAYOUT_O)
        c += 1
        if CAUSAL and not SAME:
            for j in range(tiles - 2, gl.maximum(full, low) - 1, -1):
                acc, y, m, l = _forward_step(w, q, k_s, v_s, k_full, k_empty, v_full, v_empty, acc, y, m, l, c,
                                             limit - j * BLOCK_N, left, offs_n, scale, True, LEFT, STAGES, LAYOUT_S,
                                             LAYOUT_O, CONSUMERS)
                c += 1
        for j in range(full - 1, gl.maximum(inner, low) - 1, -1):
            acc, y, m, l = _forward_step(w, q, k_s, v_s, k_full, k_empty, v_full, v_empty, acc, y, m, l, c, limit, left,
                                         offs_n, scale, False, LEFT, STAGES, LAYOUT_S, LAYOUT_O, CONSUMERS)
            c += 1
        if LEFT:
            for j in range(inner - 1, low - 1, -1):
                acc, y, m, l = _forward_step(w, q, k_s, v_s, k_full, k_empty, v_full, v_empty, acc, y, m, l, c,
                                             limit - j * BLOCK_N, left, offs_n, scale, True, LEFT, STAGES, LAYOUT_S,
                                             LAYOUT_O, CONSUMERS)
                c += 1
        mbarrier.arrive(q_empty.index(i % 2), count=1)
        before = c - 1
        p = gl.convert_layout(y.to(v_s.dtype), gl.DotOperandLayout(0, LAYOUT_O, 2))
        acc = warpgroup_mma(p, _rows(v_s.index(before % STAGES)), acc, is_async=True)
        l_sum = gl.convert_layout(gl.sum(l, 1), gl.SliceLayout(1, LAYOUT_S))
        nothing = gl.minimum(limit, other - 1) < 0
        lse = gl.where(nothing, -float("inf"), (m + gl.log2(l_sum)) * LN2)
        factor = gl.convert_layout(gl.where(nothing, 0.0, 1.0 / l_sum), gl.SliceLayout(1, LAYOUT_O))
        acc, p = warpgroup_mma_wait(0, deps=(acc, p))
        mbarrier.arrive(v_empty.index(before % STAGES), count=1)
        # What lies behind the rows may be NaN, so a factor of 0 would not do.
        acc = gl.where(factor[:, None] == 0.0, 0.0, acc * factor[:, None])
        _store_tile(OUT + start.to(gl.int64) * out_stride + head * DIM, acc, row, length, out_stride, LAYOUT_STORE)
        gl.store(LSE + head.to(gl.int64) * total + start + query, lse, mask=query < length)
        i += 1
        mbarrier.wait(q_full.index(i % 2), (i // 2) & 1)
        start, length, other, first, head = _entry(queue.index(i % 2))


@gluon.jit(do_not_specialize=_COUNTS)
def forward_kernel(qd, kd, vd, OUT, LSE, TILES, COUNTER, q_head, k_head, v_head, out_stride, total, heads, group_size, group,
                   left, scale, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
                   CONSUMERS: gl.constexpr, CAUSAL: gl.constexpr, SAME: gl.constexpr, LEFT: gl.constexpr):
    """OUT (total, heads, DIM) and LSE (heads, total), natural. `scale` includes the factor log2(e).

    CONSUMERS: 2, or 1 that shares a multiprocessor with other programs. SAME: queries and keys have the same offsets. LEFT: a
    query of a causal row attends `left` keys before its own position.
    """
    q_s = gl.allocate_shared_memory(qd.dtype, [2 * CONSUMERS, 1, 1, BLOCK_M // CONSUMERS, DIM], qd.layout)
    k_s = gl.allocate_shared_memory(kd.dtype, [STAGES, 1, 1, BLOCK_N, DIM], kd.layout)
    v_s = gl.allocate_shared_memory(vd.dtype, [STAGES, 1, 1, BLOCK_N, DIM], vd.layout)
    queue = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = _barriers(2, 1)
    q_empty = _barriers(2, CONSUMERS)
    k_full = _barriers(STAGES, 1)
    k_empty = _barriers(STAGES, CONSUMERS)
    v_full = _barriers(STAGES, 1)
    v_empty = _barriers(STAGES, CONSUMERS)
    if CONSUMERS == 1:
        gl.warp_specialize([
            (_forward_consumer, (0, q_s, k_s, v_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, OUT, LSE,
                                 out_stride, total, left, scale, BLOCK_M, BLOCK_N, DIM, STAGES, CAUSAL, SAME, LEFT, 1)),
            (_forward_producer, (qd, kd, vd, q_s, k_s, v_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, TILES,
                                 COUNTER, q_head, k_head, v_head, heads, group_size, group, left, BLOCK_M, BLOCK_N, DIM,
                                 STAGES, 2, 1, CAUSAL, LEFT, 1, 1)),
        ], [1], [24])
    else:
        gl.warp_specialize([
            (_forward_consumer, (0, q_s, k_s, v_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, OUT, LSE,
                                 out_stride, total, left, scale, BLOCK_M, BLOCK_N, DIM, STAGES, CAUSAL, SAME, LEFT, 2)),
            (_forward_consumer, (1, q_s, k_s, v_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, OUT, LSE,
                                 out_stride, total, left, scale, BLOCK_M, BLOCK_N, DIM, STAGES, CAUSAL, SAME, LEFT, 2)),
            (_forward_producer, (qd, kd, vd, q_s, k_s, v_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, TILES,
                                 COUNTER, q_head, k_head, v_head, heads, group_size, group, left, BLOCK_M, BLOCK_N, DIM,
                                 STAGES, 2, 2, CAUSAL, LEFT, 1, 1)),
        ], [4, 1], [240, 24])


@gluon.jit
def _dq_producer(qd, kd, vd, dod, q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, TILES,
                 COUNTER, q_head, k_head, v_head, do_head, heads, group_size, group, BLOCK_M: gl.constexpr,
                 BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
                 CAUSAL: gl.constexpr, PLANES: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    count = gl.load(TILES)
    total_tiles = count * heads
    t = gl.program_id(0)
    i = 0
    c = 0
    while t >= 0:
        tile, head = _tile(TILES, t, count, total_tiles, group)
        start = gl.load(tile)
        length = gl.load(tile + 1)
        other_start = gl.load(tile + 2)
        other = gl.load(tile + 3)
        first = gl.load(tile + 4)
        qs = i % Q_STAGES
        mbarrier.wait(q_empty.index(qs), ((i // Q_STAGES) & 1) ^ 1)
        _post(queue.index(qs), tile, t, total_tiles, head, LAYOUT)
        if t < total_tiles:
            mbarrier.expect(q_full.index(qs), BLOCK_M * DIM * 4 * PLANES)
            for w in gl.static_range(2):
                row = first + w * (BLOCK_M // 2)
                _load_planes(qd, start, length, row, head * q_head, q_full.index(qs), q_s, qs * 2 + w, PLANES)
                _load_planes(dod, start, length, row, head * do_head, q_full.index(qs), do_s, qs * 2 + w, PLANES)
            t = _claim(COUNTER, total_tiles)
            k_column = head // group_size * k_head
            v_column = head // group_size * v_head
            for j in range(_key_tiles(first, length, other, BLOCK_M, BLOCK_N, CAUSAL) - 1, -1, -1):
                stage = c % STAGES
                phase = ((c // STAGES) & 1) ^ 1
                mbarrier.wait(k_empty.index(stage), phase)
                mbarrier.expect(k_full.index(stage), BLOCK_N * DIM * 2 * PLANES)
                _load_planes(kd, other_start, other, j * BLOCK_N, k_column, k_full.index(stage), k_s, stage, PLANES)
                mbarrier.wait(v_empty.index(stage), phase)
                mbarrier.expect(v_full.index(stage), BLOCK_N * DIM * 2 * PLANES)
                _load_planes(vd, other_start, other, j * BLOCK_N, v_column, v_full.index(stage), v_s, stage, PLANES)
                c += 1
        else:
            mbarrier.arrive(q_full.index(qs), count=1)
            t = -1
        i += 1


@gluon.jit
def _scores(a, b_s, full, c, LAYOUT: gl.constexpr, STAGES: gl.constexpr):
    """Start a @ b^T with tile c of a ring, as soon as it is there."""
    ROWS: gl.constexpr = a.shape[0]
    COLUMNS: gl.constexpr = b_s.shape[3]
    stage = c % STAGES
    zeros = gl.zeros([ROWS, COLUMNS], gl.float32, LAYOUT)
    mbarrier.wait(full.index(stage), (c // STAGES) & 1)
    return warpgroup_mma(a, _rows(b_s.index(stage)).permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _dq_step(q, do, k_s, v_s, k_full, k_empty, v_full, v_empty, dq, lse, delta, c, limit, offs_n, scale, MASK: gl.constexpr,
             STAGES: gl.constexpr, LAYOUT_S: gl.constexpr, LAYOUT_O: gl.constexpr):
    """Key tile c."""
    stage = c % STAGES
    x = _scores(q, k_s, k_full, c, LAYOUT_S, STAGES)
    dp = _scores(do, v_s, v_full, c, LAYOUT_S, STAGES)
    x = warpgroup_mma_wait(1, deps=(x, ))
    p = gl.exp2(x * scale - lse[:, None])
    dp = warpgroup_mma_wait(0, deps=(dp, ))
    mbarrier.arrive(v_empty.index(stage), count=1)
    ds = p * (dp - delta[:, None])
    if MASK:
        ds = gl.where(limit[:, None] >= offs_n[None, :], ds, 0.0)
    ds = gl.convert_layout(ds.to(k_s.dtype), gl.DotOperandLayout(0, LAYOUT_O, 2))
    dq = warpgroup_mma(ds, _rows(k_s.index(stage)), dq, is_async=True)
    dq, ds = warpgroup_mma_wait(0, deps=(dq, ds))
    mbarrier.arrive(k_empty.index(stage), count=1)
    return dq


@gluon.jit
def _dq_consumer(w: gl.constexpr, q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, OUT,
                 LSE, DLSE, STATS, DQ, out_stride, dq_stride, dlse_stride, dlse_head, total, plane, scale,
                 BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
                 Q_STAGES: gl.constexpr, CAUSAL: gl.constexpr, HAS_DLSE: gl.constexpr, HELD: gl.constexpr):
    ROWS: gl.constexpr = BLOCK_M // 2
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LAYOUT_STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    offs_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT_S))
    i = 0
    c = 0
    mbarrier.wait(q_full.index(0), 0)
    start, length, other, first, head = _entry(queue.index(0))
    while length > 0:
        q = _rows(q_s.index((i % Q_STAGES) * 2 + w))
        do = _rows(do_s.index((i % Q_STAGES) * 2 + w))
        shift = other - length
        tiles = _key_tiles(first, length, other, BLOCK_M, BLOCK_N, CAUSAL)
        row = first + w * ROWS
        # delta = sum(out * dout) - dlse, a row each; queries beyond the row read zeros.
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_STORE))
        cols = gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT_STORE))
        out = gl.load(OUT + (start + rows)[:, None].to(gl.int64) * out_stride + (head * DIM + cols)[None, :],
                      mask=(rows < length)[:, None], other=0.0)
        delta = gl.sum(out.to(gl.float32) * do.load(LAYOUT_STORE).to(gl.float32), 1)
        delta = gl.convert_layout(delta, gl.SliceLayout(1, LAYOUT_S))
        query = row + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_S))
        inside = query < length
        if HAS_DLSE:
            delta -= gl.load(DLSE + (start + query).to(gl.int64) * dlse_stride + head.to(gl.int64) * dlse_head,
                             mask=inside, other=0.0)
        place = head.to(gl.int64) * total + start + query
        lse = gl.load(LSE + place, mask=inside, other=0.0) * LOG2E
        gl.store(STATS + place, lse, mask=inside)
        gl.store(STATS + plane + place, delta, mask=inside)
        if CAUSAL:
            limit = gl.minimum(query + shift, other - 1)
            full = gl.minimum(gl.maximum(gl.minimum(row + shift + 1, other), 0) // BLOCK_N, tiles)
        else:
            limit = query * 0 + (other - 1)
            full = gl.minimum(other // BLOCK_N, tiles)
        if HELD:
            q = q.load(gl.DotOperandLayout(0, LAYOUT_S, 2))
            do = do.load(gl.DotOperandLayout(0, LAYOUT_S, 2))
        dq = gl.zeros([ROWS, DIM], gl.float32, LAYOUT_O)
        for j in range(tiles - 1, full - 1, -1):
            dq = _dq_step(q, do, k_s, v_s, k_full, k_empty, v_full, v_empty, dq, lse, delta, c, limit - j * BLOCK_N, offs_n,
                          scale, True, STAGES, LAYOUT_S, LAYOUT_O)
            c += 1
        for _ in range(full):
            dq = _dq_step(q, do, k_s, v_s, k_full, k_empty, v_full, v_empty, dq, lse, delta, c, limit, offs_n, scale, False,
                          STAGES, LAYOUT_S, LAYOUT_O)
            c += 1
        mbarrier.arrive(q_empty.index(i % Q_STAGES), count=1)
        _store_tile(DQ + start.to(gl.int64) * dq_stride + head * DIM, dq * (scale * LN2), row, length, dq_stride,
                    LAYOUT_STORE)
        i += 1
        mbarrier.wait(q_full.index(i % Q_STAGES), (i // Q_STAGES) & 1)
        start, length, other, first, head = _entry(queue.index(i % Q_STAGES))


@gluon.jit(do_not_specialize=_COUNTS)
def dq_kernel(qd, kd, vd, dod, OUT, LSE, DLSE, STATS, DQ, TILES, COUNTER, q_head, k_head, v_head, do_head, out_stride,
              dq_stride, dlse_stride, dlse_head, total, plane, heads, group_size, group, scale, BLOCK_M: gl.constexpr,
              BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, Q_STAGES: gl.constexpr,
              CAUSAL: gl.constexpr, HAS_DLSE: gl.constexpr, HELD: gl.constexpr):
    """DQ, and STATS (2, heads, total) for the kernel of dK and dV: the LSE in base 2, and delta.

    HELD: queries and their gradients stay in registers, which spares the shared memory half of its reads for the scores.
    """
    q_s = gl.allocate_shared_memory(qd.dtype, [2 * Q_STAGES, 1, 1, BLOCK_M // 2, DIM], qd.layout)
    do_s = gl.allocate_shared_memory(dod.dtype, [2 * Q_STAGES, 1, 1, BLOCK_M // 2, DIM], dod.layout)
    k_s = gl.allocate_shared_memory(kd.dtype, [STAGES, 1, 1, BLOCK_N, DIM], kd.layout)
    v_s = gl.allocate_shared_memory(vd.dtype, [STAGES, 1, 1, BLOCK_N, DIM], vd.layout)
    queue = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = _barriers(Q_STAGES, 1)
    q_empty = _barriers(Q_STAGES, 2)
    k_full = _barriers(STAGES, 1)
    k_empty = _barriers(STAGES, 2)
    v_full = _barriers(STAGES, 1)
    v_empty = _barriers(STAGES, 2)
    gl.warp_specialize([
        (_dq_consumer, (0, q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, OUT, LSE, DLSE,
                        STATS, DQ, out_stride, dq_stride, dlse_stride, dlse_head, total, plane, scale, BLOCK_M, BLOCK_N,
                        DIM, STAGES, Q_STAGES, CAUSAL, HAS_DLSE, HELD)),
        (_dq_consumer, (1, q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty, OUT, LSE, DLSE,
                        STATS, DQ, out_stride, dq_stride, dlse_stride, dlse_head, total, plane, scale, BLOCK_M, BLOCK_N,
                        DIM, STAGES, Q_STAGES, CAUSAL, HAS_DLSE, HELD)),
        (_dq_producer, (qd, kd, vd, dod, q_s, k_s, v_s, do_s, queue, q_full, q_empty, k_full, k_empty, v_full, v_empty,
                        TILES, COUNTER, q_head, k_head, v_head, do_head, heads, group_size, group, BLOCK_M, BLOCK_N, DIM,
                        STAGES, Q_STAGES, CAUSAL, 1)),
    ], [4, 1], [240, 24])


@gluon.jit
def _query_tiles(first, length, other, BLOCK_M: gl.constexpr, CAUSAL: gl.constexpr):
    """The query tiles, from low up to high, that attend the keys from `first` on."""
    low = 0
    if CAUSAL:
        low = gl.maximum(first + other - length, 0) // BLOCK_M
    return low, gl.maximum(gl.cdiv(other, BLOCK_M), low)


@gluon.jit
def _dkdv_producer(qd, kd, vd, dod, q_s, k_s, v_s, do_s, lse_s, delta_s, queue, k_full, k_empty, q_full, q_empty,
                   do_full, do_empty, STATS, TILES, COUNTER, q_head, k_head, v_head, do_head, total, plane, heads,
                   group_size, group, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr,
                   K_STAGES: gl.constexpr, CAUSAL: gl.constexpr, PLANES: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    LAYOUT_STATS: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    offs_m = gl.arange(0, BLOCK_M, LAYOUT_STATS)
    count = gl.load(TILES)
    total_tiles = count * (heads // group_size)
    t = gl.program_id(0)
    i = 0
    c = 0
    while t >= 0:
        tile, head = _tile(TILES, t, count, total_tiles, group)
        start = gl.load(tile)
        length = gl.load(tile + 1)
        other_start = gl.load(tile + 2)
        other = gl.load(tile + 3)
        first = gl.load(tile + 4)
        ks = i % K_STAGES
        mbarrier.wait(k_empty.index(ks), ((i // K_STAGES) & 1) ^ 1)
        _post(queue.index(ks), tile, t, total_tiles, head, LAYOUT)
        if t < total_tiles:
            mbarrier.expect(k_full.index(ks), BLOCK_N * DIM * 4 * PLANES)
            for w in gl.static_range(2):
                row = first + w * (BLOCK_N // 2)
                _load_planes(kd, start, length, row, head * k_head, k_full.index(ks), k_s, ks * 2 + w, PLANES)
                _load_planes(vd, start, length, row, head * v_head, k_full.index(ks), v_s, ks * 2 + w, PLANES)
            t = _claim(COUNTER, total_tiles)
            low, high = _query_tiles(first, length, other, BLOCK_M, CAUSAL)
            for h in range(head * group_size, head * group_size + group_size):
                stats = STATS + h.to(gl.int64) * total + other_start
                for j in range(low, high):
                    stage = c % STAGES
                    phase = ((c // STAGES) & 1) ^ 1
                    query = j * BLOCK_M + offs_m
                    # Beyond the row the statistics are 0, and so are q and dout: such queries add nothing.
                    mbarrier.wait(q_empty.index(stage), phase)
                    async_copy.async_copy_global_to_shared(lse_s.index(stage), stats + query, query < other)
                    async_copy.mbarrier_arrive(q_full.index(stage))
                    mbarrier.expect(q_full.index(stage), BLOCK_M * DIM * 2 * PLANES)
                    _load_planes(qd, other_start, other, j * BLOCK_M, h * q_head, q_full.index(stage), q_s, stage, PLANES)
                    mbarrier.wait(do_empty.index(stage), phase)
                    async_copy.async_copy_global_to_shared(delta_s.index(stage), stats + plane + query, query < other)
                    async_copy.mbarrier_arrive(do_full.index(stage))
                    mbarrier.expect(do_full.index(stage), BLOCK_M * DIM * 2 * PLANES)
                    _load_planes(dod, other_start, other, j * BLOCK_M, h * do_head, do_full.index(stage), do_s, stage,
                                 PLANES)
                    c += 1
        else:
            mbarrier.arrive(k_full.index(ks), count=1)
            t = -1
        i += 1


@gluon.jit
def _dkdv_step(k, v, q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty, dk, dv, c, limit, offs_m, scale,
               MASK: gl.constexpr, STAGES: gl.constexpr, LAYOUT_S: gl.constexpr, LAYOUT_O: gl.constexpr):
    """Query tile c; scores lie keys by queries."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT_O, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT_S)
    stage = c % STAGES
    x = _scores(k, q_s, q_full, c, LAYOUT_S, STAGES)
    dp = _scores(v, do_s, do_full, c, LAYOUT_S, STAGES)
    lse = lse_s.index(stage).load(COLUMN)
    x = warpgroup_mma_wait(1, deps=(x, ))
    p = gl.exp2(x * scale - lse[None, :])
    if MASK:
        p = gl.where(offs_m[None, :] >= limit[:, None], p, 0.0)
    p16 = gl.convert_layout(p.to(q_s.dtype), OPERAND)
    dv = warpgroup_mma(p16, _rows(do_s.index(stage)), dv, is_async=True)
    delta = delta_s.index(stage).load(COLUMN)
    dp = warpgroup_mma_wait(1, deps=(dp, ))
    ds = gl.convert_layout((p * (dp - delta[None, :])).to(q_s.dtype), OPERAND)
    dk = warpgroup_mma(ds, _rows(q_s.index(stage)), dk, is_async=True)
    dv, p16 = warpgroup_mma_wait(1, deps=(dv, p16))
    mbarrier.arrive(do_empty.index(stage), count=1)
    dk, ds = warpgroup_mma_wait(0, deps=(dk, ds))
    mbarrier.arrive(q_empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _dkdv_consumer(w: gl.constexpr, q_s, k_s, v_s, do_s, lse_s, delta_s, queue, k_full, k_empty, q_full, q_empty,
                   do_full, do_empty, DK, DV, dk_stride, group_size, scale, BLOCK_M: gl.constexpr,
                   BLOCK_N: gl.constexpr, DIM: gl.constexpr, STAGES: gl.constexpr, K_STAGES: gl.constexpr,
                   CAUSAL: gl.constexpr, HELD: gl.constexpr):
    ROWS: gl.constexpr = BLOCK_N // 2
    LAYOUT_S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    LAYOUT_O: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    LAYOUT_STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    offs_m = gl.arange(0, BLOCK_M, gl.SliceLayout(0, LAYOUT_S))
    i = 0
    c = 0
    mbarrier.wait(k_full.index(0), 0)
    start, length, other, first, head = _entry(queue.index(0))
    while length > 0:
        k = _rows(k_s.index((i % K_STAGES) * 2 + w))
        v = _rows(v_s.index((i % K_STAGES) * 2 + w))
        if HELD:
            k = k.load(gl.DotOperandLayout(0, LAYOUT_S, 2))
            v = v.load(gl.DotOperandLayout(0, LAYOUT_S, 2))
        low, high = _query_tiles(first, length, other, BLOCK_M, CAUSAL)
        row = first + w * ROWS
        # The first query of each key, and the tiles in which some of this warpgroup's keys meet earlier queries.
        limit = row + (other - length) + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT_S))
        full = low
        if CAUSAL:
            full = gl.minimum(gl.cdiv(gl.maximum(row + ROWS - 1 + other - length, 0), BLOCK_M), high)
        dk = gl.zeros([ROWS, DIM], gl.float32, LAYOUT_O)
        dv = gl.zeros([ROWS, DIM], gl.float32, LAYOUT_O)
        for _ in range(group_size):
            if CAUSAL:
                for j in range(low, full):
                    dk, dv = _dkdv_step(k, v, q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty, dk, dv, c,
                                        limit - j * BLOCK_M, offs_m, scale, True, STAGES, LAYOUT_S, LAYOUT_O)
                    c += 1
            for j in range(full, high):
                dk, dv = _dkdv_step(k, v, q_s, do_s, lse_s, delta_s, q_full, q_empty, do_full, do_empty, dk, dv, c, limit,
                                    offs_m, scale, False, STAGES, LAYOUT_S, LAYOUT_O)
                c += 1
        mbarrier.arrive(k_empty.index(i % K_STAGES), count=1)
        place = start.to(gl.int64) * dk_stride + head * DIM
        _store_tile(DK + place, dk * (scale * LN2), row, length, dk_stride, LAYOUT_STORE)
        _store_tile(DV + place, dv, row, length, dk_stride, LAYOUT_STORE)
        i += 1
        mbarrier.wait(k_full.index(i % K_STAGES), (i // K_STAGES) & 1)
        start, length, other, first, head = _entry(queue.index(i % K_STAGES))


@gluon.jit(do_not_specialize=_COUNTS)
def dkdv_kernel(qd, kd, vd, dod, STATS, DK, DV, TILES, COUNTER, q_head, k_head, v_head, do_head, dk_stride, total, plane,
                heads, group_size, group, scale, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr,
                STAGES: gl.constexpr, K_STAGES: gl.constexpr, CAUSAL: gl.constexpr,
                HELD: gl.constexpr):
    """DK and DV, one key tile and key head at a time, over all query heads that share the key head.

    HELD: keys and values stay in registers, which spares the shared memory half of its reads for the scores.
    """
    STATS_S: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_s = gl.allocate_shared_memory(qd.dtype, [STAGES, 1, 1, BLOCK_M, DIM], qd.layout)
    do_s = gl.allocate_shared_memory(dod.dtype, [STAGES, 1, 1, BLOCK_M, DIM], dod.layout)
    k_s = gl.allocate_shared_memory(kd.dtype, [2 * K_STAGES, 1, 1, BLOCK_N // 2, DIM], kd.layout)
    v_s = gl.allocate_shared_memory(vd.dtype, [2 * K_STAGES, 1, 1, BLOCK_N // 2, DIM], vd.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], STATS_S)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], STATS_S)
    queue = gl.allocate_shared_memory(gl.int32, [K_STAGES, 8], STATS_S)
    k_full = _barriers(K_STAGES, 1)
    k_empty = _barriers(K_STAGES, 2)
    q_full = _barriers(STAGES, 1)
    q_empty = _barriers(STAGES, 2)
    do_full = _barriers(STAGES, 1)
    do_empty = _barriers(STAGES, 2)
    gl.warp_specialize([
        (_dkdv_consumer, (0, q_s, k_s, v_s, do_s, lse_s, delta_s, queue, k_full, k_empty, q_full, q_empty, do_full,
                          do_empty, DK, DV, dk_stride, group_size, scale, BLOCK_M, BLOCK_N, DIM, STAGES, K_STAGES,
                          CAUSAL, HELD)),
        (_dkdv_consumer, (1, q_s, k_s, v_s, do_s, lse_s, delta_s, queue, k_full, k_empty, q_full, q_empty, do_full,
                          do_empty, DK, DV, dk_stride, group_size, scale, BLOCK_M, BLOCK_N, DIM, STAGES, K_STAGES,
                          CAUSAL, HELD)),
        (_dkdv_producer, (qd, kd, vd, dod, q_s, k_s, v_s, do_s, lse_s, delta_s, queue, k_full, k_empty, q_full, q_empty,
                          do_full, do_empty, STATS, TILES, COUNTER, q_head, k_head, v_head, do_head, total, plane, heads,
                          group_size, group, BLOCK_M, BLOCK_N, DIM, STAGES, K_STAGES, CAUSAL, 1)),
    ], [4, 1], [240, 24])
