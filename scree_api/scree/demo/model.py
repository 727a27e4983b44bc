"""A sentence encoder, written once for every array library: BERT (Devlin et al., 2018) on ragged arrays, mean-pooled.

No padding, no mask, no loop over sentences, and not a word about the library underneath: `xp` is whatever the tokens are made
of. The weights are a flat dict under the names of BERT's checkpoints, matrices stored (in, out), so that the sizes of the
model are those of its weights.

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
MAX_TOKENS = 512  # positions that BERT knows
EPS = 1e-12


def encode(w: Weights, tokens: scree.Array) -> Any:
    """Embed each row of tokens as one vector of length 1.

    Parameters
    ----------
    w
        The weights, arrays of the same library as the tokens.
    tokens
        (n, None) integers, of which a row has at most 512.

    Returns
    -------
    array
        (n, width), dense. The dot product of two of its rows says how alike two sentences are.
    """
    xp = scree.namespace(tokens)
    x = layers(xp, w, embed(xp, w, tokens), attention)
    return normalize(xp, xp.mean(x, axis=1))


def embed(xp: Any, w: Weights, tokens: scree.Array) -> scree.Array:
    """What a token is, and where it stands in its row."""
    positions = tokens.with_values(scree.positions(tokens))
    x = xp.take(w["embeddings.word_embeddings.weight"], tokens, axis=0)
    x = x + xp.take(w["embeddings.position_embeddings.weight"], positions, axis=0)
    return norm(
        xp, w, "embeddings.LayerNorm", x + w["embeddings.token_type_embeddings.weight"][0, :]
    )


def layers(xp: Any, w: Weights, x: Any, attend: Attention) -> Any:
    """All the layers; `attend` is the only part in which tokens see one another."""
    i = 0
    while f"encoder.layer.{i}.output.dense.weight" in w:
        x = layer(xp, w, f"encoder.layer.{i}", x, attend)
        i += 1
    return x


def layer(xp: Any, w: Weights, name: str, x: Any, attend: Attention) -> Any:
    """Attention, then a feed-forward network on each token; each is added to its input, and the sum normalized."""
    q, k, v = (linear(w, f"{name}.attention.self.{part}", x) for part in ("query", "key", "value"))
    context = linear(w, f"{name}.attention.output.dense", attend(xp, q, k, v))
    x = norm(xp, w, f"{name}.attention.output.LayerNorm", x + context)
    wide = gelu(xp, linear(w, f"{name}.intermediate.dense", x))
    return norm(xp, w, f"{name}.output.LayerNorm", x + linear(w, f"{name}.output.dense", wide))


def attention(xp: Any, q: scree.Array, k: scree.Array, v: scree.Array) -> scree.Array:
    """Every token sees the tokens of its own row, in heads of 32."""
    shape = (q.total_length, q.values.shape[1] // HEAD_DIM, HEAD_DIM)
    q, k, v = (x.with_values(xp.reshape(x.values, shape)) for x in (q, k, v))
    context = xp.ragged.attention(q, k, v)
    return context.with_values(xp.reshape(context.values, (shape[0], shape[1] * HEAD_DIM)))


def linear(w: Weights, name: str, x: Any) -> Any:
    """An affine map of each token."""
    return x @ w[f"{name}.weight"] + w[f"{name}.bias"]


def norm(xp: Any, w: Weights, name: str, x: Any) -> Any:
    """Layer normalization of each token."""
    return xp.ragged.layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], eps=EPS)


def gelu(xp: Any, x: Any) -> Any:
    """``x * Phi(x)``, Phi being the normal distribution function, to 4e-7 in float32.

    The standard has no erf: 7.1.26 of Abramowitz and Stegun, Handbook of Mathematical Functions (1964), gives the tail
    ``1 - Phi(|x|)`` to 7.5e-8. As ``max(x, 0) - |x| * tail`` nothing cancels where x is far below 0.
    """
    size = xp.abs(x)
    t = 1 / (1 + 0.3275911 / math.sqrt(2) * size)
    series = 0.254829592 + t * (
        -0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))
    )
    return xp.maximum(x, 0) - size * t * series * xp.exp(x * x * -0.5) / 2


def normalize(xp: Any, x: Any) -> Any:
    """Each row, divided by its length."""
    return x / xp.sqrt(xp.sum(x * x, axis=-1, keepdims=True))
