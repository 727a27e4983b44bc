"""A decoder-only language model of bytes, written once for every array library.

There is no padding, no mask, and no loop over rows. The weights are a flat dict. The shapes of the
weights determine the sizes of the model. The parts of the model are:

- rotary positions (Su et al., 2021);
- grouped-query attention (Ainslie et al., 2023);
- RMS norm (Zhang and Sennrich, 2019);
- a gated feed-forward network (Shazeer, 2020);
- one matrix for embedding and output (Press and Wolf, 2017).

>>> import numpy as np, scree
>>> from scree.demo import lm
>>> texts = (b"ragged", b"arrays!")
>>> tokens = scree.pack([np.frombuffer(text, np.uint8).astype(np.int32) for text in texts])
>>> row_mask = np.asarray([True, True])
>>> round(float(lm.loss(lm.weights(), tokens, row_mask)), 1)  # untrained
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
IGNORED = -100  # target of a token without a next byte; cross-entropy skips it
HEAD_DIM = 16


def weights(
    *, layers: int = 2, width: int = 64, heads: int = 4, kv_heads: int = 2, seed: int = 0
) -> dict[str, np.ndarray]:
    """Return random float32 weights.

    Parameters
    ----------
    layers, width, heads, kv_heads
        Sizes of the model. `heads` is a multiple of `kv_heads`.
    seed
        Seed of the random generator.

    Returns
    -------
    dict
        NumPy arrays by name. Weights of norms are ones.
    """
    rng = np.random.default_rng(seed)
    shapes = {"embedding": (VOCABULARY, width), "norm": (width,)}
    for i in range(layers):
        shapes |= {
            f"{i}.attention.norm": (width,),
            f"{i}.attention.query": (width, heads * HEAD_DIM),
            f"{i}.attention.key": (width, kv_heads * HEAD_DIM),
            f"{i}.attention.value": (width, kv_heads * HEAD_DIM),
            f"{i}.attention.output": (heads * HEAD_DIM, width),
            f"{i}.mlp.norm": (width,),
            f"{i}.mlp.gate": (width, 2 * width),
            f"{i}.mlp.up": (width, 2 * width),
            f"{i}.mlp.down": (2 * width, width),
        }
    random = {
        name: rng.standard_normal(shape, dtype=np.float32) * shape[0] ** -0.5
        for name, shape in shapes.items()
    }
    return {name: np.ones_like(x) if name.endswith("norm") else x for name, x in random.items()}


def loss(w: Weights, tokens: scree.Array, row_mask: Any) -> Any:
    """Return the mean cross-entropy of next-byte prediction, in nats per byte.

    The first byte of each row has no prediction and does not count.

    Parameters
    ----------
    w
        The weights, arrays of the same library as the tokens.
    tokens
        (n, None) integers, see `scree.bucket`.
    row_mask
        (n,) booleans, True for rows that count.

    Returns
    -------
    array
        The loss, of shape ().
    """
    xp = scree.namespace(tokens)
    row_ids, positions = scree.segment_ids(tokens), scree.positions(tokens)
    has_next = positions < xp.take(tokens.lengths, row_ids, axis=0) - 1
    has_target = xp.take(row_mask, row_ids, axis=0) & has_next
    next_bytes = xp.concat([tokens.values[1:], tokens.values[:1]], axis=0)
    targets = tokens.with_values(xp.where(has_target, next_bytes, IGNORED))
    x = layers(xp, w, xp.take(w["embedding"], tokens, axis=0), attention)
    return xp.ragged.linear_cross_entropy(x, w["embedding"], targets)


def layers(xp: Any, w: Weights, x: Any, attend: Attention) -> Any:
    """Apply all layers and the last norm; only `attend` mixes tokens."""
    norm, i = xp.ragged.rms_norm, 0
    while f"{i}.mlp.up" in w:
        y = norm(x, w[f"{i}.attention.norm"])
        qkv = (y @ w[f"{i}.attention.{part}"] for part in ("query", "key", "value"))
        context = attend(xp, *qkv)
        y, x = norm(context @ w[f"{i}.attention.output"], w[f"{i}.mlp.norm"], residual=x)
        gate = y @ w[f"{i}.mlp.gate"]
        x = x + (gate / (1 + xp.exp(-gate)) * (y @ w[f"{i}.mlp.up"])) @ w[f"{i}.mlp.down"]
        i += 1
    return norm(x, w["norm"])


def attention(xp: Any, q: scree.Array, k: scree.Array, v: scree.Array) -> scree.Array:
    """Apply causal self-attention within each row."""
    q, k, v = (
        x.with_values(xp.reshape(x.values, (x.total_length, -1, HEAD_DIM))) for x in (q, k, v)
    )
    q, k = xp.ragged.rope(q, k)
    context = xp.ragged.attention(q, k, v, causal=True)
    return context.with_values(xp.reshape(context.values, (context.total_length, -1)))


def padded_loss(w: Weights, tokens: Any, mask: Any) -> Any:
    """Return the loss of a padded batch, computed with standard functions only.

    It is the baseline for `loss`.

    Parameters
    ----------
    w
        The weights.
    tokens, mask
        (n, length) integers, arbitrary in the padding, and booleans, False in the padding.

    Returns
    -------
    array
        The loss, of shape ().
    """
    xp = scree.namespace(tokens)
    n, length = tokens.shape

    def rotate(x: Any) -> Any:
        """Apply rotary positions to (n, length, heads, HEAD_DIM)."""
        half = HEAD_DIM // 2
        frequencies = xp.exp(xp.arange(half, dtype=x.dtype) * (-math.log(10000.0) / half))
        angle = xp.arange(length, dtype=x.dtype)[:, None, None] * frequencies
        cos, sin = xp.cos(angle), xp.sin(angle)
        x1, x2 = x[..., :half], x[..., half:]
        return xp.concat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1)

    def attend(xp: Any, q: Any, k: Any, v: Any) -> Any:
        q, k, v = (xp.reshape(x, (n, length, -1, HEAD_DIM)) for x in (q, k, v))
        k, v = (xp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (rotate(k), v))
        q, k, v = (xp.permute_dims(x, (0, 2, 1, 3)) for x in (rotate(q), k, v))
        positions = xp.arange(length)
        causal = positions[None, :] <= positions[:, None]
        visible = causal[None, None, :, :] & mask[:, None, None, :]
        scores = xp.where(visible, q @ xp.matrix_transpose(k) / math.sqrt(HEAD_DIM), -1e30)
        weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
        context = weights @ v / xp.sum(weights, axis=-1, keepdims=True)
        return xp.reshape(xp.permute_dims(context, (0, 2, 1, 3)), (n * length, -1))

    x = layers(xp, w, xp.take(w["embedding"], xp.reshape(tokens, (-1,)), axis=0), attend)
    next_bytes = xp.concat([tokens[:, 1:], tokens[:, :1]], axis=1)
    has_target = xp.concat([mask[:, 1:], xp.zeros_like(mask[:, :1])], axis=1)
    targets = xp.reshape(xp.where(has_target, next_bytes, IGNORED), (-1,))
    return xp.ragged.linear_cross_entropy(x, w["embedding"], targets)
