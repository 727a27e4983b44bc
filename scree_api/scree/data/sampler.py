"""Sampling of batches by token count, with equal costs on all ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..checks import check_flag, check_integer, read_integers
from .batches import read_lengths, split_balanced

#: Ranks whose costs are this close to their mean stay as they are.
TOLERANCE = 1.002

#: Exchanges of rows between two ranks, at most, per rank and window.
MAX_EXCHANGES = 8

#: Rows of the slowest rank that one exchange compares with all rows of the fastest rank.
MAX_CANDIDATES = 32


class TokenBudgetSampler:
    """Sampler of batches with a bounded number of tokens, a ``batch_sampler`` of a DataLoader.

    Parameters
    ----------
    lengths
        (n,) number of tokens per row; or a ragged array, for the lengths of its rows.
    budget
        Maximum number of tokens per batch.
    shuffle
        Whether each epoch has a new order of the rows.
    seed
        Seed of the shuffle, combined with the epoch; must be equal on all ranks.
    rank
        Index of this process.
    num_ranks
        Number of processes. All ranks get the same number of batches of nearly equal cost. Each row
        is in one batch of one rank per epoch; rows repeat only if they cannot be divided evenly,
        because there are fewer rows than ranks or each batch has one row.
    drop_last
        Whether to drop the last batch if it does not fill the budget, and then the batches that
        cannot be distributed evenly over the ranks.
    cost
        Two numbers (a, b) >= 0. A row of L tokens costs ``a * L + b * L**2``; see `fit_cost`.
    window
        Number of consecutive batches per rank whose costs are added before ranks are compared:
        the batches of one optimizer step with gradient accumulation. The last window of an epoch
        may be shorter, equally on all ranks. With b > 0 and ``window=1`` a batch with one long row
        costs more than any batch of short rows; at least 4 batches equalize this.

    Attributes
    ----------
    epoch
        Number of the epoch; increases by one when an epoch ends.

    Raises
    ------
    ValueError
        If a row is longer than the budget; see `truncate` and `chunk`. If `cost` is not two finite
        numbers >= 0, one of them positive.

    Notes
    -----
    The order of the rows in an epoch does not depend on the number of ranks. Rows move only between
    the batches of one window, so R ranks with ``window=W`` have the rows of one rank with
    ``window=R * W`` in each optimizer step. Only the end of an epoch differs: the last batches are
    divided until all ranks have one, and a batch before the last window only if it has too few rows.
    A state that was saved with some number of ranks continues the epoch on another number, also
    from the middle of a window.

    `state_dict` counts the batches that the sampler returned. A DataLoader with workers requests
    batches ahead of time, so this count is too high there. A loader that saves the state of its
    sampler itself, such as torchdata's `StatefulDataLoader`, saves the right count.

    Examples
    --------
    >>> from scree.data import TokenBudgetSampler
    >>> list(TokenBudgetSampler([4, 3, 2, 5, 1, 1], budget=8, shuffle=False))
    [[0, 1], [2, 3, 4], [5]]

    Two ranks, balanced over two batches each:

    >>> lengths = [8, 2, 2, 2, 2, 4, 4, 8]
    >>> for rank in range(2):
    ...     sampler = TokenBudgetSampler(
    ...         lengths, 8, shuffle=False, rank=rank, num_ranks=2, cost=(1, 1), window=2
    ...     )
    ...     print(list(sampler))
    [[0], [6, 1, 2]]
    [[7], [3, 4, 5]]
    """

    def __init__(
        self,
        lengths: Any,
        budget: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        rank: int = 0,
        num_ranks: int = 1,
        drop_last: bool = False,
        cost: tuple[float, float] = (1, 0),
        window: int = 1,
    ) -> None:
        self.lengths = read_lengths(lengths)
        self.budget = check_integer("budget", budget, 1)
        self.num_ranks = check_integer("num_ranks", num_ranks, 1)
        self.rank = check_integer("rank", rank, 0, num_ranks)
        self.seed = check_integer("seed", seed, 0)
        self.shuffle = check_flag("shuffle", shuffle)
        self.drop_last = check_flag("drop_last", drop_last)
        self.cost = _check_cost(cost)
        self.window = check_integer("window", window, 1)
        self.epoch = self.position = 0
        # The divisions of this epoch that earlier samplers used: (ranks, window, a, b, batches).
        self._history: list[list[Any]] = []
        self._cached_division: tuple[int, _Division] | None = None  # (epoch, division)
        if self.lengths.size and self.lengths.max() > budget:
            i = int(self.lengths.argmax())
            raise ValueError(
                f"lengths: expected at most {budget}, the budget, got {self.lengths[i]} at {i}; "
                "cut or chunk that row"
            )

    def __len__(self) -> int:
        return self._start() + len(self._division())

    def __iter__(self) -> Iterator[list[int]]:
        division, start = self._division(), self._start()
        while self.position < start + len(division):
            window, step = divmod(self.position - start, self.window)
            for batch in division.window(window)[self.rank][step:]:
                self.position += 1
                yield batch.tolist()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Move to the first batch of an epoch.

        Parameters
        ----------
        epoch
            Number of the epoch, at least 0.

        Examples
        --------
        >>> from scree.data import TokenBudgetSampler
        >>> sampler = TokenBudgetSampler([4, 3, 2], budget=8)
        >>> sampler.set_epoch(5)
        >>> sampler.epoch
        5
        """
        self.epoch, self.position = check_integer("epoch", epoch, 0), 0
        self._history, self._cached_division = [], None

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, the position in it and the settings; equal on all ranks.

        Returns
        -------
        dict
            Numbers, and a list of lists of numbers, by name, for `load_state_dict`.

        Examples
        --------
        >>> from scree.data import TokenBudgetSampler
        >>> sampler = TokenBudgetSampler([4, 3, 2], budget=7)
        >>> _ = next(iter(sampler))
        >>> sampler.state_dict()["position"]
        1
        """
        count = self.position - self._start()
        current = [self.num_ranks, self.window, *self.cost, count]
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            "history": [*map(list, self._history), current],
            **self._settings(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state that `state_dict` returned.

        The state may come from a sampler with another number of ranks, window or cost. The rest of
        the epoch is divided anew.

        Parameters
        ----------
        state
            Result of `state_dict`, on any rank.

        Raises
        ------
        ValueError
            If the state belongs to other rows or settings, whose batches would differ.

        Examples
        --------
        >>> from scree.data import TokenBudgetSampler
        >>> sampler, resumed = (TokenBudgetSampler([4, 3, 2], 7, shuffle=False) for _ in range(2))
        >>> _ = next(iter(sampler))
        >>> resumed.load_state_dict(sampler.state_dict())
        >>> list(resumed)
        [[2]]
        """
        for name, expected in self._settings().items():
            if state.get(name) != expected:
                raise ValueError(
                    f"state: expected {name} {expected}, got {state.get(name)}; "
                    "the batches would differ"
                )
        self.set_epoch(state["epoch"])
        self.position, self.seed = state["position"], state["seed"]
        history = [list(division) for division in state["history"]]
        if history[-1][:-1] == [self.num_ranks, self.window, *self.cost]:
            history.pop()  # this sampler continues the same division
        self._history = [division for division in history if division[-1]]

    def _settings(self) -> dict[str, int]:
        return {
            "rows": self.lengths.size,
            "tokens": int(self.lengths.sum()),
            "budget": self.budget,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def _start(self) -> int:
        """Return the number of batches of this epoch that earlier divisions returned per rank."""
        return sum(division[-1] for division in self._history)

    def _division(self) -> _Division:
        """Return the division of the rest of this epoch over the ranks."""
        if self._cached_division is None or self._cached_division[0] != self.epoch:
            batches = self._make_batches()
            for num_ranks, window, a, b, count in self._history:
                division = self._divide(batches, num_ranks, window, (a, b))
                batches = division.remaining(batches, count)
            division = self._divide(batches, self.num_ranks, self.window, self.cost)
            self._cached_division = self.epoch, division
        return self._cached_division[1]

    def _divide(
        self, batches: list[np.ndarray], num_ranks: int, window: int, cost: tuple[float, float]
    ) -> _Division:
        return _Division(
            self.lengths, batches, self.budget, num_ranks, window, cost, self.drop_last
        )

    def _make_batches(self) -> list[np.ndarray]:
        """Return the batches of an epoch, which do not depend on the number of ranks."""
        order = np.arange(self.lengths.size)
        if self.shuffle:
            np.random.default_rng([self.seed, self.epoch]).shuffle(order)
        token_ends, start, batches = np.cumsum(self.lengths[order]), 0, []
        while start < order.size:
            num_tokens = int(token_ends[start - 1]) if start else 0
            end = int(np.searchsorted(token_ends, num_tokens + self.budget, side="right"))
            batches.append(order[start:end])
            start = end
        if self.drop_last and batches and self.lengths[batches[-1]].sum() < self.budget:
            batches.pop()
        return batches


class _Division:
    """The division of a list of batches over ranks, window by window.

    Attributes
    ----------
    batches
        Batches of all ranks; their number is a multiple of `num_ranks`.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        batches: list[np.ndarray],
        budget: int,
        num_ranks: int,
        window: int,
        cost: tuple[float, float],
        drop_last: bool,
    ) -> None:
        self.lengths, self.budget, self.cost = lengths, budget, cost
        self.num_ranks, self.window_size = num_ranks, window
        self.batches = list(batches)
        if drop_last:
            del self.batches[len(batches) // num_ranks * num_ranks :]
        while len(self.batches) % num_ranks:
            self._split_largest()

    def __len__(self) -> int:
        """Return the number of batches per rank."""
        return len(self.batches) // self.num_ranks

    def window(self, index: int) -> list[list[np.ndarray]]:
        """Return the batches of one window, per rank."""
        size = self.window_size * self.num_ranks
        batches = self.batches[index * size : (index + 1) * size]
        ranks = self._assign(batches)
        totals = np.asarray([self._cost_of_rank(rank) for rank in ranks])
        for _ in range(MAX_EXCHANGES * self.num_ranks):
            slow, fast = int(totals.argmax()), int(totals.argmin())
            if totals[slow] <= TOLERANCE * totals.mean():
                break
            if not self._exchange_rows(ranks[slow], ranks[fast]):
                break
            totals[slow], totals[fast] = map(self._cost_of_rank, (ranks[slow], ranks[fast]))
        for rank in ranks:  # the heaviest batches of all ranks run at the same time
            rank.sort(key=lambda batch: -self._costs(batch).sum())
        # Each rank is the slowest in one of `num_ranks` windows.
        ranks.sort(key=lambda rank: -self._cost_of_rank(rank))
        shift = index % self.num_ranks
        return ranks[shift:] + ranks[:shift]

    def remaining(self, batches: list[np.ndarray], count: int) -> list[np.ndarray]:
        """Return the batches that are left after `count` batches per rank.

        `batches` are the batches before the division, whose end `drop_last` may have cut off.
        """
        index, steps = divmod(count, self.window_size)
        end = (index + bool(steps)) * self.window_size * self.num_ranks
        rest = self.batches[end:]
        if len(batches) > len(self.batches):  # some were dropped, which other divisions may keep
            rest += batches[len(self.batches) :]
        if not steps:
            returned, left = [], rest
        else:
            ranks = self.window(index)
            returned = list(itertools.chain(*(rank[:steps] for rank in ranks)))
            left = [batch for rank in ranks for batch in rank[steps:]] + rest
        # Rows that were repeated to fill the last batches are not repeated again.
        seen = set(np.concatenate([np.zeros(0, int), *returned]).tolist())
        kept = []
        for batch in left:
            if not seen.isdisjoint(batch.tolist()):
                batch = batch[[row not in seen for row in batch.tolist()]]
            seen.update(batch.tolist())
            if batch.size:
                kept.append(batch)
        return kept

    def _costs(self, rows: np.ndarray) -> np.ndarray:
        lengths, (a, b) = self.lengths[rows].astype(np.float64), self.cost
        return np.asarray(a * lengths + b * lengths**2)

    def _cost_of_rank(self, batches: list[np.ndarray]) -> float:
        return float(self._costs(np.concatenate(batches)).sum())

    def _split_largest(self) -> None:
        """Divide the largest batch of the last window and append one half.

        If the batches of the last window have one row each, the largest batch of all is divided. If
        all batches have one row, the largest is repeated.
        """
        batches, size = self.batches, self.window_size * self.num_ranks
        last_window = len(batches) // size * size
        candidates = [i for i in range(last_window, len(batches)) if batches[i].size > 1]
        candidates = candidates or [i for i, batch in enumerate(batches) if batch.size > 1]
        i = max(
            candidates or range(len(batches)), key=lambda i: int(self.lengths[batches[i]].sum())
        )
        batch = batches[i]
        if batch.size > 1:
            first, second = split_balanced(self.lengths[batch], 2)
            batches[i] = batch[first]
            batches.append(batch[second])
        else:
            batches.append(batch)

    def _assign(self, batches: list[np.ndarray]) -> list[list[np.ndarray]]:
        """Return the batches per rank.

        Of every `num_ranks` batches by falling cost, the first goes to the rank with the lowest
        cost so far.
        """
        costs = np.asarray([self._costs(batch).sum() for batch in batches])
        totals = np.zeros(self.num_ranks)
        ranks: list[list[np.ndarray]] = [[] for _ in range(self.num_ranks)]
        for group in np.argsort(-costs, kind="stable").reshape(-1, self.num_ranks):
            for rank, i in zip(np.argsort(totals, kind="stable"), group, strict=True):
                ranks[rank].append(batches[i])
                totals[rank] += costs[i]
        return ranks

    def _exchange_rows(self, slow: list[np.ndarray], fast: list[np.ndarray]) -> bool:
        """Exchange a row of the slowest rank for some rows of the fastest; return if this helped.

        The rows of the fastest rank are neighbours in one batch and have nearly as many tokens as
        the row, so both batches stay within the budget. With b > 0 they cost less than the row.
        """
        gap = self._cost_of_rank(slow) - self._cost_of_rank(fast)
        slow_sizes, fast_sizes = ([batch.size for batch in rank] for rank in (slow, fast))
        slow_room, fast_room = (
            np.asarray([self.budget - self.lengths[batch].sum() for batch in rank])
            for rank in (slow, fast)
        )
        slow_rows, fast_rows = np.concatenate(slow), np.concatenate(fast)
        batch_of_slow = np.repeat(np.arange(len(slow)), slow_sizes)
        batch_of_fast = np.repeat(np.arange(len(fast)), fast_sizes)
        # The rows whose quadratic costs are nearest to the half of the difference.
        squares = self.cost[1] * self.lengths[slow_rows].astype(np.float64) ** 2
        candidates = np.argsort(np.abs(squares - gap / 2), kind="stable")[:MAX_CANDIDATES]
        lengths, costs = (
            f[:, None]
            for f in (self.lengths[slow_rows[candidates]], self._costs(slow_rows[candidates]))
        )
        is_single = (np.asarray(slow_sizes)[batch_of_slow[candidates]] == 1)[:, None]
        starts = np.arange(fast_rows.size)
        batch_ends = np.cumsum(fast_sizes)[batch_of_fast]
        token_ends = np.append(0, np.cumsum(self.lengths[fast_rows]))
        cost_ends = np.append(0.0, np.cumsum(self._costs(fast_rows)))
        best: tuple[float, int, int, int] = (math.inf, 0, 0, 0)  # error, candidate, start, end
        for added in (lengths + slow_room[batch_of_slow[candidates]][:, None], lengths):
            ends = np.searchsorted(token_ends, token_ends[starts] + added, side="right") - 1
            ends = np.minimum(ends, batch_ends)
            fits = lengths - (token_ends[ends] - token_ends[starts]) <= fast_room[batch_of_fast]
            fits &= (ends > starts) | ~is_single
            error = np.abs(gap - 2 * (costs - (cost_ends[ends] - cost_ends[starts])))
            error[~fits] = math.inf
            i, start = divmod(int(error.argmin()), starts.size)
            best = min(best, (float(error[i, start]), i, start, int(ends[i, start])))
        smallest_error, i, start, end = best
        if not smallest_error < (1 - 1e-3) * gap:
            return False
        row = candidates[i]
        x, y = batch_of_slow[row], batch_of_fast[start]
        y_start = batch_ends[start] - fast_sizes[y]
        moved = fast_rows[start:end]
        slow[x] = np.append(slow[x][slow[x] != slow_rows[row]], moved)
        fast[y] = np.concatenate(
            [fast[y][: start - y_start], fast[y][end - y_start :], slow_rows[row : row + 1]]
        )
        return True


def fit_cost(lengths: Sequence[Any], seconds: Any) -> tuple[float, float]:
    """Fit the cost of a row, ``a * L + b * L**2``, to measured times of batches.

    The fit is a least-squares fit of ``c + sum(a * L + b * L**2)`` with a, b, c >= 0. The time c
    of a batch without tokens is not returned, because all ranks have equal numbers of batches.

    Parameters
    ----------
    lengths
        For each measured batch the (n,) lengths of its rows, or the ragged batch itself.
    seconds
        (m,) time of each batch, such as the median of a few steps forward and backward. The
        batches should differ: some of short rows, some of long ones, some smaller than others.

    Returns
    -------
    tuple
        a and b, for `TokenBudgetSampler(cost=)`.

    Raises
    ------
    ValueError
        If there are fewer than three batches, or not one finite time >= 0 for each; or if the
        times do not grow with the lengths, so that a and b are 0.

    Examples
    --------
    >>> import scree.data
    >>> lengths = [[1000] * 8, [8000], [4000, 4000], [2000]]
    >>> seconds = [0.1 + sum(1e-5 * n + 1e-9 * n**2 for n in batch) for batch in lengths]
    >>> a, b = scree.data.fit_cost(lengths, seconds)
    >>> f"{a:.3g} {b:.3g}"
    '1e-05 1e-09'
    """
    batches = [read_lengths(batch).astype(np.float64) for batch in lengths]
    times = read_integers("seconds", seconds).astype(np.float64)
    if len(batches) < 3:
        raise ValueError(
            f"lengths: expected at least 3 batches, got {len(batches)}; "
            "measure batches of short rows, of long rows and of fewer tokens"
        )
    if times.shape != (len(batches),) or not (np.isfinite(times) & (times >= 0)).all():
        raise ValueError(
            f"seconds: expected {len(batches)} finite numbers >= 0, one per batch, got {seconds!r:.80}"
        )
    columns = np.asarray([[n.sum(), (n**2).sum(), 1] for n in batches])
    scale = np.maximum(columns.max(axis=0), 1)
    # The solution of the best subset of columns whose solution has no negative number.
    best, coefficients = math.inf, np.zeros(3)
    for used in itertools.product([False, True], repeat=3):
        solution = np.zeros(3)
        if any(used):
            solution[list(used)] = np.linalg.lstsq((columns / scale)[:, used], times)[0]
        error = float(((columns / scale @ solution - times) ** 2).sum())
        if (solution >= 0).all() and error < best:
            best, coefficients = error, solution
    a, b, _ = (coefficients / scale).tolist()
    if a == b == 0:
        raise ValueError(
            "seconds: expected times that grow with the lengths, got none that do; "
            "measure batches whose numbers of tokens and lengths differ more"
        )
    return a, b


def _check_cost(cost: Any) -> tuple[float, float]:
    """Return the cost as two numbers."""
    try:
        a, b = map(float, cost)
    # The check below reports all that is no pair of numbers.
    except (TypeError, ValueError):
        a = b = math.nan
    if not (math.isfinite(a) and math.isfinite(b) and min(a, b) >= 0 and max(a, b) > 0):
        raise ValueError(
            f"cost: expected two finite numbers (a, b) >= 0, not both 0, got {cost!r:.80}"
        )
    return a, b
