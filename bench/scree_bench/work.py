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

#: Queries whose scores the reference holds at a time.
CHUNK = 2048
#: Operations of the backward pass relative to the forward pass: five matrix products and two.
BACKWARD = 2.5


@dataclass(frozen=True)
class Work:
    """One attention problem: random rows of given lengths.

    Attributes
    ----------
    lengths
        Tokens of each row, or its queries if `key_lengths` is given.
    heads, kv_heads, dim
        Heads of the queries, heads of keys and values, and the head dimension.
    dtype
        Name of the data type.
    causal
        Whether a token attends only to itself and earlier tokens. The last query and the last key
        of a row are aligned.
    seed
        Seed of the random numbers.
    window
        Keys before and after its own position that a query sees, or None for all.
    key_lengths
        Keys of each row; None if each token is a query and a key.
    """

    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int
    dtype: str = "float32"
    causal: bool = True
    seed: int = 0
    window: tuple[int, int] | None = None
    key_lengths: tuple[int, ...] | None = None

    @property
    def total(self) -> int:
        """Total number of tokens."""
        return sum(self.lengths)

    @property
    def max_length(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths, default=0)

    @property
    def keys(self) -> tuple[int, ...]:
        """Keys of each row."""
        return self.lengths if self.key_lengths is None else self.key_lengths

    @property
    def max_keys(self) -> int:
        """Keys of the row with the most keys."""
        return max(self.keys, default=0)

    @cached_property
    def pairs(self) -> int:
        """Pairs of a query and a key that it sees, per head."""
        lengths = np.asarray(self.lengths, np.int64)
        starts = np.cumsum(lengths) - lengths
        positions = np.arange(self.total) - np.repeat(starts, lengths)
        keys = np.repeat(np.asarray(self.keys, np.int64), lengths)
        first, last = self.visible_range(positions, np.repeat(lengths, lengths), keys)
        return int(np.maximum(last - first + 1, 0).sum())

    def visible_keys(self, row: int, positions: np.ndarray) -> np.ndarray:
        """Return a (positions, keys) mask: whether queries of a row see its keys."""
        first, last = self.visible_range(
            positions, np.asarray(self.lengths[row]), np.asarray(self.keys[row])
        )
        keys = np.arange(self.keys[row])
        return (keys >= first[:, None]) & (keys <= last[:, None])

    def visible_range(self, position: Any, queries: Any, keys: Any) -> tuple[Any, Any]:
        """Return the first and the last key that a query sees; no key if the last is smaller.

        The arguments are integer arrays: the position of a query in its row, and the numbers of
        queries and keys of the row.
        """
        own = position + keys - queries
        left, right = (keys.max(initial=0) + queries.max(initial=0),) * 2
        if self.window is not None:
            left, right = self.window
        right = 0 if self.causal else right
        return np.maximum(own - left, 0), np.minimum(own + right, keys - 1)

    @property
    def flops(self) -> float:
        """Floating-point operations that an exact forward pass needs.

        The backward pass takes `BACKWARD` times as many.
        """
        return 4.0 * self.heads * self.dim * self.pairs

    @property
    def padded_scores(self) -> float:
        """Bytes of the scores of a padded batch, in float32."""
        return 4.0 * len(self.lengths) * self.heads * self.max_length**2

    @property
    def offsets(self) -> np.ndarray:
        """Offsets of the rows, (rows + 1,) int32."""
        return np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)

    @property
    def key_offsets(self) -> np.ndarray:
        """Offsets of the rows of keys, (rows + 1,) int32."""
        return np.concatenate([[0], np.cumsum(self.keys)]).astype(np.int32)

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Shapes (total, heads, dim) of queries, keys, values and the gradient of the result."""
        queries = (self.total, self.heads, self.dim)
        keys = (sum(self.keys), self.kv_heads, self.dim)
        return [queries, keys, keys, queries]

    @cached_property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """Random float32 numbers in these shapes, the same for every library on the CPU."""
        rng = np.random.default_rng(self.seed)
        return tuple(rng.standard_normal(shape, dtype=np.float32) for shape in self.shapes)

    @cached_property
    def arrays_by_library(self) -> dict[str, tuple[Any, ...]]:
        """Library name -> converted arrays; `inputs` fills it."""
        return {}

    @cached_property
    def tokens(self) -> tuple[np.ndarray, np.ndarray]:
        """Index of each token, (rows, longest), 0 in the padding, and the token mask."""
        positions = np.arange(self.max_length)
        token_mask = positions < np.asarray(self.lengths)[:, None]
        return np.where(token_mask, self.offsets[:-1, None] + positions, 0), token_mask


def inputs(lib: MeasuredLibrary, work: Work) -> tuple[tuple[Any, ...], Any]:
    """Return queries, keys and values, and the gradient of the result.

    All peers share one copy per library.
    """
    if lib.name not in work.arrays_by_library:
        if lib.device == "cuda":
            work.arrays_by_library[lib.name] = tuple(
                itertools.starmap(lib.normal(work.seed, work.dtype), work.shapes)
            )
        else:
            work.arrays_by_library[lib.name] = tuple(lib.make(x, work.dtype) for x in work.arrays)
    *args, cotangent = work.arrays_by_library[lib.name]
    return tuple(args), cotangent


def reference(lib: MeasuredLibrary, work: Work, gradients: bool = True) -> tuple[Any, ...]:
    """Compute the result and optionally the gradients of q, k and v, in float64.

    The work has neither a window nor `key_lengths`; `samples` has references of such works.

    The inputs are the numbers of the library, after rounding to its data type. The computation goes
    by head, by row and by chunks of queries. It runs in NumPy, or in PyTorch on its device, where
    NumPy would take minutes for long rows. PyTorch results stay on the device.
    """
    compute_lib = lib if lib.name == "torch" else load("numpy")
    args, cotangent = inputs(lib, work)
    q, k, v, dout = (
        compute_lib.as_float64(x) if compute_lib is lib else lib.arrays.read(x)
        for x in (*args, cotangent)
    )
    xp, groups, scale = compute_lib.xp, work.heads // work.kv_heads, 1 / math.sqrt(work.dim)
    out, dq, dk, dv = (xp.zeros_like(x) for x in (q, q, k, v))
    positions = compute_lib.make(np.arange(work.total), "int32")
    for first, n in zip(work.offsets[:-1].tolist(), work.lengths, strict=True):
        for start, head in itertools.product(range(first, first + n, CHUNK), range(work.heads)):
            stop, kv_head = min(start + CHUNK, first + n), head // groups
            queries = slice(start, stop)
            keys = slice(first, stop if work.causal else first + n)
            scores = q[queries, head] @ k[keys, kv_head].T * scale
            if work.causal:
                scores = xp.where(
                    positions[queries, None] >= positions[None, keys], scores, -math.inf
                )
            weights = softmax(xp, scores)
            out[queries, head] = weights @ v[keys, kv_head]
            if gradients:
                mean = xp.sum(dout[queries, head] * out[queries, head], axis=-1, keepdims=True)
                dscores = weights * (dout[queries, head] @ v[keys, kv_head].T - mean) * scale
                dq[queries, head] = dscores @ k[keys, kv_head]
                dk[keys, kv_head] += dscores.T @ q[queries, head]
                dv[keys, kv_head] += weights.T @ dout[queries, head]
    return (out, dq, dk, dv) if gradients else (out,)


def relative_error(result: Any, expected: Any) -> float:
    """Return the norm of the difference relative to the norm of `expected`, for float64 arrays.

    The result is NaN if a number is not finite.
    """
    xp = scree.namespace(expected)
    return float(xp.sqrt(xp.sum((result - expected) ** 2)) / xp.sqrt(xp.sum(expected**2)))


def max_relative_error(
    lib: MeasuredLibrary,
    result: Any,
    expected: tuple[Any, ...],
    packed: Callable[[Any], Any] = lambda x: x,
) -> float:
    """Return the largest distance between the parts of a result and the reference `expected`.

    `packed` converts each part to the form of the reference.
    """
    parts = result if isinstance(result, tuple | list) else (result,)
    return max(
        relative_error(lib.as_float64(packed(x), y), y)
        for x, y in zip(parts, expected, strict=True)
    )
