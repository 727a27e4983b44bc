"""The training loop of the language model on JAX, with optax; one compilation for each shape of batches."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from .train import moved


def losses(
    loss: Callable[..., Any], weights: dict[str, np.ndarray], batches: Iterable[Any], rate: float
) -> Iterator[float]:
    """The loss of each batch, before the step that it leads to."""
    import jax
    import optax

    w, adam = jax.device_put(weights), optax.adam(rate)
    state = adam.init(w)

    @jax.jit
    def step(w: Any, state: Any, batch: Any) -> Any:
        found, gradients = jax.value_and_grad(loss)(w, *batch)
        updates, state = adam.update(gradients, state)
        return optax.apply_updates(w, updates), state, found

    for batch in batches:
        w, state, found = step(w, state, [moved(x, jax.device_put) for x in batch])
        yield float(found)
