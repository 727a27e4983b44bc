"""Cut rows into pieces of equal cost per rank, and list the keys that a piece needs. NumPy only."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

#: Ranks may cost this much more than their mean before one more row is cut.
TOLERANCE = 1.01


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of rows, in order of their rows and positions; no piece is empty.

    Attributes
    ----------
    rows, starts, stops, ranks
        (pieces,) row of each piece, its first position, the position after its last, and its rank.
    """

    rows: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    ranks: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """(pieces,) tokens of each piece."""
        return np.asarray(self.stops - self.starts)

    def select(self, mask: np.ndarray) -> Pieces:
        """Return the pieces of a mask."""
        return Pieces(self.rows[mask], self.starts[mask], self.stops[mask], self.ranks[mask])


def cut_rows(lengths: np.ndarray, num_ranks: int, cost: tuple[float, float]) -> Pieces:
    """Divide rows over ranks, with equal sums of ``a * L + b * L**2``.

    The k longest rows are cut into ``2 * num_ranks`` chunks each, and rank r gets the chunks r and
    ``2 * num_ranks - 1 - r``, so that all ranks have equal costs with a causal mask too. The other
    rows stay whole. k is the smallest number that balances the ranks.
    """
    costs = cost[0] * lengths + cost[1] * lengths.astype(np.float64) ** 2
    order = np.argsort(-costs, kind="stable")[: np.count_nonzero(lengths)]
    mean = costs.sum() / num_ranks
    num_cut = int(np.count_nonzero(costs > TOLERANCE * mean)) if num_ranks > 1 else 0
    step = 1
    while True:
        rank_of_row, heaviest = _assign_whole_rows(order[num_cut:], costs, num_ranks)
        excess = heaviest + costs[order[:num_cut]].sum() / num_ranks
        if num_ranks == 1 or num_cut >= order.size or excess <= TOLERANCE * mean:
            break
        num_cut, step = min(num_cut + step, order.size), 2 * step
    chunk_ranks = np.append(np.arange(num_ranks), np.arange(num_ranks)[::-1])
    cut = np.sort(order[:num_cut])
    # (cut rows, chunks + 1) bounds of the chunks.
    bounds = lengths[cut, None] * np.arange(2 * num_ranks + 1) // (2 * num_ranks)
    whole = np.sort(order[num_cut:])
    rows = np.concatenate([whole, np.repeat(cut, 2 * num_ranks)])
    starts = np.concatenate([np.zeros_like(whole), bounds[:, :-1].ravel()])
    stops = np.concatenate([lengths[whole], bounds[:, 1:].ravel()])
    ranks = np.concatenate([rank_of_row[whole], np.tile(chunk_ranks, cut.size)])
    sequence = np.lexsort((starts, rows))
    pieces = Pieces(*(x[sequence].astype(np.int64) for x in (rows, starts, stops, ranks)))
    return pieces.select(pieces.lengths > 0)


def _assign_whole_rows(
    rows: np.ndarray, costs: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, float]:
    """Give each row, by falling cost, to the rank with the lowest cost; return the highest cost."""
    rank_of_row = np.zeros(costs.size, np.int64)
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for row in rows.tolist():
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + float(costs[row]), rank))
        rank_of_row[row] = rank
    return rank_of_row, max(load for load, _ in heap)


@dataclass(frozen=True, slots=True)
class KeyGroup:
    """Pieces of one rank whose windows are shifted equally.

    Attributes
    ----------
    shift
        Number of keys after the last query of the piece. Attention aligns the last query with the
        last key, so windows move by this number.
    pieces
        (pieces,) indices of the pieces among all pieces of the rank.
    key_lengths
        (pieces,) number of keys of each piece.
    """

    shift: int
    pieces: np.ndarray
    key_lengths: np.ndarray


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """The keys that the pieces of one rank need, and the tokens that ranks exchange for them.

    The buffer has the tokens of this rank, then the tokens from the other ranks, by rank.

    Attributes
    ----------
    send_index
        (sent,) tokens of this rank that others need, by rank.
    send_counts, receive_counts
        Tokens per rank.
    key_index
        (keys,) index into the buffer of each key of each piece, group by group.
    layers
        Parts of the keys in which no token of the buffer comes twice.
    groups
        The pieces; one group unless keys after a piece are visible.
    """

    send_index: np.ndarray
    send_counts: list[int]
    receive_counts: list[int]
    key_index: np.ndarray
    layers: list[np.ndarray]
    groups: list[KeyGroup]


def plan_keys(
    pieces: Pieces, lengths: np.ndarray, rank: int, num_ranks: int, window: tuple[int | None, ...]
) -> KeyPlan:
    """Return the keys that the pieces of a rank need under a window (left, right)."""
    left, right = window
    row_lengths = lengths[pieces.rows]
    is_whole = pieces.lengths == row_lengths
    first = np.zeros_like(pieces.starts)
    last = row_lengths if right is None else np.minimum(row_lengths, pieces.stops + right)
    if left is not None:
        first = np.where(is_whole, 0, np.maximum(0, pieces.starts - left))
    last = np.where(is_whole, row_lengths, last)
    # Without a window on either side the alignment has no effect.
    is_unbounded = left is None and right is None
    shifts = np.zeros_like(last) if is_unbounded else last - pieces.stops
    # Index of the first token of each piece among the tokens of its rank.
    local_starts = np.zeros_like(pieces.starts)
    for r in range(num_ranks):
        sizes = pieces.lengths[pieces.ranks == r]
        local_starts[pieces.ranks == r] = np.cumsum(sizes) - sizes

    def needed(destination: int, source: int) -> list[tuple[int, int, int]]:
        """Return (piece of the source, from, to) that the destination needs."""
        ranges = []
        for piece in np.flatnonzero((pieces.ranks == source) & ~is_whole).tolist():
            low, high = _union(
                [
                    (max(first[p], pieces.starts[piece]), min(last[p], pieces.stops[piece]))
                    for p in pieces_of_row[pieces.rows[piece]]
                    if pieces.ranks[p] == destination
                ]
            )
            if low < high:
                ranges.append((piece, low, high))
        return ranges

    pieces_of_row: dict[int, list[int]] = {}
    for p in np.flatnonzero(~is_whole).tolist():
        pieces_of_row.setdefault(int(pieces.rows[p]), []).append(p)
    others = [r for r in range(num_ranks) if r != rank]
    send_counts, receive_counts = [0] * num_ranks, [0] * num_ranks
    sent = [np.zeros(0, np.int64)]
    slots = {row: np.full(int(lengths[row]), -1) for row in pieces_of_row}
    slot = int(pieces.lengths[pieces.ranks == rank].sum())
    for other in others:
        for piece, low, high in needed(other, rank):
            start = local_starts[piece] - pieces.starts[piece]
            sent.append(np.arange(start + low, start + high))
            send_counts[other] += high - low
        for piece, low, high in needed(rank, other):
            slots[int(pieces.rows[piece])][low:high] = np.arange(slot, slot + high - low)
            receive_counts[other] += high - low
            slot += high - low
    mine = np.flatnonzero(pieces.ranks == rank)
    for piece in mine[~is_whole[mine]].tolist():
        span = slice(pieces.starts[piece], pieces.stops[piece])
        slots[int(pieces.rows[piece])][span] = local_starts[piece] + np.arange(
            pieces.lengths[piece]
        )
    keys, key_pieces, groups = [np.zeros(0, np.int64)], [], []
    for shift in np.unique(shifts[mine]).tolist():
        members = np.flatnonzero(shifts[mine] == shift)
        for piece in mine[members].tolist():
            if is_whole[piece]:
                keys.append(local_starts[piece] + np.arange(pieces.lengths[piece]))
            else:
                keys.append(slots[int(pieces.rows[piece])][first[piece] : last[piece]])
            key_pieces.append(piece)
        groups.append(KeyGroup(shift, members, (last - first)[mine[members]]))
    if not groups:
        groups = [KeyGroup(0, mine, mine)]
    key_index = np.concatenate(keys)
    # The pieces of one row may need the same keys. A rank has at most two pieces of a row.
    ordinals = {p: i for row in pieces_of_row.values() for i, p in _ordinals(row, pieces, rank)}
    ordinal = np.asarray([ordinals.get(p, 0) for p in key_pieces], np.int64)
    layer_of_key = np.repeat(ordinal, [len(x) for x in keys[1:]])
    layers = [np.flatnonzero(layer_of_key == i) for i in np.unique(layer_of_key)]
    return KeyPlan(np.concatenate(sent), send_counts, receive_counts, key_index, layers, groups)


def _ordinals(row: list[int], pieces: Pieces, rank: int) -> list[tuple[int, int]]:
    return list(enumerate(p for p in row if pieces.ranks[p] == rank))


def _union(ranges: list[tuple[int, int]]) -> tuple[int, int]:
    """Return the smallest range that contains all ranges that are not empty."""
    kept = [(int(low), int(high)) for low, high in ranges if low < high]
    if not kept:
        return 0, 0
    return min(low for low, _ in kept), max(high for _, high in kept)
