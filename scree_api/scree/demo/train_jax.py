"""The training loop of the language model on JAX, with optax.

The step compiles once per shape of the batches.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from .train import to_library


def losses(
    loss: Callable[..., Any],
    weights: dict[str, np.ndarray],
    batches: Iterable[Any],
    learning_rate: float,
) -> Iterator[float]:
    """Train on the batches, and yield the loss of each before its update; see `train.Losses`."""
    import jax
    import optax

    w, adam = jax.device_put(weights), optax.adam(learning_rate)
    state = adam.init(w)

    @jax.jit
    def step(w: Any, state: Any, batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(w, *batch)
        updates, state = adam.update(gradients, state)
        return optax.apply_updates(w, updates), state, value

    for batch in batches:
        w, state, value = step(w, state, [to_library(x, jax.device_put) for x in batch])
        yield float(value)
