"""An attention problem: random rows of some lengths; and what is right, in float64."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

import scree

from .formulas import softmax
from .libraries import Library, load

CHUNK = 2048  # queries of which the reference holds the scores
BACKWARD = 2.5  # matrix products of the backward pass over those of the forward pass: five over two


@dataclass(frozen=True)
class Work:
    """One attention problem: random rows of some lengths.

    Attributes
    ----------
    lengths
        Tokens of each row.
    heads, kv_heads, dim
        Heads of the queries, heads of keys and values, and their size.
    dtype
        Name of the data type.
    causal
        Whether a token sees those before it alone.
    seed
        Of the random numbers.
    """

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    dtype: str = "float32"
    causal: bool = True
    seed: int = 0

    @property
    def total(self) -> int:
        """Tokens in all."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths, default=0)

    @property
    def flops(self) -> float:
        """Floating-point operations of the forward pass that no exact algorithm can leave out; backward takes 2.5 times it."""
        pairs = sum(n * (n + 1) / 2 if self.causal else n * n for n in self.lengths)
        return 4.0 * self.heads * self.dim * pairs

    @property
    def padded_scores(self) -> float:
        """Bytes of the scores of a padded batch, float32."""
        return 4.0 * len(self.lengths) * self.heads * self.longest**2

    @property
    def offsets(self) -> np.ndarray:
        """(rows + 1,) int32."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """(total, heads, dim) of queries, keys, values and the gradient of the result."""
        return [
            (self.total, h, self.dim)
            for h in (self.heads, self.kv_heads, self.kv_heads, self.heads)
        ]

    @cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Random float32 numbers in these shapes, the same for every library on the CPU."""
        rng = np.random.default_rng(self.seed)
        return tuple(rng.standard_normal(shape, dtype=np.float32) for shape in self.shapes)

    @cached_property
    def made(self) -> dict[str, tuple[Any, ...]]:
        """The arrays as those of a library, by its name, once they have been made."""
        return {}

    @cached_property
    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows, longest) index of each token, 0 in the padding, and which of them are real."""
        at = np.arange(self.longest)
        real = at < np.asarray(self.lengths)[:, None]
        return np.where(real, self.offsets[:-1, None] + at, 0), real


def inputs(lib: Library, work: Work) -> tuple[tuple[Any, ...], Any]:
    """Queries, keys and values, and the gradient of the result: one copy for all the peers of a work."""
    if lib.name not in work.made:
        if lib.device == "cuda":
            work.made[lib.name] = tuple(
                itertools.starmap(lib.normal(work.seed, work.dtype), work.shapes)
            )
        else:
            work.made[lib.name] = tuple(lib.make(x, work.dtype) for x in work.arrays)
    *args, cotangent = work.made[lib.name]
    return tuple(args), cotangent


def reference(lib: Library, work: Work, gradients: bool = True) -> tuple[Any, ...]:
    """Result and, on request, the gradients of q, k and v: float64, head by head and row by row, some queries at a time.

    Computed from the numbers that the library has, after rounding to its data type; by NumPy, or by PyTorch on its device, where
    long rows would take NumPy minutes; and they stay there.
    """
    own = lib if lib.name == "torch" else load("numpy")
    args, cotangent = inputs(lib, work)
    q, k, v, dout = (own.wide(x) if own is lib else lib.arrays.read(x) for x in (*args, cotangent))
    xp, groups, scale = own.xp, work.heads // work.kv_heads, 1 / math.sqrt(work.dim)
    out, dq, dk, dv = (xp.zeros_like(x) for x in (q, q, k, v))
    at = own.make(np.arange(work.total), "int32")
    for first, n in zip(work.offsets[:-1].tolist(), work.lengths, strict=True):
        for start, h in itertools.product(range(first, first + n, CHUNK), range(work.heads)):
            stop = min(start + CHUNK, first + n)
            g, row, keys = (
                h // groups,
                slice(start, stop),
                slice(first, stop if work.causal else first + n),
            )
            scores = q[row, h] @ k[keys, g].T * scale
            if work.causal:
                scores = xp.where(at[row, None] >= at[None, keys], scores, -math.inf)
            weights = softmax(xp, scores)
            out[row, h] = weights @ v[keys, g]
            if gradients:
                mean = xp.sum(dout[row, h] * out[row, h], axis=-1, keepdims=True)
                dscores = weights * (dout[row, h] @ v[keys, g].T - mean) * scale
                dq[row, h] = dscores @ k[keys, g]
                dk[keys, g] += dscores.T @ q[row, h]
                dv[keys, g] += weights.T @ dout[row, h]
    return (out, dq, dk, dv) if gradients else (out,)


def distance(found: Any, right: Any) -> float:
    """Norm of the difference over the norm of what is right, of float64 arrays; NaN where anything is not finite."""
    xp = scree.namespace(right)
    return float(xp.sqrt(xp.sum((found - right) ** 2)) / xp.sqrt(xp.sum(right**2)))


def worst(
    lib: Library, found: Any, right: tuple[Any, ...], packed: Callable[[Any], Any] = lambda x: x
) -> float:
    """The largest distance of a result, or of the parts of one, from what is right; `packed` gives each the form of the latter."""
    parts = found if isinstance(found, tuple | list) else (found,)
    return max(distance(lib.wide(packed(x), y), y) for x, y in zip(parts, right, strict=True))
