"""A sentence encoder, written once for every array library: BERT on ragged arrays, mean-pooled.

BERT is by Devlin et al., 2018. There is no padding, no mask, no loop over sentences, and no name of
an array library: `xp` is the namespace of the tokens. The weights are a flat dict with the names of
BERT's checkpoints, and matrices are stored as (in, out). The shapes of the weights determine the
sizes of the model.

>>> import numpy as np, scree
>>> from scree.demo import model, weights
>>> tokens = scree.pack([np.asarray([101, 7592, 102]), np.asarray([101, 7592, 2088, 999, 102])])
>>> model.encode(weights.random(layers=1, width=64), tokens).shape
(2, 64)
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import scree

Weights = Mapping[str, Any]
Attention = Callable[[Any, Any, Any, Any], Any]  # xp, queries, keys, values -> context

HEAD_DIM = 32
MAX_TOKENS = 512  # rows of BERT's position embedding
EPS = 1e-12


def encode(w: Weights, tokens: scree.Array) -> Any:
    """Embed each row of tokens as one vector of length 1.

    Parameters
    ----------
    w
        The weights, arrays of the same library as the tokens.
    tokens
        (n, None) integers, at most 512 per row.

    Returns
    -------
    array
        (n, width), dense. The dot product of two of its rows is the similarity of two sentences.
    """
    xp = scree.namespace(tokens)
    x = layers(xp, w, embed(xp, w, tokens), attention)
    return normalize(xp, xp.mean(x, axis=1))


def embed(xp: Any, w: Weights, tokens: scree.Array) -> scree.Array:
    """Return the sum of word, position and token-type embeddings, normalized."""
    positions = tokens.with_values(scree.positions(tokens))
    x = xp.take(w["embeddings.word_embeddings.weight"], tokens, axis=0)
    x = x + xp.take(w["embeddings.position_embeddings.weight"], positions, axis=0)
    return norm(
        xp, w, "embeddings.LayerNorm", x + w["embeddings.token_type_embeddings.weight"][0, :]
    )


def layers(xp: Any, w: Weights, x: Any, attend: Attention) -> Any:
    """Apply all layers; only `attend` mixes tokens."""
    i = 0
    while f"encoder.layer.{i}.output.dense.weight" in w:
        x = layer(xp, w, f"encoder.layer.{i}", x, attend)
        i += 1
    return x


def layer(xp: Any, w: Weights, name: str, x: Any, attend: Attention) -> Any:
    """Apply attention and a feed-forward network, each with a residual sum and a layer norm."""
    q, k, v = (linear(w, f"{name}.attention.self.{part}", x) for part in ("query", "key", "value"))
    context = linear(w, f"{name}.attention.output.dense", attend(xp, q, k, v))
    x = norm(xp, w, f"{name}.attention.output.LayerNorm", x + context)
    hidden = gelu(xp, linear(w, f"{name}.intermediate.dense", x))
    return norm(xp, w, f"{name}.output.LayerNorm", x + linear(w, f"{name}.output.dense", hidden))


def attention(xp: Any, q: scree.Array, k: scree.Array, v: scree.Array) -> scree.Array:
    """Apply self-attention within each row, with heads of 32."""
    shape = (q.total_length, q.values.shape[1] // HEAD_DIM, HEAD_DIM)
    q, k, v = (x.with_values(xp.reshape(x.values, shape)) for x in (q, k, v))
    context = xp.ragged.attention(q, k, v)
    return context.with_values(xp.reshape(context.values, (shape[0], shape[1] * HEAD_DIM)))


def linear(w: Weights, name: str, x: Any) -> Any:
    """Apply an affine map to each token."""
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def norm(xp: Any, w: Weights, name: str, x: Any) -> Any:
    """Apply layer normalization to each token."""
    return xp.ragged.layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], eps=EPS)


def gelu(xp: Any, x: Any) -> Any:
    """Return ``x * Phi(x)``, Phi being the normal distribution function, to 4e-7 in float32.

    The standard has no erf. Formula 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical
    Functions (1964), gives the tail ``1 - Phi(|x|)`` to 7.5e-8. The form ``max(x, 0) - |x| * tail``
    avoids cancellation where x is far below 0.
    """
    magnitude = xp.abs(x)
    t = 1 / (1 + 0.3275911 / math.sqrt(2) * magnitude)
    series = 0.254829592 + t * (
        -0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))
    )
    return xp.maximum(x, 0) - magnitude * t * series * xp.exp(x * x * -0.5) / 2


def normalize(xp: Any, x: Any) -> Any:
    """Divide each row by its Euclidean norm."""
    return x / xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True))
