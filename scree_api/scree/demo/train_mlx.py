"""The training loop of the language model on MLX, with its own optimizer; lazy until the loss is asked for."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from .train import moved


def losses(
    loss: Callable[..., Any], weights: dict[str, np.ndarray], batches: Iterable[Any], rate: float
) -> Iterator[float]:
    """The loss of each batch, before the step that it leads to."""
    import mlx.core as mx
    from mlx.optimizers import Adam

    w, adam = {name: mx.array(x) for name, x in weights.items()}, Adam(rate, bias_correction=True)
    for batch in batches:
        found, gradients = mx.value_and_grad(loss)(w, *(moved(x, mx.array) for x in batch))
        w = adam.apply_gradients(gradients, w)
        mx.eval(found, w, adam.state)
        yield float(found)
