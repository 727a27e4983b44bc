"""Batches: from samples to ragged arrays, by token count, over ranks, in windows, and of several modalities."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..array import Array
from ..backends import backend, is_array
from ..bridges.dlpack import backend_of, convert, to_backend
from ..bridges.lists import from_lists
from ..broadcasting import check_ragged
from ..checks import check_flag, check_integer, read_integers
from ..construct import pack
from ..indexing.getitem import select
from ..layout import Layout


def collate(samples: Sequence[Any], library: Any = None) -> Any:
    """The samples of a batch as ragged arrays; ``collate_fn`` of a DataLoader.

    Parameters
    ----------
    samples
        Arrays or lists of numbers whose first axes differ; or mappings of names to such, the same names in each. A number
        instead of an array makes a dense array, one entry a sample.
    library
        The library of the result; by default that of the samples, and NumPy for lists and numbers.

    Returns
    -------
    Array or dict
        A ragged array, or one for each name. Fields of equal lengths are on one layout.

    Raises
    ------
    ValueError
        If there are no samples, or their names differ.
    TypeError
        If a field is not arrays or numbers of one dtype; nothing is promoted.

    Examples
    --------
    >>> import scree.data
    >>> batch = scree.data.collate([{"ids": [5, 6, 7], "label": 1}, {"ids": [8], "label": 0}])
    >>> batch["ids"].lengths, batch["label"]
    (array([3, 1], dtype=int32), array([1, 0]))
    """
    if not hasattr(samples, "__len__"):
        raise TypeError(f"samples: expected a list of samples, got {type(samples).__name__}")
    if not len(samples):
        raise ValueError("samples: expected at least one, got none")
    if not isinstance(samples[0], Mapping):
        return _field("samples", samples, library)
    names = set(samples[0])
    for i, sample in enumerate(samples):
        if set(sample) != names:
            raise ValueError(
                f"samples[{i}]: expected the names {sorted(names)}, got {sorted(sample)}"
            )
    batch: dict[str, Any] = {}
    layouts: dict[tuple[Any, ...], Array] = {}
    for name in samples[0]:
        found = _field(name, [sample[name] for sample in samples], library)
        if isinstance(found, Array):
            lib, lengths = found.layout.backend, found.layout.read()
            like = layouts.setdefault((lib.name, str(found.device), lengths.tobytes()), found)
            found = like.with_values(found.values)
        batch[name] = found
    return batch


def _field(name: str, parts: Sequence[Any], library: Any) -> Any:
    numbers = all(isinstance(x, bool | int | float | np.generic) for x in parts)
    if numbers or all(is_array(x) and x.ndim == 0 for x in parts):
        dense = np.asarray(parts) if numbers else backend(parts[0]).xp.stack(list(parts))
        return dense if library is None else convert(dense, backend_of(library))
    try:
        found = pack(parts) if is_array(parts[0]) else from_lists(parts)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name}: {error}") from error
    return found if library is None else to_backend(found, library)


class TokenBudgetSampler:
    """Batches of rows with at most so many tokens; ``batch_sampler`` of a DataLoader.

    Parameters
    ----------
    lengths
        (n,) tokens of each row; a ragged array stands for its lengths.
    budget
        The most tokens of a batch.
    shuffle
        Whether the rows come in another order in every epoch.
    seed
        What the orders follow from, with the number of the epoch; the same on every rank.
    rank, num_ranks
        Which of how many processes this is. All make the same number of batches, of nearly equal tokens, and every row comes
        once in an epoch, in one of them; rows come again only where there are fewer rows than ranks.
    drop_last
        Leave out the last batch of all, unless it fills the budget, and those beyond as many for each rank.

    Attributes
    ----------
    epoch
        Counted up when an epoch ends.

    Raises
    ------
    ValueError
        If a row is longer than the budget; see `truncate` and `chunk`.

    Notes
    -----
    `state_dict` counts the batches that were handed out. A DataLoader with workers asks for some ahead; one that keeps the
    state of its sampler itself, as that of torchdata, saves the right one.

    Examples
    --------
    >>> from scree.data import TokenBudgetSampler
    >>> list(TokenBudgetSampler([4, 3, 2, 5, 1, 1], budget=8, shuffle=False))
    [[0, 1], [2, 3, 4], [5]]
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
    ) -> None:
        self.lengths = _lengths(lengths)
        self.budget = check_integer("budget", budget, 1)
        self.num_ranks = check_integer("num_ranks", num_ranks, 1)
        self.rank = check_integer("rank", rank, 0, num_ranks)
        self.seed = check_integer("seed", seed, 0)
        self.shuffle, self.drop_last = (
            check_flag("shuffle", shuffle),
            check_flag("drop_last", drop_last),
        )
        self.epoch = self.position = 0
        self._plans: tuple[int, list[np.ndarray]] | None = None
        if self.lengths.size and self.lengths.max() > budget:
            i = int(self.lengths.argmax())
            raise ValueError(
                f"lengths: expected at most {budget}, the budget, got {self.lengths[i]} at {i}; cut or chunk that row"
            )

    def __len__(self) -> int:
        return len(self._plan())

    def __iter__(self) -> Iterator[list[int]]:
        plan = self._plan()
        while self.position < len(plan):
            self.position += 1
            yield plan[self.position - 1].tolist()
        self.set_epoch(self.epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch."""
        self.epoch, self.position = check_integer("epoch", epoch, 0), 0

    def state_dict(self) -> dict[str, int]:
        """Where in which epoch the sampler is, the same on every rank; and what the batches follow from."""
        return {
            "epoch": self.epoch,
            "position": self.position,
            "seed": self.seed,
            **self._settings(),
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from where `state_dict` was taken; raises `ValueError` if rows or settings are others."""
        for name, own in self._settings().items():
            if state.get(name) != own:
                raise ValueError(
                    f"state: expected one of {name} {own}, got {state.get(name)}; the batches would be others"
                )
        self.epoch, self.position, self.seed = state["epoch"], state["position"], state["seed"]
        self._plans = None

    def _settings(self) -> dict[str, int]:
        rows = {"rows": self.lengths.size, "tokens": int(self.lengths.sum()), "budget": self.budget}
        return {
            **rows,
            "num_ranks": self.num_ranks,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
        }

    def _plan(self) -> list[np.ndarray]:
        """The batches of this rank in this epoch."""
        if self._plans is None or self._plans[0] != self.epoch:
            self._plans = self.epoch, self._deal(self._cut())
        return self._plans[1]

    def _cut(self) -> list[np.ndarray]:
        """The batches of all ranks, as many of each."""
        order = np.arange(self.lengths.size)
        if self.shuffle:
            np.random.default_rng([self.seed, self.epoch]).shuffle(order)
        ends, first, batches = np.cumsum(self.lengths[order]), 0, []
        while first < order.size:
            before = int(ends[first - 1]) if first else 0
            last = int(np.searchsorted(ends, before + self.budget, side="right"))
            batches.append(order[first:last])
            first = last
        if self.drop_last:
            if batches and self.lengths[batches[-1]].sum() < self.budget:
                batches.pop()
            return batches[: len(batches) // self.num_ranks * self.num_ranks]
        while len(batches) % self.num_ranks:  # a batch more, of half the rows of the largest
            i = max(
                range(len(batches)),
                key=lambda i: (batches[i].size > 1, self.lengths[batches[i]].sum()),
            )
            batch = batches[i]
            halves = (
                split_balanced(self.lengths[batch], 2)
                if batch.size > 1
                else [np.zeros(1, np.int64)] * 2
            )
            batches[i : i + 1] = [batch[half] for half in halves]
        return batches

    def _deal(self, batches: list[np.ndarray]) -> list[np.ndarray]:
        """The batches of this rank: of every `num_ranks` the largest goes to the rank with the fewest tokens so far."""
        total, mine = np.zeros(self.num_ranks, np.int64), []
        for i in range(0, len(batches), self.num_ranks):
            tokens = np.asarray(
                [self.lengths[batch].sum() for batch in batches[i : i + self.num_ranks]]
            )
            ranks, order = np.argsort(total, kind="stable"), np.argsort(-tokens, kind="stable")
            total[ranks] += tokens[order]
            mine.append(batches[i + int(order[np.flatnonzero(ranks == self.rank)[0]])])
        return mine


def split_balanced(arr: Any, k: int, cost: Any = "tokens") -> list[np.ndarray]:
    """Divide rows into k parts of nearly equal cost.

    Parameters
    ----------
    arr
        Ragged array, whose offsets are read; or (n,) lengths.
    k
        Number of parts.
    cost
        "tokens": the length of a row. "attention": its square. Or (n,) costs of your own, such as ``6 * h * n + n * n``.

    Returns
    -------
    list
        k arrays of row numbers, rising, which together hold every row once: ``[arr[rows] for rows in split_balanced(arr, k)]``.
        Parts are empty only where there are fewer rows than parts.

    Notes
    -----
    The differencing method of Karmarkar and Karp (1982) for k parts: the two most uneven partial divisions are joined, the
    heavy parts of the one with the light parts of the other, until there is one.

    Raises
    ------
    ValueError
        If there is not one finite cost >= 0 for each row, or `k` is less than 1.

    Examples
    --------
    >>> import scree.data
    >>> scree.data.split_balanced([8, 1, 4, 3], 2)
    [array([1, 2, 3]), array([0])]
    """
    lengths, k = _lengths(arr), check_integer("k", k, 1)
    if isinstance(cost, str):
        if cost not in ("tokens", "attention"):
            raise ValueError(
                f"cost: expected 'tokens', 'attention' or one number a row, got {cost!r}"
            )
        costs = lengths if cost == "tokens" else lengths.astype(np.float64) ** 2
    else:
        costs = read_integers("cost", cost)
        if costs.shape != lengths.shape or costs.dtype.kind not in "iuf":
            raise ValueError(
                f"cost: expected {lengths.size} numbers, one a row, got {costs.dtype} of shape {costs.shape}"
            )
        wrong = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
        if wrong.size:
            raise ValueError(
                f"cost: expected finite numbers >= 0, got {costs[wrong[0]]} for row {wrong[0]}"
            )
    part = np.zeros(lengths.size, np.int64)
    for number, rows in enumerate(_differences(costs.tolist(), k)):
        part[rows] = number
    return _no_empty_part([np.flatnonzero(part == number) for number in range(k)])


def _differences(costs: list[float], k: int) -> list[list[int]]:
    """Rows of each part. A partial division is its k loads, falling, less the lightest, each with a tree of its rows."""
    nothing: list[tuple[float, Any]] = [(0, None)] * (k - 1)
    heap = [(-c, i, [(c, i), *nothing]) for i, c in enumerate(costs)]
    heapq.heapify(heap)
    count = len(heap)
    while len(heap) > 1:
        (_, _, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [
            (x + y, s if t is None else t if s is None else (s, t))
            for (x, s), (y, t) in zip(a, reversed(b), strict=True)
        ]
        joined.sort(key=lambda part: -part[0])
        lightest, count = joined[-1][0], count + 1
        heapq.heappush(
            heap, (lightest - joined[0][0], count, [(x - lightest, t) for x, t in joined])
        )
    return [_leaves(tree) for _, tree in heap[0][2]] if heap else []


def _leaves(tree: Any) -> list[int]:
    rows, stack = [], [tree]
    while stack:
        node = stack.pop()
        if isinstance(node, tuple):
            stack.extend(node)
        elif node is not None:
            rows.append(node)
    return rows


def _no_empty_part(parts: list[np.ndarray]) -> list[np.ndarray]:
    """Rows without cost may all be in one part: give one of them to each part that is empty."""
    for i, part in enumerate(parts):
        fullest = max(range(len(parts)), key=lambda j: parts[j].size)
        if not part.size and parts[fullest].size > 1:
            parts[i], parts[fullest] = parts[fullest][-1:], parts[fullest][:-1]
    return parts


def truncate(arr: Array, length: int, *, side: str = "right") -> Array:
    """At most `length` tokens of each row.

    Parameters
    ----------
    arr
        Ragged array; its offsets are read.
    length
        The most tokens that a row keeps.
    side
        "right" or "left": where tokens are cut off.

    Returns
    -------
    Array
        Rows of at most `length` tokens.

    Raises
    ------
    TypeError
        If `arr` is no ragged array.
    ValueError
        If `length` is negative, or the side has another name.

    Examples
    --------
    >>> import numpy as np, scree.data
    >>> scree.data.truncate(scree.from_lengths(np.arange(5), [1, 4]), 2, side="left").values
    array([0, 3, 4])
    """
    length = check_integer("length", length, 0)
    if side not in ("right", "left"):
        raise ValueError(f"side: expected 'right' or 'left', got {side!r}")
    lengths = np.diff(check_ragged("arr", arr).layout.read())
    kept = np.minimum(lengths, length)
    starts = arr.offsets[:-1]
    if side == "left":
        starts = starts + arr.layout.index_from_host(lengths - kept)
    return select(arr, Layout.from_host(arr.layout.backend, kept, like=arr.offsets), starts)


def chunk(arr: Array, size: int, *, overlap: int = 0) -> tuple[Array, Any]:
    """Each row as windows of at most `size` tokens, a row each, of which the next begins `overlap` tokens before the end.

    Parameters
    ----------
    arr
        Ragged array; its offsets are read.
    size
        Tokens of a window; the last of a row may be shorter.
    overlap
        Tokens that a window shares with the next, less than `size`.

    Returns
    -------
    windows, rows
        The windows of the first row, then of the second ...; and (windows,) the row that each is of. An empty row has none.

    Raises
    ------
    TypeError
        If `arr` is no ragged array.
    ValueError
        If `size` is less than 1, or `overlap` not less than `size`.

    Examples
    --------
    >>> import numpy as np, scree.data
    >>> windows, rows = scree.data.chunk(scree.from_lengths(np.arange(7), [5, 2]), 3, overlap=1)
    >>> scree.unpack(windows), rows
    ([array([0, 1, 2]), array([2, 3, 4]), array([5, 6])], array([0, 0, 1], dtype=int32))
    """
    size, overlap = (
        check_integer("size", size, 1),
        check_integer("overlap", overlap, 0, size, ", the size of a window"),
    )
    host = check_ragged("arr", arr).layout.read().astype(np.int64)
    lengths, step = np.diff(host), size - overlap
    counts = np.where(lengths > 0, np.maximum(-(-(lengths - overlap) // step), 1), 0)
    rows = np.repeat(np.arange(lengths.size), counts)
    first = (np.arange(rows.size) - np.repeat(np.cumsum(counts) - counts, counts)) * step
    windows = Layout.from_host(
        arr.layout.backend, np.minimum(size, lengths[rows] - first), like=arr.offsets
    )
    return select(
        arr, windows, arr.layout.index_from_host(host[rows] + first)
    ), arr.layout.index_from_host(rows)


class Interleaved(NamedTuple):
    """A batch of several modalities: three ragged arrays on one layout.

    Attributes
    ----------
    tokens
        (n, None, ...) what the segments hold, end to end.
    modality
        (n, None) int32, the modality of each token. ``modality == 1`` is the mask of one of them, and ``tokens[modality == 1]``
        its tokens, row by row.
    segment
        (n, None) int32, the number of each token's segment in its row.
    """

    tokens: Array
    modality: Array
    segment: Array


def interleave(samples: Sequence[Sequence[tuple[int, Any]]]) -> Interleaved:
    """Rows of segments, such as text and images in turn, as one ragged batch that knows what each token is.

    Parameters
    ----------
    samples
        For each row its segments in order, each a number for the modality and an array (tokens, ...); all arrays of one library,
        dtype and element shape, such as embeddings.

    Returns
    -------
    Interleaved
        The tokens, their modality and their segment, on one layout.

    Raises
    ------
    TypeError
        If a modality is no integer, or arrays are of different libraries or dtypes.
    ValueError
        If there are no segments, or element shapes differ.

    Examples
    --------
    >>> import numpy as np, scree.data
    >>> text, image = 0, 1
    >>> batch = scree.data.interleave([
    ...     [(text, np.asarray([5, 6])), (image, np.asarray([90, 91, 92])), (text, np.asarray([7]))],
    ...     [(image, np.asarray([93]))],
    ... ])
    >>> batch.tokens.lengths, batch.tokens[batch.modality == image].values
    (array([6, 1], dtype=int32), array([90, 91, 92, 93]))
    """
    if not isinstance(samples, Sequence):
        raise TypeError(f"samples: expected a list of rows, got {type(samples).__name__}")
    for i, sample in enumerate(samples):
        if not isinstance(sample, Sequence) or not all(
            isinstance(part, Sequence) and len(part) == 2 for part in sample
        ):
            raise TypeError(
                f"samples[{i}]: expected pairs of a modality and an array, got {sample!r:.80}"
            )
    kinds = np.asarray([modality for sample in samples for modality, _ in sample])
    parts = [tokens for sample in samples for _, tokens in sample]
    if not parts:
        raise ValueError("samples: expected at least one segment, got none")
    if kinds.dtype.kind not in "iu":
        raise TypeError(
            f"samples: expected a number for each segment's modality, got {kinds.dtype}"
        )
    flat = pack(parts)
    counts = np.asarray([len(sample) for sample in samples])
    lengths, ends = np.diff(flat.layout.read()), np.cumsum(counts)
    tokens_before = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    rows = np.diff(tokens_before[ends], prepend=0)
    tokens = Array.from_layout(
        flat.values, Layout.from_host(flat.layout.backend, rows, like=flat.offsets)
    )
    number = np.arange(lengths.size) - np.repeat(ends - counts, counts)
    xp, device = flat.layout.xp, flat.layout.device
    modality, segment = (
        tokens.with_values(
            flat.layout.backend.from_host(np.repeat(x, lengths).astype(np.int32), xp.int32, device)
        )
        for x in (kinds, number)
    )
    return Interleaved(tokens, modality, segment)


def _lengths(x: Any) -> np.ndarray:
    """Lengths of rows on the host, of a ragged array, an array or a list."""
    if isinstance(x, Array):
        return np.diff(x.layout.read()).astype(np.int64)
    found = read_integers("lengths", x)
    if found.ndim != 1 or found.dtype.kind not in "iu" or (found.size and found.min() < 0):
        raise ValueError(
            f"lengths: expected one axis of integers >= 0, got {found.dtype} of shape {found.shape}"
        )
    return found.astype(np.int64)
