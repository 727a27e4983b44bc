"""Where the rows lie: index arithmetic on offsets, and the cut of every row into tiles.

`Layout` holds one offsets vector and everything that follows from it, each computed at most once and shared by all arrays
of that layout. All of it is standard code on plain arrays, without a look at the values of the offsets, so that it runs
under a trace and never stops a device; the few questions whose answer is a size go to `read`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .backends import Backend, backend

LONG = 256  # tokens of a row that hardly gains from company
OTHERS = 4  # layouts beside which one is remembered


class Tiles(NamedTuple):
    """Every row cut into tiles of equal size; the number of tiles has a static bound.

    Attributes
    ----------
    layout
        The layout of the tiles: row i has ``ceil(lengths[i] / size)`` of them. Its capacity may exceed their number.
    rows
        (tiles,) row of each tile; entries beyond the last tile name some valid row.
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


def _once(derive: Callable[[Layout], Any]) -> Any:
    """A property by `Layout.once`; without the lock of `functools.cached_property`, which compilers refuse."""
    name = derive.__name__

    return property(lambda self: self.once(name, lambda: derive(self)), doc=derive.__doc__)


class Buckets(NamedTuple):
    """Rows of similar length together, for kernels that want rectangles; see `Layout.buckets`.

    Attributes
    ----------
    parts
        For each bucket the tokens of its rows, (rows, longest) indices into the values, the last token repeated behind the
        end of a row; and which of them are real, or None where all are.
    starts
        The first token of the first row of each bucket.
    slots
        (total,) where each token stands in the buckets end to end.
    """

    parts: list[tuple[Any, Any]]
    starts: list[int]
    slots: Any


class Layout:
    """The row boundaries of a ragged array and what follows from them.

    Parameters
    ----------
    backend
        The library of the offsets.
    offsets
        (n + 1,) integers, `[0, L0, L0 + L1, ...]`.
    total
        Number of tokens that the values have room for; a Python integer. Where it is None it is the last offset, which is read
        when it is asked for.
    max_length
        A bound on the longest row that is known without reading, or None.
    host
        The offsets in host memory, where the caller has them.
    full
        Whether the caller knows that every token belongs to a row.
    """

    def __init__(
        self,
        backend: Backend,
        offsets: Any,
        total: int | None,
        max_length: int | None = None,
        host: np.ndarray | None = None,
        full: bool = False,
    ) -> None:
        self.backend = backend
        self.xp = backend.xp
        self.offsets = offsets
        self._total = total
        self.max_length = max_length
        self.memo: dict[Any, Any] = {}
        self._host = host
        self._full = full

    @classmethod
    def from_host(
        cls, backend: Backend, lengths: np.ndarray, like: Any = None, device: Any = None
    ) -> Layout:
        """The layout of rows whose lengths are known on the host; offsets as `like`, or else int32 where that suffices."""
        host = np.zeros(len(lengths) + 1, np.int64)
        lengths.cumsum(dtype=np.int64, out=host[1:])
        dtype, device = (
            counter(backend.xp, int(host[-1]), like),
            device if like is None else backend.device(like),
        )
        host = host if dtype == backend.xp.int64 else host.astype(np.int32)
        offsets = backend.from_host(host, dtype, device)
        longest = int(lengths.max()) if len(lengths) else 0
        return cls(backend, offsets, int(host[-1]), longest, host)

    def once(self, key: Any, derive: Callable[[], Any], beside: Layout | None = None) -> Any:
        """What follows from these offsets, and those `beside`: computed once, and never as part of a trace that they outlive."""
        memo = self.memo if beside is None else self.beside(beside)
        if key not in memo:
            with self.backend.outside(self.offsets):
                memo[key] = derive()
        return memo[key]

    def beside(self, other: Layout) -> dict[Any, Any]:
        """A memo of what follows from both layouts; only those of the last few others are kept.

        Where the same queries ask for new keys at every step, as in generation, it must not grow.
        """
        if other is self:
            return self.memo
        kept: dict[int, tuple[Layout, dict[Any, Any]]] = self.memo.setdefault("beside", {})
        if id(other) not in kept:  # while it is kept, nothing else has its id
            while len(kept) >= OTHERS:
                del kept[next(iter(kept))]
            kept[id(other)] = other, {}
        return kept[id(other)][1]

    @property
    def total(self) -> int:
        """Number of tokens that the values have room for."""
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
        """Where to make what meets the offsets; None where the library finds the place itself."""
        return self.backend.device(self.offsets)

    @property
    def host(self) -> np.ndarray | None:
        """The offsets in host memory where looking is free, else None."""
        if self.backend.compiling():
            return None
        if self._host is None:
            self._host = self.backend.peek(self.offsets)
        return self._host

    def counting(self, last: int) -> Any:
        """The offsets in a dtype that counts to `last`."""
        return self.xp.astype(self.offsets, counter(self.xp, last, self.offsets), copy=False)

    def put(self, host: np.ndarray, last: int = 0) -> Any:
        """Indices from host memory, up to `last`, as the offsets are and where they are."""
        return self.backend.from_host(
            np.ascontiguousarray(host), counter(self.xp, last, self.offsets), self.device
        )

    def at_home(self) -> Layout:
        """The same rows in host memory, for plans that no device shall wait for; where their offsets are known there."""
        if self.host is None or self.host is self.offsets:
            return self
        return Layout(backend(self.host), self.host, self.total, self.max_length, self.host)

    def learn(self, lengths: np.ndarray) -> None:
        """Keep what a caller knows of the rows, so that nothing needs to be read from a device later."""
        if self._host is None:
            self._host = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])

    def read(self) -> np.ndarray:
        """The offsets in host memory; waits for the device where it must. For results whose size depends on them."""
        if self.host is None:
            self._host = self.backend.read(self.offsets)
        assert self._host is not None
        return self._host

    @property
    def bound(self) -> int:
        """The best bound on the longest row that is known without reading; `max_length` may be a loose one."""
        longest: int = self.total if self.max_length is None else self.max_length
        if self.host is not None:
            longest = self._longest
        elif not self.backend.compiling():  # a compiler takes the total for one that varies
            longest = min(longest, self.total)
        return longest

    @_once
    def _longest(self) -> int:
        assert self.host is not None
        return int((self.host[1:] - self.host[:-1]).max(initial=0))

    @_once
    def lengths(self) -> Any:
        """(n,) tokens of each row."""
        return self.offsets[1:] - self.offsets[:-1]

    @_once
    def segment_ids(self) -> Any:
        """(total,) row of each token; tokens behind the last row have the id n."""
        if self.backend.row_ids is None:
            return self._row_of(self.offsets[1:], self.total)
        tail = self.total - self.offsets[-1:]
        return self.backend.row_ids(
            self.xp.concat([self.lengths, self.xp.astype(tail, self.offsets.dtype)]), self.total
        )

    @_once
    def rows(self) -> Any:
        """(total,) row of each token, clipped, so that it may index any array with one entry a row."""
        return self._below(self.segment_ids, self.num_rows)

    @_once
    def positions(self) -> Any:
        """(total,) position of each token in its row."""
        return self.arange(self.total) - self.xp.take(self.offsets[:-1], self.rows, axis=0)

    @_once
    def filled(self) -> Any:
        """(n,) whether the row has any token."""
        return self.lengths > 0

    @property
    def full(self) -> bool:
        """Whether it is known that every token belongs to a row."""
        return self._full or (self.host is not None and bool(self.host[-1] == self.total))

    @property
    def real(self) -> Any:
        """(total,) whether a token belongs to a row; None where it is known that all do."""
        return None if self.full else self._in_a_row

    @_once
    def _in_a_row(self) -> Any:
        return self.arange(self.total) < self.offsets[-1:]

    def times(self, count: int) -> Layout:
        """The layout of rows that are `count` times as long."""
        total = self.total * count
        offsets = self.counting(total)
        longest = None if self.max_length is None else self.max_length * count
        host = None if self._host is None else self._host.astype(np.int64) * count
        return Layout(self.backend, offsets * count, total, longest, host)

    def buckets(self, padded: bool = True) -> Buckets:
        """Rows by falling length, a new bucket wherever one is too short for that of the row before. Reads the offsets.

        Too short is less than 3/4 of the longest row of the bucket, or than 15/16 where that row is `LONG`: there padding costs
        more than another call. So there are at most about ``20 + 16 * log(longest / LONG)`` buckets. Where nothing is to be
        padded, every length has a bucket of its own.
        """
        found: Buckets = self.once(
            ("buckets", padded), lambda: self._bucket(self.read().astype(np.int64), padded)
        )
        return found

    def _bucket(self, host: np.ndarray, padded: bool) -> Buckets:
        lengths, device = np.diff(host), self.device
        order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
        slots, parts, starts, used, falling = (
            np.zeros(self.total, np.int64),
            [],
            [],
            0,
            16 * lengths[order],
        )
        while order.size:
            longest = lengths[order[0]]
            share = 16 if not padded else 12 if longest < LONG else 15
            here = np.searchsorted(-falling, -share * longest, side="right")
            rows, order, falling = order[:here], order[here:], falling[here:]
            place = np.arange(longest)
            real = place < lengths[rows, None]
            tokens = host[rows, None] + np.minimum(place, lengths[rows, None] - 1)
            slots[tokens[real]] = used + np.flatnonzero(real)
            used += real.size
            known = None if real.all() else self.backend.from_host(real, self.xp.bool, device)
            parts.append((self.backend.from_host(tokens, None, device), known))
            starts.append(int(tokens[0, 0]))
        return Buckets(parts, starts, self.backend.from_host(slots, None, device))

    def tile_slots(self, size: int) -> Any:
        """(total,) where each token stands among all slots of all tiles; within the tiles for tokens behind the last row."""
        tiles = self.tiles(size).layout
        end = tiles.total * size

        def slots() -> Any:
            return self._below(
                self.xp.take(tiles.counting(end)[:-1], self.rows, axis=0) * size + self.positions,
                end,
            )

        return self.once(("slots", size), slots)

    def tiles(self, size: int) -> Tiles:
        """Cut every row into tiles of `size` tokens."""
        found: Tiles = self.once(("tiles", size), lambda: self._cut(size))
        return found

    def _cut(self, size: int) -> Tiles:
        xp = self.xp
        if self.host is not None:
            counts = -(-(self.host[1:] - self.host[:-1]) // size)
            layout = Layout.from_host(self.backend, counts, like=self.offsets)
        else:
            counts = (self.lengths + (size - 1)) // size
            offsets = xp.concat(
                [self.offsets[:1] * 0, xp.cumulative_sum(counts, dtype=self.offsets.dtype)]
            )
            layout = Layout(
                self.backend, offsets, self.total // size + self.num_rows, -(-self.bound // size)
            )
        starts = layout.positions * size
        tokens = (xp.take(self.offsets[:-1], layout.rows, axis=0) + starts)[:, None] + self.arange(
            size
        )[None, :]
        ends = xp.take(self.offsets[1:], layout.rows, axis=0)
        exists = layout.segment_ids < self.num_rows
        valid = (tokens < ends[:, None]) & exists[:, None]
        return Tiles(layout, layout.rows, starts, self.clip(tokens), valid)

    def _row_of(self, ends: Any, total: int) -> Any:
        return self.xp.searchsorted(ends, self.arange(total), side="right")

    def arange(self, size: int) -> Any:
        """`[0, 1, ... size - 1]` with the dtype and on the device of the offsets."""
        return self.xp.arange(size, dtype=self.offsets.dtype, device=self.device)

    def clip(self, tokens: Any) -> Any:
        """Token indices, brought into the bounds of the values."""
        return self._below(self.xp.where(tokens > 0, tokens, 0), self.total)

    def _below(self, index: Any, size: int) -> Any:
        return self.xp.where(index < size, index, max(size - 1, 0))


def counter(xp: Any, last: int, like: Any = None) -> Any:
    """The dtype of numbers up to `last`: that of `like`, or else int32, where that suffices."""
    if last >= 2**31:
        return xp.int64
    return xp.int32 if like is None else like.dtype


def same(a: Layout, b: Layout) -> bool | None:
    """Whether two layouts have the same rows; None where that cannot be told without waiting for a device."""
    if a is b or a.offsets is b.offsets:
        return True
    if a.num_rows != b.num_rows or a.total != b.total:
        return False
    if a.host is None or b.host is None:
        return None
    return bool(np.array_equal(a.host, b.host))


def check(offsets: np.ndarray, total: int) -> None:
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
