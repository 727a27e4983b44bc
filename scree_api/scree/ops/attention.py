"""Attention within each row, or between rows of two batches with the same index.

The standard implementation cuts queries and keys into tiles. It processes chunks of query tiles.
For each chunk it iterates over the key tiles that any query sees, with the online softmax of
FlashAttention (Dao et al., 2022; Milakov and Gimelshein, 2018). Besides the result it stores the
keys and values by tile, and the scores of one chunk and one key tile. If the rows are known on the
host, the work is proportional to the number of visible tiles, and rows whose tiles are mostly
padding are processed in ranges. Otherwise all query tiles form one chunk, and each iterates up to
the bound on the longest row.

A key that a query does not see has no influence on it, even if its value is NaN or infinite: a
weight of 0 times NaN would be NaN. Tiles with such pairs sum the other values apart from these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import checks
from ..array import Array
from ..broadcasting import check_ragged, check_shared_layout
from ..dispatch.operation import KernelUnavailableError, define_operation
from ..dtypes import accumulation_dtype
from ..layout import Layout, Tiles, host_offsets_of
from ..records import record
from .philox import as_seed, kept_pairs, round_probability
from .row_chunks import equal_cost_bounds, join_rows, split_rows
from .segment import append_axes, gather_tiles

__all__ = ["attention"]

QUERY_TILE = KEY_TILE = 64  # tokens per tile
MAX_SCORES = 1 << 16  # scores of one chunk and one key tile
#: Bytes of the tiles of a range of rows, unless the queries, keys and values are larger.
MAX_TILE_BYTES = 1 << 25

#: Bound once, because a class method is bound anew at every call.
_from_layout = Array.from_layout

MAX_WINDOW = 1 << 30  # keys on one side of a query; no row is as long

Window = int | tuple[int | None, int | None] | None


@record
class AttentionCall:
    """A validated call of `attention`. The sinks are no part of it: they rescale its result.

    Attributes
    ----------
    q
        Queries, values (total_q, num_heads, head_dim).
    k, v
        Keys and values on one layout, (total_k, num_kv_heads, head_dim) and (total_k, num_kv_heads,
        value_dim).
    causal
        Query i sees key j where ``j <= i + len_k - len_q`` (aligned bottom-right).
    window
        (left, right): query i sees key j from ``i + len_k - len_q - left`` to ``i + len_k - len_q +
        right``; None is unbounded. Causal calls have right = 0.
    scale
        Factor of the scores.
    softcap
        ``softcap * tanh(score / softcap)`` replaces the score, or None.
    alibi_slopes
        (num_heads,), (n, num_heads) or None; see `attention`.
    dropout
        Probability with which a weight of the softmax is set to 0.
    seed
        Result of `philox.as_seed`; None without dropout.
    deterministic
        Whether equal inputs must give equal bits, in gradients too.
    return_lse
        Whether the log-sum-exp of the scores, (total_q, num_heads) in the accumulation dtype, is
        returned too.
    """

    q: Array
    k: Array
    v: Array
    causal: bool = False
    window: Any = None  # the constructor makes it (left, right)
    scale: Any = None  # the constructor makes it a float
    softcap: float | None = None
    alibi_slopes: Any = None
    dropout: float = 0.0
    seed: Any = None
    deterministic: bool = False
    return_lse: bool = False

    def __post_init__(self) -> None:
        q, k, v = self.q, self.k, self.v
        check_heads("q", q)
        if k is not q:
            check_heads("k", k)
            _check_like_q("k", k, q)
        if v is not k and v is not q:
            check_heads("v", v)
            _check_like_q("v", v, q)
        checks.check_floating("q", q.values)
        if k.offsets.shape != q.offsets.shape:
            raise ValueError(f"k: expected {q.batch_size} rows as q, got {k.batch_size}")
        if v.offsets is not k.offsets:
            check_shared_layout("attention: k and v", (k, v))
        (_, heads, dim), (_, kv_heads, k_dim) = q.values.shape, k.values.shape
        for name, width in (("q", dim), ("v", v.values.shape[2])):
            if width == 0:
                raise ValueError(f"{name}: expected a head_dim of at least 1, got 0")
        if k_dim != dim:
            raise ValueError(f"k: expected head_dim {dim} as q, got {k_dim}")
        if v.values.shape[1] != kv_heads:
            raise ValueError(f"v: expected {kv_heads} heads as k, got {v.values.shape[1]}")
        if 0 in (heads, kv_heads) or heads % kv_heads:
            raise ValueError(
                f"q: expected num_heads to be a positive multiple of num_kv_heads {kv_heads}, got {heads}"
            )
        causal = checks.check_flag("causal", self.causal)
        checks.check_flag("deterministic", self.deterministic)
        checks.check_flag("return_lse", self.return_lse)
        if self.softcap is not None:
            checks.check_number("softcap", self.softcap, above=0)
        scale = (
            1 / math.sqrt(dim) if self.scale is None else checks.check_number("scale", self.scale)
        )
        if self.alibi_slopes is not None:
            check_slopes(self.alibi_slopes, q)
        object.__setattr__(self, "dropout", check_dropout(self.dropout))
        if not self.dropout:
            object.__setattr__(self, "seed", None)
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "window", normalize_window(self.window, causal))

    @property
    def num_heads(self) -> int:
        """Heads of q."""
        return int(self.q.values.shape[1])

    @property
    def num_kv_heads(self) -> int:
        """Heads of k and v."""
        return int(self.k.values.shape[1])

    @property
    def head_dim(self) -> int:
        """Width of a head of q and k."""
        return int(self.q.values.shape[2])


def check_heads(name: str, x: Any) -> None:
    """Raise unless `x` is ragged with values (total, num_heads, head_dim)."""
    values = check_ragged(name, x).values
    if values.ndim != 3 or x.ragged_dim != 0:
        raise ValueError(
            f"{name}: expected values (total, num_heads, head_dim), got shape {tuple(values.shape)}; for one head "
            "use arr.with_values(arr.values[:, None, :])"
        )


def _check_like_q(name: str, x: Array, q: Array) -> None:
    """Raise unless `x` has the library, the dtype and the device of `q`."""
    values, lib, other = x.values, q.layout.backend, x.layout.backend
    if other is not lib:
        raise TypeError(f"{name}: expected an array of {lib.name} as q, got {other.name}")
    checks.check_same_dtype(name, values, q.values, "q")
    if lib.on_different_devices(values, q.values):
        raise ValueError(
            f"{name}: expected device {q.device} as q, got {x.device}; use {name}.to_device"
        )


def check_per_head(name: str, x: Any, q: Array) -> None:
    """Raise unless `x` is a dense array (num_heads,)."""
    checks.check_dense(name, x, q.values)
    checks.check_shape(name, x, (q.values.shape[1],), "one number per head")


def check_slopes(slopes: Any, q: Array) -> None:
    """Raise unless ALiBi slopes are a dense array (num_heads,) or (n, num_heads)."""
    checks.check_dense("alibi_slopes", slopes, q.values)
    heads = q.values.shape[1]
    if len(slopes.shape) == 2:
        shape = (q.batch_size, heads)
        checks.check_shape("alibi_slopes", slopes, shape, "one number per row and head")
    else:
        checks.check_shape(
            "alibi_slopes", slopes, (heads,), "one number per head, or (rows, heads)"
        )


def check_dropout(dropout: Any) -> float:
    """Return the rounded probability of dropout; raise unless it is in [0, 1)."""
    dropout = checks.check_number("dropout", dropout)
    if not 0 <= dropout < 1:
        raise ValueError(
            f"dropout: expected a probability in [0, 1), got {dropout}; 0 for no dropout"
        )
    return round_probability(dropout)


def normalize_window(window: Window, causal: bool) -> tuple[int | None, int | None]:
    """Return a window as (left, right); right is 0 for causal calls.

    An integer w, for causal calls only, means the last w keys. A side that is longer than any row
    is unbounded, so that sums of positions and sides fit into int32.
    """
    if window is None:
        return None, 0 if causal else None
    if not isinstance(window, tuple):
        if not causal:
            raise ValueError(f"window: expected (left, right) without causal, got {window!r}")
        last = checks.check_integer("window", window, 1, of=" key, the query's own position")
        return (None if last > MAX_WINDOW else last - 1), 0
    if len(window) != 2:
        raise ValueError(f"window: expected (left, right), got {window}")
    of = ", or None for no bound"
    for i, n in enumerate(window):
        if n is not None:
            checks.check_integer(f"window[{i}]", n, 0, of=of)
    left, right = (None if n is None or n >= MAX_WINDOW else int(n) for n in window)
    return left, 0 if causal else right


def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    window: Window = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    dropout: float = 0.0,
    seed: Any = None,
    deterministic: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Any:
    """Compute scaled dot-product attention within each row: ``softmax(q k^T * scale) v``.

    It uses memory linear in the number of tokens.

    Parameters
    ----------
    q
        Queries (n, None, num_heads, head_dim).
    k, v
        Keys and values (n, None, num_kv_heads, head_dim) and (n, None, num_kv_heads, value_dim), on
        one layout, which may differ from the layout of `q`. num_heads is a multiple of num_kv_heads
        (grouped and multi-query attention): head h uses the keys of head ``h // (num_heads //
        num_kv_heads)``.
    causal
        A query sees the keys up to its own position. Where rows of `q` and `k` differ in length,
        the last query and the last key are aligned, as in FlashAttention.
    window
        An integer ``w``, with `causal`: each query sees the last ``w`` keys up to its own position.
        ``(left, right)``: the keys from ``left`` before to ``right`` after it; None is unbounded.
        With `causal`, ``right`` has no effect.
    scale
        Factor of the scores; ``1 / sqrt(head_dim)`` by default.
    softcap
        Scores become ``softcap * tanh(score / softcap)``.
    alibi_slopes
        (num_heads,) slopes m, or (n, num_heads) with one slope per row and head: m times the
        distance of query and key is subtracted from each score, after the softcap (Press et al.,
        2021). Only the standard implementation differentiates the slopes.
    sinks
        (num_heads,): an extra key per head, whose score is ``sinks[h]`` and whose value is zero
        (Xiao et al., 2023). It has a gradient.
    dropout
        Probability in [0, 1), rounded to a multiple of 2**-16, with which a weight of the softmax
        is set to 0; the other weights are divided by ``1 - dropout``. It does not change the
        log-sum-exp.
    seed
        Source of the random numbers of `dropout`, which needs it: an integer from 0 to 2**63 - 1, or
        an integer array of one element on the device of `q`. Equal seeds drop the same pairs of a
        query and a key in every kernel and library, also if the rows have other keys or values.
    deterministic
        Require the same bits each time, in gradients too; kernels that cannot promise it reject the
        call. The standard implementation is as deterministic as its library.
    return_lse
        Also return the natural log-sum-exp of each query's scores, float32 (float64 for float64).
    kernel
        The provider that must run the call; by default the first kernel that accepts.

    Returns
    -------
    out or (out, lse)
        (n, None, num_heads, value_dim) on the layout of `q`; and (n, None, num_heads). For a query
        that sees no key the output is 0, and the log-sum-exp is -inf, or its sink.

    Raises
    ------
    TypeError
        If q, k and v are not ragged arrays of one library and one floating-point dtype.
    ValueError
        If shapes, heads, rows, devices or the window do not fit; if a bound on the rows is needed
        and not known without reading (give `max_length`); or if the required kernel does not take
        the call.

    Examples
    --------
    >>> import numpy as np, scree
    >>> x = scree.from_lengths(np.arange(6.0).reshape(3, 1, 2), [1, 2])
    >>> scree.attention(x, x, x, causal=True).values[:2, 0]
    array([[0., 1.],
           [2., 3.]])
    """
    key = None
    # Most layers of a model take this path. For short rows the host time of a call dominates. Equal
    # options of these types are the same options; other options are compared by `_attention.run`.
    if (
        type(q) is type(k) is type(v) is Array
        and (layout := q.layout) is k.layout is v.layout
        and alibi_slopes is None
        and sinks is None
        and not (dropout or q.ragged_dim or k.ragged_dim or v.ragged_dim)
        and (causal is True or causal is False)
        and (window is None or type(window) is int)
        and (scale is None or type(scale) is float)
        and (softcap is None or type(softcap) is float)
        and (deterministic is False or deterministic is True)
        and (return_lse is False or return_lse is True)
        and (kernel is None or type(kernel) is str)
    ):
        key = "attention", causal, window, scale, softcap, deterministic, return_lse, kernel
        values = q.values, k.values, v.values
        entry = _attention.recall(values, layout, key)
        if entry is not None:
            try:
                if entry.run_dense is not None:
                    return _from_layout(entry.run_dense(*values), layout)
                return entry.run(q=q, k=k, v=v, alibi_slopes=None)
            except KernelUnavailableError:
                pass  # `_attention.run` below selects another function or kernel
    arrays = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes}
    options: dict[str, Any] = {
        "causal": causal,
        "window": window,
        "scale": scale,
        "softcap": softcap,
        "dropout": check_dropout(dropout) if dropout else 0.0,
        "deterministic": deterministic,
        "return_lse": return_lse,
    }
    # The seed of a call without dropout has no effect, so that it does not change the kernel.
    if options["dropout"]:
        arrays["seed"] = as_seed(seed, check_ragged("q", q))
    if sinks is None:
        return _attention.run(arrays, options, kernel, key)
    checks.check_flag("return_lse", return_lse)  # the call has True in any case, as sinks need it
    options["return_lse"] = True
    if isinstance(q, Array) and q.layout.cut is not None:
        check_per_head("sinks", sinks, q)
        out, lse = _attention.run(arrays, options, kernel)
    else:
        call = AttentionCall(**arrays, **options)
        check_per_head("sinks", sinks, q)
        out, lse = _attention.run_call(call, kernel)
    out, lse = apply_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def apply_sinks(out: Array, lse: Array, sinks: Any) -> tuple[Array, Array]:
    """Add the sinks to the softmax and to the log-sum-exp."""
    xp, wide = lse.layout.xp, lse.dtype
    sinks = xp.broadcast_to(xp.astype(sinks, wide, copy=False), lse.values.shape)
    sees_a_key = lse.values != -float("inf")
    # Queries without keys take a finite value here, so that their output and gradient are finite.
    finite_lse = xp.where(sees_a_key, lse.values, 0.0)
    with_sink = xp.logaddexp(finite_lse, sinks)
    factor = xp.exp(finite_lse - with_sink)[..., None]
    values = xp.astype(xp.astype(out.values, wide, copy=False) * factor, out.dtype, copy=False)
    return out.with_values(values), lse.with_values(xp.where(sees_a_key, with_sink, sinks))


class _Schedule(NamedTuple):
    """The query tiles, ordered by falling number of key tiles, and the keys that they see.

    Attributes
    ----------
    slots
        (total_q,) index of each query among the queries of all tiles.
    tokens
        (tiles, QUERY_TILE) index into q.
    rows
        (tiles,) row of each tile.
    in_row
        (tiles, QUERY_TILE) position of each query in its own row.
    query_positions
        (tiles, QUERY_TILE) position of each query in the row of keys, ``i + len_k - len_q``; it may
        be negative.
    first_key, last_key
        (tiles, QUERY_TILE) positions of the first and the last key that each query sees. The last
        is before the first if it sees none.
    start
        (tiles,) position of the first key that any query sees, rounded down to a key tile.
    start_tile
        (tiles,) index of the key tile at `start` among all key tiles.
    num_key_tiles
        (tiles,) number of key tiles that any query sees; None if unknown on the host.
    num_unmasked
        (tiles,) number of leading key tiles that every query sees whole; None likewise.
    """

    slots: Any
    tokens: Any
    rows: Any
    in_row: Any
    query_positions: Any
    first_key: Any
    last_key: Any
    start: Any
    start_tile: Any
    num_key_tiles: np.ndarray | None
    num_unmasked: np.ndarray | None


class _OnlineSoftmax(NamedTuple):
    """The softmax over the keys so far, per query; the queries are the last axis."""

    values: Any  # sum of the values, weighted by exp(score - maximum)
    total: Any  # sum of the weights
    maximum: Any  # maximum of the scores


@define_operation("attention", AttentionCall)
def _attention(call: AttentionCall) -> Any:
    return _attend_rows(call)


def _attend_rows(call: AttentionCall, queries_before: int = 0) -> Any:
    """Return the result of a call whose rows follow `queries_before` other queries."""
    q, layout, k_layout = call.q, call.q.layout, call.k.layout
    xp, wide = layout.xp, accumulation_dtype(layout.xp, q.values.dtype)
    # Without rows, queries or keys.
    if 0 in (q.offsets.shape[0] - 1, q.values.shape[0], call.k.values.shape[0]):
        return empty_result(call)
    size = min(QUERY_TILE, _length_bound(layout, "q"))
    q_host, k_host = layout.host_offsets, k_layout.host_offsets
    is_known = q_host is not None and k_host is not None
    if q_host is not None and k_host is not None:
        if 0 in (q_host[-1], k_host[-1]):
            return empty_result(call)  # all tokens are in the tail
        bounds = _row_bounds(call, size, q_host, k_host)
        if bounds is not None:
            return _attend_ranges(call, bounds, q_host)
    key = ("attention schedule", size, call.window, is_known)
    schedule = layout.cached(key, lambda: _make_schedule(call, size, is_known), pair=k_layout)
    tiles = k_layout.tiles(KEY_TILE)
    kv_tiles = [_key_tiles(xp, x.values, tiles, wide) for x in (call.k, call.v)]
    chunks = _chunks(call, schedule)
    is_finite = _are_known_finite(call, kv_tiles)
    starts = layout.offsets[:-1] + queries_before if call.dropout else None
    parts = [_attend(call, schedule, chunk, kv_tiles, is_finite, starts) for chunk in chunks]

    def to_tokens(blocks: list[Any], dtype: Any) -> Array:
        joined = blocks[0] if len(blocks) == 1 else xp.concat(blocks, axis=0)
        taken = xp.take(joined, schedule.slots, axis=0)
        return Array.from_layout(xp.astype(taken, dtype, copy=False), layout)

    out = to_tokens([part[0] for part in parts], q.values.dtype)
    return (out, to_tokens([part[1] for part in parts], wide)) if call.return_lse else out


def _are_known_finite(call: AttentionCall, kv_tiles: list[Any]) -> bool:
    """Return whether queries, keys and values are known, without waiting for a device, to be finite.

    A sum may overflow; then they count as not finite.
    """
    xp, backend = call.q.layout.xp, call.q.layout.backend
    if backend.is_compiling():
        return False
    total = sum(xp.sum(x) for x in (call.q.values, *kv_tiles))
    return bool(backend.peek(xp.isfinite(total)))


def _row_bounds(
    call: AttentionCall, size: int, q_host: np.ndarray, k_host: np.ndarray
) -> np.ndarray | None:
    """Return the first row of each range, and the number of rows; None for one range of all rows.

    The tiles of a range need about as much memory as queries, keys and values, or `MAX_TILE_BYTES`.
    """
    if call.q.layout.backend.split is None or call.q.batch_size < 2:
        return None
    q_bytes = 8 * call.num_heads * (call.head_dim + call.v.values.shape[2])
    k_bytes = 8 * call.num_kv_heads * (call.head_dim + call.v.values.shape[2])
    # Most calls return here.
    num_tiles = call.q.batch_size + call.q.total_length // size
    num_key_tiles = call.k.batch_size + call.k.total_length // KEY_TILE
    if num_tiles * size * q_bytes + num_key_tiles * KEY_TILE * k_bytes <= MAX_TILE_BYTES:
        return None
    limit = max(MAX_TILE_BYTES, int(q_host[-1]) * q_bytes + int(k_host[-1]) * k_bytes)
    costs = -(-np.diff(q_host).astype(np.int64) // size) * (size * q_bytes)
    costs += -(-np.diff(k_host).astype(np.int64) // KEY_TILE) * (KEY_TILE * k_bytes)
    ends = host_offsets_of(costs)
    starts = equal_cost_bounds(ends, -(-int(ends[-1]) // limit))
    bounds = np.unique([*starts, call.q.batch_size])
    return bounds if bounds.size > 2 else None


def _attend_ranges(call: AttentionCall, bounds: np.ndarray, q_host: np.ndarray) -> Any:
    """Run the call on the rows between the bounds, one range after the other."""
    q, k, results = call.q, call.k, []
    v = Array.from_layout(call.v.values, k.layout)
    parts = zip(*(split_rows(x, bounds) for x in (q, k, v)), strict=True)
    for i, (part_q, part_k, part_v) in enumerate(parts):
        part_v, slopes = Array.from_layout(part_v.values, part_k.layout), call.alibi_slopes
        if slopes is not None and len(slopes.shape) == 2:
            slopes = slopes[int(bounds[i]) : int(bounds[i + 1]), :]
        part = replace(call, q=part_q, k=part_k, v=part_v, alibi_slopes=slopes, return_lse=True)
        results.append(_attend_rows(part, int(q_host[bounds[i]])))
    out, lse = (join_rows(q, [x.values for x in parts]) for parts in zip(*results, strict=True))
    return (q.with_values(out), q.with_values(lse)) if call.return_lse else q.with_values(out)


def empty_result(call: AttentionCall) -> Any:
    """Return the result of a call in which no query sees a key.

    It depends on the inputs, so that a library that records a graph finds a gradient of 0.
    """
    q, v, xp = call.q, call.v, call.q.layout.xp
    shape, device = tuple(q.values.shape[:2]), q.layout.device
    wide = accumulation_dtype(xp, q.values.dtype)
    zero = sum(xp.sum(x.values[:0, ...]) for x in (q, call.k, v))
    out = q.with_values(xp.zeros((*shape, v.values.shape[2]), dtype=q.dtype, device=device) + zero)
    if not call.return_lse:
        return out
    lse = xp.full(shape, -float("inf"), dtype=wide, device=device)
    return out, q.with_values(lse + xp.astype(zero, wide, copy=False))


def _length_bound(layout: Layout, name: str) -> int:
    """Return a bound on the rows, at least 1; raise if none is known without reading the offsets."""
    if layout.max_length is None and layout.host_offsets is None:
        raise ValueError(
            f"{name}: expected rows of known maximum length, got offsets that only a device can read; make {name} with "
            f"max_length=, or call {name}.validate(), which reads the offsets once"
        )
    return max(layout.max_length_bound, 1)


def _make_schedule(call: AttentionCall, size: int, is_known: bool) -> _Schedule:
    q_layout, k_layout, (left, right) = call.q.layout, call.k.layout, call.window
    q, k = (x.on_host() if is_known else x for x in (q_layout, k_layout))
    tiles, xp = q.tiles(size), q.xp

    def per_tile(x: Any) -> Any:
        return xp.take(xp.astype(x, q.offsets.dtype, copy=False), tiles.rows, axis=0)

    q_lengths, k_lengths = per_tile(q.lengths), per_tile(k.lengths)
    in_row = tiles.starts[:, None] + q.arange(size)[None, :]
    is_query = in_row < q_lengths[:, None]
    positions = in_row + (k_lengths - q_lengths)[:, None]
    last = xp.broadcast_to(k_lengths[:, None] - 1, positions.shape)
    last = last if right is None else xp.minimum(last, positions + right)
    last = xp.where(is_query, last, xp.full_like(last, -1))
    first = xp.zeros_like(positions)
    first = first if left is None else xp.maximum(positions - left, first)
    start = first[:, 0] // KEY_TILE * KEY_TILE
    start_tile = per_tile(k.tiles(KEY_TILE).layout.offsets[:-1]) + start // KEY_TILE
    slots = q.tile_slots(size)
    per_query_tile = tiles.tokens, tiles.rows, in_row, positions, first, last, start, start_tile
    if not is_known:
        return _Schedule(slots, *per_query_tile, None, None)
    counts = np.maximum(-(-(last.max(axis=1) + 1 - start) // KEY_TILE), 1)
    # Slots without a query do not count. From query to query `last` rises by at most 1. So if a
    # query before all keys has `last` < 0 and a later one has not, some query has `last` == 0, and
    # no key tile is unmasked.
    seen_by_all = np.where(last < 0, last.max(axis=1, keepdims=True), last).min(axis=1) + 1
    num_unmasked = np.where(first.max(axis=1) <= start, (seen_by_all - start) // KEY_TILE, 0)
    # Sort the query tiles by falling number of key tiles.
    order = np.argsort(-counts, kind="stable")
    slots = np.argsort(order)[slots // size] * size + slots % size
    arrays = [q_layout.to_index(x) for x in (slots, *(x[order] for x in per_query_tile))]
    return _Schedule._make([*arrays, counts[order], num_unmasked[order]])


def _chunks(call: AttentionCall, schedule: _Schedule) -> list[slice]:
    """Return slices of query tiles with at most `MAX_SCORES` scores per key tile.

    A slice has at least one query tile. There is one slice if the rows are unknown on the host.
    """
    tiles, size = schedule.tokens.shape
    if schedule.num_key_tiles is None:
        return [slice(0, tiles)]
    step = max(1, MAX_SCORES // (call.num_heads * size * KEY_TILE))
    return [slice(i, min(i + step, tiles)) for i in range(0, tiles, step)]


def _key_tile_steps(
    call: AttentionCall, schedule: _Schedule, chunk: slice
) -> Iterator[tuple[int, int, bool]]:
    """Yield (step, active, is_masked) for each step over the key tiles of a chunk.

    Step j takes key tile j of each query tile. The first `active` query tiles of the chunk have
    such a tile, as they are ordered by their number of key tiles.
    """
    if schedule.num_key_tiles is None or schedule.num_unmasked is None:
        longest, (left, right) = _length_bound(call.k.layout, "k"), call.window
        if left is not None and right is not None:
            # The keys that a query tile sees, and those that rounding its start down adds.
            longest = min(longest, left + right + schedule.tokens.shape[1] + KEY_TILE)
        yield from ((j, chunk.stop - chunk.start, True) for j in range(-(-longest // KEY_TILE)))
        return
    counts, num_unmasked = schedule.num_key_tiles[chunk], schedule.num_unmasked[chunk]
    for j in range(int(counts[0])):
        active = int(np.count_nonzero(counts > j))
        yield j, active, bool((num_unmasked[:active] <= j).any())


def _attend(
    call: AttentionCall,
    schedule: _Schedule,
    chunk: slice,
    kv_tiles: list[Any],
    is_finite: bool,
    row_starts: Any,
) -> tuple[Any, Any]:
    """Return a chunk's output (queries, num_heads, value_dim) and log-sum-exp (queries, num_heads).

    Scores are keys by queries, (tiles, num_kv_heads, KEY_TILE, groups * size), so that maxima and
    sums run along the slow axis. `is_finite` tells that the inputs are known to be finite.
    `row_starts` has the number of queries before each row, for dropout.
    """
    xp, kv_heads, k_layout = call.q.layout.xp, call.num_kv_heads, call.k.layout
    num_tiles, size = schedule.tokens[chunk, :].shape
    sees_a_key = None if is_finite else schedule.last_key[chunk, :] >= 0
    q = _query_tiles(call, schedule.tokens[chunk, :], sees_a_key, kv_tiles[0].dtype)
    state: _OnlineSoftmax | None = None
    finished: list[_OnlineSoftmax] = []
    for step, active, is_masked in _key_tile_steps(call, schedule, chunk):
        if state is not None and active < q.shape[0]:
            # Query tiles without further key tiles leave; those with the fewest leave first.
            finished.append(_OnlineSoftmax(*[x[active:, ...] for x in state]))
            state, q = _OnlineSoftmax(*[x[:active, ...] for x in state]), q[:active, ...]
        part = slice(chunk.start, chunk.start + active)
        tile = schedule.start_tile[part] + step
        tile = xp.where(tile < kv_tiles[0].shape[0], tile, 0)  # out of bounds after the last key
        shape = (active, kv_heads, KEY_TILE, -1)
        k, v = [xp.reshape(xp.take(x, tile, axis=0), shape) for x in kv_tiles]
        in_span = step * KEY_TILE + k_layout.arange(KEY_TILE)
        keys = schedule.start[part][:, None] + in_span[None, :]
        has_nan, special = None, None
        if is_masked and not is_finite:
            # In the gradient of a query, the gradient 0 of a score is multiplied by a key that it does
            # not see.
            is_nan = xp.isnan(k)
            k, has_nan = xp.where(is_nan, 0.0, k), xp.any(is_nan, axis=-1)
        slopes = _slopes(call, schedule.rows[part], q.dtype)
        score = _scores(call, q, k, keys, schedule.query_positions[part, :], slopes)
        if is_masked:
            visible = keys[:, :, None] <= schedule.last_key[part, :][:, None, :]
            if call.window[0] is not None:
                visible = visible & (keys[:, :, None] >= schedule.first_key[part, :][:, None, :])
            if schedule.num_key_tiles is None:
                # The tile may belong to another row. Its weights are 0, but 0 * NaN is NaN.
                v = xp.where(xp.any(visible, axis=(1, 2))[:, None, None, None], v, 0.0)
            by_query = xp.reshape(score, (active, kv_heads, KEY_TILE, -1, size))
            if has_nan is not None:
                by_query = xp.where(append_axes(xp, has_nan, 5), float("nan"), by_query)
                v, special = _without_special_values(xp, v, visible)
            by_query = xp.where(visible[:, None, :, None, :], by_query, -float("inf"))
            score = xp.reshape(by_query, score.shape)
        kept = None
        if row_starts is not None:
            kept = _kept(call, schedule, part, keys[:, 0], row_starts)
        state = _update(xp, state, score, v, is_masked, kept)
        if special is not None:
            by_query = xp.reshape(state.values, (*state.values.shape[:3], -1, size))
            by_query = by_query + special[:, :, :, None, :]
            state = state._replace(values=xp.reshape(by_query, state.values.shape))
    assert state is not None  # there is at least one step
    parts = zip(*reversed([*finished, state]), strict=True)
    state = _OnlineSoftmax(*[xp.concat(x, axis=0) if finished else x[0] for x in parts])
    nonzero = state.total != 0  # True for NaN, which must reach the result
    divisor = xp.where(nonzero, state.total, 1.0)
    out = xp.where(nonzero, state.values, 0.0) / divisor
    if call.dropout:
        out = out * (1 / (1 - call.dropout))
    lse = xp.where(nonzero, state.maximum + xp.log(divisor), -float("inf"))

    def to_queries(x: Any) -> Any:
        x = xp.reshape(x, (num_tiles, kv_heads, x.shape[2], -1, size))
        x = xp.permute_dims(x, (0, 4, 1, 3, 2))
        return xp.reshape(x, (num_tiles * size, call.num_heads, -1))

    return to_queries(out), to_queries(lse)[..., 0]


def _query_tiles(call: AttentionCall, tokens: Any, sees_a_key: Any, dtype: Any) -> Any:
    """Return the scaled queries (tiles, num_kv_heads, head_dim, groups * size) at `tokens`.

    Queries that see no key become 0, unless `sees_a_key` is None. Some of them are of another row:
    with NaN their gradient, 0, would make the gradient of the keys NaN.
    """
    xp, kv_heads, (tiles, size) = call.q.layout.xp, call.num_kv_heads, tokens.shape
    q = xp.take(call.q.values, xp.reshape(tokens, (-1,)), axis=0)
    if sees_a_key is not None:
        q = xp.where(xp.reshape(sees_a_key, (-1, 1, 1)), q, xp.zeros_like(q))
    q = xp.astype(q, dtype, copy=False) * call.scale
    q = xp.permute_dims(xp.reshape(q, (tiles, size, kv_heads, -1, call.head_dim)), (0, 2, 4, 3, 1))
    return xp.reshape(q, (tiles, kv_heads, call.head_dim, -1))


def _key_tiles(xp: Any, values: Any, tiles: Tiles, dtype: Any) -> Any:
    """Return keys or values by tile, then by head: (tiles, num_heads * KEY_TILE * dim).

    Tokens after the end of a row are 0.
    """
    blocks = gather_tiles(xp, values, tiles, 0)
    blocks = xp.permute_dims(xp.astype(blocks, dtype, copy=False), (0, 2, 1, 3))
    return xp.reshape(blocks, (blocks.shape[0], -1))


def _slopes(call: AttentionCall, rows: Any, dtype: Any) -> Any:
    """Return the ALiBi slopes (tiles or 1, num_kv_heads, 1, groups, 1) of tiles, or None."""
    if call.alibi_slopes is None:
        return None
    xp, slopes = call.q.layout.xp, call.alibi_slopes
    if len(slopes.shape) == 2:
        slopes = xp.take(slopes, rows, axis=0)
    slopes = xp.astype(slopes, dtype, copy=False)
    groups = call.num_heads // call.num_kv_heads
    return xp.reshape(slopes, (-1, call.num_kv_heads, 1, groups, 1))


def _kept(
    call: AttentionCall, schedule: _Schedule, part: slice, first_keys: Any, row_starts: Any
) -> Any:
    """Return which weights dropout keeps, in the form of the scores of `_attend`."""
    xp, queries = call.q.layout.xp, schedule.in_row[part, :]
    starts = xp.take(row_starts, schedule.rows[part], axis=0)
    layout, heads = call.q.layout, call.num_heads
    kept = kept_pairs(layout, call.seed, call.dropout, queries, first_keys, starts, heads, KEY_TILE)
    shape = (kept.shape[0], call.num_kv_heads, -1, KEY_TILE, queries.shape[1])
    kept = xp.permute_dims(xp.reshape(kept, shape), (0, 1, 3, 2, 4))
    return xp.reshape(kept, (*kept.shape[:3], -1))


def _scores(call: AttentionCall, q: Any, k: Any, keys: Any, queries: Any, slopes: Any) -> Any:
    """Return the scores of tiles, whose keys and queries are at the positions `keys`, `queries`."""
    xp, score = call.q.layout.xp, call.q.layout.xp.matmul(k, q)
    if call.softcap is not None:
        score = xp.tanh(score / call.softcap) * call.softcap
    if slopes is None:
        return score
    distance = xp.astype(xp.abs(keys[:, :, None] - queries[:, None, :]), score.dtype)
    by_head = xp.reshape(score, (*score.shape[:3], slopes.shape[3], queries.shape[1]))
    return xp.reshape(by_head - slopes * distance[:, None, :, None, :], score.shape)


#: Number per key: a float32 holds the sum of up to 64 numbers of each kind.
INFINITE, MINUS_INFINITE, NOT_A_NUMBER = 1.0, 256.0, 65536.0


def _without_special_values(xp: Any, v: Any, visible: Any) -> tuple[Any, Any]:
    """Return values (tiles, kv_heads, keys, dim) with 0 for NaN and infinities, and their sums.

    The sums are (tiles, kv_heads, dim, queries): 0, an infinity or NaN.
    """
    is_infinite, is_positive = xp.isinf(v), v > 0
    kind = xp.where(is_positive, INFINITE, xp.full_like(v, MINUS_INFINITE))
    kind = xp.where(is_infinite, kind, xp.where(xp.isnan(v), NOT_A_NUMBER, xp.zeros_like(v)))
    counts = xp.matmul(xp.matrix_transpose(kind), xp.astype(visible[:, None, :, :], v.dtype))
    is_minus = (counts < NOT_A_NUMBER) & (counts % MINUS_INFINITE == 0)
    sums = xp.where(is_minus, -float("inf"), xp.full_like(counts, float("nan")))
    sums = xp.where(counts < MINUS_INFINITE, float("inf"), sums)
    return xp.where(xp.isfinite(v), v, 0.0), xp.where(counts == 0, 0.0, sums)


def _update(
    xp: Any, state: _OnlineSoftmax | None, score: Any, v: Any, is_masked: bool, kept: Any
) -> _OnlineSoftmax:
    """Return the online softmax with one more tile of keys; `kept` are weights without dropout."""
    maximum = xp.max(score, axis=2, keepdims=True)
    maximum = maximum if state is None else xp.maximum(maximum, state.maximum)
    # A query that has seen no key has the maximum -inf, and -inf - -inf is NaN.
    base = xp.where(maximum == -float("inf"), 0.0, maximum) if is_masked else maximum
    weights = xp.exp(score - base)
    total = xp.sum(weights, axis=2, keepdims=True)
    weights = weights if kept is None else xp.where(kept, weights, 0.0)
    values = xp.matmul(xp.matrix_transpose(v), weights)
    if state is not None:
        rescale = xp.exp(state.maximum - base)
        total, values = state.total * rescale + total, state.values * rescale + values
    return _OnlineSoftmax(values, total, maximum)
