"""An attention problem: random rows of given lengths, and its float64 reference."""

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
from .libraries import MeasuredLibrary, load

CHUNK = 2048  # queries whose scores the reference holds at once
BACKWARD = 2.5  # five matrix products in the backward pass, two in the forward pass


@dataclass(frozen=True)
class Work:
    """One attention problem: random rows of given lengths.

    Attributes
    ----------
    lengths
        Tokens of each row.
    heads, kv_heads, dim
        Heads of the queries, heads of keys and values, and the head dimension.
    dtype
        Name of the data type.
    causal
        Whether a token attends only to itself and earlier tokens.
    seed
        Seed of the random numbers.
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
        """Total number of tokens."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths, default=0)

    @property
    def flops(self) -> float:
        """Floating-point operations that an exact forward pass needs.

        The backward pass takes `BACKWARD` times as many.
        """
        pairs = sum(n * (n + 1) / 2 if self.causal else n * n for n in self.lengths)
        return 4.0 * self.heads * self.dim * pairs

    @property
    def padded_scores(self) -> float:
        """Bytes of the scores of a padded batch, in float32."""
        return 4.0 * len(self.lengths) * self.heads * self.longest**2

    @property
    def offsets(self) -> np.ndarray:
        """Offsets of the rows, (rows + 1,) int32."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Shapes (total, heads, dim) of queries, keys, values and the gradient of the result."""
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
        """The converted arrays per library name; filled by `inputs`."""
        return {}

    @cached_property
    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Index of each token, (rows, longest), 0 in the padding, and the token mask."""
        at = np.arange(self.longest)
        token_mask = at < np.asarray(self.lengths)[:, None]
        return np.where(token_mask, self.offsets[:-1, None] + at, 0), token_mask


def inputs(lib: MeasuredLibrary, work: Work) -> tuple[tuple[Any, ...], Any]:
    """Return queries, keys and values, and the gradient of the result.

    All peers of a work share one copy.
    """
    if lib.name not in work.made:
        if lib.device == "cuda":
            work.made[lib.name] = tuple(
                itertools.starmap(lib.normal(work.seed, work.dtype), work.shapes)
            )
        else:
            work.made[lib.name] = tuple(lib.make(x, work.dtype) for x in work.arrays)
    *args, cotangent = work.made[lib.name]
    return tuple(args), cotangent


def reference(lib: MeasuredLibrary, work: Work, gradients: bool = True) -> tuple[Any, ...]:
    """Compute the result and optionally the gradients of q, k and v, in float64.

    The inputs are the numbers of the library, after rounding to its data type. The computation goes
    by head, by row and by chunks of queries. It runs in NumPy, or in PyTorch on its device, where
    NumPy would take minutes for long rows. PyTorch results stay on the device.
    """
    compute_lib = lib if lib.name == "torch" else load("numpy")
    args, cotangent = inputs(lib, work)
    q, k, v, dout = (
        compute_lib.wide(x) if compute_lib is lib else lib.arrays.read(x)
        for x in (*args, cotangent)
    )
    xp, groups, scale = compute_lib.xp, work.heads // work.kv_heads, 1 / math.sqrt(work.dim)
    out, dq, dk, dv = (xp.zeros_like(x) for x in (q, q, k, v))
    at = compute_lib.make(np.arange(work.total), "int32")
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


def distance(result: Any, expected: Any) -> float:
    """Return the norm of the difference relative to the norm of `expected`, for float64 arrays.

    The result is NaN if a number is not finite.
    """
    xp = scree.namespace(expected)
    return float(xp.sqrt(xp.sum((result - expected) ** 2)) / xp.sqrt(xp.sum(expected**2)))


def worst(
    lib: MeasuredLibrary,
    result: Any,
    expected: tuple[Any, ...],
    packed: Callable[[Any], Any] = lambda x: x,
) -> float:
    """Return the largest distance between the parts of a result and the reference `expected`.

    `packed` converts each part to the form of the reference.
    """
    parts = result if isinstance(result, tuple | list) else (result,)
    return max(distance(lib.wide(packed(x), y), y) for x, y in zip(parts, expected, strict=True))
