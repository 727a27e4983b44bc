"""The oracle: every operation by its definition, as a plain loop over NumPy rows.

This module does not import scree. Its functions keep the precision of their input: float64 rows
give the expected values, and float32 rows show the error of a plain implementation in float32.
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

    def concatenate(self, axis: int = 0) -> np.ndarray:
        """Return the tokens of all rows in one array."""
        return np.concatenate([self.template, *self], axis=axis)

    def stack(self, f: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Apply `f` to each row and stack the results, which all have one shape, to (n, ...)."""
        return np.stack([f(row) for row in self]) if self else np.stack([f(self.template)])[:0]


def map_rows(f: Callable[..., Any]) -> Callable[..., list[np.ndarray]]:
    """Return a function that applies `f` to each row of its arguments.

    A dense argument with one more axis than a row has one entry per row.
    """

    def apply(*args: Any) -> list[np.ndarray]:
        first = next(a for a in args if isinstance(a, list))
        return [f(*(_operand_of_row(a, i, first[i].ndim) for a in args)) for i in range(len(first))]

    return apply


def _operand_of_row(x: Any, i: int, ndim: int) -> Any:
    if isinstance(x, list):
        return x[i]
    if isinstance(x, np.ndarray) and x.ndim == ndim + 1:
        return x[i if x.shape[0] > 1 else 0]
    return x


# ----------------------------------------------------------------------------- reductions and scans
def _accumulate(name: str, x: np.ndarray, axis: tuple[int, ...], keepdims: bool) -> np.ndarray:
    """Return a sum or product, accumulated sequentially."""
    ufunc, identity = (np.add, 0) if name == "sum" else (np.multiply, 1)
    n = math.prod(x.shape[a] for a in axis)
    shape = [size for a, size in enumerate(x.shape) if a not in axis]
    elements = np.moveaxis(x, axis, range(len(axis))).reshape(n, *shape)
    result = ufunc.accumulate(elements, axis=0)[-1] if n else np.full(shape, identity, x.dtype)
    if keepdims:
        result = result.reshape([1 if a in axis else size for a, size in enumerate(x.shape)])
    return result


def _extreme(dtype: np.dtype[Any], name: str) -> Any:
    if dtype.kind == "f":
        return -math.inf if name == "max" else math.inf
    return np.iinfo(dtype).min if name == "max" else np.iinfo(dtype).max


def _variance(
    x: np.ndarray, axis: tuple[int, ...], keepdims: bool, correction: float
) -> np.ndarray:
    n = math.prod(x.shape[a] for a in axis)
    with np.errstate(all="ignore"):
        center = _accumulate("sum", x, axis, True) / x.dtype.type(n)
        total = _accumulate("sum", (x - center) ** 2, axis, keepdims)
        return total / (n - correction) if n > correction else total * x.dtype.type(math.nan)


def reduce_array(
    name: str, x: np.ndarray, axis: tuple[int, ...], keepdims: bool, correction: float = 0
) -> np.ndarray:
    """Return one dense reduction; without elements it is 0, 1, True, False, -inf, inf or NaN."""
    if name in ("var", "std"):
        result = _variance(x, axis, keepdims, correction)
        return np.sqrt(result) if name == "std" else result
    if name == "mean":
        with np.errstate(all="ignore"):
            n = x.dtype.type(math.prod(x.shape[a] for a in axis))
            return np.asarray(_accumulate("sum", x, axis, keepdims) / n)
    if name == "count_nonzero":
        return np.asarray(np.sum(x != 0, axis=axis, keepdims=keepdims))
    if name in ("sum", "prod"):
        return _accumulate(name, x if x.dtype.kind == "f" else x.astype(np.int64), axis, keepdims)
    keywords = {"initial": _extreme(x.dtype, name)} if name in ("max", "min") else {}
    return np.asarray(getattr(np, name)(x, axis=axis, keepdims=keepdims, **keywords))


def reduce(
    name: str,
    rows: Rows,
    axis: Any,
    *,
    keepdims: bool = False,
    correction: float = 0,
    ragged_axis: int = 1,
) -> list[np.ndarray] | np.ndarray:
    """Return a reduction over axes of the batch, as rows or as a dense array."""
    ndim = rows.template.ndim + 1
    axes = range(ndim)
    if axis is not None:
        axes = sorted(a % ndim for a in np.atleast_1d(axis).tolist())
    row_axes = tuple(a - 1 for a in axes if a)
    if 0 in axes:
        tokens = rows.concatenate(axis=ragged_axis - 1)
        result = reduce_array(name, tokens, row_axes, keepdims, correction)
        return result[None] if keepdims else result

    def reduce_row(row: np.ndarray) -> np.ndarray:
        return reduce_array(name, row, row_axes, keepdims, correction)

    return rows.stack(reduce_row) if ragged_axis in axes else [reduce_row(row) for row in rows]


def scan(name: str, rows: Rows, axis: int, *, initial: bool = False) -> list[np.ndarray]:
    """Return a running sum or product along an axis of each row."""
    results, identity = [], 0 if name == "cumulative_sum" else 1
    for row in rows:
        result = (np.cumsum if name == "cumulative_sum" else np.cumprod)(row, axis=axis)
        if initial:
            shape = tuple(1 if a == axis else n for a, n in enumerate(row.shape))
            result = np.concatenate([np.full(shape, identity, result.dtype), result], axis=axis)
        results.append(result)
    return results


# -------------------------------------------------------------------------------- softmax and norms
def _max_and_sum_of_exp(row: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ``max(x)`` and ``sum(exp(x - max(x)))``."""
    maximum = np.max(row, axis=axis, keepdims=True, initial=-math.inf)
    return maximum, np.sum(np.exp(row - maximum), axis=axis, keepdims=True)


def softmax(rows: Rows, axis: int = 0) -> list[np.ndarray]:
    """Return ``exp(x) / sum(exp(x))`` along an axis of each row."""
    statistics = (_max_and_sum_of_exp(row, axis) for row in rows)
    return [
        np.exp(row - maximum) / total
        for row, (maximum, total) in zip(rows, statistics, strict=True)
    ]


def log_softmax(rows: Rows, axis: int = 0) -> list[np.ndarray]:
    """Return ``log(softmax(x))`` along an axis of each row."""
    statistics = (_max_and_sum_of_exp(row, axis) for row in rows)
    return [
        row - maximum - np.log(total)
        for row, (maximum, total) in zip(rows, statistics, strict=True)
    ]


def logsumexp(rows: Rows, axis: int = 0) -> np.ndarray:
    """Return ``log(sum(exp(x)))`` along an axis of each row; -inf for an empty row."""

    def row_logsumexp(row: np.ndarray) -> np.ndarray:
        maximum, total = _max_and_sum_of_exp(row, axis)
        with np.errstate(divide="ignore"):
            return np.squeeze(
                np.where(total > 0, maximum + np.log(total), -math.inf).astype(row.dtype), axis=axis
            )

    return rows.stack(row_logsumexp)


def stable_argsort(row: np.ndarray, axis: int, *, descending: bool) -> np.ndarray:
    """Return the sorting indices of a row; equal numbers, including NaN, keep their order."""
    # np.unique gives every NaN the highest rank, and negating the ranks keeps the sort stable.
    ranks = np.unique(row, return_inverse=True)[1].reshape(row.shape)
    return np.argsort(-ranks if descending else ranks, axis=axis, kind="stable")


def topk(
    rows: Rows, k: int, *, largest: bool = True, axis: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the k largest or smallest tokens of each row, sorted, and their positions in the row.

    Equal tokens keep their order in both directions. NaN is the largest number.
    """
    values, positions = [], []
    for row in rows:
        order = stable_argsort(row, axis, descending=largest)
        selected = np.take(order, np.arange(min(k, row.shape[axis])), axis=axis)
        values.append(np.take_along_axis(row, selected, axis))
        positions.append(selected)
    return values, positions


def shift(rows: Rows, n: int, fill_value: Any = 0, axis: int = 0) -> list[np.ndarray]:
    """Return the tokens of each row moved by `n` positions; free places hold `fill_value`."""
    shifted = []
    for row in rows:
        tokens = np.moveaxis(row, axis, 0)
        out = np.full_like(tokens, fill_value)
        for position, token in enumerate(tokens):
            if 0 <= position + n < len(tokens):
                out[position + n] = token
        shifted.append(np.moveaxis(out, 0, axis))
    return shifted


def conv1d(
    rows: Rows,
    weight: np.ndarray,
    bias: Any = 0,
    *,
    padding: str = "causal",
    groups: int = 1,
    dilation: int = 1,
) -> list[np.ndarray]:
    """Return ``sum(weight[:, :, i] @ x[t + i * dilation - before])``, per group of channels."""
    out_channels, _, width = weight.shape
    span = (width - 1) * dilation
    before = span if padding == "causal" else span // 2
    results = []
    for row in rows:
        out = np.zeros((len(row), out_channels), row.dtype)
        for t in range(len(row)):
            for i in range(width):
                source = t + i * dilation - before
                if 0 <= source < len(row):
                    parts = np.split(row[source], groups), np.split(weight[:, :, i], groups)
                    out[t] += np.concatenate([w @ x for x, w in zip(*parts, strict=True)])
        results.append(out + bias)
    return results


def cross_entropy(
    rows: Rows,
    targets: Sequence[np.ndarray],
    *,
    class_weights: Any = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> list[np.ndarray] | np.ndarray:
    """Return ``log(sum(exp(x))) - x[target]`` per token; 0 where the target is ignored.

    The exponentials are added sequentially. The z-loss has no class weights.
    """
    scalar_type = rows.template.dtype.type
    losses, squares, weights, is_counted = [], [], [], []
    for row, classes in zip(rows, targets, strict=True):
        loss, square, weight = (np.zeros(len(row), row.dtype) for _ in range(3))
        for i, (x, target) in enumerate(zip(row, classes, strict=True)):
            if target == ignore_index:
                continue
            if softcap is not None:
                x = scalar_type(softcap) * np.tanh(x / scalar_type(softcap))
            maximum = np.max(x)
            log_sum = np.log(np.add.accumulate(np.exp(x - maximum))[-1])
            weight[i] = 1 if class_weights is None else class_weights[target]
            loss[i] = weight[i] * (log_sum + (maximum - x[target]))
            if label_smoothing:
                per_class = log_sum + (maximum - x)
                if class_weights is not None:
                    per_class = per_class * class_weights
                smooth = np.add.accumulate(per_class)[-1] / scalar_type(len(x))
                share = scalar_type(label_smoothing)
                loss[i] = (1 - share) * loss[i] + share * smooth
            square[i] = scalar_type(z_loss) * (log_sum + maximum) ** 2
        losses.append(loss)
        squares.append(square)
        weights.append(weight)
        is_counted.append(np.asarray(classes) != ignore_index)
    if reduction == "none":
        return [loss + square for loss, square in zip(losses, squares, strict=True)]

    def sums(parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.asarray([np.sum(x, dtype=scalar_type) for x in parts], scalar_type)

    loss, square, weight, count = map(sums, (losses, squares, weights, is_counted))
    with np.errstate(all="ignore"):
        if reduction == "row_mean":
            return np.asarray(loss / weight + square / count)
        loss, square = (np.sum(x, dtype=scalar_type) for x in (loss, square))
        if reduction == "sum":
            return np.asarray(loss + square)
        return np.asarray(loss / np.sum(weight) + square / np.sum(count))


def accuracy(
    rows: Rows, targets: Sequence[np.ndarray], *, ignore_index: int = -100, reduction: str = "mean"
) -> list[np.ndarray] | np.ndarray:
    """Return 1 per token whose target is the first class with the largest logit, else 0."""
    correct = [
        np.asarray([np.argmax(x) == target for x, target in zip(row, classes, strict=True)], float)
        for row, classes in zip(rows, targets, strict=True)
    ]
    is_counted = [np.asarray(classes) != ignore_index for classes in targets]
    if reduction == "none":
        return correct
    total, count = (
        np.asarray([np.sum(x) for x in parts], float) for parts in (correct, is_counted)
    )
    with np.errstate(all="ignore"):
        if reduction == "row_mean":
            return np.asarray(total / count)
        return np.asarray(np.sum(total) if reduction == "sum" else np.sum(total) / np.sum(count))


def linear_cross_entropy(
    rows: Rows,
    weight: np.ndarray,
    targets: Sequence[np.ndarray],
    bias: Any = 0,
    *,
    rounding: Callable[[np.ndarray], np.ndarray] = lambda x: x,
    **options: Any,
) -> list[np.ndarray] | np.ndarray:
    """Return the cross-entropy of the logits ``x @ weight.T + bias``.

    `rounding` rounds the logits, as an implementation that stores them in half precision.
    """
    template = np.zeros((0, len(weight)), rows.template.dtype)
    return cross_entropy(
        Rows((rounding(rounding(row @ weight.T) + bias) for row in rows), template),
        targets,
        **options,
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


def _erf(x: np.ndarray) -> np.ndarray:
    return np.asarray([math.erf(number) for number in x.ravel()], x.dtype).reshape(x.shape)


def _gelu(x: np.ndarray, approximate: str = "none") -> np.ndarray:
    """Return ``x * P(normal <= x)`` or its tanh approximation; 0 at -inf."""
    x = np.maximum(x, x.dtype.type(-100))  # NaN stays NaN
    if approximate == "none":
        return x * (1 + _erf(x * x.dtype.type(math.sqrt(0.5)))) / 2
    return x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2


def _silu(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.where(x == -math.inf, 0, x / (1 + np.exp(-x))).astype(x.dtype)


#: Activation -> its definition for one row or a dense array.
ACTIVATIONS: dict[str, Callable[..., np.ndarray]] = {
    "relu": lambda x: np.maximum(x, x.dtype.type(0)),
    "gelu": _gelu,
    "silu": _silu,
    "erf": _erf,
}


def rope(
    rows: Rows,
    *,
    theta: float = 10000.0,
    interleaved: bool = False,
    start: Sequence[int] | None = None,
    rotary_dim: int | None = None,
    inv_freq: Sequence[float] | None = None,
    scaling: dict[str, Any] | None = None,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
) -> list[np.ndarray]:
    """Rotate pair i of the token at position p by ``p * theta ** (-2 i / rotary_dim)``.

    A pair is two adjacent elements, or one element of each half. Frequencies, or the cosine and the
    sine of each position and pair, may be given.
    """
    out = []
    for row, first_position in zip(rows, start or [0] * len(rows), strict=True):
        rotated, as_scalar = row.copy(), row.dtype.type
        if cos is not None:
            half = cos.shape[1]
        else:
            half = (rotary_dim or row.shape[-1]) // 2 if inv_freq is None else len(inv_freq)
        positions = np.arange(row.shape[0]) + first_position
        for i in range(half):
            first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
            if cos is not None and sin is not None:
                c, s = (x[positions, i].astype(row.dtype) for x in (cos, sin))
            else:
                frequency, factor = theta ** (-i / half) if inv_freq is None else inv_freq[i], 1.0
                if scaling is not None:
                    frequency, factor = _scaled(frequency, i, 2 * half, theta, **scaling)
                angle = positions.astype(row.dtype) * as_scalar(frequency)
                c, s = (f(angle) * as_scalar(factor) for f in (np.cos, np.sin))
            c, s = (x.reshape(-1, *(1,) * (row.ndim - 2)) for x in (c, s))
            rotated[..., first] = row[..., first] * c - row[..., second] * s
            rotated[..., second] = row[..., second] * c + row[..., first] * s
        out.append(rotated)
    return out


def _scaled(
    frequency: float,
    pair: int,
    dim: int,
    theta: float,
    rope_type: str,
    factor: float,
    **options: Any,
) -> tuple[float, float]:
    """Return the scaled frequency of one pair, and the factor of its cosine and sine."""
    if rope_type == "linear":
        return frequency / factor, 1.0
    length = options["original_max_position_embeddings"]
    if rope_type == "llama3":
        low, high = options["low_freq_factor"], options["high_freq_factor"]
        wavelength = 2 * math.pi / frequency
        if wavelength < length / high:
            return frequency, 1.0
        if wavelength > length / low:
            return frequency / factor, 1.0
        smooth = (length / wavelength - low) / (high - low)
        return (1 - smooth) * frequency / factor + smooth * frequency, 1.0

    def pair_with(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = max(math.floor(pair_with(32)), 0), min(math.ceil(pair_with(1)), dim - 1)
    ramp = min(max((pair - first) / (last - first), 0.0), 1.0)
    return frequency / factor * ramp + frequency * (1 - ramp), 0.1 * math.log(factor) + 1


# ---------------------------------------------------------------------------------------- attention
def _query_positions(queries: int, keys: int) -> np.ndarray:
    """Return the positions of the queries, as a column; the last query is at the last key."""
    return np.arange(queries)[:, None] + keys - queries


def attention_mask(queries: int, keys: int, causal: bool, window: Any) -> np.ndarray:
    """Return a (queries, keys) mask of the keys that each query sees.

    The last query is aligned with the last key.
    """
    query_positions, key_positions = _query_positions(queries, keys), np.arange(keys)
    mask = np.ones((queries, keys), bool)
    if causal:
        mask &= key_positions <= query_positions
    if isinstance(window, tuple):
        left, right = window
        if left is not None:
            mask &= key_positions >= query_positions - left
        if right is not None:
            mask &= key_positions <= query_positions + right
    elif window is not None:
        mask &= key_positions > query_positions - window
    return mask


def philox(counter: Sequence[int], key: Sequence[int]) -> list[int]:
    """Return the four words of Philox-4x32 with 7 rounds (Salmon et al., 2011)."""
    c, k, word = [*counter], [*key], 2**32
    for _ in range(7):
        first, third = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [
            (third // word) ^ c[1] ^ k[0],
            third % word,
            (first // word) ^ c[3] ^ k[1],
            first % word,
        ]
        k = [(k[0] + 0x9E3779B9) % word, (k[1] + 0xBB67AE85) % word]
    return c


def dropout_mask(
    seed: int, dropout: float, queries: int, keys: int, start: int, head: int
) -> np.ndarray:
    """Return whether dropout keeps the pairs (queries, keys) of a row that begins at `start`."""
    limit, kept = round(dropout * 2**16), np.zeros((queries, keys), bool)
    words: dict[tuple[int, int], list[int]] = {}
    for i, j in np.ndindex(queries, keys):
        group = i // 16 * 8 + i % 8, j // 16 * 4 + j % 8 // 2
        if group not in words:
            words[group] = philox((*group, start, head), (seed % 2**32, seed // 2**32))
        word = words[group][i // 8 % 2 * 2 + j // 8 % 2]
        kept[i, j] = (word // 2**16 if j % 2 else word % 2**16) >= limit
    return kept


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
    dropout: float = 0.0,
    seed: int = 0,
    rounding: Callable[[np.ndarray], np.ndarray] = lambda x: x,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return output and log-sum-exp of each row.

    ALiBi slopes are one number per head, or per row and head. A sink has no dropout, as its value
    is 0. `rounding` rounds scores and weights,
    as an implementation that stores them in half precision.
    """
    out, lse, start = [], [], 0
    for row, (row_q, row_k, row_v) in enumerate(zip(q, k, v, strict=True)):
        (queries, heads, head_dim), (keys, kv_heads, _) = row_q.shape, row_k.shape
        slopes = alibi_slopes
        if slopes is not None and np.ndim(slopes) == 2:
            slopes = slopes[row]
        as_scalar = row_q.dtype.type
        row_out = np.zeros((queries, heads, row_v.shape[2]), row_q.dtype)
        row_lse = np.full((queries, heads), -math.inf, row_q.dtype)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            values = row_v[:, kv_head]
            scores = row_q[:, head] @ row_k[:, kv_head].T
            scores = rounding(
                scores * as_scalar(1 / math.sqrt(head_dim) if scale is None else scale)
            )
            if softcap is not None:
                scores = as_scalar(softcap) * np.tanh(scores / as_scalar(softcap))
            if slopes is not None:
                distances = np.abs(_query_positions(queries, keys) - np.arange(keys))
                scores = scores - as_scalar(slopes[head]) * distances
            mask = attention_mask(queries, keys, causal, window)
            # A sink is a key that every query sees, with the value 0.
            if sinks is not None:
                sink = np.full((queries, 1), as_scalar(sinks[head]))
                scores = np.concatenate((scores, sink), axis=1)
                mask = np.concatenate((mask, np.ones((queries, 1), bool)), axis=1)
                values = np.concatenate((values, np.zeros((1, values.shape[1]), values.dtype)))
            sees_any_key = mask.any(axis=1)
            scores = np.where(mask, scores, as_scalar(-math.inf))[sees_any_key]
            maximum = np.max(scores, axis=1, keepdims=True, initial=-math.inf)
            total = np.sum(np.exp(scores - maximum), axis=1, keepdims=True)
            weights = np.exp(scores - maximum) / total
            if dropout:
                kept = dropout_mask(seed, dropout, queries, keys, start, head)[sees_any_key]
                weights = weights[:, :keys] * kept / as_scalar(1 - round(dropout * 2**16) / 2**16)
            row_out[sees_any_key, head] = rounding(weights) @ values[: weights.shape[1]]
            row_lse[sees_any_key, head] = (maximum + np.log(total))[:, 0]
        out.append(row_out)
        lse.append(row_lse)
        start += queries
    return out, lse


def round_to(dtype: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that rounds float32 to a half precision and back."""
    if dtype == "float16":
        return lambda x: x.astype(np.float16).astype(x.dtype)

    def bfloat16(x: np.ndarray) -> np.ndarray:
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
        nearest_even = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return (nearest_even & np.uint32(0xFFFF0000)).view(np.float32).astype(x.dtype)

    return bfloat16


def with_rounded_result(reference: Callable[..., Any], dtype: str) -> Callable[..., Any]:
    """Return `reference` with its result rounded to a half precision.

    Some libraries round products of half precision once, some also round partial products.
    """
    round_result = round_to(dtype)

    def low_precision(*args: Any) -> Any:
        result = reference(*args)
        if isinstance(result, list):
            return [round_result(np.asarray(row)) for row in result]
        return round_result(np.asarray(result))

    return low_precision
