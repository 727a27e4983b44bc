"""Attention algorithms to learn from, each short and written once on the Array API.

They take dense arrays ``q`` (n, heads, length, dim) and ``k``, ``v`` (n, kv_heads, length, dim).
None of them is fast: they show the ideas of the fast kernels, on every library. They differ in
memory. So each algorithm has an estimate of its peak bytes in addition to its inputs, which
``scree-bench algorithms`` compares with the measured peak.

The blocked algorithms call ``visit(i, j, running_max, total)`` after each block, if it is given. The
arguments are the block numbers of queries and keys, the running maximum and the running sum. The
pictures are drawn from these calls.
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
    """Sizes of a problem, and bytes per number."""

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
        """Bytes of the scores between `queries` queries and `keys` keys."""
        return self.n * self.heads * queries * keys * self.item


def _positions(xp: Any, count: int, like: Any) -> Any:
    """Return the (count,) positions 0, 1, 2, ... on the device of an array."""
    return xp.arange(count, device=backend(like).device(like))


def _causal(
    xp: Any, scores: Any, first: int = 0, window: int | None = None, groups: int = 1
) -> Any:
    """Return a (queries, keys) mask: whether a query attends to a key.

    The first query is `first` positions after the first key. Each position has `groups` queries.
    """
    queries, keys = (_positions(xp, count, scores) for count in scores.shape[2:])
    ahead = xp.expand_dims(queries // groups, axis=1) + first - xp.expand_dims(keys, axis=0)
    return ahead >= 0 if window is None else (ahead >= 0) & (ahead < window)


def naive(q: Any, k: Any, v: Any, visit: Visit | None = None) -> Any:
    """Compute all scores at once: ``softmax(q k^T / sqrt(dim)) v``."""
    xp = scree.namespace(q)
    scores = xp.matmul(q * (1 / math.sqrt(q.shape[3])), xp.matrix_transpose(k))
    scores = xp.where(_causal(xp, scores), scores, -math.inf)
    scores = scores - xp.max(scores, axis=-1, keepdims=True)
    scores = xp.exp(scores)
    scores = scores / xp.sum(scores, axis=-1, keepdims=True)
    return xp.matmul(scores, v)


def masked(q: Any, k: Any, v: Any, visit: Visit | None = None) -> Any:
    """Compute all scores at once, of rows that are padded at the end.

    A mask excludes the keys of the padding. Here the last quarter is padding.
    """
    xp, length = scree.namespace(q), q.shape[2]
    is_token = _positions(xp, length, q) < length - length // 4
    scores = xp.matmul(q * (1 / math.sqrt(q.shape[3])), xp.matrix_transpose(k))
    scores = xp.where(_causal(xp, scores) & is_token, scores, -math.inf)
    scores = scores - xp.max(scores, axis=-1, keepdims=True)
    scores = xp.exp(scores)
    scores = scores / xp.sum(scores, axis=-1, keepdims=True)
    return xp.matmul(scores, v)


def _initial_state(xp: Any, q: Any) -> tuple[Any, Any, Any]:
    """Return the initial running softmax: maximum, sum, and weighted values."""
    first = q[:, :, :, :1]
    return xp.full_like(first, -math.inf), xp.zeros_like(first), xp.zeros_like(q)


def flash_v1(q: Any, k: Any, v: Any, visit: Visit | None = None) -> Any:
    """Loop over blocks of keys, then over blocks of queries (Dao et al., 2022).

    The result is normalized after every block. Each block of keys is read once, but the running
    softmax of every query has to be kept and read again.
    """
    xp, length = scree.namespace(q), q.shape[2]
    q = q * (1 / math.sqrt(q.shape[3]))
    starts = range(0, length, BLOCK)
    running = [_initial_state(xp, q[:, :, i : i + BLOCK, :]) for i in starts]
    for j in starts:
        keys, values = xp.matrix_transpose(k[:, :, j : j + BLOCK, :]), v[:, :, j : j + BLOCK, :]
        for number, i in enumerate(starts):
            # No query of the block attends to these keys.
            if j > i:
                continue
            running_max, total, out = running[number]
            queries = q[:, :, i : i + BLOCK, :]
            scores = xp.matmul(queries, keys)
            if i == j:
                scores = xp.where(_causal(xp, scores), scores, -math.inf)
            new_max = xp.maximum(running_max, xp.max(scores, axis=-1, keepdims=True))
            weights = xp.exp(scores - new_max)
            rescaled_total = total * xp.exp(running_max - new_max)
            total = rescaled_total + xp.sum(weights, axis=-1, keepdims=True)
            running[number] = (
                new_max,
                total,
                (out * rescaled_total + xp.matmul(weights, values)) / total,
            )
            if visit:
                visit(number, j // BLOCK, new_max, total)
    return xp.concat([out for _, _, out in running], axis=2)


def _flash(q: Any, k: Any, v: Any, window: int | None, visit: Visit | None, groups: int = 1) -> Any:
    """Loop over blocks of queries, then over blocks of keys.

    Each block of queries is normalized once, at its end.
    """
    xp, length = scree.namespace(q), k.shape[2]
    q = q * (1 / math.sqrt(q.shape[3]))
    blocks = []
    for i in range(0, length, BLOCK):
        queries = q[:, :, i * groups : (i + BLOCK) * groups, :]
        running_max, total, out = _initial_state(xp, queries)
        first = 0 if window is None else max(0, i - window + 1) // BLOCK * BLOCK
        for j in range(first, i + 1, BLOCK):
            keys, values = xp.matrix_transpose(k[:, :, j : j + BLOCK, :]), v[:, :, j : j + BLOCK, :]
            scores = xp.matmul(queries, keys)
            if i == j or window is not None:
                scores = xp.where(_causal(xp, scores, i - j, window, groups), scores, -math.inf)
            new_max = xp.maximum(running_max, xp.max(scores, axis=-1, keepdims=True))
            # The maximum is -inf until a query has seen a key of its window.
            finite_max = xp.where(xp.isfinite(new_max), new_max, 0.0)
            weights, rescale = xp.exp(scores - finite_max), xp.exp(running_max - finite_max)
            total = total * rescale + xp.sum(weights, axis=-1, keepdims=True)
            out = out * rescale + xp.matmul(weights, values)
            running_max = new_max
            if visit:
                visit(i // BLOCK, j // BLOCK, running_max, total)
        blocks.append(out / total)
    return xp.concat(blocks, axis=2)


def flash_v2(q: Any, k: Any, v: Any, visit: Visit | None = None) -> Any:
    """Loop over blocks of queries, which are independent of each other (Dao, 2023).

    The result is normalized once per block of queries, at its end.
    """
    return _flash(q, k, v, None, visit)


def sliding_window(q: Any, k: Any, v: Any, visit: Visit | None = None) -> Any:
    """Compute as flash v2, but a query attends only to the last `WINDOW` keys.

    Blocks before the window are not visited.
    """
    return _flash(q, k, v, WINDOW, visit)


def grouped_query(q: Any, k: Any, v: Any, visit: Visit | None = None) -> Any:
    """Compute attention whose query heads share heads of keys and values.

    The queries of one group are placed side by side, so keys are never repeated.
    """
    xp = scree.namespace(q)
    n, heads, length, dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads

    def swap_groups(x: Any, first: int, second: int) -> Any:
        x = xp.reshape(x, (n, kv_heads, first, second, dim))
        return xp.permute_dims(x, (0, 1, 3, 2, 4))

    shape = (n, kv_heads, length * groups, dim)
    out = _flash(xp.reshape(swap_groups(q, groups, length), shape), k, v, None, visit, groups)
    return xp.reshape(swap_groups(out, length, groups), q.shape)


def _all_scores(s: Shape) -> int:
    """Bytes of the scaled queries and of two copies of the scores, before and after each step."""
    return s.output + 2 * s.scores


def _one_running(s: Shape) -> int:
    """Bytes of the scaled queries, the result and the block in progress.

    The result counts twice, since its blocks are concatenated.
    """
    return 3 * s.output + s.tile(BLOCK, s.dim) + 2 * s.tile(BLOCK, BLOCK)


def _all_running(s: Shape) -> int:
    """Bytes of `_one_running`, and of the maximum and the sum of every query."""
    return _one_running(s) + 2 * s.output // s.dim


def _quarter_of_heads(heads: int) -> int:
    return heads // 4 if heads % 4 == 0 else 1


def _one_head(heads: int) -> int:
    return 1


class Algorithm(NamedTuple):
    """An algorithm, its memory estimate and its number of key heads.

    The estimate is the peak bytes in addition to the inputs. ``kv_heads(heads)`` gives the heads of
    keys and values for a number of query heads.
    """

    run: Callable[..., Any]
    estimate_memory: Callable[[Shape], int]
    kv_heads: Callable[[int], int] = lambda heads: heads


#: Name -> algorithm. Multi-query attention is grouped-query attention with a single head of keys
#: and values.
ALGORITHMS = {
    "naive": Algorithm(naive, _all_scores),
    "padding-masked": Algorithm(masked, _all_scores),
    "flash v1": Algorithm(flash_v1, _all_running),
    "flash v2": Algorithm(flash_v2, _one_running),
    "sliding window": Algorithm(sliding_window, _one_running),
    "grouped-query": Algorithm(grouped_query, _one_running, _quarter_of_heads),
    "multi-query": Algorithm(grouped_query, _one_running, _one_head),
}
