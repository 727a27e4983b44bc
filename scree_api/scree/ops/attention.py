"""Attention of every row to itself, or to the row of the same index in another batch.

Never across rows.

The standard implementation cuts the queries into tiles. For all query tiles of a chunk at once it
iterates over the tiles of keys that any of them sees, with the online softmax of FlashAttention
(Dao et al., 2022; Milakov and Gimelshein, 2018). The memory is one chunk of scores besides the
result; the work is the visible tiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..array import Array
from ..broadcasting import accumulation_dtype, check_ragged, check_shared_layout
from ..checks import (
    check_dense,
    check_flag,
    check_floating,
    check_integer,
    check_number,
    check_same_dtype,
    check_shape,
)
from ..dispatch.operation import define_operation
from ..layout import Layout
from .segment import gather_tiles

__all__ = ["attention"]

QUERIES = KEYS = 64  # tile sizes
MAX_SCORES = 1 << 16  # of one chunk of query tiles, where the rows are known on the host

Window = int | tuple[int | None, int | None] | None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A validated call of `attention`, without sinks, which are applied to the result.

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
        (num_heads,) or None; see `attention`.
    deterministic
        Equal inputs must give equal bits, in gradients too. A kernel that cannot promise it rejects
        the call.
    return_lse
        Whether the log-sum-exp of the scores, (total_q, num_heads) float32, is returned too.
    """

    q: Array
    k: Array
    v: Array
    causal: bool = False
    window: Any = None  # int | tuple[int | None, int | None] | None in, (left, right) out
    scale: Any = None  # float | None in, float out
    softcap: float | None = None
    alibi_slopes: Any = None
    deterministic: bool = False
    return_lse: bool = False

    def __post_init__(self) -> None:
        q, k, v = self.q, self.k, self.v
        _check_values("q", check_ragged("q", q), q)
        if k is not q:
            _check_values("k", check_ragged("k", k), q)
        if v is not k and v is not q:
            _check_values("v", check_ragged("v", v), q)
        check_floating("q", q.values)
        if k.offsets.shape != q.offsets.shape:
            raise ValueError(f"k: expected {q.batch_size} rows as q, got {k.batch_size}")
        if v.offsets is not k.offsets:
            check_shared_layout("attention: k and v", (k, v))
        (_, heads, dim), (_, kv_heads, k_dim) = q.values.shape, k.values.shape
        if dim == 0:
            raise ValueError("q: expected a head_dim of at least 1, got 0")
        if k_dim != dim:
            raise ValueError(f"k: expected head_dim {dim} as q, got {k_dim}")
        if v.values.shape[1] != kv_heads:
            raise ValueError(f"v: expected {kv_heads} heads as k, got {v.values.shape[1]}")
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(
                f"q: expected num_heads to be a multiple of num_kv_heads {kv_heads}, got {heads}"
            )
        causal = check_flag("causal", self.causal)
        check_flag("deterministic", self.deterministic)
        check_flag("return_lse", self.return_lse)
        if self.softcap is not None:
            check_number("softcap", self.softcap, above=0)
        scale = self.scale
        scale = 1 / math.sqrt(dim) if scale is None else check_number("scale", scale)
        if self.alibi_slopes is not None:
            check_per_head("alibi_slopes", self.alibi_slopes, q)
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


def _check_values(name: str, x: Array, q: Array) -> None:
    values = x.values
    if values.ndim != 3 or x.ragged_dim != 0:
        raise ValueError(
            f"{name}: expected values (total, num_heads, head_dim), got shape {tuple(values.shape)}; for one head "
            "use arr.with_values(arr.values[:, None, :])"
        )
    if x is q:
        return
    backend = q.layout.backend
    if x.layout.backend is not backend:
        raise TypeError(
            f"{name}: expected an array of {backend.name} as q, got {x.layout.backend.name}"
        )
    check_same_dtype(name, values, q.values, "q")
    if backend.on_different_devices(values, q.values):
        raise ValueError(
            f"{name}: expected device {q.device} as q, got {x.device}; use {name}.to_device"
        )


def check_per_head(name: str, x: Any, q: Array) -> None:
    """Raise unless `x` is a dense array (num_heads,)."""
    check_dense(name, x, q.values)
    check_shape(name, x, (q.values.shape[1],), "one number per head")


def normalize_window(window: Window, causal: bool) -> tuple[int | None, int | None]:
    """Return a window as (left, right); right is 0 for causal calls."""
    if window is None:
        return None, 0 if causal else None
    if not isinstance(window, tuple):
        if not causal:
            raise ValueError(f"window: expected (left, right) without causal, got {window!r}")
        return check_integer("window", window, 1, of=" key, the query's own position") - 1, 0
    if len(window) != 2:
        raise ValueError(f"window: expected (left, right), got {window}")
    of = ", or None for no bound"
    left, right = (
        None if n is None else check_integer(f"window[{i}]", n, 0, of=of)
        for i, n in enumerate(window)
    )
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
    deterministic: bool = False,
    return_lse: bool = False,
    kernel: str | None = None,
) -> Any:
    """Compute scaled dot-product attention within each row: ``softmax(q k^T * scale) v``.

    The memory is O(total tokens).

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
        ``w`` with `causal`: only the w keys that end at the query's own position. ``(left,
        right)``: the keys from ``left`` before to ``right`` after it; None is unbounded.
    scale
        Factor of the scores; ``1 / sqrt(head_dim)`` by default.
    softcap
        Scores become ``softcap * tanh(score / softcap)``.
    alibi_slopes
        (num_heads,) slopes m: m times the distance of query and key is subtracted from each score,
        after the softcap (Press et al., 2021). Kernels treat it as a constant without a gradient.
    sinks
        (num_heads,): one more score per head, with the value 0, in the softmax and in the
        log-sum-exp of every query (Xiao et al., 2023). It has a gradient.
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
        (n, None, num_heads, value_dim) on the layout of `q`; and (n, None, num_heads). A query that
        sees no key gives 0, and -inf, or its sink.

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
    arrays = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes}
    options: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "deterministic": deterministic,
        "return_lse": return_lse,
    }  # fmt: skip
    if sinks is None:
        return _attention.run(arrays, options, kernel)
    check_flag("return_lse", return_lse)
    call = AttentionCall(**arrays, **{**options, "return_lse": True})
    check_per_head("sinks", sinks, q)
    out, lse = _attention.run_call(call, kernel)
    out, lse = _apply_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _apply_sinks(out: Array, lse: Array, sinks: Any) -> tuple[Array, Array]:
    """Rescale the result for one more score with the value 0."""
    xp, wide = lse.layout.xp, lse.dtype
    sinks = xp.broadcast_to(xp.astype(sinks, wide, copy=False), lse.values.shape)
    sees_a_key = lse.values != -float("inf")
    total = xp.logaddexp(xp.where(sees_a_key, lse.values, sinks), sinks)
    factor = xp.exp(xp.where(sees_a_key, lse.values, sinks) - total)[..., None]
    values = xp.astype(xp.astype(out.values, wide, copy=False) * factor, out.dtype, copy=False)
    return out.with_values(values), lse.with_values(xp.where(sees_a_key, total, sinks))


class _Schedule(NamedTuple):
    """The query tiles by falling work, and the keys that each tile and each query sees.

    Attributes
    ----------
    slots
        (total_q,) index of each query in the tiles.
    tokens
        (tiles, QUERIES) index into q.
    query_positions
        (tiles, QUERIES) position of each query, in the row of keys.
    first, last
        (tiles, QUERIES) positions of the first and the last key that each query sees.
    key_starts
        (tiles,) position of the first key that any query sees, rounded down to a tile.
    key_tiles
        (tiles,) number of the tile of that key among all tiles of keys.
    rounds
        (tiles,) key tiles per query tile, falling; None if unknown on the host.
    unmasked
        (tiles,) number of leading key tiles that every query sees whole.
    """

    slots: Any
    tokens: Any
    query_positions: Any
    first: Any
    last: Any
    key_starts: Any
    key_tiles: Any
    rounds: np.ndarray | None
    unmasked: np.ndarray | None


@define_operation("attention", AttentionCall)
def _attention(call: AttentionCall) -> Any:
    q, layout = call.q, call.q.layout
    xp, wide = layout.xp, accumulation_dtype(layout.xp, q.values.dtype)
    if 0 in (q.offsets.shape[0] - 1, q.values.shape[0], call.k.values.shape[0]):
        return _no_keys(call, wide)
    bound, k_layout = _static_bound(layout, "q"), call.k.layout
    size = min(QUERIES, bound)
    key = ("attention schedule", size, call.window, layout.host is None)
    schedule = layout.cached(key, lambda: _make_schedule(call, size), pair=k_layout)
    tiles = k_layout.tiles(KEYS)
    k_tiles, v_tiles = (_key_tiles(xp, x.values, tiles, wide) for x in (call.k, call.v))
    chunks = _chunks(call, schedule)
    parts = [_attend(call, schedule, chunk, k_tiles, v_tiles, wide) for chunk in chunks]

    def to_tokens(blocks: list[Any], dtype: Any) -> Array:
        joined = blocks[0] if len(blocks) == 1 else xp.concat(blocks, axis=0)
        taken = xp.take(joined, schedule.slots, axis=0)
        return Array.from_layout(xp.astype(taken, dtype, copy=False), layout)

    out = to_tokens([part[0] for part in parts], q.values.dtype)
    return (out, to_tokens([part[1] for part in parts], wide)) if call.return_lse else out


def _no_keys(call: AttentionCall, wide: Any) -> Any:
    q, v, xp = call.q, call.v, call.q.layout.xp
    shape, device = tuple(q.values.shape[:2]), q.layout.device
    zeros = xp.zeros((*shape, v.values.shape[2]), dtype=q.dtype, device=device)
    lse = xp.full(shape, -float("inf"), dtype=wide, device=device)
    out = q.with_values(zeros)
    return (out, q.with_values(lse)) if call.return_lse else out


def _static_bound(layout: Layout, name: str) -> int:
    if layout.max_length is None and layout.host is None:
        raise ValueError(
            f"{name}: attention needs a bound on its rows that is known without reading the offsets; give max_length=, or call "
            f"{name}.validate(), which reads them once"
        )
    return max(layout.max_length_bound, 1)


def _make_schedule(call: AttentionCall, size: int) -> _Schedule:
    q_layout, k_layout, (left, right) = call.q.layout, call.k.layout, call.window
    is_known = q_layout.host is not None and k_layout.host is not None
    q, k = (x.on_host() if is_known else x for x in (q_layout, k_layout))
    tiles, xp = q.tiles(size), q.xp

    def per_tile(x: Any) -> Any:
        return xp.take(xp.astype(x, q.offsets.dtype, copy=False), tiles.rows, axis=0)

    q_lengths, k_lengths = per_tile(q.lengths), per_tile(k.lengths)
    positions = tiles.starts[:, None] + q.arange(size)[None, :]
    is_query = positions < q_lengths[:, None]
    positions = positions + (k_lengths - q_lengths)[:, None]
    last = xp.broadcast_to(k_lengths[:, None] - 1, positions.shape)
    last = last if right is None else xp.minimum(last, positions + right)
    last = xp.where(is_query, last, xp.full_like(last, -1))
    first = xp.zeros_like(positions)
    first = first if left is None else xp.maximum(positions - left, first)
    key_starts = first[:, 0] // KEYS * KEYS
    key_tiles = per_tile(k.tiles(KEYS).layout.offsets[:-1]) + key_starts // KEYS
    slots = q.tile_slots(size)
    if not is_known:
        return _Schedule(
            slots, tiles.tokens, positions, first, last, key_starts, key_tiles, None, None
        )
    rounds = np.maximum(-(-(last.max(axis=1) + 1 - key_starts) // KEYS), 1)
    seen_by_all = np.where(last < 0, last.max(axis=1, keepdims=True), last).min(axis=1) + 1
    unmasked = np.where(first.max(axis=1) <= key_starts, (seen_by_all - key_starts) // KEYS, 0)
    order = np.argsort(-rounds, kind="stable")
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size)
    slots = inverse[slots // size] * size + slots % size
    per_tile_arrays = (tiles.tokens, positions, first, last, key_starts, key_tiles)
    arrays = [q_layout.index_from_host(x) for x in (slots, *(x[order] for x in per_tile_arrays))]
    return _Schedule._make([*arrays, rounds[order], unmasked[order]])


def _chunks(call: AttentionCall, schedule: _Schedule) -> list[slice]:
    """Return runs of query tiles whose scores with one tile of keys fit into the cache.

    One run under a trace.
    """
    tiles, size = schedule.tokens.shape
    if schedule.rounds is None:
        return [slice(0, tiles)]
    step = max(1, MAX_SCORES // (call.q.values.shape[1] * size * KEYS))
    return [slice(i, min(i + step, tiles)) for i in range(0, tiles, step)]


def _rounds(
    call: AttentionCall, schedule: _Schedule, chunk: slice
) -> Iterator[tuple[int, int, bool]]:
    """Yield per tile of keys.

    Its number, how many query tiles of the chunk see it, and whether a mask is needed.
    """
    if schedule.rounds is None or schedule.unmasked is None:
        longest, (left, right) = _static_bound(call.k.layout, "k"), call.window
        if left is not None and right is not None:
            longest = min(longest, left + right + schedule.tokens.shape[1] + KEYS)
        yield from ((j, chunk.stop - chunk.start, True) for j in range(-(-longest // KEYS)))
        return
    rounds, unmasked = schedule.rounds[chunk], schedule.unmasked[chunk]
    for j in range(int(rounds[0])):
        active = int(np.count_nonzero(rounds > j))
        yield j, active, bool((unmasked[:active] <= j).any())


def _attend(
    call: AttentionCall, schedule: _Schedule, chunk: slice, k_tiles: Any, v_tiles: Any, wide: Any
) -> tuple[Any, Any]:
    """Return the output and the log-sum-exp of a chunk of query tiles.

    They are (queries, num_heads, value_dim) and (queries, num_heads).

    Scores are keys by queries, (tiles, num_kv_heads, KEYS, groups * size), so that maxima and sums
    run along the slow axis.
    """
    layout, k_layout, values = call.q.layout, call.k.layout, call.q.values
    xp, tokens, (_, heads, dim) = layout.xp, schedule.tokens[chunk, :], values.shape
    kv_heads, (tiles, size) = call.k.values.shape[1], tokens.shape
    groups = heads // kv_heads
    q = xp.take(values, xp.reshape(tokens, (-1,)), axis=0)
    q = xp.astype(q, wide, copy=False) * call.scale
    q = xp.permute_dims(xp.reshape(q, (tiles, size, kv_heads, groups, dim)), (0, 2, 4, 3, 1))
    q = xp.reshape(q, (tiles, kv_heads, dim, groups * size))
    minus_inf = xp.full((), -float("inf"), dtype=wide, device=layout.device)
    state: list[Any] = []  # accumulated values, sum of weights, maximum of the scores so far
    finished: list[list[Any]] = []  # states of query tiles without further keys, the longest last
    for j, active, masked in _rounds(call, schedule, chunk):
        if state and active < q.shape[0]:
            finished.append([x[active:, ...] for x in state])
            q, *state = [x[:active, ...] for x in (q, *state)]
        part = slice(chunk.start, chunk.start + active)
        tile = schedule.key_tiles[part] + j
        tile = xp.where(tile < k_tiles.shape[0], tile, 0)  # a query tile without further keys
        k, v = [
            xp.reshape(xp.take(x, tile, axis=0), (active, kv_heads, KEYS, -1))
            for x in (k_tiles, v_tiles)
        ]
        keys = j * KEYS + k_layout.arange(KEYS)
        keys = schedule.key_starts[part][:, None] + keys[None, :]
        score = xp.matmul(k, q)
        if call.softcap is not None:
            score = xp.tanh(score / call.softcap) * call.softcap
        if call.alibi_slopes is not None:
            score = _subtract_alibi(call, score, keys, schedule.query_positions[part, :])
        if masked:
            visible = keys[:, :, None] <= schedule.last[part, :][:, None, :]
            if call.window[0] is not None:
                visible = visible & (keys[:, :, None] >= schedule.first[part, :][:, None, :])
            if schedule.rounds is None:
                # The tiles after a row's last tile belong to other rows. A weight of 0 would not
                # hide their NaN.
                v = xp.where(xp.any(visible, axis=(1, 2))[:, None, None, None], v, 0.0)
            score = xp.reshape(score, (active, kv_heads, KEYS, groups, size))
            score = xp.where(visible[:, None, :, None, :], score, minus_inf)
            score = xp.reshape(score, (active, kv_heads, KEYS, groups * size))
        maximum = xp.max(score, axis=2, keepdims=True)
        maximum = xp.maximum(maximum, state[2]) if state else maximum
        base = xp.where(maximum == minus_inf, 0.0, maximum) if masked else maximum
        weight = xp.exp(score - base)
        total = xp.sum(weight, axis=2, keepdims=True)
        acc = xp.matmul(xp.matrix_transpose(v), weight)
        if state:
            rescale = xp.exp(state[2] - base)
            total, acc = state[1] * rescale + total, state[0] * rescale + acc
        state = [acc, total, maximum]
    finished.append(state)
    acc, total, maximum = [
        xp.concat(x[::-1], axis=0) if len(x) > 1 else x[0]
        for x in map(list, zip(*finished, strict=True))
    ]
    nonzero = total != 0  # True for NaN, which must reach the result
    divisor = xp.where(nonzero, total, 1.0)
    out = xp.where(nonzero, acc, 0.0) / divisor
    lse = xp.where(nonzero, maximum + xp.log(divisor), minus_inf)

    def by_query(x: Any) -> Any:
        x = xp.reshape(x, (tiles, kv_heads, x.shape[2], groups, size))
        return xp.reshape(xp.permute_dims(x, (0, 4, 1, 3, 2)), (tiles * size, heads, -1))

    return by_query(out), by_query(lse)[..., 0]


def _subtract_alibi(call: AttentionCall, score: Any, keys: Any, queries: Any) -> Any:
    """Subtract the slopes times the distance of the positions of `keys` and `queries`."""
    xp = call.q.layout.xp
    distance = xp.abs(keys[:, :, None] - queries[:, None, :])
    distance = xp.astype(distance, score.dtype)[:, None, :, None, :]
    slopes = xp.astype(call.alibi_slopes, score.dtype, copy=False)
    slopes = xp.reshape(slopes, (1, call.num_kv_heads, 1, -1, 1))
    by_head = xp.reshape(score, (*score.shape[:3], slopes.shape[3], queries.shape[1]))
    return xp.reshape(by_head - slopes * distance, score.shape)


def _key_tiles(xp: Any, values: Any, tiles: Any, dtype: Any) -> Any:
    """Return (tiles, num_heads * KEYS * dim) the tokens by tile, then by head.

    0 after the end of a row.
    """
    blocks = gather_tiles(xp, values, tiles, 0)
    blocks = xp.permute_dims(xp.astype(blocks, dtype, copy=False), (0, 2, 1, 3))
    return xp.reshape(blocks, (blocks.shape[0], -1))
