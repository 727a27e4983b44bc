"""A cost model of attention of shards: whether ranks exchange keys, or heads for tokens."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

#: Operations per second of attention, forward and backward, in half precision and in other dtypes.
HALF_FLOPS, OTHER_FLOPS = 5e14, 6e13
#: Bytes per second that a rank receives in an exchange of heads, including the copies before and after it,
#: from one other rank and from several.
PAIR_BANDWIDTH, HEADS_BANDWIDTH = 2.2e11, 3e11
#: Bytes per second that a rank receives in an exchange of keys.
KEYS_BANDWIDTH = 2e11
#: Attention to keys of other ranks takes longer by this fraction than causal attention with as many pairs.
REMOTE_LOSS = 0.09
# All numbers were measured on two and on four H200, which NVLink connects.


class HeadCounts(NamedTuple):
    """The static shape of a call of attention.

    Attributes
    ----------
    heads, kv_heads
        Number of query heads, and of key heads.
    dims
        head_dim of queries and keys plus head_dim of values.
    itemsize
        Bytes of an element.
    """

    heads: int
    kv_heads: int
    dims: int
    itemsize: int


def is_faster_by_heads(
    lengths: np.ndarray,
    is_cut: np.ndarray,
    num_ranks: int,
    counts: HeadCounts,
    window: tuple[int | None, int | None],
    overlaps: bool,
) -> bool:
    """Return whether a step of attention takes less time if ranks exchange heads instead of keys.

    An exchange of heads sends all tokens forward and backward, and computes whole rows. An exchange of
    keys sends the keys of cut rows.

    Parameters
    ----------
    lengths, is_cut
        (n,) int64 lengths of the whole rows, and whether each row is cut.
    num_ranks
        Number of ranks.
    counts
        The shape of the call.
    window
        (left, right): number of visible keys before and after a query. None is unbounded.
    overlaps
        Whether the exchange of keys runs during attention to the keys of the rank.
    """
    left, right = window
    remote_fraction = (num_ranks - 1) / num_ranks
    # Pairs of query and key per row. A causal mask leaves half of them.
    tokens = lengths.astype(np.float64)
    pairs = tokens**2 / (2 if right == 0 else 1)
    # At most the tokens of the cut rows on other ranks, or the windows of the two chunks of a rank.
    keys = tokens[is_cut] * remote_fraction
    remote_pairs = pairs[is_cut] / num_ranks * remote_fraction
    if left is not None and right is not None:
        reach = left + right
        pairs = np.minimum(pairs, tokens * (reach + 1))
        keys = np.minimum(keys, 2 * reach)
        remote_pairs = np.minimum(remote_pairs, float(reach) ** 2)
    flops = HALF_FLOPS if counts.itemsize == 2 else OTHER_FLOPS
    # Per pair, head and element of a head: 2 operations in the forward pass, 5 in the backward pass.
    seconds_per_pair = 7 * counts.heads * counts.dims / flops
    remote_seconds = remote_pairs.sum() * seconds_per_pair
    local_seconds = pairs.sum() / num_ranks * seconds_per_pair - remote_seconds
    bytes_per_head = counts.dims * counts.itemsize
    key_seconds = 2 * keys.sum() * counts.kv_heads * bytes_per_head / KEYS_BANDWIDTH
    if overlaps:
        key_seconds = max(key_seconds - local_seconds, 0.0) + REMOTE_LOSS * remote_seconds
    sent_heads = tokens.sum() / num_ranks * remote_fraction * (counts.heads + counts.kv_heads)
    bandwidth = PAIR_BANDWIDTH if num_ranks == 2 else HEADS_BANDWIDTH
    return bool(2 * sent_heads * bytes_per_head / bandwidth < key_seconds)
