"""A cheap check of attention: some queries of some rows, against float64 and eager arithmetic.

The whole result of a kernel is computed, and a sample of it is compared. The gradients come from a
cotangent that is zero except at the sampled queries. The gradients of the keys of a row then depend
on these queries only, so the exact ones cost little.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from .formulas import softmax
from .libraries import MeasuredLibrary
from .work import Work, inputs

#: Sampled rows of a work, and the most sampled queries of a row.
ROWS, QUERIES = 16, 64
#: Scores of a row over all heads; a row has at least four queries all the same.
SCORES = 1 << 25
#: Numbers of a row of keys that the check converts at a time, and that it compares.
NUMBERS, COMPARED = 1 << 26, 1 << 22
#: An error may be this many times the error of eager PyTorch, or of the least error here: about a
#: rounding of half precision, and some of float32, whose products are summed in different orders.
MAX_ERROR_RATIO = 2.0
LEAST_ERRORS = {"float16": 2.0**-12, "bfloat16": 2.0**-9, "float32": 2.0**-20}
#: A gradient smaller than this part of the cotangent is compared with the cotangent: the gradient
#: of a query that sees one key is 0.
MIN_SCALE = 1e-2


class Sample:
    """The sampled queries of a work, with their exact results and gradients.

    Parameters
    ----------
    lib, work
        The library and the problem.
    seed
        Seed of the sample.
    """

    def __init__(self, lib: MeasuredLibrary, work: Work, seed: int = 0) -> None:
        self.lib, self.work = lib, work
        rng = np.random.default_rng(seed)
        lengths = np.asarray(work.lengths)
        nonempty = np.flatnonzero((lengths > 0) & (np.asarray(work.keys) > 0))
        if not len(nonempty):
            raise ValueError("expected a row with a query and a key, got none")
        longest = nonempty[np.argmax(lengths[nonempty])]
        chosen = {int(x) for x in (nonempty[0], nonempty[-1], longest)}
        chosen |= {int(x) for x in rng.choice(nonempty, min(ROWS - 3, len(nonempty)), False)}
        self.rows = sorted(chosen)
        #: Row -> positions of its sampled queries, and of its compared keys.
        self.queries: dict[int, np.ndarray] = {}
        self.key_positions: dict[int, np.ndarray] = {}
        for row in self.rows:
            length, keys = work.lengths[row], work.keys[row]
            queries = max(4, min(QUERIES, SCORES // (work.heads * keys)))
            self.queries[row] = _positions(length, queries, rng)
            compared = max(64, COMPARED // (work.kv_heads * work.dim))
            self.key_positions[row] = _positions(keys, compared, rng)

    @cached_property
    def tokens(self) -> Any:
        """Indices of the sampled queries in the packed queries, in the order of `rows`."""
        starts = self.work.offsets
        indices = np.concatenate([starts[row] + self.queries[row] for row in self.rows])
        return self.lib.make(indices, "int64")

    @cached_property
    def keys(self) -> Any:
        """Indices of the compared keys of the sampled rows in the packed keys."""
        starts = self.work.key_offsets
        indices = np.concatenate([starts[row] + self.key_positions[row] for row in self.rows])
        return self.lib.make(indices, "int64")

    @cached_property
    def cotangent(self) -> Any:
        """The gradient of the result, which is zero except at the sampled queries."""
        _, dout = inputs(self.lib, self.work)
        sampled = np.zeros((self.work.total, 1, 1), bool)
        for row in self.rows:
            sampled[self.work.offsets[row] + self.queries[row]] = True
        return self.lib.xp.where(self.lib.make(sampled, "bool"), dout, dout * 0)

    def parts(self, result: Any = None, gradients: tuple[Any, ...] = ()) -> list[Any]:
        """Return the sampled parts of a result or of the gradients of q, k and v, in float64."""
        xp = self.lib.xp
        arrays = [(result, self.tokens)] if result is not None else []
        arrays += list(zip(gradients, (self.tokens, self.keys, self.keys), strict=False))
        return [self.lib.as_float64(xp.take(x, at, axis=0)) for x, at in arrays]

    @cached_property
    def exact(self) -> list[Any]:
        """The exact result and gradients: out and dq of the queries, dk and dv of the keys."""
        return self._compute("float64")

    @cached_property
    def eager(self) -> tuple[float, float]:
        """Errors of the result and of the gradients of eager attention in the data type."""
        parts = self._compute(self.work.dtype)
        return self.error(parts[:1]), self.error(parts[1:])

    def _compute(self, dtype: str) -> list[Any]:
        lib, xp, work = self.lib, self.lib.xp, self.work
        (q, k, v), dout = inputs(lib, work)
        as_dtype = lib.as_float64 if dtype == "float64" else lambda x: x
        groups = work.heads // work.kv_heads
        parts = []
        for row in self.rows:
            start, keys = work.offsets[row], slice(*work.key_offsets[row : row + 2].tolist())
            at = lib.make(start + self.queries[row], "int64")
            visible = lib.make(work.visible_keys(row, self.queries[row]), "bool")
            compared = lib.make(self.key_positions[row], "int64")
            step = max(1, NUMBERS // (work.keys[row] * work.dim))
            by_heads = []
            for first in range(0, work.kv_heads, step):
                kv_heads = slice(first, first + step)
                heads = slice(first * groups, (first + step) * groups)
                arrays = [
                    *(xp.take(x[:, heads], at, axis=0) for x in (q, dout)),
                    *(x[keys, kv_heads] for x in (k, v)),
                ]
                operands = map(as_dtype, arrays)
                by_heads.append(_attend(xp, visible, compared, *operands))
            parts.append([xp.concat(list(x), axis=1) for x in zip(*by_heads, strict=True)])
        return [lib.as_float64(xp.concat(list(x), axis=0)) for x in zip(*parts, strict=True)]

    def error(self, parts: list[Any]) -> float:
        """Return the largest relative error of the sampled parts: the result, or the gradients.

        It is NaN if a number is not finite.
        """
        xp = self.lib.xp
        expected = self.exact[:1] if len(parts) == 1 else self.exact[1:]

        def norm(x: Any) -> float:
            return float(xp.sqrt(xp.sum(x * x)))

        _, dout = inputs(self.lib, self.work)
        floor = MIN_SCALE * norm(self.lib.as_float64(xp.take(dout, self.tokens, axis=0)))
        errors = [norm(x - y) / max(norm(y), floor) for x, y in zip(parts, expected, strict=True)]
        return float(np.max(errors))

    def bounds(self) -> tuple[float, float]:
        """Return the largest accepted errors of the result and of the gradients."""
        least = LEAST_ERRORS[self.work.dtype]
        forward, gradient = (MAX_ERROR_RATIO * max(x, least) for x in self.eager)
        return forward, gradient


def _positions(length: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Return at most `count` positions of a row: the first, the last, and random ones."""
    if length <= count:
        return np.arange(length)
    return np.unique([0, length - 1, *rng.choice(length, count - 2, replace=False)])


def _attend(
    xp: Any, visible: Any, compared: Any, q: Any, dout: Any, k: Any, v: Any
) -> tuple[Any, ...]:
    """Return the result of some queries of a row, their gradients, and gradients of keys.

    The gradients of k and v are given for the `compared` keys. As in eager PyTorch, the softmax and
    its gradient are computed in float32 at least, and every operation rounds its result to the data
    type of `q`. A query that sees no key has the result 0.
    """
    (count, heads, dim), (_, kv_heads, _) = q.shape, k.shape
    groups, dtype = heads // kv_heads, q.dtype
    wide = dtype if dtype == xp.float64 else xp.float32

    def by_head(x: Any) -> Any:
        x = xp.reshape(x, (count, kv_heads, groups, dim))
        return xp.reshape(xp.permute_dims(x, (1, 2, 0, 3)), (kv_heads, groups * count, dim))

    def by_query(x: Any) -> Any:
        x = xp.permute_dims(xp.reshape(x, (kv_heads, groups, count, dim)), (2, 0, 1, 3))
        return xp.reshape(x, (count, heads, dim))

    q, dout = by_head(q), by_head(dout)
    k, v = (xp.permute_dims(x, (1, 0, 2)) for x in (k, v))
    visible = xp.concat([visible] * groups, axis=0)
    scale, transposed = dim**-0.5, xp.matrix_transpose
    scores = xp.astype(xp.matmul(q, transposed(k)) * scale, wide)
    # A finite number, so that a query without keys has no NaN.
    weights = softmax(xp, xp.where(visible, scores, -1e30))
    weights = xp.astype(xp.where(visible, weights, xp.zeros_like(weights)), dtype)
    out = xp.matmul(weights, v)
    slopes = xp.astype(weights, wide) * xp.astype(xp.matmul(dout, transposed(v)), wide)
    slopes = slopes - xp.astype(weights, wide) * xp.sum(slopes, axis=-1, keepdims=True)
    dscores = xp.astype(slopes, dtype) * scale
    dk, dv = (
        xp.permute_dims(xp.matmul(transposed(xp.take(x, compared, axis=2)), y), (1, 0, 2))
        for x, y in ((dscores, q), (weights, dout))
    )
    return by_query(out), by_query(xp.matmul(dscores, k)), dk, dv
