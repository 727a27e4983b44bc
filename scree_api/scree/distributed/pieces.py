"""Divide rows over ranks with equal costs, and plan which keys the ranks exchange; NumPy only."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from .exchange import REMOTE_LOSS
from .one_cut import cut_longest_row, slowest_cost

#: The highest cost of a rank relative to the mean of all ranks. Above it one more row is cut.
TOLERANCE = 1.01
#: Most nonempty rows of a batch whose longest row may have one cut: the search visits each of them.
MAX_ONE_CUT_ROWS = 1024
#: Bounds the number of exchanges of whole rows between two ranks, per rank.
MAX_EXCHANGES = 8


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of rows, sorted by row and position; no piece is empty.

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
        """Return the pieces where the mask is True."""
        return Pieces(self.rows[mask], self.starts[mask], self.stops[mask], self.ranks[mask])


def cut_rows(
    lengths: np.ndarray, num_ranks: int, cost: tuple[float, float], causal: bool = False
) -> Pieces:
    """Divide rows over ranks, with equal sums of ``a * L + b * L**2``.

    The limit of a rank is `TOLERANCE` times the mean cost. Rows that cost more than the limit are
    cut. If there are none, and whole rows exceed the limit of one rank only, the cheapest row is cut
    that suffices. Otherwise more of the longest rows are cut, in doubling steps, until the whole
    rows of no rank exceed the limit.

    Each cut row has two chunks per rank, in the order 0, 1, ... r, r, ... 1, 0 of the ranks. Both
    chunks of a rank have the same length. So with a causal mask too, their queries see half of the
    row on average. A rank whose whole rows cost less has longer chunks.

    If all attention has a causal mask, two ranks may have one chunk each of the longest row; see
    `cut_longest_row`. They do so if a step then costs less. Batches of more than `MAX_ONE_CUT_ROWS`
    nonempty rows keep two chunks.

    Parameters
    ----------
    lengths
        (n,) int64 lengths of the rows.
    num_ranks
        Number of ranks.
    cost
        The numbers (a, b).
    causal
        Whether all attention has a causal mask.
    """
    pieces = _cut_evenly(lengths, num_ranks, cost)
    is_small = np.count_nonzero(lengths) <= MAX_ONE_CUT_ROWS
    is_cut = bool(np.any(pieces.lengths != lengths[pieces.rows]))
    if not (causal and num_ranks == 2 and is_small and is_cut):
        return pieces
    rows = np.flatnonzero(lengths)
    cut, ranks, highest = cut_longest_row(lengths[rows], cost)
    if highest >= _causal_cost(pieces, cost):
        return pieces
    starts, stops = np.zeros_like(rows), lengths[rows]
    at = int(np.argmax(stops))
    rows, ranks = np.insert(rows, at, rows[at]), np.insert(ranks, at, 0)
    starts, stops = np.insert(starts, at, 0), np.insert(stops, at, cut)
    starts[at + 1] = cut
    return Pieces(*(x.astype(np.int64) for x in (rows, starts, stops, ranks)))


def _causal_cost(pieces: Pieces, cost: tuple[float, float]) -> float:
    """Return the `slowest_cost` of pieces on two ranks under a causal mask."""
    tokens, pairs = np.zeros(2), np.zeros(2)
    starts, stops = pieces.starts.astype(np.float64), pieces.stops.astype(np.float64)
    np.add.at(tokens, pieces.ranks, stops - starts)
    np.add.at(pairs, pieces.ranks, stops**2 - starts**2)
    for i in range(starts.size):
        # Keys on the other rank before this piece.
        is_remote = (pieces.rows[:i] == pieces.rows[i]) & (pieces.ranks[:i] != pieces.ranks[i])
        keys = (stops[:i] - starts[:i])[is_remote].sum()
        pairs[pieces.ranks[i]] += 2 * REMOTE_LOSS * keys * (stops[i] - starts[i])
    return float(slowest_cost(tokens, pairs, cost))


def _cut_evenly(lengths: np.ndarray, num_ranks: int, cost: tuple[float, float]) -> Pieces:
    """Divide rows over ranks, with two chunks per rank of each cut row; see `cut_rows`."""
    costs = cost[0] * lengths + cost[1] * lengths.astype(np.float64) ** 2
    order = np.argsort(-costs, kind="stable")[: np.count_nonzero(lengths)]
    mean = costs.sum() / num_ranks
    limit = TOLERANCE * mean
    num_cut = int(np.count_nonzero(costs > limit)) if num_ranks > 1 else 0
    step = 1
    while True:
        rank_of_row, loads = _assign_whole_rows(order[num_cut:], costs, num_ranks)
        cut = order[:num_cut]
        if num_ranks == 1 or num_cut >= order.size or loads.max() <= limit:
            break
        if num_cut == 0:
            row = _find_row_to_cut(order, costs, rank_of_row, loads, limit)
            if row is not None:
                loads[rank_of_row[row]] -= costs[row]
                cut = np.asarray([row])
                break
        num_cut, step = min(num_cut + step, order.size), 2 * step
    cut, whole = np.sort(cut), np.sort(order[~np.isin(order, cut)])
    missing_costs = np.maximum(mean - loads, 0) if cut.size else np.ones(num_ranks)
    # Fraction of each cut row in each of the two chunks of a rank.
    halves = missing_costs / missing_costs.sum() / 2
    ends = np.cumsum(np.append(halves, halves[::-1]))
    ends[-1] = 1
    # (cut rows, chunks + 1) bounds of the chunks.
    bounds = np.floor(lengths[cut, None] * np.append(0.0, ends)).astype(np.int64)
    chunk_ranks = np.append(np.arange(num_ranks), np.arange(num_ranks)[::-1])
    rows = np.concatenate([whole, np.repeat(cut, 2 * num_ranks)])
    starts = np.concatenate([np.zeros_like(whole), bounds[:, :-1].ravel()])
    stops = np.concatenate([lengths[whole], bounds[:, 1:].ravel()])
    ranks = np.concatenate([rank_of_row[whole], np.tile(chunk_ranks, cut.size)])
    sequence = np.lexsort((starts, rows))
    pieces = Pieces(*(x[sequence].astype(np.int64) for x in (rows, starts, stops, ranks)))
    return _join_neighbours(pieces.select(pieces.lengths > 0))


def _join_neighbours(pieces: Pieces) -> Pieces:
    """Join adjacent pieces of one rank, such as the two middle chunks of a row."""
    follows = np.zeros(pieces.rows.size + 1, bool)
    follows[1:-1] = (pieces.rows[1:] == pieces.rows[:-1]) & (pieces.ranks[1:] == pieces.ranks[:-1])
    is_first, is_last = ~follows[:-1], ~follows[1:]
    return Pieces(
        pieces.rows[is_first],
        pieces.starts[is_first],
        pieces.stops[is_last],
        pieces.ranks[is_first],
    )


def _find_row_to_cut(
    rows: np.ndarray, costs: np.ndarray, rank_of_row: np.ndarray, loads: np.ndarray, limit: float
) -> int | None:
    """Return the cheapest row without which no rank costs more than the limit."""
    heaviest = int(np.argmax(loads))
    excess = loads[heaviest] - limit
    candidates = rows[(rank_of_row[rows] == heaviest) & (costs[rows] >= excess)]
    if candidates.size == 0 or np.count_nonzero(loads > limit) > 1:
        return None
    return int(candidates[np.argmin(costs[candidates])])


def _assign_whole_rows(
    rows: np.ndarray, costs: np.ndarray, num_ranks: int
) -> tuple[np.ndarray, np.ndarray]:
    """Assign each row to a rank; return the rank of each row, and the cost of each rank.

    Each row, in descending order of cost, goes to the rank with the lowest cost. Then the rank with
    the highest cost exchanges rows with other ranks, while that lowers the highest cost.
    """
    rank_of_row = np.zeros(costs.size, np.int64)
    heap = [(0.0, rank) for rank in range(num_ranks)]
    for row in rows.tolist():
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + float(costs[row]), rank))
        rank_of_row[row] = rank
    loads = np.zeros(num_ranks)
    for load, rank in heap:
        loads[rank] = load
    for _ in range(MAX_EXCHANGES * num_ranks if rows.size else 0):
        heaviest = int(np.argmax(loads))
        rows_to_give = rows[rank_of_row[rows] == heaviest]
        best = loads[heaviest] * (1 - 1e-9), -1, -1, -1
        for other in np.argsort(loads, kind="stable").tolist():
            if other == heaviest:
                continue
            # Candidates for the exchange, in descending order of cost; -1 is no row.
            rows_to_take = np.append(rows[rank_of_row[rows] == other], -1)
            costs_to_take = np.append(costs[rows_to_take[:-1]], 0.0)
            ideal = costs[rows_to_give] - (loads[heaviest] - loads[other]) / 2
            index = np.searchsorted(-costs_to_take, -ideal)
            for candidate in (index - 1, index):
                candidate = np.clip(candidate, 0, costs_to_take.size - 1)
                moved = costs[rows_to_give] - costs_to_take[candidate]
                highest = np.maximum(loads[heaviest] - moved, loads[other] + moved)
                i = int(np.argmin(highest))
                if highest[i] < best[0]:
                    best = (
                        float(highest[i]),
                        int(rows_to_give[i]),
                        int(rows_to_take[candidate[i]]),
                        other,
                    )
        _, row, back, other = best
        if row < 0:
            break
        moved = costs[row] - (costs[back] if back >= 0 else 0.0)
        rank_of_row[row] = other
        if back >= 0:
            rank_of_row[back] = heaviest
        loads[heaviest] -= moved
        loads[other] += moved
    return rank_of_row, loads


def find_token_runs(
    pieces: Pieces, lengths: np.ndarray, num_ranks: int
) -> list[list[tuple[int, int]]]:
    """Return per rank, in the order of its tokens, its runs (start, length) of the tokens of all rows.

    Parameters
    ----------
    pieces
        The pieces of all ranks.
    lengths
        (n,) int64 lengths of the whole rows.
    num_ranks
        Number of ranks.
    """
    starts = (np.cumsum(lengths) - lengths)[pieces.rows] + pieces.starts
    runs: list[list[tuple[int, int, int]]] = [[] for _ in range(num_ranks)]
    for run in zip(pieces.ranks.tolist(), starts.tolist(), pieces.lengths.tolist(), strict=True):
        _append_run(runs[run[0]], run)
    return [[(start, length) for _, start, length in part] for part in runs]


class _KeyTables:
    """The keys that the pieces of all ranks see, and the tokens that one rank exchanges for them.

    Attributes
    ----------
    own
        (pieces of the rank,) indices of its pieces among all pieces.
    is_cut
        (pieces,) True for pieces of cut rows.
    first, last
        (pieces,) bounds of the keys in its row that a piece sees. Pieces of whole rows see the row.
    starts
        Piece of the rank -> index of its first token among the tokens of the rank.
    sent, received
        See `KeyPlan`.

    The parameters are the parameters of `plan_keys`.
    """

    def __init__(
        self,
        pieces: Pieces,
        lengths: np.ndarray,
        rank: int,
        num_ranks: int,
        window: tuple[int | None, ...],
    ) -> None:
        left, right = window
        self.pieces, self.rank = pieces, rank
        row_lengths = lengths[pieces.rows]
        self.is_cut = pieces.lengths != row_lengths
        first, last = np.zeros_like(pieces.starts), row_lengths
        if left is not None:
            first = np.where(self.is_cut, np.maximum(0, pieces.starts - left), 0)
        if right is not None:
            last = np.where(self.is_cut, np.minimum(last, pieces.stops + right), last)
        self.first, self.last = first, last
        self.own = np.flatnonzero(pieces.ranks == rank)
        sizes = pieces.lengths[self.own]
        before = np.cumsum(sizes) - sizes
        self.starts = dict(zip(self.own.tolist(), before.tolist(), strict=True))
        self._pieces_of_row: dict[int, list[int]] = {}
        for p in np.flatnonzero(self.is_cut).tolist():
            self._pieces_of_row.setdefault(int(pieces.rows[p]), []).append(p)
        self.sent: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
        self.received = [0] * num_ranks
        # Piece -> the position in its row of its first token on this rank, and the token's index.
        self._available = {p: (int(pieces.starts[p]), start) for p, start in self.starts.items()}
        for other in range(num_ranks):
            if other == rank:
                continue
            for p, low, high in self._needed(other, rank):
                self.sent[other].append((self.starts[p] + low - int(pieces.starts[p]), high - low))
            for p, low, high in self._needed(rank, other):
                self._available[p] = low, self.received[other]
                self.received[other] += high - low

    def visible(self, query: int) -> list[tuple[int, int, int]]:
        """Return (piece, from, to) of the keys in its row that a piece sees."""
        result = []
        for p in self._pieces_of_row.get(int(self.pieces.rows[query]), [query]):
            low = max(int(self.first[query]), int(self.pieces.starts[p]))
            high = min(int(self.last[query]), int(self.pieces.stops[p]))
            if low < high:
                result.append((p, low, high))
        return result

    def run(self, piece: int, low: int, high: int) -> tuple[int, int, int]:
        """Return the run (rank, start, length) of keys of a piece; see `KeyPlan.keys`."""
        position, index = self._available[piece]
        return int(self.pieces.ranks[piece]), index + low - position, high - low

    def _needed(self, destination: int, source: int) -> list[tuple[int, int, int]]:
        """Return (piece, from, to) of the source's tokens that the destination needs.

        If the destination needs two ranges of a piece, the tokens between them are sent too.
        """
        ranges: dict[int, tuple[int, int]] = {}
        for query in np.flatnonzero(self.is_cut & (self.pieces.ranks == destination)).tolist():
            for p, low, high in self.visible(query):
                if self.pieces.ranks[p] == source:
                    before = ranges.get(p, (low, high))
                    ranges[p] = min(low, before[0]), max(high, before[1])
        return [(p, *ranges[p]) for p in sorted(ranges)]


@dataclass(frozen=True, slots=True)
class KeyPlan:
    """The keys that the pieces of one rank need, and the tokens that ranks exchange for them.

    Attributes
    ----------
    sent
        Per destination rank the runs (start, length) of this rank's tokens that it needs.
    received
        Per source rank the number of tokens that this rank receives.
    keys
        Runs (rank, start, length). Joined, they are the keys of all pieces. Starts count the tokens
        of this rank, or the tokens that it receives from another rank.
    """

    sent: list[list[tuple[int, int]]]
    received: list[int]
    keys: list[tuple[int, int, int]]


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
class GroupPlan(KeyPlan):
    """The keys of all pieces of a rank, its own keys too, group by group.

    Attributes
    ----------
    groups
        The pieces: one group, unless a window makes keys after a piece visible.
    """

    groups: list[KeyGroup]


def plan_keys(
    pieces: Pieces, lengths: np.ndarray, rank: int, num_ranks: int, window: tuple[int | None, ...]
) -> GroupPlan:
    """Return the keys that the pieces of a rank need under a window.

    Parameters
    ----------
    pieces
        The pieces of all ranks.
    lengths
        (n,) int64 lengths of the whole rows.
    rank, num_ranks
        The rank, and the number of ranks.
    window
        (left, right): number of visible keys before and after a query. None is unbounded.
    """
    tables = _KeyTables(pieces, lengths, rank, num_ranks, window)
    own = tables.own
    # If all keys are visible, the alignment of queries and keys has no effect.
    is_unbounded = window[0] is None and window[1] is None
    shifts = np.zeros_like(own) if is_unbounded else (tables.last - pieces.stops)[own]
    key_lengths = (tables.last - tables.first)[own]
    groups = []
    keys: list[tuple[int, int, int]] = []
    for shift in np.unique(shifts).tolist():
        members = np.flatnonzero(shifts == shift)
        for query in own[members].tolist():
            for part in tables.visible(query):
                _append_run(keys, tables.run(*part))
        groups.append(KeyGroup(shift, members, key_lengths[members]))
    groups = groups or [KeyGroup(0, own, own)]
    return GroupPlan(tables.sent, tables.received, keys, groups)


@dataclass(frozen=True, slots=True)
class RemotePlan(KeyPlan):
    """The keys of other ranks that the queries of a rank see.

    Attributes
    ----------
    is_partition
        Whether each of these keys is in one run of `keys`.
    has_rows
        True if all tokens of a row on this rank are one row in attention to its own keys. Otherwise
        each piece is a row.
    queries
        Runs (start, length) of the tokens of this rank that see keys of other ranks.
    query_lengths, key_lengths
        (pieces,) number of these queries per piece, and of the keys of other ranks that they see.
    window
        The window between these queries and the keys of other ranks.
    """

    is_partition: bool
    has_rows: bool
    queries: list[tuple[int, int]]
    query_lengths: np.ndarray
    key_lengths: np.ndarray
    window: tuple[int | None, int | None]


def plan_remote_keys(
    pieces: Pieces, lengths: np.ndarray, rank: int, num_ranks: int, window: tuple[int | None, ...]
) -> RemotePlan | None:
    """Return the keys of other ranks that the queries of a rank see; see `plan_keys`.

    None unless all queries of a piece see the same keys of other ranks, or a causal window of them.
    Under a causal mask they see all earlier pieces, without a mask all pieces of the row. Under a
    causal window no piece may be shorter than the window. Then the first queries of a piece see the
    end of the piece before it, and no other piece.
    """
    left, right = window
    if right not in (0, None) or (left is not None and right is None):
        return None
    tables = _KeyTables(pieces, lengths, rank, num_ranks, window)
    if left is not None and (pieces.lengths[tables.is_cut] < left).any():
        return None
    queries: list[tuple[int, int, int]] = []
    keys: list[tuple[int, int, int]] = []
    query_lengths, key_lengths = [], []
    for query in tables.own.tolist():
        parts = [part for part in tables.visible(query) if pieces.ranks[part[0]] != rank]
        if not parts:
            continue
        length = int(pieces.lengths[query])
        length = length if left is None else min(length, left)
        query_lengths.append(length)
        key_lengths.append(sum(high - low for _, low, high in parts))
        _append_run(queries, (rank, tables.starts[query], length))
        for part in parts:
            _append_run(keys, tables.run(*part))
    return RemotePlan(
        tables.sent,
        tables.received,
        keys,
        _is_partition(keys, tables.received),
        left is None,
        [(start, length) for _, start, length in queries],
        np.asarray(query_lengths, np.int64),
        np.asarray(key_lengths, np.int64),
        (None, None) if left is None else (0, None),
    )


def _is_partition(keys: list[tuple[int, int, int]], received: list[int]) -> bool:
    """Return whether each received token is in one run of the keys."""
    ends = [0] * len(received)
    for source, start, length in sorted(keys):
        if start != ends[source]:
            return False
        ends[source] += length
    return ends == received


def _append_run(runs: list[tuple[int, int, int]], run: tuple[int, int, int]) -> None:
    """Append a run (source, start, length), or extend the last run if the new one continues it."""
    if runs:
        rank, start, length = runs[-1]
        if rank == run[0] and start + length == run[1]:
            runs[-1] = rank, start, length + run[2]
            return
    runs.append(run)
