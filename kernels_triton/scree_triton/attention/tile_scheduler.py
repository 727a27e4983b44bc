"""The tile map: every row of a ragged batch cut into blocks of tokens, most work first, made on the device.

The number of tiles depends on offsets that live on the device, but ``total // block + n + 1`` bounds it and is known on
the host: block ``j`` of row ``b`` goes to slot ``offsets[b] // block + b + j``, and a slot finds its row by bisection.
Slots that no row fills are holes; they go to the end, where no program looks.

Values may have room for more tokens than the rows have. What lies behind the last row counts as one more row that attends
nothing, so kernels write zeros there and nothing is left unwritten.
"""

import torch
import triton
import triton.language as tl

UNBOUNDED = 1 << 30  # a window side that reaches further than any row
FIELDS = 8  # int32 fields of an entry: 32 bytes, so that one vector load brings it

# A sort key: work (17 bits), row (24 bits), block in the row (22 bits). Work only orders the tiles, so it may saturate.
_ROW_BITS = tl.constexpr(24)
_BLOCK_BITS = tl.constexpr(22)
_MOST_WORK = tl.constexpr((1 << 17) - 1)
_ROW_MASK = tl.constexpr((1 << 24) - 1)
_BLOCK_MASK = tl.constexpr((1 << 22) - 1)
_CHUNK = 256
_FEW = 2048  # slots that are put in order without a sort
_SMALL_CHUNK = 64


@triton.jit
def _row(OFFSETS, OTHER, row, n, total):
    """A row's start and length and those of its other side; row n is what lies behind the rows."""
    real = row < n
    start = tl.load(OFFSETS + row)
    end = tl.load(OFFSETS + row + 1, mask=real, other=total)
    other_start = tl.load(OTHER + row, mask=real, other=0)
    other_end = tl.load(OTHER + row + 1, mask=real, other=0)
    return start, end - start, other_start, other_end - other_start


@triton.jit
def _key(OFFSETS, OTHER, slot, n, total, slots, bisections, before, after, BLOCK: tl.constexpr):
    """What the tile in a slot is sorted by; 0 for a hole."""
    low = slot * 0
    high = low + n + 1
    for _ in range(bisections):
        middle = (low + high) // 2
        inside = tl.load(OFFSETS + middle) // BLOCK + middle <= slot
        low = tl.where(inside, middle, low)
        high = tl.where(inside, high, middle)
    start, length, _, other = _row(OFFSETS, OTHER, low, n, total)
    block = (slot - (start // BLOCK + low)).to(tl.int64)
    shift = other - length
    first = tl.maximum(block * BLOCK + shift - before, 0)
    end = tl.minimum(tl.minimum((block + 1) * BLOCK, length) + shift + after, other)
    work = tl.minimum(tl.maximum(end - first, 0) // 32 + 1, _MOST_WORK).to(tl.int64)
    key = ((work << _ROW_BITS | low.to(tl.int64)) << _BLOCK_BITS) | block
    return tl.where((block * BLOCK < length) & (slot < slots), key, 0)


@triton.jit
def _store_entries(
    TILES, place, key, OFFSETS, OTHER, n, total, BLOCK: tl.constexpr, FIELDS: tl.constexpr
):
    used = key > 0
    row = (key >> _BLOCK_BITS) & _ROW_MASK
    start, length, other_start, other = _row(OFFSETS, OTHER, row, n, total)
    entry = TILES + (place + 1) * FIELDS
    tl.store(entry, start.to(tl.int32), mask=used)
    tl.store(entry + 1, length.to(tl.int32), mask=used)
    tl.store(entry + 2, other_start.to(tl.int32), mask=used)
    tl.store(entry + 3, other.to(tl.int32), mask=used)
    tl.store(entry + 4, ((key & _BLOCK_MASK) * BLOCK).to(tl.int32), mask=used)


@triton.jit(do_not_specialize=("n", "total", "slots", "bisections", "before", "after"))
def _map_kernel(
    OFFSETS,
    OTHER,
    TILES,
    n,
    total,
    slots,
    bisections,
    before,
    after,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """The whole map of few slots: every program makes all keys, and counts those that come before its own."""
    chunk = tl.arange(0, CHUNK)
    key = _key(
        OFFSETS,
        OTHER,
        tl.program_id(0) * CHUNK + chunk,
        n,
        total,
        slots,
        bisections,
        before,
        after,
        BLOCK,
    )
    place = tl.zeros([CHUNK], tl.int32)
    count = 0
    for i in range(0, slots, CHUNK):
        others = _key(OFFSETS, OTHER, i + chunk, n, total, slots, bisections, before, after, BLOCK)
        place += tl.sum((others[None, :] > key[:, None]).to(tl.int32), 1)
        count += tl.sum((others > 0).to(tl.int32), 0)
    _store_entries(TILES, place, key, OFFSETS, OTHER, n, total, BLOCK, FIELDS)
    tl.store(TILES, count, mask=tl.program_id(0) == 0)


@triton.jit(do_not_specialize=("n", "total", "slots", "bisections", "before", "after"))
def _key_kernel(
    OFFSETS,
    OTHER,
    KEYS,
    n,
    total,
    slots,
    bisections,
    before,
    after,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    key = _key(OFFSETS, OTHER, slot, n, total, slots, bisections, before, after, BLOCK)
    tl.store(KEYS + slot, key, mask=slot < slots)


@triton.jit(do_not_specialize=("n", "total", "slots"))
def _entry_kernel(
    KEYS,
    OFFSETS,
    OTHER,
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
    following = tl.load(KEYS + slot + 1, mask=slot + 1 < slots, other=0)
    _store_entries(TILES, slot, key, OFFSETS, OTHER, n, total, BLOCK, FIELDS)
    tl.store(TILES + slot * 0, slot + 1, mask=(key > 0) & (following == 0))
    tl.store(TILES + slot * 0, 0, mask=(slot == 0) & (key == 0))


def tile_bound(total: int, n: int, block: int) -> int:
    """The most tiles of `block` tokens that `n` rows in values of `total` tokens can need."""
    return total // block + n + 1


def tile_map(
    offsets: torch.Tensor, other: torch.Tensor, total: int, block: int, before: int, after: int
) -> torch.Tensor:
    """Cut the rows of `offsets` into tiles, those with most work first.

    Work is the number of tokens of the `other` side (keys for queries, queries for keys) that a tile attends: with both
    rows aligned at their ends, token ``i`` attends ``i - before`` to ``i + after``.

    Parameters
    ----------
    offsets, other
        The offsets of the side that is cut and of the side that it attends, ``n + 1`` entries each, on one device.
    total
        The number of tokens that the values of the side that is cut have room for.
    block
        Tokens in a tile.
    before, after
        The window, `UNBOUNDED` for a side without limit.

    Returns
    -------
    torch.Tensor
        int32, shape ``(tile_bound + 1, FIELDS)``. Entry 0 holds the number of tiles; each further entry holds a tile's
        row start, row length, the other side's row start and length, and the tile's first token within its row.
    """
    n = offsets.shape[0] - 1
    slots = tile_bound(total, n, block)
    tiles = torch.empty((slots + 1, FIELDS), dtype=torch.int32, device=offsets.device)
    counts = n, total, slots, (n + 1).bit_length(), before, after
    if slots <= _FEW:
        _map_kernel[(triton.cdiv(slots, _SMALL_CHUNK),)](
            offsets, other, tiles, *counts, BLOCK=block, CHUNK=_SMALL_CHUNK, FIELDS=FIELDS
        )
        return tiles
    keys = torch.empty(slots, dtype=torch.int64, device=offsets.device)
    grid = (triton.cdiv(slots, _CHUNK),)
    _key_kernel[grid](offsets, other, keys, *counts, BLOCK=block, CHUNK=_CHUNK)
    keys = torch.sort(keys, descending=True).values
    _entry_kernel[grid](
        keys, offsets, other, tiles, n, total, slots, BLOCK=block, CHUNK=_CHUNK, FIELDS=FIELDS
    )
    return tiles
