"""Cross-entropy in an XLA loop over parts of the tokens.

The loop body is compiled once. The logits of one part are in memory at a time.
"""

from typing import Any

import jax
import jax.numpy as jnp

from ..dispatch.registry import register_kernel
from ..ops.cross_entropy import (
    LinearCrossEntropyCall,
    losses_of_part,
    reduce_token_losses,
    tokens_per_part,
)


def rejects(call: LinearCrossEntropyCall) -> str | None:
    """Return why the loop does not take the call."""
    if not isinstance(call.values, jax.Array):
        return "only JAX arrays run in a loop of XLA"
    if call.values.shape[0] <= tokens_per_part(call):
        return "the logits are few enough to be in memory at once"
    return None


@register_kernel("linear_cross_entropy", provider="scan", rejects=rejects)
def scan(call: LinearCrossEntropyCall) -> Any:
    """Run the standard implementation per part.

    The last part is padded with tokens that do not count.
    """
    total = call.values.shape[0]
    num_parts = -(-total // tokens_per_part(call))
    part_size = -(-total // num_parts)
    padded_total = num_parts * part_size

    def split(x: Any) -> Any:
        padded = jnp.pad(x, [(0, padded_total - total)] + [(0, 0)] * (x.ndim - 1))
        return jnp.reshape(padded, (num_parts, part_size, *x.shape[1:]))

    @jax.checkpoint
    def part_losses(part: Any) -> Any:
        x, labels, counted = part
        return losses_of_part(call, labels, counted, x, *call.parameters)

    losses = jax.lax.map(part_losses, tuple(map(split, (call.values, call.labels, call.counted))))
    losses = {name: jnp.reshape(x, (padded_total,))[:total] for name, x in losses.items()}
    return reduce_token_losses(call, losses)
