"""Attention of every row to itself, or to the row of the same number in another batch; never across rows.

The standard path cuts the queries into tiles and walks, for all tiles of a chunk at once, over the tiles of keys that any of
them may see, with the running softmax of FlashAttention (Dao et al., 2022; Milakov and Gimelshein, 2018). Memory is one
chunk of scores beside the result, work is that of the tiles that are visible.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..array import Array
from ..broadcasting import accumulator, ragged, shared_layout
from ..checks import dense, flag, floating, integer, number
from ..dispatch import call_cache
from ..dispatch.registry import declare, run
from .segment import tiled

QUERIES = KEYS = 64  # tile sizes
SCORES = 1 << 16  # scores of one chunk of query tiles, where the rows are known on the host

Window = int | tuple[int | None, int | None] | None


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One validated attention call.

    Attributes
    ----------
    q
        Queries, values (total_q, num_heads, head_dim).
    k, v
        Keys and values on one layout, (total_k, num_kv_heads, head_dim) and (total_k, num_kv_heads, value_dim).
    causal
        Query i sees key j where ``j <= i + len_k - len_q`` (aligned bottom-right).
    window
        (left, right): key j is seen from ``i + len_k - len_q - left`` to ``... + right``; None is unbounded. Causal calls
        have right = 0.
    scale
        Factor of the scores.
    softcap
        ``softcap * tanh(score / softcap)`` replaces the score, or None.
    return_lse
        Whether the log-sum-exp of the scores, (total_q, num_heads) float32, is returned too.
    alibi_slopes
        (num_heads,) slopes: a slope times the distance of query and key is taken off each score, after the softcap. Or None.
    deterministic
        Equal inputs must give equal bits, in gradients too. A kernel that cannot promise it rejects the call.
    """

    q: Array
    k: Array
    v: Array
    causal: bool
    window: tuple[int | None, int | None]
    scale: float
    softcap: float | None
    return_lse: bool
    alibi_slopes: Any = None
    deterministic: bool = False

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

    @classmethod
    def make(
        cls,
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
    ) -> AttentionCall:
        """Check the arguments of `attention` and bring them into one form. Sinks need no kernel but the log-sum-exp."""
        rows = ragged("q", q).layout
        backend, dtype = rows.backend, q.values.dtype
        for name, x in (("q", q), ("k", k), ("v", v)):
            values = ragged(name, x).values
            if values.ndim != 3 or x.ragged_dim != 0:
                raise ValueError(
                    f"{name}: expected values (total, num_heads, head_dim), got shape {tuple(values.shape)}; for one head "
                    "use arr.with_values(arr.values[:, None, :])"
                )
            if x.layout.backend is not backend:
                raise TypeError(
                    f"{name}: expected an array of {backend.name} as q, got {x.layout.backend.name}"
                )
            if values.dtype != dtype:
                raise TypeError(
                    f"{name}: expected dtype {dtype} as q, got {values.dtype}; convert it with xp.astype"
                )
            if backend.apart(values, q.values):
                raise ValueError(
                    f"{name}: expected device {q.device} as q, got {x.device}; use {name}.to_device"
                )
        floating("q", q.values)
        if k.batch_size != q.batch_size:
            raise ValueError(f"k: expected {q.batch_size} rows as q, got {k.batch_size}")
        if v.layout is not k.layout:
            shared_layout("attention: k and v", (k, v))
        (_, heads, dim), (_, kv_heads, k_dim), (_, v_heads, _) = (
            q.values.shape,
            k.values.shape,
            v.values.shape,
        )
        if dim == 0:
            raise ValueError("q: expected a head_dim of at least 1, got 0")
        if k_dim != dim:
            raise ValueError(f"k: expected head_dim {dim} as q, got {k_dim}")
        if v_heads != kv_heads:
            raise ValueError(f"v: expected {kv_heads} heads as k, got {v_heads}")
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(
                f"q: expected num_heads to be a multiple of num_kv_heads {kv_heads}, got {heads}"
            )
        causal, deterministic = flag("causal", causal), flag("deterministic", deterministic)
        softcap = None if softcap is None else number("softcap", softcap, above=0)
        scale = 1 / math.sqrt(dim) if scale is None else number("scale", scale)
        for name, x in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
            if x is not None:
                dense(name, x, q.values)
                if tuple(x.shape) != (heads,):
                    raise ValueError(
                        f"{name}: expected an array of shape ({heads},), one number a head, got {tuple(x.shape)}"
                    )
        return cls(
            q,
            k,
            v,
            causal,
            _window(window, causal),
            scale,
            softcap,
            flag("return_lse", return_lse) or sinks is not None,
            alibi_slopes,
            deterministic,
        )


def _window(window: Window, causal: bool) -> tuple[int | None, int | None]:
    if window is None:
        window = (None, None)
    elif not isinstance(window, tuple):
        if not causal:
            raise ValueError(f"window: expected (left, right) without causal, got {window!r}")
        window = (integer("window", window, 1, of=" key, the query's own position") - 1, 0)
    elif len(window) != 2:
        raise ValueError(f"window: expected (left, right), got {window}")
    left, right = (
        None if n is None else integer(f"window[{i}]", n, 0, of=", or None for no bound")
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
    """Scaled dot-product attention within each row: ``softmax(q k^T * scale) v``, memory O(total).

    Parameters
    ----------
    q
        Queries (n, None, num_heads, head_dim).
    k, v
        Keys and values (n, None, num_kv_heads, head_dim) and (n, None, num_kv_heads, value_dim), with one layout, which may
        be another than that of `q`. num_heads is a multiple of num_kv_heads (grouped and multi-query attention): head h uses
        the keys of head ``h // (num_heads // num_kv_heads)``.
    causal
        A query sees the keys up to its own position; where rows of `q` and `k` differ in length, the last query and the last
        key are aligned, as in FlashAttention.
    window
        ``w`` with `causal`: only the w keys that end at the query's own position. ``(left, right)``: the keys from
        ``left`` before to ``right`` behind it; None is unbounded.
    scale
        Factor of the scores; ``1 / sqrt(head_dim)`` by default.
    softcap
        Scores become ``softcap * tanh(score / softcap)``.
    alibi_slopes
        (num_heads,): with a slope m, m times the distance of query and key is taken off each score, after the softcap (Press
        et al., 2021). A constant: it has no gradient on a kernel of its own.
    sinks
        (num_heads,): one more score for each query of a head, whose value is 0; it takes part in the softmax and in the
        log-sum-exp (Xiao et al., 2023). It has a gradient.
    deterministic
        Ask for the same bits each time, in gradients too; kernels that cannot promise it step aside. The standard path is as
        deterministic as its library.
    return_lse
        Also return the natural log-sum-exp of each query's scores, float32 (float64 for float64).
    kernel
        The provider that must run it; by default the first that accepts.

    Returns
    -------
    out or (out, lse)
        (n, None, num_heads, value_dim) on the layout of `q`; and (n, None, num_heads). A query that sees no key gives 0, and
        -inf, or its sink.

    Raises
    ------
    TypeError
        If q, k and v are not ragged arrays of one library and one floating-point dtype.
    ValueError
        If shapes, heads, rows, devices or the window do not fit; if a bound on the rows is needed that is not known without reading
        (give `max_length`); or if the kernel that is asked for does not take the call.

    Examples
    --------
    >>> import numpy as np, scree
    >>> x = scree.from_lengths(np.arange(6.0).reshape(3, 1, 2), [1, 2])
    >>> scree.attention(x, x, x, causal=True).values[:2, 0]  # the first token of a row sees itself alone
    array([[0., 1.],
           [2., 3.]])
    """
    arrays = {"q": q, "k": k, "v": v, "alibi_slopes": alibi_slopes}
    options: dict[str, Any] = {
        "causal": causal, "window": window, "scale": scale, "softcap": softcap, "deterministic": deterministic,
        "return_lse": return_lse,
    }  # fmt: skip
    if sinks is None:
        return call_cache.run("attention", arrays, options, kernel)
    out, lse = run("attention", AttentionCall.make(**arrays, **options, sinks=sinks), kernel)
    out, lse = _with_sinks(out, lse, sinks)
    return (out, lse) if return_lse else out


def _with_sinks(out: Array, lse: Array, sinks: Any) -> tuple[Array, Array]:
    """One more score with the value 0 shrinks the output by its share of the softmax."""
    xp, wide = lse.layout.xp, lse.dtype
    sinks = xp.broadcast_to(xp.astype(sinks, wide, copy=False), lse.values.shape)
    some = lse.values != -float("inf")
    scores = xp.where(some, lse.values, sinks)
    total = xp.logaddexp(scores, sinks)
    share = xp.exp(scores - total)[..., None]
    values = xp.astype(xp.astype(out.values, wide, copy=False) * share, out.dtype, copy=False)
    return out.with_values(values), lse.with_values(xp.where(some, total, sinks))


class _Plan(NamedTuple):
    """The query tiles in the order of their work, and the keys that each of them and each of its queries sees."""

    slots: Any  # (total_q,) where each query stands in the tiles
    tokens: Any  # (tiles, QUERIES) index into q
    own: Any  # (tiles, QUERIES) key position on which each query sits
    first: Any  # (tiles, QUERIES) first and last key position that each query sees
    last: Any
    keys: Any  # (tiles,) position of the first key that any of them may see, rounded down to a tile of keys
    tile: Any  # (tiles,) and the number of that tile among all tiles of keys
    rounds: (
        np.ndarray | None
    )  # (tiles,) key tiles of each query tile, falling; None where it is not known on the host
    whole: np.ndarray | None  # (tiles,) how many of them, from the first on, every query sees whole


@declare("attention", AttentionCall.make)
def _standard(call: AttentionCall) -> Any:
    q, k, xp = call.q, call.k, call.q.layout.xp
    if 0 in (q.batch_size, q.total_length, k.total_length):
        return _nothing(call)
    size = min(QUERIES, _static_bound(q, "q"))
    key = ("attention", "plan", size, call.window, q.layout.host is None)
    plan = q.layout.once(key, lambda: _plan(call, size), beside=k.layout)
    wide = accumulator(xp, q.dtype)
    k_tiles, v_tiles = _key_tiles(call.k, wide), _key_tiles(call.v, wide)
    parts = [_chunk(call, plan, part, k_tiles, v_tiles) for part in _chunks(call, plan)]

    def by_token(tiles: list[Any], dtype: Any) -> Array:
        joined = tiles[0] if len(tiles) == 1 else xp.concat(tiles, axis=0)
        return q.with_values(xp.astype(xp.take(joined, plan.slots, axis=0), dtype, copy=False))

    out = by_token([part[0] for part in parts], q.dtype)
    return (out, by_token([part[1] for part in parts], wide)) if call.return_lse else out


def _nothing(call: AttentionCall) -> Any:
    q, v, xp = call.q, call.v, call.q.layout.xp
    shape = tuple(q.values.shape[:2])
    out = q.with_values(
        xp.zeros((*shape, v.values.shape[2]), dtype=q.dtype, device=q.layout.device)
    )
    lse = xp.full(shape, -float("inf"), dtype=accumulator(xp, q.dtype), device=q.layout.device)
    return (out, q.with_values(lse)) if call.return_lse else out


def _static_bound(x: Array, name: str) -> int:
    if x.layout.host is None and x.layout.max_length is None:
        raise ValueError(
            f"{name}: attention needs a bound on its rows that is known without reading the offsets; give max_length=, or call "
            f"{name}.validate(), which reads them once"
        )
    return max(x.layout.bound, 1)


def _plan(call: AttentionCall, size: int) -> _Plan:
    there, (left, right) = call.q.layout, call.window
    known = there.host is not None and call.k.layout.host is not None
    q, k = (x.layout.at_home() if known else x.layout for x in (call.q, call.k))
    tiles, xp = q.tiles(size), q.xp

    def per_tile(x: Any) -> Any:
        return xp.take(xp.astype(x, q.offsets.dtype, copy=False), tiles.rows, axis=0)

    lengths, count = per_tile(q.lengths), per_tile(k.lengths)
    place = (
        tiles.starts[:, None] + q.arange(size)[None, :]
    )  # of each query in its row, and in that of the keys
    real, place = place < lengths[:, None], place + (count - lengths)[:, None]
    last = xp.broadcast_to(count[:, None] - 1, place.shape)
    last = last if right is None else xp.minimum(last, place + right)
    last = xp.where(real, last, xp.full_like(last, -1))
    first = xp.zeros_like(place) if left is None else xp.maximum(place - left, xp.zeros_like(place))
    keys = first[:, 0] // KEYS * KEYS
    tile = per_tile(k.tiles(KEYS).layout.offsets[:-1]) + keys // KEYS
    slots = q.tile_slots(size)
    if not known:
        return _Plan(slots, tiles.tokens, place, first, last, keys, tile, None, None)
    rounds = np.maximum(-(-(last.max(axis=1) + 1 - keys) // KEYS), 1)
    seen_by_all = np.where(last < 0, last.max(axis=1, keepdims=True), last).min(axis=1) + 1 - keys
    whole = np.where(first.max(axis=1) <= keys, seen_by_all // KEYS, 0)
    order = np.argsort(-rounds, kind="stable")
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size)
    slots = there.put(inverse[slots // size] * size + slots % size)
    tokens, own, first, last, keys, tile = (
        there.put(x[order]) for x in (tiles.tokens, place, first, last, keys, tile)
    )
    return _Plan(slots, tokens, own, first, last, keys, tile, rounds[order], whole[order])


def _chunks(call: AttentionCall, plan: _Plan) -> Iterator[slice]:
    """Runs of query tiles whose scores against one tile of keys fit into the cache; all tiles at once under a trace."""
    tiles, size = plan.tokens.shape
    if plan.rounds is None:
        return iter([slice(0, tiles)])
    step = max(1, SCORES // (call.num_heads * size * KEYS))
    return (slice(i, min(i + step, tiles)) for i in range(0, tiles, step))


def _rounds(call: AttentionCall, plan: _Plan, part: slice) -> Iterator[tuple[int, int, bool]]:
    """For each tile of keys: its number, how many query tiles of the part reach it, and whether a mask is needed."""
    if plan.rounds is None or plan.whole is None:
        longest, (left, right) = _static_bound(call.k, "k"), call.window
        if left is not None and right is not None:
            longest = min(longest, left + right + plan.tokens.shape[1] + KEYS)
        yield from ((j, part.stop - part.start, True) for j in range(-(-longest // KEYS)))
        return
    rounds, whole = plan.rounds[part], plan.whole[part]
    for j in range(int(rounds[0])):
        alive = int(np.count_nonzero(rounds > j))
        yield j, alive, bool((whole[:alive] <= j).any())


def _chunk(
    call: AttentionCall, plan: _Plan, part: slice, k_tiles: Any, v_tiles: Any
) -> tuple[Any, Any]:
    """Output (queries, num_heads, value_dim) and log-sum-exp (queries, num_heads) of some query tiles, tile by tile.

    Scores lie keys by queries, (tiles, num_kv_heads, KEYS, groups * size), so that maxima and sums run along the slow axis.
    """
    xp, kv, groups = call.q.layout.xp, call.num_kv_heads, call.num_heads // call.num_kv_heads
    tokens, wide = plan.tokens[part, :], accumulator(xp, call.q.dtype)
    m, size = tokens.shape
    q = xp.take(call.q.values, xp.reshape(tokens, (-1,)), axis=0)
    q = xp.astype(q, wide, copy=False) * call.scale
    q = xp.permute_dims(xp.reshape(q, (m, size, kv, groups, call.head_dim)), (0, 2, 4, 3, 1))
    q = xp.reshape(q, (m, kv, call.head_dim, groups * size))
    minus = xp.full((), -float("inf"), dtype=wide, device=call.q.layout.device)
    running: list[Any] = []  # accumulated values, sum of weights and maximum of the scores so far
    done: list[
        list[Any]
    ] = []  # the same of query tiles that have met all their keys, the longest last
    for j, alive, masked in _rounds(call, plan, part):
        if running and alive < q.shape[0]:
            done.append([x[alive:, ...] for x in running])
            q, *running = (x[:alive, ...] for x in (q, *running))
        at = slice(part.start, part.start + alive)
        tile = plan.tile[at] + j
        tile = xp.where(tile < k_tiles.shape[0], tile, 0)  # a query tile that has met all its keys
        k, v = (
            xp.reshape(xp.take(x, tile, axis=0), (alive, kv, KEYS, -1)) for x in (k_tiles, v_tiles)
        )
        place = plan.keys[at][:, None] + (j * KEYS + call.k.layout.arange(KEYS))[None, :]
        score = _scores(call, k, q, place, plan.own[at, :])
        if masked:
            seen = place[:, :, None] <= plan.last[at, :][:, None, :]
            if call.window[0] is not None:
                seen = seen & (place[:, :, None] >= plan.first[at, :][:, None, :])
            if (
                plan.rounds is None
            ):  # behind the last tile of a row come those of others, whose NaN no weight of 0 would hide
                v = xp.where(xp.any(seen, axis=(1, 2))[:, None, None, None], v, 0.0)
            score = xp.reshape(score, (alive, kv, KEYS, groups, size))
            score = xp.reshape(
                xp.where(seen[:, None, :, None, :], score, minus), (alive, kv, KEYS, groups * size)
            )
        top = xp.max(score, axis=2, keepdims=True)
        top = xp.maximum(top, running[2]) if running else top
        base = xp.where(top == minus, 0.0, top) if masked else top
        weight = xp.exp(score - base)
        total, acc = (
            xp.sum(weight, axis=2, keepdims=True),
            xp.matmul(xp.matrix_transpose(v), weight),
        )
        if running:
            shrink = xp.exp(running[2] - base)
            total, acc = running[1] * shrink + total, running[0] * shrink + acc
        running = [acc, total, top]
    done.append(running)
    acc, total, top = (
        xp.concat(x[::-1], axis=0) if len(x) > 1 else x[0]
        for x in map(list, zip(*done, strict=True))
    )
    some = total != 0  # a sum that is NaN must be seen
    safe = xp.where(some, total, 1.0)
    out, lse = xp.where(some, acc, 0.0) / safe, xp.where(some, top + xp.log(safe), minus)

    def by_query(x: Any) -> Any:
        x = xp.permute_dims(xp.reshape(x, (m, kv, x.shape[2], groups, size)), (0, 4, 1, 3, 2))
        return xp.reshape(x, (m * size, call.num_heads, x.shape[-1]))

    return by_query(out), by_query(lse)[..., 0]


def _scores(call: AttentionCall, k: Any, q: Any, place: Any, own: Any) -> Any:
    """The scores of tiles of keys, whose positions are `place`, and queries, who sit on `own`; before any mask."""
    xp, score = call.q.layout.xp, call.q.layout.xp.matmul(k, q)
    if call.softcap is not None:
        score = xp.tanh(score / call.softcap) * call.softcap
    if call.alibi_slopes is None:
        return score
    away = xp.astype(xp.abs(place[:, :, None] - own[:, None, :]), score.dtype)[:, None, :, None, :]
    slopes = xp.reshape(
        xp.astype(call.alibi_slopes, score.dtype, copy=False), (1, call.num_kv_heads, 1, -1, 1)
    )
    by_head = xp.reshape(score, (*score.shape[:3], slopes.shape[3], own.shape[1]))
    return xp.reshape(by_head - slopes * away, score.shape)


def _key_tiles(x: Array, dtype: Any) -> Any:
    """(tiles, num_heads * KEYS * dim) the tokens by tile, then by head; 0 behind the end of a row."""
    blocks = tiled(xp := x.layout.xp, x.values, x.layout.tiles(KEYS), 0)
    blocks = xp.permute_dims(xp.astype(blocks, dtype, copy=False), (0, 2, 1, 3))
    return xp.reshape(blocks, (blocks.shape[0], -1))
