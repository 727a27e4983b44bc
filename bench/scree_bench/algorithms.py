"""Attention algorithms to learn from: each is short, written once on the Array API, and runs on every library.

They take dense arrays ``q`` (n, heads, length, dim) and ``k``, ``v`` (n, kv_heads, length, dim). None of them is fast: they show
what the fast ones do. Memory is what sets them apart, so each comes with an estimate of the most bytes that it holds at once
beside its inputs, which ``scree-bench algorithms`` holds against what was measured.

The blocked ones take ``visit(i, j, top, total)``, which is called after each block with the numbers of its queries and keys, the
running maximum and the running sum: that is what the pictures are drawn from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import scree
from scree.backends import backend

BLOCK = 64
WINDOW = 256

Visit = Callable[[int, int, Any, Any], None]


class Shape(NamedTuple):
    """The sizes of a problem, and bytes of a number."""

    n: int
    heads: int
    length: int
    dim: int
    item: int = 4

    @property
    def scores(self) -> int:
        """Bytes of all scores."""
        return self.n * self.heads * self.length**2 * self.item

    @property
    def output(self) -> int:
        """Bytes of the result."""
        return self.n * self.heads * self.length * self.dim * self.item

    def tile(self, queries: int, keys: int) -> int:
        """Bytes of the scores between so many queries and keys."""
        return self.n * self.heads * queries * keys * self.item


def _positions(xp: Any, count: int, like: Any) -> Any:
    """(count,) 0, 1, 2, ... on the device of an array."""
    return xp.arange(count, device=backend(like).device(like))


def _causal(
    xp: Any, scores: Any, first: int = 0, window: int | None = None, groups: int = 1
) -> Any:
    """(queries, keys) whether a query sees a key; the first query stands `first` positions behind the first key.

    So many queries as there are groups stand at each position.
    """
    queries, keys = (_positions(xp, count, scores) for count in scores.shape[2:])
    ahead = xp.expand_dims(queries // groups, axis=1) + first - xp.expand_dims(keys, axis=0)
    return ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)


def naive(q: Any, k: Any, v: Any, visit: Visit | None = None) -> Any:
    """All scores at once: ``softmax(q k^T / sqrt(dim)) v``."""
    xp = scree.namespace(q)
    scores = xp.matmul(q * (1 / math.sqrt(q.shape[3])), xp.matrix_transpose(k))
    scores = xp.where(_causal(xp, scores), scores, -math.inf)
    scores = scores - xp.max(scores, axis=-1, keepdims=True)
    scores = xp.exp(scores)
    scores = scores / xp.sum(scores, axis=-1, keepdims=True)
    return xp.matmul(scores, v)


def masked(q: Any, k: Any, v: Any, visit: Visit | None = None) -> Any:
    """All scores at once, of rows that are padded at the end: a mask says which keys are real. Here the last quarter is not."""
    xp, length = scree.namespace(q), q.shape[2]
    real = _positions(xp, length, q) < length - length // 4
    scores = xp.matmul(q * (1 / math.sqrt(q.shape[3])), xp.matrix_transpose(k))
    scores = xp.where(_causal(xp, scores) & real, scores, -math.inf)
    scores = scores - xp.max(scores, axis=-1, keepdims=True)
    scores = xp.exp(scores)
    scores = scores / xp.sum(scores, axis=-1, keepdims=True)
    return xp.matmul(scores, v)


def _start(xp: Any, q: Any) -> tuple[Any, Any, Any]:
    """A running softmax that has seen nothing: maximum, sum, and weighted values."""
    first = q[:, :, :, :1]
    return xp.full_like(first, -math.inf), xp.zeros_like(first), xp.zeros_like(q)


def flash_v1(q: Any, k: Any, v: Any, visit: Visit | None = None) -> Any:
    """Blocks of keys outside, blocks of queries inside; the result is normalized after every block (Dao et al., 2022).

    Each block of keys is read once, but the running softmax of every query has to be kept and read again.
    """
    xp, length = scree.namespace(q), q.shape[2]
    q = q * (1 / math.sqrt(q.shape[3]))
    starts = range(0, length, BLOCK)
    running = [_start(xp, q[:, :, i : i + BLOCK, :]) for i in starts]
    for j in starts:
        keys, values = xp.matrix_transpose(k[:, :, j : j + BLOCK, :]), v[:, :, j : j + BLOCK, :]
        for number, i in enumerate(starts):
            if j > i:
                continue  # no query of the block sees any of these keys
            top, total, out = running[number]
            queries = q[:, :, i : i + BLOCK, :]
            scores = xp.matmul(queries, keys)
            if i == j:
                scores = xp.where(_causal(xp, scores), scores, -math.inf)
            highest = xp.maximum(top, xp.max(scores, axis=-1, keepdims=True))
            weights = xp.exp(scores - highest)
            old = total * xp.exp(top - highest)
            total = old + xp.sum(weights, axis=-1, keepdims=True)
            running[number] = highest, total, (out * old + xp.matmul(weights, values)) / total
            if visit:
                visit(number, j // BLOCK, highest, total)
    return xp.concat([out for _, _, out in running], axis=2)


def _flash(q: Any, k: Any, v: Any, window: int | None, visit: Visit | None, groups: int = 1) -> Any:
    """Blocks of queries outside, blocks of keys inside; one normalization at the end of each block of queries."""
    xp, length = scree.namespace(q), k.shape[2]
    q = q * (1 / math.sqrt(q.shape[3]))
    blocks = []
    for i in range(0, length, BLOCK):
        queries = q[:, :, i * groups : (i + BLOCK) * groups, :]
        top, total, out = _start(xp, queries)
        first = 0 if window is None else max(0, i - window + 1) // BLOCK * BLOCK
        for j in range(first, i + 1, BLOCK):
            keys, values = xp.matrix_transpose(k[:, :, j : j + BLOCK, :]), v[:, :, j : j + BLOCK, :]
            scores = xp.matmul(queries, keys)
            if i == j or window is not None:
                scores = xp.where(_causal(xp, scores, i - j, window, groups), scores, -math.inf)
            highest = xp.maximum(top, xp.max(scores, axis=-1, keepdims=True))
            safe = xp.where(xp.isfinite(highest), highest, 0.0)  # no key of the window so far
            weights, old = xp.exp(scores - safe), xp.exp(top - safe)
            total = total * old + xp.sum(weights, axis=-1, keepdims=True)
            out = out * old + xp.matmul(weights, values)
            top = highest
            if visit:
                visit(i // BLOCK, j // BLOCK, top, total)
        blocks.append(out / total)
    return xp.concat(blocks, axis=2)


def flash_v2(q: Any, k: Any, v: Any, visit: Visit | None = None) -> Any:
    """Blocks of queries outside, so that they run apart; normalized once, at the end (Dao, 2023)."""
    return _flash(q, k, v, None, visit)


def sliding_window(q: Any, k: Any, v: Any, visit: Visit | None = None) -> Any:
    """As flash v2, but a query sees the last `WINDOW` keys alone: blocks before them are not visited at all."""
    return _flash(q, k, v, WINDOW, visit)


def grouped_query(q: Any, k: Any, v: Any, visit: Visit | None = None) -> Any:
    """Several heads of queries share one of keys and values: their queries are laid side by side, keys are never repeated."""
    xp = scree.namespace(q)
    n, heads, length, dim = q.shape
    shared = k.shape[1]
    groups = heads // shared

    def exchanged(x: Any, first: int, second: int) -> Any:
        x = xp.reshape(x, (n, shared, first, second, dim))
        return xp.permute_dims(x, (0, 1, 3, 2, 4))

    shape = (n, shared, length * groups, dim)
    out = _flash(xp.reshape(exchanged(q, groups, length), shape), k, v, None, visit, groups)
    return xp.reshape(exchanged(out, length, groups), q.shape)


def _all_scores(s: Shape) -> int:
    """The scaled queries, and two copies of the scores: before and after each step."""
    return s.output + 2 * s.scores


def _one_running(s: Shape) -> int:
    """The scaled queries, the result twice while its blocks are joined, and the last block at work."""
    return 3 * s.output + s.tile(BLOCK, s.dim) + 2 * s.tile(BLOCK, BLOCK)


def _all_running(s: Shape) -> int:
    """As `_one_running`, and the maximum and the sum of every query."""
    return _one_running(s) + 2 * s.output // s.dim


def _quarter(heads: int) -> int:
    return heads // 4 if heads % 4 == 0 else 1


def _one(heads: int) -> int:
    return 1


class Algorithm(NamedTuple):
    """An algorithm, its estimate of the most bytes held beside the inputs, and the heads of its keys by those of the queries."""

    run: Callable[..., Any]
    estimate_memory: Callable[[Shape], int]
    kv_heads: Callable[[int], int] = lambda heads: heads


#: Name -> algorithm. Multi-query attention is grouped-query attention with one head of keys and values for all.
ALGORITHMS = {
    "naive": Algorithm(naive, _all_scores),
    "padding-masked": Algorithm(masked, _all_scores),
    "flash v1": Algorithm(flash_v1, _all_running),
    "flash v2": Algorithm(flash_v2, _one_running),
    "sliding window": Algorithm(sliding_window, _one_running),
    "grouped-query": Algorithm(grouped_query, _one_running, _quarter),
    "multi-query": Algorithm(grouped_query, _one_running, _one),
}
