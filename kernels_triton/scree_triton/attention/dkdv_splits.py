"""A cost model of the backward: splits of the query heads of a key head, and chunks of tiles."""

from collections.abc import Sequence
from math import ceil
from typing import NamedTuple

from .metadata import AttentionSpec
from .tile_chunks import CHUNKS_PER_CTA, MIN_BLOCKS
from .tile_scheduler import UNBOUNDED

#: The cost model of `choose_splits`: operations per second and SM of dK and dV, and bytes of partial
#: sums per second and seconds per launch of the kernel that adds them. Measured on an H200.
_SPLIT_FLOPS, _SPLIT_BYTES, _SPLIT_SECONDS = 4.2e12, 2.5e12, 3e-6
#: Seconds of a tile before and after its products, and queries per block.
_TILE_SECONDS, _QUERY_BLOCK = 3e-6, 64
#: The most bytes of partial sums, unless q and the gradient of the output have more elements.
_MAX_SPLIT_BYTES = 1 << 30
#: The fewest splits are chosen whose cost relative to the least cost is at most this.
_TOLERANCE = 1.04
#: Whole tiles must cost this many times as much as chunks. The estimates know only the longest row.
_CHUNK_GAIN = 1.2
#: Seconds that chunks add: the launch that adds up their sums, and more instructions per tile.
_CHUNK_SECONDS = 4e-6


class KeyTileWork(NamedTuple):
    """The work of dK and dV for one query head, in pairs of query and key."""

    longest: float
    """The pairs of the tile with the most queries."""
    total: float
    """The pairs of all tiles."""
    tiles: float
    """The number of tiles."""


def estimate_pairs(
    num_rows: int, longest_q: float, longest_k: float, total_q: int, total_k: int, aligned: bool
) -> float:
    """Estimate the pairs of query and key of one head without a mask.

    One row has the largest length, and the others are equal. With `aligned`, one row has the most
    queries and the most keys; otherwise two rows have them.
    """
    num_others = max(num_rows - 1, 1)
    other_q, other_k = (total_q - longest_q) / num_others, (total_k - longest_k) / num_others
    if aligned or num_rows < 2:
        return longest_q * longest_k + num_others * other_q * other_k
    return longest_q * other_k + other_q * longest_k + (num_rows - 2) * other_q * other_k


def estimate_work(
    num_rows: int,
    max_seqlen: int,
    total_q: int,
    total_k: int,
    tile_size: int,
    spec: AttentionSpec,
    aligned: bool = True,
) -> KeyTileWork:
    """Estimate the work of tiles of `tile_size` keys from the metadata on the host.

    The rows are as in `estimate_pairs`. Where the largest length is unknown, it is four times the mean.
    """
    longest_q, longest_k = (
        min(total, 4 * total / max(num_rows, 1) if max_seqlen >= UNBOUNDED else max_seqlen)
        for total in (total_q, total_k)
    )
    pairs = estimate_pairs(num_rows, longest_q, longest_k, total_q, total_k, aligned)
    window_left, window_right, *_ = spec
    if min(window_left, window_right) < UNBOUNDED:
        # A causal mask leaves about half of the pairs.
        reach = max(window_left, 0) + max(window_right, 0) + 1
        pairs = min(pairs / 2, float(total_k * reach))
        longest_q = min(longest_q, reach + tile_size)
    # Masks and the ends of rows leave about one block of queries per tile in part unused.
    tiles = max(total_k / tile_size + num_rows / 2, float(num_rows))
    longest = (longest_q + _QUERY_BLOCK) * tile_size
    return KeyTileWork(longest, pairs + tiles * _QUERY_BLOCK * tile_size, tiles)


def gains_by_chunks(
    works: Sequence[KeyTileWork],
    heads: int,
    group: int,
    splits: int,
    tile_size: int,
    pair_flops: int,
    token_bytes: int,
    total: int,
    longest_row: int,
    ctas: int,
) -> bool:
    """Return whether chunks of tiles, see `tile_chunks`, take less time than whole tiles.

    Parameters
    ----------
    works
        Estimates of the work of one head, see `estimate_work`. The mean of their ratios decides.
    heads, group, splits
        Number of heads whose tiles run one by one, of heads over which a tile loops, and the splits of these
        heads without chunks.
    tile_size
        Tokens per tile.
    pair_flops, token_bytes
        Operations per pair of query and key, and bytes of the sums per token.
    total
        Number of tokens that the tiles cut.
    longest_row
        Tokens of the longest row, if all of its tiles have equal work; 0 otherwise.
    ctas
        Number of CTAs that run at once.
    """
    seconds = pair_flops / _SPLIT_FLOPS
    block = _QUERY_BLOCK * tile_size * seconds
    # The number of tiles of the longest row that some CTA has.
    rounds = max(ceil(ceil(longest_row / tile_size) * heads * splits / ctas), 1)
    ratios = []
    for work in works:
        mean = work.total * seconds * heads * group / ctas
        longest = work.longest * seconds * group
        tiles = work.tiles * heads / ctas
        whole = _schedule_seconds(mean, longest / splits, max(tiles * splits, 1.0))
        whole = max(whole, rounds * longest / splits)
        if splits > 1:
            whole += _SPLIT_SECONDS + splits * total * heads * token_bytes / _SPLIT_BYTES
        # A chunk has at least MIN_BLOCKS blocks in all, and at least one block of each head.
        shortest = block * max(2 * MIN_BLOCKS, group)
        chunk = min(longest, max(mean, shortest))
        chunks = min(CHUNKS_PER_CTA, mean / (shortest / 2)) if chunk < longest else 0.0
        cut = _schedule_seconds(mean, chunk, max(tiles + chunks, 1.0)) + _CHUNK_SECONDS
        cut += chunks * ctas * tile_size * token_bytes / _SPLIT_BYTES
        ratios.append(whole / cut)
    return sum(ratios) > _CHUNK_GAIN * len(ratios)


def _schedule_seconds(mean: float, longest: float, tiles_per_cta: float) -> float:
    """Return the seconds of a schedule from the mean work per CTA and the longest item."""
    # With few tiles per CTA, the last CTA ends a part of the longest tile after the mean.
    imbalance = longest / 4 * min(3 / tiles_per_cta, 1.0)
    return max(longest, mean + imbalance) + tiles_per_cta * _TILE_SECONDS


def choose_splits(
    group: int,
    k_heads: int,
    total_q: int,
    total_k: int,
    dims: int,
    works: Sequence[KeyTileWork],
    sm_count: int,
) -> int:
    """Return into how many splits to divide the query heads of a key head in dK and dV.

    More splits balance the load of the SMs better, and write more partial sums. These have at most as
    many elements as q and the gradient of the output, or take at most 1 GiB.

    Parameters
    ----------
    group
        Query heads per key head.
    k_heads
        Number of key heads.
    total_q, total_k
        Number of queries, and of keys.
    dims
        head_dim of q and k plus head_dim of v.
    works
        Estimates of the work of one query head, see `estimate_work`, the most likely estimate first.
        The first estimate selects the numbers of splits that cost little. The other estimates choose
        among these. They choose no number of splits, except the smallest one, whose partial sums have
        more elements than q and the gradient of the output.
    sm_count
        Number of CTAs that run at once.
    """
    bytes_per_split = 4 * total_k * k_heads * dims
    most = max(group * total_q // max(total_k, 1), _MAX_SPLIT_BYTES // max(bytes_per_split, 1), 1)
    choices = [x for x in range(1, min(group, most) + 1) if group % x == 0]
    for i, work in enumerate(works):
        if i > 0:
            fitting = (x for x in choices[1:] if x * total_k <= group * total_q)
            choices = [choices[0], *fitting]
        costs = [_cost(splits, group, k_heads, total_k, dims, work, sm_count) for splits in choices]
        limit = _TOLERANCE * min(costs)
        choices = [x for x, cost in zip(choices, costs, strict=True) if cost <= limit]
    return choices[0]


def _cost(
    splits: int, group: int, k_heads: int, total_k: int, dims: int, work: KeyTileWork, sm_count: int
) -> float:
    """Return the seconds of dK and dV by the model."""
    seconds = 4 * dims / _SPLIT_FLOPS
    mean = work.total * seconds * k_heads * group / sm_count
    longest = work.longest * seconds * group / splits
    tiles_per_sm = max(work.tiles * k_heads * splits / sm_count, 1.0)
    cost = _schedule_seconds(mean, longest, tiles_per_sm)
    if splits > 1:
        cost += _SPLIT_SECONDS + 4 * splits * total_k * k_heads * dims / _SPLIT_BYTES
    return cost
