"""The reference: every operation by its definition, one plain loop over NumPy rows.

This module does not import scree. The functions keep the precision of their input. Called with
float64 rows they give the expected values. Called with float32 rows they show the error of a plain
implementation in this precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np


class Rows(list[np.ndarray]):
    """The rows of one ragged array; `template` is a row without tokens, for empty batches."""

    def __init__(self, rows: Iterable[np.ndarray], template: np.ndarray) -> None:
        super().__init__(rows)
        self.template = template

    def astype(self, dtype: Any) -> Rows:
        """Return the same rows in another precision."""
        return Rows((row.astype(dtype) for row in self), self.template.astype(dtype))

    def stack(self, f: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Apply `f` to each row and stack the results, which all have one shape, to (n, ...)."""
        return np.stack([f(row) for row in self]) if self else np.stack([f(self.template)])[:0]


def each(f: Callable[..., Any]) -> Callable[..., list[np.ndarray]]:
    """Apply `f` to each row; dense operands with one more axis have one entry per row."""

    def rows(*args: Any) -> list[np.ndarray]:
        first = next(a for a in args if isinstance(a, list))
        return [f(*(_of_row(a, i, first[i].ndim) for a in args)) for i in range(len(first))]

    return rows


def _of_row(x: Any, i: int, ndim: int) -> Any:
    if isinstance(x, list):
        return x[i]
    if isinstance(x, np.ndarray) and x.ndim == ndim + 1:
        return x[i if x.shape[0] > 1 else 0]
    return x


# ----------------------------------------------------------------------------- reductions and scans
def _running(name: str, x: np.ndarray, axis: tuple[int, ...], keepdims: bool) -> np.ndarray:
    """Return a sum or product, accumulated one number after the other."""
    f, nothing = (np.add, 0) if name == "sum" else (np.multiply, 1)
    n, rest = (
        math.prod(x.shape[a] for a in axis),
        tuple(size for a, size in enumerate(x.shape) if a not in axis),
    )
    numbers = np.moveaxis(x, axis, range(len(axis))).reshape(n, *rest)
    result = f.accumulate(numbers, axis=0)[-1] if n else np.full(rest, nothing, x.dtype)
    return (
        result.reshape([1 if a in axis else size for a, size in enumerate(x.shape)])
        if keepdims
        else result
    )


def _extreme(dtype: np.dtype[Any], name: str) -> Any:
    if dtype.kind == "f":
        return -math.inf if name == "max" else math.inf
    return np.iinfo(dtype).min if name == "max" else np.iinfo(dtype).max


def _deviate(x: np.ndarray, axis: tuple[int, ...], keepdims: bool, correction: float) -> np.ndarray:
    n = math.prod(x.shape[a] for a in axis)
    with np.errstate(all="ignore"):
        center = _running("sum", x, axis, True) / x.dtype.type(n)
        total = _running("sum", (x - center) ** 2, axis, keepdims)
        return total / (n - correction) if n > correction else total * x.dtype.type(math.nan)


def reduce_array(
    name: str, x: np.ndarray, axis: tuple[int, ...], keepdims: bool, correction: float = 0
) -> np.ndarray:
    """Return one dense reduction; an empty one is 0, 1, True, False, -inf, inf or NaN."""
    if name in ("var", "std"):
        result = _deviate(x, axis, keepdims, correction)
        return np.sqrt(result) if name == "std" else result
    if name == "mean":
        with np.errstate(all="ignore"):
            n = x.dtype.type(math.prod(x.shape[a] for a in axis))
            return np.asarray(_running("sum", x, axis, keepdims) / n)
    if name == "count_nonzero":
        return np.asarray(np.sum(x != 0, axis=axis, keepdims=keepdims))
    if name in ("sum", "prod"):
        return _running(name, x if x.dtype.kind == "f" else x.astype(np.int64), axis, keepdims)
    more = {"initial": _extreme(x.dtype, name)} if name in ("max", "min") else {}
    return np.asarray(getattr(np, name)(x, axis=axis, keepdims=keepdims, **more))


def reduce(
    name: str,
    rows: Rows,
    axis: Any,
    *,
    keepdims: bool = False,
    correction: float = 0,
    ragged: int = 1,
) -> list[np.ndarray] | np.ndarray:
    """Return a reduction over axes of the batch, as rows or as a dense array.

    Axis `ragged` is the ragged axis.
    """
    ndim = rows.template.ndim + 1
    axes = (
        tuple(range(ndim))
        if axis is None
        else tuple(sorted(a % ndim for a in np.atleast_1d(axis).tolist()))
    )
    inner = tuple(a - 1 for a in axes if a)
    if 0 in axes:
        whole = np.concatenate([rows.template, *rows], axis=ragged - 1)
        result = reduce_array(name, whole, inner, keepdims, correction)
        return result[None] if keepdims else result

    def one(row: np.ndarray) -> np.ndarray:
        return reduce_array(name, row, inner, keepdims, correction)

    return rows.stack(one) if ragged in axes else [one(row) for row in rows]


def scan(name: str, rows: Rows, axis: int, *, initial: bool = False) -> list[np.ndarray]:
    """Return a running sum or product along an axis of each row."""
    out, first = [], 0 if name == "cumulative_sum" else 1
    for row in rows:
        result = (np.cumsum if name == "cumulative_sum" else np.cumprod)(row, axis=axis)
        if initial:
            shape = tuple(1 if a == axis else n for a, n in enumerate(row.shape))
            result = np.concatenate([np.full(shape, first, result.dtype), result], axis=axis)
        out.append(result)
    return out


# -------------------------------------------------------------------------------- softmax and norms
def _shifted(row: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    top = np.max(row, axis=axis, keepdims=True, initial=-math.inf)
    return top, np.sum(np.exp(row - top), axis=axis, keepdims=True)


def softmax(rows: Rows, axis: int = 0) -> list[np.ndarray]:
    """Return ``exp(x) / sum(exp(x))`` along an axis of each row."""
    return [np.exp(row - _shifted(row, axis)[0]) / _shifted(row, axis)[1] for row in rows]


def log_softmax(rows: Rows, axis: int = 0) -> list[np.ndarray]:
    """Return ``log(softmax(x))`` along an axis of each row."""
    return [row - _shifted(row, axis)[0] - np.log(_shifted(row, axis)[1]) for row in rows]


def logsumexp(rows: Rows, axis: int = 0) -> np.ndarray:
    """Return ``log(sum(exp(x)))`` along an axis of each row; -inf for an empty row."""

    def one(row: np.ndarray) -> np.ndarray:
        top, total = _shifted(row, axis)
        with np.errstate(divide="ignore"):
            return np.squeeze(
                np.where(total > 0, top + np.log(total), -math.inf).astype(row.dtype), axis=axis
            )

    return rows.stack(one)


def topk(
    rows: Rows, k: int, *, largest: bool = True, axis: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the k largest or smallest tokens of each row, sorted, and their positions in the row.

    Of equal tokens the first comes first in both directions. NaN is the largest number.
    """
    values, positions = [], []
    for row in rows:
        # np.unique gives every NaN the highest rank, and negating the ranks keeps the sort stable.
        ranks = np.unique(row, return_inverse=True)[1].reshape(row.shape)
        order = np.argsort(-ranks if largest else ranks, axis=axis, kind="stable")
        first = np.take(order, np.arange(min(k, row.shape[axis])), axis=axis)
        values.append(np.take_along_axis(row, first, axis))
        positions.append(first)
    return values, positions


def cross_entropy(
    rows: Rows, targets: Sequence[np.ndarray], *, ignore_index: int = -100, reduction: str = "mean"
) -> list[np.ndarray] | np.ndarray:
    """Return ``log(sum(exp(x))) - x[target]`` per token; 0 where the target is ignored.

    The exponentials are added one after the other.
    """
    out, counted = [], []
    for row, classes in zip(rows, targets, strict=True):
        loss = np.zeros(len(row), row.dtype)
        for i, (x, target) in enumerate(zip(row, classes, strict=True)):
            if target != ignore_index:
                top = np.max(x)
                loss[i] = np.log(np.add.accumulate(np.exp(x - top))[-1]) + (top - x[target])
        out.append(loss)
        counted.append(np.asarray(classes) != ignore_index)
    if reduction == "none":
        return out
    wide = rows.template.dtype.type
    sums, counts = (
        np.asarray([np.sum(x, dtype=d) for x in parts], d)
        for parts, d in ((out, wide), (counted, np.int64))
    )
    if reduction == "row_mean":
        with np.errstate(all="ignore"):
            return np.asarray(sums / counts.astype(wide))
    total = np.sum(sums, dtype=wide)
    return np.asarray(
        total
        if reduction == "sum"
        else total / wide(np.sum(counts))
        if np.sum(counts)
        else wide(math.nan)
    )


def linear_cross_entropy(
    rows: Rows,
    weight: np.ndarray,
    targets: Sequence[np.ndarray],
    bias: Any = 0,
    *,
    stage: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    **options: Any,
) -> list[np.ndarray] | np.ndarray:
    """Return the cross-entropy of the logits ``x @ weight.T + bias``.

    `stage` rounds the logits where a lower precision stores them rounded.
    """
    template = np.zeros((0, len(weight)), rows.template.dtype)
    return cross_entropy(
        Rows((stage(stage(row @ weight.T) + bias) for row in rows), template), targets, **options
    )


def rms_norm(rows: Rows, weight: Any = 1, eps: float = 1e-6) -> list[np.ndarray]:
    """Return ``x / sqrt(mean(x ** 2) + eps) * weight`` over the last axis."""
    return [
        row / np.sqrt(np.mean(row * row, axis=-1, keepdims=True) + row.dtype.type(eps)) * weight
        for row in rows
    ]


def layer_norm(rows: Rows, weight: Any = 1, bias: Any = 0, eps: float = 1e-5) -> list[np.ndarray]:
    """Return ``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axis."""
    out = []
    for row in rows:
        centered = row - np.mean(row, axis=-1, keepdims=True)
        out.append(
            centered
            / np.sqrt(np.mean(centered**2, axis=-1, keepdims=True) + row.dtype.type(eps))
            * weight
            + bias
        )
    return out


def split(rows: Rows, sizes: Sequence[int], axis: int) -> tuple[list[np.ndarray], ...]:
    """Return the parts of each row along one axis of the tokens."""
    parts = [np.split(row, np.cumsum(sizes)[:-1], axis=axis) for row in rows]
    return tuple([part[i] for part in parts] for i in range(len(sizes)))


def swiglu(rows: Rows) -> list[np.ndarray]:
    """Return ``gate / (1 + exp(-gate)) * value``; gates and values are halves of the last axis."""
    with np.errstate(over="ignore"):
        return [
            gate / (1 + np.exp(-gate)) * value
            for gate, value in (np.split(row, 2, axis=-1) for row in rows)
        ]


def rope(
    rows: Rows,
    *,
    theta: float = 10000.0,
    interleaved: bool = False,
    start: Sequence[int] | None = None,
) -> list[np.ndarray]:
    """Rotate pair i of token p by ``p * theta ** (-2 i / d)``.

    A pair is two adjacent elements, or one element of each half.
    """
    out = []
    for r, row in enumerate(rows):
        turned, d = np.empty_like(row), row.shape[-1]
        for i in range(d // 2):
            a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + d // 2)
            place = np.arange(row.shape[0], dtype=row.dtype) + (0 if start is None else start[r])
            angle = place * row.dtype.type(theta ** (-2 * i / d))
            angle = angle.reshape(-1, *(1,) * (row.ndim - 2))
            turned[..., a] = row[..., a] * np.cos(angle) - row[..., b] * np.sin(angle)
            turned[..., b] = row[..., b] * np.cos(angle) + row[..., a] * np.sin(angle)
        out.append(turned)
    return out


# ---------------------------------------------------------------------------------------- attention
def visible(queries: int, keys: int, causal: bool, window: Any) -> np.ndarray:
    """Return a (queries, keys) mask of the keys that each query sees.

    The last query is aligned with the last key.
    """
    place = np.arange(queries)[:, None] + keys - queries
    key = np.arange(keys)[None, :]
    seen = np.ones((queries, keys), bool)
    if causal:
        seen &= key <= place
    if isinstance(window, tuple):
        left, right = window
        if left is not None:
            seen &= key >= place - left
        if right is not None:
            seen &= key <= place + right
    elif window is not None:
        seen &= key > place - window
    return seen


def attention(
    q: Rows,
    k: Rows,
    v: Rows,
    *,
    causal: bool = False,
    window: Any = None,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Any = None,
    sinks: Any = None,
    stage: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return output and log-sum-exp of each row.

    `stage` rounds scores and weights where a lower precision stores them rounded.
    """
    out, lse = [], []
    for qs, ks, vs in zip(q, k, v, strict=True):
        heads, kv_heads, wide = qs.shape[1], ks.shape[1], qs.dtype.type
        got, logs = (
            np.zeros((*qs.shape[:2], vs.shape[2]), wide),
            np.full(qs.shape[:2], -math.inf, wide),
        )
        for h in range(heads):
            g = h // (heads // kv_heads)
            score = stage(
                qs[:, h] @ ks[:, g].T * wide(1 / math.sqrt(qs.shape[2]) if scale is None else scale)
            )
            if softcap is not None:
                score = wide(softcap) * np.tanh(score / wide(softcap))
            if alibi_slopes is not None:
                positions = np.arange(qs.shape[0])[:, None] + ks.shape[0] - qs.shape[0]
                score = score - wide(alibi_slopes[h]) * np.abs(positions - np.arange(ks.shape[0]))
            seen, values = visible(qs.shape[0], ks.shape[0], causal, window), vs[:, g]
            if sinks is not None:  # a key that every query sees, with the value 0
                score = np.concatenate((score, np.full((qs.shape[0], 1), wide(sinks[h]))), axis=1)
                seen = np.concatenate((seen, np.ones((qs.shape[0], 1), bool)), axis=1)
                values = np.concatenate((values, np.zeros((1, vs.shape[2]), wide)))
            some = seen.any(axis=1)
            score = np.where(seen, score, wide(-math.inf))[some]
            top = np.max(score, axis=1, keepdims=True, initial=-math.inf)
            total = np.sum(np.exp(score - top), axis=1, keepdims=True)
            got[some, h] = stage(np.exp(score - top) / total) @ values
            logs[some, h] = (top + np.log(total))[:, 0]
        out.append(got)
        lse.append(logs)
    return out, lse


def rounded(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that rounds float32 to a half precision and back."""
    if dtype == "float16":
        return lambda x: x.astype(np.float16).astype(x.dtype)

    def bfloat16(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        even = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (even & np.uint32(0xFFFF0000)).view(np.float32).astype(x.dtype)

    return bfloat16
