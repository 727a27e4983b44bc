"""Varlen tile scheduler: cut each row of a ragged batch into tiles, and order them by falling work.

The schedule is computed on the device: longest processing time first (LPT). The number of tiles
depends on offsets that are on the device, but ``total // tile_size + n + 1`` bounds it and is known
on the host. Each tile has a slot below that bound:

- Tile ``j`` of row ``b`` goes to slot ``offsets[b] // tile_size + b + j``. The slots of two rows
  never overlap, as row ``b`` has at most
  ``offsets[b + 1] // tile_size - offsets[b] // tile_size + 1`` tiles.
- A slot finds its row by binary search.
- Unused slots have the sort key 0 and sort to the end. No CTA processes them.

The tail, the tokens after the last row, is scheduled as row ``n`` without keys. So the kernels write
zeros there.

A batch can have two schedules: one with the rows from `min_length` tokens on, and one that merges
the other rows. There, adjacent rows that fit into one tile share it. The first row of such a group
is scheduled with the tokens of the whole group, the other rows have no tiles. The kernels then need
the attended tokens of each token, which are in the schedule after the entries.
"""

import torch
import triton
import triton.language as tl

from scree.dispatch.operation import KernelUnavailableError

from ..runtime.fallback import falls_back_to
from ..runtime.launch import COMPILE_ERRORS, on_device
from ..runtime.recording import launch_jit, sort_descending

#: A window side that reaches further than any row.
UNBOUNDED = 1 << 30
#: int32 fields of an entry, of which `schedule_tiles` uses five. One vector load reads 32 bytes.
FIELDS = 8

# A sort key, from the highest bit to the lowest:
#
#   work                 17 bits   attended tokens // 32 + 1, saturating
#   row                  24 bits   fewer than 2^24 rows
#   index in the row     22 bits   2^26 tokens in tiles of 16
_ROW_BITS = tl.constexpr(24)
_INDEX_BITS = tl.constexpr(22)
_MAX_WORK = tl.constexpr((1 << 17) - 1)
_ROW_MASK = tl.constexpr((1 << 24) - 1)
_INDEX_MASK = tl.constexpr((1 << 22) - 1)
#: Slots per CTA of `_attention_sort_key_kernel` and `_attention_entry_kernel`.
_CHUNK = 256
#: Schedules of at most this many slots are sorted by counting, in one launch.
MAX_COUNTED_SLOTS = 2048
#: Slots per CTA of `_attention_schedule_kernel`. On an H100, 64 take 8 to 31% more time than 32, and 128
#: take 17 to 68% more (8 to 256 rows, 9,315 to 78,611 tokens, tiles of 64 and 128; 2026-11-28).
_COUNTED_CHUNK = 32
#: Rows that one thread of `_attention_group_kernel` merges. Groups do not extend over them.
_ROWS_PER_THREAD = 64


@triton.jit
def _row_bounds(OFFSETS, ATTENDED_OFFSETS, GROUP_ENDS, row, n, total, MERGED: tl.constexpr):
    """Return the offset and length of a row, and of the row that it attends to.

    Row n is the tail, which attends to no tokens. If MERGED, a row is the group of rows that begins
    with it and ends before row GROUP_ENDS[row].
    """
    is_row = row < n
    end_row = row + 1
    if MERGED:
        end_row = tl.load(GROUP_ENDS + row, mask=is_row, other=0)
    start = tl.load(OFFSETS + row)
    end = tl.load(OFFSETS + end_row, mask=is_row, other=total)
    attended_start = tl.load(ATTENDED_OFFSETS + row, mask=is_row, other=0)
    attended_end = tl.load(ATTENDED_OFFSETS + end_row, mask=is_row, other=0)
    return start, end - start, attended_start, attended_end - attended_start


@triton.jit
def _sort_key(
    OFFSETS,
    ATTENDED_OFFSETS,
    GROUP_ENDS,
    slot,
    n,
    total,
    slots,
    search_steps,
    window_left,
    window_right,
    min_length,
    TILE_SIZE: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Return the sort key of the tile in a slot, which is positive; 0 for an unused slot."""
    row = tl.zeros_like(slot)
    high = row + n + 1
    for _ in range(search_steps):
        middle = (row + high) // 2
        begins_by_slot = tl.load(OFFSETS + middle) // TILE_SIZE + middle <= slot
        row = tl.where(begins_by_slot, middle, row)
        high = tl.where(begins_by_slot, high, middle)
    start, length, _, attended_length = _row_bounds(
        OFFSETS, ATTENDED_OFFSETS, GROUP_ENDS, row, n, total, MERGED
    )
    index = (slot - (start // TILE_SIZE + row)).to(tl.int64)
    shift = attended_length - length
    first_key = tl.maximum(index * TILE_SIZE + shift - window_left, 0)
    end_key = tl.minimum((index + 1) * TILE_SIZE, length) + shift + window_right
    end_key = tl.minimum(end_key, attended_length)
    work = tl.minimum(tl.maximum(end_key - first_key, 0) // 32 + 1, _MAX_WORK).to(tl.int64)
    key = ((work << _ROW_BITS | row.to(tl.int64)) << _INDEX_BITS) | index
    longer_length = tl.maximum(length, attended_length)
    is_scheduled = (min_length == 0) | ((longer_length >= min_length) & (row < n))
    return tl.where((index * TILE_SIZE < length) & (slot < slots) & is_scheduled, key, 0)


@triton.jit
def _store_entries(
    TILES,
    rank,
    key,
    OFFSETS,
    ATTENDED_OFFSETS,
    GROUP_ENDS,
    n,
    total,
    TILE_SIZE: tl.constexpr,
    FIELDS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Store the five fields of the tiles with the given keys; entry 0 is the number of tiles."""
    is_tile = key > 0
    row = (key >> _INDEX_BITS) & _ROW_MASK
    start, length, attended_start, attended_length = _row_bounds(
        OFFSETS, ATTENDED_OFFSETS, GROUP_ENDS, row, n, total, MERGED
    )
    entry = TILES + (rank + 1) * FIELDS
    tl.store(entry, start.to(tl.int32), mask=is_tile)
    tl.store(entry + 1, length.to(tl.int32), mask=is_tile)
    tl.store(entry + 2, attended_start.to(tl.int32), mask=is_tile)
    tl.store(entry + 3, attended_length.to(tl.int32), mask=is_tile)
    tl.store(entry + 4, ((key & _INDEX_MASK) * TILE_SIZE).to(tl.int32), mask=is_tile)


@triton.jit(
    do_not_specialize=(
        *("n", "total", "slots", "search_steps"),
        *("window_left", "window_right", "min_length"),
    )
)
def _attention_schedule_kernel(
    OFFSETS,
    ATTENDED_OFFSETS,
    GROUP_ENDS,
    TILES,
    n,
    total,
    slots,
    search_steps,
    window_left,
    window_right,
    min_length,
    TILE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Compute a small schedule in one launch.

    Each CTA computes all keys, to rank the tiles of its own slots without a sort. The rank of a
    tile is the number of keys that are larger than its key.
    """
    chunk = tl.arange(0, CHUNK)
    key = _sort_key(
        OFFSETS,
        ATTENDED_OFFSETS,
        GROUP_ENDS,
        tl.program_id(0) * CHUNK + chunk,
        n,
        total,
        slots,
        search_steps,
        window_left,
        window_right,
        min_length,
        TILE_SIZE,
        MERGED,
    )
    rank = tl.zeros([CHUNK], tl.int32)
    num_tiles = 0
    for i in range(0, slots, CHUNK):
        other_keys = _sort_key(
            OFFSETS,
            ATTENDED_OFFSETS,
            GROUP_ENDS,
            i + chunk,
            n,
            total,
            slots,
            search_steps,
            window_left,
            window_right,
            min_length,
            TILE_SIZE,
            MERGED,
        )
        rank += tl.sum((other_keys[None, :] > key[:, None]).to(tl.int32), 1)
        num_tiles += tl.sum((other_keys > 0).to(tl.int32), 0)
    _store_entries(
        TILES, rank, key, OFFSETS, ATTENDED_OFFSETS, GROUP_ENDS, n, total, TILE_SIZE, FIELDS, MERGED
    )
    tl.store(TILES, num_tiles, mask=tl.program_id(0) == 0)


@triton.jit(
    do_not_specialize=(
        *("n", "total", "slots", "search_steps"),
        *("window_left", "window_right", "min_length"),
    )
)
def _attention_sort_key_kernel(
    OFFSETS,
    ATTENDED_OFFSETS,
    GROUP_ENDS,
    KEYS,
    n,
    total,
    slots,
    search_steps,
    window_left,
    window_right,
    min_length,
    TILE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Store the sort key of each slot."""
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    key = _sort_key(
        OFFSETS,
        ATTENDED_OFFSETS,
        GROUP_ENDS,
        slot,
        n,
        total,
        slots,
        search_steps,
        window_left,
        window_right,
        min_length,
        TILE_SIZE,
        MERGED,
    )
    tl.store(KEYS + slot, key, mask=slot < slots)


@triton.jit(do_not_specialize=("n", "total", "slots"))
def _attention_entry_kernel(
    KEYS,
    OFFSETS,
    ATTENDED_OFFSETS,
    GROUP_ENDS,
    TILES,
    n,
    total,
    slots,
    TILE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    FIELDS: tl.constexpr,
    MERGED: tl.constexpr,
):
    """Store the entries of the schedule, in the order of the sorted keys, and their number."""
    slot = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    key = tl.load(KEYS + slot, mask=slot < slots, other=0)
    next_key = tl.load(KEYS + slot + 1, mask=slot + 1 < slots, other=0)
    _store_entries(
        TILES, slot, key, OFFSETS, ATTENDED_OFFSETS, GROUP_ENDS, n, total, TILE_SIZE, FIELDS, MERGED
    )
    # The last tile is followed by the key 0, so its thread knows the number of tiles. Without any
    # tile the first thread stores 0.
    count = TILES + tl.zeros_like(slot)
    tl.store(count, slot + 1, mask=(key > 0) & (next_key == 0))
    tl.store(count, 0, mask=(slot == 0) & (key == 0))


@triton.jit(do_not_specialize=("n",))
def _attention_group_kernel(
    OFFSETS,
    ATTENDED_OFFSETS,
    GROUP_ENDS,
    n,
    TILE_SIZE: tl.constexpr,
    ROWS_PER_THREAD: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Merge adjacent rows into groups of at most TILE_SIZE tokens and attended tokens.

    Store the end of the group that each row begins: the row itself if it begins none or has more
    tokens.
    """
    first_row = (tl.program_id(0) * THREADS + tl.arange(0, THREADS)) * ROWS_PER_THREAD
    is_row = first_row < n
    start = tl.load(OFFSETS + first_row, mask=is_row, other=0)
    attended_start = tl.load(ATTENDED_OFFSETS + first_row, mask=is_row, other=0)
    leader, leader_start, leader_attended = first_row, start, attended_start
    for i in range(ROWS_PER_THREAD):
        row = first_row + i
        is_row = row < n
        end = tl.load(OFFSETS + row + 1, mask=is_row, other=0)
        attended_end = tl.load(ATTENDED_OFFSETS + row + 1, mask=is_row, other=0)
        length = tl.maximum(end - leader_start, attended_end - leader_attended)
        joins = length <= TILE_SIZE
        leader = tl.where(joins, leader, row)
        leader_start = tl.where(joins, leader_start, start)
        leader_attended = tl.where(joins, leader_attended, attended_start)
        length = tl.maximum(end - leader_start, attended_end - leader_attended)
        tl.store(GROUP_ENDS + row, row, mask=is_row)
        tl.store(GROUP_ENDS + leader, row + 1, mask=is_row & (length <= TILE_SIZE))
        start, attended_start = end, attended_end


@triton.jit(do_not_specialize=("n", "total", "search_steps", "position"))
def _attention_attended_kernel(
    OFFSETS, ATTENDED_OFFSETS, TILES, n, total, search_steps, position, CHUNK: tl.constexpr
):
    """Store the attended tokens of each token: the first, the end, and the one aligned with it.

    They begin at `position` in the schedule; fields 1 and 2 hold this number and the total.
    """
    token = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    row = tl.zeros_like(token)
    high = row + n + 1
    for _ in range(search_steps):
        middle = (row + high) // 2
        begins_by_token = tl.load(OFFSETS + middle) <= token
        row = tl.where(begins_by_token, middle, row)
        high = tl.where(begins_by_token, high, middle)
    is_row = row < n
    end = tl.load(OFFSETS + row + 1, mask=is_row, other=total)
    attended_start = tl.load(ATTENDED_OFFSETS + row, mask=is_row, other=0)
    attended_end = tl.load(ATTENDED_OFFSETS + row + 1, mask=is_row, other=0)
    attended = TILES + position + token
    is_token = token < total
    tl.store(attended, attended_start.to(tl.int32), mask=is_token)
    tl.store(attended + total, attended_end.to(tl.int32), mask=is_token)
    tl.store(attended + 2 * total, (attended_end - end + token).to(tl.int32), mask=is_token)
    is_first = tl.program_id(0) == 0
    tl.store(TILES + 1, position, mask=is_first)
    tl.store(TILES + 2, total, mask=is_first)


def max_tiles(total: int, n: int, tile_size: int) -> int:
    """Return an upper bound on the number of tiles of `n` rows, the tiles of the tail included."""
    return total // tile_size + n + 1


#: Why the kernels of the schedule do not compile, where they do not.
_failures: dict[torch.device, str] = {}


def _schedule_by_rows(
    offsets: torch.Tensor,
    attended_offsets: torch.Tensor,
    total: int,
    tile_size: int,
    window_left: int,
    window_right: int,
    min_length: int = 0,
    merge_rows: bool = False,
) -> torch.Tensor:
    """Return a schedule in the order of the rows, without kernels; its tiles have one row each."""
    n, device = offsets.shape[0] - 1, offsets.device
    ends = torch.cat([offsets[1:].long(), torch.full((1,), total, device=device)])
    lengths = ends - offsets
    begins, attended_ends = attended_offsets[:-1].long(), attended_offsets[1:].long()
    attended_begins, attended_lengths = (
        torch.nn.functional.pad(x, (0, 1)) for x in (begins, attended_ends - begins)
    )
    scheduled, longer_lengths = lengths, torch.maximum(lengths, attended_lengths)
    if min_length > 0:
        scheduled = lengths * (longer_lengths >= min_length)
        scheduled[-1] = 0
    if merge_rows:
        scheduled = lengths * (longer_lengths <= tile_size)
        scheduled[-1] = lengths[-1]
    last_tiles = ((scheduled + tile_size - 1) // tile_size).cumsum(0)
    tile = torch.arange(max_tiles(total, n, tile_size), device=device)
    row = torch.searchsorted(last_tiles, tile, right=True).clamp(max=n)
    first_tile = torch.nn.functional.pad(last_tiles, (1, 0))[row]
    fields = (
        *(x[row] for x in (offsets, lengths, attended_begins, attended_lengths)),
        (tile - first_tile) * tile_size,
    )
    tiles = torch.zeros((tile.shape[0] + 1, FIELDS), dtype=torch.int32, device=device)
    tiles[1:, : len(fields)] = torch.stack(fields, 1)
    tiles[0, 0] = last_tiles[-1]
    if merge_rows:
        token = torch.arange(total, device=device)
        row = torch.searchsorted(offsets.long(), token, right=True) - 1
        attended_ends = attended_begins + attended_lengths
        attended = attended_begins[row], attended_ends[row], (attended_ends - ends)[row] + token
        tiles[0, 1], tiles[0, 2] = tiles.numel(), total
        numbers = torch.nn.functional.pad(torch.cat(attended), (0, -3 * total % FIELDS))
        tiles = torch.cat([tiles, numbers.to(torch.int32).view(-1, FIELDS)])
    return tiles


@falls_back_to(_schedule_by_rows, f"{__package__}.interface")
def schedule_tiles(
    offsets: torch.Tensor,
    attended_offsets: torch.Tensor,
    total: int,
    tile_size: int,
    window_left: int,
    window_right: int,
    min_length: int = 0,
    merge_rows: bool = False,
) -> torch.Tensor:
    """Cut the rows of `offsets` into tiles, ordered by falling work.

    The work of a tile is the number of tokens in its window, in units of 32: keys for a tile of
    queries, and queries for a tile of keys in the backward pass. Rows and attended rows are aligned
    at their ends. With equal lengths token ``i`` attends to the tokens from ``i - window_left`` to
    ``i + window_right``.

    Parameters
    ----------
    offsets, attended_offsets
        The offsets of the rows that are cut and of the rows that they attend to, ``n + 1`` entries
        each, on one device.
    total
        Number of tokens in the values that `offsets` cuts, the tail included.
    tile_size
        Tokens per tile.
    window_left, window_right
        The window, `UNBOUNDED` for a side without limit.
    min_length
        Rows with fewer tokens and fewer attended tokens have no tiles. If it is not 0, the tail has
        none either.
    merge_rows
        Whether adjacent rows share a tile that holds them all, and all of their attended tokens.
        Rows that do not fit into a tile then have none.

    Returns
    -------
    torch.Tensor
        int32, shape ``(max_tiles(total, n, tile_size) + 1, FIELDS)``. Field 0 of entry 0 is the
        number of tiles. Each further entry holds a tile's row offset and row length, the offset and
        length of the attended row, and the tile's first token within its row.

        With `merge_rows`, an entry has a group of rows instead of a row, and there are 3 * total
        more numbers. For each token they are the first attended token, then the end of the
        attended tokens, then the attended token that is aligned with it. Fields 1 and 2 of entry 0
        are their position and the total.
    """
    arguments = (
        *(offsets, attended_offsets, total, tile_size),
        *(window_left, window_right, min_length, merge_rows),
    )
    if offsets.device in _failures:
        raise KernelUnavailableError(_failures[offsets.device])
    try:
        return on_device(offsets.device.index, _schedule_tiles)(*arguments)
    except COMPILE_ERRORS as error:
        _failures[offsets.device] = f"the tile schedule does not compile: {error}"
        raise KernelUnavailableError(_failures[offsets.device]) from error


def _schedule_tiles(
    offsets: torch.Tensor,
    attended_offsets: torch.Tensor,
    total: int,
    tile_size: int,
    window_left: int,
    window_right: int,
    min_length: int,
    merge_rows: bool,
) -> torch.Tensor:
    n = offsets.shape[0] - 1
    slots = max_tiles(total, n, tile_size)
    entries = slots + 1 + (triton.cdiv(3 * total, FIELDS) if merge_rows else 0)
    tiles = torch.empty((entries, FIELDS), dtype=torch.int32, device=offsets.device)
    search_steps = (n + 1).bit_length()
    group_ends = offsets
    if merge_rows:
        group_ends = torch.empty(n, dtype=torch.int32, device=offsets.device)
        launch_jit(
            _attention_group_kernel,
            triton.cdiv(n, _ROWS_PER_THREAD * 32),
            offsets,
            attended_offsets,
            group_ends,
            n,
            written=("GROUP_ENDS",),
            TILE_SIZE=tile_size,
            ROWS_PER_THREAD=_ROWS_PER_THREAD,
            THREADS=32,
            num_warps=1,
        )
        launch_jit(
            _attention_attended_kernel,
            triton.cdiv(total, _CHUNK),
            offsets,
            attended_offsets,
            tiles,
            n,
            total,
            search_steps,
            (slots + 1) * FIELDS,
            written=("TILES",),
            CHUNK=_CHUNK,
        )
    if slots <= MAX_COUNTED_SLOTS:
        launch_jit(
            _attention_schedule_kernel,
            triton.cdiv(slots, _COUNTED_CHUNK),
            offsets,
            attended_offsets,
            group_ends,
            tiles,
            n,
            total,
            slots,
            search_steps,
            window_left,
            window_right,
            min_length,
            written=("TILES",),
            TILE_SIZE=tile_size,
            CHUNK=_COUNTED_CHUNK,
            FIELDS=FIELDS,
            MERGED=merge_rows,
        )
        return tiles
    keys = torch.empty(slots, dtype=torch.int64, device=offsets.device)
    programs = triton.cdiv(slots, _CHUNK)
    launch_jit(
        _attention_sort_key_kernel,
        programs,
        offsets,
        attended_offsets,
        group_ends,
        keys,
        n,
        total,
        slots,
        search_steps,
        window_left,
        window_right,
        min_length,
        written=("KEYS",),
        TILE_SIZE=tile_size,
        CHUNK=_CHUNK,
        MERGED=merge_rows,
    )
    keys = sort_descending(keys)
    launch_jit(
        _attention_entry_kernel,
        programs,
        keys,
        offsets,
        attended_offsets,
        group_ends,
        tiles,
        n,
        total,
        slots,
        written=("TILES",),
        TILE_SIZE=tile_size,
        CHUNK=_CHUNK,
        FIELDS=FIELDS,
        MERGED=merge_rows,
    )
    return tiles
