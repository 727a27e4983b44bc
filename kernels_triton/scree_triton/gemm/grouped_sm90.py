"""Grouped products on Hopper in Gluon, float16 and bfloat16.

A CTA is warp-specialized: one producer warp and two consumer warp groups, as in `sm90.pipeline`.
The producer fetches tiles from a counter and fills a ring of shared memory by TMA. Each consumer
multiplies half of the rows on the tensor cores. While TMA writes a result, the producer reads the
next tile. A tile has 128 tokens and 256 columns in the product, and 256 rows and 128 columns of a
matrix in the gradient. A consumer whose rows are all after the end multiplies nothing. For the last
columns of a product both consumers multiply half as many columns if these suffice. The producer
reads nothing that is not multiplied, because zeros cost TMA more than data.

Tiles of the product are ordered by row of the batch, so that tiles with the same matrix or tokens
run together and share the L2 cache. If the last wave of tiles would keep less than half of the CTAs
busy, its tiles are split in two.
"""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..runtime.device import device_info
from ..runtime.launch import (
    Descriptor,
    Launch,
    Number,
    Pointer,
    boxed,
    launch_args,
    launch_on_device,
    ragged_shape,
)
from ..sm90.pipeline import (
    RAGGED_EXTENT,
    allocate_barriers,
    allocate_tile_queue,
    entry_field,
    fetch_tile,
    tile_counter,
)

WIDE = gl.constexpr(256)  # the long side of a tile
HALF = gl.constexpr(128)  # the short one
DEEP = gl.constexpr(64)  # what a stage of the ring holds of what the product sums over
STAGES = gl.constexpr(4)
TOKENS = gl.constexpr(
    32
)  # and of the tokens that its gradient sums over: rows end anywhere, and zeros behind the end cost time
TOKEN_STAGES = gl.constexpr(8)
GROUP = gl.constexpr(16)


@gluon.jit
def _tell(queue, told, read, i, more, steps, halves, left, front, first, column):
    """Publish a tile to the consumers.

    The entry holds whether there is a tile, its depth, the number of halves of its columns that are
    needed, the number of its rows, and its position in the output. Every thread of the producer
    warp writes a copy; see `sm90.pipeline.publish_tile`.
    """
    mbarrier.wait(read.index(i % 2), ((i // 2) & 1) ^ 1)
    e = gl.arange(0, 32 * 8, gl.BlockedLayout([8], [32], [1], [0])) % 8
    entry = gl.where(
        e == 0,
        more,
        gl.where(e == 1, steps, gl.where(e == 2, halves, gl.where(e == 3, left, column))),
    )
    entry = gl.where(e == 4, front, gl.where(e == 5, first, entry))
    queue.index(i % 2).store(entry)
    mbarrier.arrive(told.index(i % 2), count=1)


@gluon.jit
def _expect(barrier, rows, columns, DEPTH: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Announce the bytes of a step: so many times 64 rows, and 128 columns."""
    for r in gl.static_range(1, ROWS + 1):
        for c in gl.static_range(1, COLUMNS + 1):
            mbarrier.expect(
                barrier, (r * 64 + c * HALF) * DEPTH * 2, pred=(rows == r) & (columns == c)
            )


@gluon.jit
def _next(COUNTER, t, tiles):
    if t < tiles:
        t = fetch_tile(COUNTER, tiles)
    else:
        t = -1
    return t


@gluon.jit
def _slots(length):
    return gl.cdiv(length, HALF)


@gluon.jit
def _product_producer(
    xd,
    wd,
    a_s,
    b_s,
    queue,
    told,
    read,
    full,
    empty,
    OFFSETS,
    COUNTER,
    n,
    total,
    tiles,
    k,
    m,
    TURNED: gl.constexpr,
):
    columns = gl.cdiv(m, WIDE)
    rest = tiles % gl.num_programs(0)
    rest = gl.where(rest * 2 <= gl.num_programs(0), rest, 0)
    whole = tiles - rest
    t = gl.program_id(0)
    i = 0
    c = 0
    # The row of the batch that the tile is of, and the tiles before this row and in it. Row n are
    # the tokens behind the last.
    row = 0
    start = gl.load(OFFSETS).to(gl.int32)
    end = gl.load(OFFSETS + 1).to(gl.int32)
    before = 0
    count = _slots(end - start) * columns
    while t >= 0:
        tile = gl.where(t < whole, t, whole + (t - whole) // 2)
        while (row < n) & (tile >= before + count):
            before += count
            row += 1
            start = end
            end = gl.load(OFFSETS + row + 1, mask=row < n, other=total).to(gl.int32)
            count = _slots(end - start) * columns
        # GROUP slots side by side, so that they share the tiles of the matrix in the cache
        r = tile - before
        first = r // (GROUP * columns) * GROUP
        side = gl.maximum(gl.minimum(_slots(end - start) - first, GROUP), 1)
        at = start + (first + r % (GROUP * columns) % side) * HALF
        column = r % (GROUP * columns) // side * WIDE
        cut = t >= whole
        column += gl.where(cut, (t - whole) % 2 * HALF, 0)
        there = (t < tiles + rest) & (column < m)
        left = gl.where(there, end - at, 0)
        steps = gl.where(there & (row < n), gl.cdiv(k, DEEP), 0)
        rows = gl.where(left > 64, 2, 1)
        halves = gl.where(cut | (column + HALF >= m), 1, 2)
        _tell(
            queue,
            told,
            read,
            i,
            (t < tiles + rest).to(gl.int32),
            steps,
            halves,
            left,
            end,
            RAGGED_EXTENT - end + at,
            column,
        )
        for j in range(steps):
            stage = c % STAGES
            mbarrier.wait(empty.index(stage), ((c // STAGES) & 1) ^ 1)
            _expect(full.index(stage), rows, halves, DEEP, 2, 2)
            for u in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    xd,
                    [at + u * 64, j * DEEP],
                    full.index(stage),
                    a_s.index(stage * 2 + u),
                    pred=u < rows,
                )
            for u in gl.static_range(2):
                b = b_s.index(stage).slice(u * HALF, HALF, 1 if TURNED else 2)
                part = column + u * HALF
                if TURNED:
                    tma.async_copy_global_to_shared(
                        wd, [row, part, j * DEEP], full.index(stage), b, pred=u < halves
                    )
                else:
                    tma.async_copy_global_to_shared(
                        wd, [row, j * DEEP, part], full.index(stage), b, pred=u < halves
                    )
            c += 1
        t = _next(COUNTER, t, tiles + rest)
        i += 1


@gluon.jit
def _weight_producer(xd, dyd, a_s, b_s, queue, told, read, full, empty, OFFSETS, COUNTER, n, k, m):
    columns = gl.cdiv(m, HALF)
    count = gl.cdiv(k, WIDE) * columns  # tiles of a matrix
    t = gl.program_id(0)
    i = 0
    c = 0
    while t >= 0:
        there = t < n * count
        row = gl.minimum(t // count, n - 1)
        start = gl.load(OFFSETS + row).to(gl.int32)
        end = gl.load(OFFSETS + row + 1).to(gl.int32)
        column = t % columns * HALF
        depth = t % count // columns * WIDE
        left = gl.where(there, k - depth, 0)
        rows = gl.minimum(gl.cdiv(left, 64), 4)
        steps = gl.where(there, gl.cdiv(end - start, TOKENS), 0)
        _tell(queue, told, read, i, there.to(gl.int32), steps, 1, left, row, depth, column)
        for j in range(steps):
            stage = c % TOKEN_STAGES
            at = RAGGED_EXTENT - end + start + j * TOKENS
            mbarrier.wait(empty.index(stage), ((c // TOKEN_STAGES) & 1) ^ 1)
            _expect(full.index(stage), rows, 1, TOKENS, 4, 1)
            for u in gl.static_range(4):
                tma.async_copy_global_to_shared(
                    xd,
                    [RAGGED_EXTENT, end, at, depth + u * 64],
                    full.index(stage),
                    a_s.index(stage * 4 + u),
                    pred=u < rows,
                )
            tma.async_copy_global_to_shared(
                dyd, [RAGGED_EXTENT, end, at, column], full.index(stage), b_s.index(stage)
            )
            c += 1
        t = _next(COUNTER, t, n * count)
        i += 1


@gluon.jit
def _flat(tile):
    """A tile without the dimensions of one element in front."""
    RANK: gl.constexpr = len(tile.shape)
    return tile.reshape([tile.shape[RANK - 2], tile.shape[RANK - 1]])


@gluon.jit
def _store(outd, o, value, front, first, column, WEIGHT: gl.constexpr):
    tma.store_wait(pendings=0)  # `o` has been read
    _flat(o).store(value.to(o.dtype))
    fence_async_shared()
    if WEIGHT:
        tma.async_copy_shared_to_global(outd, [front, first, column], o)
    else:
        tma.async_copy_shared_to_global(outd, [RAGGED_EXTENT, front, first, column], o)


@gluon.jit
def _zeros(COLUMNS: gl.constexpr):
    return gl.zeros(
        [64, COLUMNS], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    )


@gluon.jit
def _multiply(
    w: gl.constexpr,
    outd,
    a_s,
    b_s,
    o,
    full,
    empty,
    steps,
    c,
    front,
    first,
    column,
    COLUMNS: gl.constexpr,
    TURNED: gl.constexpr,
):
    """64 tokens and this many columns of a product, from the step `c` of the ring on, and where the
    next tile begins.
    """
    acc = _zeros(COLUMNS)
    for j in range(steps):
        stage = c % STAGES
        mbarrier.wait(full.index(stage), (c // STAGES) & 1)
        b = _flat(b_s.index(stage))
        if TURNED:
            b = b.slice(0, COLUMNS, 0).permute((1, 0))
        else:
            b = b.slice(0, COLUMNS, 1)
        acc = warpgroup_mma(a_s.index(stage * 2 + w), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if j > 0:
            mbarrier.arrive(empty.index((c - 1) % STAGES), count=1)
        c += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    if steps > 0:
        mbarrier.arrive(empty.index((c - 1) % STAGES), count=1)
    if COLUMNS == WIDE:  # in halves, which leaves shared memory for one stage more
        one, two = gl.split(acc.reshape([64, 2, HALF]).permute((0, 2, 1)))
        _store(outd, o, one, front, first, column, False)
        _store(outd, o, two, front, first, column + HALF, False)
    else:
        _store(outd, o, acc, front, first, column, False)
    return c


@gluon.jit
def _multiply_turned(
    w: gl.constexpr, outd, a_s, b_s, o, full, empty, steps, c, front, first, column
):
    """The same for 128 rows and columns of the gradient of a matrix."""
    one = _zeros(HALF)
    two = _zeros(HALF)
    for j in range(steps):
        stage = c % TOKEN_STAGES
        mbarrier.wait(full.index(stage), (c // TOKEN_STAGES) & 1)
        b = _flat(b_s.index(stage))
        one = warpgroup_mma(
            _flat(a_s.index(stage * 4 + w * 2)).permute((1, 0)), b, one, is_async=True
        )
        two = warpgroup_mma(
            _flat(a_s.index(stage * 4 + w * 2 + 1)).permute((1, 0)), b, two, is_async=True
        )
        one, two = warpgroup_mma_wait(2, deps=(one, two))
        if j > 0:
            mbarrier.arrive(empty.index((c - 1) % TOKEN_STAGES), count=1)
        c += 1
    one, two = warpgroup_mma_wait(0, deps=(one, two))
    if steps > 0:
        mbarrier.arrive(empty.index((c - 1) % TOKEN_STAGES), count=1)
    _store(outd, o, one, front, first, column, True)
    _store(outd, o, two, front, first + 64, column, True)
    return c


@gluon.jit
def _consumer(
    w: gl.constexpr,
    outd,
    a_s,
    b_s,
    o_s,
    queue,
    told,
    read,
    full,
    empty,
    WEIGHT: gl.constexpr,
    TURNED: gl.constexpr,
):
    ROWS: gl.constexpr = 128 if WEIGHT else 64
    SLOTS: gl.constexpr = full.shape[0]
    o = o_s.index(w)
    i = 0
    c = 0
    more = 1
    while more > 0:
        mbarrier.wait(told.index(i % 2), (i // 2) & 1)
        entry = queue.index(i % 2).slice(0, 8).load(gl.BlockedLayout([8], [32], [4], [0]))
        more = entry_field(entry, 0)
        steps = entry_field(entry, 1)
        halves = entry_field(entry, 2)
        left = entry_field(entry, 3)
        front = entry_field(entry, 4)
        first = entry_field(entry, 5) + w * ROWS
        column = entry_field(entry, 6)
        mbarrier.arrive(read.index(i % 2), count=1)
        if left <= w * ROWS:
            for _ in range(steps):
                mbarrier.wait(full.index(c % SLOTS), (c // SLOTS) & 1)
                mbarrier.arrive(empty.index(c % SLOTS), count=1)
                c += 1
        elif WEIGHT:
            c = _multiply_turned(w, outd, a_s, b_s, o, full, empty, steps, c, front, first, column)
        elif halves == 1:
            c = _multiply(
                w, outd, a_s, b_s, o, full, empty, steps, c, front, first, column, HALF, TURNED
            )
        else:
            c = _multiply(
                w, outd, a_s, b_s, o, full, empty, steps, c, front, first, column, WIDE, TURNED
            )
        i += 1
    tma.store_wait(pendings=0)


@gluon.jit
def _signals(stages: gl.constexpr):
    """The queue of tiles, what tells of it and that it was read; and what tells that a slot of the
    rings is full or empty.
    """
    return (
        allocate_tile_queue(),
        allocate_barriers(2, 1),
        allocate_barriers(2, 2),
        allocate_barriers(stages, 1),
        allocate_barriers(stages, 2),
    )


@gluon.jit(do_not_specialize=("n", "total", "k", "m"))
def product_kernel(xd, wd, outd, OFFSETS, COUNTER, n, total, k, m, TURNED: gl.constexpr):
    """OUT (total, m) = X (total, k) times, for each token, the matrix (k, m) of its row; W is (n,
    k, m), TURNED (n, m, k).
    """
    a_s = gl.allocate_shared_memory(xd.dtype, [STAGES * 2, 64, DEEP], xd.layout)
    b_s = gl.allocate_shared_memory(
        xd.dtype, [STAGES, 1, WIDE, DEEP] if TURNED else [STAGES, 1, DEEP, WIDE], wd.layout
    )
    o_s = gl.allocate_shared_memory(xd.dtype, [2, 1, 1, 64, HALF], outd.layout)
    queue, told, read, full, empty = _signals(STAGES)
    slots = 0
    for at in range(0, n + 1, 128):
        row = at + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
        start = gl.load(OFFSETS + row, mask=row <= n, other=0).to(gl.int32)
        end = gl.load(OFFSETS + row + 1, mask=row < n, other=total).to(gl.int32)
        slots += gl.sum(gl.where(row <= n, _slots(end - start), 0), 0)
    tiles = slots * gl.cdiv(m, WIDE)
    gl.warp_specialize(
        [
            (_consumer, (0, outd, a_s, b_s, o_s, queue, told, read, full, empty, False, TURNED)),
            (_consumer, (1, outd, a_s, b_s, o_s, queue, told, read, full, empty, False, TURNED)),
            (
                _product_producer,
                (
                    xd,
                    wd,
                    a_s,
                    b_s,
                    queue,
                    told,
                    read,
                    full,
                    empty,
                    OFFSETS,
                    COUNTER,
                    n,
                    total,
                    tiles,
                    k,
                    m,
                    TURNED,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit(do_not_specialize=("n", "k", "m"))
def weight_kernel(xd, dyd, dwd, OFFSETS, COUNTER, n, k, m):
    """DW (n, k, m): of each row, X (tokens, k) turned over times DY (tokens, m)."""
    a_s = gl.allocate_shared_memory(xd.dtype, [TOKEN_STAGES * 4, 1, 1, TOKENS, 64], xd.layout)
    b_s = gl.allocate_shared_memory(xd.dtype, [TOKEN_STAGES, 1, 1, TOKENS, HALF], dyd.layout)
    o_s = gl.allocate_shared_memory(xd.dtype, [2, 1, 64, HALF], dwd.layout)
    queue, told, read, full, empty = _signals(TOKEN_STAGES)
    gl.warp_specialize(
        [
            (_consumer, (0, dwd, a_s, b_s, o_s, queue, told, read, full, empty, True, False)),
            (_consumer, (1, dwd, a_s, b_s, o_s, queue, told, read, full, empty, True, False)),
            (
                _weight_producer,
                (xd, dyd, a_s, b_s, queue, told, read, full, empty, OFFSETS, COUNTER, n, k, m),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@launch_args
class ProductArgs:
    """Arguments of `product_kernel`."""

    xd: Descriptor
    wd: Descriptor
    outd: Descriptor
    OFFSETS: Pointer
    COUNTER: Pointer
    n: Number
    total: Number
    k: Number
    m: Number


@launch_args
class WeightArgs:
    """Arguments of `weight_kernel`."""

    xd: Descriptor
    dyd: Descriptor
    dwd: Descriptor
    OFFSETS: Pointer
    COUNTER: Pointer
    n: Number
    k: Number
    m: Number


@cache
def _launch(
    device: torch.device, dtype: torch.dtype, offsets: torch.dtype, turned: bool | None
) -> Launch:
    """Return the launch of the product, with transposed matrices or not; with None of their
    gradient.
    """
    options = dict(num_warps=4, maxnreg=168)
    if turned is None:
        return Launch(weight_kernel, {}, options, (TOKENS.value, TOKENS.value, 64), args=WeightArgs)
    tile_rows = 64, HALF.value if turned else DEEP.value, 64
    return Launch(product_kernel, dict(TURNED=turned), options, tile_rows, args=ProductArgs)


def product(
    x: torch.Tensor, weight: torch.Tensor, turned: bool, offsets: torch.Tensor, out: torch.Tensor
) -> None:
    """Write x (total, k) times the matrix of each row to out (total, m).

    The weight is (n, k, m), or if `turned` (n, m, k).
    """
    (total, k), m = x.shape, out.shape[1]
    args = ProductArgs(
        xd=(x, boxed(tuple(x.shape), x.stride(), DEEP.value)),
        wd=(weight, boxed(tuple(weight.shape), weight.stride(), (DEEP if turned else HALF).value)),
        outd=(out, boxed(*ragged_shape(1, m, m, m), HALF.value)),
        OFFSETS=offsets,
        COUNTER=tile_counter(x.device),
        n=weight.shape[0],
        total=total,
        k=k,
        m=m,
    )
    launch = _launch(x.device, x.dtype, offsets.dtype, turned)
    launch_on_device(launch, device_info(x.device).sm_count, args)


def weight_gradient(
    x: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor, dw: torch.Tensor
) -> None:
    """Write, per row, the transpose of x (tokens, k) times dy (tokens, m) to dw (n, k, m)."""
    n, k, m = dw.shape
    args = WeightArgs(
        xd=(x, boxed(*ragged_shape(1, k, x.stride(0), k), 64)),
        dyd=(dy, boxed(*ragged_shape(1, m, dy.stride(0), m), HALF.value)),
        dwd=(dw, boxed(tuple(dw.shape), dw.stride(), HALF.value)),
        OFFSETS=offsets,
        COUNTER=tile_counter(x.device),
        n=n,
        k=k,
        m=m,
    )
    launch = _launch(x.device, x.dtype, offsets.dtype, None)
    launch_on_device(launch, device_info(x.device).sm_count, args)
