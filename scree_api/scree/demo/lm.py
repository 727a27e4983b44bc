"""A decoder-only language model of bytes, written once for every array library: no padding, no mask, no loop over rows.

Rotary positions (Su et al., 2021), grouped-query attention (Ainslie et al., 2023), RMS norm (Zhang and Sennrich, 2019), a gated
feed-forward network (Shazeer, 2020) and one matrix for embedding and output (Press and Wolf, 2017). The weights are a flat dict,
and the sizes of the model are those of its weights.

>>> import numpy as np, scree
>>> from scree.demo import lm
>>> tokens = scree.pack([np.frombuffer(text, np.uint8).astype(np.int32) for text in (b"ragged", b"arrays!")])
>>> round(float(lm.loss(lm.weights(), tokens, np.asarray([True, True]))), 1)  # nothing is learned yet
5.8
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

import scree

Weights = Mapping[str, Any]
Attention = Callable[[Any, Any, Any, Any], Any]  # xp, queries, keys, values -> context

VOCABULARY = 256  # bytes
IGNORED = -100  # no byte follows; what cross-entropy passes over
HEAD_DIM = 16


def weights(
    *, layers: int = 2, width: int = 64, heads: int = 4, kv_heads: int = 2, seed: int = 0
) -> dict[str, np.ndarray]:
    """Random weights, float32."""
    rng = np.random.default_rng(seed)
    shapes = {"embedding": (VOCABULARY, width), "norm": (width,)}
    for i in range(layers):
        shapes |= {
            f"{i}.attention.norm": (width,), f"{i}.attention.query": (width, heads * HEAD_DIM),
            f"{i}.attention.key": (width, kv_heads * HEAD_DIM), f"{i}.attention.value": (width, kv_heads * HEAD_DIM),
            f"{i}.attention.output": (heads * HEAD_DIM, width), f"{i}.mlp.norm": (width,), f"{i}.mlp.gate": (width, 2 * width),
            f"{i}.mlp.up": (width, 2 * width), f"{i}.mlp.down": (2 * width, width),
        }  # fmt: skip
    found = {
        name: rng.standard_normal(shape, dtype=np.float32) * shape[0] ** -0.5
        for name, shape in shapes.items()
    }
    return {name: np.ones_like(x) if name.endswith("norm") else x for name, x in found.items()}


def loss(w: Weights, tokens: scree.Array, real: Any) -> Any:
    """Mean over all bytes but the first of each row: how badly it was predicted, in nats.

    Parameters
    ----------
    w
        The weights, arrays of the same library as the tokens.
    tokens
        (n, None) integers, see `scree.bucket`.
    real
        (n,) booleans: rows that count.
    """
    xp = scree.namespace(tokens)
    rows, place = scree.segment_ids(tokens), scree.positions(tokens)
    known = xp.take(real, rows, axis=0) & (
        place < xp.take(tokens.lengths, rows, axis=0) - 1
    )  # a next byte
    follows = xp.concat([tokens.values[1:], tokens.values[:1]], axis=0)
    targets = tokens.with_values(xp.where(known, follows, IGNORED))
    x = layers(xp, w, xp.take(w["embedding"], tokens, axis=0), attention)
    return xp.ragged.linear_cross_entropy(x, w["embedding"], targets)


def layers(xp: Any, w: Weights, x: Any, attend: Attention) -> Any:
    """All the layers and the last norm; `attend` is the only part in which tokens see one another."""
    norm, i = xp.ragged.rms_norm, 0
    while f"{i}.mlp.up" in w:
        y = norm(x, w[f"{i}.attention.norm"])
        y = attend(xp, *(y @ w[f"{i}.attention.{part}"] for part in ("query", "key", "value")))
        y, x = norm(y @ w[f"{i}.attention.output"], w[f"{i}.mlp.norm"], residual=x)
        gate = y @ w[f"{i}.mlp.gate"]
        x = x + (gate / (1 + xp.exp(-gate)) * (y @ w[f"{i}.mlp.up"])) @ w[f"{i}.mlp.down"]
        i += 1
    return norm(x, w["norm"])


def attention(xp: Any, q: scree.Array, k: scree.Array, v: scree.Array) -> scree.Array:
    """Every token sees those before it in its own row."""
    q, k, v = (
        x.with_values(xp.reshape(x.values, (x.total_length, -1, HEAD_DIM))) for x in (q, k, v)
    )
    q, k = xp.ragged.rope(q, k)
    context = xp.ragged.attention(q, k, v, causal=True)
    return context.with_values(xp.reshape(context.values, (context.total_length, -1)))


def padded_loss(w: Weights, tokens: Any, mask: Any) -> Any:
    """The same loss of a padded batch, with plain functions of the standard: the rival.

    Parameters
    ----------
    w
        The weights.
    tokens, mask
        (n, length) integers, any in the padding, and booleans, False in the padding.
    """
    xp = scree.namespace(tokens)
    n, length = tokens.shape

    def turn(x: Any) -> Any:
        """Rotary positions of (n, length, heads, HEAD_DIM)."""
        half = HEAD_DIM // 2
        wave = xp.exp(xp.arange(half, dtype=x.dtype) * (-math.log(10000.0) / half))
        angle = xp.arange(length, dtype=x.dtype)[:, None, None] * wave
        a, b, cos, sin = x[..., :half], x[..., half:], xp.cos(angle), xp.sin(angle)
        return xp.concat([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def attend(xp: Any, q: Any, k: Any, v: Any) -> Any:
        q, k, v = (xp.reshape(x, (n, length, -1, HEAD_DIM)) for x in (q, k, v))
        k, v = (xp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (turn(k), v))
        q, k, v = (xp.permute_dims(x, (0, 2, 1, 3)) for x in (turn(q), k, v))
        place = xp.arange(length)
        seen = (place[None, :] <= place[:, None])[None, None, :, :] & mask[:, None, None, :]
        scores = xp.where(seen, q @ xp.matrix_transpose(k) / math.sqrt(HEAD_DIM), -1e30)
        weight = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
        context = weight @ v / xp.sum(weight, axis=-1, keepdims=True)
        return xp.reshape(xp.permute_dims(context, (0, 2, 1, 3)), (n * length, -1))

    x = layers(xp, w, xp.take(w["embedding"], xp.reshape(tokens, (-1,)), axis=0), attend)
    follows = xp.concat([tokens[:, 1:], tokens[:, :1]], axis=1)
    known = xp.concat([mask[:, 1:], xp.zeros_like(mask[:, :1])], axis=1)
    targets = xp.reshape(xp.where(known, follows, IGNORED), (-1,))
    return xp.ragged.linear_cross_entropy(x, w["embedding"], targets)
