"""Attention by loops whose length is read at run time.

The work is the visible tiles, under a trace too.
Forward and backward follow FlashAttention-2 (Dao, 2023). A loop takes a tile of queries over the
tiles of keys of its row, up to the last key that any query sees. The gradients of keys and values
come from the same loop with the roles exchanged. The backward pass saves only the inputs, the
output and the log-sum-exp. No bound on the rows is needed, and one compiled function serves all
offsets of one shape.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ..backends.jax import BACKEND
from ..broadcasting import accumulation_dtype
from ..dispatch.registry import register_kernel
from ..layout import Layout
from ..ops.attention import AttentionCall

TILE = 128  # tokens per tile, unless a bound says that rows are shorter
MAX_SCORES = 1 << 18  # scores of all heads in memory at a time


class Rules(NamedTuple):
    """The static part of a call."""

    window: tuple[int | None, int | None]
    scale: float
    softcap: float | None
    size: int  # of the tiles


class Side(NamedTuple):
    """Queries or keys: their layout, and tensors (kv_heads, total, groups, dim) of their tokens."""

    rows: Layout
    parts: tuple[Any, ...]


def _walk(
    a: Side,
    b: Side,
    size: int,
    scores: int,
    window: Any,
    start: Callable[..., Any],
    step: Callable[..., Any],
) -> Any:
    """For every tile of `a`, the state after it has met all tiles of `b` that it sees.

    (kv_heads, total, groups, dim) tensors.

    ``start(*parts of a)`` gives the state of some tiles, (kv_heads, tiles, size, groups, dim), and
    ``step(state, seen, parts of a, parts of b)`` the next one.
    """
    tiles, (left, right) = a.rows.tiles(size), window
    count, at_once = tiles.rows.shape[0], max(1, MAX_SCORES // scores)
    chunks = -(-count // at_once)
    at_once = -(-count // chunks)
    number = jnp.arange(chunks * at_once)
    shift, length = b.rows.lengths - a.rows.lengths, b.rows.lengths

    def chunk(number: Any) -> Any:
        here = jnp.minimum(number, count - 1)
        rows, tokens = tiles.rows[here], tiles.tokens[here]
        real = tiles.valid[here] & (number < count)[:, None]
        place = tiles.starts[here][:, None] + jnp.arange(size) + shift[rows][:, None]
        first = jnp.maximum(place - left, 0) if left is not None else jnp.zeros_like(place)
        last = length[rows][:, None] - 1
        last = jnp.where(real, last if right is None else jnp.minimum(place + right, last), -1)
        begin = first[:, 0]
        rounds = jnp.max((jnp.max(last, axis=1) - begin + size) // size)
        own = [jnp.take(x, tokens, axis=1) for x in a.parts]

        def round(state: tuple[Any, Any]) -> tuple[Any, Any]:
            j, now = state
            place = begin[:, None] + j * size + jnp.arange(size)
            seen = (place[:, None, :] >= first[:, :, None]) & (
                place[:, None, :] <= last[:, :, None]
            )
            other = b.rows.clip(b.rows.offsets[rows][:, None] + place)
            inside = (place < length[rows][:, None])[
                ..., None, None
            ]  # no weight of 0 may meet what stands in other rows
            return j + 1, step(
                now, seen, own, [jnp.where(inside, jnp.take(x, other, axis=1), 0) for x in b.parts]
            )

        return lax.while_loop(
            lambda state: state[0] < rounds, round, (jnp.zeros_like(rounds), start(*own))
        )[1]

    states = lax.map(chunk, number.reshape(chunks, at_once))
    slots = a.rows.tile_slots(size)

    def to_tokens(x: Any) -> Any:
        x = jnp.moveaxis(x, 1, 0)
        return jnp.take(x.reshape(x.shape[0], -1, *x.shape[4:]), slots, axis=1)

    return jax.tree.map(to_tokens, states)


def _flat(x: Any) -> Any:
    """(kv_heads, tiles, tokens, groups, dim) -> (kv_heads, tiles, tokens * groups, dim)."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _scores(rules: Rules, q: Any, k: Any) -> Any:
    """(kv_heads, tiles, queries, groups, keys), before the mask."""
    score = jnp.matmul(_flat(q), jnp.swapaxes(_flat(k), 2, 3)).reshape(*q.shape[:4], -1)
    return score if rules.softcap is None else jnp.tanh(score / rules.softcap) * rules.softcap


def _forward(
    rules: Rules, q: Any, k: Any, v: Any, q_rows: Layout, k_rows: Layout
) -> tuple[Any, Any]:
    """Output and log-sum-exp (..., 1)."""
    minus = -jnp.inf

    def start(q: Any) -> Any:
        one = jnp.zeros_like(q[..., :1])
        return jnp.zeros_like(q, shape=(*q.shape[:-1], v.shape[-1])) + one, one, one + minus

    def step(state: Any, seen: Any, own: Any, other: Any) -> Any:
        acc, total, top = state
        score = jnp.where(seen[:, :, None, :], _scores(rules, own[0], other[0]), minus)
        now = jnp.maximum(top, jnp.max(score, axis=-1, keepdims=True))
        base = jnp.where(now == minus, 0.0, now)
        weight, shrink = jnp.exp(score - base), jnp.exp(top - base)
        acc = acc * shrink + jnp.matmul(_flat(weight), _flat(other[1])).reshape(acc.shape)
        return acc, total * shrink + jnp.sum(weight, axis=-1, keepdims=True), now

    acc, total, top = _walk(
        Side(q_rows, (q,)),
        Side(k_rows, (k, v)),
        rules.size,
        _cost(rules, q),
        rules.window,
        start,
        step,
    )
    some = total != 0  # a sum that is NaN must be seen
    safe = jnp.where(some, total, 1.0)
    return jnp.where(some, acc / safe, 0.0), jnp.where(some, top + jnp.log(safe), minus)


def _cost(rules: Rules, q: Any) -> int:
    return int(q.shape[0] * q.shape[2]) * rules.size**2


def _backward(
    rules: Rules,
    q: Any,
    k: Any,
    v: Any,
    q_rows: Layout,
    k_rows: Layout,
    lse: Any,
    delta: Any,
    grad: Any,
) -> Any:
    """Gradients of q, k and v; `delta` is what is subtracted from the gradient of each weight."""
    base = jnp.where(jnp.isfinite(lse), lse, 0.0)

    def weights(
        seen: Any, q: Any, k: Any, v: Any, base: Any, delta: Any, grad: Any
    ) -> tuple[Any, Any]:
        """Return the weights of some tiles and the gradients of their scores.

        Both are (kv_heads, tiles, queries, groups, keys).
        """
        score = _scores(rules, q, k)
        weight = jnp.where(seen[:, :, None, :], jnp.exp(score - base), 0.0)
        change = jnp.matmul(_flat(grad), jnp.swapaxes(_flat(v), 2, 3)).reshape(weight.shape)
        change = weight * (change - delta)
        return weight, change if rules.softcap is None else change * (
            1 - jnp.square(score / rules.softcap)
        )

    def of_queries(state: Any, seen: Any, own: Any, other: Any) -> Any:
        _, change = weights(seen, own[0], *other, *own[1:])
        return state + jnp.matmul(_flat(change), _flat(other[0])).reshape(state.shape)

    def of_keys(state: Any, seen: Any, own: Any, other: Any) -> Any:
        weight, change = weights(jnp.swapaxes(seen, 1, 2), other[0], *own, *other[1:])

        def product(x: Any, y: Any, like: Any) -> Any:
            x = x.reshape(*x.shape[:2], -1, x.shape[-1])
            return jnp.matmul(jnp.swapaxes(x, 2, 3), _flat(y)).reshape(like.shape)

        dk, dv = state
        return dk + product(change, other[0], dk), dv + product(weight, other[-1], dv)

    queries, keys = Side(q_rows, (q, base, delta, grad)), Side(k_rows, (k, v))
    left, right = rules.window
    dq = _walk(
        queries,
        keys,
        rules.size,
        _cost(rules, q),
        (left, right),
        lambda q, *_: jnp.zeros_like(q),
        of_queries,
    )
    dk, dv = _walk(
        keys,
        queries,
        rules.size,
        _cost(rules, q),
        (right, left),
        lambda *x: tuple(map(jnp.zeros_like, x)),
        of_keys,
    )
    return dq, dk, dv


def _by_head(x: Any, kv: int, dtype: Any) -> Any:
    """(total, heads, dim) -> (kv_heads, total, groups, dim)."""
    return jnp.swapaxes(x.astype(dtype).reshape(x.shape[0], kv, -1, x.shape[-1]), 0, 1)


def _flatten_heads(x: Any, dtype: Any) -> Any:
    """(kv_heads, total, groups, dim) -> (total, heads, dim)."""
    return jnp.swapaxes(x, 0, 1).reshape(x.shape[1], -1, x.shape[-1]).astype(dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(
    rules: Rules, q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any
) -> tuple[Any, Any]:
    """Output (total, heads, value_dim), and log-sum-exp (total, heads)."""
    return _attend_and_keep(rules, q, k, v, q_offsets, k_offsets)[0]


def _attend_and_keep(rules: Rules, q: Any, k: Any, v: Any, q_offsets: Any, k_offsets: Any) -> Any:
    kv, wide = k.shape[1], accumulation_dtype(jnp, q.dtype)
    parts = (_by_head(q, kv, wide) * rules.scale, _by_head(k, kv, wide), _by_head(v, kv, wide))
    out, lse = _forward(rules, *parts, _rows(q_offsets, q), _rows(k_offsets, k))
    out, lse = _flatten_heads(out, q.dtype), _flatten_heads(lse, wide)
    return (out, lse[..., 0]), (q, k, v, q_offsets, k_offsets, out, lse)


def _gradients(rules: Rules, kept: Any, grads: Any) -> Any:
    q, k, v, q_offsets, k_offsets, out, lse = kept
    kv, wide = k.shape[1], accumulation_dtype(jnp, q.dtype)
    grad, of_lse = (x.astype(wide) for x in grads)
    delta = jnp.sum(grad * out.astype(wide), axis=-1, keepdims=True) - of_lse[..., None]
    parts = (_by_head(q, kv, wide) * rules.scale, _by_head(k, kv, wide), _by_head(v, kv, wide))
    rest = (_by_head(x, kv, wide) for x in (lse, delta, grad))
    dq, dk, dv = _backward(rules, *parts, _rows(q_offsets, q), _rows(k_offsets, k), *rest)
    return (
        _flatten_heads(dq * rules.scale, q.dtype),
        _flatten_heads(dk, k.dtype),
        _flatten_heads(dv, v.dtype),
        None,
        None,
    )


_attend.defvjp(_attend_and_keep, _gradients)
_attend = jax.jit(_attend, static_argnums=0)


def _rows(offsets: Any, x: Any) -> Layout:
    return Layout(BACKEND, offsets, int(x.shape[0]))


def rejects(call: AttentionCall) -> str | None:
    """Return why the loops do not take the call."""
    if call.q.layout.backend is not BACKEND:
        return "the loops take JAX arrays only"
    if call.alibi_slopes is not None:
        return "the loops have no ALiBi"
    if 0 in (call.q.batch_size, call.q.total_length, call.k.total_length):
        return "the loops need at least one token"
    return None


@register_kernel("attention", provider="loops", rejects=rejects)
def loops(call: AttentionCall) -> Any:
    """Compute attention of tiles of queries over tiles of keys, as many rounds as the rows need."""
    q, k = call.q, call.k
    bound = max(x.layout.max_length_bound for x in (q, k))
    size = min(TILE, 1 << max(bound - 1, 0).bit_length())
    rules = Rules(call.window, call.scale, call.softcap, size)
    out, lse = _attend(rules, q.values, k.values, call.v.values, q.offsets, k.offsets)
    return (q.with_values(out), q.with_values(lse)) if call.return_lse else q.with_values(out)
