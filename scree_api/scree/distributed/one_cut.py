"""Divide rows over two ranks for causal attention, with one cut; NumPy only."""

from __future__ import annotations

import numpy as np

from .exchange import REMOTE_LOSS

#: Parts of equal length between whose ends the longest row may be cut.
NUM_PARTS = 64
#: Number of cuts for which ranks exchange rows, of the longest rows that they exchange, and bound of the
#: number of exchanges.
MAX_CUTS, MAX_ROWS, MAX_EXCHANGES = 4, 64, 16


def cut_longest_row(
    lengths: np.ndarray, cost: tuple[float, float]
) -> tuple[int, np.ndarray, float]:
    """Return how to cut the longest row once, so that two ranks take equal times.

    The first rank has the start of the row. Its queries see no keys of the second rank, so keys and their
    gradients move in one direction each. The ranks wait for each other in each layer, forward and
    backward, and attention takes another part of each pass. So the other rows balance tokens and attention,
    not only the sum of their costs.

    Parameters
    ----------
    lengths
        (n,) int64 lengths of the rows, none of them 0.
    cost
        Two numbers (a, b). A row of L tokens costs ``a * L + b * L**2``.

    Returns
    -------
    cut
        Length of the start of the longest row.
    ranks
        (n,) rank of each row; of the longest row the rank of its end, 1.
    highest
        The highest cost, see `slowest_cost`; infinite if no row has two tokens.
    """
    order = np.argsort(-lengths, kind="stable")
    length, others = float(lengths[order[0]]), lengths[order[1:]].astype(np.float64)
    cuts = np.unique(np.round(length * np.arange(1, NUM_PARTS) / NUM_PARTS))
    cuts = cuts[(cuts > 0) & (cuts < length)]
    # (ranks, cuts)
    tokens = np.stack([cuts, length - cuts])
    pairs = np.stack([cuts**2, length**2 - cuts**2])
    pairs[1] += 2 * REMOTE_LOSS * cuts * (length - cuts)
    ranks = np.zeros((others.size, cuts.size), np.int64)
    column = np.arange(cuts.size)
    # Longer rows first; each row goes to the rank for which the highest cost is then lower.
    for row, other in enumerate(others.tolist()):
        first, second = (
            slowest_cost(tokens + added, pairs + other * added, cost)
            for added in (np.asarray([[other], [0.0]]), np.asarray([[0.0], [other]]))
        )
        ranks[row] = second < first
        tokens[ranks[row], column] += other
        pairs[ranks[row], column] += other**2
    best_cost, best_cut, best_ranks = np.inf, 0, np.zeros(others.size, np.int64)
    for i in np.argsort(slowest_cost(tokens, pairs, cost), kind="stable")[:MAX_CUTS].tolist():
        highest = _exchange_rows(others, ranks[:, i], tokens[:, i], pairs[:, i], cost)
        if highest < best_cost:
            best_cost, best_cut, best_ranks = highest, int(cuts[i]), ranks[:, i]
    rank_of_row = np.ones(lengths.size, np.int64)
    rank_of_row[order[1:]] = best_ranks
    return best_cut, rank_of_row, best_cost


def slowest_cost(tokens: np.ndarray, pairs: np.ndarray, cost: tuple[float, float]) -> np.ndarray:
    """Return the highest cost of a rank for its tokens, plus the highest for its attention.

    The first axis of `tokens` and `pairs` is the ranks. `pairs` counts the L**2 of a row of L tokens.
    """
    highest: np.ndarray = cost[0] * tokens.max(0) + cost[1] * pairs.max(0)
    return highest


def _exchange_rows(
    lengths: np.ndarray,
    ranks: np.ndarray,
    tokens: np.ndarray,
    pairs: np.ndarray,
    cost: tuple[float, float],
) -> float:
    """Move rows to the other rank, or exchange two, while that lowers the highest cost; return it.

    Lengths are in descending order. `ranks` changes.
    """
    tokens, pairs = tokens.copy(), pairs.copy()
    highest, signs = float(slowest_cost(tokens, pairs, cost)), np.asarray([-1.0, 1.0])
    for _ in range(MAX_EXCHANGES):
        first_rows, second_rows = (np.flatnonzero(ranks[:MAX_ROWS] == rank) for rank in range(2))
        # The last of each is no row.
        from_first, from_second = (
            np.append(lengths[rows], 0.0) for rows in (first_rows, second_rows)
        )
        moved = from_first[:, None] - from_second
        moved_pairs = from_first[:, None] ** 2 - from_second**2
        costs = slowest_cost(
            tokens[:, None, None] + signs[:, None, None] * moved,
            pairs[:, None, None] + signs[:, None, None] * moved_pairs,
            cost,
        )
        i, j = np.unravel_index(np.argmin(costs), costs.shape)
        if costs[i, j] >= highest * (1 - 1e-9):
            break
        highest = float(costs[i, j])
        tokens += signs * moved[i, j]
        pairs += signs * moved_pairs[i, j]
        ranks[first_rows[i : i + 1]] = 1
        ranks[second_rows[j : j + 1]] = 0
    return highest
