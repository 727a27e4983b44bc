"""The encoder of `model` on a padded batch, with a mask and standard functions only: the baseline.

Weights and layers are shared with `model`. Tokens are stored end to end, (n * length, width), as in
`model`, so that each linear map is one product of two matrices. The parts that involve other tokens
differ: positions, attention, and the mean.
"""

import math
from typing import Any

import scree

from .model import HEAD_DIM, Weights, layers, norm, normalize


def encode(w: Weights, tokens: Any, mask: Any) -> Any:
    """Embed each row of a padded batch as one vector of length 1.

    Parameters
    ----------
    w
        The weights, see `scree.demo.weights`.
    tokens
        (n, length) integers; the padding may contain any token of the vocabulary.
    mask
        (n, length) booleans, False in the padding.

    Returns
    -------
    array
        (n, width)
    """
    xp = scree.namespace(tokens)

    def attention(xp: Any, q: Any, k: Any, v: Any) -> Any:
        shape = (*mask.shape, q.shape[-1] // HEAD_DIM, HEAD_DIM)
        q, k, v = (xp.permute_dims(xp.reshape(x, shape), (0, 2, 1, 3)) for x in (q, k, v))
        scores = (q * (1 / math.sqrt(HEAD_DIM))) @ xp.matrix_transpose(k)
        scores = xp.where(mask[:, None, None, :], scores, -math.inf)
        weights = xp.exp(scores - xp.max(scores, axis=-1, keepdims=True))
        context = weights @ v / xp.sum(weights, axis=-1, keepdims=True)
        context = xp.permute_dims(context, (0, 2, 1, 3))
        return xp.reshape(context, (mask.shape[0] * mask.shape[1], -1))

    x = layers(xp, w, embed(xp, w, tokens), attention)
    x, is_token = xp.reshape(x, (*mask.shape, -1)), xp.astype(mask, x.dtype)[:, :, None]
    return normalize(xp, xp.sum(x * is_token, axis=1) / xp.sum(is_token, axis=1))


def embed(xp: Any, w: Weights, tokens: Any) -> Any:
    """Return the normalized sum of word, position and token-type embeddings.

    The shape is (n * length, width).
    """
    x = xp.take(w["embeddings.word_embeddings.weight"], xp.reshape(tokens, (-1,)), axis=0)
    positions = w["embeddings.position_embeddings.weight"][: tokens.shape[1], :]
    x = xp.reshape(x, (*tokens.shape, -1)) + positions
    x = xp.reshape(x, (-1, x.shape[-1])) + w["embeddings.token_type_embeddings.weight"][0, :]
    return norm(xp, w, "embeddings.LayerNorm", x)
