"""Chunks of tiles, by plain loops over the rows. Without a GPU, the kernels run in Triton's interpreter."""

import heapq
import random

import pytest
import torch
from attention_reference import offsets
from triton.runtime.errors import OutOfResources

from scree.dispatch.operation import KernelUnavailableError
from scree_triton.attention import tile_chunks
from scree_triton.attention.dkdv_splits import estimate_work, gains_by_chunks
from scree_triton.attention.metadata import AttentionSpec
from scree_triton.attention.sum_splits import attention_sum_chunks_kernel
from scree_triton.attention.tile_chunks import CHUNKS_PER_CTA, MIN_BLOCKS, ChunkSpec, cut_tiles
from scree_triton.attention.tile_scheduler import UNBOUNDED, max_tiles, schedule_tiles

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RANDOM = random.Random(3)
BATCHES = {
    "one row": ((2000,), None),
    "unequal": ((5, 3000, 0, 64, 700, 1, 129), None),
    "two long rows": ((3000, 40, 0, 90), (30, 5000, 7, 0)),
    "short rows": ((20,) * 30, None),
    "many": (tuple(RANDOM.choices(range(300), k=400)), tuple(RANDOM.choices(range(900), k=400))),
    "empty": ((0, 0), None),
}


def expected_blocks(spec, start, length, attended_length):
    """Return the blocks of a tile that hold a token to which a token of the tile attends."""
    shift = attended_length - length
    blocks = set()
    for block in range(-(-attended_length // spec.block)):
        first, end = block * spec.block, min((block + 1) * spec.block, attended_length)
        low = start + shift - spec.window_left
        high = start + spec.tile_size - 1 + shift + spec.window_right
        if end > low and first <= high:
            blocks.add(block)
    return blocks


@pytest.mark.parametrize(
    "window", [(UNBOUNDED, UNBOUNDED), (UNBOUNDED, 0), (0, UNBOUNDED), (100, 30)]
)
@pytest.mark.parametrize("by_keys, group, heads", [(True, 1, 1), (True, 6, 2), (False, 1, 12)])
@pytest.mark.parametrize("batch", BATCHES)
def test_cut_tiles_covers_all_blocks_once(batch, by_keys, group, heads, window):
    lengths, others = BATCHES[batch]
    cu = offsets(lengths, DEVICE)
    attended_cu = cu if others is None else offsets(others, DEVICE)
    slack, size, ctas = 70, 128, 8
    total = sum(lengths) + slack
    spec = ChunkSpec(size, 64, *window, group, heads, ctas, int(not by_keys))
    tiles = schedule_tiles(cu, attended_cu, total, size, *window)
    items = cut_tiles(tiles, spec).tolist()
    assert len(items) == max_tiles(total, len(lengths), size) + 1 + 2 * spec.max_chunks
    num_tiles, num_items, num_chunks = int(tiles[0, 0]), items[0][0], items[0][3]
    assert num_chunks <= spec.max_chunks
    chunks: dict[tuple, list] = {}
    for entry in items[1 : num_items + 1]:
        chunks.setdefault((*entry[:5],), []).append((*entry[5:],))
    assert [(*x[:5],) for x in tiles[1 : num_tiles + 1].tolist()] == [*chunks]
    work = 0
    for (_, length, _, attended_length, start), parts in chunks.items():
        assert [x[2] for x in parts[:-1]] == [x[1] for x in parts[1:]]
        blocks = {*range(parts[0][1], parts[-1][2])}
        assert blocks >= expected_blocks(spec, start, length, attended_length)
        assert len(blocks) <= max(
            len(expected_blocks(spec, start, length, attended_length)), spec.min_blocks
        )
        work += len(blocks) * group
    limit = max(-(-work * heads // (CHUNKS_PER_CTA * ctas)), MIN_BLOCKS)
    sums = items[len(tiles) + spec.max_chunks :]
    used = [x for parts in chunks.values() if len(parts) > 1 for x, *_ in parts]
    assert used == [*range(1, num_chunks + 1)]
    for (offset, length, _, _, start), parts in chunks.items():
        largest = max(end - first for _, first, end in parts)
        assert largest == 1 or largest * group < 2 * limit + 2 * group
        if len(parts) == 1:
            assert parts[0][0] == 0
            continue
        first = parts[0][0] - 1
        assert sums[first][:4] == [len(parts), offset, length, start]
        assert all(x[0] == 0 for x in sums[first + 1 : first + len(parts)])


def test_cut_tiles_selects_the_device_of_the_tiles(monkeypatch):
    selected = []

    def select(index, run):
        selected.append(index)
        return lambda *args: "items"

    monkeypatch.setattr(tile_chunks, "on_device", select)
    tiles = torch.zeros((3, 8), dtype=torch.int32, device=DEVICE)
    assert cut_tiles(tiles, ChunkSpec(128, 64, 0, 0, 1, 1, 8, 0)) == "items"
    assert selected == [tiles.device.index]


def test_cut_tiles_whose_kernel_does_not_compile_raises(monkeypatch):
    def fail(*args, **constants):
        raise OutOfResources(300_000, 100_000, "shared memory")

    monkeypatch.setattr(tile_chunks, "launch_jit", fail)
    tiles = torch.zeros((3, 8), dtype=torch.int32, device=DEVICE)
    with pytest.raises(KernelUnavailableError, match="chunks does not compile"):
        cut_tiles(tiles, ChunkSpec(128, 64, 0, 0, 1, 1, 8, 0))


@pytest.mark.parametrize("dim_a, dim_b", [(24, 40), (64, 0)])
def test_sum_chunks_kernel_adds_in_order(dim_a, dim_b):
    """The sum is in float32, always in the order of the chunks. Whole tiles are not changed."""
    heads, size, block = 3, 128, 256
    lengths = (3000, 40, 700)
    cu = offsets(lengths, DEVICE)
    total = sum(lengths)
    spec = ChunkSpec(size, 64, UNBOUNDED, UNBOUNDED, 1, heads, 400, 0)
    items = cut_tiles(schedule_tiles(cu, cu, total, size, UNBOUNDED, UNBOUNDED), spec)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    results, sums = [], []
    for dim in (dim_a, dim_b):
        shape = spec.max_chunks, heads, size, dim
        sums.append(torch.randn(shape, generator=generator, device=DEVICE))
        results.append(torch.full((total, heads, dim), -7.0, dtype=torch.float16, device=DEVICE))
    expected = [x.clone() for x in results]
    blocks = sum(-(-size * x // block) for x in (dim_a, dim_b))
    first_entry = items.shape[0] - spec.max_chunks
    attention_sum_chunks_kernel[(spec.max_chunks * heads * blocks,)](
        items, *sums, *results, first_entry, heads, size, dim_a, dim_b, block, DEPENDENT=False
    )
    is_cut = False
    for i, (count, offset, length, start, *_) in enumerate(items[first_entry:].tolist()):
        if i >= int(items[0, 3]) or count == 0:
            continue
        is_cut = True
        rows = slice(offset + start, offset + min(start + size, length))
        for x, result in zip(sums, expected, strict=True):
            added = x[i].clone()
            for chunk in range(i + 1, i + count):
                added += x[chunk]
            part = added.to(torch.float16).transpose(0, 1)
            result[rows] = part[: rows.stop - rows.start]
    assert is_cut
    for result, x in zip(results, expected, strict=True):
        assert torch.equal(result, x)


def schedule_end(items, group, heads, ctas):
    """Return when the last CTA ends, in blocks; an item takes two blocks more, and a chunk five."""
    ends = [0.0] * ctas
    for entry in items[1 : items[0][0] + 1]:
        for _ in range(heads):
            fixed = 5 if entry[5] else 2
            heapq.heapreplace(ends, ends[0] + (entry[7] - entry[6]) * group + fixed)
    return max(ends)


@pytest.mark.parametrize(
    "lengths, group, heads, expected",
    [
        ((300,) * 200, 1, 8, False),
        ((2048,) * 16, 1, 16, False),
        ((16_000,), 1, 1, False),
        ((9000, *(50,) * 100), 1, 1, True),
        ((1500,), 1, 1, True),
        ((5000, *(40,) * 60), 10, 1, True),
        ((1400, 1800, 800, 2400), 1, 1, True),
    ],
)
def test_gains_by_chunks_is_true_where_a_simulated_schedule_ends_earlier(
    lengths, group, heads, expected
):
    total, ctas, size = sum(lengths), 132, 128
    spec = AttentionSpec(UNBOUNDED, UNBOUNDED, 1.0, 0.0)
    work = estimate_work(len(lengths), max(lengths), total, total, size, spec)
    gains = gains_by_chunks(
        [work], heads, group, 1, size, 4 * 256, 4 * 256, total, max(lengths), ctas
    )
    assert gains == expected
    cu = offsets(lengths, DEVICE)
    chunks = ChunkSpec(size, 64, UNBOUNDED, UNBOUNDED, group, heads, ctas, 0)
    tiles = schedule_tiles(cu, cu, total, size, UNBOUNDED, UNBOUNDED)
    cut = schedule_end(cut_tiles(tiles, chunks).tolist(), group, heads, ctas)
    whole = [[int(tiles[0, 0])]]
    for entry in tiles[1 : whole[0][0] + 1].tolist():
        whole.append([*entry[:5], 0, 0, -(-entry[3] // 64)])
    end = schedule_end(whole, group, heads, ctas)
    assert not gains or cut < 0.9 * end
