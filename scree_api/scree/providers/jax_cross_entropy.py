"""Cross-entropy by parts of the tokens in an XLA loop.

One part is compiled once and exists at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..dispatch.registry import register_kernel
from ..ops.cross_entropy import (
    LinearCrossEntropyCall,
    losses_of_part,
    reduce_losses,
    tokens_per_part,
)


def rejects(call: LinearCrossEntropyCall) -> str | None:
    """Return why the loop does not take the call."""
    if not isinstance(call.values, jax.Array):
        return "only JAX arrays run in a loop of XLA"
    if call.values.shape[0] <= tokens_per_part(call):
        return "the logits are few enough to exist at once"
    return None


@register_kernel("linear_cross_entropy", provider="scan", rejects=rejects)
def scan(call: LinearCrossEntropyCall) -> Any:
    """Run the standard implementation per part.

    The last part is padded with tokens that do not count.
    """
    total = call.values.shape[0]
    parts = -(-total // tokens_per_part(call))
    size = -(-total // parts)

    def cut(x: Any) -> Any:
        filled = jnp.pad(x, [(0, parts * size - total)] + [(0, 0)] * (x.ndim - 1))
        return jnp.reshape(filled, (parts, size, *x.shape[1:]))

    @jax.checkpoint
    def one(part: Any) -> Any:
        x, labels, counted = part
        return losses_of_part(call.ignore_index, labels, counted, x, *call.parameters)

    losses = jax.lax.map(one, tuple(map(cut, (call.values, call.labels, call.counted))))
    return reduce_losses(call, jnp.reshape(losses, (parts * size,))[:total])
