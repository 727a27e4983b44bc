"""Varlen tile scheduler: cut every row of a ragged batch into tiles, longest processing time first.

The schedule is computed on the device. The number of tiles depends on offsets that are on the
device, but ``total // block + n + 1`` bounds it and is known on the host. Block ``j`` of row ``b``
goes to slot ``offsets[b] // block + b + j``, and a slot finds its row by binary search. Slots that
no row fills are holes; they go to the end of the schedule, where no CTA looks.

Values may have more tokens than the rows contain. The tail, the tokens after the last row, counts
as one more row that attends nothing. So kernels write zeros there and leave nothing unwritten.
"""

import torch
import triton
import triton.language as tl

#: A window side that reaches further than any row.
UNBOUNDED = 1 << 30
#: int32 fields of an entry: 32 bytes, so that one vector load reads an entry.
FIELDS = 8

# A sort key: work (17 bits), row (24 bits), block in the row (22 bits). Work only orders the tiles,
# so it may saturate.
_ROW_BITS = tl.constexpr(24)
_BLOCK_BITS = tl.constexpr(22)
_MAX_WORK = tl.constexpr((1 << 17) - 1)
_ROW_MASK = tl.constexpr((1 << 24) - 1)
_BLOCK_MASK = tl.constexpr((1 << 22) - 1)
_CHUNK = 256
#: Schedules of at most this many slots are ordered by counting, without a sort.
MAX_COUNTED_SLOTS = 2048
_COUNTED_CHUNK = 64


@triton.jit
def _row_bounds(OFFSETS, OTHER_OFFSETS, row, n, total):
    """Return the offset and length of a row, and of its other side; row n is the tail."""
    is_row = row < n
    start = tl.load(OFFSETS + row)
    end = tl.load(OFFSETS + row + 1, mask=is_row, other=total)
    other_start = tl.load(OTHER_OFFSETS + row, mask=is_row, other=0)
    other_end = tl.load(OTHER_OFFSETS + row + 1, mask=is_row, other=0)
    return start, end - start, other_start, other_end - other_start


@triton.jit
def _sort_key(
    OFFSETS, OTHER_OFFSETS, slot, n, total, slots, search_steps, before, after, BLOCK: tl.constexpr
):
    """Return the sort key of the tile in a slot; 0 for a hole."""
    row = slot * 0
    high = row + n + 1
    for _ in range(search_steps):
        middle = (row + high) // 2
        starts_before = tl.load(OFFSETS + middle) // BLOCK + middle <= slot
        row = tl.where(starts_before, middle, row)
        high = tl.where(starts_before, high, middle)
    start, length, _, other_length = _row_bounds(OFFSETS, OTHER_OFFSETS, row, n, total)
    block = (slot - (start // BLOCK + row)).to(tl.int64)
    shift = other_length - length
    first = tl.maximum(block * BLOCK + shift - before, 0)
    end = tl.minimum(tl.minimum((block + 1) * BLOCK, length) + shift + after, other_length)
    work = tl.minimum(tl.maximum(end - first, 0) // 32 + 1, _MAX_WORK).to(tl.int64)
    key = ((work << _ROW_BITS | row.to(tl.int64)) << _BLOCK_BITS) | block
    return tl.where((block * BLOCK < length) & (slot < slots), key, 0)


@triton.jit
def _store_entries(
    TILES, rank, key, OFFSETS, OTHER_OFFSETS, n, total, BLOCK: tl.constexpr, FIELDS: tl.constexpr
):
    is_tile = key > 0
    row = (key >> _BLOCK_BITS) & _ROW_MASK
    start, length, other_start, other_length = _row_bounds(OFFSETS, OTHER_OFFSETS, row, n, total)
    entry = TILES + (rank + 1) * FIELDS
    tl.store(entry, start.to(tl.int32), mask=is_tile)
    tl.store(entry + 1, length.to(tl.int32), mask=is_tile)
    tl.store(entry + 2, other_start.to(tl.int32), mask=is_tile)
    tl.store(entry + 3, other_length.to(tl.int32), mask=is_tile)
    tl.store(entry + 4, ((key & _BLOCK_MASK) * BLOCK).to(tl.int32), mask=is_tile)


@triton.jit(do_not_specialize=("n", "total", "slots", "search_steps", "before", "after"))
def _schedule_kernel(
    OFFSETS,
    OTHER_OFFSETS,
    TILES,
    n,
    total,
    slots,
    search_steps,
    before,
    after,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Compute a small schedule: every CTA computes all keys, and ranks its own keys by counting."""
    chunk = tl.arange(0, CHUNK)
    key = _sort_key(
        OFFSETS,
        OTHER_OFFSETS,
        tl.program_id(0) * CHUNK + chunk,
        n,
        total,
        slots,
        search_steps,
        before,
        after,
        BLOCK,
    )
    rank = tl.zeros([CHUNK], tl.int32)
    num_tiles = 0
    for i in range(0, slots, CHUNK):
        other_keys = _sort_key(
            OFFSETS, OTHER_OFFSETS, i + chunk, n, total, slots, search_steps, before, after, BLOCK
        )
        rank += tl.sum((other_keys[None, :] > key[:, None]).to(tl.int32), 1)
        num_tiles += tl.sum((other_keys > 0).to(tl.int32), 0)
    _store_entries(TILES, rank, key, OFFSETS, OTHER_OFFSETS, n, total, BLOCK, FIELDS)
    tl.store(TILES, num_tiles, mask=tl.program_id(0) == 0)


@triton.jit(do_not_specialize=("n", "total", "slots", "search_steps", "before", "after"))
def _sort_key_kernel(
    OFFSETS,
    OTHER_OFFSETS,
    KEYS,
    n,
    total,
    slots,
    search_steps,
    before,
    after,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    key = _sort_key(
        OFFSETS, OTHER_OFFSETS, slot, n, total, slots, search_steps, before, after, BLOCK
    )
    tl.store(KEYS + slot, key, mask=slot < slots)


@triton.jit(do_not_specialize=("n", "total", "slots"))
def _entry_kernel(
    KEYS,
    OFFSETS,
    OTHER_OFFSETS,
    TILES,
    n,
    total,
    slots,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
):
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    key = tl.load(KEYS + slot, mask=slot < slots, other=0)
    next_key = tl.load(KEYS + slot + 1, mask=slot + 1 < slots, other=0)
    _store_entries(TILES, slot, key, OFFSETS, OTHER_OFFSETS, n, total, BLOCK, FIELDS)
    # The last tile's slot holds the number of tiles; without any tile slot 0 stores 0.
    tl.store(TILES + slot * 0, slot + 1, mask=(key > 0) & (next_key == 0))
    tl.store(TILES + slot * 0, 0, mask=(slot == 0) & (key == 0))


def max_tiles(total: int, n: int, block: int) -> int:
    """Return the maximum number of tiles of `block` tokens for `n` rows and `total` tokens."""
    return total // block + n + 1


def schedule_tiles(
    offsets: torch.Tensor,
    other_offsets: torch.Tensor,
    total: int,
    block: int,
    before: int,
    after: int,
) -> torch.Tensor:
    """Cut the rows of `offsets` into tiles, the tiles with most work first.

    Work is the number of tokens of the other side (keys for queries, queries for keys) that a tile
    attends. With both rows aligned at their ends, token ``i`` attends ``i - before`` to
    ``i + after``.

    Parameters
    ----------
    offsets, other_offsets
        The offsets of the side that is cut and of the side that it attends, ``n + 1`` entries each,
        on one device.
    total
        The number of tokens of the values of the side that is cut, including the tail.
    block
        Tokens per tile.
    before, after
        The window, `UNBOUNDED` for a side without limit.

    Returns
    -------
    torch.Tensor
        int32, shape ``(max_tiles + 1, FIELDS)``. Entry 0 holds the number of tiles. Each further
        entry holds a tile's row offset, row length, the other side's row offset and length, and the
        tile's first token within its row.
    """
    n = offsets.shape[0] - 1
    slots = max_tiles(total, n, block)
    tiles = torch.empty((slots + 1, FIELDS), dtype=torch.int32, device=offsets.device)
    numbers = n, total, slots, (n + 1).bit_length(), before, after
    if slots <= MAX_COUNTED_SLOTS:
        _schedule_kernel[(triton.cdiv(slots, _COUNTED_CHUNK),)](
            offsets,
            other_offsets,
            tiles,
            *numbers,
            BLOCK=block,
            CHUNK=_COUNTED_CHUNK,
            FIELDS=FIELDS,
        )
        return tiles
    keys = torch.empty(slots, dtype=torch.int64, device=offsets.device)
    grid = (triton.cdiv(slots, _CHUNK),)
    _sort_key_kernel[grid](offsets, other_offsets, keys, *numbers, BLOCK=block, CHUNK=_CHUNK)
    keys = torch.sort(keys, descending=True).values
    _entry_kernel[grid](
        keys,
        offsets,
        other_offsets,
        tiles,
        n,
        total,
        slots,
        BLOCK=block,
        CHUNK=_CHUNK,
        FIELDS=FIELDS,
    )
    return tiles
