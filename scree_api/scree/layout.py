"""The layout of a ragged array: offsets, everything derived from them, and the tiles of every row.

A `Layout` holds one offsets vector. Everything derived from it is computed at most once and shared
by all arrays of the layout. All of it is standard code on plain arrays that does not read the
values of the offsets, so it runs under a trace and never waits for a device. The few questions
whose answer is a size go to `read`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .backends import Backend, backend

LONG_ROW = 256  # rows at least this long gain little from being batched with other rows
MAX_PAIR_CACHES = 4  # other layouts for which data derived from both is kept


class Tiles(NamedTuple):
    """Every row cut into tiles of equal size; the number of tiles has a static bound.

    Attributes
    ----------
    layout
        The layout of the tiles: row i has ``ceil(lengths[i] / size)`` of them. Its total may exceed
        their number.
    rows
        (tiles,) row of each tile; some valid row for entries after the last tile.
    starts
        (tiles,) position of each tile's first token in its row.
    tokens
        (tiles, size) index into the values, always in bounds.
    valid
        (tiles, size) whether the token exists.
    """

    layout: Layout
    rows: Any
    starts: Any
    tokens: Any
    valid: Any


class Buckets(NamedTuple):
    """Rows of similar length batched together, for functions that need rectangles.

    See `Layout.buckets`.

    Attributes
    ----------
    parts
        Per bucket (tokens, mask): (rows, longest) indices into the values, the last token of a row
        repeated after its end, and a mask of the real tokens, or None where all are real.
    starts
        The first token of the first row of each bucket.
    slots
        (total,) index of each token in the buckets end to end.
    """

    parts: list[tuple[Any, Any]]
    starts: list[int]
    slots: Any


def _cached(derive: Callable[[Layout], Any]) -> Any:
    """Return a property by `Layout.cached`.

    `functools.cached_property` is a descriptor that compilers refuse.
    """
    name = derive.__name__

    return property(lambda self: self.cached(name, lambda: derive(self)), doc=derive.__doc__)


class Layout:
    """The row boundaries of a ragged array and everything derived from them.

    Parameters
    ----------
    backend
        The library of the offsets.
    offsets
        (n + 1,) integers, `[0, L0, L0 + L1, ...]`.
    total
        Number of tokens in the values, the tail included; a Python integer. None means the last
        offset, which is read on demand.
    max_length
        A bound on the longest row that is known without reading, or None.
    host
        The offsets in host memory, where the caller has them.
    has_no_tail
        Whether the caller knows that every token belongs to a row.
    """

    def __init__(
        self,
        backend: Backend,
        offsets: Any,
        total: int | None,
        max_length: int | None = None,
        host: np.ndarray | None = None,
        has_no_tail: bool = False,
    ) -> None:
        self.backend = backend
        self.xp = backend.xp
        self.offsets = offsets
        self._total = total
        self.max_length = max_length
        self.cache: dict[Any, Any] = {}
        self._host = host
        self._has_no_tail = has_no_tail

    @classmethod
    def from_host(
        cls, backend: Backend, lengths: np.ndarray, like: Any = None, device: Any = None
    ) -> Layout:
        """Return a layout from row lengths in host memory.

        Offsets as `like`, else int32 where that suffices.
        """
        host = np.zeros(len(lengths) + 1, np.int64)
        lengths.cumsum(dtype=np.int64, out=host[1:])
        dtype = index_dtype(backend.xp, int(host[-1]), like)
        device = device if like is None else backend.device(like)
        host = host if dtype == backend.xp.int64 else host.astype(np.int32)
        offsets = backend.from_host(host, dtype, device)
        longest = int(lengths.max()) if len(lengths) else 0
        return cls(backend, offsets, int(host[-1]), longest, host)

    def cached(self, key: Any, derive: Callable[[], Any], pair: Layout | None = None) -> Any:
        """Return ``derive()``, computed once per layout or pair of layouts.

        It is computed outside of any trace.
        """
        cache = self.cache if pair is None else self.pair_cache(pair)
        if key not in cache:
            with self.backend.untraced(self.offsets):
                cache[key] = derive()
        return cache[key]

    def pair_cache(self, other: Layout) -> dict[Any, Any]:
        """Return the cache of data derived from both layouts; only the last few others are kept.

        The bound matters in generation, where the same queries meet new keys at every step.
        """
        if other is self:
            return self.cache
        pairs: dict[int, tuple[Layout, dict[Any, Any]]] = self.cache.setdefault("pairs", {})
        if id(other) not in pairs:  # the entry holds `other`, so that no other layout gets its id
            while len(pairs) >= MAX_PAIR_CACHES:
                del pairs[next(iter(pairs))]
            pairs[id(other)] = other, {}
        return pairs[id(other)][1]

    @property
    def total(self) -> int:
        """Number of tokens in the values, the tail included."""
        if self._total is None:
            self._total = int(self.read()[-1])
        return self._total

    @property
    def num_rows(self) -> int:
        """Number of rows, a Python integer."""
        rows: int = self.offsets.shape[0] - 1
        return rows

    @property
    def device(self) -> Any:
        """The device for arrays that meet the offsets; None where the library chooses it."""
        return self.backend.device(self.offsets)

    @property
    def host(self) -> np.ndarray | None:
        """The offsets in host memory where reading is free, else None."""
        if self.backend.is_compiling():
            return None
        if self._host is None:
            self._host = self.backend.peek(self.offsets)
        return self._host

    def offsets_as_index(self, last: int) -> Any:
        """Return the offsets in a dtype that holds `last`."""
        return self.xp.astype(self.offsets, index_dtype(self.xp, last, self.offsets), copy=False)

    def index_from_host(self, host: np.ndarray, last: int = 0) -> Any:
        """Return indices up to `last` from host memory.

        They have the dtype and the device of the offsets.
        """
        dtype = index_dtype(self.xp, last, self.offsets)
        return self.backend.from_host(np.ascontiguousarray(host), dtype, self.device)

    def on_host(self) -> Layout:
        """Return the same layout in host memory where its offsets are known there.

        Otherwise return the layout itself.
        """
        if self.host is None or self.host is self.offsets:
            return self
        return Layout(backend(self.host), self.host, self.total, self.max_length, self.host)

    def set_host_lengths(self, lengths: np.ndarray) -> None:
        """Keep row lengths that the caller knows.

        The offsets are not read from a device later.
        """
        if self._host is None:
            zero = np.zeros(1, np.int64)
            self._host = np.concatenate([zero, np.cumsum(lengths, dtype=np.int64)])

    def read(self) -> np.ndarray:
        """Return the offsets in host memory; waits for the device where it must.

        For results of dynamic size.
        """
        if self.host is None:
            self._host = self.backend.read(self.offsets)
        assert self._host is not None
        return self._host

    @property
    def max_length_bound(self) -> int:
        """The best bound on the longest row that is known without reading.

        `max_length` may be a loose one.
        """
        longest: int = self.total if self.max_length is None else self.max_length
        if self.host is not None:
            longest = self._longest
        elif not self.backend.is_compiling():  # a compiler would specialize on the total
            longest = min(longest, self.total)
        return longest

    @_cached
    def _longest(self) -> int:
        assert self.host is not None
        return int((self.host[1:] - self.host[:-1]).max(initial=0))

    @_cached
    def lengths(self) -> Any:
        """(n,) tokens of each row."""
        return self.offsets[1:] - self.offsets[:-1]

    @_cached
    def segment_ids(self) -> Any:
        """(total,) row of each token; n for tokens of the tail."""
        if self.backend.row_ids is None:
            return self.xp.searchsorted(self.offsets[1:], self.arange(self.total), side="right")
        tail = self.xp.astype(self.total - self.offsets[-1:], self.offsets.dtype)
        return self.backend.row_ids(self.xp.concat([self.lengths, tail]), self.total)

    @_cached
    def row_index(self) -> Any:
        """(total,) row of each token, clipped to n - 1.

        So it may index any array with one entry per row.
        """
        return self._clip_below(self.segment_ids, self.num_rows)

    @_cached
    def positions(self) -> Any:
        """(total,) position of each token in its row."""
        return self.arange(self.total) - self.per_token(self.offsets[:-1])

    def per_token(self, per_row: Any) -> Any:
        """Return (total, ...) the entry of each token's row in `per_row`, (n, ...)."""
        if 0 in per_row.shape[1:]:  # MLX divides by the size of an element
            shape = (self.total, *per_row.shape[1:])
            return self.xp.zeros(shape, dtype=per_row.dtype, device=self.device)
        return self.xp.take(per_row, self.row_index, axis=0)

    def starts_and_lengths(self, layout: Layout) -> tuple[Any, Any]:
        """Return (total,) the start and the length of each token's row in another layout.

        The other layout has as many rows.
        """
        return self.per_token(layout.offsets[:-1]), self.per_token(layout.lengths)

    @_cached
    def nonempty(self) -> Any:
        """(n,) whether the row has any token."""
        return self.lengths > 0

    @property
    def has_no_tail(self) -> bool:
        """True if it is known that every token belongs to a row."""
        if self._has_no_tail:
            return True
        return self.host is not None and bool(self.host[-1] == self.total)

    @property
    def token_mask(self) -> Any:
        """(total,) whether a token belongs to a row; None where all are known to."""
        return None if self.has_no_tail else self._token_mask

    @_cached
    def _token_mask(self) -> Any:
        return self.arange(self.total) < self.offsets[-1:]

    def repeat(self, count: int) -> Layout:
        """Return the layout of rows that are `count` times as long."""
        total = self.total * count
        offsets = self.offsets_as_index(total)
        longest = None if self.max_length is None else self.max_length * count
        host = None if self._host is None else self._host.astype(np.int64) * count
        return Layout(self.backend, offsets * count, total, longest, host)

    def buckets(self, padded: bool = True) -> Buckets:
        """Return the rows by falling length, in buckets of similar length. Reads the offsets.

        A new bucket begins where a row is shorter than 3/4 of the bucket's longest row, or than
        15/16 where that row has `LONG_ROW` tokens: there padding costs more than another call. So
        there are at most about ``20 + 16 * log(longest / LONG_ROW)`` buckets. With ``padded=False``
        every length has a bucket of its own.
        """
        buckets: Buckets = self.cached(
            ("buckets", padded), lambda: self._make_buckets(self.read().astype(np.int64), padded)
        )
        return buckets

    def _make_buckets(self, host: np.ndarray, padded: bool) -> Buckets:
        lengths, device = np.diff(host), self.device
        order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
        slots, parts, starts, used = np.zeros(self.total, np.int64), [], [], 0
        scaled = 16 * lengths[order]  # falling
        while order.size:
            longest = lengths[order[0]]
            threshold = 16 if not padded else 12 if longest < LONG_ROW else 15  # sixteenths
            count = np.searchsorted(-scaled, -threshold * longest, side="right")
            rows, order, scaled = order[:count], order[count:], scaled[count:]
            position = np.arange(longest)
            mask = position < lengths[rows, None]
            tokens = host[rows, None] + np.minimum(position, lengths[rows, None] - 1)
            slots[tokens[mask]] = used + np.flatnonzero(mask)
            used += mask.size
            known = None if mask.all() else self.backend.from_host(mask, self.xp.bool, device)
            parts.append((self.backend.from_host(tokens, None, device), known))
            starts.append(int(tokens[0, 0]))
        return Buckets(parts, starts, self.backend.from_host(slots, None, device))

    def tile_slots(self, size: int) -> Any:
        """Return (total,) the slot of each token among all slots of all tiles.

        In bounds for tokens of the tail.
        """
        tiles = self.tiles(size).layout
        end = tiles.total * size

        def slots() -> Any:
            starts = self.per_token(tiles.offsets_as_index(end)[:-1])
            return self._clip_below(starts * size + self.positions, end)

        return self.cached(("slots", size), slots)

    def tiles(self, size: int) -> Tiles:
        """Return every row cut into tiles of `size` tokens."""
        tiles: Tiles = self.cached(("tiles", size), lambda: self._make_tiles(size))
        return tiles

    def _make_tiles(self, size: int) -> Tiles:
        xp = self.xp
        if self.host is not None:
            counts = -(-(self.host[1:] - self.host[:-1]) // size)
            layout = Layout.from_host(self.backend, counts, like=self.offsets)
        else:
            counts = (self.lengths + (size - 1)) // size
            ends = xp.cumulative_sum(counts, dtype=self.offsets.dtype)
            offsets = xp.concat([self.offsets[:1] * 0, ends])
            bound = self.total // size + self.num_rows
            layout = Layout(self.backend, offsets, bound, -(-self.max_length_bound // size))
        starts = layout.positions * size
        first = layout.per_token(self.offsets[:-1]) + starts
        tokens = first[:, None] + self.arange(size)[None, :]
        ends = layout.per_token(self.offsets[1:])
        exists = layout.segment_ids < self.num_rows
        valid = (tokens < ends[:, None]) & exists[:, None]
        return Tiles(layout, layout.row_index, starts, self.clip(tokens), valid)

    def arange(self, size: int) -> Any:
        """Return `[0, 1, ... size - 1]` with the dtype and on the device of the offsets."""
        return self.xp.arange(size, dtype=self.offsets.dtype, device=self.device)

    def clip(self, tokens: Any) -> Any:
        """Return token indices clipped to the bounds of the values."""
        return self._clip_below(self.xp.where(tokens > 0, tokens, 0), self.total)

    def _clip_below(self, index: Any, size: int) -> Any:
        return self.xp.where(index < size, index, max(size - 1, 0))


def index_dtype(xp: Any, last: int, like: Any = None) -> Any:
    """Return the dtype of indices up to `last`.

    The dtype of `like`, or else int32, where that suffices.
    """
    if last >= 2**31:
        return xp.int64
    return xp.int32 if like is None else like.dtype


def has_same_rows(a: Layout, b: Layout) -> bool | None:
    """Return whether two layouts have the same rows.

    None where only waiting for a device could tell.
    """
    if a is b or a.offsets is b.offsets:
        return True
    if a.num_rows != b.num_rows or a.total != b.total:
        return False
    if a.host is None or b.host is None:
        return None
    return bool(np.array_equal(a.host, b.host))


def check_offsets(offsets: np.ndarray, total: int) -> None:
    """Raise `ValueError` unless the offsets start at 0, never fall and end at `total`."""
    if offsets[0] != 0:
        raise ValueError(
            f"offsets: expected to start at 0, got {offsets[0]}; subtract offsets[0] and cut the values"
        )
    falls = np.nonzero(offsets[1:] < offsets[:-1])[0]
    if falls.size:
        i = int(falls[0])
        raise ValueError(
            f"offsets: expected to never fall, got offsets[{i}] = {offsets[i]} and offsets[{i + 1}] = {offsets[i + 1]}; "
            "for row lengths use from_lengths"
        )
    if offsets[-1] != total:
        raise ValueError(
            f"offsets: expected to end at {total}, the length of values along ragged_dim, got {offsets[-1]}; "
            "cut the values or add a row"
        )
