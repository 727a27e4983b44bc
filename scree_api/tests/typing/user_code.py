"""Code of a user, which strict type checkers accept: a classifier with masked pooling."""

from __future__ import annotations

from typing import Any

import numpy as np

import scree
import scree.xp.numpy as xnp


class Classifier:
    """Embeds tokens, attends, pools each row by its mask, and gives class scores."""

    def __init__(self, table: Any, head: Any, num_heads: int = 2) -> None:
        self.table, self.head, self.num_heads = table, head, num_heads

    def __call__(self, tokens: scree.Array, mask: scree.Array) -> Any:
        xp = scree.namespace(tokens, mask)
        x: scree.Array = xp.take(self.table, tokens, axis=0)
        y = x * 2.0 - 1.0 / (1.0 + xp.exp(-x))
        heads = y.with_values(xp.reshape(y.values, (y.total_length, self.num_heads, -1)))
        out = xp.ragged.attention(heads, heads, heads, causal=False, scale=0.5)
        z = y + out.with_values(xp.reshape(out.values, y.values.shape))
        normed = xp.ragged.rms_norm(z, xp.ones((z.values.shape[1],), dtype=z.dtype))
        weight = xp.astype(mask, z.dtype)
        pooled = xp.sum(normed * xp.expand_dims(weight, axis=2), axis=1)
        counts = xp.expand_dims(xp.sum(weight, axis=1), axis=1)
        return pooled / xp.maximum(counts, 1.0) @ self.head


def statistics(x: scree.Array) -> dict[str, Any]:
    """Return numbers of each row."""
    xp = scree.namespace(x)
    centered = x - xp.mean(x, axis=1, keepdims=True)
    positive: scree.Array = x[x > 0]
    total: scree.Array = abs(-centered) ** 2 + 3 * centered
    is_equal: scree.Array = x == centered
    firsts = x[:, 0]
    return {
        "largest": xp.max(x, axis=1),
        "order": xp.argsort(x, axis=1).tolist(),
        "positive": positive.lengths,
        "rows": [row.shape for row in scree.unpack(x[1:])],
        "softmax": xp.ragged.softmax(total).values,
        "equal": xp.all(is_equal, axis=1),
        "firsts": firsts.sum(),
        "clipped": xp.clip(x, min=0.0).at[0].set(1.0).tolist(),
        "device": str(x.device),
        "shape": [size for size in x.shape if size is not None],
    }


def generic(xp: scree.Namespace, x: scree.Array, rows: list[scree.Array]) -> scree.Array:
    """Return arrays joined, with functions of a namespace that is an argument."""
    joined = xp.concat([x, *rows], axis=0)
    return xp.where(joined > xp.pi, joined, xp.zeros_like(joined))


tokens = scree.from_lists([[1, 2, 3], [4]])
mask = tokens > 1
scores = Classifier(np.ones((5, 4)), np.ones((4, 2)))(tokens, mask)
doubled = xnp.add(xnp.astype(tokens, xnp.float32), 1.0) * 2
print(scores.shape, statistics(doubled)["rows"], generic(xnp, doubled, [doubled]).batch_size)
