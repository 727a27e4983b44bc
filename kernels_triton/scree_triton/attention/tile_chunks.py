"""Cut the longest tiles of a schedule into chunks, so that every SM gets about the same work.

A tile of queries loops over blocks of keys, and a tile of keys over blocks of queries. Few tiles may have most of
the blocks. A chunk is a range of the blocks of such a tile. Each chunk stores float32 sums, and
`attention_sum_chunks_kernel` adds the sums of a tile in the order of its blocks.

The schedule of `schedule_tiles` becomes a schedule of items. An item is a chunk or a whole tile. It
has the fields of the tile, and three more:

===== ==============================================================
field content
===== ==============================================================
5     0 for a whole tile, else 1 + the index of the chunk's sums
6, 7  the first block, and the end of the blocks
===== ==============================================================

Entry 0 holds the number of items, and in field 3 the number of chunks. After the items, there is one
entry per chunk. The entry of the first chunk of a tile holds the number of its chunks, the
offset and the length of its row, and its first token. The other entries hold 0.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from scree.dispatch.operation import KernelUnavailableError

from ..runtime.launch import COMPILE_ERRORS, on_device
from ..runtime.recording import launch_jit
from .tile_scheduler import FIELDS

#: The chunks of a tile have on average at least half of the mean work per CTA. A whole tile has less
#: than twice this.
CHUNKS_PER_CTA = 2
#: Fewest blocks of a chunk, summed over heads, on average over the chunks of a tile. A CTA takes as long
#: as about two blocks before and after them.
MIN_BLOCKS = 4
#: Tiles per CTA of the kernel.
_TILES_PER_CTA = 256


class ChunkSpec(NamedTuple):
    """Sizes and counts by which the tiles of one kernel are cut.

    Parameters
    ----------
    tile_size, block
        Tokens per tile, and per block of the other side.
    window_left, window_right
        The window of the tokens that are cut, see `schedule_tiles`.
    group
        Heads over which a tile loops: the query heads per key head for tiles of keys, else 1.
    heads
        Number of heads whose tiles run one by one.
    ctas
        Number of CTAs that run at once.
    min_blocks
        Fewest blocks of a whole tile: tiles of queries have at least one block.
    """

    tile_size: int
    block: int
    window_left: int
    window_right: int
    group: int
    heads: int
    ctas: int
    min_blocks: int

    @property
    def max_chunks(self) -> int:
        """The largest number of chunks per head."""
        return CHUNKS_PER_CTA * self.ctas // self.heads


@triton.jit
def _block_range(
    TILES,
    index,
    num_tiles,
    window_left,
    window_right,
    min_blocks,
    TILE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Return the first block and the end of the blocks of tiles; both are 0 after the last tile."""
    is_tile = index < num_tiles
    tile = TILES + (index + 1) * FIELDS
    length = tl.load(tile + 1, mask=is_tile, other=0)
    attended_length = tl.load(tile + 3, mask=is_tile, other=0)
    start = tl.load(tile + 4, mask=is_tile, other=0)
    start += attended_length - length
    end = tl.minimum(attended_length, start + TILE_SIZE + window_right)
    first_block = tl.maximum(start - window_left, 0) // BLOCK
    end_block = tl.maximum(tl.cdiv(tl.maximum(end, 0), BLOCK), min_blocks)
    first_block = tl.where(
        min_blocks > 0, tl.minimum(first_block, end_block - min_blocks), first_block
    )
    end_block = tl.maximum(first_block, end_block)
    return tl.where(is_tile, first_block, 0), tl.where(is_tile, end_block, 0)


@triton.jit
def _count_chunks(num_blocks, limit, group):
    """Return the number of chunks of tiles; 1 for whole tiles."""
    return tl.maximum(tl.minimum(num_blocks * group // limit, num_blocks), 1)


@triton.jit(
    do_not_specialize=(
        *("max_items", "max_chunks", "window_left", "window_right", "min_blocks"),
        *("group", "heads", "parts", "least"),
    )
)
def attention_chunk_kernel(
    TILES,
    ITEMS,
    max_items,
    max_chunks,
    window_left,
    window_right,
    min_blocks,
    group,
    heads,
    parts,
    least,
    TILE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    COUNT: tl.constexpr,
    FIELDS: tl.constexpr,
):
    """Store the items of a schedule, and the sums of its chunks.

    A tile with at least twice the limit of blocks is cut. The limit is the number of blocks of all heads
    divided by `parts`, or `least`. Each CTA counts all blocks, so one launch suffices.
    """
    num_tiles = tl.load(TILES)
    offs = tl.arange(0, COUNT)
    total = tl.zeros([COUNT], tl.int64)
    for first in range(0, num_tiles, COUNT):
        first_block, end_block = _block_range(
            *(TILES, first + offs, num_tiles, window_left, window_right, min_blocks),
            *(TILE_SIZE, BLOCK, FIELDS),
        )
        total += (end_block - first_block).to(tl.int64)
    work = tl.sum(total, 0) * group * heads
    limit = tl.minimum(tl.maximum((work + parts - 1) // parts, least), 1 << 30).to(tl.int32)
    # Items and chunks of the tiles before this CTA, and of all tiles.
    first_item, first_chunk, num_items, num_chunks = 0, 0, 0, 0
    own_first = tl.program_id(0) * COUNT
    for first in range(0, num_tiles, COUNT):
        first_block, end_block = _block_range(
            *(TILES, first + offs, num_tiles, window_left, window_right, min_blocks),
            *(TILE_SIZE, BLOCK, FIELDS),
        )
        count = _count_chunks(end_block - first_block, limit, group)
        count = tl.where(first + offs < num_tiles, count, 0)
        items, chunks = tl.sum(count, 0), tl.sum(tl.where(count > 1, count, 0), 0)
        first_item += tl.where(first < own_first, items, 0)
        first_chunk += tl.where(first < own_first, chunks, 0)
        num_items += items
        num_chunks += chunks
    if tl.program_id(0) == 0:
        tl.store(ITEMS, num_items)
        tl.store(ITEMS + 3, num_chunks)
    index = own_first + offs
    is_tile = index < num_tiles
    first_block, end_block = _block_range(
        *(TILES, index, num_tiles, window_left, window_right, min_blocks),
        *(TILE_SIZE, BLOCK, FIELDS),
    )
    blocks = end_block - first_block
    count = tl.where(is_tile, _count_chunks(blocks, limit, group), 0)
    chunks = tl.where(count > 1, count, 0)
    item = first_item + tl.cumsum(count, 0) - count
    chunk = first_chunk + tl.cumsum(chunks, 0) - chunks
    tile = TILES + (index + 1) * FIELDS
    offset = tl.load(tile, mask=is_tile, other=0)
    length = tl.load(tile + 1, mask=is_tile, other=0)
    attended_offset = tl.load(tile + 2, mask=is_tile, other=0)
    attended_length = tl.load(tile + 3, mask=is_tile, other=0)
    start = tl.load(tile + 4, mask=is_tile, other=0)
    for i in range(tl.max(count, 0)):
        mask = i < count
        entry = ITEMS + (item + i + 1) * FIELDS
        is_chunk = count > 1
        begin = first_block + (blocks.to(tl.int64) * i // tl.maximum(count, 1)).to(tl.int32)
        end = first_block + (blocks.to(tl.int64) * (i + 1) // tl.maximum(count, 1)).to(tl.int32)
        tl.store(entry, offset, mask=mask)
        tl.store(entry + 1, length, mask=mask)
        tl.store(entry + 2, attended_offset, mask=mask)
        tl.store(entry + 3, attended_length, mask=mask)
        tl.store(entry + 4, start, mask=mask)
        tl.store(entry + 5, tl.where(is_chunk, chunk + i + 1, 0), mask=mask)
        tl.store(entry + 6, begin, mask=mask)
        tl.store(entry + 7, end, mask=mask)
        sums = ITEMS + (max_items + 1 + chunk + i) * FIELDS
        mask &= is_chunk & (chunk + i < max_chunks)
        tl.store(sums, tl.where(i == 0, count, 0), mask=mask)
        tl.store(sums + 1, offset, mask=mask)
        tl.store(sums + 2, length, mask=mask)
        tl.store(sums + 3, start, mask=mask)


def cut_tiles(tiles: torch.Tensor, spec: ChunkSpec) -> torch.Tensor:
    """Return the items of a schedule whose tiles have one row each.

    Parameters
    ----------
    tiles
        The result of `schedule_tiles`.
    spec
        How to cut the tiles.

    Returns
    -------
    torch.Tensor
        int32, shape ``(tiles.shape[0] + 2 * spec.max_chunks, FIELDS)``. The entries of the sums begin at
        ``tiles.shape[0] + spec.max_chunks``.
    """
    try:
        return on_device(tiles.device.index, _cut_tiles)(tiles, spec)
    except COMPILE_ERRORS as error:
        raise KernelUnavailableError(f"the kernel of chunks does not compile: {error}") from error


def _cut_tiles(tiles: torch.Tensor, spec: ChunkSpec) -> torch.Tensor:
    max_tiles, max_chunks = tiles.shape[0] - 1, spec.max_chunks
    max_items = max_tiles + max_chunks
    items = torch.empty(
        (max_items + 1 + max_chunks, FIELDS), dtype=torch.int32, device=tiles.device
    )
    launch_jit(
        attention_chunk_kernel,
        triton.cdiv(max_tiles, _TILES_PER_CTA),
        tiles,
        items,
        max_items,
        max_chunks,
        spec.window_left,
        spec.window_right,
        spec.min_blocks,
        spec.group,
        spec.heads,
        CHUNKS_PER_CTA * spec.ctas,
        MIN_BLOCKS,
        written=("ITEMS",),
        TILE_SIZE=spec.tile_size,
        BLOCK=spec.block,
        COUNT=_TILES_PER_CTA,
        FIELDS=FIELDS,
    )
    return items
