"""Cross-entropy by parts of the tokens in a loop that XLA keeps a loop: it is compiled once, and one part exists at a time."""

from typing import Any

import jax
import jax.numpy as jnp

from ..dispatch.registry import register_kernel
from ..ops.cross_entropy import LinearCrossEntropyCall, given, losses_of_part, part_size


def rejects(call: LinearCrossEntropyCall) -> str | None:
    """Why a loop does not run the call."""
    if not isinstance(call.values, jax.Array):
        return "only JAX arrays run in a loop of XLA"
    if call.values.shape[0] <= part_size(call):
        return "the logits are few enough to exist at once"
    return None


@register_kernel("linear_cross_entropy", provider="scan", rejects=rejects)
def scan(call: LinearCrossEntropyCall) -> Any:
    """The standard path of each part, the last one filled up with tokens that do not count."""
    total = call.values.shape[0]
    parts = -(-total // part_size(call))
    size = -(-total // parts)

    def cut(x: Any) -> Any:
        filled = jnp.pad(x, [(0, parts * size - total)] + [(0, 0)] * (x.ndim - 1))
        return jnp.reshape(filled, (parts, size, *x.shape[1:]))

    @jax.checkpoint
    def one(part: Any) -> Any:
        x, labels, known = part
        return losses_of_part(call.ignore_index, labels, known, x, *call.parameters)

    losses = jax.lax.map(one, tuple(map(cut, (call.values, call.labels, call.known))))
    return given(call, jnp.reshape(losses, (parts * size,))[:total])
