"""Ragged operations under the transforms of JAX, PyTorch and MLX.

What the tests of the three libraries share.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import scree

LENGTHS = [4, 0, 2, 70, 1, 33]
OTHER = [33, 1, 70, 2, 0, 4]
TOTAL, WIDTH, LONGEST = sum(LENGTHS), 8, 70
INDEX = np.random.default_rng(0).integers(0, TOTAL, TOTAL).astype(np.int32)

Rows = list[np.ndarray]


def values(seed: int = 0, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((TOTAL, WIDTH)).astype(dtype)


def weights(seed: int = 1, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((WIDTH, WIDTH)).astype(dtype) / 2


# ---------------------------------------------------- what is transformed: (namespace, tokens,
# index) -> array
def attention(xp: Any, x: scree.Array, index: Any) -> Any:
    """Two groups of two query heads, causal."""
    q, k = (
        x.with_values(xp.reshape(part, (-1, part.shape[1] // 2, 2)))
        for part in (x.values, x.values[:, :4])
    )
    return xp.ragged.attention(q, k, xp.tanh(k), causal=True)


def windowed(xp: Any, x: scree.Array, index: Any) -> Any:
    q = x.with_values(xp.reshape(x.values, (-1, 2, 4)))
    return xp.ragged.attention(q, q, q, window=(3, 5), softcap=2.0, return_lse=True)[0]


def norms(xp: Any, x: scree.Array, index: Any) -> Any:
    return xp.ragged.rms_norm(x, x.values[0, :]) + xp.ragged.layer_norm(
        x, x.values[1, :], x.values[2, :]
    )


def reductions(xp: Any, x: scree.Array, index: Any) -> Any:
    some = xp.astype(x.lengths, xp.float32)[:, None] > 0
    found = [f(x, axis=1) for f in (xp.max, xp.mean, xp.var)] + [xp.ragged.logsumexp(x)]
    found = [xp.where(some, f, xp.zeros_like(f)) for f in found]
    return xp.concat(
        [xp.sum(x, axis=1), xp.sum(xp.cumulative_sum(x, axis=1), axis=1), *found], axis=0
    )


def moves(xp: Any, x: scree.Array, index: Any) -> Any:
    moved = xp.ragged.gather(x, x.with_values(index))
    return xp.ragged.scatter_add(moved, index, x.total_length) + xp.ragged.scatter(
        x, index, x.total_length
    )


def losses(xp: Any, x: scree.Array, index: Any) -> Any:
    """Each fourth token counts for nothing; the first two tokens are the matrix of classes."""
    targets = x.with_values(xp.where(index % 4 == 3, -100, index % 2))
    each = xp.ragged.cross_entropy(x, targets, reduction="none")
    matrix = xp.stack([x.values[i, :] for i in range(2)])
    weights = xp.exp(-matrix[:, 0])
    with_options = xp.ragged.linear_cross_entropy(
        x, matrix, targets, class_weights=weights, label_smoothing=0.1, softcap=5.0, z_loss=0.1
    )
    mean = xp.ragged.linear_cross_entropy(x, matrix, targets)
    return each.values * (mean + with_options)


def gates(xp: Any, x: scree.Array, index: Any) -> Any:
    some, rest = xp.ragged.split(x, (2, 6))
    return xp.concat([some.values, xp.ragged.swiglu(rest).values], axis=1)


OPERATIONS: dict[str, Callable[..., Any]] = {
    "attention": attention,
    "windowed": windowed,
    "softmax": lambda xp, x, index: xp.ragged.softmax(x) + xp.ragged.log_softmax(x) / 10,
    "norms": norms,
    "gates": gates,
    "rope": lambda xp, x, index: xp.ragged.rope(x),
    "reductions": reductions,
    "losses": losses,
    "moves": moves,
}


def apply(name: str, x: scree.Array, w: Any, index: Any) -> Any:
    """An operation on ``x @ w``, as a dense array."""
    found = OPERATIONS[name](scree.namespace(x), x @ w, index)
    return found.values if isinstance(found, scree.Array) else found


def judged(xp: Any, found: Any) -> Any:
    """One number, which depends on every element of a result in a way of its own."""
    found = xp.reshape(found, (-1,))
    place = xp.cumulative_sum(xp.ones_like(found)) - 1
    return xp.mean(xp.sin(place) * xp.tanh(found))


def loss(name: str, x: scree.Array, w: Any, index: Any) -> Any:
    return judged(x.layout.xp, apply(name, x, w, index))


# ------------------------- the standard's functions, many in one compiled function: (namespace,
# tokens, index) -> results
def dims(xp: Any, x: scree.Array, index: scree.Array) -> list[Any]:
    n = x.batch_size
    y = xp.reshape(x, (n, None, 2, -1))
    return [
        y, xp.reshape(x, (-1, None, 4, 2)), xp.expand_dims(x, axis=1), xp.squeeze(x[..., None], -1),
        xp.permute_dims(y, (0, 2, 1, 3)), xp.moveaxis(y, -1, 1), xp.matrix_transpose(y), x.mT, xp.stack([x, x], axis=2),
        xp.broadcast_to(x[..., None], (n, None, 8, 3)), xp.broadcast_arrays(x, x[..., :1])[1], xp.unstack(x, axis=2)[1],
        xp.tril(y), xp.flip(x, axis=2), xp.roll(x, 1, axis=2), xp.repeat(x, 2, axis=2), xp.tile(x, (2,)), xp.diff(x, axis=2),
        xp.take(x, index.values[:2] % 8, axis=2), x[..., 1:3],
    ]  # fmt: skip


def tokens(xp: Any, x: scree.Array, index: scree.Array) -> list[Any]:
    return [
        xp.concat([x, x]), xp.concat([x, x], axis=1), xp.flip(x, axis=1), x[:, ::-1], xp.roll(x, 1, axis=1),
        xp.repeat(x, 2, axis=1), xp.tile(x, (1, 2, 1)), xp.sort(x, axis=1), xp.argsort(x, axis=1, descending=True),
        xp.cumulative_prod(x, axis=1), xp.cumulative_sum(x, axis=1, include_initial=True),
        xp.take_along_axis(x, xp.argsort(x, axis=1), axis=1), xp.take(x.values, index, axis=0),
        xp.isin(index, index.values[:3]), xp.isin(index.values[:3], index), xp.searchsorted(xp.sort(x.values[:, 0]), x),
        x[x.with_values(scree.positions(x))],
    ]  # fmt: skip


def folds(xp: Any, x: scree.Array, index: scree.Array) -> list[Any]:
    everything = [
        getattr(xp, f)(x, axis=axis)
        for f in ("sum", "mean", "std", "max")
        for axis in (None, (0, 1), (1, 2))
    ]
    kept = [
        getattr(xp, f)(x, axis=1, keepdims=True)
        for f in ("prod", "min", "any", "all", "count_nonzero")
    ]
    return [
        *everything, *kept, xp.argmax(x), xp.argmin(x, axis=1), xp.argmax(x, axis=2), xp.linalg.vector_norm(x, axis=1),
        xp.vecdot(x, x, axis=1),
    ]  # fmt: skip


def mixes(xp: Any, x: scree.Array, index: scree.Array) -> list[Any]:
    element, per_row = x.values[0, :], xp.sum(x, axis=1)[:, None, :]
    return [
        x + element, x * element, x - per_row, 1 - x, xp.clip(x, min=element), xp.where(x > 0, x, per_row),
        xp.bitwise_invert(index), xp.logical_not(x > 0), xp.tensordot(x, x.values[:8, :], axes=1), x @ x.values[:8, :],
        x @ element, xp.astype(x, xp.int32),
        scree.at(x)[..., 0].set(0.0), scree.at(x)[..., 1:].add(element[1:]),
    ]  # fmt: skip


def experts(xp: Any, x: scree.Array, index: scree.Array) -> list[Any]:
    return [x @ xp.broadcast_to(x.values[None, :8, :], (x.batch_size, 8, 8))]


STANDARD = {f.__name__: f for f in (dims, tokens, folds, mixes, experts)}


def standard(name: str, values: Any, index: Any, offsets: Any) -> list[Any]:
    """The results of one of these as dense arrays."""
    x = scree.from_cu_seqlens(values, offsets, max_length=LONGEST)
    found = STANDARD[name](scree.namespace(x), x, x.with_values(index))
    return [y.values if isinstance(y, scree.Array) else y for y in found]


# ------------------------------------------------------------------ the oracle: one plain loop over
# rows, float64
def softmax_of(score: np.ndarray) -> np.ndarray:
    weight = np.exp(score - score.max(axis=-1, keepdims=True))
    return weight / weight.sum(axis=-1, keepdims=True)


def attention_of(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, left: int, right: int, softcap: float | None
) -> np.ndarray:
    """Of one row; (heads, tokens, dim)."""
    k, v = (np.repeat(x, q.shape[0] // x.shape[0], axis=0) for x in (k, v))
    score = q @ np.swapaxes(k, 1, 2) / np.sqrt(q.shape[-1])
    score = score if softcap is None else softcap * np.tanh(score / softcap)
    away = np.arange(q.shape[1])[None, :] - np.arange(q.shape[1])[:, None]
    return np.swapaxes(
        softmax_of(np.where((away >= -left) & (away <= right), score, -np.inf)) @ v, 0, 1
    )


def heads(row: np.ndarray, dim: int) -> np.ndarray:
    return np.swapaxes(row.reshape(len(row), -1, dim), 0, 1)


def expected(name: str, x: np.ndarray, w: np.ndarray, lengths: list[int]) -> np.ndarray:
    """What `apply` gives."""
    x = x.astype(np.float64) @ w.astype(np.float64)
    rows = np.split(x, np.cumsum(lengths)[:-1])
    some = [row for row in rows if len(row)]
    if name == "attention":
        parts = [(heads(row, 2), heads(row[:, :4], 2)) for row in some]
        return np.concatenate([attention_of(q, k, np.tanh(k), TOTAL, 0, None) for q, k in parts])
    if name == "windowed":
        return np.concatenate([attention_of(*[heads(row, 4)] * 3, 3, 5, 2.0) for row in some])
    if name == "softmax":
        weight = np.concatenate([softmax_of(row.T).T for row in some])
        return weight + np.log(weight) / 10
    if name == "norms":
        centered = x - x.mean(axis=1, keepdims=True)
        rms = x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-6) * x[0]
        return (
            rms + centered / np.sqrt((centered**2).mean(axis=1, keepdims=True) + 1e-5) * x[1] + x[2]
        )
    if name == "rope":
        angle = np.concatenate([np.arange(n) for n in lengths])[:, None] * 10000.0 ** (
            -np.arange(4) / 4
        )
        a, b, cos, sin = x[:, :4], x[:, 4:], np.cos(angle), np.sin(angle)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)
    if name == "gates":
        return np.concatenate([x[:, :2], x[:, 2:5] / (1 + np.exp(-x[:, 2:5])) * x[:, 5:]], axis=1)
    if name == "losses":

        def of(logits: np.ndarray) -> np.ndarray:
            each = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(x)), INDEX % 2]
            return np.where(INDEX % 4 == 3, 0, each)

        counted = INDEX % 4 != 3
        mean = of(x @ x[:2].T).sum() / np.count_nonzero(counted)
        capped, weights = 5 * np.tanh(x @ x[:2].T / 5)[counted], np.exp(-x[:2, 0])
        lse = np.log(np.exp(capped).sum(axis=1))
        goals = 0.9 * np.eye(2)[INDEX[counted] % 2] + 0.05
        with_options = (goals * weights * (lse[:, None] - capped)).sum()
        with_options /= weights[INDEX[counted] % 2].sum()
        return of(x) * (mean + with_options + 0.1 * np.mean(lse**2))
    if name == "reductions":
        none = np.zeros(WIDTH)
        per_row: list[Callable[[np.ndarray], np.ndarray]] = [
            lambda row: row.sum(axis=0), lambda row: row.cumsum(axis=0).sum(axis=0), lambda row: row.max(axis=0),
            lambda row: row.mean(axis=0), lambda row: row.var(axis=0), lambda row: np.log(np.exp(row).sum(axis=0)),
        ]  # fmt: skip
        return np.stack([f(row) if len(row) else none for f in per_row for row in rows])
    added, put = np.zeros_like(x), np.zeros_like(x)
    for to, value, moved in zip(INDEX, x, x[INDEX]):
        added[to], put[to] = added[to] + moved, value
    return added + put


def expected_loss(name: str, x: np.ndarray, w: np.ndarray, lengths: list[int]) -> float:
    found = expected(name, x, w, lengths).reshape(-1)
    return float(np.mean(np.sin(np.arange(found.size)) * np.tanh(found)))


def slope(
    name: str, lengths: list[int], step: float = 1e-6
) -> tuple[np.ndarray, np.ndarray, float]:
    """A direction for tokens and weights, and the derivative of the loss along it.

    The derivative is a central difference.
    """
    dx, dw = values(2, np.float64), weights(3, np.float64)
    x, w = values(dtype=np.float64), weights(dtype=np.float64)
    up, down = (expected_loss(name, x + s * dx, w + s * dw, lengths) for s in (step, -step))
    return dx, dw, (up - down) / (2 * step)


@pytest.mark.parametrize("name", OPERATIONS)
def test_oracle_agrees_with_numpy(name: str) -> None:
    for lengths in (LENGTHS, OTHER):
        x = scree.from_lengths(values(dtype=np.float64), lengths)
        np.testing.assert_allclose(
            apply(name, x, weights(dtype=np.float64), INDEX),
            expected(name, x.values, weights(dtype=np.float64), lengths),
            rtol=1e-9,
            atol=1e-9,
        )
