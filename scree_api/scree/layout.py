"""The layout of a ragged array: offsets, everything derived from them, and the tiles of every row.

A `Layout` holds one offsets vector. Everything derived from it is computed at most once and shared
by all arrays of the layout. Derived arrays never wait for a device: they use the offsets in host
memory where these are known, and functions of the standard elsewhere. Only `read_offsets` may wait,
and what calls it: `buckets`, and `total` if it was not given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from .backends import Backend, backend

T = TypeVar("T")

#: A row of at least this length gains little from being batched with other rows.
LONG_ROW = 256
#: Streams per layout for which derived data is kept; see `Layout.cache`.
MAX_STREAMS = 32
#: Other layouts per layout for which data derived from both is kept; see `Layout.pair_cache`.
MAX_PAIR_CACHES = 4
#: Tokens per tile where `per_token` repeats entries per tile first.
GATHERED_TILE = 32


class Tiles(NamedTuple):
    """Every row cut into tiles of equal size.

    The arrays have a fixed bound on the number of tiles as length, so their shapes are known without
    reading the offsets.

    Attributes
    ----------
    layout
        The layout of the tiles: row i has ``ceil(lengths[i] / size)`` of them. Its total is the
        bound on their number.
    rows
        (tiles,) row of each tile; the last row for entries after the last tile.
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
    """Rows of similar length batched together, for functions that need dense batches.

    See `Layout.buckets`.

    Attributes
    ----------
    batches
        One (tokens, mask) per bucket. `tokens` are (rows, longest) indices into the values; rows
        shorter than the longest of the bucket repeat their last token. `mask` is False at those
        repeats, or None if there are none.
    first_tokens
        Per bucket the index of the first token of its first row.
    slots
        (total,) index of each token among the entries of all buckets end to end.
    """

    batches: list[tuple[Any, Any]]
    first_tokens: list[int]
    slots: Any


class Identity:
    """The identity of a layout, as a key that does not hold the layout.

    Compilers cannot trace `object()`.
    """


class RowCut(Protocol):
    """The cut of a batch over processes, as the lower layers see it; see `scree.distributed`.

    A shard is an array whose layout has a cut: row i is the part of row i that this process holds.
    Operations on shards go through the cut, which runs those that it knows and refuses the others.
    """

    positions: Any

    def static_layout(self, layout: Layout) -> Layout:
        """Return the layout of a shard without tracers, for pytrees."""
        return layout

    def has_tokens(self, layout: Layout, count: int) -> bool:
        """Return whether an array with so many tokens can be a shard on this layout."""
        return layout.total == count

    def run(
        self, operation: Any, arrays: dict[str, Any], options: dict[str, Any], kernel: str | None
    ) -> Any:
        """Run an operation whose first array is a shard; the arguments of `Operation.run`."""

    def call(
        self, kind: str, name: str, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Call a function of the standard, of some kind, on shards."""


#: id of the offsets of a shard -> its layout. An array with the same offsets is a shard too.
#: `dataclasses.replace`, by which FSDP2 casts the inputs of modules, passes only the fields of `Array`.
SHARD_LAYOUTS: WeakValueDictionary[int, Layout] = WeakValueDictionary()


class Layout:
    """The row boundaries of a ragged array and everything derived from them.

    Tokens after the last row are the *tail*; they belong to no row. `host_offsets` never waits for a
    device, `read_offsets` may.

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
        The bound on the longest row that the caller gave, or None.
    host
        The offsets in host memory, where the caller has them.
    has_no_tail
        True if every token is known to belong to a row.
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
        self.identity = Identity()
        self.xp = backend.xp
        self.offsets = offsets
        self._total = total
        self.max_length = max_length
        self._cache: dict[Any, Any] = {}
        #: `cache` on the default stream of a device with streams, which no CUDA graph captures.
        self.default_stream_cache: dict[Any, Any] = {}
        self._stream_caches: dict[Any, dict[Any, Any]] = {}
        self._stream_key = None if backend.stream_key is None else backend.stream_key(offsets)
        self.raw_stream = backend.raw_stream(offsets)
        self._host = host
        self._has_no_tail = has_no_tail
        #: How the rows are cut over processes; None for whole rows.
        self.cut: RowCut | None = None

    @classmethod
    def from_host_lengths(
        cls, backend: Backend, lengths: np.ndarray, like: Any = None, device: Any = None
    ) -> Layout:
        """Return a layout from row lengths in host memory.

        The offsets have the dtype and the device of `like`; without it they are on `device`, int32,
        or int64 if the total needs it.
        """
        host = host_offsets_of(lengths)
        dtype = index_dtype(backend.xp, int(host[-1]), like)
        device = device if like is None else backend.device(like)
        host = host if dtype == backend.xp.int64 else host.astype(np.int32)
        offsets = backend.from_host(host, dtype, device)
        longest = int(lengths.max()) if len(lengths) else 0
        return cls(backend, offsets, int(host[-1]), longest, host)

    @property
    def cache(self) -> dict[Any, Any]:
        """Everything derived from the offsets, by key.

        Every stream of a device has a cache of its own, and so has every capture of a CUDA graph.
        Data that one stream computes is not ready on another, and memory of a graph is overwritten.
        """
        if self._stream_key is None or self.backend.is_compiling():
            return self._cache
        return self.eager_cache()

    def eager_cache(self) -> dict[Any, Any]:
        """Return `cache` for a caller that no compiler traces; this takes less time."""
        if self._stream_key is None:
            return self._cache
        key = self._stream_key()
        if key == 0:
            return self.default_stream_cache
        cache = self._stream_caches.get(key)
        if cache is None:
            cache = {}
            # A new dictionary, as other threads may read the old one.
            kept = [*self._stream_caches.items()][1 - MAX_STREAMS :]
            self._stream_caches = {**dict(kept), key: cache}
        return cache

    def eager_pair_cache(self, other: Layout) -> dict[Any, Any]:
        """Return `pair_cache` for a caller that no compiler traces; this takes less time."""
        pairs = self.eager_cache().get("pairs")
        return (pairs and pairs.get(other.identity)) or self.pair_cache(other)

    def cached(self, key: Any, derive: Callable[[], T], pair: Layout | None = None) -> T:
        """Return ``derive()``, computed once per layout or pair of layouts.

        `derive` runs outside of traces that do not trace the offsets, so that calls under other
        traces can use the cached result.
        """
        cache = self.cache if pair is None else self.pair_cache(pair)
        if key not in cache:
            with self.backend.untraced(self.offsets):
                cache[key] = derive()
        derived: T = cache[key]
        return derived

    def pair_cache(self, other: Layout) -> dict[Any, Any]:
        """Return the cache of data derived from both layouts.

        The `MAX_PAIR_CACHES` most recently added others are kept.

        The bound matters in generation, where the same queries attend to new keys at every step.
        """
        if other is self:
            return self.cache
        pairs: dict[object, dict[Any, Any]] = self.cache.setdefault("pairs", {})
        # The key is not `other` itself: two layouts that held each other would live until a garbage
        # collection.
        key = other.identity
        if key not in pairs:
            # A new dictionary, as other threads may read the old one.
            kept = list(pairs.items())[1 - MAX_PAIR_CACHES :]
            pairs = self.cache["pairs"] = {**dict(kept), key: {}}
        return pairs[key]

    @property
    def total(self) -> int:
        """Number of tokens in the values, the tail included."""
        if self._total is None:
            self._total = int(self.read_offsets()[-1])
        return self._total

    @property
    def num_rows(self) -> int:
        """Number of rows, a Python integer."""
        num_offsets: int = self.offsets.shape[0]
        return num_offsets - 1

    @property
    def device(self) -> Any:
        """The device for arrays that are combined with the offsets; None if the library chooses it."""
        return self.backend.device(self.offsets)

    @property
    def host_offsets(self) -> np.ndarray | None:
        """The offsets in host memory where reading is free, else None."""
        if self.backend.is_compiling():
            return None
        if self._host is None:
            self._host = self.backend.peek(self.offsets)
        return self._host

    def offsets_as_index(self, max_index: int) -> Any:
        """Return the offsets in a dtype that holds `max_index`."""
        return widen_index(self.xp, self.offsets, max_index)

    def to_index(self, indices: np.ndarray, max_index: int = 0) -> Any:
        """Return indices in host memory as an array of the library, on the device of the offsets.

        It has the dtype of the offsets, or int64 if `max_index` needs it.
        """
        dtype = index_dtype(self.xp, max_index, self.offsets)
        return self.backend.from_host(np.ascontiguousarray(indices), dtype, self.device)

    def on_host(self) -> Layout:
        """Return the same layout as NumPy arrays if its offsets are known on the host, else itself."""
        host = self.host_offsets
        if host is None or host is self.offsets:
            return self
        return Layout(backend(host), host, self.total, self.max_length, host)

    def set_host_lengths(self, lengths: np.ndarray) -> None:
        """Store known row lengths, so that the offsets never have to be read."""
        if self._host is None:
            self._host = host_offsets_of(lengths)

    def read_offsets(self) -> np.ndarray:
        """Return the offsets in host memory; wait for the device if they are not known there."""
        if self.host_offsets is None:
            self._host = self.backend.read(self.offsets)
        assert self._host is not None
        return self._host

    @property
    def max_length_bound(self) -> int:
        """A bound on the longest row, at least as tight as `max_length`; never reads the offsets."""
        host = self.host_offsets
        if host is not None:
            return self.cached(
                "exact_max_length", lambda: int((host[1:] - host[:-1]).max(initial=0))
            )
        if self.max_length is None:
            return self.total
        # The minimum would make a compiler specialize on the total.
        return self.max_length if self.backend.is_compiling() else min(self.max_length, self.total)

    @property
    def lengths(self) -> Any:
        """(n,) tokens of each row."""
        return self.cached("lengths", lambda: self.offsets[1:] - self.offsets[:-1])

    @property
    def segment_ids(self) -> Any:
        """(total,) row of each token; n for tokens of the tail."""
        return self.cached("segment_ids", self._compute_segment_ids)

    def _compute_segment_ids(self) -> Any:
        if self.backend.row_ids is None:
            return self.xp.searchsorted(self.offsets[1:], self.arange(self.total), side="right")
        tail = self.xp.astype(self.total - self.offsets[-1:], self.offsets.dtype)
        return self.backend.row_ids(self.xp.concat([self.lengths, tail]), self.total)

    @property
    def clipped_segment_ids(self) -> Any:
        """(total,) row of each token, clipped to n - 1: a valid index into one entry per row."""
        return self.cached(
            "clipped_segment_ids", lambda: self._clip_below(self.segment_ids, self.num_rows)
        )

    @property
    def positions(self) -> Any:
        """(total,) position of each token in its row."""
        return self.cached(
            "positions", lambda: self.arange(self.total) - self.per_token(self.offsets[:-1])
        )

    def per_token(self, per_row: Any) -> Any:
        """Return ``per_row[row]`` for the row of each token: (total, ...) for (n, ...)."""
        # Without rows there is nothing to take; MLX divides by the number of elements per row.
        if 0 in per_row.shape:
            shape = (self.total, *per_row.shape[1:])
            return self.xp.zeros(shape, dtype=per_row.dtype, device=self.device)
        xp = self.xp
        if self.backend.gathers_rows_by_tiles() and xp.isdtype(per_row.dtype, "real floating"):
            per_tile = xp.take(per_row, self.tiles(GATHERED_TILE).rows, axis=0)
            shape = (per_tile.shape[0], GATHERED_TILE, *per_row.shape[1:])
            slots = xp.reshape(xp.broadcast_to(per_tile[:, None], shape), (-1, *shape[2:]))
            return xp.take(slots, self.tile_slots(GATHERED_TILE), axis=0)
        return xp.take(per_row, self.clipped_segment_ids, axis=0)

    def starts_and_lengths(self, layout: Layout) -> tuple[Any, Any]:
        """Return per token, (total,), where its row starts in `layout`, and how long it is there.

        Both layouts have the same number of rows.
        """
        return self.per_token(layout.offsets[:-1]), self.per_token(layout.lengths)

    @property
    def nonempty(self) -> Any:
        """(n,) whether the row has any token."""
        return self.cached("nonempty", lambda: self.lengths > 0)

    @property
    def has_no_tail(self) -> bool:
        """True if it is known that every token belongs to a row."""
        if self._has_no_tail:
            return True
        host = self.host_offsets
        return host is not None and bool(host[-1] == self.total)

    @property
    def token_mask(self) -> Any:
        """(total,) whether a token belongs to a row; None where all are known to."""
        if self.has_no_tail:
            return None
        return self.cached("token_mask", lambda: self.arange(self.total) < self.offsets[-1:])

    def with_lengths(self, lengths: Any, total: int, max_length: int | None) -> Layout:
        """Return a layout of rows whose lengths only the device knows; `total` bounds their sum."""
        # On the device of the offsets, also under a trace.
        zero = self.xp.astype(self.offsets[:1] * 0, lengths.dtype, copy=False)
        ends = self.xp.cumulative_sum(lengths, dtype=lengths.dtype)
        return Layout(self.backend, self.xp.concat([zero, ends]), total, max_length)

    def repeat_tokens(self, count: int) -> Layout:
        """Return the layout in which every token is repeated `count` times."""
        total = self.total * count
        offsets = self.offsets_as_index(total)
        longest = None if self.max_length is None else self.max_length * count
        host = None if self._host is None else self._host.astype(np.int64) * count
        return Layout(self.backend, offsets * count, total, longest, host, self.has_no_tail)

    def buckets(self, padded: bool = True) -> Buckets:
        """Return the rows by falling length, in buckets of similar length. Reads the offsets.

        With ``padded=False`` every length has a bucket of its own. Otherwise the shortest row of a
        bucket has at least a share of the length of its longest row. Padding a long row costs more
        than another batch, so the share depends on that length:

        ====================  ============
        longest row           shortest row
        ====================  ============
        below `LONG_ROW`      3/4 of it
        at least `LONG_ROW`   15/16 of it
        ====================  ============

        So there are at most about ``20 + 16 * log(longest / LONG_ROW)`` buckets.
        """
        return self.cached(("buckets", padded), lambda: self._make_buckets(padded))

    def _make_buckets(self, padded: bool) -> Buckets:
        host, device = self.read_offsets().astype(np.int64), self.device
        lengths = np.diff(host)
        order = np.argsort(-lengths, kind="stable")[: np.count_nonzero(lengths)]
        slots, num_slots = np.zeros(self.total, np.int64), 0
        batches, first_tokens = [], []
        scaled = 16 * lengths[order]  # so that a share is a whole number
        while order.size:
            longest = lengths[order[0]]
            sixteenths = 16 if not padded else 12 if longest < LONG_ROW else 15
            count = np.searchsorted(-scaled, -sixteenths * longest, side="right")
            rows, order, scaled = order[:count], order[count:], scaled[count:]
            position = np.arange(longest)
            mask = position < lengths[rows, None]
            tokens = host[rows, None] + np.minimum(position, lengths[rows, None] - 1)
            slots[tokens[mask]] = num_slots + np.flatnonzero(mask)
            num_slots += mask.size
            is_full = bool(mask.all())
            mask_array = None if is_full else self.backend.from_host(mask, self.xp.bool, device)
            batches.append((self.backend.from_host(tokens, None, device), mask_array))
            first_tokens.append(int(tokens[0, 0]))
        return Buckets(batches, first_tokens, self.backend.from_host(slots, None, device))

    def tile_slots(self, size: int) -> Any:
        """Return (total,) the index of each token in the flattened (tiles, size) arrays of `Tiles`.

        It is in bounds for tokens of the tail too.
        """
        tiles = self.tiles(size).layout
        end = tiles.total * size

        def slots() -> Any:
            starts = self.per_token(tiles.offsets_as_index(end)[:-1])
            return self._clip_below(starts * size + self.positions, end)

        return self.cached(("slots", size), slots)

    def tiles(self, size: int) -> Tiles:
        """Return every row cut into tiles of `size` tokens."""
        return self.cached(("tiles", size), lambda: self._make_tiles(size))

    def _make_tiles(self, size: int) -> Tiles:
        if self.host_offsets is not None:
            counts = -(-(self.host_offsets[1:] - self.host_offsets[:-1]) // size)
            layout = Layout.from_host_lengths(self.backend, counts, like=self.offsets)
        else:
            counts = (self.lengths + (size - 1)) // size
            bound = self.total // size + self.num_rows
            layout = self.with_lengths(counts, bound, -(-self.max_length_bound // size))
        starts = layout.positions * size
        first = layout.per_token(self.offsets[:-1]) + starts
        tokens = first[:, None] + self.arange(size)[None, :]
        ends = layout.per_token(self.offsets[1:])
        exists = layout.segment_ids < self.num_rows
        valid = (tokens < ends[:, None]) & exists[:, None]
        return Tiles(layout, layout.clipped_segment_ids, starts, self.clip(tokens), valid)

    def arange(self, size: int) -> Any:
        """Return `[0, 1, ... size - 1]` with the dtype and on the device of the offsets."""
        return self.xp.arange(size, dtype=self.offsets.dtype, device=self.device)

    def clip(self, tokens: Any) -> Any:
        """Return token indices clipped to the bounds of the values."""
        return self._clip_below(self.xp.where(tokens > 0, tokens, 0), self.total)

    def _clip_below(self, index: Any, size: int) -> Any:
        return self.xp.where(index < size, index, max(size - 1, 0))


def host_offsets_of(lengths: np.ndarray) -> np.ndarray:
    """Return the offsets of rows of the given lengths, int64."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    lengths.cumsum(dtype=np.int64, out=offsets[1:])
    return offsets


def index_dtype(xp: Any, max_index: int, like: Any = None) -> Any:
    """Return the dtype of indices up to `max_index`: int64 from 2^31 on, else the dtype of `like`.

    Without `like` it is int32.
    """
    if max_index >= 2**31:
        return xp.int64
    return xp.int32 if like is None else like.dtype


def widen_index(xp: Any, index: Any, max_index: int) -> Any:
    """Return indices in a dtype that holds `max_index`."""
    return xp.astype(index, index_dtype(xp, max_index, index), copy=False)


def has_same_rows(a: Layout, b: Layout) -> bool | None:
    """Return whether two layouts have the same rows and as many tokens.

    Layouts on one offsets array are not compared further. The result is None if a comparison would
    have to wait for a device.
    """
    if a.cut is not b.cut and a.cut != b.cut:
        return False
    if a is b or a.offsets is b.offsets:
        return True
    if a.num_rows != b.num_rows or a.total != b.total:
        return False
    if a.host_offsets is None or b.host_offsets is None:
        return None
    return bool(np.array_equal(a.host_offsets, b.host_offsets))


def check_offsets(offsets: np.ndarray, total: int) -> None:
    """Raise `ValueError` unless the offsets start at 0, are non-decreasing and end at `total`."""
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
