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

from ..runtime.descriptors import boxed, ragged_shape
from ..runtime.device import device_info
from ..runtime.launch import (
    Descriptor,
    Launch,
    Number,
    Pointer,
    Written,
    WrittenDescriptor,
    launch_args,
    launch_on_device,
)
from ..sm90.pipeline import (
    RAGGED_EXTENT,
    allocate_barriers,
    allocate_tile_queue,
    entry_field,
    fetch_tile,
    tile_counters,
    tma_load,
    tma_store,
)

# The sides of a tile.
TILE_LONG = gl.constexpr(256)
TILE_SHORT = gl.constexpr(128)
# Elements of the summed axis per stage of the product.
BLOCK_K = gl.constexpr(64)
STAGES = gl.constexpr(4)
# Tokens per stage of the gradient. Rows may end within a block, and zeros after the end cost time.
BLOCK_TOKENS = gl.constexpr(32)
TOKEN_STAGES = gl.constexpr(8)
GROUP = gl.constexpr(16)


@gluon.jit
def _publish_tile(
    queue, published, consumed, tile_count, has_tile, steps, halves, remaining, outer, first, column
):
    """Publish a tile to the consumers.

    The entry holds whether there is a tile, its depth, the number of halves of its columns that are
    needed, the number of its rows, and its position in the output. Every thread of the producer
    warp writes a copy; see `sm90.pipeline.publish_tile`.
    """
    mbarrier.wait(consumed.index(tile_count % 2), ((tile_count // 2) & 1) ^ 1)
    field = gl.arange(0, 32 * 8, gl.BlockedLayout([8], [32], [1], [0])) % 8
    entry = gl.where(
        field == 0,
        has_tile,
        gl.where(
            field == 1, steps, gl.where(field == 2, halves, gl.where(field == 3, remaining, column))
        ),
    )
    entry = gl.where(field == 4, outer, gl.where(field == 5, first, entry))
    queue.index(tile_count % 2).store(entry)
    mbarrier.arrive(published.index(tile_count % 2), count=1)


@gluon.jit
def _expect_bytes(
    barrier, rows, columns, DEPTH: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr
):
    """Announce the bytes of a step: 64 * `rows` rows and 128 * `columns` columns."""
    for r in gl.static_range(1, ROWS + 1):
        for c in gl.static_range(1, COLUMNS + 1):
            mbarrier.expect(
                barrier, (r * 64 + c * TILE_SHORT) * DEPTH * 2, pred=(rows == r) & (columns == c)
            )


@gluon.jit
def _fetch_next(COUNTER, tile_index, tiles):
    if tile_index < tiles:
        tile_index = fetch_tile(COUNTER, tiles)
    else:
        tile_index = -1
    return tile_index


@gluon.jit
def _slots(length):
    return gl.cdiv(length, TILE_SHORT)


@gluon.jit
def _product_producer(
    xd,
    wd,
    a_s,
    b_s,
    queue,
    published,
    consumed,
    full,
    empty,
    OFFSETS,
    COUNTER,
    n,
    total,
    tiles,
    k,
    m,
    TRANSPOSED: gl.constexpr,
):
    columns = gl.cdiv(m, TILE_LONG)
    split_tiles = tiles % gl.num_programs(0)
    split_tiles = gl.where(split_tiles * 2 <= gl.num_programs(0), split_tiles, 0)
    unsplit_tiles = tiles - split_tiles
    tile_index = gl.program_id(0)
    tile_count = 0
    step_index = 0
    # The row of the batch that contains the tile, the tiles before this row, and the tiles in it.
    # Row n is the tail: the tokens after the last row.
    row = 0
    start = gl.load(OFFSETS).to(gl.int32)
    end = gl.load(OFFSETS + 1).to(gl.int32)
    before = 0
    count = _slots(end - start) * columns
    while tile_index >= 0:
        tile = gl.where(
            tile_index < unsplit_tiles,
            tile_index,
            unsplit_tiles + (tile_index - unsplit_tiles) // 2,
        )
        while (row < n) & (tile >= before + count):
            before += count
            row += 1
            start = end
            end = gl.load(OFFSETS + row + 1, mask=row < n, other=total).to(gl.int32)
            count = _slots(end - start) * columns
        # GROUP consecutive slots run together, so that they share tiles of the matrix in the cache.
        r = tile - before
        first = r // (GROUP * columns) * GROUP
        group_size = gl.maximum(gl.minimum(_slots(end - start) - first, GROUP), 1)
        token_start = start + (first + r % (GROUP * columns) % group_size) * TILE_SHORT
        column = r % (GROUP * columns) // group_size * TILE_LONG
        is_split = tile_index >= unsplit_tiles
        column += gl.where(is_split, (tile_index - unsplit_tiles) % 2 * TILE_SHORT, 0)
        is_valid = (tile_index < tiles + split_tiles) & (column < m)
        remaining = gl.where(is_valid, end - token_start, 0)
        steps = gl.where(is_valid & (row < n), gl.cdiv(k, BLOCK_K), 0)
        rows = gl.where(remaining > 64, 2, 1)
        halves = gl.where(is_split | (column + TILE_SHORT >= m), 1, 2)
        _publish_tile(
            queue,
            published,
            consumed,
            tile_count,
            (tile_index < tiles + split_tiles).to(gl.int32),
            steps,
            halves,
            remaining,
            end,
            RAGGED_EXTENT - end + token_start,
            column,
        )
        for j in range(steps):
            stage = step_index % STAGES
            mbarrier.wait(empty.index(stage), ((step_index // STAGES) & 1) ^ 1)
            _expect_bytes(full.index(stage), rows, halves, BLOCK_K, 2, 2)
            for u in gl.static_range(2):
                tma_load(
                    xd,
                    [token_start + u * 64, j * BLOCK_K],
                    full.index(stage),
                    a_s.index(stage * 2 + u),
                    pred=u < rows,
                )
            for u in gl.static_range(2):
                b = b_s.index(stage).slice(u * TILE_SHORT, TILE_SHORT, 1 if TRANSPOSED else 2)
                part = column + u * TILE_SHORT
                if TRANSPOSED:
                    tma_load(wd, [row, part, j * BLOCK_K], full.index(stage), b, pred=u < halves)
                else:
                    tma_load(wd, [row, j * BLOCK_K, part], full.index(stage), b, pred=u < halves)
            step_index += 1
        tile_index = _fetch_next(COUNTER, tile_index, tiles + split_tiles)
        tile_count += 1


@gluon.jit
def _weight_producer(
    xd, dyd, a_s, b_s, queue, published, consumed, full, empty, OFFSETS, COUNTER, n, k, m
):
    columns = gl.cdiv(m, TILE_SHORT)
    count = gl.cdiv(k, TILE_LONG) * columns  # tiles of a matrix
    tile_index = gl.program_id(0)
    tile_count = 0
    step_index = 0
    while tile_index >= 0:
        is_valid = tile_index < n * count
        row = gl.minimum(tile_index // count, n - 1)
        start = gl.load(OFFSETS + row).to(gl.int32)
        end = gl.load(OFFSETS + row + 1).to(gl.int32)
        column = tile_index % columns * TILE_SHORT
        depth = tile_index % count // columns * TILE_LONG
        remaining = gl.where(is_valid, k - depth, 0)
        rows = gl.minimum(gl.cdiv(remaining, 64), 4)
        steps = gl.where(is_valid, gl.cdiv(end - start, BLOCK_TOKENS), 0)
        _publish_tile(
            queue,
            published,
            consumed,
            tile_count,
            is_valid.to(gl.int32),
            steps,
            1,
            remaining,
            row,
            depth,
            column,
        )
        for j in range(steps):
            stage = step_index % TOKEN_STAGES
            token_start = RAGGED_EXTENT - end + start + j * BLOCK_TOKENS
            mbarrier.wait(empty.index(stage), ((step_index // TOKEN_STAGES) & 1) ^ 1)
            _expect_bytes(full.index(stage), rows, 1, BLOCK_TOKENS, 4, 1)
            for u in gl.static_range(4):
                tma_load(
                    xd,
                    [RAGGED_EXTENT, end, token_start, depth + u * 64],
                    full.index(stage),
                    a_s.index(stage * 4 + u),
                    pred=u < rows,
                )
            tma_load(
                dyd, [RAGGED_EXTENT, end, token_start, column], full.index(stage), b_s.index(stage)
            )
            step_index += 1
        tile_index = _fetch_next(COUNTER, tile_index, n * count)
        tile_count += 1


@gluon.jit
def _as_matrix(tile):
    """Return a tile without its leading dimensions of size 1."""
    RANK: gl.constexpr = len(tile.shape)
    return tile.reshape([tile.shape[RANK - 2], tile.shape[RANK - 1]])


@gluon.jit
def _store(outd, o, value, outer, first, column, WEIGHT: gl.constexpr):
    # The previous store must have read `o`.
    tma.store_wait(pendings=0)
    _as_matrix(o).store(value.to(o.dtype))
    fence_async_shared()
    if WEIGHT:
        tma_store(outd, [outer, first, column], o)
    else:
        tma_store(outd, [RAGGED_EXTENT, outer, first, column], o)


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
    step_index,
    outer,
    first,
    column,
    COLUMNS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """Compute 64 tokens and COLUMNS columns of a product, from the step `step_index` of the ring on.

    Return the step at which the next tile begins.
    """
    acc = _zeros(COLUMNS)
    for j in range(steps):
        stage = step_index % STAGES
        mbarrier.wait(full.index(stage), (step_index // STAGES) & 1)
        b = _as_matrix(b_s.index(stage))
        if TRANSPOSED:
            b = b.slice(0, COLUMNS, 0).permute((1, 0))
        else:
            b = b.slice(0, COLUMNS, 1)
        acc = warpgroup_mma(a_s.index(stage * 2 + w), b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if j > 0:
            mbarrier.arrive(empty.index((step_index - 1) % STAGES), count=1)
        step_index += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    if steps > 0:
        mbarrier.arrive(empty.index((step_index - 1) % STAGES), count=1)
    # Halves leave shared memory for one more stage.
    if COLUMNS == TILE_LONG:
        left_half, right_half = gl.split(acc.reshape([64, 2, TILE_SHORT]).permute((0, 2, 1)))
        _store(outd, o, left_half, outer, first, column, False)
        _store(outd, o, right_half, outer, first, column + TILE_SHORT, False)
    else:
        _store(outd, o, acc, outer, first, column, False)
    return step_index


@gluon.jit
def _multiply_transposed(
    w: gl.constexpr, outd, a_s, b_s, o, full, empty, steps, step_index, outer, first, column
):
    """Compute 128 rows and columns of the gradient of a matrix; see `_multiply`."""
    upper_half = _zeros(TILE_SHORT)
    lower_half = _zeros(TILE_SHORT)
    for j in range(steps):
        stage = step_index % TOKEN_STAGES
        mbarrier.wait(full.index(stage), (step_index // TOKEN_STAGES) & 1)
        b = _as_matrix(b_s.index(stage))
        upper_half = warpgroup_mma(
            _as_matrix(a_s.index(stage * 4 + w * 2)).permute((1, 0)), b, upper_half, is_async=True
        )
        lower_half = warpgroup_mma(
            _as_matrix(a_s.index(stage * 4 + w * 2 + 1)).permute((1, 0)),
            b,
            lower_half,
            is_async=True,
        )
        upper_half, lower_half = warpgroup_mma_wait(2, deps=(upper_half, lower_half))
        if j > 0:
            mbarrier.arrive(empty.index((step_index - 1) % TOKEN_STAGES), count=1)
        step_index += 1
    upper_half, lower_half = warpgroup_mma_wait(0, deps=(upper_half, lower_half))
    if steps > 0:
        mbarrier.arrive(empty.index((step_index - 1) % TOKEN_STAGES), count=1)
    _store(outd, o, upper_half, outer, first, column, True)
    _store(outd, o, lower_half, outer, first + 64, column, True)
    return step_index


@gluon.jit
def _consumer(
    w: gl.constexpr,
    outd,
    a_s,
    b_s,
    o_s,
    queue,
    published,
    consumed,
    full,
    empty,
    WEIGHT: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    ROWS: gl.constexpr = 128 if WEIGHT else 64
    SLOTS: gl.constexpr = full.shape[0]
    o = o_s.index(w)
    tile_count = 0
    step_index = 0
    has_tile = 1
    while has_tile > 0:
        mbarrier.wait(published.index(tile_count % 2), (tile_count // 2) & 1)
        entry = queue.index(tile_count % 2).slice(0, 8).load(gl.BlockedLayout([8], [32], [4], [0]))
        has_tile = entry_field(entry, 0)
        steps = entry_field(entry, 1)
        halves = entry_field(entry, 2)
        remaining = entry_field(entry, 3)
        outer = entry_field(entry, 4)
        first = entry_field(entry, 5) + w * ROWS
        column = entry_field(entry, 6)
        mbarrier.arrive(consumed.index(tile_count % 2), count=1)
        if remaining <= w * ROWS:
            for _ in range(steps):
                mbarrier.wait(full.index(step_index % SLOTS), (step_index // SLOTS) & 1)
                mbarrier.arrive(empty.index(step_index % SLOTS), count=1)
                step_index += 1
        elif WEIGHT:
            step_index = _multiply_transposed(
                w, outd, a_s, b_s, o, full, empty, steps, step_index, outer, first, column
            )
        elif halves == 1:
            step_index = _multiply(
                w,
                outd,
                a_s,
                b_s,
                o,
                full,
                empty,
                steps,
                step_index,
                outer,
                first,
                column,
                TILE_SHORT,
                TRANSPOSED,
            )
        else:
            step_index = _multiply(
                w,
                outd,
                a_s,
                b_s,
                o,
                full,
                empty,
                steps,
                step_index,
                outer,
                first,
                column,
                TILE_LONG,
                TRANSPOSED,
            )
        tile_count += 1
    tma.store_wait(pendings=0)


@gluon.jit
def _allocate_barriers(stages: gl.constexpr):
    """Allocate the queue of tiles, and the barriers of the queue and of the rings.

    The barriers signal that a tile is published or consumed, and that a stage is full or empty.
    """
    return (
        allocate_tile_queue(),
        allocate_barriers(2, 1),
        allocate_barriers(2, 2),
        allocate_barriers(stages, 1),
        allocate_barriers(stages, 2),
    )


@gluon.jit(do_not_specialize=("n", "total", "k", "m"))
def grouped_product_sm90_kernel(
    xd, wd, outd, OFFSETS, COUNTER, n, total, k, m, TRANSPOSED: gl.constexpr
):
    """Compute OUT (total, m): X (total, k) times the matrix (k, m) of the row of each token.

    W is (n, k, m), or with TRANSPOSED (n, m, k).
    """
    a_s = gl.allocate_shared_memory(xd.dtype, [STAGES * 2, 64, BLOCK_K], xd.layout)
    b_s = gl.allocate_shared_memory(
        xd.dtype,
        [STAGES, 1, TILE_LONG, BLOCK_K] if TRANSPOSED else [STAGES, 1, BLOCK_K, TILE_LONG],
        wd.layout,
    )
    o_s = gl.allocate_shared_memory(xd.dtype, [2, 1, 1, 64, TILE_SHORT], outd.layout)
    queue, published, consumed, full, empty = _allocate_barriers(STAGES)
    slots = 0
    for first_row in range(0, n + 1, 128):
        row = first_row + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
        start = gl.load(OFFSETS + row, mask=row <= n, other=0).to(gl.int32)
        end = gl.load(OFFSETS + row + 1, mask=row < n, other=total).to(gl.int32)
        slots += gl.sum(gl.where(row <= n, _slots(end - start), 0), 0)
    tiles = slots * gl.cdiv(m, TILE_LONG)
    gl.warp_specialize(
        [
            (
                _consumer,
                (
                    0,
                    outd,
                    a_s,
                    b_s,
                    o_s,
                    queue,
                    published,
                    consumed,
                    full,
                    empty,
                    False,
                    TRANSPOSED,
                ),
            ),
            (
                _consumer,
                (
                    1,
                    outd,
                    a_s,
                    b_s,
                    o_s,
                    queue,
                    published,
                    consumed,
                    full,
                    empty,
                    False,
                    TRANSPOSED,
                ),
            ),
            (
                _product_producer,
                (
                    xd,
                    wd,
                    a_s,
                    b_s,
                    queue,
                    published,
                    consumed,
                    full,
                    empty,
                    OFFSETS,
                    COUNTER,
                    n,
                    total,
                    tiles,
                    k,
                    m,
                    TRANSPOSED,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit(do_not_specialize=("n", "k", "m"))
def grouped_weight_sm90_kernel(xd, dyd, dwd, OFFSETS, COUNTER, n, k, m):
    """Compute DW (n, k, m): per row, the transpose of X (tokens, k) times DY (tokens, m)."""
    a_s = gl.allocate_shared_memory(xd.dtype, [TOKEN_STAGES * 4, 1, 1, BLOCK_TOKENS, 64], xd.layout)
    b_s = gl.allocate_shared_memory(
        xd.dtype, [TOKEN_STAGES, 1, 1, BLOCK_TOKENS, TILE_SHORT], dyd.layout
    )
    o_s = gl.allocate_shared_memory(xd.dtype, [2, 1, 64, TILE_SHORT], dwd.layout)
    queue, published, consumed, full, empty = _allocate_barriers(TOKEN_STAGES)
    gl.warp_specialize(
        [
            (
                _consumer,
                (0, dwd, a_s, b_s, o_s, queue, published, consumed, full, empty, True, False),
            ),
            (
                _consumer,
                (1, dwd, a_s, b_s, o_s, queue, published, consumed, full, empty, True, False),
            ),
            (
                _weight_producer,
                (
                    xd,
                    dyd,
                    a_s,
                    b_s,
                    queue,
                    published,
                    consumed,
                    full,
                    empty,
                    OFFSETS,
                    COUNTER,
                    n,
                    k,
                    m,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@launch_args
class ProductArgs:
    """Arguments of `grouped_product_sm90_kernel`."""

    xd: Descriptor
    wd: Descriptor
    outd: WrittenDescriptor
    OFFSETS: Pointer
    COUNTER: Written
    n: Number
    total: Number
    k: Number
    m: Number


@launch_args
class WeightArgs:
    """Arguments of `grouped_weight_sm90_kernel`."""

    xd: Descriptor
    dyd: Descriptor
    dwd: WrittenDescriptor
    OFFSETS: Pointer
    COUNTER: Written
    n: Number
    k: Number
    m: Number


@cache
def _launch(
    device: torch.device, dtype: torch.dtype, offsets: torch.dtype, transposed: bool | None
) -> Launch:
    """Return the launch of the product; if `transposed` is None, of the gradient of the matrices."""
    options = dict(num_warps=4, maxnreg=168)
    if transposed is None:
        return Launch(
            grouped_weight_sm90_kernel,
            {},
            options,
            (BLOCK_TOKENS.value, BLOCK_TOKENS.value, 64),
            args=WeightArgs,
        )
    tile_rows = 64, TILE_SHORT.value if transposed else BLOCK_K.value, 64
    return Launch(
        grouped_product_sm90_kernel,
        dict(TRANSPOSED=transposed),
        options,
        tile_rows,
        args=ProductArgs,
    )


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    transposed: bool,
    offsets: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write x (total, k) times the matrix of each row to out (total, m).

    The weight is (n, k, m), or if `transposed` (n, m, k).
    """
    (total, k), m = x.shape, out.shape[1]
    args = ProductArgs(
        xd=(x, boxed(tuple(x.shape), x.stride(), BLOCK_K.value)),
        wd=(
            weight,
            boxed(
                tuple(weight.shape), weight.stride(), (BLOCK_K if transposed else TILE_SHORT).value
            ),
        ),
        outd=(out, boxed(*ragged_shape(1, m, m, m), TILE_SHORT.value)),
        OFFSETS=offsets,
        COUNTER=tile_counters(x.device)(),
        n=weight.shape[0],
        total=total,
        k=k,
        m=m,
    )
    launch = _launch(x.device, x.dtype, offsets.dtype, transposed)
    launch_on_device(launch, device_info(x.device).sm_count, args)


def weight_gradient(
    x: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor, dw: torch.Tensor
) -> None:
    """Write, per row, the transpose of x (tokens, k) times dy (tokens, m) to dw (n, k, m)."""
    n, k, m = dw.shape
    args = WeightArgs(
        xd=(x, boxed(*ragged_shape(1, k, x.stride(0), k), 64)),
        dyd=(dy, boxed(*ragged_shape(1, m, dy.stride(0), m), TILE_SHORT.value)),
        dwd=(dw, boxed(tuple(dw.shape), dw.stride(), TILE_SHORT.value)),
        OFFSETS=offsets,
        COUNTER=tile_counters(x.device)(),
        n=n,
        k=k,
        m=m,
    )
    launch = _launch(x.device, x.dtype, offsets.dtype, None)
    launch_on_device(launch, device_info(x.device).sm_count, args)
